"""The identity of a run: all that decides its result, and a hash of it, which names its directory."""

import ast
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np
import torch

from common.checkpoint import sha256
from common.cli import ROOT, flag_of
from common.functions import spec_path

# Flags that change memory, and so stand in config.yaml, but not the result (to rounding).
SIZES = """micro_batch_size decode_batch_size packing gradient_checkpointing""".split()
# Flags that may differ when a run is continued.
NEUTRAL = """run_dir name resume threads save_every keep_checkpoints track wandb_project push_to_hub check""".split()
NEUTRAL += SIZES
# Flags of how long a run is.
LENGTHS = "epochs num_epochs total_steps total_episodes".split()
# What counts in a directory: files of models, tokenizers and data sets.
SUFFIXES = ".safetensors .bin .json .jsonl .txt .model .jinja .arrow .parquet .csv .py".split()


def identity(algo, args, script):
    """What decides the result (flags, the bytes of the code, the files that flags name, with the user's files that
    these import) and a hash of it. not_compared: flags whose objects cannot be hashed.

    The hash does not cover what functions read from other files while they run.
    """
    flags = {}
    files = code_hashes(script)
    not_compared = []
    for name, value in vars(args).items():
        if name in NEUTRAL:
            continue
        flags[name] = describe(value)
        if flags[name] == f"<{name_of(value)}>":
            not_compared.append(name)
        if named := files_of_flag(value):
            files[name] = hash_of_files(named)
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files, "not_compared": not_compared}


# ---- Files -----------------------------------------------------------------------------------------------------------


def code_hashes(script):
    """{"script": sha256, "common/....py": sha256} of a script and of what all scripts share, "imports" of other files
    of the user that the script imports."""
    hashes = {"script": sha256(script)}
    if imported := with_imports(script)[1:]:
        hashes["imports"] = hash_of_files(imported)
    for path in sorted((ROOT / "common").glob("*.py")):
        hashes[f"common/{path.name}"] = sha256(path)
    return hashes


def files_of_flag(value):
    """The files that the value of a flag names: as a path, as a spec string, or several, joined by commas."""
    specs = []
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str | Path):
            text = str(text)
            specs += [text, text.rpartition(":")[0], *re.split("[,=]", text)]  # a classifier's label, sets, options
    files = []
    for spec in specs:
        path = spec_path(spec.strip()) if spec.strip() else None
        if path is None:
            continue
        if path.is_dir() and not isinstance(value, list | tuple):  # no text to stop at, as "." is
            files += files_of_directory(path)
        elif path.is_file() and path.suffix == ".py":
            files += with_imports(path)
            files += sorted(path.with_suffix("").rglob("*.safetensors"))  # the models of an embedded task
        elif path.is_file():
            files.append(path)
    return list(dict.fromkeys(files))


def files_of_directory(path):
    """The files of a model, tokenizer or data set that a directory holds; below it, those of a pipeline's parts or of a
    data set's splits. What else lies in a directory, runs above all, does not count."""
    files = list(path.glob("*"))
    if (path / "model_index.json").exists() or (path / "dataset_dict.json").exists():
        files += path.glob("*/*")
    return sorted(file for file in files if file.is_file() and file.suffix in SUFFIXES and file.name[0] != ".")


def with_imports(path):
    """A Python file and the files of the user that it imports, in functions, too, and through others. A name that is
    put together while the program runs (importlib) is not found."""
    files = [Path(path).resolve()]
    for file in files:  # which grows
        with contextlib.suppress(SyntaxError, ValueError):  # an extension in C, or a file that nobody can import
            for node in ast.walk(ast.parse(file.read_bytes())):
                files += [found for found in imported_files(node, file) if found not in files]
    return files


def imported_files(node, file):
    """The user's files that a node of a file's syntax tree imports: modules, and the packages that they are in."""
    folders = [*sys.path, file.parent]
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        if node.level:
            folders = [file.parents[node.level - 1]]
    files = []
    for name in names:
        for folder in folders:
            place = Path(folder).resolve()
            present = []
            for part in name.split("."):
                place = place / part
                present += [path for path in (Path(f"{place}.py"), place / "__init__.py") if path.is_file()]
            if present:
                files += filter(is_own, present)
                break
    return list(dict.fromkeys(files))


