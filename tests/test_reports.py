"""What runs write and print, by tables with a row a script: `python -m pytest tests/test_reports.py`"""

import importlib
import json
import os
import pty
import re
import sys
import textwrap
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator, tracking
from harness import ALGOS, ROOT, flags, launch, lines
from helpers import TEMPLATE, add_specials, log, recorded, samples, save, user, weights
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image
from test_models import short_sft
from transformers import GenerationMixin

from algos import dpo
from benchmarks.tables import by_step
from common import report
from common import run as run_module
from common.cli import parse
from common.identity import VERSION, environment
from common.lm import load
from common.lm.tokens import encode_prompts

each_script = pytest.mark.parametrize("algo", ALGOS)
PAIRS = "rewards/chosen rewards/rejected rewards/margins rewards/accuracies"
EVALUATED = {  # metrics of an evaluation, behind eval/
    **dict.fromkeys(("ppo", "grpo"), "vowels reward"),
    "ilql": "vowels@beta=0 vowels@beta=4 loss loss_q loss_v loss_cql loss_awac",
    "sft": "vowels loss perplexity accuracy",
    "reward": "loss accuracy shorter_wins margin score_mean score_std",
    "dpo": f"vowels loss {PAIRS} logps/chosen logps/rejected",
    "ddpo": "reward red reward_std diversity",
}
PERF = {  # beside perf/seconds_update and perf/peak_memory_mb
    **dict.fromkeys(("ppo", "grpo"), "seconds_rollout tokens_per_sec episodes_per_sec"),
    **dict.fromkeys(("ilql", "sft"), "tokens_per_sec"),
    **dict.fromkeys(("reward", "dpo"), "tokens_per_sec pairs_per_sec"),
    "ddpo": "seconds_rollout seconds_reward images_per_sec",
}
COLUMNS = {  # of samples.jsonl, behind the step
    **dict.fromkeys(("ppo", "grpo"), "prompt output vowels reward"),
    "ilql": "beta prompt output vowels",
    "sft": "prompt output vowels",
    "reward": "prompt chosen rejected chosen_score rejected_score",
    "dpo": "prompt output vowels reference",
    "ddpo": "prompt reward red",
}
SHOWN = {  # on the card and in the status line, the headline first
    "ppo": "eval/reward objective/scores objective/kl loss/value val/explained_variance tokens/truncated_rate",
    "grpo": """eval/reward objective/scores groups/equal tokens/responses_len tokens/truncated_rate
        optim/grad_norm""",
    "ilql": "eval/vowels@beta=0 losses/loss losses/loss_q losses/loss_v",
    "sft": "eval/loss train/loss optim/grad_norm",
    "reward": "eval/accuracy train/loss rewards/accuracies rewards/margins",
    "dpo": "eval/vowels eval/rewards/accuracies train/loss rewards/accuracies rewards/margins",
    "ddpo": "eval/reward objective/scores objective/scores_std policy/approxkl policy/clipfrac",
}
ITERATIONS = """reference the model at the start data 7 prompts; tokens: median 2, longest 3; first: 'b'
iterations 6, each of {} steps 4 per iteration, each of 4 episodes: 4 per process, 8 of the longest at once"""
SUMMARY = {  # parts of it, in their order, behind its first lines, which are the same for all
    "ppo": ITERATIONS.format("8 episodes"),
    "grpo": ITERATIONS.format("4 groups of 2 episodes"),
    "ilql": """actions per row: 3 to 10, median 9; return 0.2754 +- 0.3122, scaled to 0 +- 1
--eval-dataset: 7 rows, ... tokens per row: median 10, longest 11, at most 32
first row [s]da<eos> [not actions]; its return, as used: 1.253
targets move 94% of the way to Q
steps 12 of 8 rows, 8 per forward pass""",
    "sft": """data 23 rows, ... tokens per row: median 10, longest 11, at most 32
first row [s]da<eos> [without loss]
steps 12 of 8 rows, 8 per forward pass
samples of 5 prompts at each evaluation""",
    "reward": """head new data 22 pairs, ... tokens of the longer text: median 11, longest 11, at most 32
first pair 's' | chosen: 'da' | rejected: 'busuidtkb'
steps 12 of 8 pairs, 8 per forward pass""",
    "dpo": """loss sigmoid, beta 0.1, label smoothing 0, SFT coefficient 0
reference the model at the start data 22 pairs; ... tokens of the longer text: median 11, longest 11, at most 32
first pair ['s'] | chosen: 'da<eos>' | rejected: 'busuidtkb<eos>'
steps 12 of 8 pairs, 8 per forward pass
samples of 5 prompts at each evaluation""",
    "ddpo": """data 3 prompts, 3 to evaluate; first: 'a red circle'
epochs 6, each with 4 images of 2 steps, 2 of them with noise, then optimizer steps: 2 of 2 images x 2 steps,
4 pairs per process, 8 per forward pass""",
}
SIZES = {
    "ppo": "4,813 parameters, 4,813 trained",
    "ilql": "8,561 parameters, 6,687 trained",
    "reward": "4,488 parameters, 4,488 trained",
    "ddpo": "46,481 parameters, 46,481 trained",
    **dict.fromkeys(("grpo", "sft", "dpo"), "4,476 parameters, 4,476 trained"),
}
TYPES = "float32 weights, no autocast, cpu, processes: 1, threads of each: 1"
# Iterations, their optimizer steps, and after how many steps a run of the harness evaluates; rows that it samples from.
LENGTH = {"ppo": (6, 4, 8), "grpo": (6, 4, 8), "ddpo": (6, 2, 4)}
SAMPLED = {"ddpo": "captions", "reward": "held_out_pairs"}
TWO_SETS = {  # files of evaluation rows, other flags
    **dict.fromkeys(("ppo", "grpo"), ("eval prompts", "--total-episodes 24")),
    "ilql": ("held_out_rewarded rewarded", "--total-steps 6 --eval-prompts None"),
    "sft": ("held_out rows", "--total-steps 6 --eval-prompts None"),
    "reward": ("held_out_pairs pairs", "--total-steps 6"),
    "dpo": ("held_out_pairs pairs", "--total-steps 6 --eval-prompts None --metric None"),
    "ddpo": ("captions eval", "--num-epochs 4"),
}


