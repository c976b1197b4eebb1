"""What benchmarks/single_file.py writes: `python -m pytest tests/test_single_file.py`"""

import ast
import subprocess
import sys

import pytest
from harness import ALGOS, ROOT, flags

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
    scripts.run([alone(algo), *flags(work, algo), "--run-dir", "run"], tmp_path, patch=WITHOUT_COMMON)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()


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
    assert len(names) == len(set(names)) and {"Args", "main", "Run", "make_optimizer"} <= set(names)
    unread = [name for name in names if text.count(name) == 1]
    assert not unread, "nothing reads these"


def test_the_embedded_task_is_not_in_the_file(alone, scripts, tmp_path):
    process = scripts.run([alone("sft"), "--lr", "1e-3"], tmp_path, expect=2, patch=WITHOUT_COMMON)
    assert process.err.startswith("error: 2 problems:\n  - --model is missing: ")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_kept(tmp_path):
    (tmp_path / "my_x.py").write_text("mine")
    with pytest.raises(SystemExit, match="^error: .*my_x.py is there already: give another name, or remove it first"):
        single_file.main(ROOT / "algos/sft.py", tmp_path / "my_x.py")
    assert (tmp_path / "my_x.py").read_text() == "mine"
