"""Denoising diffusion policy optimisation: `python -m pytest tests/test_ddpo.py`

The sampler against diffusers' scheduler and pipeline, the rest of the maths against hand numbers and slow definitions;
the functions of users, pipelines that do not fit, adapters, exports, flags; and the shapes task with its committed
pipeline. Runs of main are in test_ddpo_runs.py.
"""

import copy
import io
import itertools
import json
import math
import shutil
from collections import Counter
from functools import partial
from itertools import product
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.schedulers import scheduling_ddim
from PIL import Image
from test_maths import close, random, tensor
from torch.nn import functional as F

from algos import ddpo
from benchmarks.tasks import shapes
from common import logging
from common.cli import InputError, from_task
from common.seeding import rng

B, N, C, H, W = 3, 5, 2, 7, 11  # of the pure functions; that of the pipelines are 5 x 4 x 12
NAN, INF = math.nan, math.inf
PREDICTIONS, SPACINGS = ("epsilon", "sample", "v_prediction"), ("leading", "trailing", "linspace")
PROMPTS = ["a red circle", "a blue square", "a yellow triangle"]


def exact_scheduler(steps, **options):
    """Stable Diffusion's scheduler with float64 tables, so that nothing hides in its rounding."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    scheduler = DDIMScheduler(**betas | options)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.fixture
def policy(build_pipeline):
    """policy(prediction, dtype, steps, guidance, negative, **scheduler options) -> pipeline, schedule, embed."""

    def load(prediction="epsilon", dtype=torch.float64, steps=3, guidance=1.0, negative="", eta=1.0, **scheduler):
        pipeline = ddpo.load_pipeline(from_task(ddpo.Args, ddpo.TASK), build_pipeline(prediction, dtype, **scheduler))
        schedule = ddpo.ddim_schedule(pipeline.scheduler, steps, eta)
        return pipeline, schedule, ddpo.Embeddings(pipeline, "cpu", guidance, negative)

    return load


# ---- A step ----------------------------------------------------------------------------------------------------------


def by_hand(prediction, clip=None):
    """One step from alpha 0.36 to 0.64 with sigma 0.48, so that sqrt(1 - 0.64 - 0.48^2) is 0.36."""
    return ddpo.Schedule(torch.tensor([7]), *(tensor(x) for x in (0.36, 0.64, 0.48)), prediction, clip)


@pytest.mark.parametrize(
    ("prediction", "clip", "mean"),
    [
        ("epsilon", None, 0.8 * 1.0 + 0.36 * 0.5),  # x_0 is (1 - 0.8 x 0.5) / 0.6
        ("sample", None, 0.8 * 0.5 + 0.36 * 0.875),  # epsilon is (1 - 0.6 x 0.5) / 0.8
        ("v_prediction", None, 0.8 * 0.2 + 0.36 * 1.1),  # 0.6 x 1 - 0.8 x 0.5 and 0.6 x 0.5 + 0.8 x 1
        ("epsilon", 0.25, 0.8 * 0.25 + 0.36 * 0.5),
        ("sample", 0.25, 0.8 * 0.25 + 0.36 * 0.875),
        ("v_prediction", 0.1, 0.8 * 0.1 + 0.36 * 1.1),
    ],
)
def test_a_step_by_hand(prediction, clip, mean):
    schedule, ones, step = by_hand(prediction, clip), torch.ones(1, C, H, W).double(), torch.tensor([0])
    found, logprobs = ddpo.ddim_step_with_logprob(schedule, ones / 2, step, ones, noise=2 * ones)
    close(found, (mean + 0.96) * ones)
    close(logprobs, [-2 - math.log(0.48) - math.log(2 * math.pi) / 2])
    found, logprobs = ddpo.ddim_step_with_logprob(schedule, ones / 2, step, ones, next_latents=(mean - 0.24) * ones)
    close(found, (mean - 0.24) * ones)
    close(logprobs, [-1 / 8 - math.log(0.48) - math.log(2 * math.pi) / 2])


def agrees_with_diffusers(scheduler, eta):
    """Asserts that all steps of the scheduler are taken and valued as diffusers and torch do; the sigmas."""
    schedule, stds = ddpo.ddim_schedule(scheduler, scheduler.num_inference_steps, eta), []
    assert torch.equal(schedule.timesteps, scheduler.timesteps) and schedule.stds.dtype == torch.float64
    for i, timestep in enumerate(scheduler.timesteps):
        latents, output, noise = (2 * random(B, C, H, W, seed=3 * i + j) for j in range(3))
        step = partial(scheduler.step, output, timestep, latents, eta=eta)
        expected, mean = (step(variance_noise=x).prev_sample for x in (noise, noise * 0))
        std = (step(variance_noise=noise * 0 + 1).prev_sample - mean)[0, 0, 0, 0].item()
        steps = torch.full((B,), i)
        found, logprobs = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, noise)
        close(found, expected)
        assert schedule.stds[i].item() == pytest.approx(std, abs=1e-14)
        stds.append(schedule.stds[i].item())
        if stds[-1]:
            close(logprobs, torch.distributions.Normal(mean, schedule.stds[i]).log_prob(found).mean(dim=(1, 2, 3)))
        else:
            assert not logprobs.any()
        other = mean + random(B, C, H, W, seed=9)
        found, logprobs = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, next_latents=other)
        assert found is other
        if stds[-1]:
            close(logprobs, torch.distributions.Normal(mean, schedule.stds[i]).log_prob(other).mean(dim=(1, 2, 3)))
    return stds


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_step_is_that_of_diffusers(prediction, spacing):
    for steps, offset, to_one, clip, eta in product((1, 3, 7), (0, 1), (True, False), (None, 0.7), (0.3, 1.0)):
        options = {"clip_sample": clip is not None, "clip_sample_range": clip or 1.0, "set_alpha_to_one": to_one}
        options |= {"prediction_type": prediction, "timestep_spacing": spacing, "steps_offset": offset}
        scheduler = exact_scheduler(steps, **options)
        stds = agrees_with_diffusers(scheduler, eta)
        assert len(stds) == steps and all(std > 0 for std in stds[:-1])
        last, last_but_one = scheduler.timesteps[-1], scheduler.timesteps[-1] - 1000 // steps
        assert (stds[-1] > 0) == (last_but_one >= 0 or not to_one and last > 0)


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
def test_a_first_step_from_pure_noise(prediction, spacing):
    """rescale_betas_zero_snr makes the last alpha 0."""
    options = {"prediction_type": prediction, "timestep_spacing": spacing, "rescale_betas_zero_snr": True}
    for steps, eta in product((3, 7), (0.3, 0.9)):  # at 1 diffusers takes the root of 0, or of a bit less
        agrees_with_diffusers(exact_scheduler(steps, **options), eta)
    for steps in range(2, 60):
        schedule = ddpo.ddim_schedule(exact_scheduler(steps, **options), steps, 1.0)
        assert schedule.alphas[0] == 0 and schedule.stds[0] > 0
        latents, output, noise = (random(1, C, H, W, seed=i) for i in range(3))
        found = ddpo.ddim_step_with_logprob(schedule, output, torch.tensor([0]), latents, noise)
        clean = -output if prediction == "v_prediction" else output  # and nothing of the latents
        close(found[0], schedule.prev_alphas[0].sqrt() * clean + schedule.stds[0] * noise, 1e-6)
        assert found[1].isfinite()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_steps_of_a_mixed_batch_are_those_of_single_ones(prediction):
    schedule = ddpo.ddim_schedule(exact_scheduler(N, prediction_type=prediction), N, 0.8)
    steps = torch.tensor([4, 0, 2, 2, 1, 3, 0])
    latents, output, noise = (random(7, C, H, W, seed=i) for i in range(3))
    found = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, noise)
    again = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, next_latents=found[0])
    close(again[1], found[1])
    for i in range(7):
        one = ddpo.ddim_step_with_logprob(schedule, *(x[i : i + 1] for x in (output, steps, latents, noise)))
        for single, mixed in zip(one, found, strict=True):
            close(single, mixed[i : i + 1])


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("to_one", [True, False])
def test_a_step_without_noise_counts_nothing(prediction, to_one):
    """TRL's log-probability of it is NaN (pitfall X3), and would be in the gradient even where the loss leaves it out:
    here a neighbour in the batch has the gradient that it has alone."""
    scheduler = exact_scheduler(N, prediction_type=prediction, set_alpha_to_one=to_one, steps_offset=int(to_one))
    schedule = ddpo.ddim_schedule(scheduler, N, 1.0)
    assert (schedule.stds > 0).tolist() == [True] * 4 + [False]
    latents, output, other = (random(B, C, H, W, seed=i) for i in range(3))
    steps, grads = torch.tensor([1, 4, 3]), []
    for rows in ([0, 1, 2], [0, 2]):
        out = output[rows].requires_grad_()
        _, logprobs = ddpo.ddim_step_with_logprob(schedule, out, steps[rows], latents[rows], next_latents=other[rows])
        assert logprobs.isfinite().all()
        (logprobs.exp() + logprobs).sum().backward()
        grads.append(out.grad)
    assert logprobs.all() and grads[0][[0, 2]].any() and not grads[0][1].any()
    close(grads[0][[0, 2]], grads[1])
    taken, logprobs = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, noise=other)
    mean, _ = ddpo.ddim_step_with_logprob(schedule, output, steps, latents, noise=other * 0)
    assert torch.equal(taken[1], mean[1]) and logprobs[1] == 0 and not torch.equal(taken[0], mean[0])


def test_other_betas_and_lengths_of_training():
    for betas in ({"trained_betas": np.linspace(0.001, 0.02, 1000).tolist()}, {"beta_schedule": "squaredcos_cap_v2"}):
        agrees_with_diffusers(exact_scheduler(7, **betas), 0.7)
    for steps, length in ((3, 10), (10, 10), (7, 100)):
        stds = agrees_with_diffusers(exact_scheduler(steps, num_train_timesteps=length, beta_end=0.2), 1.0)
        assert all(stds[:-1]) and stds[-1] == 0
    with pytest.raises(ValueError, match="11"):
        ddpo.ddim_schedule(exact_scheduler(3, num_train_timesteps=10), 11, 1.0)


def test_a_schedule_that_begins_after_the_training():
    """All 1000 steps, one late: main catches it."""
    with pytest.raises(IndexError, match="1000"):
        ddpo.ddim_schedule(exact_scheduler(3, steps_offset=1), 1000, 1.0)


# ---- Advantages, loss ------------------------------------------------------------------------------------------------


GOLDEN = [-0.848528, -0.565685, -0.282843, 1.697056]


@pytest.mark.parametrize("rewards", [[1, 2, 3, 10], np.array([1, 2, 3, 10]), (1.0, 2.0, 3.0, 10.0)], ids=str)
def test_advantages_golden(rewards):
    """TRL's took the type of the rewards: integers gave 0, 0, 0, 1 (pitfall X6)."""
    stats = ddpo.PerPromptStats(32, 16)
    found = stats.update(["a", "b", "a", "b"], rewards)
    assert found.dtype == np.float64 and found == pytest.approx(GOLDEN, abs=2e-6)
    assert {prompt: list(known) for prompt, known in stats.rewards.items()} == {"a": [1, 3], "b": [2, 10]}
    found = ddpo.PerPromptStats(32, 2).update(["a", "b", "a", "b"], rewards)
    assert found == pytest.approx([-1, -1, 1, 1], abs=2e-6)


