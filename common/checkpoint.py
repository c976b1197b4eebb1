"""Saves and loads the state of a run: checkpoints and exports. No pickle: safetensors, JSON and a sha256 manifest."""

import contextlib
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from common.cli import InputError

FORMAT = 3  # of checkpoints


def tied_weights(model):
    """{name: first name} of the parameters that the model has under several names."""
    first_names = {}
    tied = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        name = name.removeprefix("module.")
        first_name = first_names.setdefault(id(weight), name)
        if first_name != name:
            tied[name] = first_name
    return tied


def frozen_weights(model):
    """(sum, ids) of the untrained weights of a pretrained model, which checkpoints leave out."""
    weights = [weight for weight in model.parameters() if not weight.requires_grad]
    total = 0.0
    for weight in weights:
        partial = weight.sum(dtype=torch.float64)  # of a shard under FSDP2
        total += getattr(partial, "full_tensor", partial.detach)().item()
    return total, set(map(id, weights))


def settings_of(optimizer):
    """What each parameter group of an optimizer holds besides its parameters and the learning rate, as plain values."""
    groups = []
    for group in optimizer.param_groups:
        plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
        groups.append({name: value for name, value in plain.items() if name != "lr"})
    return groups


def pack_state(model, optimizer, frozen, settings, **state):
    """(files, state) of a checkpoint, with tied weights once. Collective: rank 0 gets the tensors.

    frozen: the `frozen_weights` of --model, which are left out; other weights without gradient (target networks) are
    not. settings: `settings_of` the optimizer before its first step. What the optimizer has changed there, such as a
    count of steps, is stored; the rest comes from flags.
    """
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
    """Loads what `pack_state` packed into model and optimizer. Collective."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    shapes = {name.removeprefix("module."): weight.shape for name, weight in model.state_dict().items()}
    trained = {name.removeprefix("module.") for name, weight in model.named_parameters() if weight.requires_grad}
    others = [name for name, weight in weights.items() if weight.shape != shapes.get(name)]
    others += sorted(trained - weights.keys())
    frozen_sum, _ = frozen
    if not math.isclose(state["frozen"], frozen_sum, rel_tol=1e-9):  # threads change the last digits
        others.append("frozen ones")
    if others:
        advice = "keep its --model and --lora-r, or give its model as --model without --resume"
        raise InputError(f"--resume {path} holds other weights, such as {others[0]}: {advice}")
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


def write_checkpoint(run_dir, step, files, state, keep, protect=()):
    """Writes checkpoints/step_XXXXXXXX, and only then prunes to the newest `keep` and those whose step is in protect.
    On an OSError (a full disk) the older checkpoints are untouched."""
    folder = Path(run_dir) / "checkpoints"
    final = folder / f"step_{step:08d}"
    try:
        with replacing(final) as temporary:
            for name, tensors in files.items():
                safetensors.torch.save_file(tensors, temporary / name)
            (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
            manifest = {path.name: {"sha256": sha256(path)} for path in sorted(temporary.iterdir())}
            (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    except safetensors.SafetensorError as error:  # its own error for a full disk
        raise OSError(str(error)) from error
    steps = sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_????????") if p.name <= final.name)
    for old in set(steps[:-keep]) - set(protect):
        shutil.rmtree(folder / f"step_{old:08d}", ignore_errors=True)


def read_checkpoint(path):
    """state.json of a checkpoint whose files all match the manifest; InputError says what is wrong with it."""
    try:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        for name, entry in manifest.items():
            if sha256(path / name) != entry["sha256"]:
                raise ValueError(f"{name} does not match its checksum")
        state = json.loads((path / "state.json").read_text())
        if state["format"] != FORMAT:
            raise ValueError("it was written by another version of plainrl")
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"checkpoint {path} cannot be read: {error}") from None


def newest_checkpoint(run_dir, warn):
    """(path, state) of the newest complete checkpoint, after a warning for each broken newer one; (None, {}) if there
    is none. InputError if all are broken: a run never silently starts again."""
    folder = Path(run_dir) / "checkpoints"
    paths = sorted(folder.glob("step_????????"), reverse=True)
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except InputError as error:
            warn(f"{error}; falling back to the one before")
    if paths:
        raise InputError(f"every checkpoint in {folder} is broken: start in a new directory with --resume never")
    return None, {}


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Export ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(directory):
    """A new directory to write into. If the block ends without an error, it is synced and replaces the path."""
    temporary = directory.with_name(f".tmp-{directory.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # as the umask has it
        for path in [*temporary.rglob("*"), temporary]:
            if path.suffix == ".safetensors":
                with contextlib.suppress(OSError):  # a file system without modes
                    path.chmod(mode)  # safetensors 0.8 writes files for the owner only: huggingface/safetensors#782
            fsync(path)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
        fsync(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    """Writes model and tokenizer so that plain transformers loads them, with heads {file name: tensors} beside them."""
    with replacing(directory) as temporary:
        lm.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        for name, tensors in heads.items():
            safetensors.torch.save_file(tensors, temporary / name)


def push(directory, repository):
    """Uploads an export, and nothing else, to a hub repository. A new repository is private."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # whatever went wrong, the local copy is there
        reason = " ".join(str(error).split())
        raise InputError(f"--push-to-hub {repository} failed ({reason}); the full model is in {directory}") from None


def write_text(path, text):
    """Writes a file completely or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # of a file name that is not UTF-8
    fsync(temporary)
    temporary.rename(path)
