"""python -m pytest tests/test_screen.py

What a user sees: the live line in a pseudo-terminal, --help, a quick start, copies of scripts, Ctrl-C.
"""

import dataclasses
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ALGOS, command, environment

from benchmarks.recording import in_terminal, transcript
from common.cli import help_text
from common.logging import closes_run, duration
from common.screen import Screen, screen

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("columns", [80, 140])
def test_the_live_line_says_what_happens(columns, work, tmp_path):
    env = environment(work)
    env.pop("COLUMNS")
    argv = [sys.executable, *map(str, command(work, "ppo", "run"))]
    pieces, code = in_terminal(argv, columns, tmp_path, env)
    text = "".join(piece for _, piece in pieces)
    assert code == 0 and "Traceback" not in text
    pictures = re.findall(r"\r\x1b\[2K([^\r\n]*)\r(?!\n)", text)
    assert max(map(len, pictures)) <= columns - 1
    assert text.index("loading libraries") < text.index("parameters")
    activities = []
    for picture in pictures:
        for part in picture.split(" | "):
            if match := re.match(r"[a-z][a-z_ -]*", part):
                activities.append(match[0].strip())
    order = [activities.index(name) for name in ("loading libraries", "evaluating", "sampling", "saving")]
    assert order == sorted(order)
    assert {"reading --dataset", "scoring", "writing hf_model"} <= {*activities}
    assert re.search(r"\| training 3/4 steps, 0 s", text)
    while_sampling = [picture for picture in pictures if re.match(r"8/24, eta \d+ s \| sampling 0/8 rows", picture)]
    assert while_sampling and "scores 0." in while_sampling[0]  # the metrics of the iteration before
    shown = max(picture.count(" | ") for picture in pictures)
    assert shown >= {80: 3, 140: 6}[columns]
    assert text.endswith("\r\x1b[2K")  # nothing of the line is left


def test_transcript():
    pieces = [
        (0.1, "first\r\n\r\x1b[2Kloading, 0 s\r"),
        (0.3, "\r\x1b[2Kreading, 0 s\r"),
        (1.2, "\r\x1b[2Kreading, 1 s\r"),
        (2.4, "\r\x1b[2Kreading, 2 s\r\r\x1b[2Ksec"),
        (2.5, "ond\r\n"),
    ]
    lines = ["   5.1   first", "   5.1 > loading, 0 s", "   6.2 > reading, 1 s", "   7.5   second"]
    assert transcript(pieces, 5.0) == lines


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 7


def test_whole_parts_fit_into_the_line(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((51, 24)))
    screen = Screen()
    screen.stream = Terminal()
    screen.live = True
    screen.headline = "8/24, eta 5 s"
    screen.metrics = "kl 1.5 | scores 0.123 | x 1"
    screen.show("sampling", 1234)
    line = screen.stream.getvalue().strip("\r").removeprefix("\x1b[2K")
    assert line == "8/24, eta 5 s | sampling 0/1,234 rows, 0 s"
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((53, 24)))
    screen.draw()
    assert screen.stream.getvalue().endswith("\x1b[2K8/24, eta 5 s | sampling 0/1,234 rows, 0 s | kl 1.5\r")
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((0, 0)))  # of some containers
    screen.draw()
    assert screen.stream.getvalue().endswith("rows, 0 s | kl 1.5 | scores 0.123 | x 1\r")


def test_a_run_from_python_has_the_line(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((80, 24)))
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    live = closes_run(lambda args: screen.live)
    assert live(SimpleNamespace(threads=torch.get_num_threads())) and not screen.live
    assert sys.stderr.getvalue() == "\r\x1b[2Kloading libraries, 0 s\r\r\x1b[2K"


def test_long_activities_are_reported_without_a_terminal(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen()
    screen.start()
    assert not screen.live  # under pytest there is no terminal
    screen.show("scoring pairs", 700, "pairs")
    for now[0] in (110.0, 131.0, 140.0, 163.0):
        screen.advance(100)
    assert capsys.readouterr().out == "scoring pairs 200/700 pairs, 31 s\nscoring pairs 400/700 pairs, 63 s\n"
    for now[0] in (200.0, 240.0):
        screen.step(1)  # of an iteration of one step, which has its own line
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    screen.show("sampling", 8)
    now[0] = 300.0
    screen.advance(1)


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


SHOWN = """import sys
sys.path.insert(0, {root!r})
from common.screen import screen
screen.start()
screen.show("sampling", 8)
screen.say("a line")
screen.stop()
"""


@pytest.mark.parametrize(("shell", "is_live"), [("{}", True), ("{} | cat", False), ("{} 2> /dev/null", False)])
def test_the_line_is_drawn_where_all_output_goes_to_a_terminal(shell, is_live, tmp_path):
    """`| tee log` would print into it, and the log would have no progress."""
    (tmp_path / "shown.py").write_text(SHOWN.format(root=str(ROOT)))
    pieces, code = in_terminal(["sh", "-c", shell.format(f"{sys.executable} shown.py")], 80, tmp_path, os.environ)
    text = "".join(piece for _, piece in pieces)
    picture = "\r\x1b[2Ksampling 0/8 rows, 0 s\r"
    clear = "\r\x1b[2K"
    assert (code, text) == (0, f"{picture}{clear}a line\r\n{picture}{clear}" if is_live else "a line\r\n")


def test_without_an_output_for_errors(tmp_path):
    (tmp_path / "shown.py").write_text(SHOWN.format(root=str(ROOT)))
    done = subprocess.run(f"{sys.executable} {tmp_path}/shown.py 2>&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a line\n")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (121, "2 min"), (3000, "50 min"), (7190, "120 min"), (9000, "2.5 h")],
)
def test_seconds_in_words(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("algo", ALGOS)
def test_help_has_every_flag_in_its_group(algo, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    module = importlib.import_module(f"algos.{algo}")
    text = help_text(module.Args)
    assert max(map(len, text.splitlines())) < columns
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
