"""python -m pytest tests/test_screen.py

What a user sees before a run: --help, a quick start, copies of scripts, Ctrl-C.
"""

import dataclasses
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ALGOS

from common.help import help_text

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("algo", ALGOS)
def test_help_has_every_flag_in_its_group(algo, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    module = importlib.import_module(f"algos.{algo}")
    text = help_text(module.Args)
    assert max(map(len, text.splitlines())) < columns
    groups = re.findall(r"^(\w+):$", text, re.M)
    assert groups[0] == "algorithm" and {"data", "optimizer", "model", "run"} <= {*groups}
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


def test_a_copy_elsewhere_says_what_it_needs(tmp_path):
    copy = shutil.copy(ROOT / "algos/sft.py", tmp_path / "my_sft.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, copy], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: a script needs common/: put it into algos/, set PYTHONPATH to the repository")
    assert done.stderr.count("\n") == 1
    done = subprocess.run(
        [sys.executable, copy, "--help"], capture_output=True, text=True, env=env | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "usage: my_sft.py" in done.stdout


def test_an_interrupt_while_libraries_load_is_quiet(tmp_path):
    process = subprocess.Popen(
        [sys.executable, ROOT / "algos/ppo.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == -signal.SIGINT
    assert not [*tmp_path.iterdir()]
