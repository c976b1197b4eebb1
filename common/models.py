"""Pretrained models in and out: weights and tokenizers, 4 bits, frozen blocks, references, encoder-decoders.

Every model is one that transformers finds by its configuration, without a branch for any architecture. It keeps its
class. Adapters: common/adapters.py; classifiers: common/classifiers.py.
"""

import contextlib
import copy
import json
from pathlib import Path

import torch
from torch import nn

from common.cli import InputError, stop_if
from common.forward import has_plain_output, one_token, padding_problem, routers
from common.functions import refuse_mistyped, spec_path
from common.report import screen
from common.seeding import rng

TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken")
NOT_TAKEN = ("bias", "trainable_token_indices", "ensure_weight_tying", "use_dora")  # of adapters: would not be exported
UNUSED = ("none", None, False)  # values of these that ask for nothing

# ---- In --------------------------------------------------------------------------------------------------------------


def load_pretrained(auto_class, args, path, flag, **keywords):
    """(model, tokenizer, names of the weights that the files lack), by a class of transformers that auto_class names.

    path: a directory, a hub id, a LoRA adapter in one of these, or a model. All weights are finite and dropout is off.
    An encoder-decoder is loaded as one. flag names the path in errors; --revision counts for --model alone, since other
    flags name other repositories. keywords go to from_pretrained. Raises InputError.
    """
    from transformers import AutoTokenizer

    quiet_libraries()
    screen.show(f"loading {flag}")
    path = spec_path(path) or path
    if isinstance(path, Path):
        path = str(path)
    revision = args.revision if flag == "--model" else None
    source = args.tokenizer or getattr(path, "name_or_path", path)
    check_directory(flag, path)
    check_directory("--tokenizer", source)
    base = adapter_base(path, revision)
    source = tokenizer_source(source, path, base, flag)
    code = {"trust_remote_code": args.trust_remote_code}
    keywords |= code | {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attn_implementation}
    if args.load_in_4bit:
        keywords |= four_bits(keywords["dtype"])
    try:
        tokenizer = source
        if isinstance(source, str):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision if source == path else None, **code)
        model, missing, mismatched = load_weights(auto_class, path, base, revision, keywords)
    except Exception as error:  # the libraries' errors have no common class
        named = f"{flag} {path}"
        if isinstance(args.tokenizer, str):
            named += f" or --tokenizer {args.tokenizer}"
        raise InputError(f"{named} cannot be loaded: {' '.join(str(error).split())}") from None
    model = repaired(model, args)
    problems = model_problems(model, tokenizer, mismatched, is_classifier="Sequence" in auto_class)
    stop_if([f"{flag} {path}: {problem}" for problem in problems[:1]])
    return model, tokenizer, sorted(missing)


