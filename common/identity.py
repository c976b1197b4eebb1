"""The identity of a run: everything that decides its result, and a hash of it, which names its directory."""

import ast
import contextlib
import glob
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common.checkpoint import sha256
from common.cli import ROOT, InputError, flag_of
from common.functions import spec_path
from common.launch import cpuinfo, is_sharded

# Flags that change memory, but not the result (to rounding). config.yaml has them, too.
SIZES = """micro_batch_size decode_batch_size packing gradient_checkpointing""".split()
# Flags that may differ when a run is continued.
NEUTRAL = """run_dir name resume threads save_every keep_checkpoints track wandb_project push_to_hub check""".split()
NEUTRAL += SIZES
# Flags that set the length of a run.
LENGTHS = "epochs num_epochs total_steps total_episodes".split()
PLAIN = bool | int | float | str
UNKNOWN = " of unknown contents>"  # the end of the description of an object that is not hashed


def identity(algo, args, script):
    """What decides the result (flags, the bytes of the code, files named by flags, and the user's files that these
    import) and a hash of it. Files that functions read while they run do not count."""
    flags = {name: describe(value) for name, value in vars(args).items() if name not in NEUTRAL}
    unknown = [flag_of(name) for name, text in flags.items() if str(text).endswith(UNKNOWN)]
    if unknown and not args.run_dir:
        raise InputError(f"{', '.join(unknown)}: such an object cannot be compared between runs: also give --run-dir")
    files = {"script": sha256(script), "imports": hash_of_files(with_imports(Path(script).resolve())[1:])}
    files |= {f"common/{path.name}": sha256(path) for path in sorted((ROOT / "common").glob("*.py"))}
    for name in flags:
        if named := files_of_flag(getattr(args, name)):
            files[name] = hash_of_files(named)
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files}


# ---- Files -----------------------------------------------------------------------------------------------------------


def files_of_flag(value):
    """The files that a flag's value names: by a path, a spec string, or several of these separated by commas."""
    is_list = isinstance(value, list | tuple)
    paths = {}
    for text in value if is_list else [value]:
        if isinstance(text, str | Path):
            text = str(text)
            specs = [text, text.rpartition(":")[0], *re.split("[,=]", text)]  # a classifier's label, sets, options
            specs += sorted(glob.glob(text))
            paths |= {spec_path(spec.strip()): None for spec in specs if spec.strip()}
    files = []
    for path in filter(None, paths):
        if path.is_dir() and not is_list:  # in a list, "." is a stop string
            files += files_of_directory(path)
        elif path.is_file() and path.suffix == ".py":
            files += with_imports(path.resolve())
            files += sorted(path.with_suffix("").rglob("*.safetensors"))  # the models of an embedded task
        elif path.is_file():
            files.append(path)
    return files


def files_of_directory(path):
    """The files directly in a directory, and those of a pipeline's parts or a dataset's splits below it. Other files
    further down, such as runs, do not count."""
    files = list(path.glob("*"))
    if (path / "model_index.json").exists() or (path / "dataset_dict.json").exists():
        files += path.glob("*/*")
    return sorted(file for file in files if file.is_file() and file.name[0] != ".")


def with_imports(*paths):
    """Python files and the user's files that they import, directly or indirectly, including imports in functions. A
    name built at run time (importlib) is not found."""
    files = [*paths]
    for file in files:  # which grows
        for level, name in imported_names(file):
            folders = [file.parents[level - 1]] if level else [*sys.path, file.parent]
            files += [found for found in module_files(name, folders) if found not in files]
    return files


