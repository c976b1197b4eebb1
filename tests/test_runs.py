"""Whole runs as a user starts them: `python -m pytest tests/test_runs.py`

What a run leaves behind, what the same and other commands do in its directory, launchers. Faults: test_faults.py."""

import importlib.util
import json
import re
import shutil
import socket

import pytest
import yaml
from harness import BIN, ROOT, command, files, flags, launch, lines, same

# ---- The same command, another command -------------------------------------------------------------------------------


def test_resume_never_repeats_the_run_beside_it(scripts, work, whole, tmp_path):
    for name in "run", "run-2":
        shutil.copytree(whole("ppo")[0], tmp_path / name)
    scripts.run(command(work, "ppo", "run", "--resume", "never"), tmp_path)
    same(tmp_path / "run-3", whole("ppo")[0])


def test_the_default_directory_is_a_function_of_what_decides_the_result(scripts, work, tmp_path):
    """Neutral flags keep it. What else counts: test_identity.py."""
    short = ["--total-episodes", "8", "--eval-every", "0", "--save-every", "0"]

    def directories_after(*more):
        scripts.run([ROOT / "algos/ppo.py", *flags(work, "ppo"), *short, *more], tmp_path)
        return sorted(path.name for path in (tmp_path / "runs").iterdir())

    first = directories_after()
    assert re.fullmatch(r"ppo-[0-9a-f]{8}", first[0]) and len(first) == 1
    assert directories_after("--save-every", "4", "--micro-batch-size", "2", "--track", "off") == first
    assert len(directories_after("--seed", "2")) == 2
    named = directories_after("--name", "mine")
    assert len(named) == 3 and first[0].replace("ppo-", "mine-") in named


def test_resume_path_continues_under_the_present_flags(scripts, work, ended, tmp_path):
    run, _ = ended("ppo", tmp_path / "run")
    argv = command(work, "ppo", "run", "--resume", "run/checkpoints/step_00000012", "--lr", "5e-3")
    process = scripts.run(argv, tmp_path, expect=-9, SIGNAL_AT="reward:3:9")
    assert "continuing from run/checkpoints/step_00000012 (step 12)" in process.out
    assert "--lr: was 0.01, is 0.005" in process.out
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == [0, 4, 8, 12, 16], "step 16 of the old flags is gone, that of the new ones is there"
    scripts.run(argv, tmp_path)  # killed in iteration 5: continues from its own step 16
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 4, 8, 12, 16, 20, 24]
    assert [line["optim/lr"] < 5e-3 for line in metrics[1:]] == [False, False, False, True, True, True]
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 5e-3

    ended("ppo", tmp_path / "source")
    other = command(work, "ppo", "other", "--resume", "source/checkpoints/step_00000012", "--lr", "5e-3")
    scripts.run(other, tmp_path)  # into another directory: only what follows
    assert [line["step"] for line in lines(tmp_path / "other/metrics.jsonl")] == [16, 20, 24]
    for name in "model", "value_head":
        a, b = (tmp_path / d / f"hf_model/{name}.safetensors" for d in ("run", "other"))
        assert a.read_bytes() == b.read_bytes()


def test_resume_path_into_the_directory_of_another_run_is_refused(scripts, work, ended, tmp_path):
    """The directory `a` holds a finished run of another seed; step 12 of run `b` is to be continued there."""
    ended("ppo", tmp_path / "b")
    scripts.run(command(work, "ppo", "a", "--seed", "5"), tmp_path)
    before = files(tmp_path / "a")
    argv = command(work, "ppo", "a", "--resume", "b/checkpoints/step_00000012")
    process = scripts.run(argv, tmp_path, expect=2)
    assert "a holds a run with another configuration" in process.err and "--seed: was 5, is 1" in process.err
    assert files(tmp_path / "a") == before


def test_config_yaml_repeats_the_run(scripts, work, whole, tmp_path):
    folder = whole("ppo")[0]
    config = folder / "config.yaml"
    scripts.run([ROOT / "algos/ppo.py", "--config", config, "--threads", "1", "--run-dir", "again"], tmp_path)
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    hashes = [json.loads((path / "env.json").read_text())["hash"] for path in (folder, tmp_path / "again")]
    assert hashes[0] == hashes[1]


# ---- Trackers --------------------------------------------------------------------------------------------------------


@pytest.mark.case(61, "ppo")
@pytest.mark.case(63, "ppo")
def test_track_wandb_offline(scripts, work, whole, tmp_path):
    pytest.importorskip("wandb")
    key = "0123456789abcdef0123456789abcdef01CANARY"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": key, "HF_TOKEN": "hf_CANARY", "WANDB_SILENT": "true"}
    process = scripts.run(command(work, "ppo", "run", "--track", "wandb"), tmp_path, **env)
    assert "warning" not in process.out
    assert list((tmp_path / "run").rglob("*.wandb")), "the run was recorded"
    tables = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("*.table.json")]
    columns = ["prompt", "output", "vowels", "reward"]
    assert len(tables) == 4 and all(table["columns"] == columns for table in tables)
    for step in (0, 8, 16, 24):
        rows = [row for row in lines(tmp_path / "run/samples.jsonl") if row["step"] == step]
        assert [[row[name] for name in columns] for row in rows] in [table["data"] for table in tables]
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"CANARY" in p.read_bytes()] == []
    same(tmp_path / "run", whole("ppo")[0])
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no wandb directory elsewhere"


@pytest.mark.case(61, "ppo")
def test_a_tracker_that_fails_is_a_warning(scripts, work, whole, tmp_path):
    """wandb has neither key nor network."""
    (tmp_path / "home").mkdir()
    env = {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    process = scripts.run(command(work, "ppo", "run", "--track", "wandb"), tmp_path, **env)
    assert len([line for line in process.out.splitlines() if "warning: --track wandb is off" in line]) == 1
    same(tmp_path / "run", whole("ppo")[0])


def test_a_tracker_that_is_not_installed_is_a_warning(scripts, work, whole, tmp_path):
    """requirements.txt does not ask for tensorboard."""
    if importlib.util.find_spec("tensorboard") or importlib.util.find_spec("tensorboardX"):
        pytest.skip("tensorboard is installed")
    process = scripts.run(command(work, "ppo", "run", "--track", "tensorboard"), tmp_path)
    assert process.out.count("warning: --track tensorboard is off from here on: pip install tensorboard") == 1
    same(tmp_path / "run", whole("ppo")[0])


# ---- Launchers -------------------------------------------------------------------------------------------------------


def test_accelerate_launch(work, whole, tmp_path):
    launcher = [BIN / "accelerate", "launch"]
    done = launch(launcher, command(work, "sft", "run"), tmp_path, work, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", whole("sft")[0])


def two_ranks(scripts, argv, cwd, timeout=120):
    """The two processes that torchrun would start, forked as all runs here, at their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [scripts.start(argv, cwd, RANK=rank, LOCAL_RANK=rank, **env) for rank in "01"]
    return ranks, [process.wait(timeout) for process in ranks]


@pytest.mark.case(29, "ppo")
def test_a_failing_reward_ends_all_processes(scripts, work, tmp_path):
    argv = command(work, "ppo", "run", "--reward", f"{work}/user.py:bad_reward")
    (first, _), codes = two_ranks(scripts, argv, tmp_path, timeout=60)
    assert 0 not in codes
    assert "bad_reward returned 4 values, expected a list of 5" in first.err
