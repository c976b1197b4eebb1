"""LoRA adapters (arXiv 2106.09685): peft's layers without its wrapper, which renames weights and lacks methods."""

import contextlib
import os

import torch
from torch import nn

from common.errors import InputError
from common.lm.structure import routers
from common.seeding import rng


def train_adapters(lm, args, heads=()):
    """Trains only LoRA adapters, if there are any: new ones, which add zero at first, or those of --model. They are at
    least float32, since bfloat16 would lose small updates. heads: modules that are trained and saved with them."""
    is_loaded = getattr(lm, "_hf_peft_config_loaded", False)
    if is_loaded and (args.lora_r or args.num_layers_unfrozen != -1):
        raise InputError("--model is already a LoRA adapter: leave out --lora-r and --num-layers-unfrozen")
    if not (args.lora_r or is_loaded):
        if args.load_in_4bit or getattr(lm, "is_quantized", False):
            raise InputError("quantised weights (--load-in-4bit, or of --model) cannot be trained: add --lora-r")
        return
    if args.lora_r:
        from peft import LoraConfig

        targets = list(args.lora_targets)
        names = [f".{name}" for name, _ in lm.named_modules()]
        if targets == ["all-linear"]:
            targets = "all-linear"
        elif missing := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
            raise InputError(f"--lora-targets: no module of --model is named {missing[0]}")  # peft would skip it
        task = "SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM"
        options = {"r": args.lora_r, "lora_alpha": args.lora_alpha or args.lora_r, "revision": args.revision}
        options |= {"exclude_modules": [*routers(lm)] or None, "modules_to_save": list(heads) or None}
        if os.path.isdir(lm.name_or_path):  # so that it is found from any directory
            lm.name_or_path = os.path.realpath(lm.name_or_path)
        lm.add_adapter(LoraConfig(target_modules=targets, task_type="SEQ_CLS" if heads else task, **options))
    for name, weight in lm.named_parameters():
        weight.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if args.lora_r and ".lora_A." in name:  # torch's default, but keyed: the same on every process
            bound = weight.shape[1] ** -0.5
            values = rng(args.seed, f"lora {name}").uniform(-bound, bound, tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(values))


@contextlib.contextmanager
def for_sampling(lm):
    """Inside, adapters are added to a copy of their base weight, so that a tied layer does not change, and autocast
    keeps the casts of frozen weights: both once and not for every token. Afterwards all is bitwise as before. Adapters
    of 4-bit or 16-bit weights stay apart, since sums would be rounded. Under autocast sums have its type."""
    kind = lm.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with contextlib.ExitStack() as stack:
        for weight in lm.parameters():
            if not weight.requires_grad and weight.is_floating_point():
                stack.callback(weight.requires_grad_, False)
                weight.requires_grad_(True)  # autocast keeps only the casts of such weights
        for layer in filter(lambda module: hasattr(module, "get_base_layer"), lm.modules()):
            base = layer.get_base_layer()
            weight = getattr(base, "weight", None)
            if weight is None or weight.dtype not in (torch.float32, torch.float64):
                continue
            stack.callback(setattr, base, "weight", weight)
            stack.callback(layer.merged_adapters.clear)
            base.weight = nn.Parameter(weight.data)
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                layer.merge(safe_merge=True)  # into new memory
            if dtype is not None and not isinstance(base, nn.Embedding):
                base.weight.data = base.weight.data.to(dtype)
        yield
