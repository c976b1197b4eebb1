"""Runs that are killed, starved, torn and continued. The default run has a sample: see benchmarks/faults/README.md

kill -9 loses nothing that a system call has written. So one run is traced, its directory copied before each system call
that changes it, and the same command given in every copy: a kill at every such call of the whole run. (A power failure
may lose what was written and not yet synced; fsync comes before each rename, which is not tested here.) Other kills are
real: a user's function or a patched library function sends the signal at its n-th call.
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGSTOP

import pytest
import torch
from harness import (
    ALGOS,
    BIN,
    ROOT,
    SETTINGS,
    at,
    command,
    driven,
    environment,
    files,
    launch,
    lines,
    same,
    torchrun,
)
from safetensors.torch import load_file

from common.checkpoint import newest_checkpoint

# The default run takes ppo, the suite all scripts.
every_script = pytest.mark.parametrize("algo", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ALGOS[1:])])
PARTS = 8  # of the states of a run, a test each, so that the progress is seen


# ---- A kill before every system call that changes the run directory --------------------------------------------------

# Numbers of system calls that create, write, cut, rename or remove files.
CHANGES = {
    "x86_64": {1, 2, 18, 20, 40, 76, 77, 82, 83, 84, 85, 87, 257, 258, 263, 264, 285, 296, 316, 326},
    "aarch64": {33, 34, 35, 37, 38, 45, 46, 47, 56, 64, 66, 68, 70, 71, 276, 285},
}
SEIZE, INTERRUPT, SYSCALL, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E  # of ptrace(2)
TRACESYSGOOD, EXITKILL, WALL = 1, 1 << 20, 0x40000000


def before_changes(pid, look):
    """Traces the main thread of a process until it ends, and calls look() before each of its changes to files."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    info = (ctypes.c_uint64 * 11)()  # struct ptrace_syscall_info: byte 0 is 1 at the entry, word 3 the number

    def ptrace(request, address=0, data=0):
        if libc.ptrace(request, pid, address, data) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of {pid}")

    ptrace(SEIZE, 0, TRACESYSGOOD | EXITKILL)
    ptrace(INTERRUPT)
    while True:
        _, status = os.waitpid(pid, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return
        stopped, event, signal = os.WSTOPSIG(status), status >> 16, 0
        if stopped == 5 | 0x80:  # SIGTRAP of a system call
            ptrace(GET_SYSCALL_INFO, ctypes.sizeof(info), ctypes.addressof(info))
            if info[0] & 255 == 1 and info[3] in CHANGES[platform.machine()]:
                look()
        elif not event:
            signal = stopped  # one of its own
        ptrace(SYSCALL, 0, signal)


def tree(folder):
    """What tells two states of a directory apart, without reading the files."""
    found = []
    for root, _, names in os.walk(folder):
        stats = [os.stat(f"{root}/{name}") for name in names]
        found.append((root, [(n, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in zip(names, stats, strict=True)]))
    return found


WAIT = "import time\nwhile 'TracerPid:\\t0' in open('/proc/self/status').read(): time.sleep(0.01)\n"


def copies(folder, argv, scripts, target):
    """The states, oldest first, that a folder goes through while a command runs in it, each a copy of it."""
    process, seen = scripts.start(argv, folder, patch=WAIT), []
    target.mkdir()

    def look():
        if (now := tree(folder)) not in seen[-1:]:
            shutil.copytree(folder, target / f"{len(seen):04d}")
            seen.append(now)

    before_changes(process.pid, look)
    assert process.wait() == 0, process.err
    return sorted(target.iterdir())


@pytest.fixture(scope="session")
def states(scripts, work, tmp_path_factory):
    """states(algo) -> those of a whole run."""
    found = {}

    def get(algo):
        if algo not in found:
            folder = tmp_path_factory.mktemp(algo)
            (folder / "at").mkdir()
            found[algo] = copies(folder / "at", command(work, algo, "run"), scripts, folder / "states")
        return found[algo]

    return get


def continued(state, algo, scripts, work, whole, target):
    """The same command in a copy of a state ends as the uninterrupted run does."""
    shutil.copytree(state, target)
    scripts.run(command(work, algo, "run"), target)
    same(target / "run", whole(algo)[0])
    ends_clean(target / "run", ONE_MORE)
    shutil.rmtree(target)


ONE_MORE = 4  # a kill between the last checkpoint and its pruning leaves one that nothing prunes later


def ends_clean(run, checkpoints=3):
    """At most so many checkpoints: the newest two and the best."""
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == sorted(set(steps)), "each step once"
    assert not list(run.parent.rglob(".tmp*")), "what a killed process left half-written is removed"
    assert len(list((run / "checkpoints").iterdir())) <= checkpoints


@pytest.mark.case(2)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("algo", ALGOS)
def test_killed_before_each_change_of_a_file(algo, part, states, scripts, work, whole, tmp_path):
    assert len(states(algo)) > 150
    for state in states(algo)[part::PARTS]:
        continued(state, algo, scripts, work, whole, tmp_path / state.name)


@pytest.mark.case(2)
@pytest.mark.parametrize("algo", ["ppo", pytest.param("sft", marks=pytest.mark.slow)])
def test_killed_while_a_checkpoint_is_written(algo, states, scripts, work, whole, tmp_path):
    """The sample of the default run: every sixth state on the way from the second checkpoint to the third; and in
    every state of the whole run the newest checkpoint is whole, or there was none yet."""
    steps = []
    for state in states(algo):
        folder = Path(shutil.copytree(state, tmp_path / "look")) / "run"
        path, found = newest_checkpoint(folder, lambda text: None) if folder.exists() else (None, None)
        steps.append(found["step"] if path else 0)
        shutil.rmtree(tmp_path / "look")
    assert steps == sorted(steps) and steps[-1] == lines(whole(algo)[0] / "metrics.jsonl")[-1]["step"]
    third = sorted(set(steps))[3]
    write = [state for state in states(algo)[: steps.index(third) + 8] if any(state.rglob(f".tmp-step_*{third}-*"))]
    assert len(write) > 8
    for state in write[::6]:
        continued(state, algo, scripts, work, whole, tmp_path / state.name)


@pytest.mark.case(76, "ppo grpo ilql sft reward dpo ddpo")
@pytest.mark.slow
def test_the_runs_are_worth_comparing(whole, work):
    """Otherwise equality would say nothing: all weights move, and so does what else checkpoints hold."""
    for algo in ALGOS:
        folder, _ = whole(algo)
        name = "unet/diffusion_pytorch_model" if algo == "ddpo" else "model"
        before = load_file(work / ("pipeline" if algo == "ddpo" else "model") / f"{name}.safetensors")
        after = load_file(folder / f"hf_model/{name}.safetensors")
        stay = {key for key, weight in before.items() if key in after and torch.equal(weight, after[key])}
        # a constant cancels in the difference of two scores, to rounding
        assert stay <= ({"transformer.ln_f.bias"} if algo == "reward" else set()), algo
        assert len(before.keys() & after.keys()) > 20 and len(lines(folder / "samples.jsonl")) > 5
    metrics = lines(whole("ppo")[0] / "metrics.jsonl")
    assert len({line["objective/kl_coef"] for line in metrics[1:]}) > 3
    metrics = lines(whole("grpo")[0] / "metrics.jsonl")
    assert len({line["groups/equal"] for line in metrics[1:]}) > 1
    newest = max((whole("ilql")[0] / "checkpoints").iterdir())
    weights = load_file(newest / "model.safetensors")
    targets = {name: weights[name.replace("target_", "")] for name in weights if "target_" in name}
    assert targets and all(not torch.equal(weights[name], online) for name, online in targets.items())
    newest = max((whole("ddpo")[0] / "checkpoints").iterdir())
    assert len(json.loads((newest / "state.json").read_text())["rewards"]) == 3


@pytest.mark.case(78)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["the same command", "another command"])
@pytest.mark.parametrize("algo", ALGOS)
def test_killed_before_each_change_while_a_run_continues(algo, how, ended, scripts, work, whole, tmp_path):
    """Of a run that was killed, whose newest checkpoint is broken and whose metrics are torn, until a step or two
    are done. Another command: from its first checkpoint under another learning rate."""
    run, steps = ended(algo, tmp_path / "at/run")
    flip_bit(run / f"checkpoints/step_{steps[-1]:08d}")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "objective/kl": 0.12')
    (run / "checkpoints/.tmp-step_00000020-4711").mkdir()
    argv, expected = command(work, algo, "run"), whole(algo)[0]
    if how == "another command":
        argv += ["--resume", f"run/checkpoints/step_{steps[0]:08d}", "--lr", "5e-3"]
        shutil.copytree(tmp_path / "at", tmp_path / "whole")
        scripts.run(argv, tmp_path / "whole")
        expected = tmp_path / "whole/run"
    for state in copies(tmp_path / "at", argv, scripts, tmp_path / "states")[:36]:
        scripts.run(argv, state)
        same(state / "run", expected)
        ends_clean(state / "run", ONE_MORE)


# ---- Real kills ------------------------------------------------------------------------------------------------------

# What runs when the signal comes: the n-th call of a library function, or of a reward or metric of these tests.
PLACES = {
    "between steps": ("common.logging", "Run.stop_requested", 3),
    "optimizer step": ("torch.optim", "AdamW.step", 7),
    "backward": ("torch", "Tensor.backward", 5),
    "logging": ("common.logging", "Run.append", 6),
    "model of a checkpoint": ("safetensors.torch", "save_file", 5, True),
    "optimizer of a checkpoint": ("safetensors.torch", "save_file", 6, True),
    "picture at the end": ("matplotlib.figure", "Figure.savefig", 1),
}
SAMPLING = ("torch", "searchsorted", 15)
OWN_PLACES = {
    "ppo": {"sampling": SAMPLING, "reward": "reward:5", "evaluation": "metric:2"},
    "grpo": {"sampling": SAMPLING, "reward": "reward:5", "evaluation": "metric:2"},
    "ilql": {"sampling": SAMPLING, "evaluation": "metric:3"},
    "sft": {"sampling": SAMPLING, "evaluation": "metric:2"},
    "reward": {"evaluation": ("common.logging", "Run.samples", 2)},
    "dpo": {"sampling": SAMPLING, "evaluation": "metric:3"},
    "ddpo": {"sampling": ("diffusers", "AutoencoderKL.decode", 3), "reward": "reward:4", "evaluation": "metric:2"},
}
DEFAULT = {("ppo", "reward"), ("ilql", "optimizer step"), ("sft", "sampling"), ("reward", "between steps")}
DEFAULT |= {("dpo", "logging")}


def kill_at(place):
    """The options of scripts.run() that send SIGKILL at a place."""
    return {"SIGNAL_AT": f"{place}:9"} if isinstance(place, str) else {"patch": at(*place)}


def kills():
    for algo in ALGOS:
        for name, place in (PLACES | OWN_PLACES[algo]).items():
            number = 1 if name == "between steps" else 2 if "checkpoint" in name else 3
            slow = [pytest.mark.slow] * ((algo, name) not in DEFAULT)
            yield pytest.param(algo, place, marks=[pytest.mark.case(number), *slow], id=f"{algo}-{name}")


@pytest.mark.parametrize(("algo", "place"), [*kills()])
def test_killed_in(algo, place, scripts, work, whole, tmp_path):
    scripts.run(command(work, algo, "run"), tmp_path, expect=-9, **kill_at(place))
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])
    ends_clean(tmp_path / "run")