def slow_advantages(history, prompts, rewards, size, count):
    """From all rewards that a prompt ever had, those of this update included."""
    for prompt, reward in zip(prompts, rewards, strict=True):
        history.setdefault(prompt, []).append(reward)
    advantages = []
    for prompt, reward in zip(prompts, rewards, strict=True):
        known = history[prompt][-size:]
        known = rewards if len(known) < count else known
        mean = sum(known) / len(known)
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
        advantages.append((reward - mean) / (std + 1e-6))
    return advantages


@pytest.mark.parametrize(("size", "count"), [(3, 1), (3, 3), (7, 2), (100, 5), (5, 5), (1, 1)])
def test_advantages_are_the_slow_definition(size, count):
    stats, history, draws = ddpo.PerPromptStats(size, count), {}, np.random.default_rng(0)
    for batch in (11, 1, 5, 13, 2):
        prompts = [f"prompt {i}" for i in draws.choice(3, batch, p=[0.6, 0.3, 0.1])]
        rewards = (draws.normal(size=batch) * 3 + 7).tolist()
        found = stats.update(prompts, rewards)
        assert found == pytest.approx(slow_advantages(history, prompts, rewards, size, count), rel=1e-9, abs=1e-9)
    assert {prompt: list(x) for prompt, x in stats.rewards.items()} == {p: x[-size:] for p, x in history.items()}
    assert max(map(len, history.values())) > 13


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),  # eps is 0.1; the slope is that by the new log-probability
    [
        (2, 1.0, -2.0, -2.0),
        (2, 1.05, -2.1, -2.1),
        (2, 1.5, -2.2, 0.0),  # clipped: no further
        (2, 0.5, -1.0, -1.0),  # the wrong way: not clipped
        (-2, 1.0, 2.0, 2.0),
        (-2, 0.95, 1.9, 1.9),
        (-2, 0.5, 1.8, 0.0),
        (-2, 1.5, 3.0, 3.0),
        (0, 1.5, 0.0, 0.0),
    ],
)
def test_ddpo_loss_by_hand(advantage, ratio, loss, slope):
    old, others = tensor(-3.5, 0.7), tensor(1.0)
    new = (old[0] + math.log(ratio)).detach().requires_grad_()
    losses = ddpo.ddpo_loss(torch.stack([new, old[1]]), old, torch.stack([tensor(advantage)[0], others[0]]), 0.1)
    close(losses.data, [loss, -1.0])
    losses[0].backward()
    assert new.grad.item() == pytest.approx(slope)


# ---- Model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.5, 5.0])
@pytest.mark.parametrize("negative", ["", "a green square"])
def test_guidance_is_the_formula(policy, monkeypatch, weight, negative):
    pipeline, schedule, embed = policy(guidance=weight, negative=negative)
    latents, timesteps = random(B, 5, 4, 12), torch.tensor([667, 1, 334])
    calls, forward = [], pipeline.unet.forward
    monkeypatch.setattr(pipeline.unet, "forward", lambda x, *rest: calls.append(len(x)) or forward(x, *rest))
    found = ddpo.predict(pipeline.unet, latents, timesteps, embed(PROMPTS), weight)
    assert calls == [2 * B] and found.shape == latents.shape
    texts = [torch.cat([pipeline.encode_prompt(p, "cpu", 1, False)[0] for p in x]) for x in ([negative] * B, PROMPTS)]
    plain, guided = (pipeline.unet(latents, timesteps, text).sample for text in texts)
    close(found, plain + weight * (guided - plain))
    assert (found - guided).std() > 0.05


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_outputs_are_at_least_float32(policy, guidance):
    timesteps = torch.tensor([667, 1, 334])
    for dtype, expected in zip(DTYPES, (torch.float32, torch.float32, torch.float64), strict=True):
        pipeline, _, embed = policy(dtype=dtype, guidance=guidance)
        latents = random(B, 5, 4, 12).to(expected)
        found = ddpo.predict(pipeline.unet, latents, timesteps, embed(PROMPTS), guidance)
        assert found.dtype == expected
        if dtype == torch.float32:
            with torch.autocast("cpu", torch.bfloat16):
                rounded = ddpo.predict(pipeline.unet, latents, timesteps, embed(PROMPTS), guidance)
            assert rounded.dtype == torch.float32 and 0 < (rounded - found).abs().max() < 0.1 * guidance
            # the sum of the two is of float32, not of bfloat16
            assert guidance == 1 or not torch.equal(rounded, rounded.bfloat16().float())


