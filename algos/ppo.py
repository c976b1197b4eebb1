"""Proximal policy optimisation (PPO) of a language model against a reward (RLHF).

Papers: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2016 (arXiv 1506.02438); the KL-penalised
reward and its controller, Ziegler et al. 2019 (arXiv 1909.08593); details, Huang et al. 2024 (arXiv 2403.17031).
Code of Ziegler et al., whose choices this follows where the papers are silent:
https://github.com/openai/lm-human-preferences/blob/f774e89b9e3762a03b7f3953189861979bee1775/lm_human_preferences/train_policy.py

    r_t = -beta KL_t, plus the score at the last token     Ziegler Eq. 2            token_rewards, kl_penalty
    A_t = sum_l (gamma lam)^l delta_{t+l}                  GAE Eq. 16               gae, masked_whiten
    max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))        PPO Eq. 7                policy_loss
    squared error of the clipped value                     code of Ziegler et al.   value_loss
    beta <- beta (1 + clip(KL / target - 1) n / horizon)   Ziegler Sec. 2.2         next_kl_coef

How this differs from TRL's and trlX's PPO:
- One function, `score_tokens`, gives the log-probabilities of rollout, reference and update, temperature included, so
  the first ratio is 1. Sampled ids are kept, never decoded and tokenised again.
- A response ends at any end token of the checkpoint or the tokenizer. Logits are computed only of response tokens, and
  not all at once.
- Whitening, KL and loss are over the response tokens of the global batch: neither micro-batches, processes nor padding
  change them. The score is placed on the last sampled token (the end token where there is one), which is trained.
- The reward is any Python function of the texts, or a sequence classifier, or the LoRA adapter of one, which shares the
  base of a policy with adapters.
- Encoder-decoders run through the same lines. The reference of LoRA adapters is the policy without them,
  or, where a --model that is an adapter is trained further, as it came.
- `--num-layers-unfrozen k`: the reference shares the frozen blocks, and what these return for a rollout is kept for the
  reference's scores and all updates (`Trunk`). trlX ran them again for each; TRL's shared layers shared no memory.

    accelerate launch algos/ppo.py                                 # random walks, on a CPU under two minutes
    accelerate launch algos/ppo.py --model my_model/ --dataset prompts.jsonl --reward my_reward.py:score \
        --max-new-tokens 32 --num-layers-unfrozen 2
    accelerate launch algos/ppo.py --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head     # with adapters
    torchrun --nproc_per_node 8 algos/ppo.py --model Qwen/Qwen3-0.6B --dataset org/prompts:train \
        --reward my_reward.py:score

Dimension key: B episodes, Q query (prompt) tokens, R response tokens, T = Q + R, V vocabulary, H hidden size.
"""

import math
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while libraries load
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if find_spec("common") is None:
    sys.exit(
        "error: a script needs common/: put it into algos/, set PYTHONPATH to the repository, or give it all that "
        "it needs with benchmarks/single_file.py"
    )

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from common.adapters import adapter_problems, to_export, train_adapters
from common.cache import closed_ranks, write_in_place
from common.classifiers import RewardModel
from common.cli import InputError, cli, embedded_task, missing, stop_if
from common.data import encode_prompts, load_rows, load_sets, set_flag, set_prefix
from common.functions import build, load_function, refuse_mistyped, spec_path
from common.logging import Run, closes_run
from common.machine import describe_layout, launch, longest_micro_batch, try_update
from common.models import (
    as_decoder,
    blocks,
    end_tokens,
    freeze,
    frozen_copy,
    lm_class,
    load_model,
    load_reference,
    max_positions,
    share_frozen,
    unsharded,
)
from common.output import call_with_output, describe_output, in_chunks
from common.ranges import (
    Count,
    Decay,
    Fraction,
    Layers,
    Name,
    Natural,
    NonNegative,
    Positive,
    Repository,
    Share,
    Text,
    out_of_range,
)
from common.report import lines_of_use, visible
from common.sampling import (
    decode,
    evaluate_samples,
    generate_all,
    has_ended,
    kept_ids,
    pad_left,
    score_outputs,
)
from common.seeding import draw, rng, seed_libraries, stream_rows
from common.structure import cache_problem


