"""When a run is taken for the same: `python -m pytest tests/test_identity.py`

What can change the result gives another hash. What cannot gives the same, in another process, too.
"""

import datetime
import decimal
import functools
import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import datasets
import numpy as np
import pytest
import torch
from harness import ROOT, files
from helpers import answer, log, user
from test_models import run

from algos import ppo, sft
from benchmarks.tasks import randomwalks
from common import run as run_module
from common.errors import InputError
from common.functions import import_file
from common.identity import UNKNOWN, describe, differences, digest, files_of_flag, identity, imported_files


def ppo_args(**flags):
    return ppo.Args(**{"model": "gpt2", "dataset": [{"prompt": "a"}], "reward": "judge"} | flags)


def hash_of(**flags):
    return identity(ppo_args(**flags), ppo.__file__)["hash"]


def test_the_files_of_the_users_modules(tmp_path, monkeypatch):
    """Not Python's, installed ones, common/, files of flags, which count anyway, or what nothing has imported."""
    modules = "reward.py package/__init__.py package/inner.py lib/site-packages/library.py unused.py".split()
    for name in modules:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    code = "# coding: latin-1 \xe9\nimport json, library, reward, package.inner\nfrom common.rows import texts\nf = 1\n"
    (tmp_path / "user.py").write_text(code, encoding="latin-1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "lib/site-packages"), *sys.path])
    before = {*imported_files()}
    import_file(tmp_path / "user.py", (tmp_path / "user.py").read_bytes())
    assert {*imported_files()} - before == {tmp_path / name for name in modules[:3]}
    for name in "library", "reward", "package", "package.inner":
        del sys.modules[name]


CODE = {  # a file, what is said where it has changed
    "ppo.py": "the script",
    "beside.py": "the list of files that your code imports, or one of them,",
    "common/seeding.py": "common/seeding.py",
    "common/new.py": "common/new.py",
    "common/lm/sampling.py": "common/lm/sampling.py",
    "common/lm/new.py": "common/lm/new.py",
}


def test_a_changed_byte_of_the_code_is_another_run(tmp_path, monkeypatch):
    """Of the script, what it imports, and any module of common/, an added one, too; the error names the file."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "algos/ppo.py", tmp_path)
    (tmp_path / "beside.py").touch()
    monkeypatch.setitem(sys.modules, "beside", SimpleNamespace(__file__=str(tmp_path / "beside.py")))
    monkeypatch.setattr("common.identity.ROOT", tmp_path)
    for name, said in CODE.items():
        before = identity(ppo_args(), tmp_path / "ppo.py")
        with open(tmp_path / name, "ab") as file:
            file.write(b"#")
        after = identity(ppo_args(), tmp_path / "ppo.py")
        assert differences(before, after) == [f"{said} has changed"]
        assert after["hash"] != before["hash"]


NAMED = [  # flag, how it names a file, the file
    ("dataset", "user.py:text:end=b", "user.py"),
    ("eval_dataset", "a.jsonl, b.jsonl", "b.jsonl"),
    ("reward", "user.py:score", "user.py"),
    ("reward", "judge", "judge/model.safetensors"),
    ("reward", "./judge:POSITIVE", "judge/config.json"),
    ("judge", "user.py:rows:file=b.jsonl", "b.jsonl"),  # a flag that a copy adds
    ("judge", "judge, b.jsonl", "b.jsonl"),
    ("model", "judge", "judge/additional_chat_templates/tools.jinja"),
]


def test_a_changed_file_that_a_flag_names_is_another_run(tmp_path, monkeypatch):
    """Runs in a directory and hidden files are no part of it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("judge/additional_chat_templates", "runs/x"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "user.py", "judge/model.safetensors", "judge/config.json", NAMED[-1][-1]):
        (tmp_path / name).write_text("0")

    def hash_now(flag, value):
        args = ppo_args()
        setattr(args, flag, value)
        return identity(args, ppo.__file__)["hash"]

    for flag, value, file in NAMED:
        before = hash_now(flag, value)
        (tmp_path / "runs/x/model.safetensors").write_text(file)
        (tmp_path / ".hidden.json").write_text(file)
        assert hash_now(flag, value) == before
        with open(tmp_path / file, "a") as opened:
            opened.write("#")
        assert hash_now(flag, value) != before, value


def test_a_function_counts_with_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_of_a_test.py").write_text("def score(outputs, **columns):\n    return [1.0] * len(outputs)\n")
    function = importlib.import_module("rewards_of_a_test").score
    before = describe(function)
    assert before == describe(function) and "unknown" not in before
    with open(tmp_path / "rewards_of_a_test.py", "a") as file:
        file.write("\nnew = 1\n")
    assert describe(function) != before
    del sys.modules["rewards_of_a_test"]


def test_rows_count_with_their_json():
    def given(n):
        return [{"prompt": "a", "n": n, "messages": [{"role": "user", "content": None}]}]

    assert describe(given(3)) == describe(given(3)) != describe(given(4))
    assert describe({"easy": given(3)}) == describe({"easy": given(3)}) != describe({"hard": given(3)})


class Judge:
    def __call__(self, outputs, **columns):
        return [len(output) for output in outputs]


def adding(bonus):
    def add(outputs, **columns):
        return [bonus + len(output) for output in outputs]

    return add


def test_what_is_neither_plain_nor_rows_nor_a_named_function_needs_a_directory(build_model):
    rows = ({"prompt": letter} for letter in "ab")
    flags = {"model": build_model(), "tokenizer": randomwalks.tokenizer(), "dataset": rows, "reward": Judge()}
    flagged = "--tokenizer, --dataset, --model, --reward"
    sentence = f"^{flagged}: such an object cannot be compared between runs: also give --run-dir$"
    with pytest.raises(InputError, match=sentence):
        identity(ppo.Args(**flags), ppo.__file__)
    found = identity(ppo.Args(**flags, run_dir="x"), ppo.__file__)
    assert found["flags"]["model"] == "<GPT2LMHeadModel of unknown contents>"
    assert json.loads(json.dumps(found)) == found
    of_a_notebook = {}
    exec(compile("def score(outputs, **columns): pass", "<notebook>", "exec"), of_a_notebook)
    others = [len, adding(1), lambda **columns: [1.0], functools.partial(adding, 1), of_a_notebook["score"]]
    others += [datasets.Dataset.from_list([{"prompt": "a"}]), torch.zeros(2), [np.zeros(2)]]
    assert [value for value in others if not describe(value).endswith(UNKNOWN)] == []


NEUTRAL = {"run_dir": "x", "resume": "never", "threads": 3, "save_every": 1, "keep_checkpoints": 1}
NEUTRAL |= {"track": "wandb", "push_to_hub": "a/b", "check": True}
NEUTRAL |= {"micro_batch_size": 1, "decode_batch_size": 1, "gradient_checkpointing": True}


def test_flags_that_do_not_change_the_result():
    before = hash_of()
    assert [name for name, value in NEUTRAL.items() if hash_of(**{name: value}) != before] == []
    others = {"seed": 2, "eval_every": 1, "stop": (".",), "mixed_precision": "bf16", "num_layers_unfrozen": 1}
    assert [name for name, value in others.items() if hash_of(**{name: value}) == before] == []
    packed, apart = (sft.Args(model="gpt2", dataset=[{"text": "a"}], packing=packing) for packing in (True, False))
    assert identity(packed, sft.__file__) == identity(apart, sft.__file__)


def test_a_difference_is_said_once_and_names_the_flag():
    old = {"algo": "sft", "flags": {"model": "m", "eval_dataset": "a"}, "files": {"model": "1", "eval_dataset": "1"}}
    new = {"algo": "sft", "flags": {"model": "n", "eval_dataset": "a"}, "files": {"model": "2", "eval_dataset": "2"}}
    assert differences(old, new) == ["--model: was m, is n", "the file of --eval-dataset has changed"]


def test_a_checkpoint_behind_the_end_changes_nothing(gpt2_dir, tmp_path):
    """An error, by --check, too, as with other weights; what the directory holds of later steps is still there."""
    folder = tmp_path / "run"
    run(sft, gpt2_dir, folder, total_steps=4, save_every=1, keep_checkpoints=4)
    before = files(folder)
    with pytest.raises(InputError, match="--resume .*step_00000002: nothing is left to train"):
        run(sft, gpt2_dir, folder, total_steps=2, resume=str(folder / "checkpoints/step_00000002"))
    for flags, sentence in ({"total_steps": 1}, "nothing is left to train"), ({"lora_r": 2}, "holds other weights"):
        with pytest.raises(InputError, match=f"--resume .*{sentence}"):
            run(sft, gpt2_dir, tmp_path / "new", check=True, resume=str(folder), **flags)
    assert files(folder) == before and not (tmp_path / "new").exists()
    run(sft, gpt2_dir, folder, total_steps=3, resume=str(folder / "checkpoints/step_00000002"))
    assert log(folder)[-1]["step"] == 3 and not (folder / "checkpoints/step_00000004").exists()


DATED = "DATE{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CHANGES = {  # what changes: how, and the flag that is named
    "template": ({"date": "g"}, "--dataset"),
    "rows": ({"rows": "ce"}, "--dataset"),
    "answers": ({"answer": 2}, "--eval-prompts"),
    "prompts": ({"prompt": "f"}, "--eval-prompts"),
    "nothing": ({}, None),
}


