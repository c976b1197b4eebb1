"""The machine under a run: processes, precision, threads, kernels and memory."""

import ctypes
import math
import os
import resource
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn import functional

from common.cli import InputError, flag_of

# How long a process waits for another. NCCL's own limit, 10 minutes, is less than what rank 0 may do alone: score with
# a slow reward, or save a large model. Where a process dies, the launcher ends the others at once.
TIMEOUT = timedelta(hours=12)

# torch asks Linux for pages of 2 MB, of which there are fewer to make. It reads this once, for its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# ---- Processes -------------------------------------------------------------------------------------------------------


def launch(args, fsdp=True):
    """The Accelerator of a run. InputError for what the launcher asks and no script does.

    fsdp: whether the script can shard its model.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes read the weights
    cuda = torch.cuda.is_available()
    gpu_has_bfloat16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        gpu_has_bfloat16 = False
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision=autocast_type(args.mixed_precision, launcher, args.dtype, gpu_has_bfloat16),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
    )
    args.mixed_precision = accelerator.mixed_precision  # what was chosen is part of the run's identity
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


# ---- Precision -------------------------------------------------------------------------------------------------------


def autocast_type(flag, launcher, dtype, gpu_has_bfloat16):
    """Type of the autocast: that of the flag, or of the launcher, or bf16 for float32 weights on a GPU that has it.

    `accelerate launch` says "no" where nothing was chosen, so its "no" is no choice. What stays outside of the autocast
    (heads, losses) is float32 in full: TF32 stays off in matrix products, which is torch's default.
    """
    if flag is not None:
        return flag
    if launcher not in (None, "no"):
        return launcher
    if gpu_has_bfloat16 and dtype == "float32":
        return "bf16"
    return "no"


def describe_precision(args, accelerator):
    """Types of weights and of matrix products. On a CPU that is slower in bfloat16, by how much.

    Such CPUs emulate it, or have instructions for it that are slower than those for float32 (Intel without AMX).
    """
    text = f"{args.dtype} weights, {accelerator.mixed_precision} autocast"
    if accelerator.device.type == "cuda":
        tf32 = "off" if torch.get_float32_matmul_precision() == "highest" else "on"
        return f"{text}, TF32 {tf32}"
    if accelerator.mixed_precision == "bf16" or args.dtype == "bfloat16":
        slowdown = bfloat16_slowdown()
        if slowdown > 1.5:
            text += f" (warning: on this CPU bfloat16 is {slowdown:.1f} times slower than float32)"
    return text


def describe_layout(args, accelerator):
    """Types, device and processes, for the summary at the start of a run."""
    processes = f"{accelerator.num_processes} processes x {torch.get_num_threads()} threads"
    return f"{describe_precision(args, accelerator)}, {accelerator.device}, {processes}"


def bfloat16_slowdown():
    """Seconds of a small matrix product in bfloat16 on this CPU over those in float32, in a few milliseconds."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(5):  # the first one sets things up
            start = time.perf_counter()
            functional.linear(matrix, matrix)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] / seconds[torch.float32]


# ---- Threads ---------------------------------------------------------------------------------------------------------


