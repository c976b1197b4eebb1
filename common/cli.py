"""The command line: YAML files of flags, --help, and the flags that say where and how to run and what to load."""

import argparse
import dataclasses
import inspect
import math
import os
import re
import signal
import sys
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml

from common.errors import InputError, Stopped, flag_of, stop_if
from common.functions import ROOT, spec_path
from common.report import visible_lines

ABOUT_FLAGS = """The defaults are for pretrained models. Without --model, --dataset or --config, the script runs its
embedded task with that task's settings. --config FILE reads flags from a YAML file; your other flags override it."""


def cli(args_class, main, task=None):
    """Parses sys.argv into args_class and calls main with it. task: see `parse`."""
    sys.excepthook = show_error
    try:
        refuse_repeated(sys.argv[1:])
        args = parse(sys.argv[1:], args_class, task)
        try:
            main(args)
        except SystemExit as error:
            if isinstance(error, Stopped):
                raise
            raise RuntimeError(f"code of the user ended with {error!r}") from error  # 0 would say success
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except InputError as error:
        text = "\n".join([f"error: {error}", *getattr(error, "__notes__", [])])
        print(visible_lines(text), file=sys.stderr)
        sys.exit(2)


def show_error(*raised):
    """A traceback as Python's, with what a model has written in the text of an exception written out."""
    print(visible_lines("".join(traceback.format_exception(*raised)).rstrip()), file=sys.stderr)


def refuse_repeated(words, source=""):
    """InputError for each flag that is given twice, of which tyro would silently take the last. source: begins it."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    flags = [flag.replace("--no-", "--") for flag in flags]
    repeated = {flag for flag in flags if flags.count(flag) > 1} - {"--config"}
    stop_if([f"{source}{flag} is given twice: give it once" for flag in sorted(repeated)])


def parse(argv, args_class, task=None):
    """args_class from the words of a command line, which override the YAML files. task: that of the embedded task."""
    import tyro

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    files, words = parser.parse_known_args(argv)
    flags = {word.partition("=")[0] for word in argv}
    takes_task = task and flags.isdisjoint(("--model", "--dataset", "--config")) and (ROOT / task).exists()
    for path in reversed([task] if takes_task else files.config):
        words = read_config(path, args_class, skips_unknown=takes_task) + words
    stop_if(foreign_words(words, args_class, Path(task or "").stem))
    fields = args_class.__dataclass_fields__
    # help begins with what must be given and what stands in the script
    in_order = dict.fromkeys([*args_class.required, *args_class.__annotations__, *fields])
    args_class.__dataclass_fields__ = {name: fields[name] for name in in_order}
    prog = " --config ".join([Path(sys.argv[0]).name, *files.config])  # so that tyro's errors name the files
    about = f"{inspect.getdoc(args_class)} {ABOUT_FLAGS}"
    args = tyro.cli(args_class, prog=prog, description=about, args=words)
    if hasattr(args, "stop"):
        args.stop = tuple(text.removeprefix("\0") for text in args.stop)  # see `read_config`
    if takes_task and os.environ.get("RANK", "0") == "0":
        print("no --model, --dataset or --config: running the embedded task, as set in")
        print(f"{task}; flags override them", flush=True)
    return args


def from_task(args_class, task, **fields):
    """args_class with the settings of an embedded task's YAML file, as in a command without flags, and these fields."""
    return dataclasses.replace(parse(["--config", task], args_class), **fields)


def read_config(path, args_class, skips_unknown=False):
    """The words of a command line that do what a YAML file of flags says; the file may also lie in the repository.
    Values stay texts, because tyro knows the types: PyYAML would read `1e-3` as a text and `off` as False."""
    try:
        text = Path(spec_path(path) or path).read_text(encoding="utf-8")
        entries = [(flag_of(name.value), node) for name, node in yaml.compose(text).value]
    except Exception as error:  # of the file and of PyYAML
        expected = "" if isinstance(error, OSError) else "; expected YAML with lines such as lr: 1e-5"
        raise InputError(f"--config {path} cannot be read: {' '.join(str(error).split())}{expected}") from None
    refuse_repeated([flag for flag, _ in entries], f"--config {path}: ")
    types = {flag_of(field.name): field.type for field in dataclasses.fields(args_class)}
    words = []
    for flag, node in entries:
        if flag not in types and skips_unknown:
            continue
        value = str(node.value)
        is_on = yaml.SafeLoader.bool_values.get(value.lower())
        if isinstance(node, yaml.SequenceNode):
            # tyro would take --a for a flag
            words += [flag, *(re.sub(r"^(?=-[^\d.])", "\0", str(item.value)) for item in node.value)]
        elif types.get(flag) is bool and is_on is not None:
            words.append(flag if is_on else flag.replace("--", "--no-"))
        else:
            words.append(f"{flag}={'None' if value in ('null', '~') else value}")
    return words


def foreign_words(words, args_class, script):
    """A sentence for each flag that only algos/MIGRATION.md knows, from the script's own section if it is there."""
    page = ROOT / "algos/MIGRATION.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""  # a script in a single file has no such page
    sections = {section.partition("\n")[0]: section for section in text.split("\n## ")}
    said = {}
    for title in dict.fromkeys([f"{script}.py", "Every script", *sections]):
        where = "" if title in (f"{script}.py", "Every script") else f"{title} has "
        for theirs, here, note in re.findall(r"(?m)^\| (.*?) \| (.*?) \| ?(.*?) ?\|$", sections.get(title, "")):
            for name in re.findall(r"`(?:\w+Config\.)?(\w+)`", theirs):
                said.setdefault(flag_of(name), f"{where}{here}. {note}".rstrip(". "))
    given = {flag_of(word[2:].partition("=")[0]) for word in words if re.match("--[A-Za-z]", word)}
    given -= {flag_of(field.name) for field in dataclasses.fields(args_class)}
    return [f"there is no {flag} here; algos/MIGRATION.md says: {said[flag]}" for flag in sorted(given & said.keys())]


