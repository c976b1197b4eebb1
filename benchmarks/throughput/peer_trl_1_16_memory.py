"""The updates `sft` and `dpo` of memory.py through the trainers of TRL 1.16.0, in the environment of
make_peer_env_trl_1_16.sh.

    .peers/trl-1.16/bin/python peer_trl_1_16_memory.py --loss dpo --vocabulary 50257 --rows 4 --results FILE

Same weights and ids. The trainers' default losses are computed in chunks; the log-probabilities of DPO's reference are
those of before training, set to 0. Of the first step the memory is counted, the others are timed.
"""

import argparse
import tempfile
import time

import torch
from datasets import Dataset
from memory import PROMPT, REPEATS, WIDTHS, build, case, measured, record, row_ids
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def whole_words(vocabulary):
    """A tokenizer of whole words "w2 w3 ..."."""
    words = {"<end>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def watched(trainer_class, ids):
    """The trainer, whose steps take these ids and are measured."""

    class Watched(trainer_class):
        def training_step(self, model, inputs, *args):
            assert torch.equal(inputs["input_ids"], ids)
            for side in ("ref_chosen_logps", "ref_rejected_logps"):
                if side in inputs:
                    inputs[side] = torch.zeros_like(inputs[side])
            step = super().training_step
            if not self.figures:
                gradients = model.lm_head.weight.nbytes
                memory, value = measured(model, lambda: step(model, inputs, *args), gradients)
                self.figures = {"loss_mb": f"{memory:.1f}", "value": f"{value.item():.6f}", "seconds": []}
                return value
            begun = time.perf_counter()
            value = step(model, inputs, *args)
            self.figures["seconds"].append(time.perf_counter() - begun)
            return value

    Watched.figures = {}
    return Watched


def measure(loss, vocabulary, rows):
    """Rows of the CSV file: one."""
    ids = row_ids(vocabulary, rows)
    steps = 1 + REPEATS
    if loss == "sft":
        trainer_class, config_class = SFTTrainer, SFTConfig
        size = rows
        data = [{"text": text(row[:-1])} for row in ids.tolist()]
    else:
        trainer_class, config_class = DPOTrainer, DPOConfig
        size = rows // 2
        data = []
        for chosen, rejected in zip(ids[:size].tolist(), ids[size:].tolist(), strict=True):
            sides = {"chosen": " " + text(chosen[PROMPT:-1]), "rejected": " " + text(rejected[PROMPT:-1])}
            data.append({"prompt": text(chosen[:PROMPT])} | sides)
    settings = {
        "use_cpu": True, "bf16": False, "max_steps": steps, "per_device_train_batch_size": size, "learning_rate": 0.0,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": False, "save_strategy": "no",
        "max_length": ids.shape[1], "optim": "sgd", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    if loss == "dpo":
        settings["precompute_ref_log_probs"] = True
    with tempfile.TemporaryDirectory() as folder:
        trainer = watched(trainer_class, ids)(
            build(vocabulary),
            args=config_class(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(data * steps),
            processing_class=whole_words(vocabulary),
        )
        trainer._loss_shifts_labels = True  # see peer_trl_1_16_sft.py
        trainer.train()
    return [case(loss, "trl", "trl", vocabulary, rows, **trainer.figures)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=["sft", "dpo"], required=True)
    parser.add_argument("--vocabulary", type=int, choices=WIDTHS, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--results", required=True)
    options = parser.parse_args()
    packages = ["torch", "transformers", "trl"]
    record(options.results, packages, measure, options.loss, options.vocabulary, options.rows)
