"""LoRA adapters, 4-bit weights and reward adapters: `python -m pytest tests/test_adapters.py`"""

import functools
import json
import shutil

import peft
import pytest
import safetensors.torch
import torch
import transformers
from helpers import close, equal, lines_of, log, recorded, rolled, same_run, save, weights
from test_models import IDS, PAIRS, more_vowels, run, with_weights
from test_reward import alone, ppo_scores
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from algos import dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks
from common.errors import InputError
from common.identity import files_of_flag
from common.lm import load
from common.lm.adapters import for_sampling, train_adapters
from common.lm.load import load_model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def flags_of(script=sft, **flags):
    if script in (ppo, grpo):
        flags["reward"] = more_vowels
    return script.Args(model="none", dataset=[{"text": "b"}], **flags)


def adapted(lm, script=sft, **flags):
    """The model with new adapters, by these flags."""
    lm.name_or_path = "somewhere"
    train_adapters(lm, flags_of(script, **flags))
    return lm


@pytest.fixture(scope="module")
def lora(tiny_dirs, tmp_path_factory):
    """lora(script): run directory of a run on GPT-2 with adapters of rank 3, made once."""

    @functools.cache
    def made(script):
        return run(script, tiny_dirs["gpt2"], tmp_path_factory.mktemp("lora") / "run", lora_r=3)[1]

    return made


def with_adapters(build_model, family, dtype, **flags):
    """A model with adapters that change its logits."""
    lm = adapted(build_model(family, dtype), lora_r=3, **flags)
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return lm


def assert_unchanged(lm, before):
    """Sampling leaves all as it was: names, objects, flags and bits of weights; nothing is merged."""
    named = dict(lm.named_parameters(remove_duplicate=False))
    assert named.keys() == before.keys()
    for name, (weight, pointer, trained, values) in before.items():
        assert named[name] is weight and weight.data_ptr() == pointer and weight.requires_grad == trained
        assert torch.equal(weight, values)
    assert not any(getattr(module, "merged_adapters", []) for module in lm.modules())


ADDED = [("gpt2", ("all-linear",)), ("gpt2", ("lm_head", "c_attn")), ("qwen3", ("lm_head", "q_proj"))]


@pytest.mark.parametrize(("family", "targets"), ADDED, ids=str)
def test_adapters_are_added_while_sampling(build_model, family, targets):
    """Also where the output layer is tied to the embedding, which does not change."""
    lm = with_adapters(build_model, family, torch.float64, lora_targets=targets)
    apart = logits(lm)
    named = lm.named_parameters(remove_duplicate=False)
    before = {name: (w, w.data_ptr(), w.requires_grad, w.detach().clone()) for name, w in named}
    embedding = lm.get_input_embeddings().weight.detach().clone()
    layers = [layer for layer in lm.modules() if hasattr(layer, "get_base_layer")]
    assert len(layers) > 1
    with for_sampling(lm):
        assert all(layer.merged for layer in layers)
        close(logits(lm), apart, 1e-12)
        assert torch.equal(lm.get_input_embeddings().weight, embedding)
    assert_unchanged(lm, before)
    with pytest.raises(ValueError, match="broken"), for_sampling(lm):
        raise ValueError("broken")
    assert_unchanged(lm, before)
    assert torch.equal(logits(lm), apart)


def test_types_of_merged_weights_under_autocast(build_model):
    """Those of matrices are cast once; a lookup in an embedding is never cast."""
    lm = with_adapters(build_model, "gpt2", torch.float32, lora_targets=("wte", "c_attn"))
    layers = [module.get_base_layer() for module in lm.modules() if hasattr(module, "get_base_layer")]
    with torch.autocast("cpu", torch.bfloat16), for_sampling(lm):
        types = {type(layer).__name__: layer.weight.dtype for layer in layers}
    assert types == {"Embedding": torch.float32, "Conv1D": torch.bfloat16}