def drawing(outputs, **columns):
    """A metric that draws, and fails once."""
    drawing.calls += 1
    if drawing.calls == drawing.failing:
        raise ZeroDivisionError
    return {"n": np.random.random(len(outputs)).tolist()}


@pytest.mark.case(102, "sft")
@pytest.mark.parametrize("changed", CHANGES)
def test_a_run_goes_on_only_with_the_inputs_it_began_with(gpt2_dir, letters, tmp_path, capsys, changed):
    """What no flag names: the date in a template, files that a function reads, columns that only a metric sees."""
    inputs = {"date": "b", "rows": "cd", "answer": 1, "prompt": "e"}

    def go_on(**flags):
        letters.chat_template = DATED.replace("DATE", inputs["date"])
        chats = [{"prompt": [user(text)], "completion": [answer("f")]} for text in inputs["rows"]]
        prompts = [{"prompt": inputs["prompt"], "answer": inputs["answer"]}]
        flags |= {"tokenizer": letters, "dataset": lambda: chats, "eval_dataset": None, "eval_prompts": lambda: prompts}
        return run(sft, gpt2_dir, tmp_path / "run", max_new_tokens=3, metric=drawing, **flags)

    drawing.calls = 0
    drawing.failing = 2  # behind the second step
    with pytest.raises(ZeroDivisionError):
        go_on()
    env = tmp_path / "run/env.json"  # as if an upgrade came in between
    env.write_text(re.sub('"torch": ".*"', '"torch": "2.9.1"', env.read_text()))
    before = files(tmp_path / "run")
    capsys.readouterr()
    change, flag = CHANGES[changed]
    inputs |= change
    if flag:
        sentence = rf"began with other inputs: give --resume (.*\n)+  {flag} \(\w+\): was \w+, is"
        with pytest.raises(InputError, match=sentence):
            go_on()
        assert files(tmp_path / "run") == before
    resume = {"resume": str(tmp_path / "run")} if flag else {}
    if flag:  # it goes on with the new ones, and then with no others
        drawing.calls = 0
        with pytest.raises(ZeroDivisionError):
            go_on(**resume)
        new = dict(inputs)
        inputs |= {"date": "u", "rows": "uu", "answer": 9, "prompt": "u"}
        with pytest.raises(InputError, match="began with other inputs"):
            go_on(**resume)
        inputs |= new
    go_on(**resume)
    assert log(tmp_path / "run")[-1]["step"] == 4
    assert f"continuing {tmp_path}/run from step 2; torch was 2.9.1\n" in capsys.readouterr().out