@pytest.mark.case(4)
@every_script
def test_killed_three_times(algo, scripts, work, whole, tmp_path):
    """Once before the first checkpoint, once behind it, once in the first step after continuing."""
    for n in 3, 7, 1:
        scripts.run(command(work, algo, "run"), tmp_path, expect=-9, patch=at("torch.optim", "AdamW.step", n))
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])
    ends_clean(tmp_path / "run")


FORGET = {
    "the optimizer": """
from torch.distributed.checkpoint import state_dict
state_dict.set_optimizer_state_dict = lambda *args, **options: None
""",
    "one row of the data": """
import common.seeding as s
rows, newest, shift = s.stream_rows, c.newest_checkpoint, [0]
def shifted(seed, stream, size, start, count):
    return rows(seed, stream, size, start + shift[0], count)
def found(*args):
    shift[0] = 1
    return newest(*args)
s.stream_rows, c.newest_checkpoint = shifted, found""",
    "the lines of lost steps": "import common.logging\ncommon.logging.keep_lines = lambda path, step: None",
}
OWN_STATE = {"ppo": {"kl_coef": 0.05, "moments": [0, 0.0, 0.0]}, "ddpo": {"rewards": {}}}
for algo, scalars in OWN_STATE.items():
    for key, value in scalars.items():
        FORGET[f"{key} of {algo}"] = f"""
newest = c.newest_checkpoint
def found(*args):
    path, state = newest(*args)
    return path, state | {{{key!r}: {value!r}}}
c.newest_checkpoint = found"""


