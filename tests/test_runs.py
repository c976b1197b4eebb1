"""Whole runs as a user starts them, killed and continued: `python -m pytest tests/test_runs.py`

Every run is a process of its own with its own command line. Most of them are forked from a server that has imported
the libraries and nothing of this repository (a second per run instead of five); `python`, `accelerate launch` and
`torchrun` themselves are used where they matter. Kills are exact: the reward function of these tests, or a patched
library function, sends the signal at its n-th call.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

USER_FILE = '''
"""A reward and a metric; SIGNAL_AT=reward:5:9 sends this process signal 9 at the fifth call of reward."""
import os

calls = {"reward": 0, "metric": 0}


def count(name):
    calls[name] += 1
    which, number, signal = os.environ.get("SIGNAL_AT", "none:0:0").split(":")
    if which == name and calls[name] == int(number) and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), int(signal))


def reward(samples, prompts, outputs, shift, **columns):
    count("reward")
    return [(sum(map(ord, sample)) + s) % 11 / 11 for sample, s in zip(samples, shift)]


def metric(samples, prompts, outputs, **columns):
    count("metric")
    return {"vowels": [sum(c in "aeiou" for c in output) for output in outputs]}


def bad_reward(samples, **columns):
    return [1.0] * (len(samples) - 1)
'''

SERVER = """
import json, os, runpy, signal, sys, traceback
import torch, transformers, accelerate, accelerate.tracking, tyro, yaml, rich.console, rich.table, matplotlib.figure
import torch.distributed.checkpoint.state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

def script(job):
    for number, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{job['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv, code = job["argv"], 0
    try:
        exec(job["patch"], {})
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    job = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        script(job)
    for name, value in ("pid", lambda: pid), ("code", lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])):
        value = value()
        with open(f"{job['folder']}/{name}.tmp", "w") as file:
            file.write(str(value))
        os.rename(f"{job['folder']}/{name}.tmp", f"{job['folder']}/{name}")
    os._exit(0)
"""

# At the n-th call of module.name: SIGKILL, before or (tear) in the middle of what it does.
KILL_AT = """
import os, signal, {module} as module
original, calls = module.{name}, 0
def killer(*args, **options):
    global calls
    calls += 1
    if calls == {number}:
        if {tear}:
            open(args[1], "wb").write(b"torn")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)
module.{name} = killer
"""


def kill_at(module, name, number, tear=False):
    return KILL_AT.format(module=module, name=name, number=number, tear=tear)


def environment(work, **more):
    """What runs see: no network, no accounts, one thread."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    fixed = {"PLAINRL_CACHE": str(work / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return keep | fixed | {"PYTHONDONTWRITEBYTECODE": "1"} | more


class Process:
    """A script that the server has started: pid, wait() -> exit code; out, err: what it has printed."""

    def __init__(self, folder):
        self.folder = folder

    def read(self, name, timeout):
        end = time.monotonic() + timeout
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"no {name} after {timeout} s: {self.out}{self.err}"
            time.sleep(0.01)
        return int((self.folder / name).read_text())

    @property
    def pid(self):
        return self.read("pid", 60)

    def wait(self, timeout=120):
        return self.read("code", timeout)

    @property
    def out(self):
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def err(self):
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""


class Scripts:
    """start() and run() a command line in a directory; the first word is the script."""

    def __init__(self, work):
        self.work, self.number = work, 0
        command = [sys.executable, "-c", SERVER]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment(work), cwd=work)

    def start(self, argv, cwd, patch="", **env):
        self.number += 1
        folder = self.work / f"job{self.number}"
        folder.mkdir()
        job = {"argv": list(map(str, argv)), "cwd": str(cwd), "env": environment(self.work, **env), "patch": patch}
        self.server.stdin.write(json.dumps(job | {"folder": str(folder)}) + "\n")
        self.server.stdin.flush()
        return Process(folder)

    def run(self, argv, cwd, expect=0, patch="", **env):
        process = self.start(argv, cwd, patch, **env)
        code = process.wait()
        assert code == expect, f"exit code {code}, expected {expect}\n{process.out}\n{process.err}"
        return process


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with a tiny GPT-2, rows and functions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.tasks import randomwalks

    work, tokenizer = tmp_path_factory.mktemp("work"), randomwalks.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=2, n_embd=12, n_head=2, n_positions=32, **special)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    (work / "user.py").write_text(USER_FILE)
    prompts = [{"prompt": p, "shift": i} for i, p in enumerate("b cd efg h ij klm n".split())]
    rows = [{"prompt": w[0], "completion": w[1:]} for w in randomwalks.graph().walks[:30]]
    for name, table in {"prompts": prompts, "eval": prompts[:5], "rows": rows[:23], "held_out": rows[23:]}.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return work


