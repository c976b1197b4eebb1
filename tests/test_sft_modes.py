"""What sft.py does on request: `python -m pytest tests/test_sft_modes.py`

Chats and dialogues, packing, noise on the embeddings, formatting, several evaluation sets, frozen layers and stops;
each against hand numbers or another layout of the same work.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from test_invariants import ROWS, assert_same_result, log, recorded, run_sft, weights
from transformers import GPT2LMHeadModel

from algos import ppo, sft
from common import identity, logging
from common.cli import InputError, cli
from common.data import encode_prompts, load_sets

BOS, EOS, PAD, SCRIPT = 21, 22, 23, Path(sft.__file__)


def turn(role, content):
    return {"role": role, "content": content}


def user(text):
    return turn("user", text)


def answer(text):
    return turn("assistant", text)


# A turn is a letter of its role (t, u, s), the content and the end token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': 't', 'user': 'u', 'assistant': 's'}.get(m.role) or "
    "raise_exception(m.role + ' is unknown') }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}s{% endif %}"
)
# The last answer alone is marked, as by templates that show only its thoughts.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ 'q' if loop.last and m.role == 'assistant' }}{{ m.content }}")


@pytest.fixture
def chatty(letters):
    letters.chat_template = TEMPLATE
    return letters


def add_specials(tokenizer, template):
    """The tokenizer adds special tokens to every text, as those of Llama (bos) do."""
    from tokenizers import processors

    pairs = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    return tokenizer


def encode(rows, tokenizer, max_length=99, completion_only_loss=True):
    return sft.encode_rows(rows, tokenizer, max_length, completion_only_loss, "--dataset")[0]


def marked(example, tokenizer):
    """The text of an example, with what has no label in brackets."""
    ids, labels = example
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
    tokens = zip(tokenizer.convert_ids_to_tokens(ids), labels, strict=True)
    pieces = [f"[{token}]" if label == -100 else token for token, label in tokens]
    return "".join(pieces).replace("][", "").replace("<bos>", "^").replace("<eos>", ".")


# ---- Chats -----------------------------------------------------------------------------------------------------------

TURNS = [user("ab"), answer("cd"), user("e"), answer("f")]
CHATS = [  # row, completion_only_loss, text with what has no label in brackets; ^ is <bos>, . is <eos>
    ({"messages": TURNS}, True, "[^uab.s]cd.[ue.s]f."),
    ({"messages": TURNS}, False, "[^]uab.scd.ue.sf."),
    ({"messages": [turn("system", "g"), *TURNS]}, True, "[^tg.uab.s]cd.[ue.s]f."),
    ({"messages": [*TURNS[:2], answer("h")]}, True, "[^uab.s]cd.[s]h."),
    ({"messages": [user("s"), answer("us<eos>sab")]}, True, "[^us.s]us.sab."),  # what looks like a turn is none
    ({"messages": [user(""), answer("")]}, True, "[^u.s]."),
    ({"prompt": TURNS[:3], "completion": TURNS[3:]}, True, "[^uab.scd.ue.s]f."),
    ({"prompt": TURNS[:3], "completion": TURNS[3:]}, False, "[^]uab.scd.ue.sf."),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, True, "[^uab.s]cd.[ue.s]f."),
]


@pytest.mark.parametrize(("row", "only", "expected"), CHATS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_labels_of_a_chat(chatty, row, only, expected, template):
    """The template writes the one beginning token, whatever the tokenizer adds to texts."""
    (example,) = encode([row], add_specials(chatty, template), completion_only_loss=only)
    assert marked(example, chatty) == expected


def test_labels_of_a_chat_as_numbers(chatty):
    (example,) = encode([{"messages": TURNS}], chatty)
    ids = [21, 20, 0, 1, 22, 18, 2, 3, 22, 20, 4, 22, 18, 5, 22]
    assert example == (ids, [-100] * 6 + [2, 3, 22] + [-100] * 4 + [5, 22])
    assert encode([{"messages": TURNS}], chatty, max_length=8) == [(ids[:8], [-100] * 6 + [2, 3])]
    with pytest.raises(InputError, match="no row has a label left within --max-length 6"):
        encode([{"messages": TURNS}], chatty, max_length=6)


def test_a_template_that_changes_earlier_turns(letters):
    letters.chat_template = FORGETFUL
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}]
    assert marked(encode(rows[:1], letters)[0], letters) == "[^uab.s]qcd."
    with pytest.raises(InputError, match=r"--dataset row 2: .*earlier turns.*prompt and completion"):
        encode(rows, letters)
    as_pairs = [{"prompt": TURNS[:1], "completion": TURNS[1:2]}, {"prompt": TURNS[:3], "completion": TURNS[3:]}]
    assert [marked(e, letters) for e in encode(as_pairs, letters)] == ["[^uab.s]qcd.", "[^uab.scd.ue.s]qf."]


def test_tools_reach_the_template(letters):
    tools = "{{ bos_token }}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    letters.chat_template = TEMPLATE.replace("{{ bos_token }}", tools)
    rows = [{"messages": TURNS[:2], "tools": [{"name": "ab"}]}, {"messages": TURNS[:2], "tools": None}]
    assert [marked(e, letters) for e in encode(rows, letters)] == ["[^abuab.s]cd.", "[^uab.s]cd."]
    pair = {"prompt": TURNS[:1], "completion": TURNS[1:2], "tools": rows[0]["tools"]}
    assert marked(encode([pair], letters)[0], letters) == "[^abuab.s]cd."
    assert encode_prompts([pair], letters, 5, None, "")[0][0]["prompt"] == "<bos>abuab<eos>s"


BAD_CHATS = [  # a messages column after a good row, what the error says
    ([], "a chat is a list of"),
    (None, "a chat is a list of"),
    ("ab", "a chat is a list of"),
    ([user("a"), turn("robot", "b")], "role.*found .*robot"),
    ([user("a"), {"content": "b"}], "a chat is a list of"),
    ([user(None), answer("b")], "found .*None"),
    ([user("a"), answer(None)], "found .*None"),
    ([user(["a"]), answer("b")], "content.*found"),
    ([user("a"), "b"], "found 'b'"),
    ([user("a"), answer("b"), user("c")], "last message must be the assistant's, it is by 'user'"),
    ([turn("tool", "a"), answer("b")], "the chat template refuses the messages: tool is unknown"),
]


@pytest.mark.parametrize(("chat", "sentence"), BAD_CHATS, ids=lambda x: repr(x)[:40])
def test_a_bad_chat_names_its_row(chatty, chat, sentence):
    with pytest.raises(InputError, match=f"--dataset row 2: .*{sentence}"):
        encode([{"messages": TURNS}, {"messages": chat}], chatty)


BAD_PAIRS = [
    {"prompt": TURNS[:1], "completion": "b"},
    {"prompt": "a", "completion": TURNS[1:2]},
    {"prompt": TURNS[:1], "completion": None},
    {"prompt": TURNS[:2], "completion": []},
    {"prompt": TURNS[:2], "completion": TURNS[2:3]},
    {"prompt": [], "completion": []},
]


@pytest.mark.parametrize("row", BAD_PAIRS, ids=lambda x: repr(x)[:40])
def test_a_bad_pair_of_chats_names_its_row(chatty, row):
    with pytest.raises(InputError, match="--dataset row 2: "):
        encode([{"prompt": TURNS[:1], "completion": TURNS[1:2]}, row], chatty)


def test_a_chat_needs_a_template(letters):
    with pytest.raises(InputError, match="--dataset row 1: the tokenizer has no chat template"):
        encode([{"messages": TURNS}], letters)


def test_a_run_on_chats(chatty, gpt2_dir, tmp_path, capsys):
    """It learns to end its turns; a template that does not end them is told."""
    rows = [{"messages": [user(row["prompt"]), answer(row["completion"])]} for row in ROWS]
    _, run_dir = run_sft(gpt2_dir, tmp_path / "run", rows, tokenizer=chatty, total_steps=5)
    assert log(run_dir)[-1]["train/loss"] < log(run_dir)[0]["train/loss"] - 0.5
    assert "first row, [without loss]: [<bos>ub<eos>s]cdefgh<eos>" in (out := capsys.readouterr().out)
    assert "no row trains the end token" not in out
    chatty.chat_template = TEMPLATE.replace("{{ eos_token }}", "")
    run_sft(gpt2_dir, tmp_path / "endless", rows, tokenizer=chatty, total_steps=1)
    assert "no row trains the end token <eos>" in capsys.readouterr().out


# ---- Dialogues -------------------------------------------------------------------------------------------------------

DIALOGUES = [
    (["ab", "cd", "e", "f"], 99, True, "[ab]cd[e]f."),
    (["ab", "cd", "e", "f"], 99, False, "[a]bcdef."),
    (["ab", "cd", "e", "f"], 5, True, "[ab]cd[e]"),
    (["ab", "cd", "e", "f<eos>"], 99, True, "[ab]cd[e]f."),
    (["", "cd", "", "f"], 99, True, "[^]cdf."),
    (["ab", "", "e", ""], 99, True, "[abe]."),
    (["ab", "c"], 99, True, "[ab]c."),
]


@pytest.mark.parametrize(("parts", "max_length", "only", "expected"), DIALOGUES, ids=repr)
def test_labels_of_a_dialogue(letters, parts, max_length, only, expected):
    (example,) = encode([{"dialogue": parts}], letters, max_length, only)
    assert marked(example, letters) == expected


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_a_dialogue_of_two_is_a_prompt_with_its_completion(letters, only, template):
    tokenizer = add_specials(letters, template)
    rows = [*ROWS, {"prompt": "", "completion": "ab"}]
    pairs = encode([{"dialogue": [row["prompt"], row["completion"]]} for row in rows], tokenizer, 9, only)
    assert pairs == encode(rows, tokenizer, 9, only)
    for ids, labels in pairs:
        assert ids.count(BOS) == ("<bos>" in template or len(pairs) == 8 and ids[0] == BOS)
        assert ids.count(EOS) == (ids[-1] == EOS) and labels[-1] == ids[-1]


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_an_empty_completion_trains_the_end_token(letters, template):
    """Also behind a tokenizer that ends the prompt alone with the same token."""
    rows = [{"prompt": "ab", "completion": ""}, {"prompt": "a", "completion": "b"}]
    found = [marked(example, letters) for example in encode(rows, add_specials(letters, template))]
    assert found == (["[^ab].", "[^a]b."] if "bos" in template else ["[ab].", "[a]b."])


PROMPTED = [  # prompt, completion
    ("ab", "c"),
    ("", "c"),
    ("<bos>ab", "c"),
    (TURNS[:3], TURNS[3:]),
    (TURNS[:1], TURNS[1:2]),
]


@pytest.mark.parametrize(("prompt", "completion"), PROMPTED, ids=lambda x: repr(x)[:10])
@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_evaluations_sample_from_what_was_trained(chatty, prompt, completion, template):
    """The tokens of a prompt are those before the first label: one beginning token, and no end token after them."""
    tokenizer = add_specials(chatty, template)
    ((ids, labels),) = encode([{"prompt": prompt, "completion": completion}], tokenizer)
    first = next(i for i, label in enumerate(labels) if label != -100)
    (row,), (query,) = encode_prompts([{"prompt": prompt}], tokenizer, 5, None, "--eval-prompts")
    assert query == ids[:first] and query.count(BOS) == (query[0] == BOS) and ids.count(BOS) < 2
    assert isinstance(prompt, str) or (row["messages"] == prompt and row["prompt"].endswith("s"))


BAD_DIALOGUES = [
    (["a", "b", "c"], "must be a list prompt, output"),
    ([], "must be a list prompt, output"),
    ("ab", "must be a list prompt, output"),
    (None, "must be a list prompt, output"),
    (["a", 5], "part of row 2: 'dialogue' must be a string, it is 5"),
    (["a", None], "part of row 2: 'dialogue' must be a string, it is None"),
]


@pytest.mark.parametrize(("parts", "sentence"), BAD_DIALOGUES, ids=lambda x: repr(x)[:30])
def test_a_bad_dialogue_names_its_row(letters, parts, sentence):
    with pytest.raises(InputError, match=f"--dataset row 2.*{sentence}"):
        encode([{"dialogue": ["a", "b"]}, {"dialogue": parts}], letters)


def test_a_dialogue_whose_prompt_is_too_long_is_dropped_and_counted(letters):
    rows = [{"dialogue": ["abcde", "f", "g", "h"]}, {"dialogue": ["ab", "c"]}]
    examples, report = sft.encode_rows(rows, letters, 5, True, "")
    assert [marked(e, letters) for e in examples] == ["[ab]c."] and "2 rows, 1 cut at the end, 1 dropped" in report


def test_the_order_of_rows_changes_with_epoch_and_seed(monkeypatch, gpt2_dir, tmp_path):
    calls = recorded(monkeypatch, sft, "stream_rows")
    for seed in 1, 2:
        run_sft(gpt2_dir, tmp_path / f"{seed}", ROWS, seed=seed, total_steps=2)
    orders = [result for _, result in calls]
    assert len({tuple(order) for order in orders}) == 4 and all(sorted(order) == list(range(7)) for order in orders)


# ---- Packing ---------------------------------------------------------------------------------------------------------

PACKS = [  # lengths, max_length, indices of the lines
    ([4, 2, 3, 1], 4, [[0], [2, 3], [1]]),  # TRL's example for best-fit decreasing
    ([1], 1, [[0]]),
    ([5, 5, 5], 9, [[0], [1], [2]]),
    ([2, 7, 3, 5, 3], 10, [[1, 2], [3, 4, 0]]),
    ([6, 5, 4, 3], 9, [[0, 3], [1, 2]]),  # the fullest line that fits, not the first
    ([3] * 7, 9, [[0, 1, 2], [3, 4, 5], [6]]),
]


@pytest.mark.parametrize(("lengths", "max_length", "lines"), PACKS, ids=repr)
def test_pack(lengths, max_length, lines):
    assert sft.pack(lengths, max_length) == lines


def test_pack_keeps_every_row_once():
    generator = np.random.default_rng(0)
    for _ in range(200):
        max_length = int(generator.integers(1, 40))
        lengths = generator.integers(1, max_length + 1, generator.integers(1, 60)).tolist()
        lines = sft.pack(lengths, max_length)
        assert sorted(i for line in lines for i in line) == list(range(len(lengths)))
        sums = sorted(sum(lengths[i] for i in line) for line in lines)
        assert sums[-1] <= max_length
        assert len(sums) < 2 or sums[0] + sums[1] > max_length  # else the two lines would be one
        assert len(lines) <= 11 / 9 * optimum(lengths, max_length) + 1


def optimum(lengths, max_length):
    """A lower bound of the number of lines: tokens, and rows of which no two fit together."""
    return max(-(-sum(lengths) // max_length), sum(2 * n > max_length for n in lengths))


def test_collate_counts_positions_in_each_row():
    lines = [[([4, 5, 6], [-100, 5, 6]), ([7, 8], [-100, 8])], [([9, 1], [-100, 1])]]
    ids, positions, labels = sft.collate(lines, PAD)
    assert ids.tolist() == [[4, 5, 6, 7, 8], [9, 1, PAD, PAD, PAD]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]  # no row begins in the padding
    assert labels.tolist() == [[-100, 5, 6, -100, 8], [-100, 1, -100, -100, -100]]


LONG = [{"prompt": p, "completion": c} for p, c in (("abc", "defghijk"), ("l", "mnop"), ("qr", "s"), ("tu", ""))]


def losses_and_gradients(model, lines):
    model.zero_grad()
    logits, labels = sft.label_logits(model, *sft.collate(lines, PAD))
    nll = sft.token_nll(logits, labels)
    nll.sum().backward()
    return nll[labels != -100].detach(), [w.grad.clone() for w in model.parameters()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_packed_rows_are_rows_alone(letters, build_model, family, attention, dtype, tolerance):
    """Losses and gradients, for lines of three, two and one rows with padding after them."""
    model = build_model(family, dtype)
    model.set_attn_implementation(attention)
    rows = [*LONG, *ROWS, {"prompt": "a", "completion": "bcdefghijklmnopqr"}]
    examples = encode(rows, letters, completion_only_loss=False)
    assert all(-100 not in labels[1:] and labels[0] == -100 for _, labels in examples)
    if attention == "eager" and family != "gpt2":
        tolerance = max(tolerance, 1e-5)  # transformers computes their softmax in float32
    lines = [[examples[i] for i in line] for line in sft.pack([len(ids) for ids, _ in examples], 20)]
    assert sorted(map(len, lines))[-1] >= 3 and sorted(map(len, lines))[0] == 1
    losses, gradients = losses_and_gradients(model, lines)
    alone = [losses_and_gradients(model, [[example]]) for line in lines for example in line]
    assert (losses - torch.cat([x for x, _ in alone])).abs().max() < tolerance
    for gradient, parts in zip(gradients, zip(*(x for _, x in alone), strict=True), strict=True):
        expected = torch.stack(parts).sum(0)
        assert (gradient - expected).abs().max() <= tolerance * expected.abs().max()
    assert sft.packing_error(model, lines[0] + lines[-1], PAD, "cpu") < tolerance


def causal(ids, dtype):
    """The mask (B, 1, T, T) of lines that hold one row each."""
    return torch.full((len(ids), 1, *[ids.shape[1]] * 2), torch.finfo(dtype).min, dtype=dtype).triu(1)


class Leaky(torch.nn.Module):
    """A model that does not know which rows share a line."""

    def __init__(self, model, positions):
        super().__init__()
        self.model, self.positions, self.config = model, positions, model.config

    def forward(self, input_ids, position_ids, **options):
        position_ids = torch.arange(input_ids.shape[1])[None] if self.positions else position_ids
        mask = causal(input_ids, next(self.parameters()).dtype)
        return self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **options)


@pytest.mark.parametrize("positions", [False, True])
def test_packing_error_of_a_mask_that_leaks(letters, build_model, family, positions):
    model = Leaky(build_model(family), positions)
    assert sft.packing_error(model, encode(ROWS, letters)[:2], PAD, "cpu") > 1e-2
    assert sft.packing_error(model, encode(ROWS, letters)[:1], PAD, "cpu") == 0


PACKED = {"max_length": 16, "eval_dataset": LONG, "eval_every": 2, "lr": 5e-3}


@pytest.fixture(scope="module", params=[("float64", 1e-9), ("float32", 1e-5)], ids=["f64", "f32"])
def unpacked(request, tiny_dirs, tmp_path_factory):
    """(dtype, tolerance, result of a run that does not pack)."""
    dtype, tolerance = request.param
    flags = PACKED | {"dtype": dtype}
    return dtype, tolerance, run_sft(tiny_dirs["gpt2"], tmp_path_factory.mktemp("sft") / "run", ROWS + LONG, **flags)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_packing_changes_no_metric(monkeypatch, unpacked, gpt2_dir, tmp_path, size):
    """Training is packed, evaluation never."""
    dtype, tolerance, plain = unpacked
    shapes, label_logits = {True: [], False: []}, sft.label_logits

    def watched(model, ids, positions, labels):
        shapes[model.training].append((positions == 0).sum(1).tolist())
        return label_logits(model, ids, positions, labels)

    monkeypatch.setattr(sft, "label_logits", watched)
    flags = PACKED | {"dtype": dtype, "micro_batch_size": size, "packing": True}
    metrics, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)
    assert max(map(max, shapes[True])) >= 2 and max(map(len, shapes[True])) == min(size, 4)
    in_evaluation = [x for x in shapes[False] if x != [2]]  # of the probe before the start
    assert {n for x in in_evaluation for n in x} == {1} and len(in_evaluation) >= 3 * -(-len(LONG) // size)
    for one, other in zip(log(run_dir), log(plain[1]), strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    if dtype == "float64":
        assert_same_result((metrics, run_dir), plain)


def test_packing_is_off_where_rows_see_each_other(monkeypatch, unpacked, gpt2_dir, tmp_path, capsys):
    dtype, tolerance, plain = unpacked
    forward = GPT2LMHeadModel.forward

    def leaky(self, input_ids, position_ids, **options):
        mask = causal(input_ids, self.dtype)
        return forward(self, input_ids, position_ids=position_ids, attention_mask=mask, **options)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", leaky)
    flags = PACKED | {"dtype": dtype, "packing": True, "micro_batch_size": 1}
    metrics, _ = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)
    assert re.search(r"--packing is off: .* by \d\.\de[+-]\d", capsys.readouterr().out)
    assert metrics == pytest.approx(plain[0], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("error", "off"), [(2e-4, True), (5e-5, False), (float("nan"), True)])
def test_packing_is_off_where_it_changes_losses(monkeypatch, gpt2_dir, tmp_path, capsys, error, off):
    monkeypatch.setattr(sft, "packing_error", lambda *_: error)
    packs = recorded(monkeypatch, sft, "pack")
    run_sft(gpt2_dir, tmp_path / "run", ROWS, packing=True, total_steps=2, max_length=16)
    assert ("--packing is off" in capsys.readouterr().out) == off and len(packs) == (0 if off else 2)


# ---- Resuming --------------------------------------------------------------------------------------------------------

EVERYTHING = {"packing": True, "neftune_alpha": 5.0, "num_layers_unfrozen": 1, "total_steps": 4, "save_every": 2}


def test_a_stopped_run_continues_bitwise(monkeypatch, gpt2_dir, tmp_path):
    """With packing, noise, frozen layers and a best checkpoint at once."""
    flags = PACKED | EVERYTHING | {"adam_betas": (0.5, 0.9), "eval_every": 1}
    whole = run_sft(gpt2_dir, tmp_path / "whole", ROWS + LONG, **flags)
    calls, stop_requested = [], logging.Run.stop_requested

    def stop(run):
        calls.append(1)
        run.signal = 15 if len(calls) == 2 else None
        return stop_requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    with pytest.raises(SystemExit) as stopped:
        run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)
    assert stopped.value.code == 143 and len(log(tmp_path / "run")) == 3
    assert run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)[0] == whole[0]
    assert log(tmp_path / "run") == log(whole[1])
    one, other = weights(tmp_path / "run"), weights(whole[1])
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- Noise on the embeddings -----------------------------------------------------------------------------------------


def noise(model, lines, alpha=5.0, step=1, seed=1):
    """{place in the batch: noise (T, H)} on the embeddings of the examples (ids, labels, place) of the lines."""
    found, args = [], SimpleNamespace(neftune_alpha=alpha, seed=seed)
    ids, positions, labels = sft.collate(lines, PAD)
    with sft.neftune(model, lines, args, step):
        hook = model.get_input_embeddings().register_forward_hook(lambda *call: found.append(call[2]))
        sft.label_logits(model, ids, positions, labels)
        hook.remove()
    (noisy,), rows = found, {}
    clean = model.get_input_embeddings()(ids[:, :-1])
    for difference, line in zip((noisy - clean).detach(), lines, strict=True):
        used = 0
        for tokens, _, place in line:
            rows[place] = difference[used : used + len(tokens)]
            used += len(tokens)
        assert not difference[used:].any()  # padding has none
    return rows


def places(examples):
    return [(*example, place) for place, example in enumerate(examples)]


def test_noise_is_uniform_and_belongs_to_the_row(letters, build_model):
    model = build_model(dtype=torch.float64)
    examples = places(encode((LONG + ROWS) * 3, letters))
    alone = noise(model, [[example] for example in examples])
    units = []
    for place, row in alone.items():
        tokens, shape = len(examples[place][0]), row.shape
        assert shape[0] >= tokens - 1 and shape[1] == 12  # the last token is no input where it ends a line
        units.append(row.flatten() * (tokens * 12) ** 0.5 / 5.0)
    units = torch.cat(units).sort().values
    expected = torch.linspace(-1, 1, len(units), dtype=units.dtype)
    assert len(units) > 2000 and units.abs().max() <= 1 + 1e-6 and (units - expected).abs().max() < 0.08
    packed = sft.pack([len(ids) for ids, *_ in examples], 24)
    for lines in ([[examples[i] for i in line] for line in packed], [examples[3:5], examples[2:3]]):
        for place, row in noise(model, lines).items():
            size = min(len(row), len(alone[place]))
            assert (row[:size] - alone[place][:size]).abs().max() < 1e-6 and size >= len(alone[place]) - 1
    line, first = [examples[:1]], alone[0]
    for other in (noise(model, line, step=2), noise(model, line, seed=2), noise(model, [[(*examples[0][:2], 1)]])):
        assert (next(iter(other.values())) - first).abs().max() > 0.1
    assert torch.allclose(noise(model, line, alpha=10.0)[0], 2 * first)


def test_noise_is_gone_outside(letters, build_model):
    model, lines = build_model(), [places(encode(ROWS, letters))[:2]]
    batch = sft.collate(lines, PAD)
    before = sft.label_logits(model, *batch)[0]
    with pytest.raises(KeyError), sft.neftune(model, lines, SimpleNamespace(neftune_alpha=5.0, seed=1), 1):
        assert not torch.equal(sft.label_logits(model, *batch)[0], before)
        raise KeyError
    with sft.neftune(model, lines, SimpleNamespace(neftune_alpha=0.0, seed=1), 1):
        assert torch.equal(sft.label_logits(model, *batch)[0], before)
    assert torch.equal(sft.label_logits(model, *batch)[0], before)


@pytest.fixture(scope="module")
def noisy(tiny_dirs, tmp_path_factory):
    flags = PACKED | {"neftune_alpha": 5.0}
    return run_sft(tiny_dirs["gpt2"], tmp_path_factory.mktemp("sft") / "run", ROWS + LONG, **flags)


def test_noise_in_training_alone(noisy, gpt2_dir, tmp_path):
    quiet = log(run_sft(gpt2_dir, tmp_path / "quiet", ROWS + LONG, **PACKED)[1])
    assert quiet[0] == log(noisy[1])[0] and abs(quiet[1]["train/loss"] - log(noisy[1])[1]["train/loss"]) > 1e-3
    flags = PACKED | {"neftune_alpha": 5.0, "lr": 1e-30}
    still = log(run_sft(gpt2_dir, tmp_path / "still", ROWS + LONG, **flags)[1])
    assert still[-1]["eval/loss"] == pytest.approx(quiet[0]["eval/loss"], abs=1e-12)


# ---- Formatting ------------------------------------------------------------------------------------------------------


def as_text(row):
    return row["prompt"] + row["completion"]


def as_pair(row):
    return {"prompt": row["prompt"] + "u", "completion": row["completion"]}


def as_dialogue(row):
    row.pop("prompt")
    return {"dialogue": ["u", row.pop("completion")]}


def as_several(row):
    return [row["prompt"], row["completion"] + "a"]


def as_pairs(row):
    return [row] * (1 + len(row["completion"]) % 2)


FORMATS = [
    (as_text, [{"text": as_text(row)} for row in ROWS]),
    (as_pair, [as_pair(row) for row in ROWS]),
    (as_dialogue, [{"dialogue": ["u", row["completion"]]} for row in ROWS]),
    (as_several, [{"text": text} for row in ROWS for text in (row["prompt"], row["completion"] + "a")]),
    (as_pairs, [row for row in ROWS for _ in range(1 + len(row["completion"]) % 2)]),
]


@pytest.mark.parametrize(("function", "rows"), FORMATS, ids=lambda x: getattr(x, "__name__", ""))
def test_formatting_makes_the_rows(monkeypatch, gpt2_dir, tmp_path, function, rows):
    """Of training and evaluation; the user's rows stay as they are."""
    given = [dict(row) for row in ROWS]
    calls = recorded(monkeypatch, sft, "encode_rows")
    run_sft(gpt2_dir, tmp_path / "run", given, eval_dataset=given, formatting=function, total_steps=1)
    assert given == ROWS and [args[0] for args, _ in calls] == [rows, rows]


