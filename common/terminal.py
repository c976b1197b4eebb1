"""What the terminal shows: the progress line, tables, and text that is safe to print."""

import io
import os
import shutil

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

LONGEST_CELL = 200  # characters of a sample in a table
WIDEST = 4000  # characters of a line of a table in markdown, so that rows are lines and no cell is cut


class Screen:
    """The progress line. Only if output and errors go to a terminal, and only in the first process of a machine."""

    def __init__(self):
        self.progress = None
        self.headline = ""  # how far the run is

    def start(self):
        if self.progress or os.environ.get("LOCAL_RANK", "0") != "0" or not (os.isatty(1) and os.isatty(2)):
            return
        counts = MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        text = TextColumn("{task.description}", markup=False)
        self.progress = Progress(text, BarColumn(bar_width=10), *counts, transient=True)
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
            self.part = self.progress.add_task(" | ".join(filter(None, [self.headline, activity])), total=total or None)

    def advance(self, count):
        if self.progress:
            self.progress.advance(self.part, count)

    def say(self, text):
        """Prints text above the line, in the first process of all. Line ends stay; other control characters are
        written out."""
        if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
            return
        text = "\n".join(map(visible, text.split("\n")))
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


def cell_text(value):
    """A cell of a table. Long texts lose their middle, since the question of a chat is at the end of its prompt."""
    if isinstance(value, float):
        return f"{value:.3g}"
    text = "not finite" if value is None else visible(str(value))
    half = LONGEST_CELL // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]} ... {text[-half:]}"


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
        grid.add_row(Text(name), Text("\n".join(map(visible, text.split("\n"))), overflow="fold"))
    return printed(grid)


def printed(grid, width=None):
    """What rich draws, in the terminal's width or another one."""
    sheet = Console(file=io.StringIO(), width=width or min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()
