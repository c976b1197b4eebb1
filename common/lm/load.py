"""Loading: language models and their tokenizers, references, heads beside a model; and code that loads an export."""

import copy
import functools
import re
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from common.errors import InputError
from common.functions import adapter_base, loading, read_options, spec_path
from common.lm.adapters import train_adapters
from common.lm.structure import as_decoder, end_tokens, freeze
from common.report import screen


def load_pretrained(auto_class, args, path, flag, **keywords):
    """(model, tokenizer, names of missing weights) of a directory or hub id, also of a LoRA adapter, or a model.
    auto_class: a name in transformers. keywords go to from_pretrained."""
    if isinstance(path, str | Path):
        path = str(spec_path(str(path)) or path)
    revision = args.revision if flag == "--model" else None  # other flags name other repositories
    keywords |= {"dtype": args.dtype, "attn_implementation": args.attn_implementation}
    if args.load_in_4bit:  # NF4, arXiv 2305.14314
        compute = "bfloat16" if args.mixed_precision == "bf16" else args.dtype
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        keywords["quantization_config"] = options | {"bnb_4bit_compute_dtype": compute}
    with loading("--tokenizer" if args.tokenizer else flag, args.tokenizer or path):
        tokenizer = load_tokenizer(args, path, revision)
    if args.template_options:
        options = read_options(args.template_options, "--template-options")
        tokenizer = copy.copy(tokenizer)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    with loading(flag, path):
        model, missing = load_weights(auto_class, path, revision, trust_remote_code=args.trust_remote_code, **keywords)
        model = repaired(model, args)
        for adapter in getattr(model, "peft_config", {}).values():
            is_plain = adapter.peft_type == "LORA" and adapter.bias == "none" and not adapter.use_dora
            if not is_plain or adapter.trainable_token_indices:  # transformers reads the rows of these tokens wrongly
                raise ValueError("its adapter is not plain LoRA: the export would lose part of it")
        if missing and auto_class == "AutoModelForCausalLM":
            raise ValueError(f"{missing[0]} is missing")
    return model, tokenizer, missing


def load_tokenizer(args, path, revision):
    """The tokenizer of --tokenizer or of the model at path, or of its base if an adapter has none."""
    from transformers import AutoTokenizer

    source = args.tokenizer or getattr(path, "name_or_path", path)
    if not isinstance(source, str):
        return source
    revision = revision if source == path else None
    files = {file.name for file in Path(source).glob("*")}  # none for a hub id
    if source == path and Path(source).is_dir() and files.isdisjoint(("config.json", "adapter_config.json")):
        raise ValueError("it is a pipeline: see ddpo.py" if "model_index.json" in files else "it has no config.json")
    if files and not re.search("token|vocab|[.]model", " ".join(files)):
        source, revision = adapter_base(source)
        if source is None:  # transformers would make one up
            raise ValueError("it has no tokenizer: give one with --tokenizer")
    return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=args.trust_remote_code)


def load_weights(auto_class, path, revision=None, **keywords):
    """(model, sorted names of weights missing from the files). Puts an adapter on its base: from_pretrained would ask
    the base's repository for the adapter's revision, and would not report weights missing from the base."""
    if not isinstance(path, str):
        return path, []
    import transformers

    base, base_revision = adapter_base(path, revision)
    keywords["revision"] = base_revision if base else revision
    config = transformers.AutoConfig.from_pretrained(base or path, **keywords)
    if auto_class == "AutoModelForCausalLM" and config.is_encoder_decoder:
        auto_class = "AutoModelForSeq2SeqLM"
    kind = getattr(transformers, auto_class)
    model, report = kind.from_pretrained(base or path, output_loading_info=True, **keywords)
    missing = {*report["missing_keys"]}
    unexpected = {*report["unexpected_keys"]}
    if missing:  # a new head, in place of another one
        unexpected = {name for name in unexpected if name.startswith(model.base_model_prefix)}
    if base:
        of_base = {id(weight): weight for weight in model.parameters()}
        report = model.load_adapter(path, adapter_kwargs={"revision": revision})
        unexpected |= report.unexpected_keys
        came = [name for name, weight in model.named_parameters() if id(weight) not in of_base]
        model.stored_layers = [name for name in came if not re.search("lora_|modules_to_save", name)]
        from_base = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
        missing = (missing & from_base) | {*report.missing_keys}  # without what the adapter brings
    if unexpected:
        names = ", ".join(sorted(unexpected))
        screen.say(f"warning: {path} holds {len(unexpected)} weights that are no part of its model: {names:.200}")
    return model, sorted(missing)


