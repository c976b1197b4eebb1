"""Sampling for rollouts, and the log-probabilities of what was sampled: `python -m pytest tests/test_sampling.py`

`draw` against softmax over a grid of uniforms; ppo's `sample` against a slow loop without cache, padding or batch; both
in float64, where another layout of the same work gives the same tokens.
"""

import math

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from algos import ppo
from common.cache import closed_ranks, write_in_place
from common.cli import from_task
from common.models import load_model
from common.sampling import decode, generate_all
from common.seeding import draw
from common.written_layer import WrittenLayer

EOS, PAD = 22, 23
GRID = 4001


def grid(n=GRID):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def drawn(logits, *options, uniforms=None):
    """Ids that `draw` gives over a grid of uniforms, and the frequency of each token."""
    uniforms = grid() if uniforms is None else uniforms
    ids = draw(logits.expand(len(uniforms), -1), uniforms, *options)
    return ids, torch.bincount(ids, minlength=logits.shape[-1]).double() / len(uniforms)


def some_logits(n=11, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=n) * 2)


def prompts(*lengths, seed=0):
    """Left-padded queries of these lengths and their mask."""
    width, random = max(lengths), np.random.default_rng(seed)
    ids = [[PAD] * (width - n) + random.integers(0, 21, n).tolist() for n in lengths]
    return torch.tensor(ids), torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def uniforms(rows, width, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random((rows, width)))


# ---- One token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_softmax(temperature):
    """Over an even grid, the count of a token differs from its probability by less than one."""
    logits = some_logits()
    ids, frequency = drawn(logits, temperature)
    assert (frequency - (logits / temperature).softmax(-1)).abs().max() < 1 / GRID
    assert (ids.diff() >= 0).all()  # inverse CDF: in the order of the vocabulary


def test_each_row_has_its_own_uniform():
    logits = torch.stack([some_logits(seed=seed) for seed in range(5)])
    u = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7], dtype=torch.float64)
    together = draw(logits, u, 0.7)
    alone = [draw(logits[i : i + 1], u[i : i + 1], 0.7)[0] for i in range(5)]
    assert together.tolist() == alone


