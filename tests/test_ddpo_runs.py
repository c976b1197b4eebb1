"""Whole runs of algos/ddpo.py: `python -m pytest tests/test_ddpo_runs.py`"""

import json
import math
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch
from helpers import equal, log, recorded, samples, weights
from test_ddpo import slow_advantages

from algos import ddpo
from benchmarks.tasks import shapes
from common import launch

ROWS = [{"prompt": caption, "target": i / 4, "note": {"id": i}} for i, caption in enumerate(shapes.CAPTIONS[:5])]


def redness(images, prompts, target, **columns):
    return [-abs(4 * image[0].mean().item() - t) for image, t in zip(images, target, strict=True)]


def run_ddpo(model, run_dir, rows=ROWS, **flags):
    """Two epochs of 8 images of 3 steps, two optimizer steps in each, unless flags say otherwise."""
    settings = {"num_epochs": 2, "rollout_batch_size": 8, "batch_size": 4, "num_inference_steps": 3, "reward": redness}
    settings |= {"guidance_scale": 1.0, "lr": 1e-3, "cliprange": 1e-3, "stat_min_count": 2, "stat_buffer_size": 4}
    settings |= {"micro_batch_size": 64, "decode_batch_size": 64, "eval_every": 0, "save_every": 0, "threads": 1}
    return ddpo.main(ddpo.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def newest(run_dir):
    return max((Path(run_dir) / "checkpoints").glob("step_*"))


def state(run_dir):
    return json.loads((newest(run_dir) / "state.json").read_text())


@pytest.fixture(scope="module")
def tiny(work):
    return str(work / "pipeline")


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_first_ratio_in_float64(build_pipeline, tmp_path, prediction_type):
    """However a pipeline predicts, given as an object, also with clipping; dropout is off. One update an epoch."""
    pipeline = build_pipeline(prediction_type, torch.float64, clip_sample=prediction_type == "epsilon")
    flags = {"batch_size": 8, "guidance_scale": 3.0, "dtype": "float64", "micro_batch_size": 5}
    _, run = run_ddpo(pipeline, tmp_path / "run", **flags)
    for record in log(run):
        assert record["policy/ratio_deviation"] <= 1e-11 and record["policy/approxkl"] <= 1e-20
        assert record["policy/ratio"] == pytest.approx(1, abs=1e-11) and record["policy/clipfrac"] == 0


def test_products_of_images_are_those_of_torch(tiny, tmp_path, monkeypatch):
    """Whatever the CPU: choose_products is slower there."""
    monkeypatch.setattr(launch, "choose_products", lambda: torch.set_float32_matmul_precision("medium"))
    run_ddpo(tiny, tmp_path / "run", num_epochs=1)
    assert torch.get_float32_matmul_precision() == "highest"


def test_rounding_that_moves_the_ratio_is_said(monkeypatch, tiny, tmp_path, capfd):
    """Here the log-probabilities of sampling are 1e-3 off."""
    denoise = ddpo.denoise

    def rounded(*args):
        latents, logprobs = denoise(*args)
        return latents, logprobs - 1e-3

    monkeypatch.setattr(ddpo, "denoise", rounded)
    _, run = run_ddpo(tiny, tmp_path / "run", batch_size=8)
    assert [r["policy/ratio_deviation_first"] for r in log(run)] == pytest.approx([1e-3] * 2, rel=0.02)
    assert capfd.readouterr().out.count("warning: rounding alone moves the ratio by 1.0e-03; --cliprange is 0.001") == 1


@pytest.mark.case(72, "ddpo")
def test_a_last_step_without_noise_is_not_trained(monkeypatch, build_pipeline, tmp_path, capfd):
    """set_alpha_to_one: its log-probability would be infinite. No loss is of that step."""
    losses = recorded(monkeypatch, ddpo, "ddpo_loss")
    sampled = recorded(monkeypatch, ddpo, "sample_images")
    pipeline = build_pipeline(set_alpha_to_one=True, steps_offset=0)
    run_ddpo(pipeline, tmp_path / "run", num_epochs=1, num_inference_steps=4)
    out = capfd.readouterr().out
    assert "images of 4 steps, 3 of them with noise" in out and "x 3 steps, 12 pairs" in out
    old = torch.cat([args[1] for args, _ in losses])
    logprobs = sampled[0][1]["logprobs"]
    assert sorted(old.tolist()) == sorted(logprobs[:, :3].flatten().tolist()) and not logprobs[:, 3].any()


def slow_pair(policy, unet, sampled, prompt, image, step):
    """log ratio of a single (image, step) pair."""
    before = sampled["latents"][[image], step]
    after = sampled["latents"][[image], step + 1]
    steps = torch.tensor([step])
    output = ddpo.predict(unet, before, policy.schedule.timesteps[steps], policy.embed([prompt]), 3.0)
    _, new = ddpo.ddim_step_with_logprob(policy.schedule, output, steps, before, next_latents=after)
    return new - sampled["logprobs"][image, step]


@pytest.mark.parametrize("per_prompt_stats", [True, False])
def test_epochs_are_the_slow_definition(monkeypatch, build_pipeline, tmp_path, per_prompt_stats):
    """Two epochs of two passes, on two of three steps: the gradient of each of eight updates is that of the mean of its
    pairs, taken one by one. Rewards are integers."""
    sampled = recorded(monkeypatch, ddpo, "sample_images")
    rewarded = []
    advantages = []
    history = {}
    ratios = []
    losses = []

    def reward(prompts):
        assert prompts == [ROWS[i]["prompt"] for i in ddpo.draw_rows(1, len(ROWS), 8 * len(rewarded), 8)]
        rewards = [(7 * i * i + 5 * len(rewarded)) % 11 for i in range(8)]
        rewarded.append(rewards)
        expected = [(x - fmean(rewards)) / (pstdev(rewards) + 1e-8) for x in rewards]
        if per_prompt_stats:
            expected = slow_advantages(history, prompts, rewards, size=3, count=2)
        advantages.append([max(-1.2, min(1.2, x)) for x in expected])
        return rewards

    def checked(step, where, gradient_norm):
        [((unet, _), _)] = made
        epoch, number = divmod(step - 1, 4)
        (_, policy, prompts, _, args, *_), found = sampled[epoch]
        pairs = torch.cat([*ddpo.pair_minibatches(args, epoch + 1, [0, 1, 2], 0, 1)][number]).tolist()
        assert len(pairs) == 8
        for image, position in pairs:
            ratio = slow_pair(policy, unet, found, prompts[image], image, position).exp()
            advantage = advantages[epoch][image]
            ratios.append(ratio.item())
            losses.append(torch.max(-advantage * ratio, -advantage * ratio.clamp(0.999, 1.001)))
        trained = [*unet.parameters()]
        gradients = torch.autograd.grad(torch.cat(losses[-8:]).mean(), trained)
        for weight, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-7, atol=1e-9)

    made = recorded(monkeypatch, ddpo, "make_optimizer")
    monkeypatch.setattr(ddpo, "require_finite", checked)
    flags = {"ppo_epochs": 2, "micro_batch_size": 5, "adv_clip_max": 1.2, "stat_buffer_size": 3, "max_grad_norm": 0}
    flags |= {"timestep_fraction": 0.7, "per_prompt_stats": per_prompt_stats, "guidance_scale": 3.0}
    num_epochs = 2 if per_prompt_stats else 1
    flags |= {"dtype": "float64", "negative_prompt": "a green square", "num_epochs": num_epochs}
    _, run = run_ddpo(build_pipeline(dtype=torch.float64), tmp_path / "run", reward=reward, **flags)
    assert len(losses) == num_epochs * 4 * 8 and {1.2, -1.2} < {*sum(advantages, [])}
    for epoch, record in enumerate(log(run)):
        of_epoch = ratios[32 * epoch : 32 * (epoch + 1)]
        assert record["loss/policy"] == pytest.approx(fmean(x.item() for x in losses[32 * epoch : 32 * (epoch + 1)]))
        assert record["policy/ratio"] == pytest.approx(fmean(of_epoch))
        assert record["policy/approxkl"] == pytest.approx(fmean(math.log(x) ** 2 / 2 for x in of_epoch), rel=1e-6)
        assert record["policy/clipfrac"] == fmean(abs(x - 1) > 1e-3 for x in of_epoch) > 0
        assert record["policy/ratio_deviation"] == pytest.approx(max(abs(x - 1) for x in of_epoch), rel=1e-5)
    assert state(run)["rewards"] == {prompt: rewards[-3:] for prompt, rewards in history.items()}


