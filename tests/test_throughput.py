"""The benchmarks of speed and memory, without measuring: `python -m pytest tests/test_throughput.py`"""

import csv
import functools
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from harness import ROOT
from torch.profiler import profile, record_function

from common import forward

sys.path.insert(0, str(ROOT / "benchmarks/throughput"))

import ilql_vs_trlx
import measurement
import memory
import ppo_gpt2_small
import report
import shares
import tables

FOLDER = ROOT / "benchmarks/throughput"
QUIET = {"user": 10, "nice": 0, "system": 10, "idle": 980, "iowait": 0, "irq": 0, "softirq": 0, "steal": 0}


@pytest.fixture
def ticks(monkeypatch):
    """The list of what the machine shows, one measurement after the other."""
    shown = []
    monkeypatch.delenv("FORCE", raising=False)
    monkeypatch.setattr(measurement, "cpu_ticks", lambda: shown.pop(0))
    monkeypatch.setattr(measurement.time, "sleep", lambda seconds: None)
    return shown


def after(before, **passed):
    """The ticks when so many have passed of each kind."""
    return before | {name: before[name] + count for name, count in passed.items()}


def test_ticks_are_those_of_the_machine():
    before = measurement.cpu_ticks()
    assert list(before) == list(QUIET)
    assert sum(before.values()) > 0


def test_a_run_waits_until_the_machine_is_idle(ticks):
    busy = after(QUIET, user=15, idle=85)
    ticks += [QUIET, busy, busy, after(busy, user=9, idle=91)]
    measurement.wait_for_quiet()
    assert not ticks


def test_a_machine_that_stays_busy_is_an_error(ticks, monkeypatch):
    clock = iter(range(0, 1000, 50))
    monkeypatch.setattr(measurement.time, "monotonic", lambda: next(clock))
    ticks += [QUIET, after(QUIET, user=1)] * 2
    with pytest.raises(SystemExit, match="FORCE=1"):
        measurement.wait_for_quiet()
    assert not ticks


@pytest.mark.parametrize("stolen", [3, 4])
def test_a_run_with_steal_leaves_no_row(ticks, stolen, tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "gemm_peak", lambda dtype: 200.0)
    idle = after(QUIET, idle=100)
    ticks += [QUIET, idle, idle, after(idle, user=100 - stolen, steal=stolen)]
    results = tmp_path / "results_ppo.csv"

    def record():
        measurement.record(results, "plainrl", "fp32", 1, lambda: ({"seconds": "2.5"}, 50.0))

    if stolen > 3:
        with pytest.raises(SystemExit) as end:
            record()
        assert end.value.code == 75
        assert not results.exists()
        return
    record()
    with open(results) as file:
        (row,) = csv.DictReader(file)
    assert (row["steal"], row["fraction"], row["mode"]) == ("0.0300", "0.2500", "fp32")


def test_a_peer_keeps_freed_memory_in_the_modes_named_for_it(tmp_path, monkeypatch):
    """Before it is measured."""
    monkeypatch.setenv("FORCE", "1")
    monkeypatch.setattr(measurement, "gemm_peak", lambda dtype: 200.0)
    done = []
    monkeypatch.setattr(measurement, "keep_freed_memory", lambda: done.append("kept"))

    def measure():
        done.append("measured")
        return {"seconds": "2.5"}, 50.0

    for mode in ("tuned", "fp32-plain-same-flags", "fp32-plain-same-flags-kept-memory"):
        measurement.record(tmp_path / "results.csv", "plainrl", mode, 1, measure)
    assert done == ["measured", "measured", "kept", "measured"]


def commands(folder=FOLDER, **settings):
    """The lines that run_all.sh would run."""
    line = ["bash", str(folder / "run_all.sh")]
    environment = os.environ | {"DRY": "1", "REPEATS": "1"} | settings
    return subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()


def modes_of(lines):
    """The modes that commands name."""
    return set(re.findall(r"--mode (\S+)", "\n".join(lines)))


