"""The output layer of a language model, without all of its logits in memory at once.

A token has as many logits as the vocabulary has words: 0.6 MB in float32 for the 152k of Qwen3, so that those of a
batch, of which a loss holds several copies, exceed the rest of an update.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.structure import autocast_on_gpu, routers

# Logits that are computed at a time, of more than two times as many: 64 MB in float32. A loss holds three copies.
CHUNK = 2**24


def call_with_output(model, compute, **inputs):
    """A forward pass in which compute(layer, states) takes the place of the output layer; returns its value, a tensor.

    model: a language model, maybe wrapped for several processes. states (B, K, H): what the output layer reads;
    layer(states) (..., V) are the logits. Where the model changes the logits of its output layer, or nobody has asked
    (`has_plain_output`), states are all logits, and layer returns them as they are.
    """
    lm = getattr(model, "module", model)
    if not getattr(lm, "plain_output", False):
        return compute(nn.Identity(), model(**inputs, use_cache=False).logits)
    with output_replaced(lm, compute):
        return model(**inputs, use_cache=False).logits


@contextmanager
def output_replaced(lm, compute):
    """Within it the output layer of lm returns compute(layer, states)."""
    module = lm.get_output_embeddings()
    layer = module.forward
    own = vars(module).get("forward")  # one that a library has put there
    module.forward = lambda states: compute(layer, states)
    try:
        yield
    finally:
        del module.forward  # that of its class is back
        if own is not None:
            module.forward = own


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
    rope = getattr(lm.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        parts.append(f"longrope: at most {rope['original_max_position_embeddings']} tokens a row")
    return ", ".join(parts)


def one_token(lm):
    """What the model returns for a row of one token, under autocast on a GPU, since flash attention has no float32."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    with autocast_on_gpu(lm):
        return lm(input_ids=ids, use_cache=False, logits_to_keep=1)


def in_chunks(function, layer, vocabulary, states, *columns):
    """function(layer(states), *columns) (..., N) of states (N, H) and columns (N,), for as many rows at a time as have
    CHUNK logits. A chunk is computed again in the backward pass, so that only one is in memory. What would be no more
    than two chunks is computed at once, and only once."""
    size = max(1, CHUNK // vocabulary)
    if len(states) <= 2 * size:
        return function(layer(states), *columns)
    module = getattr(layer, "__self__", layer)  # of a forward method
    if type(module) is nn.Linear:
        dtype = states.dtype
        if torch.is_autocast_enabled(states.device.type):
            dtype = torch.get_autocast_dtype(states.device.type)
        return ChunkedLinear.apply(function, size, dtype, module.weight, module.bias, states, *columns)

    def of_chunk(states, *columns):
        return function(layer(states), *columns)

    parts = []
    for chunk in zip(*(column.split(size) for column in (states, *columns)), strict=True):
        parts.append(checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, -1)


class ChunkedLinear(torch.autograd.Function):
    """function(linear(states), *columns), `size` rows at a time. The gradient of the weight is added up in one tensor,
    at least in float32: autograd would hold three of its size at once, and add them up in the type of an autocast."""

    @staticmethod
    def forward(ctx, function, size, dtype, weight, bias, states, *columns):
        ctx.function = function
        ctx.size = size
        ctx.dtype = dtype
        ctx.save_for_backward(weight, bias, states, *columns)
        parts = []
        for logits, _, columns_of_chunk in chunks(size, dtype, weight, bias, states, *columns):
            parts.append(function(logits, *columns_of_chunk))
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        weight, bias, states, *columns = ctx.saved_tensors
        _, _, _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        precise = torch.promote_types(weight.dtype, torch.float32)
        weight_gradient = torch.zeros_like(weight, dtype=precise) if trains_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=precise) if trains_bias else None
        weight_of_products = weight.to(ctx.dtype)
        state_gradients = []
        again = chunks(ctx.size, ctx.dtype, weight, bias, states, *columns)
        for outer, (logits, chunk, columns_of_chunk) in zip(gradient.split(ctx.size, -1), again, strict=True):
            with torch.enable_grad():
                terms = ctx.function(logits.requires_grad_(), *columns_of_chunk)
            (inner,) = torch.autograd.grad(terms, logits, outer)  # (n, V)
            state_gradients.append((inner @ weight_of_products).to(states.dtype))
            if trains_weight and inner.dtype == precise:
                weight_gradient.addmm_(inner.T, chunk)
            elif trains_weight:
                weight_gradient += inner.T @ chunk
            if trains_bias:
                bias_gradient += inner.sum(0)
            del logits, terms, inner  # before those of the next chunk
        return None, None, None, weight_gradient, bias_gradient, torch.cat(state_gradients), *[None] * len(columns)


def chunks(size, dtype, weight, bias, states, *columns):
    """Yields logits (n, V), states (n, H) and columns of `size` rows at a time, in the type of the products."""
    weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    for part, *columns_of_chunk in zip(*(column.split(size) for column in (states, *columns)), strict=True):
        part = part.to(dtype)
        yield F.linear(part, weight, bias), part, columns_of_chunk
