"""Trains the embedded tasks of sft.py, reward.py, dpo.py and grpo.py by TRL 1.16.0, in the environment of
`../throughput/make_peer_env.sh 1.16`.

    .peers/trl-1.16/bin/python peer_trl_1_16.py --claim sft --inputs DIRECTORY --seed 1 --run-dir DIRECTORY

It reads what prepare.py has written and takes the settings of our scripts; README.md says what differs.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

import arithmetic
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

SAVED = 10  # models of a run


class Curve(TrainerCallback):
    """Saves models, and counts the seconds of training without those of saving."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.seconds = 0.0

    def save(self, step, episode, model):
        """Saves the model and writes its record."""
        name = f"models/{step}"
        model.save_pretrained(self.run_dir / name)
        record = {"step": step, "episode": episode, "seconds": self.seconds, "model": name}
        with open(self.run_dir / "train.jsonl", "a") as file:
            file.write(f"{json.dumps(record)}\n")

    def on_train_begin(self, args, state, control, **_):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model, **_):
        step = state.global_step
        if step not in [round(state.max_steps * part / SAVED) for part in range(1, SAVED + 1)]:
            return
        self.seconds += time.perf_counter() - self.begun
        episode = 0
        if isinstance(args, GRPOConfig):
            episode = step * args.generation_batch_size
        self.save(step, episode, model)
        self.begun = time.perf_counter()


def read_rows(inputs):
    """The rows that our script trains on."""
    return [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]


def common_settings(flags, seed):
    """Arguments of all trainers from the flags of our script."""
    beta1, beta2 = flags["adam_betas"]
    return {
        "use_cpu": True,
        "bf16": False,
        "seed": seed,
        "learning_rate": flags["lr"],
        "lr_scheduler_type": flags["lr_schedule"],
        "warmup_steps": flags["warmup_steps"],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": flags["adam_eps"],
        "weight_decay": flags["weight_decay"],
        "max_grad_norm": flags["max_grad_norm"],
        "dataloader_drop_last": True,
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def epoch_settings(flags, rows, seed):
    """Arguments of the trainers that pass over given rows."""
    steps = math.ceil(flags["epochs"] * len(rows) / flags["batch_size"])
    own = {"max_steps": steps, "per_device_train_batch_size": flags["batch_size"], "max_length": flags["max_length"]}
    return common_settings(flags, seed) | own


def sft(flags, rows, seed):
    """(class of the trainer, class of its arguments, the arguments, what else the trainer takes)."""
    return SFTTrainer, SFTConfig, epoch_settings(flags, rows, seed), {}


def reward(flags, rows, seed):
    """As `sft`."""
    settings = epoch_settings(flags, rows, seed)
    if flags["center_coef"]:
        settings["center_rewards_coefficient"] = flags["center_coef"]
    return RewardTrainer, RewardConfig, settings, {}


def dpo(flags, rows, seed):
    """As `sft`."""
    settings = epoch_settings(flags, rows, seed)
    settings["beta"] = flags["beta"]
    settings["loss_type"] = [flags["loss_type"], "sft"]
    settings["loss_weights"] = [1.0, flags["sft_coef"]]
    return DPOTrainer, DPOConfig, settings, {}


def grpo(flags, rows, seed):
    """As `sft`. Each iteration is one optimizer step on all of its episodes."""
    assert flags["ppo_epochs"] == 1 and flags["batch_size"] == flags["rollout_batch_size"]
    assert flags["loss_mean"] == "sequence" and flags["advantage_kind"] == "std" and flags["ratio_level"] == "token"
    settings = common_settings(flags, seed) | {
        "max_steps": flags["total_episodes"] // flags["rollout_batch_size"],
        "per_device_train_batch_size": flags["micro_batch_size"],
        "gradient_accumulation_steps": flags["rollout_batch_size"] // flags["micro_batch_size"],
        "num_generations": flags["group_size"],
        "max_completion_length": flags["max_new_tokens"],
        "temperature": flags["temperature"],
        "beta": flags["kl_coef"],
        "epsilon": flags["cliprange"],
        "loss_type": "grpo",
        "scale_rewards": "group",
    }

    def is_right(prompts, completions, **_):
        samples = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return arithmetic.reward(samples, prompts, completions)

    return GRPOTrainer, GRPOConfig, settings, {"reward_funcs": is_right}


CLAIMS = {"sft": sft, "reward": reward, "dpo": dpo, "grpo": grpo}


def train(claim, inputs, seed, run_dir):
    """Trains and writes models/, train.jsonl and peer.json."""
    torch.set_num_threads(1)
    flags = json.loads((inputs / "settings.json").read_text())
    rows = read_rows(inputs)
    trainer_class, config_class, settings, options = CLAIMS[claim](flags, rows, seed)
    curve = Curve(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            str(inputs / "model"),
            args=config_class(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(inputs / "model"),
            callbacks=[curve],
            **options,
        )
        if claim == "reward":  # whose head is new
            curve.save(0, 0, trainer.model)
        trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    about = {"versions": versions, "threads": torch.get_num_threads(), "settings": settings}
    (run_dir / "peer.json").write_text(json.dumps(about, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--claim", choices=CLAIMS, required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="directory that prepare.py has written")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    train(**vars(parser.parse_args()))
