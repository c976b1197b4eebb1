"""Reward models from preferences: `python -m pytest tests/test_reward.py`"""

import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import EOS, PAD, TEMPLATE, add_specials, answer, encoded, log, samples, save, tensor, user
from test_models import reload
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForMaskedLM

from algos import ppo, reward
from benchmarks.tasks import randomwalks
from common import seeding
from common.lm.classifier import RewardModel, classifier_logits
from common.lm.tokens import encode_prompts, int32

WIDTH = 12
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("b", "cd", "e"), ("cde", "f", ""), ("fg", "hij", "hik"), ("hijkl", "m", "no"), ("m", "nopqrst", "nopq"),
        ("nopqrst", "u", "ab"), ("ba", "c", "cde"),
    )
]  # fmt: skip
MARGINS = [0.5, 0, 1.5, -0.25, 2, 0.0, 1]
SIZES = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": 25, "max_position_embeddings": 32, "initializer_range": 0.3, "num_labels": 1}


def run_reward(model, run_dir, rows=PAIRS, **flags):
    """Three steps of 5 pairs, unless flags say otherwise."""
    settings = {"eval_every": 0, "total_steps": 3, "batch_size": 5, "micro_batch_size": 5, "lr": 1e-2, "threads": 1}
    settings |= {"dtype": "float64", "save_every": 0, "weight_decay": 1.0, "adam_betas": (0.9, 0.98)}
    return reward.main(reward.Args(model=model, dataset=rows, run_dir=str(run_dir), **settings | flags))


def load(path, **flags):
    """The classifier of the script, its tokenizer, and whether the head is new."""
    args = reward.Args(**{"model": path, "dataset": PAIRS, "dtype": "float64"} | flags)
    lm, tokenizer, new = reward.load_classifier(args, path)
    return lm.eval(), tokenizer, new


def encode(rows, tokenizer):
    return reward.encode_texts(rows, tokenizer, 99, "--dataset")[1]


def alone(lm, ids, label=0):
    """The score of one row without padding, read by transformers at its last token."""
    lm.config.pad_token_id = None
    with torch.no_grad():
        return float(lm(input_ids=torch.tensor([ids])).logits[0, label])


def all_alone(lm, pairs):
    """(2, B): the scores of chosen and rejected texts of pairs of ids."""
    return torch.tensor([[alone(lm, pair[side]) for pair in pairs] for side in (0, 1)], dtype=torch.float64)


def plain(folder):
    """The classifier of a directory as transformers loads it, with every key and no other."""
    return reload(folder, AutoModelForSequenceClassification, torch.float64)


