"""What sft.py alone has: `python -m pytest tests/test_sft_modes.py`

Packing, frozen layers, stops, data that go on after a stop, and what makes a run another one; each against hand numbers
or another layout of the same work. Rows, flags and reports are in the tests of all scripts.
"""

import itertools
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import EOS, PAD, TEMPLATE, log, recorded, samples
from test_invariants import ROWS, assert_same_result, run_sft, weights

from algos import ppo, sft
from common import forward, identity, logging
from common.tokens import collate, pack

# The last answer alone is marked, as by templates that show only its thoughts.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ 'q' if loop.last and m.role == 'assistant' }}{{ m.content }}")
LONG = [{"prompt": p, "completion": c} for p, c in (("abc", "defghijk"), ("l", "mnop"), ("qr", "s"), ("tu", ""))]


def encode(rows, tokenizer, completion_only_loss=True):
    examples, _ = sft.encode_rows(rows, tokenizer, 99, completion_only_loss, "--dataset")
    return examples


# ---- Packing ---------------------------------------------------------------------------------------------------------

PACKS = [  # lengths, max_length, indices of the lines
    ([4, 2, 3, 1], 4, [[0], [2, 3], [1]]),  # TRL's example for best-fit decreasing
    ([1], 1, [[0]]),
    ([5, 5, 5], 9, [[0], [1], [2]]),
    ([2, 7, 3, 5, 3], 10, [[1, 2], [3, 4, 0]]),
    ([6, 5, 4, 3], 9, [[0, 3], [1, 2]]),
    ([7, 5, 4, 1], 10, [[0], [1, 2, 3]]),  # the fullest line that fits, not the first
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
        assert sorted(itertools.chain(*lines)) == list(range(len(lengths)))
        sums = sorted(sum(lengths[i] for i in line) for line in lines)
        assert sums[-1] <= max_length
        assert len(sums) < 2 or sums[0] + sums[1] > max_length  # else the two lines would be one
        # at least as many are needed: by the tokens, and by rows of which no two fit together
        fewest = max(-(-sum(lengths) // max_length), sum(2 * length > max_length for length in lengths))
        assert len(lines) <= 11 / 9 * fewest + 1


def test_collate_counts_positions_in_each_row():
    lines = [[([4, 5, 6], [-100, 5, 6]), ([7, 8], [-100, 8])], [([9, 1], [-100, 1])]]
    ids, positions, labels = collate(lines, PAD)
    assert ids.tolist() == [[4, 5, 6, 7, 8], [9, 1, PAD, PAD, PAD]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]  # no row begins in the padding
    assert labels.tolist() == [[-100, 5, 6, -100, 8], [-100, 1, -100, -100, -100]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 5])
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
    micro_batches = [*itertools.chain(*parts)]
    assert max(map(len, micro_batches)) <= 2
    lines = [*itertools.chain(*micro_batches)]
    assert len(lines) % processes == 0
    labelled = [example for example in itertools.chain(*lines) if set(example[1]) != {-100}]
    assert sorted(labelled) == batch
    assert max(sum(len(ids) for ids, _ in line) for line in lines) == 11
    needed = 6 if packing else 11  # lines of at most 11 tokens, of 58
    assert len(lines) < needed + processes


def losses_and_gradients(model, lines):
    model.zero_grad()
    logprobs, _ = sft.line_logprobs(model, lines, PAD)
    logprobs.sum().backward()
    return logprobs.detach(), [w.grad.clone() for w in model.parameters()]


@pytest.mark.parametrize(("attention", "plain"), [("sdpa", True), ("eager", False)])
def test_packed_rows_are_rows_alone(letters, build_model, family, attention, plain):
    """Losses and gradients, for lines of three, two and one rows with padding after them. plain: logits of labelled
    tokens alone."""
    model = build_model(family, torch.float64)
    model.plain_output = plain
    model.set_attn_implementation(attention)
    tolerance = 1e-9
    if attention == "eager" and family != "gpt2":
        tolerance = 1e-5  # transformers computes their softmax in float32
    rows = [*LONG, *ROWS, {"prompt": "a", "completion": "bcdefghijklmnopqr"}]
    examples = encode(rows, letters, completion_only_loss=False)
    lines = [[examples[i] for i in line] for line in pack([len(ids) for ids, _ in examples], 20)]
    sizes = [*map(len, lines)]
    assert min(sizes) == 1
    assert max(sizes) >= 3
    losses, gradients = losses_and_gradients(model, lines)
    alone = [losses_and_gradients(model, [[example]]) for example in itertools.chain(*lines)]
    assert (losses - torch.cat([loss for loss, _ in alone])).abs().max() < tolerance
    for place, gradient in enumerate(gradients):
        expected = sum(parts[place] for _, parts in alone)
        assert (gradient - expected).abs().max() <= tolerance * expected.abs().max()


PACKED = {"max_length": 16, "eval_dataset": LONG, "eval_every": 2, "lr": 5e-3}


@pytest.fixture(scope="module")
def unpacked(tiny_dirs, tmp_path_factory):
    """A run that does not pack."""
    folder = tmp_path_factory.mktemp("sft")
    return run_sft(tiny_dirs["gpt2"], folder / "run", ROWS + LONG, packing=False, **PACKED)


@pytest.mark.parametrize("size", [2, 5])
def test_packing_changes_no_metric(monkeypatch, unpacked, gpt2_dir, tmp_path, size):
    """Training is packed, evaluation never."""
    trained = []
    evaluated = []
    line_logprobs = sft.line_logprobs

    def watched(model, lines, *more, **options):
        sizes = trained if model.training else evaluated
        sizes.append([len(line) for line in lines])
        return line_logprobs(model, lines, *more, **options)

    monkeypatch.setattr(sft, "line_logprobs", watched)
    packed = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, micro_batch_size=size, packing=True, **PACKED)
    assert max(itertools.chain(*trained)) >= 2
    assert max(map(len, trained)) == size
    assert {*itertools.chain(*evaluated)} == {1}
    assert_same_result(packed, unpacked)


def test_packing_is_off_where_rows_see_each_other(monkeypatch, unpacked, gpt2_dir, tmp_path, capsys):
    """By the structure of the model."""
    monkeypatch.setattr(forward, "packing_problem", lambda lm: "its layers read on")
    metrics, _ = run_sft(gpt2_dir, tmp_path / "run", ROWS + LONG, packing=True, **PACKED)
    assert "--packing is off: its layers read on\n" in capsys.readouterr().out
    assert metrics == unpacked[0]


# ---- Data ------------------------------------------------------------------------------------------------------------


def test_the_order_of_rows_changes_with_epoch_and_seed(monkeypatch, gpt2_dir, tmp_path):
    calls = recorded(monkeypatch, logging.Run, "draw_rows")
    for seed in 1, 2:
        run_sft(gpt2_dir, tmp_path / f"{seed}", ROWS, seed=seed, total_steps=2)
    orders = {tuple(order) for _, order in calls}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(7)) for order in orders)


