"""Flags of all scripts: ranges, rules, defaults, YAML, other names, help: `python -m pytest tests/test_flags.py`

What is expected stands in tables of this file, a row a flag or a rule; nothing is read from the types of the flags.
"""

import dataclasses
import os
import re
import subprocess
import sys
import typing
from itertools import product

import numpy as np
import pytest
import yaml
from helpers import INF, NAN

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from common.cli import cli, from_task, parse
from common.errors import InputError, flag_of
from common.functions import ROOT

SCRIPTS = {"ppo": ppo, "grpo": grpo, "ilql": ilql, "sft": sft, "reward": reward, "dpo": dpo, "ddpo": ddpo}
each_script = pytest.mark.parametrize("algo", SCRIPTS)


def fields_of(algo):
    return dataclasses.fields(SCRIPTS[algo].Args)


def required(algo):
    names = SCRIPTS[algo].Args.required
    return dict.fromkeys((*names, "reward") if algo == "grpo" else names, "mine.py:made")  # or grpo has a teacher


def told(algo, **flags):
    """The sentences on these flags; [] where they are good."""
    try:
        SCRIPTS[algo].Args(**required(algo) | flags)
    except InputError as error:
        first, *problems = str(error).split("\n  - ")
        assert not problems or first == f"{len(problems)} problems:"
        return problems or [first]
    return []


BOUNDS = {  # range: values inside, outside
    "at least 1": ([1, 7], [0, -1]),
    "at least 0": ([0, 7], [-1]),
    "a positive number": ([1e-9, 3.0], [0.0, -1.0, NAN, INF]),
    "0 or a positive number": ([0.0, 0.5], [-1e-9, NAN, INF]),
    "1 (no guidance) or more": ([1.0, 7.5], [0.999, NAN, INF]),
    "in [0, 1]": ([0.0, 0.5, 1.0], [-0.1, 1.1, NAN]),
    "in (0, 1]": ([0.1, 1.0], [0.0, 1.1, NAN]),
    "any": ([-1, 0], []),
}
FLAGS = {  # range: flags
    "at least 1": """batch_size decay_steps decode_batch_size group_size keep_checkpoints kl_horizon
        max_length max_new_tokens max_prompt_length micro_batch_size min_length_limit num_epochs num_inference_steps
        ppo_epochs rollout_batch_size stat_buffer_size stat_min_count steps_for_target_q_sync threads total_episodes
        total_steps""",
    "at least 0": "eval_every lora_r save_every top_k value_warmup warmup_steps",
    "a positive number": """adv_clip_max awac_clip beta correction_limit epochs kl_target lora_alpha lr temperature
        value_lr""",
    "0 or a positive number": """adam_eps awac_beta awac_scale betas center_coef cliprange cliprange_high
        cliprange_value cql_scale early_stop_kl eval_temperature kl_coef lr_final max_grad_norm missing_eos_penalty
        ratio_threshold score_clip sft_coef vf_coef weight_decay""",
    "1 (no guidance) or more": "guidance_scale",
    "in [0, 1]": "adam_betas gamma label_smoothing lam tau",
    "in (0, 1]": "eta polyak_alpha timestep_fraction top_p",
    "any": "num_layers_unfrozen seed",
}
RANGES = {}  # {flag: range}
for rule, names in FLAGS.items():
    RANGES |= dict.fromkeys(names.split(), rule)