@embedded_task("benchmarks/tasks/randomwalks/ppo.yaml")
@dataclass
class Args:
    """Proximal policy optimisation of a language model. Defaults are for pretrained models.

    Without --model, --dataset and --config: the embedded task, with settings of its own. --config FILE reads flags from
    a YAML file; flags win over it.
    """

    # ---- algorithm
    total_episodes: Count = 65536
    """Length of the run: episodes (a prompt with its response) over all iterations."""
    rollout_batch_size: Count = 512
    """Episodes of an iteration, all processes together (code of Ziegler et al.: 512)."""
    ppo_epochs: Count = 4
    """Passes over the episodes of an iteration (code of Ziegler et al.: 4)."""
    kl_coef: NonNegative = 0.05
    """Weight beta of the per-token KL penalty (Ziegler et al. 2019, Eq. 2; Huang et al. 2024: 0.05); 0 turns it off."""
    kl_kind: Literal["kl", "abs", "mse", "k3"] = "kl"
    """Estimator in the penalty, of x = logprob - ref_logprob: x, |x|, x^2 / 2, or exp(-x) - 1 + x."""
    kl_target: Positive | None = None
    """Adapt --kl-coef so that the KL of a sequence (objective/kl) approaches this; default: a fixed coefficient."""
    kl_horizon: Count = 10000
    """Episodes over which the adaptive coefficient moves."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of GAE."""
    cliprange: NonNegative = 0.2
    """Epsilon of the clipped policy loss (PPO Eq. 7)."""
    cliprange_value: NonNegative = 0.2
    """Clip of the value's change, in units of the reward; 0 turns it off."""
    vf_coef: NonNegative = 0.1
    """Weight of the value loss (Ziegler et al. 2019: 0.1). Whitened advantages do not grow with the reward, the value
    loss does: rewards far below 1 may need more."""
    value_head: Literal["linear", "mlp"] = "mlp"
    """Head on the policy's last hidden states: one linear layer, or H -> 2H -> ReLU -> 1. A --model directory with a
    value head brings its own."""
    value_head_init: Literal["zeros", "normal", "default"] = "default"
    """Last layer of a new head: zeros, N(0, 0.2) with bias 0, or torch's default."""
    detach_value_trunk: bool = False
    """The value loss trains the value head alone, not the policy's blocks."""
    score_scaling: Literal["none", "running", "running-norm", "ref", "ref-norm"] = "none"
    """Divide scores by the standard deviation of all scores so far (running) or of the first rollout's (ref); -norm
    subtracts their mean before."""
    score_clip: NonNegative = 0.0
    """Clip scores, after scaling, to [-this, this]; 0: never."""
    missing_eos_penalty: NonNegative = 0.0
    """Subtract this from the score of a response that ends with neither end token nor --stop."""
    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation; the mean stays."""
    early_stop_kl: NonNegative = 0.0
    """End an iteration's PPO epochs once the mean policy/approxkl of one exceeds this; 0: never."""
    ratio_threshold: NonNegative = 0.0
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10); 0: never."""

    # ---- sampling
    max_new_tokens: Count = 53
    """Longest response, in tokens (Huang et al. 2024: 53)."""
    min_length_limit: Count | None = None
    """Draw the longest length of each rollout response uniformly from this to --max-new-tokens."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response, which keeps and trains the tokens through the one that completes the string. Reward
    and metric see the text before it, without trailing space."""
    temperature: Positive = 1.0
    """Sampling temperature of rollouts; log-probabilities are those of the tempered distribution."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature of evaluations; 0: greedy."""
    top_k: Natural = 0
    """Evaluations sample from the k likeliest tokens; 0: from all."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens with this probability; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    # ---- optimizer
    lr: Positive = 1e-5
    """Peak learning rate of AdamW (code of Ziegler et al.: 1e-5; Huang et al. 2024: 3e-6 for 1 B and more; adapters of
    --lora-r take ten times as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-5
    """Epsilon of AdamW (Huang et al. 2024)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: Count = 512
    """Rows per optimizer step, all processes together (code of Ziegler et al.: all episodes of an iteration)."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- data
    dataset: str | None = None
    """Rows with a prompt, text or chat messages (other columns reach the reward): a file, hub id:split,
    file.py:function; from Python a list."""
    eval_dataset: str | None = None
    """Evaluation rows in the forms of --dataset, several sets joined by commas or as a mapping of names; default: the
    first --rollout-batch-size rows of --dataset."""
    reward: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> a number per sample, or a list of one per token; or the
    directory or hub id of a sequence classifier, with :label if it has several, or of the LoRA adapter of one."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}."""
    max_prompt_length: Count | None = None
    """Drop and count prompts of more tokens. Without it a prompt that does not fit the model is an error."""

    # ---- model
    model: str | None = None
    """Hub id, directory, or file.py:function that returns one; from Python also a model."""
    tokenizer: str | None = None
    """Hub id or directory of the tokenizer, from Python also a tokenizer; default: that of --model."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    ref_model: str | None = None
    """Reference of the KL penalty, named as --model; default: a frozen copy of --model as it is at the start."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights, and of the moments of those that are trained. bfloat16 is for adapters alone, which are
    float32 beside it."""
    trust_remote_code: bool = False
    """Run model code that comes with a hub repository."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Kernel of the attention; default: sdpa where the model has it. On CPUs eager is a bit faster for short rows, but
    gives NaN in float64 for left padding in several families."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    num_layers_unfrozen: Layers = -1
    """Train only the top k blocks and the norm after them, not embeddings and output layer. -1: train everything; 0:
    only the value head."""
    cache_trunk: bool = True
    """Keep what the frozen blocks return for a rollout (episodes x tokens x hidden size, on every process), so that the
    reference and all updates run the top blocks only; the result is the same to rounding."""
    load_in_4bit: bool = False
    """Load the frozen weights in 4 bits (NF4 of bitsandbytes; arXiv 2305.14314): for --lora-r, or a LoRA adapter as
    --model."""
    lora_r: Natural = 0
    """Rank of LoRA adapters, which are trained in place of the weights; 0: train all weights. A --model that is a LoRA
    adapter of a language model is trained further without this flag."""
    lora_alpha: Positive | None = None
    """LoRA adapters count alpha / r times; default: the rank, so once."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Last names of the modules that get LoRA adapters; all-linear: every linear layer of a language model but the
    last."""
    merge_adapters: bool = False
    """Export the model with its LoRA adapters added to the weights, not the adapters alone."""

    # ---- run
    run_dir: str | None = None
    """Directory of this run; default runs/<algo>-<hash of everything that decides the result>."""
    name: Name | None = None
    """In place of <algo> in the default of --run-dir, so that you know the run again."""
    resume: str = "auto"
    """auto: continue the run if it is there; never: repeat it in a new directory; or the path of a checkpoint."""
    seed: int = 1
    """Seed of every random draw."""
    threads: Count | None = None
    """CPU threads of this process; default: OMP_NUM_THREADS, else the CPUs (by affinity and the container's quota)
    divided by the processes on this machine."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (slower on GPUs; CPUs are deterministic without it)."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Autocast of the forward pass; default: bf16 where the launcher says so, and for float32 weights on a GPU that has
    it. Weights and optimizer keep --dtype."""
    save_every: Natural = 100
    """Checkpoint every so many optimizer steps; 0: only at the end and for the best evaluation."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept; the best by evaluation is kept besides."""
    eval_every: Natural = 100
    """Evaluate every so many optimizer steps, and at the start and the end; 0: never."""
    track: Literal["off", "wandb", "tensorboard"] = "off"
    """Mirror the metrics to a tracker (WANDB_MODE=offline works without an account)."""
    wandb_project: str = "plainrl"
    """Project name for --track."""
    push_to_hub: Repository | None = None
    """Upload hf_model/ to this hub repository (org/name) at the end, with the login of the hub's own tools."""
    check: bool = False
    """Validate flags, data, model and functions, print the summary, try an update of the largest size, and exit."""

    def __post_init__(self):
        problems = missing(self, "model", "dataset", "reward") + out_of_range(self) + adapter_problems(self)
        if self.rollout_batch_size % max(1, self.batch_size):
            problems.append(
                f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --batch-size {self.batch_size}"
            )
        if self.total_episodes % max(1, self.rollout_batch_size):
            problems.append(
                f"--total-episodes {self.total_episodes} must be a multiple of "
                f"--rollout-batch-size {self.rollout_batch_size}"
            )
        if self.min_length_limit is not None and self.min_length_limit > self.max_new_tokens:
            problems.append(
                f"--min-length-limit {self.min_length_limit} must be at most --max-new-tokens {self.max_new_tokens}"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            problems.append("--kl-target needs a --kl-coef above 0, which it multiplies")
        if self.kl_target is not None and self.kl_horizon < self.rollout_batch_size:
            problems.append(
                f"--kl-horizon {self.kl_horizon} must be at least --rollout-batch-size {self.rollout_batch_size}, "
                "or --kl-coef may turn negative"
            )
        if 0 < self.ratio_threshold <= 1:
            problems.append(f"--ratio-threshold {self.ratio_threshold} must be 0 or more than 1")
        if self.name and self.run_dir:
            problems.append("--name is a part of the default --run-dir: leave out one of them")
        stop_if(problems)


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
    """(B, R) bool: the last token of each row that counts in mask (B, R)."""
    counting_from_here = mask.flip(1).cumsum(1).flip(1)
    return mask & (counting_from_here == 1)


def token_rewards(scores, kl, mask, kl_coef):
    """r_t = -kl_coef kl_t, plus the score: on the last token that counts for scores (B,), token by token for (B, R).

    kl, mask: (B, R). Zero where mask is False. A row without tokens gets no score. Source: Ziegler et al. 2019, Eq. 2.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    if scores.ndim == 2:
        return rewards + torch.where(mask, scores, 0.0)
    return rewards + torch.where(last_tokens(mask), scores[:, None], 0.0)


def shape_scores(scores, mask, truncated, moments, args):
    """(token scores as trained on, moments): scaled, centred, clipped, less the penalty of truncated responses.

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
    """A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t, over the tokens that count.

    rewards, values, mask: (B, R); mask may have holes, over which value and advantage are carried: the token after a
    hole follows the one before it. A truncated response counts as ended. Returns (advantages, returns = advantages +
    values), both (B, R) and zero where mask is False. Source: Schulman et al. 2016, Eq. 16.
    """
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        counts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, next_advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


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


def learning_rate(args, step, total_steps):
    """Of optimizer step `step`, counted from 0: a linear warm-up to lr, then a decay to lr_final, which it keeps."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return args.lr
    progress = min(1.0, (step - args.warmup_steps) / max(1, args.decay_steps or total_steps - args.warmup_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return args.lr + (args.lr_final - args.lr) * progress


def num_iterations(args):
    """Iterations of the whole run."""
    return args.total_episodes // args.rollout_batch_size


def steps_per_iteration(args):
    """Optimizer steps of an iteration that does not end early."""
    return args.ppo_epochs * (args.rollout_batch_size // args.batch_size)


# ---- Log-probabilities and values ------------------------------------------------------------------------------------


def token_logprobs(logits, ids):
    """log softmax(logits)[id] per token: logits (..., V), ids (...)."""
    return -F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none").view_as(ids)


def attended(query_mask, response_mask):
    """(B, Q + R) bool: the query, and the response through its last token that counts, holes included."""
    return torch.cat([query_mask, response_mask.flip(1).cumsum(1).flip(1) > 0], 1)


def spread(tokens, mask):
    """(B, W, ...) that holds tokens (N, ...) where mask (B, W) is True, row by row, and is zero elsewhere."""
    rows = tokens.new_zeros(*mask.shape, *tokens.shape[1:])
    rows[mask] = tokens
    return rows


def score_tokens(lm, query, query_mask, response, response_mask, temperature=1.0, entropy=False):
    """The one scoring function of rollout, reference and update: (logprobs (B, R), states (B, R, H), entropies).

    query (B, Q) is left-padded, response (B, R) right-padded; masks are True where a token counts, other tokens get 0.
    A log-probability is that of the distribution sampled from: log softmax(logits / temperature), at least in float32.
    states[:, t] is what the output layer reads before response token t. entropies (B, R), where they are asked for,
    else None.
    """
    tokens = torch.cat([query, response], 1)[:, :-1]
    attention = attended(query_mask, response_mask)[:, :-1].long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}

    vocabulary = lm.config.get_text_config().vocab_size

    def terms_of(logits, ids):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            logits = logits / temperature
        terms = [token_logprobs(logits, ids)]
        if entropy:
            terms.append(logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1))
        return torch.stack(terms)

    def compute(layer, states):
        return in_chunks(terms_of, layer, vocabulary, states[response_mask], response[response_mask])

    states = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        terms = call_with_output(lm, compute, **inputs, logits_to_keep=response.shape[1])
    finally:
        hook.remove()
    logprobs, *entropies = (spread(term, response_mask) for term in terms)
    return logprobs, states[0], entropies[0] if entropy else None


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
        for i, (name, weight) in enumerate(self.value_head.named_parameters()):
            bound = layers[int(name[0])].in_features ** -0.5  # torch's default, but keyed: the same on every process
            values = torch.from_numpy(rng(seed, "value_head", i).uniform(-bound, bound, weight.shape))
            is_last = name.startswith(str(len(layers) - 1))
            if is_last and init != "default":
                values = torch.zeros(weight.shape)
            if is_last and init == "normal" and weight.ndim > 1:
                values = torch.from_numpy(rng(seed, "value_head", i).normal(0.0, 0.2, weight.shape))
            weight.data.copy_(values)

    def forward(self, *inputs, **options):
        """(logprobs, values, entropies or None), each (B, R); arguments as of score_tokens. values[:, t] is the value
        of the state before response token t."""
        logprobs, states, entropies = score_tokens(self.lm, *inputs, **options)
        if self.detach_value_trunk:
            states = states.detach()
        with torch.autocast(states.device.type, enabled=False):  # the head keeps float32 under mixed precision
            values = self.value_head(states.to(next(self.value_head.parameters()).dtype))[..., 0]
        return logprobs, values, entropies

    @classmethod
    def load(cls, directory, **options):
        """The exported model of a run, `<run>/hf_model`, with its head. options: those of from_pretrained."""
        auto_class = lm_class(str(directory), **options)
        model = cls(as_decoder(auto_class.from_pretrained(directory, **options)))
        model.load_value_head(directory)
        return model

    def load_value_head(self, directory):
        try:
            weights = safetensors.torch.load_file(Path(directory) / "value_head.safetensors")
            kind = "mlp" if len(weights) == 4 else "linear"
            self.value_head = PolicyWithValue(self.lm, kind).value_head.to(self.lm.device)
            self.value_head.load_state_dict(weights)
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise InputError(f"{directory}/value_head.safetensors does not fit the model: {error}") from None


class Trunk:
    """The lowest `depth` blocks of the policy, which are frozen and shared by its reference. What the last of them
    returns while a rollout is scored is kept, and played back instead of running them: by the reference and in every
    update. Everything but these blocks is the model's own forward. depth 0: no effect.
    """

    def __init__(self, depth, state):
        self.state = state  # its trunk: whether played back states were right, None before that was tried
        self.depth = 0 if state.trunk is False else depth
        self.in_tuple = False  # blocks of some architectures return a tuple

    def needed(self, episodes):
        """(B, Q + R - 1) bool: the tokens that a later one attends to, so all but the last of each row."""
        mask = attended(episodes.query_mask, episodes.response_mask)
        return mask[:, :-1] & mask[:, 1:]

    @contextmanager
    def record(self, lm):
        """Yields a list into which a forward pass within puts what the last frozen block returns."""
        recorded = []
        if not self.depth:
            yield [None]
            return

        def keep(block, inputs, output):
            self.in_tuple = isinstance(output, tuple)
            recorded.append(output[0] if self.in_tuple else output)

        hook = blocks(lm)[self.depth - 1].register_forward_hook(keep)
        try:
            yield recorded
        finally:
            hook.remove()

    @contextmanager
    def play(self, lm, states):
        """Within it the frozen blocks of lm return states (b, T, H) without running; None: they run."""
        frozen = [] if states is None else blocks(lm)[: self.depth]
        for block in frozen:
            block.forward = lambda *_, **__: (states,) if self.in_tuple else states
        try:
            yield
        finally:
            for block in frozen:
                del block.forward

    @torch.no_grad()
    def check(self, accelerator, model, inputs, states, logprobs, args):
        """states, or None where there is no trunk. Once a run they are tried: model must give for inputs the same
        logprobs when they are played back, or the trunk is switched off. Collective."""
        if self.depth and self.state.trunk is None:
            played = torch.full_like(logprobs, math.nan)
            if states.ndim == 3:  # else several vectors a token, as in Gemma 3n
                with suppress(Exception), self.play(accelerator.unwrap_model(model).lm, states):
                    played, _, _ = model(*inputs)  # may fail in any way: top blocks may miss what was not run
            _, _, _, response_mask, _ = inputs
            error = (played - logprobs)[response_mask].abs().max()
            error = accelerator.gather(error[None]).max().item()
            self.state.trunk = error <= 1e-4  # the same operations on the same numbers, in any precision; nan is not
            if not self.state.trunk:
                problem = f"played back, a log-probability is {error:.1e} off"
                if math.isnan(error):
                    problem = "its top blocks read more of the lower ones than one state a token"
                accelerator.print(f"--cache-trunk is off: {problem}")
                self.depth = 0
        return states if self.depth else None


# ---- Rollout ---------------------------------------------------------------------------------------------------------

LEAVING = 3 / 4  # rows that have ended leave the batch when no more than this share of it goes on


@torch.no_grad()
def sample(model, query, query_mask, uniforms, ends, pad_id, temperature=1.0, ended=None):
    """Responses to left-padded queries (B, Q): ids and mask, (B, R), right-padded; the end token counts.

    uniforms: (B, R) float64, drawn before decoding starts, so a row's tokens do not depend on the other rows. ends: ids
    of the tokens that end a row; ended(rows, ids (b, t)) -> (b,) bool ends some without one. Rows that have ended leave
    batch and key-value cache a few at a time. The model's generation_config is not used.
    """
    num_rows, width = uniforms.shape
    ids = torch.full((num_rows, width), pad_id, device=query.device)
    mask = torch.zeros(num_rows, width, dtype=torch.bool, device=query.device)
    ends = torch.tensor(ends, dtype=torch.long, device=query.device)
    rows = torch.arange(num_rows, device=query.device)  # those in the batch
    alive = torch.ones_like(rows, dtype=torch.bool)  # of these, those that go on
    tokens = query
    attention = query_mask.long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache = None
    for t in range(width):
        inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache is None:
            cache = output.past_key_values
            write_in_place(cache, width)
        logits = output.logits[:, -1]
        broken = alive & ~logits.amax(-1).isfinite()
        if broken.any():
            raise FloatingPointError(f"row {int(rows[broken][0])}: logits are not finite at response token {t + 1}")
        tokens = draw(logits, uniforms[rows, t], temperature)
        tokens = torch.where(alive, tokens, pad_id)
        ids[rows, t] = tokens
        mask[rows, t] = alive
        alive = alive & ~torch.isin(tokens, ends)
        if ended is not None:
            going = alive.nonzero()[:, 0]
            alive[going] = ~ended(rows[going], ids[rows[going], : t + 1])
        num_alive = int(alive.sum())
        if num_alive == 0:
            break
        if num_alive <= LEAVING * len(rows):
            staying = closed_ranks(alive)
            cache.reorder_cache(staying)
            rows = rows[staying]
            alive = alive[staying]
            tokens = tokens[staying]
            attention = attention[staying]
            positions = positions[staying]
        tokens = tokens[:, None]
        positions = positions[:, -1:] + 1
        attention = F.pad(attention, (0, 1), value=1)
    return ids, mask


@dataclass
class Rollout:
    """Episodes: the whole iteration's, on every process, or a micro-batch of them."""

    query: torch.Tensor  # (B, Q) ids, left-padded
    query_mask: torch.Tensor  # (B, Q) bool
    response: torch.Tensor  # (B, R) ids as sampled, right-padded
    response_mask: torch.Tensor  # (B, R) bool, the end token counts
    logprobs: torch.Tensor | None = None  # (B, R) of the policy that sampled
    values: torch.Tensor | None = None  # (B, R)
    entropies: torch.Tensor | None = None  # (B, R) of the next-token distribution
    ref_logprobs: torch.Tensor | None = None  # (B, R)
    trunk: torch.Tensor | None = None  # (B, Q + R - 1, H) what the last frozen block returns: Trunk
    raw_scores: torch.Tensor | None = None  # (B, R) of the reward; a single score lies on the last token
    truncated: torch.Tensor | None = None  # (B,) bool, neither end token nor stop string
    scores: torch.Tensor | None = None  # (B, R) as trained on: shape_scores
    rewards: torch.Tensor | None = None  # (B, R)
    advantages: torch.Tensor | None = None  # (B, R), whitened
    returns: torch.Tensor | None = None  # (B, R)

    # What `take` narrows, besides trunk. Any other field keeps its columns.
    ALONG_QUERIES = ("query", "query_mask")
    ALONG_RESPONSES = """response response_mask logprobs values entropies ref_logprobs raw_scores scores rewards
    advantages returns""".split()

    def take(self, rows):
        """The rows, without the columns in which none of them has a token."""
        begin = int(self.query_mask[rows].any(0).int().argmax())
        end = int(self.response_mask[rows].any(0).nonzero().max()) + 1
        columns = dict.fromkeys(self.ALONG_QUERIES, slice(begin, None))
        columns |= dict.fromkeys(self.ALONG_RESPONSES, slice(end))
        columns["trunk"] = slice(begin, self.query.shape[1] + end - 1)
        taken = {}
        for name, field in vars(self).items():
            if field is not None:
                taken[name] = field[rows, columns[name]] if name in columns else field[rows]
        return type(self)(**taken)

    def tokens(self):
        """The arguments of score_tokens."""
        return self.query, self.query_mask, self.response, self.response_mask

    def lengths(self):
        """(B,) tokens of query and response."""
        return self.query_mask.sum(1) + self.response_mask.sum(1)


@torch.no_grad()
def rollout(accelerator, model, ref, trunk, tokenizer, rows, queries, reward, iteration, args):
    """Samples a response to each query and scores it with policy, reference and reward."""
    device = accelerator.device
    lm = accelerator.unwrap_model(model).lm
    # 1. y ~ pi(. | x)
    limits = None
    if args.min_length_limit:
        limits = rng(args.seed, "limits", iteration).integers(args.min_length_limit, args.max_new_tokens + 1, len(rows))
        limits = torch.from_numpy(limits).to(device)
    sampled = generate_all(
        accelerator, lm, tokenizer, queries, ("rollout", iteration), seed=args.seed, stop=args.stop, limits=limits,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, decode_batch_size=args.decode_batch_size,
        sample=sample,
    )  # fmt: skip
    batch = Rollout(*sampled).take(slice(None))
    mask = batch.response_mask
    # 2. what the policy did, and what the reference thinks of it
    share = len(queries) // accelerator.num_processes
    local = torch.arange(share, device=device) + accelerator.process_index * share
    by_length = local[batch.lengths()[local].argsort(stable=True)]
    scored = []
    for places in by_length.split(args.micro_batch_size):
        scored.append(score_episodes(accelerator, model, ref, trunk, batch.take(places), args))
    for name in scored[0]:
        tokens = torch.cat([micro_batch[name] for micro_batch in scored])
        counted = trunk.needed(batch) if name == "trunk" else mask
        in_order = spread(tokens, counted[by_length])[by_length.argsort()]
        setattr(batch, name, accelerator.gather(in_order))
    # 3. the reward of the texts
    output_ids = kept_ids(batch.response, mask)
    outputs = decode(tokenizer, queries, output_ids, args.stop)
    ended = has_ended(tokenizer, output_ids, end_tokens(lm), args.stop)
    scores = score_outputs(accelerator, reward, args, tokenizer, rows, outputs, output_ids, ended)
    batch.raw_scores = place_scores(scores, mask).to(batch.logprobs.dtype)
    batch.truncated = ~torch.tensor(ended, device=device)
    return batch


def score_episodes(accelerator, model, ref, trunk, episodes, args):
    """{field of Rollout: (N, ...)}: what policy and reference say of the tokens that count in a micro-batch, N."""
    lm = accelerator.unwrap_model(model).lm
    inputs = *episodes.tokens(), args.temperature
    with trunk.record(lm) as recorded:
        logprobs, values, entropies = model(*inputs, entropy=True)
    states = trunk.check(accelerator, model, inputs, recorded[0], logprobs, args)
    with accelerator.autocast(), trunk.play(ref, None if args.ref_model else states):
        ref_logprobs, _, _ = score_tokens(ref, *inputs)
    columns = {"logprobs": logprobs, "values": values, "entropies": entropies, "ref_logprobs": ref_logprobs}
    scored = {name: column[episodes.response_mask] for name, column in columns.items()}
    if states is not None:
        scored["trunk"] = states[trunk.needed(episodes)]
    return scored


def place_scores(scores, mask):
    """(B, R) in float64 from a number a sample, which goes to its last token, or from a list with one a token.

    mask: (B, R) True at the tokens that count. A row without tokens gets no score.
    """
    values = []
    for score, length in zip(scores, mask.sum(1).tolist(), strict=True):
        if not isinstance(score, list):
            score = [0.0] * (length - 1) + [score]
        values += score[:length]
    return spread(torch.tensor(values, dtype=torch.float64, device=mask.device), mask)


def rollout_metrics(batch, kl_coef):
    """Of the episodes: objective/ and tokens/ are means per sequence, policy/ and val/ per token."""
    mask = batch.response_mask
    scores = batch.raw_scores.sum(1)
    errors = (batch.returns - batch.values)[mask]

    def per_sequence(x):
        return torch.where(mask, x, 0.0).sum(1).mean()

    metrics = {
        "objective/kl": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "kl")),
        "objective/kl_k3": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "k3")),
        "objective/entropy": -per_sequence(batch.logprobs),
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": per_sequence(batch.rewards - batch.scores),
        "objective/rlhf_reward": per_sequence(batch.rewards),
        "policy/entropy": batch.entropies[mask].mean(),
        "val/explained_variance": 1 - errors.var(correction=0) / batch.returns[mask].var(correction=0),
        "val/error": errors.square().mean(),
        "tokens/queries_len": batch.query_mask.sum(1).double().mean(),
        "tokens/responses_len": mask.sum(1).double().mean(),
        "tokens/eos_rate": 1 - batch.truncated.double().mean(),  # stop strings included
        "tokens/truncated_rate": batch.truncated.double().mean(),
    }
    return {name: float(value) for name, value in metrics.items()} | {"objective/kl_coef": kl_coef}


