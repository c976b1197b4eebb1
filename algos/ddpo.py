"""Denoising diffusion policy optimisation (DDPO) of a Stable Diffusion pipeline against a reward on its images.

Paper: Black et al. 2023, Training Diffusion Models with Reinforcement Learning (arXiv 2305.13301); the sampler is DDIM,
Song et al. 2021 (arXiv 2010.02502). Code of the first author, whose choices this follows where the paper is silent:
https://github.com/kvablack/ddpo-pytorch/blob/1958463f020112c9a7bc85768d296daacc2e1b4b/scripts/train.py

    s_t = (c, t, x_t), a_t = x_{t-1}, pi = p(x_{t-1} | x_t, c)      Sec. 4.3                  denoise
    p(x_{t-1} | x_t, c) = N(mean, sigma_t^2)                        Eq. 2; DDIM Eqs. 12, 16   ddim_step_with_logprob
    guidance, in sampling and training alike                        App. E.1                  predict
    r(x_0, c), normalised for each prompt                           Sec. 4.3, App. D.3        PerPromptStats
    max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))                 Sec. 4.3 (DDPO_IS), D.1   ddpo_loss

As in that code, log-probabilities are means over the dimensions of the latents and gradients are means over the steps
of an image, where the paper has sums: `--clip-range` is in units of one dimension, `--max-grad-norm` of one step.

How this differs from TRL's DDPO:
- Gradients are means over (image, step) pairs, so pairs of any steps share a forward pass, of `--micro-batch-size`
  pairs; `--batch-size` and `--sample-batch-size` count images, of all processes. A trajectory is stored once, not once
  as `latents` and once as `next_latents`.
- Latents and log-probabilities are at least float32 whatever the autocast, and the log-probability is that of the
  stored latents: the first ratio is 1, to rounding. A step without noise (sigma = 0) is sampled, not trained.
- Statistics are keyed by the prompt as it was given, kept as floats, and resumed; gradients of all processes are
  averaged (TRL's stayed apart), and a run is the same for any number of them, to rounding.
- Prompts come in permutations of the data; weight decay is on matrices only; images are decoded without autocast.

    accelerate launch algos/ddpo.py                                  # coloured shapes on a CPU
    accelerate launch algos/ddpo.py --model my_pipeline/ --dataset prompts.jsonl --reward my_reward.py:score --lr 1e-5
    torchrun --nproc_per_node 8 algos/ddpo.py --model stable-diffusion-v1-5/stable-diffusion-v1-5 --lora-r 4 \
        --mixed-precision bf16 --dataset prompts.txt --reward my_reward.py:score --num-inference-steps 50 \
        --guidance-scale 5 --clip-range 1e-4 --num-epochs 100 --sample-batch-size 256 --batch-size 64 \
        --micro-batch-size 8 --decode-batch-size 8 --save-every 4 --eval-every 40

Dimension key: B images, N denoising steps, C h w latents, H W pixels, L text tokens, D their width.
"""

import copy
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from common.checkpoint import replacing
from common.cli import InputError, build, call_metric, call_reward, cli, launch, load_function, spec_path, stop_if
from common.data import load_rows, load_sets, set_flag, set_prefix, with_prompts
from common.logging import Run, closes_run, on_main, visible
from common.models import keep_freed_memory
from common.seeding import fast_cpu_matmul, rng, seed_libraries, stream_rows

TASK = "benchmarks/tasks/shapes.py"