def repaired(model, args):
    """The model without peft's wrapper and without dropout; every row of its embeddings has a gradient. A GELU of
    transformers that is torch's to rounding, as GPT-2's, becomes torch's: one operation in place of eight."""
    if hasattr(model, "get_base_model"):  # of peft's own class
        model = model.get_base_model()
        model._hf_peft_config_loaded = True
    if args.load_in_4bit and getattr(model, "is_loaded_in_4bit", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    points = torch.linspace(-9, 9, 99, dtype=torch.float64)
    for module in model.modules():
        for name, child in module.named_children():
            is_gelu = type(child).__module__ == "transformers.activations" and "GELU" in type(child).__name__.upper()
            if is_gelu and torch.allclose(child(points), nn.GELU("tanh")(points)):
                setattr(module, name, nn.GELU("tanh"))
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


def load_model(args, path, flag="--model"):
    """The language model and its tokenizer, with a padding token."""
    model, tokenizer, _ = load_pretrained("AutoModelForCausalLM", args, path, flag)
    if tokenizer.eos_token_id is None:
        raise InputError(f"{flag}: the tokenizer has no end-of-sequence token, so no response could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
    for stop in getattr(args, "stop", ()):  # a tokenizer may lack a character, normalise it, or drop a line break
        text = tokenizer.decode(tokenizer(f"a{stop}a")["input_ids"], clean_up_tokenization_spaces=False)
        if stop not in text:
            screen.say(f"warning: --stop {stop!r} will not be found: the tokenizer turns {f'a{stop}a'!r} into {text!r}")
    if args.dtype == "float64":
        model.set_experts_implementation("eager")  # torch's grouped products do not support float64
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ends = list(dict.fromkeys([*end_tokens(model), tokenizer.eos_token_id]))  # without repetitions
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]  # exports end where they were trained to
    tokenizer.ends = ends  # for `row_ends`
    tokenizer.answers_apart = model.config.is_encoder_decoder  # for `texts_behind`
    return model, tokenizer


def load_lm(args, path, device):
    """(language model, tokenizer) of --model, on the device, with weights frozen or adapters added as the flags say."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def load_decoder(directory, **options):
    """The language model in a directory, as the scripts call it. options go to from_pretrained."""
    model, _ = load_weights("AutoModelForCausalLM", str(directory), **options)
    return as_decoder(model)


def saved_heads(path, name, revision=None, required=False):
    """The weights {name: tensor} in a file beside the model; without such a file {}, or if required OSError."""
    from transformers.utils import cached_file

    if not isinstance(path, str | Path):
        return {}
    errors = {"_raise_exceptions_for_missing_entries": required, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(spec_path(str(path)) or path, name, revision=revision, **errors)
    return safetensors.torch.load_file(found) if found else {}


def make_reference(args, path, lm, tokenizer):
    """The reference, without gradients: the model at path, or a copy of lm as it is before a checkpoint is loaded."""
    if path:
        ref, ref_tokenizer = load_model(args, path, "--ref-model")
        if ref_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise InputError(f"--ref-model {args.ref_model} differs from --model in its vocabulary")
        ref = as_decoder(ref.to(lm.device))
        if ref is not lm:  # one object may be given for both
            return ref.requires_grad_(False).eval()
    frozen = {id(weight): weight for weight in lm.parameters() if not weight.requires_grad}
    ref = copy.deepcopy(lm, frozen).requires_grad_(False).eval()  # shares frozen weights
    if args.lora_r:
        ref.disable_adapters()  # new adapters add zero
    return ref


# Last lines of a run and of its card: how to load the model and sample from it.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, OPTIONSmax_new_tokens={max_new_tokens}))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, OPTIONSreturn_tensors='pt'), max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""
CHAT_USAGE = """
# with messages, which the chat template writes:
# model([{{'role': 'user', 'content': 'your question'}}], ENDSmax_new_tokens={max_new_tokens})"""


def lines_of_use(lm, tokenizer, ids):
    """(text of a prompt, usage code) with which the exported tokenizer gives exactly these ids."""
    usage = SEQ2SEQ_USAGE if lm.config.is_encoder_decoder else USAGE
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    options = ends = ""
    if tokenizer(prompt)["input_ids"] != list(ids):  # special tokens written by a template
        prompt = tokenizer.decode(ids)
        options = "add_special_tokens=False, "
        if usage is USAGE and getattr(tokenizer, "chat_template", None):
            usage += CHAT_USAGE
    if lm._hf_peft_config_loaded:  # transformers takes the ends of its base
        ends = f"eos_token_id={tokenizer.ends}, "
    return prompt, usage.replace("OPTIONS", options + ends).replace("ENDS", ends)
