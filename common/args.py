"""The flags that scripts share, as base classes of their Args; types that carry a range; rules between shared flags."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from common.cli import flag_of, stop_if

# ---- Ranges ----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """What values a field of Args may have; part of the field's annotated type."""

    rule: str  # completes "--flag value must be"
    holds: Callable


Count = Annotated[int, Range("at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Range("at least 0", lambda value: value >= 0)]
Layers = Annotated[int, Range("-1 or more", lambda value: value >= -1)]
Positive = Annotated[float, Range("a positive number", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Range("0 or a positive number", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
Share = Annotated[float, Range("in (0, 1]", lambda value: 0 < value <= 1)]
Decay = Annotated[float, Range("in [0, 1)", lambda value: 0 <= value < 1)]
NonEmpty = Annotated[str, Range("a text that is not empty", bool)]
Option = Annotated[str, Range("key=value", re.compile(r"\w+=.+").fullmatch)]
Name = Annotated[str, Range("letters and digits, after the first also . _ -", re.compile(r"[^\W_][\w.-]*").fullmatch)]
Repository = Annotated[str, Range("org/name", re.compile(r"[^/]+/[^/]+").fullmatch)]


def find_range(annotation):
    """The Range in a type such as `Count`, `Literal["a", "b"] | None` or `tuple[Decay, Decay]`; None if it has none."""
    if isinstance(annotation, Range):
        return annotation
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return Range(f"one of {', '.join(inner)}", inner.__contains__)
    return next(filter(None, map(find_range, inner)), None)


def out_of_range(args):
    """A sentence for each field of a dataclass whose value is outside the range in its type."""
    problems = []
    for declared in dataclasses.fields(args):
        value = getattr(args, declared.name)
        allowed = find_range(declared.type)
        values = value if isinstance(value, list | tuple) else [value]
        if allowed and value is not None and not all(map(allowed.holds, values)):
            problems.append(f"{flag_of(declared.name)} {value} must be {allowed.rule}")
    return problems


def fit_sizes(args):
    """Changes sizes left at their defaults where they do not fit the sizes that were given."""
    usual = type(args)
    group = getattr(args, "group_size", 1)
    if not all(number > 0 for number in (args.rollout_batch_size, args.batch_size, group)):
        return
    total = getattr(args, "total_episodes", 0)
    if args.rollout_batch_size == usual.rollout_batch_size:
        num_groups = max(1, args.rollout_batch_size // group)
        if total > 0 and total % group == 0:
            num_groups = divisor(total // group, num_groups)
        args.rollout_batch_size = num_groups * group
        if args.batch_size != usual.batch_size:
            args.rollout_batch_size += -args.rollout_batch_size % math.lcm(args.batch_size, group)
    if args.batch_size == usual.batch_size:
        args.batch_size = divisor(args.rollout_batch_size, args.batch_size)
    if total and total == usual.total_episodes:
        args.total_episodes -= total % args.rollout_batch_size


def divisor(number, most):
    """The largest divisor of a number that is at most `most`, or `most` if that is below an eighth of each."""
    found = next(size for size in range(most, 0, -1) if number % size == 0)
    return found if 8 * found >= min(number, most) else most


def problems_of(args):
    """A sentence for each broken rule of the shared flags."""
    missing = [name for name in args.required if getattr(args, name) is None]
    problems = [f"{flag_of(name)} is missing: --help says what it takes" for name in missing]
    problems += out_of_range(args)
    if args.lora_r == 0 and (args.lora_alpha or tuple(args.lora_targets) != type(args).lora_targets):
        problems.append("--lora-alpha and --lora-targets need --lora-r")
    if isinstance(args, ModelArgs):
        if args.lora_r and args.num_layers_unfrozen != -1:
            problems.append("--num-layers-unfrozen must be -1 with --lora-r, which freezes all weights")
        if args.load_in_4bit and args.dtype == "float64":
            problems.append("--load-in-4bit does not work with --dtype float64")
    if hasattr(args, "rollout_batch_size") and args.rollout_batch_size % max(1, args.batch_size):
        size = f"--rollout-batch-size {args.rollout_batch_size}"
        problems.append(f"{size} must be a multiple of --batch-size {args.batch_size}")
    if getattr(args, "rollout", None) and args.stop:
        problems.append("--stop is not used with --rollout: give stop strings to `sample`")
    if isinstance(args, RolloutArgs) and args.total_episodes % max(1, args.rollout_batch_size):
        size = f"--rollout-batch-size {args.rollout_batch_size}"
        problems.append(f"--total-episodes {args.total_episodes} must be a multiple of {size}")
    return problems


# ---- Shared flags ----------------------------------------------------------------------------------------------------


@dataclass
class DataArgs:
    """Data."""

    required = ("model", "dataset")  # fields that must be given

    dataset: str | None = None
    """Rows with a prompt, which is a text or a chat (the reward gets the other columns): a
    .jsonl/.json/.csv/.parquet/.txt file, a hub id:split, or file.py:function; from Python, a list."""
    eval_dataset: str | None = None
    """Evaluation rows, in the formats of --dataset. Several sets: separated by commas, or a mapping from names to rows.
    Default: none; in scripts with --reward, the first --rollout-batch-size rows of --dataset."""


@dataclass
class WeightArgs:
    """Weights."""

    model: str | None = None
    """Hub id, directory, or file.py:function that returns a model; from Python, also the object."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; default: the newest commit."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights and of AdamW's moments. bfloat16 is only for LoRA; the adapters stay float32."""
    trust_remote_code: bool = False
    """Run model code that comes with a hub repository."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This needs less memory and is about a quarter slower."""
    lora_r: Natural = 0
    """Rank of the LoRA adapters that are trained instead of the weights; 0: train all weights. A LoRA adapter given as
    --model needs no flag to be trained further."""
    lora_alpha: Positive | None = None
    """LoRA adapters are scaled by alpha / r; default: the rank, which gives a scale of 1."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Modules to adapt, by the last part of the name; all-linear: all linear layers except the output layer or head."""


@dataclass
class ModelArgs(WeightArgs):
    """Language model."""

    tokenizer: str | None = None
    """Hub id or directory of the tokenizer; from Python, also the object. Default: that of --model."""
    template_options: tuple[Option, ...] = ()
    """Options of the tokenizer's chat template, such as enable_thinking=false."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; default: sdpa if the model has it. On CPUs eager is slightly faster for short rows, but with
    left padding it gives NaN in float64 for several model families."""
    num_layers_unfrozen: Layers = -1
    """Train only the top k blocks and the norm after them; 0: only the heads that the script adds; -1: everything."""
    load_in_4bit: bool = False
    """Load the weights under LoRA adapters (--lora-r, or an adapter as --model) in 4 bits (NF4; arXiv 2305.14314)."""


@dataclass
class SamplingArgs:
    """Sampling."""

    max_new_tokens: Count = 64
    """Maximum length of a response, in tokens."""
    stop: tuple[NonEmpty, ...] = ()
    """Strings that end a response. Tokens up to the one that completes the string are kept, and rollouts train on them.
    Reward and metric see the text before the string, without trailing space."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature in evaluations; 0: greedy."""
    top_k: Natural = 0
    """Evaluations sample from the k most likely tokens; 0: from all."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens whose probabilities sum to this; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once. Changes memory and speed, never the result."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list of one number per sample}."""


@dataclass
class OptimizerArgs:
    """Optimizer."""

    lr: Positive = 1e-5
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate schedule after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final is reached; default: the rest of the run."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count = 64
    """Rows per optimizer step, over all processes."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass. Changes memory and speed, never the result."""


@dataclass
class RunArgs:
    """Run."""

    run_dir: str | None = None
    """Directory of the run; default: runs/<algo>-<hash of everything that decides the result>."""
    name: Name | None = None
    """Replaces <algo> in the default of --run-dir, so that you can recognise the run."""
    resume: str = "auto"
    """auto: continue the run if it exists; never: repeat it in a new directory; or the path of a run or checkpoint."""
    seed: int = 1
    """Seed of every random draw."""
    threads: Count | None = None
    """CPU threads per process. Default: OMP_NUM_THREADS, unless accelerate or torchrun started the process; otherwise
    an equal share of the machine's CPUs. A container's CPU quota is not read: give it here."""
    deterministic: bool = False
    """Ask torch for deterministic kernels. Slower on GPUs, with more memory for attention; CPUs are deterministic
    without it."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Autocast of the forward pass. Default: bf16 if the launcher says so, or for float32 weights on a GPU that
    supports it; otherwise no. Weights and optimizer keep --dtype."""
    save_every: Natural = 100
    """Optimizer steps between checkpoints, or fewer if they take more than ten minutes; 0: only at the end and at the
    best evaluation."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints to keep, besides the best by evaluation."""
    eval_every: Natural = 100
    """Optimizer steps between evaluations, which also happen at the start and the end; 0: never evaluate."""
    track: Literal["off", "wandb", "tensorboard"] = "off"
    """Also send the metrics to a tracker (WANDB_MODE=offline works without an account)."""
    wandb_project: str = "plainrl"
    """Project name for --track."""
    push_to_hub: Repository | None = None
    """Upload hf_model/ to this hub repository (org/name) at the end, using the login of the hub's own tools. A run that
    is already finished uploads nothing."""
    check: bool = False
    """Run the first iteration on the longest rows, print its time and the peak memory, and exit. Writes nothing."""

    def __post_init__(self):
        if hasattr(self, "rollout_batch_size"):
            fit_sizes(self)
        stop_if([*problems_of(self), *self.problems()])

    def problems(self):
        """A sentence for each broken rule of a script's own flags."""
        return []


@dataclass
class RolloutArgs(DataArgs, SamplingArgs):
    """Rollouts."""

    required = (*DataArgs.required, "reward")

    max_prompt_length: Count | None = None
    """Drop prompts with more tokens than this, and count them. Without this flag, a prompt that does not fit the model
    is an error."""
    reward: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> one number per sample, or a list with one per token, or
    {"score": these, name: further columns to log}. Or the directory or hub id of a sequence classifier (with :label if
    it has several) or of a LoRA adapter for one."""
    rollout: str | None = None
    """file.py:function(sample, prompt_ids, **columns) -> a list of (ids, trained) per row: responses with tools, of
    several turns or of another engine (algos/README.md, "Rollouts of your own"). Default: one sample per prompt."""
    ref_model: str | None = None
    """Reference model for the KL, given like --model; default: a frozen copy of --model at the start."""
    total_episodes: Count = 65536
    """Length of the run in episodes (one prompt with one response), over all iterations."""
    rollout_batch_size: Count = 512
    """Episodes per iteration, over all processes."""
    temperature: Positive = 1.0
    """Sampling temperature of rollouts. Log-probabilities are those of the distribution at this temperature."""

    @property
    def num_iterations(self):
        """Iterations of the whole run."""
        return self.total_episodes // self.rollout_batch_size

    @property
    def steps_per_iteration(self):
        """Optimizer steps of an iteration."""
        return self.ppo_epochs * (self.rollout_batch_size // self.batch_size)