@dataclass
class Args:
    """Denoising diffusion policy optimisation of a Stable Diffusion pipeline."""

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
    save_every: int = 80
    """Checkpoint every so many optimizer steps; 0: only at the end and for the best evaluation."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; the best by evaluation is kept besides."""
    eval_every: int = 80
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
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights (and so of the optimizer state)."""
    trust_remote_code: bool = False
    """Run model code that comes with a hub repository."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    lora_r: int = 0
    """Rank of LoRA adapters, which are trained in place of the weights; 0: train all weights. A --model that is a LoRA
    adapter of a language model is trained further without this flag."""
    lora_alpha: float | None = None
    """LoRA adapters count alpha / r times; default: the rank, so once."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Last names of the modules that get LoRA adapters; all-linear: every linear layer of a language model but the
    last."""
    dataset: str = f"{TASK}:prompts"
    """Rows with a prompt (other columns reach the reward): a file, hub id:split, file.py:function; from Python a
    list."""
    eval_dataset: str | None = "auto"
    """Rows to evaluate on, always with the same noise; auto: the embedded task's, or the first --sample-batch-size rows
    of your own --dataset. Several sets are joined by commas or a mapping of names."""
    reward: str = "auto"
    """file.py:function(images, prompts, **columns) -> a number per image; images: float tensor (B, 3, H, W) in [0, 1];
    auto: the embedded task's (your own --dataset needs your own)."""
    metric: str | None = "auto"
    """file.py:function(images, prompts, **columns) -> {name: list}; auto: the embedded task's, or none."""

    # ---- optimizer
    lr: float = 3e-4
    """Peak learning rate of AdamW (pretrained models: 2e-5 in sft, 1e-5 in ppo, reward, ilql and ddpo, or 3e-4 in ddpo
    with LoRA, 1e-6 in dpo)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    lr_final: float = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = None
    """Optimizer steps from the end of the warm-up until --lr-final; default: the rest of the run."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of the weight matrices (not of biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    batch_size: int = 16
    """Rows per optimizer step, all processes together."""
    micro_batch_size: int = 64
    """Rows per process and forward pass; changes memory and speed, never the result."""

    # ---- algorithm
    num_epochs: int = 40
    """Length of the run: epochs of sampling images and training on them."""
    sample_batch_size: int = 128
    """Images of an epoch, all processes together."""
    inner_epochs: int = 1
    """Passes over the images of an epoch."""
    timestep_fraction: float = 1.0
    """Train each image on this share of its denoising steps, rounded down but at least one, drawn anew in each pass."""
    clip_range: float = 1e-3
    """Epsilon of the clipped objective, of a ratio per latent dimension (1e-4 for Stable Diffusion's 16384)."""
    adv_clip_max: float = 5.0
    """Clip advantages to [-this, this]."""
    per_prompt_stats: bool = True
    """Normalise a reward by the last rewards of its prompt; off: by those of the epoch."""
    stat_buffer_size: int = 32
    """Rewards kept of each prompt."""
    stat_min_count: int = 16
    """Normalise by the epoch's rewards until a prompt has this many."""

    # ---- sampling
    num_inference_steps: int = 10
    """Denoising steps of an image (50 for Stable Diffusion)."""
    eta: float = 1.0
    """Noise of a DDIM step, in (0, 1]: 1 is that of DDPM; at 0 there would be nothing to learn from."""
    guidance_scale: float = 1.0
    """Weight of classifier-free guidance, in sampling and training alike; 1: none, which halves the cost."""
    negative_prompt: str = ""
    """The prompt that guidance leads away from."""
    decode_batch_size: int = 64
    """Rows that a process decodes at once; changes memory and speed, never the result."""

    def __post_init__(self):
        own = self.dataset != f"{TASK}:prompts"
        for name, embedded in {"eval_dataset": "eval_prompts", "reward": "compressibility", "metric": "metric"}.items():
            if getattr(self, name) == "auto":
                setattr(self, name, None if own else f"{TASK}:{embedded}")
        given = {name: value for name, value in vars(self).items() if value is not None}
        size, step = self.sample_batch_size, self.batch_size
        rules = [(name, given.get(name, 1) >= 1, "at least 1") for name in AT_LEAST_ONE]
        rules += [(name, getattr(self, name) >= 0, "at least 0") for name in ("save_every", "eval_every", "lora_r")]
        rules += [(name, 0 <= getattr(self, name) < math.inf, "0 or a positive number") for name in ZERO_OR_MORE]
        rules += [(name, 0 < given.get(name, 1) < 1e9, "a positive number") for name in POSITIVE]
        rules += [(name, 0 < getattr(self, name) <= 1, "in (0, 1]") for name in ("timestep_fraction", "eta")]
        rules += [
            ("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)"),
            ("reward", self.reward, "file.py:function for your own --dataset"),
            ("sample_batch_size", size % max(1, step) == 0, f"a multiple of --batch-size {step}"),
            ("stat_min_count", self.stat_min_count <= self.stat_buffer_size, "at most --stat-buffer-size"),
            ("guidance_scale", 1 <= self.guidance_scale < math.inf, "1 (no guidance) or more"),
            ("negative_prompt", not self.negative_prompt or self.guidance_scale > 1, "with --guidance-scale above 1"),
            ("lora_alpha", self.lora_alpha is None or self.lora_r, "with --lora-r"),
            ("push_to_hub", "/" in (self.push_to_hub or "/"), "org/name"),
        ]
        bad = [(name.replace("_", "-"), getattr(self, name), rule) for name, holds, rule in rules if not holds]
        stop_if([f"--{flag} {value} must be {rule}" for flag, value, rule in bad])


AT_LEAST_ONE = """threads decay_steps keep_checkpoints batch_size micro_batch_size num_epochs sample_batch_size
inner_epochs stat_buffer_size stat_min_count num_inference_steps decode_batch_size""".split()
ZERO_OR_MORE = "lr_final warmup_steps adam_eps weight_decay max_grad_norm".split()
POSITIVE = "lr lora_alpha clip_range adv_clip_max".split()


# ---- Maths -----------------------------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """The denoising steps of a scheduler as tables (N,), in the order of sampling, for steps of a mixed batch."""

    timesteps: torch.Tensor
    alphas: torch.Tensor  # alpha_t of the DDIM paper, a product of 1 - beta
    prev_alphas: torch.Tensor  # alpha_{t-1}, where the step arrives
    stds: torch.Tensor  # sigma_t, 0 where the step is deterministic
    prediction_type: str
    clip: float | None  # bound of the predicted x_0


def ddim_schedule(scheduler, num_inference_steps, eta, device="cpu"):
    """The Schedule of a diffusers DDIMScheduler. sigma_t as in Eq. 16."""
    scheduler.set_timesteps(num_inference_steps)
    timesteps = scheduler.timesteps
    alphas = scheduler.alphas_cumprod.double()
    prev = timesteps - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    prev_alphas = torch.where(prev >= 0, alphas[prev.clamp(0)], scheduler.final_alpha_cumprod.double())
    alphas = alphas[timesteps]
    stds = eta * ((1 - prev_alphas) / (1 - alphas) * (1 - alphas / prev_alphas)).sqrt()
    if len(timesteps) != num_inference_steps or timesteps.min() < 0:  # of diffusers' trailing steps, for some numbers
        raise ValueError(f"its {scheduler.config.timestep_spacing} timesteps are not {num_inference_steps}")
    clip = scheduler.config.clip_sample_range if scheduler.config.clip_sample else None
    tables = (table.to(device) for table in (timesteps, alphas, prev_alphas, stds))
    return Schedule(*tables, scheduler.config.prediction_type, clip)


