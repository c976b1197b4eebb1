"""Proximal policy optimisation (PPO) of a language model against a reward (RLHF).

Papers: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2016 (arXiv 1506.02438); the KL-penalised
reward and its controller, Ziegler et al. 2019 (arXiv 1909.08593); details, Huang et al. 2024 (arXiv 2403.17031).
Code of Ziegler et al., whose choices this follows where the papers are silent:
https://github.com/openai/lm-human-preferences/blob/f774e89b9e3762a03b7f3953189861979bee1775/lm_human_preferences/train_policy.py
Unlike that code, the value head is an MLP with torch's initial weights (there linear and zero), rewards are not
whitened by default, and advantages are whitened once per iteration, not per minibatch. There is no entropy bonus (PPO
Eq. 9).

    r_t = -beta KL_t, plus the score at the last token     Ziegler Eq. 2            token_rewards, kl_penalty
    A_t = sum_l (gamma lam)^l delta_{t+l}                  GAE Eq. 16               gae, masked_whiten
    max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))        PPO Eq. 7                policy_loss
    half the larger error of value and clipped value       code of Ziegler et al.   value_loss
    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)   their code         next_kl_coef

How this differs from TRL's and trlX's PPO (algos/MIGRATION.md has the details):
- One function, `line_logprobs`, gives the log-probabilities of rollout, reference and update, temperature included, so
  the first ratio is 1, to rounding. Sampled ids are kept, never decoded and tokenised again.
- Whitening, KL and loss are over the response tokens of the global batch: neither micro-batches, processes nor padding
  change them. The score is placed on the last sampled token (the end token where there is one), which is trained.

    accelerate launch algos/ppo.py                                 # random walks, on one CPU
    accelerate launch algos/ppo.py --model my_model/ --dataset prompts.jsonl --reward my_reward.py:score \
        --max-new-tokens 32 --num-layers-unfrozen 2

Dimension key: B episodes, R trained tokens of an episode, N of all episodes, n of a micro-batch. A line is what the
model reads in one row, here one example (ids, labels, episode); a label is -100 where a token is not trained.
"""

import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, Share, StopString, cli
from common.errors import InputError
from common.functions import build, loading
from common.launch import accumulate, gather_list, local_rows, on_main, prepare, reduce_sums, require_finite, unsharded
from common.lm.adapters import for_sampling, train_adapters
from common.lm.chat import is_chat
from common.lm.classifier import RewardModel, raise_heads
from common.lm.evaluation import evaluate_sets, log_episodes, text_arguments
from common.lm.load import lines_of_use, load_decoder, load_lm, load_pretrained, make_reference, saved_heads
from common.lm.logprobs import in_float32, line_logprobs, token_entropies
from common.lm.own_rollouts import call_rollout, own_rollout
from common.lm.sampling import have_ended, sample, uniforms
from common.lm.structure import draw_layers, freeze, max_positions
from common.lm.tokens import decode, encode_prompts, int32, longest_first, pad_rows, split_lines, tell_unended_turns
from common.report import screen
from common.rows import longest_rows, read_data, set_flag, set_prefix
from common.run import Run, closes_run
from common.seeding import rng

