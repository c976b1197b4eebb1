"""What ppo.py does on request: `python -m pytest tests/test_ppo_modes.py`"""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from helpers import EOS, lines_of, log, recorded, rolled, save, trained_ids, weights
from test_invariants import run_ppo
from test_models import more_vowels
from test_reward import alone, reward_args
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from algos import ppo
from benchmarks.tasks import randomwalks
from common.lm.classifier import RewardModel
from common.lm.structure import blocks, freeze

LAYERS = 3
SIZES = {"hidden_size": 12, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "max_position_embeddings": 32}
HEADS = SIZES | {"intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 6}
FAMILIES = {
    "OPT": SIZES | {"ffn_dim": 20},
    "Gemma3Text": HEADS | {"sliding_window": 4},
    "Bloom": {"hidden_size": 12, "n_layer": LAYERS, "n_head": 2},
}
TOKENS = {"vocab_size": 25, "bos_token_id": 21, "eos_token_id": EOS, "pad_token_id": 23, "initializer_range": 0.3}


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_blocks(family):
    """The top block and the norm behind it are trained."""
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], **TOKENS)
    lm = AutoModelForCausalLM.from_config(config)
    assert len(blocks(lm)) == LAYERS
    freeze(lm, 1)
    trained = {name for name, weight in lm.named_parameters() if weight.requires_grad}
    top_block = {name for name, _ in lm.named_parameters() if f".{LAYERS - 1}." in name}
    assert top_block < trained
    assert all("norm" in name or "ln_f" in name for name in trained - top_block)


def test_blocks_are_not_the_experts_of_a_block():
    experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(11))
    layers = nn.ModuleList(nn.ModuleDict({"experts": experts}) for _ in range(5))
    model = nn.ModuleDict({"norms": nn.ModuleList([nn.LayerNorm(3)]), "layers": layers})
    model.config = SimpleNamespace(is_encoder_decoder=False)
    assert blocks(model) is layers


def test_a_reference_of_its_own_keeps_its_blocks(monkeypatch, gpt2_dir, tiny_dirs, tmp_path):
    """--ref-model beside frozen blocks of the policy, which are not the reference's."""
    rollouts = rolled(monkeypatch, ppo)
    flags = {"ref_model": tiny_dirs["llama"], "num_layers_unfrozen": 1, "total_episodes": 10}
    run_ppo(gpt2_dir, tmp_path / "run", **flags)
    [(_, episodes)] = rollouts
    reference = AutoModelForCausalLM.from_pretrained(tiny_dirs["llama"], dtype=torch.float64).eval()
    with torch.no_grad():
        expected, _, _ = ppo.line_logprobs(reference, lines_of(episodes), 0.7)
    assert (ppo.of_all(episodes, "logprobs") - expected).abs().max() > 0.5
    assert (ppo.of_all(episodes, "ref_logprobs") - expected).abs().max() < 1e-9


def test_rewards_are_whitened(monkeypatch, gpt2_dir, tmp_path):
    """The returns are those of token rewards of deviation 1, their mean as it was. Scores are logged as they came."""
    calls = recorded(monkeypatch, ppo, "estimate_advantages")
    flags = {"whiten_rewards": True, "score_scaling": "running-norm", "min_length_limit": 3, "micro_batch_size": 3}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", gamma=0.9, **flags)
    for record, ((episodes, *_), (raw_scores, _, rewards)) in zip(log(run_dir), calls, strict=True):
        assert record["objective/scores"] == pytest.approx(raw_scores.sum(1).mean().item())
        mask = torch.arange(rewards.shape[1]) < torch.tensor([[episode.length] for episode in episodes])
        kept = rewards[mask].numpy()
        white = torch.zeros_like(rewards)
        white[mask] = torch.from_numpy((kept - kept.mean()) / np.sqrt(kept.var() + 1e-8) + kept.mean())
        _, returns = ppo.gae(white, ppo.on_grid(ppo.of_all(episodes, "values"), mask), mask, 0.9, 0.95)
        torch.testing.assert_close(ppo.of_all(episodes, "returns"), returns[mask], rtol=1e-9, atol=1e-9)


def ragged(rows, seed):
    """Scores (rows, 7), some a number per token; their mask; which were cut; where the last token is."""
    random = np.random.default_rng(seed)
    mask = torch.arange(7) < torch.from_numpy(random.integers(1, 8, (rows, 1)))
    last = mask & ~nn.functional.pad(mask[:, 1:], (0, 1))
    x = torch.from_numpy(random.normal(2, 3, (rows, 7)))
    is_dense = torch.arange(rows)[:, None] % 2 == 1
    scores = torch.where(torch.where(is_dense, mask, last), x, 0.0)
    return scores, mask, torch.from_numpy(random.random(rows) < 0.5), last


