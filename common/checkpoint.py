"""What a run keeps, as safetensors and JSON (no pickle): checkpoints, exports, and the identity by which the same
command finds its run again."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from common.cli import ROOT, InputError, flag_of, spec_path
from common.model import adapter_base

FORMAT = 4  # of checkpoints
PLAIN = bool | int | float | str
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


def tied_weights(model):
    """{later name: first name} of the parameters that the model has under several names."""
    named = [(name.removeprefix("module."), w) for name, w in model.named_parameters(remove_duplicate=False)]
    first_names = {id(weight): name for name, weight in reversed(named)}
    return {name: first_names[id(weight)] for name, weight in named if first_names[id(weight)] != name}


def frozen_weights(model):
    """(sum, ids) of the untrained weights of a pretrained model, which checkpoints leave out."""
    weights = [weight for weight in model.parameters() if not weight.requires_grad]
    total = 0.0
    for weight in weights:
        partial = weight.sum(dtype=torch.float64)  # of a shard under FSDP2
        total += getattr(partial, "full_tensor", partial.detach)().item()
    return total, set(map(id, weights))


def settings_of(optimizer):
    """The plain values of each parameter group of an optimizer, but for the learning rate."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({name: value for name, value in group.items() if name != "lr" and isinstance(value, PLAIN)})
    return groups


def pack_state(model, optimizer, frozen, settings, **state):
    """(files, state) of a checkpoint, with tied weights once. Collective: rank 0 gets the tensors. frozen: the
    `frozen_weights` of --model, which are left out; other weights without gradient (target networks) are not.
    settings: `settings_of` the optimizer before its first step. What has changed there, such as a count of steps, is
    stored; the rest comes from flags."""
    from torch.distributed.checkpoint import state_dict as dcp

    frozen_sum, frozen_ids = frozen
    kept = nn.ParameterList(w for w in model.parameters() if not w.requires_grad and id(w) not in frozen_ids)
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    kept.requires_grad_(True)
    weights = dcp.get_model_state_dict(model, options=options)  # empty on ranks other than 0
    kept.requires_grad_(False)
    tied = tied_weights(model)
    files = {"model.safetensors": {name: tensor.contiguous() for name, tensor in weights.items() if name not in tied}}
    if optimizer.state:  # else reading it would take a hidden step
        saved = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        moments = {}
        for name, entry in saved.get("state", {}).items():
            moments |= {f"{name}//{key}": torch.as_tensor(value).contiguous() for key, value in entry.items()}
        files["optim.safetensors"] = moments
    changes = []
    for now, before in zip(settings_of(optimizer), settings, strict=True):
        changes.append({name: value for name, value in now.items() if name not in before or before[name] != value})
    return files, {"format": FORMAT, "frozen": frozen_sum, "optimizer_settings": changes, **state}


def unpack_state(path, state, model, optimizer, frozen):
    """Loads what `pack_state` returned from a checkpoint into model and optimizer. Collective."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    shapes = {name.removeprefix("module."): weight.shape for name, weight in model.state_dict().items()}
    trained = {name.removeprefix("module.") for name, weight in model.named_parameters() if weight.requires_grad}
    fits = trained <= weights.keys() and all(weight.shape == shapes.get(name) for name, weight in weights.items())
    frozen_sum, _ = frozen
    if not fits or not math.isclose(state["frozen"], frozen_sum, rel_tol=1e-9):  # threads change the last digits
        raise InputError(f"--resume {path} holds other weights: keep its --model and --lora-r")
    if (path / "optim.safetensors").exists():
        moments = {}
        for key, value in safetensors.torch.load_file(path / "optim.safetensors").items():
            name, _, quantity = key.partition("//")
            moments.setdefault(name, {})[quantity] = value
        # without settings, which stay those of the flags; lr is a function of the step
        saved = {"state": moments, "param_groups": [{"params": [*weights]}]}
        dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
        for group, changes in zip(optimizer.param_groups, state["optimizer_settings"], strict=True):
            group.update(changes)
    # after the optimizer, for whose moments torch takes a step with zero gradients: one without an epsilon gives NaN
    dcp.set_model_state_dict(model, weights, options=options)


def write_checkpoint(run_dir, files, state, keep):
    """Writes checkpoints/step_XXXXXXXX, and only then removes others: all but the newest `keep` and the best, and those
    of a run that this one continues under other flags."""
    folder = Path(run_dir) / "checkpoints"
    with replacing(folder / f"step_{state['step']:08d}") as temporary:
        for name, tensors in files.items():
            safetensors.torch.save_file(tensors, temporary / name)
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
    own = [path for path in checkpoints_of(run_dir) if read_checkpoint(path)["run"] == state["run"]]
    kept = [*own[:keep], folder / f"step_{state['best_step'] or 0:08d}"]
    for path in folder.glob("*step_????????"):  # also what a killed run has left half-written or half-removed
        if path not in kept:
            (path / "state.json").unlink(missing_ok=True)  # first: it makes a checkpoint
            shutil.rmtree(path, ignore_errors=True)


def checkpoints_of(run_dir):
    """The checkpoints in a run directory, the newest first."""
    return [file.parent for file in sorted(Path(run_dir).glob("checkpoints/step_????????/state.json"), reverse=True)]


def read_checkpoint(path):
    """state.json of a checkpoint. InputError where it cannot be read: a run never silently starts again."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        how = "remove it, to go on from the one before"
        raise InputError(f"checkpoint {path} cannot be read ({error}): {how}") from None
    if state["format"] != FORMAT:
        raise InputError(f"checkpoint {path} was written by another version of plainrl")
    return state


