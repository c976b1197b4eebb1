"""Supervised fine-tuning (SFT) of a language model: maximum likelihood of the completions.

Loss: mean over the labelled tokens of the global batch of -log p(token | tokens before it): `token_nll`.

How this differs from other implementations:
- The sum of token losses is divided by the number of labelled tokens of the whole batch, over micro-batches and
  processes, so neither changes the result. A mean of micro-batch means would weigh short rows more.
- The end token is appended, trained and scored, also where it doubles as padding: masks come from lengths.
- Data order, schedule and evaluation samples are functions of (seed, step, row): a killed run continues exactly.

Rows: {"text"} (loss on every token), {"prompt", "completion"} as texts or chats (loss on the completion), {"messages"}
(on the assistant's turns) or {"dialogue": [prompt, output, prompt, output, ...]} (on the outputs).

    python algos/sft.py                                            # random walks, one CPU, under a minute
    accelerate launch algos/sft.py --model gpt2 --dataset my.jsonl --eval-dataset held_out.jsonl --lr 2e-5
    python algos/sft.py --model google-t5/t5-small --dataset pairs.jsonl --lora-r 16 --lr 2e-4   # an encoder-decoder
    torchrun --nproc_per_node 8 algos/sft.py --model Qwen/Qwen3-0.6B --dataset org/chats:train --max-length 2048 \
        --packing

Dimension key: B rows, T tokens of a row, Q query (prompt) tokens, R response tokens, V vocabulary.
"""

import copy
import ctypes
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

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, BitsAndBytesConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.peft_utils import find_adapter_config_file

from common.checkpoint import InputError, build, cli, load_function, pack_state, spec_path, stop_if, unpack_state
from common.logging import USAGE, Run, closes_run, frozen_weights, on_main, visible
from common.seeding import fast_cpu_matmul, rng, seed_libraries, set_threads, stream_rows, uniforms

TASK = "benchmarks/tasks/randomwalks.py"


