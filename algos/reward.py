"""A reward model from preferences: a sequence classifier whose score is higher for the chosen of two texts.

Loss: -log sigmoid(r_chosen - r_rejected - margin) per pair (Ouyang et al. 2022, arXiv 2203.02155, Eq. 1; the margin is
that of Touvron et al. 2023, arXiv 2307.09288, Eq. 2): `pairwise_loss`.

How this differs from other implementations:
- The score is read at the last token of the text, which is the end token, whatever the padding: also where the end
  token doubles as padding, or stands within the prompt. `ppo.py --reward` reads the same tokens of the same text.
- Too long pairs are dropped and counted: a text that was cut has no end to read the score from.
- A tie is no success: a constant model has accuracy 0. Beside the accuracy stands that of the rule "the shorter wins".
- What both texts of a pair begin with is computed once (`shared_rows`): equal to two forward passes, to rounding.

Rows: {"prompt", "chosen", "rejected"} as texts or chats, without a prompt where the two hold it, perhaps "margin".

    python algos/reward.py                                         # random walks, one CPU, two minutes
    python algos/reward.py --model gpt2 --dataset pairs.jsonl --eval-dataset test.jsonl --lr 1e-5 --weight-decay 0
    accelerate launch algos/reward.py --model runs/sft/hf_model --dataset Anthropic/hh-rlhf:train --lr 1e-5 \
        --weight-decay 0
    torchrun --nproc_per_node 8 algos/reward.py --model Qwen/Qwen3-0.6B --max-length 2048 --lr 1e-5 --weight-decay 0 \
        --dataset HuggingFaceH4/ultrafeedback_binarized:train_prefs \
        --eval-dataset HuggingFaceH4/ultrafeedback_binarized:test_prefs

Dimension key: B pairs, T tokens of a row.
"""

import copy
import ctypes
import functools
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

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from common.checkpoint import InputError, build, cli, pack_state, spec_path, stop_if, unpack_state
from common.logging import Run, closes_run, frozen_weights, on_main, visible
from common.seeding import fast_cpu_matmul, rng, seed_libraries, set_threads, stream_rows

TASK = "benchmarks/tasks/randomwalks.py"


@dataclass
class Args:
    """A reward model from preferences."""

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
    max_length: int = 1024
    """Tokens of a row, of an encoder-decoder those of prompt and output each. Longer rows are counted and cut at the
    end; reward drops them, and dpo those that this leaves without a response."""
    share_prompt: bool = True
    """Compute what the two texts of a pair begin with once for both. Changes memory and speed, never the result."""
    norm_prompts: str | None = None
    """Rows with a prompt: in the end, scores are shifted and scaled to mean 0 and standard deviation 1 over samples of
    --norm-policy for them (as in arXiv 1909.08593), as reward_norm in the configuration of the exported model."""
    norm_policy: str | None = None
    """Causal language model that samples for --norm-prompts; default: --model."""
    max_new_tokens: int = 9
    """Longest response, in tokens."""

    # ---- loss
    center_coef: float = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores around zero (arXiv 2312.09244, Eq. 2; 0.01 is usual)."""

    # ---- optimizer
    lr: float = 2e-3
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
    adam_betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's moments."""
    adam_eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 1.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: int = 64
    """Rows per optimizer step, all processes together."""
    micro_batch_size: int = 64
    """Rows per process and forward pass; changes memory and speed, never the result."""
    epochs: float | None = None
    """Passes over the data; default: 3, in reward and dpo 1, the embedded task more. --total-steps wins over it."""
    total_steps: int | None = None
    """Optimizer steps; default: from --epochs."""

    def __post_init__(self):
        own = self.dataset != f"{TASK}:pairs:split=train"
        if self.eval_dataset == "auto":
            self.eval_dataset = None if own else f"{TASK}:eval_pairs"
        self.epochs = (1.0 if own else 40.0) if self.epochs is None else self.epochs
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = ("auto", "eager", "sdpa", "flash_attention_2")
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        positive = ("lr", "epochs", "lora_alpha")
        rules += [(name, 0 < given.get(name, 1) < math.inf, "a positive number") for name in positive]
        rules += [
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("attn_implementation", self.attn_implementation in known, f"one of {', '.join(known)}"),
            ("num_layers_unfrozen", self.num_layers_unfrozen >= -1, "-1 or at least 0"),
            ("num_layers_unfrozen", self.num_layers_unfrozen == -1 or not self.lora_r, "-1 with --lora-r"),
            ("lora_alpha", self.lora_alpha is None or self.lora_r, "given with --lora-r"),
            ("lora_targets", self.lora_r or tuple(self.lora_targets) == ("all-linear",), "given with --lora-r"),
            ("merge", not (self.merge and self.load_in_4bit), "off with --load-in-4bit"),
            ("load_in_4bit", not self.load_in_4bit or self.dtype != "float64", "off with --dtype float64"),
            ("norm_policy", not self.norm_policy or self.norm_prompts, "given with --norm-prompts"),
            ("norm_policy", self.norm_policy or not self.norm_prompts or isinstance(self.model, str), "given"),
            ("push_to_hub", "/" in (self.push_to_hub or "/"), "org/name"),
        ]
        bad = [(name.replace("_", "-"), getattr(self, name), rule) for name, holds, rule in rules if not holds]
        stop_if([f"--{flag} {value} must be {rule}" for flag, value, rule in bad])


