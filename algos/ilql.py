"""Implicit language Q-learning (ILQL): offline RL of a language model, from texts with rewards.

Papers: Snell et al. 2022 (arXiv 2206.11871); IQL, Kostrikov et al. 2021 (arXiv 2110.06169). Code of the authors:
https://github.com/Sea-Snell/Implicit-Language-Q-Learning/blob/82c9796201ab705e9cb5aac2f97ab3ad75aead9b/src/models/iql_model.py

A token is an action, the text before it the state. Heads for V, two Q, and slow copies of these Q, the targets Q^, read
the hidden states of the language model pi, which goes on to imitate the data:

    (r + gamma V(s') - Q(s, a))^2, V(s') = 0 at the end    Q learns what V expects next          ilql_targets
    |tau - 1[u < 0]| u^2,  u = min Q^(s, a) - V(s)         V: an upper expectile over actions    expectile_loss
    log sum_b exp Q(s, b) - Q(s, a)                        unseen actions get a low Q (CQL)      cql_loss
    -log pi(a | s) w,  w = exp(awac_beta u), clipped       imitation, weighted by advantage      awac_loss
    Q^ <- Q^ + alpha (Q - Q^)                              every few steps                       polyak_update
    log pi(a | s) + beta (min Q^(s, a) - V(s))             what is sampled from                  shape_logits

How this differs from trlX's ILQL and the authors' code:
- One transformer, as in trlX; the authors have three (algos/README.md has recipes for a separate policy and target).
- --top-k and --top-p choose from pi, before Q is added, so that no beta leaves the likely tokens of pi with them (trlX:
  `--filter shaped`). The targets' Q is computed only for the action taken, logits only for actions, in chunks.
- Rows that are cut or `truncated` bootstrap from V of their last state, as in the authors' code; in trlX all rows end.
- The targets follow every --steps-for-target-q-sync optimizer steps, counted over the whole run.
- Losses are means over the actions of the global batch, so neither micro-batches, processes nor padding change them.

Rows: {"prompt", "completion", "reward"} as texts or chats, {"dialogue": [prompt, output, ...], "reward"},
{"messages", "reward"} or {"text", "reward"}, all of which is output. The reward is a number, received with the last
token, or a list with one for each output. {"truncated": true} says that the episode went on.

    accelerate launch algos/ilql.py                                # random walks on a CPU, in about a minute
    accelerate launch algos/ilql.py --model gpt2 --dataset rewarded.jsonl --metric my_metric.py:metric \
        --eval-prompts prompts.jsonl --max-new-tokens 32 --micro-batch-size 8 --lr 1e-5 --betas 0 1 4
    torchrun --nproc_per_node 8 algos/ilql.py --model Qwen/Qwen3-0.6B --dataset org/rewarded:train --lr 1e-5

Dimension key: B rows, T tokens of a row, A actions of a row, N actions of a batch, V vocabulary, H hidden size.
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
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import safetensors.torch
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
from common.logging import Run, closes_run, frozen_weights, on_main, visible
from common.seeding import fast_cpu_matmul, rng, seed_libraries, set_threads, stream_rows, uniforms

TASK = "benchmarks/tasks/randomwalks.py"


@dataclass
class Args:
    """Implicit language Q-learning: offline RL of a language model."""

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
    dataset: str = f"{TASK}:rewarded"
    """Rows with rewards: a .jsonl/.json/.csv/.parquet file, hub id:split, file.py:function; from Python a list."""
    eval_dataset: str | None = None
    """Rows with rewards for evaluation, several sets joined by commas or as a mapping of names."""
    eval_prompts: str | None = "auto"
    """Rows with a prompt to sample at evaluation (sft, ilql: for --metric); auto: the embedded task's; default: the
    first set of --eval-dataset."""
    metric: str | None = "auto"
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}; auto: the embedded task's, or none."""
    max_length: int = 1024
    """Tokens of a row, of an encoder-decoder those of prompt and output each. Longer rows are counted and cut at the
    end; reward drops them, and dpo those that this leaves without a response."""
    normalize_rewards: bool = True
    """Scale rewards so that the returns of the training rows have standard deviation 1, and mean 0 if all rows end."""

    # ---- algorithm
    gamma: float = 0.99
    """Discount per token."""
    tau: float = 0.9
    """Expectile that V learns of Q over the data's actions: 0.5 is their mean, near 1 their maximum."""
    cql_scale: float = 0.03
    """Weight of the CQL loss, which lowers Q for actions that the data do not take."""
    awac_scale: float = 1.0
    """Weight of the imitation loss."""
    awac_beta: float = 0.0
    """In the imitation loss a token weighs exp(beta x its advantage); 0: plain imitation."""
    awac_clip: float = 20.0
    """Largest such weight, at least 1."""
    two_qs: bool = True
    """Two Q heads, of which the lower value counts; --no-two-qs: one. Losses are summed over the heads."""
    alpha: float = 0.02
    """Share of the online Q heads that their targets take over at a synchronisation."""
    steps_for_target_q_sync: int = 1
    """Synchronise the target Q heads every so many optimizer steps."""

    # ---- optimizer
    lr: float = 2e-3
    """Peak learning rate of AdamW (pretrained models: 2e-5 in sft, 1e-5 in ppo, reward, ilql and ddpo, or 3e-4 in ddpo
    with LoRA, 1e-6 in dpo)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    lr_final: float = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: int = 20
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    adam_eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 1.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: int = 96
    """Rows per optimizer step, all processes together."""
    micro_batch_size: int = 96
    """Rows per process and forward pass; changes memory and speed, never the result."""
    epochs: float | None = None
    """Passes over the data; default: 3, in reward and dpo 1, the embedded task more. --total-steps wins over it."""
    total_steps: int | None = None
    """Optimizer steps; default: from --epochs."""

    # ---- evaluation by sampling
    betas: tuple[float, ...] = (0.0, 4.0, 64.0)
    """Weights (--betas 0 1 4) of the advantage in the policy log pi + beta (Q - V), evaluated in turn as
    eval/<metric>@beta=<beta>. The last one chooses the best checkpoint. --eval-temperature divides the whole sum."""
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
    filter: Literal["base", "shaped"] = "base"
    """What --top-k and --top-p choose from: the model's own distribution, so that no beta leaves its support, or, as in
    trlX, the one with the advantage added."""
    advantage_clip: float | None = None
    """Largest advantage Q - V in that policy: 0 only lowers the probability of bad tokens; default: none."""
    logit_mask: str | None = None
    """file.py:function that returns a V x V matrix, from Python also the matrix: True where a column's token must never
    follow a row's."""
    decode_batch_size: int = 1024
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    def __post_init__(self):
        own = self.dataset != f"{TASK}:rewarded"
        unscored = self.metric is None and self.eval_prompts not in (None, "auto")
        for name, function in {"eval_prompts": "eval_prompts", "metric": "metric"}.items():
            if getattr(self, name) == "auto":
                setattr(self, name, None if own else f"{TASK}:{function}")
        self.epochs = (3.0 if own else 16.0) if self.epochs is None else self.epochs
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = ("auto", "eager", "sdpa", "flash_attention_2")
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every", "top_k")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        positive = ("lr", "epochs", "lora_alpha")
        rules += [(name, 0 < given.get(name, 1) < math.inf, "a positive number") for name in positive]
        rules += [
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("tau", 0 < self.tau < 1, "in (0, 1)"),
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("alpha", 0 < self.alpha <= 1, "in (0, 1]"),
            ("awac_clip", self.awac_clip >= 1, "at least 1"),
            (
                "betas",
                self.betas and all(0 <= beta < math.inf for beta in self.betas),
                "one or more numbers, 0 or positive",
            ),
            ("eval_prompts", not unscored, "given with --metric, which scores what is sampled"),
            ("filter", self.filter in ("base", "shaped"), "base or shaped"),
            ("betas", len({f"{beta:g}" for beta in self.betas}) == len(self.betas), "different in their six digits"),
            ("advantage_clip", math.isfinite(self.advantage_clip or 0), "a finite number"),
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("attn_implementation", self.attn_implementation in known, f"one of {', '.join(known)}"),
            ("num_layers_unfrozen", self.num_layers_unfrozen >= -1, "-1, 0 or more"),
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
steps_for_target_q_sync max_new_tokens decode_batch_size""".split()
ZERO_OR_MORE = """lora_r lr_final warmup_steps adam_eps weight_decay max_grad_norm eval_temperature cql_scale awac_scale
awac_beta""".split()
CHUNK = 2**23  # logits of one chunk: 32 MB in float32


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


class PolicyWithQ(nn.Module):
    """A language model `lm` with `v_head`, `q_heads` and `target_q_heads` on the hidden states that its output
    embedding reads. A head is Linear (H, 2H), ReLU, Linear (2H, 1 or V), at least in float32."""

    def __init__(self, lm, two_qs=True, seed=0):
        super().__init__()
        self.lm, (vocabulary, width) = lm, lm.get_output_embeddings().weight.shape
        self.chunked_lm_head = True
        self._no_split_modules = lm._no_split_modules  # accelerate shards by these blocks
        heads = []
        for number, size in enumerate([1, vocabulary, vocabulary][: 2 + two_qs]):
            head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, size))
            for i, weight in enumerate(head.parameters()):
                bound = head[i // 2 * 2].in_features ** -0.5  # torch's default, but keyed: the same on every process
                values = rng(seed, "ilql_heads", number, i).uniform(-bound, bound, weight.shape)
                weight.data = torch.from_numpy(values).to(torch.promote_types(lm.dtype, torch.float32))
            heads.append(head.to(lm.device))
        self.v_head, self.q_heads = heads[0], nn.ModuleList(heads[1:])
        self.target_q_heads = copy.deepcopy(self.q_heads).requires_grad_(False)

    def forward(self, batch, args):
        return ilql_losses(self, batch, args)

    @contextmanager
    def guided(self, beta, top_k=0, top_p=1.0, advantage_clip=None, logit_mask=None):
        """Inside, `lm` returns the logits of `shape_logits`, so what samples from it (`lm.generate`, `sample`) samples
        from the policy with this beta; give `generate` top_k=0, or it keeps the 50 likeliest of the shaped policy.
        logit_mask: bool (V, V), True where the column must not follow the row; a row of True forbids nothing."""
        hidden = []
        if logit_mask is not None:
            logit_mask = (logit_mask & ~logit_mask.all(1, keepdim=True)).to(self.lm.device)

        def shape(_, inputs, options, output):
            with torch.autocast(output.logits.device.type, enabled=False):  # the heads keep float32
                states = hidden.pop().to(self.v_head[0].weight.dtype)
                q = torch.stack([head(states) for head in self.target_q_heads]).amin(0)
                v = self.v_head(states)[..., 0]
            forbidden = None
            if logit_mask is not None:
                ids = options["input_ids"] if "input_ids" in options else inputs[0]
                forbidden = logit_mask[ids[:, -q.shape[1] :]]
            output.logits = shape_logits(output.logits, q, v, beta, top_k, top_p, advantage_clip, forbidden)
            return output

        record = self.lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        hooks = record, self.lm.register_forward_hook(shape, with_kwargs=True)
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def head_weights(self):
        return {name: weight for name, weight in self.state_dict().items() if "head" in name.partition(".")[0]}

    @classmethod
    def load(cls, directory, **options):
        """The exported model of a run, `<run>/hf_model`, with its heads. options: those of from_pretrained."""
        with safetensors.safe_open(Path(directory) / "ilql_heads.safetensors", "pt") as file:
            two_qs = "q_heads.1.0.weight" in file.keys()
        kind = lm_class(str(directory), **options)
        model = cls(as_decoder(kind.from_pretrained(directory, **options)), two_qs)
        model.load_heads(directory)
        return model

    def load_heads(self, directory):
        try:
            weights = safetensors.torch.load_file(Path(directory) / "ilql_heads.safetensors")
            if self.head_weights().keys() != weights.keys():
                raise RuntimeError(f"it is of --{'' if 'q_heads.1.0.weight' in weights else 'no-'}two-qs")
            self.load_state_dict(self.state_dict() | weights)
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise InputError(f"{directory}/ilql_heads.safetensors does not fit the model: {error}") from None


def hidden_states(lm, ids, query_mask=None, logits=False):
    """(what the output embedding reads (B, T, H), logits (B, T, V) or None) of right-padded rows (B, T).

    Without logits, the output embedding gets one position of each row. No mask is passed: no token sees the padding
    behind it, and what is at the padding is not read. An encoder-decoder needs query_mask (B, Q), of the left-padded
    tokens for its encoder; of the R tokens behind them, with the start token, it returns R + 1 states.
    """
    found, inputs = [], {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}
    if query_mask is not None:
        response = ids.shape[1] - query_mask.shape[1]
        inputs |= {"attention_mask": F.pad(query_mask.long(), (0, response), value=1), "logits_to_keep": response + 1}

    def keep(_, inputs):
        found.append(inputs[0])
        return inputs if logits else (inputs[0][:, :1].contiguous(), *inputs[1:])  # see load_model

    hook = lm.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        output = lm(**inputs, use_cache=False)
    finally:
        hook.remove()
    if found[0].shape[:2] != (len(ids), inputs.get("logits_to_keep", ids.shape[1])):
        raise InputError("--model adds tokens to a row, or leaves some out: ilql.py cannot place the actions")
    return found[0], output.logits if logits else None


@torch.no_grad()
def lm_head_error(lm, ids):
    """Largest difference, relative to the largest logit, between the logits and what the output embedding makes of the
    hidden states, made 100 times as large: not zero in families that scale or cap their logits (Cohere, Granite, Gemma
    2)."""
    head, found = lm.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda _, inputs: found.append(100 * inputs[0]) or (found[0], *inputs[1:]))
    logits = lm(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1]).logits
    hook.remove()
    return ((head(found[0]) - logits).abs().max() / logits.abs().max()).item()


# ---- Maths -----------------------------------------------------------------------------------------------------------


def ilql_targets(rewards, next_values, not_done, gamma):
    """What Q(s, a) is regressed on: r + gamma V(s') where not_done, else r; no gradient. All of one shape."""
    return rewards + gamma * next_values.detach() * not_done


def expectile_loss(diff, tau):
    """|tau - 1[diff < 0]| diff^2 per action, diff = min Q^(s, a) - V(s): minimal where V is the tau-expectile of Q."""
    return torch.where(diff < 0, (1 - tau) * diff.square(), tau * diff.square())


def cql_loss(q_logits, actions):
    """log sum_b exp Q(s, b) - Q(s, a) per action: q_logits (..., V) are Q(s, .), actions (...)."""
    q_logits = q_logits.to(torch.promote_types(q_logits.dtype, torch.float32))
    return F.cross_entropy(q_logits.flatten(0, -2), actions.flatten(), reduction="none").view_as(actions)


def awac_loss(logits, actions, advantages, beta, clip=20.0):
    """-log pi(a | s) min(exp(beta A(s, a)), clip) per action; the weight has no gradient.

    logits (..., V), at least in float32; actions, advantages (...). beta 0 is plain imitation.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(logits.flatten(0, -2), actions.flatten(), reduction="none").view_as(actions)
    return nll * (beta * advantages.detach()).exp().clamp(max=clip)


@torch.no_grad()
def polyak_update(target, online, alpha):
    """target <- target + alpha (online - target), parameter by parameter: alpha is the weight of the online network."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, alpha)


def chosen_q(head, states, actions):
    """Q(s, a) (N,) of states (N, H) and actions (N,), from the rows of the last layer that the actions need."""
    last = head[-1]
    return (head[:-1](states) * F.embedding(actions, last.weight)).sum(-1) + last.bias[actions]


class ChunkedNLL(torch.autograd.Function):
    """weights * -log softmax(x weight^T + bias)[action] of rows x (N, H): (N,), with CHUNK logits at a time.

    The gradient is computed on the way forward, while the logits of a chunk are there, so that they neither stay nor
    are computed twice. It is right where all rows get the same gradient, as those of a sum or a mean do.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, actions, weights, training):
        trained = zip((x, weight, bias), ctx.needs_input_grad[:3], strict=True)
        dx, dweight, dbias = (torch.zeros_like(t) if need and training else None for t, need in trained)
        losses = torch.empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for rows in torch.arange(len(x), device=x.device).split(max(1, CHUNK // len(weight))):
            chosen = actions[rows, None]
            slopes = F.linear(x[rows], weight, bias)  # logits; one name, so that few of its size live at a time
            kind, slopes = slopes.dtype, slopes.to(losses.dtype).log_softmax(-1)
            losses[rows] = -slopes.gather(-1, chosen)[:, 0] * weights[rows]
            slopes = slopes.exp_().scatter_add_(-1, chosen, -torch.ones_like(slopes[:, :1]))
            slopes = slopes.mul_(weights[rows, None]).to(kind)
            if dx is not None:
                dx[rows] = (slopes @ weight).to(dx.dtype)
            if dweight is not None:
                dweight += slopes.T @ x[rows]
            if dbias is not None:
                dbias += slopes.sum(0)
        ctx.save_for_backward(dx, dweight, dbias)
        return losses

    @staticmethod
    def backward(ctx, gradient):
        if (gradient != gradient[0]).any():
            raise ValueError("ChunkedNLL: the rows must have equal gradients")
        return *(None if slope is None else slope * gradient[0] for slope in ctx.saved_tensors), None, None, None


def ilql_losses(policy, batch, args):
    """{name: (N,)} of losses and statistics, one number for each action of the batch. Those of Q are summed over the
    heads, as in trlX and the authors' code."""
    hidden, logits = hidden_states(policy.lm, batch.ids, batch.query_mask, logits=not policy.chunked_lm_head)
    rows, at = torch.arange(len(batch.ids), device=batch.ids.device)[:, None], batch.mask.nonzero(as_tuple=True)
    actions, not_done = batch.actions[at], batch.not_done[at]
    hidden = hidden[rows, batch.states]  # (B, A + 1, H)
    with torch.autocast(hidden.device.type, enabled=False):  # the heads keep float32
        states = hidden.to(policy.v_head[0].weight.dtype)
        values = policy.v_head(states)[..., 0]
        states, v, next_v = states[at], values[at], values[:, 1:][at]  # (N, H), (N,), (N,)
        q = torch.stack([chosen_q(head, states, actions) for head in policy.q_heads])
        with torch.no_grad():
            targets = torch.stack([chosen_q(head, states, actions) for head in policy.target_q_heads])
        target_q = targets.amin(0)
        advantages, rewards = target_q - v.detach(), batch.rewards[at].to(v.dtype)
        td_errors = q - ilql_targets(rewards, next_v, not_done, args.gamma)
    loss_q, loss_v = td_errors.square().sum(0), expectile_loss(target_q - v, args.tau)
    # the products with the vocabulary are most of the work: under autocast they have its type
    layer, weighting = policy.lm.get_output_embeddings(), (args.awac_beta, args.awac_clip)
    weights, training = (args.awac_beta * advantages).exp().clamp(max=args.awac_clip), torch.is_grad_enabled()
    chunked = len(actions) * policy.q_heads[0][-1].out_features > CHUNK
    if chunked:
        ones, lasts = torch.ones_like(weights), [(head[:-1](states), head[-1]) for head in policy.q_heads]
        loss_cql = sum(ChunkedNLL.apply(x, w.weight, w.bias, actions, ones, training) for x, w in lasts)
    else:
        loss_cql = sum(cql_loss(head(states), actions) for head in policy.q_heads)
    if logits is not None:
        loss_awac = awac_loss(logits[rows, batch.states][at], actions, advantages, *weighting)
    elif chunked:
        loss_awac = ChunkedNLL.apply(hidden[at], layer.weight, layer.bias, actions, weights, training)
    else:
        loss_awac = awac_loss(layer(hidden[at]), actions, advantages, *weighting)
    with torch.no_grad():
        error, end = td_errors.abs().mean(0), ~not_done
        statistics = v, q.mean(0), target_q, advantages, (q - targets).mean(0), weights
        statistics += v.square(), advantages.square(), error * end, error * not_done, end
    loss = loss_q + loss_v + args.cql_scale * loss_cql + args.awac_scale * loss_awac
    return dict(zip(TERMS, (loss, loss_q, loss_v, loss_cql, loss_awac, *statistics), strict=True))


TERMS = """loss loss_q loss_v loss_cql loss_awac values qvalues target_qvalues advantages target_gap awac_weight
squared_values squared_advantages end_errors inner_errors ends""".split()


def loss_metrics(sums, count):
    """The metrics of sums over TERMS and of the number of actions. target_gap: Q - Q^."""
    mean = dict(zip(TERMS, (sums / count).tolist(), strict=True))
    found = {f"losses/{name}": mean[name] for name in TERMS[:5]} | {f"{name}/mean": mean[name] for name in TERMS[5:11]}
    for name in ("values", "advantages"):
        found[f"{name}/std"] = max(0.0, mean[f"squared_{name}"] - mean[name] ** 2) ** 0.5
    found["td_error/end"] = mean["end_errors"] / mean["ends"] if mean["ends"] else 0.0
    found["td_error/inner"] = mean["inner_errors"] / (1 - mean["ends"]) if mean["ends"] < 1 else 0.0
    return found


def shape_logits(logits, q, v, beta, top_k=0, top_p=1.0, advantage_clip=None, forbidden=None):
    """log pi(a | s) + beta min(Q(s, a) - V(s), advantage_clip): the policy that ILQL samples from.

    logits, q: (..., V); v: (...). It is -inf where forbidden (..., V) is True, then outside the top_k likeliest tokens
    of pi (0: all), and outside the smallest set of them with probability top_p; at least in float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -math.inf)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    if top_p < 1:
        ranked, order = logits.softmax(-1).sort(descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= top_p  # the probability before a token already reaches top_p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    largest = math.inf if advantage_clip is None else advantage_clip
    return logits.log_softmax(-1) + beta * (q - v[..., None]).clamp(max=largest)


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


@dataclass
class Episode:
    """A row: its tokens, the places of those that are actions, the reward of each action, and whether it ended."""

    ids: list
    actions: list
    rewards: list
    done: bool


def encode_episodes(rows, tokenizer, max_length, flag, encoder=False):
    """(episodes of the rows that hold an action, report). See the top of this file for the forms of a row.

    An action is a token of an output, the end token included. A number is the reward of the last action, a list has one
    for the last token of each output. A truncated row loses its last end token, and what a chat template wrote behind.
    A row that is longer than max_length is cut before an action, so that it ends in a state where one is taken, and
    loses the rewards behind.
    """
    if "reward" not in rows[0]:
        raise InputError(f"{flag} row 1: 'reward' is missing among {list(rows[0])}")
    if rows[0].keys().isdisjoint(("messages", *FORMS)):
        plain = [{"prompt": "", "completion": text} for text in texts(rows, "text", flag)]
        rows = [new | {k: v for k, v in row.items() if k != "text"} for new, row in zip(plain, rows, strict=True)]
    encoded, episodes, cut = encode_pieces(rows, tokenizer, flag, encoder), [], 0
    for number, (row, (ids, begins)) in enumerate(zip(rows, encoded, strict=True), 1):
        where, truncated = f"{flag} row {number}", row.get("truncated")
        room, over = max_length, max(0, begins[1] - max_length) if encoder else 0
        if encoder:  # which reads the prompt, with its end token
            del ids[begins[1] - 1 - over : begins[1] - 1]
            begins = [0, *(begin - over for begin in begins[1:])]
            room += begins[1]
        if truncated not in (None, 0, 1):
            raise InputError(f"{where}: 'truncated' must be true or false, it is {truncated!r:.60}")
        last = begins[(len(begins) - 1) // 2 * 2 - 1]  # behind the last output a template with spans has more
        if truncated and tokenizer.eos_token_id in ids[last:]:
            ids = ids[: len(ids) - 1 - ids[::-1].index(tokenizer.eos_token_id)]
            begins = [min(begin, len(ids)) for begin in begins]
        outputs = [range(max(1, begins[i]), begins[i + 1]) for i in range(1, len(begins) - 1, 2)]
        given = row["reward"] if isinstance(row["reward"], list) else [0.0] * (len(outputs) - 1) + [row["reward"]]
        if not all(isinstance(r, Real) and abs(r) < 1e38 for r in given) or len(given) != len(outputs):
            form = f"a finite number, or a list of {len(outputs)}, one for each output"
            raise InputError(f"{where}: 'reward' must be {form}, it is {row['reward']!r:.60}")
        rewards = {output[-1]: float(reward) for output, reward in zip(outputs, given, strict=True) if output}
        actions, long = [place for output in outputs for place in output], len(ids) > room
        if actions and any(reward and not output for output, reward in zip(outputs, given, strict=True)):
            raise InputError(f"{where}: an output without tokens has a reward")
        if long:
            ids = ids[: max((place for place in actions if place <= room), default=0)]
        actions = [place for place in actions if place < len(ids)]
        cut += long or over > 0
        if actions:
            received = [rewards.get(place, 0.0) for place in actions]
            episodes.append(Episode(ids, actions, received, not (truncated or long)))
    if not episodes:
        raise InputError(f"{flag}: no row has an action left within --max-length {max_length}")
    counts, ended = sorted(len(e.actions) for e in episodes), sum(e.done for e in episodes)
    report = f"{len(rows)} rows, {cut} cut, {len(rows) - len(episodes)} dropped without an action left, {ended} ended"
    return episodes, f"{report}; actions of a row: {counts[0]} to {counts[-1]}, median {counts[len(counts) // 2]}"


def scale_rewards(episodes, mean, std):
    """Divides each reward by std, and takes mean / std from the last one of each episode that ended."""
    for episode in episodes:
        episode.rewards = [reward / std for reward in episode.rewards]
        episode.rewards[-1] -= episode.done * mean / std


@dataclass
class Batch:
    """Right-padded episodes; for an encoder-decoder their outputs all begin at the same place."""

    ids: torch.Tensor  # (B, T)
    query_mask: torch.Tensor | None  # (B, Q) bool, of the prompts that an encoder reads
    states: torch.Tensor  # (B, A + 1): the hidden state from which each action is taken, then the last of the row
    actions: torch.Tensor  # (B, A): ids
    rewards: torch.Tensor  # (B, A), float64
    mask: torch.Tensor  # (B, A): True where there is an action
    not_done: torch.Tensor  # (B, A): False at the last action of an episode that ended

    @classmethod
    def of(cls, episodes, pad, device, encoder=False):
        # the first token of a decoder, or the start token before the output, gives state 0
        begins = [e.actions[0] if encoder and e.actions else 1 for e in episodes]
        most = max(len(e.actions) for e in episodes)
        left = max(begins) if encoder else 1
        rows = [[pad] * (left - begin) + e.ids for begin, e in zip(begins, episodes, strict=True)]
        states = [[*(t - n for t in e.actions), len(e.ids) - n] for n, e in zip(begins, episodes, strict=True)]

        def stack(rows, width, fill, dtype):
            return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype, device=device)

        return cls(
            stack(rows, max(map(len, rows)), pad, torch.long),
            stack([[False] * (left - begin) for begin in begins], left, True, torch.bool) if encoder else None,
            stack(states, most + 1, 0, torch.long),
            stack([[e.ids[t] for t in e.actions] for e in episodes], most, pad, torch.long),
            stack([e.rewards for e in episodes], most, 0.0, torch.float64),
            stack([[True] * len(e.actions) for e in episodes], most, False, torch.bool),
            stack([[not e.done or t < e.actions[-1] for t in e.actions] for e in episodes], most, False, torch.bool),
        )


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
def evaluate_losses(accelerator, model, episodes, args, pad):
    """The losses of the whole set, the same for any batch size and number of processes."""
    world, rank = accelerator.num_processes, accelerator.process_index
    share = math.ceil(len(episodes) / world)
    empty = Episode(episodes[0].ids, [], [], True)  # every process runs the same number of forwards
    local = sorted((episodes[rank::world] + [empty])[:share], key=lambda episode: len(episode.ids))
    encoder = getattr(model, "module", model).lm.config.is_encoder_decoder
    sums = torch.zeros(6, dtype=torch.float64, device=accelerator.device)
    for i in range(0, share, args.micro_batch_size):
        batch = Batch.of(local[i : i + args.micro_batch_size], pad, accelerator.device, encoder)
        terms = model(batch, args)
        sums += torch.stack([*(terms[name].double().sum() for name in TERMS[:5]), batch.mask.sum()])
    *sums, count = accelerator.reduce(sums).tolist()
    return {name: total / count for name, total in zip(TERMS[:5], sums, strict=True)}


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
    logit_mask = build(args.logit_mask, "--logit-mask")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset") if args.eval_dataset else {}
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
    pad, limit = tokenizer.pad_token_id, getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    policy = PolicyWithQ(lm, args.two_qs, args.seed)
    if (folder := spec_path(path)) and (folder / "ilql_heads.safetensors").exists():
        policy.load_heads(folder)
    kinds = {weight.dtype for weight in policy.parameters() if weight.requires_grad}
    if accelerator.is_fsdp2 and len(kinds) > 1 and accelerator.mixed_precision == "no":
        raise InputError("--dtype bfloat16: FSDP2 trains one type, and heads are float32: add --mixed-precision bf16")
    if logit_mask is not None:
        if encoder:
            raise InputError("--logit-mask is not for encoder-decoders")
        size = lm.get_output_embeddings().weight.shape[0]
        try:
            logit_mask = torch.as_tensor(logit_mask)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--logit-mask {args.logit_mask!r:.60} is no matrix or file.py:function: {error}"
            ) from None
        if logit_mask.dtype != torch.bool or logit_mask.shape != (size, size):
            found = f"{logit_mask.dtype} of shape {[*logit_mask.shape]}"
            raise InputError(
                f"--logit-mask must be bool of shape {[size, size]}, the model's vocabulary; it is {found}"
            )
    max_length = min(args.max_length, limit or args.max_length)
    episodes, report = encode_episodes(rows, tokenizer, max_length, "--dataset", encoder)
    for prefix, found in eval_sets.items():
        flag = f"--eval-dataset {prefix[5:-1]}".strip()
        eval_sets[prefix] = encode_episodes(found, tokenizer, max_length, flag, encoder)[0]
    if metric:
        sampling = tokenizer, args.max_new_tokens, limit
        prompts, queries = encode_prompts(prompts, *sampling, "--eval-prompts", encoder=encoder)
    returns, all_end = [sum(e.rewards) for e in episodes], all(e.done for e in episodes)
    mean_return, std_return = fmean(returns), stdev(returns) if len(returns) > 1 else 0.0
    std_return *= std_return > 1e-9 * max(map(abs, returns))  # else it is rounding
    for members in [episodes, *eval_sets.values()] if args.normalize_rewards else []:
        scale_rewards(members, all_end * mean_return, std_return or 1.0)  # the mean belongs to the end
    total_steps = args.total_steps or math.ceil(args.epochs * len(episodes) / args.batch_size)
    error = lm_head_error(lm, torch.tensor([episodes[0].ids[:64]], device=lm.device))
    policy.chunked_lm_head = error < 1e-4 and type(lm.get_output_embeddings()) is nn.Linear

    # ---- run directory, device, what to continue from
    lengths = sorted(len(e.ids) for e in episodes)
    set_attention(lm, args, device, lengths[-1])
    threads = set_threads(args.threads)
    run = Run("ilql", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    if run.state:  # another number of threads gives other bits
        threads = set_threads(args.threads or run.state["threads"])
    optimizer = make_optimizer(policy, args)
    model = accelerator.prepare(policy, optimizer)[0]  # FSDP2 gives shards to both
    frozen = frozen_weights(lm)
    best_score, best_step = (run.state["best_score"], run.state["best_step"]) if run.state else (None, None)
    if run.checkpoint:
        unpack_state(run.checkpoint, run.state, model, optimizer, frozen)
    if run.begun >= total_steps and not (run.dir / "metrics.jsonl").exists():
        raise InputError(f"--resume {args.resume}: nothing is left to train; raise --total-steps")
    eval_every = args.eval_every if eval_sets or metric else 0
    if not policy.chunked_lm_head:
        run.say(f"all logits are computed at once: the model changes those of its output layer by {error:.1e}")
    if args.normalize_rewards and std_return == 0:
        run.say("warning: all returns are equal (rows that are cut lose theirs): little is to be learnt but to imitate")
    first, shown = episodes[0], ""
    for action, places in itertools.groupby(range(len(first.ids)), lambda place: place in first.actions):
        text = visible(tokenizer.decode([first.ids[place] for place in places]))
        shown += text if action else f"[{text}]"
    scaled = f", scaled to {'0' if all_end else 'any mean'} +- 1"
    run.say(
        f"ilql: {sum(w.numel() for w in policy.parameters()):,} parameters, "
        f"{sum(w.numel() for w in policy.parameters() if w.requires_grad):,} trained; "
        f"{args.dtype}, {accelerator.mixed_precision} autocast, {device}, {world} processes x {threads} threads\n"
        f"data: {report}; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; return "
        f"{mean_return:.4g} +- {std_return:.4g}{scaled * args.normalize_rewards}\n"
        f"first row, [not actions]: {shown[:800]}; its return, as used: {sum(first.rewards):.4g}\n"
        f"{total_steps} steps x {args.batch_size} rows = {total_steps * args.batch_size / len(episodes):.1f} epochs; "
        f"each step {args.batch_size // world} rows a process, at most {args.micro_batch_size} a forward pass"
        f"{f'; stops: {list(args.stop)}' if args.stop else ''}"
    )
    shaping, decoding = {"advantage_clip": args.advantage_clip, "logit_mask": logit_mask}, copy.copy(args)
    if args.filter == "base":  # `guided` filters, not `draw`
        shaping |= {"top_k": args.top_k, "top_p": args.top_p}
        decoding.top_k, decoding.top_p = 0, 1.0

    def score(rows, outputs, output_ids):
        return on_main(accelerator, call_metric, metric, args.metric, tokenizer, rows, outputs, output_ids)

    @unsharded(model)
    def evaluate(step):
        model.eval()
        metrics, samples = {}, []
        for beta in args.betas if metric else ():
            with policy.guided(beta, **shaping):
                found, sampled = evaluate_samples(accelerator, lm, tokenizer, prompts, queries, score, decoding)
            metrics |= {f"eval/{key}@beta={beta:g}": value for key, value in found.items()}
            samples.append([{"beta": beta} | row for row in sampled])
        for prefix, members in eval_sets.items():
            found = evaluate_losses(accelerator, model, members, args, pad)
            metrics |= {prefix + key: value for key, value in found.items()}
        if samples:
            run.samples(step, [row for betas in zip(*samples, strict=True) for row in betas])
        return metrics

    def headline(metrics):  # what chooses the best model: the first metric with the last beta, or a loss
        last = f"@beta={args.betas[-1]:g}" if metric else f"{next(iter(eval_sets), '')}loss"
        return next((key for key in metrics if key.startswith("eval/") and key.endswith(last)), "losses/loss")

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
        rows = stream_rows(args.seed, "data", len(episodes), (step - 1) * args.batch_size, args.batch_size)
        count = sum(len(episodes[row].actions) for row in rows)  # of all processes
        local = sorted((episodes[row] for row in rows[accelerator.process_index :: world]), key=lambda e: len(e.ids))
        micro_batches = [local[i : i + args.micro_batch_size] for i in range(0, len(local), args.micro_batch_size)]
        # 2. losses of Q, V, CQL and imitation, means over the actions, and the gradient of their weighted sum
        sums = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            with nullcontext() if last else accelerator.no_sync(model):
                terms = model(Batch.of(micro_batch, pad, device, encoder), args)
                # data-parallel training averages gradients over the processes, hence the factor world
                accelerator.backward(terms["loss"].sum() * world / count)
            sums += torch.stack([terms[name].detach().double().sum() for name in TERMS])
        # 3. a step of AdamW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step - 1, total_steps)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        metrics = loss_metrics(accelerator.reduce(sums), count)
        if not (math.isfinite(metrics["losses/loss"]) and grad_norm.isfinite()):
            bad = f"step {step}: loss {metrics['losses/loss']}, gradient norm {grad_norm}, rows {rows}"
            raise FloatingPointError(f"{bad}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
        # 4. Q^ <- Q^ + alpha (Q - Q^)
        if step % args.steps_for_target_q_sync == 0:
            polyak_update(policy.target_q_heads, policy.q_heads, args.alpha)
        # 5. evaluate, log, save
        seconds, tokens = time.perf_counter() - begun, sum(len(episodes[row].ids) for row in rows)
        metrics |= {"target/syncs": step // args.steps_for_target_q_sync, "tokens/actions": count}
        metrics |= {"train/epoch": step * args.batch_size / len(episodes)}
        metrics |= {"optim/lr": group["lr"], "optim/grad_norm": grad_norm.item()}
        perf = {"perf/seconds_update": seconds, "perf/tokens_per_sec": tokens / seconds}
        if eval_every and (step % eval_every == 0 or step == total_steps):
            metrics |= evaluate(step)
            new_score = metrics[headline(metrics)] if metric else -metrics[headline(metrics)]
            if best_score is None or new_score > best_score:
                best_score, best_step = new_score, step
                heads = {"ilql_heads.safetensors": policy.head_weights()}
                run.export(to_export(lm, args), tokenizer, "hf_model_best", heads)
        run.log(step, metrics, perf)
        text = " | ".join(f"{name} {metrics[f'losses/{name}']:.4f}" for name in ("loss", "loss_q", "loss_v"))
        run.status(step, total_steps, f"{text} | {seconds:.2f} s")
        stop = run.stop_requested()
        if stop or step in (best_step, total_steps) or (args.save_every and step % args.save_every == 0):
            run.save(step, *pack_state(model, optimizer, frozen, best_score=best_score, best_step=best_step))
        if stop:
            run.exit(step)

    # ---- export
    run.export(to_export(lm, args), tokenizer, "hf_model", {"ilql_heads.safetensors": policy.head_weights()})
    title = f"{run.identity['flags']['model']} after ILQL on {run.identity['flags']['dataset']}"
    off = {"top_k": 0, "top_p": 1.0, "advantage_clip": None}
    options = {"beta": args.betas[-1]} | {k: shaping[k] for k in off if shaping.get(k, off[k]) != off[k]}
    usage = USAGE.replace("OPTIONS", ", ".join(f"{name}={value:g}" for name, value in options.items()))
    prompt = tokenizer.decode(first.ids[: first.actions[0]])
    metrics = run.finish(headline(run.newest_metrics()), title, prompt, usage)
    accelerator.end_training()
    return metrics, run.dir


USAGE = """from transformers import AutoTokenizer; from algos.ilql import PolicyWithQ  # of this repository
tokenizer, policy = AutoTokenizer.from_pretrained({folder!r}), PolicyWithQ.load({folder!r})
inputs = tokenizer({prompt!r}, add_special_tokens=False, return_tensors='pt')
with policy.guided(OPTIONS):
    ids = policy.lm.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=20)
print(tokenizer.decode(ids[0]))"""

if __name__ == "__main__":
    cli(Args, main)
