"""CUDA graphs of decoding: forward passes that the host launches as one, over a cache that keeps its place. Without
them it launches some 1,600 kernels for a token, which takes several times as long as the kernels do."""

import torch
from torch.nn import functional as F

GRAPHS = ("cuda",)  # types of devices whose passes become graphs
ROOM = 256  # tokens by which a fixed cache grows; every other shape needs a graph of its own
newest_graph = None  # of this process, whose memory the next one takes over: a pool ends with its last graph
capture_stream = None  # of all captures: memory that one stream has freed serves no other


class Step:
    """Passes of one token per row, in tensors that keep shape and place until `fit`. The first pass of a shape is an
    ordinary one, the second becomes a graph, and later ones replay it. A model whose first pass of all makes the host
    wait, which no graph can hold, has none. rows (b,): which context of the cache each row has."""

    def __init__(self, model, cache, rows, attention, last_position, longest):
        self.model = model
        self.cache = cache
        self.attention = attention  # (b, C), 1 where a token is; C: tokens that there is room for
        self.last_position = last_position  # (b, 1)
        self.positions = attention.sum(1, keepdim=True) - 1  # (b, 1)
        self.num_read = attention.shape[1]
        self.longest = longest
        self.place = torch.full((1,), self.num_read - 1, device=attention.device)  # of the newest token in the cache
        fix_layers(cache, rows, self.place, self.num_read)
        self.fit()

    def fit(self, rows=slice(None)):
        """Keeps these rows, and makes room for more tokens if none is left. The next pass has another shape."""
        room = 0
        if self.num_read == self.attention.shape[1]:
            room = min(ROOM, self.longest - self.num_read)
            room += -(self.num_read + room) % 16  # attention would copy a mask of another width in every layer
        self.attention = F.pad(self.attention[rows], (0, room))
        self.positions = self.positions[rows]
        self.last_position = self.last_position[rows]
        for layer in self.cache.layers:
            layer.keys = F.pad(layer.keys[rows], (0, 0, 0, room))
            layer.values = F.pad(layer.values[rows], (0, 0, 0, room))
        self.tokens = torch.zeros_like(self.positions)
        self.graph = None
        self.is_new = True

    def __call__(self, newest):
        """Logits (b, V) behind the newest ids (b,). They change with the next call."""
        if self.num_read == self.attention.shape[1]:
            self.fit()
        self.num_read += 1
        self.place += 1
        self.positions.add_(1).clamp_(max=self.last_position)
        self.attention.index_fill_(1, self.place, 1)
        self.tokens.copy_(newest[:, None])
        waits = getattr(self.model, "makes_host_wait", None)
        if waits is None:
            waits = not never_waits(self.forward)
            self.model.makes_host_wait = waits
            if waits:
                self.forward()  # once more: it writes the same to the same place
        elif waits or self.is_new:
            self.forward()
        else:
            self.graph = self.graph or capture(self.forward)
            self.graph.replay()
        self.is_new = False
        return self.logits

    def forward(self):
        self.logits = self.model(
            input_ids=self.tokens, attention_mask=self.attention, position_ids=self.positions,
            past_key_values=self.cache, use_cache=True, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip


def fix_layers(cache, rows, place, length):
    """Gives a cache layers whose states keep their place. place (1,), which all share: that of the newest token. rows
    (b,): which states each row takes. length: tokens that were read."""
    from transformers.cache_utils import DynamicLayer

    class FixedLayer(DynamicLayer):
        """Attention reads the whole of it; the mask hides what is not written yet, and what a window has left."""

        is_compileable = True  # transformers then neither looks at a mask nor leaves it out

        def update(self, key_states, value_states, *args, **options):
            self.keys.index_copy_(2, place, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, place, value_states.to(self.values.dtype))
            return self.keys, self.values

        def get_mask_sizes(self, query_length):
            return self.keys.shape[2], 0

        def get_seq_length(self):
            return place

    for layer in cache.layers:
        layer.is_sliding = type(layer).is_sliding  # of this layer, whose class changes
        layer.__class__ = FixedLayer
        dtype = layer.keys.dtype
        if torch.is_autocast_enabled(place.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(place.device.type)  # to which attention casts them
        forgotten = length - layer.keys.shape[2]  # by a window
        layer.keys = F.pad(layer.keys.to(dtype)[rows], (0, 0, forgotten, 0))
        layer.values = F.pad(layer.values.to(dtype)[rows], (0, 0, forgotten, 0))


def can_capture(model, cache):
    """Whether a pass is torch's attention over such a cache and nothing besides. Under FSDP2 other streams wait for
    ours and would join the capture; with --deterministic, writing to the cache would sort."""
    from torch.distributed.fsdp import FSDPModule
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    config = model.config.get_text_config()
    kinds = {type(layer) for layer in getattr(cache, "layers", [])}
    return (
        type(cache) is DynamicCache
        and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        and config._attn_implementation in ("sdpa", "eager")
        and "chunked_attention" not in (getattr(config, "layer_types", None) or ())
        and not type(model).__module__.startswith("transformers_modules")  # remote code may count in Python
        and not any(isinstance(module, FSDPModule) for module in model.modules())
        and not torch.are_deterministic_algorithms_enabled()
    )


def never_waits(function):
    """Calls a function of the GPU. Whether the host, in any of its threads, did not wait; at the first wait it ends."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def capture(function):
    """What a function does on the GPU, as a graph that is still to be replayed."""
    global newest_graph, capture_stream
    capture_stream = capture_stream or torch.cuda.Stream()
    free, total = torch.cuda.mem_get_info()
    if free < total / 8:  # within a capture, torch does not return what it has cached to the driver, to take it anew
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()  # torch.cuda.graph would always do that
    capture_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(capture_stream):
        # thread_local: what another thread does on the GPU may go on
        graph.capture_begin(newest_graph and newest_graph.pool(), "thread_local")
        function()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(capture_stream)
    newest_graph = graph
    return graph