@pytest.mark.parametrize("scaling", ["none", "running", "running-norm", "ref", "ref-norm"])
@pytest.mark.parametrize(("clip", "penalty"), [(0.0, 0.0), (0.7, 0.3)])
def test_shape_scores_is_numpys(scaling, clip, penalty):
    """running: the mean and Bessel's deviation of all sums so far (TRL's parallel merge); ref: of the first rollout."""
    args = SimpleNamespace(score_scaling=scaling, score_clip=clip, missing_eos_penalty=penalty)
    moments = [0, 0.0, 0.0]
    seen = []
    for seed, rows in enumerate([3, 7, 11, 5]):
        scores, mask, cut, last = ragged(rows, seed)
        assert {*cut.tolist()} == {True, False}
        if seed == 0 or scaling.startswith("running"):
            seen += scores.sum(1).tolist()
        shaped, moments = ppo.shape_scores(scores, mask, cut, moments, args)
        expected = scores.numpy()
        if scaling.endswith("norm"):
            expected = expected - np.mean(seen) * last.numpy()
        if scaling != "none":
            expected = expected / np.std(seen, ddof=1)
        if clip:
            expected = np.clip(expected, -clip, clip)
        expected = expected - penalty * (last & cut[:, None]).numpy()
        np.testing.assert_allclose(shaped.numpy(), expected, rtol=1e-9, atol=1e-9)
        moments = json.loads(json.dumps(moments))  # as in a checkpoint


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("scaling", "expected"), [("running", 0.1), ("ref-norm", 0.0)])
def test_scores_without_spread_are_not_scaled(scaling, expected, rows):
    args = SimpleNamespace(score_scaling=scaling, score_clip=0.0, missing_eos_penalty=0.0)
    scores = torch.tensor([[0.0, 0.1, 0.0]], dtype=torch.float64).repeat(rows, 1)
    mask = torch.tensor([[True, True, False]]).repeat(rows, 1)
    shaped, _ = ppo.shape_scores(scores, mask, torch.zeros(rows, dtype=torch.bool), [0, 0.0, 0.0], args)
    assert shaped.sum(1).tolist() == pytest.approx([expected] * rows, abs=1e-15)


def test_limits_of_length(monkeypatch, gpt2_dir, tmp_path):
    rollouts = rolled(monkeypatch, ppo)
    run_ppo(gpt2_dir, tmp_path / "run", min_length_limit=3, total_episodes=60)
    lengths = [[episode.length for episode in episodes if not episode.ended] for _, episodes in rollouts]
    assert {*itertools.chain(*lengths)} == {3, 4, 5, 6, 7}
    assert len({*map(tuple, lengths)}) == 6  # drawn anew