HEAD_FILE = "value_head.safetensors"  # of an export, beside the weights of the model
TASK = "benchmarks/tasks/randomwalks/ppo.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """Proximal policy optimisation of a language model."""

    required = (*RunArgs.required, "reward")

    # ---- algorithm
    reward: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> one number per sample, or a list with one per token, or
    {"score": these, name: further columns to log}. Or the directory or hub id of a sequence classifier (with :label if
    it has several) or of a LoRA adapter for one. outputs keep special tokens that neither begin, end nor pad."""
    total_episodes: Count = 65536
    """Length of the run in episodes (one prompt with one response), rounded down to whole iterations."""
    rollout_batch_size: Count | None = None
    """Episodes per iteration, over all processes. Default: 512 (code of Ziegler et al.), or --total-episodes if that is
    less."""
    ppo_epochs: Count = 4
    """Passes over the episodes of an iteration (code of Ziegler et al.: 4)."""
    ref_model: str | None = None
    """Reference model for the KL, given like --model; default: a frozen copy of --model at the start."""
    kl_coef: NonNegative = 0.05
    """Weight beta of the per-token KL penalty (Ziegler et al. 2019, Eq. 2; Huang et al. 2024: 0.05); 0 only logs it."""
    kl_kind: Literal["kl", "abs", "mse", "k3"] = "kl"
    """KL estimator in the penalty, with x = logprob - ref_logprob: x, |x|, x^2 / 2, or exp(-x) - 1 + x."""
    kl_target: Positive | None = None
    """Adapt --kl-coef so that the KL per sequence (objective/kl) approaches this; default: a fixed coefficient."""
    kl_horizon: Count = 10000
    """Number of episodes over which the adaptive coefficient adjusts."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of GAE."""
    cliprange: NonNegative = 0.2
    """Epsilon of the clipped policy loss (PPO Eq. 7)."""
    cliprange_value: NonNegative = 0.2
    """Clip the change of a value to this, in units of the reward; 0: no clipping."""
    vf_coef: NonNegative = 0.1
    """Weight of the value loss (Ziegler et al. 2019: 0.1). The value loss grows with the squared reward, but the
    whitened advantages do not, so rewards far below 1 may need a larger weight."""
    value_head: Literal["linear", "mlp"] = "mlp"
    """Head on the policy's last hidden states: one linear layer, or H -> 2H -> ReLU -> 1. If the --model directory has
    a value head, that one is used."""
    value_head_init: Literal["zeros", "normal", "default"] = "default"
    """Initial last layer of a new head: zeros, normal with deviation 0.2 and bias 0, or torch's default."""
    detach_value_trunk: bool = False
    """Train only the value head with the value loss, not the policy's blocks."""
    value_model: str | None = None
    """Critic with a trunk of its own: a language model, which gets a linear head of zeros, or a classifier with one
    label, such as a reward model or the value_model/ of a run. Default: a value head on the policy's trunk."""
    value_lr: Positive | None = None
    """Peak learning rate of the critic: of the value head alone, or with --value-model of all of it; default: --lr."""
    value_warmup: Natural = 0
    """First iterations that train the critic alone; the policy, its trunk included, and its schedule begin then."""
    score_scaling: Literal["none", "running", "running-norm", "ref", "ref-norm"] = "none"
    """Divide scores by the standard deviation of all scores so far (running) or of the first rollout's scores (ref).
    -norm subtracts their mean first."""
    score_clip: NonNegative = 0.0
    """Clip scores, after scaling, to [-this, this]; 0: no clipping."""
    missing_eos_penalty: NonNegative = 0.0
    """Subtract this, after scaling and clipping, from the score of a response that ends with neither an end token nor a
    --stop string; with --rollout, of one that was cut at --max-new-tokens."""
    whiten_rewards: bool = False
    """Scale what the token rewards deviate from their mean to a standard deviation of 1; the mean stays."""
    early_stop_kl: NonNegative = 0.0
    """End an iteration's PPO epochs after one whose mean policy/approxkl exceeds this; 0: never."""
    ratio_threshold: NonNegative = 0.0
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10); 0: never."""

    # ---- sampling
    max_new_tokens: Count = 53
    """Maximum length of a response, in tokens (Huang et al. 2024: 53)."""
    min_length_limit: Count | None = None
    """Draw the maximum length of each rollout response uniformly from this to --max-new-tokens."""
    temperature: Positive = 1.0
    """Sampling temperature of rollouts. Log-probabilities are those of the distribution at this temperature."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a response; a shell writes a newline as $'\\n'. Tokens up to the one that completes the string
    are kept and trained. Reward and metric see the text before the string, without trailing space."""
    rollout: str | None = None
    """file.py:function(sample, prompt_ids, **columns) -> a list of (ids, trained) per row: responses with tools, of
    several turns or of another engine (algos/README.md, "Rollouts of your own"). Default: one sample per prompt."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature in evaluations; 0: greedy."""
    top_k: Natural = 0
    """Evaluations sample from the k most likely tokens; 0: from all."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens whose probabilities sum to this; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once. Changes memory and speed; the result only by rounding."""

    # ---- optimizer
    lr: Positive = 1e-5
    """Peak learning rate of AdamW (code of Ziegler et al.: 1e-5; Huang et al. 2024: 3e-6 for 1 B and more; LoRA
    adapters need about ten times as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate schedule after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final is reached; default: the rest of the run."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-5
    """Epsilon of AdamW (Huang et al. 2024)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count | None = None
    """Episodes per optimizer step, over all processes. Default: 512, or --rollout-batch-size if that is less (code
    of Ziegler et al.: all episodes of an iteration)."""
    micro_batch_size: Count = 8
    """Episodes per process and forward pass; of shorter ones more, up to the tokens of so many of the longest. Changes
    memory and speed; the result only by rounding."""

    # ---- data
    max_prompt_length: Count | None = None
    """Drop prompts with more tokens than this, and count them. Default: one that does not fit the model is an error."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list of one number per sample}."""

    def __post_init__(self):
        """A rollout size that is not given is at most the length of the run, a step's at most that of the rollout."""
        if self.rollout_batch_size is None:
            self.rollout_batch_size = min(512, self.total_episodes)
        if self.batch_size is None:
            self.batch_size = min(512, self.rollout_batch_size)
        super().__post_init__()
        self.total_episodes -= self.total_episodes % self.rollout_batch_size

    @property
    def num_iterations(self):
        return self.total_episodes // self.rollout_batch_size

    @property
    def steps_per_iteration(self):
        return self.ppo_epochs * (self.rollout_batch_size // self.batch_size)

    def problems(self):
        if self.rollout_batch_size % max(1, self.batch_size):
            yield f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --batch-size {self.batch_size}"
        if self.total_episodes < self.rollout_batch_size:
            size = f"--rollout-batch-size {self.rollout_batch_size}"
            yield f"--total-episodes {self.total_episodes} must be at least {size}"
        if self.min_length_limit is not None and self.min_length_limit > self.max_new_tokens:
            yield f"--min-length-limit {self.min_length_limit} must be at most --max-new-tokens {self.max_new_tokens}"
        if self.kl_target is not None and self.kl_coef == 0:
            yield "--kl-target needs a --kl-coef above 0, which it adapts"
        if self.kl_target is not None and self.kl_horizon < self.rollout_batch_size:
            size = f"--rollout-batch-size {self.rollout_batch_size}"
            yield f"--kl-horizon {self.kl_horizon} must be at least {size}, or --kl-coef may become negative"
        if self.value_warmup and self.value_warmup >= self.num_iterations:
            yield f"--value-warmup {self.value_warmup} leaves none of {self.num_iterations} iterations to the policy"
        if 0 < self.ratio_threshold <= 1:
            yield f"--ratio-threshold {self.ratio_threshold} must be 0 or more than 1"
        if self.rollout and self.min_length_limit:
            yield "--min-length-limit is not used with --rollout, which ends its responses itself"


# ---- Maths -----------------------------------------------------------------------------------------------------------


def kl_penalty(logprobs, ref_logprobs, kind):
    """Per-token estimate of KL(policy || reference) from samples of the policy: kl (k1), abs, mse (k2) or k3.

    Any shape. k1, k2, k3: http://joschu.net/blog/kl-approx.html; k1 and k3 are unbiased for samples of the policy.
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "kl":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "mse":
        return log_ratio.square() / 2
    if kind == "k3":
        return (-log_ratio).expm1() + log_ratio
    raise ValueError(f"there is no KL estimate {kind!r}")


def last_tokens(mask):
    """(B, R) bool: the last token of each row of mask (B, R), whose tokens come first."""
    return mask & ~F.pad(mask[:, 1:], (0, 1))


def token_rewards(scores, kl, mask, kl_coef):
    """r_t = -kl_coef kl_t plus the score: on the last token for scores (B,), on each for (B, R). kl, mask: (B, R),
    right-padded. Zero where mask is False. A row without tokens has no score. Source: Ziegler et al. 2019, Eq. 2."""
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    if scores.ndim == 2:
        return rewards + torch.where(mask, scores, 0.0)
    return rewards + torch.where(last_tokens(mask), scores[:, None], 0.0)


def shape_scores(scores, mask, truncated, moments, args):
    """(token scores to train on, moments): scaled, centred and clipped, minus the penalty for truncated responses.

    scores, mask: (B, R), truncated: (B,) True without end token or stop string. moments: count, mean and sum of squared
    deviations of the rows' summed scores so far. The mean is subtracted at the last token. Fewer than two different
    scores are not scaled.
    """
    count, mean, squares = moments
    last = last_tokens(mask)
    if args.score_scaling.startswith("running") or count == 0:
        sums = scores.double().sum(1)
        total = count + len(sums)
        delta = sums.mean().item() - mean
        squares += (sums - sums.mean()).square().sum().item() + delta**2 * count * len(sums) / total
        mean += delta * len(sums) / total
        count = total
    if args.score_scaling.endswith("norm"):
        scores = torch.where(last, scores - mean, scores)
    if args.score_scaling != "none" and count > 1:
        std = math.sqrt(squares / (count - 1))
        if std > 1e-8 * max(1.0, abs(mean)):
            scores = scores / std
    if args.score_clip:
        scores = scores.clamp(-args.score_clip, args.score_clip)
    scores = torch.where(last & truncated[:, None], scores - args.missing_eos_penalty, scores)
    return scores, [count, mean, squares]


def gae(rewards, values, mask, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t.

    rewards, values, mask: (B, R), right-padded rows of trained tokens: what a response only read, such as the answer of
    a tool, is no column and costs no discount. A truncated response is treated as ended. Returns (advantages, returns =
    advantages + values), both (B, R) and zero where mask is False. Source: Schulman et al. 2016, Eq. 16.
    """
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)  # V = 0 after the last token
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def masked_whiten(x, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) over the elements that count, with the biased variance; zero elsewhere.
    shift_mean=False adds the mean back. x is the global batch, so the statistics are global.
    Source: code of Ziegler et al., see the top."""
    kept = x[mask]
    white = (kept - kept.mean()) * (kept.var(correction=0) + 1e-8).rsqrt()
    if not shift_mean:
        white = white + kept.mean()
    return torch.zeros_like(x).masked_scatter(mask, white)


def policy_loss(new_logprobs, logprobs, advantages, cliprange):
    """max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange)), ratio = exp(new_logprobs - logprobs); unreduced, any
    shape. Source: Schulman et al. 2017, Eq. 7."""
    ratio = (new_logprobs - logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))


def value_loss(new_values, values, returns, cliprange_value):
    """max((V - return)^2, (V_clipped - return)^2) / 2, V_clipped within cliprange_value of the old value (0: not
    clipped); unreduced, any shape. Source: code of Ziegler et al., see the top."""
    error = (new_values - returns).square()
    if cliprange_value > 0:
        clipped = new_values.clamp(values - cliprange_value, values + cliprange_value)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def next_kl_coef(kl_coef, kl, target, horizon, n):
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after n episodes of mean sequence KL `kl`. n <= horizon
    keeps beta positive. Source: code of Ziegler et al.; Sec. 2.2 has a constant in place of n / horizon."""
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