AT_LEAST_ONE = """threads decay_steps total_steps keep_checkpoints max_length batch_size micro_batch_size
max_new_tokens""".split()
ZERO_OR_MORE = "lora_r lr_final warmup_steps adam_eps weight_decay max_grad_norm center_coef".split()


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


def load_classifier(args, path):
    """The sequence classifier with one label, its tokenizer, and whether its head is new. A new one is drawn from
    N(0, 1 / (width + 1)), so that scores are of size 1 (Huang et al. 2024, arXiv 2403.17031), keyed by the seed."""
    kind = AutoModelForSequenceClassification
    model, tokenizer, missing = load_pretrained(kind, args, path, "--model", num_labels=1)
    if model.config.num_labels != 1:
        raise InputError(f"--model has {model.config.num_labels} labels, a reward model has one")
    if model.config.is_encoder_decoder:
        raise InputError("--model is an encoder-decoder: reward.py reads the scores of decoders and of encoders")
    if missing and model._hf_peft_config_loaded:
        raise InputError(f"--model {path}: a LoRA adapter without {missing[0]}: export it with --merge, and name that")
    lost = [name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    stop_if([f"--model {path}: {name} is missing" for name in lost[:1]])
    for number, name in enumerate(missing):
        weight = model.get_parameter(name)
        scale = (weight.shape[-1] + 1) ** -0.5 if weight.ndim > 1 else 0.0
        drawn = rng(args.seed, "head", number).normal(0.0, scale, weight.shape)
        weight.data.copy_(torch.from_numpy(drawn))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokenizer.padding_side = "right"  # as transformers reads a batch for such a model
    model.config.reward_norm = {"gain": 1.0, "bias": 0.0}  # ppo.py takes gain * score + bias
    return model, tokenizer, bool(missing)


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


def classifier_ids(tokenizer, texts, ended, max_length=None):
    """The tokens of texts as a classifier reads them: with its end token, if it has one, where `ended` says so; at most
    max_length, on the tokenizer's truncation_side."""
    eos = tokenizer.eos_token_id
    cut = {"truncation": True, "max_length": max_length - (eos is not None)} if max_length else {}
    encoded = tokenizer(texts, **cut)["input_ids"]
    for ids, end in zip(encoded, ended, strict=True):
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # a chat template writes its own
        if eos is not None and ids[-2:] == [eos, eos]:
            del ids[-1]
        ids += [eos] if eos is not None and (not ids or end and ids[-1:] != [eos]) else []
    return encoded


def classifier_logits(model, rows):
    """Logits (B, labels) of rows of tokens. Decoders read the score at the last token that is not the padding of their
    configuration, so padding is, on the right, a token that no row has: an end token counts wherever it stands."""
    used, width, lm = set().union(*rows), max(map(len, rows)), getattr(model, "module", model)
    pad = lm.config.get_text_config().pad_token_id = next(i for i in range(len(used) + 1) if i not in used)
    if pad >= lm.get_input_embeddings().num_embeddings and len(rows) > 1:
        return torch.cat([classifier_logits(model, [ids]) for ids in rows])
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in rows], device=lm.device)
    mask = torch.arange(width, device=lm.device) < torch.tensor([[len(ids)] for ids in rows], device=lm.device)
    return model(input_ids=ids, attention_mask=mask.long()).logits


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


