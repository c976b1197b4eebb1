"""python -m pytest tests/test_golden.py

Golden traces: the first 20 optimizer steps of every script on its embedded task, in float64, are those of tests/golden.
A change that moves them changes curves: run the claims again (CONTRIBUTING.md), then write the traces anew with
`python tests/test_golden.py`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import ROOT, lines

GOLDEN = ROOT / "tests/golden"
SETTINGS = {
    "ppo": "--total-episodes 320 --rollout-batch-size 64 --batch-size 64 --ppo-epochs 4",
    "grpo": "--total-episodes 320 --rollout-batch-size 64 --batch-size 32 --ppo-epochs 2 --kl-coef 0.04",
    "ilql": "--total-steps 20 --batch-size 32",
    "sft": "--total-steps 20 --batch-size 32",
    "reward": "--total-steps 20 --batch-size 16",
    "dpo": "--total-steps 20 --batch-size 16",
    "ddpo": "--num-epochs 2 --rollout-batch-size 8 --batch-size 4 --num-inference-steps 5 --stat-min-count 2",
}


def command(algo, folder):
    flags = "--dtype float64 --threads 1 --eval-every 0 --save-every 0 --run-dir"
    return [f"{ROOT}/algos/{algo}.py", *SETTINGS[algo].split(), *flags.split(), str(folder)]


@pytest.mark.parametrize("algo", SETTINGS)
def test_the_first_steps_are_the_stored_ones(algo, scripts, tmp_path):
    """To 1e-6: float64 rounds by the order of additions, which depends on the CPU, and 20 steps enlarge that."""
    scripts.run(command(algo, tmp_path / "run"), tmp_path)
    found = lines(tmp_path / "run/metrics.jsonl")
    golden = lines(GOLDEN / f"{algo}.jsonl")
    assert [line["step"] for line in found] == [line["step"] for line in golden]
    for line, expected in zip(found, golden, strict=True):
        assert line.keys() == expected.keys(), f"step {line['step']}"
        assert line == pytest.approx(expected, rel=1e-6, abs=1e-8), f"step {line['step']}"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for algo in sys.argv[1:] or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, *command(algo, Path(folder) / "run")], check=True)
            text = (Path(folder) / "run/metrics.jsonl").read_text()
        (GOLDEN / f"{algo}.jsonl").write_text(text)