def test_a_run_with_stop_strings(monkeypatch, letters, gpt2_dir, tmp_path):
    """The reward sees the text before the stop; the tokens through it are trained; such a row is not cut."""
    pairs = itertools.product("abcdefghij", randomwalks.LETTERS)
    stops = ["".join(pair) for pair in pairs if "".join(pair) not in "<bos> <eos> <pad> <unk>"]
    calls = []

    def reward(samples, prompts, outputs, output_ids):
        assert samples == [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        calls.append((outputs, output_ids))
        return [float(len(output)) for output in outputs]

    rollouts = rolled(monkeypatch, ppo)
    run_ppo(gpt2_dir, tmp_path / "run", stop=tuple(stops), reward=reward, decode_batch_size=3)
    for (_, episodes), (outputs, output_ids) in zip(rollouts, calls, strict=True):
        assert trained_ids(episodes) == output_ids
        assert [episode.score for episode in episodes] == [len(output) for output in outputs]
        texts = letters.batch_decode(output_ids)
        hits = [any(stop in text for stop in stops) for text in texts]
        assert sum(hits) > 1
        for episode, text, hit, output in zip(episodes, texts, hits, outputs, strict=True):
            assert episode.ended == (hit or episode.response[-1] == EOS)
            assert not any(stop in text[:-1] for stop in stops)
            assert output == re.sub("<...>", "", text[:-2] if hit else text)


def test_early_stop_keeps_the_schedule(gpt2_dir, tmp_path):
    flags = {"ppo_epochs": 3, "total_episodes": 30, "lr": 1e-2}
    runs = [run_ppo(gpt2_dir, tmp_path / str(x), early_stop_kl=x, **flags) for x in (0, 1e9, 1e-9)]
    plain, never, early = (log(run_dir) for _, run_dir in runs)
    assert plain == never
    assert [record["policy/epochs"] for record in plain] == [3, 3, 3]
    assert [record["policy/epochs"] for record in early] == [1, 1, 1]
    assert [record["step"] for record in early] == [record["step"] for record in plain] == [6, 12, 18]
    assert [record["optim/lr"] for record in early] == pytest.approx([1e-2 * (1 - s / 18) for s in (1, 7, 13)])


@pytest.mark.parametrize(("rows", "skipped"), [([*range(10)], 4), ([4], 2)])
def test_steps_with_a_large_ratio_are_skipped(monkeypatch, gpt2_dir, tmp_path, rows, skipped):
    """A ratio that is infinite in float32; where it is that of one row, one step of two is skipped."""
    rollout = ppo.rollout

    def gap(*args):
        episodes, parts = rollout(*args)
        for row in rows:
            episodes[row].logprobs -= 200
        return episodes, parts

    monkeypatch.setattr(ppo, "rollout", gap)
    flags = {"dtype": "float32", "ratio_threshold": 10, "total_episodes": 10, "kl_target": None}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", **flags)
    after = weights(run_dir)
    assert log(run_dir)[0]["policy/skipped"] == skipped
    before = safetensors.torch.load_file(f"{gpt2_dir}/model.safetensors")
    assert all(after[f"model.{name}"].isfinite().all() for name in before)
    is_unchanged = all(torch.equal(after[f"model.{name}"], weight) for name, weight in before.items())
    assert is_unchanged == (skipped == 4)


@pytest.mark.parametrize("detach", [True, False])
def test_a_detached_value_does_not_train_the_trunk(gpt2_dir, tmp_path, detach):
    flags = {"total_episodes": 10, "max_grad_norm": 0, "adam_eps": 1.0, "detach_value_trunk": detach}
    _, small = run_ppo(gpt2_dir, tmp_path / "small", vf_coef=0.1, **flags)
    _, large = run_ppo(gpt2_dir, tmp_path / "large", vf_coef=10.0, **flags)
    large = weights(large)
    for name, weight in weights(small).items():
        if "attn.bias" not in name:
            assert torch.equal(weight, large[name]) == (detach and name.startswith("model."))


CLASSIFIERS = {
    "GPT2": {"n_embd": 12, "n_layer": LAYERS, "n_head": 2, "n_positions": 32},
    "Llama": HEADS,
    "Bert": SIZES | {"intermediate_size": 20},
}
TEXTS = ["bcd", "a", "tsrqponml", "hij" * 5, "ka", "abcdefghijklmnopqrstu" * 2, ""]
ENDED = [True, False, False, True, False, True, True]


def save_classifier(folder, family, pad):
    """A random one with three labels and its tokenizer."""
    tokenizer = randomwalks.tokenizer()
    tokenizer.pad_token = pad
    if family == "Bert":
        tokenizer.eos_token = None
    torch.manual_seed(1)
    names = {"id2label": {0: "bad", 1: "good", 2: "odd"}, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{family}Config")(**CLASSIFIERS[family], **TOKENS | names)
    save(folder, AutoModelForSequenceClassification.from_config(config), tokenizer)


def by_hand(folder, text, ended):
    """The score of one row without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    ids = randomwalks.tokenizer()(text)["input_ids"]
    if model.config.model_type == "bert":
        ids = ids[-randomwalks.CONTEXT :]
    else:
        ids = ids[1 - randomwalks.CONTEXT :]
        if ended:
            ids = [*ids, EOS]
    return alone(model, ids, label=1)


@pytest.mark.parametrize(("family", "pad"), [("GPT2", "<eos>"), ("Llama", "<pad>"), ("Bert", "<pad>")])
def test_a_reward_model_scores_rows_as_alone(tmp_path, family, pad):
    save_classifier(tmp_path, family, pad)
    lm = SimpleNamespace(device="cpu", named_parameters={}.items)
    reward = RewardModel(reward_args(f"{tmp_path}:good"), lm)
    count = 6 if family == "Bert" else 7  # without an end, an empty text has no token
    texts = TEXTS[:count]
    ended = ENDED[:count]
    expected = [by_hand(tmp_path, text, end) for text, end in zip(texts, ended, strict=True)]
    assert len(set(expected)) == len(texts)
    for size in (3, 64):
        reward.batch_size = size
        assert reward(texts, ended).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if family != "Bert":
        assert reward(texts, [not end for end in ended])[0] != pytest.approx(expected[0], abs=1e-3)


def test_a_score_that_is_not_finite_names_the_row(gpt2_dir, tmp_path):
    judge = tmp_path / "judge"
    save_classifier(judge, "GPT2", "<pad>")
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    model.score.weight.data.fill_(3e38)
    model.save_pretrained(judge)
    with pytest.raises(FloatingPointError, match="(inf|nan) for a text that ends with '[a-u]+'$"):
        run_ppo(gpt2_dir, tmp_path / "run", reward=f"{judge}:good", dtype="float32")


@pytest.mark.case(15, "ppo")
def test_a_coefficient_in_a_run_that_goes_on(gpt2_dir, tmp_path):
    """The one that is given; an adapted one is kept, also for another reward."""
    flags = {"kl_target": None, "score_scaling": "running"}
    run_ppo(gpt2_dir, tmp_path / "one", kl_coef=0.1, total_episodes=10, **flags)
    flags |= {"resume": str(tmp_path / "one"), "total_episodes": 30}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "two", kl_coef=0.7, **flags)
    assert [record["objective/kl_coef"] for record in log(run_dir)] == [0.7, 0.7]
    state = json.loads((max(run_dir.glob("checkpoints/step_*")) / "state.json").read_text())
    assert state["moments"][0] == 30
    flags = {"kl_coef": 0.1, "kl_target": 1e-9, "kl_horizon": 99}
    run_ppo(gpt2_dir, tmp_path / "three", total_episodes=10, **flags)
    flags |= {"resume": str(tmp_path / "three"), "reward": more_vowels}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "other", total_episodes=20, **flags)
    # the first KL was 0: an error of -1, clipped to -0.2
    assert log(run_dir)[-1]["objective/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 10 / 99))
