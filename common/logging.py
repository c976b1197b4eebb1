"""A run: its directory, metrics, checkpoints, signals, picture and card. Only rank 0 writes.

An iteration has one line in metrics.jsonl and its evaluation another, so nothing waits for an evaluation that may fail.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import textwrap
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import torch
import yaml

from common import checkpoint as ckpt
from common.checkpoint import SIZES, describe, differences, environment, identity
from common.cli import InputError, Stopped, flag_of
from common.data import marked
from common.launch import OUT_OF_MEMORY, launch, on_main, peak_memory_mb, set_threads, shared_errors
from common.seeding import rng, seed_libraries, stream_rows
from common.terminal import WIDEST, screen, table_of, visible

SAVE_SECONDS = 600  # save again this long after the last save, unless --save-every is 0

_open = []  # open runs of this process

_masks = threading.local()


def hold_signals():
    """No signal may reach a forked child before `leave_runs`: it would be lost, and its sender would wait forever."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


def let_signals_through():
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def leave_runs():
    """Called in a forked child, which a reward may start: runs, signals, lock and directory belong to its parent."""
    while _open:
        _open.pop().give_back()
    let_signals_through()


os.register_at_fork(before=hold_signals, after_in_parent=let_signals_through, after_in_child=leave_runs)


def closes_run(main):
    """Decorator of main: sets seeds and threads before user functions run, and closes the run however main ends.
    Running out of memory becomes an InputError that names the flags that help."""

    @functools.wraps(main)
    def wrapped(args):
        depth = len(_open)  # runs of a caller, whose reward may train with another script
        set_threads(args.threads)
        seed_libraries(args.seed, args.deterministic)
        # harmless warnings that read like a broken installation: of parts that nothing here uses, or soon corrected
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        screen.start()
        screen.show("loading libraries")
        try:
            return main(args)
        except BaseException as error:
            for run in _open[depth:]:
                run.say_what_is_kept(error)
            words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "bad_alloc")  # of CUDA, cuBLAS, CPUs
            is_users = error in shared_errors
            if isinstance(error, RuntimeError) and not is_users and any(word in str(error) for word in words):
                raise InputError(f"{OUT_OF_MEMORY}\n  {error}") from error
            raise
        finally:
            while len(_open) > depth:
                _open.pop().close()
            shared_errors.clear()
            screen.stop()

    return wrapped


