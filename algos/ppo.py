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
    squared error of the clipped value                     code of Ziegler et al.   value_loss
    beta <- beta (1 + clip(KL / target - 1) n / horizon)   Ziegler Sec. 2.2         next_kl_coef

How this differs from TRL's and trlX's PPO (algos/MIGRATION.md has the details):
- One function, `line_logprobs`, gives the log-probabilities of rollout, reference and update, temperature included, so
  the first ratio is 1, to rounding. Sampled ids are kept, never decoded and tokenised again.
- Whitening, KL and loss are over the response tokens of the global batch: neither micro-batches, processes nor padding
  change them. The score is placed on the last sampled token (the end token where there is one), which is trained.

    accelerate launch algos/ppo.py                                 # random walks, on one CPU
    accelerate launch algos/ppo.py --model my_model/ --dataset prompts.jsonl --reward my_reward.py:score \
        --max-new-tokens 32 --num-layers-unfrozen 2
    accelerate launch algos/ppo.py --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head     # with adapters
    torchrun --nproc_per_node 8 algos/ppo.py --model Qwen/Qwen3-0.6B --dataset org/prompts:train \
        --reward my_reward.py:score

Dimension key: B episodes, R trained tokens of a response, N trained tokens of all responses, n of a micro-batch,
V vocabulary. A line is what the model reads in one row, here the single example (ids, labels, places) of an episode: a
label is -100 where a token is not trained, and places says where the others are in (N,).
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
from common.functions import build, loading
from common.launch import accumulate, prepare, reduce_sums, require_finite, unsharded
from common.lm.evaluation import Prompts, evaluate_sets, generate_all, log_episodes, score_outputs
from common.lm.load import lines_of_use, load_decoder, load_lm, make_reference, saved_heads
from common.lm.logprobs import in_float32, line_logprobs, score_all, token_entropies
from common.lm.own_rollouts import call_rollout
from common.lm.sampling import sample as sample  # for those who import it from here
from common.lm.structure import draw_layers
from common.lm.tokens import decode, int32, pad_rows, split_lines
from common.rows import longest_rows, read_data, set_prefix
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
    it has several) or of a LoRA adapter for one."""
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
    """Weight beta of the per-token KL penalty (Ziegler et al. 2019, Eq. 2; Huang et al. 2024: 0.05); 0 turns it off."""
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
    """Initial last layer of a new head: zeros, N(0, 0.2) with bias 0, or torch's default."""
    detach_value_trunk: bool = False
    """Train only the value head with the value loss, not the policy's blocks."""
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
    """Rows per optimizer step, over all processes. Default: 512, or --rollout-batch-size if that is less (code of
    Ziegler et al.: all episodes of an iteration)."""
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
        if self.rollout and self.stop:
            yield "--stop is not used with --rollout: give stop strings to `sample`"
        if self.min_length_limit is not None and self.min_length_limit > self.max_new_tokens:
            yield f"--min-length-limit {self.min_length_limit} must be at most --max-new-tokens {self.max_new_tokens}"
        if self.kl_target is not None and self.kl_coef == 0:
            yield "--kl-target needs a --kl-coef above 0, which it adapts"
        if self.kl_target is not None and self.kl_horizon < self.rollout_batch_size:
            yield (
                f"--kl-horizon {self.kl_horizon} must be at least --rollout-batch-size {self.rollout_batch_size}, "
                "or --kl-coef may become negative"
            )
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
    """r_t = -kl_coef kl_t plus the score: on the last token for scores (B,), on each token for (B, R).

    kl, mask: (B, R), right-padded. Zero where mask is False. A row without tokens gets no score. Source: Ziegler et al.
    2019, Eq. 2.
    """
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
    """max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within cliprange_value of the old value (0: not clipped);
    unreduced, any shape. Source: code of Ziegler et al., see the top."""
    error = (new_values - returns).square()
    if cliprange_value > 0:
        clipped = new_values.clamp(values - cliprange_value, values + cliprange_value)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def next_kl_coef(kl_coef, kl, target, horizon, n):
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after n episodes of mean sequence KL `kl`.

    Source: Ziegler et al. 2019, Sec. 2.2. n <= horizon keeps beta positive.
    """
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


# ---- Values ----------------------------------------------------------------------------------------------------------


class PolicyWithValue(nn.Module):
    """A language model `lm` with a scalar `value_head` on the hidden states that its output embedding reads."""

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


# ---- Rollout ---------------------------------------------------------------------------------------------------------


@dataclass
class Episodes:
    """Queries with responses, on every process. A script adds columns: (B,) with a value for each row, or (N,) with one
    for each trained token, those of row 0 first; None if not known."""

    prompts: list  # texts
    queries: list  # their ids
    examples: list  # (ids, labels, span) of query and response; span: the range of its tokens in a column (N,)
    row_of: torch.Tensor  # (N,) the row of each trained token
    mask: torch.Tensor  # (B, R) bool: row i begins with as many True as it has trained tokens

    @classmethod
    def of(cls, queries, responses, device):
        """Of B queries and their `Responses`."""
        examples = []
        row_of = []
        for query, ids, trained in zip(queries, responses.ids, responses.trained, strict=True):
            labels = [-100] * len(query)
            for token, is_trained in zip(ids, trained, strict=True):
                labels.append(token if is_trained else -100)
            while labels[-1] == -100:  # what comes after the last trained token changes nothing
                labels.pop()
            span = range(len(row_of), len(row_of) + sum(trained))
            row_of += [len(examples)] * len(span)
            examples.append((int32([*query, *ids][: len(labels)]), int32(labels), span))
        mask = pad_rows([[True] * len(span) for _, _, span in examples], False, device=device)
        prompts = [row["prompt"] for row in responses.rows]
        return cls(prompts, queries, examples, torch.tensor(row_of, device=device), mask)

    def places(self, lines):
        """(n,) where the tokens of lines are in a column (N,), in the order in which `line_logprobs` returns them."""
        spans = [span for _, _, span in itertools.chain(*lines)]
        return torch.tensor([*itertools.chain(*spans)], dtype=torch.long).to(self.row_of.device)

    def grid(self, column):
        """(B, R) of a column (N,): zero after the last token of a row. `grid(column)[mask]` is the column again."""
        return torch.zeros_like(self.mask, dtype=column.dtype).masked_scatter(self.mask, column)


@dataclass
class Rollout(Episodes):
    """Queries with responses, and what is known about them: columns (N,) of all trained tokens, and grids (B, R), in
    which a row is a response."""

    logprobs: torch.Tensor | None = None  # (N,) of the policy that sampled
    values: torch.Tensor | None = None  # (N,) of the state before a token
    entropies: torch.Tensor | None = None  # (N,) of the next-token distribution
    ref_logprobs: torch.Tensor | None = None  # (N,)
    raw_scores: torch.Tensor | None = None  # (B, R) from the reward; a single score is on the last token
    truncated: torch.Tensor | None = None  # (B,) bool, did not end
    scores: torch.Tensor | None = None  # (B, R) as trained on: shape_scores
    rewards: torch.Tensor | None = None  # (B, R)
    advantages: torch.Tensor | None = None  # (N,), whitened
    returns: torch.Tensor | None = None  # (N,)


@torch.no_grad()
def rollout(accelerator, model, ref, tokenizer, rows, queries, data, iteration, args):
    """Samples a response to each query (B lists of ids, with their rows), and asks policy and reference for its
    log-probabilities and the reward for its score. Returns the batch, and {metric: mean} of the other columns of the
    reward."""
    device = accelerator.device
    lm = accelerator.unwrap_model(model).lm
    # 1. y ~ pi(. | x)
    limits = None
    if args.min_length_limit:
        limits = rng(args.seed, "limits", iteration).integers(args.min_length_limit, args.max_new_tokens + 1, len(rows))
    responses = generate_all(
        accelerator, lm, tokenizer, queries, ("rollout", iteration), seed=args.seed, stop=args.stop, limits=limits,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, decode_batch_size=args.decode_batch_size,
        rows=rows, rollout=data.rollout,
    )  # fmt: skip
    batch = Rollout.of(queries, responses, device)
    # 2. log-probabilities and values of the policy, log-probabilities of the reference
    # computed as in training, because sampling rounds differently
    columns_of = partial(read_lines, accelerator, model, ref, args.temperature)
    for name, column in score_all(accelerator, batch, args.micro_batch_size, columns_of).items():
        setattr(batch, name, column)
    # 3. the reward of the texts
    outputs = decode(tokenizer, queries, responses.ids, args.stop)
    scores, columns = score_outputs(accelerator, data.reward, tokenizer, outputs, responses)
    raw_scores = torch.tensor(place_scores(scores, responses.trained), dtype=torch.float64, device=device)
    batch.raw_scores = batch.grid(raw_scores.to(batch.logprobs.dtype))
    batch.truncated = ~torch.tensor(responses.ended, device=device)
    parts = {f"reward/{name}": sum(values) / len(values) for name, values in columns.items()}
    return batch, parts


def read_lines(accelerator, model, ref, temperature, lines):
    """{field of Rollout: (n,)} of a micro-batch, by policy and reference."""
    logprobs, values, entropies = model(lines, temperature=temperature, also=token_entropies)
    with accelerator.autocast():  # ref is not prepared: nothing else casts for it
        ref_logprobs, _, _ = line_logprobs(ref, lines, temperature)
    return {"logprobs": logprobs, "values": values, "entropies": entropies, "ref_logprobs": ref_logprobs}


def place_scores(scores, trained):
    """A list of N numbers, those of the trained tokens of all responses, row by row.

    scores: of each response a number, which is placed on its last trained token, or a list with a number for each of
    its tokens. What a token got that is not trained goes to the last trained one before it, or to the first. trained:
    of each response, whether each of its tokens is trained.
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


