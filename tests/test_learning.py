"""ppo and grpo learn: `python -m pytest -m slow tests/test_learning.py`"""

import os
import re
import subprocess

import pytest
from harness import BIN, ROOT
from helpers import log

pytestmark = pytest.mark.slow
DATA_LEVEL = 0.3515


def on_one_core():
    """Run in the new process: two threads beside the tests of another worker would wait for each other."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})


FIRST_COMMANDS = [  # metric, where it starts, give or take, at least at the end
    ("ppo", "eval/optimality", DATA_LEVEL, 0.05, 0.97),  # it starts as an imitation of the data
    ("grpo", "eval/reward", 0.5, 0.1, 0.9),  # sums with written steps, of which the base model gets about half
]


@pytest.mark.parametrize(("algo", "metric", "start", "tolerance", "end"), FIRST_COMMANDS)
def test_first_command(algo, metric, start, tolerance, end, scripts, tmp_path):
    """It learns, and ends with first and last value and how to load the model."""
    command = [BIN / "accelerate", "launch", ROOT / f"algos/{algo}.py"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": os.environ, "preexec_fn": on_one_core}
    result = subprocess.run(command, timeout=1500, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    [run_dir] = (tmp_path / "runs").glob(f"{algo}-*")
    found = [record[metric] for record in log(run_dir) if metric in record]
    assert abs(found[0] - start) < tolerance
    assert found[-1] >= end
    assert re.search(r"eval/reward 0\.\d+ -> (0\.9|1)", result.stdout)
    (tmp_path / "use.py").write_text(re.findall(r"^from transformers import pipeline.*\n.*$", result.stdout, re.M)[-1])
    assert "generated_text" in scripts.run([tmp_path / "use.py"], tmp_path).out
    assert "is finished" in scripts.run(command[2:], tmp_path).out
