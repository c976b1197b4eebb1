"""Direct preference optimisation (DPO): a policy from preferences, without a reward model.

Paper: Rafailov et al. 2023, arXiv 2305.18290. Loss of a pair (Eq. 7): -log sigmoid(beta (c - r)) with the log-ratios
c = log pi(chosen | prompt) - log pi_ref(chosen | prompt), r likewise for rejected (`dpo_loss`). The variants are in
`log_ratio_loss`; --label-smoothing works with sigmoid, robust and exo_pair. Training usually lowers both
log-probabilities, that of rejected more; --sft-coef or apo_zero keeps that of chosen from falling. The reference
(`Reference`) scores all pairs, evaluation sets included, once before training, so no second model stays in memory.

How this differs from other implementations:
- Prompt and response are split at the same token in both texts of a pair. No response is left empty by cutting. The end
  token is appended exactly once.
- Logits are computed only where a response token is predicted, a chunk at a time (`line_logprobs`).

Rows: {"prompt", "chosen", "rejected"} as texts or chats; "prompt" may be missing if both texts include it.

    python algos/dpo.py                                            # random walks, on one CPU
    python algos/dpo.py --model runs/sft/hf_model --dataset pairs.jsonl --eval-dataset test.jsonl
    accelerate launch algos/dpo.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train
    torchrun --nproc_per_node 8 algos/dpo.py --model Qwen/Qwen3-0.6B --max-length 2048 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs, N all pairs of a set, T all response tokens of a batch.
"""

import functools
import itertools
import math
import os
import sys
from array import array
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.nn import functional as F

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, Share, StopString, cli
from common.errors import InputError, stop_if
from common.functions import build
from common.launch import accumulate, prepare, reduce_sums, require_finite, unsharded
from common.lm.chat import is_chat, pair_texts, prompt_messages
from common.lm.evaluation import evaluate_samples
from common.lm.load import lines_of_use, load_lm, make_reference
from common.lm.logprobs import compute_pairs, line_logprobs
from common.lm.structure import can_pack, max_positions
from common.lm.tokens import (
    beginning,
    encode_prompts,
    in_lines,
    int32,
    num_labels,
    split_rows,
    tell_unknown,
    tell_untrained_end,
    tokenize,
)
from common.rows import TEXT_ARGUMENTS, longest_rows, read_data, set_flag, set_prefix
from common.run import Run, closes_run
from common.seeding import rng

