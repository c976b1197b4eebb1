"""The identity of a run: all that decides its result, and a hash of it, which names its directory."""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from common.checkpoint import sha256
from common.cli import ROOT
from common.functions import spec_path

# Flags that change memory, and so stand in config.yaml, but not the result (to rounding).
SIZES = """micro_batch_size decode_batch_size packing cache_trunk gradient_checkpointing""".split()
# Flags that may differ when a run is continued.
NEUTRAL = [*"run_dir resume threads save_every keep_checkpoints track wandb_project push_to_hub check".split(), *SIZES]
# Flags that may name files.
SPECS = """model tokenizer ref_model dataset eval_dataset eval_prompts norm_prompts norm_policy reward metric
logit_mask""".split()


def identity(algo, args, script):
    """What decides the result (flags, the bytes of the code, the files that spec strings name) and a hash of it."""
    flags = {name: describe(value) for name, value in vars(args).items() if name not in NEUTRAL}
    files = code_hashes(script)
    for name in SPECS:
        value = getattr(args, name, None)
        if isinstance(value, str | Path) and (digest := files_hash(str(value))):
            files[name] = digest
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files}


def code_hashes(script):
    """{"script": sha256, "common/....py": sha256} of a script and of what all scripts share."""
    hashes = {"script": sha256(script)}
    for path in sorted((ROOT / "common").glob("*.py")):
        hashes[f"common/{path.name}"] = sha256(path)
    return hashes


def files_hash(spec):
    """A hash of the files that a flag names; None if it names none (a hub id)."""
    specs = [part.strip() for part in spec.split(",")]  # several evaluation sets
    specs.append(spec.rpartition(":")[0])  # a classifier, its label
    files = []
    for path in filter(None, map(spec_path, filter(None, specs))):
        files += [file for file in [path, *sorted(path.rglob("*"))] if file.is_file()]
        if path.suffix == ".py":  # and the models of an embedded task, in a folder of the same name
            files += sorted(path.with_suffix("").rglob("*.safetensors"))
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest() if files else None


def describe(value):
    """A JSON value that is equal for two flags that mean the same: the value itself, or a digest of an object."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if is_plain(value):
        return value
    if isinstance(value, list | tuple) and all(is_plain(item) and item is not None for item in value):
        return list(value)
    type_name = type(value).__name__
    path = str(getattr(value, "name_or_path", ""))
    if models := [x for x in getattr(value, "components", {0: value}).values() if isinstance(x, torch.nn.Module)]:
        text = str([weight_sums(model) for model in models])
    elif isinstance(value, torch.Tensor):
        text = str([value.shape, hashlib.sha256(value.cpu().numpy().tobytes()).digest()])
    elif isinstance(value, functools.partial):
        text = str([describe(value.func), value.args, value.keywords])
    elif path:
        text = path
    elif callable(value):
        function = value if hasattr(value, "__qualname__") else type(value)
        type_name = f"{function.__module__}.{function.__qualname__}"
        text = source(function, value)
    else:
        rows = value if isinstance(value, dict) else list(value)
        text = json.dumps(rows, default=as_json)
    return f"<{type_name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"


def as_json(value):
    """What json.dumps writes for a value that it does not know."""
    return list(value) if hasattr(value, "__iter__") else str(value)


def is_plain(value):
    return value is None or isinstance(value, bool | int | float | str)


def weight_sums(model):
    """[(name, sum, norm)] of the weights."""
    sums = []
    for name, weight in model.state_dict().items():
        weight = weight.double()
        sums.append((name, weight.sum().item(), weight.norm().item()))
    return sums


def source(function, value):
    """The source of a function with what it closes over, or that of an object's class with its fields."""
    text = f"{function.__module__}.{function.__qualname__}"
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(function)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return text + str([cells, getattr(value, "__defaults__", None), vars(value)])


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    old, new = json.loads(json.dumps([old, new]))
    lines = []
    for name in old["flags"] | new["flags"]:
        was = old["flags"].get(name)
        now = new["flags"].get(name)
        if was != now:
            lines.append(f"--{name.replace('_', '-')}: was {was}, is {now}")
    for name in old["files"] | new["files"]:
        if name != "resume" and old["files"].get(name) != new["files"].get(name):  # where it continues is no difference
            lines.append(f"{file_name(name)} has changed")
    return lines


def file_name(key):
    if key == "script":
        return "the script"
    return key if key.startswith("common/") else f"the file of --{key}"


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
    return {
        "command": shlex.join(sys.argv),
        "commit": commit,
        "device": device_name(accelerator),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def device_name(accelerator):
    """The GPU, or the CPU with the instruction set that torch uses."""
    if accelerator.device.type == "cuda":
        return torch.cuda.get_device_name()
    model = platform.machine()
    with contextlib.suppress(OSError):
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
