"""Measures our scripts and their peers in turn, one process a run, on a quiet machine.

    bash benchmarks/throughput/make_peer_env.sh 1.16        # once: an environment of TRL; and 0.8.6
    python benchmarks/throughput/run.py sft dpo             # these algorithms; without names: all
    python benchmarks/throughput/run.py ppo --sides fp32    # these sides alone
    python benchmarks/throughput/run.py sft --dry           # prints the commands
    python benchmarks/throughput/run.py sft dpo --gpu       # on a GPU in bfloat16, with larger sizes

Rows go to --results; what is there of this commit is not measured again, so a measurement that was stopped goes on.
STEPS, ITERATIONS, MICRO and FORCE are read from the environment (language.py, diffusion.py, measurement.py).
"""

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = ("fp32", "bf16", "fp32-2-layers")  # the sides of plainrl
# Sides in the order of a round, and those of the first round alone. X: the precision. KEPT: the C library keeps what
# the process frees, as common/launch.py sets it for ours.
KEPT = "-kept"
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
SIDES = {
    "ppo": (
        "fp32 same-flags-kept defaults fp32-2-layers 2-layers-same-flags-kept",
        "same-flags tuned 2-layers-same-flags 2-layers-tuned",
    ),
    "sft": ("X X-padding-free-kept X-defaults", "X-padding-free X-same-flags"),
    "reward": ("X X-same-flags-kept X-defaults", "X-same-flags"),
    "dpo": ("X X-same-flags-kept X-precompute-kept X-defaults", "X-same-flags X-precompute"),
    "grpo": ("X X-same-flags-kept X-defaults", "X-same-flags X-micro-32"),
    "ddpo": ("fp32 same-flags same-flags-kept tuned defaults", ""),
}
GPU_SIZES = {"layers": 24, "width": 1024, "prompts": 16, "batch": 16, "length": 8}  # GPT-2 medium
REPEAT_ME = 75  # exit code of measurement.py where the hypervisor took too much


def sides_of(algorithm, first=True, gpu=False):
    """The sides of a round, in bfloat16 on a GPU; first: with those that it alone has."""
    always, once = SIDES[algorithm]
    names = f"{always} {once}" if first else always
    if gpu:
        return list(dict.fromkeys(names.replace("X", "bf16").replace(KEPT, "").split()))
    return names.replace("X", "fp32").split()


def file_of(algorithm, side):
    if side in OURS:
        return "diffusion" if algorithm == "ddpo" else "language"
    return "trl_0_8_6" if algorithm in ("ppo", "ddpo") else "trl_1_16"


def python_of(file):
    """The interpreter that runs a file: that of the peer's environment, PEER_1_16 or .peers/trl-1.16 here."""
    if not file.startswith("trl_"):
        return sys.executable
    version = file.removeprefix("trl_")
    folder = os.environ.get(f"PEER_{version}", HERE / f".peers/trl-{version.replace('_', '.')}")
    return str(Path(folder) / "bin/python")


def commit():
    """The commit of the code, marked where it has changes. Results and pages are no code."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changes = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/throughput/*.csv", ":!*.md"]
    return f"{head}-dirty" if subprocess.run(changes, cwd=ROOT).returncode else head


def stored(results, code):
    """{(algorithm, side, repeat)} of the runs of this code in the CSV file; with changes every run is new."""
    if not results.exists() or code.endswith("-dirty"):
        return set()
    with open(results) as file:
        rows = list(csv.DictReader(file))
    return {(row["algorithm"], row["mode"], int(row["repeat"])) for row in rows if row["commit"] == code}


def start(command, environment):
    """Runs a command that measures, up to three times where the hypervisor took too much; a failure ends this one."""
    for _ in range(3):
        status = subprocess.run(command, env=environment).returncode
        if status != REPEAT_ME:
            break
    if status:
        sys.exit(f"error: exit code {status}; the same command goes on from here")


def measure_all(algorithm, chosen, repeats, results, dry, gpu):
    code = commit()
    environment = {"OMP_NUM_THREADS": "2", "COMMIT": code}
    if gpu:
        environment |= {"SIZES": json.dumps(GPU_SIZES), "STEPS": "12"}
    environment |= os.environ
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONWARNINGS": "ignore", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    plan = []
    for repeat in range(1, repeats + 1):
        plan += [(side, repeat) for side in sides_of(algorithm, repeat == 1, gpu)]
    with tempfile.TemporaryDirectory() as model:
        if not dry:
            prepare = [sys.executable, __file__, algorithm, "--prepare", model]
            subprocess.run(prepare, env=environment, check=True)
        for side, repeat in plan:
            if chosen and side not in chosen or (algorithm, side, repeat) in stored(results, code):
                continue
            command = [python_of(file_of(algorithm, side)), __file__, algorithm, "--one", side]
            command += ["--repeat", str(repeat), "--results", str(results), "--model", model]
            print(*command, flush=True)
            if not dry:
                start(command, environment | (KEEPING if side.endswith(KEPT) else {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=", ".join(SIDES))
    parser.add_argument("--sides", nargs="+", default=[], help="some of what --dry shows behind --one")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over the sides")
    parser.add_argument("--results", type=Path, help="default: runs/throughput.csv, or throughput-gpu.csv")
    parser.add_argument("--dry", action="store_true", help="print the commands")
    parser.add_argument("--gpu", action="store_true")
    for name in ("--one", "--repeat", "--model", "--prepare"):  # of the commands that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = ["sft", "reward", "dpo", "grpo"]  # the peer of the others is too old
    results = (options.results or ROOT / f"runs/throughput{'-gpu' if options.gpu else ''}.csv").resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    for algorithm in options.algorithms or (on_gpu if options.gpu else SIDES):
        if options.prepare:
            module = importlib.import_module("diffusion" if algorithm == "ddpo" else "language")
            module.prepare(Path(options.prepare), algorithm)
        elif options.one:
            import measurement

            if options.one in OURS:
                importlib.import_module("common.launch").keep_freed_memory()  # before the first product, as in a script
            module = importlib.import_module(file_of(algorithm, options.one))
            measurement.record(results, algorithm, options.one, options.repeat, options.model, module.measure)
        else:
            measure_all(algorithm, options.sides, options.repeats, results, options.dry, options.gpu)


if __name__ == "__main__":
    main()
