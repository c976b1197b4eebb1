"""Runs that are killed, starved, torn and continued. The default run has a sample: see benchmarks/faults/README.md

kill -9 loses nothing that a system call has written. So one run is traced, its directory copied before each system call
that changes it, and the same command given in every copy. (A power failure may lose what was written and not yet
synced; fsync comes before each rename, which is not tested here.)
"""

import ctypes
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from harness import ALGOS, ROOT, SETTINGS, at, by_default, command, files, launch, lines, same
from helpers import log

from benchmarks.tables import by_step

TERM = signal.SIGTERM
HERE = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"  # in front of a patch of the repository


def table(rows, algos=ALGOS):
    """Parameters of {name: (script, case, *values)}: a test for each script, of which the default run has the named."""
    parameters = []
    for algo, (name, (default, number, *values)) in product(algos, rows.items()):
        marks = [pytest.mark.case(number)]
        if algo != default:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(algo, *values, marks=marks, id=f"{algo}-{name}"))
    return parameters


every_script = by_default("ppo")


@pytest.fixture
def run(scripts, work, tmp_path):
    """run(algo, *flags, expect, patch, **environment): a script's command in tmp_path/run, the same each time."""

    def start(algo, *more, **options):
        return scripts.run(command(work, algo, "run", *more), tmp_path, **options)

    return start


@pytest.fixture
def again(run, whole, tmp_path):
    """again(algo, *flags): the same command once more ends with the bytes of the uninterrupted run."""

    def start(algo, *more):
        process = run(algo, *more)
        ends_as(tmp_path / "run", whole(algo)[0])
        return process

    return start


@pytest.fixture
def refused(scripts, work, tmp_path):
    """refused(algo, run_dir, *flags, patch) -> the sentence of a command that ends at once and changes nothing."""

    def start(algo, run_dir, *more, **options):
        before = files(tmp_path)
        process = scripts.run(command(work, algo, run_dir, *more), tmp_path, expect=2, **options)
        assert files(tmp_path) == before
        assert run_dir == "run" or not (tmp_path / run_dir).exists()
        return process.err

    return start


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
        stopped = os.WSTOPSIG(status)
        signal = 0
        if stopped == 5 | 0x80:  # SIGTRAP of a system call
            ptrace(GET_SYSCALL_INFO, ctypes.sizeof(info), ctypes.addressof(info))
            if info[0] & 255 == 1 and info[3] in CHANGES[platform.machine()]:
                look()
        elif not status >> 16:  # no event
            signal = stopped  # one of its own
        ptrace(SYSCALL, 0, signal)