def quality(algo, record, prefix="eval/"):
    """Of what the best model has most."""
    if algo == "ilql":
        return max(record["eval/vowels@beta=0"], record["eval/vowels@beta=4"])
    if algo == "sft":
        return -record[f"{prefix}loss"]
    name = {"reward": "accuracy", "dpo": "vowels" if prefix == "eval/" else "rewards/accuracies"}.get(algo, "reward")
    return record[prefix + name]


@pytest.fixture
def typed(work, tmp_path, monkeypatch):
    """typed(algo, words, folder) -> what main returns, in this process and an empty directory; `run` is its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(algo, words, *more):
        module = importlib.import_module(f"algos.{algo}")
        return module.main(parse([*flags(work, algo), *words.split(), *map(str, more)], module.Args))

    return run


def means(algo, rows):
    """{metric: its value by the rows of samples.jsonl}."""
    if algo == "ilql":
        vowels = [row["vowels"] for row in rows]  # of the betas in turn
        return {"vowels@beta=0": fmean(vowels[::2]), "vowels@beta=4": fmean(vowels[1::2])}
    if algo == "reward":
        margins = [row["chosen_score"] - row["rejected_score"] for row in rows]
        return {"accuracy": fmean(margin > 0 for margin in margins), "margin": fmean(margins)}
    return {name: fmean(row[name] for row in rows) for name in {"vowels", "reward", "red"} & rows[0].keys()}


def test_the_lowest_error_rate_is_the_best(gpt2_dir, tmp_path, capsys):
    rates = [0.5, 0.2, 0.4, 0.9]
    flags = {"eval_dataset": None, "eval_prompts": [{"prompt": "a"}] * 2, "lower_is_better": True}
    flags |= {"metric": lambda outputs: {"wer": [rates.pop(0)] * len(outputs)}}
    _, run_dir = short_sft(gpt2_dir, tmp_path / "run", eval_every=1, max_new_tokens=4, **flags)
    state = json.loads((max((run_dir / "checkpoints").iterdir()) / "state.json").read_text())
    assert (state["best_step"], state["best_score"]) == (1, -0.2)
    assert "eval/wer 0.5 -> 0.9" in (said := capsys.readouterr().out) and "; lower is better\n" in said


@each_script
def test_names_of_metrics(algo, whole):
    iterations, stride, every = LENGTH.get(algo, (12, 1, 4))
    folder, _ = whole(algo)
    records = log(folder)
    steps = [stride * i for i in range(iterations + 1)]
    assert [record["step"] for record in records] == steps
    evaluated = {f"eval/{name}" for name in EVALUATED[algo].split()}
    trained = lines(ROOT / f"tests/golden/{algo}.jsonl")[0].keys()  # those of the stored traces
    for record in records:
        expected = {"step"} | (trained if record["step"] else set())
        if record["step"] % every == 0:
            expected |= evaluated
        assert record.keys() == expected
        assert all(isinstance(value, int | float) for value in record.values())
    perf = by_step(lines(folder / "perf.jsonl"))
    assert [record["step"] for record in perf] == steps[1:]
    names = {f"perf/{name}" for name in (PERF[algo] + " seconds_update peak_memory_mb").split()}
    for record in perf:
        expected = names | ({"perf/seconds_eval"} if record["step"] % every == 0 else set())
        assert record.keys() == {"step", "time", *expected} and all(record[name] > 0 for name in expected)
    told = {}
    for names, scripts in re.findall(r"(?m)^\| (`[^|]+`) \| ([\w ]+) \|", (ROOT / "algos/README.md").read_text()):
        told |= dict.fromkeys(names.strip("`").split("`, `"), scripts)
    for name in {*trained, *perf[-1]} - {"time"}:
        assert {"all", algo} & {*told.get(name, "").split()}, f"the guide lacks {name}"


def test_seconds_of_an_evaluation_count_in_no_rate(gpt2_dir, tmp_path):
    """Here half a second, of which the update knows nothing."""

    def slow(outputs, **columns):
        time.sleep(0.5)
        return {"length": [len(output) for output in outputs]}

    rows = [{"prompt": letter, "completion": letter * 3} for letter in "abcd"]
    flags = {"dataset": rows, "eval_dataset": rows, "total_steps": 4, "max_new_tokens": 3, "metric": slow}
    _, folder = short_sft(gpt2_dir, tmp_path / "run", **flags)
    perf = by_step(lines(folder / "perf.jsonl"))
    assert [record.get("perf/seconds_eval", 0) > 0.5 for record in perf] == [False, True, False, True]
    for record in perf:
        assert record["perf/tokens_per_sec"] == pytest.approx(4 * 5 / record["perf/seconds_update"])


@each_script
def test_samples(algo, whole, work):
    """All prompts at every evaluation, in order; the metrics are the means of their columns."""
    folder, _ = whole(algo)
    found = samples(folder)
    assert all([*sample] == ["step", *COLUMNS[algo].split()] for sample in found)
    prompts = [row["prompt"] for row in lines(work / f"{SAMPLED.get(algo, 'eval')}.jsonl")]
    if algo == "ilql":
        prompts = [prompts[place // 2] for place in range(2 * len(prompts))]  # for two betas
    evaluations = [r for r in log(folder) if any(name.startswith("eval/") for name in r)]
    assert len(evaluations) == 4 and len(found) == 4 * len(prompts)
    for record in evaluations:
        rows = [sample for sample in found if sample["step"] == record["step"]]
        assert [row["prompt"] for row in rows] == prompts
        for name, value in means(algo, rows).items():
            assert record[f"eval/{name}"] == pytest.approx(value, rel=1e-9), name
        if algo == "ddpo":
            assert record["eval/reward_std"] == pytest.approx(pstdev(row["reward"] for row in rows))


@each_script
def test_best_and_last_model(algo, whole):
    """Each is what the checkpoint of its step holds; the best one is kept beside the newest two."""
    folder, _ = whole(algo)
    _, stride, every = LENGTH.get(algo, (12, 1, 4))
    scores = {r["step"]: quality(algo, r) for r in log(folder)[1:] if r["step"] % every == 0}
    best = max(scores, key=scores.get)  # the first of equals
    last = max(scores)
    checkpoints = {int(path.name[5:]) for path in (folder / "checkpoints").iterdir()}
    assert checkpoints == {best, last - max(2, stride), last}
    state = json.loads((folder / f"checkpoints/step_{last:08d}/state.json").read_text())
    assert (state["best_step"], state["best_score"]) == (best, scores[best])
    exports = {"hf_model": last, "hf_model_best": best}
    assert {path.name for path in folder.glob("hf_model*")} == exports.keys()
    for name, step in exports.items():
        saved = weights(folder / f"checkpoints/step_{step:08d}")
        exported = weights(folder / name / "unet") if algo == "ddpo" else weights(folder / name)
        assert len(exported) > 20
        for key, weight in exported.items():
            key = key.partition(".")[2]  # behind the name of the file
            (found,) = [value for path, value in saved.items() if path.endswith(f".{key}")]
            assert torch.equal(weight, found), key


@each_script
def test_what_a_run_leaves_and_prints(algo, whole):
    folder, process = whole(algo)
    names = "README.md checkpoints config.yaml curve.png env.json hf_model metrics.jsonl perf.jsonl samples.jsonl"
    expected = {".lock", *names.split()} | ({"images"} if algo == "ddpo" else set())
    expected |= {"rollouts.jsonl"} if algo in ("ppo", "grpo") else set()
    assert {path.name for path in folder.iterdir()} == expected | {"hf_model_best"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    env = json.loads((folder / "env.json").read_text())
    records = log(folder)
    names = SHOWN[algo].split()
    if algo == "ilql" and records[-1]["eval/vowels@beta=4"] > records[-1][names[0]]:
        names[0] = "eval/vowels@beta=4"  # the best beta of the last evaluation

    # the card, whose lines of use the last lines are
    card = (folder / "README.md").read_text()
    usage = re.search("```python\n(.*?)\n```", card, re.S)[1]
    assert card == report.model_card(env, names, records, samples(folder), usage)
    assert env["versions"]["plainrl"] == VERSION and f"; plainrl {VERSION}, python 3." in card
    values = [record[names[0]] for record in records if names[0] in record]
    curve = f"\n\n{names[0]} {values[0]:.3g} -> {values[-1]:.3g}"
    places = f"card: {folder}/README.md\npicture: {folder}/curve.png\nmodel: {folder}/hf_model\n"
    assert curve in process.out and process.out.endswith(f"\n\n{usage}\n\n{places}") and process.err == ""

    # the first lines, and the status
    printed = " ".join(process.out.split())  # the table breaks lines between words
    assert printed.startswith(f"{algo} {SIZES[algo]}; {TYPES} flags --")
    assert " --warmup-steps 3, " in printed
    for part in f"{SUMMARY[algo]} samples at step 0 ".split("..."):
        _, found, printed = printed.partition(" ".join(part.split()))
        assert found, part
    status = []
    for name in names[algo in ("ilql", "dpo") :]:
        label = name.partition("/")[2]
        if name.startswith("eval/"):  # sft.py and others have a loss of training, too
            label = f"eval {label}"
        status.append(f"{label} {records[-1][name]:.3g}")
    step = records[-1]["step"]
    assert f"\n{step}/{step} | {' | '.join(status)} | " in process.out


def test_what_the_last_line_says():
    """Rows are compared with themselves: changes 1, 1, 0, 0, 0 have the mean 0.4 and the standard error 0.245."""

    def said(*changes, name="eval/reward", **more):
        rows = []
        for step, share in ((0, 0), (3, 99), (9, 1)):
            for value, change in zip((0.0, 3.0, -1.0, 0.5, 7.0), changes, strict=True):
                rows.append({"step": step, "reward": value + share * change, **more})
        records = [{"step": 0, name: 1.9}, {"step": 3, name: None}, {"step": 9, name: 1.9 + fmean(changes)}]
        return report.change_of(records, rows, name)

    noise = "eval/reward 1.9 -> 2.3 (no change: within twice its standard error, 0.24)"
    assert said(1, 1, 0, 0, 0) == noise
    assert said(0, 0, 0, 0, 0) == "eval/reward 1.9 -> 1.9"
    assert said(1, 1, 1, 0, 0) == "eval/reward 1.9 -> 2.5 (standard error of the change: 0.24)"
    assert said(-1, -1, -1, 0, 0) == "eval/reward 1.9 -> 1.3 (standard error of the change: 0.24)"
    assert said(1, 1, 0, 0, 0, name="eval/x/reward", set="x") == noise.replace("eval/", "eval/x/")
    assert said(1, 1, 0, 0, 0, name="eval/y/reward", set="x") == "eval/y/reward 1.9 -> 2.3"  # of this set: no rows
    assert said(1, 1, 0, 0, 0, name="train/reward") == "train/reward 1.9 -> 2.3"  # of other rows
    assert report.change_of([{"step": 0}], [], "eval/loss") == ""


USED = {  # what the lines of use print; ppo.py, grpo.py and dpo.py write those of sft.py
    "sft": r"\[\{'generated_text': '[bs]",
    "reward": r"\[\{'label': 'LABEL_0', 'score': -?\d",
    "ilql": "s[a-u]?",
    "ddpo": "",
}


@pytest.mark.parametrize("algo", USED)
def test_the_lines_of_use_run(algo, whole, scripts, work):
    folder, _ = whole(algo)
    usage = re.search("```python\n(.*?)\n```", (folder / "README.md").read_text(), re.S)[1]
    (work / f"use_{algo}.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{usage}\n")
    process = scripts.run([work / f"use_{algo}.py"], work)
    assert re.match(USED[algo], process.out) and not re.search("safety|not expected|newly init", process.err)
    if algo == "ddpo":
        assert Image.open(work / "sample.png").size == (24, 8)


@each_script
def test_check_is_one_iteration_and_writes_nothing(algo, typed, capsys):
    assert typed(algo, "--check --micro-batch-size 3") == ({}, None)
    out = capsys.readouterr().out
    assert "--micro-batch-size" in out and "--mixed-precision" not in out  # what was given, and what was not
    assert "\nsamples at step 0 " in out and out.count("samples at step") == 1
    iterations, *_ = LENGTH.get(algo, (12, 1, 4))
    told = r"\none iteration: (.*update \S+) s; peak memory [\d,]+ MB\n"
    told += rf"the whole run \(iterations: {iterations}\): 0:00:(\d\d), "
    one, whole = re.search(rf"{told}without evaluations\ncheck passed\n$", out).groups()
    assert int(whole) == pytest.approx(iterations * sum(map(float, re.findall(r"\d\.\d+", one))), abs=0.8)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("words", ["", "--precompute-ref"])
def test_check_of_dpo_compares_with_the_model_as_it_was(monkeypatch, typed, words):
    """In both steps, of which the second one finds a changed model; both have the longest pairs."""
    assert dpo.longest_rows([3, 9, 5], 4) == [1, 2, 0, 1]
    calls = recorded(monkeypatch, dpo, "pair_losses")
    asked = recorded(monkeypatch, dpo.Reference, "__call__")
    typed("dpo", f"{words} --check --batch-size 2 --eval-dataset None --metric None --eval-prompts None")
    (first, *_), (second, *_) = [args for args, _ in calls]
    assert (second - first).abs().min() > 1e-6 and len(asked) == 2
    assert all((found - first).abs().max() < 1e-5 for _, found in asked)


@each_script
def test_two_evaluation_sets(algo, typed, work):
    """Metrics and samples name the set; the first one chooses the best model."""
    names, words = TWO_SETS[algo]
    first, second = names.split()
    files = f"{work}/{first}.jsonl,{work}/{second}.jsonl"
    _, folder = typed(algo, f"{words} --run-dir run --eval-dataset", files)
    records = [r for r in log(folder) if any(name.startswith("eval/") for name in r)]
    whole = {name for name in EVALUATED[algo].split() if "vowels" in name and algo in ("ilql", "sft")}  # of the prompts
    of_a_set = {name for name in EVALUATED[algo].split() if "vowels" not in name or algo in ("ppo", "grpo")}
    expected = {f"eval/{name}" for name in whole}
    expected |= {f"eval/{place}/{name}" for place, name in product((first, second), of_a_set)}
    assert len(records) > 2
    assert all({name for name in record if name.startswith("eval/")} == expected for record in records)
    scores = [quality(algo, record, f"eval/{first}/") for record in records[1:]]
    last = max((folder / "checkpoints").iterdir())
    assert json.loads((last / "state.json").read_text())["best_score"] == max(scores)
    if algo not in ("ilql", "sft", "dpo"):
        found = [(row["set"], row["prompt"]) for row in samples(folder, step=0)]
        prompts = {name: [row["prompt"] for row in lines(work / f"{name}.jsonl")] for name in (first, second)}
        assert found == [*product([first], prompts[first]), *product([second], prompts[second])]


@each_script
def test_evaluations_change_nothing_of_the_training(algo, typed, whole):
    """With --eval-every 0 there are none of them: metrics and model are those of the run that has them."""
    metrics, folder = typed(algo, "--eval-every 0 --save-every 0 --run-dir run")
    records = log(whole(algo)[0])
    expected = [{k: v for k, v in record.items() if not k.startswith("eval/")} for record in records[1:]]
    assert log(folder) == expected and metrics == expected[-1]
    model = "hf_model/unet/diffusion_pytorch_model.safetensors" if algo == "ddpo" else "hf_model/model.safetensors"
    assert (folder / model).read_bytes() == (whole(algo)[0] / model).read_bytes()
    assert not (folder / "hf_model_best").exists() and not (folder / "samples.jsonl").exists()
    headline = "rewards/accuracies" if algo in ("reward", "dpo") else SHOWN[algo].split()[1]
    assert f"\n\n- `{headline}`: " in (folder / "README.md").read_text()


@pytest.mark.parametrize("algo", ["sft", "dpo"])
def test_samples_without_a_metric(algo, typed, capsys):
    """Of --eval-prompts: shown, and in no metric. They choose no best model."""
    metrics, folder = typed(algo, "--metric None --eval-dataset None --total-steps 2 --eval-every 2 --run-dir run")
    found = samples(folder)
    assert [row["step"] for row in found] == [0] * 5 + [2] * 5
    columns = [name for name in COLUMNS[algo].split() if name != "vowels"]
    assert all([*row] == ["step", *columns] for row in found) and any(row["output"] for row in found)
    assert not any(name.startswith("eval/") for name in metrics) and not (folder / "hf_model_best").exists()
    assert "samples at step 2 " in capsys.readouterr().out


def test_the_reference_of_dpo_in_samples_and_metric(whole, typed, monkeypatch):
    """Its responses stand beside those of the policy, and reach --metric as a column, for rates of wins."""
    found = samples(whole("dpo")[0])
    references = [row["output"] for row in found[:5]]
    assert [row["reference"] for row in found] == references * 4
    assert [row["output"] for row in found[-5:]] != references
    calls = []

    def beats(outputs, ref_output, **columns):
        calls.append(ref_output)
        return {"longer": [float(len(output)) for output in outputs]}

    monkeypatch.setattr("common.rows.load_function", lambda spec, flag: spec and beats)
    typed("dpo", "--total-steps 1 --run-dir run --reference-free")
    assert calls == [references] * 2


def test_a_tracker_gets_metrics_samples_and_images(typed, work, monkeypatch):
    """The images of an evaluation are the files of the run, one for each set."""
    tracker = Mock()
    tracker.name = "wandb"
    monkeypatch.setattr(tracking, "filter_trackers", lambda names, folder: names)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, *args: self.trackers.append(tracker))
    words = "--metric None --run-dir run --num-epochs 3 --track wandb --eval-dataset"
    _, folder = typed("ddpo", words, f"{work}/captions.jsonl,{work}/eval.jsonl")

    def got(method):
        """[(step, what it was)] of the calls of a method."""
        return [(call.kwargs["step"], call.args[0]) for call in getattr(tracker, method).call_args_list]

    records = log(folder)
    logged = by_step({"step": step, **values} for step, values in got("log"))
    assert [values["step"] for values in logged] == [record["step"] for record in records] == [0, 2, 4, 6]
    for record, values in zip(records, logged, strict=True):
        assert record.items() <= values.items() and ("perf/images_per_sec" in values) == (values["step"] > 0)
    assert [step for step, _ in got("log_table")] == [0, 4, 6]  # which test_runs.py reads in wandb
    images = got("log_images")
    for (at, shown), (step, name) in zip(images, product((0, 4, 6), ("captions", "eval")), strict=True):
        sheet = np.asarray(Image.open(folder / f"images/step_{step:08d}_{name}.png"))
        assert at == step and np.array_equal(shown[f"eval/images_{name}"], sheet[None])


def in_terminal(shell, cwd):
    """What a command writes to a terminal of 50 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe("sh", ["sh", "-c", shell], os.environ | {"TERM": "xterm", "COLUMNS": "50"})
    written = b""
    with suppress(OSError):  # the other side is closed
        while piece := os.read(terminal, 65536):
            written += piece
    os.close(terminal)
    os.waitpid(pid, 0)
    return written.decode()


