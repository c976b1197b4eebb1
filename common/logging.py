"""Run directory, metrics, progress. Only rank 0 writes; the run directory is the truth, trackers are mirrors."""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import io
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import yaml
from accelerate.tracking import filter_trackers
from accelerate.utils import broadcast_object_list

from common import checkpoint as ckpt
from common.checkpoint import InputError

# Flags that leave the result as it is (to rounding) may differ when a run is continued; those of the last line are
# written to config.yaml all the same, since a large model does not fit without them.
NEUTRAL = """run_dir resume threads save_every keep_checkpoints track wandb_project push_to_hub check
micro_batch_size decode_batch_size packing share_prompt cache_trunk gradient_checkpointing""".split()
# Flags that may name files.
SPECS = """model tokenizer ref_model dataset eval_dataset eval_prompts norm_prompts norm_policy formatting reward
metric logit_mask""".split()
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, max_new_tokens=20))"""
_open = []  # runs of this process that are not closed


def on_main(accelerator, function, *args):
    """function(*args) on rank 0; its result, or its error, on every rank, so that no rank waits for a failed one."""
    if accelerator.num_processes == 1:
        return function(*args)
    result = failure = None
    if accelerator.is_main_process:
        try:
            result = function(*args)
        except Exception as error:
            failure = error
    box = [result, failure and (isinstance(failure, InputError), str(failure) or repr(failure))]
    broadcast_object_list(box)
    if box[1]:
        raise failure or (InputError if box[1][0] else RuntimeError)(box[1][1])
    return box[0]


def closes_run(main):
    """Decorator of main: whatever ends it, the run's lock is released and signals have their old handlers again."""

    @functools.wraps(main)
    def wrapped(args):
        try:
            return main(args)
        finally:
            for run in list(_open):
                run.close()

    return wrapped


def visible(text):
    """text with control characters, escape sequences and lone surrogates written out, safe to print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def sparkline(values, width=40):
    """The values as a line of eight block heights, thinned to at most `width`."""
    values = values[:: math.ceil(len(values) / width) or 1]
    low, high = min(values, default=0), max(values, default=0)
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (v - low) / (high - low or 1))] for v in values)


# ---- Identity --------------------------------------------------------------------------------------------------------


def describe(value):
    """A JSON value that is equal for two flags that mean the same: the value itself, or a digest of an object."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    kind, text = type(value).__name__, repr(getattr(value, "name_or_path", ""))
    if parts := [x for x in getattr(value, "components", {0: value}).values() if isinstance(x, torch.nn.Module)]:
        weights = [(k, t.double()) for part in parts for k, t in part.state_dict().items()]
        text = str([(k, t.sum().item(), t.norm().item()) for k, t in weights])
    elif isinstance(value, torch.Tensor):
        text = str([value.shape, hashlib.sha256(value.cpu().numpy().tobytes()).digest()])
    elif isinstance(value, functools.partial):
        text = str([describe(value.func), value.args, value.keywords])
    elif callable(value) and not text.strip("'"):  # a function with what it closes over, or an object with its fields
        function = value if hasattr(value, "__qualname__") else type(value)
        kind = text = f"{function.__module__}.{function.__qualname__}"
        with contextlib.suppress(OSError, TypeError):
            text = inspect.getsource(function)
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        text += str([cells, getattr(value, "__defaults__", None), vars(value)])
    elif not text.strip("'"):
        rows = value if isinstance(value, dict) else list(value)
        text = json.dumps(rows, default=lambda x: list(x) if hasattr(x, "__iter__") else str(x))
    return f"<{kind} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"


def identity(algo, args, script):
    """What decides the result (flags, the script's bytes, the files that spec strings name) and a hash of it."""
    flags = {name: describe(value) for name, value in vars(args).items() if name not in NEUTRAL}
    files = {"script": ckpt.sha256(script)}
    for name in (name for name in flags if name in SPECS):
        value = getattr(args, name) if isinstance(getattr(args, name), str) else ""
        specs = [*map(str.strip, value.split(",")), value.rpartition(":")[0]]  # several sets; a classifier, its label
        paths = [path for path in map(ckpt.spec_path, filter(None, specs)) if path]
        if paths := [file for path in paths for file in [path, *sorted(path.rglob("*"))] if file.is_file()]:
            files[name] = hashlib.sha256("".join(map(ckpt.sha256, paths)).encode()).hexdigest()
    if args.resume not in ("auto", "never"):
        files["resume"] = str(Path(args.resume).resolve())
    digest = hashlib.sha256(json.dumps([algo, flags, files], sort_keys=True).encode()).hexdigest()[:8]
    return {"algo": algo, "hash": digest, "flags": flags, "files": files}


