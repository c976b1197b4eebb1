"""Samples by transformers' own `generate` (common/sampling.py): `python -m pytest tests/test_generate.py`

Against a slow loop of this file: one row at a time, the whole sequence through the model for every token, neither cache
nor padding, and the inverse CDF in Python. In float64, where another layout of the same work gives the same tokens.
"""

import copy
import logging
import math

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from algos import ilql, ppo
from common.models import as_decoder
from common.sampling import (
    adds_text,
    decode,
    end_of_rows,
    generate_all,
    has_ended,
    may_complete,
    sample_by_generate,
    stopped,
    text_arguments,
)
from common.seeding import uniforms as keyed_uniforms

BOS, EOS, PAD = 21, 22, 23
T5 = {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3, "relative_attention_num_buckets": 6}
T5 |= {"relative_attention_max_distance": 9, "decoder_start_token_id": PAD}
BART = {"d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 20}
BART |= {"decoder_attention_heads": 3, "decoder_ffn_dim": 28, "max_position_embeddings": 32, "forced_eos_token_id": EOS}
BART |= {"decoder_start_token_id": EOS}
ENCODER_DECODERS = {"t5": (tf.T5Config, T5), "bart": (tf.BartConfig, BART)}
LENGTHS = 5, 1, 3, 7, 2, 4, 1


@pytest.fixture
def messages():
    """What transformers says in a test, which starts at its default verbosity."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.warning_once.cache_clear()
    transformers_logging.add_handler(handler)
    yield heard
    transformers_logging.remove_handler(handler)
    transformers_logging.set_verbosity(verbosity)


def build_encoder_decoder(name):
    config, settings = ENCODER_DECODERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config(vocab_size=25, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **settings)
        lm = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64)
        for parameter_name, weight in lm.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 1 if "shared" in parameter_name else 0.5)
    return as_decoder(lm.eval())


def prompts(*lengths, pad=PAD):
    """Left-padded queries of these lengths and their mask."""
    width = max(lengths)
    random = np.random.default_rng(0)
    ids = [[pad] * (width - n) + random.integers(0, 21, n).tolist() for n in lengths]
    return torch.tensor(ids), torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def uniforms(rows, width):
    return torch.from_numpy(np.random.default_rng(0).random((rows, width)))


def rows_of(ids, mask):
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


@torch.no_grad()
def slow_sample(lm, query, row_uniforms, ends, temperature=1.0, top_k=0, limit=None):
    """The response (ids) to one query (ids)."""
    ids = []
    for u in row_uniforms.tolist()[:limit]:
        if lm.config.is_encoder_decoder:
            start = lm.config.decoder_start_token_id
            output = lm(input_ids=torch.tensor([query]), decoder_input_ids=torch.tensor([[start, *ids]]))
        else:
            whole = torch.tensor([query + ids])
            output = lm(whole, attention_mask=torch.ones_like(whole))
        logits = output.logits[0, -1].double().tolist()
        if temperature == 0:
            ids.append(logits.index(max(logits)))
        else:
            threshold = sorted(logits)[-top_k] if top_k else -math.inf
            weights = [math.exp((x - max(logits)) / temperature) if x >= threshold else 0.0 for x in logits]
            target, token = u * sum(weights), 0
            while target >= weights[token]:
                target, token = target - weights[token], token + 1
            ids.append(token)
        if ids[-1] in ends:
            break
    return ids


def common_token(lm, query, mask, u):
    """A token that about half of the rows draw early: a good end token for a test."""
    ids, _ = sample_by_generate(lm, query, mask, u, [-1], PAD)
    rows = (ids[:, :, None] == torch.arange(25)).any(1).sum(0)  # in which each token occurs
    return int((rows - len(ids) / 2).abs().argmin())


def check(lm, eos=None, query_pad=PAD, **options):
    """sample_by_generate is the slow loop; returns its ids and mask. eos: by default a frequent token."""
    (query, mask), u = prompts(*LENGTHS, pad=query_pad), uniforms(7, 11)
    eos = common_token(lm, query, mask, u) if eos is None else eos
    ids, response_mask = sample_by_generate(lm, query, mask, u, [eos], query_pad, **options)
    responses = rows_of(ids, response_mask)
    queries = rows_of(query, mask)
    assert responses == [slow_sample(lm, queries[i], u[i], [eos], **options) for i in range(7)]
    assert (ids[~response_mask] == query_pad).all() and ids.shape == response_mask.shape == (7, 11)
    return ids, response_mask


OPTIONS = {"plain": {}, "top_k": {"temperature": 0.7, "top_k": 3}, "greedy": {"temperature": 0}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", *ENCODER_DECODERS])
def test_tokens_are_those_of_the_slow_loop(build_model, kind, options, messages):
    lm = build_encoder_decoder(kind) if kind in ENCODER_DECODERS else build_model(kind, torch.float64)
    _, response_mask = check(lm, **options)
    assert len(response_mask.sum(1).unique()) > 2 or "temperature" in options  # rows end at different times
    assert not messages


def test_one_row_and_one_token(build_model):
    lm, (query, mask), u = build_model(dtype=torch.float64), prompts(*LENGTHS), uniforms(7, 11)
    together = rows_of(*sample_by_generate(lm, query, mask, u, [-1], PAD))
    for i in range(7):
        bare = query[i : i + 1, mask[i]]
        for width in (1, 11):
            alone = sample_by_generate(lm, bare, torch.ones_like(bare).bool(), u[i : i + 1, :width], [-1], PAD)
            assert rows_of(*alone) == [together[i][:width]]


def test_the_padding_may_be_the_end_token(build_model, messages):
    """Also without a padded query, where `generate` drops the mask and the model sees padding behind ended rows."""
    lm, (query, mask), u = build_model(dtype=torch.float64), prompts(*LENGTHS), uniforms(7, 11)
    eos = common_token(lm, query, mask, u)
    lm.config.pad_token_id = eos
    _, response_mask = check(lm, eos, query_pad=eos)
    assert 0 < response_mask[:, -1].sum() < 7
    query = query[:, -1:]
    ids, response_mask = sample_by_generate(lm, query, torch.ones_like(query).bool(), u, [eos], eos)
    assert rows_of(ids, response_mask) == [slow_sample(lm, query[i].tolist(), u[i], [eos]) for i in range(7)]
    assert 0 < response_mask[:, -1].sum() < 7
    assert not messages


FORCING = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 5.0, "min_new_tokens": 11}
FORCING |= {"forced_eos_token_id": EOS, "forced_bos_token_id": BOS, "suppress_tokens": list(range(12))}
FORCING |= {"max_length": 3, "cache_implementation": "static", "num_beams": 2, "no_repeat_ngram_size": 1}
FORCING |= {"begin_suppress_tokens": list(range(20)), "eos_token_id": [1, 2, 3], "return_dict_in_generate": True}


@pytest.mark.parametrize("kind", ["gpt2", *ENCODER_DECODERS])
def test_the_checkpoints_own_settings_are_set_aside(build_model, kind, messages):
    lm = build_encoder_decoder(kind) if kind in ENCODER_DECODERS else build_model(kind, torch.float64)
    own = lm.generation_config
    own.update(**FORCING)
    before = copy.deepcopy(own.to_dict())
    check(lm)
    assert lm.generation_config is own and own.to_dict() == before
    assert not messages


def test_an_error_leaves_the_model_as_it_was(build_model, messages):
    lm, (query, mask) = build_model(), prompts(3, 5)
    own = lm.generation_config
    lm.transformer.wpe.weight.data[6] = math.nan  # position 6: reached by the second row at its third token
    with pytest.raises(FloatingPointError, match="row 1: logits are not finite at response token 3"):
        sample_by_generate(lm, query, mask, uniforms(2, 7), [-1], PAD)
    assert lm.generation_config is own and not lm._forward_hooks
    assert transformers_logging.get_verbosity() == transformers_logging.WARNING


@pytest.mark.parametrize("sample", [sample_by_generate, ppo.sample])
def test_logits_behind_the_end_of_a_row_are_not_looked_at(build_model, sample, monkeypatch):
    monkeypatch.setattr(ppo, "LEAVING", 0)
    lm, (query, mask), u = build_model(), prompts(3, 5), uniforms(2, 4)
    limits = torch.tensor([4, 2])
    expected, _ = sample(lm, query, mask, u, [-1], PAD)
    lm.transformer.wpe.weight.data[6] = math.nan
    ids, response_mask = sample(lm, query, mask, u, [-1], PAD, ended=end_of_rows(None, (), limits))
    assert response_mask.sum(1).tolist() == [4, 2] and rows_of(ids, response_mask) == rows_of(expected, response_mask)


def test_decoding_ends_with_the_last_row(build_model):
    lm, (query, mask), calls = build_model(), prompts(3, 5), []
    lm.register_forward_hook(lambda *_: calls.append(1))
    sample_by_generate(lm, query, mask, uniforms(2, 9), [-1], PAD, ended=end_of_rows(None, (), torch.tensor([4, 2])))
    assert len(calls) == 4


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_stops_and_limits(build_model, letters, kind):
    """A response ends with the token that completes a stop string, or at its limit."""
    lm = build_encoder_decoder(kind) if kind in ENCODER_DECODERS else build_model(kind, torch.float64)
    (query, mask), u = prompts(*LENGTHS), uniforms(7, 11)
    whole = [slow_sample(lm, ids, row, [EOS]) for ids, row in zip(rows_of(query, mask), u, strict=True)]
    stop = "zz", letters.decode(whole[0][2:4]), letters.decode(whole[3][5:7])
    limits = torch.tensor([11, 2, 11, 11, 5, 11, 1])
    expected = []
    for ids, limit in zip(whole, limits.tolist(), strict=True):
        lengths = [n for n in range(1, len(ids) + 1) if any(text in letters.decode(ids[:n]) for text in stop)]
        expected.append(ids[: min([limit, *lengths])])
    ids = sample_by_generate(lm, query, mask, u, [EOS], PAD, ended=end_of_rows(letters, stop, limits))
    assert rows_of(*ids) == expected and len(expected[0]) <= 4 and len(expected[1]) <= 2
    done = [any(text in letters.decode(ids) for text in stop) for ids in expected]
    assert stopped(letters, expected, stop) == done and stopped(letters, expected, ()) == [False] * 7


@pytest.mark.parametrize("options", [{}, {"top_k": 4, "top_p": 0.9}], ids=["plain", "filtered"])
def test_guided(build_model, family, options):
    """`guided` of ilql shapes the logits that are drawn from."""
    policy = ilql.PolicyWithQ(build_model(family, torch.float64))
    for name, weight in policy.named_parameters():
        if "head" in name.partition(".")[0]:
            weight.data *= 5
    free, _ = check(policy.lm, EOS)
    with policy.guided(4.0, **options):
        guided, _ = check(policy.lm, EOS)
        check(policy.lm)
    assert not torch.equal(free, guided)


def test_bfloat16(build_model, family):
    """Rows need not be those of the slow loop (rounding); they are at least those of a second call."""
    lm, (query, mask), u = build_model(family, torch.bfloat16), prompts(*LENGTHS), uniforms(7, 11)
    first = sample_by_generate(lm, query, mask, u, [EOS], PAD)
    assert all(map(torch.equal, first, sample_by_generate(lm, query, mask, u, [EOS], PAD)))


def test_generate_all_does_not_depend_on_the_decode_batch(build_model, letters, accelerator):
    lm = build_model(dtype=torch.float64)
    queries = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]]
    options = {"seed": 1, "max_new_tokens": 7, "temperature": 0.7, "limits": torch.tensor([7, 2, 7, 1, 4])}
    whole = generate_all(accelerator, lm, letters, queries, ("rollout", 2), **options)
    assert rows_of(*whole[:2]) == queries and whole[2].shape == (5, 7)
    assert (whole[3].sum(1) <= options["limits"]).all() and (whole[3].sum(1) == options["limits"]).sum() > 2
    for size in (1, 2, 3):
        again = generate_all(accelerator, lm, letters, queries, ("rollout", 2), **options, decode_batch_size=size)
        assert all(map(torch.equal, whole, again))
    for other in (("rollout", 3), ("eval", 2)):
        assert not torch.equal(whole[2], generate_all(accelerator, lm, letters, queries, other, **options)[2])


# ---- Rollouts and evaluations are the slow loop ----------------------------------------------------------------------

WINDOWS = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
WINDOWS |= {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 32, "sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
HYBRID = WINDOWS | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 1}
OTHERS = {
    "mistral": (tf.MistralConfig, WINDOWS),
    "gemma3": (tf.Gemma3TextConfig, WINDOWS | MIXED),
    "lfm2": (tf.Lfm2Config, {name: value for name, value in HYBRID.items() if name != "sliding_window"}),
}


def build_any(kind, build_model):
    """A random model in float64 of any kind of cache: full, windows, convolutions, encoder-decoder."""
    if kind in ENCODER_DECODERS:
        return build_encoder_decoder(kind)
    if kind not in OTHERS:
        return build_model(kind, torch.float64)
    config, settings = OTHERS[kind]
    tokens = {"vocab_size": 25, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config(**settings, **tokens, initializer_range=0.5)
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.mark.parametrize("leaving", [1, 3 / 4, 0], ids=["at once", "a few at a time", "never"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", *OTHERS, "t5"])
def test_rollouts_are_the_slow_loop(build_model, letters, accelerator, kind, leaving, monkeypatch):
    """Seven rows of odd lengths, three at a time; limits, a stop string and several end tokens."""
    lm = build_any(kind, build_model)
    random = np.random.default_rng(0)
    queries = [random.integers(0, 21, length).tolist() for length in (5, 1, 3, 11, 2, 7, 1)]
    draws = keyed_uniforms(1, "rollout", 2, list(range(7)), 13)
    plain = lm
    if lm.config.is_encoder_decoder:
        plain = tf.T5ForConditionalGeneration(lm.config).double().eval()
        plain.load_state_dict(lm.state_dict())
    whole = [slow_sample(plain, query, row, [], 0.7) for query, row in zip(queries, draws, strict=True)]
    ends = [EOS, whole[0][6], whole[3][4]]
    stop = "zz", letters.decode(whole[5][2:4])
    limits = torch.tensor([13, 13, 9, 13, 3, 13, 1])
    expected = []
    for ids, limit in zip(whole, limits.tolist(), strict=True):
        done = [n for n in range(1, 14) if ids[n - 1] in ends or any(text in letters.decode(ids[:n]) for text in stop)]
        expected.append(ids[: min([limit, *done])])
    assert len({*map(len, expected)}) > 3
    lm.generation_config.eos_token_id = ends
    monkeypatch.setattr(ppo, "LEAVING", leaving)
    options = {"seed": 1, "max_new_tokens": 13, "temperature": 0.7, "stop": stop, "limits": limits}
    for sampler in (ppo.sample, sample_by_generate):
        for size in (3, 7):
            sampled = generate_all(
                accelerator, lm, letters, queries, ("rollout", 2), **options, decode_batch_size=size, sample=sampler
            )
            assert rows_of(*sampled[:2]) == queries
            assert rows_of(*sampled[2:]) == expected, (sampler, size)
            assert (sampled[2][~sampled[3]] == letters.pad_token_id).all()
    ended = has_ended(letters, expected, ends, stop)
    assert ended == [ids[-1] in ends or any(text in letters.decode(ids) for text in stop) for ids in expected]
    assert {*ended} == {True, False}


def test_chunks_are_of_similar_length_and_without_empty_columns(build_model, letters, accelerator):
    lm = build_model()
    queries = [[3] * length for length in (2, 11, 1, 7, 3, 5, 2)]
    shapes = []

    def sample(lm, query, query_mask, draws, *arguments, **options):
        shapes.append((*query.shape, query_mask.sum(1).tolist()))
        return ppo.sample(lm, query, query_mask, draws, *arguments, **options)

    options = {"seed": 1, "max_new_tokens": 3, "decode_batch_size": 3, "sample": sample}
    generate_all(accelerator, lm, letters, queries, ("rollout", 2), **options)
    assert shapes == [(3, 11, [11, 7, 5]), (3, 3, [3, 2, 2]), (1, 1, [1])]


# ---- Stop strings ----------------------------------------------------------------------------------------------------

TEXTS = ["hello world, héllo wörld.", "日本語 text €uro 🙂🙃", "a b  c\n\nUser: stop here ", "end. of 'it' don't !"]
FEW_BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82)]


def build_tokenizer(kind):
    """A small tokenizer, with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<end>", "<|user|>"]
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
        backend.train_from_iterator(TEXTS * 9, trainer)
    elif kind in ("sentencepiece", "metaspace"):
        pieces = ["▁", "▁hello", "▁world", "hel", "lo", "ser", ":", "\n", ".", "▁U", "A", "▁▁", "a", "b", "日", "€"]
        names = special + pieces + (FEW_BYTES if kind == "sentencepiece" else [])
        backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
        backend.decoder = decoders.Metaspace()
        if kind == "sentencepiece":
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            backend.decoder = decoders.Sequence(steps)
    else:
        names = special + ["a", "b", "##c", "'", ".", "do", "not", "n't", "!", "b</w>", "c</w>"]
        backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
        decoder = {"wordpiece": decoders.WordPiece(), "word ends": decoders.BPEDecoder(), "words": None}[kind]
        if decoder is not None:
            backend.decoder = decoder
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<end>", additional_special_tokens=["<|user|>"]
    )


