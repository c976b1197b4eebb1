"""The decoding loop of rollouts and evaluations, the sampled texts, and their scores by functions.

Every token is a keyed draw (`common/seeding.py`), so a response depends on the seed and on its position among the
queries, not on other rows, batch sizes or the number of processes.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from common.cli import InputError, build, call_metric, call_reward, call_rollout, load_function, stop_if
from common.data import (
    encode_prompts,
    is_chat,
    load_rows,
    load_sets,
    local_rows,
    marked,
    pad_rows,
    set_flag,
    set_prefix,
)
from common.launch import on_each, on_main
from common.model import RewardModel, Seq2Seq, end_tokens, for_sampling, max_positions, unsharded
from common.seeding import draw, rng, seed_libraries, uniforms
from common.terminal import screen

# ---- Prompts ---------------------------------------------------------------------------------------------------------


@dataclass
class Prompts:
    """The data of a run on prompts: rows at first, and tokens once there is a tokenizer."""

    rows: list
    eval_sets: dict  # {name: rows}, then {name: (rows, queries)}
    reward: Callable | None  # None: a reward model, which is loaded after the policy
    metric: Callable | None
    rollout: Callable | None = None  # that of `generate_all`
    queries: list | None = None  # ids of the prompts
    report: str = ""

    def encode(self, lm, tokenizer, args):
        """Tokenises all prompts. Without evaluation rows, the first training rows are used for evaluation."""
        encoder = lm.config.is_encoder_decoder
        if encoder and self.rollout:
            raise InputError("--rollout does not work with an encoder-decoder, which answers once")
        limit = max_positions(lm)

        def encode_set(rows, flag):
            longest = args.max_prompt_length
            return encode_prompts(rows, tokenizer, args.max_new_tokens, limit, flag, longest, encoder)

        num_read = len(self.rows)
        self.rows, self.queries = encode_set(self.rows, "--dataset")
        for name, rows in self.eval_sets.items():
            self.eval_sets[name] = encode_set(rows, set_flag(name))
        if not self.eval_sets:
            size = args.rollout_batch_size
            self.eval_sets = {"": (self.rows[:size], self.queries[:size])}
        lengths = sorted(map(len, self.queries))
        self.report = (
            f"{num_read} prompts, {num_read - len(self.rows)} dropped as too long; "
            f"tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        )


def read_prompts(args):
    """The rows and functions named by the flags."""
    metric = load_function(args.metric, "--metric")
    reward = None
    if not isinstance(args.reward, str) or re.search(r"\.py(:|$)", args.reward):
        reward = load_function(args.reward, "--reward")
    rollout = None
    if args.rollout:
        rollout = partial(call_rollout, load_function(args.rollout, "--rollout"), args.rollout)
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    return Prompts(rows, eval_sets, reward, metric, rollout)


def read_data(args):
    """(rows, evaluation sets, rows that evaluations sample from, metric), as named by the flags of training on texts.
    The third are those of --eval-prompts, or with a metric those of the first evaluation set."""
    metric = load_function(args.metric, "--metric")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    eval_sets = load_sets(args.eval_dataset, "--eval-dataset")
    prompts = []
    if args.eval_prompts is not None:
        prompts = load_rows(build(args.eval_prompts, "--eval-prompts"), "--eval-prompts")
    elif metric:
        prompts = next(iter(eval_sets.values()), [])
    if metric and not (prompts and ("prompt" in prompts[0] or is_chat(prompts, ["chosen"]))):
        raise InputError("--metric needs rows with a prompt to sample from: give --eval-prompts")
    return rows, eval_sets, prompts, metric


# ---- The key-value cache ---------------------------------------------------------------------------------------------


BLOCK = 128  # tokens by which the cache grows: room for the longest response is far more than most need


class WrittenLayer:
    """Mixin of a DynamicLayer that takes the place of another one: keys and values of a new token are written after the
    ones there, while the library would copy all of them. keys, values (B, heads, T, size) are the used part of buffers,
    which grow by BLOCK tokens."""

    def __init__(self, layer):
        vars(self).update(vars(layer))
        self.is_compileable = self.device.type != "cpu"  # else transformers waits to see whether a mask has padding
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)  # the type that attention casts them to
            self.keys = self.keys.to(dtype)
            self.values = self.values.to(dtype)
        self.grow()

    def grow(self):
        rows, _, length, _ = self.keys.shape
        self.buffers = [F.pad(states, (0, 0, 0, BLOCK)) for states in (self.keys, self.values)]
        self.use(rows, length)

    def use(self, rows, length):
        """Sets which part of the buffers is in use."""
        keys, values = self.buffers
        self.keys = keys[:rows, :, :length]
        self.values = values[:rows, :, :length]

    def update(self, key_states, value_states, *args, **options):
        rows, _, begin, _ = self.keys.shape
        if begin + key_states.shape[2] > self.buffers[0].shape[2]:
            self.grow()
        self.use(rows, begin + key_states.shape[2])
        self.keys[:, :, begin:] = key_states
        self.values[:, :, begin:] = value_states
        return self.keys, self.values

    def reorder_cache(self, rows):
        for states in (self.keys, self.values):
            states[: len(rows)] = states[rows]
        self.use(len(rows), self.keys.shape[2])


def with_room(cache):
    """The cache of a first forward pass, with room for new tokens in its plain layers. Other layers (windows,
    convolutions, recurrent states, encoder outputs) stay unchanged. None if it is not one of the library's own kinds,
    because rows may then be unable to leave it."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

    if type(cache) not in (DynamicCache, EncoderDecoderCache):
        return None
    written_layer = type("WrittenLayer", (WrittenLayer, DynamicLayer), {})
    layers = getattr(cache, "self_attention_cache", cache).layers
    for place, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[place] = written_layer(layer)
    return cache


