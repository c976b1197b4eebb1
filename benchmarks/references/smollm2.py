"""TRL 1.16.0's trainers with the settings, rows and evaluations of a run of ours with SmolLM2-135M-Instruct, in the
environment that `../throughput/make_peer_env.sh 1.16` makes (and there `pip install tyro vaderSentiment`):

    .peers/trl-1.16/bin/python benchmarks/references/smollm2.py RUN_DIR OUT_DIR

RUN_DIR: a run of ours, such as runs/curves/smollm2-answers/sums-seed1, with its config.yaml.
OUT_DIR gets metrics.jsonl: step, episode, seconds of the optimizer steps with their rollouts, and the evaluations.
README.md says what differs, and report.py stores the curves.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrained
import torch
import yaml
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from common.lm.sampling import sample, uniforms
from common.lm.tokens import decode
from common.rows import load_rows

NEW_LINE = "Ċ"  # as the tokenizer's vocabulary spells it


class Evaluations(TrainerCallback):
    """Measures the model when our run did, and the seconds of the steps in between."""

    def __init__(self, measure, flags, episodes, file):
        self.measure = measure
        self.every = flags["eval_every"]
        self.episodes = episodes  # of a step
        self.file = file
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, model, **_):
        self.write(0, model)

    def on_step_begin(self, *_, **__):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model, **_):
        self.seconds += time.perf_counter() - self.begun
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.write(state.global_step, model)

    def write(self, step, model):
        record = {"step": step, "episode": step * self.episodes, "seconds": self.seconds}
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            record |= self.measure(model)
        model.train()
        print(record, flush=True)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


def sampled(flags, tokenizer, prompts, score):
    """measure(model) -> mean score of what is sampled for the rows of `prompts`, with the draws of our evaluation."""
    rows = load_rows(prompts, "--dataset")
    queries = tokenizer([row["prompt"] for row in rows])["input_ids"]
    limit = flags["max_new_tokens"]
    draws = uniforms(flags["seed"], "eval", 0, range(len(rows)), limit)

    def measure(model):
        stop = tuple(flags["stop"])
        responses = sample(model, tokenizer, queries, draws, [limit] * len(rows), stop, flags["eval_temperature"])
        return score([row["prompt"] for row in rows], decode(tokenizer, queries, responses, stop))

    return measure


def review_score(prompts, outputs):
    return {"eval/sentiment": sum(pretrained.sentiment(outputs)) / len(outputs)}


def sum_score(prompts, outputs):
    return {"eval/reward": sum(pretrained.sum_reward(prompts, outputs)) / len(outputs)}


def pair_accuracy(tokenizer, rows):
    """measure(model) -> share of the pairs whose better text has the higher score."""

    def measure(model):
        right = 0.0
        for row in rows:
            texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected")]
            scores = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
            right += scores[0] > scores[1]
        return {"eval/accuracy": right / len(rows)}

    return measure


def settings_of(flags, steps):
    beta1, beta2 = flags["adam_betas"]
    return {
        "use_cpu": True,
        "bf16": flags["mixed_precision"] == "bf16",
        "seed": flags["seed"],
        "max_steps": steps,
        "learning_rate": flags["lr"],
        "lr_scheduler_type": flags["lr_schedule"],
        "warmup_steps": flags["warmup_steps"],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": flags["adam_eps"],
        "weight_decay": flags["weight_decay"],
        "max_grad_norm": flags["max_grad_norm"],
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def main(run_dir, out_dir):
    torch.set_num_threads(1)
    algo = json.loads((run_dir / "env.json").read_text())["algo"]
    flags = yaml.safe_load((run_dir / "config.yaml").read_text())
    model = pretrained.model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_rows(flags["dataset"], "--dataset")
    steps = flags.get("total_steps") or math.ceil(flags.get("epochs", 0) * len(rows) / flags["batch_size"])
    settings = settings_of(flags, steps) | {"per_device_train_batch_size": flags["micro_batch_size"]}
    options = {"processing_class": tokenizer}
    episodes = 0
    if algo == "sft":
        trainer_class, config = SFTTrainer, SFTConfig
        measure = sampled(flags, tokenizer, flags["eval_prompts"], review_score)
    elif algo == "dpo":
        trainer_class, config = DPOTrainer, DPOConfig
        settings["beta"] = flags["beta"]
        measure = sampled(flags, tokenizer, flags["eval_prompts"], review_score)
    elif algo == "reward":
        trainer_class, config = RewardTrainer, RewardConfig
        settings["pad_token"] = "<|endoftext|>"  # else it is the end token, and the score is read before it
        measure = pair_accuracy(tokenizer, load_rows(flags["eval_dataset"], "--eval-dataset"))
    else:
        trainer_class, config = GRPOTrainer, GRPOConfig
        measure = sampled(flags, tokenizer, flags["eval_dataset"], sum_score)
        tokenizer = options["processing_class"] = AutoTokenizer.from_pretrained(model, eos_token=NEW_LINE)
        options["reward_funcs"] = lambda prompts, completions, **_: pretrained.sum_reward(prompts, completions)
        episodes = flags["rollout_batch_size"]
        settings |= {
            "max_steps": flags["total_episodes"] // episodes,
            "gradient_accumulation_steps": episodes // flags["micro_batch_size"],
            "num_generations": flags["group_size"],
            "max_completion_length": flags["max_new_tokens"],
            "temperature": flags["temperature"],
            "beta": flags["kl_coef"],
            "epsilon": flags["cliprange"],
            "loss_type": "grpo",
            "use_bias_correction_kl": flags["unbiased_kl"],
        }
    out_dir.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, open(out_dir / "metrics.jsonl", "w") as file:
        trainer_class(
            model,
            args=config(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Evaluations(measure, flags, episodes, file)],
            **options,
        ).train()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