def tree(folder):
    """What tells two states of a directory apart, without reading the files."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (found.st_ino, found.st_size, found.st_mtime_ns) for path, found in stats.items()}


def copies(folder, argv, scripts, target):
    """The states, oldest first, that a folder goes through while a command runs in it, each a copy of it."""
    wait = "import time\nwhile 'TracerPid:\\t0' in open('/proc/self/status').read(): time.sleep(0.01)\n"
    process = scripts.start(argv, folder, patch=wait)
    seen = []
    target.mkdir()

    def look():
        now = tree(folder)
        if now not in seen[-1:]:
            shutil.copytree(folder, target / f"{len(seen):04d}")
            seen.append(now)

    before_changes(process.pid, look)
    assert process.wait() == 0, process.err
    return sorted(target.iterdir())


def ends_as(folder, whole, checkpoints=3):
    """With the bytes of a whole run, and at most so many checkpoints: the newest two and the best."""
    same(folder, whole)
    records = lines(folder / "metrics.jsonl")
    names = [(record["step"], name) for record in records for name in record if name != "step"]
    assert len(names) == len(set(names)) and names == sorted(names, key=lambda name: name[0]), "each step once"
    assert not list(folder.parent.rglob(".tmp*")), "what a killed process left half-written is removed"
    assert len(list(folder.glob("checkpoints/step_*"))) <= checkpoints


NEW, SAME, OTHER = "a new run", "the same command", "another command"
HOW = [pytest.param(how, marks=pytest.mark.case(number)) for how, number in ((NEW, 2), (SAME, 78), (OTHER, 78))]


@pytest.mark.parametrize("how", HOW)
@by_default()
def test_killed_before_each_change_of_a_file(algo, how, ended, scripts, work, whole, tmp_path):
    """A whole run, and the first steps of one that continues, with torn metrics. Another command continues from the
    first checkpoint under another learning rate."""
    argv = command(work, algo, "run")
    expected = whole(algo)[0]
    if how == NEW:
        (tmp_path / "at").mkdir()
    else:
        folder, steps = ended(algo, tmp_path / "at/run")
        tear(folder / f"checkpoints/step_{steps[-1]:08d}")
    if how == OTHER:
        argv += ["--resume", f"run/checkpoints/step_{steps[0]:08d}", "--lr", "5e-3"]
        shutil.copytree(tmp_path / "at", tmp_path / "whole")
        scripts.run(argv, tmp_path / "whole")
        expected = tmp_path / "whole/run"
    states = copies(tmp_path / "at", argv, scripts, tmp_path / "states")
    assert len(states) > 150 or how != NEW
    for state in states if how == NEW else states[:36]:
        scripts.run(argv, state)
        # a kill between the last checkpoint and its pruning leaves one that nothing prunes later
        ends_as(state / "run", expected, checkpoints=4)
        shutil.rmtree(state)


# ---- What ends a run, after which the same command ends with the same bytes ------------------------------------------

NO_ROOM = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9000, r.RLIM_INFINITY))"  # for files of more bytes
HALF_A_LINE = """open(args[0].dir / "metrics.jsonl", "a").write('{"step": 20'); raise OSError("no space left")"""
FAIL = "raise LookupError('no server')"
STEP = ("torch.optim", "AdamW.step", 7)
EXCESS = "import torch; torch.empty(2**60, dtype=torch.uint8)"

# What happens: (script of the default run, case, exit code, where a signal is sent or a statement runs, the output).
FAULTS = {
    "between steps": (None, 1, -9, at("common.run", "Run.stop_requested", 3), ""),
    "optimizer step": ("ilql", 3, -9, at(*STEP), ""),
    "logging": ("sft", 3, -9, at("common.run", "Run.append", 6), ""),
    "evaluation": (None, 3, -9, at("common.run", "Run.samples", 2), ""),
    "model of a checkpoint": ("ppo", 2, -9, at("safetensors.torch", "save_file", 5, tear=True), ""),
    "two interrupts": ("sft", 7, 130, at(*STEP, signal="[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"), ""),
    "an error in an update": ("ppo", 33, 1, at(*STEP, signal=FAIL), "last step on disk is in run/checkpoints/step_"),
    "no memory": ("sft", 65, 2, at(*STEP, signal=EXCESS), "out of memory: lower --micro-batch-size"),
    "a full disk in a line": ("sft", 77, 1, at("common.run", "Run.append", 9, signal=HALF_A_LINE), "no space left"),
    "a full disk at the export": ("sft", 21, 2, at("common.run", "Run.finish", 1, signal=NO_ROOM), "too large"),
}
REWARD = {"reward": ("ppo", 3, -9, at("common.functions", "call_reward", 5), "")}
REWARDED = "ppo", "grpo", "ddpo"


@pytest.mark.parametrize(("algo", "code", "patch", "printed"), table(FAULTS) + table(REWARD, REWARDED))
def test_a_run_that_ended_continues_with_the_same_bytes(algo, code, patch, printed, run, again, tmp_path):
    process = run(algo, expect=code, patch=patch)
    assert printed in process.out + process.err
    step = 4 if algo in ("ppo", "grpo") else 6  # the last one of an iteration
    assert (f"\nstopped; step {step} is saved; to continue: " in process.out) == (code == 130)
    assert not (tmp_path / "run/README.md").exists()
    again(algo)


@pytest.mark.case(4)
@every_script
def test_killed_three_times(algo, run, again):
    """Once before the first checkpoint, once behind it, once in the first step after continuing."""
    for number in 3, 7, 1:
        run(algo, expect=-9, patch=at("torch.optim", "AdamW.step", number))
    again(algo)


FORGET = {
    "the optimizer": """
