"""Group relative policy optimisation (GRPO) of a language model against a reward.

Paper: Shao et al. 2024 (arXiv 2402.03300), Algorithm 1. Each prompt gets a group of responses, and the mean score of
the group takes the place of a value function.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)                GRPO Sec. 4.1.2, 1e-4 of TRL    group_advantages
    max(-A ratio, -A clip(ratio, 1 - low, 1 + high))       GRPO Eq. 3         clip_loss
    exp(-x) - 1 + x, x = log pi - log pi_ref               GRPO Eq. 4         kl_k3
    mean over responses of means over their tokens         GRPO Eq. 3         token_weights
    mean log-ratio of a response                           GSPO Eq. 7         sequence_means
    -sg(clip(ratio, 1 - low, 1 + high)) A log pi           CISPO Eq. 4, 5     cispo_loss
    pi_old / pi_sampler, limited                           TIS, AReaL Eq. 5   correction_weights

Dr. GRPO, RLOO, DAPO, GSPO, CISPO, MaxRL and on-policy distillation are flags: "Variants of GRPO" in algos/README.md.

What is trained: every token that was sampled, with the end token and a stop string, also where a response did not end;
neither prompts nor what a tool wrote. Tokens are drawn from softmax(logits / --temperature), without top-k or top-p,
and the loss takes their probabilities in this distribution.

How this differs from the paper: the reference and the reward model never change, and each response has one score
(outcome supervision, Sec. 4.1.2). From GRPO in TRL 1.16: the loss has the paper's defaults (TRL: the mean over tokens,
without a KL). Every draw is a function of seed, iteration and number, and a loss is the mean over its optimizer step in
all processes: up to rounding, neither processes nor micro-batches nor padding change a result.

    accelerate launch algos/grpo.py                                # sums with written steps, on one CPU
    accelerate launch algos/grpo.py --model my_model/ --dataset problems.jsonl --reward my_reward.py:score \
        --max-new-tokens 256 --kl-coef 0
    torchrun --nproc_per_node 8 algos/grpo.py --model Qwen/Qwen3-0.6B --dataset org/problems:train \
        --reward my_reward.py:score

Dimension key: B episodes, G of them a group, R trained tokens of an episode, n of a micro-batch. A line is what the
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

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, Share, StopString, cli
from common.errors import InputError
from common.functions import build
from common.launch import accumulate, gather_list, local_rows, on_main, prepare, reduce_sums, require_finite, unsharded
from common.lm.adapters import for_sampling
from common.lm.chat import is_chat
from common.lm.classifier import RewardModel
from common.lm.evaluation import evaluate_sets, log_episodes, summed, text_arguments
from common.lm.load import lines_of_use, load_lm, make_reference
from common.lm.logprobs import line_logprobs, token_entropies
from common.lm.own_rollouts import call_rollout, own_rollout
from common.lm.sampling import have_ended, sample, uniforms
from common.lm.structure import max_positions
from common.lm.tokens import decode, encode_prompts, int32, longest_first, split_lines, tell_unended_turns
from common.report import screen
from common.rows import longest_rows, read_data, set_flag, set_prefix
from common.run import Run, closes_run
from common.seeding import rng

TASK = "benchmarks/tasks/arithmetic/grpo.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """Group relative policy optimisation of a language model."""

    # ---- algorithm
    reward: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> one number per sample, or a list with one per token,
    which is summed, or {"score": these, name: further columns to log}. Or the directory or hub id of a sequence
    classifier (with :label if it has several) or of a LoRA adapter for one. Without it, only the KL to --ref-model is
    trained (algos/README.md, "Distillation"). outputs keep special tokens that neither begin, end nor pad."""
    total_episodes: Count = 65536
    """Length of the run in episodes (one prompt with one response), rounded down to whole iterations."""
    rollout_batch_size: Count | None = None
    """Episodes per iteration, over all processes: --group-size for each prompt. Default: 512, or --total-episodes if
    that is less."""
    group_size: Count = 8
    """Responses per prompt, whose scores are compared (Shao et al. 2024: 64; TRL: 8)."""
    ppo_epochs: Count = 1
    """Passes over the episodes of an iteration (mu of Algorithm 1; Shao et al. 2024: 1)."""
    advantage_kind: Literal["std", "batch", "mean", "loo", "maxrl"] = "std"
    """Advantage of a score in its group. std: minus the mean, divided by the standard deviation (GRPO); batch: divided
    by the deviation of all scores of the iteration instead (TRL: scale_rewards='batch'); mean: minus the mean (Dr.
    GRPO); loo: minus the mean of the others (RLOO), which is G / (G - 1) times `mean`. AdamW ignores this factor except
    through --adam-eps, --max-grad-norm and the KL. maxrl: minus the mean, divided by the mean (MaxRL): for scores of 0
    and 1, the larger the group, the closer to the gradient of the log-probability of a right response."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """clip: the ratio times the advantage, whose gradient is 0 where the ratio has left the clip range (GRPO Eq. 3);
    cispo: the log-probability times the clipped ratio, which has no gradient (CISPO Eq. 4 and 5; no lower limit:
    --cliprange 1)."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio to the policy before the update: per token, or the geometric mean over a response (GSPO Eq. 7), which needs
    far smaller clip ranges (GSPO Sec. 5.1: 3e-4 and 4e-4)."""
    loss_mean: Literal["sequence", "token", "constant"] = "sequence"
    """How an optimizer step averages the loss. sequence: the mean of each response's token mean (GRPO Eq. 3); token:
    over all tokens (DAPO Sec. 3.3); constant: the sum divided by --batch-size times --max-new-tokens (Dr. GRPO)."""
    cliprange: NonNegative = 0.2
    """How far the ratio may fall below 1 before it is clipped (epsilon of GRPO Eq. 3)."""
    cliprange_high: NonNegative | None = None
    """How far the ratio may rise above 1 before it is clipped (Yu et al. 2025: 0.28); default: --cliprange."""
    correction: Literal["none", "truncate", "mask", "sequence-mask", "decoupled"] = "none"
    """Weight of a token's policy loss, where a --rollout returns the log-probabilities of its sampler as the column
    sampler_logprobs. The ratio is a token's probability by the policy before the update over that by the sampler.
    none: 1; decoupled: the ratio (AReaL Eq. 5); truncate: the ratio, at most --correction-limit (TIS, Yao et al. 2025);
    mask: the ratio, or 0 if it is above the limit; sequence-mask: the product of the response's ratios, or 0 if it is
    above the limit (default of TRL 1.16)."""
    correction_limit: Positive = 2.0
    """Limit of truncate, mask and sequence-mask (Yao et al. 2025: 2; TRL 1.16: 3)."""
    ref_model: str | None = None
    """Reference model for the KL, given like --model; default: a frozen copy of --model at the start."""
    kl_coef: NonNegative = 0.04
    """Weight beta of the per-token KL to the reference in the loss (Shao et al. 2024: 0.04). With 0 there is no
    reference, and no KL is logged; 1e-9 logs it without training on it."""
    unbiased_kl: bool = False
    """Multiply the KL by the ratio of --ratio-level and differentiate the ratio, too: by tokens, its gradient is then
    that of KL(policy || reference) (DeepSeek-V3.2, arXiv 2512.02556, Eq. 7; on by default in TRL 1.16)."""

    # ---- sampling
    max_new_tokens: Count = 512
    """Maximum length of a response, in tokens (Shao et al. 2024: 1024; TRL: 512)."""
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
    lr: Positive = 1e-6
    """Peak learning rate of AdamW (Shao et al. 2024: 1e-6; on SmolLM2-135M the highest rates that were tried did best:
    1e-5 for all weights, 1e-3 for LoRA adapters of rank 16)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate schedule after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final is reached; default: the rest of the run."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count | None = None
    """Episodes per optimizer step, over all processes. Default: 512, or --rollout-batch-size if that is less (Shao et
    al. 2024: 1024, all episodes of an iteration)."""
    micro_batch_size: Count = 8
    """Episodes per process and forward pass; of shorter ones more, up to the tokens of so many of the longest. Changes
    memory and speed; the result only by rounding."""

    # ---- data
    max_prompt_length: Count | None = None
    """Drop prompts with more tokens than this, and count them. Default: one that does not fit the model is an error."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list of one number per sample}."""

    # ---- run
    save_every: Natural = 20
    """Optimizer steps between checkpoints, at most ten minutes; 0: only at the end, the best evaluation or a signal."""
    eval_every: Natural = 20
    """Optimizer steps between evaluations, which also happen at the start and the end; 0: never evaluate."""

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
        if self.reward is None and self.ref_model is None:
            yield "--reward is missing: --help says what it takes"
        elif self.reward is None and not self.unbiased_kl:
            yield "without --reward, give --unbiased-kl to distil from --ref-model; otherwise --reward is missing"
        if self.group_size == 1:
            yield "--group-size 1 must be at least 2: a response is compared with the others in its group"
        if self.rollout_batch_size % max(1, self.group_size):
            yield f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --group-size {self.group_size}"
        if self.num_layers_unfrozen == 0:
            yield "--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1"
        if self.ref_model is not None and self.kl_coef == 0:
            yield "--ref-model needs a --kl-coef above 0"