ADDS = {"byte-level": True, "sentencepiece": True, "metaspace": True, "words": True}
ADDS |= {"wordpiece": False, "word ends": False}


@pytest.mark.parametrize("kind", ADDS)
def test_stops_are_found_where_the_slow_definition_finds_them(kind):
    """Random ids, and as stops pieces of their texts: a space at the end, parts of words, special tokens, characters of
    several bytes. The definition: the first n for which the text of n ids holds a stop string."""
    tokenizer = build_tokenizer(kind)
    assert adds_text(tokenizer) == ADDS[kind]
    random = np.random.default_rng(0)
    found = 0
    for _ in range(60):
        ids = torch.from_numpy(random.integers(0, len(tokenizer), (5, 17)))
        texts = tokenizer.batch_decode(ids)
        stops = ["<end>" if random.random() < 0.2 else "zz"]
        for text in texts[:2]:
            begin = int(random.integers(0, max(1, len(text) - 3)))
            stops.append(text[begin : begin + int(random.integers(1, 6))] or "zz")
        ended = end_of_rows(tokenizer, stops, None)
        expected = []
        for row in ids.tolist():
            lengths = [n for n in range(1, 18) if any(stop in tokenizer.decode(row[:n]) for stop in stops)]
            expected.append(min(lengths, default=None))
        lengths = [None] * 5
        for n in range(1, 18):
            going = torch.tensor([row for row in range(5) if lengths[row] is None], dtype=torch.long)
            for row in going[ended(going, ids[going, :n])].tolist():
                lengths[row] = n
        assert lengths == expected, stops
        found += 5 - lengths.count(None)
    assert found > 60


