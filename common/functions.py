"""Spec strings, which name the user's files, models and functions; calling them and checking what they return."""

import asyncio
import copy
import functools
import hashlib
import importlib.util
import inspect
import operator
import os
import re
import sys
from pathlib import Path

import yaml

from common.cli import ROOT, InputError, stop_if

# ---- Spec strings ----------------------------------------------------------------------------------------------------

SPEC = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.+))?")


def spec_path(spec):
    """The file or directory that a spec string names, in the working directory or the repository; None for a hub id or
    an object."""
    if not isinstance(spec, str):
        return None
    match = SPEC.fullmatch(spec)
    path = Path(os.path.expanduser(match["path"] if match else spec))
    for candidate in (path, ROOT / path):
        if os.path.exists(candidate):  # Path.exists raises for what is too long
            return candidate
    return path if match else None


def load_function(spec, flag):
    """The function of `path/to/file.py:function[:key=value,...]` with these arguments; a non-string as it is."""
    if not isinstance(spec, str):
        return spec
    match = SPEC.fullmatch(spec)
    path = spec_path(spec)
    if not match or not path.is_file():
        raise InputError(f"{flag} {spec}: expected path/to/file.py:function of a file that exists")
    module = import_file(path.resolve(), path.read_bytes())
    function = getattr(module, match["name"], None)
    if not callable(function):
        raise InputError(f"{flag} {spec}: {path.name} has no function {match['name']!r}")
    options = re.sub(r"(^|,)\s*(\w+)=", r"\1\2: ", match["options"] or "")
    try:
        keywords = yaml.safe_load("{" + options + "}")
    except yaml.YAMLError:
        raise InputError(f"{flag} {spec}: expected key=value,... after the function") from None
    return functools.partial(function, **keywords)


