"""What dpo.py computes: `python -m pytest tests/test_dpo.py`

Losses against golden and hand numbers, log-probabilities against a loop over tokens, pairs against their texts, and
runs of `main` on tiny models against the definition and against each other.
"""

import copy
import json
import math
import os
import re
import signal
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from test_invariants import assert_same_result, log, pad_is_eos, recorded
from test_sft_modes import FORGETFUL, TEMPLATE, add_specials, answer, turn, user
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from algos import dpo
from benchmarks.tasks import randomwalks
from common import forward, sampling
from common.cli import InputError, from_task
from common.forward import has_plain_output
from common.rows import load_rows, pair_texts
from common.tokens import in_lines, pack

A, BOS, EOS, LN2 = 0, 21, 22, math.log(2)
ROWS = [
    {"prompt": "b", "chosen": "cda", "rejected": "efghija"},
    {"prompt": "cde", "chosen": "fg", "rejected": "fgha"},
    {"prompt": "fg", "chosen": "hia", "rejected": "hib"},
    {"prompt": "hijkl", "chosen": "mnopa", "rejected": "a"},
    {"prompt": "m", "chosen": "", "rejected": "na"},
    {"prompt": "nopqrst", "chosen": "ua", "rejected": "bcdea"},
    {"prompt": "", "chosen": "ab", "rejected": "ba"},
]
HELD_OUT = [
    {"prompt": "d", "chosen": "ea", "rejected": "uts"},
    {"prompt": "ab", "chosen": "klmnopq", "rejected": "klm"},
    {"prompt": "rstu", "chosen": "b", "rejected": "ccc"},
]
# Tokens of chosen and rejected, and how many are the prompt's.
PAIRS = [
    ([1, 4, 5, 6, EOS], [1, 7, EOS], 1),
    ([2, 3, 4, 8, 9, 10, EOS], [2, 3, 4, 8, 9, 11, 12, 13, EOS], 3),  # responses begin equally
    ([BOS, 5, 6], [BOS, 5, 6, 7], 1),  # chosen is the beginning of rejected
    ([BOS, 5, 6, 7, 8], [BOS, 5], 1),  # the other way round
    ([14, 15, 16, 17, 18, 19, EOS], [14, 15, 16, 17, 18, 20, EOS], 5),
    ([3, EOS], [3, A, 1, 2, 4, 5, 6, 7, 8, EOS], 1),  # an empty response
    ([9, 9, 9, EOS], [9, 9, 9, EOS], 2),
]


def metric(outputs, **columns):
    return {"vowels": [sum(c in "aeiou" for c in o) for o in outputs], "long": [len(o) for o in outputs]}


def run_dpo(model, run_dir, rows=ROWS, **flags):
    """Three steps of 7 pairs in float64, unless flags say otherwise."""
    settings = {"eval_every": 0, "total_steps": 3, "batch_size": 7, "micro_batch_size": 7, "lr": 1e-2, "threads": 1}
    settings |= {"dtype": "float64", "save_every": 0, "warmup_steps": 0, "max_new_tokens": 5}
    return dpo.main(dpo.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def args(**flags):
    return dpo.Args(model="model", dataset=ROWS, **flags)


def encode(rows, tokenizer, max_length=99, max_prompt_length=None, truncation_mode="keep_end"):
    limits = SimpleNamespace(max_prompt_length=max_prompt_length, truncation_mode=truncation_mode)
    return dpo.encode_pairs(rows, tokenizer, max_length, limits, "--dataset")


def shown(pair, tokenizer):
    """A pair as prompt|chosen|rejected; ^ is <bos>, . is <eos>."""
    chosen, rejected, prompt = pair
    assert chosen[:prompt] == rejected[:prompt]
    parts = chosen[:prompt], chosen[prompt:], rejected[prompt:]
    text = "|".join("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in parts)
    return text.replace("<bos>", "^").replace("<eos>", ".")


def texts_of(rows, tokenizer, *limits):
    return [shown(pair, tokenizer) for pair in encode(rows, tokenizer, *limits)[0]]


def slow_logprobs(model, pairs):
    """(2, B) in float64: one sequence at a time, token by token."""
    rows = []
    for side in 0, 1:
        rows.append([])
        for pair in pairs:
            ids, prompt = pair[side], pair[2]
            logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
            rows[-1].append(sum((logprobs[t - 1, ids[t]] for t in range(prompt, len(ids))), torch.zeros(()).double()))
    return torch.stack([torch.stack(row) for row in rows])


def slow_terms(policy, ref, beta):
    """{name: mean over the pairs} of what is logged for the sigmoid loss."""
    (pc, pr), (rc, rr) = policy.tolist(), ref.tolist()
    pairs = list(zip(pc, pr, rc, rr, strict=True))
    chosen, rejected = [beta * (a - c) for a, _, c, _ in pairs], [beta * (b - d) for _, b, _, d in pairs]
    margins = [x - y for x, y in zip(chosen, rejected, strict=True)]
    terms = {"loss": [math.log1p(math.exp(-m)) for m in margins], "rewards/chosen": chosen}
    terms |= {"rewards/rejected": rejected, "rewards/margins": margins, "rewards/accuracies": [m > 0 for m in margins]}
    terms |= {"logps/chosen": pc, "logps/rejected": pr}
    return {name: sum(values) / len(values) for name, values in terms.items()}


def assert_logged(record, prefix, expected, tolerance=1e-9):
    for name, value in expected.items():
        found = record["train/loss" if (prefix, name) == ("", "loss") else prefix + name]
        assert found == pytest.approx(value, rel=tolerance, abs=tolerance), name


def load(directory, dtype=torch.float64):
    """The model by plain transformers, which found every key and no other."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def chatty(letters):
    letters.chat_template = TEMPLATE
    return letters


@pytest.fixture
def bf16():
    """Flags of autocast; accelerate keeps the precision of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield {"mixed_precision": "bf16"}
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- The loss --------------------------------------------------------------------------------------------------------

GOLDEN = [  # c = 1, r = -0.5, beta 0.1, lengths 5 and 4: loss, label smoothing, value
    ("sigmoid", 0.0, 0.620957),
    ("sigmoid", 0.1, 0.635957),
    ("robust", 0.1, 0.602207),
    ("robust", 0.0, 0.620957),
    ("hinge", 0.0, 0.85),
    ("ipo_sum", 0.0, 12.25),
    ("ipo", 0.0, 21.855625),
    ("sigmoid_norm", 0.0, 0.677029),
    ("exo_pair", 1e-3, 2.505517),
    ("nca_pair", 0.0, 1.350825),
    ("bco_pair", 0.0, 1.312856),
    ("sppo_hard", 0.0, 36.25),
    ("apo_zero", 0.0, 0.962523),
    ("apo_down", 0.0, 0.987549),
    ("discopop", 0.0, 0.849338),
]
LOSSES = get_args(dpo.Args.__dataclass_fields__["loss_type"].type)


def loss_of(c, r, loss_type, beta=0.1, smoothing=0.0, lengths=(5, 4), dtype=torch.float64):
    """Loss of log-ratios, whose parts are numbers of their own."""
    c, r = (torch.as_tensor(x, dtype=dtype).view(-1) for x in (c, r))
    ref_c, ref_r = torch.full_like(c, -4.0), torch.full_like(r, -6.75)
    lengths = torch.tensor(lengths)[:, None].expand(2, len(c))
    return dpo.dpo_loss(c + ref_c, r + ref_r, ref_c, ref_r, beta, loss_type, smoothing, lengths)


@pytest.mark.parametrize(("loss_type", "smoothing", "value"), GOLDEN, ids=str)
def test_golden_numbers(loss_type, smoothing, value):
    assert loss_of(1, -0.5, loss_type, 0.1, smoothing).item() == pytest.approx(value, rel=1e-6)


def test_all_losses_have_golden_numbers_and_are_flags():
    assert set(LOSSES) == {name for name, *_ in GOLDEN}
    with pytest.raises(ValueError, match="there is no loss ip"):
        loss_of(1, -0.5, "ip")


def test_a_wrong_shape_is_no_broadcast():
    column, row = torch.zeros(3, 1), torch.zeros(3)
    for place in range(4):
        inputs = [column if i == place else row for i in range(4)]
        with pytest.raises(ValueError, match="shapes differ"):
            dpo.dpo_loss(*inputs, 0.1)


def test_smoothing_is_never_ignored():
    for name in LOSSES:
        if name not in ("sigmoid", "robust", "exo_pair"):
            with pytest.raises(ValueError, match=f"label smoothing 0.1 with the loss {name}"):
                loss_of(1, -0.5, name, 0.1, 0.1)
    with pytest.raises(ValueError, match="label smoothing 0.0 with the loss exo_pair"):
        loss_of(1, -0.5, "exo_pair")


def slow_loss(c, r, b, e, lengths, loss_type):
    """The definitions in plain numbers; sigmoid and its logarithm as they are written in papers."""

    def s(x):
        return 1 / (1 + math.exp(-x))

    if loss_type in ("ipo", "sigmoid_norm"):
        c, r = c / lengths[0], r / lengths[1]
    p, q, m = s(b * (c - r)), s(b * (r - c)), s(b * (c - r) / 0.05)
    return {
        "sigmoid": -(1 - e) * math.log(p) - e * math.log(q),
        "robust": (-(1 - e) * math.log(p) + e * math.log(q)) / (1 - 2 * e),
        "hinge": max(0, 1 - b * (c - r)),
        "ipo": (c - r - 1 / (2 * b)) ** 2,
        "ipo_sum": (c - r - 1 / (2 * b)) ** 2,
        "sigmoid_norm": -math.log(p),
        "exo_pair": p * math.log(p / (1 - e)) + q * math.log(q / (e or 1)),
        "nca_pair": -math.log(s(b * c)) - 0.5 * math.log(s(-b * c)) - 0.5 * math.log(s(-b * r)),
        "bco_pair": -math.log(s(b * c)) - math.log(s(-b * r)),
        "sppo_hard": (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2,
        "apo_zero": 1 - s(b * c) + s(b * r),
        "apo_down": s(b * c) + 1 - p,
        "discopop": (1 - m) * -math.log(p) + m * math.exp(-b * (c - r)),
    }[loss_type]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses_are_their_definitions_pair_by_pair(loss_type):
    """Unreduced, for log-ratios of either sign."""
    c, r = [0.7, -2.3, 3.1, 0.0, -0.4], [-1.1, 1.9, 2.9, 0.0, -5.3]
    smoothing = 0.2 if loss_type in ("sigmoid", "robust", "exo_pair") else 0.0
    found = loss_of(c, r, loss_type, 0.3, smoothing, (3, 7))
    expected = [slow_loss(x, y, 0.3, smoothing, (3, 7), loss_type) for x, y in zip(c, r, strict=True)]
    assert found.shape == (5,) and found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.7, 0.3)])