def test_every_mode_is_measured():
    named = modes_of(commands())
    known = set()
    compared = set()
    for name, script in report.SCRIPTS.items():
        if name in ("sampling", "memory", "shares"):
            continue
        for modes in ("MODES", "PEER_MODES", "NEW_PEER_MODES", "SYSTEMS"):
            known |= set(getattr(script, modes, ()))
        for _, mode, peers, _ in script.COMPARISONS:
            compared |= {mode, *peers}
    assert named == known
    assert compared <= known


def test_modes_in_bf16_can_be_left_out():
    names = modes_of(commands(BF16="0"))
    assert "fp32" in names and not any("bf16" in name for name in names)


def test_most_bytes_by_hand():
    with profile(profile_memory=True) as profiled:
        before = torch.zeros(13)
        with record_function(memory.LOSS_BEGINS):
            pass
        one = torch.zeros(11)
        two = torch.zeros(5)
        del one, before
        three = torch.zeros(7)
    assert len(two) + len(three) == 12
    assert memory.most_bytes(profiled) == (11 + 5) * 4


def test_ilql_copies_no_gradient_of_a_head(monkeypatch):
    """The gradients of Q(s, a) and of CQL are added in place: what else there is, is the gradient of a chunk of 7 rows,
    as large as the weight. A copy would be one more."""
    words = 50257
    monkeypatch.setattr(memory, "TINY", True)
    monkeypatch.setitem(memory.WIDTHS, words, 48)
    monkeypatch.setattr(forward, "CHUNK", 7 * words)
    lm, policy, update, gradients = memory.updates("ilql", words, 2)
    needed, _ = memory.measured(lm, functools.partial(update, False), gradients)
    assert needed * memory.MB < policy.q_heads[0][-1].weight.nbytes * 1.25


@pytest.mark.parametrize(
    ("file", "dirty"),
    [("results_sft.csv", False), ("intel/results_sft.csv", False), ("intel/README.md", False), ("tables.py", True)],
)
def test_new_results_are_no_change_of_the_code(file, dirty, tmp_path):
    folder = tmp_path / "benchmarks/throughput"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(".*"))
    for line in ("init", "add .", "-c user.name=a -c user.email=b commit -m c"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True, capture_output=True)
    with open(folder / file, "a") as changed:
        changed.write("\n")
    [work] = {line for line in commands(folder, ONLY="sft") if line.startswith("mkdir -p") and ".work" in line}
    assert ("-dirty/" in work) == dirty


def test_the_fastest_setting_of_the_peer_is_compared():
    seconds = [("ours", 1, 2), ("ours", 2, 4), ("a", 1, 8), ("a", 2, 8), ("b", 1, 5), ("b", 2, 20), ("c", 3, 1)]
    rows = [{"mode": mode, "repeat": repeat, "seconds": s} for mode, repeat, s in seconds]
    assert tables.fastest(tables.by_mode(rows), "ours", ["a", "b", "c", "d"]) == ([4.0, 2.0], "a")


def test_runs_that_differ_stop_the_page():
    rows = [{"loss": "1.0"}, {"loss": "1.01"}]
    figures = {"loss": tables.first_of("loss")}
    assert tables.agreement({"bf16": rows}, figures, 1e-3) == "- bf16, 2 runs: loss 1e-02"
    with pytest.raises(SystemExit, match="not the same work"):
        tables.agreement({"fp32": rows}, figures, 1e-3)


def test_the_page_says_the_largest_steal():
    rows = report.read(FOLDER)["ppo"]
    without = [{name: value for name, value in row.items() if name != "steal"} for row in rows]
    assert f"steal not recorded in {len(rows)} of {len(rows)} runs" in ppo_gpt2_small.section(without)
    steals = ["0.0123"] + ["0"] * (len(rows) - 1)
    found = [row | {"steal": steal} for row, steal in zip(rows, steals, strict=True)]
    assert "steal at most 1.2 %" in ppo_gpt2_small.section(found)


def test_goals_have_no_verdict_on_lesser_cpus():
    assert report.verdict(3.5, [3.4, 3.5, 9.0], "AMD EPYC") == "3.5: reached"
    assert report.verdict(3.5, [3.4], "AMD EPYC, AVX512") == "3.5: missed"
    assert report.verdict(3.5, [3.4], "AMD EPYC, AVX2") == "3.5"
    assert report.verdict(None, [3.4], "AMD EPYC") == ""


