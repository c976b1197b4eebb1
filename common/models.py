"""Loads pretrained models: weights and tokenizers, 4 bits, frozen blocks, references, encoder-decoders.

Every model is one that transformers finds by its configuration, without a branch for any architecture. It keeps its
class. Adapters: common/adapters.py; classifiers: common/classifiers.py.
"""

import contextlib
import copy
import functools
import json
import re
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from common.adapters import train_adapters
from common.cli import InputError
from common.forward import has_plain_output, one_token, padding_problem, routers
from common.functions import spec_path
from common.report import screen
from common.seeding import rng


def load_pretrained(auto_class, args, path, flag, **keywords):
    """(model, tokenizer, names of weights missing from the files), loaded by the transformers class named auto_class.

    path: a directory, a hub id, a LoRA adapter in one of these, or a model. All weights are finite and dropout is off.
    A language model has no missing weights. flag names the path in errors; --revision is only for --model, since other
    flags name other repositories. keywords go to from_pretrained. Raises InputError.
    """
    import transformers

    quiet_libraries()
    screen.show(f"loading {flag}")
    if isinstance(path, str | Path):
        path = str(spec_path(str(path)) or path)
    revision = args.revision if flag == "--model" else None
    dtype = getattr(torch, args.dtype)
    keywords |= {"dtype": dtype, "attn_implementation": args.attn_implementation}
    keywords["trust_remote_code"] = args.trust_remote_code
    if args.load_in_4bit:  # NF4, arXiv 2305.14314
        compute = torch.bfloat16 if args.mixed_precision == "bf16" else dtype
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
        keywords["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    base = adapter_base(path, revision)
    with loading("--tokenizer" if args.tokenizer else flag, args.tokenizer or path):
        tokenizer = load_tokenizer(args, path, base, revision)
    if options := args.template_options:
        options = dict(option.split("=", 1) for option in options)
        try:
            options = {name: yaml.safe_load(text) for name, text in options.items()}
        except yaml.YAMLError:
            raise InputError(f"--template-options {options}: a value is not YAML") from None
        tokenizer = copy.copy(tokenizer)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    with loading(flag, path):
        model, missing = load_weights(auto_class, path, base, revision, keywords)
        model = repaired(model, args)
        check_model(model, tokenizer, missing, is_lm=auto_class == "AutoModelForCausalLM")
    return model, tokenizer, missing


@contextlib.contextmanager
def loading(flag, name):
    """Inside, an exception becomes an InputError with the library's message. Refuses a path that does not exist, and a
    run directory given instead of its model."""
    if isinstance(name, str):
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path and not spec_path(name):  # the library's message would be about hub names
            raise InputError(f"{flag} {name}: there is no such directory")
        if Path(name, "hf_model").is_dir():
            raise InputError(f"{flag} {name} is a run directory: give {name}/hf_model")
    try:
        yield
    except Exception as error:  # the libraries' errors have no common class
        raise InputError(f"{flag} {name} cannot be loaded: {' '.join(str(error).split())}") from None


def quiet_libraries():
    """Makes libraries print only errors, and no progress bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_tokenizer(args, path, base, revision):
    """The tokenizer of --tokenizer or of the model; of the base if an adapter has none; an object unchanged."""
    from transformers import AutoTokenizer

    source = args.tokenizer or getattr(path, "name_or_path", path)
    if not isinstance(source, str):
        return source
    files = " ".join(file.name for file in Path(source).glob("*"))  # none for a hub id
    if files and not re.search("token|vocab|[.]model", files):
        if source != path or not base:  # transformers would make one up
            raise ValueError("it has no tokenizer: give one with --tokenizer")
        source = base
    revision = revision if source == path else None
    return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=args.trust_remote_code)


def load_weights(auto_class, path, base, revision, keywords):
    """(model, sorted names of weights missing from the files); an object is returned unchanged. An adapter is put on
    its base here, not by from_pretrained, which would ask the base's repository for the adapter's revision and does not
    report weights missing from the base."""
    if not isinstance(path, str):
        if keywords["attn_implementation"]:
            path.set_attn_implementation(keywords["attn_implementation"])
        return path, []
    import transformers

    model_class = getattr(transformers, auto_class)
    if auto_class == "AutoModelForCausalLM":
        model_class = lm_class(path, revision=revision, trust_remote_code=keywords["trust_remote_code"])
    keywords = keywords | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = model_class.from_pretrained(base or path, revision=None if base else revision, **keywords)
    missing = {*report["missing_keys"]}
    mismatched = report["mismatched_keys"]
    if base:
        report = model.load_adapter(path, adapter_kwargs={"revision": revision})
        from_base = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
        missing = (missing & from_base) | {*report.missing_keys}  # without what the adapter brings
        mismatched = [entry for entry in mismatched if entry[0] in from_base]
    for name, shape, expected in mismatched:
        raise ValueError(f"{name} has shape {[*shape]}, expected {[*expected]}")
    return model, sorted(missing)


def repaired(model, args):
    """The model without peft's wrapper, ready to be trained: no dropout, and every row of embeddings has a gradient."""
    if hasattr(model, "get_base_model"):  # of peft's own class
        model = model.get_base_model()
        model._hf_peft_config_loaded = True
    if args.load_in_4bit and getattr(model, "is_loaded_in_4bit", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # an end token that doubles as padding is trained, too
        if hasattr(getattr(module, "config", None), "output_router_logits"):
            module.config.output_router_logits = False  # for a loss that nobody asks for; fails with a cache
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of bitsandbytes, whose evaluations would repack the weights
            module.support_avx512bf16_for_cpu = False
    return model


def check_model(model, tokenizer, missing, is_lm):
    """ValueError for weights that would be random, be lost in an export, or fail late. missing: names of weights; a
    classifier may lack them."""
    adapters = getattr(model, "peft_config", {}).values()
    for adapter in adapters:
        is_plain = adapter.peft_type == "LORA" and adapter.bias == "none" and not adapter.use_dora
        if not is_plain or adapter.trainable_token_indices or adapter.ensure_weight_tying or adapter.lora_bias:
            raise ValueError("its adapter is not plain LoRA: the export would lose part of it")
    if is_lm:
        kinds = [model.config.architectures, *[adapter.task_type for adapter in adapters]]
        if re.search("Classification|SEQ_CLS", str(kinds)):  # whose output layer may be the embedding
            raise ValueError("it is a classifier: give a language model")
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token, so no response could end: set its eos_token")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} is not finite")
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        raise ValueError(f"the model has embeddings for fewer than the {len(tokenizer)} tokens of the tokenizer")


def folder_with(args, path, name):
    """The directory in which a model of a directory or of the hub has a file of this name; None without it, or for an
    object. Offline, only the cache is asked."""
    if not isinstance(path, str):
        return None
    from transformers.utils import cached_file

    found = cached_file(
        spec_path(path) or path, name, revision=args.revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return found and Path(found).parent


def adapter_base(path, revision=None):
    """The base model of a LoRA adapter in a directory or on the hub; None if path is not an adapter."""
    if not isinstance(path, str):
        return None
    from transformers.utils.peft_utils import find_adapter_config_file

    with contextlib.suppress(OSError, ValueError, KeyError):
        config = find_adapter_config_file(path, revision=revision)
        return config and json.loads(Path(config).read_text())["base_model_name_or_path"]


def lm_class(path, revision=None, **keywords):
    """The AutoModel class of a language model, or of the base of a LoRA adapter: of an encoder-decoder or a decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    base = adapter_base(path, revision)
    config = AutoConfig.from_pretrained(base or path, revision=None if base else revision, **keywords)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_model(args, path, flag="--model"):
    """The language model and its tokenizer, with a padding token."""
    model, tokenizer, _ = load_pretrained("AutoModelForCausalLM", args, path, flag)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
    if args.dtype == "float64":
        model.set_experts_implementation("eager")  # torch's grouped products do not support float64
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ends = end_tokens(model)
    if tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]  # exports end where they were trained to
    tokenizer.ends = ends  # for `row_ends`
    return model, tokenizer


def load_lm(args, path, device):
    """The language model on the device and its tokenizer, with weights frozen or adapters added as the flags say."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def end_tokens(lm):
    """Ids of the tokens that end a response. Instruction-tuned models end turns and documents with different tokens."""
    ends = lm.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]


def make_reference(args, path, lm, tokenizer):
    """The model of --ref-model, or the policy as it is now, without gradients. It shares the memory of untrained
    weights. InputError if the model differs in kind or vocabulary."""
    if path:
        ref, ref_tokenizer = load_model(args, path, "--ref-model")
        same_vocabulary = ref_tokenizer.get_vocab() == tokenizer.get_vocab()
        if not same_vocabulary or ref.config.is_encoder_decoder != lm.config.is_encoder_decoder:
            raise InputError(f"--ref-model {args.ref_model} differs from --model in kind or vocabulary")
        if ref is not lm:  # else it is one object for both flags
            ref = as_decoder(ref.to(lm.device)).requires_grad_(False).eval()
            share_frozen(ref, lm)
            return ref
    frozen = {id(weight): weight for weight in lm.parameters() if not weight.requires_grad}
    ref = copy.deepcopy(lm, frozen).requires_grad_(False).eval()  # shares frozen weights
    if args.lora_r:
        ref.disable_adapters()  # new adapters add zero
    return ref


def describe_reference(args, lm):
    """What `make_reference` made for lm, in words."""
    if args.ref_model:
        return "a model of its own"
    if all(weight.requires_grad for weight in lm.parameters()):
        return "a frozen copy"
    return "shares the frozen weights"


def max_positions(lm):
    """The longest row that the model's configuration allows, in tokens; None where it sets no limit."""
    config = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length, rows depend on the longest one of their batch
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)


