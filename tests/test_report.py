"""The live line, the picture and the card of a run, and its trackers: `python -m pytest tests/test_report.py`

What is drawn is read from a pseudo-terminal, or from the figure that matplotlib gets; markdown by a parser of it.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import command, environment
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image
from transformers import AutoTokenizer, pipeline

from algos import sft
from benchmarks.recording import in_terminal, transcript
from common import report
from common.report import Screen, draw_curves

ROOT = Path(__file__).resolve().parents[1]

# ---- Terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 140])
def test_the_live_line_says_what_happens(columns, work, tmp_path):
    env = environment(work)
    env.pop("COLUMNS")
    argv = [sys.executable, *map(str, command(work, "ppo", "run"))]
    pieces, code = in_terminal(argv, columns, tmp_path, env)
    text = "".join(piece for _, piece in pieces)
    assert code == 0 and "Traceback" not in text
    pictures = re.findall(r"(?:\r\x1b\[2K|\n|\x1b\[\?25h)([^\r\n]*)\r(?!\n)", text)
    assert columns - 5 < max(map(len, pictures)) <= columns
    assert text.index("loading libraries") < text.index("parameters")
    activities = []
    for picture in pictures:
        for part in picture.split(" | "):
            if match := re.match(r"[a-z][a-z_ -]*", part):
                activities.append(match[0].strip())
    order = [activities.index(name) for name in ("loading libraries", "evaluating", "sampling", "saving")]
    assert order == sorted(order)
    assert {"reading --dataset", "scoring", "writing hf_model"} <= {*activities}
    while_sampling = [picture for picture in pictures if re.match(r"8/24, eta \d:\d\d:\d\d \| sampling 0/8", picture)]
    assert while_sampling and "scores 0." in while_sampling[0]  # the metrics of the iteration before
    assert re.search(r"\nmodel: \S+hf_model\r\n", text)
    assert text.endswith("\x1b[1A\x1b[2K")  # nothing of the line is left


def test_transcript():
    pieces = [
        (0.1, "\x1b[?25lfirst\r\n\r\x1b[2Kloading, 0 s\r"),
        (0.3, "\r\x1b[2Kreading, 0 s\r"),
        (1.2, "\r\x1b[2Kreading, 1 s\r"),
        (2.4, "\r\x1b[2Kreading, 2 s\r\r\x1b[2Ksec"),
        (2.5, "ond\r\nreading, 2 s\r\r\n\x1b[?25h\r\x1b[1A\x1b[2Kthird\r\n"),
    ]
    lines = ["   5.1   first", "   5.1 > loading, 0 s", "   6.2 > reading, 1 s", "   7.5   second", "   7.5   third"]
    assert transcript(pieces, 5.0) == lines


SHOWN = """import sys
sys.path.insert(0, {root!r})
from common.report import screen
screen.start()
screen.show("sampling", 8)
screen.metrics = "metric " * 20
screen.say("words " * 20 + "[red]\\x1b[")
print("of a reward")
screen.show("saving")
screen.stop()
print("end")
"""


@pytest.mark.parametrize(("shell", "is_live"), [("{}", True), ("{} | cat", False), ("{} 2> /dev/null", False)])
def test_the_line_is_drawn_where_all_output_goes_to_a_terminal(shell, is_live, tmp_path):
    """Else not a byte more is written: `| tee log` would print into it. Texts stand above it as they are."""
    (tmp_path / "shown.py").write_text(SHOWN.format(root=str(ROOT)))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    pieces, code = in_terminal(["sh", "-c", shell.format(f"{sys.executable} shown.py")], 50, tmp_path, env)
    text = "".join(piece for _, piece in pieces)
    said = "words " * 20 + "[red]\x1b[\r\n"
    assert code == 0
    if not is_live:
        assert text == f"{said}of a reward\r\nend\r\n"
        return
    assert f"\r\x1b[2K{said}" in text and "\r\x1b[2Kof a reward\r\n" in text
    assert "\r\x1b[2Ksaving, 0 s | " + ("metric " * 20)[:35] + "…\r" in text
    assert text.endswith("\x1b[1A\x1b[2Kend\r\n")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there


def test_without_a_terminal_nothing_is_drawn(monkeypatch, capsys):
    screen = Screen()
    screen.start()
    assert not screen.live  # under pytest there is no terminal
    screen.show("scoring pairs", 700)
    screen.advance(100)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    screen.say("text")


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_without_an_output_for_errors(tmp_path):
    (tmp_path / "shown.py").write_text(SHOWN.format(root=str(ROOT)))
    done = subprocess.run(f"{sys.executable} {tmp_path}/shown.py 2>&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("of a reward\nend\n")


def test_a_table_breaks_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [{"prompt": "several words that need more than a line", "output": "x\ny" + "z" * 300, "reward": 0.12345}]
    text = report.table_of(rows, "samples")
    assert max(map(len, text.splitlines())) <= 40 and "0.123" in text
    assert {*rows[0]["prompt"].split()} <= {*text.split()}


# ---- Picture ---------------------------------------------------------------------------------------------------------

PPO = [
    {"step": 0, "eval/reward": 0.25, "eval/vowels": 1.0},
    {"step": 4, "objective/scores": 0.3, "objective/kl": 0.0, "loss/policy": -0.1, "optim/lr": 0.5},
    {
        **{"step": 8, "objective/scores": None, "objective/kl": 1.0, "loss/policy": -0.2},
        **{"eval/reward": 0.5, "eval/vowels": 2.0},
    },
    {
        **{"step": 12, "objective/scores": 0.6, "objective/kl": 2.0, "loss/policy": -0.3},
        **{"eval/reward": 0.75, "eval/vowels": 4.0},
    },
]
IN_STATUS = ["objective/scores", "objective/kl", "loss/policy", "loss/absent"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(records, names, title) -> the title of the figure as it is saved, {label: {metric: line}} of its panels."""
    figures = []

    def keep(figure, file, **options):
        figures.append(figure)
        Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(records, names, title="run: model"):
        draw_curves(records, names, title, tmp_path / "curve.png")
        panels = {}
        for axes in figures[-1].axes:
            if axes.axison:
                panels[axes.get_ylabel()] = {line.get_label(): line for line in axes.get_lines()}
        return figures[-1].get_suptitle(), panels

    return draw


