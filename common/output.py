"""The output layer of a language model, without all of its logits in memory at once.

A token has as many logits as the vocabulary has words: 0.6 MB in float32 for the 152k of Qwen3, so that those of a
batch, of which a loss holds several copies, exceed the rest of an update.
"""

from contextlib import contextmanager

import torch
from torch.utils.checkpoint import checkpoint

from common.structure import routers

CHUNK = 2**23  # logits that are computed at a time: 32 MB in float32, of which a loss holds up to four copies


def call_with_output(model, compute, **inputs):
    """A forward pass in which compute(layer, states) takes the place of the output layer; returns its value, a tensor.

    model: a language model, maybe wrapped for several processes. states (B, K, H): what the output layer reads;
    layer(states) (..., V) are the logits. Where the model changes the logits of its output layer, or nobody has asked
    (`has_plain_output`), states are all logits, and layer returns them as they are.
    """
    lm = getattr(model, "module", model)
    if not getattr(lm, "plain_output", False):
        return compute(torch.nn.Identity(), model(**inputs, use_cache=False).logits)
    with output_replaced(lm, compute):
        return model(**inputs, use_cache=False).logits


@contextmanager
def output_replaced(lm, compute):
    """Within it the output layer of lm returns compute(layer, states)."""
    module = lm.get_output_embeddings()
    layer = module.forward
    module.forward = lambda states: compute(layer, states)
    try:
        yield
    finally:
        del module.forward  # that of its class is back


@torch.no_grad()
def has_plain_output(lm):
    """Whether the model returns what its output layer computes as it is. Cohere, Granite and Gemma 2 scale or cap the
    logits, BART adds a bias."""
    mark = torch.zeros(1, 1, lm.get_output_embeddings().weight.shape[0], device=lm.device)
    with output_replaced(lm, lambda layer, states: mark):
        return one_token(lm).logits is mark


def describe_output(lm):
    """How attention and logits are computed, and what stays frozen in a mixture of experts, for a summary."""
    parts = [f"{lm.config._attn_implementation} attention", "logits in chunks"]
    if not lm.plain_output:
        parts[1] = "all logits at once, since the model changes them"
    if routers(lm):
        parts.append("routers frozen")
    return ", ".join(parts)


def one_token(lm):
    """What the model returns for a row of one token, under autocast on a GPU, since flash attention has no float32."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.device.type == "cuda"):
        return lm(input_ids=ids, use_cache=False, logits_to_keep=1)


def in_chunks(function, vocabulary, states, *columns):
    """function(states, *columns) (..., N) of states (N, H) and columns (N,), for as many rows at a time as have CHUNK
    logits. What function computes is computed again in the backward pass, so that only one chunk is in memory."""
    size = max(1, CHUNK // vocabulary)
    if len(states) <= size:
        return function(states, *columns)
    parts = []
    for chunk in zip(*(column.split(size) for column in (states, *columns)), strict=True):
        parts.append(checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, -1)
