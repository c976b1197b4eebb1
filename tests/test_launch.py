"""python -m pytest tests/test_launch.py

What a run makes of the machine: precision, threads, the limit of waiting, and what is said where memory runs out.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import accelerate
import pytest
import torch
from harness import BIN, ROOT
from helpers import log

from algos import sft
from common import launch, logging
from common.cli import cli
from common.launch import autocast_type, set_threads
from common.logging import closes_run


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def printed(*command):
    """What a command prints that ends well."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- Precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "launcher", "dtype", "gpu_has_bfloat16", "expected"),
    [
        ("no", "bf16", "float32", True, "no"),
        ("bf16", "no", "float64", False, "bf16"),
        (None, "bf16", "float32", False, "bf16"),
        (None, "fp16", "float32", True, "fp16"),  # which `launch` refuses
        (None, "no", "float32", True, "bf16"),
        (None, None, "float32", True, "bf16"),
        (None, None, "float32", False, "no"),
        (None, "no", "bfloat16", True, "no"),
        (None, None, "float64", True, "no"),
    ],
)
def test_autocast_type(flag, launcher, dtype, gpu_has_bfloat16, expected):
    assert autocast_type(flag, launcher, dtype, gpu_has_bfloat16) == expected


@pytest.mark.parametrize("use_cpu", ["true", "false"])
def test_bf16_is_the_default_of_a_gpu_that_has_it(monkeypatch, use_cpu):
    """torch is made to say that there is one; accelerate's device stays the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
    asked = {}

    def accelerator(**options):
        asked.update(options)
        return SimpleNamespace(device=torch.device("cpu"), num_processes=1, mixed_precision="", distributed_type="NO")

    monkeypatch.setattr(accelerate, "Accelerator", accelerator)
    launch.launch(SimpleNamespace(mixed_precision=None, dtype="float32", batch_size=6))
    assert (asked["cpu"], asked["mixed_precision"]) == ((True, "no") if use_cpu == "true" else (False, "bf16"))


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_medium_precision_is_for_cpus_of_amd(vendor, monkeypatch):
    """On those of Intel it is slower. The kernels are this machine's, so AMD's name alone may not be enough."""
    cpu = SimpleNamespace(exists=lambda: True, read_text=lambda: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(launch, "Path", lambda path: cpu)
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    launch.fast_cpu_matmul()
    assert asked == (["medium"] if vendor == "AuthenticAMD" else [])


# ---- Threads and processes -------------------------------------------------------------------------------------------


def test_threads(monkeypatch):
    """The flag, else OMP_NUM_THREADS, else the CPUs divided by the processes; at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7), raising=False)
    assert set_threads() == torch.get_num_threads() == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert set_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "11")
    assert set_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert set_threads() == torch.get_num_threads() == 5
    assert set_threads(3) == torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5,3")  # a list for nested regions: no number for torch
    assert set_threads() == 1


def test_threads_under_accelerate(tmp_path):
    """It exports OMP_NUM_THREADS: that one does not count, --threads does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.sched_getaffinity = lambda pid: range(14)\n"
        "from common.launch import set_threads\n"
        "print('OMP_NUM_THREADS' in os.environ, set_threads(), set_threads(3))"
    )
    assert printed(BIN / "accelerate", "launch", "--cpu", script) == "True 14 3\n"


def test_two_processes_of_torchrun(tmp_path):
    """It exports OMP_NUM_THREADS=1, too. The process group waits as long as TIMEOUT says, and longer than NCCL's 10
    minutes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.sched_getaffinity = lambda pid: range(14)\n"
        "from types import SimpleNamespace as S; import torch; from common.launch import launch, set_threads\n"
        "launch(S(mixed_precision=None, dtype='float32', batch_size=2))\n"
        "group = torch.distributed.distributed_c10d._get_default_group()\n"
        "backend = group._get_backend(torch.device('cpu'))\n"
        "words = backend.name(), backend.options._timeout.total_seconds()\n"
        "words += os.environ['OMP_NUM_THREADS'], set_threads(), set_threads(3)\n"
        f"open(f'{tmp_path}/{{torch.distributed.get_rank()}}', 'w').write(' '.join(map(str, words)))"
    )
    printed(BIN / "torchrun", "--nproc_per_node=2", script)
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"gloo {launch.TIMEOUT.total_seconds()} 1 7 3"
    assert launch.TIMEOUT.total_seconds() > 3600


def test_threads_before_functions_of_the_user(monkeypatch):
    """`main` runs with --threads from its first line on: a model or data may be computed there."""

    @closes_run
    def main(args):
        return torch.get_num_threads()

    flags = {"seed": 1, "deterministic": False}
    assert main(SimpleNamespace(threads=2, **flags)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(SimpleNamespace(threads=None, **flags)) == 1


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_peak_memory():
    """In MB, what was freed included. A process begins with the peak of the one that started it: hence the bounds."""
    code = (
        "import torch; from common.launch import peak_memory_mb; x = torch.ones(800 * 2**18)\n"
        "del x; print(peak_memory_mb(torch.device('cpu')))"
    )
    assert 900 < float(printed(sys.executable, "-c", code)) < 9000


def test_a_run_that_runs_out_of_memory(monkeypatch, tmp_path, capfd):
    """It ends with a sentence and code 2; its checkpoint is intact, and the same command with a smaller micro-batch
    ends as a run that was never stopped."""
    task = "benchmarks/tasks/randomwalks.py"
    flags = f"--model {ROOT}/{task}:untrained_model --dataset {ROOT}/{task}:completions --total-steps 5 --batch-size 6"
    flags += " --save-every 2 --eval-every 0 --threads 1 --micro-batch-size"

    def run(name, micro_batch_size):
        argv = [f"--run-dir={tmp_path}/{name}", *flags.split(), str(micro_batch_size)]
        monkeypatch.setattr(sys, "argv", ["algos/sft.py", *argv])
        capfd.readouterr()
        cli(sft.Args, sft.main)

    step = torch.optim.AdamW.step
    steps = []

    def full(*inputs):
        steps.append(1)
        if len(steps) == 4:
            torch.empty(2**60, dtype=torch.uint8)
        return step(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", full)
        with pytest.raises(SystemExit) as stop:
            run("full", 3)
    errors = capfd.readouterr().err
    assert stop.value.code == 2
    assert "error: out of memory: lower --micro-batch-size or --decode-batch-size" in errors
    assert [path.name for path in (tmp_path / "full/checkpoints").iterdir()] == ["step_00000002"]
    assert logging._open == []
    run("full", 1)
    assert f"continuing {tmp_path}/full from step 2" in capfd.readouterr().out
    run("whole", 3)
    last = log(tmp_path / "full")[-1]
    assert last["step"] == 5
    assert last == pytest.approx(log(tmp_path / "whole")[-1], rel=1e-4)
