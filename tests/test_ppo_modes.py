"""What ppo.py does on request: `python -m pytest tests/test_ppo_modes.py`

Blocks shared with the reference in twelve families, reward models, shaped scores, stops, limits, truncation, early
ends, skipped steps, chats and several evaluation sets; each against the slow definition or another layout of the same
work.
"""

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from test_invariants import PROMPTS, log, recorded, run_ppo, weights
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from algos import ppo
from benchmarks.tasks import randomwalks
from common.classifiers import RewardModel
from common.cli import InputError
from common.models import blocks, freeze
from common.rows import load_sets
from common.sampling import decode, generate_all, has_ended
from common.tokens import encode_prompts

EOS, LAYERS = 22, 3
SIZES = {"hidden_size": 12, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "max_position_embeddings": 32}
GPT = {"n_embd": 12, "n_layer": LAYERS, "n_head": 2, "n_positions": 32}
HEADS = SIZES | {"intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 6}
WIDE = SIZES | {"intermediate_size": 20}
FAMILIES = {
    "GPT2": GPT, "GPTJ": GPT | {"rotary_dim": 4}, "GPTNeoX": WIDE, "OPT": SIZES | {"ffn_dim": 20}, "Llama": HEADS,
    "Mistral": HEADS | {"sliding_window": 5}, "Qwen3": HEADS, "Gemma3Text": HEADS | {"sliding_window": 4},
    "Phi": WIDE | {"partial_rotary_factor": 0.67}, "Cohere": HEADS, "Falcon": SIZES,
    "Bloom": {"hidden_size": 12, "n_layer": LAYERS, "n_head": 2},
}  # fmt: skip
TOKENS = {"vocab_size": 25, "bos_token_id": 21, "eos_token_id": EOS, "pad_token_id": 23, "initializer_range": 0.3}


def build(family, dtype=torch.float32):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], **TOKENS)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def inputs():
    """Queries of 3, 5 and 4 tokens, responses of 7, 3 and 5."""
    ids = torch.randint(0, 21, (3, 12), generator=torch.Generator().manual_seed(1))
    query_mask = torch.arange(5) >= torch.tensor([[2], [0], [1]])
    return ids[:, :5], query_mask, ids[:, 5:], torch.arange(7) < torch.tensor([[7], [3], [5]])


def generate(accelerator, lm, tokenizer, queries, iteration, max_new_tokens=7, **options):
    """What a rollout samples."""
    options |= {"seed": 1, "max_new_tokens": max_new_tokens, "sample": ppo.sample}
    return generate_all(accelerator, lm, tokenizer, queries, ("rollout", iteration), **options)


def score(model):
    return ppo.response_logprobs(model, *inputs())[0][inputs()[3]]