DTYPES = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(("guidance", "negative"), [(1.0, ""), (4.0, ""), (4.0, "a green square")])
def test_embeddings_are_those_of_the_pipeline(policy, monkeypatch, guidance, negative):
    pipeline, _, embed = policy(guidance=guidance, negative=negative)
    calls, encode = [], pipeline.encode_prompt
    monkeypatch.setattr(pipeline, "encode_prompt", lambda prompt, *rest: calls.append(prompt) or encode(prompt, *rest))
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    found = embed(prompts)
    assert found.shape == (3, 1 + (guidance > 1), 8, 12) and not found.requires_grad
    positive, other = encode(prompts, "cpu", 1, guidance > 1, [negative] * 3)
    close(found[:, -1], positive)
    if guidance > 1:
        close(found[:, 0], other)
        assert (found[0, 0] - found[0, 1]).std() > 0.1
    assert sorted(calls) == sorted(PROMPTS[:2])
    alone = embed([PROMPTS[2]])
    assert torch.equal(embed([PROMPTS[1], PROMPTS[2], PROMPTS[0]]), torch.cat([found[1:2], alone, found[:1]]))
    assert sorted(calls) == sorted(PROMPTS)  # each once
    alike = ["a red circle", "a red square", "a red triangle"]
    assert len({row.numpy().tobytes() for row in embed(alike)[:, -1]}) == 3
    assert torch.equal(ddpo.Embeddings(pipeline, "cpu", guidance, negative)(PROMPTS)[2:], alone)


def test_embeddings_forget():
    """A run on a hundred thousand prompts keeps about a thousand of them."""
    encode = SimpleNamespace(encode_prompt=lambda prompt, *_: (torch.full((1, 2, 3), float(prompt)), None))
    embed, largest = ddpo.Embeddings(encode, "cpu", 1.0, ""), 0
    for start in range(0, 5000, 400):
        numbers = [*range(start, start + 500), 7]
        assert embed([str(i) for i in numbers])[:, 0, 0, 0].tolist() == numbers
        largest = max(largest, len(embed.known))
    assert 1000 < largest < 2000


# ---- Rollout ---------------------------------------------------------------------------------------------------------


def sample(policy, prompts, stream=("rollout", 3), trajectories=True, world=1, gather=None, **options):
    """sample_images, and what it was called with; of several processes the parts, put together."""
    names = {"dtype", "prediction", "steps", "negative", "eta"} & options.keys()
    args = from_task(ddpo.Args, ddpo.TASK, **{name: value for name, value in options.items() if name not in names})
    loaded = policy(guidance=args.guidance_scale, **{name: options[name] for name in names})
    parts = []
    for process in range(world):
        machine = {"process_index": process, "is_main_process": process == 0, "gather": gather or (lambda x: x)}
        machine = SimpleNamespace(num_processes=world, device=torch.device("cpu"), **machine)
        pipeline, schedule, embed = loaded
        sampler = ddpo.Policy(pipeline, pipeline.unet, schedule, embed)
        parts.append(ddpo.sample_images(machine, sampler, prompts, list(stream), args, trajectories))
    names = ["images", "latents", "logprobs"] if trajectories else ["images"]
    assert all(sorted(part) == names for part in parts)
    whole = [torch.cat([part[name] for part in parts]) for name in names]
    return [tensor[: len(prompts) * (world > 1) or None] for tensor in whole], loaded


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == torch.uint8:
            assert torch.equal(a, b)
        else:
            close(a, b, 1e-11)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("guidance", "negative"), [(1.0, None), (4.0, None), (4.0, "a green square")])
def test_images_are_those_of_the_pipeline(policy, monkeypatch, prediction, guidance, negative):
    """That plain diffusers makes of the same noise, with its own loop, scheduler and image processor."""
    options = {"steps": 5, "eta": 0.7, "prediction": prediction, "guidance_scale": guidance, "negative": negative or ""}
    (images, latents, logprobs), (pipeline, _, _) = sample(policy, PROMPTS, seed=11, **options)
    assert images.dtype == torch.uint8 and images.shape == (B, 3, 8, 24)
    assert latents.shape == (B, 6, 5, 4, 12) and logprobs.shape == (B, 5)
    noise = np.stack([rng(11, "rollout", 3, row).standard_normal((6, 5, 4, 12)) for row in range(B)])
    draws = iter(torch.from_numpy(noise).unbind(1))
    assert torch.equal(latents[:, 0], next(draws))
    monkeypatch.setattr(scheduling_ddim, "randn_tensor", lambda shape, **_: next(draws).reshape(shape))
    pipeline.set_progress_bar_config(disable=True)
    call = partial(pipeline, PROMPTS, num_inference_steps=5, eta=0.7, guidance_scale=guidance, latents=latents[:, 0])
    theirs = np.stack([np.asarray(image) for image in call(negative_prompt=negative and [negative] * B).images])
    assert theirs.shape == (B, 8, 24, 3) and len(np.unique(theirs)) > 100
    difference = np.abs(theirs.transpose(0, 3, 1, 2).astype(int) - images.numpy())
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-2


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_do_not_depend_on_what_is_decoded_together(policy, guidance):
    prompts = [PROMPTS[i % 3] for i in range(7)]
    whole, _ = sample(policy, prompts, guidance_scale=guidance, decode_batch_size=64)
    assert len({image.numpy().tobytes() for image in whole[0]}) == 7  # each with noise of its own
    for size in (1, 3):
        same(sample(policy, prompts, guidance_scale=guidance, decode_batch_size=size)[0], whole)
    for world in (2, 5):
        same(sample(policy, prompts, guidance_scale=guidance, world=world, decode_batch_size=2)[0], whole)
    same(sample(policy, prompts[:4], guidance_scale=guidance)[0], [part[:4] for part in whole])
    (images,), _ = sample(policy, prompts, trajectories=False, guidance_scale=guidance)
    assert torch.equal(images, whole[0])
    found, _ = sample(policy, prompts, guidance_scale=guidance, gather=lambda x: torch.cat([x, x]))
    same(found, whole)  # what was gathered besides is left out


