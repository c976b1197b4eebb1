"""SFTTrainer, RewardTrainer, DPOTrainer and GRPOTrainer of TRL 1.16.0 at the work of language.py, in the environment
that `make_peer_env.sh 1.16` makes.

They load the same weights. Rows and pairs are given in the order in which the scripts draw them, and the sampler is
sequential; equal tokens are asserted. grpo: its `generate` of transformers decodes as it always does, with a processor
of logits that leaves the given ids alone to be drawn.
"""

import functools
import tempfile
import time

import language
import torch
import trl
from datasets import Dataset
from language import ATTENTION, BATCH, LONGEST, LR, SEED, SKIPPED, STEPS
from measurement import GPU, ITERATIONS, choose_products, figures
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

OURS = {"model_init_kwargs": {"attn_implementation": ATTENTION}}
SETTINGS = {  # flags of the trainers; without gradient checkpointing, and all but `defaults` with choose_products
    "defaults": {},
    "same-flags": OURS,
    "padding-free": OURS | {"padding_free": True, "max_length": None},
    "precompute": OURS | {"precompute_ref_log_probs": True},
    "micro-32": OURS
    | {"per_device_train_batch_size": 32, "gradient_accumulation_steps": language.GROUP_EPISODES // 32},
}


class Clock(TrainerCallback):
    """Seconds from the begin to the end of every step, without loading its batch and logging."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **options):
        self.begun = time.perf_counter()

    def on_step_end(self, *args, **options):
        self.seconds.append(time.perf_counter() - self.begun)


def measure(algorithm, side, model):
    """(columns, useful GFLOP/s) of a short run. side: a precision and one of SETTINGS."""
    precision, _, setting = side.partition("-")
    if setting != "defaults" and not GPU:
        choose_products()
    settings = {
        "use_cpu": not GPU,
        "bf16": precision == "bf16",
        "seed": SEED,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if algorithm != "grpo":
        settings |= {
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "max_length": LONGEST,
            "train_sampling_strategy": "sequential",
        }
    run = {"sft": measure_sft, "reward": measure_reward, "dpo": measure_dpo, "grpo": measure_grpo}[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        return run(str(model), settings | {"output_dir": folder} | SETTINGS[setting])


def common_options(model, rows, padding=None):
    """(arguments that all trainers take, their clock)."""
    clock = Clock()
    padding = {"pad_token": padding} if padding else {}
    options = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(model, **padding),
        "callbacks": [clock],
    }
    return options, clock


def logged(trainer):
    """[losses], [gradient norms] of all steps."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in entries], [entry["grad_norm"] for entry in entries]


def measure_sft(model, settings):
    texts = language.rows()
    options, clock = common_options(model, [texts[row] for row in language.order()])
    trainer = trl.SFTTrainer(model, trl.SFTConfig(**settings), **options)
    # transformers 5.23 decides by the name of the model's class, so for GPT2LMHeadModel it would count the first tokens
    # as labels, too, and divide by 2 % more
    trainer._loss_shifts_labels = True
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    assert lengths == sum(language.step_lengths(), [])
    trainer.train()
    return figures(language.sft_flops(), clock.seconds, SKIPPED, *logged(trainer))


class TimedDPOTrainer(trl.DPOTrainer):
    """Adds up the seconds of scoring by the reference before training."""

    scoring = 0.0

    def compute_ref_log_probs(self, *args):
        begun = time.perf_counter()
        scores = super().compute_ref_log_probs(*args)
        self.scoring += time.perf_counter() - begun
        return scores


def pair_options(model):
    texts = language.pair_rows()
    return common_options(model, [texts[row] for row in language.pair_order()], f"w{language.PADDING}")


def ordered_pairs():
    """[(prompt, chosen, rejected)] of all steps."""
    ids = language.pair_ids()
    return [ids[row] for row in language.pair_order()]


def measure_reward(model, settings):
    options, clock = pair_options(model)
    trainer = trl.RewardTrainer(f"{model}/classifier", args=trl.RewardConfig(**settings), **options)
    rows = zip(trainer.train_dataset["chosen_ids"], trainer.train_dataset["rejected_ids"], strict=True)
    assert list(rows) == [(prompt + chosen, prompt + rejected) for prompt, chosen, rejected in ordered_pairs()]
    trainer.train()
    return figures(language.pair_flops("reward"), clock.seconds, SKIPPED, *logged(trainer))


def measure_dpo(model, settings):
    options, clock = pair_options(model)
    trainer = TimedDPOTrainer(model, args=trl.DPOConfig(**settings), **options)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert list(map(list, zip(*(trainer.train_dataset[name] for name in names), strict=True))) == ordered_pairs()
    trainer.train()
    assert (trainer.scoring > 0) == settings.get("precompute_ref_log_probs", False)
    seconds = [step + trainer.scoring / STEPS for step in clock.seconds]
    return figures(language.pair_flops("dpo"), seconds, SKIPPED, *logged(trainer))


# ---- GRPO ------------------------------------------------------------------------------------------------------------


class GivenIds(LogitsProcessor):
    """Leaves nothing but the ids of the given responses to be drawn, those of all prompts side by side."""

    def __init__(self):
        given = [torch.tensor(ids) for ids in sum(language.responses(), [])]
        self.ids = pad_sequence(given, batch_first=True, padding_value=language.END)
        self.rows = torch.arange(language.GROUP_EPISODES)
        self.width = max(map(len, language.group_prompts()))  # of the padded prompts

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - self.width
        self.ids = self.ids.to(scores.device)
        scores[self.rows.to(scores.device), self.ids[:, place]] = language.CERTAIN
        return scores


def with_positions(model, args, inputs):
    """Forward hook before the blocks: positions by the attention mask. TRL gives none where it scores, and without them
    GPT-2 counts the padding to the left of a prompt; `generate` does not."""
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return args, inputs


def rewards(completion_ids, place, **_):
    return language.mean_id(completion_ids, place)


def measure_grpo(model, settings):
    fixed = {
        "beta": 0.0,
        "num_iterations": 1,
        "max_steps": ITERATIONS,
        "num_generations": language.GROUP,
        "per_device_train_batch_size": language.MICRO,
        "gradient_accumulation_steps": language.GROUP_EPISODES // language.MICRO,
        "max_completion_length": language.LONGEST_RESPONSE,
        "shuffle_dataset": False,
        "use_bias_correction_kl": False,
    }
    options, clock = common_options(model, language.group_rows())
    trainer = trl.GRPOTrainer(model, rewards, args=trl.GRPOConfig(**fixed | settings), **options)
    trainer.model.base_model.register_forward_pre_hook(with_positions, with_kwargs=True)
    processors = LogitsProcessorList([GivenIds()])
    trainer.model.generate = functools.partial(trainer.model.generate, logits_processor=processors)
    trainer.train()
    return figures(language.grpo_flops(), clock.seconds, 1, *logged(trainer))
