"""Rollouts by a function of the user (--rollout): tools, several turns, other engines."""

import operator
import os

from common.errors import InputError
from common.functions import call_function


def call_rollout(function, name, rows, given, sampled):
    """(responses, {column: values per row}) of a rollout function; a response is a list of segments (ids, trained), cut
    to max_new_tokens. sampled: per row all (context, ids) that `sample` has returned in this call. A trained segment is
    made of parts of these, each at its place; a row for which nothing was sampled may come from another engine."""
    value = call_function(function, name, rows, given)
    responses, columns = value if isinstance(value, tuple) else (value, {})
    for values in (responses, *columns.values()):
        if len(values) != len(rows):
            expected = f"a list of {len(rows)} responses, or that and {{column: list of {len(rows)} values}}"
            raise InputError(f"{name} returned {len(values)} values, expected {expected}")
    checked = []
    for row, segments, known, before in zip(rows, responses, sampled, map(list, given["prompt_ids"]), strict=True):
        where = f"{name}, prompt {row['prompt'][-60:]!r}"
        response = []
        room = given["max_new_tokens"]
        for ids, trained in segments:
            ids = [*map(operator.index, ids)]
            after = before + ids
            if trained and known and sampled_part(before, after, known) != after:
                raise InputError(f"{where}: trained ids that `sample` did not return behind exactly the ids before")
            response.append((ids[:room], bool(trained)))
            room -= len(ids[:room])
            before = after
        if not any(ids and trained for ids, trained in response):
            raise InputError(f"{where}: no trained ids within --max-new-tokens")
        checked.append(response)
    return checked, columns


def sampled_part(before, after, sampled):
    """`before`, and as much more of `after` as was sampled behind it."""
    for context, ids in sampled:
        whole = [*context, *ids]
        if len(context) <= len(before) and whole[: len(before)] == before:
            before = os.path.commonprefix([whole, after])
    return before