def forgotten():
    for algo in ALGOS:
        for what in FORGET:
            if what.rpartition(" of ")[2] in (algo, "the data", "lost steps", "the optimizer"):
                slow = [pytest.mark.slow] * (algo != "ppo" or "lines" in what)
                yield pytest.param(algo, what, marks=slow, id=f"{algo}-{what}")


@pytest.mark.case(76)
@pytest.mark.parametrize(("algo", "what"), [*forgotten()])
def test_a_resume_that_forgets_something_is_noticed(algo, what, ended, scripts, work, whole, tmp_path):
    """Negative control of all tests here."""
    run, _ = ended(algo, tmp_path / "run")
    patch = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import common.checkpoint as c\n{FORGET[what]}"
    scripts.run(command(work, algo, "run"), tmp_path, patch=patch)
    with pytest.raises(AssertionError):
        same(run, whole(algo)[0])
        ends_clean(run)


# ---- Broken files ----------------------------------------------------------------------------------------------------


def flip_bit(checkpoint):
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-5] ^= 16
    (checkpoint / "model.safetensors").write_bytes(data)


BOMB = b"cos\nmkdir\n(S'executed'\ntR."  # a pickle: os.mkdir("executed")
BREAK = {
    "model truncated": (9, lambda p: os.truncate(p / "model.safetensors", 1000)),
    "optimizer truncated": (9, lambda p: os.truncate(p / "optim.safetensors", 1000)),
    "bit flip in the model": (10, flip_bit),
    "optimizer missing": (11, lambda p: (p / "optim.safetensors").unlink()),
    "manifest missing": (11, lambda p: (p / "MANIFEST.json").unlink()),
    "manifest empty": (11, lambda p: (p / "MANIFEST.json").write_text("")),
    "state empty": (11, lambda p: (p / "state.json").write_text("")),
    "a pickle bomb in place of the optimizer": (59, lambda p: (p / "optim.safetensors").write_bytes(BOMB)),
}