# ---- Values ----------------------------------------------------------------------------------------------------------


class PolicyWithValue(nn.Module):
    """A language model `lm` with a scalar `value_head` on the hidden states that its output layer reads."""

    def __init__(self, lm, kind="linear", init="zeros", seed=0, detach_value_trunk=False):
        super().__init__()
        self.detach_value_trunk = detach_value_trunk
        self._no_split_modules = lm._no_split_modules  # accelerate shards by these blocks
        width = lm.get_output_embeddings().weight.shape[1]
        layers = [nn.Linear(width, 1)]
        if kind == "mlp":
            layers = [nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1)]
        self.lm = lm
        self.value_head = nn.Sequential(*layers).to(torch.promote_types(lm.dtype, torch.float32))
        draw_layers(self.value_head, seed, "value_head")
        last = self.value_head[-1]
        if init != "default":
            last.weight.data.zero_()
            last.bias.data.zero_()
        if init == "normal":
            number = len(layers) - 1  # of its weight, among those of the head
            drawn = rng(seed, "value_head", number).normal(0.0, 0.2, last.weight.shape)
            last.weight.data.copy_(torch.from_numpy(drawn))

    def forward(self, lines, **options):
        """(logprobs, values, entropies or None), (n,) each; arguments as of line_logprobs. The value of a token is that
        of the state before it."""
        logprobs, states, entropies = line_logprobs(self.lm, lines, **options)
        if self.detach_value_trunk:
            states = states.detach()
        with in_float32(self.value_head), torch.autocast(states.device.type, enabled=False):
            values = self.value_head(states.to(next(self.value_head.parameters()).dtype))[..., 0]
        return logprobs, values, entropies

    @classmethod
    def load(cls, directory, **options):
        """The exported model of a run, `<run>/hf_model`, with its head. options go to from_pretrained."""
        model = cls(load_decoder(directory, **options))
        model.load_value_head(saved_heads(directory, HEAD_FILE, required=True))
        return model

    def load_value_head(self, weights):
        kind = "mlp" if len(weights) == 4 else "linear"
        self.value_head = PolicyWithValue(self.lm, kind).value_head.to(self.lm.device)
        self.value_head.load_state_dict(weights)


