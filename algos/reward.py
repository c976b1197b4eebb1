"""A reward model from preferences: a sequence classifier whose score is higher for the chosen of two texts.

Loss: -log sigmoid(r_chosen - r_rejected - margin) per pair (Ouyang et al. 2022, arXiv 2203.02155, Eq. 1; the margin is
that of Touvron et al. 2023, arXiv 2307.09288, Eq. 2): `pairwise_loss`.

How this differs from other implementations:
- The score is read at the last token of the text, which is the end token, or in a chat that of the turn, whatever the
  padding: also where the end token doubles as padding, or stands within the prompt. `ppo.py --reward` reads the same
  tokens of the same text.
- The head is float32 and outside of autocast: bfloat16 would give many texts the same score.
- Too long pairs are dropped and counted: a text that was cut has no end to read the score from.
- A tie is no success: a constant model has accuracy 0. Beside the accuracy stands that of the rule "the shorter wins".
- Texts of different lengths stand side by side in a line (`fill_lines`): equal to a forward pass of each, to rounding.

Rows: {"prompt", "chosen", "rejected"} as texts or chats, without a prompt where the two hold it, perhaps "margin".

    python algos/reward.py                                         # random walks, one CPU, six minutes
    python algos/reward.py --model gpt2 --dataset pairs.jsonl --eval-dataset test.jsonl
    accelerate launch algos/reward.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train
    torchrun --nproc_per_node 8 algos/reward.py --model Qwen/Qwen3-0.6B --max-length 2048 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs (N in a set), T tokens of a row.
"""

import functools
import itertools
import math
import signal
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
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
from common.classifiers import classifier_ids, classifier_logits, raise_heads, scores_tokens
from common.cli import InputError, cli, embedded_task, missing, stop_if
from common.data import (
    encode_prompts,
    fill_lines,
    is_chat,
    load_rows,
    load_sets,
    messages_in,
    pair_texts,
    set_flag,
    set_prefix,
)
from common.forward import packing_problem
from common.functions import build
from common.logging import Run, closes_run
from common.machine import describe_layout, launch, longest_micro_batch, try_update
from common.models import end_tokens, freeze, load_model, load_pretrained, max_positions, set_attention, unsharded
from common.ranges import Count, Decay, Layers, Name, Natural, NonNegative, Positive, Repository, out_of_range
from common.sampling import decode, generate_all, kept_ids
from common.screen import screen, visible
from common.seeding import rng, seed_libraries, stream_rows

# Last lines of a run, and of its card: how the model is loaded and asked.
LOADING = "from transformers import pipeline; model = pipeline('text-classification', {folder!r})"
LOADING_ADAPTER = """from transformers import pipeline
model = pipeline('text-classification', {folder!r}, model_kwargs={{'num_labels': 1}})"""
SCORING = "print(model({prompt!r}, function_to_apply='none'))"
SCORING_CHAT = """text = model.tokenizer.apply_chat_template({prompt!r}, tokenize=False)
print(model(text.rstrip(), add_special_tokens=False, function_to_apply='none'))"""


