"""The command line: flags, YAML files of flags, --help, other libraries' names of flags, bad input."""

import argparse
import dataclasses
import inspect
import os
import re
import signal
import sys
import typing
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


def stop_if(problems):
    """Raises one InputError for all problems (sentences), if any, so that a user can fix a command in one go."""
    if len(problems) > 1:
        problems = [f"{len(problems)} problems:", *problems]
    if problems:
        raise InputError("\n  - ".join(problems))


def flag_of(name):
    """The flag for a field."""
    return "--" + name.replace("_", "-")


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main, task=None):
    """Parses sys.argv into args_class and calls main with it. task: see `parse`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    try:
        if {"-h", "--help"} & set(sys.argv):
            print(help_text(args_class, everything="all" in sys.argv), end="")
            return
        main(parse(sys.argv[1:], args_class, task))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except InputError as error:
        from common.report import wrapped

        print(wrapped([f"error: {error}"]), file=sys.stderr)
        sys.exit(2)


def parse(argv, args_class, task=None):
    """args_class, filled from the words of a command line (tyro), which override the YAML files named by --config.
    task: the YAML file of an embedded task, used if none of --model, --dataset and --config is given."""
    import tyro

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    files, words = parser.parse_known_args(argv)
    flags = {word.partition("=")[0] for word in argv}
    takes_task = task and flags.isdisjoint(("--model", "--dataset", "--config")) and (ROOT / task).exists()
    paths = [task] if takes_task else files.config
    settings = {}
    for path in paths:
        settings |= read_config(path)
    if takes_task:  # a copy of the script may lack some of its flags
        settings = {name: value for name, value in settings.items() if hasattr(args_class, name)}
    words = words_of(settings, args_class) + words
    refuse_other_names(words, args_class, script=Path(task or "").stem)
    prog = " --config ".join([Path(sys.argv[0]).name, *paths])  # so that tyro's errors name the files
    args = tyro.cli(args_class, prog=prog, args=words)
    if takes_task and os.environ.get("RANK", "0") == "0":
        print("no --model, --dataset or --config: running the embedded task, as set in")
        print(f"{task}; flags override them", flush=True)
    return args


def from_task(args_class, task, **fields):
    """args_class with the settings of an embedded task's YAML file, as in a command without flags, and these fields."""
    return dataclasses.replace(parse(["--config", task], args_class), **fields)


# ---- Files of flags --------------------------------------------------------------------------------------------------


def read_config(path):
    """{field: text, or list of texts} of a YAML file. A path that is not found is tried in the repository. Values stay
    texts, because tyro knows the types: PyYAML would read `1e-3` as a text and `off` as False."""
    file = Path(path) if Path(path).exists() else ROOT / path
    try:
        text = file.read_text()
        entries = yaml.load(text, Loader=yaml.BaseLoader).items()
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"--config {path} cannot be read as lines like `lr: 1e-5`: {problem}") from None
    names = [name.replace("-", "_") for name in re.findall(r"(?m)^([\w-]+) *:", text)]
    # PyYAML silently takes the last one
    stop_if([f"--config {path}: {name} is given twice" for name in set(names) if names.count(name) > 1])
    return {name.replace("-", "_"): value for name, value in entries}


def words_of(settings, args_class):
    """Settings from files as words of a command line."""
    switches = [field.name for field in dataclasses.fields(args_class) if field.type is bool]
    words = []
    for name, value in settings.items():
        is_on = yaml.safe_load(str(value)) if name in switches else None
        if isinstance(is_on, bool):
            words.append(flag_of(name if is_on else f"no_{name}"))
        elif isinstance(value, list):
            words += [flag_of(name), *map(str, value)]
        else:
            words += [flag_of(name), "None" if value in ("null", "~") else str(value)]
    return words


# ---- Names that flags have elsewhere ---------------------------------------------------------------------------------


