"""Log-probabilities of tokens: (model(ids).logits / temperature).log_softmax(-1) at the labels.

What is known of the N tokens that have a label is flat, (N,), in the order of the lines."""

import itertools
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.launch import local_rows
from common.lm.structure import forward_replaced
from common.lm.tokens import collate, first_label, longest_first, pad_rows
from common.report import screen

CHUNK = 2**24  # logits computed at a time: 64 MB in float32, and a loss holds three copies
CHUNK_ON_GPU = 2**28  # every chunk adds a whole gradient of the weight; on a GPU its time matters more than memory


def token_nll(logits, labels):
    """-log softmax(logits)[t, labels[t]] at least in float32; 0 at labels of -100. logits (..., V), labels (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)


def token_entropies(logits, labels):
    """(n,) entropies of softmax(logits), logits (n, V): for `also` of `line_logprobs`."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def line_logprobs(model, lines, temperature=1.0, also=None):
    """(logprobs (N,), states (N, H), others (N,) or None) of the tokens with a label, by `token_logprobs`. A line is a
    list of examples (ids, labels, ...), of one for an encoder-decoder; a label is the id itself, or -100."""
    lm = getattr(model, "module", model)
    if lm.config.is_encoder_decoder:
        rows = [line[0][0] for line in lines]
        row_labels = [line[0][1] for line in lines]
        begins = [first_label(labels) for labels in row_labels]  # padded as in sampling
        mask = pad_rows([[1] * len(row) for row in rows], 0, begins)
        columns = {"input_ids": pad_rows(rows, 0, begins), "attention_mask": mask}
        labels = pad_rows(row_labels, -100, begins)
    else:  # no mask: no token sees padding on the right, and transformers keeps apart what begins at position 0
        ids, positions, labels = collate(lines, 0)
        columns = {"input_ids": ids, "position_ids": positions}
    # the first column with a label; column t - 1 of the inputs predicts it
    has_label = (labels != -100).any(0)
    first = int(has_label.int().argmax()) if has_label.any() else len(has_label) - 1
    places = (labels[:, first:] != -100).flatten().nonzero()[:, 0].to(lm.device)
    *inputs, labels = torch.stack([*columns.values(), labels]).to(lm.device)  # one copy to a GPU
    inputs = {name: values[:, :-1] for name, values in zip(columns, inputs, strict=True)}
    logprobs, states, others = token_logprobs(model, labels[:, first:], places, temperature, also, **inputs)
    return logprobs, states.flatten(0, 1)[places], others


def token_logprobs(model, labels, places, temperature=1.0, also=None, **inputs):
    """(logprobs (N,), states (B, K, H), others (N,) or None): the one function for this in all scripts. logprobs are
    (model(**inputs).logits[:, -K:].float() / temperature).log_softmax(-1) at the labels; all else saves memory.
    labels (B, K) are predicted from the last K positions of inputs. places (N,): which of them to score, as flat
    positions, since a GPU has to wait for a mask. states[:, t] is what the output layer, and a head, reads for
    labels[:, t]. also(logits (n, V), labels (n,)) -> (n,), if given, computes others."""
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

    # The logits of all tokens would not fit into memory, and only the model's own forward pass knows how its last
    # states come about. So it runs as it is, but with `output_layer` in place of its own: that applies the layer to the
    # states of the labels, a chunk at a time, and returns log-probabilities, which the model hands on as its `logits`.
    # Where logits are not the layer's product (Cohere, Granite and Gemma 2 scale or cap it), it computes whole logits.
    with forward_replaced(lm.get_output_embeddings(), output_layer):
        terms = model(**inputs, logits_to_keep=labels.shape[1], use_cache=False).logits
    if not is_plain:
        logits = terms.flatten(0, 1)[places]
        terms = in_chunks(terms_of, nn.Identity(), vocabulary, logits, labels.flatten()[places])
    others = None if also is None else terms[1]
    return terms[0], read[0], others


def compute_pairs(accelerator, function, pairs, lengths, batch_size):
    """(2, N), float64, on every process: function(pairs) -> (2, b) of all pairs, of which each computes a share."""
    local = local_rows(accelerator, len(pairs))
    numbers = torch.empty(len(local), 2, dtype=torch.float64, device=accelerator.device)
    screen.show("scoring pairs", len(local))
    for places in longest_first([lengths[row] for row in local], batch_size):
        with torch.no_grad(), accelerator.autocast():
            numbers[places] = function([pairs[local[place]] for place in places]).T.double()
        screen.advance(len(places))
    return accelerator.gather(numbers)[: len(pairs)].T


def in_chunks(function, layer, vocabulary, states, *columns):
    """function(layer(states), *columns) (..., N) of states (N, H) and columns (N,), in chunks of CHUNK logits. They
    are recomputed in the backward pass, so that only one is in memory; what fits into two is not split."""

    def of_rows(states, *columns):
        return function(layer(states), *columns)

    size = max(1, (CHUNK_ON_GPU if states.is_cuda else CHUNK) // vocabulary)
    if len(states) <= 2 * size:
        return of_rows(states, *columns)
    kind = states.device.type
    parts = []
    # without its cache: a shared cast would add up gradients in its type
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        for chunk in zip(*(column.split(size) for column in (states, *columns)), strict=True):
            parts.append(checkpoint(of_rows, *chunk, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, -1)


@contextmanager
def in_float32(*modules):
    """Inside, the weights of heads are at least float32, although FSDP2 gathers bfloat16. Autocast must be off, too."""
    with ExitStack() as stack:
        for module in itertools.chain(*map(nn.Module.modules, modules)):
            for name, weight in module.named_parameters(recurse=False):
                stack.callback(module._parameters.update, {name: weight})
                module._parameters[name] = weight.to(torch.promote_types(weight.dtype, torch.float32))
        yield
