"""Names of the hub, from a cache and without a network: `python -m pytest tests/test_hub.py`

Commands run in a process of their own, since the libraries read where the cache is when they are imported. Uploads go
to a stub of the client.
"""

import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
import yaml
from datasets.packaged_modules.json.json import Json
from harness import ROOT, once
from helpers import log, save, write
from safetensors.torch import load_file, save_file
from test_models import run as train
from transformers import GPT2ForSequenceClassification

from algos import ppo, sft
from benchmarks.tasks import randomwalks

SPLITS = {
    "train": [{"prompt": p, "completion": p + "a"} for p in "bcd"],
    "held_out": [{"prompt": p, "completion": "u" + p} for p in "efgh"],
}
VALUE_HEAD = {"0.weight": torch.full((1, 12), 0.5), "0.bias": torch.full((1,), 0.25)}
EXPORT = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
SFT = "sft --total-steps 2 --batch-size 2 --eval-dataset None --save-every 0 --threads 1 --dataset train.jsonl"
PPO = """ppo --total-episodes 4 --rollout-batch-size 4 --batch-size 4 --save-every 0 --max-new-tokens 4 --threads 1
    --dataset train.jsonl"""
# Commands one after the other in one process, as their scripts run them; answers each line with [exit code, stderr].
DRIVER = """
import contextlib, io, json, sys
from algos import ppo, sft
from common.cli import cli
for line in sys.stdin:
    sys.argv = json.loads(line)
    script, code, err = {"ppo": ppo, "sft": sft}[sys.argv[0]], 0, io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            cli(script.Args, script.main)
    except SystemExit as error:
        code = error.code
    print(json.dumps([code, err.getvalue()]), flush=True)
"""
MAZE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path("marker").touch()

class MazeConfig(GPT2Config):
    model_type = "maze"

class MazeModel(GPT2LMHeadModel):
    config_class = MazeConfig
"""


def commit(revision):
    return hashlib.sha1(revision.encode()).hexdigest()


def put_in_cache(hub, repository, **revisions):
    """The files of directories {revision: directory} as huggingface_hub finds them: snapshots and refs."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    for revision, directory in revisions.items():
        shutil.copytree(directory, folder / "snapshots" / commit(revision))
        (folder / "refs" / revision).write_text(commit(revision))


@pytest.fixture(scope="module")
def work(tmp_path_factory, build_model):
    """A directory with models (main, v2, judge, maze), the rows of SPLITS in files, and HF_HOME, which has the same as
    org/walker, org/judge, org/maze and org/walks."""
    work = tmp_path_factory.mktemp("hub")
    letters = randomwalks.tokenizer()
    models = {name: build_model(seed=seed) for seed, name in enumerate(("main", "v2", "maze"))}
    torch.manual_seed(4)
    models["judge"] = GPT2ForSequenceClassification(build_model(id2label={0: "BAD", 1: "GOOD"}).config)
    for number, (name, model) in enumerate(models.items()):
        letters.model_max_length = 31 - number  # tells the tokenizers apart
        save(work / name, model, letters)
    code = {"AutoConfig": "maze.MazeConfig", "AutoModelForCausalLM": "maze.MazeModel"}
    config = json.loads((work / "maze/config.json").read_text()) | {"model_type": "maze", "auto_map": code}
    (work / "maze/config.json").write_text(json.dumps(config))
    (work / "maze/maze.py").write_text(MAZE)
    shutil.copytree(work / "main", work / "policy")
    save_file(VALUE_HEAD, work / "policy/value_head.safetensors")
    put_in_cache(work / "HF_HOME/hub", "org/walker", main=work / "main", v2=work / "v2")
    for name in ("judge", "maze", "policy"):
        put_in_cache(work / "HF_HOME/hub", f"org/{name}", main=work / name)
    splits = {name: write(work / f"{name}.jsonl", rows) for name, rows in SPLITS.items()}
    cache = work / "HF_HOME/datasets"
    Json(cache_dir=str(cache), dataset_name="walks", hash="0" * 16, data_files=splits).download_and_prepare()
    (cache / "org___walks").mkdir()
    next((cache / "walks").iterdir()).rename(cache / "org___walks/default")
    return work