def pair_scores(model, share, pairs):
    """Scores (2, B) of chosen and rejected, as the model computes them, returned at least in float32."""
    if share:
        lm, outputs = getattr(model, "module", model), []
        ids, positions, mask, common = shared_rows([pair[:2] for pair in pairs], 0, lm.device)
        lm.config.get_text_config().pad_token_id = 0  # transformers asks for one; what it reads by it is not used
        hook = lm.score.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            model(input_ids=ids, position_ids=positions, attention_mask=mask.to(lm.dtype), use_cache=False)
        finally:
            hook.remove()
        ends = torch.tensor([[len(chosen), len(rejected)] for chosen, rejected, _ in pairs]).T - 1
        common = torch.tensor(common)
        ends[1] += (ends[1] >= common) * (ends[0] + 1 - common)  # where the row holds the end of rejected
        scores = outputs[0][torch.arange(len(pairs), device=lm.device), ends.to(lm.device), 0]  # (2, B)
    else:
        scores = classifier_logits(model, [pair[side] for side in (0, 1) for pair in pairs])[:, 0].view(2, -1)
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


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


@torch.no_grad()
def reward_norm(accelerator, model, rows, batch_size):
    """gain and bias that give the scores of the rows of tokens mean 0 and standard deviation 1."""
    order = torch.tensor([len(ids) for ids in rows]).argsort(stable=True).split(batch_size)
    with accelerator.autocast():
        scores = [classifier_logits(model, [rows[i] for i in part])[:, 0].double() for part in order]
    std, mean = (x.item() for x in torch.std_mean(torch.cat(scores)))
    return {"gain": 1 / max(std, 1e-8), "bias": -mean / max(std, 1e-8)}


# ---- Maths -----------------------------------------------------------------------------------------------------------