def breaks():
    for algo in ALGOS:
        for fault, (number, broken) in BREAK.items():
            slow = [pytest.mark.slow] * (
                (algo, fault) not in {("ppo", "bit flip in the model"), ("sft", "manifest missing")}
            )
            yield pytest.param(algo, broken, marks=[pytest.mark.case(number), *slow], id=f"{algo}-{fault}")


@pytest.mark.parametrize(("algo", "broken"), [*breaks()])
def test_a_broken_checkpoint_falls_back_with_a_warning(algo, broken, ended, scripts, work, whole, tmp_path):
    run, steps = ended(algo, tmp_path / "run")
    broken(run / f"checkpoints/step_{steps[-1]:08d}")
    process = scripts.run(command(work, algo, "run"), tmp_path)
    warning = next(line for line in process.out.splitlines() if "falling back" in line)
    assert f"step_{steps[-1]:08d}" in warning and f"from step {steps[-2]}" in process.out
    same(run, whole(algo)[0])
    ends_clean(run)
    assert not (tmp_path / "executed").exists()


@pytest.mark.case(11)
@every_script
def test_files_that_do_not_belong_there_are_ignored(algo, ended, scripts, work, whole, tmp_path):
    run, steps = ended(algo, tmp_path / "run")
    (run / f"checkpoints/step_{steps[-1]:08d}/notes.txt").write_text("junk")
    (run / "checkpoints/notes.txt").write_text("junk")
    (run / "notes.txt").write_text("junk")
    process = scripts.run(command(work, algo, "run"), tmp_path)
    assert f"from step {steps[-1]}" in process.out
    same(run, whole(algo)[0])


@pytest.mark.case(12)
@every_script
def test_all_checkpoints_broken_is_an_error_and_changes_nothing(algo, ended, scripts, work, tmp_path):
    run, _ = ended(algo, tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        flip_bit(path)
    before = files(run)
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=2)
    assert "every checkpoint in run/checkpoints is broken" in process.err
    assert "--resume never" in process.err
    assert before == files(run)


@pytest.mark.case(23)
@every_script
def test_torn_lines_and_stale_files_are_mended(algo, ended, scripts, work, whole, tmp_path):
    run, steps = ended(algo, tmp_path / "run")
    for name in "metrics.jsonl", "perf.jsonl", "samples.jsonl":
        with open(run / name, "a") as file:
            file.write('{"step": 20, "objective/kl": 0.12')
    stale = [run / "checkpoints/.tmp-step_00000020-4711", run / ".tmp-hf_model-4711"]
    for path in stale:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    scripts.run(command(work, algo, "run"), tmp_path)
    same(run, whole(algo)[0])
    ends_clean(run)
    assert [x["step"] for x in lines(run / "perf.jsonl")] == [x["step"] for x in lines(run / "metrics.jsonl")][1:]


# ---- No room ---------------------------------------------------------------------------------------------------------

ROOM = f"""
import sys, resource; sys.path.insert(0, {str(ROOT)!r})
import common.checkpoint as c, common.logging as l
def room(size=resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""
# Two checkpoints in the middle find no room for a file of more than 3 kB; later the disk has room again.
NO_ROOM_FOR_A_CHECKPOINT = f"""{ROOM}
original, calls = c.write_checkpoint, 0
def write(*args):
    global calls
    calls += 1
    try:
        if calls in (2, 3):
            room(3000)
        return original(*args)
    finally:
        room()
c.write_checkpoint = write
"""
# None from the last step on, but for the lines that a process prints.
NO_ROOM_AT_THE_END = f"""{ROOM}
original = l.Run.stop_requested
def stop_requested(run):
    text = open(run.dir / "metrics.jsonl").read()
    if '"step": LAST,' in text:
        room(max(3000, 2 * len(text)))
    return original(run)
l.Run.stop_requested = stop_requested
"""
NO_ROOM_IN_A_LINE = f"""{ROOM}
original = l.Run.append
def append(run, name, *records):
    path = run.dir / name
    try:
        if name == "metrics.jsonl" and records[0]["step"] >= 7:
            room(path.stat().st_size + 20)
        return original(run, name, *records)
    finally:
        room()
