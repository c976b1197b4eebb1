"""Proximal policy optimisation (PPO) of a language model against a reward (RLHF).

Papers: PPO, Schulman et al. 2017 (arXiv 1707.06347); GAE, Schulman et al. 2016 (arXiv 1506.02438); the KL-penalised
reward and its controller, Ziegler et al. 2019 (arXiv 1909.08593); details, Huang et al. 2024 (arXiv 2403.17031).
Code of Ziegler et al., whose choices this follows where the papers are silent:
https://github.com/openai/lm-human-preferences/blob/f774e89b9e3762a03b7f3953189861979bee1775/lm_human_preferences/train_policy.py

    r_t = -beta KL_t, plus the score at the last token     Ziegler Eq. 2            token_rewards, kl_penalty
    A_t = sum_l (gamma lam)^l delta_{t+l}                  GAE Eq. 16               gae, masked_whiten
    max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))        PPO Eq. 7                policy_loss
    squared error of the clipped value                     code of Ziegler et al.   value_loss
    beta <- beta (1 + clip(KL / target - 1) n / horizon)   Ziegler Sec. 2.2         next_kl_coef

How this differs from TRL's and trlX's PPO:
- One function, `score_tokens`, gives the log-probabilities of rollout, reference and update, temperature included, so
  the first ratio is 1. Sampled ids are kept, never decoded and tokenised again.
- Whitening, KL and loss are over the response tokens of the global batch: neither micro-batches, processes nor padding
  change them. The score is placed on the last sampled token (the end token where there is one), which is trained.
- The reward is any Python function of the texts, or a sequence classifier, or the LoRA adapter of one, which shares the
  base of a policy with adapters.
- Encoder-decoders run through the same lines (`Seq2Seq`). The reference of LoRA adapters is the policy without them,
  or, where a --model that is an adapter is trained further, as it came.
- `--num-layers-unfrozen k`: the reference shares the frozen blocks, and what these return while sampling is kept for
  all scores and updates (`Trunk`). trlX ran them again for each; TRL's shared layers shared no memory.

    accelerate launch algos/ppo.py                                 # random walks on a CPU, first use under two minutes
    accelerate launch algos/ppo.py --model my_model/ --dataset prompts.jsonl --reward my_reward.py:score \
        --lr 1e-5 --vf-coef 0.1 --max-new-tokens 32 --num-layers-unfrozen 2
    accelerate launch algos/ppo.py --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head     # with adapters
    torchrun --nproc_per_node 8 algos/ppo.py --model Qwen/Qwen3-0.6B --dataset org/prompts:train \
        --reward my_reward.py:score

Dimension key: B episodes, Q query (prompt) tokens, R response tokens, T = Q + R, V vocabulary, H hidden size.
"""

import copy
import ctypes
import inspect
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from common.checkpoint import InputError, build, cli, load_function, pack_state, spec_path, stop_if, unpack_state
from common.logging import USAGE, Run, closes_run, frozen_weights, on_main, visible
from common.seeding import fast_cpu_matmul, rng, seed_libraries, set_threads, stream_rows, uniforms

TASK = "benchmarks/tasks/randomwalks.py"


