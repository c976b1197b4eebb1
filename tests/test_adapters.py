"""LoRA adapters, 4-bit weights and reward adapters: `python -m pytest tests/test_adapters.py`

An adapter starts as nothing, its reference is the model without it (or, for one that is trained further, as it came),
and it comes out as files that transformers and peft read. A reward adapter scores on the policy's own base.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import safetensors.torch
import torch
import transformers
from test_models import more_vowels
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from algos import dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks
from common import logging, models
from common.adapters import for_sampling, train_adapters
from common.classifiers import RewardModel
from common.cli import InputError
from common.models import load_model
from common.sampling import generate_all

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["b", "cde", "fg", "hijkl", "m"]
IDS = torch.tensor([[3, 9, 4, 17, 5, 8, 0], [1, 2, 11, 20, 6, 22, 13]])
PAIRS = [{"prompt": p, "chosen": p[::-1] + "a", "rejected": "u" * len(p) + "e"} for p in PROMPTS]
DATA = {
    ppo: [{"prompt": p} for p in PROMPTS],
    grpo: [{"prompt": p} for p in PROMPTS],
    sft: [{"prompt": p, "completion": p[::-1] + "a"} for p in PROMPTS],
    ilql: [{"prompt": p, "completion": p[::-1] + "a", "reward": len(p)} for p in PROMPTS],
    reward: PAIRS,
    dpo: PAIRS,
}
SCRIPTS = pytest.mark.parametrize("script", DATA, ids=lambda script: script.__name__[6:])
QUICK = pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.slow] * (script is grpo)) for script in DATA],
    ids=lambda script: script.__name__[6:],
)  # grpo samples, scores and loads as ppo does
LM_SCRIPTS = pytest.mark.parametrize("script", [ppo, grpo, sft, ilql, dpo], ids=lambda script: script.__name__[6:])


def run(script, model, run_dir, **flags):
    """Four optimizer steps, (metrics, run directory)."""
    settings = {"model": str(model), "run_dir": str(run_dir), "dataset": DATA[script], "lr": 3e-2, "threads": 1}
    settings |= {"batch_size": 4, "micro_batch_size": 3, "eval_every": 2, "save_every": 1}
    if script is ppo:
        sizes = {"total_episodes": 16, "rollout_batch_size": 8, "batch_size": 8, "ppo_epochs": 2, "max_new_tokens": 5}
        settings |= sizes | {"reward": more_vowels}
    elif script is grpo:
        sizes = {"total_episodes": 16, "rollout_batch_size": 8, "batch_size": 8, "ppo_epochs": 2, "max_new_tokens": 5}
        settings |= sizes | {"reward": more_vowels, "group_size": 4}
    else:
        settings |= {"total_steps": 4, "eval_dataset": DATA[script]}
    return script.main(script.Args(**settings | flags))


def log(run_dir):
    return [json.loads(line) for line in open(run_dir / "metrics.jsonl")]


def weights(run_dir, name="adapter_model.safetensors"):
    return safetensors.torch.load_file(run_dir / "hf_model" / name)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def flags_of(script=sft, **flags):
    own = {"reward": more_vowels} if script in (ppo, grpo) else {}
    return script.Args(model="none", dataset=[{"text": "b"}], **own, **flags)


@pytest.fixture
def lora(gpt2_dir, tmp_path_factory):
    """lora(script, **flags): run directory of a run with adapters of rank 3, made once."""

    def made(script, **flags):
        key = script, *flags.items()
        if key not in _made:
            _made[key] = run(script, gpt2_dir, tmp_path_factory.mktemp("lora") / "run", lora_r=3, **flags)[1]
        return _made[key]

    return made


_made = {}


# ---- While sampling --------------------------------------------------------------------------------------------------


def with_adapters(build_model, family, dtype, **flags):
    """A model with adapters that change its logits."""
    lm = build_model(family, dtype)
    lm.name_or_path = "somewhere"
    train_adapters(lm, flags_of(lora_r=3, **flags))
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return lm


def identity(lm):
    """Everything that sampling must leave as it is: names, objects, flags and bits of weights, and merged adapters."""
    weights = {name: weight for name, weight in lm.named_parameters(remove_duplicate=False)}
    merged = [list(module.merged_adapters) for module in lm.modules() if hasattr(module, "merged_adapters")]
    facts = {name: (id(weight), weight.data_ptr(), weight.requires_grad) for name, weight in weights.items()}
    return facts, merged, {name: weight.detach().clone() for name, weight in weights.items()}


def assert_same(before, after):
    assert before[:2] == after[:2]
    assert before[2].keys() == after[2].keys()
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])


@pytest.mark.parametrize("targets", [("all-linear",), ("lm_head", "c_attn", "q_proj")])
def test_adapters_are_added_while_sampling(build_model, family, targets):
    """Also where the output layer is tied to the embedding, which does not change; afterwards all is as it was, also
    after an error."""
    if targets[0] == "lm_head":
        targets = ("lm_head", "c_attn" if family == "gpt2" else "q_proj")
    lm = with_adapters(build_model, family, torch.float64, lora_targets=targets)
    apart, before = logits(lm), identity(lm)
    embedding = lm.get_input_embeddings().weight.detach().clone()
    seen = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda *_: seen.append(1))
    adapted = [layer for layer in lm.modules() if hasattr(layer, "get_base_layer")]
    with for_sampling(lm):
        assert all(layer.merged for layer in adapted) and len(adapted) > 1
        calls = [layer.lora_A["default"].register_forward_hook(lambda *_: seen.append("A")) for layer in adapted]
        torch.testing.assert_close(logits(lm), apart, rtol=1e-12, atol=1e-12)
        assert torch.equal(lm.get_input_embeddings().weight, embedding)
    for call in [hook, *calls]:
        call.remove()
    assert seen == [1]
    assert_same(before, identity(lm))
    with pytest.raises(ValueError, match="broken"), for_sampling(lm):
        raise ValueError("broken")
    assert_same(before, identity(lm))
    assert torch.equal(logits(lm), apart)


def test_an_adapter_that_cannot_be_added_leaves_the_others_as_they_were(build_model):
    lm = with_adapters(build_model, "gpt2", torch.float32)
    last = [module for module in lm.modules() if hasattr(module, "lora_B")][-1]
    last.lora_B["default"].weight.data[0, 0] = float("nan")
    facts = identity(lm)
    with pytest.raises(ValueError, match="NaNs detected"), for_sampling(lm):
        pass
    assert facts[:2] == identity(lm)[:2]


def test_adapters_of_rounded_weights_stay_apart(build_model, family):
    lm = with_adapters(build_model, family, torch.bfloat16)
    apart = logits(lm)
    with for_sampling(lm):
        assert not any(getattr(module, "merged", False) for module in lm.modules())
        assert torch.equal(logits(lm), apart)


@pytest.mark.parametrize("lora_r", [0, 3])
def test_frozen_weights_are_cast_once(build_model, letters, accelerator, lora_r, monkeypatch):
    """Under autocast, sampling of seven tokens casts a weight once, whether it is trained or not; tokens stay."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function is torch.ops.aten._to_copy.default and arguments[0].shape == (20, 12):
                counted.append(arguments[0].data_ptr())
            return function(*arguments, **keywords or {})

    counted = []
    lm = build_model("qwen3")
    lm.requires_grad_(False)
    if lora_r:
        lm = with_adapters(build_model, "qwen3", torch.float32)
    monkeypatch.setattr(accelerator, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    sampling = {"seed": 1, "max_new_tokens": 7, "sample": ppo.sample, "decode_batch_size": 2}
    with Casts():
        sampled = generate_all(accelerator, lm, letters, [[3, 4, 5], [6], [7, 8]], ("rollout", 2), **sampling)
    assert sampled[3].sum() > 7
    assert len(counted) == 4  # up and gate of two blocks


# ---- New adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_new_adapters_change_nothing_and_are_all_that_is_trained(build_model, family, dtype):
    lm, plain = build_model(family, dtype), build_model(family, dtype)
    lm.name_or_path = "somewhere"
    train_adapters(lm, flags_of(lora_r=3))
    assert torch.equal(logits(lm), logits(plain))
    trained = {name: weight for name, weight in lm.named_parameters() if weight.requires_grad}
    kept = {name.replace(".base_layer", ""): w for name, w in lm.named_parameters() if not w.requires_grad}
    assert kept.keys() == dict(plain.named_parameters()).keys() and all("lora_" in name for name in trained)
    layers = [name for name, m in plain.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
    layers.remove("lm_head")
    assert {name.partition(".lora")[0] for name in trained} == set(layers)  # every linear layer but the last
    for name, weight in trained.items():
        assert weight.dtype == torch.promote_types(dtype, torch.float32)
        bound = weight.shape[1] ** -0.5
        assert not weight.any() if "lora_B" in name else 0.8 * bound < weight.abs().max() <= bound


def test_adapters_are_drawn_by_the_seed_alone(build_model):
    def drawn(seed, noise):
        torch.manual_seed(noise)
        lm = build_model()
        lm.name_or_path = "somewhere"
        train_adapters(lm, flags_of(ppo, lora_r=3, seed=seed))
        return {name: weight for name, weight in lm.named_parameters() if "lora_A" in name}

    one, again, other = drawn(1, 5), drawn(1, 6), drawn(2, 5)
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)
    assert len({weight.flatten()[0].item() for weight in one.values()}) == len(one)


def test_targets_rank_and_alpha(build_model):
    lm = build_model("llama")
    lm.name_or_path = "somewhere"
    train_adapters(lm, flags_of(lora_r=5, lora_alpha=20.0, lora_targets=("q_proj", "down_proj")))
    names = [name for name, weight in lm.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 2 * 2 and all("q_proj" in name or "down_proj" in name for name in names)
    layer = lm.model.layers[1].mlp.down_proj
    assert layer.scaling == {"default": 4.0} and layer.lora_A["default"].weight.shape == (5, 20)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"lora_r": -1}, "--lora-r -1 must be at least 0"),
        ({"lora_alpha": 8.0}, "--lora-alpha and --lora-targets need --lora-r"),
        ({"lora_r": 3, "lora_alpha": 0.0}, "--lora-alpha 0.0 must be a positive number"),
        (
            {"lora_r": 3, "num_layers_unfrozen": 1},
            "--num-layers-unfrozen must be -1 with --lora-r",
        ),
        ({"lora_targets": ("c_fc",)}, "--lora-alpha and --lora-targets need --lora-r"),
        (
            {"load_in_4bit": True, "lora_r": 3, "dtype": "float64"},
            "--load-in-4bit does not work with --dtype float64",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@SCRIPTS
def test_flags_that_contradict_each_other(script, flags, sentence):
    with pytest.raises(InputError) as stopped:
        flags_of(script, **flags)
    assert sentence in str(stopped.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"lora_r": 3, "lora_targets": ("c_fc", "q_prjo")},
            "--lora-targets: no module of --model is named q_prjo",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_adapted(build_model, flags, sentence):
    lm = build_model()
    lm.name_or_path = "somewhere"
    with pytest.raises(InputError) as stopped:
        train_adapters(lm, flags_of(**flags))
    assert sentence in str(stopped.value)


# ---- The reference ---------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(monkeypatch):
    """The batches of the rollouts of ppo."""
    found, rollout = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args: found.append(rollout(*args)) or found[-1])
    return found


