"""The command line: flags, YAML files of flags, names that flags have elsewhere, bad input."""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from pathlib import Path

import yaml

from common.help import help_text

ROOT = Path(__file__).resolve().parents[1]


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


def stop_if(problems):
    """Raises one InputError for all problems (sentences), if there are any, so that a user mends a command once."""
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError("\n  - ".join([f"{len(problems)} problems:", *problems]))


def flag_of(name):
    """The flag of a field."""
    return "--" + name.replace("_", "-")


EXPECTED = {
    "model": "a directory or hub id",
    "dataset": "rows from a file (.jsonl .json .csv .parquet .txt), hub id:split or file.py:function",
    "reward": """file.py:function, or a sequence classifier's directory or hub id. --reward my.py:score calls this:
  def score(outputs, **columns):
      return [float("4" in output) for output in outputs]  # a number for each output""",
}


def missing(args, *names):
    """A sentence for each of these fields that is None."""
    return [f"{flag_of(name)} is missing: {EXPECTED[name]}" for name in names if getattr(args, name) is None]


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main):
    """Parses sys.argv into args_class (tyro; YAML files are expanded first) and calls main with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the script's beginning had none
    try:
        argv = sys.argv[1:]
        if not {"-h", "--help"}.isdisjoint(argv):
            with contextlib.suppress(BrokenPipeError):  # `| head`
                print(help_text(args_class).rstrip(), flush=True)
            return
        args = parse(argv, args_class)
        main(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except InputError as error:
        if error.__cause__ is not None:  # the user's own code failed: where
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(argv, args_class):
    """args_class, filled by the words of a command line and by the YAML files that these name."""
    import tyro

    refuse_other_names([word for word in argv if word.startswith("--")], args_class)
    with_task = with_embedded_task(argv, args_class)
    args = tyro.cli(args_class, args=expand_config(with_task, args_class))
    if with_task != argv and os.environ.get("RANK", "0") == "0":
        print(describe_task(args_class.task_file), flush=True)
    return args


# ---- Files of flags --------------------------------------------------------------------------------------------------


def embedded_task(path):
    """Decorator of Args: with neither a model nor a dataset, fields that are not given are those of the YAML file at
    path, beside the task that the repository brings. From Python; `with_embedded_task` does it for the command line."""

    def decorate(args_class):
        plain_init = args_class.__init__

        @functools.wraps(plain_init)
        def init(self, *values, **fields):
            refuse_other_names(map(flag_of, fields), args_class)
            if not values and fields.keys().isdisjoint(("model", "dataset")):
                fields = task_fields(path) | fields
            plain_init(self, *values, **fields)

        args_class.__init__ = init
        args_class.task_file = path
        return args_class

    return decorate


def find_task(path):
    """A task's YAML file. The repository has it, a script in a single file does not."""
    if not (ROOT / path).exists():
        raise InputError(f"give --model and --dataset: the embedded task is not here, there is no {ROOT / path}")
    return ROOT / path


def task_fields(path):
    """{field: value} of a task's YAML file."""
    fields = yaml.safe_load(find_task(path).read_text())
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return fields


def with_embedded_task(argv, args_class):
    """argv, behind --config and the YAML file of the embedded task where it names no model, data or file of flags."""
    given = {word.partition("=")[0] for word in argv}
    if not given.isdisjoint(("--model", "--dataset", "--config")):
        return argv
    return ["--config", str(find_task(args_class.task_file)), *argv]


def describe_task(path):
    """What the command line says where it takes the settings of an embedded task."""
    settings = [f"{name} {value}".replace(" ", "\u00a0") for name, value in task_fields(path).items()]  # unbroken
    width = min(110, shutil.get_terminal_size().columns - 2)
    text = textwrap.indent(textwrap.fill(", ".join(settings), width), "  ").replace("\u00a0", " ")
    return f"no --model, --dataset or --config: the embedded task, by --config {path}; own flags win\n{text}"


