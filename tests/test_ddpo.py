"""Denoising diffusion policy optimisation: `python -m pytest tests/test_ddpo.py`

Runs of main: test_ddpo_runs.py.
"""

import copy
import math
from functools import partial
from itertools import chain, product
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.schedulers import scheduling_ddim
from helpers import close, equal, random, tensor

from algos import ddpo
from common import run as run_module
from common.cli import from_task
from common.errors import InputError
from common.seeding import rng

B, N, C, H, W = 3, 5, 2, 7, 11  # of the pure functions; latents of the pipelines are 5 x 4 x 12
PROMPTS = ["a red circle", "a blue square", "a yellow triangle"]


def exact_scheduler(steps, **options):
    """Stable Diffusion's scheduler with float64 tables, so that nothing hides in its rounding."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    scheduler = DDIMScheduler(**betas | options)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    scheduler.set_timesteps(steps)
    return scheduler


def task(**flags):
    return from_task(ddpo.Args, ddpo.TASK, **flags)


@pytest.fixture
def policy(build_pipeline):
    """policy(prediction, dtype, steps, guidance, negative, eta) -> pipeline, schedule, embed."""

    def load(prediction="epsilon", dtype=torch.float64, steps=3, guidance=1.0, negative="", eta=1.0):
        pipeline = ddpo.load_pipeline(task(), build_pipeline(prediction, dtype))
        schedule = ddpo.ddim_schedule(pipeline.scheduler, steps, eta)
        return pipeline, schedule, ddpo.Embeddings(pipeline, "cpu", guidance, negative)

    return load


def agrees_with_diffusers(scheduler, eta):
    """Asserts that all steps of the scheduler are taken and valued as diffusers and torch do; returns the sigmas."""
    schedule = ddpo.ddim_schedule(scheduler, scheduler.num_inference_steps, eta)
    assert torch.equal(schedule.timesteps, scheduler.timesteps) and schedule.stds.dtype == torch.float64
    stds = schedule.stds.tolist()
    for i, timestep in enumerate(scheduler.timesteps):
        latents, output, noise = (2 * random(B, C, H, W, seed=3 * i + j) for j in range(3))
        theirs = partial(scheduler.step, output, timestep, latents, eta=eta)
        mean = theirs(variance_noise=noise * 0).prev_sample
        std = (theirs(variance_noise=noise * 0 + 1).prev_sample - mean)[0, 0, 0, 0].item()
        assert stds[i] == pytest.approx(std, abs=1e-14)
        found, logprobs = ddpo.ddim_step_with_logprob(schedule, output, torch.full((B,), i), latents, noise)
        close(found, theirs(variance_noise=noise).prev_sample)
        if std:
            close(logprobs, torch.distributions.Normal(mean, std).log_prob(found).mean(dim=(1, 2, 3)), 1e-9)
        else:
            assert not logprobs.any()
    return stds


@pytest.mark.parametrize(
    ("prediction", "spacing"), [("epsilon", "leading"), ("sample", "trailing"), ("v_prediction", "linspace")]
)
def test_a_step_is_that_of_diffusers(prediction, spacing):
    for steps, offset, to_one, (clip, eta) in product((1, 3, 7), (0, 1), (True, False), ((None, 1.0), (0.7, 0.3))):
        options = {"clip_sample": clip is not None, "clip_sample_range": clip or 1.0, "set_alpha_to_one": to_one}
        options |= {"prediction_type": prediction, "timestep_spacing": spacing, "steps_offset": offset}
        scheduler = exact_scheduler(steps, **options)
        stds = agrees_with_diffusers(scheduler, eta)
        assert len(stds) == steps and all(std > 0 for std in stds[:-1])
        last = scheduler.timesteps[-1]
        assert (stds[-1] > 0) == (last >= 1000 // steps or not to_one and last > 0)


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_a_first_step_from_pure_noise(prediction):
    """rescale_betas_zero_snr makes the last alpha 0. What is left of the direction is rounding, or NaN in diffusers."""
    options = {"prediction_type": prediction, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    latents, output, noise = (random(1, C, H, W, seed=i) for i in range(3))
    clean = -output if prediction == "v_prediction" else output  # and nothing of the latents
    for steps in (2, 7, 59):
        schedule = ddpo.ddim_schedule(exact_scheduler(steps, **options), steps, 1.0)
        assert schedule.alphas[0] == 0 and schedule.stds[0] > 0
        found, logprobs = ddpo.ddim_step_with_logprob(schedule, output, torch.tensor([0]), latents, noise)
        close(found, schedule.prev_alphas[0].sqrt() * clean + schedule.stds[0] * noise, 1e-6)
        assert logprobs.isfinite()


def test_a_step_without_noise_counts_nothing():
    """TRL's log-probability of it is NaN (pitfall X3), and would be in the gradient even where the loss leaves it out:
    here a neighbour in the batch has the gradient that it has alone."""
    schedule = ddpo.ddim_schedule(exact_scheduler(N, set_alpha_to_one=True, steps_offset=1), N, 1.0)
    assert (schedule.stds > 0).tolist() == [True] * 4 + [False]
    latents, output, other = (random(B, C, H, W, seed=i) for i in range(3))
    steps = torch.tensor([1, 4, 3])
    grads = []
    for rows in ([0, 1, 2], [0, 2]):
        out = output[rows].requires_grad_()
        _, logprobs = ddpo.ddim_step_with_logprob(schedule, out, steps[rows], latents[rows], next_latents=other[rows])
        assert logprobs.isfinite().all()
        (logprobs.exp() + logprobs).sum().backward()
        grads.append(out.grad)
    assert grads[0][[0, 2]].any() and not grads[0][1].any()
    close(grads[0][[0, 2]], grads[1])


def test_other_lengths_of_training():
    agrees_with_diffusers(exact_scheduler(3, num_train_timesteps=10, beta_end=0.2), 1.0)
    with pytest.raises(IndexError, match="1000"):  # all steps, one late: main catches it
        ddpo.ddim_schedule(exact_scheduler(3, steps_offset=1), 1000, 1.0)


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


@pytest.mark.parametrize(("size", "count"), [(3, 1), (3, 3), (7, 2), (100, 5), (1, 1)])
def test_advantages_are_the_slow_definition(size, count):
    """Of integers, whose type TRL's took: 0, 0, 0, 1 (pitfall X6)."""
    stats = ddpo.PerPromptStats(size, count)
    history = {}
    draws = np.random.default_rng(0)
    for batch in (11, 1, 5, 13, 2):
        prompts = [f"prompt {i}" for i in draws.choice(3, batch, p=[0.6, 0.3, 0.1])]
        rewards = draws.integers(-9, 30, batch).tolist()
        found = stats.update(prompts, rewards)
        assert found == pytest.approx(slow_advantages(history, prompts, rewards, size, count), rel=1e-9, abs=1e-9)
    assert stats.rewards == {prompt: rewards[-size:] for prompt, rewards in history.items()}
    assert max(map(len, history.values())) > 13


