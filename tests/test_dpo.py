"""What dpo.py computes: `python -m pytest tests/test_dpo.py`"""

import copy
import itertools
import math
import weakref
from types import SimpleNamespace
from typing import get_args
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from helpers import BOS, EOS, log, recorded, same_run, tensor
from test_models import reload

from algos import dpo
from common.lm import logprobs
from common.lm.structure import has_plain_output

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
    ([3, EOS], [3, 0, 1, 2, 4, 5, 6, 7, 8, EOS], 1),  # an empty response
    ([9, 9, 9, EOS], [9, 9, 9, EOS], 2),
]
PAIRS = [dpo.Pair(*sides) for sides in PAIRS]


def run_dpo(model, run_dir, rows=ROWS, **flags):
    """Three steps of 7 pairs in float64, unless flags say otherwise."""
    settings = {"eval_every": 0, "total_steps": 3, "batch_size": 7, "micro_batch_size": 7, "lr": 1e-2, "threads": 1}
    settings |= {"dtype": "float64", "save_every": 0, "warmup_steps": 0, "max_new_tokens": 5}
    return dpo.main(dpo.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def encode(rows, tokenizer):
    limits = SimpleNamespace(max_prompt_length=None, truncation_mode="keep_end")
    pairs, _ = dpo.encode_pairs(rows, tokenizer, 99, limits, "--dataset")
    return pairs


def slow_logprobs(model, pairs):
    """(2, B) in float64: one sequence at a time, token by token."""
    rows = []
    for side in "chosen", "rejected":
        sums = []
        for pair in pairs:
            ids = getattr(pair, side)
            logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
            sums.append(sum(logprobs[place - 1, ids[place]] for place in range(pair.prompt_length, len(ids))))
        rows.append(torch.stack(sums))
    return torch.stack(rows)


def slow_terms(policy, ref, beta):
    """{name: mean over the pairs} of what is logged for the sigmoid loss."""
    chosen, rejected = (beta * (policy - ref)).tolist()
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    terms = {
        "loss": [math.log1p(math.exp(-margin)) for margin in margins],
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": [margin > 0 for margin in margins],
        "logps/chosen": policy[0].tolist(),
        "logps/rejected": policy[1].tolist(),
    }
    return {name: sum(values) / len(values) for name, values in terms.items()}


LOSSES = get_args(dpo.Args.__dataclass_fields__["loss_type"].type)
SMOOTHED = ("sigmoid", "robust", "exo_pair")


def loss_of(c, r, loss_type, smoothing=0.0):
    """Losses (B,) of log-ratios (B,), of responses of 5 and 4 tokens, with beta 0.1."""
    ref_c = torch.full_like(c, -4.0)
    ref_r = torch.full_like(r, -6.75)
    lengths = torch.tensor([[5], [4]]).expand(2, len(c))
    return dpo.dpo_loss(c + ref_c, r + ref_r, ref_c, ref_r, 0.1, loss_type, smoothing, lengths)


def test_what_the_loss_refuses():
    """A wrong shape is no broadcast, and smoothing is never ignored."""
    for place in range(4):
        inputs = [torch.zeros(3)] * 4
        inputs[place] = torch.zeros(3, 1)
        with pytest.raises(ValueError, match="shapes differ"):
            dpo.dpo_loss(*inputs, 0.1)
    refused = [("ip", 0.0, "there is no loss ip"), ("exo_pair", 0.0, "label smoothing 0.0 with the loss exo_pair")]
    refused += [(name, 0.1, f"label smoothing 0.1 with the loss {name}") for name in set(LOSSES) - set(SMOOTHED)]
    for name, smoothing, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            loss_of(torch.ones(1), torch.ones(1), name, smoothing)


def slow_loss(c, r, b, e, lengths, loss_type):
    """The definitions in plain numbers; sigmoid and its logarithm as they are written in papers."""

    def s(x):
        return 1 / (1 + math.exp(-x))

    if loss_type in ("ipo", "sigmoid_norm"):
        c = c / lengths[0]
        r = r / lengths[1]
    p = s(b * (c - r))
    q = s(b * (r - c))
    m = s(b * (c - r) / 0.05)
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
    """Unreduced, for log-ratios of either sign and 0. Gradients are finite differences; the implicit rewards, beta
    times the log-ratios, have none."""
    reference = tensor([-4.0, -3.5, -9.0, -1.0, -2.25], [-6.75, -4.5, -3.0, -1.0, -8.0])
    ratios = tensor([0.7, -2.3, 3.1, 0.0, -0.4], [-1.1, 1.9, 2.9, 0.0, -5.3])
    policy = (reference + ratios).requires_grad_()
    args = SimpleNamespace(beta=0.3, loss_type=loss_type, label_smoothing=0.2 if loss_type in SMOOTHED else 0.0)

    def losses_and_rewards(policy):
        return dpo.pair_losses(policy, PAIRS[:5], lambda pairs: reference, args)

    found, rewards = losses_and_rewards(policy)
    expected = []
    for pair, c, r in zip(PAIRS[:5], *ratios.tolist(), strict=True):
        lengths = len(pair.chosen) - pair.prompt_length, len(pair.rejected) - pair.prompt_length
        expected.append(slow_loss(c, r, 0.3, args.label_smoothing, lengths, loss_type))
    assert found.shape == (5,)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert not rewards.requires_grad
    assert torch.autograd.gradcheck(losses_and_rewards, policy)
    torch.testing.assert_close(rewards, 0.3 * ratios, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_huge_log_ratios_are_finite(loss_type):
    values = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], repeat=2)))
    c = values[:, 0].requires_grad_()
    r = values[:, 1].detach().requires_grad_()
    losses = loss_of(c, r, loss_type, 1e-3 if loss_type == "exo_pair" else 0.0)
    gradients = torch.autograd.grad(losses.sum(), [c, r])
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("family", "packing", "chunks"),
    [("gpt2", True, True), ("gpt2", False, False), ("llama", True, False), ("qwen3", False, True)],
)
def test_logprobs_are_sums_over_the_response(monkeypatch, build_model, family, packing, chunks):
    """All pairs together, three at a time, and alone; logits of two tokens at a time, and all of them."""
    model = build_model(family, torch.float64)
    if chunks:
        model.plain_output = has_plain_output(model)
        assert model.plain_output
        monkeypatch.setattr(logprobs, "CHUNK", 2 * 25)
    with torch.no_grad():
        expected = slow_logprobs(model, PAIRS)
        for size in 7, 3, 1:
            parts = [PAIRS[start : start + size] for start in range(0, 7, size)]
            found = torch.cat([dpo.pair_logprobs(model, packing, part) for part in parts], 1)
            assert found.dtype == torch.float64 and found.shape == (2, 7)
            assert (found - expected).abs().max() < 1e-11
    assert expected.unique().numel() == 13  # of 14: one pair has equal sides


