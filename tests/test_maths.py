"""The maths of the scripts, and the keyed randomness: `python -m pytest tests/test_maths.py`"""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import NAN, close, random, tensor

from algos import grpo, ppo, sft
from common import seeding
from common.lm import sampling

B, R, V = 5, 7, 11  # distinct primes: a wrong broadcast fails
MASK = torch.arange(R) < torch.tensor([[1], [2], [4], [7], [0]])


def slow_gae(rewards, values, mask, gamma, lam):
    """The sum of GAE Eq. 16, term by term, over the tokens that count."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        kept = mask[row].nonzero()[:, 0].tolist()
        r = rewards[row, kept].tolist()
        v = [*values[row, kept].tolist(), 0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(kept))]
        for i, t in enumerate(kept):
            advantages[row, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
    return advantages


def test_gae_golden():
    advantages, returns = ppo.gae(tensor([0, 0, 1]), tensor([0.5, 0.5, 0.5]), torch.ones(1, 3).bool(), 1.0, 0.95)
    close(advantages, [[0.45125, 0.475, 0.5]])
    close(returns, [[0.95125, 0.975, 1.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.0, 1.0)])
def test_gae_is_the_slow_sum(gamma, lam):
    """Whatever stands after the last token of a row."""
    rewards = random(B, R)
    values = random(B, R, seed=1)
    expected = slow_gae(rewards, values, MASK, gamma, lam)
    advantages, returns = ppo.gae(rewards, values, MASK, gamma, lam)
    close(advantages, expected)
    close(returns, torch.where(MASK, expected + values, 0.0))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten_is_numpys(shift_mean):
    x = torch.where(MASK, random(B, R) * 3 + 2, NAN)
    kept = x[MASK].numpy()
    expected = np.zeros((B, R))
    expected[MASK.numpy()] = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    if not shift_mean:
        expected[MASK.numpy()] += kept.mean()
    close(ppo.masked_whiten(x, MASK, shift_mean=shift_mean), expected)
    assert abs(kept.var() / kept.var(ddof=1) - 1) > 0.05  # else the biased variance would not be told from the other


def test_kl_penalty_golden():
    golden = {"kl": [0.5, -0.5], "abs": [0.5, 0.5], "mse": [0.125, 0.125], "k3": [0.106531, 0.148721]}
    for kind, penalties in golden.items():
        close(ppo.kl_penalty(tensor(-1.0, -1.5), tensor(-1.5, -1.0), kind), penalties, 5e-7)


def test_kl_and_k3_are_unbiased():
    """By enumeration of the policy's own samples. trlX's exp(x) - 1 - x is not."""
    p = tensor(0.7, 0.2, 0.1)
    q = tensor(0.3, 0.3, 0.4)
    true = (p * (p / q).log()).sum()
    for kind in ("kl", "k3"):
        close((p * ppo.kl_penalty(p.log(), q.log(), kind)).sum(), true)


def test_next_kl_coef_golden():
    for kl, golden in {12: 0.201024, 3: 0.198976, -5: 0.198976, 6: 0.2, 6.6: 0.2 * (1 + 0.1 * 0.0256)}.items():
        assert ppo.next_kl_coef(0.2, kl, 6, 10000, 256) == pytest.approx(golden, rel=1e-12)


def test_score_is_placed_once_on_the_last_token():
    scores = tensor(10, 20, 30, 40, 50)
    kl = random(B, R)
    rewards = ppo.token_rewards(scores, kl, MASK, 0.3)
    expected = torch.where(MASK, -0.3 * kl, 0.0)
    for row, last in enumerate([0, 1, 3, 6]):  # the last row has no token, hence no score
        expected[row, last] += scores[row]
    close(rewards, expected)


def test_place_scores_by_hand():
    """Of lists, what a token got that is not trained goes to the trained one before it, or to the first."""
    trained = [[1, 1], [1], [1, 0, 1], [0, 1, 1, 0, 1, 0, 1], [0, 0, 1, 0]]
    trained = [[flag == 1 for flag in row] for row in trained]
    scores = [1.5, [2.0], [4.0, 5.0, 6.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], [1.0, 2.0, 4.0, 8.0]]
    assert ppo.place_scores(scores, trained) == [0.0, 1.5, 2.0, 9.0, 6.0, 3.0, 12.0, 48.0, 64.0, 15.0]
    assert ppo.place_scores([0.0, 0.0, 0.0, 7.0, 0.0], trained) == [0.0] * 8 + [7.0, 0.0]


def test_policy_loss_by_hand():
    ratio = tensor(1.5, 0.5, 1.5, 0.5, 1.1, 1.0)
    advantages = tensor(2, 2, -2, -2, -2, 3)
    new = (ratio.log() - 1.7).requires_grad_()
    loss = ppo.policy_loss(new, torch.full_like(ratio, -1.7), advantages, 0.2)
    close(loss, [-2.4, -1.0, 3.0, 1.6, 2.2, -3.0])
    loss.sum().backward()
    close(new.grad, [0.0, -1.0, 3.0, 0.0, 2.2, -3.0])  # no gradient where the clip holds; -A at ratio 1


def test_value_loss_by_hand():
    new = tensor(2, 2, 1.1, 0.0)
    old = tensor(1, 1, 1, 1)
    returns = tensor(0, 3, 3, 1.0)
    close(ppo.value_loss(new, old, returns, 0.2), [2.0, 3.24 / 2, 3.61 / 2, 0.5])
    close(ppo.value_loss(new, old, returns, 0), [2.0, 0.5, 3.61 / 2, 0.5])
    new.requires_grad_()
    ppo.value_loss(new, old, returns, 0.2).sum().backward()
    close(new.grad, [2.0, 0.0, -1.9, -1.0])


def test_token_nll_computes_at_least_in_float32():
    labels = torch.arange(15).reshape(3, 5) % V
    labels[0, 0] = -100
    half = (random(3, 5, V) * 4).bfloat16()
    assert sft.token_nll(half, labels).dtype == torch.float32
    close(sft.token_nll(half, labels), sft.token_nll(half.double(), labels), 1e-6)
    assert sft.token_nll(half.double(), labels).dtype == torch.float64
    assert (sft.token_nll(half, labels) == 0).sum() == 1


def test_episodes_by_hand():
    """A line ends with its last trained token; fields have a number for each trained token, wherever it was computed,
    and joined they are those of the first episode, then of the second."""
    rows = [  # query, response, what is trained, ids, labels
        ([0], [7, 8], [1, 1], [0, 7, 8], [-100, 7, 8]),
        ([1, 2, 3], [9, 1, 2], [0, 1, 0], [1, 2, 3, 9, 1], [-100, -100, -100, -100, 1]),
        ([4, 5], [3, 4, 5, 6], [1, 0, 1, 1], [4, 5, 3, 4, 5, 6], [-100, -100, 3, -100, 5, 6]),
    ]

    def labels_of(lines):
        trained = [label for [(_, labels, _)] in lines for label in labels if label != -100]
        return {"logprobs": torch.tensor(trained)}

    accelerator = SimpleNamespace(device="cpu", num_processes=1, process_index=0, reduce=lambda values: values)
    for script in ppo, grpo:
        episodes = [script.Episode({}, query, response, trained, True, 0.0) for query, response, trained, *_ in rows]
        assert [([*each.ids], [*each.labels]) for each in episodes] == [(ids, labels) for *_, ids, labels in rows]
        assert [each.length for each in episodes] == [2, 1, 3]
        for size in 1, 2, 3:
            script.store_columns(accelerator, episodes, SimpleNamespace(micro_batch_size=size), labels_of)
            assert [each.logprobs.tolist() for each in episodes] == [[7, 8], [1], [3, 5, 6]]
        found = script.of_all([episodes[2], episodes[0]], "logprobs")
        assert found.tolist() == [3, 5, 6, 7, 8] and script.of_all([], "logprobs", found).shape == (0,)
        assert script.episodes_of([[episodes[1].example], [([0], [-100], [])]]) == [episodes[1]]
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    assert ppo.on_grid(torch.arange(6.0) + 1, mask).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


def test_learning_rate_closed_forms():
    def rates(steps, total=20, **flags):
        args = SimpleNamespace(**{"lr_final": 0.0, "warmup_steps": 0, "decay_steps": None} | flags)
        return [ppo.learning_rate(2.0, step, total, args) for step in steps]

    for kind in ("constant", "linear", "cosine"):
        assert rates(range(4), lr_schedule=kind, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0])
        assert rates([4], lr_schedule=kind, warmup_steps=4) == [2.0]  # the decay starts at the peak
        assert rates([0], lr_schedule=kind) == [2.0]
    assert rates([1, 10, 99], lr_schedule="constant", lr_final=0.5, decay_steps=3) == [2.0, 2.0, 2.0]
    linear = {"lr_schedule": "linear", "warmup_steps": 4, "lr_final": 0.5}  # 16 steps of decay
    assert rates([8, 12, 19, 20, 99], **linear) == pytest.approx([1.625, 1.25, 0.59375, 0.5, 0.5])
    assert rates([6, 12, 19], **linear, decay_steps=8) == pytest.approx([1.625, 0.5, 0.5])
    cosine = linear | {"lr_schedule": "cosine"}
    slow = [0.5 + 1.5 * (1 + math.cos(math.pi * x / 16)) / 2 for x in (4, 8, 15)]
    assert rates([8, 12, 19, 20, 99], **cosine) == pytest.approx([*slow, 0.5, 0.5])
    assert rates([0, 2], total=3, lr_schedule="linear", warmup_steps=3) == pytest.approx([2 / 3, 2.0])
    assert rates([3], total=3, lr_schedule="linear", warmup_steps=3) == [2.0]  # no division by zero
    assert rates([4, 5], lr_schedule="linear", warmup_steps=4, decay_steps=1) == [2.0, 0.0]


def test_rng_depends_on_every_key_and_on_nothing_else():
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 1), (1, "a", 1, 0), (0, "a", 1)]
    keys += [(1, "a", 12), (1, "a", 1, 2), (12, "a"), (1, "a1"), (1, "a", 2**40), (-1, "a"), (2**32 + 1, "a")]
    draws = {key: seeding.rng(*key).random(3).tolist() for key in keys}
    assert len({tuple(x) for x in draws.values()}) == len(keys)
    np.random.seed(0)
    torch.manual_seed(0)
    assert all(seeding.rng(*key).random(3).tolist() == draws[key] for key in reversed(keys))
    assert seeding.rng(1, "a", np.int64(3)).random() == seeding.rng(1, "a", torch.tensor(3)).random()
    # another number here means that every stored curve belongs to other draws
    assert seeding.rng(1, "rollout", 3, 5).random() == 0.6004720012005916


def test_global_generators_for_code_that_is_not_ours():
    drawn = []
    for seed in 3, 3, 4:
        seeding.seed_libraries(seed)
        drawn.append([seeding.random.random(), np.random.random(), torch.rand(1).item()])
    assert drawn[0] == drawn[1] and not {*drawn[0]} & {*drawn[2]}


def test_deterministic_kernels_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *mode, **options: asked.append((mode, options)))
    monkeypatch.setattr(seeding.os, "environ", environment := {})
    seeding.seed_libraries(1)
    assert not asked and not environment
    seeding.seed_libraries(1, deterministic=True)
    assert asked == [((True,), {"warn_only": True})]
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def test_uniforms_are_keyed_by_the_global_row():
    whole = sampling.uniforms(1, "rollout", 3, range(11), 7)
    assert whole.shape == (11, 7) and whole.dtype == torch.float64
    assert whole.min() >= 0 and whole.max() < 1 and len(whole.unique()) == 77
    assert torch.equal(sampling.uniforms(1, "rollout", 3, [9, 2, 2], 7), whole[[9, 2, 2]])
    assert torch.equal(sampling.uniforms(1, "rollout", 3, [5], 4), whole[5:6, :4])  # nor by the width
    assert not torch.equal(sampling.uniforms(1, "rollout", 4, range(11), 7), whole)
    assert sampling.uniforms(1, "rollout", 3, [], 7).shape == (0, 7)
    many = sampling.uniforms(1, "eval", 0, range(200), 50)  # standard errors: 0.0029 and 0.0030
    assert abs(many.mean() - 0.5) < 0.012 and abs((many < 0.1).double().mean() - 0.1) < 0.012


def test_rows_are_a_stream_of_permutations():
    long = ppo.draw_rows(1, 7, 0, 35)
    epochs = [long[i : i + 7] for i in range(0, 35, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    for start, count in product(range(0, 22, 3), (1, 3, 7, 11)):
        assert ppo.draw_rows(1, 7, start, count) == long[start : start + count]
    assert ppo.draw_rows(2, 7, 0, 35) != long
    assert ppo.draw_rows(1, 1, 5, 3) == [0, 0, 0]