SWITCHED_ON = "completion_only_loss normalize_rewards packing per_prompt_stats precompute_ref two_qs".split()
SHARED = {
    "adam_betas": (0.9, 0.999), "adam_eps": 1e-8, "batch_size": 64, "decode_batch_size": 256, "dtype": "float32",
    "eval_every": 100, "eval_temperature": 1.0, "keep_checkpoints": 2, "lora_r": 0, "lora_targets": ("all-linear",),
    "lr_final": 0.0, "lr_schedule": "cosine", "max_grad_norm": 1.0, "max_new_tokens": 64, "micro_batch_size": 8,
    "num_layers_unfrozen": -1, "resume": "auto", "save_every": 100, "seed": 1, "stop": (), "template_options": (),
    "top_k": 0, "top_p": 1.0, "track": "off", "warmup_steps": 0, "weight_decay": 0.0,
}  # fmt: skip
ROLLOUTS = {"rollout_batch_size": 512, "batch_size": 512, "total_episodes": 65536, "temperature": 1.0, "cliprange": 0.2}
DEFAULTS = {  # of each script beside SHARED; of papers, TRL and trlX, for pretrained models
    "ppo": ROLLOUTS | {
        "ppo_epochs": 4, "kl_coef": 0.05, "kl_kind": "kl", "kl_horizon": 10000, "gamma": 1.0, "lam": 0.95, "lr": 1e-5,
        "cliprange_value": 0.2, "vf_coef": 0.1, "value_head": "mlp", "value_head_init": "default", "adam_eps": 1e-5,
        "score_scaling": "none", "score_clip": 0.0, "missing_eos_penalty": 0.0, "early_stop_kl": 0.0,
        "ratio_threshold": 0.0, "max_new_tokens": 53, "lr_schedule": "linear", "value_warmup": 0,
    },
    "grpo": ROLLOUTS | {
        "ppo_epochs": 1, "kl_coef": 0.04, "group_size": 8, "advantage_kind": "std", "policy_loss": "clip",
        "ratio_level": "token", "lr": 1e-6, "loss_mean": "sequence", "max_new_tokens": 512,
        "lr_schedule": "constant", "save_every": 20, "eval_every": 20, "correction": "none", "correction_limit": 2.0,
    },
    "ilql": {
        "lr": 5e-5, "epochs": 3.0, "tau": 0.7, "gamma": 0.99, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 0.0,
        "awac_clip": 20.0, "polyak_alpha": 0.005, "steps_for_target_q_sync": 1, "betas": (0.0, 1.0, 4.0),
        "max_new_tokens": 56, "top_k": 20, "batch_size": 128, "max_length": 1024,
    },
    "sft": {"lr": 2e-5, "epochs": 3.0, "max_length": 1024},
    "reward": {"lr": 1e-5, "epochs": 1.0, "max_length": 1024, "center_coef": 0.0},
    "dpo": {
        "lr": 1e-6, "epochs": 1.0, "max_length": 1024, "beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0,
        "sft_coef": 0.0, "truncation_mode": "keep_end",
    },
    "ddpo": {
        "lr": 1e-5, "num_epochs": 100, "rollout_batch_size": 256, "ppo_epochs": 1, "timestep_fraction": 1.0,
        "cliprange": 1e-4, "adv_clip_max": 5.0, "stat_buffer_size": 32, "stat_min_count": 16, "eta": 1.0,
        "num_inference_steps": 50, "guidance_scale": 5.0, "negative_prompt": "", "decode_batch_size": 8,
        "lr_schedule": "constant", "weight_decay": 1e-4, "lora_targets": ("to_q", "to_k", "to_v", "to_out.0"),
        "save_every": 20, "eval_every": 40,
    },
}  # fmt: skip


def in_tuples(values, name):
    if name not in ("adam_betas", "betas"):
        return values
    return [*product([0.5], values), *product(values, [0.5])]


@pytest.mark.case(57)
@each_script
def test_every_range_by_its_bounds(algo):
    """A flag without a row fails; a rule between flags may hold of a value that is in the range."""
    hints = typing.get_type_hints(SCRIPTS[algo].Args)
    names = RANGES.keys() & hints.keys()
    assert names >= {name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)}}
    for name in names:
        rule = RANGES[name]
        inside, outside = BOUNDS[rule]
        for value in in_tuples(inside, name):
            assert f"{flag_of(name)} {value} must be {rule}" not in told(algo, **{name: value})
        for value in in_tuples(outside, name):
            assert f"{flag_of(name)} {value} must be {rule}" in told(algo, **{name: value})