l.Run.append = append
"""


@pytest.mark.case(20)
@every_script
def test_a_full_disk_is_a_warning_and_older_checkpoints_stay(algo, scripts, work, whole, tmp_path):
    argv = command(work, algo, "run", "--keep-checkpoints", "99")
    process = scripts.run(argv, tmp_path, patch=NO_ROOM_FOR_A_CHECKPOINT)
    warnings = [line for line in process.out.splitlines() if "warning: no checkpoint was written" in line]
    assert len(warnings) == 2 and all("older ones are intact" in line for line in warnings)
    saved = {int(path.name[5:]) for path in (tmp_path / "run/checkpoints").iterdir()}
    lost = {int(line.partition("at step ")[2].split()[0]) for line in warnings}
    assert saved and not saved & lost and min(saved) < min(lost) < max(lost) < max(saved)
    same(tmp_path / "run", whole(algo)[0])


@pytest.mark.case(21)
@every_script
def test_a_full_disk_at_the_end_is_an_error(algo, scripts, work, whole, tmp_path):
    last = lines(whole(algo)[0] / "metrics.jsonl")[-1]["step"]
    patch = NO_ROOM_AT_THE_END.replace("LAST", str(last))
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=1, patch=patch)
    assert f"warning: no checkpoint was written at step {last}" in process.out and "File too large" in process.err
    assert not (tmp_path / "run/README.md").exists() and not (tmp_path / "run/hf_model").exists()
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])
    ends_clean(tmp_path / "run")


@pytest.mark.case(77)
@every_script
def test_a_full_disk_in_a_line_of_metrics(algo, scripts, work, whole, tmp_path):
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=1, patch=NO_ROOM_IN_A_LINE)
    assert "File too large" in process.err
    assert not (tmp_path / "run/metrics.jsonl").read_text().endswith("\n"), "a torn line"
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])
    ends_clean(tmp_path / "run")


@pytest.mark.case(65)
@every_script
def test_memory_runs_out(algo, scripts, work, whole, tmp_path):
    patch = at("torch.optim", "AdamW.step", 7, signal="import torch; raise torch.OutOfMemoryError('out of memory')")
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=2, patch=patch)
    assert "out of memory: lower --micro-batch-size" in process.err
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])


# ---- Errors of functions ---------------------------------------------------------------------------------------------

FAIL = "raise LookupError('no server')"
FAILING = {"reward": ("common.functions", "call_reward", 5), "evaluation": ("common.logging", "Run.samples", 2)}


def errors():
    for algo in ALGOS:
        for what in FAILING:
            if what == "evaluation" or algo in ("ppo", "grpo", "ddpo"):
                slow = [pytest.mark.slow] * ((algo, what) not in {("ppo", "reward"), ("sft", "evaluation")})
                yield pytest.param(algo, what, marks=slow, id=f"{algo}-{what}")


@pytest.mark.case(29)
@pytest.mark.parametrize(("algo", "what"), [*errors()])
def test_an_error_between_updates_loses_nothing(algo, what, scripts, work, whole, tmp_path):
    argv = command(work, algo, "run", "--save-every", "1000")
    process = scripts.run(argv, tmp_path, expect=1, patch=at(*FAILING[what], signal=FAIL))
    assert "LookupError: no server" in process.err
    path, state = newest_checkpoint(tmp_path / "run", lambda text: pytest.fail(text))
    last = lines(tmp_path / "run/metrics.jsonl")[-1]["step"]
    assert f"the last complete step is in run/checkpoints/{path.name}; the same command continues there" in process.out
    assert state["step"] == last if what == "reward" else state["step"] > last
    assert bool(state["pending"]) == (what == "evaluation")
    scripts.run(argv, tmp_path)
    same(tmp_path / "run", whole(algo)[0])


@pytest.mark.case(33)
def test_an_error_within_an_update_names_the_last_checkpoint(scripts, work, whole, tmp_path):
    patch = at("torch.optim", "AdamW.step", 7, signal=FAIL)
    process = scripts.run(command(work, "ppo", "run"), tmp_path, expect=1, patch=patch)
    assert "the last complete step is in run/checkpoints/step_00000004; the same command continues there" in process.out
    scripts.run(command(work, "ppo", "run"), tmp_path)
    same(tmp_path / "run", whole("ppo")[0])


def test_ten_minutes_are_lost_at_most(scripts, work, tmp_path):
    """SAVE_SECONDS, here none; --save-every 0 switches them off."""
    patch = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport common.logging as l\nl.SAVE_SECONDS = 0"
    for every, steps in ("1000", [*range(1, 13)]), ("0", [4, 8, 12]):
        argv = command(work, "sft", every, "--save-every", every, "--keep-checkpoints", "99")
        scripts.run(argv, tmp_path, patch=patch)
        found = sorted(int(path.name[5:]) for path in (tmp_path / every / "checkpoints").iterdir())
        assert found == steps or (every == "0" and set(found) <= set(steps))


FORKS = """
import multiprocessing, os, sys

def count(text):
    return float(len(text))

def reward(samples, **columns):
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends its processes by SIGTERM
        return pool.map(count, samples)
