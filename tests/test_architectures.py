"""Every script on every family of decoders: `python -m pytest tests/test_architectures.py`

Tiny random models, built here from their configuration classes. Each family: left padding and the key-value cache
change nothing, one update of each script trains every weight, starts at ratio 1, KL 0 and loss ln 2, computes what a
plain forward of single rows gives, and exports what plain transformers reads back. Where a family cannot share, pack or
replay something, the script says so in the words that are tested here, and gives the same result without.
"""

import functools
import math

import pytest
import torch
import transformers as tf
from test_invariants import log, recorded
from test_models import IDS, more_vowels, reload
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from algos import dpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks
from common.classifiers import classifier_logits
from common.cli import InputError
from common.models import load_model
from common.seeding import draw

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
WIDE = SIZES | {"intermediate_size": 20}
GROUPED = WIDE | {"num_key_value_heads": 1}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.7}}  # 4 of 6
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}  # rows have up to 13 tokens
GEMMA = GROUPED | WINDOW | {"head_dim": 6, "query_pre_attn_scalar": 5}
GEMMA4 = GEMMA | {"global_head_dim": 8, "hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 25}
LAST_TWO_SHARE = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
GRANITE = {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.5, "logits_scaling": 1.3}
FAMILIES = {
    "gpt2": (tf.GPT2Config, {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_inner": 20, "n_positions": 32}),
    "gpt_neox": (tf.GPTNeoXConfig, WIDE | ROTARY),
    "opt": (tf.OPTConfig, SIZES | {"ffn_dim": 20, "word_embed_proj_dim": 10, "init_std": 0.3}),
    "llama": (tf.LlamaConfig, GROUPED),
    "qwen3": (tf.Qwen3Config, GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": (tf.Gemma2Config, GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0}),
    "gemma3": (tf.Gemma3TextConfig, GEMMA),
    "gemma4": (tf.Gemma4TextConfig, GEMMA4),
    "gemma4_shared": (tf.Gemma4TextConfig, GEMMA4 | LAST_TWO_SHARE | {"num_kv_shared_layers": 1}),
    "mistral": (tf.MistralConfig, GROUPED | {"sliding_window": 4}),
    "phi": (tf.PhiConfig, GROUPED | ROTARY),
    "phi3": (tf.Phi3Config, GROUPED),
    "cohere": (tf.CohereConfig, GROUPED | {"logit_scale": 0.3}),
    "cohere2": (tf.Cohere2Config, GROUPED | WINDOW | {"logit_scale": 0.3}),
    "falcon": (tf.FalconConfig, SIZES | {"ffn_hidden_size": 20}),
    "falcon_alibi": (tf.FalconConfig, SIZES | {"ffn_hidden_size": 20, "alibi": True}),
    "bloom": (tf.BloomConfig, {"hidden_size": 12, "n_layer": 2, "n_head": 2}),
    "granite": (tf.GraniteConfig, GROUPED | GRANITE),
}
WINDOWED = {"gemma2", "gemma3", "gemma4", "gemma4_shared", "mistral", "cohere2"}  # a given mask replaces the window
ALIBI = {"falcon_alibi", "bloom"}  # take no mask of four dimensions
LOSSES_ALONE = {"opt", "falcon", *ALIBI}  # --packing is off: they make their mask without the positions
PAIRS_ALONE = WINDOWED | ALIBI  # --share-prompt is off
SCORES_ALONE = PAIRS_ALONE | {"falcon"}  # whose classifier takes no positions
TRUNK_RUNS = {"gemma4_shared"}  # --cache-trunk is off: the top block reads keys and values of a lower one
LOGITS_AT_ONCE = {"gemma2", "cohere", "cohere2", "granite"}  # which scale or cap them
NO_CLASSIFIER = {"gemma4", "gemma4_shared", "cohere", "cohere2", "granite"}  # transformers has none
NAN_IN_FLOAT64 = {"gemma2", "bloom"}  # only eager attention, whose mask overflows

TEXTS = [("b", "cda"), ("cde", "fgfcq"), ("fg", ""), ("hijkl", "mnopa"), ("m", "hij")]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
PAIRS = [{"prompt": p, "chosen": c, "rejected": c[:1] + "utsrq"[: 4 - i]} for i, (p, c) in enumerate(TEXTS)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """Directory of the random model of a family with its tokenizer."""
    letters, directory, (config, settings) = randomwalks.tokenizer(), tmp_path_factory.mktemp(family), FAMILIES[family]
    ids = {f"{name}_token_id": getattr(letters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config(**{"vocab_size": len(letters), "initializer_range": 0.3} | ids | settings)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    letters.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def run(monkeypatch, capsys, folder, tmp_path):
    """run(script, **flags): metrics, directory, trained model and what was printed of one run of main in steps of 5
    rows; all metrics are finite, and what should be trained is."""

    def main(script, **flags):
        made, number = recorded(monkeypatch, script, "make_optimizer"), len(list(tmp_path.iterdir()))
        settings = {"lr": 1e-2, "eval_every": 0, "save_every": 0, "threads": 1, "batch_size": 5, "micro_batch_size": 3}
        settings |= {"warmup_steps": 0} | ({} if script is ppo else {"total_steps": 1})
        settings |= {"run_dir": str(tmp_path / f"{number}"), "model": folder}
        metrics, run_dir = script.main(script.Args(**settings | flags))
        assert all(value is not None and math.isfinite(value) for record in log(run_dir) for value in record.values())
        model = made[0][0][0].eval()
        assert_trained(getattr(model, "lm", model), folder)
        return metrics, run_dir, model, capsys.readouterr().out

    return main


initial = functools.cache(reload)  # of a family, as its runs start


@torch.no_grad()
def assert_trained(lm, folder):
    """Weights have moved if and only if they were to be trained and have a gradient: OPT's bias of keys has none."""
    before, after = dict(initial(folder).named_parameters()), dict(lm.named_parameters())
    assert len(before.keys() - after.keys()) <= 2 * ("Classification" in type(lm).__name__)  # the output layer
    for name in before.keys() & after.keys():
        if not ("decoder" in name and name.endswith("k_proj.bias")):
            assert ((after[name] - before[name]).abs().max() > 1e-5) == after[name].requires_grad, name


@torch.no_grad()
def assert_exported(lm, run_dir):
    """Plain transformers reads the weights of the trained model back, and they give its logits."""
    back = reload(run_dir / "hf_model")
    lm.set_attn_implementation("eager"), back.set_attn_implementation("eager")
    assert_close(lm.state_dict(), back.state_dict(), rtol=0, atol=0)
    assert_close(lm(IDS).logits, back(IDS).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def states_and_logits(lm, ids):
    """What the output layer reads, and the logits, of one row by a plain forward: (T, H), (T, V)."""
    hidden = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    logits = lm(torch.tensor([ids])).logits
    hook.remove()
    return hidden[0][0], logits[0]


def plain_logprobs(folder, letters, texts):
    """Log-probabilities of the tokens of each response, end token included, row by row by the model in folder."""
    lm, found = initial(folder), []
    for prompt, response in texts:
        ids = letters(prompt + response)["input_ids"] + [letters.eos_token_id]
        logprobs = states_and_logits(lm, ids)[1].log_softmax(-1)[:-1]
        found.append(logprobs.gather(1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :, 0])
    return found


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "eager"), ("float32", "sdpa"), ("float64", "sdpa")])
def test_left_padding_and_the_cache_change_nothing(family, folder, dtype, attention):
    """Log-probabilities, values, entropies and sampled tokens of a row in a batch are those of a plain forward."""
    lm = load_model(ppo.Args(dtype=dtype, attn_implementation=None), folder)[0].eval()
    tolerance = 3e-5 if dtype == "float32" else 1e-12
    if (family, attention) != ("gemma2", "sdpa"):  # which it refuses, and set_attention leaves alone
        lm.set_attn_implementation(attention)
    model, random = ppo.PolicyWithValue(lm, "mlp", "normal"), torch.Generator().manual_seed(0)
    lengths, limits = torch.tensor([5, 1, 3, 7]), torch.tensor([4, 7, 1, 6])
    query, query_mask = torch.randint(0, 21, (4, 11), generator=random), torch.arange(11) >= 11 - lengths[:, None]
    draws = torch.rand(4, 7, generator=random, dtype=torch.float64)
    arguments = query, query_mask, draws, 99, 23, 0.7

    def ended(rows, ids):
        return ids.shape[1] >= limits[rows]

    if dtype == "float64" and family in NAN_IN_FLOAT64:
        with pytest.raises(FloatingPointError, match="row 0: logits are not finite at response token 1"):
            ppo.sample(lm, *arguments, ended=ended)
        return
    response, mask = ppo.sample(lm, *arguments, ended=ended)
    assert mask.tolist() == [[t < limit for t in range(7)] for limit in limits]
    with torch.no_grad():
        logprobs, values, entropies = model(query, query_mask, response, mask, temperature=0.7, entropy=True)
        for row, (length, limit) in enumerate(zip(lengths.tolist(), limits.tolist(), strict=True)):
            ids = response[row, :limit]
            states, logits = states_and_logits(lm, [*query[row, 11 - length :].tolist(), *ids.tolist()][:-1])
            states, logps = states[length - 1 :], (logits[length - 1 :] / 0.7).log_softmax(-1)
            assert torch.equal(draw(logps, draws[row, :limit], 1.0), ids)
            expected = logps.gather(1, ids[:, None])[:, 0], model.value_head(states)[:, 0]
            expected += (-(logps.exp() * logps).sum(-1),)
            found = logprobs[row, :limit], values[row, :limit], entropies[row, :limit]
            assert_close(found, expected, rtol=tolerance, atol=tolerance)


PPO = {"dataset": [{"prompt": prompt} for prompt, _ in TEXTS], "reward": more_vowels, "max_new_tokens": 6}
PPO |= {"total_episodes": 10, "rollout_batch_size": 10, "batch_size": 10, "kl_coef": 0.1, "value_head_init": "normal"}


def test_ppo(monkeypatch, run):
    calls = recorded(monkeypatch, ppo, "policy_loss")
    metrics, run_dir, model, _ = run(ppo, ppo_epochs=1, temperature=0.7, **PPO)
    assert max(((new - old).exp() - 1).abs().max() for (new, old, *_), _ in calls) < 3e-5
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["policy/clipfrac"] == 0
    assert abs(metrics["objective/kl"]) < 1e-5 and metrics["optim/grad_norm"] > 0.01
    assert_exported(model.lm, run_dir)
    back = ppo.PolicyWithValue.load(run_dir / "hf_model").value_head
    assert_close(back.state_dict(), model.value_head.state_dict(), rtol=0, atol=0)


def test_ppo_with_a_frozen_trunk(monkeypatch, run, family):
    """The second of two updates starts from changed weights; with the cache and without, the result is the same."""
    found = []
    for cached in (True, False):
        plays = recorded(monkeypatch, ppo.Trunk, "play")
        metrics, run_dir, model, text = run(ppo, num_layers_unfrozen=1, cache_trunk=cached, ppo_epochs=2, **PPO)
        off = cached and family in TRUNK_RUNS
        assert ("--cache-trunk is off: played back, log-probabilities are " in text) == off
        assert any(args[2] is not None for args, _ in plays[1:]) == (cached and not off)
        assert abs(metrics["objective/kl"]) < 1e-5 and abs(metrics["policy/ratio"] - 1) > 1e-4
        assert_exported(model.lm, run_dir)
        found.append((metrics, model.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-4)
    assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_sft(run, family, folder, letters):
    """Plain and packed, the loss is the mean over the tokens of the responses."""
    expected = -torch.cat(plain_logprobs(folder, letters, TEXTS)).mean().item()
    for packing in (False, True):
        metrics, run_dir, model, text = run(sft, dataset=ROWS, packing=packing, max_length=17)
        said = "--packing is off: in this model it changes the loss of a token by " in text
        assert said == (packing and family in LOSSES_ALONE)
        assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
        assert_exported(model, run_dir)


def test_dpo(run, family, folder, letters):
    """With a shared beginning and without: ln 2 and equal log-ratios before the update, a better policy after it."""
    expected, found = {}, []
    for side in ("chosen", "rejected"):
        logprobs = plain_logprobs(folder, letters, [(row["prompt"], row[side]) for row in PAIRS])
        expected[f"eval/logps/{side}"] = torch.cat(logprobs).sum().item() / len(PAIRS)
    expected |= {"eval/loss": math.log(2), "eval/rewards/accuracies": 0}
    for share in (True, False):
        flags = {"eval_dataset": PAIRS, "eval_every": 1, "share_prompt": share}
        metrics, run_dir, model, text = run(dpo, dataset=PAIRS, **flags)
        said = "--share-prompt is off: in this model it changes a log-probability by " in text
        assert said == (share and family in PAIRS_ALONE)
        start = log(run_dir)[0]
        assert {name: start[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=0)
        assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-5) and metrics["eval/loss"] < 0.69
        assert_exported(model, run_dir)
        del metrics["rewards/accuracies"]  # before the update log-ratios are zero to rounding
        found.append(metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-4)


def test_ilql(run, family, folder, letters):
    """The imitation loss is that of sft, also where it is computed from the output layer instead of the logits."""
    metrics, run_dir, policy, text = run(ilql, dataset=[row | {"reward": i % 3} for i, row in enumerate(ROWS)])
    assert ("all logits are computed at once" in text) == (family in LOGITS_AT_ONCE)
    expected = -torch.cat(plain_logprobs(folder, letters, TEXTS)).mean().item()
    assert metrics["losses/loss_awac"] == pytest.approx(expected, rel=1e-5)
    assert_exported(policy.lm, run_dir)
    back = ilql.PolicyWithQ.load(run_dir / "hf_model")
    assert_close(back.head_weights(), policy.head_weights(), rtol=0, atol=0)


def test_reward(run, family, folder, letters):
    """With a shared beginning and without, the scores of plain transformers, row by row."""
    if family in NO_CLASSIFIER:
        with pytest.raises(InputError, match="cannot be loaded: Unrecognized configuration class .*SequenceClassif"):
            run(reward, dataset=PAIRS)
        return
    found = []
    for share in (True, False):
        # the centering gives gradients to a bias that is the same for both sides
        metrics, run_dir, model, text = run(reward, dataset=PAIRS, share_prompt=share, center_coef=0.1)
        said = "--share-prompt is off: in this model it changes a score by " in text
        assert said == (share and family in SCORES_ALONE)
        kind = AutoModelForSequenceClassification
        back, report = kind.from_pretrained(run_dir / "hf_model", output_loading_info=True)
        rows = [letters(prompt + completion)["input_ids"] + [letters.eos_token_id] for prompt, completion in TEXTS]
        with torch.no_grad():
            scores = torch.cat([back(torch.tensor([ids])).logits for ids in rows])
            assert_close(classifier_logits(model, rows), scores, rtol=3e-5, atol=3e-5)
        assert_close(model.state_dict(), back.state_dict(), rtol=0, atol=0)
        assert not any(report.values()) and scores.std() > 0.01
        found.append(metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-4)