def frozen_weights(lm):
    """(sum, ids) of the weights of --model that are not trained, which checkpoints leave out."""
    weights = [weight for weight in lm.parameters() if not weight.requires_grad]
    sums = [weight.sum(dtype=torch.float64) for weight in weights]  # under FSDP2 of a shard
    return sum(getattr(x, "full_tensor", x.detach)().item() for x in sums), set(map(id, weights))


def differences(old, new):
    """One line for each flag or file in which two identities differ."""
    old, new = json.loads(json.dumps([old, new]))
    both = [(name, old["flags"].get(name), new["flags"].get(name)) for name in old["flags"] | new["flags"]]
    lines = [f"--{name.replace('_', '-')}: was {was}, is {now}" for name, was, now in both if was != now]
    old["files"]["resume"] = new["files"].get("resume")  # where it continues is no difference
    changed = [name for name in old["files"] | new["files"] if old["files"].get(name) != new["files"].get(name)]
    return lines + [f"{'the script' if name == 'script' else f'the file of --{name}'} has changed" for name in changed]


def environment(accelerator):
    """Versions and hardware: an allow-list, never os.environ."""
    versions = {"python": platform.python_version()}
    for name in "torch transformers accelerate tokenizers safetensors numpy datasets peft diffusers".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit, device = "", platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        command = "git describe --always --dirty --exclude=* --abbrev=40".split()
        commit = subprocess.run(command, cwd=ckpt.ROOT, capture_output=True, text=True).stdout.strip()
        device = next(x.partition(":")[2].strip() for x in open("/proc/cpuinfo") if x.startswith("model name"))
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    layout = {"processes": accelerator.num_processes, "threads": torch.get_num_threads()}
    return {"command": shlex.join(sys.argv), "commit": commit, "device": device, **layout, "versions": versions}


# ---- Run -------------------------------------------------------------------------------------------------------------


