"""Group relative policy optimisation (GRPO) of a language model against a reward.

Paper: Shao et al. 2024 (arXiv 2402.03300), Algorithm 1. Each prompt gets a group of responses, and the mean score of
the group takes the place of a value function.

    A_i = (r_i - mean(r)) / std(r)                         GRPO Sec. 4.1.2    group_advantages
    max(-A ratio, -A clip(ratio, 1 - low, 1 + high))       GRPO Eq. 3         grpo_loss
    exp(-x) - 1 + x, x = log pi - log pi_ref               GRPO Eq. 4         kl_k3
    mean over responses of means over their tokens         GRPO Eq. 3         token_weights
    geometric mean of the ratios of a response             GSPO Eq. 7         sequence_means
    other prompts for groups of equal scores               DAPO Sec. 3.2      rollout

By flags:

    Dr. GRPO  Liu et al. 2025, arXiv 2503.20783      --advantage-kind mean --loss-mean constant --kl-coef 0
    RLOO      Ahmadian et al. 2024, arXiv 2402.14740 --advantage-kind loo --loss-mean constant --kl-coef 0
    DAPO      Yu et al. 2025, arXiv 2503.14476       --loss-mean token --cliprange-high 0.28 --dynamic-sampling 8
                                                     --kl-coef 0 --batch-size 64
    GSPO      Zheng et al. 2025, arXiv 2507.18071    --ratio-level sequence --cliprange 3e-4 --cliprange-high 4e-4
                                                     --kl-coef 0 --batch-size 64

Clip ranges and --ratio-level change something only with several optimizer steps an iteration: with one, the ratio is 1.
DAPO's penalty on long responses is left to the reward. RLOO's KL, a part of the score, is not offered.

How this differs from the paper: reference and reward model stay, and a response has one score (Sec. 4.1.2).

How this differs from TRL's GRPO:
- The defaults are the paper's. TRL's are the mean over tokens and no KL; a KL it multiplies by the ratio.
- Every draw is keyed. Processes, micro-batches and padding change neither responses nor losses, which are divided by
  what the optimizer step holds in all processes. Each epoch has minibatches of its own.
- Groups of equal scores have no gradient: without a KL they are left out of the update. --dynamic-sampling replaces
  them.
- A run that is killed continues to the same weights, replaced groups included.

    accelerate launch algos/grpo.py                                # sums with written steps, on a CPU under a minute
    accelerate launch algos/grpo.py --model my_model/ --dataset problems.jsonl --reward my_reward.py:score \
        --max-new-tokens 256 --kl-coef 0
    torchrun --nproc_per_node 8 algos/grpo.py --model Qwen/Qwen3-0.6B --dataset org/problems:train \
        --reward my_reward.py:score

Dimension key: B episodes, G of them a group, Q query (prompt) tokens, R response tokens, T = Q + R, V vocabulary.
"""

import math
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while libraries load
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if find_spec("common") is None:
    sys.exit(
        "error: a script needs common/: put it into algos/, set PYTHONPATH to the repository, or give it all that "
        "it needs with benchmarks/single_file.py"
    )

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from common.adapters import adapter_problems, to_export, train_adapters
from common.cache import closed_ranks, write_in_place
from common.classifiers import RewardModel
from common.cli import InputError, cli, embedded_task, missing, stop_if
from common.data import encode_prompts, load_rows, load_sets, set_flag, set_prefix
from common.functions import build, load_function, refuse_mistyped
from common.logging import Run, closes_run
from common.machine import describe_layout, launch, longest_micro_batch, try_update
from common.models import (
    as_decoder,
    end_tokens,
    freeze,
    frozen_copy,
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
    total,
)
from common.seeding import draw, rng, seed_libraries, stream_rows
from common.structure import cache_problem