def test_the_last_byte_of_a_character_completes_a_stop():
    tokenizer = build_tokenizer("byte-level")
    ids = tokenizer("a ж字b").input_ids
    assert len(ids) == 2 + 2 + 3 + 1
    for stop, length in (("ж", 4), ("字", 7), (" ж字", 7), ("字b", 8)):
        ended = end_of_rows(tokenizer, (stop,), None)
        found = [n for n in range(1, 9) if ended(torch.arange(1), torch.tensor([ids[:n]])).item()]
        assert found[0] == length, stop


def test_few_texts_are_made_for_stops(monkeypatch):
    """Where tokens add their text, those that cannot complete a stop string are not decoded."""
    tokenizer = build_tokenizer("byte-level")
    stops = ("User:",)
    assert not any(
        may_complete(tokenizer, token, stops) for token in tokenizer(" hello w", return_tensors=None).input_ids
    )
    assert may_complete(tokenizer, tokenizer(":").input_ids[-1], stops)
    ids = torch.tensor([tokenizer("hello world").input_ids])
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda self, rows: [""] * len(rows))
    assert not end_of_rows(tokenizer, stops, None)(torch.arange(1), ids).any()


def test_texts(letters):
    """Cut before the earliest stop string, which may be a special token."""
    queries, responses = [[0, 1], [2], [3]], [[4, 5, 6, EOS], [6, 4, 7], [8, 9]]
    assert decode(letters, queries, responses, ()) == ["efg", "geh", "ij"]
    assert decode(letters, queries, responses, ("g", "e", "<eos>")) == ["", "", "ij"]
    assert decode(letters, queries, responses, ("<eos>",)) == ["efg", "geh", "ij"]
    assert stopped(letters, responses, ("<eos>", "j")) == [True, False, True]
    rows = [{"prompt": "ab", "x": 1}, {"prompt": "c", "x": 2}]
    given = text_arguments(letters, rows, ["efg", ""], [[4, 5, 6], []])
    assert given.pop("tokenizer") is letters
    expected = {"samples": ["abefg", "c"], "prompts": ["ab", "c"], "outputs": ["efg", ""]}
    assert given == expected | {"output_ids": [[4, 5, 6], []]}