def rollout_metrics(batch, kl_coef):
    """Metrics of the episodes: objective/ and tokens/ are means per sequence, policy/ and val/ per token."""
    scores = batch.raw_scores.sum(1)
    errors = batch.returns - batch.values
    size = len(batch.queries)

    def per_sequence(x):
        return x.sum() / size

    metrics = {
        "objective/kl": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "kl")),
        "objective/kl_k3": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "k3")),
        "objective/entropy": -per_sequence(batch.logprobs),
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": per_sequence(batch.rewards - batch.scores),
        "objective/rlhf_reward": per_sequence(batch.rewards),
        "policy/entropy": batch.entropies.mean(),
        "val/explained_variance": 1 - errors.var(correction=0) / batch.returns.var(correction=0),
        "val/error": errors.square().mean(),
        "tokens/eos_rate": 1 - batch.truncated.double().mean(),  # stop strings included
        "tokens/truncated_rate": batch.truncated.double().mean(),
    }
    lengths = {
        "tokens/queries_len": sum(map(len, batch.queries)) / size,
        "tokens/responses_len": len(batch.row_of) / size,
    }
    return {name: mean.item() for name, mean in metrics.items()} | lengths | {"objective/kl_coef": kl_coef}


# ---- Order of rows, optimizer ----------------------------------------------------------------------------------------


