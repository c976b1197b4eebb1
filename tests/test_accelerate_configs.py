"""The launcher's files for GPUs, as far as a CPU can tell: `python -m pytest tests/test_accelerate_configs.py`"""

import pytest
from accelerate import DistributedType
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from harness import ROOT

FILES = {  # name: kind, processes, machines
    "gpu_1": (DistributedType.NO, 1, 1),
    "gpu_8_ddp": (DistributedType.MULTI_GPU, 8, 1),
    "gpu_8_fsdp2": (DistributedType.FSDP, 8, 1),
    "gpu_64_fsdp2": (DistributedType.FSDP, 64, 8),
}
SHARDS = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False, "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}  # fmt: skip
FOLDER = ROOT / "benchmarks/accelerate"
assert {path.stem for path in FOLDER.iterdir()} == set(FILES)


def launched(path, *flags):
    """(args, environment) of `accelerate launch --config_file path ...`, without the launch."""
    command = ["--config_file", str(path), *flags, "algos/ppo.py", "--lr", "1"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(command))
    if args.multi_gpu or args.use_fsdp:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_and_launches(name, monkeypatch):
    """Every key of fsdp_config is a flag of the launcher, which would ignore others without a word."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    path = FOLDER / f"{name}.yaml"
    kind, processes, machines = FILES[name]
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes, config.num_machines) == FILES[name]
    assert config.mixed_precision == "bf16" and not config.use_cpu and not config.deepspeed_config
    assert "# Not run by this project" in path.read_text()
    flags = ["--machine_rank", "3", "--main_process_ip", "10.1.2.3"] if machines > 1 else []
    args, env = launched(path, *flags)
    assert set(config.fsdp_config) <= set(vars(args))
    assert args.training_script_args == ["--lr", "1"] and env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (env.get("ACCELERATE_USE_FSDP") == "true") == (kind == DistributedType.FSDP)
    assert config.fsdp_config == (SHARDS if kind == DistributedType.FSDP else {})
    if processes > 1:
        assert args.nproc_per_node == "8" and not env.get("ACCELERATE_USE_CPU")
    if machines > 1:
        assert (args.nnodes, args.node_rank, args.rdzv_endpoint) == ("8", 3, "10.1.2.3:29500")