@pytest.fixture(scope="module")
def scripts(work):
    scripts = Scripts(work)
    yield scripts
    scripts.server.stdin.close()
    scripts.server.wait(30)


def flags(work, algo):
    """A run of a second in which all that a checkpoint must hold matters: 6 iterations x 4 steps (ppo), 12 (sft)."""
    data = {"model": "model", "dataset": "prompts.jsonl", "eval-dataset": "eval.jsonl", "metric": "user.py:metric"}
    if algo == "ppo":
        text = "--total-episodes 48 --rollout-batch-size 8 --batch-size 4 --ppo-epochs 2 --kl-target 0.5 --lr 1e-2 "
        text += "--kl-horizon 16 --temperature 0.7 --max-new-tokens 6 --save-every 4 --eval-every 8 --value-head mlp"
        data["reward"] = "user.py:reward"
    else:
        text = "--total-steps 12 --batch-size 8 --lr 3e-2 --max-new-tokens 6 --save-every 2 --eval-every 4"
        data |= {"dataset": "rows.jsonl", "eval-dataset": "held_out.jsonl", "eval-prompts": "eval.jsonl"}
    text += " --lr-schedule cosine --warmup-steps 3 --weight-decay 0.1 --threads 1"
    return text.split() + [word for name, value in data.items() for word in (f"--{name}", f"{work}/{value}")]


def command(work, algo, run_dir, *more, root=ROOT):
    return [root / f"algos/{algo}.py", *flags(work, algo), "--run-dir", run_dir, *more]


@pytest.fixture(scope="module")
def whole(scripts, work):
    """{algo: directory} of uninterrupted runs, with their output."""
    found = {}

    def get(algo):
        if algo not in found:
            folder = work / f"whole-{algo}"
            found[algo] = folder, scripts.run(command(work, algo, folder), work)
        return found[algo]

    return get


@pytest.fixture(scope="module")
def killed(scripts, work):
    """A ppo run that kill -9 ended in iteration 5, with checkpoints of steps 12 and 16: copies of it."""
    folder = work / "killed"
    scripts.run(command(work, "ppo", folder), work, expect=-9, SIGNAL_AT="reward:8:9")
    steps = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert steps[-2:] == ["step_00000012", "step_00000016"]
    return lambda target: Path(shutil.copytree(folder, target))


def results(folder):
    """What must be bitwise equal: {file: bytes}."""
    names = ["metrics.jsonl", "samples.jsonl"]
    names += [str(p.relative_to(folder)) for p in folder.glob("hf_model*/*.safetensors")]
    return {name: (folder / name).read_bytes() for name in names}


def same(folder, other):
    a, b = results(folder), results(other)
    assert sorted(a) == sorted(b)
    assert [name for name in a if a[name] != b[name]] == []


