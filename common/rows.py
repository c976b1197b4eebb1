"""Rows in: files, hub data sets and lists of dicts become texts, each trained or not.

Forms of a row, where a chat is a list of messages that the tokenizer's chat template writes, with the row's `tools`:
{"text"}; {"prompt", "completion"}, both texts or both chats; {"messages"}, a chat; {"dialogue": [prompt, output,
prompt, output, ...]}; {"chosen", "rejected"} with or without "prompt", texts or chats; {"prompt"}, to sample from.
Row 1 shows the form of all rows. What is wrong with one is an InputError that names the flag, the row and the column.
"""

import itertools
import json
import os
import re
from pathlib import Path

from common.cli import InputError
from common.functions import build, refuse_mistyped, spec_path
from common.report import screen

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
ROLES = ("system", "developer", "user", "assistant", "tool")
SIDES = ("chosen", "rejected")
TEXT_FORMS = "text, prompt and completion, messages, or dialogue"
ANSWER_MARKER = re.compile(r"^(?:assistant|### ?(?:assistant|response)):", re.MULTILINE | re.IGNORECASE)


# ---- Rows ------------------------------------------------------------------------------------------------------------


def load_rows(data, flag):
    """Rows as a list of dicts with equal columns, from a list, a local file or `org/name:split` on the hub."""
    rows = data
    screen.show(f"reading {flag}")
    path = spec_path(data)
    if path and path.suffix == ".jsonl":
        rows = read_jsonl(path, f"{flag} {data}")
    elif isinstance(data, str):
        refuse_mistyped(data, flag)
        try:
            rows = read_dataset(data, path)
        except Exception as error:  # the library's errors have no common class
            raise InputError(f"{flag} {data} cannot be loaded: {' '.join(str(error).split())}") from None
    if isinstance(rows, dict):
        raise InputError(f"{flag} {data} holds several splits ({', '.join(rows)}): name the directory of one")
    rows = list(rows)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            content = list(row) if isinstance(row, dict) else repr(row)[:60]
            raise InputError(f"{flag} row {number} is {content}, expected a mapping with the columns of row 1")
    if not rows:
        raise InputError(f"{flag} {data} holds no rows")
    return rows


def read_jsonl(path, where):
    """The values in a file of one JSON value a line; blank lines are skipped."""
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                values.append(json.loads(line, strict=False))
        except ValueError as error:
            raise InputError(f"{where}:{number} is not valid JSON: {error}") from None
    return values


def read_dataset(name, path):
    """What the library datasets reads: a saved directory or a file at path, else a file elsewhere or a hub data set."""
    import datasets

    file_kind = FILE_KINDS.get(Path(name.removesuffix(".gz")).suffix)
    if path and path.is_dir():
        return datasets.load_from_disk(str(path))
    if file_kind:
        return datasets.load_dataset(file_kind, data_files=str(path or name), split="train")
    if path:
        raise ValueError(f"expected a name that ends with {', '.join(FILE_KINDS)}")
    repository, _, split = name.partition(":")
    return datasets.load_dataset(repository, split=split or "train")


def load_sets(spec, flag):
    """{name: rows} of the evaluation sets; the name of a single one is "". Several are a mapping, or sources joined by
    commas and named by file stem, split or function. Without a spec there are none."""
    if not spec:
        return {}
    sets = {}
    # a comma before key= lies between the options of a function
    sources = re.split(r",\s*(?!\w+=)", spec) if isinstance(spec, str) else []
    for source in filter(None, sources):
        name = source.split(":")[1] if ":" in source else Path(source).stem
        if name in sets:
            raise InputError(f"{flag} {spec}: two sets have the same name (file stem, split or function)")
        sets[name] = source
    if len(sets) < 2:
        sets = build(spec, flag)
    if not isinstance(sets, dict):
        return {"": load_rows(sets, flag)}
    return {name: load_rows(build(data, flag), f"{flag} {name}") for name, data in sets.items()}


def set_prefix(name):
    """What the metrics of an evaluation set begin with."""
    return f"eval/{name}/" if name else "eval/"


def set_flag(name):
    """How errors call an evaluation set."""
    return f"--eval-dataset {name}".strip()


def need_columns(rows, columns, flag, forms):
    """InputError unless the rows have the columns. forms: what is expected, in words."""
    if not rows[0].keys() >= set(columns):
        raise InputError(f"{flag} has the columns {', '.join(rows[0])}; expected {forms}")


def texts(rows, column, flag):
    """The strings of a column. InputError at what is no string, and at half a surrogate pair, which is no text."""
    for number, row in enumerate(rows, 1):
        where = f"{flag} row {number}: {column!r}"
        text = row.get(column)
        if not isinstance(text, str):
            raise InputError(f"{where} must be a string, it is {text!r:.60}")
        if text.encode(errors="ignore").decode() != text:
            raise InputError(f"{where} holds half a surrogate pair, which is no text")
    return [row[column] for row in rows]