def ddim_step_with_logprob(schedule, output, steps, latents, noise=None, next_latents=None):
    """A DDIM step with noise (Eqs. 12 and 16), or the log-probability of one that was taken.

    output, latents: (B, C, h, w), the UNet's output at `latents`; steps: (B,) positions in the schedule. With noise
    (B, C, h, w) the step is taken, else its result is `next_latents`. Returns (next_latents, logprobs): logprobs (B,)
    is the mean over the latents' dimensions of log N(next_latents; mean, sigma_t^2), 0 where sigma_t is 0.
    """
    tables = schedule.alphas, schedule.prev_alphas, schedule.stds
    a, prev, std = (table[steps].to(latents.dtype).view(-1, 1, 1, 1) for table in tables)
    if schedule.prediction_type == "epsilon":
        clean = (latents - (1 - a).sqrt() * output) / a.sqrt()
        epsilon = output
    elif schedule.prediction_type == "sample":
        clean = output
        epsilon = (latents - a.sqrt() * output) / (1 - a).sqrt()
    else:  # v_prediction
        clean = a.sqrt() * latents - (1 - a).sqrt() * output
        epsilon = a.sqrt() * output + (1 - a).sqrt() * latents
    if schedule.clip is not None:
        clean = clean.clamp(-schedule.clip, schedule.clip)
    mean = prev.sqrt() * clean + (1 - prev - std**2).clamp(min=0).sqrt() * epsilon
    if next_latents is None:
        next_latents = mean + std * noise
    has_noise = std > 0
    scale = torch.where(has_noise, std, 1.0)
    logprobs = -(((next_latents - mean) / scale) ** 2) / 2 - scale.log() - math.log(2 * math.pi) / 2
    return next_latents, torch.where(has_noise, logprobs, 0.0).mean(dim=(1, 2, 3))


class PerPromptStats:
    """Mean and standard deviation of the last rewards of each prompt (App. D.3)."""

    def __init__(self, buffer_size, min_count):
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.rewards = {}  # {prompt: the last ones}, what a checkpoint keeps

    def update(self, prompts, rewards):
        """Keeps rewards (B,), then returns advantages (B,): (reward - mean) / (std + 1e-6) of the prompt's rewards, or
        of this batch for a prompt of which fewer than min_count are known. Float64, population std."""
        rewards = np.asarray(rewards, dtype=np.float64)
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            known = self.rewards.setdefault(prompt, [])
            known.append(reward)
            del known[: -self.buffer_size]
        advantages = np.empty_like(rewards)
        for i, prompt in enumerate(prompts):
            known = rewards
            if len(self.rewards[prompt]) >= self.min_count:
                known = np.array(self.rewards[prompt])
            advantages[i] = (rewards[i] - known.mean()) / (known.std() + 1e-6)
        return advantages


def standardized(rewards):
    """Advantages (B,) by the statistics of the batch alone: (reward - mean) / (std + 1e-8). Float64, population std."""
    return (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-8)


def ddpo_loss(new_logprobs, logprobs, advantages, clip_range):
    """max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps)) for each (image, step) pair, (B,); App. D.1 and PPO Eq. 7."""
    ratio = torch.exp(new_logprobs - logprobs)
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


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


# ---- Model -----------------------------------------------------------------------------------------------------------


