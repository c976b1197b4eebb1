"""Two processes with sharded (FSDP2) and with whole weights (DDP): `python -m pytest tests/test_fsdp.py`

accelerate uses its FSDP plugin on GPUs alone. Here two CPU processes are told that they are of that kind, so that
accelerate's own preparation and clipping run, over gloo. A CPU does not show NCCL, its streams, offloading, memory.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from harness import ROOT, launch, torchrun
from helpers import log, same_run, samples
from test_ilql_runs import lengths
from test_models import NAMED, run
from torch.utils._pytree import tree_flatten

from algos import ddpo
from common import identity
from common.cli import from_task
from common.errors import InputError
from common.lm import evaluation

ROLLED = "ppo", "grpo"
# what `accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP` sets
LAUNCH = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
LAUNCH |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


def go(name, model, run_dir, **flags):
    """Five steps (eight of ppo and grpo) in float64, of three rows a process, in micro-batches of two and one."""
    settings = {"dtype": "float64", "attn_implementation": "sdpa", "batch_size": 6, "micro_batch_size": 2}
    settings |= {"max_grad_norm": 0.1, "adam_eps": 1e-5, "keep_checkpoints": 9, "weight_decay": 0.1}
    if name in ROLLED:
        settings |= {"rollout_batch_size": 12, "total_episodes": 24}
    else:
        settings["total_steps"] = 5
    if name != "reward":
        settings |= {"max_new_tokens": 5, "metric": lengths}
    return run(NAMED[name], model, run_dir, **settings | flags)[1]


def ranks(path):
    """Runs the jobs of a file, and writes beside each run directory what was counted: how often weights were gathered
    within each `unsharded`, gradients reduced before each optimizer step, and into how many groups the weights went."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    spec = json.loads(Path(path).read_text())
    seen = {}
    init = Accelerator.__init__
    prepare = Accelerator.prepare
    step = torch.optim.AdamW.step

    def count(name, function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            seen[name] += 1
            return function(*args, **kwargs)

        return counted

    def as_on_gpus(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if spec["sharded"]:
            self.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.state.fsdp_plugin = FullyShardedDataParallelPlugin()
            if self.mixed_precision == "bf16":
                self.state.fsdp_plugin.set_mixed_precision("bf16")

    def watched(self, model, optimizer):
        model, optimizer = prepare(self, model, optimizer)
        if not spec["sharded"]:
            model.register_comm_hook(None, count("reduced", allreduce_hook))
        states = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)}
        seen["groups"] = sum(bool(list(state._fsdp_param_groups)) for state in states.values())
        model.register_forward_hook(typed)
        return model, optimizer

    def typed(module, inputs, output):
        if module.training:
            floating = [x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor) and x.is_floating_point()]
            seen["types"] += [str(x.dtype) for x in floating]

    def stepped(self, *args, **kwargs):
        seen["reduces"].append(seen["reduced"])
        seen["reduced"] = 0
        return step(self, *args, **kwargs)

    @contextlib.contextmanager
    def within(model, unsharded):
        before = seen["gathered"]
        with unsharded(model):
            yield
            assert not any(hasattr(weight, "full_tensor") for weight in model.parameters())
        if spec["sharded"]:
            assert all(hasattr(weight, "full_tensor") for weight in model.parameters())
        seen["gathers"].append(seen["gathered"] - before)

    identity.imported_files = lambda: []  # pytest has loaded other files
    Accelerator.__init__ = as_on_gpus
    Accelerator.prepare = watched
    Accelerator.end_training = lambda accelerator: None  # the next run needs the process group
    torch.optim.AdamW.step = stepped
    fsdp.foreach_all_gather = count("gathered", fsdp.foreach_all_gather)
    fsdp.foreach_reduce = count("reduced", fsdp.foreach_reduce)
    for module in (evaluation, *NAMED.values()):
        if hasattr(module, "unsharded"):
            module.unsharded = functools.partial(within, unsharded=module.unsharded)
    for name, model, run_dir, flags in spec["jobs"]:
        seen |= {"gathered": 0, "reduced": 0, "gathers": [], "reduces": [], "types": []}
        go(name, model, run_dir, **flags)
        seen["types"] = sorted(set(seen["types"]))
        AcceleratorState._reset_state()  # the precision
        if os.environ["RANK"] == "0":
            Path(f"{run_dir}.json").write_text(json.dumps(seen))


