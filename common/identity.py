"""Which run is which: what decides its result, by which the same command finds its run again."""

import contextlib
import functools
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
from array import array
from pathlib import Path

import torch

from common.errors import InputError, flag_of
from common.functions import ROOT, adapter_base, spec_path
from common.report import screen

PLAIN = bool | int | float | str
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
VERSION = "0.5"  # the first one of CHANGELOG.md

# Flags that change memory, but not the result (to rounding). config.yaml has them, too.
SIZES = ["micro_batch_size", "decode_batch_size", "packing", "gradient_checkpointing"]

# Flags that may differ when a run is continued.
NEUTRAL = "run_dir resume threads save_every keep_checkpoints track push_to_hub check".split() + SIZES
UNKNOWN = " of unknown contents>"  # the end of the description of what is not hashed


def identity(args, script):
    """What decides the result, and a hash of it: flags, the bytes of the code, the files that flags name, and the
    user's modules. Files that functions read while they run do not count."""
    flags = {name: describe(value) for name, value in vars(args).items() if name not in NEUTRAL}
    unknown = [flag_of(name) for name, text in flags.items() if str(text).endswith(UNKNOWN)]
    if unknown and not args.run_dir:
        raise InputError(f"{', '.join(unknown)}: such an object cannot be compared between runs: also give --run-dir")
    files = {"script": sha256(script), "imports": sha256(*imported_files())}
    files |= {str(path.relative_to(ROOT)): sha256(path) for path in sorted((ROOT / "common").rglob("*.py"))}
    for name in flags:
        if named := files_of_flag(getattr(args, name)):
            files[name] = sha256(*named)
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    algo = Path(script).stem
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files}


def read_identity(folder):
    """The identity of the run in a directory, from its env.json; {} where there is none."""
    with contextlib.suppress(OSError, ValueError):
        env = json.loads((folder / "env.json").read_bytes())
        if isinstance(env, dict) and {"algo", "hash", "flags", "files"} <= env.keys():
            return env
    return {}


def has_results(folder):
    """Whether a run directory holds more than its first evaluation."""
    metrics = folder / "metrics.jsonl"
    has_steps = metrics.exists() and re.search('"step": [1-9]', metrics.read_text(encoding="utf-8"))
    return bool(has_steps) or any(folder.glob("hf_model*"))


def sha256(*paths):
    """One hash of the contents of files."""
    hashes = []
    for path in paths:
        with open(path, "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def files_of_flag(value):
    """The files that a flag's value names: by a path, a spec string, several at commas, or an option of a function. Of
    a directory: those in it and one level down; of one that an option names, none: the function may write there."""
    text = str(value) if isinstance(value, str | Path) else ""
    specs = [text, text.rpartition(":")[0], *text.split(",")]  # also without a classifier's label
    options = re.findall(r"=([^,]*\w[^,]*)", text)
    files = [path for path in map(spec_path, map(str.strip, options)) if path and path.is_file()]
    for path in dict.fromkeys(spec_path(spec.strip()) for spec in specs if re.search(r"\w", spec)):
        if path and path.is_dir():
            found = [*path.glob("*"), *path.glob("*/*")]
            files += files_of_flag(adapter_base(path)[0])
            files += sorted(file for file in found if file.is_file() and file.name[0] != ".")
        elif path and path.exists():
            files += [path, *sorted(path.with_suffix("").rglob("*.safetensors"))]  # the models of an embedded task
    return files


def imported_files():
    """The files of modules that are loaded, but for Python's, installed ones, common/, those of flags, which count
    anyway, and the program that calls `main`."""
    files = set()
    for name, module in sys.modules.items():
        path = Path(getattr(module, "__file__", None) or "")
        is_counted = name == "__main__" or name.startswith("plainrl_user_")
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        if path.is_file() and not (is_counted or is_installed):
            files.add(path.resolve())
    return sorted(file for file in files if not any(map(file.is_relative_to, (STDLIB, ROOT / "common"))))


def describe(value):
    """A JSON value that is the same, in any process, for flags that mean the same: a plain value itself, a hash of rows
    as JSON, the name of a function with a hash of its file."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        if inspect.isfunction(value) and "<" not in name:  # a lambda or a function within one may hold other values
            return f"<{name} {sha256(inspect.getfile(value))[:16]}>"
        return f"<{name} {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}>"
    except (OSError, TypeError, ValueError):  # no file, as in a notebook, or no JSON
        return f"<{name}{UNKNOWN}"


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    flags = old["flags"] | new["flags"]
    changed = [name for name in flags if old["flags"].get(name) != new["flags"].get(name)]
    lines = [f"{flag_of(name)}: was {old['flags'].get(name)}, is {new['flags'].get(name)}" for name in changed]
    names = {"script": "the script", "imports": "the list of files that your code imports, or one of them,"}
    names |= {name: f"the file of {flag_of(name)}" for name in flags}
    for name in old["files"] | new["files"]:
        if old["files"].get(name) != new["files"].get(name) and name not in (*changed, "resume"):
            lines.append(f"{names.get(name, name)} has changed")
    return lines


def digest(value):
    """A hash of rows, token ids and labels: the same in every process and run for equal values."""
    total = hashlib.sha256()
    for part in value.items() if isinstance(value, dict) else value:
        total.update(repr(plain(part)).encode(errors="backslashreplace"))
    return total.hexdigest()[:16]


def plain(value):
    """What tells a value from others by its repr. Of an object whose repr has its place in memory, the type counts."""
    if isinstance(value, array):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(plain, value)))
    if not isinstance(value, PLAIN) and " at 0x" in repr(value):
        tell_type_alone(type(value).__name__)
        return type(value).__name__
    return value


@functools.cache  # once for each type
def tell_type_alone(name):
    screen.say(f"warning: rows hold objects of type {name}: a run that continues cannot tell whether they have changed")


def environment(accelerator):
    """Versions and hardware: an allow-list, never os.environ."""
    versions = {"plainrl": VERSION, "python": platform.python_version()}
    for name in "torch transformers accelerate tokenizers safetensors numpy datasets peft diffusers".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = ""
    with contextlib.suppress(OSError):  # without git
        command = "git describe --always --dirty --exclude=* --abbrev=40".split()
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8").stdout.strip()
    device = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"  # with the instructions that torch uses
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    processes = accelerator.num_processes
    launcher = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    machine = {"commit": commit, "device": device, "processes": processes, "threads": torch.get_num_threads()}
    return {"command": f"{launcher} {shlex.join(sys.argv)}", **machine, "versions": versions}