TASK = "benchmarks/tasks/randomwalks/dpo.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """Preference optimisation of a language model."""

    # ---- algorithm
    epochs: Positive = 1.0
    """Passes over the data (code of Rafailov et al. 2023: 1)."""
    total_steps: Count | None = None
    """Optimizer steps; default: as many as --epochs takes."""
    beta: Positive = 0.1
    """Strength of the KL penalty implied by the loss (Eq. 3). A lower value lets the policy move farther from the
    reference (Rafailov et al. 2023: 0.1, for summaries 0.5)."""
    loss_type: Literal[
        "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
        "apo_zero", "apo_down", "discopop",
    ] = "sigmoid"  # fmt: skip
    """Loss of a pair; see log_ratio_loss."""
    label_smoothing: Fraction = 0.0
    """Assumed probability that a preference is wrong, for the losses sigmoid (cDPO), robust and exo_pair."""
    ref_model: str | None = None
    """Reference model, given like --model; default: --model before training. --metric gets the reference's responses to
    the evaluation prompts as the column ref_output."""
    reference_free: bool = False
    """Use no reference: treat every response as equally likely under pi_ref."""
    precompute_ref: bool = True
    """Score all pairs with the reference once, before training. Otherwise a frozen copy scores each batch."""
    sft_coef: NonNegative = 0.0
    """Weight of an SFT loss added to the DPO loss: the mean of -log pi over the tokens of the chosen responses (arXiv
    2404.19733, Eq. 1, takes a mean per response). Keeps their probability and that of the end token from falling."""
    packing: bool = True
    """Pack several texts into one line, no longer than the longest text; texts do not see each other. Turned off for
    models whose layers would mix them. Changes memory and speed; the result only by rounding."""

    # ---- evaluation by sampling
    max_new_tokens: Count = 64
    """Maximum length of a response, in tokens."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a response; a shell writes a newline as $'\\n'. Tokens up to the one that completes the string
    are kept. The metric sees the text before the string, without trailing space."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature in evaluations; 0: greedy."""
    top_k: Natural = 0
    """Evaluations sample from the k most likely tokens; 0: from all."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens whose probabilities sum to this; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once. Changes memory and speed; the result only by rounding."""

    # ---- optimizer
    lr: Positive = 1e-6
    """Peak learning rate of AdamW (Rafailov et al. 2023: 1e-6 with 150 steps of warm-up; TRL: 1e-6; LoRA adapters need
    about ten times as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate schedule after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final is reached; default: the rest of the run."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count = 64
    """Pairs per optimizer step, over all processes (Rafailov et al. 2023: 64)."""
    micro_batch_size: Count = 8
    """Pairs per process and forward pass. Changes memory and speed; the result only by rounding."""

    # ---- data
    dataset: str | None = None
    """Training pairs: a .jsonl/.json/.csv/.parquet file, a hub id:split, or file.py:function; from Python, a list."""
    eval_prompts: str | None = None
    """Rows with a prompt; all are sampled at every evaluation. Default: with --metric the first set of
    --eval-dataset."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list of one number per sample}."""
    lower_is_better: bool = False
    """The first metric of --metric, which chooses the best model, is better when it is lower, as an error rate."""
    max_length: Count = 1024
    """Maximum tokens per text, prompt included. Longer texts are cut at the end and counted; a pair left without a
    response is dropped."""
    max_prompt_length: Count | None = None
    """Cut longer prompts to this many tokens, as --truncation-mode says, and count them."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """Which end of a prompt longer than --max-prompt-length is kept. A beginning token is always kept."""

    def problems(self):
        if self.num_layers_unfrozen == 0:
            yield "--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1"
        if self.label_smoothing >= 0.5:
            yield f"--label-smoothing {self.label_smoothing} must be below 0.5, or no preference is left"
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            yield f"--label-smoothing {self.label_smoothing} does not work with --loss-type {self.loss_type}"
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            yield "--loss-type exo_pair needs a --label-smoothing above 0 (1e-3)"
        if self.reference_free and self.ref_model is not None:
            yield "--reference-free does not work with --ref-model"


# ---- Maths -----------------------------------------------------------------------------------------------------------

SMOOTHED = ("sigmoid", "robust", "exo_pair")  # losses with label smoothing


def log_ratio_loss(c, r, beta, loss_type, smoothing):
    """The loss (B,) of a --loss-type, from the log-ratios c of chosen and r of rejected."""
    delta = c - r
    if loss_type == "sigmoid":  # arXiv 2305.18290, Eq. 7; smoothed: Mitchell 2023, A note on DPO with noisy preferences
        return -(1 - smoothing) * F.logsigmoid(beta * delta) - smoothing * F.logsigmoid(-beta * delta)
    if loss_type == "robust":  # arXiv 2403.00409
        noisy = -(1 - smoothing) * F.logsigmoid(beta * delta) + smoothing * F.logsigmoid(-beta * delta)
        return noisy / (1 - 2 * smoothing)
    if loss_type == "hinge":  # arXiv 2309.06657; 2305.10425 without reference
        return (1 - beta * delta).relu()
    if loss_type in ("ipo", "ipo_sum"):  # arXiv 2310.12036, Eq. 17: ipo takes means over tokens, ipo_sum is as printed
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
        exponential = (-beta * delta).clamp(max=80).exp()  # exp stays finite where its weight is 0
        return torch.lerp(logistic, exponential, torch.sigmoid(beta * delta / 0.05))
    raise ValueError(f"there is no loss {loss_type}")


def dpo_loss(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, loss_type="sigmoid", label_smoothing=0.0,
    lengths=None,
):  # fmt: skip
    """Loss (B,) per pair, unreduced, from log-probabilities (B,) of the responses (sums over tokens).

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


