"""Run directory, metrics, progress. Only rank 0 writes; the directory is the truth, trackers mirror it."""

import contextlib
import fcntl
import functools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

from common import checkpoint as ckpt
from common.cli import InputError
from common.identity import SIZES, blind_spots, describe, differences, environment, identity, other_length
from common.machine import is_out_of_memory, memory_advice, peak_memory_mb, set_threads
from common.report import (
    check_tracker,
    draw_curves,
    how_to_continue,
    log_samples,
    model_card,
    newest_values,
    open_tracker,
    points,
    screen,
    sparkline,
    table_of,
    visible,
)

CHECKPOINTS = "a run directory with checkpoints, or one of these (checkpoints/step_00000100)"
_open = []  # runs of this process that are not closed


def on_main(accelerator, function, *args):
    """function(*args) on rank 0; its result, or its error, on every rank, so that no rank waits for a failed one."""
    if accelerator.num_processes == 1:
        return function(*args)
    from accelerate.utils import broadcast_object_list

    result = None
    failure = None
    error_class = None
    if accelerator.is_main_process:
        try:
            result = function(*args)
        except Exception as error:
            failure = error
            error_class = InputError if isinstance(error, InputError) else RuntimeError
    box = [result, error_class, str(failure) or repr(failure)]
    broadcast_object_list(box)
    result, error_class, message = box
    if failure is not None:
        raise failure
    if error_class is not None:
        raise error_class(message)
    return result


