"""Models go in and come out whole: `python -m pytest tests/test_models.py`

For GPT-2, Llama and Qwen3: exports load in plain transformers with every key, value heads survive, tied weights stay
tied. Left padding is in test_sampling.py.
"""

import copy
import math
import shutil

import pytest
import safetensors.torch
import torch
from helpers import BOS, EOS, add_specials, recorded, save
from tokenizers import normalizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from algos import dpo, grpo, ilql, ppo, reward, sft
from common.cli import from_task
from common.errors import InputError
from common.lm import load
from common.lm.classifier import classifier_ids
from common.lm.load import load_model
from common.lm.structure import as_decoder, end_tokens, max_positions

PROMPTS = ["b", "cde", "fg", "hijkl", "m"]
IDS = torch.tensor([[3, 9, 4, 17, 5, 8, 0], [1, 2, 11, 20, 6, 22, 13]])
ENCODER = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}


def more_vowels(outputs, **columns):
    return [float(sum(c in "aeiou" for c in output)) for output in outputs]


PAIRS = [{"prompt": p, "chosen": p[::-1] + "a", "rejected": "u" * len(p) + "e"} for p in PROMPTS]
DATA = {
    ppo: [{"prompt": p} for p in PROMPTS],
    grpo: [{"prompt": p} for p in PROMPTS],
    sft: [{"prompt": p, "completion": p[::-1] + "a"} for p in PROMPTS],
    ilql: [{"prompt": p, "completion": p[::-1] + "a", "reward": len(p)} for p in PROMPTS],
    reward: PAIRS,
    dpo: PAIRS,
}
NAMED = {script.__name__[6:]: script for script in DATA}


def run(script, model, run_dir, /, **flags):
    """Four optimizer steps, (metrics, run directory). A model that is in no directory is a flag: model."""
    settings = {"model": str(model), "run_dir": str(run_dir), "dataset": DATA[script], "lr": 3e-2, "threads": 1}
    settings |= {"batch_size": 4, "micro_batch_size": 3, "eval_every": 2, "save_every": 1}
    if script in (ppo, grpo):
        sizes = {"total_episodes": 16, "rollout_batch_size": 8, "batch_size": 8, "ppo_epochs": 2, "max_new_tokens": 5}
        settings |= sizes | {"reward": more_vowels}
    else:
        settings |= {"total_steps": 4, "eval_dataset": DATA[script]}
    if script is grpo:
        settings["group_size"] = 4
    return script.main(script.Args(**settings | flags))


def short_sft(model, run_dir, **flags):
    return run(sft, model, run_dir, **{"total_steps": 3} | flags)


def reload(directory, kind=AutoModelForCausalLM, dtype="auto"):
    """The model by plain transformers, which found every key, expected every key, and missed none."""
    model, report = kind.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def with_weights(source, folder, **changes):
    """A copy of a model's directory whose file holds more weights than the model has, or lacks one: None."""
    shutil.copytree(source, folder)
    held = safetensors.torch.load_file(folder / "model.safetensors") | changes
    held = {name: weight for name, weight in held.items() if weight is not None}
    safetensors.torch.save_file(held, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_weights_that_the_model_does_not_have_are_said(tiny_dirs, tmp_path, capsys):
    """As biases that config.json does not ask for. The head that a new one replaces is no news."""
    more = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(12) for i in range(2)} | {"v_head": torch.ones(3)}
    biased = with_weights(tiny_dirs["llama"], tmp_path / "biased", **more)
    said = f"warning: {biased} holds {{}} weights that are no part of its model: model.layers.0.self_attn.q_proj.bias, "
    load_model(sft.Args(model=biased, dataset=[]), biased)
    out = capsys.readouterr().out
    assert said.format(3) in out and "v_head" in out
    args = reward.Args(model="none", dataset=[])
    reward.load_classifier(args, biased)
    assert said.format(2) in capsys.readouterr().out
    reward.load_classifier(args, tiny_dirs["llama"])
    assert "holds" not in capsys.readouterr().out
    with pytest.raises(InputError, match="^--model .* cannot be loaded: it has no config.json$"):
        load_model(sft.Args(model=str(tmp_path), dataset=[]), str(tmp_path))