def pair_losses(logprobs, pairs, reference, args):
    """Losses (B,) of pairs and rewards (2, B) of their responses, from the policy's log-probabilities (2, B).

    The implicit reward of a response is beta log(pi / pi_ref) (Eq. 5, less a constant), without gradient,
    of sums over its tokens, also for losses of means.
    """
    ref_logprobs = reference(pairs)
    lengths = response_lengths(pairs).to(logprobs.device)
    losses = dpo_loss(*logprobs, *ref_logprobs, args.beta, args.loss_type, args.label_smoothing, lengths)
    return losses, args.beta * (logprobs.detach() - ref_logprobs)


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two texts with the same prompt, as ids."""

    chosen: array
    rejected: array
    prompt_length: int  # how many of the ids of either text are the prompt
    ref_logprobs: list | None = None  # of both responses, chosen first, if the reference has scored them

    @property
    def length(self):
        return len(self.chosen) + len(self.rejected)


def encode_pairs(rows, tokenizer, max_length, args, flag):
    """(pairs, report): a Pair of each row that is kept.

    Prompt and response are tokenised together. The prompt is the longest common prefix of its own tokens and those of
    both texts, so a merge across the boundary belongs to the responses. An empty prompt becomes the beginning token.
    The end token is appended once; in a chat the template ends the turns. A long prompt is cut first; then texts are
    cut at the end to max_length. Pairs without room for a response, or with two equal texts, are dropped.
    """
    chat = is_chat(rows, ["chosen"])
    triples = pair_texts(rows, tokenizer, flag)
    for number, (prompt, _, _) in enumerate(triples, 1):
        if not prompt and (chat or "prompt" not in rows[0]):
            raise InputError(f"{flag} row {number}: chosen and rejected begin differently: add a prompt column")
    prompt_texts = [prompt for prompt, _, _ in triples]
    chosen_texts = [prompt + chosen for prompt, chosen, _ in triples]
    rejected_texts = [prompt + rejected for prompt, _, rejected in triples]
    end = "template" if chat else "once"
    heads = tokenize(tokenizer, prompt_texts, not chat, end="template")
    chosen_ids = tokenize(tokenizer, chosen_texts, not chat, end)
    rejected_ids = tokenize(tokenizer, rejected_texts, not chat, end)
    tell_unknown(tokenizer, map(list.__add__, chosen_ids, rejected_ids), flag)
    bos = tokenizer.bos_token_id
    pairs = []
    prompts_cut = 0
    responses_cut = 0
    without_room = 0
    equal = 0
    for number, (head, chosen, rejected) in enumerate(zip(heads, chosen_ids, rejected_ids, strict=True), 1):
        prompt_length = len(os.path.commonprefix((head, chosen, rejected)))
        if prompt_length == 0:
            bos = beginning(tokenizer, f"{flag} row {number}")
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
            pairs.append(Pair(int32(chosen), int32(rejected), len(prompt)))
    report = (
        f"{len(rows)} pairs; prompts: {prompts_cut} cut; responses: {responses_cut} cut (--max-length {max_length}); "
        f"{without_room} dropped without room for a response, {equal} as equal"
    )
    if not pairs:
        raise InputError(f"{flag}: no pair is left: {report}")
    return pairs, report


def cut_prompt(prompt, bos, args):
    """The tokens of a prompt, at most --max-prompt-length of them; a beginning token is kept."""
    limit = args.max_prompt_length or len(prompt)
    if len(prompt) <= limit:
        return prompt
    if args.truncation_mode == "keep_start":
        return prompt[:limit]
    if prompt[0] == bos:
        return [bos] + prompt[len(prompt) - limit + 1 :]
    return prompt[-limit:]


def response_lengths(pairs):
    """(2, B): tokens of the responses, chosen first."""
    chosen = [len(pair.chosen) - pair.prompt_length for pair in pairs]
    rejected = [len(pair.rejected) - pair.prompt_length for pair in pairs]
    return torch.tensor([chosen, rejected])


# ---- Forward pass ----------------------------------------------------------------------------------------------------


def pair_logprobs(model, packing, pairs):
    """Log-probabilities (2, B) of the responses, chosen first: sums over their tokens, at least in float32. packing: a
    line may hold several texts."""
    examples = []  # (ids, labels) of all chosen, then of all rejected; labels are on the response
    for side in ("chosen", "rejected"):
        for pair in pairs:
            ids = getattr(pair, side)
            examples.append((ids, [-100] * pair.prompt_length + list(ids[pair.prompt_length :])))
    lines, places = in_lines(packing, examples, [len(ids) for ids, _ in examples])
    logprobs, _, _ = line_logprobs(model, lines)  # (T,)
    parts = logprobs.split([num_labels(labels) for _, labels in itertools.chain(*lines)])
    sums = torch.stack([part.sum() for part in parts])  # index_add would not be deterministic
    return sums[places.to(sums.device)].view(2, -1)


# ---- Reference -------------------------------------------------------------------------------------------------------


class Reference:
    """The policy pi_ref: reference(pairs) -> log-probabilities (2, B) of their responses, chosen first.

    It is --ref-model, or the model before training. The constructor scores the evaluation pairs. With --precompute-ref
    it also scores the training pairs, and then releases the model. The reference's responses to the prompts become
    their column ref_output. A resumed run repeats this with the same number of threads (`Run`), so on a CPU it gets the
    same bits.
    """

    def __init__(self, accelerator, model, tokenizer, data, packing, args):
        self.accelerator = accelerator
        self.args = args
        self.model = model.eval()
        self.packing = packing
        with unsharded(model):
            if not args.reference_free:
                self.store_all(data)
            if data.prompts:
                _, samples = evaluate_samples(
                    accelerator, model, tokenizer, data.prompts, data.queries, None, **evaluation_options(args)
                )
                outputs = [sample["output"] for sample in samples]
                data.prompts = [row | {"ref_output": output} for row, output in zip(data.prompts, outputs, strict=True)]
        if args.precompute_ref:
            self.model = None

    def store_all(self, data):
        """Stores those of the evaluation pairs, and of the training pairs with --precompute-ref."""
        for pairs in data.eval_sets.values():
            self.store(pairs)
        count = len(data.pairs)
        if self.args.check:  # --check trains only on the longest pairs
            data.pairs.sort(key=lambda pair: pair.length, reverse=True)
            count = self.args.batch_size
        if self.args.precompute_ref:
            self.store(data.pairs[:count])

    def store(self, pairs):
        """Gives the pairs the log-probabilities of their responses."""
        lengths = [pair.length for pair in pairs]
        logprobs_of = functools.partial(pair_logprobs, self.model, self.packing)
        logprobs = compute_pairs(self.accelerator, logprobs_of, pairs, lengths, self.args.micro_batch_size)
        finite = logprobs.isfinite().all(0)
        if not finite.all():
            number = int((~finite).nonzero()[0]) + 1
            raise FloatingPointError(f"the reference's log-probabilities of pair {number} are not finite")
        for pair, both in zip(pairs, logprobs.T.tolist(), strict=True):
            pair.ref_logprobs = both

    @torch.no_grad()
    def __call__(self, pairs):
        """Log-probabilities (2, B): those that are stored, or by a forward pass."""
        device = self.accelerator.device
        if self.args.reference_free:
            return torch.zeros(2, len(pairs), device=device)
        if pairs[0].ref_logprobs is not None:
            known = [pair.ref_logprobs for pair in pairs]
            return torch.tensor(known, dtype=torch.float64, device=device).T.contiguous()
        with self.accelerator.autocast():
            return pair_logprobs(self.model, self.packing, pairs)


# ---- Order of rows, optimizer ----------------------------------------------------------------------------------------


def draw_rows(seed, num_rows, start, count):
    """`count` row numbers from position `start` of an endless stream: a keyed permutation of all rows for each pass."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    rows = np.concatenate([rng(seed, "data", epoch).permutation(num_rows) for epoch in epochs])
    return rows[start % num_rows :][:count].tolist()