def test_a_missed_goal_has_its_reason():
    """The peer is 2 times as fast by the median of three repeats, at half of the peak: at most 4."""
    rows = []
    for repeat, seconds in ((1, 10), (2, 20), (3, 35)):
        ours = {"mode": "fp32", "seconds": "10", "seconds_rollout": "4", "fraction": "0.5", "device": "AMD"}
        rows += [ours | {"repeat": repeat}, {"mode": "tuned", "repeat": repeat, "seconds": str(seconds)}]
    profile = {"benchmark": "ppo_gpt2_small", "mode": "fp32", shares.PRODUCTS: "0.75", "attention": "0.01"}
    text = report.missed({"ppo": rows, "shares": [profile]})
    assert text.startswith("- ppo, 2.00 of 3.5: 75 % of an iteration")
    assert "would be 4.0" in " ".join(text.split()) and "`tuned`, 2.00" in text
    assert report.quoted({"ppo": rows}) == "- AMD: ppo 2.0."
    defaults = [{"mode": "defaults", "repeat": repeat, "seconds": "35"} for repeat in (1, 2, 3)]
    assert report.quoted({"ppo": rows + defaults}) == "- AMD: ppo 2.0 (3.5)."


def test_the_peer_of_ilql_does_the_same_steps(monkeypatch):
    """Seven steps, over one synchronisation of the targets; ours with small chunks and micro-batches."""
    monkeypatch.setitem(ilql_vs_trlx.WORKLOADS, "walks", (7, 0, 24, 2e-4))
    monkeypatch.setattr(measurement, "THREADS", torch.get_num_threads())
    switches = []  # of the process, which "same-flags" promises
    for name in ("fast_cpu_matmul", "keep_freed_memory"):
        monkeypatch.setattr(ilql_vs_trlx, name, lambda name=name: switches.append(name))
    theirs = ilql_vs_trlx.peer_steps("walks", True, None)
    assert switches == ["fast_cpu_matmul", "keep_freed_memory"]
    monkeypatch.setattr(forward, "CHUNK", 25 * 50)
    ours = ilql_vs_trlx.our_steps("walks", "fp32", {"micro_batch_size": 10}, None)
    assert ours[1][0] == pytest.approx(theirs[1][0], rel=1e-4)
    assert [step["loss"] for step in ours[1]] == pytest.approx([step["loss"] for step in theirs[1]], rel=1e-3)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-4)


def test_shares_of_a_profile_by_hand():
    """Of four steps the second and third are profiled: two matrix products forward, two for the weight's gradient."""
    weight = torch.nn.Parameter(torch.randn(700, 300))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def measure():
        for _ in range(4):
            (torch.randn(500, 700) @ weight).sum().backward()
            optimizer.step()

    profiler, seconds = shares.profiled(measure, 1, 3)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["aten::mm"] == 4
    assert counts["aten::_fused_adamw_"] == 2
    found = shares.shares(profiler, seconds)
    assert sum(found.values()) == pytest.approx(1)
    assert found["matrix products"] > found["loss"] == 0
    assert shares.kind_of("aten::_log_softmax") == "loss"
    assert shares.kind_of("aten::_softmax") == "attention"
    assert shares.kind_of("aten::tanh") == "other operations"


def test_products_alone():
    """Ours takes 2 s, 1.2 s of them products, and the peer 5 s."""
    others = dict.fromkeys([*shares.KINDS, shares.REST, shares.PYTHON], "0.1")
    ours = {"benchmark": "sft_mixed_lengths", "mode": "fp32-packing", "seconds": "2", **others, shares.PRODUCTS: "0.6"}
    benchmark, mode = shares.COMPARED["sft_mixed_lengths", "fp32-packing"]
    peer = {"benchmark": benchmark, "mode": mode, "seconds": "5", **others}
    text = shares.section([ours, peer])
    assert "| sft_mixed_lengths | fp32-packing | 2.00 | 2.50 | 4.17 | 60 % |" in text
    assert f"| {benchmark} | {mode} | 5.00 |  |  | 10 % |" in text
