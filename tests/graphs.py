"""A CUDA graph without CUDA: a pass is recorded operation by operation, and replayed into the same memory.

What depends on anything but tensors (Python numbers, shapes, results that the host reads) then keeps the value of the
recording, as in a real graph. What makes the host wait raises the error of torch's debug mode. Not shown: capturing
itself, streams, memory pools, and what autocast caches meanwhile.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The host waits for their result or its shape.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Recording(TorchDispatchMode):
    """Notes the operations in it that are no views, with their tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), options=None):
        options = options or {}
        name = function._schema.name.removeprefix("aten::")
        masks = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITS or masks:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        result = function(*args, **options)
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view:
            self.operations.append((function, args, options, result))
        return result


class Graph:
    """As a torch.cuda.CUDAGraph. all: every one that was captured, with how often it was replayed."""

    all = []

    def __init__(self, function):
        with Recording() as recording:
            function()
        self.operations = recording.operations
        self.num_replays = 0
        Graph.all.append(self)

    @torch.no_grad()
    def replay(self):
        self.num_replays += 1
        for function, args, options, result in self.operations:
            again = function(*args, **options)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def never_waits(function):
    """As graphs.never_waits of common/lm."""
    try:
        with Recording():
            function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    return True


def use(monkeypatch, room=16):
    """Lets passes on CPUs become such graphs; the cache grows by `room` tokens."""
    from common.lm import graphs, sampling

    Graph.all.clear()
    for module in (graphs, sampling):
        monkeypatch.setattr(module, "GRAPHS", ("cpu",))
    monkeypatch.setattr(graphs, "ROOM", room)
    monkeypatch.setattr(graphs, "capture", Graph)
    monkeypatch.setattr(graphs, "never_waits", never_waits)
    return Graph.all
