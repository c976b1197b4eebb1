"""The identity of a run: all that decides its result, and a hash of it, which names its directory."""

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from common.checkpoint import sha256
from common.cli import ROOT, flag_of
from common.contents import describe, hash_of_files, with_imports
from common.functions import spec_path

# Flags that change memory, and so stand in config.yaml, but not the result (to rounding).
SIZES = """micro_batch_size decode_batch_size packing gradient_checkpointing""".split()
# Flags that may differ when a run is continued.
NEUTRAL = """run_dir name resume threads save_every keep_checkpoints track wandb_project push_to_hub check""".split()
NEUTRAL += SIZES
# Flags of how long a run is.
LENGTHS = "epochs num_epochs total_steps total_episodes".split()
# Flags that may name files.
SPECS = """model tokenizer ref_model dataset eval_dataset eval_prompts norm_prompts norm_policy reward metric
logit_mask""".split()


def identity(algo, args, script):
    """What decides the result (flags, the bytes of the code, the files that spec strings name, with the user's files
    that these import) and a hash of it.

    not_compared {flag: types}: objects of which nothing can be known, so that the hash does not cover them. Neither
    does it cover what functions read from other files while they run.
    """
    flags = {}
    not_compared = {}
    for name, value in vars(args).items():
        if name in NEUTRAL:
            continue
        unknown = set()
        flags[name] = describe(value, unknown)
        if unknown:
            not_compared[name] = sorted(unknown)
    files = code_hashes(script)
    for name in SPECS:
        value = getattr(args, name, None)
        if isinstance(value, str | Path) and (digest := files_hash(str(value))):
            files[name] = digest
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files, "not_compared": not_compared}


def code_hashes(script):
    """{"script": sha256, "common/....py": sha256} of a script and of what all scripts share, "imports" of other files
    of the user that the script imports."""
    hashes = {"script": sha256(script)}
    imported = with_imports(Path(script))[1:]
    if imported:
        hashes["imports"] = hash_of_files(imported)
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
        if path.suffix == ".py" and path.is_file():
            files += with_imports(path)[1:]
            files += sorted(path.with_suffix("").rglob("*.safetensors"))  # the models of an embedded task
    return hash_of_files(files) if files else None


def blind_spots(identity):
    """In words, what the hash of an identity does not cover; "" where there is no such object."""
    parts = [f"{', '.join(types)} of {flag_of(name)}" for name, types in identity["not_compared"].items()]
    return f"; not compared: {'; '.join(parts)}" if parts else ""


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    old, new = json.loads(json.dumps([old, new]))
    lines = []
    for name in old["flags"] | new["flags"]:
        was = old["flags"].get(name)
        now = new["flags"].get(name)
        if was != now:
            lines.append(f"{flag_of(name)}: was {was}, is {now}")
    for name in old["files"] | new["files"]:
        same_flag = old["flags"].get(name) == new["flags"].get(name)  # else the line of the flag says it
        changed = old["files"].get(name) != new["files"].get(name)
        if changed and same_flag and name != "resume":  # where it continues is no difference
            lines.append(f"{file_name(name)} has changed")
    return lines


def other_length(folder, new):
    """A directory beside folder with checkpoints of a run that differs from the identity `new` in its length alone;
    None without one."""
    for path in sorted(folder.parent.glob("*/env.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a file of something else
            old = json.loads(path.read_text())
            lengths = {name: new["flags"][name] for name in LENGTHS if name in new["flags"]}
            same_code = (old["algo"], old["files"]) == (new["algo"], new["files"])
            if same_code and old["flags"] != new["flags"] and old["flags"] | lengths == new["flags"]:
                if any(path.parent.glob("checkpoints/step_????????")):
                    return path.parent
    return None


def file_name(key):
    if key == "script":
        return "the script"
    if key == "imports":
        return "a file that the script imports"
    return key if key.startswith("common/") else f"the file of {flag_of(key)}"


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
