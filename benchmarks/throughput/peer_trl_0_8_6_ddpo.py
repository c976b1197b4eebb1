"""The work of ddpo_small_unet.py through DDPOTrainer of TRL 0.8.6, in the environment that make_peer_env.sh makes.

    .peers/trl-0.8.6/bin/python peer_trl_0_8_6_ddpo.py --mode tuned --model MODEL_DIR --results results_ddpo.csv

It loads the same pipeline and starts from the same adapters. Noise and prompts are those that algos/ddpo.py draws, so
that the two systems make the same images.
"""

import time

import ddpo_small_unet as work
from measurement import main
from ppo_gpt2_small import ITERATIONS
from safetensors.torch import load_file
from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.models import modeling_sd_base

from common.launch import fast_cpu_matmul


class GivenNoise(DefaultDDPOStableDiffusionPipeline):
    """Denoises noise (all images, N + 1, C, h, w) in its order, and starts from the adapters of a file."""

    def __init__(self, folder, noise):
        super().__init__(folder)
        self.start, self.noise, self.done = load_file(f"{folder}/adapters.safetensors"), noise, 0

    def __call__(self, *args, **kwargs):
        size = len(kwargs["prompt_embeds"])
        steps = iter(self.noise[self.done : self.done + size].unbind(1))
        self.done += size
        kwargs["latents"] = next(steps)
        modeling_sd_base.randn_tensor = lambda *shape, **options: next(steps)
        return super().__call__(*args, **kwargs)

    def get_trainable_layers(self):
        unet = super().get_trainable_layers()
        weights = {name: weight for name, weight in unet.named_parameters() if "lora_A" in name}
        assert weights.keys() == self.start.keys()
        for name, weight in weights.items():
            weight.data.copy_(self.start[name])
        return unet


class TimedTrainer(DDPOTrainer):
    """Keeps the seconds of sampling and of whole epochs, and the norms of the gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sampling, self.totals, self.grad_norms = [], [], []
        clip = self.accelerator.clip_grad_norm_

        def kept(*args):
            self.grad_norms.append(clip(*args).item())

        self.accelerator.clip_grad_norm_ = kept

    def _generate_samples(self, **sizes):
        begun = time.perf_counter()
        found = super()._generate_samples(**sizes)
        self.sampling.append(time.perf_counter() - begun)
        return found

    def step(self, *args):
        begun = time.perf_counter()
        found = super().step(*args)
        self.totals.append(time.perf_counter() - begun)
        return found


def measure(mode, model_dir):
    """What record() stores: seconds of sampling and of the rest of an epoch, rewards, norms of gradients."""
    sampled, trained, medium = work.PEER_MODES[mode][0]
    if medium:
        fast_cpu_matmul()
    prompts = [prompt for epoch in range(ITERATIONS) for prompt in work.prompts(epoch + 1)]
    noise = work.torch.cat([work.noise(epoch + 1) for epoch in range(ITERATIONS)])
    config = DDPOConfig(
        num_epochs=ITERATIONS, save_freq=10**9, mixed_precision="no", allow_tf32=False, log_with=None, seed=work.SEED,
        accelerator_kwargs={"cpu": True}, sample_num_steps=work.STEPS, sample_eta=1.0,
        sample_guidance_scale=work.GUIDANCE, sample_batch_size=sampled,
        sample_num_batches_per_epoch=work.IMAGES // sampled, train_batch_size=trained,
        train_gradient_accumulation_steps=work.IMAGES // trained, train_learning_rate=work.LR,
        train_adam_beta1=work.BETAS[0], train_adam_beta2=work.BETAS[1], train_adam_weight_decay=work.DECAY,
        train_adam_epsilon=work.EPS, train_max_grad_norm=work.NORM, train_cfg=True, train_adv_clip_max=5,
        train_clip_range=work.CLIP, per_prompt_stat_tracking=False,
    )  # fmt: skip
    given = iter(prompts)
    scores = []

    def reward(images, prompts, metadata):
        found = work.reward(images, prompts)
        scores.extend(found)
        return found, None

    trainer = TimedTrainer(config, reward, lambda: (next(given), {}), GivenNoise(model_dir, noise))
    with work.torch.autocast("cpu", work.torch.bfloat16, enabled="bf16" in mode):
        trainer.train()
    assert len(scores) == len(prompts) and len(trainer.grad_norms) == ITERATIONS  # an optimizer step an epoch
    means = [sum(scores[i : i + work.IMAGES]) / work.IMAGES for i in range(0, len(scores), work.IMAGES)]
    rest = [whole - part for whole, part in zip(trainer.totals, trainer.sampling, strict=True)]
    return work.figures(model_dir, trainer.sampling, rest, means, trainer.grad_norms)


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(work.PEER_MODES, "trl"), measure)
