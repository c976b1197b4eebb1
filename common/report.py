"""What a run shows: the progress line, tables, text that is safe to print, the picture and the card."""

import io
import itertools
import math
import os
import shutil
import textwrap
import warnings
from statistics import fmean, stdev

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

HALF_CELL = 100  # characters of each half of a long sample in a table


class Screen:
    """The progress line. Only if output and errors go to a terminal, and only in the first process of a machine."""

    def __init__(self):
        self.progress = None
        self.headline = ""  # how far the run is

    def start(self):
        if self.progress or os.environ.get("LOCAL_RANK", "0") != "0" or not (os.isatty(1) and os.isatty(2)):
            return
        bar = BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(TextColumn("{task.description}", markup=False), *bar, transient=True)
        self.part = self.progress.add_task("", total=None)
        self.progress.start()

    def stop(self):
        if self.progress:
            self.progress.stop()
        self.__init__()

    def show(self, activity, total=None):
        """Shows a new activity with `total` units to do; `advance` counts them."""
        if self.progress:
            self.progress.remove_task(self.part)
            text = visible(" | ".join(filter(None, [self.headline, activity])))
            self.part = self.progress.add_task(text, total=total or None)

    def advance(self, count):
        if self.progress:
            self.progress.advance(self.part, count)

    def say(self, text):
        """Prints text above the line, in the first process of all, with control characters written out."""
        if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
            return
        text = visible_lines(text)
        try:
            if self.progress:
                self.progress.console.print(Text(text), soft_wrap=True)  # copied text has no line breaks of ours
            else:
                print(text, flush=True)  # rich would end the process at a closed pipe
        except (OSError, ValueError):  # `| head` has ended, or a disk is full; Python's last flush would fail, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


screen = Screen()


def visible(text):
    """The text with control characters, escape sequences and lone surrogates written out: one line, safe to print."""
    for character in set(text):
        if not character.isprintable():
            text = text.replace(character, character.encode("unicode_escape").decode())
    return text


def visible_lines(text):
    return "\n".join(map(visible, text.split("\n")))


def cell_text(value):
    """A cell of a table. Long texts lose their middle, since the question of a chat is at the end of its prompt."""
    if isinstance(value, float):
        return f"{value:.3g}"
    text = "not finite" if value is None else visible(str(value))
    return text if len(text) <= 2 * HALF_CELL else f"{text[:HALF_CELL]} ... {text[-HALF_CELL:]}"


def table_of(rows, title=None, width=None):
    """Rows, dicts with equal keys, as the text of a table. Without a width it is as wide as the terminal."""
    columns = [Column(Text(visible(name)), overflow="fold") for name in rows[0]]  # a long word goes on in the next line
    grid = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*(Text(cell_text(value)) for value in row.values()))
    return printed(grid, width)


def facts_of(facts):
    """{name: text} as the text of a table with a row for each, broken between words."""
    grid = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        grid.add_row(Text(name), Text(visible_lines(text), overflow="fold"))
    return printed(grid)


def printed(grid, width=None):
    """What rich draws, in the terminal's width or another one."""
    sheet = Console(file=io.StringIO(), width=width or min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()


def points(records, name):
    """[(step, value)] of a metric, without values that are not finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def change_of(records, samples, name):
    """How a metric has changed from its first to its last value, in words, or "" without values. Of an evaluated one
    with the standard error over its rows in samples."""
    curve = points(records, name)
    if not curve:
        return ""
    said = f"{name} {curve[0][1]:.3g} -> {curve[-1][1]:.3g}"
    *_, group, column = name.split("/")
    rows = [row for row in samples if column in row and row.get("set", group) == group and name.startswith("eval/")]
    before = [row[column] for row in rows if row["step"] == curve[0][0]]
    after = [row[column] for row in rows if row["step"] == curve[-1][0]]
    changes = [new - old for new, old in zip(after, before, strict=False)]
    if len(changes) < 2 or not any(changes):
        return said
    error = stdev(changes) / math.sqrt(len(changes))
    if abs(fmean(changes)) <= 2 * error:
        return f"{said} (no change: within twice its standard error, {error:.2g})"
    return f"{said} (standard error of the change: {error:.2g})"


def draw_curves(records, names, title, path):
    """Draws metrics of records, the lines of metrics.jsonl: names in their order, then those of evaluations. All sets
    and betas of a metric share a panel, also with a training metric of that name."""
    import matplotlib
    from matplotlib.figure import Figure

    evaluated = [name for name in itertools.chain(*records) if name.startswith("eval/")]
    panels = {}
    for name in dict.fromkeys([*names, *evaluated]):
        if points(records, name):
            panels.setdefault(name.rpartition("/")[2].partition("@")[0], []).append(name)
    # names of metrics and models are not formulas; a letter missing from the font needs no warning
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(7, 0.8 + 1.8 * len(panels)), layout="constrained")
        figure.suptitle(visible(title)[:80], fontsize=11)
        for place, (label, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(len(panels), 1, place, ylabel=visible(label))
            for name in metrics:
                axes.plot(*zip(*points(records, name), strict=True), label=visible(name), marker=".", linewidth=1)
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # of steps
            axes.legend(fontsize=8)
        figure.supxlabel("optimizer step")
        figure.savefig(path, dpi=100)


def model_card(env, names, records, samples, usage):
    """README.md of a run. names: metrics, the headline first. records, samples: of metrics.jsonl, samples.jsonl."""
    flags = env["flags"]
    title = f"{flags['model']} trained by {env['algo']}.py on {flags.get('reward') or flags['dataset']}"
    numbers = []
    for name in dict.fromkeys(names):
        if curve := points(records, name):
            (first_step, first), (last_step, last) = curve[0], curve[-1]
            numbers.append(f"- `{name}`: {first:.3g} at step {first_step}, **{last:.3g}** at step {last_step}")
    newest = {sample["prompt"]: sample for sample in samples if sample["step"] == samples[-1]["step"]}
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    parts = [f"# {title}", "\n".join(numbers[:5]), "![learning curve](curve.png)"]
    if newest:  # indented, so that nothing in them is markup
        parts += ["## Samples", textwrap.indent(table_of([*newest.values()][:3], width=116), "    ")]
    parts += ["## Use", f"```python\n{usage}\n```", "## Command", f"```\n{env['command']}\n```"]
    parts.append(f"Commit {env['commit']}; {versions}; {env['device']}.")
    return visible_lines("\n\n".join(filter(None, parts))) + "\n"