def logprobs(directory, batch):
    """Of the sampled tokens, by the model that plain transformers finds in a directory."""
    lm = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return ppo.response_logprobs(lm, *batch.tokens())[0]


def test_the_reference_of_ppo_has_no_adapter(gpt2_dir, tmp_path, rollouts):
    _, run_dir = run(ppo, gpt2_dir, tmp_path / "run", lora_r=3)
    first, second = rollouts
    assert torch.equal(first.ref_logprobs, first.logprobs) and log(run_dir)[1]["objective/kl"] == 0
    mask = second.response_mask
    expected = logprobs(gpt2_dir, second)
    torch.testing.assert_close(second.ref_logprobs[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert (second.logprobs - second.ref_logprobs)[mask].abs().max() > 1e-3  # the policy has moved


def test_the_reference_of_ppo_is_the_adapter_that_it_continues(gpt2_dir, lora, tmp_path, rollouts):
    """Never silently the base model: TRL's issues 1193 and 1365."""
    adapter = lora(ppo) / "hf_model"
    _, run_dir = run(ppo, adapter, tmp_path / "run")
    first, second = rollouts[-2:]
    assert torch.equal(first.ref_logprobs, first.logprobs) and log(run_dir)[1]["objective/kl"] == 0
    mask = second.response_mask
    expected, base = logprobs(adapter, second), logprobs(gpt2_dir, second)
    torch.testing.assert_close(second.ref_logprobs[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert (base - expected)[mask].abs().max() > 1e-3
    assert (second.logprobs - second.ref_logprobs)[mask].abs().max() > 1e-3
    old, new = weights(lora(ppo)), weights(run_dir)
    assert old.keys() == new.keys() and all(not torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("further", [False, True])
def test_the_reference_of_grpo(gpt2_dir, lora, tmp_path, monkeypatch, further):
    """The model without the new adapter, or the one that is trained further as it came."""
    model, scored, score = lora(grpo) / "hf_model" if further else gpt2_dir, [], grpo.all_logprobs
    monkeypatch.setattr(grpo, "all_logprobs", lambda *args: scored.append((args[2], score(*args))) or scored[-1][1])
    _, run_dir = run(grpo, model, tmp_path / "run", lora_r=0 if further else 3)
    (_, first), (_, first_ref), (batch, second), (_, second_ref) = scored  # by the policy and the reference in turn
    assert torch.equal(first, first_ref) and log(run_dir)[1]["objective/kl"] == 0
    mask, expected = batch.response_mask, logprobs(model, batch)
    torch.testing.assert_close(second_ref[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert (second - second_ref)[mask].abs().max() > 1e-3  # the policy has moved
    if further:
        assert (logprobs(gpt2_dir, batch) - expected)[mask].abs().max() > 1e-3
        old, new = weights(lora(grpo)), weights(run_dir)
        assert old.keys() == new.keys() and all(not torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("further", [False, True])
def test_the_first_ratio_is_one(gpt2_dir, lora, tmp_path, further):
    flags = {"dtype": "float64", "attn_implementation": "sdpa", "ppo_epochs": 1, "total_episodes": 8, "eval_every": 0}
    model = lora(ppo) / "hf_model" if further else gpt2_dir
    metrics, _ = run(ppo, model, tmp_path / "run", lora_r=0 if further else 3, temperature=0.7, **flags)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-12) and metrics["policy/clipfrac"] == 0
    assert metrics["objective/kl"] == 0 and metrics["policy/approxkl"] < 1e-24


def test_padding_changes_nothing(build_model):
    """Also where the adapters add something."""
    lm = build_model("llama", torch.float64)
    lm.name_or_path = "somewhere"
    train_adapters(lm, flags_of(ppo, lora_r=3))
    for name, weight in lm.named_parameters():
        weight.data += 0.1 * ("lora_B" in name)
    model = ppo.PolicyWithValue(lm, "mlp", "normal")
    query, response, mask = IDS[:, :3], IDS[:, 3:], torch.ones(2, 7, dtype=torch.bool)
    garbage = torch.tensor([[7, 11, 2]] * 2), torch.zeros(2, 3, dtype=torch.bool)
    wide = [torch.cat(pair, 1) for pair in ((garbage[0], query), (garbage[1], mask[:, :3]))]
    with torch.no_grad():
        both = model(query, mask[:, :3], response, mask[:, 3:]), model(*wide, response, mask[:, 3:])
    for a, b in zip(*(found[:2] for found in both), strict=True):  # log-probabilities, values
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precompute_ref", [True, False])
@pytest.mark.parametrize("further", [False, True])
def test_the_reference_of_dpo(gpt2_dir, lora, tmp_path, further, precompute_ref):
    """Without the new adapter, or with the one that is trained further as it came; scored before or beside."""
    model = lora(dpo) / "hf_model" if further else gpt2_dir
    flags = {"beta": 0.5, "sft_coef": 0.0, "loss_type": "sigmoid", "lora_r": 0 if further else 3}
    _, run_dir = run(dpo, model, tmp_path / "run", precompute_ref=precompute_ref, **flags)
    first, *_, last = log(run_dir)
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-6) and first["eval/rewards/margins"] == 0
    sums = []
    for directory in (model, run_dir / "hf_model"):
        lm = AutoModelForCausalLM.from_pretrained(directory).eval()
        pairs, _ = dpo.encode_pairs(PAIRS, AutoTokenizer.from_pretrained(gpt2_dir), 32, flags_of(dpo), "--dataset")
        with torch.no_grad():
            sums.append(dpo.pair_logprobs(lm, False, pairs))
    chosen, rejected = (0.5 * (sums[1] - sums[0])).mean(1).tolist()
    assert last["eval/rewards/chosen"] == pytest.approx(chosen, abs=1e-4) and abs(chosen) > 1e-2
    assert last["eval/rewards/rejected"] == pytest.approx(rejected, abs=1e-4)


# ---- Files -----------------------------------------------------------------------------------------------------------


@LM_SCRIPTS
def test_adapters_are_read_by_transformers_and_peft(gpt2_dir, lora, script, tmp_path):
    folder = lora(script) / "hf_model"
    assert not (folder / "model.safetensors").exists() and not (folder / "config.json").exists()
    lm, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(lm), logits(theirs), rtol=1e-6, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(gpt2_dir)
    assert (logits(lm) - logits(base)).abs().max() > 1e-2
    moved = theirs.unload().state_dict()
    assert all(torch.equal(weight, moved[name]) for name, weight in base.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("ba")["input_ids"] == [1, 0]
    # merged as README says: a plain model with the same logits, which the scripts train
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(merged), logits(lm), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", [("c_attn", "lm_head"), ("wte", "c_fc")], ids=str)
def test_adapters_of_tied_layers(gpt2_dir, tmp_path, targets):
    """They are trained, exported and trained further."""
    flags = {"lora_r": 3, "lora_targets": targets}
    metrics, run_dir = run(sft, gpt2_dir, tmp_path / "run", **flags)
    names = " ".join(weights(run_dir))
    assert targets[0] in names and targets[1] in names
    assert run(sft, run_dir / "hf_model", tmp_path / "on", lr=1e-30)[0]["eval/loss"] == metrics["eval/loss"]


def test_the_heads_lie_beside_the_adapter(lora):
    policy = ppo.PolicyWithValue.load(lora(ppo) / "hf_model")
    head = weights(lora(ppo), "value_head.safetensors")
    assert all(torch.equal(head[name], weight) for name, weight in policy.value_head.state_dict().items())
    assert "lora_A" in str(policy.lm)
    heads = weights(lora(ilql), "ilql_heads.safetensors")
    assert heads.items() and all(
        torch.equal(heads[name], weight)
        for name, weight in ilql.PolicyWithQ.load(lora(ilql) / "hf_model").head_weights().items()
    )


def test_an_adapter_without_tokenizer_takes_that_of_its_base(lora, tmp_path):
    shutil.copytree(lora(sft) / "hf_model", tmp_path / "adapter")
    for path in (tmp_path / "adapter").glob("token*"):
        path.unlink()
    metrics, _ = run(sft, tmp_path / "adapter", tmp_path / "run", lr=1e-30)
    assert metrics["eval/loss"] == log(lora(sft))[-1]["eval/loss"]


def test_objects_of_peft_and_objects_without_a_name(gpt2_dir, build_model, letters, tmp_path):
    """peft's own class is trained as a directory would be; new adapters need the name of their base."""
    lm = AutoModelForCausalLM.from_pretrained(gpt2_dir)
    torch.manual_seed(0)
    lm = peft.get_peft_model(lm, peft.LoraConfig(r=3, target_modules=["c_fc"], init_lora_weights=False))
    before = logits(lm).clone()
    settings = {"dataset": DATA[sft], "eval_dataset": DATA[sft], "total_steps": 2, "batch_size": 4, "threads": 1}
    args = sft.Args(model=lm, tokenizer=letters, run_dir=str(tmp_path / "one"), lr=1e-30, **settings)
    folder = sft.main(args)[1] / "hf_model"
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), before, rtol=1e-6, atol=1e-6)
    args = sft.Args(model=build_model(), tokenizer=letters, run_dir=str(tmp_path / "two"), lora_r=3, **settings)
    with pytest.raises(InputError, match="--model is an object without name_or_path, by which adapters find it"):
        sft.main(args)


@SCRIPTS
def test_adapters_come_with_their_own_rank(lora, script, tmp_path):
    for flags in ({"lora_r": 3}, {"num_layers_unfrozen": 1}):
        with pytest.raises(InputError, match="--model is already a LoRA adapter: leave out --lora-r and"):
            run(script, lora(script) / "hf_model", tmp_path / "run", **flags)


def test_an_adapter_of_one_kind_of_model_is_not_one_of_another(lora, gpt2_dir, tmp_path):
    """Else the score head would be random, or the text model that of a judge."""
    wrong = [(sft, {"model": lora(reward) / "hf_model"}, "--model .*: it is a classifier: give a language model")]
    wrong += [(reward, {"model": lora(sft) / "hf_model"}, "--model .*: a LoRA adapter without score.*weight")]
    wrong += [(ppo, {"reward": str(lora(sft) / "hf_model")}, "--reward .* is no sequence classifier: it has no score")]
    for script, flags, sentence in wrong:
        with pytest.raises(InputError, match=sentence):
            run(script, flags.pop("model", gpt2_dir), tmp_path / "run", **flags)


def test_a_base_with_a_hole(lora, gpt2_dir, tmp_path):
    """transformers reports what the adapter lacks, not what its base does."""
    shutil.copytree(gpt2_dir, tmp_path / "base")
    held = safetensors.torch.load_file(tmp_path / "base" / "model.safetensors")
    held.pop("transformer.h.1.mlp.c_fc.weight")
    safetensors.torch.save_file(held, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    shutil.copytree(lora(sft) / "hf_model", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    with pytest.raises(InputError, match="--model .*adapter cannot be loaded: transformer.h.1.mlp.c_fc.* is missing"):
        load_model(flags_of(), tmp_path / "adapter")


OTHER_ADAPTERS = [{"bias": "lora_only"}, {"trainable_token_indices": [1, 2]}]
OTHER_ADAPTERS += [{"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, {"use_dora": True}, "IA3"]


@pytest.mark.parametrize("option", OTHER_ADAPTERS, ids=str)
def test_adapters_that_would_lose_something(gpt2_dir, tmp_path, option):
    """transformers does not export these, nor load the vectors of DoRA."""
    config = peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], task_type="CAUSAL_LM")
    if option != "IA3":
        config = peft.LoraConfig(r=3, target_modules=["c_fc"], task_type="CAUSAL_LM", **option)
    lm = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(gpt2_dir), config)
    lm.save_pretrained(tmp_path / "theirs")
    AutoTokenizer.from_pretrained(gpt2_dir).save_pretrained(tmp_path / "theirs")
    with pytest.raises(InputError, match="--model .*theirs cannot be loaded: .*(is not plain LoRA|magnitude.*missing)"):
        run(sft, tmp_path / "theirs", tmp_path / "run")


@QUICK
def test_bfloat16(gpt2_dir, tmp_path, script):
    """Adapters and heads stay in float32, that of a classifier too."""
    _, run_dir = run(script, gpt2_dir, tmp_path / "run", lora_r=3, dtype="bfloat16")
    assert {weight.dtype for weight in weights(run_dir).values()} == {torch.float32}


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


@SCRIPTS
def test_a_stopped_run_continues_bitwise(monkeypatch, gpt2_dir, lora, script, tmp_path):
    """From a checkpoint that holds the adapters and heads alone."""
    calls, stop_requested = [], logging.Run.stop_requested

    def stop(run):
        calls.append(1)
        run.signal = 15 if len(calls) == 1 else None
        return stop_requested(run)

    whole = lora(script)
    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    with pytest.raises(SystemExit) as stopped:
        run(script, gpt2_dir, tmp_path / "run", lora_r=3)
    assert stopped.value.code == 143 and len(log(tmp_path / "run")) == 2
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    held = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert all("lora_" in name or "head" in name or "modules_to_save" in name for name in held), sorted(held)[:9]
    assert any("lora_" in name for name in held)
    if script is ilql:
        assert "target_q_heads.1.2.bias" in held  # frozen, but not as --model gave it
    run(script, gpt2_dir, tmp_path / "run", lora_r=3)
    assert log(tmp_path / "run") == log(whole)
    one, other = weights(tmp_path / "run"), weights(whole)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


OTHER_WEIGHTS = {  # flags, whether --model has another base, what is said
    "rank": ({"lora_r": 5}, False, "holds other weights, such as .*lora_A.default.weight"),
    "base": ({"lora_r": 3}, True, "holds other weights, such as frozen ones"),
    "all weights": ({}, False, "holds other weights, such as .*"),
    "fewer targets": ({"lora_r": 3, "lora_targets": ("c_attn",)}, False, "holds other weights, .*c_proj.*"),
}


@pytest.mark.parametrize(
    ("script", "change"),
    [(script, "rank") for script in DATA] + [(sft, change) for change in OTHER_WEIGHTS if change != "rank"],
    ids=lambda value: getattr(value, "__name__", value).removeprefix("algos."),
)
def test_checkpoints_of_other_weights(build_model, letters, gpt2_dir, lora, script, change, tmp_path):
    flags, other_base, sentence = OTHER_WEIGHTS[change]
    checkpoint = max((lora(script) / "checkpoints").iterdir())
    if other_base:
        build_model(seed=5).save_pretrained(tmp_path / "model")
        letters.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=f"--resume .* {sentence}: keep its --model and --lora-r, or name"):
        run(script, tmp_path / "model" if other_base else gpt2_dir, tmp_path / "run", resume=str(checkpoint), **flags)


def test_micro_batches_and_recomputed_activations_change_nothing(gpt2_dir, tmp_path):
    flags = {"lora_r": 3, "dtype": "float64", "attn_implementation": "sdpa"}
    for script in (sft, ppo, grpo, dpo):
        runs = [
            log(run(script, gpt2_dir, tmp_path / f"{script.__name__}{size}", micro_batch_size=size, **flags, **more)[1])
            for size, more in ((8, {}), (1, {"gradient_checkpointing": True}))
        ]
        for one, other in zip(*runs, strict=True):
            if one["step"] == 1:  # whose rewards are zero to rounding
                one.pop("rewards/accuracies", None)
                other.pop("rewards/accuracies", None)
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


# ---- Reward adapters -------------------------------------------------------------------------------------------------

TEXTS = ["ba", "cdeedca", "fgu", "m", "hijklu"]
ENDED = [True, True, False, True, True]


def scores(directory, lm, **flags):
    args = SimpleNamespace(reward=str(directory), trust_remote_code=False, dtype="float32", load_in_4bit=False)
    model = RewardModel(SimpleNamespace(**vars(args) | flags), lm)
    return model, model(TEXTS, ENDED, 2)


def shared_numbers(reward_model, lm):
    """How many weights the two hold in the same memory."""
    memory = {weight.data_ptr() for weight in lm.parameters()}
    return sum(weight.numel() for weight in reward_model.model.parameters() if weight.data_ptr() in memory)


NO_POLICY = SimpleNamespace(device="cpu", named_parameters=dict().items)


@pytest.fixture
def judge(gpt2_dir, tmp_path_factory):
    """Run directory of a reward adapter."""
    if "judge" not in _made:
        _made["judge"] = run(reward, gpt2_dir, tmp_path_factory.mktemp("judge") / "run", lora_r=3)[1]
    return _made["judge"]


def test_the_score_head_is_trained_and_saved(gpt2_dir, lora):
    held = weights(lora(reward))
    (name,) = (name for name in held if "score" in name)
    first = safetensors.torch.load_file(min((lora(reward) / "checkpoints").iterdir()) / "model.safetensors")
    assert not torch.equal(held[name], first["score.modules_to_save.default.weight"]) and held[name].shape == (1, 12)
    assert log(lora(reward))[-1]["eval/loss"] < log(lora(reward))[0]["eval/loss"] - 0.01
    # what the model card shows, and peft's own class
    pipe = pipeline("text-classification", str(lora(reward) / "hf_model"), model_kwargs={"num_labels": 1})
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(lora(reward) / "hf_model", num_labels=1).eval()
    ids = AutoTokenizer.from_pretrained(gpt2_dir)("cdeedca", return_tensors="pt")
    with torch.no_grad():
        expected = model(**ids).logits.item()
    assert pipe("cdeedca", function_to_apply="none")[0]["score"] == pytest.approx(expected, abs=1e-5)
    assert "model_kwargs={'num_labels': 1}" in (lora(reward) / "README.md").read_text()


def test_scores_of_a_reward_adapter_are_those_of_the_reward_model(judge, gpt2_dir):
    """Alone, by hand from plain transformers, and on the base of a policy with adapters of its own."""
    model, alone = scores(judge / "hf_model", NO_POLICY)
    plain = AutoModelForSequenceClassification.from_pretrained(judge / "hf_model", num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge / "hf_model")
    for text, end, score in zip(TEXTS, ENDED, alone, strict=True):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * end
        with torch.no_grad():
            by_hand = plain(input_ids=torch.tensor([ids])).logits.item()
        assert score.item() == pytest.approx(by_hand, abs=1e-4)
    # the policy's own base: the same memory, the same bits, also after the policy has moved
    lm = AutoModelForCausalLM.from_pretrained(gpt2_dir)
    train_adapters(lm, flags_of(ppo, lora_r=5))
    model, shared = scores(judge / "hf_model", lm)
    base = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(gpt2_dir).parameters())
    assert shared_numbers(model, lm) == base
    for weight in lm.parameters():
        weight.data += 0.1 * weight.requires_grad
    assert torch.equal(shared, alone) and torch.equal(model(TEXTS, ENDED, 2), alone)


def test_only_equal_frozen_weights_are_shared(judge, gpt2_dir, build_model):
    trained = AutoModelForCausalLM.from_pretrained(gpt2_dir)
    assert shared_numbers(scores(judge / "hf_model", trained)[0], trained) == 0  # all of it moves
    other = build_model(seed=5).requires_grad_(False)
    model, found = scores(judge / "hf_model", other)
    norms = sum(w.numel() for n, w in other.named_parameters() if "ln_" in n or n.endswith("bias"))
    assert shared_numbers(model, other) <= norms and torch.equal(found, scores(judge / "hf_model", NO_POLICY)[1])
    half = AutoModelForCausalLM.from_pretrained(gpt2_dir, dtype=torch.bfloat16).requires_grad_(False)
    assert shared_numbers(scores(judge / "hf_model", half)[0], half) == 0


@pytest.mark.parametrize("script", [ppo, pytest.param(grpo, marks=pytest.mark.slow)])
def test_a_run_with_a_reward_adapter(judge, gpt2_dir, tmp_path, script):
    """The first evaluation has the same scores, whether nothing, all, or half of the base is shared."""
    found = []
    for i, flags in enumerate(({}, {"lora_r": 3}, {"num_layers_unfrozen": 1})):
        _, run_dir = run(script, gpt2_dir, tmp_path / str(i), reward=str(judge / "hf_model"), **flags)
        samples = [json.loads(line) for line in open(run_dir / "samples.jsonl")]
        found.append([row["reward"] for row in samples if row["step"] == 0])
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 5
    assert log(run_dir)[0]["eval/reward"] == pytest.approx(sum(found[0]) / 5)


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    """A Llama whose layers the 4-bit kernels of a CPU can take."""
    folder, sizes = tmp_path_factory.mktemp("wide"), {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 25}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    ids = {"bos_token_id": 21, "eos_token_id": 22, "pad_token_id": 23, "max_position_embeddings": 32}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids)).save_pretrained(folder)
    randomwalks.tokenizer().save_pretrained(folder)
    return folder


@QUICK
def test_four_bits(wide_dir, script, tmp_path, monkeypatch):
    """The frozen layers are quantised, the start is near that of the whole model, the adapter fits the whole model."""
    owner = reward if script is reward else models  # the others by `load_lm`
    seen, adapt = [], owner.train_adapters
    monkeypatch.setattr(owner, "train_adapters", lambda lm, *args: seen.append(lm) or adapt(lm, *args))
    flags = {"lora_r": 3, "dtype": "float32"}
    _, run_dir = run(script, wide_dir, tmp_path / "run", load_in_4bit=True, **flags)
    layer = seen[0].model.layers[1].mlp.down_proj
    assert type(layer.base_layer).__name__ == "Linear4bit" and layer.base_layer.weight.dtype == torch.uint8
    assert layer.lora_A["default"].weight.requires_grad
    found = log(run_dir)
    assert all(value == value for line in found for value in line.values() if value is not None)
    if script in (sft, ilql, reward):
        whole = log(run(script, wide_dir, tmp_path / "whole", **flags)[1])
        assert found[0]["eval/loss"] != whole[0]["eval/loss"]
        assert found[0]["eval/loss"] == pytest.approx(whole[0]["eval/loss"], rel=0.2)
    if script in (ppo, grpo):
        assert found[1]["objective/kl"] == 0
    kind, options = AutoModelForCausalLM, {}
    if script is reward:
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1}
    lm, report = kind.from_pretrained(run_dir / "hf_model", output_loading_info=True, **options)
    assert not report["unexpected_keys"] and type(lm.model.layers[1].mlp.down_proj.base_layer).__name__ == "Linear"
    # continues bitwise from its last but one checkpoint
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])
    (run_dir / "README.md").unlink()
    run(script, wide_dir, run_dir, load_in_4bit=True, **flags)
    assert log(run_dir) == found