def draw_rows(seed, num_rows, start, count):
    """Row numbers from position `start` of an endless stream: keyed permutations of all rows, one for each epoch,
    joined end to end. No epoch has a short last batch, and no earlier position needs to be drawn."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    rows = np.concatenate([rng(seed, "data", epoch).permutation(num_rows) for epoch in epochs])
    return rows[start % num_rows :][:count].tolist()


def make_optimizer(model, args):
    """AdamW on the weights that are trained, with weight decay on matrices only. The `lr` of a group is the peak of its
    schedule: another group may have its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def learning_rate(peak, step, total_steps, args):
    """The rate of optimizer step `step`, counted from 0: a linear warm-up to the peak, a decay to --lr-final, then
    constant."""
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


def minibatches(accelerator, batch, args, iteration, epoch):
    """(rows, micro_batches) of each optimizer step of an epoch: the numbers of its episodes, from a keyed permutation,
    and the lines of this process's share of them, micro-batch by micro-batch."""
    order = torch.from_numpy(rng(args.seed, "minibatches", iteration, epoch).permutation(args.rollout_batch_size))
    for rows in order.split(args.batch_size):
        yield rows, split_lines(accelerator, [batch.examples[row] for row in rows.tolist()], args.micro_batch_size)


def losses(model, batch, lines, args):
    """(loss, sums): policy and value losses summed over the n trained tokens of a micro-batch, and {metric: sum}.
    policy/clipfrac counts tokens whose gradient the clip removes, val/clipfrac values whose clipped error is the larger
    one."""
    new_logprobs, new_values, _ = model(lines, temperature=args.temperature)  # (n,), as all that follow
    places = batch.places(lines)
    logprobs = batch.logprobs[places]
    values = batch.values[places]
    advantages = batch.advantages[places]
    returns = batch.returns[places]
    pg = policy_loss(new_logprobs, logprobs, advantages, args.cliprange)
    vf = value_loss(new_values, values, returns, args.cliprange_value)
    loss = pg.sum() + args.vf_coef * vf.sum()
    with torch.no_grad():
        log_ratio = new_logprobs - logprobs
        ratio = log_ratio.exp()
        is_clipped = torch.where(advantages > 0, ratio > 1 + args.cliprange, ratio < 1 - args.cliprange)
        terms = {
            "loss/policy": pg,
            "loss/value": vf,
            "policy/approxkl": log_ratio.square() / 2,
            "policy/clipfrac": is_clipped & (advantages != 0),
            "policy/ratio": ratio,
            "val/clipfrac": vf > value_loss(new_values, values, returns, 0),
        }
        return loss, {name: term.double().sum() for name, term in terms.items()}


