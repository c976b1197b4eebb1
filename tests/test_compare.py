"""What benchmarks/compare.py shows of runs: `python -m pytest tests/test_compare.py`"""

import json
import os
import signal

import pytest
from helpers import log, write
from test_models import run

from algos import dpo
from benchmarks import compare
from common import run as run_module

FLAGS = {"model": "org/tiny", "dataset": "rows.jsonl", "lr": 0.001, "kl_coef": 0.05, "seed": 1}


@pytest.fixture
def make(tmp_path):
    """make(name, values, ...) writes the directory of a run; values are those of its headline metric."""

    def make_run(name, values, algo="ppo", headline="eval/reward", finished=True, files=None, **flags):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        env = {"algo": algo, "flags": FLAGS | flags, "files": files or {"script": "a"}, "total_steps": 40}
        (folder / "env.json").write_text(json.dumps(env | {"headline": headline if values else None}))
        records = []
        for number, value in enumerate(values):
            records.append({"step": 10 * number, headline: value, "eval/length": 7.0})
            records.append({"step": 10 * number + 1, "kl": 0.5, "train/loss": 1.0})
        write(folder / "metrics.jsonl", records)
        if finished:
            (folder / "README.md").write_text("# card\n")

    return make_run


@pytest.fixture
def shown(capsys, monkeypatch, tmp_path):
    """shown(...) -> the lines that the command prints on a terminal of 80 columns, without spaces at their ends."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def compared(*paths, lists=False, metric=None, out=None):
        compare.main([str(path) for path in paths], lists, metric, out)
        printed = capsys.readouterr().out
        assert all(len(line) <= 80 for line in printed.splitlines() if not line.startswith("left out"))
        return [line.rstrip() for line in printed.splitlines() if line.strip()]

    return compared


def test_groups_over_seeds_flags_and_files_that_differ(make, shown, tmp_path):
    make("a-1", [0.0, 0.5, 0.25])
    make("a-2", [0.0, 1.0, 0.75], seed=2)
    make("b-1", [0.0, 0.3], finished=False, lr=0.01, kl_coef=0.0)
    make("c-1", [], finished=False, lr=0.1)
    assert shown("a-1", "a-2", "b-1", "c-1", out="all.png") == [
        "eval/reward",
        "group  run              last        best         state             seed",
        "1      a-1              0.25        0.5 at 10    finished          1",
        "1      a-2              0.75        1 at 10      finished          2",
        "1      mean ± std of 2  0.5 ± 0.35  0.75 ± 0.35",
        "2      b-1              0.3         0.3 at 10    stopped 11/40     1",
        "3      c-1                                       stopped, no step  1",
        "group 1: --lr 0.001, --kl-coef 0.05",
        "group 2: --lr 0.01, --kl-coef 0.0",
        "group 3: --lr 0.1, --kl-coef 0.05",
        "picture all.png",
    ]
    make("e-1", [1.0, 0.5], reward="other.py:score", lower_is_better=True)
    lines = shown("a-1", "e-1")
    assert lines[-1] == "the runs have different rewards, which eval/reward does not compare"
    assert "2      e-1  0.5   0.5 at 10  finished  1" in lines
    make("d-1", [1.0], files={"script": "b"}, seed=2)
    assert shown("a-1", "d-1")[-3:] == ["group 1: as all others", "group 2: as all others", "files that differ: script"]


def test_algorithms_are_compared_by_a_metric_that_they_share(make, shown):
    make("a", [1.0])
    make("b", [2.0], algo="sft", headline="train/loss", packing=True)
    sentence = r"the runs begin with different metrics \(eval/reward, train/loss\): choose one with --metric; "
    with pytest.raises(SystemExit, match=f"^error: {sentence}they share eval/length, kl$"):
        shown("a", "b")
    lines = shown("a", "b", metric="eval/length")
    assert lines[0] == "eval/length" and "group 1: ppo" in lines and "group 2: sft" in lines
    known = "eval/length, eval/reward, kl, "
    with pytest.raises(SystemExit, match=f"^error: no run has --metric lenght; there are {known}"):
        shown("a", "b", metric="lenght")


def test_a_run_keeps_its_headline_when_it_goes_on(gpt2_dir, tmp_path, monkeypatch):
    """Between two evaluations, too, where the metrics of a step do not have it. It is running while it has its lock."""
    states = []

    def stop(run):
        states.append(compare.state_of(run.dir, 1, 4))
        os.kill(os.getpid(), signal.SIGTERM)
        return True, False

    monkeypatch.setattr(run_module.Run, "stop_requested", stop)
    for _ in range(2):
        with pytest.raises(SystemExit):
            run(dpo, gpt2_dir, tmp_path / "run", eval_every=4)
        assert compare.newest_headline(tmp_path / "run") == "eval/rewards/accuracies"
    assert [record["step"] for record in log(tmp_path / "run")] == [0, 1, 2]
    assert states == ["running 1/4", "running 1/4"]
    stopped = compare.read_run(tmp_path / "run")
    assert (stopped.state, stopped.algo, len(stopped.curve(stopped.headline))) == ("stopped 2/4", "dpo", 1)


def test_a_folder_is_listed_with_what_is_no_run(make, shown, tmp_path):
    make("runs/ppo-1a2b3c4d", [0.0, 0.75])
    make("runs/a_rather_long_name_of_the_user-5e6f7a8b", [2.5], algo="sft", headline="train/loss", finished=False)
    make("runs/torn", [0.5, 1.0], finished=False)
    with open(tmp_path / "runs/torn/metrics.jsonl", "a") as file:
        file.write('{"step": 20, "eval/rew')
    make("runs/broken", [0.5])
    (tmp_path / "runs/broken/metrics.jsonl").write_text('{"step": 1}\nnothing\n{"step": 2}\n')
    (tmp_path / "runs/foreign").mkdir()
    (tmp_path / "runs/foreign/env.json").write_text('{"python": "3.11"}')
    (tmp_path / "runs/curves").mkdir()
    damaged = "its env.json or metrics.jsonl is damaged, or not of a run"
    assert shown("runs", lists=True) == [  # the date has no room
        f"left out: runs/broken: {damaged}",
        "left out: runs/curves: it holds no run, there is no env.json",
        f"left out: runs/foreign: {damaged}",
        "run                                      state          headline          algo",
        "a_rather_long_name_of_the_user-5e6f7a8b  stopped 1/40   train/loss 1      sft",
        "ppo-1a2b3c4d                             finished       eval/reward 0.75  ppo",
        "torn                                     stopped 11/40  eval/reward 1     ppo",
    ]