@pytest.mark.case(101, "sft")
def test_an_evaluation_that_is_repeated_draws_the_same(gpt2_dir, tmp_path):
    """Its generators are seeded for the evaluation, not only for the iteration before it."""
    flags = {"eval_prompts": [{"prompt": "b"}], "eval_dataset": None, "max_new_tokens": 3, "metric": drawing}
    for name, failing in (("whole", None), ("broken", 2)):
        drawing.calls = 0
        drawing.failing = failing
        if failing:
            with pytest.raises(ZeroDivisionError):
                run(sft, gpt2_dir, tmp_path / name, **flags)
        run(sft, gpt2_dir, tmp_path / name, **flags)
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.case(99, "ppo")
def test_a_function_that_changes_the_working_directory(gpt2_dir, tmp_path, monkeypatch):
    """Another project there may have a directory of the same name: it is never touched, whatever fails."""
    monkeypatch.chdir(tmp_path)
    precious = tmp_path / "other/runs/mine/precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("of somebody else")
    calls = []

    def moving(outputs, **columns):
        calls.append(os.getcwd())
        os.chdir(tmp_path / "other")
        if len(calls) in failing:
            raise ZeroDivisionError
        return [float(len(output)) for output in outputs]

    rows = [{"prompt": text} for text in "bcde"]
    shutil.copytree(gpt2_dir, tmp_path / "model")
    failing = {1}  # before the first step, so that its own directory goes
    with pytest.raises(ZeroDivisionError):
        run(ppo, "model", "runs/mine", dataset=rows, reward=moving)
    assert not (tmp_path / "runs/mine").exists()
    monkeypatch.chdir(tmp_path)
    failing = {len(calls) + 3}  # in the second rollout: behind an evaluation and the first one
    with pytest.raises(ZeroDivisionError):
        run(ppo, "model", "runs/mine", dataset=rows, reward=moving)
    assert [path.name for path in (tmp_path / "runs/mine/checkpoints").iterdir()] == ["step_00000002"]
    monkeypatch.chdir(tmp_path)
    run(ppo, "model", "runs/mine", dataset=rows, reward=moving)
    assert (tmp_path / "runs/mine/hf_model").exists() and log(tmp_path / "runs/mine")[-1]["step"] == 4
    assert [*files(tmp_path / "other")] == [precious] and precious.read_text() == "of somebody else"