def load_pipeline(args, path):
    """The Stable Diffusion pipeline, frozen, with a DDIM scheduler of its own noise schedule. An object is changed in
    place, and keeps its type of weights."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    if isinstance(path, str):
        path = str(spec_path(path) or path)
        pipeline = read_pipeline(args, path)
    else:
        pipeline = path
        path = type(path).__name__
    if not isinstance(pipeline, StableDiffusionPipeline):
        name = type(pipeline).__name__
        raise InputError(f"--model {path} is a {name}, expected a StableDiffusionPipeline (SD 1.x or 2.x)")
    check_fit(pipeline, path)
    pipeline.scheduler = ddim_scheduler(pipeline.scheduler, path)
    pipeline.safety_checker = None
    pipeline.register_to_config(requires_safety_checker=False)
    for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        module.requires_grad_(False).eval()
        for name, weight in module.named_parameters():
            if weight.is_meta:
                raise InputError(f"--model {path}: {name} is missing")
            if not weight.isfinite().all():
                raise InputError(f"--model {path}: {name} is not finite")
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    return pipeline


def read_pipeline(args, path):
    """The pipeline in a directory or on the hub."""
    from diffusers import DiffusionPipeline

    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not Path(path).exists():
        raise InputError(f"--model {path}: there is no such directory")
    if Path(path, "hf_model").is_dir():
        raise InputError(f"--model {path} is a run directory: name {path}/hf_model")
    try:
        return DiffusionPipeline.from_pretrained(
            path,
            dtype=getattr(torch, args.dtype),
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            safety_checker=None,
        )
    except Exception as error:  # the libraries' errors have no common class
        raise InputError(f"--model {path} cannot be loaded: {' '.join(str(error).split())}") from None


def check_fit(pipeline, path):
    """InputError where the parts of a pipeline do not fit together."""
    unet = pipeline.unet.config
    latent_channels = pipeline.vae.config.latent_channels
    if not unet.in_channels == unet.out_channels == latent_channels:
        channels = f"{unet.in_channels} -> {unet.out_channels} channels and the VAE {latent_channels}"
        raise InputError(f"--model {path}: the UNet has {channels}, expected three equal numbers")
    tokenizer = pipeline.tokenizer
    text = pipeline.text_encoder.config
    words = len(tokenizer)
    longest = tokenizer.model_max_length  # made up where the tokenizer's files are missing
    if not text.vocab_size / 2 < words <= text.vocab_size or longest > text.max_position_embeddings:
        sizes = f"{words} tokens, texts of {longest}"
        fit = f"{text.vocab_size} tokens, texts of {text.max_position_embeddings}"
        raise InputError(f"--model {path}: its tokenizer ({sizes}) does not fit its text encoder ({fit})")


def ddim_scheduler(scheduler, path):
    """A DDIM scheduler of the noise schedule of another one."""
    from diffusers import DDIMScheduler

    config = dict(scheduler.config)
    config.pop("_use_default_values", None)  # diffusers would put DDIM's defaults in place of these values
    for name in ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule"):
        if name not in config:
            raise InputError(f"--model {path}: its {type(scheduler).__name__} has no {name}, as DDIM needs")
    # latents have no range to be clipped to; a scheduler that knows no clipping would get DDIM's default, on
    config.setdefault("clip_sample", False)
    ddim = DDIMScheduler.from_config(config)
    if ddim.config.thresholding:
        raise InputError(f"--model {path}: its scheduler has thresholding, which is for pixels and not for latents")
    return ddim


def checked_schedule(args, scheduler, model, device):
    """The denoising steps. InputError, which names `model`, where there are none, or diffusers steps otherwise."""
    try:
        schedule = ddim_schedule(scheduler, args.num_inference_steps, args.eta, device)
        # with eta 1, diffusers takes the root of a rounding error where there is no signal yet
        eta = min(args.eta, 0.99)
        error = schedule_error(scheduler, ddim_schedule(scheduler, args.num_inference_steps, eta), eta)
    except (ValueError, IndexError) as failure:
        raise InputError(f"--model {model}, --num-inference-steps {args.num_inference_steps}: {failure}") from None
    if not error < 1e-4:
        raise InputError(f"--model {model}: its scheduler does not step as DDIM does, by {error:.1e}")
    if not (schedule.stds > 0).any():
        raise InputError(f"--num-inference-steps {args.num_inference_steps}: no step of this scheduler has noise")
    return schedule


def schedule_error(scheduler, schedule, eta):
    """Largest difference between ddim_step_with_logprob and the scheduler's own step, over all steps."""
    values = torch.linspace(-1, 1, 7).sin()
    latents, output, noise = (values.roll(i).view(1, 1, 1, 7).double() for i in range(3))
    errors = []
    for i, timestep in enumerate(scheduler.timesteps):
        ours, _ = ddim_step_with_logprob(schedule, output, torch.tensor([i]), latents, noise)
        theirs = scheduler.step(output, timestep, latents, eta=eta, variance_noise=noise).prev_sample
        errors.append((ours - theirs).abs().max())
    return torch.stack(errors).max().item()  # NaN if one is


def set_attention_and_memory(unet, device):
    """On CPUs: keep freed memory, fast matrix products, and attention in plain matrix products where there are at most
    256 latents, which beats torch's fused kernel there (its backward pass above all)."""
    from diffusers.models.attention_processor import AttnProcessor

    if device.type != "cpu":
        return
    keep_freed_memory()
    height, width = latent_size(unet)
    if fast_cpu_matmul() and height * width <= 256:
        unet.set_attn_processor(AttnProcessor())


def latent_size(unet):
    """(height, width) of the latents that a UNet was made for."""
    size = unet.config.sample_size
    return (size, size) if isinstance(size, int) else tuple(size)