def test_long_bfloat16_responses_are_summed_in_float32(build_model):
    """Beside the sum in float64 of the same logits."""
    model = build_model("gpt2", torch.bfloat16, n_positions=1100)
    chosen = [(7 * i + i * i // 3) % 21 for i in range(1001)]
    rejected = chosen[:1] + [(x + 1) % 21 for x in chosen[1:]]
    with torch.no_grad():
        expected = slow_logprobs(model, [dpo.Pair(chosen, rejected, 1)])
        found = dpo.pair_logprobs(model, False, [dpo.Pair(chosen, rejected, 1)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-2 < expected.abs().min()


def test_a_reference_whose_layers_mix_rows_is_asked_alone(monkeypatch, gpt2_dir, tiny_dirs, tmp_path, capsys):
    """As for the policy in test_architectures.py."""
    monkeypatch.setattr(dpo, "can_pack", lambda lm, packing, say: lm.config.model_type == "gpt2")
    calls = recorded(monkeypatch, dpo, "pair_logprobs")
    flags = {"ref_model": tiny_dirs["llama"], "eval_dataset": HELD_OUT, "total_steps": 1}
    run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert {(args[0].config.model_type, args[1]) for args, _ in calls} == {("gpt2", True), ("llama", False)}
    assert "--packing" not in capsys.readouterr().out


def slow_step(model, pairs, reference, beta, coef):
    """Loss, gradient norm and mean token loss of one step on all pairs, by the definition."""
    policy = slow_logprobs(model, pairs)
    c, r = policy - reference
    nll = -policy[0].sum() / sum(len(pair.chosen) - pair.prompt_length for pair in pairs)
    loss = -torch.nn.functional.logsigmoid(beta * (c - r)).mean() + coef * nll
    model.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(weight.grad.pow(2).sum().item() for weight in model.parameters()))
    return {"train/loss": loss.item(), "optim/grad_norm": norm, "train/nll": nll.item()}


@pytest.mark.parametrize(
    ("ref", "precompute", "beta"),
    [("", True, 0.1), ("", False, 0.1), ("llama", True, 0.1), ("llama", False, 0.5), ("none", True, 0.3)],
)
def test_every_step_is_the_definition(letters, gpt2_dir, tiny_dirs, tmp_path, ref, precompute, beta):
    """The third step and the evaluation before it, of the pairs' loss alone, from the weights that the second left.
    Micro-batches do not divide the batch: nothing is a mean of means. Without a reference, rewards are
    log-probabilities."""
    coef = 0.0 if precompute else 0.7
    flags = {"precompute_ref": precompute, "beta": beta, "sft_coef": coef, "micro_batch_size": 3}
    flags |= {"lr_schedule": "constant", "eval_dataset": {"x": ROWS, "y": HELD_OUT}}
    flags |= {"ref_model": tiny_dirs.get(ref), "reference_free": ref == "none"}
    _, two = run_dpo(gpt2_dir, tmp_path / "two", total_steps=2, **flags)
    _, three = run_dpo(gpt2_dir, tmp_path / "three", total_steps=3, eval_every=2, **flags)
    _, _, second, third = log(three)
    reference = reload(tiny_dirs.get(ref, gpt2_dir)).double()
    model = reload(two / "hf_model")
    for rows, record, prefix in ((HELD_OUT, second, "eval/y/"), (ROWS, second, "eval/x/"), (ROWS, third, "")):
        pairs = encode(rows, letters)
        with torch.no_grad():
            ref_logprobs = torch.zeros(2, len(pairs)) if ref == "none" else slow_logprobs(reference, pairs)
            expected = slow_terms(slow_logprobs(model, pairs), ref_logprobs, beta)
        if record is third:
            del expected["loss"]
            expected |= slow_step(model, pairs, ref_logprobs, beta, coef)
        for name, value in expected.items():
            assert record[prefix + name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert abs(third["rewards/margins"]) > 0.1


def test_the_learning_rate_of_a_continued_run_goes_on(monkeypatch, gpt2_dir, tmp_path):
    """Stopped by an error in the fourth step, which it repeats."""
    flags = {"total_steps": 5, "save_every": 1, "batch_size": 3, "warmup_steps": 2}
    _, whole = run_dpo(gpt2_dir, tmp_path / "whole", **flags)
    steps = [DEFAULT] * 3 + [ConnectionError] + [DEFAULT] * 2
    monkeypatch.setattr(dpo, "require_finite", Mock(wraps=dpo.require_finite, side_effect=steps))
    with pytest.raises(ConnectionError):
        run_dpo(gpt2_dir, tmp_path / "run", **flags)
    _, run_dir = run_dpo(gpt2_dir, tmp_path / "run", **flags)
    assert dpo.require_finite.call_count == 6, "it was continued"
    assert log(run_dir) == log(whole)


@pytest.mark.parametrize(
    ("precompute", "named", "autocast", "most"),
    [(True, False, False, 1e-12), (False, True, False, 0.0), (True, False, True, 0.05), (False, False, True, 0.0)],
)
def test_at_the_start_the_loss_is_ln_2_and_rewards_are_0(bf16, gpt2_dir, tmp_path, precompute, named, autocast, most):
    """Exactly, with dropout in the configuration, in evaluation and, with a kept reference, in training. The reference
    is scored under the same autocast as the policy."""
    flags = {"eval_dataset": HELD_OUT + ROWS, "eval_every": 9, "total_steps": 1, "micro_batch_size": 3}
    flags |= {"precompute_ref": precompute, "ref_model": gpt2_dir if named else None}
    if autocast:
        flags |= {"dtype": "float32", **bf16}
    start, first = log(run_dpo(gpt2_dir, tmp_path / "run", **flags)[1])
    assert start["eval/loss"] == pytest.approx(math.log(2), rel=1e-7 if autocast else 1e-15)
    for name in ("chosen", "rejected", "margins"):
        assert start[f"eval/rewards/{name}"] == 0
        assert abs(first[f"rewards/{name}"]) <= most
    assert start["eval/rewards/accuracies"] == 0.5  # a tie counts as half
    assert first["rewards/accuracies"] == 0.5 or named


def test_a_kept_reference_is_released(monkeypatch, gpt2_dir, tmp_path):
    """After its pass nothing holds the second model, so its memory is free while the policy trains."""
    made = recorded(monkeypatch, dpo, "make_reference", weakref.ref)
    steps = recorded(monkeypatch, dpo, "require_finite", lambda _: made[-1][1]() is not None)
    for kept in (True, False):
        run_dpo(gpt2_dir, tmp_path / f"run-{kept}", ref_model=gpt2_dir, precompute_ref=kept)
    assert [is_alive for _, is_alive in steps] == [False] * 3 + [True] * 3


def test_one_object_as_policy_and_reference(build_model, letters, tmp_path):
    """The reference stays as it is while the policy moves."""
    model = build_model("gpt2", torch.float64)
    flags = {"tokenizer": letters, "precompute_ref": False}
    run_dpo(copy.deepcopy(model), tmp_path / "one", **flags)
    run_dpo(model, tmp_path / "two", ref_model=model, **flags)
    same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.case(33, "dpo")
def test_a_reference_that_is_not_finite_ends_the_run(build_model, letters, gpt2_dir, tmp_path):
    """Before the first step."""
    model = build_model("gpt2", torch.float64)
    model.transformer.wpe.weight.data[10] *= 1e200  # a place that the sixth pair alone has
    flags = {"ref_model": model, "tokenizer": letters, "packing": False, "micro_batch_size": 1}
    with pytest.raises(FloatingPointError, match="the reference's log-probabilities of pair 6 are"):
        run_dpo(gpt2_dir, tmp_path / "run", **flags)
