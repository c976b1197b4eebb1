"""Rows to ids, ids to texts, and lines: what a model reads in one row, an example (ids, labels, ...) or several."""

import functools
import itertools
import os
from array import array

import torch

from common.errors import InputError
from common.lm.chat import chat_text, is_chat, row_segments, tell_left_out, turn_end
from common.report import screen, visible
from common.rows import texts


def tokenize(tokenizer, texts, special_tokens, end, column="text", **options):
    """Token ids of each text. end says what becomes of the end token, which some tokenizers append: "never": it is
    removed, while a text's own stays; "once": every text has one; "template": ids are left as they are. special_tokens:
    the tokenizer adds its own. column: "text_target" for what an encoder-decoder writes. options: of the tokenizer."""
    encoded = tokenizer(**{column: texts}, add_special_tokens=special_tokens, **options)["input_ids"]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    ends = row_ends(tokenizer) if end == "once" else []
    end_texts = tuple(filter(None, tokenizer.convert_ids_to_tokens(ends)))  # a model may have one that is no token
    for text, ids in zip(texts, encoded, strict=True):
        if ids[:2] == [bos, bos] and not text.startswith(2 * tokenizer.bos_token):
            del ids[0]  # the text begins with its own
        is_added = ids[-1:] == [eos] and (ids[-2:] == [eos, eos] or not text.endswith(tokenizer.eos_token))
        if is_added and end != "template":
            del ids[-1]
        has_end = ids and (ids[-1] in ends or text.rstrip().endswith(end_texts))
        if end == "once" and not has_end:
            ids.append(eos)
    return encoded


def tell_unknown(tokenizer, rows, flag):
    """Says how many rows (lists of ids) hold the token that stands for what the tokenizer does not know."""
    rows = [*rows]
    unknown = tokenizer.unk_token_id
    count = sum(unknown in ids for ids in rows)
    if count and unknown not in (*row_ends(tokenizer), tokenizer.bos_token_id):  # GPT-2 has one token for all
        what = f"{count} of {len(rows)} texts have characters that the tokenizer does not know"
        screen.say(f"warning: {flag}: {what}: they become {tokenizer.unk_token}")


def int32(ids):
    """Token ids in an array, which takes 4 bytes for each; a list takes up to 40, in every process."""
    return array("i", ids)


def row_ends(tokenizer):
    """Ids of the tokens that end a response: those of the model of `load_model`, or the tokenizer's own."""
    return getattr(tokenizer, "ends", [tokenizer.eos_token_id])


def encode_prompts(rows, tokenizer, max_new_tokens, limit, flag, max_length=None, encoder=False):
    """(rows, token ids of their prompts), without prompts of more than max_length tokens. A chat becomes its text, an
    empty prompt the beginning token. limit: positions of the model. encoder: it reads what the tokenizer ends."""
    chat = is_chat(rows, ["prompt"])
    if chat:
        chats = [(row["prompt"], row) for row in rows]
        rows = []
        for number, (messages, row) in enumerate(chats, 1):
            prompt = chat_text(tokenizer, messages, row, f"{flag} row {number}", answering=True)
            rows.append(row | {"prompt": prompt})
        tell_left_out(tokenizer, chats, flag)
    prompts = texts(rows, "prompt", flag)
    queries = tokenize(tokenizer, prompts, not chat, end="template" if encoder else "never")
    tell_unknown(tokenizer, queries, flag)
    if not chat and getattr(tokenizer, "chat_template", None):
        screen.say(f"{flag}: the prompts are plain texts; lists of messages would use the tokenizer's chat template")
    kept_rows = []
    kept_ids = []
    for number, (row, ids) in enumerate(zip(rows, queries, strict=True), 1):
        where = f"{flag} row {number}"
        ids = ids or [beginning(tokenizer, where)]
        if max_length is not None and len(ids) > max_length:
            continue
        positions = max(len(ids), max_new_tokens) if encoder else len(ids) + max_new_tokens
        if positions > limit:
            sizes = f"{len(ids)} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} positions"
            how = "in ppo.py and grpo.py, --max-prompt-length drops it" if max_new_tokens < limit else "give fewer"
            raise InputError(f"{where}: a prompt of {sizes} ({how})")
        kept_rows.append(row)
        kept_ids.append(ids)
    if dropped := len(rows) - len(kept_rows):
        screen.say(f"{flag}: {dropped} of {len(rows)} prompts are dropped: --max-prompt-length {max_length}")
    return kept_rows, kept_ids


def beginning(tokenizer, where):
    """The id of the beginning token, which stands for an empty prompt."""
    if tokenizer.bos_token_id is None:
        raise InputError(f"{where}: the prompt is empty and the tokenizer has no beginning token")
    return tokenizer.bos_token_id


