"""The picture and the card of a run: `python -m pytest tests/test_card.py`

What is drawn is read from the figure that matplotlib gets; markdown is read by a parser of it.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import tracking
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

from algos import sft
from common import card, logging, trackers
from common.cli import InputError

PPO = [
    {"step": 0, "eval/reward": 0.25, "eval/vowels": 1.0},
    {"step": 4, "objective/scores": 0.3, "objective/scores_std": 0.1, "objective/kl": 0.0, "loss/policy": -0.1,
     "loss/value": 2.0, "tokens/responses_len": 7.0, "optim/lr": 0.5},
    {"step": 8, "objective/scores": None, "objective/scores_std": 0.3, "objective/kl": 1.0, "loss/policy": -0.2,
     "loss/value": 1.0, "tokens/responses_len": 6.0, "optim/lr": 0.25, "eval/reward": 0.5, "eval/vowels": 2.0},
    {"step": 12, "objective/scores": 0.6, "objective/scores_std": 0.2, "objective/kl": 2.0, "loss/policy": -0.3,
     "loss/value": 0.5, "tokens/responses_len": 5.0, "optim/lr": 0.0, "eval/reward": 0.75, "eval/vowels": 4.0},
]  # fmt: skip


# ---- Picture ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(records, headline, title) -> the figure as it is saved."""
    figures = []

    def keep(figure, file, **options):
        figures.append(figure)
        Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(records, headline, title="run: model"):
        card.draw_curves(records, headline, title, tmp_path / "curve.png")
        return figures[-1]

    return draw


def panels(figure):
    """{label: {metric: line}} of a figure."""
    found = {}
    for axes in figure.axes:
        if axes.axison:
            found[axes.get_ylabel()] = {line.get_label(): line for line in axes.get_lines()}
    return found


