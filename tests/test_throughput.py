"""The benchmarks of speed, without measuring: `python -m pytest tests/test_throughput.py`"""

import csv
import importlib
import shutil
import subprocess
import sys

import pytest
from harness import ROOT
from torch.profiler import profile

from algos import ilql
from common.lm import logprobs, structure

sys.path.insert(0, str(ROOT / "benchmarks/throughput"))

import measurement
import report
import run

FOLDER = ROOT / "benchmarks/throughput"
QUIET = {"user": 10, "nice": 0, "system": 10, "idle": 980, "iowait": 0, "irq": 0, "softirq": 0, "steal": 0}


@pytest.fixture
def ticks(monkeypatch):
    """The list of what the machine shows, one measurement after the other."""
    assert list(measurement.cpu_ticks()) == list(QUIET)
    shown = []
    monkeypatch.delenv("FORCE", raising=False)
    monkeypatch.setattr(measurement, "cpu_ticks", lambda: shown.pop(0))
    monkeypatch.setattr(measurement.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measurement, "gemm_peak", lambda dtype: 200.0)
    return shown


def after(before, **passed):
    """The ticks when so many have passed of each kind."""
    return before | {name: before[name] + count for name, count in passed.items()}


def test_a_run_waits_until_the_machine_is_idle(ticks, monkeypatch):
    busy = after(QUIET, user=15, idle=85)
    ticks += [QUIET, busy, busy, after(busy, user=9, idle=91)]
    measurement.wait_for_quiet()
    assert not ticks
    clock = iter(range(0, 1000, 50))
    monkeypatch.setattr(measurement.time, "monotonic", lambda: next(clock))
    ticks += [QUIET, busy] * 2
    with pytest.raises(SystemExit, match="FORCE=1"):
        measurement.wait_for_quiet()
    assert not ticks


def test_a_run_with_steal_leaves_no_row(ticks, tmp_path):
    results = tmp_path / "results.csv"

    def record(stolen):
        idle = after(QUIET, idle=100)
        ticks[:] = [QUIET, idle, idle, after(idle, user=100 - stolen, steal=stolen)]
        measurement.record(results, "sft", "fp32", 1, "model", lambda *run: ({"seconds": 2.5, "loss": 3.0}, 50.0))

    with pytest.raises(SystemExit) as end:
        record(stolen=4)
    assert end.value.code == run.REPEAT_ME and not results.exists()
    record(stolen=3)
    [row] = csv.DictReader(open(results))
    assert (row["steal"], row["fraction"], row["seconds"], row["loss"]) == ("0.0300", "0.2500", "2.5000", "3")


@pytest.mark.parametrize("algorithm", run.SIDES)
def test_plainrls_side_of_each_comparison_runs(algorithm, tmp_path, monkeypatch):
    monkeypatch.setenv("SIZES", '{"layers": 2, "width": 12, "vocabulary": 300, "prompts": 3, "batch": 3}')
    monkeypatch.setenv("STEPS", "4")
    name = run.file_of(algorithm, "fp32")
    monkeypatch.delitem(sys.modules, name, raising=False)
    work = importlib.import_module(name)
    if algorithm == "ddpo":
        monkeypatch.setattr(work, "IMAGES", 2)
        monkeypatch.setattr(work, "STEPS", 3)
    work.prepare(tmp_path, algorithm)
    columns, gflops = work.measure(algorithm, "fp32", tmp_path)
    assert columns["seconds"] > 0 and gflops > 0


def test_sides_take_turns_and_results_are_no_change_of_the_code(tmp_path):
    """In the order of a round; what is stored of a commit is not measured again."""
    folder = tmp_path / "benchmarks/throughput"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(".*"))
    for line in ("init", "add .", "-c user.name=a -c user.email=b commit -m c"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True, capture_output=True)

    def commands():
        line = [sys.executable, folder / "run.py", "ddpo", "--dry", "--repeats", "2", "--results", tmp_path / "r.csv"]
        done = subprocess.run(line, check=True, capture_output=True, text=True).stdout.splitlines()
        return [command.split("--one ")[1].split(" --results")[0].replace(" --repeat", "") for command in done]

    sides = "fp32 same-flags same-flags-kept tuned defaults".split()
    plan = [f"{side} 1" for side in sides] + [f"{side} 2" for side in sides]
    assert commands() == plan
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    (tmp_path / "r.csv").write_text(f"algorithm,mode,repeat,commit\nddpo,defaults,2,{head}\n")
    (folder / "results.csv").write_text("new\n")
    assert commands() == [command for command in plan if command != "defaults 2"]
    (folder / "run.py").write_text((folder / "run.py").read_text() + "\n")
    assert commands() == plan


def test_sides_that_do_other_work_are_no_comparison(monkeypatch):
    rows = []
    for side, norm in (("fp32", "2.0"), ("tuned", "2.001"), ("same-flags", "2.1")):
        rows.append({"algorithm": "ddpo", "device": "AMD", "mode": side, "loss": "1.0", "grad_norm": norm})
    monkeypatch.setattr(report, "read_csv", lambda path: rows[:2])
    assert report.same_work() == ["- ddpo: 5e-04"]
    monkeypatch.setattr(report, "read_csv", lambda path: rows)
    with pytest.raises(SystemExit, match="not the same work in ddpo"):
        report.same_work()


def test_ilql_copies_no_gradient_of_a_head(monkeypatch, build_model):
    """The most that is alive at a time in the backward pass is the gradients of the heads and that of a chunk of 7
    rows, as large as a weight. A copy is one more."""
    words = 50257
    lm = build_model(n_layer=1, n_embd=48, n_head=3, vocab_size=words, tie_word_embeddings=False)
    lm.transformer.wte.weight.requires_grad_(False)
    lm.plain_output = structure.has_plain_output(lm)
    monkeypatch.setattr(logprobs, "CHUNK", 7 * words)
    policy = ilql.PolicyWithQ(lm)
    args = ilql.Args(model="x", dataset="x", gamma=0.99, tau=0.7, awac_beta=1.0, cql_scale=0.1, awac_scale=1.0)
    episodes = [ilql.Episode(list(range(2 + row, 26 + row)), list(range(7, 24)), [0.5] * 17, True) for row in (0, 1)]
    batch = ilql.Batch.of(episodes, 0, "cpu")
    with profile(profile_memory=True) as profiled:
        ilql.ilql_losses(policy, batch, args)["loss"].mean().backward()
    now = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    gradients = sum(weight.grad.nbytes for weight in policy.parameters() if weight.grad is not None)
    assert most - gradients < policy.q_heads[0][-1].weight.nbytes * 1.25
