"""What benchmarks/references does without an environment of a peer: `python -m pytest tests/test_references.py`"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT
from helpers import log, write

from benchmarks.references import evaluate, prepare
from benchmarks.tasks import shapes
from common.cli import from_task
from common.functions import build

FOLDER = ROOT / "benchmarks/references"


@pytest.mark.parametrize("claim", ["reward", "grpo", "ddpo"])
def test_peer_reads_what_the_script_reads(claim, tmp_path):
    inputs = tmp_path / "inputs"
    prepare.prepare(claim, inputs)
    script = importlib.import_module(f"algos.{claim}")
    args = from_task(script.Args, script.TASK)
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]
    assert rows == build(args.dataset, "--dataset")
    settings = json.loads((inputs / "settings.json").read_text())
    assert (settings["lr"], settings["batch_size"]) == (args.lr, args.batch_size)
    original = Path(build(args.model, "--model"))
    for path in original.rglob("*.safetensors"):
        if claim != "ddpo" or path.parent.name == "unet":  # the rest is written again, for older libraries
            assert (inputs / "model" / path.relative_to(original)).read_bytes() == path.read_bytes()
    if claim == "ddpo":
        assert image_parts(original) == pytest.approx(image_parts(inputs / "model"), abs=1e-5)


def image_parts(folder):
    """Numbers of an embedding and an image by the text encoder and the VAE of a pipeline."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(shapes.CAPTIONS[5], "cpu", 1, False)
        latents = torch.linspace(-2, 2, 4 * 8 * 8).sin().view(1, 4, 8, 8)
        image = pipeline.vae.decode(latents).sample
    return torch.cat([embeds.flatten(), image.flatten()]).tolist()


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
def test_evaluates_as_the_script_does_before_its_first_step(claim, tmp_path):
    command = [sys.executable, f"algos/{claim}.py", "--seed", "3", "--threads", "1", "--run-dir", tmp_path / "ours"]
    subprocess.run([*command, *SHORT[claim]], cwd=ROOT, check=True, capture_output=True)
    ours = log(tmp_path / "ours")[0]
    folder = tmp_path / "peer"
    folder.mkdir()
    write(folder / "train.jsonl", [{"step": 0, "episode": 0, "seconds": 0.0, "model": None}])
    command = [sys.executable, FOLDER / "evaluate.py", folder, "--claim", claim, "--seed", "3"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [measured] = log(folder)
    assert ours.items() <= measured.items()
    assert any(name.startswith("eval/") for name in ours)


def test_commands():
    environment = os.environ | {"DRY": "1", "CLAIMS": "grpo ppo", "SEEDS": "7", "PEER_1_16": "new", "PEER_0_8_6": "old"}
    command = ["bash", FOLDER / "run.sh"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    trained = [line.split() for line in lines if "peer_trl" in line]
    assert [words[:4] for words in trained] == [
        ["new/bin/python", "benchmarks/references/peer_trl_1_16.py", "--claim", "grpo"],
        ["old/bin/python", "benchmarks/references/peer_trl_0_8_6.py", "--claim", "ppo"],
    ]
    assert all(words[words.index("--seed") + 1] == "7" for words in trained)
    assert sum("evaluate.py" in line for line in lines) == 2


def test_the_untrained_model_is_measured_where_the_peer_saved_none(tmp_path, monkeypatch):
    measured = []

    def measure(claim, model, seed):
        measured.append(model)
        return {"eval/accuracy": 0.5}

    monkeypatch.setattr(evaluate, "measure", measure)
    write(tmp_path / "train.jsonl", [{"step": 4, "episode": 0, "seconds": 1.5, "model": "models/4"}])
    evaluate.evaluate(tmp_path, "grpo", 3)
    assert measured == [None, tmp_path / "models/4"]
    assert log(tmp_path) == [
        {"step": 0, "episode": 0, "seconds": 0.0, "eval/accuracy": 0.5},
        {"step": 4, "episode": 0, "seconds": 1.5, "eval/accuracy": 0.5},
    ]
