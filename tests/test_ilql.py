"""Implicit language Q-learning: `python -m pytest tests/test_ilql.py`

The maths against hand numbers and slow definitions; the losses of whole batches against a reference that goes row by
row and action by action, without padding; episodes against explicit lists; the guided policy against transformers' own
`generate`; and whole runs of main on tiny models.
"""

import copy
import json
import math
import re
from functools import partial
from itertools import groupby, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from test_invariants import assert_same_result, log, pad_is_eos, recorded, weights
from test_maths import close, random, tensor
from torch import nn
from transformers import AutoModelForCausalLM

from algos import ilql
from benchmarks.tasks import randomwalks
from common import forward, sampling
from common.cli import InputError, from_task
from common.models import as_decoder, load_model
from common.sampling import sample
from common.seeding import draw

BOS, EOS, PAD, NAN, INF = 21, 22, 23, math.nan, math.inf
V = 11  # of the pure functions; that of the models is 25
SETTINGS = {"gamma": 0.9, "tau": 0.8, "cql_scale": 0.3, "awac_scale": 0.7, "awac_beta": 0.6, "awac_clip": 0.8}
LOSSES = "loss_q loss_v loss_cql loss_awac".split()
STATISTICS = """values qvalues target_qvalues advantages target_gap awac_weight squared_values squared_advantages
end_errors inner_errors ends""".split()
TERMS = ["loss", *LOSSES, *STATISTICS]


def settings(**changes):
    return SimpleNamespace(**SETTINGS | changes)


def softmax(row):
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


# ---- Maths -----------------------------------------------------------------------------------------------------------


def test_ilql_targets_by_hand():
    rewards, next_values = tensor(1, 1, -2, 0), tensor(10, 10, 4, -6).requires_grad_()
    targets = ilql.ilql_targets(rewards, next_values, torch.tensor([True, False, True, False]), 0.5)
    close(targets, [6.0, 1.0, 0.0, 0.0])
    assert not targets.requires_grad
    close(ilql.ilql_targets(rewards, next_values, torch.ones(4, dtype=torch.bool), 0.0), rewards)


def test_expectile_loss_by_hand():
    diff = tensor(2, -2, 0, -0.5).requires_grad_()
    loss = ilql.expectile_loss(diff, 0.8)
    close(loss, [3.2, 0.8, 0.0, 0.05])
    loss.sum().backward()
    close(diff.grad, [3.2, -0.8, 0.0, -0.2])
    close(ilql.expectile_loss(diff.detach(), 0.5), diff.detach() ** 2 / 2)


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.99])
def test_expectile_loss_is_minimal_at_the_expectile(tau):
    """Which balances the distances to the values above and below it: tau sum (q - m)+ = (1 - tau) sum (m - q)+."""
    q, low, high = random(101), -9.0, 9.0
    for _ in range(80):
        m = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        ilql.expectile_loss(q - m, tau).sum().backward()
        low, high = (m.item(), high) if m.grad < 0 else (low, m.item())
    above, below = sum(max(x - low, 0) for x in q.tolist()), sum(max(low - x, 0) for x in q.tolist())
    assert tau * above == pytest.approx((1 - tau) * below, rel=1e-9)
    assert low == pytest.approx(q.mean().item()) if tau == 0.5 else low > q.mean() + 0.1


def test_cql_loss_is_the_slow_definition():
    q, actions = random(3, 5, V) * 4, torch.arange(15).reshape(3, 5) % V
    loss = ilql.cql_loss(q, actions)
    slow = [
        [math.log(sum(map(math.exp, q[i, j].tolist()))) - q[i, j, actions[i, j]] for j in range(5)] for i in (0, 1, 2)
    ]
    close(loss, slow)
    close(ilql.cql_loss(q[:0, 0], actions[:0, 0]), torch.zeros(0))
    close(ilql.cql_loss(q + 1e5, actions), loss, 1e-9)  # no overflow
    assert ilql.cql_loss(q.bfloat16(), actions).dtype == torch.float32


def test_awac_loss_is_the_slow_definition():
    nll = random(3, 5).exp()
    advantages = random(3, 5, seed=1) * 3
    close(ilql.awac_loss(nll, advantages, 0.0), nll)
    factors = [[min(math.exp(0.7 * a), 2.0) for a in row] for row in advantages.tolist()]
    assert {factor == 2.0 for row in factors for factor in row} == {True, False}
    close(ilql.awac_loss(nll, advantages, 0.7, 2.0), nll * torch.tensor(factors), 1e-6)


@pytest.mark.parametrize(("advantage", "weight"), [(20, 20.0), (1e4, 20.0), (0.2, math.exp(2)), (-1e4, 0.0)])
def test_the_weight_of_awac_is_clipped_and_a_constant(advantage, weight):
    nll, advantages = tensor(0.7).requires_grad_(), tensor(advantage).requires_grad_()
    loss = ilql.awac_loss(nll, advantages, 10.0)
    close(loss, [weight * 0.7])
    loss.sum().backward()
    close(nll.grad, [weight])
    assert advantages.grad is None


def test_polyak_update_moves_by_alpha_times_the_difference():
    online, target = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    with torch.no_grad():
        online.weight.copy_(random(5, 3)), target.weight.copy_(random(5, 3, seed=1))
        online.bias.fill_(1.0), target.bias.fill_(3.0)
    before, fixed = copy.deepcopy(target), copy.deepcopy(online)
    ilql.polyak_update(target, online, 0.1)
    close(target.bias.data, [2.8] * 5)  # alpha is the weight of the online network
    close(target.weight.data, before.weight.data + 0.1 * (online.weight.data - before.weight.data))
    ilql.polyak_update(target, online, 1.0)
    for one, other in zip(target.parameters(), online.parameters(), strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(online.parameters(), fixed.parameters(), strict=True))
    with pytest.raises(ValueError):
        ilql.polyak_update(nn.Sequential(target, nn.Linear(1, 1)), online, 0.1)


def slow_shaped(logits, q, v, beta, top_k=0, top_p=1.0, forbidden=()):
    """The row of shape_logits: lists of V numbers, forbidden a list of tokens."""
    kept = [token for token in range(len(logits)) if token not in forbidden]
    kept.sort(key=lambda token: -logits[token])
    kept = kept[: top_k or None]
    probs, before, nucleus = softmax([logits[token] for token in kept]), 0.0, []
    for token, prob in zip(kept, probs, strict=True):
        nucleus += [token] * (top_p == 1 or before < top_p)
        before += prob
    logprobs = dict(zip(nucleus, map(math.log, softmax([logits[token] for token in nucleus])), strict=True))
    return [logprobs[a] + beta * (q[a] - v) if a in logprobs else -INF for a in range(len(logits))]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (V, 1.0), (99, 1.0), (0, 0.7), (5, 0.6), (0, 1e-9)]
)
def test_shape_logits_is_the_slow_definition(top_k, top_p):
    logits, q, v = random(3, 5, V) * 2, random(3, 5, V, seed=1), random(3, 5, seed=2)
    forbidden = random(3, 5, V, seed=3) > 0.8
    for mask, beta in product((None, forbidden), (0.0, 2.0, -1.0)):
        shaped = ilql.shape_logits(logits, q, v, beta, top_k, top_p, mask)
        for i, j in product(range(3), range(5)):
            out = () if mask is None else mask[i, j].nonzero()[:, 0].tolist()
            row = logits[i, j].tolist(), q[i, j].tolist(), v[i, j].item()
            close(shaped[i, j], slow_shaped(*row, beta, top_k, top_p, out))


def test_shape_logits_by_hand():
    logits, q, v = tensor(0.5, 0.3, 0.2).log() + 7, tensor(1, 2, 4), torch.tensor(1.0, dtype=torch.float64)
    log = math.log
    close(ilql.shape_logits(logits, q, v, 2.0), [log(0.5), log(0.3) + 2, log(0.2) + 6])
    close(ilql.shape_logits(logits, q, v, 0.0), [log(0.5), log(0.3), log(0.2)])
    close(ilql.shape_logits(logits, q, v + 1, 2.0), [log(0.5) - 2, log(0.3), log(0.2) + 4])
    close(ilql.shape_logits(logits, q, v, 2.0, 2), [log(5 / 8), log(3 / 8) + 2, -INF])
    close(ilql.shape_logits(logits, q, v, 2.0, top_p=0.5), [0.0, -INF, -INF])
    close(ilql.shape_logits(logits, q, v, 2.0, top_p=0.51), [log(5 / 8), log(3 / 8) + 2, -INF])
    first = torch.tensor([True, False, False])  # the two likeliest of those that are allowed
    close(ilql.shape_logits(logits, q, v, 2.0, 2, forbidden=first), [-INF, log(0.6) + 2, log(0.4) + 6])
    assert ilql.shape_logits(logits.bfloat16(), q.float(), v.float(), 2.0).dtype == torch.float32


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.6}, {"forbidden": torch.tensor([False] * 3 + [True])}]
)
def test_no_advantage_brings_a_token_back(options):
    """Pitfall of filters after the advantage is added: a huge Q of a token outside the support would win."""
    logits = tensor(0.6, 0.3, 0.1, 0.0).log() if not options else tensor(0.6, 0.3, 0.06, 0.04).log()
    shaped = ilql.shape_logits(logits, tensor(0, 0, 0, 1e6), torch.tensor(0.0), 1e6, **options)
    assert shaped[3] == -INF and shaped[0].isfinite() and not shaped.isnan().any()
    assert (draw(shaped.expand(99, 4), torch.linspace(0, 1, 99).double(), 1.0) != 3).all()


