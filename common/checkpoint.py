"""Command line and spec strings, checkpoints, export. No pickle: safetensors, JSON and a sha256 manifest."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import traceback
from pathlib import Path

import safetensors.torch
import torch
import yaml
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 2  # of checkpoints; a larger number in a file means that it was written by a newer version


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


# ---- Command line ----------------------------------------------------------------------------------------------------


def cli(args_class, main):
    """Parses sys.argv into args_class (tyro; --config FILE.yaml is expanded first) and calls main with it."""
    import tyro

    try:
        main(tyro.cli(args_class, args=expand_config(sys.argv[1:], args_class)))
    except InputError as error:
        if error.__cause__ is not None:  # the user's own code failed: where
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def expand_config(argv, args_class):
    """argv with --config FILE replaced by the flags in it, placed first, so that the command line wins over the file.

    Expanding into argv gives the file tyro's types and error messages. Words are taken as they stand there: PyYAML
    alone reads `1e-3` as a string, and `off` as False.
    """
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return argv
    path, rest = argv[at].partition("=")[2], argv[at + 1 :]
    path, rest = (path, rest) if path or not rest else (rest[0], rest[1:])
    try:
        node = yaml.compose(Path(path).read_text(), Loader=yaml.BaseLoader)
        entries = [(key.value, value) for key, value in node.value if isinstance(node, yaml.MappingNode)]
    except (OSError, yaml.YAMLError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"--config {path} is not a readable YAML mapping: {' '.join(str(error).split())}") from None
    types, flags, seen = {f.name: f.type for f in dataclasses.fields(args_class) if f.init}, [], set()
    for key, value in entries:
        name = key.replace("-", "_")
        if name not in types or name in seen:
            near = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, types, 1) if n != name)
            raise InputError(f"--config {path}: {'doubled' if name in types else 'unknown'} key {key!r}{near}")
        seen.add(name)
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        listed = items != [value]  # a word with a dash in front would be read as a flag
        odd = [i for i in items if not isinstance(i, yaml.ScalarNode) or listed and i.value[:1] in ("-", "")]
        stop_if([f"--config {path}: --{name} cannot hold {i.value!r:.60}" for i in odd])
        words = ["None" if i.value in ("null", "~", "") and i.style is None else str(i.value) for i in items]
        if types[name] in (bool, "bool") and yaml.safe_load(words[0]) in (True, False):
            flags.append(f"--{name}" if yaml.safe_load(words[0]) else f"--no-{name}")
        else:
            flags += [f"--{name}", *words]
    return flags + argv[:at] + rest


def stop_if(problems):
    """Raises one InputError for all problems found, so that a user mends a command once."""
    if problems:
        raise InputError("\n  - ".join([f"{len(problems)} problems:"] * (len(problems) > 1) + problems))


# ---- Spec strings ----------------------------------------------------------------------------------------------------

SPEC = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.+))?")


def spec_path(spec):
    """The file or directory that a spec string names, or None (a hub id, an object). Relative to the working directory,
    else to the repository, so that the defaults work from any directory."""
    if not isinstance(spec, str):
        return None
    match = SPEC.fullmatch(spec)
    path = Path(match["path"] if match else spec).expanduser()
    return next((p for p in (path, ROOT / path) if p.exists()), path if match else None)


def load_function(spec, flag):
    """`path/to/file.py:function[:key=value,...]` -> the function with those keyword arguments. An object is returned as
    it is. The file is imported once, under a private name."""
    if not isinstance(spec, str):
        return spec
    match = SPEC.fullmatch(spec)
    if not match:
        raise InputError(f"{flag} {spec}: expected path/to/file.py:function")
    path = spec_path(spec).resolve()
    if not path.is_file():
        raise InputError(f"{flag} {spec}: there is no file {match['path']}")
    name = "plainrl_user_" + hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    if name not in sys.modules:
        sys.path += [] if str(path.parent) in sys.path else [str(path.parent)]  # for what the file imports
        module_spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise InputError(f"{flag} {spec}: importing {path.name} failed: {type(error).__name__}: {error}") from error
    function = getattr(sys.modules[name], match["name"], None)
    if not callable(function):
        found = [n for n, v in vars(sys.modules[name]).items() if callable(v) and not n.startswith("_")]
        raise InputError(f"{flag} {spec}: {path.name} has no function {match['name']!r} (it has {', '.join(found)})")
    options = dict(option.partition("=")[::2] for option in (match["options"] or "").split(",") if option)
    return functools.partial(function, **{k: yaml.safe_load(v) for k, v in options.items()}) if options else function


def build(spec, flag):
    """What a spec string stands for where a value and not a function is wanted: `file.py:function` is called, anything
    else is returned as it is. Call it before Accelerator(): it may train a model in a subprocess."""
    if not (isinstance(spec, str) and SPEC.fullmatch(spec)):
        return spec
    try:
        value = load_function(spec, flag)()
    except Exception as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{flag} {spec}: {type(error).__name__}: {error}") from error
    if value is None:
        raise InputError(f"{flag} {spec} returned None")
    return value


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def tied_weights(model):
    """{name: name of the first} of the parameters that the model has under several names."""
    names, seen = [(n.removeprefix("module."), id(w)) for n, w in model.named_parameters(remove_duplicate=False)], {}
    return {name: first for name, key in names if (first := seen.setdefault(key, name)) != name}


def pack_state(model, optimizer, frozen, **state):
    """(files, state) of a checkpoint. Collective: every rank calls it, rank 0 gets the tensors.

    Full state dicts come from torch.distributed.checkpoint, so DDP and FSDP2 use the same path. Tied parameters are
    stored once. An optimizer that has not stepped is left out: reading its state would take a hidden step.
    frozen: the `frozen_weights` of --model, which are left out; others without gradient (target networks) are not.
    """
    others = nn.ParameterList(w for w in model.parameters() if not w.requires_grad and id(w) not in frozen[1])
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    others.requires_grad_(True)
    weights = dcp.get_model_state_dict(model, options=options)  # empty on ranks other than 0
    others.requires_grad_(False)
    again = tied_weights(model)
    files = {"model.safetensors": {name: tensor.contiguous() for name, tensor in weights.items() if name not in again}}
    if optimizer.state:
        saved = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        entries = [(name, *item) for name, entry in saved.get("state", {}).items() for item in entry.items()]
        files["optim.safetensors"] = {f"{name}//{key}": torch.as_tensor(x).contiguous() for name, key, x in entries}
        state["optimizer_groups"] = [group["params"] for group in saved.get("param_groups", [])]
    tied = {name: first for name, first in again.items() if first in weights}
    return files, {"format": FORMAT, "tied": tied, "frozen": frozen[0], **state}


def unpack_state(path, state, model, optimizer, frozen):
    """Loads what `pack_state` packed into model and optimizer. Collective."""
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    weights |= {name: weights[first] for name, first in state["tied"].items()}
    trained = {name.removeprefix("module."): w.shape for name, w in model.named_parameters() if w.requires_grad}
    lacking = [name for name, shape in trained.items() if name not in weights or weights[name].shape != shape]
    lacking += weights.keys() - {name.removeprefix("module.") for name in model.state_dict()}
    # format 1 has no such sum, it holds all weights; threads change the last digits
    if lacking or not math.isclose(state.get("frozen", frozen[0]), frozen[0], rel_tol=1e-9):
        what = f"trained other weights, among them {min(lacking)}" if lacking else "froze other weights than these"
        raise InputError(f"--resume {path} {what}: keep its --model and --lora-r, or name its model without --resume")
    dcp.set_model_state_dict(model, weights, options=options)
    if (path / "optim.safetensors").exists():
        moments = {}
        for key, value in safetensors.torch.load_file(path / "optim.safetensors").items():
            moments.setdefault(key.partition("//")[0], {})[key.partition("//")[2]] = value
        # Hyperparameters stay those of the flags; lr is a function of the step.
        groups = [{"params": names} for names in state["optimizer_groups"]]
        dcp.set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=options)


def write_checkpoint(run_dir, step, files, state, keep, protect=()):
    """Writes checkpoints/step_XXXXXXXX under a temporary name, syncs it, renames it, and only then prunes to the newest
    `keep` and those whose step is in protect. On an OSError (a full disk) the older checkpoints are untouched."""
    folder = Path(run_dir) / "checkpoints"
    final, temporary = folder / f"step_{step:08d}", folder / f".tmp-step_{step:08d}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        for name, tensors in files.items():
            safetensors.torch.save_file(tensors, temporary / name)
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        manifest = {p.name: {"sha256": sha256(p), "bytes": p.stat().st_size} for p in sorted(temporary.iterdir())}
        (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
        for path in [*temporary.iterdir(), temporary]:
            fsync(path)
        if final.exists():  # left by a run that was stopped after it, or broken: this one is whole
            shutil.rmtree(final)
        temporary.rename(final)
        fsync(folder)
    except (OSError, safetensors.SafetensorError) as error:  # safetensors has its own word for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(str(error)) from error
    steps = sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_????????") if p.name <= final.name)
    for old in set(steps[:-keep]) - set(protect):
        shutil.rmtree(folder / f"step_{old:08d}")


def read_checkpoint(path, algo=None):
    """state.json of a checkpoint whose files all match the manifest; InputError says what is wrong with it."""
    try:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        for name, entry in manifest.items():
            if sha256(path / name) != entry["sha256"]:
                raise InputError(f"checkpoint {path}: {name} does not match its checksum")
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"checkpoint {path} cannot be read: {error}") from None
    if state["format"] > FORMAT:
        raise InputError(f"checkpoint {path} was written by a newer version of plainrl: upgrade to read it")
    if algo and state["algo"] != algo:
        raise InputError(f"checkpoint {path} is of {state['algo']}.py, this is {algo}.py")
    return state


def newest_checkpoint(run_dir, algo, warn):
    """(path, state) of the newest whole checkpoint, after a warning for each broken newer one; (None, None) if there is
    none at all; InputError when all are broken: a run is never silently started again."""
    folder = Path(run_dir) / "checkpoints"
    paths = sorted(folder.glob("step_????????"), reverse=True)
    for path in paths:
        try:
            return path, read_checkpoint(path, algo)
        except InputError as error:
            warn(f"{error}; falling back to the one before")
    if paths:
        raise InputError(f"every checkpoint in {folder} is broken: --resume never starts again in a new directory")
    return None, None


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
    """A new directory to write into that takes the place of a path when the block ends without an error."""
    temporary = directory.with_name(f".tmp-{directory.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            fsync(path)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def full_weights(lm):
    """The state dict of a model, or of its adapters, on the CPU of rank 0. Collective."""
    options = {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": lm._hf_peft_config_loaded}
    weights = dcp.get_model_state_dict(lm, options=dcp.StateDictOptions(**options))
    # those that FSDP2 has sharded were gathered once for each name, and would be written as often
    return weights | {name: weights[first] for name, first in tied_weights(lm).items() if first in weights}


def export(lm, weights, tokenizer, directory, heads):
    """Writes model and tokenizer so that plain transformers loads them, heads {file name: tensors} beside."""
    with replacing(directory) as temporary:
        lm.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        for name, tensors in heads.items():
            safetensors.torch.save_file(tensors, temporary / name)


def push(directory, repository):
    """Uploads an export, and nothing else, to a hub repository, which is made private where it is new."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # whatever went wrong, the local copy is there
        reason = " ".join(str(error).split())
        raise InputError(f"--push-to-hub {repository} failed ({reason}); the model is whole in {directory}") from None


def write_text(path, text):
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.rename(path)
