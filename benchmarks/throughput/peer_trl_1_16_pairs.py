"""The work of pairs_mixed_lengths.py through RewardTrainer and DPOTrainer of TRL 1.16.0, in the environment of
make_peer_env_trl_1_16.sh.

    .peers/trl-1.16/bin/python peer_trl_1_16_pairs.py --mode dpo-fp32-defaults --model DIR --results results_pairs.csv

It loads the same weights and takes the same pairs in the same order: they are given in the order in which the scripts
draw them, and the sampler is sequential.
"""

import tempfile
import time

from datasets import Dataset
from measurement import main
from pairs_mixed_lengths import BATCH, LONGEST, PADDING, PEER_MODES, SEED, STEPS, figures, order, rows, token_ids
from peer_trl_1_16_sft import Clock
from ppo_gpt2_small import LR
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from common.launch import fast_cpu_matmul


class TimedDPOTrainer(DPOTrainer):
    """Adds up the seconds of scoring by the reference before training."""

    scoring = 0.0

    def compute_ref_log_probs(self, *args):
        begun = time.perf_counter()
        scores = super().compute_ref_log_probs(*args)
        self.scoring += time.perf_counter() - begun
        return scores


def measure(mode, model_dir):
    """What record() stores of a short run of one of the trainers."""
    flags, medium, _ = PEER_MODES[mode]
    if medium:
        fast_cpu_matmul()
    dpo, texts, ids, clock = mode.startswith("dpo"), rows(), token_ids(), Clock()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, pad_token=f"w{PADDING}")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "use_cpu": True, "bf16": "bf16" in mode, "seed": SEED, "max_steps": STEPS,
            "per_device_train_batch_size": BATCH, "max_length": LONGEST, "train_sampling_strategy": "sequential",
            "learning_rate": LR, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        trainer = (TimedDPOTrainer if dpo else RewardTrainer)(
            str(model_dir) if dpo else f"{model_dir}/classifier",
            args=(DPOConfig if dpo else RewardConfig)(**settings | flags),
            train_dataset=Dataset.from_list([texts[row] for row in order()]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        names = ("prompt_ids", "chosen_ids", "rejected_ids") if dpo else ("chosen_ids", "rejected_ids")
        expected = [(p, c, r) if dpo else (p + c, p + r) for p, c, r in (ids[row] for row in order())]
        assert list(zip(*(trainer.train_dataset[name] for name in names), strict=True)) == expected
        trainer.train()
    assert (getattr(trainer, "scoring", 0.0) > 0) == flags.get("precompute_ref_log_probs", False)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, grad_norms = ([entry[key] for entry in logged] for key in ("loss", "grad_norm"))
    if dpo:
        scores = [(entry["logps/chosen"] + entry["logps/rejected"]) / 2 for entry in logged]
    else:
        scores = [entry["mean_reward"] for entry in logged]
    return figures(mode.split("-")[0], clock.seconds, losses, grad_norms, scores, getattr(trainer, "scoring", 0.0))


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(PEER_MODES, "trl"), measure)