DRAWN = """import sys
sys.path.insert(0, {root!r})
from common.report import screen
screen.start()
screen.headline = "3/8"
screen.show("sampling", 8)
screen.advance(2)
screen.progress and screen.progress.refresh()
screen.say("words " * 20 + "[red]\\x1b[")
print("of a reward")
screen.show("saving")
screen.stop()
print("end")
"""


def test_the_line_is_drawn_where_all_output_goes_to_a_terminal(tmp_path):
    """Else not a byte more is written. Texts stand above it as they are."""
    (tmp_path / "shown.py").write_text(DRAWN.format(root=str(ROOT)))
    piped = in_terminal(f"{sys.executable} shown.py | cat", tmp_path)
    drawn = in_terminal(f"{sys.executable} shown.py", tmp_path)
    said = "words " * 20 + "[red]\\x1b[\r\n"
    assert piped == f"{said}of a reward\r\nend\r\n"  # `| tee log` would print into the line
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", drawn)
    assert said in plain and "\rof a reward\r\n" in plain and plain.endswith("end\r\n")
    assert "3/8 | sampling" in plain and "2/8" in plain
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is there


def test_a_table_loses_no_letter(monkeypatch):
    """Also of words that are wider than a column, as those of chats are. It breaks between others."""
    monkeypatch.setenv("COLUMNS", "80")
    chat = "<|im_start|>user\\nWhat is 46 + 3?<|im_end|>\\n<|im_start|>assistant\\n"
    row = {"prompt": chat, "output": "4" * 90, "right": 0.5, "length": 17.0, "format": 1.0, "reward": 0.123456}
    lines_of_row = report.table_of([row]).splitlines()[3:]
    width = lines_of_row[0].index("4")  # where the second column begins
    assert "".join(line[:width].strip() for line in lines_of_row).replace(" ", "") == chat.replace(" ", "")
    assert "".join(lines_of_row).count("4") == 90 + 1 and max(map(len, lines_of_row)) <= 80
    assert lines_of_row[0].split()[-4:] == ["0.5", "17", "1", "0.123"]
    words = "several words that need more than a line"
    assert {*words.split()} <= {*report.table_of([{"prompt": words, "output": "z" * 300}], width=40).split()}