def test_ddpo_loss_by_hand():
    """Eps is 0.1. The slope is that by the new log-probability, 0 where the ratio is clipped: not the wrong way."""
    advantages = tensor(2, 2, 2, 2, -2, -2, -2, -2, 0)
    ratios = tensor(1.0, 1.05, 1.5, 0.5, 1.0, 0.95, 0.5, 1.5, 1.5)
    old = random(9)
    new = (old + ratios.log()).requires_grad_()
    losses = ddpo.ddpo_loss(new, old, advantages, 0.1)
    close(losses.data, [-2, -2.1, -2.2, -1, 2, 1.9, 1.8, 3, 0])
    losses.sum().backward()
    close(new.grad, [-2, -2.1, 0, -1, 2, 1.9, 0, 3, 0])


def sample(policy, prompts, seed=1, guidance=1.0, **options):
    """images, latents and logprobs of sample_images, and the pipeline."""
    args = task(guidance_scale=guidance, seed=seed)
    pipeline, schedule, embed = policy(guidance=guidance, **options)
    sampler = ddpo.Policy(pipeline, pipeline.unet, schedule, embed)
    sampled = ddpo.sample_images(Accelerator(), sampler, prompts, ["rollout", 3], args, trajectories=True)
    return [sampled[name] for name in ("images", "latents", "logprobs")], pipeline


