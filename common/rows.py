"""Rows of files, hub datasets, lists and functions. A bad one gives an InputError that names flag, row and column."""

import ast
import io
import itertools
import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec

from common.errors import InputError
from common.functions import accepted, build, call_metric, call_reward, load_function, spec_path
from common.report import screen, visible
from common.seeding import rng

# Keyword arguments besides the rows' other columns, of reward and metric functions, and of rollout functions.
TEXT_ARGUMENTS = ("samples", "prompts", "outputs", "output_ids", "tokenizer")
ROLLOUT_ARGUMENTS = ("sample", "prompt_ids", "prompts", "tokenizer", "seeds", "model", "temperature", "max_new_tokens")
ROLLOUT_ARGUMENTS += ("stop_strings", "iteration")
FILE_KINDS = (".jsonl", ".json", ".csv", ".txt", ".parquet")  # also with .gz, but for the last
NUMBERS = {"reward", "margin", "truncated"}  # columns of a .csv file that are no texts
WORDS = {"true": True, "false": False, "": None}  # cells in such columns

# half a surrogate pair, which no tokenizer takes, and two code points that are no characters: one marks places in chats
NO_TEXT = re.compile(r"[\ud800-\udfff\ufdd0\ufdd1]")

# columns that a chat template renders
CHATS = {"messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs"}


def read_data(dataset, eval_dataset, eval_prompts=None, reward=None, metric=None, rollout=None, given=TEXT_ARGUMENTS):
    """What these flags name: rows, eval_sets ({name: rows}), prompts of a metric, and reward (None for a model), metric
    and rollout, called as `call_reward`. given: keyword arguments of reward and metric besides the rows' columns."""
    is_model = isinstance(reward, str) and not re.search(r"\.py(:|$)", reward)
    reward_function = None if is_model else load_function(reward, "--reward")
    metric_function = load_function(metric, "--metric")
    rollout_function = load_function(rollout, "--rollout")
    rows = load_rows(dataset, "--dataset")
    if re.fullmatch(r"0?\.\d+", str(eval_dataset)):
        rows, eval_sets = hold_out(rows, float(eval_dataset))
    else:
        eval_sets = load_sets(eval_dataset)
    sets = [*eval_sets.values(), rows]
    prompts = [] if eval_prompts is None else load_rows(eval_prompts, "--eval-prompts")
    if metric is not None and reward is None and eval_prompts is None:
        prompts = sets[0]
        if not eval_sets:
            raise InputError("--metric needs rows with a prompt to sample from: give --eval-prompts")
    require_columns(rows, ["prompt"] if reward else [], "--dataset")
    if rollout_function:
        accepted(rollout_function, rollout, rows[0], ROLLOUT_ARGUMENTS)
    elif reward_function:  # with a rollout function, which may add columns, only once it is called
        accepted(reward_function, reward, rows[0], given)
    if metric_function and not rollout_function:
        accepted(metric_function, metric, (prompts or sets[0])[0], given)
    found = SimpleNamespace(rows=rows, eval_sets=eval_sets, prompts=prompts, rollout=rollout_function)
    found.reward = reward_function and partial(call_reward, reward_function, reward)
    found.metric = metric_function and partial(call_metric, metric_function, metric)
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
        if wrong := NO_TEXT.search(json.dumps(row, ensure_ascii=False, skipkeys=True, default=lambda part: None)):
            raise InputError(f"{flag} row {number} holds {visible(wrong[0])}, which must not be in a valid text")
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
        return datasets.load_from_disk(str(path)).with_format("arrow")[:].to_pylist()  # images stay bytes
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in FILE_KINDS:
        raise ValueError(f"expected a name that ends with {', '.join(FILE_KINDS)}")
    if kind == ".parquet":
        from pyarrow.parquet import read_table

        return read_table(path).to_pylist()
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig", newline="") as stream:
        text = stream.read()
    if kind == ".csv":
        return rows_of_csv(text)
    if kind == ".txt":
        return [{"text": line.rstrip("\n")} for line in io.StringIO(text, newline=None) if line.strip()]
    return rows_of_json(text)


def rows_of_json(text):
    """The rows of a list, or of lines with a row in each."""
    load = partial(json.loads, strict=False, object_pairs_hook=without_twins)
    if text.lstrip().startswith("["):
        return load(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(load(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not valid JSON: {error.msg}, column {error.colno}") from None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def without_twins(pairs):
    """A JSON object as a dict, which would keep the last of two values of a key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one of the keys {', '.join(found)} stands twice")
    return found


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
        cell = row[column].strip()
        with suppress(ValueError, SyntaxError):
            row[column] = WORDS[cell.lower()] if cell.lower() in WORDS else ast.literal_eval(cell)
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


def hold_out(rows, share):
    """(rows, evaluation sets): a share of the rows becomes a set, drawn by one key, so the same in runs of any seed."""
    count = round(share * len(rows))
    if not 0 < count < len(rows):
        raise InputError(f"--eval-dataset {share}: that is {count} of the {len(rows)} rows of --dataset")
    drawn = rng(0, "held out").permutation(len(rows)) < count
    screen.say(f"--eval-dataset {share}: {count} of the {len(rows)} rows of --dataset are held out")
    return [*itertools.compress(rows, ~drawn)], {"": [*itertools.compress(rows, drawn)]}


def set_prefix(name):
    return f"eval/{name}/" if name else "eval/"


def set_flag(name):
    return f"--eval-dataset {name}".strip()


def require_columns(rows, columns, flag):
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise InputError(f"{flag} has the columns {', '.join(rows[0])}; expected {' and '.join(missing)}")


def texts(rows, column, flag):
    """The strings of a column. Refuses other values."""
    require_columns(rows, [column], flag)
    for number, row in enumerate(rows, 1):
        if not isinstance(row[column], str):
            raise InputError(f"{flag} row {number}: {column!r} must be valid text, not {row[column]!r:.60}")
    return [row[column] for row in rows]


def longest_rows(lengths, count):
    """The numbers of `count` rows with --check, the longest first; more than there are begin again."""
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [longest_first[place % len(lengths)] for place in range(count)]