"""


@pytest.mark.case(29, "ppo")
def test_a_reward_that_forks(scripts, work, tmp_path):
    """Its children end without the run's directory, signals and lock."""
    (tmp_path / "forks.py").write_text(FORKS)
    process = scripts.run(command(work, "ppo", "run", "--reward", "forks.py:reward"), tmp_path)
    assert (tmp_path / "run/README.md").exists()
    assert "Traceback" not in process.err


@pytest.mark.case(29, "ppo")
def test_a_reward_that_ends_the_process(scripts, work, tmp_path):
    (tmp_path / "ends.py").write_text("import sys\n\ndef reward(**columns):\n    sys.exit(0)\n")
    process = scripts.run(command(work, "ppo", "run", "--reward", "ends.py:reward"), tmp_path, expect=1)
    assert "ends.py:reward called sys.exit" in process.err


@pytest.mark.case(23, "ppo")
def test_a_damaged_line_is_named(ended, scripts, work, tmp_path):
    run, _ = ended("ppo", tmp_path / "run")
    path = run / "perf.jsonl"
    path.write_text("{nothing}\n" + path.read_text())
    process = scripts.run(command(work, "ppo", "run"), tmp_path, expect=2)
    assert "run/perf.jsonl is damaged in line 1 (" in process.err


# ---- Signals and the lock --------------------------------------------------------------------------------------------

TERM, INT = signal.SIGTERM, signal.SIGINT
SIGNALS = {
    "a step": (6, PLACES["optimizer step"], TERM, 143),
    "the first iteration": (6, ("torch.optim", "AdamW.step", 3), TERM, 143),  # of ppo it has four steps
    "a step, interrupt": (7, PLACES["optimizer step"], INT, 130),
    "the export of the best": (8, ("common.checkpoint", "replacing", 1), TERM, 143),
    "the end": (8, ("common.logging", "Run.finish", 1), TERM, 0),  # after the last step, it ends as without
}


def signals():
    for algo in ALGOS:
        for name, (number, place, which, code) in SIGNALS.items():
            slow = [pytest.mark.slow] * (
                (algo, name) not in {("ppo", "the first iteration"), ("sft", "a step, interrupt")}
            )
            yield pytest.param(
                algo, place, which, code, marks=[pytest.mark.case(number), *slow], id=f"{algo}-{name}-{which.name}"
            )


@pytest.mark.parametrize(("algo", "place", "which", "code"), [*signals()])
def test_a_signal_saves_and_names_the_command(algo, place, which, code, scripts, work, whole, tmp_path):
    argv = command(work, algo, "run", "--save-every", "0")  # so that the signal's own checkpoint is the one to continue
    process = scripts.run(argv, tmp_path, expect=code, patch=at(*place, signal=which))
    run = tmp_path / "run"
    assert (run / "README.md").exists() == (code == 0)
    if code > 0:
        text = process.out.splitlines()[-1]
        step = int(re.fullmatch(r"stopped after step (\d+); to continue: .*", text)[1])
        assert (run / f"checkpoints/step_{step:08d}/MANIFEST.json").exists()
        assert lines(run / "metrics.jsonl")[-1]["step"] == step
        argv = shlex.split(text.partition("to continue: ")[2])[1:]
    scripts.run(argv, tmp_path)
    same(run, whole(algo)[0])
    ends_clean(run)


@pytest.mark.case(8)
@pytest.mark.parametrize("which", [TERM, INT])
@pytest.mark.parametrize("place", ["Run.__init__", "Run.samples"])  # while loading, and at the first evaluation
@every_script
def test_a_signal_before_the_first_step_leaves_nothing(algo, place, which, scripts, work, tmp_path):
    code = -TERM if (place, which) == ("Run.__init__", TERM) else 128 + which
    patch = at("common.logging", place, 1, signal=which)
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=code, patch=patch)
    assert process.err == "" and "stopp" not in process.out
    assert not (tmp_path / "run").exists()


@pytest.mark.case(8)
@every_script
def test_a_signal_before_the_first_step_of_a_continued_run_keeps_it(algo, scripts, work, ended, tmp_path):
    run, _ = ended(algo, tmp_path / "run")
    before = files(run)
    patch = at("common.logging", "Run.evaluation_due", 1, signal=TERM)
    scripts.run(command(work, algo, "run"), tmp_path, expect=143, patch=patch)
    checkpoints = {path for path in before if "checkpoints" in path.parts}
    assert checkpoints and checkpoints <= files(run).keys()


@pytest.mark.case(7)
@every_script
def test_a_second_interrupt_ends_at_once(algo, scripts, work, whole, tmp_path):
    twice = "[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
    patch = at(*PLACES["optimizer step"], signal=twice)
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=130, patch=patch)
    assert "stopped after" not in process.out
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])


