"""Whole runs as a user starts them: `python -m pytest tests/test_runs.py`. Faults: test_faults.py."""

import importlib.util
import json
import re

import pytest
from harness import BIN, ROOT, at, command, flags, launch, lines, same, torchrun
from helpers import equal, weights


def test_a_new_run_names_the_one_with_the_same_flags_and_other_files(scripts, work, tmp_path):
    """As after an edit, or where the file that an option names is one that the reward writes. The default directory is
    named by what decides the result, which config.yaml has. --resume never repeats the run beside it."""
    short = "--total-episodes 8 --eval-every 0 --save-every 0".split()
    argv = [ROOT / "algos/ppo.py", *flags(work, "ppo"), *short, "--reward", f"{work}/user.py:reward:log=log.txt"]
    assert "a new run" not in scripts.run(argv, tmp_path).out
    [run] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"ppo-[0-9a-f]{8}", run.name)
    same_run = [ROOT / "algos/ppo.py", "--config", run / "config.yaml", "--threads", "1", "--micro-batch-size", "2"]
    assert f"runs/{run.name} is finished" in scripts.run(same_run, tmp_path).out
    (tmp_path / "log.txt").touch()
    said = f"a new run: {run.name} has the same flags, but not the same files:\n"
    assert f"{said}  the file of --reward has changed\n" in scripts.run(argv, tmp_path).out
    [new] = {*run.parent.iterdir()} - {run}
    for number in 2, 3:
        assert "a new run" not in scripts.run([*argv, "--resume", "never"], tmp_path).out
        same(run.with_name(f"{new.name}-{number}"), new)


PLAN = """
import sys
sys.path.insert(0, {root!r})
from common.run import Run
planned = Run.log_evaluation
def log_evaluation(run, step, metrics):
    planned(run, step, metrics | {{run.headline: {plan}.get(step, 9.0)}})
Run.log_evaluation = log_evaluation
"""
BEST = {  # what: (losses of the first run's evaluations, how it goes on, losses there, steps of the best model)
    "the same command": ({8: 1, 12: 5}, [], {16: 3, 20: 4}, 8),
    "other settings": ({8: 1, 12: 2}, ["--resume", "run", "--lr", "2e-2"], {16: 3, 20: 4}, 16),
    "a discarded one": ({4: 3, 8: 1}, ["--resume", "run/checkpoints/step_00000006"], {8: 4, 12: 5}, 8),
    "another directory": ({8: 1}, ["--resume", "run/checkpoints/step_00000010", "--run-dir", "new"], {16: 3}, 16),
}


@pytest.mark.case(103, "sft")
@pytest.mark.parametrize("what", BEST)
def test_the_best_model_is_that_of_this_run(scripts, work, tmp_path, what):
    """Also in a run that goes on with other settings; the losses are planned."""
    first, how, then, best = BEST[what]
    longer = ["--total-steps", "20", "--keep-checkpoints", "9"]
    patch = PLAN.format(root=str(ROOT), plan=first)
    if how:
        scripts.run(command(work, "sft", "run", "--keep-checkpoints", "9"), tmp_path, patch=patch)
    else:
        kill = at("common.run", "Run.stop_requested", 13)
        scripts.run(command(work, "sft", "run", *longer), tmp_path, expect=-9, patch=patch + kill)
    scripts.run(command(work, "sft", "run", *longer, *how), tmp_path, patch=PLAN.format(root=str(ROOT), plan=then))
    folder = tmp_path / ("new" if "new" in how else "run")
    state = json.loads((folder / "checkpoints/step_00000020/state.json").read_text())
    assert state["best_step"] == best and state["best_score"] == -({**first, **then}[best])
    found = weights(folder / "hf_model_best")
    of_step = weights(folder / f"checkpoints/step_{best:08d}")
    assert equal(found, {name: of_step[name] for name in found})


