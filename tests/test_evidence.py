"""Commands that make the curves of benchmarks/, their intervals, and the comparison of two commits."""

import hashlib
import json
import math
import os
import subprocess
from statistics import stdev

import pytest
from harness import ROOT
from helpers import write

from benchmarks import check, paired, regression, seeds, signs, tables
from benchmarks.claims import CLAIMS, TWIN


def test_numbers_that_no_stored_claim_has():
    """The score is best in the second evaluation, between which and the last the reward rises by 3."""
    assert tables.average([0.25]) == "0.250"
    points = [(0, 1.0, 1.0), (4, 3.0, 2.0), (8, 2.0, 5.0)]
    curve = [{"step": step, "score": score, "reward": reward} for step, score, reward in points]
    assert check.measured(curve, "reward", "rise", "score") == 3.0
    assert check.measured(curve, "reward", "late", "score") == (2.0 + 5.0) / 2


def test_rounding_is_the_spread_of_a_run_and_its_twin(monkeypatch):
    """Ends that differ by 0.03 and 0.04: squares of 0.0025 in all, over two pairs and two runs a pair. The seeds
    themselves lie 0.1 apart."""

    def runs(**ends):
        return {int(seed[1:]): [{"eval/optimality": end, "eval/illegal": 0.0}] for seed, end in ends.items()}

    found = {"default": runs(s1=0.3, s2=0.4, s3=0.9), "default" + TWIN: runs(s1=0.33, s2=0.36)}
    monkeypatch.setattr(tables, "curves", lambda name: found)
    lines = check.rounding("sft-randomwalks")
    assert lines[3] == "- `default`: last `eval/optimality`, 0.0250 and 0.0707, 2 seeds"
    assert lines[4] == "- `default`: last `eval/illegal`, 0.0000 and 0.0000, 2 seeds" and len(lines) == 5
    assert list(tables.shown("sft-randomwalks")) == ["default"]
    del found["default" + TWIN]
    assert check.rounding("sft-randomwalks") == []


def test_run_sh_names_every_stored_run():
    """What DRY=1 prints holds a command for each curve, once, and no other variant of a stored seed."""
    for claim in CLAIMS:
        stored = {(run["variant"], int(run["seed"])) for run in tables.stored_runs(claim)}
        for seed in seeds.default_seeds(claim):
            run_dirs = []
            for command in seeds.commands(claim, seed, []):
                run_dirs += seeds.run_dirs_of(command)
            variants = [run_dir.rpartition("/")[2].rpartition("-seed")[0] for run_dir in run_dirs]
            assert len(set(variants)) == len(variants)
            assert {variant.removesuffix(TWIN) for variant, number in stored if number == seed} <= set(variants)
        assert {seed for _, seed in stored} <= set(seeds.default_seeds(claim))
    [command] = seeds.commands("ppo-randomwalks", 2, ["lora"])
    assert "--lora-r 8" in command and "lora-seed2" in command


def fake_run(folder, scores, seconds):
    folder.mkdir(parents=True)
    write(folder / "metrics.jsonl", [{"step": step, "eval/optimality": score} for step, score in enumerate(scores)])
    write(folder / "perf.jsonl", [{"time": 100}, {"time": 100 + seconds}])
    env = {"commit": "c", "device": "d", "threads": 1, "processes": 1, "command": "algos/sft.py"}
    env["versions"] = {"torch": "2", "transformers": "5"}
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_collected_runs_take_their_place(tmp_path, monkeypatch):
    """One in place of a stored seed and one beside it; a run without an evaluation has no curve."""
    for name in ("curves.csv", "runs.csv"):
        (tmp_path / name).write_text((tables.claim_path("sft-randomwalks") / name).read_text())
    monkeypatch.setattr(tables, "claim_path", lambda name: tmp_path)
    before = tables.curves("sft-randomwalks")["default"]
    folders = [fake_run(tmp_path / name, [0.1, 0.123456789], seconds=7) for name in ("default-seed2", "default-seed11")]
    folders.append(fake_run(tmp_path / "other-seed1", [None], seconds=7))
    check.collect("sft-randomwalks", folders)
    after = tables.shown("sft-randomwalks")
    assert list(after) == ["default"] and set(after["default"]) == {*before, 11}
    assert tables.history(after["default"][2], "eval/optimality") == [0.1, 0.12345679]
    assert after["default"][3] == before[3]
    rows = {int(run["seed"]): run for run in tables.stored_runs("sft-randomwalks") if run["variant"] == "default"}
    assert (rows[11]["last"], rows[11]["seconds"], rows[11]["commit"]) == ("0.123456789", "7.0", "c")


