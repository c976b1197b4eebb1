"""What grpo.py computes: `python -m pytest tests/test_grpo.py`"""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from harness import ROOT, lines
from helpers import close, lines_of, log, random, recorded, rolled, tensor, trained_ids, weights
from test_invariants import PROMPTS, adamw, slow_step, vowels

from algos import grpo, ppo
from benchmarks.tasks import randomwalks
from common import seeding
from common.errors import InputError
from common.lm.load import load_model

B, R, G = 5, 7, 3
LENGTHS = [1, 2, 4, 7, 3]
MASK = torch.arange(R) < torch.tensor(LENGTHS)[:, None]


def lazy(samples, prompts, outputs, **columns):
    """All responses to a prompt of one letter are worth the same, a number that a mean of three rounds."""
    scores = []
    for prompt, score in zip(prompts, vowels(samples, outputs), strict=True):
        scores.append(0.1 if len(prompt) == 1 else score)
    return scores


def args_of(**flags):
    return grpo.Args(**{"model": "model", "dataset": [{"prompt": "b"}], "reward": vowels} | flags)


def run_grpo(model, run_dir, **flags):
    """Two iterations of 7 groups of 3 episodes in a single step each, without a reference, unless flags say otherwise.
    adam_eps: see ROUNDING_OF_ADAM."""
    settings = {
        "dataset": [{"prompt": p} for p in PROMPTS], "reward": lazy, "dtype": "float64", "eval_every": 0,
        "group_size": G, "total_episodes": 42, "rollout_batch_size": 21, "batch_size": 21, "micro_batch_size": 21,
        "temperature": 0.7, "max_new_tokens": 11, "lr": 1e-2, "adam_betas": (0.9, 0.95), "adam_eps": 1e-6,
        "kl_coef": 0.0, "save_every": 0, "threads": 1,
    }  # fmt: skip
    return grpo.main(grpo.Args(model=model, run_dir=str(run_dir), **settings | flags))


def test_advantages_by_hand():
    """A group with mean 3 and unbiased variance (4 + 1 + 0 + 9) / 3, and one with mean 0.5 and variance 1 / 3."""
    scores = tensor(1, 2, 3, 6, 0, 1, 1, 0)
    first = math.sqrt(14 / 3) + 1e-4
    second = math.sqrt(1 / 3) + 1e-4
    expected = [-2 / first, -1 / first, 0, 3 / first, -0.5 / second, 0.5 / second, 0.5 / second, -0.5 / second]
    close(grpo.group_advantages(scores, 4, "std"), expected)
    close(grpo.group_advantages(scores, 4, "mean"), [-2, -1, 0, 3, -0.5, 0.5, 0.5, -0.5])
    close(grpo.group_advantages(scores, 4, "loo"), [1 - 11 / 3, 2 - 10 / 3, 0, 6 - 2, -2 / 3, 2 / 3, 2 / 3, -2 / 3])
    close(grpo.group_advantages(scores, 4, "maxrl"), [-2 / 3, -1 / 3, 0, 1, -1, 1, 1, -1])
    assert not grpo.group_advantages(torch.zeros(5), 5, "maxrl").any()


def test_a_negative_score_of_maxrl_keeps_what_was_trained(gpt2_dir, tmp_path):
    """The first iteration is saved, though --save-every asks for none."""
    scores = iter([1.0, -1.0])

    def falling(outputs, **columns):
        return [next(scores)] + [2.0] * (len(outputs) - 1)

    with pytest.raises(InputError, match="a score is -1: with --advantage-kind maxrl, none may be below 0"):
        run_grpo(gpt2_dir, tmp_path / "run", advantage_kind="maxrl", reward=falling)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("kind", ["std", "batch", "mean", "loo"])
def test_a_group_of_equal_scores_is_exactly_zero(kind):
    """Also where the mean is rounded, as that of three times 0.1 is."""
    rounded = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert (rounded - rounded.mean(1, keepdim=True)).any()
    scores = tensor(0.1, 1 / 3, -0.7, 1e8 + 0.1, 0.0).repeat_interleave(3)
    assert not grpo.group_advantages(scores, 3, kind).any()
    mixed = torch.cat([scores, random(3)])
    assert grpo.group_advantages(mixed, 3, kind).count_nonzero() == 3