@pytest.mark.parametrize(
    ("prediction", "guidance", "negative"),
    [("epsilon", 1.0, ""), ("sample", 4.0, ""), ("v_prediction", 4.0, "a green square")],
)
def test_images_are_those_of_the_pipeline(policy, monkeypatch, prediction, guidance, negative):
    """That plain diffusers makes of the same noise, with its own loop, scheduler and image processor."""
    options = {"steps": 5, "eta": 0.7, "prediction": prediction, "guidance": guidance, "negative": negative}
    (images, latents, logprobs), pipeline = sample(policy, PROMPTS, seed=11, **options)
    assert images.dtype == torch.uint8 and images.shape == (B, 3, 8, 24)
    assert latents.shape == (B, 6, 5, 4, 12) and logprobs.shape == (B, 5)
    assert policy(guidance=guidance)[2](PROMPTS).shape == (B, 1 if guidance == 1 else 2, 8, 12)
    noise = np.stack([rng(11, "rollout", 3, row).standard_normal((6, 5, 4, 12)) for row in range(B)])
    draws = iter(torch.from_numpy(noise).unbind(1))
    assert torch.equal(latents[:, 0], next(draws))
    monkeypatch.setattr(scheduling_ddim, "randn_tensor", lambda shape, **_: next(draws).reshape(shape))
    options = {"num_inference_steps": 5, "eta": 0.7, "guidance_scale": guidance, "negative_prompt": [negative] * B}
    theirs = np.stack([np.asarray(image) for image in pipeline(PROMPTS, latents=latents[:, 0], **options).images])
    assert theirs.shape == (B, 8, 24, 3) and len(np.unique(theirs)) > 100
    difference = np.abs(theirs.transpose(0, 3, 1, 2).astype(int) - images.numpy())
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-2


def test_latents_and_guidance_are_float32_with_bfloat16_weights(policy):
    (_, latents, logprobs), _ = sample(policy, PROMPTS, dtype=torch.bfloat16)
    assert latents.dtype == logprobs.dtype == torch.float32 and not logprobs.requires_grad
    assert not torch.equal(latents[:, 0], latents[:, 0].bfloat16().float())  # the noise is not rounded
    pipeline, _, embed = policy(dtype=torch.bfloat16, guidance=5.0)
    found = ddpo.predict(pipeline.unet, latents[:, 0], torch.tensor([7, 1, 3]), embed(PROMPTS), 5.0)
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())


def test_images_are_clamped_and_rounded(policy):
    """Of an image that is not finite the prompt is named."""
    image = tensor(-3.0, -1.0, -0.2, 0.0, 0.6, 1.0, 1.5)[:, None, None, None].repeat(1, 3, 8, 24)
    prompts = [f"prompt {i}" for i in range(7)]

    def painted(**options):
        pipeline, schedule, embed = policy(**options)
        pipeline.vae.decode = lambda latents: SimpleNamespace(sample=image)
        return pipeline, schedule, embed

    (images, _, _), _ = sample(painted, prompts)
    assert images[:, 2, 7, 23].tolist() == images.amin((1, 2, 3)).tolist() == [0, 0, 102, 128, 204, 255, 255]
    image[4, 1, 2, 3] = math.nan
    with pytest.raises(FloatingPointError, match="the image of 'prompt 4' is not finite"):
        sample(painted, prompts)


