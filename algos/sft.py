"""Supervised fine-tuning (SFT) of a language model: maximum likelihood of the completions.

Loss: mean over the labelled tokens of the global batch of -log p(token | tokens before it): `token_nll`.

How this differs from other implementations:
- The sum of token losses is divided by the number of labelled tokens of the whole batch, over micro-batches and
  processes, so neither changes the result. A mean of micro-batch means would weigh short rows more.
- The end token is appended, trained and scored, also where it doubles as padding: masks come from lengths.
- Rows stand side by side in lines (`fill_lines`) where the model keeps them apart. Logits are computed only where a
  token is trained, and not all at once (`at_labels`).
- Data order, schedule and evaluation samples are functions of (seed, step, row): a killed run continues exactly.

Rows: {"text"} (loss on every token), {"prompt", "completion"} as texts or chats (loss on the completion), {"messages"}
(on the assistant's turns) or {"dialogue": [prompt, output, prompt, output, ...]} (on the outputs).

    python algos/sft.py                                            # random walks, one CPU, under a minute
    accelerate launch algos/sft.py --model gpt2 --dataset my.jsonl --eval-dataset held_out.jsonl
    python algos/sft.py --model google-t5/t5-small --dataset translations.jsonl --lora-r 16 --lr 2e-4 # T5
    torchrun --nproc_per_node 8 algos/sft.py --model Qwen/Qwen3-0.6B --dataset org/chats:train --max-length 2048

Dimension key: B rows, T tokens of a row, K positions with logits, V vocabulary.
"""

import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while libraries load
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if find_spec("common") is None:
    sys.exit(
        "error: a script needs common/: put it into algos/, set PYTHONPATH to the repository, or give it all that "
        "it needs with benchmarks/single_file.py"
    )

import torch
from torch.nn import functional as F

from common.adapters import adapter_problems, to_export, train_adapters
from common.cli import InputError, cli, embedded_task, missing, stop_if
from common.data import (
    encode_prompts,
    fill_lines,
    have_bos,
    is_chat,
    load_rows,
    load_sets,
    row_segments,
    set_flag,
    set_prefix,
    tokenize,
)
from common.functions import build, load_function
from common.logging import Run, closes_run
from common.machine import describe_layout, launch, try_update
from common.models import as_decoder, end_tokens, freeze, load_model, max_positions, unsharded
from common.output import call_with_output, describe_output, in_chunks
from common.ranges import (
    Count,
    Decay,
    Layers,
    Name,
    Natural,
    NonNegative,
    Positive,
    Repository,
    Share,
    Text,
    out_of_range,
)
from common.report import lines_of_use, visible
from common.sampling import evaluate_samples
from common.seeding import seed_libraries, stream_rows
from common.structure import packing_problem

WITH_PROMPT = ("messages", "prompt", "completion", "dialogue")  # columns of rows that begin with a prompt
PROMPTS_SHOWN = 8  # sampled where neither --eval-prompts nor --metric asks for samples


