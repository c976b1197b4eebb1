"""PPOTrainer and DDPOTrainer of TRL 0.8.6 at the work of language.py and diffusion.py, in the environment that
`make_peer_env.sh 0.8.6` makes.

ppo: batch_size = mini_batch_size = 16, so that an epoch is one optimizer step, as in ours; the other settings are TRL's
defaults. The response length is forced by the weights. Sides: `defaults` (with its `generate(batch_size=4)`), `tuned`
(16), `same-flags` (16, with choose_products; its attention is eager), `2-layers`: `num_shared_layers=10`.

ddpo: noise and prompts are those that algos/ddpo.py draws, so that the two systems make the same images. Sides:
`defaults` (forwards of one image), `tuned` (as large as ours), `same-flags` (as large, with choose_products).
"""

import time

import diffusion
import language
import torch
import trl
from measurement import ITERATIONS, choose_products, figures
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, set_seed
from trl.models import modeling_sd_base


def measure(algorithm, side, model):
    if "same-flags" in side:
        choose_products()
    return measure_ppo(side, model) if algorithm == "ppo" else measure_ddpo(side, model)


def measure_ppo(side, model_path):
    rows = 4 if side == "defaults" else 16
    set_seed(1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{model_path}/tokenizer.json", eos_token="<end>")
    tokenizer.pad_token = tokenizer.eos_token
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(model_path)
    settings = {
        "learning_rate": language.LR,
        "batch_size": language.EPISODES,
        "mini_batch_size": language.EPISODES,
        "ppo_epochs": language.EPOCHS,
    }
    frozen = language.LAYERS - 2 if "2-layers" in side else None
    # without a reference it copies the model as one, and freezes the blocks that both share
    trainer = trl.PPOTrainer(trl.PPOConfig(**settings), model, None, tokenizer, num_shared_layers=frozen)
    sampling = {"max_new_tokens": language.RESPONSE, "do_sample": True, "top_k": 0, "top_p": 1.0, "batch_size": rows}
    queries = [torch.tensor(ids) for ids in language.prompt_ids()]
    seconds = []
    for _ in range(ITERATIONS):
        begun = time.perf_counter()
        responses = trainer.generate(queries, return_prompt=False, **sampling, pad_token_id=tokenizer.pad_token_id)
        tokenizer.batch_decode(responses)  # plainrl decodes as well
        scores = [torch.tensor(x) for x in language.even([ids.tolist() for ids in responses])]
        trainer.step(queries, responses, scores)
        seconds.append(time.perf_counter() - begun)
        assert {len(ids) for ids in responses} == {language.RESPONSE}
    return figures(language.ppo_flops(), seconds, 1)


class GivenNoise(trl.DefaultDDPOStableDiffusionPipeline):
    """Denoises noise (all images, N + 1, C, h, w) in its order, and starts from the adapters of a file."""

    def __init__(self, folder, noise):
        super().__init__(folder)
        self.start = load_file(f"{folder}/adapters.safetensors")
        self.noise = noise
        self.done = 0

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


class TimedTrainer(trl.DDPOTrainer):
    """Keeps the seconds of epochs, and the norms of the gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seconds = []
        self.grad_norms = []
        clip = self.accelerator.clip_grad_norm_

        def clip_and_keep(*args):
            self.grad_norms.append(clip(*args).item())

        self.accelerator.clip_grad_norm_ = clip_and_keep

    def step(self, *args):
        begun = time.perf_counter()
        result = super().step(*args)
        self.seconds.append(time.perf_counter() - begun)
        return result


def measure_ddpo(side, model):
    sampled, trained = (1, 1) if side == "defaults" else (diffusion.IMAGES, diffusion.MICRO)
    prompts = sum((diffusion.prompts(epoch + 1) for epoch in range(ITERATIONS)), [])
    noise = torch.cat([diffusion.noise(epoch + 1) for epoch in range(ITERATIONS)])
    config = trl.DDPOConfig(
        num_epochs=ITERATIONS, save_freq=10**9, mixed_precision="no", allow_tf32=False, log_with=None,
        seed=diffusion.SEED, accelerator_kwargs={"cpu": True}, sample_num_steps=diffusion.STEPS, sample_eta=1.0,
        sample_guidance_scale=diffusion.GUIDANCE, sample_batch_size=sampled,
        sample_num_batches_per_epoch=diffusion.IMAGES // sampled, train_batch_size=trained,
        train_gradient_accumulation_steps=diffusion.IMAGES // trained, train_learning_rate=diffusion.LR,
        train_adam_beta1=diffusion.BETAS[0], train_adam_beta2=diffusion.BETAS[1],
        train_adam_weight_decay=diffusion.DECAY, train_adam_epsilon=diffusion.EPS,
        train_max_grad_norm=diffusion.NORM, train_cfg=True, train_adv_clip_max=5, train_clip_range=diffusion.CLIP,
        per_prompt_stat_tracking=False,
    )  # fmt: skip
    given = iter(prompts)
    scores = []

    def reward(images, prompts, metadata):
        found = diffusion.reward(images, prompts)
        scores.extend(found)
        return found, None

    trainer = TimedTrainer(config, reward, lambda: (next(given), {}), GivenNoise(model, noise))
    trainer.train()
    assert len(scores) == len(prompts) and len(trainer.grad_norms) == ITERATIONS  # an optimizer step an epoch
    means = [sum(scores[i : i + diffusion.IMAGES]) / diffusion.IMAGES for i in range(0, len(scores), diffusion.IMAGES)]
    return figures(diffusion.flops(model), trainer.seconds, 1, means, trainer.grad_norms)