def two(folder, jobs, sharded=True):
    """Runs jobs (script, model, run directory, flags) in two processes; returns what was counted, and the output."""
    (folder / "jobs.json").write_text(json.dumps({"sharded": sharded, "jobs": jobs}, default=str))
    env = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    env |= LAUNCH if sharded else {}
    done = launch(torchrun(2), [__file__, "jobs.json"], folder, folder, timeout=400, **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(f"{run_dir}.json").read_text()) for _, _, run_dir, _ in jobs], done.stdout


def flat(mapping):
    """A mapping of JSON with numbers rounded and lists in order."""
    kinds = {float: lambda x: float(f"{x:.8g}"), list: lambda x: sorted(map(str, x))}
    return {key: kinds.get(type(value), lambda x: x)(value) for key, value in mapping.items()}


def assert_equal_runs(one, other, name):
    """Metrics, samples and exported files of two run directories, numbers to 1e-9."""
    same_run(other, one, what=name)
    assert max(record.get("optim/grad_norm", 0) for record in log(one)) > 0.1  # clipped
    files = {path.name for path in (one / "hf_model").iterdir()}
    assert files == {path.name for path in (other / "hf_model").iterdir()}, name
    for file in files:
        paths = one / "hf_model" / file, other / "hf_model" / file
        if file.endswith("config.json"):  # a set in that of an adapter; the scale of a reward is a number
            a, b = (json.loads(path.read_text(), object_hook=flat) for path in paths)
            assert b == a, (name, file)
        elif not file.endswith(".safetensors"):
            assert paths[0].read_bytes() == paths[1].read_bytes(), (name, file)


def compare(tmp_path, model, cases, sharded=True):
    """Runs each case (script, flags) in one process and in two; returns what was counted in those."""
    jobs = [(name, model, tmp_path / f"two-{i}", flags) for i, (name, flags) in enumerate(cases)]
    seen, _ = two(tmp_path, jobs, sharded)
    for i, (name, flags) in enumerate(cases):
        assert_equal_runs(go(name, model, tmp_path / f"one-{i}", **flags), tmp_path / f"two-{i}", (name, flags))
    return seen


@pytest.mark.case(91, "ppo grpo sft reward dpo ilql")
@pytest.mark.parametrize("names", ["ppo", pytest.param("grpo sft reward dpo ilql", marks=pytest.mark.slow)])
def test_shards_equal_one_process(gpt2_dir, tmp_path, names):
    """Of ppo, also with a critic of its own, whose two blocks are sharded, too."""
    cases = [(name, {}) for name in names.split()]
    if names == "ppo":
        cases.append(("ppo", {"value_model": gpt2_dir, "value_lr": 1e-2, "value_warmup": 1}))
    for (name, flags), seen in zip(cases, compare(tmp_path, gpt2_dir, cases), strict=True):
        # two blocks and the rest; where the language model is the whole, what is tied and the positions; the score head
        groups = {"ppo": 3, "ilql": 3, "grpo": 4, "sft": 4, "dpo": 4, "reward": 5}[name]
        if flags:
            groups += 2
        assert seen["groups"] == groups, name
        micro_batches = 1 if name == "sft" else 2  # its rows are one line
        assert seen["reduces"] == [groups * micro_batches] * (8 if name in ROLLED else 5), name


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_rollouts_of_the_user_and_another_reference(gpt2_dir, tiny_dirs, tmp_path, sharded):
    """Every process calls the function of its rows. The blocks of another reference are sharded, too."""
    spec = str(ROOT / "tests/test_rollouts.py:tool")
    cases = [("ppo", {"rollout": spec}), ("grpo", {"rollout": spec, "lora_r": 3, "max_new_tokens": 9})]
    cases.append(("ppo", {"ref_model": tiny_dirs["llama"], "lr": 0.01}))
    compare(tmp_path, gpt2_dir, cases, sharded)
    assert any("[eq]" in row["output"] for row in samples(tmp_path / "two-0"))


