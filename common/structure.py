"""What the architecture of a decoder allows: padding, rows packed into a line.

Rows are apart where the gradient of one with respect to the embeddings of another is exactly zero, in any type and for
any weights: a few tokens tell, without a list of architectures. `*_problem` says in words what is in the way, or None.
"""

import torch

MASKED = ("full_attention", "sliding_attention", "chunked_attention")  # config.layer_types whose mask decides alone


def padding_problem(lm):
    """Why a row is not as if alone when padding on its left is masked."""
    row = torch.arange(9) >= 4
    positions = (row.long().cumsum(0) - 1).clamp(min=0)
    if leaks(lm, ~row, row, attention_mask=row.long(), position_ids=positions):
        return f"its {kinds_of_layers(lm)} read the padding before a row"
    return None


def packing_problem(lm):
    """Why rows in one line, told apart by positions that begin anew, are not as if alone."""
    if "flash" in str(lm.config._attn_implementation):
        return "flash attention reads such positions where there is one line alone"
    first = torch.arange(9) < 4
    positions = torch.tensor([*range(4), *range(5)])
    if leaks(lm, first, ~first, position_ids=positions):
        return f"its {kinds_of_layers(lm)} read on from one row into the next"
    return None


def leaks(lm, sources, readers, **inputs):
    """Whether what lm computes at readers depends on the embeddings at sources, (T,) bool. inputs: tensors (T,)."""
    embeddings = []

    def replace(module, inputs, output):
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    inputs["input_ids"] = torch.arange(len(sources))
    inputs = {name: x[None].to(lm.device) for name, x in inputs.items()}
    hook = lm.get_input_embeddings().register_forward_hook(replace)
    try:
        with torch.enable_grad(), autocast_on_gpu(lm):
            states = lm.base_model(**inputs, use_cache=False)[0]  # (1, T, H)
    finally:
        hook.remove()
    if embeddings[0].shape[:2] != states.shape[:2]:  # of a model with an order of its own
        return True
    directions = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    directions[:, ~readers] = 0
    (gradient,) = torch.autograd.grad(states, embeddings[0], directions)  # (1, T, H)
    return bool(gradient[0, sources].abs().amax() > 0)  # nan, of eager attention in float64, is found while sampling


def autocast_on_gpu(lm):
    """Flash attention has no float32."""
    return torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.device.type == "cuda")


def kinds_of_layers(lm):
    """In words: those that no mask keeps apart, if there are any."""
    kinds = getattr(lm.config.get_text_config(), "layer_types", None) or []
    unmasked = sorted({kind for kind in kinds if kind not in MASKED})
    return " ".join([*unmasked, "layers"])


def routers(lm):
    """{name: module} of what chooses the experts of tokens, in a mixture of experts: beside its experts."""
    found = {}
    for name, module in lm.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "router" or (last == "gate" and hasattr(lm.get_submodule(parent), "experts")):
            found[name] = module
    return found