@dataclass
class Args:
    """Proximal policy optimisation of a language model."""

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
    eval_every: int = 40
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
    cache_trunk: bool = True
    """Keep what the frozen blocks return while sampling (episodes x tokens x hidden size, on every process), so that
    scores and updates run the top blocks only; the result is the same to rounding. Off with --bootstrap-truncated, and
    for encoder-decoders."""
    value_head: Literal["linear", "mlp"] = "mlp"
    """Head on the policy's last hidden states: one linear layer, or H -> 2H -> ReLU -> 1. A --model directory with a
    value head brings its own."""
    value_head_init: Literal["zeros", "normal", "default"] = "default"
    """Last layer of a new head: zeros, N(0, 0.2) with bias 0, or torch's default."""
    detach_value_trunk: bool = False
    """The value loss trains the value head alone, not the policy's blocks."""
    dataset: str = f"{TASK}:prompts"
    """Rows with a prompt, text or chat messages (other columns reach the reward): a file, hub id:split,
    file.py:function; from Python a list."""
    eval_dataset: str | None = "auto"
    """Evaluation rows in the forms of --dataset, several sets joined by commas or as a mapping of names; auto: the
    embedded task's; default: in ppo the first --rollout-batch-size rows of --dataset, in sft none."""
    reward: str = "auto"
    """file.py:function(samples, prompts, outputs, **columns) -> a number per sample, or a list of one per token; or the
    directory or hub id of a sequence classifier, with :label if it has several, or of the LoRA adapter of one; auto:
    the embedded task's (your own --dataset needs your own)."""
    metric: str | None = "auto"
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}; auto: the embedded task's, or none."""
    max_prompt_length: int | None = None
    """Drop (in dpo: cut by --truncation-mode) and count prompts of more tokens. Without it, in ppo a prompt that does
    not fit the model is an error."""

    # ---- optimizer
    lr: float = 6e-4
    """Peak learning rate of AdamW (pretrained models: 2e-5 in sft, 1e-5 in ppo, reward, ilql and ddpo, or 3e-4 in ddpo
    with LoRA, 1e-6 in dpo)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up."""
    lr_final: float = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    adam_eps: float = 1e-5
    """Epsilon of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: int = 512
    """Rows per optimizer step, all processes together."""
    micro_batch_size: int = 128
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- algorithm
    total_episodes: int = 20480
    """Length of the run: episodes (a prompt with its response) over all iterations."""
    rollout_batch_size: int = 512
    """Episodes of an iteration, all processes together."""
    ppo_epochs: int = 4
    """Passes over the episodes of an iteration."""
    kl_coef: float = 0.05
    """Weight beta of the per-token KL penalty (Ziegler et al. 2019, Eq. 2); 0 turns it off."""
    kl_kind: Literal["kl", "abs", "mse", "k3"] = "kl"
    """Estimator in the penalty, of x = logprob - ref_logprob: x, |x|, x^2 / 2, or exp(-x) - 1 + x."""
    kl_target: float | None = None
    """Adapt --kl-coef so that the KL of a sequence (objective/kl) approaches this; default: a fixed coefficient."""
    kl_horizon: int = 10000
    """Episodes over which the adaptive coefficient moves."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of GAE."""
    cliprange: float = 0.2
    """Epsilon of the clipped policy loss (PPO Eq. 7)."""
    cliprange_value: float = 0.2
    """Clip of the value's change, in units of the reward; 0 turns it off."""
    score_scaling: Literal["none", "running", "running-norm", "ref", "ref-norm"] = "none"
    """Divide scores by the standard deviation of all scores so far (running) or of the first rollout's (ref); -norm
    subtracts their mean before."""
    score_clip: float = 0.0
    """Clip scores, after scaling, to [-this, this]; 0: never."""
    missing_eos_penalty: float = 0.0
    """Subtract this from the score of a response that ends with neither end token nor --stop."""
    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation; the mean stays."""
    bootstrap_truncated: bool = False
    """GAE continues with the value of the last state where a response was cut off; else it counts as ended."""
    early_stop_kl: float = 0.0
    """End an iteration's PPO epochs once the mean policy/approxkl of one exceeds this; 0: never."""
    ratio_threshold: float = 0.0
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10); 0: never."""
    vf_coef: float = 10.0
    """Weight of the value loss. The advantages are whitened and returns are not: 10 suits rewards in [0, 1], larger
    rewards or penalties need less, or the value loss takes over the shared trunk."""

    # ---- sampling
    max_new_tokens: int = 9
    """Longest response, in tokens."""
    min_length_limit: int | None = None
    """Draw the longest length of each rollout response uniformly from this to --max-new-tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, which keeps (and in ppo trains) the tokens through the one that completes the
    string. Reward and metric see the text before it, without trailing space."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; log-probabilities are those of the tempered distribution."""
    eval_temperature: float = 1.0
    """Sampling temperature of evaluations; 0: greedy."""
    top_k: int = 0
    """Evaluations sample from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Evaluations sample from the smallest set of tokens with this probability; 1: from all."""
    decode_batch_size: int = 1024
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    def __post_init__(self):
        own = self.dataset != f"{TASK}:prompts"
        for name, embedded in {"eval_dataset": "eval_prompts", "reward": "reward", "metric": "metric"}.items():
            if getattr(self, name) == "auto":
                setattr(self, name, None if own else f"{TASK}:{embedded}")
        given = {name: value for name, value in vars(self).items() if value is not None}
        known, size, step = ("auto", "eager", "sdpa", "flash_attention_2"), self.rollout_batch_size, self.batch_size
        longest, moves = self.max_new_tokens, self.kl_coef > 0 and self.kl_horizon >= size  # what --kl-target needs
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every", "top_k")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        positive = ("lr", "temperature", "lora_alpha")
        rules += [(name, 0 < given.get(name, 1) < 1e9, "a positive number") for name in positive]
        rules += [(name, 0 <= getattr(self, name) <= 1, "in [0, 1]") for name in ("gamma", "lam")]
        rules += [
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("attn_implementation", self.attn_implementation in known, f"one of {', '.join(known)}"),
            ("reward", self.reward, "file.py:function or a classifier for your own --dataset"),
            ("rollout_batch_size", size % max(1, step) == 0, f"a multiple of --batch-size {step}"),
            ("total_episodes", self.total_episodes % max(1, size) == 0, f"a multiple of --rollout-batch-size {size}"),
            ("min_length_limit", (self.min_length_limit or 0) <= longest, f"at most --max-new-tokens {longest}"),
            ("num_layers_unfrozen", self.num_layers_unfrozen >= -1, "-1 or more"),
            ("num_layers_unfrozen", self.num_layers_unfrozen == -1 or not self.lora_r, "-1 with --lora-r"),
            ("lora_alpha", self.lora_alpha is None or self.lora_r, "given with --lora-r"),
            ("lora_targets", self.lora_r or tuple(self.lora_targets) == ("all-linear",), "given with --lora-r"),
            ("merge", not (self.merge and self.load_in_4bit), "off with --load-in-4bit"),
            ("load_in_4bit", not self.load_in_4bit or self.dtype != "float64", "off with --dtype float64"),
            ("ratio_threshold", self.ratio_threshold == 0 or self.ratio_threshold > 1, "0 or more than 1"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("push_to_hub", "/" in (self.push_to_hub or "/"), "org/name"),
            ("kl_target", self.kl_target is None or 0 < self.kl_target < math.inf and moves, KL_TARGET),
        ]
        bad = [(name.replace("_", "-"), getattr(self, name), rule) for name, holds, rule in rules if not holds]
        stop_if([f"--{flag} {value} must be {rule}" for flag, value, rule in bad])


KL_TARGET = "positive, with --kl-coef positive and --kl-horizon >= --rollout-batch-size"
AT_LEAST_ONE = """threads decay_steps max_prompt_length keep_checkpoints batch_size micro_batch_size max_new_tokens
decode_batch_size total_episodes rollout_batch_size ppo_epochs kl_horizon min_length_limit""".split()
ZERO_OR_MORE = """lora_r lr_final warmup_steps adam_eps weight_decay max_grad_norm eval_temperature kl_coef cliprange
cliprange_value vf_coef score_clip missing_eos_penalty early_stop_kl ratio_threshold""".split()


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


class PolicyWithValue(nn.Module):
    """A language model `lm` with a scalar `value_head` on the hidden states that its output embedding reads."""

    def __init__(self, lm, kind="linear", init="zeros", seed=0, detach_value_trunk=False):
        super().__init__()
        self.detach_value_trunk = detach_value_trunk
        self._no_split_modules = lm._no_split_modules  # accelerate shards by these blocks
        width = lm.get_output_embeddings().weight.shape[1]
        layers = [nn.Linear(width, 1)]
        if kind == "mlp":
            layers = [nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1)]
        self.lm, self.value_head = lm, nn.Sequential(*layers).to(torch.promote_types(lm.dtype, torch.float32))
        for i, (name, weight) in enumerate(self.value_head.named_parameters()):
            bound = layers[int(name[0])].in_features ** -0.5  # torch's default, but keyed: the same on every process
            values = torch.from_numpy(rng(seed, "value_head", i).uniform(-bound, bound, weight.shape))
            if name.startswith(str(len(layers) - 1)) and init != "default":
                values = torch.from_numpy(rng(seed, "value_head", i).normal(0.0, 0.2, weight.shape))
                values *= init == "normal" and weight.ndim > 1
            weight.data.copy_(values)

    def forward(self, *inputs, **options):
        options |= {"value_head": self.value_head, "detach_value_trunk": self.detach_value_trunk}
        return score_tokens(self.lm, *inputs, **options)

    @classmethod
    def load(cls, directory, **options):
        """The exported model of a run, `<run>/hf_model`, with its head. options: those of from_pretrained."""
        kind = lm_class(str(directory), **options)
        model = cls(as_decoder(kind.from_pretrained(directory, **options)))
        model.load_value_head(directory)
        return model

    def load_value_head(self, directory):
        try:
            weights = safetensors.torch.load_file(Path(directory) / "value_head.safetensors")
            kind = "mlp" if len(weights) == 4 else "linear"
            self.value_head = PolicyWithValue(self.lm, kind).value_head.to(self.lm.device)
            self.value_head.load_state_dict(weights)
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise InputError(f"{directory}/value_head.safetensors does not fit the model: {error}") from None