def test_samples_of_a_claim(tmp_path, monkeypatch):
    """Of the first and the last step, of ilql with the largest beta; a variant's rows replace those before."""
    monkeypatch.setattr(tables, "claim_path", lambda name: tmp_path)
    name = next(name for name, claim in CLAIMS.items() if claim.samples)
    run = fake_run(tmp_path / "ilql-seed1", [0.1, 0.2], seconds=7)
    chat = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    rows = []
    for step, beta, output in (0, 0, "a"), (0, 4, "b"), (5, 0, "c"), (5, 4, "d|\n"):
        rows.append({"step": step, "beta": beta, "prompt": chat, "output": output})
    write(run / "samples.jsonl", rows)
    for _ in range(2):
        check.collect_samples(name, "ilql", run)
    [row] = tables.read_csv(tmp_path / "samples.csv")
    assert row == {"variant": "ilql", "prompt": "How?", "before": "b", "after": "d|\\n"}
    assert check.before_and_after(name)[-1] == "| ilql | How? | b | d\\|\\n |"


def test_signs_take_the_first_iteration_of_a_pitfall():
    words = signs.first_iteration("top-k", 3, 32, "runs/x")
    assert words[1].startswith("runs/planted/") and words[1].endswith("-130/algos/grpo.py")
    settings = "--config benchmarks/tasks/arithmetic/grpo.yaml"
    flags = "--total-episodes 512 --micro-batch-size 32 --eval-every 0 --kl-coef 1e-09"
    assert " ".join(words[2:]) == f"--seed 3 --threads 1 {settings} --run-dir runs/x {flags}"


def test_signs_by_hand(tmp_path, monkeypatch):
    """Gaps of 1 and 3, whose mean has a standard error of 1; the gradient grows by a half."""
    rows = ["a,1,16,3,2,4", "a,2,16,4,1,9", "a,1,32,8,3,6"]
    heads = "variant,seed,micro_batch_size,nll,entropy,grad_norm"
    (tmp_path / "signs.csv").write_text("\n".join([heads, *rows]))
    monkeypatch.setattr(tables, "claim_path", lambda name: tmp_path)
    assert check.signs()[-1] == "| `a` | 2.0000 | +2.0000 ± 1.0000 | 5e-01 |"


def test_variants_are_compared_seed_by_seed(monkeypatch):
    """At the end 1, 2 and 3 more than the others of the same seeds, on average 0, 0.5 and 1. A fourth has no other."""
    name, variant, base = "grpo-sums", "ours", "theirs"
    monkeypatch.setattr(CLAIMS[name], "pairs", {variant: base})
    ends = {base: [10, 30, 20], variant: [11, 32, 23, 50]}
    found = {}
    runs = []
    for who, values in ends.items():
        found[who] = {}
        for seed, end in enumerate(values, 1):
            first = 1 if who == base else 0
            found[who][seed] = [{"step": 0, "eval/accuracy": first}, {"step": 5, "eval/accuracy": end}]
            runs.append({"variant": who, "seed": str(seed), "tokens": "0.5", "seconds": str(end)})
    monkeypatch.setattr(tables, "curves", lambda name: found)
    monkeypatch.setattr(tables, "stored_runs", lambda name: runs)
    values = paired.measures(name)
    assert paired.differences(values["level"], variant, base) == [1, 2, 3]
    assert paired.differences(values["area"], variant, base) == [0, 0.5, 1]
    close, independent = paired.spreads(values["level"], variant, base)
    assert close == pytest.approx(1) and independent == pytest.approx(math.hypot(10, stdev([11, 32, 23])))
    row = paired.table(name)[-3]
    assert row.startswith(f"| `{variant}` | `{base}` | +2.000 ± 2.484 | +0.500 ± 1.242 | +0.000 ± 0.000 | +2.0 ± 2.5 |")
    assert row.endswith(f"| 1.0000, {independent:.4f} | 0.5000, {independent / 2:.4f} |")


