"""The decoding loop of rollouts and evaluations, the sampled texts, and their scores.

Every token is a keyed draw, so a response depends on the seed and on its position among the queries alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from common.cli import InputError, stop_if
from common.data import encode_prompts, is_chat, longest_first, marked, pad_rows, row_ends, set_flag, set_prefix
from common.decoding import GRAPHS, Step, is_plain
from common.launch import NotFinite, local_rows, on_each, on_main
from common.model import RewardModel, Seq2Seq, end_tokens, for_sampling, max_positions, turn_end, unsharded
from common.seeding import draw, rng, seed_libraries, uniforms
from common.terminal import screen


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


# ---- Decoding --------------------------------------------------------------------------------------------------------

LEAVING = 3 / 4  # rows that have ended leave the batch when no more than this share of it goes on
LEAVING_GRAPH = 1 / 2  # the same with graphs, of which every shape needs its own
LOOK = 1  # tokens after which the loop looks at what was drawn, to see which rows have ended
LOOK_ON_GPU = 16  # the host has to wait for a GPU each time; what a row draws after its end is dropped
CONTEXT = 8  # tokens before a stop string, since tokenizers decode the first ones of a text differently


@torch.no_grad()
def sample(model, tokenizer, contexts, draws, limits, stop=(), temperature=1.0, top_k=0, top_p=1.0):
    """Responses to contexts, both lists of ids: at most limits[i] ids, of which the last may be an end token of the
    model or complete a string of stop. draws: (B, R) float64 uniforms on the device. Rows that have ended leave the
    batch and the key-value cache a few at a time. NotFinite if logits of a row that goes on are not."""
    device = draws.device
    ends = end_tokens(model)
    responses = [[] for _ in contexts]
    rows = list(range(len(contexts)))  # those in the batch
    ended = set()  # those that have ended, which may still be there
    drawn = []  # (b,) each: the tokens since the last look, -1 where logits were not finite
    look = LOOK if device.type == "cpu" else LOOK_ON_GPU
    decoder = Decoder(model, contexts, limits, tokenizer.pad_token_id, device)
    logits = decoder.read_contexts()
    for t in range(max(limits)):
        newest = draw(logits, draws[:, t], temperature, top_k, top_p)
        drawn.append(torch.where(logits.amax(-1).isfinite(), newest, -1))
        if len(drawn) == look or t + 1 == max(limits):
            for row, ids in zip(rows, torch.stack(drawn, 1).tolist(), strict=True):
                response = responses[row]
                if row not in ended and add_ids(response, ids, contexts[row], limits[row], ends, stop, tokenizer):
                    ended.add(row)
                if response[-1] == -1:
                    where = f"response token {len(response)} after the ids {contexts[row]!s:.60}"
                    raise NotFinite(f"logits are not finite at {where}")
            drawn = []
            going = [place for place, row in enumerate(rows) if row not in ended]
            if not going:
                break
            if len(going) <= decoder.leaving * len(rows):
                screen.advance(len(rows) - len(going))
                rows = [rows[place] for place in going]
                places = torch.tensor(going, device=device)
                draws = draws[places]
                newest = newest[places]
                decoder.keep(places)
        logits = decoder.read(newest)
    screen.advance(len(rows))
    return responses


class Decoder:
    """Forward passes over rows that grow by a token in each. A model whose cache is none of the library's own kinds,
    which rows can leave, reads all tokens in every pass."""

    def __init__(self, model, contexts, limits, pad_id, device):
        """contexts: lists of ids. limits: how many ids may follow each."""
        lengths = [len(ids) for ids in contexts]
        self.model = model
        self.contexts = contexts
        self.tokens = pad_rows(contexts, pad_id, begins=lengths, device=device)  # (B, T)
        self.attention = pad_rows([[1] * length for length in lengths], 0, begins=lengths, device=device)
        # a row that has ended may stay in the batch for a while: its positions go no further than the model's
        ends_at = [length + limit for length, limit in zip(lengths, limits, strict=True)]
        self.last_position = torch.tensor(ends_at, device=device)[:, None] - 1  # (B, 1)
        self.most_tokens = self.tokens.shape[1] + max(limits)
        self.num_passes = 0
        self.cache = None
        self.step = None  # of a pass as a graph
        self.leaving = LEAVING  # the share of rows that go on at which the others leave

    def read_contexts(self):
        """Logits (B, V) behind the contexts. Equal ones, as those of a group are, are read once."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        number_of = {ids: number for number, ids in enumerate(dict.fromkeys(map(tuple, self.contexts)))}
        numbers = [number_of[tuple(ids)] for ids in self.contexts]
        firsts = torch.tensor([numbers.index(number) for number in range(len(number_of))], device=self.tokens.device)
        output = self.forward(self.tokens[firsts], self.attention[firsts], self.last_position[firsts])
        cache = getattr(output, "past_key_values", None)
        if type(cache) in (DynamicCache, EncoderDecoderCache):  # of others rows may be unable to leave
            self.cache = cache
            for layer in getattr(cache, "self_attention_cache", cache).layers:
                if self.tokens.device.type != "cpu":
                    layer.is_compileable = True  # else transformers waits at every token, to see if a mask has padding
        numbers = torch.tensor(numbers, device=self.tokens.device)
        if self.tokens.device.type in GRAPHS and is_plain(self.model, self.cache):
            self.step = Step(self.model, self.cache, numbers, self.attention, self.last_position, self.most_tokens)
            self.leaving = LEAVING_GRAPH
        elif self.cache is not None and len(firsts) < len(numbers):
            self.cache.reorder_cache(numbers)
        return output.logits[:, -1][numbers]

    def read(self, newest):
        """Logits (b, V) behind one more token (b,) of each row in the batch."""
        if self.step:
            return self.step(newest)
        self.tokens = torch.cat([self.tokens, newest[:, None]], 1)
        self.attention = F.pad(self.attention, (0, 1), value=1)
        return self.forward(self.tokens, self.attention, self.last_position).logits[:, -1]

    def forward(self, tokens, attention, last_position):
        """The model's output for what is not in the cache."""
        positions = (attention.cumsum(1) - 1).clamp(min=0).minimum(last_position)
        unread = tokens.shape[1] if self.cache is None else 1
        self.num_passes += 1
        # an encoder-decoder learns from the number of logits how many of the tokens are the response
        num_logits = self.num_passes if isinstance(self.model, Seq2Seq) else 1
        return self.model(
            input_ids=tokens[:, -unread:], attention_mask=attention, position_ids=positions[:, -unread:],
            past_key_values=self.cache, use_cache=True, logits_to_keep=num_logits,
        )  # fmt: skip

    def keep(self, places):
        """Lets the rows at all other places of the batch leave."""
        if self.step:
            self.step.fit(places)
            return
        self.tokens = self.tokens[places]
        self.attention = self.attention[places]
        self.last_position = self.last_position[places]
        if self.cache is not None:
            self.cache.reorder_cache(places)