def points(line):
    return [(int(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_panels_of_a_run(drawn):
    """The headline first; every logged step; evaluations are marked; what is not finite is left out."""
    figure = drawn(PPO, "eval/reward", "ppo-0123abcd: my/model")
    found = panels(figure)
    labels = "score|KL to the reference|policy loss|value loss|response length (tokens)|vowels"
    assert [*found] == labels.split("|") and figure.get_suptitle() == "ppo-0123abcd: my/model"
    assert points(found["score"]["eval/reward"]) == [(0, 0.25), (8, 0.5), (12, 0.75)]
    assert points(found["score"]["objective/scores"]) == [(4, 0.3), (12, 0.6)]
    assert points(found["KL to the reference"]["objective/kl"]) == [(4, 0.0), (8, 1.0), (12, 2.0)]
    assert points(found["vowels"]["eval/vowels"]) == [(0, 1.0), (8, 2.0), (12, 4.0)]
    assert found["score"]["eval/reward"].get_marker() == "o" and found["vowels"]["eval/vowels"].get_marker() == "o"
    assert found["KL to the reference"]["objective/kl"].get_marker() == "None"
    assert [axes.get_xlabel() for axes in figure.axes] == [""] * 4 + ["optimizer step"] * 2
    assert figure.get_size_inches()[0] * 100 == 900


def test_the_spread_of_scores(drawn):
    """A band of one standard deviation about the metric, where both are finite."""
    first = drawn(PPO, "objective/scores").axes[0]
    (band,) = first.collections
    (path,) = band.get_paths()
    assert {(x, round(y, 9)) for x, y in path.vertices.tolist()} >= {(4, 0.2), (4, 0.4), (12, 0.4), (12, 0.8)}
    assert set(path.vertices[:, 0]) == {4, 12}
    assert not any(axes.collections for axes in first.figure.axes[1:])


NAMES = {  # headline, the metrics that a script logs, the labels of the panels with their metrics
    "sft": (
        "eval/loss",
        "train/loss train/epoch optim/lr eval/vowels eval/loss eval/perplexity eval/accuracy",
        {"loss": "train/loss eval/loss", "accuracy": "eval/accuracy", "vowels": "eval/vowels"},
    ),
    "reward, two sets": (
        "eval/x/accuracy",
        "train/loss rewards/accuracies rewards/margins eval/x/accuracy eval/x/margin eval/x/score_mean "
        "eval/x/score_std eval/x/shorter_wins eval/y/accuracy eval/y/margin eval/y/score_mean eval/y/score_std",
        {
            "accuracy": "rewards/accuracies eval/x/accuracy eval/y/accuracy",
            "loss": "train/loss",
            "margin": "rewards/margins eval/x/margin eval/y/margin",
            "score_mean": "eval/x/score_mean eval/y/score_mean",
        },
    ),
    "dpo": (
        "eval/optimality",
        "train/loss train/nll rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen "
        "logps/rejected eval/optimality eval/loss eval/rewards/accuracies eval/rewards/margins",
        {
            "optimality": "eval/optimality",
            "accuracy": "rewards/accuracies eval/rewards/accuracies",
            "loss": "train/loss eval/loss",
            "margin": "rewards/margins eval/rewards/margins",
            "log-probability": "logps/chosen logps/rejected",
            "nll of chosen": "train/nll",
        },
    ),
    "ilql": (
        "eval/optimality@beta=4",
        "eval/optimality@beta=0 eval/illegal@beta=0 eval/optimality@beta=4 eval/illegal@beta=4 losses/loss "
        "losses/loss_q losses/loss_v losses/loss_cql losses/loss_awac values/mean values/std qvalues/mean",
        {
            "optimality": "eval/optimality@beta=0 eval/optimality@beta=4",
            "loss": "losses/loss",
            "losses of Q and V": "losses/loss_q losses/loss_v",
            "CQL and imitation": "losses/loss_cql losses/loss_awac",
            "Q and V": "values/mean qvalues/mean",
            "illegal": "eval/illegal@beta=0 eval/illegal@beta=4",
        },
    ),
    "ddpo": (
        "eval/reward",
        "objective/scores objective/scores_std objective/diversity loss/policy policy/approxkl eval/reward "
        "eval/reward_std eval/diversity",
        {
            "score": "objective/scores eval/reward",
            "policy loss": "loss/policy",
            "KL of an update": "policy/approxkl",
            "diversity": "objective/diversity eval/diversity",
        },
    ),
    "many metrics": (
        "eval/reward",
        "objective/scores eval/reward " + " ".join(f"eval/m{i}" for i in range(20)),
        {"score": "objective/scores eval/reward"} | {f"m{i}": f"eval/m{i}" for i in range(7)},
    ),
}


@pytest.mark.parametrize("script", NAMES)
def test_panels_of_each_script(script, drawn):
    headline, names, expected = NAMES[script]
    records = [{"step": step, **dict.fromkeys(names.split(), step + 0.5)} for step in range(3)]
    found = panels(drawn(records, headline))
    assert {label: " ".join(lines) for label, lines in found.items()} == expected
    assert [*found] == [*expected]


def test_what_is_zero_throughout_is_left_out(drawn):
    """But for the headline and what --metric measures."""
    zero = {"objective/scores": 0.0, "loss/policy": 1e-18, "objective/kl": 0.0, "eval/vowels": 0.0}
    records = [{"step": step} | zero for step in range(3)]
    assert [*panels(drawn(records, "objective/scores"))] == ["score", "vowels"]
    records[1]["objective/kl"] = 1e-3
    assert [*panels(drawn(records, "objective/scores"))] == ["score", "KL to the reference", "vowels"]


def test_a_long_title_keeps_its_ends(drawn):
    title = "ppo-0123abcd: " + "a/" * 99 + "$model_$"
    shown = drawn(PPO, "eval/reward", title).get_suptitle()
    assert len(shown) == 100 and shown.startswith("ppo-0123abcd: a/") and shown.endswith("a/$model_$")


def test_the_file_is_replaced_as_a_whole(monkeypatch, tmp_path):
    path = tmp_path / "curve.png"
    card.draw_curves(PPO, "eval/reward", "run: $x_", path)
    image = Image.open(path)
    assert image.format == "PNG" and image.size == (900, 620)
    first = path.read_bytes()

    def full(figure, file, **options):
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        with pytest.raises(OSError, match="No space left"):
            card.draw_curves(PPO, "eval/reward", "run: model", path)
    assert path.read_bytes() == first and [p.name for p in tmp_path.iterdir()] == ["curve.png"]
    card.draw_curves(PPO[:2], "eval/reward", "run: model", path)
    assert path.read_bytes() != first


def test_the_lines_are_on_the_picture(tmp_path):
    """Pixels of the first two colours of matplotlib in the upper left panel, more of them for more steps."""

    def count(color):
        pixels = np.asarray(Image.open(tmp_path / "curve.png").convert("RGB")).astype(int)
        return (np.abs(pixels[:200, :450] - color).sum(axis=2) < 30).sum()

    card.draw_curves(PPO, "eval/reward", "run: model", tmp_path / "curve.png")
    assert count((31, 119, 180)) > 300 and count((255, 127, 14)) > 20
    card.draw_curves(PPO[:1], "eval/reward", "run: model", tmp_path / "curve.png")
    assert 10 < count((31, 119, 180)) < 300 and count((255, 127, 14)) == 0


# ---- When it is drawn ------------------------------------------------------------------------------------------------


def train(tiny_dir, run_dir, **flags):
    rows = [{"prompt": letter, "completion": letter * 3} for letter in "abcdefg"]
    options = {"total_steps": 6, "batch_size": 4, "eval_every": 2, "save_every": 0, "max_new_tokens": 3, "threads": 1}
    options |= {"model": tiny_dir, "dataset": rows, "eval_dataset": rows[:2], "run_dir": str(run_dir)}
    return sft.main(sft.Args(**options | flags))


@pytest.fixture
def drawings(monkeypatch):
    """The last steps of the pictures that runs draw; `seconds`: what one takes, where a step takes ten; `fails`: with
    which error. `stop_at`: the step after which SIGTERM comes."""
    calls = SimpleNamespace(steps=[], seconds=0.1, fails=None, stop_at=None, now=0.0, step=0)
    requested = logging.Run.stop_requested

    def stop(run):
        calls.now += 10
        calls.step += 1
        if calls.step == calls.stop_at:
            os.kill(os.getpid(), 15)
        return requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    monkeypatch.setattr(logging, "time", SimpleNamespace(monotonic=lambda: calls.now, time=time.time))

    def draw(records, headline, title, path):
        calls.now += calls.seconds
        calls.steps.append(records[-1]["step"])
        calls.last = (headline, title)
        if calls.fails:
            raise calls.fails
        path.write_text(f"{records[-1]['step']}")

    monkeypatch.setattr(logging, "draw_curves", draw)
    return calls


def test_every_evaluation_makes_it_anew(drawings, gpt2_dir, tmp_path):
    train(gpt2_dir, tmp_path / "run")
    assert drawings.steps == [2, 4, 6] and (tmp_path / "run/curve.png").read_text() == "6"
    assert drawings.last == ("eval/loss", f"run: {gpt2_dir}")


def test_without_evaluations_every_step_does(drawings, gpt2_dir, tmp_path):
    train(gpt2_dir, tmp_path / "run", eval_every=0)
    assert drawings.steps == [1, 2, 3, 4, 5, 6] and drawings.last[0] == "train/loss"


def test_a_picture_that_takes_long_is_made_less_often(drawings, gpt2_dir, tmp_path):
    drawings.seconds = 2.0
    train(gpt2_dir, tmp_path / "run")
    assert drawings.steps == [2, 6]


def test_an_interrupt_makes_it(drawings, gpt2_dir, tmp_path):
    """Also where an evaluation has just made one, and none is due."""
    drawings.seconds = 1.0
    drawings.stop_at = 3
    with pytest.raises(SystemExit):
        train(gpt2_dir, tmp_path / "run")
    assert drawings.steps == [2, 3] and (tmp_path / "run/curve.png").read_text() == "3"


def test_a_picture_that_fails_stops_nothing(drawings, gpt2_dir, tmp_path, capsys):
    train(gpt2_dir, tmp_path / "whole")
    capsys.readouterr()
    drawings.fails = OSError("No space\nleft")
    drawings.steps.clear()
    train(gpt2_dir, tmp_path / "run")
    assert capsys.readouterr().out.count("warning: curve.png is not drawn: No space left\n") == 2
    assert drawings.steps == [2, 6]
    drawings.fails = ImportError("no matplotlib")
    train(gpt2_dir, tmp_path / "without")
    assert "curve.png is not" not in capsys.readouterr().out
    whole, run, without = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "run", "without"))
    assert whole == run == without


# ---- Card ------------------------------------------------------------------------------------------------------------

ENV = {
    "algo": "ppo", "command": "algos/ppo.py --lr 1e-5", "processes": 1, "commit": "abc", "device": "a CPU",
    "versions": {"python": "3.11.7", "torch": "2.11.0"},
}  # fmt: skip
SAMPLES = [
    {"step": step, "prompt": prompt, "output": f"{prompt}{step}", "vowels": i, "reward": i + step / 3}
    for step in (0, 8, 12)
    for i, prompt in enumerate(("a", "a", "b", "c", "d"))
]
CARD = """---
library_name: transformers
tags: [plainrl, ppo]
---
# my/model after PPO

eval/reward: 0.25 at step 0, **0.75** at step 12.

![learning curve](curve.png)

## Samples

| prompt | output, step 0 | reward, step 0 | output, step 12 | reward, step 12 |
| --- | --- | --- | --- | --- |
| ` a ` | ` a0 ` | 0 | ` a12 ` | 4 |
| ` b ` | ` b0 ` | 2 | ` b12 ` | 6 |
| ` c ` | ` c0 ` | 3 | ` c12 ` | 7 |

## Use

```python
print(1)
```

## Metrics

| metric | first | last |
|---|---|---|
| eval/reward | 0.25 | 0.75 |
| eval/vowels | 1 | 4 |
| loss/policy | -0.1 | -0.3 |
| loss/value | 2 | 0.5 |
| objective/kl | 0 | 2 |
| objective/scores | 0.3 | 0.6 |
| objective/scores_std | 0.1 | 0.2 |
| optim/lr | 0.5 | 0 |
| tokens/responses_len | 7 | 5 |

## Command

```
python algos/ppo.py --lr 1e-5
```

Again.

Commit abc; python 3.11.7, torch 2.11.0; a CPU.
"""


def test_a_card():
    options = {"usage": "print(1)", "library": "transformers", "pictures": "", "continuing": "Again."}
    assert card.model_card(ENV, "my/model after PPO", "eval/reward", PPO, SAMPLES, **options) == CARD
    two = card.model_card(ENV | {"processes": 2}, "x", "eval/reward", PPO[1:2], [], **options)
    assert "\ntorchrun --nproc_per_node 2 algos/ppo.py --lr 1e-5\n" in two
    assert "## Samples" not in two and "eval/reward" not in two  # which were not evaluated
    once = card.model_card(ENV, "x", "eval/reward", PPO[:1], SAMPLES[:5], **options)
    assert "\neval/reward: **0.25** at step 0.\n" in once
    assert "\n| prompt | output, step 0 | reward, step 0 |\n| --- | --- | --- |\n| ` a ` | ` a0 ` | 0 |\n" in once


def cells(table):
    """The text of the cells of a markdown table, [[cell, ...], ...], and what is in them but text and code."""
    found = []
    others = set()
    for token in MarkdownIt("commonmark").enable("table").parse(table):
        if token.type == "tr_open":
            found.append([])
        if token.type == "inline":
            others |= {child.type for child in token.children} - {"text", "code_inline"}
            found[-1].append("".join(child.content for child in token.children))
    return found, others


NASTY = ["a|b", "`", "``` x ```", "<b>x</b>", "![](http://x/y.png)", "two\nlines\r\n", "\\", "\\|", "*a* _b_ $x$"]
NASTY += [" a ", "\x1b[31m\ud800", "| --- |", "&amp;"]


@pytest.mark.parametrize("text", NASTY)
def test_samples_are_no_markup(text):
    """What a model writes is shown as it is, in one cell; control characters are written out."""
    shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
    samples = [{"step": step, "prompt": text, "output": text, "reward": 0.12345} for step in (0, 4)]
    found, others = cells(card.before_and_after(samples, "eval/reward"))
    header = ["prompt", "output, step 0", "reward, step 0", "output, step 4", "reward, step 4"]
    assert found == [header, [shown, shown, "0.123", shown, "0.123"]] and others == set()


def test_long_and_empty_samples():
    samples = [{"step": 0, "prompt": "p" * 1000, "output": " \n", "reward": None} for _ in range(2)]
    (_, first, second), _ = cells(card.before_and_after(samples, "eval/reward"))
    assert first == second and len(first[0]) == 303 and first[0].endswith("p...")
    assert first[1:] == [" \\n", "not finite"]
    assert card.markdown_cell("") == ""


def test_samples_of_other_scripts():
    """ilql: those of the beta of the headline. reward: two scores. ddpo: no text but the prompt."""
    ilql = [{"step": s, "beta": float(b), "prompt": "p", "output": f"{s} {b}", "x": b, "y": 9}
            for s in (0, 5) for b in (0, 4)]  # fmt: skip
    header = ["prompt", "output, step 0", "x, step 0", "output, step 5", "x, step 5"]
    assert cells(card.before_and_after(ilql, "eval/x@beta=4"))[0] == [header, ["p", "0 4", "4", "5 4", "4"]]
    pairs = [{"step": s, "set": "all", "prompt": "p", "chosen": "c", "rejected": "r", "chosen_score": s + 0.5,
              "rejected_score": -s} for s in (0, 5)]  # fmt: skip
    table = cells(card.before_and_after(pairs, "eval/accuracy"))[0]
    assert table[0] == ["set", "prompt", "chosen", "rejected"] + [
        f"{name}, step {step}" for step in (0, 5) for name in ("chosen_score", "rejected_score")
    ]
    assert table[1] == ["all", "p", "c", "r", "0.5", "0", "5.5", "-5"]
    images = [{"step": s, "prompt": "p", "red": 1.0, "reward": s / 4} for s in (0, 5)]
    assert cells(card.before_and_after(images, "eval/reward"))[0][1] == ["p", "0", "1.25"]
    assert card.before_and_after([], "eval/reward") == ""


CHAT = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "A|B"},
]


