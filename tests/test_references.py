"""What benchmarks/references does without an environment of a peer.

python -m pytest -p no:xdist -o addopts="-q" tests/test_references.py
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.references import evaluate, prepare
from benchmarks.tasks import shapes
from common.cli import from_task
from common.functions import build

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/references"


@pytest.mark.parametrize("claim", prepare.CLAIMS)
def test_peer_reads_what_the_script_reads(claim, tmp_path):
    inputs = tmp_path / "inputs"
    prepare.prepare(claim, inputs)
    script = importlib.import_module(f"algos.{claim}")
    args = from_task(script.Args, script.TASK)
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]
    assert rows == build(args.dataset, "--dataset")
    settings = json.loads((inputs / "settings.json").read_text())
    assert settings["lr"] == args.lr
    assert settings["batch_size"] == args.batch_size
    if claim == "ddpo":  # whose pipeline is written again, for older libraries
        return
    original = Path(build(args.model, "--model"))
    for path in original.rglob("*"):
        copied = inputs / "model" / path.relative_to(original)
        rewritten = claim == "ddpo" and path.parent.name != "unet"
        assert path.is_dir() or rewritten or copied.read_bytes() == path.read_bytes()


def test_the_rewritten_pipeline_does_the_same(tmp_path):
    from diffusers import StableDiffusionPipeline

    prepare.prepare("ddpo", tmp_path / "inputs")
    outputs = []
    for folder in (shapes.BASE_MODEL, tmp_path / "inputs" / "model"):
        pipeline = StableDiffusionPipeline.from_pretrained(folder)
        with torch.no_grad():
            embeds, _ = pipeline.encode_prompt("a blue square", "cpu", 1, False)
            latents = torch.linspace(-2, 2, 4 * 8 * 8).sin().view(1, 4, 8, 8)
            outputs.append((embeds, pipeline.vae.decode(latents).sample))
    torch.testing.assert_close(outputs[0], outputs[1])


def first_evaluation(claim, run_dir, *flags):
    """The evaluation of the script before its first step, of the embedded task."""
    command = [sys.executable, f"algos/{claim}.py", "--seed", "3", "--threads", "1", "--run-dir", str(run_dir), *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])


SHORT = {
    "sft": ("--total-steps", "1"),
    "reward": ("--total-steps", "1"),
    "dpo": ("--total-steps", "1"),
    "ppo": ("--total-episodes", "512"),
    "grpo": ("--total-episodes", "512"),
    "ddpo": ("--num-epochs", "1", "--rollout-batch-size", "16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", SHORT)
def test_evaluates_as_the_script_does(claim, tmp_path):
    ours = first_evaluation(claim, tmp_path / "ours", *SHORT[claim])
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"step": 0, "episode": 0, "seconds": 0.0, "model": null}\n')
    command = [sys.executable, FOLDER / "evaluate.py", folder, "--claim", claim, "--seed", "3"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    measured = json.loads(line)
    assert ours.items() <= measured.items()
    assert any(name.startswith("eval/") for name in ours)


def test_commands():
    environment = os.environ | {"DRY": "1", "CLAIMS": "grpo ppo", "SEEDS": "7", "PEER_1_16": "new", "PEER_0_8_6": "old"}
    command = ["bash", FOLDER / "run.sh"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    trained = [line for line in lines if "peer_trl" in line]
    assert [line.split()[:4] for line in trained] == [
        ["new/bin/python", "benchmarks/references/peer_trl_1_16.py", "--claim", "grpo"],
        ["old/bin/python", "benchmarks/references/peer_trl_0_8_6.py", "--claim", "ppo"],
    ]
    for line in trained:
        assert "--seed 7" in line
    assert sum("evaluate.py" in line for line in lines) == 2


def test_the_untrained_model_is_measured_where_the_peer_saved_none(tmp_path, monkeypatch):
    measured = []

    def measure(claim, model, seed):
        measured.append(model)
        return {"eval/accuracy": 0.5}

    monkeypatch.setattr(evaluate, "measure", measure)
    record = {"step": 4, "episode": 0, "seconds": 1.5, "model": "models/4"}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    evaluate.evaluate(tmp_path, "grpo", 3)
    assert measured == [None, tmp_path / "models/4"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "episode": 0, "seconds": 0.0, "eval/accuracy": 0.5},
        {"step": 4, "episode": 0, "seconds": 1.5, "eval/accuracy": 0.5},
    ]