def set_threads(threads=None):
    """Sets torch's CPU threads and returns their number: that given, or OMP_NUM_THREADS of the user, or this process's
    share of the CPUs. Another number of threads gives other bits, which is why the number is stored in checkpoints."""
    threads = threads or threads_of_user()
    if not threads:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = max(1, int(usable_cpus()) // processes)
    torch.set_num_threads(threads)
    return threads


def threads_of_user():
    """OMP_NUM_THREADS as the user has set it, or None.

    `accelerate launch` and torchrun set it where it is missing (to 1, or to all cores). Then it is not in the
    environment that they were started with.
    """
    variable = "OMP_NUM_THREADS"
    if not os.environ.get(variable, "").isdecimal():
        return None
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            environment = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")
        except OSError:  # no Linux
            return None
        if not any(entry.startswith(f"{variable}=") for entry in environment.split("\0")):
            return None
    return int(os.environ[variable])


def usable_cpus():
    """CPUs of this process and its siblings: its affinity, or the quota of its container where that is less."""
    cpus = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    return min(cpus, cpu_quota())


def cpu_quota(groups="/proc/self/cgroup", mounted="/sys/fs/cgroup"):
    """CPUs that the control groups of this process leave it, inf without a limit: the least of its group and of all
    above it. Version 2 writes quota and period to cpu.max, version 1 to two files."""
    quotas = [math.inf]
    try:
        lines = Path(groups).read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = Path(mounted, "cpu") if controllers else Path(mounted)
        group = base / path.lstrip("/")  # inside a container it may be named as outside, and not be there
        for folder in (group, *group.parents):
            quotas.append(quota_of(folder))
            if folder == base:
                break
    return min(quotas)


def quota_of(folder):
    """CPUs by the files of one control group; inf without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def fast_cpu_matmul():
    """float32 matmul precision "medium" on AMD's CPUs, where it is exact.

    It sends float32 matrix products to oneDNN, on AMD's CPUs with AVX-512 about twice as fast as MKL. On Intel's, MKL
    is as fast, and for some shapes faster. A CPU that can round to bfloat16 within a product would do so at "medium":
    one product of 256 x 256 is compared with float64 first.
    """
    if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
        return
    a = torch.linspace(-1.0, 1.0, 256 * 256).reshape(256, 256).sin()
    b = a.t().cos().contiguous()
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    error = (a @ b).double() - exact
    if error.abs().max() / exact.abs().max() > 1e-5:
        torch.set_float32_matmul_precision("highest")


# ---- Memory ----------------------------------------------------------------------------------------------------------


def keep_freed_memory():
    """New pages for every block of logits cost as much as computing them, so the C library keeps what is freed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def peak_memory_mb(device):
    """The most that this process has held so far: on a GPU in tensors, else in all of its memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def is_out_of_memory(error):
    """Whether memory has run out, on a GPU or a CPU. Libraries tell it in their own words."""
    words = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return told or isinstance(error, MemoryError)


def memory_advice(args):
    """A sentence with the flags of a script that lower its memory. Those of sizes do not change the result, so the run
    goes on with them."""
    smaller = []
    for name in ("micro_batch_size", "decode_batch_size"):
        if getattr(args, name, 1) > 1:
            smaller.append(f"lower {flag_of(name)} (now {getattr(args, name)})")
    if not args.gradient_checkpointing:
        smaller.append("add --gradient-checkpointing")
    text = "out of memory"
    if smaller:
        text += f": {', '.join(smaller)}: the same command then continues from the last checkpoint, if there is one"
    others = [flag_of(name) for name in ("max_length", "max_prompt_length", "max_new_tokens") if hasattr(args, name)]
    if args.lora_r == 0:
        others.append("--lora-r")
    if args.mixed_precision == "no":
        others.append("--mixed-precision bf16")
    return f"{text}; other flags that lower it, for a new run: {', '.join(others) or 'none'}"


# ---- Optimizer -------------------------------------------------------------------------------------------------------


def learning_rate(args, step, total_steps):
    """Of optimizer step `step`, counted from 0: a linear warm-up to lr, then a decay to lr_final, which it keeps."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return args.lr
    progress = min(1.0, (step - args.warmup_steps) / max(1, args.decay_steps or total_steps - args.warmup_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return args.lr + (args.lr_final - args.lr) * progress


def make_optimizer(model, args):
    """AdamW on what is trainable; weight decay on matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [([w for w in weights if w.ndim > 1], args.weight_decay), ([w for w in weights if w.ndim < 2], 0.0)]
    groups = [{"params": members, "weight_decay": decay} for members, decay in groups if members]
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)


def accumulate(accelerator, model, micro_batches):
    """Yields the micro-batches of an optimizer step; processes exchange their gradients in the last one alone."""
    for micro_batch in micro_batches:
        with nullcontext() if micro_batch is micro_batches[-1] else accelerator.no_sync(model):
            yield micro_batch


def optimizer_step(accelerator, model, optimizer, lr, args, step, where, loss=None):
    """Clips the gradient, takes a step and clears the gradient. Returns the gradient's norm before clipping. Raises
    FloatingPointError, with the number of the step and where it was, before a gradient or a loss that is not finite
    changes the weights."""
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
    numbers = {"gradient norm": grad_norm}
    if loss is not None:
        numbers = {"loss": loss, "gradient norm": grad_norm}
    if not all(map(math.isfinite, numbers.values())):
        found = ", ".join(f"{name} {value}" for name, value in numbers.items())
        raise FloatingPointError(f"step {step}: {found}, {where}; the last checkpoint is intact")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def reduce_sums(accelerator, sums):
    """{name: sum over all processes} as numbers, of a dict of sums."""
    totals = accelerator.reduce(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))
