"""When a run is taken for the same: `python -m pytest tests/test_identity.py`

What can change the result gives another hash. What cannot gives the same, in another process, too.
"""

import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import datasets
import numpy as np
import pytest
import torch
from harness import ROOT, files
from helpers import answer, log, user
from test_adapters import run

from algos import ppo, sft
from benchmarks.tasks import randomwalks
from common.checkpoint import UNKNOWN, describe, differences, files_of_flag, identity, with_imports
from common.cli import InputError


def ppo_args(**flags):
    return ppo.Args(**{"model": "gpt2", "dataset": [{"prompt": "a"}], "reward": "judge"} | flags)


def hash_of(**flags):
    return identity(ppo_args(**flags), ppo.__file__)["hash"]


# ---- Files -----------------------------------------------------------------------------------------------------------

USER_TREE = {
    "reward.py": """
        import random
        import numpy
        from common.data import texts
        import beside as b
        def score(outputs, **columns):
            from package.inner import weights
            return [b.count(output) for output in outputs]
        """,
    "beside.py": "from package import middle\ndef count(text):\n    return len(text)\n",
    "package/__init__.py": "from . import sibling\n",
    "package/sibling.py": "from .inner.weights import W\n",
    "package/middle.py": "class Unused: pass\n",
    "package/inner/__init__.py": "",
    "package/inner/weights.py": "import reward\nfrom ..deep import D\nW = 3\n",
    "package/deep.py": "D = 1\n",
    "package/other.py": "",
    "other.py": "",
    "random.py": "",
    "notes.txt": "",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in USER_TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    yield tmp_path
    for name in ("reward", "rewards", "beside", "package"):
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]


def test_the_files_that_a_file_imports(tree):
    """In functions, relative, and through others and back; not Python's, installed ones, common/ or what is beside."""
    not_imported = "package/other.py", "other.py", "random.py", "notes.txt"
    assert set(with_imports(tree / "reward.py")) == {tree / name for name in USER_TREE if name not in not_imported}
    embedded = ROOT / "benchmarks/tasks/randomwalks.py"
    assert set(with_imports(embedded)) == {embedded, embedded.with_name("characters.py")}


def test_a_package_that_pip_has_linked_counts(tmp_path, monkeypatch):
    """`pip install -e` may leave a finder instead of a path."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "broken":
                raise ImportError(name)
            if name == "linked":
                return importlib.util.spec_from_file_location(name, tmp_path / "src/linked/__init__.py")

    (tmp_path / "src/linked").mkdir(parents=True)
    for name in ("__init__", "inner"):
        (tmp_path / f"src/linked/{name}.py").write_text("")
    (tmp_path / "reward.py").write_text("import broken\nfrom linked.inner import score\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    linked = [tmp_path / f"src/linked/{name}.py" for name in ("__init__", "inner")]
    assert with_imports(tmp_path / "reward.py") == [tmp_path / "reward.py", *linked]


def test_what_pip_has_put_elsewhere_does_not_count(tmp_path, monkeypatch):
    """`pip install --target lib` and PYTHONPATH=lib, where a file of the user's own lies, too."""
    for name in ("lib/library/inner", "lib/library/__init__", "lib/single", "lib/own", "lib/tools/mine", "reward"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "reward.py").write_text("import library.inner, single, own, tools.mine\n")
    note = tmp_path / "lib/library-1.0.dist-info/RECORD"
    note.parent.mkdir()
    note.write_text(
        "library/__init__.py,sha256=0,0\nlibrary/inner.py,sha256=0,0\nsingle.py,sha256=0,0\ntools/theirs.py,,\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib")])
    own = [tmp_path / "lib/own.py", tmp_path / "lib/tools/mine.py"]
    assert with_imports(tmp_path / "reward.py") == [tmp_path / "reward.py", *own]


CODE = {  # a file, what is said where it has changed
    "ppo.py": "the script",
    "beside.py": "a file that the script imports",
    "common/seeding.py": "common/seeding.py",
    "common/new.py": "common/new.py",
}


def test_a_changed_byte_of_the_code_is_another_run(tmp_path, monkeypatch):
    """Of the script, what it imports, and any module of common/, an added one, too; the error names the file."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "ppo.py").write_text((ROOT / "algos/ppo.py").read_text() + "\nimport beside\n")
    (tmp_path / "beside.py").touch()
    monkeypatch.setattr("common.checkpoint.ROOT", tmp_path)
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
    ("reward", "user.py:score", "imported.py"),
    ("reward", "judge", "judge/model.safetensors"),
    ("reward", "./judge:POSITIVE", "judge/config.json"),
    ("judge", "user.py:rows:file=b.jsonl", "b.jsonl"),  # a flag that a copy adds
    ("judge", ".", "b.jsonl"),
    ("reward", "user.py:score:data=[a.jsonl, b.jsonl]", "b.jsonl"),
    ("reward", "user.py:score:data='a.jsonl'", "a.jsonl"),
    ("reward", "user.py:score:data={x: a.jsonl}", "a.jsonl"),
    ("reward", "user.py:score:data=*.jsonl", "b.jsonl"),
    ("model", "judge", "judge/additional_chat_templates/tools.jinja"),
]


def test_a_changed_file_that_a_flag_names_is_another_run(tmp_path, monkeypatch):
    """Runs in a directory and hidden files are no part of it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("judge/additional_chat_templates", "runs/x"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "imported.py", "judge/model.safetensors", "judge/config.json", NAMED[-1][-1]):
        (tmp_path / name).write_text("0")
    (tmp_path / "user.py").write_text("import imported\n")

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


