"""Data: rows of files, hub datasets and lists become texts, texts become tokens, tokens become lines and tensors.

Row 1 shows the form of all rows (algos/README.md, "Rows"). A bad row gives an InputError that names the flag,
the row and the column.
"""

import ast
import copy
import gzip
import io
import itertools
import json
import os
import re
from array import array
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from common.cli import InputError, accepted, build, call_metric, call_reward, call_rollout, load_function, spec_path
from common.terminal import screen, visible

# Keyword arguments besides the rows' other columns, of reward and metric functions, and of rollout functions.
TEXT_ARGUMENTS = ("samples", "prompts", "outputs", "output_ids", "tokenizer")
ROLLOUT_ARGUMENTS = ("sample", "prompt_ids", "prompts", "tokenizer", "seeds", "model", "temperature", "max_new_tokens")
FILE_KINDS = (".jsonl", ".json", ".csv", ".txt", ".parquet")  # also with .gz, but for the last
NUMBERS = {"reward", "margin", "truncated"}  # columns of a .csv file that are no texts
# columns that a chat template renders
CHATS = {"messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs"}
ROLES = ("system", "developer", "user", "assistant", "tool")
SIDES = ("chosen", "rejected")
GENERATION = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
MARK = "\ufdd0"  # marks places in what a template writes; occurs in no text
ANSWER_MARKER = re.compile(r"^(?:assistant|### ?(?:assistant|response)):", re.MULTILINE | re.IGNORECASE)


def read_data(dataset, eval_dataset, eval_prompts=None, reward=None, metric=None, rollout=None, given=TEXT_ARGUMENTS):
    """What these flags name: rows, eval_sets ({name: rows}), prompts to sample from for a metric, and reward, metric
    and rollout, called as `call_reward` and so on. A reward model is None here: it is loaded after the policy. given:
    the keyword arguments of reward and metric besides the rows' columns, which must fit them."""
    is_model = isinstance(reward, str) and not re.search(r"\.py(:|$)", reward)
    reward_function = None if is_model else load_function(reward, "--reward")
    metric_function = load_function(metric, "--metric")
    rollout_function = load_function(rollout, "--rollout")
    rows = load_rows(dataset, "--dataset")
    eval_sets = load_sets(eval_dataset)
    sets = [*eval_sets.values()]
    prompts = []
    if eval_prompts is not None:
        prompts = load_rows(eval_prompts, "--eval-prompts")
    elif metric is not None and reward is None:
        prompts = next(iter(sets), [])
        if not prompts:
            raise InputError("--metric needs rows with a prompt to sample from: give --eval-prompts")
    for members in (rows, *sets):
        if rollout_function:
            accepted(rollout_function, rollout, members[0], ROLLOUT_ARGUMENTS)
        elif reward_function:  # with a rollout function, which may add columns, only once it is called
            accepted(reward_function, reward, members[0], given)
    for members in [prompts] if prompts else sets or [rows]:
        if metric_function and not rollout_function:
            accepted(metric_function, metric, members[0], given)
    found = SimpleNamespace(rows=rows, eval_sets=eval_sets, prompts=prompts)
    found.reward = reward_function and partial(call_reward, reward_function, reward)
    found.metric = metric_function and partial(call_metric, metric_function, metric)
    found.rollout = rollout_function and partial(call_rollout, rollout_function, rollout)
    return found