class Trunk:
    """The lowest `depth` blocks of the policy, which are frozen and shared by its reference: what the last of them
    returns is recorded while sampling, and played back instead of running them for all scores and in every update.

    Everything but these blocks is the model's own forward. Where they return several vectors a token (Gemma 3n), or the
    top blocks read more of them than their output, they are run in every pass. depth 0: no effect.
    """

    def __init__(self, depth, checked=False):
        self.depth, self.in_tuple, self.checked = depth, False, checked

    @contextmanager
    def record(self, lm):
        """Yields a list into which the forward passes within put what the last frozen block returns."""
        recorded = []

        def keep(block, inputs, output):
            self.in_tuple = isinstance(output, tuple)  # blocks of some architectures return a tuple
            recorded.append(output[0] if self.in_tuple else output)

        hook = blocks(lm)[self.depth - 1].register_forward_hook(keep) if self.depth else None
        try:
            yield recorded
        finally:
            if hook:
                hook.remove()

    def states(self, recorded, response_mask, decode_batch_size):
        """(B, Q + R - 1, H) from what `sample` did to the rows of response_mask (B, R): the queries of some rows, then
        token by token those rows that go on, then the next rows. None without a trunk."""
        states = []
        for mask in response_mask.split(decode_batch_size) if self.depth else ():
            states.append(F.pad(recorded.pop(0), (0, 0, 0, mask.shape[1] - 1)))
            queries = states[-1].shape[1] - mask.shape[1]
            for t in range(1, int(mask.any(0).sum())):
                states[-1][mask[:, t], queries + t] = recorded.pop(0)[:, 0]
        return torch.cat(states) if self.depth else None

    @contextmanager
    def play(self, lm, hidden):
        """Within it the frozen blocks of lm return hidden (B, T, H) without running; None: they run."""
        frozen = [] if hidden is None else blocks(lm)[: self.depth]
        for block in frozen:
            block.forward = lambda *_, **__: (hidden,) if self.in_tuple else hidden
        try:
            yield
        finally:
            for block in frozen:
                del block.forward


class RewardModel:
    """A sequence classifier, or the LoRA adapter of one, as the reward: the logit of its only label, or of the one
    named in `path:label`. Weights that the policy lm has and does not train are shared with it."""

    def __init__(self, args, lm):
        name, _, label = (args.reward, "", "") if spec_path(args.reward) else args.reward.partition(":")
        own, flag, path = copy.copy(args), f"--reward {args.reward}", str(spec_path(name) or name)
        own.tokenizer = None  # that flag is about --model
        own.load_in_4bit &= bool(adapter_base(path))
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1} if adapter_base(path) else {}
        self.model, self.tokenizer, missing = load_pretrained(kind, own, name, "--reward", **options)
        labels = {name: number for number, name in self.model.config.id2label.items()}
        problems = [f"{flag} is no sequence classifier, it has no {key}" for key in missing[:1]]
        if not problems and label not in labels and (label or len(labels) > 1):
            problems.append(f"{flag} must end with the label to score, one of :{', :'.join(labels)}")
        stop_if(problems)
        self.label, self.model = labels.get(label, 0), self.model.requires_grad_(False).eval().to(lm.device)
        self.norm = getattr(self.model.config, "reward_norm", {"gain": 1.0, "bias": 0.0})  # of reward.py
        quiet = {f"_raise_exceptions_for_{error}": False for error in ("missing_entries", "connection_errors")}
        if adapter_base(path) and (norm := cached_file(path, "reward_norm.safetensors", **quiet)):
            self.norm = {key: value.item() for key, value in safetensors.torch.load_file(norm).items()}
        self.shared = share_frozen(self.model, lm)
        self.own = sum(weight.numel() for weight in self.model.parameters()) - self.shared
        self.tokenizer.truncation_side = "left"
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", 10**9)
        self.limit = min(limit, self.tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, samples, ended, batch_size):
        """Scores (B,) of the texts; too long ones lose their beginning."""
        encoded = classifier_ids(self.tokenizer, samples, ended, self.limit)
        scores = torch.empty(len(encoded), dtype=torch.float64, device=self.model.device)
        for rows in torch.tensor([len(ids) for ids in encoded]).argsort(stable=True).split(batch_size):
            logits = classifier_logits(self.model, [encoded[row] for row in rows])[:, self.label]
            scores[rows.to(scores.device)] = logits.double() * self.norm["gain"] + self.norm["bias"]
        return scores


def share_frozen(model, lm):
    """Lets model use the memory of the frozen weights of lm that it has under the same name, bit for bit; returns how
    many numbers these are. Adapters leave a weight its name, but for `base_layer`."""
    frozen = {n.replace(".base_layer", ""): w for n, w in lm.named_parameters() if not w.requires_grad}
    shared = 0
    for name, weight in model.named_parameters():
        twin = frozen.get(name.replace(".base_layer", ""))
        if twin is not None and twin.dtype == weight.dtype and torch.equal(twin, weight):
            weight.data, shared = twin.data, shared + weight.numel()
    return shared


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


