"""Direct preference optimization (DPO): a policy from preferences, without a reward model.

Paper: Rafailov et al. 2023, arXiv 2305.18290. Loss (Eq. 7): -log sigmoid(beta (c - r)) with the log-ratios
c = log pi(chosen | prompt) - log pi_ref(chosen | prompt), r likewise for rejected: `dpo_loss`, whose variants are in
`log_ratio_loss`.

How this differs from other implementations:
- Prompt and response are parted at one token for both sides of a pair; a response is never cut to nothing; the end
  token is there once. Log-probabilities are sums over the response, at least in float32.
- What both sides begin with is computed once, logits only for what is scored (`shared_rows`): equal to two forward
  passes, to rounding.
- The reference's log-probabilities are computed once, before training, for evaluation sets too: no second model in
  memory. They are kept beside the run under a hash of what decides them, for the next run with another beta.
- Label smoothing works in every loss that has it.

Both log-probabilities usually fall in training, that of rejected more; --sft-coef or apo_zero hold that of chosen up.

Rows: {"prompt", "chosen", "rejected"} as texts or chats, or without a prompt where the two hold it.

    python algos/dpo.py                                            # random walks, one CPU, under a minute
    python algos/dpo.py --model runs/sft/hf_model --dataset pairs.jsonl --eval-dataset test.jsonl --lr 1e-6
    accelerate launch algos/dpo.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train --lr 1e-6
    torchrun --nproc_per_node 8 algos/dpo.py --model Qwen/Qwen3-0.6B --max-length 2048 --lr 1e-6 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs (N in a set, or scored tokens), T tokens of a row, K positions with logits, V vocabulary.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from common.adapters import to_export, train_adapters
from common.cli import InputError, build, call_metric, cli, launch, load_function, stop_if
from common.data import (
    encode_prompts,
    have_bos,
    is_chat,
    load_rows,
    load_sets,
    pair_texts,
    prompt_messages,
    set_flag,
    set_prefix,
    shared_rows,
    sharing_error,
    tokenize,
)
from common.logging import Run, closes_run, describe_layout, on_main, visible
from common.models import freeze, frozen_copy, load_model, load_reference, max_positions, set_attention, unsharded
from common.sampling import evaluate_samples, text_arguments
from common.seeding import seed_libraries, stream_rows

TASK = "benchmarks/tasks/randomwalks.py"
LossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop",
]  # fmt: skip
SMOOTHED = ("sigmoid", "robust", "exo_pair")


@dataclass
class Args:
    """Direct preference optimization of a causal language model."""

    # ---- run
    run_dir: str | None = None
    """Directory of this run; default runs/<algo>-<hash of everything that decides the result>."""
    resume: str = "auto"
    """auto: continue the run if it is there; never: repeat it in a new directory; or the path of a checkpoint."""
    seed: int = 1
    """Seed of every random draw."""
    threads: int | None = None
    """CPU threads of this process; default: the cores divided by the processes on this machine."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (slower on GPUs; CPUs are deterministic without it)."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Autocast of the forward pass; default: what the launcher says. Weights and optimizer keep --dtype."""
    save_every: int = 100
    """Checkpoint every so many optimizer steps; 0: only at the end and for the best evaluation."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; the best by evaluation is kept besides."""
    eval_every: int = 100
    """Evaluate every so many optimizer steps, and at the start and the end; 0: never."""
    track: Literal["off", "wandb", "tensorboard"] = "off"
    """Mirror the metrics to a tracker (WANDB_MODE=offline works without an account)."""
    wandb_project: str = "plainrl"
    """Project name for --track."""
    push_to_hub: str | None = None
    """Upload hf_model/ to this hub repository (org/name) at the end, with the login of the hub's own tools."""
    check: bool = False
    """Validate flags, data, model and functions, print the summary, and exit."""

    # ---- model and data
    model: str = f"{TASK}:base_model"
    """Hub id, directory, or file.py:function that returns one; from Python also a model."""
    tokenizer: str | None = None
    """Hub id or directory of the tokenizer, from Python also a tokenizer; default: that of --model."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights (and so of the optimizer state)."""
    trust_remote_code: bool = False
    """Run model code that comes with a hub repository."""
    attn_implementation: str = "auto"
    """auto, eager, sdpa or flash_attention_2; auto: eager on CPUs up to 256 tokens, where it is faster, else sdpa."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    ref_model: str | None = None
    """Reference of the KL penalty, named as --model; default: a frozen copy of --model as it is at the start."""
    num_layers_unfrozen: int = -1
    """Train only the top k blocks and the norm after them, not embeddings and output layer. -1: train everything; 0 (in
    ppo, reward and ilql): only the heads."""
    load_in_4bit: bool = False
    """Load the frozen weights in 4 bits (NF4 of bitsandbytes; arXiv 2305.14314): for --lora-r, or a LoRA adapter as
    --model."""
    lora_r: int = 0
    """Rank of LoRA adapters, which are trained in place of the weights; 0: train all weights. A --model that is a LoRA
    adapter of a language model is trained further without this flag."""
    lora_alpha: float | None = None
    """LoRA adapters count alpha / r times; default: the rank, so once."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Last names of the modules that get LoRA adapters; all-linear: every linear layer of a language model but the
    last."""
    merge: bool = False
    """Export the model with its LoRA adapters added to the weights, not the adapters alone."""
    dataset: str = f"{TASK}:pairs:split=train"
    """Pairs for training: a .jsonl/.json/.csv/.parquet file, hub id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = "auto"
    """Pairs for evaluation, several sets joined by commas or as a mapping of names; auto: the embedded task's."""
    eval_prompts: str | None = "auto"
    """Rows with a prompt to sample at evaluation (sft, ilql: for --metric); auto: the embedded task's; default: the
    first set of --eval-dataset."""
    metric: str | None = "auto"
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}; auto: the embedded task's, or none."""
    max_length: int = 1024
    """Tokens of a row, of an encoder-decoder those of prompt and output each. Longer rows are counted and cut at the
    end; reward drops them, and dpo those that this leaves without a response."""
    max_prompt_length: int | None = None
    """Drop (in dpo: cut by --truncation-mode) and count prompts of more tokens. Without it, in ppo a prompt that does
    not fit the model is an error."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """What stays of a prompt that is longer than --max-prompt-length; a beginning token always does."""
    share_prompt: bool = True
    """Compute what the two texts of a pair begin with once for both. Changes memory and speed, never the result."""

    # ---- loss
    beta: float | None = None
    """Strength of the KL penalty that the loss stands for (Eq. 3): the lower, the farther from the reference. Default:
    0.1, the embedded task 0.3."""
    loss_type: LossType | None = None
    """Loss of a pair, see log_ratio_loss; default: sigmoid, the embedded task ipo."""
    label_smoothing: float = 0.0
    """Probability that a preference is wrong, in the losses sigmoid (cDPO), robust and exo_pair."""
    sft_coef: float | None = None
    """Weight of the mean loss per token of the chosen responses beside it (arXiv 2404.19733, Eq. 1, with a mean per
    response there): keeps their probability, and that of the end token, from falling. Default: 0, the embedded task
    0.02."""
    reference_free: bool = False
    """Take a reference that finds all responses equally likely."""
    precompute_ref: bool = True
    """Score all pairs by the reference once, before training; off: a frozen copy scores each batch."""

    # ---- optimizer
    lr: float = 1e-3
    """Peak learning rate of AdamW (pretrained models: 2e-5 in sft, 1e-5 in ppo, reward, ilql and ddpo, or 3e-4 in ddpo
    with LoRA, 1e-6 in dpo)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    lr_final: float = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: int = 40
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    adam_eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: int = 48
    """Rows per optimizer step, all processes together."""
    micro_batch_size: int = 64
    """Rows per process and forward pass; changes memory and speed, never the result."""
    epochs: float | None = None
    """Passes over the data; default: 3, in reward and dpo 1, the embedded task more. --total-steps wins over it."""
    total_steps: int | None = None
    """Optimizer steps; default: from --epochs."""

    # ---- evaluation by sampling
    max_new_tokens: int = 9
    """Longest response, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, which keeps (and in ppo trains) the tokens through the one that completes the
    string. Reward and metric see the text before it, without trailing space."""
    eval_temperature: float = 1.0
    """Sampling temperature of evaluations; 0: greedy."""
    top_k: int = 0
    """Evaluations sample from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Evaluations sample from the smallest set of tokens with this probability; 1: from all."""
    decode_batch_size: int = 1024
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    def __post_init__(self):
        own = self.dataset != f"{TASK}:pairs:split=train"
        embedded = {"eval_dataset": "eval_pairs", "eval_prompts": "eval_prompts", "metric": "metric"}
        for name, function in embedded.items():
            if getattr(self, name) == "auto":
                setattr(self, name, None if own else f"{TASK}:{function}")
        mine = {"epochs": 1.0, "loss_type": "sigmoid", "beta": 0.1, "sft_coef": 0.0}
        task = {"epochs": 6.0, "loss_type": "ipo", "beta": 0.3, "sft_coef": 0.02}
        for name, value in (mine if own else task).items():
            setattr(self, name, value if getattr(self, name) is None else getattr(self, name))
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = ("auto", "eager", "sdpa", "flash_attention_2")
        smoothing, smooths = self.label_smoothing, self.loss_type in SMOOTHED
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every", "top_k")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        positive = ("lr", "epochs", "beta", "lora_alpha")
        rules += [(name, 0 < given.get(name, 1) < math.inf, "a positive number") for name in positive]
        rules += [
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("attn_implementation", self.attn_implementation in known, f"one of {', '.join(known)}"),
            ("num_layers_unfrozen", self.num_layers_unfrozen > 0 or self.num_layers_unfrozen == -1, "-1 or at least 1"),
            ("num_layers_unfrozen", self.num_layers_unfrozen == -1 or not self.lora_r, "-1 with --lora-r"),
            ("lora_alpha", self.lora_alpha is None or self.lora_r, "given with --lora-r"),
            ("lora_targets", self.lora_r or tuple(self.lora_targets) == ("all-linear",), "given with --lora-r"),
            ("merge", not (self.merge and self.load_in_4bit), "off with --load-in-4bit"),
            ("load_in_4bit", not self.load_in_4bit or self.dtype != "float64", "off with --dtype float64"),
            ("label_smoothing", 0 <= smoothing < 0.5, "in [0, 0.5)"),
            ("label_smoothing", smooths or not smoothing, "0 with this --loss-type: it does not smooth"),
            ("label_smoothing", smoothing or self.loss_type != "exo_pair", "positive with exo_pair (1e-3)"),
            ("reference_free", not (self.reference_free and self.ref_model), "off with --ref-model"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("push_to_hub", "/" in (self.push_to_hub or "/"), "org/name"),
        ]
        bad = [(name.replace("_", "-"), getattr(self, name), rule) for name, holds, rule in rules if not holds]
        stop_if([f"--{flag} {value} must be {rule}" for flag, value, rule in bad])


AT_LEAST_ONE = """threads decay_steps total_steps keep_checkpoints max_length max_prompt_length batch_size
micro_batch_size max_new_tokens decode_batch_size""".split()
ZERO_OR_MORE = "lora_r lr_final warmup_steps adam_eps weight_decay max_grad_norm eval_temperature sft_coef".split()


# ---- Maths -----------------------------------------------------------------------------------------------------------


def token_nll(logits, labels):
    """-log softmax(logits)[label] per token, at least in float32, unreduced; zero where the label is -100.

    logits (..., V) and labels (...) are aligned: logits[t] predicts labels[t].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)


def dpo_loss(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, loss_type="sigmoid", label_smoothing=0.0,
    lengths=None,
):  # fmt: skip
    """Loss per pair, unreduced, of log-probabilities of responses (sums over tokens), all (B,).

    lengths: tokens of the chosen and of the rejected responses, (B,) each, for ipo and sigmoid_norm, which take means.
    """
    shapes = {x.shape for x in (policy_chosen, policy_rejected, ref_chosen, ref_rejected)}
    if len(shapes) > 1:
        raise ValueError(f"shapes differ: {[tuple(shape) for shape in shapes]}")
    if (label_smoothing and loss_type not in SMOOTHED) or (loss_type == "exo_pair" and not label_smoothing):
        raise ValueError(f"label smoothing {label_smoothing} with the loss {loss_type}")
    c = policy_chosen - ref_chosen
    r = policy_rejected - ref_rejected
    if loss_type in ("ipo", "sigmoid_norm"):
        c = c / lengths[0]
        r = r / lengths[1]
    return log_ratio_loss(c, r, beta, loss_type, label_smoothing)


def log_ratio_loss(c, r, beta, loss_type, smoothing):
    """The loss of a --loss-type, (B,), of the log-ratios c of chosen and r of rejected."""
    delta = c - r
    if loss_type == "sigmoid":  # arXiv 2305.18290, Eq. 7; smoothed: Mitchell 2023, A note on DPO with noisy preferences
        return -(1 - smoothing) * F.logsigmoid(beta * delta) - smoothing * F.logsigmoid(-beta * delta)
    if loss_type == "robust":  # arXiv 2403.00409
        noisy = -(1 - smoothing) * F.logsigmoid(beta * delta) + smoothing * F.logsigmoid(-beta * delta)
        return noisy / (1 - 2 * smoothing)
    if loss_type == "hinge":  # arXiv 2309.06657; 2305.10425 without reference
        return (1 - beta * delta).relu()
    if loss_type in ("ipo", "ipo_sum"):  # arXiv 2310.12036, Eq. 17: ipo of means over tokens, ipo_sum as it is printed
        return (delta - 1 / (2 * beta)) ** 2
    if loss_type == "sigmoid_norm":  # of means over tokens
        return -F.logsigmoid(beta * delta)
    if loss_type == "exo_pair":  # arXiv 2402.00856, Eq. 16
        forwards = torch.sigmoid(beta * delta) * (F.logsigmoid(beta * delta) - math.log(1 - smoothing))
        backwards = torch.sigmoid(-beta * delta) * (F.logsigmoid(-beta * delta) - math.log(smoothing))
        return forwards + backwards
    if loss_type == "nca_pair":  # arXiv 2402.05369
        return -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r)
    if loss_type == "bco_pair":  # arXiv 2404.04656, without its reward shift
        return -F.logsigmoid(beta * c) - F.logsigmoid(-beta * r)
    if loss_type == "sppo_hard":  # arXiv 2405.00675
        return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2
    if loss_type == "apo_zero":  # arXiv 2408.06266, Eq. 7
        return 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r)
    if loss_type == "apo_down":  # arXiv 2408.06266, Eq. 8
        return torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * delta)
    if loss_type == "discopop":  # arXiv 2406.08414, log-ratio modulated with tau = 0.05
        logistic = -F.logsigmoid(beta * delta)
        exponential = (-beta * delta).clamp(max=80).exp()
        return torch.lerp(logistic, exponential, torch.sigmoid(beta * delta / 0.05))
    raise ValueError(f"there is no loss {loss_type}")


def pair_terms(policy, ref, pairs, args):
    """{name: (B,)}: the loss of each pair, which has a gradient, and what is logged, of log-probabilities (2, B)."""
    chosen_lengths = [len(chosen) - prompt_length for chosen, _, prompt_length in pairs]
    rejected_lengths = [len(rejected) - prompt_length for _, rejected, prompt_length in pairs]
    lengths = torch.tensor([chosen_lengths, rejected_lengths], device=policy.device)
    losses = dpo_loss(*policy, *ref, args.beta, args.loss_type, args.label_smoothing, lengths)
    policy = policy.detach().contiguous()  # the last bits of a sum depend on the layout
    chosen, rejected = (args.beta * (policy - ref)).contiguous()
    return {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(losses),
        "logps/chosen": policy[0],
        "logps/rejected": policy[1],
    }


def learning_rate(args, step, total_steps):
    """Of optimizer step `step`, counted from 0: a linear warm-up to lr, then a decay to lr_final, which it keeps."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return args.lr
    progress = min(1.0, (step - args.warmup_steps) / max(1, args.decay_steps or total_steps - args.warmup_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return args.lr + (args.lr_final - args.lr) * progress


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


def encode_pairs(rows, tokenizer, max_length, args, flag):
    """(pairs, report): tokens (chosen, rejected, how many of them are the prompt's) of the pairs that are left.

    Prompt and response are tokenised together. The prompt is the longest common prefix of its own tokens and those of
    both sides, so that a merge across the boundary belongs to the responses; an empty one becomes the beginning token.
    The end token is appended once; in a chat the template ends the turns. A long prompt is cut, then what is longer
    than max_length at the end. Dropped are pairs without room for a response, and those of equal sides.
    """
    chat = is_chat(rows, ["chosen"])
    triples = pair_texts(rows, tokenizer, flag)
    for number, (prompt, _, _) in enumerate(triples, 1):
        if not prompt and (chat or "prompt" not in rows[0]):
            raise InputError(f"{flag} row {number}: chosen and rejected begin differently: add the column prompt")
    prompt_texts = [prompt for prompt, _, _ in triples]
    chosen_texts = [prompt + chosen for prompt, chosen, _ in triples]
    rejected_texts = [prompt + rejected for prompt, _, rejected in triples]
    special_tokens = not chat and not have_bos(tokenizer, chosen_texts + rejected_texts)
    end = "template" if chat else "once"
    heads = tokenize(tokenizer, prompt_texts, special_tokens, end="template")
    chosen_ids = tokenize(tokenizer, chosen_texts, special_tokens, end)
    rejected_ids = tokenize(tokenizer, rejected_texts, special_tokens, end)
    bos = tokenizer.bos_token_id
    pairs = []
    prompts_cut = 0
    responses_cut = 0
    without_room = 0
    equal = 0
    for number, (head, chosen, rejected) in enumerate(zip(heads, chosen_ids, rejected_ids, strict=True), 1):
        prompt_length = len(os.path.commonprefix((head, chosen, rejected)))
        if prompt_length == 0:
            if bos is None:
                raise InputError(f"{flag} row {number}: the prompt is empty and the tokenizer has no beginning token")
            chosen = [bos, *chosen]
            rejected = [bos, *rejected]
            prompt_length = 1
        prompt = cut_prompt(chosen[:prompt_length], bos, args)
        if len(prompt) < prompt_length:
            prompts_cut += 1
        chosen = prompt + chosen[prompt_length:]
        rejected = prompt + rejected[prompt_length:]
        if max(len(chosen), len(rejected)) > max_length:
            responses_cut += 1
        chosen = chosen[:max_length]
        rejected = rejected[:max_length]
        if min(len(chosen), len(rejected)) <= len(prompt):
            without_room += 1
        elif chosen == rejected:
            equal += 1
        else:
            pairs.append((chosen, rejected, len(prompt)))
    report = (
        f"{len(rows)} pairs, {prompts_cut} prompts and the responses of {responses_cut} cut, "
        f"{without_room} dropped without room for a response, {equal} dropped as equal"
    )
    if not pairs:
        raise InputError(f"{flag}: no pair is left: {report} (--max-length, the model's positions)")
    return pairs, report


def cut_prompt(prompt, bos, args):
    """The tokens of a prompt, at most --max-prompt-length of them; a beginning token stays."""
    limit = args.max_prompt_length or len(prompt)
    if len(prompt) <= limit:
        return prompt
    if args.truncation_mode == "keep_start":
        return prompt[:limit]
    if prompt[0] == bos:
        return [bos] + prompt[len(prompt) - limit + 1 :]
    return prompt[-limit:]


def collate(lines, pad):
    """(ids, positions, labels), each (B, T), right-padded. A line is a list of examples (ids, labels, ...); positions
    count from 0 in each of them, and on through the padding."""
    width = max(sum(len(ids) for ids, *_ in line) for line in lines)
    rows = []
    for line in lines:
        ids = []
        positions = []
        labels = []
        for example_ids, example_labels, *_ in line:
            ids += example_ids
            positions += range(len(example_ids))
            labels += example_labels
        fill = width - len(ids)
        after = positions[-1] + 1
        rows.append((ids + [pad] * fill, [*positions, *range(after, after + fill)], labels + [-100] * fill))
    ids, positions, labels = map(torch.tensor, zip(*rows, strict=True))
    return ids, positions, labels


def label_logits(model, ids, positions, labels):
    """Logits (B, K, V) and their labels (B, K): the last K positions, from the first label of the batch on.

    No mask is passed: padding is on the right, and without a cache transformers keeps apart what begins at position 0,
    by a block-diagonal mask for each kind of layer (its masking_utils.py).
    """
    first = int((labels != -100).any(0).int().argmax()) or ids.shape[1] - 1  # no label at all: one position
    inputs = {"input_ids": ids[:, :-1], "position_ids": positions[:, :-1]}
    return model(**inputs, use_cache=False, logits_to_keep=ids.shape[1] - first).logits, labels[:, first:]


def pair_logprobs(model, share, pairs):
    """Log-probabilities (2, B) of the responses, chosen first: sums over their tokens, at least in float32.

    share: what both sides begin with is computed once, and the output layer runs where a token is predicted, alone.
    """
    lm = getattr(model, "module", model)
    if not share:
        lines = []
        for side in (0, 1):
            for pair in pairs:
                ids = pair[side]
                prompt_length = pair[2]
                lines.append([(ids, [-100] * prompt_length + ids[prompt_length:])])
        logits, labels = label_logits(model, *(x.to(lm.device) for x in collate(lines, 0)))
        return -token_nll(logits, labels).sum(1).view(2, -1)
    inputs = [(chosen[:-1], rejected[:-1]) for chosen, rejected, _ in pairs]  # the last token predicts nothing
    ids, positions, mask, common = shared_rows(inputs, 0, lm.device)  # (B, T), (B, T), (B, 1, T, T)
    rows, columns, targets, lengths = response_places(pairs, common)
    places = rows.to(lm.device), columns.to(lm.device)  # (N,) each

    def at_places(module, inputs):
        (states,) = inputs
        return (states[places][None],)

    hook = lm.get_output_embeddings().register_forward_pre_hook(at_places)
    try:
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask.to(lm.dtype), use_cache=False).logits
    finally:
        hook.remove()
    nll = token_nll(logits[0], targets.to(lm.device))  # (N,)
    return -torch.stack([tokens.sum() for tokens in nll.split(lengths)]).view(2, -1)


def response_places(pairs, common):
    """Where `shared_rows` hold what predicts the tokens of the responses, those of all chosen first: rows, columns and
    the tokens, (N,) each, and a list of the 2 B lengths."""
    rows = []
    columns = []
    targets = []
    lengths = []
    for side in (0, 1):
        for row, pair in enumerate(pairs):
            ids = pair[side]
            prompt_length = pair[2]
            places = torch.arange(prompt_length - 1, len(ids) - 1)  # a token is predicted at the one before it
            if side == 1:  # what rejected has of its own stands behind chosen
                chosen_rest = len(pair[0]) - 1 - common[row]
                places = torch.where(places < common[row], places, places + chosen_rest)
            rows.append(torch.full_like(places, row))
            columns.append(places)
            targets += ids[prompt_length:]
            lengths.append(len(places))
    return torch.cat(rows), torch.cat(columns), torch.tensor(targets), lengths


def split_rows(accelerator, rows, pairs, batch_size):
    """The micro-batches of this process: its share of a batch of row numbers, in lists of at most batch_size rows."""
    local = rows[accelerator.process_index :: accelerator.num_processes]
    local = sorted(local, key=lambda row: pair_length(pairs[row]))
    return [local[i : i + batch_size] for i in range(0, len(local), batch_size)]


def pair_length(pair):
    """Tokens of both sides of a pair."""
    return len(pair[0]) + len(pair[1])


def longer_side(pair):
    """Tokens of the longer side of a pair."""
    return max(len(pair[0]), len(pair[1]))


def reduce_sums(accelerator, sums):
    """{name: sum over all processes} as numbers, of a dict of sums."""
    totals = accelerator.reduce(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))


# ---- Reference -------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """The reference, with what it thinks of the pairs and answers to the prompts before anything is trained."""

    model: nn.Module | None  # None as soon as nothing more is asked
    train: torch.Tensor | None = None  # (2, N) log-probabilities of the training pairs; None: each batch is scored
    eval_sets: dict = field(default_factory=dict)  # {name: (2, N)}
    means: dict = field(default_factory=dict)  # of the metric, over its samples
    samples: list = field(default_factory=list)


def ask_reference(run, reference, share, tokenizer, data, args):
    """Fills the reference, while the policy is the model as it is at the start, and forgets its model if it can."""
    accelerator = run.accelerator
    if args.reference_free:
        reference.train = torch.zeros(2, len(data.pairs), device=accelerator.device)
        for name, pairs in data.eval_sets.items():
            reference.eval_sets[name] = torch.zeros(2, len(pairs), device=accelerator.device)
    else:
        key = on_main(accelerator, fingerprint, reference.model)
        if args.precompute_ref and not args.check:
            reference.train = reference_logprobs(run, reference.model, key, share, data.pairs, args)
        for name, pairs in data.eval_sets.items():
            reference.eval_sets[name] = reference_logprobs(run, reference.model, key, share, pairs, args)
    if data.prompts:
        sampled = sample_responses(accelerator, reference.model, tokenizer, data, args)
        reference.means, reference.samples = sampled
    if args.precompute_ref or args.reference_free:
        reference.model = None


@torch.no_grad()
def batch_logprobs(accelerator, reference, share, rows, micro_batch):
    """Log-probabilities (2, B) by the reference of a micro-batch, which are these rows of the training pairs."""
    if reference.train is not None:
        return reference.train[:, rows]
    with accelerator.autocast():
        return pair_logprobs(reference.model, share, micro_batch)


def fingerprint(model):
    """A hash of the weights and the configuration of a model."""
    adapters = [layer.scaling for layer in model.modules() if hasattr(layer, "scaling")]
    config = model.config.to_dict() | {"_name_or_path": "", "adapters": adapters}
    digest = hashlib.sha256(json.dumps(config, default=str).encode())
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def reference_logprobs(run, model, key, share, pairs, args):
    """Log-probabilities (2, N) of all pairs by the reference, whose fingerprint is `key`. They are kept beside the run,
    in a file named by a hash of the code, the key, the pairs, and the layout of the work, which decides last bits."""
    accelerator = run.accelerator
    files = run.identity["files"].items()
    code = {name: digest for name, digest in files if name == "script" or name.startswith("common/")}
    settings = [accelerator.mixed_precision, str(accelerator.device), share]
    layout = [accelerator.num_processes, args.micro_batch_size, torch.get_num_threads(), str(torch.__version__)]
    digest = hashlib.sha256(json.dumps([key, code, settings, layout, pairs], sort_keys=True).encode())
    path = None
    if run.dir:
        path = run.dir.parent / f"ref-{digest.hexdigest()[:16]}.safetensors"
    stored = on_main(accelerator, read_logprobs, path)
    if stored:
        return torch.tensor(stored, dtype=torch.float64, device=accelerator.device)
    score = functools.partial(pair_logprobs, model, share)
    logprobs = score_pairs(accelerator, score, pairs, args.micro_batch_size)
    finite = logprobs.isfinite().all(0)
    if not finite.all():
        number = int((~finite).nonzero()[0]) + 1
        raise FloatingPointError(f"the reference's log-probabilities of pair {number} are not finite")
    on_main(accelerator, write_logprobs, run, path, logprobs)
    return logprobs


def read_logprobs(path):
    """The log-probabilities in a file, two lists; None where there is no whole one."""
    if path is None:
        return None
    with suppress(OSError, safetensors.SafetensorError):
        return safetensors.torch.load_file(path)["logprobs"].tolist()


def write_logprobs(run, path, logprobs):
    """Keeps the log-probabilities in a file, unless this is a --check, which writes nothing."""
    if path is None:
        return
    temporary = run.dir / f".tmp-{path.name}"  # where a killed run's is removed
    try:
        safetensors.torch.save_file({"logprobs": logprobs.cpu().contiguous()}, temporary)
        temporary.rename(path)
    except (OSError, safetensors.SafetensorError) as error:
        run.say(f"warning: the reference's log-probabilities are not kept: {error}")


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def score_pairs(accelerator, score, pairs, batch_size):
    """score(pairs) -> (2, b) of all pairs, (2, N) in float64 on every process; each of them scores a share."""
    device = accelerator.device
    share = math.ceil(len(pairs) / accelerator.num_processes)
    begin = accelerator.process_index * share
    # the last processes repeat the last pair where the pairs do not divide
    local = [pairs[min(place, len(pairs) - 1)] for place in range(begin, begin + share)]
    longest_first = torch.tensor([-pair_length(pair) for pair in local]).argsort(stable=True)
    scores = torch.empty(share, 2, dtype=torch.float64, device=device)
    silent = not accelerator.is_main_process or None  # and where there is no terminal
    for places in tqdm(longest_first.split(batch_size), "scoring pairs", leave=False, disable=silent, delay=5):
        with torch.no_grad(), accelerator.autocast():
            scores[places.to(device)] = score([local[place] for place in places]).T.double()
    return accelerator.gather(scores)[: len(pairs)].T


def sample_responses(accelerator, lm, tokenizer, data, args):
    """What the metric says of responses to the prompts, on average, and the responses."""

    def measure(rows, outputs, output_ids):
        if data.metric is None:
            return {}
        given = text_arguments(tokenizer, rows, outputs, output_ids)
        return on_main(accelerator, call_metric, data.metric, args.metric, rows, given)

    options = measure, args, args.top_k, args.top_p
    return evaluate_samples(accelerator, lm, tokenizer, data.prompts, data.queries, *options)


def evaluate(run, step, model, score, tokenizer, data, reference, args):
    """What the metric says of sampled responses, shown beside the reference's, and the terms of the evaluation sets."""
    accelerator = run.accelerator
    model.eval()
    metrics = {}
    with unsharded(model):
        if data.prompts:
            lm = accelerator.unwrap_model(model)
            means, samples = sample_responses(accelerator, lm, tokenizer, data, args)
            metrics = {f"eval/{name}": value for name, value in means.items()}
            for sample, ref_sample in zip(samples, reference.samples, strict=True):
                sample["reference"] = ref_sample["output"]
            run.samples(step, samples)
        for name, pairs in data.eval_sets.items():
            policy = score_pairs(accelerator, score, pairs, args.micro_batch_size)
            terms = pair_terms(policy, reference.eval_sets[name], pairs, args)
            metrics |= {f"{set_prefix(name)}{term}": values.mean().item() for term, values in terms.items()}
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a run reads: rows at first, tokens as soon as there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: pairs}
    prompts: list  # rows to sample from
    metric: Callable | None
    pairs: list | None = None  # (ids of chosen, ids of rejected, tokens of the prompt)
    queries: list | None = None  # ids of the prompts
    report: str = ""