# ---- Shared blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1, 0, 1, 2, LAYERS])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_blocks_of_every_family(family, k):
    """After 20 steps of what main does, the reference is still the initial model, bit by bit."""
    lm = build(family)
    # frozen as the reference is: torch.matmul calls another kernel where a factor may get a gradient
    initial, layers = copy.deepcopy(lm).requires_grad_(False), blocks(lm)
    freeze(lm, k)
    assert len(layers) == LAYERS
    depth = LAYERS - k if k >= 0 else 0
    trained = {name for name, weight in lm.named_parameters() if weight.requires_grad}
    tops = [id(weight) for layer in layers[depth:] for weight in layer.parameters()] if k else []
    outside = [name for name, weight in lm.named_parameters() if name in trained and id(weight) not in tops]
    assert len(outside) == len(trained) - len(tops) and bool(outside) == bool(tops)
    assert all("norm" in name or "ln_f" in name for name in outside) or (
        k < 0 and len(trained) == len(list(lm.parameters()))
    )
    ref = copy.deepcopy(lm, {id(w): w for w in lm.parameters() if not w.requires_grad}).requires_grad_(False)
    for (name, a), b in zip(lm.named_parameters(), ref.parameters(), strict=True):
        assert (a.data_ptr() == b.data_ptr()) == (name not in trained)
    policy = ppo.PolicyWithValue(lm, "linear", "normal")
    with torch.no_grad():
        first = score(lm)
    optimizer = torch.optim.AdamW([w for w in policy.parameters() if w.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(20):
        logprobs, values, _ = policy(*inputs())
        (logprobs[inputs()[3]].mean() + values.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(score(ref), score(initial))
        assert ((score(lm) - first).abs().max() > 1e-2) == (k != 0)
    assert all(torch.equal(w, lm.get_parameter(name)) for name, w in initial.named_parameters() if name not in trained)


def test_more_unfrozen_layers_than_there_are():
    with pytest.raises(InputError, match="--num-layers-unfrozen 4: the model has 3 layers"):
        freeze(build("GPT2"), 4)


def test_an_output_layer_inside_a_head_keeps_the_embedding_frozen():
    """Of BERT it is tied to the embedding and stands in a module with the norm that is trained."""
    config = transformers.BertConfig(vocab_size=29, hidden_size=12, num_hidden_layers=3, num_attention_heads=3,
                                     intermediate_size=7, is_decoder=True)  # fmt: skip
    lm = transformers.BertLMHeadModel(config)
    freeze(lm, 1)
    trained = {name for name, weight in lm.named_parameters() if weight.requires_grad}
    assert (
        "bert.embeddings.word_embeddings.weight" not in trained and "cls.predictions.transform.dense.weight" in trained
    )
    assert all(".layer.2." in name or name.startswith("cls.") for name in trained)


def test_blocks_are_not_the_experts_of_a_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(11))

    model = nn.Module()
    model.norms, model.decoder = nn.ModuleList([nn.LayerNorm(3)]), nn.Module()
    model.decoder.layers = nn.ModuleList(Block() for _ in range(5))
    model.config = SimpleNamespace(is_encoder_decoder=False)
    assert blocks(model) is model.decoder.layers


FROZEN = {"num_layers_unfrozen": 1, "kl_target": None}


def test_a_reference_of_its_own_keeps_its_blocks(monkeypatch, build_model, letters, gpt2_dir, tmp_path):
    """--ref-model beside frozen blocks of the policy, which are not the reference's."""
    build_model(seed=7).save_pretrained(tmp_path / "ref")
    letters.save_pretrained(tmp_path / "ref")
    rollouts = recorded(monkeypatch, ppo, "rollout")
    run_ppo(gpt2_dir, tmp_path / "run", ref_model=str(tmp_path / "ref"), total_episodes=10, **FROZEN)
    ((_, batch),) = rollouts
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "ref", dtype=torch.float64).eval()
    with torch.no_grad():
        expected, _, _ = ppo.response_logprobs(reference, *batch.tokens(), temperature=0.7)
    keep = batch.response_mask
    assert (batch.logprobs - expected)[keep].abs().max() > 0.5
    assert (batch.ref_logprobs - expected)[keep].abs().max() < 1e-9


# ---- Rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_are_whitened(monkeypatch, gpt2_dir, tmp_path):
    """The returns are those of the token rewards over their standard deviation, their mean as it was."""
    calls = recorded(monkeypatch, ppo, "rollout")
    run_ppo(gpt2_dir, tmp_path / "run", gamma=0.9, whiten_rewards=True, min_length_limit=3, micro_batch_size=3)
    assert len(calls) == 2
    for _, batch in calls:
        mask = batch.response_mask
        kept = batch.rewards[mask].numpy()
        white = torch.zeros_like(batch.rewards)
        white[mask] = torch.from_numpy((kept - kept.mean()) / np.sqrt(kept.var() + 1e-8) + kept.mean())
        returns = ppo.gae(white, batch.values, mask, 0.9, 0.95)[1]
        torch.testing.assert_close(batch.returns, returns, rtol=1e-9, atol=1e-9)


# ---- Scores ----------------------------------------------------------------------------------------------------------


def ragged(rows, seed, dense=True):
    """Scores (rows, 7), some a number per token, of responses of different lengths; their mask; which were cut."""
    random = np.random.default_rng(seed)
    mask = torch.arange(7) < torch.from_numpy(random.integers(1, 8, (rows, 1)))
    last, x = mask & ~F.pad(mask[:, 1:], (0, 1)), torch.from_numpy(random.normal(2, 3, (rows, 7)))
    keep = torch.where(torch.arange(rows)[:, None] % 2 == int(dense), mask, last)
    return torch.where(keep, x, 0.0), mask, torch.from_numpy(random.random(rows) < 0.5), last


@pytest.mark.parametrize("scaling", ["none", "running", "running-norm", "ref", "ref-norm"])
@pytest.mark.parametrize(("clip", "penalty"), [(0.0, 0.0), (0.7, 0.3)])
def test_shape_scores_is_numpys(scaling, clip, penalty):
    """running: the mean and Bessel's deviation of all sums so far (TRL's parallel merge); ref: of the first rollout."""
    args = SimpleNamespace(score_scaling=scaling, score_clip=clip, missing_eos_penalty=penalty)
    moments, seen = [0, 0.0, 0.0], []
    for seed, rows in enumerate([3, 7, 11, 5]):
        scores, mask, cut, last = ragged(rows, seed)
        assert cut.any() and not cut.all()
        seen += scores.sum(1).tolist() if seed == 0 or scaling.startswith("running") else []
        shaped, moments = ppo.shape_scores(scores, mask, cut, moments, args)
        expected = scores.numpy() - (np.mean(seen) * last.numpy() if scaling.endswith("norm") else 0)
        expected = expected / (1 if scaling == "none" else np.std(seen, ddof=1))
        expected = np.clip(expected, -clip, clip) if clip else expected
        expected = expected - penalty * (last & cut[:, None]).numpy()
        np.testing.assert_allclose(shaped.numpy(), expected, rtol=1e-9, atol=1e-9)
        moments = json.loads(json.dumps(moments))  # as in a checkpoint


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scaling", ["running", "running-norm", "ref", "ref-norm"])
def test_scores_without_spread_are_not_scaled(scaling, rows):
    args = SimpleNamespace(score_scaling=scaling, score_clip=0.0, missing_eos_penalty=0.0)
    scores = torch.tensor([[0.0, 0.1, 0.0]], dtype=torch.float64).repeat(rows, 1)
    mask, cut = torch.tensor([[True, True, False]]).repeat(rows, 1), torch.zeros(rows, dtype=torch.bool)
    shaped, _ = ppo.shape_scores(scores, mask, cut, [0, 0.0, 0.0], args)
    assert shaped.sum(1).tolist() == pytest.approx([0.0 if "norm" in scaling else 0.1] * rows, abs=1e-15)


def test_moments_survive_a_resume(monkeypatch, gpt2_dir, tmp_path):
    flags = {"score_scaling": "running-norm", "total_episodes": 30, "save_every": 4, "missing_eos_penalty": 0.3}
    run_ppo(gpt2_dir, tmp_path / "whole", **flags)
    rollout = ppo.rollout

    def dies(*args):
        assert args[7] < 3, "killed"
        return rollout(*args)

    monkeypatch.setattr(ppo, "rollout", dies)
    with pytest.raises(AssertionError, match="killed"):
        run_ppo(gpt2_dir, tmp_path / "run", **flags)
    monkeypatch.undo()
    run_ppo(gpt2_dir, tmp_path / "run", **flags)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    state = json.loads((tmp_path / "run/checkpoints/step_00000012/state.json").read_text())
    assert state["moments"][0] == 30
    assert log(tmp_path / "run")[-1]["objective/scores_std"] < 0.9  # logged as the reward gave them


# ---- Where responses end ---------------------------------------------------------------------------------------------


def test_limits_of_length(monkeypatch, accelerator, letters, build_model, gpt2_dir, tmp_path):
    model, queries = build_model(dtype=torch.float64), [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]]
    options = {"temperature": 0.7, "decode_batch_size": 64}
    limits = torch.tensor([5, 1, 7, 3, 2])
    _, _, ids, mask = generate(accelerator, model, letters, queries, 2, **options)
    for size in (1, 2, 64):
        options["decode_batch_size"] = size
        found = generate(accelerator, model, letters, queries, 2, limits=limits, **options)[2:]
        assert torch.equal(found[1], mask & (torch.arange(7) < limits[:, None]))
        assert torch.equal(found[0][found[1]], ids[found[1]])
    rollouts = recorded(monkeypatch, ppo, "rollout")
    run_ppo(gpt2_dir, tmp_path / "run", min_length_limit=3, total_episodes=60)
    lengths = {int(n) for _, batch in rollouts for n in batch.response_mask.sum(1)[batch.truncated]}
    assert lengths == {3, 4, 5, 6, 7}
    assert len({tuple(batch.response_mask.sum(1).tolist()) for _, batch in rollouts}) == 6  # drawn anew


