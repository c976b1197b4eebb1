"""The decoding loop. Every token is a keyed draw: a response depends on the seed and its place among the queries."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from common.errors import NotFinite
from common.lm.graphs import GRAPHS, Step, can_capture
from common.lm.structure import Seq2Seq, end_tokens
from common.lm.tokens import CONTEXT, pad_rows, stopped
from common.report import screen
from common.seeding import rng


def uniforms(seed, stream, number, rows, n):
    """(len(rows), n) float64 tensor in [0, 1): row i depends on rows[i], a global index, and not on its neighbours."""
    draws = [rng(seed, stream, number, row).random(n) for row in rows]
    return torch.from_numpy(np.reshape(draws, (len(rows), n)))


def draw(logits, uniforms, temperature, top_k=0, top_p=1.0):
    """One token id per row from softmax(logits / temperature) (B, V), by inverse CDF in float64. The uniforms (B,) are
    scaled by the last cumulative value, and searched to the right, so no token of probability zero is drawn."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if 0 < top_k < logits.shape[-1]:
        lowest_kept = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest_kept, -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # the probability of all tokens that rank above this one
        ranked = ranked.masked_fill(before >= top_p, 0.0)
        probs = probs.scatter(1, order, ranked)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    below_total = total.nextafter(torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below_total)
    place = torch.searchsorted(cdf, target, right=True)
    return place[:, 0].clamp(max=probs.shape[1] - 1)  # where probabilities are nan, which `sample` finds


LEAVING = 3 / 4  # rows that have ended leave the batch when no more than this share of it goes on
LEAVING_GRAPH = 1 / 2  # the same with graphs, of which every shape needs its own
LOOK = 1  # tokens after which the loop looks at what was drawn, to see which rows have ended
LOOK_ON_GPU = 16  # the host has to wait for a GPU each time; what a row draws after its end is dropped


@torch.no_grad()
def sample(model, tokenizer, contexts, draws, limits, stop=(), temperature=1.0, top_k=0, top_p=1.0):
    """Responses to contexts, both lists of ids: at most limits[i] ids, of which the last may be an end token of the
    model or complete a string of stop. draws: (B, R) float64 uniforms on the device. NotFinite if logits are not."""
    device = draws.device
    ends = end_tokens(model)
    responses = [[] for _ in contexts]
    rows = list(range(len(contexts)))  # those in the batch
    complete = set()  # those that are, which may still be there
    drawn = []  # (b,) each: the tokens since the last look, -1 where logits were not finite
    look = LOOK if device.type == "cpu" else LOOK_ON_GPU
    decoder = Decoder(model, contexts, limits, tokenizer.pad_token_id, device)
    logits = decoder.read_contexts()
    for t in range(max(limits)):
        newest = draw(logits, draws[:, t], temperature, top_k, top_p)
        drawn.append(torch.where(logits.amax(-1).isfinite(), newest, -1))
        if len(drawn) == look or t + 1 == max(limits):
            for row, ids in zip(rows, torch.stack(drawn, 1).tolist(), strict=True):
                response = responses[row]
                if row not in complete and add_ids(response, ids, contexts[row], limits[row], ends, stop, tokenizer):
                    complete.add(row)
                    screen.advance(1)
                if response[-1] == -1:
                    where = f"response token {len(response)} after the ids {contexts[row]!s:.60}"
                    raise NotFinite(f"logits are not finite at {where}")
            drawn = []
            going = [place for place, row in enumerate(rows) if row not in complete]
            if not going:
                break
            if len(going) <= decoder.leaving * len(rows):
                rows = [rows[place] for place in going]
                places = torch.tensor(going, device=device)
                draws = draws[places]
                newest = newest[places]
                decoder.keep(places)
        logits = decoder.read(newest)
    return responses


