"""Responses by a function of the user (--rollout): tools, several turns, other engines."""

import operator
import os

import torch

from common.errors import InputError
from common.functions import call_function
from common.launch import gather_list, local_rows, on_each
from common.lm.adapters import for_sampling
from common.lm.sampling import have_ended, sample, uniforms
from common.lm.tokens import longest_first
from common.report import screen
from common.seeding import rng, seed_libraries


def own_rollout(
    accelerator, lm, tokenizer, function, rows, queries, stream, *,
    seed, max_new_tokens, decode_batch_size, stop, **options,
):  # fmt: skip
    """(responses, trained, ended, rows) of all queries (lists of ids), on every process: ids; for each id whether it is
    trained; whether there was room for more, or it ended by itself; the rows with the function's columns.

    stream: (name, number), for rollouts ("rollout", iteration). The n-th token sampled for row i takes the n-th uniform
    of (seed, name, number, i). options: temperature, top_k and top_p of `sample`."""
    name, number = stream
    local = local_rows(accelerator, len(queries))
    own_rows = [rows[row] for row in local]
    own_queries = [queries[row] for row in local]
    sampled = [[] for _ in local]  # of each row: (context, ids) of every call

    def sample_rows(contexts, places, stop=stop):
        """Lists of the ids sampled after contexts (lists of ids) of the rows at places, which count from 0 in this
        process; [] where a response has reached its limit."""
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        contexts = [list(map(int, ids)) for ids in contexts]
        if not all(contexts) or len({*places}) < len(places) or min(places, default=0) < 0:
            raise InputError("--rollout: `sample` takes contexts (ids) for different rows, counted from 0")
        found = {place: [] for place in places}
        limits = [len(own_queries[place]) + max_new_tokens for place in places]  # of a context with its response
        known = zip(places, contexts, limits, strict=True)
        waiting = [(place, context, limit - len(context)) for place, context, limit in known if limit > len(context)]
        screen.show("sampling" if name == "rollout" else "evaluating", len(waiting))
        with accelerator.autocast():
            for chunk in longest_first([len(context) for _, context, _ in waiting], decode_batch_size):
                own, heads, rooms = zip(*(waiting[number] for number in chunk), strict=True)
                draws = []
                for place in own:
                    done = sum(len(ids) for _, ids in sampled[place])
                    draws.append(uniforms(seed, name, number, [local[place]], done + max(rooms))[0, done:])
                draws = torch.stack(draws).to(accelerator.device)
                found |= zip(own, sample(lm, tokenizer, heads, draws, rooms, stop, **options), strict=True)
        for place, context in zip(places, contexts, strict=True):
            sampled[place].append(([*context], [*found[place]]))
        return [found[place] for place in places]

    given = {"sample": sample_rows, "prompt_ids": own_queries, "tokenizer": tokenizer, "model": lm, "iteration": number}
    given["prompts"] = [row["prompt"] for row in own_rows]
    given["seeds"] = [int(rng(seed, f"{name} seeds", number, row).integers(2**32)) for row in local]
    given |= {"temperature": options["temperature"], "max_new_tokens": max_new_tokens, "stop_strings": stop}
    # the same in a continued run, and different in each process
    seed_libraries(int(rng(seed, f"{name} libraries", number, accelerator.process_index).integers(2**32)))
    with for_sampling(lm):  # a function computes in its own precision
        segments, columns = on_each(accelerator, function, own_rows, given, sampled)
    added = [{column: values[place] for column, values in columns.items()} for place in range(len(local))]
    rows = [row | new for row, new in zip(rows, gather_list(added), strict=False)]
    parts = gather_list(segments)[: len(queries)]
    responses = [sum((ids for ids, _ in segments), []) for segments in parts]
    trained = [sum(([is_trained] * len(ids) for ids, is_trained in segments), []) for segments in parts]
    for row, is_trained in zip(rows, trained, strict=True):
        if "sampler_logprobs" in row:  # is cut with the ids
            row["sampler_logprobs"] = row["sampler_logprobs"][: sum(is_trained)]
    # turns may end with an end token, too: a response has ended if there was room for more
    by_itself = have_ended(lm, tokenizer, queries, responses, stop)
    ended = [len(ids) < max_new_tokens or end for ids, end in zip(responses, by_itself, strict=True)]
    return responses, trained, ended, rows


def call_rollout(function, name, rows, given, sampled):
    """(responses, {column: values per row}) of a rollout function; a response is a list of segments (ids, trained), cut
    to max_new_tokens. sampled: per row all (context, ids) that `sample` has returned in this call. A trained segment is
    made of parts of these, each at its place; a row for which nothing was sampled may come from another engine."""
    value = call_function(function, name, rows, given)
    responses, columns = value if isinstance(value, tuple) else (value, {})
    for values in (responses, *columns.values()):
        if len(values) != len(rows):
            raise InputError(f"{name} returned {len(values)} values, expected {len(rows)}: one for each row")
    for logprobs, segments in zip(columns.get("sampler_logprobs", []), responses, strict=False):
        if len(logprobs) != sum(len(ids) for ids, trained in segments if trained):
            raise InputError(f"{name}: sampler_logprobs needs a number for each trained id")
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