@pytest.mark.slow
@pytest.mark.case(94, "ppo grpo sft reward dpo ilql")
@pytest.mark.parametrize("flags", [{"lora_r": 3}, {"num_layers_unfrozen": 1}], ids=["lora", "frozen"])
def test_shards_with_frozen_weights(gpt2_dir, tmp_path, flags):
    seen = compare(tmp_path, gpt2_dir, [(name, flags) for name in NAMED])
    for found in seen:
        assert 0 < min(found["reduces"])
        assert max(found["reduces"]) <= 2 * found["groups"]


@pytest.mark.case(91, "ppo dpo")
def test_shards_in_bfloat16(gpt2_dir, tmp_path):
    """What the loss is made of is float32. Policy and reference are equal at first: the KL is 0, no pair is preferred.
    Checkpoints know the rest as it was in float32, also if the reference has scored the pairs before."""
    flags = {"mixed_precision": "bf16", "dtype": "float32", "num_layers_unfrozen": 1}
    jobs = [("ppo", gpt2_dir, tmp_path / "ppo", flags)]
    jobs += [("dpo", gpt2_dir, tmp_path / "dpo", flags | {"precompute_ref": False})]
    jobs += [("dpo", gpt2_dir, tmp_path / "scored", flags | {"metric": None})]
    for (name, *_), seen in zip(jobs, two(tmp_path, jobs)[0], strict=True):
        assert seen["types"] == ["torch.float32"], name
    live, scored = (tmp_path / name / "checkpoints/step_00000005" for name in ("dpo", "scored"))
    sums = [json.loads((path / "state.json").read_text())["frozen"] for path in (live, scored)]
    assert sums[0] == sums[1] != 0
    assert len({frozenset(safetensors.torch.load_file(path / "model.safetensors")) for path in (live, scored)}) == 1
    first = next(record for record in log(tmp_path / "ppo") if record["step"] == 4)
    assert first["objective/kl"] == 0 and 0.5 < first["objective/entropy"]
    first = next(record for record in log(tmp_path / "dpo") if record["step"] == 1)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert first["rewards/accuracies"] == 0.5 and first["logps/chosen"] * 64 % 1


@pytest.mark.slow
@pytest.mark.case(90, "ppo grpo sft reward dpo ilql")
@pytest.mark.parametrize("flags", [{}, {"num_layers_unfrozen": 1}], ids=["all", "frozen"])
def test_whole_weights_reduce_once_a_step(gpt2_dir, tmp_path, flags):
    """The gradients of a tiny model are one bucket: it is reduced for the last micro-batch of a step alone. Frozen
    blocks, which ppo does not even run, are not waited for."""
    cases = [(name, flags) for name in NAMED]
    if flags:  # heads alone are trained; a value head apart; losses of weight zero
        cases += [(name, {"num_layers_unfrozen": 0}) for name in ("ppo", "ilql", "reward")]
        cases += [("ppo", {"detach_value_trunk": True, "vf_coef": 0.0}), ("ilql", {"cql_scale": 0.0, "two_qs": False})]
    for (name, _), seen in zip(cases, compare(tmp_path, gpt2_dir, cases, sharded=False), strict=True):
        assert seen["reduces"] == [1] * (8 if name in ROLLED else 5), name