class Run:
    """One run directory. dir: its path (None with --check); checkpoint, state: what to continue from, or None;
    finished: it is complete and there is nothing to do."""

    def __init__(self, algo, args, script, accelerator):
        self.accelerator, self.args, self.main = accelerator, args, accelerator.is_main_process
        self.identity = identity(algo, args, script)
        self.bar = self.signal = self.mirror = self.lock = None
        _open.append(self)
        self.start, self.last_line, self.handlers = time.monotonic(), 0.0, {}
        found = (None, None, None, False) if args.check else on_main(accelerator, self._claim)
        self.dir, self.checkpoint, self.state, self.finished = found
        self.begun = self.state["step"] if self.state else 0
        if self.dir and not self.finished and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.handlers[number] = signal.signal(number, self._on_signal)

    def _claim(self):
        args, new, path, state = self.args, self.identity, None, None
        explicit = args.resume not in ("auto", "never")
        if explicit and not os.path.isfile(os.path.join(args.resume, "state.json")):
            raise InputError(f"--resume {args.resume} must be auto, never or a checkpoint (checkpoints/step_00000100)")
        if explicit:
            path, state = Path(args.resume), ckpt.read_checkpoint(Path(args.resume), new["algo"])
        folder = Path(args.run_dir or f"runs/{new['algo']}-{new['hash']}")
        try:
            if args.resume == "never" and folder.exists():
                names = (folder.with_name(f"{folder.name}-{n}") for n in range(2, 10**6))
                folder = next(name for name in names if not name.exists())
            folder.mkdir(parents=True, exist_ok=True)
            known = (folder / "env.json").exists()
            foreign = [p for p in folder.iterdir() if not p.name.startswith((".lock", ".tmp-", "config.yaml"))]
            if foreign and not known:
                raise InputError(f"--run-dir {folder} holds files but no run: choose another name")
            self.lock = open(folder / ".lock", "a+")
        except (OSError, ValueError) as error:
            raise InputError(f"--run-dir {visible(str(folder))} cannot be written: {error}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            owner = self.lock.read()
            raise InputError(f"{folder} is locked by the running process {owner}: end that one first") from None
        self.lock.truncate(0)
        self.lock.write(f"{os.getpid()} on {platform.node()}")
        self.lock.flush()
        for stale in [*folder.glob(".tmp-*"), *folder.glob("checkpoints/.tmp-*")]:  # of a run that was killed
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        old = json.loads((folder / "env.json").read_text()) if known else None
        if old and not any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "README.md")):
            old = None  # it failed before its first step
        same = bool(old) and old["hash"] == new["hash"]
        own = explicit and path.resolve().parent == (folder / "checkpoints").resolve()
        if old and not same and not own:
            hint = f"choose another --run-dir, or continue it as it now is with --resume {folder}/checkpoints/step_..."
            lines = "\n  ".join(differences(old, new))
            raise InputError(f"{folder} holds a run with another configuration: {hint}\n  {lines}")
        if same and (folder / "README.md").exists():
            self.say(f"{folder} is finished, its model is in {folder}/hf_model; --resume never repeats the run")
            return folder, None, None, True
        if explicit and not (same and any((folder / "checkpoints").glob("step_????????"))):
            origin = path.resolve().parents[1] / "env.json"
            lines = differences(json.loads(origin.read_text()), new) if origin.exists() else []
            self.say("\n  ".join([f"continuing from {path} (step {state['step']}); what differs:", *lines]))
            for later in (folder / "checkpoints").glob("step_????????"):  # this directory goes back to that checkpoint
                if later.name > path.name:
                    shutil.rmtree(later)
        elif same:
            path, state = ckpt.newest_checkpoint(folder, new["algo"], self.say)
            self.say(f"continuing {folder} from step {state['step'] if state else 0}")
        for name in ("metrics.jsonl", "perf.jsonl", "samples.jsonl"):  # what came after the checkpoint comes again
            keep_lines(folder / name, state["step"] if state else -1)
        if not same:
            with contextlib.suppress(FileNotFoundError):
                (folder / "README.md").unlink()
            sizes = {name: value for name, value in vars(args).items() if name in NEUTRAL[-6:]}
            ckpt.write_text(folder / "config.yaml", yaml.safe_dump(new["flags"] | sizes, sort_keys=False))
            ckpt.write_text(folder / "env.json", json.dumps(new | environment(self.accelerator), indent=1))
        return folder, path, state, False

    # -- signals

    def _on_signal(self, number, frame):
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C stops at once

    def stop_requested(self):
        """Whether any rank has had SIGTERM or SIGINT. Collective; asked where the state is whole."""
        flag = self.accelerator.reduce(torch.tensor(self.signal or 0, device=self.accelerator.device))
        if stop := bool(flag.item()):  # by the sum alone: a signal that came meanwhile waits for the next call
            self.signal = self.signal or signal.SIGTERM
        return stop

    def exit(self, step):
        """Ends the process with 143 (SIGTERM) or 130 (SIGINT) after this step."""
        self.close()
        self.say(f"stopped after step {step}; to continue: {shlex.join([sys.executable, *sys.argv])}")
        raise SystemExit(128 + self.signal)

    def close(self):
        self.bar = self.bar and self.bar.close()
        while self.handlers:
            signal.signal(*self.handlers.popitem())
        if self in _open and self.accelerator.num_processes > 1:
            time.sleep(0.2)  # gloo may deadlock when the model is freed while the last broadcast still winds up
        self.lock = self.lock and self.lock.close()
        if self in _open:
            _open.remove(self)

    # -- output

    def say(self, text):
        if self.main:
            with contextlib.suppress(BrokenPipeError):  # `| head`
                self.bar.write(text) if self.bar else print(text, flush=True)

    def append(self, name, *records):
        with open(self.dir / name, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

    def log(self, step, metrics, perf=None):
        """One line of metrics.jsonl (bitwise reproducible; null for what is not finite) and one of perf.jsonl."""
        if self.main:
            metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
            self.append("metrics.jsonl", {"step": step, **metrics})
            if perf:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                on_gpu = self.accelerator.device.type == "cuda"
                perf = perf | {"perf/peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak}
                self.append("perf.jsonl", {"step": step, "time": time.time(), **perf})
            self._mirror(step, {k: v for k, v in (metrics | (perf or {})).items() if v is not None})

    def _mirror(self, step, metrics):
        """To wandb or tensorboard through accelerate. They may fail; training goes on."""
        if self.args.track == "off" or self.mirror is False:
            return
        try:
            if self.mirror is None:
                name = f"{self.dir.resolve().name}-{self.identity['hash']}"
                wandb = {"id": name, "name": self.dir.name, "resume": "allow", "dir": str(self.dir)}
                self.accelerator.log_with = filter_trackers([self.args.track], self.dir)
                flags = {k: v if isinstance(v, int | float) else str(v) for k, v in self.identity["flags"].items()}
                if not self.accelerator.log_with:
                    raise ImportError(f"{self.args.track} is not installed")
                self.accelerator.init_trackers(self.args.wandb_project, flags, {"wandb": wandb})
                self.mirror = True
            self.accelerator.log(metrics, step=step)
        except Exception as error:
            self.mirror, self.accelerator.trackers = False, []
            self.say(f"warning: --track {self.args.track} is off from here on: {' '.join(str(error).split())}")

    def samples(self, step, rows, show=3):
        """Generated samples, dicts of equal keys: all to samples.jsonl, the first few as a table on the terminal."""
        if not self.main:
            return
        from rich import box, console, table, text

        if self.dir:
            self.append("samples.jsonl", *({"step": step, **row} for row in rows))
        grid = table.Table(*rows[0], box=box.SIMPLE_HEAD, title=f"samples at step {step}", title_justify="left")
        for row in rows[:show]:
            cells = [f"{v:.3g}" if isinstance(v, float) else visible(str(v)) for v in row.values()]
            grid.add_row(*(text.Text(c if len(c) < 200 else c[:200] + "...") for c in cells))
        # not to stdout, since rich ends the process where that is closed
        screen = console.Console(file=io.StringIO(), width=min(120, shutil.get_terminal_size().columns))
        screen.print(grid)
        self.say(screen.file.getvalue().rstrip())

    def status(self, step, total, text):
        """A bar on a terminal; elsewhere a line at most every 5 s, and one for the last step."""
        if self.main and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = self.bar or tqdm(total=total, initial=self.begun, dynamic_ncols=True)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif time.monotonic() - self.last_line > 5 or step >= total:
            self.last_line = time.monotonic()
            eta = (self.last_line - self.start) / max(1, step - self.begun) * (total - step)
            self.say(f"{step}/{total} | {text} | eta {eta:.0f} s")

    # -- saving

    def save(self, step, files, state):
        """Writes a checkpoint. A full disk is a warning: older checkpoints are intact, the next save tries again."""

        def write():
            full = {"algo": self.identity["algo"], "threads": torch.get_num_threads(), **state}
            try:
                ckpt.write_checkpoint(self.dir, step, files, full, self.args.keep_checkpoints, {state.get("best_step")})
            except OSError as error:
                self.say(f"warning: no checkpoint was written at step {step} ({error}); older ones are intact")

        on_main(self.accelerator, write)

    def export(self, lm, tokenizer, name, heads=None):
        """Writes the model to a directory of the run, see common.checkpoint.export."""
        weights = ckpt.full_weights(lm)
        heads = {f: {k: getattr(w, "full_tensor", w.detach)() for k, w in x.items()} for f, x in (heads or {}).items()}
        on_main(self.accelerator, ckpt.export, lm, weights, tokenizer, self.dir / name, heads)

    def finish(self, headline, title, prompt, usage=USAGE, library="transformers", pictures=""):
        """Prints the last lines and writes the model card with the curve of the headline metric, which marks the run as
        finished. prompt: for the example of use. Returns the newest value of every metric."""
        metrics = on_main(self.accelerator, self._finish, headline, title, prompt, usage, library, pictures)
        self.close()
        return metrics

    def newest_metrics(self):
        """The newest value of every metric in metrics.jsonl, on every process."""
        path = self.dir and self.dir / "metrics.jsonl"
        return on_main(self.accelerator, lambda: functools.reduce(dict.__or__, map(json.loads, open(path)), {}))

    def _finish(self, headline, title, prompt, usage, library, pictures):
        records = [json.loads(line) for line in open(self.dir / "metrics.jsonl")]
        metrics = functools.reduce(dict.__or__, records, {})
        curve = [(record["step"], record[headline]) for record in records if record.get(headline) is not None]
        with contextlib.suppress(ImportError):
            from matplotlib.figure import Figure

            axes = (figure := Figure(figsize=(6, 3), layout="constrained")).subplots()
            axes.plot([x for x, _ in curve], [y for _, y in curve], marker=".")
            axes.set(xlabel="optimizer step", ylabel=headline)
            figure.savefig(self.dir / "curve.png", dpi=100)
        env, folder = json.loads((self.dir / "env.json").read_text()), str(self.dir / "hf_model")
        usage = usage.format(folder=folder, prompt=prompt)
        rows = "\n".join(f"| {k} | {v} |" for k, v in sorted(metrics.items()))
        card = (
            f"---\nlibrary_name: {library}\ntags: [plainrl, {env['algo']}]\n---\n# {title}\n\n"
            f"![learning curve](curve.png)\n\n{pictures}"
            f"```python\n{usage}\n```\n\n| metric | last value |\n|---|---|\n{rows}\n\n```\n{env['command']}\n```\n\n"
            f"Commit {env['commit']}; {', '.join(f'{k} {v}' for k, v in env['versions'].items())}; {env['device']}.\n"
        )
        self.bar = self.bar and self.bar.close()
        if curve:
            self.say(f"\n{headline} {sparkline([y for _, y in curve])} {curve[0][1]:.3g} -> {curve[-1][1]:.3g}")
        self.say(f"\n{usage}\n\ncard {self.dir}/README.md | picture {self.dir}/curve.png | model {self.dir}/hf_model")
        if self.args.push_to_hub:
            ckpt.push(folder, self.args.push_to_hub)
        ckpt.write_text(self.dir / "README.md", card)
        return metrics


def keep_lines(path, step):
    """Keeps the lines of a JSONL file up to a step; a last line that a kill tore is dropped."""
    if path.exists():
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
        ckpt.write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