def test_four_bits_need_adapters_and_a_package(wide_dir, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--load-in-4bit: 4-bit weights cannot be trained: add --lora-r"):
        run(sft, wide_dir, tmp_path / "run", load_in_4bit=True)
    monkeypatch.setattr(transformers.quantizers.quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(InputError, match="--model .*.* cannot be loaded: .*requires bitsandbytes: `pip install"):
        run(sft, wide_dir, tmp_path / "run", load_in_4bit=True, lora_r=3)


# ---- Processes -------------------------------------------------------------------------------------------------------

RANKS = f"""import json, sys; sys.path.insert(0, {str(ROOT)!r})
import accelerate
from algos import dpo, grpo, ilql, ppo, reward, sft
accelerate.Accelerator.end_training = lambda accelerator: None  # the next run needs the process group
def more_vowels(outputs, **columns):
    return [float(sum(c in "aeiou" for c in output)) for output in outputs]
def sums(outputs, **columns):
    return [float(sum(map(ord, output)) % 7) for output in outputs]
rewards = {{"ppo": more_vowels, "grpo": sums}}
for name, flags in json.load(open("runs.json")):
    script = {{"dpo": dpo, "grpo": grpo, "ilql": ilql, "ppo": ppo, "reward": reward, "sft": sft}}[name]
    script.main(script.Args(**flags | ({{"reward": rewards[name]}} if name in rewards else {{}})))
"""


def sums(outputs, **columns):
    """Seldom equal: a run on nothing but groups of equal rewards would make steps of rounding errors."""
    return [float(sum(map(ord, output)) % 7) for output in outputs]


@pytest.fixture
def t5_dir(tmp_path):
    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "vocab_size": 25}
    ids = {"bos_token_id": 21, "eos_token_id": 22, "pad_token_id": 23, "decoder_start_token_id": 23}
    torch.manual_seed(0)
    lm = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ids, initializer_factor=3.0))
    lm.save_pretrained(tmp_path / "t5")
    randomwalks.tokenizer().save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


