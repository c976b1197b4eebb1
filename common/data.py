"""Rows in: files, hub data sets and lists of dicts become texts, each trained or not, and texts become tokens.

Forms of a row, where a chat is a list of messages that the tokenizer's chat template writes, with the row's `tools`:
{"text"}; {"prompt", "completion"}, both texts or both chats; {"messages"}, a chat; {"dialogue": [prompt, output,
prompt, output, ...]}; {"chosen", "rejected"} with or without "prompt", texts or chats; {"prompt"}, to sample from.
Whatever is wrong with a row is an InputError that names the flag and the row.
"""

import itertools
import json
import math
import os
import re
from pathlib import Path

from common.cli import InputError
from common.functions import build, refuse_mistyped, spec_path
from common.report import screen

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
ROLES = ("system", "developer", "user", "assistant", "tool")
SIDES = ("chosen", "rejected")
ANSWER_MARKER = re.compile(r"^(?:assistant|### ?(?:assistant|response)):", re.MULTILINE | re.IGNORECASE)
TEXT_FORMS = "text, prompt and completion, messages, or dialogue"
PROMPT_FORM = 'prompt, a text or a chat, such as {"prompt": "2 + 2 ="}'
CAPTION_FORM = 'prompt, a text, such as {"prompt": "a red circle"}'
PAIR_FORM = """chosen and rejected (and prompt), each a text or a chat, such as {"prompt": "2 + 2 =", "chosen": " 4", \
"rejected": " 5"}"""
# what reward and metric functions of texts get by these names (`sampling.text_arguments`)
TEXT_ARGUMENTS = ("samples", "prompts", "outputs", "output_ids", "tokenizer")
IMAGE_ARGUMENTS = ("images", "prompts")  # and those of images


# ---- Rows ------------------------------------------------------------------------------------------------------------


def load_rows(data, flag):
    """Rows as a list of dicts with equal columns, from a list, a local file or `org/name:split` on the hub."""
    rows = data
    screen.show(f"reading {flag}")
    path = spec_path(data)
    if path and path.suffix == ".jsonl":
        rows = read_jsonl(path, f"{flag} {data}")
    elif isinstance(data, str):
        rows = read_dataset(data, path, flag)
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
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8: {error}") from None
    values = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                values.append(json.loads(line, strict=False))
        except ValueError as error:
            raise InputError(f"{where}:{number} is not valid JSON: {error}") from None
    return values


def read_dataset(name, path, flag):
    """What the library datasets reads: a saved directory or a file at path, else a file elsewhere or a hub data set."""
    refuse_mistyped(name, flag)
    file_kind = FILE_KINDS.get(Path(name.removesuffix(".gz")).suffix)
    if file_kind and not path and "://" not in name and "*" not in name:
        raise InputError(f"{flag} {name} cannot be loaded: there is no such file")
    import datasets

    try:
        if path and path.is_dir():
            return datasets.load_from_disk(str(path))
        if file_kind:
            return datasets.load_dataset(file_kind, data_files=str(path or name), split="train")
        if path:
            raise ValueError(f"expected a name that ends with {', '.join(FILE_KINDS)}")
        repository, _, split = name.partition(":")
        return datasets.load_dataset(repository, split=split or "train")
    except Exception as error:  # the library's errors have no common class
        raise InputError(f"{flag} {name} cannot be loaded: {' '.join(str(error).split())}") from None


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


def texts(rows, column, flag):
    """The strings of a column. InputError at what is no string, and at half a surrogate pair, which is no text."""
    for number, row in enumerate(rows, 1):
        where = f"{flag} row {number}: {column!r}"
        text = row.get(column)
        if not isinstance(text, str):
            value = f"is {text!r:.60}" if column in row else f"is missing among {list(row)}"
            raise InputError(f"{where} must be a string, it {value}")
        if text.encode(errors="ignore").decode() != text:
            raise InputError(f"{where} holds half a surrogate pair, which is no text")
    return [row[column] for row in rows]


def other_columns(rows, flag, expected):
    """An InputError that names the columns that there are and those that were expected."""
    return InputError(f"{flag} has the columns {', '.join(rows[0])}; expected {expected}")


def refuse_names(rows, flag, names):
    """InputError at a column that an argument of the same name, which functions get from the script, would hide."""
    for name in names:
        if name in rows[0]:
            raise InputError(f"{flag}: rename the column {name!r}, which functions get from the script")


