"""The decode loop of rollouts and evaluations, and the texts it makes: `python -m pytest tests/test_sampling.py`

`draw` against softmax over a grid of uniforms; `generate` and `respond` against a slow loop of this file: one row at
a time, the whole sequence through the model for every token, neither cache nor padding, and the inverse CDF in Python.
In float64, where another layout of the same work gives the same tokens.
"""

import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from helpers import BOS, EOS, PAD, pad_is_eos
from test_seq2seq import random_seq2seq

from algos import ppo
from common.errors import NotFinite
from common.lm import sampling
from common.lm.evaluation import respond, text_arguments
from common.lm.sampling import add_ids, draw, have_ended, sample
from common.lm.structure import as_decoder
from common.lm.tokens import decode, stopped, texts_behind

GRID = 4001
HYBRID = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
HYBRID |= {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 1}


def build_any(kind, build_model):
    """A random model in float64 of a kind of cache: full, convolutions, encoder-decoder. Others: test_architectures."""
    if kind == "t5":
        return random_seq2seq("t5").double().eval()
    if kind == "gpt2":
        return build_model(kind, torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tf.Lfm2Config(vocab_size=25, eos_token_id=EOS, pad_token_id=PAD, **HYBRID, initializer_range=0.5)
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def grid(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=11) * 2)


def prompts(*lengths):
    """Queries of these lengths."""
    random = np.random.default_rng(0)
    return [random.integers(0, 21, length).tolist() for length in lengths]


def uniforms(rows, width, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random((rows, width)))


@pytest.mark.parametrize(
    ("temperature", "k", "p"),
    [
        (0.7, 0, 1.0), (2.0, 0, 1.0), (0.7, 1, 1.0), (1.3, 3, 1.0), (0.7, 11, 1.0), (0.7, 50, 1.0),
        (0.7, 0, 1e-9), (1.3, 0, 0.6), (0.7, 0, 0.999), (1.3, 4, 0.6), (1e-4, 0, 1.0), (0, 0, 1.0),
    ],
)  # fmt: skip
def test_draws_follow_softmax(temperature, k, p):
    """Over an even grid, the count of a token differs from its probability by less than one. The likeliest k are kept;
    of these the likeliest, until their probability at this temperature reaches p. 0 is the argmax."""
    probs = (LOGITS / (temperature or 1e-4)).softmax(-1)
    likeliest = probs.argsort(descending=True)[: k or None].tolist()
    total = probs[likeliest].sum().item()
    kept = []
    while sum(probs[kept].tolist()) < p * total and len(kept) < len(likeliest):
        kept.append(likeliest[len(kept)])
    expected = torch.zeros(11, dtype=torch.float64)
    expected[kept] = probs[kept] / probs[kept].sum()
    ids = draw(LOGITS.expand(GRID, -1), grid(GRID), temperature, k, p)
    frequency = torch.bincount(ids, minlength=11).double() / GRID
    assert (frequency - expected).abs().max() < 1 / GRID
    assert (ids.diff() >= 0).all()  # inverse CDF: in the order of the vocabulary


