"""Throughput of algos/ddpo.py on a small Stable Diffusion pipeline on a CPU, beside TRL 0.8.6 (peer_trl_0_8_6_ddpo.py).

Work of an epoch: 16 images of 20 DDIM steps with classifier-free guidance, then one optimizer step on all 320 (image,
step) pairs, with guidance as well. LoRA of rank 4 on a UNet with random weights; the reward is the brightness.

    bash benchmarks/throughput/make_peer_env.sh     # once: a virtual environment with TRL 0.8.6
    bash benchmarks/throughput/run_ddpo.sh          # on a quiet machine: writes results_ddpo.csv and README_DDPO.md

and the parts that run_ddpo.sh uses:

    python benchmarks/throughput/ddpo_small_unet.py --prepare MODEL_DIR
    python benchmarks/throughput/ddpo_small_unet.py --mode fp32 --model MODEL_DIR --results results_ddpo.csv
    python benchmarks/throughput/ddpo_small_unet.py --table    # README_DDPO.md from results_ddpo.csv
    python benchmarks/throughput/ddpo_small_unet.py --check    # exit 1 where README_DDPO.md does not follow from it

Both systems start from the same weights and adapters and denoise the same noise, so that rewards and gradient of the
first epoch must agree. The measurement and the table are those of ppo_gpt2_small.py. PLAINRL_BENCH_TINY=1 shrinks the
pipeline, to try the scripts out.
"""

import importlib.metadata
import json
import sys
from statistics import median

import ppo_gpt2_small
import torch
from ppo_gpt2_small import HERE, ITERATIONS, TINY, main, page, short_run, spread

from benchmarks.tasks import shapes  # found by way of ppo_gpt2_small
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
    "fp32-1-1": (
        {"micro_batch_size": 1, "decode_batch_size": 1},
        "`--micro-batch-size 1 --decode-batch-size 1`: samples and trains one by one, as TRL defaults",
    ),
    "bf16": ({"mixed_precision": "bf16"}, "`--mixed-precision bf16`: weights, latents and optimizer fp32"),
    "bf16-micro-4": (
        {"mixed_precision": "bf16", "micro_batch_size": PEER_BATCH},
        f"bf16 with `--micro-batch-size {PEER_BATCH}`",
    ),
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
}


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
    ppo_gpt2_small.LAYERS, ppo_gpt2_small.WIDTH, ppo_gpt2_small.VOCABULARY = CHANNELS[0], CHANNELS[1], SIZE  # shape
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
    }  # fmt: skip
    return columns, work["flops"] / seconds / 1e9


def measure_ours(mode, model):
    """What record() stores of a short run of algos/ddpo.py."""
    from algos import ddpo

    perf, metrics = short_run(ddpo, mode, **settings(model) | MODES[mode][0])
    rollout = [p["perf/seconds_rollout"] for p in perf]
    update = [p["perf/seconds_reward"] + p["perf/seconds_update"] for p in perf]
    return figures(model, rollout, update, *([m[key] for m in metrics] for key in ("objective/scores", NORM_KEY)))


NORM_KEY = "optim/grad_norm"


# ---- Table -----------------------------------------------------------------------------------------------------------

README = """# Throughput: DDPO on a small Stable Diffusion pipeline

`run_ddpo.sh` writes results_ddpo.csv, and ddpo_small_unet.py this file from it.

A UNet of {parameters} parameters on a CPU: {layers} and {width} channels, one layer and cross attention at both
resolutions, latents of {LATENTS} x {vocabulary} x {vocabulary}, random weights. An epoch is {IMAGES} images of {STEPS}
DDIM steps, then one optimizer step on all {PAIRS} (image, step) pairs; classifier-free guidance {GUIDANCE:g} in both,
LoRA of rank {RANK} on the attention's projections. Medians over the runs, smallest and largest in brackets.

Goals, in seconds of an epoch:

{goals}

{table}

{notes}

Columns:

- `sampling s`: text embeddings, denoising with log-probabilities, decoding. `training s`: the rest of the epoch, with
  reward and advantages.
{TIMES}\
- `sampled/s`, `trained/s`, `images/s`: {IMAGES} images over the seconds of sampling, of training, and of the epoch.
{MEMORY}\
- `fraction of GEMM peak`: useful work ({work} GFLOP an epoch: two forwards of the UNet for each pair in sampling, two
  forwards in training with the backward that the adapters need, decoding) over seconds and {PEAK}
Protocol: the systems in turn, one process a run; both load the same pipeline and the same start of the adapters, and
take the same prompts in the same order and the same noise: what TRL would draw is replaced by what plainrl draws, made
before the clock starts. The first of {iterations} epochs of a run is not counted. The same AdamW (TRL's is not fused),
clipping of gradients, of ratios and of advantages, and advantages by the statistics of the epoch. TRL runs with
`mixed_precision="no"` (its default, fp16, is for GPUs); evaluation, saving and trackers are off.

Did the runs do the same work? Largest relative differences between two runs of either system:

{same_work}

No table is written where, in fp32, the mean reward or the norm of the gradient of the first epoch differs by more than
{TOLERANCE} relatively.
Load average before a run, the runs before it included: {loads}.

Not measured: GPUs, other shapes, pretrained weights, training without LoRA, more optimizer steps an epoch, several
processes, learning (the reward is trivial), start-up, saving.

{MACHINE}

{libraries}
"""
TOLERANCE = 1e-3
GOALS = [("fp32", 1.8), ("bf16", 1.8)]  # times TRL tuned


