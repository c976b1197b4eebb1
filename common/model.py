"""Loads pretrained models: weights and tokenizers, 4 bits, frozen blocks, references, adapters, classifiers.

No architecture has a branch here. LoRA adapters (arXiv 2106.09685) are peft's layers without its wrapper, which renames
weights and lacks methods of a transformers model."""

import contextlib
import copy
import functools
import itertools
import json
import math
import os
import re
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from common.cli import InputError, read_options, spec_path
from common.data import collate, longest_first
from common.scoring import forward_replaced, in_float32
from common.seeding import rng
from common.terminal import screen


def load_pretrained(auto_class, args, path, flag, **keywords):
    """(model, tokenizer, names of weights missing from the files) of path: a directory, a hub id, a LoRA adapter in one
    of these, or a model. auto_class: a name in transformers. keywords go to from_pretrained."""
    import transformers

    if isinstance(path, str | Path):
        path = str(spec_path(str(path)) or path)
    revision = args.revision if flag == "--model" else None  # other flags name other repositories
    dtype = getattr(torch, args.dtype)
    keywords |= {"dtype": dtype, "attn_implementation": args.attn_implementation}
    keywords["trust_remote_code"] = args.trust_remote_code
    if args.load_in_4bit:  # NF4, arXiv 2305.14314
        compute = torch.bfloat16 if args.mixed_precision == "bf16" else dtype
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
        keywords["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    with loading("--tokenizer" if args.tokenizer else flag, args.tokenizer or path):
        tokenizer = load_tokenizer(args, path, revision)
    if args.template_options:
        options = read_options(args.template_options, "--template-options")
        tokenizer = copy.copy(tokenizer)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    with loading(flag, path):
        model, missing = load_weights(auto_class, path, revision, **keywords)
        model = repaired(model, args)
        kinds = [model.config.architectures]
        for adapter in getattr(model, "peft_config", {}).values():
            kinds.append(adapter.task_type)
            if adapter.peft_type != "LORA" or adapter.bias != "none" or adapter.use_dora:
                raise ValueError("its adapter is not plain LoRA: the export would lose part of it")
        is_lm = auto_class == "AutoModelForCausalLM"
        if is_lm and re.search("Classification|SEQ_CLS", str(kinds)):  # whose output layer may be the embedding
            raise ValueError("it is a classifier: give a language model")
        if is_lm and missing:
            raise ValueError(f"{missing[0]} is missing")
    return model, tokenizer, missing


@contextlib.contextmanager
def loading(flag, name):
    """Inside, libraries are quiet, and an exception becomes an InputError with its message."""
    from transformers.utils import logging

    screen.show(f"loading {flag}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if isinstance(name, str):
        is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
        if is_path and not spec_path(name):  # the libraries would take it for a name of the hub
            raise InputError(f"{flag} {name}: there is no such directory")
        if Path(name, "hf_model").is_dir():
            raise InputError(f"{flag} {name} is a run directory: give {name}/hf_model")
    try:
        yield
    except Exception as error:  # the libraries' errors have no common class
        raise InputError(f"{flag} {name!s:.400} cannot be loaded: {' '.join(str(error).split())}") from None


def load_tokenizer(args, path, revision):
    """The tokenizer of --tokenizer or of the model at path, or of its base if an adapter has none."""
    from transformers import AutoTokenizer

    source = args.tokenizer or getattr(path, "name_or_path", path)
    if not isinstance(source, str):
        return source
    revision = revision if source == path else None
    files = " ".join(file.name for file in Path(source).glob("*"))  # none for a hub id
    if files and not re.search("token|vocab|[.]model", files):
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
    if base:
        report = model.load_adapter(path, adapter_kwargs={"revision": revision})
        from_base = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
        missing = (missing & from_base) | {*report.missing_keys}  # without what the adapter brings
    return model, sorted(missing)


def repaired(model, args):
    """The model without peft's wrapper and without dropout; every row of its embeddings has a gradient."""
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


def adapter_base(path, revision=None):
    """(name, revision) of the base of a LoRA adapter in a directory or on the hub; None where path is no adapter."""
    from transformers.utils.peft_utils import find_adapter_config_file  # importing peft takes seconds

    config = {}
    with contextlib.suppress(OSError, TypeError, ValueError):  # TypeError: of an object, or where there is none
        config = json.loads(Path(find_adapter_config_file(spec_path(path) or path, revision=revision)).read_text())
    return config.get("base_model_name_or_path"), config.get("revision")


def load_model(args, path, flag="--model"):
    """The language model and its tokenizer, with a padding token."""
    model, tokenizer, _ = load_pretrained("AutoModelForCausalLM", args, path, flag)
    if tokenizer.eos_token_id is None:
        raise InputError(f"{flag}: the tokenizer has no end-of-sequence token, so no response could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # a filler: masks come from lengths, never from ids
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
    """The language model on the device and its tokenizer, with weights frozen or adapters added as the flags say."""
    lm, tokenizer = load_model(args, path)
    lm = as_decoder(lm.to(device))
    train_adapters(lm, args)
    freeze(lm, args.num_layers_unfrozen)
    return lm, tokenizer


def end_tokens(lm):
    """Ids of the tokens that end a response: instruction-tuned models end turns and documents differently."""
    ends = lm.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]


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
    """The model of --ref-model, or the policy as it is now, before a checkpoint is loaded, without gradients."""
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
        from transformers.modeling_outputs import BaseModelOutput

        inputs = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask, "decoder_input_ids": ids}
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


def draw_layers(head, seed, *stream):
    """Draws the linear layers of a new head: torch's default, but keyed by the seed, stream and number of a weight."""
    for number, weight in enumerate(head.parameters()):
        if weight.ndim == 2:
            bound = weight.shape[1] ** -0.5  # also of its bias, which comes next
        drawn = rng(seed, *stream, number).uniform(-bound, bound, weight.shape)
        weight.data.copy_(torch.from_numpy(drawn))


@contextlib.contextmanager
def unsharded(model):
    """Inside, weights sharded by FSDP2 are gathered once and not for every token. Afterwards all of them are shards
    again, while forward passes alone would leave some gathered, and in bfloat16."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the whole model first
    with contextlib.ExitStack() as stack:
        for module in sharded:
            state = module._get_fsdp_state()
            state._lazy_init()  # otherwise the first block called would take itself for the whole model
            if group := state._fsdp_param_group:
                stack.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
            stack.callback(module.reshard)
        yield


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
def for_sampling(lm, dtype=None):
    """Inside, adapters are added to a copy of their base weight, so that a tied layer does not change, and autocast
    keeps the casts of frozen weights: both once and not for every token. Afterwards all is bitwise as before. Adapters
    of 4-bit or 16-bit weights stay apart, since sums would be rounded. dtype: of autocast, in which sums are kept."""
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
            with torch.no_grad():
                layer.merge(safe_merge=True)  # into new memory
            if dtype is not None and not isinstance(base, nn.Embedding):
                base.weight.data = base.weight.data.to(dtype)
        yield


# ---- Classifiers -----------------------------------------------------------------------------------------------------


class RewardModel:
    """A sequence classifier, or a LoRA adapter for one, that scores by the logit of its only label or of path:label."""

    def __init__(self, args, lm, chats=False):
        path, _, label = args.reward.partition(":")
        is_adapter = adapter_base(path)[0] is not None
        args = copy.copy(args)
        args.load_in_4bit &= is_adapter
        vars(args).update(tokenizer=None, attn_implementation=None, template_options=())  # which are about --model
        options = {"num_labels": 1} if is_adapter else {}
        kind = "AutoModelForSequenceClassification"
        model, self.tokenizer, missing = load_pretrained(kind, args, path, "--reward", **options)
        if missing:
            raise InputError(f"--reward {args.reward} is not a sequence classifier: it has no {missing[0]}")
        labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
        if label not in labels and (label or len(labels) > 1):
            raise InputError(f"--reward {args.reward} must end with the label to score, one of :{', :'.join(labels)}")
        self.label = labels.index(label) if label else 0
        self.name = args.reward
        self.batch_size = args.micro_batch_size
        self.chats = chats  # whether the prompts are chats
        raise_heads(model)
        self.model = model.requires_grad_(False).eval().to(lm.device)
        self.tokenizer.truncation_side = "left"
        self.limit = min(max_positions(model), self.tokenizer.model_max_length, 10**9)  # which may be no limit

    @torch.no_grad()
    def __call__(self, samples, ended):
        """Scores (B,) of the texts. The beginning of a text that is too long is cut off."""
        encoded = classifier_ids(self.tokenizer, samples, ended, self.chats, max_length=self.limit)
        scores = torch.empty(len(encoded), dtype=torch.float64, device=self.model.device)
        for rows in longest_first([len(ids) for ids in encoded], self.batch_size):
            logits = classifier_logits(self.model, [[encoded[row]] for row in rows])
            scores[rows] = logits[:, self.label].double()
        return scores


class FloatHead:
    """The head of a classifier, at least in float32: in bfloat16, 1000 texts had fewer than 600 different scores."""

    def forward(self, states, **options):
        with in_float32(self), torch.autocast(states.device.type, enabled=False):
            return super().forward(states.to(next(self.parameters()).dtype), **options)


def raise_heads(model):
    """Makes FloatHeads of the modules above a classifier's base model; returns their names."""
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    names.discard(model.base_model_prefix)
    for name in names:
        head = getattr(model, name)
        if not isinstance(head, FloatHead):
            head.__class__ = type(type(head).__name__, (FloatHead, type(head)), {})
        for weight in head.parameters():
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return sorted(names)


def classifier_ids(tokenizer, texts, ended, chats, max_length=None):
    """The tokens of texts as a classifier reads them, cut to max_length on the tokenizer's truncation_side. Texts in
    `ended` have one end: with chats that of a turn (`turn_end`), otherwise the end token."""
    eos = tokenizer.eos_token_id
    end = turn_end(tokenizer)[1] if chats else []
    if not end and eos is not None:
        end = [eos]
    room = max_length and max_length - len(end)
    encoded = tokenizer(list(texts), truncation=bool(max_length), max_length=room)["input_ids"]
    for text, ids, is_ended in zip(texts, encoded, ended, strict=True):
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # a chat template writes its own
        is_added = ids[-1:] == [eos] and not text.endswith(tokenizer.eos_token) and eos != tokenizer.sep_token_id
        if is_added or ids[-2:] == [eos, eos]:
            del ids[-1]  # some tokenizers append it to every text; for RoBERTa and others it is a part of the input
        if is_ended or not ids:
            there = max(number for number in range(len(end) + 1) if ids[len(ids) - number :] == end[:number])
            ids += end[there:]
    return encoded


def turn_end(tokenizer):
    """What the chat template writes after an answer, from a special token on, as (text, ids); both empty if there is
    none. A newline behind it belongs to it: it is the last token of the chats on which a classifier was trained."""
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        _, _, behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("answer")
    except Exception:  # templates raise what they like, and a tokenizer without one an error
        return "", []
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    special = [place for place, token in enumerate(ids) if token in tokenizer.added_tokens_decoder]
    if not special:
        return "", []
    ids = ids[special[0] :]
    return behind[behind.index(tokenizer.convert_ids_to_tokens(ids[0])) :], ids


def classifier_logits(model, lines):
    """Logits (N, labels) of the texts (lists of ids) in lines, one line after the other. A decoder takes several texts
    per line and is read at the last token of each, whatever its configuration calls padding. Other models take one text
    per line and find its end themselves, some by a padding token, which therefore is one that no text has."""
    lm = getattr(model, "module", model)
    is_decoder = hasattr(lm, "score")  # a head that scores every token, of which transformers takes one
    used = set() if is_decoder else set().union(*itertools.chain(*lines))
    pad = min({*range(len(used) + 1)} - used)
    lm.config.get_text_config().pad_token_id = pad  # without one, transformers refuses several rows
    examples = [[(ids, [False] * (len(ids) - 1) + [True]) for ids in line] for line in lines]
    ids, positions, is_end = collate(examples, pad, no_label=False)
    ends = is_end.flatten().nonzero()[:, 0].to(lm.device)  # while it is on the CPU: a GPU would wait
    ids = ids.to(lm.device)
    if not is_decoder:
        return model(input_ids=ids, attention_mask=(ids != pad).long()).logits

    def at_ends(head, states):
        """The logits of all texts for every token, of which transformers takes one."""
        logits = head(states.flatten(0, 1)[ends])
        return logits.flatten().expand(*is_end.shape, -1)

    with forward_replaced(lm.score, at_ends):
        logits = model(input_ids=ids, position_ids=positions.to(lm.device), use_cache=False).logits
    return logits[0].view(len(ends), -1)


SECOND = torch.arange(9) >= 4  # which of nine tokens belong to the second of two rows


@torch.no_grad()
def has_plain_output(lm):
    """Whether the logits are the output layer's own. Cohere, Granite and Gemma 2 scale or cap them."""
    mark = torch.zeros(1, 1, lm.get_output_embeddings().weight.shape[0], device=lm.device)
    with forward_replaced(lm.get_output_embeddings(), lambda layer, states: mark):
        return one_token(lm).logits is mark


def one_token(lm):
    with autocast_on_gpu(lm):
        ids = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
        return lm(input_ids=ids, use_cache=False, logits_to_keep=1)


def autocast_on_gpu(lm):
    """Flash attention does not support float32."""
    return torch.autocast(lm.device.type, torch.bfloat16, enabled=lm.device.type == "cuda")


def reads_padding(lm):
    """Whether masked padding on the left of a row changes its result."""
    positions = (torch.arange(9) - 4).clamp(min=0)
    return leaks(lm, ~SECOND, SECOND, attention_mask=SECOND.long(), position_ids=positions)


def can_pack(lm, packing, say):
    """With packing on, whether the model's layers keep apart what begins at position 0 of a line. Says why not."""
    if not packing or lm.config.is_encoder_decoder:
        return False
    if "flash" in str(lm.config._attn_implementation):
        say("--packing is off: flash attention reads such positions only if there is a single line")
        return False
    if leaks(lm, ~SECOND, SECOND, position_ids=torch.tensor([*range(4), *range(5)])):
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
    with forward_replaced(lm.get_input_embeddings(), embed), torch.enable_grad(), autocast_on_gpu(lm):
        states = lm.base_model(**inputs, use_cache=False)[0]  # (1, T, H)
    if embeddings[0].shape[:2] != states.shape[:2]:  # a model that arranges rows or positions in its own way
        return True
    directions = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    directions[:, ~readers] = 0
    (gradient,) = torch.autograd.grad(states, embeddings[0], directions)  # (1, T, H)
    return bool(gradient[0, sources].abs().amax() > 0)  # nan, of eager attention in float64, is found while sampling


def routers(lm):
    """{name: module} of the routers of a mixture of experts, which choose the experts of tokens."""
    found = {}
    for name, module in lm.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "router" or (last == "gate" and hasattr(lm.get_submodule(parent), "experts")):
            found[name] = module
    return found
