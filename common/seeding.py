"""Keyed randomness: a draw is a function of (seed, stream, ids), never of how many draws came before.

So a checkpoint needs no generator state, and resuming, the number of processes and micro-batches change no draw."""

import hashlib
import json
import math
import os
import random

import numpy as np
import torch


def rng(seed, stream, *ids):
    """A numpy generator: Philox keyed by a 128-bit hash of all arguments, since streams of seed + step collide across
    seeds. stream names the use ("rollout", ...); ids are integers (step, row, ...)."""
    text = json.dumps([int(seed), stream, *map(int, ids)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    return np.random.Generator(np.random.Philox(key=key))


def uniforms(seed, stream, step, rows, n):
    """(len(rows), n) float64 tensor in [0, 1): row i depends on rows[i], a global index, and not on its neighbours."""
    draws = [rng(seed, stream, step, row).random(n) for row in rows]
    return torch.from_numpy(np.reshape(draws, (len(rows), n)))


def draw(logits, uniforms, temperature, top_k=0, top_p=1.0):
    """One token id per row from softmax(logits / temperature) (B, V), by inverse CDF in float64. The uniforms (B,) are
    scaled by the last cumulative value, and searched to the right, so no token of probability zero is drawn."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if 0 < top_k < logits.shape[-1]:
        lowest_kept = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest_kept, -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # the probability of all tokens that rank above this one
        ranked = ranked.masked_fill(before >= top_p, 0.0)
        probs = probs.scatter(1, order, ranked)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    below_total = total.nextafter(torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below_total)
    place = torch.searchsorted(cdf, target, right=True)
    return place[:, 0].clamp(max=probs.shape[1] - 1)  # where probabilities are nan, which `sample` finds


def stream_rows(seed, stream, size, start, count):
    """Entries start .. start + count - 1 of an endless stream of row indices: keyed permutations of range(size), one
    per epoch, joined end to end. No epoch has a short last batch, and no earlier position needs to be drawn."""
    epochs = range(start // size, (start + count - 1) // size + 1)
    rows = np.concatenate([rng(seed, stream, epoch).permutation(size) for epoch in epochs])
    return rows[start % size :][:count].tolist()


def seed_libraries(seed, deterministic=False):
    """Seeds the global generators for code that is not ours (a user's reward, an adapter's initialisation).
    deterministic also asks torch for deterministic kernels; call it before the first CUDA operation."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum in `draw` has none on GPUs
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it for flash_attention_2