def same_work(rows):
    """How far the runs agree, as text, for each precision; exits where those in fp32 did not do the same work. Rows in
    bf16 are compared with the others."""

    def apart(values):
        return (max(values) - min(values)) / max(map(abs, values))

    parts = []
    for kind in ("fp32", "bf16"):
        found = [row for row in rows if kind == "bf16" or "bf16" not in row["mode"]]
        if not found or kind not in ["bf16" if "bf16" in row["mode"] else "fp32" for row in rows]:
            continue
        scores, norms = (
            list(zip(*([float(x) for x in row[name].split()] for row in found), strict=True))
            for name in ("scores", "grad_norms")
        )
        gaps = [[apart(values) for values in course] for course in (scores, norms)]
        if kind == "fp32" and max(gaps[0][0], gaps[1][0]) > TOLERANCE:
            sys.exit(f"not the same work: rewards differ by {gaps[0][0]:.2g}, gradient norms by {gaps[1][0]:.2g}")
        text = f"- {kind}{' against fp32' * (kind == 'bf16')}: first epoch, {gaps[0][0]:.1g} in the mean reward "
        text += f"({median(scores[0]):.4f}), {gaps[1][0]:.1g} in the norm of the\n  gradient ({median(norms[0]):.4g})"
        parts.append(f"{text}; any epoch, {max(gaps[0]):.1g} and {max(gaps[1]):.1g}")
    return "\n".join(parts)


def goals(rows):
    """Seconds of TRL tuned over those of each mode with a goal, both of the same repeat, as text."""
    seconds = {(row["system"], row["mode"], row["repeat"]): float(row["seconds"]) for row in rows}
    lines = []
    for mode, goal in GOALS:
        repeats = [repeat for system, name, repeat in seconds if (system, name) == ("plainrl", mode)]
        pairs = [(seconds.get(("trl", "tuned", repeat)), seconds["plainrl", mode, repeat]) for repeat in repeats]
        times = [peer / own for peer, own in pairs if peer]
        if times:
            verdict = "reached" if median(times) >= goal else "missed"
            lines.append(f"- {mode} against TRL tuned: {spread(times, 2)} times less; goal {goal:g}: {verdict}")
    return "\n".join(lines)


def readme(rows):
    """The text of README_DDPO.md."""
    texts = {("plainrl", mode): text for mode, (_, text) in MODES.items()}
    texts |= {("trl", mode): text for mode, (_, text) in PEER_MODES.items()}
    shown = {"seconds_rollout": ("sampling s", 2), "seconds_update": ("training s", 2), "seconds": ("epoch s", 2)}
    shown |= {"sampled_per_sec": ("sampled/s", 2), "trained_per_sec": ("trained/s", 2)}
    shown |= {"images_per_sec": ("images/s", 2), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    libraries = {row["system"]: row["libraries"] for row in rows}
    return page(
        rows, README, texts, shown, PEER_MODES, lambda mode, setting: setting, work=rows[0]["work_gflop"],
        iterations=int(rows[0]["counted"]) + 1, parameters=f"{int(rows[0]['parameters']):,}",
        same_work=same_work(rows), goals=goals(rows), PAIRS=IMAGES * STEPS,
        libraries="\n".join(f"- {system}: {found}" for system, found in sorted(libraries.items())),
        **{name: globals()[name] for name in "LATENTS IMAGES STEPS GUIDANCE RANK TOLERANCE".split()},
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, MODES, measure_ours, readme, HERE / "results_ddpo.csv", "README_DDPO.md", prepare)