def pairs_of(trained, epoch=1, process=0, world=1, **flags):
    """[[(image, step), ...] of each optimizer step]."""
    args = task(**{"rollout_batch_size": 12, "batch_size": 6, "ppo_epochs": 2, "micro_batch_size": 5} | flags)
    steps = []
    for micro_batches in ddpo.pair_minibatches(args, epoch, trained, process, world):
        sizes = [len(batch) for batch in micro_batches]
        assert sizes[:-1] == [args.micro_batch_size] * (len(sizes) - 1) and 0 < sizes[-1] <= args.micro_batch_size
        steps.append([tuple(pair) for pair in torch.cat(micro_batches).tolist()])
    return steps


def test_every_pair_once_a_pass_and_process():
    steps = pairs_of([0, 1, 2, 4])
    assert [len(pairs) for pairs in steps] == [24] * 4
    for one, other in (steps[:2], steps[2:]):
        assert sorted(one + other) == [*product(range(12), (0, 1, 2, 4))]
        assert len({image for image, _ in one}) == 6  # whole images in a minibatch
    assert {image for image, _ in steps[0]} not in ({*range(6)}, {image for image, _ in steps[2]})
    assert pairs_of([0, 1, 2, 4], epoch=2) != steps and pairs_of([0, 1, 2, 4], seed=2) != steps
    parts = [pairs_of([0, 1, 2, 4], process=process, world=3) for process in range(3)]
    for step, pairs in enumerate(steps):
        assert sorted(sum((part[step] for part in parts), [])) == sorted(pairs)
        assert {len(part[step]) for part in parts} == {8}


@pytest.mark.parametrize(("fraction", "count"), [(1e-9, 1), (0.39, 1), (0.4, 2), (1.0, 5)])
def test_timestep_fraction(fraction, count):
    trained = [0, 1, 3, 4, 6]
    assert ddpo.steps_per_image(task(timestep_fraction=fraction), trained) == count
    drawn = []
    for epoch in (1, 2):
        for pairs in pairs_of(trained, epoch, timestep_fraction=fraction, batch_size=12):
            assert len(pairs) == len({*pairs}) == 12 * count
            drawn.append([tuple(sorted(step for i, step in pairs if i == image)) for image in range(12)])
    of_images = [*chain(*drawn)]
    assert {len(steps) for steps in of_images} == {count}
    assert {*chain(*of_images)} == {*trained}
    if count < 5:  # images, passes and epochs draw their own
        assert len({*map(tuple, drawn)}) == 4 and len({*drawn[0]}) > 3


def load(path):
    return ddpo.load_pipeline(task(), path)


@pytest.mark.parametrize(
    ("kind", "options", "changed"),
    [
        ("PNDMScheduler", {"steps_offset": 1}, {"clip_sample": False}),
        ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}, {}),
        ("DDIMScheduler", {"thresholding": True}, {"thresholding": False}),  # which is for pixels
    ],
)
def test_every_scheduler_becomes_ddim_of_its_own_betas(kind, options, changed):
    options = {"beta_start": 0.0012, "beta_end": 0.011, "beta_schedule": "scaled_linear"} | options
    scheduler = getattr(diffusers, kind)(**options)
    found = ddpo.ddim_scheduler(scheduler, "model")
    assert type(found) is DDIMScheduler and dict(found.config).items() >= (options | changed).items()
    close(found.alphas_cumprod, scheduler.alphas_cumprod, 1e-6)
    with pytest.raises(InputError, match="^--model m: its FlowMatchEulerDiscreteScheduler has no beta_start, as DDIM"):
        ddpo.ddim_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(), "m")


