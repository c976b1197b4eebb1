"""Direct preference optimization (DPO): a policy from preferences, without a reward model.

Paper: Rafailov et al. 2023, arXiv 2305.18290. Loss of a pair (Eq. 7): -log sigmoid(beta (c - r)) with the log-ratios
c = log pi(chosen | prompt) - log pi_ref(chosen | prompt), r likewise for rejected: `dpo_loss`. Its variants are in
`log_ratio_loss`; --label-smoothing works in sigmoid, robust and exo_pair. Both log-probabilities usually fall in
training, that of rejected more; --sft-coef or apo_zero hold that of chosen up. The reference scores all pairs once,
before training, evaluation sets too, so there is no second model in memory: `Reference`. Its scores are kept beside the
run under a hash of what decides them, for the next run with another beta.

How this differs from other implementations:
- Prompt and response are parted at one token for both sides of a pair; a response is never cut to nothing; the end
  token is there once. Log-probabilities are sums over the response, at least in float32.
- Texts of different lengths stand side by side in a line (`fill_lines`): equal to a forward pass of each, to rounding.
  Logits are computed only where a response token is predicted, and not all at once.

Rows: {"prompt", "chosen", "rejected"} as texts or chats, or without a prompt where the two hold it.

    python algos/dpo.py                                            # random walks, one CPU, under a minute
    python algos/dpo.py --model runs/sft/hf_model --dataset pairs.jsonl --eval-dataset test.jsonl
    accelerate launch algos/dpo.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train
    torchrun --nproc_per_node 8 algos/dpo.py --model Qwen/Qwen3-0.6B --max-length 2048 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs (N in a set, or scored tokens), T tokens of a line, K positions with logits, V vocabulary.
"""

import functools
import hashlib
import itertools
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
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

