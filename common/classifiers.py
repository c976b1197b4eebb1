"""Sequence classifiers: how they read a text, and as the reward of a policy."""

import contextlib
import copy
import itertools

import safetensors.torch
import torch

from common.cli import InputError
from common.functions import spec_path
from common.models import adapter_base, load_pretrained, max_positions, share_frozen
from common.tokens import collate


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
            logits = classifier_logits(self.model, [[encoded[row]] for row in rows])
            scores[rows.to(scores.device)] = logits[:, self.label].double()
        return scores


def load_scorer(args, name, is_adapter):
    """(model, tokenizer) of --reward: name is that flag without the label. InputError for what is no classifier."""
    own_args = copy.copy(args)
    own_args.tokenizer = None  # this flag and the next are about --model
    own_args.attn_implementation = None
    own_args.load_in_4bit = args.load_in_4bit and is_adapter
    keywords = {}
    if is_adapter:
        keywords["num_labels"] = 1
    auto_class = "AutoModelForSequenceClassification"
    model, tokenizer, missing = load_pretrained(auto_class, own_args, path=name, flag="--reward", **keywords)
    if missing:
        raise InputError(f"--reward {args.reward} is no sequence classifier, it has no {missing[0]}")
    norm_file = "config.json"
    norm = getattr(model.config, "reward_norm", {})  # earlier versions of reward.py wrote it
    if is_adapter:
        norm_file = "reward_norm.safetensors"
        norm = adapter_norm(str(spec_path(name) or name), norm_file)
    if norm.get("gain", 1.0) != 1.0:
        problem = f"its {norm_file} scales the scores by reward_norm, which is not applied any more"
        raise InputError(
            f"--reward {args.reward}: {problem}: remove it there, and give ppo.py --score-scaling ref-norm"
        )
    raise_heads(model)
    return model, tokenizer


def adapter_norm(path, name):
    """The tensors of a file beside a LoRA adapter, {} without it."""
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, name, **quiet)
    return safetensors.torch.load_file(file) if file else {}


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


class FloatHead:
    """The head of a classifier, at least in float32 and outside of autocast: in bfloat16, 1000 texts would have fewer
    than 600 scores."""

    def forward(self, states, **options):
        weight = next(self.parameters())
        with torch.autocast(states.device.type, enabled=False):
            return super().forward(states.to(weight.dtype), **options)


def raise_heads(model):
    """Makes a FloatHead of what stands above the base model of a classifier; returns the names."""
    names = sorted({name.split(".")[0] for name, _ in model.named_parameters()} - {model.base_model_prefix})
    for name in names:
        head = getattr(model, name)
        if not isinstance(head, FloatHead):
            head.__class__ = type(type(head).__name__, (FloatHead, type(head)), {})
        for weight in head.parameters():
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return names


def classifier_ids(tokenizer, texts, ended, max_length=None):
    """The tokens of texts as a classifier reads them, at most max_length, on the tokenizer's truncation_side. Where
    `ended` says so they have one end: that of a turn (`turn_end`) in a text that holds one, else the end token."""
    eos = tokenizer.eos_token_id
    end_of_turn = turn_end(tokenizer)
    truncation = {}
    if max_length:
        room_for_end = len(end_of_turn) or (0 if eos is None else 1)
        truncation = {"truncation": True, "max_length": max_length - room_for_end}
    encoded = tokenizer(texts, **truncation)["input_ids"]
    for text, ids, is_ended in zip(texts, encoded, ended, strict=True):
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # a chat template writes its own
        end = [] if eos is None else [eos]
        if end_of_turn and tokenizer.convert_ids_to_tokens(end_of_turn[0]) in text:
            end = end_of_turn
        if ids[-2:] == [eos, eos] or (ids[-1:] == [eos] and ids[-len(end) :] != end):
            del ids[-1]  # some tokenizers put it behind every text
        if not ids or (is_ended and ids[-len(end) :] != end):
            ids += end
    return encoded


def turn_end(tokenizer):
    """Ids of what the chat template writes behind an answer, from a special token to the last one; [] without one."""
    if not tokenizer.chat_template:
        return []
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # templates raise what they like
        return []
    _, _, behind = text.rpartition("answer")
    ids = tokenizer(behind.rstrip(), add_special_tokens=False)["input_ids"]
    special = [place for place, token in enumerate(ids) if token in tokenizer.added_tokens_decoder]
    return ids[special[0] : special[-1] + 1] if special else []


def classifier_logits(model, lines):
    """Logits (N, labels) of the texts in lines, one line after the other; a line is a list of texts, a text one of ids.

    A decoder is asked at the last token of every text, whatever its configuration calls padding. Its texts may stand
    side by side, like the rows of sft.py. Others take one text a line and find the place themselves, some by padding.
    """
    lm = getattr(model, "module", model)
    examples = [[with_end(ids) for ids in line] for line in lines]
    if scores_tokens(lm):
        ids, positions, is_end = (x.to(lm.device) for x in collate(examples, 0, no_label=False))
        lm.config.get_text_config().pad_token_id = 0  # transformers asks for one; what it reads by it is not used
        with read_at(lm.score, is_end):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits[0].view(int(is_end.sum()), -1)
    used = set().union(*itertools.chain(*lines))
    pad = next(number for number in itertools.count() if number not in used)
    ids, _, is_end = (x.to(lm.device) for x in collate(examples, pad, no_label=False))
    lm.config.get_text_config().pad_token_id = pad
    mask = is_end.long().flip(1).cumsum(1).flip(1)  # 1 up to the end
    return model(input_ids=ids, attention_mask=mask).logits


def scores_tokens(lm):
    """Whether the classifier is a decoder, whose head scores every token, of which transformers takes one."""
    return hasattr(lm, "score")


def with_end(ids):
    """An example (ids, labels) of a text; its labels say which token is the last one."""
    return ids, [False] * (len(ids) - 1) + [True]


@contextlib.contextmanager
def read_at(head, places):
    """Within it, the head returns for every token the logits of those at places (B, T), one behind the other."""
    of_class = head.forward

    def forward(states):
        logits = of_class(states[places])  # (N, labels)
        return logits.flatten().expand(*places.shape, -1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