def test_adapters_of_rounded_weights_stay_apart(build_model):
    lm = with_adapters(build_model, "llama", torch.bfloat16)
    apart = logits(lm)
    with for_sampling(lm):
        assert not any(getattr(module, "merged", False) for module in lm.modules())
        assert torch.equal(logits(lm), apart)


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)])
def test_new_adapters_change_nothing_and_are_all_that_is_trained(build_model, family, dtype):
    plain = build_model(family, dtype)
    lm = adapted(build_model(family, dtype), lora_r=3)
    assert torch.equal(logits(lm), logits(plain))
    trained = {name: weight for name, weight in lm.named_parameters() if weight.requires_grad}
    kept = {name.replace(".base_layer", "") for name, weight in lm.named_parameters() if not weight.requires_grad}
    assert kept == dict(plain.named_parameters()).keys()
    layers = [name for name, m in plain.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
    layers.remove("lm_head")
    assert {name.partition(".lora_")[0] for name in trained} == set(layers)  # every linear layer but the last
    for name, weight in trained.items():
        assert weight.dtype == torch.promote_types(dtype, torch.float32)
        bound = weight.shape[1] ** -0.5
        smallest, largest = (0, 0) if "lora_B" in name else (0.8 * bound, bound)
        assert smallest <= weight.abs().max() <= largest


def test_adapters_are_drawn_by_the_seed_alone(build_model):
    drawn = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        lm = adapted(build_model(), ppo, lora_r=3, seed=seed)
        drawn.append(torch.cat([weight.flatten() for name, weight in lm.named_parameters() if "lora_A" in name]))
    assert torch.equal(drawn[0], drawn[1])
    assert len(drawn[0].unique()) > 0.99 * len(drawn[0]) and not (drawn[0] == drawn[2]).any()


def test_targets_rank_and_alpha(build_model):
    lm = adapted(build_model("llama"), lora_r=5, lora_alpha=20.0, lora_targets=("q_proj", "down_proj"))
    names = [name for name, weight in lm.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 2 * 2
    assert all("q_proj" in name or "down_proj" in name for name in names)
    layer = lm.model.layers[1].mlp.down_proj
    assert layer.scaling == {"default": 4.0}
    assert layer.lora_A["default"].weight.shape == (5, 20)
    with pytest.raises(InputError, match="--lora-targets: no module of --model is named q_prjo"):
        adapted(build_model(), lora_r=3, lora_targets=("c_fc", "q_prjo"))


def logprobs(directory, episodes):
    """Of the sampled tokens, by the model that plain transformers finds in a directory."""
    lm = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return ppo.line_logprobs(lm, lines_of(episodes))[0]


@pytest.mark.parametrize("further", [False, True])
def test_the_reference_of_a_rollout(gpt2_dir, lora, tmp_path, monkeypatch, further):
    """Never silently the base model, as in TRL's issues 1193 and 1365."""
    model = lora(ppo) / "hf_model" if further else gpt2_dir
    rollouts = rolled(monkeypatch, ppo)
    _, run_dir = run(ppo, model, tmp_path / "run", lora_r=0 if further else 3)
    (_, first), (_, second) = rollouts
    assert all(torch.equal(episode.logprobs, episode.ref_logprobs) for episode in first)
    expected = logprobs(model, second)
    close(ppo.of_all(second, "ref_logprobs"), expected, 1e-5)
    assert (ppo.of_all(second, "logprobs") - expected).abs().max() > 1e-3  # the policy has moved
    if further:
        assert (logprobs(gpt2_dir, second) - expected).abs().max() > 1e-3
        new = weights(run_dir)
        assert not any(torch.equal(weight, new[name]) for name, weight in weights(model.parent).items())


@pytest.mark.parametrize(("further", "precompute_ref"), [(False, False), (True, True)])
def test_the_reference_of_dpo(gpt2_dir, lora, tmp_path, further, precompute_ref):
    """Without the new adapter, or with the one that is trained further as it came; scored before or beside."""
    model = lora(dpo) / "hf_model" if further else gpt2_dir
    flags = {"beta": 0.5, "sft_coef": 0.0, "loss_type": "sigmoid", "lora_r": 0 if further else 3}
    _, run_dir = run(dpo, model, tmp_path / "run", precompute_ref=precompute_ref, **flags)
    first, *_, last = log(run_dir)
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert first["eval/rewards/margins"] == 0
    sums = []
    for directory in (model, run_dir / "hf_model"):
        lm = AutoModelForCausalLM.from_pretrained(directory).eval()
        pairs, _ = dpo.encode_pairs(PAIRS, AutoTokenizer.from_pretrained(gpt2_dir), 32, flags_of(dpo), "--dataset")
        with torch.no_grad():
            sums.append(dpo.pair_logprobs(lm, False, pairs))
    chosen, rejected = (0.5 * (sums[1] - sums[0])).mean(1).tolist()
    assert abs(chosen) > 1e-2
    assert last["eval/rewards/chosen"] == pytest.approx(chosen, abs=1e-4)
    assert last["eval/rewards/rejected"] == pytest.approx(rejected, abs=1e-4)


def test_the_heads_lie_beside_the_adapter(lora):
    folder = lora(ppo) / "hf_model"
    assert not (folder / "model.safetensors").exists() and not (folder / "config.json").exists()
    policy = ppo.PolicyWithValue.load(folder)
    assert "lora_A" in str(policy.lm)
    assert equal(safetensors.torch.load_file(folder / "value_head.safetensors"), policy.value_head.state_dict())
    folder = lora(ilql) / "hf_model"
    heads = ilql.PolicyWithQ.load(folder).head_weights()
    assert equal(safetensors.torch.load_file(folder / "ilql_heads.safetensors"), heads)


def test_an_adapter_without_tokenizer_takes_that_of_its_base(lora, tmp_path):
    shutil.copytree(lora(sft) / "hf_model", tmp_path / "adapter")
    for path in (tmp_path / "adapter").glob("token*"):
        path.unlink()
    metrics, _ = run(sft, tmp_path / "adapter", tmp_path / "run", lr=1e-30)
    assert metrics["eval/loss"] == log(lora(sft))[-1]["eval/loss"]


def test_objects_of_peft(gpt2_dir, letters, tmp_path):
    """peft's own class is trained as a directory would be."""
    lm = AutoModelForCausalLM.from_pretrained(gpt2_dir)
    torch.manual_seed(0)
    lm = peft.get_peft_model(lm, peft.LoraConfig(r=3, target_modules=["c_fc"], init_lora_weights=False))
    before = logits(lm).clone()
    _, run_dir = run(sft, "", tmp_path / "run", model=lm, tokenizer=letters, lr=1e-30)
    close(logits(AutoModelForCausalLM.from_pretrained(run_dir / "hf_model")), before, 1e-6)


def test_adapters_that_do_not_fit(lora, gpt2_dir, wide_dir, tmp_path):
    """One of another kind of model would have a random head. Weights that are stored in four bits say so themselves."""
    policy = lora(sft) / "hf_model"
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(wide_dir, quantization_config=config).save_pretrained(tmp_path / "stored")
    AutoTokenizer.from_pretrained(wide_dir).save_pretrained(tmp_path / "stored")
    for script, source, flags, sentence in (
        (sft, policy, {"lora_r": 3}, "--model is already a LoRA adapter: leave out --lora-r and"),
        (sft, policy, {"num_layers_unfrozen": 1}, "--model is already a LoRA adapter: leave out --lora-r and"),
        (reward, policy, {}, "--model .*: a LoRA adapter without score.*weight"),
        (ppo, gpt2_dir, {"reward": str(policy)}, "--reward .* is not a sequence classifier: it has no score"),
        (sft, tmp_path / "stored", {}, r"quantised weights \(--load-in-4bit, or of --model\) cannot be trained: add"),
    ):
        with pytest.raises(InputError, match=sentence):
            run(script, source, tmp_path / "run", **flags)


def based_on(adapter, base, folder):
    """A copy of an adapter that names another base."""
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    return folder


def test_bases_that_are_refused(lora, gpt2_dir, tmp_path):
    """The words are the library's, but for a base with a hole: transformers reports only what the adapter lacks."""
    adapter = lora(sft) / "hf_model"
    hollow = with_weights(gpt2_dir, tmp_path / "hollow", **{"transformer.h.1.mlp.c_fc.weight": None})
    bases = {tmp_path / "moved": "moved", adapter: adapter, hollow: "transformer.h.1.mlp.c_fc.* is missing"}
    for number, (base, said) in enumerate(bases.items()):
        with pytest.raises(InputError, match=f"--model {tmp_path}/{number} cannot be loaded: .*{said}"):
            load_model(flags_of(), based_on(adapter, base, tmp_path / f"{number}"))


def test_the_base_of_an_adapter_is_part_of_the_run(lora, gpt2_dir, tmp_path):
    shutil.copytree(gpt2_dir, tmp_path / "base")
    adapter = based_on(lora(sft) / "hf_model", tmp_path / "base", tmp_path / "adapter")
    named = files_of_flag(str(adapter))
    assert {tmp_path / "base/model.safetensors", adapter / "adapter_model.safetensors"} < {*named}
    assert files_of_flag(f"{adapter}:GOOD") == named


def test_the_line_of_use_of_an_adapter_ends_where_it_was_trained_to(gpt2_dir, tmp_path):
    """transformers reads the end tokens of its base, which may be others."""
    shutil.copytree(gpt2_dir, tmp_path / "base")
    path = tmp_path / "base/generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
    _, run_dir = run(sft, tmp_path / "base", tmp_path / "run", lora_r=2)
    assert "eos_token_id=[7, 22]" in (run_dir / "README.md").read_text()
    _, run_dir = run(sft, tmp_path / "base", tmp_path / "whole")
    assert "eos_token_id" not in (run_dir / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(run_dir / "hf_model").generation_config.eos_token_id == [7, 22]


@pytest.mark.parametrize("option", [{"bias": "lora_only"}, {"use_dora": True}, "IA3", {"trainable_token_indices": [2]}])
def test_adapters_that_would_lose_something(gpt2_dir, tmp_path, option):
    """transformers does not export these, nor load the vectors of DoRA."""
    config = peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], task_type="CAUSAL_LM")
    if option != "IA3":
        config = peft.LoraConfig(r=3, target_modules=["c_fc"], task_type="CAUSAL_LM", **option)
    lm = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(gpt2_dir), config)
    save(tmp_path / "theirs", lm, AutoTokenizer.from_pretrained(gpt2_dir))
    said = "(is not plain LoRA|magnitude.*missing|also holds .*, which the export would lose)"
    with pytest.raises(InputError, match=f"--model .*theirs cannot be loaded: .*{said}"):
        load_model(flags_of(), tmp_path / "theirs")


