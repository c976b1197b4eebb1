"""What is seen of a run: the live line of a terminal, curve.png, README.md (its card), and wandb or tensorboard."""

import contextlib
import io
import itertools
import math
import os
import re
import shutil
import time
import warnings

from rich import box
from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from common.cli import InputError

REPORT = 30  # seconds between two plain lines about a long activity, where there is no terminal
MOST_PANELS = 8
MOST_NUMBERS = 5  # in the card
MOST_PROMPTS = 3  # in the card
MOST_SAMPLES = 100  # of an evaluation, for wandb and tensorboard
LONGEST_CELL = 200  # characters of a sample in a table

# Last lines of a run, and of its card: how the model is loaded and sampled from.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, OPTIONSmax_new_tokens={max_new_tokens}))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, OPTIONSreturn_tensors='pt'), max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""


# ---- Terminal --------------------------------------------------------------------------------------------------------


class Screen:
    """The live line of this process: the activity, how far it is, and the newest metrics. Only where output and errors
    go to a terminal, and only in the first process of a machine."""

    def __init__(self):
        self.main = os.environ.get("LOCAL_RANK", "0") == "0"
        self.live = None
        self.headline = ""
        self.metrics = ""
        self.show("")

    def start(self):
        """Draws from now on, if there is a terminal."""
        # both: `| tee log` would print into the line, and the log would have no progress
        if self.live or not self.main or not (os.isatty(1) and os.isatty(2)):
            return
        console = Console()
        self.live = Live(get_renderable=self.line, console=console, refresh_per_second=5, transient=True,
                         redirect_stderr=False)  # fmt: skip
        self.live.start()
        console.show_cursor()  # rich hides it, and who is killed cannot bring it back

    def stop(self):
        """Clears the line."""
        if self.live:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.live.stop()
        self.live = None
        self.headline = ""
        self.metrics = ""

    def show(self, activity, total=0, unit="rows"):
        """Says what begins: so many units of it are to be done; `advance` counts them."""
        self.activity = activity
        self.total = total
        self.unit = unit
        self.done = 0
        self.begin = time.monotonic()
        self.reported = self.begin
        if self.live:
            with contextlib.suppress(OSError):
                self.live.refresh()

    def step(self, total):
        """An optimizer step is done, of so many of an iteration."""
        if self.activity != "training":
            self.show("training")
        if total > 1:
            self.total = total
            self.unit = "steps"
            self.advance(1)

    def advance(self, count):
        self.done += count
        now = time.monotonic()
        if not self.live and self.main and now - self.reported > REPORT:
            self.reported = now
            self.say(self.progress())

    def progress(self):
        """The activity in words."""
        count = ""
        if self.total:
            count = f" {min(self.done, self.total):,}/{self.total:,} {self.unit}"
        return f"{self.activity}{count}, {time.monotonic() - self.begin:.0f} s"

    def line(self):
        """The line as rich draws it: the most important first, cut at the width of the terminal."""
        text = " | ".join(filter(None, [self.headline, self.progress(), self.metrics]))
        # the cursor goes back, so that warnings replace the line
        return Group(Text(text, no_wrap=True, overflow="ellipsis", end=""), Control(ControlType.CARRIAGE_RETURN))

    def say(self, text):
        """Prints text above the line."""
        with contextlib.suppress(BrokenPipeError):  # `| head`
            if self.live:
                self.live.console.print(Text(text), soft_wrap=True)  # what is copied has no line breaks of ours
            else:
                print(text, flush=True)  # rich would end the process at a closed pipe


screen = Screen()


def visible(text):
    """text with control characters, escape sequences and lone surrogates written out, safe to print."""
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def cell_text(value):
    """A cell of a table: numbers with three digits, texts in one line that is cut at the end."""
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = visible(str(value))
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "..."


def table_of(rows, title):
    """Rows, dicts of equal keys, as the text of a table."""
    grid = Table(*rows[0], box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*(Text(cell_text(value)) for value in row.values()))
    sheet = Console(file=io.StringIO(), width=min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def newest_values(records):
    """The newest value of every metric."""
    metrics = {}
    for record in records:
        metrics |= record
    return metrics


def points(records, name):
    """[(step, value)] of a metric, without values that are not finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def sparkline(values, width=40):
    """The values as a line of eight block heights, thinned to at most `width`."""
    values = values[:: math.ceil(len(values) / width) or 1]
    low = min(values, default=0)
    span = max(values, default=0) - low or 1
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)] for value in values)


# ---- Picture ---------------------------------------------------------------------------------------------------------


def panels_of(records, names):
    """{label: metrics} of the picture: those of names, then what evaluations measure besides. All sets and all betas of
    an evaluation metric share a panel, also with a metric of training of that name."""
    evaluated = [name for name in newest_values(records) if name.startswith("eval/")]
    panels = {}
    for name in dict.fromkeys([*names, *evaluated]):
        label = name.rpartition("/")[2].partition("@")[0]
        if points(records, name):
            panels.setdefault(label, []).append(name)
    return dict(itertools.islice(panels.items(), MOST_PANELS))


def draw_curves(records, names, title, path):
    """The metrics of a run as a picture; the file is replaced as a whole.

    records: the lines of metrics.jsonl. names: the metrics to draw, that of the first panel first.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = panels_of(records, names)
    if not panels:
        return
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / 2)
    temporary = path.with_name(f".tmp-{path.name}")
    # names of metrics and models are no formulas; a letter that the font lacks is no reason for a warning
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(4.5 * columns, 0.8 + 1.8 * rows), layout="constrained")
        figure.suptitle(visible(title)[: 50 * columns], fontsize=11)
        for place, (label, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, place)
            for name in metrics:
                curve = points(records, name)
                marker = "." if name.startswith("eval/") or len(curve) < 3 else None
                axes.plot(*zip(*curve, strict=True), label=visible(name), marker=marker, linewidth=1)
            axes.set_ylabel(visible(label), fontsize=9)
            axes.tick_params(labelsize=8)
            axes.yaxis.set_major_formatter("{x:.6g}")  # without a factor above the panel
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        figure.supxlabel("optimizer step", fontsize=10)
        try:
            figure.savefig(temporary, format="png", dpi=100)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


