"""A reward model from preferences: a sequence classifier whose score is higher for the chosen of two texts.

Loss: -log sigmoid(r_chosen - r_rejected - margin) per pair (Ouyang et al. 2022, arXiv 2203.02155, Eq. 1; the margin is
that of Touvron et al. 2023, arXiv 2307.09288, Eq. 2): `pairwise_loss`.

How this differs from other implementations:
- The score is read at the last token of the text, which is the end token, or in a chat that of the turn, whatever the
  padding: even if the end token doubles as padding or occurs within the prompt. `ppo.py --reward` reads the same
  tokens of the same text.
- The head is float32 and outside autocast: bfloat16 would give many texts the same score.
- Pairs that are too long are dropped and counted: a cut text has no end to read the score from.
- A tie counts as half: a constant model has accuracy 0.5. The accuracy of the rule "the shorter wins" is logged, too.

Rows: {"prompt", "chosen", "rejected"} as texts or chats; "prompt" may be missing if both hold it; optional "margin".

    python algos/reward.py                                         # random walks, on one CPU
    python algos/reward.py --model gpt2 --dataset pairs.jsonl --eval-dataset test.jsonl
    accelerate launch algos/reward.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train
    torchrun --nproc_per_node 8 algos/reward.py --model Qwen/Qwen3-0.6B --max-length 2048 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs, N all pairs of a set.
"""

import functools
import itertools
import math
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.nn import functional as F

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, cli
from common.errors import InputError
from common.functions import build
from common.launch import accumulate, prepare, reduce_sums, require_finite, unsharded
from common.lm.adapters import train_adapters
from common.lm.chat import is_chat, pair_texts, whole_chat
from common.lm.classifier import classifier_ids, classifier_logits, raise_heads
from common.lm.load import load_pretrained
from common.lm.logprobs import compute_pairs
from common.lm.structure import can_pack, freeze, max_positions
from common.lm.tokens import in_lines, int32, split_rows, tell_unknown
from common.rows import longest_rows, read_data, set_flag, set_prefix
from common.run import Run, closes_run
from common.seeding import rng

# Last lines of a run and of its card: how to load and use the model.
LOADING = "from transformers import pipeline; model = pipeline('text-classification', {folder!r})"
LOADING_ADAPTER = """from transformers import pipeline
model = pipeline('text-classification', {folder!r}, model_kwargs={{'num_labels': 1}})"""
SCORING = "print(model({prompt!r}, OPTIONSfunction_to_apply='none'))"
SCORING_CHAT = """text = model.tokenizer.apply_chat_template({prompt!r}, tokenize=False)
print(model(text, OPTIONSfunction_to_apply='none'))"""
TASK = "benchmarks/tasks/randomwalks/reward.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """A reward model from preferences."""

    # ---- algorithm
    epochs: Positive = 1.0
    """Passes over the data (Ouyang et al. 2022: 1, because more of them overfit)."""
    total_steps: Count | None = None
    """Optimizer steps; default: as many as --epochs takes."""
    center_coef: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores around zero (arXiv 2312.09244, Eq. 2; 0.01 is usual)."""
    packing: bool = True
    """Pack several texts into one line, no longer than the longest text; texts do not see each other. Turned off for
    models whose layers would mix them. Changes memory and speed; the result only by rounding."""

    # ---- optimizer
    lr: Positive = 1e-5
    """Peak learning rate of AdamW (Ouyang et al. 2022: 9e-6; Touvron et al. 2023: 1e-5, for 70 B parameters 5e-6; LoRA
    adapters need about ten times as much)."""
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
    """Pairs per optimizer step, over all processes (Ouyang et al. 2022: all comparisons of 64 prompts)."""
    micro_batch_size: Count = 8
    """Pairs per process and forward pass. Changes memory and speed; the result only by rounding."""

    # ---- data
    dataset: str | None = None
    """Training pairs: a .jsonl/.json/.csv/.parquet file, a hub id:split, or file.py:function; from Python, a list."""
    max_length: Count = 1024
    """Maximum tokens per text, prompt included. Pairs with a longer text are dropped and counted."""


# ---- Maths -----------------------------------------------------------------------------------------------------------