import safetensors.torch
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
    pair_texts,
    prompt_messages,
    set_flag,
    set_prefix,
    tokenize,
)
from common.functions import build, load_function
from common.logging import Run, closes_run, on_main
from common.machine import describe_layout, launch, longest_micro_batch, try_update
from common.models import (
    as_decoder,
    end_tokens,
    freeze,
    frozen_copy,
    load_model,
    load_reference,
    max_positions,
    unsharded,
)
from common.output import call_with_output, describe_output, in_chunks
from common.ranges import (
    Count,
    Decay,
    Fraction,
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
from common.report import lines_of_use, screen, visible
from common.sampling import evaluate_samples
from common.seeding import seed_libraries, stream_rows
from common.structure import packing_problem

PROMPTS_SHOWN = 8  # sampled where neither --eval-prompts nor --metric asks for samples


@embedded_task("benchmarks/tasks/randomwalks/dpo.yaml")
@dataclass
class Args:
    """Preference optimization of a language model. Defaults are for pretrained models.

    Without --model, --dataset and --config: the embedded task, with settings of its own. --config FILE reads flags from
    a YAML file; flags win over it.
    """

    # ---- algorithm
    epochs: Positive = 1.0
    """Passes over the data (code of Rafailov et al. 2023: 1)."""
    total_steps: Count | None = None
    """Optimizer steps; default: those of --epochs."""
    beta: Positive = 0.1
    """Strength of the KL penalty that the loss stands for (Eq. 3): the lower, the farther from the reference (Rafailov
    et al. 2023: 0.1, for summaries 0.5)."""
    loss_type: Literal[
        "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
        "apo_zero", "apo_down", "discopop",
    ] = "sigmoid"  # fmt: skip
    """Loss of a pair, see log_ratio_loss."""
    label_smoothing: Fraction = 0.0
    """Probability that a preference is wrong, in the losses sigmoid (cDPO), robust and exo_pair."""
    ref_model: str | None = None
    """The reference, named as --model; default: --model as it is at the start. What it answers to the prompts of
    evaluations reaches --metric as the column ref_output."""
    reference_free: bool = False
    """Take a reference that finds all responses equally likely."""
    precompute_ref: bool = True
    """Score all pairs by the reference once, before training; off: a frozen copy scores each batch."""
    sft_coef: NonNegative = 0.0
    """Weight of the mean loss per token of the chosen responses beside it (arXiv 2404.19733, Eq. 1, with a mean per
    response there): keeps their probability, and that of the end token, from falling."""
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
    lr: Positive = 1e-6
    """Peak learning rate of AdamW (Rafailov et al. 2023: 1e-6 with 150 steps of warm-up; TRL: 1e-6; adapters of
    --lora-r take ten times as much)."""
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
    """Rows per optimizer step, all processes together (Rafailov et al. 2023: 64)."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- data
    dataset: str | None = None
    """Pairs for training: a .jsonl/.json/.csv/.parquet file, hub id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = None
    """Pairs for evaluation, several sets joined by commas or as a mapping of names."""
    eval_prompts: str | None = None
    """Rows with a prompt, all of which are sampled at evaluations. Default: with --metric the first set of
    --eval-dataset; without it up to 8 of its pairs, or else of --dataset."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}."""
    max_length: Count = 1024
    """Tokens of a side, prompt included. Longer ones are counted and cut at the end; pairs that this leaves without a
    response are dropped."""
    max_prompt_length: Count | None = None
    """Cut prompts to so many tokens, by --truncation-mode, and count them."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """What stays of a prompt that is longer than --max-prompt-length; a beginning token always does."""

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
        if self.label_smoothing >= 0.5:
            problems.append(f"--label-smoothing {self.label_smoothing} must be below 0.5, where no preference is left")
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            problems.append(f"--label-smoothing {self.label_smoothing} does not go with --loss-type {self.loss_type}")
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            problems.append("--loss-type exo_pair needs a --label-smoothing above 0 (1e-3)")
        if self.reference_free and self.ref_model is not None:
            problems.append("--reference-free does not go with --ref-model")
        if self.name and self.run_dir:
            problems.append("--name is a part of the default --run-dir: leave out one of them")
        stop_if(problems)


# ---- Maths -----------------------------------------------------------------------------------------------------------

SMOOTHED = ("sigmoid", "robust", "exo_pair")  # losses with label smoothing


def pair_losses(policy, pairs, reference, args):
    """Losses (B,) of pairs and rewards (2, B) of their responses, from log-probabilities (2, B) by the policy.

    The implicit reward of a response is beta log(pi / pi_ref) (Eq. 5, less a constant); it has no gradient.
    """
    ref = reference(pairs)
    lengths = response_lengths(pairs).to(policy.device)
    losses = dpo_loss(*policy, *ref, args.beta, args.loss_type, args.label_smoothing, lengths)
    return losses, args.beta * (policy.detach() - ref)


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


# ---- Reference -------------------------------------------------------------------------------------------------------


class Reference:
    """The policy pi_ref: reference(pairs) -> log-probabilities (2, B) of their responses, chosen first.

    It is --ref-model, or the model as it is before training. `ask` comes before the first update; what it has scored is
    not scored again, and the model is forgotten as soon as it is not needed.
    """

    def __init__(self, accelerator, lm, tokenizer, ref_path, args):
        self.accelerator = accelerator
        self.args = args
        self.packing = False  # see `pair_logprobs`
        self.scores = {}  # {id of a pair: its two log-probabilities}; a run never copies its pairs
        if args.ref_model is not None:
            self.model = load_reference(args, ref_path, lm, tokenizer)
        elif args.precompute_ref or args.reference_free:
            self.model = lm.eval()
        else:
            self.model = frozen_copy(lm)

    @torch.no_grad()
    def __call__(self, pairs):
        device = self.accelerator.device
        if self.args.reference_free:
            return torch.zeros(2, len(pairs), device=device)
        if id(pairs[0]) in self.scores:
            scores = [self.scores[id(pair)] for pair in pairs]
            return torch.tensor(scores, dtype=torch.float64, device=device).T.contiguous()
        with self.accelerator.autocast():
            return pair_logprobs(self.model, self.packing, pairs)

    def ask(self, run, tokenizer, data, packing):
        """Scores the pairs of evaluations, and with --precompute-ref those of training. Answers the prompts: the column
        ref_output of their rows."""
        args = self.args
        self.packing = packing and packing_problem(self.model) is None
        run.say(f"reference: {self.describe()}")
        if not args.reference_free:
            model_hash = on_main(self.accelerator, weights_hash, self.model)
            if args.precompute_ref and not args.check:
                self.score(run, model_hash, data.pairs)
            for pairs in data.eval_sets.values():
                self.score(run, model_hash, pairs)
        if data.prompts:
            _, samples = evaluate_samples(
                self.accelerator, self.model, tokenizer, data.prompts, data.queries, None, args
            )
            outputs = [sample["output"] for sample in samples]
            data.prompts = [row | {"ref_output": output} for row, output in zip(data.prompts, outputs, strict=True)]
        if args.precompute_ref or args.reference_free:
            self.model = None

    def describe(self):
        """What the reference is, and when it is asked."""
        if self.args.reference_free:
            return "none"
        name = "the model as it is at the start" if self.args.ref_model is None else "of its own"
        return f"{name}, scored once" if self.args.precompute_ref else f"{name}, kept"

    def score(self, run, model_hash, pairs):
        """Fills `scores` with those of a set of pairs, from a file beside the run if there is one."""
        path = self.score_file(run, model_hash, pairs)
        logprobs = on_main(self.accelerator, read_logprobs, path)
        if logprobs is None:
            score = functools.partial(pair_logprobs, self.model, self.packing)
            logprobs = score_pairs(self.accelerator, score, pairs, self.args.micro_batch_size)
            finite = logprobs.isfinite().all(0)
            if not finite.all():
                number = int((~finite).nonzero()[0]) + 1
                raise FloatingPointError(f"the reference's log-probabilities of pair {number} are not finite")
            on_main(self.accelerator, write_logprobs, run, path, logprobs)
            logprobs = logprobs.tolist()
        for pair, chosen, rejected in zip(pairs, *logprobs, strict=True):
            self.scores[id(pair)] = (chosen, rejected)

    def score_file(self, run, model_hash, pairs):
        """The path of the file that keeps the scores of a set; None with --check. Its name is a hash of the code, the
        model, the pairs, and the layout of the work, which decides last bits."""
        if run.dir is None:
            return None
        files = run.identity["files"].items()
        code = [(name, file_hash) for name, file_hash in files if name == "script" or name.startswith("common/")]
        layout = [self.accelerator.num_processes, self.accelerator.mixed_precision, str(self.accelerator.device)]
        layout += [self.packing, self.args.micro_batch_size, torch.get_num_threads(), str(torch.__version__)]
        digest = hashlib.sha256(str([code, model_hash, pairs, layout]).encode()).hexdigest()
        return run.dir.parent / f"ref-{digest[:16]}.safetensors"


def weights_hash(model):
    """A hash of the weights and the configuration of a model."""
    adapters = [layer.scaling for layer in model.modules() if hasattr(layer, "scaling")]
    config = model.config.to_dict() | {"_name_or_path": "", "adapters": adapters}
    digest = hashlib.sha256(str(config).encode())
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def read_logprobs(path):
    """The log-probabilities in a file, two lists; None where there is no whole one."""
    if path is None:
        return None
    try:
        return safetensors.torch.load_file(path)["logprobs"].tolist()
    except (OSError, safetensors.SafetensorError):
        return None


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


def num_labels(labels):
    return len(labels) - labels.count(-100)


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


def response_lengths(pairs):
    """(2, B): tokens of the responses, chosen first."""
    chosen_lengths = [len(chosen) - prompt_length for chosen, _, prompt_length in pairs]
    rejected_lengths = [len(rejected) - prompt_length for _, rejected, prompt_length in pairs]
    return torch.tensor([chosen_lengths, rejected_lengths])


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


def token_nll(logits, labels):
    """-log softmax(logits)[label] per token, at least in float32, unreduced; zero where the label is -100.

    logits (..., V) and labels (...) are aligned: logits[t] predicts labels[t].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)