# ---- Maths -----------------------------------------------------------------------------------------------------------


def group_advantages(scores, group_size, kind):
    """(B,) advantage of each score (B,) over its group; those of a group are next to each other.

    std: (r - mean) / (std + 1e-4) (GRPO, Shao et al. 2024, Sec. 4.1.2; the constant and the unbiased deviation are
    TRL's); batch: with the deviation of all scores (Liu et al. 2025b, arXiv 2508.08221); mean: r - mean (Dr. GRPO, Liu
    et al. 2025, Sec. 3.2); loo: r - mean of the others (RLOO, Ahmadian et al. 2024); maxrl: (r - mean) / mean (Tajwar
    et al. 2026), for scores that are not negative. Zero in a group of equal scores.
    """
    groups = scores.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if kind == "std":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif kind == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    elif kind == "loo":
        advantages = advantages * (group_size / (group_size - 1))
    elif kind == "maxrl":
        advantages = advantages / groups.mean(1, keepdim=True)
    elif kind != "mean":
        raise ValueError(f"there is no advantage {kind!r}")
    advantages[groups.amax(1) == groups.amin(1)] = 0.0  # rounding of the mean would leave a tiny advantage
    return advantages.flatten()


def clip_loss(log_ratio, advantages, cliprange, cliprange_high):
    """max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange_high)), ratio = exp(log_ratio); unreduced, shapes that
    broadcast. Source: minus the min of Shao et al. 2024, Eq. 3; two ranges: DAPO, Sec. 3.1."""
    ratio = log_ratio.exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high))