from torch.distributed.checkpoint import state_dict
state_dict.set_optimizer_state_dict = lambda *args, **options: None
""",
    "one row of the data": """
import types, numpy
import common.seeding as s
rng = s.rng
def shifted(seed, stream, *ids):
    drawn = rng(seed, stream, *ids)
    if stream != "data":
        return drawn
    return types.SimpleNamespace(permutation=lambda size: numpy.roll(drawn.permutation(size), -1))
s.rng = shifted
""",
    "the lines of lost steps": "c.keep_lines = lambda *args, **options: None",
}
FORGET_STATE = """
read = c.read_checkpoint
c.read_checkpoint = lambda path: {key: value for key, value in read(path).items() if key != NAME}"""
FORGOTTEN = table({what: ("ppo", 76, patch) for what, patch in FORGET.items()})
for algo, name in ("ppo", "kl_coef"), ("ppo", "moments"), ("ddpo", "rewards"):
    FORGOTTEN += table({name: ("ppo", 76, FORGET_STATE.replace("NAME", repr(name)))}, [algo])


@pytest.mark.parametrize(("algo", "patch"), FORGOTTEN)
def test_a_resume_that_forgets_something_is_noticed(algo, patch, ended, run, whole, tmp_path):
    """Negative control of all tests here."""
    folder, _ = ended(algo, tmp_path / "run")
    run(algo, patch=f"{HERE}import common.checkpoint as c\n{patch}")
    with pytest.raises(AssertionError):
        ends_as(folder, whole(algo)[0])


# ---- Broken files ----------------------------------------------------------------------------------------------------


def tear(checkpoint):
    """What a killed process leaves: last lines without an end, half of an export, half-written and removed states."""
    folder = checkpoint.parents[1]
    for name in "metrics.jsonl", "perf.jsonl", "samples.jsonl":
        with open(folder / name, "a") as file:
            file.write('{"step": 20, "objective/kl": 0.12')
    for name in "checkpoints/.tmp-step_00000020", "checkpoints/step_00000019", ".tmp-hf_model":
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"half")


def litter(checkpoint):
    for place in checkpoint, checkpoint.parent, checkpoint.parents[1]:
        (place / "notes.txt").write_text("junk")


@pytest.mark.parametrize(("algo", "harm"), table({"files": ("sft", 11, litter), "lines": ("ppo", 23, tear)}))
def test_a_littered_or_torn_run_continues(algo, harm, ended, again, tmp_path):
    folder, steps = ended(algo, tmp_path / "run")
    harm(folder / f"checkpoints/step_{steps[-1]:08d}")
    process = again(algo)
    assert f"continuing run from step {steps[-1]}" in process.out
    assert [x["step"] for x in by_step(lines(folder / "perf.jsonl"))] == [x["step"] for x in log(folder)][1:]


@pytest.mark.case(12)
@every_script
def test_a_checkpoint_that_cannot_be_read_is_an_error(algo, ended, refused, again, tmp_path):
    folder, steps = ended(algo, tmp_path / "run")
    newest = folder / f"checkpoints/step_{steps[-1]:08d}"
    (newest / "state.json").write_text("")
    assert f"step_{steps[-1]:08d} cannot be read (" in refused(algo, "run")
    shutil.rmtree(newest)
    again(algo)


@pytest.mark.case(20)
@every_script
def test_a_full_disk_ends_the_run_and_older_checkpoints_stay(algo, run, again, tmp_path):
    patch = at("common.checkpoint", "write_checkpoint", 2, signal=NO_ROOM.replace("9000", "3000"))
    process = run(algo, expect=2, patch=patch)
    assert re.search(r"error: \S+/run/checkpoints/step_\d+ cannot be written: ", process.err)
    assert "the last step on disk is in run/checkpoints/step_" in process.err and "Traceback" not in process.err
    [saved] = (tmp_path / "run/checkpoints").iterdir()
    assert f"continuing run from step {int(saved.name[5:])}" in again(algo).out


# ---- Errors of functions ---------------------------------------------------------------------------------------------

MEASURED = "ppo", "grpo", "ilql", "sft", "dpo", "ddpo"  # with --metric
FAILURES = table({"evaluation": ("sft", 29, ("common.functions", "call_metric", 3))}, MEASURED)
FAILURES += table({"reward": ("ppo", 29, ("common.functions", "call_reward", 5))}, REWARDED)


@pytest.mark.parametrize(("algo", "place"), FAILURES)
def test_an_error_between_updates_loses_nothing(algo, place, run, again, tmp_path):
    process = run(algo, "--save-every", "1000", expect=1, patch=at(*place, signal=FAIL))
    assert "LookupError: no server" in process.err
    path = max((tmp_path / "run/checkpoints").iterdir())
    state = json.loads((path / "state.json").read_text())
    last = process.err.splitlines()[-1]  # behind the traceback
    assert last.startswith(f"the last step on disk is in run/checkpoints/{path.name}; the same command continues there")
    assert state["step"] == lines(tmp_path / "run/metrics.jsonl")[-1]["step"]
    every = 4 if algo in ("ilql", "sft", "dpo", "ddpo") else 8
    lacks_evaluation = "call_metric" in place
    assert (state["evaluated"] < state["step"] // every * every) == lacks_evaluation
    if lacks_evaluation:  # which is repeated: a signal ends it, and a kill behind it leaves its lines
        run(algo, "--save-every", "1000", expect=143, patch=at("common.functions", "call_metric", 1, signal=TERM))
        run(algo, "--save-every", "1000", expect=-9, patch=at("common.run", "Run.stop_requested", 1))
        steps = [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")]
        assert steps[-2:] == [state["step"]] * 2
    again(algo, "--save-every", "1000")


def test_ten_minutes_are_lost_at_most(scripts, work, tmp_path):
    """SAVE_SECONDS, here none; --save-every 0 switches them off."""
    patch = f"{HERE}import common.run as l\nl.SAVE_SECONDS = 0"
    saved = {}
    for every in "1000", "0":
        argv = command(work, "sft", every, "--save-every", every, "--keep-checkpoints", "99")
        scripts.run(argv, tmp_path, patch=patch)
        saved[every] = sorted(int(path.name[5:]) for path in (tmp_path / every / "checkpoints").iterdir())
    assert saved["1000"] == [*range(1, 13)]
    assert set(saved["0"]) <= {4, 8, 12}, "the best evaluations alone"


FORKS = """
import multiprocessing, os, signal, sys

