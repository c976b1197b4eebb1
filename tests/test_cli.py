"""Flags: ranges, the embedded tasks' settings, names from elsewhere: `python -m pytest tests/test_cli.py`"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import tyro
import yaml

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from common import cli
from common.cli import (
    OTHER_NAMES,
    ROOT,
    InputError,
    describe_task,
    expand_config,
    refuse_other_names,
    task_fields,
    with_embedded_task,
)
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
    find_range,
    out_of_range,
)
from common.report import visible

SCRIPTS = {"ppo": ppo, "grpo": grpo, "ilql": ilql, "sft": sft, "reward": reward, "dpo": dpo, "ddpo": ddpo}
NAN, INF = float("nan"), float("inf")


# ---- Ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "inside", "outside"),
    [
        (Count, [1, 7], [0, -1]),
        (Natural, [0, 7], [-1]),
        (Layers, [-1, 0, 3], [-2]),
        (Positive, [1e-9, 3], [0, -1.0, NAN, INF]),
        (NonNegative, [0, 0.5], [-1e-9, NAN, INF]),
        (Fraction, [0, 0.5, 1], [-0.1, 1.1, NAN]),
        (Share, [0.1, 1], [0, 1.1, NAN]),
        (Decay, [0, 0.99], [1, -0.1, NAN]),
        (Text, ["a"], [""]),
        (Name, ["a", "lr-1e-3", "my_run.2", "ß"], ["", "_", "a/b", ".a", "..", "-a", "a b", "a\n"]),
        (Repository, ["org/name"], ["name"]),
        (Count | None, [None, 1], [0]),
        (tuple[Decay, Decay], [(0.0, 0.9)], [(0.0, 1.0), (-1.0, 0.5)]),
        (tuple[Text, ...], [(), ("a", "b")], [("a", "")]),
        (list[Fraction], [[0.0, 1.0]], [[0.0, 2.0]]),
    ],
)
def test_every_range_by_its_bounds(annotation, inside, outside):
    args_class = dataclasses.make_dataclass("Some", [("some_field", annotation)])
    for value in inside:
        assert out_of_range(args_class(value)) == []
    for value in outside:
        rule = find_range(annotation).rule
        assert out_of_range(args_class(value)) == [f"--some-field {visible(str(value))} must be {rule}"]


def test_all_fields_are_told_at_once():
    with pytest.raises(InputError) as told:
        ppo.Args(model="x", dataset="y", lr=-1.0, batch_size=0, adam_betas=(0.9, 1.0), top_p=0.0, lora_alpha=2.0)
    assert str(told.value).splitlines() == [
        "6 problems:",
        "  - --reward is missing: file.py:function, or a sequence classifier's directory or hub id. --reward "
        "my.py:score calls this:",
        "  def score(outputs, **columns):",
        '      return [float("4" in output) for output in outputs]  # a number for each output',
        "  - --top-p 0.0 must be in (0, 1]",
        "  - --lr -1.0 must be a positive number",
        "  - --adam-betas (0.9, 1.0) must be in [0, 1)",
        "  - --batch-size 0 must be at least 1",
        "  - --lora-alpha is given without --lora-r",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_name_is_for_the_default_directory(name):
    args_class = SCRIPTS[name].Args
    assert args_class().name is None
    assert args_class(name="mine").name == "mine"
    with pytest.raises(InputError, match="^--name is a part of the default --run-dir: leave out one of them$"):
        args_class(name="mine", run_dir="here")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("batch_size", "8", "--batch-size '8' must be a whole number"),
        ("batch_size", 8.0, "--batch-size 8.0 must be a whole number"),
        ("batch_size", True, "--batch-size True must be a whole number"),
        ("batch_size", None, "--batch-size None must be a whole number"),
        ("lr", "1e-3", "--lr '1e-3' must be a number"),
        ("lr", None, "--lr None must be a number"),
        ("seed", 1.5, "--seed 1.5 must be a whole number"),
        ("check", "yes", "--check 'yes' must be True or False"),
        ("whiten_rewards", None, "--whiten-rewards None must be True or False"),
        ("lr_schedule", "cos", "--lr-schedule 'cos' must be one of constant, linear, cosine"),
        ("score_scaling", None, "--score-scaling None must be one of none, running, running-norm, ref, ref-norm"),
        ("attn_implementation", "nope", "--attn-implementation 'nope' must be one of eager, sdpa, flash_attention_2"),
        ("stop", "ab", "--stop 'ab' must be a list"),
        ("adam_betas", 0.9, "--adam-betas 0.9 must be a list"),
        ("adam_betas", (0.9,), "--adam-betas (0.9,) must be 2 values"),
        ("adam_betas", (0.9, "x"), "--adam-betas (0.9, 'x') must be a list in which each is a number"),
        ("resume", None, "--resume None must be given"),
    ],
)
def test_values_of_another_type(field, value, expected):
    named = {"model": "x", "dataset": "y", "reward": "z"}
    with pytest.raises(InputError) as told:
        ppo.Args(**named, **{field: value})
    assert str(told.value) == expected


def test_values_that_are_as_good():
    """Numbers of numpy, lists for tuples, objects for texts."""
    args = ppo.Args(
        model=object(), dataset=[], reward=len, batch_size=np.int64(8), lr=np.float32(0.5), stop=["a"], lora_alpha=None
    )
    assert args.batch_size == 8 and args.lr == 0.5
    with pytest.raises(InputError, match="there is no --learning-rate here: use --lr"):
        ppo.Args(learning_rate=1.0)


UNBOUNDED = {"seed", "margin"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_number_has_a_range(name):
    for field in dataclasses.fields(SCRIPTS[name].Args):
        plain = field.type in (int, float, int | None, float | None)
        assert not plain or field.name in UNBOUNDED, f"{name}: {field.name}"


# ---- The embedded tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_of_the_embedded_task(name, monkeypatch, capsys):
    """Without model and data the YAML's values count, from Python and on the command line, and flags win over them."""
    args_class = SCRIPTS[name].Args
    settings = task_fields(args_class.task_file)
    fields = {field.name: field for field in dataclasses.fields(args_class)}
    for field, value in settings.items():
        assert value != fields[field].default, f"{field} is the default"
    args = args_class()
    assert {field: getattr(args, field) for field in settings} == settings
    words = expand_config(with_embedded_task([], args_class), args_class)
    assert tyro.cli(args_class, args=words) == args
    printed = " ".join(describe_task(args_class.task_file).split())
    assert args_class.task_file in printed and all(f"{field} {value}" in printed for field, value in settings.items())

    # a flag wins, also where it says what the default is
    default = fields["lr"].default
    assert args_class(lr=default).lr == default != settings["lr"]
    words = expand_config(with_embedded_task(["--lr", str(default)], args_class), args_class)
    assert tyro.cli(args_class, args=words) == args_class(lr=default)
    for rank, lines in ("0", 1), ("1", 0):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["some.py"])
        cli.cli(args_class, lambda args: None)
        assert capsys.readouterr().out.count("no --model, --dataset or --config") == lines
    monkeypatch.setattr(sys, "argv", ["some.py", "--lr", "-1"])
    with pytest.raises(SystemExit):
        cli.cli(args_class, lambda args: None)
    assert "--config" not in capsys.readouterr().out  # a mistake comes first


