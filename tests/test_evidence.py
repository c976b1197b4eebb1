"""Commands that make the curves of benchmarks/, their intervals, and the comparison of two commits."""

import hashlib
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT

from benchmarks import check, regression, seeds
from benchmarks.claims import CLAIMS


def test_interval_of_a_normal_sample():
    """The bootstrap of a mean is close to the theory where there are many values."""
    values = np.random.default_rng(3).normal(7.0, 2.0, size=400)
    low, high = check.interval(values)
    half_width = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half_width, abs=0.02)
    assert high == pytest.approx(values.mean() + half_width, abs=0.02)


def test_average_says_what_is_known():
    assert check.average([0.25]) == "0.250"
    assert check.average([0.2, 0.3, 0.4]) == "0.300 ± 0.100"
    assert check.average([0.5] * 5) == "0.500 (0.500 to 0.500)"


@pytest.mark.parametrize("claim", list(CLAIMS))
def test_run_sh_names_every_stored_run(claim):
    """What DRY=1 prints holds a command for each curve, once, and no other variant of a stored seed."""
    stored = {(run["variant"], int(run["seed"])) for run in check.stored_runs(claim)}
    for seed in seeds.default_seeds(claim):
        run_dirs = []
        for command in seeds.commands(claim, seed, []):
            run_dirs += seeds.run_dirs_of(command)
        variants = [run_dir.rpartition("/")[2].rpartition("-seed")[0] for run_dir in run_dirs]
        assert len(set(variants)) == len(variants)
        assert {variant for variant, number in stored if number == seed} <= set(variants)
    assert {seed for _, seed in stored} <= set(seeds.default_seeds(claim))


def test_variants_are_chosen():
    [command] = seeds.commands("ppo-randomwalks", 2, ["lora"])
    assert "--lora-r 8" in command and "lora-seed2" in command


def fake_run(folder, scores, seconds):
    folder.mkdir(parents=True)
    records = [{"step": step, "eval/optimality": score} for step, score in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (folder / "perf.jsonl").write_text(f'{{"time": 100}}\n{{"time": {100 + seconds}}}\n')
    return folder


def test_paired_interval_by_hand():
    """Differences 1, 2, 3, 6: mean 3, deviation sqrt(14 / 3), half width 3.182 sqrt(14 / 3) / 2."""
    center, half_width = regression.paired_interval([1, 2, 3, 6])
    assert center == 3
    assert half_width == pytest.approx(3.182 * math.sqrt(14 / 3) / 2)


def test_a_steady_loss_is_seen_and_noise_is_not(tmp_path):
    """Seeds differ by 0.3 among themselves, the commits by 0.02 in each seed."""
    starts = [0.5, 0.6, 0.7, 0.8]
    old = [fake_run(tmp_path / f"old{i}", [0.1, start], seconds=7) for i, start in enumerate(starts)]
    drops = [0.02, 0.021, 0.019, 0.02]
    ends = [start - drop for start, drop in zip(starts, drops, strict=True)]
    worse = [fake_run(tmp_path / f"worse{i}", [0.1, end], seconds=7) for i, end in enumerate(ends)]
    lines, differs = regression.report(old, worse, "eval/optimality")
    assert differs
    assert lines[2].split(" | ")[-1] == "lower |" and "-0.0200" in lines[2]

    noise = [0.03, -0.02, 0.01, -0.02]
    ends = [start + difference for start, difference in zip(starts, noise, strict=True)]
    noisy = [fake_run(tmp_path / f"noisy{i}", [0.1, end], seconds=5) for i, end in enumerate(ends)]
    lines, differs = regression.report(old, noisy, "eval/optimality")
    assert not differs
    assert "no difference is shown" in lines[2]
    assert "lower" in lines[5]  # the seconds, which do not count as a difference
    assert regression.equal_records(old, noisy) == 0
    assert regression.equal_records(old, old) == 4


def test_an_unknown_commit_is_named():
    command = [sys.executable, "benchmarks/regression.py", "no-such-commit", "HEAD", "sft-randomwalks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: no commit no-such-commit\n"


def test_only_changed_code_makes_a_run_dirty():
    """A run whose script is that of the commit, and one whose script differs by a byte."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    script = subprocess.run(["git", "show", "HEAD:algos/sft.py"], cwd=ROOT, capture_output=True).stdout
    env = {"commit": f"{head}-dirty", "command": "algos/sft.py --seed 3"}
    same = {"script": hashlib.sha256(script).hexdigest(), "model": "anything"}
    other = {"script": hashlib.sha256(script + b"\n").hexdigest()}
    assert check.commit_of(env | {"files": same}) == head
    assert check.commit_of(env | {"files": other}) == f"{head}-dirty"
    assert check.commit_of({"commit": head}) == head


@pytest.mark.parametrize(
    "claim, variant, expected",
    [
        ("chain-randomwalks", "ppo", ["sft", "reward", "ppo"]),
        ("chain-randomwalks", "dpo", ["sft", "dpo"]),
        ("overoptimisation-randomwalks", "pairs-300-kl-0.2", ["reward-300", "pairs-300-kl-0.2"]),
        ("ppo-randomwalks", "reward-model", ["classifier", "reward-model"]),
        ("ppo-randomwalks", "lora", ["lora"]),
    ],
)
def test_a_comparison_runs_what_the_variant_needs(claim, variant, expected):
    run_dir = f"runs/curves/{claim}/{variant}-seed2"
    found = regression.needed(seeds.commands(claim, 2, []), run_dir)
    made = [(seeds.run_dirs_of(command) or command.split()[-1:])[0] for command in found]
    assert made == [f"runs/curves/{claim}/{name}-seed2" for name in expected]
