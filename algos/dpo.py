"""Direct preference optimization (DPO): a policy from preferences, without a reward model.

Paper: Rafailov et al. 2023, arXiv 2305.18290. Loss (Eq. 7): -log sigmoid(beta (c - r)) with the log-ratios
c = log pi(chosen | prompt) - log pi_ref(chosen | prompt), r likewise for rejected: `dpo_loss`, with its variants.

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

Dimension key: B pairs, T tokens of a row, V vocabulary.
"""

import copy
import ctypes
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from common.checkpoint import InputError, build, cli, load_function, pack_state, spec_path, stop_if, unpack_state
from common.logging import Run, closes_run, frozen_weights, on_main, visible
from common.seeding import fast_cpu_matmul, rng, seed_libraries, set_threads, stream_rows, uniforms

TASK = "benchmarks/tasks/randomwalks.py"
LossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop",
]  # fmt: skip


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
    """Loss of a pair, see dpo_loss; default: sigmoid, the embedded task ipo."""
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


# ---- Model -----------------------------------------------------------------------------------------------------------


def load_pretrained(kind, args, path, flag, **options):
    """(model, tokenizer, names of weights that the files lack) of an AutoModel class: finite weights, dropout off. path
    may be that of a LoRA adapter; an encoder-decoder comes as one."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    transformers_logging.get_logger("bitsandbytes").setLevel("ERROR")  # it complains where nobody asks for 4 bits
    path, revision = spec_path(path) or path, args.revision if flag == "--model" else None  # of no other repository
    path, hub = str(path) if isinstance(path, Path) else path, {"trust_remote_code": args.trust_remote_code}
    source = args.tokenizer or getattr(path, "name_or_path", path)
    for name, given in ((flag, path), ("--tokenizer", source)):
        local = isinstance(given, str) and (given.startswith((".", "/", "~")) or given.count("/") > 1)
        if local and not Path(given).exists():
            raise InputError(f"{name} {given}: there is no such directory")
        if isinstance(given, str) and Path(given, "hf_model").is_dir():
            raise InputError(f"{name} {given} is a run directory: name {given}/hf_model")
    base, files = adapter_base(path, revision), ("*token*", "vocab*", "*.model", "*.tiktoken")
    if isinstance(source, str) and Path(source).is_dir() and not any(any(Path(source).glob(file)) for file in files):
        if source != path or not base:
            raise InputError(f"{flag} {source} holds no tokenizer: name one with --tokenizer")
        source = base
    options |= {"dtype": getattr(torch, args.dtype), "output_loading_info": True, "ignore_mismatched_sizes": True}
    if args.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options["dtype"],
        )  # fmt: skip
        options["device_map"] = {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}
    try:
        if isinstance(tokenizer := source, str):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision if source == path else None, **hub)
        if kind is AutoModelForCausalLM and isinstance(path, str):
            kind = lm_class(path, revision=revision, **hub)
        options |= hub | {"revision": None if base else revision}
        model, report = kind.from_pretrained(base or path, **options) if isinstance(path, str) else (path, {})
        if base:  # whose own report knows nothing of what the base lacks
            options = {"adapter_kwargs": {"revision": revision}, "ignore_mismatched_sizes": True}
            found = model.load_adapter(path, **options).to_dict()
            names = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
            report = found | {"missing_keys": {*found["missing_keys"], *names & {*report["missing_keys"]}}}
    except Exception as error:  # the libraries' errors have no common class
        named = f"{flag} {path}" + f", an adapter of {base}," * bool(base) + f" --revision {revision}" * bool(revision)
        named += f" --tokenizer {args.tokenizer}" * isinstance(args.tokenizer, str)
        raise InputError(f"{named} cannot be loaded: {' '.join(str(error).split())}") from None
    if hasattr(model, "get_base_model"):  # of peft's own class
        model = model.get_base_model()
        model._hf_peft_config_loaded = True
    if args.load_in_4bit and getattr(model, "is_loaded_in_4bit", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, args.gradient_checkpointing, {"use_reentrant": False})
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # an end token that doubles as padding is trained, too
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of bitsandbytes, whose evaluations would repack the weights
            module.support_avx512bf16_for_cpu = False
    missing = sorted(report.get("missing_keys", ()))
    broken = [f"{name} is of shape {[*a]}, expected {[*b]}" for name, a, b in report.get("mismatched_keys", ())]
    broken += [f"{name} is not finite" for name, weight in model.named_parameters() if not weight.isfinite().all()]
    for adapter in getattr(model, "peft_config", {}).values():  # what would be lost, or stay random
        if base and Path(base).is_dir():
            adapter.base_model_name_or_path = str(Path(base).resolve())
        if (adapter.task_type == "SEQ_CLS") != ("Sequence" in kind.__name__):
            broken.append(f"the adapter is one for {adapter.task_type}, not for this kind of model")
        broken += [f"adapters with {x} are not taken" for x in NOT_TAKEN if getattr(adapter, x, "none") not in UNUSED]
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        broken.append(f"the model has embeddings for fewer than the {len(tokenizer)} tokens of the tokenizer")
    stop_if([f"{flag} {path}: {problem}" for problem in broken[:1]])
    return model, tokenizer, missing


NOT_TAKEN, UNUSED = ("bias", "trainable_token_indices", "ensure_weight_tying", "use_dora"), ("none", None, False)


def adapter_base(path, revision=None):
    """What a LoRA adapter, a directory or hub id, names as its base model; None where path is no adapter."""
    with suppress(OSError, ValueError, KeyError):
        found = find_adapter_config_file(path, revision=revision) if isinstance(path, str) else None
        return found and json.loads(Path(found).read_text())["base_model_name_or_path"]


def lm_class(path, revision=None, **options):
    """The AutoModel class of a language model, or of the base of a LoRA adapter: of an encoder-decoder or a decoder."""
    base = adapter_base(path, revision)
    config = AutoConfig.from_pretrained(base or path, revision=None if base else revision, **options)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_model(args, path, flag="--model"):
    """The language model and its tokenizer, with a padding token."""
    model, tokenizer, missing = load_pretrained(AutoModelForCausalLM, args, path, flag)
    stop_if([f"{flag} {path}: {name} is missing" for name in missing[:1]])
    if "Classification" in str(model.config.architectures):  # whose output layer may be the embedding
        raise InputError(f"{flag} {path} is a classifier: name a language model")
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-sequence token, so no response could end: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ends = model.generation_config.eos_token_id  # so that the exported model ends where it was trained to
    if tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    # a strided slice times a frozen weight makes CPU kernels copy the weight for every row
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    return model, tokenizer


def blocks(lm):
    """The transformer blocks, of an encoder-decoder those of the decoder: the longest ModuleList that lies in no other
    (as experts of a block do)."""
    lm = lm.get_decoder() if lm.config.is_encoder_decoder else lm
    found = [(name.split("."), module) for name, module in lm.named_modules() if isinstance(module, nn.ModuleList)]
    return max((module for name, module in found if not any(map(str.isdigit, name))), key=len)


def freeze(lm, num_layers_unfrozen):
    """Leaves only the top blocks and the norm after them trainable (0: nothing; -1: everything). Returns the number of
    frozen blocks."""
    if num_layers_unfrozen < 0:
        return 0
    layers, ran = blocks(lm), []
    if num_layers_unfrozen > len(layers):
        raise InputError(f"--num-layers-unfrozen {num_layers_unfrozen}: the model has {len(layers)} layers")
    depth = len(layers) - num_layers_unfrozen
    lm.requires_grad_(False)
    layers[depth:].requires_grad_(True)
    hooks = [module.register_forward_hook(lambda module, *_: ran.append(module)) for module in lm.modules()]
    lm(input_ids=torch.zeros(1, 1, dtype=torch.long, device=lm.device), use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    for module in ran[ran.index(layers[-1]) + 1 :]:  # what runs after the blocks: the norm, the output layer
        if num_layers_unfrozen and module is not lm.get_output_embeddings():
            for weight in module.parameters(recurse=False):
                weight.requires_grad_(True)
    return depth


def train_adapters(lm, args, heads=()):
    """LoRA adapters are trained, if there are any, and nothing else: new ones at --lora-targets, which change nothing
    before the first update (B is zero), or those of --model. heads: modules that are trained and saved with them.
    Adapters are at least float32, since small updates would be lost in bfloat16. Source: arXiv 2106.09685."""
    loaded = getattr(lm, "_hf_peft_config_loaded", False)
    if loaded and (args.lora_r or args.num_layers_unfrozen != -1):
        raise InputError("--model is a LoRA adapter, trained as it is: leave out --lora-r and --num-layers-unfrozen")
    if args.load_in_4bit and not (args.lora_r or loaded):
        raise InputError("--load-in-4bit: weights of 4 bits cannot be trained: add --lora-r")
    if args.load_in_4bit and not getattr(lm, "is_loaded_in_4bit", False):
        raise InputError("--load-in-4bit: --model is an object: load it in 4 bits yourself")
    if args.lora_r:
        from peft import LoraConfig

        kind = "SEQ_CLS" if heads else "SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM"
        targets = "all-linear" if tuple(args.lora_targets) == ("all-linear",) else list(args.lora_targets)
        options = {"task_type": kind, "target_modules": targets, "modules_to_save": list(heads) or None}
        options["revision"], names = args.revision, [f".{name}" for name, _ in lm.named_modules()]
        lost = [x for x in targets if targets != "all-linear" and not any(n.endswith(f".{x}") for n in names)]
        stop_if([f"--lora-targets {x}: no module of --model has this name" for x in lost])
        adapters = LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha or args.lora_r, **options)
        if not (lm.name_or_path or args.merge):
            raise InputError("--model is an object without name_or_path, which adapters need to find it: give --merge")
        if Path(lm.name_or_path).is_dir():  # found from everywhere
            lm.name_or_path = str(Path(lm.name_or_path).resolve())
        try:
            with warnings.catch_warnings(action="ignore"):  # that a Conv1D holds its matrix transposed
                lm.add_adapter(adapters)
        except ValueError as error:
            raise InputError(f"--lora-targets {' '.join(args.lora_targets)}: {error}") from None
    if not (args.lora_r or loaded):
        return stop_if(["--merge: there are no adapters to merge: add --lora-r"] * args.merge)
    for name, weight in lm.named_parameters():
        weight.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if args.lora_r and ".lora_A." in name:  # torch's default, but keyed: the same on every process
            bound = weight.shape[1] ** -0.5
            values = rng(args.seed, f"lora {name}").uniform(-bound, bound, tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(values))
    if not any("lora_" in name for name, _ in lm.named_parameters()):
        raise InputError("--model is an adapter of another kind than LoRA")
    weights = [id(weight) for _, weight in lm.named_parameters(remove_duplicate=False)]
    changed = [getattr(layer, "base_layer", getattr(layer, "original_module", None)) for layer in lm.modules()]
    if args.merge and any(weights.count(id(layer.weight)) > 1 for layer in changed if hasattr(layer, "weight")):
        raise InputError("--merge: an adapted layer shares its weight with another one: export the adapters alone")


def to_export(lm, args):
    """The model to export; with --merge a copy whose adapters are part of the weights."""
    if not args.merge:
        return lm
    lm = copy.deepcopy(lm)
    lm._weight_conversions = None  # those of an adapter that was loaded would rename the weights
    for name, layer in list(lm.named_modules()):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            lm.set_submodule(name, layer.get_base_layer())
        elif hasattr(layer, "modules_to_save"):
            lm.set_submodule(name, layer.modules_to_save[layer.active_adapters[0]])
    lm._hf_peft_config_loaded = False
    return lm


def shared_rows(pairs, pad, device):
    """One row for each pair of token lists: chosen, then rejected without the `common` tokens that both begin with.

    Returns ids and positions (B, T), a mask (B, 1, T, T) to add to attention scores, and common, a list. The rest of
    rejected does not see that of chosen, so both are as if alone; padding is on the right, where no token sees it.
    """
    common = [len(os.path.commonprefix(pair)) for pair in pairs]
    rows = [chosen + rejected[n:] for (chosen, rejected), n in zip(pairs, common, strict=True)]
    counted = [[*range(len(c)), *range(n, len(r))] for (c, r), n in zip(pairs, common, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
    positions = torch.tensor([row + [0] * (width - len(row)) for row in counted], device=device)
    place, begin = torch.arange(width, device=device), torch.tensor(common, device=device)[:, None]
    end = torch.tensor([[len(chosen)] for chosen, _ in pairs], device=device)
    hidden = (place >= end)[:, :, None] & ((place >= begin) & (place < end))[:, None]
    hidden |= place > place[:, None]  # (B, T, T): the token of the row does not see that of the column
    return ids, positions, torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)[:, None], common


@torch.no_grad()
def sharing_error(score, model, pairs):
    """How far sharing the beginning moves score(model, share, pairs), relative to 1 + |score|, of three pairs: with the
    longest row, the longest side, the longest beginning. Infinite where the model cannot."""
    sizes = (
        lambda pair: len(pair[0]) + len(pair[1]) - len(os.path.commonprefix(pair[:2])),
        lambda pair: max(len(pair[0]), len(pair[1])),
        lambda pair: len(os.path.commonprefix(pair[:2])),
    )
    probe = [max(pairs, key=size) for size in sizes]
    plain = score(model, False, probe)
    try:
        return ((score(model, True, probe) - plain).abs() / (1 + plain.abs())).max().item()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model without this kind of mask or head
        return math.inf


def pair_logprobs(model, share, pairs):
    """Log-probabilities (2, B) of the responses, chosen first: sums over their tokens, at least in float32."""
    lm = getattr(model, "module", model)
    if not share:
        lines = [[(pair[side], [-100] * pair[2] + pair[side][pair[2] :])] for side in (0, 1) for pair in pairs]
        logits, labels = label_logits(model, *(x.to(lm.device) for x in collate(lines, 0)))
        return -token_nll(logits, labels).sum(1).view(2, -1)
    inputs = [(chosen[:-1], rejected[:-1]) for chosen, rejected, _ in pairs]  # the last token predicts nothing
    ids, positions, mask, common = shared_rows(inputs, 0, lm.device)  # (B, T), (B, T), (B, 1, T, T)
    rows, columns, targets, lengths = [], [], [], []
    for side, (row, (*sides, prompt)) in itertools.product((0, 1), enumerate(pairs)):
        places = torch.arange(prompt - 1, len(sides[side]) - 1)  # a token is predicted at the one before it
        rest = len(sides[0]) - 1 - common[row]  # where rejected goes on, its places are so many columns further
        columns.append(places + side * (places >= common[row]) * rest)
        rows += [row] * len(places)
        targets += sides[side][prompt:]
        lengths.append(len(places))
    places = torch.tensor(rows, device=lm.device), torch.cat(columns).to(lm.device)  # (N,) each
    # the output layer runs at these places alone
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][places][None],))
    try:
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask.to(lm.dtype), use_cache=False).logits
    finally:
        hook.remove()
    nll = token_nll(logits[0], torch.tensor(targets, device=lm.device))  # (N,)
    return -torch.stack([part.sum() for part in nll.split(lengths)]).view(2, -1)


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
    c, r = policy_chosen - ref_chosen, policy_rejected - ref_rejected
    if loss_type in ("ipo", "sigmoid_norm"):
        c, r = c / lengths[0], r / lengths[1]
    return LOSSES[loss_type](c, r, beta, label_smoothing)


ls, s = F.logsigmoid, torch.sigmoid
LOSSES = {  # of the log-ratios c and r of chosen and rejected, beta b and label smoothing e
    # arXiv 2305.18290, Eq. 7; e: Mitchell 2023, "A note on DPO with noisy preferences" (cDPO)
    "sigmoid": lambda c, r, b, e: -(1 - e) * ls(b * (c - r)) - e * ls(b * (r - c)),
    "robust": lambda c, r, b, e: (-(1 - e) * ls(b * (c - r)) + e * ls(b * (r - c))) / (1 - 2 * e),  # arXiv 2403.00409
    "hinge": lambda c, r, b, e: (1 - b * (c - r)).relu(),  # arXiv 2309.06657; 2305.10425 without reference
    "ipo": lambda c, r, b, e: (c - r - 1 / (2 * b)) ** 2,  # arXiv 2310.12036, Eq. 17, of means over tokens
    "ipo_sum": lambda c, r, b, e: (c - r - 1 / (2 * b)) ** 2,  # the same of sums, as it is printed
    "sigmoid_norm": lambda c, r, b, e: -ls(b * (c - r)),  # of means over tokens
    "exo_pair": lambda c, r, b, e: (  # arXiv 2402.00856, Eq. 16
        s(b * (c - r)) * (ls(b * (c - r)) - math.log(1 - e)) + s(b * (r - c)) * (ls(b * (r - c)) - math.log(e))
    ),
    "nca_pair": lambda c, r, b, e: -ls(b * c) - 0.5 * ls(-b * c) - 0.5 * ls(-b * r),  # arXiv 2402.05369
    "bco_pair": lambda c, r, b, e: -ls(b * c) - ls(-b * r),  # arXiv 2404.04656, without its reward shift
    "sppo_hard": lambda c, r, b, e: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,  # arXiv 2405.00675
    "apo_zero": lambda c, r, b, e: 1 - s(b * c) + s(b * r),  # arXiv 2408.06266, Eq. 7
    "apo_down": lambda c, r, b, e: s(b * c) + 1 - s(b * (c - r)),  # arXiv 2408.06266, Eq. 8
    # arXiv 2406.08414, log-ratio modulated with tau = 0.05
    "discopop": lambda c, r, b, e: torch.lerp(
        -ls(b * (c - r)), (b * (r - c)).clamp(max=80).exp(), s(b * (c - r) / 0.05)
    ),
}
SMOOTHED = ("sigmoid", "robust", "exo_pair")


def pair_terms(policy, ref, pairs, args):
    """(7, B): the quantities of TERMS for each pair, the loss first, of log-probabilities (2, B)."""
    lengths = torch.tensor([[len(pair[side]) - pair[2] for pair in pairs] for side in (0, 1)], device=policy.device)
    losses = dpo_loss(*policy, *ref, args.beta, args.loss_type, args.label_smoothing, lengths)
    chosen, rejected = args.beta * (policy - ref).detach()
    return torch.stack([losses, chosen, rejected, chosen - rejected, (chosen > rejected).to(losses), *policy.detach()])


TERMS = "loss rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected".split()


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


# ---- Data ------------------------------------------------------------------------------------------------------------


def load_rows(data, flag):
    """Rows as a list of dicts with equal columns, from a list, a local file or `org/name:split` on the hub."""
    path, rows = spec_path(data), data
    if path and path.suffix == ".jsonl":
        try:
            lines, rows = path.read_text(encoding="utf-8-sig").split("\n"), []
        except UnicodeDecodeError as error:
            raise InputError(f"{flag} {data} is not UTF-8: {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                rows += [json.loads(line, strict=False)] if line.strip() else []
            except ValueError as error:
                raise InputError(f"{flag} {data}:{number} is not valid JSON: {error}") from None
    elif isinstance(data, str):
        import datasets

        kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
        name, _, split = data.partition(":")
        try:
            if path and path.is_dir():
                rows = datasets.load_from_disk(str(path))
            elif kind := kinds.get(Path(data.removesuffix(".gz")).suffix):
                rows = datasets.load_dataset(kind, data_files=str(path or data), split="train")
            elif path:
                raise ValueError(f"expected a name that ends with {', '.join(kinds)}")
            else:
                rows = datasets.load_dataset(name, split=split or "train")
        except Exception as error:  # the library's errors have no common class
            raise InputError(f"{flag} {data} cannot be loaded: {' '.join(str(error).split())}") from None
    if isinstance(rows, dict):
        raise InputError(f"{flag} {data} holds several splits ({', '.join(rows)}): name the directory of one")
    rows = list(rows)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            found = list(row) if isinstance(row, dict) else repr(row)[:60]
            raise InputError(f"{flag} row {number} is {found}, expected a mapping with the columns of row 1")
    if not rows:
        raise InputError(f"{flag} {data} holds no rows")
    return rows


def load_sets(spec, flag):
    """{prefix of the metrics: rows} of the evaluation sets: "eval/" for a single one, "eval/<name>/" for several, which
    are a mapping, or sources joined by commas and named by stem, split or function."""
    # a comma before key= lies between the options of a function
    parts = list(filter(None, re.split(r",\s*(?!\w+=)", spec))) if isinstance(spec, str) else []
    names = [part.split(":")[1] if ":" in part else Path(part).stem for part in parts]
    if len(set(names)) < len(names):
        raise InputError(f"{flag} {spec}: two sets have the same name (file stem, split or function)")
    data = dict(zip(names, parts, strict=True)) if len(parts) > 1 else build(spec, flag)
    if not isinstance(data, dict):
        return {"eval/": load_rows(data, flag)}
    return {f"eval/{name}/": load_rows(build(rows, flag), f"{flag} {name}") for name, rows in data.items()}


def texts(rows, column, flag):
    """The strings of a column."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get(column), str):
            value = f"is {row[column]!r:.60}" if column in row else f"is missing among {list(row)}"
            raise InputError(f"{flag} row {number}: {column!r} must be a string, it {value}")
        if row[column].encode(errors="ignore").decode() != row[column]:
            raise InputError(f"{flag} row {number}: {column!r} holds half a surrogate pair, which is no text")
    return [row[column] for row in rows]