# ---- Maths -----------------------------------------------------------------------------------------------------------


def token_logprobs(logits, ids):
    """log softmax(logits)[id] per token: logits (..., V), ids (...)."""
    return -F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none").view_as(ids)


def score_tokens(
    lm, query, query_mask, response, response_mask, temperature=1.0, value_head=None, detach_value_trunk=False,
    entropy=False,
):  # fmt: skip
    """The one scoring function of rollout, reference and update: (logprobs, values, entropies), each (B, R) or None.

    query (B, Q) is left-padded, response (B, R) right-padded; masks are True where a token counts. A log-probability is
    that of the distribution sampled from: log softmax(logits / temperature), at least in float32. values[:, t] is the
    value of the state before response token t.
    """
    seen = response_mask.flip(1).cumsum(1).flip(1) > 0  # through the last token that counts: holes are attended to
    tokens, attention = torch.cat([query, response], 1)[:, :-1], torch.cat([query_mask, seen], 1)[:, :-1].long()
    positions, hidden = (attention.cumsum(1) - 1).clamp(min=0), []

    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions, "use_cache": False}
        logits = lm(**inputs, logits_to_keep=response.shape[1]).logits  # (B, R, V)
    finally:
        hook.remove()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    values = entropies = None
    if value_head is not None:
        with torch.autocast(query.device.type, enabled=False):  # the head keeps float32 under mixed precision
            states = hidden[0].detach() if detach_value_trunk else hidden[0]
            values = value_head(states.to(next(value_head.parameters()).dtype))[..., 0]
    if entropy:
        entropies = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return token_logprobs(logits, response), values, entropies


def kl_penalty(logprobs, ref_logprobs, kind):
    """Per-token estimate of KL(policy || reference) from samples of the policy: kl (k1), abs, mse (k2) or k3.

    Any shape. k1, k2, k3: http://joschu.net/blog/kl-approx.html; k1 and k3 are unbiased for samples of the policy.
    """
    x = logprobs - ref_logprobs
    return {"kl": lambda: x, "abs": x.abs, "mse": lambda: x.square() / 2, "k3": lambda: (-x).expm1() + x}[kind]()


def token_rewards(scores, kl, mask, kl_coef):
    """r_t = -kl_coef kl_t, plus the score: on the last token that counts for scores (B,), token by token for (B, R).

    kl, mask: (B, R). Zero where mask is False. A row without tokens gets no score. Source: Ziegler et al. 2019, Eq. 2.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    if scores.ndim == 2:
        return rewards + torch.where(mask, scores, 0.0)
    later = mask.flip(1).cumsum(1).flip(1)  # tokens that count from here on; 1 at the last one
    return rewards + torch.where(mask & (later == 1), scores[:, None], 0.0)


def shape_scores(scores, mask, truncated, moments, args):
    """(token scores as trained on, moments): scaled, centred, clipped, less the penalty of truncated responses.

    scores, mask: (B, R), truncated: (B,) True without end token or stop string. moments: count, mean and sum of squared
    deviations of the rows' summed scores so far. The mean is subtracted at the last token. Fewer than two different
    scores are not scaled.
    """
    count, mean, squares = moments
    last = (mask & (mask.flip(1).cumsum(1).flip(1) == 1)).to(scores.dtype)
    if args.score_scaling.startswith("running") or count == 0:
        sums = scores.double().sum(1)
        delta, total = sums.mean().item() - mean, count + len(sums)
        squares += (sums - sums.mean()).square().sum().item() + delta**2 * count * len(sums) / total
        count, mean = total, mean + delta * len(sums) / total
    if args.score_scaling != "none":
        std = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
        centred = scores - mean * last if args.score_scaling.endswith("norm") else scores
        scores = centred / (std if std > 1e-8 * max(1.0, abs(mean)) else 1.0)
    scores = scores.clamp(-args.score_clip, args.score_clip) if args.score_clip else scores
    return scores - args.missing_eos_penalty * last * truncated[:, None], [count, mean, squares]


def gae(rewards, values, mask, gamma, lam, last_value=None):
    """A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t, over the tokens that count.

    rewards, values, mask: (B, R); mask may have holes, which are taken out first, so that the token after a hole
    follows the one before it. last_value (B,): the value after the last token, for truncated responses; default 0.
    Returns (advantages, returns = advantages + values), both (B, R) and zero where mask is False.
    Source: Schulman et al. 2016, Eq. 16.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)  # tokens that count come first
    kept = mask.gather(1, order)
    r, v = (torch.where(kept, x.gather(1, order), 0.0) for x in (rewards, values))
    next_v = F.pad(v[:, 1:], (0, 1))
    if last_value is not None:
        ends = kept & ~F.pad(kept[:, 1:], (0, 1))
        next_v = torch.where(ends, last_value[:, None], next_v)
    deltas, advantages = torch.where(kept, r + gamma * next_v - v, 0.0), torch.zeros_like(v)
    running = torch.zeros_like(v[:, 0])
    for t in reversed(range(v.shape[1])):
        advantages[:, t] = running = deltas[:, t] + gamma * lam * running
    returns = torch.where(kept, advantages + v, 0.0)
    return tuple(torch.zeros_like(x).scatter(1, order, x) for x in (torch.where(kept, advantages, 0.0), returns))