class Decoder:
    """Forward passes over rows that grow by a token. A model's own cache, which rows may not leave, is not used."""

    def __init__(self, model, contexts, limits, pad_id, device):
        """contexts: lists of ids. limits: how many ids may follow each."""
        lengths = [len(ids) for ids in contexts]
        self.model = model
        self.contexts = contexts
        self.tokens = pad_rows(contexts, pad_id, begins=lengths, device=device)  # (B, T)
        self.attention = pad_rows([[1] * length for length in lengths], 0, begins=lengths, device=device)
        # a row that has ended may stay in the batch for a while: its positions go no further than the model's
        ends_at = [length + limit for length, limit in zip(lengths, limits, strict=True)]
        self.last_position = torch.tensor(ends_at, device=device)[:, None] - 1  # (B, 1)
        self.most_tokens = self.tokens.shape[1] + max(limits)
        self.num_passes = 0
        self.cache = None
        self.step = None  # of a pass as a graph
        self.leaving = LEAVING  # the share of rows that go on at which the others leave

    def read_contexts(self):
        """Logits (B, V) behind the contexts. Equal ones, as those of a group are, are read once."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        number_of = {ids: number for number, ids in enumerate(dict.fromkeys(map(tuple, self.contexts)))}
        numbers = [number_of[tuple(ids)] for ids in self.contexts]
        firsts = torch.tensor([numbers.index(number) for number in range(len(number_of))], device=self.tokens.device)
        output = self.forward(self.tokens[firsts], self.attention[firsts], self.last_position[firsts])
        cache = getattr(output, "past_key_values", None)
        if type(cache) in (DynamicCache, EncoderDecoderCache):  # of others rows may be unable to leave
            self.cache = cache
            for layer in getattr(cache, "self_attention_cache", cache).layers:
                if self.tokens.device.type != "cpu":
                    layer.is_compileable = True  # else transformers waits at every token, to see if a mask has padding
        numbers = torch.tensor(numbers, device=self.tokens.device)
        if self.tokens.device.type in GRAPHS and can_capture(self.model, self.cache):
            self.step = Step(self.model, self.cache, numbers, self.attention, self.last_position, self.most_tokens)
            self.leaving = LEAVING_GRAPH
        elif self.cache is not None and len(firsts) < len(numbers):
            self.cache.reorder_cache(numbers)
        return output.logits[:, -1][numbers]

    def read(self, newest):
        """Logits (b, V) behind one more token (b,) of each row in the batch."""
        if self.step:
            return self.step(newest)
        self.tokens = torch.cat([self.tokens, newest[:, None]], 1)
        self.attention = F.pad(self.attention, (0, 1), value=1)
        return self.forward(self.tokens, self.attention, self.last_position).logits[:, -1]

    def forward(self, tokens, attention, last_position):
        """The model's output for what is not in the cache."""
        positions = (attention.cumsum(1) - 1).clamp(min=0).minimum(last_position)
        unread = tokens.shape[1] if self.cache is None else 1
        self.num_passes += 1
        # an encoder-decoder learns from the number of logits how many of the tokens are the response
        num_logits = self.num_passes if isinstance(self.model, Seq2Seq) else 1
        return self.model(
            input_ids=tokens[:, -unread:], attention_mask=attention, position_ids=positions[:, -unread:],
            past_key_values=self.cache, use_cache=True, logits_to_keep=num_logits,
        )  # fmt: skip

    def keep(self, places):
        """Lets the rows at all other places of the batch leave."""
        if self.step:
            self.step.fit(places)
            return
        self.tokens = self.tokens[places]
        self.attention = self.attention[places]
        self.last_position = self.last_position[places]
        if self.cache is not None:
            self.cache.reorder_cache(places)


def add_ids(response, ids, context, limit, ends, stop, tokenizer):
    """Appends ids to a response to the ids in context up to its end: an end token, the token that completes a string of
    stop, the limit, or -1. Returns whether it is complete."""
    window = CONTEXT + max((len(text.encode()) for text in stop), default=0)  # few tokens have no byte
    for token in ids:
        response.append(token)
        if token in ends or token == -1 or len(response) == limit:
            return True
        if stop:
            text = tokenizer.decode([*context[-CONTEXT:], *response][-window:])
            # the whole text decides: the window may begin within a character, or before the response
            if any(part in text for part in ("\ufffd", *stop)) and stopped(tokenizer, [context], [response], stop)[0]:
                return True
    return False


def have_ended(lm, tokenizer, queries, responses, stop):
    """Whether each response (ids) ended by itself: by an end token of the model, or a stop string."""
    ends = end_tokens(lm)
    with_stop = stopped(tokenizer, queries, responses, stop)
    return [by_stop or ids[-1] in ends for by_stop, ids in zip(with_stop, responses, strict=True)]
