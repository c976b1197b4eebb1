"""PPOTrainer of TRL 1.12.0, the last release with PPO, at the work of language.py, in the environment that
`make_peer_env.sh 1.12` makes.

Same weights, prompts, lengths, reward, learning rate, temperature and optimizer steps (asserted). What differs:

- It trains a value model of its own, here a second GPT-2 with the same blocks; plainrl has a head on the policy.
- It keeps the logits of all sampled tokens, and takes the log-probabilities from them.
- It never clips gradients; plainrl does.
- The order of the prompts within an iteration is its own.
- Its `bf16=True` has no effect, since its Accelerator is not told: in bf16, all of it runs in torch.autocast.
- Its reward model would be a fourth GPT-2: here its place is taken by the reward of the benchmark, in its favour.
"""

import tempfile
import time

import torch
from datasets import Dataset
from language import EPISODES, EPOCHS, LR, PROMPT, RESPONSE, even, ppo_figures, prompt_ids
from measurement import ITERATIONS
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from common.launch import fast_cpu_matmul


class Clock(TrainerCallback):
    """Times of the begin of training, of the first forward pass of each update, and of the end of each iteration."""

    def __init__(self):
        self.ends = []
        self.updates = []
        self.passes = 0

    def on_train_begin(self, *args, **options):
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args, **options):
        self.ends.append(time.perf_counter())

    def on_forward(self, *args):
        """Hook of policy and value model together, which run so in the update alone."""
        self.passes += 1
        if len(self.updates) < len(self.ends):
            self.updates.append(time.perf_counter())


class Reward(nn.Module):
    """Stands where the trainer wants a reward model."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.prompts = []  # of each call

    def scores(self, ids):
        self.prompts.append(ids[:, :PROMPT].tolist())
        responses = ids[:, PROMPT:].tolist()
        assert all(len(response) == RESPONSE for response in responses)
        self.tokenizer.batch_decode(responses)  # plainrl decodes as well
        return torch.tensor(even(responses))


def with_reward(get_reward):
    """The trainer's `get_reward`, which asks Reward for its scores and any other model as before."""

    def scored(model, ids, *options):
        if isinstance(model, Reward):
            return None, model.scores(ids), None
        return get_reward(model, ids, *options)

    return scored


def measure(algorithm, side, model_dir):
    """(columns, useful GFLOP/s) of a short run."""
    attention = "sdpa"
    if side.endswith("same-flags"):
        attention = "eager"
        fast_cpu_matmul()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{model_dir}/tokenizer.json", eos_token="<end>")
    tokenizer.pad_token = tokenizer.eos_token
    load = {"attn_implementation": attention}
    judge = Reward(tokenizer)
    clock = Clock()
    ppo_trainer.get_reward = with_reward(ppo_trainer.get_reward)
    with tempfile.TemporaryDirectory() as folder:
        settings = PPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, seed=1, learning_rate=LR, lr_scheduler_type="constant",
            total_episodes=EPISODES * ITERATIONS, per_device_train_batch_size=EPISODES, gradient_accumulation_steps=1,
            num_mini_batches=1, num_ppo_epochs=EPOCHS, response_length=RESPONSE, temperature=1.0,
            gradient_checkpointing=False, num_sample_generations=0, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = PPOTrainer(
            args=settings,
            processing_class=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(model_dir, **load),
            ref_model=AutoModelForCausalLM.from_pretrained(model_dir, **load),
            reward_model=judge,
            value_model=AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1, **load),
            train_dataset=Dataset.from_list([{"input_ids": ids} for ids in prompt_ids()]),
            callbacks=[clock],
        )
        trainer.model.register_forward_pre_hook(clock.on_forward)
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in side):
            trainer.train()
    assert [sorted(prompts) for prompts in judge.prompts] == [sorted(prompt_ids())] * ITERATIONS
    assert clock.passes == ITERATIONS * EPOCHS  # an optimizer step each
    rollout = [update - begin for begin, update in zip(clock.ends[:-1], clock.updates, strict=True)]
    update = [end - update for update, end in zip(clock.updates, clock.ends[1:], strict=True)]
    return ppo_figures(rollout, update)
