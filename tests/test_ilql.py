"""Implicit language Q-learning, its functions: `python -m pytest tests/test_ilql.py`

Whole runs are in test_ilql_runs.py.
"""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import INF, NAN, PAD, close, equal, random, recorded, save, tensor
from torch import nn

from algos import ilql
from benchmarks.tasks import randomwalks
from common.errors import InputError
from common.lm import logprobs

SETTINGS = {"gamma": 0.9, "tau": 0.8, "cql_scale": 0.3, "awac_scale": 0.7, "awac_beta": 0.6, "awac_clip": 0.8}
ARGS = SimpleNamespace(**SETTINGS)
LOSSES = "loss_q loss_v loss_cql loss_awac".split()
STATISTICS = """values qvalues target_qvalues advantages target_gap awac_weight squared_values squared_advantages
end_errors inner_errors ends""".split()
TERMS = ["loss", *LOSSES, *STATISTICS]


def test_the_weight_of_awac_is_a_constant():
    nll = tensor(0.7, 0.7, 0.7).requires_grad_()
    advantages = tensor(1e4, 0.2, -1e4).requires_grad_()
    ilql.awac_loss(nll, advantages, 10.0).sum().backward()
    close(nll.grad, [20, math.exp(2), 0])
    assert advantages.grad is None


def test_polyak_update_moves_by_alpha_times_the_difference():
    online = nn.Linear(3, 5, dtype=torch.float64)
    target = nn.Linear(3, 5, dtype=torch.float64)
    expected = [slow + 0.1 * (fast - slow) for slow, fast in zip(target.parameters(), online.parameters(), strict=True)]
    ilql.polyak_update(target, online, 0.1)
    for weight, value in zip(target.parameters(), expected, strict=True):
        close(weight.data, value.data)


def slow_shaped(logits, q, v, beta, top_k=0, top_p=1.0, forbidden=()):
    """The row of shape_logits: lists of a number for each token, forbidden a list of tokens."""
    kept = [token for token in range(len(logits)) if token not in forbidden]
    kept.sort(key=lambda token: -logits[token])
    kept = kept[: top_k or None]
    before = 0.0
    nucleus = []
    for token, prob in zip(kept, tensor(*(logits[token] for token in kept)).softmax(0).tolist(), strict=True):
        if top_p == 1 or before < top_p:
            nucleus.append(token)
        before += prob
    shaped = [-INF] * len(logits)
    for token, logprob in zip(nucleus, tensor(*(logits[token] for token in nucleus)).log_softmax(0), strict=True):
        shaped[token] = logprob + beta * (q[token] - v)
    return shaped


def test_shape_logits_by_hand():
    logits = tensor(0.5, 0.3, 0.2).log() + 7
    q = tensor(1, 2, 4)
    v = torch.tensor(1.0, dtype=torch.float64)
    log = math.log
    close(ilql.shape_logits(logits, q, v, 2.0), [log(0.5), log(0.3) + 2, log(0.2) + 6])
    close(ilql.shape_logits(logits, q, v + 1, 2.0), [log(0.5) - 2, log(0.3), log(0.2) + 4])
    close(ilql.shape_logits(logits, q, v, 2.0, 2), [log(5 / 8), log(3 / 8) + 2, -INF])
    close(ilql.shape_logits(logits, q, v, 2.0, top_p=0.5), [0.0, -INF, -INF])
    close(ilql.shape_logits(logits, q, v, 2.0, top_p=0.51), [log(5 / 8), log(3 / 8) + 2, -INF])
    first = torch.tensor([True, False, False])  # the two likeliest of those that are allowed
    close(ilql.shape_logits(logits, q, v, 2.0, 2, forbidden=first), [-INF, log(0.6) + 2, log(0.4) + 6])
    rounded = logits.bfloat16()
    assert torch.equal(ilql.shape_logits(rounded, q, v, 2.0), ilql.shape_logits(rounded.float(), q, v, 2.0))


def test_loss_metrics_where_all_actions_end_or_none():
    """And where the variance is negative by rounding."""
    sums = dict.fromkeys([*LOSSES, *STATISTICS, "loss"], 8.0)
    none = ilql.loss_metrics(sums | {"ends": 0, "end_errors": 0}, 4)
    every = ilql.loss_metrics(sums | {"ends": 4, "inner_errors": 0, "squared_advantages": 15.999999}, 4)
    assert none["td_error/end"] == every["td_error/inner"] == every["advantages/std"] == 0
    assert none["td_error/inner"] == every["td_error/end"] == 2


