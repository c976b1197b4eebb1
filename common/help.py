"""--help: the flags of a script in the groups of its Args, which are its comments `# ---- name`."""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from pathlib import Path

LONGEST_VALUES = 50  # characters; longer lists of choices stand in the text


def help_text(args_class):
    """The flags of a dataclass with their values, defaults and docstrings, wrapped at the terminal's width."""
    source = textwrap.dedent(inspect.getsource(args_class))
    parser = argparse.ArgumentParser(
        prog=Path(inspect.getfile(args_class)).name,
        usage="%(prog)s [flags]",
        description=inspect.getdoc(args_class),
        add_help=False,
    )
    group = parser
    headings = {number: name for number, name in numbered_headings(source)}
    hints = typing.get_type_hints(args_class)
    defaults = {field.name: field.default for field in dataclasses.fields(args_class) if field.init}
    body = ast.parse(source).body[0].body
    for node, below in zip(body, body[1:], strict=False):
        for number in [number for number in headings if number < node.lineno]:
            group = parser.add_argument_group(headings.pop(number))
        if not isinstance(node, ast.AnnAssign) or node.target.id not in defaults:
            continue
        name = node.target.id
        default = defaults[name]
        flag = "--" + name.replace("_", "-")
        text = inspect.cleandoc(below.value.value)
        values = values_of(hints[name])
        if len(values) > LONGEST_VALUES:
            text += f" One of {values[1:-1].replace(',', ', ')}."
            values = "NAME"
        options = {"metavar": values}
        if hints[name] is bool:
            options = {"action": "store_true"}
            if default:
                flag = "--no-" + flag[2:]
                text = f"Switches off: {text}"
        elif isinstance(default, tuple) and default:
            text += f" [{' '.join(map(str, default))}]"
        elif default not in (None, ()):
            text += f" [{default}]"
        group.add_argument(flag, help=text.replace("%", "%%"), **options)
    return parser.format_help()


def numbered_headings(source):
    """(line number, name) of the comments `# ---- name`."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.fullmatch(r"\s*# ---- (.+?)(?: -+)?", line):
            yield number, match[1]


def values_of(hint):
    """What stands behind a flag of this type, such as INT or {a,b}."""
    origin = typing.get_origin(hint)
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if origin is typing.Annotated:
        return values_of(members[0])
    if origin is typing.Literal:
        return "{" + ",".join(map(str, members)) + "}"
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(values_of, members))
    if origin is tuple:
        return " ".join(map(values_of, members))
    if hint is Ellipsis:
        return "..."
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(hint, getattr(hint, "__name__", "VALUE").upper())
