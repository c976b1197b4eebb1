"""Sequence classifiers: the logits of texts, and reward models."""

import copy
import itertools
import math

import torch

from common.errors import InputError, NotFinite
from common.functions import adapter_base
from common.launch import local_rows
from common.lm.chat import turn_end
from common.lm.load import load_pretrained
from common.lm.logprobs import in_float32
from common.lm.structure import forward_replaced, max_positions
from common.lm.tokens import collate, longest_first, tokenize


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

    def score_all(self, accelerator, samples, ended):
        """Scores of the texts, a list of floats on every process. Each scores a share. NotFinite if a score is not."""
        local = local_rows(accelerator, len(samples))
        with accelerator.autocast():
            own = self([samples[row] for row in local], [ended[row] for row in local])
        scores = accelerator.gather(own)[: len(samples)].tolist()
        score_of = {}
        for row, text in enumerate(zip(samples, ended, strict=True)):
            # rounding, which depends on the neighbours, would give equal texts different scores
            scores[row] = score_of.setdefault(text, scores[row])
            if not math.isfinite(scores[row]):
                raise NotFinite(f"{self.name}: {scores[row]} for a text that ends with {samples[row][-60:]!r}")
        return scores


class FloatHead:
    """The head of a classifier, at least in float32: in bfloat16, 1000 texts had fewer than 600 different scores."""

    def forward(self, states, **options):
        with in_float32(self), torch.autocast(states.device.type, enabled=False):
            return super().forward(states.to(next(self.parameters()).dtype), **options)


def raise_heads(model):
    """Makes FloatHeads of the modules above a classifier's base model; returns their names."""
    names = {name.split(".")[0] for name, _ in model.named_parameters()} - {model.base_model_prefix}
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
    appended = "template" if eos == tokenizer.sep_token_id else "never"  # for RoBERTa it is a part of every text
    encoded = tokenize(tokenizer, texts, True, appended, truncation=bool(max_length), max_length=room)
    for ids, is_ended in zip(encoded, ended, strict=True):
        if is_ended or not ids:
            there = max(number for number in range(len(end) + 1) if ids[len(ids) - number :] == end[:number])
            ids += end[there:]
    return encoded


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