@embedded_task("benchmarks/tasks/arithmetic/grpo.yaml")
@dataclass
class Args:
    """Group relative policy optimisation of a language model. Defaults are for pretrained models.

    Without --model, --dataset and --config: the embedded task, with settings of its own. --config FILE reads flags from
    a YAML file; flags win over it.
    """

    # ---- algorithm
    total_episodes: Count = 65536
    """Length of the run: episodes (a prompt with one of its responses) over all iterations."""
    rollout_batch_size: Count = 512
    """Episodes of an iteration, all processes together: --group-size for each prompt."""
    group_size: Count = 8
    """Responses to a prompt, whose scores are compared (Shao et al. 2024: 64; TRL: 8)."""
    ppo_epochs: Count = 1
    """Passes over the episodes of an iteration (mu of Algorithm 1; Shao et al. 2024: 1)."""
    advantage_kind: Literal["std", "mean", "loo"] = "std"
    """Advantage of a score in its group: less the mean, over the standard deviation (GRPO); less the mean (Dr. GRPO);
    less the mean of the others (RLOO), G / (G - 1) times the second, no difference to AdamW without a KL."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio to the policy that sampled: of each token, or their geometric mean over a response (GSPO Eq. 7), with far
    smaller clip ranges (GSPO Sec. 5.1: 3e-4 and 4e-4). No effect with one optimizer step an iteration."""
    loss_mean: Literal["sequence", "token", "constant"] = "sequence"
    """Mean of the loss over an optimizer step: of each response's mean over its tokens (GRPO Eq. 3); over all tokens
    (DAPO Sec. 3.3); or the sum divided by --batch-size times --max-new-tokens (Dr. GRPO)."""
    cliprange: NonNegative = 0.2
    """How far the ratio may fall below 1 before it is clipped (epsilon of GRPO Eq. 3). No effect with one optimizer
    step an iteration."""
    cliprange_high: NonNegative | None = None
    """How far the ratio may rise above 1 before it is clipped (Yu et al. 2025: 0.28); default: as --cliprange. No
    effect with one optimizer step an iteration; 0.28 made no difference on the embedded countdown."""
    kl_coef: NonNegative = 0.04
    """Weight beta of the per-token KL to the reference in the loss (Shao et al. 2024: 0.04); with 0 there is no
    reference, and no KL is logged."""
    dynamic_sampling: Natural = 0
    """Sample again in place of groups of equal scores, for the next prompts, at most so many times an iteration (DAPO
    Sec. 3.2). Groups that are still equal then stay. --total-episodes and the metrics count those that stay. It made
    no difference on the embedded countdown."""

    # ---- sampling
    max_new_tokens: Count = 512
    """Longest response, in tokens (Shao et al. 2024: 1024; TRL: 512)."""
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
    lr: Positive = 1e-6
    """Peak learning rate of AdamW (Shao et al. 2024: 1e-6; adapters of --lora-r need about ten times as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: Count = 512
    """Rows per optimizer step, all processes together (Shao et al. 2024: 1024, all episodes of an iteration)."""
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
    """file.py:function(samples, prompts, outputs, **columns) -> a number per sample, or a list of one per token, which
    is summed; or the directory or hub id of a sequence classifier, with :label if it has several, or of the LoRA
    adapter of one."""
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
    """Reference of the KL, named as --model; default: a frozen copy of --model as it is at the start."""
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
    """Train only the top k blocks and the norm after them, not embeddings and output layer. -1: train everything."""
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
    save_every: Natural = 20
    """Checkpoint every so many optimizer steps; 0: only at the end and for the best evaluation."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept; the best by evaluation is kept besides."""
    eval_every: Natural = 20
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
        if self.group_size == 1:
            problems.append("--group-size 1 must be at least 2: a response is compared with the others of its group")
        if self.rollout_batch_size % max(1, self.batch_size):
            problems.append(
                f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --batch-size {self.batch_size}"
            )
        if self.rollout_batch_size % max(1, self.group_size):
            problems.append(
                f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --group-size {self.group_size}"
            )
        if self.total_episodes % max(1, self.rollout_batch_size):
            problems.append(
                f"--total-episodes {self.total_episodes} must be a multiple of "
                f"--rollout-batch-size {self.rollout_batch_size}"
            )
        if self.num_layers_unfrozen == 0:
            problems.append("--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1")
        if self.ref_model is not None and self.kl_coef == 0:
            problems.append("--ref-model needs a --kl-coef above 0")
        if self.name and self.run_dir:
            problems.append("--name is a part of the default --run-dir: leave out one of them")
        stop_if(problems)


