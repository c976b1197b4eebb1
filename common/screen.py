"""What a run shows on the terminal: one live line of what it does at the moment, and tables of samples."""

import contextlib
import io
import os
import shutil
import sys
import threading
import time

REDRAW = 0.2  # seconds between two pictures of the live line
REPORT = 30  # seconds between two plain lines about a long activity, where there is no terminal


class Screen:
    """The live line of this process: the activity, how far it is, and the newest metrics. A thread draws it, so that it
    lives while other code works. On a terminal, and of the first process of a machine, alone."""

    def __init__(self):
        self.stream = sys.stderr
        self.main = os.environ.get("LOCAL_RANK", "0") == "0"
        self.live = False
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.headline = ""
        self.metrics = ""
        self.activity = ""

    def start(self):
        """Draws from now on, if there is a terminal."""
        self.stream = sys.stderr
        # both: `| tee log` would print into the line, and the log would have no progress
        if self.live or not self.main or not (os.isatty(1) and os.isatty(2)):
            return
        self.live = True
        self.ended.clear()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while not self.ended.wait(REDRAW):
            self.draw()

    def stop(self):
        """Clears the line."""
        self.ended.set()
        with self.lock:
            self.clear()
            self.live = False
        self.headline = ""
        self.metrics = ""

    def show(self, activity, total=0, unit="rows"):
        """Says what begins: so many units of it are to be done; `advance` counts them."""
        with self.lock:
            self.activity = activity
            self.total = total
            self.unit = unit
            self.done = 0
            self.tokens = 0
            self.begin = time.monotonic()
            self.reported = self.begin
            self.draw()

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
        self.draw()
        now = time.monotonic()
        if not self.live and self.main and now - self.reported > REPORT:
            self.reported = now
            self.say(self.progress())

    @contextlib.contextmanager
    def counts_tokens(self, model):
        """Within it every forward pass of the model adds a token for each of its rows."""

        def count(module, inputs, options):
            ids = options.get("decoder_input_ids", options.get("input_ids"))
            if ids is not None:
                self.tokens += len(ids)

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def progress(self):
        """The activity in words."""
        seconds = time.monotonic() - self.begin
        parts = [self.activity]
        if self.total:
            parts[0] += f" {min(self.done, self.total):,}/{self.total:,} {self.unit}"
        if self.tokens and seconds > 0.5:
            parts.append(f"{self.tokens / seconds:,.0f} tokens/s")
        parts.append(f"{seconds:.0f} s")
        return ", ".join(parts)

    def draw(self):
        """Writes the line anew: what fits into the width of the terminal, whole parts, the most important first."""
        if not self.live:
            return
        with self.lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            width = (os.get_terminal_size(self.stream.fileno()).columns or 80) - 1  # some have no size
            text = ""
            for part in filter(None, [self.headline, self.progress(), *self.metrics.split(" | ")]):
                longer = f"{text} | {part}" if text else part
                if len(longer) > width:
                    break
                text = longer
            # the cursor goes back, so that what other code prints replaces the line
            self.stream.write(f"\r\x1b[2K{text}\r")
            self.stream.flush()

    def clear(self):
        if self.live:
            with contextlib.suppress(OSError, ValueError):
                self.stream.write("\r\x1b[2K")
                self.stream.flush()

    def say(self, text):
        """Prints text above the line."""
        with self.lock, contextlib.suppress(BrokenPipeError):  # `| head`
            self.clear()
            print(text, flush=True)
            self.draw()


screen = Screen()


def visible(text):
    """text with control characters, escape sequences and lone surrogates written out, safe to print."""
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def table_of(rows, title):
    """Rows, dicts of equal keys, as the text of a table."""
    from rich import box, console, table, text

    grid = table.Table(*rows[0], box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*(text.Text(cell_text(value)) for value in row.values()))
    # not to stdout, since rich ends the process where that is closed
    sheet = console.Console(file=io.StringIO(), width=min(120, shutil.get_terminal_size().columns))
    sheet.print(grid)
    return sheet.file.getvalue().rstrip()


def cell_text(value):
    """A cell of the table of samples."""
    if isinstance(value, float):
        return f"{value:.3g}"
    value = visible(str(value))
    return value if len(value) < 200 else value[:200] + "..."
