"""TRL 1.16's GRPOTrainer on products by a calculator, measured by our evaluation; appends to curves/calculator.csv.

    .peers/trl-1.16/bin/python benchmarks/references/trl_calculator.py 1        # the seed

Its `tools` cannot carry the task: their turns must be chats, with a template for responses and an end token behind
every call. `rollout_func` can: it is given the prompts of a batch, each as often as it is answered, and returns ids
and a mask of those that the model has written.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.tasks import calculator

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "benchmarks/tasks/calculator/grpo.yaml"
LIMIT, STEPS, EVERY, BATCH = 40, 80, 10, 256
CURVES = ROOT / "benchmarks/references/curves/calculator.csv"


def rollout(prompts, trainer):
    """Responses with the calculator's results, of at most LIMIT tokens. What is not ended goes on in one batch, after
    a call or where a longer row had no more room."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer = trainer.processing_class
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(">")]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    completions = [[] for _ in prompts]
    masks = [[] for _ in prompts]
    going = range(len(prompts))
    while going:
        contexts = [prompt_ids[i] + completions[i] for i in going]
        padded = tokenizer.pad({"input_ids": contexts}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            room = LIMIT - max(len(completions[i]) for i in going)  # so that no row leaves the model's context
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": room}
            output = model.generate(**padded, **options, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
        unfinished = []
        for i, row in zip(going, output[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            length = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
            row = row[:length]
            completions[i] += row
            masks[i] += [1] * len(row)
            if row[-1] == ends[1]:
                call = tokenizer.decode(row[:-1]).rpartition("<")[2]
                result = tokenizer(calculator.calculate(call))["input_ids"][: LIMIT - len(completions[i])]
                completions[i] += result
                masks[i] += [0] * len(result)
            if row[-1] != ends[0] and len(completions[i]) < LIMIT:
                unfinished.append(i)
        going = unfinished
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def reward(prompts, completions, **columns):
    return calculator.reward(prompts, completions)


class Save(TrainerCallback):
    """Saves the model every EVERY steps."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step % EVERY == 0:
            model.save_pretrained(f"{self.folder}/{state.global_step}")


def measure(model, folder, seed):
    """{"eval/...": number} of a model: the first record of a run of grpo.py of one iteration."""
    flags = ["--config", CONFIG, "--model", model, "--tokenizer", calculator.base_model()]
    flags += ["--total-episodes", "256", "--threads", "1", "--seed", str(seed), "--run-dir", folder]
    subprocess.run([sys.executable, "algos/grpo.py", *flags], cwd=ROOT, check=True, capture_output=True)
    first = json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[0])
    return {name: first[name] for name in ("eval/accuracy", "eval/calls")}


def main(seed):
    torch.set_num_threads(1)
    set_seed(seed)
    path = calculator.base_model()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=f"{folder}/trl", seed=seed, use_cpu=True, bf16=False, max_steps=STEPS, save_strategy="no",
            learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=5, adam_beta2=0.95, weight_decay=0.0,
            per_device_train_batch_size=BATCH, num_generations=4, max_completion_length=LIMIT, beta=0.0,
            loss_type="grpo", gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"),
            reward,
            args=config,
            train_dataset=Dataset.from_list(calculator.prompts()),
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[Save(folder)],
            rollout_func=rollout,
        )
        trainer.train()
        rows = []
        for step in range(0, STEPS + 1, EVERY):
            metrics = measure(f"{folder}/{step}" if step else path, f"{folder}/run-{step}", seed)
            rows.append({"system": "trl", "seed": seed, "step": step, "episode": step * BATCH} | metrics)
            print(rows[-1], flush=True)
    with open(CURVES, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(int(sys.argv[1]))