def test_the_time_left_is_of_iterations(monkeypatch, capsys):
    """Here loading and the first evaluation take 100 s, the first iteration 50 s and the others 10 s each."""
    clock = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_module, "seed_libraries", lambda seed: None)
    run = run_module.Run.__new__(run_module.Run)
    run.args = SimpleNamespace(check=False, seed=1)
    run.kept = SimpleNamespace(iteration=3)  # it continues
    run.__dict__ |= {"main": True, "first_step": 6, "num_iterations": 8, "steps_per_iteration": 2, "total_steps": 16}
    run.__dict__ |= {"shown": [], "logged": {}, "dir": None}
    clock[0] += 100
    for iteration in run.iterations():
        clock[0] += 50 if iteration == 4 else 10
        run.save(run.step, None)
    assert re.findall(r"eta (\S+)", capsys.readouterr().out) == ["0:03:20", "0:01:30", "0:00:47", "0:00:20", "0:00:00"]


@pytest.mark.parametrize(("algo", "word"), [("sft", "--max-length=16"), ("ddpo", "--num-inference-steps=2")])
def test_libraries_are_silent(algo, word, work, tmp_path):
    """Nothing on stderr, where warnings of parts that nothing here uses look like a broken installation."""
    argv = [ROOT / f"algos/{algo}.py", *flags(work, algo), word, "--check", "--lora-r=2"]
    done = launch([sys.executable], argv, tmp_path, work)
    assert (done.returncode, done.stderr) == (0, "") and "check passed" in done.stdout