def test_a_run_in_a_run_leaves_it_alone(gpt2_dir, tmp_path):
    """A metric that trains with another script, and ends while the outer run goes on."""

    def metric(outputs, **columns):
        metric.calls += 1
        run(sft, gpt2_dir, tmp_path / f"inner{metric.calls}", total_steps=1)
        return {"n": [1.0] * len(outputs)}

    metric.calls = 0
    run(sft, gpt2_dir, tmp_path / "outer", eval_prompts=[{"prompt": "a"}], max_new_tokens=3, metric=metric)
    assert metric.calls == 3 and log(tmp_path / "outer")[-1]["step"] == 4
    assert all((tmp_path / name / "hf_model").exists() for name in ("outer", "inner1", "inner3"))


@pytest.mark.parametrize("env", ["{}", '{"hash": "0", "config": 1}', "no JSON"])
def test_a_directory_with_an_environment_of_others_is_none_of_a_run(gpt2_dir, tmp_path, env):
    folder = tmp_path / "run"
    theirs = {"README.md": "a card", "hf_model_best/model.safetensors": "weights", "notes.txt": "the user's"}
    for name, text in (theirs | {"env.json": env, ".tmp-mine/notes.txt": "mine"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = files(folder)
    with pytest.raises(InputError, match="cannot be written: it holds files but no run"):
        run(sft, gpt2_dir, folder)
    assert files(folder) == before


def test_nothing_of_a_run_is_deleted_before_it_is_replaced(gpt2_dir, tmp_path):
    """Metrics and checkpoints may have gone (or the hidden files, as in `cp -r run/* copy`); an error comes before the
    first line. Another command is refused, and the same one begins again."""
    folder = tmp_path / "run"
    run(sft, gpt2_dir, folder, total_steps=2)
    for name in "metrics.jsonl", ".lock":
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoints")
    (folder / "notes.txt").write_text("the user's")
    before = files(folder)
    with pytest.raises(InputError, match="holds a run with another configuration"):
        run(sft, gpt2_dir, folder, total_steps=4)
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps(env | {"finished": False}))
    with pytest.raises(ZeroDivisionError):
        run(sft, gpt2_dir, folder, total_steps=2, dataset=lambda: 1 / 0)
    assert {path for path in before if path.name != "env.json"} <= {*files(folder)}
    run(sft, gpt2_dir, folder, total_steps=2)
    assert log(folder)[-1]["step"] == 2 and (folder / "notes.txt").exists()


def test_an_older_checkpoint_continued_in_place_deletes_nothing_until_it_has_one(gpt2_dir, tmp_path):
    """N11: not if its first iteration fails, nor if it ends before its first checkpoint. Then it begins there again."""
    folder = tmp_path / "run"
    run(sft, gpt2_dir, folder, total_steps=4, save_every=1, keep_checkpoints=4)
    before = files(folder)
    rates = [record.get("optim/lr") for record in log(folder)]
    again = {"total_steps": 6, "save_every": 0, "eval_every": 0, "resume": str(folder / "checkpoints/step_00000002")}
    with pytest.raises(ZeroDivisionError), patch.object(run_module.Run, "lap", lambda run, part: 1 / 0):
        run(sft, gpt2_dir, folder, **again)
    assert files(folder) == before
    with pytest.raises(KeyboardInterrupt):
        with patch.object(run_module.Run, "save", Mock(side_effect=[None, KeyboardInterrupt])):
            run(sft, gpt2_dir, folder, **again)
    assert {path for path in before if "step_" in str(path)} <= {*files(folder)}
    run(sft, gpt2_dir, folder, **again)
    assert [record["step"] for record in log(folder)] == [0, 1, 2, 3, 4, 5, 6]
    new_rates = [record.get("optim/lr") for record in log(folder)]
    assert new_rates[:3] == rates[:3] and new_rates[3] != rates[3], "it began at step 2 again"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000006"]


def test_a_run_continued_elsewhere_has_one_history(gpt2_dir, tmp_path):
    """N5: it ended before its own first checkpoint, and meanwhile the run from which it began went on."""
    source = tmp_path / "source"
    run(sft, gpt2_dir, source, total_steps=2)
    again = {"total_steps": 6, "save_every": 0, "eval_every": 0, "resume": str(source)}
    with pytest.raises(KeyboardInterrupt):
        with patch.object(run_module.Run, "save", Mock(side_effect=[None, KeyboardInterrupt])):
            run(sft, gpt2_dir, tmp_path / "new", **again)
    assert [record["step"] for record in log(tmp_path / "new")] == [3, 4]
    run(sft, gpt2_dir, source, total_steps=4, resume=str(source))
    run(sft, gpt2_dir, tmp_path / "new", **again)
    assert [record["step"] for record in log(tmp_path / "new")] == [5, 6]


def test_a_text_that_cannot_be_a_path_names_no_file():
    for text in ("low quality, " * 40, "~~~"):
        assert files_of_flag(text) == [] == files_of_flag((text,))
    assert files_of_flag("user.py:score:sep=.,mark=**") == []  # no patterns


def test_what_a_function_writes_where_its_option_says_is_no_part_of_the_run(tmp_path, monkeypatch):
    """The same command would else find no run. A file that an option names counts, and a directory of other flags."""
    monkeypatch.chdir(tmp_path)
    Path("cache/more").mkdir(parents=True)
    for name in ("user.py", "words.txt", "cache/a.json", "cache/more/b.json"):
        Path(name).touch()
    for spec in ("user.py:score:out=cache,words=words.txt", "user.py:score:words=words.txt,n=1,out=./cache/"):
        assert files_of_flag(spec) == [Path("words.txt"), Path("user.py")]
    assert files_of_flag("cache") == [Path("cache/a.json"), Path("cache/more/b.json")]


def test_digests_tell_values_of_any_type_apart(capsys):
    values = [1, 1.0, True, "1", b"1", np.int64(2), np.float32(2), np.arange(2000), np.arange(2000) * 2, {1, 2}, {1, 3}]
    values += [decimal.Decimal("0.1"), datetime.date(2020, 1, 2), datetime.date(2020, 1, 3), {(1, 2): 3}, {(1, 3): 3}]
    values += [Path("a"), Path("b"), None, [None], {"a": {"b": np.ones(3)}}, {"a": {"b": np.zeros(3)}}]
    assert len({digest([{"x": value}]) for value in values}) == len(values)
    assert digest([{"x": np.arange(3)}]) == digest([{"x": [0, 1, 2]}])
    own = type("Own", (), {})
    assert digest([{"x": own()}]) == digest([{"x": own()}])  # only their type is known, which is said once
    assert capsys.readouterr().out.count("rows hold objects of type Own: ") == 1