def sha256(*paths):
    """One hash of the contents of files."""
    hashes = []
    for path in paths:
        with open(path, "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def replacing(directory):
    """A new directory to write into. If the block ends without an error, it is synced and replaces the path."""
    temporary = directory.with_name(f".tmp-{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed run
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # as the umask has it
        for path in [*temporary.rglob("*"), temporary]:
            if path.suffix == ".safetensors":
                path.chmod(mode)  # safetensors 0.8 writes files for the owner only: huggingface/safetensors#782
            fsync(path)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (OSError, safetensors.SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(f"{directory} cannot be written: {error}") from error
    fsync(directory.parent)


def full_weights(lm):
    """The state dict of a model, or of its adapters, on the CPU of rank 0. Collective."""
    from torch.distributed.checkpoint import state_dict as dcp

    adapters = lm._hf_peft_config_loaded
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters)
    weights = dcp.get_model_state_dict(lm, options=options)
    # FSDP2 gathered tied weights once per name, and they would be written as often
    weights |= {name: weights[first] for name, first in tied_weights(lm).items() if first in weights}
    return weights


def export_model(lm, weights, tokenizer, directory, heads):
    """Writes model and tokenizer as transformers loads them, with heads {file name: tensors} beside them."""
    with replacing(directory) as temporary:
        lm.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        for name, tensors in heads.items():
            safetensors.torch.save_file(tensors, temporary / name)


def write_text(path, text):
    """Writes a file completely or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # of a file name that is not UTF-8
    fsync(temporary)
    temporary.rename(path)


def keep_lines(path, step, lacks_evaluation):
    """Keeps the lines of a JSONL file up to a step, without its evaluation if it lacks that, and drops a last line that
    is incomplete after a kill."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        is_evaluation = path.name == "samples.jsonl" or re.search('"(eval/|perf/seconds_eval")', line)
        last_kept = step - 1 if lacks_evaluation and is_evaluation else step
        if line.endswith("}\n") and json.loads(line)["step"] <= last_kept:
            kept.append(line)
    if path.exists():
        write_text(path, "".join(kept))


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
    files |= {f"common/{path.name}": sha256(path) for path in sorted((ROOT / "common").glob("*.py"))}
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
        env = json.loads((folder / "env.json").read_text())
        if isinstance(env, dict) and {"algo", "hash", "flags", "files"} <= env.keys():
            return env
    return {}


def has_results(folder):
    """Whether a run directory holds more than its first evaluation."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and re.search('"step": [1-9]', metrics.read_text(encoding="utf-8")):
        return True
    return any(folder.glob("checkpoints/*")) or any(folder.glob("hf_model*"))


def files_of_flag(value):
    """The files that a flag's value names: by a path, a spec string, several of these separated by commas, or an option
    of a function. Of a directory: those in it and one level down (parts of a pipeline, splits of a dataset)."""
    text = str(value) if isinstance(value, str | Path) else ""
    specs = [text, text.rpartition(":")[0], *re.split("[,=]", text)]  # also without a classifier's label
    files = []
    for path in dict.fromkeys(spec_path(spec.strip()) for spec in specs if re.search(r"\w", spec)):
        if path and path.is_dir():
            found = [*path.glob("*"), *path.glob("*/*")]
            files += files_of_flag(adapter_base(path)[0])
            files += sorted(file for file in found if file.is_file() and file.name[0] != ".")
        elif path and path.exists():
            files += [path, *sorted(path.with_suffix("").rglob("*.safetensors"))]  # the models of an embedded task
    return files


def imported_files():
    """The files of the user's modules: of all that are loaded but Python's, installed ones, common/, those of flags
    (which count anyway) and the program that calls `main`. What a function imports later is not among them."""
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
    names = {"script": "the script", "imports": "a file that your code imports"}
    names |= {name: f"the file of {flag_of(name)}" for name in flags}
    for name in old["files"] | new["files"]:
        if old["files"].get(name) != new["files"].get(name) and name not in (*changed, "resume"):
            lines.append(f"{names.get(name, name)} has changed")
    return lines


def hub_commit(model, revision):
    """The commit of the hub from which a model was loaded, or None. revision: of --model, else that of its adapter."""
    for adapter in getattr(model, "peft_config", {}).values():
        revision = adapter.revision  # of its base
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    with contextlib.suppress(ValueError):  # what is no name of the hub
        if not os.path.isdir(source):  # diffusers gives the directory in the cache
            source = try_to_load_from_cache(source, "config.json", revision=revision)
        return re.search("snapshots/([0-9a-f]+)|$", str(source))[1]


def digest(value):
    """A hash of rows, token ids and labels in lists, dicts and dataclasses. Of other objects the type counts."""

    def plain(part):
        if isinstance(part, array):
            return hashlib.sha256(part).hexdigest()
        return vars(part) if dataclasses.is_dataclass(part) else type(part).__name__

    total = hashlib.sha256()
    for part in value.items() if isinstance(value, dict) else value:
        total.update(json.dumps(part, default=plain, skipkeys=True).encode())
    return total.hexdigest()[:16]


def environment(accelerator):
    """Versions and hardware: an allow-list, never os.environ."""
    versions = {"python": platform.python_version()}
    for name in "torch transformers accelerate tokenizers safetensors numpy datasets peft diffusers".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = ""
    with contextlib.suppress(OSError):  # without git
        command = "git describe --always --dirty --exclude=* --abbrev=40".split()
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"  # with the instructions that torch uses
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    processes = accelerator.num_processes
    launcher = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    machine = {"commit": commit, "device": device, "processes": processes, "threads": torch.get_num_threads()}
    return {"command": f"{launcher} {shlex.join(sys.argv)}", **machine, "versions": versions}
