"""Measures one run of a side in this process: on a quiet machine, between two measurements of the peak of its CPU, or
of its GPU where one is visible.

A run leaves no row, and the process ends with exit code 75, where the hypervisor took more than 3 % of the time of the
processors (steal): run.py repeats it. FORCE=1 neither waits for a quiet machine nor drops a run.
"""

import csv
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from common.launch import choose_products, peak_memory_mb

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
ITERATIONS = int(os.environ.get("ITERATIONS", 2))  # of a run of ppo, grpo and ddpo; the first is not counted
MOST_STEAL = 0.03  # runs that give memory back and take it again have some 2 % of their own
LEAST_IDLE = 0.9  # share of the processors, before a run
PATIENCE = 120  # seconds to wait for that
REPEAT_ME = 75  # exit code
PACKAGES = "torch transformers accelerate tokenizers numpy trl diffusers".split()  # as far as they are installed


def cpu_ticks():
    """{name: ticks of all processors since the machine has started}."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    with open("/proc/stat") as file:
        numbers = file.readline().split()[1:]
    return {name: int(number) for name, number in zip(names, numbers, strict=False)}


def share(name, before):
    """Which share of the ticks since `before` was of this kind."""
    after = cpu_ticks()
    passed = {key: after[key] - before[key] for key in after}
    return passed[name] / max(1, sum(passed.values()))


def wait_for_quiet():
    """Returns when other processes leave the machine idle for two seconds; exits when they do not in two minutes."""
    if os.environ.get("FORCE"):
        return
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = cpu_ticks()
        time.sleep(2)
        idle = share("idle", before)
        if idle > LEAST_IDLE:
            return
        print(f"waiting: other processes leave {100 * idle:.0f} % of the machine idle", flush=True)
    sys.exit(f"error: the machine was not {100 * LEAST_IDLE:.0f} % idle in {PATIENCE} s: wait, or set FORCE=1")


def machine():
    """Columns of the CSV file that say where and with what a run is measured; the load is that before it."""
    cpu = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    device = f"{(cpu or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return {
        "device": torch.cuda.get_device_name() if GPU else device,
        "threads": THREADS,
        "versions": "; ".join([f"python {platform.python_version()}", *versions]),
        "loadavg": f"{os.getloadavg()[0]:.2f}",
        "commit": os.environ.get("COMMIT", "by hand"),  # run.py sets it
    }


def gemm_peak(dtype):
    """GFLOP/s of the best matrix product within half a second: 1024 x 768 x 3072 on a CPU, in fp32 at the fastest exact
    setting; eight times as large each way on a GPU."""
    before = torch.get_float32_matmul_precision()
    if not GPU:
        choose_products()
    rows, width, columns = (8 * size if GPU else size for size in (1024, 768, 3072))
    a = torch.randn(rows, width, device=DEVICE).to(dtype)
    b = torch.randn(width, columns, device=DEVICE).to(dtype)
    seconds = []
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ b
        if GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    torch.set_float32_matmul_precision(before)
    return 2 * rows * width * columns / min(seconds) / 1e9


def append(results, row):
    with open(results, "a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def record(results, algorithm, side, repeat, model, measure):
    """Calls measure(algorithm, side, model) -> (columns, useful GFLOP/s), and appends a row to the CSV file.

    columns: at least seconds (of what the work is about); `loss` and `grad_norm` of the first step say whether two
    sides did the same.
    """
    wait_for_quiet()
    where = machine()
    torch.set_num_threads(THREADS)
    dtype = torch.bfloat16 if "bf16" in side else torch.float32
    ticks = cpu_ticks()
    peak = gemm_peak(dtype)
    columns, gflops = measure(algorithm, side.removesuffix("-kept"), model)  # run.py has set its variables
    memory = peak_memory_mb(DEVICE)
    peak = max(peak, gemm_peak(dtype))
    steal = share("steal", ticks)
    if steal > MOST_STEAL and not os.environ.get("FORCE"):
        print(f"not recorded: steal was {100 * steal:.1f} % of the run", flush=True)
        sys.exit(REPEAT_ME)
    row = {"algorithm": algorithm, "mode": side, "repeat": repeat, "seconds": f"{columns['seconds']:.4f}"}
    row |= {"peak_memory_mb": f"{memory:.0f}", "fraction": f"{gflops / peak:.4f}"}
    for name in ("loss", "grad_norm"):
        row[name] = f"{columns[name]:.7g}" if name in columns else ""
    print(row, flush=True)
    append(results, row | {"steal": f"{steal:.4f}"} | where)


def short_run(script, **flags):
    """{name: number} of perf.jsonl and metrics.jsonl for each step of a run of a script (a module of algos), without
    evaluations. The run ends where it would write its only checkpoint: saving is not measured."""
    from common import checkpoint

    class Measured(Exception):
        pass

    def stop(*args, **options):
        raise Measured

    off = {"eval_dataset": None, "metric": None, "eval_every": 0, "save_every": 0}
    off = {name: value for name, value in off.items() if hasattr(script.Args, name)}
    with tempfile.TemporaryDirectory() as folder, patch.object(checkpoint, "pack_state", stop):
        with suppress(Measured):
            script.main(script.Args(run_dir=f"{folder}/run", threads=THREADS, **off, **flags))
        assert not Path(folder, "run/checkpoints").exists()
        files = [Path(folder, f"run/{name}.jsonl").read_text().splitlines() for name in ("perf", "metrics")]
    return [json.loads(perf) | json.loads(metrics) for perf, metrics in zip(*files, strict=True)]


def column(steps, *keys):
    """The sum of these numbers for each step of a run."""
    return [sum(step[key] for key in keys) for step in steps]


def figures(flops, seconds, skipped, losses=(), grad_norms=()):
    """(columns of a row, useful GFLOP/s) from the useful operations, seconds, losses and norms of the gradient of all
    steps; so many of the first are not counted."""
    counted = seconds[skipped:]
    rates = [work / time for work, time in zip(flops[skipped:], counted, strict=True)]
    columns = {"seconds": median(counted)}
    if losses:
        columns |= {"loss": losses[0], "grad_norm": grad_norms[0]}
    return columns, median(rates) / 1e9
