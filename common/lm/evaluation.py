"""Responses to prompts, their texts and scores."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from common.errors import InputError, NotFinite, stop_if
from common.launch import local_rows, on_each, on_main, unsharded
from common.lm.adapters import for_sampling
from common.lm.chat import is_chat, turn_end
from common.lm.classifier import RewardModel
from common.lm.sampling import sample, uniforms
from common.lm.structure import end_tokens, max_positions
from common.lm.tokens import decode, encode_prompts, longest_first, marked, row_ends, stopped
from common.report import screen
from common.rows import set_flag, set_prefix
from common.seeding import rng, seed_libraries


@dataclass
class Prompts:
    """The data of a run on prompts: rows at first, and tokens once there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: (rows, queries)}
    reward: Callable | None  # as `call_reward` is called; None: a reward model, which is loaded after the policy
    metric: Callable | None  # as `call_metric` is called
    rollout: Callable | None = None  # as `call_rollout` is called
    queries: list | None = None  # ids of the prompts
    report: str = ""
    chats: bool = False  # whether the prompts were chats

    def encode(self, lm, tokenizer, max_new_tokens, max_prompt_length, num_eval):
        """Tokenises all prompts. Without evaluation rows, the first num_eval training rows are used for evaluation."""
        encoder = lm.config.is_encoder_decoder
        if encoder and self.rollout:
            raise InputError("--rollout does not work with an encoder-decoder, which answers once")
        options = {"limit": max_positions(lm), "max_length": max_prompt_length, "encoder": encoder}
        self.chats = is_chat(self.rows, ["prompt"])
        self.rows, self.queries = encode_prompts(self.rows, tokenizer, max_new_tokens, flag="--dataset", **options)
        for name, rows in self.eval_sets.items():
            self.eval_sets[name] = encode_prompts(rows, tokenizer, max_new_tokens, flag=set_flag(name), **options)
        words, end = turn_end(tokenizer) if self.chats else ("", [])
        if end and end[0] not in row_ends(tokenizer):
            ends = f"{words.rstrip()!r} ends a turn of the chat template but no response"
            screen.say(f"warning: {ends}, unless --stop has it")
        lengths = sorted(map(len, self.queries))
        self.report = f"{len(lengths)} prompts; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        if not self.eval_sets:
            self.eval_sets = {"": (self.rows[:num_eval], self.queries[:num_eval])}
            self.report += f"; without --eval-dataset, evaluations take the first {len(self.rows[:num_eval])}"
        self.report += f"; first: {self.rows[0]['prompt'][:200]!r}"

    def load_reward(self, args, lm, tokenizer):
        """Loads the reward model, if --reward names one. Returns its classifier, or None."""
        if self.reward is None:
            self.reward = RewardModel(args, lm, self.chats)
            if self.chats and self.reward.tokenizer.chat_template not in (None, tokenizer.chat_template):
                screen.say("warning: --reward reads chats as the template of --model writes them, not as its own does")
        return getattr(self.reward, "model", None)


@dataclass
class Responses:
    """What was sampled for B queries."""

    ids: list  # of each row: the ids after its query, the end token included
    trained: list  # of each row: for each id, whether it is trained; all are, except with --rollout
    ended: list  # of each row: whether it ended by itself, by an end token or a stop string
    rows: list  # with the columns that a --rollout function has added


def generate_all(
    accelerator, lm, tokenizer, queries, stream, *, seed, max_new_tokens, stop=(), limits=None, decode_batch_size=1024,
    rows=None, rollout=None, **options,
):  # fmt: skip
    """`Responses` to the queries (lists of ids) of all processes, on every process. Each samples for its share: once
    per query, or as the user's function `rollout(rows, given, sampled)` does (`call_rollout`).

    stream: (name, number), for rollouts ("rollout", iteration). The n-th token sampled for row i of queries takes the
    n-th uniform of (seed, name, number, i). limits: longest response of each row. options: of `sample`."""
    from accelerate.utils import gather_object

    name, number = stream
    local = local_rows(accelerator, len(queries))
    own_queries = [queries[row] for row in local]
    if limits is None:
        limits = [max_new_tokens] * len(queries)
    sampled = [[] for _ in local]  # of each row: (context, ids) of every call

    def sample_rows(contexts, places, stop=stop):
        """Lists of the ids sampled after contexts (lists of ids) of the rows at places, which count from 0 in this
        process; [] where a response has reached its limit."""
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        contexts = [list(map(int, ids)) for ids in contexts]
        if not all(contexts) or len({*places}) < len(places) or min(places, default=0) < 0:
            raise InputError("--rollout: `sample` takes contexts (ids) for different rows, counted from 0")
        found = {place: [] for place in places}
        waiting = []
        for place, context in zip(places, contexts, strict=True):
            room = len(own_queries[place]) + int(limits[local[place]]) - len(context)
            if room > 0:
                waiting.append((place, context, room))
        screen.show("sampling" if name == "rollout" else "evaluating", len(waiting))
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

    autocast_type = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    with for_sampling(lm, autocast_type), accelerator.autocast():
        if rollout is None:
            responses = [[(ids, True)] for ids in sample_rows(own_queries, range(len(local)))]
        else:
            own_rows = [rows[row] for row in local]
            given = {"sample": sample_rows, "prompt_ids": own_queries, "tokenizer": tokenizer, "model": lm}
            given["prompts"] = [row["prompt"] for row in own_rows]
            given["seeds"] = [int(rng(seed, f"{name} seeds", number, row).integers(2**32)) for row in local]
            given |= {"temperature": options["temperature"], "max_new_tokens": max_new_tokens}
            # the same in a continued run, and different in each process
            seed_libraries(int(rng(seed, f"{name} libraries", number, accelerator.process_index).integers(2**32)))
            responses, columns = on_each(accelerator, rollout, own_rows, given, sampled)
            added = [{column: values[place] for column, values in columns.items()} for place in range(len(local))]
            rows = [row | new for row, new in zip(rows, gather_object(added), strict=False)]
    screen.show("scoring")
    output_ids = []
    trained = []
    for segments in gather_object(responses)[: len(queries)]:
        output_ids.append([])
        trained.append([])
        for ids, is_trained in segments:
            output_ids[-1] += ids
            trained[-1] += [is_trained] * len(ids)
    ends = end_tokens(lm)
    if rollout is None:
        with_stop = stopped(tokenizer, queries, output_ids, stop)
        ended = [by_stop or ids[-1] in ends for by_stop, ids in zip(with_stop, output_ids, strict=True)]
    else:  # turns may end with such a token, too: a response has ended if there was room for more
        ended = [len(ids) < max_new_tokens or ids[-1] in ends for ids in output_ids]
    return Responses(output_ids, trained, ended, rows)