def test_noise_is_keyed(policy):
    first = sample(policy, PROMPTS[:2])[0]
    for changes in ({"stream": ("rollout", 4)}, {"stream": ("eval", 3)}, {"stream": ("eval",)}, {"seed": 2}):
        other = sample(policy, PROMPTS[:2], **changes)[0]
        assert not torch.equal(other[0][0], first[0][0]) and not torch.equal(other[1][:, 0], first[1][:, 0])
    other = sample(policy, [PROMPTS[1]] * 2)[0]  # noise does not depend on the prompt
    assert torch.equal(other[1][:, 0], first[1][:, 0]) and not torch.equal(other[0][0], first[0][0])
    assert torch.equal(other[0][1], first[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_at_least_float32(policy, dtype):
    (images, latents, logprobs), _ = sample(policy, PROMPTS, dtype=dtype)
    assert latents.dtype == logprobs.dtype == torch.promote_types(dtype, torch.float32)
    assert not latents.requires_grad and not logprobs.requires_grad and images.dtype == torch.uint8
    noise = np.stack([rng(1, "rollout", 3, row).standard_normal((4, 5, 4, 12))[0] for row in range(B)])
    assert torch.equal(latents[:, 0], torch.from_numpy(noise).to(latents.dtype))
    reference = sample(policy, PROMPTS)[0][1]
    assert (latents - reference).abs().max() < (1 if dtype == torch.bfloat16 else 1e-3)


def test_images_that_are_not_finite(policy):
    load = policy

    def broken(**options):
        pipeline, schedule, embed = load(**options)
        decode, spoil = pipeline.vae.decode, embed([PROMPTS[1]])
        seen = []  # the captions of what is denoised, and so decoded, next

        def watched(prompts):
            seen[:] = [torch.equal(row, spoil[0]) for row in embed(prompts)]
            return embed(prompts)

        def broken_decode(latents):
            images = decode(latents).sample
            images[torch.tensor(seen), 1, 2, 3] = NAN
            return SimpleNamespace(sample=images)

        pipeline.vae.decode = broken_decode
        return pipeline, schedule, watched

    for world in (1, 2):
        with pytest.raises(FloatingPointError, match="the image of 'a blue square' is not finite"):
            sample(broken, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], world=world, decode_batch_size=2)


def test_images_are_clamped_and_rounded(policy):
    """0.5 of a level and more is the next one; outside [-1, 1] is black or white."""
    levels = tensor(-3.0, -1.0, -0.2, 0.0, 0.6, 1.0, 1.5)
    expected = [0, 0, 102, 128, 204, 255, 255]

    def painted(**options):
        pipeline, schedule, embed = policy(**options)
        image = levels[:, None, None, None].expand(7, 3, 8, 24)
        pipeline.vae.decode = lambda latents: SimpleNamespace(sample=image[: len(latents)])
        return pipeline, schedule, embed

    (images, _, _), _ = sample(painted, [PROMPTS[0]] * 7)
    assert images[:, 0, 0, 0].tolist() == expected and images.amin((1, 2, 3)).tolist() == expected


# ---- Minibatches -----------------------------------------------------------------------------------------------------


def pairs_of(trained, epoch=1, process=0, world=1, **flags):
    """[[(image, step), ...] of each optimizer step]."""
    sizes = {"rollout_batch_size": 12, "batch_size": 6, "ppo_epochs": 2, "micro_batch_size": 5}
    args = from_task(ddpo.Args, ddpo.TASK, **sizes | flags)
    steps = []
    for micro_batches in ddpo.pair_minibatches(args, epoch, trained, process, world):
        assert all(batch.shape[1] == 2 and batch.dtype == torch.int64 for batch in micro_batches)
        sizes = [len(batch) for batch in micro_batches]
        assert sizes[:-1] == [args.micro_batch_size] * (len(sizes) - 1) and 0 < sizes[-1] <= args.micro_batch_size
        steps.append([tuple(pair) for batch in micro_batches for pair in batch.tolist()])
    return steps


def test_every_pair_once_a_pass():
    steps = pairs_of([0, 1, 2, 4])
    assert [len(pairs) for pairs in steps] == [24] * 4
    for one, other in (steps[:2], steps[2:]):
        assert sorted(one + other) == [*product(range(12), (0, 1, 2, 4))]
        assert len({image for image, _ in one}) == 6  # whole images in a minibatch
    assert {image for image, _ in steps[0]} not in ({*range(6)}, {image for image, _ in steps[2]})


def test_processes_share_the_pairs():
    for fraction in (1.0, 0.5):
        flags = {"timestep_fraction": fraction, "ppo_epochs": 3}
        whole = pairs_of([0, 1, 2, 4], **flags)
        for world in (2, 3, 6):
            parts = [pairs_of([0, 1, 2, 4], process=process, world=world, **flags) for process in range(world)]
            for step, pairs in enumerate(whole):
                assert Counter(itertools.chain(*(part[step] for part in parts))) == Counter(pairs)
                assert len({len(part[step]) for part in parts}) == 1
        assert pairs_of([0, 1, 2, 4], micro_batch_size=1, **flags) == whole  # changes nothing else


@pytest.mark.parametrize(("fraction", "count"), [(1e-9, 1), (0.2, 1), (0.39, 1), (0.4, 2), (0.79, 3), (1.0, 5)])
def test_timestep_fraction(fraction, count):
    trained = [0, 1, 3, 4, 6]
    drawn = []
    for epoch in (1, 2):
        passes = pairs_of(trained, epoch, timestep_fraction=fraction, batch_size=12)
        assert ddpo.steps_per_image(from_task(ddpo.Args, ddpo.TASK, timestep_fraction=fraction), trained) == count
        for pairs in passes:
            assert len(pairs) == len({*pairs}) == 12 * count and {image for image, _ in pairs} == {*range(12)}
            assert {step for _, step in pairs} <= {*trained}
            drawn.append([tuple(sorted(step for i, step in pairs if i == image)) for image in range(12)])
            assert {len(steps) for steps in drawn[-1]} == {count}
    if count < 5:  # images, passes and epochs draw their own
        assert len({*map(tuple, drawn)}) == 4 and len({*drawn[0]}) > 3
        assert {step for images in drawn for steps in images for step in steps} == {*trained}


def test_minibatches_are_keyed():
    first = pairs_of([0, 1, 2])
    assert pairs_of([0, 1, 2]) == first
    assert pairs_of([0, 1, 2], epoch=2) != first and pairs_of([0, 1, 2], seed=2) != first
    longer = pairs_of([0, 1, 2], ppo_epochs=3)
    assert longer[:4] == first and longer[4:] not in (first[:2], first[2:])


# ---- Functions of users ----------------------------------------------------------------------------------------------

ROWS = [{"prompt": "one", "k": 3, "tags": ["x"]}, {"prompt": "two", "k": 5, "tags": []}]
PIXELS = (torch.arange(2 * 3 * 5 * 7) % 256).to(torch.uint8).reshape(2, 3, 5, 7)


def image_scores(reward, name, rows, images):
    return ddpo.call_reward(reward, name, rows, ddpo.image_arguments(rows, images))


@pytest.mark.case(31, "ddpo")
def test_a_function_gets_images_prompts_and_columns():
    """Copies: it may write into them."""
    seen = {}

    def reward(images, prompts, **columns):
        seen.update(columns, images=images.clone(), prompts=prompts)
        images.zero_()
        columns["tags"][0].append("y")
        return [1, 2]

    before, rows = PIXELS.clone(), copy.deepcopy(ROWS)
    assert image_scores(reward, "r", ROWS, PIXELS) == [1.0, 2.0]
    assert seen["images"].dtype == torch.float32 and seen["images"].shape == (2, 3, 5, 7)
    close(seen["images"], PIXELS.float() / 255, 1e-7)
    assert seen["images"].min() == 0 and PIXELS.max() / 255 == seen["images"].max() <= 1
    assert {key: seen[key] for key in ("prompts", "k")} == {"prompts": ["one", "two"], "k": [3, 5]}
    assert torch.equal(PIXELS, before) and ROWS == rows  # it may write into what it got
    assert image_scores(reward, "r", ROWS, PIXELS) and seen["images"].any()


def test_a_function_gets_what_it_names():
    assert image_scores(lambda images: images.sum(dim=(1, 2, 3)), "r", ROWS, PIXELS * 0 + 255) == [105.0, 105.0]
    assert image_scores(lambda prompts: map_list(len, prompts), "r", ROWS, PIXELS) == [3.0, 3.0]
    assert image_scores(lambda k, images, other=2: [x * other for x in k], "r", ROWS, PIXELS) == [6.0, 10.0]
    scaled = partial(lambda images, k, factor: [x * factor for x in k], factor=3)
    assert image_scores(scaled, "r", ROWS, PIXELS) == [9.0, 15.0]

    class Judge:
        def __call__(self, prompts, k):
            return [len(prompt) + x for prompt, x in zip(prompts, k, strict=True)]

    assert image_scores(Judge(), "r", ROWS, PIXELS) == [6.0, 8.0]
    with pytest.raises(InputError, match="rename the column 'images' of the rows: r gets something else"):
        image_scores(lambda images: [0.0], "r", [{"prompt": "one", "images": 1}], PIXELS[:1])


def map_list(function, values):
    return list(map(function, values))


def test_a_tokenizer_of_another_pipeline(build_pipeline):
    """As transformers makes where the files of the tokenizer are missing: every word is unknown."""
    for vocab_size in (1000, 65):
        pipeline = build_pipeline()
        pipeline.text_encoder.config.vocab_size = vocab_size
        sentence = rf"its tokenizer \(66 tokens\) does not fit its text encoder \({vocab_size} tokens\)"
        with pytest.raises(InputError, match=sentence):
            ddpo.load_pipeline(from_task(ddpo.Args, ddpo.TASK), pipeline)


# ---- Pipelines -------------------------------------------------------------------------------------------------------


def load(path, **flags):
    return ddpo.load_pipeline(from_task(ddpo.Args, ddpo.TASK, **flags), path)


@pytest.fixture(scope="module")
def saved(build_pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines") / "plain"
    build_pipeline("v_prediction").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_directory_is_loaded_frozen(build_pipeline, saved, dtype):
    pipeline, original = load(str(saved), dtype=dtype), build_pipeline("v_prediction")
    for name in ("unet", "vae", "text_encoder"):
        module, reference = getattr(pipeline, name), getattr(original, name).to(getattr(torch, dtype)).state_dict()
        assert not module.training and not any(weight.requires_grad for weight in module.parameters())
        assert {weight.dtype for weight in module.parameters()} == {getattr(torch, dtype)}
        for key, value in module.state_dict().items():
            assert torch.equal(value, reference[key]), key
    dropouts = [part.p for part in pipeline.unet.modules() if isinstance(part, torch.nn.Dropout)]
    assert dropouts and not any(dropouts)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.safety_checker is None and not pipeline.config.requires_safety_checker


SCHEDULERS = [
    ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, {"clip_sample": False, "steps_offset": 1}),
    ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}, {"clip_sample": False}),
    ("DPMSolverMultistepScheduler", {"timestep_spacing": "trailing"}, {"timestep_spacing": "trailing"}),
    ("DDPMScheduler", {"clip_sample": False, "steps_offset": 1}, {"clip_sample": False}),
    ("DDIMScheduler", {"set_alpha_to_one": False, "steps_offset": 1}, {"set_alpha_to_one": False}),
    ("HeunDiscreteScheduler", {"num_train_timesteps": 200}, {"num_train_timesteps": 200, "clip_sample": False}),
]


