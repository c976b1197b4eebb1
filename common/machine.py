"""The machine under a run: processes, threads, kernels and memory."""

import ctypes
import os

import torch
from accelerate import Accelerator

from common.cli import InputError


def launch(args, fsdp=True):
    """The Accelerator of a run. InputError for what the launcher asks and no script does.

    fsdp: whether the script can shard its model.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes read the weights
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    if accelerator.device.type == "cpu":
        fast_cpu_matmul()
        keep_freed_memory()
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: the loops accumulate
    processes = accelerator.num_processes
    if args.batch_size % processes:
        raise InputError(f"--batch-size {args.batch_size} must be a multiple of the {processes} processes")
    if accelerator.mixed_precision == "fp16":
        raise InputError("use --mixed-precision bf16 or no: fp16 is not offered")
    if accelerator.distributed_type == "FSDP":
        if not fsdp:
            raise InputError("FSDP: every process of this script trains the whole model: launch it without")
        if not accelerator.is_fsdp2 or args.merge_adapters:
            raise InputError("FSDP: set fsdp_version to 2, and leave out --merge-adapters, which needs whole weights")
    return accelerator


def set_threads(threads=None):
    """Sets torch's CPU threads (default: this process's share of the cores) and returns their number.

    `accelerate launch` exports OMP_NUM_THREADS=1 on CPUs, so torch would use one. Another number of threads gives other
    bits, which is why the number is stored in checkpoints.
    """
    if not threads:
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = max(1, cores // processes)
    torch.set_num_threads(threads)
    return threads


def fast_cpu_matmul():
    """float32 matmul precision "medium" on CPUs, where it is exact.

    On x86 CPUs without AMX it sends float32 matrix products to oneDNN's AVX-512 kernels (about 2x on AMD) at unchanged
    accuracy; with AMX it would round to bfloat16. So one 256 x 256 product is compared with float64 first.
    """
    a = torch.linspace(-1.0, 1.0, 256 * 256).reshape(256, 256).sin()
    b = a.t().cos().contiguous()
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    error = (a @ b).double() - exact
    if error.abs().max() / exact.abs().max() > 1e-5:
        torch.set_float32_matmul_precision("highest")


def keep_freed_memory():
    """New pages for every block of logits cost as much as computing them, so the C library keeps what is freed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