def with_prompts(rows, flag):
    """The rows with a string as prompt, from the column `prompt`, or `text` as a file of lines has it, some blank."""
    if "prompt" in rows[0] or "text" not in rows[0]:
        need_columns(rows, ["prompt"], flag, "prompt, a text")
        texts(rows, "prompt", flag)
        return rows
    lines = texts(rows, "text", flag)
    rows = [row | {"prompt": line} for row, line in zip(rows, lines, strict=True) if line.strip()]
    if not rows:
        raise InputError(f"{flag} holds blank lines only")
    return rows


# ---- Rows -> texts ---------------------------------------------------------------------------------------------------


def is_chat(rows, columns):
    """Whether row 1 holds a list of messages in one of the columns."""
    return any(isinstance(rows[0].get(column), list) for column in columns)


def chat_text(tokenizer, messages, where, tools=None, answering=False):
    """The messages as the tokenizer's chat template writes them; answering: up to where the assistant answers.
    InputError without a template, at what is no chat, and where the template refuses the messages."""
    if not tokenizer.chat_template:
        raise InputError(f"{where}: the tokenizer has no chat template: save it with one, or take rows of plain text")
    for message in messages if isinstance(messages, list) and messages else [None]:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            form = f'{{"role": one of {", ".join(ROLES)}; "content": text}}'
            raise InputError(f"{where}: a chat is a list of {form}, found {message!r:.80}")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, add_generation_prompt=answering)
    except Exception as error:  # templates raise what they like
        raise InputError(f"{where}: the chat template refuses the messages: {error}") from None


def chat_segments(tokenizer, messages, prompt_length, tools, where):
    """Segments (`row_segments`) of a chat, whose answers behind the first prompt_length messages are trained: what the
    template marks with {% generation %}, or without such marks the assistant's messages with the end of their turn."""
    chat_text(tokenizer, messages, where, tools)  # stops at what is no chat
    if messages[-1]["role"] != "assistant":
        raise InputError(f"{where}: the last message must be the assistant's, it is by {messages[-1]['role']!r}")
    answers = [i for i in range(prompt_length, len(messages)) if messages[i]["role"] == "assistant"]
    if not re.search(r"\{%-?\s*generation\b", tokenizer.get_chat_template(tools=tools)):
        return turn_segments(tokenizer, messages, answers, tools, where)
    text, spans = marked_spans(tokenizer, messages, tools)
    if prompt_length:
        prompt = messages[: answers[0]]
        chat_text(tokenizer, prompt, where, tools)  # stops where the template refuses these alone
        _, prompt_spans = marked_spans(tokenizer, prompt, tools)
        spans = spans[len(prompt_spans) :]
    if not spans:
        raise InputError(f"{where}: the chat template marks nothing of the answers with {{% generation %}}")
    edges = [0, *itertools.chain(*spans), len(text)]
    return alternating(text[begin:end] for begin, end in itertools.pairwise(edges))