def quiet_libraries():
    """Errors only, and no bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    transformers_logging.get_logger("bitsandbytes").setLevel("ERROR")  # it complains where nobody asks for 4 bits


def check_directory(flag, path):
    """InputError for a path to nothing, or to a run in place of its model. Hub ids and objects pass."""
    if not isinstance(path, str):
        return
    refuse_mistyped(path, flag)
    if Path(path, "hf_model").is_dir():
        raise InputError(f"{flag} {path} is a run directory: name {path}/hf_model")


def tokenizer_source(source, path, base, flag):
    """Where the tokenizer is: source, or the base of an adapter that has none. InputError for a directory without."""
    if not isinstance(source, str) or not Path(source).is_dir():
        return source
    for pattern in TOKENIZER_FILES:
        if any(Path(source).glob(pattern)):
            return source
    if base and source == path:
        return base
    raise InputError(f"{flag} {source} holds no tokenizer: name one with --tokenizer")


def four_bits(dtype):
    """What from_pretrained is told to load weights in 4 bits (NF4; arXiv 2305.14314)."""
    from transformers import BitsAndBytesConfig

    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    config = BitsAndBytesConfig(**config, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def load_weights(auto_class, path, base, revision, keywords):
    """(model, missing names, mismatched (name, shape, expected shape)); an object comes back as it is.

    An adapter is put on its base here, and not by from_pretrained: that asks the base's repository for the adapter's
    revision, and its report knows nothing of what the base lacks.
    """
    if not isinstance(path, str):
        if keywords["attn_implementation"]:
            path.set_attn_implementation(keywords["attn_implementation"])
        return path, set(), []
    import transformers

    if auto_class == "AutoModelForCausalLM":
        model_class = lm_class(path, revision=revision, trust_remote_code=keywords["trust_remote_code"])
    else:
        model_class = getattr(transformers, auto_class)
    keywords = keywords | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = model_class.from_pretrained(base or path, revision=None if base else revision, **keywords)
    missing = {*report["missing_keys"]}
    mismatched = {*report["mismatched_keys"]}
    if base:
        report = model.load_adapter(path, adapter_kwargs={"revision": revision}, ignore_mismatched_sizes=True)
        from_base = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
        missing = (missing & from_base) | {*report.missing_keys}  # without what the adapter brings
        mismatched = {entry for entry in mismatched if entry[0] in from_base} | {*report.mismatched_keys}
        if Path(base).is_dir():  # found from everywhere
            model.peft_config["default"].base_model_name_or_path = str(Path(base).resolve())
    return model, missing, sorted(mismatched)


def repaired(model, args):
    """The model without a wrapper of peft, ready to be trained: no dropout, no row of embeddings without gradient."""
    if hasattr(model, "get_base_model"):  # of peft's own class
        model = model.get_base_model()
        model._hf_peft_config_loaded = True
    if args.load_in_4bit and getattr(model, "is_loaded_in_4bit", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, args.gradient_checkpointing, {"use_reentrant": False})
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


def model_problems(model, tokenizer, mismatched, is_classifier):
    """What is broken, would be lost in an export, or would stay random. mismatched: as load_weights returns it."""
    problems = [f"{name} is of shape {[*shape]}, expected {[*expected]}" for name, shape, expected in mismatched]
    problems += [f"{name} is not finite" for name, weight in model.named_parameters() if not weight.isfinite().all()]
    for adapter in getattr(model, "peft_config", {}).values():
        if (adapter.task_type == "SEQ_CLS") != is_classifier:
            problems.append(f"the adapter is one for {adapter.task_type}, not for this kind of model")
        unsaved = [name for name in NOT_TAKEN if getattr(adapter, name, None) not in UNUSED]
        problems += [f"adapters with {name} are not taken" for name in unsaved]
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        problems.append(f"the model has embeddings for fewer than the {len(tokenizer)} tokens of the tokenizer")
    return problems


def adapter_base(path, revision=None):
    """What a LoRA adapter, a directory or hub id, names as its base model; None where path is no adapter."""
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
    model, tokenizer, missing = load_pretrained("AutoModelForCausalLM", args, path, flag)
    stop_if([f"{flag} {path}: {name} is missing" for name in missing[:1]])
    if "Classification" in str(model.config.architectures):  # whose output layer may be the embedding
        raise InputError(f"{flag} {path} is a classifier: name a language model")
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-sequence token, so no response could end: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
    if args.dtype == "float64":
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ends = end_tokens(model)
    if tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    # the exported model ends where it was trained to
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    tokenizer.ends = ends  # for `row_ends`
    return model, tokenizer


def end_tokens(lm):
    """Ids of the tokens that end a response. `load_model` puts that of the tokenizer beside those of the checkpoint's
    generation_config: instruction-tuned models end their turns with another token than their documents."""
    ends = lm.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]


def make_reference(args, path, lm, tokenizer):
    """The model of --ref-model, or the policy as it is now. It shares the memory of weights that are not trained."""
    if path:
        ref = load_reference(args, path, lm, tokenizer)
        share_frozen(ref, lm)
        return ref
    ref = frozen_copy(lm)
    if args.lora_r:
        ref.disable_adapters()  # new ones add zero
    return ref


def load_reference(args, path, lm, tokenizer):
    """The model of --ref-model, on the device of lm and without gradients.

    InputError unless it is of lm's kind and has the vocabulary of lm's tokenizer.
    """
    ref, ref_tokenizer = load_model(args, path, "--ref-model")
    if ref is lm:  # one object for both flags
        return frozen_copy(lm)
    same_vocabulary = ref_tokenizer.get_vocab() == tokenizer.get_vocab()
    if not same_vocabulary or ref.config.is_encoder_decoder != lm.config.is_encoder_decoder:
        raise InputError(f"--ref-model {args.ref_model} is of another kind or has another vocabulary than --model")
    return as_decoder(ref.to(lm.device)).requires_grad_(False).eval()


def frozen_copy(lm):
    """The model as it is now, without gradients. It shares the memory of the weights that lm does not train."""
    shared = {id(weight): weight for weight in lm.parameters() if not weight.requires_grad}
    return copy.deepcopy(lm, shared).requires_grad_(False).eval()


def max_positions(lm):
    """The longest row that the model's configuration allows, in tokens; None where it sets no limit.

    With longrope (arXiv 2402.13753) that is its first length: beyond it the longest row of a batch decides how all
    positions turn, so that a row would depend on its neighbours.
    """
    config = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)


# ---- What is trained -------------------------------------------------------------------------------------------------


def blocks(lm):
    """The transformer blocks, of an encoder-decoder those of the decoder: the longest ModuleList that lies in no other
    (as experts of a block do)."""
    if lm.config.is_encoder_decoder:
        lm = lm.get_decoder()
    lists = [(name.split("."), module) for name, module in lm.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [module for path, module in lists if not any(map(str.isdigit, path))]
    return max(outermost, key=len)


def freeze(lm, num_layers_unfrozen):
    """Leaves only the top blocks and the norm after them trainable (0: nothing; -1: everything), without the routers of
    experts. InputError where weights of 16 bits would be trained."""
    if num_layers_unfrozen >= 0:
        layers = blocks(lm)
        if num_layers_unfrozen > len(layers):
            raise InputError(f"--num-layers-unfrozen {num_layers_unfrozen}: the model has {len(layers)} layers")
        lm.requires_grad_(False)
        if num_layers_unfrozen:
            layers[-num_layers_unfrozen:].requires_grad_(True)
            for module in modules_after(lm, layers[-1]):
                if module is not lm.get_output_embeddings():
                    for weight in module.parameters(recurse=False):
                        weight.requires_grad_(True)
    for router in routers(lm).values():
        router.requires_grad_(False)
    for weight in lm.parameters():
        if weight.requires_grad and weight.itemsize < 4:  # measured: 15 % of the weights change in 300 steps of 1e-5
            raise InputError(
                "--dtype bfloat16: most updates of such weights would round to nothing: leave it out and give "
                "--mixed-precision bf16, or train adapters with --lora-r"
            )


def draw_layers(head, seed, *stream):
    """Initialises the linear layers of a new head: torch's default, but keyed, the same on every process. stream: the
    name of the draw, which the number of a weight completes."""
    number = 0
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            for weight in layer.parameters():
                drawn = rng(seed, *stream, number).uniform(-bound, bound, weight.shape)
                weight.data.copy_(torch.from_numpy(drawn))
                number += 1


def modules_after(lm, block):
    """What runs after a block: the norm, the output layer and what holds them. Found by a forward pass of one token."""
    ran = []
    hooks = [module.register_forward_hook(lambda module, *_: ran.append(module)) for module in lm.modules()]
    one_token(lm)
    for hook in hooks:
        hook.remove()
    return ran[ran.index(block) + 1 :]


def share_frozen(model, lm):
    """Lets model use the memory of the frozen weights of lm that it has under the same name, bit for bit; returns how
    many numbers these are. Adapters leave a weight its name, but for `base_layer`."""
    frozen = {name.replace(".base_layer", ""): w for name, w in lm.named_parameters() if not w.requires_grad}
    shared = 0
    for name, weight in model.named_parameters():
        twin = frozen.get(name.replace(".base_layer", ""))
        if twin is not None and twin.dtype == weight.dtype and torch.equal(twin, weight):
            weight.data = twin.data
            shared += weight.numel()
    return shared


@contextlib.contextmanager
def unsharded(model):
    """Within it the weights that FSDP2 has sharded are whole, gathered once and not for every token, also for calls of
    parts of the model; after it they are shards, where forward passes alone would leave some of them whole."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:  # the whole model comes first
        module._get_fsdp_state()._lazy_init()  # else the block that is called first would take itself for it
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not model, recurse=False)  # as torch does by default


