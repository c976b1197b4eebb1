"""Turns texts into tokens, and tokens into lines of several texts or padded tensors."""

import itertools
import math
import os
from array import array

import torch

from common.cli import InputError
from common.report import screen, visible
from common.rows import chat_text, is_chat, row_segments, texts

# ---- Texts -> tokens -------------------------------------------------------------------------------------------------


def have_bos(tokenizer, texts):
    """Whether the texts already begin with the beginning token, as those from a chat template do."""
    return bool(tokenizer.bos_token) and all(text.startswith(tokenizer.bos_token) for text in texts)


def tokenize(tokenizer, texts, special_tokens, end, target=False):
    """Ids of each text. end says what happens to the end token, which some tokenizers append to every text: "once":
    appended if it is missing, one of two removed; "never": removed, unless the text itself ends with it; "template":
    ids as they are. special_tokens: the tokenizer adds its own. target: what an encoder-decoder writes."""
    column = "text_target" if target else "text"
    encoded = tokenizer(**{column: texts}, add_special_tokens=special_tokens)["input_ids"]
    eos = tokenizer.eos_token_id
    ends = row_ends(tokenizer)
    for text, ids in zip(texts, encoded, strict=True):
        appended = ids[-1:] == [eos]
        if end == "once" and not (ids and ids[-1] in ends):
            ids.append(eos)
        elif end == "once" and appended and len(ids) > 1 and ids[-2] in ends:
            del ids[-1]
        elif end == "never" and appended and not text.endswith(tokenizer.eos_token):
            del ids[-1]
    return encoded


def int32(ids):
    """Token ids in an array, which takes 4 bytes for each; a list takes up to 40, in every process."""
    return array("i", ids)


def row_ends(tokenizer):
    """Ids of the tokens that end a response: those of the model of `load_model`, or the tokenizer's own."""
    return getattr(tokenizer, "ends", [tokenizer.eos_token_id])


def encode_prompts(rows, tokenizer, max_new_tokens, limit, flag, max_length=None, encoder=False):
    """(rows, queries) without rows whose prompt has more than max_length tokens; queries are token ids.

    A chat prompt becomes its text up to where the assistant answers; an empty prompt becomes the beginning token.
    limit: the positions that the model has, or None; a prompt whose response would not fit is an error. encoder: the
    model has an encoder, which reads the prompt with the ending that the tokenizer adds.
    """
    chat = is_chat(rows, ["prompt"])
    if chat:
        written = []
        for number, row in enumerate(rows, 1):
            text = chat_text(tokenizer, row["prompt"], f"{flag} row {number}", row.get("tools"), answering=True)
            written.append(row | {"prompt": text})
        rows = written
    prompts = texts(rows, "prompt", flag)
    special_tokens = not chat and not have_bos(tokenizer, prompts)
    queries = tokenize(tokenizer, prompts, special_tokens, end="template" if encoder else "never")
    kept = []
    for place, ids in enumerate(queries):
        where = f"{flag} row {place + 1}"
        if not ids:
            ids.append(beginning(tokenizer, where))
        if max_length is not None and len(ids) > max_length:
            continue
        positions = len(ids) + max_new_tokens
        if encoder:
            positions = max(len(ids), max_new_tokens)
        if limit and positions > limit:
            sizes = f"{len(ids)} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} positions"
            how = "lower --max-new-tokens, shorten the prompt, or in ppo.py and grpo.py set --max-prompt-length"
            raise InputError(f"{where}: a prompt of {sizes}: {how}")
        kept.append(place)
    if not kept:
        raise InputError(f"--max-prompt-length {max_length} drops every row of {flag}")
    return [rows[place] for place in kept], [queries[place] for place in kept]


def beginning(tokenizer, where):
    """The id of the beginning token, which stands for an empty prompt."""
    if tokenizer.bos_token_id is None:
        raise InputError(f"{where}: the prompt is empty and the tokenizer has no beginning token")
    return tokenizer.bos_token_id


def encode_segments(rows, tokenizer, flag, encoder=False):
    """Yields (ids, spans) of each row: its tokens, and (begin, end, trained) of each of its segments (`row_segments`).

    The segments of a row are tokenised together, except for an encoder. A segment begins at the longest common prefix
    with the tokens of what precedes it, so a merge across the boundary belongs to the later segment. An empty prompt
    becomes the beginning token. The end token is appended once; in a chat the template ends the turns.
    """
    chat = is_chat(rows, ("messages", "prompt"))
    has_prompt = not chat and not rows[0].keys().isdisjoint(("prompt", "completion", "dialogue"))
    segments = row_segments(rows, tokenizer, flag)
    if encoder:
        yield from encode_apart(segments, chat or has_prompt, tokenizer, not chat, flag)
        return
    bos = tokenizer.bos_token_id
    whole = ["".join(text for text, _ in row) for row in segments]
    special_tokens = not chat and not have_bos(tokenizer, whole)
    encoded = tokenize(tokenizer, whole, special_tokens, end="template" if chat else "once")
    prefixes = []
    for row in segments:
        prefixes += itertools.accumulate(text for text, _ in row[:-1])
    heads = iter(tokenize(tokenizer, prefixes, special_tokens, end="never"))
    for ids, row in zip(encoded, segments, strict=True):
        begins = [0]
        for _ in row[1:]:
            begins.append(len(os.path.commonprefix((ids, next(heads)))))
        if has_prompt and bos is not None and begins[1] == 0:
            if ids[0] != bos:
                ids = [bos, *ids]
                begins = [begin + 1 for begin in begins]
            begins = [0, *(max(1, begin) for begin in begins[1:])]
        ends = [*begins[1:], len(ids)]
        yield ids, [(begin, end, trained) for begin, end, (_, trained) in zip(begins, ends, row, strict=True)]