def at_labels(function, model, labels, **inputs):
    """function(logits (N, V), labels (N,)) -> (..., N) of the N tokens with a label in labels (B, K), row by row; not
    all of the logits are in memory at once. labels belong to the last K positions of inputs."""
    places = labels != -100
    vocabulary = getattr(model, "module", model).config.get_text_config().vocab_size

    def compute(layer, states):
        return in_chunks(function, layer, vocabulary, states[places], labels[places])

    return call_with_output(model, compute, logits_to_keep=labels.shape[1], **inputs)


def pair_logprobs(model, packing, pairs):
    """Log-probabilities (2, B) of the responses, chosen first: sums over their tokens, at least in float32. packing:
    texts stand side by side (`fill_lines`)."""
    limit = max_positions(getattr(model, "module", model))
    examples = examples_of(pairs)
    groups = fill_lines([len(ids) for ids, _ in examples], packing, limit)
    nll = response_nll(model, [[examples[i] for i in group] for group in groups])  # (N,)
    order = [*itertools.chain(*groups)]
    responses = nll.split([num_labels(examples[i][1]) for i in order])
    sums = torch.stack([tokens.sum() for tokens in responses])  # a deterministic index_add
    return -sums[torch.tensor(order, device=sums.device).argsort()].view(2, -1)


