"""Sequence classifiers: how they read a text, and as the reward of a policy."""

import copy

import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import cached_file

from common.cli import InputError, spec_path, stop_if
from common.models import adapter_base, load_pretrained, max_positions, share_frozen


class RewardModel:
    """A sequence classifier, or the LoRA adapter of one, as the reward: the logit of its only label, or of the one
    named in `path:label`. Weights that the policy lm has and does not train are shared with it."""

    def __init__(self, args, lm):
        name = args.reward
        label = ""
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
        self.norm = stored_norm(model, path, is_adapter)
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


def stored_norm(model, path, is_adapter):
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