# ---- Losses without logits of all tokens -----------------------------------------------------------------------------


def parts(head):
    return [*head.parameters()]


def test_chosen_q_is_the_full_head_gathered():
    policy = ilql.PolicyWithQ(Table(random(V, 3).tolist(), random(V, 3, seed=1).tolist()))
    head, states, actions = (
        policy.q_heads[0],
        random(7, 3, seed=2).requires_grad_(),
        torch.tensor([0, 3, 3, 10, 5, 9, 0]),
    )
    one, other = ilql.chosen_q(head, head[:-1](states), actions), head(states)[torch.arange(7), actions]
    close(one.data, other.data)
    inputs = [states, *parts(head)]
    for a, b in zip(*(torch.autograd.grad((q * random(7)).sum(), inputs) for q in (one, other)), strict=True):
        assert b.any()
        close(a.to_dense(), b)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_change_nothing(monkeypatch, size, bias):
    """Neither losses nor gradients, whatever the weights of the actions; no more than `size` rows of logits at a time,
    in the backward pass again."""
    monkeypatch.setattr(forward, "CHUNK", size * V)
    head, states = nn.Linear(3, V, bias=bias).double(), random(7, 3, seed=2).requires_grad_()
    advantages, actions = random(7, seed=1), torch.tensor([0, 3, 3, 10, 5, 9, 0])

    sizes = []

    def loss(logits, actions, factors):
        sizes.append(len(logits))
        return ilql.cql_loss(logits, actions) * factors

    whole = loss(head(states), actions, advantages)
    sizes.clear()
    chunked = ilql.in_chunks(loss, head, V, states, actions, advantages)
    assert max(sizes) == min(size, 7) and sum(sizes) == 7
    close(chunked.data, whole.data)
    inputs = [states, *parts(head)]
    gradients = [torch.autograd.grad((x * random(7)).sum(), inputs) for x in (chunked, whole)]
    assert max(sizes) == min(size, 7) and sum(sizes) == (14 if size < 7 else 7)
    for a, b in zip(*gradients, strict=True):
        assert b.any()
        close(a, b)
    head.requires_grad_(False)  # a frozen layer
    chunked = ilql.in_chunks(loss, head, V, states, actions, advantages)
    close(torch.autograd.grad((chunked * random(7)).sum(), states)[0], gradients[1][0])
    assert not ilql.in_chunks(loss, head, V, states.detach(), actions, advantages).requires_grad


# ---- A case by hand --------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A language model whose hidden state is the row of a table for the newest token."""

    dtype, device, _no_split_modules = torch.float64, torch.device("cpu"), None

    def __init__(self, table, output):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.tensor(table, dtype=torch.float64), freeze=False)
        self.output = nn.Linear(len(table[0]), len(table), bias=False, dtype=torch.float64)
        self.output.weight.data = torch.tensor(output, dtype=torch.float64)

    def get_output_embeddings(self):
        return self.output

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.output(self.table(input_ids)))


def linear_head(head, *rows):
    """Makes the head x -> rows x, by relu(x) - relu(-x) = x."""
    rows, eye = torch.tensor(rows, dtype=torch.float64), torch.eye(len(rows[0]), dtype=torch.float64)
    values = torch.cat((eye, -eye)), torch.zeros(2 * len(eye)), torch.cat((rows, -rows), 1), torch.zeros(len(rows))
    for weight, value in zip(head.parameters(), values, strict=True):
        weight.data = value.double()


def hand_policy():
    """Tokens 0, 1, 2 have the states (1, 0), (0, 1), (1, 1)."""
    policy = ilql.PolicyWithQ(Table([[1, 0], [0, 1], [1, 1]], [[0, 0], [1, 0], [0, 1]]))
    linear_head(policy.v_head, (1.0, 3.0))  # V = 1, 3, 4
    linear_head(policy.q_heads[0], (0.0, 0), (2, 0), (0, 5))
    linear_head(policy.q_heads[1], (0.0, 0), (1, 0), (0, 7))
    linear_head(policy.target_q_heads[0], (0.0, 0), (4, 0), (0, 1))
    linear_head(policy.target_q_heads[1], (0.0, 0), (3, 0), (0, 2))
    return policy


HAND = settings(gamma=0.5, tau=0.8, cql_scale=0.1, awac_scale=2.0, awac_beta=0.5, awac_clip=2.5)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_ilql_losses_by_hand(done, chunked):
    """First action, 1 in state 0: y = 0.5 + 0.5 x 3 = 2, Q = 2, 1; min Q^ = 3, V = 1, weight min(e, 2.5).
    Second action, 2 in state 1: y = 1 at the end, else 1 + 0.5 x 4 = 3; Q = 5, 7; min Q^ = 1, V = 3, weight 1 / e."""
    policy = hand_policy()
    policy.lm.plain_output = chunked
    terms = ilql.ilql_losses(policy, ilql.Batch.of([ilql.Episode([0, 1, 2], [1, 2], [0.5, 1.0], done)], 0, "cpu"), HAND)
    assert [*terms] == TERMS
    last = 16 + 36 if done else 4 + 16
    close(terms["loss_q"].data, [0.0 + 1, last])
    close(terms["loss_v"].data, [0.8 * 4, 0.2 * 4])
    close(terms["loss_cql"].data, [0.239544 + 0.551445, 0.013386 + 0.001822], 2e-6)
    close(terms["loss_awac"].data, [2.5 * 0.551445, 0.551445 / math.e], 2e-6)
    close(terms["loss"].data, [1 + 3.2 + 0.0790989 + 2 * 1.378611, last + 0.8 + 0.0015208 + 2 * 0.2028654], 2e-6)
    error = 5.0 if done else 3.0
    statistics = {"values": [1, 3], "qvalues": [1.5, 6], "target_qvalues": [3, 1], "advantages": [2, -2]}
    statistics |= {"target_gap": [-2, 4.5], "awac_weight": [2.5, math.exp(-1)], "squared_values": [1, 9]}
    statistics |= {"squared_advantages": [4, 4], "ends": [0, done]}
    statistics |= {"end_errors": [0, error * done], "inner_errors": [0.5, error * (not done)]}
    assert {*statistics} == {*STATISTICS}
    for name, expected in statistics.items():
        close(terms[name].data.double(), [float(x) for x in expected])
        assert not terms[name].requires_grad or name == "values"


def test_the_value_behind_the_end_is_not_used():
    """Token 2 is only ever the last state."""

    def losses(done, state):
        policy = hand_policy()
        policy.lm.table.weight.data[2] = tensor(*state)
        batch = ilql.Batch.of([ilql.Episode([0, 1, 2], [1, 2], [0.5, 1.0], done)], 0, "cpu")
        return ilql.ilql_losses(policy, batch, HAND)

    for done in (True, False):
        one, other = losses(done, (1, 1)), losses(done, (-5, 8))
        assert [name for name in LOSSES if not torch.equal(one[name], other[name])] == ["loss_q"] * (not done)


def test_loss_metrics_by_hand():
    sums = {"loss": 10, "loss_q": 1, "loss_v": 2, "loss_cql": 3, "loss_awac": 4, "values": 5, "qvalues": 6}
    sums |= {"target_qvalues": 7, "advantages": 8, "target_gap": 2, "awac_weight": 1, "squared_values": 9}
    sums |= {"squared_advantages": 30, "end_errors": 9, "inner_errors": 12, "ends": 1}
    assert [*sums] == TERMS
    expected = {"losses/loss": 2.5, "losses/loss_q": 0.25, "losses/loss_v": 0.5, "losses/loss_cql": 0.75}
    expected |= {"losses/loss_awac": 1.0, "values/mean": 1.25, "qvalues/mean": 1.5, "target_qvalues/mean": 1.75}
    expected |= {"advantages/mean": 2.0, "advantages/std": 3.5**0.5, "values/std": 0.6875**0.5, "target_gap/mean": 0.5}
    expected |= {"awac_weight/mean": 0.25, "td_error/end": 9.0, "td_error/inner": 4.0}
    assert ilql.loss_metrics(sums, 4) == pytest.approx(expected)
    sums["ends"] = 0
    assert ilql.loss_metrics(sums, 4)["td_error/end"] == 0
    sums |= {"ends": 4, "squared_advantages": 15.999999}
    found = ilql.loss_metrics(sums, 4)
    assert found["td_error/inner"] == found["advantages/std"] == 0