PPO = [
    {"step": 0, "eval/reward": 0.25, "eval/vowels": 1.0},
    {"step": 4, "objective/scores": 0.3, "objective/kl": 0.0, "loss/policy": -0.1, "optim/lr": 0.5},
    {"step": 8, "objective/scores": None, "objective/kl": 1.0, "loss/policy": -0.2, "eval/reward": 0.5},
    {"step": 12, "objective/scores": 0.6, "objective/kl": 2.0, "loss/policy": -0.3, "eval/reward": 0.75},
]
IN_STATUS = ["objective/scores", "objective/kl", "loss/policy", "loss/absent"]


def test_panels_of_a_run(monkeypatch, tmp_path):
    """The headline, the metrics of the status line, then those of --metric; what is not finite is left out."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    title = "ppo-0123abcd: $x_" + "a/" * 99
    report.draw_curves(PPO, ["eval/reward", *IN_STATUS], title, tmp_path / "curve.png")
    [figure] = figures
    assert figure.get_suptitle() == title[:80]
    assert all(float(tick).is_integer() for panel in figure.axes for tick in panel.get_xticks())
    assert [panel.get_ylabel() for panel in figure.axes] == ["reward", "scores", "kl", "policy", "vowels"]
    [[reward], [scores], *_] = [panel.get_lines() for panel in figure.axes]
    assert (reward.get_label(), scores.get_label()) == ("eval/reward", "objective/scores")
    assert reward.get_xydata().tolist() == [[0, 0.25], [8, 0.5], [12, 0.75]]
    assert scores.get_xydata().tolist() == [[4, 0.3], [12, 0.6]]


ENV = {
    "algo": "ppo", "command": "python algos/ppo.py --lr 1e-5", "processes": 1, "commit": "abc", "device": "a CPU",
    "flags": {"model": "my/model", "reward": "length", "dataset": "rows"},
    "versions": {"python": "3.11.7", "torch": "2.11.0"},
}  # fmt: skip
SAMPLES = [
    {"step": step, "prompt": prompt, "output": f"{prompt}{step}", "vowels": i, "reward": i + step / 3}
    for step, (i, prompt) in product((0, 8, 12), enumerate("aabcd"))
]
CARD = """# my/model trained by ppo.py on length