@pytest.mark.case(32, "ddpo")
@pytest.mark.parametrize("per_prompt_stats", [True, False])
def test_of_a_constant_reward_weight_decay_alone_moves_matrices(tiny, tmp_path, capfd, per_prompt_stats):
    """The mean of 5, 6 or 7 times 0.7 is rounded."""
    flags = {"weight_decay": 0.1, "per_prompt_stats": per_prompt_stats, "stat_min_count": 7, "stat_buffer_size": 7}
    flags |= {"num_epochs": 4, "rollout_batch_size": 7, "batch_size": 7}
    _, run = run_ddpo(tiny, tmp_path / "run", reward=lambda prompts: [0.7] * len(prompts), **flags)
    after = weights(run / "hf_model/unet")
    for name, weight in weights(f"{tiny}/unet").items():
        expected = weight * (1 - 1e-3 * 0.1) ** 4 if weight.ndim > 1 else weight
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name
    assert [record["optim/grad_norm"] for record in log(run)] == [0, 0, 0, 0]
    assert "warning: all rewards of the first epoch are 0.7, so" in capfd.readouterr().out


@pytest.mark.case(31, "ddpo")
def test_evaluations_are_of_the_same_noise(tiny, tmp_path):
    """The reward gets the pixels of the grid, and may write into them."""
    rewarded = []

    def reward(images, prompts, target, **columns):
        rewarded.append(images.clone())
        images.zero_()
        return redness(rewarded[-1], prompts, target)

    _, run = run_ddpo(tiny, tmp_path / "run", reward=reward, eval_dataset=ROWS, eval_every=2, lr=1e-12)
    start, one, middle, two, end = rewarded  # two are rollouts
    assert not torch.equal(one, two)
    assert torch.equal(start, middle) and torch.equal(start, end)  # lr is next to nothing
    pixels = (start * 255).round().to(torch.uint8)
    rewards = [row["reward"] for row in samples(run, 0)]
    ddpo.grid(pixels, [row["prompt"] for row in ROWS], rewards).save(tmp_path / "expected.png")
    for record in log(run):
        grid = run / f"images/step_{record['step']:08d}.png"
        assert grid.read_bytes() == (tmp_path / "expected.png").read_bytes()
        assert record["eval/diversity"] == ddpo.diversity(pixels)


