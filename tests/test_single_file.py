"""A script in one file: `python -m pytest tests/test_single_file.py`

What benchmarks/single_file.py writes runs where there is no `common`, and gives the same metrics.jsonl to the byte.
"""

import ast
import json
import re
import subprocess
import sys

import pytest
from harness import ALGOS, ROOT, flags, launch

from benchmarks import single_file

WITHOUT_COMMON = "import sys; sys.modules['common'] = None"  # an import of it is an error


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(algo) -> path of the script in one file."""
    folder = tmp_path_factory.mktemp("alone")

    def get(algo):
        target = folder / f"my_{algo}.py"
        if not target.exists():
            single_file.main(ROOT / f"algos/{algo}.py", target)
        return target

    return get


@pytest.mark.parametrize("algo", ["sft", *(pytest.param(x, marks=pytest.mark.slow) for x in ALGOS if x != "sft")])
def test_the_file_gives_the_same_metrics(algo, alone, scripts, work, whole, tmp_path):
    folder = whole(algo)[0]
    process = scripts.run([alone(algo), *flags(work, algo), "--name", "mine"], tmp_path, patch=WITHOUT_COMMON)
    [run] = tmp_path.glob("runs/mine-*")
    assert (run / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (run / "samples.jsonl").exists() == (folder / "samples.jsonl").exists()
    if algo == "ilql":
        assert "from my_ilql import PolicyWithQ" in process.out


@pytest.mark.parametrize("algo", ALGOS)
def test_the_file_is_like_those_of_the_repository(algo, alone):
    """It is formatted, imports nothing that it does not use, holds its license, and no function of common/ in vain."""
    path = alone(algo)
    text = path.read_text()
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", ROOT / "pyproject.toml", path]
    for words in (["check", "-q"], ["format", "--check", "-q"]):
        done = subprocess.run([*ruff, *words, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    head = text[:400]
    assert f"algos/{algo}.py" in head and f"single_file.py algos/{algo}.py my_{algo}.py" in head
    assert f"commit {commit or 'unknown'}" in head
    assert "".join(f"# {line}\n".replace("# \n", "#\n") for line in (ROOT / "LICENSE").read_text().splitlines()) in text
    assert ast.get_docstring(ast.parse(text)) == ast.get_docstring(ast.parse((ROOT / f"algos/{algo}.py").read_text()))
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)) and {"Args", "main", "Run", "learning_rate"} <= set(names)
    assert ("next_kl_coef" in names) == (algo == "ppo") and ("RewardModel" in names) == (algo not in ("reward", "ddpo"))
    unread = [name for name in names if text.count(name) == 1]
    assert not unread, "nothing reads these"


@pytest.mark.slow
def test_python_alone_runs_it(alone, work, whole, tmp_path):
    """Without site directories of the user, PYTHONPATH and the script's own directory; outside of any repository."""
    argv = [alone("sft"), *flags(work, "sft"), "--run-dir", "run"]
    done = launch([sys.executable, "-I"], argv, tmp_path, work)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (whole("sft")[0] / "metrics.jsonl").read_bytes()
    env = json.loads((tmp_path / "run/env.json").read_text())
    assert env["commit"] == "" and list(env["files"])[0] == "script"
    assert not [name for name in env["files"] if name.startswith("common/")]


def test_the_embedded_task_is_not_in_the_file(alone, scripts, tmp_path):
    for given in [], ["--lr", "1e-3"]:
        process = scripts.run([alone("sft"), *given], tmp_path, expect=2, patch=WITHOUT_COMMON)
        assert process.err.startswith("error: 2 problems:\n  - --model is missing: ")
    process = scripts.run([alone("sft"), "--model", "x"], tmp_path, expect=2, patch=WITHOUT_COMMON)
    assert "error: --dataset is missing" in process.err
    assert list(tmp_path.iterdir()) == []


# ---- How it is made --------------------------------------------------------------------------------------------------

