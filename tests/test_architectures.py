"""Scripts on every family of decoders: `python -m pytest tests/test_architectures.py`

Tiny random models, built here from their configuration classes. grpo samples and scores as ppo does. What is off or
refused, and in which words, is the table of algos/ARCHITECTURES.md: `python benchmarks/architectures.py` writes it. The
default run has a family of each kind, the others are slow.
"""

import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import graphs
import pytest
import torch
import transformers as tf
from helpers import log, recorded, save
from test_models import IDS, more_vowels, reload
from torch.distributed.fsdp import FSDPModule
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from algos import dpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks
from common.cli import from_task
from common.errors import InputError
from common.lm import graphs as cuda_graphs
from common.lm.classifier import classifier_logits
from common.lm.load import load_model
from common.lm.sampling import draw, sample
from common.lm.structure import can_pack, max_positions, reads_padding, routers

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
WIDE = SIZES | {"intermediate_size": 20}
GROUPED = WIDE | {"num_key_value_heads": 1}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.7}}  # 4 of 6
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}  # rows have up to 13 tokens
GEMMA = GROUPED | WINDOW | {"head_dim": 6, "query_pre_attn_scalar": 5}
GEMMA4 = GEMMA | {"global_head_dim": 8, "hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 25}
LAST_TWO_SHARE = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
GRANITE = {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.5, "logits_scaling": 1.3}
MIXTURE = {"hidden_size": 16, "intermediate_size": 24, "num_experts_per_tok": 2}  # multiples of 8, for its kernel
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 6}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_state": 5, "mamba_expand": 2, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= {"num_key_value_heads": 2, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1}
FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0]}
LONGROPE = {"rope_parameters": FACTORS | {"rope_type": "longrope", "rope_theta": 10000.0}}
LONGROPE |= {"original_max_position_embeddings": 32}
CHUNKED = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
CHUNKED |= {"num_local_experts": 3, "head_dim": 6, "intermediate_size_mlp": 20, "interleave_moe_layer_step": 1}
HYBRID = {"layer_types": ["mamba", "attention"], "num_local_experts": 3, "shared_intermediate_size": 10}
HYBRID |= {"mamba_d_head": 8}
FAMILIES = {
    "gpt2": (tf.GPT2Config, {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_inner": 20, "n_positions": 32}),
    "gpt_neox": (tf.GPTNeoXConfig, WIDE | ROTARY),
    "opt": (tf.OPTConfig, SIZES | {"ffn_dim": 20, "word_embed_proj_dim": 10, "init_std": 0.3}),
    "llama": (tf.LlamaConfig, GROUPED),
    "llama4": (tf.Llama4TextConfig, GROUPED | MIXTURE | CHUNKED),
    "qwen3": (tf.Qwen3Config, GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": (tf.Qwen3MoeConfig, GROUPED | MIXTURE | {"num_experts": 3, "moe_intermediate_size": 24}),
    "qwen3_5": (tf.Qwen3_5TextConfig, GROUPED | LINEAR | {"head_dim": 8}),
    "gemma2": (tf.Gemma2Config, GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0}),
    "gemma3": (tf.Gemma3TextConfig, GEMMA),
    "gemma4": (tf.Gemma4TextConfig, GEMMA4),
    "gemma4_shared": (tf.Gemma4TextConfig, GEMMA4 | LAST_TWO_SHARE | {"num_kv_shared_layers": 1}),
    "mistral": (tf.MistralConfig, GROUPED | {"sliding_window": 4}),
    "phi": (tf.PhiConfig, GROUPED | ROTARY),
    "phi3": (tf.Phi3Config, GROUPED),
    "phi3_longrope": (tf.Phi3Config, GROUPED | LONGROPE | {"max_position_embeddings": 64}),
    "cohere": (tf.CohereConfig, GROUPED | {"logit_scale": 0.3}),
    "cohere2": (tf.Cohere2Config, GROUPED | WINDOW | {"logit_scale": 0.3}),
    "falcon": (tf.FalconConfig, SIZES | {"ffn_hidden_size": 20}),
    "falcon_alibi": (tf.FalconConfig, SIZES | {"ffn_hidden_size": 20, "alibi": True}),
    "falcon_h1": (tf.FalconH1Config, GROUPED | MAMBA | {"head_dim": 6, "mamba_d_ssm": 24}),
    "bloom": (tf.BloomConfig, {"hidden_size": 12, "n_layer": 2, "n_head": 2}),
    "granite": (tf.GraniteConfig, GROUPED | GRANITE),
    "granite_hybrid": (tf.GraniteMoeHybridConfig, GROUPED | GRANITE | MIXTURE | MAMBA | HYBRID),
    "gpt_oss": (tf.GptOssConfig, GROUPED | MIXTURE | WINDOW | {"head_dim": 6, "num_local_experts": 3}),
    "deepseek_v3": (tf.DeepseekV3Config, GROUPED | MIXTURE | LATENT | GROUPS),
    "smollm3": (tf.SmolLM3Config, GROUPED | {"no_rope_layers": [1, 0]}),
    "olmo3": (tf.Olmo3Config, GROUPED | WINDOW),
    "lfm2": (tf.Lfm2Config, GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": (tf.MambaConfig, {"hidden_size": 12, "num_hidden_layers": 2, "state_size": 5}),
    "rwkv": (tf.RwkvConfig, {"hidden_size": 12, "num_hidden_layers": 2, "attention_hidden_size": 12}),
}
# Learned positions, rotary ones in a mixture of experts, sliding windows, and recurrent models, with and without masks.
DEFAULT = {"opt", "qwen3_moe", "gemma2", "mamba", "rwkv"}
MATRICES_OF_ONES = {"mamba", "rwkv"}  # which are built with weights that give every row the same logits
READ_MASKS = [name for name in FAMILIES if name != "rwkv"]
MIXTURES = ["qwen3_moe", "llama4", "deepseek_v3", "gpt_oss", "granite_hybrid"]
TABLE = Path(__file__).parents[1] / "algos/ARCHITECTURES.md"

TEXTS = [("b", "cda"), ("cde", "fgfcq"), ("fg", ""), ("hijkl", "mnopa"), ("m", "hij")]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
PAIRS = [{"prompt": p, "chosen": c, "rejected": c[:1] + "utsrq"[: 4 - i]} for i, (p, c) in enumerate(TEXTS)]


def marked(families):
    """Parameters of a test: those outside of DEFAULT are slow."""
    parameters = []
    for name in families:
        marks = [] if name in DEFAULT else [pytest.mark.slow]
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.fixture(scope="module", params=marked(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """Directory of the random model of a family with its tokenizer."""
    letters = randomwalks.tokenizer()
    directory = tmp_path_factory.mktemp(family)
    config, settings = FAMILIES[family]
    ids = {f"{name}_token_id": getattr(letters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config(**{"vocab_size": len(letters), "initializer_range": 0.3} | ids | settings)
        lm = AutoModelForCausalLM.from_config(config)
        for weight in lm.parameters():
            if family in MATRICES_OF_ONES and weight.ndim > 1:
                weight.data.normal_(0.0, 0.3)
    return save(directory, lm, letters)


@pytest.fixture
def run(monkeypatch, capsys, folder, tmp_path):
    """run(script, **flags): metrics, directory, trained model and what was printed of one run of main in steps of 5
    rows; all metrics are finite, and what should be trained is."""

    def main(script, **flags):
        made = recorded(monkeypatch, script, "make_optimizer")
        number = len(list(tmp_path.iterdir()))
        settings = {"lr": 1e-2, "eval_every": 0, "save_every": 0, "threads": 1, "batch_size": 5, "micro_batch_size": 3}
        settings |= {"run_dir": str(tmp_path / f"{number}"), "model": folder, "warmup_steps": 0}
        if script is not ppo:
            settings["total_steps"] = 1
        metrics, run_dir = script.main(script.Args(**settings | flags))
        for record in log(run_dir):
            assert all(map(math.isfinite, record.values()))
        model = made[0][0][0].eval()
        if "lora_r" not in flags:
            assert_trained(getattr(model, "lm", model), folder)
        return metrics, run_dir, model, capsys.readouterr().out

    return main


initial = functools.cache(reload)  # of a family, as its runs start


def read_table():
    """{family: {column: cell}} of the table in the docs."""
    rows = [re.split(r" *\| *", line.strip("| \n")) for line in TABLE.read_text().splitlines() if line.startswith("|")]
    return {name: dict(zip(rows[0][1:], cells, strict=True)) for name, *cells in rows[2:]}


@pytest.fixture
def cell(family, record_property):
    """cell(column, found): the table says this of the family, which is looked at after the test. What was found goes to
    benchmarks/architectures.py, too."""
    found = []

    def note(column, text):
        found.append((column, text))
        record_property("cell", (family, column, text))

    yield note
    row = read_table().get(family, {})
    assert found == [(column, row.get(column)) for column, _ in found]


@pytest.fixture
def attempt(run, cell, folder):
    """attempt(script, **flags): [what run returns but the output], or [] where the script refuses the model as the
    table says, which also knows why lines are not packed."""

    def main(script, **flags):
        name = script.__name__.rpartition(".")[2]
        try:
            *result, text = run(script, **flags)
        except InputError as error:
            reason = str(error).removeprefix(f"--model {folder}").lstrip(": ")
            if "Unrecognized configuration class" in reason:
                reason = "transformers has no such classifier"
            cell(name, reason)
            return []
        cell(name, "yes")
        if script in (sft, dpo, reward):
            found = re.search("^--packing is off: (.*)", text, re.MULTILINE)
            cell("--packing", found[1] if found else "yes")
        return [result]

    return main


@torch.no_grad()
def assert_trained(lm, folder):
    """Weights have moved if and only if they were to be trained and have a gradient, which OPT's bias of keys and
    experts without tokens lack. Routers stay as they are, bit for bit."""
    before = dict(initial(folder).named_parameters())
    after = dict(lm.named_parameters())
    assert len(before.keys() - after.keys()) <= (2 if "Classification" in type(lm).__name__ else 0)  # the output layer
    for name in before.keys() & after.keys():
        if not after[name].requires_grad:
            assert torch.equal(after[name], before[name])
        elif not ("decoder" in name and name.endswith("k_proj.bias")):
            assert not torch.equal(after[name], before[name]), name
    for router in routers(lm).values():
        assert not any(weight.requires_grad for weight in router.parameters())


@torch.no_grad()
def assert_exported(lm, run_dir):
    """Plain transformers reads the weights of the trained model back, and they give its logits."""
    back = reload(run_dir / "hf_model")
    lm.set_attn_implementation("eager")
    back.set_attn_implementation("eager")
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
    lm = initial(folder)
    found = []
    for prompt, response in texts:
        ids = letters(prompt + response)["input_ids"] + [letters.eos_token_id]
        logprobs = states_and_logits(lm, ids)[1].log_softmax(-1)[:-1]
        found.append(logprobs.gather(1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :, 0])
    return found


@torch.no_grad()
def test_the_structure_says_what_the_model_computes(folder, cell):
    """Rows of 3, 5, 7 and 11 tokens, longer than windows and chunks, padded and packed. In bfloat16, whose rounding
    hides small leaks, the answers are the same."""
    for dtype in "bfloat16", "float32":
        lm = load_model(from_task(ppo.Args, ppo.TASK, dtype=dtype, attn_implementation=None), folder)[0].eval()
        problems = []
        packs = can_pack(lm, True, problems.append)
        cell("--packing", "yes" if packs else problems[0].removeprefix("--packing is off: "))
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 21, (length,), generator=random).tolist() for length in (3, 5, 7, 11)]
    expected = [states_and_logits(lm, ids)[1] for ids in rows]
    positions = torch.cat([torch.arange(len(ids)) for ids in rows])
    packed = lm(torch.tensor([sum(rows, [])]), position_ids=positions[None], use_cache=False).logits[0]
    error = max((x - y).abs().max() for x, y in zip(packed.split([*map(len, rows)]), expected, strict=True))
    assert error < 3e-5 if packs else error > 0.1
    mask = torch.tensor([[0] * (11 - len(ids)) + [1] * len(ids) for ids in rows])
    ids = torch.tensor([[0] * (11 - len(ids)) + ids for ids in rows])
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    padded = lm(ids, **inputs).logits
    error = max((x[-len(y) :] - y).abs().max() for x, y in zip(padded, expected, strict=True))
    assert error > 0.1 if reads_padding(lm) else error < 3e-5


# Families whose layers are not torch's attention over a plain cache: they take the plain loop.
PLAIN_LOOP = {"gemma4_shared", "llama4", "qwen3_5", "falcon_h1", "granite_hybrid", "lfm2", "mamba"}


def call_of(lm, tokenizer, lengths, limits):
    """Arguments of `sample`: random queries of these lengths, and draws."""
    random = torch.Generator().manual_seed(0)
    queries = [torch.randint(0, 21, (length,), generator=random).tolist() for length in lengths]
    draws = torch.rand(len(limits), max(limits), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return lm, tokenizer, queries, draws, limits


CASES = {  # lengths of queries, limits, options
    "one row": ([1], [25], {}),
    "padding and limits": ([5, 1, 3, 7, 2], [4, 25, 1, 19, 9], {"temperature": 0.7}),
    "ends": ([5, 1, 3, 7, 2, 2, 4], [24] * 7, {}),
    "stops": ([2, 6, 1, 3], [17] * 4, {"stop": ("b", "gh")}),
    "top": ([4, 4, 2], [21] * 3, {"top_k": 5, "top_p": 0.8}),
    "greedy": ([3, 1], [13, 8], {"temperature": 0.0}),
}


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", marked(READ_MASKS), indirect=True)
def test_passes_as_graphs_draw_the_ids_of_the_plain_loop(family, folder, attention, monkeypatch):
    """In float64, but for products of experts and for eager attention, which gives NaN of padding there."""
    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    if family not in MIXTURES and lm.config._attn_implementation == "sdpa":
        lm.double()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, (lengths, limits, options) in CASES.items():
        lm.generation_config.eos_token_id = [3, 7, 22] if name == "ends" else [99]  # 99: none of the tokens
        call = call_of(lm, tokenizer, lengths, limits)
        expected = sample(*call, **options)
        with monkeypatch.context() as patches:
            captured = graphs.use(patches)
            found = sample(*call, **options)
        assert found == expected, name
        assert bool(captured) == (family not in PLAIN_LOOP)
        if captured:
            assert sum(graph.num_replays for graph in captured) >= 3, name


def test_graphs_of_float64_weights_under_autocast(build_model, letters, monkeypatch):
    """Autocast leaves them alone, so the cache must be float64, too."""
    call = call_of(build_model().double(), letters, [4, 4, 2], [20, 11, 17])
    with torch.autocast("cpu", torch.bfloat16):
        expected = sample(*call)
        captured = graphs.use(monkeypatch)
        assert sample(*call) == expected and captured


def test_a_fixed_cache_has_the_type_to_which_attention_casts(build_model):
    lm = build_model()
    for autocast, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        cache = lm(torch.tensor([[3, 4]]), use_cache=True).past_key_values
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cuda_graphs.fix_layers(cache, slice(None), torch.tensor([1]), 2)
        assert all(layer.keys.dtype == layer.values.dtype == dtype for layer in cache.layers)


def test_a_model_that_makes_the_host_wait_takes_no_graphs(build_model, letters, monkeypatch):
    """It is asked in its first pass, and not again by the next call."""
    lm = build_model().double()
    call = call_of(lm, letters, [4, 3, 2], [20, 11, 17])
    expected = sample(*call)
    lm.register_forward_pre_hook(lambda lm, inputs: print(torch.ones(1).sum().item()))
    captured = graphs.use(monkeypatch)
    assert sample(*call) == expected and not captured and lm.makes_host_wait
    monkeypatch.delattr(cuda_graphs, "never_waits")
    assert sample(*call) == expected and not captured


@pytest.mark.parametrize("model", [ppo.PolicyWithValue, ilql.PolicyWithQ])
def test_shards_in_a_model_with_heads_take_the_plain_loop(build_model, model):
    """FSDP2 makes a class of its own of each module that it shards; the language model is not one of them."""
    lm = build_model()
    policy = model(lm, "mlp", "normal") if model is ppo.PolicyWithValue else model(lm, True)
    [cache] = [lm(torch.tensor([[3, 4]]), use_cache=True).past_key_values]
    assert cuda_graphs.can_capture(policy.lm, cache)
    block = lm.transformer.h[0]
    block.__class__ = type("Sharded", (FSDPModule, type(block)), {})
    assert not cuda_graphs.can_capture(policy.lm, cache)


@torch.no_grad()
@pytest.mark.parametrize("family", marked(READ_MASKS), indirect=True)
def test_left_padding_and_the_cache_change_nothing(folder):
    """Log-probabilities, values, entropies and sampled tokens of a row in a batch are those of a plain forward."""
    lm, tokenizer = load_model(from_task(ppo.Args, ppo.TASK, attn_implementation=None), folder)
    lm.eval()
    model = ppo.PolicyWithValue(lm, "mlp", "normal")
    lm.generation_config.eos_token_id = 99  # none of the tokens, so rows end at their limits
    call = call_of(lm, tokenizer, [5, 1, 3, 7], [4, 7, 1, 6])
    *_, queries, draws, limits = call
    responses = sample(*call, temperature=0.7)
    assert [*map(len, responses)] == limits
    lines = []
    for query, response in zip(queries, responses, strict=True):
        lines.append([(query + response, [-100] * len(query) + response)])
    columns = model(lines, temperature=0.7, also=ppo.token_entropies)
    found = zip(*(column.split(limits) for column in columns), strict=True)
    for query, response, uniforms, row in zip(queries, responses, draws, found, strict=True):
        ids = torch.tensor(response)
        states, logits = states_and_logits(lm, [*query, *response][:-1])
        logps = (logits[len(query) - 1 :] / 0.7).log_softmax(-1)
        assert torch.equal(draw(logps, uniforms[: len(ids)], 1.0), ids)
        expected = [
            logps.gather(1, ids[:, None])[:, 0],
            model.value_head(states[len(query) - 1 :])[:, 0],
            -(logps.exp() * logps).sum(-1),
        ]
        assert_close([*row], expected, rtol=3e-5, atol=3e-5)


PPO = {"dataset": [{"prompt": prompt} for prompt, _ in TEXTS], "reward": more_vowels, "max_new_tokens": 6}
PPO |= {"total_episodes": 10, "rollout_batch_size": 10, "batch_size": 10, "kl_coef": 0.1, "value_head_init": "normal"}


def test_ppo(monkeypatch, attempt):
    calls = recorded(monkeypatch, ppo, "policy_loss")
    for metrics, run_dir, model in attempt(ppo, ppo_epochs=1, temperature=0.7, **PPO):
        assert max(((new - old).exp() - 1).abs().max() for (new, old, *_), _ in calls) < 3e-5
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["policy/clipfrac"] == 0
        assert abs(metrics["objective/kl"]) < 1e-5 and metrics["optim/grad_norm"] > 0.01
        assert_exported(model.lm, run_dir)


def test_sft(attempt, folder, letters):
    """Packed where that is possible, the loss is the mean over the tokens of the responses."""
    for metrics, run_dir, model in attempt(sft, dataset=ROWS, packing=True, max_length=17):
        expected = -torch.cat(plain_logprobs(folder, letters, TEXTS)).mean().item()
        assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
        assert_exported(model, run_dir)


def test_dpo(attempt, folder, letters):
    """ln 2 and equal log-ratios before the update, a better policy after it."""
    for metrics, run_dir, model in attempt(dpo, dataset=PAIRS, eval_dataset=PAIRS, eval_every=1):
        expected = {"eval/loss": math.log(2), "eval/rewards/accuracies": 0.5}
        for side in ("chosen", "rejected"):
            logprobs = plain_logprobs(folder, letters, [(row["prompt"], row[side]) for row in PAIRS])
            expected[f"eval/logps/{side}"] = torch.cat(logprobs).sum().item() / len(PAIRS)
        start = log(run_dir)[0]
        assert {name: start[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=0)
        assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-5) and metrics["eval/loss"] < 0.69
        assert_exported(model, run_dir)


def test_ilql(attempt, cell, folder, letters):
    """The imitation loss is that of sft, also where it is computed from the output layer instead of the logits."""
    results = attempt(ilql, dataset=[row | {"reward": i % 3} for i, row in enumerate(ROWS)])
    if not results:
        cell("logits in chunks", "-")
    for metrics, run_dir, policy in results:
        cell("logits in chunks", "yes" if policy.lm.plain_output else "no")
        expected = -torch.cat(plain_logprobs(folder, letters, TEXTS)).mean().item()
        assert metrics["losses/loss_awac"] == pytest.approx(expected, rel=1e-5)
        assert_exported(policy.lm, run_dir)


def test_reward(attempt, letters):
    """The scores of plain transformers, row by row."""
    # the centring moves a bias that both sides have
    for _, run_dir, model in attempt(reward, dataset=PAIRS, center_coef=0.1):
        back = reload(run_dir / "hf_model", AutoModelForSequenceClassification)
        rows = [letters(prompt + completion)["input_ids"] + [letters.eos_token_id] for prompt, completion in TEXTS]
        with torch.no_grad():
            scores = torch.cat([back(torch.tensor([ids])).logits for ids in rows])
            assert_close(classifier_logits(model, [[ids] for ids in rows]), scores, rtol=3e-5, atol=3e-5)
        assert_close(model.state_dict(), back.state_dict(), rtol=0, atol=0)
        assert scores.std() > 0.01


@pytest.mark.parametrize("family", marked(MIXTURES), indirect=True)
def test_adapters_of_mixtures(run, folder):
    """Plain transformers reads them back; those of stacked experts lie in each other. Those of routers, of which peft
    makes some, stay zero."""
    names = tuple(routers(initial(folder)))
    _, run_dir, model, _ = run(sft, dataset=ROWS, lora_r=2, lr=0.1, total_steps=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            assert (weight.count_nonzero() == 0) == name.startswith(names), name
    back = AutoModelForCausalLM.from_pretrained(run_dir / "hf_model").eval()
    with torch.no_grad():
        assert_close(back(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
        assert (back(IDS).logits - initial(folder)(IDS).logits).abs().max() > 0.01


def test_router_logits_and_jitter_are_off():
    """A configuration that asks for router logits fails with a cache, since its auxiliary loss takes the mask of all
    tokens for that of the newest."""
    settings = GROUPED | MIXTURE | {"num_local_experts": 3, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5}
    lm = AutoModelForCausalLM.from_config(tf.PhimoeConfig(vocab_size=25, output_router_logits=True, **settings))
    lm = load_model(from_task(ppo.Args, ppo.TASK, tokenizer=randomwalks.tokenizer()), lm)[0].train()
    assert lm.config.output_router_logits is False
    assert_close(lm(IDS).logits, lm.eval()(IDS).logits)


def test_longrope_ends_where_neighbours_begin_to_matter():
    """Beyond its first length the longest row of a batch decides how positions turn, so rows are no longer than it."""
    settings = GROUPED | LONGROPE | {"original_max_position_embeddings": 8, "pad_token_id": 23}
    assert max_positions(SimpleNamespace(config=tf.Phi3Config(**settings))) == 8


def test_the_table_has_every_family():
    assert [*read_table()] == [*FAMILIES]