DIALOGUES = [
    {"dialogue": ["ab", "cd", "e", "f"], "reward": [1.7, -2], "truncated": False},
    {"dialogue": ["b", "cdefgh"], "reward": [0.1], "truncated": False},
    {"dialogue": ["", "c", "dd", "ghij"], "reward": [0.25, 1], "truncated": True},
    {"dialogue": ["klmnopq", "r"], "reward": [-1], "truncated": None},
    {"dialogue": ["a", ""], "reward": 3, "truncated": False},
    {"dialogue": ["u", "tsrqponmlkjihg"], "reward": [3], "truncated": False},
]
EPISODES, _ = ilql.encode_episodes(DIALOGUES, randomwalks.tokenizer(), 14, "--dataset")


def scaled(rows, of_eval_sets=(), normalize=True):
    """(rewards of all episodes, report) after `normalize_rewards`; rows: [(rewards, whether it ended)]"""
    data = SimpleNamespace(eval_sets={"": [ilql.Episode([], [], *row) for row in of_eval_sets]}, report="")
    data.episodes = [ilql.Episode([], [], *row) for row in rows]
    ilql.normalize_rewards(data, SimpleNamespace(normalize_rewards=normalize))
    return [episode.rewards for episode in data.episodes + data.eval_sets[""]], data.report


@pytest.mark.parametrize("last_ends", [True, False])
def test_returns_are_standardised_where_all_rows_end(last_ends):
    """Where one goes on they are scaled alone; rewards of evaluation rows follow, the mean only where a row ends."""
    rows = [([1.0, 0, 3], True), ([2.0], True), ([0, -5.0], last_ends)]
    evaluated = [([7.0, 1.0], True), ([7.0, 1.0], False)]
    mean = np.mean([4, 2, -5]) if last_ends else 0.0
    std = np.std([4, 2, -5], ddof=1)
    expected = [[1 / std, 0, (3 - mean) / std], [(2 - mean) / std], [0, (-5 - mean) / std]]
    expected += [[7 / std, (1 - mean) / std], [7 / std, 1 / std]]
    found, report = scaled(rows, evaluated)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    assert report == f"; return 0.3333 +- 4.726, scaled to {'0' if last_ends else 'any mean'} +- 1"
    assert scaled(rows, normalize=False) == ([[1.0, 0, 3], [2.0], [0, -5.0]], "; return 0.3333 +- 4.726")


@pytest.mark.parametrize("returns", [[0.3, 0.1 + 0.2], [2.0]], ids=["rounding", "one row"])
def test_equal_returns_are_not_scaled(returns):
    rewards, report = scaled([([value], True) for value in returns])
    assert sum(rewards, []) == pytest.approx([0.0] * len(returns), abs=1e-12)
    assert "warning: all returns are equal (rows that are cut lose theirs): little can be learned" in report


def make_policy(lm, two_qs=True):
    """Heads with values of about 1, and targets of their own."""
    policy = ilql.PolicyWithQ(lm, two_qs)
    heads = policy.v_head, policy.q_heads, policy.target_q_heads
    for number, weight in enumerate(nn.ModuleList(heads).parameters()):
        weight.data = random(*weight.shape, seed=number).to(weight) * 0.3
    return policy.eval()


def slow_action(policy, state, action, nll, goal, is_end, args):
    """The terms of one action; goal: what Q is regressed on."""
    v = policy.v_head(state)[0]
    qs = [head(state) for head in policy.q_heads]
    chosen = torch.stack([q[action] for q in qs])
    targets = [head(state)[action].item() for head in policy.target_q_heads]
    target_q = min(targets)
    advantage = target_q - v.item()
    weight = min(math.exp(args.awac_beta * advantage), args.awac_clip)
    loss_q = ((chosen - goal) ** 2).sum()
    loss_v = (args.tau if advantage >= 0 else 1 - args.tau) * (target_q - v) ** 2
    loss_cql = sum(q.exp().sum().log() - q[action] for q in qs)
    loss_awac = weight * nll
    loss = loss_q + loss_v + args.cql_scale * loss_cql + args.awac_scale * loss_awac
    losses = {"loss": loss, "loss_q": loss_q, "loss_v": loss_v, "loss_cql": loss_cql, "loss_awac": loss_awac}
    error = (chosen - goal).abs().mean().item()
    statistics = {
        "values": v.item(),
        "qvalues": chosen.mean().item(),
        "target_qvalues": target_q,
        "advantages": advantage,
        "target_gap": chosen.mean().item() - sum(targets) / len(targets),
        "awac_weight": weight,
        "squared_values": v.item() ** 2,
        "squared_advantages": advantage**2,
        "end_errors": error if is_end else 0.0,
        "inner_errors": 0.0 if is_end else error,
        "ends": float(is_end),
    }
    return losses | {name: torch.tensor(value, dtype=torch.float64) for name, value in statistics.items()}