# ---- Rows and functions from Python ----------------------------------------------------------------------------------

REWARD = """
import beside

WORDS = {"good", "fine", "nice"}  # whose order depends on the process


def score(outputs, **columns):
    return [beside.count(output) for output in outputs if output not in WORDS]


def lazy(outputs, **columns):
    from beside import count

    return [count(output) for output in outputs]
"""


@pytest.mark.parametrize("name", ["score", "lazy"])
def test_a_function_counts_with_its_file_and_its_imports(tree, monkeypatch, name):
    monkeypatch.syspath_prepend(tree)
    (tree / "rewards.py").write_text(REWARD)
    function = getattr(importlib.import_module("rewards"), name)
    seen = [hash_of(reward=function)]
    for changed in ("rewards.py", "beside.py", "package/inner/weights.py", "other.py"):
        with open(tree / changed, "a") as file:
            file.write("\nnew = 1\n")
        seen.append(hash_of(reward=function))
        assert (seen[-1] == seen[-2]) == (changed == "other.py"), changed


PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {tree!r}]
import rewards
from common.checkpoint import describe
print(describe(rewards.score))
print(describe(rewards.lazy))
"""


def test_another_process_finds_the_same(tree, monkeypatch):
    (tree / "rewards.py").write_text(REWARD)
    (tree / "random.py").unlink()
    program = PROGRAM.format(root=str(ROOT), tree=str(tree))
    env = {"PYTHONHASHSEED": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    monkeypatch.syspath_prepend(tree)
    module = importlib.import_module("rewards")
    found = [describe(module.score), describe(module.lazy)]
    assert found == done.stdout.splitlines()
    assert "unknown" not in done.stdout and len(set(found)) == len(found)


def test_rows_count_with_their_json():
    def given(n):
        return [{"prompt": "a", "n": n, "messages": [{"role": "user", "content": None}]}]

    assert describe(given(3)) == describe(given(3)) != describe(given(4))
    assert describe({"easy": given(3)}) == describe({"easy": given(3)}) != describe({"hard": given(3)})
    assert describe(np.float32(0.5)) == 0.5 and describe(np.int64(3)) == 3


# ---- What cannot be known --------------------------------------------------------------------------------------------


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
    flagged = "--dataset, --model, --tokenizer, --reward"
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
    expected = ["--model: was m, is n", "the file of --eval-dataset has changed"]
    assert differences(old, new) == expected


# ---- Another length --------------------------------------------------------------------------------------------------


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


# ---- Inputs that change while a run waits ----------------------------------------------------------------------------

DATED = "DATE{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CHANGES = {  # what changes: how, and the flag that is named
    "template": ({"date": "g"}, "--dataset"),
    "rows": ({"rows": "ce"}, "--dataset"),
    "answers": ({"answer": 2}, "--eval-prompts"),
    "prompts": ({"prompt": "f"}, "--eval-prompts"),
    "nothing": ({}, None),
}


def stopping(outputs, **columns):
    """A metric that fails at its second call, behind the second step."""
    stopping.calls += 1
    if stopping.calls == 2:
        raise ZeroDivisionError
    return {"n": [len(output) for output in outputs]}


@pytest.mark.case(102, "sft")
@pytest.mark.parametrize("changed", CHANGES)
def test_a_run_goes_on_only_with_the_inputs_it_began_with(gpt2_dir, letters, tmp_path, changed):
    """What no flag names: the date in a template, files that a function reads, columns that only a metric sees."""
    inputs = {"date": "b", "rows": "cd", "answer": 1, "prompt": "e"}

    def go_on(**flags):
        letters.chat_template = DATED.replace("DATE", inputs["date"])
        chats = [{"prompt": [user(text)], "completion": [answer("f")]} for text in inputs["rows"]]
        prompts = [{"prompt": inputs["prompt"], "answer": inputs["answer"]}]
        flags |= {"tokenizer": letters, "dataset": lambda: chats, "eval_dataset": None, "eval_prompts": lambda: prompts}
        return run(sft, gpt2_dir, tmp_path / "run", max_new_tokens=3, metric=stopping, **flags)

    stopping.calls = 0
    with pytest.raises(ZeroDivisionError):
        go_on()
    before = files(tmp_path / "run")
    change, flag = CHANGES[changed]
    inputs |= change
    if flag:
        sentence = rf"began with other inputs: give --resume (.*\n)+  {flag} \(\w+\): was \w+, is"
        with pytest.raises(InputError, match=sentence):
            go_on()
        assert files(tmp_path / "run") == before
    resume = {"resume": str(tmp_path / "run")} if flag else {}
    if flag:  # it goes on with the new ones, and then with no others
        stopping.calls = 1
        with pytest.raises(ZeroDivisionError):
            go_on(**resume)
        new = dict(inputs)
        inputs |= {"date": "u", "rows": "uu", "answer": 9, "prompt": "u"}
        with pytest.raises(InputError, match="began with other inputs"):
            go_on(**resume)
        inputs |= new
    go_on(**resume)
    assert log(tmp_path / "run")[-1]["step"] == 4


def test_other_versions_are_said(gpt2_dir, tmp_path, capsys):
    """A run may go on with them; the card has both."""
    stopping.calls = 0
    with pytest.raises(ZeroDivisionError):
        run(sft, gpt2_dir, tmp_path / "run", metric=stopping, max_new_tokens=3)
    path = tmp_path / "run/env.json"
    env = json.loads(path.read_text())
    env["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(env))
    run(sft, gpt2_dir, tmp_path / "run", metric=stopping, max_new_tokens=3)
    change = f"torch 1.0 -> {torch.__version__}"
    assert f"warning: the run goes on with {change}: its numbers may differ" in capsys.readouterr().out
    assert f"\nContinued from step 2 with {change}.\n" in (tmp_path / "run/README.md").read_text()


def drawing(outputs, **columns):
    """A metric that draws, and fails once."""
    drawing.calls += 1
    if drawing.calls == drawing.failing:
        raise ZeroDivisionError
    return {"n": np.random.random(len(outputs)).tolist()}


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


# ---- A working directory that changes, a run directory that is no more -----------------------------------------------


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

    def rows():
        os.chdir(tmp_path / "other")
        return [{"prompt": text} for text in "bcde"]

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


@pytest.mark.case(100, "sft")
@pytest.mark.parametrize("how", ["renamed", "lock"])
def test_a_run_whose_directory_is_anothers_now_touches_nothing(gpt2_dir, tmp_path, how):
    """Its name may be that of a later run."""
    folder = tmp_path / "run"

    def metric(outputs, **columns):
        metric.calls += 1
        if metric.calls == 2:
            if how == "lock":
                (folder / ".lock").unlink()
            else:
                folder.rename(tmp_path / "old")
                folder.mkdir()
            (folder / ".lock").write_text("of a later run")
            metric.before = files(folder)
        return {"n": [1.0] * len(outputs)}

    metric.calls = 0
    flags = {"eval_prompts": [{"prompt": "a"}], "max_new_tokens": 3, "metric": metric}
    with pytest.raises(InputError, match="was removed or renamed while the run went on: nothing more is written there"):
        run(sft, gpt2_dir, folder, **flags)
    assert files(folder) == metric.before
    if how == "renamed":  # it goes on from its own last checkpoint
        shutil.rmtree(folder)
        run(sft, gpt2_dir, tmp_path / "old", **flags)
        assert log(tmp_path / "old")[-1]["step"] == 4


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


# ---- Directories -----------------------------------------------------------------------------------------------------


def test_a_directory_that_was_there_is_never_removed(gpt2_dir, tmp_path):
    """A signal before the first step removes what the run has made, and no file of the user. env.json is that of a run
    that failed before its first step, which begins again."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "env.json").write_text('{"hash": "0"}')
    (folder / "notes.txt").write_text("the user's")

    def metric(outputs, **columns):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        run(sft, gpt2_dir, folder, metric=metric, eval_prompts=[{"prompt": "a"}], max_new_tokens=3)
    assert (folder / "notes.txt").read_text() == "the user's"


def test_a_directory_with_an_environment_of_others_is_none_of_a_run(gpt2_dir, tmp_path):
    folder = tmp_path / "run"
    (folder / ".tmp-mine").mkdir(parents=True)
    for name, text in {"env.json": "{}", "README.md": "of others", ".tmp-mine/notes.txt": "mine"}.items():
        (folder / name).write_text(text)
    before = files(folder)
    with pytest.raises(InputError, match="cannot be written: it holds files but no run"):
        run(sft, gpt2_dir, folder)
    assert files(folder) == before


def test_a_text_that_cannot_be_a_path_names_no_file():
    for text in ("low quality, " * 40, "~~~"):
        assert files_of_flag(text) == [] == files_of_flag((text,))
    assert files_of_flag((".", "**", "/*")) == []  # texts to stop at, and no patterns
    assert files_of_flag("user.py:score:sep=.,mark=**") == []