def make_optimizer(model, args):
    """AdamW on the trained weights, with weight decay of matrices only. A group's `peak_lr` is that of its schedule:
    another group may have its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def learning_rate(peak, step, total_steps, args):
    """The rate of optimizer step `step`, counted from 0: warm-up to the peak, decay to --lr-final, then constant."""
    if step < args.warmup_steps:
        return peak * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return peak
    decay_steps = args.decay_steps or total_steps - args.warmup_steps
    progress = min(1.0, (step - args.warmup_steps) / max(1, decay_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak + (args.lr_final - peak) * progress


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluation_options(args):
    """How responses of evaluations are sampled: options of `evaluate_samples` and `evaluate_sets`."""
    names = ("seed", "max_new_tokens", "top_k", "top_p", "stop", "decode_batch_size")
    return {name: getattr(args, name) for name in names} | {"temperature": args.eval_temperature}


def pair_terms(logprobs, losses, rewards, steps, args):
    """{name: (B,)} of what is logged for pairs, from their losses, rewards (2, B) and log-probabilities (2, B), after
    that many steps. A tie counts as half; so do all before the first step, where only rounding would decide."""
    logprobs = logprobs.detach().contiguous()  # the last bits of a sum depend on the layout
    chosen, rejected = rewards.contiguous()
    are_ties = steps == 0 and not (args.ref_model or args.reference_free)
    return {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": torch.full_like(chosen, 0.5) if are_ties else (1 + (chosen - rejected).sign()) / 2,
        "logps/chosen": logprobs[0],
        "logps/rejected": logprobs[1],
    }


def evaluate(run, step, model, logprobs_of, losses_of, tokenizer, data, args):
    """Metrics: --metric on sampled responses, and means over the pairs of the evaluation sets. Logs the samples. The
    evaluation loss is the pair loss, without --sft-coef."""
    accelerator = run.accelerator
    model.eval()
    metrics = {}

    with unsharded(model):
        if data.prompts:
            lm = accelerator.unwrap_model(model)
            means, samples = evaluate_samples(
                accelerator, lm, tokenizer, data.prompts, data.queries, data.metric, **evaluation_options(args)
            )
            metrics = {f"eval/{name}": value for name, value in means.items()}
            for row, sample in zip(data.prompts, samples, strict=True):
                sample["reference"] = row["ref_output"]
            run.samples(step, samples)
        if metrics:  # the first column of --metric, which chooses the best model
            run.headline = next(iter(metrics))
            run.lower_is_better = args.lower_is_better
        for name, pairs in data.eval_sets.items():
            lengths = [pair.length for pair in pairs]
            logprobs = compute_pairs(accelerator, logprobs_of, pairs, lengths, args.micro_batch_size)
            terms = pair_terms(logprobs, *losses_of(logprobs, pairs), step, args)
            own = {f"{set_prefix(name)}{term}": values.mean().item() for term, values in terms.items()}
            taken = [key.rpartition("/")[2] for key in metrics.keys() & own]
            stop_if([f"--metric returned {key!r}, which evaluations have: choose another name" for key in taken])
            metrics |= own
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


def encode(data, lm, tokenizer, args):
    """Tokenises all rows: data gets pairs, of each evaluation set too, and queries (ids of prompts). Drops evaluation
    data if the run never evaluates. Returns the maximum text length in tokens that --max-length and the model allow."""
    if lm.config.is_encoder_decoder:
        takers = "sft.py, ppo.py, grpo.py and ilql.py take both"
        raise InputError(f"--model is an encoder-decoder: {Path(__file__).name} trains decoders; {takers}")
    limit = max_positions(lm)
    max_length = min(args.max_length, limit)
    data.pairs, data.report = encode_pairs(data.rows, tokenizer, max_length, args, "--dataset")
    for name, rows in data.eval_sets.items():
        data.eval_sets[name], report = encode_pairs(rows, tokenizer, max_length, args, set_flag(name))
        data.report += f"\n{set_flag(name)}: {report}"
    if data.prompts and is_chat(data.prompts, ["chosen"]):
        data.prompts = [row | {"prompt": prompt_messages(row)} for row in data.prompts]
    if data.prompts:
        data.prompts, data.queries = encode_prompts(
            data.prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts"
        )
    if not (args.eval_every or args.check):
        data.eval_sets = {}
        data.prompts = []
    return max_length


def summary(run, tokenizer, data, max_length):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    responses = [pair.chosen[pair.prompt_length :] + pair.rejected[pair.prompt_length :] for pair in data.pairs]
    tell_untrained_end(tokenizer, responses)
    lengths = sorted(max(len(pair.chosen), len(pair.rejected)) for pair in data.pairs)
    tokens = (
        f"tokens of the longer text: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}, at most {max_length}"
    )
    first = data.pairs[0]
    prompt = tokenizer.decode(first.chosen[: first.prompt_length])
    chosen = tokenizer.decode(first.chosen[first.prompt_length :])
    rejected = tokenizer.decode(first.rejected[first.prompt_length :])
    reference = "none"
    if not args.reference_free:
        reference = "the model at the start" if args.ref_model is None else "a model of its own"
    facts = {
        "loss": f"{args.loss_type}, beta {args.beta:g}, label smoothing {args.label_smoothing:g}, "
        f"SFT coefficient {args.sft_coef:g}",
        "reference": reference,
        "data": f"{data.report}\n{tokens}",
        "first pair": f"[{prompt[-400:]!r}] | chosen: {chosen[:200]!r} | rejected: {rejected[:200]!r}",
        "steps": f"{run.total_steps} of {args.batch_size} pairs, {args.micro_batch_size} per forward pass",
    }
    if data.prompts:
        facts["samples"] = f"of {len(data.prompts)} prompts at each evaluation"
    return facts


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["train/loss", "rewards/accuracies", "rewards/margins"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    path = build(args.model, "--model")
    ref_path = build(args.ref_model, "--ref-model")
    given = [*TEXT_ARGUMENTS, "ref_output"]
    data = read_data(args.dataset, args.eval_dataset, eval_prompts=args.eval_prompts, metric=args.metric, given=given)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer = load_lm(args, path, accelerator.device)
    max_length = encode(data, lm, tokenizer, args)
    packing = can_pack(lm, args.packing, run.say)
    ref = None
    if args.ref_model is not None or not (args.precompute_ref or args.reference_free):
        ref = make_reference(args, ref_path, lm, tokenizer)
    run.check_inputs(data, model=lm, ref_model=ref)
    ref_packing = packing and (ref is None or can_pack(ref, packing, run.say))
    optimizer = make_optimizer(lm, args)
    model = prepare(accelerator, lm, optimizer, ref)
    reference = Reference(accelerator, ref or lm, tokenizer, data, ref_packing, args)
    del ref  # which --precompute-ref needs no more
    losses_of = functools.partial(pair_losses, reference=reference, args=args)
    logprobs_of = functools.partial(pair_logprobs, model, packing)
    export = functools.partial(run.export, lm, tokenizer)
    lengths = [pair.length for pair in data.pairs]
    total_steps = args.total_steps or math.ceil(args.epochs * len(lengths) / args.batch_size)
    headline = "rewards/accuracies"
    if data.eval_sets:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}rewards/accuracies"
    evaluates = bool(data.eval_sets or data.prompts)
    run.begin(model, optimizer, lm, total_steps, [headline, *IN_STATUS], evaluates=evaluates)
    run.tell(lm, summary(run, tokenizer, data, max_length))
    if run.evaluation_due(run.first_step):
        metrics = evaluate(run, run.first_step, model, logprobs_of, losses_of, tokenizer, data, args)
        run.log_evaluation(run.first_step, metrics)
        run.save(run.first_step, export)

    for step in run.iterations():
        model.train()
        # 1. a batch of pairs, in keyed random order
        rows = draw_rows(args.seed, len(lengths), (step - 1) * args.batch_size, args.batch_size)
        if args.check:
            rows = longest_rows(lengths, args.batch_size)
        count = int(response_lengths([data.pairs[row] for row in rows])[0].sum())  # tokens of the chosen responses
        # 2. loss = 1/B sum pair_losses + sft_coef nll, and its gradient
        sums = defaultdict(float)
        micro_batches = split_rows(accelerator, rows, lengths, packing, args.micro_batch_size)
        for own_rows in accumulate(accelerator, model, micro_batches):
            pairs = [data.pairs[row] for row in own_rows]
            logprobs = logprobs_of(pairs)  # (2, b)
            losses, rewards = losses_of(logprobs, pairs)
            loss = losses.sum() / args.batch_size - args.sft_coef * logprobs[0].sum() / count
            # data-parallel training averages gradients over the processes: multiply by their number
            accelerator.backward(loss * accelerator.num_processes)
            for name, values in pair_terms(logprobs, losses, rewards, step - 1, args).items():
                sums[name] += values.detach().double().sum()
        sums = reduce_sums(accelerator, sums)
        metrics = {name: value / args.batch_size for name, value in sums.items()}
        nll = -sums["logps/chosen"] / count  # mean over the tokens
        total = metrics.pop("loss") + args.sft_coef * nll
        # 3. a step of AdamW
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
        require_finite(step, f"rows {rows}", loss=total, gradient_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak_lr"], step - 1, total_steps, args)
        optimizer.step()
        optimizer.zero_grad()
        run.lap("update")
        # 4. log, evaluate, save
        metrics = {"train/loss": total, "train/nll": nll, **metrics}
        metrics["train/epoch"] = step * args.batch_size / len(lengths)
        metrics |= {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}
        run.log(step, metrics, tokens=sum(lengths[row] for row in rows), pairs=args.batch_size)
        if run.evaluation_due(step):
            run.log_evaluation(step, evaluate(run, step, model, logprobs_of, losses_of, tokenizer, data, args))
        run.save(step, export)

    first = data.pairs[0]
    return run.finish(export, *lines_of_use(lm, tokenizer, first.chosen[: first.prompt_length]))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
