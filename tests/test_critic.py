"""Critics of ppo.py with a rate, a warm-up and a trunk of their own: `python -m pytest tests/test_critic.py`"""

import pytest
import torch
from helpers import equal, log, rolled, save, tensor, weights
from test_invariants import run_ppo
from test_models import run
from test_ppo_modes import save_classifier
from test_reward import alone, plain, run_reward
from transformers import AutoModelForSequenceClassification

from algos import ppo
from common.errors import InputError


@pytest.fixture(scope="module")
def judge(tiny_dirs, tmp_path_factory):
    """The export of a reward model of another width than the policy: GPT-2 beside Llama."""
    folder = tmp_path_factory.mktemp("judge")
    return str(run_reward(tiny_dirs["gpt2"], folder / "run")[1] / "hf_model")


def by_hand(critic, episode):
    """The values of an episode: the critic's scores of what stands before each token, each read alone."""
    ids = [*episode.query, *episode.response]
    return tensor(*(alone(critic, ids[:end]) for end in range(len(episode.query), len(ids))))


def test_the_head_of_a_reward_model_is_the_value_head(monkeypatch, judge, tiny_dirs, tmp_path):
    """Its values are its scores. Another run goes on from the exported critic."""
    rollouts = rolled(monkeypatch, ppo)
    flags = {"total_episodes": 10, "micro_batch_size": 3}
    _, first = run_ppo(tiny_dirs["llama"], tmp_path / "first", value_model=judge, **flags)
    run_ppo(tiny_dirs["llama"], tmp_path / "second", value_model=str(first / "value_model"), **flags)
    for (_, episodes), folder in zip(rollouts, (judge, first / "value_model"), strict=True):
        critic = plain(folder)
        assert max(episode.length for episode in episodes) > 3
        for episode in episodes:
            torch.testing.assert_close(episode.values, by_hand(critic, episode), rtol=1e-9, atol=1e-9)
    moved = weights(first / "value_model")
    before = weights(judge)
    assert all((moved[name] - weight).abs().max() > 1e-4 for name, weight in before.items() if "attn.bias" not in name)
    assert not list(first.glob("hf_model/value_head*"))


# Each with what the policy's run has, too: a rate of its own and a first iteration without the policy.
CHOICES = {
    "head": {},
    "own": {"value_model": "gpt2"},
    "lora": {"value_model": "gpt2", "lora_r": 3},
    "frozen": {"value_model": "judge", "num_layers_unfrozen": 1},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_with_a_critic_goes_on_bitwise(judge, gpt2_dir, tmp_path, choice):
    """The warm-up trains the critic alone; then the policy begins, with its schedule. Checkpoints go on bitwise."""
    flags = dict(CHOICES[choice], value_lr=1e-2, value_warmup=1, total_episodes=24, weight_decay=0.1)
    flags["value_model"] = {"gpt2": gpt2_dir, "judge": judge}.get(flags.get("value_model"))
    flags |= {"kl_target": 1e-6, "kl_horizon": 8, "keep_checkpoints": 9}
    _, whole = run(ppo, gpt2_dir, tmp_path / "whole", **flags)
    records = [record for record in log(whole) if "optim/lr" in record]
    rates = [(record["optim/lr"], record["optim/value_lr"]) for record in records]
    assert rates == [pytest.approx((3e-2 * x, 1e-2 * y)) for x, y in ((0, 5 / 6), (3 / 4, 3 / 6), (1 / 4, 1 / 6))]
    assert [record["objective/kl_coef"] for record in records[:2]] == [0.05, 0.05]
    places = [whole / f"checkpoints/step_0000000{step}" for step in (2, 4)]
    warm, trained = map(weights, places)
    before = weights(gpt2_dir)
    policy = [name for name in warm if name.startswith("model.lm.")]
    assert policy and len(warm) > len(policy) and not any(name.startswith("optim.lm.") for name in warm)
    for name in policy:
        old = before.get(f"model.{name.removeprefix('model.lm.')}", warm[name])
        assert torch.equal(warm[name], old) and ("attn.bias" in name or not torch.equal(trained[name], old)), name
        assert "lora_B" not in name or not warm[name].any()
    for name in warm.keys() - {*policy}:
        assert not torch.equal(warm[name], trained[name]) or "attn.bias" in name, name
    _, other = run(ppo, gpt2_dir, tmp_path / "run", resume=str(places[0]), **flags)
    assert 0 < len(log(other)) < len(log(whole)) and log(other) == log(whole)[-len(log(other)) :]
    for folder in {path.name for path in whole.glob("*_model")}:
        assert equal(weights(other / folder), weights(whole / folder)), folder
    assert (whole / "value_model").exists() == (choice != "head")


def test_critics_that_do_not_fit(gpt2_dir, build_model, letters, tmp_path):
    save_classifier(tmp_path / "bert", "Bert", "<pad>")
    letters.add_tokens(["qu"])
    save(tmp_path / "words", build_model(), letters)
    save(tmp_path / "three", AutoModelForSequenceClassification.from_pretrained(gpt2_dir, num_labels=3), letters)
    _, adapter = run(ppo, gpt2_dir, tmp_path / "run", lora_r=3, total_episodes=8)
    for path in (tmp_path / "bert", tmp_path / "words", tmp_path / "three", adapter / "hf_model"):
        with pytest.raises(InputError, match="--value-model .*(is no decoder, or its|cannot be loaded)"):
            run_ppo(gpt2_dir, tmp_path / "refused", value_model=str(path))
    with pytest.raises(InputError, match="--value-warmup 2 leaves none of 2 iterations to the policy"):
        run_ppo(gpt2_dir, tmp_path / "refused", value_warmup=2)
