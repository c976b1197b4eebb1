"""What a run makes of the machine, its precision and threads: `python -m pytest tests/test_launch.py`"""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import accelerate
import pytest
import torch
from harness import BIN, ROOT
from torch.nn.attention import SDPBackend

from common import launch
from common.errors import InputError, NotFinite
from common.run import closes_run

PLAIN = {"distributed_type": "NO", "is_fsdp2": False, "device": torch.device("cpu"), "num_processes": 1}
PLAIN |= {"mixed_precision": "no", "no_sync": nullcontext}  # of an Accelerator
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", CAPACITY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flag", "launcher", "dtype", "gpu_has_bfloat16", "expected"),
    [
        ("no", "bf16", "float32", True, "no"),
        ("bf16", "no", "float64", False, "bf16"),
        (None, "bf16", "float32", False, "bf16"),
        (None, "no", "float32", True, "bf16"),
        (None, None, "float32", True, "bf16"),
        (None, None, "float32", False, "no"),
        (None, None, "float64", True, "no"),
    ],
)
def test_autocast_type(monkeypatch, flag, launcher, dtype, gpu_has_bfloat16, expected):
    """torch is made to say that there is a GPU, unless accelerate is told to use the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false" if gpu_has_bfloat16 else "true")
    if launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    accelerator = Mock(return_value=SimpleNamespace(**PLAIN))
    monkeypatch.setattr(accelerate, "Accelerator", accelerator)
    launch.launch(flag, dtype, batch_size=6, deterministic=False)
    asked = accelerator.call_args.kwargs
    assert (asked["cpu"], asked["mixed_precision"]) == (not gpu_has_bfloat16, expected)


def test_processes_have_equal_parts_of_a_batch(monkeypatch):
    several = SimpleNamespace(**PLAIN | {"num_processes": 4})
    monkeypatch.setattr(accelerate, "Accelerator", lambda **options: several)
    given = {"mixed_precision": "no", "dtype": "float32", "deterministic": False}
    assert launch.launch(batch_size=8, **given) == several
    with pytest.raises(InputError, match="^--batch-size 6 must be a multiple of the 4 processes$"):
        launch.launch(batch_size=6, **given)
    several.distributed_type = "DEEPSPEED"
    with pytest.raises(InputError, match="^launch without DeepSpeed and Megatron-LM: "):
        launch.launch(batch_size=8, **given)


def test_attention_of_a_gpu(monkeypatch):
    """Never cuDNN's; with --deterministic the plain one, as a CPU shows, which looks at the same switches."""
    gpu = SimpleNamespace(**PLAIN | {"device": torch.device("cuda")})
    monkeypatch.setattr(accelerate, "Accelerator", lambda **options: gpu)
    states = torch.ones(3, 5, 7, 11)
    switches = torch.backends.cuda
    before = switches.cudnn_sdp_enabled()
    try:
        launch.launch("no", "float32", 8, deterministic=True)
        assert torch._fused_sdp_choice(states, states, states) == SDPBackend.MATH.value
        assert not switches.cudnn_sdp_enabled() and not switches.mem_efficient_sdp_enabled()
    finally:
        launch.launch("no", "float32", 8, deterministic=False)
        assert torch._fused_sdp_choice(states, states, states) == SDPBackend.FLASH_ATTENTION.value
        assert not switches.cudnn_sdp_enabled() and switches.mem_efficient_sdp_enabled()
        switches.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    "vendor, rounds, asked",
    [("GenuineIntel", False, []), ("AuthenticAMD", False, ["medium"]), ("AuthenticAMD", True, ["medium", "highest"])],
)
def test_products_of_float32(vendor, rounds, asked, monkeypatch):
    """Those of AMD go to oneDNN, unless this CPU then rounds to bfloat16, as the last case makes it look like."""

    def close(product, exact, **tolerance):
        return allclose(product.bfloat16().double() if rounds else product, exact, **tolerance)

    allclose = torch.allclose
    monkeypatch.setattr(torch, "allclose", close)
    cpu = SimpleNamespace(exists=lambda: True, read_text=lambda **options: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(launch, "Path", lambda path: cpu)
    found = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", found.append)
    launch.choose_products()
    assert found == asked


FREED = """
import os, resource
import torch
from common import launch
torch.set_num_threads(1)
launch.keep_freed_memory()
for time in range(30):
    if time == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(3, 5, 7, 11, 13, 17, 79)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""


@pytest.mark.parametrize("told", [{}, {CAPACITY: "7"}], ids=str)
def test_freed_memory_is_used_again(told):
    """77 MB, 20,000 pages of 4 KB: in the end none is new. What the user says of oneDNN's cache stays.

    The first ones may be new: glibc keeps the few bytes before an aligned block for itself, and the rest is too short
    for the next block, until its list of seven such pieces is full."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | told
    done = subprocess.run([sys.executable, "-c", FREED], env=env, check=True, capture_output=True, text=True)
    faults, cache = done.stdout.split()
    assert int(faults) < 20 and cache == told.get(CAPACITY, "64")


def test_onednn_is_told_of_its_cache_before_the_first_product(monkeypatch):
    called = []
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: called.append("memory"))
    monkeypatch.setattr(launch, "choose_products", lambda: called.append("products"))
    launch.launch(mixed_precision="no", dtype="float32", batch_size=3, deterministic=False)
    assert called == ["memory", "products"]