# ---- Ids -------------------------------------------------------------------------------------------------------------

LEAVING = 3 / 4  # rows that have ended leave the batch when no more than this share of it goes on
LOOK = 16  # a GPU is asked only once in so many tokens which rows go on, since the host must wait for it


@torch.no_grad()
def sample(model, query, query_mask, uniforms, ends, pad_id, temperature=1.0, top_k=0, top_p=1.0, ended=None):
    """Responses to left-padded queries (B, Q): ids and mask (B, R), right-padded, including the end token.

    uniforms: (B, R) float64, drawn before decoding starts, so a row's tokens do not depend on the other rows. ends: ids
    of the tokens that end a row; ended(rows, ids (b, t)) -> (b,) bool ends some without one. Rows that have ended leave
    the batch and the key-value cache a few at a time. If they cannot leave its cache, a model reads all tokens for each
    new one. Its generation_config is not used. FloatingPointError if logits of a row that goes on are not finite.
    """
    num_rows, width = uniforms.shape
    ids = torch.full((num_rows, width), pad_id, device=query.device)
    mask = torch.zeros(num_rows, width, dtype=torch.bool, device=query.device)
    ends = torch.tensor(ends, dtype=torch.long, device=query.device)
    rows = torch.arange(num_rows, device=query.device)  # those in the batch
    alive = torch.ones_like(rows, dtype=torch.bool)  # of these, those that go on
    sound = torch.ones_like(mask)  # whether the logits were finite
    look = 1 if query.device.type == "cpu" else LOOK
    tokens = query
    attention = query_mask.long()
    unread = query.shape[1]
    cache = None
    is_seq2seq = isinstance(model, Seq2Seq)  # it learns from logits_to_keep how many tokens are the response
    for t in range(width):
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": tokens[:, -unread:], "attention_mask": attention, "position_ids": positions[:, -unread:]}
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=t + 1 if is_seq2seq else 1)
        if t == 0:
            cache = with_room(getattr(output, "past_key_values", None))
        logits = output.logits[:, -1]
        sound[rows, t] = logits.amax(-1).isfinite() | ~alive
        newest = draw(logits, uniforms[rows, t], temperature, top_k, top_p)
        newest = torch.where(alive, newest, pad_id)
        ids[rows, t] = newest
        mask[rows, t] = alive
        alive = alive & ~torch.isin(newest, ends)
        if ended is not None:
            alive = alive & ~ended(rows, ids[rows, : t + 1])
        going = rows
        if (t + 1) % look == 0 or t + 1 == width:
            goes_on, is_sound = torch.stack([alive, sound[rows].all(1)]).cpu()
            if not is_sound.all():
                row = int(rows[int(is_sound.int().argmin())])
                token = int(sound[row].int().argmin()) + 1
                behind = query[row, query_mask[row]].tolist()
                raise FloatingPointError(
                    f"logits are not finite at response token {token} after the ids {behind!s:.60}"
                )
            going = goes_on.nonzero()[:, 0].to(rows.device)
            if len(going) == 0:
                break
        tokens = torch.cat([tokens, newest[:, None]], 1)
        attention = F.pad(attention, (0, 1), value=1)
        unread = tokens.shape[1] if cache is None else 1
        if len(going) <= LEAVING * len(rows):
            if cache is not None:
                cache.reorder_cache(going)
            screen.advance(len(rows) - len(going))
            rows = rows[going]
            alive = alive[going]
            tokens = tokens[going]
            attention = attention[going]
    screen.advance(len(rows))
    return ids, mask