@pytest.mark.parametrize(("kind", "options", "expected"), SCHEDULERS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_scheduler_becomes_ddim_of_its_own_betas(build_pipeline, tmp_path, kind, options, expected):
    pipeline = build_pipeline()
    betas = {"beta_start": 0.0012, "beta_end": 0.011, "beta_schedule": "scaled_linear"}
    pipeline.scheduler = getattr(diffusers, kind)(**betas | options)
    expected = betas | {k: v for k, v in options.items() if k in ("prediction_type",)} | expected
    pipeline.save_pretrained(tmp_path / "saved")
    for found in (load(str(tmp_path / "saved")), load(pipeline)):
        assert type(found.scheduler) is DDIMScheduler
        assert {key: found.scheduler.config[key] for key in expected} == expected
        close(found.scheduler.alphas_cumprod, pipeline.scheduler.alphas_cumprod, 1e-6)


@pytest.mark.parametrize("kind", ["DDIMScheduler", "PNDMScheduler", "HeunDiscreteScheduler"])
@pytest.mark.parametrize("given", [{}, {"clip_sample": False, "steps_offset": 1}], ids=["short", "long"])
def test_a_short_configuration_is_read_as_diffusers_does(saved, tmp_path, kind, given):
    """Older files leave out what is a default. StableDiffusionPipeline then says steps_offset 1 and no clipping."""
    shutil.copytree(saved, tmp_path / "short")
    index = tmp_path / "short/model_index.json"
    index.write_text(index.read_text().replace("DDIMScheduler", kind))
    config = {"_class_name": kind, "_diffusers_version": "0.6.0", "num_train_timesteps": 1000, "beta_end": 0.012}
    config |= {"beta_start": 0.00085, "beta_schedule": "scaled_linear", **given}
    (tmp_path / "short/scheduler/scheduler_config.json").write_text(json.dumps(config))
    plain = StableDiffusionPipeline.from_pretrained(tmp_path / "short").scheduler.config
    assert plain["_class_name"] == kind and not plain.get("clip_sample") and plain["steps_offset"] == 1
    found = load(str(tmp_path / "short")).scheduler.config
    assert (found["clip_sample"], found["steps_offset"]) == (False, 1)


def test_thresholding_is_for_pixels(build_pipeline):
    assert not load(build_pipeline(thresholding=True)).scheduler.config.thresholding


def test_a_pipeline_of_another_kind(build_pipeline, saved, tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler, StableDiffusionImg2ImgPipeline, UNet2DModel

    sizes = {"block_out_channels": (4,), "norm_num_groups": 2, "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    plain = DDPMPipeline(UNet2DModel(sample_size=4, **sizes, **blocks), DDPMScheduler())
    components = build_pipeline().components
    components["unet"].register_to_config(sample_size=4)  # the other class knows no lists
    other = StableDiffusionImg2ImgPipeline(**components, requires_safety_checker=False)
    for pipeline in (plain, other):
        folder = tmp_path / type(pipeline).__name__
        pipeline.save_pretrained(folder)
        for model in (pipeline, str(folder)):
            with pytest.raises(InputError, match=f"is a {type(pipeline).__name__}, expected a StableDiffusionPipeline"):
                load(model)
    with pytest.raises(InputError, match="is a dict, expected a StableDiffusionPipeline"):
        load({})


LORA = {"lora_r": 3, "lora_alpha": 7.0}


def adapted(build_pipeline, train=True, **flags):
    """A loaded pipeline with adapters, which change something if train."""
    pipeline = load(build_pipeline(dtype=torch.float64))
    args = from_task(ddpo.Args, ddpo.TASK, **LORA | flags)
    ddpo.add_lora(pipeline.unet, args)
    for name, weight in pipeline.unet.named_parameters():
        if train and "lora_B" in name:
            weight.data.copy_(random(*weight.shape, seed=len(name)) / 2)
    return pipeline


INPUTS = random(2, 5, 4, 12), torch.tensor([1, 500]), random(2, 8, 12, seed=1)


def test_adapters_change_nothing_at_first(build_pipeline):
    expected = load(build_pipeline(dtype=torch.float64)).unet(*INPUTS).sample
    pipeline = adapted(build_pipeline, train=False)
    assert torch.equal(pipeline.unet(*INPUTS).sample, expected)
    assert (adapted(build_pipeline).unet(*INPUTS).sample - expected).std() > 0.05
    trained = {name: weight for name, weight in pipeline.unet.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in trained)
    targets = {name.split(".lora_")[0].split("attn")[1][2:] for name in trained}
    assert targets == {"to_q", "to_k", "to_v", "to_out.0"}
    # a rank of 3, and alpha / r times what they say
    layer = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert layer.lora_A["default"].weight.shape == (3, 12) and layer.scaling == {"default": 7 / 3}
    assert adapted(build_pipeline, lora_alpha=None).unet.peft_config["default"].lora_alpha == 3


def test_adapters_are_a_keyed_draw(build_pipeline):
    def draws(generator_seed, **flags):
        torch.manual_seed(generator_seed)
        weights = adapted(build_pipeline, train=False, **flags).unet.named_parameters()
        return {name: weight.data for name, weight in weights if "lora_" in name}

    first, again, other = draws(1), draws(2), draws(1, seed=2)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    down = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in down)
    assert len({first[name].numpy().tobytes() for name in down}) == len(down)  # no two layers alike
    values = torch.cat([first[name].flatten() for name in down])
    assert len(values) > 1000 and values.mean().abs() < 0.03 and values.std().item() == pytest.approx(1 / 3, rel=0.1)
    assert not any(first[name].any() for name in first if "lora_B" in name)


def test_adapters_at_other_targets(build_pipeline):
    unet = adapted(build_pipeline, lora_targets=("conv1", "to_v")).unet
    trained = [name for name, weight in unet.named_parameters() if weight.requires_grad]
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == {"conv1", "to_v"}
    for target in ("to_nothing", "norm1"):
        with pytest.raises(InputError, match=f"--lora-targets {target}: .*{'not found' if 'no_' in target else ''}"):
            adapted(build_pipeline, lora_targets=(target,))


def test_adapters_are_at_least_float32(build_pipeline, tmp_path):
    pipeline = load(build_pipeline(dtype=torch.bfloat16))
    ddpo.add_lora(pipeline.unet, from_task(ddpo.Args, ddpo.TASK, **LORA))
    dtypes = {(weight.requires_grad, weight.dtype) for weight in pipeline.unet.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    embeds = ddpo.Embeddings(pipeline, "cpu", 1.0, "")(PROMPTS[:2])
    out = ddpo.predict(pipeline.unet, INPUTS[0].float(), INPUTS[1], embeds, 1.0)
    out.sum().backward()
    grads = [weight.grad for name, weight in pipeline.unet.named_parameters() if "lora_B" in name]
    assert all(grad.dtype == torch.float32 and grad.any() for grad in grads)
    ddpo.export_pipeline(pipeline, tmp_path / "out")
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert {weight.dtype for weight in merged.unet.parameters()} == {torch.bfloat16}
    close(ddpo.predict(merged.unet, INPUTS[0].float(), INPUTS[1], embeds, 1.0).data, out.data, 1e-6)


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_export_of_all_weights(build_pipeline, tmp_path):
    pipeline = load(build_pipeline(dtype=torch.float64))
    with torch.no_grad():
        pipeline.unet.conv_in.weight *= 1.5
    ddpo.export_pipeline(pipeline, tmp_path / "out")
    found = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name in ("unet", "vae", "text_encoder"):
        one, other = state(getattr(found, name)), state(getattr(pipeline, name))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert found.scheduler.config.prediction_type == "epsilon" and type(found.scheduler) is DDIMScheduler
    assert not (tmp_path / "out/lora").exists() and found.safety_checker is None
    with torch.no_grad():
        pipeline.unet.conv_in.weight *= 2
    ddpo.export_pipeline(pipeline, tmp_path / "out")  # takes the place of the first
    found = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert torch.equal(found.unet.conv_in.weight, pipeline.unet.conv_in.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_an_export_is_used_as_its_card_says(build_pipeline, tmp_path, monkeypatch, dtype):
    ddpo.export_pipeline(load(build_pipeline(dtype=getattr(torch, dtype))), tmp_path / "out")
    args = from_task(ddpo.Args, ddpo.TASK, num_inference_steps=2)
    code = ddpo.sampling_code(args, SimpleNamespace(dtype=getattr(torch, dtype)))
    assert "num_inference_steps=2, eta=1.0, guidance_scale=1.0" in code
    assert f", dtype=torch.{dtype})" in code
    monkeypatch.chdir(tmp_path)
    exec(code.format(folder="out", prompt="a red circle"), {})
    assert Image.open(tmp_path / "sample.png").size == (24, 8)


def test_the_card_quotes_any_negative_prompt():
    """Also one that str.format would read as a field."""
    args = from_task(ddpo.Args, ddpo.TASK, guidance_scale=2.0, negative_prompt="{x} 'grey'")
    code = ddpo.sampling_code(args, SimpleNamespace(dtype=torch.float32)).format(folder="out", prompt="a {y}")
    assert f"pipeline('a {{y}}', num_inference_steps=10, eta=1.0, guidance_scale=2.0, {TAIL}" in code


TAIL = """negative_prompt="{x} 'grey'").images[0]"""


def test_export_of_adapters(build_pipeline, tmp_path):
    """The merged pipeline, and the base with its adapters loaded, are the policy; alpha / r is not 1."""
    pipeline = adapted(build_pipeline)
    before, expected = state(pipeline.unet), pipeline.unet(*INPUTS).sample.data
    ddpo.export_pipeline(pipeline, tmp_path / "out")
    after = state(pipeline.unet)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(pipeline.unet(*INPUTS).sample.data, expected)  # training goes on
    assert any(weight.requires_grad for weight in pipeline.unet.parameters())
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float64)
    base = build_pipeline(dtype=torch.float64)
    assert state(merged.unet).keys() == state(base.unet).keys()
    close(merged.unet(*INPUTS).sample.data, expected, 1e-9)
    assert (base.unet(*INPUTS).sample.data - expected).std() > 0.05
    base.load_lora_weights(str(tmp_path / "out/lora"))
    base.unet.double()
    close(base.unet(*INPUTS).sample.data, expected, 1e-9)
    changed = {key for key, value in state(build_pipeline(dtype=torch.float64).unet).items() if
               not torch.equal(value, state(merged.unet)[key])}  # fmt: skip
    assert changed and all(".to_" in key for key in changed)


# ---- Images of a run -------------------------------------------------------------------------------------------------


def test_grid(tmp_path):
    """Eight a row, at most 96, in the order of the images; each pixel is a square, and text stands below."""
    draws = np.random.default_rng(0).integers(0, 256, (99, 3, 5, 11), dtype=np.uint8)
    for count, rows in ((1, 1), (8, 1), (9, 2), (96, 12), (99, 12)):
        path = tmp_path / "new" / f"{count}.png"
        ddpo.grid(torch.from_numpy(draws[:count]), ["a red circle"] * count, [0.25] * count, path)
        sheet = Image.open(path)
        height = 5 * 11 + 2 * ddpo.TEXT_HEIGHT
        assert sheet.size == (8 * 11 * 11, rows * height) and sheet.format == "PNG" and sheet.mode == "RGB"
        pixels = np.asarray(sheet)
        below = pixels[55:height, :121]
        for i in range(8 * rows):
            tile = pixels[i // 8 * height :][:height, i % 8 * 121 :][:, :121]
            if i < min(count, 96):
                assert (tile[:55] == draws[i].transpose(1, 2, 0).repeat(11, 0).repeat(11, 1)).all()
                assert (tile[55:] == below).all()
            else:
                assert (tile == 255).all()
        assert below.min() < 100


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((512, 512), (128, 128)), ((256, 512), (64, 128)), ((384, 192), (256, 128)), ((1, 512), (1, 128))],
)
def test_grid_of_large_images(tmp_path, shape, tile):
    height, width = tile
    images = torch.zeros(2, 3, *shape, dtype=torch.uint8)
    images[0, 0], images[1, 2] = 200, 90
    ddpo.grid(images, ["", ""], [0.0, 1.0], tmp_path / "grid.png")
    sheet = np.asarray(Image.open(tmp_path / "grid.png"))
    assert sheet.shape == (height + 2 * ddpo.TEXT_HEIGHT, 8 * width, 3)
    assert (sheet[:height, :width] == (200, 0, 0)).all()
    assert (sheet[:height, width : 2 * width] == (0, 0, 90)).all()


def test_text_of_a_grid(tmp_path):
    """It differs where prompt or reward do, stays within its tile, and what is too long for it is cut."""
    prompts = ["a red circle", "a red circle", "ÄÉ gjpqy|" * 40, "x" * 10_000, "two\nlines"]
    rewards = [0.25, -1234.5678, 0.25, 0.25, 0.25]
    black = torch.zeros(5, 3, 64, 64, dtype=torch.uint8)
    ddpo.grid(black, prompts, rewards, tmp_path / "grid.png")
    sheet = np.asarray(Image.open(tmp_path / "grid.png"))
    assert (sheet[:128, : 5 * 128] == 0).all()
    text = [sheet[128:, i * 128 : (i + 1) * 128] for i in range(5)]
    caption = [tile[: ddpo.TEXT_HEIGHT] for tile in text]
    reward = [tile[ddpo.TEXT_HEIGHT :] for tile in text]
    assert (caption[0] == caption[1]).all() and (caption[0] != caption[2]).any()
    assert (reward[0] == reward[2]).all() and (reward[0] != reward[1]).any()
    assert all((tile[:, :2] == 255).all() for tile in text)  # nothing of the one before


def test_diversity():
    images = torch.zeros(4, 3, 5, 7, dtype=torch.uint8)
    assert ddpo.diversity(images) == ddpo.diversity(images + 200) == ddpo.diversity(images[:1]) == 0
    images[:2] = 255
    assert ddpo.diversity(images) == pytest.approx(0.5)
    images[:, 1:] = 7
    assert ddpo.diversity(images) == pytest.approx(0.5 / 3)
    draws = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (7, 3, 5, 11), dtype=np.uint8))
    assert ddpo.diversity(draws) == pytest.approx((draws.numpy() / 255).std(axis=0).mean(), rel=1e-12)