@pytest.mark.parametrize("allowed", [[0], [10], [0, 10], [3, 4, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_probability_is_never_drawn(allowed, dtype):
    """Neither at the edges of [0, 1) nor anywhere else; zeros lead, trail, and lie between."""
    logits = torch.full((11,), -math.inf, dtype=dtype)
    logits[allowed] = LOGITS[allowed].to(dtype)
    edges = torch.tensor([0.0, 5e-324, 2**-53, 0.5, 1 - 2**-24, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    everywhere = torch.cat([edges, grid(101)])
    for options in ((0.7,), (1.0, 5), (1.0, 0, 0.9), (0.3, 3, 0.5)):
        ids = draw(logits.expand(len(everywhere), -1), everywhere, *options)
        assert set(ids.tolist()) <= set(allowed)
    assert draw(logits.expand(2, -1), edges[[0, -1]], 1.0).tolist() == [min(allowed), max(allowed)]


def slow_draw(logits, u, temperature):
    """A token from a list of logits, by the inverse CDF in the order of the vocabulary."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    target = u * sum(weights)
    token = 0
    while target >= weights[token]:
        target -= weights[token]
        token += 1
    return token


@torch.no_grad()
def slow_sample(lm, query, row_uniforms, temperature):
    """The response (ids) to one query (ids)."""
    ids = []
    for u in row_uniforms.tolist():
        if lm.config.is_encoder_decoder:
            start = lm.config.decoder_start_token_id
            output = lm(input_ids=torch.tensor([query]), decoder_input_ids=torch.tensor([[start, *ids]]))
        else:
            whole = torch.tensor([query + ids])
            output = lm(whole, attention_mask=torch.ones_like(whole))
        ids.append(slow_draw(output.logits[0, -1].double().tolist(), u, temperature))
    return ids


def test_logits_that_are_not_finite_are_an_error(build_model, letters, monkeypatch):
    """Behind the end of a row they are not looked at, nor does decoding go on behind the end of the last row."""
    monkeypatch.setattr(sampling, "LEAVING", 0)
    lm = build_model()
    lm.generation_config.eos_token_id = None
    queries = prompts(3, 5)
    u = uniforms(2, 9)
    expected = sample(lm, letters, queries, u, [9, 9])
    lm.transformer.wpe.weight.data[6] = math.nan  # position 6: reached by the second row at its third token
    sentence = f"logits are not finite at response token 3 after the ids {queries[1]}"
    with pytest.raises(NotFinite, match=re.escape(sentence)):
        sample(lm, letters, queries, u, [9, 9])
    response = []
    assert add_ids(response, [3, -1, 5], [0], 9, [EOS], (), letters) and response == [3, -1]  # -1: of such logits
    calls = []
    lm.register_forward_hook(lambda *_: calls.append(1))
    assert sample(lm, letters, queries, u, [4, 2]) == [expected[0][:4], expected[1][:2]]
    assert len(calls) == 4


def test_a_row_that_has_ended_does_not_leave_the_positions_of_the_model(build_model, letters):
    """One of eight rows ends after two tokens, at the last position of 32, and stays in the batch."""
    lm = build_model()
    lm.generation_config.eos_token_id = None
    queries = prompts(30, *[2] * 7)
    limits = [2] + [10] * 7
    draws = uniforms(8, 10)
    responses = sample(lm, letters, queries, draws, limits)
    assert list(map(len, responses)) == limits
    assert responses[:1] == sample(lm, letters, queries[:1], draws[:1], [2])


# Kind of model, and the share of rows that go on at which the others leave the batch: at once, a few at a time, never.
ROLLOUTS = [(kind, 3 / 4) for kind in ("gpt2", "lfm2", "t5")]
ROLLOUTS += [("gpt2", 1), ("gpt2", 0), ("lfm2", 1), ("t5", 1)]


@pytest.mark.parametrize(("kind", "leaving"), ROLLOUTS)
def test_rollouts_are_the_slow_loop(build_model, letters, accelerator, kind, leaving, monkeypatch):
    if kind != "gpt2":
        pad_is_eos(letters)
    plain = build_any(kind, build_model)
    lm = as_decoder(copy.deepcopy(plain)) if kind == "t5" else plain
    queries = prompts(5, 1, 3, 11, 2, 7, 1)

    def wholes(name, number):
        draws = sampling.uniforms(1, name, number, list(range(7)), 13)
        return [slow_sample(plain, query, row, 0.7) for query, row in zip(queries, draws, strict=True)]

    whole = wholes("rollout", 2)
    ends = [EOS, whole[0][6], whole[3][4]]
    stop = "zz", letters.decode(whole[5][2:4])
    limits = [13, 13, 9, 13, 3, 13, 1]

    def is_done(ids):
        return ids[-1] in ends or any(text in letters.decode(ids) for text in stop)

    def cut(ids, limit=13):
        done = [n for n in range(1, 14) if is_done(ids[:n])]
        return ids[: min([limit, *done])]

    expected = list(map(cut, whole, limits))
    evaluated = list(map(cut, wholes("eval", 0)))
    assert len({*map(len, expected)}) > 3
    # the checkpoint's own settings are ignored: TRL fell for top_k=50, with which the KL is negative
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 5.0, "min_new_tokens": 6}
    lm.generation_config.update(**settings, eos_token_id=ends, suppress_tokens=list(range(20)))
    monkeypatch.setattr(sampling, "LEAVING", leaving)
    options = {"seed": 1, "max_new_tokens": 13, "temperature": 0.7, "stop": stop}
    for size, look in (3, 1), (7, 1), (7, 4):
        monkeypatch.setattr(sampling, "LOOK", look)
        options["decode_batch_size"] = size
        found = ppo.generate(accelerator, lm, letters, queries, limits, 2, SimpleNamespace(**options))
        assert found == expected, (size, look)
        assert respond(accelerator, lm, letters, queries, **options) == evaluated, (size, look)
    ended = have_ended(lm, letters, queries, expected, stop)
    assert ended == list(map(is_done, expected)) and {*ended} == {True, False}


def test_chunks_are_of_similar_length_and_without_empty_columns(build_model, letters, accelerator):
    lm = build_model()
    queries = [[3] * length for length in (2, 11, 1, 7, 3, 5, 2)]  # two are equal, and read once
    read = []

    def noted(lm, inputs, options):
        if options["past_key_values"] is None:
            read.append((*options["input_ids"].shape, options["attention_mask"].sum(1).tolist()))

    lm.register_forward_pre_hook(noted, with_kwargs=True)
    args = SimpleNamespace(seed=1, max_new_tokens=3, decode_batch_size=3, stop=(), temperature=1.0)
    ppo.generate(accelerator, lm, letters, queries, [3] * 7, 2, args)
    assert read == [(3, 11, [11, 7, 5]), (2, 3, [3, 2]), (1, 1, [1])]


TEXTS = ["hello world, héllo wörld.", "日本語 text €uro 🙂🙃", "a b  c\n\nUser: stop here ", "end. of 'it' don't !"]
FEW_BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82)]


def build_tokenizer(kind):
    """A small tokenizer, with special tokens: byte-level or sentencepiece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<end>", "<|user|>"]
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
        backend.train_from_iterator(TEXTS * 9, trainer)
    else:
        pieces = ["▁", "▁hello", "▁world", "hel", "lo", "ser", ":", "\n", ".", "▁U", "A", "▁▁", "a", "b", "日", "€"]
        names = [*special, *pieces, *FEW_BYTES]
        backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<end>", additional_special_tokens=["<|user|>"]
    )


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_stops_are_found_where_the_slow_definition_finds_them(kind):
    """Random ids, and as stops pieces of their texts: a space at the end, parts of words, special tokens, characters of
    several bytes. The definition: the first n for which the text of n ids behind others holds a stop string."""
    tokenizer = build_tokenizer(kind)
    random = np.random.default_rng(0)
    found = 0
    for _ in range(30):
        ids = torch.from_numpy(random.integers(0, len(tokenizer), (5, 37)))
        texts = tokenizer.batch_decode(ids)
        stops = ["<end>" if random.random() < 0.2 else "zz"]
        for text in texts[:2]:
            begin = int(random.integers(0, max(1, len(text) - 3)))
            stops.append(text[begin : begin + int(random.integers(1, 6))] or "zz")
        for number, row in enumerate(ids.tolist()):
            context = random.integers(0, len(tokenizer), number).tolist()
            behind = [texts_behind(tokenizer, [context], [row[:n]])[0] for n in range(1, 38)]
            lengths = [n for n, text in enumerate(behind, 1) if any(stop in text for stop in stops)]
            response = []
            ended = [add_ids(response, row[:5], context, 99, [], stops, tokenizer)]  # some tokens at once, as on a GPU
            for token in row[5:]:
                if not ended[-1]:
                    ended.append(add_ids(response, [token], context, 99, [], stops, tokenizer))
            assert response == row[: min(lengths, default=37)], stops
            assert ended[-1] is bool(lengths) and True not in ended[:-1]
            found += bool(lengths)
    assert found > 30


STOPS = [  # kind of tokenizer, text or tokens, stop string, how many of them complete it
    *(("byte-level", "a ж字b", stop, length) for stop, length in (("ж", 4), (" ж字", 7), ("字b", 8))),
    # not to be seen in the last tokens alone: a cut character makes others unreadable
    ("sentencepiece", [FEW_BYTES[0], *FEW_BYTES[2:5] * 5, FEW_BYTES[0]], "€A", 17),
    ("sentencepiece", ["hel", "lo", "▁"], " ", 3),  # a blank that is dropped at the beginning
]


def test_the_token_that_completes_a_stop():
    """Also behind a prompt whose last characters have three tokens each, of which the loop reads eight."""
    for kind, row, stop, length in STOPS:
        tokenizer = build_tokenizer(kind)
        if kind == "byte-level":
            ids, prompt = tokenizer([row, "界界界"]).input_ids
        else:
            ids, prompt = map(tokenizer.convert_tokens_to_ids, [row, ["a", *FEW_BYTES[2:5] * 3]])
        for context in ([], prompt):
            response = []
            assert add_ids(response, ids, context, 99, [], (stop,), tokenizer), stop
            assert response == ids[:length], stop


def test_a_stop_string_that_begins_with_the_space_of_the_first_token():
    """Decoded alone, the response loses this space. The same string in the prompt ends nothing."""
    tokenizer = build_tokenizer("sentencepiece")
    hello, world, low = tokenizer.convert_tokens_to_ids(["▁hello", "▁world", "lo"])
    for context in ([hello], [hello, world], [hello] * 12):
        response = []
        assert add_ids(response, [world, low], context, 99, [], (" world",), tokenizer)
        assert response == [world]
        assert stopped(tokenizer, [context, context], [[world], [low]], (" world",)) == [True, False]
        assert decode(tokenizer, [context], [[world]], (" world",)) == [""]
        assert not add_ids([], [low, low], context, 99, [], (" world",), tokenizer)


def test_texts(letters):
    """Cut before the earliest stop string, which may be a special token."""
    queries = [[0, 1], [2], [3]]
    responses = [[4, 5, 6, EOS], [6, 4, 7], [8, 9]]
    assert decode(letters, queries, responses, ()) == ["efg", "geh", "ij"]
    assert decode(letters, queries, responses, ("g", "e", "<eos>")) == ["", "", "ij"]
    assert decode(letters, queries, responses, ("<eos>",)) == ["efg", "geh", "ij"]
    assert stopped(letters, queries, responses, ("<eos>", "j")) == [True, False, True]
    assert stopped(letters, queries, responses, ()) == [False] * 3
    rows = [{"prompt": "ab", "x": 1}, {"prompt": "c", "x": 2}]
    given = text_arguments(letters, rows, [[4, 5, 6], []], ["efg", ""])
    assert given.pop("tokenizer") is letters
    expected = {"samples": ["abefg", "c"], "prompts": ["ab", "c"], "outputs": ["efg", ""]}
    assert given == expected | {"output_ids": [[4, 5, 6], []]}
    tokenizer = build_tokenizer("byte-level")  # blanks before a stop are stripped
    responses = [tokenizer(text).input_ids for text in (" a b \n\nUser: c", "end. ", "<|user|>a")]
    queries = [tokenizer("hello").input_ids] * 3
    assert decode(tokenizer, queries, responses, ("\n\nUser:",)) == [" a b", "end. ", "<|user|>a"]
    assert decode(tokenizer, queries, responses, ("User", "<|user|>")) == [" a b", "end. ", ""]


def test_the_reward_reads_special_tokens_that_neither_begin_nor_end_nor_pad(letters):
    """Such as the tags of a format, which it may ask for."""
    letters.add_special_tokens({"additional_special_tokens": ["<think>", "<tool>"]})
    queries = [[0, 25], [1]]
    responses = [[25, 4, 26, EOS], [BOS, 5, EOS, PAD, PAD]]
    assert decode(letters, queries, responses, ()) == ["<think>e<tool>", "f"]
    assert decode(letters, queries, responses, ("<tool>",)) == ["<think>e", "f"]
    letters.ends = [26, EOS]
    assert decode(letters, queries, responses, ()) == ["<think>e", "f"]


def test_decode_keeps_the_space_between_prompt_and_output():
    """Many tokenizers (Llama's) drop the space before a first token: outputs are decoded behind their queries."""
    tokenizer = build_tokenizer("sentencepiece")
    hello, world, end = tokenizer.convert_tokens_to_ids(["▁hello", "▁world", "<end>"])
    assert decode(tokenizer, [[hello], [hello]], [[world, end], [hello, world]], ()) == [" world", " hello world"]


@torch.no_grad()
@pytest.mark.parametrize("packing", [False, True])
def test_line_logprobs_is_the_plain_forward(build_model, letters, family, packing):
    """Tokens that are not trained are read where others follow. The order of lines does not matter."""
    model = build_model(family, torch.float64)
    model.generation_config.eos_token_id = None
    policy = ppo.PolicyWithValue(model, init="normal")
    queries = prompts(5, 1, 3)
    ids = sample(model, letters, queries, uniforms(3, 7), [7, 7, 7], temperature=0.7)
    keep = [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]]
    trained = [[flag == 1 for flag in row] for row in keep]
    fields = zip(queries, ids, trained, strict=True)
    examples = [ppo.Episode({}, query, row, flags, False, 0.0).example for query, row, flags in fields]
    lines = [examples[:2], examples[2:]] if packing else [[example] for example in examples]
    parts = [torch.stack(policy(part, temperature=0.7, also=ppo.token_entropies)) for part in (lines[1:], lines[:1])]
    columns = torch.cat(parts[::-1], 1).split([5, 3, 3], 1)  # trained tokens of the rows
    for row, (query, response) in enumerate(zip(queries, ids, strict=True)):
        output = model(torch.tensor([query + response]), output_hidden_states=True)
        before = slice(len(query) - 1, -1)  # the states before each response token
        logps = (output.logits[0, before] / 0.7).log_softmax(-1)
        values = policy.value_head(output.hidden_states[-1][0, before])[:, 0]
        entropies = -(logps.exp() * logps).sum(-1)
        for found, expected in zip(columns[row], (logps[range(7), response], values, entropies), strict=True):
            expected = expected[torch.tensor(trained[row])]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