@pytest.mark.slow
def test_two_processes_equal_one(monkeypatch, gpt2_dir, t5_dir, tmp_path):
    """With adapters, and for encoder-decoders, in float64; three rows a process in micro-batches of two and one."""
    sizes = {
        "batch_size": 6,
        "micro_batch_size": 2,
        "dtype": "float64",
        "attn_implementation": "sdpa",
        "total_steps": 3,
        "adam_eps": 1e-6,  # with the usual one Adam makes steps of rounding errors where a gradient is zero
    }
    cases = [(script, gpt2_dir, {"lora_r": 3}) for script in DATA]
    cases += [(script, str(t5_dir), {}) for script in (sft, ilql, ppo, grpo)]
    runs = []
    for i, (script, model, flags) in enumerate(cases):
        more = {"rollout_batch_size": 12, "total_episodes": 24} if script in (ppo, grpo) else {}
        more |= {"reward": sums} if script is grpo else {}
        settings = sizes | flags | more
        flags = {k: v for k, v in settings.items() if k != "total_steps" or script not in (ppo, grpo)}
        seen = []
        monkeypatch.setattr(script, "main", lambda args, seen=seen: seen.append(vars(args)) or (None, None))
        run(script, model, tmp_path / f"one{i}", **flags)
        monkeypatch.undo()
        runs.append((script, seen[0] | {"run_dir": f"two{i}"}, run(script, model, tmp_path / f"one{i}", **flags)[1]))
    named = [(script.__name__[6:], {k: v for k, v in flags.items() if k != "reward"}) for script, flags, _ in runs]
    (tmp_path / "runs.json").write_text(json.dumps(named))
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(20000 + os.getpid() % 20000), "ranks.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-9000:]
    for i, (*_, one) in enumerate(runs):
        for a, b in zip(log(one), log(tmp_path / f"two{i}"), strict=True):
            if a["step"] == 1:  # policy and reference are equal to rounding: no accuracy yet
                a.pop("rewards/accuracies", None), b.pop("rewards/accuracies", None)
            assert b == pytest.approx(a, rel=1e-9, abs=1e-9), cases[i]