def imported_names(file):
    """[(level, name)] of a file's imports: modules and things in them. level: the number of dots before the name."""
    names = []
    with contextlib.suppress(SyntaxError, ValueError):  # an extension in C, or a file that nobody can import
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [(0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [(node.level, f"{node.module or ''}.{alias.name}".lstrip(".")) for alias in node.names]
    return names


def module_files(name, folders):
    """The user's files of a module, whose name may end with a thing in it, and of the packages that contain it."""
    files = []
    for part in name.split("."):
        found = PathFinder.find_spec(part, [str(folder) for folder in folders])
        if found is None:
            break
        if found.has_location:
            files.append(Path(found.origin).resolve())
        folders = found.submodule_search_locations or []
    return list(filter(is_own, files))


def is_own(file):
    """Whether a file is the user's: not part of Python, an installed package, or common/, which is hashed anyway."""
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    others = [sysconfig.get_path("stdlib"), ROOT / "common", *folders_of_packages()]
    return file.is_file() and not installed and not any(map(file.is_relative_to, others))


def folders_of_packages():
    """The folders of sys.path in which packages were installed, by `pip install --target` under any name. Modules of
    the user's own in such a folder do not count, either."""
    return [Path(folder).resolve() for folder in sys.path if any(Path(folder).glob("*.dist-info"))]


def hash_of_files(files):
    """A hash of the contents of files, in the given order."""
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


# ---- Objects ---------------------------------------------------------------------------------------------------------


def describe(value):
    """A JSON value that is the same, in any process, for flags that mean the same: a plain value itself, or an object's
    name with a hash of its contents."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value):
        return list(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if is_of_library(value):
        return f"<{name}{UNKNOWN}"
    try:
        return f"<{name} {hash_of_object(value)[:16]}>"
    except Exception:  # objects refuse in various ways
        return f"<{name}{UNKNOWN}"


def is_of_library(value):
    """Whether a value is a model, a tokenizer or the like, whose contents are large and change in use."""
    return isinstance(value, torch.nn.Module) or type(value).__module__.startswith(("transformers.", "diffusers."))


def hash_of_object(value):
    """A hash of rows, or of what the pickler of datasets stores for a function or other object (fields, closures,
    globals that its functions read), with the user's files that contain its code. TypeError if it holds a model."""
    if type(value) in (list, dict):  # by their text: a pickle depends on which rows are one object
        with contextlib.suppress(TypeError):  # else rows of objects
            return hashlib.sha256(json.dumps(value).encode()).hexdigest()
    from datasets.utils._dill import Pickler  # takes a second

    digest = hashlib.sha256()
    files = set()

    def parts(value):
        """What pickle should store for an object."""
        with contextlib.suppress(TypeError, OSError):  # no code, or that of C or a notebook
            files.add(Path(inspect.getfile(value)).resolve())
        if isinstance(value, frozenset):  # of constants; its order differs between processes
            return frozenset, (sorted(value, key=repr),)
        if is_of_library(value):
            raise TypeError("models are not hashed")
        return NotImplemented

    pickler = Pickler(SimpleNamespace(write=digest.update), recurse=True)
    pickler.reducer_override = parts
    pickler.dump(value)
    digest.update(hash_of_files(with_imports(*sorted(filter(is_own, files)))).encode())
    return digest.hexdigest()


# ---- Two runs --------------------------------------------------------------------------------------------------------


def changed(old, new, part):
    """Names in which two identities differ; part: "flags" or "files"."""
    return [name for name in old[part] | new[part] if old[part].get(name) != new[part].get(name)]


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    flags = changed(old, new, "flags")
    lines = [f"{flag_of(name)}: was {old['flags'].get(name)}, is {new['flags'].get(name)}" for name in flags]
    code = {"script": "the script", "imports": "a file that the script imports"}
    for name in changed(old, new, "files"):
        if name in code or name.startswith("common/"):
            lines.append(f"{code.get(name, name)} has changed")
        elif name not in flags and name != "resume":  # where it continues does not count
            lines.append(f"the file of {flag_of(name)} has changed")
    return lines


def nearly_the_same(folder, new):
    """A sentence about a run next to folder that could be continued instead, or None. Such a run has checkpoints, and
    differs from the identity `new` only in its length, or is unfinished and differs in one or two files."""
    for path in sorted(folder.parent.glob("*/env.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # some other file
            old = json.loads(path.read_text())
            files = changed(old, new, "files")
            finished = (path.parent / "README.md").exists()
            near = {*changed(old, new, "flags")} <= {*LENGTHS} and (not files or len(files) < 3 and not finished)
            begun = any(path.parent.glob("checkpoints/step_????????"))
            if near and begun and old["algo"] == new["algo"] and old["hash"] != new["hash"]:
                lines = "; ".join(differences(old, new))
                return f"{path.parent} holds almost the same run ({lines}); to continue it: --resume {path.parent}"
    return None


# ---- The machine -----------------------------------------------------------------------------------------------------


def environment(accelerator):
    """Versions and hardware: an allow-list, never os.environ."""
    versions = {"python": platform.python_version()}
    for name in "torch transformers accelerate tokenizers safetensors numpy datasets peft diffusers".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = ""
    with contextlib.suppress(OSError):
        command = "git describe --always --dirty --exclude=* --abbrev=40".split()
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    named = re.search("model name.*: (.*)", cpuinfo())
    cpu = named[1] if named else platform.machine()
    device = f"{cpu}, {torch.backends.cpu.get_cpu_capability()}"  # with the instructions that torch uses
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "command": shlex.join(sys.argv),
        "commit": commit,
        "device": device,
        "processes": accelerator.num_processes,
        "machines": accelerator.num_processes // int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)),
        "sharded": is_sharded(accelerator),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