BAD_FORMATS = [
    (lambda row: row["text"], "--formatting raised KeyError: 'text'"),
    (lambda row: None, "--formatting row 1 is None"),
    (lambda row: 5, "--formatting row 1 is 5"),
    (lambda row: [], "--formatting .*holds no rows"),
    (lambda row: row["prompt"] if row["prompt"] == "b" else row, r"--formatting row 2 is \['prompt', 'completion'\]"),
    (lambda row: {"body": "a"}, "--dataset row 1: 'text' .*missing among \\['body'\\]"),
]


@pytest.mark.parametrize(("function", "sentence"), BAD_FORMATS, ids=lambda x: x if isinstance(x, str) else "")
def test_formatting_that_fails(gpt2_dir, tmp_path, function, sentence):
    with pytest.raises(InputError, match=sentence):
        run_sft(gpt2_dir, tmp_path / "run", ROWS, formatting=function)
    assert not (tmp_path / "run").exists()


def test_formatting_from_the_command_line(monkeypatch, gpt2_dir, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my.py").write_text("def text(row, end='a'):\n return row['prompt'] + row['completion'] + end\n")
    argv = f"sft.py --model {gpt2_dir} --dataset rows.jsonl --formatting my.py:text:end=b --run-dir run --total-steps 1"
    monkeypatch.setattr(sys, "argv", [*argv.split(), "--batch-size", "7", "--warmup-steps", "0", "--threads", "1"])
    calls = recorded(monkeypatch, sft, "encode_rows")
    cli(sft.Args, sft.main)
    assert calls[0][0][0] == [{"text": as_text(row) + "b"} for row in ROWS]


# ---- The identity of a run -------------------------------------------------------------------------------------------

NAMED = [  # script, flags that name a.jsonl, b.jsonl or user.py, the file that is changed
    (sft, {"formatting": "user.py:text"}, "user.py"),
    (sft, {"formatting": "user.py:text:end=b"}, "user.py"),
    (sft, {"eval_dataset": "a.jsonl,b.jsonl"}, "a.jsonl"),
    (sft, {"eval_dataset": "a.jsonl,b.jsonl"}, "b.jsonl"),
    (sft, {"eval_dataset": "a.jsonl, b.jsonl"}, "b.jsonl"),
    (sft, {"eval_dataset": "a.jsonl,user.py:rows"}, "user.py"),
    (sft, {"eval_dataset": "user.py:rows:n=3,b=4"}, "user.py"),
    (sft, {"eval_dataset": "user.py:rows:n=3,b=4,a.jsonl"}, "user.py"),
    (ppo, {"eval_dataset": "a.jsonl,b.jsonl", "reward": "user.py:score"}, "b.jsonl"),
    (ppo, {"reward": "judge"}, "judge/model.safetensors"),
    (ppo, {"reward": "judge:POSITIVE"}, "judge/model.safetensors"),
    (ppo, {"reward": "./judge:POSITIVE"}, "judge/config.json"),
]


@pytest.mark.parametrize(("script", "flags", "file"), NAMED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_changed_file_is_another_run(monkeypatch, tmp_path, script, flags, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    for name in ("a.jsonl", "b.jsonl", "user.py", "judge/model.safetensors", "judge/config.json"):
        (tmp_path / name).write_text(name)
    flags = ({"reward": "user.py:score"} if script is ppo else {}) | flags
    args, name = script.Args(dataset="a.jsonl", **flags), script.__file__
    before = identity.identity("x", args, name)["hash"]
    assert identity.identity("x", args, name)["hash"] == before
    (tmp_path / file).write_text("changed")
    assert identity.identity("x", args, name)["hash"] != before


CODE = ["sft.py", *(f"common/{path.name}" for path in sorted((identity.ROOT / "common").glob("*.py"))), "common/new.py"]


@pytest.mark.parametrize("name", CODE)
def test_a_changed_byte_of_the_code_is_another_run(monkeypatch, tmp_path, name):
    """Of the script and of any module of common/, an added one, too; the error names the file."""
    shutil.copytree(identity.ROOT / "common", tmp_path / "common")
    shutil.copy(SCRIPT, tmp_path)
    monkeypatch.setattr(identity, "ROOT", tmp_path)

    def identity_now():
        return identity.identity("sft", sft.Args(dataset=ROWS), tmp_path / "sft.py")

    before = identity_now()
    content = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
    (tmp_path / name).write_bytes((content or b"") + b"#")
    after = identity_now()
    file = "the script" if name == "sft.py" else name
    assert identity.differences(before, after) == [f"{file} has changed"] and after["hash"] != before["hash"]
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert identity_now() == before


def test_objects_that_differ_are_different_runs(tmp_path):
    def hash_of(**flags):
        return identity.identity("x", sft.Args(dataset=ROWS, **flags), sft.__file__)["hash"]

    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) == hash_of(eval_dataset={"a": ROWS, "b": LONG})
    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) != hash_of(eval_dataset={"a": ROWS, "b": LONG[1:]})
    assert hash_of(formatting=as_text) != hash_of(formatting=as_pair) != hash_of()
    changes = {"neftune_alpha": 1.0, "num_layers_unfrozen": 1, "stop": ("c",), "completion_only_loss": False}
    assert len({hash_of(**{key: value}) for key, value in changes.items()} | {hash_of()}) == 5
    assert hash_of(packing=True) == hash_of(micro_batch_size=3) == hash_of(gradient_checkpointing=True) == hash_of()


def test_mapped_sets_of_the_datasets_library_are_told_apart():
    import datasets

    sets = [datasets.Dataset.from_list(rows) for rows in (ROWS, [row | {"prompt": "u"} for row in ROWS])]
    found = [sft.Args(dataset=ROWS, eval_dataset={"a": rows}) for rows in sets]
    assert (
        identity.identity("x", found[0], sft.__file__)["hash"] != identity.identity("x", found[1], sft.__file__)["hash"]
    )


# ---- Several evaluation sets -----------------------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name, rows in {"easy.jsonl": ROWS, "hard.jsonl": LONG, "sub/easy.jsonl": LONG}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"ROWS, LONG = {ROWS!r}, {LONG!r}\n"
    text += "def rows(n=7, b=0):\n return ROWS[:n]\ndef sets():\n return {'a': ROWS, 'b': LONG}\n"
    (tmp_path / "user.py").write_text(text)


SETS = [
    (None, {}),
    (ROWS, {"": ROWS}),
    ({"x": ROWS, "y": LONG}, {"x": ROWS, "y": LONG}),
    ({"x": "hard.jsonl", "y": "user.py:rows"}, {"x": LONG, "y": ROWS}),
    ("easy.jsonl", {"": ROWS}),
    ("easy.jsonl,hard.jsonl", {"easy": ROWS, "hard": LONG}),
    ("hard.jsonl, easy.jsonl", {"hard": LONG, "easy": ROWS}),
    ("user.py:rows", {"": ROWS}),
    ("user.py:rows:n=3,b=4", {"": ROWS[:3]}),
    ("user.py:rows:n=3,b=4,hard.jsonl", {"rows": ROWS[:3], "hard": LONG}),
    ("hard.jsonl,user.py:rows:n=3", {"hard": LONG, "rows": ROWS[:3]}),
    ("user.py:sets", {"a": ROWS, "b": LONG}),
]


@pytest.mark.parametrize(("spec", "expected"), SETS, ids=lambda x: repr(x)[:40])
def test_evaluation_sets(files, spec, expected):
    found = load_sets(spec, "--eval-dataset")
    assert found == expected and list(found) == list(expected)


BAD_SETS = [
    ("easy.jsonl,sub/easy.jsonl", "--eval-dataset .*two sets have the same name"),
    ("easy.jsonl,nope.jsonl", "--eval-dataset nope nope.jsonl"),
    ("easy.jsonl,", "--eval-dataset"),
    ({"x": []}, "--eval-dataset x .*holds no rows"),
    ({"x": ROWS, "y": [5]}, "--eval-dataset y row 1 is 5"),
]


@pytest.mark.parametrize(("spec", "sentence"), BAD_SETS, ids=lambda x: repr(x)[:40])
def test_bad_evaluation_sets(files, spec, sentence):
    with pytest.raises(InputError, match=sentence):
        load_sets(spec, "--eval-dataset")


def test_a_bad_row_of_one_of_several_sets_names_the_set(gpt2_dir, tmp_path):
    with pytest.raises(InputError, match="--eval-dataset.* y.* row 1"):
        run_sft(gpt2_dir, tmp_path / "run", ROWS, eval_dataset={"x": ROWS, "y": [{"body": "a"}]}, eval_every=1)


SETS_OF_TWO = {"x": [{"text": "abcdefg"}] * 3, "y": [{"text": "nmlkj"}] * 2}


@pytest.fixture(scope="module")
def one_set(tiny_dirs, tmp_path_factory):
    """{set: its loss at the end of a run that evaluates it alone}."""
    found = {}
    for name, rows in SETS_OF_TWO.items():
        flags = {"eval_dataset": rows, "total_steps": 4, "eval_every": 4}
        run_dir = tmp_path_factory.mktemp("sft") / name
        found[name] = run_sft(tiny_dirs["gpt2"], run_dir, SETS_OF_TWO["x"], **flags)[0]["eval/loss"]
    return found


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_the_best_checkpoint_is_that_of_the_first_set(one_set, gpt2_dir, tmp_path, order):
    """Training on x makes y worse."""
    sets = {name: SETS_OF_TWO[name] for name in order}
    flags = {"eval_dataset": sets, "eval_every": 1, "keep_checkpoints": 1}
    _, run_dir = run_sft(gpt2_dir, tmp_path / "run", SETS_OF_TWO["x"], total_steps=4, **flags)
    records = log(run_dir)
    assert len(records) == 5 and {f"eval/{n}/{k}" for n in "xy" for k in ("loss", "perplexity", "accuracy")} <= set(
        records[0]
    )
    assert not any(key.startswith("eval/") and key.count("/") == 1 for key in records[0])
    for name, loss in one_set.items():
        assert loss == pytest.approx(records[-1][f"eval/{name}/loss"], rel=1e-12)
    losses = [record[f"eval/{order[0]}/loss"] for record in records[1:]]
    best = losses.index(min(losses)) + 1
    assert (best == 4) == (order == "xy")
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert kept == sorted({f"step_{best:08d}", "step_00000004"})


# ---- Frozen layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_only_the_top_blocks_and_the_norm_move(family, tiny_dirs, tmp_path, k):
    flags = {"num_layers_unfrozen": k, "weight_decay": 0.1, "lr": 1e-3}
    metrics, run_dir = run_sft(tiny_dirs[family], tmp_path / "run", ROWS, **flags)
    before = safetensors.torch.load_file(f"{tiny_dirs[family]}/model.safetensors")
    after = safetensors.torch.load_file(run_dir / "hf_model/model.safetensors")
    moved = {name for name, weight in before.items() if not torch.equal(weight.double(), after[name])}
    norms = {"transformer.ln_f.weight", "transformer.ln_f.bias", "model.norm.weight"} & before.keys()
    blocks = {name for name in before if re.search(rf"\.({'|'.join('01'[2 - k :])})\.", name)}
    assert norms and len(blocks) > 8 * k and moved == norms | blocks


@pytest.mark.parametrize(("k", "sentence"), [(0, "-1 or at least 1"), (3, "the model has 2 layers"), (-2, "-1 or")])
def test_a_wrong_number_of_layers(gpt2_dir, tmp_path, k, sentence):
    with pytest.raises(InputError, match=f"--num-layers-unfrozen {k}.*{sentence}"):
        run_sft(gpt2_dir, tmp_path / "run", ROWS, num_layers_unfrozen=k)
    assert not (tmp_path / "run").exists()


# ---- Stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("c",), ("e", "ab")], ids=repr)
def test_a_metric_sees_the_text_before_a_stop(letters, gpt2_dir, tmp_path, stops):
    calls = []

    def metric(samples, prompts, outputs, output_ids):
        calls.append((samples, prompts, outputs, output_ids))
        return {"length": [len(x) for x in outputs]}

    flags = {"metric": metric, "eval_prompts": [{"prompt": p} for p in "bcdfgh" * 9], "stop": stops, "eval_every": 1}
    _, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS, total_steps=1, **flags)
    ended = 0
    for samples, prompts, outputs, output_ids in calls:
        assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
        for output, ids in zip(outputs, output_ids, strict=True):
            text = letters.decode(ids, skip_special_tokens=True)
            hits = [text.find(stop) for stop in stops if stop in text]
            assert output == (text[: min(hits)] if hits else text) and not any(stop in output for stop in stops)
            assert hits or len(ids) == 9 or ids[-1] == EOS
            assert not hits or any(text.endswith(stop) for stop in stops)  # nothing is sampled after it
            ended += bool(hits)
    assert len(calls) == 2 and (8 < ended < 100 if stops else ended == 0)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [row["output"] for row in samples] == [output for call in calls for output in call[2]]


def test_an_empty_stop_is_refused():
    with pytest.raises(InputError, match="--stop .*not empty"):
        sft.Args(stop=("a", ""))
