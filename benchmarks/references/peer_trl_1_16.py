"""Trains the embedded tasks of sft.py, reward.py, dpo.py and grpo.py by TRL 1.16.0, in the environment of
`../throughput/make_peer_env.sh 1.16`.

    .peers/trl-1.16/bin/python peer_trl_1_16.py --claim sft --inputs DIRECTORY --seed 1 --run-dir DIRECTORY

It reads what prepare.py has written and takes the settings of our scripts; README.md says what differs.
"""

import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

import arithmetic
import peer
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

SAVED = 10  # models of a run


class Steps(TrainerCallback):
    """Tells the curve of each step."""

    def __init__(self, curve):
        self.curve = curve

    def on_train_begin(self, *_, **__):
        self.curve.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model, **_):
        step = state.global_step
        episode = 0
        if isinstance(args, GRPOConfig):
            episode = step * args.generation_batch_size
        self.curve.reached(step, step, episode, model)


def train(trainer_class, config_class, settings, inputs, rows, run_dir, **options):
    """Trains with a trainer of TRL, and returns the settings."""
    curve = peer.Curve(run_dir, settings["max_steps"], SAVED)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            str(inputs / "model"),
            args=config_class(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(inputs / "model"),
            callbacks=[Steps(curve)],
            **options,
        )
        if trainer_class is RewardTrainer:  # whose head is new
            curve.save(0, 0, trainer.model)
        trainer.train()
    return settings


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


def sft(inputs, flags, rows, seed, run_dir):
    settings = epoch_settings(flags, rows, seed)
    return train(SFTTrainer, SFTConfig, settings, inputs, rows, run_dir)


def reward(inputs, flags, rows, seed, run_dir):
    settings = epoch_settings(flags, rows, seed)
    if flags["center_coef"]:
        settings["center_rewards_coefficient"] = flags["center_coef"]
    return train(RewardTrainer, RewardConfig, settings, inputs, rows, run_dir)


def dpo(inputs, flags, rows, seed, run_dir):
    settings = epoch_settings(flags, rows, seed)
    settings["beta"] = flags["beta"]
    settings["loss_type"] = [flags["loss_type"], "sft"]
    settings["loss_weights"] = [1.0, flags["sft_coef"]]
    return train(DPOTrainer, DPOConfig, settings, inputs, rows, run_dir)


def grpo(inputs, flags, rows, seed, run_dir):
    """Each iteration is one optimizer step on all of its episodes."""
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

    return train(GRPOTrainer, GRPOConfig, settings, inputs, rows, run_dir, reward_funcs=is_right)


if __name__ == "__main__":
    peer.main({"sft": sft, "reward": reward, "dpo": dpo, "grpo": grpo}, [trl, transformers], __doc__)