# ---- Flags ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """What values a field of Args may have; part of the field's annotated type."""

    rule: str  # completes "--flag value must be"
    holds: Callable = dataclasses.field(repr=False)


Count = Annotated[int, Range("at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Range("at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Range("a positive number", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Range("0 or a positive number", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
Share = Annotated[float, Range("in (0, 1]", lambda value: 0 < value <= 1)]


def is_stop(text):
    """Neither empty, as every response ends, nor with a \\n of a shell; \\text and \\nabla are words of TeX."""
    return text and not re.match(r"(\\[nrt])+(?![a-z{])", text)


StopString = Annotated[str, Range("texts that are not empty, with a line break as $'\\n' in a shell", is_stop)]


def find_range(annotation):
    """The Range in a type such as `Count`, `Literal["a", "b"] | None` or `tuple[Share, Share]`; None if it has none."""
    if isinstance(annotation, Range):
        return annotation
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return Range(f"one of {', '.join(inner)}", inner.__contains__)
    return next(filter(None, map(find_range, inner)), None)


@dataclass
class RunArgs:
    """Flags of every script."""

    required = ("model", "dataset")  # fields that must be given

    dataset: str | None = None
    """Rows with a prompt, which is a text or a chat (the reward gets the other columns): a
    .jsonl/.json/.csv/.parquet/.txt file, a hub id:split, or file.py:function; from Python, a list."""
    eval_dataset: str | None = None
    """Evaluation rows, in the formats of --dataset, or a share of its rows to hold out, such as 0.05. Several sets:
    separated by commas, or a mapping from names to rows. Default: none; in scripts with --reward, the first
    --rollout-batch-size rows of --dataset."""
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
    """Rank of LoRA adapters to train instead of the weights; 0: none. One given as --model is trained without it."""
    lora_alpha: Positive | None = None
    """LoRA adapters are scaled by alpha / r; default: the rank, which gives a scale of 1."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Modules to adapt, by the last part of the name; all-linear: all linear layers except the output layer or head."""
    run_dir: str | None = None
    """Directory of the run; default: runs/<algo>-<hash of flags, code and named files>."""
    resume: str = "auto"
    """auto: continue the run if it exists; never: repeat it in a new directory; or the path of a run or checkpoint."""
    seed: int = 1
    """Seed of every random draw."""
    threads: Count | None = None
    """CPU threads per process. Default: OMP_NUM_THREADS, unless accelerate or torchrun started the process; otherwise
    an equal share of the machine's CPUs. A container's CPU quota is not read: give it here."""
    deterministic: bool = False
    """Ask torch for deterministic kernels: slower on GPUs, with more memory for attention. CPUs need no flag for it."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Autocast of the forward pass. Default: bf16 if the launcher says so, or for float32 weights on a GPU that
    supports it; otherwise no. Weights and optimizer keep --dtype."""
    save_every: Natural = 100
    """Optimizer steps between checkpoints, at most ten minutes; 0: only at the end, the best evaluation or a signal."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints to keep, besides the best by evaluation."""
    eval_every: Natural = 100
    """Optimizer steps between evaluations, which also happen at the start and the end; 0: never evaluate."""
    track: Literal["off", "wandb", "tensorboard"] = "off"
    """Also send the metrics to a tracker. Project: WANDB_PROJECT or plainrl; WANDB_MODE=offline needs no account."""
    push_to_hub: str | None = None
    """Upload hf_model/ to this hub repository (org/name) at the end, using the login of the hub's own tools. A run that
    is already finished uploads nothing."""
    check: bool = False
    """Run one iteration on the longest rows (two if each is one optimizer step), print its time, what the whole run
    would take, and the peak memory, and exit. Writes nothing."""

    def __post_init__(self):
        """Refuses missing flags, values out of their range, and broken rules of the shared flags and the script's."""
        missing = [name for name in self.required if getattr(self, name) is None]
        problems = [f"{flag_of(name)} is missing: --help says what it takes" for name in missing]
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            allowed = find_range(declared.type)
            values = value if isinstance(value, list | tuple) else [value]
            if allowed and value is not None and not all(map(allowed.holds, values)):
                problems.append(f"{flag_of(declared.name)} {value} must be {allowed.rule}")
        if self.lora_r == 0 and (self.lora_alpha or tuple(self.lora_targets) != type(self).lora_targets):
            problems.append("--lora-alpha and --lora-targets need --lora-r")
        if self.lora_r and getattr(self, "num_layers_unfrozen", -1) != -1:
            problems.append("--num-layers-unfrozen must be -1 with --lora-r, which freezes all weights")
        stop_if([*problems, *self.problems()])

    def problems(self):
        """A sentence for each broken rule of a script's own flags."""
        return []


@dataclass
class ModelArgs:
    tokenizer: str | None = None
    """Hub id or directory of the tokenizer; from Python, also the object. Default: that of --model."""
    template_options: tuple[str, ...] = ()
    """Options of the tokenizer's chat template, such as enable_thinking=false."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; default: sdpa if the model has it. With left padding, eager gives NaN in float64 for some."""
    num_layers_unfrozen: int = -1
    """Train only the top k blocks and the norm after them; 0: only the heads that the script adds; -1: everything."""
    load_in_4bit: bool = False
    """Load the weights under LoRA adapters (--lora-r, or an adapter as --model) in 4 bits (NF4; arXiv 2305.14314)."""