def expand_config(argv, args_class):
    """argv with --config FILE replaced by the flags in it, placed first, so that the command line wins over the file.

    Expanding into argv gives the file tyro's types and error messages. Words are taken as they stand there: PyYAML
    alone reads `1e-3` as a string, and `off` as False. A path that is not found is tried in the repository.
    """
    places = [place for place, word in enumerate(argv) if word.partition("=")[0] == "--config"]
    if not places:
        return argv
    if len(places) > 1:
        raise InputError("--config is given twice: join the files")
    at = places[0]
    path = argv[at].partition("=")[2]
    rest = argv[at + 1 :]
    if not path and rest:
        path = rest[0]
        rest = rest[1:]
    if not path or path.startswith("--"):
        raise InputError("--config needs a YAML file of flags")
    types = {field.name: field.type for field in dataclasses.fields(args_class) if field.init}
    entries = [(key.replace("-", "_"), key, node) for key, node in yaml_entries(path)]
    refuse_other_names([flag_of(name) for name, _, _ in entries], args_class, where=f"--config {path}: ")
    flags = []
    seen = set()
    for name, key, node in entries:
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
        if not file.exists():
            raise ValueError("there is no such file")
        document = yaml.compose(file.read_text(), Loader=yaml.BaseLoader)
        if not isinstance(document, yaml.MappingNode):
            raise ValueError("it holds no mapping")
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in document.value):
            raise ValueError("a key is no name")
        return [(key.value, node) for key, node in document.value]
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise InputError(f"--config {path} is not a readable YAML mapping: {' '.join(str(error).split())}") from None


SWITCH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def config_words(path, name, node, is_switch):
    """What stands for an entry of the file on a command line. A list is one flag with several words."""
    listed = isinstance(node, yaml.SequenceNode)
    items = node.value if listed else [node]
    if is_switch and listed:
        raise InputError(f"--config {path}: {flag_of(name)} cannot hold a list")
    words = []
    for item in items:
        nested = not isinstance(item, yaml.ScalarNode)
        if nested or (listed and item.value[:1] in ("-", "")):  # a dash in front: it would be read as a flag
            content = "a list or mapping" if nested else repr(item.value)
            raise InputError(f"--config {path}: {flag_of(name)} cannot hold {content:.60}")
        absent = item.value in ("null", "~", "") and item.style is None
        words.append("None" if absent else item.value)
    if is_switch and words[0].lower() in SWITCH_WORDS:
        return [flag_of(name) if SWITCH_WORDS[words[0].lower()] else flag_of(f"no_{name}")]
    return [flag_of(name), *words]


# ---- Names that flags have elsewhere ---------------------------------------------------------------------------------