def masked_whiten(x, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) over the elements that count, with the biased variance; zero elsewhere.
    shift_mean=False adds the mean back. x is the global batch, so the statistics are global.
    Source: code of Ziegler et al., see the top."""
    kept = x[mask]
    white = (kept - kept.mean()) * (kept.var(correction=0) + 1e-8).rsqrt()
    return torch.zeros_like(x).masked_scatter(mask, white if shift_mean else white + kept.mean())


def policy_loss(new_logprobs, logprobs, advantages, cliprange):
    """max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange)), ratio = exp(new_logprobs - logprobs); unreduced, any
    shape. Source: Schulman et al. 2017, Eq. 7."""
    ratio = (new_logprobs - logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))


def value_loss(new_values, values, returns, cliprange_value):
    """max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within cliprange_value of the old value (0: not clipped);
    unreduced, any shape. Source: code of Ziegler et al., see the top."""
    error = (new_values - returns).square()
    if cliprange_value > 0:
        clipped = new_values.clamp(values - cliprange_value, values + cliprange_value)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def next_kl_coef(kl_coef, kl, target, horizon, n):
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after n episodes of mean sequence KL `kl`.

    Source: Ziegler et al. 2019, Sec. 2.2. n <= horizon keeps beta positive.
    """
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


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


def call_reward(function, name, tokenizer, rows, outputs, output_ids):
    """The scores of a reward function: a float per sample, or (dense) a list with one float per response token."""
    scores = call_function(function, name, tokenizer, rows, outputs, output_ids)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if not isinstance(scores, list | tuple) or len(scores) != len(rows):
        found = f"{len(scores)} values" if isinstance(scores, list | tuple) else type(scores).__name__
        raise InputError(f"{name} returned {found}, expected a list of {len(rows)} numbers, one per sample")
    checked = []
    for i, score in enumerate(scores):
        score = score.tolist() if hasattr(score, "tolist") else score
        dense = isinstance(score, list) and len(score) == len(output_ids[i])
        numbers = [x.item() if hasattr(x, "item") else x for x in score] if dense else [score]
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            raise InputError(
                f"{name} returned {score!r:.60} for row {i + 1}, prompt {rows[i]['prompt']!r:.60}, output "
                f"{outputs[i]!r:.60}; expected a finite number, or one for each of the {len(output_ids[i])} tokens"
            )
        checked.append([float(x) for x in numbers] if dense else float(score))
    return checked


def score_outputs(accelerator, reward, args, tokenizer, rows, outputs, output_ids):
    """Scores of the global batch, on every process: a reward function runs once, a classifier on shares of the rows."""
    if not isinstance(reward, RewardModel):
        return on_main(accelerator, call_reward, reward, args.reward, tokenizer, rows, outputs, output_ids)
    share = math.ceil(len(rows) / accelerator.num_processes)
    local = [min(accelerator.process_index * share + i, len(rows) - 1) for i in range(share)]
    stops = stopped(tokenizer, output_ids, args.stop)
    ended = [stops[i] or output_ids[i][-1:] == [tokenizer.eos_token_id] for i in local]
    scores = reward([rows[i]["prompt"] + outputs[i] for i in local], ended, args.micro_batch_size)
    scores = accelerator.gather(scores)[: len(rows)].tolist()
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise FloatingPointError(f"{args.reward}: {score} for {rows[i]['prompt']!r:.60} and {outputs[i]!r:.60}")
    return scores


# ---- Rollout ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """Episodes: the whole iteration's, on every process, or a micro-batch of them."""

    query: torch.Tensor  # (B, Q) ids, left-padded
    query_mask: torch.Tensor  # (B, Q) bool
    response: torch.Tensor  # (B, R) ids as sampled, right-padded
    response_mask: torch.Tensor  # (B, R) bool, the end token counts
    logprobs: torch.Tensor | None = None  # (B, R) of the policy that sampled
    values: torch.Tensor | None = None  # (B, R)
    entropies: torch.Tensor | None = None  # (B, R) of the next-token distribution
    ref_logprobs: torch.Tensor | None = None  # (B, R)
    trunk: torch.Tensor | None = None  # (B, Q + R - 1, H) what the last frozen block returns
    raw_scores: torch.Tensor | None = None  # (B, R) of the reward; a single score lies on the last token
    truncated: torch.Tensor | None = None  # (B,) bool, neither end token nor stop string
    last_value: torch.Tensor | None = None  # (B,) of the state after the last token of a truncated response
    scores: torch.Tensor | None = None  # (B, R) as trained on: shape_scores
    rewards: torch.Tensor | None = None  # (B, R)
    advantages: torch.Tensor | None = None  # (B, R), whitened
    returns: torch.Tensor | None = None  # (B, R)

    def take(self, rows):
        """The rows, without the columns in which none of them has a token."""
        begin = int(self.query_mask[rows].any(0).int().argmax())
        end = int(self.response_mask[rows].any(0).nonzero().max()) + 1
        spans = dict.fromkeys(("query", "query_mask"), slice(begin, None))
        spans["trunk"] = slice(begin, self.query.shape[1] + end - 1)
        columns = {name: x for name, x in vars(self).items() if x is not None}
        return Rollout(**{k: x[rows, spans.get(k, slice(end))] if x.ndim > 1 else x[rows] for k, x in columns.items()})

    def tokens(self):
        """The arguments of score_tokens."""
        return self.query, self.query_mask, self.response, self.response_mask


