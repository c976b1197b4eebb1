"""Samples for evaluations: responses by transformers' own `generate`, their texts, and what functions say of them.

Every token is a keyed draw (`common/seeding.py`), so a response depends on the seed and on its place among the queries,
not on the rows beside it, the size of a batch or the number of processes.
"""

import functools
import json
import math

import torch

from common.adapters import for_sampling
from common.classifiers import RewardModel
from common.functions import call_metric, call_reward
from common.logging import on_main
from common.models import end_tokens
from common.report import screen
from common.seeding import draw, uniforms

# ---- Ids -------------------------------------------------------------------------------------------------------------


class KeyedDraws:
    """Draws the next token of each row that goes on, and leaves it as the only one that `generate` can take.

    Arguments are those of `sample_by_generate`. Fills ids (B, R) and mask (B, R); going (B,): rows that have not ended.
    """

    def __init__(self, uniforms, ends, pad_id, ended, **options):
        self.uniforms = uniforms
        self.ends = torch.tensor(ends, dtype=torch.long, device=uniforms.device)
        self.ended = ended
        self.options = options  # of `draw`
        self.ids = torch.full(uniforms.shape, pad_id, device=uniforms.device)
        self.mask = torch.zeros_like(self.ids, dtype=torch.bool)
        self.going = torch.ones_like(self.mask[:, 0])
        self.length = 0  # tokens drawn so far
        self.logits = None

    def keep_logits(self, lm, inputs, output):
        """Forward hook: the newest logits (B, V) in the model's own type, which `generate` rounds to float32."""
        self.logits = output.logits[:, -1]

    def __call__(self, input_ids, scores):
        rows = self.going.nonzero()[:, 0]
        logits = self.logits[rows]
        finite = logits.amax(-1).isfinite()
        if not finite.all():
            row = int(rows[~finite][0])
            raise FloatingPointError(f"row {row}: logits are not finite at response token {self.length + 1}")
        tokens = draw(logits, self.uniforms[rows, self.length], **self.options)
        self.ids[rows, self.length] = tokens
        self.mask[rows, self.length] = True
        taken = self.ids[:, self.length, None]  # padding in rows that have ended
        self.length += 1
        done = torch.isin(tokens, self.ends)
        if self.ended is not None:
            done = done | self.ended(rows, self.ids[rows, : self.length])
        self.going[rows] = ~done
        self.logits = None
        return scores.fill_(-math.inf).scatter_(1, taken, 0.0)

    def rows_ended(self, input_ids, scores, **options):
        """Stopping criterion, asked behind every token."""
        return ~self.going


