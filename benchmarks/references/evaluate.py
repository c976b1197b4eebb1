"""Measures the models that a peer has saved as our script measures its own: same function, prompts, seed and sampling.

    python benchmarks/references/evaluate.py runs/references/sft-trl-seed1 --claim sft --seed 1

The run directory has train.jsonl with a record for every saved model; it gets metrics.jsonl with
{"step", "episode", "seconds", "eval/..."} for each. The model before training is that of the embedded task, unless the
peer has saved its own at step 0.
"""

import argparse
import functools
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import safetensors.torch

from algos import ddpo, dpo, grpo, ppo, reward
from common.cli import from_task
from common.forward import can_pack
from common.functions import build
from common.launch import launch, set_threads
from common.models import load_lm
from common.sampling import read_data, read_prompts
from common.seeding import seed_libraries

BEFORE = {"step": 0, "episode": 0, "seconds": 0.0, "model": None}


def measure_samples(script, run, args):
    """Metrics of a model by the evaluation of sft.py or grpo.py."""
    data, lm, tokenizer = load(script, run, args)
    return script.evaluate(run, 0, lm, tokenizer, data, args)


def load(script, run, args):
    """(data, model, tokenizer) of a script that samples."""
    data = read_prompts(args) if script in (ppo, grpo) else script.Data(*read_data(args))
    lm, tokenizer = load_lm(args, build(args.model, "--model"), run.accelerator.device)
    if script in (ppo, grpo):
        data.encode(lm, tokenizer, args)
    else:
        script.encode(data, lm, tokenizer, args)
    return data, lm, tokenizer


def measure_reward(script, run, args):
    """Metrics of a classifier by the evaluation of reward.py."""
    data = reward.read(args)
    lm, tokenizer, _ = reward.load(args, build(args.model, "--model"), run.accelerator.device)
    reward.encode(data, tokenizer, args.max_length)
    packing = can_pack(run, lm, args)
    score = functools.partial(reward.pair_scores, lm, packing)
    return reward.evaluate(run, 0, lm, score, data, args)


def measure_dpo(script, run, args):
    """Metrics of a model by the evaluation of dpo.py. The reference is the model before training."""
    data, lm, tokenizer = load(dpo, run, args)
    packing = can_pack(run, lm, args)
    ref_path = build(args.ref_model, "--ref-model")
    reference = dpo.Reference(run.accelerator, lm, tokenizer, ref_path, data, packing, args)
    losses_of = functools.partial(dpo.pair_losses, reference=reference, args=args)
    score = functools.partial(dpo.pair_logprobs, lm, packing)
    return dpo.evaluate(run, 0, lm, score, losses_of, tokenizer, data, args)


def measure_ppo(script, run, args):
    """Metrics of a language model by the evaluation of ppo.py."""
    data, lm, tokenizer = load(ppo, run, args)
    return ppo.evaluate(run, 0, ppo.make_policy(args, None, lm), tokenizer, data, args)


def measure_ddpo(script, run, args):
    """Metrics of a UNet by the evaluation of ddpo.py. A saved model is a UNet, all else is of the embedded task."""
    device = run.accelerator.device
    data = ddpo.read(args)
    base = from_task(ddpo.Args, ddpo.TASK).model
    pipeline, schedule = ddpo.load(args, build(base, "--model"), device)
    if args.model != base:
        weights = safetensors.torch.load_file(Path(args.model) / "diffusion_pytorch_model.safetensors")
        pipeline.unet.load_state_dict(weights)
    embed = ddpo.Embeddings(pipeline, device, args.guidance_scale, args.negative_prompt)
    policy = ddpo.Policy(pipeline, pipeline.unet, schedule, embed)
    return ddpo.evaluate(run, 0, policy, data, args)


MEASURES = {
    "sft": measure_samples,
    "reward": measure_reward,
    "dpo": measure_dpo,
    "ppo": measure_ppo,
    "grpo": measure_samples,
    "ddpo": measure_ddpo,
}


def ignore(*_):
    """In place of what a run says and stores."""


def measure(claim, model, seed):
    """{"eval/...": number} of a directory with a model; None: the model before training."""
    script = importlib.import_module(f"algos.{claim}")
    args = from_task(script.Args, script.TASK, seed=seed, threads=1)
    before = args.model
    args.tokenizer = build(before, "--model")
    if claim == "dpo":
        args.ref_model = before
        args.precompute_ref = False  # of the training pairs
    if model is not None:
        args.model = str(model)
    seed_libraries(seed)
    set_threads(args.threads)
    accelerator = launch(args)
    set_threads(args.threads)  # accelerate may have set them
    run = SimpleNamespace(accelerator=accelerator, dir=None, say=ignore, samples=ignore)
    return MEASURES[claim](script, run, args)


def evaluate(run_dir, claim, seed):
    """Writes metrics.jsonl as soon as all models are measured."""
    run_dir = Path(run_dir)
    records = [json.loads(line) for line in (run_dir / "train.jsonl").read_text().splitlines()]
    if records[0]["step"] > 0:
        records.insert(0, BEFORE)
    lines = []
    for record in records:
        model = record.pop("model", None)
        path = None if model is None else run_dir / model
        metrics = record | measure(claim, path, seed)
        lines.append(f"{json.dumps(metrics)}\n")
        print(lines[-1], end="", flush=True)
    unfinished = run_dir / "metrics.jsonl.unfinished"
    unfinished.write_text("".join(lines))
    unfinished.rename(run_dir / "metrics.jsonl")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir")
    parser.add_argument("--claim", choices=MEASURES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    evaluate(**vars(parser.parse_args()))