@torch.no_grad()
def rollout(accelerator, model, ref, trunk, tokenizer, rows, queries, score, iteration, args):
    """Samples a response to each query and scores it with policy, reference and reward."""
    lm, device, limits = accelerator.unwrap_model(model).lm, accelerator.device, None
    if args.min_length_limit:
        limits = rng(args.seed, "limits", iteration).integers(args.min_length_limit, args.max_new_tokens + 1, len(rows))
        limits = torch.from_numpy(limits).to(device)
    options = ("rollout", iteration), args, args.temperature
    with trunk.record(lm) as recorded:
        batch = Rollout(*generate(accelerator, lm, tokenizer, queries, *options, limits=limits)).take(slice(None))
    if recorded and recorded[0].ndim != 3:
        accelerator.print("--cache-trunk is off: the frozen blocks of this model return several vectors a token")
        trunk.depth = 0
    # 1. what the policy did, and what the reference thinks of it
    share, width = len(queries) // accelerator.num_processes, batch.response.shape[1]
    local, parts = torch.arange(share, device=device) + accelerator.process_index * share, []
    states = trunk.states(recorded, batch.response_mask[local], args.decode_batch_size)
    batch.trunk = None if states is None else accelerator.gather(states)
    for part in map(batch.take, local.split(args.micro_batch_size)):
        query, query_mask, response, mask = part.tokens()
        more = (0, int(args.bootstrap_truncated))  # one column more gives the value of the state after the last token
        inputs = query, query_mask, F.pad(response, more), F.pad(mask, more), args.temperature
        if trunk.depth and not trunk.checked:
            plain, played = model(*inputs)[0], torch.full((), math.nan, device=device)
            with suppress(Exception), trunk.play(lm, part.trunk):  # any: top blocks may miss what was not run
                played = model(*inputs)[0]
            error, trunk.checked = accelerator.gather((played - plain)[mask].abs().mean()[None]).max().item(), True
            exact = args.dtype != "bfloat16" and accelerator.mixed_precision == "no"
            if not error <= (1e-4 if exact else 0.02):
                accelerator.print(f"--cache-trunk is off: played back, log-probabilities are {error:.1e} off")
                trunk.depth = 0
        hidden = part.trunk if trunk.depth else None
        with trunk.play(lm, hidden):
            logprobs, values, entropies = model(*inputs, entropy=True)
        with accelerator.autocast(), trunk.play(ref, None if args.ref_model else hidden):
            ref_logprobs = score_tokens(ref, *inputs)[0]
        scored = torch.stack([logprobs, values, entropies, ref_logprobs], 1)  # (b, 4, R of the micro-batch)
        parts.append(F.pad(scored, (0, width + more[1] - scored.shape[2])))
    batch.trunk, scored = batch.trunk if trunk.depth else None, accelerator.gather(torch.cat(parts))
    batch.logprobs, batch.values, batch.entropies, batch.ref_logprobs = scored[..., :width].unbind(1)
    # 2. the reward of the texts
    mask = batch.response_mask
    output_ids = [ids[keep].tolist() for ids, keep in zip(batch.response.cpu(), mask.cpu(), strict=True)]
    scores = score(rows, decode(tokenizer, queries, output_ids, args.stop), output_ids)
    counted = zip(scores, output_ids, strict=True)  # a single score goes to the last token
    placed = [x if isinstance(x, list) else ([0.0] * (len(ids) - 1) + [x])[: len(ids)] for x, ids in counted]
    placed = torch.tensor([x for row in placed for x in row], dtype=scored.dtype, device=device)
    batch.raw_scores = torch.zeros(mask.shape, dtype=scored.dtype, device=device).masked_scatter(mask, placed)
    ended = (torch.where(mask, batch.response, -1) == tokenizer.eos_token_id).any(1)
    batch.truncated = ~(ended | torch.tensor(stopped(tokenizer, output_ids, args.stop), device=device))
    if args.bootstrap_truncated:
        batch.last_value = scored[:, 1].gather(1, mask.sum(1, keepdim=True))[:, 0] * batch.truncated
    return batch


def minibatches(accelerator, args, iteration, epoch):
    """(rows, micro_batches) of each optimizer step of a PPO epoch: global row indices, from a keyed permutation of the
    episodes, and this process's share of them in pieces of micro_batch_size."""
    order = torch.from_numpy(rng(args.seed, "minibatches", iteration, epoch).permutation(args.rollout_batch_size))
    for rows in order.to(accelerator.device).split(args.batch_size):
        yield rows, rows[accelerator.process_index :: accelerator.num_processes].split(args.micro_batch_size)


def losses(model, part, args):
    """Policy and value losses, unreduced, of the tokens of a micro-batch that count, and the sums over these tokens of
    what UPDATE_METRICS names. A term counts as clipped where the clipped side is the larger."""
    columns = part.logprobs, part.values, part.advantages, part.returns
    logprobs, values, advantages, returns = (x[part.response_mask] for x in columns)
    new_logprobs, new_values, _ = model(*part.tokens(), temperature=args.temperature)
    new_logprobs, new_values = new_logprobs[part.response_mask], new_values[part.response_mask]
    pg = policy_loss(new_logprobs, logprobs, advantages, args.cliprange)
    vf = value_loss(new_values, values, returns, args.cliprange_value)
    with torch.no_grad():
        log_ratio = new_logprobs - logprobs
        clipped_pg, clipped_vf = pg > -advantages * log_ratio.exp(), vf > value_loss(new_values, values, returns, 0)
        terms = pg, vf, log_ratio.square() / 2, clipped_pg, log_ratio.exp(), clipped_vf
        return pg, vf, torch.stack([term.double().sum() for term in terms])


UPDATE_METRICS = "loss/policy loss/value policy/approxkl policy/clipfrac policy/ratio val/clipfrac".split()


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