def test_loss_by_hand():
    """The objective is flat where the ratio has gone far enough in the direction of A, and only there."""
    ratio = tensor(1.5, 1.25, 0.5, 1.5, 0.5, 0.75, 1.0, 1.0)
    advantages = tensor(2, 2, 2, -2, -2, -2, 3, -3)
    new = (ratio.log() - 1.7).requires_grad_()
    loss = grpo.clip_loss(new + 1.7, advantages, 0.2, 0.3)
    close(loss, [-2.6, -2.5, -1.0, 3.0, 1.6, 1.6, -3.0, 3.0])
    loss.sum().backward()
    close(new.grad, [0.0, -2.5, -1.0, 3.0, 0.0, 0.0, -3.0, 3.0])


def test_cispo_by_hand():
    """Every token keeps the gradient of its log-probability, times a ratio of at most 1.25 and at least 0.5."""
    ratio = tensor(1.5, 1.0, 0.25, 1.5, 0.75)
    advantages = tensor(2, 2, 2, -2, -2)
    new = (ratio.log() - 1.5).requires_grad_()
    loss = grpo.cispo_loss(new, new + 1.5, advantages, 0.5, 0.25)
    weights = tensor(1.25, 1.0, 0.5, 1.25, 0.75)
    close(loss, -advantages * weights * (ratio.log() - 1.5))
    loss.sum().backward()
    close(new.grad, [-2.5, -2.0, -1.0, 2.5, 1.5])


def test_sequence_means_are_the_slow_definition():
    x = random(sum(LENGTHS))
    means = grpo.sequence_means(x, [*LENGTHS, 0])  # a line without labels is an empty row
    expected = []
    for row in x.split(LENGTHS):
        expected += [sum(row.tolist()) / len(row)] * len(row)
    close(means, expected)


def test_k3_is_that_of_ppo():
    new = random(B, R)
    ref = random(B, R, seed=1)
    kl = grpo.kl_k3(new, ref)
    assert torch.equal(kl, ppo.kl_penalty(new, ref, "k3"))
    assert (kl > 0).all() and not grpo.kl_k3(new, new).any()
    tiny = grpo.kl_k3(tensor(-2.0), tensor(-2.0 + 1e-7))
    close(tiny, [5e-15], 1e-20)  # exp(x) - 1 would leave nothing but rounding


def test_weights_by_hand():
    lengths = torch.tensor([1, 2, 5])
    close(grpo.token_weights(lengths, "sequence", 7), [1 / 3, 1 / 6, 1 / 15])
    close(grpo.token_weights(lengths, "token", 7), [1 / 8, 1 / 8, 1 / 8])
    close(grpo.token_weights(lengths, "constant", 7), [1 / 21, 1 / 21, 1 / 21])


# GRPOTrainer._compute_loss of TRL 1.16 (trl/trainer/grpo_trainer.py, tag v1.16.0), called on an object that has nothing
# but the attributes it reads: `_get_per_token_logps_and_entropies` returns the table below, float64, one process, one
# micro-batch, training mode, no entropy bonus, max_completion_length 11, num_items_in_batch all 17 tokens. A row has
# our flags, those of TRL, the loss and its gradient with respect to the log-probabilities of the 17 tokens; the rows
# with a --correction are those of test_offpolicy.py. The weights of cispo are at most 1.2, TRL's epsilon_high, and at
# least 0.
GOLDEN = lines(ROOT / "tests/golden/trl.jsonl")
PLAIN = [row for row in GOLDEN if "correction" not in row["flags"]]


def table(a, b, c, scale, shift):
    """(B, R) of numbers without a generator."""
    return tensor(*[[shift + scale * math.sin(a * i + b * t + c) for t in range(R)] for i in range(B)])


OLD = table(1.7, 2.3, 0.4, 0.9, -1.3)
NEW = OLD + table(0.9, 3.1, 1.1, 0.5, 0.05)
REF = NEW + table(2.9, 1.3, 0.2, 0.7, 0.1)
ADVANTAGES = tensor(1.5, -0.75, 0.5, -1.25, 2.0)