@pytest.fixture(scope="module")
def bert_dir(tmp_path_factory):
    """An encoder, whose tokenizer has no end token."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = randomwalks.tokenizer()
    tokenizer.eos_token = None
    torch.manual_seed(0)
    config = BertConfig(**SIZES, pad_token_id=PAD)
    return save(folder, AutoModelForSequenceClassification.from_config(config), tokenizer)


def test_pairwise_loss_golden():
    """A margin of (B,) against scores of (B, 1) would give the mean 1.8767 of a (B, B) matrix."""
    losses = reward.pairwise_loss(tensor(1, 2), tensor(0, 0), tensor(0, 5))
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(3))], rel=1e-12)
    assert losses.mean().item() == pytest.approx(1.6809, abs=5e-5)
    assert reward.pairwise_loss(tensor(3, 3, 7), tensor(3, 3, 7)).tolist() == pytest.approx([math.log(2)] * 3)


@pytest.mark.parametrize("shapes", [((2, 1), (2, 1), (2,)), ((3,), (3,), ()), ((3,), (1,))], ids=repr)
def test_pairwise_loss_never_broadcasts(shapes):
    with pytest.raises(ValueError, match="shapes differ"):
        reward.pairwise_loss(*map(torch.zeros, shapes), center_coef=0.1)


def test_centering_by_hand():
    """-log sigmoid(3 + 1 - 2) + 0.5 (3 - 1)^2 and -log sigmoid(-2) + 0.5 4^2."""
    losses = reward.pairwise_loss(tensor(3, 1), tensor(-1, 3), tensor(2, 0), 0.5)
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-2)) + 2, math.log1p(math.exp(2)) + 8], rel=1e-12)


def test_pairwise_loss_of_large_scores():
    """Linear in a large difference, with gradients of -1 and 0."""
    chosen = torch.tensor([1e4, -1e4, 1e4], requires_grad=True)
    losses = reward.pairwise_loss(chosen, torch.tensor([-1e4, 1e4, 1e4]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0, 2e4, math.log(2)], rel=1e-6)
    assert chosen.grad.tolist() == pytest.approx([0, -1, -0.5], rel=1e-6)


TOGETHER = [  # chosen, rejected: equal lengths, a prefix of the other, nothing in common, special tokens within
    ("bcd", "bce"), ("a", "f"), ("fghij", "fg"), ("fg", "fghijk"), ("b<eos>cd", "b<eos>ce"), ("b<eos>cd", "b"),
    ("b", "b<eos>cd"), ("klm<pad>no", "klm"), ("", "tsrqponmlkj"), ("abcdefghijklmnopqrstuab", "abcdefghijkl"),
]  # fmt: skip
TOGETHER = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in TOGETHER]


@pytest.mark.parametrize(("family", "packing"), [("gpt2", True), ("llama", False), ("qwen3", True)])
def test_scores_are_those_of_texts_alone(tiny_dirs, family, packing):
    """Whatever stands beside a text or is called padding."""
    lm, tokenizer, _ = load(tiny_dirs[family])
    pairs = encode(TOGETHER, tokenizer)
    assert pairs[5] == (int32([1, EOS, 2, 3, EOS]), int32([1, EOS]), 0.0) and len(pairs) == len(TOGETHER)
    expected = all_alone(lm, pairs)
    assert len(set(expected.flatten().tolist())) > 15
    for size in (1, 3, 99):
        parts = [pairs[place : place + size] for place in range(0, len(pairs), size)]
        with torch.no_grad():
            found = torch.cat([reward.pair_scores(lm, packing, part) for part in parts], 1)
        assert found.dtype == torch.float64 and found.shape == (2, len(pairs))
        assert (found - expected).abs().max() < 1e-9


@pytest.mark.parametrize(("autocast", "lora"), [(True, 0), (False, 2)])
def test_a_thousand_texts_have_a_thousand_scores(gpt2_dir, autocast, lora):
    """Also where peft has a copy of the head. A head of bfloat16 gives fewer than 600."""
    flags = {"dtype": "float32" if autocast else "bfloat16", "lora_r": lora, "num_layers_unfrozen": -1 if lora else 0}
    lm, _, _ = reward.load(reward.Args(model=gpt2_dir, dataset=PAIRS, **flags), gpt2_dir, "cpu")
    texts = [[i % 21, i // 21 % 21, i // 441, EOS] for i in range(1000)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = classifier_logits(lm, [[ids] for ids in texts])[:, 0]
    assert scores.dtype == torch.float32 and len(set(scores.tolist())) > 980


def test_an_encoder_scores_texts_alone(bert_dir, tmp_path, capsys):
    """It reads its first token, and is never packed."""
    lm, tokenizer, new = load(bert_dir)
    pairs = encode(PAIRS, tokenizer)
    assert not new and pairs[1][:2] == (int32([2, 3, 4, 5]), int32([2, 3, 4]))
    with torch.no_grad():
        assert (reward.pair_scores(lm, False, pairs) - all_alone(lm, pairs)).abs().max() < 1e-9
    flags = {"eval_dataset": PAIRS, "eval_every": 3, "micro_batch_size": 2}
    _, run_dir = run_reward(bert_dir, tmp_path / "run", **flags)
    assert "--packing" not in capsys.readouterr().out
    expected = all_alone(plain(run_dir / "hf_model"), pairs)
    found = [[row["chosen_score"], row["rejected_score"]] for row in samples(run_dir, 3)]
    assert (tensor(*found).T - expected).abs().max() < 1e-9


@pytest.fixture(scope="module", params=[("gpt2", "<pad>"), ("llama", "<eos>"), ("qwen3", None)], ids=str)
def trained(request, tmp_path_factory, build_model):
    """(run, padding token) of families; in between the run exports its best model, and goes on."""
    family, pad = request.param
    folder = tmp_path_factory.mktemp(family)
    tokenizer = randomwalks.tokenizer()
    tokenizer.pad_token = pad
    model = save(folder, build_model(family, pad_token_id=tokenizer.pad_token_id), tokenizer)
    flags = {"eval_dataset": PAIRS, "eval_every": 1, "micro_batch_size": 2}
    _, run_dir = run_reward(model, folder / "run", **flags)
    assert (run_dir / "hf_model_best/model.safetensors").exists()
    return run_dir, pad


def scores_of(run_dir, side):
    """The scores of PAIRS at the last step, as the run has logged them."""
    return [row[f"{side}_score"] for row in samples(run_dir, 3)]


def reward_args(folder):
    flags = {"trust_remote_code": False, "dtype": "float64", "load_in_4bit": False, "micro_batch_size": 3}
    return SimpleNamespace(reward=str(folder), **flags)


def ppo_scores(folder, texts, ended, chats=False):
    lm = SimpleNamespace(device="cpu", named_parameters=dict().items)
    return RewardModel(reward_args(folder), lm, chats)(texts, ended).tolist()


def test_ppo_reads_the_scores_of_training(trained):
    """Lines of texts in training, padded rows of prompt and output there."""
    run_dir, _ = trained
    for side in ("chosen", "rejected"):
        expected = scores_of(run_dir, side)
        texts = [row["prompt"] + row[side] for row in PAIRS]
        assert len(set(expected)) == 7
        assert ppo_scores(run_dir / "hf_model", texts, [True] * 7) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert ppo_scores(run_dir / "hf_model", texts, [False] * 7) != pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")], ids=["begins", "begins-not"])
def test_ppo_reads_the_scores_of_chats(template, chatty, gpt2_dir, tmp_path, capsys):
    """ppo samples after the prompt that the template writes, and decodes without the end token."""
    tokenizer = add_specials(chatty, "<bos> $A <eos>")
    tokenizer.chat_template = template.replace("{{ eos_token }}", "{{ eos_token }}\n")
    chats = [
        {"prompt": [user(row["prompt"])], "chosen": [answer(row["chosen"])], "rejected": [answer(row["rejected"])]}
        for row in PAIRS
    ]
    flags = {"tokenizer": tokenizer, "eval_dataset": chats, "eval_every": 3}
    _, run_dir = run_reward(gpt2_dir, tmp_path / "run", chats, **flags)
    rows, _ = encode_prompts([{"prompt": chat["prompt"]} for chat in chats], tokenizer, 5, 32, "--dataset")
    prompts = [row["prompt"] for row in rows]
    assert [row["prompt"] for row in samples(run_dir, 3)] == prompts
    for side in ("chosen", "rejected"):
        texts = [prompt + row[side] for prompt, row in zip(prompts, PAIRS, strict=True)]
        found = ppo_scores(run_dir / "hf_model", texts, [True] * 7, chats=True)
        assert found == pytest.approx(scores_of(run_dir, side), rel=1e-9, abs=1e-9)
    # the code on the card
    usage = re.search(r"```python\n(.*?)```", (run_dir / "README.md").read_text(), re.S)[1]
    capsys.readouterr()
    exec(usage, {})
    printed = float(re.search(r"'score': ([-\d.e]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(scores_of(run_dir, "chosen")[0], rel=1e-4)


def test_a_judge_of_another_template(chatty, gpt2_dir, tmp_path, capsys):
    judge = AutoModelForSequenceClassification.from_pretrained(gpt2_dir, num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    for template, is_told in ((TEMPLATE + " ", True), (TEMPLATE, False), (None, False)):
        chatty.chat_template = template
        chatty.save_pretrained(tmp_path / "judge")
        tokenizer = copy.copy(chatty)
        tokenizer.chat_template = TEMPLATE
        args = reward_args(tmp_path / "judge")
        lm = SimpleNamespace(device="cpu", named_parameters=dict().items, config=judge.config, modules=list)
        data, _ = encoded(ppo, [{"prompt": [user("ab")]}], lm, tokenizer)
        assert ppo.load_reward(data, args, lm, tokenizer) is data.reward.model
        said = capsys.readouterr().out
        assert ("warning: --reward reads chats as the template of --model" in said) == is_told


def test_plain_transformers_loads_it(trained):
    """Where padding has a token of its own, a batch is read, too. Elsewhere transformers refuses it."""
    run_dir, pad = trained
    lm = plain(run_dir / "hf_model")
    assert lm.config.num_labels == 1
    assert lm.config.pad_token_id == (PAD if pad == "<pad>" else None)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf_model")
    texts = [row["prompt"] + row["chosen"] + "<eos>" for row in PAIRS]
    expected = scores_of(run_dir, "chosen")
    with torch.no_grad():
        single = [lm(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
        assert single == pytest.approx(expected, rel=1e-9)
        if pad == "<pad>":
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            assert lm(**batch).logits[:, 0].tolist() == pytest.approx(expected, rel=1e-9)
    assert repr("bcd<eos>") in (run_dir / "README.md").read_text()


def test_the_head_is_keyed_by_the_seed(gpt2_dir):
    """N(0, 1 / (width + 1)), whatever torch's generators hold."""
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(heads))
        lm, _, new = load(gpt2_dir, seed=seed)
        heads.append(lm.score.weight.tolist())
        expected = seeding.rng(seed, "head", 0).normal(0, (WIDTH + 1) ** -0.5, (1, WIDTH))
        assert new and heads[-1] == expected.tolist()
    assert heads[0] == heads[1] != heads[2]
    assert lm.score.bias is None


