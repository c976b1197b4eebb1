"""Supervised fine-tuning (SFT) of a language model: maximum likelihood of the completions.

Loss: mean over the labelled tokens of the global batch of -log p(token | tokens before it): `token_loss`.

How this differs from other implementations:
- The sum of token losses is divided by the number of labelled tokens of the whole batch, over micro-batches and
  processes, so neither changes the result. A mean of micro-batch means would weigh short rows more.
- The end token is appended, trained and scored, even where it doubles as padding: masks come from lengths.
- Logits are computed only where a token is trained, a chunk at a time (`line_logprobs`).

Rows: {"text"} (loss on every token), {"prompt", "completion"} as texts or chats (loss on the completion), {"messages"}
(on the assistant's turns) or {"dialogue": [prompt, output, prompt, output, ...]} (on the outputs).

    python algos/sft.py                                            # random walks, on one CPU
    accelerate launch algos/sft.py --model gpt2 --dataset my.jsonl --eval-dataset held_out.jsonl
    python algos/sft.py --model google-t5/t5-small --dataset translations.jsonl --lora-r 16 --lr 2e-4 # T5
    torchrun --nproc_per_node 8 algos/sft.py --model Qwen/Qwen3-0.6B --dataset org/chats:train --max-length 2048

Dimension key: N tokens with a label, V vocabulary.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, Share, StopString, cli
from common.errors import InputError, stop_if
from common.functions import build
from common.launch import accumulate, prepare, require_finite, unsharded
from common.lm.evaluation import evaluate_samples
from common.lm.load import lines_of_use, load_lm
from common.lm.logprobs import line_logprobs
from common.lm.logprobs import token_nll as token_nll  # for those who import it from here
from common.lm.structure import can_pack, max_positions
from common.lm.tokens import (
    encode_prompts,
    encode_segments,
    first_label,
    int32,
    marked,
    num_labels,
    split_lines,
    tell_untrained_end,
)
from common.rows import longest_rows, read_data, set_flag, set_prefix
from common.run import Run, closes_run
from common.seeding import rng

TASK = "benchmarks/tasks/randomwalks/sft.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """Supervised fine-tuning of a language model."""

    # ---- algorithm
    epochs: Positive = 3.0
    """Passes over the data (Stanford Alpaca and transformers: 3)."""
    total_steps: Count | None = None
    """Optimizer steps; default: as many as --epochs takes."""
    completion_only_loss: bool = True
    """Train only on completions, dialogue outputs and a chat's assistant turns. When off, train on every token."""
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
    lr: Positive = 2e-5
    """Peak learning rate of AdamW (Stanford Alpaca and TRL: 2e-5; LoRA adapters need about ten times as much)."""
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
    """Rows per optimizer step, over all processes."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass; of shorter ones more, up to the tokens of so many of the longest. Changes
    memory and speed; the result only by rounding."""

    # ---- data
    dataset: str | None = None
    """Training rows (text; prompt and completion; messages; dialogue): a .jsonl/.json/.csv/.parquet/.txt file, a hub
    id:split, or file.py:function; from Python, a list."""
    eval_prompts: str | None = None
    """Rows with a prompt; all are sampled at every evaluation. Default: with --metric the first set of --eval-dataset,
    otherwise none."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list of one number per sample}."""
    lower_is_better: bool = False
    """The first metric of --metric, which chooses the best model, is better when it is lower, as an error rate."""
    max_length: Count = 1024
    """Maximum tokens per row; in an encoder-decoder, per prompt and per output. Longer rows are counted and cut at the
    end."""

    def problems(self):
        if self.num_layers_unfrozen == 0:
            yield "--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1"


# ---- Maths -----------------------------------------------------------------------------------------------------------


def token_loss(logprobs):
    """Loss of each token with a label, (N,), unreduced: minus its log-probability given the tokens before it, (N,)."""
    return -logprobs