def with_prompts(rows, flag):
    """The rows; their prompt is a string, in the column `prompt`, or `text` as a file of lines has it."""
    column = "prompt" if "prompt" in rows[0] else "text"
    if column not in rows[0]:
        raise other_columns(rows, flag, CAPTION_FORM)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get(column), str):
            raise InputError(f"{flag} row {number} needs a string as 'prompt'; its columns: {', '.join(row)}")
    names = {column: "prompt"}
    rows = [{names.get(name, name): value for name, value in row.items()} for row in rows]
    texts(rows, "prompt", flag)
    refuse_names(rows, flag, IMAGE_ARGUMENTS)
    if column == "text":
        rows = [row for row in rows if row["prompt"].strip()]  # a file of lines may have blank ones
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
    check_text_columns(rows, flag)
    wheres = [f"{flag} row {number}" for number in range(1, len(rows) + 1)]
    if "messages" in rows[0] or is_chat(rows, ["prompt"]):
        chats = [whole_chat(row, where) for row, where in zip(rows, wheres, strict=True)]
        return [chat_segments(tokenizer, *chat, where) for chat, where in zip(chats, wheres, strict=True)]
    if "dialogue" in rows[0]:
        turns = [dialogue(row, where) for row, where in zip(rows, wheres, strict=True)]
    elif "prompt" in rows[0]:
        turns = zip(texts(rows, "prompt", flag), texts(rows, "completion", flag), strict=True)
    else:
        turns = [("", text) for text in texts(rows, "text", flag)]
    return [alternating(turns_of_row) for turns_of_row in turns]


def check_text_columns(rows, flag, **more):
    """InputError unless the rows have one of the forms that `row_segments` takes, and the columns of more, which holds
    an example of each."""
    columns = rows[0].keys()
    known = "messages" in columns or "dialogue" in columns
    if "prompt" in columns or "completion" in columns:
        known = known or {"prompt", "completion"} <= columns
    elif "text" in columns:
        known = True
    if not known or not more.keys() <= columns:
        example = json.dumps({"prompt": "2 + 2 =", "completion": " 4"} | more)
        forms = "".join([TEXT_FORMS, *(f", and {name}" for name in more)])
        raise other_columns(rows, flag, f"{forms}, such as {example}")


def alternating(turns):
    """Segments of texts that are alternately not trained and trained."""
    return [(text, place % 2 == 1) for place, text in enumerate(turns)]


def whole_chat(row, where):
    """(messages, how many of them are the prompt's, tools) of a row of messages, or of a prompt and a completion."""
    if "messages" in row:
        return row["messages"], 0, row.get("tools")
    completion = messages_in(row, "completion")
    if not isinstance(row["prompt"], list) or not completion:
        raise InputError(f"{where}: prompt and completion must be two lists of messages")
    return row["prompt"] + completion, len(row["prompt"]), row.get("tools")


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
    if not rows[0].keys() >= set(SIDES):
        raise other_columns(rows, flag, PAIR_FORM)
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


def asked_messages(row):
    """The chat of a row up to where the assistant answers what is trained or sampled; [] for a row of texts.

    Beside a prompt that `encode_prompts` has written as text, the chat is in the column `messages`.
    """
    chat = messages_in(row, "messages")
    for message in chat:
        known = isinstance(message, dict) and "role" in message
        if not known or not isinstance(message.get("content"), str | None):
            return []  # another column of that name
    if chat and "prompt" in row:
        return chat
    if isinstance(row.get("chosen"), list):
        return prompt_messages(row)
    answers = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    return messages_in(row, "prompt") or chat[: min(answers, default=0)]


def plain_messages(messages):
    """Who says what in a chat, without the other fields of its messages."""
    return [{"role": message["role"], "content": message.get("content")} for message in messages]


# ---- Texts -> tokens -------------------------------------------------------------------------------------------------


def have_bos(tokenizer, texts):
    """Whether the texts already begin with the beginning token, as those that a chat template wrote do."""
    return bool(tokenizer.bos_token) and all(text.startswith(tokenizer.bos_token) for text in texts)


def tokenize(tokenizer, texts, special_tokens, end, target=False):
    """Ids of each text; end says what happens to the end token, which some tokenizers put behind every text.

    end: "once": appended if it is missing, one of two removed; "never": removed, unless the text itself ends with it;
    "template": ids as they are. special_tokens: the tokenizer adds its own. target: what an encoder-decoder writes.
    """
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


