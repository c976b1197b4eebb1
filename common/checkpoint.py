"""Checkpoints and exports, as safetensors and JSON (no pickle)."""

import contextlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from common.errors import InputError

FORMAT = 5  # of checkpoints


def tied_weights(model):
    """{later name: first name} of the parameters that the model has under several names."""
    named = [(name.removeprefix("module."), w) for name, w in model.named_parameters(remove_duplicate=False)]
    first_names = {id(weight): name for name, weight in reversed(named)}
    return {name: first_names[id(weight)] for name, weight in named if first_names[id(weight)] != name}


def frozen_weights(model):
    """(sum, ids) of the untrained weights of a pretrained model, which checkpoints leave out."""
    weights = [weight for weight in model.parameters() if not weight.requires_grad]
    sums = [weight.sum(dtype=torch.float64) for weight in weights]  # of shards under FSDP2
    total = sum(getattr(partial, "full_tensor", partial.detach)().item() for partial in sums)
    return total, set(map(id, weights))


def pack_state(model, optimizer, frozen, **state):
    """(files, state) of a checkpoint, with tied weights once. Collective: rank 0 gets the tensors. frozen: the
    `frozen_weights` of --model, which are left out; other weights without gradient (target networks) are not."""
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
    return files, {"format": FORMAT, "frozen": frozen_sum, **state}


def unpack_state(path, state, model, optimizer, frozen):
    """Loads what `pack_state` returned from a checkpoint into model and optimizer. Collective."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    shapes = {name.removeprefix("module."): weight.shape for name, weight in model.state_dict().items()}
    trained = {name.removeprefix("module."): each for name, each in model.named_parameters() if each.requires_grad}
    fits = {*trained} <= weights.keys() and all(weight.shape == shapes.get(name) for name, weight in weights.items())
    if not fits or not math.isclose(state["frozen"], frozen[0], rel_tol=1e-9):  # threads change the last digits
        raise InputError(f"--resume {path} holds other weights: keep its --model and --lora-r")
    if (path / "optim.safetensors").exists():
        moments = {}
        for key, value in safetensors.torch.load_file(path / "optim.safetensors").items():
            name, _, quantity = key.partition("//")
            moments.setdefault(name, {})[quantity] = value
        # without settings, which stay those of the flags; lr is a function of the step
        saved = {"state": moments, "param_groups": [{"params": [*weights]}]}
        dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
        for name in trained.keys() - moments.keys():
            optimizer.state.pop(trained[name], None)  # of a weight that was not trained yet: torch makes some up
    # after the optimizer, for whose moments torch takes a step with zero gradients: one without an epsilon gives NaN
    dcp.set_model_state_dict(model, weights, options=options)


def write_checkpoint(run_dir, files, state, keep):
    """Writes checkpoints/step_XXXXXXXX, and only then removes all but the newest `keep` of this run and the best."""
    folder = Path(run_dir) / "checkpoints"
    with replacing(folder / f"step_{state['step']:08d}") as temporary:
        for name, tensors in files.items():
            safetensors.torch.save_file(tensors, temporary / name)
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
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
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"checkpoint {path} cannot be read ({error}): remove it, to go on from another") from None
    if state["format"] != FORMAT:
        raise InputError(f"checkpoint {path} was written by another version of plainrl")
    return state


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
        for path in [*temporary.rglob("*"), temporary]:
            fsync(path)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (OSError, safetensors.SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(f"{directory} cannot be written: {error}") from error
    fsync(directory.parent)


def full_weights(lm):
    """The state dict of a model, or of its adapters with all that came with them, on the CPU of rank 0. Collective."""
    from torch.distributed.checkpoint import state_dict as dcp

    adapters = lm._hf_peft_config_loaded
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters)
    came = getattr(lm, "stored_layers", ())
    named = [(name, weight) for name, weight in lm.named_parameters() if "lora_" in name or name in came]
    frozen = nn.ParameterList(weight for _, weight in named if not weight.requires_grad)
    frozen.requires_grad_(True)
    weights = dcp.get_model_state_dict(lm, options=options)
    frozen.requires_grad_(False)
    # FSDP2 gathered tied weights once per name, and they would be written as often
    weights |= {name: weights[first] for name, first in tied_weights(lm).items() if first in weights}
    return weights


def export_model(lm, weights, tokenizer, directory, heads):
    """Writes model and tokenizer as transformers loads them, with heads {file name: tensors} beside them."""
    with replacing(directory) as temporary:
        lm.save_pretrained(temporary, state_dict=weights)
        stored = {f"base_model.model.{name}": weights[name] for name in getattr(lm, "stored_layers", ())}
        if stored:  # which peft leaves out
            file = temporary / "adapter_model.safetensors"
            safetensors.torch.save_file(safetensors.torch.load_file(file) | stored, file, {"format": "pt"})
        tokenizer.save_pretrained(temporary)
        for name, tensors in heads.items():
            safetensors.torch.save_file(tensors, temporary / name)


def write_text(path, text):
    """Writes a file completely or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)  # of a killed run, or a link to another file
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # of a file name that is not UTF-8
    fsync(temporary)
    temporary.rename(path)


def keep_lines(path, step, lacks_evaluation):
    """Keeps the whole lines of a JSONL file up to a step, without its evaluation if it lacks that."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        is_evaluation = path.name == "samples.jsonl" or re.search('"(eval/|perf/seconds_eval")', line)
        last_kept = step - 1 if lacks_evaluation and is_evaluation else step
        if line.endswith("}\n") and json.loads(line)["step"] <= last_kept:
            kept.append(line)
    write_text(path, "".join(kept))