@embedded_task("benchmarks/tasks/randomwalks/sft.yaml")
@dataclass
class Args:
    """Supervised fine-tuning of a language model. Defaults are for pretrained models.

    Without --model, --dataset and --config: the embedded task, with settings of its own. --config FILE reads flags from
    a YAML file; flags win over it.
    """

    # ---- algorithm
    epochs: Positive = 3.0
    """Passes over the data (Stanford Alpaca and transformers: 3)."""
    total_steps: Count | None = None
    """Optimizer steps; default: those of --epochs."""
    completion_only_loss: bool = True
    """Train on completions, on the outputs of a dialogue and on the assistant's turns of a chat alone; off: on every
    token."""
    packing: bool = True
    """Put texts side by side in lines about as long as the longest of them; none sees another. It is off where layers
    of the model mix what stands side by side. Changes memory and speed, never the result."""

    # ---- evaluation by sampling
    max_new_tokens: Count = 64
    """Longest response, in tokens."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response, which keeps the tokens through the one that completes the string. The metric sees
    the text before it, without trailing space."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature of evaluations; 0: greedy."""
    top_k: Natural = 0
    """Evaluations sample from the k likeliest tokens; 0: from all."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens with this probability; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    # ---- optimizer
    lr: Positive = 2e-5
    """Peak learning rate of AdamW (Stanford Alpaca and TRL: 2e-5; adapters of --lora-r take ten times as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: Count = 64
    """Rows per optimizer step, all processes together."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- data
    dataset: str | None = None
    """Training rows (text; prompt and completion; messages; dialogue): a .jsonl/.json/.csv/.parquet/.txt file, hub
    id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = None
    """Evaluation rows in the forms of --dataset, several sets joined by commas or as a mapping of names."""
    eval_prompts: str | None = None
    """Rows with a prompt, all of which are sampled at evaluations. Default: with --metric the first set of
    --eval-dataset; without it up to 8 of its rows, or else of --dataset, but none of text."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}."""
    max_length: Count = 1024
    """Tokens of a row, of an encoder-decoder those of prompt and output each. Longer rows are counted and cut at the
    end."""

    # ---- model
    model: str | None = None
    """Hub id, directory, or file.py:function that returns one; from Python also a model."""
    tokenizer: str | None = None
    """Hub id or directory of the tokenizer, from Python also a tokenizer; default: that of --model."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights, and of the moments of those that are trained. bfloat16 is for adapters alone, which are
    float32 beside it."""
    trust_remote_code: bool = False
    """Run model code that comes with a hub repository."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Kernel of the attention; default: sdpa where the model has it. On CPUs eager is a bit faster for short rows, but
    gives NaN in float64 for left padding in several families."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    num_layers_unfrozen: Layers = -1
    """Train only the top k blocks and the norm after them, not embeddings and output layer. -1: train everything."""
    load_in_4bit: bool = False
    """Load the frozen weights in 4 bits (NF4 of bitsandbytes; arXiv 2305.14314): for --lora-r, or a LoRA adapter as
    --model."""
    lora_r: Natural = 0
    """Rank of LoRA adapters, which are trained in place of the weights; 0: train all weights. A --model that is a LoRA
    adapter of a language model is trained further without this flag."""
    lora_alpha: Positive | None = None
    """LoRA adapters count alpha / r times; default: the rank, so once."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Last names of the modules that get LoRA adapters; all-linear: every linear layer of a language model but the
    last."""
    merge_adapters: bool = False
    """Export the model with its LoRA adapters added to the weights, not the adapters alone."""

    # ---- run
    run_dir: str | None = None
    """Directory of this run; default runs/<algo>-<hash of everything that decides the result>."""
    name: Name | None = None
    """In place of <algo> in the default of --run-dir, so that you know the run again."""
    resume: str = "auto"
    """auto: continue the run if it is there; never: repeat it in a new directory; or the path of a checkpoint."""
    seed: int = 1
    """Seed of every random draw."""
    threads: Count | None = None
    """CPU threads of this process; default: OMP_NUM_THREADS, else the CPUs (by affinity and the container's quota)
    divided by the processes on this machine."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (slower on GPUs; CPUs are deterministic without it)."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Autocast of the forward pass; default: bf16 where the launcher says so, and for float32 weights on a GPU that has
    it. Weights and optimizer keep --dtype."""
    save_every: Natural = 100
    """Checkpoint every so many optimizer steps; 0: only at the end and for the best evaluation."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept; the best by evaluation is kept besides."""
    eval_every: Natural = 100
    """Evaluate every so many optimizer steps, and at the start and the end; 0: never."""
    track: Literal["off", "wandb", "tensorboard"] = "off"
    """Mirror the metrics to a tracker (WANDB_MODE=offline works without an account)."""
    wandb_project: str = "plainrl"
    """Project name for --track."""
    push_to_hub: Repository | None = None
    """Upload hf_model/ to this hub repository (org/name) at the end, with the login of the hub's own tools."""
    check: bool = False
    """Validate flags, data, model and functions, print the summary, try an update of the largest size, and exit."""

    def __post_init__(self):
        problems = missing(self, "model", "dataset") + out_of_range(self) + adapter_problems(self)
        if self.num_layers_unfrozen == 0:
            problems.append("--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1")
        if self.name and self.run_dir:
            problems.append("--name is a part of the default --run-dir: leave out one of them")
        stop_if(problems)


# ---- Maths -----------------------------------------------------------------------------------------------------------


def token_nll(logits, labels):
    """-log softmax(logits)[label] per token, at least in float32, unreduced; zero where the label is -100.

    logits (..., V) and labels (...) are aligned: logits[t] predicts labels[t].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)


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


def encode_segments(rows, tokenizer, flag, encoder=False):
    """Yields (ids, spans) of each row: its tokens, and (begin, end, trained) of each of its segments (`row_segments`).

    The segments of a row are tokenised together; one begins at the longest common prefix with the tokens of what
    precedes it, so a merge across the boundary belongs to the later one. An empty prompt becomes the beginning token.
    The end token is appended once; in a chat the template ends the turns. encoder: the model has one, so prompt and
    output are tokenised apart, and the output always has an end token.
    """
    chat = is_chat(rows, ("messages", "prompt"))
    has_prompt = not chat and not rows[0].keys().isdisjoint(("prompt", "completion", "dialogue"))
    segments = row_segments(rows, tokenizer, flag)
    bos = tokenizer.bos_token_id
    if encoder:
        prompts, outputs = prompts_and_outputs(segments, chat or has_prompt, flag)
        heads = tokenize(tokenizer, prompts, not chat, end="template")
        tails = tokenize(tokenizer, outputs, not chat, end="template" if chat else "once", target=True)
        for head, tail in zip(heads, tails, strict=True):
            head = head or [tokenizer.eos_token_id if bos is None else bos]
            if tail[-1:] != [tokenizer.eos_token_id]:  # a chat template may leave out the end
                tail.append(tokenizer.eos_token_id)
            end = len(head) + len(tail)
            yield head + tail, [(0, len(head), False), (len(head), end, True)]
        return
    whole = ["".join(text for text, _ in row) for row in segments]
    special_tokens = not chat and not have_bos(tokenizer, whole)
    encoded = tokenize(tokenizer, whole, special_tokens, end="template" if chat else "once")
    prefixes = []
    for row in segments:
        prefixes += itertools.accumulate(text for text, _ in row[:-1])
    heads = iter(tokenize(tokenizer, prefixes, special_tokens, end="never"))
    for ids, row in zip(encoded, segments, strict=True):
        begins = [0]
        for _ in row[1:]:
            begins.append(len(os.path.commonprefix((ids, next(heads)))))
        if has_prompt and bos is not None and begins[1] == 0:
            if ids[0] != bos:
                ids = [bos, *ids]
                begins = [begin + 1 for begin in begins]
            begins = [0, *(max(1, begin) for begin in begins[1:])]
        ends = [*begins[1:], len(ids)]
        yield ids, [(begin, end, trained) for begin, end, (_, trained) in zip(begins, ends, row, strict=True)]


def prompts_and_outputs(segments, has_prompt, flag):
    """The texts for the encoder and those for the decoder, of rows of one prompt and one output."""
    prompts = []
    outputs = []
    for number, row in enumerate(segments, 1):
        texts = [text for text, _ in row]
        if len(texts) == 3 and not texts[2].strip():  # blanks that a chat template writes behind the answer
            del texts[2]
        if len(texts) != 2 or not has_prompt:
            raise InputError(f"{flag} row {number}: an encoder-decoder takes rows of one prompt and one output")
        prompts.append(texts[0])
        outputs.append(texts[1])
    return prompts, outputs


def encode_rows(rows, tokenizer, max_length, completion_only_loss, flag, encoder=False):
    """[(ids, labels)] of the rows that have a label left after the cut to max_length, which may remove the end token,
    and a report for the summary. The first token has no label: nothing predicts it."""
    examples = []
    truncated = 0
    for ids, spans in encode_segments(rows, tokenizer, flag, encoder):
        labels = [-100] * len(ids)
        for begin, end, trained in spans:
            if trained or not completion_only_loss:
                labels[begin:end] = ids[begin:end]
        room = max_length
        over = 0
        if encoder:  # which reads the prompt
            _, prompt_length, _ = spans[0]
            over = max(0, prompt_length - max_length)
            cut = slice(prompt_length - 1 - over, prompt_length - 1)  # the prompt keeps its end token
            del ids[cut]
            del labels[cut]
            room += prompt_length - over
        if len(ids) > room or over > 0:
            truncated += 1
        ids = ids[:room]
        labels = [-100, *labels[1:room]]
        if any(label != -100 for label in labels):
            examples.append((ids, labels))
    if not examples:
        raise InputError(f"{flag}: no row has a label left within --max-length {max_length}")
    counts = sorted(num_labels(labels) for _, labels in examples)
    tokens = sum(len(ids) for ids, _ in examples)
    report = (
        f"{len(rows)} rows, {truncated} cut at the end, {len(rows) - len(examples)} dropped without a label left; "
        f"labels on {sum(counts) / tokens:.1%} of {tokens:,} tokens, a row {counts[0]} to {counts[-1]}, "
        f"median {counts[len(counts) // 2]}"
    )
    return examples, report


def queries_of_rows(rows, tokenizer, max_new_tokens, limit, encoder=False):
    """Ids of the rows' prompts, of those that the model's positions (limit, or None) leave room for a response."""
    queries = []
    for ids, spans in encode_segments(rows, tokenizer, "--dataset", encoder):
        _, length, _ = spans[0]  # of the prompt
        positions = max(length, max_new_tokens) if encoder else length + max_new_tokens
        if length > 0 and (limit is None or positions <= limit):
            queries.append(ids[:length])
    return queries


def num_labels(labels):
    return len(labels) - labels.count(-100)


def first_label(labels):
    """Place of the first token with a label; 1 where there is none."""
    return next((place for place, label in enumerate(labels) if label != -100), 1)


def line_length(line):
    """Tokens of the examples in a line."""
    return sum(len(ids) for ids, *_ in line)


def split_batch(batch, packing, limit, accelerator, args):
    """The micro-batches of this process: lists of lines, which are lists of examples (ids, labels, place in the batch).
    Every process has equally many. packing: several examples stand side by side in a line of at most limit tokens
    (`fill_lines`)."""
    lengths = [len(ids) for ids, _ in batch]
    lines = []
    for group in fill_lines(lengths, packing, limit, accelerator.num_processes):
        lines.append([(*batch[place], place) for place in group])
    lines.sort(key=line_length)
    ids, _ = batch[0]
    without_labels = ids, [-100] * len(ids), 0
    while len(lines) % accelerator.num_processes:
        lines.append([without_labels])
    local = lines[accelerator.process_index :: accelerator.num_processes]
    size = max(1, args.micro_batch_size * max(lengths) // max(map(line_length, lines)))
    return [local[i : i + size] for i in range(0, len(local), size)]


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


# ---- Forward pass ----------------------------------------------------------------------------------------------------


def at_labels(function, model, labels, **inputs):
    """function(logits (N, V), labels (N,)) -> (..., N) of the N tokens with a label in labels (B, K), row by row; not
    all of the logits are in memory at once. labels belong to the last K positions of inputs."""
    places = labels != -100
    vocabulary = getattr(model, "module", model).config.get_text_config().vocab_size

    def compute(layer, states):
        return in_chunks(function, layer, vocabulary, states[places], labels[places])

    return call_with_output(model, compute, logits_to_keep=labels.shape[1], **inputs)


def line_terms(function, model, lines, pad, device):
    """at_labels of lines of examples, in their order.

    No mask is passed: padding is on the right, and without a cache transformers keeps apart what begins at position 0,
    by a block-diagonal mask for each kind of layer (its masking_utils.py). Rows of an encoder-decoder are laid out as
    in sampling: prompts left-padded, completions right-padded.
    """
    lm = getattr(model, "module", model)
    if not lm.config.is_encoder_decoder:
        ids, positions, labels = (x.to(device) for x in collate(lines, pad))
        first = int((labels != -100).any(0).int().argmax()) or ids.shape[1] - 1  # no label at all: one position
        inputs = {"input_ids": ids[:, :-1], "position_ids": positions[:, :-1]}
        return at_labels(function, model, labels[:, first:], **inputs)
    rows = [line[0] for line in lines]
    begins = [first_label(labels) for _, labels, *_ in rows]
    left = max(begins)
    right = max(len(ids) - begin for (ids, *_), begin in zip(rows, begins, strict=True))

    def stack(column, fill):
        padded = []
        for tokens, begin in zip(column, begins, strict=True):
            padded.append([fill] * (left - begin) + tokens + [fill] * (right + begin - len(tokens)))
        return torch.tensor(padded, device=device)

    ids = stack([ids for ids, *_ in rows], pad)
    labels = stack([labels for _, labels, *_ in rows], -100)
    mask = stack([[1] * len(ids) for ids, *_ in rows], 0)
    return at_labels(function, model, labels[:, left:], input_ids=ids[:, :-1], attention_mask=mask[:, :-1])


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def nll_and_hits(logits, labels):
    """(2, N): token_nll, and 1 where the likeliest token is the label."""
    nll = token_nll(logits, labels)
    return torch.stack([nll, (logits.argmax(-1) == labels).to(nll)])


@torch.no_grad()
def evaluate_loss(accelerator, model, examples, args, pad):
    """Loss, perplexity and accuracy per label of the whole set, the same for any batch size and number of processes."""
    share = math.ceil(len(examples) / accelerator.num_processes)
    local = examples[accelerator.process_index :: accelerator.num_processes]
    if len(local) < share:  # every process runs the same number of forwards
        ids, _ = examples[0]
        local.append((ids, [-100] * len(ids)))
    lines = [[example] for example in sorted(local, key=lambda example: len(example[0]))]  # never packed
    loss = 0.0
    hits = 0
    count = 0
    for i in range(0, share, args.micro_batch_size):
        micro_batch = lines[i : i + args.micro_batch_size]
        nll, right = line_terms(nll_and_hits, model, micro_batch, pad, accelerator.device)
        loss += nll.double().sum()
        hits += right.double().sum()
        count += len(nll)
    sums = torch.stack([loss, hits, loss.new_tensor(count)])
    loss, hits, count = accelerator.reduce(sums).tolist()
    return {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700.0)), "accuracy": hits / count}


def evaluate(run, step, model, tokenizer, data, args):
    """What the metric says of sampled responses, some of which are shown, and the losses of the evaluation sets."""
    accelerator = run.accelerator
    model.eval()
    metrics = {}

    with unsharded(model):
        if data.prompts:
            lm = accelerator.unwrap_model(model)
            means, samples = evaluate_samples(accelerator, lm, tokenizer, data.prompts, data.queries, data.metric, args)
            metrics = {f"eval/{name}": value for name, value in means.items()}
            run.samples(step, samples)
        for name, examples in data.eval_sets.items():
            means = evaluate_loss(accelerator, model, examples, args, tokenizer.pad_token_id)
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
    return metrics


def tokens_of(lines):
    """Tokens of the lines of a micro-batch."""
    return sum(map(line_length, lines))


def check(run, model, optimizer, tokenizer, data, packing, args):
    """What --check does: an evaluation, and an update on the largest micro-batch of the longest rows."""
    evaluate(run, 0, model, tokenizer, data, args)
    longest = sorted(data.examples, key=lambda example: -len(example[0]))[: args.batch_size]
    limit = max_positions(run.accelerator.unwrap_model(model))
    micro_batches = split_batch(longest, packing, limit, run.accelerator, args)
    lines = max(micro_batches, key=tokens_of)

    def loss():
        return line_terms(token_nll, model, lines, tokenizer.pad_token_id, run.accelerator.device).mean()

    run.say(try_update(run.accelerator, model, optimizer, loss))
    run.say("check passed")


def quality(scores, headline):
    """What the best model has most of: minus the headline loss, or without evaluation rows the metric's first value."""
    if headline in scores:
        return -scores[headline]
    return next(iter(scores.values()))


# ---- Setup -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a run reads: rows at first, tokens as soon as there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: examples}
    prompts: list  # rows to sample from
    metric: Callable | None
    examples: list | None = None  # (ids, labels)
    queries: list | None = None  # ids of the prompts
    report: str = ""


def read(args):
    """The rows and functions that the flags name."""
    metric = load_function(args.metric, "--metric")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    prompts = []
    if args.eval_prompts is not None:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    elif metric and eval_sets:
        prompts = next(iter(eval_sets.values()))
    if metric and not (prompts and "prompt" in prompts[0]):
        raise InputError("--metric needs rows with a prompt to sample from: name --eval-prompts")
    return Data(rows, eval_sets, prompts, metric)


def load(args, path, device):
    """The language model, with frozen weights or adapters as the flags say, and its tokenizer."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    if lm.config.is_encoder_decoder and not args.completion_only_loss:
        raise InputError("--no-completion-only-loss is not for encoder-decoders")
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def encode(data, lm, tokenizer, args):
    """Makes tokens of all rows. Returns the longest row in tokens that the flags and the model allow."""
    encoder = lm.config.is_encoder_decoder
    limit = max_positions(lm)
    max_length = min(args.max_length, limit or args.max_length)
    first_rows = next(iter(data.eval_sets.values()), data.rows)[:PROMPTS_SHOWN]

    def encode_set(rows, flag):
        return encode_rows(rows, tokenizer, max_length, args.completion_only_loss, flag, encoder)

    data.examples, data.report = encode_set(data.rows, "--dataset")
    for name, rows in data.eval_sets.items():
        data.eval_sets[name], _ = encode_set(rows, set_flag(name))
    if data.prompts:
        data.prompts, data.queries = encode_prompts(
            data.prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts", encoder=encoder
        )
    elif (args.eval_every or args.check) and not first_rows[0].keys().isdisjoint(WITH_PROMPT):
        data.queries = []
        for row in first_rows:
            for ids in queries_of_rows([row], tokenizer, args.max_new_tokens, limit, encoder):
                data.queries.append(ids)
                prompt = tokenizer.decode(ids, skip_special_tokens=True)
                data.prompts.append({"prompt": prompt})
        if not data.queries:
            data.report += f"\nno samples: no prompt leaves room for --max-new-tokens {args.max_new_tokens}"
    return max_length


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def packing_is_exact(run, lm, line, values_of, quantity, args):
    """Whether --packing changes nothing: by the structure of the model and, in float32, tried on a line of texts.

    values_of(lm, lines) -> (N,): what is computed of texts in lines; quantity: one of these in a word.
    """
    if not args.packing:
        return False
    problem = packing_problem(lm)
    if problem is None and args.dtype != "bfloat16":  # whose rounding is larger than what a text sees of another
        with torch.no_grad():
            alone = torch.cat([values_of(lm, [[text]]) for text in line])
            difference = (values_of(lm, [line]) - alone).abs().max() / (1 + alone.abs().max())
        error = run.accelerator.gather(difference[None]).max().item()
        if not error <= 1e-4:  # nan is not
            problem = f"it changes a {quantity} by {error:.1e}"
    if problem is not None:
        run.say(f"--packing is off: {problem}")
    return problem is None


def probe_line(examples):
    """The longest example, and a median one."""
    by_length = sorted(examples, key=lambda example: len(example[0]))
    return [by_length[-1], by_length[len(by_length) // 2]]


def summary(args, accelerator, lm, tokenizer, data, max_length, total_steps):
    """What is trained on what, in a few lines."""
    lines = []
    ends = end_tokens(lm)
    if all(set(labels).isdisjoint(ends) for _, labels in data.examples):
        named = " or ".join(tokenizer.convert_ids_to_tokens(ends))
        lines.append(f"warning: no row trains the end token {named}: responses will not end")
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    lengths = sorted(len(ids) for ids, _ in data.examples)
    epochs = total_steps * args.batch_size / len(data.examples)
    share = args.batch_size // accelerator.num_processes
    lines += [
        f"sft: {lm.num_parameters():,} parameters, {trained:,} trained; {describe_layout(args, accelerator)}; "
        f"{describe_output(lm)}",
        f"data: {data.report}; tokens of a row: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
        f"first row, [without loss]: {marked(tokenizer, *data.examples[0])[:800]}",
        f"lr {args.lr:g} {args.lr_schedule}, at most {max_length} tokens a row, {args.max_new_tokens} new tokens, "
        f"{epochs:.3g} epochs",
        f"{total_steps} steps x {args.batch_size} rows; each step {share} rows a process, at most "
        f"{args.micro_batch_size} a forward pass",
    ]
    if data.prompts:
        lines[-1] += f"; evaluations sample {len(data.prompts)} prompts"
    if args.stop:
        lines[-1] += f"; stops: {list(args.stop)}"
    return "\n".join(lines)


def marked(tokenizer, ids, labels):
    """The text of an example, [what has no loss] in brackets."""
    text = ""
    for hidden, pairs in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] == -100):
        piece = visible(tokenizer.decode([token for token, _ in pairs]))
        if hidden:
            piece = f"[{piece}]"
        text += piece
    return text


# ---- Main ------------------------------------------------------------------------------------------------------------


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    data = read(args)
    accelerator = launch(args)
    device = accelerator.device
    lm, tokenizer = load(args, path, device)
    max_length = encode(data, lm, tokenizer, args)

    run = Run("sft", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    line_nll = partial(line_terms, token_nll, pad=tokenizer.pad_token_id, device=device)
    packing = not lm.config.is_encoder_decoder and packing_is_exact(
        run, lm, probe_line(data.examples), line_nll, "loss", args
    )
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    total_steps = args.total_steps or math.ceil(args.epochs * len(data.examples) / args.batch_size)
    evaluates = bool(data.eval_sets or data.prompts)
    headline = "train/loss"
    if data.eval_sets and args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}loss"
    run.restore(model, optimizer, lm, total_steps, longer="--total-steps", headline=headline, evaluates=evaluates)
    run.say(summary(args, accelerator, lm, tokenizer, data, max_length, total_steps))
    if args.check:
        check(run, model, optimizer, tokenizer, data, packing, args)
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, tokenizer, data, args))

    for step in range(run.begun + 1, total_steps + 1):
        start = time.perf_counter()
        model.train()
        # 1. a batch of rows, in keyed random order
        rows = stream_rows(args.seed, "data", len(data.examples), (step - 1) * args.batch_size, args.batch_size)
        batch = [data.examples[row] for row in rows]
        count = sum(num_labels(labels) for _, labels in batch)  # of all processes
        micro_batches = split_batch(batch, packing, max_positions(lm), accelerator, args)
        # 2. loss = -1/count sum log p(token | tokens before it), and its gradient
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for lines in micro_batches:
            last = lines is micro_batches[-1]
            with nullcontext() if last else accelerator.no_sync(model):
                nll = line_nll(model, lines).sum() / count
                # data-parallel training averages gradients over the processes, hence the factor
                accelerator.backward(nll * accelerator.num_processes)
            loss += nll.detach()
        # 3. a step of AdamW
        lr = learning_rate(args, step - 1, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        loss = accelerator.reduce(loss)
        if not (loss.isfinite() and grad_norm.isfinite()):
            numbers = f"loss {loss}, gradient norm {grad_norm}, rows {rows}"
            raise FloatingPointError(f"step {step}: {numbers}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - start
        metrics = {
            "train/loss": loss.item(),
            "train/epoch": step * args.batch_size / len(data.examples),
            "optim/lr": lr,
            "optim/grad_norm": grad_norm.item(),
        }
        tokens = sum(len(ids) for ids, _ in batch)
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": tokens / seconds}
        if run.evaluation_due(step):
            scores = evaluate(run, step, model, tokenizer, data, args)
            metrics |= scores
            if scores and run.is_best(step, quality(scores, headline)):
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        run.status(step, f"loss {metrics['train/loss']:.4f} | {seconds:.2f} s")
        run.save_if_due(step)

    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after SFT on {run.identity['flags']['dataset']}"
    ids, labels = data.examples[0]
    metrics = run.finish(title, *lines_of_use(lm, tokenizer, ids[: first_label(labels)]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
