"""python -m pytest tests/test_scaling.py

The paper model of scaling: its formulas against hand numbers, and its bytes against those that processes send.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3Model

from algos import dpo, grpo, ilql, ppo, reward, sft
from benchmarks import check

ROOT = Path(__file__).resolve().parents[1]
PREDICT = check.scaling()
moved, predict, A = PREDICT["moved"], PREDICT["predict"], PREDICT["A"]
RANKS, SIZES = 3, (210, 309)  # SIZES: of layers that three ranks share out without padding
STRATEGIES = PREDICT["STRATEGIES"]


def worker(rank, port):
    """Prints the bytes that this process hands to write(2), sockets included, for optimizer steps of 1 and of 3
    micro-batches, under DDP as the scripts use it, and under FSDP2 as accelerate sets it up on GPUs."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    accelerator, (a, b) = Accelerator(cpu=True), SIZES
    blocks = [nn.Sequential(nn.Linear(a, b, bias=False), nn.Linear(b, a, bias=False)) for _ in range(3)]
    ddp, x = accelerator.prepare(nn.Sequential(*blocks)), torch.ones(5, a)
    sharded = nn.Sequential(*[nn.Sequential(nn.Linear(a, b, bias=False), nn.Linear(b, a, bias=False)) for _ in "abc"])
    for block in sharded:
        fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))

    def ddp_step(micro_batches):
        for last in [False] * (micro_batches - 1) + [True]:
            if last:
                accelerator.backward(ddp(x).sum())
            else:
                with accelerator.no_sync(ddp):
                    accelerator.backward(ddp(x).sum())

    def fsdp_step(micro_batches):
        for last in [False] * (micro_batches - 1) + [True]:
            sharded.set_requires_gradient_sync(last)  # what accelerate's no_sync calls
            sharded(x).sum().backward()

    def written():
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    found = []
    for step in (ddp_step, fsdp_step):
        for micro_batches in (1, 3):
            step(micro_batches)  # the first time sets things up
            accelerator.wait_for_everyone()
            before = written()
            step(micro_batches)
            accelerator.wait_for_everyone()
            found.append(written() - before)
    if rank == 0:
        print(json.dumps(found), flush=True)


@pytest.mark.slow
def test_bytes_of_a_step():
    """Of the gradients once a step, for any number of micro-batches, and of the weights twice a micro-batch. gloo has
    no reduce-scatter: it all-reduces, which costs twice that."""
    command = [sys.executable, __file__, str(20000 + os.getpid() % 20000)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    size = 4 * 6 * SIZES[0] * SIZES[1]  # float32
    expected = [moved("DDP", RANKS, size, None, None, None) for _ in range(2)]
    expected += [moved("FSDP2", RANKS, None, size, 2 * size, 2 * micro_batches) for micro_batches in (1, 3)]
    assert json.loads(done.stdout) == pytest.approx(expected, rel=0.01)


def test_bytes_by_hand():
    assert moved("DDP", 8, 4e9, None, None, None) == 7e9
    assert moved("FSDP2", 8, None, 2e9, 2e9, 6) == 7 / 8 * 14e9
    assert moved("DDP", 1, 4e9, None, None, None) == moved("FSDP2", 1, None, 2e9, 2e9, 6) == 0


def test_step_by_hand():
    """SFT of 0.6B: 16 rows of 2048 tokens at 6 N, without links on one GPU."""
    one = predict("sft", "0.6B", "DDP", 1, A.fast)
    assert one["update_s"] == pytest.approx(6 * 0.6e9 * 16 * 2048 / (989e12 * 0.4))
    assert one["exposed_s"] == one["barrier_s"] == one["moved_gb"] == 0 and one["save_gb"] == pytest.approx(7.2)
    slow = predict("sft", "0.6B", "DDP", 64, 12.5e9)  # all-reduced, less what the last of 4 backward passes hides
    hops = 2 * math.ceil(2.4e9 / (25 * 2**20)) + 5
    links = 2 * 63 / 64 * 2.4e9 / (12.5e9 * 0.7) + hops * 63 * 5e-6
    assert slow["exposed_s"] == pytest.approx(links - 0.8 * one["update_s"] / 6)
    assert slow["moved_gb"] == pytest.approx(2 * 63 / 64 * 2.4)


def test_wait_for_the_longest():
    """Against a simulation of ranks with 16 rows each, of lengths with deviation 1/2."""
    draw = np.random.default_rng(0).gamma(4, 1 / 4, (4000, 64, 16)).mean(-1)
    for n in (8, 64):
        one = predict("sft", "8B", "FSDP2", n, A.fast)
        assert 1 + one["barrier_s"] / one["update_s"] == pytest.approx(draw[:, :n].max(1).mean(), rel=0.02)


def test_efficiencies():
    """Fall with the number of GPUs and on the slow network; gathering for every token is slower than once a rollout."""
    rows = {}
    for row in PREDICT["predictions"]():
        rows.setdefault((row["algo"], row["model"], row["strategy"]), []).append(float(row["efficiency"]))
    for (algo, model, strategy), found in rows.items():
        assert found[0] == 1 and found == sorted(found, reverse=True) and found[-1] > 0
        if strategy == STRATEGIES[2]:
            assert all(np.array(found[1:]) < rows[algo, model, "FSDP2"][1:])


def test_size_of_the_unet():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    assert PREDICT["MODELS"]["SD 1.5"][0] == pytest.approx(sum(w.numel() for w in unet.parameters()), rel=0.01)


def saved_bytes(layers, tokens):
    """Bytes that a forward pass of Qwen3-0.6B's layers keeps for the backward pass, under bf16 autocast, without the
    output layer."""
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=11,
    )  # fmt: skip
    model = Qwen3Model(config)
    kept = {weight.untyped_storage().data_ptr(): 0 for weight in model.parameters()}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        alive.append(tensor)  # so that no other one gets its memory
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, tokens, dtype=torch.long))
    return sum(kept.values())