FILES = {
    "algos/x.py": '''"""The script."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from common.one import (
    first,
    LIMIT,
)


def main():
    from common.two import lazy

    return yaml.safe_dump([first(1), lazy(), LIMIT])


if __name__ == "__main__":
    print(main())
''',
    "common/one.py": '''"""One."""
import math
import os.path
from math import floor as down

from common import two as t

LIMIT = [row for row in range(3)]  # three é
unused = os.path


# ---- A section ----


def helper(x):
    return down(x)


# why this is so
@t.twice
def first(x):
    """The é first."""
    return helper(x) + t.number() + math.inf


def never():
    return unused
''',
    "common/two.py": '''"""Two."""
COUNT = 7


def number():
    global COUNT
    COUNT += 1
    return COUNT


def twice(function):
    return lambda x: 2 * function(x)


def lazy():
    return [helper for helper in "ab"]
''',
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """small(**changes): writes FILES with other texts in some of them, and returns what becomes of the script."""
    monkeypatch.setattr(single_file, "ROOT", tmp_path)
    (tmp_path / "LICENSE").write_text("Do as you like.\n")

    def make(file="", old="", new=""):
        for name, text in FILES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.replace(old, new) if name == file else text)
        single_file.main(tmp_path / "algos/x.py", tmp_path / "my_x.py")
        return (tmp_path / "my_x.py").read_text()

    return make


def test_what_is_read_is_taken_over(small, tmp_path):
    text = small()
    done = subprocess.run([sys.executable, "-I", tmp_path / "my_x.py"], capture_output=True, text=True)
    assert done.stdout == "- .inf\n- - a\n  - b\n- - 0\n  - 1\n  - 2\n\n", done.stderr
    assert not set(re.findall(r"\w+", text)) & {"never", "unused", "os", "sys"}
    assert "# why this is so\n@twice\ndef first(x):" in text and "LIMIT = [row for row in range(3)]  # three é" in text
    assert "common.one" not in text and "A section" not in text
    order = ["import yaml"]
    order += ["==== common/two.py", "==== common/one.py", "==== algos/x.py", "like."]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("common/two.py", "twice", "helper", "common/two.py reads twice, which it does not define"),
        ("common/two.py", "def lazy():", "def down():\n    pass\n\n\ndef lazy():\n    down()", "down would mean two"),
        ("common/two.py", "COUNT", "LIMIT", "LIMIT would mean two things in one file: common/"),
        ("common/two.py", "lazy", "str", "common/two.py reads lazy, which it does not define"),
        ("common/two.py", "COUNT", "range", "range would mean two things in one file: "),
        ("common/one.py", "first(x)", "first(number)", "common/one.py has a variable number and reads t.number"),
        ("algos/x.py", "import lazy", "import lazy as later", "algos/x.py imports lazy as later: it needs one name"),
    ],
)
def test_what_cannot_be_one_file_is_said(file, old, new, says, small):
    with pytest.raises(SystemExit) as told:
        small(file, old, new)
    assert says in str(told.value)


def test_names_that_are_mistyped(small, tmp_path):
    text = small()
    script = tmp_path / "algos/x.py"
    for name, target, says in [
        (tmp_path / "algos/y.py", tmp_path / "my_y.py", "y.py is no script of this repository; there are algos/x.py"),
        (tmp_path / "LICENSE", tmp_path / "my_y.py", "LICENSE is no script of this repository; there are algos/x.py"),
        (script, tmp_path / "my_x.py", "my_x.py is there already: give another name, or remove it first"),
        (script, script, "x.py is there already: give another name, or remove it first"),
        (script, tmp_path / "nowhere/x.py", "x.py cannot be written: No such file or directory"),
    ]:
        with pytest.raises(SystemExit) as told:
            single_file.main(name, target)
        assert str(told.value).startswith("error: ") and str(told.value).endswith(says)
    assert (tmp_path / "my_x.py").read_text() == text and script.read_text() == FILES["algos/x.py"]
