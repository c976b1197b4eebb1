"""The command line: flags, YAML files of flags, names that flags have elsewhere, bad input."""

import dataclasses
import difflib
import functools
import os
import sys
import textwrap
import traceback
from pathlib import Path

import yaml

from common.ranges import flag_of

ROOT = Path(__file__).resolve().parents[1]


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


def stop_if(problems):
    """Raises one InputError for all problems (sentences), if there are any, so that a user mends a command once."""
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError("\n  - ".join([f"{len(problems)} problems:", *problems]))


EXPECTED = {
    "model": "a directory or hub id",
    "dataset": "rows from a file (.jsonl .json .csv .parquet .txt), hub id:split or file.py:function",
    "reward": "file.py:function, or a sequence classifier's directory or hub id",
}


def missing(args, *names):
    """A sentence for each of these fields that is None."""
    return [f"{flag_of(name)} is missing: {EXPECTED[name]}" for name in names if getattr(args, name) is None]


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main):
    """Parses sys.argv into args_class (tyro; YAML files are expanded first) and calls main with it."""
    import tyro

    try:
        argv = sys.argv[1:]
        refuse_other_names([word for word in argv if word.startswith("--")], args_class)
        argv = expand_config(with_embedded_task(argv, args_class), args_class)
        main(tyro.cli(args_class, args=argv))
    except InputError as error:
        if error.__cause__ is not None:  # the user's own code failed: where
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


# ---- Files of flags --------------------------------------------------------------------------------------------------


def embedded_task(path):
    """Decorator of Args: with neither a model nor a dataset, fields that are not given are those of the YAML file at
    path, beside the task that the repository brings. From Python; `with_embedded_task` does it for the command line."""

    def decorate(args_class):
        plain_init = args_class.__init__

        @functools.wraps(plain_init)
        def init(self, *values, **fields):
            if not values and fields.keys().isdisjoint(("model", "dataset")):
                fields = task_fields(path) | fields
            plain_init(self, *values, **fields)

        args_class.__init__ = init
        args_class.task_file = path
        return args_class

    return decorate


def task_fields(path):
    """{field: value} of a task's YAML file."""
    fields = yaml.safe_load((ROOT / path).read_text())
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return fields


def with_embedded_task(argv, args_class):
    """argv, behind --config and the YAML file of the embedded task where it names no model, data or file of flags."""
    given = {word.partition("=")[0] for word in argv}
    if not given.isdisjoint(("--model", "--dataset", "--config", "--help", "-h")):
        return argv
    if os.environ.get("RANK", "0") == "0":
        settings = [f"{name} {value}" for name, value in task_fields(args_class.task_file).items()]
        print(f"no --model, --dataset or --config: the embedded task, by --config {args_class.task_file}")
        print(textwrap.indent(textwrap.fill(", ".join(settings), 110), "  "), flush=True)
    return ["--config", str(ROOT / args_class.task_file), *argv]