@each_script
def test_defaults(algo):
    """Learning rates of the embedded tasks, 3e-4 to 6e-3, would ruin a pretrained model without a word."""
    args = vars(SCRIPTS[algo].Args(**required(algo)))
    expected = dict.fromkeys(args) | {name: value for name, value in SHARED.items() if name in args}
    expected |= {name: name in SWITCHED_ON for name, value in args.items() if isinstance(value, bool)}
    assert args == expected | DEFAULTS[algo] | required(algo)
    changed = args | {"lr": 0.7, "seed": -3, "save_every": 0, "weight_decay": 0.5}
    assert vars(SCRIPTS[algo].Args(**changed)) == changed


NO_LAYERS = "--num-layers-unfrozen must be -1 with --lora-r, which freezes all weights"
NOTHING = "--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1"
ALONE = "--group-size 1 must be at least 2: a response is compared with the others in its group"
EIGHTY = "--rollout-batch-size 80"
HALF = "--label-smoothing 0.5 must be below 0.5, or no preference is left"
HORIZON = "--kl-horizon 511 must be at least --rollout-batch-size 512, or --kl-coef may become negative"
TEX = (r"\text{", r"\nabla", r"\n\nQ")  # the last one is no word of TeX
STOP = "must be texts that are not empty, with a line break as $'\\n' in a shell"
OWN_ENDS = "--min-length-limit is not used with --rollout, which ends its responses itself"
BROKEN = [  # script, flags, the one sentence; most stand at the boundary of the rule
    ("ppo", {"rollout": "x", "min_length_limit": 3}, OWN_ENDS),
    ("sft", {"lora_alpha": 2.0}, "--lora-alpha and --lora-targets need --lora-r"),
    ("ddpo", {"lora_targets": ("all-linear",)}, "--lora-alpha and --lora-targets need --lora-r"),
    ("grpo", {"stop": ("END", "")}, f"--stop ('END', '') {STOP}"),
    ("grpo", {"stop": TEX}, f"--stop {TEX} {STOP}"),
    ("ddpo", {"dtype": "float16"}, "--dtype float16 must be one of float32, bfloat16, float64"),
    ("sft", {"mixed_precision": "fp16"}, "--mixed-precision fp16 must be one of no, bf16"),
    ("ppo", {"lora_r": 4, "num_layers_unfrozen": 0}, NO_LAYERS),
    ("sft", {"num_layers_unfrozen": 0}, NOTHING),
    ("dpo", {"num_layers_unfrozen": 0}, NOTHING),
    ("grpo", {"num_layers_unfrozen": 0}, NOTHING),
    ("ppo", {"batch_size": 0}, "--batch-size 0 must be at least 1"),
    ("ddpo", {"rollout_batch_size": 80}, f"{EIGHTY} must be a multiple of --batch-size 64"),
    ("ppo", {"batch_size": 384}, "--rollout-batch-size 512 must be a multiple of --batch-size 384"),
    ("ppo", {"total_episodes": 79, "rollout_batch_size": 80}, f"--total-episodes 79 must be at least {EIGHTY}"),
    ("grpo", {"total_episodes": 100}, "--rollout-batch-size 100 must be a multiple of --group-size 8"),
    ("grpo", {"group_size": 6}, "--rollout-batch-size 512 must be a multiple of --group-size 6"),
    ("ppo", {"min_length_limit": 54}, "--min-length-limit 54 must be at most --max-new-tokens 53"),
    ("ppo", {"kl_target": 6.0, "kl_coef": 0.0}, "--kl-target needs a --kl-coef above 0, which it adapts"),
    ("ppo", {"kl_target": 6.0, "kl_horizon": 511}, HORIZON),
    ("ppo", {"ratio_threshold": 1.0}, "--ratio-threshold 1.0 must be 0 or more than 1"),
    ("grpo", {"group_size": 1}, ALONE),
    ("grpo", {"group_size": 0}, "--group-size 0 must be at least 1"),
    ("grpo", {"ref_model": "other", "kl_coef": 0.0}, "--ref-model needs a --kl-coef above 0"),
    ("ilql", {"tau": 0}, "--tau 0 must be above 0 and below 1, or V is unbounded"),
    ("ilql", {"tau": 1.0}, "--tau 1.0 must be above 0 and below 1, or V is unbounded"),
    ("ilql", {"betas": ()}, "--betas is empty: give at least one number"),
    ("ilql", {"eval_prompts": "x"}, "--eval-prompts needs --metric, which scores the samples"),
    ("dpo", {"loss_type": "exo_pair"}, "--loss-type exo_pair needs a --label-smoothing above 0 (1e-3)"),
    ("dpo", {"loss_type": "sigmoid", "label_smoothing": 0.5}, HALF),
    ("dpo", {"loss_type": "ipo", "label_smoothing": 0.1}, "--label-smoothing 0.1 does not work with --loss-type ipo"),
    ("dpo", {"reference_free": True, "ref_model": "other"}, "--reference-free does not work with --ref-model"),
    ("ddpo", {"stat_min_count": 33}, "--stat-min-count 33 must be at most --stat-buffer-size 32"),
    ("ddpo", {"negative_prompt": "grey", "guidance_scale": 1.0}, "--negative-prompt needs a --guidance-scale above 1"),
]
KEPT = [  # flags that go together, on the other side of the boundaries
    ("sft", {"lora_targets": ["all-linear"], "num_layers_unfrozen": 1, "eval_prompts": "x"}),
    ("sft", {"lora_r": 1, "lora_alpha": 2.0, "lora_targets": ("c_attn",), "num_layers_unfrozen": -1}),
    ("reward", {"num_layers_unfrozen": 0}),  # its head is trained
    ("ppo", {"num_layers_unfrozen": 0, "min_length_limit": 53, "ratio_threshold": 1.001, "kl_coef": 0.0}),
    ("ppo", {"kl_target": 6.0, "kl_coef": 1e-9, "kl_horizon": 512}),
    ("ppo", {"batch_size": 256, "rollout_batch_size": 768, "total_episodes": 1536, "kl_horizon": 1}),
    ("grpo", {"num_layers_unfrozen": 1, "group_size": 2, "ref_model": "other", "kl_coef": 1e-9}),
    ("ilql", {"num_layers_unfrozen": 0, "tau": 0.001, "betas": (3.0,), "eval_prompts": "x", "metric": "y"}),
    ("ilql", {"tau": 0.999, "load_in_4bit": True, "dtype": "bfloat16"}),
    ("dpo", {"reference_free": True, "loss_type": "robust", "label_smoothing": 0.1}),
    ("ddpo", {"lora_targets": ["to_q", "to_k", "to_v", "to_out.0"], "stat_min_count": 32, "guidance_scale": 1.0}),
    ("ddpo", {"negative_prompt": "grey", "guidance_scale": 1.0001, "rollout_batch_size": 64}),
    # numbers of numpy, lists for tuples, objects for texts
    ("ppo", {"dataset": [], "reward": len, "batch_size": np.int64(8), "lr": np.float32(0.5), "stop": ["a"]}),
]


