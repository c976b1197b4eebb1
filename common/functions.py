"""What flags name: paths, functions of the user, what they are called with and what they return."""

import asyncio
import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml

from common.errors import InputError, stop_if
from common.report import screen

ROOT = Path(__file__).resolve().parents[1]
SPEC = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.+))?")

# What parameters of functions of other libraries are called here.
PARAMETERS = {"completions": "outputs", "responses": "outputs", "queries": "prompts", "texts": "samples"}
PARAMETERS |= {"completion_ids": "output_ids", "prompts_text": "prompts", "processing_class": "tokenizer"}

# Columns of samples.jsonl whose names a metric function may not use.
TAKEN = ("step", "set", "prompt", "output", "reference", "beta", "reward", "reward_std", "diversity")
event_loop = functools.cache(asyncio.new_event_loop)  # one for all coroutines: a client that they keep belongs to it


def spec_path(spec):
    """The file or directory that a flag's text names, in the working directory or the repository, or None."""
    if not isinstance(spec, str):
        return None
    match = SPEC.fullmatch(spec)
    path = Path(os.path.expanduser(match["path"] if match else spec))
    found = filter(os.path.exists, (path, ROOT / path))  # Path.exists raises for what is too long
    return next(found, path if match else None)


def adapter_base(path, revision=None):
    """(name, revision) of the base of a LoRA adapter in a directory or on the hub; None where path is no adapter."""
    from transformers.utils.peft_utils import find_adapter_config_file  # importing peft takes seconds

    config = {}
    with contextlib.suppress(OSError, TypeError, ValueError):  # TypeError: of an object, or where there is none
        file = find_adapter_config_file(spec_path(path) or path, revision=revision)
        config = json.loads(Path(file).read_bytes())
    return config.get("base_model_name_or_path"), config.get("revision")


def say_warning(record):
    """Prints a warning of transformers, but for its table of weights: `load_weights` says what is left out."""
    if not re.search("LOAD REPORT|torchvision", record.getMessage()):
        screen.say(f"{record.levelname.lower()}: {record.getMessage()}")


library_warnings = logging.Handler()


@contextlib.contextmanager
def loading(flag, name):
    """Inside, an exception becomes an InputError with its message, and transformers prints warnings, but no bars."""
    from transformers.utils import logging as transformers_logging

    screen.show(f"loading {flag}")
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    library_warnings.emit = say_warning
    transformers_logging.add_handler(library_warnings)
    transformers_logging.set_verbosity_warning()
    if isinstance(name, str):
        is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
        if is_path and not spec_path(name):  # the libraries would take it for a name of the hub
            raise InputError(f"{flag} {name}: there is no such directory")
        if Path(name, "hf_model").is_dir():
            raise InputError(f"{flag} {name} is a run directory: give {name}/hf_model")
    try:
        yield
    except Exception as error:  # the libraries' errors have no common class
        raise InputError(f"{flag} {name!s:.400} cannot be loaded: {' '.join(str(error).split())}") from None
    finally:
        transformers_logging.set_verbosity_error()  # what follows is about calls of ours


def read_options(words, where):
    """{key: value} of words `key=value`. YAML reads the values: 3, true, 1.0e-3, or a text."""
    stop_if([f"{where}: expected key=value, not {word}" for word in words if "=" not in word])
    pairs = [word.split("=", 1) for word in words]
    keys = [key.strip() for key, _ in pairs]
    stop_if([f"{where}: {key} is given twice" for key in dict.fromkeys(keys) if keys.count(key) > 1])
    return {key.strip(): yaml.safe_load(value) for key, value in pairs}


def load_function(spec, flag):
    """The function of `path/to/file.py:function[:key=value,...]` with these arguments; a non-string as it is."""
    if not isinstance(spec, str):
        return spec
    match = SPEC.fullmatch(spec)
    path = spec_path(spec)
    if not match or not path.is_file():
        problem = f"there is no file {path}" if match else "expected path/to/file.py:function"
        raise InputError(f"{flag} {spec}: {problem}")
    function = getattr(import_file(path.resolve(), path.read_bytes()), match["name"], None)
    if not callable(function):
        raise InputError(f"{flag} {spec}: {path.name} has no function {match['name']!r}")
    options = match["options"].split(",") if match["options"] else []
    return functools.partial(function, **read_options(options, f"{flag} {spec}"))


