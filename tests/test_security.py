"""Files that come from others run nothing: `python -m pytest tests/test_security.py`

A pickle that leaves a marker when it is loaded, in the place of weights, adapters and checkpoints.
"""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from test_adapters import DATA, SCRIPTS, run

from algos import ddpo, ppo, sft
from common.checkpoint import InputError, sha256


class Bomb:
    """Writes the file `marker` when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    """The bomb works: a plain load writes the marker."""
    path = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()
    path.unlink()
    return path


def plant(path, marker, zipped=True):
    """As torch.save writes it now, or as it once did: a bare pickle."""
    torch.save(Bomb(marker), path, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, False])
@SCRIPTS
@pytest.mark.case(59, "ppo sft reward dpo ilql")
def test_a_model_of_pickles(script, zipped, gpt2_dir, marker, tmp_path):
    shutil.copytree(gpt2_dir, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    plant(tmp_path / "model" / "pytorch_model.bin", marker, zipped)
    with pytest.raises(InputError, match="--model .*model cannot be loaded"):
        run(script, tmp_path / "model", tmp_path / "run")
    assert not marker.exists() and not (tmp_path / "run").exists()


@SCRIPTS
@pytest.mark.case(59, "ppo sft reward dpo ilql")
def test_an_adapter_of_pickles(script, gpt2_dir, marker, tmp_path):
    """As --model and, in ppo, as --reward."""
    _, run_dir = run(script, gpt2_dir, tmp_path / "made", lora_r=3)
    adapter = run_dir / "hf_model"
    (adapter / "adapter_model.safetensors").unlink()
    plant(adapter / "adapter_model.bin", marker)
    with pytest.raises(InputError, match="--model .*cannot be loaded"):
        run(script, adapter, tmp_path / "run")
    if script is ppo:
        with pytest.raises(InputError, match="--reward .*cannot be loaded"):
            run(ppo, gpt2_dir, tmp_path / "run", reward=str(adapter))
    assert not marker.exists()


@pytest.mark.case(59, "ddpo")
def test_a_pipeline_of_pickles(build_pipeline, marker, tmp_path):
    build_pipeline().save_pretrained(tmp_path / "pipeline")
    for path in (tmp_path / "pipeline").rglob("*.safetensors"):
        path.unlink()
        plant(path.with_suffix(".bin"), marker)
    args = ddpo.Args(model=str(tmp_path / "pipeline"), dataset=[{"prompt": "a"}], reward=lambda images, prompts: [0.0])
    with pytest.raises(InputError, match="--model .*pipeline cannot be loaded"):
        ddpo.main(args)
    assert not marker.exists()


@pytest.mark.case(59, "sft")
def test_checkpoints_of_pickles(gpt2_dir, marker, tmp_path):
    """Files beside the known ones are not opened; a pickle in their place does not match the manifest, and where the
    manifest was forged, too, it is no safetensors file."""
    _, run_dir = run(sft, gpt2_dir, tmp_path / "run")
    newest = max((run_dir / "checkpoints").iterdir())
    for name in ("optimizer.pt", "scheduler.bin", "rng_state.pth", "extra.pkl"):
        plant(newest / name, marker)
    metrics, _ = run(sft, gpt2_dir, tmp_path / "more", resume=str(newest), total_steps=5)
    assert metrics["eval/loss"] > 0
    plant(newest / "optim.safetensors", marker)
    with pytest.raises(InputError, match="optim.safetensors does not match its checksum"):
        run(sft, gpt2_dir, tmp_path / "next", resume=str(newest), total_steps=5)
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    manifest["optim.safetensors"]["sha256"] = sha256(newest / "optim.safetensors")
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(SafetensorError):
        run(sft, gpt2_dir, tmp_path / "forged", resume=str(newest), total_steps=5)
    assert not marker.exists()


@pytest.mark.parametrize("suffix", [".pkl", ".pt", ".jsonl", ".json", ".csv", ".parquet", ".txt"])
@pytest.mark.case(59, "sft")
def test_a_dataset_of_pickles(suffix, gpt2_dir, marker, tmp_path):
    plant(tmp_path / f"rows{suffix}", marker)
    with pytest.raises(InputError, match="--dataset "):
        run(sft, gpt2_dir, tmp_path / "run", dataset=str(tmp_path / f"rows{suffix}"), eval_dataset=DATA[sft])
    assert not marker.exists() and not (tmp_path / "run").exists()