@pytest.mark.case(61, "ppo")
@pytest.mark.case(63, "ppo")
def test_track_wandb_offline(scripts, work, whole, tmp_path):
    pytest.importorskip("wandb")
    key = "0123456789abcdef0123456789abcdef01CANARY"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": key, "HF_TOKEN": "hf_CANARY", "WANDB_SILENT": "true"}
    env["WANDB_PROJECT"] = "of-the-environment"
    name = "10:00 #3"  # wandb's own names may not have these characters
    process = scripts.run(command(work, "ppo", name, "--track", "wandb"), tmp_path, **env)
    assert "warning" not in process.out
    [recorded] = (tmp_path / name).rglob("*.wandb")
    names = recorded.read_bytes().replace(bytes(ROOT), b"")  # the repository's folder may have any name
    assert b"of-the-environment" in names and b"plainrl" not in names
    tables = [json.loads(path.read_text()) for path in (tmp_path / name).rglob("*.table.json")]
    columns = ["prompt", "output", "vowels", "reward"]
    assert len(tables) == 4 and all(table["columns"] == columns for table in tables)
    for step in (0, 8, 16, 24):
        rows = [row for row in lines(tmp_path / name / "samples.jsonl") if row["step"] == step]
        assert [[row[name] for name in columns] for row in rows] in [table["data"] for table in tables]
    assert [p for p in (tmp_path / name).rglob("*") if p.is_file() and b"CANARY" in p.read_bytes()] == []
    same(tmp_path / name, whole("ppo")[0])
    assert [path.name for path in tmp_path.iterdir()] == [name], "no wandb directory elsewhere"


@pytest.mark.case(61, "ppo")
def test_a_tracker_that_cannot_start_ends_the_run(scripts, work, whole, tmp_path):
    """Without it the same command goes on: trackers are no part of what decides the result."""
    if any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        pytest.skip("tensorboard is installed")
    argv = command(work, "ppo", "run")
    process = scripts.run([*argv, "--track", "tensorboard"], tmp_path, expect=2)
    assert process.err == "error: --track tensorboard: pip install tensorboard\n"
    scripts.run(argv, tmp_path)
    same(tmp_path / "run", whole("ppo")[0])


def test_accelerate_launch(work, whole, tmp_path):
    launcher = [BIN / "accelerate", "launch"]
    done = launch(launcher, command(work, "sft", "run"), tmp_path, work, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole("sft")[0])


BY_RANK = """import json, os
from transformers import AutoModelForCausalLM
RANK = int(os.environ["RANK"])
def rows(file):
    found = [json.loads(line) for line in open(file)]
    return found[RANK:] + found[:RANK]
def model():
    lm = AutoModelForCausalLM.from_pretrained("model")
    lm.get_input_embeddings().weight.data += RANK
    return lm
"""
READ_BY_RANK = [  # a flag that gives each process something else, and what is said of it
    (("--dataset", "by_rank.py:rows:file=rows.jsonl"), "--dataset (rows), --dataset (examples)"),
    (("--eval-dataset", "by_rank.py:rows:file=rows.jsonl"), "--eval-dataset (eval_sets)"),
    (("--model", "by_rank.py:model", "--tokenizer", "model"), "--model (weights)"),
]


@pytest.mark.parametrize(("flags", "said"), READ_BY_RANK)
def test_processes_that_have_read_different_inputs_do_not_train(work, flags, said):
    """As a function that lists a set, or that draws the weights of a model."""
    (work / "by_rank.py").write_text(BY_RANK)
    done = launch(torchrun(2), command(work, "sft", "by_rank", *flags), work, work)
    assert done.returncode != 0 and f"the processes have read different inputs: {said}" in done.stderr
    assert not (work / "by_rank").exists()


@pytest.mark.case(29, "ppo")
def test_a_failing_reward_ends_all_processes(work, tmp_path):
    """The last complete step is saved, which was neither due nor the best."""
    code = "calls = []\ndef reward(samples, **columns):\n    calls.append(1)\n"
    (tmp_path / "later.py").write_text(code + "    return [1.0] * (len(samples) - len(calls) // 6)\n")
    argv = command(work, "ppo", "run", "--reward", "later.py:reward", "--save-every", "1000")
    done = launch(torchrun(2), argv, tmp_path, work, timeout=200)
    assert done.returncode != 0 and "later.py:reward returned a list of 7, expected a list of 8" in done.stderr
    assert "the last step on disk is in run/checkpoints/step_00000012;" in done.stderr
