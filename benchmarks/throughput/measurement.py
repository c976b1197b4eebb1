"""How a run is measured: on a quiet machine, between two measurements of the machine's peak, as a row of a CSV file.

The benchmarks and the scripts of their peers import it. A run leaves no row, and the process ends with exit code 75,
where the hypervisor took more than 3 % of the time of the processors (steal): common.sh repeats it. FORCE=1 neither
waits for a quiet machine nor drops a run.
"""

import argparse
import csv
import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from common.launch import fast_cpu_matmul

TINY = bool(os.environ.get("PLAINRL_BENCH_TINY"))
THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
MOST_STEAL = 0.03  # runs that give memory back and take it again have some 2 % of their own
LEAST_IDLE = 0.9  # share of the processors, before a run
PATIENCE = 120  # seconds to wait for that
REPEAT_ME = 75  # exit code

# ---- The machine -----------------------------------------------------------------------------------------------------


def cpu_ticks():
    """{name: ticks of all processors since the machine has started}."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    with open("/proc/stat") as file:
        numbers = file.readline().split()[1:]
    return {name: int(number) for name, number in zip(names, numbers, strict=False)}


def share(name, before, after):
    """Which share of the ticks between two measurements was of this kind."""
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
        idle = share("idle", before, cpu_ticks())
        if idle > LEAST_IDLE:
            return
        print(f"waiting: other processes leave {100 * idle:.0f} % of the machine idle", flush=True)
    sys.exit(f"error: the machine was not {100 * LEAST_IDLE:.0f} % idle in {PATIENCE} s: wait, or set FORCE=1")


def steal_since(before):
    """The share that the hypervisor took since `before`; ends the process where it is too much."""
    steal = share("steal", before, cpu_ticks())
    if steal > MOST_STEAL and not os.environ.get("FORCE"):
        print(f"not recorded: steal was {100 * steal:.1f} % of the run", flush=True)
        sys.exit(REPEAT_ME)
    return steal


def machine(packages):
    """Columns of the CSV file that say where and with what a run is measured; the load is that before it."""
    cpu = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return {
        "device": f"{(cpu or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": THREADS,
        "versions": "; ".join([f"python {platform.python_version()}", *versions]),
        "loadavg": f"{os.getloadavg()[0]:.2f}",
        "commit": os.environ.get("COMMIT", "by hand"),  # common.sh sets it
    }


def peak_memory():
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def keep_freed_memory():
    """Lets the C library keep freed memory, which no flag of a peer does and plainrl does not."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def memory_of(mode):
    """Keeps freed memory in the modes of a peer that are named for it."""
    if mode.endswith("kept-memory"):
        keep_freed_memory()


def gemm_peak(dtype):
    """GFLOP/s of the best 1024 x 768 x 3072 matrix product within half a second; fp32 at the fastest exact setting."""
    before = torch.get_float32_matmul_precision()
    fast_cpu_matmul()
    a = torch.randn(1024, 768).to(dtype)
    b = torch.randn(768, 3072).to(dtype)
    seconds = []
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begun)
    torch.set_float32_matmul_precision(before)
    return 2 * 1024 * 768 * 3072 / min(seconds) / 1e9


# ---- Rows ------------------------------------------------------------------------------------------------------------


def append(results, rows):
    """Appends rows to the CSV file, whose first row has named the columns."""
    results = Path(results)
    heads = list(rows[0])
    if results.exists():
        with open(results) as file:
            heads = next(csv.reader(file))
    with open(results, "a", newline="") as file:
        writer = csv.DictWriter(file, heads, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def record(results, system, mode, repeat, measure):
    """Calls measure() -> (columns, useful GFLOP/s), and appends a row to the CSV file."""
    wait_for_quiet()
    dtype = torch.float32
    if "bf16" in mode:
        dtype = torch.bfloat16
    packages = ["torch", "transformers", "accelerate", "tokenizers", "numpy"]
    if system == "trl":
        packages.append("trl")
    where = machine(packages)
    torch.set_num_threads(THREADS)
    memory_of(mode)
    print(f"{system} {mode} repeat {repeat}", flush=True)
    ticks = cpu_ticks()
    peak = gemm_peak(dtype)
    columns, gflops = measure()
    memory = peak_memory()
    peak = max(peak, gemm_peak(dtype))
    steal = steal_since(ticks)
    row = {"system": system, "mode": mode, "repeat": repeat} | columns
    row |= {"peak_memory_mb": f"{memory:.0f}", "gflops": f"{gflops:.1f}", "peak_gflops": f"{peak:.1f}"}
    row |= {"fraction": f"{gflops / peak:.4f}", "steal": f"{steal:.4f}"}
    append(results, [row | where])


# ---- Runs and command lines ------------------------------------------------------------------------------------------


def short_run(script, mode, **flags):
    """The lines of perf.jsonl and of metrics.jsonl of a run of a script (a module of algos). The run ends where it
    would write its only checkpoint: saving is not measured."""

    from common import checkpoint
    from common import launch as of_scripts

    class Measured(Exception):
        pass

    def stop(*args, **options):
        raise Measured

    off = {"eval_dataset": None, "metric": None, "eval_every": 0, "save_every": 0}
    off = {name: value for name, value in off.items() if hasattr(script.Args, name)}
    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint, "pack_state", stop))
        if mode == "fp32-highest":
            stack.enter_context(patch.object(of_scripts, "fast_cpu_matmul", lambda: False))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with suppress(Measured):
            script.main(script.Args(run_dir=f"{folder}/run", threads=THREADS, **off, **flags))
        assert not Path(folder, "run/checkpoints").exists()
        return [[json.loads(line) for line in open(f"{folder}/run/{x}.jsonl")] for x in ("perf", "metrics")]


def main(doc, systems, measure, prepare=None):
    """Command line of a benchmark or of a peer: records measure(mode, model directory). systems: {mode: system}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if prepare:
        parser.add_argument("--prepare", metavar="DIR", type=Path, help="write model and tokenizer")
    parser.add_argument("--mode", choices=systems, help="measure one run in this process")
    parser.add_argument("--model", help="what --prepare of the benchmark wrote")
    parser.add_argument("--repeat", type=int, default=1, help="number of this run in the table")
    parser.add_argument("--results", help="the CSV file that gets a row")
    options = parser.parse_args()
    if prepare and options.prepare:
        prepare(options.prepare)
    if options.mode:
        mode = options.mode
        record(options.results, systems[mode], mode, options.repeat, lambda: measure(mode, options.model))