def test_a_policy_that_is_its_reference_has_loss_ln_2(beta, smoothing):
    for name in ("sigmoid", "robust") if smoothing else ("sigmoid", "robust", "sigmoid_norm"):
        assert loss_of(0.0, 0.0, name, beta, smoothing).item() == pytest.approx(LN2, rel=1e-15)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_raises_chosen_and_lowers_rejected(loss_type):
    """At the start. apo_down holds chosen; discopop is not monotonous there, but at a clear margin."""
    start = 1.0 if loss_type == "discopop" else 0.0
    c, r = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (10 * start, -10 * start))
    loss_of(c, r, loss_type, 0.1, 1e-3 if loss_type == "exo_pair" else 0.0).backward()
    assert r.grad > 0 and (abs(c.grad) < 1e-15 if loss_type == "apo_down" else c.grad < 0)
    if loss_type not in ("ipo", "sigmoid_norm", "apo_down"):
        assert c.grad.item() == pytest.approx(-r.grad.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_huge_log_ratios_are_finite(loss_type, dtype):
    values = list(product([-1e4, 0.0, 1e4], repeat=2))
    c, r = (torch.tensor(column, dtype=dtype, requires_grad=True) for column in zip(*values, strict=True))
    losses = loss_of(c, r, loss_type, 0.1, 1e-3 if loss_type == "exo_pair" else 0.0, dtype=dtype)
    losses.sum().backward()
    assert losses.isfinite().all() and c.grad.isfinite().all() and r.grad.isfinite().all()


BAD_FLAGS = [  # flags, what the sentence says
    ({"loss_type": name, "label_smoothing": 0.1}, f"--label-smoothing 0.1 does not go with --loss-type {name}$")
    for name in LOSSES
    if name not in ("sigmoid", "robust", "exo_pair")
]
BAD_FLAGS += [
    ({"loss_type": "exo_pair"}, r"--loss-type exo_pair needs a --label-smoothing above 0 \(1e-3\)"),
    ({"loss_type": "robust", "label_smoothing": 0.5}, "--label-smoothing 0.5 must be below 0.5"),
    ({"label_smoothing": -0.1}, "--label-smoothing -0.1 must be in"),
    ({"label_smoothing": math.nan}, "--label-smoothing nan must be in"),
    ({"beta": 0.0}, "--beta 0.0 must be a positive number"),
    ({"beta": -0.1}, "--beta -0.1 must be"),
    ({"beta": math.inf}, "--beta inf must be"),
    ({"sft_coef": -1.0}, "--sft-coef -1.0 must be 0 or a positive number"),
    ({"sft_coef": math.nan}, "--sft-coef nan must be"),
    ({"reference_free": True, "ref_model": "x"}, "--reference-free does not go with --ref-model"),
    ({"num_layers_unfrozen": 0}, "--num-layers-unfrozen 0 leaves nothing to train"),
    ({"max_prompt_length": 0}, "--max-prompt-length 0 must be at least 1"),
    ({"max_length": 0}, "--max-length 0 must be at least 1"),
    ({"batch_size": 0}, "--batch-size 0 must be at least 1"),
    ({"epochs": 0.0}, "--epochs 0.0 must be a positive number"),
    ({"stop": ("a", "")}, "--stop .* must be a text that is not empty"),
    ({"lora_alpha": 2.0}, "--lora-alpha and --lora-targets need --lora-r"),
    ({"loss_type": "ipo", "label_smoothing": 0.1, "lr": 0.0}, "2 problems:"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD_FLAGS, ids=str)
def test_flags_that_do_not_fit(flags, sentence):
    with pytest.raises(InputError, match=sentence):
        args(**flags)


BEFORE = {  # the defaults of before, which were those of the embedded task, where they differ from the new ones
    "model": "benchmarks/tasks/randomwalks.py:base_model",
    "dataset": "benchmarks/tasks/randomwalks.py:pairs:split=train",
    "eval_dataset": "benchmarks/tasks/randomwalks.py:eval_pairs",
    "eval_prompts": "benchmarks/tasks/randomwalks.py:eval_prompts",
    "metric": "benchmarks/tasks/randomwalks.py:metric",
    "epochs": 6.0, "batch_size": 48, "micro_batch_size": 64, "decode_batch_size": 1024, "max_new_tokens": 9,
    "beta": 0.3, "loss_type": "ipo", "sft_coef": 0.02, "lr": 1e-3, "warmup_steps": 40,
    "adam_betas": (0.9, 0.95), "attn_implementation": "eager",
}  # fmt: skip


def test_the_embedded_task_has_its_settings_and_other_models_have_not():
    embedded, own = vars(from_task(dpo.Args, dpo.TASK)), vars(args())
    assert {name: embedded[name] for name in BEFORE} == BEFORE
    assert all(embedded[name] == own[name] for name in own.keys() - BEFORE.keys())
    expected = {"lr": 1e-6, "beta": 0.1, "loss_type": "sigmoid", "sft_coef": 0.0, "epochs": 1.0, "batch_size": 64}
    expected |= {"max_new_tokens": 64, "micro_batch_size": 8, "metric": None, "eval_prompts": None}
    assert {name: own[name] for name in expected} == expected
    with pytest.raises(InputError, match="^--dataset is missing"):
        dpo.Args(model="model")


def test_no_flag_is_rewritten():
    given = {"epochs": 2.5, "total_steps": 3, "beta": 0.7, "sft_coef": 0.0, "metric": None, "eval_dataset": None}
    assert vars(args(**given)) == vars(args()) | given


def test_flags_that_do_fit():
    for name, smoothing in (("sigmoid", 0.1), ("robust", 0.49), ("exo_pair", 1e-3), ("ipo", 0.0)):
        assert args(loss_type=name, label_smoothing=smoothing).loss_type == name
    assert args(sft_coef=1.5, reference_free=True, num_layers_unfrozen=2).epochs == 1.0


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "whole"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    [(torch.float64, "sdpa", 1e-11), (torch.float32, "sdpa", 3e-5), (torch.float32, "eager", 3e-5)],
    ids=["f64-sdpa", "f32-sdpa", "f32-eager"],
)
def test_logprobs_are_sums_over_the_response(
    monkeypatch, build_model, family, packing, chunks, dtype, attention, tolerance
):
    """All pairs together, three at a time, and alone; logits of two tokens at a time, and all of them."""
    model = build_model(family, dtype)
    model.set_attn_implementation(attention)
    if chunks:
        model.plain_output = has_plain_output(model)
        monkeypatch.setattr(forward, "CHUNK", 2 * 25)
    with torch.no_grad():
        expected = slow_logprobs(model, PAIRS)
        for size in 7, 3, 1:
            for start in range(0, 7, size):
                found = dpo.pair_logprobs(model, packing, PAIRS[start : start + size])
                assert found.dtype == dtype and found.shape == (2, len(PAIRS[start : start + size]))
                assert (found - expected[:, start : start + size]).abs().max() < tolerance
    assert expected.unique().numel() == 13  # of 14: one pair has equal sides


@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "whole"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_gradients_are_those_of_the_definition(monkeypatch, build_model, family, packing, chunks):
    model, factors = build_model(family, torch.float64), torch.linspace(-1.3, 2.1, 14).view(2, 7).double()
    tolerance = 1e-10 if family == "gpt2" else 1e-6  # the norms of the others round gradients to float32, after sums
    if chunks:
        model.plain_output = has_plain_output(model)
        monkeypatch.setattr(forward, "CHUNK", 3 * 25)
    gradients = []
    for logprobs in slow_logprobs, lambda model, pairs: dpo.pair_logprobs(model, packing, pairs):
        model.zero_grad()
        (factors * logprobs(model, PAIRS)).sum().backward()
        gradients.append([w.grad for w in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert (expected - found).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_what_fills_a_batch_changes_nothing(monkeypatch, build_model, family, packing):
    model, results, layouts = build_model(family), [], []
    lay_out = forward.collate
    for fill in 0, EOS, 17:

        def filled(lines, pad, fill=fill):
            layouts.append(lay_out(lines, fill)[0])
            return lay_out(lines, fill)

        monkeypatch.setattr(forward, "collate", filled)
        with torch.no_grad():
            results.append(dpo.pair_logprobs(model, packing, PAIRS))
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(layouts) == 3 and not torch.equal(layouts[0], layouts[1]), "there was padding"


def test_neighbours_in_a_line_change_nothing(build_model, family):
    """The first pair beside others of the same lengths, in lines that hold several texts."""
    model, results = build_model(family, torch.float64), []
    lengths = [len(pair[side]) for side in (0, 1) for pair in PAIRS]
    assert max(map(len, pack(lengths, max(lengths)))) > 1
    for shift in 0, 1, 5:
        others = [([(x + shift) % 21 for x in c], [(x + shift) % 21 for x in r], n) for c, r, n in PAIRS[1:]]
        with torch.no_grad():
            results.append(dpo.pair_logprobs(model, True, [PAIRS[0], *others]))
    for result in results[1:]:
        assert (result - results[0])[:, 0].abs().max() < 1e-12 < 1e-3 < (result - results[0])[:, 1:].abs().max()


LENGTHS = [[7], [3, 5], [5, 3, 11, 7], [128, 90, 60, 50, 40, 31, 30, 3], [16] * 5, [10] * 15 + [9], list(range(1, 40))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lines_of_texts(lengths):
    """Every text is there once; together the lines have no more positions than with one text each."""
    lines, places = in_lines(True, range(len(lengths)), lengths)
    assert torch.tensor([i for line in lines for i in line])[places].tolist() == list(range(len(lengths)))
    widths = [sum(lengths[i] for i in line) for line in lines]
    assert sorted(i for line in lines for i in line) == list(range(len(lengths)))
    assert len(lines) * max(widths) <= len(lengths) * max(lengths) and max(widths) == max(lengths)
    assert in_lines(False, range(len(lengths)), lengths)[0] == [[i] for i in range(len(lengths))]
    if len(lengths) == 8:
        assert len(lines) * max(widths) <= 1.2 * sum(lengths)


def test_long_bfloat16_responses_are_summed_in_float32(build_model):
    """Beside the sum in float64 of the same logits."""
    model = build_model("gpt2", torch.bfloat16, n_positions=1100)
    ids = [[(7 * i + i * i // 3 + side) % 21 for i in range(1001)] for side in (0, 1)]
    pair = (ids[0], [ids[0][0], *ids[1][1:]], 1)
    with torch.no_grad():
        expected, found = slow_logprobs(model, [pair]), dpo.pair_logprobs(model, False, [pair])
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 1e-2 < expected.abs().min()


# ---- Packing ---------------------------------------------------------------------------------------------------------


SIZES = {"vocab_size": 25, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.3}
SIZES |= {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 23}
WINDOW = {"head_dim": 6, "sliding_window": 4}
KINDS = {  # tokens that see only the last ones; a convolution over what stands side by side
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, tie_word_embeddings=False),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
}


def build_kind(kind, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(KINDS[kind]), dtype=dtype).eval()


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_windows_are_kept_in_lines(kind):
    model = build_kind(kind)
    with torch.no_grad():
        found, expected = dpo.pair_logprobs(model, True, PAIRS), slow_logprobs(model, PAIRS)
    assert (found - expected).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_off_where_layers_mix_rows(letters, tmp_path, capsys, kind):
    """The run says so once, and gives the plain result."""
    flags = {"tokenizer": letters, "eval_dataset": HELD_OUT, "eval_every": 1, "batch_size": 5, "micro_batch_size": 3}
    plain = run_dpo(build_kind(kind), tmp_path / "plain", packing=False, **flags)
    assert "--packing" not in capsys.readouterr().out
    found = run_dpo(build_kind(kind), tmp_path / "run", **flags)
    said = re.findall(r"--packing is off: its layers read on from one row into the next\n", capsys.readouterr().out)
    assert len(said) == (kind == "lfm2")
    for one, other in zip(log(found[1]), log(plain[1]), strict=True):
        if one["step"] == 1:  # margins are zero to rounding, of either sign
            one.pop("rewards/accuracies", None), other.pop("rewards/accuracies", None)
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)  # norms that round to float32


def test_the_loss_needs_little_memory(build_model):
    """Gradients of 1400 labels over 30011 tokens: all logits would be 170 MB, of which a loss holds several copies."""
    model = build_model("gpt2", vocab_size=30_011, n_positions=64)
    model.plain_output = has_plain_output(model)
    text = [(5 * i) % 29_989 for i in range(61)]
    pairs = [(text, [text[0], *[(x + place) % 29_989 for x in text[1:]]], 1) for place in range(1, 13)]
    largest = []
    with TensorSizes(largest):
        dpo.pair_logprobs(model, True, pairs).sum().backward()
    assert len(pairs) * 120 > 1400 and max(largest) <= forward.CHUNK


class TensorSizes(TorchDispatchMode):
    """Notes the number of elements of every tensor that is computed."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
        return result


# ---- Pairs of texts --------------------------------------------------------------------------------------------------

SPECIALS = ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"]  # what a tokenizer adds to every text
TEXTS = [
    ({"prompt": "ab", "chosen": "cd", "rejected": "efg"}, "ab|cd.|efg."),
    ({"prompt": "ab", "chosen": "", "rejected": "c"}, "ab|.|c."),
    ({"prompt": "ab", "chosen": "c", "rejected": "cd"}, "ab|c.|cd."),
    ({"prompt": "ab", "chosen": "c<eos>", "rejected": "d<eos>"}, "ab|c.|d."),
    ({"prompt": "a<eos>b", "chosen": "c", "rejected": "d"}, "a.b|c.|d."),
    ({"prompt": "ab<eos>", "chosen": "c", "rejected": "d"}, "ab.|c.|d."),
    ({"prompt": "", "chosen": "c", "rejected": "d"}, "^|c.|d."),
    ({"prompt": "", "chosen": "ab", "rejected": "ac"}, "^|ab.|ac."),  # what the sides share is no prompt
    ({"prompt": "<bos>ab", "chosen": "c", "rejected": "d"}, "^ab|c.|d."),
    ({"prompt": "<bos>", "chosen": "c", "rejected": "d"}, "^|c.|d."),
]


@pytest.mark.parametrize("specials", SPECIALS)
@pytest.mark.parametrize(("row", "expected"), TEXTS, ids=lambda x: x if isinstance(x, str) else "")
def test_tokens_of_a_pair(letters, specials, row, expected):
    """One beginning token at most, and one end token behind each response."""
    tokenizer = add_specials(letters, specials)
    if "bos" in specials and expected[0] != "^":
        expected = "^" + expected
    assert texts_of([row], tokenizer) == [expected]


def test_all_of_a_set_are_the_rows_alone(letters):
    """Rows of several lengths in one call."""
    found, report = encode(ROWS, letters)
    assert found == [encode([row], letters)[0][0] for row in ROWS]
    assert report == (
        "7 pairs, 0 prompts and the responses of 0 cut, 0 dropped without room for a response, 0 dropped as equal"
    )
    assert [shown(pair, letters) for pair in found][:2] == ["b|cda.|efghija.", "cde|fg.|fgha."]


@pytest.mark.parametrize("prompt", ["", "ab"])
def test_a_beginning_token_that_also_ends(letters, prompt):
    """As in GPT-2 (none is added) and OPT (it begins every text)."""
    letters.eos_token = "<bos>"
    row = {"prompt": prompt, "chosen": "c", "rejected": "d"}
    expected = "^ab|c^|d^" if prompt else "^|c^|d^"
    assert texts_of([row], add_specials(letters, "<bos> $A")) == [expected]
    letters = randomwalks.tokenizer()
    letters.eos_token = "<bos>"
    assert texts_of([row], letters) == [expected.removeprefix("^") if prompt else expected]


IMPLICIT = [  # chosen, rejected, what they share in whole words, the rest
    ("ab cd ef", "ab cd gh", "ab cd", " ef", " gh"),
    ("ab cdef", "ab cdgh", "ab", " cdef", " cdgh"),
    ("ab\ncd", "ab\nef", "ab", "\ncd", "\nef"),
    ("ab  cd", "ab  ce", "ab", "  cd", "  ce"),
    (
        "\n\nHuman: ab cd\n\nAssistant: ef gh", "\n\nHuman: ab cd\n\nAssistant: ij",
        "\n\nHuman: ab cd\n\nAssistant:", " ef gh", " ij",
    ),
    ("\n\nHuman: ab\n\nAssistant: ", "\n\nHuman: ab\n\nAssistant: c", "\n\nHuman: ab\n\nAssistant:", " ", " c"),
    (
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d e",
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d f",
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d e", " d f",
    ),
]  # fmt: skip


@pytest.mark.parametrize("sides", IMPLICIT, ids=lambda x: repr(x[0])[:40])
@pytest.mark.case(48, "dpo")
def test_an_implicit_prompt_is_what_both_share(letters, sides):
    chosen, rejected, *expected = sides
    found = pair_texts([{"chosen": chosen, "rejected": rejected}], letters, "--dataset")
    assert found == [tuple(expected)]


def test_an_explicit_prompt_is_taken_as_it_is(letters):
    rows = [{"prompt": "ab c", "chosen": "d e", "rejected": "d f"}]
    assert pair_texts(rows, letters, "") == [("ab c", "d e", "d f")]


@pytest.fixture
def merging():
    """A byte-pair tokenizer of a..f that merges ab, cd and then abcd; bos 9, eos 10."""
    from tokenizers import Tokenizer, models

    tokens = ["a", "b", "c", "d", "e", "f", "ab", "cd", "abcd", "<bos>", "<eos>"]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


MERGES = [  # prompt, chosen, rejected, tokens of the prompt, of chosen, of rejected
    ("ea", "bc", "cc", ["e"], ["ab", "c", "."], ["a", "c", "c", "."]),
    ("ea", "f", "bf", ["e"], ["a", "f", "."], ["ab", "f", "."]),
    ("ea", "bc", "bf", ["e"], ["ab", "c", "."], ["ab", "f", "."]),  # the merge is the same, the boundary stays
    ("eab", "cd", "f", ["e"], ["abcd", "."], ["ab", "f", "."]),
    ("ea", "fb", "cb", ["e", "a"], ["f", "b", "."], ["c", "b", "."]),
    ("a", "bc", "f", ["^"], ["ab", "c", "."], ["a", "f", "."]),
    ("eac", "d", "", ["e", "a"], ["cd", "."], ["c", "."]),
]


@pytest.mark.parametrize("parts", MERGES, ids=lambda x: f"{x[0]}-{x[1]}-{x[2]}")
def test_a_merge_across_the_boundary_belongs_to_the_responses(merging, parts):
    """On both sides, and each side is what the tokenizer makes of the whole text."""
    row = dict(zip(("prompt", "chosen", "rejected"), parts, strict=False))
    ((chosen, rejected, prompt),), _ = encode([row], merging)
    names = [merging.convert_ids_to_tokens(ids) for ids in (chosen[:prompt], chosen[prompt:], rejected[prompt:])]
    assert [[{"<bos>": "^", "<eos>": "."}.get(t, t) for t in part] for part in names] == list(parts[3:])
    assert chosen[:prompt] == rejected[:prompt]
    for name, ids in (("chosen", chosen), ("rejected", rejected)):
        assert [i for i in ids if i < 9] == merging(row["prompt"] + row[name])["input_ids"]


TRUNCATIONS = [  # specials, max_length, max_prompt_length, mode, pair of abcde with fgh and ij, prompts and pairs cut
    ("$A", 99, 3, "keep_end", "cde|fgh.|ij.", 1, 0),
    ("$A", 99, 3, "keep_start", "abc|fgh.|ij.", 1, 0),
    ("$A", 99, 5, "keep_end", "abcde|fgh.|ij.", 0, 0),
    ("$A", 99, 1, "keep_end", "e|fgh.|ij.", 1, 0),
    ("$A", 99, 1, "keep_start", "a|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 3, "keep_end", "^de|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 3, "keep_start", "^ab|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 6, "keep_end", "^abcde|fgh.|ij.", 0, 0),
    ("<bos> $A", 99, 5, "keep_end", "^bcde|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 2, "keep_end", "^e|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 1, "keep_start", "^|fgh.|ij.", 1, 0),
    ("$A", 9, None, "keep_end", "abcde|fgh.|ij.", 0, 0),
    ("$A", 8, None, "keep_end", "abcde|fgh|ij.", 0, 1),
    ("$A", 7, None, "keep_end", "abcde|fg|ij", 0, 1),
    ("$A", 6, None, "keep_start", "abcde|f|i", 0, 1),
    ("$A", 7, 3, "keep_end", "cde|fgh.|ij.", 1, 0),  # a prompt that was cut leaves room
    ("$A", 6, 3, "keep_end", "cde|fgh|ij.", 1, 1),
    ("$A", 6, 4, "keep_start", "abcd|fg|ij", 1, 1),
    ("<bos> $A", 5, 2, "keep_end", "^e|fgh|ij.", 1, 1),
    ("$A", 2, 1, "keep_end", "e|f|i", 1, 1),
    ("<bos> $A <eos>", 9, 4, "keep_end", "^cde|fgh.|ij.", 1, 0),
]


@pytest.mark.parametrize("case", TRUNCATIONS, ids=str)
@pytest.mark.case(37, "dpo")
def test_truncation(letters, case):
    specials, *limits, expected, prompts, cut = case
    row = {"prompt": "abcde", "chosen": "fgh", "rejected": "ij"}
    (pair,), report = encode([row], add_specials(letters, specials), *limits)
    assert shown(pair, letters) == expected
    assert report.startswith(f"1 pairs, {prompts} prompts and the responses of {cut} cut, 0 dropped")


@pytest.mark.parametrize("specials", SPECIALS)
@pytest.mark.parametrize("mode", ["keep_end", "keep_start"])
def test_truncation_cuts_no_more_than_needed(letters, specials, mode):
    """Prompts to their limit, responses to what is left, never to nothing; a beginning token stays."""
    tokenizer = add_specials(letters, specials)
    whole = encode(ROWS, tokenizer)[0]
    for max_length, limit in product(range(2, 14), (None, 1, 2, 3, 5, 8)):
        expected, dropped, same = [], 0, 0
        for chosen, rejected, prompt in whole:
            kept = min(prompt, limit or prompt)
            sides = [len(ids) - prompt for ids in (chosen, rejected)]
            room = [min(side, max_length - kept) for side in sides]
            ends = [ids[prompt : prompt + n] for ids, n in zip((chosen, rejected), room, strict=True)]
            dropped += (crowded := min(room) < 1)
            same += (equal := not crowded and ends[0] == ends[1])
            expected += [] if crowded or equal else [(kept, chosen[:prompt], *ends)]
        if not expected:
            with pytest.raises(
                InputError, match=f"no pair is left: 7 pairs.* {dropped} dropped without room.* {same} "
            ):
                encode(ROWS, tokenizer, max_length, limit, mode)
            continue
        pairs, report = encode(ROWS, tokenizer, max_length, limit, mode)
        assert f"{dropped} dropped without room for a response, {same} dropped as equal" in report
        for (chosen, rejected, prompt), (kept, head, *ends) in zip(pairs, expected, strict=True):
            assert prompt == kept and [chosen[prompt:], rejected[prompt:]] == ends and all(ends)
            assert chosen[:prompt] == rejected[:prompt] and max(len(chosen), len(rejected)) <= max_length
            begins = int(head[0] == BOS)
            assert chosen[:begins] == head[:begins] and chosen[begins:prompt] == (
                head[begins:kept] if mode == "keep_start" else head[len(head) - kept + begins :]
            )
            assert kept == 1 or (chosen[0] == BOS) == (head[0] == BOS)


def test_pairs_that_cannot_be_told_apart_are_dropped_and_counted(letters):
    rows = [
        {"prompt": "ab", "chosen": "cd", "rejected": "ce"},
        {"prompt": "ab", "chosen": "cd", "rejected": "cd"},  # equal
        {"prompt": "ab", "chosen": "cdef", "rejected": "cdeg"},  # equal after the cut
        {"prompt": "abcdef", "chosen": "g", "rejected": "h"},  # no room
        {"prompt": "ab", "chosen": "cdefg", "rejected": "d"},
    ]
    pairs, report = encode(rows, letters, 5)
    assert [shown(pair, letters) for pair in pairs] == ["ab|cd.|ce.", "ab|cde|d."]
    assert report.startswith("5 pairs, 0 prompts and ") and report.endswith(
        "cut, 1 dropped without room for a response, 2 dropped as equal"
    )


BAD_TEXTS = [  # second row, what the sentence says; the first is good
    ({"prompt": "a", "chosen": None, "rejected": "b"}, "row 2: 'chosen' must be valid text, it is None"),
    ({"prompt": "a", "chosen": 5, "rejected": "b"}, "row 2: 'chosen' must be valid text, it is 5"),
    ({"prompt": "a", "chosen": {"text": "b"}, "rejected": "b"}, "row 2: 'chosen' must be valid text, it is {'text'"),
    ({"prompt": "a", "chosen": ["b"], "rejected": "b"}, r"row 2: 'chosen' must be valid text, it is \['b'\]"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "row 2: 'rejected' must be valid text, it is None"),
    ({"prompt": "a", "chosen": "b", "rejected": 0.5}, "row 2: 'rejected' must be valid text, it is 0.5"),
    ({"prompt": None, "chosen": "b", "rejected": "c"}, "row 2: 'prompt' must be valid text, it is None"),
    ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "row 2: 'prompt' must be valid text"),
    ({"prompt": "a", "chosen": "b\ud800", "rejected": "c"}, "row 2: 'chosen' must be valid text, it is 'b.ud800'"),
    ({"prompt": "a", "chosen": "b"}, "row 2 must be a mapping with the columns of row 1: see rejected"),
]


@pytest.mark.parametrize(("row", "sentence"), BAD_TEXTS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.case(45, "dpo")
def test_a_bad_pair_names_its_row(letters, row, sentence):
    with pytest.raises(InputError, match=f"^--dataset {sentence}"):
        encode(load_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}, row], "--dataset"), letters)


BAD_SETS = [  # all rows, what the sentence says
    (
        [{"prompt": "a", "chosen_response": "b", "rejected": "c"}],
        "has the columns prompt, chosen_response, rejected; expected chosen",
    ),
    ([{"prompt": "a", "chosen": "b"}], "has the columns prompt, chosen; expected rejected"),
    ([{"text": "a"}], "has the columns text; expected chosen"),
    ([{"chosen": "a b", "rejected": "a c"}, {"chosen": "b", "rejected": "c"}], "row 2: chosen and rejected begin diff"),
    ([{"chosen": "abc", "rejected": "abd"}], "row 1: chosen and rejected begin differently: add the column prompt"),
    ([{"prompt": "a", "chosen": None, "rejected": "b"}], "row 1: 'chosen' must be valid text, it is None"),
    ([{"prompt": "a", "chosen": "b", "rejected": "b"}], ": no pair is left: 1 pairs.* 1 dropped as equal"),
    ([], ".* holds no rows"),
]


@pytest.mark.parametrize(("rows", "sentence"), BAD_SETS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.case(46, "dpo")
def test_bad_sets(letters, rows, sentence):
    with pytest.raises(InputError, match=f"^--dataset ?{sentence}"):
        encode(load_rows(rows, "--dataset"), letters)


@pytest.mark.case(39, "dpo")
def test_an_empty_prompt_needs_a_beginning_token(letters):
    letters.bos_token = None
    with pytest.raises(
        InputError, match="--dataset row 2: the prompt is empty and the tokenizer has no beginning token"
    ):
        encode([ROWS[0], ROWS[-1]], letters)
    assert texts_of(ROWS[:1], letters) == ["b|cda.|efghija."]


# ---- Pairs of chats --------------------------------------------------------------------------------------------------

U, V, W = user("ab"), answer("cd"), answer("efg")
CHATS = [
    ({"prompt": [U], "chosen": [V], "rejected": [W]}, "^uab.s|cd.|efg."),
    ({"chosen": [U, V], "rejected": [U, W]}, "^uab.s|cd.|efg."),
    ({"prompt": "ab", "chosen": [U, V], "rejected": [U, W]}, "^uab.s|cd.|efg."),  # UltraFeedback
    ({"prompt": None, "chosen": [U, V], "rejected": [U, W]}, "^uab.s|cd.|efg."),
    ({"prompt": [], "chosen": [U, V], "rejected": [U, W]}, "^uab.s|cd.|efg."),
    ({"prompt": [turn("system", "h"), U], "chosen": [V], "rejected": [W]}, "^th.uab.s|cd.|efg."),
    ({"chosen": [U, V, user("h"), V], "rejected": [U, V, user("h"), W]}, "^uab.scd.uh.s|cd.|efg."),
    ({"prompt": [U, V, user("h")], "chosen": [V], "rejected": [W]}, "^uab.scd.uh.s|cd.|efg."),
    ({"chosen": [U, V], "rejected": [U, V, user("h"), W]}, "^uab.s|cd.|cd.uh.sefg."),
    ({"prompt": [U], "chosen": [V, U, V], "rejected": [V, U, W]}, "^uab.s|cd.uab.scd.|cd.uab.sefg."),
    ({"prompt": [U], "chosen": [answer("")], "rejected": [W]}, "^uab.s|.|efg."),
    ({"prompt": [U], "chosen": [V], "rejected": [answer("cdd")]}, "^uab.s|cd.|cdd."),  # the boundary is the turn's
]


@pytest.mark.parametrize("specials", SPECIALS)
@pytest.mark.parametrize(("row", "expected"), CHATS, ids=str)
def test_a_pair_of_chats(chatty, specials, row, expected):
    """The template writes the beginning and end tokens, and the tokenizer adds none."""
    assert texts_of([row], add_specials(chatty, specials)) == [expected]


def test_chats_that_part_at_a_question(chatty):
    """After an answer that both hold. Wherever the boundary is put, nothing is lost."""
    rows = [{"chosen": [U, V, user("h"), V], "rejected": [U, V, user("k"), W]}]
    (parts,) = (text.split("|") for text in texts_of(rows, chatty))
    assert [parts[0] + side for side in parts[1:]] == ["^uab.scd.uh.scd.", "^uab.scd.uk.sefg."]
    assert parts[0] in ("^uab.s", "^uab.scd.")


def test_tools_and_other_columns_of_chats(letters):
    tools = "{{ bos_token }}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    letters.chat_template = TEMPLATE.replace("{{ bos_token }}", tools)
    rows = [{"chosen": [U, V], "rejected": [U, W], "tools": x, "score_chosen": 5} for x in ([{"name": "k"}], None)]
    assert texts_of(rows, letters) == ["^kuab.s|cd.|efg.", "^uab.s|cd.|efg."]


BAD_CHATS = [  # row after a good one, what the sentence says
    ({"chosen": [U, turn("robot", "c")], "rejected": [U, W]}, "a chat is a list of .*'robot'"),
    ({"chosen": [], "rejected": [U, W]}, "a chat is a list of"),
    ({"chosen": [U, V], "rejected": []}, "a chat is a list of"),
    ({"chosen": [U, V], "rejected": None}, "a chat is a list of"),
    ({"chosen": "ab", "rejected": [U, W]}, "a chat is a list of"),
    (
        {"chosen": [U, V], "rejected": [U, W, user("h")]},
        "the last message must be the assistant's",
    ),
    ({"chosen": [U], "rejected": [U, W]}, "the last message must be the assistant's"),
    ({"chosen": [U, answer(None)], "rejected": [U, W]}, "a chat is a list of .*None"),
    ({"chosen": [U, V], "rejected": [{"role": "user"}, W]}, "a chat is a list of"),
    ({"chosen": [U, "c"], "rejected": [U, W]}, "a chat is a list of .*'c'"),
    ({"chosen": [U, V], "rejected": [user("h"), W]}, "chosen and rejected begin differently"),
    (
        {"chosen": [U, turn("tool", "c"), V], "rejected": [U, W]},
        "the chat template cannot write the messages: tool is unknown",
    ),
]


@pytest.mark.parametrize(("row", "sentence"), BAD_CHATS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.case(49, "dpo")
def test_a_bad_pair_of_chats_names_its_row(chatty, row, sentence):
    with pytest.raises(InputError, match=f"--dataset row 2: .*{sentence}|--dataset row 2: {sentence}"):
        encode([{"chosen": [U, V], "rejected": [U, W]}, row], chatty)


BAD_PROMPTS = [
    ({"prompt": [U], "chosen": [V], "rejected": []}, "the last message must be the assistant's"),
    ({"prompt": [U, V], "chosen": [W], "rejected": []}, "the chat template changes earlier turns"),
    ({"prompt": [U], "chosen": "cd", "rejected": [W]}, "a chat is a list of .*found 'cd'"),
    ({"prompt": [U], "chosen": None, "rejected": [W]}, "a chat is a list of .*found None"),
    ({"prompt": [U], "chosen": [user("h")], "rejected": [W]}, "the last message must be the assistant's"),
    ({"prompt": [turn("robot", "a")], "chosen": [V], "rejected": [W]}, "a chat is a list of .*'robot'"),
    ({"prompt": ["ab"], "chosen": [V], "rejected": [W]}, "a chat is a list of .*'ab'"),
]


@pytest.mark.parametrize(("row", "sentence"), BAD_PROMPTS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_pair_with_a_prompt_of_messages_names_its_row(chatty, row, sentence):
    with pytest.raises(InputError, match=f"--dataset row 2: {sentence}"):
        encode([{"prompt": [U], "chosen": [V], "rejected": [W]}, row], chatty)


def test_chats_need_a_template_that_keeps_the_prompt(letters):
    row = {"chosen": [U, V], "rejected": [U, W]}
    with pytest.raises(InputError, match="--dataset row 1: the chat template cannot write .*chat_template is not set"):
        encode([row], letters)
    letters.chat_template = FORGETFUL
    assert texts_of([row], letters) == ["^uab.s|qcd.|qefg."]
    letters.chat_template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ messages | length }}")
    with pytest.raises(InputError, match="--dataset row 1: the chat template changes earlier turns"):
        encode([row], letters)


SAMPLED = [  # rows whose prompt evaluation samples from
    {"prompt": "ab", "chosen": "cd", "rejected": "e"},
    {"prompt": "", "chosen": "cd", "rejected": "e"},
    {"prompt": "<bos>ab", "chosen": "cd", "rejected": "e"},
    {"prompt": [U], "chosen": [V], "rejected": [W]},
    {"prompt": "ab", "chosen": [U, V], "rejected": [U, W]},  # UltraFeedback: a text beside chats
]


@pytest.mark.parametrize("specials", ["$A", "<bos> $A <eos>"])
@pytest.mark.parametrize("row", SAMPLED, ids=["text", "empty", "begun", "chat", "text beside chats"])
def test_evaluations_sample_from_the_prompts_that_were_trained(monkeypatch, chatty, gpt2_dir, tmp_path, row, specials):
    calls = recorded(monkeypatch, sampling, "generate_all")
    scored = recorded(monkeypatch, dpo, "encode_pairs")
    flags = {"tokenizer": add_specials(chatty, specials), "eval_dataset": [row], "metric": metric, "check": True}
    run_dpo(gpt2_dir, tmp_path / "run", [row], **flags)
    ((chosen, _, prompt),) = scored[-1][1][0]
    assert calls and all(arguments[3] == [chosen[:prompt]] for arguments, _ in calls)


# ---- Runs: the start -------------------------------------------------------------------------------------------------

REFERENCES = {"scored": {}, "kept": {"precompute_ref": False}, "named": {"ref_model": True}}
REFERENCES["named and kept"] = {"ref_model": True, "precompute_ref": False}


def reference_flags(kind, directory):
    return REFERENCES[kind] | ({"ref_model": directory} if "named" in kind else {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_at_the_start_the_loss_is_ln_2_and_rewards_are_0(tiny_dir, tmp_path, kind, dtype):
    """Exactly, with dropout in the configuration, in evaluation and, with a kept reference, in training."""
    flags = {"eval_dataset": HELD_OUT + ROWS, "eval_every": 9, "total_steps": 1, "micro_batch_size": 3, "dtype": dtype}
    if dtype == "bfloat16":  # weights of this type are not trained
        flags["lora_r"] = 2
    _, run_dir = run_dpo(tiny_dir, tmp_path / "run", **flags | reference_flags(kind, tiny_dir))
    start, first = log(run_dir)
    assert start["eval/loss"] == pytest.approx(LN2, rel=1e-6 if dtype != "float64" else 1e-15)
    exact = 0 if "kept" in kind else {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    for name in ("chosen", "rejected", "margins"):
        assert start[f"eval/rewards/{name}"] == 0 and abs(first[f"rewards/{name}"]) <= exact
    assert start["eval/rewards/accuracies"] == 0  # a tie is not right


def test_autocast_leaves_the_start_as_it_is(bf16, tiny_dir, tmp_path):
    """The reference is scored under the same autocast as the policy."""
    flags = {"dtype": "float32", "eval_dataset": ROWS, "eval_every": 1, "total_steps": 1}
    for kind in "scored", "kept":
        records = log(run_dpo(tiny_dir, tmp_path / kind, **flags | bf16 | REFERENCES[kind])[1])
        assert records[0]["eval/rewards/chosen"] == records[0]["eval/rewards/margins"] == 0
        assert abs(records[1]["rewards/chosen"]) < (0.05 if kind == "scored" else 1e-30)


def test_without_a_reference_rewards_are_log_probabilities(gpt2_dir, letters, tmp_path):
    flags = {"eval_dataset": HELD_OUT, "eval_every": 1, "total_steps": 2, "reference_free": True, "beta": 0.3}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    records = log(run_dir)
    with torch.no_grad():
        for directory, record in ((gpt2_dir, records[0]), (run_dir / "hf_model", records[-1])):
            policy = slow_logprobs(load(directory), encode(HELD_OUT, letters)[0])
            assert_logged(record, "eval/", slow_terms(policy, torch.zeros_like(policy), 0.3))
    assert records[0]["eval/rewards/chosen"] < -0.3


@pytest.mark.parametrize("precompute", [True, False])
def test_a_reference_of_its_own(build_model, letters, gpt2_dir, tmp_path, precompute):
    """Of another family than the policy."""
    build_model("llama", torch.float64, 5).save_pretrained(tmp_path / "reference")
    letters.save_pretrained(tmp_path / "reference")
    flags = {"ref_model": str(tmp_path / "reference"), "precompute_ref": precompute, "eval_dataset": HELD_OUT}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", total_steps=1, eval_every=1, micro_batch_size=2, **flags)
    policy, reference = load(gpt2_dir), load(tmp_path / "reference")
    start, first = log(run_dir)
    with torch.no_grad():
        for rows, record, prefix in ((HELD_OUT, start, "eval/"), (ROWS, first, "")):
            pairs = encode(rows, letters)[0]
            assert_logged(
                record, prefix, slow_terms(slow_logprobs(policy, pairs), slow_logprobs(reference, pairs), 0.1)
            )
    assert abs(start["eval/rewards/margins"]) > 1e-3


@pytest.mark.parametrize("precompute", [True, False])
def test_one_object_as_policy_and_reference(build_model, letters, gpt2_dir, tmp_path, precompute):
    """The reference stays as it is while the policy moves."""
    model = build_model("gpt2", torch.float64)
    expected = run_dpo(copy.deepcopy(model), tmp_path / "one", tokenizer=letters, precompute_ref=precompute)
    found = run_dpo(model, tmp_path / "two", tokenizer=letters, precompute_ref=precompute, ref_model=model)
    assert_same_result(found, expected)


# ---- Runs: the algorithm ---------------------------------------------------------------------------------------------


def slow_step(model, pairs, reference, beta, coef):
    """Loss, gradient norm and mean token loss of one step on all pairs, by the definition."""
    policy = slow_logprobs(model, pairs)
    (c, r), tokens = policy - reference, sum(len(chosen) - prompt for chosen, _, prompt in pairs)
    nll = -policy[0].sum() / tokens
    loss = -torch.nn.functional.logsigmoid(beta * (c - r)).mean() + coef * nll
    model.zero_grad()
    loss.backward()
    return loss.item(), math.sqrt(sum(w.grad.pow(2).sum().item() for w in model.parameters())), nll.item()


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(("beta", "coef"), [(0.1, 0.0), (0.5, 0.7)])
def test_first_step_is_the_definition(build_model, letters, gpt2_dir, tmp_path, size, beta, coef):
    """Loss, gradient norm and rewards against another reference, whatever the micro-batch: nothing is a mean of
    means."""
    build_model("gpt2", torch.float64, 5).save_pretrained(tmp_path / "reference")
    letters.save_pretrained(tmp_path / "reference")
    flags = {"ref_model": str(tmp_path / "reference"), "sft_coef": coef, "beta": beta, "micro_batch_size": size}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", total_steps=1, **flags)
    (record,), pairs = log(run_dir), encode(ROWS, letters)[0]
    with torch.no_grad():
        reference = slow_logprobs(load(tmp_path / "reference"), pairs)
    model = load(gpt2_dir)
    loss, norm, nll = slow_step(model, pairs, reference, beta, coef)
    assert record["train/loss"] == pytest.approx(loss, rel=1e-10)
    assert record["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert record["train/nll"] == pytest.approx(nll, rel=1e-10)
    expected = slow_terms(slow_logprobs(model, pairs).detach(), reference, beta)
    assert_logged(record, "", {name: value for name, value in expected.items() if name != "loss"})


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_reaches_the_run(build_model, letters, gpt2_dir, tmp_path, loss_type):
    """With beta, label smoothing and the lengths of the responses."""
    build_model("gpt2", torch.float64, 5).save_pretrained(tmp_path / "reference")
    letters.save_pretrained(tmp_path / "reference")
    smoothing = 0.2 if loss_type in ("sigmoid", "robust", "exo_pair") else 0.0
    flags = {"loss_type": loss_type, "label_smoothing": smoothing, "beta": 0.3, "eval_dataset": HELD_OUT}
    flags |= {"ref_model": str(tmp_path / "reference"), "eval_every": 1, "total_steps": 1}
    records, pairs = log(run_dpo(gpt2_dir, tmp_path / "run", **flags)[1]), encode(HELD_OUT, letters)[0]
    with torch.no_grad():
        policy, ref = (slow_logprobs(load(x), pairs) for x in (gpt2_dir, tmp_path / "reference"))
    expected = 0
    for (chosen, rejected, prompt), c, r in zip(pairs, *(policy - ref).tolist(), strict=True):
        lengths = len(chosen) - prompt, len(rejected) - prompt
        expected += slow_loss(c, r, 0.3, smoothing, lengths, loss_type) / len(pairs)
    assert records[0]["eval/loss"] == pytest.approx(expected, rel=1e-9)


@pytest.fixture(scope="module")
def plain(tiny_dirs, tmp_path_factory):
    """A run to compare with."""
    folder = tmp_path_factory.mktemp("dpo")
    return run_dpo(tiny_dirs["gpt2"], folder / "run", eval_dataset=HELD_OUT, eval_every=2, sft_coef=0.3, batch_size=5)


SAME = [
    {"ref_model": True},
    {"ref_model": True, "precompute_ref": False, "micro_batch_size": 1},
    {"micro_batch_size": 3},
    {"packing": False, "micro_batch_size": 2},
    {"gradient_checkpointing": True, "packing": False, "precompute_ref": False},
]


@pytest.mark.parametrize("flags", SAME, ids=str)
def test_what_changes_no_result(plain, gpt2_dir, tmp_path, flags):
    flags = flags | ({"ref_model": gpt2_dir} if "ref_model" in flags else {})
    same = {"eval_dataset": HELD_OUT, "eval_every": 2, "sft_coef": 0.3, "batch_size": 5}
    found = run_dpo(gpt2_dir, tmp_path / "run", **same | flags)
    assert_same_result(found, plain)
    for one, other in zip(log(found[1]), log(plain[1]), strict=True):
        if one["step"] == 1:  # margins of 1e-17 are of either sign
            del one["rewards/accuracies"], other["rewards/accuracies"]
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)
    before = safetensors.torch.load_file(Path(gpt2_dir) / "model.safetensors")
    after = safetensors.torch.load_file(found[1] / "hf_model/model.safetensors")
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before), "it did train"


def test_accumulation_of_the_launcher_changes_nothing(monkeypatch, plain, gpt2_dir, tmp_path):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    same = {"eval_dataset": HELD_OUT, "eval_every": 2, "sft_coef": 0.3, "batch_size": 5, "micro_batch_size": 2}
    assert_same_result(run_dpo(gpt2_dir, tmp_path / "run", **same), plain)


@pytest.mark.parametrize("packing", [True, False])
def test_a_padding_token_that_also_ends(plain, letters, gpt2_dir, tmp_path, packing):
    """Or none at all: neither is looked at."""
    for number, pad in enumerate(["<eos>", None]):
        tokenizer = pad_is_eos(letters)
        tokenizer.pad_token = pad
        same = {"eval_dataset": HELD_OUT, "eval_every": 2, "sft_coef": 0.3, "batch_size": 5, "packing": packing}
        found = run_dpo(gpt2_dir, tmp_path / f"{number}", tokenizer=tokenizer, **same)
        assert_same_result(found, plain)


@pytest.mark.parametrize("precompute", [True, False])
def test_after_training_evaluation_is_against_the_initial_model(letters, tiny_dir, tmp_path, precompute):
    """Also on pairs that were never trained; the export loads in plain transformers with every key."""
    sets = {"near": ROWS, "far": HELD_OUT}
    flags = {"eval_dataset": sets, "eval_every": 4, "total_steps": 4, "precompute_ref": precompute, "lr": 2e-2}
    metrics, run_dir = run_dpo(tiny_dir, tmp_path / "run", **flags)
    record, initial, trained = log(run_dir)[-1], load(tiny_dir), load(run_dir / "hf_model")
    with torch.no_grad():
        for name, rows in sets.items():
            pairs = encode(rows, letters)[0]
            expected = slow_terms(slow_logprobs(trained, pairs), slow_logprobs(initial, pairs), 0.1)
            assert_logged(record, f"eval/{name}/", expected)
            assert metrics[f"eval/{name}/loss"] == record[f"eval/{name}/loss"]
    assert record["eval/near/rewards/margins"] > 0.2 and record["eval/near/loss"] < LN2 - 0.05


def test_training_is_against_the_initial_model_at_every_step(letters, gpt2_dir, tmp_path):
    """Rewards and gradient norm of the third step, recomputed from the weights that the second left."""
    pairs = encode(ROWS, letters)[0]
    with torch.no_grad():
        reference = slow_logprobs(load(gpt2_dir), pairs)
    for precompute in True, False:
        flags = {"precompute_ref": precompute, "lr_schedule": "constant"}
        _, two = run_dpo(gpt2_dir, tmp_path / f"two {precompute}", total_steps=2, **flags)
        _, three = run_dpo(gpt2_dir, tmp_path / f"three {precompute}", total_steps=3, **flags)
        model, record = load(two / "hf_model"), log(three)[2]
        _, norm, _ = slow_step(model, pairs, reference, 0.1, 0.0)
        assert record["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert_logged(record, "", slow_terms(slow_logprobs(model, pairs).detach(), reference, 0.1))


@pytest.mark.parametrize("limit", [0.05, 0.0])
def test_gradients_are_clipped_at_every_step(monkeypatch, gpt2_dir, tmp_path, limit):
    norms, step = [], torch.optim.AdamW.step

    def watched(self, *rest):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norms.append(math.sqrt(sum(weight.grad.pow(2).sum().item() for weight in weights)))
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    records = log(run_dpo(gpt2_dir, tmp_path / "run", max_grad_norm=limit)[1])
    found = [record["optim/grad_norm"] for record in records]
    assert min(found) > 0.1 and norms == pytest.approx([limit] * 3 if limit else found, rel=1e-4)


def test_every_pair_is_seen_once_an_epoch(monkeypatch, gpt2_dir, tmp_path):
    seen, pair_losses = [], dpo.pair_losses

    def watched(policy, pairs, **bound):
        seen.extend(map(str, pairs))
        return pair_losses(policy, pairs, **bound)

    monkeypatch.setattr(dpo, "pair_losses", watched)
    metrics, _ = run_dpo(gpt2_dir, tmp_path / "run", batch_size=2, total_steps=7, micro_batch_size=1)
    assert len(seen) == 14 and len(set(seen)) == 7 and {seen.count(pair) for pair in seen} == {2}
    assert metrics["train/epoch"] == 2.0 and [set(seen[:7]), set(seen[7:])] != [seen[:7], seen[7:]]


def test_a_long_run_prefers_what_was_chosen(gpt2_dir, tmp_path):
    """And chosen falls less with --sft-coef."""
    flags = {"eval_dataset": ROWS, "eval_every": 20, "total_steps": 20, "dtype": "float32"}
    found = [run_dpo(gpt2_dir, tmp_path / f"{coef}", sft_coef=coef, **flags)[0] for coef in (0.0, 1.0)]
    for metrics in found:
        assert metrics["eval/rewards/accuracies"] == 1 and metrics["eval/loss"] < 0.5
        assert metrics["eval/rewards/margins"] > 0.3
    assert found[1]["eval/logps/chosen"] > found[0]["eval/logps/chosen"] + 1


def test_frozen_layers_stay_bitwise(tiny_dir, tmp_path):
    for precompute in True, False:
        run_dir = run_dpo(
            tiny_dir, tmp_path / f"{precompute}", num_layers_unfrozen=1, precompute_ref=precompute, dtype="float32"
        )[1]
        before, after = load(tiny_dir).state_dict(), load(run_dir / "hf_model").state_dict()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {n for n in before if re.search(r"\.(h|layers)\.1\.|\.ln_f\.|model\.norm\.", n)} and moved


@pytest.mark.case(33, "dpo")
def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch, gpt2_dir, tmp_path):
    calls, pair_losses = [], dpo.pair_losses

    def broken(policy, pairs, **bound):
        calls.append(1)
        return pair_losses(policy * (math.nan if len(calls) == 3 else 1), pairs, **bound)

    monkeypatch.setattr(dpo, "pair_losses", broken)
    with pytest.raises(FloatingPointError, match=r"step 3: loss nan, .* rows \[.*\]; the last checkpoint is intact"):
        run_dpo(gpt2_dir, tmp_path / "run", total_steps=5, save_every=1)
    assert [record["step"] for record in log(tmp_path / "run")] == [1, 2]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


# ---- Runs: the reference is asked at the start -----------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "sizes"), [({}, [3, 2, 7]), ({"precompute_ref": False}, [3, 2])], ids=str)
def test_all_sets_are_scored_once_before_training(monkeypatch, gpt2_dir, tmp_path, flags, sizes):
    """Besides, at each evaluation the policy scores the pairs of the sets. Nothing stays beside the run."""
    scored = []
    score_pairs = dpo.score_pairs

    def counting(accelerator, score, pairs, batch_size):
        scored.append(len(pairs))
        return score_pairs(accelerator, score, pairs, batch_size)

    monkeypatch.setattr(dpo, "score_pairs", counting)
    flags = flags | {"eval_dataset": {"x": HELD_OUT, "y": HELD_OUT[:2]}, "eval_every": 3}
    run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert scored == [*sizes, 3, 2, 3, 2] and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_reference_of_a_second_run_is_the_export_of_the_first(gpt2_dir, tmp_path):
    _, first = run_dpo(gpt2_dir, tmp_path / "one")
    _, second = run_dpo(str(first / "hf_model"), tmp_path / "two", eval_dataset=ROWS, eval_every=3)
    assert log(second)[0]["eval/rewards/margins"] == 0 and abs(log(second)[1]["rewards/margins"]) < 1e-12


@pytest.mark.parametrize("precompute", [True, False])
def test_a_reference_that_is_not_finite_ends_the_run(build_model, letters, gpt2_dir, tmp_path, precompute):
    """Of the pairs for training before the first step, where they are scored then."""
    model = build_model("gpt2", torch.float64)
    model.transformer.wpe.weight.data[10] *= 1e200  # a place that the sixth pair alone has
    flags = {"ref_model": model, "tokenizer": letters, "precompute_ref": precompute}
    flags |= {"packing": False, "micro_batch_size": 1}
    sentence = "the reference's log-probabilities of pair 6 are" if precompute else "step 1: loss nan"
    with pytest.raises(FloatingPointError, match=sentence):
        run_dpo(gpt2_dir, tmp_path / "run", **flags)


# ---- Runs: killed and continued --------------------------------------------------------------------------------------

SAMPLING = {"metric": metric, "eval_prompts": HELD_OUT, "eval_dataset": {"x": HELD_OUT, "y": ROWS}, "eval_every": 2}
CONTINUED = SAMPLING | {"total_steps": 7, "save_every": 2, "batch_size": 3, "micro_batch_size": 2, "dtype": "float32"}
CONTINUED |= {"lr": 3e-2, "sft_coef": 0.2, "weight_decay": 0.1, "warmup_steps": 2, "keep_checkpoints": 9}


def results(run_dir):
    """What must be bitwise equal."""
    names = [
        "metrics.jsonl",
        "samples.jsonl",
        *(str(p.relative_to(run_dir)) for p in run_dir.glob("hf_*/*.safetensors")),
    ]
    return {name: (run_dir / name).read_bytes() for name in names}


@pytest.mark.parametrize("stop", ["SIGTERM", "crash"])
@pytest.mark.parametrize("kind", ["scored", "kept"])
def test_a_continued_run_is_an_uninterrupted_one(monkeypatch, gpt2_dir, tmp_path, capsys, kind, stop):
    """Stopped in the fifth step, by a signal (it finishes the step) or by an error (it repeats it)."""
    flags, step = CONTINUED | REFERENCES[kind], torch.optim.AdamW.step
    whole = run_dpo(gpt2_dir, tmp_path / "a/whole", **flags)
    calls = []

    def stopping(self, *rest):
        calls.append(1)
        if len(calls) == 5 and stop == "crash":
            raise ConnectionError("gone")
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stopping)
        with pytest.raises(SystemExit if stop == "SIGTERM" else ConnectionError):
            run_dpo(gpt2_dir, tmp_path / "b/run", **flags)
    found = run_dpo(gpt2_dir, tmp_path / "b/run", **flags)
    assert f"from step {5 if stop == 'SIGTERM' else 4}" in capsys.readouterr().out
    one, other = results(whole[1]), results(found[1])
    assert sorted(one) == sorted(other) and [name for name in one if one[name] != other[name]] == []
    assert found[0] == whole[0] and {"hf_model/model.safetensors", "hf_model_best/model.safetensors"} < one.keys()
    again = run_dpo(gpt2_dir, tmp_path / "b/run", **flags)  # it is finished
    assert again == found and "is finished" in capsys.readouterr().out


# ---- Runs: what they write -------------------------------------------------------------------------------------------


def test_samples_stand_beside_those_of_the_reference(gpt2_dir, tmp_path):
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", total_steps=4, lr=5e-2, **SAMPLING)
    samples = log_of(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 3 + [2] * 3 + [4] * 3
    assert all(list(sample) == ["step", "prompt", "output", "vowels", "long", "reference"] for sample in samples)
    assert [sample["prompt"] for sample in samples[:3]] == [row["prompt"] for row in HELD_OUT]
    assert all(sample["output"] == sample["reference"] for sample in samples[:3])
    assert [s["reference"] for s in samples[:3]] == [s["reference"] for s in samples[6:]]
    assert any(sample["output"] != sample["reference"] for sample in samples[6:])
    for record in log(run_dir)[::2]:
        found = [sample["long"] for sample in samples if sample["step"] == record["step"]]
        assert record["eval/long"] == sum(found) / 3
    _, other = run_dpo(gpt2_dir, tmp_path / "free", total_steps=1, reference_free=True, **SAMPLING)
    assert [s["reference"] for s in log_of(other / "samples.jsonl")[:3]] == [s["reference"] for s in samples[:3]]


def test_what_the_reference_answers_reaches_the_metric(gpt2_dir, tmp_path):
    """As a column of its own: for rates of wins. The metric is asked about the policy alone, and rows stay as given."""
    calls, rows = [], copy.deepcopy(HELD_OUT)

    def beats(outputs, ref_output, **columns):
        calls.append((outputs, ref_output))
        return {"longer": [len(o) > len(r) for o, r in zip(outputs, ref_output, strict=True)]}

    flags = SAMPLING | {"metric": beats, "eval_prompts": rows, "lr": 5e-2}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", total_steps=4, **flags)
    assert len(calls) == 3 and calls[0][0] == calls[0][1] == calls[2][1] != calls[2][0] and rows == HELD_OUT
    samples = log_of(run_dir / "samples.jsonl")
    assert [(s["output"], s["reference"]) for s in samples[:3]] == [*zip(*calls[0], strict=True)]


def log_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_to_sample_default_to_the_first_set(gpt2_dir, tmp_path):
    flags = {"metric": metric, "eval_dataset": {"x": HELD_OUT, "y": ROWS}, "eval_every": 1, "total_steps": 1}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert [sample["prompt"] for sample in log_of(run_dir / "samples.jsonl")[:3]] == ["d", "ab", "rstu"]
    implicit = [{"chosen": "a b", "rejected": "a c"}]
    for rows in (implicit, None):
        with pytest.raises(InputError, match="--metric needs rows with a prompt to sample from: name --eval-prompts"):
            run_dpo(gpt2_dir, tmp_path / "other", **flags | {"eval_dataset": rows})


def test_samples_without_a_metric(gpt2_dir, tmp_path, capsys):
    """Of --eval-prompts. They choose no best model."""
    flags = {"eval_every": 2, "total_steps": 3, "eval_prompts": [{"prompt": "uts"}]}
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    samples = log_of(run_dir / "samples.jsonl")
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(0, "uts"), (2, "uts"), (3, "uts")]
    assert all(list(sample) == ["step", "prompt", "output", "reference"] for sample in samples)
    assert not (run_dir / "hf_model_best").exists() and "samples at step 3" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [{"eval_dataset": HELD_OUT, "eval_every": 2}, {"eval_prompts": HELD_OUT}], ids=str)
def test_nothing_is_sampled_that_nobody_asked_for(monkeypatch, gpt2_dir, tmp_path, flags):
    calls = recorded(monkeypatch, sampling, "generate_all")
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert not calls and not (run_dir / "samples.jsonl").exists()


X_ACCURACY = "eval/x/rewards/accuracies"
BEST = [  # flags, the metric by which the best is kept, that of the curve
    (SAMPLING, "eval/vowels", X_ACCURACY),
    ({"eval_dataset": {"x": HELD_OUT, "y": ROWS}, "eval_every": 2}, X_ACCURACY, X_ACCURACY),
    ({"eval_dataset": HELD_OUT, "eval_every": 2}, "eval/rewards/accuracies", "eval/rewards/accuracies"),
    ({}, "rewards/accuracies", "rewards/accuracies"),
]


@pytest.mark.parametrize(("flags", "quality", "headline"), BEST, ids=[name for _, name, _ in BEST])
def test_the_best_model_is_that_of_the_metric_or_the_headline(
    letters, gpt2_dir, tmp_path, capsys, flags, quality, headline
):
    flags = flags | {"total_steps": 6, "keep_checkpoints": 1, "lr": 2e-2, "eval_prompts": flags.get("eval_prompts")}
    metrics, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert headline in metrics and f"\n{headline} " in capsys.readouterr().out
    assert (run_dir / "README.md").read_text().count(f"- `{headline}`: ") == 1 and (run_dir / "curve.png").exists()
    if "eval_every" not in flags:
        assert not (run_dir / "hf_model_best").exists()
        return
    records = [record for record in log(run_dir) if quality in record][1:]
    best = max(records, key=lambda record: record[quality])  # the first of equals
    state = json.loads((run_dir / "checkpoints/step_00000006/state.json").read_text())
    assert (state["best_step"], state["best_score"]) == (best["step"], best[quality])
    kept = {path.name for path in (run_dir / "checkpoints").glob("step_*")}
    assert kept == {f"step_{best['step']:08d}", "step_00000006"}
    saved = safetensors.torch.load_file(run_dir / f"checkpoints/step_{best['step']:08d}/model.safetensors")
    exported = safetensors.torch.load_file(run_dir / "hf_model_best/model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in exported.items())
    with torch.no_grad():
        policy = slow_logprobs(load(run_dir / "hf_model_best"), encode(HELD_OUT, letters)[0])
    logged = best.get("eval/x/logps/chosen", best.get("eval/logps/chosen"))
    assert logged == pytest.approx(policy[0].mean().item(), rel=1e-9)


def test_names_of_the_metrics(gpt2_dir, tmp_path):
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", total_steps=1, **SAMPLING)
    kinds = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    kinds += ["logps/chosen", "logps/rejected"]
    evaluated = {f"eval/{name}/{kind}" for name in "xy" for kind in ["loss", *kinds]} | {"eval/vowels", "eval/long"}
    start, last = (set(record) - {"step"} for record in log(run_dir))
    assert start == evaluated
    assert last == evaluated | {"train/loss", "train/nll", "train/epoch", "optim/lr", "optim/grad_norm", *kinds}
    (perf,) = log_of(run_dir / "perf.jsonl")
    assert {"perf/pairs_per_sec", "perf/seconds_update", "perf/peak_memory_mb"} <= perf.keys()


@pytest.mark.parametrize("precompute", [True, False])
def test_check_compares_with_the_model_as_it_was(monkeypatch, gpt2_dir, tmp_path, precompute):
    """In both steps, of which the second one finds a changed model; both have the longest pairs."""
    policies, references = [], []
    pair_losses = dpo.pair_losses

    def watched(policy, pairs, reference, args):
        policies.append(policy.detach())
        references.append(reference(pairs))
        return pair_losses(policy, pairs, reference, args)

    monkeypatch.setattr(dpo, "pair_losses", watched)
    flags = {"batch_size": 2, "micro_batch_size": 2, "lr": 1e-2, "precompute_ref": precompute}
    run_dpo(gpt2_dir, tmp_path / "run", check=True, **flags)
    assert len(policies) == 2 and (policies[1] - policies[0]).abs().min() > 1e-6
    for found in references:
        assert (found - policies[0]).abs().max() < 1e-12


def test_check_writes_nothing(monkeypatch, gpt2_dir, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for number, flags in enumerate([SAMPLING, REFERENCES["kept"], {"ref_model": gpt2_dir}, {"reference_free": True}]):
        assert run_dpo(gpt2_dir, f"run{number}", check=True, **flags) == ({}, None)
        out = capsys.readouterr().out
        first = "[b] | chosen: cda<eos>" if "reference_free" in flags else "[nopqrst] | chosen: ua<eos>"  # the longest
        assert out.rstrip().endswith("check passed") and f"first pair: {first} | rejected: " in out
    assert list(tmp_path.iterdir()) == []


def test_check_finds_a_bad_evaluation_row(gpt2_dir, tmp_path):
    bad = {"x": ROWS, "y": [*HELD_OUT, {"prompt": "a", "chosen": 5, "rejected": "b"}]}
    with pytest.raises(InputError, match="--eval-dataset y row 4: 'chosen' must be valid text, it is 5"):
        run_dpo(gpt2_dir, tmp_path / "run", eval_dataset=bad, eval_every=1, check=True)
    with pytest.raises(InputError, match="--eval-dataset row 1: 'chosen' must be valid text, it is None"):
        run_dpo(gpt2_dir, tmp_path / "run", eval_dataset=[{"prompt": "a", "chosen": None, "rejected": ""}], check=True)
    assert list(tmp_path.iterdir()) == []


SUMMARIES = [
    ({}, "reference: the model at the start, "),
    ({"ref_model": True}, "reference: a model of its own, "),
    ({"reference_free": True}, "reference: none, "),
]


@pytest.mark.parametrize(("flags", "said"), SUMMARIES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_summary_says_what_the_reference_is(gpt2_dir, tmp_path, capsys, flags, said):
    flags = flags | ({"ref_model": gpt2_dir} if "ref_model" in flags else {})
    rows = [*ROWS, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    run_dpo(gpt2_dir, tmp_path / "run", rows, check=True, max_length=6, max_prompt_length=4, **flags)
    out = capsys.readouterr().out
    assert said in out and "data: 8 pairs, 2 prompts and the responses of" in out and "1 dropped as equal" in out


def test_the_summary_has_rate_beta_limits_and_epochs(gpt2_dir, tmp_path, capsys):
    flags = {"lr": 3e-6, "beta": 0.25, "max_length": 12, "total_steps": 5, "batch_size": 2, "lr_schedule": "linear"}
    run_dpo(gpt2_dir, tmp_path / "run", check=True, eval_prompts=HELD_OUT, **flags)
    out = capsys.readouterr().out
    assert "\nlr 3e-06 linear, beta 0.25, reference: the model at the start, at most 12 tokens a side, " in out
    assert ", 5 new tokens, 1.43 epochs\n" in out
    assert "\n5 steps x 2 pairs; each step 2 pairs a process, at most 7 a forward pass; evaluations sample 3 pro" in out


def test_the_positions_of_the_model_are_a_limit(letters, gpt2_dir, tmp_path, capsys):
    rows = [*ROWS, {"prompt": "abc", "chosen": "d" * 40, "rejected": "e" * 7}]
    metrics, _ = run_dpo(gpt2_dir, tmp_path / "run", rows, batch_size=8, total_steps=1)
    assert math.isfinite(metrics["train/loss"]) and "longest 32" in capsys.readouterr().out


BAD_MODELS = ["vocabulary", "no end token", "no such reference", "a reference without a tokenizer"]


@pytest.mark.parametrize("problem", BAD_MODELS)
def test_models_that_do_not_fit(build_model, letters, gpt2_dir, tmp_path, problem):
    flags, other = {"ref_model": str(tmp_path / "other")}, tmp_path / "other"
    if problem == "vocabulary":
        build_model().save_pretrained(other)
        letters.add_tokens(["!"])
        letters.unk_token = "?"
        build_model(vocab_size=27).save_pretrained(other)
        letters.save_pretrained(other)
        sentence = "--ref-model .* has another vocabulary than --model"
    elif problem == "no end token":
        letters.eos_token = None
        flags, sentence = {"tokenizer": letters}, "the tokenizer has no end-of-sequence token"
    elif problem == "no such reference":
        sentence = "--ref-model .*other: there is no such directory"
    else:
        build_model().save_pretrained(other)
        sentence = "--ref-model .*other cannot be loaded: it holds no tokenizer"
    with pytest.raises(InputError, match=sentence):
        run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


# ---- Runs on files of public data sets -------------------------------------------------------------------------------


@pytest.fixture
def chat_dir(build_model, chatty, tmp_path):
    """A tiny model of 96 positions, with a chat template."""
    build_model("gpt2", n_positions=96).save_pretrained(tmp_path / "chat model")
    chatty.save_pretrained(tmp_path / "chat model")
    return str(tmp_path / "chat model")


def test_a_run_on_rows_like_those_of_ultrafeedback(letters, chat_dir, tmp_path, capsys):
    rows = []
    for i, row in enumerate(r for r in ROWS if r["prompt"]):
        chosen, rejected = ([user(row["prompt"]), answer(row[name])] for name in ("chosen", "rejected"))
        rows.append({"prompt": row["prompt"], "prompt_id": f"{i:x}", "chosen": chosen, "rejected": rejected})
        rows[-1] |= {"messages": chosen, "score_chosen": 7.5 + i, "score_rejected": float(i)}
    path = write(tmp_path / "train.jsonl", rows)
    metrics, run_dir = run_dpo(chat_dir, tmp_path / "run", path, eval_dataset=path, eval_every=5, total_steps=5)
    assert "first pair: [<bos>ub<eos>s] | chosen: cda<eos> | rejected: efghija<eos>\n" in capsys.readouterr().out
    assert log(run_dir)[0]["eval/loss"] == pytest.approx(LN2, rel=1e-12) and metrics["eval/loss"] < LN2 - 0.05
    as_chats = [
        {"prompt": [user(r["prompt"])], **{k: [answer(r[k])] for k in ("chosen", "rejected")}} for r in ROWS[:6]
    ]
    explicit = run_dpo(chat_dir, tmp_path / "explicit", as_chats, eval_dataset=as_chats, eval_every=5, total_steps=5)
    assert_same_result((metrics, run_dir), explicit)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(run_dir / "hf_model").chat_template == TEMPLATE


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_run_on_rows_like_those_of_hh(chat_dir, tmp_path, capsys, ending):
    def dialogue(question, reply):
        return f"\n\nHuman: {question}\n\nAssistant: {reply}"

    rows = [{k: dialogue(row["prompt"], f"{row[k]} a") for k in ("chosen", "rejected")} for row in ROWS[:4]]
    rows += [{k: dialogue("b", "c") + dialogue("d", row[k]) for k in ("chosen", "rejected")} for row in ROWS[3:6]]
    path = tmp_path / f"train.{ending}"
    if ending == "jsonl":
        write(path, rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    metrics, run_dir = run_dpo(
        chat_dir, tmp_path / "run", str(path), eval_dataset=str(path), eval_every=5, total_steps=5
    )
    out = capsys.readouterr().out
    assert "data: 7 pairs, 0 prompts and the responses of 0 cut, 0 dropped" in out
    assert re.search(r"\| chosen: <unk>cda<unk>a<eos> \| rejected: <unk>efghija<unk>a<eos>\n", out)
    assert log(run_dir)[0]["eval/loss"] == pytest.approx(LN2, rel=1e-12) and metrics["eval/loss"] < LN2 - 0.05