def examples_of(pairs):
    """Examples (ids, labels) of all chosen, then of all rejected. Labels are on the response."""
    examples = []
    for side in (0, 1):
        for pair in pairs:
            ids = pair[side]
            prompt_length = pair[2]
            examples.append((ids, [-100] * prompt_length + ids[prompt_length:]))
    return examples


def response_nll(model, lines):
    """-log p of the tokens with a label in lines of examples (ids, labels), (N,), in their order.

    No mask is passed: padding is on the right, and without a cache transformers keeps apart what begins at position 0,
    by a block-diagonal mask for each kind of layer (its masking_utils.py).
    """
    lm = getattr(model, "module", model)
    ids, positions, labels = (x.to(lm.device) for x in collate(lines, 0))
    first = int((labels != -100).any(0).int().argmax())
    inputs = {"input_ids": ids[:, :-1], "position_ids": positions[:, :-1]}
    return at_labels(token_nll, model, labels[:, first:], **inputs)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def pair_terms(policy, losses, rewards):
    """{name: (B,)} of what is logged of pairs: their losses, rewards (2, B) and log-probabilities (2, B)."""
    policy = policy.detach().contiguous()  # the last bits of a sum depend on the layout
    chosen, rejected = rewards.contiguous()
    return {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(losses),
        "logps/chosen": policy[0],
        "logps/rejected": policy[1],
    }


def reduce_sums(accelerator, sums):
    """{name: sum over all processes} as numbers, of a dict of sums."""
    totals = accelerator.reduce(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))


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


def evaluate(run, step, model, score, losses_of, tokenizer, data, args):
    """What the metric says of sampled responses, some of which are shown, and means over the evaluation sets."""
    accelerator = run.accelerator
    model.eval()
    metrics = {}

    with unsharded(model):
        if data.prompts:
            lm = accelerator.unwrap_model(model)
            means, samples = evaluate_samples(accelerator, lm, tokenizer, data.prompts, data.queries, data.metric, args)
            metrics = {f"eval/{name}": value for name, value in means.items()}
            for row, sample in zip(data.prompts, samples, strict=True):
                sample["reference"] = row["ref_output"]
            run.samples(step, samples)
        for name, pairs in data.eval_sets.items():
            policy = score_pairs(accelerator, score, pairs, args.micro_batch_size)
            terms = pair_terms(policy, *losses_of(policy, pairs))
            metrics |= {f"{set_prefix(name)}{term}": values.mean().item() for term, values in terms.items()}
    return metrics