@pytest.mark.case(57)
@pytest.mark.parametrize(("algo", "flags", "sentence"), BROKEN, ids=str)
def test_a_rule_between_flags_that_is_broken(algo, flags, sentence):
    assert told(algo, **flags) == [sentence]


@pytest.mark.parametrize(("algo", "flags"), KEPT, ids=str)
def test_rules_between_flags_that_are_kept(algo, flags):
    assert told(algo, **flags) == []


SIZES = [  # script, flags, sizes that follow: of a rollout, of a step, of the run
    ("ppo", {}, (512, 512, 65536)),
    ("grpo", {"rollout_batch_size": 1024}, (1024, 512, 65536)),
    ("grpo", {"batch_size": 64}, (512, 64, 65536)),
    ("ppo", {"rollout_batch_size": 30, "batch_size": 10, "total_episodes": 100}, (30, 10, 90)),
    ("grpo", {"total_episodes": 64}, (64, 64, 64)),
    ("ppo", {"total_episodes": 100, "batch_size": 25}, (100, 25, 100)),
    ("ddpo", {"rollout_batch_size": 40}, (40, 40, None)),
    ("ddpo", {"rollout_batch_size": 40, "batch_size": 20}, (40, 20, None)),
]


@pytest.mark.parametrize(("algo", "flags", "sizes"), SIZES, ids=str)
def test_sizes_that_follow(algo, flags, sizes):
    """Sizes that are not given are at most those that contain them, and a run has whole iterations."""
    args = SCRIPTS[algo].Args(**required(algo) | flags)
    assert (args.rollout_batch_size, args.batch_size, getattr(args, "total_episodes", None)) == sizes
    assert SCRIPTS[algo].Args(**vars(args)) == args


