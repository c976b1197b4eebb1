"""The work of ddpo, which both systems do, and our side of it.

An epoch is 16 images of 20 DDIM steps with classifier-free guidance, then one optimizer step on all 320 (image, step)
pairs, with guidance as well. LoRA of rank 4 on a small UNet with random weights; the reward is the brightness. Both
systems start from the same weights and adapters and denoise the same noise, so that the mean reward of the first epoch
(here its `loss`) and its gradient must agree.
"""

import json
import os

import torch
from measurement import ITERATIONS, column, figures, short_run

from algos.ddpo import draw_rows
from benchmarks.tasks import shapes  # found by way of measurement
from common.seeding import rng

SIZE, CHANNELS = 16, (64, 128)  # of the latents; of the UNet's two resolutions
LATENTS = 4  # channels
IMAGES, STEPS = 16, 20  # images of an epoch and of its one optimizer step; denoising steps
SEED = 1
GUIDANCE = 5.0
RANK = 4
LR = 3e-4
CLIP = 1e-4
BETAS = (0.9, 0.999)
EPS = 1e-8
DECAY = 1e-4
NORM = 1.0
MICRO = int(os.environ.get("MICRO", 4))  # pairs of a forward pass, of TRL those of as many images, except by default


def rows():
    return [{"prompt": shapes.CAPTIONS[i % len(shapes.CAPTIONS)]} for i in range(IMAGES)]


def prompts(epoch):
    """The prompts of an epoch, counted from 1, as algos/ddpo.py draws them."""
    drawn = draw_rows(SEED, IMAGES, (epoch - 1) * IMAGES, IMAGES)
    return [rows()[i]["prompt"] for i in drawn]


def noise(epoch):
    """(B, N + 1, C, h, w): the noise of the start and of each step, as algos/ddpo.py draws it."""
    shape = (STEPS + 1, LATENTS, SIZE, SIZE)
    draws = [torch.from_numpy(rng(SEED, "rollout", epoch, image).standard_normal(shape)) for image in range(IMAGES)]
    return torch.stack(draws).float()


def reward(images, prompts):
    """A trivial reward: the brightness, of images (B, 3, H, W) in [0, 1], with 256 levels."""
    return ((images * 255).round() / 255).mean((1, 2, 3)).tolist()


def settings(model):
    """Flags of algos/ddpo.py, TRL's settings."""
    return {
        "model": str(model), "dataset": rows(), "reward": reward, "seed": SEED, "num_inference_steps": STEPS,
        "eta": 1.0, "guidance_scale": GUIDANCE, "num_epochs": ITERATIONS, "rollout_batch_size": IMAGES,
        "batch_size": IMAGES, "micro_batch_size": MICRO, "decode_batch_size": IMAGES, "ppo_epochs": 1,
        "per_prompt_stats": False, "adv_clip_max": 5.0, "cliprange": CLIP, "lora_r": RANK, "lr": LR,
        "adam_betas": BETAS, "adam_eps": EPS, "weight_decay": DECAY, "max_grad_norm": NORM,
    }  # fmt: skip


def prepare(folder, algorithm):
    """Writes the random pipeline so that both systems load it, the start of the adapters, and work.json."""
    from safetensors.torch import save_file

    from algos import ddpo

    torch.manual_seed(SEED)
    pipeline = shapes.untrained_pipeline(
        vae={"sample_size": 4 * SIZE, "mid_block_add_attention": True},
        unet={
            "sample_size": SIZE,
            "block_out_channels": CHANNELS,
            "attention_head_dim": 8,
            "norm_num_groups": 32,
        },
    )
    pipeline.save_pretrained(folder)
    old_format(folder, pipeline.tokenizer)
    args = ddpo.Args(**settings(folder), metric=None)
    pipeline = ddpo.load_pipeline(args, str(folder))
    ddpo.add_lora(pipeline.unet, args)
    start = {name: weight.data for name, weight in pipeline.unet.named_parameters() if "lora_A" in name}
    save_file(start, folder / "adapters.safetensors")
    (folder / "work.json").write_text(json.dumps({"flops": useful_flops(pipeline)}))


def old_format(folder, words):
    """Writes tokenizer and text encoder as the files that transformers 4 reads; transformers 5 reads them as well."""
    from safetensors.torch import load_file, save_file

    file = folder / "text_encoder" / "model.safetensors"
    weights = {f"text_model.{name.removeprefix('text_model.')}": weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    lines = ["#version: 0.2"]
    for merge in merges:
        if not isinstance(merge, str):
            merge = " ".join(merge)
        lines.append(merge)
    special = {f"{name}_token": getattr(words, f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    config = special | {"tokenizer_class": "CLIPTokenizer", "model_max_length": words.model_max_length}
    folder = folder / "tokenizer"
    for file in folder.iterdir():
        file.unlink()
    (folder / "vocab.json").write_text(json.dumps(words.get_vocab()))
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def useful_flops(pipeline):
    """Floating-point operations of an epoch, counted as they run: of every (image, step) pair two forwards of the UNet
    (guidance) in sampling, and two with the backward of the adapters in training; of every image one decoding."""
    from diffusers.models.attention_processor import AttnProcessor
    from torch.utils.flop_counter import FlopCounterMode

    pipeline.unet.set_attn_processor(AttnProcessor())  # the counter knows no fused attention of CPUs
    latents = torch.zeros(2, LATENTS, SIZE, SIZE)
    step = torch.zeros(2)
    embeds = torch.zeros(2, pipeline.tokenizer.model_max_length, pipeline.unet.config.cross_attention_dim)
    with FlopCounterMode(display=False) as sampling:
        pipeline.unet(latents, step, embeds)
    with FlopCounterMode(display=False) as training:
        pipeline.unet(latents, step, embeds).sample.sum().backward()
    with FlopCounterMode(display=False) as decoding:
        pipeline.vae.decode(latents[:1])
    pipeline.unet.zero_grad()
    of_a_step = sampling.get_total_flops() + training.get_total_flops()
    return IMAGES * (STEPS * of_a_step + decoding.get_total_flops())


def flops(model):
    """Useful operations of each epoch, which `prepare` has counted."""
    with open(f"{model}/work.json") as file:
        return [json.load(file)["flops"]] * ITERATIONS


def measure(algorithm, side, model):
    """(columns, useful GFLOP/s) of a short run of algos/ddpo.py."""
    from algos import ddpo

    steps = short_run(ddpo, **settings(model))
    seconds = column(steps, "perf/seconds_rollout", "perf/seconds_reward", "perf/seconds_update")
    scores = column(steps, "objective/scores")
    return figures(flops(model), seconds, 1, scores, column(steps, "optim/grad_norm"))
