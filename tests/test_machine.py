"""python -m pytest tests/test_machine.py

What a run makes of the machine: precision, threads, the limit of waiting, the update of --check, and what is said
where memory runs out.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from algos import ddpo, grpo, ppo, sft
from common import logging, machine
from common.cli import cli
from common.logging import closes_run
from common.machine import autocast_type, cpu_quota, describe_layout, is_out_of_memory, memory_advice, set_threads

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
X86 = "AVX" in torch.backends.cpu.get_cpu_capability()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def python(code, **env):
    """What a new process prints."""
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
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


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps the precision of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run_args(**flags):
    flags = {"mixed_precision": None, "dtype": "float32", "batch_size": 6, "merge_adapters": False} | flags
    return SimpleNamespace(**flags)


@pytest.mark.parametrize("use_cpu", ["true", "false"])
def test_bf16_is_the_default_of_a_gpu_that_has_it(fresh_accelerator, monkeypatch, use_cpu):
    """torch is made to say that there is one; accelerate's device stays the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
    asked = {}

    def accelerator(**options):
        asked.update(options)
        return SimpleNamespace(device=torch.device("cpu"), num_processes=1, mixed_precision="", distributed_type="NO")

    monkeypatch.setattr(accelerate, "Accelerator", accelerator)
    machine.launch(run_args())
    assert not asked["cpu"] and asked["mixed_precision"] == ("no" if use_cpu == "true" else "bf16")


def test_layout(fresh_accelerator, monkeypatch):
    """One line with types, device, processes and threads."""
    accelerator = machine.launch(run_args())
    torch.set_num_threads(1)
    assert describe_layout(run_args(), accelerator) == "float32 weights, no autocast, cpu, 1 processes x 1 threads"