def losses_of(monkeypatch, new, args, **columns):
    """What grpo.losses says of log-probabilities (B, R), as of a model that gives them, in two micro-batches. columns:
    of a rollout function, with a value for each row."""
    token_weights = grpo.token_weights(torch.tensor(LENGTHS), args.loss_mean, args.max_new_tokens)
    episodes = []
    for row, length in enumerate(LENGTHS):
        numbers = {"advantage": ADVANTAGES[row].item(), "weight": token_weights[row].item()}
        numbers |= {"logprobs": OLD[row, :length], "ref_logprobs": REF[row, :length]}
        own = {"row": row} | {name: values[row] for name, values in columns.items()}
        episodes.append(grpo.Episode(own, [0], [0] * length, [True] * length, True, 0.0, **numbers))

    def line_logprobs(model, lines, *_):
        logprobs = torch.cat([new[each.row["row"], : each.length] for each in grpo.episodes_of(lines)])
        return logprobs, None, logprobs.detach()

    monkeypatch.setattr(grpo, "line_logprobs", line_logprobs)
    counts = {"steps": 1, "sequences": B, "tokens": sum(LENGTHS), "with an advantage": sum(LENGTHS)}
    counts["of a sampler"] = len(columns)
    loss = 0.0
    sums = defaultdict(float)
    for rows in ([3, 0], [4, 1, 2]):
        share, metrics = grpo.losses(None, lines_of(episodes[row] for row in rows), counts, args)
        loss = loss + share
        for name, value in metrics.items():
            sums[name] += value
    return loss, sums


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: "-".join(map(str, row["trl"].values())))
def test_losses_are_those_of_trl(monkeypatch, row):
    args = args_of(max_new_tokens=11, ppo_epochs=2, **row["flags"])
    new = NEW.clone().requires_grad_()
    loss, terms = losses_of(monkeypatch, new, args)
    assert loss.item() == pytest.approx(row["loss"], rel=1e-9)
    loss.backward()
    close(new.grad[MASK], row["gradient"], 1e-9)
    assert not new.grad[~MASK].any()
    total = terms["loss/policy"] + args.kl_coef * terms.get("loss/kl", 0)
    assert total.item() == pytest.approx(row["loss"], rel=1e-9)
    if args.policy_loss == "cispo":  # whatever the sign of the advantage
        ratio = (NEW - OLD)[MASK].exp()
        share = ((ratio < 1 - args.cliprange) | (ratio > 1 + args.cliprange_high)).double().mean().item()
        assert terms["policy/clipfrac"] == pytest.approx(share) and share > 0


def test_advantages_are_those_of_trl():
    """The lines of GRPOTrainer._generate_and_score_completions (v1.16.0) from the rewards to
    `nan_to_num`, in float64: scale_rewards group and batch."""
    golden = {
        "std": [
            -1.409061876724, 0.1959344801989, 1.046075971701, 0.7415277705017, -0.5744763456777, 1.345668914859,
            0.6779475620782, -0.1889320289268, -0.8472628411388, -0.9874216068718, -0.7390303101155,
            -0.8999277527582, -0.3903089259392, 0.5501444730749, 1.479122515738,
        ],
        "batch": [
            -0.7724087689296, 0.1074058656623, 0.5734299301227, 0.4064850251091, -0.3149120519646, 1.453842411726,
            0.7324453346525, -0.2041195969932, -0.9153712616272, -1.066796887758, -0.6955245875945, -0.8469502137257,
            -0.3673319632937, 0.5177582062812, 1.392048558333,
        ],
    }  # fmt: skip
    scores = tensor(*[math.sin(2.1 * i + 0.7 * g) for i, g in itertools.product(range(3), range(5))])
    close(grpo.group_advantages(scores, 5, "std"), golden["std"], 1e-11)
    close(grpo.group_advantages(scores, 5, "batch"), golden["batch"], 1e-7)  # TRL's factor 15 / 14 is float32


def test_the_loss_of_one_step_is_minus_the_mean_advantage(monkeypatch, gpt2_dir, tmp_path):
    """Exactly: the update's own log-probabilities are compared with themselves."""
    for name in ("make_reference", "kl_k3"):  # without a KL there is no reference
        monkeypatch.delattr(grpo, name)
    rollouts = rolled(monkeypatch, grpo)
    scored = recorded(monkeypatch, grpo, "store_logprobs")
    micro = recorded(monkeypatch, grpo, "losses")
    _, run_dir = run_grpo(gpt2_dir, tmp_path / "run", loss_mean="token", micro_batch_size=5)
    assert not scored
    assert sum(len(lines) for (_, lines, *_), _ in micro) == 2 * 15  # of 21 rows, those with an advantage
    for record, (_, episodes) in zip(log(run_dir), rollouts, strict=True):
        assert record["policy/ratio"] == 1
        assert record["policy/clipfrac"] == record["policy/approxkl"] == 0
        assert record.keys().isdisjoint(["objective/kl", "loss/kl"])
        assert record["loss/total"] == record["loss/policy"]
        expected = -sum(each.advantage * each.length for each in episodes) / sum(each.length for each in episodes)
        assert record["loss/policy"] == pytest.approx(expected, rel=1e-9)
        assert abs(expected) > 1e-3
        assert record["groups/equal"] == pytest.approx(2 / 7)