# ---- Maths -----------------------------------------------------------------------------------------------------------


def group_advantages(scores, group_size, kind):
    """(B,) what each score has over those of its group: scores (B,), the rows of a group side by side.

    std: (r - mean) / (std + 1e-4) (GRPO, Shao et al. 2024, Sec. 4.1.2; the constant and the unbiased deviation are
    TRL's); mean: r - mean (Dr. GRPO, Liu et al. 2025, Sec. 3.2); loo: r - mean of the others (RLOO, Ahmadian et al.
    2024). Zero in a group of equal scores.
    """
    groups = scores.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if kind == "std":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif kind == "loo":
        advantages = advantages * (group_size / (group_size - 1))
    elif kind != "mean":
        raise ValueError(f"there is no advantage {kind!r}")
    advantages[groups.amax(1) == groups.amin(1)] = 0.0  # the mean is rounded
    return advantages.flatten()


def grpo_loss(new_logprobs, logprobs, advantages, cliprange, cliprange_high):
    """max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange_high)), ratio = exp(new_logprobs - logprobs);
    unreduced, shapes that broadcast. Source: Shao et al. 2024, Eq. 3; two ranges: DAPO, Sec. 3.1."""
    ratio = (new_logprobs - logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high))


def sequence_means(x, mask):
    """(B, R): in each row the mean of x (B, R) where mask is True. Of log-probabilities: the exponential of their
    difference is then the geometric mean of the ratios of a response. Source: GSPO, Zheng et al. 2025, Eq. 7."""
    means = torch.where(mask, x, 0.0).sum(1) / mask.sum(1)
    return means[:, None].expand_as(x)


def kl_k3(logprobs, ref_logprobs):
    """Per-token estimate of KL(policy || reference), never negative; any shape. Source: Shao et al. 2024, Eq. 4."""
    log_ratio = logprobs - ref_logprobs
    return (-log_ratio).expm1() + log_ratio


def token_weights(lengths, loss_mean, max_new_tokens):
    """(B,) the weight of each token of a row in the loss of an optimizer step, whose rows have lengths (B,) tokens.

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


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


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


def response_logprobs(model, query, query_mask, response, response_mask, temperature=1.0):
    """(B, R) log-probabilities: the one scoring function of policy, reference and update.

    query (B, Q) is left-padded, response (B, R) right-padded; masks are True where a token counts, other tokens get 0.
    They are those of the distribution sampled from: log softmax(logits / temperature), at least in float32.
    """
    tokens = torch.cat([query, response], 1)[:, :-1]
    attention = attended(query_mask, response_mask)[:, :-1].long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
    vocabulary = getattr(model, "module", model).config.get_text_config().vocab_size

    def logprobs_of(logits, ids):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            logits = logits / temperature
        return token_logprobs(logits, ids)

    def compute(layer, states):
        return in_chunks(logprobs_of, layer, vocabulary, states[response_mask], response[response_mask])

    return spread(call_with_output(model, compute, **inputs, logits_to_keep=response.shape[1]), response_mask)


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
class Episode:
    """A prompt with one of its responses."""

    row: dict
    query: list  # ids
    response: list  # ids as sampled, with the end token
    score: float
    truncated: bool  # neither end token nor stop string


@dataclass
class Batch:
    """Episodes as tensors: the whole iteration's, on every process, or a micro-batch of them."""

    query: torch.Tensor  # (B, Q) ids, left-padded
    query_mask: torch.Tensor  # (B, Q) bool
    response: torch.Tensor  # (B, R) ids, right-padded
    response_mask: torch.Tensor  # (B, R) bool, the end token counts
    advantages: torch.Tensor  # (B,) float64
    weights: torch.Tensor  # (B,) float64, of each token in the loss of its optimizer step: token_weights
    logprobs: torch.Tensor | None = None  # (B, R) of the policy that sampled; None: the only step computes them
    ref_logprobs: torch.Tensor | None = None  # (B, R)

    # What `take` narrows. Any other field has no columns.
    ALONG_QUERIES = ("query", "query_mask")
    ALONG_RESPONSES = ("response", "response_mask", "logprobs", "ref_logprobs")

    def take(self, rows):
        """The rows, without the columns in which none of them has a token."""
        begin = int(self.query_mask[rows].any(0).int().argmax())
        end = int(self.response_mask[rows].any(0).nonzero().max()) + 1
        columns = dict.fromkeys(self.ALONG_QUERIES, slice(begin, None))
        columns |= dict.fromkeys(self.ALONG_RESPONSES, slice(end))
        taken = {}
        for name, field in vars(self).items():
            if field is not None:
                taken[name] = field[rows, columns[name]] if name in columns else field[rows]
        return type(self)(**taken)

    def tokens(self):
        """The arguments of response_logprobs."""
        return self.query, self.query_mask, self.response, self.response_mask

    def lengths(self):
        """(B,) tokens of query and response."""
        return self.query_mask.sum(1) + self.response_mask.sum(1)


