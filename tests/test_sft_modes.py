"""What sft.py does on request: `python -m pytest tests/test_sft_modes.py`

Chats and dialogues, packing, several evaluation sets, frozen layers, stops, samples without a metric, and the flags;
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

from algos import ppo, sft
from common import forward, identity, logging
from common.cli import InputError, cli, from_task
from common.rows import load_sets
from common.tokens import collate, encode_prompts, pack

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


def sampled(run_dir):
    path = run_dir / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
    ([user("a"), answer("b"), user("c")], "the last message must be the assistant's"),
    ([turn("tool", "a"), answer("b")], "the chat template cannot write the messages: tool is unknown"),
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
    with pytest.raises(InputError, match="--dataset row 1: .*chat_template is not set"):
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
    assert isinstance(prompt, str) or row["prompt"].endswith("s")


BAD_DIALOGUES = [
    (["a", "b", "c"], "must be a list prompt, output"),
    ([], "must be a list prompt, output"),
    ("ab", "must be a list prompt, output"),
    (None, "must be a list prompt, output"),
    (["a", 5], "part of row 2: 'dialogue' must be valid text, it is 5"),
    (["a", None], "part of row 2: 'dialogue' must be valid text, it is None"),
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
    calls = recorded(monkeypatch, logging.Run, "draw_rows")
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
    assert pack(lengths, max_length) == lines


def test_pack_keeps_every_row_once():
    generator = np.random.default_rng(0)
    for _ in range(200):
        max_length = int(generator.integers(1, 40))
        lengths = generator.integers(1, max_length + 1, generator.integers(1, 60)).tolist()
        lines = pack(lengths, max_length)
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
    ids, positions, labels = collate(lines, PAD)
    assert ids.tolist() == [[4, 5, 6, 7, 8], [9, 1, PAD, PAD, PAD]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]  # no row begins in the padding
    assert labels.tolist() == [[-100, 5, 6, -100, 8], [-100, 1, -100, -100, -100]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_process_has_equally_many_micro_batches(packing, processes):
    """Else FSDP, which gathers the weights in each forward pass, would wait forever. No example is lost or doubled;
    what fills up has no labels."""
    lengths = [3, 11, 5, 7, 3, 2, 7, 9, 2, 5, 4]
    batch = [([place] * length, [-100] + [place] * (length - 1)) for place, length in enumerate(lengths)]
    parts = []
    for process in range(processes):
        accelerator = SimpleNamespace(process_index=process, num_processes=processes)
        parts.append(sft.split_batch(batch, packing, accelerator, SimpleNamespace(micro_batch_size=2)))
    assert len({len(part) for part in parts}) == 1
    lines = [line for part in parts for micro_batch in part for line in micro_batch]
    labelled = [example for line in lines for example in line if set(example[1]) != {-100}]
    assert sorted(labelled) == batch
    widths = [sum(len(ids) for ids, *_ in line) for line in lines]
    assert max(widths) == 11 and len(lines) % processes == 0
    positions = len(lines) * max(widths)
    assert positions < 11 * ((6 if packing else 11) + processes)  # of 58 tokens
    assert all(len(micro_batch) <= 2 for part in parts for micro_batch in part)


LONG = [{"prompt": p, "completion": c} for p, c in (("abc", "defghijk"), ("l", "mnop"), ("qr", "s"), ("tu", ""))]


def losses_and_gradients(model, lines):
    model.zero_grad()
    logprobs, _ = sft.line_logprobs(model, lines, PAD)
    logprobs.sum().backward()
    return logprobs.detach(), [w.grad.clone() for w in model.parameters()]


@pytest.mark.parametrize(("attention", "plain"), [("sdpa", True), ("eager", False)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_packed_rows_are_rows_alone(letters, build_model, family, attention, plain, dtype, tolerance):
    """Losses and gradients, for lines of three, two and one rows with padding after them. plain: logits of labelled
    tokens alone."""
    model = build_model(family, dtype)
    model.plain_output = plain
    model.set_attn_implementation(attention)
    rows = [*LONG, *ROWS, {"prompt": "a", "completion": "bcdefghijklmnopqr"}]
    examples = encode(rows, letters, completion_only_loss=False)
    assert all(-100 not in labels[1:] and labels[0] == -100 for _, labels in examples)
    if attention == "eager" and family != "gpt2":
        tolerance = max(tolerance, 1e-5)  # transformers computes their softmax in float32
    lines = [[examples[i] for i in line] for line in pack([len(ids) for ids, _ in examples], 20)]
    assert sorted(map(len, lines))[-1] >= 3 and sorted(map(len, lines))[0] == 1
    losses, gradients = losses_and_gradients(model, lines)
    alone = [losses_and_gradients(model, [[example]]) for line in lines for example in line]
    assert (losses - torch.cat([x for x, _ in alone])).abs().max() < tolerance
    for gradient, parts in zip(gradients, zip(*(x for _, x in alone), strict=True), strict=True):
        expected = torch.stack(parts).sum(0)
        assert (gradient - expected).abs().max() <= tolerance * expected.abs().max()
    assert packing_error(model, lines[0] + lines[-1]) < tolerance


def packing_error(model, line):
    """Largest difference of a token's loss between the examples of a line packed and each alone."""
    with torch.no_grad():
        packed, _ = sft.line_logprobs(model, [line], PAD)
        alone = [sft.line_logprobs(model, [[example]], PAD)[0] for example in line]
    return (packed - torch.cat(alone)).abs().max()