# {a flag of TRL, trlX, transformers' TrainingArguments, or of this project before: what may be said of it}. Said is the
# first one whose flags the script has.
OTHER_NAMES = {
    "adam_beta1": ["use --adam-betas"],
    "adam_beta2": ["use --adam-betas"],
    "adam_epsilon": ["use --adam-eps"],
    "adap_kl_ctrl": ["use --kl-target, which adapts the coefficient"],
    "advantage_clip": ["it is gone; in a copy of the script, clamp q - v in shape_logits"],
    "alpha": ["use --polyak-alpha"],
    "assistant_only_loss": ["use --completion-only-loss"],
    "backward_batch_size": ["use --batch-size"],
    "beta": ["use --kl-coef"],
    "bf16": ["use --mixed-precision bf16"],
    "bootstrap_truncated": ["it is gone; a truncated response counts as ended, see --missing-eos-penalty"],
    "cache_dir": ["set HF_HOME, the library's own variable"],
    "center_rewards_coefficient": ["use --center-coef"],
    "chat_template_path": ["use --tokenizer: save it with the template"],
    "checkpoint_dir": ["use --run-dir"],
    "checkpoint_interval": ["use --save-every"],
    "chunk_size": ["use --decode-batch-size"],
    "clip_range": ["use --cliprange"],
    "clip_range_value": ["use --cliprange-value"],
    "cliprange_reward": ["use --score-clip"],
    "cql_weight": ["use --cql-scale"],
    "dataset_name": ["use --dataset"],
    "dataset_split": ["name the split behind the data set: --dataset org/name:split"],
    "dataset_text_field": ["name the column text, or let --dataset file.py:function return the rows"],
    "dataset_train_split": ["name the split behind the data set: --dataset org/name:split"],
    "deepspeed": ["it is gone; benchmarks/accelerate has launcher files for several GPUs"],
    "do_sample": ["rollouts always sample; --eval-temperature 0 makes evaluations greedy"],
    "early_stopping": ["use --early-stop-kl"],
    "entity_name": ["set WANDB_ENTITY, wandb's own variable"],
    "epochs": ["use --total-episodes", "use --num-epochs"],
    "epsilon": ["use --cliprange"],
    "epsilon_high": ["use --cliprange-high"],
    "eval_interval": ["use --eval-every"],
    "eval_steps": ["use --eval-every"],
    "eval_strategy": ["use --eval-every"],
    "evaluation_strategy": ["use --eval-every"],
    "exp_name": ["use --name"],
    "filter": ["it is gone; --top-k and --top-p filter what the base model proposes"],
    "formatting": ["it is gone; a --dataset file.py:function returns rows in any form"],
    "formatting_func": ["let --dataset file.py:function return the rows"],
    "forward_batch_size": ["use --micro-batch-size"],
    "fp16": ["use --mixed-precision bf16"],
    "gen_kwargs": ["use --max-new-tokens, --temperature and their like"],
    "generate_during_eval": ["use --eval-prompts"],
    "generation_batch_size": ["use --rollout-batch-size"],
    "gradient_accumulation_steps": ["--batch-size is that of all forward passes, --micro-batch-size that of one"],
    "group_name": ["set WANDB_RUN_GROUP, wandb's own variable"],
    "horizon": ["use --kl-horizon"],
    "hub_model_id": ["use --push-to-hub"],
    "importance_sampling_level": ["use --ratio-level"],
    "init_kl_coef": ["use --kl-coef"],
    "inner_epochs": ["use --ppo-epochs"],
    "is_peft_model": ["it is read from --model"],
    "kl_estimator": ["use --kl-kind: k1 is kl"],
    "kl_penalty": ["use --kl-kind"],
    "learning_rate": ["use --lr"],
    "learning_rate_init": ["use --lr"],
    "learning_rate_target": ["use --lr-final"],
    "load_in_8bit": ["it is gone; a base model under adapters may be loaded in 4 bits"],
    "local_rollout_forward_batch_size": ["use --decode-batch-size"],
    "log_with": ["use --track"],
    "logging_dir": ["use --run-dir"],
    "logging_steps": ["every step is logged, to metrics.jsonl"],
    "lora_dropout": ["it is gone; dropout is 0 in every model"],
    "lora_rank": ["use --lora-r"],
    "lora_target_modules": ["use --lora-targets"],
    "loss_type": ["use --loss-mean: grpo is sequence, dapo is token, dr_grpo is constant"],
    "lr_decay_steps": ["use --decay-steps"],
    "lr_ramp_steps": ["use --warmup-steps"],
    "lr_scheduler_type": ["use --lr-schedule"],
    "mask_truncated_completions": ["it is gone; algos/README.md has the line that adds it to grpo.py"],
    "max_completion_length": ["use --max-new-tokens"],
    "max_seq_length": ["use --max-length"],
    "max_steps": ["use --total-steps", "use --total-episodes"],
    "merge": ["use --merge-adapters"],
    "metric_fn": ["use --metric"],
    "mini_batch_size": ["use --micro-batch-size for a forward pass, --batch-size for an optimizer step"],
    "minibatch_size": ["use --micro-batch-size"],
    "model_name": ["use --model"],
    "model_name_or_path": ["use --model"],
    "model_path": ["use --model"],
    "model_revision": ["use --revision"],
    "neftune_alpha": ["it is gone; algos/README.md has the lines that add it to sft.py"],
    "neftune_noise_alpha": ["algos/README.md has the lines that add it to sft.py"],
    "num_epochs": ["use --epochs", "use --total-episodes"],
    "num_generations": ["use --group-size"],
    "num_iterations": ["use --ppo-epochs"],
    "num_mini_batches": ["use --batch-size, the rows of an optimizer step"],
    "num_ppo_epochs": ["use --ppo-epochs"],
    "num_rollouts": ["use --rollout-batch-size"],
    "num_sample_generations": ["use --eval-every"],
    "num_train_epochs": ["use --epochs", "use --total-episodes"],
    "opt_betas": ["use --adam-betas"],
    "optim": ["it is gone; AdamW is used, and another optimizer is one line in a copy"],
    "optimize_cuda_cache": ["it is not needed"],
    "optimize_device_cache": ["it is not needed"],
    "output_dir": ["use --run-dir"],
    "padding_free": ["use --packing"],
    "peft_config": ["use --lora-r"],
    "per_device_eval_batch_size": ["use --micro-batch-size"],
    "per_device_train_batch_size": ["use --micro-batch-size, or --batch-size for that of all processes"],
    "per_prompt_stat_tracking": ["use --per-prompt-stats"],
    "precompute_ref_log_probs": ["use --precompute-ref"],
    "project_name": ["use --wandb-project"],
    "prompts": ["use --dataset"],
    "query_dataset": ["use --dataset"],
    "ref_model_path": ["use --ref-model"],
    "report_to": ["use --track"],
    "response_length": ["use --max-new-tokens"],
    "resume_from_checkpoint": ["use --resume"],
    "reward_fn": ["use --reward"],
    "reward_funcs": ["use --reward, one function that adds up what it likes"],
    "reward_model": ["use --reward"],
    "reward_model_path": ["use --reward"],
    "rpo_alpha": ["use --sft-coef"],
    "run_name": ["use --name"],
    "sample_batch_size": ["use --rollout-batch-size for all images of an epoch, --decode-batch-size for those at once"],
    "sample_eta": ["use --eta"],
    "sample_guidance_scale": ["use --guidance-scale"],
    "sample_num_steps": ["use --num-inference-steps"],
    "save_interval": ["use --save-every"],
    "save_steps": ["use --save-every"],
    "save_strategy": ["use --save-every"],
    "save_total_limit": ["use --keep-checkpoints"],
    "scale_reward": ["use --score-scaling"],
    "scale_rewards": ["use --advantage-kind: group is std, none is mean"],
    "seq_length": ["use --max-length"],
    "sft_model_path": ["use --model"],
    "steps": ["use --total-episodes", "use --total-steps"],
    "steps_per_generation": ["use --rollout-batch-size"],
    "stop_sequences": ["use --stop"],
    "stop_token": ["use --stop"],
    "stop_token_id": ["use --stop"],
    "target": ["use --kl-target"],
    "target_kl": ["use --early-stop-kl"],
    "task_name": ["use --name"],
    "tokenizer_path": ["use --tokenizer"],
    "torch_dtype": ["use --dtype"],
    "total_steps": ["use --total-episodes", "use --num-epochs"],
    "tracker": ["use --track"],
    "tracker_project_name": ["use --wandb-project"],
    "train_adv_clip_max": ["use --adv-clip-max"],
    "train_batch_size": ["use --batch-size"],
    "train_clip_range": ["use --cliprange"],
    "train_dataset": ["use --dataset"],
    "train_learning_rate": ["use --lr"],
    "train_num_inner_epochs": ["use --ppo-epochs"],
    "train_timestep_fraction": ["use --timestep-fraction"],
    "use_lora": ["use --lora-r"],
    "use_peft": ["use --lora-r"],
    "use_score_norm": ["use --score-scaling running-norm"],
    "use_score_scaling": ["use --score-scaling running"],
    "use_vllm": ["it is gone; --decode-batch-size rows are sampled at a time by the script itself"],
    "warmup_ratio": ["use --warmup-steps"],
    "world_size": ["use the option nproc_per_node of torchrun"],
}


def refuse_other_names(flags, args_class, where=""):
    """InputError with a sentence for each flag that the script calls by another name. A name without a counterpart in
    this script is left to tyro, which says what is similar."""
    fields = {field.name for field in dataclasses.fields(args_class)}
    problems = []
    for flag in flags:
        flag = flag.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if name in fields:
            continue
        for advice in OTHER_NAMES.get(name, ()):
            counterparts = re.findall(r"--([a-z][a-z-]*)", advice)
            if all(counterpart.replace("-", "_") in fields for counterpart in counterparts):
                problems.append(f"{where}there is no {flag} here: {advice}")
                break
    stop_if(problems)