STORED = {"stored": {}, "trained": {"modules_to_save": ["lm_head", "embed_tokens"]}}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", STORED)
def test_an_export_holds_all_that_came_with_an_adapter(build_model, letters, tmp_path, kind, tied):
    """Also whole layers, which peft stores on request."""
    build_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, **STORED[kind])
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    for name, weight in theirs.named_parameters():
        if "embed_tokens" in name:
            weight.data.normal_()
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=kind == "stored")
    letters.save_pretrained(tmp_path / "adapter")
    _, run_dir = run(sft, tmp_path / "adapter", tmp_path / "run", lr=1e-30)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    close(logits(AutoModelForCausalLM.from_pretrained(run_dir / "hf_model")), logits(before), 1e-6)
    moved = logits(before) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert moved.abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_an_adapter_of_fused_experts_goes_on(letters, tmp_path, family):
    """Its routers have adapters, since peft adds them, that stay zero: the file holds them, as its list of targets."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_experts_per_tok": 2, "vocab_size": len(letters), "max_position_embeddings": 32}
    config = transformers.Qwen3MoeConfig(**sizes, num_key_value_heads=1, num_experts=3, moe_intermediate_size=24)
    if family == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3)
    save(tmp_path / "base", AutoModelForCausalLM.from_config(config), letters)
    _, run_dir = run(sft, tmp_path / "base", tmp_path / "one", lora_r=3)
    metrics, again = run(sft, run_dir / "hf_model", tmp_path / "two", lr=1e-30)
    assert metrics["eval/loss"] == pytest.approx(log(run_dir)[-1]["eval/loss"], abs=1e-5)
    held = safetensors.torch.load_file(again / "hf_model/adapter_model.safetensors")
    assert equal(held, safetensors.torch.load_file(run_dir / "hf_model/adapter_model.safetensors"))
    routers = [weight for name, weight in held.items() if ".gate.lora_B" in name]
    assert routers and all(weight.abs().max() == 0 for weight in routers)


@pytest.mark.parametrize("script", [ppo, ilql, reward], ids=lambda script: script.__name__)
def test_a_run_goes_on_bitwise(gpt2_dir, lora, script, tmp_path):
    """From a checkpoint that holds the adapters and heads alone."""
    whole = lora(script)
    checkpoint = min((whole / "checkpoints").iterdir())
    held = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert all("lora_" in name or "head" in name or "modules_to_save" in name for name in held), sorted(held)[:9]
    assert any("lora_" in name for name in held)
    if script is ilql:
        assert "target_q_heads.1.2.bias" in held  # frozen, but not as --model gave it
    _, run_dir = run(script, gpt2_dir, tmp_path / "run", lora_r=3, resume=str(checkpoint))
    assert 0 < len(log(run_dir)) < 4 and log(run_dir) == log(whole)[-len(log(run_dir)) :]
    assert equal(weights(run_dir), weights(whole))


@pytest.mark.parametrize(("seed", "rank"), [(5, 3), (0, 5)])
def test_checkpoints_of_other_weights(build_model, letters, lora, tmp_path, seed, rank):
    checkpoint = max((lora(sft) / "checkpoints").iterdir())
    save(tmp_path / "model", build_model(seed=seed), letters)
    with pytest.raises(InputError, match="--resume .* holds other weights: keep its --model and"):
        run(sft, tmp_path / "model", tmp_path / "run", resume=str(checkpoint), lora_r=rank)


def test_micro_batches_and_recomputed_activations_change_nothing(gpt2_dir, tmp_path):
    flags = {"lora_r": 3, "dtype": "float64", "attn_implementation": "sdpa"}
    run(sft, gpt2_dir, tmp_path / "whole", micro_batch_size=8, **flags)
    run(sft, gpt2_dir, tmp_path / "parts", micro_batch_size=1, gradient_checkpointing=True, **flags)
    same_run(tmp_path / "parts", tmp_path / "whole")


TEXTS = ["ba", "cdeedca", "fgu", "m", "hijklu"]
ENDED = [True, True, False, True, True]


@pytest.fixture
def judge(lora):
    return lora(reward) / "hf_model"


def test_the_score_head_is_trained_and_saved(gpt2_dir, lora, judge):
    held = weights(lora(reward))
    (name,) = (name for name in held if "score" in name)
    first = safetensors.torch.load_file(min((lora(reward) / "checkpoints").iterdir()) / "model.safetensors")
    assert held[name].shape == (1, 12)
    assert not torch.equal(held[name], first["score.modules_to_save.default.weight"])
    assert log(lora(reward))[-1]["eval/loss"] < log(lora(reward))[0]["eval/loss"] - 0.01
    # what the model card shows, and peft's own class
    pipe = pipeline("text-classification", str(judge), model_kwargs={"num_labels": 1})
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(judge, num_labels=1).eval()
    ids = AutoTokenizer.from_pretrained(gpt2_dir)("cdeedca", return_tensors="pt")
    with torch.no_grad():
        expected = model(**ids).logits.item()
    assert pipe("cdeedca", function_to_apply="none")[0]["score"] == pytest.approx(expected, abs=1e-5)
    assert "model_kwargs={'num_labels': 1}" in (lora(reward) / "README.md").read_text()


def test_scores_of_a_reward_adapter_are_those_of_the_reward_model(judge):
    plain = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    for text, end, score in zip(TEXTS, ENDED, ppo_scores(judge, TEXTS, ENDED), strict=True):
        ids = tokenizer(text)["input_ids"]
        if end:
            ids.append(tokenizer.eos_token_id)
        assert score == pytest.approx(alone(plain, ids), abs=1e-4)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    """A Llama whose layers the 4-bit kernels of a CPU can take."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 25, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    ids = {"bos_token_id": 21, "eos_token_id": 22, "pad_token_id": 23}
    torch.manual_seed(0)
    save(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids)), randomwalks.tokenizer())
    return folder