@pytest.mark.slow
@pytest.mark.case(92, "ppo grpo sft reward dpo ilql")
def test_checkpoints_across_layouts(gpt2_dir, tmp_path, capsys, monkeypatch):
    """Written by two processes that shard and continued by one, and the other way round."""
    cases = [("ppo", {"num_layers_unfrozen": 1}), ("ppo", {}), ("sft", {"lora_r": 3}), ("sft", {}), ("reward", {})]
    cases.append(("ppo", {"value_model": gpt2_dir, "lora_r": 3}))
    cases += [("dpo", {}), ("dpo", {"num_layers_unfrozen": 1}), ("ilql", {}), ("ilql", {"num_layers_unfrozen": 1})]
    cases += [("grpo", {})]

    def cut(kind, i):
        """A copy of a run directory as it was after four steps of ppo and grpo, else three."""
        folder = shutil.copytree(tmp_path / f"{kind}-{i}", tmp_path / f"after-{kind}-{i}")
        shutil.rmtree(folder / "hf_model")
        kept = "step_00000004" if cases[i][0] in ROLLED else "step_00000003"
        for path in (folder / "checkpoints").iterdir():
            if path.name > kept:
                shutil.rmtree(path)
        assert (folder / "checkpoints" / kept).exists()
        return folder

    monkeypatch.setattr(identity, "imported_files", lambda: [])
    compare(tmp_path, gpt2_dir, cases)
    for i, (name, flags) in enumerate(cases):
        files = [tmp_path / f"{kind}-{i}/checkpoints/step_00000004/model.safetensors" for kind in ("one", "two")]
        one, other = map(safetensors.torch.load_file, files)
        assert one.keys() == other.keys(), (name, flags)
    _, output = two(tmp_path, [(name, gpt2_dir, cut("one", i), flags) for i, (name, flags) in enumerate(cases)])
    assert output.count("from step 3") == 7 and output.count("from step 4") == 4
    for i, (name, flags) in enumerate(cases):
        assert_equal_runs(tmp_path / f"one-{i}", tmp_path / f"after-one-{i}", (name, flags))
        capsys.readouterr()
        go(name, gpt2_dir, cut("two", i), **flags)
        assert f"from step {4 if name in ROLLED else 3}" in capsys.readouterr().out
        assert_equal_runs(tmp_path / f"one-{i}", tmp_path / f"after-two-{i}", (name, flags))


@pytest.mark.slow
@pytest.mark.case(93, "ppo grpo sft dpo ilql")
def test_sampling_gathers_once(gpt2_dir, tmp_path):
    """As many gathers as groups, for every evaluation and rollout, however long the responses are. Rollouts also gather
    the reference's four groups in each of three forward passes."""
    expected = {"ppo": [3, 15, 3], "grpo": [4, 16, 4], "sft": [4, 4], "dpo": [4, 4, 4], "ilql": [3, 3]}
    cases = list(itertools.product(("ppo", "grpo", "sft", "dpo", "ilql"), (2, 7)))
    jobs = []
    for name, length in cases:
        flags = {"eval_every": 1, "max_new_tokens": length}
        if name in ROLLED:
            flags |= {"total_episodes": 12, "ppo_epochs": 1}
        else:
            flags["total_steps"] = 1
        jobs.append((name, gpt2_dir, tmp_path / f"{name}{length}", flags))
    for (name, length), seen in zip(cases, two(tmp_path, jobs)[0], strict=True):
        assert max(len(sample["output"]) for sample in samples(tmp_path / f"{name}{length}")) == length
        assert seen["gathers"] == expected[name], (name, length)


def test_shards_are_refused_where_they_cannot_be(gpt2_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    with pytest.raises(InputError, match="FSDP: set fsdp_version to 2; ddpo.py needs whole"):
        go("sft", gpt2_dir, tmp_path / "run")
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    with pytest.raises(InputError, match="FSDP: .*ddpo.py needs whole weights, so launch it without FSDP"):
        ddpo.main(from_task(ddpo.Args, ddpo.TASK, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    import test_fsdp  # this file, under the name that it has in the other process

    test_fsdp.ranks(sys.argv[1])
