"""PPO of TRL 1.12.0, whose critic has a trunk of its own, on random walks with the settings, rows and evaluations of a
run of ours, in the environment that `../throughput/make_peer_env.sh 1.12` makes:

    .peers/trl-1.12/bin/python benchmarks/references/randomwalks_ppo.py RUN_DIR OUT_DIR

RUN_DIR: a run of ours, such as runs/curves/ppo-randomwalks/own-critic-seed1, with its config.yaml. OUT_DIR gets
metrics.jsonl with the evaluations and, of the iteration before each, the explained variance of its values. README.md
says what differs, and report.py stores the curves.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import randomwalks
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from common.lm.sampling import sample, uniforms
from common.lm.tokens import decode


def score(function, tokenizer, starts, responses):
    """What the task's reward or metric says of responses to starts, ids both."""
    prompts = tokenizer.batch_decode(starts)
    outputs = decode(tokenizer, starts, responses, ())
    return function([prompt + output for prompt, output in zip(prompts, outputs, strict=True)], prompts, outputs)


class Reward(torch.nn.Module):
    """The task's reward in the shape of the classifier that the trainer expects: every token has the score of all."""

    base_model_prefix = "backbone"  # where the trainer looks for the states

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.score = torch.nn.Identity()

    def backbone(self, input_ids, attention_mask, **_):
        responses = [ids[mask][1:].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        scores = score(randomwalks.reward, self.tokenizer, input_ids[:, :1].tolist(), responses)
        return SimpleNamespace(hidden_states=[torch.tensor(scores)[:, None, None].expand(*input_ids.shape, 1)])


class ExplainedVariance:
    """Stands before two functions of the trainer's module, and keeps the value of the newest iteration."""

    def __init__(self, value_model):
        self.value_model = value_model
        self.get_reward, ppo_trainer.get_reward = ppo_trainer.get_reward, self.values
        self.masked_whiten, ppo_trainer.masked_whiten = ppo_trainer.masked_whiten, self.advantages

    def values(self, model, ids, pad, context):
        scores = self.get_reward(model, ids, pad, context)
        if model is self.value_model:
            self.old_values = scores[0][:, context - 1 : -1, 0]
        return scores

    def advantages(self, advantages, mask):
        returns = (advantages + self.old_values)[mask]
        self.newest = 1 - (advantages[mask].var(correction=0) / returns.var(correction=0)).item()
        return self.masked_whiten(advantages, mask)


class Evaluations(TrainerCallback):
    """Measures the model when our run did."""

    seconds = 0.0  # without evaluations

    def __init__(self, flags, tokenizer, explained, file):
        self.flags, self.tokenizer, self.explained, self.file = flags, tokenizer, explained, file
        rows = randomwalks.eval_prompts()
        self.starts = tokenizer([row["prompt"] for row in rows])["input_ids"]
        self.draws = uniforms(flags["seed"], "eval", 0, range(len(rows)), flags["max_new_tokens"])

    def on_train_begin(self, args, state, control, model, **_):
        self.write({"step": 0, "episode": 0, "seconds": 0}, model.policy)

    def on_step_end(self, args, state, control, model, **_):
        self.seconds += time.perf_counter() - self.begun
        step = state.global_step * args.num_ppo_epochs  # the trainer counts iterations
        record = {"step": step, "episode": state.episode, "seconds": self.seconds}
        record["val/explained_variance"] = self.explained.newest
        if step % self.flags["eval_every"] == 0:
            self.write(record, model.policy)
        self.begun = time.perf_counter()

    def write(self, record, lm):
        lm.eval()
        limits = [self.flags["max_new_tokens"]] * len(self.starts)
        with torch.no_grad():
            responses = sample(lm, self.tokenizer, self.starts, self.draws, limits, (), 1.0)
        lm.train()
        for name, values in score(randomwalks.metric, self.tokenizer, self.starts, responses).items():
            record[f"eval/{name}"] = sum(values) / len(values)
        self.file.write(json.dumps(record) + "\n")
        self.begun = time.perf_counter()


def settings_of(flags):
    """Arguments of the trainer from the flags of our run, which takes one optimizer step an epoch."""
    names = "seed total_episodes kl_coef gamma lam cliprange cliprange_value vf_coef temperature weight_decay"
    on_cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    quiet = {"num_sample_generations": 0, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    settings = on_cpu | quiet | {name: flags[name] for name in names.split()}
    return settings | {
        "per_device_train_batch_size": flags["rollout_batch_size"],
        "local_rollout_forward_batch_size": flags["rollout_batch_size"],
        "num_ppo_epochs": flags["ppo_epochs"],
        "response_length": flags["max_new_tokens"],
        "stop_token": "eos",
        "learning_rate": flags["lr"],
        "lr_scheduler_type": flags["lr_schedule"],
        "adam_beta1": flags["adam_betas"][0],
        "adam_beta2": flags["adam_betas"][1],
        "adam_epsilon": flags["adam_eps"],
    }


def main(run_dir, out_dir):
    torch.set_num_threads(1)
    flags = yaml.safe_load((run_dir / "config.yaml").read_text())
    start = randomwalks.base_model()
    tokenizer = AutoTokenizer.from_pretrained(start)
    policy, reference = (AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager") for _ in range(2))
    critic = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, attn_implementation="eager")
    critic.score.weight.data.zero_()  # as ppo.py begins
    prompts = [row["prompt"] for row in randomwalks.prompts()] * (flags["total_episodes"] // 20)
    rows = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    out_dir.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, open(out_dir / "metrics.jsonl", "w") as file:
        settings = PPOConfig(output_dir=folder, **settings_of(flags))
        evaluations = Evaluations(flags, tokenizer, ExplainedVariance(critic), file)
        reward = Reward(tokenizer)
        PPOTrainer(settings, tokenizer, policy, reference, reward, rows, critic, callbacks=[evaluations]).train()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