def test_layout_of_slow_bfloat16(fresh_accelerator, monkeypatch):
    """By a measured factor, where bfloat16 is computed with at all."""
    monkeypatch.setattr(machine, "bfloat16_slowdown", lambda: 6.04)
    accelerator = machine.launch(run_args(mixed_precision="bf16"))
    warning = "(warning: on this CPU bfloat16 is 6.0 times slower than float32)"
    assert describe_layout(run_args(), accelerator).startswith(f"float32 weights, bf16 autocast {warning}, cpu, ")
    monkeypatch.setattr(machine, "bfloat16_slowdown", lambda: 1.2)
    assert "warning" not in describe_layout(run_args(), accelerator)
    monkeypatch.setattr(machine, "bfloat16_slowdown", lambda: pytest.fail("it was measured"))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "warning" not in describe_layout(run_args(), machine.launch(run_args()))


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_medium_precision_is_for_cpus_of_amd(vendor, monkeypatch):
    """On those of Intel it is slower. The kernels are this machine's, so AMD's name alone may not be enough."""
    cpu = SimpleNamespace(read_text=lambda: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(machine, "Path", lambda path: cpu)
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    machine.fast_cpu_matmul()
    assert asked == (["medium"] if vendor == "AuthenticAMD" else [])


@pytest.mark.skipif(not X86, reason="kernels of other CPUs are chosen in other ways")
def test_emulated_bfloat16_is_slower():
    """With the kernels of a CPU that has AVX2 alone."""
    code = "from common.machine import bfloat16_slowdown; print(bfloat16_slowdown())"
    assert float(python(code, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2", OMP_NUM_THREADS="1")) > 1.5


# ---- Threads ---------------------------------------------------------------------------------------------------------


def test_threads(monkeypatch):
    """The flag, else OMP_NUM_THREADS, else the CPUs divided by the processes; at least one."""
    monkeypatch.setattr(machine, "usable_cpus", lambda: 7.5)
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


LAUNCHERS = {
    "accelerate": ["accelerate", "launch", "--cpu"],
    "torchrun": ["torchrun", "--nproc_per_node=2"],
}


@pytest.mark.parametrize("threads", [None, pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_threads_under_launchers(launcher, threads, tmp_path):
    """Both export OMP_NUM_THREADS=1 where the user has set none: that one does not count."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from common import machine; machine.usable_cpus = lambda: 14\n"
        "print('exported', os.environ['OMP_NUM_THREADS'], 'used', machine.set_threads(), flush=True)"
    )
    program, *options = LAUNCHERS[launcher]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if threads:
        env["OMP_NUM_THREADS"] = threads
    done = subprocess.run([BIN / program, *options, script], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    share = 14 if launcher == "accelerate" else 7
    expected = f"used {threads or share}"
    assert done.stdout.splitlines()[0].endswith(expected), done.stdout
    if threads is None and launcher == "torchrun":
        assert done.stdout.startswith("exported 1 ")


def test_threads_before_functions_of_the_user(monkeypatch):
    """`main` runs with --threads from its first line on: a model or data may be computed there."""

    @closes_run
    def main(args):
        return torch.get_num_threads()

    assert main(SimpleNamespace(threads=2)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(SimpleNamespace(threads=None)) == 1


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_quota_of_version_2(tmp_path):
    """The least of the group and those above it; "max" is no limit."""
    groups = tmp_path / "cgroup"
    groups.write_text("0::/user/run\n")
    root = tmp_path / "fs"
    write(root / "user/run", cpu__max="max 100000\n")
    assert cpu_quota(groups, root) == math.inf
    write(root / "user", cpu__max="350000 100000\n")
    assert cpu_quota(groups, root) == 3.5
    write(root / "user/run", cpu__max="110000 50000\n")
    assert cpu_quota(groups, root) == 2.2
    write(root / "user/other", cpu__max="10000 100000\n")
    assert cpu_quota(groups, root) == 2.2


def test_quota_of_version_1(tmp_path):
    """In a container, whose group is mounted as the root and has a name of outside in /proc."""
    groups = tmp_path / "cgroup"
    groups.write_text("5:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n")
    root = tmp_path / "fs"
    write(root / "memory", cpu__max="100000 100000")  # no place for it
    write(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(groups, root) == math.inf
    write(root / "cpu", cpu__cfs_quota_us="50000\n")
    assert cpu_quota(groups, root) == 0.5
    groups.unlink()
    assert cpu_quota(groups, root) == math.inf  # no Linux


def test_a_quota_below_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert machine.usable_cpus() == 1.5 and set_threads() == 1
    monkeypatch.setattr(machine, "cpu_quota", lambda: math.inf)
    assert machine.usable_cpus() == 3 and set_threads() == 3


# ---- Processes -------------------------------------------------------------------------------------------------------


def test_timeout_of_two_processes(tmp_path):
    """The process group waits as long as TIMEOUT says, and longer than NCCL's 10 minutes."""
    script = tmp_path / "script.py"
    script.write_text(
        "from types import SimpleNamespace as S; import torch; from common.machine import launch\n"
        "launch(S(mixed_precision=None, dtype='float32', batch_size=2, merge_adapters=False))\n"
        "group = torch.distributed.distributed_c10d._get_default_group()\n"
        "backend = group._get_backend(torch.device('cpu'))\n"
        "text = f'{backend.name()} {backend.options._timeout.total_seconds()}'\n"
        f"open(f'{tmp_path}/{{torch.distributed.get_rank()}}', 'w').write(text)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [BIN / "torchrun", "--nproc_per_node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"gloo {machine.TIMEOUT.total_seconds()}"
    assert machine.TIMEOUT.total_seconds() > 3600


# ---- The update of --check -------------------------------------------------------------------------------------------


def test_longest_micro_batch():
    """As many as a process has in a forward pass: --micro-batch-size, or its share of the batch; repeated where the
    data have fewer."""
    rows = ["abc", "a", "abcdefg", "abcde"]
    accelerator = SimpleNamespace(num_processes=3)

    def taken(micro_batch_size, batch_size):
        sizes = SimpleNamespace(micro_batch_size=micro_batch_size, batch_size=batch_size)
        return machine.longest_micro_batch(rows, len, accelerator, sizes)

    assert taken(2, 33) == ["abcdefg", "abcde"]
    assert taken(11, 9) == ["abcdefg", "abcde", "abc"]
    assert taken(5, 33) == ["abcdefg", "abcde", "abc", "a", "abcdefg"]


def test_update_of_a_check(fresh_accelerator):
    """The second one finds gradients and moments in memory; what is not finite is an error."""
    accelerator = machine.launch(run_args())
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []

    def loss():
        held = [weight.grad is not None and weight in optimizer.state for weight in model.parameters()]
        found.append((model.training, *held))
        return model(torch.ones(7, 3)).sum() * scale

    scale = 1.0
    model.eval()
    sentence = machine.try_update(accelerator, model, optimizer, loss)
    assert found == [(True, False, False), (True, True, True)]
    assert sentence.startswith("one update of the largest micro-batch: 0.0") and sentence.endswith(" MB")
    scale = math.nan
    with pytest.raises(FloatingPointError, match="gradient of norm nan"):
        machine.try_update(accelerator, model, optimizer, loss)


def test_peak_memory():
    """In MB, what was freed included. A process begins with the peak of the one that started it: hence the bounds."""
    code = (
        "import torch; from common.machine import peak_memory_mb; x = torch.ones(800 * 2**18)\n"
        "del x; print(peak_memory_mb(torch.device('cpu')))"
    )
    assert 900 < float(python(code)) < 9000


# ---- Out of memory ---------------------------------------------------------------------------------------------------

FULL = "import torch; torch.empty(2**60, dtype=torch.uint8)"


def test_what_running_out_of_memory_looks_like():
    with pytest.raises(RuntimeError) as failure:
        exec(FULL)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("out of memory"))


def test_advice():
    """Of the flags that a script has, those that are not at their lowest."""
    smaller = "lower --micro-batch-size (now 8), lower --decode-batch-size (now 256), add --gradient-checkpointing"
    same = "the same command then continues from the last checkpoint, if there is one"
    fields = {"model": "m", "dataset": "d", "reward": "r.py:f"}
    for script in ppo, grpo:
        assert memory_advice(script.Args(**fields)) == (
            f"out of memory: {smaller}: {same}; other flags that lower it, for a new run: "
            "--max-prompt-length, --max-new-tokens, --lora-r"
        )
    lowest = {"micro_batch_size": 1, "gradient_checkpointing": True, "lora_r": 4, "mixed_precision": "no"}
    assert memory_advice(ddpo.Args(**fields, **lowest)) == (
        f"out of memory: lower --decode-batch-size (now 8): {same}; other flags that lower it, for a new run: "
        "--mixed-precision bf16"
    )


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
            exec(FULL)
        return step(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", full)
        with pytest.raises(SystemExit) as stop:
            run("full", 3)
    printed = capfd.readouterr().err
    assert stop.value.code == 2 and "DefaultCPUAllocator" in printed
    assert "\nerror: out of memory: lower --micro-batch-size (now 3), lower --decode-batch-size (now 256)" in printed
    assert [path.name for path in (tmp_path / "full/checkpoints").iterdir()] == ["step_00000002"]
    assert logging._open == []
    run("full", 1)
    assert f"continuing {tmp_path}/full from step 2" in capfd.readouterr().out
    run("whole", 3)
    last = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("full", "whole")]
    one, other = map(json.loads, last)
    assert one["step"] == 5 and one == pytest.approx(other, rel=1e-4)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
def test_large_tensors_ask_for_large_pages():
    """Importing a script is early enough for torch to advise Linux so: "hg" in the flags of the memory."""
    code = """if True:
        from algos import sft
        import torch
        tensor = torch.ones(100 * 2**18)
        print([line for line in open("/proc/self/smaps") if line.startswith("VmFlags") and " hg" in line])
    """
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT)
    assert " hg" in done.stdout, done.stderr