def files(folder):
    """Everything in a run directory but the lock, with the times of change."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- Killed and continued --------------------------------------------------------------------------------------------

# Where: call of the reward (0: evaluation at the start), of a metric, or of a library function.
KILLS = [
    ("ppo", ["reward:1"]),  # before the first step: no checkpoint yet
    ("ppo", ["reward:5"]),  # in a rollout
    ("ppo", ["metric:3"]),  # in an evaluation
    ("ppo", ["reward:5", "reward:3", "reward:1"]),  # three times, one of them in the first rollout after resuming
    ("ppo", [("torch.optim", "AdamW.step", 15)]),  # in the update
    ("ppo", [("safetensors.torch", "save_file", 5, True)]),  # in the model of a checkpoint, torn
    ("ppo", [("safetensors.torch", "save_file", 6, True)]),  # in the optimizer of a checkpoint
    ("ppo", [("os", "fsync", 1)]),  # while the run directory is made
    ("ppo", [("os", "fsync", 2)]),
    ("ppo", [("os", "rename", 3)]),  # before a checkpoint gets its name (1 and 2 are config.yaml and env.json)
    ("ppo", [("os", "fsync", 8)]),  # after it has got it
    ("ppo", [("shutil", "rmtree", 1)]),  # while old checkpoints are pruned
    ("ppo", [("matplotlib.figure", "Figure.savefig", 1)]),  # after the last step
    ("sft", ["metric:1"]),
    ("sft", ["metric:3"]),
    ("sft", ["metric:2", "metric:1"]),
    ("sft", [("torch.optim", "AdamW.step", 7)]),
    ("sft", [("safetensors.torch", "save_file", 4, True)]),
    ("sft", [("transformers", "GPT2LMHeadModel.save_pretrained", 1)]),  # in the export
]


@pytest.mark.parametrize(("algo", "kills"), KILLS, ids=lambda x: x if isinstance(x, str) else str(x[0])[:60])
def test_killed_anywhere_the_same_command_ends_bitwise_equal(algo, kills, scripts, work, whole, tmp_path):
    for kill in kills:
        if isinstance(kill, str):
            scripts.run(command(work, algo, "run"), tmp_path, expect=-9, SIGNAL_AT=kill + ":9")
        else:
            scripts.run(command(work, algo, "run"), tmp_path, expect=-9, patch=kill_at(*kill))
    scripts.run(command(work, algo, "run"), tmp_path)
    same(tmp_path / "run", whole(algo)[0])
    steps = [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")]
    assert steps == sorted(set(steps)), "each step once"
    assert not list((tmp_path / "run").rglob(".tmp-*")), "what a killed process left half-written is removed"
    assert len(list((tmp_path / "run/checkpoints").iterdir())) <= 3


def test_weights_and_coefficient_do_change_in_these_runs(whole, work):
    """Otherwise equality would say nothing."""
    for algo in "ppo", "sft":
        folder, _ = whole(algo)
        before = safetensors.torch.load_file(work / "model/model.safetensors")
        after = safetensors.torch.load_file(folder / "hf_model/model.safetensors")
        assert all(not torch.equal(before[name], after[name]) for name in before)
    coefficients = [line["objective/kl_coef"] for line in lines(whole("ppo")[0] / "metrics.jsonl")[1:]]
    assert len(set(coefficients)) > 3
    head = safetensors.torch.load_file(whole("ppo")[0] / "hf_model/value_head.safetensors")
    assert all(weight.abs().sum() > 0 for weight in head.values())


FORGET = {
    "optimizer": "c.dcp.set_optimizer_state_dict = lambda *args, **options: None",
    "KL coefficient": "original = c.newest_checkpoint\n"
    "def newest(*args):\n path, state = original(*args)\n return path, state | {'kl_coef': 0.05}\n"
    "c.newest_checkpoint = newest",
    "metrics of lost steps": "import common.logging\ncommon.logging.keep_lines = lambda path, step: None",
}


@pytest.mark.parametrize("what", FORGET)
def test_a_resume_that_forgets_something_is_noticed(what, scripts, work, whole, killed, tmp_path):
    """Negative control of the tests above."""
    run = killed(tmp_path / "run")
    patch = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import common.checkpoint as c\n{FORGET[what]}"
    with open(run / "metrics.jsonl", "a") as file:  # a step whose checkpoint was not written
        file.write('{"step": 20, "objective/kl": 1.0}\n')
    scripts.run(command(work, "ppo", "run"), tmp_path, patch=patch)
    different = [name for name, found in results(run).items() if found != results(whole("ppo")[0])[name]]
    assert "metrics.jsonl" in different
    assert what == "metrics of lost steps" or "hf_model/model.safetensors" in different


# ---- Broken files ----------------------------------------------------------------------------------------------------


def flip_bit(checkpoint):
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-5] ^= 16
    (checkpoint / "model.safetensors").write_bytes(data)


BREAK = {
    "bit flip in the model": flip_bit,
    "truncated optimizer": lambda p: os.truncate(p / "optim.safetensors", 1000),
    "optimizer missing": lambda p: (p / "optim.safetensors").unlink(),
    "manifest missing": lambda p: (p / "MANIFEST.json").unlink(),
    "empty manifest": lambda p: (p / "MANIFEST.json").write_text(""),
    "empty state": lambda p: (p / "state.json").write_text(""),
}


@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_checkpoint_falls_back_with_a_warning(fault, scripts, work, whole, killed, tmp_path):
    run = killed(tmp_path / "run")
    BREAK[fault](run / "checkpoints/step_00000016")
    process = scripts.run(command(work, "ppo", "run"), tmp_path)
    warning = next(line for line in process.out.splitlines() if "falling back" in line)
    assert "step_00000016" in warning
    assert "from step 12" in process.out
    same(run, whole("ppo")[0])


def test_all_checkpoints_broken_is_an_error_and_changes_nothing(scripts, work, killed, tmp_path):
    run = killed(tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        flip_bit(path)
    before = files(run)
    process = scripts.run(command(work, "ppo", "run"), tmp_path, expect=2)
    assert "every checkpoint in run/checkpoints is broken" in process.err
    assert "--resume never" in process.err
    assert before == files(run)


def test_torn_lines_and_stale_files_are_mended(scripts, work, whole, killed, tmp_path):
    run = killed(tmp_path / "run")
    for name in "metrics.jsonl", "perf.jsonl", "samples.jsonl":
        with open(run / name, "a") as file:
            file.write('{"step": 20, "objective/kl": 0.12')
    stale = [run / "checkpoints/.tmp-step_00000020-4711", run / ".tmp-hf_model-4711"]
    for path in stale:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    scripts.run(command(work, "ppo", "run"), tmp_path)
    same(run, whole("ppo")[0])
    assert not [path for path in stale if path.exists()]
    assert [line["step"] for line in lines(run / "perf.jsonl")] == [4, 8, 12, 16, 20, 24]


def test_a_full_disk_is_a_warning_and_older_checkpoints_stay(scripts, work, whole, tmp_path):
    """No file may grow beyond 30 kB from the second checkpoint on; at the end the disk has room again."""
    patch = """