def test_learning_rates_are_those_for_pretrained_models():
    """Those of the tasks, 3e-4 to 6e-3, ruin a pretrained model without a word."""
    rates = {
        name: field.default for name, script in SCRIPTS.items() for field in fields_of(script) if field.name == "lr"
    }
    assert rates == {"ppo": 1e-5, "grpo": 1e-6, "ilql": 5e-5, "sft": 2e-5, "reward": 1e-5, "dpo": 1e-6, "ddpo": 1e-5}


def fields_of(script):
    return dataclasses.fields(script.Args)


@pytest.mark.parametrize("name", SCRIPTS)
def test_own_data_take_nothing_from_the_embedded_task(name):
    args_class = SCRIPTS[name].Args
    named = {"model": "my_model", "dataset": "rows.jsonl"}
    if "reward" in task_fields(args_class.task_file):
        named["reward"] = "mine.py:score"
    args = args_class(**named)
    for field in dataclasses.fields(args_class):
        if field.name not in named:
            assert getattr(args, field.name) == field.default, field.name
    for words in (["--model", "x"], ["--dataset=x"], ["--config", "x"]):
        assert with_embedded_task(words, args_class) == words
    with pytest.raises(InputError, match="--dataset is missing"):
        args_class(model="my_model")
    with pytest.raises(InputError, match="--model is missing"):
        args_class(dataset="rows.jsonl")


def test_a_config_of_the_repository_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = expand_config(["--config", sft.Args.task_file, "--lr", "1"], sft.Args)
    assert tyro.cli(sft.Args, args=words) == sft.Args(lr=1.0)