def pairwise_loss(chosen, rejected, margin=None, center_coef=0.0):
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, all (B,), unreduced.

    Source: arXiv 2203.02155, Eq. 1; margin: arXiv 2307.09288, Eq. 2; centering: arXiv 2312.09244, Eq. 2.
    """
    margin = torch.zeros_like(chosen) if margin is None else margin
    if not chosen.shape == rejected.shape == margin.shape:
        raise ValueError(f"shapes differ: {[tuple(x.shape) for x in (chosen, rejected, margin)]}")
    return -F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected) ** 2


def score_terms(losses, chosen, rejected):
    """{name: (B,)} of what is logged."""
    return {
        "train/loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (1 + (chosen - rejected).sign()) / 2,  # half of a tie
    }


# ---- Head ------------------------------------------------------------------------------------------------------------


def load_classifier(args, path):
    """The sequence classifier with one label, its tokenizer, and whether its head is new. A new head is drawn from N(0,
    1 / (width + 1)), keyed by the seed, so that scores are of size 1 (Huang et al. 2024, arXiv 2403.17031)."""
    auto_class = "AutoModelForSequenceClassification"
    model, tokenizer, missing = load_pretrained(auto_class, args, path, "--model", num_labels=1)
    if model.config.num_labels != 1:
        raise InputError(f"--model has {model.config.num_labels} labels, but a reward model has one")
    if model.config.is_encoder_decoder:
        raise InputError("--model is an encoder-decoder: reward.py reads the scores of decoders and of encoders")
    if missing and model._hf_peft_config_loaded:
        how = "merge it into its model (merge_and_unload of peft), save that and give it"
        raise InputError(f"--model {path}: a LoRA adapter without {missing[0]}: {how}")
    lost = [name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    if lost:
        raise InputError(f"--model {path}: {lost[0]} is missing")
    for number, name in enumerate(missing):
        weight = model.get_parameter(name)
        scale = (weight.shape[-1] + 1) ** -0.5 if weight.ndim > 1 else 0.0
        drawn = rng(args.seed, "head", number).normal(0.0, scale, weight.shape)
        weight.data.copy_(torch.from_numpy(drawn))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokenizer.padding_side = "right"  # as transformers reads a batch for such a model
    return model, tokenizer, bool(missing)


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


def encode_texts(rows, tokenizer, max_length, flag):
    """(triples, pairs, report): texts (prompt, chosen, rejected) and tokens (chosen, rejected, margin) of the pairs
    whose texts differ and have at most max_length tokens each. A text ends with its end token, a chat with what its
    template writes."""
    triples = pair_texts(rows, tokenizer, flag)
    chosen_texts = [prompt + chosen for prompt, chosen, _ in triples]
    rejected_texts = [prompt + rejected for prompt, _, rejected in triples]
    margins = [row.get("margin", 0.0) for row in rows]
    for number, margin in enumerate(margins, 1):
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise InputError(f"{flag} row {number}: 'margin' must be a finite number, not {margin!r:.60}")
    ended = [True] * len(rows)
    chats = is_chat(rows, ["chosen"])
    chosen_ids = classifier_ids(tokenizer, chosen_texts, ended, chats)
    rejected_ids = classifier_ids(tokenizer, rejected_texts, ended, chats)
    tell_unknown(tokenizer, map(list.__add__, chosen_ids, rejected_ids), flag)
    kept = []
    pairs = []
    too_long = 0
    equal = 0
    for triple, chosen, rejected, margin in zip(triples, chosen_ids, rejected_ids, margins, strict=True):
        if max(len(chosen), len(rejected)) > max_length:
            too_long += 1
        elif chosen == rejected:
            equal += 1
        else:
            kept.append(triple)
            pairs.append((int32(chosen), int32(rejected), float(margin)))
    dropped = f"{too_long} dropped as longer than {max_length}, {equal} as equal"
    if not pairs:
        raise InputError(f"{flag}: no pair is left: of {len(rows)}, {dropped} (--max-length, the model's positions)")
    report = f"{len(rows)} pairs, {dropped}"
    without_prompt = [prompt for prompt, _, _ in triples].count("")
    if without_prompt:
        report += f"; {without_prompt} without a prompt"
    return kept, pairs, report


# ---- Forward pass ----------------------------------------------------------------------------------------------------


def pair_scores(model, packing, pairs):
    """Scores (2, B) of chosen and rejected. packing: a line may hold several texts."""
    texts = [chosen for chosen, _, _ in pairs] + [rejected for _, rejected, _ in pairs]
    lines, places = in_lines(packing, texts, [len(ids) for ids in texts])
    scores = classifier_logits(model, lines)[:, 0]
    return scores[places.to(scores.device)].view(2, -1)


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


def evaluate_scores(scores, pairs):
    """Metrics of the scores (2, N) of all pairs; the loss is without --center-coef. shorter_wins: the accuracy of a
    rule that knows only the lengths."""
    chosen, rejected = scores
    differences = chosen - rejected
    margins = scores.new_tensor([margin for _, _, margin in pairs])
    return {
        "loss": pairwise_loss(chosen, rejected, margins).mean().item(),
        "accuracy": (1 + differences.sign()).double().mean().item() / 2,
        "shorter_wins": sum(len(chosen) < len(rejected) for chosen, rejected, _ in pairs) / len(pairs),
        "margin": differences.mean().item(),
        "score_mean": scores.mean().item(),
        "score_std": scores.std().item(),
    }


def evaluate(run, step, model, score, data, args):
    """Metrics of the evaluation sets. Logs their texts with the scores."""
    model.eval()
    metrics = {}
    samples = []
    with unsharded(model):
        for name, pairs in data.eval_sets.items():
            lengths = [len(chosen) + len(rejected) for chosen, rejected, _ in pairs]
            scores = compute_pairs(run.accelerator, score, pairs, lengths, args.micro_batch_size)
            means = evaluate_scores(scores, pairs)
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            chosen_scores, rejected_scores = scores.tolist()
            for place, (prompt, chosen, rejected) in enumerate(data.eval_texts[name]):
                sample = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                sample |= {"chosen_score": chosen_scores[place], "rejected_score": rejected_scores[place]}
                if len(data.eval_sets) > 1:
                    sample = {"set": name} | sample
                samples.append(sample)
    run.samples(step, samples)
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


def load(args, path, device):
    """The classifier, with weights frozen or adapters added by flags, its tokenizer, and whether its head is new."""
    lm, tokenizer, new_head = load_classifier(args, path)
    heads = raise_heads(lm)
    train_adapters(lm.to(device), args, heads)
    freeze(lm, args.num_layers_unfrozen)
    if args.num_layers_unfrozen >= 0:
        for head in heads:
            getattr(lm, head).requires_grad_(True)
    return lm, tokenizer, new_head


def encode(data, tokenizer, max_length):
    """Tokenises all pairs: data gets pairs (ids of chosen, ids of rejected, margin) and texts (prompt, chosen,
    rejected), of each evaluation set too."""
    data.texts, data.pairs, data.report = encode_texts(data.rows, tokenizer, max_length, "--dataset")
    data.eval_texts = {}
    for name, rows in data.eval_sets.items():
        texts, pairs, report = encode_texts(rows, tokenizer, max_length, set_flag(name))
        data.eval_texts[name] = texts
        data.eval_sets[name] = pairs
        data.report += f"\n{set_flag(name)}: {report}"


def export_classifier(run, lm, tokenizer, name):
    """Writes the classifier to a directory of the run."""
    # If the padding token is the end token, leave it out of the export: transformers would read the score one token
    # too early. Without it, transformers refuses a batch.
    pad = tokenizer.pad_token_id
    lm.config.get_text_config().pad_token_id = None if pad == tokenizer.eos_token_id else pad
    run.export(lm, tokenizer, name)


def summary(run, new_head, data, max_length):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    lengths = sorted(max(len(chosen), len(rejected)) for chosen, rejected, _ in data.pairs)
    tokens = (
        f"tokens of the longer text: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}, at most {max_length}"
    )
    prompt, chosen, rejected = data.texts[0]
    return {
        "head": "new" if new_head else "that of --model",
        "data": f"{data.report}\n{tokens}",
        "first pair": f"{prompt[-400:]!r} | chosen: {chosen[:200]!r} | rejected: {rejected[:200]!r}",
        "steps": f"{run.total_steps} of {run.args.batch_size} pairs, {run.args.micro_batch_size} per forward pass",
    }


def example_of_scoring(lm, tokenizer, data):
    """A text or chat to score, and code that loads the exported model and scores it."""
    loading = LOADING_ADAPTER if lm._hf_peft_config_loaded else LOADING
    ids = list(data.pairs[0][0])
    whole = tokenizer.decode(ids)
    examples = [(SCORING, whole, whole)]
    if is_chat(data.rows, ["chosen"]):
        chat = whole_chat(data.rows[0], "chosen")
        with suppress(Exception):  # of a template that needs tools or an option of the row
            examples.insert(0, (SCORING_CHAT, chat, tokenizer.apply_chat_template(chat, tokenize=False)))
    for (code, example, text), special in itertools.product(examples, (True, False)):
        options = "" if special else "add_special_tokens=False, "
        if tokenizer(text, add_special_tokens=special)["input_ids"] == ids:
            return example, f"{loading}\n{code.replace('OPTIONS', options)}"
    return whole, f"{loading}\n{SCORING.replace('OPTIONS', '')}"


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["train/loss", "rewards/accuracies", "rewards/margins"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    path = build(args.model, "--model")
    data = read_data(args.dataset, args.eval_dataset)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer, new_head = load(args, path, accelerator.device)
    max_length = min(args.max_length, max_positions(lm))
    encode(data, tokenizer, max_length)
    run.check_inputs(data, model=lm)
    packing = hasattr(lm, "score") and can_pack(lm, args.packing, run.say)
    optimizer = make_optimizer(lm, args)
    model = prepare(accelerator, lm, optimizer)
    score = functools.partial(pair_scores, model, packing)
    export = functools.partial(export_classifier, run, lm, tokenizer)
    lengths = [len(chosen) + len(rejected) for chosen, rejected, _ in data.pairs]
    total_steps = args.total_steps or math.ceil(args.epochs * len(lengths) / args.batch_size)
    headline = "rewards/accuracies"
    if data.eval_sets and args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}accuracy"
    run.begin(model, optimizer, lm, total_steps, [headline, *IN_STATUS], evaluates=bool(data.eval_sets))
    run.tell(lm, summary(run, new_head, data, max_length))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, score, data, args))
        run.save(run.first_step, export)

    for step in run.iterations():
        model.train()
        # 1. a batch of pairs, in keyed random order
        rows = draw_rows(args.seed, len(lengths), (step - 1) * args.batch_size, args.batch_size)
        if args.check:
            rows = longest_rows(lengths, args.batch_size)
        # 2. loss = -1/B sum log sigmoid(r_chosen - r_rejected - margin), and its gradient
        sums = defaultdict(float)
        micro_batches = split_rows(accelerator, rows, lengths, packing, args.micro_batch_size)
        for own_rows in accumulate(accelerator, model, micro_batches):
            pairs = [data.pairs[row] for row in own_rows]
            chosen, rejected = score(pairs)
            margins = chosen.new_tensor([margin for _, _, margin in pairs])
            losses = pairwise_loss(chosen, rejected, margins, args.center_coef)
            # data-parallel training averages gradients over the processes: multiply by their number
            accelerator.backward(losses.sum() * accelerator.num_processes / args.batch_size)
            for name, values in score_terms(losses, chosen, rejected).items():
                sums[name] += values.detach().double().sum()
        sums = reduce_sums(accelerator, sums)
        metrics = {name: value / args.batch_size for name, value in sums.items()}
        # 3. a step of AdamW
        loss = metrics["train/loss"]
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
        require_finite(step, f"rows {rows}", loss=loss, gradient_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak_lr"], step - 1, total_steps, args)
        optimizer.step()
        optimizer.zero_grad()
        run.lap("update")
        # 4. log, evaluate, save
        metrics["train/epoch"] = step * args.batch_size / len(lengths)
        metrics |= {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}
        run.log(step, metrics, tokens=sum(lengths[row] for row in rows), pairs=args.batch_size)
        if run.evaluation_due(step):
            run.log_evaluation(step, evaluate(run, step, model, score, data, args))
        run.save(step, export)

    return run.finish(export, *example_of_scoring(lm, tokenizer, data))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