def test_the_bias_of_a_head_begins_at_zero(bert_dir, tmp_path):
    encoder = BertForMaskedLM.from_pretrained(bert_dir)
    lm, _, new = load(save(tmp_path, encoder, AutoTokenizer.from_pretrained(bert_dir)))
    assert new and lm.classifier.weight.all() and not lm.classifier.bias.any()


def test_only_the_head_and_the_top_blocks_move(gpt2_dir, bert_dir, tmp_path):
    moving = [
        (gpt2_dir, 0, r"^score\.weight$"),
        (gpt2_dir, 1, r"^score\.weight$|\.h\.1\.|\.ln_f\."),
        (bert_dir, 0, r"^classifier\.(weight|bias)$"),
    ]
    for number, (folder, unfrozen, names) in enumerate(moving):
        flags = {"num_layers_unfrozen": unfrozen, "weight_decay": 0.1, "center_coef": 0.1}
        _, run_dir = run_reward(folder, tmp_path / f"{number}", **flags)
        before = load(folder)[0].state_dict()
        after = safetensors.torch.load_file(run_dir / "hf_model/model.safetensors")
        assert before.keys() == after.keys()
        moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        assert moved == {name for name in before if re.search(names, name)}


@pytest.mark.parametrize(("packing", "margins", "center"), [(True, MARGINS, 0.3), (False, None, 0.0)], ids=str)
def test_the_first_loss_by_hand(gpt2_dir, tmp_path, packing, margins, center):
    rows = PAIRS
    if margins:
        rows = [row | {"margin": margin} for row, margin in zip(PAIRS, margins, strict=True)]
    lm, tokenizer, _ = load(gpt2_dir)
    chosen, rejected = all_alone(lm, encode(PAIRS, tokenizer)).numpy()
    flags = {"total_steps": 1, "batch_size": 7, "micro_batch_size": 3, "eval_dataset": rows, "eval_every": 1}
    _, run_dir = run_reward(gpt2_dir, tmp_path / "run", rows, center_coef=center, packing=packing, **flags)
    start, first = log(run_dir)
    losses = np.log1p(np.exp(-(chosen - rejected - np.array(margins or [0] * 7))))
    expected = {
        "train/loss": (losses + center * (chosen + rejected) ** 2).mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "train/epoch": 1,
    }
    both = np.concatenate([chosen, rejected])
    evaluated = {
        "eval/loss": losses.mean(),
        "eval/accuracy": expected["rewards/accuracies"],
        "eval/margin": expected["rewards/margins"],
        "eval/score_mean": both.mean(),
        "eval/score_std": both.std(ddof=1),
        "eval/shorter_wins": 3 / 7,
    }
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert {name: start[name] for name in evaluated} == pytest.approx(evaluated, rel=1e-9)