def have_bos(tokenizer, texts):
    """Whether the texts already begin with the beginning token, as those that a chat template wrote do."""
    return bool(tokenizer.bos_token) and all(text.startswith(tokenizer.bos_token) for text in texts)


def chat_text(tokenizer, messages, where, **options):
    """The messages as the tokenizer's chat template writes them."""
    if not tokenizer.chat_template:
        raise InputError(f"{where}: the tokenizer has no chat template: save it with one, or take rows of plain text")
    for message in messages if isinstance(messages, list) and messages else [None]:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            kind = f'{{"role": one of {", ".join(ROLES)}; "content": text}}'
            raise InputError(f"{where}: a chat is a list of {kind}, found {message!r:.80}")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise InputError(f"{where}: the chat template refuses the messages: {error}") from None


ROLES = ("system", "developer", "user", "assistant", "tool")


def pair_texts(rows, tokenizer, flag):
    """[(prompt, chosen, rejected)] as texts, and whether a chat template wrote them.

    Without a prompt column, or with a text there beside chats, the prompt is what chosen and rejected have in common:
    messages, or whole words. Nothing in common gives "".
    """
    if not {"chosen", "rejected"} <= rows[0].keys():
        expected = "chosen and rejected (and prompt), each a text or a chat"
        raise InputError(f"{flag} has the columns {', '.join(rows[0])}; expected {expected}")
    if isinstance(rows[0]["chosen"], list):
        return [chat_pair(tokenizer, row, f"{flag} row {i}") for i, row in enumerate(rows, 1)], True
    chosen, rejected = texts(rows, "chosen", flag), texts(rows, "rejected", flag)
    if "prompt" in rows[0]:
        return list(zip(texts(rows, "prompt", flag), chosen, rejected, strict=True)), False
    common = [os.path.commonprefix(pair) for pair in zip(chosen, rejected, strict=True)]
    words = [re.match(r"(.*\S(?=\s))?", text, re.S)[0] for text in common]  # the space goes with the next word
    return [(p, c[len(p) :], r[len(p) :]) for p, c, r in zip(words, chosen, rejected, strict=True)], False