def test_due():
    """A multiple of --eval-every among the steps of the epoch; at the start and the end; never for 0."""
    for step, updates, every in product(range(30), range(1, 6), range(8)):
        run = logging.Run.__new__(logging.Run)
        run.stride, run.eval_every, run.begun, run.total_steps = updates, every, 0, 29
        passed = any(i % every == 0 for i in range(step - updates + 1, step + 1)) if every else False
        if step == 0 or step >= updates:
            expected = bool(every) and (passed or step in (0, 29))
            assert run.evaluation_due(step) == expected, (step, updates, every)
        run.begun = 3
        assert not run.evaluation_due(0)


# ---- Flags -----------------------------------------------------------------------------------------------------------

OWN = {"model": "my_pipeline", "dataset": "prompts.jsonl", "reward": "my.py:score"}
PRETRAINED = {  # Black et al. 2023, the authors' code for eight GPUs, TRL 0.8
    "num_epochs": 100, "rollout_batch_size": 256, "batch_size": 64, "ppo_epochs": 1, "timestep_fraction": 1.0,
    "cliprange": 1e-4, "adv_clip_max": 5.0, "per_prompt_stats": True, "stat_buffer_size": 32, "stat_min_count": 16,
    "num_inference_steps": 50, "eta": 1.0, "guidance_scale": 5.0, "negative_prompt": "", "lr": 1e-5,
    "lr_schedule": "constant", "warmup_steps": 0, "adam_betas": (0.9, 0.999), "adam_eps": 1e-8, "weight_decay": 1e-4,
    "max_grad_norm": 1.0, "lora_r": 0, "eval_dataset": None, "metric": None,
}  # fmt: skip