class PolicyWithCritic(nn.Module):
    """A language model `lm`, and as `critic` a sequence classifier that scores each trained token."""

    def __init__(self, lm, critic):
        super().__init__()
        self._no_split_modules = [*lm._no_split_modules, *critic._no_split_modules]  # accelerate shards by these blocks
        self.lm = lm
        self.critic = critic

    def forward(self, lines, **options):
        """As that of PolicyWithValue."""
        logprobs, _, entropies = line_logprobs(self.lm, lines, **options)
        ids = pad_rows([ids for [(ids, *_)] in lines], 0)[:, :-1].to(logprobs.device)  # no token sees this padding
        labels = pad_rows([labels for [(_, labels, _)] in lines], -100)[:, 1:]
        places = (labels != -100).flatten().nonzero()[:, 0].to(logprobs.device)  # found on the CPU: a GPU would wait
        states = self.critic.base_model(input_ids=ids, use_cache=False)[0]
        return logprobs, self.critic.score(states.flatten(0, 1)[places])[..., 0], entropies


# ---- Rollout ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # compared by identity: tensors cannot be
class Episode:
    """A query with a response, on every process. Tensors have a number for each trained token, (R,)."""

    row: dict  # of the data set, with what a --rollout function has added
    query: list  # ids of the prompt
    response: list  # ids, with the end token
    trained: list  # for each id of the response, whether it is trained: all are, except with --rollout
    ended: bool  # by an end token or a stop string; with --rollout also where there was room for more
    score: float | list  # of the response, or of each of its tokens
    logprobs: torch.Tensor | None = None  # of the policy before the update
    values: torch.Tensor | None = None  # of the state before a token
    entropies: torch.Tensor | None = None  # of the next-token distribution
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None  # whitened
    returns: torch.Tensor | None = None

    def __post_init__(self):
        labels = [-100] * len(self.query)
        for token, is_trained in zip(self.response, self.trained, strict=True):
            labels.append(token if is_trained else -100)
        while labels[-1] == -100:  # what comes after the last trained token changes nothing
            labels.pop()
        self.ids = int32([*self.query, *self.response][: len(labels)])
        self.labels = int32(labels)
        self.length = sum(self.trained)  # trained tokens

    @property
    def example(self):
        """(ids, labels, episode), as `line_logprobs` reads it."""
        return self.ids, self.labels, self


def generate(accelerator, lm, tokenizer, queries, limits, iteration, args):
    """Responses (ids) to queries (lists of ids), y ~ pi(. | x), on every process, each of which samples a share.
    Response i has at most limits[i] tokens, of which the t-th takes the t-th number of the stream (iteration, i):
    neither batches nor processes change it."""
    local = local_rows(accelerator, len(queries))
    found = {}
    screen.show("sampling", len(local))
    with accelerator.autocast(), for_sampling(lm):
        for places in longest_first([len(queries[row]) for row in local], args.decode_batch_size):
            numbers = [local[place] for place in places]
            contexts = [queries[number] for number in numbers]
            own_limits = [limits[number] for number in numbers]
            draws = uniforms(args.seed, "rollout", iteration, numbers, args.max_new_tokens).to(accelerator.device)
            responses = sample(lm, tokenizer, contexts, draws, own_limits, args.stop, args.temperature)
            found |= zip(numbers, responses, strict=True)
    return gather_list([found[number] for number in local])[: len(queries)]


@torch.no_grad()
def rollout(accelerator, model, ref, tokenizer, rows, queries, data, iteration, args):
    """(episodes, {metric: mean}): samples a response to each query (B lists of ids, with their rows), asks the reward
    for its score, the policy for log-probabilities and values, and the reference for log-probabilities. The metrics are
    other columns of the reward."""
    lm = accelerator.unwrap_model(model).lm
    # 1. y ~ pi(. | x)
    if data.rollout is None:
        limits = [args.max_new_tokens] * len(queries)
        if args.min_length_limit:
            shortest = args.min_length_limit
            limits = rng(args.seed, "limits", iteration).integers(shortest, args.max_new_tokens + 1, len(queries))
        responses = generate(accelerator, lm, tokenizer, queries, limits, iteration, args)
        trained = [[True] * len(response) for response in responses]
        ended = have_ended(lm, tokenizer, queries, responses, args.stop)
    else:
        responses, trained, ended, rows = own_rollout(
            accelerator, lm, tokenizer, data.rollout, rows, queries, ("rollout", iteration), seed=args.seed,
            max_new_tokens=args.max_new_tokens, decode_batch_size=args.decode_batch_size, stop=args.stop,
            temperature=args.temperature,
        )  # fmt: skip
    # 2. r(x, y): once for all texts, or by a reward model
    outputs = decode(tokenizer, queries, responses, args.stop)
    given = text_arguments(tokenizer, rows, responses, outputs)
    columns = {}
    screen.show("scoring")
    if isinstance(data.reward, RewardModel):
        scores = data.reward.score_all(accelerator, given["samples"], ended)
    else:
        # by `call_reward`: a number for each response, or a list with one for each token; and its other columns
        scores, columns = on_main(accelerator, data.reward, rows, given, list(map(len, responses)))
    reward_means = {f"reward/{name}": sum(values) / len(values) for name, values in columns.items()}
    episodes = [*map(Episode, rows, queries, responses, trained, ended, scores)]

    # 3. log-probabilities and values of the policy, log-probabilities of the reference
    # computed as in training, because sampling rounds differently
    def columns_of(lines):
        logprobs, values, entropies = model(lines, temperature=args.temperature, also=token_entropies)
        with accelerator.autocast():  # nothing else casts for ref, except FSDP2
            ref_logprobs, _, _ = line_logprobs(ref, lines, args.temperature)
        return {"logprobs": logprobs, "values": values, "entropies": entropies, "ref_logprobs": ref_logprobs}

    store_columns(accelerator, episodes, args, columns_of)
    return episodes, reward_means