def test_a_pipeline_that_cannot_be_used(build_pipeline):
    for part, setting, said in (
        ("scheduler", {"prediction_type": "flow_prediction"}, "its scheduler has the prediction type flow_prediction"),
        # it takes the weight of the guidance as an input, which nothing here gives it
        ("unet", {"time_cond_proj_dim": 8}, "is a latent consistency model, whose UNet takes the guidance as an input"),
    ):
        pipeline = build_pipeline()
        getattr(pipeline, part).register_to_config(**setting)
        with pytest.raises(InputError, match=said):
            load(pipeline)


INPUTS = random(2, 5, 4, 12), torch.tensor([1, 500]), random(2, 8, 12, seed=1)


def adapted(build_pipeline, dtype=torch.float64, **flags):
    pipeline = load(build_pipeline(dtype=dtype))
    ddpo.add_lora(pipeline.unet, task(**{"lora_r": 3, "lora_alpha": 7.0} | flags))
    return pipeline


def adapters(pipeline):
    return {name: weight for name, weight in pipeline.unet.named_parameters() if weight.requires_grad}


def test_adapters_are_at_their_targets_and_change_nothing_at_first(build_pipeline):
    pipeline = adapted(build_pipeline)
    expected = load(build_pipeline(dtype=torch.float64)).unet(*INPUTS).sample
    assert torch.equal(pipeline.unet(*INPUTS).sample, expected)
    assert all("lora_" in name for name in adapters(pipeline))
    targets = {name.split(".lora_")[0].split("attn")[1][2:] for name in adapters(pipeline)}
    assert targets == {"to_q", "to_k", "to_v", "to_out.0"}
    layer = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert layer.lora_A["default"].weight.shape == (3, 12) and layer.scaling == {"default": 7 / 3}
    other = adapted(build_pipeline, lora_targets=("conv1", "to_v"), lora_alpha=None)
    assert {name.split(".lora_")[0].split(".")[-1] for name in adapters(other)} == {"conv1", "to_v"}
    assert other.unet.peft_config["default"].lora_alpha == 3
    for targets, why in ((("to_q", "to_no"), ": no module of the UNet is named to_no"), (("norm1",), " norm1: ")):
        with pytest.raises(InputError, match=f"--lora-targets{why}"):
            adapted(build_pipeline, lora_targets=targets)


def test_adapters_are_a_keyed_draw(build_pipeline):
    """Of the seed, whatever torch's generator holds; no two layers alike. In float32 beside weights of 16 bits."""
    first, again, other = (adapters(adapted(build_pipeline, torch.bfloat16, seed=seed)) for seed in (1, 1, 2))
    assert {weight.dtype for weight in first.values()} == {torch.float32}
    assert equal(first, again)
    down = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in down)
    assert len({first[name].data.numpy().tobytes() for name in down}) == len(down)
    values = torch.cat([first[name].flatten() for name in down])
    assert len(values) > 1000 and values.mean().abs() < 0.03 and values.std().item() == pytest.approx(1 / 3, rel=0.1)
    assert not any(weight.any() for name, weight in first.items() if "lora_B" in name)


def test_export_of_adapters(build_pipeline, tmp_path):
    """The merged pipeline, and the base with its adapters loaded, are the policy; alpha / r is not 1."""
    pipeline = adapted(build_pipeline)
    for name, weight in adapters(pipeline).items():
        if "lora_B" in name:
            weight.data.copy_(random(*weight.shape, seed=len(name)) / 2)
    before = copy.deepcopy(pipeline.unet.state_dict())
    expected = pipeline.unet(*INPUTS).sample.data
    ddpo.export_pipeline(pipeline, tmp_path / "out")
    assert equal(pipeline.unet.state_dict(), before) and adapters(pipeline)  # training goes on
    assert torch.equal(pipeline.unet(*INPUTS).sample.data, expected)
    base = build_pipeline(dtype=torch.float64)
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert merged.unet.state_dict().keys() == base.unet.state_dict().keys()
    assert (base.unet(*INPUTS).sample.data - expected).std() > 0.05
    base.load_lora_weights(str(tmp_path / "out/lora"))
    base.unet.double()
    for found in (merged, base):
        close(found.unet(*INPUTS).sample.data, expected, 1e-9)