@torch.no_grad()
def sample_by_generate(lm, query, query_mask, uniforms, ends, pad_id, temperature=1.0, top_k=0, top_p=1.0, ended=None):
    """Responses to left-padded queries (B, Q): ids and mask, (B, R), right-padded; the end token counts.

    uniforms: (B, R) float64, drawn before decoding starts. ends: ids of the tokens that end a row; ended(rows, ids
    (b, t)) -> (b,) bool ends some without one. The model's generation_config is set aside meanwhile. Raises
    FloatingPointError for logits that are not finite, except of rows that have ended.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.utils import logging as transformers_logging

    start = None
    if lm.config.is_encoder_decoder:  # some encoders count padding as positions: it goes to the right
        order = (query_mask == 0).byte().argsort(dim=1, stable=True)
        query = query.gather(1, order)
        query_mask = query_mask.gather(1, order)
        start = lm.config.decoder_start_token_id
    settings = GenerationConfig(max_new_tokens=uniforms.shape[1], do_sample=False, use_cache=True)
    settings.pad_token_id = pad_id
    settings.decoder_start_token_id = start
    draws = KeyedDraws(uniforms, ends, pad_id, ended, temperature=temperature, top_k=top_k, top_p=top_p)
    own_settings = lm.generation_config
    verbosity = transformers_logging.get_verbosity()
    hook = lm.register_forward_hook(draws.keep_logits)
    try:
        transformers_logging.set_verbosity_error()  # it takes the padding behind ended rows for a missing mask
        lm.generation_config = settings  # `generate` looks there, too
        lm.generate(
            input_ids=query,
            attention_mask=query_mask.long(),
            generation_config=settings,
            logits_processor=LogitsProcessorList([draws]),
            stopping_criteria=StoppingCriteriaList([draws.rows_ended]),
            synced_gpus=False,  # weights are whole, so no process waits for another
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
        lm.generation_config = own_settings
        hook.remove()
    return draws.ids, draws.mask


def pad_left(queries, pad_id, device):
    """query and query_mask, (B, Q), of a list of lists of ids."""
    width = max(len(ids) for ids in queries)
    rows = [[pad_id] * (width - len(ids)) + ids for ids in queries]
    padding = torch.tensor([[width - len(ids)] for ids in queries], device=device)
    return torch.tensor(rows, device=device), torch.arange(width, device=device) >= padding


def end_of_rows(tokenizer, stop, limits):
    """The `ended` of a sampler: ended(rows, ids (b, t)) -> (b,) bool, True where ids hold a string of stop or have
    limits (B,)[rows] tokens. None where neither is given. Texts are made of the rows alone whose newest token may
    complete a stop string."""
    if not stop and limits is None:
        return None

    def ended(rows, ids):
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if stop:
            newest = ids[:, -1].tolist()
            places = [place for place, token in enumerate(newest) if may_complete(tokenizer, token, tuple(stop))]
            done[places] = torch.tensor(stopped(tokenizer, ids[places], stop), dtype=torch.bool, device=ids.device)
        if limits is not None:
            done = done | (ids.shape[1] >= limits[rows])
        return done

    return ended


# Decoders of `tokenizers` by which a token adds its text to that of the tokens before it. Others look further: they
# close gaps before punctuation, or mark the end of a word at its last token.
ADDING = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


@functools.lru_cache(maxsize=4)
def adds_text(tokenizer):
    """Whether a token leaves the text of those before it as it is, but for the bytes of an unfinished character."""
    if not tokenizer.is_fast:
        return False
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if tokenizer.clean_up_tokenization_spaces and backend["model"]["type"] != "BPE":  # which is not cleaned up
        return False
    decoder = backend["decoder"]
    if decoder is None:
        return True
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return all(step["type"] in ADDING and not step.get("stop") for step in steps)


@functools.lru_cache(maxsize=2**18)
def may_complete(tokenizer, token, stops):
    """Whether a stop string can end within the text that the token adds."""
    if not adds_text(tokenizer) or "\ufffd" in "".join(stops):
        return True
    first, both = tokenizer.batch_decode([[token], [token, token]])
    if "\ufffd" in first or not both.startswith(first):  # a piece of a character
        return True
    behind = both[len(first) :]  # behind another token, where some have a space that they lose at the beginning
    for stop in stops:
        if ends_within(stop, first) or ends_within(stop, behind):
            return True
    return False


def ends_within(stop, text):
    """Whether the string stop can end at a character of text, whatever stands before text."""
    if stop in text:
        return True
    beginnings = [text[:length] for length in range(1, len(text) + 1)]
    return any(map(stop.endswith, beginnings))


def generate_all(
    accelerator, lm, tokenizer, queries, stream, *, seed, max_new_tokens, temperature=1.0, stop=(),
    decode_batch_size=1024, limits=None, sample=sample_by_generate, **filters,
):  # fmt: skip
    """Samples a response to each of a global list of queries (lists of ids); each process decodes its share.

    stream: (name, step); the uniforms of row i are keyed by (seed, name, step, i). limits: (B,) longest response of a
    row. sample: takes the arguments of `sample_by_generate`; top_k and top_p, the filters, only where they are given.
    Returns query, query_mask (B, Q) left-padded and response, response_mask (B, R), on every process.
    """
    device = accelerator.device
    pad_id = tokenizer.pad_token_id
    query, query_mask = pad_left(queries, pad_id, device)
    # the last processes repeat the last row where the rows do not divide
    share = math.ceil(len(queries) / accelerator.num_processes)
    begin = accelerator.process_index * share
    local = torch.arange(begin, begin + share).clamp(max=len(queries) - 1).to(device)
    draws = uniforms(seed, *stream, local.tolist(), max_new_tokens).to(device)
    lengths = query_mask.sum(1)[local]
    response = torch.full((share, max_new_tokens), pad_id, device=device)
    response_mask = torch.zeros(share, max_new_tokens, dtype=torch.bool, device=device)
    screen.show("sampling" if stream[0] == "rollout" else "evaluating", share)
    autocast_type = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    with for_sampling(lm, autocast_type), accelerator.autocast():
        # the longest first: where memory does not suffice, it shows at once
        for places in lengths.argsort(descending=True, stable=True).split(decode_batch_size):
            rows = local[places]
            row_limits = limits
            if limits is not None:
                row_limits = limits[rows]
            columns = slice(query.shape[1] - int(lengths[places].max()), None)
            response[places], response_mask[places] = sample(
                lm,
                query[rows, columns],
                query_mask[rows, columns],
                draws[places],
                end_tokens(lm),
                pad_id,
                temperature=temperature,
                ended=end_of_rows(tokenizer, stop, row_limits),
                **filters,
            )
            screen.advance(len(places))
    screen.show("scoring")
    response = accelerator.gather(response)[: len(queries)]
    response_mask = accelerator.gather(response_mask)[: len(queries)]
    return query, query_mask, response, response_mask


def kept_ids(response, mask):
    """The ids (B, R) where mask (B, R) is True, as a list of lists."""
    return [ids[keep].tolist() for ids, keep in zip(response.cpu(), mask.cpu(), strict=True)]


# ---- Texts and scores ------------------------------------------------------------------------------------------------


def stopped(tokenizer, responses, stops):
    """Whether each response (ids) holds a stop string."""
    if not stops:
        return [False] * len(responses)
    texts = tokenizer.batch_decode(responses)
    return [any(stop in text for stop in stops) for text in texts]


def has_ended(tokenizer, output_ids, ends, stops):
    """Whether each response (ids) holds an end token or a stop string."""
    with_stop = stopped(tokenizer, output_ids, stops)
    with_end = [not set(ends).isdisjoint(ids) for ids in output_ids]
    return [stop or end for stop, end in zip(with_stop, with_end, strict=True)]


def decode(tokenizer, queries, responses, stops):
    """Texts of the responses, without special tokens, cut before a stop string and stripped there. All arguments are
    lists of lists of ids. Responses are decoded behind their queries, since many tokenizers drop the space before a
    first token."""
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
    """What a reward or metric function of texts gets by name, besides the rows' other columns: a list each, with an
    entry for every row, and the tokenizer."""
    prompts = [row["prompt"] for row in rows]
    return {
        "samples": [prompt + output for prompt, output in zip(prompts, outputs, strict=True)],
        "prompts": prompts,
        "outputs": list(outputs),
        "output_ids": [list(ids) for ids in output_ids],
        "tokenizer": tokenizer,
    }


def evaluate_samples(accelerator, lm, tokenizer, rows, queries, metric, args, *, reward=None, filtered=True):
    """Means of what a metric function and a reward (their names in args; None: not asked) say of sampled responses, as
    {name: mean}, and the samples, a dict for each row. filtered: by args.top_k and args.top_p.

    The uniforms are the same at every evaluation, so that a difference between two of them is the model's.
    """
    sampling = {
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.eval_temperature,
        "stop": args.stop,
        "decode_batch_size": args.decode_batch_size,
    }
    if filtered:
        sampling["top_k"] = args.top_k
        sampling["top_p"] = args.top_p
    _, _, response, mask = generate_all(accelerator, lm, tokenizer, queries, ("eval", 0), **sampling)
    output_ids = kept_ids(response, mask)
    outputs = decode(tokenizer, queries, output_ids, args.stop)
    values = {}
    if metric is not None:
        given = text_arguments(tokenizer, rows, outputs, output_ids)
        values |= on_main(accelerator, call_metric, metric, args.metric, rows, given)
    if reward is not None:
        ended = has_ended(tokenizer, output_ids, end_tokens(lm), args.stop)
        scores = score_outputs(accelerator, reward, args, tokenizer, rows, outputs, output_ids, ended)
        values["reward"] = list(map(total, scores))
    means = {name: sum(column) / len(column) for name, column in values.items()}
    prompts = [row["prompt"] for row in rows]
    columns = {"prompt": prompts, "output": outputs, **values}
    samples = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return means, samples


def total(score):
    """A score, or the sum of a list with one for each token."""
    return sum(score) if isinstance(score, list) else score


def score_outputs(accelerator, reward, args, tokenizer, rows, outputs, output_ids, ended):
    """Scores of the global batch, on every process: a reward function runs once, a classifier on shares of the rows.
    ended: as `has_ended` returns it; a classifier sees an end token there."""
    screen.show("scoring")
    given = text_arguments(tokenizer, rows, outputs, output_ids)
    if not isinstance(reward, RewardModel):
        lengths = [len(ids) for ids in output_ids]
        scores = on_main(accelerator, call_reward, reward, args.reward, rows, given, lengths)
        screen.show("training")
        return scores
    share = math.ceil(len(rows) / accelerator.num_processes)
    begin = accelerator.process_index * share
    local = [min(row, len(rows) - 1) for row in range(begin, begin + share)]
    samples = [given["samples"][row] for row in local]
    with accelerator.autocast():
        scores = reward(samples, [ended[row] for row in local], args.micro_batch_size)
    scores = accelerator.gather(scores)[: len(rows)].tolist()
    for row, score in enumerate(scores):
        if not math.isfinite(score):
            where = f"{rows[row]['prompt']!r:.60} and {outputs[row]!r:.60}"
            raise FloatingPointError(f"{args.reward}: {score} for {where}")
    screen.show("training")
    return scores