@embedded_task("benchmarks/tasks/randomwalks/reward.yaml")
@dataclass
class Args:
    """A reward model from preferences. Defaults are for pretrained models.

    Without --model, --dataset and --config: the embedded task, with settings of its own. --config FILE reads flags from
    a YAML file; flags win over it.
    """

    # ---- algorithm
    epochs: Positive = 1.0
    """Passes over the data (Ouyang et al. 2022: 1, since more overfit)."""
    total_steps: Count | None = None
    """Optimizer steps; default: those of --epochs."""
    center_coef: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores around zero (arXiv 2312.09244, Eq. 2; 0.01 is usual)."""
    packing: bool = True
    """Put texts side by side in lines about as long as the longest of them; none sees another. It is off where layers
    of the model mix what stands side by side. Changes memory and speed, never the result."""

    # ---- normalisation by sampling
    norm_prompts: str | None = None
    """Rows with a prompt: in the end, scores are shifted and scaled to mean 0 and standard deviation 1 over samples of
    --norm-policy for them (as in arXiv 1909.08593), as reward_norm in the configuration of the exported model."""
    norm_policy: str | None = None
    """Causal language model that samples for --norm-prompts; default: --model."""
    max_new_tokens: Count = 64
    """Longest response, in tokens."""

    # ---- optimizer
    lr: Positive = 1e-5
    """Peak learning rate of AdamW (Ouyang et al. 2022: 9e-6; Touvron et al. 2023: 1e-5, for 70 B parameters 5e-6;
    adapters of --lora-r take ten times as much)."""
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
    """Rows per optimizer step, all processes together (Ouyang et al. 2022: 64)."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- data
    dataset: str | None = None
    """Pairs for training: a .jsonl/.json/.csv/.parquet file, hub id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = None
    """Pairs for evaluation, several sets joined by commas or as a mapping of names."""
    max_length: Count = 1024
    """Tokens of a text, prompt included. Pairs with a longer one are dropped and counted."""

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
    """Train only the top k blocks and the norm after them, not embeddings and output layer. -1: train everything; 0:
    only the head."""
    load_in_4bit: bool = False
    """Load the frozen weights in 4 bits (NF4 of bitsandbytes; arXiv 2305.14314): for --lora-r, or a LoRA adapter as
    --model."""
    lora_r: Natural = 0
    """Rank of LoRA adapters, which are trained in place of the weights; 0: train all weights. A --model that is a LoRA
    adapter of a sequence classifier is trained further without this flag."""
    lora_alpha: Positive | None = None
    """LoRA adapters count alpha / r times; default: the rank, so once."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Last names of the modules that get LoRA adapters; all-linear: every linear layer but the
    head."""
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
        if self.norm_policy is not None and self.norm_prompts is None:
            problems.append("--norm-policy is given without --norm-prompts")
        if self.norm_prompts is not None and self.norm_policy is None and not isinstance(self.model, str):
            problems.append("--norm-prompts needs --norm-policy where --model is an object")
        if self.name and self.run_dir:
            problems.append("--name is a part of the default --run-dir: leave out one of them")
        stop_if(problems)


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
        "rewards/accuracies": chosen > rejected,
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


# ---- Head ------------------------------------------------------------------------------------------------------------


def load_classifier(args, path):
    """The sequence classifier with one label, its tokenizer, and whether its head is new. A new one is drawn from
    N(0, 1 / (width + 1)), so that scores are of size 1 (Huang et al. 2024, arXiv 2403.17031), keyed by the seed."""
    auto_class = "AutoModelForSequenceClassification"
    model, tokenizer, missing = load_pretrained(auto_class, args, path, "--model", num_labels=1)
    if model.config.num_labels != 1:
        raise InputError(f"--model has {model.config.num_labels} labels, a reward model has one")
    if model.config.is_encoder_decoder:
        raise InputError("--model is an encoder-decoder: reward.py reads the scores of decoders and of encoders")
    if missing and model._hf_peft_config_loaded:
        raise InputError(
            f"--model {path}: a LoRA adapter without {missing[0]}: export it with --merge-adapters, and name that"
        )
    lost = [name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    stop_if([f"--model {path}: {name} is missing" for name in lost[:1]])
    for number, name in enumerate(missing):
        weight = model.get_parameter(name)
        scale = (weight.shape[-1] + 1) ** -0.5 if weight.ndim > 1 else 0.0
        drawn = rng(args.seed, "head", number).normal(0.0, scale, weight.shape)
        weight.data.copy_(torch.from_numpy(drawn))
    raise_heads(model)
    set_attention(model, args)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokenizer.padding_side = "right"  # as transformers reads a batch for such a model
    model.config.reward_norm = {"gain": 1.0, "bias": 0.0}  # ppo.py takes gain * score + bias
    return model, tokenizer, bool(missing)


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


def encode_texts(rows, tokenizer, max_length, flag):
    """(triples, pairs, report): texts (prompt, chosen, rejected) and tokens (chosen, rejected, margin) of the pairs of
    at most max_length tokens a side whose sides differ. A text ends where its end token does: what a chat template
    writes after it is left out, as it is in a sampled response."""
    triples = pair_texts(rows, tokenizer, flag)
    chosen_texts = [prompt + chosen for prompt, chosen, _ in triples]
    rejected_texts = [prompt + rejected for prompt, _, rejected in triples]
    if is_chat(rows, ["chosen"]):
        chosen_texts = [text.rstrip() for text in chosen_texts]
        rejected_texts = [text.rstrip() for text in rejected_texts]
    margins = [row.get("margin", 0.0) for row in rows]
    for number, margin in enumerate(margins, 1):
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise InputError(f"{flag} row {number}: 'margin' must be a finite number, it is {margin!r:.60}")
    ended = [True] * len(rows)
    chosen_ids = classifier_ids(tokenizer, chosen_texts, ended)
    rejected_ids = classifier_ids(tokenizer, rejected_texts, ended)
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
            pairs.append((chosen, rejected, float(margin)))
    dropped = f"{too_long} dropped as longer than {max_length}, {equal} as equal"
    if not pairs:
        raise InputError(f"{flag}: no pair is left: of {len(rows)}, {dropped} (--max-length, the model's positions)")
    report = f"{len(rows)} pairs, {dropped}"
    without_prompt = [prompt for prompt, _, _ in triples].count("")
    if without_prompt:
        report += f"; {without_prompt} without a prompt"
    return kept, pairs, report


def pair_scores(model, packing, pairs):
    """Scores (2, B) of chosen and rejected. packing: texts stand side by side (`fill_lines`)."""
    limit = max_positions(getattr(model, "module", model))
    texts = texts_of(pairs)
    groups = fill_lines([len(ids) for ids in texts], packing, limit)
    scores = text_scores(model, [[texts[i] for i in group] for group in groups])
    order = torch.tensor([*itertools.chain(*groups)], device=scores.device)
    return scores[order.argsort()].view(2, -1)


def texts_of(pairs):
    """The tokens of all chosen, then those of all rejected."""
    return [chosen for chosen, _, _ in pairs] + [rejected for _, rejected, _ in pairs]


def text_scores(model, lines):
    """Scores (N,) of the texts in lines, in their order."""
    return classifier_logits(model, lines)[:, 0]


def split_rows(accelerator, rows, pairs, packing, batch_size):
    """The micro-batches of this process: its share of a batch of row numbers, in lists of at most batch_size rows."""
    local = rows[accelerator.process_index :: accelerator.num_processes]
    if not packing:  # in rows of similar length there is little padding
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


# ---- Scores of samples -----------------------------------------------------------------------------------------------


@torch.no_grad()
def policy_samples(args, policy, tokenizer, prompts, accelerator):
    """(texts, ended): a response of the language model to each row with a prompt, keyed by the seed and the row."""
    limit = max_positions(policy)
    prompts, queries = encode_prompts(prompts, tokenizer, args.max_new_tokens, limit, "--norm-prompts")
    sizes = {"max_new_tokens": args.max_new_tokens, "decode_batch_size": args.micro_batch_size}
    _, _, ids, mask = generate_all(accelerator, policy, tokenizer, queries, ("norm", 0), seed=args.seed, **sizes)
    responses = kept_ids(ids, mask)
    outputs = decode(tokenizer, queries, responses, ())
    samples = [row["prompt"] + output for row, output in zip(prompts, outputs, strict=True)]
    ended = [not set(response).isdisjoint(end_tokens(policy)) for response in responses]
    return samples, ended


def norm_rows(args, path, prompts, tokenizer, max_length, accelerator):
    """Rows of tokens for the classifier, samples of the language model at path, over which scores are normalised."""
    policy, policy_tokenizer = load_model(args, path, "--norm-policy")
    if policy.config.is_encoder_decoder:
        raise InputError("--norm-policy is an encoder-decoder: name a decoder")
    texts, ended = policy_samples(args, policy.to(accelerator.device), policy_tokenizer, prompts, accelerator)
    rows = [ids for ids in classifier_ids(tokenizer, texts, ended) if len(ids) <= max_length]
    if len(set(map(tuple, rows))) < 2:
        raise InputError(f"--norm-prompts: {len(prompts)} prompts gave fewer than two different samples: take more")
    return rows


@torch.no_grad()
def reward_norm(accelerator, model, rows, batch_size):
    """gain and bias that give the scores of the rows of tokens mean 0 and standard deviation 1."""
    by_length = torch.tensor([len(ids) for ids in rows]).argsort(stable=True)
    scores = []
    with accelerator.autocast():
        for places in by_length.split(batch_size):
            logits = classifier_logits(model, [[rows[place]] for place in places])
            scores.append(logits[:, 0].double())
    std, mean = torch.std_mean(torch.cat(scores))
    scale = max(std.item(), 1e-8)
    return {"gain": 1 / scale, "bias": -mean.item() / scale}


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
    screen.show("scoring pairs", share)
    for places in longest_first.split(batch_size):
        with torch.no_grad(), accelerator.autocast():
            scores[places.to(device)] = score([local[place] for place in places]).T.double()
        screen.advance(len(places))
    return accelerator.gather(scores)[: len(pairs)].T


def evaluate_scores(scores, pairs):
    """Metrics of the scores (2, N) of all pairs; the loss is that without --center-coef. shorter_wins: the accuracy of
    a rule that knows the lengths alone."""
    chosen, rejected = scores
    differences = chosen - rejected
    margins = scores.new_tensor([margin for _, _, margin in pairs])
    return {
        "loss": pairwise_loss(chosen, rejected, margins).mean().item(),
        "accuracy": (differences > 0).double().mean().item(),
        "shorter_wins": sum(len(chosen) < len(rejected) for chosen, rejected, _ in pairs) / len(pairs),
        "margin": differences.mean().item(),
        "score_mean": scores.mean().item(),
        "score_std": scores.std().item(),
    }


def evaluate(run, step, model, score, data, args):
    """Metrics of the evaluation sets, whose texts are shown with their scores."""
    model.eval()
    metrics = {}
    samples = []
    with unsharded(model):
        for name, pairs in data.eval_sets.items():
            scores = score_pairs(run.accelerator, score, pairs, args.micro_batch_size)
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


def check(run, model, optimizer, score, data, args):
    """What --check does: an evaluation, and an update on a micro-batch of the longest pairs."""
    evaluate(run, 0, model, score, data, args)
    longest = longest_micro_batch(data.pairs, pair_length, run.accelerator, args)

    def loss():
        return pairwise_loss(*score(longest)).mean()

    run.say(try_update(run.accelerator, model, optimizer, loss))
    run.say("check passed")


# ---- Setup -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a run reads: rows at first, tokens as soon as there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: pairs}
    norm_prompts: list | None  # rows to sample from
    texts: list | None = None  # (prompt, chosen, rejected)
    eval_texts: dict | None = None  # {name: texts}
    pairs: list | None = None  # (ids of chosen, ids of rejected, margin)
    norm_rows: list | None = None  # ids of samples, over which scores are normalised
    report: str = ""


def read(args):
    """The rows that the flags name."""
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    norm_prompts = None
    if args.norm_prompts is not None:
        norm_prompts = load_rows(build(args.norm_prompts, "--norm-prompts"), "--norm-prompts")
    return Data(rows, eval_sets, norm_prompts)


def load(args, path, device):
    """The classifier, with frozen weights or adapters as the flags say, its tokenizer, and whether its head is new."""
    lm, tokenizer, new_head = load_classifier(args, path)
    heads = raise_heads(lm)
    train_adapters(lm.to(device), args, heads)
    freeze(lm, args.num_layers_unfrozen)
    if args.num_layers_unfrozen >= 0:
        for head in heads:
            getattr(lm, head).requires_grad_(True)
    return lm, tokenizer, new_head


def encode(data, tokenizer, max_length):
    """Makes tokens of all pairs."""
    data.texts, data.pairs, data.report = encode_texts(data.rows, tokenizer, max_length, "--dataset")
    data.eval_texts = {}
    for name, rows in data.eval_sets.items():
        texts, pairs, report = encode_texts(rows, tokenizer, max_length, set_flag(name))
        data.eval_texts[name] = texts
        data.eval_sets[name] = pairs
        data.report += f"\n{set_flag(name)}: {report}"


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


def probe_pairs(data):
    """The pair with the longest text, and a median one, of all sets."""
    by_length = sorted([*data.pairs, *itertools.chain(*data.eval_sets.values())], key=longer_side)
    return [by_length[-1], by_length[len(by_length) // 2]]


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def export_classifier(run, name, lm, model, tokenizer, data, args):
    """Writes the classifier to a directory of the run, with the map of its scores that --norm-prompts asks for."""
    if data.norm_rows:
        with unsharded(model):
            lm.config.reward_norm = reward_norm(run.accelerator, model, data.norm_rows, args.micro_batch_size)
    # without a padding token, transformers refuses a batch instead of reading the score before the end token
    pad = tokenizer.pad_token_id
    lm.config.get_text_config().pad_token_id = None if pad == tokenizer.eos_token_id else pad
    files = {}
    if exports_adapter(lm, args):  # it has no configuration of a model
        norm = {key: torch.tensor(value, dtype=torch.float64) for key, value in lm.config.reward_norm.items()}
        files["reward_norm.safetensors"] = norm
    run.export(to_export(lm, args), tokenizer, name, files)


def exports_adapter(lm, args):
    """Whether the export is a LoRA adapter alone."""
    return lm._hf_peft_config_loaded and not args.merge_adapters


def summary(args, accelerator, lm, new_head, data, max_length, total_steps):
    """What is trained on what, in a few lines."""
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    lengths = sorted(map(longer_side, data.pairs))
    prompt, chosen, rejected = map(visible, data.texts[0])
    epochs = total_steps * args.batch_size / len(data.pairs)
    share = args.batch_size // accelerator.num_processes
    lines = [
        f"reward: {lm.num_parameters():,} parameters, {trained:,} trained; new head: {new_head}; "
        f"{describe_layout(args, accelerator)}",
        f"data: {data.report}",
        f"tokens of the longer text: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
        f"first pair: {prompt[-400:]} | chosen: {chosen[:200]} | rejected: {rejected[:200]}",
        f"lr {args.lr:g} {args.lr_schedule}, at most {max_length} tokens a text, {epochs:.3g} epochs",
        f"{total_steps} steps x {args.batch_size} pairs; each step {share} pairs a process, at most "
        f"{args.micro_batch_size} a forward pass",
    ]
    if data.norm_rows:
        lines[-2] += f"; scores normalised over {len(data.norm_rows)} samples of at most {args.max_new_tokens} tokens"
    return "\n".join(lines)


def example_of_use(args, lm, tokenizer, data):
    """A text or chat to score, and the lines that load the exported model and score it."""
    loading = LOADING_ADAPTER if exports_adapter(lm, args) else LOADING
    if is_chat(data.rows, ["chosen"]):
        chat = messages_in(data.rows[0], "prompt") + data.rows[0]["chosen"]
        return chat, f"{loading}\n{SCORING_CHAT}"
    return tokenizer.decode(data.pairs[0][0]), f"{loading}\n{SCORING}"


# ---- Main ------------------------------------------------------------------------------------------------------------


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    data = read(args)
    policy_path = build(args.norm_policy, "--norm-policy") or path
    accelerator = launch(args)
    lm, tokenizer, new_head = load(args, path, accelerator.device)
    max_length = min(args.max_length, max_positions(lm) or args.max_length)
    encode(data, tokenizer, max_length)
    if data.norm_prompts:
        data.norm_rows = norm_rows(args, policy_path, data.norm_prompts, tokenizer, max_length, accelerator)

    run = Run("reward", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    line = texts_of(probe_pairs(data))
    packing = scores_tokens(lm) and packing_is_exact(run, lm, line, text_scores, "score", args)
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    total_steps = args.total_steps or math.ceil(args.epochs * len(data.pairs) / args.batch_size)
    headline = "rewards/accuracies"
    if data.eval_sets and args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}accuracy"
    evaluates = bool(data.eval_sets)
    run.restore(model, optimizer, lm, total_steps, longer="--total-steps", headline=headline, evaluates=evaluates)
    score = functools.partial(pair_scores, model, packing)
    run.say(summary(args, accelerator, lm, new_head, data, max_length, total_steps))
    if args.check:
        check(run, model, optimizer, score, data, args)
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, score, data, args))

    for step in range(run.begun + 1, total_steps + 1):
        start = time.perf_counter()
        model.train()
        # 1. a batch of pairs, in keyed random order
        batch = stream_rows(args.seed, "data", len(data.pairs), (step - 1) * args.batch_size, args.batch_size)
        micro_batches = split_rows(accelerator, batch, data.pairs, packing, args.micro_batch_size)
        # 2. loss = -1/B sum log sigmoid(r_chosen - r_rejected - margin), and its gradient
        sums = defaultdict(float)
        for rows in micro_batches:
            micro_batch = [data.pairs[row] for row in rows]
            last = rows is micro_batches[-1]
            with nullcontext() if last else accelerator.no_sync(model):
                chosen, rejected = score(micro_batch)
                margins = chosen.new_tensor([margin for _, _, margin in micro_batch])
                losses = pairwise_loss(chosen, rejected, margins, args.center_coef)
                # data-parallel training averages gradients over the processes, hence the factor
                accelerator.backward(losses.sum() * accelerator.num_processes / args.batch_size)
            for name, values in score_terms(losses, chosen, rejected).items():
                sums[name] += values.detach().double().sum()
        # 3. a step of AdamW
        lr = learning_rate(args, step - 1, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        sums = reduce_sums(accelerator, sums)
        means = {name: value / args.batch_size for name, value in sums.items()}
        if not (all(map(math.isfinite, means.values())) and grad_norm.isfinite()):
            numbers = f"loss {means['train/loss']}, gradient norm {grad_norm}, rows {batch}"
            raise FloatingPointError(f"step {step}: {numbers}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - start
        metrics = means | {"train/epoch": step * args.batch_size / len(data.pairs)}
        metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm.item()}
        tokens = sum(pair_length(data.pairs[row]) for row in batch)
        perf = {"perf/tokens_per_sec": tokens / seconds, "perf/pairs_per_sec": args.batch_size / seconds}
        perf["perf/seconds_update"] = seconds
        if run.evaluation_due(step):
            metrics |= evaluate(run, step, model, score, data, args)
            if run.is_best(step, metrics[headline]):
                export_classifier(run, "hf_model_best", lm, model, tokenizer, data, args)
        run.log(step, metrics, perf)
        text = f"loss {metrics['train/loss']:.4f} | accuracy {metrics['rewards/accuracies']:.3f}"
        run.status(step, f"{text} | {seconds:.2f} s")
        run.save_if_due(step)

    export_classifier(run, "hf_model", lm, model, tokenizer, data, args)
    title = f"{run.identity['flags']['model']} as a reward model of {run.identity['flags']['dataset']}"
    metrics = run.finish(title, *example_of_use(args, lm, tokenizer, data))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