@each_script
def test_settings_of_the_embedded_task(algo, capsys):
    script = SCRIPTS[algo]
    settings = yaml.safe_load((ROOT / script.TASK).read_text())
    defaults = {field.name: field.default for field in fields_of(algo)}
    args = parse([], script.Args, script.TASK)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 and f"\n{script.TASK}; flags override them\n" in printed
    for name, value in settings.items():
        assert value != defaults[name], f"{name} is the default"
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    assert args == script.Args(**settings | lists)


def test_flags_win_over_the_embedded_task_and_one_process_prints(monkeypatch, capsys, here):
    """Also a flag that says what the default is; from Python and from any directory, too."""
    changed = from_task(sft.Args, sft.TASK, lr=2e-5)
    assert from_task(sft.Args, sft.TASK).lr != 2e-5
    monkeypatch.setenv("RANK", "1")
    assert parse(["--lr", "2e-5"], sft.Args, sft.TASK) == changed and changed.lr == 2e-5
    assert not capsys.readouterr().out


@each_script
def test_own_data_take_nothing_from_the_embedded_task(algo):
    script = SCRIPTS[algo]
    words = [f"--{name}=mine.py:made" for name in required(algo)]
    assert parse(words, script.Args, script.TASK) == script.Args(**required(algo))
    with pytest.raises(InputError, match="--model is missing"):
        parse(words[1:], script.Args, script.TASK)


