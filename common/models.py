"""Pretrained models in and out: weights and tokenizers, adapters, 4 bits, frozen blocks, encoder-decoders, classifiers.

Every model is one that transformers finds by its configuration, without a branch for any architecture. It keeps its
class, also with adapters: peft's layers are put into it, and peft's own wrapper is not used.
"""

import contextlib
import copy
import ctypes
import json
import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from common.cli import InputError, spec_path, stop_if
from common.seeding import fast_cpu_matmul, rng

TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken")
NOT_TAKEN = ("bias", "trainable_token_indices", "ensure_weight_tying", "use_dora")  # of adapters: would not be exported
UNUSED = ("none", None, False)  # values of these that ask for nothing

# ---- In --------------------------------------------------------------------------------------------------------------


def load_pretrained(auto_class, args, path, flag, **keywords):
    """(model, tokenizer, names of the weights that the files lack), by a class such as AutoModelForCausalLM.

    path: a directory, a hub id, a LoRA adapter in one of these, or a model. All weights are finite and dropout is off.
    An encoder-decoder is loaded as one. flag names the path in errors; --revision counts for --model alone, since other
    flags name other repositories. keywords go to from_pretrained. Raises InputError.
    """
    quiet_libraries()
    path = spec_path(path) or path
    if isinstance(path, Path):
        path = str(path)
    revision = args.revision if flag == "--model" else None
    source = args.tokenizer or getattr(path, "name_or_path", path)
    check_directory(flag, path)
    check_directory("--tokenizer", source)
    base = adapter_base(path, revision)
    source = tokenizer_source(source, path, base, flag)
    hub = {"trust_remote_code": args.trust_remote_code}
    keywords |= hub | {"dtype": getattr(torch, args.dtype)}
    if args.load_in_4bit:
        keywords |= four_bits(keywords["dtype"])
    try:
        tokenizer = source
        if isinstance(source, str):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision if source == path else None, **hub)
        model, missing, mismatched = load_weights(auto_class, path, base, revision, keywords)
    except Exception as error:  # the libraries' errors have no common class
        where = describe_source(args, path, flag, base, revision)
        raise InputError(f"{where} cannot be loaded: {' '.join(str(error).split())}") from None
    model = repaired(model, args)
    problems = model_problems(model, tokenizer, mismatched, is_classifier="Sequence" in auto_class.__name__)
    stop_if([f"{flag} {path}: {problem}" for problem in problems[:1]])
    return model, tokenizer, sorted(missing)


def quiet_libraries():
    """Errors only, and no bars."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    transformers_logging.get_logger("bitsandbytes").setLevel("ERROR")  # it complains where nobody asks for 4 bits


def check_directory(flag, path):
    """InputError for a path to nothing, or to a run in place of its model. Hub ids and objects pass."""
    if not isinstance(path, str):
        return
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not Path(path).exists():
        raise InputError(f"{flag} {path}: there is no such directory")
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
        return path, set(), []
    if auto_class is AutoModelForCausalLM:
        auto_class = lm_class(path, revision=revision, trust_remote_code=keywords["trust_remote_code"])
    keywords = keywords | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = auto_class.from_pretrained(base or path, revision=None if base else revision, **keywords)
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


def describe_source(args, path, flag, base, revision):
    """The flags that a model was to be loaded by, for an error."""
    text = f"{flag} {path}"
    if base:
        text += f", an adapter of {base},"
    if revision:
        text += f" --revision {revision}"
    if isinstance(args.tokenizer, str):
        text += f" --tokenizer {args.tokenizer}"
    return text


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
            is_rate = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # an end token that doubles as padding is trained, too
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
    with contextlib.suppress(OSError, ValueError, KeyError):
        config = find_adapter_config_file(path, revision=revision)
        return config and json.loads(Path(config).read_text())["base_model_name_or_path"]


def lm_class(path, revision=None, **keywords):
    """The AutoModel class of a language model, or of the base of a LoRA adapter: of an encoder-decoder or a decoder."""
    base = adapter_base(path, revision)
    config = AutoConfig.from_pretrained(base or path, revision=None if base else revision, **keywords)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_model(args, path, flag="--model"):
    """The language model and its tokenizer, with a padding token."""
    model, tokenizer, missing = load_pretrained(AutoModelForCausalLM, args, path, flag)
    stop_if([f"{flag} {path}: {name} is missing" for name in missing[:1]])
    if "Classification" in str(model.config.architectures):  # whose output layer may be the embedding
        raise InputError(f"{flag} {path} is a classifier: name a language model")
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-sequence token, so no response could end: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ends = model.generation_config.eos_token_id  # so that the exported model ends where it was trained to
    if not isinstance(ends, list):
        ends = [ends]
    if tokenizer.eos_token_id not in ends:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.get_output_embeddings().register_forward_pre_hook(contiguous_input)
    return model, tokenizer


def contiguous_input(module, inputs):
    """Hook: a strided slice times a frozen weight makes CPU kernels copy the weight for every row."""
    return inputs[0].contiguous(), *inputs[1:]


def load_reference(args, path, lm, tokenizer, longest):
    """The model of --ref-model, on the device of lm and without gradients, for rows of up to `longest` tokens.

    InputError unless it is of lm's kind and has the vocabulary of lm's tokenizer.
    """
    ref, ref_tokenizer = load_model(args, path, "--ref-model")
    same_vocabulary = ref_tokenizer.get_vocab() == tokenizer.get_vocab()
    if not same_vocabulary or ref.config.is_encoder_decoder != lm.config.is_encoder_decoder:
        raise InputError(f"--ref-model {args.ref_model} is of another kind or has another vocabulary than --model")
    set_attention(ref, args, lm.device, longest)
    return as_decoder(ref.to(lm.device)).requires_grad_(False).eval()


def frozen_copy(lm):
    """The model as it is now, without gradients. It shares the memory of the weights that lm does not train."""
    shared = {id(weight): weight for weight in lm.parameters() if not weight.requires_grad}
    return copy.deepcopy(lm, shared).requires_grad_(False).eval()


def max_positions(lm):
    """The longest row that the model's configuration allows, in tokens; None where it sets no limit."""
    return getattr(lm.config.get_text_config(), "max_position_embeddings", None)