def refuse_other_names(words, args_class, script=""):
    """InputError for each flag that the script lacks but TRL, trlX or another of our scripts has. For TRL's and trlX's
    names it quotes a row of algos/MIGRATION.md: from the script's section, else from that of all scripts, else from
    another's."""
    fields = {flag_of(field.name) for field in dataclasses.fields(args_class)}
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    page = ROOT / "algos/MIGRATION.md"
    text = page.read_text() if page.exists() else ""  # a script in a single file has no such page
    sections = dict(section.partition("\n")[::2] for section in text.split("\n## "))
    near = [f"{script}.py", "Every script"]
    advice = {}

    def read_section(title):
        for theirs, here, note in re.findall(r"(?m)^\| (.*?) \| (.*?) \| ?(.*?) ?\|$", sections.get(title, "")):
            named = re.findall("--[a-z0-9-]+", here)
            row = f"{here.replace('`', '')}. {note}".rstrip(". ")
            is_here = fields.issuperset(named)
            if not is_here:
                row = f"{title} has {row}"
            if (is_here or title not in near) and (named or title in near):
                for name in re.findall(r"`(?:\w+Config\.)?(\w+)`", theirs):
                    advice.setdefault(flag_of(name), f"algos/MIGRATION.md says: {row}")

    for title in near:
        read_section(title)
    for path in sorted(ROOT.glob("algos/*.py")):
        own_flags = "".join(re.findall(r"(?ms)^class Args\b.*?(?=^\S|^    def )", path.read_text()))
        for name in re.findall(r"(?m)^    (\w+): .* = ", own_flags):
            advice.setdefault(flag_of(name), f"it is a flag of {path.name}")
    for title in sections:
        read_section(title)
    foreign = sorted(flags & advice.keys() - fields)
    stop_if([f"there is no {flag} here; {advice[flag]}" for flag in foreign])


# ---- Help ------------------------------------------------------------------------------------------------------------

DEFAULTS = """The defaults are for pretrained models. Without --model, --dataset or --config, the script runs its
embedded task with that task's settings. --config FILE reads flags from a YAML file; your other flags override it."""


def help_text(args_class, everything):
    """The flags of Args with types, defaults and docstrings: required ones, the script's own, and those of each base
    class, or the names of these groups."""
    import docstring_parser  # comes with tyro

    groups = {"required, except for the embedded task": list(args_class.required), "algorithm": []}
    texts = {}
    for base in filter(dataclasses.is_dataclass, reversed(args_class.__mro__)):
        title = "algorithm" if base is args_class else inspect.getdoc(base).lower().rstrip(".")
        written = {entry.arg_name: entry.description for entry in docstring_parser.parse_from_object(base).params}
        groups[title] = [name for name in written if name not in texts and name not in args_class.required]
        texts |= written
    parser = argparse.ArgumentParser(Path(inspect.getfile(args_class)).name, "%(prog)s [flags]", add_help=False)
    parser.description = f"{inspect.getdoc(args_class)} {DEFAULTS}"
    hints = typing.get_type_hints(args_class)
    shared = [*groups][2:]
    if not everything:
        parser.epilog = f"--help all also lists the flags that scripts share: {', '.join(shared)}."
        groups = {title: groups[title] for title in groups if title not in shared}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            flag = flag_of(name)
            text = texts[name].replace("%", "%%")
            default = getattr(args_class, name, None)
            if default is True:
                flag = flag_of(f"no_{name}")
                text = f"Turns this off: {text}"
            if hints[name] is not bool and default not in (None, (), ""):
                text += f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]"
            group.add_argument(flag, metavar=values_of(hints[name]), help=text)
    return parser.format_help()


def values_of(hint):
    """What help shows after a flag of this type, such as INT or {a,b}."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(members) + "}"
    if members:
        return " ".join(map(values_of, members))
    return {bool: "", int: "INT", float: "FLOAT", ...: "..."}.get(hint, "TEXT")