def add_ids(response, ids, context, limit, ends, stop, tokenizer):
    """Appends ids to a response to the ids in context up to its end: an end token, the token that completes a string of
    stop, the limit, or -1. Returns whether it has ended."""
    window = CONTEXT + max((len(text.encode()) for text in stop), default=0)  # few tokens have no byte
    for token in ids:
        response.append(token)
        if token in ends or token == -1 or len(response) == limit:
            return True
        if stop:
            text = tokenizer.decode([*context[-CONTEXT:], *response][-window:])
            # the whole text decides: the window may begin within a character, or before the response
            if any(part in text for part in ("\ufffd", *stop)) and stopped(tokenizer, [context], [response], stop)[0]:
                return True
    return False


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


# ---- Texts and scores ------------------------------------------------------------------------------------------------


def stopped(tokenizer, queries, responses, stops):
    """Whether each response (ids) contains a stop string."""
    if not stops:
        return [False] * len(responses)
    texts = texts_behind(tokenizer, [query[-CONTEXT:] for query in queries], responses)
    return [any(stop in text for stop in stops) for text in texts]


def texts_behind(tokenizer, queries, responses, **options):
    """Texts of responses to queries (lists of ids), as they stand behind these: many tokenizers drop the space before a
    first token. What an encoder-decoder writes is a text of its own."""
    if getattr(tokenizer, "answers_apart", False):
        queries = [[]] * len(queries)
    options["clean_up_tokenization_spaces"] = False  # which would change "yes ? no"
    whole = [[*query, *response] for query, response in zip(queries, responses, strict=True)]
    prompts = tokenizer.batch_decode(queries, **options)
    samples = tokenizer.batch_decode(whole, **options)
    texts = []
    for prompt, sample, response in zip(prompts, samples, responses, strict=True):
        text = sample.removeprefix(prompt)
        if not sample.startswith(prompt):  # which changes in a longer text
            text = tokenizer.decode(response, **options)
        texts.append(text)
    return texts


def decode(tokenizer, queries, responses, stops):
    """Texts of responses to queries, without special tokens, cut before a stop string and the space ahead of it."""
    texts = texts_behind(tokenizer, queries, responses, skip_special_tokens=True)
    # in the ids, since a stop string that is a special token is not in the text
    with_stop = stopped(tokenizer, queries, responses, stops)
    for row, text in enumerate(texts):
        if with_stop[row]:
            ends = [text.find(stop) for stop in stops if stop in text]
            texts[row] = text[: min(ends, default=None)].rstrip()
    return texts


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
    for row, sample in enumerate(zip(given["samples"], responses.ended, strict=True)):
        # rounding, which depends on the neighbours, would give equal texts different scores
        scores[row] = score_of.setdefault(sample, scores[row])
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