@dataclass
class Args:
    """Supervised fine-tuning of a language model."""

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
    model: str = f"{TASK}:untrained_model"
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
    dataset: str = f"{TASK}:completions:split=train"
    """Training rows: a .jsonl/.json/.csv/.parquet/.txt file, hub id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = "auto"
    """Evaluation rows in the forms of --dataset, several sets joined by commas or as a mapping of names; auto: the
    embedded task's; default: in ppo the first --rollout-batch-size rows of --dataset, in sft none."""
    eval_prompts: str | None = "auto"
    """Rows with a prompt to sample at evaluation (sft, ilql: for --metric); auto: the embedded task's; default: the
    first set of --eval-dataset."""
    formatting: str | None = None
    """file.py:function(row) that makes a text, a row in one of the forms of --dataset, or a list of these of a row."""
    metric: str | None = "auto"
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}; auto: the embedded task's, or none."""
    max_length: int = 1024
    """Tokens of a row, of an encoder-decoder those of prompt and output each. Longer rows are counted and cut at the
    end; reward drops them, and dpo those that this leaves without a response."""
    completion_only_loss: bool = True
    """Train on completions, on the outputs of a dialogue and on the assistant's turns of a chat alone; off: on every
    token."""
    packing: bool = False
    """Put the rows of a step together into lines of at most --max-length tokens; no row sees another. Changes memory
    and speed, never the result; --micro-batch-size counts lines."""
    neftune_alpha: float = 0.0
    """Uniform noise of size alpha / sqrt(tokens x hidden size) on the embeddings in training (arXiv 2310.05914);
    0: none."""

    # ---- optimizer
    lr: float = 6e-3
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
    batch_size: int = 192
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
        own = self.dataset != f"{TASK}:completions:split=train"
        embedded = {"eval_dataset": "completions:split=test", "eval_prompts": "eval_prompts", "metric": "metric"}
        for name, function in embedded.items():
            if getattr(self, name) == "auto":
                setattr(self, name, None if own else f"{TASK}:{function}")
        self.epochs = (3.0 if own else 85.0) if self.epochs is None else self.epochs
        given = {name: value for name, value in vars(self).items() if value is not None}
        known, flash = ("auto", "eager", "sdpa", "flash_attention_2"), self.attn_implementation == "flash_attention_2"
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every", "top_k")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        positive = ("lr", "epochs", "lora_alpha")
        rules += [(name, 0 < given.get(name, 1) < math.inf, "a positive number") for name in positive]
        rules += [
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("attn_implementation", self.attn_implementation in known, f"one of {', '.join(known)}"),
            ("attn_implementation", not (self.packing and flash), "eager or sdpa with --packing"),
            ("num_layers_unfrozen", self.num_layers_unfrozen > 0 or self.num_layers_unfrozen == -1, "-1 or at least 1"),
            ("num_layers_unfrozen", self.num_layers_unfrozen == -1 or not self.lora_r, "-1 with --lora-r"),
            ("lora_alpha", self.lora_alpha is None or self.lora_r, "given with --lora-r"),
            ("lora_targets", self.lora_r or tuple(self.lora_targets) == ("all-linear",), "given with --lora-r"),
            ("merge", not (self.merge and self.load_in_4bit), "off with --load-in-4bit"),
            ("load_in_4bit", not self.load_in_4bit or self.dtype != "float64", "off with --dtype float64"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("push_to_hub", "/" in (self.push_to_hub or "/"), "org/name"),
        ]
        bad = [(name.replace("_", "-"), getattr(self, name), rule) for name, holds, rule in rules if not holds]
        stop_if([f"--{flag} {value} must be {rule}" for flag, value, rule in bad])


AT_LEAST_ONE = """threads decay_steps total_steps keep_checkpoints max_length batch_size micro_batch_size
max_new_tokens decode_batch_size""".split()
ZERO_OR_MORE = "lora_r lr_final warmup_steps adam_eps weight_decay max_grad_norm eval_temperature neftune_alpha".split()


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


class Seq2Seq:
    """Mixin that lets an encoder-decoder be called as a decoder is, with the query left-padded and the response behind
    it: the last logits_to_keep - 1 tokens of input_ids. The encoder reads the query, moved to the left, since some
    encoders count padding as positions; the decoder reads its start token and the response. So the logits are those of
    the response tokens and of the one behind, whatever the family. A call without logits_to_keep is the model's own."""

    def forward(self, *inputs, **options):
        if "logits_to_keep" not in options:
            return super().forward(*inputs, **options)
        ids, cache, start = options["input_ids"], options.get("past_key_values"), self.config.decoder_start_token_id
        width = ids.shape[1] + 1 - options["logits_to_keep"] if cache is None else cache.query_width
        mask = options.get("attention_mask", torch.ones_like(ids))[:, :width]
        order, mask = (mask == 0).byte().argsort(dim=1, stable=True), mask.sort(1, descending=True).values
        if cache is None:
            states = self.get_encoder()(input_ids=ids[:, :width].gather(1, order), attention_mask=mask)[0]
            ids = torch.cat([torch.full_like(ids[:, :1], start), ids[:, width:]], 1)
        else:  # the cache holds what the decoder has read of it
            states = cache.encoded.expand(len(ids), -1, -1)
        inputs = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask, "decoder_input_ids": ids}
        output = super().forward(**inputs, past_key_values=cache, use_cache=options["use_cache"])
        if cache is None and options["use_cache"]:
            output.past_key_values.query_width, output.past_key_values.encoded = width, states[:1]
        return output


def as_decoder(lm):
    """An encoder-decoder with the calls of Seq2Seq; any other model as it is."""
    if lm.config.is_encoder_decoder and not isinstance(lm, Seq2Seq):
        if getattr(lm.config, "decoder_start_token_id", None) is None:
            raise InputError("the configuration of the encoder-decoder has no decoder_start_token_id")
        lm.__class__ = type(type(lm).__name__, (Seq2Seq, type(lm)), {})
    return lm


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