def test_threads(monkeypatch):
    """The flag, else OMP_NUM_THREADS, else the CPUs divided by the processes; at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7), raising=False)
    assert launch.set_threads() == torch.get_num_threads() == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert launch.set_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "11")
    assert launch.set_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.set_threads() == torch.get_num_threads() == 5
    assert launch.set_threads(3) == torch.get_num_threads() == 3


LAUNCHED = """
import os
os.sched_getaffinity = lambda pid: range(14)
import torch
from common.launch import launch, set_threads
launch(mixed_precision=None, dtype="float32", batch_size=2, deterministic=False)
words = ["OMP_NUM_THREADS" in os.environ, set_threads(), set_threads(3)]
if torch.distributed.is_initialized():
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    words += [backend.name(), backend.options._timeout.total_seconds()]
open(f"{os.environ.get('RANK', 0)}.txt", "w").write(" ".join(map(str, words)))
"""
LAUNCHERS = {
    "accelerate launch --cpu": ["True 14 3"],
    "torchrun --nproc_per_node=2": [f"True 7 3 gloo {launch.TIMEOUT.total_seconds()}"] * 2,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, tmp_path):
    """They export OMP_NUM_THREADS: that one does not count, --threads does. NCCL's own timeout is 10 minutes."""
    (tmp_path / "script.py").write_text(LAUNCHED)
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    name, *flags = launcher.split()
    subprocess.run([BIN / name, *flags, "script.py"], check=True, cwd=tmp_path, env=env, timeout=200)
    assert [path.read_text() for path in tmp_path.glob("*.txt")] == LAUNCHERS[launcher]
    assert launch.TIMEOUT.total_seconds() > 3600


def test_threads_before_functions_of_the_user(monkeypatch):
    """`main` runs with --threads from its first line on: a model or data may be computed there."""
    main = closes_run(lambda args: torch.get_num_threads())
    flags = {"seed": 1, "deterministic": False}
    assert main(SimpleNamespace(threads=2, **flags)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(SimpleNamespace(threads=None, **flags)) == 1


def test_an_error_of_the_first_process_is_one_of_all(monkeypatch):
    first = []
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda objects: first.extend(objects) or [*objects, None])
    with pytest.raises(ZeroDivisionError) as raised:
        launch.on_main(SimpleNamespace(is_main_process=True), divmod, 1, 0)
    assert launch.shared_errors == [raised.value]
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda objects: [*first, *objects])
    with pytest.raises(InputError, match="by zero") as raised:
        launch.on_main(SimpleNamespace(is_main_process=False), divmod, 1, 0)
    assert launch.shared_errors == [raised.value]


def test_an_error_of_the_model_is_no_error_of_the_user():
    """Its state is not saved: `say_what_is_kept` asks for shared_errors."""
    for error in FloatingPointError("numpy's"), NotFinite("logits"):
        with pytest.raises(Exception) as raised:
            launch.on_each(None, Mock(side_effect=error))
        assert raised.value is error and (error in launch.shared_errors) != isinstance(error, NotFinite)


def test_autocast_casts_a_weight_once_a_step():
    """It would cast weight and bias anew in each of three forward passes; the gradient stays the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), options=None):
            self.count += function is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad
            return function(*args, **options or {})

    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    batches = torch.randn(3, 2, 5).unbind()
    found = []
    for batches_of_step in (iter(batches), launch.accumulate(SimpleNamespace(**PLAIN), layer, batches)):
        layer.zero_grad()
        with Casts() as casts:
            for batch in batches_of_step:
                with torch.autocast("cpu", torch.bfloat16):
                    output = layer(batch)
                output.float().square().sum().backward()
                assert not torch.is_autocast_enabled("cpu")
        found.append((casts.count, layer.weight.grad.clone()))
    (each, plain), (once, gradient) = found
    assert (each, once) == (6, 2) and gradient.equal(plain)


def test_peak_memory():
    """In MB, what was freed included."""
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    assert launch.peak_memory_mb(torch.device("cpu")) == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("words", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "bad_alloc"])
def test_errors_of_libraries_without_memory(words):
    """Whole runs, and the words of the CPU: test_faults.py."""
    main = closes_run(Mock(side_effect=RuntimeError(f"of a library: {words}")))
    with pytest.raises(InputError, match=f"^out of memory: lower --micro-batch-size or .*\n  of a library: {words}$"):
        main(SimpleNamespace(threads=1, seed=1, deterministic=False))
