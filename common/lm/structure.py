"""What a model allows (padding, packing, positions, blocks to freeze), found by trying it, without lists of names."""

import math
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from common.errors import InputError
from common.seeding import rng


class Seq2Seq:
    """Lets an encoder-decoder be called as a decoder is: input_ids are a left-padded query and a response, the last
    logits_to_keep - 1 tokens. The encoder reads the query moved to the left, as some count padding as positions."""

    def forward(self, *inputs, **options):
        if "logits_to_keep" not in options:
            return super().forward(*inputs, **options)
        ids = options["input_ids"]
        cache = options.get("past_key_values")
        width = ids.shape[1] + 1 - options["logits_to_keep"] if cache is None else cache.query_width
        mask = options.get("attention_mask", torch.ones_like(ids))[:, :width]
        to_left = (mask == 0).byte().argsort(dim=1, stable=True)
        mask = mask.gather(1, to_left)
        if cache is None:
            states = self.get_encoder()(input_ids=ids[:, :width].gather(1, to_left), attention_mask=mask)[0]
            start = torch.full_like(ids[:, :1], self.config.decoder_start_token_id)
            ids = torch.cat([start, ids[:, width:]], 1)
        else:  # the cache holds what the decoder has read so far
            states = cache.encoded.expand(len(ids), -1, -1)
        inputs = {"encoder_outputs": (states,), "attention_mask": mask, "decoder_input_ids": ids}
        output = super().forward(**inputs, past_key_values=cache, use_cache=options["use_cache"])
        if cache is None and options["use_cache"]:
            output.past_key_values.query_width = width
            output.past_key_values.encoded = states[:1]
        return output


def as_decoder(lm):
    """The model as the scripts call it: an encoder-decoder as a Seq2Seq, with plain_output (see `token_logprobs`)."""
    if lm.config.is_encoder_decoder:
        if not isinstance(lm, Seq2Seq):
            lm.__class__ = type(type(lm).__name__, (Seq2Seq, type(lm)), {})
    elif reads_padding(lm):
        problem = "its layers read the padding before a row, so rows of different lengths cannot be sampled"
        raise InputError(f"--model {lm.name_or_path}: {problem}")
    elif leaks(lm, SECOND, ~SECOND, position_ids=torch.arange(9)):
        problem = "its tokens read those behind them, as in an encoder: give a decoder"
        raise InputError(f"--model {lm.name_or_path}: {problem}")
    lm.plain_output = has_plain_output(lm)
    return lm


def max_positions(lm):
    """The longest row that the model's configuration allows, in tokens; inf where it sets no limit."""
    config = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length, rows depend on the longest one of their batch
        return rope["original_max_position_embeddings"]
    limit = getattr(config, "max_position_embeddings", None)
    for module in lm.modules():
        if hasattr(module, "position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1  # of RoBERTa and others, whose positions begin behind that of padding
    return limit if limit and limit > 0 else math.inf  # XLNet says -1


def end_tokens(lm):
    """Ids of the tokens that end a response: instruction-tuned models end turns and documents differently."""
    ends = lm.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]