# ---- Update ----------------------------------------------------------------------------------------------------------


def minibatches(accelerator, lengths, args, iteration, epoch):
    """(rows, micro_batches) of each optimizer step of a PPO epoch: global row indices, from a keyed permutation of the
    episodes, and this process's share of them in pieces of micro_batch_size, by their lengths (B,)."""
    order = torch.from_numpy(rng(args.seed, "minibatches", iteration, epoch).permutation(args.rollout_batch_size))
    for rows in order.to(accelerator.device).split(args.batch_size):
        local = rows[accelerator.process_index :: accelerator.num_processes]
        yield rows, local[lengths[local].argsort(stable=True)].split(args.micro_batch_size)


def losses(model, episodes, args):
    """The sum of policy and value losses over the tokens of a micro-batch that count, and {metric: sum over these
    tokens}. A term counts as clipped where the clipped side is the larger."""
    mask = episodes.response_mask
    logprobs = episodes.logprobs[mask]
    values = episodes.values[mask]
    advantages = episodes.advantages[mask]
    returns = episodes.returns[mask]
    new_logprobs, new_values, _ = model(*episodes.tokens(), temperature=args.temperature)
    new_logprobs = new_logprobs[mask]
    new_values = new_values[mask]
    pg = policy_loss(new_logprobs, logprobs, advantages, args.cliprange)
    vf = value_loss(new_values, values, returns, args.cliprange_value)
    loss = pg.sum() + args.vf_coef * vf.sum()
    with torch.no_grad():
        log_ratio = new_logprobs - logprobs
        ratio = log_ratio.exp()
        terms = {
            "loss/policy": pg,
            "loss/value": vf,
            "policy/approxkl": log_ratio.square() / 2,
            "policy/clipfrac": pg > -advantages * ratio,
            "policy/ratio": ratio,
            "val/clipfrac": vf > value_loss(new_values, values, returns, 0),
        }
        return loss, {name: term.double().sum() for name, term in terms.items()}


