"""Keyed randomness: a draw is a function of (seed, stream, ids), never of how many draws came before.

So a checkpoint holds no generator state, a resumed run draws what the uninterrupted one would have drawn, and neither
the number of processes nor the micro-batch size changes anything.
"""

import hashlib
import json
import math
import os
import random

import numpy as np
import torch


def rng(seed, stream, *ids):
    """A numpy generator that depends on its arguments alone: Philox keyed by a 128-bit hash of all of them.

    stream names the use ("rollout", "minibatches", ...), ids are integers (step, global row, ...). A hash and not
    seed + step, whose streams collide across seeds.
    """
    key = hashlib.blake2b(json.dumps([int(seed), stream, *map(int, ids)]).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def uniforms(seed, stream, step, rows, n):
    """(len(rows), n) float64 tensor in [0, 1): row i depends on rows[i], a global index, and not on its neighbours."""
    draws = [rng(seed, stream, step, row).random(n) for row in rows]
    return torch.from_numpy(np.stack(draws)) if draws else torch.zeros(0, n, dtype=torch.float64)


def draw(logits, uniforms, temperature, top_k=0, top_p=1.0):
    """One token id per row from softmax(logits / temperature) (B, V), by inverse CDF in float64; uniforms (B,).

    temperature 0 is the argmax. The uniform is scaled by the last cumulative value and the search is to the right, so
    that a token of probability zero is never drawn.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= top_p  # the probability before a token already reaches top_p
        probs = probs.scatter(1, order, ranked.masked_fill(drop, 0.0))
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def stream_rows(seed, stream, size, start, count):
    """Entries start .. start + count - 1 of an endless stream of row indices: keyed permutations of range(size), one an
    epoch, end to end. No epoch has a short last batch, and any position is reached without drawing earlier ones."""
    first = start // size
    last = (start + count - 1) // size
    epochs = [rng(seed, stream, epoch).permutation(size) for epoch in range(first, last + 1)]
    begin = start - first * size
    return np.concatenate(epochs)[begin : begin + count].tolist()


def seed_libraries(seed, deterministic=False):
    """Seeds the global generators for code that is not ours (a user's reward, an adapter's initialisation).

    deterministic also asks torch for deterministic kernels; call it before the first CUDA operation.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum in `draw` has none on GPUs
        torch.backends.cudnn.benchmark = False


def set_threads(threads=None):
    """Sets torch's CPU threads (default: this process's share of the cores) and returns their number.

    `accelerate launch` exports OMP_NUM_THREADS=1 on CPUs, so torch would use one. Another number of threads gives other
    bits, which is why the number is stored in checkpoints.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(threads)
    return threads


def fast_cpu_matmul():
    """float32 matmul precision "medium" on CPUs, where it is exact: returns whether it is on.

    On x86 CPUs without AMX it sends float32 matrix products to oneDNN's AVX-512 kernels (about 2x on AMD) at unchanged
    accuracy; with AMX it would round to bfloat16. So one 256 x 256 product is compared with float64 first.
    """
    a = torch.linspace(-1.0, 1.0, 256 * 256).reshape(256, 256).sin()
    b = a.t().cos().contiguous()
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    if ((a @ b).double() - exact).abs().max() / exact.abs().max() < 1e-5:
        return True
    torch.set_float32_matmul_precision("highest")
    return False
