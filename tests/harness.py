"""Whole runs as a user starts them, for the tests of runs and faults. A plugin of pytest: its fixtures are everywhere.

Most runs are forked from a server that has imported the libraries and nothing of this repository (a second per run
instead of five); `python`, `accelerate launch` and `torchrun` themselves are used where they matter.
"""

import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # which & of a shell without job control ignores

USER_FILE = '''
def reward(samples, prompts, outputs, shift, **columns):
    return [(sum(map(ord, sample)) + s) % 11 / 11 for sample, s in zip(samples, shift)]

def coarse_reward(samples, prompts, outputs, shift, **columns):
    """Every other pair of responses has equal ones."""
    return [(sum(map(ord, sample)) + s) % 2 / 2 for sample, s in zip(samples, shift)]

def metric(samples, prompts, outputs, **columns):
    return {"vowels": [sum(c in "aeiou" for c in output) for output in outputs]}

def image_reward(images, shift, **columns):
    return [image.mean().item() * 10 + s for image, s in zip(images, shift)]

def image_metric(images, **columns):
    return {"red": images[:, 0].mean((1, 2)).tolist()}

def bad_reward(prompts, **columns):
    return [1.0] * (len(prompts) - 1)
'''

SERVER = """
import json, os, runpy, signal, sys, traceback
import torch, transformers, accelerate, accelerate.tracking, tyro, yaml, rich.console, rich.table, matplotlib.figure
import torch.distributed.checkpoint.state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers import GPT2ForSequenceClassification, CLIPTextModel
if sys.argv[1:] == ["images"]:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

os.fsync = lambda descriptor: None  # the end of a process loses nothing, that of the power is not tested

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

# At the n-th call of module.name in rank 0: something happens, before or (tear) in the middle of what it does.
AT = """
import os, signal, sys
sys.path.insert(0, {root!r})
import {module} as module
original, calls = module.{name}, 0
def call(*args, **options):
    global calls
    calls += 1
    if calls == {number} and os.environ.get("RANK", "0") == "0":
        if {tear}:
            open(args[1], "wb").write(b"torn")
        {action}
    return original(*args, **options)