@pytest.mark.case(6)
@pytest.mark.slow
@pytest.mark.parametrize("to", ["a process", "torchrun"])
@pytest.mark.parametrize("algo", ALGOS)
def test_a_signal_to_one_of_two_processes_stops_both(algo, to, work, tmp_path):
    target = {"a process": "os.getpid()", "torchrun": "os.getppid()"}[to]
    patch = at(*PLACES["optimizer step"], signal=f"os.kill({target}, signal.SIGTERM)")
    done = launch(torchrun(2), command(work, algo, "whole"), tmp_path, work)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    done = launch(torchrun(2), driven(patch, tmp_path, command(work, algo, "run")), tmp_path, work)
    assert done.returncode != 0, done.stderr
    assert re.search(r"stopped after step \d+; to continue: torchrun --nproc_per_node 2 ", done.stdout)
    done = launch(torchrun(2), command(work, algo, "run"), tmp_path, work)
    assert done.returncode == 0 and "continuing run from step" in done.stdout, done.stderr
    same(tmp_path / "run", tmp_path / "whole")
    ends_clean(tmp_path / "run")


@pytest.mark.case(24)
@every_script
def test_the_run_directory_is_locked_until_its_process_ends(algo, scripts, work, whole, tmp_path):
    first = scripts.start(
        command(work, algo, "run"), tmp_path, patch=at("torch.optim", "AdamW.step", 3, signal=SIGSTOP)
    )
    wait_for_stop(first.pid)
    before = files(tmp_path / "run")
    second = scripts.run(command(work, algo, "run"), tmp_path, expect=2)
    assert f"in use by process {first.pid} " in second.err
    assert len(second.err.strip().splitlines()) == 1
    assert files(tmp_path / "run") == before
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -9
    scripts.run(command(work, algo, "run"), tmp_path)  # the lock is free
    same(tmp_path / "run", whole(algo)[0])


def wait_for_stop(pid):
    end = time.monotonic() + 200
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.case(5)
@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_the_launcher_dies_and_its_child_lives_on(algo, scripts, work, whole, tmp_path):
    patch = at("torch.optim", "AdamW.step", 3, signal=SIGSTOP)
    argv = [BIN / "accelerate", "launch", *driven(patch, tmp_path, command(work, algo, "run"))]
    with open(tmp_path / "output", "w") as output:
        options = {"cwd": tmp_path, "env": environment(work), "stdout": output, "stderr": output}
        launcher = subprocess.Popen(list(map(str, argv)), **options)
    end = time.monotonic() + 200
    while not (tmp_path / "run/.lock").exists() or not (tmp_path / "run/.lock").read_text():
        assert time.monotonic() < end and launcher.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.02)
    child = int((tmp_path / "run/.lock").read_text().split()[0])
    wait_for_stop(child)
    launcher.kill()
    launcher.wait()
    process = scripts.run(command(work, algo, "run"), tmp_path, expect=2)
    assert f"in use by process {child} " in process.err
    os.kill(child, signal.SIGKILL)
    end = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])


# ---- The same command, another command -------------------------------------------------------------------------------

LONGER = {"ppo": ["--total-episodes", "64"], "grpo": ["--total-episodes", "64"], "ddpo": ["--num-epochs", "8"]}


@pytest.mark.case(13)
@every_script
def test_resume_of_what_is_not_there(algo, scripts, work, tmp_path):
    process = scripts.run(command(work, algo, "run", "--resume", "runs/nope"), tmp_path, expect=2)
    assert "runs/nope" in process.err and len(process.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.case(14)
@every_script
def test_another_configuration_is_an_error_that_lists_the_differences(algo, ended, scripts, work, tmp_path):
    run, _ = ended(algo, tmp_path / "run")
    before = files(run)
    shutil.copytree(work / ("pipeline" if algo == "ddpo" else "model"), tmp_path / "other")
    data = (work / dict(zip(*[iter(SETTINGS[algo].split())] * 2, strict=False))["--dataset"]).read_text()
    (tmp_path / "other.jsonl").write_text("".join(data.splitlines(keepends=True)[1:]))
    more = "--lr 1e-4 --seed 7 --dataset other.jsonl --model other --weight-decay 0.2 --save-every 8".split()
    process = scripts.run(command(work, algo, "run", *more), tmp_path, expect=2)
    for flag in "lr: was", "seed: was 1, is 7", "dataset: was", "model: was", "weight-decay: was 0.1, is 0.2":
        assert f"--{flag}" in process.err, flag
    assert "--save-every" not in process.err, "a neutral flag is no difference"
    assert "--resume" in process.err and "--run-dir" in process.err, "what to do"
    assert files(run) == before


@pytest.mark.case(15)
@every_script
def test_a_longer_run_from_a_checkpoint(algo, scripts, work, tmp_path):
    """With a constant learning rate the steps are those of the longer run from its start."""
    more = ["--lr-schedule", "constant", *LONGER.get(algo, ["--total-steps", "16"])]
    scripts.run(command(work, algo, "short", "--lr-schedule", "constant"), tmp_path)
    scripts.run(command(work, algo, "long", *more), tmp_path)
    checkpoints = sorted((tmp_path / "short/checkpoints").iterdir())
    scripts.run(command(work, algo, "more", *more, "--resume", checkpoints[-1]), tmp_path)
    for name in "metrics.jsonl", "samples.jsonl":
        whole, part = ((tmp_path / x / name).read_bytes() for x in ("long", "more"))
        assert part and whole.endswith(part), name
    for path in (tmp_path / "long/hf_model").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "more" / path.relative_to(tmp_path / "long")).read_bytes()