- `eval/reward`: 0.25 at step 0, **0.75** at step 12
- `objective/scores`: 0.3 at step 4, **0.6** at step 12
- `objective/kl`: 0 at step 4, **2** at step 12
- `loss/policy`: -0.1 at step 4, **-0.3** at step 12
- `optim/lr`: 0.5 at step 4, **0.5** at step 4

![learning curve](curve.png)
"""


def test_a_card(monkeypatch):
    names = ["eval/reward", *IN_STATUS, "eval/reward", "optim/lr"]
    newest = [SAMPLES[11], *SAMPLES[12:14]]  # one of each prompt
    table = textwrap.indent(report.table_of(newest, width=116), "    ")
    card = report.model_card(ENV, names, PPO, SAMPLES, usage="print(1)")
    parts = CARD, f"## Samples\n\n{table}\n", "## Use\n\n```python\nprint(1)\n```\n"
    parts += ("## Command\n\n```\npython algos/ppo.py --lr 1e-5\n```\n",)
    assert card == "\n".join([*parts, "Commit abc; python 3.11.7, torch 2.11.0; a CPU.\n"])
    assert max(map(len, card.splitlines())) <= 120
    one = report.model_card(ENV, names, PPO[1:2], [], usage="print(1)")
    assert "## Samples" not in one and "eval/reward" not in one  # which were not evaluated
    report.model_card(ENV, names, [], [], usage="print(1)")
    monkeypatch.setattr(sys, "argv", ["algos/ppo.py", "--run-dir", "a b"])
    for processes, launcher in ((1, "python"), (2, "torchrun --nproc_per_node 2")):
        found = environment(SimpleNamespace(num_processes=processes, device=torch.device("cpu")))
        assert found["command"] == f"{launcher} algos/ppo.py --run-dir 'a b'"


def test_samples_and_names_of_columns_are_no_markup():
    """What a model writes is shown as it is, but for the middle of long texts; control characters are written out."""
    text = report.table_of([{"acc[/x]": 1.0, "[bold]": 2.0, "\x1b]0;pwn\x07": 3.0}], width=116)
    assert "acc[/x]" in text and "[bold]" in text and "\x1b" not in text and "\\x1b]0;pwn\\x07" in text
    cells = [report.cell_text(value) for value in ("p" * 200, "p" * 150 + "q" * 51, " \n", None, "")]
    assert cells == ["p" * 200, "p" * 100 + " ... " + "p" * 49 + "q" * 51, " \\n", "not finite", ""]
    for text in "a|b", "``` x ```", "![](http://x/y.png)", "two\nlines\r\n", " a ", "\x1b[31m\ud800", "&amp;":
        shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
        sample = {"step": 4, "prompt": text, "output": text, "reward": 0.12345}
        card = report.model_card(ENV, [], [], [sample], usage="print(1)")
        (block,) = [token for token in MarkdownIt("commonmark").parse(card) if token.type == "code_block"]
        last = block.content.splitlines()[-1]
        assert last.count(shown) == 2 and last.split()[0] == "4" and last.split()[-1] == "0.123"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_lines_of_use_make_the_ids_of_training(adds_bos, letters, build_model, tmp_path, monkeypatch):
    """Of a chat whose template writes the beginning token: it stands there once."""
    letters.chat_template = TEMPLATE.replace("{{ eos_token }}", "")  # which a prompt for the pipeline would lose
    if adds_bos:
        add_specials(letters, "<bos> $A")
    lm = build_model("llama")
    save(tmp_path, lm, letters)
    _, (ids,) = encode_prompts([{"prompt": [user("bc")]}], letters, 3, 32, "--dataset")
    assert ids == letters.convert_tokens_to_ids(["<bos>", *"ubcs"])
    prompt, usage = load.lines_of_use(lm, letters, ids)
    assert ("add_special_tokens=False" in usage) == (not adds_bos)  # else the tokenizer writes it
    seen = []
    generate = GenerationMixin.generate

    def watched(model, input_ids, **options):
        seen.append(input_ids)
        return generate(model, input_ids, **options)

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    code = usage.format(folder=str(tmp_path), prompt=prompt, max_new_tokens=3)
    exec(code.replace("# model", "model").replace("your question", "bc"), {})
    assert [found.tolist() for found in seen] == [[ids]] * (1 if adds_bos else 2)  # the second from messages
    _, (plain,) = encode_prompts([{"prompt": "bc"}], letters, 3, 32, "--dataset")
    assert "messages" not in load.lines_of_use(lm, letters, plain)[1]