def add_to(sums, terms):
    """Adds terms {name: number} to sums {name: number}, which may be empty."""
    for name, term in terms.items():
        sums[name] = sums.get(name, 0) + term


def update(accelerator, model, optimizer, trunk, batch, rows, iteration, args):
    """K epochs of minibatches, an optimizer step each. Returns metrics: means over the response tokens of all epochs,
    and what became of the steps. rows: those of the prompts, for an error."""
    lm = accelerator.unwrap_model(model).lm
    tokens = int(batch.response_mask.sum())
    step = (iteration - 1) * steps_per_iteration(args)
    total_steps = num_iterations(args) * steps_per_iteration(args)
    sums = {}
    epochs = 0
    skipped = 0
    grad_norm = torch.zeros(())
    model.train()
    for epoch in range(args.ppo_epochs):
        epoch_sums = {}
        for minibatch, micro_batches in minibatches(accelerator, batch.lengths(), args, iteration, epoch):
            step_sums = {}
            count = batch.response_mask[minibatch].sum()  # response tokens of all processes
            for places in micro_batches:
                episodes = batch.take(places)
                last = places is micro_batches[-1]
                with nullcontext() if last else accelerator.no_sync(model), trunk.play(lm, episodes.trunk):
                    loss, terms = losses(model, episodes, args)
                    # data-parallel training averages gradients over the processes, hence the factor
                    accelerator.backward(loss * accelerator.num_processes / count)
                add_to(step_sums, terms)
            add_to(epoch_sums, step_sums)
            lr = learning_rate(args, step, total_steps)
            step += 1
            if args.ratio_threshold:
                ratios = accelerator.reduce(step_sums["policy/ratio"])
                if ratios > args.ratio_threshold * count:
                    skipped += 1
                    optimizer.zero_grad()
                    continue
            for group in optimizer.param_groups:
                group["lr"] = lr
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            if not grad_norm.isfinite():
                prompt = rows[int(minibatch[0])]["prompt"]
                numbers = f"gradient norm {grad_norm} of the {len(minibatch)} episodes whose first is {prompt!r:.60}"
                raise FloatingPointError(f"step {step}: {numbers}; the last checkpoint is intact")
            optimizer.step()
            optimizer.zero_grad()
        add_to(sums, epoch_sums)
        epochs += 1
        if args.early_stop_kl:
            approxkl = accelerator.reduce(epoch_sums["policy/approxkl"])
            if approxkl > args.early_stop_kl * tokens:
                break
    sums = accelerator.reduce(sums)
    metrics = {name: total.item() / (tokens * epochs) for name, total in sums.items()}
    metrics["episode"] = iteration * args.rollout_batch_size
    metrics["loss/total"] = metrics["loss/policy"] + args.vf_coef * metrics["loss/value"]
    metrics |= {"policy/epochs": epochs, "policy/skipped": skipped}
    return metrics | {"optim/lr": lr, "optim/grad_norm": grad_norm.item()}  # the norm is that of the last step taken


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run, step, model, tokenizer, data, args):
    """What reward and metric say of sampled responses, some of which are shown."""
    accelerator = run.accelerator
    lm = accelerator.unwrap_model(model).lm
    model.eval()
    metrics = {}
    samples = []

    with unsharded(model):
        for name, (rows, queries) in data.eval_sets.items():
            means, set_samples = evaluate_samples(
                accelerator, lm, tokenizer, rows, queries, data.metric, args, reward=data.reward
            )
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            if len(data.eval_sets) > 1:
                set_samples = [{"set": name} | row for row in set_samples]
            samples += set_samples
    run.samples(step, samples)
    return metrics