def expand_config(argv, args_class):
    """argv with --config FILE replaced by the flags in it, placed first, so that the command line wins over the file.

    Expanding into argv gives the file tyro's types and error messages. Words are taken as they stand there: PyYAML
    alone reads `1e-3` as a string, and `off` as False. A path that is not there is one of the repository.
    """
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return argv
    path = argv[at].partition("=")[2]
    rest = argv[at + 1 :]
    if not path and rest:
        path = rest[0]
        rest = rest[1:]
    types = {field.name: field.type for field in dataclasses.fields(args_class) if field.init}
    flags = []
    seen = set()
    for key, node in yaml_entries(path):
        name = key.replace("-", "_")
        refuse_other_names([flag_of(name)], args_class, where=f"--config {path}: ")
        if name not in types:
            similar = difflib.get_close_matches(name, types, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise InputError(f"--config {path}: unknown key {key!r}{hint}")
        if name in seen:
            raise InputError(f"--config {path}: doubled key {key!r}")
        seen.add(name)
        flags += config_words(path, name, node, is_switch=types[name] in (bool, "bool"))
    return flags + argv[:at] + rest


def yaml_entries(path):
    """[(key, node of the value)] of a YAML file that holds a mapping."""
    try:
        file = Path(path) if Path(path).exists() else ROOT / path
        document = yaml.compose(file.read_text(), Loader=yaml.BaseLoader)
        if not isinstance(document, yaml.MappingNode):
            raise ValueError("it holds no mapping")
        return [(key.value, node) for key, node in document.value]
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise InputError(f"--config {path} is not a readable YAML mapping: {' '.join(str(error).split())}") from None


def config_words(path, name, node, is_switch):
    """What stands for an entry of the file on a command line. A list is one flag with several words."""
    listed = isinstance(node, yaml.SequenceNode)
    items = node.value if listed else [node]
    problems = []
    for item in items:
        nested = not isinstance(item, yaml.ScalarNode)
        if nested or (listed and item.value[:1] in ("-", "")):  # a dash in front: it would be read as a flag
            problems.append(f"--config {path}: --{name} cannot hold {item.value!r:.60}")
    stop_if(problems)
    words = []
    for item in items:
        absent = item.value in ("null", "~", "") and item.style is None
        words.append("None" if absent else str(item.value))
    if is_switch and yaml.safe_load(words[0]) in (True, False):
        return [f"--{name}" if yaml.safe_load(words[0]) else f"--no-{name}"]
    return [f"--{name}", *words]


# ---- Names that flags have elsewhere ---------------------------------------------------------------------------------

# {a flag of TRL, trlX, transformers' TrainingArguments, or of this project before: what is said of it here}.
OTHER_NAMES = {
    "adam_beta1": "use --adam-betas",
    "adam_beta2": "use --adam-betas",
    "adam_epsilon": "use --adam-eps",
    "adap_kl_ctrl": "use --kl-target, which adapts the coefficient",
    "advantage_clip": "it is gone; in a copy of the script, clamp q - v in shape_logits",
    "alpha": "use --polyak-alpha",
    "bf16": "use --mixed-precision bf16",
    "bootstrap_truncated": "it is gone; a truncated response counts as ended, see --missing-eos-penalty",
    "cache_dir": "set HF_HOME, the library's own variable",
    "checkpoint_dir": "use --run-dir",
    "checkpoint_interval": "use --save-every",
    "chunk_size": "use --decode-batch-size",
    "clip_range": "use --cliprange",
    "cql_weight": "use --cql-scale",
    "dataset_name": "use --dataset",
    "entity_name": "set WANDB_ENTITY, wandb's own variable",
    "epsilon": "use --cliprange",
    "eval_interval": "use --eval-every",
    "eval_steps": "use --eval-every",
    "evaluation_strategy": "use --eval-every",
    "exp_name": "use --run-dir",
    "filter": "it is gone; --top-k and --top-p filter what the base model proposes",
    "formatting": "it is gone; a --dataset file.py:function returns rows in any form",
    "formatting_func": "let --dataset file.py:function return the rows",
    "fp16": "use --mixed-precision bf16",
    "gen_kwargs": "use --max-new-tokens, --temperature and their like",
    "gradient_accumulation_steps": "--batch-size is that of all forward passes, --micro-batch-size that of one",
    "horizon": "use --kl-horizon",
    "init_kl_coef": "use --kl-coef",
    "inner_epochs": "use --ppo-epochs",
    "kl_penalty": "use --kl-kind",
    "learning_rate": "use --lr",
    "log_with": "use --track",
    "logging_steps": "every step is logged, to metrics.jsonl",
    "lora_target_modules": "use --lora-targets",
    "lr_scheduler_type": "use --lr-schedule",
    "max_completion_length": "use --max-new-tokens",
    "max_seq_length": "use --max-length",
    "max_steps": "use --total-steps",
    "merge": "use --merge-adapters",
    "mini_batch_size": "use --batch-size, the rows of an optimizer step",
    "minibatch_size": "use --micro-batch-size",
    "model_name": "use --model",
    "model_name_or_path": "use --model",
    "model_path": "use --model",
    "neftune_alpha": "it is gone; algos/README.md has the lines that add it",
    "neftune_noise_alpha": "algos/README.md has the lines that add it",
    "num_ppo_epochs": "use --ppo-epochs",
    "num_rollouts": "use --rollout-batch-size",
    "num_train_epochs": "use --epochs",
    "optimize_cuda_cache": "it is not needed",
    "output_dir": "use --run-dir",
    "per_device_eval_batch_size": "use --micro-batch-size",
    "per_device_train_batch_size": "use --micro-batch-size, or --batch-size for that of all processes",
    "per_prompt_stat_tracking": "use --per-prompt-stats",
    "project_name": "use --wandb-project",
    "report_to": "use --track",
    "response_length": "use --max-new-tokens",
    "resume_from_checkpoint": "use --resume",
    "reward_model_path": "use --reward",
    "run_name": "use --run-dir",
    "sample_batch_size": "use --rollout-batch-size",
    "sample_eta": "use --eta",
    "sample_guidance_scale": "use --guidance-scale",
    "sample_num_steps": "use --num-inference-steps",
    "save_steps": "use --save-every",
    "save_total_limit": "use --keep-checkpoints",
    "seq_length": "use --max-length",
    "sft_model_path": "use --model",
    "stop_token": "use --stop",
    "target": "use --kl-target",
    "target_kl": "use --early-stop-kl",
    "tokenizer_path": "use --tokenizer",
    "tracker": "use --track",
    "train_adv_clip_max": "use --adv-clip-max",
    "train_batch_size": "use --batch-size",
    "train_clip_range": "use --cliprange",
    "train_learning_rate": "use --lr",
    "train_num_inner_epochs": "use --ppo-epochs",
    "train_timestep_fraction": "use --timestep-fraction",
    "use_lora": "use --lora-r",
    "use_peft": "use --lora-r",
    "warmup_ratio": "use --warmup-steps",
    "world_size": "use torchrun --nproc_per_node",
}


def refuse_other_names(flags, args_class, where=""):
    """InputError with a sentence for each flag that the script calls by another name. A name without a counterpart in
    this script is left to tyro, which says what is similar."""
    fields = {field.name for field in dataclasses.fields(args_class)}
    problems = []
    for flag in flags:
        flag = flag.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        advice = OTHER_NAMES.get(name)
        if name in fields or advice is None:
            continue
        counterparts = [word.strip(",;.").removeprefix("--") for word in advice.split() if word.startswith("--")]
        if all(counterpart.replace("-", "_") in fields for counterpart in counterparts if counterpart[:5] != "nproc"):
            problems.append(f"{where}there is no {flag} here: {advice}")
    stop_if(problems)