class Run:
    """One run directory, and what every loop needs from it. dir: its absolute path, None with --check; path: the same
    as printed. checkpoint, loaded: what to continue from, or None and {}. finished: whether the run is complete, so
    that there is nothing to do. same: whether the directory already has part of this run.

    Numbers of optimizer steps: first_step were taken by earlier processes, step will be at the end of the iteration at
    hand, total_steps at the end of the run.
    """

    def __init__(self, args, script, fsdp=True):
        self.args = args
        self.accelerator = launch(args.mixed_precision, args.dtype, args.batch_size, args.deterministic, fsdp)
        args.mixed_precision = self.accelerator.mixed_precision  # what was chosen is part of the run's identity
        self.main = self.accelerator.is_main_process
        self.identity = identity(args, script)
        self.signal = None
        self.stepped = False  # whether this process has completed an iteration
        self.made = False  # whether this process created the directory
        self.dir = self.path = None  # absolute, since a user's function may change the working directory; as printed
        self.lock = None
        self.inputs = {}
        self.handlers = {}
        self.seconds = {}
        self.last_line = 0.0
        _open.append(self)
        self.dir, self.checkpoint, self.loaded, self.finished, self.same = on_main(self.accelerator, self._claim)
        self.path = self.path or self.dir
        self.first_step = self.loaded.get("step", 0)
        # again: accelerate may have changed them, and another number would give other bits
        set_threads(args.threads or self.loaded.get("threads"))
        if self.dir and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self.handlers[number] = signal.signal(number, self._on_signal)

    # -- the directory

    def _claim(self):
        """(dir, checkpoint, state, finished, same), on rank 0. Does not yet remove what others or later steps left."""
        path = None
        state = {}
        if self.args.resume not in ("auto", "never"):
            named = Path(self.args.resume)  # a run directory or a checkpoint
            path = max(named.glob("checkpoints/step_????????"), default=named)
            origin = self._origin(path)
        if self.args.check:
            return None, path, ckpt.read_checkpoint(path) if path else state, False, False
        folder = self.dir = self._locked_folder()
        for half_written in [*folder.glob(".tmp-hf_model*"), *folder.glob("checkpoints/.tmp-*")]:  # by a killed run
            shutil.rmtree(half_written, ignore_errors=True)
        same = False
        if (folder / "metrics.jsonl").exists():  # else no run has come to its first step there
            old = json.loads((folder / "env.json").read_text())
            same = old["hash"] == self.identity["hash"]
            continues_itself = path is not None and path.resolve().parent == (folder / "checkpoints").resolve()
            if not same and not continues_itself:
                hint = f"choose another --run-dir, or continue that run with the new settings by --resume {self.path}"
                lines = "\n  ".join(differences(old, self.identity))
                raise InputError(f"{self.path} holds a run with another configuration: {hint}\n  {lines}")
        if same and (folder / "README.md").exists() and (folder / "hf_model").exists():
            self.say(f"{self.path} is finished; its model is in {self.path}/hf_model")
            self.say("to repeat the run, give --resume never")
            return folder, None, state, True, True
        same = same and (path is None or any((folder / "checkpoints").glob("step_????????")))
        if same:
            path, state = ckpt.newest_checkpoint(self.path, self.say)
            self.say(f"continuing {self.path} from step {state.get('step', 0)}")
            state["inputs"] = old.get("inputs", {})
        elif path:  # read only now: if the command is given again, there are newer ones and this may be gone
            if not path.exists():
                raise InputError(f"--resume {path}: there is no such run or checkpoint")
            state = ckpt.read_checkpoint(path)
            lines = differences(origin, self.identity) if origin else []
            own = f"its own flags are --config {path.resolve().parent.parent / 'config.yaml'}; what differs:"
            self.say("\n  ".join([f"continuing from {path} (step {state['step']}); {own}", *lines]))
        return folder, path and path.absolute(), state, False, same

    def _origin(self, checkpoint):
        """The identity of the run that a checkpoint is of, or {}. InputError where it cannot go on here."""
        file = checkpoint.resolve().parent.parent / "env.json"
        if not file.exists():
            return {}
        old = json.loads(file.read_text())
        if old["algo"] != self.identity["algo"]:
            raise InputError(f"--resume {self.args.resume} is of a run of {old['algo']}.py")
        size = "rollout_batch_size" if "rollout_batch_size" in old["flags"] else "batch_size"
        before = old["flags"][size]
        if before != getattr(self.args, size):
            how = f"give {flag_of(size)} {before}, too, because it counts what was trained"
            raise InputError(f"--resume {self.args.resume}: {how}")
        return old

    def _locked_folder(self):
        """The run directory, created if it is new, and locked."""
        folder = Path(self.args.run_dir or f"runs/{self.identity['algo']}-{self.identity['hash']}")
        number = 1
        try:
            folder = first = folder.expanduser()
            str(folder.absolute()).encode()  # UnicodeEncodeError, a ValueError: exports need names in UTF-8
            while self.args.resume == "never" and folder.exists():
                number += 1
                folder = first.with_name(f"{first.name}-{number}")
            self.made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            env = folder / "env.json"
            is_run = env.exists() and '"hash": ' in env.read_text()
            if any(path.name[0] != "." for path in folder.iterdir()) and not is_run:
                raise OSError("it holds files but no run")
            self.lock = open(folder / ".lock", "a")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / ".lock").write_text(f"{os.getpid()} on {platform.node()}")
        except BlockingIOError:
            process = (folder / ".lock").read_text()
            raise InputError(f"{folder} is in use by process {process}: stop that one first") from None
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of the home of nobody
            raise InputError(f"--run-dir {visible(str(folder))} cannot be written: {error}") from None
        self.path = folder
        return folder.absolute()

    def _owns(self):
        """Whether the directory is still the one that this run has locked, not removed, renamed or another run's."""
        lock = self.dir / ".lock"
        return lock.exists() and os.path.samestat(os.fstat(self.lock.fileno()), lock.stat())

    def write_by(self, function, *values):
        """function(*values), which writes to the directory, if it is still this run's."""
        if not self._owns():
            raise InputError(f"{self.path} was removed or renamed while the run went on: nothing more is written there")
        return function(*values)

    def check_inputs(self, data, **models):
        """Notes what a script has read: the rows and tokens in the fields of data, and the commits of models ({flag:
        model or None}) of the hub. InputError if the run in this directory began with others."""
        for name, model in models.items():
            revision = self.args.revision if name == "model" else None
            for adapter in getattr(model, "peft_config", {}).values():
                revision = adapter.revision  # of its base
            if commit := ckpt.hub_commit(model, revision):
                self.inputs[flag_of(name)] = commit
        flags = {"eval_sets": "--eval-dataset", "prompts": "--eval-prompts"}
        for name, value in vars(data).items():
            if isinstance(value, list | dict):
                self.inputs[f"{flags.get(name, '--dataset')} ({name})"] = ckpt.digest(value)
        before = self.loaded.get("inputs", {}) if self.same else {}
        changed = [name for name in before if self.inputs.get(name) != before[name]]
        if changed:
            kept = "a commit is kept by --revision or a directory, what a template writes by --template-options"
            how = f"give --resume never to start anew, or --resume {self.path} to go on with these ({kept})"
            lines = [f"{name}: was {before[name]}, is {self.inputs.get(name)}" for name in changed]
            raise InputError("\n  ".join([f"{self.path} began with other inputs: {how}", *lines]))

    def begin(self, model, optimizer, pretrained, iterations, shown, steps_per_iteration=1, evaluates=True, **state):
        """Loads model and optimizer from the checkpoint, if there is one, and makes the directory this run's. Returns
        the running quantities, which every checkpoint keeps, as attributes: as given or loaded. Collective.

        pretrained: the model of --model, whose frozen weights are left out of checkpoints. iterations: of the whole
        run, each of `steps_per_iteration` optimizer steps. shown: the metrics of status line, picture and card, the
        headline first. evaluates: whether there is anything to evaluate.
        """
        self.model = model
        self.optimizer = optimizer
        self.frozen = ckpt.frozen_weights(pretrained)
        self.settings = ckpt.settings_of(optimizer)
        self.steps_per_iteration = steps_per_iteration
        self.num_iterations = iterations
        self.shown = [*dict.fromkeys(shown)]  # the headline may be one of those of the status line
        self.headline = shown[0]
        if self.same:
            self.headline = self.loaded.get("headline", self.headline)
        self.eval_every = self.args.eval_every if evaluates else 0
        self.logged = {}
        # step, iteration: the last ones that are complete; evaluated: the step of the last evaluation
        kept = {"step": 0, "iteration": 0, "evaluated": 0, "best_score": None, "best_step": None} | state
        self.kept = SimpleNamespace(**{name: self.loaded.get(name, value) for name, value in kept.items()})
        reward = [self.identity[part].get("reward") for part in ("flags", "files")]
        if self.loaded.get("reward", reward) != reward:  # all but the coefficient are statistics of scores
            vars(self.kept).update({name: value for name, value in state.items() if name != "kl_coef"})
        self.kept.reward = reward
        self.total_steps = self.first_step + steps_per_iteration * max(0, iterations - self.kept.iteration)
        if self.checkpoint:
            ckpt.unpack_state(self.checkpoint, self.loaded, model, optimizer, self.frozen)
            if self.kept.iteration >= iterations and not self.same:
                raise InputError(f"--resume {self.args.resume}: nothing is left to train: give more steps or episodes")
        if self.dir:
            has_best = on_main(self.accelerator, self.write_by, self._begin)
            if not has_best:
                self.kept.best_score = self.kept.best_step = None
        self.saved = time.monotonic()
        self.saved_step = self.first_step
        return self.kept

    def _begin(self):
        """Makes the directory this run's: removes what came after the checkpoint from which it continues. Returns
        whether the model of its best evaluation is there."""
        best = self.dir / "hf_model_best"
        noted = self.dir / ".best"
        if not (noted.exists() and noted.read_text() == self._best()):
            shutil.rmtree(best, ignore_errors=True)
        if not self.same:
            (self.dir / "README.md").unlink(missing_ok=True)
            for later in (self.dir / "checkpoints").glob("step_????????"):
                if later.name > self.checkpoint.name:
                    shutil.rmtree(later)
            notes = {"total_steps": self.total_steps, "headline": self.headline, "inputs": self.inputs}
            env = self.identity | environment(self.accelerator) | notes
            # the first file, by which `_locked_folder` knows the directory of a run
            ckpt.write_text(self.dir / "env.json", json.dumps(env, indent=1))
        else:
            self._note_changes(environment(self.accelerator))
        sizes = {name: describe(value) for name, value in vars(self.args).items() if name in SIZES}
        ckpt.write_text(self.dir / "config.yaml", yaml.safe_dump(self.identity["flags"] | sizes, sort_keys=False))
        step = self.loaded.get("step", -1)  # what comes later will be repeated
        lacks_evaluation = self.kept.evaluated < step
        for name in ("metrics.jsonl", "perf.jsonl", "rollouts.jsonl", "samples.jsonl"):
            ckpt.keep_lines(self.dir / name, step, lacks_evaluation)
        if self.args.track != "off":
            self._mirror(open_tracker, self.accelerator, self.args, self.dir, self.identity)
        return best.exists()

    def _note_changes(self, now):
        """Says, and writes to env.json, with which other versions or device a run goes on. now: its environment."""
        env = json.loads((self.dir / "env.json").read_text())
        before = env.get("newest", env["versions"] | {"device": env["device"]})
        after = now["versions"] | {"device": now["device"]}
        changes = [f"{name} {before.get(name)} -> {after[name]}" for name in after if after[name] != before.get(name)]
        if changes:
            self.say(f"warning: the run goes on with {', '.join(changes)}: its numbers may differ in the last digits")
            env["continued"] = [*env.get("continued", []), {"step": self.first_step, "changes": changes}]
            env["newest"] = after
            ckpt.write_text(self.dir / "env.json", json.dumps(env, indent=1))

    def _best(self):
        """What tells a best evaluation from others: its step, and what decides the score. The headline does not: it can
        move to another beta of ilql."""
        names = "reward metric dataset eval_dataset eval_prompts rollout template_options ref_model".split()
        names += "eval_temperature top_k top_p max_new_tokens stop guidance_scale num_inference_steps eta".split()
        decisive = [[self.identity[part].get(name) for name in names] for part in ("flags", "files")]
        return json.dumps([self.kept.best_step, *decisive])

    def describe(self, model):
        """The first line of a summary: what is trained, in which types, and where."""
        total = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        types = f"{self.args.dtype} weights, {self.accelerator.mixed_precision} autocast"
        processes = f"processes: {self.accelerator.num_processes}, threads of each: {torch.get_num_threads()}"
        counts = f"{self.identity['algo']}: {total:,} parameters, {trained:,} trained"
        return f"{counts}; {types}, {self.accelerator.device}, {processes}"

    def plan(self, num_rows, unit):
        """The sizes of a run over rows: the last line of a summary."""
        args = self.args
        epochs = self.total_steps * args.batch_size / num_rows
        share = args.batch_size // self.accelerator.num_processes
        line = f"epochs: {epochs:.3g}, steps: {self.total_steps}, each of {args.batch_size} {unit}: "
        line += f"{share} per process, at most {args.micro_batch_size} per forward pass"
        if getattr(args, "stop", ()):
            line += f"; stops: {list(args.stop)}"
        return line

    # -- the loop

    def iterations(self):
        """Yields the numbers of the remaining iterations, counted from 1; `step` is the optimizer step at the end of
        each. With --check it yields one, or two if each is one optimizer step: only the second has AdamW's moments in
        memory."""
        self.step = self.first_step
        first = self.kept.iteration + 1
        last = self.num_iterations
        if self.args.check:
            last = min(last, first + 1 if self.steps_per_iteration == 1 else first)
        for self.iteration in range(first, last + 1):
            self.step += self.steps_per_iteration
            # for user functions that draw from the global generators
            seed_libraries(int(rng(self.args.seed, "libraries", self.iteration).integers(2**32)))
            self.seconds = {}
            self.since = time.perf_counter()
            if self.iteration <= first + 1:  # the first one also prepares kernels and caches
                self.timed_from = self.step - self.steps_per_iteration
                self.start = time.monotonic()
            screen.show("optimizer steps", self.steps_per_iteration)
            yield self.iteration

    def draw_rows(self, lengths, start, count):
        """The numbers of `count` rows from position `start` of an endless stream in keyed random order; with --check,
        of the longest rows. lengths: of all rows."""
        if not self.args.check:
            return stream_rows(self.args.seed, "data", len(lengths), start, count)
        longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        return [longest_first[place % len(lengths)] for place in range(count)]

    def lap(self, part):
        """Ends a part of an iteration, such as its rollout, and logs its seconds to perf.jsonl."""
        now = time.perf_counter()
        self.seconds[part] = now - self.since
        self.since = now
        screen.show("optimizer steps", self.steps_per_iteration)

    def evaluation_due(self, step):
        """True at the start, every --eval-every steps and at the end, except where a continued run has done it.
        Seeds the global generators for the evaluation."""
        if self.eval_every == 0 or 0 < step <= self.kept.evaluated:
            return False
        # for user functions that draw from the global generators: the same where an evaluation is repeated
        seed_libraries(int(rng(self.args.seed, "evaluation libraries", step).integers(2**32)))
        return step in (0, self.total_steps) or self._passed(step, self.eval_every)

    def _passed(self, step, every):
        """Whether the last iteration contains a multiple of `every`."""
        return every > 0 and step // every > (step - self.steps_per_iteration) // every

    def save(self, step, export):
        """Ends an iteration. Exports the model if an evaluation's headline is the best so far. Writes a checkpoint
        then, every --save-every steps or ten minutes, at the end, and after a signal before it exits. Collective."""
        if step > self.first_step:
            self._status(step)
        if self.dir is None or step == 0:
            return
        kept = self.kept
        if self.evaluation_due(step):
            score = self.logged.get(self.headline, math.nan)
            if self.headline.endswith("loss"):
                score = -score
            is_best = math.isfinite(score) and (kept.best_score is None or score > kept.best_score)
            if is_best and self.headline.startswith("eval/"):
                export("hf_model_best")
                kept.best_score = score
                kept.best_step = step
                on_main(self.accelerator, self.write_by, ckpt.write_text, self.dir / ".best", self._best())
            kept.evaluated = step  # only now, as an evaluation whose export fails is repeated
        stop, is_late = self.stop_requested()
        is_due = is_late or self._passed(step, self.args.save_every)
        if stop or is_due or step in (kept.best_step, self.total_steps):
            self._save()
        if stop:
            raise Stopped(128 + self.signal)

    def _save(self):
        """Writes a checkpoint of the last complete iteration, if there is none. An evaluation that came after it is
        repeated when the run continues from there, with the same result. Collective."""
        if self.saved_step == self.kept.step:
            return
        screen.show("saving")
        self.saved = time.monotonic()
        threads = torch.get_num_threads()
        state = {"threads": threads, "headline": self.headline, **vars(self.kept)}
        files, state = ckpt.pack_state(self.model, self.optimizer, self.frozen, self.settings, **state)
        write = functools.partial(self.write_by, ckpt.write_checkpoint)
        if on_main(self.accelerator, write, self.dir, files, state, self.args.keep_checkpoints, self.say):
            self.saved_step = self.kept.step

    def say_what_is_kept(self, error):
        """After an error, saves the complete iteration if the weights are still its own, as after an error that all
        processes got from `on_main` or `on_each`: no update calls these. A note is printed behind the traceback."""
        if self.dir and self.stepped and error in shared_errors:
            with contextlib.suppress(InputError):
                self._save()
        newest = self.dir and max(self.dir.glob("checkpoints/step_????????"), default=None)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            kept = "there was no checkpoint yet, so nothing is kept"
            if newest:
                command = environment(self.accelerator)["command"]
                kept = f"step {int(newest.name[5:])} is saved; to continue: {command}"
            self.say(f"stopped; {kept}")
        elif newest and self.stepped:
            after = f"or with --resume {self.path} if you edit its files"
            place = self.path / newest.relative_to(self.dir)
            note = f"the last step on disk is in {place}; the same command continues there, {after}"
            BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), note])  # if it is frozen

    # -- signals

    def _on_signal(self, number, frame):
        """Ends at once if nothing would be lost, else asks the loop to stop; a second Ctrl-C does not wait for it."""
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not (self.stepped or self.seconds):  # no part of an iteration is done
            raise Stopped(128 + number)
        screen.headline = "stopping after this iteration (Ctrl-C again stops at once)"  # printing is not safe here

    def stop_requested(self):
        """(whether any rank has received a signal, whether a save is overdue by rank 0's clock). Collective; called
        when the state is complete."""
        is_late = self.main and self.args.save_every > 0 and time.monotonic() - self.saved > SAVE_SECONDS
        asked = torch.tensor([self.signal or 0, int(is_late)], device=self.accelerator.device)
        signals, late = self.accelerator.reduce(asked).tolist()
        if signals:  # only from the sum: a signal that arrives meanwhile waits for the next call
            self.signal = self.signal or signal.SIGTERM
        return signals > 0, late > 0

    def close(self):
        """Gives back lock and signals, and removes a new directory in which no iteration was completed."""
        if self.made and self.dir and not self.stepped and self._owns():
            shutil.rmtree(self.dir, ignore_errors=True)
        if self.accelerator.num_processes > 1:
            time.sleep(0.2)  # gloo may deadlock when the model is freed while the last broadcast is still ending
        self.give_back()

    def give_back(self):
        while self.handlers:
            signal.signal(*self.handlers.popitem())
        if self.lock:
            self.lock.close()

    # -- output

    say = staticmethod(screen.say)

    def append(self, name, *records):
        """Appends lines to a file of the run, with null for numbers that are not finite."""
        if not self.main or self.dir is None:
            return
        finite = json.loads(json.dumps(records), parse_constant=lambda constant: None)  # NaN and Infinity
        lines = [json.dumps(record) + "\n" for record in finite]
        with self.write_by(open, self.dir / name, "a", -1, "utf-8") as file:
            file.write("".join(lines))

    def log(self, step, metrics, **counts):
        """Notes that an iteration is complete, and writes its lines. counts: how many tokens, episodes and so on."""
        self.stepped = True
        self.kept.step = step
        self.kept.iteration = self.iteration
        self.logged = metrics
        perf = {f"perf/seconds_{part}": seconds for part, seconds in self.seconds.items()}
        for name, count in counts.items():
            perf[f"perf/{name}_per_sec"] = count / sum(self.seconds.values())
        perf["perf/peak_memory_mb"] = peak_memory_mb(self.accelerator.device)
        self._write(step, metrics, perf)

    def log_evaluation(self, step, metrics):
        """Writes the lines of an evaluation, which stand behind those of its iteration, and draws the picture."""
        self.logged = self.logged | metrics
        perf = {}
        if step > self.first_step:
            perf["perf/seconds_eval"] = time.perf_counter() - self.since
        self._write(step, metrics, perf)
        if self.main and self.dir and 0 < step < self.total_steps:
            self._draw()
            if "far worse" in self._change([]):
                change = self._change(self._records("samples.jsonl"))  # whose rows tell whether this is noise
                if "far worse" in change:
                    self.say(f"warning: {change}: a lower --lr may help")

    def _write(self, step, metrics, perf):
        """Writes a line to metrics.jsonl, which is bitwise reproducible, one to perf.jsonl and both to the tracker."""
        if metrics:
            self.append("metrics.jsonl", {"step": step, **metrics})
        if perf:
            self.append("perf.jsonl", {"step": step, "time": time.time(), **perf})
        self._mirror(self.accelerator.log, metrics | perf, step=step)

    def _status(self, step):
        """Updates the terminal's live line; elsewhere prints a line at most every 5 s, and one for the last step."""
        # "train/loss" becomes "loss", and "eval/loss" becomes "eval loss"
        labels = {name: name.replace("eval/", "/eval ").partition("/")[2] for name in self.shown if name in self.logged}
        parts = [f"{label} {self.logged[name]:.3g}" for name, label in labels.items()]
        parts.append(self._seconds())
        now = time.monotonic()
        seconds_left = (now - self.start) / (step - self.timed_from) * (self.total_steps - step)
        eta = f"eta {timedelta(seconds=round(seconds_left))}"
        screen.headline = f"{step}/{self.total_steps}, {eta}"
        screen.metrics = " | ".join(parts)
        if not screen.live and (now - self.last_line > 5 or step >= self.total_steps):
            self.last_line = now
            self.say(f"{step}/{self.total_steps} | {screen.metrics} | {eta}")

    def _seconds(self):
        return " + ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())

    def _mirror(self, function, *values, **options):
        """Calls a function that sends values to the tracker of --track. If that fails, training continues."""
        try:
            function(*values, **options)
        except Exception as error:
            self.accelerator.trackers = []
            self.say(f"warning: --track {self.args.track} is off from here on: {' '.join(str(error).split())}")

    def samples(self, step, rows):
        """Logs samples, dicts with equal keys: all to samples.jsonl, three of different prompts or betas as a table on
        the terminal."""
        if not self.main or not rows:
            return
        self.append("samples.jsonl", *({"step": step, **row} for row in rows))
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                self._mirror(tracker.log_table, "eval/samples", **table, step=step)
        different = {(row["prompt"], row.get("beta")): row for row in rows}
        self.say(table_of([*different.values()][:3], f"samples at step {step}"))

    def log_episodes(self, tokenizer, batch, scores, advantages, count=4):
        """Writes the first episodes of a rollout to rollouts.jsonl, responses up to the last trained token, what is not
        trained in brackets. scores, advantages: (B,)."""
        for place, (ids, labels, _) in enumerate(batch.examples[:count]):
            begin = len(batch.queries[place])
            output = marked(tokenizer, ids[begin:], [label != -100 for label in labels[begin:]])
            record = {"step": self.step, "prompt": batch.prompts[place], "output": output}
            record |= {"score": scores[place].item(), "advantage": advantages[place].item()}
            self.append("rollouts.jsonl", record)

    # -- the end

    def export(self, lm, tokenizer, name, heads=None):
        """Writes the model, and heads {file: {name: tensor}} beside it, to a directory of the run. Collective."""
        screen.show(f"writing {name}")
        weights = ckpt.full_weights(lm)
        whole = {}
        for file, tensors in (heads or {}).items():  # gathered where FSDP2 has sharded them
            whole[file] = {key: getattr(x, "full_tensor", x.detach)() for key, x in tensors.items()}
        on_main(self.accelerator, self.write_by, ckpt.export_model, lm, weights, tokenizer, self.dir / name, whole)

    def finish(self, export, prompt, usage):
        """Exports the model, prints the last lines and writes the card, which marks the run as finished. Returns
        `result`. prompt and usage: as `lines_of_use` returns them."""
        if self.args.check:
            peak = peak_memory_mb(self.accelerator.device)
            whole = timedelta(seconds=round(sum(self.seconds.values()) * self.num_iterations))
            self.say(f"one iteration: {self._seconds()}; peak memory {peak:,.0f} MB")
            self.say(f"the whole run (iterations: {self.num_iterations}): {whole}, without evaluations\ncheck passed")
            return {}, None
        export("hf_model")
        on_main(self.accelerator, self.write_by, self._finish, prompt, usage)
        result = self.result()
        self.close()
        self.accelerator.end_training()
        return result

    def result(self):
        """The newest value of every metric, and the run directory."""
        newest = {}
        for record in on_main(self.accelerator, self._records, "metrics.jsonl"):
            newest |= record
        return newest, self.dir

    def _records(self, name):
        path = self.dir / name
        return [json.loads(line) for line in open(path, encoding="utf-8")] if path.exists() else []

    def _draw(self):
        """Draws curve.png. If that fails, training continues."""
        try:
            title = f"{self.dir.resolve().name}: {self.identity['flags']['model']}"
            names = [self.headline, *self.shown]
            self.write_by(draw_curves, self._records("metrics.jsonl"), names, title, self.dir / "curve.png")
        except Exception as error:
            self.say(f"warning: curve.png could not be drawn: {' '.join(str(error).split())}")

    def _change(self, samples):
        """How the headline has changed since the start, in words, and by how much more than its rows in samples vary;
        "" where it has no values."""
        curve = points(self._records("metrics.jsonl"), self.headline)
        if not curve:
            return ""
        first, last = curve[0], curve[-1]
        note = remark(samples, self.headline, first, last)
        return f"{self.headline} {first[1]:.3g} -> {last[1]:.3g}{note}"

    def _finish(self, prompt, usage):
        self._draw()
        records = self._records("metrics.jsonl")
        samples = self._records("samples.jsonl")
        self.say(f"\n{self._change(samples)}")
        folder = f"{self.path}/hf_model"
        length = getattr(self.args, "max_new_tokens", None)
        usage = usage.format(folder=folder, prompt=prompt, max_new_tokens=length)
        self.say(f"\n{usage}\n\ncard: {self.path}/README.md\npicture: {self.path}/curve.png\nmodel: {folder}")
        if self.args.push_to_hub:
            ckpt.push(f"{self.dir}/hf_model", self.args.push_to_hub)
        env = json.loads((self.dir / "env.json").read_text())
        card = model_card(env, [self.headline, *self.shown], records, samples, usage)
        ckpt.write_text(self.dir / "README.md", card)