def test_an_export_and_its_card(build_pipeline, tmp_path):
    """Whatever the negative prompt holds, also what str.format would read as a field."""
    pipeline = load(build_pipeline(dtype=torch.bfloat16))
    ddpo.export_pipeline(pipeline, tmp_path / "out")
    flags = {"num_inference_steps": 2, "guidance_scale": 2.0, "negative_prompt": "{x} 'grey'"}
    code = ddpo.sampling_code(task(**flags), pipeline.unet).format(folder="out", prompt="a {y}")
    call = """pipeline('a {y}', num_inference_steps=2, eta=1.0, guidance_scale=2.0, negative_prompt="{x} 'grey'")"""
    assert call in code and "dtype=torch.bfloat16)" in code
    found = StableDiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name in ("unet", "vae", "text_encoder"):
        part = getattr(pipeline, name)
        assert equal(getattr(found, name).state_dict(), part.state_dict())
        assert not part.training and not any(weight.requires_grad for weight in part.parameters())
    assert type(found.scheduler) is DDIMScheduler and found.safety_checker is None
    assert "negative" not in ddpo.sampling_code(task(), pipeline.unet)


def test_grid():
    """Eight a row, at most 96, in the order of the images; each pixel is a square, prompt and reward stand below. Large
    images are made smaller."""
    draws = np.random.default_rng(0).integers(0, 256, (99, 3, 5, 11), dtype=np.uint8)
    height = 55 + 2 * ddpo.TEXT_HEIGHT
    for count, rows in ((9, 2), (99, 12)):
        texts = ["ÄÉ gj\npqy|" * 40] * count
        pixels = np.asarray(ddpo.grid(torch.from_numpy(draws[:count]), texts, [-1234.5678] * count))
        assert pixels.shape == (rows * height, 8 * 121, 3)
        for i in range(8 * rows):
            tile = pixels[i // 8 * height :][:height, i % 8 * 121 :][:, :121]
            if i < min(count, 96):
                assert (tile[:55] == draws[i].transpose(1, 2, 0).repeat(11, 0).repeat(11, 1)).all()
                assert tile[55 : 55 + ddpo.TEXT_HEIGHT].min() < 100 and tile[-ddpo.TEXT_HEIGHT :].min() < 100
            else:
                assert (tile == 255).all()
    large = ddpo.grid(torch.zeros(2, 3, 384, 192).byte(), ["", ""], [0.0, 1.0])
    assert large.size == (8 * 128, 256 + 2 * ddpo.TEXT_HEIGHT)


def test_diversity():
    images = torch.zeros(4, 3, 5, 7, dtype=torch.uint8)
    assert ddpo.diversity(images) == ddpo.diversity(images + 200) == ddpo.diversity(images[:1]) == 0
    draws = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (7, 3, 5, 11), dtype=np.uint8))
    assert ddpo.diversity(draws) == pytest.approx((draws.numpy() / 255).std(axis=0).mean(), rel=1e-12)


def test_evaluations_of_epochs_of_several_steps():
    """Where a multiple of --eval-every is among the steps of the epoch, at the start and the end; never for 0."""
    run = run_module.Run.__new__(run_module.Run)
    kept = SimpleNamespace(evaluated=0)
    vars(run).update(kept=kept, steps_per_iteration=3, total_steps=18, args=SimpleNamespace(seed=1))
    steps = [*range(0, 19, 3)]
    for every, expected in ((0, []), (2, steps), (3, steps), (7, [0, 9, 15, 18])):
        run.eval_every = every
        assert [step for step in steps if run.evaluation_due(step)] == expected
    run.eval_every = 3
    assert run.evaluation_due(3)  # of a continued run, where it failed
    run.kept.evaluated = 3
    assert not run.evaluation_due(3)