def pairwise_loss(chosen, rejected, margin=None, center_coef=0.0):
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, all (B,), unreduced.

    Source: arXiv 2203.02155, Eq. 1; margin: arXiv 2307.09288, Eq. 2; centering: arXiv 2312.09244, Eq. 2.
    """
    margin = torch.zeros_like(chosen) if margin is None else margin
    if not chosen.shape == rejected.shape == margin.shape:
        raise ValueError(f"shapes differ: {[tuple(x.shape) for x in (chosen, rejected, margin)]}")
    return -F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected) ** 2


def calibration_error(differences, bins=10):
    """Expected calibration error (arXiv 1706.04599, Eq. 3) of sigmoid(|difference|) (B,) as the probability that the
    text of the higher score is the chosen one, margins aside: mean over pairs of |accuracy - confidence| of their bin
    of [0.5, 1]."""
    confidence, error = differences.abs().sigmoid(), 0.0
    numbers = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    for number in numbers.unique():
        inside = numbers == number
        error += (confidence[inside].mean() - (differences[inside] > 0).double().mean()).abs() * inside.double().mean()
    return float(error)


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


def encode_texts(rows, tokenizer, max_length, flag):
    """(triples, pairs, report): texts (prompt, chosen, rejected) and tokens (chosen, rejected, margin) of the pairs of
    at most max_length tokens a side whose sides differ. A text ends where its end token does: what a chat template
    writes after it is left out, as it is in a sampled response."""
    triples, chat = pair_texts(rows, tokenizer, flag)
    sides = [[triple[0] + triple[side] for triple in triples] for side in (1, 2)]
    sides = [[text.rstrip() for text in side] if chat else side for side in sides]
    margins = [row.get("margin", 0.0) for row in rows]
    for number, margin in enumerate(margins, 1):
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise InputError(f"{flag} row {number}: 'margin' must be a finite number, it is {margin!r:.60}")
    encoded = [classifier_ids(tokenizer, side, [True] * len(side)) for side in sides]
    pairs = list(zip(*encoded, map(float, margins), strict=True))
    fitting = [i for i, (chosen, rejected, _) in enumerate(pairs) if max(len(chosen), len(rejected)) <= max_length]
    kept = [i for i in fitting if pairs[i][0] != pairs[i][1]]
    dropped = f"{len(pairs) - len(fitting)} dropped as longer than {max_length}, {len(fitting) - len(kept)} as equal"
    if not kept:
        raise InputError(f"{flag}: no pair is left: of {len(pairs)}, {dropped} (--max-length, the model's positions)")
    apart = sum(not prompt for prompt, *_ in triples)
    dropped += f"; {apart} without a prompt" * bool(apart)
    return [triples[i] for i in kept], [pairs[i] for i in kept], f"{len(pairs)} pairs, {dropped}"


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


@torch.no_grad()
def policy_samples(args, policy, tokenizer, prompts, device):
    """(texts, ended): a response of the language model to each row with a prompt, sampled by transformers."""
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    prompts, queries = encode_prompts(prompts, tokenizer, args.max_new_tokens, limit, "--norm-prompts")
    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": True}
    plain = GenerationConfig(top_k=0, max_new_tokens=args.max_new_tokens, **options)
    policy.generation_config, responses = plain, []  # the checkpoint's would fill what is not given here
    torch.manual_seed(args.seed)
    for i in range(0, len(queries), 64):
        inputs = tokenizer.pad({"input_ids": queries[i : i + 64]}, padding_side="left", return_tensors="pt").to(device)
        sampled = policy.to(device).generate(**inputs, generation_config=plain)
        responses += sampled[:, inputs["input_ids"].shape[1] :].tolist()
    outputs = decode(tokenizer, queries, responses, ())
    samples = [row["prompt"] + output for row, output in zip(prompts, outputs, strict=True)]
    return samples, [tokenizer.eos_token_id in response for response in responses]


# ---- Evaluation ------------------------------------------------------------------------------------------------------


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


def evaluate_scores(scores, pairs):
    """Metrics of the scores (2, N) of all pairs; the loss is that without --center-coef. shorter_wins: the accuracy of
    a rule that knows the lengths alone."""
    chosen, rejected = scores
    differences = chosen - rejected
    return {
        "loss": pairwise_loss(chosen, rejected, scores.new_tensor([margin for *_, margin in pairs])).mean().item(),
        "accuracy": (differences > 0).double().mean().item(),
        "shorter_wins": sum(len(chosen) < len(rejected) for chosen, rejected, _ in pairs) / len(pairs),
        "margin": differences.mean().item(),
        "calibration_error": calibration_error(differences),
        "score_mean": scores.mean().item(),
        "score_std": scores.std().item(),
    }


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
    # ---- data, model: whatever is wrong with them stops here, before anything is written
    path = build(args.model, "--model")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset") if args.eval_dataset else {}
    policy_path, prompts = build(args.norm_policy, "--norm-policy") or path, args.norm_prompts
    if prompts is not None:
        prompts = load_rows(build(prompts, "--norm-prompts"), "--norm-prompts")
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
    lm, tokenizer, new_head = load_classifier(args, path)
    text_config = lm.config.get_text_config()
    max_length = min(args.max_length, getattr(text_config, "max_position_embeddings", args.max_length))
    triples, pairs, report = encode_texts(rows, tokenizer, max_length, "--dataset")
    total_steps = args.total_steps or math.ceil(args.epochs * len(pairs) / args.batch_size)
    for prefix, found in eval_sets.items():
        *encoded, note = encode_texts(found, tokenizer, max_length, f"--eval-dataset {prefix[5:-1]}".strip())
        eval_sets[prefix], report = encoded, f"{report}\n{prefix[:-1]}: {note}"
    heads = sorted({name.split(".")[0] for name, _ in lm.named_parameters()} - {lm.base_model_prefix})
    train_adapters(lm.to(device), args, heads)
    freeze(lm, args.num_layers_unfrozen)
    for name, weight in lm.named_parameters():
        if args.num_layers_unfrozen >= 0 and name.split(".")[0] in heads:
            weight.requires_grad_(True)
    adapter = lm._hf_peft_config_loaded and not args.merge  # it has no configuration of a model
    norm_ids = []
    if prompts:
        policy = load_model(args, policy_path, "--norm-policy")
        stop_if(["--norm-policy is an encoder-decoder: name a decoder"] * policy[0].config.is_encoder_decoder)
        sampled = on_main(accelerator, policy_samples, args, *policy, prompts, device)
        norm_ids, policy = [ids for ids in classifier_ids(tokenizer, *sampled) if len(ids) <= max_length], None
        if len(set(map(tuple, norm_ids))) < 2:
            raise InputError(f"--norm-prompts: {len(prompts)} prompts gave fewer than two different samples: take more")

    # ---- run directory, device, what to continue from
    lengths = sorted(max(len(chosen), len(rejected)) for chosen, rejected, _ in pairs)
    set_attention(lm, args, device, 2 * lengths[-1])
    threads = set_threads(args.threads)
    run = Run("reward", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    if run.state:  # another number of threads gives other bits
        threads = set_threads(args.threads or run.state["threads"])
    share = args.share_prompt and not args.attn_implementation.startswith("flash")
    if share:
        every = [pair for found in (pairs, *(found for _, found in eval_sets.values())) for pair in found]
        error = sharing_error(pair_scores, lm, every)
        share = error <= (1e-4 if args.dtype != "bfloat16" else 0.02)
        if not share:
            run.say(f"--share-prompt is off: in this model it changes a score by {error:.1e}")
    optimizer = make_optimizer(lm, args)
    model = accelerator.prepare(lm, optimizer)[0]  # FSDP2 gives shards to both
    frozen = frozen_weights(lm)
    best_score, best_step = (run.state["best_score"], run.state["best_step"]) if run.state else (None, None)
    if run.checkpoint:
        unpack_state(run.checkpoint, run.state, model, optimizer, frozen)
    if run.begun >= total_steps and not (run.dir / "metrics.jsonl").exists():
        raise InputError(f"--resume {args.resume}: nothing is left to train; raise --total-steps")
    score = functools.partial(pair_scores, model, share)
    eval_every, first = args.eval_every if eval_sets else 0, tuple(map(visible, triples[0]))
    run.say(
        f"reward: {lm.num_parameters():,} parameters, "
        f"{sum(w.numel() for w in lm.parameters() if w.requires_grad):,} trained; new head: {new_head}; "
        f"{args.dtype}, {accelerator.mixed_precision} autocast, {device}, {world} processes x {threads} threads\n"
        f"data: {report}\ntokens of the longer text: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}\n"
        f"first pair: {first[0][-400:]} | chosen: {first[1][:200]} | rejected: {first[2][:200]}\n"
        f"{total_steps} steps x {args.batch_size} pairs = {total_steps * args.batch_size / len(pairs):.1f} epochs; "
        f"each step {args.batch_size // world} pairs a process, at most {args.micro_batch_size} a forward pass"
    )

    @unsharded(model)
    def evaluate(step):
        model.eval()
        metrics, samples = {}, []
        for prefix, (parts, found) in eval_sets.items():
            scores = score_pairs(accelerator, score, found, args.micro_batch_size)
            metrics |= {prefix + key: value for key, value in evaluate_scores(scores, found).items()}
            named = {"set": prefix[5:-1]} if len(eval_sets) > 1 else {}
            columns = zip(parts, *scores.tolist(), strict=True)
            samples += [named | dict(zip(SHOWN, (*part, *both), strict=True)) for part, *both in columns]
        run.samples(step, samples)
        return metrics

    def export(name):
        if norm_ids:
            with unsharded(model):
                lm.config.reward_norm = reward_norm(accelerator, model, norm_ids, args.micro_batch_size)
        # without a padding token, transformers refuses a batch instead of reading the score before the end token
        pad = tokenizer.pad_token_id
        text_config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
        norm = {key: torch.tensor(value, dtype=torch.float64) for key, value in lm.config.reward_norm.items()}
        run.export(to_export(lm, args), tokenizer, name, {"reward_norm.safetensors": norm} if adapter else {})

    headline = f"{next(iter(eval_sets))}accuracy" if eval_every else "rewards/accuracies"
    if args.check:
        evaluate(0) if eval_sets else score_pairs(accelerator, score, pairs[:1], 1)
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
        local = [pairs[row] for row in drawn[accelerator.process_index :: world]]
        local.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        micro_batches = [local[i : i + args.micro_batch_size] for i in range(0, len(local), args.micro_batch_size)]
        # 2. loss = -1/B sum log sigmoid(r_chosen - r_rejected - margin), and its gradient
        sums = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        for micro_batch in micro_batches:
            with nullcontext() if micro_batch is micro_batches[-1] else accelerator.no_sync(model):
                chosen, rejected = score(micro_batch)
                margin = torch.tensor([margin for *_, margin in micro_batch], dtype=chosen.dtype, device=device)
                losses = pairwise_loss(chosen, rejected, margin, args.center_coef)
                # data-parallel training averages gradients over the processes, hence the factor world
                accelerator.backward(losses.sum() * world / args.batch_size)
            columns = losses, chosen, rejected, chosen - rejected, chosen > rejected
            sums += torch.stack([column.detach().double().sum() for column in columns])
        # 3. a step of AdamW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step - 1, total_steps)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        means = accelerator.reduce(sums) / args.batch_size
        if not (means.isfinite().all() and grad_norm.isfinite()):
            bad = f"step {step}: loss {means[0]}, gradient norm {grad_norm}, rows {drawn}"
            raise FloatingPointError(f"{bad}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. evaluate, log, save
        seconds = time.perf_counter() - begun
        metrics = dict(zip(TERMS, means.tolist(), strict=True)) | {"train/epoch": step * args.batch_size / len(pairs)}
        metrics |= {"optim/lr": group["lr"], "optim/grad_norm": grad_norm.item()}
        tokens = sum(len(ids) for row in drawn for ids in pairs[row][:2])
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": tokens / seconds}
        perf |= {"perf/pairs_per_sec": args.batch_size / seconds}
        if eval_every and (step % eval_every == 0 or step == total_steps):
            metrics |= evaluate(step)
            if best_score is None or metrics[headline] > best_score:
                best_score, best_step = metrics[headline], step
                export("hf_model_best")
        run.log(step, metrics, perf)
        shown = f"loss {metrics['train/loss']:.4f} | accuracy {metrics['rewards/accuracies']:.3f}"
        run.status(step, total_steps, f"{shown} | {seconds:.2f} s")
        stop = run.stop_requested()
        if stop or step in (best_step, total_steps) or (args.save_every and step % args.save_every == 0):
            run.save(step, *pack_state(model, optimizer, frozen, best_score=best_score, best_step=best_step))
        if stop:
            run.exit(step)

    # ---- export
    export("hf_model")
    title = f"{run.identity['flags']['model']} as a reward model of {run.identity['flags']['dataset']}"
    metrics = run.finish(headline, title, tokenizer.decode(pairs[0][0]), ADAPTER_USAGE if adapter else USAGE)
    accelerator.end_training()
    return metrics, run.dir


TERMS = "train/loss rewards/chosen rewards/rejected rewards/margins rewards/accuracies".split()
SHOWN = "prompt chosen rejected chosen_score rejected_score".split()
ADAPTER_USAGE = """from transformers import pipeline
model = pipeline('text-classification', {folder!r}, model_kwargs={{'num_labels': 1}})
print(model({prompt!r}, function_to_apply='none'))"""
USAGE = """from transformers import pipeline; model = pipeline('text-classification', {folder!r})
print(model({prompt!r}, function_to_apply='none'))"""

if __name__ == "__main__":
    cli(Args, main)