def test_warnings_of_transformers_are_shown(gpt2_dir, tmp_path, capsys, monkeypatch):
    """Not its bars, nor its table of weights."""
    load_weights = load.load_weights

    def warning(*args, **options):
        logging.get_logger("transformers.tokenization_utils").warning("a wrong pattern")
        return load_weights(*args, **options)

    monkeypatch.setattr(load, "load_weights", warning)
    path = with_weights(gpt2_dir, tmp_path / "model", v_head=torch.ones(3))
    load_model(sft.Args(model=path, dataset=[]), path)
    out, err = capsys.readouterr()
    assert out.startswith("warning: a wrong pattern\n") and "REPORT" not in out + err and "%" not in err


def test_a_stop_string_that_the_tokenizer_cannot_write_is_said(gpt2_dir, letters, capsys):
    """A character that it does not know, and full-width ones, which sentencepiece's NFKC turns into others."""
    letters.backend_tokenizer.normalizer = normalizers.NFKC()
    flags = {"model": "none", "dataset": [], "reward": more_vowels, "tokenizer": letters}
    load_model(ppo.Args(stop=("a", "b}", "\uff43"), **flags), gpt2_dir)
    said = "warning: --stop {!r} will not be found: the tokenizer turns {!r} into {!r}\n".format
    assert capsys.readouterr().out == said("b}", "ab}a", "ab<unk>a") + said("\uff43", "a\uff43a", "aca")


@pytest.mark.parametrize(("kind", "dtype"), [("linear", "float32"), ("mlp", "bfloat16")])
def test_policy_with_value_is_read_back(monkeypatch, gpt2_dir, tmp_path, kind, dtype):
    """A run's hf_model gives the same values by PolicyWithValue.load, and as the --model of another run."""
    lm, tokenizer = load_model(from_task(ppo.Args, ppo.TASK, dtype=dtype), gpt2_dir)
    lm.name_or_path = ""  # a model without a home, whose weights main trains in place
    flags = {"dtype": dtype, "num_layers_unfrozen": 0 if dtype == "bfloat16" else -1}  # those of 16 bits are frozen
    made = recorded(monkeypatch, ppo, "make_optimizer")
    head = {"value_head": kind, "value_head_init": "normal"}
    _, run_dir = run(ppo, "", tmp_path / "run", model=lm, tokenizer=tokenizer, **head, **flags)
    assert "lm_head.weight" not in safetensors.torch.load_file(run_dir / "hf_model/model.safetensors")  # it is tied
    trained = made[0][0][0].eval()
    loaded = ppo.PolicyWithValue.load(run_dir / "hf_model").eval()
    assert loaded.lm.dtype == getattr(torch, dtype)
    assert len(list(loaded.value_head.parameters())) == {"linear": 2, "mlp": 4}[kind]
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    # the other kind of head on the command line: the directory brings its own
    flags |= {"value_head": "mlp" if kind == "linear" else "linear", "lr": 1e-30, "eval_every": 0}
    _, next_dir = run(ppo, run_dir / "hf_model", tmp_path / "next", **flags)
    old, new = (safetensors.torch.load_file(d / "hf_model/value_head.safetensors") for d in (run_dir, next_dir))
    torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_a_value_head_is_not_made_up(gpt2_dir):
    """TRL warned and went on with a random head."""
    with pytest.raises(OSError, match="value_head.safetensors"):
        ppo.PolicyWithValue.load(gpt2_dir)