def reward(samples, **columns):
    for code in (3, 0):
        child = os.fork()
        if child == 0 and code:
            sys.exit(code)
        if child == 0:
            return []
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends its processes by SIGTERM
        assert pool.apply(signal.getsignal, [signal.SIGTERM]) == signal.SIG_DFL
        return pool.map(len, samples)
"""


@pytest.mark.case(29, "ppo")
def test_a_reward_that_forks(run, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    process = run("ppo", "--reward", "forks.py:reward")
    assert (tmp_path / "run/README.md").exists() and "Traceback" not in process.err


# ---- Signals and the lock --------------------------------------------------------------------------------------------

INT = signal.SIGINT
SIGNALS = {  # (default script, case, exit code, signal, where)
    "a step": (None, 6, 143, TERM, STEP),
    "the first iteration": ("ppo", 6, 143, TERM, ("torch.optim", "AdamW.step", 3)),  # of ppo it has four steps
    "a step, interrupt": ("sft", 7, 130, INT, STEP),
    "the export of the best": (None, 8, 143, TERM, ("common.checkpoint", "replacing", 1)),
    "the end": (None, 8, 0, TERM, ("common.run", "Run.finish", 1)),  # after the last step, it ends as without
}


@pytest.mark.parametrize(("algo", "code", "which", "place"), table(SIGNALS))
def test_a_signal_saves_and_names_the_command(algo, code, which, place, scripts, work, whole, tmp_path):
    argv = command(work, algo, "run", "--save-every", "0")  # so that the signal's own checkpoint is the one to continue
    process = scripts.run(argv, tmp_path, expect=code, patch=at(*place, signal=which))
    folder = tmp_path / "run"
    assert (folder / "README.md").exists() == (code == 0)
    if code > 0:
        text = process.out.splitlines()[-1]
        step = int(re.fullmatch(r"stopped; step (\d+) is saved; to continue: .*", text)[1])
        assert (folder / f"checkpoints/step_{step:08d}/state.json").exists()
        assert lines(folder / "metrics.jsonl")[-1]["step"] == step
        argv = shlex.split(text.partition("to continue: ")[2])[1:]
    scripts.run(argv, tmp_path)
    ends_as(folder, whole(algo)[0])


@pytest.mark.case(8)
@pytest.mark.parametrize("which", [TERM, INT])
@pytest.mark.parametrize("place", ["Run.__init__", "Run.samples"])  # while loading, and at the first evaluation
@by_default("sft")
def test_a_signal_before_the_first_step_leaves_nothing(algo, place, which, run, tmp_path):
    code = -TERM if (place, which) == ("Run.__init__", TERM) else 128 + which
    process = run(algo, expect=code, patch=at("common.run", place, 1, signal=which))
    assert process.err == "" and "stopping" not in process.out
    said = process.out.endswith("stopped; there was no checkpoint yet, so nothing is kept\n")
    assert said == (place == "Run.samples")  # before that, nothing has been shown
    assert not (tmp_path / "run").exists()


def wait_until(holds):
    end = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def stat(pid):
    """A process in the kernel's table: its state (T stopped, Z ended), its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has left the table, perhaps while it was read
        return "Z"


