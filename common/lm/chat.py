"""Rows to texts, chats as the chat template of the tokenizer writes them. Row 1 shows the form of all rows."""

import copy
import itertools
import json
import os
import re
from contextlib import suppress
from functools import partial

from common.errors import InputError
from common.report import screen
from common.rows import require_columns, texts

ROLES = ("system", "developer", "user", "assistant", "tool")
SIDES = ("chosen", "rejected")
GENERATION = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
MARK = "\ufdd0"  # marks places in what a template writes; `load_rows` refuses rows that hold it
ANSWER_MARKER = re.compile(r"^(?:assistant|### ?(?:assistant|response)):", re.MULTILINE | re.IGNORECASE)


def is_chat(rows, columns):
    """Whether row 1 holds a list of messages in one of the columns."""
    return any(isinstance(rows[0].get(column), list) for column in columns)


def chat_text(tokenizer, messages, row, where, answering=False, anew=False, marked=False):
    """The messages as the chat template renders them, with the row's tools: to the end of an answer, or with answering
    to where one begins (in a last message of the assistant's, but for anew). marked: MARK replaces {% generation %}."""
    for message in messages if isinstance(messages, list) and messages else [None]:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            form = f'{{"role": one of {", ".join(ROLES)}; "content": text}}'
            raise InputError(f"{where}: a chat is a list of {form}, found {message!r:.80} with the role {role!r}")
    last = messages[-1]
    if not answering and last["role"] != "assistant":
        raise InputError(f"{where}: the last message must be the assistant's")
    goes_on = answering and not anew and last["role"] == "assistant" and not last.get("tool_calls")
    try:
        options = {"tools": row.get("tools"), **(row.get("chat_template_kwargs") or {})}
        options |= {"add_generation_prompt": answering and not goes_on, "continue_final_message": goes_on}
        if marked:  # a block, since a newline after a block is dropped
            template = tokenizer.get_chat_template(tools=options["tools"])
            options["chat_template"] = GENERATION.sub(rf"{{%\1 if true %}}{MARK}{{% endif \2%}}", template)
        messages = copy.deepcopy(messages)
        for call in itertools.chain(*(message.get("tool_calls") or () for message in messages)):
            function = call.get("function", call)
            with suppress(TypeError, ValueError, KeyError):  # OpenAI's API gives JSON texts; others, mappings
                function["arguments"] = json.loads(function["arguments"])
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise InputError(f"{where}: the chat template cannot render the messages: {error!s:.300}") from None


def whole_chat(row, column):
    """The messages of a row's prompt, if it has a list of them, and of an answer in the column. The answer goes on in
    the prompt's last message if that is the assistant's."""
    prompt = row.get("prompt") if isinstance(row.get("prompt"), list) else []
    answer = row[column] if isinstance(row[column], list) else [row[column]]  # for `chat_text` to refuse
    roles = [message.get("role") for message in (*prompt[-1:], *answer[:1]) if isinstance(message, dict)]
    if roles != ["assistant", "assistant"] or prompt[-1].get("tool_calls"):
        return [*prompt, *answer]
    contents = [message.get("content") or "" for message in (prompt[-1], answer[0])]
    return [*prompt[:-1], prompt[-1] | answer[0] | {"content": "".join(contents)}, *answer[1:]]


def chat_turns(tokenizer, row, where):
    """The text of a chat in parts, every second one trained: what the template marks with {% generation %} in the
    completion's answers, or if it marks nothing, whole messages with the end of their turns."""
    prompt = row["prompt"] or []
    messages = whole_chat(row, "completion")
    parts = chat_text(tokenizer, messages, row, where, marked=True).split(MARK)
    begin = len(messages) - len(row["completion"])
    answers = [i for i in range(begin, len(messages)) if messages[i]["role"] == "assistant"]
    if not answers:
        raise InputError(f"{where}: the completion is empty")

    def text_before(i, **options):
        """What stands before answer i; before a first message this may be a system prompt of the template."""
        before = messages[:i] if i > begin else prompt
        if before:
            return chat_text(tokenizer, before, row, where, answering=True, anew=i > begin, **options)
        return chat_text(tokenizer, [{"role": "assistant", "content": MARK}], row, where).partition(MARK)[0]

    if prompt and len(parts) > 1:
        head = text_before(answers[0], marked=True)
        place = head.count(MARK)
        if place % 2:  # the prompt ends within an answer
            begun = head.rpartition(MARK)[2]
            parts[place : place + 1] = [begun, added(parts[place], begun, where)]
        parts = ["".join(parts[: place + 1]), *parts[place + 1 :]]
    if len(parts) == 1:
        beginnings = [""]  # of the text, up to where training begins or ends
        for i in answers:
            beginnings += [text_before(i), chat_text(tokenizer, messages[: i + 1], row, where)]
        parts = [added(longer, shorter, where) for shorter, longer in itertools.pairwise(beginnings)]
    return parts


def tell_left_out(tokenizer, chats, flag):
    """Says in one line what the template leaves out of chats (messages, row): tools, or a key of the messages of a
    role. Each is tried in the first chat that has it, at its last place there."""
    tell_header(tokenizer, flag)
    tried = {}  # {name: two chats, one of them without it}
    for messages, row in chats:
        if row.get("tools"):
            tried.setdefault("tools", [(messages, row), (messages, row | {"tools": None})])
        for place in reversed(range(len(messages))):
            message = messages[place]
            for key in message.keys() - {"role"}:
                if message[key] in (None, "", [], {}):
                    continue
                nothing = MARK if key == "content" else None
                other = message | {"content": message.get("content") or ""} | {key: nothing}
                others = [*messages[:place], other, *messages[place + 1 :]]
                tried.setdefault(f"{key} of {message['role']}", [(messages, row), (others, row)])
    left_out = []
    for name, (chat, other) in sorted(tried.items()):
        answering = chat[0][-1]["role"] != "assistant"
        with suppress(InputError):  # of a template that cannot do without
            if chat_text(tokenizer, *chat, flag, answering) == chat_text(tokenizer, *other, flag, answering):
                left_out.append(name)
    if left_out:
        screen.say(f"warning: {flag}: the chat template leaves out: {', '.join(left_out)}")