@pytest.mark.parametrize(
    ("kind", "init", "drawn"),
    [
        ("linear", "zeros", set()),
        ("linear", "normal", {"0.weight"}),
        ("mlp", "zeros", {"0.weight", "0.bias"}),
        ("mlp", "default", {"0.weight", "0.bias", "2.weight", "2.bias"}),
    ],
)
def test_value_heads_are_a_keyed_draw(build_model, kind, init, drawn):
    lm = build_model()
    heads = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)  # the global generator has no say
        heads.append(dict(ppo.PolicyWithValue(lm, kind, init, seed).value_head.named_parameters()))
    one, again, other = heads
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert {name for name in one if not torch.equal(one[name], other[name])} == drawn
    assert all(name in drawn or not weight.any() for name, weight in one.items())


def test_value_head_init_scales(build_model):
    """normal: standard deviation 0.2; default: uniform within 1/sqrt(inputs). Over 40 seeds."""
    lm = build_model()

    def drawn(init):
        heads = [ppo.PolicyWithValue(lm, "linear", init, seed).value_head for seed in range(40)]
        return torch.cat([head[0].weight[0] for head in heads])

    assert drawn("normal").std().item() == pytest.approx(0.2, rel=0.1)
    bound = 12**-0.5
    assert 0.95 * bound < drawn("default").abs().max() <= bound


def test_the_value_head_keeps_float32_under_bf16(build_model):
    lm = build_model(dtype=torch.bfloat16)
    model = ppo.PolicyWithValue(lm, "mlp", "normal")
    lines = [[(ids, [-100] * 3 + ids[3:])] for ids in IDS.tolist()]
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, values, _ = model(lines)
    assert logprobs.dtype == values.dtype == model.value_head[0].weight.dtype == torch.float32
    assert (values.bfloat16() != values).any()  # not rounded to bfloat16


def test_the_separator_of_an_encoder_stays(letters):
    """RoBERTa has one behind every text; what was not ended has it, too."""
    tokenizer = add_specials(letters, "<bos> $A <eos>")
    for separator, ids in ((None, [BOS, 2, 3]), ("<eos>", [BOS, 2, 3, EOS])):
        tokenizer.sep_token = separator
        assert classifier_ids(tokenizer, ["cd"], [False], chats=False) == [ids]


@pytest.mark.parametrize(
    ("own", "union"), [(None, [EOS]), (7, [7, EOS]), ([5, 7], [5, 7, EOS]), ([7, EOS], [7, EOS])], ids=str
)
def test_end_tokens(build_model, letters, tmp_path, own, union):
    """Those of the checkpoint and that of the tokenizer; exports have them, too."""
    model = build_model("qwen3")
    model.generation_config.eos_token_id = own
    lm, _ = load_model(from_task(ppo.Args, ppo.TASK), save(tmp_path / "model", model, letters))
    assert end_tokens(lm) == union
    lm.save_pretrained(tmp_path / "export")
    assert reload(tmp_path / "export").generation_config.eos_token_id == (union if len(union) > 1 else EOS)


def test_a_text_that_has_an_end_gets_no_second_one(letters):
    """Nothing behind an end token is ever sampled; ilql's return lies on it. One of the model's ends is no token here,
    as GPT-2's 50256 beside a tokenizer of one's own."""
    tokenizer = copy.copy(letters)
    tokenizer.ends = [50256, 5, 7, EOS]
    rows = [{"prompt": "ab", "completion": text, "reward": 1.0} for text in ("cdf", "cdh", "cd", "fcd")]
    encoded = [ids for ids, _ in sft.encode_segments(rows, tokenizer, "--dataset")]
    assert encoded == [[0, 1, 2, 3, 5], [0, 1, 2, 3, 7], [0, 1, 2, 3, EOS], [0, 1, 5, 2, 3, EOS]]
    episodes, _ = ilql.encode_episodes(rows, tokenizer, 32, "--dataset")
    assert [list(episode.actions) for episode in episodes] == [[2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5]]
    truncated, _ = ilql.encode_episodes([row | {"truncated": True} for row in rows[:1]], tokenizer, 32, "--dataset")
    assert list(truncated[0].ids) == [0, 1, 2, 3]


