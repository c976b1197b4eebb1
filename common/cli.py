"""The user's side of a run: flags, spec strings, the functions that these name, and bad input of any kind."""

import copy
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
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


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main):
    """Parses sys.argv into args_class (tyro; --config FILE.yaml is expanded first) and calls main with it."""
    import tyro

    try:
        main(tyro.cli(args_class, args=expand_config(sys.argv[1:], args_class)))
    except InputError as error:
        if error.__cause__ is not None:  # the user's own code failed: where
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def launch(args, fsdp=True):
    """The Accelerator of a run. InputError for what the launcher asks and no script does.

    fsdp: whether the script can shard its model.
    """
    import torch
    from accelerate import Accelerator

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes read the weights
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: the loops accumulate
    processes = accelerator.num_processes
    if args.batch_size % processes:
        raise InputError(f"--batch-size {args.batch_size} must be a multiple of the {processes} processes")
    if accelerator.mixed_precision == "fp16":
        raise InputError("use --mixed-precision bf16 or no: fp16 is not offered")
    if accelerator.distributed_type == "FSDP":
        if not fsdp:
            raise InputError("FSDP: every process of this script trains the whole model: launch it without")
        if not accelerator.is_fsdp2 or args.merge:
            raise InputError("FSDP: set fsdp_version to 2, and leave out --merge, which needs whole weights")
    return accelerator


def expand_config(argv, args_class):
    """argv with --config FILE replaced by the flags in it, placed first, so that the command line wins over the file.

    Expanding into argv gives the file tyro's types and error messages. Words are taken as they stand there: PyYAML
    alone reads `1e-3` as a string, and `off` as False.
    """
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return argv
    path = argv[at].partition("=")[2]
    rest = argv[at + 1 :]
    if not path and rest:
        path = rest[0]
        rest = rest[1:]
    types = {field.name: field.type for field in dataclasses.fields(args_class) if field.init}
    flags = []
    seen = set()
    for key, node in yaml_entries(path):
        name = key.replace("-", "_")
        if name not in types:
            similar = difflib.get_close_matches(name, types, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise InputError(f"--config {path}: unknown key {key!r}{hint}")
        if name in seen:
            raise InputError(f"--config {path}: doubled key {key!r}")
        seen.add(name)
        flags += config_words(path, name, node, is_switch=types[name] in (bool, "bool"))
    return flags + argv[:at] + rest


def yaml_entries(path):
    """[(key, node of the value)] of a YAML file that holds a mapping."""
    try:
        document = yaml.compose(Path(path).read_text(), Loader=yaml.BaseLoader)
        if not isinstance(document, yaml.MappingNode):
            raise ValueError("it holds no mapping")
        return [(key.value, node) for key, node in document.value]
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise InputError(f"--config {path} is not a readable YAML mapping: {' '.join(str(error).split())}") from None


def config_words(path, name, node, is_switch):
    """What stands for an entry of the file on a command line. A list is one flag with several words."""
    listed = isinstance(node, yaml.SequenceNode)
    items = node.value if listed else [node]
    problems = []
    for item in items:
        nested = not isinstance(item, yaml.ScalarNode)
        if nested or (listed and item.value[:1] in ("-", "")):  # a dash in front: it would be read as a flag
            problems.append(f"--config {path}: --{name} cannot hold {item.value!r:.60}")
    stop_if(problems)
    words = []
    for item in items:
        absent = item.value in ("null", "~", "") and item.style is None
        words.append("None" if absent else str(item.value))
    if is_switch and yaml.safe_load(words[0]) in (True, False):
        return [f"--{name}" if yaml.safe_load(words[0]) else f"--no-{name}"]
    return [f"--{name}", *words]


# ---- Spec strings ----------------------------------------------------------------------------------------------------

SPEC = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.+))?")


def spec_path(spec):
    """The file or directory that a spec string names, or None (a hub id, an object). Relative to the working directory,
    else to the repository, so that the defaults work from any directory."""
    if not isinstance(spec, str):
        return None
    match = SPEC.fullmatch(spec)
    path = Path(match["path"] if match else spec).expanduser()
    for candidate in (path, ROOT / path):
        if candidate.exists():
            return candidate
    return path if match else None