def tell_header(tokenizer, flag):
    """Warns where the template begins an answer by a header that is no generation prompt."""
    question = [{"role": "user", "content": "question"}]
    answered = [*question, {"role": "assistant", "content": MARK}]
    with suppress(Exception):  # templates raise what they like
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        prompt = render(question, add_generation_prompt=True)
        header = render(answered).partition(MARK)[0].removeprefix(prompt)
        if render(question) == prompt and header.strip():
            what = "is trained with it, and prompts end before it"
            screen.say(f"warning: {flag}: the template has no generation prompt: {header!r} before an answer {what}")


def added(text, beginning, where):
    """The part of a chat's text after that of its first messages."""
    if not text.startswith(beginning):
        begin = len(os.path.commonprefix((text, beginning)))
        change = f"{beginning[begin:][:40]!r} becomes {text[begin:][:40]!r} when the chat goes on"
        how = "give texts instead, or in sft and ilql a row for each answer, or {% generation %} in the template"
        raise InputError(f"{where}: the chat template changes what it has written: {change}: {how}")
    return text[len(beginning) :]


def turn_end(tokenizer):
    """What the chat template writes after an answer, from a special token on, as (text, ids); both empty if there is
    none. A newline behind it belongs to it: it is the last token of the chats on which a classifier was trained."""
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    behind = ""
    with suppress(Exception):  # templates raise what they like, and a tokenizer without one an error
        _, _, behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("answer")
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    while ids and ids[0] not in tokenizer.added_tokens_decoder:
        del ids[0]
    return tokenizer.decode(ids), ids


def row_segments(rows, tokenizer, flag):
    """[parts] of the text of each row, alternately not trained and trained; the first may be empty."""
    columns = rows[0].keys()
    if "messages" in columns:
        rows = [row | {"prompt": [], "completion": row["messages"]} for row in rows]
    if is_chat(rows, ["prompt"]):
        require_columns(rows, ["completion"], flag)
        turns = [chat_turns(tokenizer, row, f"{flag} row {number}") for number, row in enumerate(rows, 1)]
        tell_left_out(tokenizer, [(whole_chat(row, "completion"), row) for row in rows], flag)
        return turns
    if "dialogue" in columns:
        for number, row in enumerate(rows, 1):
            turns = row["dialogue"]
            where = f"{flag} row {number}"
            if not isinstance(turns, list) or not turns or len(turns) % 2:
                raise InputError(f"{where}: 'dialogue' must be a list prompt, output, prompt, output, ...")
            texts([{"dialogue": turn} for turn in turns], "dialogue", f"{where}, part of")
        return [row["dialogue"] for row in rows]
    if "prompt" in columns or "completion" in columns:
        return list(zip(texts(rows, "prompt", flag), texts(rows, "completion", flag), strict=True))
    if "text" in columns:
        return [("", text) for text in texts(rows, "text", flag)]
    forms = "text, prompt and completion, messages, or dialogue"
    raise InputError(f"{flag} has the columns {', '.join(columns)}; expected {forms}")


def pair_texts(rows, tokenizer, flag):
    """[(prompt, chosen, rejected)]: texts of each row, of which prompt + chosen is one that the model reads. Without a
    prompt column, or with a text there and chats elsewhere, the prompt is what both have in common, or ""."""
    require_columns(rows, SIDES, flag)
    if is_chat(rows, ["chosen"]):
        pairs = []
        chats = []
        for number, row in enumerate(rows, 1):
            where = f"{flag} row {number}"
            sides = [(whole_chat(row, side), row) for side in SIDES]
            whole = [chat_text(tokenizer, *sides[i], f"{where}, {SIDES[i]}") for i in range(2)]
            begun = prompt_messages(row)
            prompt = chat_text(tokenizer, begun, row, where, answering=True) if begun else ""
            pairs.append((prompt, *(added(text, prompt, where) for text in whole)))
            chats += sides
        tell_left_out(tokenizer, chats, flag)
        return pairs
    sides = [texts(rows, side, flag) for side in SIDES]
    if "prompt" in rows[0]:
        return list(zip(texts(rows, "prompt", flag), *sides, strict=True))
    return [split_pair(*pair) for pair in zip(*sides, strict=True)]


def split_pair(chosen, rejected):
    """(prompt, chosen, rejected) of two texts. The prompt is their common beginning up to the last "Assistant:" or
    "### Response:" at the start of a line, without such a marker up to a whole word; a space belongs to the next."""
    common = os.path.commonprefix([chosen, rejected])
    words = re.match(r"(.*\S(?=\s))?", common, re.DOTALL)
    end = [words, *ANSWER_MARKER.finditer(common)][-1].end()
    return common[:end], chosen[end:], rejected[end:]


def prompt_messages(row):
    """The prompt of a row of chats: its column, or the beginning that both share, up to where both have an answer."""
    if is_chat([row], ["prompt"]):
        return row["prompt"]
    shared = 0
    role = None  # of the message before
    for place, (chosen, rejected) in enumerate(zip(row["chosen"], row["rejected"], strict=False)):
        if chosen["role"] == rejected["role"] == "assistant" != role:  # not a second answer in a row
            shared = place
        if chosen != rejected:
            break
        role = chosen["role"]
    return row["chosen"][:shared]