def cispo_loss(logprobs, log_ratio, advantages, cliprange, cliprange_high):
    """-A weight logprobs, weight = clip(exp(log_ratio), 1 - cliprange, 1 + cliprange_high) without a gradient, so that
    no token loses its own; unreduced, shapes that broadcast. Source: MiniMax-M1, Chen et al. 2025, Eq. 4 and 5."""
    weight = log_ratio.detach().exp().clamp(1 - cliprange, 1 + cliprange_high)
    return -advantages * weight * logprobs


def sequence_means(log_ratio, lengths):
    """(n,): for each token the mean of log_ratio (n,) over its response, whose exponential is the geometric mean of the
    ratios. lengths: tokens of each response. Source: GSPO, Zheng et al. 2025, Eq. 7."""
    # 0: a process may have no response, and `cat` needs a tensor
    return torch.cat([response.mean().expand_as(response) for response in log_ratio.split([*lengths, 0])])


def correction_weights(log_ratio, lengths, correction, limit):
    """(n,) weights of the policy loss for log_ratio = log pi_old - log pi_sampler (n,), without a gradient. lengths:
    tokens of each response. Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training" (truncate); AReaL, Fu et al. 2025, arXiv 2505.24298, Eq. 5 (decoupled); TRL 1.16 (masks)."""
    if correction == "none":
        return torch.ones_like(log_ratio)
    if correction == "sequence-mask":
        log_ratio = torch.cat([response.sum().expand_as(response) for response in log_ratio.split([*lengths, 0])])
    weights = log_ratio.exp()
    if correction == "truncate":
        return weights.clamp(max=limit)
    if correction == "decoupled":
        return weights
    return weights.masked_fill(weights > limit, 0.0)