@pytest.mark.case(15, "sft")
def test_the_same_command_again_where_its_start_is_pruned(scripts, work, whole, tmp_path):
    argv = [*command(work, "sft", "run"), "--total-steps", "20", "--resume", "run/checkpoints/step_00000012"]
    for folder in "killed", "whole":
        shutil.copytree(whole("sft")[0], tmp_path / folder / "run")
    scripts.run(argv, tmp_path / "whole")
    scripts.run(argv, tmp_path / "killed", expect=-9, patch=at("torch.optim", "AdamW.step", 7))
    assert not (tmp_path / "killed/run/checkpoints/step_00000012").exists()
    scripts.run(argv, tmp_path / "killed")
    same(tmp_path / "killed/run", tmp_path / "whole/run")


@pytest.mark.case(16)
@every_script
def test_a_finished_run_says_where_it_is(algo, scripts, work, whole, tmp_path):
    folder = Path(shutil.copytree(whole(algo)[0], tmp_path / "run"))
    before = files(folder)
    process = scripts.run(command(work, algo, "run"), tmp_path)
    assert "run is finished" in process.out and "run/hf_model" in process.out
    assert process.err == "" and files(folder) == before


@pytest.mark.case(18)
@every_script
def test_a_checkpoint_of_another_script(algo, ended, scripts, work, tmp_path):
    other = ALGOS[(ALGOS.index(algo) + 1) % len(ALGOS)]
    run, steps = ended(other, tmp_path / "other")
    path = f"other/checkpoints/step_{steps[-1]:08d}"
    process = scripts.run(command(work, algo, "run", "--resume", path), tmp_path, expect=2)
    assert f"--resume {path} holds other weights" in process.err
    assert not (tmp_path / "run").exists()


@pytest.mark.case(19)
@every_script
def test_a_checkpoint_of_another_version(algo, ended, scripts, work, tmp_path):
    run, steps = ended(algo, tmp_path / "source")
    newer = run / f"checkpoints/step_{steps[-1]:08d}"
    state = json.loads((newer / "state.json").read_text())
    (newer / "state.json").write_text(json.dumps(state | {"format": 99}))
    manifest = json.loads((newer / "MANIFEST.json").read_text())
    manifest["state.json"]["sha256"] = hashlib.sha256((newer / "state.json").read_bytes()).hexdigest()
    (newer / "MANIFEST.json").write_text(json.dumps(manifest))
    process = scripts.run(command(work, algo, "run", "--resume", newer), tmp_path, expect=2)
    assert "another version" in process.err and not (tmp_path / "run").exists()


# ---- Surroundings ----------------------------------------------------------------------------------------------------

CLOCK = """
import itertools, time
now, ticks = time.time, itertools.count()
time.time = lambda: now() - 3600 * next(ticks)  # an hour back at each call
"""
SURROUNDINGS = {
    "clock": (CLOCK, {}),
    "time zone and locale": ("", {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "LANG": "tr_TR.UTF-8"}),
    "hash seed": ("", {"PYTHONHASHSEED": "1"}),
    "another hash seed": ("", {"PYTHONHASHSEED": "4711"}),
}


@pytest.mark.case(66)
@pytest.mark.slow
@pytest.mark.parametrize("what", SURROUNDINGS)
@pytest.mark.parametrize("algo", ALGOS)
def test_clock_locale_and_hash_seed_change_nothing(algo, what, work, whole, tmp_path):
    patch, env = SURROUNDINGS[what]
    done = launch([sys.executable], driven(patch, tmp_path, command(work, algo, "run")), tmp_path, work, **env)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole(algo)[0])


@pytest.mark.case(67)
@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_another_number_of_threads_changes_rounding_only(algo, scripts, work, tmp_path):
    for threads in "1", "2":
        more = ["--threads", threads, "--dtype", "float64"] + ["--attn-implementation", "sdpa"] * (algo != "ddpo")
        scripts.run(command(work, algo, threads, *more), tmp_path)
    one, two = (lines(tmp_path / threads / "metrics.jsonl") for threads in "12")
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)


@pytest.mark.case(63)
@every_script
def test_secrets_of_the_environment_stay_there(algo, scripts, work, tmp_path):
    canaries = {"HF_TOKEN": "hf_CANARYCANARY", "WANDB_API_KEY": "0123456789abcdefCANARY" * 2, "MY_PASSWORD": "CANARY3"}
    process = scripts.run(command(work, algo, "run"), tmp_path, **canaries)
    assert "CANARY" not in process.out + process.err
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) > 20 and [path for path in found if b"CANARY" in path.read_bytes()] == []
