"""What a run shows on the terminal."""

import io
import shutil


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
    screen = console.Console(file=io.StringIO(), width=min(120, shutil.get_terminal_size().columns))
    screen.print(grid)
    return screen.file.getvalue().rstrip()


def cell_text(value):
    """A cell of the table of samples."""
    if isinstance(value, float):
        return f"{value:.3g}"
    value = visible(str(value))
    return value if len(value) < 200 else value[:200] + "..."