def test_defaults_are_for_pretrained_pipelines():
    args = vars(ddpo.Args(**OWN))
    assert args == args | PRETRAINED | OWN


def test_rules_between_flags_at_their_limits():
    sizes = {"rollout_batch_size": 32, "batch_size": 32, "stat_min_count": 32, "stat_buffer_size": 32}
    ddpo.Args(**OWN, **sizes, guidance_scale=1.0001, negative_prompt="grey")


# ---- Shapes ----------------------------------------------------------------------------------------------------------


def test_drawings_show_their_captions():
    images, captions = shapes.drawings(960, seed=3)
    assert images.shape == (960, 32, 32, 3) and images.dtype == np.float32
    assert images.min() >= 0 and images.max() <= 1 and {*Counter(captions).values()} == {80}
    found = [shapes.recognise(image.transpose(2, 0, 1)) for image in images]
    assert [f"a {colour} {shape}" for colour, shape in found] == captions
    few, again, other = (shapes.drawings(12, seed)[0] for seed in (3, 3, 4))
    assert (again == few).all() and not (other == few).all(axis=(1, 2, 3)).any()
    light = images.mean(axis=(1, 2, 3))
    assert light.std() > 0.05  # rewards have room


def painted(box, colour=(0.85, 0.12, 0.12)):
    """A grey (3, 32, 32) with a coloured mask in it, top left corner at (3, 5)."""
    image = torch.full((3, 32, 32), 0.5)
    for channel, value in enumerate(colour):
        image[channel, 3 : 3 + len(box), 5 : 5 + len(box[0])][torch.tensor(box, dtype=torch.bool)] = value
    return image


def test_recognise_by_hand():
    square, column = [[1] * 9] * 9, [[1] * 3] * 9
    apex = [[abs(x - 6) <= y / 2 for x in range(13)] for y in range(13)]
    disc = [[(x - 6) ** 2 + (y - 6) ** 2 <= 42 for x in range(13)] for y in range(13)]
    for box, shape in ((square, "square"), (apex, "triangle"), (disc, "circle")):
        for name, colour in shapes.COLOURS.items():
            assert shapes.recognise(painted(box, colour)) == (name, shape)
            assert shapes.recognise(painted(box, np.array(colour) * 0.7).numpy()) == (name, shape)  # in the shade
    assert shapes.recognise(torch.full((3, 32, 32), 0.5)) == (None, None)
    assert shapes.recognise(painted(column)) == (None, None)  # three pixels wide: a speck
    assert shapes.recognise(torch.from_numpy(np.random.default_rng(0).uniform(0.4, 0.6, (3, 32, 32)))) == (None, None)
    for box, shape in ((square, "square"), (apex, "triangle"), (disc, "circle")):
        noisy = painted(box)
        noisy[:, 31, 31] = torch.tensor([1.0, 0.0, 0.0])  # one pixel does not widen the box
        assert shapes.recognise(noisy) == ("red", shape)