@pytest.mark.parametrize(
    ("loss_mean", "level", "kind", "beta"),
    [("sequence", "token", "std", 0.3), ("token", "sequence", "mean", 0.0), ("constant", "token", "loo", 0.3)],
)
def test_the_update_is_the_slow_definition(monkeypatch, gpt2_dir, tiny_dirs, tmp_path, loss_mean, level, kind, beta):
    """All six steps of an iteration, row by row without padding, from the sampled ids and the scores alone. The script
    leaves out rows without an advantage where there is no KL."""
    micro = recorded(monkeypatch, grpo, "losses")
    rollouts = rolled(monkeypatch, grpo)
    flags = {"loss_mean": loss_mean, "ratio_level": level, "advantage_kind": kind, "kl_coef": beta}
    flags |= {"batch_size": 7, "micro_batch_size": 2, "ppo_epochs": 2, "total_episodes": 21, "max_grad_norm": 0.5}
    flags |= {"cliprange": 0.05, "cliprange_high": 0.1, "lr_schedule": "linear", "weight_decay": 0.1}
    flags |= {"ref_model": tiny_dirs["llama"] if beta else None}
    metrics, run_dir = run_grpo(gpt2_dir, tmp_path / "run", **flags)
    [(_, episodes)] = rollouts
    queries = [episode.query for episode in episodes]
    responses = trained_ids(episodes)
    scores = [episode.score for episode in episodes]
    num_rows = sum(len(lines) for (_, lines, *_), _ in micro)
    advantages = grpo.group_advantages(tensor(*scores), G, kind).tolist()
    assert num_rows == 2 * (21 if beta else np.count_nonzero(advantages)) and 0 in advantages
    model, _ = load_model(args_of(dtype="float64"), gpt2_dir)
    ref, _ = load_model(args_of(dtype="float64"), tiny_dirs["llama"])

    def tokens_of(lm, row):
        """The distributions of the tokens of a response."""
        logits = lm(torch.tensor([queries[row] + responses[row]])).logits[0].double() / 0.7
        return torch.distributions.Categorical(logits=logits[len(queries[row]) - 1 : -1])

    def logprobs_of(lm, row):
        return tokens_of(lm, row).log_prob(torch.tensor(responses[row]))

    with torch.no_grad():
        old = [logprobs_of(model, row) for row in range(21)]
        reference = [logprobs_of(ref, row) for row in range(21)]
    optimizer = adamw(model, 0.1, betas=(0.9, 0.95), eps=1e-6)
    steps = []
    for epoch in range(2):
        order = seeding.rng(1, "minibatches", 1, epoch).permutation(21)
        steps += [order[:7], order[7:14], order[14:]]
    entropies = []  # of tokens, in all steps
    nlls = []  # the same
    for number, rows in enumerate(steps):
        total_length = sum(len(responses[row]) for row in rows)
        loss = 0.0
        for row in rows:
            new = logprobs_of(model, row)
            if beta or advantages[row]:
                entropies += tokens_of(model, row).entropy().tolist()
                nlls += (-old[row]).tolist()
            length = len(new)
            log_ratio = new - old[row]
            if level == "sequence":
                log_ratio = log_ratio.mean().expand(length)
            ratio = log_ratio.exp()
            a = advantages[row]
            tokens = -torch.minimum(a * ratio, a * ratio.clamp(0.95, 1.1))
            x = new - reference[row]
            tokens = tokens + beta * ((-x).exp() - 1 + x)
            if loss_mean == "sequence":
                loss = loss + tokens.mean() / 7
            elif loss_mean == "token":
                loss = loss + tokens.sum() / total_length
            else:
                loss = loss + tokens.sum() / (7 * 11)
        norm = slow_step(model, optimizer, loss, 1e-2 * (1 - number / 6), 0.5)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)
    after = weights(run_dir)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(after[f"model.{name}"], weight.detach(), rtol=1e-7, atol=1e-8)
    kls = [(a - b).sum().item() for a, b in zip(old, reference, strict=True)]
    assert metrics.get("objective/kl", 0) == pytest.approx(sum(kls) / 21 if beta else 0, rel=1e-9)
    assert metrics["policy/entropy"] == pytest.approx(np.mean(entropies), rel=1e-9)
    assert metrics["policy/nll"] == pytest.approx(np.mean(nlls), rel=1e-9)
    assert metrics["objective/scores"] == pytest.approx(np.mean(scores), rel=1e-9)
    assert metrics["objective/scores_std"] == pytest.approx(np.std(scores), rel=1e-9)
    assert metrics["policy/clipfrac"] > 0.05


