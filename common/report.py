"""What a run shows: the terminal's live line, curve.png, README.md (its card), and wandb or tensorboard."""

import contextlib
import io
import itertools
import math
import os
import shutil
import textwrap
import time
import warnings
from statistics import fmean, stdev

from rich import box
from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

MOST_NUMBERS = 5  # in the card
MOST_PROMPTS = 3  # in the card
LONGEST_CELL = 200  # characters of a sample in a table
WIDEST = 4000  # characters of a line of a table in markdown, so that rows are lines and no cell is cut

# Last lines of a run and of its card: how to load the model and sample from it.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, OPTIONSmax_new_tokens={max_new_tokens}))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, OPTIONSreturn_tensors='pt'), max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""


# ---- Terminal --------------------------------------------------------------------------------------------------------


class Screen:
    """The live line of this process: the activity, its progress, and the newest metrics. Only if output and errors go
    to a terminal, and only in the first process of a machine."""

    def __init__(self):
        self.live = None
        self.headline = ""
        self.metrics = ""
        self.show("")

    def start(self):
        """Starts drawing, if there is a terminal."""
        # both: `| tee log` would print into the line, and the log would have no progress
        if self.live or os.environ.get("LOCAL_RANK", "0") != "0" or not (os.isatty(1) and os.isatty(2)):
            return
        console = Console()
        self.live = Live(get_renderable=self.line, console=console, refresh_per_second=5, transient=True,
                         redirect_stderr=False)  # fmt: skip
        self.live.start()
        console.show_cursor()  # rich hides it, and a killed process cannot bring it back

    def stop(self):
        """Clears the line."""
        if self.live:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.live.stop()
        self.__init__()

    def show(self, activity, total=0):
        """Shows a new activity with `total` units to do; `advance` counts them."""
        self.activity = activity
        self.total = total
        self.done = 0
        self.begin = time.monotonic()
        if self.live:
            with contextlib.suppress(OSError):
                self.live.refresh()

    def advance(self, count):
        self.done += count

    def line(self):
        """The line for rich: the most important part first, cut at the terminal's width."""
        count = f" {self.done:,}/{self.total:,}" if self.total else ""
        activity = f"{self.activity}{count}, {time.monotonic() - self.begin:.0f} s"
        text = " | ".join(filter(None, [self.headline, activity, self.metrics]))
        # the cursor goes back, so that warnings replace the line
        return Group(Text(text, no_wrap=True, overflow="ellipsis", end=""), Control(ControlType.CARRIAGE_RETURN))

    def say(self, text):
        """Prints text above the line."""
        try:
            if self.live:
                self.live.console.print(Text(text), soft_wrap=True)  # so that copied text has no line breaks of ours
            else:
                print(text, flush=True)  # rich would end the process at a closed pipe
        except OSError:  # `| head` has ended, or a disk is full; Python's last flush would be an error, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


screen = Screen()


def visible(text):
    """The text with control characters, escape sequences and lone surrogates written out, safe to print."""
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def cell_text(value):
    """A cell of a table: numbers with three digits, texts as one line, cut at the end."""
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = visible(str(value))
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "..."


def wrapped(lines):
    """Lines as one text, broken between words if they are wider than the terminal."""
    width = shutil.get_terminal_size().columns if os.isatty(1) else WIDEST
    options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **options) for line in "\n".join(lines).splitlines())