@pytest.mark.parametrize("allowed", [[0], [10], [4], [0, 10], [3, 4, 7], list(range(1, 10))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_probability_is_never_drawn(allowed, dtype):
    """Neither at the edges of [0, 1) nor anywhere else; zeros lead, trail, and lie between."""
    logits = torch.full((11,), -math.inf, dtype=dtype)
    logits[allowed] = some_logits()[allowed].to(dtype)
    edges = torch.tensor([0.0, 5e-324, 2**-53, 0.5, 1 - 2**-24, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    for options in ((0.7,), (1.0, 5), (1.0, 0, 0.9), (0.3, 3, 0.5)):
        ids, _ = drawn(logits, *options, uniforms=torch.cat([edges, grid(101)]))
        assert set(ids.tolist()) <= set(allowed)
    edge_ids, _ = drawn(logits, 1.0, uniforms=edges[[0, -1]])
    assert edge_ids.tolist() == [min(allowed), max(allowed)]


def test_the_last_cumulative_value_is_the_scale():
    """300 probabilities of 1/300 do not sum to 1 in float64, nor does the grid's last point fall beyond the last."""
    for n in (3, 7, 300, 1001):
        ids, frequency = drawn(torch.zeros(n), 1.0, uniforms=torch.tensor([np.nextafter(1.0, 0.0)] * 3))
        assert ids.tolist() == [n - 1] * 3


def test_temperature_zero_is_the_argmax():
    logits = some_logits()
    ids, _ = drawn(logits, 0, uniforms=torch.tensor([0.0, 0.5, np.nextafter(1.0, 0.0)]))
    assert ids.tolist() == [int(logits.argmax())] * 3
    ids, _ = drawn(logits, 1e-4)
    assert set(ids.tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("k", [1, 3, 10, 11, 50])
def test_top_k_keeps_the_likeliest(k, temperature):
    logits = some_logits()
    kept = logits.argsort(descending=True)[:k]
    expected = torch.zeros(11, dtype=torch.float64)
    expected[kept] = (logits[kept] / temperature).softmax(-1)
    assert (drawn(logits, temperature, k)[1] - expected).abs().max() < 1 / GRID


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.6, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set(p, temperature):
    """By hand: the likeliest first, until their probability, at this temperature, reaches p."""
    logits = some_logits()
    probs = (logits / temperature).softmax(-1)
    kept, total = [], 0.0
    for token in probs.argsort(descending=True).tolist():
        if total < p:
            kept.append(token)
            total += float(probs[token])
    expected = torch.zeros(11, dtype=torch.float64)
    expected[kept] = probs[kept] / total
    assert (drawn(logits, temperature, 0, p)[1] - expected).abs().max() < 1 / GRID


def test_top_k_comes_before_top_p():
    """As in transformers: the probabilities that top_p adds up are those after top_k."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert set(drawn(logits, 1.0, 2, 0.5)[0].tolist()) == {0}  # 0.4 / 0.7 reaches 0.5
    assert set(drawn(logits, 1.0, 0, 0.5)[0].tolist()) == {0, 1}


# ---- Responses -------------------------------------------------------------------------------------------------------


def slow_sample(model, query, row_uniforms, ends, temperature):
    """One row: the whole sequence through the model for every token, inverse CDF in Python."""
    ids = []
    for u in row_uniforms.tolist():
        logits = model(torch.tensor([query + ids])).logits[0, -1].double().tolist()
        weights = [math.exp((x - max(logits)) / temperature) for x in logits]
        target, token = u * sum(weights), 0
        while target >= weights[token]:
            target, token = target - weights[token], token + 1
        ids.append(token)
        if token in ends:
            break
    return ids


def frequent_token(model, query, mask, u):
    """A token that some rows draw early and others never: a good end token for a test."""
    ids, _ = ppo.sample(model, query, mask, u, [-1], PAD)
    ended = (ids[:, :, None] == torch.arange(25)).any(1).sum(0)  # rows in which each token occurs
    return int((ended - len(ids) / 2).abs().argmin())


def rows_of(ids, mask):
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sample_is_the_slow_loop(build_model, family, temperature):
    model = build_model(family, torch.float64)
    (query, mask), u = prompts(5, 1, 3, 7, 2, 4, 1), uniforms(7, 11)
    eos = frequent_token(model, query, mask, u)
    ids, response_mask = ppo.sample(model, query, mask, u, [eos], PAD, temperature)
    found = rows_of(ids, response_mask)
    queries = rows_of(query, mask)
    assert found == [slow_sample(model, queries[i], u[i], [eos], temperature) for i in range(7)]
    lengths = {len(row) for row in found}
    assert len(lengths) > 2 and max(lengths) == 11  # rows left the batch at different times, and one never did


def test_a_row_does_not_depend_on_the_others(build_model, family):
    model = build_model(family, torch.float64)
    (query, mask), u = prompts(5, 1, 3, 7, 2), uniforms(5, 11)
    eos = frequent_token(model, query, mask, u)
    together = rows_of(*ppo.sample(model, query, mask, u, [eos], PAD, 0.7))
    for i in range(5):
        bare = query[i : i + 1, mask[i]]
        alone = ppo.sample(model, bare, torch.ones_like(bare, dtype=torch.bool), u[i : i + 1], [eos], PAD, 0.7)
        assert rows_of(*alone) == together[i : i + 1]
    order = [3, 0, 4]
    assert rows_of(*ppo.sample(model, query[order], mask[order], u[order], [eos], PAD, 0.7)) == [
        together[i] for i in order
    ]


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_the_end_token_counts_and_nothing_after_it(build_model, pad_is_eos):
    model = build_model()
    (query, mask), u = prompts(5, 1, 3, 7, 2, 4, 6, 2, 3, 1, 1), uniforms(11, 7)
    eos = frequent_token(model, query, mask, u)
    pad = eos if pad_is_eos else PAD
    ids, response_mask = ppo.sample(model, query, mask, u, [eos], pad)
    ended = 0
    for row, keep in zip(ids.tolist(), response_mask.tolist(), strict=True):
        length = row.index(eos) + 1 if eos in row else 7
        assert keep == [True] * length + [False] * (7 - length)
        assert row[length:] == [pad] * (7 - length)
        ended += row[length - 1] == eos
    assert 0 < ended < 11


def test_an_end_token_with_id_zero(build_model):
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight[0] += 50 * model.transformer.ln_f.bias + 1  # tied: also the embedding of token 0
    (query, mask), u = prompts(3, 5), torch.full((2, 7), 1e-12, dtype=torch.float64)  # token 0 comes first in the CDF
    ids, response_mask = ppo.sample(model, query, mask, u, [0], 0)
    assert ids.tolist() == [[0] * 7] * 2 and response_mask.sum(1).tolist() == [1, 1]


def test_logits_that_are_not_finite_are_an_error(build_model):
    model = build_model()
    (query, mask), u = prompts(3, 5), uniforms(2, 7)
    model.transformer.wpe.weight.data[6] = math.nan  # position 6: reached by the second row at its third token
    with pytest.raises(FloatingPointError, match="row 1: logits are not finite at response token 3"):
        ppo.sample(model, query, mask, u, [-1], PAD)
    ppo.sample(model, query[:1], mask[:1], u[:1, :3], [-1], PAD)  # a row that does not get there


def test_the_models_generation_config_is_ignored(tmp_path, build_model, letters):
    """A checkpoint's own settings (TRL fell for top_k=50) would make the KL negative."""
    plain, forced = build_model(), build_model()
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 5.0, "min_new_tokens": 6}
    forced.generation_config.update(**settings, forced_eos_token_id=EOS, suppress_tokens=list(range(20)))
    forced.save_pretrained(tmp_path)
    letters.save_pretrained(tmp_path)
    forced, _ = load_model(from_task(ppo.Args, ppo.TASK), str(tmp_path))
    assert forced.generation_config.top_k == 1 and forced.generation_config.forced_eos_token_id == EOS
    (query, mask), u = prompts(3, 5, 2, 4, 1), uniforms(5, 7)
    free, bound = (rows_of(*ppo.sample(model, query, mask, u, [EOS], PAD)) for model in (plain, forced.eval()))
    assert free == bound and len(set(sum(free, [])) & set(range(20))) > 3


def test_rollouts_do_not_depend_on_the_decode_batch(build_model, letters, accelerator):
    model, queries = build_model(dtype=torch.float64), [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]]

    def generate(iteration, size=1024):
        options = {"seed": 1, "max_new_tokens": 7, "temperature": 0.7, "decode_batch_size": size}
        return generate_all(accelerator, model, letters, queries, ("rollout", iteration), sample=ppo.sample, **options)

    whole = generate(2)
    assert rows_of(*whole[:2]) == queries
    for size in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(whole, generate(2, size), strict=True))
    other = generate(3)
    assert not torch.equal(whole[2], other[2])


# ---- The cache -------------------------------------------------------------------------------------------------------


def test_a_written_layer_is_the_librarys():
    """Tokens are written and rows leave; the numbers are those of the layer that copies."""
    states = torch.randn(13, 2, 7, 3, 5, generator=torch.Generator().manual_seed(0))
    plain = DynamicLayer()
    plain.update(states[0], states[0] + 1)
    written = WrittenLayer(plain, 12)
    memory = [buffer.data_ptr() for buffer in written.buffers]
    states = states[:, :, :, :1]
    for t in range(1, 13):
        found = written.update(states[t], -states[t])
        expected = plain.update(states[t], -states[t])
        assert all(map(torch.equal, found, expected)) and written.get_seq_length() == plain.get_seq_length()
        assert written.get_mask_sizes(1) == plain.get_mask_sizes(1)
    staying = closed_ranks(torch.tensor([False, True]))
    for layer in (written, plain):
        layer.reorder_cache(staying)
    assert torch.equal(written.keys, plain.keys) and torch.equal(written.values, plain.values)
    assert [buffer.data_ptr() for buffer in written.buffers] == memory


def test_closed_ranks_moves_few_rows():
    for seed in range(50):
        staying = torch.rand(11, generator=torch.Generator().manual_seed(seed)) < 0.6
        places = closed_ranks(staying)
        assert sorted(places.tolist()) == staying.nonzero()[:, 0].tolist()
        kept = staying[: len(places)]
        assert torch.equal(places[kept], torch.arange(len(places))[kept])  # nobody moves without need


@pytest.mark.parametrize("autocast", [False, True])
def test_the_cache_has_the_type_that_attention_computes_in(build_model, family, autocast, monkeypatch):
    model = build_model(family)
    caches = []

    def recorded(cache, room):
        caches.append(cache)
        write_in_place(cache, room)

    monkeypatch.setattr(ppo, "write_in_place", recorded)
    (query, mask), u = prompts(5, 1, 3), uniforms(3, 7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ppo.sample(model, query, mask, u, [-1], PAD)
    expected = torch.bfloat16 if autocast else torch.float32
    assert [type(layer) for layer in caches[0].layers] == [WrittenLayer] * 2
    assert all(layer.keys.dtype == layer.values.dtype == expected for layer in caches[0].layers)
    assert caches[0].get_seq_length() == 5 + 7 - 1


# ---- Scores of what was sampled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_sampler(build_model, family, temperature):
    """P(first token) and P(second | first), measured by drawing over a grid, are exp of response_logprobs' numbers."""
    model, rows = build_model(family, torch.float64), 1001
    query, mask = prompts(5, 2)
    query, mask = query[1:].expand(rows, -1), mask[1:].expand(rows, -1)  # three columns of left padding
    first = torch.stack([grid(rows), torch.full((rows,), 0.5, dtype=torch.float64)], 1)
    for position, u in enumerate([first, first.flip(1)]):
        ids, keep = ppo.sample(model, query, mask, u, [-1], PAD, temperature)
        frequency = torch.bincount(ids[:, position], minlength=25).double() / rows
        some = unique_rows(ids[:, position])
        with torch.no_grad():
            logprobs, _, _ = ppo.response_logprobs(model, query[some], mask[some], ids[some], keep[some], temperature)
        assert len(some) > 3
        assert (logprobs[:, position].exp() - frequency[ids[some, position]]).abs().max() < 1 / rows


def unique_rows(tokens):
    """The first row of each token that occurs."""
    return [tokens.tolist().index(token) for token in sorted(set(tokens.tolist()))]


def test_response_logprobs_is_the_plain_forward(build_model, family):
    """Row by row, without padding: log softmax of the logits / temperature, values and entropies by hand."""
    model = build_model(family, torch.float64)
    policy = ppo.PolicyWithValue(model, init="normal")
    (query, mask), u = prompts(5, 1, 3), uniforms(3, 7)
    eos = frequent_token(model, query, mask, u)
    ids, keep = ppo.sample(model, query, mask, u, [eos], PAD, 0.7)
    with torch.no_grad():
        scored = policy(query, mask, ids, keep, 0.7, also=ppo.token_entropies)
        assert [x.shape for x in scored] == [(3, 7)] * 3
        for row in range(3):
            q, r = query[row, mask[row]], ids[row, keep[row]]
            output = model(torch.cat([q, r])[None], output_hidden_states=True)
            states = slice(len(q) - 1, len(q) + len(r) - 1)  # the state before each response token
            logps = (output.logits[0, states] / 0.7).log_softmax(-1)
            values, entropies = (
                policy.value_head(output.hidden_states[-1][0, states])[:, 0],
                -(logps.exp() * logps).sum(-1),
            )
            for got, expected in zip(scored, (logps[range(len(r)), r], values, entropies), strict=True):
                torch.testing.assert_close(got[row, : len(r)], expected, rtol=1e-9, atol=1e-9)


def test_response_logprobs_attends_to_holes(build_model):
    """Text of a tool has mask False but was read: the tokens behind it are scored as its continuation."""
    model, (query, mask) = build_model(dtype=torch.float64), prompts(5)
    ids = torch.tensor([[3, 9, 4, 17, 5, 8, PAD]])
    full = torch.tensor([[True] * 6 + [False]])
    holes = full & ~torch.tensor([[False, True, True, False, False, False, False]])
    with torch.no_grad():
        a, b = (ppo.response_logprobs(model, query, mask, ids, keep)[0] for keep in (full, holes))
    torch.testing.assert_close(a[:, [0, 3, 4, 5]], b[:, [0, 3, 4, 5]], rtol=1e-12, atol=1e-12)


def test_decode_keeps_the_space_between_prompt_and_output():
    """Many tokenizers (Llama's) drop the space before a first token: outputs are decoded behind their queries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁hello": 0, "▁world": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    assert decode(tokenizer, [[0], [0]], [[1, 2], [0, 1]], ()) == [" world", " hello world"]
