"""The work of ddpo, which both systems do, and our side of it.

An epoch is 16 images of 20 DDIM steps with classifier-free guidance, then one optimizer step on all 320 (image, step)
pairs, with guidance as well. LoRA of rank 4 on a small UNet with random weights; the reward is the brightness. Both
systems start from the same weights and adapters and denoise the same noise, so that the mean reward of the first epoch
(here its `loss`) and its gradient must agree. PLAINRL_BENCH_TINY=1 shrinks the pipeline, to try things out.
"""

import json
from statistics import median

import torch
from measurement import ITERATIONS, TINY, short_run

from benchmarks.tasks import shapes  # found by way of measurement
from common.seeding import rng, stream_rows

SIZE, CHANNELS = (8, (32, 64)) if TINY else (16, (64, 128))  # of the latents; of the UNet's two resolutions
LATENTS = 4  # channels
IMAGES, STEPS = (4, 3) if TINY else (16, 20)  # images of an epoch and of its one optimizer step; denoising steps
SEED, GUIDANCE, RANK, LR, CLIP = 1, 5.0, 4, 3e-4, 1e-4
BETAS, EPS, DECAY, NORM = (0.9, 0.999), 1e-8, 1e-4, 1.0
MICRO = 16  # pairs of a forward pass
PEER_BATCH = IMAGES // 4  # images of a forward pass of TRL, tuned


def rows():
    """As many prompts as an epoch has images."""
    return [{"prompt": shapes.CAPTIONS[i % len(shapes.CAPTIONS)]} for i in range(IMAGES)]


def prompts(epoch):
    """The prompts of an epoch, counted from 1, as algos/ddpo.py draws them."""
    drawn = stream_rows(SEED, "data", IMAGES, (epoch - 1) * IMAGES, IMAGES)
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
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from safetensors.torch import save_file
    from transformers import CLIPTextConfig, CLIPTextModel

    from algos import ddpo

    torch.manual_seed(SEED)
    words = shapes.tokenizer()
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 64), layers_per_block=1, latent_channels=LATENTS, norm_num_groups=8,
        sample_size=4 * SIZE, down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIZE, block_out_channels=CHANNELS, layers_per_block=1, cross_attention_dim=64,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
    )  # fmt: skip
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=words.model_max_length, **ids,
        )
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, clip_sample=False,
        set_alpha_to_one=False, prediction_type="v_prediction",
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=text_encoder, tokenizer=words, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    old_format(folder, words)
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
    lines = ["#version: 0.2", *(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)]
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
    latents, step = torch.zeros(2, LATENTS, SIZE, SIZE), torch.zeros(2)
    embeds = torch.zeros(2, pipeline.tokenizer.model_max_length, pipeline.unet.config.cross_attention_dim)
    parts = []
    for run in (
        lambda: pipeline.unet(latents, step, embeds).sample.detach(),
        lambda: pipeline.unet(latents, step, embeds).sample.sum().backward(),
        lambda: pipeline.vae.decode(latents[:1]),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        parts.append(counter.get_total_flops())
    pipeline.unet.zero_grad()
    sampling, training, decoding = parts
    return IMAGES * (STEPS * (sampling + training) + decoding)


# ---- Measurement -----------------------------------------------------------------------------------------------------


def figures(model, sampling, training, scores, grad_norms):
    """(columns, useful GFLOP/s) from the seconds, mean rewards and gradient norms of all epochs."""
    with open(f"{model}/work.json") as file:
        flops = json.load(file)["flops"]
    seconds = median([a + b for a, b in zip(sampling, training, strict=True)][1:])
    return {"seconds": seconds, "loss": scores[0], "grad_norm": grad_norms[0]}, flops / seconds / 1e9


def measure(algorithm, side, model):
    """(columns, useful GFLOP/s) of a short run of algos/ddpo.py."""
    from algos import ddpo

    flags = {"mixed_precision": "bf16"} if side == "bf16" else {}
    perf, metrics = short_run(ddpo, side, **settings(model) | flags)
    sampling = [p["perf/seconds_rollout"] for p in perf]
    training = [p["perf/seconds_reward"] + p["perf/seconds_update"] for p in perf]
    columns = [[m[key] for m in metrics] for key in ("objective/scores", "optim/grad_norm")]
    return figures(model, sampling, training, *columns)