def check(run, model, optimizer, tokenizer, data, args):
    """What --check does: an evaluation, and an update on the longest queries with responses of --max-new-tokens."""
    evaluate(run, 0, model, tokenizer, data, args)
    accelerator = run.accelerator
    longest = longest_micro_batch(data.queries, len, accelerator, args)
    query, query_mask = pad_left(longest, tokenizer.pad_token_id, accelerator.device)
    response = query[:, -1:].repeat(1, args.max_new_tokens)
    mask = torch.ones_like(response, dtype=torch.bool)
    zeros = torch.zeros(response.shape, device=accelerator.device)
    columns = {"logprobs": zeros, "values": zeros, "advantages": zeros, "returns": zeros}
    episodes = Rollout(query, query_mask, response, mask, **columns)
    run.say(try_update(accelerator, model, optimizer, lambda: losses(model, episodes, args)[0]))
    run.say("check passed")


# ---- Setup -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a run reads: rows at first, tokens as soon as there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: (rows, queries)}
    reward: Callable | None  # None: a model, which needs that of the policy to be loaded
    metric: Callable | None
    queries: list | None = None  # ids of the prompts
    report: str = ""


def read(args):
    """The rows and functions that the flags name."""
    metric = load_function(args.metric, "--metric")
    reward = None
    if not isinstance(args.reward, str) or re.search(r"\.py(:|$)", args.reward):
        reward = load_function(args.reward, "--reward")
    else:
        refuse_mistyped(args.reward, "--reward")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    return Data(rows, eval_sets, reward, metric)