def duration(seconds):
    """In words, in seconds below two minutes and in minutes below two hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def closes_run(main):
    """Decorator of main: on a terminal a line shows what it does, and whatever ends it, the run's lock is released and
    signals have their old handlers again. Where memory runs out, InputError names the flags that lower it."""

    @functools.wraps(main)
    def wrapped(args):
        set_threads(args.threads)  # before functions of the user run
        screen.start()
        screen.show("loading libraries")
        try:
            check_tracker(getattr(args, "track", "off"))
            return main(args)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise InputError(memory_advice(args)) from error
            raise
        finally:
            for run in list(_open):
                run.close()
            screen.stop()

    return wrapped


class Run:
    """One run directory, and what every loop asks of it.

    dir: its path (None with --check). checkpoint, state: what to continue from, or None and {}. begun: optimizer steps
    done before. finished: it is complete and there is nothing to do. same: the directory holds a part of this very run.
    """

    def __init__(self, algo, args, script, accelerator):
        self.accelerator = accelerator
        self.args = args
        self.main = accelerator.is_main_process
        set_threads(args.threads)  # again: accelerate may have set them
        self.identity = identity(algo, args, script)
        self.dir = None
        self.signal = None
        self.stepped = False  # since the start of this process
        self.made = False  # whether this process has made the directory
        self.mirror = None
        self.in_status = ()  # metrics of the picture and the card, behind the headline
        self.noted = None
        self.lock = None
        self.handlers = {}
        self.start = time.monotonic()
        self.last_line = 0.0
        _open.append(self)
        claim = self._named_checkpoint if args.check else self._claim
        self.dir, self.checkpoint, self.state, self.finished, self.same = on_main(accelerator, claim)
        self.begun = self.state.get("step", 0)
        if self.state:  # another number of threads gives other bits
            set_threads(args.threads or self.state["threads"])
        if self.dir and not self.finished and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.handlers[number] = signal.signal(number, self._on_signal)

    # -- the directory

    def _named_checkpoint(self):
        """What `_claim` returns of the checkpoint that --resume names, and no directory."""
        path = None
        state = {}
        if self.args.resume not in ("auto", "never"):
            path = Path(self.args.resume)
            path = max(path.glob("checkpoints/step_????????"), default=path)
            if not (path / "state.json").is_file():
                raise InputError(f"--resume {self.args.resume} must be auto, never, {CHECKPOINTS}")
            state = ckpt.read_checkpoint(path, self.identity["algo"])
        return None, path, state, False, False

    def _claim(self):
        """(directory, checkpoint or None, its state or {}, whether the run is finished, whether the directory held this
        very run), on rank 0. What it holds of another run, or of later steps, is still there."""
        new = self.identity
        _, path, state, _, _ = self._named_checkpoint()
        folder = self._make_folder()
        self._lock(folder)
        # of a run that was killed: ours begin with .tmp-, those of safetensors with .tmp
        for stale in [*folder.glob(".tmp*"), *folder.glob("checkpoints/.tmp*")]:
            if stale.is_dir():
                shutil.rmtree(stale)
            else:
                stale.unlink()
        old = None
        if any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "README.md")):  # else it failed
            old = json.loads((folder / "env.json").read_text())
        same = old is not None and old["hash"] == new["hash"]
        own = path is not None and path.resolve().parent == (folder / "checkpoints").resolve()
        if old and not same and not own:
            hint = f"choose another --run-dir, or continue it as it now is with --resume {folder}"
            lines = "\n  ".join(differences(old, new))
            raise InputError(f"{folder} holds a run with another configuration: {hint}\n  {lines}")
        if same and (folder / "README.md").exists():
            text = f"{folder} is finished, its model is in {folder}/hf_model; --resume never repeats the run"
            self.say(text + blind_spots(new))
            return folder, None, {}, True, True
        same = same and (path is None or any((folder / "checkpoints").glob("step_????????")))
        if same:
            path, state = ckpt.newest_checkpoint(folder, new["algo"], self.say)
            self.say(f"continuing {folder} from step {state.get('step', 0)}{blind_spots(new)}")
        elif path:
            origin = path.resolve().parents[1] / "env.json"
            lines = differences(json.loads(origin.read_text()), new) if origin.exists() else []
            self.say("\n  ".join([f"continuing from {path} (step {state['step']}); what differs:", *lines]))
        elif self.args.resume == "auto" and (shorter := other_length(folder, new)):
            self.say(f"{shorter} holds this run with another length; to continue that one: --resume {shorter}")
        return folder, path, state, False, same

    def _begin(self):
        """Makes the directory that of this run: what came after the checkpoint that it goes on from is removed."""
        if not self.same:
            (self.dir / "README.md").unlink(missing_ok=True)
            for later in (self.dir / "checkpoints").glob("step_????????"):
                if later.name > self.checkpoint.name:
                    shutil.rmtree(later)
        for name in ("metrics.jsonl", "perf.jsonl", "samples.jsonl"):  # these steps come again
            keep_lines(self.dir / name, self.state.get("step", -1))
        if not self.same:
            sizes = {name: describe(value) for name, value in vars(self.args).items() if name in SIZES}
            # first env.json, by which `_make_folder` knows the directory of a run
            ckpt.write_text(self.dir / "env.json", json.dumps(self.identity | environment(self.accelerator), indent=1))
            ckpt.write_text(self.dir / "config.yaml", yaml.safe_dump(self.identity["flags"] | sizes, sort_keys=False))

    def _make_folder(self):
        name = self.args.name or self.identity["algo"]
        folder = Path(self.args.run_dir or f"runs/{name}-{self.identity['hash']}")
        try:
            if self.args.resume == "never" and folder.exists():
                number = 2
                while folder.with_name(f"{folder.name}-{number}").exists():
                    number += 1
                folder = folder.with_name(f"{folder.name}-{number}")
            self.made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in folder.iterdir()]
            foreign = [name for name in names if not name.startswith((".lock", ".tmp"))]
            if foreign and "env.json" not in names:
                raise InputError(f"--run-dir {folder} holds files but no run: choose another name")
            self.lock = open(folder / ".lock", "a+")
        except (OSError, ValueError) as error:
            raise InputError(f"--run-dir {visible(str(folder))} cannot be written: {error}") from None
        return folder

    def _lock(self, folder):
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            owner = self.lock.read()
            raise InputError(f"{folder} is locked by the running process {owner}: end that one first") from None
        self.lock.truncate(0)
        self.lock.write(f"{os.getpid()} on {platform.node()}")
        self.lock.flush()

    # -- the loop

    def restore(
        self, model, optimizer, pretrained, total_steps, longer, headline, stride=1, evaluates=True, **quantities
    ):
        """The running quantities of the algorithm as attributes: those given, or those of the checkpoint, which also
        fills model and optimizer. `save_if_due` saves them as they are then. Collective.

        pretrained: the model of --model, of which checkpoints leave out what is frozen. total_steps: optimizer steps of
        the whole run, stride: of an iteration. longer: the flag that makes the run longer. headline: the metric that
        the picture and the card begin with, or a function of the newest metrics that names it. evaluates: whether there
        is anything to evaluate.
        """
        self.model = model
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.stride = stride
        self.longer = longer
        self.headline = headline
        self.next_picture = 0.0
        self.eval_every = self.args.eval_every if evaluates else 0
        self.best_score = self.state.get("best_score")
        self.best_step = self.state.get("best_step")
        self.frozen = ckpt.frozen_weights(pretrained)
        stored = {name: self.state[name] for name in quantities if name in self.state}
        self.quantities = SimpleNamespace(**quantities | stored)
        if self.checkpoint:
            ckpt.unpack_state(self.checkpoint, self.state, model, optimizer, self.frozen)
        optimizer.register_step_post_hook(self._on_step)  # behind a step that torch takes to fill the moments
        if self.checkpoint and self.begun >= total_steps and not self.same:
            raise InputError(f"--resume {self.args.resume}: nothing is left to train; raise {longer}")
        if self.dir:
            on_main(self.accelerator, self._begin)
        return self.quantities

    def evaluation_due(self, step):
        """At the start, every --eval-every steps, and at the end."""
        if step == 0:
            return self.begun == 0 and self.eval_every > 0
        return self.eval_every > 0 and (step == self.total_steps or self._passed(step, self.eval_every))

    def _passed(self, step, every):
        """Whether a multiple of `every` lies in the last iteration."""
        return every > 0 and step // every > (step - self.stride) // every

    def is_best(self, step, score):
        """Whether the score of an evaluation is the highest so far. The best checkpoint is always kept."""
        if self.best_score is not None and not score > self.best_score:
            return False
        self.best_score = score
        self.best_step = step
        return True

    def save_if_due(self, step):
        """Saves every --save-every steps, at the best evaluation and at the end; also after SIGTERM and SIGINT, and
        leaves then with 143 or 130. Collective."""
        stop = self.stop_requested()
        if stop or step in (self.best_step, self.total_steps) or self._passed(step, self.args.save_every):
            best = {"best_score": self.best_score, "best_step": self.best_step}
            self._save(step, *ckpt.pack_state(self.model, self.optimizer, self.frozen, **vars(self.quantities), **best))
        if stop:
            if self.main:
                self._draw()
            self.close()
            launcher = [sys.executable]
            if self.accelerator.num_processes > 1:
                launcher = ["torchrun", "--nproc_per_node", str(self.accelerator.num_processes)]
            self.say(f"stopped after step {step}; to continue: {shlex.join([*launcher, *sys.argv])}")
            raise SystemExit(128 + self.signal)

    def _save(self, step, files, state):
        """Writes a checkpoint. A full disk is a warning: older checkpoints are intact, the next save tries again."""
        screen.show("saving")
        full = {"algo": self.identity["algo"], "threads": torch.get_num_threads(), **state}

        def write():
            try:
                ckpt.write_checkpoint(self.dir, step, files, full, self.args.keep_checkpoints, {self.best_step})
            except OSError as error:
                self.say(f"warning: no checkpoint was written at step {step} ({error}); older ones are intact")

        on_main(self.accelerator, write)

    # -- signals

    def _on_step(self, *_):
        """After every optimizer step."""
        self.stepped = True
        screen.step(self.stride)

    def _on_signal(self, number, frame):
        """Ends at once where nothing is lost, else asks the loop to stop; a second Ctrl-C does not wait for it."""
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.stepped:
            raise SystemExit(128 + number)
        screen.headline = "stopping after this iteration (Ctrl-C again: at once)"  # to print is not safe here

    def stop_requested(self):
        """Whether any rank has had SIGTERM or SIGINT. Collective; asked where the state is whole."""
        flag = self.accelerator.reduce(torch.tensor(self.signal or 0, device=self.accelerator.device))
        stop = bool(flag.item())
        if stop:  # by the sum alone: a signal that came meanwhile waits for the next call
            self.signal = self.signal or signal.SIGTERM
        return stop

    def close(self):
        screen.stop()
        if self.dir and self._holds_nothing():
            shutil.rmtree(self.dir, ignore_errors=True)
            if not self.args.run_dir:
                with contextlib.suppress(OSError):  # other runs are there
                    self.dir.parent.rmdir()
        while self.handlers:
            signal.signal(*self.handlers.popitem())
        if self in _open and self.accelerator.num_processes > 1:
            time.sleep(0.2)  # gloo may deadlock when the model is freed while the last broadcast still winds up
        if self.lock:
            self.lock.close()
            self.lock = None
        if self in _open:
            _open.remove(self)

    def _holds_nothing(self):
        """Whether this process has made the directory, and a signal or an error ended the run before its first step.
        One that was there before is never removed: it may hold another's files."""
        return self.made and not self.stepped

    # -- output

    def say(self, text):
        if self.main:
            screen.say(text)

    def append(self, name, *records):
        lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
        with open(self.dir / name, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _note(self, record):
        """Keeps in env.json what benchmarks/compare.py shows of a run that is not finished: its length, and the name of
        its headline metric, which an evaluation may change."""
        evaluated = any(name.startswith("eval/") for name in record)
        if self.noted and not evaluated:
            return
        records = [record] if self.noted else self._records()  # at first, also those before a restart
        note = {"total_steps": self.total_steps, "headline": self._headline(records)}
        if note != self.noted:
            path = self.dir / "env.json"
            ckpt.write_text(path, json.dumps(json.loads(path.read_text()) | note, indent=1))
            self.noted = note

    def log(self, step, metrics, perf=None):
        """One line of metrics.jsonl (bitwise reproducible; null for what is not finite) and one of perf.jsonl."""
        if not self.main:
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        record = {"step": step, **dict.fromkeys(metrics), **finite}
        self.append("metrics.jsonl", record)
        self._note(record)
        if perf:
            perf = perf | {"perf/peak_memory_mb": peak_memory_mb(self.accelerator.device)}
            self.append("perf.jsonl", {"step": step, "time": time.time(), **perf})
        self._mirror(self.accelerator.log, finite | (perf or {}), step=step)
        evaluated = not self.eval_every or self.evaluation_due(step)
        if 0 < step < self.total_steps and evaluated and time.monotonic() >= self.next_picture:
            self._draw()

    def _mirror(self, log, *values, step):
        """log(*values, step=step) to wandb or tensorboard, through accelerate. It may fail; training goes on."""
        if self.args.track == "off" or self.mirror is False:
            return
        try:
            if self.mirror is None:
                open_tracker(self.accelerator, self.args.track, self.args.wandb_project, self.dir, self.identity)
                self.mirror = True
            log(*values, step=step)
        except Exception as error:
            self.mirror = False
            self.accelerator.trackers = []
            self.say(f"warning: --track {self.args.track} is off from here on: {' '.join(str(error).split())}")

    def samples(self, step, rows, show=3):
        """Generated samples, dicts of equal keys: all to samples.jsonl, the first few as a table on the terminal."""
        if not self.main or not rows:
            return
        if self.dir:
            self.append("samples.jsonl", *({"step": step, **row} for row in rows))
            self._mirror(log_samples, self.accelerator, rows, step=step)
        self.say(table_of(rows[:show], f"samples at step {step}"))

    def status(self, step, text):
        """For the live line of a terminal; elsewhere a line at most every 5 s, and one for the last step."""
        self.stepped = True  # also where an iteration took no optimizer step
        now = time.monotonic()
        seconds_per_step = (now - self.start) / max(1, step - self.begun)
        eta = f"eta {duration(seconds_per_step * (self.total_steps - step))}"
        screen.headline = f"{step}/{self.total_steps}, {eta}"
        screen.metrics = text
        screen.show("training")
        if not screen.live and (now - self.last_line > 5 or step >= self.total_steps):
            self.last_line = now
            self.say(f"{step}/{self.total_steps} | {text} | {eta}")

    # -- the end

    def export(self, lm, tokenizer, name, heads=None):
        """Writes the model, and heads {file: {name: tensor}} beside it, to a directory of the run. Collective."""
        screen.show(f"writing {name}")
        weights = ckpt.full_weights(lm)
        whole = {}
        for file, tensors in (heads or {}).items():  # gathered where FSDP2 has sharded them
            whole[file] = {key: getattr(x, "full_tensor", x.detach)() for key, x in tensors.items()}
        on_main(self.accelerator, ckpt.export, lm, weights, tokenizer, self.dir / name, whole)

    def finish(self, title, prompt, usage, library="transformers", pictures=""):
        """Prints the last lines and writes the model card, which marks the run as finished. prompt and usage: as
        `lines_of_use` returns them. Returns the newest value of every metric."""
        metrics = on_main(self.accelerator, self._finish, title, prompt, usage, library, pictures)
        self.close()
        return metrics

    def newest_metrics(self):
        """The newest value of every metric in metrics.jsonl, on every process."""
        return on_main(self.accelerator, lambda: newest_values(self._records()))

    def _records(self, name="metrics.jsonl"):
        path = self.dir / name
        return [json.loads(line) for line in open(path, encoding="utf-8")] if path.exists() else []

    def _headline(self, records):
        """The name of the headline metric."""
        return self.headline(newest_values(records)) if callable(self.headline) else self.headline

    def _draw(self):
        """Draws curve.png, where matplotlib is installed. It may fail; training goes on. Evaluations leave it out until
        what it took is a fiftieth of the time since."""
        try:
            import matplotlib.figure  # noqa: F401, which takes a second once

            start = time.monotonic()
            records = self._records()
            title = f"{self.dir.resolve().name}: {self.identity['flags']['model']}"
            draw_curves(records, [self._headline(records), *self.in_status], title, self.dir / "curve.png")
            end = time.monotonic()
            self.next_picture = end + 50 * (end - start)
        except ImportError:
            self.next_picture = math.inf
        except Exception as error:
            self.next_picture = math.inf
            self.say(f"warning: curve.png is not drawn: {' '.join(str(error).split())}")

    def _finish(self, title, prompt, usage, library, pictures):
        records = self._records()
        metrics = newest_values(records)
        headline = self._headline(records)
        values = [value for _, value in points(records, headline)]
        self._draw()
        folder = str(self.dir / "hf_model")
        length = getattr(self.args, "max_new_tokens", None)
        usage = usage.format(folder=folder, prompt=prompt, max_new_tokens=length)
        if values:
            self.say(f"\n{headline} {sparkline(values)} {values[0]:.3g} -> {values[-1]:.3g}")
        places = f"card: {self.dir}/README.md\npicture: {self.dir}/curve.png\nmodel: {self.dir}/hf_model"
        self.say(f"\n{usage}\n\n{places}")
        if self.args.push_to_hub:
            ckpt.push(folder, self.args.push_to_hub)
        env = json.loads((self.dir / "env.json").read_text())
        samples = self._records("samples.jsonl")
        continuing = how_to_continue(self.dir, self.total_steps, self.longer, self.best_step)
        names = [headline, *self.in_status]
        card = model_card(env, title, names, records, samples, usage, library, pictures, continuing)
        ckpt.write_text(self.dir / "README.md", card)
        return metrics


def keep_lines(path, step):
    """Keeps the lines of a JSONL file up to a step; a last line that a kill tore is dropped."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("}\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    ckpt.write_text(path, "".join(kept))