def in_groups(episodes, group_size):
    """A list of lists: the episodes of a prompt stand side by side."""
    return [episodes[begin : begin + group_size] for begin in range(0, len(episodes), group_size)]


def has_equal_scores(group):
    """Whether the episodes of a group differ in nothing that could be learned from."""
    return len({episode.score for episode in group}) == 1


def sample_groups(accelerator, lm, tokenizer, data, first, count, stream, args):
    """The episodes of `count` prompts, from place `first` of the endless stream of prompts. stream: the key of their
    draws."""
    places = []
    for prompt in stream_rows(args.seed, "data", len(data.rows), first, count):
        places += [prompt] * args.group_size
    rows = [data.rows[place] for place in places]
    queries = [data.queries[place] for place in places]
    _, _, response, mask = generate_all(
        accelerator, lm, tokenizer, queries, stream, seed=args.seed, stop=args.stop,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, decode_batch_size=args.decode_batch_size,
        sample=sample,
    )  # fmt: skip
    output_ids = kept_ids(response, mask)
    outputs = decode(tokenizer, queries, output_ids, args.stop)
    ended = has_ended(tokenizer, output_ids, end_tokens(lm), args.stop)
    scores = score_outputs(accelerator, data.reward, args, tokenizer, rows, outputs, output_ids, ended)
    episodes = []
    score_of = {}
    for row, query, ids, score, end in zip(rows, queries, output_ids, scores, ended, strict=True):
        if isinstance(data.reward, RewardModel):  # rounding would give equal responses different scores
            score = score_of.setdefault((tuple(query), tuple(ids)), score)
        episodes.append(Episode(row, query, ids, total(score), not end))
    return episodes


@torch.no_grad()
def rollout(accelerator, lm, tokenizer, data, state, iteration, args):
    """(episodes of the next prompts, how many groups were sampled). state.prompts: how many the run has taken."""
    size = args.group_size
    num_groups = args.rollout_batch_size // size
    stream = ("rollout", iteration)
    episodes = sample_groups(accelerator, lm, tokenizer, data, state.prompts, num_groups, stream, args)
    num_sampled = num_groups
    for attempt in range(args.dynamic_sampling):
        equal = [place for place, group in enumerate(in_groups(episodes, size)) if has_equal_scores(group)]
        if not equal:
            break
        stream = (f"rollout again {attempt}", iteration)
        first = state.prompts + num_sampled
        others = sample_groups(accelerator, lm, tokenizer, data, first, len(equal), stream, args)
        for place, group in zip(equal, in_groups(others, size), strict=True):
            episodes[place * size : (place + 1) * size] = group
        num_sampled += len(equal)
    state.prompts += num_sampled
    return episodes, num_sampled


def stack(episodes, pad_id, device, args):
    """The episodes as tensors, with their advantages."""
    query, query_mask = pad_left([episode.query for episode in episodes], pad_id, device)
    responses = [torch.tensor(episode.response) for episode in episodes]
    response = pad_sequence(responses, batch_first=True, padding_value=pad_id).to(device)
    lengths = torch.tensor([len(ids) for ids in responses], device=device)
    response_mask = torch.arange(response.shape[1], device=device) < lengths[:, None]
    scores = torch.tensor([episode.score for episode in episodes], dtype=torch.float64, device=device)
    advantages = group_advantages(scores, args.group_size, args.advantage_kind)
    return Batch(query, query_mask, response, response_mask, advantages, torch.zeros_like(advantages))