def load(args, path, device):
    """The language model, with frozen weights or adapters as the flags say, its tokenizer, and how many of the lowest
    blocks policy and reference can share as a trunk."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    problem = None if lm.config.is_encoder_decoder else cache_problem(lm.eval())
    if problem:
        raise InputError(f"--model {args.model}: {problem}, with which ppo samples")
    train_adapters(lm, args)
    depth = freeze(lm, args.num_layers_unfrozen)
    if lm.config.is_encoder_decoder or not args.cache_trunk:
        depth = 0
    return lm, tokenizer, depth


def encode(data, lm, tokenizer, args):
    """Makes tokens of all prompts."""
    limit = max_positions(lm)
    options = {"max_length": args.max_prompt_length, "encoder": lm.config.is_encoder_decoder}
    num_read = len(data.rows)
    data.rows, data.queries = encode_prompts(data.rows, tokenizer, args.max_new_tokens, limit, "--dataset", **options)
    for name, rows in data.eval_sets.items():
        data.eval_sets[name] = encode_prompts(rows, tokenizer, args.max_new_tokens, limit, set_flag(name), **options)
    if not data.eval_sets:
        size = args.rollout_batch_size
        data.eval_sets = {"": (data.rows[:size], data.queries[:size])}
    lengths = sorted(map(len, data.queries))
    data.report = (
        f"{num_read} prompts, {num_read - len(data.rows)} dropped as too long; "
        f"tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
    )


def make_reference(args, path, lm, tokenizer):
    """The model of --ref-model, or the policy as it is now. It shares the memory of weights that are not trained."""
    if path:
        ref = load_reference(args, path, lm, tokenizer)
        share_frozen(ref, lm)
        return ref
    ref = frozen_copy(lm)
    if args.lora_r:
        ref.disable_adapters()  # new ones add zero
    return ref


def make_policy(args, path, lm):
    """The language model with a new value head, or with that of the --model directory."""
    policy = PolicyWithValue(lm, args.value_head, args.value_head_init, args.seed, args.detach_value_trunk)
    folder = spec_path(path)
    if folder and (folder / "value_head.safetensors").exists():
        policy.load_value_head(folder)
    return policy.to(lm.device)


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def summary(args, accelerator, policy, data):
    """What is trained on what, in a few lines."""
    total = sum(weight.numel() for weight in policy.parameters())
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    reference = "a frozen copy"
    if args.ref_model:
        reference = "a model of its own"
    elif not all(weight.requires_grad for weight in policy.lm.parameters()):
        reference = "shares the frozen weights"
    if isinstance(data.reward, RewardModel):
        reference += f"; reward: {data.reward.shared:,} parameters of the policy's, {data.reward.own:,} of its own"
    lines = [
        f"ppo: {total:,} parameters, {trained:,} trained; reference: {reference}; "
        f"{describe_layout(args, accelerator)}; {describe_output(policy.lm)}",
        f"data: {data.report}; first: {visible(data.rows[0]['prompt'])[:200]}",
        f"lr {args.lr:g} {args.lr_schedule}, KL coefficient {args.kl_coef:g}, value loss x {args.vf_coef:g}, "
        f"{args.max_new_tokens} new tokens, {args.total_episodes} episodes, {args.ppo_epochs} PPO epochs",
        f"{num_iterations(args)} iterations x ({args.rollout_batch_size} episodes, then {steps_per_iteration(args)} "
        f"optimizer steps of {args.batch_size}: {args.batch_size // accelerator.num_processes} rows a process, "
        f"{args.micro_batch_size} a forward)",
    ]
    if args.stop:
        lines[-1] += f"; stops: {list(args.stop)}"
    return "\n".join(lines)


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = "objective/scores objective/kl loss/policy loss/value val/explained_variance".split()


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    ref_path = build(args.ref_model, "--ref-model")
    data = read(args)
    accelerator = launch(args)
    lm, tokenizer, depth = load(args, path, accelerator.device)
    encode(data, lm, tokenizer, args)
    ref = make_reference(args, ref_path, lm, tokenizer)
    data.reward = data.reward or RewardModel(args, lm)
    policy = make_policy(args, path, lm)

    run = Run("ppo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    optimizer = make_optimizer(policy, args)
    model = accelerator.prepare(policy, optimizer)[0]  # FSDP2 gives shards to both
    stride = steps_per_iteration(args)
    total_steps = num_iterations(args) * stride
    quantities = {"iteration": 0, "kl_coef": args.kl_coef, "moments": [0, 0.0, 0.0], "trunk": None}
    headline = "objective/scores"
    if args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}reward"
    options = {"longer": "--total-episodes", "headline": headline, "stride": stride}
    state = run.restore(model, optimizer, lm, total_steps, **options, **quantities)
    trunk = Trunk(depth, state)
    run.say(summary(args, accelerator, policy, data))
    if args.check:
        check(run, model, optimizer, tokenizer, data, args)
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, tokenizer, data, args))
    heads = {"value_head.safetensors": policy.value_head.state_dict()}

    for iteration in range(state.iteration + 1, num_iterations(args) + 1):
        start = time.perf_counter()
        # 1. y ~ pi(. | x): responses with their log-probabilities, values and scores
        model.eval()
        size = args.rollout_batch_size
        drawn = stream_rows(args.seed, "data", len(data.rows), (iteration - 1) * size, size)
        rows = [data.rows[i] for i in drawn]
        queries = [data.queries[i] for i in drawn]
        with unsharded(model):
            batch = rollout(accelerator, model, ref, trunk, tokenizer, rows, queries, data.reward, iteration, args)
        # 2. r_t = -beta KL_t, plus the score on the last token; A_t by GAE (Eq. 16), whitened
        mask = batch.response_mask
        batch.scores, state.moments = shape_scores(batch.raw_scores, mask, batch.truncated, state.moments, args)
        kl = kl_penalty(batch.logprobs, batch.ref_logprobs, args.kl_kind)
        batch.rewards = token_rewards(batch.scores, kl, mask, state.kl_coef)
        rewards = batch.rewards
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, batch.returns = gae(rewards, batch.values, mask, args.gamma, args.lam)
        batch.advantages = masked_whiten(advantages, mask)
        seconds_rollout = time.perf_counter() - start
        # 3. K epochs of minibatches: clipped policy loss (PPO Eq. 7) and value loss
        update_metrics = update(accelerator, model, optimizer, trunk, batch, rows, iteration, args)
        seconds = time.perf_counter() - start
        # 4. beta follows the KL of this iteration (Ziegler Sec. 2.2)
        metrics = rollout_metrics(batch, state.kl_coef) | update_metrics
        if args.kl_target:
            state.kl_coef = next_kl_coef(state.kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, size)
        # 5. evaluate, log, save
        step = iteration * stride  # also where epochs were left out: schedules follow the episodes
        perf = {
            "perf/seconds_rollout": seconds_rollout,
            "perf/seconds_update": seconds - seconds_rollout,
            "perf/tokens_per_sec": int(mask.sum()) / seconds,
            "perf/episodes_per_sec": size / seconds,
        }
        if run.evaluation_due(step):
            metrics |= evaluate(run, step, model, tokenizer, data, args)
            if run.is_best(step, metrics[headline]):
                run.export(to_export(lm, args), tokenizer, "hf_model_best", heads)
        run.log(step, metrics, perf)
        text = " | ".join(f"{name.split('/')[1]} {metrics[name]:.3g}" for name in IN_STATUS)
        run.status(step, f"{text} | rollout {seconds_rollout:.2f} s + update {seconds - seconds_rollout:.2f} s")
        state.iteration = iteration
        run.save_if_due(step)

    run.export(to_export(lm, args), tokenizer, "hf_model", heads)
    title = f"{run.identity['flags']['model']} after PPO on {run.identity['flags']['reward']}"
    metrics = run.finish(title, *lines_of_use(lm, tokenizer, data.queries[0]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