@pytest.mark.parametrize(
    ("words", "text", "sentence"),
    [
        (["--config", "a.yaml", "--config=b.yaml"], "", "--config is given twice: join the files"),
        (["--config"], "", "--config needs a YAML file of flags"),
        (["--config", "--check"], "", "--config needs a YAML file of flags"),
        (["--config", "none.yaml"], "", "--config none.yaml is not a readable YAML mapping: there is no such file"),
        (["--config", "a.yaml"], "check: [true, false]", "--config a.yaml: --check cannot hold a list"),
        (["--config", "a.yaml"], "check: []", "--config a.yaml: --check cannot hold a list"),
        (["--config", "a.yaml"], "lr: {a: 1}", "--config a.yaml: --lr cannot hold a list or mapping"),
        (["--config", "a.yaml"], "? [a, b]\n: 3", "--config a.yaml is not a readable YAML mapping: a key is no name"),
        (
            ["--config", "a.yaml"],
            "learning_rate: 1\noutput_dir: x",
            "2 problems:\n  - --config a.yaml: there is no --learning-rate here: use --lr\n"
            "  - --config a.yaml: there is no --output-dir here: use --run-dir",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_files_of_flags(words, text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("lr: 1")
    with pytest.raises(InputError) as told:
        expand_config(words, sft.Args)
    assert str(told.value) == sentence


@pytest.mark.parametrize("word", ["true", "Yes", "on", "false", "no", "OFF"])
def test_switches_in_yaml(word, tmp_path):
    (tmp_path / "a.yaml").write_text(f"check: {word}")
    switched = ["--check"] if word.lower() in ("true", "yes", "on") else ["--no-check"]
    assert expand_config(["--config", str(tmp_path / "a.yaml")], sft.Args) == switched


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/tasks/*/*.yaml")), ids=lambda path: path.stem)
def test_numbers_in_yaml_files_are_numbers(path):
    """PyYAML reads 1e-3 as text; `task_fields` would pass it on."""
    for name, value in yaml.safe_load(path.read_text()).items():
        assert not isinstance(value, str) or not value[0].isdigit(), name


# ---- Names from elsewhere --------------------------------------------------------------------------------------------


@dataclass
class Some:
    lr: float = 1.0
    batch_size: int = 8
    micro_batch_size: int = 8
    lr_schedule: Literal["constant", "linear"] = "linear"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--learning-rate", "3"], "there is no --learning-rate here: use --lr"),
        (["--learning_rate=3"], "there is no --learning_rate here: use --lr"),
        (["--lr-scheduler-type", "linear"], "there is no --lr-scheduler-type here: use --lr-schedule"),
        (["--per_device_train_batch_size", "3"], "use --micro-batch-size, or --batch-size for that of all processes"),
        (["--formatting", "x"], "it is gone; a --dataset file.py:function returns rows in any form"),
    ],
)
def test_a_name_from_elsewhere_is_told(words, sentence, monkeypatch, capsys):
    args_class = Some if "formatting" not in words[0] else sft.Args
    monkeypatch.setattr(sys, "argv", ["some.py", *words])
    with pytest.raises(SystemExit) as stop:
        cli.cli(args_class, lambda args: pytest.fail("it ran"))
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_a_name_from_elsewhere_is_told_in_yaml(tmp_path):
    (tmp_path / "flags.yaml").write_text("learning_rate: 3\n")
    with pytest.raises(InputError, match="--config .*flags.yaml: there is no --learning-rate here: use --lr"):
        expand_config(["--config", str(tmp_path / "flags.yaml")], Some)


def test_a_name_without_a_counterpart_here_is_left_to_tyro():
    refuse_other_names(["--init-kl-coef", "--lr", "--anything"], Some)


def test_the_length_of_a_run_has_the_name_of_the_script():
    for script, flag in (sft, "--epochs"), (ppo, "--total-episodes"), (grpo, "--total-episodes"):
        with pytest.raises(InputError, match=f"there is no --num-train-epochs here: use {flag}"):
            refuse_other_names(["--num-train-epochs"], script.Args)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_from_elsewhere_lead_to_flags(name):
    """The counterpart is a flag of some script, which has none of the other name: the sentence can be seen."""
    seen = []
    for script in SCRIPTS.values():
        try:
            refuse_other_names([f"--{name}"], script.Args)
        except InputError as error:
            seen.append(str(error))
    assert seen and all(f"there is no --{name} here: " in sentence for sentence in seen)