def test_values_of_a_chain_are_exact():
    """b c d is worth 0 and e c f is worth 1, so what b can reach is known only by joining the two. V(c) is the
    0.9-expectile of (0, 1), which is 0.9; V(b) = V(e) = gamma V(c); a bootstrapped row hands on what V says."""
    b, c, d, e, f, g = range(6)
    rows = [([b, c, d], 0.0, True), ([e, c, f], 1.0, True), ([g, b], 0.0, False)]
    episodes = [ilql.Episode(ids, [*range(1, len(ids))], [0.0] * (len(ids) - 2) + [r], done) for ids, r, done in rows]
    policy = ilql.PolicyWithQ(Table(torch.eye(6).tolist(), torch.eye(6).tolist()))
    batch = ilql.Batch.of(episodes, 0, "cpu")
    optimizer = torch.optim.Adam([*policy.v_head.parameters(), *policy.q_heads.parameters()], lr=1e-2)
    flags = settings(gamma=0.8, tau=0.9, cql_scale=0.0, awac_scale=0.0)
    for step in range(1, 601):
        optimizer.param_groups[0]["lr"] = 2e-2 * (1 - step / 601)
        ilql.ilql_losses(policy, batch, flags)["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            ilql.polyak_update(policy.target_q_heads, policy.q_heads, 0.5)
    with torch.no_grad():
        v, q = policy.v_head(torch.eye(6).double())[:, 0], policy.q_heads[0](torch.eye(6).double())
    close(v[[b, c, e, g]], [0.72, 0.9, 0.72, 0.576], 1e-3)
    close(q[[b, c, e, c, g], [c, d, c, f, b]], [0.72, 0.0, 0.72, 1.0, 0.576], 1e-3)


# ---- Losses of whole batches -----------------------------------------------------------------------------------------


def encode(rows, max_length=99, tokenizer=None):
    return ilql.encode_episodes(rows, tokenizer or randomwalks.tokenizer(), max_length, "--dataset")[0]


def episode(text, rewards, done=True):
    """That of a text with what is no action in brackets, ^ for <bos>, . for <eos>; rewards of the last actions."""
    letters, parts = {"^": BOS, ".": EOS}, re.split(r"[\[\]]", text)[1:]
    marked = [(letters.get(x, ord(x) - ord("a")), bool(i % 2)) for i, part in enumerate(parts) for x in part]
    actions = [place for place, (_, action) in enumerate(marked) if action]
    return ilql.Episode([i for i, _ in marked], actions, [0.0] * (len(actions) - len(rewards)) + rewards, done)


EPISODES = [
    episode("[ab]cd[e]f.", [1.7, 0.0, -2.0]),
    episode("[b]cdefgh.", [0.1]),
    episode("[^]c[dd]ghij", [0.25, 0.0, 0.0, 0.0, 1.0], done=False),
    episode("[klmnopq]r.", [-1.0]),
    episode("[a].", [3.0]),
    episode("[u]tsrqponmlkjih", [], done=False),
]


def make_policy(lm, two_qs=True, seed=0):
    """Heads with values of about 1, and targets of their own."""
    policy = ilql.PolicyWithQ(lm, two_qs, seed)
    heads = policy.v_head, policy.q_heads, policy.target_q_heads
    for number, weight in enumerate(weight for head in heads for weight in head.parameters()):
        weight.data = torch.from_numpy(np.random.default_rng(number).normal(size=weight.shape) * 0.3).to(weight)
    return policy.eval()


def slow_terms(policy, episodes, args):
    """What `ilql_losses` returns: each row alone, each action alone, all numbers of a head."""
    found = []
    for episode in episodes:
        output = policy.lm(input_ids=torch.tensor([episode.ids]), output_hidden_states=True, use_cache=False)
        hidden, logits = output.hidden_states[-1][0], output.logits[0]
        for number, place in enumerate(episode.actions):
            action, h, last = episode.ids[place], hidden[place - 1], number + 1 == len(episode.actions)
            next_h = hidden[-1] if last else hidden[episode.actions[number + 1] - 1]
            qs, v = [head(h) for head in policy.q_heads], policy.v_head(h)[0]
            chosen = [q[action] for q in qs]
            targets = [head(h)[action].item() for head in policy.target_q_heads]
            target_q, mean_target = min(targets), sum(targets) / len(targets)
            end = last and episode.done
            y = episode.rewards[number] + (0.0 if end else args.gamma * policy.v_head(next_h).item())
            loss_q = sum((q - y) ** 2 for q in chosen)
            loss_v = (args.tau if target_q >= v else 1 - args.tau) * (target_q - v) ** 2
            loss_cql = sum(q.exp().sum().log() - q[action] for q in qs)
            advantage = target_q - v.item()
            weight = min(math.exp(args.awac_beta * advantage), args.awac_clip)
            loss_awac = -weight * logits[place - 1].softmax(0)[action].log()
            loss = loss_q + loss_v + args.cql_scale * loss_cql + args.awac_scale * loss_awac
            error, mean_q = (sum(values).item() / len(qs) for values in ([abs(q - y) for q in chosen], chosen))
            statistics = [v.item(), mean_q, target_q, advantage, mean_q - mean_target, weight, v.item() ** 2]
            statistics += [advantage**2, error * end, error * (not end), end]
            statistics = [torch.tensor(x, dtype=torch.float64) for x in statistics]
            found.append([loss, loss_q, loss_v, loss_cql, loss_awac, *statistics])
    return dict(zip(TERMS, map(torch.stack, zip(*found, strict=True)), strict=True))


def gradients(policy, loss):
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
    return [torch.zeros(1) if g is None else g for g in found]


def assert_same_terms(policy, one, other, tolerance=1e-9, of_gradients=1e-9):
    """Terms, and gradients of a sum of all losses with other weights for each loss and action."""
    for name in TERMS:
        close(one[name].detach().double(), other[name].detach(), tolerance)
    size = len(one["loss"])
    sums = [
        sum((terms[name] * random(size, seed=i)).sum() for i, name in enumerate(TERMS[:5])) for terms in (one, other)
    ]
    for a, b in zip(*(gradients(policy, loss) for loss in sums), strict=True):
        assert (a - b).abs().max() <= of_gradients * b.abs().max()


def losses(policy, episodes, args=None, pad=PAD):
    return ilql.ilql_losses(policy, ilql.Batch.of(episodes, pad, "cpu"), args or settings())


@pytest.mark.parametrize("two_qs", [True, False])
@pytest.mark.parametrize(("chunked", "chunk"), [(True, 2**23), (True, 60), (False, 60)])
def test_ilql_losses_are_the_slow_definition(monkeypatch, build_model, family, two_qs, chunked, chunk):
    monkeypatch.setattr(forward, "CHUNK", chunk)
    policy = make_policy(build_model(family, torch.float64), two_qs)
    policy.lm.plain_output = chunked
    slow = slow_terms(policy, EPISODES, settings())
    clipped = slow["advantages"] * 0.6 > math.log(0.8)
    assert clipped.any() and not clipped.all() and (slow["advantages"] < 0).any() and len(clipped) > 30
    assert_same_terms(policy, losses(policy, EPISODES), slow)
    assert len(policy.q_heads) == len(policy.target_q_heads) == 1 + two_qs


@pytest.mark.parametrize("chunked", [True, False])
def test_neither_padding_nor_neighbours_change_the_losses(build_model, family, chunked):
    policy = make_policy(build_model(family, torch.float64))
    policy.lm.plain_output = chunked
    rows = [losses(policy, [episode]) for episode in EPISODES]
    for order in ([0], [4, 0], [5, 0, 3], [3, 2, 1, 5, 0, 4]):
        alone = {name: torch.cat([rows[i][name] for i in order]) for name in TERMS}
        assert_same_terms(policy, losses(policy, [EPISODES[i] for i in order]), alone)


def test_garbage_in_the_padding_changes_nothing(build_model, family):
    policy, batch = make_policy(build_model(family, torch.float64)), ilql.Batch.of(EPISODES, PAD, "cpu")
    dirty = copy.deepcopy(batch)
    beyond = torch.arange(batch.ids.shape[1]) >= torch.tensor([len(e.ids) for e in EPISODES])[:, None]
    dirty.ids[beyond] = torch.arange(int(beyond.sum())) % 25
    dirty.actions[~batch.mask], dirty.rewards[~batch.mask], dirty.not_done[~batch.mask] = 7, NAN, True
    for row, episode in enumerate(EPISODES):
        dirty.states[row, len(episode.actions) + 1 :] = 3
    clean, dirty = (ilql.ilql_losses(policy, x, settings()) for x in (batch, dirty))
    assert all(torch.equal(clean[name], dirty[name]) for name in TERMS)
    assert all(map(torch.equal, *(gradients(policy, terms["loss"].sum()) for terms in (clean, dirty))))


def test_each_loss_trains_its_own_heads(build_model):
    policy = make_policy(build_model("llama", torch.float64))
    terms = losses(policy, EPISODES)
    groups = {"v": parts(policy.v_head), "q": parts(policy.q_heads), "lm": parts(policy.lm.model)}
    groups |= {"head": parts(policy.lm.get_output_embeddings())}
    assert not any(weight.requires_grad for weight in policy.target_q_heads.parameters())
    expected = {"loss_q": {"q", "lm"}, "loss_v": {"v", "lm"}, "loss_cql": {"q", "lm"}, "loss_awac": {"lm", "head"}}
    for name, trained in expected.items():
        found = set()
        for group, members in groups.items():
            grads = torch.autograd.grad(terms[name].sum(), members, retain_graph=True, allow_unused=True)
            found |= {group} if any(g is not None and g.any() for g in grads) else set()
        assert found == trained
    assert not any(terms[name].requires_grad for name in TERMS[6:])


def test_two_equal_heads_count_twice(build_model):
    """Both losses of Q are sums over the heads; the minimum of two equal targets is one of them."""
    two, one = (make_policy(build_model("gpt2", torch.float64), n) for n in (True, False))
    for policy in (two, one):
        for heads in (policy.q_heads, policy.target_q_heads):
            for head in heads:
                head.load_state_dict(one.q_heads[0].state_dict())
    (a, b), zero = (losses(policy, EPISODES) for policy in (two, one)), settings(awac_scale=0.0, cql_scale=0.0)
    for name in LOSSES:
        close(a[name].data, b[name].data * (2 if name in ("loss_q", "loss_cql") else 1))
    close(losses(one, EPISODES, zero)["loss"].data, (b["loss_q"] + b["loss_v"]).data)


def test_evaluation_is_the_mean_over_all_actions(build_model):
    """For any micro-batch and number of processes, also where the last ones have no row left."""
    policy = make_policy(build_model("gpt2", torch.float64))
    slow = slow_terms(policy, EPISODES[:5], settings())
    expected = {name: slow[name].mean().item() for name in ["loss", *LOSSES]}

    def reduce(sums, mine):
        sums.append(mine)
        return sum(sums)

    for world, size in product((1, 2, 3), (1, 2, 5)):
        flags, all_sums = settings(micro_batch_size=size), partial(reduce, [])
        for rank in range(world):  # the last process sees the sum of all
            cpu = {"num_processes": world, "process_index": rank, "device": torch.device("cpu"), "reduce": all_sums}
            found = ilql.evaluate_losses(SimpleNamespace(**cpu), policy, EPISODES[:5], flags, PAD)
        assert found == pytest.approx(expected, rel=1e-9)


# ---- Episodes --------------------------------------------------------------------------------------------------------


def turn(role, content):
    return {"role": role, "content": content}


TURNS = [turn("user", "ab"), turn("assistant", "cd"), turn("user", "e"), turn("assistant", "f")]
# A turn is a letter of its role (u, s), the content and the end token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'user': 'u', 'assistant': 's'}[m.role] }}{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}s{% endif %}"
)