def size_of_jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95)
    return len(file.getvalue()) / 1000


def test_rewards_of_the_shapes():
    draws = np.random.default_rng(0).integers(0, 256, (8, 40, 3), dtype=np.uint8)
    plain, noise = np.full((8, 40, 3), 77, dtype=np.uint8), draws
    images = torch.from_numpy(np.stack([plain, noise])).permute(0, 3, 1, 2).float() / 255
    sizes = [size_of_jpeg(plain), size_of_jpeg(noise)]
    assert sizes[0] < 1 < sizes[1]
    assert [shapes.kilobytes(image) for image in images] == shapes.incompressibility(images, ["", ""]) == sizes
    assert shapes.compressibility(images, ["", ""], shape=["circle"] * 2) == [-size for size in sizes]
    assert shapes.brightness(images, ["", ""]) == pytest.approx([77 / 255, noise.mean() / 255], rel=1e-6)
    assert shapes.brightness(torch.ones(1, 3, 4, 4), [""]) == [1.0]


def test_agreement_with_the_caption():
    images = torch.stack([painted([[1] * 9] * 9)] * 5 + [torch.full((3, 32, 32), 0.5)])
    prompts = ["a red square", "a red circle", "a blue square", "a green triangle", "square", "a red square"]
    found = shapes.metric(images, prompts, colour=["red"] * 6)
    assert list(found) == ["agreement", "colour", "shape", "brightness", "kilobytes"]
    assert found["agreement"] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found["colour"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0] and found["shape"] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert found["brightness"] == shapes.brightness(images, prompts)
    assert found["kilobytes"] == shapes.incompressibility(images, prompts)
    assert shapes.agreement(images, prompts) == [1.0, 0.5, 0.5, 0.0, 0.5, 0.0]
    for function in (shapes.compressibility, shapes.incompressibility, shapes.brightness, shapes.agreement):
        assert len(image_scores(function, "r", [{"prompt": p, "k": 1} for p in prompts], images * 255)) == 6
    rows = [{"prompt": p, "k": 1} for p in prompts]
    ddpo.call_metric(shapes.metric, "m", rows, ddpo.image_arguments(rows, images * 255))


def test_rows_of_the_shapes():
    rows = shapes.prompts()
    assert len(rows) == 12 and [row["prompt"] for row in rows] == list(shapes.CAPTIONS)
    assert rows[0] == {"prompt": "a red circle", "colour": "red", "shape": "circle"}
    assert len({row["prompt"] for row in rows}) == 12
    held = shapes.eval_prompts()
    assert len(held) == 96 and Counter(row["prompt"] for row in held) == {caption: 8 for caption in shapes.CAPTIONS}
    assert shapes.eval_prompts(samples=1) == rows and len({id(row) for row in held}) == 96


def test_words_are_tokens():
    words = shapes.tokenizer()
    assert words.model_max_length == 8
    for caption in shapes.CAPTIONS:
        assert words.tokenize(caption) == [word + "</w>" for word in caption.split()]
        ids = words(caption, padding="max_length").input_ids
        assert len(ids) == 8 and ids[0] == words.bos_token_id and ids[4:] == [words.eos_token_id] * 4
        assert words.unk_token_id not in ids[1:4] and len({*ids[1:4]}) == 3
    assert len({words.encode(caption)[i] for caption in shapes.CAPTIONS for i in (1, 2, 3)}) == 8
    assert len(words("a red circle " * 9, truncation=True).input_ids) == 8
    committed = StableDiffusionPipeline.from_pretrained(shapes.BASE_MODEL).tokenizer
    texts = [*shapes.CAPTIONS, "", "A Red circle, and a zebra"]
    assert [committed(text).input_ids for text in texts] == [words(text).input_ids for text in texts]
    assert len(committed) == len(words) and committed.model_max_length == 8


def test_the_committed_pipeline_is_that_of_the_code():
    folder = shapes.BASE_MODEL
    assert shapes.base_model() == str(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 4e6
    pipeline, untrained = StableDiffusionPipeline.from_pretrained(folder), shapes.untrained_pipeline()
    for name in ("unet", "vae", "text_encoder"):
        one, other = (getattr(p, name) for p in (pipeline, untrained))
        assert {k: v.shape for k, v in one.state_dict().items()} == {k: v.shape for k, v in other.state_dict().items()}
        for key in other.config.to_dict() if name == "text_encoder" else other.config:
            if key not in ("scaling_factor", "dtype", "architectures", "transformers_version") and key[0] != "_":
                values = [getattr(x.config, key) for x in (one, other)]
                values = [list(x) if isinstance(x, tuple) else x for x in values]
                assert values[0] == values[1], (name, key)
    assert {k: v for k, v in pipeline.scheduler.config.items() if k[0] != "_"} == {
        k: v for k, v in untrained.scheduler.config.items() if k[0] != "_"
    }
    assert pipeline.safety_checker is None and pipeline.vae.config.scaling_factor != 0.18215


def test_the_committed_pipeline_draws_its_captions():
    """By plain diffusers, with the ten noisy steps that ddpo takes."""
    pipeline = StableDiffusionPipeline.from_pretrained(shapes.BASE_MODEL, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    prompts = list(shapes.CAPTIONS) * 2
    options = {"num_inference_steps": 10, "eta": 1.0, "guidance_scale": 1.0, "output_type": "np"}
    images = pipeline(prompts, generator=torch.Generator().manual_seed(0), **options).images
    assert images.shape == (24, 32, 32, 3)
    found = shapes.metric(images.transpose(0, 3, 1, 2), prompts)
    assert np.mean(found["agreement"]) >= 0.9
    assert np.std(found["kilobytes"]) > 0.05 and np.std(found["brightness"]) > 0.03


def test_training_of_the_pipeline(monkeypatch, tmp_path, capsys):
    """Three steps each: what is written has the weights' average, and is loaded by diffusers."""
    few = {"images": 24, "vae": {"steps": 3, "batch": 2, "lr": 1e-3}}
    few |= {"unet": {"steps": 3, "batch": 2, "lr": 1e-3, "warmup": 2, "ema": 0.9, "dropout": 0.1}}
    monkeypatch.setattr(shapes, "SETTINGS", few)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with torch.random.fork_rng(devices=[]):
        shapes.train(str(tmp_path / "new"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0] for line in lines] == [f"shapes: {x}/3" for x in ("VAE 1", "VAE 3", "UNet 1", "UNet 3")]
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "new")
    images = torch.from_numpy(shapes.drawings(24)[0]).permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        latents = pipeline.vae.encode(images).latent_dist.mean * pipeline.vae.config.scaling_factor
    assert latents.std().item() == pytest.approx(1, rel=0.02)
    committed = StableDiffusionPipeline.from_pretrained(shapes.BASE_MODEL)
    for name in ("unet", "vae", "text_encoder"):
        one, other = (getattr(p, name).state_dict() for p in (pipeline, committed))
        assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in other.items()}
        assert all(value.isfinite().all() for value in one.values())
    assert F.mse_loss(pipeline.unet.conv_in.weight, committed.unet.conv_in.weight) > 0
    sizes = [sum(p.stat().st_size for p in folder.rglob("*.safetensors")) for folder in (tmp_path, shapes.BASE_MODEL)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)  # half precision
