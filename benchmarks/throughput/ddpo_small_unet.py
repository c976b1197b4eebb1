"""Throughput of algos/ddpo.py on a small Stable Diffusion pipeline on a CPU, beside TRL 0.8.6 (peer_trl_0_8_6_ddpo.py).

Work of an epoch: 16 images of 20 DDIM steps with classifier-free guidance, then one optimizer step on all 320 (image,
step) pairs, with guidance as well. LoRA of rank 4 on a UNet with random weights; the reward is the brightness.

    bash benchmarks/throughput/make_peer_env.sh     # once: a virtual environment with TRL 0.8.6
    bash benchmarks/throughput/run_ddpo.sh          # on a quiet machine

Both systems start from the same weights and adapters and denoise the same noise, so that rewards and gradient of the
first epoch must agree. PLAINRL_BENCH_TINY=1 shrinks the pipeline, to try the scripts out.
"""

import importlib.metadata
import json
from statistics import median

import torch
from measurement import TINY, main, short_run
from ppo_gpt2_small import ITERATIONS
from tables import agreement, distinct, first_of, grouped, mode_table, precision, provenance

from benchmarks.tasks import shapes  # found by way of measurement
from common.seeding import rng, stream_rows

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

SIZE, CHANNELS = (8, (32, 64)) if TINY else (16, (64, 128))  # of the latents; of the UNet's two resolutions
LATENTS = 4  # channels
IMAGES, STEPS = (4, 3) if TINY else (16, 20)  # images of an epoch and of its one optimizer step; denoising steps
SEED, GUIDANCE, RANK, LR, CLIP = 1, 5.0, 4, 3e-4, 1e-4
BETAS, EPS, DECAY, NORM = (0.9, 0.999), 1e-8, 1e-4, 1.0
MICRO = 16  # pairs of a forward pass
PEER_BATCH = IMAGES // 4  # images of a forward pass of TRL, tuned

MODES = {  # of algos/ddpo.py: flags, and what they show
    "fp32": ({}, f"defaults, and `--micro-batch-size {MICRO}`: forwards of {MICRO} pairs of any images and steps"),
    "fp32-micro-4": (
        {"micro_batch_size": PEER_BATCH},
        f"`--micro-batch-size {PEER_BATCH}`: forwards of as many pairs as TRL tuned",
    ),
    "bf16": ({"mixed_precision": "bf16"}, "`--mixed-precision bf16`: weights, latents and optimizer fp32"),
}
PEER_MODES = {  # of TRL's DDPOTrainer: ((images sampled at once, images of a training forward), our matmul precision)
    "tuned": (
        (IMAGES, PEER_BATCH, False),
        f"`sample_batch_size={IMAGES}`, `train_batch_size={PEER_BATCH}`, accumulated over {IMAGES // PEER_BATCH}",
    ),
    "defaults": (
        (1, 1, False),
        f"its default sizes: `sample_batch_size=1`, `train_batch_size=1`, accumulated over {IMAGES}",
    ),
    "same-flags": ((IMAGES, PEER_BATCH, True), "tuned, with matmul precision medium"),
    "same-flags-kept-memory": ((IMAGES, PEER_BATCH, True), "same-flags, and the C library keeps freed memory"),
    "bf16-same-flags": ((IMAGES, PEER_BATCH, True), "same-flags, all of it in `torch.autocast` to bf16"),
}
COMPARISONS = [  # in the first table: name, our mode, modes of the peer, goal
    ("ddpo", "fp32", ["tuned", "defaults", "same-flags", "same-flags-kept-memory"], 1.8),
    ("ddpo", "bf16", ["bf16-same-flags"], None),
]


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


def prepare(folder):
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
    count = sum(weight.numel() for weight in unet.parameters())
    (folder / "work.json").write_text(json.dumps({"flops": useful_flops(pipeline), "parameters": count}))


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


