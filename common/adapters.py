"""LoRA adapters: inserted into a model, trained, and added to its weights for sampling. Source: arXiv 2106.09685.

peft's layers are inserted into the model, which keeps its class. peft's own wrapper is not used: it has other weight
names, and lacks the attention, blocks and export of a transformers model.
"""

import contextlib
import os

import torch

from common.cli import InputError
from common.forward import routers
from common.seeding import rng


def train_adapters(lm, args, heads=()):
    """Trains only LoRA adapters, if there are any: new ones at --lora-targets, which change nothing before the first
    update (B is zero), or those of --model. heads: modules trained and saved with them. Adapters are at least float32,
    because small updates would be lost in bfloat16."""
    is_loaded = getattr(lm, "_hf_peft_config_loaded", False)
    if is_loaded and (args.lora_r or args.num_layers_unfrozen != -1):
        raise InputError("--model is already a LoRA adapter: leave out --lora-r and --num-layers-unfrozen")
    if args.load_in_4bit and not (args.lora_r or is_loaded):
        raise InputError("--load-in-4bit: 4-bit weights cannot be trained: add --lora-r")
    if args.load_in_4bit and not getattr(lm, "is_loaded_in_4bit", False):
        raise InputError("--load-in-4bit: --model is an object: load it in 4 bits yourself")
    if args.lora_r:
        add_adapters(lm, args, heads)
    elif not is_loaded:
        return
    for name, weight in lm.named_parameters():
        weight.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if args.lora_r and ".lora_A." in name:  # torch's default, but keyed: the same on every process
            bound = weight.shape[1] ** -0.5
            values = rng(args.seed, f"lora {name}").uniform(-bound, bound, tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(values))


def add_adapters(lm, args, heads):
    """Inserts new adapters into lm. InputError for a target that it lacks, which peft would skip if others exist."""
    from peft import LoraConfig

    task = "SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM"
    targets = list(args.lora_targets)
    if targets == ["all-linear"]:
        targets = "all-linear"
    names = [f".{name}" for name, _ in lm.named_modules()]
    for target in args.lora_targets:
        if targets != "all-linear" and not any(name.endswith(f".{target}") for name in names):
            raise InputError(f"--lora-targets: no module of --model is named {target}")
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha or args.lora_r,
        target_modules=targets,
        exclude_modules=[*routers(lm)] or None,
        modules_to_save=list(heads) or None,
        task_type="SEQ_CLS" if heads else task,
        revision=args.revision,
    )
    if not lm.name_or_path:
        raise InputError("--model is an object without name_or_path, by which adapters find their base: set it")
    if os.path.isdir(lm.name_or_path):  # so that it is found from any directory
        lm.name_or_path = os.path.realpath(lm.name_or_path)
    try:
        lm.add_adapter(config)
    except ValueError as error:
        raise InputError(f"--lora-targets {' '.join(args.lora_targets)}: {error}") from None


@contextlib.contextmanager
def for_sampling(lm, dtype=None):
    """Inside, adapters are added to a copy of their base weight, so that a tied layer does not change, and autocast
    keeps the casts of frozen weights; otherwise both would be computed for every token. Afterwards weights and flags
    are bitwise what they were. Adapters of 4-bit or 16-bit weights, which FSDP2 may gather, stay separate, since a sum
    would be rounded to that type. dtype: the autocast type, in which sums are kept."""
    bases = []
    frozen = [weight for weight in lm.parameters() if not weight.requires_grad and weight.is_floating_point()]
    try:
        for weight in frozen:
            weight.requires_grad_(True)  # autocast keeps only the casts of such weights
        for layer in lm.modules():
            base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None
            weight = getattr(base, "weight", None)
            if weight is None or weight.dtype not in (torch.float32, torch.float64):
                continue
            bases.append((layer, base, weight))
            base.weight = torch.nn.Parameter(base.weight.data)
            with torch.no_grad():
                layer.merge(safe_merge=True)  # into new memory
            if dtype is not None and not isinstance(base, torch.nn.Embedding):
                base.weight.data = base.weight.data.to(dtype)
        yield
    finally:
        for layer, base, weight in bases:
            layer.merged_adapters.clear()
            base.weight = weight
        for weight in frozen:
            weight.requires_grad_(False)