@pytest.fixture
def chatty(letters):
    letters.chat_template = TEMPLATE
    return letters


def shown(episode, tokenizer):
    """The text of an episode, with what is no action in brackets; ^ is <bos>, . is <eos>."""
    tokens, text = tokenizer.convert_ids_to_tokens(episode.ids), ""
    for action, places in groupby(range(len(tokens)), lambda place: place in episode.actions):
        piece = "".join(tokens[place] for place in places)
        text += piece if action else f"[{piece}]"
    return text.replace("<bos>", "^").replace("<eos>", ".")


def test_a_dialogue_as_explicit_lists(letters):
    """States are the places before the actions, then the last place; a reward lies on the last token of its output, the
    end token where it is the last; the next state behind an output is the end of the next prompt."""
    rows = [{"dialogue": ["ab", "cd", "e", "fg"], "reward": [1.5, -2]}, {"dialogue": ["h", "i"], "reward": 4}]
    two, one = episodes = encode(rows)
    assert two == ilql.Episode([0, 1, 2, 3, 4, 5, 6, EOS], [2, 3, 5, 6, 7], [0.0, 1.5, 0.0, 0.0, -2.0], True)
    assert one == ilql.Episode([7, 8, EOS], [1, 2], [0.0, 4.0], True)
    one.done = False
    batch = vars(ilql.Batch.of(episodes, PAD, "cpu"))
    assert batch.pop("query_mask") is None
    batch = {name: value.tolist() for name, value in batch.items()}
    assert batch == {
        "ids": [[0, 1, 2, 3, 4, 5, 6, EOS], [7, 8, EOS, *[PAD] * 5]],
        "states": [[1, 2, 4, 5, 6, 7], [0, 1, 2, 0, 0, 0]],
        "actions": [[2, 3, 5, 6, EOS], [8, EOS, PAD, PAD, PAD]],
        "rewards": [[0, 1.5, 0, 0, -2], [0, 4, 0, 0, 0]],
        "mask": [[True] * 5, [True, True, False, False, False]],
        "not_done": [[True, True, True, True, False], [True, True, False, False, False]],
    }
    types = [value.dtype for value in vars(ilql.Batch.of(episodes, PAD, "cpu")).values() if value is not None]
    assert types == [torch.int64] * 3 + [torch.float64, torch.bool, torch.bool]


FOUR = ["ab", "cd", "e", "f"]
FORMS = [  # row, text with what is no action in brackets, rewards of the actions, whether it ended
    ({"dialogue": FOUR, "reward": 2}, "[ab]cd[e]f.", [0, 0, 0, 2], True),
    ({"dialogue": FOUR, "reward": [1.5, 2]}, "[ab]cd[e]f.", [0, 1.5, 0, 2], True),
    ({"dialogue": ["a", "b", "c", "d", "e", "f"], "reward": [1, 2, 3]}, "[a]b[c]d[e]f.", [1, 2, 0, 3], True),
    ({"dialogue": ["ab", "", "e", "f"], "reward": [0, 2]}, "[abe]f.", [0, 2], True),
    ({"dialogue": ["ab", "cd", "", "f"], "reward": [1, 2]}, "[ab]cdf.", [0, 1, 0, 2], True),
    ({"dialogue": ["", "ab"], "reward": 1}, "[^]ab.", [0, 0, 1], True),
    ({"dialogue": ["ab", "cd<eos>"], "reward": 1}, "[ab]cd.", [0, 0, 1], True),
    ({"prompt": "ab", "completion": "c", "reward": 1}, "[ab]c.", [0, 1], True),
    ({"prompt": "ab", "completion": "c", "reward": [1]}, "[ab]c.", [0, 1], True),
    ({"prompt": "", "completion": "c", "reward": True}, "[^]c.", [0, 1], True),
    ({"prompt": "<bos>a", "completion": "b", "reward": 0}, "[^a]b.", [0, 0], True),
    ({"prompt": "a", "completion": "b", "reward": np.float32(0.5)}, "[a]b.", [0, 0.5], True),
    ({"prompt": "a", "completion": "", "reward": -1}, "[a].", [-1], True),
    ({"text": "abc", "reward": 0.5}, "[^]abc.", [0, 0, 0, 0.5], True),
    ({"text": "", "reward": 0.5}, "[^].", [0.5], True),
    ({"text": "<bos>a", "reward": 1}, "[^]a.", [0, 1], True),
    ({"messages": TURNS, "reward": 2}, "[^uab.s]cd.[ue.s]f.", [0, 0, 0, 0, 2], True),
    ({"messages": TURNS, "reward": [1, 2]}, "[^uab.s]cd.[ue.s]f.", [0, 0, 1, 0, 2], True),
    ({"prompt": TURNS[:3], "completion": TURNS[3:], "reward": 2}, "[^uab.scd.ue.s]f.", [0, 2], True),
    ({"prompt": TURNS[:1], "completion": TURNS[1:], "reward": [1, 2]}, "[^uab.s]cd.[ue.s]f.", [0, 0, 1, 0, 2], True),
    ({"prompt": "ab", "completion": "cd", "reward": 1, "truncated": True}, "[ab]cd", [0, 1], False),
    ({"prompt": "ab", "completion": "c<eos>d", "reward": 1, "truncated": True}, "[ab]c.d", [0, 0, 1], False),
    ({"prompt": "ab", "completion": "cd<eos>", "reward": 1, "truncated": 1}, "[ab]cd", [0, 1], False),
    ({"prompt": "ab", "completion": "c", "reward": 1, "truncated": 0}, "[ab]c.", [0, 1], True),
    ({"prompt": "ab", "completion": "c", "reward": 1, "truncated": None}, "[ab]c.", [0, 1], True),
    ({"text": "ab", "reward": 1, "truncated": True}, "[^]ab", [0, 1], False),
    ({"dialogue": FOUR, "reward": [1, 2], "truncated": True}, "[ab]cd[e]f", [0, 1, 2], False),
    ({"dialogue": [*FOUR[:3], ""], "reward": [1, 0], "truncated": True}, "[ab]cd[e]", [0, 1], False),
    ({"messages": TURNS, "reward": 2, "truncated": True}, "[^uab.s]cd.[ue.s]f", [0, 0, 0, 2], False),
    ({"prompt": "", "completion": "c", "reward": 1, "text": "another column"}, "[^]c.", [0, 1], True),
]


