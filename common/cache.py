"""The key-value cache of sampling: written in place, and narrowed as rows end."""

import torch


def write_in_place(cache, room):
    """Lets plain layers of a cache have room for so many more tokens. Others (windows, convolutions, recurrent states,
    what an encoder said) stay as they are."""
    from transformers.cache_utils import DynamicLayer

    from common.written_layer import WrittenLayer

    cache = getattr(cache, "self_attention_cache", cache)
    for place, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer:
            cache.layers[place] = WrittenLayer(layer, room)


def closed_ranks(staying):
    """The places (N,) of the rows that stay, True in staying (B,), in an order that moves few of them: the last ones
    fill the gaps among the first N."""
    places = staying.nonzero()[:, 0]
    first = torch.arange(len(places), device=staying.device)
    is_gap = ~staying[: len(places)]
    num_gaps = int(is_gap.sum())
    first[is_gap] = places[len(places) - num_gaps :]
    return first