@pytest.mark.case(5)
@pytest.mark.case(24)
@every_script
def test_the_run_directory_is_locked_until_its_process_ends(algo, scripts, work, refused, again, tmp_path):
    """Also when the process that has started it is killed."""
    held = at("torch.optim", "AdamW.step", 3, signal=signal.SIGSTOP)  # it stands still in the middle of a step
    pid = scripts.start(command(work, algo, "run"), tmp_path, patch=held).pid
    wait_until(lambda: stat(pid)[0] == "T")
    launcher = int(stat(pid)[1])
    os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: stat(launcher)[0] == "Z")
    message = refused(algo, "run")
    assert f"in use by process {pid} " in message and len(message.strip().splitlines()) == 1
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stat(pid)[0] == "Z")
    again(algo)


# ---- The same command, another command -------------------------------------------------------------------------------


@pytest.mark.case(14)
@every_script
def test_another_configuration_is_an_error_that_lists_the_differences(algo, ended, refused, work, tmp_path):
    ended(algo, tmp_path / "run")
    shutil.copytree(work / ("pipeline" if algo == "ddpo" else "model"), tmp_path / "other")
    data = re.search(r"--dataset (\S+)", SETTINGS[algo])[1]
    (tmp_path / "other.jsonl").write_text((work / data).read_text().partition("\n")[2])
    more = "--lr 1e-4 --seed 7 --dataset other.jsonl --model other --weight-decay 0.2 --save-every 8".split()
    message = refused(algo, "run", *more)
    for flag in "lr: was", "seed: was 1, is 7", "dataset: was", "model: was", "weight-decay: was 0.1, is 0.2":
        assert f"--{flag}" in message, flag
    assert "--save-every" not in message, "a neutral flag is no difference"
    assert "--resume" in message and "--run-dir" in message, "what to do"
    ended(algo, tmp_path / "elsewhere")  # whose checkpoints are not to be continued in this directory
    assert refused(algo, "run", *more, "--resume", "elsewhere") == message