def test_a_steady_loss_is_seen_and_noise_is_not(tmp_path):
    """Seeds differ by 0.3 among themselves, the commits by 0.02 in each seed."""
    starts = [0.5, 0.6, 0.7, 0.8]

    def runs(name, drops, seconds):
        ends = [start - drop for start, drop in zip(starts, drops, strict=True)]
        return [fake_run(tmp_path / f"{name}{i}", [0.1, end], seconds) for i, end in enumerate(ends)]

    old = runs("old", [0, 0, 0, 0], seconds=7)
    worse = runs("worse", [0.02, 0.021, 0.019, 0.02], seconds=7)
    lines, differs = regression.report(old, worse, "eval/optimality")
    assert differs
    assert lines[2].split(" | ")[-1] == "lower |" and "-0.0200" in lines[2]
    noisy = runs("noisy", [-0.03, 0.02, -0.01, 0.02], seconds=5)
    lines, differs = regression.report(old, noisy, "eval/optimality")
    assert not differs
    assert "no difference is shown" in lines[2]
    assert "lower" in lines[5]  # the seconds, which do not count as a difference
    assert regression.equal_records(old, noisy) == 0
    assert regression.equal_records(old, old) == 4


FAKE = """
import pathlib, sys
start, *_, run = map(pathlib.Path, sys.argv[1:])
run.mkdir(parents=True)
(run / "words").write_text(" ".join(sys.argv[2:-1]))
first = '{"step": 0, "loss": 0.5}\\n' if start.name == "none" else (start / "metrics.jsonl").read_text()
(run / "metrics.jsonl").write_text(first)
"""


def test_the_first_steps_of_two_commits(tmp_path, monkeypatch):
    """Both start from what the newer one has made, in float64, and each plants the bug of a variant in itself. A run
    that is too short is an error."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        (folder / "planted").mkdir(parents=True)
        for script in ("fake.py", "planted/planted.py"):
            (folder / script).write_text(FAKE)
    copy, base, run = "runs/planted/x-3", "runs/curves/x/base-seed1", "runs/curves/x/default-seed1"
    started = [f"python planted/planted.py none --copy {copy}", f"python fake.py none --run-dir {base}"]
    started += [f"python fake.py {base} {copy}/ --run-dir {run}"]
    monkeypatch.setattr(regression, "commands", lambda *_: started)
    monkeypatch.setattr(regression, "SAME", tmp_path / "same.csv")
    (tmp_path / "same.csv").write_text("claim,variant,old,new,records,difference,metric\nsums,ppo,a,b,3,0,x\n")
    regression.store_first("x", "default", folders, 1)
    other, row = tables.read_csv(tmp_path / "same.csv")
    assert (row["old"], row["new"], row["records"], row["difference"]) == ("old", "new", "1", "0.0e+00")
    assert other["variant"] == "ppo"
    command = "python fake.py none --eval-every 5 --lr 1 --run-dir old"
    regression.first_records(folders[0], command, 1, tmp_path / "r")
    flags = "--lr 1 --dtype float64 --mixed-precision no --eval-every 0 --save-every 0 --run-dir"
    assert (tmp_path / "r/words").read_text() == flags
    with pytest.raises(SystemExit, match="0 records of true"):
        regression.first_records(ROOT, "true", 2, tmp_path / "none")
    assert (folders[1] / base).exists() and not (folders[0] / base).exists()
    assert (folders[1] / copy).exists() and (folders[0] / copy).exists()


def test_only_changed_code_makes_a_run_dirty():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    script = subprocess.run(["git", "show", "HEAD:algos/sft.py"], cwd=ROOT, capture_output=True).stdout
    env = {"commit": f"{head}-dirty", "algo": "sft"}
    same = {"script": hashlib.sha256(script).hexdigest(), "model": "anything"}
    other = {"script": hashlib.sha256(script + b"\n").hexdigest()}
    assert check.commit_of(env | {"files": same}) == head
    assert check.commit_of(env | {"files": other}) == f"{head}-dirty"


def test_a_comparison_runs_what_the_variant_needs():
    for claim, variant, *others in (
        ("chain-randomwalks", "ppo", "../sft-randomwalks/default", "reward"),
        ("overoptimisation-randomwalks", "pairs-100-kl-0.05", "reward-100"),
    ):
        found = regression.needed(seeds.commands(claim, 2, []), f"runs/curves/{claim}/{variant}-seed2")
        made = [(seeds.run_dirs_of(command) or command.split()[-1:])[0] for command in found]
        assert made == [os.path.normpath(f"runs/curves/{claim}/{name}-seed2") for name in (*others, variant)]
    *_, planting, run = regression.needed(seeds.commands("pitfalls", 2, []), "runs/curves/pitfalls/drifting-seed2")
    copy = planting.split()[-1]
    assert " --bugs 22 " in planting and run.startswith(f"python {copy}/algos/grpo.py ")


def test_commands_of_a_tree_without_git(monkeypatch):
    known = {claim: len(seeds.commands(claim, 2, [])) for claim in CLAIMS}
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert {claim: len(seeds.commands(claim, 2, [])) for claim in CLAIMS} == known