def check(run, model, optimizer, score, losses_of, tokenizer, data, args):
    """What --check does: an evaluation, and an update on a micro-batch of the longest pairs, without the reference,
    whose scores have no gradient."""
    evaluate(run, 0, model, score, losses_of, tokenizer, data, args)
    longest = longest_micro_batch(data.pairs, pair_length, run.accelerator, args)
    run.say(try_update(run.accelerator, model, optimizer, lambda: -score(longest).mean()))
    run.say("check passed")


def headline_metric(metrics, data):
    """The name of the metric whose highest value marks the best model: the first one of --metric, else the accuracy on
    the first evaluation set, else that in training."""
    evaluations = [name for name in metrics if name.startswith("eval/")]
    if not data.metric:
        evaluations = [name for name in evaluations if name.endswith("rewards/accuracies")]
    return evaluations[0] if evaluations else "rewards/accuracies"


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
    if args.eval_prompts is not None:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    elif metric and eval_sets:
        prompts = next(iter(eval_sets.values()))
    return Data(rows, eval_sets, prompts, metric)


def load(args, path, device):
    """The language model, with frozen weights or adapters as the flags say, and its tokenizer."""
    lm, tokenizer = load_model(args, path)
    if lm.config.is_encoder_decoder:
        raise InputError(
            f"--model is an encoder-decoder: {Path(__file__).name} trains decoders; "
            "sft.py, ppo.py, grpo.py and ilql.py take both"
        )
    lm = as_decoder(lm.to(device))
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def encode(data, lm, tokenizer, args):
    """Makes tokens of all rows, and forgets those that are only for evaluations where there are none. Returns the
    longest side in tokens that the flags and the model allow."""
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
    else:
        room = (limit or math.inf) - args.max_new_tokens
        pairs = next(iter(data.eval_sets.values()), data.pairs)
        prompts = [chosen[:prompt_length] for chosen, _, prompt_length in pairs if prompt_length <= room]
        data.queries = prompts[:PROMPTS_SHOWN]
        data.prompts = [{"prompt": tokenizer.decode(ids, skip_special_tokens=True)} for ids in data.queries]
        if not data.queries:
            data.report += f"\nno samples: no prompt leaves room for --max-new-tokens {args.max_new_tokens}"
    if not (args.eval_every or args.check):
        data.eval_sets = {}
        data.prompts = []
    return max_length


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


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def summary(args, accelerator, lm, tokenizer, data, max_length, total_steps):
    """What is trained on what, in a few lines."""
    lines = []
    ends = end_tokens(lm)
    if not any(trains_end(pair, ends) for pair in data.pairs):
        named = " or ".join(tokenizer.convert_ids_to_tokens(ends))
        lines.append(f"warning: no row trains the end token {named}: responses will not end")
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    lengths = sorted(map(longer_side, data.pairs))
    chosen, rejected, prompt_length = data.pairs[0]
    prompt = visible(tokenizer.decode(chosen[:prompt_length]))
    chosen = visible(tokenizer.decode(chosen[prompt_length:]))
    rejected = visible(tokenizer.decode(rejected[prompt_length:]))
    epochs = total_steps * args.batch_size / len(data.pairs)
    share = args.batch_size // accelerator.num_processes
    lines += [
        f"{Path(__file__).stem}: {lm.num_parameters():,} parameters, {trained:,} trained; "
        f"{describe_layout(args, accelerator)}; {describe_output(lm)}",
        f"data: {data.report}",
        f"tokens of the longer side: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
        f"first pair: [{prompt[-400:]}] | chosen: {chosen[:200]} | rejected: {rejected[:200]}",
        f"lr {args.lr:g} {args.lr_schedule}, beta {args.beta:g}, at most {max_length} tokens a side, "
        f"{args.max_new_tokens} new tokens, {epochs:.3g} epochs",
        f"{total_steps} steps x {args.batch_size} pairs; each step {share} pairs a process, at most "
        f"{args.micro_batch_size} a forward pass",
    ]
    if data.prompts:
        lines[-1] += f"; evaluations sample {len(data.prompts)} prompts"
    if args.stop:
        lines[-1] += f"; stops: {list(args.stop)}"
    return "\n".join(lines)