# ---- Encoder-decoders ------------------------------------------------------------------------------------------------


class Seq2Seq:
    """Mixin that lets an encoder-decoder be called as a decoder is, with the query left-padded and the response behind
    it: the last logits_to_keep - 1 tokens of input_ids. The encoder reads the query, moved to the left, since some
    encoders count padding as positions; the decoder reads its start token and the response. So the logits are those of
    the response tokens and of the one behind, whatever the family. A call without logits_to_keep is the model's own."""

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
        else:  # the cache holds what the decoder has read of it
            states = cache.encoded.expand(len(ids), -1, -1)
        from transformers.modeling_outputs import BaseModelOutput

        inputs = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask, "decoder_input_ids": ids}
        output = super().forward(**inputs, past_key_values=cache, use_cache=options["use_cache"])
        if cache is None and options["use_cache"]:
            output.past_key_values.query_width = width
            output.past_key_values.encoded = states[:1]
        return output


def as_decoder(lm):
    """The model as the scripts call it, with an answer to whether they need all of its logits (`token_logprobs`): an
    encoder-decoder with the calls of Seq2Seq, a decoder as it is. InputError for one that padding on the left
    changes."""
    if lm.config.is_encoder_decoder and not isinstance(lm, Seq2Seq):
        if getattr(lm.config, "decoder_start_token_id", None) is None:
            raise InputError("the configuration of the encoder-decoder has no decoder_start_token_id")
        lm.__class__ = type(type(lm).__name__, (Seq2Seq, type(lm)), {})
    problem = None if lm.config.is_encoder_decoder else padding_problem(lm)
    if problem:
        raise InputError(f"--model {lm.name_or_path}: {problem}, so that rows of several lengths cannot be sampled")
    lm.plain_output = has_plain_output(lm)
    return lm