@torch.no_grad()
def all_logprobs(accelerator, model, batch, args):
    """(B, R) log-probabilities of all responses, on every process. Each computes those of its share of the rows."""
    share = len(batch.query) // accelerator.num_processes
    local = torch.arange(share, device=accelerator.device) + accelerator.process_index * share
    by_length = local[batch.lengths()[local].argsort(stable=True)]
    scored = []
    for places in by_length.split(args.micro_batch_size):
        episodes = batch.take(places)
        with accelerator.autocast():
            logprobs = response_logprobs(model, *episodes.tokens(), args.temperature)
        scored.append(logprobs[episodes.response_mask])
    in_order = spread(torch.cat(scored), batch.response_mask[by_length])[by_length.argsort()]
    return accelerator.gather(in_order)


def rollout_metrics(episodes, num_sampled, args):
    """Of the episodes that are trained on; groups/sampled counts those that were replaced, too."""
    scores = [episode.score for episode in episodes]
    truncated_rate = fmean([episode.truncated for episode in episodes])
    return {
        "objective/scores": fmean(scores),
        "objective/scores_std": pstdev(scores),
        "groups/equal": fmean([has_equal_scores(group) for group in in_groups(episodes, args.group_size)]),
        "groups/sampled": num_sampled,
        "tokens/queries_len": fmean([len(episode.query) for episode in episodes]),
        "tokens/responses_len": fmean([len(episode.response) for episode in episodes]),
        "tokens/eos_rate": 1 - truncated_rate,  # stop strings included
        "tokens/truncated_rate": truncated_rate,
    }


# ---- Update ----------------------------------------------------------------------------------------------------------


def minibatches(args, iteration, epoch):
    """The rows of each optimizer step of an epoch: a keyed permutation of the episodes."""
    order = torch.from_numpy(rng(args.seed, "minibatches", iteration, epoch).permutation(args.rollout_batch_size))
    return order.split(args.batch_size)


def micro_batches(accelerator, rows, batch, args):
    """This process's share of the rows of an optimizer step, in pieces of --micro-batch-size by length.

    Without a KL, rows without an advantage have no gradient and are left out, but for as many as give every process the
    same number of rows, so of forward passes."""
    processes = accelerator.num_processes
    if args.kl_coef == 0:
        is_idle = batch.advantages[rows] == 0
        rows = rows[is_idle.argsort(stable=True)]
        num_busy = len(rows) - int(is_idle.sum())
        rows = rows[: max(1, math.ceil(num_busy / processes)) * processes]
    local = rows[accelerator.process_index :: processes]
    return local[batch.lengths()[local].argsort(stable=True)].split(args.micro_batch_size)


def losses(model, episodes, args):
    """(loss, {metric: sum}): a micro-batch's part of the loss of its optimizer step. policy/ sums are over the tokens
    that have an advantage, objective/ over all. A term counts as clipped where the clipped side is the larger."""
    mask = episodes.response_mask
    advantages = episodes.advantages[:, None]
    weights = episodes.weights[:, None]
    new_logprobs = response_logprobs(model, *episodes.tokens(), args.temperature)
    logprobs = episodes.logprobs
    if logprobs is None:  # the policy is still the one that sampled
        logprobs = new_logprobs.detach()
    new_compared = new_logprobs  # the ratios are of tokens
    compared = logprobs
    if args.ratio_level == "sequence":
        new_compared = sequence_means(new_logprobs, mask)
        compared = sequence_means(logprobs, mask)
    cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    pg = grpo_loss(new_compared, compared, advantages, args.cliprange, cliprange_high)
    loss = (weights * pg)[mask].sum()
    terms = {"loss/policy": loss.detach()}
    if args.kl_coef:
        kl = kl_k3(new_logprobs, episodes.ref_logprobs)
        kl_loss = (weights * kl)[mask].sum()
        loss = loss + args.kl_coef * kl_loss
        terms["loss/kl"] = kl_loss.detach()
        terms["objective/kl"] = (logprobs - episodes.ref_logprobs)[mask].double().sum()
        terms["objective/kl_k3"] = kl_k3(logprobs, episodes.ref_logprobs)[mask].double().sum()
    with torch.no_grad():
        log_ratio = new_compared - compared
        ratio = log_ratio.exp()
        of_tokens = {
            "policy/approxkl": log_ratio.square() / 2,
            "policy/clipfrac": pg > -advantages * ratio,
            "policy/ratio": ratio,
            "policy/nll": -logprobs,  # of sampled tokens: it falls with the entropy
        }
    trained = mask & (advantages != 0)
    return loss, terms | {name: term[trained].double().sum() for name, term in of_tokens.items()}