def rollout_metrics(batch, kl_coef):
    """Of the episodes: objective/ and tokens/ are means per sequence, policy/ and val/ per token."""
    mask, lengths = batch.response_mask, batch.response_mask.sum(1)

    def per_sequence(x):
        return torch.where(mask, x, 0.0).sum(1).mean()

    scores, errors = batch.raw_scores.sum(1), (batch.returns - batch.values)[mask]
    metrics = {
        "objective/kl": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "kl")),
        "objective/kl_k3": per_sequence(kl_penalty(batch.logprobs, batch.ref_logprobs, "k3")),
        "objective/entropy": -per_sequence(batch.logprobs),
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": per_sequence(batch.rewards - batch.scores),
        "objective/rlhf_reward": per_sequence(batch.rewards),
        "policy/entropy": batch.entropies[mask].mean(),
        "val/explained_variance": 1 - errors.var(correction=0) / batch.returns[mask].var(correction=0),
        "val/error": errors.square().mean(),
        "tokens/queries_len": batch.query_mask.sum(1).double().mean(),
        "tokens/responses_len": lengths.double().mean(),
        "tokens/eos_rate": 1 - batch.truncated.double().mean(),  # stop strings included
        "tokens/truncated_rate": batch.truncated.double().mean(),
    }
    return {key: float(value) for key, value in metrics.items()} | {"objective/kl_coef": kl_coef}


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
    is_function = not isinstance(args.reward, str) or re.search(r"\.py(:|$)", args.reward)
    reward = load_function(args.reward, "--reward") if is_function else None
    ref_path = build(args.ref_model, "--ref-model")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset") if args.eval_dataset else {}
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
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    found, options, more = len(rows), (tokenizer, args.max_new_tokens, limit), (args.max_prompt_length, encoder)
    rows, queries = encode_prompts(rows, *options, "--dataset", *more)
    for prefix, found_rows in eval_sets.items():
        flag = f"--eval-dataset {prefix[5:-1]}".strip()
        eval_sets[prefix] = encode_prompts(found_rows, *options, flag, *more)
    eval_sets = eval_sets or {"eval/": (rows[: args.rollout_batch_size], queries[: args.rollout_batch_size])}

    lengths = sorted(map(len, queries))
    set_attention(lm, args, device, lengths[-1] + args.max_new_tokens)
    train_adapters(lm, args)
    depth = freeze(lm, args.num_layers_unfrozen) * (not encoder)  # the reference shares what is frozen
    if ref_path:
        ref, ref_tokenizer = load_model(args, ref_path, "--ref-model")
        if ref_tokenizer.get_vocab() != tokenizer.get_vocab() or ref.config.is_encoder_decoder != encoder:
            raise InputError(f"--ref-model {args.ref_model} is of another kind or has another vocabulary than --model")
        set_attention(ref, args, device, lengths[-1] + args.max_new_tokens)
        share_frozen(as_decoder(ref.to(device)), lm)
    else:
        ref = copy.deepcopy(lm, {id(weight): weight for weight in lm.parameters() if not weight.requires_grad})
        if args.lora_r:
            ref.disable_adapters()  # new ones add zero
    reward = reward or RewardModel(args, lm)
    policy = PolicyWithValue(lm, args.value_head, args.value_head_init, args.seed, args.detach_value_trunk)
    if (folder := spec_path(path)) and (folder / "value_head.safetensors").exists():
        policy.load_value_head(folder)
    kinds = {weight.dtype for weight in policy.parameters() if weight.requires_grad}
    if accelerator.is_fsdp2 and len(kinds) > 1 and accelerator.mixed_precision == "no":
        raise InputError("--dtype bfloat16: FSDP2 trains one type, and heads are float32: add --mixed-precision bf16")

    # ---- run directory, what to continue from
    threads = set_threads(args.threads)
    run = Run("ppo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    if run.state:  # another number of threads gives other bits
        threads = set_threads(args.threads or run.state["threads"])
    ref = ref.requires_grad_(False).eval().to(device)
    optimizer = make_optimizer(policy.to(device), args)
    model = accelerator.prepare(policy, optimizer)[0]  # FSDP2 gives shards to both
    num_iterations = args.total_episodes // args.rollout_batch_size
    steps_per_iteration = args.ppo_epochs * (args.rollout_batch_size // args.batch_size)
    total_steps = num_iterations * steps_per_iteration
    state = {"best_score": None, "best_step": None, "kl_coef": args.kl_coef, "iteration": 0, "moments": [0, 0.0, 0.0]}
    state |= run.state or {}
    best_score, best_step, kl_coef, moments = (state[x] for x in ("best_score", "best_step", "kl_coef", "moments"))
    step = state["iteration"] * steps_per_iteration
    # the last state of a truncated response is never sampled from, so the trunk has no output for it
    depth = min(depth, state.get("trunk", depth)) * (args.cache_trunk and not args.bootstrap_truncated)
    trunk, frozen = Trunk(depth, "trunk" in state), frozen_weights(lm)
    if run.checkpoint:
        unpack_state(run.checkpoint, run.state, model, optimizer, frozen)
    if run.begun >= total_steps and not (run.dir / "metrics.jsonl").exists():
        raise InputError(f"--resume {args.resume}: nothing is left to train; raise --total-episodes")
    trained = sum(w.numel() for w in policy.parameters() if w.requires_grad)
    shared = "a model of its own" if ref_path else "shares the frozen weights" if frozen[1] else "a frozen copy"
    if isinstance(reward, RewardModel):
        shared += f"; reward: {reward.shared:,} parameters of the policy's, {reward.own:,} of its own"
    run.say(
        f"ppo: {sum(w.numel() for w in policy.parameters()):,} parameters, {trained:,} trained; reference: {shared}; "
        f"{args.dtype}, {accelerator.mixed_precision} autocast, {device}, {world} processes x {threads} threads\n"
        f"data: {found} prompts, {found - len(rows)} dropped as too long; tokens: median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]}; first: {visible(rows[0]['prompt'])[:200]}\n"
        f"{num_iterations} iterations x ({args.rollout_batch_size} episodes, then {steps_per_iteration} optimizer "
        f"steps of {args.batch_size}: {args.batch_size // world} rows a process, {args.micro_batch_size} a forward)"
        f"{f'; stops: {list(args.stop)}' if args.stop else ''}"
    )

    def score(*outputs):
        return score_outputs(accelerator, reward, args, tokenizer, *outputs)

    @unsharded(model)
    def evaluate(step):
        model.eval()
        metrics, samples = {}, []
        for prefix, encoded in eval_sets.items():
            means, sampled = evaluate_samples(accelerator, policy.lm, tokenizer, *encoded, measure, args)
            metrics |= {prefix + key: value for key, value in means.items()}
            samples += [{"set": prefix[5:-1]} | row for row in sampled] if len(eval_sets) > 1 else sampled
        run.samples(step, samples)
        return metrics

    def measure(*outputs):
        named = on_main(accelerator, call_metric, metric, args.metric, tokenizer, *outputs) if metric else {}
        return named | {"reward": [sum(x) if isinstance(x, list) else x for x in score(*outputs)]}

    headline, heads = f"{next(iter(eval_sets))}reward", {"value_head.safetensors": policy.value_head.state_dict()}
    if args.check:
        evaluate(0)
        run.say("check passed")
        return {}, None
    if run.begun == 0 and args.eval_every:
        run.log(0, evaluate(0))

    # ---- the algorithm
    for iteration in range(state["iteration"] + 1, num_iterations + 1):
        start = time.perf_counter()
        # 1. y ~ pi(. | x): responses with their log-probabilities, values and scores
        model.eval()
        begun = (iteration - 1) * args.rollout_batch_size  # episodes so far
        drawn = stream_rows(args.seed, "data", len(rows), begun, args.rollout_batch_size)
        chosen = [rows[i] for i in drawn], [queries[i] for i in drawn]
        with unsharded(model):
            batch = rollout(accelerator, model, ref, trunk, tokenizer, *chosen, score, iteration, args)
        # 2. r_t = -beta KL_t, plus the score on the last token; A_t by GAE (Eq. 16), whitened
        mask = batch.response_mask
        batch.scores, moments = shape_scores(batch.raw_scores, mask, batch.truncated, moments, args)
        kl = kl_penalty(batch.logprobs, batch.ref_logprobs, args.kl_kind)
        batch.rewards = token_rewards(batch.scores, kl, mask, kl_coef)
        rewards = masked_whiten(batch.rewards, mask, shift_mean=False) if args.whiten_rewards else batch.rewards
        advantages, batch.returns = gae(rewards, batch.values, mask, args.gamma, args.lam, batch.last_value)
        batch.advantages = masked_whiten(advantages, mask)
        rollout_done = time.perf_counter()
        # 3. K epochs of minibatches: clipped policy loss (PPO Eq. 7) and value loss
        model.train()
        tokens, skipped, grad_norm, epoch_sums = int(mask.sum()), 0, torch.zeros(()), []
        for epoch in range(args.ppo_epochs):
            epoch_sums.append(torch.zeros(len(UPDATE_METRICS), dtype=torch.float64, device=device))
            for minibatch, micro_batches in minibatches(accelerator, args, iteration, epoch):
                count, sums = mask[minibatch].sum(), 0  # response tokens of all processes
                for chunk in micro_batches:
                    part, last = batch.take(chunk), chunk is micro_batches[-1]
                    with nullcontext() if last else accelerator.no_sync(model), trunk.play(policy.lm, part.trunk):
                        pg, vf, terms = losses(model, part, args)
                        # data-parallel training averages gradients over the processes, hence the factor world
                        accelerator.backward((pg.sum() + args.vf_coef * vf.sum()) * world / count)
                    sums += terms
                epoch_sums[-1] += sums
                lr, step = learning_rate(args, step, total_steps), step + 1
                if args.ratio_threshold and accelerator.reduce(sums)[RATIO] > args.ratio_threshold * count:
                    skipped += 1
                    optimizer.zero_grad()
                    continue
                for group in optimizer.param_groups:
                    group["lr"] = lr
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
                if not grad_norm.isfinite():
                    first = chosen[0][int(minibatch[0])]["prompt"]
                    bad = f"gradient norm {grad_norm} of the {len(minibatch)} episodes whose first is {first!r:.60}"
                    raise FloatingPointError(f"step {step}: {bad}; the last checkpoint is intact")
                optimizer.step()
                optimizer.zero_grad()
            if args.early_stop_kl and accelerator.reduce(epoch_sums[-1])[APPROXKL] > args.early_stop_kl * tokens:
                break
        step = iteration * steps_per_iteration  # also where epochs were left out: schedules follow the episodes
        update_done = time.perf_counter()
        # 4. beta follows the KL of this iteration (Ziegler Sec. 2.2)
        metrics = rollout_metrics(batch, kl_coef)
        if args.kl_target:
            kl_coef = next_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, len(drawn))
        # 5. evaluate, log, save
        means = (accelerator.reduce(sum(epoch_sums)) / (tokens * len(epoch_sums))).tolist()
        metrics |= dict(zip(UPDATE_METRICS, means, strict=True)) | {"episode": begun + len(drawn)}
        metrics["loss/total"] = metrics["loss/policy"] + args.vf_coef * metrics["loss/value"]
        metrics |= {"policy/epochs": len(epoch_sums), "policy/skipped": skipped}
        metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm.item()}  # of the last step that was taken
        seconds = update_done - start
        perf = {"perf/seconds_rollout": rollout_done - start, "perf/seconds_update": update_done - rollout_done}
        perf |= {"perf/tokens_per_sec": tokens / seconds, "perf/episodes_per_sec": len(drawn) / seconds}
        if args.eval_every and (iteration == num_iterations or due(step, steps_per_iteration, args.eval_every)):
            metrics |= evaluate(step)
            if best_score is None or metrics[headline] > best_score:
                best_score, best_step = metrics[headline], step
                run.export(to_export(lm, args), tokenizer, "hf_model_best", heads)
        run.log(step, metrics, perf)
        text = " | ".join(f"{key.split('/')[1]} {metrics[key]:.3f}" for key in SHOWN)
        times = f"rollout {rollout_done - start:.2f} s + update {update_done - rollout_done:.2f} s"
        run.status(step, total_steps, f"{text} | {times}")
        stop = run.stop_requested()
        if stop or step in (best_step, total_steps) or due(step, steps_per_iteration, args.save_every):
            scalars = {"iteration": iteration, "kl_coef": kl_coef, "best_score": best_score, "best_step": best_step}
            run.save(step, *pack_state(model, optimizer, frozen, **scalars, moments=moments, trunk=trunk.depth))
        if stop:
            run.exit(step)

    # ---- export
    run.export(to_export(lm, args), tokenizer, "hf_model", heads)
    title = f"{run.identity['flags']['model']} after PPO on {run.identity['flags']['reward']}"
    headline, usage = headline if args.eval_every else "objective/scores", SEQ2SEQ_USAGE if encoder else USAGE
    metrics = run.finish(headline, title, rows[0]["prompt"], usage)
    accelerator.end_training()
    return metrics, run.dir


RATIO, APPROXKL = UPDATE_METRICS.index("policy/ratio"), UPDATE_METRICS.index("policy/approxkl")
SHOWN = "objective/scores objective/kl loss/policy loss/value val/explained_variance".split()


def due(step, steps, every):
    """Whether a multiple of `every` lies in the last `steps` steps."""
    return bool(every) and step // every > (step - steps) // every


SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, return_tensors='pt'), max_new_tokens=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""

if __name__ == "__main__":
    cli(Args, main)