def row_ends(tokenizer):
    """Ids of the tokens that end a response: those of the model that `load_model` has read the tokenizer with, or the
    tokenizer's own."""
    return getattr(tokenizer, "ends", [tokenizer.eos_token_id])


def encode_prompts(rows, tokenizer, max_new_tokens, limit, flag, max_length=None, encoder=False):
    """(rows, queries) without the rows whose prompt has more than max_length tokens; queries are token ids.

    A chat prompt becomes its text up to where the assistant answers, and is kept as `messages`; an empty prompt becomes
    the beginning token. limit: the positions that the model has, or None; a prompt whose response would not fit is an
    error. encoder: the model has one, which reads the prompt as the tokenizer ends it.
    """
    if "prompt" not in rows[0]:
        raise other_columns(rows, flag, PROMPT_FORM)
    refuse_names(rows, flag, TEXT_ARGUMENTS)
    chat = is_chat(rows, ["prompt"])
    if chat:
        written = []
        for number, row in enumerate(rows, 1):
            text = chat_text(tokenizer, row["prompt"], f"{flag} row {number}", row.get("tools"), answering=True)
            written.append(row | {"prompt": text, "messages": row["prompt"]})
        rows = written
    prompts = texts(rows, "prompt", flag)
    special_tokens = not chat and not have_bos(tokenizer, prompts)
    queries = tokenize(tokenizer, prompts, special_tokens, end="template" if encoder else "never")
    check_room(queries, max_new_tokens, limit, max_length, encoder)
    kept = []
    for place, ids in enumerate(queries):
        where = f"{flag} row {place + 1}"
        if not ids:
            if tokenizer.bos_token_id is None:
                raise InputError(f"{where}: the prompt is empty and the tokenizer has no beginning token")
            ids.append(tokenizer.bos_token_id)
        if max_length is not None and len(ids) > max_length:
            continue
        positions = max(len(ids), max_new_tokens) if encoder else len(ids) + max_new_tokens
        if limit and positions > limit:
            sizes = f"{len(ids)} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} positions"
            how = "shorten it, lower --max-new-tokens, or in ppo.py and grpo.py set --max-prompt-length"
            raise InputError(f"{where}: a prompt of {sizes}: {how}")
        kept.append(place)
    if not kept:
        raise InputError(f"--max-prompt-length {max_length} drops every row of {flag}")
    return [rows[place] for place in kept], [queries[place] for place in kept]


def check_room(queries, max_new_tokens, limit, max_length, encoder):
    """InputError where no prompt leaves room for a response of max_new_tokens, with the number that suits all prompts.
    Arguments are those of `encode_prompts`."""
    if not limit or max_new_tokens < limit or (encoder and max_new_tokens == limit):
        return
    lengths = [max(1, len(ids)) for ids in queries if max_length is None or len(ids) <= max_length]
    longest = max(lengths, default=1)
    problem = f"--max-new-tokens {max_new_tokens} leaves no room in the model's {limit} positions"
    if encoder:
        raise InputError(f"{problem}: give at most {limit}")
    if longest < limit:
        raise InputError(f"{problem}: give at most {limit - longest} (the longest prompt takes {longest})")
    raise InputError(f"{problem}, which a prompt of {longest} tokens fills alone")


# ---- Tokens -> lines -------------------------------------------------------------------------------------------------


def pack(lengths, max_length):
    """Best-fit decreasing: lists of indices whose lengths sum to at most max_length; no length may exceed it."""
    lines = []
    space = []  # left in each line
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [line for line in range(len(lines)) if space[line] >= lengths[i]]
        if fitting:
            line = min(fitting, key=lambda line: space[line])
        else:
            line = len(lines)
            lines.append([])
            space.append(max_length)
        lines[line].append(i)
        space[line] -= lengths[i]
    return lines


def fill_lines(lengths, packing, limit=None, processes=1):
    """Lists of indices of the texts in a line: one, or with packing as many as give the fewest positions to a process.
    A line is as long as the longest text or, since that alone leaves gaps, up to half as long again, but never longer
    than limit."""
    if not packing:
        return [[i] for i in range(len(lengths))]
    longest = max(lengths)
    limit = max(longest, limit or 2 * longest)
    layouts = [pack(lengths, min(limit, longest + longest * more // 16)) for more in range(9)]

    def num_positions(lines):
        width = max(sum(lengths[i] for i in line) for line in lines)
        return width * math.ceil(len(lines) / processes)

    return min(layouts, key=num_positions)