@pytest.mark.case(15)
@by_default("sft")
def test_a_longer_run_from_a_checkpoint(algo, scripts, work, tmp_path):
    """With a constant learning rate the steps are those of the longer run from its start."""
    longer = {"ppo": "--total-episodes=64", "grpo": "--total-episodes=64", "ddpo": "--num-epochs=8"}
    more = ["--lr-schedule", "constant", longer.get(algo, "--total-steps=16")]
    scripts.run(command(work, algo, "short", "--lr-schedule", "constant"), tmp_path)
    scripts.run(command(work, algo, "long", *more), tmp_path)
    checkpoints = sorted((tmp_path / "short/checkpoints").iterdir())
    scripts.run(command(work, algo, "more", *more, "--resume", checkpoints[-1]), tmp_path)
    for name in "metrics.jsonl", "samples.jsonl":
        part = (tmp_path / "more" / name).read_bytes()
        assert part and (tmp_path / "long" / name).read_bytes().endswith(part), name
    for path in (tmp_path / "long/hf_model").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "more" / path.relative_to(tmp_path / "long")).read_bytes()


@pytest.mark.case(15, "sft")
def test_the_same_command_again_where_its_start_is_pruned(scripts, work, whole, tmp_path):
    argv = [*command(work, "sft", "run"), "--total-steps", "20", "--resume", "run/checkpoints/step_00000012"]
    for folder in "killed", "whole":
        shutil.copytree(whole("sft")[0], tmp_path / folder / "run")
    scripts.run(argv, tmp_path / "whole")
    scripts.run(argv, tmp_path / "killed", expect=-9, patch=at(*STEP))
    assert not (tmp_path / "killed/run/checkpoints/step_00000012").exists()
    scripts.run(argv, tmp_path / "killed")
    same(tmp_path / "killed/run", tmp_path / "whole/run")
    assert "total_steps: 20" in (tmp_path / "killed/run/config.yaml").read_text()


@pytest.mark.case(16)
@every_script
def test_a_finished_run_says_where_it_is(algo, run, whole, tmp_path):
    folder = Path(shutil.copytree(whole(algo)[0], tmp_path / "run"))
    before = files(folder)
    process = run(algo)
    assert "run is finished" in process.out and "run/hf_model" in process.out
    assert process.err == "" and files(folder) == before
    again = run(algo, "--seed", "7", expect=2)
    assert "by --resume run (it has ended: with more steps or episodes)\n" in again.err and files(folder) == before


@pytest.mark.case(13)
@pytest.mark.case(18)
@pytest.mark.case(19)
@every_script
def test_a_checkpoint_that_is_not_there_or_of_another_script_or_version(algo, ended, refused, tmp_path):
    message = refused(algo, "new", "--resume", "runs/nope")
    assert "runs/nope" in message and len(message.strip().splitlines()) == 1
    other = ALGOS[(ALGOS.index(algo) + 1) % len(ALGOS)]
    _, steps = ended(other, tmp_path / "other")
    path = f"other/checkpoints/step_{steps[-1]:08d}"
    assert f"--resume {path} is of a run of {other}.py" in refused(algo, "new", "--resume", path)
    patch = f"{HERE}import common.checkpoint as c\nc.FORMAT = 99"
    assert "another version" in refused(algo, "new", "--resume", path, patch=patch)


# ---- Surroundings ----------------------------------------------------------------------------------------------------

CLOCK = """
import itertools, runpy, sys, time
now, ticks = time.time, itertools.count()
time.time = lambda: now() - 3600 * next(ticks)  # an hour back at each call
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SURROUNDINGS = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "4711"}


@pytest.mark.case(66)
@by_default()
def test_clock_time_zone_locale_and_hash_seed_change_nothing(algo, work, whole, tmp_path):
    done = launch([sys.executable, "-c", CLOCK], command(work, algo, "run"), tmp_path, work, **SURROUNDINGS)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole(algo)[0])


@pytest.mark.case(67)
@by_default()
def test_another_number_of_threads_changes_rounding_only(algo, scripts, work, tmp_path):
    metrics = []
    for threads in "1", "2":
        more = ["--threads", threads, "--dtype", "float64"]
        if algo != "ddpo":
            more += ["--attn-implementation", "sdpa"]
        scripts.run(command(work, algo, threads, *more), tmp_path)
        metrics.append(log(tmp_path / threads))
    for a, b in zip(*metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
