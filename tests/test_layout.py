"""How the work is laid out must not change what comes out: `python -m pytest tests/test_layout.py`

Every script, in float64 with the global batch fixed. Metrics and weights agree to 1e-9, sampled texts exactly. Runs of
several processes share few starts of torchrun: this file is also the script that torchrun runs, with a file of jobs
that every process plays in turn (`play`).
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from pathlib import Path

import accelerate
import diffusers
import pytest
import safetensors.torch
import torch
import transformers
from harness import ROOT, by_default, launch, same, torchrun
from helpers import log, pad_more, recorded, same_record, same_run, samples
from test_ppo_modes import save_classifier
from test_rollouts import tool

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks, shapes
from common import checkpoint, identity
from common.run import Run

SCRIPTS = {"ppo": ppo, "grpo": grpo, "ilql": ilql, "sft": sft, "reward": reward, "dpo": dpo, "ddpo": ddpo}
TEXTS = ("b", "cda"), ("cde", "fg"), ("fg", "hijka"), ("hijkl", "m"), ("m", ""), ("nopqrst", "ua"), ("ba", "abab")
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
PAIRS = [
    {"prompt": p, "chosen": c, "rejected": c[:1] + "ut"[: len(p) % 3] + "e", "margin": len(c) / 4} for p, c in TEXTS
]
EPISODES = [
    {"dialogue": [p, c, "k", p[::-1]], "reward": [len(c) / 3, -0.5], "truncated": len(p) == 2} for p, c in TEXTS
]
CAPTIONS = [{"prompt": caption, "target": i / 4} for i, caption in enumerate(shapes.CAPTIONS[:5])]


def called():
    """Functions of the user are called by the first process alone: what is wrong on the others does not matter."""
    if os.environ.get("RANK", "0") != "0":  # no assert, which pytest compiles to other code: another reward
        raise RuntimeError("a function of the user is called on another rank")


def vowels(samples, outputs, **columns):
    called()
    return [0.3 * sum(c in "aeiou" for c in o) + 0.1 * (len(s) % 4) for s, o in zip(samples, outputs, strict=True)]


def short(outputs, **columns):
    """Few values, so that groups of equal ones happen."""
    called()
    return [float(len(output) % 3 == 0) for output in outputs]


def elsewhere(sample, prompt_ids, tokenizer):
    """`tool`, with log-probabilities of a sampler that is not the policy."""
    turns = tool(sample, prompt_ids, tokenizer)
    logprobs = []
    for row in turns:
        ids = itertools.chain(*[ids for ids, trained in row if trained])
        logprobs.append([-2.0 - 0.1 * token for token in ids])
    return turns, {"sampler_logprobs": logprobs}


def length(outputs, **columns):
    called()
    return {"length": [len(output) for output in outputs]}


def redness(images, target, **columns):
    called()
    return [-abs(4 * image[0].mean().item() - t) for image, t in zip(images, target, strict=True)]


def colour(images, **columns):
    called()
    return {"green": [image[1].mean().item() for image in images]}


# 6 to 12 optimizer steps of 6 rows, which 1, 2 and 3 processes share; evaluations of 5 rows and of one, which they
# cannot. Whatever a script adds up over rows counts: clipping, scaling, skips, early ends, the norm of rewards. With
# the usual epsilon Adam makes steps of rounding errors where a gradient is zero, as that of a bias of keys is.
COMMON = {
    "dtype": "float64", "attn_implementation": "sdpa", "batch_size": 6, "micro_batch_size": 6, "lr": 1e-2, "threads": 1,
    "lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "eval_every": 3, "save_every": 3,
    "adam_eps": 1e-6,
}  # fmt: skip
STEPS = COMMON | {"model": "gpt2", "total_steps": 6, "save_every": 2}
SAMPLED = {"max_new_tokens": 6, "eval_prompts": ROWS[:5], "metric": "length"}
TWO_SETS = {"x": ROWS[:5], "y": ROWS[5:6]}
ROLLED = COMMON | {
    "model": "gpt2", "dataset": ROWS, "eval_dataset": TWO_SETS, "metric": "length", "total_episodes": 36,
    "rollout_batch_size": 12, "ppo_epochs": 2, "max_new_tokens": 6, "temperature": 0.7, "kl_coef": 0.1,
}  # fmt: skip
PPO = ROLLED | {"kl_target": 0.5, "kl_horizon": 30, "value_head": "linear", "value_head_init": "normal"}
GRPO = ROLLED | {"reward": "short", "group_size": 3, "max_grad_norm": 0.1}
PAIRED = {"dataset": PAIRS, "eval_dataset": {"x": PAIRS[:5], "y": PAIRS[5:6]}}
DDPO = COMMON | {
    "model": "pipeline", "dataset": CAPTIONS, "eval_dataset": {"x": CAPTIONS, "y": CAPTIONS[1:2]}, "reward": "redness",
    "metric": "colour", "num_epochs": 3, "rollout_batch_size": 12, "ppo_epochs": 1, "num_inference_steps": 3,
    "timestep_fraction": 0.9, "guidance_scale": 3.0, "lr": 3e-4, "stat_min_count": 2, "stat_buffer_size": 3,
    "max_grad_norm": 0.5, "decode_batch_size": 64, "cliprange": 1e-2, "negative_prompt": "blue", "save_every": 1,
}  # fmt: skip
CASES = {
    "ppo": PPO | {
        "reward": "vowels", "num_layers_unfrozen": 1, "stop": ["ab", "ki"], "min_length_limit": 2,
        "score_scaling": "running-norm", "score_clip": 1.5, "whiten_rewards": True, "missing_eos_penalty": 0.3,
        "early_stop_kl": 0.01, "ratio_threshold": 1.01,
    },
    "ppo-critic": PPO | {"reward": "vowels", "value_model": "gpt2", "value_lr": 1e-3, "value_warmup": 1},
    "ppo-classifier": PPO | {"reward": "classifier", "score_scaling": "running", "total_episodes": 24},
    "grpo": GRPO | {
        "num_layers_unfrozen": 1, "rollout": "elsewhere", "loss_mean": "token", "cliprange_high": 0.28,
        "correction": "sequence-mask", "correction_limit": 1.1,
    },
    "grpo-idle": GRPO | {  # rows without an advantage are left out of the forward passes
        "kl_coef": 0.0, "ratio_level": "sequence", "advantage_kind": "mean", "cliprange": 1e-2, "loss_mean": "constant",
        "stop": ["ab", "ki"],
    },
    "sft": STEPS | SAMPLED | {"dataset": ROWS, "eval_dataset": TWO_SETS},
    "sft-packed": STEPS | SAMPLED | {
        "dataset": ROWS, "eval_dataset": {"x": ROWS[:5]}, "packing": True, "max_length": 16,
        "num_layers_unfrozen": 1, "stop": ["c"],
    },
    "reward": STEPS | PAIRED | {"center_coef": 0.05, "num_layers_unfrozen": 1},
    "dpo": STEPS | PAIRED | SAMPLED | {"sft_coef": 0.3, "label_smoothing": 0.1, "num_layers_unfrozen": 1},
    "dpo-kept": STEPS | PAIRED | {"sft_coef": 0.3, "precompute_ref": False},
    "ilql": STEPS | SAMPLED | {
        "dataset": EPISODES, "eval_dataset": {"x": EPISODES[:5], "y": EPISODES[5:6]}, "betas": [0.0, 8.0],
        "max_length": 12, "awac_scale": 0.7, "awac_beta": 0.5, "gamma": 0.9, "polyak_alpha": 0.3,
        "steps_for_target_q_sync": 2,
    },
    "ddpo": DDPO,
    "ddpo-lora": DDPO | {"lora_r": 2, "num_epochs": 2, "ppo_epochs": 3, "rollout_batch_size": 6},
}  # fmt: skip


def cases(*left_out):
    """The cases as parameters; the default run has one a script, whose name has no dash."""
    parameters = []
    for case in CASES:
        if case not in left_out:
            marks = [pytest.mark.slow] if "-" in case else []
            parameters.append(pytest.param(case, marks=marks))
    return pytest.mark.parametrize("case", parameters)


def algo_of(case):
    return case.partition("-")[0]


class Stop(BaseException):
    """Ends a job that is to be continued by another, as a kill would: nothing is saved on the way."""


def play(job):
    """Runs the script of a job in this process: case, run_dir, flags, and patches, names of functions below."""
    script = SCRIPTS[algo_of(job["case"])]
    flags = dict(job["flags"])
    for name in "reward", "metric", "rollout":
        if flags.get(name) in globals():
            flags[name] = globals()[flags[name]]
    with pytest.MonkeyPatch.context() as context, ExitStack() as stack:
        context.setattr(identity, "imported_files", lambda: [])  # pytest has loaded other files than torchrun
        for name in job.get("patches", ()):
            stack.enter_context(globals()[name](context, script, job))
        with suppress(Stop):
            script.main(script.Args(run_dir=job["run_dir"], **flags))


def drive(path):
    """What each process of torchrun does."""
    accelerate.Accelerator.end_training = lambda accelerator: None  # the next job needs the process group
    for job in json.loads(Path(path).read_text()):
        play(job)


@contextmanager
def wide(context, script, job):
    """Two columns more beside whatever is padded."""
    reached = pad_more(context.setattr)
    if script is ilql:
        of = ilql.Batch.of

        def wide_episodes(episodes, *args):  # a row of 25 tokens and no action makes all others long
            reached.add("Batch")
            return of([*episodes, ilql.Episode([5] * 25, [], [], True)], *args)

        context.setattr(ilql.Batch, "of", wide_episodes)
    yield
    sampled = {"collate", "pad_rows"}
    needed = {ppo: sampled | {"mask"}, grpo: sampled, ilql: {"Batch", "pad_rows"}}.get(script, {"collate"})
    assert needed <= reached


@contextmanager
def shuffled(context, script, job):
    """The rows of each global batch in another order: where these are a set. Rollouts draw by row, so in ppo, grpo and
    ddpo it is the episodes of a minibatch that come in another order."""
    orders = []

    def reorder(rows):
        orders.append(len(rows))
        return [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(orders)))]

    name = "pair_minibatches" if script is ddpo else "minibatches"
    if hasattr(script, name):
        minibatches = getattr(script, name)

        def reordered(*args):
            for found in minibatches(*args):
                if script is ddpo:  # micro-batches of pairs of image and step
                    yield torch.stack(reorder(torch.cat(found))).split(len(found[0]))
                    continue
                rows, micro_batches = found  # the rows of all processes, and the lines of this one
                lines = reorder([*itertools.chain(*micro_batches)])
                size = len(micro_batches[0])
                yield rows, [lines[i : i + size] for i in range(0, len(lines), size)]

        context.setattr(script, name, reordered)
    else:
        draw_rows = script.draw_rows
        context.setattr(script, "draw_rows", lambda *args: reorder(draw_rows(*args)))
    yield
    assert len(orders) >= 5


@contextmanager
def witness(context, script, job):
    """Each process writes its metrics, what a checkpoint holds, a hash of its own weights and of its optimizer."""
    iterations = recorded(context, Run, "log")
    evaluations = recorded(context, Run, "log_evaluation")
    states = []
    pack_state = checkpoint.pack_state

    def digest(tensors):
        return [hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest() for x in tensors]

    def keep_state(model, optimizer, frozen, **state):
        moments = []
        for entry in optimizer.state.values():
            moments += [x for x in entry.values() if x.ndim]
        lrs = [repr(float(group["lr"])) for group in optimizer.param_groups]
        states.append([digest(model.state_dict().values()), digest(moments), lrs, repr(state)])
        return pack_state(model, optimizer, frozen, **state)

    context.setattr(checkpoint, "pack_state", keep_state)
    yield
    metrics = []
    for (_, step, found), _ in iterations + evaluations:
        metrics.append([step, {name: repr(float(x)) for name, x in found.items()}])
    found = {"log": metrics, "state": states}
    Path(f"{job['run_dir']}.rank{os.environ['RANK']}").write_text(json.dumps(found))


@contextmanager
def fault(context, script, job):
    """What befalls one process, or all, in the first forward pass after a checkpoint of this job."""
    saves = recorded(context, Run, "_save")
    stamp = Path(f"{job['run_dir']}.fault")
    owner = diffusers.UNet2DConditionModel if script is ddpo else transformers.GPT2Model
    forward = owner.forward

    @wraps(forward)
    def failing(*args, **options):
        how = job["how"]
        if saves and how == "stop":
            raise Stop
        if saves and os.environ["RANK"] == str(job["rank"]) and not stamp.exists():
            stamp.touch()
            if how == "raise":
                raise RuntimeError("this process has had enough")
            target = os.getppid() if how == "end all" else os.getpid()
            os.kill(target, signal.SIGKILL if how == "kill" else signal.SIGTERM)
        return forward(*args, **options)

    context.setattr(owner, "forward", failing)
    yield


def same_result(run, expected):
    """As same_run, with what the last checkpoint knows, and with pictures."""
    same_run(run, expected)
    one = json.loads(max(Path(run).glob("checkpoints/*/state.json")).read_text())
    two = json.loads(max(Path(expected).glob("checkpoints/*/state.json")).read_text())
    same_record(one.pop("rewards", {}), two.pop("rewards", {}), "rewards of prompts")
    assert one.pop("run").keys() == two.pop("run").keys()  # with the flags, which differ
    same_record(one, two, "state")
    images = {path.name: path.read_bytes() for path in Path(expected).glob("images/*.png")}
    assert images == {path.name: path.read_bytes() for path in Path(run).glob("images/*.png")}


@pytest.fixture(scope="module")
def places(tiny_dirs, work, tmp_path_factory):
    """{name in a flag: path}: models, and a tokenizer that pads on the right."""
    folder = tmp_path_factory.mktemp("places")
    save_classifier(folder / "classifier", "GPT2", "<pad>")
    letters = randomwalks.tokenizer()
    letters.padding_side = "right"
    letters.save_pretrained(folder / "right")
    paths = {"classifier": folder / "classifier:good", "right": folder / "right", "pipeline": work / "pipeline"}
    return {name: str(path) for name, path in paths.items()} | {"gpt2": tiny_dirs["gpt2"]}


@pytest.fixture(scope="module")
def job(places):
    """job(case, run_dir, **flags): what `play` plays."""

    def make(case, run_dir, *patches, **flags):
        known = {}
        for name, value in (CASES[case] | flags).items():
            if hasattr(SCRIPTS[algo_of(case)].Args, name):
                known[name] = places.get(value, value) if isinstance(value, str) else value
        return {"case": case, "run_dir": str(run_dir), "flags": known, "patches": patches}

    return make


@pytest.fixture(scope="module")
def base(job, tmp_path_factory):
    """base(case) -> directory of the run with which the others are compared: one process, one micro-batch."""
    folder = tmp_path_factory.mktemp("base")

    @cache
    def get(case):
        play(job(case, folder / case))
        return folder / case

    return get


@cases()
def test_the_plain_runs_are_worth_comparing(base, places, case):
    """What is trained moves; skips, early ends, another KL coefficient and groups of equal scores happen."""
    records = log(base(case))
    model, file = ("pipeline", "unet/diffusion_pytorch_model") if algo_of(case) == "ddpo" else ("gpt2", "model")
    before = safetensors.torch.load_file(f"{places[model]}/{file}.safetensors")
    after = safetensors.torch.load_file(base(case) / f"hf_model/{file}.safetensors")
    moved = [name for name in after if name in before and (after[name] - before[name]).abs().max() > 1e-4]
    assert len(moved) > 10 and records[-1]["step"] >= 6
    if case == "ppo":
        assert sum(line.get("policy/skipped", 0) for line in records) > 0
        assert {line["policy/epochs"] for line in records[1:]} == {1, 2}
        assert len({line["objective/kl_coef"] for line in records[1:]}) > 2
        assert len({row["output"] for row in samples(base(case))}) > 5
    if algo_of(case) == "grpo":
        assert sum(line["groups/equal"] for line in records[1:]) > 0


# Which rows share a forward pass, and other flags that say how and not what.
MICRO = [
    {"micro_batch_size": 5, "decode_batch_size": 3},  # of 6 rows, or 12 pairs: a mean of means would be another one
    {"micro_batch_size": 1, "decode_batch_size": 1},
    {"micro_batch_size": 2, "gradient_checkpointing": True},
]
OTHER = {
    "sft": [{"packing": False}],
    "sft-packed": [{"packing": False, "micro_batch_size": 2}],
    "reward": [{"packing": False, "micro_batch_size": 1}],
    "dpo": [{"precompute_ref": False}, {"packing": False, "micro_batch_size": 2}],
    "ilql": [{"attn_implementation": "eager", "micro_batch_size": 2}],
}


def micro_table():
    table = []
    for case in CASES:
        for number, flags in enumerate(MICRO + OTHER.get(case, [])):
            marks = [pytest.mark.slow] if number > 0 or "-" in case else []
            table.append(pytest.param(case, flags, marks=marks, id=f"{case}-{flags}"))
    return table


@pytest.mark.case(80, "ppo grpo ilql sft reward dpo ddpo")
@pytest.mark.parametrize(("case", "flags"), micro_table())
def test_micro_batches_change_nothing(base, job, tmp_path, case, flags):
    play(job(case, tmp_path / "run", **flags))
    same_result(tmp_path / "run", base(case))


@pytest.mark.case(82, "ppo grpo ilql sft reward dpo")
@pytest.mark.parametrize("patches", [[], ["wide"]], ids=["right", "wide"])
@cases("ddpo", "ddpo-lora")  # whose prompts all have the same length
def test_padding_changes_nothing(base, job, tmp_path, case, patches):
    """On the right, as the tokenizer says; in the others it is on the left."""
    play(job(case, tmp_path / "run", *patches, tokenizer="right", micro_batch_size=4))
    same_result(tmp_path / "run", base(case))


@pytest.mark.case(83, "ppo grpo ilql sft reward dpo ddpo")
@cases("sft-packed")
def test_the_order_of_rows_in_a_batch_changes_nothing(base, job, tmp_path, case):
    play(job(case, tmp_path / "run", "shuffled", micro_batch_size=4))
    same_result(tmp_path / "run", base(case))


def start(processes, jobs, folder):
    """The finished torchrun, a minute after a fault among the jobs at most."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "ACCELERATE_USE_CPU": "true"}
    done = launch(torchrun(processes), [__file__, folder / "jobs.json"], folder, folder, timeout=500, **env)
    for stamp in folder.glob("*.fault"):
        assert time.time() - stamp.stat().st_mtime < 60
        stamp.unlink()
    return done