def test_a_text_whose_end_is_followed_by_blanks(letters):
    """As a template writes it. sft keeps the text as it is; the return of ilql lies on the end token."""
    letters.add_tokens(["\n"])  # 25
    rows = [{"prompt": "ab", "completion": "cd<eos>\n", "reward": 3}]
    assert [ids for ids, _ in sft.encode_segments(rows, letters, "--dataset")] == [[0, 1, 2, 3, EOS, 25]]
    for columns in ({}, {"text": "ef"}):  # which is read only where nothing else is
        (episode,), _ = ilql.encode_episodes([rows[0] | columns], letters, 32, "--dataset")
        assert list(episode.ids[:5]) == [0, 1, 2, 3, EOS] and list(episode.actions) == [2, 3, 4]
        assert episode.rewards == [0, 0, 3] and episode.done
    for text in ("cd<eos>", "cd"):
        assert classifier_ids(letters, [text], [True], False) == [[2, 3, EOS]]


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "bert", "xlnet"])
def test_positions_that_can_be_used(kind):
    """RoBERTa and others begin behind the position of padding; XLNet has no limit, and says -1."""
    sizes = ENCODER | {"max_position_embeddings": 14, "vocab_size": 25, "attention_window": 4}
    if kind == "xlnet":
        sizes = {"d_model": 12, "d_inner": 20, "n_layer": 1, "n_head": 2, "vocab_size": 25}
    encoder = AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    limit = max_positions(encoder)
    assert limit == {"bert": 14, "xlnet": math.inf}.get(kind, 12)
    encoder(torch.full((1, min(limit, 99)), 5))
    if kind not in ("xlnet", "longformer"):  # Longformer pads, and then fails in another way
        with pytest.raises((IndexError, RuntimeError)):
            encoder(torch.full((1, limit + 1), 5))


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_a_model_that_reads_what_follows_is_refused(kind):
    config = AutoConfig.for_model(kind, **ENCODER, vocab_size=25, max_position_embeddings=32)
    with pytest.raises(InputError, match="its tokens read those behind them, as in an encoder"):
        as_decoder(AutoModelForCausalLM.from_config(config).eval())
    config.is_decoder = True
    as_decoder(AutoModelForCausalLM.from_config(config).eval())


def test_dropout_is_off_in_every_model(build_model, letters, tmp_path):
    for family, dropout in (("gpt2", "attn_pdrop"), ("llama", "attention_dropout"), ("qwen3", "attention_dropout")):
        model = build_model(family)
        setattr(model.config, dropout, 0.5)
        loaded, _ = load_model(from_task(sft.Args, sft.TASK), save(tmp_path / family, model, letters))
        assert torch.equal(loaded.train()(IDS).logits, loaded.eval()(IDS).logits), family


def test_a_gelu_that_is_torchs_becomes_torchs(build_model, letters):
    """To rounding; the exact GELU and others stay."""
    for name, is_torchs in (("gelu_new", True), ("gelu_fast", True), ("gelu", False), ("quick_gelu", False)):
        model = build_model("gpt2", torch.float64, activation_function=name)
        expected = model(IDS).logits
        loaded, _ = load_model(from_task(sft.Args, sft.TASK, tokenizer=letters), model)
        assert (type(loaded.transformer.h[1].mlp.act) is torch.nn.GELU) == is_torchs, name
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=1e-9)


def test_the_padding_token_is_trained(build_model, letters, tmp_path):
    """torch gives the embedding of the padding no gradient, and the padding may be the end token."""
    letters.pad_token = letters.eos_token
    end = letters.eos_token_id
    model = build_model("llama", pad_token_id=end)
    assert model.get_input_embeddings().padding_idx == end
    loaded, _ = load_model(from_task(sft.Args, sft.TASK), save(tmp_path, model, letters))
    loaded(torch.tensor([[3, end, 5]])).logits.square().sum().backward()
    assert loaded.get_input_embeddings().weight.grad[end].any()