def set_attention(lm, args, device, longest):
    """On CPUs: fast matrix products, and eager attention for rows of up to 256 tokens, where it beats sdpa (not in
    float64, where it gives NaN for left padding in several families); elsewhere sdpa."""
    choice = "sdpa"
    if device.type == "cpu":
        keep_freed_memory()
        is_fast = fast_cpu_matmul()
        if is_fast and longest <= 256 and args.dtype != "float64":
            choice = "eager"
    if args.attn_implementation != "auto":
        choice = args.attn_implementation
    before = lm.config._attn_implementation
    try:
        lm.set_attn_implementation(choice)
        if choice != before and lm.config._attn_implementation == before:  # some models warn and go on
            raise ValueError(f"{type(lm).__name__} stays with {before}")
    except (ValueError, ImportError) as error:
        if args.attn_implementation != "auto":
            raise InputError(f"--attn-implementation {choice}: {error}") from None


def keep_freed_memory():
    """New pages for every block of logits cost as much as computing them, so the C library keeps what is freed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


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
    """Leaves only the top blocks and the norm after them trainable (0: nothing; -1: everything). Returns the number of
    frozen blocks."""
    if num_layers_unfrozen < 0:
        return 0
    layers = blocks(lm)
    if num_layers_unfrozen > len(layers):
        raise InputError(f"--num-layers-unfrozen {num_layers_unfrozen}: the model has {len(layers)} layers")
    depth = len(layers) - num_layers_unfrozen
    lm.requires_grad_(False)
    if num_layers_unfrozen:
        layers[depth:].requires_grad_(True)
        for module in modules_after(lm, layers[-1]):
            if module is not lm.get_output_embeddings():
                for weight in module.parameters(recurse=False):
                    weight.requires_grad_(True)
    return depth


def modules_after(lm, block):
    """What runs after a block: the norm, the output layer and what holds them. Found by a forward pass of one token."""
    ran = []
    hooks = [module.register_forward_hook(lambda module, *_: ran.append(module)) for module in lm.modules()]
    lm(input_ids=torch.zeros(1, 1, dtype=torch.long, device=lm.device), use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return ran[ran.index(block) + 1 :]


def train_adapters(lm, args, heads=()):
    """LoRA adapters are trained, if there are any, and nothing else: new ones at --lora-targets, which change nothing
    before the first update (B is zero), or those of --model. heads: modules that are trained and saved with them.
    Adapters are at least float32, since small updates would be lost in bfloat16. Source: arXiv 2106.09685."""
    is_loaded = getattr(lm, "_hf_peft_config_loaded", False)
    if is_loaded and (args.lora_r or args.num_layers_unfrozen != -1):
        raise InputError("--model is a LoRA adapter, trained as it is: leave out --lora-r and --num-layers-unfrozen")
    if args.load_in_4bit and not (args.lora_r or is_loaded):
        raise InputError("--load-in-4bit: weights of 4 bits cannot be trained: add --lora-r")
    if args.load_in_4bit and not getattr(lm, "is_loaded_in_4bit", False):
        raise InputError("--load-in-4bit: --model is an object: load it in 4 bits yourself")
    if args.lora_r:
        add_adapters(lm, args, heads)
    elif not is_loaded:
        if args.merge:
            raise InputError("--merge: there are no adapters to merge: add --lora-r")
        return
    for name, weight in lm.named_parameters():
        weight.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if args.lora_r and ".lora_A." in name:  # torch's default, but keyed: the same on every process
            bound = weight.shape[1] ** -0.5
            values = rng(args.seed, f"lora {name}").uniform(-bound, bound, tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(values))
    if not any("lora_" in name for name, _ in lm.named_parameters()):
        raise InputError("--model is an adapter of another kind than LoRA")
    if args.merge:
        check_mergeable(lm)


def add_adapters(lm, args, heads):
    """Puts new adapters into lm. Its class stays: a PeftModel around it would have other names of weights, and neither
    attention, blocks nor export of a transformers model."""
    from peft import LoraConfig

    targets = list(args.lora_targets)
    if targets == ["all-linear"]:
        targets = "all-linear"
    else:
        names = [f".{name}" for name, _ in lm.named_modules()]
        unknown = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
        stop_if([f"--lora-targets {target}: no module of --model has this name" for target in unknown])
    task = "SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM"
    if heads:
        task = "SEQ_CLS"
    config = {"task_type": task, "target_modules": targets, "modules_to_save": list(heads) or None}
    config = LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha or args.lora_r, revision=args.revision, **config)
    if not (lm.name_or_path or args.merge):
        raise InputError("--model is an object without name_or_path, which adapters need to find it: give --merge")
    if Path(lm.name_or_path).is_dir():  # found from everywhere
        lm.name_or_path = str(Path(lm.name_or_path).resolve())
    try:
        with warnings.catch_warnings(action="ignore"):  # that a Conv1D holds its matrix transposed
            lm.add_adapter(config)
    except ValueError as error:
        raise InputError(f"--lora-targets {' '.join(args.lora_targets)}: {error}") from None


def check_mergeable(lm):
    """InputError where an adapted layer has the weight of another one, which merging would change as well."""
    uses = [id(weight) for _, weight in lm.named_parameters(remove_duplicate=False)]
    for module in lm.modules():
        layer = getattr(module, "base_layer", getattr(module, "original_module", None))
        if hasattr(layer, "weight") and uses.count(id(layer.weight)) > 1:
            raise InputError("--merge: an adapted layer shares its weight with another one: export the adapters alone")


def to_export(lm, args):
    """The model to export; with --merge a copy whose adapters are part of the weights. Source: peft's merge_and_unload,
    which is a method of the wrapper alone."""
    if not args.merge:
        return lm
    lm = copy.deepcopy(lm)
    lm._weight_conversions = None  # those of an adapter that was loaded would rename the weights
    for name, layer in list(lm.named_modules()):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            lm.set_submodule(name, layer.get_base_layer())
        elif hasattr(layer, "modules_to_save"):
            lm.set_submodule(name, layer.modules_to_save[layer.active_adapters[0]])
    lm._hf_peft_config_loaded = False
    return lm


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
        inputs = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask, "decoder_input_ids": ids}
        output = super().forward(**inputs, past_key_values=cache, use_cache=options["use_cache"])
        if cache is None and options["use_cache"]:
            output.past_key_values.query_width = width
            output.past_key_values.encoded = states[:1]
        return output


def as_decoder(lm):
    """An encoder-decoder with the calls of Seq2Seq; any other model as it is."""
    if lm.config.is_encoder_decoder and not isinstance(lm, Seq2Seq):
        if getattr(lm.config, "decoder_start_token_id", None) is None:
            raise InputError("the configuration of the encoder-decoder has no decoder_start_token_id")
        lm.__class__ = type(type(lm).__name__, (Seq2Seq, type(lm)), {})
    return lm


# ---- Classifiers -----------------------------------------------------------------------------------------------------


class RewardModel:
    """A sequence classifier, or the LoRA adapter of one, as the reward: the logit of its only label, or of the one
    named in `path:label`. Weights that the policy lm has and does not train are shared with it."""

    def __init__(self, args, lm):
        name, label = args.reward, ""
        if not spec_path(name):
            name, _, label = args.reward.partition(":")
        path = str(spec_path(name) or name)
        is_adapter = bool(adapter_base(path))
        own_args = copy.copy(args)
        own_args.tokenizer = None  # that flag is about --model
        own_args.load_in_4bit = args.load_in_4bit and is_adapter
        keywords = {"num_labels": 1} if is_adapter else {}
        auto_class = AutoModelForSequenceClassification
        model, self.tokenizer, missing = load_pretrained(auto_class, own_args, name, "--reward", **keywords)
        stop_if([f"--reward {args.reward} is no sequence classifier, it has no {key}" for key in missing[:1]])
        numbers = {text: number for number, text in model.config.id2label.items()}
        if label not in numbers and (label or len(numbers) > 1):
            known = ", :".join(numbers)
            raise InputError(f"--reward {args.reward} must end with the label to score, one of :{known}")
        self.label = numbers.get(label, 0)
        self.model = model.requires_grad_(False).eval().to(lm.device)
        self.norm = reward_norm(model, path, is_adapter)
        self.shared = share_frozen(self.model, lm)
        self.own = sum(weight.numel() for weight in self.model.parameters()) - self.shared
        self.tokenizer.truncation_side = "left"
        self.limit = min(max_positions(model) or 10**9, self.tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, samples, ended, batch_size):
        """Scores (B,) of the texts; too long ones lose their beginning."""
        encoded = classifier_ids(self.tokenizer, samples, ended, self.limit)
        scores = torch.empty(len(encoded), dtype=torch.float64, device=self.model.device)
        by_length = torch.tensor([len(ids) for ids in encoded]).argsort(stable=True)
        for rows in by_length.split(batch_size):
            logits = classifier_logits(self.model, [encoded[row] for row in rows])[:, self.label]
            scores[rows.to(scores.device)] = logits.double() * self.norm["gain"] + self.norm["bias"]
        return scores


def reward_norm(model, path, is_adapter):
    """{"gain", "bias"} that reward.py has written: the reward is gain * score + bias. An adapter has it in a file."""
    if is_adapter:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(path, "reward_norm.safetensors", **quiet)
        if file:
            return {key: value.item() for key, value in safetensors.torch.load_file(file).items()}
    return getattr(model.config, "reward_norm", {"gain": 1.0, "bias": 0.0})


def classifier_ids(tokenizer, texts, ended, max_length=None):
    """The tokens of texts as a classifier reads them: with its end token, if it has one, where `ended` says so; at most
    max_length, on the tokenizer's truncation_side."""
    eos = tokenizer.eos_token_id
    cut = {}
    if max_length:
        room_for_end = 0 if eos is None else 1
        cut = {"truncation": True, "max_length": max_length - room_for_end}
    encoded = tokenizer(texts, **cut)["input_ids"]
    for ids, is_ended in zip(encoded, ended, strict=True):
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # a chat template writes its own
        if eos is None:
            continue
        if ids[-2:] == [eos, eos]:
            del ids[-1]
        if not ids or (is_ended and ids[-1] != eos):
            ids.append(eos)
    return encoded


def classifier_logits(model, rows):
    """Logits (B, labels) of rows of tokens. Decoders read the score at the last token that is not the padding of their
    configuration, so padding is, on the right, a token that no row has: an end token counts wherever it stands."""
    lm = getattr(model, "module", model)
    used = set().union(*rows)
    pad = next(token for token in range(len(used) + 1) if token not in used)
    lm.config.get_text_config().pad_token_id = pad
    if pad >= lm.get_input_embeddings().num_embeddings and len(rows) > 1:
        return torch.cat([classifier_logits(model, [ids]) for ids in rows])
    width = max(map(len, rows))
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in rows], device=lm.device)
    lengths = torch.tensor([len(ids) for ids in rows], device=lm.device)
    mask = torch.arange(width, device=lm.device) < lengths[:, None]
    return model(input_ids=ids, attention_mask=mask.long()).logits