CONTEXT = 8  # tokens before a stop string, since tokenizers decode the first ones of a text differently


def end_of_rows(tokenizer, stop, limits):
    """The `ended` of a sampler: ended(rows, ids (b, t)) -> (b,) bool, True where the newest of ids completes a string
    of stop or is the last of limits (B,)[rows]. None where neither is given."""
    if not stop and limits is None:
        return None
    window = CONTEXT + max((len(text.encode()) for text in stop), default=0)  # a few tokens have no byte

    def ended(rows, ids):
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if limits is not None:
            done = ids.shape[1] >= limits[rows]
        if stop:
            texts = tokenizer.batch_decode(ids[:, -window:])
            # the whole text decides: the window may begin within a character
            places = [i for i, text in enumerate(texts) if any(part in text for part in ("\ufffd", *stop))]
            done[places] |= torch.tensor(stopped(tokenizer, ids[places], stop), dtype=torch.bool, device=ids.device)
        return done

    return ended


def sample_behind(device, lm, tokenizer, contexts, draws, rooms, stop, sample, **options):
    """Lists of the ids sampled after contexts (lists of ids): at most rooms[i] ids, by draws[i], (max(rooms),)
    uniforms. The last one may be an end token, or complete a string of stop."""
    pad_id = tokenizer.pad_token_id
    limits = None
    if min(rooms) < max(rooms):
        limits = torch.tensor(rooms, device=device)
    query, query_mask = left_padded(contexts, pad_id, device)
    draws = torch.stack(draws).to(device)
    ended = end_of_rows(tokenizer, stop, limits)
    return kept_ids(*sample(lm, query, query_mask, draws, end_tokens(lm), pad_id, ended=ended, **options))


