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
of an image, where the paper has sums: `--cliprange` is in units of one dimension, `--max-grad-norm` of one step.

How this differs from TRL's DDPO (algos/MIGRATION.md has the details):
- Gradients are means over (image, step) pairs of all processes; `--batch-size` counts images.
- Latents and log-probabilities are at least float32 whatever the autocast: the first ratio is 1, to rounding.
- A step without noise (sigma = 0) is sampled, not trained.

    accelerate launch algos/ddpo.py                                  # coloured shapes on a CPU
    accelerate launch algos/ddpo.py --model my_pipeline/ --dataset prompts.jsonl --reward my_reward.py:score
    torchrun --nproc_per_node 8 algos/ddpo.py --model stable-diffusion-v1-5/stable-diffusion-v1-5 --lora-r 4 --lr 3e-4 \
        --mixed-precision bf16 --dataset prompts.txt --reward my_reward.py:score

Dimension key: B images, N denoising steps, C h w latents, H W pixels, L text tokens, D their width.
"""

import copy
import itertools
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from common.checkpoint import replacing
from common.cli import Count, Fraction, Natural, NonNegative, Positive, Range, RunArgs, Share, cli
from common.errors import InputError, stop_if
from common.functions import build, loading, spec_path
from common.launch import accumulate, local_rows, on_main, reduce_sums, require_finite
from common.report import screen, visible
from common.rows import read_data, set_flag, set_prefix, texts
from common.run import Run, closes_run
from common.seeding import rng

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # projections of a UNet's attention layers
TASK = "benchmarks/tasks/shapes/ddpo.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs):
    """Denoising diffusion policy optimisation of a Stable Diffusion pipeline."""

    required = (*RunArgs.required, "reward")

    # ---- algorithm
    num_epochs: Count = 100
    """Length of the run in epochs; each samples images and trains on them (the authors' code and TRL: 100)."""
    rollout_batch_size: Count = 256
    """Images per epoch, over all processes (Black et al. 2023: 256)."""
    ppo_epochs: Count = 1
    """Passes over the images of an epoch (the authors' code and TRL: 1)."""
    timestep_fraction: Share = 1.0
    """Share of an image's denoising steps to train on, rounded down but at least one step; drawn anew in each pass."""
    cliprange: NonNegative = 1e-4
    """Epsilon of the clipped objective, for a ratio per latent dimension (Black et al. 2023: 1e-4, with Stable
    Diffusion's 16384 dimensions; fewer dimensions need a larger value)."""
    adv_clip_max: Positive = 5.0
    """Clip advantages to [-this, this] (TRL: 5)."""
    per_prompt_stats: bool = True
    """Normalise a reward by the most recent rewards of its prompt. When off, normalise by those of the epoch."""
    stat_buffer_size: Count = 32
    """Rewards to keep per prompt (the authors' code: 16, or 32 if there are few prompts)."""
    stat_min_count: Count = 16
    """Normalise by the epoch's rewards until a prompt has this many rewards (the authors' code: 16)."""

    # ---- sampling
    num_inference_steps: Count = 50
    """Denoising steps per image (Black et al. 2023: 50)."""
    eta: Share = 1.0
    """Noise of a DDIM step, in (0, 1]: 1 is the noise of DDPM; at 0 there would be nothing to learn from."""
    guidance_scale: Annotated[float, Range("1 (no guidance) or more", lambda value: 1 <= value < math.inf)] = 5.0
    """Weight of classifier-free guidance, in both sampling and training (Black et al. 2023: 5); 1: none, which halves
    the cost."""
    negative_prompt: str = ""
    """The prompt that guidance steers away from."""
    decode_batch_size: Count = 8
    """Images that a process samples at once. Changes memory and speed; the result only by rounding."""

    # ---- optimizer
    lr: Positive = 1e-5
    """Peak learning rate of AdamW (Black et al. 2023: 1e-5 for all weights; the authors' code: 3e-5; for LoRA adapters
    that code and TRL: 3e-4)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
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
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay of weight matrices, not of biases and norms (the authors' code and TRL: 1e-4)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count | None = None
    """Images per optimizer step, each with its denoising steps, over all processes. Default: 64 (the authors' code), or
    --rollout-batch-size if that is less."""
    micro_batch_size: Count = 8
    """(image, step) pairs per process and forward pass. Changes memory and speed; the result only by rounding."""

    # ---- data
    dataset: str | None = None
    """Rows with a prompt, which is a text (the reward gets the other columns): a file, a hub id:split, or
    file.py:function; from Python, a list."""
    eval_dataset: str | None = None
    """Evaluation rows, in the formats of --dataset; several sets separated by commas, or a mapping of names. Always
    sampled from the same noise. Default: the first --rollout-batch-size rows of --dataset."""
    reward: str | None = None
    """file.py:function(images, prompts, **columns) -> one number per image; images: float tensor (B, 3, H, W) in [0,
    1]."""
    metric: str | None = None
    """file.py:function(images, prompts, **columns) -> {name: list}."""

    # ---- model
    lora_r: Natural = 0
    """Rank of the LoRA adapters that are trained instead of the weights; 0: train all weights."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Last part of the names of modules that get LoRA adapters (TRL: the projections of all attention layers)."""

    # ---- run
    save_every: Natural = 20
    """Optimizer steps between checkpoints, at most ten minutes; 0: only at the end, the best evaluation or a signal."""
    eval_every: Natural = 40
    """Optimizer steps between evaluations, which also happen at the start and the end; 0: never evaluate."""

    def __post_init__(self):
        """A step's size that is not given is at most that of the rollout."""
        if self.batch_size is None:
            self.batch_size = min(64, self.rollout_batch_size)
        super().__post_init__()

    def problems(self):
        if self.rollout_batch_size % max(1, self.batch_size):
            yield f"--rollout-batch-size {self.rollout_batch_size} must be a multiple of --batch-size {self.batch_size}"
        if self.stat_min_count > self.stat_buffer_size:
            yield f"--stat-min-count {self.stat_min_count} must be at most --stat-buffer-size {self.stat_buffer_size}"
        if self.negative_prompt and self.guidance_scale == 1:
            yield "--negative-prompt needs a --guidance-scale above 1"


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
    # diffusers' trailing spacing gives fewer or negative timesteps for some numbers of steps
    if len(timesteps) != num_inference_steps or timesteps.min() < 0:
        raise ValueError(f"its {scheduler.config.timestep_spacing} spacing cannot give that many timesteps")
    products = scheduler.alphas_cumprod.double()
    final_alpha = scheduler.final_alpha_cumprod.double()
    alphas = products[timesteps]
    prev_timesteps = timesteps - scheduler.config.num_train_timesteps // num_inference_steps
    prev_alphas = torch.where(prev_timesteps >= 0, products[prev_timesteps.clamp(0)], final_alpha)
    stds = eta * ((1 - prev_alphas) / (1 - alphas) * (1 - alphas / prev_alphas)).sqrt()
    return Schedule(
        timesteps=timesteps.to(device),
        alphas=alphas.to(device),
        prev_alphas=prev_alphas.to(device),
        stds=stds.to(device),
        prediction_type=scheduler.config.prediction_type,
        clip=scheduler.config.clip_sample_range if scheduler.config.clip_sample else None,
    )


def ddim_step_with_logprob(schedule, output, steps, latents, noise=None, next_latents=None):
    """A DDIM step with noise (Eqs. 12 and 16), or the log-probability of one that was taken.

    output, latents: (B, C, h, w), the UNet's output at `latents`; steps: (B,) positions in the schedule. With noise
    (B, C, h, w) the step is taken, else its result is `next_latents`. Returns (next_latents, logprobs): logprobs (B,)
    is the mean over the latents' dimensions of log N(next_latents; mean, sigma_t^2), 0 where sigma_t is 0.
    """

    def at_steps(table):
        return table[steps].to(latents.dtype).view(-1, 1, 1, 1)

    alpha = at_steps(schedule.alphas)
    prev_alpha = at_steps(schedule.prev_alphas)
    std = at_steps(schedule.stds)
    if schedule.prediction_type == "epsilon":
        clean = (latents - (1 - alpha).sqrt() * output) / alpha.sqrt()
        epsilon = output
    elif schedule.prediction_type == "sample":
        clean = output
        epsilon = (latents - alpha.sqrt() * output) / (1 - alpha).sqrt()
    else:  # v_prediction
        clean = alpha.sqrt() * latents - (1 - alpha).sqrt() * output
        epsilon = alpha.sqrt() * output + (1 - alpha).sqrt() * latents
    if schedule.clip is not None:
        clean = clean.clamp(-schedule.clip, schedule.clip)
    mean = prev_alpha.sqrt() * clean + (1 - prev_alpha - std**2).clamp(min=0).sqrt() * epsilon
    if next_latents is None:
        next_latents = mean + std * noise
    has_noise = std > 0
    scale = torch.where(has_noise, std, 1.0)
    deviation = (next_latents - mean) / scale
    logprobs = -(deviation**2) / 2 - scale.log() - math.log(2 * math.pi) / 2
    return next_latents, torch.where(has_noise, logprobs, 0.0).mean(dim=(1, 2, 3))


class PerPromptStats:
    """Mean and standard deviation of the last rewards of each prompt (App. D.3)."""

    def __init__(self, buffer_size, min_count, rewards=None):
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.rewards = {} if rewards is None else rewards  # {prompt: its last rewards}, kept in checkpoints

    def update(self, prompts, rewards):
        """Stores rewards (B,). Returns advantages (B,) by the prompt's rewards, by the batch's if it has too few."""
        rewards = np.asarray(rewards, dtype=np.float64)
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            kept = self.rewards.setdefault(prompt, [])
            kept.append(reward)
            del kept[: -self.buffer_size]
        advantages = np.empty_like(rewards)
        for i, prompt in enumerate(prompts):
            known = rewards
            if len(self.rewards[prompt]) >= self.min_count:
                known = np.array(self.rewards[prompt])
            advantages[i] = standardized(rewards[i], known, 1e-6)
        return advantages


def standardized(rewards, known, eps):
    """(rewards - mean) / (std + eps) by the known rewards. Float64, population std; exactly 0 where all are equal."""
    mean = known[0] if min(known) == max(known) else np.mean(known)  # rounding would leave a tiny advantage
    return (np.array(rewards) - mean) / (np.std(known) + eps)


def ddpo_loss(new_logprobs, logprobs, advantages, clip_range):
    """max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps)) for each (image, step) pair, (B,); App. D.1 and PPO Eq. 7."""
    ratio = torch.exp(new_logprobs - logprobs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.max(-advantages * ratio, -advantages * clipped)


# ---- Model -----------------------------------------------------------------------------------------------------------


class Embeddings:
    """Text embeddings of prompts, each computed once and on its own, so that none depends on its neighbours."""

    def __init__(self, pipeline, device, guidance_scale, negative_prompt):
        self.pipeline = pipeline
        self.device = device
        self.guided = guidance_scale > 1
        self.negative_prompt = negative_prompt
        self.known = {}

    @torch.no_grad()
    def __call__(self, prompts):
        """(B, 2, L, D) of [negative prompt, prompt]; without guidance (B, 1, L, D)."""
        if len(self.known) > 1000:  # about 0.5 GB for Stable Diffusion
            self.known = {}
        for prompt in set(prompts) - self.known.keys():
            embeds, negative = self.pipeline.encode_prompt(prompt, self.device, 1, self.guided, self.negative_prompt)
            self.known[prompt] = torch.cat([negative, embeds]) if self.guided else embeds
        return torch.stack([self.known[prompt] for prompt in prompts])


def predict(unet, latents, timesteps, embeds, guidance_scale):
    """The UNet's output at latents (B, C, h, w) and timesteps (B,), guided: e_u + w (e_c - e_u), at least float32."""
    num_texts = embeds.shape[1]
    inputs = latents.to(embeds.dtype).repeat_interleave(num_texts, 0)
    output = unet(inputs, timesteps.repeat_interleave(num_texts), embeds.flatten(0, 1)).sample
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    output = output.unflatten(0, (-1, num_texts))
    if num_texts == 1:
        return output[:, 0]
    return output[:, 0] + guidance_scale * (output[:, 1] - output[:, 0])


@dataclass
class Policy:
    """p(x_{t-1} | x_t, c), with everything needed to sample from it."""

    pipeline: object  # a StableDiffusionPipeline
    unet: nn.Module  # that of the pipeline, as accelerate has prepared it
    schedule: Schedule
    embed: Embeddings


# ---- Rollout ---------------------------------------------------------------------------------------------------------


def denoise(unet, schedule, embeds, noise, guidance_scale):
    """Denoises: embeds (B, 1 or 2, L, D), noise (B, N + 1, C, h, w) of the start and of each step. Returns latents
    (B, N + 1, C, h, w), from noise to clean, and logprobs (B, N)."""
    latents = noise[:, 0]
    trajectory = [latents]
    logprobs = []
    for step in range(len(schedule.timesteps)):
        steps = torch.full((len(embeds),), step, device=noise.device)
        output = predict(unet, latents, schedule.timesteps[steps], embeds, guidance_scale)
        latents, logprob = ddim_step_with_logprob(schedule, output, steps, latents, noise[:, step + 1])
        trajectory.append(latents)
        logprobs.append(logprob)
    return torch.stack(trajectory, dim=1), torch.stack(logprobs, dim=1)


@torch.no_grad()
def sample_images(accelerator, policy, prompts, stream, args, trajectories):
    """{"images": uint8 (B, 3, H, W)} of all prompts, on every process, each of which samples a share; where
    trajectories are wanted, with "latents" (B, N + 1, C, h, w) and "logprobs" (B, N).

    The noise of image i is keyed by (seed, *stream, i). Images are uint8, as a file would hold them, so that reward,
    grids and files agree.
    """
    policy.unet.eval()
    vae = policy.pipeline.vae
    dtype = torch.promote_types(vae.dtype, torch.float32)
    num_steps = len(policy.schedule.timesteps)
    height, width = np.broadcast_to(policy.pipeline.unet.config.sample_size, 2)  # of a square model one number
    noise_shape = (num_steps + 1, vae.config.latent_channels, height, width)
    own_rows = local_rows(accelerator, len(prompts))
    screen.show("drawing", len(own_rows))
    batches = []
    for i in range(0, len(own_rows), args.decode_batch_size):
        rows = own_rows[i : i + args.decode_batch_size]
        noise = np.stack([rng(args.seed, *stream, row).standard_normal(noise_shape) for row in rows])
        noise = torch.from_numpy(noise).to(accelerator.device, dtype)
        embeds = policy.embed([prompts[row] for row in rows])
        latents, logprobs = denoise(policy.unet, policy.schedule, embeds, noise, args.guidance_scale)
        decoded = vae.decode(latents[:, -1].to(vae.dtype) / vae.config.scaling_factor).sample.float()
        images = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        batch = {"images": images, "finite": decoded.isfinite().flatten(1).all(dim=1)}
        if trajectories:
            batch |= {"latents": latents, "logprobs": logprobs}
        batches.append(batch)
        screen.advance(len(rows))
    sampled = {}
    for name in batches[0]:
        own_part = torch.cat([batch[name] for batch in batches])
        sampled[name] = accelerator.gather(own_part)[: len(prompts)]
    finite = sampled.pop("finite")
    if not finite.all():  # on every process
        prompt = prompts[int(finite.int().argmin())]
        raise FloatingPointError(f"the image of {prompt!r:.60} is not finite")
    return sampled


def trained_steps(schedule):
    """The trainable positions in the schedule: those with noise."""
    return (schedule.stds > 0).nonzero().flatten().tolist()


def steps_per_image(args, trained):
    """How many of the trainable steps an image is trained on, in each pass."""
    return max(1, int(len(trained) * args.timestep_fraction))


def pair_minibatches(args, epoch, trained, process, world):
    """(image, step) pairs of each optimizer step of an epoch, for this process: a list of micro-batches, each a tensor
    (b, 2). Images are permuted in each pass; each image draws its steps from `trained`, positions in the schedule."""
    count = steps_per_image(args, trained)
    for ppo_epoch in range(args.ppo_epochs):
        order = rng(args.seed, "minibatches", epoch, ppo_epoch).permutation(args.rollout_batch_size)
        for images in order.reshape(-1, args.batch_size):
            pairs = []
            for image in images.tolist():
                positions = rng(args.seed, "timesteps", epoch, ppo_epoch, image).permutation(len(trained))[:count]
                pairs += [(image, trained[position]) for position in positions]
            yield torch.tensor(pairs[process::world]).split(args.micro_batch_size)


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


# ---- Update ----------------------------------------------------------------------------------------------------------


@dataclass
class Trajectories:
    """The samples of an epoch, on every process."""

    prompts: list  # B strings
    latents: torch.Tensor  # (B, N + 1, C, h, w), from noise to clean
    logprobs: torch.Tensor  # (B, N)
    advantages: torch.Tensor  # (B,)


def step_losses(policy, batch, pairs, args):
    """Losses (b,), with gradient, and log ratios (b,), without, of (image, step) pairs (b, 2)."""
    image, step = pairs.to(batch.latents.device).unbind(1)
    embeds = policy.embed([batch.prompts[i] for i in pairs[:, 0]])
    before = batch.latents[image, step]
    after = batch.latents[image, step + 1]
    output = predict(policy.unet, before, policy.schedule.timesteps[step], embeds, args.guidance_scale)
    _, new_logprobs = ddim_step_with_logprob(policy.schedule, output, step, before, next_latents=after)
    logprobs = batch.logprobs[image, step]
    losses = ddpo_loss(new_logprobs, logprobs, batch.advantages[image], args.cliprange)
    return losses, (new_logprobs - logprobs).detach()


def update(run, policy, optimizer, batch, args):
    """The updates of an epoch. Returns their metrics: means over the pairs, the largest deviation of a ratio from 1
    (also before the first update), and the last update's learning rate and gradient norm."""
    accelerator = run.accelerator
    unet = policy.unet
    epoch = run.iteration
    step = run.step - run.steps_per_iteration  # optimizer steps taken: run.step is that at the end of this iteration
    trained = trained_steps(policy.schedule)
    num_pairs = args.batch_size * steps_per_image(args, trained)  # of an update, of all processes
    sums = dict.fromkeys(("loss/policy", "policy/approxkl", "policy/clipfrac", "policy/ratio"), 0.0)
    largest = torch.zeros((), device=accelerator.device)
    at_first = None
    where = f"in epoch {epoch}, whose first prompt is {batch.prompts[0]!r:.60}"
    unet.train()
    for micro_batches in pair_minibatches(args, epoch, trained, accelerator.process_index, accelerator.num_processes):
        for pairs in accumulate(accelerator, unet, micro_batches):
            losses, log_ratio = step_losses(policy, batch, pairs, args)
            # data-parallel training averages gradients over the processes: multiply by their number
            accelerator.backward(losses.sum() * accelerator.num_processes / num_pairs)
            log_ratio = log_ratio.double()
            ratio = log_ratio.exp()
            deviation = (ratio - 1).abs()
            sums["loss/policy"] += losses.detach().double().sum()
            sums["policy/approxkl"] += (log_ratio**2 / 2).sum()
            sums["policy/clipfrac"] += (deviation > args.cliprange).double().sum()
            sums["policy/ratio"] += ratio.sum()
            largest = torch.maximum(largest, deviation.max().float())
        if at_first is None:  # the policy has not changed yet: this is rounding
            at_first = accelerator.gather(largest).max().item()
            if at_first > args.cliprange / 2 and epoch == 1:
                run.say(f"warning: rounding alone moves the ratio by {at_first:.1e}; --cliprange is {args.cliprange}")
        step += 1
        grad_norm = accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm or math.inf).item()
        require_finite(step, where, gradient_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak_lr"], step - 1, run.total_steps, args)
        optimizer.step()
        optimizer.zero_grad()
    are_finite = [weight.isfinite().all() for weight in unet.parameters() if weight.requires_grad]
    if not torch.stack(are_finite).all():
        raise FloatingPointError(f"step {step}: a weight is not finite; the last checkpoint is intact")
    totals = reduce_sums(accelerator, sums)
    metrics = {name: total / (num_pairs * run.steps_per_iteration) for name, total in totals.items()}
    metrics["policy/ratio_deviation"] = accelerator.gather(largest).max().item()
    metrics["policy/ratio_deviation_first"] = at_first
    return metrics | {"optim/lr": optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm}


# ---- Evaluation ------------------------------------------------------------------------------------------------------

TEXT_HEIGHT = 13  # pixels per line below an image


def evaluate(run, step, policy, data, args):
    """Mean reward and metrics of images, always from the same noise. Some are shown and saved as a grid."""
    accelerator = run.accelerator
    metrics = {}
    samples = []
    grids = {}  # {end of the file's name: picture}
    for name, rows in data.eval_sets.items():
        prompts = [row["prompt"] for row in rows]
        images = sample_images(accelerator, policy, prompts, ["eval"], args, trajectories=False)["images"]
        given = image_arguments(rows, images)
        scores, others = on_main(accelerator, data.reward, rows, given)
        columns = {"reward": scores, **others}
        if data.metric:
            own = on_main(accelerator, data.metric, rows, given)
            stop_if([f"--reward and --metric both return {key!r}: choose another name" for key in columns.keys() & own])
            columns |= own
        prefix = set_prefix(name)
        for column, values in columns.items():
            metrics[prefix + column] = sum(values) / len(values)
        metrics[prefix + "reward_std"] = float(np.std(columns["reward"]))
        metrics[prefix + "diversity"] = diversity(images)
        shared = {"set": name} if len(data.eval_sets) > 1 else {}
        for prompt, *values in zip(prompts, *columns.values(), strict=True):
            samples.append(shared | {"prompt": prompt} | dict(zip(columns, values, strict=True)))
        if run.dir and run.main:
            suffix = f"_{name.replace('/', '_')}" if name else ""
            grids[suffix] = grid(images, prompts, columns["reward"])
    run.samples(step, samples)
    save_grids(run, step, grids)
    return metrics


def image_arguments(rows, images):
    """The keyword arguments of reward and metric functions besides the rows' other columns: images (B, 3, H, W),
    float32 in [0, 1] on the CPU, and prompts."""
    return {"images": images.cpu().float() / 255, "prompts": [row["prompt"] for row in rows]}


def diversity(images):
    """Mean over pixels of the standard deviation over images; 0 if all are equal."""
    # row by row: all pixels in float64 would take 8 times the images' memory
    rows = [row.double().std(0, unbiased=False).mean() for row in images.unbind(2)]
    return torch.stack(rows).mean().item() / 255


def grid(images, prompts, rewards):
    """A picture of uint8 images (B, 3, H, W), eight per row, at most 96, with prompt and reward below each.

    Images are at most 128 pixels wide; smaller ones are enlarged, each pixel to a square.
    """
    images = images[:96].permute(0, 2, 3, 1).cpu().numpy()
    full_height, full_width = images.shape[1:3]
    width = min(128, full_width * max(1, 128 // full_width))
    height = max(1, full_height * width // full_width)
    tile_height = height + 2 * TEXT_HEIGHT
    sheet = Image.new("RGB", (8 * width, math.ceil(len(images) / 8) * tile_height), "white")
    font = ImageFont.load_default(size=10)
    for i, image in enumerate(images):
        tile = Image.new("RGB", (width, tile_height), "white")  # cuts text that is too long
        # boxes are means where the image shrinks, and squares where it grows
        tile.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))
        draw = ImageDraw.Draw(tile)
        draw.text((2, height + TEXT_HEIGHT - 3), visible(prompts[i][:width]), "black", font, anchor="ls")
        draw.text((2, height + 2 * TEXT_HEIGHT - 3), f"{rewards[i]:.3g}", "black", font, anchor="ls")
        sheet.paste(tile, (i % 8 * width, i // 8 * tile_height))
    return sheet


def save_grids(run, step, grids):
    """Writes pictures {end of the file's name: picture} to the run directory and the tracker."""
    for suffix, sheet in grids.items():
        path = run.dir / f"images/step_{step:08d}{suffix}.png"
        path.parent.mkdir(exist_ok=True)
        sheet.save(path)
        for tracker in run.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({f"eval/images{suffix}": np.asarray(sheet)[None]}, step=step, **layout)


# ---- Setup -----------------------------------------------------------------------------------------------------------


def read(args):
    """What the flags name, as `read_data` gives it. Without evaluation sets, the first rows are one."""
    given = ("images", "prompts")
    data = read_data(args.dataset, args.eval_dataset, reward=args.reward, metric=args.metric, given=given)
    if data.reward is None:
        raise InputError(f"--reward {args.reward}: expected path/to/file.py:function")
    data.rows = with_prompts(data.rows, "--dataset")
    for name, members in data.eval_sets.items():
        data.eval_sets[name] = with_prompts(members, set_flag(name))
    data.eval_sets = data.eval_sets or {"": data.rows[: args.rollout_batch_size]}
    return data


def with_prompts(rows, flag):
    """The rows with a text as prompt: from the column `prompt`, or `text` in a file of lines, without blank ones."""
    if "prompt" not in rows[0] and "text" in rows[0]:
        lines = texts(rows, "text", flag)
        rows = [row | {"prompt": line} for row, line in zip(rows, lines, strict=True) if line.strip()]
    if not rows:
        raise InputError(f"{flag} has only blank lines")
    texts(rows, "prompt", flag)
    return rows


def load(args, path, device):
    """The pipeline, whose UNet's weights or adapters are trainable as the flags say, and its denoising steps."""
    screen.show("loading the pipeline")
    pipeline = load_pipeline(args, path)
    try:
        schedule = ddim_schedule(pipeline.scheduler, args.num_inference_steps, args.eta, device)
        if not trained_steps(schedule):
            raise ValueError("no step of this scheduler has noise")
    except (ValueError, IndexError) as error:  # of a scheduler that has fewer steps
        raise InputError(f"--num-inference-steps {args.num_inference_steps}: {error}") from None
    pipeline.to(device)
    if args.lora_r:
        add_lora(pipeline.unet, args)
    elif pipeline.unet.dtype.itemsize < 4:
        raise InputError(
            "--dtype bfloat16: most updates of such weights would be lost to rounding: use "
            "--mixed-precision bf16 instead, or train adapters with --lora-r"
        )
    else:
        pipeline.unet.requires_grad_(True)
    if args.gradient_checkpointing:
        pipeline.unet.enable_gradient_checkpointing()
    return pipeline, schedule


def load_pipeline(args, path):
    """The Stable Diffusion pipeline, frozen, with a DDIM scheduler of its own noise schedule. An object is changed in
    place, and keeps its type of weights."""
    from diffusers import DiffusionPipeline, StableDiffusionPipeline
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    pipeline = path
    name = type(path).__name__
    if isinstance(path, str):
        name = str(spec_path(path) or path)
        with loading("--model", name):
            pipeline = DiffusionPipeline.from_pretrained(
                name,
                dtype=getattr(torch, args.dtype),
                revision=args.revision,
                trust_remote_code=args.trust_remote_code,
                safety_checker=None,
            )
    if not isinstance(pipeline, StableDiffusionPipeline):
        class_name = type(pipeline).__name__
        raise InputError(f"--model {name} is a {class_name}, expected a StableDiffusionPipeline (SD 1.x or 2.x)")
    prediction = pipeline.scheduler.config.prediction_type
    if prediction not in ("epsilon", "sample", "v_prediction"):
        raise InputError(f"--model {name}: its scheduler has the prediction type {prediction}")
    size = pipeline.unet.config.sample_size
    for value in [*(size if isinstance(size, list | tuple) else [size]), pipeline.vae.config.scaling_factor]:
        if not (isinstance(value, int | float) and 0 < value < 10**5):
            raise InputError(f"--model {name}: {value!r} is no sample_size of a UNet or scaling_factor of a VAE")
    if pipeline.unet.config.time_cond_proj_dim is not None:
        raise InputError(f"--model {name} is a latent consistency model, whose UNet takes the guidance as an input")
    num_words = len(pipeline.tokenizer)
    expected = pipeline.text_encoder.config.vocab_size
    if not expected / 2 < num_words <= expected:  # transformers makes up a tokenizer if its files are missing
        sizes = f"its tokenizer ({num_words} tokens) does not fit its text encoder ({expected} tokens)"
        raise InputError(f"--model {name}: {sizes}")
    pipeline.scheduler = ddim_scheduler(pipeline.scheduler, name)
    pipeline.safety_checker = None
    pipeline.register_to_config(requires_safety_checker=False)
    for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        for weight_name, weight in module.named_parameters():
            if weight.is_meta:
                raise InputError(f"--model {name}: {weight_name} is missing")
        module.requires_grad_(False).eval()
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    return pipeline


def ddim_scheduler(scheduler, path):
    """A DDIM scheduler of the noise schedule of another one, without thresholding, which is for pixels."""
    from diffusers import DDIMScheduler

    config = dict(scheduler.config)
    config.pop("_use_default_values", None)  # diffusers would put DDIM's defaults in place of these values
    if "beta_start" not in config:
        raise InputError(f"--model {path}: its {type(scheduler).__name__} has no beta_start, as DDIM needs")
    # latents have no range to be clipped to; a scheduler that knows no clipping would get DDIM's default, on
    config.setdefault("clip_sample", False)
    config["thresholding"] = False
    return DDIMScheduler.from_config(config)


def add_lora(unet, args):
    """Adapters at --lora-targets, which change nothing before the first update: B is zero, A ~ N(0, 1 / r^2). At least
    float32, since small updates would be lost in bfloat16."""
    from peft import LoraConfig

    alpha = args.lora_alpha or args.lora_r
    targets = list(args.lora_targets)
    names = [name for name, _ in unet.named_modules()]
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    stop_if([f"--lora-targets: no module of the UNet is named {target}" for target in missing])
    adapters = LoraConfig(r=args.lora_r, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
    try:
        unet.add_adapter(adapters)
    except ValueError as error:
        raise InputError(f"--lora-targets {' '.join(targets)}: {error}") from None
    for name, weight in unet.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if "lora_A" in name:  # by a keyed draw, whatever the state of torch's generator
            normal = rng(args.seed, f"lora {name}").standard_normal(tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(normal / args.lora_r))


def summary(run, policy, data):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    tokenizer = policy.pipeline.tokenizer
    prompts = [row["prompt"] for row in data.rows]
    evaluated = [row["prompt"] for row in itertools.chain(*data.eval_sets.values())]
    texts_of = {"--dataset": prompts, "--eval-dataset": evaluated, "--negative-prompt": [args.negative_prompt]}
    cut = ""
    for flag, members in texts_of.items():
        num_cut = sum(len(ids) > tokenizer.model_max_length for ids in tokenizer(members).input_ids)
        if num_cut:
            cut += f"; {flag}: {num_cut} cut to {tokenizer.model_max_length} tokens"
    with_noise = trained_steps(policy.schedule)
    steps = steps_per_image(args, with_noise)
    pairs = args.batch_size // run.accelerator.num_processes * steps
    return {
        "data": f"{len(prompts)} prompts, {len(evaluated)} to evaluate{cut}; first: {prompts[0][:200]!r}",
        "epochs": f"{args.num_epochs}, each with {args.rollout_batch_size} images of {args.num_inference_steps} steps, "
        f"{len(with_noise)} of them with noise, then optimizer steps: {run.steps_per_iteration} of {args.batch_size} "
        f"images x {steps} steps, {pairs} pairs per process, {args.micro_batch_size} per forward pass",
    }


def sampling_code(args, unet):
    """Code that loads the exported pipeline and samples from it; `Run.finish` fills in {folder} and {prompt}."""
    settings = f"num_inference_steps={args.num_inference_steps}, eta={args.eta}, guidance_scale={args.guidance_scale}"
    if args.negative_prompt:
        negative_prompt = repr(args.negative_prompt).replace("{", "{{").replace("}", "}}")
        settings += f", negative_prompt={negative_prompt}"
    return (
        "import torch; from diffusers import StableDiffusionPipeline\n"
        f"pipeline = StableDiffusionPipeline.from_pretrained({{folder!r}}, dtype={unet.dtype})\n"
        f"pipeline({{prompt!r}}, {settings}).images[0].save('sample.png')"
    )


def export(run, pipeline, name):
    """Writes the pipeline to a directory of the run."""
    on_main(run.accelerator, export_pipeline, pipeline, run.dir / name)


@torch.no_grad()
def export_pipeline(pipeline, folder):
    """Writes a pipeline that plain diffusers loads. LoRA adapters are merged into it, and also saved in `lora/` for
    `load_lora_weights`."""
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

IN_STATUS = ["objective/scores", "objective/scores_std", "policy/approxkl", "policy/clipfrac"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    path = build(args.model, "--model")
    data = read(args)
    run = Run(args, __file__, fsdp=False)
    if run.finished:
        return run.result()
    torch.set_float32_matmul_precision("highest")  # launch has chosen for text, and a UNet is slower so
    accelerator = run.accelerator
    pipeline, schedule = load(args, path, accelerator.device)
    run.check_inputs(data, model=pipeline.unet)
    unet = accelerator.prepare(pipeline.unet)
    embed = Embeddings(pipeline, accelerator.device, args.guidance_scale, args.negative_prompt)
    policy = Policy(pipeline, unet, schedule, embed)
    optimizer = make_optimizer(unet, args)
    save_pipeline = partial(export, run, pipeline)
    headline = "objective/scores"
    if args.eval_every:
        headline = f"{set_prefix(next(iter(data.eval_sets)))}reward"
    steps = args.ppo_epochs * (args.rollout_batch_size // args.batch_size)  # optimizer steps of an epoch
    shown = [headline, *IN_STATUS]
    # values that checkpoints keep: state.rewards
    state = run.begin(unet, optimizer, pipeline.unet, args.num_epochs, shown, steps_per_iteration=steps, rewards={})
    stats = PerPromptStats(args.stat_buffer_size, args.stat_min_count, state.rewards)
    run.tell(pipeline.unet, summary(run, policy, data))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, policy, data, args))
        run.save(run.first_step, save_pipeline)

    for epoch in run.iterations():
        # 1. x_0 ~ p(. | c): images with the latents and log-probabilities of their steps
        size = args.rollout_batch_size
        drawn = draw_rows(args.seed, len(data.rows), (epoch - 1) * size, size)
        rows = [data.rows[i] for i in drawn]
        prompts = [row["prompt"] for row in rows]
        sampled = sample_images(accelerator, policy, prompts, ["rollout", epoch], args, trajectories=True)
        run.lap("rollout")
        # 2. r(x_0, c), and advantages by the statistics of each prompt
        given = image_arguments(rows, sampled["images"])
        scores, others = on_main(accelerator, data.reward, rows, given)
        if epoch == 1 and min(scores) == max(scores):
            run.say(f"warning: all rewards of the first epoch are {scores[0]}, so there is nothing to learn from them")
        advantages = stats.update(prompts, scores) if args.per_prompt_stats else standardized(scores, scores, 1e-8)
        advantages = torch.from_numpy(advantages).clamp(-args.adv_clip_max, args.adv_clip_max)
        run.lap("reward")
        # 3. clipped objective (Sec. 4.3) on the (image, step) pairs of minibatches of images
        logprobs = sampled["logprobs"]
        batch = Trajectories(prompts, sampled["latents"], logprobs, advantages.to(logprobs))
        metrics = {
            "epoch": epoch,
            "objective/scores": np.mean(scores),
            "objective/scores_std": np.std(scores),
            "objective/diversity": diversity(sampled["images"]),
            **{f"reward/{name}": np.mean(values) for name, values in others.items()},
            **update(run, policy, optimizer, batch, args),
        }
        run.lap("update")
        # 4. log, evaluate, save
        run.log(run.step, metrics, images=size)
        if run.evaluation_due(run.step):
            run.log_evaluation(run.step, evaluate(run, run.step, policy, data, args))
        run.save(run.step, save_pipeline)

    code = sampling_code(args, pipeline.unet)
    return run.finish(save_pipeline, data.rows[0]["prompt"], code)


if __name__ == "__main__":
    cli(Args, main, task=TASK)