def test_equal_scores_teach_nothing(monkeypatch, gpt2_dir, tmp_path, capsys):
    """A single row is left for the forward pass, and the weights stay as they are, bit for bit: what differs between
    the responses of two iterations is their draws."""
    micro = recorded(monkeypatch, grpo, "losses")
    rollouts = rolled(monkeypatch, grpo)
    metrics, run_dir = run_grpo(gpt2_dir, tmp_path / "run", dataset=[{"prompt": "b"}])
    one, two = (trained_ids(episodes) for _, episodes in rollouts)
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 7
    assert [len(lines) for (_, lines, *_), _ in micro] == [1, 1]
    before, _ = load_model(args_of(dtype="float64"), gpt2_dir)
    after = weights(run_dir)
    assert all(torch.equal(after[f"model.{name}"], weight) for name, weight in before.named_parameters())
    assert metrics["groups/equal"] == 1 and metrics["optim/grad_norm"] == 0
    assert metrics["loss/total"] == 0 and "policy/ratio" not in metrics
    assert capsys.readouterr().out.count(grpo.ALL_EQUAL.format(1)) == 1


def test_equal_scores_are_told_again(gpt2_dir, tmp_path, capsys):
    """After five iterations in a row, once: here they begin with the third."""
    calls = []

    def reward(outputs, **columns):
        calls.append(1)
        return [float(len(calls) < 3 and number % 2) for number in range(len(outputs))]

    run_grpo(gpt2_dir, tmp_path / "run", reward=reward, total_episodes=21 * 9)
    out = capsys.readouterr().out
    assert len(calls) == 9 and out.count("have had equal scores") == out.count(grpo.ALL_EQUAL.format(3)) == 1


def test_without_a_reward_the_reference_is_the_teacher(gpt2_dir, tiny_dirs, tmp_path, capsys):
    """Nothing is said of equal groups, no model is the best, and the KL falls."""
    flags = {"reward": None, "ref_model": tiny_dirs["llama"], "kl_coef": 1.0, "unbiased_kl": True, "eval_every": 1}
    metrics, run_dir = run_grpo(gpt2_dir, tmp_path / "run", total_episodes=21 * 4, **flags)
    first, *_, last = (record["objective/kl"] for record in log(run_dir) if "objective/kl" in record)
    assert 0 < last < 0.9 * first
    assert metrics["groups/equal"] == 1 and metrics["policy/entropy"] > 0
    out = capsys.readouterr().out
    assert "equal scores" not in out and "groups/equal" not in out and "worse" not in out
    assert f"objective/kl {first:.3g} -> {last:.3g}\n" in out
    assert not (run_dir / "hf_model_best").exists()


@pytest.mark.parametrize("flags", [{}, {"ref_model": "teacher", "kl_coef": 0.04}])
def test_a_reward_that_was_forgotten_is_missing(flags):
    with pytest.raises(InputError, match="--reward is missing"):
        args_of(reward=None, **flags)


def test_every_prompt_has_a_group_side_by_side(monkeypatch, gpt2_dir, tmp_path):
    """The next five prompts of the stream, three responses each; the reward sees the columns of their row."""
    rows = [{"prompt": p, "number": n} for n, p in enumerate(PROMPTS)]
    seen = []

    def reward(prompts, outputs, number, **columns):
        seen.append((prompts, number))
        return [float(n) + 0.01 * len(o) for n, o in zip(number, outputs, strict=True)]

    rollouts = rolled(monkeypatch, grpo)
    flags = {"dataset": rows, "reward": reward, "rollout_batch_size": 15, "batch_size": 15, "total_episodes": 45}
    run_grpo(gpt2_dir, tmp_path / "run", **flags)
    places = np.repeat(grpo.draw_rows(1, 7, 0, 15), G).reshape(3, 15).tolist()
    for numbers, (prompts, shown), (arguments, episodes) in zip(places, seen, rollouts, strict=True):
        *_, rows_of_batch, given, _, _, _ = arguments
        assert rows_of_batch == [rows[n] for n in numbers]
        assert shown == numbers
        assert prompts == [PROMPTS[n] for n in numbers]
        assert [math.floor(episode.score) for episode in episodes] == numbers
        queries = [episode.query for episode in episodes]
        assert queries == given == [randomwalks.tokenizer()(prompt)["input_ids"] for prompt in prompts]
        assert len({*zip(numbers, map(tuple, trained_ids(episodes)), strict=True)}) > 5 + 3