@torch.no_grad()
def store_columns(accelerator, episodes, args, columns_of):
    """Gives every episode, on every process, what columns_of(lines) computes of micro-batches: {field: (n,)}, with a
    number for each trained token. Each process computes a share."""
    lengths = [episode.length for episode in episodes]
    begin_of = dict(zip(episodes, itertools.accumulate(lengths, initial=0), strict=False))
    columns = {}
    for lines in split_lines(accelerator, [episode.example for episode in episodes], args.micro_batch_size):
        places = [range(begin_of[e], begin_of[e] + e.length) for e in episodes_of(lines)]
        places = torch.tensor([*itertools.chain(*places)], dtype=torch.long).to(accelerator.device)
        for name, numbers in columns_of(lines).items():
            if name not in columns:
                columns[name] = numbers.new_zeros(sum(lengths))
            columns[name][places] = numbers
    for name, numbers in columns.items():
        # one process has computed the number of a token, the others have zero: the sum is exact
        parts = accelerator.reduce(numbers).split(lengths)
        for episode, part in zip(episodes, parts, strict=True):
            setattr(episode, name, part)


def episodes_of(lines):
    """The episodes in lines; a line that only fills the share of a process has none."""
    return [episode for [(_, _, episode)] in lines if episode]


def of_all(episodes, name, like=None):
    """(n,): a field that has a number for each trained token, of all episodes. like: a tensor of the type of the
    result, where there may be no episode, since a process may have lines that only fill its share."""
    parts = [getattr(episode, name) for episode in episodes]
    return torch.cat(parts) if parts else like.detach()[:0]


def on_grid(numbers, mask):
    """(B, R) of numbers (N,), one for each True of mask (B, R): zero where mask is False."""
    return torch.zeros_like(mask, dtype=numbers.dtype).masked_scatter(mask, numbers)


def place_scores(scores, trained):
    """A list of N numbers, those of the trained tokens of all responses, row by row.

    scores: of each response a number, which is placed on its last trained token, or a list with a number for each of
    its tokens. The number of a token that is not trained goes to the last trained token before it, or to the first one.
    trained: of each response, whether each of its tokens is trained.
    """
    placed = []
    for score, is_trained in zip(scores, trained, strict=True):
        row = [0.0] * sum(is_trained)
        if isinstance(score, list):
            for value, count in zip(score, itertools.accumulate(is_trained), strict=True):
                row[max(0, count - 1)] += value
        else:
            row[-1] = score
        placed += row
    return placed


def estimate_advantages(episodes, state, args):
    """Gives episodes the advantages and returns of their tokens. Returns (raw_scores, scores, rewards), (B, R) each: as
    the reward gave them, as trained on, and with the KL (never whitened). Changes state.moments."""
    device = episodes[0].logprobs.device
    mask = pad_rows([[True] * episode.length for episode in episodes], False, device=device)  # (B, R)
    logprobs, ref_logprobs, values = (of_all(episodes, name) for name in ("logprobs", "ref_logprobs", "values"))
    placed = place_scores([episode.score for episode in episodes], [episode.trained for episode in episodes])
    raw_scores = on_grid(torch.tensor(placed, dtype=torch.float64, device=device).to(logprobs.dtype), mask)
    truncated = torch.tensor([not episode.ended for episode in episodes], device=device)
    scores, state.moments = shape_scores(raw_scores, mask, truncated, state.moments, args)
    kl = kl_penalty(logprobs, ref_logprobs, args.kl_kind)
    rewards = token_rewards(scores, on_grid(kl, mask), mask, state.kl_coef)
    used_rewards = rewards
    if args.whiten_rewards:
        used_rewards = masked_whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(used_rewards, on_grid(values, mask), mask, args.gamma, args.lam)
    # over the whole iteration and all processes, so that neither minibatches nor layout change it
    advantages = masked_whiten(advantages, mask)
    lengths = [episode.length for episode in episodes]
    parts = zip(episodes, advantages[mask].split(lengths), returns[mask].split(lengths), strict=True)
    for episode, own_advantages, own_returns in parts:
        episode.advantages = own_advantages
        episode.returns = own_returns
    return raw_scores, scores, rewards


