"""Spec strings, which name files, models and functions of the user; the functions called, what they return checked."""

import copy
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import yaml

from common.cli import ROOT, InputError

# ---- Spec strings ----------------------------------------------------------------------------------------------------

SPEC = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.+))?")


def spec_path(spec):
    """The file or directory that a spec string names, or None (a hub id, an object). Relative to the working directory,
    else to the repository, so that the embedded tasks work from any directory."""
    if not isinstance(spec, str):
        return None
    match = SPEC.fullmatch(spec)
    path = Path(os.path.expanduser(match["path"] if match else spec))
    # os.path: any text may come here, and the methods of Path raise where it is too long or ~ is no user
    found = [candidate for candidate in (path, ROOT / path) if os.path.exists(candidate)]
    if found:
        return found[0]
    return path if match else None


def load_function(spec, flag):
    """`path/to/file.py:function[:key=value,...]` -> the function with those keyword arguments. A function is returned
    as it is, None too."""
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
    """What a spec string stands for where a value and not a function is wanted: `file.py:function` is called, and so is
    a function; anything else is returned as it is. Call it before Accelerator(): a function of the user may start
    processes."""
    function = spec
    if isinstance(spec, str) and SPEC.fullmatch(spec):
        function = load_function(spec, flag)
    elif not (inspect.isroutine(spec) or isinstance(spec, functools.partial)):
        return spec
    name = getattr(spec, "__name__", spec)
    try:
        value = function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{flag} {name}: {type(error).__name__}: {error}") from error
    if value is None:
        raise InputError(f"{flag} {name} returned None")
    return value


def refuse_mistyped(name, flag):
    """InputError for a path to nothing: no name on the hub has two slashes, and asking there would take minutes."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    is_pattern = "://" in name or "*" in name  # of the library datasets
    if is_path and not is_pattern and not spec_path(name.partition(":")[0]):
        raise InputError(f"{flag} {name}: there is no such directory or file")


def load_reward(spec):
    """The function that --reward names, or None where it names a model."""
    if not isinstance(spec, str) or re.search(r"\.py(:|$)", spec):
        return load_function(spec, "--reward")
    refuse_mistyped(spec, "--reward")
    return None


# ---- Functions of the user -------------------------------------------------------------------------------------------


def call_function(function, name, rows, given):
    """Calls a reward or metric function with keyword arguments: given, and every other column of the rows as a list.

    Without **columns the function gets those that it names. Columns are copies. name: how errors call the function.
    """
    values = {}
    for column in rows[0]:
        if column in given:
            raise InputError(f"rename the column {column!r} of the rows: {name} gets something else by this name")
        if column != "prompt":
            values[column] = copy.deepcopy([row[column] for row in rows])
    values |= given
    try:
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            values = {column: values[column] for column in parameters if column in values}
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