def table_of(rows, title=None, width=None):
    """Rows, dicts with equal keys, as the text of a table. Without a width it is as wide as the terminal."""
    grid = Table(*rows[0], box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*(Text(cell_text(value)) for value in row.values()))
    sheet = Console(file=io.StringIO(), width=width or min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def points(records, name):
    """[(step, value)] of a metric, without values that are not finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def sparkline(values, width=40):
    """The values as a line of eight block heights, thinned to at most `width`."""
    values = values[:: math.ceil(len(values) / width) or 1]
    low = min(values, default=0)
    span = max(values, default=0) - low or 1
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)] for value in values)


def is_change(samples, name):
    """Whether an evaluation metric has changed from first to last by more than twice the standard error of the mean
    over the rows. True also if samples lack the metric."""
    *_, group, column = name.split("/")
    of_step = {}
    for row in samples:
        if column in row and row.get("set", group) == group:
            of_step.setdefault(row["step"], []).append(row[column])
    first, *_, last = [*of_step.values()] * 2 or [[], []]
    if len(first) < 2 or len(first) != len(last):
        return True
    changes = [after - before for before, after in zip(first, last, strict=True)]
    return abs(fmean(changes)) > 2 * stdev(changes) / math.sqrt(len(changes))


# ---- Picture ---------------------------------------------------------------------------------------------------------


def draw_curves(records, names, title, path):
    """Draws metrics from records, the lines of metrics.jsonl. names: those to draw, in order; those of evaluations
    follow. All sets and betas of a metric share a panel, also with a training metric of that name."""
    import matplotlib
    from matplotlib.figure import Figure

    evaluated = [name for name in itertools.chain(*records) if name.startswith("eval/")]
    panels = {}
    for name in dict.fromkeys([*names, *evaluated]):
        if points(records, name):
            panels.setdefault(name.rpartition("/")[2].partition("@")[0], []).append(name)
    if not panels:
        return
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / 2)
    # names of metrics and models are not formulas; a letter missing from the font needs no warning
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(4.5 * columns, 0.8 + 1.8 * rows), layout="constrained")
        figure.suptitle(visible(title)[: 50 * columns], fontsize=11)
        for place, (label, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, place)
            for name in metrics:
                curve = points(records, name)
                marker = "." if name.startswith("eval/") or len(curve) < 3 else None
                axes.plot(*zip(*curve, strict=True), label=visible(name), marker=marker, linewidth=1)
            axes.set_ylabel(visible(label))
            axes.yaxis.set_major_formatter("{x:.6g}")  # without a factor above the panel
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        figure.supxlabel("optimizer step")
        figure.savefig(path, dpi=100)


# ---- Card ------------------------------------------------------------------------------------------------------------


def model_card(env, names, records, samples, usage):
    """README.md of a run. env: the contents of env.json. names: the most important metrics, the headline first.
    records, samples: the lines of metrics.jsonl and samples.jsonl."""
    flags = env["flags"]
    title = f"{flags['model']} trained by {env['algo']}.py on {flags.get('reward') or flags['dataset']}"
    numbers = []
    for name in dict.fromkeys(names):
        if curve := points(records, name):
            (first_step, first), (last_step, last) = curve[0], curve[-1]
            numbers.append(f"- `{name}`: {first:.3g} at step {first_step}, **{last:.3g}** at step {last_step}")
    newest = {sample["prompt"]: sample for sample in samples if sample["step"] == samples[-1]["step"]}
    shown = [*newest.values()][:MOST_PROMPTS]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    parts = [f"# {title}", "\n".join(numbers[:MOST_NUMBERS]), "![learning curve](curve.png)"]
    if shown:  # indented, so that nothing in them is markup
        parts += ["## Samples", textwrap.indent(table_of(shown, width=WIDEST), "    ")]
    parts += ["## Use", f"```python\n{usage}\n```", "## Command", f"```\n{launch_line(env)}\n```"]
    parts.append(f"Commit {env['commit']}; {versions}; {env['device']}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def launch_line(env):
    """The command that repeats a run. env: what `environment` returns."""
    machines = env.get("machines", 1)
    if env.get("sharded"):
        return f"accelerate launch --config_file FSDP2.yaml {env['command']}"
    if machines > 1:
        place = "--rdzv_backend c10d --rdzv_endpoint HOST:PORT"
        return f"torchrun --nnodes {machines} --nproc_per_node {env['processes'] // machines} {place} {env['command']}"
    if env["processes"] > 1:
        return f"torchrun --nproc_per_node {env['processes']} {env['command']}"
    return f"python {env['command']}"


def lines_of_use(lm, tokenizer, ids):
    """(text of a prompt, usage code) with which the exported tokenizer gives exactly these ids."""
    usage = SEQ2SEQ_USAGE if lm.config.is_encoder_decoder else USAGE
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    options = ""
    if tokenizer(prompt)["input_ids"] != list(ids):  # special tokens written by a template
        prompt = tokenizer.decode(ids)
        options = "add_special_tokens=False, "
    return prompt, usage.replace("OPTIONS", options)


# ---- wandb and tensorboard, through accelerate: mirrors of the run directory -----------------------------------------


def open_tracker(accelerator, args, folder, identity):
    """Starts the tracker of --track for the run in a folder, or continues that run's tracking."""
    from accelerate.tracking import filter_trackers

    flags = {}
    for flag, value in identity["flags"].items():
        flags[flag] = value if isinstance(value, int | float) else str(value)
    place = {"id": f"{folder.resolve().name}-{identity['hash']}", "name": folder.name, "dir": str(folder)}
    accelerator.log_with = filter_trackers([args.track], folder)
    if not accelerator.log_with:
        raise ImportError(f"pip install {args.track}")
    accelerator.project_configuration.logging_dir = str(folder)  # of tensorboard
    accelerator.init_trackers(args.wandb_project, flags, {"wandb": {"resume": "allow", **place}})


def log_samples(accelerator, samples, step):
    """Logs the samples of an evaluation as a table in wandb."""
    rows = [list(sample.values()) for sample in samples]
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table("eval/samples", columns=list(samples[0]), data=rows, step=step)