def update(accelerator, model, optimizer, batch, episodes, iteration, args):
    """Epochs of minibatches, an optimizer step each. Returns metrics: objective/ are means per sequence, policy/ per
    token that has an advantage, loss/ per optimizer step. episodes: those of the batch, for an error."""
    mask = batch.response_mask
    stride = steps_per_iteration(args)
    step = (iteration - 1) * stride
    total_steps = num_iterations(args) * stride
    sums = {}
    model.train()
    for epoch in range(args.ppo_epochs):
        for rows in minibatches(args, iteration, epoch):
            rows = rows.to(accelerator.device)
            batch.weights[rows] = token_weights(mask[rows].sum(1), args.loss_mean, args.max_new_tokens)
            parts = micro_batches(accelerator, rows, batch, args)
            for places in parts:
                with nullcontext() if places is parts[-1] else accelerator.no_sync(model):
                    loss, terms = losses(model, batch.take(places), args)
                    # data-parallel training averages gradients over the processes, hence the factor
                    accelerator.backward(loss * accelerator.num_processes)
                for name, term in terms.items():
                    sums[name] = sums.get(name, 0) + term
            lr = learning_rate(args, step, total_steps)
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = lr
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            if not grad_norm.isfinite():
                prompt = episodes[int(rows[0])].row["prompt"]
                numbers = f"gradient norm {grad_norm} of the {len(rows)} episodes whose first is {prompt!r:.60}"
                raise FloatingPointError(f"step {step}: {numbers}; the last checkpoint is intact")
            optimizer.step()
            optimizer.zero_grad()
    sums = accelerator.reduce(sums)
    trained = int((mask & (batch.advantages != 0)[:, None]).sum())
    # what the sums of each kind are divided by
    counts = {"objective": len(mask) * args.ppo_epochs, "policy": trained * args.ppo_epochs, "loss": stride}
    metrics = {"episode": iteration * args.rollout_batch_size}
    for name, value in sums.items():
        count = counts[name.partition("/")[0]]
        if count:
            metrics[name] = value.item() / count
    metrics["loss/total"] = metrics["loss/policy"] + args.kl_coef * metrics.get("loss/kl", 0.0)
    return metrics | {"optim/lr": lr, "optim/grad_norm": grad_norm.item()}  # the norm is that of the last step


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run, step, model, tokenizer, data, args):
    """What reward and metric say of sampled responses, some of which are shown."""
    accelerator = run.accelerator
    lm = accelerator.unwrap_model(model)
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
    ones = torch.ones(len(response), dtype=torch.float64, device=accelerator.device)
    zeros = torch.zeros(response.shape, device=accelerator.device)
    episodes = Batch(query, query_mask, response, mask, ones, ones, ref_logprobs=zeros)
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
    """The language model, with frozen weights or adapters as the flags say, and its tokenizer."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    problem = None if lm.config.is_encoder_decoder else cache_problem(lm.eval())
    if problem:
        raise InputError(f"--model {args.model}: {problem}, with which grpo samples")
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


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


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def summary(args, accelerator, lm, data):
    """What is trained on what, in a few lines."""
    total_weights = sum(weight.numel() for weight in lm.parameters())
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    reference = "a frozen copy"
    if args.kl_coef == 0:
        reference = "none"
    elif args.ref_model:
        reference = "a model of its own"
    elif trained < total_weights:
        reference = "shares the frozen weights"
    if isinstance(data.reward, RewardModel):
        reference += f"; reward: {data.reward.shared:,} parameters of the policy's, {data.reward.own:,} of its own"
    lines = [
        f"grpo: {total_weights:,} parameters, {trained:,} trained; reference: {reference}; "
        f"{describe_layout(args, accelerator)}; {describe_output(lm)}",
        f"data: {data.report}; first: {visible(data.rows[0]['prompt'])[:200]}",
        f"lr {args.lr:g} {args.lr_schedule}, KL coefficient {args.kl_coef:g}, advantages {args.advantage_kind}, ratios "
        f"by {args.ratio_level}, loss mean by {args.loss_mean}, {args.max_new_tokens} new tokens, "
        f"{args.total_episodes} episodes",
        f"{num_iterations(args)} iterations x ({args.rollout_batch_size // args.group_size} groups of "
        f"{args.group_size} episodes, then {steps_per_iteration(args)} optimizer steps of {args.batch_size}: "
        f"{args.batch_size // accelerator.num_processes} rows a process, {args.micro_batch_size} a forward)",
    ]
    if args.stop:
        lines[-1] += f"; stops: {list(args.stop)}"
    return "\n".join(lines)


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = "objective/scores groups/equal tokens/responses_len tokens/truncated_rate optim/grad_norm".split()
ALL_EQUAL = (
    "no group of the first iteration has two different scores, so nothing but a KL was learned from it: see what "
    "--reward returns for the samples, or raise --group-size or --temperature"
)


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    ref_path = build(args.ref_model, "--ref-model")
    data = read(args)
    accelerator = launch(args)
    lm, tokenizer = load(args, path, accelerator.device)
    encode(data, lm, tokenizer, args)
    ref = make_reference(args, ref_path, lm, tokenizer) if args.kl_coef else None
    data.reward = data.reward or RewardModel(args, lm)

    run = Run("grpo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    stride = steps_per_iteration(args)
    total_steps = num_iterations(args) * stride
    quantities = {"iteration": 0, "prompts": 0}
    headline = "objective/scores"
    if args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}reward"
    options = {"longer": "--total-episodes", "headline": headline, "stride": stride}
    state = run.restore(model, optimizer, lm, total_steps, **options, **quantities)
    run.say(summary(args, accelerator, lm, data))
    if args.check:
        check(run, model, optimizer, tokenizer, data, args)
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, tokenizer, data, args))

    for iteration in range(state.iteration + 1, num_iterations(args) + 1):
        start = time.perf_counter()
        # 1. y_1 .. y_G ~ pi(. | x) for each prompt x, their scores, and A_i in the group
        model.eval()
        with unsharded(model):
            episodes, num_sampled = rollout(accelerator, lm, tokenizer, data, state, iteration, args)
            batch = stack(episodes, tokenizer.pad_token_id, accelerator.device, args)
            if stride > 1:
                batch.logprobs = all_logprobs(accelerator, model, batch, args)
            if ref is not None:
                batch.ref_logprobs = all_logprobs(accelerator, ref, batch, args)
        seconds_rollout = time.perf_counter() - start
        # 2. mu epochs of minibatches: clipped policy loss and KL (Eq. 3)
        metrics = rollout_metrics(episodes, num_sampled, args)
        metrics |= update(accelerator, model, optimizer, batch, episodes, iteration, args)
        if iteration == 1 and metrics["groups/equal"] == 1:
            run.say(ALL_EQUAL)
        seconds = time.perf_counter() - start
        # 3. evaluate, log, save
        step = iteration * stride
        perf = {
            "perf/seconds_rollout": seconds_rollout,
            "perf/seconds_update": seconds - seconds_rollout,
            "perf/tokens_per_sec": int(batch.response_mask.sum()) / seconds,
            "perf/episodes_per_sec": args.rollout_batch_size / seconds,
        }
        if run.evaluation_due(step):
            metrics |= evaluate(run, step, model, tokenizer, data, args)
            if run.is_best(step, metrics[headline]):
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        text = " | ".join(f"{name.split('/')[1]} {metrics[name]:.3g}" for name in IN_STATUS)
        run.status(step, f"{text} | rollout {seconds_rollout:.2f} s + update {seconds - seconds_rollout:.2f} s")
        state.iteration = iteration
        run.save_if_due(step)

    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after GRPO on {run.identity['flags']['reward']}"
    metrics = run.finish(title, *lines_of_use(lm, tokenizer, data.queries[0]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