def test_samples_of_chats():
    samples = [{"step": s, "prompt": "<|user|>What?", "output": "no", "r": 1, "messages": CHAT} for s in (0, 5)]
    header, row = cells(card.before_and_after(samples, "eval/r"))[0]
    assert row[0] == "user: What?\\nassistant: Yes\\nuser: A|B" and header[0] == "prompt" and len(row) == 5
    assert card.readable({"prompt": "x"}) == {"prompt": "x"}


OTHERS = [1, "x", ["x"], [{"content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]]


def test_lines_of_use_for_chats():
    """A pipeline takes messages; a tokenizer gets them through its template. The run's own number of tokens."""
    text = card.usage_lines(card.USAGE, "run/hf_model", "Hi {x}", 7)
    assert text.endswith("print(model('Hi {x}', max_new_tokens=7))")
    assert card.usage_lines(card.USAGE, "run/hf_model", CHAT, 7).endswith(f"print(model({CHAT!r}, max_new_tokens=7))")
    lines = card.usage_lines(card.SEQ2SEQ_USAGE, "run/hf_model", CHAT, 7)
    assert f"model.generate(**tokenizer.apply_chat_template(\n    {CHAT!r}, add_generation_prompt=True" in lines
    compile(lines, "usage", "exec")


def test_how_it_is_continued(gpt2_dir, tmp_path, monkeypatch):
    """The commands of a card are those that do what it says."""
    monkeypatch.chdir(tmp_path)
    train(gpt2_dir, "run")
    text = Path("run/README.md").read_text()
    assert "`--resume run/checkpoints/step_00000006` trains on from its end, with a larger `--total-steps`" in text
    best = min((r for r in map(json.loads, open("run/metrics.jsonl")) if r["step"] and "eval/loss" in r),
               key=lambda r: r["eval/loss"])  # fmt: skip
    assert f"`run/hf_model_best` is the model of step {best['step']}, the best of the evaluations." in text
    metrics, _ = train(gpt2_dir, "longer", resume="run/checkpoints/step_00000006", total_steps=8)
    assert metrics["step"] == 8
    assert Path("run/config.yaml").exists() and "`--config run/config.yaml` has its flags." in text


# ---- Trackers --------------------------------------------------------------------------------------------------------


def test_a_tracker_must_be_installed(monkeypatch, gpt2_dir, tmp_path):
    trackers.check_tracker("off")
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    trackers.check_tracker("wandb")
    sentence = r"^--track tensorboard is not installed: pip install tensorboard, or leave --track out$"
    with pytest.raises(InputError, match=sentence):
        train(gpt2_dir, tmp_path / "run", track="tensorboard")
    assert list(tmp_path.iterdir()) == []


def test_samples_reach_the_trackers():
    """At most 100 of an evaluation; chats as their messages."""
    shown = []
    wandb = SimpleNamespace(name="wandb", log_table=lambda *values, **options: shown.append((values, options)))
    board = SimpleNamespace(add_text=lambda *values, **options: shown.append((values, options)))
    accelerator = SimpleNamespace(trackers=[wandb, SimpleNamespace(name="tensorboard", tracker=board)])
    rows = [{"prompt": "<|x|>", "output": f"{i}|", "r": i / 3, "messages": CHAT[:1]} for i in range(101)]
    trackers.log_samples(accelerator, rows, step=7)
    (_, table), (text, options) = shown
    assert table["step"] == options["global_step"] == 7 and text[0] == "eval/samples"
    assert table["columns"] == ["prompt", "output", "r"] and table["data"][1] == ["user: What?", "1|", 1 / 3]
    found, _ = cells(text[1])
    assert len(table["data"]) == 100 and len(found) == 101
    assert found[:3] == [["prompt", "output", "r"], ["user: What?", "0|", "0"], ["user: What?", "1|", "0.333"]]