def is_likeliest(logits, labels):
    """Whether the likeliest token is the label, (N,), as a number: logits (N, V), labels (N,)."""
    return (logits.argmax(-1) == labels).to(logits.dtype)


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


def encode_rows(rows, tokenizer, max_length, completion_only_loss, flag, encoder=False):
    """(examples, report): (ids, labels) of the rows that still have a label after being cut to max_length. The cut may
    remove the end token. The first token has no label, because nothing predicts it."""
    examples = []
    truncated = 0
    for ids, spans in encode_segments(rows, tokenizer, flag, encoder):
        labels = [-100] * len(ids)
        for begin, end, trained in spans:
            if trained or not completion_only_loss:
                labels[begin:end] = ids[begin:end]
        room = max_length
        over = 0
        if encoder:  # an encoder-decoder: prompt and output are cut separately; the prompt keeps its end token
            _, prompt_length, _ = spans[0]
            over = max(0, prompt_length - max_length)
            cut = slice(prompt_length - 1 - over, prompt_length - 1)
            del ids[cut]
            del labels[cut]
            room += prompt_length - over
        if len(ids) > room or over > 0:
            truncated += 1
        ids = ids[:room]
        labels = [-100, *labels[1:room]]
        if any(label != -100 for label in labels):
            examples.append((int32(ids), int32(labels)))
    if not examples:
        raise InputError(f"{flag}: no row has a label left within --max-length {max_length}")
    counts = sorted(num_labels(labels) for _, labels in examples)
    tokens = sum(len(ids) for ids, _ in examples)
    report = (
        f"{len(rows)} rows, {truncated} cut at the end, {len(rows) - len(examples)} dropped with no label left "
        f"(--max-length {max_length}); "
        f"labels on {sum(counts) / tokens:.1%} of {tokens:,} tokens, per row {counts[0]} to {counts[-1]}, "
        f"median {counts[len(counts) // 2]}"
    )
    return examples, report


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


@torch.no_grad()
def evaluate_loss(accelerator, model, examples, batch_size):
    """Loss, perplexity and accuracy per label of the whole set, for any batch size and number of processes the same."""
    nll = 0.0
    right = 0.0
    count = 0
    for lines in split_lines(accelerator, examples, batch_size):  # never packed
        logprobs, _, is_right = line_logprobs(model, lines, also=is_likeliest)
        nll -= logprobs.double().sum()
        right += is_right.double().sum()
        count += len(logprobs)
    sums = torch.stack([nll, right, nll.new_tensor(count)])
    nll, right, count = accelerator.reduce(sums).tolist()
    return {"loss": nll / count, "perplexity": math.exp(min(nll / count, 700.0)), "accuracy": right / count}