def kl_k3(logprobs, ref_logprobs):
    """Per-token estimate of KL(policy || reference), never negative; any shape. Its value is unbiased; its gradient,
    where the policy has drawn the tokens, is that of KL(reference || policy). Source: Shao et al. 2024, Eq. 4."""
    x = logprobs - ref_logprobs
    return (-x).expm1() + x


def token_weights(lengths, loss_mean, max_new_tokens):
    """(B,) what a token of each response weighs in the loss of an optimizer step. lengths (B,): its trained tokens.

    sequence: 1 / (B length), GRPO Eq. 3; token: 1 / all tokens of the step, DAPO Sec. 3.3 (there of a group); constant:
    1 / (B max_new_tokens), Dr. GRPO, Liu et al. 2025, Sec. 3.2.
    """
    lengths = lengths.double()
    if loss_mean == "sequence":
        return 1 / (len(lengths) * lengths)
    if loss_mean == "token":
        return torch.full_like(lengths, 1 / lengths.sum())
    if loss_mean == "constant":
        return torch.full_like(lengths, 1 / (len(lengths) * max_new_tokens))
    raise ValueError(f"there is no mean {loss_mean!r}")


# ---- Rollout ---------------------------------------------------------------------------------------------------------


def no_reward(outputs, **columns):
    """In place of a --reward that is left out."""
    return [0.0] * len(outputs)