@functools.cache
def import_file(path, source):
    """The module of a file, imported under its own name, once for each version of its source."""
    sys.path.append(str(path.parent))  # for what the file imports
    name = "plainrl_user_" + hashlib.sha256(f"{path}{source}".encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(spec, flag):
    """Calls `file.py:function` or a function and returns its value; returns anything else unchanged. Call it before
    Accelerator(): a user's function may start processes."""
    function = spec
    if isinstance(spec, str) and SPEC.fullmatch(spec):
        function = load_function(spec, flag)
    elif not (inspect.isroutine(spec) or isinstance(spec, functools.partial)):
        return spec
    value = function()
    if value is None:
        raise InputError(f"{flag} {getattr(spec, '__name__', spec)} returned None")
    return value


# ---- Functions of the user -------------------------------------------------------------------------------------------


def call_function(function, name, rows, given):
    """Calls a user's function with keyword arguments: those in `given`, and the rows' other columns as lists. All lists
    are copies. Without **columns it gets only what it names. A coroutine is run. name: its name in errors."""
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    taken = columns.keys() & given.keys()
    stop_if([f"rename the rows' column {column!r}: {name} gets something else under this name" for column in taken])
    values = columns | given
    values |= {name: copy.deepcopy(value) for name, value in values.items() if isinstance(value, list)}
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in values:
            known = f"neither what a function gets ({', '.join(given)}) nor a column of the rows ({', '.join(rows[0])})"
            raise InputError(f"{name} needs {parameter.name!r}, which is {known}: see --dataset and --eval-dataset")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        values = {column: values[column] for column in parameters if column in values}
    process = os.getpid()
    try:
        result = function(**values)
        if inspect.iscoroutine(result):
            result = event_loop(process).run_until_complete(result)
        return result
    except asyncio.CancelledError as error:  # not an Exception, so nothing else catches it
        raise RuntimeError(f"{name} was cancelled") from error
    except SystemExit as error:
        if os.getpid() != process:  # a child that the function forked: Python's own exit can hang in it
            os._exit(error.code if isinstance(error.code, int) else bool(error.code))
        if isinstance(error.code, int) and error.code > 128:  # a signal came: Run._on_signal
            raise
        # it would end the run as if it had succeeded
        raise RuntimeError(f"{name} called sys.exit: {error}") from error


@functools.cache
def event_loop(process):
    """The event loop of all coroutines of a process: a client that they keep belongs to one loop."""
    return asyncio.new_event_loop()


def call_reward(function, name, rows, given, lengths=None):
    """(scores, others) of a reward function: one float per row, or, if lengths (one per row) are given, a list with one
    float per token of the response. others: {column: values per row} if it returned these beside "score"."""
    scores = call_function(function, name, rows, given)
    others = {}
    if isinstance(scores, dict) and "score" in scores:
        others = checked_columns(name, {column: x for column, x in scores.items() if column != "score"}, len(rows))
        scores = scores["score"]
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if not isinstance(scores, list | tuple) or len(scores) != len(rows):
        returned = f"{len(scores)} values" if isinstance(scores, list | tuple) else type(scores).__name__
        raise InputError(f"{name} returned {returned}, expected a list of {len(rows)} numbers, one per sample")
    checked = []
    for number, score in enumerate(scores):
        checked.append(floats(score, lengths and lengths[number]))
        if checked[-1] is None:
            where = f"row {number + 1}, prompt {rows[number]['prompt']!r:.60}"
            dense = f", or one for each of the {lengths[number]} tokens" if lengths else ""
            raise InputError(f"{name} returned {score!r:.60} for {where}; expected a finite number{dense}")
    return checked, others


# Columns of samples.jsonl whose names a metric function may not use.
TAKEN = ("step", "set", "prompt", "output", "reference", "beta", "reward", "reward_std", "diversity")


def call_metric(function, name, rows, given):
    """{column: values per row} of a metric function."""
    columns = call_function(function, name, rows, given)
    if not isinstance(columns, dict) or not columns:
        expected = f"{name} must return {{name: list of {len(rows)} finite numbers}}"
        raise InputError(f"{expected}; it returned {columns!r:.60}")
    return checked_columns(name, columns, len(rows))


def checked_columns(name, columns, count):
    """{column: values per row} with lists of floats, or InputError. name: of the function that returned it."""
    expected = f"{name} must return {{name: list of {count} finite numbers}}"
    checked = {column: floats(values, count) for column, values in columns.items()}
    for column, values in checked.items():
        if not isinstance(values, list) or not isinstance(column, str):
            raise InputError(f"{expected}; {column!r}: {columns[column]!r:.60} is not that")
        if column in TAKEN:
            raise InputError(f"{name} returned a metric with the name {column!r}, which is taken: choose another name")
    return checked


def call_rollout(function, name, rows, given, sampled):
    """(responses, {column: values per row}) of a rollout function; a response is a list of segments (ids, trained), cut
    to max_new_tokens. sampled: per row all (context, ids) that `sample` has returned in this call. A trained segment is
    made of parts of these, each at its place; a row for which nothing was sampled may come from another engine."""
    value = call_function(function, name, rows, given)
    responses, columns = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    expected = (
        f"{name} must return a list of {len(rows)} lists of (ids, trained), or a pair of that and {{column: list}}"
    )
    if not isinstance(responses, list) or not isinstance(columns, dict) or len(responses) != len(rows):
        raise InputError(f"{expected}; it returned {value!r:.60}")
    for column, values in columns.items():
        if not isinstance(values, list) or len(values) != len(rows):
            raise InputError(f"{expected}; the column {column!r} does not have one value per row")
        if column in rows[0]:
            raise InputError(f"{name} returned a column {column!r}, which the rows already have: choose another name")
    vocabulary = len(given["model"].get_input_embeddings().weight)
    checked = []
    for row, segments, known, before in zip(rows, responses, sampled, map(list, given["prompt_ids"]), strict=True):
        where = f"{name}, prompt {row['prompt']!r:.60}"
        room = given["max_new_tokens"]
        checked.append([])
        try:
            segments = [([*map(operator.index, ids)], bool(trained)) for ids, trained in segments]
        except (TypeError, ValueError):
            raise InputError(f"{expected}; for prompt {row['prompt']!r:.60}: {segments!r:.60}") from None
        for ids, trained in segments:
            after = [*before, *ids]
            if any(not 0 <= token < vocabulary for token in ids):
                raise InputError(f"{where}: an id is not one of the model's {vocabulary}")
            if trained and known and sampled_part(before, after, known) != after:
                raise InputError(
                    f"{where}: trained ids that `sample` did not return behind exactly the ids before them"
                )
            checked[-1].append((ids[:room], trained))
            room -= len(checked[-1][-1][0])
            before = after
        if not any(ids and trained for ids, trained in checked[-1]):
            raise InputError(f"{where}: no trained ids within --max-new-tokens")
    return checked, columns


def sampled_part(before, after, sampled):
    """`before`, and as much more of `after` as was sampled after it. sampled: all (context, ids)."""
    for context, ids in sampled:
        whole = [*context, *ids]
        if len(context) <= len(before) and whole[: len(before)] == before:
            before = os.path.commonprefix([whole, after])
    return before


def floats(value, count=None):
    """A finite number as a float, or a list or array of `count` of them as a list; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        values = [floats(item) for item in value]
        return values if len(values) == count and None not in values else None
    is_finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max  # of a large int, too
    return float(value) if is_finite else None
