"""python -m pytest tests/test_screen.py

What a user sees before a run: --help, a quick start, copies of scripts, Ctrl-C.
"""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ALGOS

from common.cli import help_text

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("algo", ALGOS)
def test_help_has_every_flag_in_its_group(algo, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    module = importlib.import_module(f"algos.{algo}")
    text = help_text(module.Args)
    wide = [line for line in text.splitlines() if len(line) >= columns]
    assert all(line.startswith("  --loss-type {") for line in wide)
    groups = re.findall(r"^(\w.{,45}):$", text, re.M)
    assert groups[:2] == ["must be given, but for the embedded task", "algorithm"] and groups[-1] == "run"
    first = text[text.index(groups[0]) : text.index("\nalgorithm:")]
    assert re.findall(r"^  --(\w+)", first, re.M) == list(module.Args.required)
    for field in dataclasses.fields(module.Args):
        flag = "--" + field.name.replace("_", "-")
        if field.default is True:
            flag = flag.replace("--", "--no-", 1)
        assert len(re.findall(rf"^  {flag}(?= |$)", text, re.M)) == 1, flag
    assert re.search(r"^  --lr FLOAT", text, re.M)
    assert text.index("\nrun:") < text.index("\n  --seed INT") < text.index("Seed of every random draw. [1]")


HEAVY = "torch transformers accelerate diffusers peft datasets torch.distributed.fsdp matplotlib.figure".split()
LOADED = """import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print([name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize("algo, words", [*((algo, ["--help"]) for algo in ALGOS), ("ppo", ["--lrr", "1"])])
def test_help_and_mistyped_flags_wait_for_torch_alone(algo, words):
    argv = [sys.executable, "-c", LOADED.format(heavy=HEAVY), ROOT / f"algos/{algo}.py", *words]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout.endswith("['torch']\n"), done.stdout + done.stderr
    if words == ["--help"]:
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {algo}.py")
    else:
        assert done.returncode == 2 and "--lr " in done.stderr


def test_help_into_a_closed_pipe():
    done = subprocess.run(
        f"{sys.executable} {ROOT}/algos/sft.py --help | head -n 1", shell=True, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("usage: sft.py [flags]\n", "")


def test_a_copy_elsewhere_needs_common_on_the_path(tmp_path):
    copy = shutil.copy(ROOT / "algos/sft.py", tmp_path / "my_sft.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, copy], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'common'" in done.stderr
    done = subprocess.run(
        [sys.executable, copy, "--help"], capture_output=True, text=True, env=env | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "usage: my_sft.py" in done.stdout
