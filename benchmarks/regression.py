"""Compares two commits on a claim: the same seeds with both, and the interval of the difference.

    python benchmarks/regression.py HEAD~3 HEAD sft-randomwalks                  # five seeds, the first variant
    python benchmarks/regression.py v1 v2 ppo-randomwalks --variant lora --seeds 1 2 3 4 5 6 7 8 --jobs 4
    python benchmarks/regression.py v1 v2 grpo-sums --first 20                   # the first records alone, in float64

Each commit gets a checkout in runs/regression/<commit>, where the commands of the claim's present run.sh run. What is
finished there is not repeated. A seed gives both commits the same weights, rows and draws, so the difference is taken
seed by seed. Its interval is that of Student's t at 95 %. Exit status 1 where that of a score leaves out 0.
A change that keeps the arithmetic gives the same records: one seed is enough to see it. --first takes so many of
them in float64, and stores the largest difference in curves/same.csv: a curve of the old commit is then one of the new
one, too.
"""

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.check import SAME
from benchmarks.claims import CLAIMS
from benchmarks.compare import read_records
from benchmarks.gpu import differences
from benchmarks.seeds import commands, run_dirs_of
from benchmarks.tables import ROOT, history, markdown, read_csv, read_jsonl, shown, t_interval, write_csv

MOST_DIFFERENCE = 1e-6  # of first records in float64, relative: rounding, which every optimizer step enlarges


def checkout(commit):
    revision = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "--verify", f"{commit}^{{commit}}"]
    name = subprocess.run(revision, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    folder = ROOT / "runs/regression" / name
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "-q", name], check=True)
    return folder


def run_seed(folder, claim, variant, seed):
    run_dir = f"runs/curves/{claim}/{variant}-seed{seed}"
    finish(folder, needed(commands(claim, seed, variants=[]), run_dir))
    print(f"{folder.name}: seed {seed} is complete", flush=True)
    return folder / run_dir


def finish(folder, commands_in_order):
    for command in commands_in_order:
        subprocess.run(shlex.split(command), cwd=folder, stdout=subprocess.DEVNULL, check=True)


def needed(commands_of_seed, run_dir):
    """The command that makes run_dir, after those that make what it names."""
    found = []
    for command in reversed(commands_of_seed):
        [made] = run_dirs_of(command) or command.split()[-1:]
        if made == run_dir or any(made in later for later in found):
            found.insert(0, command)
    return found


def first_records(folder, command, count, run_dir):
    """The first records of a command in float64 without autocast, in a checkout. The run then ends."""
    ours = {"dtype": "float64", "mixed-precision": "no", "eval-every": 0, "save-every": 0, "run-dir": run_dir}
    others = re.sub(rf" --({'|'.join(ours)}) \S+", "", command)  # a flag may be given only once
    words = " ".join([others, *(f"--{flag} {value}" for flag, value in ours.items())])
    process = subprocess.Popen(shlex.split(words), cwd=folder, stdout=subprocess.DEVNULL)
    records = []
    while len(records) < count:
        ended = process.poll() is not None
        records = read_records(run_dir / "metrics.jsonl")
        if ended:
            break
        time.sleep(0.2)
    process.kill()
    process.wait()
    if len(records) < count:
        sys.exit(f"error: {len(records)} records of {words} in {folder}")
    return records[:count]


def store_first(claim, variant, folders, count):
    """Compares the first records of a variant's first seed in two checkouts, and stores their largest relative
    difference. The models that it starts from are made by the newer one, for both; each plants a bug in itself."""
    *before, command = needed(commands(claim, 1, []), f"runs/curves/{claim}/{variant}-seed1")
    finish(folders[0], [line for line in before if "/planted.py " in line])
    finish(folders[1], before)
    command = command.replace(" runs/curves/", f" {folders[1]}/runs/curves/")
    with tempfile.TemporaryDirectory() as runs:
        old, new = (first_records(at, command, count, Path(runs, f"{i}")) for i, at in enumerate(folders))
    found = []
    for before, after in zip(old, new, strict=True):
        shared = {name: before[name] for name in before if name in after}  # one commit may lack a metric
        found += differences(after, shared)
    difference, metric = max(found)
    if difference > MOST_DIFFERENCE:
        sys.exit(f"error: {metric} of {variant} differs by {difference:.1e}, more than {MOST_DIFFERENCE:.0e}")
    row = {"claim": claim, "variant": variant, "old": folders[0].name, "new": folders[1].name, "records": str(count)}
    row |= {"difference": f"{difference:.1e}", "metric": metric}
    others = [other for other in read_csv(SAME) if any(other[key] != row[key] for key in ("claim", "variant", "old"))]
    write_csv(SAME, sorted([*others, row], key=lambda row: list(row.values())))
    print(row)


def summaries(run_dir, score):
    values = history(read_jsonl(run_dir / "metrics.jsonl"), score)
    times = [record["time"] for record in read_jsonl(run_dir / "perf.jsonl")]
    return {
        "last": values[-1],
        "best": max(values),
        "mean of the curve": mean(values),
        "seconds": times[-1] - times[0],
    }


def verdict(center, half_width):
    if center == half_width == 0:
        return "equal"
    if math.isnan(half_width):
        return "one seed: no interval"
    if abs(center) <= half_width:
        return f"no difference is shown; one above {half_width:.2g} would be"
    return "higher" if center > 0 else "lower"


def report(old_runs, new_runs, score):
    """(table as lines, does a score differ?) of run directories, in the order of their seeds."""
    old = [summaries(run_dir, score) for run_dir in old_runs]
    new = [summaries(run_dir, score) for run_dir in new_runs]
    rows = []
    differs = False
    for name in old[0]:
        differences = [after[name] - before[name] for before, after in zip(old, new, strict=True)]
        center, half_width = t_interval(differences)
        words = verdict(center, half_width)
        differs |= name != "seconds" and words in ("higher", "lower")
        row = {score: name}
        for title, runs in (("old", old), ("new", new)):
            row[title] = f"{mean(run[name] for run in runs):.4f}"
        row["difference"] = f"{center:+.4f}"
        row["95 % interval"] = f"{center - half_width:+.4f} to {center + half_width:+.4f}"
        rows.append(row | {"the new one is": words})
    return markdown(rows), differs


def equal_records(old_runs, new_runs):
    """In how many seeds the two wrote the same metrics, to the byte."""
    pairs = zip(old_runs, new_runs, strict=True)
    return sum((old / "metrics.jsonl").read_bytes() == (new / "metrics.jsonl").read_bytes() for old, new in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="another one")
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--variant", help="default: the first that README names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--first", type=int, metavar="RECORDS", help="compare those of one run alone")
    arguments = parser.parse_args()
    claim = arguments.claim
    variant = arguments.variant or next(iter(shown(claim)))
    folders = [checkout(arguments.old), checkout(arguments.new)]
    if arguments.first:
        return store_first(claim, variant, folders, arguments.first)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = []
        for seed in arguments.seeds:  # with both before the next one, so that both meet the same load of the machine
            for folder in folders:
                waiting.append(pool.submit(run_seed, folder, claim, variant, seed))
        run_dirs = [run.result() for run in waiting]
    old_runs, new_runs = run_dirs[::2], run_dirs[1::2]
    lines, differs = report(old_runs, new_runs, CLAIMS[claim].score_of(variant))
    print("\n".join(["", f"{claim}, {variant}, {len(old_runs)} seeds, each with both commits", "", *lines]))
    print(f"Equal records in {equal_records(old_runs, new_runs)} of {len(old_runs)} seeds.")
    sys.exit(differs)


if __name__ == "__main__":
    main()