def test_a_stopped_run_continues_bitwise(monkeypatch, gpt2_dir, tmp_path):
    """With packing, frozen layers, samples and a best checkpoint at once."""
    flags = PACKED | {"packing": True, "num_layers_unfrozen": 1, "total_steps": 4, "save_every": 2, "eval_every": 1}
    flags |= {"max_new_tokens": 5, "adam_betas": (0.5, 0.9), "eval_prompts": LONG}
    metrics, whole = run_sft(gpt2_dir, tmp_path / "whole", ROWS + LONG, **flags)
    stop_requested = logging.Run.stop_requested
    calls = []

    def stop(run):
        calls.append(1)
        run.signal = 15 if len(calls) == 2 else None
        return stop_requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        run_sft(gpt2_dir, run_dir, ROWS + LONG, **flags)
    assert stopped.value.code == 143
    assert len(log(run_dir)) == 3
    assert run_sft(gpt2_dir, run_dir, ROWS + LONG, **flags)[0] == metrics
    assert log(run_dir) == log(whole)
    assert len(samples(whole)) == 5 * len(LONG)
    assert samples(run_dir) == samples(whole)
    expected = weights(whole)
    found = weights(run_dir)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# ---- The identity of a run -------------------------------------------------------------------------------------------

NAMED = [  # script, flags that name a.jsonl, b.jsonl or user.py, the file that is changed
    (sft, {"dataset": "user.py:text:end=b"}, "user.py"),
    (sft, {"eval_dataset": "a.jsonl, b.jsonl"}, "a.jsonl"),
    (sft, {"eval_dataset": "a.jsonl, b.jsonl"}, "b.jsonl"),
    (sft, {"eval_dataset": "user.py:rows:n=3,b=4,a.jsonl"}, "user.py"),
    (ppo, {"reward": "judge"}, "judge/model.safetensors"),
    (ppo, {"reward": "./judge:POSITIVE"}, "judge/config.json"),
]


