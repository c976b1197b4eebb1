"""python -m pytest tests/test_learning.py

The scripts learn. The first tests are the commands without flags as a user types them; the others show that the curve
of ppo comes from the advantages and that the KL penalty holds the policy. More of grpo: test_grpo.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from algos import ppo
from common.cli import from_task

ROOT = Path(__file__).resolve().parents[1]
DATA_LEVEL = 0.3515


def records(run_dir, key):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if line.get(key) is not None]


def on_one_core():
    """Run in the new process: two threads beside the tests of another worker would wait for each other."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.slow), "--total-episodes 10240"])
def test_first_command(more, scripts, tmp_path):
    """`accelerate launch algos/ppo.py` learns random walks and ends with a sparkline, how to load the model, a card;
    half as many episodes are enough for what is asked here."""
    command = [Path(sys.executable).parent / "accelerate", "launch", str(ROOT / "algos/ppo.py"), *more.split()]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": os.environ, "preexec_fn": on_one_core}
    result = subprocess.run(command, timeout=1500, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    (run_dir,) = (tmp_path / "runs").glob("ppo-*")
    optimality = records(run_dir, "eval/optimality")
    assert abs(optimality[0] - DATA_LEVEL) < 0.05  # it starts as an imitation of the data
    assert optimality[-1] >= 0.97
    assert records(run_dir, "eval/illegal")[-1] <= 0.03
    assert re.search(r"eval/reward [▁▂▃▄▅▆▇█]+ 0\.\d+ -> (0\.9|1)", result.stdout)
    (tmp_path / "use.py").write_text(re.findall(r"^from transformers import pipeline.*\n.*$", result.stdout, re.M)[-1])
    assert "generated_text" in scripts.run([tmp_path / "use.py"], tmp_path).out
    again = scripts.run(command[2:], tmp_path)
    assert "is finished" in again.out


@pytest.mark.slow
def test_first_command_of_grpo(scripts, tmp_path):
    """`accelerate launch algos/grpo.py` learns sums with written steps, of which the base model gets about half."""
    command = [Path(sys.executable).parent / "accelerate", "launch", str(ROOT / "algos/grpo.py")]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": os.environ, "preexec_fn": on_one_core}
    result = subprocess.run(command, timeout=1500, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    (run_dir,) = (tmp_path / "runs").glob("grpo-*")
    rewards = records(run_dir, "eval/reward")
    assert 0.4 < rewards[0] < 0.6 and rewards[-1] > 0.9
    assert re.search(r"eval/reward [▁▂▃▄▅▆▇█]+ 0\.\d+ -> (0\.9|1)", result.stdout)
    (tmp_path / "use.py").write_text(re.findall(r"^from transformers import pipeline.*\n.*$", result.stdout, re.M)[-1])
    assert "generated_text" in scripts.run([tmp_path / "use.py"], tmp_path).out
    assert "is finished" in scripts.run(command[2:], tmp_path).out


def train(run_dir, **flags):
    """20 optimizer steps of 256 episodes, unless flags say otherwise; mean optimality at each evaluation."""
    sizes = {"rollout_batch_size": 256, "batch_size": 256, "total_episodes": 1280, "eval_every": 40, "save_every": 0}
    ppo.main(from_task(ppo.Args, ppo.TASK, run_dir=str(run_dir), threads=1, **sizes | flags))
    return records(run_dir, "eval/optimality")


def test_advantages_are_what_it_learns_from(tmp_path, monkeypatch):
    learned = train(tmp_path / "run")
    assert learned[-1] > 0.75
    monkeypatch.setattr(ppo, "masked_whiten", lambda x, mask: x * 0)
    flat = train(tmp_path / "zero", vf_coef=0.0, total_episodes=512)
    assert flat == [learned[0], learned[0]]  # nothing else pushes the policy
    moved = train(tmp_path / "value-loss-alone")
    assert moved[-1] < learned[0] + 0.05  # the value loss moves the shared trunk, but not towards the reward


def test_large_kl_coef_holds_the_policy(tmp_path):
    """After a first step towards the reward the penalty brings the policy back."""
    held = train(tmp_path / "run", kl_coef=10.0, vf_coef=0.1, total_episodes=5120)
    assert abs(held[-1] - held[0]) < 0.15
    assert abs(records(tmp_path / "run", "objective/kl")[-1]) < 0.6