def read(args):
    """The rows and functions that the flags name."""
    metric = load_function(args.metric, "--metric")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    prompts = []
    if args.eval_prompts:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    elif metric:
        prompts = next(iter(eval_sets.values()), [])
    return Data(rows, eval_sets, prompts, metric)


def load(args, path, device):
    """The language model, with frozen weights or adapters as the flags say, and its tokenizer."""
    lm, tokenizer = load_model(args, path)
    if lm.config.is_encoder_decoder:
        raise InputError("--model is an encoder-decoder: dpo.py trains decoders; sft.py, ppo.py and ilql.py take both")
    train_adapters(lm.to(device), args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def encode(data, lm, tokenizer, args):
    """Makes tokens of all rows, and forgets those that are only for evaluations where there are none."""
    limit = max_positions(lm)
    max_length = min(args.max_length, limit or args.max_length)
    data.pairs, data.report = encode_pairs(data.rows, tokenizer, max_length, args, "--dataset")
    for name, rows in data.eval_sets.items():
        data.eval_sets[name], report = encode_pairs(rows, tokenizer, max_length, args, set_flag(name))
        data.report += f"\n{set_prefix(name)[:-1]}: {report}"
    if data.prompts and is_chat(data.prompts, ["chosen"]):
        data.prompts = [row | {"prompt": prompt_messages(row)} for row in data.prompts]
    if data.metric and not (data.prompts and "prompt" in data.prompts[0]):
        raise InputError("--metric needs rows with a prompt to sample from: name --eval-prompts")
    if data.prompts:
        data.prompts, data.queries = encode_prompts(
            data.prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts"
        )
    if not (args.eval_every or args.check):
        data.eval_sets = {}
        data.prompts = []


def load_ref(args, path, ref_path, lm, tokenizer, longest):
    """The reference: the model at ref_path, or lm, that of path, as it is now; a copy of lm where training asks it."""
    is_trained = ref_path is path and not isinstance(path, str)  # one object for both
    if ref_path is not None and not is_trained:
        return Reference(load_reference(args, ref_path, lm, tokenizer, longest))
    if args.precompute_ref or args.reference_free:
        return Reference(lm.eval())
    return Reference(frozen_copy(lm))


def shares_exactly(run, model, data, score, quantity, args):
    """Whether --share-prompt changes no score of a pair, tried on three pairs of all sets."""
    if not args.share_prompt or args.attn_implementation.startswith("flash"):
        return False
    pairs = [*data.pairs, *itertools.chain(*data.eval_sets.values())]
    error = sharing_error(score, model, pairs)
    if error <= (0.02 if args.dtype == "bfloat16" else 1e-4):
        return True
    run.say(f"--share-prompt is off: in this model it changes a {quantity} by {error:.1e}")
    return False


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def summary(args, accelerator, lm, tokenizer, data, total_steps):
    """What is trained on what, in a few lines."""
    lines = []
    if not any(trains_end(pair, tokenizer.eos_token_id) for pair in data.pairs):
        lines.append(f"warning: no row trains the end token {tokenizer.eos_token}: responses will not end")
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    lengths = sorted(map(longer_side, data.pairs))
    chosen, rejected, prompt_length = data.pairs[0]
    prompt = visible(tokenizer.decode(chosen[:prompt_length]))
    chosen = visible(tokenizer.decode(chosen[prompt_length:]))
    rejected = visible(tokenizer.decode(rejected[prompt_length:]))
    epochs = total_steps * args.batch_size / len(data.pairs)
    share = args.batch_size // accelerator.num_processes
    lines += [
        f"dpo: {lm.num_parameters():,} parameters, {trained:,} trained; reference: {describe_reference(args)}; "
        f"{describe_layout(args, accelerator)}",
        f"data: {data.report}",
        f"tokens of the longer side: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
        f"first pair: [{prompt[-400:]}] | chosen: {chosen[:200]} | rejected: {rejected[:200]}",
        f"{total_steps} steps x {args.batch_size} pairs = {epochs:.1f} epochs; each step {share} pairs a process, "
        f"at most {args.micro_batch_size} a forward pass",
    ]
    if args.stop:
        lines[-1] += f"; stops: {list(args.stop)}"
    return "\n".join(lines)


def trains_end(pair, eos):
    """Whether a response of the pair holds the end token."""
    chosen, rejected, prompt_length = pair
    return eos in chosen[prompt_length:] or eos in rejected[prompt_length:]


def headline_metric(data, reference):
    """The metric whose highest value marks the best checkpoint."""
    if reference.means:
        return f"eval/{next(iter(reference.means))}"
    if data.eval_sets:
        return f"{set_prefix(next(iter(data.eval_sets)))}rewards/accuracies"
    return "rewards/accuracies"


def describe_reference(args):
    """What the reference is, and when it is asked."""
    if args.reference_free:
        return "none"
    name = "the model as it is at the start" if args.ref_model is None else "of its own"
    return f"{name}, scored once" if args.precompute_ref else f"{name}, kept"


# ---- Main ------------------------------------------------------------------------------------------------------------


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    ref_path = build(args.ref_model, "--ref-model")
    data = read(args)
    accelerator = launch(args)
    lm, tokenizer = load(args, path, accelerator.device)
    encode(data, lm, tokenizer, args)
    longest = 2 * max(map(longer_side, data.pairs))
    set_attention(lm, args, accelerator.device, longest)
    reference = load_ref(args, path, ref_path, lm, tokenizer, longest)

    run = Run("dpo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    total_steps = args.total_steps or math.ceil(args.epochs * len(data.pairs) / args.batch_size)
    share = shares_exactly(run, lm, data, pair_logprobs, "log-probability", args)
    run.say(summary(args, accelerator, lm, tokenizer, data, total_steps))
    ask_reference(run, reference, share, tokenizer, data, args)
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    evaluates = bool(data.eval_sets or data.prompts)
    run.restore(model, optimizer, lm, total_steps, longer="--total-steps", evaluates=evaluates)
    score = functools.partial(pair_logprobs, model, share)
    if args.check:
        evaluate(run, 0, model, score, tokenizer, data, reference, args)
        run.say("check passed")
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, score, tokenizer, data, reference, args))
    headline = headline_metric(data, reference)

    for step in range(run.begun + 1, total_steps + 1):
        start = time.perf_counter()
        model.train()
        # 1. a batch of pairs, in keyed random order
        batch = stream_rows(args.seed, "data", len(data.pairs), (step - 1) * args.batch_size, args.batch_size)
        count = sum(len(data.pairs[row][0]) - data.pairs[row][2] for row in batch)  # tokens of the chosen responses
        micro_batches = split_rows(accelerator, batch, data.pairs, args.micro_batch_size)
        # 2. loss = -1/B sum log sigmoid(beta (c - r)), Eq. 7 (or --loss-type; --sft-coef), and its gradient
        sums = defaultdict(float)
        for rows in micro_batches:
            micro_batch = [data.pairs[row] for row in rows]
            with nullcontext() if rows is micro_batches[-1] else accelerator.no_sync(model):
                policy = score(micro_batch)
                ref = batch_logprobs(accelerator, reference, share, rows, micro_batch)
                terms = pair_terms(policy, ref, micro_batch, args)
                loss = terms["loss"].sum() / args.batch_size - args.sft_coef * policy[0].sum() / count
                # data-parallel training averages gradients over the processes, hence the factor
                accelerator.backward(loss * accelerator.num_processes)
            for name, values in terms.items():
                sums[name] += values.detach().double().sum()
        # 3. a step of AdamW
        lr = learning_rate(args, step - 1, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        sums = reduce_sums(accelerator, sums)
        means = {name: value / args.batch_size for name, value in sums.items()}
        if not (all(map(math.isfinite, means.values())) and grad_norm.isfinite()):
            numbers = f"loss {means['loss']}, gradient norm {grad_norm}, rows {batch}"
            raise FloatingPointError(f"step {step}: {numbers}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - start
        nll = -sums["logps/chosen"] / count  # mean over the tokens
        loss = means.pop("loss") + args.sft_coef * nll
        metrics = {"train/loss": loss, "train/nll": nll, **means}
        metrics |= {"train/epoch": step * args.batch_size / len(data.pairs), "optim/lr": lr}
        metrics["optim/grad_norm"] = grad_norm.item()
        tokens = sum(pair_length(data.pairs[row]) for row in batch)
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": tokens / seconds}
        perf["perf/pairs_per_sec"] = args.batch_size / seconds
        if run.evaluation_due(step):
            metrics |= evaluate(run, step, model, score, tokenizer, data, reference, args)
            if run.is_best(step, metrics[headline]):
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        text = f"loss {loss:.4f} | accuracy {metrics['rewards/accuracies']:.3f}"
        run.status(step, f"{text} | margin {metrics['rewards/margins']:.3f} | {seconds:.2f} s")
        run.save_if_due(step)

    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after DPO on {run.identity['flags']['dataset']}"
    chosen, _, prompt_length = data.pairs[0]
    metrics = run.finish(headline, title, tokenizer.decode(chosen[:prompt_length]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
