"""Runs the seeds of a claim, several at a time, and stores their curves.

    python benchmarks/seeds.py sft-randomwalks                      # all that its run.sh has
    python benchmarks/seeds.py ppo-randomwalks --variants default --seeds 1 2 3 --jobs 4

A seed is a chain of commands, `SEEDS=3 bash benchmarks/curves/<claim>/run.sh`; what they print is in
runs/curves/<claim>/seed3.log. Stop it at any time: the same command goes on where it was. Each run has one thread, so
seconds are only comparable with those of runs that had as many others beside them.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.check import collect, verify_claim, write
from benchmarks.claims import CLAIMS
from benchmarks.tables import ROOT, claim_path


def run_sh(claim, seed, variants, dry="", **options):
    environment = os.environ | {"SEEDS": str(seed), "VARIANTS": " ".join(variants), "DRY": dry}
    return subprocess.run(["bash", claim_path(claim) / "run.sh"], env=environment, **options)


def commands(claim, seed, variants):
    """The lines that run.sh prints for a seed, a command each."""
    return run_sh(claim, seed, variants, dry="1", check=True, capture_output=True, text=True).stdout.splitlines()


def run_dirs_of(command):
    """The run directory that a command names, in a list, or none."""
    return re.findall(r"--run-dir (\S+)", command)


def default_seeds(claim):
    [seeds] = re.findall(r"\$\{SEEDS:-([\d ]+)\}", (claim_path(claim) / "run.sh").read_text())
    return [int(seed) for seed in seeds.split()]


def run_seed(claim, seed, variants):
    """Runs the commands of a seed, one after the other. Returns False where one fails."""
    log = ROOT / f"runs/curves/{claim}/seed{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}: {len(commands(claim, seed, variants))} commands, see {log}", flush=True)
    with open(log, "a") as file:
        done = run_sh(claim, seed, variants, stdout=file, stderr=file)
    said = "is complete" if done.returncode == 0 else f"was stopped or has failed, see {log}"
    print(f"seed {seed} {said}", flush=True)
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--variants", nargs="+", default=[], help="the names in benchmarks/curves/<claim>/README.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="seeds at a time")
    arguments = parser.parse_args()
    claim = arguments.claim
    seeds = arguments.seeds or default_seeds(claim)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(run_seed, claim, seed, arguments.variants) for seed in seeds]
        try:
            passed = [seed.result() for seed in running]
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit("stopped: the same command goes on from here")
    if not all(passed):
        sys.exit(1)
    finished = []
    for seed in seeds:
        for command in commands(claim, seed, arguments.variants):
            finished += [ROOT / run_dir for run_dir in run_dirs_of(command) if f"/{claim}/" in run_dir]
    collect(claim, finished)
    write()
    print("\n".join(verify_claim(claim)) or f"{claim} holds")


if __name__ == "__main__":
    main()