def rollout_metrics(episodes, raw_scores, scores, rewards, kl_coef):
    """Metrics of the episodes: objective/ and tokens/ are means per sequence, policy/ and val/ per token. The scores,
    as the reward gave them and as trained on, and the rewards: (B, R)."""
    size = len(episodes)
    totals = raw_scores.sum(1)
    logprobs = of_all(episodes, "logprobs")
    ref_logprobs = of_all(episodes, "ref_logprobs")
    returns = of_all(episodes, "returns")
    errors = returns - of_all(episodes, "values")
    ended = sum(episode.ended for episode in episodes)

    def per_sequence(x):
        return x.sum() / size

    metrics = {
        "objective/kl": per_sequence(kl_penalty(logprobs, ref_logprobs, "kl")),
        "objective/kl_k3": per_sequence(kl_penalty(logprobs, ref_logprobs, "k3")),
        "objective/entropy": -per_sequence(logprobs),
        "objective/scores": totals.mean(),
        "objective/scores_std": totals.std(correction=0),
        "objective/non_score_reward": per_sequence(rewards - scores),
        "objective/rlhf_reward": per_sequence(rewards),
        "policy/entropy": of_all(episodes, "entropies").mean(),
        "val/explained_variance": 1 - errors.var(correction=0) / returns.var(correction=0),
        "val/error": errors.square().mean(),
    }
    counts = {
        "tokens/eos_rate": ended / size,  # stop strings included
        "tokens/truncated_rate": 1 - ended / size,
        "tokens/queries_len": sum(len(episode.query) for episode in episodes) / size,
        "tokens/responses_len": sum(episode.length for episode in episodes) / size,
        "objective/kl_coef": kl_coef,
    }
    return {name: mean.item() for name, mean in metrics.items()} | counts


# ---- Order of rows, optimizer ----------------------------------------------------------------------------------------


def draw_rows(seed, num_rows, start, count):
    """`count` row numbers from position `start` of an endless stream: a keyed permutation of all rows for each pass."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    rows = np.concatenate([rng(seed, "data", epoch).permutation(num_rows) for epoch in epochs])
    return rows[start % num_rows :][:count].tolist()


def make_optimizer(model, args):
    """AdamW on the trained weights, with weight decay of matrices only. A group's `peak_lr` is that of its schedule:
    another group may have its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def split_groups(optimizer, lm, args):
    """Moves the weights of the critic, all but those of lm, to groups of their own. A group is not trained in the first
    `idle_iterations` of the run, and has a peak learning rate of its own, `peak_lr`."""
    of_policy = set(map(id, lm.parameters()))
    policy_groups = []
    critic_groups = []
    for group in optimizer.param_groups:
        policy = [weight for weight in group["params"] if id(weight) in of_policy]
        critic = [weight for weight in group["params"] if id(weight) not in of_policy]
        policy_groups.append(group | {"params": policy, "idle_iterations": args.value_warmup})
        critic_groups.append(group | {"params": critic, "peak_lr": args.value_lr or args.lr, "idle_iterations": 0})
    optimizer.param_groups[:] = [group for group in policy_groups + critic_groups if group["params"]]


