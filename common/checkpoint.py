"""What a run keeps: checkpoints, exports, and the identity by which the same command finds its run again.

No pickle: safetensors, JSON and a sha256 manifest.
"""

import ast
import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
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
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from common.cli import ROOT, InputError, flag_of, spec_path
from common.model import adapter_base

FORMAT = 3  # of checkpoints
PLAIN = bool | int | float | str
STDLIB = sysconfig.get_path("stdlib")


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
        groups.append({name: value for name, value in group.items() if name != "lr" and isinstance(value, PLAIN)})
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


def write_checkpoint(run_dir, files, state, keep, warn):
    """Writes checkpoints/step_XXXXXXXX, and only then prunes to the newest `keep` and the best. Returns whether that
    worked: a full disk gives a warning, older checkpoints are untouched, and the next save tries again."""
    folder = Path(run_dir) / "checkpoints"
    final = folder / f"step_{state['step']:08d}"
    try:
        with replacing(final) as temporary:
            for name, tensors in files.items():
                safetensors.torch.save_file(tensors, temporary / name)
            (temporary / "state.json").write_text(json.dumps(state, indent=1))
            manifest = {path.name: {"sha256": sha256(path)} for path in sorted(temporary.iterdir())}
            (temporary / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    except (OSError, safetensors.SafetensorError) as error:  # safetensors has its own error for a full disk
        kept = "older ones are intact" if any(folder.glob("step_????????")) else "there is none yet"
        warn(f"warning: no checkpoint was written at step {state['step']} ({error}); {kept}")
        return False
    # without broken later ones, from before which the run continues
    newest_first = sorted((path for path in folder.glob("step_????????") if path <= final), reverse=True)
    for old in newest_first[keep:]:
        if int(old.name.removeprefix("step_")) != state["best_step"]:
            shutil.rmtree(old, ignore_errors=True)
    return True


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
    os.fsync(descriptor)
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


def keep_lines(path, step, lacks_evaluation):
    """Keeps the lines of a JSONL file up to a step, of this step without those of an evaluation if it lacks that. Drops
    a last line that is incomplete after a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("}\n"):
            record = json.loads(line)
            is_evaluation = any(name.startswith(("eval/", "perf/seconds_eval")) for name in record)
            is_evaluation = is_evaluation or path.name == "samples.jsonl"
            is_repeated = lacks_evaluation and is_evaluation and record["step"] == step
            if record["step"] <= step and not is_repeated:
                kept.append(line)
    write_text(path, "".join(kept))


# ---- Identity --------------------------------------------------------------------------------------------------------

# Flags that change memory, but not the result (to rounding). config.yaml has them, too.
SIZES = """micro_batch_size decode_batch_size packing gradient_checkpointing""".split()
# Flags that may differ when a run is continued.
NEUTRAL = """run_dir name resume threads save_every keep_checkpoints track wandb_project push_to_hub check""".split()
NEUTRAL += SIZES
UNKNOWN = " of unknown contents>"  # the end of the description of what is not hashed


def identity(args, script):
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
    algo = Path(script).stem
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files}


def files_of_flag(value):
    """The files that a flag's value names: by a path, a spec string, or several of these separated by commas. Of a
    directory these are the files directly in it; others further down, such as runs, do not count."""
    if isinstance(value, list | tuple):
        return [Path(part) for part in value if isinstance(part, str | Path) and os.path.isfile(part)]
    if not isinstance(value, str | Path):
        return []
    text = str(value)
    # without a classifier's label; sets, options, and lists and mappings in these, but for marks such as sep=.
    parts = [text.rpartition(":")[0], *re.split(r"[][{},='\"]|: ", text)]
    specs = [text, *(part.strip() for part in parts if re.search(r"\w", part))]
    specs += itertools.chain(*(sorted(glob.glob(spec, recursive=True)) for spec in specs))
    files = []
    for path in dict.fromkeys(map(spec_path, filter(None, specs))):
        if path is None or not path.exists():  # a hub id, or no name of a file
            continue
        if path.is_dir():
            found = [*path.glob("*"), *path.glob("additional_chat_templates/*")]
            if (path / "model_index.json").exists() or (path / "dataset_dict.json").exists():
                found += path.glob("*/*")  # the parts of a pipeline, the splits of a dataset
            files += files_of_flag(adapter_base(path)[0])
            files += sorted(file for file in found if file.is_file() and file.name[0] != ".")
        elif path.suffix == ".py":
            files += with_imports(path.resolve())
            files += sorted(path.with_suffix("").rglob("*.safetensors"))  # the models of an embedded task
        else:
            files.append(path)
    return files


def with_imports(path):
    """A Python file and the user's files that it imports, directly or indirectly, including imports in functions. A
    name built at run time (importlib) is not found."""
    files = [path]
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
    """The files of a module, whose name may end with a thing in it, and of the packages that contain it. Left out are
    Python's and installed ones, and common/, which is hashed anyway."""
    files = []
    for place, part in enumerate(name.split(".")):
        found = PathFinder.find_spec(part, [str(folder) for folder in folders])
        if found is None and place == 0:  # what `pip install -e` has installed may have a finder of its own
            with contextlib.suppress(Exception):  # of finders of others
                found = importlib.util.find_spec(part)
        if found is None:
            break
        file = Path(found.origin if found.has_location else "").resolve()  # some packages have no file
        is_other = file.is_relative_to(STDLIB) or file.is_relative_to(ROOT / "common")
        if file.is_file() and not is_other and not is_installed(file):
            files.append(file)
        folders = found.submodule_search_locations or []
    return files


def is_installed(file):
    """Whether pip has put a file where it is, by --target too."""
    in_packages = {"site-packages", "dist-packages"} & {*file.parts}
    return bool(in_packages) or any(str(file.relative_to(path)) in installed_names(path) for path in file.parents)


@functools.cache
def installed_names(folder):
    """The files in a folder that pip has noted there."""
    notes = [record.read_text(errors="replace").splitlines() for record in folder.glob("*.dist-info/RECORD")]
    return {line.partition(",")[0] for line in itertools.chain(*notes)}


def hash_of_files(files):
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


def describe(value):
    """A JSON value that is the same, in any process, for flags that mean the same. A plain value is itself. Rows are
    named by a hash of their JSON, and a function by its name and a hash of its file and of what that imports."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value):
        return list(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        if inspect.isfunction(value) and "<" not in name:  # a lambda or a function within one may hold other values
            contents = hash_of_files(with_imports(Path(inspect.getfile(value)).resolve()))
        else:
            contents = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    except (OSError, TypeError, ValueError):  # no file, as in a notebook, or no JSON
        return f"<{name}{UNKNOWN}"
    return f"<{name} {contents[:16]}>"


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


def hub_commit(model, revision=None):
    """The commit of the hub from which a model was loaded, or None."""
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    with contextlib.suppress(ValueError):  # what is no name of the hub
        if not os.path.isdir(source):  # diffusers gives the directory in the cache
            source = try_to_load_from_cache(source, "config.json", revision=revision)
        return re.search("snapshots/([0-9a-f]+)|$", str(source))[1]


def digest(value):
    """A hash of rows, token ids and labels in lists, dicts and dataclasses; of other objects the type counts."""

    def plain(part):
        if isinstance(part, array):
            return hashlib.sha256(part).hexdigest()
        return vars(part) if dataclasses.is_dataclass(part) else type(part).__name__

    total = hashlib.sha256()
    for part in value.items() if isinstance(value, dict) else value:
        total.update(json.dumps(part, default=plain, skipkeys=True).encode())
    return total.hexdigest()[:16]


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
    cpu = platform.machine()
    with contextlib.suppress(OSError, IndexError):  # only Linux has the name of the CPU there
        cpu = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    device = f"{cpu}, {torch.backends.cpu.get_cpu_capability()}"  # with the instructions that torch uses
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    processes = accelerator.num_processes
    launcher = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    return {
        "command": f"{launcher} {shlex.join(sys.argv)}",
        "commit": commit,
        "device": device,
        "processes": processes,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