def figures(model, rollout, update, scores, grad_norms):
    """Columns of the CSV file and useful GFLOP/s, from the seconds, mean rewards and gradient norms of all epochs."""
    work = json.loads(open(f"{model}/work.json").read())
    totals = [a + b for a, b in zip(rollout, update, strict=True)]
    print("  sampling", *(f"{s:.2f}" for s in rollout), "| training", *(f"{s:.2f}" for s in update))
    print("  rewards", *(f"{s:.6f}" for s in scores), "| gradient norms", *(f"{g:.6g}" for g in grad_norms), flush=True)
    phases = {"rollout": median(rollout[1:]), "update": median(update[1:])}
    seconds = median(totals[1:])
    libraries = "; ".join(f"{name} {importlib.metadata.version(name)}" for name in ("diffusers", "peft"))
    columns = {
        "seconds_rollout": f"{phases['rollout']:.3f}", "seconds_update": f"{phases['update']:.3f}",
        "seconds": f"{seconds:.3f}", "seconds_first": f"{totals[0]:.3f}", "counted": len(totals) - 1,
        "sampled_per_sec": f"{IMAGES / phases['rollout']:.3f}", "trained_per_sec": f"{IMAGES / phases['update']:.3f}",
        "images_per_sec": f"{IMAGES / seconds:.3f}", "work_gflop": f"{work['flops'] / 1e9:.1f}",
        "parameters": work["parameters"], "scores": " ".join(f"{s:.7f}" for s in scores),
        "grad_norms": " ".join(f"{g:.6g}" for g in grad_norms), "libraries": libraries,
        "shape": "x".join(map(str, (*CHANNELS, SIZE))),
    }  # fmt: skip
    return columns, work["flops"] / seconds / 1e9


def measure_ours(mode, model):
    """What record() stores of a short run of algos/ddpo.py."""
    from algos import ddpo

    perf, metrics = short_run(ddpo, mode, **settings(model) | MODES[mode][0])
    rollout = [p["perf/seconds_rollout"] for p in perf]
    update = [p["perf/seconds_reward"] + p["perf/seconds_update"] for p in perf]
    return figures(
        model, rollout, update, *([m[key] for m in metrics] for key in ("objective/scores", "optim/grad_norm"))
    )


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## ddpo

A UNet of {parameters} parameters: {channels} channels, one layer and cross attention at both resolutions, latents of
{LATENTS} x {size} x {size}. An epoch is {IMAGES} images of {STEPS} DDIM steps, then one optimizer step on all {PAIRS}
(image, step) pairs; classifier-free guidance {GUIDANCE:g} in both, LoRA of rank {RANK} on the attention's projections.

{table}

{notes}

- `sampling s`: text embeddings, denoising with log-probabilities, decoding. `training s`: the rest of the epoch, with
  reward and advantages.
- Useful work: {work} GFLOP an epoch, which is two forwards of the UNet for each pair in sampling, two forwards in
  training with the backward that the adapters need, and decoding.
- Both systems start from the same adapters, and take the same prompts in the same order and the same noise: what TRL
  would draw is replaced by what plainrl draws, made before the clock starts. The same AdamW (TRL's is not fused),
  clipping of gradients, of ratios and of advantages, and advantages by the statistics of the epoch. TRL runs with
  `mixed_precision="no"`; its default, fp16, is for GPUs.
- Not measured: training without LoRA, more optimizer steps an epoch.

Did the runs do the same work? Largest relative differences in the first epoch (fp32: at most {TOLERANCE}):

{same_work}

{provenance}
- further libraries: {libraries}
"""
TOLERANCE = 1e-3


def section(rows):
    """The text of the section, from the rows of results_ddpo.csv."""
    texts = {mode: text for mode, (_, text) in (MODES | PEER_MODES).items()}
    shown = {"seconds_rollout": ("sampling s", 2), "seconds_update": ("training s", 2), "seconds": ("epoch s", 2)}
    shown |= {"images_per_sec": ("images/s", 2), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    against = {f"times TRL {name}": lambda mode, name=name: name for name in PEER_MODES}
    table, notes = mode_table(rows, texts, shown, against | {"times plainrl": precision})
    *channels, size = rows[0]["shape"].split("x")
    figures = {"mean reward": first_of("scores"), "gradient norm": first_of("grad_norms")}
    groups = grouped(rows, lambda row: precision(row["mode"]))
    return SECTION.format(
        table=table, notes=notes, provenance=provenance(rows), work=rows[0]["work_gflop"], size=size,
        channels=" and ".join(channels), parameters=f"{int(rows[0]['parameters']):,}", PAIRS=IMAGES * STEPS,
        same_work=agreement(groups, figures, TOLERANCE), libraries=distinct(rows, "libraries"),
        **{name: globals()[name] for name in "LATENTS IMAGES STEPS GUIDANCE RANK TOLERANCE".split()},
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(MODES, "plainrl"), measure_ours, prepare)