def chat_pair(tokenizer, row, where):
    """(prompt, chosen, rejected) of a row of chats, as the chat template writes them."""
    head = row["prompt"] if isinstance(row.get("prompt"), list) else []
    chats = [head + (row[name] if isinstance(row[name], list) else []) for name in SIDES]
    whole = [chat_text(tokenizer, chat, where, tools=row.get("tools")) for chat in chats]
    for name, chat in zip(SIDES, chats, strict=True):
        if len(chat) == len(head) or chat[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must be a list of messages that ends with one of the assistant")
    options = {"tools": row.get("tools"), "add_generation_prompt": True}
    head = prompt_messages(row)
    if not head and isinstance(row.get("prompt"), str):
        raise InputError(f"{where}: the prompt is a text that the chats do not begin with: make it a list of messages")
    prompt = chat_text(tokenizer, head, where, **options) if head else ""
    if not all(text.startswith(prompt) for text in whole):
        raise InputError(f"{where}: the chat template changes the prompt when the answer follows")
    return prompt, *(text[len(prompt) :] for text in whole)


def prompt_messages(row):
    """The prompt of a row of chats: its column, or the messages that both sides begin with, up to where the assistant
    answers in both."""
    if isinstance(row.get("prompt"), list) and row["prompt"]:
        return row["prompt"]
    pairs = list(zip(row["chosen"], row["rejected"], strict=False))[:-1]
    shared = next((i for i, (chosen, rejected) in enumerate(pairs) if chosen != rejected), len(pairs))
    while shared and {row[name][shared]["role"] for name in SIDES} != {"assistant"}:
        shared -= 1
    return row["chosen"][:shared]


SIDES = ("chosen", "rejected")


def encode_pairs(rows, tokenizer, max_length, args, flag):
    """(pairs, report): tokens (chosen, rejected, how many of them are the prompt's) of the pairs that are left.

    Prompt and response are tokenised together. The prompt is the longest common prefix of its own tokens and those of
    both sides, so that a merge across the boundary belongs to the responses; an empty one becomes the beginning token.
    The end token is appended once; in a chat the template ends the turns. A long prompt is cut, then what is longer
    than max_length at the end. Dropped are pairs without room for a response, and those of equal sides.
    """
    triples, chat = pair_texts(rows, tokenizer, flag)
    given, bos, eos = "prompt" in rows[0] and not chat, tokenizer.bos_token_id, tokenizer.eos_token_id
    for number, (prompt, *_) in enumerate(triples, 1):
        if not prompt and not given:
            raise InputError(f"{flag} row {number}: chosen and rejected begin differently: add the column prompt")
    whole = [[triple[0] + triple[side] for triple in triples] for side in (1, 2)]
    options = {"add_special_tokens": not chat and not have_bos(tokenizer, whole[0] + whole[1])}
    heads, *sides = (tokenizer(x, **options)["input_ids"] for x in ([prompt for prompt, *_ in triples], *whole))
    pairs, cut, crowded, equal = [], [0, 0], 0, 0
    for number, (head, *both) in enumerate(zip(heads, *sides, strict=True), 1):
        both = [ids if chat or ids[-1:] == [eos] else [*ids, eos] for ids in both]
        both = [ids[:-1] if ids[-2:] == [eos, eos] and not chat else ids for ids in both]  # some tokenizers end a text
        if (end := len(os.path.commonprefix((head, *both)))) == 0:
            if bos is None:
                raise InputError(f"{flag} row {number}: the prompt is empty and the tokenizer has no beginning token")
            both, end = [[bos, *ids] for ids in both], 1
        prompt, most = both[0][:end], args.max_prompt_length or end
        if end > most:
            first = prompt[: int(prompt[0] == bos)]
            prompt = (
                prompt[:most] if args.truncation_mode == "keep_start" else first + prompt[end - most + len(first) :]
            )
        both = [prompt + ids[end:] for ids in both]
        cut = [cut[0] + (end > most), cut[1] + any(len(ids) > max_length for ids in both)]
        chosen, rejected = (ids[:max_length] for ids in both)
        crowded += (short := min(len(chosen), len(rejected)) <= len(prompt))
        equal += (same := chosen == rejected and not short)
        pairs += [] if short or same else [(chosen, rejected, len(prompt))]
    report = f"{len(rows)} pairs, {cut[0]} prompts and the responses of {cut[1]} cut, "
    report += f"{crowded} dropped without room for a response, {equal} dropped as equal"
    if not pairs:
        raise InputError(f"{flag}: no pair is left: {report} (--max-length, the model's positions)")
    return pairs, report


def encode_prompts(rows, tokenizer, max_new_tokens, limit, flag, max_length=None, encoder=False):
    """(rows, queries) without the rows whose prompt has more than max_length tokens; queries are token ids.

    A chat prompt is replaced by its text up to where the assistant answers, and kept as the column messages. An empty
    prompt becomes the beginning token. limit: the positions that the model has, or None; a prompt whose response would
    not fit is an error. encoder: the model has one, which reads the prompt as the tokenizer ends it.
    """
    chat, kept = isinstance(rows[0].get("prompt"), list), []
    if chat:
        rendered, options = [], {"add_generation_prompt": True}
        for i, row in enumerate(rows, 1):
            text = chat_text(tokenizer, row["prompt"], f"{flag} row {i}", tools=row.get("tools"), **options)
            rendered.append(row | {"prompt": text, "messages": row["prompt"]})
        rows = rendered
    prompts = texts(rows, "prompt", flag)
    queries = tokenizer(prompts, add_special_tokens=not chat and not have_bos(tokenizer, prompts))["input_ids"]
    for number, ids in enumerate(queries, 1):
        if not ids and tokenizer.bos_token_id is None:
            raise InputError(f"{flag} row {number}: the prompt is empty and the tokenizer has no beginning token")
        ended = ids[-1:] == [tokenizer.eos_token_id] and not prompts[number - 1].endswith(tokenizer.eos_token)
        if ended and not encoder:
            del ids[-1]  # some tokenizers end every text
        ids += [] if ids else [tokenizer.bos_token_id]
        if max_length is None or len(ids) <= max_length:
            kept.append(number - 1)
            if limit and (max(len(ids), max_new_tokens) if encoder else len(ids) + max_new_tokens) > limit:
                sizes = f"{len(ids)} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} positions"
                how = "shorten it, lower --max-new-tokens, or in ppo.py set --max-prompt-length"
                raise InputError(f"{flag} row {number}: a prompt of {sizes}: {how}")
    if not kept:
        raise InputError(f"--max-prompt-length {max_length} drops every row of {flag}")
    return [rows[i] for i in kept], [queries[i] for i in kept]


def collate(lines, pad):
    """(ids, positions, labels), each (B, T), right-padded. A line is a list of examples (ids, labels, ...); positions
    count from 0 in each of them, and on through the padding."""
    rows, width = [], max(sum(len(ids) for ids, *_ in line) for line in lines)
    for line in lines:
        ids, labels = ([token for example in line for token in example[column]] for column in (0, 1))
        positions = [i for example in line for i in range(len(example[0]))]
        fill, after = width - len(ids), positions[-1] + 1
        rows.append((ids + [pad] * fill, [*positions, *range(after, after + fill)], labels + [-100] * fill))
    return tuple(map(torch.tensor, zip(*rows, strict=True)))


def label_logits(model, ids, positions, labels):
    """Logits (B, K, V) and their labels (B, K): the last K positions, from the first label of the batch on.

    No mask is passed: padding is on the right, and without a cache transformers keeps apart what begins at position 0,
    by a block-diagonal mask for each kind of layer (its masking_utils.py).
    """
    first = int((labels != -100).any(0).int().argmax()) or ids.shape[1] - 1  # no label at all: one position
    inputs = {"input_ids": ids[:, :-1], "position_ids": positions[:, :-1]}
    return model(**inputs, use_cache=False, logits_to_keep=ids.shape[1] - first).logits, labels[:, first:]


# ---- Sampling --------------------------------------------------------------------------------------------------------


def draw(logits, uniforms, temperature, top_k=0, top_p=1.0):
    """One token id per row from softmax(logits / temperature) (B, V), by inverse CDF in float64; uniforms (B,).

    temperature 0 is the argmax. The uniform is scaled by the last cumulative value and the search is to the right, so
    that a token of probability zero is never drawn.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= top_p  # the probability before a token already reaches top_p
        probs = probs.scatter(1, order, ranked.masked_fill(drop, 0.0))
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0]


@torch.no_grad()
def sample(model, query, query_mask, uniforms, eos_id, pad_id, temperature=1.0, top_k=0, top_p=1.0, ended=None):
    """Responses to left-padded queries (B, Q): ids and mask, (B, R), right-padded; the end token counts.

    uniforms: (B, R) float64, drawn before decoding starts, so a row's tokens do not depend on the other rows. Rows that
    have ended leave the batch and the key-value cache; ended(rows, ids (b, t)) -> (b,) bool ends some without an end
    token. The model's generation_config is not used.
    """
    rows, width = uniforms.shape
    ids = torch.full((rows, width), pad_id, device=query.device)
    mask = torch.zeros(rows, width, dtype=torch.bool, device=query.device)
    alive = torch.arange(rows, device=query.device)
    tokens, attention, cache = query, query_mask.long(), None
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    for t in range(width):
        step = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions, "past_key_values": cache}
        output = model(**step, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1], output.past_key_values
        if not (finite := logits.amax(-1).isfinite()).all():
            raise FloatingPointError(f"row {int(alive[~finite][0])}: logits are not finite at response token {t + 1}")
        tokens = draw(logits, uniforms[alive, t], temperature, top_k, top_p)
        ids[alive, t], mask[alive, t] = tokens, True
        going = tokens != eos_id if ended is None else (tokens != eos_id) & ~ended(alive, ids[alive, : t + 1])
        going = going.nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(alive):
            cache.batch_select_indices(going)
            alive, tokens, attention, positions = alive[going], tokens[going], attention[going], positions[going]
        tokens, positions = tokens[:, None], positions[:, -1:] + 1
        attention = F.pad(attention, (0, 1), value=1)
    return ids, mask


def generate(accelerator, lm, tokenizer, queries, keys, args, temperature, top_k=0, top_p=1.0, limits=None):
    """Samples a response to each of a global list of queries (lists of ids); each process decodes its share.

    keys: (stream, step); the uniforms of row i are keyed by (seed, stream, step, i). limits: (B,) longest response of a
    row. Returns query, query_mask (B, Q) left-padded and response, response_mask (B, R), on every process.
    """
    world, rank, pad = accelerator.num_processes, accelerator.process_index, tokenizer.pad_token_id
    width = max(map(len, queries))
    query = torch.tensor([[pad] * (width - len(ids)) + ids for ids in queries], device=accelerator.device)
    lengths = torch.tensor([len(ids) for ids in queries], device=accelerator.device)
    query_mask = torch.arange(width, device=accelerator.device) >= width - lengths[:, None]
    share = math.ceil(len(queries) / world)  # the last processes repeat the last row where the rows do not divide
    local = torch.arange(rank * share, (rank + 1) * share).clamp(max=len(queries) - 1).to(accelerator.device)
    draws = uniforms(args.seed, *keys, local.tolist(), args.max_new_tokens).to(accelerator.device)
    response = torch.full((share, args.max_new_tokens), pad, device=accelerator.device)
    response_mask = torch.zeros_like(response, dtype=torch.bool)
    for rows in torch.arange(share, device=accelerator.device).split(args.decode_batch_size):

        def ended(alive, ids, rows=rows):  # no stop string has more tokens than bytes
            tail = ids[:, -max(len(stop.encode()) for stop in args.stop) - 1 :] if args.stop else ids
            done = torch.tensor(stopped(tokenizer, tail, args.stop), device=ids.device)
            return done if limits is None else done | (ids.shape[1] >= limits[local[rows[alive]]])

        inputs = query[local[rows]], query_mask[local[rows]], draws[rows], tokenizer.eos_token_id, pad
        options = temperature, top_k, top_p, ended if args.stop or limits is not None else None
        with accelerator.autocast():
            response[rows], response_mask[rows] = sample(lm, *inputs, *options)
    response, response_mask = (accelerator.gather(x)[: len(queries)] for x in (response, response_mask))
    return query, query_mask, response, response_mask


def stopped(tokenizer, responses, stops):
    """Whether each response (ids) holds a stop string."""
    texts = tokenizer.batch_decode(responses) if stops else [""] * len(responses)
    return [any(stop in text for stop in stops) for text in texts]


def decode(tokenizer, queries, responses, stops):
    """Texts of the responses, without special tokens, cut before a stop string and stripped there. Decoded behind their
    queries (all are lists of lists of ids), since many tokenizers drop the space before a first token."""
    whole = [query + response for query, response in zip(queries, responses, strict=True)]
    parts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (queries, whole, responses)]
    texts = [both[len(head) :] if both.startswith(head) else alone for head, both, alone in zip(*parts, strict=True)]
    ends = [min((text.find(stop) for stop in stops if stop in text), default=len(text)) for text in texts]
    done = stopped(tokenizer, responses, stops)  # a stop string that is a special token is not in the text
    return [text[:end].rstrip() if stop else text for text, end, stop in zip(texts, ends, done, strict=True)]


def call_function(function, name, tokenizer, rows, outputs, output_ids):
    """Calls a reward or metric function with keyword lists: samples, prompts, outputs, the rows' other columns, and
    tokenizer and output_ids; without **columns it gets those that it names. It gets copies."""
    prompts = [row["prompt"] for row in rows]
    values = {key: copy.deepcopy([row[key] for row in rows]) for key in rows[0] if key != "prompt"}
    values |= {"samples": [p + o for p, o in zip(prompts, outputs, strict=True)], "prompts": prompts}
    values |= {"outputs": list(outputs), "output_ids": [list(ids) for ids in output_ids], "tokenizer": tokenizer}
    accepted = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in accepted):
        values = {p.name: values[p.name] for p in accepted if p.name in values}
    try:
        return function(**values)
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {error}") from error


def call_metric(function, name, tokenizer, rows, outputs, output_ids):
    """{name: values per row} of a metric function."""
    columns = call_function(function, name, tokenizer, rows, outputs, output_ids)
    expected = f"{name} must return {{name: list of {len(rows)} finite numbers}}"
    if not isinstance(columns, dict) or not columns:
        raise InputError(f"{expected}, it returned {columns!r:.60}")
    for key, values in columns.items():
        good = isinstance(values, list) and len(values) == len(rows)
        if not good or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise InputError(f"{expected}; {key!r} is not one")
    if "reward" in columns:
        raise InputError(f"{name} must not return the name 'reward', which the reward has")
    return columns


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate_samples(accelerator, lm, tokenizer, rows, queries, score, args):
    """Means of what score(rows, outputs, output_ids) -> {name: values per row} says of sampled responses, and the
    samples. The uniforms are the same at every evaluation, so that a difference between two of them is the model's."""
    options = ("eval", 0), args, args.eval_temperature, args.top_k, args.top_p
    _, _, response, mask = generate(accelerator, lm, tokenizer, queries, *options)
    output_ids = [ids[keep].tolist() for ids, keep in zip(response.cpu(), mask.cpu(), strict=True)]
    outputs = decode(tokenizer, queries, output_ids, args.stop)
    columns = score(rows, outputs, output_ids)
    means = {key: sum(values) / len(values) for key, values in columns.items()}
    columns = {"prompt": [row["prompt"] for row in rows], "output": outputs} | columns
    return means, [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def score_pairs(accelerator, score, pairs, batch_size):
    """score(pairs) -> (2, b) of all pairs, (2, N) in float64 on every process; each of them scores a share."""
    world, device = accelerator.num_processes, accelerator.device
    share = math.ceil(len(pairs) / world)  # the last processes repeat the last pair where the pairs do not divide
    local = [pairs[min(accelerator.process_index * share + i, len(pairs) - 1)] for i in range(share)]
    order = torch.tensor([-len(chosen) - len(rejected) for chosen, rejected, *_ in local]).argsort(stable=True)
    scores = torch.empty(share, 2, dtype=torch.float64, device=device)
    silent = not accelerator.is_main_process or None  # and where there is no terminal
    for places in tqdm(order.split(batch_size), "scoring pairs", leave=False, disable=silent, delay=5):
        with torch.no_grad(), accelerator.autocast():
            scores[places.to(device)] = score([local[place] for place in places]).T.double()
    return accelerator.gather(scores)[: len(pairs)].T


def fingerprint(model):
    """A hash of the weights and the configuration of a model."""
    adapters = [layer.scaling for layer in model.modules() if hasattr(layer, "scaling")]
    config = model.config.to_dict() | {"_name_or_path": "", "adapters": adapters}
    digest = hashlib.sha256(json.dumps(config, default=str).encode())
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def reference_logprobs(accelerator, run, reference, key, share, pairs, args):
    """Log-probabilities (2, N) of all pairs by the reference, whose fingerprint is `key`. They are kept beside the run,
    in a file named by a hash of the script, the key, the pairs, and the layout of the work, which decides last bits."""
    layout = [accelerator.num_processes, args.micro_batch_size, torch.get_num_threads(), str(torch.__version__)]
    settings = [run.identity["files"]["script"], accelerator.mixed_precision, str(accelerator.device), share]
    digest = hashlib.sha256(json.dumps([key, settings, layout, pairs]).encode())
    path = run.dir and run.dir.parent / f"ref-{digest.hexdigest()[:16]}.safetensors"

    def stored():
        with suppress(OSError, safetensors.SafetensorError):
            return safetensors.torch.load_file(path)["logprobs"].tolist() if path else None

    if found := on_main(accelerator, stored):
        return torch.tensor(found, dtype=torch.float64, device=accelerator.device)
    score = functools.partial(pair_logprobs, reference, share)
    logprobs = score_pairs(accelerator, score, pairs, args.micro_batch_size)
    if not (finite := logprobs.isfinite().all(0)).all():
        raise FloatingPointError(
            f"the reference's log-probabilities of pair {int((~finite).nonzero()[0]) + 1} are not finite"
        )

    def store():
        temporary = run.dir / f".tmp-{path.name}"  # where a killed run's is removed
        try:
            safetensors.torch.save_file({"logprobs": logprobs.cpu().contiguous()}, temporary)
            temporary.rename(path)
        except (OSError, safetensors.SafetensorError) as error:
            run.say(f"warning: the reference's log-probabilities are not kept: {error}")

    if path:
        on_main(accelerator, store)
    return logprobs


# ---- Main ------------------------------------------------------------------------------------------------------------


def set_attention(lm, args, device, longest):
    """On CPUs: fast matrix products, and eager attention for rows of up to 256 tokens, where it beats sdpa (not in
    float64, where it gives NaN for left padding in several families); elsewhere sdpa."""
    if device.type == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # keep freed memory: new pages for every block of logits cost as much as computing them
        libc.mallopt(-3, 2**30), libc.mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    eager = device.type == "cpu" and fast_cpu_matmul() and longest <= 256 and args.dtype != "float64"
    choice = ("eager" if eager else "sdpa") if args.attn_implementation == "auto" else args.attn_implementation
    before = lm.config._attn_implementation
    try:
        lm.set_attn_implementation(choice)
        if choice != before == lm.config._attn_implementation:  # some models warn and go on
            raise ValueError(f"{type(lm).__name__} stays with {before}")
    except (ValueError, ImportError) as error:
        if args.attn_implementation != "auto":
            raise InputError(f"--attn-implementation {choice}: {error}") from None


@contextmanager
def unsharded(model):
    """Within it the weights that FSDP2 has sharded are whole, gathered once and not for every token, also for calls of
    parts of the model; after it they are shards, where forward passes alone would leave some of them whole."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:  # the whole model comes first
        part._get_fsdp_state()._lazy_init()  # else the block that is called first would take itself for it
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)  # as torch does by default


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


@closes_run
def main(args):
    """Trains; returns the newest value of every metric and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    # ---- data, functions, model: whatever is wrong with them stops here, before anything is written
    path, metric = build(args.model, "--model"), load_function(args.metric, "--metric") if args.metric else None
    ref_path = build(args.ref_model, "--ref-model")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset") if args.eval_dataset else {}
    prompts = next(iter(eval_sets.values()), []) if metric else []
    if args.eval_prompts:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes read the weights
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    world, device = accelerator.num_processes, accelerator.device
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: the loop accumulates
    if args.batch_size % world:
        raise InputError(f"--batch-size {args.batch_size} must be a multiple of the {world} processes")
    if accelerator.mixed_precision == "fp16":
        raise InputError("use --mixed-precision bf16 or no: fp16 is not offered")
    if accelerator.distributed_type == "FSDP" and (args.merge or not accelerator.is_fsdp2):
        raise InputError("FSDP: set fsdp_version to 2, and leave out --merge, which needs whole weights")
    lm, tokenizer = load_model(args, path)
    if lm.config.is_encoder_decoder:
        raise InputError("--model is an encoder-decoder: dpo.py trains decoders; sft.py, ppo.py and ilql.py take both")
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    max_length = min(args.max_length, limit or args.max_length)
    pairs, report = encode_pairs(rows, tokenizer, max_length, args, "--dataset")
    for prefix, found in eval_sets.items():
        flag = f"--eval-dataset {prefix[5:-1]}".strip()
        eval_sets[prefix], note = encode_pairs(found, tokenizer, max_length, args, flag)
        report += f"\n{prefix[:-1]}: {note}"
    if prompts and isinstance(prompts[0].get("chosen"), list):
        prompts = [row | {"prompt": prompt_messages(row)} for row in prompts]
    if metric and "prompt" not in (prompts or [{}])[0]:
        raise InputError("--metric needs rows with a prompt to sample from: name --eval-prompts")
    if prompts:
        prompts, queries = encode_prompts(prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts")
    total_steps = args.total_steps or math.ceil(args.epochs * len(pairs) / args.batch_size)
    lengths = sorted(max(len(chosen), len(rejected)) for chosen, rejected, _ in pairs)
    set_attention(lm, args, device, 2 * lengths[-1])
    train_adapters(lm.to(device), args)
    freeze(lm, args.num_layers_unfrozen)
    reference = lm  # as long as it is not trained
    if ref_path:
        reference, ref_tokenizer = load_model(args, ref_path, "--ref-model")
        if ref_tokenizer.get_vocab() != tokenizer.get_vocab() or reference.config.is_encoder_decoder:
            raise InputError(f"--ref-model {args.ref_model} is of another kind or has another vocabulary than --model")
        set_attention(reference, args, device, 2 * lengths[-1])
    if reference is lm and not (args.precompute_ref or args.reference_free):
        reference = copy.deepcopy(lm, {id(weight): weight for weight in lm.parameters() if not weight.requires_grad})
    reference.eval().to(device)
    if not (args.eval_every or args.check):
        eval_sets, prompts = {}, []

    # ---- run directory, device, what to continue from
    threads = set_threads(args.threads)
    run = Run("dpo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    if run.state:  # another number of threads gives other bits
        threads = set_threads(args.threads or run.state["threads"])
    share = args.share_prompt and not args.attn_implementation.startswith("flash")
    if share:
        error = sharing_error(pair_logprobs, lm, [pair for found in (pairs, *eval_sets.values()) for pair in found])
        share = error <= (1e-4 if args.dtype != "bfloat16" else 0.02)
        if not share:
            run.say(f"--share-prompt is off: in this model it changes a log-probability by {error:.1e}")
    if not any(tokenizer.eos_token_id in ids[prompt:] for *sides, prompt in pairs for ids in sides):
        run.say(f"warning: no row trains the end token {tokenizer.eos_token}: responses will not end")
    kind = "none" if args.reference_free else "of its own" if ref_path else "the model as it is at the start"
    kind += "" if args.reference_free else ", scored once" if args.precompute_ref else ", kept"
    first, prompt = pairs[0], pairs[0][2]
    shown = [visible(tokenizer.decode(ids)) for ids in (first[0][:prompt], first[0][prompt:], first[1][prompt:])]
    run.say(
        f"dpo: {lm.num_parameters():,} parameters, "
        f"{sum(w.numel() for w in lm.parameters() if w.requires_grad):,} trained; reference: {kind}; "
        f"{args.dtype}, {accelerator.mixed_precision} autocast, {device}, {world} processes x {threads} threads\n"
        f"data: {report}\ntokens of the longer side: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}\n"
        f"first pair: [{shown[0][-400:]}] | chosen: {shown[1][:200]} | rejected: {shown[2][:200]}\n"
        f"{total_steps} steps x {args.batch_size} pairs = {total_steps * args.batch_size / len(pairs):.1f} epochs; "
        f"each step {args.batch_size // world} pairs a process, at most {args.micro_batch_size} a forward pass"
        f"{f'; stops: {list(args.stop)}' if args.stop else ''}"
    )

    def measure(rows, outputs, output_ids):
        call = rows, outputs, output_ids
        return on_main(accelerator, call_metric, metric, args.metric, tokenizer, *call) if metric else {}

    # ---- what the reference thinks and says, before anything is trained
    sets = {"train": pairs if args.precompute_ref and not args.check else [], **eval_sets}
    key = "" if args.reference_free else on_main(accelerator, fingerprint, reference)
    ref_logprobs = {
        name: torch.zeros(2, len(found), dtype=torch.float64, device=device) for name, found in sets.items()
    }
    for name in (name for name in sets if sets[name] and not args.reference_free):
        ref_logprobs[name] = reference_logprobs(accelerator, run, reference, key, share, sets[name], args)
    ref_means, ref_samples = {}, []
    if prompts:
        ref_means, ref_samples = evaluate_samples(accelerator, reference, tokenizer, prompts, queries, measure, args)
    score_ref = None  # of a batch, where the whole was not scored
    if not (args.precompute_ref or args.reference_free):
        score_ref = functools.partial(pair_logprobs, reference.requires_grad_(False), share)
    del reference
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    frozen = frozen_weights(lm)
    best_score, best_step = (run.state["best_score"], run.state["best_step"]) if run.state else (None, None)
    if run.checkpoint:
        unpack_state(run.checkpoint, run.state, model, optimizer, frozen)
    if run.begun >= total_steps and not (run.dir / "metrics.jsonl").exists():
        raise InputError(f"--resume {args.resume}: nothing is left to train; raise --total-steps")
    score = functools.partial(pair_logprobs, model, share)

    @unsharded(model)
    def evaluate(step):
        model.eval()
        metrics = {}
        if prompts:
            means, samples = evaluate_samples(accelerator, lm, tokenizer, prompts, queries, measure, args)
            metrics = {f"eval/{key}": value for key, value in means.items()}
            both = zip(samples, ref_samples, strict=True)
            run.samples(step, [sample | {"reference": ref["output"]} for sample, ref in both])
        for prefix, found in eval_sets.items():
            policy = score_pairs(accelerator, score, found, args.micro_batch_size)
            terms = pair_terms(policy, ref_logprobs[prefix], found, args).mean(1).tolist()
            metrics |= {prefix + name: value for name, value in zip(TERMS, terms, strict=True)}
        return metrics

    eval_every = args.eval_every if eval_sets or prompts else 0
    headline = f"eval/{next(iter(ref_means))}" if ref_means else f"{next(iter(eval_sets), '')}rewards/accuracies"
    if args.check:
        evaluate(0)
        run.say("check passed")
        return {}, None
    if run.begun == 0 and eval_every:
        run.log(0, evaluate(0))

    # ---- the algorithm
    for step in range(run.begun + 1, total_steps + 1):
        begun = time.perf_counter()
        model.train()
        # 1. a batch of pairs, in keyed random order
        drawn = stream_rows(args.seed, "data", len(pairs), (step - 1) * args.batch_size, args.batch_size)
        count = sum(len(pairs[row][0]) - pairs[row][2] for row in drawn)  # tokens of the chosen responses
        local = sorted(drawn[accelerator.process_index :: world], key=lambda row: len(pairs[row][0] + pairs[row][1]))
        micro_batches = [local[i : i + args.micro_batch_size] for i in range(0, len(local), args.micro_batch_size)]
        # 2. loss = -1/B sum log sigmoid(beta (c - r)), Eq. 7 (or --loss-type; --sft-coef), and its gradient
        sums = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        for rows in micro_batches:
            micro_batch = [pairs[row] for row in rows]
            with nullcontext() if rows is micro_batches[-1] else accelerator.no_sync(model):
                policy = score(micro_batch)
                if score_ref:
                    with torch.no_grad(), accelerator.autocast():
                        ref = score_ref(micro_batch)
                else:
                    ref = torch.zeros_like(policy) if args.reference_free else ref_logprobs["train"][:, rows]
                terms = pair_terms(policy, ref, micro_batch, args)
                loss = terms[0].sum() / args.batch_size - args.sft_coef * policy[0].sum() / count
                accelerator.backward(loss * world)  # data-parallel training averages gradients over the processes
            sums += terms.detach().double().sum(1)
        # 3. a step of AdamW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step - 1, total_steps)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        sums = accelerator.reduce(sums)
        if not (sums.isfinite().all() and grad_norm.isfinite()):
            bad = f"step {step}: loss {sums[0] / args.batch_size}, gradient norm {grad_norm}, rows {drawn}"
            raise FloatingPointError(f"{bad}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - begun
        metrics = dict(zip(TERMS, (sums / args.batch_size).tolist(), strict=True))
        nll = -sums[TERMS.index("logps/chosen")].item() / count  # mean over the tokens
        metrics = {"train/loss": metrics.pop("loss") + args.sft_coef * nll, "train/nll": nll} | metrics
        metrics |= {"train/epoch": step * args.batch_size / len(pairs)}
        metrics |= {"optim/lr": group["lr"], "optim/grad_norm": grad_norm.item()}
        tokens = sum(len(ids) for row in drawn for ids in pairs[row][:2])
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": tokens / seconds}
        perf |= {"perf/pairs_per_sec": args.batch_size / seconds}
        if eval_every and (step % eval_every == 0 or step == total_steps):
            metrics |= evaluate(step)
            if best_score is None or metrics[headline] > best_score:
                best_score, best_step = metrics[headline], step
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        shown = f"loss {metrics['train/loss']:.4f} | accuracy {metrics['rewards/accuracies']:.3f}"
        run.status(step, total_steps, f"{shown} | margin {metrics['rewards/margins']:.3f} | {seconds:.2f} s")
        stop = run.stop_requested()
        if stop or step in (best_step, total_steps) or (args.save_every and step % args.save_every == 0):
            run.save(step, *pack_state(model, optimizer, frozen, best_score=best_score, best_step=best_step))
        if stop:
            run.exit(step)

    # ---- export
    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after DPO on {run.identity['flags']['dataset']}"
    metrics = run.finish(headline, title, tokenizer.decode(first[0][:prompt]))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
