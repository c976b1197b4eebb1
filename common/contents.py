"""What files and objects of the user consist of, so that a run is only taken for the same where all of it is.

Of a Python file: itself and the user's files that it imports. Of an object: its parts; of a function: what it reads,
too. Python, installed packages and common/ do not belong to the user.
"""

import ast
import contextlib
import copyreg
import dis
import functools
import hashlib
import json
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from common.checkpoint import sha256
from common.cli import ROOT

LIBRARIES = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]

# Fields of every torch module, and those in which transformers notes what it does; `settings` has the configuration.
MODULE_FIELDS = {*vars(torch.nn.Module()), "config", "generation_config", "warnings_issued"} - {"_buffers"}

# ---- Files -----------------------------------------------------------------------------------------------------------


def with_imports(path):
    """A Python file and the files of the user that it imports, in functions, too, and through others. A name that is
    put together while the program runs (importlib) is not found."""
    files = []
    waiting = [path]
    while waiting:
        file = waiting.pop(0).resolve()
        if file in files:
            continue
        files.append(file)
        with contextlib.suppress(SyntaxError, ValueError):  # an extension in C, or a file that nobody can import
            for node in ast.walk(ast.parse(file.read_bytes())):
                waiting += files_of_import(node, file)
    return files


def files_of_import(node, file):
    """The user's files that a node of a file's syntax tree imports, if it imports any."""
    names = []
    folders = [*sys.path, file.parent]
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        if node.level:
            folders = [file.parents[node.level - 1]]
    return module_files(names, folders)


def module_files(names, folders):
    """The user's files of modules: those of each name and of the packages above it, from the first folder that has any.
    The last part of a name may be that of a thing in a module."""
    files = []
    for name in names:
        for folder in folders:
            place = Path(folder)
            present = []
            for part in name.split("."):
                place = place / part
                present += [path for path in (Path(f"{place}.py"), place / "__init__.py") if path.is_file()]
            if present:
                files += filter(is_own, present)
                break
    return files


def is_own(file):
    """Whether a file is the user's: not of Python, of an installed package, or of common/, which is hashed anyway."""
    file = Path(file).resolve()
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return not any(file.is_relative_to(folder) for folder in (*LIBRARIES, ROOT / "common"))


def hash_of_files(files):
    """A hash of the contents of files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(sha256(file).encode())
    return digest.hexdigest()


# ---- Objects ---------------------------------------------------------------------------------------------------------


def describe(value, unknown=None):
    """A JSON value that is equal for two flags that mean the same, in any process: the value itself, or a digest of
    what an object consists of. unknown: a set that gets the types of what cannot be known."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if is_plain(value):
        return value
    if isinstance(value, list | tuple) and all(is_plain(item) and item is not None for item in value):
        return list(value)
    contents = Contents()
    text = rows_text(value) or contents.text(value)
    if unknown is not None:
        unknown |= contents.unknown
    return f"<{name_of(value)} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"


def rows_text(value):
    """A list of plain rows as JSON, which takes a tenth of the time of `Contents`; else None."""
    if type(value) is not list or any(type(row) is not dict for row in value):
        return None  # a class of the user may do more
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return json.dumps(value)


def is_plain(value):
    return value is None or isinstance(value, bool | int | float | str)


