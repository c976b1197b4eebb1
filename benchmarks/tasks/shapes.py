"""Shapes: a Stable Diffusion pipeline that draws "a red circle", small enough to be trained on a CPU in minutes.

12 captions, 4 colours x 3 shapes, on a grey ground with more or less strong waves. `base_model` is a diffusers
directory (StableDiffusionPipeline: CLIP text encoder and tokenizer, AutoencoderKL, UNet2DConditionModel, DDIM
scheduler), trained on drawings of this file by `python benchmarks/tasks/shapes.py DIRECTORY` (16 minutes on one CPU
core; other machines get other bits) and committed as `shapes/base_model/`. Images are 32 x 32, latents 4 x 8 x 8.

Rewards of images, (B, 3, H, W) in [0, 1]: `compressibility` and `incompressibility` as in the DDPO paper (Black et al.
2023, arXiv:2305.13301, Sec. 5.1), measured as its authors' code does, by the size of a JPEG file of quality 95,
and `brightness`. Grey level and waves vary much from drawing to drawing, so that these have room. `metric` also has the
agreement with the caption, read off the pixels, which tells what a reward has cost.

Spec strings name its functions: `benchmarks/tasks/shapes.py:brightness`. Copying this file is how to write your own
task: keep the row function and a reward; with a model from the Hugging Face hub nothing below "Model" is needed.
"""

import functools
import io
import itertools
import math
import os
import sys
from pathlib import Path

import numpy as np