import resource, safetensors.torch
original, calls = safetensors.torch.save_file, 0
def save(*args, **options):
    global calls
    calls += 1
    small = 3 <= calls <= 5
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if small else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        return original(*args, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
safetensors.torch.save_file = save
"""
    process = scripts.run(command(work, "ppo", "run", "--keep-checkpoints", "9"), tmp_path, patch=patch)
    warnings = [line for line in process.out.splitlines() if "warning: no checkpoint was written" in line]
    assert warnings and "older ones are intact" in warnings[0]
    saved = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert "step_00000004" in saved and "step_00000024" in saved and "step_00000008" not in saved
    same(tmp_path / "run", whole("ppo")[0])


# ---- Signals and the lock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "at", "number", "step"),
    [
        ("ppo", "reward:5", signal.SIGTERM, 12),
        ("ppo", "reward:5", signal.SIGINT, 12),
        ("ppo", "reward:9", signal.SIGTERM, 24),  # in the last iteration
        ("sft", "metric:2", signal.SIGTERM, 4),
        ("sft", "metric:1", signal.SIGINT, 1),  # in the evaluation before the first step
    ],
)
def test_a_signal_saves_and_names_the_command(algo, at, number, step, scripts, work, whole, tmp_path):
    argv = command(work, algo, "run", "--save-every", "0")  # so that the signal's own checkpoint is the one to continue
    process = scripts.run(argv, tmp_path, expect=128 + number, SIGNAL_AT=f"{at}:{int(number)}")
    assert (tmp_path / f"run/checkpoints/step_{step:08d}/MANIFEST.json").exists()
    assert not (tmp_path / "run/README.md").exists()
    line = process.out.splitlines()[-1]
    assert f"stopped after step {step}" in line
    printed = line.partition("to continue: ")[2].split()
    assert printed[0] == sys.executable and Path(printed[1]).is_absolute()
    scripts.run(printed[1:], tmp_path)
    same(tmp_path / "run", whole(algo)[0])


def test_a_second_interrupt_ends_at_once(scripts, work, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def reward(samples, **columns):\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(30)\n"
    )
    process = scripts.start(command(work, "ppo", "run", "--reward", "slow.py:reward"), tmp_path)
    assert process.wait(30) in (130, -2)


def test_the_run_directory_is_locked_until_its_process_ends(scripts, work, whole, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "def reward(samples, **columns):\n"
        "    Path('begun').touch()\n"
        "    time.sleep(float(os.environ.get('SLOW', 0)))\n"
        "    return [0.0] * len(samples)\n"
    )
    argv = command(work, "ppo", "run", "--reward", "slow.py:reward")
    first = scripts.start(argv, tmp_path, SLOW="30")
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end and not (first.folder / "code").exists(), first.out + first.err
        time.sleep(0.02)
    before = files(tmp_path / "run")
    second = scripts.run(argv, tmp_path, expect=2)
    assert f"locked by the running process {first.pid} " in second.err
    assert len(second.err.strip().splitlines()) == 1
    assert files(tmp_path / "run") == before
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -9
    scripts.run(argv, tmp_path)  # the lock is free
    assert (tmp_path / "run/README.md").exists()


# ---- The same command, another command -------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_a_finished_run_says_where_it_is(algo, scripts, work, whole, tmp_path):
    folder = Path(shutil.copytree(whole(algo)[0], tmp_path / "run"))
    before = files(folder)
    process = scripts.run(command(work, algo, "run"), tmp_path)
    assert "run is finished" in process.out and "run/hf_model" in process.out
    assert process.err == ""
    assert files(folder) == before


def test_resume_never_repeats_the_run_beside_it(scripts, work, whole, tmp_path):
    shutil.copytree(whole("ppo")[0], tmp_path / "run")
    for n in 2, 3:
        scripts.run(command(work, "ppo", "run", "--resume", "never"), tmp_path)
        same(tmp_path / f"run-{n}", whole("ppo")[0])


def test_the_default_directory_is_a_function_of_what_decides_the_result(scripts, work, tmp_path):
    """Neutral flags keep it; flags, the script and the files that flags name change it."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "algos", tree / "algos", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(work / "model", tmp_path / "model")
    for name in "prompts.jsonl", "eval.jsonl", "user.py":
        shutil.copy(work / name, tmp_path / name)
    short = ["--total-episodes", "8", "--eval-every", "0", "--save-every", "0"]
    argv = [tree / "algos/ppo.py", *(x.replace(f"{work}/", "") for x in flags(work, "ppo")), *short]
    runs = tmp_path / "runs"

    def directories_after(*more):
        scripts.run([*argv, *more], tmp_path)
        return sorted(path.name for path in runs.iterdir())

    first = directories_after()
    assert re.fullmatch(r"ppo-[0-9a-f]{8}", first[0]) and len(first) == 1
    assert directories_after("--save-every", "4", "--micro-batch-size", "2", "--track", "off") == first
    assert len(directories_after("--seed", "2")) == 2
    for number, path in enumerate(["user.py", "prompts.jsonl", "tree/algos/ppo.py", "model/generation_config.json"], 3):
        with open(tmp_path / path, "a") as file:
            file.write("\n")
        assert len(directories_after()) == number, path


def test_another_configuration_is_an_error_that_lists_the_differences(scripts, work, killed, tmp_path):
    run = killed(tmp_path / "run")
    before = files(run)
    more = ["--lr", "1e-3", "--seed", "7", "--dataset", f"{work}/eval.jsonl", "--save-every", "8"]
    process = scripts.run(command(work, "ppo", "run", *more), tmp_path, expect=2)
    assert "--lr: was 0.01, is 0.001" in process.err
    assert "--seed: was 1, is 7" in process.err
    assert "--dataset: was" in process.err
    assert "save" not in process.err.replace("saved", ""), "a neutral flag is no difference"
    assert "--resume" in process.err and "--run-dir" in process.err, "what to do"
    assert before == files(run)


def test_resume_path_continues_under_the_present_flags(scripts, work, killed, tmp_path):
    run = killed(tmp_path / "run")
    argv = command(work, "ppo", "run", "--resume", "run/checkpoints/step_00000012", "--lr", "5e-3")
    process = scripts.run(argv, tmp_path, expect=-9, SIGNAL_AT="reward:3:9")
    assert "continuing from run/checkpoints/step_00000012 (step 12)" in process.out
    assert "--lr: was 0.01, is 0.005" in process.out
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == [0, 4, 8, 12, 16], "step 16 of the old flags is gone, that of the new ones is there"
    scripts.run(argv, tmp_path)  # killed in iteration 5: continues from its own step 16
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 4, 8, 12, 16, 20, 24]
    assert [line["optim/lr"] < 5e-3 for line in metrics[1:]] == [False, False, False, True, True, True]
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 5e-3

    killed(tmp_path / "source")
    other = command(work, "ppo", "other", "--resume", "source/checkpoints/step_00000012", "--lr", "5e-3")
    scripts.run(other, tmp_path)  # into another directory: only what follows
    assert [line["step"] for line in lines(tmp_path / "other/metrics.jsonl")] == [16, 20, 24]
    for name in "model", "value_head":
        a, b = (tmp_path / d / f"hf_model/{name}.safetensors" for d in ("run", "other"))
        assert a.read_bytes() == b.read_bytes()