def slow_terms(policy, episodes, args):
    """What `ilql_losses` returns: each row alone, each action alone, all numbers of a head."""
    found = []
    for episode in episodes:
        output = policy.lm(input_ids=torch.tensor([episode.ids]), output_hidden_states=True, use_cache=False)
        hidden = output.hidden_states[-1][0]
        states = [hidden[place - 1] for place in episode.actions] + [hidden[-1]]
        for number, place in enumerate(episode.actions):
            is_end = episode.done and number + 1 == len(episode.actions)
            goal = episode.rewards[number]
            if not is_end:
                goal += args.gamma * policy.v_head(states[number + 1]).item()
            action = episode.ids[place]
            nll = -output.logits[0, place - 1].softmax(0)[action].log()
            found.append(slow_action(policy, states[number], action, nll, goal, is_end, args))
    return {name: torch.stack([terms[name] for terms in found]) for name in TERMS}


def losses(policy, episodes):
    return ilql.ilql_losses(policy, ilql.Batch.of(episodes, PAD, "cpu"), ARGS)


def gradients(policy, loss):
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    return torch.autograd.grad(loss, trained, retain_graph=True)


def weighted_sum(terms):
    names = ["loss", *LOSSES]
    return sum((terms[name] * random(len(terms[name]), seed=i)).sum() for i, name in enumerate(names))


@pytest.mark.parametrize(
    ("name", "two_qs", "plain_output"), [("gpt2", True, True), ("llama", False, True), ("qwen3", True, False)]
)
def test_ilql_losses_are_the_slow_definition(monkeypatch, build_model, name, two_qs, plain_output):
    """And their gradients: the weight of imitation and the targets have none. At most 3 rows of Q at a time."""
    monkeypatch.setattr(logprobs, "CHUNK", 3 * 25 + 7)
    chunks = recorded(monkeypatch, ilql, "cql_loss")
    policy = make_policy(build_model(name, torch.float64), two_qs)
    policy.lm.plain_output = plain_output
    slow = slow_terms(policy, EPISODES, ARGS)
    clipped = slow["awac_weight"] == 0.8
    assert clipped.any() and not clipped.all() and (slow["advantages"] < 0).any() and len(clipped) == 32
    found = losses(policy, EPISODES)
    assert [*found] == TERMS
    for term in TERMS:
        close(found[term].detach(), slow[term].detach(), 1e-9)
        assert not found[term].requires_grad or term in ["loss", *LOSSES, "values"]
    assert [len(args[1]) for args, _ in chunks] == [*[3] * 10, 2] * (1 + two_qs)
    pairs = zip(gradients(policy, weighted_sum(found)), gradients(policy, weighted_sum(slow)), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= 1e-9 * other.abs().max()


def test_heads_at_the_start(build_model):
    """Keyed by the seed; targets are copies without a gradient. In float32 beside weights of 16 bits."""
    lm = build_model("llama", torch.bfloat16)
    one, same, other = (ilql.PolicyWithQ(lm, seed=seed).head_weights() for seed in (1, 1, 2))
    assert len(one) == 4 * 5 and equal(one, same)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["q_heads.0.0.weight"], one["q_heads.1.0.weight"])
    policy = ilql.PolicyWithQ(lm)
    for online, target in zip(policy.q_heads.parameters(), policy.target_q_heads.parameters(), strict=True):
        assert torch.equal(online, target) and online.data_ptr() != target.data_ptr()
        assert online.requires_grad and not target.requires_grad and online.dtype == torch.float32
    shapes = [[*weight.shape] for weight in policy.v_head.parameters()]
    assert shapes == [[24, 12], [24], [1, 24], [1]] and [*policy.q_heads[0][-1].weight.shape] == [25, 24]
    losses(policy, EPISODES)["loss"].sum().backward()
    with torch.no_grad(), policy.guided(1.0):
        assert policy.lm(IDS).logits.dtype == torch.float32
    assert ilql.cql_loss(random(2, 11).bfloat16(), IDS[0, :2]).dtype == torch.float32


def test_heads_keep_float32_under_autocast(build_model):
    policy = make_policy(build_model("gpt2"))
    seen = []
    for head in (policy.v_head, *policy.q_heads, *policy.target_q_heads):
        head[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        losses(policy, EPISODES)
        with policy.guided(1.0):
            policy.lm(IDS)
    assert seen == [torch.float32] * (5 + 3)


def test_heads_of_another_number_are_refused(build_model, letters, tmp_path):
    model = build_model("gpt2")
    args = ilql.Args(model=save(tmp_path, model, letters), dataset=[])
    safetensors.torch.save_file(ilql.PolicyWithQ(model, two_qs=False).head_weights(), tmp_path / ilql.HEADS_FILE)
    with pytest.raises(InputError, match=f"^--model {tmp_path} cannot be loaded: it was written with --no-two-qs"):
        ilql.load(args, str(tmp_path), "cpu")


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6]])
BIGRAMS = random(25, 25, seed=4) > 0.3
BIGRAMS[:, :3] = False  # something is always allowed
ROW_OF_TRUE = BIGRAMS | (torch.arange(25) == 5)[:, None]
FILTERED = {"top_k": 5, "top_p": 0.8, "logit_mask": ROW_OF_TRUE}