def name_of(value):
    """The name of a function or class, or that of an object's class, with its module."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None)
    return named.__qualname__ if module in (None, "builtins") else f"{module}.{named.__qualname__}"


class Contents:
    """What values consist of, as lists of texts and numbers that are equal for equal values in every process.

    A function is its compiled code, its defaults, what it closes over, and what it reads by name in its module:
    functions, classes and values; a class is its methods and attributes; a model its weights and configuration; any
    other object its class and what pickle would store of it. A module of the user that is read is its files. Of
    libraries the names count. unknown: the types of what has no such parts.
    """

    def __init__(self):
        self.unknown = set()
        self.seen = {}  # {id: (number, object)}: while the object is held, no other gets its id

    def text(self, value):
        try:
            return json.dumps(self.of(value))
        except RecursionError:  # a list that holds itself
            self.unknown.add(name_of(type(value)))
            return ""

    def of(self, value):
        if is_plain(value):
            return value
        if type(value) in (list, tuple):
            return [self.of(item) for item in value]
        if type(value) in (dict, types.MappingProxyType):
            return [[self.of(key), self.of(item)] for key, item in value.items()]
        if type(value) in (set, frozenset):
            # the order of a set is that of hashes or addresses
            return [self.of(item) for item in sorted(value, key=lambda item: (name_of(item), repr(item)))]
        if isinstance(value, bytes | bytearray):
            return hashlib.sha256(value).hexdigest()
        if id(value) in self.seen:
            return [name_of(value), self.seen[id(value)][0]]
        self.seen[id(value)] = (len(self.seen), value)
        try:
            return [name_of(value), self.of_object(value)]
        except Exception:  # objects refuse in their own ways
            self.unknown.add(name_of(type(value)))
            return [name_of(value)]

    def of_object(self, value):
        library = type(value).__module__.partition(".")[0]
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if isinstance(value, types.CodeType):
            return self.of_code(value)
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            return hash_of_files(with_imports(Path(file))) if file and is_own(file) else value.__name__
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
        if isinstance(value, torch.nn.Module):
            return self.of_model(value)
        if hasattr(value, "get_vocab"):  # a tokenizer, whose other fields change while it is used
            words = sorted(value.get_vocab().items())
            return self.of([value.name_or_path, value.chat_template, value.special_tokens_map, words])
        if library == "diffusers":  # a pipeline, its scheduler
            return self.of(getattr(value, "components", settings(value)))
        if library == "datasets" and not isinstance(value, dict):
            return [self.of(row) for row in value]
        return self.of_pickled(value)

    def of_function(self, function):
        code = function.__code__
        file = Path(code.co_filename)
        if not is_own(file):
            return None
        read, imported = names_in(code)
        known = {name: function.__globals__[name] for name in read if name in function.__globals__}
        cells = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                cells.append(cell.cell_contents)
        parts = [code, known, cells, function.__defaults__, function.__kwdefaults__, vars(function)]
        files = []
        for path in module_files(imported, [*sys.path, file.parent]):
            files += with_imports(path)
        return [self.of(parts), hash_of_files(files)]

    def of_code(self, code):
        names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        numbers = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        return self.of([code.co_code, code.co_exceptiontable, code.co_consts, names, numbers])

    def of_class(self, value):
        if not is_own_class(value):
            return None
        members = {}
        for name, member in vars(value).items():
            if isinstance(member, property):
                member = [member.fget, member.fset, member.fdel]
            elif isinstance(member, functools.cached_property):
                member = member.func
            elif isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, types.FunctionType) or not name.startswith(("__", "_abc_")):
                members[name] = member
        return self.of([value.__bases__, members])

    def of_model(self, model):
        parts = []
        for module in model.modules():
            if is_own_class(type(module)):
                fields = {name: field for name, field in vars(module).items() if name not in MODULE_FIELDS}
                parts.append([type(module), fields])
        return self.of([dict(model.state_dict()), settings(model), parts])

    def of_pickled(self, value):
        if isinstance(value, Iterator):
            raise TypeError("an iterator may have been read")
        reduce = copyreg.dispatch_table.get(type(value), lambda value: value.__reduce_ex__(4))
        parts = reduce(value)
        if isinstance(parts, str):  # a thing that a module has under this name
            module = sys.modules.get(getattr(value, "__module__", None))
            return self.of([module, parts, getattr(value, "__wrapped__", None)])
        kept = [type(value)]
        for part in parts[1:]:
            kept.append(list(part) if isinstance(part, Iterator) else part)
        return self.of(kept)


def names_in(code):
    """(globals, modules): the names that compiled code reads in its module, and those that it imports, with the
    functions inside it."""
    read = []
    imported = []
    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.append(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            module = instruction.argval
            imported.append(module)
        elif instruction.opname == "IMPORT_FROM":
            imported.append(f"{module}.{instruction.argval}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_read, inner_imported = names_in(constant)
            read += inner_read
            imported += inner_imported
    return read, imported


def is_own_class(value):
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__":  # None: of a file that was loaded by hand
        return True
    file = getattr(module, "__file__", None)
    return file is not None and is_own(file)


def settings(value):
    """The configuration of a model or a part of a pipeline, without what the libraries note in it while it is used."""
    config = getattr(value, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, dict):
        return config
    return {name: item for name, item in config.items() if not name.startswith("_") and name != "pad_token_id"}
