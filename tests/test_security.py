"""Files that come from others run nothing: `python -m pytest tests/test_security.py`

A pickle that leaves a marker when it is loaded, in the place of weights, adapters and checkpoints.
"""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, by_default, command
from safetensors import SafetensorError
from test_models import DATA, run

from algos import ddpo, ppo, reward, sft
from common.errors import InputError


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    """The bomb works: a plain load writes the marker, which the test does not."""
    path = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


@pytest.mark.case(59)
@pytest.mark.parametrize("script", DATA)
def test_a_model_of_pickles(script, gpt2_dir, marker, tmp_path):
    shutil.copytree(gpt2_dir, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    is_archive = script is not sft  # torch.save once wrote a bare pickle
    torch.save(Bomb(marker), tmp_path / "model/pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    with pytest.raises(InputError, match="--model .*model cannot be loaded"):
        run(script, tmp_path / "model", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.case(59, "ppo reward")
def test_an_adapter_of_pickles(gpt2_dir, marker, tmp_path):
    adapter = run(sft, gpt2_dir, tmp_path / "lora", lora_r=3)[1] / "hf_model"
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(Bomb(marker), adapter / "adapter_model.bin")
    for script in (ppo, reward):
        with pytest.raises(InputError, match="--model .*cannot be loaded"):
            run(script, adapter, tmp_path / "run")
    with pytest.raises(InputError, match="--reward .*cannot be loaded"):
        run(ppo, gpt2_dir, tmp_path / "run", reward=str(adapter))


@pytest.mark.case(59, "ddpo")
def test_a_pipeline_of_pickles(build_pipeline, marker, tmp_path):
    build_pipeline().save_pretrained(tmp_path / "pipeline")
    for path in (tmp_path / "pipeline").rglob("*.safetensors"):
        path.unlink()
        torch.save(Bomb(marker), path.with_suffix(".bin"))
    given = {"dataset": [{"prompt": "a"}], "reward": lambda images, prompts: [0.0], "run_dir": str(tmp_path / "run")}
    with pytest.raises(InputError, match="--model .*pipeline cannot be loaded"):
        ddpo.main(ddpo.Args(model=str(tmp_path / "pipeline"), **given))


@pytest.mark.case(59, "sft")
def test_checkpoints_of_pickles(gpt2_dir, marker, tmp_path):
    """Files beside the known ones are not opened; a pickle in their place is no safetensors file."""
    _, run_dir = run(sft, gpt2_dir, tmp_path / "run")
    newest = max((run_dir / "checkpoints").iterdir())
    for name in ("optimizer.pt", "scheduler.bin", "rng_state.pth", "extra.pkl"):
        torch.save(Bomb(marker), newest / name)
    metrics, _ = run(sft, gpt2_dir, tmp_path / "more", resume=str(newest), total_steps=5)
    assert metrics["eval/loss"] > 0
    torch.save(Bomb(marker), newest / "optim.safetensors")
    with pytest.raises(SafetensorError):
        run(sft, gpt2_dir, tmp_path / "next", resume=str(newest), total_steps=5)


@pytest.mark.case(59, "sft")
@pytest.mark.parametrize("suffix", [".pkl", ".jsonl", ".parquet"])
def test_a_dataset_of_pickles(suffix, gpt2_dir, marker, tmp_path):
    torch.save(Bomb(marker), tmp_path / f"rows{suffix}")
    with pytest.raises(InputError, match="--dataset "):
        run(sft, gpt2_dir, tmp_path / "run", dataset=str(tmp_path / f"rows{suffix}"), eval_dataset=DATA[sft])
    assert not (tmp_path / "run").exists()


EVIL = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
function = dict
"""


@pytest.mark.case(96)
@by_default("ppo")
def test_functions_that_a_run_of_others_names_are_not_imported(algo, ended, scripts, work, tmp_path):
    run, steps = ended(algo, tmp_path / "theirs")
    (tmp_path / "evil.py").write_text(EVIL)
    evil = f"{tmp_path}/evil.py:function"
    env = json.loads((run / "env.json").read_text())
    env["flags"] |= dict.fromkeys(("reward", "metric", "model", "dataset", "logit_mask"), evil)
    (run / "env.json").write_text(json.dumps(env | {"command": evil}))
    (run / "config.yaml").write_text(f"reward: {evil}\nmetric: {evil}\n")
    newest = run / f"checkpoints/step_{steps[-1]:08d}"
    state = json.loads((newest / "state.json").read_text())
    state["run"]["flags"] = env["flags"]
    (newest / "state.json").write_text(json.dumps(state | {"reward": evil, "model": evil, "metric": evil}))
    process = scripts.run(command(work, algo, "mine", "--resume", newest), tmp_path)
    assert f"continuing from {newest}" in process.out and f"was {evil}" in process.out
    assert f"; its own flags are --config {newest.parents[1]}/config.yaml; what differs:\n" in process.out
    assert not (tmp_path / "executed").exists()
    scripts.run(command(work, algo, "new", "--dataset", evil), tmp_path, expect=2)
    assert (tmp_path / "executed").exists(), "the function does leave its mark when a command names it"


@pytest.mark.case(97, "ddpo sft")
def test_names_from_data_make_no_paths(work, gpt2_dir, tmp_path):
    name = "../../up"
    rows = [{"prompt": "../../a red circle"}]
    flags = {"model": str(work / "pipeline"), "dataset": rows, "eval_dataset": {name: rows, "/x": rows}}
    flags |= {"batch_size": 1, "num_epochs": 1, "rollout_batch_size": 1, "num_inference_steps": 2, "threads": 1}
    flags |= {"reward": lambda images, **_: [0.0], "metric": lambda images, **_: {name: [1.0]}, "guidance_scale": 1.0}
    ddpo.main(ddpo.Args(**flags, run_dir=str(tmp_path / "run")))
    metrics, _ = run(sft, gpt2_dir, tmp_path / "sft", eval_dataset={name: DATA[sft], "/x": DATA[sft]})
    assert f"eval/{name}/loss" in metrics
    assert {path.name for path in tmp_path.iterdir()} == {"run", "sft"}
    assert len(list((tmp_path / "run/images").iterdir())) == 4
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_no_file_is_written_through_a_link(gpt2_dir, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_text("keep")
    for name in (".lock", ".tmp-env.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).symlink_to(foreign)
    with pytest.raises(InputError, match="--run-dir .* cannot be written"):
        run(sft, gpt2_dir, tmp_path / ".lock")
    run(sft, gpt2_dir, tmp_path / ".tmp-env.json")
    assert foreign.read_text() == "keep" and (tmp_path / ".tmp-env.json/env.json").exists()


RAISES = """import builtins, sys
from common import cli, errors

kind = sys.argv.pop()

def main(args):
    error = getattr(builtins, kind, errors.InputError)("\\x1b]0;title\\x07", "two")
    error.add_note("a note\\n\\x9b31m")
    raise error

cli.parse = lambda *given: None
cli.cli(None, main)
"""


@pytest.mark.parametrize(("kind", "code"), [("ValueError", 1), ("KeyError", 1), ("InputError", 2)])
def test_escapes_in_the_text_of_an_exception_are_written_out(kind, code):
    """As of a reward that raises with the response in its sentence; the traceback stays in its lines."""
    done = subprocess.run([sys.executable, "-c", RAISES, kind], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and done.stdout == ""
    assert all(line.isprintable() for line in done.stderr.splitlines())
    assert "\\x1b]0;title\\x07" in done.stderr and done.stderr.endswith("a note\n\\x9b31m\n")
    assert ("Traceback (most recent call last):\n" in done.stderr) == (code == 1)


def test_files_are_utf_8_in_every_locale(gpt2_dir, tmp_path):
    """Python names each place that would ask the locale. The first one of a run that continues ends it here."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "common").rglob("*.py")]
    strict = ["-X", "warn_default_encoding", *(f"-Werror::EncodingWarning:{name}" for name in ["__main__", *modules])]
    (tmp_path / "rows.txt").write_text("abé\nba\n" * 4, encoding="utf-8")
    config = f"model: {gpt2_dir}\ndataset: {tmp_path}/rows.txt\neval_dataset: {tmp_path}/rows.txt\nbatch_size: 2\n"
    (tmp_path / "é.yaml").write_text(f"{config}run_dir: {tmp_path}/é", encoding="utf-8")
    words = [sys.executable, *strict, ROOT / "algos/sft.py", "--config", tmp_path / "é.yaml", "--threads", "1"]
    for steps in ("2", "4"):
        flags = ["--total-steps", steps, "--resume", "auto" if steps == "2" else f"{tmp_path}/é"]
        done = subprocess.run([*words, *flags], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "continuing" in done.stdout