def causal(ids, dtype):
    """The mask (B, 1, T, T) of lines that hold one row each."""
    return torch.full((len(ids), 1, *[ids.shape[1]] * 2), torch.finfo(dtype).min, dtype=dtype).triu(1)


class Leaky(torch.nn.Module):
    """A model that does not know which rows share a line."""

    def __init__(self, model, positions):
        super().__init__()
        self.model, self.positions, self.config, self.device = model, positions, model.config, model.device

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, input_ids, position_ids, **options):
        position_ids = torch.arange(input_ids.shape[1])[None] if self.positions else position_ids
        mask = causal(input_ids, next(self.parameters()).dtype)
        return self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **options)


@pytest.mark.parametrize("positions", [False, True])
def test_packing_error_of_a_mask_that_leaks(letters, build_model, family, positions):
    model = Leaky(build_model(family), positions)
    assert packing_error(model, encode(ROWS, letters)[:2]) > 1e-2
    assert packing_error(model, encode(ROWS, letters)[:1]) == 0


PACKED = {"max_length": 16, "eval_dataset": LONG, "eval_every": 2, "lr": 5e-3}


@pytest.fixture(scope="module", params=[("float64", 1e-9), ("float32", 1e-5)], ids=["f64", "f32"])
def unpacked(request, tiny_dirs, tmp_path_factory):
    """(dtype, tolerance, result of a run that does not pack)."""
    dtype, tolerance = request.param
    flags = PACKED | {"dtype": dtype, "packing": False}
    return dtype, tolerance, run_sft(tiny_dirs["gpt2"], tmp_path_factory.mktemp("sft") / "run", ROWS + LONG, **flags)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_packing_changes_no_metric(monkeypatch, unpacked, gpt2_dir, tmp_path, size):
    """Training is packed, evaluation never."""
    dtype, tolerance, plain = unpacked
    shapes, line_logprobs = {True: [], False: []}, sft.line_logprobs

    def watched(model, lines, *more, **options):
        shapes[model.training].append([len(line) for line in lines])
        return line_logprobs(model, lines, *more, **options)

    monkeypatch.setattr(sft, "line_logprobs", watched)
    flags = PACKED | {"dtype": dtype, "micro_batch_size": size, "packing": True}
    metrics, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)
    assert max(map(max, shapes[True])) >= 2 and max(map(len, shapes[True])) == min(size, 5)
    assert {n for x in shapes[False] for n in x} == {1} and len(shapes[False]) >= 3 * -(-len(LONG) // size)
    for one, other in zip(log(run_dir), log(plain[1]), strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    if dtype == "float64":
        assert_same_result((metrics, run_dir), plain)


def test_packing_is_off_where_rows_see_each_other(monkeypatch, unpacked, gpt2_dir, tmp_path, capsys):
    """By the structure of the model."""
    dtype, _, plain = unpacked
    monkeypatch.setattr(forward, "packing_problem", lambda lm: "its layers read on")
    flags = PACKED | {"dtype": dtype, "packing": True}
    metrics, _ = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, **flags)
    assert "--packing is off: its layers read on\n" in capsys.readouterr().out
    assert metrics == plain[0]


# ---- Resuming --------------------------------------------------------------------------------------------------------

EVERYTHING = {"packing": True, "num_layers_unfrozen": 1, "total_steps": 4, "save_every": 2, "max_new_tokens": 5}


@pytest.mark.parametrize("eval_dataset", [LONG, None], ids=["evaluated", "sampled alone"])
def test_a_stopped_run_continues_bitwise(monkeypatch, gpt2_dir, tmp_path, eval_dataset):
    """With packing, frozen layers, samples and a best checkpoint at once; and with nothing but samples to evaluate."""
    flags = (
        PACKED
        | EVERYTHING
        | {"adam_betas": (0.5, 0.9), "eval_every": 1, "eval_dataset": eval_dataset, "eval_prompts": LONG}
    )
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
    assert len(sampled(whole[1])) == 5 * len(LONG) and sampled(tmp_path / "run") == sampled(whole[1])
    one, other = weights(tmp_path / "run"), weights(whole[1])
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- Rows by a function ----------------------------------------------------------------------------------------------


def test_a_function_makes_the_rows(monkeypatch, gpt2_dir, tmp_path):
    """Of training and evaluation, in any form; what was --formatting."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my.py").write_text(
        "import json\n\n\ndef rows(file, end='a'):\n    made = map(json.loads, open(file))\n"
        "    return [{'text': row['prompt'] + row['completion'] + end} for row in made]\n"
    )
    spec = "my.py:rows:file=rows.jsonl"
    argv = f"sft.py --model {gpt2_dir} --dataset {spec},end=b --eval-dataset {spec} --run-dir run --total-steps 1"
    monkeypatch.setattr(sys, "argv", [*argv.split(), "--batch-size", "7", "--threads", "1"])
    calls = recorded(monkeypatch, sft, "encode_rows")
    cli(sft.Args, sft.main)
    for end, (args, _) in zip("ba", calls, strict=True):
        assert args[0] == [{"text": row["prompt"] + row["completion"] + end} for row in ROWS]


# ---- The identity of a run -------------------------------------------------------------------------------------------

NAMED = [  # script, flags that name a.jsonl, b.jsonl or user.py, the file that is changed
    (sft, {"dataset": "user.py:text"}, "user.py"),
    (sft, {"dataset": "user.py:text:end=b"}, "user.py"),
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
    args, name = script.Args(**{"model": "gpt2", "dataset": "a.jsonl"} | flags), script.__file__
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
        return identity.identity("sft", sft.Args(model="gpt2", dataset=ROWS), tmp_path / "sft.py")

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
        return identity.identity("x", sft.Args(model="gpt2", dataset=ROWS, **flags), sft.__file__)["hash"]

    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) == hash_of(eval_dataset={"a": ROWS, "b": LONG})
    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) != hash_of(eval_dataset={"a": ROWS, "b": LONG[1:]})
    changes = {"eval_prompts": ROWS, "num_layers_unfrozen": 1, "stop": ("c",), "completion_only_loss": False}
    assert len({hash_of(**{key: value}) for key, value in changes.items()} | {hash_of()}) == 5
    assert hash_of(packing=True) == hash_of(micro_batch_size=3) == hash_of(gradient_checkpointing=True) == hash_of()


def test_mapped_sets_of_the_datasets_library_are_told_apart():
    import datasets

    sets = [datasets.Dataset.from_list(rows) for rows in (ROWS, [row | {"prompt": "u"} for row in ROWS])]
    found = [sft.Args(model="gpt2", dataset=ROWS, eval_dataset={"a": rows}) for rows in sets]
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
    ({"x": ROWS, "y": [5]}, "--eval-dataset y row 1 must be a mapping with the columns of row 1: see 5"),
]


@pytest.mark.parametrize(("spec", "sentence"), BAD_SETS, ids=lambda x: repr(x)[:40])
def test_bad_evaluation_sets(files, spec, sentence):
    with pytest.raises(InputError, match=sentence):
        load_sets(spec, "--eval-dataset")


def test_a_bad_row_of_one_of_several_sets_names_the_set(gpt2_dir, tmp_path):
    with pytest.raises(InputError, match="--eval-dataset y row 2: 'text' must be valid text, it is 5"):
        sets = {"x": ROWS, "y": [{"text": "a"}, {"text": 5}]}
        run_sft(gpt2_dir, tmp_path / "run", ROWS, eval_dataset=sets, eval_every=1)


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


@pytest.mark.parametrize(
    ("k", "sentence"), [(0, "-1 or at least 1"), (3, "the model has 2 layers"), (-2, "must be -1 or more")]
)
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
    _, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS, total_steps=1, max_new_tokens=9, **flags)
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
    assert [row["output"] for row in sampled(run_dir)] == [output for call in calls for output in call[2]]


# ---- Samples without a metric ----------------------------------------------------------------------------------------

MANY = [{"prompt": f"{a}{b}", "completion": "cd"} for a in "bcdf" for b in "aei"]  # 12 rows
TOO_LONG = [{"prompt": "a" * 27, "completion": "c"}, {"prompt": "ab", "completion": "c"}]
TEXTS = [{"text": "abc"}, {"text": "bcd"}]
SAMPLED = {  # flags, and the prompts that are sampled
    "named": ({"eval_prompts": MANY, "eval_dataset": LONG}, MANY),
    "not named": ({"eval_dataset": LONG}, []),
    "never": ({"eval_prompts": MANY, "eval_every": 0}, []),
}


@pytest.mark.parametrize(("flags", "prompts"), SAMPLED.values(), ids=SAMPLED)
def test_what_is_sampled_without_a_metric(letters, gpt2_dir, tmp_path, capsys, flags, prompts):
    """A response to each prompt, at the start and the end; shown, and in no metric. Training is as without."""
    flags = {"dataset": ROWS, "eval_every": 2, "total_steps": 2, "max_new_tokens": 6} | flags
    rows = flags.pop("dataset")
    metrics, run_dir = run_sft(gpt2_dir, tmp_path / "run", rows, **flags)
    out = capsys.readouterr().out
    found = sampled(run_dir)
    assert [(row["step"], row["prompt"]) for row in found] == [(n, row["prompt"]) for n in (0, 2) for row in prompts]
    assert all(row.keys() == {"step", "prompt", "output"} and len(row["output"]) <= 6 for row in found)
    assert ("samples at step 2" in out) == bool(prompts)
    told = ["; evaluations sample 12 prompts"] if "eval_prompts" in flags else []
    assert re.findall("; evaluations sample .* prompts", out) == told
    assert any(row["output"] for row in found) == bool(prompts)
    assert not any("output" in name or "sample" in name for name in metrics)
    assert (run_dir / "hf_model_best").exists() == ("eval_dataset" in flags)
    quiet, quiet_dir = run_sft(gpt2_dir, tmp_path / "quiet", rows, **flags | {"eval_every": 0})
    assert {name: metrics[name] for name in quiet} == quiet
    one, other = weights(run_dir), weights(quiet_dir)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_named_prompts_must_have_room(gpt2_dir, tmp_path):
    """Of --eval-prompts, and with a metric, nothing is passed over in silence."""
    for flags in ({"eval_prompts": TOO_LONG}, {"eval_dataset": TOO_LONG, "metric": lambda **columns: {}}):
        with pytest.raises(InputError, match="--eval-prompts row 1: a prompt of 27 tokens and --max-new-tokens 6"):
            run_sft(gpt2_dir, tmp_path / "run", ROWS, max_new_tokens=6, eval_every=1, **flags)
    with pytest.raises(InputError, match="--eval-prompts has the columns text; expected prompt"):
        run_sft(gpt2_dir, tmp_path / "run", ROWS, eval_prompts=TEXTS)
    with pytest.raises(InputError, match="--metric needs rows with a prompt to sample from: name --eval-prompts"):
        run_sft(gpt2_dir, tmp_path / "run", ROWS, metric=lambda **columns: {})
    assert not (tmp_path / "run").exists()


# ---- Flags -----------------------------------------------------------------------------------------------------------

TASK = "benchmarks/tasks/randomwalks.py:"
EMBEDDED = {  # of the embedded task, as they were while they were the defaults
    "model": TASK + "untrained_model", "dataset": TASK + "completions:split=train", "metric": TASK + "metric",
    "eval_dataset": TASK + "completions:split=test", "eval_prompts": TASK + "eval_prompts", "lr": 6e-3,
    "lr_schedule": "cosine", "warmup_steps": 40, "adam_betas": (0.9, 0.95), "adam_eps": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "batch_size": 192, "micro_batch_size": 64, "epochs": 85.0, "total_steps": None,
    "max_length": 1024, "max_new_tokens": 9, "eval_temperature": 1.0, "decode_batch_size": 1024, "eval_every": 100,
    "attn_implementation": "eager",
}  # fmt: skip


def test_the_embedded_task_has_its_settings():
    given = vars(from_task(sft.Args, sft.TASK))
    assert {name: given[name] for name in EMBEDDED} == EMBEDDED
    changed = from_task(sft.Args, sft.TASK, lr=1e-3)
    assert changed.lr == 1e-3 and changed.batch_size == 192


def test_defaults_are_for_pretrained_models():
    args = sft.Args(model="gpt2", dataset=ROWS)
    assert (args.lr, args.epochs, args.batch_size, args.micro_batch_size, args.max_new_tokens) == (2e-5, 3.0, 64, 8, 64)
    assert args.metric is args.eval_dataset is args.eval_prompts is args.attn_implementation is None
    assert vars(args) == vars(sft.Args(**vars(args)))  # nothing is rewritten


BAD_FLAGS = [
    ({"model": None}, "--model is missing: "),
    ({"dataset": None}, "--dataset is missing: "),
    ({"lr": 0.0}, "--lr 0.0 must be a positive number"),
    ({"epochs": 0.0}, "--epochs 0.0 must be a positive number"),
    ({"top_p": 0.0}, "--top-p 0.0 must be in (0, 1]"),
    ({"adam_betas": (0.9, 1.0)}, "--adam-betas (0.9, 1.0) must be in [0, 1)"),
    ({"stop": ("a", "")}, "--stop ('a', '') must be a text that is not empty"),
    ({"push_to_hub": "mine"}, "--push-to-hub mine must be org/name"),
    ({"lora_alpha": 4.0}, "--lora-alpha and --lora-targets need --lora-r"),
    ({"num_layers_unfrozen": 0}, "--num-layers-unfrozen 0 leaves nothing to train: give -1 or at least 1"),
    ({"lr": -1.0, "batch_size": 0, "num_layers_unfrozen": 0}, "3 problems:"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD_FLAGS, ids=lambda x: repr(x)[:40])
def test_flags_that_cannot_be(flags, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        sft.Args(**{"model": "gpt2", "dataset": ROWS} | flags)


def test_the_summary_says_rate_limits_and_length(gpt2_dir, capsys):
    sft.main(sft.Args(model=gpt2_dir, dataset=ROWS, check=True, threads=1, epochs=20.0, batch_size=56))
    out = capsys.readouterr().out
    assert "\nlr 2e-05 cosine, at most 32 tokens a row, 64 new tokens, 24 epochs\n3 steps x 56 rows; each step" in out
    sft.main(sft.Args(model=gpt2_dir, dataset=ROWS, check=True, threads=1, total_steps=4, max_length=9, lr=0.25))
    assert "\nlr 0.25 cosine, at most 9 tokens a row, 64 new tokens, 36.6 epochs\n" in capsys.readouterr().out
