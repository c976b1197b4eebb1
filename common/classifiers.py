"""Sequence classifiers: how they read a text, and as the reward of a policy."""

import copy

import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import cached_file

from common.cli import InputError
from common.functions import spec_path
from common.models import adapter_base, load_pretrained, max_positions, share_frozen


class RewardModel:
    """A sequence classifier, or the LoRA adapter of one, as the reward: the logit of its only label, or of the one
    named in `path:label`. Weights that the policy lm has and does not train are shared with it."""

    def __init__(self, args, lm):
        name = args.reward
        label = ""
        if not spec_path(name):
            name, _, label = name.partition(":")
        path = str(spec_path(name) or name)
        is_adapter = bool(adapter_base(path))
        model, tokenizer = load_scorer(args, name, is_adapter)
        self.label = label_number(model, label, args.reward)
        self.model = model.requires_grad_(False).eval().to(lm.device)
        self.norm = stored_norm(model, path, is_adapter)
        self.shared = share_frozen(self.model, lm)
        total = sum(weight.numel() for weight in self.model.parameters())
        self.own = total - self.shared
        self.tokenizer = tokenizer
        self.tokenizer.truncation_side = "left"
        positions = max_positions(model) or 10**9
        self.limit = min(positions, tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, samples, ended, batch_size):
        """Scores (B,) of the texts; too long ones lose their beginning."""
        encoded = classifier_ids(self.tokenizer, samples, ended, max_length=self.limit)
        lengths = torch.tensor([len(ids) for ids in encoded])
        scores = torch.empty(len(encoded), dtype=torch.float64, device=self.model.device)
        for rows in lengths.argsort(stable=True).split(batch_size):
            batch = [encoded[row] for row in rows]
            logits = classifier_logits(self.model, batch)
            raw_scores = logits[:, self.label].double()
            scores[rows.to(scores.device)] = raw_scores * self.norm["gain"] + self.norm["bias"]
        return scores


def load_scorer(args, name, is_adapter):
    """(model, tokenizer) of --reward: name is that flag without the label. InputError for what is no classifier."""
    own_args = copy.copy(args)
    own_args.tokenizer = None  # that flag is about --model
    own_args.load_in_4bit = args.load_in_4bit and is_adapter
    keywords = {}
    if is_adapter:
        keywords["num_labels"] = 1
    auto_class = AutoModelForSequenceClassification
    model, tokenizer, missing = load_pretrained(auto_class, own_args, path=name, flag="--reward", **keywords)
    if missing:
        raise InputError(f"--reward {args.reward} is no sequence classifier, it has no {missing[0]}")
    return model, tokenizer


def label_number(model, label, reward):
    """Which logit the label names. The empty label names the only one; InputError, with the flag's value, where there
    are several or the model does not have the label."""
    numbers = {text: number for number, text in model.config.id2label.items()}
    if label in numbers:
        return numbers[label]
    if label or len(numbers) > 1:
        known = ", :".join(numbers)
        raise InputError(f"--reward {reward} must end with the label to score, one of :{known}")
    return 0


def stored_norm(model, path, is_adapter):
    """{"gain", "bias"} that reward.py has written: the reward is gain * score + bias. An adapter has it in a file."""
    if is_adapter:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(path, "reward_norm.safetensors", **quiet)
        if file:
            tensors = safetensors.torch.load_file(file)
            return {key: tensor.item() for key, tensor in tensors.items()}
    return getattr(model.config, "reward_norm", {"gain": 1.0, "bias": 0.0})


def classifier_ids(tokenizer, texts, ended, max_length=None):
    """The tokens of texts as a classifier reads them: with its end token, if it has one, where `ended` says so; at most
    max_length, on the tokenizer's truncation_side."""
    eos = tokenizer.eos_token_id
    truncation = {}
    if max_length:
        room_for_end = 0 if eos is None else 1
        truncation = {"truncation": True, "max_length": max_length - room_for_end}
    encoded = tokenizer(texts, **truncation)["input_ids"]
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
    pad = 0
    while pad in used:
        pad += 1
    lm.config.get_text_config().pad_token_id = pad
    vocabulary = lm.get_input_embeddings().num_embeddings
    if pad >= vocabulary and len(rows) > 1:
        logits = [classifier_logits(model, [ids]) for ids in rows]
        return torch.cat(logits)
    width = max(len(ids) for ids in rows)
    input_ids = []
    attention_mask = []
    for ids in rows:
        padding = width - len(ids)
        input_ids.append(ids + [pad] * padding)
        attention_mask.append([1] * len(ids) + [0] * padding)
    input_ids = torch.tensor(input_ids, device=lm.device)
    attention_mask = torch.tensor(attention_mask, device=lm.device)
    return model(input_ids=input_ids, attention_mask=attention_mask).logits