def load_function(spec, flag):
    """`path/to/file.py:function[:key=value,...]` -> the function with those keyword arguments. An object is returned as
    it is, None too."""
    if not isinstance(spec, str):
        return spec
    match = SPEC.fullmatch(spec)
    if not match:
        raise InputError(f"{flag} {spec}: expected path/to/file.py:function")
    path = spec_path(spec).resolve()
    if not path.is_file():
        raise InputError(f"{flag} {spec}: there is no file {match['path']}")
    module = import_file(path, f"{flag} {spec}")
    function = getattr(module, match["name"], None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"{flag} {spec}: {path.name} has no function {match['name']!r} (it has {', '.join(public)})")
    if not match["options"]:
        return function
    keywords = {}
    for option in filter(None, match["options"].split(",")):
        key, _, value = option.partition("=")
        keywords[key] = yaml.safe_load(value)
    return functools.partial(function, **keywords)


def import_file(path, where):
    """The module of a file, imported once under a private name."""
    name = "plainrl_user_" + hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what the file imports
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{where}: importing {path.name} failed: {type(error).__name__}: {error}") from error
    return module


def build(spec, flag):
    """What a spec string stands for where a value and not a function is wanted: `file.py:function` is called, anything
    else is returned as it is. Call it before Accelerator(): it may train a model in a subprocess."""
    if not (isinstance(spec, str) and SPEC.fullmatch(spec)):
        return spec
    function = load_function(spec, flag)
    try:
        value = function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{flag} {spec}: {type(error).__name__}: {error}") from error
    if value is None:
        raise InputError(f"{flag} {spec} returned None")
    return value


# ---- Functions of the user -------------------------------------------------------------------------------------------


def call_function(function, name, rows, given):
    """Calls a reward or metric function with keyword arguments: given, and every other column of the rows as a list.

    Without **columns the function gets those that it names. Columns are copies. name: how errors call the function.
    """
    values = {}
    for column in rows[0]:
        if column != "prompt":
            values[column] = copy.deepcopy([row[column] for row in rows])
    values |= given
    parameters = inspect.signature(function).parameters.values()
    takes_columns = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for parameter in parameters:
        optional = parameter.default is not parameter.empty
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or optional:
            continue
        if parameter.name not in values:
            raise InputError(f"{name} takes {parameter.name!r}; there are {', '.join(sorted(values))}")
    if not takes_columns:
        values = {p.name: values[p.name] for p in parameters if p.name in values}
    try:
        return function(**values)
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {error}") from error


def call_reward(function, name, rows, given, lengths=None):
    """The scores of a reward function, a float for each row; or, where lengths (one a row) are given, a list of so many
    floats: one for each token of the response."""
    scores = plain(call_function(function, name, rows, given))
    if not isinstance(scores, list | tuple) or len(scores) != len(rows):
        returned = f"{len(scores)} values" if isinstance(scores, list | tuple) else type(scores).__name__
        raise InputError(f"{name} returned {returned}, expected a list of {len(rows)} numbers, one per sample")
    checked = []
    for number, score in enumerate(map(plain, scores)):
        dense = lengths is not None and isinstance(score, list) and len(score) == lengths[number]
        tokens = [plain(value) for value in score] if dense else [score]
        if not all(map(is_finite_number, tokens)):
            where = f"row {number + 1}, prompt {rows[number]['prompt']!r:.60}"
            if "outputs" in given:
                where += f", output {given['outputs'][number]!r:.60}"
            expected = "a finite number"
            if lengths is not None:
                expected += f", or one for each of the {lengths[number]} tokens"
            raise InputError(f"{name} returned {score!r:.60} for {where}; expected {expected}")
        checked.append([float(value) for value in tokens] if dense else float(score))
    return checked


def call_metric(function, name, rows, given, taken=("reward",)):
    """{column: values per row} of a metric function. taken: names that are those of other columns."""
    columns = call_function(function, name, rows, given)
    expected = f"{name} must return {{name: list of {len(rows)} finite numbers}}"
    if not isinstance(columns, dict) or not columns:
        raise InputError(f"{expected}, it returned {columns!r:.60}")
    checked = {}
    for column, values in columns.items():
        if column in taken:
            raise InputError(f"{name} must not return the name {column!r}, which is taken")
        values = plain(values)
        if not isinstance(values, list) or len(values) != len(rows) or not all(map(is_finite_number, values)):
            raise InputError(f"{expected}; {column!r} is not one")
        checked[column] = values
    return checked


def plain(value):
    """Lists and numbers in place of arrays and tensors."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_finite_number(value):
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # of a large int, too