def encode_segments(rows, tokenizer, flag, encoder=False):
    """Yields (ids, spans) of each row: its token ids, and (begin, end, trained) of each segment of its text. Segments
    are tokenised together, except for an encoder: a merge across a boundary belongs to the later one. An empty prompt
    becomes the beginning token. The end token is appended once; in a chat the template ends the turns."""
    bos = tokenizer.bos_token_id
    if encoder:
        heads = tokenize(tokenizer, texts(rows, "prompt", flag), True, end="template")
        tails = tokenize(tokenizer, texts(rows, "completion", flag), True, end="once", column="text_target")
        tell_unknown(tokenizer, map(list.__add__, heads, tails), flag)
        for head, tail in zip(heads, tails, strict=True):
            head = head or [tokenizer.eos_token_id if bos is None else bos]
            end = len(head) + len(tail)
            yield head + tail, [(0, len(head), False), (len(head), end, True)]
        return
    chat = is_chat(rows, ("messages", "prompt"))
    has_prompt = not chat and not rows[0].keys().isdisjoint(("prompt", "completion", "dialogue"))
    segments = row_segments(rows, tokenizer, flag)
    whole = ["".join(row) for row in segments]
    encoded = tokenize(tokenizer, whole, not chat, end="template" if chat else "once")
    tell_unknown(tokenizer, encoded, flag)
    prefixes = [*itertools.chain(*(itertools.accumulate(row[:-1]) for row in segments))]
    heads = iter(tokenize(tokenizer, prefixes, not chat, end="never"))
    for ids, row in zip(encoded, segments, strict=True):
        begins = [0, *(len(os.path.commonprefix((ids, next(heads)))) for _ in row[1:])]
        if has_prompt and begins[1] == 0 and bos not in (None, ids[0]):
            ids = [bos, *ids]
            begins = [0, *(begin + 1 for begin in begins[1:])]
        spans = itertools.pairwise([*begins, len(ids)])
        yield ids, [(begin, end, place % 2 == 1) for place, (begin, end) in enumerate(spans)]


def num_labels(labels):
    """How many of the labels are tokens; the others are -100."""
    return len(labels) - labels.count(-100)


def first_label(labels):
    """Position of the first token with a label; 1 if there is none."""
    return next((place for place, label in enumerate(labels) if label != -100), 1)


def marked(tokenizer, ids, is_trained):
    """The text of a row, [what is not trained] in brackets. is_trained: a bool for each token."""
    text = ""
    for trained, pairs in itertools.groupby(zip(ids, is_trained, strict=True), lambda pair: pair[1]):
        piece = visible(tokenizer.decode([token for token, _ in pairs]))
        if not trained:
            piece = f"[{piece}]"
        text += piece
    return text


CONTEXT = 8  # tokens before a stop string, since tokenizers decode the first ones of a text differently


def texts_behind(tokenizer, queries, responses):
    """Texts of responses (lists of ids) as they stand behind their queries: many tokenizers drop the space before a
    first token. What an encoder-decoder writes is a text of its own."""
    texts_of = functools.partial(tokenizer.batch_decode, clean_up_tokenization_spaces=False)  # or "yes ? no" changes
    texts = texts_of(responses)
    if getattr(tokenizer, "answers_apart", False):
        return texts
    prompts = texts_of(queries)
    samples = texts_of([[*query, *ids] for query, ids in zip(queries, responses, strict=True)])
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        if sample.startswith(prompt):  # else the prompt is another text where a response follows
            texts[row] = sample.removeprefix(prompt)
    return texts


def stopped(tokenizer, queries, responses, stops):
    """Whether each response (ids) contains a stop string."""
    if not stops:
        return [False] * len(responses)
    tails = [query[-CONTEXT:] for query in queries]
    for ids in tails:  # a character that is cut would make all bytes behind it unreadable, those of a stop string, too
        while len(ids) > 1 and "\ufffd" in tokenizer.decode(ids):
            del ids[0]
    texts = texts_behind(tokenizer, tails, responses)
    return [any(stop in text for stop in stops) for text in texts]