def test_four_bits(wide_dir, tmp_path, monkeypatch):
    """The adapter fits the whole model, and the run continues bitwise from its last but one checkpoint."""
    calls = recorded(monkeypatch, load, "train_adapters")
    flags = {"lora_r": 3, "dtype": "float32"}
    _, run_dir = run(sft, wide_dir, tmp_path / "run", load_in_4bit=True, **flags)
    layer = calls[0][0][0].model.layers[1].mlp.down_proj
    assert layer.base_layer.weight.dtype == torch.uint8
    assert layer.lora_A["default"].weight.requires_grad
    found = log(run_dir)
    whole = log(run(sft, wide_dir, tmp_path / "whole", **flags)[1])
    assert found[0]["eval/loss"] != whole[0]["eval/loss"]
    assert found[0]["eval/loss"] == pytest.approx(whole[0]["eval/loss"], rel=0.2)
    lm, report = AutoModelForCausalLM.from_pretrained(run_dir / "hf_model", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert type(lm.model.layers[1].mlp.down_proj.base_layer).__name__ == "Linear"
    checkpoint = str(min((run_dir / "checkpoints").iterdir()))
    _, again = run(sft, wide_dir, tmp_path / "again", load_in_4bit=True, resume=checkpoint, **flags)
    assert log(again) == found[-1:]
    _, run_dir = run(reward, wide_dir, tmp_path / "classifier", load_in_4bit=True, lora_r=3)
    lm = AutoModelForSequenceClassification.from_pretrained(run_dir / "hf_model", num_labels=1)
    assert type(lm.model.layers[1].mlp.down_proj.base_layer).__name__ == "Linear"