def update(run, model, optimizer, batch, args):
    """K epochs of minibatches, with one optimizer step each. Returns metrics: means over trained tokens and epochs, and
    the numbers of epochs and skipped steps."""
    accelerator = run.accelerator
    lengths = batch.mask.sum(1).cpu()  # trained tokens of each episode
    tokens = len(batch.row_of)  # that are trained, of all episodes
    # run.step is the number of steps at the end of this iteration. Skipped ones count, too: the schedule follows the
    # episodes.
    step = run.step - args.steps_per_iteration
    sums = defaultdict(float)
    epochs = 0
    skipped = 0
    grad_norm = 0.0
    model.train()  # without dropout, which loading sets to 0
    for epoch in range(args.ppo_epochs):
        approxkl = 0.0
        for minibatch, micro_batches in minibatches(accelerator, batch, args, run.iteration, epoch):
            count = int(lengths[minibatch].sum())  # trained tokens of the step, of all processes
            ratios = 0.0
            # yields them one by one; processes exchange gradients only in the last one
            for lines in accumulate(accelerator, model, micro_batches):
                loss, terms = losses(model, batch, lines, args)
                # data-parallel training averages gradients over the processes: multiply by their number
                accelerator.backward(loss * accelerator.num_processes / count)
                for name, term in terms.items():
                    sums[name] += term
                ratios += terms["policy/ratio"]
                approxkl += terms["policy/approxkl"]
            step += 1
            if args.ratio_threshold and accelerator.reduce(ratios) > args.ratio_threshold * count:
                skipped += 1
                optimizer.zero_grad()
                continue
            where = f"{len(minibatch)} episodes whose first is {batch.prompts[int(minibatch[0])]!r:.60}"
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
            require_finite(step, where, gradient_norm=grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(group["peak_lr"], step - 1, run.total_steps, args)
            optimizer.step()
            optimizer.zero_grad()
        epochs += 1
        if args.early_stop_kl and accelerator.reduce(approxkl) > args.early_stop_kl * tokens:
            break
    metrics = {name: total / (tokens * epochs) for name, total in reduce_sums(accelerator, sums).items()}
    metrics["episode"] = run.iteration * args.rollout_batch_size
    metrics["loss/total"] = metrics["loss/policy"] + args.vf_coef * metrics["loss/value"]
    metrics |= {"policy/epochs": epochs, "policy/skipped": skipped}
    # of the last step taken
    return metrics | {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluation_options(args):
    """How responses of evaluations are sampled: keyword arguments of `evaluate_samples`."""
    return {
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.eval_temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "stop": args.stop,
        "decode_batch_size": args.decode_batch_size,
    }


def evaluate(run, step, model, tokenizer, data, args):
    """Metrics: the mean reward and --metric on sampled responses. Logs the samples."""
    lm = run.accelerator.unwrap_model(model).lm
    metrics, samples = evaluate_sets(run.accelerator, model, lm, tokenizer, data, **evaluation_options(args))
    run.samples(step, samples)
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


def make_policy(args, path, lm):
    """The language model with a new value head, or with the one in the --model directory."""
    policy = PolicyWithValue(lm, args.value_head, args.value_head_init, args.seed, args.detach_value_trunk)
    with loading("--model", path):
        weights = saved_heads(path, HEAD_FILE, args.revision)
        if weights:
            policy.load_value_head(weights)
    return policy.to(lm.device)


def summary(run, data):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    share = args.batch_size // run.accelerator.num_processes
    return {
        "reference": "a model of its own" if args.ref_model else "the model at the start",
        "data": data.report,
        "iterations": f"{args.num_iterations}, each of {args.rollout_batch_size} episodes",
        "steps": f"{run.steps_per_iteration} per iteration, each of {args.batch_size} episodes: {share} per process, "
        f"{args.micro_batch_size} of the longest at once",
    }


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["objective/scores", "objective/kl", "loss/policy", "loss/value", "val/explained_variance"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    # first what the flags name, because a function of the user may start processes, before there is an Accelerator
    path = build(args.model, "--model")  # as given, or the model that a function returns
    ref_path = build(args.ref_model, "--ref-model")
    found = read_data(args.dataset, args.eval_dataset, reward=args.reward, metric=args.metric, rollout=args.rollout)
    own_rollout = found.rollout and partial(call_rollout, found.rollout, args.rollout)
    data = Prompts(found.rows, found.eval_sets, found.reward, found.metric, own_rollout)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer = load_lm(args, path, accelerator.device)
    data.encode(lm, tokenizer, args.max_new_tokens, args.max_prompt_length, args.rollout_batch_size)
    ref = make_reference(args, ref_path, lm, tokenizer)
    reward_model = data.load_reward(args, lm, tokenizer)
    policy = make_policy(args, path, lm)
    run.check_inputs(data, model=lm, ref_model=ref, reward=reward_model)
    optimizer = make_optimizer(policy, args)
    model = prepare(accelerator, policy, optimizer, ref, reward_model)
    export = partial(run.export, lm, tokenizer, heads={HEAD_FILE: policy.value_head.state_dict()})
    lengths = [len(query) for query in data.queries]
    headline = "objective/scores"
    if args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}reward"
    # total_episodes / rollout_batch_size iterations of ppo_epochs * rollout_batch_size / batch_size optimizer steps;
    # state: the values that checkpoints keep
    state = run.begin(
        model, optimizer, lm, args.num_iterations, [headline, *IN_STATUS], args.steps_per_iteration,
        kl_coef=args.kl_coef, moments=[0, 0.0, 0.0],
    )  # fmt: skip
    if args.kl_target is None:
        state.kl_coef = args.kl_coef  # the flag may be another one with --resume
    run.tell(policy, summary(run, data))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, tokenizer, data, args))
        run.save(run.first_step, export)

    for iteration in run.iterations():
        # 1. y ~ pi(. | x): responses with their log-probabilities, values and scores
        model.eval()
        size = args.rollout_batch_size
        drawn = draw_rows(args.seed, len(data.rows), (iteration - 1) * size, size)
        if args.check:
            drawn = longest_rows(lengths, size)
        rows = [data.rows[i] for i in drawn]
        queries = [data.queries[i] for i in drawn]
        with unsharded(model):  # FSDP2 gathers the weights once, not for every token
            batch, parts = rollout(accelerator, model, ref, tokenizer, rows, queries, data, iteration, args)
        # 2. r_t = -beta KL_t, plus the score on the last token; A_t by GAE (Eq. 16), whitened
        mask = batch.mask  # (B, R), of trained tokens: the tensors of this step are grids, and a row is a response
        batch.scores, state.moments = shape_scores(batch.raw_scores, mask, batch.truncated, state.moments, args)
        kl = batch.grid(kl_penalty(batch.logprobs, batch.ref_logprobs, args.kl_kind))
        batch.rewards = token_rewards(batch.scores, kl, mask, state.kl_coef)
        rewards = batch.rewards
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = gae(rewards, batch.grid(batch.values), mask, args.gamma, args.lam)
        # over the whole iteration and all processes, so that neither minibatches nor layout change it
        advantages = masked_whiten(advantages, mask)
        batch.advantages = advantages[mask]  # (N,), as the update reads them
        batch.returns = returns[mask]
        log_episodes(run, tokenizer, batch, batch.raw_scores.sum(1), advantages.sum(1) / mask.sum(1))
        run.lap("rollout")
        # 3. K epochs of minibatches: clipped policy loss (PPO Eq. 7) and value loss
        metrics = parts | rollout_metrics(batch, state.kl_coef) | update(run, model, optimizer, batch, args)
        run.lap("update")
        # 4. beta follows the KL of this iteration (Ziegler Sec. 2.2)
        if args.kl_target:
            state.kl_coef = next_kl_coef(state.kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, size)
        # 5. log, evaluate, save: the line is written first, so that an evaluation which fails costs no iteration
        run.log(run.step, metrics, tokens=len(batch.row_of), episodes=size)
        if run.evaluation_due(run.step):
            run.log_evaluation(run.step, evaluate(run, run.step, model, tokenizer, data, args))
        run.save(run.step, export)

    return run.finish(export, *lines_of_use(lm, tokenizer, data.queries[0]))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