def generate_all(
    accelerator, lm, tokenizer, queries, stream, *, seed, max_new_tokens, stop=(), limits=None, decode_batch_size=1024,
    rows=None, rollout=None, sample=sample, **options,
):  # fmt: skip
    """Responses to a global list of queries (lists of ids), of which each process samples its share: once per query, or
    as the user's function `rollout(rows, given, sampled)` does (`call_rollout`). Returns, on every process, (query,
    query_mask (B, Q) left-padded, response, response_mask (B, R) right-padded), where the mask is True at ids that are
    trained; the ids of all responses; and the rows, with the columns of the user's function.

    stream: (name, step). The n-th token that is sampled for row i takes the n-th uniform of (seed, name, step, i).
    limits: longest response of each row. sample: a function as the one above, which gets options (temperature, top_k,
    top_p).
    """
    from accelerate.utils import gather_object

    device = accelerator.device
    name, step = stream
    local = local_rows(accelerator, len(queries))
    prompts = [queries[row] for row in local]
    if limits is None:
        limits = [max_new_tokens] * len(queries)
    sampled = [[] for _ in local]  # of each row: (context, ids) of every call

    def sample_rows(contexts, places, stop=stop):
        """Lists of the ids sampled after contexts (lists of ids) of the rows at places, which count from 0 in this
        process; [] where a response has reached its limit."""
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if len({*places}) < len(places):
            raise InputError("--rollout: a row appears twice in one call of `sample`")
        found = {place: [] for place in places}
        waiting = []
        for place, context in zip(places, contexts, strict=True):
            room = len(prompts[place]) + int(limits[local[place]]) - len(context)
            if room > 0:
                waiting.append((place, context, room))
        # the longest first, so that a lack of memory shows at once
        waiting.sort(key=lambda each: -len(each[1]))
        screen.show("sampling" if name == "rollout" else "evaluating", len(waiting))
        for begin in range(0, len(waiting), decode_batch_size):
            own, texts, rooms = zip(*waiting[begin : begin + decode_batch_size], strict=True)
            draws = []
            for place in own:
                done = sum(len(ids) for _, ids in sampled[place])
                draws.append(uniforms(seed, name, step, [local[place]], done + max(rooms))[0, done:])
            new = sample_behind(device, lm, tokenizer, texts, draws, rooms, stop, sample, **options)
            found |= zip(own, new, strict=True)
        for place, context in zip(places, contexts, strict=True):
            sampled[place].append(([*context], [*found[place]]))
        return [found[place] for place in places]

    autocast_type = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    with for_sampling(lm, autocast_type), accelerator.autocast():
        if rollout is None:
            responses = [[(ids, True)] for ids in sample_rows(prompts, range(len(local)))]
        else:
            own_rows = [rows[row] for row in local]
            given = {
                "sample": sample_rows,
                "prompt_ids": prompts,
                "prompts": [row["prompt"] for row in own_rows],
                "tokenizer": tokenizer,
                "seeds": [int(rng(seed, f"{name} seeds", step, row).integers(2**32)) for row in local],
                "model": lm,
                "temperature": options["temperature"],
                "max_new_tokens": max_new_tokens,
            }
            # the same in a continued run, and different in each process
            seed_libraries(int(rng(seed, f"{name} libraries", step, accelerator.process_index).integers(2**32)))
            responses, columns = on_each(accelerator, rollout, own_rows, given, sampled)
            added = [{column: values[place] for column, values in columns.items()} for place in range(len(local))]
            rows = [row | new for row, new in zip(rows, gather_object(added), strict=False)]
    screen.show("scoring")
    response = torch.full((len(local), max_new_tokens), tokenizer.pad_token_id)
    kinds = torch.zeros_like(response)  # 1: only read, 2: trained
    for place, segments in enumerate(responses):
        begin = 0
        for ids, trained in segments:
            response[place, begin : begin + len(ids)] = torch.tensor(ids)
            kinds[place, begin : begin + len(ids)] = 1 + trained
            begin += len(ids)
    response, kinds = (accelerator.gather(x.to(device))[: len(queries)] for x in (response, kinds))
    output_ids = kept_ids(response, kinds > 0)
    longest = max(map(len, output_ids))
    query, query_mask = left_padded(queries, tokenizer.pad_token_id, device)
    return (query, query_mask, response[:, :longest], kinds[:, :longest] == 2), output_ids, rows


def left_padded(queries, pad_id, device):
    """Ids and mask (B, Q) of lists of ids."""
    lengths = [len(ids) for ids in queries]
    masks = [[True] * length for length in lengths]
    return tuple(pad_rows(x, fill, begins=lengths, device=device) for x, fill in ((queries, pad_id), (masks, False)))


def kept_ids(response, mask):
    """The ids (B, R) where mask (B, R) is True, as a list of lists."""
    return [ids[keep].tolist() for ids, keep in zip(response.cpu(), mask.cpu(), strict=True)]


# ---- Texts and scores ------------------------------------------------------------------------------------------------


def stopped(tokenizer, responses, stops):
    """Whether each response (ids) contains a stop string."""
    if not stops:
        return [False] * len(responses)
    texts = tokenizer.batch_decode(responses)
    return [any(stop in text for stop in stops) for text in texts]


def has_ended(tokenizer, output_ids, ends, stops):
    """Whether each response (ids) contains an end token or a stop string."""
    with_stop = stopped(tokenizer, output_ids, stops)
    return [stop or not set(ends).isdisjoint(ids) for stop, ids in zip(with_stop, output_ids, strict=True)]


def decode(tokenizer, queries, responses, stops):
    """Texts of responses to queries (lists of ids), without special tokens, cut before a stop string and stripped.
    Responses are decoded after their queries, because many tokenizers drop the space before a first token."""
    whole = [query + response for query, response in zip(queries, responses, strict=True)]
    prompts = tokenizer.batch_decode(queries, skip_special_tokens=True)
    samples = tokenizer.batch_decode(whole, skip_special_tokens=True)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)  # where a prompt changes in a longer text
    with_stop = stopped(tokenizer, responses, stops)  # a stop string that is a special token is not in the text
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        if sample.startswith(prompt):
            texts[row] = sample[len(prompt) :]
        if with_stop[row]:
            ends = [texts[row].find(stop) for stop in stops if stop in texts[row]]
            texts[row] = texts[row][: min(ends, default=None)].rstrip()
    return texts