def add_lora(unet, args):
    """Adapters at --lora-targets, which change nothing before the first update: B is zero, A ~ N(0, 1 / r^2). At least
    float32, since small updates would be lost in bfloat16."""
    from peft import LoraConfig

    alpha = args.lora_alpha or args.lora_r
    targets = list(args.lora_targets)
    adapters = LoraConfig(r=args.lora_r, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
    try:
        unet.add_adapter(adapters)
    except ValueError as error:
        raise InputError(f"--lora-targets {' '.join(targets)}: {error}") from None
    for name, weight in unet.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if "lora_A" in name:  # by a keyed draw, whatever torch's generator holds
            normal = rng(args.seed, f"lora {name}").standard_normal(tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(normal / args.lora_r))


class Embeddings:
    """Text embeddings of prompts, each computed once and alone, so that they depend on no neighbour."""

    def __init__(self, pipeline, device, guidance_scale, negative_prompt):
        self.pipeline = pipeline
        self.device = device
        self.negative = negative_prompt if guidance_scale > 1 else None
        self.known = {}

    @torch.no_grad()
    def __call__(self, prompts):
        """(B, 2, L, D) of [negative prompt, prompt]; without guidance (B, 1, L, D)."""
        guided = self.negative is not None
        if len(self.known) > 1000:  # half a gigabyte of Stable Diffusion's
            self.known = {}
        for prompt in set(prompts) - self.known.keys():
            embeds, negative = self.pipeline.encode_prompt(prompt, self.device, 1, guided, self.negative)
            self.known[prompt] = torch.cat([negative, embeds]) if guided else embeds
        return torch.stack([self.known[prompt] for prompt in prompts])


def predict(unet, latents, timesteps, embeds, guidance_scale):
    """The UNet's output at latents (B, C, h, w) and timesteps (B,), guided: e_u + w (e_c - e_u), at least float32."""
    n = embeds.shape[1]
    inputs = latents.to(embeds.dtype).repeat_interleave(n, 0)
    out = unet(inputs, timesteps.repeat_interleave(n), embeds.flatten(0, 1)).sample
    out = out.to(torch.promote_types(out.dtype, torch.float32)).unflatten(0, (-1, n))
    if n == 1:
        return out[:, 0]
    return out[:, 0] + guidance_scale * (out[:, 1] - out[:, 0])


@dataclass
class Policy:
    """p(x_{t-1} | x_t, c), with all that samples from it."""

    pipeline: object  # a StableDiffusionPipeline
    unet: nn.Module  # that of the pipeline, as accelerate has prepared it
    schedule: Schedule
    embed: Embeddings


# ---- Rollout ---------------------------------------------------------------------------------------------------------


def denoise(unet, schedule, embeds, noise, guidance_scale):
    """Denoises: embeds (B, 1 or 2, L, D), noise (B, N + 1, C, h, w) of the start and of each step. Returns latents
    (B, N + 1, C, h, w), from noise to clean, and logprobs (B, N)."""
    trajectory = [noise[:, 0]]
    logprobs = []
    for step in range(len(schedule.timesteps)):
        steps = torch.full((len(embeds),), step, device=noise.device)
        output = predict(unet, trajectory[-1], schedule.timesteps[steps], embeds, guidance_scale)
        latents, logprob = ddim_step_with_logprob(schedule, output, steps, trajectory[-1], noise[:, step + 1])
        trajectory.append(latents)
        logprobs.append(logprob)
    return torch.stack(trajectory, dim=1), torch.stack(logprobs, dim=1)


@torch.no_grad()
def sample_images(accelerator, policy, prompts, stream, args, trajectories):
    """Images of all prompts, uint8 (B, 3, H, W), with latents (B, N + 1, C, h, w) and logprobs (B, N) where
    trajectories are wanted, on every process; each of them samples a share.

    The noise of image i is keyed by (seed, *stream, i). Images are uint8, as a file would hold them, so that reward,
    grids and files agree.
    """
    policy.unet.eval()
    vae = policy.pipeline.vae
    share = math.ceil(len(prompts) / accelerator.num_processes)
    begin = accelerator.process_index * share
    # the last processes repeat the last prompt where they do not divide
    local = [min(row, len(prompts) - 1) for row in range(begin, begin + share)]
    num_steps = len(policy.schedule.timesteps)
    shape = (num_steps + 1, vae.config.latent_channels, *latent_size(policy.pipeline.unet))
    dtype = torch.promote_types(vae.dtype, torch.float32)
    silent = None if accelerator.is_main_process else True  # None: only where there is no terminal
    batches = []
    for i in tqdm(range(0, share, args.decode_batch_size), "sampling", leave=False, disable=silent, delay=5):
        rows = local[i : i + args.decode_batch_size]
        noise = np.stack([rng(args.seed, *stream, row).standard_normal(shape) for row in rows])
        noise = torch.from_numpy(noise).to(accelerator.device, dtype)
        embeds = policy.embed([prompts[row] for row in rows])
        latents, logprobs = denoise(policy.unet, policy.schedule, embeds, noise, args.guidance_scale)
        images = vae.decode(latents[:, -1].to(vae.dtype) / vae.config.scaling_factor).sample.float()
        finite = images.flatten(1).isfinite().all(dim=1)
        images = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        batches.append((finite, images, latents, logprobs) if trajectories else (finite, images))
    whole = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    finite, *sampled = [accelerator.gather(tensor)[: len(prompts)] for tensor in whole]
    if not finite.all():  # on every process
        prompt = prompts[int(finite.int().argmin())]
        raise FloatingPointError(f"the image of {prompt!r:.60} is not finite")
    return sampled


def trained_steps(schedule):
    """The positions in the schedule that can be trained: those with noise."""
    return (schedule.stds > 0).nonzero().flatten().tolist()


def steps_per_image(args, trained):
    """How many of the steps that can be trained an image is trained on, in each pass."""
    return max(1, int(len(trained) * args.timestep_fraction))


def updates_per_epoch(args):
    """Optimizer steps."""
    return args.inner_epochs * (args.sample_batch_size // args.batch_size)


def pair_minibatches(args, epoch, trained, process, world):
    """(image, step) pairs of each optimizer step of an epoch, for this process: a list of micro-batches, each a tensor
    (b, 2). Images are permuted in each pass; each image draws its steps from `trained`, positions in the schedule."""
    count = steps_per_image(args, trained)
    for inner in range(args.inner_epochs):
        order = rng(args.seed, "minibatches", epoch, inner).permutation(args.sample_batch_size)
        for images in order.reshape(-1, args.batch_size):
            pairs = []
            for image in images.tolist():
                positions = rng(args.seed, "timesteps", epoch, inner, image).permutation(len(trained))[:count]
                pairs += [(image, trained[position]) for position in positions]
            yield torch.tensor(pairs[process::world]).split(args.micro_batch_size)


# ---- Update ----------------------------------------------------------------------------------------------------------


@dataclass
class Trajectories:
    """What an epoch has sampled, on every process."""

    prompts: list  # B strings
    latents: torch.Tensor  # (B, N + 1, C, h, w), from noise to clean
    logprobs: torch.Tensor  # (B, N)
    advantages: torch.Tensor  # (B,)


def pair_losses(policy, batch, pairs, args):
    """Losses (b,), with gradient, and log ratios (b,), without, of (image, step) pairs (b, 2)."""
    image, step = pairs.to(batch.latents.device).unbind(1)
    embeds = policy.embed([batch.prompts[i] for i in pairs[:, 0]])
    before = batch.latents[image, step]
    after = batch.latents[image, step + 1]
    output = predict(policy.unet, before, policy.schedule.timesteps[step], embeds, args.guidance_scale)
    _, new_logprobs = ddim_step_with_logprob(policy.schedule, output, step, before, next_latents=after)
    logprobs = batch.logprobs[image, step]
    losses = ddpo_loss(new_logprobs, logprobs, batch.advantages[image], args.clip_range)
    return losses, (new_logprobs - logprobs).detach()


def update(run, policy, optimizer, batch, epoch, step, args):
    """The updates of an epoch, from optimizer step `step` on. Returns their metrics: means over the pairs, the largest
    deviation of a ratio from 1, and that before the first update; learning rate and gradient norm of the last."""
    accelerator = run.accelerator
    unet = policy.unet
    world = accelerator.num_processes
    trained = trained_steps(policy.schedule)
    count = args.batch_size * steps_per_image(args, trained)  # pairs of an update, of all processes
    sums = dict.fromkeys(("loss/policy", "policy/approxkl", "policy/clipfrac", "policy/ratio"), 0.0)
    largest = torch.zeros((), device=accelerator.device)
    at_first = None
    unet.train()
    for micro_batches in pair_minibatches(args, epoch, trained, accelerator.process_index, world):
        for pairs in micro_batches:
            with nullcontext() if pairs is micro_batches[-1] else accelerator.no_sync(unet):
                losses, log_ratio = pair_losses(policy, batch, pairs, args)
                # data-parallel training averages gradients over the processes, hence the factor world
                accelerator.backward(losses.sum() * world / count)
            ratio = log_ratio.double().exp()
            deviation = (ratio - 1).abs()
            sums["loss/policy"] += losses.detach().double().sum()
            sums["policy/approxkl"] += (log_ratio.double() ** 2 / 2).sum()
            sums["policy/clipfrac"] += (deviation > args.clip_range).double().sum()
            sums["policy/ratio"] += ratio.sum()
            largest = torch.maximum(largest, deviation.max().float())
        if at_first is None:  # the policy has not changed yet: what is there is rounding
            at_first = accelerator.gather(largest).max().item()
            if at_first > args.clip_range / 2 and epoch == 1:
                run.say(f"warning: rounding moves the ratio by {at_first:.1e}, --clip-range is {args.clip_range}")
        lr = learning_rate(args, step, run.total_steps)
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm or math.inf)
        if not grad_norm.isfinite():
            where = f"in epoch {epoch}, whose first prompt is {batch.prompts[0]!r:.60}"
            raise FloatingPointError(f"step {step}: gradient norm {grad_norm} {where}; the last checkpoint is intact")
        optimizer.step()
        optimizer.zero_grad()
    if not all(weight.isfinite().all() for weight in unet.parameters() if weight.requires_grad):
        raise FloatingPointError(f"step {step}: a weight is not finite; the last checkpoint is intact")
    total = updates_per_epoch(args) * count
    metrics = {name: accelerator.reduce(value).item() / total for name, value in sums.items()}
    return metrics | {
        "policy/ratio_deviation": accelerator.gather(largest).max().item(),
        "policy/ratio_deviation_first": at_first,
        "optim/lr": lr,
        "optim/grad_norm": grad_norm.item(),
    }


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(run, step, policy, data, args):
    """Mean reward and metrics of images from the same noise at every evaluation. Some are shown, and kept as a grid."""
    accelerator = run.accelerator
    metrics = {}
    samples = []
    for name, rows in data.eval_sets.items():
        prompts = [row["prompt"] for row in rows]
        (images,) = sample_images(accelerator, policy, prompts, ["eval"], args, trajectories=False)
        columns = {"reward": on_main(accelerator, image_scores, data.reward, args.reward, rows, images)}
        if data.metric:
            columns |= on_main(accelerator, image_metrics, data.metric, args.metric, rows, images)
        prefix = set_prefix(name)
        metrics |= {prefix + key: sum(values) / len(values) for key, values in columns.items()}
        metrics[prefix + "reward_std"] = float(np.std(columns["reward"]))
        metrics[prefix + "diversity"] = diversity(images)
        columns = {"prompt": prompts} | columns
        if len(data.eval_sets) > 1:
            columns = {"set": [name] * len(rows)} | columns
        samples += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if run.dir and run.main:
            suffix = f"_{name.replace('/', '_')}" if name else ""
            grid(images, run.dir / GRID.format(step, suffix))
    run.samples(step, samples)
    return metrics


def check_reward(accelerator, policy, data, args):
    """Calls the reward function on training rows, whose columns may be others than those of the evaluation sets."""
    rows = data.rows[: args.batch_size]
    prompts = [row["prompt"] for row in rows]
    (images,) = sample_images(accelerator, policy, prompts, ["check"], args, trajectories=False)
    on_main(accelerator, image_scores, data.reward, args.reward, rows, images)


def image_scores(reward, name, rows, images):
    """What a reward function gives to uint8 images: a float for each."""
    return call_reward(reward, name, rows, image_arguments(rows, images))


def image_metrics(metric, name, rows, images):
    """{column: values per image} of a metric function."""
    return call_metric(metric, name, rows, image_arguments(rows, images), TAKEN)


def image_arguments(rows, images):
    """What reward and metric functions get by name, besides the other columns of the rows: images (B, 3, H, W), float32
    in [0, 1] on the CPU, and prompts."""
    return {"images": images.cpu().float() / 255, "prompts": [row["prompt"] for row in rows]}


def grid(images, path):
    """Writes uint8 images (B, 3, H, W) to a PNG file, eight a row, at most 96, each at most 128 pixels wide."""
    images = [Image.fromarray(image.permute(1, 2, 0).cpu().numpy()) for image in images[:96]]
    width, height = (max(1, side * min(128, images[0].width) // images[0].width) for side in images[0].size)
    sheet = Image.new("RGB", (8 * width, math.ceil(len(images) / 8) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image.resize((width, height)), (i % 8 * width, i // 8 * height))
    path.parent.mkdir(exist_ok=True)
    sheet.save(path)


def diversity(images):
    """Standard deviation over the images of a pixel, mean over pixels: 0 where all are the same."""
    rows = [row.double().std(0, unbiased=False).mean() for row in images.unbind(2)]  # all at once is 8 times the images
    return torch.stack(rows).mean().item() / 255


def mirror_grid(run, step):
    """Shows the grids of an evaluation, where this step had one, to wandb or tensorboard. They may fail, see Run."""
    if not run.main:
        return
    for tracker in run.accelerator.trackers:
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        for path in run.dir.glob(GRID.format(step, "*")):
            suffix = path.stem.removeprefix(f"step_{step:08d}")
            with suppress(Exception):
                pixels = np.asarray(Image.open(path))[None]
                tracker.log_images({f"eval/images{suffix}": pixels}, step=step, **layout)


GRID = "images/step_{:08d}{}.png"
TAKEN = ("prompt", "set", "reward", "reward_std", "diversity")  # what a metric function may not call its columns


# ---- Setup -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a run reads."""

    rows: list  # with a prompt
    eval_sets: dict  # {name: rows}
    reward: Callable
    metric: Callable | None


def read(args):
    """The rows and functions that the flags name."""
    reward = load_function(args.reward, "--reward")
    metric = load_function(args.metric, "--metric")
    rows = with_prompts(load_rows(build(args.dataset, "--dataset"), "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    eval_sets = {name: with_prompts(members, set_flag(name)) for name, members in eval_sets.items()}
    return Data(rows, eval_sets or {"": rows[: args.sample_batch_size]}, reward, metric)


def load(args, path, device):
    """The pipeline, with the UNet's weights or adapters to be trained as the flags say, and its denoising steps."""
    pipeline = load_pipeline(args, path)
    name = path if isinstance(path, str) else type(path).__name__
    schedule = checked_schedule(args, pipeline.scheduler, name, device)
    pipeline.to(device)
    if args.lora_r:
        add_lora(pipeline.unet, args)
    else:
        pipeline.unet.requires_grad_(True)
    if args.gradient_checkpointing:
        pipeline.unet.enable_gradient_checkpointing()
    set_attention_and_memory(pipeline.unet, device)
    return pipeline, schedule


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def summary(args, accelerator, policy, data):
    """What is trained on what, in a few lines."""
    pipeline = policy.pipeline
    weights = [*pipeline.unet.parameters(), *pipeline.vae.parameters(), *pipeline.text_encoder.parameters()]
    num_weights = sum(weight.numel() for weight in weights)
    num_trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    prompts = [row["prompt"] for row in data.rows]
    max_length = pipeline.tokenizer.model_max_length
    num_cut = sum(len(ids) > max_length for ids in pipeline.tokenizer(prompts).input_ids)
    cut = f", {num_cut} of them cut to {max_length} tokens" if num_cut else ""
    with_noise = trained_steps(policy.schedule)
    steps = steps_per_image(args, with_noise)
    pairs = args.batch_size // accelerator.num_processes * steps
    return (
        f"ddpo: {num_weights:,} parameters, {num_trained:,} trained; {args.dtype}, "
        f"{accelerator.mixed_precision} autocast, {accelerator.device}, "
        f"{accelerator.num_processes} x {torch.get_num_threads()} threads\n"
        f"data: {len(data.rows)} prompts{cut}, {sum(map(len, data.eval_sets.values()))} to evaluate; "
        f"first: {visible(prompts[0])[:200]}\n"
        f"{args.num_epochs} epochs x ({args.sample_batch_size} images of {len(policy.schedule.timesteps)} steps, "
        f"{len(with_noise)} of them with noise; then {updates_per_epoch(args)} optimizer steps of {args.batch_size} "
        f"images x {steps} steps: {pairs} pairs a process, {args.micro_batch_size} a forward)"
    )


def status(metrics, perf):
    """The line of an epoch."""
    names = "objective/scores objective/scores_std policy/approxkl policy/clipfrac".split()
    numbers = " | ".join(f"{name.split('/')[1]} {metrics[name]:.3g}" for name in names)
    return f"{numbers} | sampling {perf['perf/seconds_rollout']:.1f} s + update {perf['perf/seconds_update']:.1f} s"


def sampling_code(args, unet):
    """How the pipeline is loaded and sampled from, for the last lines of a run and for its card, which put in {folder}
    and {prompt}."""
    settings = f"num_inference_steps={args.num_inference_steps}, eta={args.eta}, guidance_scale={args.guidance_scale}"
    if args.negative_prompt:
        negative_prompt = repr(args.negative_prompt).replace("{", "{{").replace("}", "}}")
        settings += f", negative_prompt={negative_prompt}"
    dtype = "" if unet.dtype == torch.float32 else f", dtype={unet.dtype}"  # else diffusers mixes types
    return USAGE.replace("DTYPE", dtype).replace("SETTINGS", settings)


def pictures(run):
    """The first and the last grid, for the card."""
    grids = sorted(run.dir.glob("images/*.png"))
    if len(grids) > 2:
        grids = [grids[0], grids[-1]]
    return "".join(f"![{path.stem}](images/{path.name})\n\n" for path in grids)


USAGE = """import torch; from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({folder!r}DTYPE)
pipeline({prompt!r}, SETTINGS).images[0].save('sample.png')"""


@torch.no_grad()
def export_pipeline(pipeline, folder):
    """Writes a pipeline that plain diffusers loads; with LoRA the adapters are merged into it, and stand in `lora/`
    besides, for `load_lora_weights`."""
    with replacing(folder) as temporary:
        if getattr(pipeline.unet, "peft_config", None):
            from peft import get_peft_model_state_dict

            pipeline_class = type(pipeline)
            adapters = get_peft_model_state_dict(pipeline.unet)
            config = pipeline.unet.peft_config["default"].to_dict()
            pipeline_class.save_lora_weights(temporary / "lora", adapters, unet_lora_adapter_metadata=config)
            merged = copy.deepcopy(pipeline.unet)
            merged.fuse_lora()
            merged.unload_lora()
            pipeline = pipeline_class(**pipeline.components | {"unet": merged}, requires_safety_checker=False)
        pipeline.save_pretrained(temporary)


# ---- Main ------------------------------------------------------------------------------------------------------------


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    seed_libraries(args.seed, args.deterministic)  # before functions of the user run
    path = build(args.model, "--model")
    data = read(args)
    accelerator = launch(args, fsdp=False)
    pipeline, schedule = load(args, path, accelerator.device)

    run = Run("ddpo", args, __file__, accelerator)
    if run.finished:
        return run.newest_metrics(), run.dir
    unet = accelerator.prepare(pipeline.unet)
    embed = Embeddings(pipeline, accelerator.device, args.guidance_scale, args.negative_prompt)
    policy = Policy(pipeline, unet, schedule, embed)
    optimizer = make_optimizer(unet, args)
    updates = updates_per_epoch(args)
    total_steps = run.begun + updates * max(0, args.num_epochs - run.state.get("epoch", 0))
    state = run.restore(
        unet, optimizer, pipeline.unet, total_steps, longer="--num-epochs", stride=updates, epoch=0, rewards={}
    )
    stats = PerPromptStats(args.stat_buffer_size, args.stat_min_count)
    stats.rewards = state.rewards  # the same mapping, so checkpoints have what `update` adds
    run.say(summary(args, accelerator, policy, data))
    if args.check:
        evaluate(run, 0, policy, data, args)
        check_reward(accelerator, policy, data, args)
        run.say("check passed")
        return {}, None
    if run.evaluation_due(0):
        run.log(0, evaluate(run, 0, policy, data, args))
        mirror_grid(run, 0)
    headline = f"{set_prefix(next(iter(data.eval_sets)))}reward" if args.eval_every else "objective/scores"

    step = run.begun
    for epoch in range(state.epoch + 1, args.num_epochs + 1):
        start = time.perf_counter()
        # 1. x_0 ~ p(. | c): images with the latents and log-probabilities of their steps
        begin = (epoch - 1) * args.sample_batch_size
        rows = [data.rows[i] for i in stream_rows(args.seed, "data", len(data.rows), begin, args.sample_batch_size)]
        prompts = [row["prompt"] for row in rows]
        stream = ["rollout", epoch]
        images, latents, logprobs = sample_images(accelerator, policy, prompts, stream, args, trajectories=True)
        sampling_done = time.perf_counter()
        # 2. r(x_0, c), and advantages by the statistics of each prompt
        scores = on_main(accelerator, image_scores, data.reward, args.reward, rows, images)
        if epoch == 1 and min(scores) == max(scores):
            run.say(f"warning: all rewards of the first epoch are {scores[0]}, so there is nothing to learn from them")
        advantages = stats.update(prompts, scores) if args.per_prompt_stats else standardized(scores)
        advantages = torch.from_numpy(advantages).clamp(-args.adv_clip_max, args.adv_clip_max).to(logprobs)
        reward_done = time.perf_counter()
        # 3. clipped objective (Sec. 4.3) on the (image, step) pairs of minibatches of images
        batch = Trajectories(prompts, latents, logprobs, advantages)
        update_metrics = update(run, policy, optimizer, batch, epoch, step, args)
        step += updates
        update_done = time.perf_counter()
        # 4. evaluate, log, save
        metrics = {
            "epoch": epoch,
            "objective/scores": np.mean(scores),
            "objective/scores_std": np.std(scores),
            "objective/diversity": diversity(images),
            **update_metrics,
        }
        perf = {
            "perf/seconds_rollout": sampling_done - start,
            "perf/seconds_reward": reward_done - sampling_done,
            "perf/seconds_update": update_done - reward_done,
            "perf/images_per_sec": len(rows) / (update_done - start),
        }
        if run.evaluation_due(step):
            metrics |= evaluate(run, step, policy, data, args)
            if run.is_best(step, metrics[headline]):
                on_main(accelerator, export_pipeline, pipeline, run.dir / "hf_model_best")
        run.log(step, {name: float(value) for name, value in metrics.items()}, perf)
        mirror_grid(run, step)
        run.status(step, status(metrics, perf))
        state.epoch = epoch
        run.save_if_due(step)

    on_main(accelerator, export_pipeline, pipeline, run.dir / "hf_model")
    title = f"{run.identity['flags']['model']} after DDPO on {run.identity['flags']['reward']}"
    prompt = data.rows[0]["prompt"]
    code = sampling_code(args, pipeline.unet)
    metrics = run.finish(headline, title, prompt, code, "diffusers", pictures(run))
    accelerator.end_training()
    return metrics, run.dir


if __name__ == "__main__":
    cli(Args, main)