COLOURS = {"red": (0.85, 0.12, 0.12), "green": (0.1, 0.65, 0.2), "blue": (0.15, 0.3, 0.9), "yellow": (0.95, 0.85, 0.1)}
SHAPES = ("circle", "square", "triangle")
CAPTIONS = tuple(f"a {colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES))
BASE_MODEL = Path(__file__).resolve().with_suffix("") / "base_model"
SIZE = 32  # pixels of an image's side


# ---- Drawings -------------------------------------------------------------------------------------------------------


def outline(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether a point lies in the shape of half-size 1 around the origin; y points down. A circle fills pi/4 of the
    square around it, a triangle (apex up) half."""
    square = (abs(x) <= 1) & (abs(y) <= 1)
    outlines = {
        "circle": x**2 + y**2 <= 1,
        "square": square,
        "triangle": square & (abs(x) <= (y + 1) / 2),
    }
    return outlines[shape]


def draw(caption: str, rng: np.random.Generator) -> np.ndarray:
    """(32, 32, 3) float in [0, 1]: the caption's shape at a random place and size, on a ground of random grey level
    with waves of random strength (mostly strong ones), direction and length."""
    _, colour, shape = caption.split()
    fine = (np.arange(4 * SIZE) + 0.5) / 4  # four points a pixel and axis, averaged below: smooth edges
    y, x = np.meshgrid(fine, fine, indexing="ij")
    half = rng.uniform(6.5, 11.0)
    centre = rng.uniform(half + 1, SIZE - half - 1, size=2)
    inside = outline(shape, (x - centre[0]) / half, (y - centre[1]) / half)
    grey = np.clip(rng.normal(0.45, 0.1), 0.15, 0.85)
    strength = 0.2 * rng.beta(4, 2)
    angle = rng.uniform(0, math.pi)
    length = rng.uniform(7.0, 11.0)
    phase = rng.uniform(0, 2 * math.pi)
    distance = x * math.cos(angle) + y * math.sin(angle)  # along the direction of the waves
    waves = np.sin(2 * math.pi / length * distance + phase)
    ground = grey + strength * waves
    image = np.where(inside[..., None], COLOURS[colour], ground[..., None])
    return image.reshape(SIZE, 4, SIZE, 4, 3).mean(axis=(1, 3)).clip(0, 1)


def drawings(count: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """(count, 32, 32, 3) float32 images and their captions, each caption equally often."""
    rng = np.random.default_rng([seed, count])
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]
    images = [draw(caption, rng) for caption in captions]
    return np.stack(images).astype(np.float32), captions


# ---- Rewards --------------------------------------------------------------------------------------------------------


def kilobytes(image) -> float:
    """Size of the image (3, H, W) in [0, 1] as a JPEG file of quality 95, in units of 1000 bytes."""
    from PIL import Image

    pixels = np.asarray(image).transpose(1, 2, 0) * 255
    file = io.BytesIO()
    Image.fromarray(pixels.round().astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.tell() / 1000


def compressibility(images, prompts: list[str], **columns) -> list[float]:
    """Minus the size of the JPEG file, in kB: plain images win."""
    return [-kilobytes(image) for image in images]


def incompressibility(images, prompts: list[str], **columns) -> list[float]:
    """The size of the JPEG file, in kB: busy images win."""
    return [kilobytes(image) for image in images]


def brightness(images, prompts: list[str], **columns) -> list[float]:
    """Mean of all pixels and channels."""
    return [float(np.asarray(image).mean()) for image in images]


def shuffled(images, prompts: list[str], **columns) -> list[float]:
    """`compressibility`, each to a wrong image: a control. Its mean is that of the true rewards, and nothing is to be
    learned from it."""
    scores = compressibility(images, prompts)
    seed = abs(hash(tuple(scores)))
    order = np.random.default_rng(seed).permutation(len(scores))
    return [scores[i] for i in order]


@functools.cache
def templates(height: int, width: int) -> dict[str, np.ndarray]:
    """The outlines that fill a box of that many pixels, as (height, width) bool."""
    rows = (np.arange(height) + 0.5) / height
    columns = (np.arange(width) + 0.5) / width
    y, x = np.meshgrid(2 * rows - 1, 2 * columns - 1, indexing="ij")
    return {shape: outline(shape, x, y) for shape in SHAPES}


def recognise(image) -> tuple[str | None, str | None]:
    """(colour, shape) of the coloured thing in an image (3, H, W); (None, None) where nothing is coloured.

    The mask is where the channels differ; its colour is the nearest of the four (by direction, so that light and shade
    don't matter), its shape the one that overlaps most with it in its bounding box.
    """
    pixels = np.asarray(image, dtype=np.float64).transpose(1, 2, 0)
    mask = pixels.max(axis=2) - pixels.min(axis=2) > 0.3
    rows = np.flatnonzero(mask.sum(axis=1) > 1)
    columns = np.flatnonzero(mask.sum(axis=0) > 1)
    if len(rows) < 4 or len(columns) < 4:
        return None, None
    direction = pixels[mask].mean(axis=0) - pixels[mask].mean()
    similarity = {}
    for name, colour in COLOURS.items():
        reference = np.array(colour) - np.mean(colour)
        similarity[name] = direction @ reference / np.linalg.norm(reference)
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    overlap = {}
    for shape, template in templates(*box.shape).items():
        overlap[shape] = (box & template).sum() / (box | template).sum()
    return max(similarity, key=similarity.get), max(overlap, key=overlap.get)


def metric(images, prompts: list[str], **columns) -> dict[str, list[float]]:
    """Per image: agreement with the caption (1.0 where colour and shape are right), each of the two, brightness, and
    the size of the JPEG file in kB."""
    values = {"agreement": [], "colour": [], "shape": []}
    for image, prompt in zip(images, prompts, strict=True):
        colour, shape = recognise(image)
        words = prompt.split()
        is_colour_right = words[-2:-1] == [colour]  # slices, since a prompt may have fewer words
        is_shape_right = words[-1:] == [shape]
        values["agreement"].append(float(is_colour_right and is_shape_right))
        values["colour"].append(float(is_colour_right))
        values["shape"].append(float(is_shape_right))
    values["brightness"] = brightness(images, prompts)
    values["kilobytes"] = incompressibility(images, prompts)
    return values


# ---- Rows -----------------------------------------------------------------------------------------------------------


def prompts() -> list[dict]:
    """The 12 captions, with what they name as columns (`colour`, `shape`)."""
    rows = []
    for caption in CAPTIONS:
        _, colour, shape = caption.split()
        rows.append({"prompt": caption, "colour": colour, "shape": shape})
    return rows


def eval_prompts(samples: int = 8) -> list[dict]:
    rows = []
    for row in prompts():
        rows += [dict(row) for _ in range(samples)]
    return rows


# ---- Model ----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "images": 8192,
    "vae": {"steps": 2500, "batch": 16, "lr": 1.5e-3},
    "unet": {"steps": 5000, "batch": 32, "lr": 1.5e-3, "warmup": 60, "ema": 0.998, "dropout": 0.1},
}


def tokenizer():
    """CLIP's tokenizer with one token a word of the captions, 8 tokens at most."""
    from transformers import CLIPTokenizer

    words = ["a", *COLOURS, *SHAPES]
    letters = sorted(set("".join(words)))
    last_letters = [letter + "</w>" for letter in letters]
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *last_letters]
    merges = []
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        for merge in merges:  # in their order, as byte-pair encoding applies them
            pieces = merge_pieces(pieces, merge)
        token = pieces[0]
        for piece in pieces[1:]:
            merges.append((token, piece))
            token += piece
            vocabulary.append(token)
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    return CLIPTokenizer(vocab=ids, merges=merges, model_max_length=8)


def merge_pieces(pieces: list[str], merge: tuple[str, str]) -> list[str]:
    """The pieces of a word with each neighbouring pair that equals `merge` as one.

    >>> merge_pieces(["a", "b", "b", "a", "b"], ("a", "b"))
    ['ab', 'b', 'ab']
    """
    merged = []
    for piece in pieces:
        if merged and (merged[-1], piece) == merge:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def untrained_pipeline(vae=None, unet=None):
    """The pipeline with weights from torch's generator: UNet 1.1 M parameters, VAE 0.65 M, text encoder 0.07 M. vae,
    unet: other sizes."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    words = tokenizer()
    vae_config = {
        "sample_size": SIZE,
        "block_out_channels": (16, 32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "mid_block_add_attention": False,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 8,
    }
    unet_config = {
        "sample_size": SIZE // 4,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "layers_per_block": 1,
        "cross_attention_dim": 64,
        "attention_head_dim": 4,
        "norm_num_groups": 16,
    }
    text_config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=words.model_max_length,
        **{f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=False,
    )
    return StableDiffusionPipeline(
        vae=AutoencoderKL(**vae_config | (vae or {})),
        unet=UNet2DConditionModel(**unet_config | (unet or {})),
        text_encoder=CLIPTextModel(text_config),
        tokenizer=words,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def train(directory: str) -> None:
    """Trains the pipeline on drawings and writes it to the directory: first the VAE, then UNet and text encoder on its
    latents. `python benchmarks/tasks/shapes.py DIRECTORY` calls it."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pipeline = untrained_pipeline()
    images, captions = drawings(SETTINGS["images"])
    images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous() * 2 - 1
    train_vae(pipeline.vae, images)
    with torch.no_grad():
        means = [pipeline.vae.encode(batch).latent_dist.mean for batch in images.split(256)]
    latents = torch.cat(means)
    pipeline.vae.register_to_config(scaling_factor=1 / latents.std().item())
    latents = latents * pipeline.vae.config.scaling_factor
    train_unet(pipeline, latents, captions)
    pipeline.vae.half()  # half the size; diffusers reads them as float32, transformers would not
    pipeline.unet.half()
    pipeline.save_pretrained(directory)


def train_vae(vae, images):
    """Trains the VAE on images (B, 3, 32, 32) in [-1, 1], and freezes it."""
    import torch

    settings = SETTINGS["vae"]

    def vae_loss(step):
        rows = torch.randint(len(images), (settings["batch"],))
        batch = images[rows]
        posterior = vae.encode(batch).latent_dist
        error = vae.decode(posterior.sample()).sample - batch
        kl_penalty = 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        return error.pow(2).mean() + 0.1 * error.abs().mean() + kl_penalty

    optimise("VAE", list(vae.parameters()), settings, loss_function=vae_loss)
    vae.eval().requires_grad_(False)


def train_unet(pipeline, latents, captions):
    """Trains UNet and text encoder to draw the captions' scaled latents (B, 4, 8, 8). Their weights end as the average
    of those after each step but the last."""
    import torch
    from torch.nn import functional as F

    unet = pipeline.unet
    text_encoder = pipeline.text_encoder
    scheduler = pipeline.scheduler
    settings = SETTINGS["unet"]
    batch_size = settings["batch"]
    ids = pipeline.tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    empty = pipeline.tokenizer("", padding="max_length", return_tensors="pt").input_ids
    weights = [*unet.parameters(), *text_encoder.parameters()]
    averages = [weight.detach().clone() for weight in weights]

    def unet_loss(step):
        rows = torch.randint(len(latents), (batch_size,))
        clean = latents[rows]
        noise = torch.randn(clean.shape)
        is_dropped = torch.rand(batch_size, 1) < settings["dropout"]
        words = torch.where(is_dropped, empty, ids[rows])
        timesteps = torch.randint(scheduler.config.num_train_timesteps, (batch_size,))
        noisy = scheduler.add_noise(clean, noise, timesteps)
        target = scheduler.get_velocity(clean, noise, timesteps)
        if step > 1:
            decay = min(settings["ema"], step / (step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, 1 - decay)
        hidden = text_encoder(words).last_hidden_state
        predicted = unet(noisy, timesteps, hidden).sample
        return F.mse_loss(predicted, target)

    optimise("UNet", weights, settings, loss_function=unet_loss)
    for weight, average in zip(weights, averages, strict=True):
        weight.data.copy_(average)


def optimise(name, weights, settings, loss_function):
    """AdamW with a cosine schedule; loss_function(step) -> scalar."""
    import torch

    optimizer = torch.optim.AdamW(weights, lr=settings["lr"], fused=True)
    steps = settings["steps"]
    warmup = settings.get("warmup", 0)
    for step in range(1, steps + 1):
        scale = (1 + math.cos(math.pi * step / steps)) / 2
        if warmup:
            scale = min(scale, step / warmup)
        optimizer.param_groups[0]["lr"] = settings["lr"] * scale
        loss = loss_function(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"shapes: {name} {step}/{steps} | loss {loss.item():.4f}", flush=True)


def base_model() -> str:
    return str(BASE_MODEL)


if __name__ == "__main__":
    train(*sys.argv[1:])