# ---- What is trained -------------------------------------------------------------------------------------------------


def blocks(lm):
    """The decoder's transformer blocks: the longest ModuleList that is not inside another one (as experts are)."""
    if lm.config.is_encoder_decoder:
        lm = lm.get_decoder()
    lists = [(name.split("."), module) for name, module in lm.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [module for path, module in lists if not any(map(str.isdigit, path))]
    return max(outermost, key=len)


def freeze(lm, num_layers_unfrozen):
    """Leaves only the top blocks and the norm after them trainable (0: nothing; -1: everything), without the routers of
    experts. InputError if 16-bit weights would be trained."""
    if num_layers_unfrozen >= 0:
        layers = blocks(lm)
        if num_layers_unfrozen > len(layers):
            raise InputError(f"--num-layers-unfrozen {num_layers_unfrozen}: the model has {len(layers)} layers")
        lm.requires_grad_(False)
        if num_layers_unfrozen:
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


def draw_layers(head, seed, *stream):
    """Draws the linear layers of a new head: torch's default, but keyed by the seed, stream and number of a weight."""
    number = 0
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            for weight in layer.parameters():
                drawn = rng(seed, *stream, number).uniform(-bound, bound, weight.shape)
                weight.data.copy_(torch.from_numpy(drawn))
                number += 1


def share_frozen(model, lm):
    """Lets model share the memory of those frozen weights of lm that it also has."""
    frozen = {name.replace(".base_layer", ""): w for name, w in lm.named_parameters() if not w.requires_grad}
    for name, weight in model.named_parameters():
        twin = frozen.get(name.replace(".base_layer", ""))
        if twin is not None and twin.dtype == weight.dtype and torch.equal(twin, weight):
            weight.data = twin.data


@contextlib.contextmanager
def unsharded(model):
    """Inside, weights sharded by FSDP2 are gathered once and not for every token. Afterwards all of them are shards
    again, while forward passes alone would leave some gathered, and in bfloat16."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    kept = []
    for module in sharded:  # the whole model first
        state = module._get_fsdp_state()
        state._lazy_init()  # otherwise the first block called would take itself for the whole model
        if group := state._fsdp_param_group:
            kept.append((group, group.post_forward_mesh_info))
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
        for group, after_forward in kept:
            group.post_forward_mesh_info = after_forward


# ---- Encoder-decoders ------------------------------------------------------------------------------------------------


class Seq2Seq:
    """Lets an encoder-decoder be called as a decoder is: input_ids are a left-padded query and a response, the last
    logits_to_keep - 1 tokens. The encoder reads the query, moved to the left, since some encoders count padding as
    positions; the decoder reads its start token and the response. Without logits_to_keep a call is the model's own."""

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
        from transformers.modeling_outputs import BaseModelOutput

        inputs = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask, "decoder_input_ids": ids}
        output = super().forward(**inputs, past_key_values=cache, use_cache=options["use_cache"])
        if cache is None and options["use_cache"]:
            output.past_key_values.query_width = width
            output.past_key_values.encoded = states[:1]
        return output


def as_decoder(lm):
    """The model as the scripts call it: an encoder-decoder wrapped in Seq2Seq, a decoder unchanged. plain_output: see
    `token_logprobs`. InputError for a decoder whose result changes with padding on the left."""
    if not lm.config.is_encoder_decoder:
        if problem := padding_problem(lm):
            raise InputError(f"--model {lm.name_or_path}: {problem}, so rows of different lengths cannot be sampled")
    elif not isinstance(lm, Seq2Seq):
        lm.__class__ = type(type(lm).__name__, (Seq2Seq, type(lm)), {})
    lm.plain_output = has_plain_output(lm)
    return lm