def test_resume_path_into_the_directory_of_another_run_leaves_no_mixture(scripts, work, whole, killed, tmp_path):
    """The directory `a` holds a finished run of another seed; step 12 of run `b` is to be continued there."""
    killed(tmp_path / "b")
    scripts.run(command(work, "ppo", "a", "--seed", "5"), tmp_path)
    argv = command(work, "ppo", "a", "--resume", "b/checkpoints/step_00000012")
    process = scripts.start(argv, tmp_path, SIGNAL_AT="reward:1:9")
    if process.wait() == 2:
        return  # refused: nothing is mixed
    assert process.wait() == -9
    scripts.run(argv, tmp_path)
    for name in "model", "value_head":
        a, b = (folder / f"hf_model/{name}.safetensors" for folder in (tmp_path / "a", whole("ppo")[0]))
        assert a.read_bytes() == b.read_bytes()


def test_resume_of_what_is_not_there(scripts, work, whole, tmp_path):
    process = scripts.run(command(work, "ppo", "run", "--resume", "runs/nope"), tmp_path, expect=2)
    assert "runs/nope" in process.err and len(process.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing half-written"
    sft_checkpoint = whole("sft")[0] / "checkpoints/step_00000012"
    process = scripts.run(command(work, "ppo", "run", "--resume", sft_checkpoint), tmp_path, expect=2)
    assert "is of sft.py, this is ppo.py" in process.err
    newer = Path(shutil.copytree(whole("ppo")[0] / "checkpoints/step_00000024", tmp_path / "newer"))
    state = json.loads((newer / "state.json").read_text())
    (newer / "state.json").write_text(json.dumps(state | {"format": 99}))
    manifest = json.loads((newer / "MANIFEST.json").read_text())
    manifest["state.json"]["sha256"] = hashlib.sha256((newer / "state.json").read_bytes()).hexdigest()
    (newer / "MANIFEST.json").write_text(json.dumps(manifest))
    process = scripts.run(command(work, "ppo", "run", "--resume", newer), tmp_path, expect=2)
    assert "newer version" in process.err


@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_config_yaml_repeats_the_run(algo, scripts, work, whole, tmp_path):
    folder = whole(algo)[0]
    argv = [ROOT / f"algos/{algo}.py", "--config", folder / "config.yaml", "--threads", "1", "--run-dir", "again"]
    scripts.run(argv, tmp_path)
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (
        json.loads((tmp_path / "again/env.json").read_text())["hash"]
        == json.loads((folder / "env.json").read_text())["hash"]
    )
    scripts.run([*argv[:-1], "other", "--seed", "3"], tmp_path)  # the command line wins over the file
    assert (tmp_path / "other/metrics.jsonl").read_bytes() != (folder / "metrics.jsonl").read_bytes()
    assert yaml.safe_load((tmp_path / "other/config.yaml").read_text())["seed"] == 3


@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_check_prints_the_summary_and_writes_nothing(algo, scripts, work, tmp_path):
    process = scripts.run(command(work, algo, "run", "--check"), tmp_path)
    assert "check passed" in process.out
    for fragment in (
        f"{algo}: ",
        "parameters",
        "samples at step 0",
        "vowels",
        "7 prompts" if algo == "ppo" else "23 rows",
    ):
        assert fragment in process.out, fragment
    assert list(tmp_path.iterdir()) == []
    process = scripts.run([ROOT / f"algos/{algo}.py", *flags(work, algo), "--check"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_check_calls_the_reward_once_and_reports_what_is_wrong_with_it(scripts, work, tmp_path):
    argv = command(work, "ppo", "run", "--check", "--reward", f"{work}/user.py:bad_reward")
    process = scripts.run(argv, tmp_path, expect=2)
    assert "user.py:bad_reward returned 4 values, expected a list of 5" in process.err
    assert list(tmp_path.iterdir()) == []


# ---- What a run leaves behind ----------------------------------------------------------------------------------------

DESIGN_9 = """objective/kl objective/kl_k3 objective/entropy objective/scores objective/rlhf_reward
objective/non_score_reward objective/kl_coef policy/approxkl policy/clipfrac policy/entropy policy/ratio loss/policy
loss/value loss/total val/explained_variance val/clipfrac val/error tokens/queries_len tokens/responses_len
tokens/eos_rate tokens/truncated_rate optim/lr optim/grad_norm""".split()
PERF = "perf/tokens_per_sec perf/episodes_per_sec perf/seconds_rollout perf/seconds_update perf/peak_memory_mb".split()


def test_metrics_of_ppo(whole):
    folder, _ = whole("ppo")
    metrics, perf = lines(folder / "metrics.jsonl"), lines(folder / "perf.jsonl")
    assert [line["step"] for line in metrics] == [0, 4, 8, 12, 16, 20, 24]
    for line in metrics[1:]:
        assert [name for name in DESIGN_9 if not isinstance(line.get(name), float)] == []
    for line in metrics:
        assert ("eval/reward" in line and "eval/vowels" in line) == (line["step"] % 8 == 0)
    assert not [name for line in metrics for name in line if "time" in name or "sec" in name]
    assert [line["step"] for line in perf] == [4, 8, 12, 16, 20, 24]
    assert [name for name in PERF if name not in perf[0]] == []


def test_metrics_of_sft(whole):
    folder, _ = whole("sft")
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(13))
    for line in metrics:
        evaluated = {"eval/loss", "eval/perplexity", "eval/accuracy", "eval/vowels"}
        assert evaluated <= set(line) if line["step"] % 4 == 0 else not evaluated & set(line)
        assert line["step"] == 0 or {"train/loss", "optim/lr", "optim/grad_norm"} <= set(line)
    assert [line["step"] for line in lines(folder / "perf.jsonl")] == list(range(1, 13))
    samples = lines(folder / "samples.jsonl")
    assert [s["step"] for s in samples] == [step for step in (0, 4, 8, 12) for _ in range(5)]


def test_the_best_checkpoint_is_kept_and_exported(whole):
    """The highest eval/reward of this run is not its last one, and older than the newest two checkpoints."""
    folder, _ = whole("ppo")
    scores = {line["step"]: line["eval/reward"] for line in lines(folder / "metrics.jsonl") if "eval/reward" in line}
    best = max((step for step in scores if step), key=scores.get)
    assert best < 24
    found = safetensors.torch.load_file(folder / f"checkpoints/step_{best:08d}/model.safetensors")
    exported = safetensors.torch.load_file(folder / "hf_model_best/model.safetensors")
    assert all(torch.equal(tensor, found[f"lm.{name}"]) for name, tensor in exported.items())
    head = safetensors.torch.load_file(folder / "hf_model_best/value_head.safetensors")
    assert all(torch.equal(tensor, found[f"value_head.{name}"]) for name, tensor in head.items())


@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_the_run_directory_and_the_last_lines(algo, scripts, work, whole):
    folder, process = whole(algo)
    expected = "config.yaml env.json metrics.jsonl perf.jsonl samples.jsonl checkpoints hf_model README.md curve.png"
    assert set(expected.split()) <= {path.name for path in folder.iterdir()}
    assert {path.name for path in folder.iterdir()} <= {*expected.split(), ".lock", "hf_model_best"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    env = json.loads((folder / "env.json").read_text())
    assert {"algo", "hash", "flags", "files", "command", "commit", "versions", "device"} <= set(env)
    card = (folder / "README.md").read_text()
    assert "![learning curve](curve.png)" in card and "hf_model" in card and env["commit"] in card
    *_, curve, _, load, generate, _, last = process.out.rstrip().splitlines()
    assert re.search(r"(eval/reward|eval/loss) [▁-█]+ \S+ -> \S+$", curve)
    assert f"{folder}/README.md" in last and f"{folder}/curve.png" in last and f"{folder}/hf_model" in last
    assert ast.parse(f"{load}\n{generate}")
    (work / f"use_{algo}.py").write_text(f"{load}\n{generate}\n")
    assert "generated_text" in scripts.run([work / f"use_{algo}.py"], work).out
    assert load in card and generate in card
    assert process.err == "", "no warnings of libraries"


def test_secrets_of_the_environment_stay_there(scripts, work, tmp_path):
    canaries = {"HF_TOKEN": "hf_CANARYCANARY", "WANDB_API_KEY": "0123456789abcdefCANARY" * 2, "MY_PASSWORD": "CANARY3"}
    process = scripts.run(command(work, "ppo", "run"), tmp_path, **canaries)
    assert "CANARY" not in process.out + process.err
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"CANARY" in p.read_bytes()] == []


def test_track_wandb_offline(scripts, work, whole, tmp_path):
    pytest.importorskip("wandb")
    key = "0123456789abcdef0123456789abcdef01CANARY"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": key, "HF_TOKEN": "hf_CANARY", "WANDB_SILENT": "true"}
    process = scripts.run(command(work, "ppo", "run", "--track", "wandb"), tmp_path, **env)
    assert "warning" not in process.out
    assert list((tmp_path / "run").rglob("*.wandb")), "the run was recorded"
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"CANARY" in p.read_bytes()] == []
    same(tmp_path / "run", whole("ppo")[0])
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no wandb directory elsewhere"


@pytest.mark.parametrize("track", ["wandb", "tensorboard"])
def test_a_tracker_that_fails_is_a_warning(track, scripts, work, whole, tmp_path):
    """wandb has neither key nor network; tensorboard is not installed (requirements.txt does not ask for it)."""
    if track == "tensorboard" and importlib.util.find_spec("tensorboard"):
        pytest.skip("tensorboard is installed")
    (tmp_path / "home").mkdir()
    env = {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    process = scripts.run(command(work, "ppo", "run", "--track", track), tmp_path, **env)
    assert len([line for line in process.out.splitlines() if f"warning: --track {track} is off" in line]) == 1
    same(tmp_path / "run", whole("ppo")[0])


# ---- From Python -----------------------------------------------------------------------------------------------------

FROM_PYTHON = """
import signal, sys
sys.path.insert(0, {root!r})
from algos.{algo} import Args, main
handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
rows = [{{"prompt": p, "completion": "a", "shift": 1}} for p in "bcdefgh"]
lengths = lambda samples, **columns: [len(s) / 10 for s in samples]
options = dict(model={model!r}, dataset=rows, eval_dataset=rows[:3], threads=1, max_new_tokens=4, batch_size=4)
options["metric"] = lambda samples, outputs, **columns: {{"length": [len(o) for o in outputs]}}
{more}
first, folder = main(Args(**options, run_dir="first"))
assert str(folder) == "first", folder
again, folder = main(Args(**options, run_dir="first"))  # finished: the same metrics
assert again == first, (again, first)
second, folder = main(Args(**options, run_dir="second"))  # a second run in one process
assert second == first, (second, first)
assert "eval/length" in first and first["step"] == {step}, first
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers, "handlers are given back"
print("all is well")
"""


@pytest.mark.parametrize(
    ("algo", "step", "more"),
    [
        ("ppo", 8, "options |= dict(reward=lengths, total_episodes=8, rollout_batch_size=4)"),
        ("sft", 5, "options |= dict(eval_prompts=None, total_steps=5)"),
    ],
)
def test_from_python(algo, step, more, scripts, work, tmp_path):
    text = FROM_PYTHON.format(root=str(ROOT), model=str(work / "model"), algo=algo, step=step, more=more)
    (tmp_path / "use.py").write_text(text)
    assert "all is well" in scripts.run([tmp_path / "use.py"], tmp_path).out
    assert (tmp_path / "first/metrics.jsonl").read_bytes() == (tmp_path / "second/metrics.jsonl").read_bytes()


# ---- Launchers -------------------------------------------------------------------------------------------------------


def launch(launcher, argv, cwd, work, timeout=120, **env):
    """Runs a command line to its end; where it hangs, the stacks of all its processes are in the failure."""
    words, env = [str(word) for word in [*launcher, *argv]], environment(work, PYTHONFAULTHANDLER="1", **env)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=cwd, env=env, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        printed = "\n".join(process.communicate())
        pytest.fail(f"no end within {timeout} s: {shlex.join(words)}\n{printed}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def torchrun(processes):
    return [BIN / "torchrun", "--nproc_per_node", processes, "--master_port", 20000 + os.getpid() % 20000]


def test_plain_python_from_the_root_directory(work, whole, tmp_path):
    done = launch([sys.executable], command(work, "ppo", tmp_path / "run"), "/", work)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole("ppo")[0])


@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_accelerate_launch(algo, work, whole, tmp_path):
    launcher = [BIN / "accelerate", "launch"]
    done = launch(launcher, command(work, algo, "run"), tmp_path, work, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole(algo)[0])
    if algo == "ppo":
        bad = launch(launcher, command(work, algo, "bad", "--lr", "-1"), tmp_path, work, HF_HOME=str(tmp_path / "hf"))
        assert bad.returncode != 0 and "--lr -1.0 must be a positive number" in bad.stderr
        assert not (tmp_path / "bad").exists()


def close(a, b):
    return a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-12


@pytest.mark.parametrize("algo", ["ppo", pytest.param("sft", marks=pytest.mark.slow)])
def test_two_processes_equal_one(algo, scripts, work, tmp_path):
    """In float64: the same samples and learning rates, and to 1e-9 metrics and weights. Stopped once between."""
    more = ["--dtype", "float64", "--attn-implementation", "sdpa"]
    scripts.run(command(work, algo, "one", *more), tmp_path)
    at = "reward:5:15" if algo == "ppo" else "metric:2:15"  # to one rank; both stop
    stopped = launch(torchrun(2), command(work, algo, "two", *more), tmp_path, work, SIGNAL_AT=at)
    assert stopped.returncode != 0 and "stopped after step" in stopped.stdout, stopped.stderr
    done = launch(torchrun(2), command(work, algo, "two", *more), tmp_path, work)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout and "continuing two from step" in done.stdout
    one, two = tmp_path / "one", tmp_path / "two"
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    a, b = lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl")
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() and x.get("optim/lr") == y.get("optim/lr")
        assert [(name, x[name], y[name]) for name in x if not close(x[name], y[name])] == []
    for path in sorted(one.glob("hf_model*/*.safetensors")):
        expected = safetensors.torch.load_file(path)
        found = safetensors.torch.load_file(two / path.relative_to(one))
        for name, tensor in expected.items():
            assert tensor.dtype == torch.float64
            assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm(), f"{path.name} {name}"


@pytest.mark.case(29, "ppo")
def test_a_failing_reward_ends_all_processes(work, tmp_path):
    argv = command(work, "ppo", "run", "--reward", f"{work}/user.py:bad_reward")
    done = launch(torchrun(2), argv, tmp_path, work, timeout=60)
    assert done.returncode != 0
    assert "bad_reward returned 4 values, expected a list of 5" in done.stderr
