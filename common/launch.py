"""How a run uses the machine: processes, precision, threads, kernels and memory."""

import ctypes
import math
import os
import resource
import traceback
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch

from common.errors import InputError, NotFinite
from common.report import screen

# How long a process waits for another. NCCL's own 10 minutes are too short for rank 0 to score with a slow reward or
# save a large model. If a process dies, the launcher ends the others at once.
TIMEOUT = timedelta(hours=12)


def launch(mixed_precision, dtype, batch_size, deterministic, fsdp=True):
    """The Accelerator of a run. mixed_precision: None takes that of the launcher, else bf16 for float32 weights on GPUs
    that have it. fsdp: whether this script can shard its model."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, parse_flag_from_env
    from torch.distributed.fsdp import MixedPrecisionPolicy

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes read the weights
    gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    gpu_has_bfloat16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if mixed_precision is None:
        mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" if nothing was chosen, too
        if mixed_precision == "no" and gpu_has_bfloat16 and dtype == "float32":
            mixed_precision = "bf16"
    torch.backends.cudnn.allow_tf32 = False  # which torch allows for convolutions, though not for matrix products
    # a view: one copy of the gradients
    handlers = [InitProcessGroupKwargs(timeout=TIMEOUT), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(cpu=not gpu, mixed_precision=mixed_precision, kwargs_handlers=handlers)
    keep_freed_memory()
    if accelerator.device.type == "cuda":
        # cuDNN's attention prepares each new shape (pytorch/pytorch#155958): most of the host's time in a profile on an
        # H200. The backward pass of the other fused kernels adds up in any order: --deterministic takes the plain one.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(not deterministic)
        torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    else:
        choose_products()
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: the loops accumulate
    if batch_size % accelerator.num_processes:
        raise InputError(f"--batch-size {batch_size} must be a multiple of the {accelerator.num_processes} processes")
    if accelerator.mixed_precision == "fp16":
        raise InputError("use --mixed-precision bf16 or no: fp16 is not supported")
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):  # whose backward passes step the optimizer
        raise InputError("launch without DeepSpeed and Megatron-LM: the processes work together by DDP or FSDP2")
    if accelerator.distributed_type == "FSDP":
        if not (fsdp and accelerator.is_fsdp2):
            raise InputError("FSDP: set fsdp_version to 2; ddpo.py needs whole weights, so launch it without FSDP")
        # accelerate's own policy would add up gradients in bfloat16, and round log-probabilities and values to it
        policy = MixedPrecisionPolicy()
        if accelerator.mixed_precision == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return accelerator


def prepare(accelerator, model, optimizer, *frozen):
    """The model as the processes train it together: wrapped by DDP, or sharded in place by FSDP2 with the weights of
    the optimizer. frozen: models without gradients (or None): they are sharded, too, and no part stays gathered."""
    model = accelerator.prepare(model, optimizer)[0]
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        for other in filter(None, frozen):
            # else the plugin looks for the model's blocks
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(other._no_split_modules or [])
            fsdp2_prepare_model(accelerator, other)
            other.set_reshard_after_forward(True)
        for each in filter(None, (model, *frozen)):
            each.forward = accelerator.autocast()(each.forward)  # without FSDP2, accelerate does this itself
    return model


@contextmanager
def unsharded(model):
    """Inside, weights sharded by FSDP2 are gathered once and not for every token. Afterwards all of them are shards
    again, while forward passes alone would leave some gathered, and in bfloat16."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the whole model first
    with ExitStack() as stack:
        for module in sharded:
            state = module._get_fsdp_state()
            state._lazy_init()  # otherwise the first block called would take itself for the whole model
            if group := state._fsdp_param_group:
                stack.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
            stack.callback(module.reshard)
        yield