# ---- Card ------------------------------------------------------------------------------------------------------------


def markdown_table(rows):
    """Rows, dicts, as a table of markdown. Texts are code, so nothing in them is markup."""
    columns = list(newest_values(rows))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([markdown_cell(row.get(name, "")) for name in columns])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_cell(value):
    """A number as it is read; a text as code, between more backticks than it holds."""
    text = cell_text(value)
    if not isinstance(value, str) or not text.strip():
        return text
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    text = text.replace("|", "\\|")
    return f"{fence} {text} {fence}"


def before_and_after(samples, headline):
    """Samples of the first evaluation and of the last: of the first prompts, one each. Of ilql's betas that of the
    headline metric. samples: the lines of samples.jsonl."""
    beta = headline.partition("@beta=")[2]
    steps = [sample["step"] for sample in samples[:1] + samples[-1:]]
    of_prompts = {}
    for sample in samples:
        if sample["step"] in steps and (not beta or f"{sample['beta']:g}" == beta):
            versions = of_prompts.setdefault((sample.get("set"), sample["prompt"]), {})
            versions.setdefault(sample["step"], sample)
    shown = itertools.islice(of_prompts.values(), MOST_PROMPTS)
    return [*itertools.chain.from_iterable(versions.values() for versions in shown)]


def model_card(env, title, names, records, samples, usage, library, pictures, continuing):
    """README.md of a run.

    names: its most telling metrics, the headline first. records, samples: the lines of metrics.jsonl and samples.jsonl.
    pictures: more of them, as markdown. continuing: what `how_to_continue` returns.
    """
    numbers = []
    for name in names[:MOST_NUMBERS]:
        if curve := points(records, name):
            numbers.append({"metric": name, "first": curve[0][1], "last": curve[-1][1]})
    result = ""
    if numbers:
        curve = points(records, numbers[0]["metric"])
        (first_step, first), (last_step, last) = curve[0], curve[-1]
        result = f"{numbers[0]['metric']}: {first:.3g} at step {first_step}, **{last:.3g}** at step {last_step}."
    parts = [f"---\nlibrary_name: {library}\ntags: [plainrl, {env['algo']}]\n---\n# {title}", result]
    parts += ["![learning curve](curve.png)", markdown_table(numbers), pictures.strip()]
    if table := before_and_after(samples, names[0]):
        parts += ["## Samples", markdown_table(table)]
    command = f"python {env['command']}"
    if env["processes"] > 1:
        command = f"torchrun --nproc_per_node {env['processes']} {env['command']}"
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    parts += ["## Use", f"```python\n{usage}\n```", "## Command", f"```\n{command}\n```", continuing]
    parts.append(f"Commit {env['commit']}; {versions}; {env['device']}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def lines_of_use(lm, tokenizer, ids):
    """(text of a prompt, lines of use) with which the exported tokenizer makes these very ids of the text."""
    usage = SEQ2SEQ_USAGE if lm.config.is_encoder_decoder else USAGE
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    options = ""
    if tokenizer(prompt)["input_ids"] != list(ids):  # special tokens that a template wrote
        prompt = tokenizer.decode(ids)
        options = "add_special_tokens=False, "
    return prompt, usage.replace("OPTIONS", options)


def how_to_continue(folder, last_step, longer, best_step):
    """How a run is repeated and continued. longer: the flag that makes it longer."""
    checkpoint = f"{folder}/checkpoints/step_{last_step:08d}"
    text = (
        "The same command goes on with a run that was stopped; with `--resume never` it repeats the run in another "
        f"directory. `--config {folder}/config.yaml` has its flags. `--resume {checkpoint}` trains on from its end, "
        f"with a larger `{longer}` or other flags."
    )
    if best_step is not None:
        text += f" `{folder}/hf_model_best` is the model of step {best_step}, the best of the evaluations."
    return text


# ---- wandb and tensorboard, through accelerate: mirrors of the run directory -----------------------------------------


def check_tracker(name):
    """InputError where the tracker of --track is not installed."""
    from accelerate.tracking import get_available_trackers

    if name != "off" and name not in map(str, get_available_trackers()):
        raise InputError(f"--track {name} is not installed: pip install {name}, or leave --track out")


def open_tracker(accelerator, name, project, folder, identity):
    """Starts the tracker of --track for the run in a folder, or goes on with what it has of that run."""
    from accelerate.tracking import filter_trackers

    flags = {}
    for flag, value in identity["flags"].items():
        flags[flag] = value if isinstance(value, int | float) else str(value)
    place = {"id": f"{folder.resolve().name}-{identity['hash']}", "name": folder.name, "dir": str(folder)}
    accelerator.log_with = filter_trackers([name], folder)
    accelerator.project_configuration.logging_dir = str(folder)  # of tensorboard
    accelerator.init_trackers(project, flags, {"wandb": {"resume": "allow", **place}})


def log_samples(accelerator, samples, step):
    """The first samples of an evaluation: a table in wandb, the text of one in tensorboard."""
    samples = samples[:MOST_SAMPLES]
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.tracker.add_text("eval/samples", markdown_table(samples), global_step=step)
        else:
            rows = [list(sample.values()) for sample in samples]
            tracker.log_table("eval/samples", columns=list(samples[0]), data=rows, step=step)
