"""Sequence classifiers: how they read a text, and how they reward a policy."""

import copy
import itertools

import torch

from common.cli import InputError
from common.forward import forward_replaced, in_float32, true_places
from common.functions import spec_path
from common.models import adapter_base, load_pretrained, max_positions, share_frozen
from common.tokens import collate


class RewardModel:
    """A sequence classifier, or a LoRA adapter for one, as the reward: the logit of its only label, or of the label in
    `path:label`. Weights that the policy lm also has and does not train are shared with it."""

    def __init__(self, args, lm):
        path = args.reward
        label = None
        if not spec_path(path):
            path, _, label = path.partition(":")
        own_args = copy.copy(args)
        own_args.tokenizer = None  # this flag and the next two are about --model
        own_args.attn_implementation = None
        own_args.template_options = ()
        options = {"num_labels": 1}
        if not adapter_base(str(spec_path(path) or path)):
            own_args.load_in_4bit = False
            options = {}
        auto_class = "AutoModelForSequenceClassification"
        model, self.tokenizer, missing = load_pretrained(auto_class, own_args, path, "--reward", **options)
        if missing:
            raise InputError(f"--reward {args.reward} is not a sequence classifier: it has no {missing[0]}")
        labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
        if len(labels) == 1 and not label:
            label = labels[0]
        if label not in labels:
            raise InputError(f"--reward {args.reward} must end with the label to score, one of :{', :'.join(labels)}")
        self.label = labels.index(label)
        raise_heads(model)
        self.model = model.requires_grad_(False).eval().to(lm.device)
        share_frozen(self.model, lm)
        self.tokenizer.truncation_side = "left"
        self.limit = min(max_positions(model) or 10**9, self.tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, samples, ended, batch_size):
        """Scores (B,) of the texts. The beginning of a text that is too long is cut off."""
        encoded = classifier_ids(self.tokenizer, samples, ended, max_length=self.limit)
        lengths = torch.tensor([len(ids) for ids in encoded])
        scores = torch.empty(len(encoded), dtype=torch.float64, device=self.model.device)
        for rows in lengths.argsort(stable=True).split(batch_size):
            logits = classifier_logits(self.model, [[encoded[row]] for row in rows])
            scores[rows.to(scores.device)] = logits[:, self.label].double()
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


def classifier_ids(tokenizer, texts, ended, max_length=None):
    """The tokens of texts as a classifier reads them, cut to max_length on the tokenizer's truncation_side. Texts in
    `ended` have one end: that of a turn (`turn_end`) if the text has one, otherwise the end token."""
    eos = tokenizer.eos_token_id
    end_token = [] if eos is None else [eos]
    end_of_turn = turn_end(tokenizer) or end_token
    room = max_length and max_length - len(end_of_turn)
    encoded = tokenizer(texts, truncation=bool(max_length), max_length=room)["input_ids"]
    for text, ids, is_ended in zip(texts, encoded, ended, strict=True):
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # a chat template writes its own
        end = end_token
        if end_of_turn and tokenizer.convert_ids_to_tokens(end_of_turn[0]) in text:
            end = end_of_turn
        has_two_ends = ids[-2:] == [eos, eos]
        has_other_end = ids[-1:] == [eos] and ids[-len(end) :] != end
        if has_two_ends or has_other_end:
            del ids[-1]  # some tokenizers append it to every text
        if not ids or (is_ended and ids[-len(end) :] != end):
            ids += end
    return encoded


def turn_end(tokenizer):
    """Ids of what the chat template writes after an answer, from a special token to the last; [] if there is none."""
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
    """Logits (N, labels) of the texts in lines, one line after the other; a line is a list of texts, a text a list of
    ids. A decoder takes several texts per line and is read at the last token of each, whatever its configuration calls
    padding. Other models take one text per line and find its end themselves, some by padding."""
    lm = getattr(model, "module", model)
    examples = []  # (ids, which of them is the last) of each text
    for line in lines:
        examples.append([(ids, [False] * (len(ids) - 1) + [True]) for ids in line])
    pad = 0
    if not scores_tokens(lm):
        used = set().union(*itertools.chain(*lines))
        pad = next(number for number in itertools.count() if number not in used)
    ids, positions, is_end = collate(examples, pad, no_label=False)
    ends = true_places(is_end).to(lm.device)
    ids = ids.to(lm.device)
    lm.config.get_text_config().pad_token_id = pad  # without one, transformers refuses several rows
    if scores_tokens(lm):

        def at_ends(head, states):
            """The logits of all texts for every token, of which transformers takes one."""
            logits = head(states.flatten(0, 1)[ends])
            return logits.flatten().expand(*is_end.shape, -1)

        with forward_replaced(lm.score, at_ends):
            logits = model(input_ids=ids, position_ids=positions.to(lm.device), use_cache=False).logits
        return logits[0].view(len(ends), -1)
    mask = is_end.long().flip(1).cumsum(1).flip(1).to(lm.device)  # 1 up to the end
    return model(input_ids=ids, attention_mask=mask).logits


def scores_tokens(lm):
    """Whether the classifier is a decoder, whose head scores every token, of which transformers takes one."""
    return hasattr(lm, "score")