def blocks(lm):
    """The decoder's transformer blocks: the longest ModuleList that is not inside another one (as experts are)."""
    if lm.config.is_encoder_decoder:
        lm = lm.get_decoder()
    lists = [(name.split("."), module) for name, module in lm.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [module for path, module in lists if not any(map(str.isdigit, path))]
    return max(outermost, key=len)


def freeze(lm, num_layers_unfrozen):
    """Leaves only the top blocks and the norm after them trainable (0: none; -1: all), and never routers of experts."""
    if num_layers_unfrozen >= 0:
        lm.requires_grad_(False)
    if num_layers_unfrozen > 0:
        layers = blocks(lm)
        layers[-num_layers_unfrozen:].requires_grad_(True)
        ran = []
        with register_module_forward_pre_hook(lambda module, _: ran.append(module)):
            one_token(lm)
        for module in ran[ran.index(layers[-1]) :]:
            if module is not lm.get_output_embeddings():
                for weight in module.parameters(recurse=False):
                    weight.requires_grad_(True)
    for router in routers(lm).values():
        router.requires_grad_(False)
    for weight in lm.parameters():
        if weight.requires_grad and weight.itemsize < 4:  # measured: 15 % of the weights change in 300 steps of 1e-5
            problem = "most updates of such weights would be lost to rounding"
            raise InputError(f"--dtype bfloat16: {problem}: use --mixed-precision bf16 instead, or --lora-r")


def routers(lm):
    """{name: module} of the routers of a mixture of experts, which choose the experts of tokens."""
    found = {}
    for name, module in lm.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "router" or (last == "gate" and hasattr(lm.get_submodule(parent), "experts")):
            found[name] = module
    return found


def draw_layers(head, seed, *stream):
    """Draws the linear layers of a new head: torch's default, but keyed by the seed, stream and number of a weight."""
    for number, weight in enumerate(head.parameters()):
        if weight.ndim == 2:
            bound = weight.shape[1] ** -0.5  # also of its bias, which comes next
        drawn = rng(seed, *stream, number).uniform(-bound, bound, weight.shape)
        weight.data.copy_(torch.from_numpy(drawn))


SECOND = torch.arange(9) >= 4  # which of nine tokens belong to the second of two rows


@torch.no_grad()
def has_plain_output(lm):
    """Whether the logits are the output layer's own. Cohere, Granite and Gemma 2 scale or cap them."""
    mark = torch.zeros(1, 1, lm.get_output_embeddings().weight.shape[0], device=lm.device)
    with forward_replaced(lm.get_output_embeddings(), lambda layer, states: mark):
        return one_token(lm).logits is mark


def one_token(lm):
    ids = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.device.type == "cuda"):  # for flash attention
        return lm(input_ids=ids, use_cache=False, logits_to_keep=1)


def reads_padding(lm):
    """Whether masked padding on the left of a row changes its result."""
    positions = (torch.arange(9) - 4).clamp(min=0)
    return leaks(lm, ~SECOND, SECOND, attention_mask=SECOND.long(), position_ids=positions)


def can_pack(lm, packing, say):
    """Whether several rows may share a line: --packing, and a model that keeps apart what begins at position 0."""
    if not packing or lm.config.is_encoder_decoder:
        return False
    is_flash = "flash" in str(lm.config._attn_implementation)  # which keeps rows apart only in a single line
    if is_flash or leaks(lm, ~SECOND, SECOND, position_ids=torch.tensor([*range(4), *range(5)])):
        say("--packing is off: its layers carry over from one row into the next")
        return False
    return True


def leaks(lm, sources, readers, **inputs):
    """Whether lm's output at readers has a gradient at the embeddings of sources, (T,) bool. inputs: tensors (T,)."""
    embeddings = []

    def embed(layer, ids):
        embeddings.append(layer(ids).detach().requires_grad_())
        return embeddings[0]

    inputs["input_ids"] = torch.arange(len(sources))
    inputs = {name: x[None].to(lm.device) for name, x in inputs.items()}
    autocast = torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.device.type == "cuda")  # as in `one_token`
    with forward_replaced(lm.get_input_embeddings(), embed), torch.enable_grad(), autocast:
        states = lm.base_model(**inputs, use_cache=False)[0]  # (1, T, H)
    if embeddings[0].shape[:2] != states.shape[:2]:  # a model that arranges rows or positions in its own way
        return True
    directions = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    directions[:, ~readers] = 0
    (gradient,) = torch.autograd.grad(states, embeddings[0], directions)  # (1, T, H)
    return bool(gradient[0, sources].abs().amax() > 0)  # nan, of eager attention in float64, is found while sampling


def forward_replaced(module, compute):
    """A context in which the module returns compute(its own forward, states)."""
    forward = module.forward
    return patch.object(module, "forward", lambda states: compute(forward, states))