@functools.cache
def import_file(path, source):
    """The module of a file, imported once for each version of its source. What it imports may lie beside it;
    InputError where something else has that name, as an installed library or the file of another flag."""
    sys.path.append(str(path.parent))
    # Python has put the scripts' folder first, which has a reward.py
    sys.path.sort(key=str(ROOT / "algos").__eq__)
    for other in re.findall(r"(?m)^\s*(?:from|import)\s+(\w+)", source.decode(errors="ignore")):
        beside = path.with_name(f"{other}.py")
        found = beside.exists() and importlib.util.find_spec(other).origin
        if found and os.path.realpath(found) != os.path.realpath(beside):
            raise InputError(f"{path} would import {found}, not the {beside.name} beside it: rename that one")
    name = "plainrl_user_" + hashlib.sha256(os.fsencode(f"{path}{source}")).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(spec, flag):
    """What a function or file.py:function returns; else spec. Call it before Accelerator(): it may start processes."""
    function = load_function(spec, flag) if isinstance(spec, str) and SPEC.fullmatch(spec) else spec
    is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
    return function() if is_function else spec


def accepted(function, name, row, given):
    """The names in `given` and of the row's columns that a user's function takes; InputError if it needs others."""
    columns = [column for column in row if column != "prompt"]
    others = [*given, *getattr(function, "keywords", {})]  # keywords: options behind its name
    taken = [column for column in columns if column in others]
    stop_if([f"rename the rows' column {column!r}: {name} gets something else under this name" for column in taken])
    names = [*given, *columns]
    signature = inspect.signature(function)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        names = [parameter for parameter in signature.parameters if parameter in names]
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        known = f"It gets {', '.join(given)}, and the rows' columns: {', '.join(columns) or 'none'}"
        _, missing, *_ = str(error).split("'")
        if missing in PARAMETERS:
            known = f"{missing} is called {PARAMETERS[missing]} here. {known}"
        raise InputError(f"{name}: {error}. {known}") from None
    return names


def call_function(function, name, rows, given):
    """What a user's function returns for what it takes of `given` and of the rows' columns; all lists are copies."""
    known = {column: [row[column] for row in rows] for column in rows[0]} | given
    values = {argument: known[argument] for argument in accepted(function, name, rows[0], given)}
    process = os.getpid()
    try:
        values |= {key: copy.deepcopy(value) for key, value in values.items() if isinstance(value, list)}
        with torch.enable_grad():  # for one that trains something of its own
            result = function(**values)
        if inspect.iscoroutine(result):
            finish = event_loop().run_until_complete
            is_notebook = asyncio._get_running_loop()  # elsewhere Ctrl-C must reach the coroutine
            with ThreadPoolExecutor(1) as pool:
                result = pool.submit(finish, result).result() if is_notebook else finish(result)
    except Exception as error:
        error.add_note(f"in a call of {name}")  # a traceback says it last
        raise
    finally:
        if os.getpid() != process:  # a child that the function forked, which must not go on as a process of the run
            os._exit(1)
    return result


def call_reward(function, name, rows, given, lengths=None):
    """(scores, others) of a reward function: a float per row, or if lengths are given, also a list with one per token
    of the response. others: {column: values per row} if it returned these beside "score"."""
    scores = call_function(function, name, rows, given)
    others = dict(scores) if isinstance(scores, dict) else {}
    scores = others.pop("score", scores)
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if not isinstance(scores, list | tuple) or len(scores) != len(rows):
        returned = f"a list of {len(scores)}" if isinstance(scores, list | tuple) else type(scores).__name__
        raise InputError(f"{name} returned {returned}, expected a list of {len(rows)} numbers, one per sample")
    pairs = zip(scores, lengths or [None] * len(rows), strict=True)
    checked = [floats(score, length, torch.float32) for score, length in pairs]
    if None in checked:
        number = checked.index(None)
        end = rows[number]["prompt"][-60:]  # chats begin alike
        dense = f", or one for each of the {lengths[number]} tokens" if lengths else ""
        found = f"{name} returned {scores[number]!r:.60} for row {number + 1}, whose prompt ends in {end!r}"
        raise InputError(f"{found}; expected a finite number{dense}, at most as large as float32 has")
    return checked, checked_columns(name, others, len(rows))


def call_metric(function, name, rows, given):
    return checked_columns(name, call_function(function, name, rows, given), len(rows))


def checked_columns(name, columns, count):
    """{column: values per row} with lists of floats, or InputError."""
    expected = f"{name} must return {{name: list of {count} finite numbers}}"
    if not isinstance(columns, dict):
        raise InputError(f"{expected}; it returned {columns!r:.60}")
    checked = {column: floats(values, count) for column, values in columns.items()}
    for column, values in checked.items():
        if column in TAKEN or not isinstance(values, list):
            returned = f"it returned {column!r}: {columns[column]!r:.60}"
            raise InputError(f"{expected}; {returned} (taken names: {', '.join(TAKEN)})")
    return checked


def floats(value, count=None, kind=torch.float64):
    """A number that is finite in a type, as a float, or a list or array of `count` of them, as a list; else None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # texts, lists of unequal lengths and so on
        return None
    is_right = numbers.shape in ((), (count,)) and numbers.to(kind).isfinite().all()
    return numbers.tolist() if is_right else None
