"""The command line: flags, YAML files of flags, --help, names that flags have elsewhere, bad input."""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import os
import re
import signal
import sys
import textwrap
import traceback
import typing
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


def stop_if(problems):
    """Raises one InputError for all problems (sentences), if there are any, so that a user mends a command once."""
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError("\n  - ".join([f"{len(problems)} problems:", *problems]))


def flag_of(name):
    """The flag of a field."""
    return "--" + name.replace("_", "-")


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main, task=None):
    """Parses sys.argv into args_class and calls main with it. task: see `parse`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without
    try:
        if {"-h", "--help"} & set(sys.argv):
            with contextlib.suppress(BrokenPipeError):  # `| head`
                print(help_text(args_class), end="", flush=True)
            return
        main(parse(sys.argv[1:], args_class, task))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except InputError as error:
        if error.__cause__ is not None:  # the user's own code failed: where
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(argv, args_class, task=None):
    """args_class, filled by the words of a command line (tyro), behind those of the YAML files named by --config.

    task: the YAML file of an embedded task, taken where none of --model, --dataset and --config is given. Flags that a
    copy of the script has no more are left out of it.
    """
    import tyro

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    files, words = parser.parse_known_args(argv)
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    refuse_other_names(sorted(flags), args_class)
    fields = {field.name for field in dataclasses.fields(args_class)}
    if task and not files.config and flags.isdisjoint(("--model", "--dataset")) and (ROOT / task).exists():
        settings = read_config(task)
        kept = {name: value for name, value in settings.items() if name in fields}
        args = tyro.cli(args_class, args=words_of(kept, args_class, task) + words)
        if os.environ.get("RANK", "0") == "0":
            print(f"no --model, --dataset or --config: the embedded task, by --config {task}; own flags win")
            print("  " + ", ".join(f"{name} {value}" for name, value in kept.items()), flush=True)
            if kept != settings:
                print(f"  left out, as there is no such flag here: {', '.join(settings.keys() - fields)}", flush=True)
        return args
    in_front = []
    for path in files.config:
        settings = read_config(path)
        unknown = [flag_of(name) for name in settings if name not in fields]
        refuse_other_names(unknown, args_class, f"--config {path}: ")
        stop_if([f"--config {path}: there is no flag {flag}" for flag in unknown])
        in_front += words_of(settings, args_class, path)
    return tyro.cli(args_class, args=in_front + words)


def from_task(args_class, task, **fields):
    """args_class as a command without flags fills it, by the YAML file of an embedded task, but for these fields."""
    return dataclasses.replace(parse(["--config", task], args_class), **fields)


# ---- Files of flags --------------------------------------------------------------------------------------------------


def read_config(path):
    """{field: text, or list of texts} of a YAML file. A path that is not found is tried in the repository.

    Texts stay as they stand there: PyYAML alone reads `1e-3` as a text and `off` as False, where tyro knows the types.
    """
    file = Path(path) if Path(path).exists() else ROOT / path
    try:
        text = file.read_text()
        entries = yaml.load(text, Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise InputError(f"--config {path} must hold lines like `lr: 1e-5`")
    names = [name.replace("-", "_") for name in re.findall(r"(?m)^([\w-]+) *:", text)]
    doubled = [name for name in set(names) if names.count(name) > 1]  # PyYAML takes the last one without a word
    stop_if([f"--config {path}: {name} is given twice" for name in doubled])
    return {str(key).replace("-", "_"): value for key, value in entries.items()}


def words_of(settings, args_class, path):
    """The settings of the file at path as words of a command line."""
    types = {field.name: field.type for field in dataclasses.fields(args_class)}
    words = []
    for name, value in settings.items():
        if types[name] is bool:
            is_on = yaml.safe_load(str(value))
            if not isinstance(is_on, bool):
                raise InputError(f"--config {path}: {name} must be true or false, it is {value!r}")
            words.append(flag_of(name if is_on else f"no_{name}"))
        elif isinstance(value, list):
            words += [flag_of(name), *map(str, value)]
        else:
            words += [flag_of(name), "None" if value in ("null", "~") else str(value)]
    return words


# ---- Names that flags have elsewhere ---------------------------------------------------------------------------------


def refuse_other_names(flags, args_class, where=""):
    """InputError with the advice of algos/MIGRATION.md for each flag that the script lacks and a row of it names."""
    fields = {flag_of(field.name) for field in dataclasses.fields(args_class)}
    script = Path(inspect.getfile(args_class)).stem
    problems = []
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        advice = advice_on(name, fields, script)
        if advice and flag_of(name) not in fields:
            problems.append(f"{where}there is no {flag} here: {advice}")
    stop_if(problems)


def advice_on(name, fields, script):
    """What algos/MIGRATION.md advises for a name of TRL or trlX in a script with these flags; "" where no row fits.

    A row fits whose flags the script has; one without flags must stand in the script's section, or in that of all.
    Notes of other sections are about other scripts.
    """
    page = ROOT / "algos/MIGRATION.md"
    text = page.read_text() if page.exists() else ""  # a script in a single file has none
    fitting = []
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:].removesuffix(".py")
        theirs, here, note, *_ = [*line.strip("| ").split(" | "), "", ""]
        if not line.startswith("|") or not re.search(rf"[`.]{re.escape(name)}`", theirs):
            continue
        flags = set(re.findall(r"--[a-z0-9-]+", here))
        is_own = bool(re.search(rf"(?<![a-z]){section}", script))  # of my_dpo.py, too, not of ddpo.py
        is_shared = section == "Every script"
        if flags <= fields and (flags or is_own or is_shared):
            advice = "it is gone" if here == "gone" else f"use {here.replace('`', '')}"
            fit = bool(flags), is_own, f"`{name}`" in theirs, is_shared
            fitting.append((fit, f"{advice}. {note}" if note and (is_own or is_shared) else advice))
    return max(fitting, key=lambda row: row[0], default=("", ""))[1]


# ---- Help ------------------------------------------------------------------------------------------------------------

LONGEST_VALUES = 50  # characters; longer lists of choices stand in the text


def help_text(args_class):
    """The flags of Args with types, defaults and docstrings: what must be given, its own ones, those of each base."""
    parser = argparse.ArgumentParser(
        prog=Path(inspect.getfile(args_class)).name,
        usage="%(prog)s [flags]",
        description=inspect.getdoc(args_class),
        add_help=False,
    )
    groups = {"must be given, but for the embedded task": list(args_class.required), "algorithm": []}
    texts = {}
    for base in filter(dataclasses.is_dataclass, reversed(args_class.__mro__)):
        title = "algorithm" if base is args_class else inspect.getdoc(base).lower().rstrip(".")
        written = docstrings(base)
        groups[title] = [name for name in written if name not in texts and name not in args_class.required]
        texts |= written
    hints = typing.get_type_hints(args_class)
    defaults = {field.name: field.default for field in dataclasses.fields(args_class)}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            flag = flag_of(f"no_{name}" if defaults[name] is True else name)
            group.add_argument(flag, **help_options(texts[name], hints[name], defaults[name]))
    return parser.format_help()


def docstrings(base):
    """{field: the docstring below it} of the fields that are written in a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
    texts = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign):
            texts[node.target.id] = inspect.cleandoc(below.value.value)
    return texts


def help_options(text, hint, default):
    """The help of a flag, for argparse."""
    if hint is bool:
        return {"action": "store_true", "help": f"Switches off: {text}" if default else text}
    values = values_of(hint)
    if len(values) > LONGEST_VALUES:
        text += f" One of {values[1:-1].replace(',', ', ')}."
        values = "NAME"
    if default not in (None, ()):
        text += f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]"
    return {"metavar": values, "help": text.replace("%", "%%")}


def values_of(hint):
    """What stands behind a flag of this type, such as INT or {a,b}."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(members) + "}"
    if members:
        return " ".join(map(values_of, members))
    return {int: "INT", float: "FLOAT", ...: "..."}.get(hint, "TEXT")
