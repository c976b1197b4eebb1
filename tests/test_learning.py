"""python -m pytest tests/test_learning.py

The scripts learn. The first test is README's first command as a user types it; the others show that the curve comes
from the advantages and that the KL penalty holds the policy.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from algos import ppo
from benchmarks.tasks import randomwalks

ROOT = Path(__file__).resolve().parents[1]
DATA_LEVEL = 0.3515


def records(run_dir, key):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if line.get(key) is not None]


def test_first_command(tmp_path):
    """`accelerate launch algos/ppo.py` learns random walks and ends with a sparkline, how to load the model, a card."""
    command = [Path(sys.executable).parent / "accelerate", "launch", str(ROOT / "algos/ppo.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ)
    assert result.returncode == 0, result.stderr[-2000:]
    (run_dir,) = (tmp_path / "runs").glob("ppo-*")
    optimality = records(run_dir, "eval/optimality")
    assert abs(optimality[0] - DATA_LEVEL) < 0.05  # it starts as an imitation of the data
    assert optimality[-1] >= 0.97
    assert records(run_dir, "eval/illegal")[-1] <= 0.03
    assert re.search(r"eval/reward [▁▂▃▄▅▆▇█]+ 0\.\d+ -> (0\.9|1)", result.stdout)
    usage = re.search(r"^from transformers import pipeline.*\n.*$", result.stdout, re.M)[0]
    sampled = subprocess.run([sys.executable, "-c", usage], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "generated_text" in sampled.stdout, sampled.stderr[-2000:]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ)
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.fixture(scope="module")
def base_model():
    return randomwalks.base_model()


def train(base_model, run_dir, **flags):
    """40 optimizer steps of 256 episodes; mean optimality over the evaluations at start and end."""
    sizes = {"rollout_batch_size": 256, "batch_size": 256, "total_episodes": 2560, "eval_every": 40, "save_every": 0}
    ppo.main(ppo.Args(model=base_model, run_dir=str(run_dir), **sizes, **flags))
    return records(run_dir, "eval/optimality")


def test_advantages_are_what_it_learns_from(base_model, tmp_path, monkeypatch):
    learned = train(base_model, tmp_path / "run")
    assert learned[-1] > 0.75
    monkeypatch.setattr(ppo, "masked_whiten", lambda x, mask: x * 0)
    flat = train(base_model, tmp_path / "zero-advantages")
    assert flat[0] == learned[0] and abs(flat[-1] - flat[0]) < 0.06  # the value loss still moves the shared trunk


def test_large_kl_coef_holds_the_policy(base_model, tmp_path):
    held = train(base_model, tmp_path / "run", kl_coef=10.0, vf_coef=0.1)
    assert abs(held[-1] - held[0]) < 0.15
    assert abs(records(tmp_path / "run", "objective/kl")[-1]) < 0.6