@dataclass(eq=False)  # compared by identity: tensors cannot be
class Episode:
    """A query with a response, on every process. Tensors have a number for each trained token, (R,)."""

    row: dict  # of the data set, with what a --rollout function has added
    query: list  # ids of the prompt
    response: list  # ids, with the end token
    trained: list  # for each id of the response, whether it is trained: all are, except with --rollout
    ended: bool  # by an end token or a stop string; with --rollout also where there was room for more
    score: float
    advantage: float = 0.0
    weight: float = 0.0  # of each of its tokens in the loss of a step
    logprobs: torch.Tensor | None = None  # of the policy before the update; None: the single step computes them
    ref_logprobs: torch.Tensor | None = None

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
    for its score, and policy and reference for its log-probabilities. The metrics are other columns of the reward."""
    lm = accelerator.unwrap_model(model)
    # 1. y ~ pi(. | x)
    if data.rollout is None:
        limits = [args.max_new_tokens] * len(queries)  # --min-length-limit of ppo.py draws them
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
    scores = list(map(summed, scores))
    if args.advantage_kind == "maxrl":
        on_main(accelerator, refuse_negative, scores)
    episodes = [*map(Episode, rows, queries, responses, trained, ended, scores)]
    # 3. log-probabilities of the policy, log-probabilities of the reference
    # computed as in training, because sampling rounds differently; a single optimizer step computes the policy's itself
    if args.steps_per_iteration > 1:
        store_logprobs(accelerator, model, episodes, "logprobs", args)
    if ref is not None:
        store_logprobs(accelerator, ref, episodes, "ref_logprobs", args)
    return episodes, reward_means


def refuse_negative(scores):
    """InputError if a score is negative: --advantage-kind maxrl divides by the mean, which would turn it round."""
    if min(scores) < 0:
        raise InputError(f"a score is {min(scores):g}: with --advantage-kind maxrl, none may be below 0")


def store_logprobs(accelerator, model, episodes, name, args):
    """Gives every episode, as the field `name`, the log-probabilities of its trained tokens."""

    def logprobs_of(lines):
        with accelerator.autocast():  # nothing else casts for ref, except FSDP2
            logprobs, _, _ = line_logprobs(model, lines, args.temperature)
        return {name: logprobs}

    store_columns(accelerator, episodes, args, logprobs_of)


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


def rollout_metrics(episodes, scores, args):
    """Means over the episodes of the iteration, whose scores are (B,)."""
    groups = scores.view(-1, args.group_size)
    size = len(episodes)
    ended = sum(episode.ended for episode in episodes)
    return {
        "objective/scores": scores.mean().item(),
        "objective/scores_std": scores.std(correction=0).item(),
        "groups/equal": (groups.amax(1) == groups.amin(1)).double().mean().item(),
        "tokens/eos_rate": ended / size,  # stop strings included
        "tokens/truncated_rate": 1 - ended / size,
        "tokens/queries_len": sum(len(episode.query) for episode in episodes) / size,
        "tokens/responses_len": sum(episode.length for episode in episodes) / size,
    }


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
        kept = minibatch
        if args.kl_coef == 0:
            # saves time only: without a KL, an episode without an advantage has no gradient, but counts in the mean
            kept = [episode for episode in minibatch if episode.advantage] or minibatch[:1]
        examples = [episode.example for episode in kept]
        yield minibatch, split_lines(accelerator, examples, args.micro_batch_size)


def losses(model, lines, counts, args):
    """(loss, metrics): this micro-batch's shares of the step's loss (float64) and of the iteration's means.

    counts: how many "steps", "sequences", "tokens" and tokens "with an advantage" that is not 0 the means of the
    iteration are over; "of a sampler" is 0 if no sampler has told its log-probabilities.
    """
    episodes = episodes_of(lines)
    entropies_of = torch.no_grad()(token_entropies)
    new_logprobs, _, entropies = line_logprobs(model, lines, args.temperature, entropies_of)  # (n,), as all that follow
    lengths = [episode.length for episode in episodes]
    # (n,) each: advantage and weight of an episode at each of its tokens; view: there may be no episode
    numbers = torch.tensor([[episode.advantage, episode.weight] for episode in episodes], dtype=torch.float64)
    numbers = numbers.view(-1, 2).repeat_interleave(torch.tensor(lengths, dtype=torch.long), 0)
    advantages, weights = numbers.to(new_logprobs.device).unbind(1)
    # log-probabilities of the policy before the update. A single step trains this very policy: then they are those of
    # this forward pass, so the ratio is 1, and the gradient of the ratio is that of log pi.
    logprobs = new_logprobs.detach()
    if episodes and episodes[0].logprobs is not None:
        logprobs = of_all(episodes, "logprobs", new_logprobs)
    log_ratio = new_logprobs - logprobs
    if args.ratio_level == "sequence":
        log_ratio = sequence_means(log_ratio, lengths)
    cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    if args.policy_loss == "clip":
        policy_terms = clip_loss(log_ratio, advantages, args.cliprange, cliprange_high)
    else:
        policy_terms = cispo_loss(new_logprobs, log_ratio, advantages, args.cliprange, cliprange_high)
    mismatch = {}
    if counts["of a sampler"]:
        corrections, mismatch = mismatch_of(logprobs, episodes, args)
        policy_terms = policy_terms * corrections
    # if you add a term: without a KL, `minibatches` leaves out episodes without an advantage
    # with ratio 1, clip and equal weights this is minus the mean advantage, 0: its gradient is what trains
    loss = (weights * policy_terms).sum()
    metrics = {"loss/policy": loss.detach() / counts["steps"]}
    metrics |= token_metrics(log_ratio, logprobs, entropies, advantages, mismatch, counts, args)
    if args.kl_coef:
        ref_logprobs = of_all(episodes, "ref_logprobs", new_logprobs)
        kl = kl_k3(new_logprobs, ref_logprobs)
        if args.unbiased_kl:
            kl = kl * log_ratio.exp()
        kl_loss = (weights * kl).sum()
        loss = loss + args.kl_coef * kl_loss
        metrics["loss/kl"] = kl_loss.detach() / counts["steps"]
        # sums over a response, by the policy before the update; loss/kl is a mean as the loss, by the one in training
        metrics["objective/kl"] = (logprobs - ref_logprobs).double().sum() / counts["sequences"]
        metrics["objective/kl_k3"] = kl_k3(logprobs, ref_logprobs).double().sum() / counts["sequences"]
    return loss, metrics


@torch.no_grad()
def mismatch_of(logprobs, episodes, args):
    """(weights of --correction, terms of the mismatch/ metrics), (n,) each, from the log-probabilities of the policy
    before the update and the column sampler_logprobs. mismatch/kl is the k3 estimate of KL(sampler || policy)."""
    columns = [episode.row["sampler_logprobs"] for episode in episodes]
    sampler_logprobs = torch.tensor([*itertools.chain(*columns)], dtype=torch.float64).to(logprobs.device)
    log_ratio = logprobs - sampler_logprobs
    weights_at = partial(correction_weights, log_ratio, [episode.length for episode in episodes], args.correction)
    terms = {"mismatch/kl": kl_k3(sampler_logprobs, logprobs), "mismatch/ratio": log_ratio.exp()}
    terms["mismatch/ratio_squared"] = (2 * log_ratio).exp()  # for the effective sample size
    terms["mismatch/limited"] = weights_at(math.inf) > args.correction_limit
    return weights_at(args.correction_limit), terms


@torch.no_grad()
def token_metrics(log_ratio, logprobs, entropies, advantages, mismatch, counts, args):
    """Shares of the iteration's means. They are over the tokens whose advantage is not 0; with a KL, policy/entropy and
    policy/nll are over all tokens. policy/clipfrac counts tokens whose gradient (clip) or weight (cispo) is clipped.
    policy/nll and mismatch/ are of the policy before the update, the others of the trained one. All tensors (n,)."""
    terms = {"policy/entropy": entropies, "policy/nll": -logprobs}
    metrics = {}
    if args.kl_coef:
        for name, term in terms.items():
            metrics[name] = term.double().sum() / counts["tokens"]
        terms = {}
    if counts["with an advantage"] == 0:
        return metrics
    ratio = log_ratio.exp()
    cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    above = ratio > 1 + cliprange_high
    below = ratio < 1 - args.cliprange
    clipped = torch.where(advantages > 0, above, below) if args.policy_loss == "clip" else above | below
    terms |= mismatch | {"policy/approxkl": log_ratio.square() / 2, "policy/clipfrac": clipped, "policy/ratio": ratio}
    for name, term in terms.items():
        total = torch.where(advantages != 0, term, 0.0).sum(dtype=torch.float64)
        metrics[name] = total / counts["with an advantage"]
    return metrics


def update(run, model, optimizer, episodes, args):
    """Epochs of minibatches, with one optimizer step each. Returns metrics: means over the steps, sequences or tokens
    of all epochs."""
    accelerator = run.accelerator
    counts = {
        "steps": args.steps_per_iteration,
        "sequences": len(episodes) * args.ppo_epochs,
        "tokens": sum(episode.length for episode in episodes) * args.ppo_epochs,
        "with an advantage": sum(e.length for e in episodes if e.advantage) * args.ppo_epochs,
        "of a sampler": sum(e.length for e in episodes if e.advantage and "sampler_logprobs" in e.row),
    }
    step = run.step - args.steps_per_iteration  # run.step is the number of steps at the end of this iteration
    sums = defaultdict(float)
    model.train()  # without dropout, which loading sets to 0
    for epoch in range(args.ppo_epochs):
        for minibatch, micro_batches in minibatches(accelerator, episodes, args, run.iteration, epoch):
            # the mean is over the episodes of this step in all processes, not of a micro-batch
            lengths = torch.tensor([episode.length for episode in minibatch])
            weights = token_weights(lengths, args.loss_mean, args.max_new_tokens)
            for episode, weight in zip(minibatch, weights.tolist(), strict=True):
                episode.weight = weight
            # yields them one by one; processes exchange gradients in the last one (with FSDP2 in each)
            for lines in accumulate(accelerator, model, micro_batches):
                loss, shares = losses(model, lines, counts, args)
                # data-parallel training averages gradients over the processes: multiply by their number
                accelerator.backward(loss * accelerator.num_processes)
                for name, share in shares.items():
                    sums[name] += share
            step += 1
            where = f"{len(minibatch)} episodes whose first is {minibatch[0].row['prompt']!r:.60}"
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
            require_finite(step, where, gradient_norm=grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(group["peak_lr"], step - 1, run.total_steps, args)
            optimizer.step()
            optimizer.zero_grad()
    metrics = {"episode": run.iteration * args.rollout_batch_size} | reduce_sums(accelerator, sums)
    if "mismatch/ratio" in metrics:
        metrics["mismatch/ess"] = metrics["mismatch/ratio"] ** 2 / metrics.pop("mismatch/ratio_squared")
    metrics["loss/total"] = metrics["loss/policy"] + args.kl_coef * metrics.get("loss/kl", 0.0)
    # of the last step; the norm is the one before clipping
    return metrics | {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run, step, model, tokenizer, data, args):
    """Metrics: the mean reward and --metric on sampled responses. Logs the samples."""
    lm = run.accelerator.unwrap_model(model)
    names = ("seed", "max_new_tokens", "top_k", "top_p", "stop", "decode_batch_size")
    options = {name: getattr(args, name) for name in names} | {"temperature": args.eval_temperature}
    metrics, samples = evaluate_sets(run.accelerator, model, lm, tokenizer, data, **options)
    run.samples(step, samples)
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


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


def summary(run, data):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    share = args.batch_size // run.accelerator.num_processes
    num_groups = args.rollout_batch_size // args.group_size
    lengths = sorted(map(len, data.queries))
    prompts = f"{len(lengths)} prompts; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
    if not args.eval_dataset:
        prompts += f"; without --eval-dataset, evaluations take the first {len(data.eval_sets[''][0])}"
    prompts += f"; first: {data.rows[0]['prompt'][:200]!r}"
    reference = "a model of its own" if args.ref_model else "the model at the start"
    return {
        "reference": reference if args.kl_coef else "none",
        "data": prompts,
        "iterations": f"{args.num_iterations}, each of {num_groups} groups of {args.group_size} episodes",
        "steps": f"{run.steps_per_iteration} per iteration, each of {args.batch_size} episodes: {share} per process, "
        f"{args.micro_batch_size} of the longest at once",
    }


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["objective/scores", "groups/equal", "tokens/responses_len", "tokens/truncated_rate", "optim/grad_norm"]
ALL_EQUAL = (
    "warning: since iteration {} all groups have had equal scores, so the policy loss has no gradient: look at the "
    "samples in rollouts.jsonl and at what --reward returns for them; if they are cut off, raise --max-new-tokens, if "
    "they have become bad, lower --lr, otherwise raise --group-size or --temperature"
)


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    # first what the flags name, because a function of the user may start processes, before there is an Accelerator
    path = build(args.model, "--model")  # as given, or the model that a function returns
    ref_path = build(args.ref_model, "--ref-model")
    reward = no_reward if args.reward is None else args.reward
    data = read_data(args.dataset, args.eval_dataset, reward=reward, metric=args.metric, rollout=args.rollout)
    if data.rollout:
        data.rollout = partial(call_rollout, data.rollout, args.rollout)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer = load_lm(args, path, accelerator.device)
    encode(data, lm, tokenizer, args)
    ref = make_reference(args, ref_path, lm, tokenizer) if args.kl_coef else None
    reward_model = load_reward(data, args, lm, tokenizer)
    run.check_inputs(data, model=lm, ref_model=ref, reward=reward_model)
    optimizer = make_optimizer(lm, args)
    model = prepare(accelerator, lm, optimizer, ref, reward_model)
    export = partial(run.export, lm, tokenizer)
    lengths = [len(query) for query in data.queries]  # for --check
    in_status = IN_STATUS
    headline = f"{set_prefix(next(iter(data.eval_sets)))}reward" if args.eval_every else "objective/scores"
    if args.reward is None:
        in_status = IN_STATUS[2:]  # without those of scores
        headline = "objective/kl"
    # total_episodes / rollout_batch_size iterations of ppo_epochs * rollout_batch_size / batch_size optimizer steps
    # state: the values that checkpoints keep; num_equal: iterations in a row in which all groups had equal scores
    state = run.begin(
        model, optimizer, lm, args.num_iterations, [headline, *in_status], args.steps_per_iteration, num_equal=0
    )
    run.tell(lm, summary(run, data))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, tokenizer, data, args))
        run.save(run.first_step, export)

    for iteration in run.iterations():
        # 1. y_1 .. y_G ~ pi(. | x) for each prompt x: responses with their log-probabilities and scores
        model.eval()
        size = args.rollout_batch_size
        num_groups = size // args.group_size
        numbers = draw_rows(args.seed, len(data.rows), (iteration - 1) * num_groups, num_groups)
        if args.check:
            numbers = longest_rows(lengths, num_groups)
        numbers = np.repeat(numbers, args.group_size)
        rows = [data.rows[number] for number in numbers]
        queries = [data.queries[number] for number in numbers]
        with unsharded(model):  # FSDP2 gathers the weights once, not for every token
            episodes, reward_means = rollout(accelerator, model, ref, tokenizer, rows, queries, data, iteration, args)
        # 2. A_i: how far a score is above the mean of its group
        scores = torch.tensor([episode.score for episode in episodes], dtype=torch.float64)
        advantages = group_advantages(scores, args.group_size, args.advantage_kind).tolist()
        for episode, advantage in zip(episodes, advantages, strict=True):
            episode.advantage = advantage
        shown = episodes[: 2 * args.group_size]
        log_episodes(run, tokenizer, shown, [episode.advantage for episode in shown])
        run.lap("rollout")
        # 3. mu epochs of minibatches: clipped policy loss and KL (Eq. 3)
        metrics = reward_means | rollout_metrics(episodes, scores, args) | update(run, model, optimizer, episodes, args)
        run.lap("update")
        state.num_equal = state.num_equal + 1 if metrics["groups/equal"] == 1 else 0
        if args.reward is not None and (state.num_equal == 5 or iteration == state.num_equal == 1):
            run.say(ALL_EQUAL.format(iteration - state.num_equal + 1))
        # 4. log, evaluate, save: the line is written first, so that an evaluation which fails costs no iteration
        run.log(run.step, metrics, tokens=sum(episode.length for episode in episodes), episodes=size)
        if run.evaluation_due(run.step):
            run.log_evaluation(run.step, evaluate(run, run.step, model, tokenizer, data, args))
        run.save(run.step, export)

    return run.finish(export, *lines_of_use(lm, tokenizer, data.queries[0]))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