@pytest.mark.parametrize(("row", "text", "rewards", "done"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_forms_of_a_row(chatty, row, text, rewards, done):
    before = copy.deepcopy(row)
    (episode,) = encode([row], tokenizer=chatty)
    assert (shown(episode, chatty), episode.rewards, episode.done) == (text, rewards, done) and row == before
    assert all(type(reward) is float for reward in episode.rewards)


def test_a_truncated_chat_keeps_the_ends_of_earlier_turns(chatty):
    """Where the template writes no end token behind an answer, nothing is taken away."""
    chatty.chat_template = TEMPLATE.replace("{{ eos_token }}", "{{ '' if m.role == 'assistant' else eos_token }}")
    (found,) = encode([{"messages": TURNS, "reward": 1, "truncated": True}], tokenizer=chatty)
    assert shown(found, chatty) == "[^uab.s]cd[ue.s]f" and not found.done


CUTS = {  # max_length: of a dialogue of 7 tokens with rewards 1 and 2, and of a row of 4
    99: ("[ab]cd[e]f.", [0, 1, 0, 2], True),
    7: ("[ab]cd[e]f.", [0, 1, 0, 2], True),
    6: ("[ab]cd[e]f", [0, 1, 0], False),
    5: ("[ab]cd[e]", [0, 1], False),  # the last state is one that precedes an action
    4: ("[ab]c", [0], False),  # within the later prompt no value is learnt
    3: ("[ab]c", [0], False),
}


@pytest.mark.parametrize("max_length", CUTS)
def test_a_long_row_ends_in_a_state_whose_value_is_learnt(letters, max_length):
    text, rewards, done = CUTS[max_length]
    for row in ({"dialogue": FOUR, "reward": [1, 2]}, {"dialogue": FOUR, "reward": [1, 2], "truncated": False}):
        (episode,) = encode([row], max_length)
        assert (shown(episode, letters), episode.rewards, episode.done) == (text, rewards, done)
        full = encode([row])[0]
        states, learnt = (ilql.Batch.of([x], PAD, "cpu").states[0].tolist() for x in (episode, full))
        assert states[-1] in learnt and len(episode.ids) <= max_length


def test_rows_without_an_action_left_are_dropped_and_counted(letters):
    rows = [
        {"prompt": "abcdefg", "completion": "h", "reward": 1},
        {"prompt": "a", "completion": "bcdefghi", "reward": 1},
        {"prompt": "a", "completion": "b", "reward": 1},
        {"prompt": "abcd", "completion": "ef", "reward": 1},
    ]
    episodes, report = ilql.encode_episodes(rows, letters, 5, "--dataset")
    assert [shown(e, letters) for e in episodes] == ["[a]bcde", "[a]b.", "[abcd]e"]
    assert report == "4 rows, 3 cut, 1 dropped without an action left, 1 ended; actions of a row: 1 to 4, median 2"
    with pytest.raises(InputError, match="--dataset: no row has an action left within --max-length 5"):
        encode(rows[:1], 5)
    empty = {"text": "", "reward": 1, "truncated": True}  # a row without an action from the start
    assert [shown(e, letters) for e in encode([empty, {"text": "b", "reward": 1, "truncated": False}])] == ["[^]b."]


def test_without_a_beginning_token_the_first_token_is_no_action(letters):
    letters.bos_token = None
    rows = [{"text": "abc", "reward": 1}, {"text": "a", "reward": 2}, {"text": "", "reward": 3}]
    episodes = encode(rows, tokenizer=letters)
    assert [shown(e, letters) for e in episodes] == ["[a]bc.", "[a]."] and [e.rewards for e in episodes] == [
        [0, 0, 1],
        [2],
    ]
    (episode,) = encode([{"dialogue": ["", "a", "b", "c"], "reward": [0, 1]}], tokenizer=letters)
    assert shown(episode, letters) == "[ab]c." and episode.rewards == [0, 1]
    with pytest.raises(InputError, match="row 1: an output without tokens has a reward"):
        encode([{"dialogue": ["", "a", "b", "c"], "reward": [2, 1]}], tokenizer=letters)


@pytest.mark.parametrize("template", ["<bos> $A", "<bos> $A <eos>"])
def test_tokenizers_that_add_special_tokens(chatty, template):
    from tokenizers import processors

    pairs = [("<bos>", BOS), ("<eos>", EOS)]
    chatty.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    for row, text, rewards, done in FORMS:
        (episode,) = encode([row], tokenizer=chatty)
        assert shown(episode, chatty).replace("^", "").replace("[]", "") == text.replace("^", "").replace("[]", "")
        assert (episode.rewards, episode.done) == (rewards, done)
        assert episode.ids.count(BOS) == 1 and episode.actions[0] > 0


BAD_REWARDS = ["1", None, NAN, INF, -INF, [], [1], [1, 2, 3], [1, "2"], [1, None], [NAN, 1], {"a": 1}, 1j]


@pytest.mark.parametrize("bad", BAD_REWARDS, ids=lambda x: repr(x)[:12])
def test_a_bad_reward_names_its_row(bad):
    rows = [{"dialogue": FOUR, "reward": 1}, {"dialogue": FOUR, "reward": bad}]
    sentence = r"^--dataset row 2: 'reward' must be a finite number, or a list of 2, one for each output, it is .{,60}$"
    with pytest.raises(InputError, match=sentence):
        encode(rows)


@pytest.mark.parametrize("bad", ["true", 2, -1, 0.5, [], NAN])
def test_a_bad_truncated_names_its_row(bad):
    rows = [{"text": "a", "reward": 1, "truncated": True}, {"text": "a", "reward": 1, "truncated": bad}]
    with pytest.raises(InputError, match="^--dataset row 2: 'truncated' must be true or false, it is"):
        encode(rows)


BAD_ROWS = [
    ({"prompt": "a", "completion": "b"}, "row 1: 'reward' must be a finite number, .* it is None"),
    ({"text": "a"}, "row 1: 'reward' must be a finite number, .* it is None"),
    ({"reward": 1}, "has the columns reward; expected text, prompt and completion, "),
    ({"text": 5, "reward": 1}, "row 1: 'text' must be valid text, it is 5"),
    ({"prompt": "a", "reward": 1}, "has the columns prompt, reward; expected completion"),
    ({"dialogue": ["a", "b", "c"], "reward": 1}, "row 1: 'dialogue' must be a list prompt, output"),
    ({"dialogue": [], "reward": 1}, "row 1: 'dialogue' must be a list prompt, output"),
    ({"dialogue": ["ab", "", "c", "d"], "reward": [1, 2]}, "row 1: an output without tokens has a reward"),
    (
        {"dialogue": ["ab", "c", "d", ""], "reward": 2, "truncated": True},
        "row 1: an output without tokens has a reward",
    ),
    ({"messages": TURNS[:3], "reward": 1}, "row 1: the last message must be the assistant's"),
]


@pytest.mark.parametrize(("row", "sentence"), BAD_ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_row_is_named(chatty, row, sentence):
    with pytest.raises(InputError, match=f"^--dataset {sentence}"):
        encode([row], tokenizer=chatty)


def test_cutting_keeps_a_prefix_whatever_the_dialogue(letters):
    """Random dialogues at any max_length."""
    draw, seen = np.random.default_rng(0), set()
    for _ in range(60):
        words = ["".join(draw.choice(list("abcdefg"), draw.integers(0, 5))) for _ in range(2 * draw.integers(1, 5))]
        values = [float(draw.integers(1, 9)) if output else 0.0 for output in words[1::2]]
        values[-1] = 9.0  # on the end token at least
        row = {"dialogue": words, "reward": values, "truncated": bool(words[-1] and draw.random() < 0.5)}
        (full,) = encode([row])
        text = "".join(words)
        assert full.ids == [BOS] * (not words[0]) + letters(text)["input_ids"] + [EOS] * (not row["truncated"])
        assert len(full.actions) == sum(map(len, words[1::2])) + (not row["truncated"]) and sum(full.rewards) == sum(
            values
        )
        for max_length in range(1, len(full.ids) + 2):
            try:
                (e,) = encode([row], max_length)
            except InputError:
                assert full.actions[0] >= max_length or full.actions[1:2] > [max_length], "an action would have fit"
                seen.add("dropped")
                continue
            size, n = len(e.ids), len(e.actions)
            assert e.ids == full.ids[:size] and e.actions == full.actions[:n] and e.rewards == full.rewards[:n]
            assert 0 < e.actions[0] and e.actions[-1] < size <= max_length
            assert e.done == (full.done and max_length >= len(full.ids))
            later = [place for place in full.actions if size < place <= max_length]
            assert (size == len(full.ids)) if max_length >= len(full.ids) else (size in full.actions and not later)
            batch = ilql.Batch.of([e], PAD, "cpu")
            assert (
                batch.states[0, :-1].tolist() == [place - 1 for place in e.actions] and batch.states[0, -1] == size - 1
            )
            assert batch.actions[0].tolist() == [e.ids[place] for place in e.actions] and batch.mask.all()
            assert batch.not_done[0].tolist() == [True] * (n - 1) + [not e.done]
            seen.add("whole" if size == len(full.ids) else "cut")
    assert seen == {"dropped", "cut", "whole"}


@pytest.mark.parametrize("last_ends", [True, False])
def test_returns_are_standardised_where_all_rows_end(last_ends):
    """Where one goes on they are scaled alone; rewards of evaluation rows follow, the mean only where a row ends."""
    rows = [([1.0, 0, 3], True), ([2.0], True), ([0, -5.0], last_ends)]
    data = ilql.Data([], {"": [ilql.Episode([], [], [7.0, 1.0], end) for end in (True, False)]}, [], None, None)
    data.episodes = [ilql.Episode([], [], rewards, done) for rewards, done in rows]
    ilql.normalize_rewards(data, SimpleNamespace(normalize_rewards=True))
    mean, std = np.mean([4, 2, -5]) * last_ends, np.std([4, 2, -5], ddof=1)
    expected = [[1 / std, 0, (3 - mean) / std], [(2 - mean) / std], [0, (-5 - mean) / std]]
    expected += [[7 / std, (1 - mean) / std], [7 / std, 1 / std]]
    found = [episode.rewards for episode in data.episodes + data.eval_sets[""]]
    assert [len(rewards) for rewards in found] == [3, 1, 2, 2, 2]
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-12)


# ---- The policy ------------------------------------------------------------------------------------------------------


def test_heads_are_keyed_by_the_seed(build_model):
    lm, drawn = build_model("gpt2"), []
    for seed, noise in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(noise)
        drawn.append(ilql.PolicyWithQ(lm, seed=seed).head_weights())
    one, same, other = drawn
    assert [*one] == [*other] and len(one) == 4 * 5
    for name in one:
        assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
        fan_in = 12 if name.endswith((".0.weight", ".0.bias")) else 24
        assert one[name].abs().max() <= fan_in**-0.5 and one[name].dtype == torch.float32
        if one[name].numel() > 20:
            assert one[name].abs().max() > 0.8 * fan_in**-0.5 and abs(one[name].mean()) < 0.5 * fan_in**-0.5
    assert not torch.equal(one["q_heads.0.0.weight"], one["q_heads.1.0.weight"])


@pytest.mark.parametrize("two_qs", [True, False])
def test_targets_start_as_copies_without_gradient(build_model, two_qs):
    policy = ilql.PolicyWithQ(build_model("llama", torch.bfloat16), two_qs)
    assert len(policy.q_heads) == 1 + two_qs
    for online, target in zip(policy.q_heads.parameters(), policy.target_q_heads.parameters(), strict=True):
        assert torch.equal(online, target) and online.data_ptr() != target.data_ptr()
        assert online.requires_grad and not target.requires_grad and online.dtype == torch.float32
    shapes = [[*weight.shape] for weight in policy.v_head.parameters()]
    assert shapes == [[24, 12], [24], [1, 24], [1]] and [*policy.q_heads[0][-1].weight.shape] == [25, 24]
    ids = torch.tensor([[1, 2, 3]])
    losses(policy, EPISODES)["loss"].sum().backward()  # bfloat16 hidden states, float32 heads
    with torch.no_grad(), policy.guided(1.0):
        assert policy.lm(ids).logits.dtype == torch.float32


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6]])
BIGRAMS = random(25, 25, seed=4) > 0.3
BIGRAMS[:, :3] = False  # something is always allowed