def test_adapters_go_on(tiny, tmp_path):
    """A checkpoint holds them alone, and the rewards of prompts. A longer run goes on as from its start."""
    flags = {"lora_r": 2, "stat_buffer_size": 8}
    _, short = run_ddpo(tiny, tmp_path / "short", num_epochs=1, **flags)
    saved = weights(newest(short))
    adapters = [name for name in saved if name.startswith("model.")]
    assert adapters and all(".lora_A." in name or ".lora_B." in name for name in adapters)
    assert sum(map(len, state(short)["rewards"].values())) == 8
    _, straight = run_ddpo(tiny, tmp_path / "straight", **flags)
    _, more = run_ddpo(tiny, tmp_path / "more", resume=str(newest(short)), **flags)
    exports = [weights(run_dir / "hf_model/unet") for run_dir in (more, straight)]
    assert log(more) == log(straight)[-1:] and equal(*exports)
    assert state(more)["rewards"] == state(straight)["rewards"]


@pytest.mark.case(33, "ddpo")
def test_weights_that_are_not_finite_are_never_saved(monkeypatch, tiny, tmp_path):
    """The last step of an epoch spoils one of them."""
    step = torch.optim.AdamW.step
    steps = []

    def spoil(self, *args):
        steps.append(1)
        step(self, *args)
        if len(steps) == 4:
            self.param_groups[0]["params"][0].data.view(-1)[0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(FloatingPointError, match="step 4: a weight is not finite"):
        run_ddpo(tiny, tmp_path / "run", save_every=1)
    assert newest(tmp_path / "run").name == "step_00000002" and not (tmp_path / "run/hf_model").exists()
    assert all(weight.isfinite().all() for weight in weights(newest(tmp_path / "run")).values())