@pytest.mark.parametrize(
    ("name", "two_qs", "options"),
    [("gpt2", True, {}), ("llama", False, {"top_p": 0.7}), ("qwen3", True, FILTERED)],
    ids=["plain", "top-p", "filtered"],
)
def test_guided_logits_at_every_position(build_model, name, two_qs, options):
    """A row of True in a mask forbids nothing."""
    policy = make_policy(build_model(name, torch.float64), two_qs)
    filters = dict(options)
    mask = filters.pop("logit_mask", torch.zeros(25, 25, dtype=torch.bool))
    with torch.no_grad():
        output = policy.lm(input_ids=IDS, output_hidden_states=True)
        with policy.guided(1.5, **options) as inside:
            shaped = policy.lm(input_ids=IDS).logits
            positional = policy.lm(IDS).logits
            kept = policy.lm(input_ids=IDS, logits_to_keep=2).logits
    assert inside is policy and torch.equal(shaped, positional) and shaped.dtype == torch.float64
    close(kept, shaped[:, -2:], 1e-9)
    for row, place in product(range(3), range(7)):
        state = output.hidden_states[-1][row, place]
        heads = [head(state).tolist() for head in policy.target_q_heads]
        q = [min(values) for values in zip(*heads, strict=True)]
        v = policy.v_head(state).item()
        forbidden = [] if IDS[row, place] == 5 else mask[IDS[row, place]].nonzero()[:, 0].tolist()
        expected = slow_shaped(output.logits[row, place].tolist(), q, v, 1.5, **filters, forbidden=forbidden)
        close(shaped[row, place], expected, 1e-9)


def hooks(lm):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in lm.modules()]


def test_guided_leaves_no_hook_behind(build_model):
    """Also after an error, and a forward pass that stops behind the output layer does not disturb the next one."""
    policy = make_policy(build_model("gpt2", torch.float64))
    plain = policy.lm(IDS).logits
    count = hooks(policy.lm)
    with pytest.raises(KeyError), policy.guided(1.0):
        shaped = policy.lm(IDS).logits
        assert hooks(policy.lm) != count and not torch.equal(shaped, plain)
        raise KeyError
    assert hooks(policy.lm) == count and torch.equal(policy.lm(IDS).logits, plain)
    with policy.guided(1.0):
        with pytest.raises(ValueError):
            policy.lm(IDS[1:], labels=IDS)
        assert torch.equal(policy.lm(IDS).logits, shaped)


def test_a_logit_mask_becomes_a_tensor(build_model):
    for mask in (BIGRAMS, BIGRAMS.numpy(), BIGRAMS.tolist()):
        assert torch.equal(ilql.check_logit_mask(mask, build_model()), BIGRAMS)
    assert ilql.check_logit_mask(None, build_model()) is None
    for mask in (BIGRAMS[:, :-1], BIGRAMS.long(), BIGRAMS[0], [[True], [True, False]], "mask.pt"):
        with pytest.raises(InputError, match=r"^--logit-mask must be bool of shape \[25, 25\]"):
            ilql.check_logit_mask(mask, build_model())


def test_headline():
    data = SimpleNamespace(eval_sets={"x": [], "y": []})
    for expected, metrics in (
        ("eval/a@beta=4", {"eval/a@beta=0": 5, "eval/b@beta=0": 9, "eval/a@beta=4": 7, "eval/b@beta=4": 8}),
        ("eval/a@beta=0", {"eval/a@beta=0": 7, "eval/a@beta=4": 2, "eval/a@beta=8": 7}),  # of equal ones the first
        ("eval/a@beta=0", {"eval/a@beta=0": 1, "eval/a@beta=4": INF, "eval/a@beta=8": 0.5}),
        ("eval/wer@beta=4", {"eval/wer@beta=0": 0.5, "eval/wer@beta=4": 0.2, "eval/wer@beta=8": 0.3}),
        ("eval/x/loss", {"eval/a@beta=0": NAN, "eval/x/loss": 1, "losses/loss": 2}),
        ("losses/loss", {"eval/y/loss": 1, "losses/loss": 2}),
    ):
        assert ilql.headline(metrics, data, "wer" in expected) == expected