@pytest.mark.parametrize(
    ("beta", "options"),
    [
        (2.0, {}),
        (1.0, {"top_k": 4}),
        (3.0, {"top_p": 0.7}),
        (1.5, {"top_k": 5, "top_p": 0.8, "logit_mask": BIGRAMS}),
    ],
)
@pytest.mark.parametrize("two_qs", [True, False])
def test_guided_logits_at_every_position(build_model, family, beta, options, two_qs):
    policy = make_policy(build_model(family, torch.float64), two_qs)
    mask = options.get("logit_mask")
    filters = {"top_k": options.get("top_k", 0), "top_p": options.get("top_p", 1.0)}
    with torch.no_grad():
        output = policy.lm(input_ids=IDS, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        with policy.guided(beta, **options) as inside:
            shaped, positional = policy.lm(input_ids=IDS).logits, policy.lm(IDS).logits
            kept = policy.lm(input_ids=IDS, logits_to_keep=2).logits
        after = policy.lm(input_ids=IDS).logits
    assert inside is policy and torch.equal(after, output.logits)
    assert torch.equal(shaped, positional) and shaped.dtype == torch.float64
    close(kept, shaped[:, -2:], 1e-9)
    for row, place in product(range(3), range(7)):
        h = hidden[row, place]
        heads = [head(h).tolist() for head in policy.target_q_heads]
        q, v = [min(values) for values in zip(*heads, strict=True)], policy.v_head(h).item()
        forbidden = () if mask is None else mask[IDS[row, place]].nonzero()[:, 0].tolist()
        expected = slow_shaped(output.logits[row, place].tolist(), q, v, beta, **filters, forbidden=forbidden)
        close(shaped[row, place], expected, 1e-9)


def hooks(lm):
    return [len(x) for m in lm.modules() for x in (m._forward_hooks, m._forward_pre_hooks)]


def test_guided_leaves_no_hook_behind(build_model):
    policy = make_policy(build_model("gpt2", torch.float64))
    plain, count = policy.lm(IDS).logits, hooks(policy.lm)
    with pytest.raises(KeyError), policy.guided(1.0):
        assert hooks(policy.lm) != count and not torch.equal(policy.lm(IDS).logits, plain)
        raise KeyError
    assert hooks(policy.lm) == count and torch.equal(policy.lm(IDS).logits, plain)
    with policy.guided(1.0):
        with pytest.raises(ValueError):
            policy.lm(IDS[1:], labels=IDS)  # stops behind the output layer
        one = policy.lm(IDS).logits
    with policy.guided(1.0):
        assert torch.equal(policy.lm(IDS).logits, one)
    losses(policy, EPISODES)
    assert hooks(policy.lm) == count
    with pytest.raises(IndexError):
        losses(policy, [ilql.Episode([1, 99], [1], [0.0], True)])  # an id that the model does not have
    assert hooks(policy.lm) == count


PROMPTS = [[BOS], [3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5]]


def left_padded(prompts=PROMPTS):
    width = max(map(len, prompts))
    query = torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts])
    return query, torch.arange(width) >= width - torch.tensor([len(ids) for ids in prompts])[:, None]


def transformers_generate(lm, prompts=PROMPTS, length=11, **options):
    query, mask = left_padded(prompts)
    options = {"top_k": 0, "return_dict_in_generate": True, "output_scores": True} | options
    output = lm.generate(input_ids=query, attention_mask=mask.long(), max_new_tokens=length, **options)
    return output.sequences[:, query.shape[1] :], output.scores


def draws(rows, length=11, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random((rows, length)))


@pytest.mark.parametrize("beta", [0.0, 1.0, 16.0])
def test_greedy_generation_of_transformers_is_ours(build_model, family, beta):
    """Also alone: a row's neighbours and its padding do not count."""
    policy, filters = make_policy(build_model(family, torch.float64)), {"top_k": 6, "logit_mask": BIGRAMS}
    for options in ({}, filters):
        with policy.guided(beta, **options):
            theirs, _ = transformers_generate(policy.lm, do_sample=False)
            ours, mask = sample(policy.lm, *left_padded(), draws(4), [EOS], PAD, temperature=0.0)
            alone = [sample(policy.lm, *left_padded([p]), draws(1), [EOS], PAD, temperature=0.0)[0] for p in PROMPTS]
        assert torch.equal(ours[:, : theirs.shape[1]], theirs) and not mask[:, theirs.shape[1] :].any()
        assert torch.equal(torch.cat(alone), ours) and len(ours.unique()) > 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_of_transformers_is_from_the_same_distribution(monkeypatch, build_model, family, temperature):
    """Ours is led along what transformers drew; the end is forbidden, so that all rows go on."""
    policy, seen, mask = make_policy(build_model(family, torch.float64)), [], BIGRAMS.clone()
    mask[:, EOS] = True
    with policy.guided(2.0, top_p=0.95, logit_mask=mask):
        torch.manual_seed(0)
        theirs, scores = transformers_generate(policy.lm, do_sample=True, temperature=temperature)

        def draw(logits, uniforms, temperature, top_k, top_p):
            seen.append((logits / temperature).softmax(-1))
            return theirs[:, len(seen) - 1]

        monkeypatch.setattr(sampling, "draw", draw)
        sample(policy.lm, *left_padded(), draws(4), [EOS], PAD, temperature)
    assert len(seen) == len(scores) == 11
    for ours, score in zip(seen, scores, strict=True):
        close(ours, score.double().softmax(-1), 1e-6 if score.dtype == torch.float32 else 1e-9)