def test_saved_activations():
    """The bytes a token and layer, from what a second layer and 64 more tokens add."""
    a_layer = [saved_bytes(2, tokens) - saved_bytes(1, tokens) for tokens in (64, 128)]
    assert (a_layer[1] - a_layer[0]) / 64 == pytest.approx(PREDICT["SAVED"], rel=0.02)


def test_default_sizes_fit():
    """--micro-batch-size and --decode-batch-size as they are in the scripts. 128 and 1024 would not fit. grpo needs
    what ppo does, but for the value head."""
    for script in (sft, reward, dpo, ppo, grpo, ilql):
        fields = {field.name: field.default for field in dataclasses.fields(script.Args)}
        micro_batch = fields["micro_batch_size"]
        decode_batch = fields.get("decode_batch_size", 1)
        name = "ppo" if script is grpo else Path(script.__file__).stem
        assert micro_batch == PREDICT["MICRO_BATCH"]
        assert script is reward or decode_batch == PREDICT["DECODE_BATCH"]
        assert PREDICT["default_memory"](name, micro_batch, decode_batch)["most"] < PREDICT["GPU"]
        assert PREDICT["default_memory"](name, 128, decode_batch)["most"] > PREDICT["GPU"]
        assert script is reward or PREDICT["default_memory"](name, micro_batch, 1024)["most"] > PREDICT["GPU"]


def test_default_memory_by_hand():
    """ppo: weights, moments and reference of 0.6 G weights, a value head of 2 x 1024^2; rows of 1024 tokens."""
    sizes = PREDICT["default_memory"]("ppo")
    head = 2 * 1024**2
    assert sizes["stays"] == pytest.approx(16 * 0.6e9 + 12 * head)
    assert sizes["update"] - sizes["stays"] == pytest.approx(6 * (0.6e9 + head) + 8 * 1024 * 28 * 82e3 + 256e6)
    cache = 256 * 1024 * 2 * 28 * 8 * 128 * 2  # keys and values in bfloat16
    logits = 256 * 151936 * 36
    assert sizes["decoding adds"] == pytest.approx(cache + logits + 2 * (0.6e9 + head))


def test_check_sees_a_changed_prediction(monkeypatch):
    monkeypatch.setattr(check, "CLAIMS", {})
    monkeypatch.setattr(check, "BLOCKS", [block for block in check.BLOCKS if "scaling" in block[0]])
    assert check.verify() == []
    rows = check.stored_predictions()
    rows[1]["efficiency"] = "0.99"
    monkeypatch.setattr(check, "stored_predictions", lambda: rows)
    assert len(check.verify()) == 2


if __name__ == "__main__":  # one process loads the libraries, the ranks are its children
    children = []
    for number in range(RANKS):
        if not (child := os.fork()):
            worker(number, sys.argv[1])
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