def is_own(file):
    """Whether a file is the user's: not of Python, of an installed package, or of common/, which is hashed anyway."""
    if not file.is_file() or {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return not any(file.is_relative_to(folder) for folder in (sysconfig.get_path("stdlib"), ROOT / "common"))


def hash_of_files(files):
    """A hash of the contents of files, in their order."""
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


# ---- Objects ---------------------------------------------------------------------------------------------------------


def describe(value):
    """A JSON value that is equal for two flags that mean the same, in any process: a plain value itself, or the name of
    an object with a digest, without one where it cannot be hashed.

    The digest covers what datasets.fingerprint.Hasher does (closures, globals, fields) and the files of its code.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if is_plain(value):
        return value
    if isinstance(value, list | tuple) and all(is_plain(item) and item is not None for item in value):
        return list(value)
    name = name_of(value)
    try:
        sets = list(value.values()) if type(value) is dict else [value]
        if all(map(is_rows, sets)):  # by their text: a pickle depends on which rows of two sets are one object
            with contextlib.suppress(TypeError):  # else rows of objects
                return f"<{name} {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}>"
        from datasets.fingerprint import Hasher  # takes a second

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f"<{name} {Hasher.hash([parts_of(value), [sha256(file) for file in files_of_code(value)]])}>"
    except Exception:  # objects refuse in their own ways
        return f"<{name}>"


def is_rows(value):
    """Whether a value is a list of dicts. Those of a class of the user may do more."""
    return type(value) is list and all(type(row) is dict for row in value)


def is_plain(value):
    return value is None or isinstance(value, bool | int | float | str)


def name_of(value):
    """The name of a function or class, or that of an object's class, with its module."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None)
    return named.__qualname__ if module in (None, "builtins") else f"{module}.{named.__qualname__}"


def parts_of(value):
    """What Hasher gets: of a pretrained model its weights and configuration, of a pipeline its parts. Whole, a model
    would be copied in memory, and its generation_config holds a number that differs between processes."""
    if type(value) is dict:
        return {name: parts_of(item) for name, item in value.items()}
    if isinstance(getattr(value, "components", None), dict):  # of diffusers
        return [name_of(value), parts_of(value.components)]
    if not isinstance(value, torch.nn.Module) or not hasattr(value, "config"):
        return value
    config = value.config.to_dict() if hasattr(value.config, "to_dict") else dict(value.config)
    weights = {}
    for name, weight in value.state_dict().items():
        data = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        weights[name] = [str(weight.dtype), list(weight.shape), hashlib.sha256(data).hexdigest()]
    return [name_of(value), {key: item for key, item in config.items() if key[0] != "_"}, weights]


def files_of_code(value):
    """The user's files in which the code of an object stands, and that of what a function reads by name, with what they
    import. Hasher knows a function of an imported module by its name alone."""
    function = getattr(value, "func", value)  # of functools.partial
    function = inspect.unwrap(getattr(function, "__func__", function))
    things = [function, type(value), type(getattr(value, "__self__", None))]
    with contextlib.suppress(TypeError, ValueError):  # no function in Python
        read = inspect.getclosurevars(function)
        things += [*read.globals.values(), *read.nonlocals.values()]
    files = []
    for thing in things:
        with contextlib.suppress(TypeError, OSError):  # of C, or of a notebook
            file = Path(inspect.getfile(thing)).resolve()
            if file not in files and is_own(file):
                files += with_imports(file)
    return sorted(set(files))


# ---- Two runs --------------------------------------------------------------------------------------------------------


def changed(old, new, part):
    """Names in which two identities differ; part: "flags" or "files"."""
    return [name for name in old[part] | new[part] if old[part].get(name) != new[part].get(name)]


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    flags = changed(old, new, "flags")
    lines = [f"{flag_of(name)}: was {old['flags'].get(name)}, is {new['flags'].get(name)}" for name in flags]
    for name in changed(old, new, "files"):
        if name not in flags and name != "resume":  # the line of the flag says it; where it continues is no difference
            lines.append(f"{file_name(name)} has changed")
    return lines


def file_name(key):
    if key == "script":
        return "the script"
    if key == "imports":
        return "a file that the script imports"
    return key if key.startswith("common/") else f"the file of {flag_of(key)}"


def nearly_the_same(folder, new):
    """A directory beside folder with checkpoints of a run that could be continued instead: it differs from the identity
    `new` in its length alone, or is not finished and differs in one or two files. None without one."""
    for path in sorted(folder.parent.glob("*/env.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a file of something else
            old = json.loads(path.read_text())
            flags = set(changed(old, new, "flags"))
            files = changed(old, new, "files")
            finished = (path.parent / "README.md").exists()
            near = flags <= {*LENGTHS} and (not files or len(files) < 3 and not finished)
            if near and old["algo"] == new["algo"] and old["hash"] != new["hash"]:
                if any(path.parent.glob("checkpoints/step_????????")):
                    return path.parent
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
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"  # with the instructions that torch uses
    return {
        "command": shlex.join(sys.argv),
        "commit": commit,
        "device": device,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def cpu_name():
    with contextlib.suppress(OSError):
        if named := re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text()):
            return named[1]
    return platform.machine()