def test_a_row_of_true_forbids_nothing(build_model):
    policy, mask = make_policy(build_model("gpt2", torch.float64)), torch.zeros(25, 25, dtype=torch.bool)
    mask[5], mask[1, 4] = True, True
    with policy.guided(2.0):
        expected = policy.lm(IDS).logits
    with policy.guided(2.0, logit_mask=mask):
        found = policy.lm(IDS).logits
    assert torch.equal(found[IDS != 1], expected[IDS != 1]) and (found[IDS == 1][:, 4] == -INF).all()
    assert found[IDS == 1][:, :4].isfinite().all() and mask[5].all()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("beta", [0.0, 16.0])
def test_forbidden_bigrams_are_never_sampled(build_model, size, beta):
    policy = make_policy(build_model("gpt2", torch.float64))
    query, mask = left_padded(PROMPTS[:size])

    def count(ids, keep):
        rows = [[prompt[-1], *row[k].tolist()] for prompt, row, k in zip(PROMPTS, ids, keep, strict=False)]
        return sum(bool(BIGRAMS[a, b]) for row in rows for a, b in pairwise(row))

    free = forbidden = 0
    for seed in range(9):
        with policy.guided(beta):
            free += count(*sample(policy.lm, query, mask, draws(size, seed=seed), [EOS], PAD))
        with policy.guided(beta, logit_mask=BIGRAMS):
            forbidden += count(*sample(policy.lm, query, mask, draws(size, seed=seed), [EOS], PAD))
            torch.manual_seed(seed)
            theirs, _ = transformers_generate(policy.lm, PROMPTS[:size], do_sample=True)
            ends = (theirs == EOS).int()
            forbidden += count(theirs, ends.cumsum(1) - ends == 0)
    assert forbidden == 0 and free > size


# ---- Families that change the logits of their output layer -----------------------------------------------------------


@pytest.fixture(scope="module")
def odd_dirs(tmp_path_factory):
    """{family: directory} of a model that scales its logits, and of one that caps them."""
    folder, letters = tmp_path_factory.mktemp("odd"), randomwalks.tokenizer()
    options = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    options |= {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 32, "vocab_size": len(letters)}
    options |= {"initializer_range": 0.3, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    cohere = transformers.CohereConfig(logit_scale=0.25, **options)
    gemma = transformers.Gemma2Config(final_logit_softcapping=2.0, query_pre_attn_scalar=6, **options)
    for name, config in {"cohere": cohere, "gemma2": gemma}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder / name)
        letters.save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("cohere", "gemma2")}


def load(path, **flags):
    return load_model(from_task(ilql.Args, ilql.TASK, dtype="float64", **flags), path)[0].eval()


DIALOGUES = [  # EPISODES as rows, the last of which is cut at 14 tokens
    {"dialogue": ["ab", "cd", "e", "f"], "reward": [1.7, -2], "truncated": False},
    {"dialogue": ["b", "cdefgh"], "reward": [0.1], "truncated": False},
    {"dialogue": ["", "c", "dd", "ghij"], "reward": [0.25, 1], "truncated": True},
    {"dialogue": ["klmnopq", "r"], "reward": [-1], "truncated": None},
    {"dialogue": ["a", ""], "reward": [3], "truncated": False},
    {"dialogue": ["u", "tsrqponmlkjihg"], "reward": [3], "truncated": False},
]


# What a family computes in float32 whatever the type (norms; Gemma's softmax, whose sums depend on the padding): two
# layers of some fifty operations in a row, each rounded.
IN_FLOAT32 = 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("odd", ["cohere", "gemma2"])
def test_families_that_change_their_logits(odd_dirs, tmp_path, odd):
    """All logits at once: the losses of the first step are those of the slow definition."""
    policy = ilql.PolicyWithQ(as_decoder(load(odd_dirs[odd])), seed=1)
    assert not policy.lm.plain_output
    policy.lm.plain_output = True
    flags = settings(**{name: getattr(ilql.Args(model="model", dataset="rows"), name) for name in SETTINGS})
    slow = slow_terms(policy, EPISODES, flags)
    assert (losses(policy, EPISODES, flags)["loss_awac"] - slow["loss_awac"]).abs().max() > 0.1
    policy.lm.plain_output = False
    assert_same_terms(policy, losses(policy, EPISODES, flags), slow, IN_FLOAT32, IN_FLOAT32)
    options = {"batch_size": len(DIALOGUES), "max_length": 14, "total_steps": 1, "normalize_rewards": False}
    assert EPISODES == encode(DIALOGUES, 14)
    _, run_dir = run_ilql(odd_dirs[odd], tmp_path / "run", DIALOGUES, **options)
    for name in ("loss", *LOSSES):
        assert log(run_dir)[0][f"losses/{name}"] == pytest.approx(slow[name].mean().item(), rel=IN_FLOAT32)


# ---- Runs ------------------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": prompt, "completion": completion, "reward": reward}
    for prompt, completion, reward in (
        ("b", "cd", 1.0), ("", "f", 0.5), ("fg", "hij", -1), ("hijkl", "m", 2), ("m", "", 0), ("nop", "uvwxabc", 0.25),
    )
]  # fmt: skip


def run_ilql(model, run_dir, rows=ROWS, **flags):
    """Three steps of 5 rows, unless flags say otherwise."""
    options = {"eval_every": 0, "total_steps": 3, "batch_size": 5, "micro_batch_size": 5, "lr": 1e-2, "threads": 1}
    options |= {"dtype": "float64", "save_every": 0, "steps_for_target_q_sync": 2, "max_new_tokens": 9}
    return ilql.main(ilql.Args(model=model, dataset=rows, run_dir=str(run_dir), **options | flags))


def test_the_micro_batch_changes_nothing(gpt2_dir, tmp_path, letters):
    """Nor does padding with the end token; chunks and evaluation included."""
    flags = {"eval_dataset": ROWS[:3], "eval_every": 2, "awac_beta": 0.5}
    whole = run_ilql(gpt2_dir, tmp_path / "whole", **flags)
    assert_same_result(run_ilql(gpt2_dir, tmp_path / "two", micro_batch_size=2, **flags), whole)
    changed = {"micro_batch_size": 1, "tokenizer": pad_is_eos(letters)}
    assert_same_result(run_ilql(gpt2_dir, tmp_path / "one", **changed, **flags), whole)


