"""The work of sft_mixed_lengths.py through SFTTrainer of TRL 1.16.0, in the environment of make_peer_env_trl_1_16.sh.

    .peers/trl-1.16/bin/python peer_trl_1_16_sft.py --mode fp32-defaults --model MODEL_DIR --results results_sft.csv

It loads the same weights and takes the same rows in the same order: they are given in the order in which algos/sft.py
draws them, and the sampler is sequential.
"""

import tempfile
import time

from datasets import Dataset
from measurement import main
from ppo_gpt2_small import LR
from sft_mixed_lengths import BATCH, LONGEST, PEER_MODES, SEED, STEPS, figures, order, rows, step_lengths
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from common.launch import fast_cpu_matmul


class Clock(TrainerCallback):
    """Seconds from the begin to the end of every step, without loading its batch and logging."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **options):
        self.begun = time.perf_counter()

    def on_step_end(self, *args, **options):
        self.seconds.append(time.perf_counter() - self.begun)


def measure(mode, model_dir):
    """What record() stores of a short run of SFTTrainer."""
    flags, medium, _ = PEER_MODES[mode]
    if medium:
        fast_cpu_matmul()
    texts, clock = rows(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "use_cpu": True, "bf16": mode.startswith("bf16"), "seed": SEED, "max_steps": STEPS,
            "per_device_train_batch_size": BATCH, "max_length": LONGEST, "train_sampling_strategy": "sequential",
            "learning_rate": LR, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        trainer = SFTTrainer(
            str(model_dir),
            SFTConfig(**settings | flags),
            train_dataset=Dataset.from_list([texts[row] for row in order()]),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            callbacks=[clock],
        )
        # transformers 5.23 decides by the name of the model's class, so for GPT2LMHeadModel it would count the first
        # tokens as labels, too, and divide by 2 % more
        trainer._loss_shifts_labels = True
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
        assert lengths == [length for step in step_lengths() for length in step]
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return figures(clock.seconds, *([entry[key] for entry in logged] for key in ("loss", "grad_norm")))


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(PEER_MODES, "trl"), measure)