@pytest.fixture(scope="module")
def run(work):
    """run(*commands, code) -> the stderr of each, in the directory work and a process of its own."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    env |= {"HF_HOME": str(work / "HF_HOME"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        open(work / "err", "w") as err,
        subprocess.Popen([sys.executable, "-c", DRIVER], **pipes, stderr=err, cwd=work, env=env) as process,
    ):

        def answer(command):
            process.stdin.write(json.dumps(once(command.split())) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], 120)
            line = process.stdout.readline() if ready else ""
            assert line, f"{command}\n{(work / 'err').read_text()}"
            return json.loads(line)

        def run(*commands, code=0):
            results = {command: answer(command) for command in commands}
            assert {found for found, _ in results.values()} == {code}, results
            return [err for _, err in results.values()]

        yield run
        process.terminate()


def test_revisions_of_a_model(run, work):
    """Weights and tokenizer are those of the branch, tag or commit, which config.yaml repeats."""
    runs = {"default": ("", "main"), "tag": ("--revision v2", "v2"), "commit": (f"--revision {commit('v2')}", "v2")}
    command = f"{SFT} --eval-every 0 --lr 1e-30 --model org/walker"
    run(
        *(f"{command} {flags} --run-dir {name}" for name, (flags, _) in runs.items()),
        "sft --config tag/config.yaml --threads 1 --run-dir again",
    )
    for name, (_, source) in (runs | {"again": runs["tag"]}).items():
        found = load_file(work / name / "hf_model/model.safetensors")
        expected = load_file(work / source / "model.safetensors")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-20)  # zeros have moved by 1e-30
        tokenizers = [work / folder / "tokenizer_config.json" for folder in (f"{name}/hf_model", source)]
        assert len({json.loads(path.read_text())["model_max_length"] for path in tokenizers}) == 1


def test_an_adapter_keeps_the_revision_of_its_base(run, work):
    """Without a step, training goes on with the losses of v2."""
    command = f"{SFT} --eval-every 0 --lr 1e-30"
    run(f"{command} --model org/walker --revision v2 --lora-r 2 --run-dir adapter")
    run(f"{command} --model adapter/hf_model --run-dir further", f"{command} --model org/walker --run-dir newest")
    runs = ("adapter", "further", "newest")
    found, further, newest = ([line["train/loss"] for line in log(work / name)] for name in runs)
    assert further == pytest.approx(found, rel=1e-6) and newest != pytest.approx(found, rel=1e-2)


def test_splits_of_a_dataset(run, work):
    rows = [
        "train.jsonl --eval-dataset held_out.jsonl,train.jsonl",
        "org/walks --eval-dataset org/walks:held_out,org/walks:train",
        "org/walks:held_out[:2]",
    ]
    command = f"{SFT} --eval-every 1 --model v2"
    run(*(f"{command} --dataset {names} --run-dir data-{i}" for i, names in enumerate(rows)))
    files, splits, part = (log(work / f"data-{i}") for i in range(3))
    assert files == splits
    assert {"eval/held_out/loss", "eval/train/loss"} < splits[-1].keys()
    assert part[-1]["train/epoch"] == 2  # 4 rows seen of 2


def test_a_classifier_as_the_reward(run, work):
    """The same run as with directories; --revision is that of the model, the classifier has no v2."""
    there = "--model org/walker --revision v2 --reward org/judge"
    names = ["--model v2 --reward ./judge:GOOD", f"{there}:GOOD", f"{there}:BAD"]
    run(*(f"{PPO} {flags} --run-dir ppo-{number}" for number, flags in enumerate(names)))
    directory, good, bad = ((work / f"ppo-{number}/metrics.jsonl").read_text() for number in range(3))
    assert directory == good != bad


@pytest.mark.case(102, "sft")
def test_a_run_goes_on_only_with_the_commits_it_began_with(run, work):
    """The sentence names what keeps the old one."""
    refs = work / "HF_HOME/hub/models--org--walker/refs/main"
    command = f"{SFT} --eval-every 0 --model org/walker --run-dir commits --total-steps 4 --save-every 2 --lr 1e-3"
    run(command)
    for name in ("hf_model", "checkpoints/step_00000004"):  # as if it had been stopped
        shutil.rmtree(work / "commits" / name)
    refs.write_text(commit("v2"))
    try:
        [err] = run(command, code=2)
    finally:
        refs.write_text(commit("main"))
    assert "commits began with other inputs: give --resume never to start anew" in err and " by --revision " in err
    assert re.search(r"\n  --model \(weights\): was -?[\d.]+, is -?[\d.]+\n$", err)
    run(command)


def test_a_value_head_of_the_hub_is_read(run, work):
    """A step of 1e-30 leaves it as it is."""
    run(f"{PPO} --model org/policy --reward judge:GOOD --lr 1e-30 --run-dir policy-run")
    torch.testing.assert_close(load_file(work / "policy-run/hf_model/value_head.safetensors"), VALUE_HEAD)


@pytest.mark.case(55, "ppo sft")
@pytest.mark.case(56, "sft")
def test_what_is_neither_cached_nor_reachable(run, work):
    """Exit code 2, nothing written, and one sentence: the flag, and that there is no connection (or no such split)."""
    missing = {
        f"{SFT} --model org/nope": "--model org/nope cannot be loaded: .*couldn't connect",
        f"{SFT} --model org/a/walker": "--model org/a/walker: there is no such directory",
        f"{SFT} --model org/walker --revision v3": "--model org/walker cannot be loaded: .*couldn't connect",
        f"{SFT} --model v2 --dataset org/nope:test": "--dataset org/nope:test cannot be loaded: .*Couldn't reach",
        f"{PPO} --model v2 --reward org/nope:GOOD": "--reward org/nope.* cannot be loaded: .*couldn't connect",
        f"{SFT} --model v2 --dataset org/walks:heldout": "--dataset org/walks:heldout .*'train'.*'held_out'",
    }
    results = run(*(f"{command} --run-dir missing" for command in missing), code=2)
    for said, err in zip(missing.values(), results, strict=True):
        *notes, sentence = err.splitlines()
        assert re.match(f"error: {said}", sentence), err
        assert "Traceback" not in err
        assert not notes or "heldout" in said
    assert not (work / "missing").exists()


@pytest.mark.case(60, "sft ppo grpo reward dpo ilql")
def test_code_of_a_repository_runs_only_when_told(run, work):
    command = f"{SFT} --eval-every 0 --lr 1e-3"
    results = run(*(f"{command} --model {model} --run-dir refused" for model in ("org/maze", "./maze")), code=2)
    for model, err in zip(("org/maze", "maze"), results, strict=True):
        assert err.startswith(f"error: --model {model} cannot be loaded: ") and err.count("\n") == 1, err
        assert "custom code" in err and "trust_remote_code" in err
    assert not any((work / name).exists() for name in ("marker", "refused", "HF_HOME/modules"))
    run(f"{command} --model org/maze --trust-remote-code --run-dir trusted")
    assert (work / "marker").exists()
    assert json.loads((work / "trusted/hf_model/config.json").read_text())["auto_map"]
    assert yaml.safe_load((work / "trusted/config.yaml").read_text())["trust_remote_code"] is True


@pytest.fixture
def client(monkeypatch):
    """In the place of the hub's client; its methods take the arguments of the real ones. files: what was uploaded."""
    client = create_autospec(huggingface_hub.HfApi, instance=True, files={})

    def upload(folder_path, **options):
        client.files |= {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    client.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
    return client


def test_an_upload_holds_the_export_alone(gpt2_dir, client, tmp_path):
    folder = tmp_path / "run/hf_model"
    train(ppo, gpt2_dir, tmp_path / "run", push_to_hub="org/name")
    client.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    client.upload_folder.assert_called_once_with(repo_id="org/name", folder_path=str(folder))
    assert len(client.mock_calls) == 2
    assert client.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert client.files.keys() == EXPORT | {"value_head.safetensors"}


@pytest.mark.case(62, "sft ppo grpo reward dpo ilql ddpo")
def test_a_repository_that_cannot_be_made(gpt2_dir, client, tmp_path):
    """The same command uploads the model without training again."""
    run_dir = tmp_path / "run"
    client.create_repo.side_effect = OSError("401 Unauthorized: bad token")
    with pytest.raises(OSError, match="401 Unauthorized"):
        train(sft, gpt2_dir, run_dir, push_to_hub="org/name")
    assert (run_dir / "hf_model/model.safetensors").exists() and not client.files
    before = (run_dir / "metrics.jsonl").read_bytes()
    client.create_repo.side_effect = None
    train(sft, gpt2_dir, run_dir, push_to_hub="org/name")
    assert client.files.keys() == EXPORT and (run_dir / "metrics.jsonl").read_bytes() == before