def test_a_copy_without_a_flag_of_the_task():
    fields = [(field.name, field.type, field) for field in fields_of("sft") if field.name not in ("epochs", "lr")]
    copy = dataclasses.make_dataclass("Args", fields, namespace={"required": ()})
    assert parse([], copy, sft.TASK).batch_size == 192
    with pytest.raises(InputError, match="there is no --epochs here; algos/MIGRATION.md says: ppo.py has"):
        parse(["--config", sft.TASK], copy)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; here(text, name) writes a file of flags."""
    monkeypatch.chdir(tmp_path)
    return lambda text, name="a.yaml": (tmp_path / name).write_text(text)


BAD_YAML = [  # the file, what is said of it
    ("lr: [1", "--config a.yaml cannot be read: while parsing a flow sequence .*line 1, column 5"),
    ("- lr", "--config a.yaml cannot be read: .*; expected YAML with lines such as lr: 1e-5"),
    ("import os\ndef f(x):\n    return 1", "--config a.yaml cannot be read: .*; expected YAML with lines such as"),
    ("lr: 1\nseed: 1\nlr: 2", "--config a.yaml: --lr is given twice"),
    ("batch-size: 1\nbatch_size: 2", "--config a.yaml: --batch-size is given twice"),
    ("model: m\ndataset: d\nlr: -1e-3", "--lr -0.001 must be a positive number"),
    ("learning_rate: 1\noutput_dir: x", "2 problems:\n  - there is no --learning-rate "),
]


def test_bad_files_of_flags(here):
    for text, sentence in BAD_YAML:
        here(text)
        with pytest.raises(InputError, match=f"^{sentence}"):
            parse(["--config", "a.yaml"], sft.Args)
    missing = "^--config none.yaml cannot be read: .*No such file or directory: 'none.yaml'"
    with pytest.raises(InputError, match=missing):
        parse(["--config", "none.yaml"], sft.Args)


TWICE = [  # a command line, what is said of it
    ("--lr 1 --seed 2 --lr=2", "--lr is given twice: give it once"),
    ("--stop a --lr 1 --stop b", "--stop is given twice: give it once"),
    ("--batch-size 4 --batch_size 4", "--batch-size is given twice: give it once"),
    ("--unbiased-kl --no-unbiased-kl", "--unbiased-kl is given twice: give it once"),
]


@pytest.mark.parametrize(("words", "sentence"), TWICE)
def test_a_flag_given_twice(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "m", "--dataset", "d", *words.split()])
    with pytest.raises(SystemExit) as stop:
        cli(SCRIPTS["grpo"].Args, pytest.fail)
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {sentence}\n"


def test_files_of_flags_may_repeat(here, monkeypatch):
    """Also a flag that is in both and on the command line, and a value that is the name of a flag."""
    here("lr: 1\nmodel: m\ndataset: d\nreward: a.py:f")
    here("lr: 2\nseed: 5", "b.yaml")
    monkeypatch.setattr(sys, "argv", "grpo.py --config a.yaml --config=b.yaml --lr 3 --metric lr".split())
    found = []
    cli(SCRIPTS["grpo"].Args, found.append)
    assert (found[0].lr, found[0].seed, found[0].metric) == (3.0, 5, "lr")


@pytest.mark.parametrize(
    ("text", "said"),
    [("check: ''", "Unrecognized"), ("lrr: 1", "Unrecognized options: --lrr"), ("total_steps: x", "1')]")],
)
def test_what_tyro_refuses(text, said, here, capsys):
    """Names and values that no flag takes: a file is named beside them."""
    here(text)
    with pytest.raises(SystemExit) as stop:
        parse(["--config", "a.yaml"], sft.Args)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and said in told and "--config a.yaml" in told


def test_values_in_yaml(here):
    """Numbers as PyYAML does not read them, and texts that look like something else. The later file and flags win."""
    named = "model: m\ndataset: d\nmetric: null\nmixed_precision: no\ntrack: off\ndeterministic: OFF\nseed: 3\n"
    named += "packing: false\ncheck: Yes\nload_in_4bit: true\n"
    here(named + "lr: 1e-3\nstop: [a b, 'null', off]\nadam-betas: [0.9, 0.95]\nrun_dir: 1e-3\nbatch_size: 8")
    here("batch_size: 16\nlora_targets:\n- c_attn\n- c_fc\nlora_r: 2\n", "b.yaml")
    args = parse(["--config=a.yaml", "--config", "b.yaml", "--seed", "-1"], sft.Args)
    expected = {"lr": 1e-3, "metric": None, "stop": ("a b", "null", "off"), "adam_betas": (0.9, 0.95)}
    expected |= {"run_dir": "1e-3", "batch_size": 16, "lora_targets": ("c_attn", "c_fc"), "lora_r": 2, "seed": -1}
    expected |= {"mixed_precision": "no", "track": "off", "deterministic": False}
    expected |= {"packing": False, "check": True, "load_in_4bit": True}
    assert {name: getattr(args, name) for name in expected} == expected


STOPS = ["-a", "--lr", "--seed=2", "--config", "--", "-", "-1", "--5", " -c", "a b", "null", "None", "\n", "-\n", "é"]


@pytest.mark.parametrize("stops", [STOPS, ["--stop"], ["-a b", "-c"], []])
def test_a_file_repeats_stop_strings_that_look_like_flags(stops, here):
    flags = {"model": "m", "dataset": "d", "reward": "r", "metric": None, "run_dir": "-x", "seed": -1, "stop": stops}
    here(yaml.safe_dump(flags | {"adam_betas": [0.5, 0.9]}))
    args = parse(["--config", "a.yaml"], grpo.Args)
    assert {name: getattr(args, name) for name in flags} == flags | {"stop": tuple(stops)}
    assert args.adam_betas == (0.5, 0.9)
    if stops:
        here(yaml.safe_dump(flags | {"stop": stops[0]}))
        assert parse(["--config", "a.yaml"], grpo.Args).stop == (stops[0],)


SAYS = "algos/MIGRATION.md says:"
ELSEWHERE = [  # script, a word, what is said of it
    ("sft", "--learning_rate=3", f"{SAYS} `--lr`$"),
    ("grpo", "--per_device_train_batch_size", f"{SAYS} `--batch-size`, `--micro-batch-size`"),
    ("sft", "--optim", f"{SAYS} gone. AdamW; for another optimizer change one line in a copy"),
    ("sft", "--init-kl-coef", f"{SAYS} ppo.py has `--kl-coef`"),
    ("grpo", "--beta", f"{SAYS} `--kl-coef`"),
]


@pytest.mark.parametrize(("algo", "word", "sentence"), ELSEWHERE)
def test_a_name_from_elsewhere_is_told(algo, word, sentence):
    flag = word.partition("=")[0].replace("_", "-")
    with pytest.raises(InputError, match=f"^there is no {flag} here; {sentence}"):
        parse(["--lr", "1", word], SCRIPTS[algo].Args, SCRIPTS[algo].TASK)


@each_script
def test_help_has_every_flag(algo, monkeypatch, capsys):
    """Required ones first, then those that stand in the script, with texts and defaults."""
    args_class = SCRIPTS[algo].Args
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], args_class, SCRIPTS[algo].TASK)
    text = capsys.readouterr().out
    flags = re.findall(r"^[ │]*(--[a-z0-9-]+)(?=, --no-| [A-Z[{]| {9})", text, re.M)
    own = dict.fromkeys([*args_class.required, *args_class.__annotations__])
    assert stop.value.code == 0 and flags[: len(own)] == list(map(flag_of, own))
    assert sorted(flags) == sorted(flag_of(field.name) for field in fields_of(algo))
    words = " ".join(re.sub("[│\n]", " ", text).split())
    assert "from Python, also the object. (default: None)" in words
    assert "Seed of every random draw. (default: 1)" in words and f"(default: {args_class.lr})" in words
    assert "Without --model, --dataset or --config, the script runs its embedded task" in words
    assert "--config FILE reads flags from a YAML file; your other flags override it" in words


HEAVY = "transformers accelerate diffusers peft datasets torch.distributed.fsdp matplotlib.figure".split()
ALL_SCRIPTS = """import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, *(["--lrr", "1"] if path.endswith("/dpo.py") else ["--help"])]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        print("code", stop.code)
print([name for name in HEAVY if name in sys.modules])
"""


def test_help_and_mistyped_flags_wait_for_torch_alone(tmp_path):
    """Also of a copy elsewhere, with common/ on the path."""
    (tmp_path / "my_sft.py").write_text((ROOT / "algos/sft.py").read_text())
    paths = [tmp_path / "my_sft.py", *(ROOT / f"algos/{algo}.py" for algo in SCRIPTS)]
    command = [sys.executable, "-c", f"HEAVY = {HEAVY}\n{ALL_SCRIPTS}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with_help = ["my_sft", *(algo for algo in SCRIPTS if algo != "dpo")]
    assert re.findall(r"^usage: (\w+)\.py ", done.stdout, re.M) == with_help
    assert "\ncode 2\n" in done.stdout and done.stdout.endswith("\n[]\n")
    assert "Unrecognized options: --lrr" in done.stderr
