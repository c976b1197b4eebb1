"""Keyed randomness: a draw is a function of (seed, stream, ids), never of how many draws came before.

So a checkpoint needs no generator state, and resuming, the number of processes and micro-batches change no draw."""

import hashlib
import json
import os
import random

import numpy as np
import torch


def rng(seed, stream, *ids):
    """A numpy generator: Philox keyed by a 128-bit hash of all arguments, since streams of seed + step collide across
    seeds. stream names the use ("rollout", ...); ids are integers (step, row, ...)."""
    text = json.dumps([int(seed), stream, *map(int, ids)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def seed_libraries(seed, deterministic=False):
    """Seeds the global generators for code that is not ours (a user's reward, an adapter's initialisation).
    deterministic also asks torch for deterministic kernels; call it before the first CUDA operation."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum in `draw` has none on GPUs
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it for flash_attention_2
