"""Log-probabilities of tokens, without all logits in memory at once."""

import copy
import itertools
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.data import collate, first_label, local_rows, pad_rows
from common.terminal import screen

CHUNK = 2**24  # logits computed at a time: 64 MB in float32, and a loss holds three copies
CHUNK_ON_GPU = 2**28  # every chunk adds a whole gradient of the weight; on a GPU its time matters more than memory

# ---- Log-probabilities -----------------------------------------------------------------------------------------------


def token_nll(logits, labels):
    """-log softmax(logits)[label] per token, at least in float32, unreduced; zero where the label is -100.
    logits (..., V) and labels (...) are aligned: logits[t] predicts labels[t]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)


def token_logprobs(model, labels, places, temperature=1.0, also=None, **inputs):
    """(logprobs (N,), states (B, K, H), others (N,) or None): the one scoring function of all scripts.

    labels (B, K) are predicted from the last K positions of inputs, the arguments of the model's forward pass. places
    (N,): the labels to score, as positions in the flattened labels, because a GPU has to wait for a mask. logprobs are
    log softmax(logits / temperature), at least in float32. states[:, t] is what the output layer, and a head, reads for
    labels[:, t]. also(logits (n, V), labels (n,)) -> (n,), if given, computes others.
    """
    lm = getattr(model, "module", model)
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    is_plain = getattr(lm, "plain_output", False)
    read = []

    def terms_of(logits, labels):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            logits = logits / temperature
        terms = [-token_nll(logits, labels)]
        if also is not None:
            terms.append(also(logits, labels))
        return torch.stack(terms)

    def output_layer(layer, states):
        read.append(states)
        if not is_plain:
            return layer(states)
        return in_chunks(terms_of, layer, vocabulary, states.flatten(0, 1)[places], labels.flatten()[places])

    # within the forward pass, where wrappers have gathered the weights
    with forward_replaced(lm.get_output_embeddings(), output_layer):
        terms = model(**inputs, logits_to_keep=labels.shape[1], use_cache=False).logits
    if not is_plain:
        logits = terms.flatten(0, 1)[places]
        terms = in_chunks(terms_of, nn.Identity(), vocabulary, logits, labels.flatten()[places])
    logprobs = terms[0]
    others = None
    if also is not None:
        others = terms[1]
    return logprobs, read[0], others


def response_logprobs(model, query, query_mask, response, response_mask, temperature=1.0, also=None, places=None):
    """(logprobs (B, R), states (B, R, H), others (B, R) or None) of responses, as `token_logprobs` computes them. query
    (B, Q) is left-padded, response (B, R) right-padded; masks are True where a token counts, other tokens get 0.
    places: those of the mask (`true_places`), if they are known."""
    if places is None:
        places = true_places(response_mask)
    tokens = torch.cat([query, response], 1)[:, :-1]
    up_to_last = response_mask.flip(1).cumsum(1).flip(1) > 0  # holes included
    attention = torch.cat([query_mask, up_to_last], 1)[:, :-1].long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
    logprobs, states, others = token_logprobs(model, response, places, temperature, also, **inputs)
    if others is not None:
        others = spread(others, places, response.shape)
    return spread(logprobs, places, response.shape), states, others


def line_logprobs(model, lines, pad, also=None):
    """(logprobs (N,), others (N,) or None) of the tokens with a label in lines of examples (ids, labels), in order. No
    mask is passed to a decoder: padding is on the right, and without a cache transformers keeps apart what begins at
    position 0 (its masking_utils.py). An encoder-decoder has one example in a line, padded as in sampling."""
    lm = getattr(model, "module", model)
    if lm.config.is_encoder_decoder:
        rows = [line[0][0] for line in lines]
        row_labels = [line[0][1] for line in lines]
        begins = [first_label(labels) for labels in row_labels]
        ids = pad_rows(rows, pad, begins)
        labels = pad_rows(row_labels, -100, begins)
        mask = pad_rows([[1] * len(row) for row in rows], 0, begins)
        inputs = {"input_ids": ids, "attention_mask": mask}
    else:
        ids, positions, labels = collate(lines, pad)
        inputs = {"input_ids": ids, "position_ids": positions}
    first = int((labels != -100).any(0).int().argmax()) or ids.shape[1] - 1  # no label at all: one position
    labels = labels[:, first:]
    places = true_places(labels != -100).to(lm.device)
    inputs = {name: x[:, :-1].to(lm.device) for name, x in inputs.items()}
    logprobs, _, others = token_logprobs(model, labels.to(lm.device), places, also=also, **inputs)
    return logprobs, others


def true_places(mask):
    """(N,) where a mask (B, R) is True, as positions in the flattened mask. A GPU has to wait for this, so call it with
    a mask on the CPU."""
    return mask.flatten().nonzero()[:, 0]


def spread(tokens, places, shape):
    """A tensor of that shape (B, R) with tokens (N,) at places (N,) of the flattened rows, and zero elsewhere."""
    rows = tokens.new_zeros(shape).flatten()
    rows[places] = tokens
    return rows.view(shape)


# ---- Episodes --------------------------------------------------------------------------------------------------------


@dataclass
class Episodes:
    """Queries with responses: those of an iteration, on every process, or of a micro-batch. A script adds its own
    fields, (B,) or (B, R); None if not known."""

    query: torch.Tensor  # (B, Q) ids, left-padded
    query_mask: torch.Tensor  # (B, Q) bool
    response: torch.Tensor  # (B, R) ids as sampled, right-padded
    response_mask: torch.Tensor  # (B, R) bool, the end token counts

    def __setattr__(self, name, value):
        """For masks, also keeps what a GPU would have to wait for. Assign a new mask: changes in place go unnoticed."""
        super().__setattr__(name, value)
        if name == "query_mask":
            self.query_mask_cpu = value.cpu()
        if name == "response_mask":
            self.response_mask_cpu = value.cpu()
            self.places = true_places(self.response_mask_cpu).to(value.device)  # (N,) of the response tokens

    def take(self, rows):
        """The given rows (indices on the CPU), without columns in which none of them has a token."""
        if int(self.response_mask_cpu.sum()) != len(self.places):
            raise ValueError("response_mask was changed in place: assign a new one")
        query_mask = self.query_mask_cpu[rows]
        response_mask = self.response_mask_cpu[rows]
        begin = int(query_mask.any(0).int().argmax())
        end = int(response_mask.any(0).nonzero().max()) + 1
        on_device = rows.to(self.query.device)
        taken = copy.copy(self)
        kept = vars(taken)
        for name in [field.name for field in fields(self)]:
            values = kept[name]
            if name in ("query", "query_mask"):
                kept[name] = values[on_device, begin:]
            elif values is not None:
                kept[name] = values[on_device, :end] if values.ndim > 1 else values[on_device]
        kept["query_mask_cpu"] = query_mask[:, begin:]
        kept["response_mask_cpu"] = response_mask[:, :end]
        kept["places"] = true_places(response_mask[:, :end]).to(on_device.device)
        return taken

    def tokens(self):
        """The arguments of response_logprobs."""
        return self.query, self.query_mask, self.response, self.response_mask

    def of_tokens(self, rows):
        """(N,) values of rows (B, R) at the response tokens, row by row."""
        return rows.flatten()[self.places]

    def lengths(self):
        """(B,) tokens of query and response, up to the last one that counts, on the CPU."""
        up_to_last = self.response_mask_cpu.flip(1).cumsum(1) > 0
        return self.query_mask_cpu.sum(1) + up_to_last.sum(1)


def score_all(accelerator, episodes, micro_batch_size, score):
    """{name: (B, R)} of all episodes, on every process; score(episodes) gives {name: (b, r)} of a micro-batch. Each
    process scores its share of the rows, similar lengths together; all run the same number of forward passes."""
    count, width = episodes.response.shape
    local = torch.tensor(local_rows(accelerator, count))
    columns = {}
    for places in episodes.lengths()[local].argsort(stable=True).split(micro_batch_size):
        for name, values in score(episodes.take(local[places])).items():
            if name not in columns:
                columns[name] = values.new_zeros(len(local), width)
            columns[name][places.to(values.device), : values.shape[1]] = values[:, :width]
    return {name: accelerator.gather(column)[:count] for name, column in columns.items()}


# ---- The output layer ------------------------------------------------------------------------------------------------


def in_chunks(function, layer, vocabulary, states, *columns):
    """function(layer(states), *columns) (..., N) of states (N, H) and columns (N,), in chunks of rows with CHUNK logits
    in all. A chunk is recomputed in the backward pass, so that only one is in memory; what fits into two chunks
    is neither split nor recomputed."""

    def of_rows(states, *columns):
        return function(layer(states), *columns)

    size = max(1, (CHUNK_ON_GPU if states.is_cuda else CHUNK) // vocabulary)
    if len(states) <= 2 * size:
        return of_rows(states, *columns)
    kind = states.device.type
    autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
    parts = []
    with torch.autocast(kind, **autocast, cache_enabled=False):  # a single cast would sum gradients in its type
        for chunk in zip(*(column.split(size) for column in (states, *columns)), strict=True):
            parts.append(checkpoint(of_rows, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, -1)


@contextmanager
def in_float32(*modules):
    """Inside, the weights of modules (heads) are at least float32, although FSDP2 gathers them in bfloat16. What they
    compute is float32 only without autocast."""
    kept = []
    for module in itertools.chain(*(each.modules() for each in modules)):
        for name, weight in module.named_parameters(recurse=False):
            kept.append((module, name, weight))
            module._parameters[name] = weight.to(torch.promote_types(weight.dtype, torch.float32))
    try:
        yield
    finally:
        for module, name, weight in kept:
            module._parameters[name] = weight


@contextmanager
def forward_replaced(module, compute):
    """Inside, the module returns compute(its own output, states)."""
    forward = module.forward
    is_replaced = "forward" in vars(module)  # by a hook of accelerate
    module.forward = lambda states: compute(forward, states)
    try:
        yield
    finally:
        del module.forward  # restores that of its class
        if is_replaced:
            module.forward = forward


# ---- Pairs: (ids of chosen, ids of rejected, what a script has beside them) ------------------------------------------


def pair_length(pair):
    """Tokens of both texts of a pair."""
    return len(pair[0]) + len(pair[1])


def split_rows(accelerator, rows, lengths, packing, batch_size):
    """The micro-batches of this process: its share of a batch of row numbers, in lists of at most batch_size rows.
    lengths: of all rows, in tokens."""
    local = rows[accelerator.process_index :: accelerator.num_processes]
    if not packing:  # in rows of similar length there is little padding
        local = sorted(local, key=lambda row: lengths[row])
    return [local[i : i + batch_size] for i in range(0, len(local), batch_size)]


def score_pairs(accelerator, score, pairs, batch_size):
    """score(pairs) -> (2, b) for all pairs: (2, N) in float64 on every process, each of which scores a share."""
    device = accelerator.device
    local = [pairs[place] for place in local_rows(accelerator, len(pairs))]
    longest_first = torch.tensor([-pair_length(pair) for pair in local]).argsort(stable=True)
    scores = torch.empty(len(local), 2, dtype=torch.float64, device=device)
    screen.show("scoring pairs", len(local))
    for places in longest_first.split(batch_size):
        with torch.no_grad(), accelerator.autocast():
            scores[places.to(device)] = score([local[place] for place in places]).T.double()
        screen.advance(len(places))
    return accelerator.gather(scores)[: len(pairs)].T