def format_rows(rows, function):
    """What the function of --formatting makes of the rows."""
    try:
        made = [function(dict(row)) for row in rows]
    except Exception as error:
        raise InputError(f"--formatting raised {type(error).__name__}: {error}") from error
    made = [part for found in made for part in (found if isinstance(found, list) else [found])]
    return load_rows([{"text": row} if isinstance(row, str) else row for row in made], "--formatting")


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


def chat_pieces(tokenizer, messages, first, tools, where):
    """The text of a chat in pieces, alternately without and with loss: the assistant's messages from number `first` on,
    with the end of their turn; or what the template marks as generated, if it does."""
    chat_text(tokenizer, messages, where, tools=tools)  # stops at what is no chat
    pieces, turns = [], [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        raise InputError(f"{where}: the last message must be the assistant's, it is by {messages[-1]['role']!r}")
    if re.search(r"\{%-?\s*generation\b", template := tokenizer.get_chat_template(tools=tools)):
        options = {"chat_template": template, "tools": tools, "return_assistant_tokens_mask": True}
        options |= tokenizer.special_tokens_map
        chat, earlier = [{k: v for k, v in m.items() if v is not None} for m in messages], []  # as apply_chat_template
        [text], [spans] = render_jinja_template([chat], **options)
        if first:
            chat_text(tokenizer, messages[: turns[0]], where, tools=tools)
            _, [earlier] = render_jinja_template([chat[: turns[0]]], **options)
        if not (spans := spans[len(earlier) :]):
            raise InputError(f"{where}: the chat template marks nothing of the answers with {{% generation %}}")
        edges = [0, *itertools.chain(*spans), len(text)]
        return [text[begin:end] for begin, end in itertools.pairwise(edges)]
    for i in turns:
        options = {"tools": tools, "add_generation_prompt": True}
        before = chat_text(tokenizer, messages[:i], where, **options) if i else ""
        after, done = chat_text(tokenizer, messages[: i + 1], where, tools=tools), "".join(pieces)
        if not (before.startswith(done) and after.startswith(before)):
            problem = f"the chat template changes earlier turns when message {i + 1} follows"
            how = "mark the answers in it with {% generation %}, or make a row of prompt and completion of each answer"
            raise InputError(f"{where}: {problem}: {how}")
        pieces += [before[len(done) :], after[len(before) :]]
    return pieces


def row_pieces(rows, tokenizer, flag):
    """The text of each row in pieces, alternately without and with loss."""
    columns = rows[0]
    if "messages" in columns:
        chats = [(row["messages"], 0, row.get("tools")) for row in rows]
    elif isinstance(columns.get("prompt"), list):
        for number, row in enumerate(rows, 1):
            prompt, completion = row["prompt"], row.get("completion")
            if not (isinstance(prompt, list) and isinstance(completion, list) and completion):
                raise InputError(f"{flag} row {number}: prompt and completion must be two lists of messages")
        chats = [(row["prompt"] + row["completion"], len(row["prompt"]), row.get("tools")) for row in rows]
    elif "dialogue" in columns:
        for number, row in enumerate(rows, 1):
            found = row["dialogue"] if isinstance(row["dialogue"], list) else None
            if not found or len(found) % 2:
                raise InputError(f"{flag} row {number}: 'dialogue' must be a list prompt, output, prompt, output, ...")
            texts([{"dialogue": part} for part in found], "dialogue", f"{flag} row {number}, part of")
        return [row["dialogue"] for row in rows]
    elif "prompt" in columns or "completion" in columns:
        return list(zip(texts(rows, "prompt", flag), texts(rows, "completion", flag), strict=True))
    else:
        return [("", text) for text in texts(rows, "text", flag)]
    return [chat_pieces(tokenizer, *chat, f"{flag} row {i}") for i, chat in enumerate(chats, 1)]


FORMS = ("prompt", "completion", "dialogue")


def encode_pieces(rows, tokenizer, flag, encoder=False):
    """Yields (ids, begins) of each row: its tokens, where each piece of it (`row_pieces`) begins, and its length.

    The pieces of a row are tokenised together; a piece begins at the longest common prefix with the tokens of what
    precedes it, so a merge across the boundary belongs to the later piece. An empty prompt becomes the beginning token.
    The end token is appended once; in a chat the template ends the turns. encoder: the model has one, so prompt and
    output are tokenised apart, and the output always has an end token.
    """
    chat, pieces = "messages" in rows[0] or isinstance(rows[0].get("prompt"), list), row_pieces(rows, tokenizer, flag)
    bos, eos, plain = tokenizer.bos_token_id, tokenizer.eos_token_id, chat or rows[0].keys().isdisjoint(FORMS)
    if encoder:
        pieces = [parts[:2] if len(parts) == 3 and not parts[2].strip() else parts for parts in pieces]
        if odd := [number for number, parts in enumerate(pieces, 1) if len(parts) != 2 or plain and not chat]:
            raise InputError(f"{flag} row {odd[0]}: an encoder-decoder takes rows of one prompt and one output")
        options = [{"text": [head for head, _ in pieces]}, {"text_target": [tail for _, tail in pieces]}]
        both = [tokenizer(**texts, add_special_tokens=not chat)["input_ids"] for texts in options]
        for head, tail in zip(*both, strict=True):
            head, tail = head or [eos if bos is None else bos], tail if tail[-1:] == [eos] else [*tail, eos]
            tail = tail[:-1] if tail[-2:] == [eos, eos] and not chat else tail
            yield [*head, *tail], [0, len(head), len(head) + len(tail)]
        return
    whole, prefixes = ["".join(parts) for parts in pieces], ["".join(p[:i]) for p in pieces for i in range(1, len(p))]
    options = {"add_special_tokens": not chat and not have_bos(tokenizer, whole)}
    encoded, heads = tokenizer(whole, **options)["input_ids"], iter(tokenizer(prefixes, **options)["input_ids"])
    ended = zip(heads, prefixes, strict=True)  # some tokenizers end every text
    heads = (x[:-1] if x[-1:] == [eos] and not text.endswith(tokenizer.eos_token) else x for x, text in ended)
    for ids, parts in zip(encoded, pieces, strict=True):
        ids = ids if chat or ids[-1:] == [eos] else [*ids, eos]
        ids = ids[:-1] if ids[-2:] == [eos, eos] and not chat else ids
        begins = [0, *(len(os.path.commonprefix((ids, next(heads)))) for _ in parts[1:]), len(ids)]
        if begins[1] == 0 and bos is not None and not plain:
            new = int(ids[0] != bos)
            ids, begins = [bos] * new + ids, [0, *(max(1, begin + new) for begin in begins[1:])]
        yield ids, begins


def encode_rows(rows, tokenizer, max_length, completion_only_loss, flag, encoder=False):
    """[(ids, labels)] of the rows that have a label left after the cut to max_length, which may remove the end token,
    and a report for the summary. The first token has no label: nothing predicts it."""
    examples, truncated = [], 0
    for ids, begins in encode_pieces(rows, tokenizer, flag, encoder):
        labels = [-100] * len(ids)
        for i in range(1, len(begins) - 1, 2) if completion_only_loss else range(len(begins) - 1):
            labels[begins[i] : begins[i + 1]] = ids[begins[i] : begins[i + 1]]
        room, over = max_length, max(0, begins[1] - max_length) if encoder else 0
        if encoder:  # which reads the prompt
            cut = slice(begins[1] - 1 - over, begins[1] - 1)  # the prompt keeps its end token
            del ids[cut], labels[cut]
            room += begins[1] - over
        truncated += len(ids) > room or over > 0
        ids, labels = ids[:room], [-100, *labels[1:room]]
        if any(label != -100 for label in labels):
            examples.append((ids, labels))
    if not examples:
        raise InputError(f"{flag}: no row has a label left within --max-length {max_length}")
    counts, tokens = sorted(len(y) - y.count(-100) for _, y in examples), sum(len(ids) for ids, _ in examples)
    report = f"{len(rows)} rows, {truncated} cut at the end, {len(rows) - len(examples)} dropped without a label left"
    labelled = f"labels on {sum(counts) / tokens:.1%} of {tokens:,} tokens, a row {counts[0]} to {counts[-1]}"
    return examples, f"{report}; {labelled}, median {counts[len(counts) // 2]}"


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


def pack(lengths, max_length):
    """Best-fit decreasing: lists of indices whose lengths sum to at most max_length; no length may exceed it."""
    lines = []  # [space left, indices]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        line = min((line for line in lines if line[0] >= lengths[i]), key=lambda line: line[0], default=None)
        if line is None:
            lines.append(line := [max_length, []])
        line[0] -= lengths[i]
        line[1].append(i)
    return [indices for _, indices in lines]


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


def line_logits(model, lines, pad, device):
    """Logits and labels of lines of examples, see label_logits. Rows of an encoder-decoder are laid out as in sampling:
    prompts left-padded, completions right-padded."""
    if not getattr(model, "module", model).config.is_encoder_decoder:
        return label_logits(model, *(x.to(device) for x in collate(lines, pad)))
    rows = [line[0][:2] for line in lines]
    begins = [next((i for i, label in enumerate(labels) if label != -100), 1) for _, labels in rows]
    left, right = max(begins), max(len(ids) - begin for (ids, _), begin in zip(rows, begins, strict=True))

    def stack(columns, fill):
        padded = zip(columns, begins, strict=True)
        whole = [[fill] * (left - begin) + row + [fill] * (right + begin - len(row)) for row, begin in padded]
        return torch.tensor(whole, device=device)

    (ids, labels), mask = zip(*rows, strict=True), [[1] * len(ids) for ids, _ in rows]
    ids, labels, mask = stack(ids, pad), stack(labels, -100), stack(mask, 0)
    inputs = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
    return model(**inputs, use_cache=False, logits_to_keep=right).logits, labels[:, left:]


@torch.no_grad()
def packing_error(model, line, pad, device):
    """Largest difference of a token's loss between the examples of a line packed and each alone."""
    batches = [[line], *([[example]] for example in line)]
    found = [line_logits(model, lines, pad, device) for lines in batches]
    packed, *alone = [token_nll(logits, labels)[labels != -100] for logits, labels in found]
    return (packed - torch.cat(alone)).abs().max().item()


def neftune(lm, lines, args, step):
    """Context in which the embeddings of each row of T tokens get noise from +-alpha / sqrt(T H), keyed by (step, its
    place in the batch). Source: arXiv 2310.05914, Algorithm 1."""

    def add_noise(module, inputs, output):
        noise = torch.zeros(output.shape)
        for row, line in zip(noise, lines, strict=True):
            keyed = [(rng(args.seed, "neftune", step, place), (len(ids), row.shape[1])) for ids, _, place in line]
            drawn = [g.uniform(-1, 1, shape) * args.neftune_alpha / math.prod(shape) ** 0.5 for g, shape in keyed]
            drawn = torch.from_numpy(np.concatenate(drawn))[: len(row)]
            row[: len(drawn)] = drawn
        return output + noise.to(output)

    return lm.get_input_embeddings().register_forward_hook(add_noise) if args.neftune_alpha else nullcontext()


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


@torch.no_grad()
def evaluate_loss(accelerator, model, examples, args, pad):
    """Loss, perplexity and accuracy per label of the whole set, the same for any batch size and number of processes."""
    world, rank = accelerator.num_processes, accelerator.process_index
    share = math.ceil(len(examples) / world)
    empty = (examples[0][0], [-100] * len(examples[0][0]))  # every process runs the same number of forwards
    local = (examples[rank::world] + [empty])[:share]
    lines = [[example] for example in sorted(local, key=lambda example: len(example[0]))]  # never packed
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    for i in range(0, share, args.micro_batch_size):
        logits, labels = line_logits(model, lines[i : i + args.micro_batch_size], pad, accelerator.device)
        hits = (logits.argmax(-1) == labels).sum()
        sums += torch.stack([token_nll(logits, labels).double().sum(), hits, (labels != -100).sum()])
    loss, hits, count = accelerator.reduce(sums).tolist()
    return {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700.0)), "accuracy": hits / count}


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
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset") if args.eval_dataset else {}
    if args.formatting:
        function = load_function(args.formatting, "--formatting")
        rows = format_rows(rows, function)
        eval_sets = {prefix: format_rows(found, function) for prefix, found in eval_sets.items()}
    prompts = next(iter(eval_sets.values()), [])
    if args.eval_prompts:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    if metric and "prompt" not in (prompts or [{}])[0]:
        raise InputError("--metric needs rows with a prompt to sample from: name --eval-prompts")
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
    encoder, lm = lm.config.is_encoder_decoder, as_decoder(lm.to(device))
    if encoder and (args.packing or args.neftune_alpha or not args.completion_only_loss):
        raise InputError("--packing, --neftune-alpha and --no-completion-only-loss are not for encoder-decoders")
    pad, limit = tokenizer.pad_token_id, getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    max_length = min(args.max_length, limit or args.max_length)
    encoding = tokenizer, max_length, args.completion_only_loss
    examples, report = encode_rows(rows, *encoding, "--dataset", encoder)
    for prefix, found in eval_sets.items():
        flag = f"--eval-dataset {prefix[5:-1]}".strip()
        eval_sets[prefix] = encode_rows(found, *encoding, flag, encoder)[0]
    if metric:
        sampling = tokenizer, args.max_new_tokens, limit
        prompts, queries = encode_prompts(prompts, *sampling, "--eval-prompts", encoder=encoder)
    total_steps = args.total_steps or math.ceil(args.epochs * len(examples) / args.batch_size)

    # ---- run directory, device, what to continue from
    set_attention(lm, args, device, max_length if args.packing else max(len(ids) for ids, _ in examples))
    threads = set_threads(args.threads)
    run = Run("sft", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    if run.state:  # another number of threads gives other bits
        threads = set_threads(args.threads or run.state["threads"])
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    frozen = frozen_weights(lm)
    best_score, best_step = (run.state["best_score"], run.state["best_step"]) if run.state else (None, None)
    if run.checkpoint:
        unpack_state(run.checkpoint, run.state, model, optimizer, frozen)
    if run.begun >= total_steps and not (run.dir / "metrics.jsonl").exists():
        raise InputError(f"--resume {args.resume}: nothing is left to train; raise --total-steps")
    eval_every, packing = args.eval_every if eval_sets or metric else 0, args.packing
    if packing:  # the longest row beside a median one: shows a leak between rows, and an ignored window
        ends = sorted(examples, key=lambda example: len(example[0]))
        error = packing_error(model, [ends[-1], ends[len(ends) // 2]], pad, device)
        packing = error <= (1e-4 if args.dtype != "bfloat16" and accelerator.mixed_precision == "no" else 0.1)
        if not packing:
            run.say(f"--packing is off: in this model it changes the loss of a token by {error:.1e}")
    if not any(tokenizer.eos_token_id in labels for _, labels in examples):
        run.say(f"warning: no row trains the end token {tokenizer.eos_token}: responses will not end")
    lengths, (first_ids, first_labels), shown = sorted(len(ids) for ids, _ in examples), examples[0], ""
    for hidden, pairs in itertools.groupby(zip(first_ids, first_labels, strict=True), lambda pair: pair[1] == -100):
        text = visible(tokenizer.decode([i for i, _ in pairs]))
        shown += f"[{text}]" if hidden else text
    run.say(
        f"sft: {lm.num_parameters():,} parameters, "
        f"{sum(w.numel() for w in lm.parameters() if w.requires_grad):,} trained; "
        f"{args.dtype}, {accelerator.mixed_precision} autocast, {device}, {world} processes x {threads} threads\n"
        f"data: {report}; tokens of a row: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}\n"
        f"first row, [without loss]: {shown[:800]}\n"
        f"{total_steps} steps x {args.batch_size} rows = {total_steps * args.batch_size / len(examples):.1f} epochs; "
        f"each step {args.batch_size // world} rows a process, at most {args.micro_batch_size} a forward pass"
        f"{f'; stops: {list(args.stop)}' if args.stop else ''}"
    )

    def score(rows, outputs, output_ids):
        return on_main(accelerator, call_metric, metric, args.metric, tokenizer, rows, outputs, output_ids)

    @unsharded(model)
    def evaluate(step):
        model.eval()
        metrics = {}
        if metric:
            means, samples = evaluate_samples(accelerator, lm, tokenizer, prompts, queries, score, args)
            metrics = {f"eval/{key}": value for key, value in means.items()}
            run.samples(step, samples)
        for prefix, found in eval_sets.items():
            means = evaluate_loss(accelerator, model, found, args, pad)
            metrics |= {prefix + key: value for key, value in means.items()}
        return metrics

    headline = f"{next(iter(eval_sets))}loss" if eval_sets and eval_every else "train/loss"
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
        # 1. a batch of rows, in keyed random order
        rows = stream_rows(args.seed, "data", len(examples), (step - 1) * args.batch_size, args.batch_size)
        batch = [examples[row] for row in rows]
        count = sum(len(labels) - labels.count(-100) for _, labels in batch)  # labelled tokens of all processes
        local = [(*batch[place], place) for place in range(accelerator.process_index, args.batch_size, world)]
        local.sort(key=lambda example: len(example[0]))
        groups = pack([len(ids) for ids, *_ in local], max_length) if packing else [[i] for i in range(len(local))]
        lines = [[local[i] for i in group] for group in groups]
        micro_batches = [lines[i : i + args.micro_batch_size] for i in range(0, len(lines), args.micro_batch_size)]
        # 2. loss = -1/count sum log p(token | tokens before it), and its gradient
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            with nullcontext() if last else accelerator.no_sync(model), neftune(lm, micro_batch, args, step):
                logits, labels = line_logits(model, micro_batch, pad, device)
                nll = token_nll(logits, labels).sum() / count
                accelerator.backward(nll * world)  # data-parallel training averages gradients over the processes
            loss += nll.detach()
        # 3. a step of AdamW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step - 1, total_steps)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        loss = accelerator.reduce(loss)
        if not (loss.isfinite() and grad_norm.isfinite()):
            bad = f"step {step}: loss {loss}, gradient norm {grad_norm}, rows {rows}"
            raise FloatingPointError(f"{bad}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - begun
        metrics = {"train/loss": loss.item(), "train/epoch": step * args.batch_size / len(examples)}
        metrics |= {"optim/lr": group["lr"], "optim/grad_norm": grad_norm.item()}
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": sum(len(ids) for ids, _ in batch) / seconds}
        if eval_every and (step % eval_every == 0 or step == total_steps):
            metrics |= evaluate(step)
            new_score = -metrics[headline] if eval_sets else next(v for k, v in metrics.items() if "eval/" in k)
            if best_score is None or new_score > best_score:
                best_score, best_step = new_score, step
                run.export(to_export(lm, args), tokenizer, "hf_model_best")
        run.log(step, metrics, perf)
        run.status(step, total_steps, f"loss {metrics['train/loss']:.4f} | {seconds:.2f} s")
        stop = run.stop_requested()
        if stop or step in (best_step, total_steps) or (args.save_every and step % args.save_every == 0):
            run.save(step, *pack_state(model, optimizer, frozen, best_score=best_score, best_step=best_step))
        if stop:
            run.exit(step)

    # ---- export
    run.export(to_export(lm, args), tokenizer, "hf_model")
    title = f"{run.identity['flags']['model']} after SFT on {run.identity['flags']['dataset']}"
    prompt = next(i for i, label in enumerate(first_labels) if label != -100)
    usage = SEQ2SEQ_USAGE if encoder else USAGE
    metrics = run.finish(headline, title, tokenizer.decode(first_ids[:prompt], skip_special_tokens=encoder), usage)
    accelerator.end_training()
    return metrics, run.dir


SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, return_tensors='pt'), max_new_tokens=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""

if __name__ == "__main__":
    cli(Args, main)