def set_threads(threads=None):
    """Sets torch's CPU threads and returns their number: the given one, else OMP_NUM_THREADS (ignored under
    `accelerate launch` and torchrun, which set it themselves), else this process's share of the CPUs."""
    if not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = threads or max(1, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(threads)
    return threads


def choose_products():
    """Lets oneDNN multiply float32 matrices on AMD's CPUs, where MKL is slow (benchmarks/throughput/results.csv: TRL's
    `same-flags` and `tuned` of ppo). torch does so at "medium"; one that then rounds to bfloat16 stays at "highest"."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "AuthenticAMD" in cpu.read_text(encoding="utf-8"):
        torch.set_float32_matmul_precision("medium")
        a = torch.arange(2.0**16).sin().view(256, 256)
        if not torch.allclose((a @ a).double(), a.double() @ a.double(), rtol=0, atol=1e-3):
            torch.set_float32_matmul_precision("highest")


def keep_freed_memory():
    """Lets the process keep the memory that it has freed. By default glibc returns large blocks to the system at once,
    which then has to clear every page of the next micro-batch's activations anew."""
    # by default oneDNN keeps kernels of 1,024 shapes where large blocks were: the process grows with every new length
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def peak_memory_mb(device):
    """Peak memory of this process so far: of its tensors on a GPU, otherwise of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def accumulate(accelerator, model, micro_batches):
    """Yields the micro-batches of an optimizer step. Processes exchange gradients in the last one; under FSDP2 in each,
    or every process would keep whole gradients in between."""
    # autocast keeps casts of weights until its outermost context ends: this one spans the step, for one cast a step
    with torch.autocast(accelerator.device.type, enabled=False):
        for micro_batch in micro_batches:
            exchanges = micro_batch is micro_batches[-1] or accelerator.is_fsdp2
            if exchanges and accelerator.num_processes > 1:
                # gradients of casts that are older than the micro-batch come last: nothing would be exchanged before
                torch.clear_autocast_cache()
            with nullcontext() if exchanges else accelerator.no_sync(model):
                yield micro_batch
            screen.advance(1 / len(micro_batches))


def require_finite(step, where, **numbers):
    """NotFinite, which names the step and `where`, unless all numbers are finite: call it before the weights change."""
    if not all(map(math.isfinite, numbers.values())):
        found = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in numbers.items())
        raise NotFinite(f"step {step}: {found}, {where}; the last checkpoint is intact")


def reduce_sums(accelerator, sums):
    """{name: number}, the sums over all processes of a dict of tensors (), one for each name."""
    totals = accelerator.reduce(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))


def local_rows(accelerator, num_rows):
    """The share of a process, as a list. If the rows do not divide evenly, the last shares repeat the last row."""
    share = math.ceil(num_rows / accelerator.num_processes)
    begin = accelerator.process_index * share
    return [min(row, num_rows - 1) for row in range(begin, begin + share)]


def gather_list(items):
    """The items of all processes in one list, on every process."""
    from accelerate.utils import gather_object

    return gather_object(items)


shared_errors = []  # the newest error that every process has got, if it is none of the model


def on_main(accelerator, function, *args):
    """Runs function(*args) on rank 0. Every rank gets its result or its error."""
    from accelerate.utils import broadcast_object_list

    own = function if accelerator.is_main_process else lambda *args: None
    results = [on_each(accelerator, own, *args)]
    broadcast_object_list(results)  # in a single process nothing happens
    return results[0]


def on_each(accelerator, function, *args):
    """Runs function(*args) on every rank. The error of one is an error of all, so that none waits for it."""
    result = error = said = None
    try:
        result = function(*args)
    except Exception as raised:
        error = raised
        text = str(raised) if isinstance(raised, InputError) else "".join(traceback.format_exception_only(raised))
        said = text.strip(), isinstance(raised, NotFinite)
    found = [each for each in gather_list([said]) if each]
    if not found:
        return result
    error = error or InputError(found[0][0])
    shared_errors.clear()
    if not any(of_model for _, of_model in found):
        shared_errors.append(error)
    raise error