class Chain(nn.Module):
    """After token i comes token i + 1."""

    def __init__(self, ends):
        super().__init__()
        self.generation_config = SimpleNamespace(eos_token_id=ends)

    def forward(self, input_ids, **_):
        logits = 999.0 * F.one_hot(input_ids + 1, 99)
        return SimpleNamespace(logits=logits, past_key_values=SimpleNamespace(reorder_cache=lambda _: None))


CHAINS = [  # prompt, tokens until a stop (or five), text
    ("<0>", ["hello", " wor", "ld \n\nHu", "man:tail"], "hello world"),  # a stop over two tokens
    ("<1>", ["ENDless"], ""),
    ("<2>", ["b", "<|a|>"], "b"),  # a special token as the stop
    ("<3>", ["c ", "<|b|>"], "c"),
    ("<4>", ["yes \n", "<eos>"], "yes \n"),  # by the end token: nothing is stripped
    ("<5 E", ["ND", "E", "N", "D"], "ND"),  # begins in the prompt, then token by token
    ("<6>", ["1", "2", "3", "4", "5"], "12345"),
    ("<7>", ["EN", "<|c|>", "Dx", "y", "z"], "ENDxyz"),  # a special token within: none, for the sampler as for the text
]


@pytest.mark.parametrize("size", [1, 3, 64])
def test_stop_strings(accelerator, size):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = [token for prompt, tokens, _ in CHAINS for token in (prompt, *tokens)]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(pieces)}, unk_token="1"))
    backend.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "extra_special_tokens": ["<|a|>", "<|b|>", "<|c|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    stops = "\n\nHuman:", "END", "<|a|>", "<|b|>"
    queries = [[pieces.index(prompt)] for prompt, _, _ in CHAINS]
    options = {"max_new_tokens": 5, "decode_batch_size": size, "stop": stops}
    _, _, ids, mask = generate(accelerator, Chain(tokenizer.eos_token_id), tokenizer, queries, 1, **options)
    ids = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert [[pieces[i] for i in row] for row in ids] == [tokens for _, tokens, _ in CHAINS]
    assert has_ended(tokenizer, ids, (), stops) == [True] * 4 + [False, True, False, False]
    assert decode(tokenizer, queries, ids, stops) == [text for _, _, text in CHAINS]


def test_a_run_with_stop_strings(monkeypatch, letters, gpt2_dir, tmp_path):
    """Reward and metric see the text before the stop; the tokens through it are trained; such a row is not cut."""
    stops = tuple(a + b for a in "abcdefghij" for b in randomwalks.LETTERS if a + b not in "<bos> <eos> <pad> <unk>")
    calls = []

    def reward(outputs, output_ids, **columns):
        calls.append((outputs, output_ids))
        return [float(len(output)) for output in outputs]

    def metric(**columns):
        return {"length": reward(**columns)}

    rollouts = recorded(monkeypatch, ppo, "rollout")
    flags = {"stop": stops, "reward": reward, "metric": metric, "eval_every": 8, "decode_batch_size": 3}
    run_ppo(gpt2_dir, tmp_path / "run", **flags)
    assert len(calls) == 2 + 1 + 1 + 2 and calls[0] == calls[1] and calls[4] == calls[5]
    for (_, batch), (outputs, output_ids) in zip(rollouts, calls[2:4], strict=True):
        texts = letters.batch_decode(output_ids)
        hits = [any(stop in text for stop in stops) for text in texts]
        assert batch.truncated.tolist() == [
            not hit and ids[-1] != EOS for hit, ids in zip(hits, output_ids, strict=True)
        ]
        assert batch.response_mask.sum(1).tolist() == [len(ids) for ids in output_ids]
        assert 1 < sum(hits) and len({len(ids) for ids in output_ids}) > 2
        for text, hit, output in zip(texts, hits, outputs, strict=True):
            assert not any(stop in text[:-1] for stop in stops)
            assert output == re.sub("<...>", "", text[:-2] if hit else text)
        assert batch.raw_scores.sum(1).tolist() == [len(output) for output in outputs]


# ---- The update ------------------------------------------------------------------------------------------------------


def test_early_stop_keeps_the_schedule(gpt2_dir, tmp_path):
    flags = {"ppo_epochs": 3, "total_episodes": 30, "lr": 1e-2, "eval_every": 6}
    plain, never, early = (
        log(run_ppo(gpt2_dir, tmp_path / str(limit), early_stop_kl=limit, **flags)[1]) for limit in (0, 1e9, 1e-9)
    )
    assert plain == never and all(record["policy/epochs"] == 3 for record in plain[1:])
    assert all(record["policy/epochs"] == 1 for record in early[1:])
    assert [record["step"] for record in early] == [record["step"] for record in plain] == [0, 6, 12, 18]
    assert [record["optim/lr"] for record in early[1:]] == pytest.approx([1e-2 * (1 - s / 18) for s in (1, 7, 13)])
    assert early[1]["policy/approxkl"] > 1e-9 and abs(early[1]["policy/ratio"] - 1) < 0.3
    assert early[1]["objective/kl"] == plain[1]["objective/kl"]


@pytest.mark.parametrize("rows", [range(10), [4]])
def test_steps_with_a_large_ratio_are_skipped(monkeypatch, gpt2_dir, tmp_path, rows):
    """A gap of 200 in log-probability, whose ratio is infinite in float32; in one row, one step of two is skipped."""
    rollout = ppo.rollout

    def gap(*args):
        batch = rollout(*args)
        batch.logprobs[list(rows)] -= 200
        return batch

    monkeypatch.setattr(ppo, "rollout", gap)
    flags = {"dtype": "float32", "ratio_threshold": 10, "total_episodes": 10, "kl_target": None}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", **flags)
    record, after = log(run_dir)[0], weights(run_dir)
    assert record["policy/skipped"] == (4 if len(rows) == 10 else 2)
    before = safetensors.torch.load_file(f"{gpt2_dir}/model.safetensors")
    assert all(after[f"model.{name}"].isfinite().all() for name in before)
    assert all(torch.equal(after[f"model.{name}"], w) for name, w in before.items()) == (len(rows) == 10)


def test_a_detached_value_does_not_train_the_trunk(gpt2_dir, tmp_path):
    flags = {"total_episodes": 10, "max_grad_norm": 0, "adam_eps": 1.0}
    for detach in (True, False):
        few, many = (
            weights(run_ppo(gpt2_dir, tmp_path / f"{detach}{c}", vf_coef=c, detach_value_trunk=detach, **flags)[1])
            for c in (0.1, 10.0)
        )
        same = {name: torch.equal(few[name], many[name]) for name in few}
        assert all(same[name] == detach for name in same if name.startswith("model.") and "attn.bias" not in name)
        assert not any(same[name] for name in same if name.startswith("value_head"))


# ---- Reward models ---------------------------------------------------------------------------------------------------

CLASSIFIERS = {"GPT2": GPT, "Llama": HEADS, "Bert": WIDE}
TEXTS = ["bcd", "a", "", "tsrqponml", "hij" * 5, "ka", "abcdefghijklmnopqrstu" * 2]
ENDED = [True, False, True, False, True, False, True]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """classifier(family, labels, **changes) -> a directory."""

    def make(family="GPT2", labels=1, same=False, edit=lambda model: None, **changes):
        folder, tokenizer = tmp_path_factory.mktemp("classifier"), randomwalks.tokenizer()
        tokenizer.pad_token = "<eos>" if same else "<pad>"
        tokenizer.eos_token = None if family == "Bert" else "<eos>"
        torch.manual_seed(labels)
        names = {"num_labels": 1} if labels == 1 else {"id2label": dict(enumerate(["bad", "good", "odd"][:labels]))}
        config = getattr(transformers, f"{family}Config")(**CLASSIFIERS[family], **TOKENS | changes, **names)
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_config(config)
        edit(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def by_hand(folder, text, ended, label=0):
    """The score of one row without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    eos, limit = model.config.model_type != "bert", randomwalks.CONTEXT
    model.config.pad_token_id = None
    ids = randomwalks.tokenizer()(text)["input_ids"][-(limit - eos) :] + [EOS] * (eos and ended)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, label])


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_reward_model_scores_rows_as_alone(classifiers, family, same):
    folder = classifiers(family, labels=3, same=same)
    args = SimpleNamespace(reward=f"{folder}:good", trust_remote_code=False, dtype="float64", load_in_4bit=False)
    reward = RewardModel(args, SimpleNamespace(device="cpu", named_parameters=dict().items))
    texts, ended = (x[:2] + x[3:] for x in (TEXTS, ENDED)) if family == "Bert" else (TEXTS, ENDED)
    expected = [by_hand(folder, text, end, 1) for text, end in zip(texts, ended, strict=True)]
    assert len(set(expected)) == len(texts)
    for size in (1, 2, 3, 64):
        assert reward(texts, ended, size).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if family != "Bert":
        assert reward(texts, [not end for end in ended], 3)[0] != pytest.approx(expected[0], abs=1e-3)


def break_weight(value, name="score.weight"):
    return lambda model: dict(model.named_parameters())[name].data.fill_(value)


WRONG = [
    ({"labels": 3}, "", "must end with the label to score, one of :bad, :good, :odd"),
    ({"labels": 3}, ":nope", "must end with the label to score, one of :bad, :good, :odd"),
    ({"labels": 1}, ":good", "must end with the label"),
    ({"vocab_size": 24, "pad_token_id": 0}, "", "has embeddings for fewer than"),
    (
        {"edit": break_weight(np.nan, "transformer.h.1.mlp.c_fc.weight")},
        "",
        "transformer.h.1.mlp.c_fc.weight is not finite",
    ),
    ("gpt2", "", "is no sequence classifier, it has no score.weight"),
    ("nowhere/at/all", "", "there is no such directory"),
    ("nobody/nothing", "", "cannot be loaded"),
]


@pytest.mark.parametrize(("changes", "label", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_reward_models_that_cannot_be_used(classifiers, tiny_dirs, tmp_path, changes, label, message):
    folder = classifiers(**changes) if isinstance(changes, dict) else tiny_dirs.get(changes, changes)
    with pytest.raises(InputError) as error:
        run_ppo(tiny_dirs["gpt2"], tmp_path / "run", reward=folder + label)
    assert f"--reward {folder}" in str(error.value) and message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_score_that_is_not_finite_names_the_row(classifiers, gpt2_dir, tmp_path):
    folder = classifiers(edit=break_weight(3e38))
    with pytest.raises(FloatingPointError, match="(inf|nan) for '[a-u]+' and '"):
        run_ppo(gpt2_dir, tmp_path / "run", reward=folder, dtype="float32")


def test_a_run_with_a_reward_model(monkeypatch, classifiers, letters, gpt2_dir, tmp_path):
    rollouts, folder = recorded(monkeypatch, ppo, "rollout"), classifiers("Llama")
    metrics, _ = run_ppo(gpt2_dir, tmp_path / "run", reward=folder, micro_batch_size=3, eval_every=8)
    for _, batch in rollouts:
        whole = torch.cat([batch.query, batch.response], 1)
        masks = torch.cat([batch.query_mask, batch.response_mask], 1)
        ids = [row[keep] for row, keep in zip(whole, masks, strict=True)]
        texts = letters.batch_decode(ids, skip_special_tokens=True)
        expected = [by_hand(folder, text, row[-1] == EOS) for text, row in zip(texts, ids, strict=True)]
        assert batch.raw_scores.sum(1).tolist() == pytest.approx(expected, rel=1e-9)
    assert {row[-1].item() == EOS for row in ids} == {True, False} and np.isfinite(metrics["eval/reward"])


# ---- Chats and evaluation sets ---------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
CHATS = [[{"role": "user", "content": p}] for p in PROMPTS[:3]]
CHATS += [[{"role": "system", "content": "k"}, *CHATS[0], {"role": "assistant", "content": "f"}, *CHATS[1]]]


@pytest.fixture
def chatty(letters):
    """A tokenizer with a chat template, which puts a beginning token before plain texts."""
    from tokenizers import processors

    processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 21)])
    letters.backend_tokenizer.post_processor, letters.chat_template = processor, TEMPLATE
    return letters


def test_chat_prompts(monkeypatch, chatty, gpt2_dir, tmp_path):
    rows, seen = [{"prompt": chat, "n": i} for i, chat in enumerate(CHATS)], []
    kept, queries = encode_prompts(rows, chatty, 5, 32, "--dataset")
    texts = ["<bos>uba", "<bos>ucdea", "<bos>ufga", "<bos>skubafucdea"]
    assert [row["prompt"] for row in kept] == texts
    assert [chatty.decode(ids) for ids in queries] == texts
    plain = encode_prompts([{"prompt": "b"}], chatty, 5, 32, "--dataset")
    assert plain == ([{"prompt": "b"}], [[21, 1]])

    def reward(prompts, samples, outputs, n, **columns):
        assert all(text == texts[i] for text, i in zip(prompts, n, strict=True))
        assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
        seen.extend(n)
        return [0.5 * i for i in n]

    run_ppo(gpt2_dir, tmp_path / "run", dataset=rows, reward=reward, tokenizer=chatty)
    assert set(seen) == {0, 1, 2, 3} and rows[0]["prompt"] is CHATS[0]


NO_CHATS = [  # template, messages, what the error says
    (TEMPLATE, [], 'a chat is a list of {"role": one of system,'),
    (TEMPLATE, "b", "found None"),
    (TEMPLATE, ["b"], "found 'b'"),
    (TEMPLATE, [{"role": "boss", "content": "b"}], "found {'role': 'boss'"),
    (TEMPLATE, [*CHATS[0], {"role": "user", "content": None}], "'content': None"),
    (TEMPLATE, [{"role": "user"}], "found {'role': 'user'}"),
    (
        "{% if messages[1] %}{{ raise_exception('one') }}{% endif %}",
        CHATS[3],
        "the chat template cannot write the messages",
    ),
    (None, CHATS[0], "chat_template is not set"),
]


@pytest.mark.parametrize(("template", "chat", "message"), NO_CHATS)
def test_chats_that_are_none(letters, template, chat, message):
    letters.chat_template = template
    with pytest.raises(InputError, match="--dataset row [12]: ") as error:
        encode_prompts([{"prompt": CHATS[0]}, {"prompt": chat}], letters, 5, 32, "--dataset")
    assert message in str(error.value) and ("row 2" in str(error.value) or not template)


def test_several_evaluation_sets(gpt2_dir, tmp_path):
    """From a mapping as from files; the best is that of the first set."""

    def reward(outputs, sign, **columns):
        return [s * sum(c in "aeiou" for c in o) for s, o in zip(sign, outputs, strict=True)]

    sets = {name: [{"prompt": p, "sign": s} for p in PROMPTS] for name, s in (("minus", -1), ("plus", 1))}
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.py").write_text("def few(n, m=0):\n    return [{'prompt': 'b'}] * (n + m)\n")
    spec = ",".join(f"{tmp_path}/{name}.jsonl" for name in sets)
    assert load_sets(spec, "--eval-dataset") == sets
    assert load_sets(spec.split(",")[0], "--eval-dataset") == {"": sets["minus"]}
    few = f"{tmp_path}/rows.py:few:n=3,m=2"
    for several in (f"{few},{spec}", f"{spec},{few}", {"few": few} | sets):
        found = {name: len(rows) for name, rows in load_sets(several, "").items()}
        assert found == {"few": 5, "minus": 7, "plus": 7}
    assert len(load_sets(few, "")[""]) == 5
    with pytest.raises(InputError, match="two sets have the same name"):
        load_sets(f"{spec},elsewhere/plus.jsonl", "--eval-dataset")
    flags = {"dataset": sets["plus"], "reward": reward, "total_episodes": 60, "eval_every": 4, "keep_checkpoints": 1}
    flags |= {"metric": lambda outputs, **_: {"long": [len(o) for o in outputs]}, "save_every": 4}
    metrics, run_dir = run_ppo(gpt2_dir, tmp_path / "run", eval_dataset=sets, **flags)
    assert {k for k in metrics if k[:5] == "eval/"} == {f"eval/{s}/{m}" for s in sets for m in ("reward", "long")}
    records = log(run_dir)
    assert all(record["eval/minus/reward"] == -record["eval/plus/reward"] for record in records)
    best = max(records[1:], key=lambda record: record["eval/minus/reward"])
    assert best["step"] < 24 and min(record["eval/minus/reward"] for record in records) < best["eval/minus/reward"]
    assert json.loads((run_dir / "checkpoints/step_00000024/state.json").read_text())["best_step"] == best["step"]
    assert len((run_dir / "samples.jsonl").read_text().splitlines()) == 7 * 14