# ---- Picture and card ------------------------------------------------------------------------------------------------

# Last lines of a run and of its card: how to load the model and sample from it.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, OPTIONSmax_new_tokens={max_new_tokens}))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, OPTIONSreturn_tensors='pt'), max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""


def points(records, name):
    """[(step, value)] of a metric, without values that are not finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def remark(samples, name, first, last):
    """What there is to say of an evaluated metric that changed from first to last, both (step, value). Its rows are
    compared. Of metrics of training, each of which is about other rows, there is nothing."""
    if not name.startswith("eval/"):
        return ""
    *_, group, column = name.split("/")
    rows = [row for row in samples if column in row and row.get("set", group) == group]
    before, after = ([row[column] for row in rows if row["step"] == step] for step, _ in (first, last))
    changes = [new - old for new, old in zip(after, before, strict=False)]
    if len(changes) > 1 and abs(fmean(changes)) <= 2 * stdev(changes) / math.sqrt(len(changes)):
        return " (no change: within twice its standard error)"
    is_worse = last[1] > first[1] if name.endswith("loss") else last[1] < first[1]
    if not is_worse:
        return ""
    is_far = abs(last[1] - first[1]) > abs(first[1]) / 2
    return " (far worse than at the start)" if is_far else " (worse than at the start)"


def draw_curves(records, names, title, path):
    """Draws metrics from records, the lines of metrics.jsonl. names: those to draw, in order; those of evaluations
    follow. All sets and betas of a metric share a panel, also with a training metric of that name."""
    import matplotlib
    from matplotlib.figure import Figure

    evaluated = [name for name in itertools.chain(*records) if name.startswith("eval/")]
    panels = {}
    for name in dict.fromkeys([*names, *evaluated]):
        if points(records, name):
            panels.setdefault(name.rpartition("/")[2].partition("@")[0], []).append(name)
    if not panels:
        return
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / 2)
    # names of metrics and models are not formulas; a letter missing from the font needs no warning
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(4.5 * columns, 0.8 + 1.8 * rows), layout="constrained")
        figure.suptitle(visible(title)[: 50 * columns], fontsize=11)
        for place, (label, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, place)
            for name in metrics:
                curve = points(records, name)
                marker = "." if name.startswith("eval/") or len(curve) < 3 else None
                axes.plot(*zip(*curve, strict=True), label=visible(name), marker=marker, linewidth=1)
            axes.set_ylabel(visible(label))
            axes.yaxis.set_major_formatter("{x:.6g}")  # without a factor above the panel
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        figure.supxlabel("optimizer step")
        figure.savefig(path, dpi=100)


def model_card(env, names, records, samples, usage):
    """README.md of a run. env: the contents of env.json. names: the most important metrics, the headline first.
    records, samples: the lines of metrics.jsonl and samples.jsonl."""
    flags = env["flags"]
    title = f"{flags['model']} trained by {env['algo']}.py on {flags.get('reward') or flags['dataset']}"
    numbers = []
    for name in dict.fromkeys(names):
        if curve := points(records, name):
            (first_step, first), (last_step, last) = curve[0], curve[-1]
            numbers.append(f"- `{name}`: {first:.3g} at step {first_step}, **{last:.3g}** at step {last_step}")
    newest = {sample["prompt"]: sample for sample in samples if sample["step"] == samples[-1]["step"]}
    shown = [*newest.values()][:3]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    parts = [f"# {title}", "\n".join(numbers[:5]), "![learning curve](curve.png)"]
    if shown:  # indented, so that nothing in them is markup
        parts += ["## Samples", textwrap.indent(table_of(shown, width=WIDEST), "    ")]
    parts += ["## Use", f"```python\n{usage}\n```", "## Command", f"```\n{env['command']}\n```"]
    parts.append(f"Commit {env['commit']}; {versions}; {env['device']}.")
    for part in env.get("continued", []):
        parts.append(f"Continued from step {part['step']} with {', '.join(part['changes'])}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def lines_of_use(lm, tokenizer, ids):
    """(text of a prompt, usage code) with which the exported tokenizer gives exactly these ids."""
    usage = SEQ2SEQ_USAGE if lm.config.is_encoder_decoder else USAGE
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    options = ""
    if tokenizer(prompt)["input_ids"] != list(ids):  # special tokens written by a template
        prompt = tokenizer.decode(ids)
        options = "add_special_tokens=False, "
    if lm._hf_peft_config_loaded:  # transformers takes the ends of its base
        options += f"eos_token_id={tokenizer.ends}, "
    return prompt, usage.replace("OPTIONS", options)


# ---- wandb and tensorboard, through accelerate: mirrors of the run directory -----------------------------------------


def open_tracker(accelerator, args, folder, identity):
    """Starts the tracker of --track for the run in a folder, or continues that run's tracking."""
    from accelerate.tracking import filter_trackers

    flags = {}
    for flag, value in identity["flags"].items():
        flags[flag] = value if isinstance(value, int | float) else str(value)
    run_id = re.sub(r"[^\w.-]", "_", f"{folder.resolve().name}-{identity['hash']}")
    place = {"id": run_id, "name": folder.name, "dir": str(folder)}
    project = os.environ.get("WANDB_PROJECT", "plainrl")
    accelerator.log_with = filter_trackers([args.track], folder)
    if not accelerator.log_with:
        raise ImportError(f"pip install {args.track}")
    accelerator.project_configuration.logging_dir = str(folder)  # of tensorboard
    accelerator.init_trackers(project, flags, {"wandb": {"resume": "allow", **place}})