@pytest.mark.parametrize(("script", "flags", "file"), NAMED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_changed_file_is_another_run(monkeypatch, tmp_path, script, flags, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    for name in ("a.jsonl", "b.jsonl", "user.py", "judge/model.safetensors", "judge/config.json"):
        (tmp_path / name).write_text(name)
    args = script.Args(**{"model": "gpt2", "dataset": "a.jsonl"} | flags)
    before = identity.identity("x", args, script.__file__)["hash"]
    assert identity.identity("x", args, script.__file__)["hash"] == before
    (tmp_path / file).write_text("changed")
    assert identity.identity("x", args, script.__file__)["hash"] != before


@pytest.mark.parametrize("name", ["sft.py", "common/seeding.py", "common/new.py"])
def test_a_changed_byte_of_the_code_is_another_run(monkeypatch, tmp_path, name):
    """Of the script and of any module of common/, an added one, too; the error names the file."""
    shutil.copytree(identity.ROOT / "common", tmp_path / "common")
    shutil.copy(sft.__file__, tmp_path)
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    args = sft.Args(model="gpt2", dataset=ROWS)
    before = identity.identity("sft", args, tmp_path / "sft.py")
    with open(tmp_path / name, "ab") as file:
        file.write(b"#")
    after = identity.identity("sft", args, tmp_path / "sft.py")
    file = "the script" if name == "sft.py" else name
    assert identity.differences(before, after) == [f"{file} has changed"]
    assert after["hash"] != before["hash"]


def test_objects_that_differ_are_different_runs():
    def hash_of(**flags):
        return identity.identity("x", sft.Args(model="gpt2", dataset=ROWS, **flags), sft.__file__)["hash"]

    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) == hash_of(eval_dataset={"a": ROWS, "b": LONG})
    assert hash_of(eval_dataset={"a": ROWS, "b": LONG}) != hash_of(eval_dataset={"a": ROWS, "b": LONG[1:]})
    changes = {"eval_prompts": ROWS, "num_layers_unfrozen": 1, "stop": ("c",), "completion_only_loss": False}
    hashes = {hash_of(**{name: value}) for name, value in changes.items()}
    assert len(hashes | {hash_of()}) == 5
    assert hash_of(packing=True) == hash_of(micro_batch_size=3) == hash_of(gradient_checkpointing=True) == hash_of()


# ---- Frozen layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_only_the_top_blocks_and_the_norm_move(family, tiny_dirs, tmp_path, k):
    flags = {"num_layers_unfrozen": k, "weight_decay": 0.1, "lr": 1e-3}
    _, run_dir = run_sft(tiny_dirs[family], tmp_path / "run", ROWS, **flags)
    before = safetensors.torch.load_file(f"{tiny_dirs[family]}/model.safetensors")
    after = safetensors.torch.load_file(run_dir / "hf_model/model.safetensors")
    moved = {name for name, weight in before.items() if not torch.equal(weight.double(), after[name])}
    norms = {"transformer.ln_f.weight", "transformer.ln_f.bias", "model.norm.weight"} & before.keys()
    blocks = {name for name in before if re.search(r"\.1\." if k == 1 else r"\.[01]\.", name)}
    assert norms
    assert len(blocks) > 8 * k
    assert moved == norms | blocks


# ---- Stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("e", "ab")], ids=repr)
def test_a_metric_sees_the_text_before_a_stop(letters, gpt2_dir, tmp_path, stops):
    calls = []

    def metric(samples, prompts, outputs, output_ids):
        assert samples == [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        calls.append((outputs, output_ids))
        return {"length": [len(output) for output in outputs]}

    flags = {"metric": metric, "eval_prompts": [{"prompt": p} for p in "bcdfgh" * 9], "stop": stops, "eval_every": 1}
    _, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS, total_steps=1, max_new_tokens=9, **flags)
    first, last = calls
    assert [row["output"] for row in samples(run_dir)] == first[0] + last[0]
    stopped = 0
    for outputs, output_ids in calls:
        for output, ids in zip(outputs, output_ids, strict=True):
            text = letters.decode(ids, skip_special_tokens=True)
            places = [text.find(stop) for stop in stops if stop in text]
            if places:
                assert output == text[: min(places)]
                assert any(text.endswith(stop) for stop in stops)  # nothing is sampled after it
                stopped += 1
            else:
                assert output == text
                assert len(ids) == 9 or ids[-1] == EOS
    assert 8 < stopped < 100 if stops else stopped == 0
