"""The work of grpo_gpt2_small.py through GRPOTrainer of TRL 1.16.0, in the environment of make_peer_env_trl_1_16.sh.

    .peers/trl-1.16/bin/python peer_trl_1_16_grpo.py --mode fp32-plain-defaults --model DIR --results results_grpo.csv

It loads the same weights and takes the same prompts. Its `generate` of transformers decodes as it always does, with a
processor of logits that leaves the given ids alone to be drawn.
"""

import functools
import tempfile
import time
from statistics import mean

import torch
from datasets import Dataset
from grpo_gpt2_small import (
    CERTAIN,
    END,
    EPISODES,
    GROUP,
    ITERATIONS,
    LR,
    MICRO,
    PEER_MODES,
    RESPONSE_RANGE,
    SEED,
    figures,
    prompts,
    responses,
    reward,
    rows,
    steps_of,
)
from measurement import main
from peer_trl_1_16_sft import Clock
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer

from common.launch import fast_cpu_matmul


class GivenIds(LogitsProcessor):
    """Leaves nothing but the ids of the given responses to be drawn, those of all prompts side by side."""

    def __init__(self):
        given = [torch.tensor(ids) for ids in sum(responses(), [])]
        self.ids = pad_sequence(given, batch_first=True, padding_value=END)
        self.rows = torch.arange(EPISODES)
        self.width = max(map(len, prompts()))  # of the padded prompts

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - self.width
        scores[self.rows, self.ids[:, place]] = CERTAIN
        return scores


class TimedTrainer(GRPOTrainer):
    """Keeps seconds of each rollout and of scoring in it, and sums the log-probabilities of what has an advantage."""

    def __init__(self, *args, **options):
        self.rollout_seconds = []
        self.scoring_seconds = []
        self.logprob_sums = []  # of each forward of the update
        self.token_counts = []
        super().__init__(*args, **options)

    def _generate_and_score_completions(self, inputs):
        begun = time.perf_counter()
        self.scoring_seconds.append(0.0)
        episodes = super()._generate_and_score_completions(inputs)
        self.rollout_seconds.append(time.perf_counter() - begun)
        return episodes

    def _compute_loss(self, model, inputs):
        self.trained = inputs["advantages"] != 0
        self.token_counts.append(int(inputs["completion_mask"][self.trained].sum()))
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args, **options):
        begun = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*args, **options)
        if torch.is_grad_enabled():
            logprobs = result[0].detach()  # zero where there is no response token
            self.logprob_sums.append(logprobs[self.trained].sum().item())
        else:
            self.scoring_seconds[-1] += time.perf_counter() - begun
        return result


def with_positions(model, args, inputs):
    """Forward hook before the blocks: positions by the attention mask. TRL gives none where it scores, and without them
    GPT-2 counts the padding to the left of a prompt; `generate` does not."""
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return args, inputs


def rewards(completion_ids, place, equal, **_):
    """The reward of the benchmark, by TRL's names."""
    return reward(completion_ids, place, equal)


def measure(mode, model_dir):
    """What record() stores of a short run of the trainer."""
    flags, medium, _ = PEER_MODES[mode]
    if medium:
        fast_cpu_matmul()
    clock = Clock()
    steps = steps_of(mode)
    settings = {
        "use_cpu": True,
        "bf16": mode.startswith("bf16"),
        "seed": SEED,
        "max_steps": ITERATIONS * steps,
        "num_generations": GROUP,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": EPISODES // MICRO,
        "max_completion_length": RESPONSE_RANGE[1],
        "shuffle_dataset": False,
        "use_bias_correction_kl": False,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            str(model_dir),
            rewards,
            args=GRPOConfig(output_dir=folder, **settings | flags),
            train_dataset=Dataset.from_list(rows(mode)),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            callbacks=[clock],
        )
        for model in filter(None, (trainer.model, trainer.ref_model)):
            model.base_model.register_forward_pre_hook(with_positions, with_kwargs=True)
        processors = LogitsProcessorList([GivenIds()])
        trainer.model.generate = functools.partial(trainer.model.generate, logits_processor=processors)
        trainer.train()
    assert len(trainer.rollout_seconds) == ITERATIONS
    update_seconds = []
    for i, rollout in enumerate(trainer.rollout_seconds):
        update_seconds.append(sum(clock.seconds[i * steps : (i + 1) * steps]) - rollout)
    sampling_seconds = []
    for rollout, scoring in zip(trainer.rollout_seconds, trainer.scoring_seconds, strict=True):
        sampling_seconds.append(rollout - scoring)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [mean(entry["loss"] for entry in logged[i : i + steps]) for i in range(0, len(logged), steps)]
    grad_norms = [entry["grad_norm"] for entry in logged]
    forwards = trainer.args.gradient_accumulation_steps  # of the first step
    logprob = sum(trainer.logprob_sums[:forwards]) / sum(trainer.token_counts[:forwards])
    return figures(mode, sampling_seconds, trainer.scoring_seconds, update_seconds, losses, grad_norms, logprob)


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(PEER_MODES, "trl"), measure)
