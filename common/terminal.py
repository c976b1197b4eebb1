"""What the terminal shows: the live line, tables, and text that is safe to print."""

import contextlib
import io
import math
import os
import shutil
import time

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

QUIET_SECONDS = 30  # after which a long part says how far it is, where there is no live line
LONGEST_CELL = 200  # characters of a sample in a table
WIDEST = 4000  # characters of a line of a table in markdown, so that rows are lines and no cell is cut


class Screen:
    """The live line of this process: the activity, its progress, and the newest metrics. Only if output and errors go
    to a terminal, and only in the first process of a machine. Elsewhere that process says it after long silence."""

    def __init__(self):
        self.live = None
        self.said = math.inf  # when something was said last
        self.headline = ""
        self.metrics = ""
        self.show("")

    def start(self):
        """Starts drawing, if there is a terminal."""
        if self.live or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        self.said = time.monotonic()
        if not (os.isatty(1) and os.isatty(2)):  # both: `| tee log` would print into the line
            return
        self.live = Live(get_renderable=self.line, refresh_per_second=5, transient=True)
        self.live.start()
        self.live.console.show_cursor()  # rich hides it, and a killed process cannot bring it back

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
        if not self.live and time.monotonic() - self.said > QUIET_SECONDS:
            self.say(self.line().plain)

    def line(self):
        """The line for rich: the most important part first, cut at the terminal's width."""
        count = f" {round(self.done, 1):,}/{self.total:,}" if self.total else ""
        activity = f"{self.activity}{count}, {time.monotonic() - self.begin:.0f} s"
        text = " | ".join(filter(None, [self.headline, activity, self.metrics]))
        return Text(text, no_wrap=True, overflow="ellipsis")

    def say(self, text):
        """Prints text above the line, in the first process of all; what is not printable in it, but the ends of lines,
        is written out."""
        if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
            return
        text = "\n".join(map(visible, text.split("\n")))
        self.said = max(self.said, time.monotonic())
        try:
            if self.live:
                self.live.console.print(Text(text), soft_wrap=True)  # so that copied text has no line breaks of ours
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
    """A cell of a table: numbers with three digits, texts as one line, long ones without their middle: the question of
    a chat is at the end of its prompt."""
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
    sheet = Console(file=io.StringIO(), width=width or min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()
