"""Signs of a mistake in the numbers that a run logs: the first iteration of the pitfalls, before any has been learned
from.

    python benchmarks/signs.py                     # writes benchmarks/curves/pitfalls/signs.csv
    python benchmarks/check.py --write             # the table in that folder's README.md

Two signs need no other implementation to compare with. A token drawn from the policy of the loss has on average minus
its log-probability = the entropy. And how rows are split into micro-batches must not change the gradient.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.seeds import commands
from benchmarks.tables import ROOT, claim_path, read_jsonl, write_csv

CLAIM = "pitfalls"
FILE = claim_path(CLAIM) / "signs.csv"
# KL and reference show in the metrics of a whole run
VARIANTS = """sums top-k top-p end-token sums-at-0.7 temperature hinted positions countdown mean-of-means calculator
    tool-trained ppo whitening""".split()
SEEDS = range(1, 11)
MICRO_BATCH_SIZES = (16, 32)


def first_iteration(variant, seed, micro_batch_size, folder):
    """The command of a variant as run.sh has it, but for one iteration; without a KL grpo.py would leave out tokens."""
    line = commands(CLAIM, seed, [variant])[-1]  # a line before it may make the script
    words = re.sub(r" --(eval-every|micro-batch-size|run-dir|resume) \S+", "", line).split()
    settings = yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text())
    episodes = settings.get("rollout_batch_size", 512)
    flags = {"run-dir": folder, "total-episodes": episodes, "micro-batch-size": micro_batch_size, "eval-every": 0}
    if "grpo.py" in words[1]:
        flags["kl-coef"] = 1e-9
    for flag, value in flags.items():
        words += [f"--{flag}", str(value)]
    return words


def measure(variant, seed, micro_batch_size):
    with tempfile.TemporaryDirectory() as folder:
        words = first_iteration(variant, seed, micro_batch_size, f"{folder}/run")
        print(shlex.join(words), flush=True)
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [record] = read_jsonl(Path(folder) / "run/metrics.jsonl")
    nll = record.get("policy/nll")
    if nll is None:  # ppo.py has the sum over a response
        nll = record["objective/entropy"] / record["tokens/responses_len"]
    row = {"variant": variant, "seed": seed, "micro_batch_size": micro_batch_size}
    return row | {"nll": nll, "entropy": record["policy/entropy"], "grad_norm": record["optim/grad_norm"]}


def main():
    for command in commands(CLAIM, 1, VARIANTS):
        if "/planted.py " in command:  # the copies with a bug, before several seeds want them at a time
            subprocess.run(shlex.split(command), cwd=ROOT, check=True)
    small, large = MICRO_BATCH_SIZES
    asked = [*product(VARIANTS, SEEDS, [small]), *product(VARIANTS, [1], [large])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [*pool.map(lambda each: measure(*each), asked)]
    write_csv(FILE, rows)


if __name__ == "__main__":
    main()