def decode(tokenizer, queries, responses, stops):
    """Texts of responses to queries, without special tokens that begin, end or pad them or are unknown, and cut before
    a stop string and the space ahead of it."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    marks = special & {*row_ends(tokenizer), *others}
    heads = [[token for token in ids if token not in special] for ids in queries]
    tails = [[token for token in ids if token not in marks] for ids in responses]
    texts = texts_behind(tokenizer, heads, tails)
    # in the ids, since a stop string that ends a text is not in it
    with_stop = stopped(tokenizer, queries, responses, stops)
    for row, text in enumerate(texts):
        if with_stop[row]:
            ends = [text.find(stop) for stop in stops if stop in text]
            texts[row] = text[: min(ends, default=None)].rstrip()
    return texts


# ---- Lines ----------------------------------------------------------------------------------------------------------


def longest_first(lengths, batch_size):
    """Places in lengths, in lists of at most batch_size: little padding, and a lack of memory shows at once."""
    places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    return [places[i : i + batch_size] for i in range(0, len(places), batch_size)]


def line_length(line):
    """Tokens of the examples (ids, ...) in a line."""
    return sum(len(ids) for ids, *_ in line)


def pack(lengths, max_length):
    """Best-fit decreasing: lists of indices whose lengths sum to at most max_length; no length may exceed it."""
    lines = []
    rooms = []  # how many tokens are left in each line
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [place for place, room in enumerate(rooms) if room >= lengths[i]]
        if not fitting:
            fitting = [len(lines)]
            lines.append([])
            rooms.append(max_length)
        fullest = min(fitting, key=lambda place: rooms[place])
        lines[fullest].append(i)
        rooms[fullest] -= lengths[i]
    return lines


def in_lines(packing, examples, lengths):
    """(lines, places): the examples in lines, one per line or with packing as many as fit into the length of the
    longest one, and the position (N,) of every example when the lines are concatenated."""
    groups = pack(lengths, max(lengths)) if packing else [[i] for i in range(len(lengths))]
    lines = [[examples[i] for i in group] for group in groups]
    return lines, torch.tensor([*itertools.chain(*groups)]).argsort()


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
    """Tensor (B, T) of lists, right-padded with fill. begins: a position in each, which are aligned in one column: the
    lengths of the rows give left-padding. dtype: that of fill by default."""
    begins = begins or [0] * len(rows)
    left = max(begins)
    aligned = [[fill] * (left - begin) + list(row) for row, begin in zip(rows, begins, strict=True)]
    width = max(map(len, aligned))
    padded = [row + [fill] * (width - len(row)) for row in aligned]
    return torch.tensor(padded, dtype=dtype or torch.tensor(fill).dtype, device=device)


def split_lines(accelerator, examples, batch_size, packing=False):
    """The micro-batches of this process: lists of lines, which are lists of examples (ids, labels, ...): one each, or
    with packing several (`in_lines`). Padded, a micro-batch has no more tokens than batch_size of the longest line;
    once it is half full, a line of less than 3/4 of its longest begins another one. The lines of all processes are
    sorted by length and dealt out in turn, as many to each, since all take part in every exchange of gradients."""
    lines, _ = in_lines(packing, examples, [len(ids) for ids, *_ in examples])
    while len(lines) % accelerator.num_processes:
        ids, *_ = examples[0]
        lines.append([(ids[:2], [-100, -100], [])])  # a line without labels adds nothing
    lengths = [line_length(line) for line in lines]
    budget = batch_size * max(lengths, default=0)
    micro_batches = []
    width = 0  # tokens of the longest line of the last micro-batch
    room = -1  # tokens that still fit into it; the first line begins one
    for dealt in longest_first(lengths, accelerator.num_processes):
        length = lengths[dealt[0]]
        if room < width or (length < 3 / 4 * width and room <= budget / 2):
            micro_batches.append([])
            width = length
            room = budget
        room -= width
        micro_batches[-1].append(lines[dealt[accelerator.process_index]])
    return micro_batches


def split_rows(accelerator, rows, lengths, packing, batch_size):
    """This process's share of a batch of row numbers, in micro-batches of at most batch_size. lengths: of all rows."""
    local = rows[accelerator.process_index :: accelerator.num_processes]
    own_lengths = [lengths[row] for row in local]
    if packing:  # texts of any length fill a line
        own_lengths = [0] * len(local)
    return [[local[place] for place in places] for places in longest_first(own_lengths, batch_size)]


def tell_unended_turns(tokenizer):
    """Warns where the chat template ends a turn by a token that ends no response."""
    words, end = turn_end(tokenizer)
    if end and end[0] not in row_ends(tokenizer):
        screen.say(f"warning: {words.rstrip()!r} ends a turn of the template but no response, unless --stop has it")


def tell_untrained_end(tokenizer, trained):
    """Warns where no row trains a token that ends a response. trained: ids, or labels, of each row."""
    ends = row_ends(tokenizer)
    if all(set(ends).isdisjoint(ids) for ids in trained):
        named = " or ".join(map(str, tokenizer.convert_ids_to_tokens(ends)))
        screen.say(f"warning: no row trains the end token {named}, so responses will not end")