def encode_apart(segments, has_prompt, tokenizer, special_tokens, flag):
    """Like `encode_segments`, for an encoder's prompt and its decoder's output, which gets an end token."""
    prompts = []
    outputs = []
    for number, row in enumerate(segments, 1):
        if len(row) == 3 and not row[2][0].strip():  # blanks that a chat template writes after the answer
            del row[2]
        if len(row) != 2 or not has_prompt:
            raise InputError(f"{flag} row {number}: an encoder-decoder takes rows of one prompt and one output")
        prompt, output = [text for text, _ in row]
        prompts.append(prompt)
        outputs.append(output)
    bos = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if bos is None else bos
    heads = tokenize(tokenizer, prompts, special_tokens, end="template")
    tails = tokenize(tokenizer, outputs, special_tokens, end="once", target=True)
    for head, tail in zip(heads, tails, strict=True):
        head = head or [first]
        end = len(head) + len(tail)
        yield head + tail, [(0, len(head), False), (len(head), end, True)]


def marked(tokenizer, ids, is_trained):
    """The text of a row, [what is not trained] in brackets. is_trained: for each token, whether it is."""
    text = ""
    for trained, pairs in itertools.groupby(zip(ids, is_trained, strict=True), lambda pair: pair[1]):
        piece = visible(tokenizer.decode([token for token, _ in pairs]))
        if not trained:
            piece = f"[{piece}]"
        text += piece
    return text


def untrained_end(tokenizer, ends, trained):
    """A warning where none of the rows of trained ids holds one of the tokens that end a response."""
    if any(not set(ends).isdisjoint(ids) for ids in trained):
        return []
    named = " or ".join(tokenizer.convert_ids_to_tokens(ends))
    return [f"warning: no row trains the end token {named}, so responses will not end"]


# ---- Tokens -> lines and tensors -------------------------------------------------------------------------------------


def num_labels(labels):
    """How many of the labels are tokens; the others are -100."""
    return len(labels) - labels.count(-100)


def first_label(labels):
    """Position of the first token with a label; 1 if there is none."""
    return next((place for place, label in enumerate(labels) if label != -100), 1)


def line_length(line):
    """Tokens of the examples (ids, ...) in a line."""
    return sum(len(ids) for ids, *_ in line)


def pack(lengths, max_length):
    """Best-fit decreasing: lists of indices whose lengths sum to at most max_length; no length may exceed it."""

    def used(line):
        return sum(lengths[i] for i in line)

    lines = []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        room = max_length - lengths[i]
        fitting = [line for line in lines if used(line) <= room]
        if fitting:
            max(fitting, key=used).append(i)
        else:
            lines.append([i])
    return lines


def in_lines(packing, examples, lengths):
    """(lines, places): the examples in lines, one per line or with packing as many as fit into the length of the
    longest one, and the position (N,) of every example when the lines are concatenated."""
    groups = [[i] for i in range(len(lengths))]
    if packing:
        groups = pack(lengths, max(lengths))
    lines = [[examples[i] for i in group] for group in groups]
    order = torch.tensor([*itertools.chain(*groups)])
    return lines, order.argsort()


def collate(lines, pad_id, no_label=-100):
    """(ids, positions, labels), each (B, T), right-padded. A line is a list of examples (ids, labels, ...); positions
    start from 0 in each of them and continue through the padding."""
    width = max(map(line_length, lines))
    rows = []
    positions = []
    row_labels = []
    for line in lines:
        lengths = [len(ids) for ids, *_ in line]
        lengths[-1] += width - sum(lengths)
        positions.append([*itertools.chain(*map(range, lengths))])
        rows.append([*itertools.chain(*(ids for ids, *_ in line))])
        row_labels.append([*itertools.chain(*(labels for _, labels, *_ in line))])
    return pad_rows(rows, pad_id), torch.tensor(positions), pad_rows(row_labels, no_label)


def pad_rows(rows, fill, begins=None, dtype=None, device=None):
    """Tensor (B, T) of lists of different lengths, right-padded with fill. begins: a position in each row; these are
    aligned in one column, so the lengths of the rows give left-padding. dtype: that of fill by default."""
    begins = begins or [0] * len(rows)
    left = max(begins)
    width = left + max(len(row) - begin for row, begin in zip(rows, begins, strict=True))
    padded = []
    for row, begin in zip(rows, begins, strict=True):
        aligned = [fill] * (left - begin) + list(row)
        padded.append(aligned + [fill] * (width - len(aligned)))
    return torch.tensor(padded, dtype=dtype or torch.tensor(fill).dtype, device=device)


def local_rows(accelerator, num_rows):
    """The share of a process, as a list. If the rows do not divide evenly, the last shares repeat the last row."""
    share = math.ceil(num_rows / accelerator.num_processes)
    begin = accelerator.process_index * share
    return [min(row, num_rows - 1) for row in range(begin, begin + share)]


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