def text_arguments(tokenizer, rows, outputs, output_ids):
    """Keyword arguments of a reward or metric function of texts besides the rows' other columns: lists with one entry
    per row, and the tokenizer."""
    prompts = [row["prompt"] for row in rows]
    return {
        "samples": [prompt + output for prompt, output in zip(prompts, outputs, strict=True)],
        "prompts": prompts,
        "outputs": list(outputs),
        "output_ids": [list(ids) for ids in output_ids],
        "tokenizer": tokenizer,
    }


def evaluate_samples(accelerator, lm, tokenizer, rows, queries, metric, args, reward=None, rollout=None):
    """{name: mean} of a metric function and a reward (named in args; None: not used) on sampled responses, and the
    samples, one dict per row. The uniforms are the same at every evaluation, so a difference between two evaluations
    comes from the model."""
    (_, _, _, mask), output_ids, rows = generate_all(
        accelerator, lm, tokenizer, queries, ("eval", 0), seed=args.seed, stop=args.stop, rows=rows, rollout=rollout,
        max_new_tokens=args.max_new_tokens, temperature=args.eval_temperature, decode_batch_size=args.decode_batch_size,
        top_k=args.top_k, top_p=args.top_p,
    )  # fmt: skip
    outputs = decode(tokenizer, queries, output_ids, args.stop)
    values = {}
    if metric is not None:
        given = text_arguments(tokenizer, rows, outputs, output_ids)
        values |= on_main(accelerator, call_metric, metric, args.metric, rows, given)
    if reward is not None:
        scores, _, others = score_outputs(accelerator, reward, args, tokenizer, lm, rows, outputs, output_ids)
        stop_if([f"--reward and --metric both return {key!r}: choose another name" for key in values.keys() & others])
        values |= {"reward": list(map(total, scores)), **others}
    if rollout is not None:  # to be read: what is not trained in brackets
        kept = [flags[: len(ids)] for flags, ids in zip(mask.tolist(), output_ids, strict=True)]
        outputs = list(map(partial(marked, tokenizer), output_ids, kept))
    means = {name: sum(column) / len(column) for name, column in values.items()}
    columns = {"prompt": [row["prompt"] for row in rows], "output": outputs, **values}
    samples = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return means, samples


def evaluate_sets(run, step, model, lm, tokenizer, data, args):
    """Metrics of responses to the evaluation sets of `Prompts`: means of the reward and of --metric. Logs the samples.
    lm: the language model in `model`, without wrappers and heads."""
    metrics = {}
    samples = []
    model.eval()
    with unsharded(model):
        for name, (rows, queries) in data.eval_sets.items():
            means, set_samples = evaluate_samples(
                run.accelerator, lm, tokenizer, rows, queries, data.metric, args, data.reward, data.rollout
            )
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            if len(data.eval_sets) > 1:
                set_samples = [{"set": name} | row for row in set_samples]
            samples += set_samples
    run.samples(step, samples)
    return metrics


def total(score):
    """A score, or the sum of a list with one score per token."""
    return sum(score) if isinstance(score, list) else score


def score_outputs(accelerator, reward, args, tokenizer, lm, rows, outputs, output_ids):
    """(scores, ended, other columns of the reward) of the global batch, on every process. A reward function runs once;
    a classifier scores a share of the rows on each process, and sees an end token where a response has ended
    (`has_ended`). With --rollout, where turns may also end with such a token, a response has ended if its last token is
    one, or if there was room for more."""
    screen.show("scoring")
    ends = end_tokens(lm)
    if args.rollout:
        ended = [len(ids) < args.max_new_tokens or ids[-1] in ends for ids in output_ids]
    else:
        ended = has_ended(tokenizer, output_ids, ends, args.stop)
    given = text_arguments(tokenizer, rows, outputs, output_ids)
    others = {}
    if isinstance(reward, RewardModel):
        local = local_rows(accelerator, len(rows))
        samples = [given["samples"][row] for row in local]
        with accelerator.autocast():
            scores = reward(samples, [ended[row] for row in local], args.micro_batch_size)
        scores = accelerator.gather(scores)[: len(rows)].tolist()
        for row, score in enumerate(scores):
            if not math.isfinite(score):
                where = f"{rows[row]['prompt']!r:.60} and {outputs[row]!r:.60}"
                raise FloatingPointError(f"{args.reward}: {score} for {where}")
    else:
        lengths = [len(ids) for ids in output_ids]
        scores, others = on_main(accelerator, call_reward, reward, args.reward, rows, given, lengths)
    screen.show("training")
    return scores, ended, others