def evaluate(run, step, model, tokenizer, data, args):
    """Metrics: --metric on sampled responses, and the losses of the evaluation sets. Logs the samples."""
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
            run.samples(step, samples)
        if metrics and not data.eval_sets:  # the first column of --metric, which chooses the best model
            run.headline = next(iter(metrics))
            run.lower_is_better = args.lower_is_better
        for name, examples in data.eval_sets.items():
            means = evaluate_loss(accelerator, model, examples, args.micro_batch_size)
            own = {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            taken = [key.rpartition("/")[2] for key in metrics.keys() & own]
            stop_if([f"--metric returned {key!r}, which evaluations have: choose another name" for key in taken])
            metrics |= own
    return metrics


# ---- Setup -----------------------------------------------------------------------------------------------------------


def encode(data, lm, tokenizer, args):
    """Tokenises all rows: data gets examples (ids, labels), of each evaluation set too, and queries (ids of prompts).
    Returns the maximum row length in tokens that --max-length and the model allow."""
    encoder = lm.config.is_encoder_decoder
    if encoder and not args.completion_only_loss:
        raise InputError("--no-completion-only-loss does not work with encoder-decoders")
    limit = max_positions(lm)
    max_length = min(args.max_length, limit)

    def encode_set(rows, flag):
        return encode_rows(rows, tokenizer, max_length, args.completion_only_loss, flag, encoder)

    data.examples, data.report = encode_set(data.rows, "--dataset")
    for name, rows in data.eval_sets.items():
        data.eval_sets[name], report = encode_set(rows, set_flag(name))
        data.report += f"\n{set_flag(name)}: {report}"
    if data.prompts:
        data.prompts, data.queries = encode_prompts(
            data.prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts", encoder=encoder
        )
    return max_length


def summary(run, tokenizer, data, max_length):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    tell_untrained_end(tokenizer, [labels for _, labels in data.examples])
    lengths = sorted(len(ids) for ids, _ in data.examples)
    tokens = f"tokens per row: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}, at most {max_length}"
    ids, labels = data.examples[0]
    facts = {
        "data": f"{data.report}\n{tokens}",
        "first row": f"{marked(tokenizer, ids, [label != -100 for label in labels])[:800]}   [without loss]",
        "steps": f"{run.total_steps} of {run.args.batch_size} rows, {run.args.micro_batch_size} per forward pass",
    }
    if data.prompts:
        facts["samples"] = f"of {len(data.prompts)} prompts at each evaluation"
    return facts


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["train/loss", "optim/grad_norm"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    path = build(args.model, "--model")
    data = read_data(args.dataset, args.eval_dataset, eval_prompts=args.eval_prompts, metric=args.metric)
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    lm, tokenizer = load_lm(args, path, accelerator.device)
    max_length = encode(data, lm, tokenizer, args)
    run.check_inputs(data, model=lm)
    packing = can_pack(lm, args.packing, run.say)
    optimizer = make_optimizer(lm, args)
    model = prepare(accelerator, lm, optimizer)
    export = partial(run.export, lm, tokenizer)
    lengths = [len(ids) for ids, _ in data.examples]
    total_steps = args.total_steps or math.ceil(args.epochs * len(lengths) / args.batch_size)
    headline = "train/loss"
    if data.eval_sets and args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}loss"
    evaluates = bool(data.eval_sets or data.prompts)
    run.begin(model, optimizer, lm, total_steps, [headline, *IN_STATUS], evaluates=evaluates)
    run.tell(lm, summary(run, tokenizer, data, max_length))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, tokenizer, data, args))
        run.save(run.first_step, export)

    for step in run.iterations():
        model.train()
        # 1. a batch of rows, in keyed random order
        rows = draw_rows(args.seed, len(lengths), (step - 1) * args.batch_size, args.batch_size)
        if args.check:
            rows = longest_rows(lengths, args.batch_size)
        batch = [data.examples[row] for row in rows]
        count = sum(num_labels(labels) for _, labels in batch)  # of all processes
        # 2. loss = -1/count sum log p(token | tokens before it), and its gradient
        loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        micro_batches = split_lines(accelerator, batch, args.micro_batch_size, packing)
        for lines in accumulate(accelerator, model, micro_batches):
            logprobs, _, _ = line_logprobs(model, lines)  # (N,)
            share = token_loss(logprobs).sum() / count
            # data-parallel training averages gradients over the processes: multiply by their number
            accelerator.backward(share * accelerator.num_processes)
            loss += share.detach()
        loss = accelerator.reduce(loss).item()
        # 3. a step of AdamW
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
        require_finite(step, f"rows {rows}", loss=loss, gradient_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak_lr"], step - 1, total_steps, args)
        optimizer.step()
        optimizer.zero_grad()
        run.lap("update")
        # 4. log, evaluate, save
        metrics = {"train/loss": loss, "train/epoch": step * args.batch_size / len(lengths)}
        metrics |= {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}
        run.log(step, metrics, tokens=sum(lengths[row] for row in rows))
        if run.evaluation_due(step):
            run.log_evaluation(step, evaluate(run, step, model, tokenizer, data, args))
        run.save(step, export)

    ids, labels = data.examples[0]
    return run.finish(export, *lines_of_use(lm, tokenizer, ids[: first_label(labels)]))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