module.{name} = call
"""


def at(module, name, number, tear=False, signal=9):
    """A patch that sends the process a signal, or does what `signal` says in Python."""
    action = signal if isinstance(signal, str) else f"os.kill(os.getpid(), {int(signal)})"
    return AT.format(root=str(ROOT), module=module, name=name, number=number, tear=tear, action=action)


def environment(work, **more):
    """What runs see: no network, no accounts, one thread, the instructions of the tests (see .ci/run)."""
    keep = "PATH HOME TMPDIR LANG ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA MKL_ENABLE_INSTRUCTIONS MKL_CBWR".split()
    keep = {name: os.environ[name] for name in keep if name in os.environ}
    fixed = {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return keep | fixed | {"PYTHONDONTWRITEBYTECODE": "1"} | more


def once(words):
    """A command line with the last values of each flag but --config: tests change those of a table."""
    groups = {"": []}
    flag = ""
    for number, word in enumerate(map(str, words)):
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("--no-", "--")
            if flag == "--config":
                flag = f"{flag} {number}"
            groups.pop(flag, None)
        groups.setdefault(flag, []).append(word)
    return [*itertools.chain(*groups.values())]


class Process:
    """A script that the server has started: pid, wait() -> exit code; out, err: what it has printed."""

    def __init__(self, folder):
        self.folder = folder

    def read(self, name, timeout):
        end = time.monotonic() + timeout
        while not (self.folder / name).exists():
            if time.monotonic() > end:
                pytest.fail(f"a time limit: no {name} after {timeout} s: {self.out}{self.err}", pytrace=False)
            time.sleep(0.01)
        return int((self.folder / name).read_text())

    @property
    def pid(self):
        return self.read("pid", 200)

    def wait(self, timeout=200):
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
        self.work, self.number, self.servers = work, 0, {}

    def server(self, kind):
        if kind not in self.servers:
            command = [sys.executable, "-c", SERVER, kind]
            pipes = {"stdin": subprocess.PIPE, "text": True}
            self.servers[kind] = subprocess.Popen(command, **pipes, env=environment(self.work), cwd=self.work)
        return self.servers[kind].stdin

    def start(self, argv, cwd, patch="", **env):
        self.number += 1
        folder = self.work / f"job{self.number}"
        folder.mkdir()
        job = {"argv": once(argv), "cwd": str(cwd), "env": environment(self.work, **env), "patch": patch}
        server = self.server("images" if "ddpo" in str(argv[0]) else "texts")
        server.write(json.dumps(job | {"folder": str(folder)}) + "\n")
        server.flush()
        return Process(folder)

    def run(self, argv, cwd, expect=0, patch="", **env):
        process = self.start(argv, cwd, patch, **env)
        code = process.wait()
        assert code == expect, f"exit code {code}, expected {expect}\n{process.out}\n{process.err}"
        return process


@pytest.fixture(scope="session")
def work(tmp_path_factory, build_model, build_pipeline):
    """A directory with a tiny GPT-2, a tiny pipeline, rows and functions."""
    from benchmarks.tasks import randomwalks

    work = tmp_path_factory.mktemp("work")
    build_model(initializer_range=0.02).save_pretrained(work / "model")
    randomwalks.tokenizer().save_pretrained(work / "model")
    build_pipeline().save_pretrained(work / "pipeline")
    (work / "user.py").write_text(USER_FILE)
    prompts = [{"prompt": p, "shift": i} for i, p in enumerate("b cd efg h ij klm n".split())]
    walks = randomwalks.graph().walks
    rows = [{"prompt": walk[0], "completion": walk[1:]} for walk in walks[:30]]
    pairs = [{"prompt": a[0], "chosen": a[1:], "rejected": b[1:]} for a, b in zip(walks, walks[40:70], strict=False)]
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    rewarded = [row | {"reward": len(row["completion"]) % 3 / 3} for row in rows]
    captions = [{"prompt": p, "shift": i} for i, p in enumerate(("a red circle", "a blue square", "a green circle"))]
    tables = {"prompts": prompts, "eval": prompts[:5], "captions": captions, "rows": rows[:23], "held_out": rows[23:]}
    tables |= {"pairs": pairs[:-7], "held_out_pairs": pairs[-7:], "rewarded": rewarded[:23]}
    for name, table in (tables | {"held_out_rewarded": rewarded[23:]}).items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return work


@pytest.fixture(scope="session")
def scripts(work):
    scripts = Scripts(work)
    yield scripts
    for server in scripts.servers.values():
        server.stdin.close()
        server.wait(30)


COMMON = "--lr-schedule cosine --warmup-steps 3 --weight-decay 0.1 --threads 1"
STEPS = f"--model model {COMMON} --total-steps 12 --batch-size 8 --save-every 2 --eval-every 4"
SAMPLED = f"{STEPS} --eval-prompts eval.jsonl --metric user.py:metric --max-new-tokens 6"
ROLLED = (
    f"--model model {COMMON} --dataset prompts.jsonl --eval-dataset eval.jsonl --metric user.py:metric --lr 1e-2 "
    "--total-episodes 48 --rollout-batch-size 8 --batch-size 4 --ppo-epochs 2 --temperature 0.7 --max-new-tokens 6 "
    "--save-every 4 --eval-every 8"
)
SETTINGS = {  # runs of a second or two in which all that a checkpoint must hold matters; metrics and rewards besides
    "ppo": f"{ROLLED} --reward user.py:reward --kl-target 0.5 --kl-horizon 16 --score-scaling running",
    "grpo": f"{ROLLED} --reward user.py:coarse_reward --group-size 2 --kl-coef 0.05 --cliprange-high 0.28",
    "ilql": f"{SAMPLED} --dataset rewarded.jsonl --eval-dataset held_out_rewarded.jsonl --betas 0 4 "
    "--steps-for-target-q-sync 3 --polyak-alpha 0.5 --lr 1e-2",
    "sft": f"{SAMPLED} --dataset rows.jsonl --eval-dataset held_out.jsonl --lr 3e-2",
    "reward": f"{STEPS} --dataset pairs.jsonl --eval-dataset held_out_pairs.jsonl --lr 1e-2",
    "dpo": f"{SAMPLED} --dataset pairs.jsonl --eval-dataset held_out_pairs.jsonl --lr 1e-2 --beta 0.1",
    "ddpo": f"--model pipeline {COMMON} --dataset captions.jsonl --eval-dataset captions.jsonl --num-epochs 6 "
    "--reward user.py:image_reward --metric user.py:image_metric --rollout-batch-size 4 --batch-size 2 --lr 1e-3 "
    "--num-inference-steps 2 --stat-min-count 2 --save-every 2 --eval-every 4 --guidance-scale 1 --cliprange 1e-3",
}
ALGOS = list(SETTINGS)


def by_default(*named):
    """Every script; the default run takes the named."""
    others = [pytest.param(algo, marks=pytest.mark.slow) for algo in ALGOS if algo not in named]
    return pytest.mark.parametrize("algo", [*named, *others])


def flags(work, algo):
    words = SETTINGS[algo].split()
    return [f"{work}/{word}" if (work / word.partition(":")[0]).exists() else word for word in words]


def command(work, algo, run_dir, *more, root=ROOT):
    return once([root / f"algos/{algo}.py", *flags(work, algo), "--run-dir", run_dir, *more])


@pytest.fixture(scope="session")
def whole(scripts, work):
    """whole(algo) -> (directory, process) of an uninterrupted run."""

    @functools.cache
    def get(algo):
        folder = work / f"whole-{algo}"
        return folder, scripts.run(command(work, algo, folder), work)

    return get


@pytest.fixture(scope="session")
def ended(scripts, work):
    """ended(algo, target) -> a copy of a run that kill -9 ended when its last logged step was in no checkpoint yet, and
    the steps of its checkpoints."""

    def get(algo, target):
        folder = work / f"ended-{algo}"
        if not folder.exists():
            place = ("common.run", "Run.stop_requested", 5 if algo in ("ppo", "grpo", "ddpo") else 9)
            scripts.run(command(work, algo, folder), work, expect=-9, patch=at(*place))
        run = Path(shutil.copytree(folder, target))
        steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
        assert len(steps) > 1 and lines(run / "metrics.jsonl")[-1]["step"] > steps[-1]
        return run, steps

    return get


def results(folder):
    """What must be bitwise equal in runs on one machine: {file: bytes}."""
    paths = [folder / "metrics.jsonl", folder / "samples.jsonl", *folder.glob("images/*")]
    paths += folder.glob("hf_model*/**/*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.exists()}


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


def launch(launcher, argv, cwd, work, timeout=120, **env):
    """Runs a command line to its end; where it hangs, the stacks of all its processes are in the failure."""
    words, env = [str(word) for word in [*launcher, *once(argv)]], environment(work, PYTHONFAULTHANDLER="1", **env)
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