@pytest.mark.parametrize(("every", "syncs"), [(1, 7), (3, 2), (8, 0)])
def test_targets_follow_every_so_many_steps_of_the_run(monkeypatch, gpt2_dir, tmp_path, every, syncs):
    """Whatever the length of an epoch, which is 1.2 steps here. alpha 1 copies; without a step they stay as drawn."""
    calls, options = recorded(monkeypatch, ilql, "polyak_update"), {"total_steps": 7, "steps_for_target_q_sync": every}
    metrics, run_dir = run_ilql(gpt2_dir, tmp_path / "run", polyak_alpha=1.0, **options)
    assert len(calls) == metrics["target/syncs"] == syncs and all(args[2] == 1.0 for args, _ in calls)
    assert [row["target/syncs"] for row in log(run_dir)] == [step // every for step in range(1, 8)]
    found, first = weights(run_dir), ilql.PolicyWithQ(load(gpt2_dir), seed=1).head_weights()
    for name in (name for name in first if name.startswith("q_heads")):
        online, target = found[f"ilql_heads.{name}"], found[f"ilql_heads.target_{name}"]
        assert torch.equal(online, target) == (every == 1)
        assert torch.equal(target, first[name]) == (syncs == 0) and not torch.equal(online, first[name])


@pytest.mark.parametrize("two_qs", [True, False])
def test_an_export_is_loaded_with_its_heads(tiny_dir, tmp_path, two_qs):
    _, run_dir = run_ilql(tiny_dir, tmp_path / "run", two_qs=two_qs)
    saved = safetensors.torch.load_file(run_dir / "checkpoints" / "step_00000003" / "model.safetensors")
    policy = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64)
    state = policy.state_dict()
    assert len(policy.q_heads) == len(policy.target_q_heads) == 1 + two_qs
    assert (
        saved.keys() <= state.keys()
        and {name for name in state if "head" in name} - {"lm.lm_head.weight"} <= saved.keys()
    )
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert not any(weight.requires_grad for weight in policy.target_q_heads.parameters())
    plain, report = AutoModelForCausalLM.from_pretrained(
        run_dir / "hf_model", dtype=torch.float64, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(plain.eval()(IDS).logits, policy.eval().lm(IDS).logits)
    # and taken back by --model: before the first synchronisation the targets are those of the file
    options = {"total_steps": 1, "steps_for_target_q_sync": 9, "two_qs": two_qs, "lr": 1e-9, "seed": 5}
    found = weights(run_ilql(str(run_dir / "hf_model"), tmp_path / "again", **options)[1])
    for name, weight in policy.head_weights().items():
        assert torch.equal(found[f"ilql_heads.{name}"], weight) or "target" not in name
        close(found[f"ilql_heads.{name}"], weight, 1e-7)


def test_heads_of_another_model_are_refused(build_model, tmp_path):
    wide, one = (build_model("gpt2", n_embd=20), build_model("gpt2")), build_model("gpt2")
    one.save_pretrained(tmp_path)
    file = tmp_path / "ilql_heads.safetensors"
    for other in (ilql.PolicyWithQ(wide[0]).head_weights(), {"v_head.0.weight": torch.zeros(24, 12)}):
        safetensors.torch.save_file(other, file)
        with pytest.raises(InputError, match=f"^{file} does not fit "):
            ilql.PolicyWithQ.load(tmp_path)
    safetensors.torch.save_file(ilql.PolicyWithQ(one).head_weights(), file)
    with pytest.raises(InputError, match=f"^{file} does not fit "):
        ilql.PolicyWithQ(one, two_qs=False).load_heads(tmp_path)


@pytest.mark.parametrize("contents", [b"", b"no safetensors"])
def test_a_file_of_heads_that_cannot_be_read(gpt2_dir, tmp_path, build_model, contents):
    file = tmp_path / "ilql_heads.safetensors"
    file.write_bytes(contents)
    with pytest.raises(InputError, match=str(file)):
        ilql.PolicyWithQ(build_model("gpt2")).load_heads(tmp_path)


EQUAL = [row | {"reward": 0.1} for row in ROWS]


@pytest.mark.parametrize(
    "rows",
    [EQUAL, [{"prompt": p, "completion": "", "reward": r} for p, r in (("a", 1), ("b", 2))], ROWS[:1], EQUAL[4:5]],
    ids=["equal rewards", "trajectories of length 1", "one row", "one action"],
)
def test_poor_data_train_without_nan(gpt2_dir, tmp_path, capsys, rows):
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "run", rows, total_steps=2, eval_dataset=rows[:1], eval_every=1)
    lines = log(run_dir)
    assert len(lines) == 3 and all(math.isfinite(value) for row in lines for value in row.values())
    assert all(weight.isfinite().all() for weight in weights(run_dir).values())
    warned = (
        "warning: all returns are equal (rows that are cut lose theirs): little can be learned beyond imitation"
        in capsys.readouterr().out
    )
    assert warned == (len({row["reward"] for row in rows}) == 1)


def test_rewards_are_scaled_by_the_returns_of_the_training_rows(monkeypatch, gpt2_dir, tmp_path, capsys):
    """Also those of evaluation rows; without the flag rewards are as given."""
    calls = recorded(monkeypatch, ilql, "encode_episodes")
    returns = [row["reward"] for row in ROWS]
    for scale, (mean, std) in {True: (np.mean(returns), np.std(returns, ddof=1)), False: (0.0, 1.0)}.items():
        calls.clear()
        flags = {"eval_dataset": [ROWS[0] | {"reward": 7.0}], "eval_every": 9, "total_steps": 1}
        run_ilql(gpt2_dir, tmp_path / str(scale), ROWS, normalize_rewards=scale, **flags)
        trained, evaluated = (result[0] for _, result in calls)
        close(tensor(*(sum(e.rewards) for e in trained)), (np.array(returns) - mean) / std, 1e-9)
        assert sum(evaluated[0].rewards) == pytest.approx((7 - mean) / std)
        assert ("scaled to 0 +- 1" in capsys.readouterr().out) == scale


@pytest.mark.parametrize("every", [True, False])
def test_rewards_of_rows_that_go_on_are_scaled_and_not_shifted(monkeypatch, gpt2_dir, tmp_path, capsys, every):
    """Rows that end in success, all equal, beside rows that go on without a reward: nothing is erased."""
    calls, ends = recorded(monkeypatch, ilql, "encode_episodes"), [not every, not every, False]
    rows = [row | {"truncated": not end, "reward": r} for row, end, r in zip(ROWS, ends, (3, 3, 0), strict=False)]
    run_ilql(gpt2_dir, tmp_path / "run", rows, total_steps=1)
    [(_, (episodes, _))] = calls
    assert [sum(e.rewards) for e in episodes] == pytest.approx([3 / 3**0.5, 3 / 3**0.5, 0])
    out = capsys.readouterr().out
    assert "all returns are equal" not in out and "scaled to any mean +- 1" in out


def test_equal_returns_are_equal_but_for_rounding(gpt2_dir, tmp_path, capsys):
    rows = [row | {"reward": (0.3, 0.1 + 0.2)[i % 2]} for i, row in enumerate(ROWS)]
    run_ilql(gpt2_dir, tmp_path / "run", rows, total_steps=1)
    assert "all returns are equal" in capsys.readouterr().out and log(tmp_path / "run")[-1]["losses/loss_q"] < 1


def first_letters(samples, prompts, outputs, **columns):
    return {"vowels": [float(output[:1] in tuple("aeiou")) for output in outputs]}


def test_evaluation_samples_from_each_beta(monkeypatch, gpt2_dir, tmp_path):
    """The filters choose from pi, and not from what is drawn from."""
    shaped, drawn = recorded(monkeypatch, ilql, "shape_logits"), []
    monkeypatch.setattr(sampling, "draw", lambda *args: drawn.append(args[2:]) or draw(*args))
    flags = {"betas": (0.0, 4.0), "metric": first_letters, "eval_prompts": [{"prompt": p} for p in ("b", "cd", "")]}
    flags |= {"eval_every": 2, "total_steps": 2, "top_k": 3, "top_p": 0.9}
    mask = BIGRAMS.clone()
    mask[:, [21, 23, 24]] = True  # bos, pad, unk, which a sample's text would leave out
    flags |= {"eval_temperature": 0.5, "max_new_tokens": 5, "logit_mask": mask.numpy()}
    metrics, run_dir = run_ilql(gpt2_dir, tmp_path / "run", **flags)
    assert {key for key in metrics if key.startswith("eval/")} == {"eval/vowels@beta=0", "eval/vowels@beta=4"}
    assert {args[3:6] for args, _ in shaped} == {(beta, 3, 0.9) for beta in flags["betas"]}
    assert set(drawn) == {(0.5, 0, 1.0)}  # temperature, top_k, top_p
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["beta"]) for row in samples] == [
        (s, b) for s in (0, 2) for _ in range(3) for b in (0.0, 4.0)
    ]
    letters = randomwalks.tokenizer()
    for row in samples:
        ids = letters((row["prompt"] or "<bos>") + row["output"])["input_ids"]
        pairs = [*pairwise(ids)][len(row["prompt"] or "x") - 1 :]
        assert not any(mask[a, b] for a, b in pairs)


BAD_MASKS = [np.zeros((25, 25)), np.zeros((21, 21), dtype=bool), np.zeros(25, dtype=bool)]


@pytest.mark.parametrize("mask", BAD_MASKS, ids=lambda x: f"{x.dtype} {x.shape}")
def test_a_bad_logit_mask_is_named(gpt2_dir, tmp_path, mask):
    with pytest.raises(InputError, match=r"^--logit-mask must be bool of shape \[25, 25\], the size of "):
        run_ilql(gpt2_dir, tmp_path / "run", logit_mask=mask)
    assert not (tmp_path / "run").exists()


def test_the_lines_of_use_run(tmp_path, tiny_dir, capsys):
    """As the card of a run shows them, and its last lines."""
    _, run_dir = run_ilql(tiny_dir, tmp_path / "run", total_steps=1, betas=(0, 2.5, 3), top_p=0.9)
    usage = (run_dir / "README.md").read_text().split("```python\n")[1].split("\n```")[0]
    assert usage in capsys.readouterr().out and "tokenizer('b'," in usage
    assert "guided(beta=2.5, top_k=20, top_p=0.9):  # no beta was evaluated" in usage
    exec(usage, {})
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("b")