def points(line):
    return [(int(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_panels_of_a_run(drawn):
    """The headline, the metrics of the status line, then those of --metric; what is not finite is left out."""
    title, found = drawn(PPO, ["eval/reward", *IN_STATUS], "ppo-0123abcd: $x_" + "a/" * 99)
    assert [*found] == ["reward", "scores", "kl", "policy", "vowels"]
    assert title == ("ppo-0123abcd: $x_" + "a/" * 99)[:100]
    assert points(found["reward"]["eval/reward"]) == [(0, 0.25), (8, 0.5), (12, 0.75)]
    assert points(found["scores"]["objective/scores"]) == [(4, 0.3), (12, 0.6)]
    assert found["reward"]["eval/reward"].get_marker() == "." and found["kl"]["objective/kl"].get_marker() == "None"


NAMES = {  # the metrics that a script logs; the panels of the first four of them with their metrics
    "two sets": (
        "eval/x/accuracy train/loss rewards/accuracies rewards/margins eval/x/margin eval/y/accuracy eval/y/margin",
        ["eval/x/accuracy eval/y/accuracy", "train/loss", "rewards/accuracies", "rewards/margins"]
        + ["eval/x/margin eval/y/margin"],
    ),
    "training and evaluation": (
        "eval/loss train/loss rewards/accuracies train/nll eval/rewards/accuracies eval/x/rewards/accuracies optim/lr",
        ["eval/loss train/loss", "rewards/accuracies eval/rewards/accuracies eval/x/rewards/accuracies", "train/nll"],
    ),
    "betas": (
        "eval/x@beta=4 losses/loss losses/loss_q losses/loss_v eval/x@beta=0 eval/y@beta=0 eval/y@beta=4",
        ["eval/x@beta=4 eval/x@beta=0", "losses/loss", "losses/loss_q", "losses/loss_v", "eval/y@beta=0 eval/y@beta=4"],
    ),
}


@pytest.mark.parametrize("logged", NAMES)
def test_panels_share_names(logged, drawn):
    names, expected = NAMES[logged]
    records = [{"step": step, **dict.fromkeys(names.split(), step + 0.5)} for step in range(3)]
    _, found = drawn(records, names.split()[:4])
    assert [" ".join(lines) for lines in found.values()] == expected


def test_the_file_is_a_picture(tmp_path):
    path = tmp_path / "curve.png"
    draw_curves([{"step": 0, "eval/reward": None}], ["eval/reward"], "x", path)
    assert not path.exists()  # there is nothing to draw
    draw_curves(PPO, ["eval/reward", *IN_STATUS], "run: $x_ \u4e2d", path)
    image = Image.open(path)
    assert image.format == "PNG" and image.size == (900, 620)


# ---- When it is drawn ------------------------------------------------------------------------------------------------


def train(tiny_dir, run_dir, **flags):
    rows = [{"prompt": letter, "completion": letter * 3} for letter in "abcdefg"]
    options = {"total_steps": 6, "batch_size": 4, "eval_every": 2, "save_every": 0, "max_new_tokens": 3, "threads": 1}
    options |= {"model": tiny_dir, "dataset": rows, "eval_dataset": rows[:2], "run_dir": str(run_dir)}
    return sft.main(sft.Args(**options | flags))


@pytest.fixture
def drawings(monkeypatch):
    """The last steps of the pictures that runs draw; `fails`: with which error."""
    calls = SimpleNamespace(steps=[], fails=None)

    def draw(records, names, title, path):
        calls.steps.append(records[-1]["step"])
        calls.last = (names[0], title)
        if calls.fails:
            raise calls.fails
        path.write_text(f"{records[-1]['step']}")

    monkeypatch.setattr(report, "draw_curves", draw)
    return calls


def test_every_evaluation_makes_it_anew(drawings, gpt2_dir, tmp_path):
    train(gpt2_dir, tmp_path / "run")
    assert drawings.steps == [2, 4, 6] and (tmp_path / "run/curve.png").read_text() == "6"
    assert drawings.last == ("eval/loss", f"run: {gpt2_dir}")


def test_without_evaluations_the_end_does(drawings, gpt2_dir, tmp_path):
    train(gpt2_dir, tmp_path / "run", eval_every=0)
    assert drawings.steps == [6] and drawings.last[0] == "train/loss"


def test_a_picture_that_fails_stops_nothing(drawings, gpt2_dir, tmp_path, capsys):
    train(gpt2_dir, tmp_path / "whole")
    capsys.readouterr()
    drawings.fails = OSError("No space\nleft")
    drawings.steps.clear()
    train(gpt2_dir, tmp_path / "run")
    assert capsys.readouterr().out.count("warning: curve.png is not drawn: No space left\n") == 3
    assert drawings.steps == [2, 4, 6]
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


# ---- Card ------------------------------------------------------------------------------------------------------------

ENV = {
    "algo": "ppo", "command": "algos/ppo.py --lr 1e-5", "processes": 1, "commit": "abc", "device": "a CPU",
    "flags": {"model": "my/model", "reward": "length", "dataset": "rows"},
    "versions": {"python": "3.11.7", "torch": "2.11.0"},
}  # fmt: skip
SAMPLES = [
    {"step": step, "prompt": prompt, "output": f"{prompt}{step}", "vowels": i, "reward": i + step / 3}
    for step in (0, 8, 12)
    for i, prompt in enumerate(("a", "a", "b", "c", "d"))
]
CARD = """# my/model trained by ppo.py on length

- `eval/reward`: 0.25 at step 0, **0.75** at step 12
- `objective/scores`: 0.3 at step 4, **0.6** at step 12
- `objective/kl`: 0 at step 4, **2** at step 12
- `loss/policy`: -0.1 at step 4, **-0.3** at step 12
- `optim/lr`: 0.5 at step 4, **0.5** at step 4

![learning curve](curve.png)

## Samples

TABLE

## Use

```python
print(1)
```

## Command

```
python algos/ppo.py --lr 1e-5
```

Commit abc; python 3.11.7, torch 2.11.0; a CPU.
"""


def test_a_card():
    names = ["eval/reward", *IN_STATUS, "eval/reward", "optim/lr"]
    newest = [SAMPLES[11], *SAMPLES[12:14]]  # one of each prompt
    table = textwrap.indent(report.table_of(newest, width=report.WIDEST), "    ")
    assert report.model_card(ENV, names, PPO, SAMPLES, usage="print(1)") == CARD.replace("TABLE", table)
    two = report.model_card(ENV | {"processes": 2}, names, PPO[1:2], [], usage="print(1)")
    assert "\ntorchrun --nproc_per_node 2 algos/ppo.py --lr 1e-5\n" in two
    assert "## Samples" not in two and "eval/reward" not in two  # which were not evaluated
    report.model_card(ENV, names, [], [], usage="print(1)")


NASTY = ["a|b", "`", "``` x ```", "<b>x</b>", "![](http://x/y.png)", "two\nlines\r\n", "\\", "\\|", "*a* _b_ $x$"]
NASTY += [" a ", "\x1b[31m\ud800", "| --- |", "&amp;", "[red]"]


@pytest.mark.parametrize("text", NASTY)
def test_samples_are_no_markup(text):
    """What a model writes is shown as it is; control characters are written out."""
    shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
    sample = {"step": 4, "prompt": text, "output": text, "reward": 0.12345}
    card = report.model_card(ENV, [], [], [sample], usage="print(1)")
    (block,) = [token for token in MarkdownIt("commonmark").parse(card) if token.type == "code_block"]
    last = block.content.splitlines()[-1]
    assert last.count(shown) == 2 and last.split()[0] == "4" and last.split()[-1] == "0.123"


def test_long_and_empty_samples():
    assert report.cell_text("p" * 1000) == "p" * 200 + "..."
    assert [report.cell_text(value) for value in (" \n", None, "")] == [" \\n", "not finite", ""]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_lines_of_use_make_the_ids_of_training(adds_bos, chat, tiny_dirs, tmp_path):
    """Also of a chat whose template writes the beginning token: it stands there once."""
    rows = [{"prompt": "abc", "completion": "ddd"}] * 4
    tokenizer = AutoTokenizer.from_pretrained(tiny_dirs["llama"])
    if chat:
        tokenizer.chat_template = TEMPLATE
        rows = [{"messages": [{"role": "user", "content": "bc"}, {"role": "assistant", "content": "ddd"}]}] * 4
    model = tmp_path / "model"
    shutil.copytree(tiny_dirs["llama"], model)
    tokenizer.save_pretrained(model)
    if adds_bos:
        file = model / "tokenizer.json"
        bos = tokenizer.bos_token
        settings = json.loads(file.read_text())
        settings["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_token_id], "tokens": [bos]}},
        }
        file.write_text(json.dumps(settings))
    train(str(model), tmp_path / "run", dataset=rows, eval_dataset=rows[:1], total_steps=1, eval_every=0)
    lines = re.search(r"```python\n(.*?)\n```", (tmp_path / "run/README.md").read_text(), re.S)[1]
    assert ("add_special_tokens=False" in lines) == (chat and not adds_bos)  # else the tokenizer writes it
    seen = []
    create = pipeline

    def watched(task, folder):
        pipe = create(task, folder)
        generate = pipe.model.generate
        pipe.model.generate = lambda input_ids, **options: seen.append(input_ids) or generate(input_ids, **options)
        return pipe

    exec(lines.replace("from transformers import pipeline; ", ""), {"pipeline": watched})
    expected = "ubca" if chat else "abc"
    ids = [tokenizer.bos_token_id] if chat or adds_bos else []
    assert seen[0].tolist() == [ids + tokenizer.convert_tokens_to_ids(list(expected))]


# ---- Trackers --------------------------------------------------------------------------------------------------------


def test_samples_reach_wandb():
    shown = []
    wandb = SimpleNamespace(name="wandb", log_table=lambda *values, **options: shown.append((values, options)))
    accelerator = SimpleNamespace(trackers=[wandb, SimpleNamespace(name="tensorboard")])
    rows = [{"prompt": "<|x|>", "output": f"{i}|", "r": i / 3} for i in range(101)]
    report.log_samples(accelerator, rows, step=7)
    ((name,), table) = shown[0]
    assert len(shown) == 1 and name == "eval/samples" and table["step"] == 7
    assert table["columns"] == ["prompt", "output", "r"] and table["data"][1] == ["<|x|>", "1|", 1 / 3]