def load_rows(data, flag):
    """Rows as a list of dicts with equal columns, of a list, a Dataset, a file, a data set of the hub, or a function
    that makes one of these. Call it before Accelerator(), as `build`."""
    screen.show(f"reading {flag}")
    source = rows = build(data, flag)
    if isinstance(source, str):
        try:
            rows = read_rows(source)
        except Exception as error:  # the libraries' errors have no common class
            raise InputError(f"{flag} {source} cannot be loaded: {' '.join(str(error).split())}") from None
    rows = list(rows)
    if not rows:
        raise InputError(f"{flag} {data!s:.60} has no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"{flag} row {number} is {row!r:.60}: expected a mapping such as {{'prompt': ...}}")
        if row.keys() != rows[0].keys():
            columns = ", ".join(sorted(map(str, row.keys() ^ rows[0].keys())))
            raise InputError(f"{flag} row {number} and row 1 differ in their columns: {columns} (null: an empty cell)")
    if isinstance(data, list | tuple) or (isinstance(source, str) and ".json" in source):
        return rows  # which are as they stand there; others may come from Arrow
    return [row | {column: without_nulls(row[column]) for column in CHATS & row.keys()} for row in rows]


def without_nulls(value):
    """A chat, or tools, without the keys with null, which Arrow gives all rows. A message keeps its content."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = [key for key in value if value[key] is not None or (key == "content" and "role" in value)]
    return {key: without_nulls(value[key]) for key in named}


def read_rows(name):
    """The rows as they stand in a file, in a directory saved by datasets, or in `org/name@revision:split` on the hub.
    Of what is on this machine no cache is made, and no text becomes a date or a number."""
    path = spec_path(name)
    on_hub = re.fullmatch(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@([^:]+))?(?::(.+))?", name)
    if path is None and (not on_hub or name.removesuffix(".gz").endswith(FILE_KINDS)):
        raise ValueError("there is no such file or directory on this machine")
    if path is None or path.is_dir():
        import datasets

        if path is None:
            repository, revision, split = on_hub.groups()
            return datasets.load_dataset(repository, split=split or "train", revision=revision)
        rows = datasets.load_from_disk(str(path))
        if isinstance(rows, dict):
            raise ValueError(f"it has several splits: give one of them, such as {path}/{next(iter(rows))}")
        return rows.with_format("arrow")[:].to_pylist()  # images stay the bytes that they are
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in FILE_KINDS:
        raise ValueError(f"expected a name that ends with {', '.join(FILE_KINDS)}")
    if kind == ".parquet":
        from pyarrow.parquet import read_table

        return read_table(path).to_pylist()
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
        text = stream.read()
    if kind == ".csv":
        return rows_of_csv(text)
    if kind == ".txt":
        return [{"text": line.rstrip("\n")} for line in io.StringIO(text, newline=None)]
    return rows_of_json(text)


def rows_of_json(text):
    """The rows of a list, or of lines with a row in each."""
    if text.lstrip().startswith("["):
        return json.loads(text, strict=False)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(json.loads(line, strict=False))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not valid JSON: {error.msg}, column {error.colno}") from None
    return rows


def rows_of_csv(text):
    """The rows of a table separated by commas, semicolons or tabs. Cells are texts, except in NUMBERS."""
    import pandas

    header = text.lstrip("\r\n").partition("\n")[0]
    separator = max(",;\t", key=header.count)  # pandas would take a letter, where there is one column
    table = pandas.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False)
    if not isinstance(table.index, pandas.RangeIndex):  # else the columns would be those to their left
        raise ValueError("its first line has fewer names than the rows have cells")
    rows = table.to_dict("records")
    for row, column in itertools.product(rows, NUMBERS & {*table}):
        with suppress(ValueError, SyntaxError):
            row[column] = ast.literal_eval(row[column].strip().title() or "None")
    return rows


def load_sets(spec):
    """{name: rows} of the evaluation sets. A single one is named "". Several are a mapping, or sources separated by
    commas, which are named by file stem, split or function."""
    if not spec:
        return {}
    # before key= a comma belongs to the options of a function
    sources = re.split(r",(?!\s*\w+=)", spec) if isinstance(spec, str) else []
    sets = {}
    for source in map(str.strip, sources):
        sets[source.split(":")[1] if ":" in source else Path(source).stem] = source
    if len(sets) < len(sources):
        raise InputError(f"--eval-dataset {spec}: two sets have the same name (file stem, split or function)")
    if len(sets) < 2:
        sets = build(spec, "--eval-dataset")
    if not isinstance(sets, dict):
        sets = {"": sets}
    return {name: load_rows(data, set_flag(name)) for name, data in sets.items()}


def set_prefix(name):
    return f"eval/{name}/" if name else "eval/"


def set_flag(name):
    return f"--eval-dataset {name}".strip()


def require_columns(rows, columns, flag):
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise InputError(f"{flag} has the columns {', '.join(rows[0])}; expected {' and '.join(missing)}")


def texts(rows, column, flag):
    """The strings of a column. Refuses other values, and half a surrogate pair, which no tokenizer takes."""
    require_columns(rows, [column], flag)
    for number, row in enumerate(rows, 1):
        text = row.get(column)
        if not isinstance(text, str) or text.encode(errors="ignore").decode() != text:
            raise InputError(f"{flag} row {number}: {column!r} must be valid text, not {text!r:.60}")
    return [row[column] for row in rows]


# ---- Rows -> texts ---------------------------------------------------------------------------------------------------


def is_chat(rows, columns):
    """Whether row 1 holds a list of messages in one of the columns."""
    return any(isinstance(rows[0].get(column), list) for column in columns)


def messages_in(row, column):
    """The messages in a column of a row; none if it is not a list."""
    return row[column] if isinstance(row.get(column), list) else []


def chat_text(tokenizer, messages, row, where, answering=False, anew=False, marked=False):
    """The messages as the chat template renders them, with the row's tools: to the end of an answer, or with answering
    to where one begins (in a last message of the assistant's, but for anew). marked: MARK replaces {% generation %}."""
    for message in messages if isinstance(messages, list) and messages else [None]:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            form = f'{{"role": one of {", ".join(ROLES)}; "content": text}}'
            raise InputError(f"{where}: a chat is a list of {form}, found {message!r:.80}")
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


def joined(prompt, answer):
    """The messages of a prompt and an answer, which goes on in the prompt's last message if that is the assistant's."""
    if not isinstance(answer, list):
        answer = [answer]  # for `chat_text` to refuse
    roles = [message.get("role") for message in (*prompt[-1:], *answer[:1]) if isinstance(message, dict)]
    if roles != ["assistant", "assistant"] or prompt[-1].get("tool_calls"):
        return [*prompt, *answer]
    contents = [message.get("content") or "" for message in (prompt[-1], answer[0])]
    return [*prompt[:-1], prompt[-1] | answer[0] | {"content": "".join(contents)}, *answer[1:]]


def chat_turns(tokenizer, row, where):
    """The text of a chat in parts, every second one trained: what the template marks with {% generation %} in the
    completion's answers, or if it marks nothing, whole messages with the end of their turns."""
    prompt = row["prompt"] or []
    completion = row["completion"]
    messages = joined(prompt, completion)
    parts = chat_text(tokenizer, messages, row, where, marked=True).split(MARK)
    begin = len(messages) - len(completion)
    answers = [i for i in range(begin, len(messages)) if messages[i]["role"] == "assistant"]
    if not answers:
        raise InputError(f"{where}: the completion is empty")

    def text_before(i, **options):
        """What stands before answer i; before a first message this may be a system prompt of the template."""
        before = messages[:i] if i > begin else prompt
        if before:
            return chat_text(tokenizer, before, row, where, answering=True, anew=i > begin, **options)
        empty = chat_text(tokenizer, [{"role": "assistant", "content": MARK}], row, where)
        return empty.partition(MARK)[0]

    if prompt and len(parts) > 1:
        head = text_before(answers[0], marked=True)
        place = head.count(MARK)
        rest = parts[place:]
        if place % 2:  # the prompt ends within an answer
            begun = head.rpartition(MARK)[2]
            rest[:1] = [begun, added(rest[0], begun, where)]
        parts = ["".join(parts[:place]) + rest[0], *rest[1:]]
    if len(parts) == 1:
        beginnings = [""]  # of the text, up to where training begins or ends
        for i in answers:
            beginnings += [text_before(i), chat_text(tokenizer, messages[: i + 1], row, where)]
        parts = [added(longer, shorter, where) for shorter, longer in itertools.pairwise(beginnings)]
    return parts


def tell_left_out(tokenizer, chats, flag):
    """Says in one line what the template leaves out of chats (messages, row): tools, or a key of the messages of a
    role. Each is tried in the first chat that has it, at its last place there."""
    is_left_out = {}
    for messages, row in chats:
        others = {}  # {name: (messages, row) without it}
        if row.get("tools"):
            others["tools"] = (messages, row | {"tools": None})
        for place, message in enumerate(messages):
            for key in message.keys() - {"role"}:
                if message[key] not in (None, "", [], {}):
                    nothing = MARK if key == "content" else None
                    other = message | {"content": message.get("content") or ""} | {key: nothing}
                    others[f"{key} of {message['role']}"] = ([*messages[:place], other, *messages[place + 1 :]], row)
        answering = messages[-1]["role"] != "assistant"
        for name in others.keys() - is_left_out.keys():
            is_left_out[name] = False
            with suppress(InputError):  # of a template that cannot do without
                whole = chat_text(tokenizer, messages, row, flag, answering)
                is_left_out[name] = chat_text(tokenizer, *others[name], flag, answering) == whole
    if any(is_left_out.values()):
        names = ", ".join(sorted(filter(is_left_out.get, is_left_out)))
        screen.say(f"warning: {flag}: the chat template leaves out: {names}")


def added(text, beginning, where):
    """The part of a chat's text after that of its first messages."""
    if not text.startswith(beginning):
        begin = len(os.path.commonprefix((text, beginning)))
        change = f"{beginning[begin:][:40]!r} becomes {text[begin:][:40]!r} when the chat goes on"
        how = "give texts instead, or in sft and ilql a row for each answer, or {% generation %} in the template"
        raise InputError(f"{where}: the chat template changes what it has written: {change}: {how}")
    return text[len(beginning) :]


def row_segments(rows, tokenizer, flag):
    """The text of each row in parts, alternately not trained and trained; the first may be empty."""
    columns = rows[0].keys()
    if "messages" in columns:
        rows = [row | {"prompt": [], "completion": row["messages"]} for row in rows]
    if is_chat(rows, ["prompt"]):
        require_columns(rows, ["completion"], flag)
        turns = [chat_turns(tokenizer, row, f"{flag} row {number}") for number, row in enumerate(rows, 1)]
        tell_left_out(tokenizer, [(joined(messages_in(row, "prompt"), row["completion"]), row) for row in rows], flag)
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
    """[(prompt, chosen, rejected)] as texts. Without a prompt column, or with a text there and chats elsewhere, the
    prompt is what chosen and rejected have in common, or ""."""
    require_columns(rows, SIDES, flag)
    if is_chat(rows, ["chosen"]):
        pairs = []
        chats = []
        for number, row in enumerate(rows, 1):
            where = f"{flag} row {number}"
            whole = []
            for side in SIDES:
                chats.append((joined(messages_in(row, "prompt"), row[side]), row))
                whole.append(chat_text(tokenizer, *chats[-1], f"{where}, {side}"))
            begun = prompt_messages(row)
            prompt = chat_text(tokenizer, begun, row, where, answering=True) if begun else ""
            pairs.append((prompt, *(added(text, prompt, where) for text in whole)))
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
    if prompt := messages_in(row, "prompt"):
        return prompt
    shared = 0
    for place, (chosen, rejected) in enumerate(zip(row["chosen"], row["rejected"], strict=False)):
        goes_on = place > 0 and row["chosen"][place - 1]["role"] == "assistant"  # a second answer in a row
        if chosen["role"] == rejected["role"] == "assistant" and not goes_on:
            shared = place
        if chosen != rejected:
            break
    return row["chosen"][:shared]


# ---- Texts -> tokens -------------------------------------------------------------------------------------------------


def tokenize(tokenizer, texts, special_tokens, end, target=False):
    """Ids of each text. end says what becomes of the end token, which some tokenizers append: "never": it is removed,
    while a text's own stays; "once": every text has one; "template": ids are left as they are. special_tokens: the
    tokenizer adds its own. target: what an encoder-decoder writes."""
    column = "text_target" if target else "text"
    encoded = tokenizer(**{column: texts}, add_special_tokens=special_tokens)["input_ids"]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    ends = row_ends(tokenizer)
    end_texts = tuple(filter(None, tokenizer.convert_ids_to_tokens(ends)))  # a model may have one that is no token
    for text, ids in zip(texts, encoded, strict=True):
        has_bos = bos is not None and text.startswith(tokenizer.bos_token)
        if special_tokens and has_bos and ids[:2] == [bos, bos] and not text.startswith(2 * tokenizer.bos_token):
            del ids[0]
        is_own = text.endswith(tokenizer.eos_token) and ids[-2:] != [eos, eos]
        if end != "template" and ids[-1:] == [eos] and not is_own:
            del ids[-1]
        has_end = ids and (ids[-1] in ends or text.rstrip().endswith(end_texts))
        if end == "once" and not has_end:
            ids.append(eos)
    return encoded


def int32(ids):
    """Token ids in an array, which takes 4 bytes for each; a list takes up to 40, in every process."""
    return array("i", ids)


def row_ends(tokenizer):
    """Ids of the tokens that end a response: those of the model of `load_model`, or the tokenizer's own."""
    return getattr(tokenizer, "ends", [tokenizer.eos_token_id])


def encode_prompts(rows, tokenizer, max_new_tokens, limit, flag, max_length=None, encoder=False):
    """(rows, ids of their prompts) without prompts of more than max_length tokens. A chat becomes its text, an empty
    prompt the beginning token. limit: positions of the model, or None. encoder: it reads what the tokenizer ends."""
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
    kept = []
    for number, (row, ids) in enumerate(zip(rows, queries, strict=True), 1):
        where = f"{flag} row {number}"
        ids = ids or [beginning(tokenizer, where)]
        if max_length is not None and len(ids) > max_length:
            continue
        positions = max(len(ids), max_new_tokens) if encoder else len(ids) + max_new_tokens
        if limit and positions > limit:
            sizes = f"{len(ids)} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} positions"
            raise InputError(f"{where}: a prompt of {sizes} (in ppo.py and grpo.py, --max-prompt-length drops it)")
        kept.append((row, ids))
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts are dropped"
        screen.say(f"{flag}: {dropped}, longer than --max-prompt-length {max_length}")
    return [row for row, _ in kept], [ids for _, ids in kept]


def beginning(tokenizer, where):
    """The id of the beginning token, which stands for an empty prompt."""
    if tokenizer.bos_token_id is None:
        raise InputError(f"{where}: the prompt is empty and the tokenizer has no beginning token")
    return tokenizer.bos_token_id


def encode_segments(rows, tokenizer, flag, encoder=False):
    """Yields (ids, spans) of each row: its tokens, and (begin, end, trained) of each of its segments (`row_segments`).
    These are tokenised together, except for an encoder: a merge across a boundary belongs to the later one. An empty
    prompt becomes the beginning token. The end token is appended once; in a chat the template ends the turns."""
    bos = tokenizer.bos_token_id
    if encoder:
        heads = tokenize(tokenizer, texts(rows, "prompt", flag), True, end="template")
        tails = tokenize(tokenizer, texts(rows, "completion", flag), True, end="once", target=True)
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
    prefixes = [*itertools.chain(*(itertools.accumulate(row[:-1]) for row in segments))]
    heads = iter(tokenize(tokenizer, prefixes, not chat, end="never"))
    for ids, row in zip(encoded, segments, strict=True):
        begins = [0, *(len(os.path.commonprefix((ids, next(heads)))) for _ in row[1:])]
        if has_prompt and bos is not None and begins[1] == 0:
            if ids[0] != bos:
                ids = [bos, *ids]
                begins = [begin + 1 for begin in begins]
            begins = [0, *(max(1, begin) for begin in begins[1:])]
        spans = itertools.pairwise([*begins, len(ids)])
        yield ids, [(begin, end, place % 2 == 1) for place, (begin, end) in enumerate(spans)]


def marked(tokenizer, ids, is_trained):
    """The text of a row, [what is not trained] in brackets. is_trained: a bool for each token."""
    text = ""
    for trained, pairs in itertools.groupby(zip(ids, is_trained, strict=True), lambda pair: pair[1]):
        piece = visible(tokenizer.decode([token for token, _ in pairs]))
        if not trained:
            piece = f"[{piece}]"
        text += piece
    return text


def untrained_end(tokenizer, ends, trained):
    """[a warning] if none of the rows of trained ids holds one of the tokens that end a response, else []."""
    if any(not set(ends).isdisjoint(ids) for ids in trained):
        return []
    named = " or ".join(map(str, tokenizer.convert_ids_to_tokens(ends)))
    return [f"warning: no row trains the end token {named}, so responses will not end"]


def longest_first(lengths, batch_size):
    """Places in lengths, in lists of at most batch_size. Rows of similar length have little padding, and with the
    longest first a lack of memory shows at once."""
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
    """Tensor (B, T) of lists of different lengths, right-padded with fill. begins: a position in each row; these are
    aligned in one column, so the lengths of the rows give left-padding. dtype: that of fill by default."""
    begins = begins or [0] * len(rows)
    left = max(begins)
    aligned = [[fill] * (left - begin) + list(row) for row, begin in zip(rows, begins, strict=True)]
    width = max(map(len, aligned))
    padded = [row + [fill] * (width - len(row)) for row in aligned]
    return torch.tensor(padded, dtype=dtype or torch.tensor(fill).dtype, device=device)