def text_arguments(tokenizer, responses, outputs):
    """Keyword arguments of a reward or metric function of texts besides the rows' other columns: lists with one entry
    per row, and the tokenizer."""
    prompts = [row["prompt"] for row in responses.rows]
    space = " " if getattr(tokenizer, "answers_apart", False) else ""
    samples = [prompt + space + output for prompt, output in zip(prompts, outputs, strict=True)]
    given = {"samples": samples, "prompts": prompts, "outputs": outputs, "output_ids": responses.ids}
    return given | {"tokenizer": tokenizer}


def score_outputs(accelerator, reward, tokenizer, outputs, responses):
    """(scores, columns) of all responses and their texts, on every process: a number for each, or a list with one for
    each of its tokens; and what a reward function returned besides, {name: a number for each}. It is called once, with
    all rows. A `RewardModel` scores a share in each process, with an end token where a response has ended."""
    given = text_arguments(tokenizer, responses, outputs)
    if not isinstance(reward, RewardModel):
        lengths = [len(ids) for ids in responses.ids]
        return on_main(accelerator, reward, responses.rows, given, lengths)
    local = local_rows(accelerator, len(outputs))
    with accelerator.autocast():
        own = reward([given["samples"][row] for row in local], [responses.ended[row] for row in local])
    scores = accelerator.gather(own)[: len(outputs)].tolist()
    score_of = {}
    for row, pair in enumerate(zip(given["samples"], responses.ended, strict=True)):
        # rounding, which depends on the neighbours, would give equal texts different scores
        scores[row] = score_of.setdefault(pair, scores[row])
        if not math.isfinite(scores[row]):
            where = f"{given['prompts'][row]!r:.60} and {outputs[row]!r:.60}"
            raise NotFinite(f"{reward.name}: {scores[row]} for {where}")
    return scores, {}


def summed(score):
    """A score, or the sum of a list with one score per token."""
    return sum(score) if isinstance(score, list) else score


def evaluate_samples(accelerator, lm, tokenizer, rows, queries, metric, reward=None, rollout=None, **options):
    """({name: mean}, samples) of a metric function and a reward (None: not used) on sampled responses; a sample is one
    dict per row. All evaluations take the same uniforms. options: those of `generate_all`."""
    responses = generate_all(accelerator, lm, tokenizer, queries, ("eval", 0), rows=rows, rollout=rollout, **options)
    outputs = decode(tokenizer, queries, responses.ids, options["stop"])
    values = {}
    if metric is not None:
        values |= on_main(accelerator, metric, responses.rows, text_arguments(tokenizer, responses, outputs))
    if reward is not None:
        scores, columns = score_outputs(accelerator, reward, tokenizer, outputs, responses)
        stop_if([f"--reward and --metric both return {key!r}: choose another name" for key in values.keys() & columns])
        values |= {"reward": list(map(summed, scores)), **columns}
    if rollout is not None:  # to be read: what is not trained in brackets
        outputs = list(map(partial(marked, tokenizer), responses.ids, responses.trained))
    means = {name: sum(column) / len(column) for name, column in values.items()}
    columns = {"prompt": [row["prompt"] for row in responses.rows], "output": outputs, **values}
    samples = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return means, samples


def evaluate_sets(accelerator, model, lm, tokenizer, data, **options):
    """(metrics, samples) of responses to the evaluation sets of `Prompts`: means of the reward and of --metric. lm: the
    language model in `model`, without wrappers and heads. options: those of `generate_all`."""
    metrics = {}
    samples = []
    functions = (data.metric, data.reward, data.rollout)
    model.eval()
    with unsharded(model):
        for name, (rows, queries) in data.eval_sets.items():
            means, set_samples = evaluate_samples(accelerator, lm, tokenizer, rows, queries, *functions, **options)
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            if len(data.eval_sets) > 1:
                set_samples = [{"set": name} | row for row in set_samples]
            samples += set_samples
    return metrics, samples


def log_episodes(run, tokenizer, batch, scores, advantages, count=4):
    """Writes the first episodes of a rollout to rollouts.jsonl: responses up to the last trained token, with what is
    not trained in brackets. scores, advantages: (B,)."""
    for place, (ids, labels, _) in enumerate(batch.examples[:count]):
        begin = len(batch.queries[place])
        output = marked(tokenizer, ids[begin:], [label != -100 for label in labels[begin:]])
        record = {"step": run.step, "prompt": batch.prompts[place], "output": output}
        record |= {"score": scores[place].item(), "advantage": advantages[place].item()}
        run.append("rollouts.jsonl", record)
