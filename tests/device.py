"""A device that is none. Its tensors say gpu:0 and hold CPU tensors. Operations between it and the CPU that CUDA would
refuse raise. Kernels, the bytes that they move, waits of the host and copies to the device are counted by place.

It is torch's PrivateUse1 key as a Python backend, so autograd's device threads run as well. It does not show autocast,
streams, NCCL, memory, or how a GPU rounds. `start` must come before a model is made, and nothing undoes it.
"""

import collections
import json
import sys
from pathlib import Path

import graphs
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
DEVICE = torch.device("gpu:0")


class OnDevice(torch.Tensor):
    """A tensor of the device; held: the CPU tensor with its numbers."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, held):
        self.held = held.detach()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def tolist(self):
        count("waits")
        return self.held.tolist()

    def numpy(self, *args, **options):
        raise TypeError("can't convert a tensor of gpu:0 to numpy")

    __array__ = numpy

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(options or {}))
        if function is torch.Tensor.data.__set__:  # shares memory
            args[0].held = args[1].held
        return result

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), options=None):
        return run(function, args, options or {})


class Watch(TorchDispatchMode):
    """Within it, what makes tensors makes them on the device where it names it."""

    def __torch_dispatch__(self, function, types, args=(), options=None):
        return run(function, args, options or {})


# ---- Counts ----------------------------------------------------------------------------------------------------------

counts = {kind: collections.Counter() for kind in ("kernels", "bytes", "waits", "copies")}


def place():
    """The function of this repository that runs, as in "sampling.sample"; "backward" in autograd's own threads."""
    frame = sys._getframe(2)
    while frame:
        path = Path(frame.f_code.co_filename)
        if {ROOT / "algos", ROOT / "common"} & {*path.parents}:
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"


def count(kind, number=1):
    counts[kind][place()] += number


# ---- Operations ------------------------------------------------------------------------------------------------------

# No kernel: views and bookkeeping.
VIEWS = set(
    """view _unsafe_view t transpose permute expand slice select unsqueeze squeeze detach as_strided alias split
    split_with_sizes unbind empty empty_like empty_strided new_empty new_empty_strided lift_fresh view_as _reshape_alias
    diagonal unfold chunk resize_ set_ is_same_size""".split()
)
WAITS = graphs.WAITS | {"unique_consecutive", "_assert_async", "repeat_interleave"}
LOOKUPS = "gather", "searchsorted", "index", "embedding"  # which read no more than they return
# Besides pointwise ones, these take numbers of the CPU.
WITH_NUMBERS = {"where", "masked_fill", "masked_fill_", "fill_", "lerp", "lerp_", "index_fill", "index_fill_"}
COPIES = "_to_copy", "copy_", "copy", "_copy_from", "set_"


def run(function, args, options):
    """Checks, counts and computes an operation of torch."""
    name = function._schema.name.removeprefix("aten::")
    flat, tree = tree_flatten((args, options))
    here = [x for x in flat if isinstance(x, OnDevice)]
    there = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.device == CPU]
    wanted = options.get("device")
    result_is_here = bool(here) if wanted is None else torch.device(wanted).type == "gpu"
    if name == "copy_":
        result_is_here = isinstance(args[0], OnDevice)
        count_copy(source_is_here=isinstance(args[1], OnDevice), result_is_here=result_is_here)
    elif name == "_to_copy":
        count_copy(source_is_here=bool(here), result_is_here=result_is_here)
    elif here or result_is_here:
        if here and there and name not in COPIES:
            check(function, name, args, here, there)
        masks = name in graphs.INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITS or masks:
            count("waits")
    is_kernel = result_is_here and name not in VIEWS
    if name == "_local_scalar_dense":
        result_is_here = False
    flat = [x.held if isinstance(x, OnDevice) else x for x in flat]
    args, options = tree_unflatten(flat, tree)
    if result_is_here and "device" in options:
        options["device"] = CPU
    options.pop("pin_memory", None)
    result = function(*args, **options)
    if is_kernel:
        count("kernels")
        written = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        count("bytes", written + (written if name in LOOKUPS else sum(x.nbytes for x in here)))
    if not result_is_here:
        return result
    wrapped = {id(x.held): x for x in here}  # what works in place returns the tensor that it got
    return tree_map_only(torch.Tensor, lambda x: wrapped[id(x)] if id(x) in wrapped else OnDevice(x), result)


def count_copy(source_is_here, result_is_here):
    if source_is_here and not result_is_here:
        count("waits")
    elif result_is_here and not source_is_here:
        count("copies")


def check(function, name, args, here, there):
    """An error, unless CUDA allows it: indices of the CPU, and numbers of the CPU in pointwise operations."""
    if name in graphs.INDEXED and isinstance(args[0], OnDevice):
        indices = {id(x) for x in args[1] if x is not None}
        there = [x for x in there if id(x) not in indices]
        count("copies")
    takes_numbers = name in graphs.INDEXED | WITH_NUMBERS or torch.Tag.pointwise in function.tags
    is_written = function._schema.is_mutable and not isinstance(args[0], OnDevice)
    if is_written or not (takes_numbers and all(x.ndim == 0 for x in there)):
        shapes = ", ".join(f"{x.device.type} {[*x.shape]}" for x in [*here, *there])
        raise RuntimeError(f"an operation between the device and the CPU: {function} in {place()}: {shapes}")


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention in plain operations, which check its arguments."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key = key[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        value = value[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


# ---- Scripts ---------------------------------------------------------------------------------------------------------

libraries = []  # torch forgets kernels whose library is gone


def start(written=None, exact=True):
    """From now on, scripts of this process run on the device. written: a file that gets the counts at the end. exact:
    draws are those of a CPU, and not counted."""
    import safetensors.torch
    from accelerate import PartialState

    from common import launch
    from common import run as run_module
    from common.lm import sampling

    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty_strided", lambda size, stride, **o: empty(torch.empty_strided, size, stride, o), "PrivateUse1")
    kernels.impl("empty.memory_format", lambda size, **o: empty(torch.empty, size, o), "PrivateUse1")
    kernels.impl("_copy_from", lambda source, to, _=False: run(torch.ops.aten.copy_.default, (to, source), {}),
                 "PrivateUse1")  # fmt: skip
    others = torch.library.Library("_", "IMPL")
    others.fallback(lambda function, *args, **options: run(function, args, options), "PrivateUse1")
    libraries.extend((kernels, others))
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied in module.to
    F.scaled_dot_product_attention = attention
    embedding = F.embedding
    F.embedding = lambda ids, weight, *args, sparse=False, **o: embedding(ids, weight, *args, **o)  # no sparse layout

    save_file = safetensors.torch.save_file
    safetensors.torch.save_file = lambda tensors, *args, **options: save_file(
        {name: x.cpu().clone() for name, x in tensors.items()}, *args, **options
    )
    draw = sampling.draw
    if exact:
        sampling.draw = lambda logits, u, *options: OnDevice(draw(logits.held, u.held, *options))
    on_cpu = launch.launch

    def on_device(*args, **options):
        accelerator = on_cpu(*args, **options)
        accelerator.state.device = PartialState._shared_state["device"] = DEVICE
        return accelerator

    launch.launch = run_module.launch = on_device
    finish = run_module.Run.close

    def close(self):
        finish(self)
        if written:
            Path(written).write_text(json.dumps(counts))

    run_module.Run.close = close
    Watch().__enter__()


def empty(function, *args):
    *sizes, options = args
    return OnDevice(function(*sizes, dtype=options.get("dtype")))