def trains_end(pair, ends):
    """Whether a response of the pair holds an end token."""
    chosen, rejected, prompt_length = pair
    return not set(ends).isdisjoint(chosen[prompt_length:] + rejected[prompt_length:])


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
    max_length = encode(data, lm, tokenizer, args)
    reference = Reference(accelerator, lm, tokenizer, ref_path, args)
    run = Run("dpo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    total_steps = args.total_steps or math.ceil(args.epochs * len(data.pairs) / args.batch_size)
    packing = packing_is_exact(run, lm, examples_of(probe_pairs(data)), response_nll, "log-probability", args)
    run.say(summary(args, accelerator, lm, tokenizer, data, max_length, total_steps))
    reference.ask(run, tokenizer, data, packing)
    losses_of = functools.partial(pair_losses, reference=reference, args=args)
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    evaluates = bool(data.eval_sets or data.prompts)
    headline = functools.partial(headline_metric, data=data)
    run.restore(model, optimizer, lm, total_steps, longer="--total-steps", headline=headline, evaluates=evaluates)
    score = functools.partial(pair_logprobs, model, packing)
    if args.check:
        check(run, model, optimizer, score, losses_of, tokenizer, data, args)
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, model, score, losses_of, tokenizer, data, args))

    for step in range(run.begun + 1, total_steps + 1):
        start = time.perf_counter()
        model.train()
        # 1. a batch of pairs, in keyed random order
        batch = stream_rows(args.seed, "data", len(data.pairs), (step - 1) * args.batch_size, args.batch_size)
        count = sum(len(data.pairs[row][0]) - data.pairs[row][2] for row in batch)  # tokens of the chosen responses
        micro_batches = split_rows(accelerator, batch, data.pairs, packing, args.micro_batch_size)
        # 2. loss = 1/B sum pair_losses + sft_coef nll, and its gradient
        sums = defaultdict(float)
        for rows in micro_batches:
            micro_batch = [data.pairs[row] for row in rows]
            with nullcontext() if rows is micro_batches[-1] else accelerator.no_sync(model):
                policy = score(micro_batch)
                losses, rewards = losses_of(policy, micro_batch)
                loss = losses.sum() / args.batch_size - args.sft_coef * policy[0].sum() / count
                # data-parallel training averages gradients over the processes, hence the factor
                accelerator.backward(loss * accelerator.num_processes)
            for name, values in pair_terms(policy, losses, rewards).items():
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
        metrics["train/epoch"] = step * args.batch_size / len(data.pairs)
        metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm.item()}
        perf = {
            "perf/seconds_update": seconds,
            "perf/tokens_per_sec": sum(pair_length(data.pairs[row]) for row in batch) / seconds,
            "perf/pairs_per_sec": args.batch_size / seconds,
        }
        if run.evaluation_due(step):
            evaluation = evaluate(run, step, model, score, losses_of, tokenizer, data, args)
            metrics |= evaluation
            if evaluation and run.is_best(step, evaluation[headline_metric(evaluation, data)]):
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        text = f"loss {loss:.4f} | accuracy {metrics['rewards/accuracies']:.3f}"
        run.status(step, f"{text} | margin {metrics['rewards/margins']:.3g} | {seconds:.2f} s")
        run.save_if_due(step)

    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after DPO on {run.identity['flags']['dataset']}"
    chosen, _, prompt_length = data.pairs[0]
    metrics = run.finish(title, *lines_of_use(lm, tokenizer, chosen[:prompt_length]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