SHARES = {"micro_batch_size": 2, "decode_batch_size": 2}  # of three rows a process: two and one


@pytest.fixture(scope="module")
def several(job, request, tmp_path_factory):
    """several(processes) -> (directory, finished torchrun): the cases asked for, and of two processes middle parts."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = {params.get("case", params.get("algo")) for params in asked}

    @cache
    def get(processes):
        folder = tmp_path_factory.mktemp("several")
        sizes = SHARES if processes == 2 else {"micro_batch_size": 1, "decode_batch_size": 3}
        jobs = [job(case, folder / case, "witness", **sizes) for case in CASES if case in cases]
        if processes == 2:
            for algo in {params["algo"] for params in asked if "algo" in params}:
                part = job(algo, folder / "parts" / algo, "fault") | {"how": "stop"}
                play(part)
                jobs.append(part)
        done = start(processes, jobs, folder)
        assert done.returncode == 0, done.stderr[-9000:]
        return folder, done

    return get


@pytest.mark.case(81, "ppo grpo ilql sft reward dpo ddpo")
@pytest.mark.case(84, "ppo grpo ilql sft reward dpo ddpo")
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
@cases()
def test_several_processes_equal_one(base, several, case, processes):
    """All know the same, bit for bit: every metric (learning rate, KL coefficient, epochs until an early end, skips),
    what checkpoints hold (moments, statistics of prompts, the best step), weights and moments of Adam."""
    folder, _ = several(processes)
    same_result(folder / case, base(case))
    first, *others = [json.loads((folder / f"{case}.rank{rank}").read_text()) for rank in range(processes)]
    assert others == [first] * (processes - 1) and len(first["log"]) > 2 and len(first["state"]) > 1


@pytest.mark.case(17)
@by_default("ppo")
def test_runs_go_on_with_another_number_of_processes(base, several, job, algo):
    folder, done = several(2)
    run = folder / "parts" / algo
    steps = [line["step"] for line in log(run)]
    end = log(base(algo))[-1]["step"]
    assert 0 < max(steps) < end and f"continuing {run} from step" in done.stdout
    assert len(list((run / "checkpoints").iterdir())) == 2
    play(job(algo, run))
    same_result(run, base(algo))


FAILURES = [  # how, in which process, what is printed
    pytest.param("raise", 1, "this process has had enough", marks=[pytest.mark.case(29), pytest.mark.case(68)]),
    pytest.param("kill", 0, "Signal 9 (SIGKILL)", marks=pytest.mark.case(68)),
    pytest.param("end", 1, "; to continue: torchrun --nproc_per_node 2 ", marks=pytest.mark.case(6)),
    pytest.param("end all", 0, "; to continue: torchrun --nproc_per_node 2 ", marks=pytest.mark.case(6)),
]


@pytest.mark.parametrize(("how", "rank", "printed"), FAILURES)
@by_default()
def test_a_process_that_ends_early_ends_all_and_the_run_goes_on(several, job, tmp_path, algo, how, rank, printed):
    """By an error in a forward pass, by a kill, by SIGTERM to it, and by SIGTERM to torchrun."""
    whole = several(2)[0] / algo
    run = tmp_path / "run"
    failed = start(2, [job(algo, run, "fault", **SHARES) | {"how": how, "rank": rank}], tmp_path)
    assert failed.returncode != 0 and printed in failed.stdout + failed.stderr
    state = checkpoint.read_checkpoint(next(iter(checkpoint.checkpoints_of(run))))
    assert 0 < state["step"] < log(whole)[-1]["step"]
    done = start(2, [job(algo, run, **SHARES)], tmp_path)
    assert done.returncode == 0, done.stderr
    same(run, whole)


if __name__ == "__main__":
    import test_layout  # functions have the same names as under pytest, so that runs may be continued

    test_layout.drive(sys.argv[1])