@pytest.mark.case(74, "reward")
def test_ties_in_training(gpt2_dir, tmp_path):
    _, before = run_reward(gpt2_dir, tmp_path / "before", total_steps=1)
    lm = plain(before / "hf_model")
    lm.score.weight.data.zero_()
    flags = {"tokenizer": str(before / "hf_model"), "total_steps": 1, "eval_dataset": PAIRS, "eval_every": 1}
    start, first = log(run_reward(lm, tmp_path / "run", **flags)[1])
    assert start["eval/accuracy"] == first["rewards/accuracies"] == 0.5
    assert first["rewards/margins"] == 0
    assert first["train/loss"] == start["eval/loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert first["optim/grad_norm"] > 0


def test_the_learning_rate_is_the_closed_form(gpt2_dir, tmp_path):
    """A warm-up of 2 steps, then half a cosine to 1e-4 at the end, whatever the micro-batches."""
    flags = {"total_steps": 7, "warmup_steps": 2, "lr_final": 1e-4, "micro_batch_size": 2}
    found = [record["optim/lr"] for record in log(run_reward(gpt2_dir, tmp_path / "run", **flags)[1])]
    cosine = [1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * step / 5)) / 2 for step in range(5)]
    assert found == pytest.approx([5e-3, 1e-2, *cosine], rel=1e-12)