def learning_rate(peak, step, total_steps, args):
    """The rate of optimizer step `step`, counted from 0: warm-up to the peak, decay to --lr-final, then constant."""
    if step < args.warmup_steps:
        return peak * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return peak
    decay_steps = args.decay_steps or total_steps - args.warmup_steps
    progress = min(1.0, (step - args.warmup_steps) / max(1, decay_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak + (args.lr_final - peak) * progress


# ---- Update ----------------------------------------------------------------------------------------------------------


def minibatches(accelerator, episodes, args, iteration, epoch):
    """(episodes, micro_batches) of each optimizer step of an epoch: those of the step in all processes, in a keyed
    random order, and the lines of this process's share of them, micro-batch by micro-batch."""
    order = rng(args.seed, "minibatches", iteration, epoch).permutation(len(episodes))
    for begin in range(0, len(order), args.batch_size):
        minibatch = [episodes[place] for place in order[begin : begin + args.batch_size]]
        examples = [episode.example for episode in minibatch]
        yield minibatch, split_lines(accelerator, examples, args.micro_batch_size)


def losses(model, lines, args):
    """(loss, sums): policy and value losses summed over the n trained tokens of a micro-batch, and {metric: sum}."""
    episodes = episodes_of(lines)
    new_logprobs, new_values, _ = model(lines, temperature=args.temperature)  # (n,), as all that follow
    logprobs = of_all(episodes, "logprobs", new_logprobs)
    values = of_all(episodes, "values", new_values)
    advantages = of_all(episodes, "advantages", new_values)
    returns = of_all(episodes, "returns", new_values)
    pg = policy_loss(new_logprobs, logprobs, advantages, args.cliprange)
    vf = value_loss(new_values, values, returns, args.cliprange_value)
    loss = pg.sum() + args.vf_coef * vf.sum()
    terms = {"loss/policy": pg, "loss/value": vf, "val/clipfrac": vf > value_loss(new_values, values, returns, 0)}
    terms |= token_metrics(new_logprobs - logprobs, advantages, args)
    return loss, {name: term.detach().double().sum() for name, term in terms.items()}


def token_metrics(log_ratio, advantages, args):
    """{name: (n,)} of the tokens of a micro-batch. policy/clipfrac counts those whose gradient the clip removes."""
    ratio = log_ratio.detach().exp()
    is_clipped = torch.where(advantages > 0, ratio > 1 + args.cliprange, ratio < 1 - args.cliprange)
    return {
        "policy/approxkl": log_ratio.square() / 2,
        "policy/clipfrac": is_clipped & (advantages != 0),
        "policy/ratio": ratio,
    }


def update(run, model, optimizer, episodes, args):
    """K epochs of minibatches, with one optimizer step each. Returns metrics: means over trained tokens and epochs, and
    the numbers of epochs and skipped steps."""
    accelerator = run.accelerator
    tokens = sum(episode.length for episode in episodes)  # that are trained
    # the last step of the iteration before; skipped ones count, too: the schedule follows the episodes
    step = run.step - args.steps_per_iteration
    sums = defaultdict(float)
    epochs = 0
    skipped = 0
    grad_norm = 0.0
    model.train()  # without dropout, which loading sets to 0
    for epoch in range(args.ppo_epochs):
        approxkl = 0.0
        for minibatch, micro_batches in minibatches(accelerator, episodes, args, run.iteration, epoch):
            count = sum(episode.length for episode in minibatch)  # trained tokens of the step, of all processes
            ratios = 0.0
            # yields them one by one; processes exchange gradients in the last one (with FSDP2 in each)
            for lines in accumulate(accelerator, model, micro_batches):
                loss, terms = losses(model, lines, args)
                # data-parallel training averages gradients over the processes: multiply by their number
                accelerator.backward(loss * accelerator.num_processes / count)
                for name, term in terms.items():
                    sums[name] += term
                ratios += terms["policy/ratio"]
                approxkl += terms["policy/approxkl"]
            step += 1
            for group in optimizer.param_groups:
                begin = group["idle_iterations"] * args.steps_per_iteration  # optimizer steps before its first one
                if run.iteration > group["idle_iterations"]:
                    own_step = max(0, step - 1 - begin)
                    group["lr"] = learning_rate(group["peak_lr"], own_step, run.total_steps - begin, args)
                    continue
                group["lr"] = 0.0
                for weight in group["params"]:
                    weight.grad = None  # AdamW skips it: its moments begin with its schedule
            if args.ratio_threshold and accelerator.reduce(ratios) > args.ratio_threshold * count:
                skipped += 1
                optimizer.zero_grad()
                continue
            where = f"{len(minibatch)} episodes whose first is {minibatch[0].row['prompt']!r:.60}"
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
            require_finite(step, where, gradient_norm=grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        epochs += 1
        if args.early_stop_kl and accelerator.reduce(approxkl) > args.early_stop_kl * tokens:
            break
    metrics = {name: total / (tokens * epochs) for name, total in reduce_sums(accelerator, sums).items()}
    metrics["episode"] = run.iteration * args.rollout_batch_size
    metrics["loss/total"] = metrics["loss/policy"] + args.vf_coef * metrics["loss/value"]
    metrics |= {"policy/epochs": epochs, "policy/skipped": skipped}
    if args.value_lr:
        metrics["optim/value_lr"] = optimizer.param_groups[-1]["lr"]
    return metrics | {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}  # of the last taken


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run, step, model, tokenizer, data, args):
    """Metrics: the mean reward and --metric on sampled responses. Logs the samples."""
    lm = run.accelerator.unwrap_model(model).lm
    names = ("seed", "max_new_tokens", "top_k", "top_p", "stop", "decode_batch_size")
    options = {name: getattr(args, name) for name in names} | {"temperature": args.eval_temperature}
    metrics, samples = evaluate_sets(run.accelerator, model, lm, tokenizer, data, **options)
    run.samples(step, samples)
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


def make_policy(args, path, lm, critic_path, tokenizer):
    """The language model with the critic of --value-model, the value head in the --model directory, or a new one."""
    if critic_path is not None:
        return PolicyWithCritic(lm, load_critic(args, critic_path, lm, tokenizer))
    policy = PolicyWithValue(lm, args.value_head, args.value_head_init, args.seed, args.detach_value_trunk)
    with loading("--model", path):
        weights = saved_heads(path, HEAD_FILE, args.revision)
        if weights:
            policy.load_value_head(weights)
    return policy.to(lm.device)


def load_critic(args, path, lm, tokenizer):
    """The classifier of --value-model, its weights frozen or adapters added as in the policy."""
    kind = "AutoModelForSequenceClassification"
    critic, its_tokenizer, missing = load_pretrained(kind, args, path, "--value-model", num_labels=1)
    is_known = its_tokenizer.get_vocab() == tokenizer.get_vocab() and hasattr(critic, "score")
    if not is_known or missing not in ([], ["score.weight"]) or (missing and critic._hf_peft_config_loaded):
        raise InputError(f"--value-model {args.value_model} is no decoder, or its vocabulary or weights do not fit")
    if missing:
        critic.score.weight.data.zero_()
    if args.gradient_checkpointing:
        critic.gradient_checkpointing_enable({"use_reentrant": False})
    train_adapters(critic.to(lm.device), args, raise_heads(critic))
    freeze(critic, args.num_layers_unfrozen)
    if args.num_layers_unfrozen >= 0:
        critic.score.requires_grad_(True)
    return critic


def export_policy(run, policy, tokenizer, name):
    """Writes the policy to a directory of the run, with its value head in it or a critic of its own in another one."""
    if isinstance(policy, PolicyWithValue):
        return run.export(policy.lm, tokenizer, name, {HEAD_FILE: policy.value_head.state_dict()})
    run.export(policy.critic, tokenizer, name.replace("hf", "value"))
    run.export(policy.lm, tokenizer, name)


def encode(data, lm, tokenizer, args):
    """Tokenises all prompts: data gets queries (lists of ids), and eval_sets {name: (rows, queries)}; without
    --eval-dataset, one set: the first --rollout-batch-size rows."""
    encoder = lm.config.is_encoder_decoder
    if encoder and data.rollout:
        raise InputError("--rollout does not work with an encoder-decoder, which answers once")

    def encode_set(rows, flag):
        limit = max_positions(lm)
        return encode_prompts(rows, tokenizer, args.max_new_tokens, limit, flag, args.max_prompt_length, encoder)

    data.chats = is_chat(data.rows, ["prompt"])
    data.rows, data.queries = encode_set(data.rows, "--dataset")
    for name, rows in data.eval_sets.items():
        data.eval_sets[name] = encode_set(rows, set_flag(name))
    if not data.eval_sets:
        size = args.rollout_batch_size
        data.eval_sets[""] = (data.rows[:size], data.queries[:size])
    if data.chats:
        tell_unended_turns(tokenizer)


def load_reward(data, args, lm, tokenizer):
    """Loads the reward model, if --reward names one. Returns its classifier, or None."""
    if data.reward is not None:
        return None
    data.reward = RewardModel(args, lm, data.chats)
    if data.chats and data.reward.tokenizer.chat_template not in (None, tokenizer.chat_template):
        screen.say("warning: --reward reads chats as the template of --model writes them, not as its own does")
    return data.reward.model


def summary(run, data, policy):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    share = args.batch_size // run.accelerator.num_processes
    lengths = sorted(map(len, data.queries))
    prompts = f"{len(lengths)} prompts; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
    if not args.eval_dataset:
        prompts += f"; without --eval-dataset, evaluations take the first {len(data.eval_sets[''][0])}"
    prompts += f"; first: {data.rows[0]['prompt'][:200]!r}"
    critic = [weight for name, weight in policy.named_parameters() if not name.startswith("lm.")]
    memory = sum(weight.nbytes * (1 + 3 * weight.requires_grad) for weight in critic) / 1e6
    return {
        "critic": f"{args.value_model or 'a head on the policy'}: {memory:,.1f} MB with gradients and AdamW's moments",
        "reference": "a model of its own" if args.ref_model else "the model at the start",
        "data": prompts,
        "iterations": f"{args.num_iterations}, each of {args.rollout_batch_size} episodes",
        "steps": f"{run.steps_per_iteration} per iteration, each of {args.batch_size} episodes: {share} per process, "
        f"{args.micro_batch_size} of the longest at once",
    }


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["objective/scores", "objective/kl", "loss/value", "val/explained_variance", "tokens/truncated_rate"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    # first what the flags name, because a function of the user may start processes, before there is an Accelerator
    path = build(args.model, "--model")  # as given, or the model that a function returns
    ref_path = build(args.ref_model, "--ref-model")
    critic_path = build(args.value_model, "--value-model")
    data = read_data(args.dataset, args.eval_dataset, reward=args.reward, metric=args.metric, rollout=args.rollout)
    if data.rollout:
        data.rollout = partial(call_rollout, data.rollout, args.rollout)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer = load_lm(args, path, accelerator.device)
    encode(data, lm, tokenizer, args)
    ref = make_reference(args, ref_path, lm, tokenizer)
    reward_model = load_reward(data, args, lm, tokenizer)
    policy = make_policy(args, path, lm, critic_path, tokenizer)
    value_model = getattr(policy, "critic", None)
    run.check_inputs(data, model=lm, ref_model=ref, reward=reward_model, value_model=value_model)
    optimizer = make_optimizer(policy, args)
    split_groups(optimizer, lm, args)
    model = prepare(accelerator, policy, optimizer, ref, reward_model)
    export = partial(export_policy, run, policy, tokenizer)
    lengths = [len(query) for query in data.queries]  # for --check
    headline = f"{set_prefix(next(iter(data.eval_sets)))}reward" if args.eval_every else "objective/scores"
    # total_episodes / rollout_batch_size iterations of ppo_epochs * rollout_batch_size / batch_size optimizer steps
    # state: the values that checkpoints keep
    state = run.begin(
        model, optimizer, policy, args.num_iterations, [headline, *IN_STATUS], args.steps_per_iteration,
        kl_coef=args.kl_coef, moments=[0, 0.0, 0.0],  # count, mean and squared deviations of the scores
    )  # fmt: skip
    if args.kl_target is None:
        state.kl_coef = args.kl_coef  # the flag may be another one with --resume
    run.tell(policy, summary(run, data, policy))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, tokenizer, data, args))
        run.save(run.first_step, export)

    for iteration in run.iterations():
        # 1. y ~ pi(. | x): responses with their log-probabilities, values and scores
        model.eval()
        size = args.rollout_batch_size
        numbers = draw_rows(args.seed, len(data.rows), (iteration - 1) * size, size)
        if args.check:
            numbers = longest_rows(lengths, size)
        rows = [data.rows[number] for number in numbers]
        queries = [data.queries[number] for number in numbers]
        with unsharded(model):  # FSDP2 gathers the weights once, not for every token
            episodes, reward_means = rollout(accelerator, model, ref, tokenizer, rows, queries, data, iteration, args)
        # 2. r_t = -beta KL_t, plus the score on the last token; A_t by GAE (Eq. 16), whitened
        raw_scores, scores, rewards = estimate_advantages(episodes, state, args)
        log_episodes(run, tokenizer, episodes[:4], [episode.advantages.mean().item() for episode in episodes[:4]])
        run.lap("rollout")
        # 3. K epochs of minibatches: clipped policy loss (PPO Eq. 7) and value loss
        metrics = reward_means | rollout_metrics(episodes, raw_scores, scores, rewards, state.kl_coef)
        metrics |= update(run, model, optimizer, episodes, args)
        run.lap("update")
        # 4. beta follows the KL of this iteration (Ziegler Sec. 2.2)
        if args.kl_target and iteration > args.value_warmup:
            state.kl_coef = next_kl_coef(state.kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, size)
        # 5. log, evaluate, save: the line is written first, so that an evaluation which fails costs no iteration
        run.log(run.step, metrics, tokens=sum(episode.length for episode in episodes), episodes=size)
        if run.evaluation_due(run.step):
            run.log_evaluation(run.step, evaluate(run, run.step, model, tokenizer, data, args))
        run.save(run.step, export)

    return run.finish(export, *lines_of_use(lm, tokenizer, data.queries[0]))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
