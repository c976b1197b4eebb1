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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.check import ROOT, claim_path, collect, verify_claim, write
from benchmarks.claims import CLAIMS


def commands(claim, seed, variants):
    """The lines that run.sh prints for a seed, a command each."""
    return run_sh(claim, seed, variants, DRY="1").communicate()[0].splitlines()


def run_sh(claim, seed, variants, **environment):
    """The process of a claim's run.sh for one seed."""
    environment |= {"SEEDS": str(seed), "VARIANTS": " ".join(variants)}
    return subprocess.Popen(
        ["bash", str(claim_path(claim) / "run.sh")],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_dirs_of(command):
    """The run directory that a command names, in a list, or none."""
    return re.findall(r"--run-dir (\S+)", command)


def default_seeds(claim):
    """The seeds that run.sh has by itself."""
    [seeds] = re.findall(r"\$\{SEEDS:-([\d ]+)\}", (claim_path(claim) / "run.sh").read_text())
    return [int(seed) for seed in seeds.split()]


class Progress:
    """Says what begins and ends, and how long the rest will take."""

    def __init__(self, total, jobs):
        self.total = total
        self.jobs = jobs
        self.done = 0
        self.start = time.monotonic()

    def say(self, text):
        minutes = (time.monotonic() - self.start) / 60
        left = ""
        if self.done:
            left = f", about {minutes / self.done * (self.total - self.done):.0f} minutes left"
        print(f"[{self.done} of {self.total}, {minutes:.0f} minutes{left}] {text}", flush=True)


def run_seed(claim, seed, variants, progress):
    """Runs the commands of a seed, one after the other. Returns False where one fails."""
    planned = set(commands(claim, seed, variants))
    folder = ROOT / "runs/curves" / claim
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"seed{seed}.log"
    current = None
    with open(log, "a") as file:
        process = run_sh(claim, seed, variants)
        for line in process.stdout:
            file.write(line)
            file.flush()
            if line.strip() in planned:
                progress.done += current is not None
                current = line.strip()
                progress.say(current)
    failed = process.wait() != 0
    progress.done += current is not None and not failed
    if failed:
        progress.say(f"seed {seed} was stopped or has failed, see {log}")
    else:
        progress.say(f"seed {seed} is complete")
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--variants", nargs="+", default=[], help="the names in benchmarks/curves/<claim>/README.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="seeds at a time")
    arguments = parser.parse_args()
    claim = arguments.claim
    seeds = arguments.seeds or default_seeds(claim)
    total = sum(len(commands(claim, seed, arguments.variants)) for seed in seeds)
    progress = Progress(total, arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(run_seed, claim, seed, arguments.variants, progress) for seed in seeds]
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
            finished += run_dirs_of(command)
    collect(claim, [ROOT / run_dir for run_dir in finished])
    write()
    print("\n".join(verify_claim(claim)) or f"{claim} holds")


if __name__ == "__main__":
    main()
