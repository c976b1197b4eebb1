"""One run: its directory, lock, resuming, signals, metrics, evaluations due and saves. Only rank 0 writes. An iteration
has one line in metrics.jsonl and its evaluation another, so nothing waits for an evaluation that may fail."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import math
import os
import platform
import re
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

from common import checkpoint, identity
from common.errors import InputError, Stopped, flag_of
from common.launch import gather_list, launch, on_main, peak_memory_mb, set_threads, shared_errors
from common.report import change_of, draw_curves, facts_of, model_card, screen, table_of, visible
from common.seeding import rng, seed_libraries

SAVE_SECONDS = 600  # save again this long after the last save, unless --save-every is 0
TERM = [signal.SIGTERM]
_open = []  # open runs of this process


def leave_runs():
    """Called in a child that a reward has forked. A multiprocessing.Pool ends its children by SIGTERM and waits, so
    they need the default handler. What arrives before that would be lost: SIGTERM is blocked during a fork."""
    while _open:
        for number, handler in _open.pop().handlers.items():
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERM)


os.register_at_fork(
    before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, TERM),
    after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, TERM),
    after_in_child=leave_runs,
)

NO_MEMORY = "out of memory|ALLOC_FAILED|can't allocate memory|bad_alloc"  # what CUDA, cuBLAS and CPUs say
OUT_OF_MEMORY = (
    "out of memory: lower --micro-batch-size or --decode-batch-size, or add --gradient-checkpointing, and continue by "
    "the same command; --lora-r, --mixed-precision bf16 and shorter rows need a new run"
)


def closes_run(main):
    """Decorator of main: seeds and threads before user functions run; closes the run however main ends."""

    @functools.wraps(main)
    def wrapped(args):
        depth = len(_open)  # runs of a caller, whose reward may train with another script
        set_threads(args.threads)
        seed_libraries(args.seed, args.deterministic)
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of parts that nothing here uses
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # of its import, until `loading`
        ignored = "fan_in_fan_out is set to False|The following \\w+_pattern keys|Synchronization debug mode is a"
        warnings.filterwarnings("ignore", ignored)
        screen.start()
        screen.show("loading libraries")
        try:
            return main(args)
        except BaseException as error:
            for run in _open[depth:]:
                run.say_what_is_kept(error)
            if isinstance(error, RuntimeError) and error not in shared_errors:  # those are a user's
                if re.search(NO_MEMORY, str(error)):
                    raise InputError(f"{OUT_OF_MEMORY}\n  {error}") from error
            raise
        finally:
            while len(_open) > depth:
                _open.pop().close()
            shared_errors.clear()
            screen.stop()

    return wrapped


class Run:
    """One run directory, and what every loop needs from it. dir: its absolute path (a user's function may change the
    working directory), None with --check; path: as printed. checkpoint, loaded: what to continue from, or None and {}.
    same: whether that is part of this run. first_step, step, total_steps: optimizer steps where this process starts,
    at the end of the iteration at hand, and of the run."""

    def __init__(self, args, script, fsdp=True):
        self.args = args
        self.accelerator = launch(args.mixed_precision, args.dtype, args.batch_size, args.deterministic, fsdp)
        args.mixed_precision = self.accelerator.mixed_precision  # what was chosen is part of the run's identity
        self.main = self.accelerator.is_main_process
        self.identity = identity.identity(args, script)
        self.flags = self.identity["flags"] | {name: vars(args)[name] for name in identity.SIZES if name in vars(args)}
        self.stepped = False  # whether this process has completed an iteration
        self.made = self.begun = False  # whether this process has created the directory, and written to it
        self.dir = self.path = self.lock = self.checkpoint = self.signal = None
        self.inputs = {}
        self.handlers = {}  # {signal: what handled it before}
        self.seconds = {}  # {part: seconds} of the iteration at hand
        _open.append(self)
        self.dir, self.path, self.checkpoint, self.finished = on_main(self.accelerator, self._claim)
        self.loaded = checkpoint.read_checkpoint(self.checkpoint) if self.checkpoint else {}
        self.same = bool(self.loaded) and self.loaded["run"]["hash"] == self.identity["hash"]
        self.first_step = self.loaded.get("step", 0)
        # accelerate may have changed them, and another number would give other bits
        set_threads(args.threads or self.loaded.get("threads"))
        if self.dir and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self.handlers[number] = signal.signal(number, self._on_signal)

    def _claim(self):
        """(dir, path, checkpoint, finished), on rank 0. Changes nothing in the directory but its lock."""
        given = None
        if self.args.resume not in ("auto", "never"):
            named = Path(self.args.resume)  # a run directory or a checkpoint
            given = next(iter(checkpoint.checkpoints_of(named)), named)
        if not self.args.check:
            self._lock()
            old = identity.read_identity(self.dir)
            same = old.get("hash") == self.identity["hash"]
            if self.made and not self.args.run_dir:
                envs = self.dir.parent.glob(f"{self.identity['algo']}-*/env.json")
                newest = max(envs, key=os.path.getmtime, default=self.dir).parent
                other = identity.read_identity(newest)
                if other.get("flags") == self.identity["flags"] and other["hash"] != self.identity["hash"]:
                    lines = "\n  ".join(identity.differences(other, self.identity))
                    self.say(f"a new run: {newest.name} has the same flags, but not the same files:\n  {lines}")
            if old and not (same or self._has(given)) and identity.has_results(self.dir):
                hint = f"choose another --run-dir, or continue that run with the new settings by --resume {self.path}"
                if old.get("finished"):
                    hint += " (it has ended: with more steps or episodes)"
                lines = "\n  ".join(identity.differences(old, self.identity))
                raise InputError(f"{self.path} holds a run with another configuration: {hint}\n  {lines}")
            if same and old.get("finished") and (self.dir / "hf_model").exists():
                self.say(f"{self.path} is finished; its model is in {self.path}/hf_model")
                self.say("to repeat the run, give --resume never")
                return self.dir, self.path, None, True
            for path in checkpoint.checkpoints_of(self.dir):
                state = checkpoint.read_checkpoint(path)
                # others are of the run that this one continues, until its first checkpoint replaces them
                if state["run"]["hash"] == self.identity["hash"]:
                    older = old.get("versions", {}).items() - identity.environment(self.accelerator)["versions"].items()
                    before = "".join(f"; {name} was {version}" for name, version in sorted(older))
                    self.say(f"continuing {self.path} from step {state['step']}{before}")
                    return self.dir, self.path, path, False
        if given:
            if not (given / "state.json").exists():
                raise InputError(f"--resume {self.args.resume}: there is no such run or checkpoint")
            state = checkpoint.read_checkpoint(given)
            if state["run"]["algo"] != self.identity["algo"]:
                raise InputError(f"--resume {self.args.resume} is of a run of {state['run']['algo']}.py")
            config = f"--config {given.resolve().parent.parent / 'config.yaml'}"
            what = f"continuing from {given} (step {state['step']}); its own flags are {config}; what differs:"
            self.say("\n  ".join([what, *identity.differences(state["run"], self.identity)]))
        return self.dir, self.path, given and given.absolute(), False

    def _has(self, path):
        """Whether a checkpoint, or None, is in the directory of this run."""
        return path is not None and path.resolve().is_relative_to(self.dir.resolve())

    def _lock(self):
        """Finds the run directory, creates it if it is new, and locks it."""
        folder = first = Path(self.args.run_dir or f"runs/{self.identity['algo']}-{self.identity['hash']}").expanduser()
        number = 1
        try:
            while self.args.resume == "never" and folder.exists():
                number += 1
                folder = first.with_name(f"{first.name}-{number}")
            self.made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if any(path.name[0] != "." for path in folder.iterdir()) and not identity.read_identity(folder):
                raise OSError("it holds files but no run")
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            self.lock = os.fdopen(descriptor, "r+", encoding="utf-8")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is in use by process {self.lock.read()}: stop that one first") from None
        except (OSError, ValueError) as error:
            raise InputError(f"--run-dir {visible(str(folder))} cannot be written: {error}") from None
        self.lock.truncate()
        self.lock.write(f"{os.getpid()} on {platform.node()}")
        self.lock.flush()
        self.path = folder
        self.dir = folder.absolute()

    def check_inputs(self, data, **models):
        """Notes the rows and tokens in the fields of data, and the weights of models ({flag: model or None}).
        InputError if this run began with others, as another commit of the hub, or if the processes have read different
        ones: a function may return other rows in each."""
        flags = {"eval_sets": "--eval-dataset", "prompts": "--eval-prompts"}
        for name, value in vars(data).items():
            if isinstance(value, list | dict):
                self.inputs[f"{flags.get(name, '--dataset')} ({name})"] = identity.digest(value)
        for name, model in models.items():
            if model is not None:
                total = sum(weight.sum(dtype=torch.float64).item() for weight in model.parameters())
                self.inputs[f"{flag_of(name)} (weights)"] = f"{total:.9g}"  # without what rounding changes
        for other in gather_list([self.inputs]):
            differing = ", ".join(name for name in other if other[name] != self.inputs.get(name))
            if differing:
                raise InputError(f"the processes have read different inputs: {differing}")
        before = self.loaded.get("inputs", {}) if self.same else {}
        changed = [name for name in before if self.inputs.get(name) != before[name]]
        if changed:
            kept = "weights are kept by --revision or a directory, what a template writes by --template-options"
            how = f"give --resume never to start anew, or --resume {self.path} to go on with these ({kept})"
            lines = [f"{name}: was {before[name]}, is {self.inputs.get(name)}" for name in changed]
            raise InputError("\n  ".join([f"{self.path} began with other inputs: {how}", *lines]))

    def begin(self, model, optimizer, pretrained, iterations, shown, steps_per_iteration=1, evaluates=True, **state):
        """Loads model and optimizer from the checkpoint, if there is one. Returns the quantities that checkpoints keep,
        as attributes: of state, or loaded. Collective. pretrained: that of --model, whose frozen weights checkpoints
        leave out. iterations: of the whole run. shown: metrics of status line, picture and card, the headline first."""
        self.model = model
        self.optimizer = optimizer
        self.frozen = checkpoint.frozen_weights(pretrained)
        self.steps_per_iteration = steps_per_iteration
        self.num_iterations = iterations
        self.shown = [*dict.fromkeys(shown)]  # the headline may be one of those of the status line
        self.headline = self.loaded.get("headline", shown[0]) if self.same else shown[0]
        self.eval_every = self.args.eval_every if evaluates else 0
        self.lower_is_better = False  # of a headline that --metric brings; a loss is better lower in any case
        self.logged = {}
        # step, iteration: the last ones that are complete; evaluated: the step of the last evaluation
        kept = {"step": 0, "iteration": 0, "evaluated": 0, "best_score": None, "best_step": None} | state
        self.kept = SimpleNamespace(**{name: self.loaded.get(name, value) for name, value in kept.items()})
        if not self.same:  # another reward, or other rows, may decide
            self.kept.best_score = self.kept.best_step = None
        self.total_steps = self.first_step + steps_per_iteration * max(0, iterations - self.kept.iteration)
        if self.checkpoint:
            checkpoint.unpack_state(self.checkpoint, self.loaded, model, optimizer, self.frozen)
            if self.kept.iteration >= iterations and not self.same:
                raise InputError(f"--resume {self.args.resume}: nothing is left to train: give more steps or episodes")
        if self.args.track != "off" and self.dir:
            on_main(self.accelerator, self._start_tracker)
        self.saved = time.monotonic()
        return self.kept

    def _begin(self):
        """Makes the directory this run's, on rank 0, before its first lines are written. Lines of later steps go."""
        self.begun = True
        env = self.identity | identity.environment(self.accelerator)
        env |= {"total_steps": self.total_steps, "headline": self.headline, "inputs": self.inputs}
        # first: a killed command given again then knows the directory for its own
        checkpoint.write_text(self.dir / "env.json", json.dumps(env, indent=1))
        checkpoint.write_text(self.dir / "config.yaml", yaml.safe_dump(self.flags, sort_keys=False))
        step = self.first_step if self._has(self.checkpoint) else -1  # nothing of this directory is continued
        for name in ("metrics.jsonl", "perf.jsonl", "rollouts.jsonl", "samples.jsonl"):
            checkpoint.keep_lines(self.dir / name, step, lacks_evaluation=self.kept.evaluated < step)

    def _start_tracker(self):
        """Starts the tracker of --track, or continues that of this run, on rank 0."""
        from accelerate.tracking import filter_trackers

        if not identity.has_results(self.dir):
            self._begin()  # a directory with files is then one of a run, also if the tracker cannot start
        name = self.args.track
        self.accelerator.log_with = filter_trackers([name], self.dir)
        if not self.accelerator.log_with:
            raise InputError(f"--track {name}: pip install {name}")
        self.accelerator.project_configuration.logging_dir = str(self.dir)  # of tensorboard
        flags = {flag: str(value) for flag, value in self.identity["flags"].items()}
        run_id = re.sub(r"[^\w.-]", "_", f"{self.dir.resolve().name}-{self.identity['hash']}")
        place = {"id": run_id, "name": self.dir.name, "dir": str(self.dir), "resume": "allow"}
        self.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "plainrl"), flags, {"wandb": place})

    def tell(self, model, facts):
        """Prints what is trained, which flags are not at their defaults, and what a script adds, {name: text}."""
        total = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        what = f"{total:,} parameters, {trained:,} trained; {self.args.dtype} weights, "
        what += f"{self.args.mixed_precision} autocast, {self.accelerator.device}, "
        what += f"processes: {self.accelerator.num_processes}, threads of each: {torch.get_num_threads()}"
        defaults = {field.name: identity.describe(field.default) for field in dataclasses.fields(self.args)}
        defaults["mixed_precision"] = "no"  # what `launch` makes of None on a CPU
        changed = [f"{flag_of(name)} {value}" for name, value in self.flags.items() if value != defaults[name]]
        self.say(facts_of({self.identity["algo"]: what, "flags": ", ".join(changed), **facts}))

    def iterations(self):
        """Yields the numbers of the remaining iterations, counted from 1, each with its `step`. With --check it yields
        one, or two if each is one optimizer step: only the second has AdamW's moments in memory."""
        self.step = self.first_step
        self.start = time.monotonic()
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
            screen.show("optimizer steps", self.steps_per_iteration)
            yield self.iteration

    def lap(self, part):
        """Ends a part of an iteration, such as its rollout, whose seconds go to perf.jsonl."""
        now = time.perf_counter()
        self.seconds[part] = now - self.since
        self.since = now
        screen.show("optimizer steps", self.steps_per_iteration)

    def _seconds(self):
        return " + ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())

    def evaluation_due(self, step):
        """True at the start, every --eval-every steps and at the end, unless it is done. Seeds the global generators:
        user functions draw the same where an evaluation is repeated."""
        if self.eval_every == 0 or 0 < step <= self.kept.evaluated:
            return False
        seed_libraries(int(rng(self.args.seed, "evaluation libraries", step).integers(2**32)))
        return step in (0, self.total_steps) or self._passed(step, self.eval_every)

    def _passed(self, step, every):
        """Whether the last iteration contains a multiple of `every`."""
        return every > 0 and step // every > (step - self.steps_per_iteration) // every

    def save(self, step, export):
        """Ends an iteration: prints its metrics, exports the model if its evaluation is the best so far, and writes a
        checkpoint if one is due. Collective."""
        if step > self.first_step:
            # "train/loss" becomes "loss", and "eval/loss" becomes "eval loss"
            labels = {name: name.replace("eval/", "/eval ").partition("/")[2] for name in self.shown}
            parts = [f"{label} {self.logged[name]:.3g}" for name, label in labels.items() if name in self.logged]
            seconds_left = (time.monotonic() - self.start) / (step - self.first_step) * (self.total_steps - step)
            eta = f"eta {timedelta(seconds=round(seconds_left))}"
            screen.headline = f"{step}/{self.total_steps}, {eta}"
            self.say(" | ".join([f"{step}/{self.total_steps}", *parts, self._seconds(), eta]))
        if self.dir is None or step == 0:
            return
        kept = self.kept
        if self.evaluation_due(step):
            score = self.logged.get(self.headline, math.nan)
            if self.lower_is_better or self.headline.endswith("loss"):
                score = -score
            is_best = math.isfinite(score) and (kept.best_score is None or score > kept.best_score)
            if is_best and self.headline.startswith("eval/"):
                export("hf_model_best")
                kept.best_score = score
                kept.best_step = step
            kept.evaluated = step  # only now, as an evaluation whose export fails is repeated
        stop, is_late = self.stop_requested()
        is_due = is_late or self._passed(step, self.args.save_every)
        if stop or is_due or step in (kept.best_step, self.total_steps):
            self._save()
        if stop:
            raise Stopped(128 + self.signal)

    def _save(self):
        """Writes a checkpoint of the last complete iteration, if there is none. Collective."""
        place = self.dir / f"checkpoints/step_{self.kept.step:08d}"
        if self.checkpoint and self.checkpoint.name == place.name:
            return
        screen.show("saving")
        self.saved = time.monotonic()
        state = {"threads": torch.get_num_threads(), "headline": self.headline, "inputs": self.inputs}
        state |= {"run": self.identity, **vars(self.kept)}
        files, state = checkpoint.pack_state(self.model, self.optimizer, self.frozen, **state)
        on_main(self.accelerator, checkpoint.write_checkpoint, self.dir, files, state, self.args.keep_checkpoints)
        self.checkpoint = place

    def say_what_is_kept(self, error):
        """Tells what is saved. After an error that all processes got from `on_main` or `on_each`, the last complete
        iteration is saved first: no update calls these, so the weights are still its own."""
        if self.dir and self.stepped and error in shared_errors:
            with contextlib.suppress(InputError):
                self._save()
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        if stopped and not self.checkpoint:
            self.say("stopped; there was no checkpoint yet, so nothing is kept")
        elif stopped:
            command = identity.environment(self.accelerator)["command"]
            self.say(f"stopped; step {int(self.checkpoint.name[5:])} is saved; to continue: {command}")
        elif self.checkpoint and self.stepped:  # printed behind the traceback
            place = f"{self.path}/checkpoints/{self.checkpoint.name}"
            after = f"or with --resume {self.path} if you edit its files"
            error.add_note(f"the last step on disk is in {place}; the same command continues there, {after}")

    def _on_signal(self, number, frame):
        """Ends at once if nothing would be lost, else asks the loop to stop; a second Ctrl-C does not wait for it."""
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not (self.stepped or self.seconds):  # no part of an iteration is done
            raise Stopped(128 + number)
        screen.headline = "stopping after this iteration (Ctrl-C again stops at once)"  # printing is not safe here

    def stop_requested(self):
        """(whether any rank has got a signal, whether a save is overdue by rank 0's clock). Collective."""
        is_late = self.main and self.args.save_every > 0 and time.monotonic() - self.saved > SAVE_SECONDS
        asked = torch.tensor([self.signal or 0, int(is_late)], device=self.accelerator.device)
        signals, late = self.accelerator.reduce(asked).tolist()
        if signals:  # only from the sum: a signal that arrives meanwhile waits for the next call
            self.signal = self.signal or signal.SIGTERM
        return signals > 0, late > 0

    def close(self):
        """Gives back lock and signals. Removes a new directory in which there is nothing yet."""
        if self.accelerator.num_processes > 1:
            time.sleep(0.2)  # gloo may deadlock when the model is freed while the last broadcast is still ending
        while self.handlers:
            signal.signal(*self.handlers.popitem())
        if self.lock:
            if self.made and not self.begun:
                (self.dir / ".lock").unlink()
                self.dir.rmdir()
            self.lock.close()

    say = staticmethod(screen.say)

    def append(self, name, *records):
        """Appends lines to a file of the run, with null for numbers that are not finite."""
        if not self.main or self.dir is None:
            return
        if not self.begun:
            self._begin()
        finite = json.loads(json.dumps(records), parse_constant=lambda constant: None)  # NaN and Infinity
        lines = [json.dumps(record) + "\n" for record in finite]
        with open(self.dir / name, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def log(self, step, metrics, **counts):
        """Notes that an iteration is complete, and writes its lines. counts: {name: number}, whose rates it adds."""
        self.stepped = True
        self.kept.step = step
        self.kept.iteration = self.iteration
        perf = {f"perf/seconds_{part}": seconds for part, seconds in self.seconds.items()}
        perf |= {f"perf/{name}_per_sec": count / sum(self.seconds.values()) for name, count in counts.items()}
        perf["perf/peak_memory_mb"] = peak_memory_mb(self.accelerator.device)
        self.logged = {}
        self._write(step, metrics, perf)

    def log_evaluation(self, step, metrics):
        """Writes the lines of an evaluation, behind those of its iteration."""
        perf = {} if step == self.first_step else {"perf/seconds_eval": time.perf_counter() - self.since}
        self._write(step, metrics, perf)

    def _write(self, step, metrics, perf):
        """Writes a line to metrics.jsonl, which is bitwise reproducible, one to perf.jsonl and both to the tracker."""
        self.logged |= metrics
        if metrics:
            self.append("metrics.jsonl", {"step": step, **metrics})
        if perf:
            self.append("perf.jsonl", {"step": step, "time": time.time(), **perf})
        self.accelerator.log(metrics | perf, step=step)

    def samples(self, step, rows):
        """Logs samples, dicts with equal keys, to samples.jsonl, and prints three of different prompts or betas."""
        if not self.main or not rows:
            return
        self.append("samples.jsonl", *({"step": step, **row} for row in rows))
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                tracker.log_table("eval/samples", [*rows[0]], [[*row.values()] for row in rows], step=step)
        different = {(row["prompt"], row.get("beta")): row for row in rows}
        self.say(table_of([*different.values()][:3], f"samples at step {step}"))

    def export(self, lm, tokenizer, name, heads=None):
        """Writes the model, and heads {file: {name: tensor}} beside it, to a directory of the run. Collective."""
        screen.show(f"writing {name}")
        weights = checkpoint.full_weights(lm)
        whole = {}
        for file, tensors in (heads or {}).items():  # gathered where FSDP2 has sharded them
            whole[file] = {key: getattr(x, "full_tensor", x.detach)() for key, x in tensors.items()}
        on_main(self.accelerator, checkpoint.export_model, lm, weights, tokenizer, self.dir / name, whole)

    def finish(self, export, prompt, usage):
        """Exports the model, prints and writes the last lines. Returns `result`. prompt, usage: of `lines_of_use`."""
        if self.args.check:
            peak = peak_memory_mb(self.accelerator.device)
            whole = timedelta(seconds=round(sum(self.seconds.values()) * self.num_iterations))
            self.say(f"one iteration: {self._seconds()}; peak memory {peak:,.0f} MB")
            self.say(f"the whole run (iterations: {self.num_iterations}): {whole}, without evaluations\ncheck passed")
            return {}, None
        export("hf_model")
        on_main(self.accelerator, self._finish, prompt, usage)
        result = self.result()
        self.close()
        self.accelerator.end_training()
        return result

    def result(self):
        """The newest value of every metric, and the run directory."""
        result = {}
        for record in on_main(self.accelerator, self._records, "metrics.jsonl"):
            result |= record
        return result, self.dir

    def _records(self, name):
        path = self.dir / name
        return [json.loads(line) for line in open(path, encoding="utf-8")] if path.exists() else []

    def _finish(self, prompt, usage):
        records = self._records("metrics.jsonl")
        samples = self._records("samples.jsonl")
        way = "; lower is better" if self.lower_is_better else ""
        self.say(f"\n{change_of(records, samples, self.headline)}{way}")
        folder = f"{self.path}/hf_model"
        usage = usage.format(folder=folder, prompt=prompt, max_new_tokens=getattr(self.args, "max_new_tokens", None))
        self.say(f"\n{usage}\n\ncard: {self.path}/README.md\npicture: {self.path}/curve.png\nmodel: {folder}")
        if self.args.push_to_hub:
            from huggingface_hub import HfApi

            HfApi().create_repo(self.args.push_to_hub, private=True, exist_ok=True)
            HfApi().upload_folder(repo_id=self.args.push_to_hub, folder_path=f"{self.dir}/hf_model")
        env = json.loads((self.dir / "env.json").read_bytes())
        names = [self.headline, *self.shown]
        title = f"{self.dir.resolve().name}: {env['flags']['model']}"
        draw_curves(records, names, title, self.dir / "curve.png")
        checkpoint.write_text(self.dir / "README.md", model_card(env, names, records, samples, usage))
        checkpoint.write_text(self.dir / "env.json", json.dumps(env | {"finished": True}, indent=1))