def marked_spans(tokenizer, messages, tools):
    """(text, spans) of a chat; a span is (begin, end) of characters that the template marks as generated."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    # as in apply_chat_template, which gives masks of tokens
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    (text,), (spans,) = render_jinja_template(
        [chat],
        chat_template=template,
        tools=tools,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return text, spans


def turn_segments(tokenizer, messages, answers, tools, where):
    """Segments of a chat whose messages at the places `answers` are trained: what the template adds to the text of the
    chat before an answer, and then through it."""
    parts = []
    done = ""
    for i in answers:
        before = chat_text(tokenizer, messages[:i], where, tools, answering=True) if i else ""
        after = chat_text(tokenizer, messages[: i + 1], where, tools)
        if not (before.startswith(done) and after.startswith(before)):
            how = "mark the answers in it with {% generation %}, or make a row of prompt and completion of each answer"
            raise InputError(f"{where}: the chat template changes earlier turns when message {i + 1} follows: {how}")
        parts += [before[len(done) :], after[len(before) :]]
        done = after
    return alternating(parts)


def row_segments(rows, tokenizer, flag):
    """Segments [(text, trained), ...] of each row, alternately not trained and trained; the first one may be empty.
    Trained are a text, a completion, the outputs of a dialogue, and the answers of a chat, or of its completion."""
    columns = rows[0].keys()
    wheres = [f"{flag} row {number}" for number in range(1, len(rows) + 1)]
    if "messages" in columns or is_chat(rows, ["prompt"]):
        chats = [whole_chat(row, where) for row, where in zip(rows, wheres, strict=True)]
        return [chat_segments(tokenizer, *chat, where) for chat, where in zip(chats, wheres, strict=True)]
    if "dialogue" in columns:
        turns = [dialogue(row, where) for row, where in zip(rows, wheres, strict=True)]
    elif "prompt" in columns or "completion" in columns:
        need_columns(rows, ["prompt", "completion"], flag, TEXT_FORMS)
        turns = zip(texts(rows, "prompt", flag), texts(rows, "completion", flag), strict=True)
    else:
        need_columns(rows, ["text"], flag, TEXT_FORMS)
        turns = [("", text) for text in texts(rows, "text", flag)]
    return [alternating(turns_of_row) for turns_of_row in turns]


def alternating(turns):
    """Segments of texts that are alternately not trained and trained."""
    return [(text, place % 2 == 1) for place, text in enumerate(turns)]


def whole_chat(row, where):
    """(messages, how many of them are the prompt's, tools) of a row of messages, or of a prompt and a completion."""
    if "messages" in row:
        return row["messages"], 0, row.get("tools")
    prompt = messages_in(row, "prompt")
    completion = messages_in(row, "completion")
    if prompt != row["prompt"] or not completion:
        raise InputError(f"{where}: prompt and completion must be two lists of messages")
    return prompt + completion, len(prompt), row.get("tools")


def messages_in(row, column):
    """The messages in a column of a row, none if it holds no list."""
    return row[column] if isinstance(row.get(column), list) else []


def dialogue(row, where):
    """The texts of a dialogue, as many outputs as prompts."""
    turns = row["dialogue"]
    if not isinstance(turns, list) or not turns or len(turns) % 2:
        raise InputError(f"{where}: 'dialogue' must be a list prompt, output, prompt, output, ...")
    return texts([{"dialogue": turn} for turn in turns], "dialogue", f"{where}, part of")


def pair_texts(rows, tokenizer, flag):
    """[(prompt, chosen, rejected)] as texts; a chat template wrote those of `is_chat(rows, ["chosen"])`.
    Without a prompt column, or with a text there beside chats, the prompt is what chosen and rejected have in common:
    messages; of texts what `shared_prompt` says. Nothing in common gives ""."""
    need_columns(rows, SIDES, flag, "chosen and rejected (and prompt), each a text or a chat")
    if is_chat(rows, ["chosen"]):
        return [chat_pair(tokenizer, row, f"{flag} row {number}") for number, row in enumerate(rows, 1)]
    pairs = list(zip(texts(rows, "chosen", flag), texts(rows, "rejected", flag), strict=True))
    if "prompt" in rows[0]:
        prompts = texts(rows, "prompt", flag)
        return [(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]
    triples = []
    for chosen, rejected in pairs:
        prompt = shared_prompt(chosen, rejected)
        triples.append((prompt, chosen[len(prompt) :], rejected[len(prompt) :]))
    return triples


def shared_prompt(chosen, rejected):
    """What two texts begin with, up to the last place at which both have the assistant answer, so that no beginning
    that two answers share is part of it: behind "Assistant:" or "### Response:" at the start of a line, in any case.
    Without such a marker whole words; the space goes with the next word."""
    common = os.path.commonprefix([chosen, rejected])
    markers = list(ANSWER_MARKER.finditer(common))
    if markers:
        return common[: markers[-1].end()]
    return re.match(r"(.*\S(?=\s))?", common, re.DOTALL)[0]


def chat_pair(tokenizer, row, where):
    """(prompt, chosen, rejected) of a row of chats, as the chat template writes them."""
    head = messages_in(row, "prompt")
    chats = [head + messages_in(row, side) for side in SIDES]
    whole = [chat_text(tokenizer, chat, where, row.get("tools")) for chat in chats]
    for side, chat in zip(SIDES, chats, strict=True):
        if len(chat) == len(head) or chat[-1]["role"] != "assistant":
            raise InputError(f"{where}: {side} must be a list of messages that ends with one of the assistant")
    prompt = ""
    if messages := prompt_messages(row):
        prompt = chat_text(tokenizer, messages, where, row.get("tools"), answering=True)
    elif isinstance(row.get("prompt"), str):
        raise InputError(f"{where}: the prompt is a text that the chats do not begin with: make it a list of messages")
    if not all(text.startswith(prompt) for text in whole):
        raise InputError(f"{where}: the chat template changes the prompt when the answer follows")
    return prompt, *(text[len(prompt) :] for text in whole)


def prompt_messages(row):
    """The prompt of a row of chats: its column, or the messages that both sides begin with, up to where the assistant
    answers in both."""
    if prompt := messages_in(row, "prompt"):
        return prompt
    pairs = list(zip(row["chosen"], row["rejected"], strict=False))
    shared = 0
    while shared < len(pairs) - 1 and pairs[shared][0] == pairs[shared][1]:
        shared += 1
    while shared > 0 and {message["role"] for message in pairs[shared]} != {"assistant"}:
        shared -= 1
    return row["chosen"][:shared]
