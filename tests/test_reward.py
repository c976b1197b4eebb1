"""Reward models from preferences: `python -m pytest tests/test_reward.py`

The loss and the metrics against hand numbers and slow definitions; scores against the texts alone, without padding;
pairs from texts and chats; the layout that ppo.py reads; and whole runs of main on tiny models.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from test_invariants import log, recorded, run_ppo, weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from algos import ppo, reward
from benchmarks.tasks import randomwalks
from common import logging, sampling, seeding
from common.classifiers import classifier_ids, classifier_logits, raise_heads
from common.cli import InputError, from_task
from common.rows import chat_pair, pair_texts
from common.tokens import encode_prompts

BOS, EOS, PAD, UNK, WIDTH, NAN = 21, 22, 23, 24, 12, math.nan
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("b", "cd", "e"), ("cde", "f", ""), ("fg", "hij", "hik"), ("hijkl", "m", "no"), ("m", "nopqrst", "nopq"),
        ("nopqrst", "u", "ab"), ("ba", "c", "cde"),
    )
]  # fmt: skip
MARGINS = [0.5, 0, 1.5, -0.25, 2, 0.0, 1]


def turn(role, content):
    return {"role": role, "content": content}


def user(text):
    return turn("user", text)


def answer(text):
    return turn("assistant", text)


# A turn is a letter of its role, the content, the end token and a newline, after one beginning token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': 't', 'user': 'u', 'assistant': 's'}.get(m.role) or "
    "raise_exception(m.role + ' is unknown') }}{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}s{% endif %}"
)
CHATS = [
    {"prompt": [user(row["prompt"])], "chosen": [answer(row["chosen"])], "rejected": [answer(row["rejected"])]}
    for row in PAIRS
]


def add_specials(tokenizer, template):
    """The tokenizer adds special tokens to every text, as those of Llama (bos) do."""
    from tokenizers import processors

    pairs = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    return tokenizer


@pytest.fixture
def chatty(letters):
    letters.chat_template = TEMPLATE
    return add_specials(letters, "<bos> $A")


@pytest.fixture(scope="module")
def variant(tmp_path_factory, build_model):
    """variant(family, pad, template, eos, **config) -> directory of a language model (Bert: of a classifier)."""

    def make(family="gpt2", pad="<pad>", template=None, eos="<eos>", seed=0, **config):
        folder, tokenizer = tmp_path_factory.mktemp(family), randomwalks.tokenizer()
        tokenizer.pad_token, tokenizer.eos_token = pad, eos
        if template:
            tokenizer.chat_template = template
            add_specials(tokenizer, "<bos> $A")
        config = {"pad_token_id": tokenizer.pad_token_id} | config
        if family == "Bert":
            sizes = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
            sizes |= {"vocab_size": 25, "max_position_embeddings": 32, "initializer_range": 0.3, "num_labels": 1}
            torch.manual_seed(seed)
            config = transformers.BertConfig(**sizes | config)
            AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        else:
            build_model(family, seed=seed, **config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def bert_dir(variant):
    return variant("Bert", eos=None)


def run_reward(model, run_dir, rows=PAIRS, **flags):
    """Three steps of 5 pairs, unless flags say otherwise."""
    settings = {"eval_every": 0, "total_steps": 3, "batch_size": 5, "micro_batch_size": 5, "lr": 1e-2, "threads": 1}
    settings |= {
        "dtype": "float64",
        "save_every": 0,
        "weight_decay": 1.0,
        "adam_betas": (0.9, 0.98),
    }
    return reward.main(reward.Args(model=model, dataset=rows, run_dir=str(run_dir), **settings | flags))


def load(path, **flags):
    """The classifier of the script, its tokenizer, and whether the head is new."""
    args = reward.Args(**{"model": path, "dataset": PAIRS, "dtype": "float64"} | flags)
    lm, tokenizer, new = reward.load_classifier(args, path)
    return lm.eval(), tokenizer, new


def encode(rows, tokenizer, max_length=99):
    return reward.encode_texts(rows, tokenizer, max_length, "--dataset")


def as_rows(*texts):
    return [{"chosen": chosen, "rejected": rejected} for chosen, rejected in texts]


def alone(lm, ids):
    """The score of one row without padding, read by transformers at its last token."""
    lm.config.pad_token_id = None
    with torch.no_grad():
        return float(lm(input_ids=torch.tensor([ids])).logits[0, 0])


def plain(folder, dtype=torch.float64):
    """The classifier of a directory as transformers loads it."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()


def samples(run_dir, step):
    lines = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    return [row for row in lines if row["step"] == step]


def config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def same_result(a, b):
    """(metrics, run_dir) of two runs. Absolute: the shift that all scores share has no gradient but rounding errors."""
    x, y = weights(a[1]), weights(b[1])
    assert x.keys() == y.keys()
    for name in x:
        assert (x[name] - y[name]).abs().max() < 1e-9, name
    assert a[0] == pytest.approx(b[0], rel=1e-9, abs=1e-9)


# ---- Maths -----------------------------------------------------------------------------------------------------------


def test_pairwise_loss_golden():
    """A margin of (B,) against scores of (B, 1) would give the mean 1.8767 of a (B, B) matrix."""
    losses = reward.pairwise_loss(tensor(1, 2), tensor(0, 0), tensor(0, 5))
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(3))], rel=1e-12)
    assert losses.mean().item() == pytest.approx(1.6809, abs=5e-5)
    assert reward.pairwise_loss(tensor(3, 3, 7), tensor(3, 3, 7)).tolist() == pytest.approx([math.log(2)] * 3)


SHAPES = [  # chosen, rejected, margin
    ((2, 1), (2, 1), (2,)),
    ((2,), (2, 1), None),
    ((2, 1), (2,), None),
    ((2,), (2,), (2, 1)),
    ((3,), (3,), (1,)),
    ((3,), (3,), ()),
    ((3,), (1,), None),
    ((2, 3), (3,), (3,)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=repr)
def test_pairwise_loss_never_broadcasts(shapes):
    with pytest.raises(ValueError, match="shapes differ"):
        reward.pairwise_loss(*(None if shape is None else torch.zeros(shape) for shape in shapes), center_coef=0.1)


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


def test_metrics_of_scores():
    """Three pairs: right, tied, wrong; the rule of the shorter text is right on the last alone."""
    pairs = [([1, 2, 3], [1, 2], 0.0), ([1, 2], [3, 4], 1.0), ([5], [6, 7, 8, 9, 10], -2.0)]
    found = reward.evaluate_scores(tensor([3, 1, 0], [1, 1, 2]), pairs)
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(0))]
    assert found.pop("loss") == pytest.approx(np.mean(losses), rel=1e-12)
    expected = {"accuracy": 1 / 3, "shorter_wins": 1 / 3, "margin": 0.0, "score_mean": 8 / 6}
    assert found == pytest.approx(expected | {"score_std": np.std([3, 1, 0, 1, 1, 2], ddof=1)}, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_constant_model_is_never_right(n):
    found = reward.evaluate_scores(torch.full((2, n), 1.7, dtype=torch.float64), [([1], [2, 3], 0.0)] * n)
    assert found["accuracy"] == 0 and found["shorter_wins"] == 1
    assert found["loss"] == pytest.approx(math.log(2)) and found["margin"] == 0 == found["score_std"]
    assert all(map(math.isfinite, found.values()))


# ---- Scores ----------------------------------------------------------------------------------------------------------

TOGETHER = [  # chosen, rejected: equal lengths, a prefix of the other, nothing in common, special tokens within
    ("bcd", "bce"), ("a", "f"), ("fghij", "fg"), ("fg", "fghijk"), ("b<eos>cd", "b<eos>ce"), ("b<eos>cd", "b"),
    ("b", "b<eos>cd"), ("klm<pad>no", "klm"), ("", "tsrqponmlkj"), ("abcdefghijklmnopqrstuab", "abcdefghijkl"),
]  # fmt: skip


@pytest.mark.parametrize("pad", [PAD, EOS, 2])
@pytest.mark.parametrize("packing", [True, False])
def test_scores_are_those_of_texts_alone(tiny_dir, packing, pad):
    """Whatever the configuration calls padding: a token of its own, the end token, or one of the text."""
    lm, tokenizer, _ = load(tiny_dir)
    pairs = encode(as_rows(*TOGETHER), tokenizer)[1]
    assert pairs[5][:2] == ([1, EOS, 2, 3, EOS], [1, EOS], 0.0)[:2] and len(pairs) == len(TOGETHER)
    expected = torch.tensor([[alone(lm, pair[side]) for pair in pairs] for side in (0, 1)], dtype=torch.float64)
    assert len(set(expected.flatten().tolist())) > 15
    for size in (1, 3, 99):
        lm.config.pad_token_id = pad
        parts = [pairs[i : i + size] for i in range(0, len(pairs), size)]
        with torch.no_grad():
            found = torch.cat([reward.pair_scores(lm, packing, part) for part in parts], 1)
        assert found.dtype == torch.float64 and found.shape == (2, len(pairs))
        assert (found - expected).abs().max() < 1e-9
        lm.config.pad_token_id = pad
        logits = classifier_logits(lm, [[pair[1]] for pair in pairs])
        assert (logits[:, 0] - expected[1]).abs().max() < 1e-9


def test_a_row_of_every_token(gpt2_dir):
    """No token of the vocabulary is left to be the padding."""
    lm, _, _ = load(gpt2_dir)
    rows = [list(range(25)), [3, 4, EOS], [UNK]]
    expected = [alone(lm, ids) for ids in rows]
    with torch.no_grad():
        assert classifier_logits(lm, [[ids] for ids in rows])[:, 0].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("labels", [1, 3])
def test_texts_in_lines(tiny_dir, labels):
    """Lines of several texts, of one, and with several logits for each; the head is as before, also after an error."""
    torch.manual_seed(0)
    lm = AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=labels, dtype=torch.float64).eval()
    raise_heads(lm)
    lines = [[[1, 2, 3], [4]], [[5, 6, EOS, 7, 8, 9, 3]], [[1], [2], [3, EOS]]]
    with torch.no_grad():
        found = classifier_logits(lm, lines)
        lm.config.pad_token_id = None
        expected = [lm(input_ids=torch.tensor([ids])).logits[0] for line in lines for ids in line]
        assert found.shape == (6, labels) and (found - torch.stack(expected)).abs().max() < 1e-9
        with pytest.raises(IndexError):
            classifier_logits(lm, [[[1, 99]]])
    assert "forward" not in vars(lm.score)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_thousand_texts_have_a_thousand_scores(gpt2_dir, autocast, lora):
    """With weights of bfloat16, or under autocast; also where peft has a copy of the head. A head of bfloat16 gives
    fewer than 600."""
    flags = {"dtype": "float32" if autocast else "bfloat16", "lora_r": lora, "num_layers_unfrozen": -1 if lora else 0}
    lm, _, _ = reward.load(reward.Args(model=gpt2_dir, dataset=PAIRS, **flags), gpt2_dir, "cpu")
    texts = [[i % 21, i // 21 % 21, i // 441, EOS] for i in range(1000)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = classifier_logits(lm, [[ids] for ids in texts])[:, 0]
    assert scores.dtype == torch.float32 and len(set(scores.tolist())) > 980


def test_the_head_moves_in_small_steps(gpt2_dir, tmp_path):
    """With --dtype bfloat16 and adapters: updates of 1e-5, which weights of bfloat16 would lose, reach all of it."""
    flags = {"dtype": "bfloat16", "lora_r": 2, "lr": 1e-5, "weight_decay": 0.0}
    _, before = run_reward(gpt2_dir, tmp_path / "before", total_steps=1, **flags | {"lr": 1e-12})
    _, after = run_reward(gpt2_dir, tmp_path / "after", total_steps=3, **flags)
    heads = []
    for run_dir in before, after:
        state = safetensors.torch.load_file(run_dir / "hf_model/adapter_model.safetensors")
        heads.append(next(weight for name, weight in state.items() if "score" in name))
    assert heads[0].dtype == torch.float32
    moved = (heads[0] - heads[1]).abs()
    assert moved.min() > 1e-6 and moved.max() < 1e-4


def gradients(lm, packing, pairs):
    lm.zero_grad()
    chosen, rejected = reward.pair_scores(lm, packing, pairs)
    reward.pairwise_loss(chosen, rejected, center_coef=0.1).sum().backward()
    return {name: weight.grad for name, weight in lm.named_parameters() if weight.grad is not None}


def test_gradients_of_lines(tiny_dir):
    lm, tokenizer, _ = load(tiny_dir)
    pairs = encode(as_rows(*TOGETHER), tokenizer)[1]
    packed, apart = gradients(lm, True, pairs), gradients(lm, False, pairs)
    assert packed.keys() == apart.keys() and len(packed) > 15
    exact = lm.config.model_type == "gpt2"  # the norms of the others round gradients to float32
    for name, gradient in apart.items():
        assert (packed[name] - gradient).abs().max() <= (1e-9 if exact else 1e-6) * gradient.abs().max(), name


def test_neighbours_in_a_line_change_nothing(tiny_dir):
    lm, tokenizer, _ = load(tiny_dir)
    pairs, found = encode(as_rows(*TOGETHER), tokenizer)[1], []
    for shift in (0, 1, 5):
        others = [([(x + shift) % 21 for x in c], [(x + shift) % 21 for x in r], m) for c, r, m in pairs[1:]]
        with torch.no_grad():
            found.append(reward.pair_scores(lm, True, [pairs[0], *others]))
    for scores in found[1:]:
        assert (scores - found[0])[:, 0].abs().max() < 1e-12 and (scores - found[0])[:, 1:].abs().min() > 1e-6


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("same", [False, True])
def test_the_end_token_is_trained(variant, family, same, packing):
    """Also in models whose embeddings take the padding, which is the end token, for untrainable."""
    lm, tokenizer, _ = load(variant(family, pad="<eos>" if same else "<pad>"))
    assert not same or tokenizer.pad_token_id == EOS
    pairs = encode(PAIRS, tokenizer)[1]
    assert all(side[-1] == EOS and EOS not in side[:-1] for pair in pairs for side in pair[:2])
    reward.pair_scores(lm, packing, pairs)[0].sum().backward()
    assert lm.get_input_embeddings().weight.grad[EOS].abs().max() > 1e-3


def test_an_encoder_scores_texts_alone(bert_dir, tmp_path, capsys):
    """It reads its first token, and is never packed."""
    lm, tokenizer, new = load(bert_dir)
    pairs = encode(PAIRS, tokenizer)[1]
    assert not new and pairs[1][:2] == ([2, 3, 4, 5], [2, 3, 4])
    expected = [[alone(lm, pair[side]) for pair in pairs] for side in (0, 1)]
    with torch.no_grad():
        found = reward.pair_scores(lm, False, pairs).tolist()
    assert found[0] == pytest.approx(expected[0], rel=1e-9) and found[1] == pytest.approx(expected[1], rel=1e-9)
    metrics, run_dir = run_reward(bert_dir, tmp_path / "run", eval_dataset=PAIRS, eval_every=3, micro_batch_size=2)
    apart = run_reward(bert_dir, tmp_path / "apart", eval_dataset=PAIRS, eval_every=3, packing=False)
    same_result((metrics, run_dir), apart)
    final = plain(run_dir / "hf_model")
    found = [row["chosen_score"] for row in samples(run_dir, 3)]
    assert found == pytest.approx([alone(final, pair[0]) for pair in pairs], rel=1e-9)


WINDOW = {"family": "qwen3", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}


def losses(run_dir):
    return [record.get("train/loss") for record in log(run_dir)], [record.get("eval/loss") for record in log(run_dir)]


def test_a_sliding_window_is_kept_in_lines(variant, tmp_path):
    folder = variant(**WINDOW)
    found = [losses(run_reward(folder, tmp_path / f"{p}", packing=p)[1])[0] for p in (True, False)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_packing_is_off_where_layers_mix_rows(letters, tmp_path, capsys):
    """A recurrence goes on from one text of a line into the next: the run says so once, and gives the plain result."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 25, "max_position_embeddings": 32, "num_labels": 1}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 6}
    sizes |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
    found = []
    for packing in (True, False):
        config = transformers.Qwen3_5TextConfig(**sizes, layer_types=["linear_attention", "full_attention"])
        torch.manual_seed(0)
        lm = AutoModelForSequenceClassification.from_config(config).double()
        flags = {"tokenizer": letters, "eval_dataset": PAIRS, "eval_every": 1, "micro_batch_size": 3}
        _, run_dir = run_reward(lm, tmp_path / f"{packing}", packing=packing, **flags)
        said = re.findall(r"--packing is off: its layers read on from one row into the next\n", capsys.readouterr().out)
        assert len(said) == packing
        found.append([[loss or math.nan for loss in column] for column in losses(run_dir)])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-9, nan_ok=True) and len(one) == 4


# ---- Pairs of texts --------------------------------------------------------------------------------------------------

TEXTS = [  # rows, prompt, chosen, rejected
    ([{"prompt": "ab", "chosen": "cd", "rejected": "ce"}], ("ab", "cd", "ce")),
    ([{"chosen": "ab cd ef", "rejected": "ab cd eg"}], ("ab cd", " ef", " eg")),
    ([{"chosen": "ab cd", "rejected": "ab cde"}], ("ab", " cd", " cde")),
    ([{"chosen": "ab", "rejected": "ab"}], ("", "ab", "ab")),
    ([{"chosen": "a\n\nb: c", "rejected": "a\n\nb: d"}], ("a\n\nb:", " c", " d")),
    ([{"chosen": "b  \n c", "rejected": "b  \n d"}], ("b", "  \n c", "  \n d")),
    ([{"chosen": "bc", "rejected": "de"}], ("", "bc", "de")),
    ([{"chosen": " b", "rejected": " c"}], ("", " b", " c")),
]


@pytest.mark.parametrize(("rows", "expected"), TEXTS, ids=repr)
def test_prompts_of_texts(letters, rows, expected):
    """Explicit, or the whole words that the two have in common."""
    assert pair_texts(rows, letters, "") == [expected]


TEMPLATED = ("<bos>uab<eos>\ns", "cd<eos>\n", "e<eos>\n")
PARTED = ("", "<bos>ua<eos>\nsb<eos>\n", "<bos>uc<eos>\nsb<eos>\n")
CHAT_ROWS = [
    ({"prompt": [user("ab")], "chosen": [answer("cd")], "rejected": [answer("e")]}, TEMPLATED),
    ({"chosen": [user("ab"), answer("cd")], "rejected": [user("ab"), answer("e")]}, TEMPLATED),
    ({"prompt": "ab", "chosen": [user("ab"), answer("cd")], "rejected": [user("ab"), answer("e")]}, TEMPLATED),
    ({"prompt": None, "chosen": [user("ab"), answer("cd")], "rejected": [user("ab"), answer("e")]}, TEMPLATED),
    (
        {"prompt": [turn("system", "g"), user("a"), answer("b"), user("c")], "chosen": [answer("d")]}
        | {"rejected": [answer("e"), user("f"), answer("h")]},
        ("<bos>tg<eos>\nua<eos>\nsb<eos>\nuc<eos>\ns", "d<eos>\n", "e<eos>\nuf<eos>\nsh<eos>\n"),
    ),
    (
        {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("b")]},
        ("<bos>ua<eos>\ns", "b<eos>\n", "b<eos>\n"),
    ),
    ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]}, PARTED),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), CHAT_ROWS, ids=lambda x: repr(x)[:30])
def test_prompts_of_chats(chatty, row, expected):
    assert chat_pair(chatty, row, "") == expected
    assert pair_texts([row], chatty, "") == [expected]


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_tokens_of_a_chat(letters, template):
    """One beginning token, which the template writes, and the end token as the last: the newline after it goes."""
    letters.chat_template = TEMPLATE
    _, ((chosen, rejected, margin),), _ = encode([CHAT_ROWS[0][0]], add_specials(letters, template))
    assert chosen == [BOS, 20, 0, 1, EOS, UNK, 18, 2, 3, EOS] and margin == 0
    assert rejected == [BOS, 20, 0, 1, EOS, UNK, 18, 4, EOS]


TURNS = {  # the end of turns is not the end token, or the template writes both behind the last answer
    "<pad>\n": [PAD],
    "<pad>\n{% if loop.last and m.role == 'assistant' %}<eos>{% endif %}": [PAD, UNK, EOS],
}


@pytest.mark.parametrize("special", ["$A", "<bos> $A", "<bos> $A <eos>"])
@pytest.mark.parametrize("ending", TURNS)
def test_a_turn_has_one_end(letters, ending, special):
    """The end of the turn in chats, the end token elsewhere; the same in training and for samples, which ppo decodes
    without special tokens."""
    letters.chat_template = TEMPLATE.replace("{{ eos_token }}\n", ending)
    tokenizer = add_specials(letters, special)
    _, ((chosen, _, _),), _ = encode([CHAT_ROWS[0][0]], tokenizer)
    assert chosen == [BOS, 20, 0, 1, PAD, UNK, 18, 2, 3, *TURNS[ending]]
    sample = "<bos>uab<pad>\nscd"
    assert classifier_ids(tokenizer, [sample], [True]) == [chosen]
    assert classifier_ids(tokenizer, [sample], [False]) == [chosen[:9]]
    assert classifier_ids(tokenizer, [sample], [True], max_length=20) == [chosen]
    tokenizer.truncation_side = "left"
    assert classifier_ids(tokenizer, [sample], [True], max_length=8)[0][-len(TURNS[ending]) :] == TURNS[ending]
    assert max(map(len, classifier_ids(tokenizer, [sample, "abcdefghijk"], [True] * 2, max_length=8))) <= 8
    assert classifier_ids(tokenizer, ["ab"], [True])[0][-3:] == [0, 1, EOS]


def test_tokens_of_a_template_without_special_tokens(letters):
    """Both are added, by the tokenizer and by the script."""
    letters.chat_template = TEMPLATE.replace("{{ bos_token }}", "").replace("{{ eos_token }}", "")
    _, ((chosen, rejected, _),), _ = encode([CHAT_ROWS[0][0]], add_specials(letters, "<bos> $A"))
    assert chosen == [BOS, 20, 0, 1, UNK, 18, 2, 3, EOS] and rejected == [BOS, 20, 0, 1, UNK, 18, 4, EOS]


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_tokens_of_texts(letters, template):
    bos = [BOS] if "bos" in template else []
    rows = [{"prompt": "ab", "chosen": "c", "rejected": ""}, {"prompt": "<bos>a", "chosen": "b<eos>", "rejected": "b "}]
    _, pairs, _ = encode(rows[:1], add_specials(letters, template))
    assert pairs == [(bos + [0, 1, 2, EOS], bos + [0, 1, EOS], 0.0)]
    if "eos" not in template:
        assert encode(rows[1:], letters)[1] == [([BOS, 0, 1, EOS], [BOS, 0, 1, UNK, EOS], 0.0)]


def test_tools_reach_the_template(chatty):
    chatty.chat_template = TEMPLATE.replace("{{ bos_token }}", "{% for t in tools or [] %}{{ t.name }}{% endfor %}")
    row = {**CHAT_ROWS[0][0], "tools": [{"name": "fg"}]}
    assert chat_pair(chatty, row, "") == ("fguab<eos>\ns", "cd<eos>\n", "e<eos>\n")


def test_too_long_and_equal_pairs_are_dropped_and_counted(letters, gpt2_dir, tmp_path, capsys):
    """The end token is part of the length. A cut text would have no end to read a score from."""
    rows = [
        {"prompt": "ab", "chosen": chosen, "rejected": rejected, "margin": margin}
        for margin, (chosen, rejected) in enumerate(
            [("cd", "e"), ("cde", "f"), ("c", "def"), ("f", "f"), ("g", "g<eos>"), ("cdefghi", "cdefghi"), ("", "hi")]
        )
    ]
    triples, pairs, report = encode(rows, letters, 5)
    assert [margin for *_, margin in pairs] == [0, 6] and triples == [("ab", "cd", "e"), ("ab", "", "hi")]
    assert pairs[0] == ([0, 1, 2, 3, EOS], [0, 1, 4, EOS], 0.0)
    assert report == "7 pairs, 3 dropped as longer than 5, 2 as equal"
    with pytest.raises(InputError, match="--dataset: no pair is left: of 7, 7 dropped as longer than 2, 0 as equal"):
        encode(rows, letters, 2)
    run_reward(gpt2_dir, tmp_path / "run", rows, max_length=5, total_steps=1)
    out = capsys.readouterr().out
    assert report in out and "at most 5 tokens a text, 2.5 epochs\n1 steps x 5 pairs; each step" in out


def test_evaluation_pairs_that_are_dropped_are_counted(gpt2_dir, tmp_path, capsys):
    sets = {"one": PAIRS[:1], "two": [*PAIRS, {"prompt": "b", "chosen": "c", "rejected": "c"}]}
    run_reward(gpt2_dir, tmp_path / "run", eval_dataset=sets, eval_every=1, total_steps=1)
    assert "8 pairs, 0 dropped as longer than 32, 1 as equal" in capsys.readouterr().out


def test_positions_of_the_model_limit_the_length(gpt2_dir, tmp_path, capsys):
    rows = [*PAIRS, *as_rows(("a" * 31, "b"), ("c", "d" * 32))]
    rows = [{"prompt": row.get("prompt", ""), "chosen": row["chosen"], "rejected": row["rejected"]} for row in rows]
    run_reward(gpt2_dir, tmp_path / "run", rows, total_steps=1)
    out = capsys.readouterr().out
    assert re.search(
        "9 pairs, 1 dropped as longer than 32, 0 as equal; [0-9]+ without a prompt\ntokens of the longer", out
    )
    assert "longest 32" in out


def test_margins(letters):
    rows = [row | {"margin": margin} for row, margin in zip(PAIRS, MARGINS, strict=True)]
    margins = [margin for *_, margin in encode(rows, letters)[1]]
    assert margins == MARGINS and all(type(margin) is float for margin in margins)
    assert [margin for *_, margin in encode(PAIRS, letters)[1]] == [0.0] * 7
    assert [m for *_, m in encode([PAIRS[0] | {"margin": np.float64(0.5)}], letters)[1]] == [0.5]


BAD_ROWS = [  # changes of row 2, what the error says
    ({"margin": None}, "'margin' must be a finite number, it is None"),
    ({"margin": NAN}, "'margin' must be a finite number, it is nan"),
    ({"margin": math.inf}, "'margin' must be a finite number, it is inf"),
    ({"margin": "1"}, "'margin' must be a finite number, it is '1'"),
    ({"margin": [1]}, r"'margin' must be a finite number, it is \[1\]"),
    ({"chosen": None}, "'chosen' must be valid text, it is None"),
    ({"rejected": 5}, "'rejected' must be valid text, it is 5"),
    ({"rejected": {"a": 1}}, "'rejected' must be valid text, it is {'a': 1}"),
    ({"chosen": [answer("a")]}, "'chosen' must be valid text, it is "),
    ({"prompt": None}, "'prompt' must be valid text, it is None"),
    ({"prompt": [user("a")]}, "'prompt' must be valid text, it is "),
    ({"prompt": 1.5}, "'prompt' must be valid text, it is 1.5"),
    ({"chosen": "\ud800a"}, "'chosen' must be valid text, it is '.ud800a'"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD_ROWS, ids=lambda x: repr(x)[:40])
def test_a_bad_row_is_named(letters, changes, sentence):
    good = {**PAIRS[0], "margin": 0.5}
    with pytest.raises(InputError, match=f"^--dataset row 2: {sentence}"):
        encode([good, good | changes, good], letters)


BAD_CHATS = [
    ({"chosen": []}, "the last message must be the assistant's"),
    ({"rejected": None}, "a chat is a list of .*found None"),
    ({"rejected": "b"}, "a chat is a list of .*found 'b'"),
    ({"chosen": [answer("b"), user("c")]}, "the last message must be the assistant's"),
    ({"prompt": [user("a"), answer("b")], "rejected": []}, "the chat template changes earlier turns"),
    ({"rejected": [turn("robot", "c")]}, "a chat is a list of .*role.*robot"),
    ({"rejected": [{"content": "c"}]}, "a chat is a list of "),
    ({"rejected": [answer(None)]}, "a chat is a list of .*None"),
    ({"rejected": [answer(["c"])]}, "a chat is a list of "),
    ({"prompt": [user(None)]}, "a chat is a list of .*None"),
    ({"prompt": [turn("tool", "c")]}, "the chat template cannot write the messages: tool is unknown"),
    ({"rejected": [5]}, "a chat is a list of .*found 5"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD_CHATS, ids=lambda x: repr(x)[:40])
def test_a_bad_chat_is_named(chatty, changes, sentence):
    with pytest.raises(InputError, match=f"^--dataset row 2: {sentence}"):
        encode([CHATS[0], CHATS[0] | changes, CHATS[0]], chatty)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_bad_chat_without_a_prompt_is_named(chatty, side):
    good = {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]}
    for bad in ([], None, "ab", [user("a")], [user("a"), turn("robot", "b")]):
        with pytest.raises(InputError, match="^--dataset row 2: "):
            encode([good, good | {side: bad}], chatty)


def test_a_chat_needs_a_template(letters):
    with pytest.raises(InputError, match="^--dataset row 1: the chat template cannot write .*chat_template is not set"):
        encode(CHATS, letters)


def test_a_template_that_changes_the_prompt(letters):
    letters.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ 'q' if loop.last }}{{ m.content }}")
    with pytest.raises(InputError, match="^--dataset row 1: the chat template changes earlier turns"):
        encode(CHATS, letters)


def test_conversations_that_part_at_a_user_turn(chatty):
    """A score needs no common prompt: both conversations are read whole, as those that part at the first message."""
    chats = [[user("a"), answer("b"), user(text), answer("e")] for text in "cd"]
    _, ((chosen, rejected, _),), _ = encode([dict(zip(("chosen", "rejected"), chats, strict=True))], chatty)
    assert chatty.decode(chosen) == "<bos>ua<eos><unk>sb<eos><unk>uc<eos><unk>se<eos>"
    assert chatty.decode(rejected) == "<bos>ua<eos><unk>sb<eos><unk>ud<eos><unk>se<eos>"


COLUMNS = [
    ({"prompt": "a", "chosen_response": "b", "rejected": "c"}, "prompt, chosen_response, rejected"),
    ({"input_ids_chosen": [1], "input_ids_rejected": [2]}, "input_ids_chosen, input_ids_rejected"),
    ({"text": "a"}, "text"),
]


@pytest.mark.parametrize(("row", "found"), COLUMNS, ids=lambda x: repr(x)[:40])
@pytest.mark.case(46, "reward")
def test_missing_columns_are_listed(letters, row, found):
    with pytest.raises(InputError, match=f"--dataset has the columns {found}; expected chosen"):
        encode([row], letters)


def test_rows_with_other_columns(gpt2_dir, tmp_path):
    with pytest.raises(InputError, match="--dataset row 3 must be .* see prompt"):
        run_reward(gpt2_dir, tmp_path / "run", [*PAIRS[:2], *as_rows(("a", "b"))])
    with pytest.raises(InputError, match="--eval-dataset y row 2: 'chosen' must be valid text, it is 5"):
        sets = {"x": PAIRS, "y": [PAIRS[0], PAIRS[0] | {"chosen": 5}]}
        run_reward(gpt2_dir, tmp_path / "run", eval_dataset=sets)
    with pytest.raises(InputError, match="--eval-dataset row 2: 'chosen' must be valid text, it is None"):
        run_reward(gpt2_dir, tmp_path / "run", eval_dataset=[PAIRS[0], PAIRS[0] | {"chosen": None}])
    assert not (tmp_path / "run").exists()


# ---- The layout of ppo.py --------------------------------------------------------------------------------------------


def ppo_scores(folder, texts, ended, dtype, size=3):
    args = SimpleNamespace(reward=str(folder), trust_remote_code=False, dtype=dtype, load_in_4bit=False)
    return ppo.RewardModel(args, SimpleNamespace(device="cpu", named_parameters=dict().items))(
        texts, ended, size
    ).tolist()


PRECISION = [("float32", 1e-4), ("float64", 1e-9)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_ppo_reads_the_scores_of_training(variant, family, tmp_path, dtype, tolerance, pad):
    """Lines of texts in training, padded rows of prompt and output there."""
    flags = {"eval_dataset": PAIRS, "eval_every": 3, "micro_batch_size": 2}
    _, run_dir = run_reward(variant(family, pad=pad), tmp_path / "run", dtype=dtype, **flags)
    for side in ("chosen", "rejected"):
        trained = [row[f"{side}_score"] for row in samples(run_dir, 3)]
        texts = [row["prompt"] + row[side] for row in PAIRS]
        found = ppo_scores(run_dir / "hf_model", texts, [True] * 7, dtype)
        assert found == pytest.approx(trained, rel=tolerance, abs=tolerance) and len(set(trained)) == 7
        assert ppo_scores(run_dir / "hf_model", texts, [False] * 7, dtype) != pytest.approx(trained, abs=1e-2)


@pytest.mark.parametrize("special", ["$A", "<bos> $A", "<bos> $A <eos>"])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_ppo_reads_the_scores_of_chats(letters, variant, tmp_path, dtype, tolerance, special):
    """ppo samples after the prompt that the template writes, and decodes without the end token."""
    letters.chat_template = TEMPLATE
    tokenizer = add_specials(letters, special)
    flags = {"tokenizer": tokenizer, "eval_dataset": CHATS, "eval_every": 2}
    _, run_dir = run_reward(variant(), tmp_path / "run", CHATS, dtype=dtype, total_steps=2, **flags)
    found = samples(run_dir, 2)
    prompts = encode_prompts([{"prompt": row["prompt"]} for row in CHATS], tokenizer, 5, 32, "--dataset")[0]
    assert [row["prompt"] for row in found] == [row["prompt"] for row in prompts]
    for side in ("chosen", "rejected"):
        texts = [prompt["prompt"] + row[side][0]["content"] for prompt, row in zip(prompts, CHATS, strict=True)]
        trained = [row[f"{side}_score"] for row in found]
        scores = ppo_scores(run_dir / "hf_model", texts, [True] * 7, dtype)
        assert scores == pytest.approx(trained, rel=tolerance, abs=tolerance)


def test_ppo_trains_on_it(monkeypatch, letters, gpt2_dir, tmp_path):
    """Each sample scored by hand."""
    _, judge = run_reward(gpt2_dir, tmp_path / "judge")
    folder, lm = judge / "hf_model", plain(judge / "hf_model")
    in_rollouts = recorded(monkeypatch, ppo, "score_outputs")
    in_evaluations = recorded(monkeypatch, sampling, "score_outputs")
    flags = {"reward": str(folder), "micro_batch_size": 3, "total_episodes": 10, "eval_every": 4}
    metrics, _ = run_ppo(gpt2_dir, tmp_path / "run", **flags)
    ends = set()
    calls = [*in_rollouts, *in_evaluations]
    for (*_, rows, outputs, output_ids, ended), scores in calls:
        expected = []
        assert ended == [ids[-1] == EOS for ids in output_ids]
        for row, output, ids in zip(rows, outputs, output_ids, strict=True):
            ends.add(ids[-1] == EOS)
            text = letters(row["prompt"] + output)["input_ids"] + [EOS] * (ids[-1] == EOS)
            expected.append(alone(lm, text))
        assert scores == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert ends == {True, False} and len(in_rollouts) == 1 and len(in_evaluations) == 2
    assert metrics["eval/reward"] == pytest.approx(np.mean(expected), rel=1e-9)


# ---- The export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
def test_plain_transformers_loads_it(variant, family, tmp_path, pad):
    """A padded batch, where padding has a token of its own; elsewhere it is refused, and not read at a wrong token."""
    flags = {"eval_dataset": PAIRS, "eval_every": 3}
    _, run_dir = run_reward(variant(family, pad=pad), tmp_path / "run", **flags)
    folder = run_dir / "hf_model"
    lm, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert lm.config.num_labels == 1 and lm.config.pad_token_id == (PAD if pad == "<pad>" else None)
    tokenizer, final = AutoTokenizer.from_pretrained(folder), samples(run_dir, 3)
    expected = [row["chosen_score"] for row in final]
    texts = [row["prompt"] + row["chosen"] + "<eos>" for row in PAIRS]
    with torch.no_grad():
        single = [lm.eval()(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
        assert single == pytest.approx(expected, rel=1e-9)
        if pad == "<pad>":
            batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
            assert lm(**batch).logits[:, 0].tolist() == pytest.approx(expected, rel=1e-9)
        else:
            tokenizer.pad_token = tokenizer.eos_token
            with pytest.raises(ValueError, match="batch sizes > 1"):
                lm(**tokenizer(texts, padding=True, padding_side="right", return_tensors="pt"))


def test_a_batch_of_plain_transformers(family, tiny_dirs, tmp_path):
    """As a user writes it: padded on the side that the exported tokenizer takes."""
    _, run_dir = run_reward(tiny_dirs[family], tmp_path / "run", eval_dataset=PAIRS, eval_every=3)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf_model")
    batch = tokenizer([row["prompt"] + row["chosen"] + "<eos>" for row in PAIRS], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = plain(run_dir / "hf_model")(**batch).logits[:, 0].tolist()
    assert found == pytest.approx([row["chosen_score"] for row in samples(run_dir, 3)], rel=1e-5)


def test_the_example_of_the_card_prints_the_score(gpt2_dir, tmp_path, capsys):
    _, run_dir = run_reward(gpt2_dir, tmp_path / "run", eval_dataset=PAIRS[:1], eval_every=3, dtype="float32")
    first = "b" + "cd" + "<eos>"
    usage = re.search(r"```python\n(.*?)```", (run_dir / "README.md").read_text(), re.S)[1]
    assert repr(first) in usage
    capsys.readouterr()
    exec(usage, {})
    printed = float(re.search(r"'score': ([-\d.e]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(samples(run_dir, 3)[0]["chosen_score"], rel=1e-4)


# ---- The head --------------------------------------------------------------------------------------------------------


def test_the_head_is_keyed_by_the_seed(tiny_dir):
    """N(0, 1 / (width + 1)), whatever torch's generators hold."""
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(heads))
        lm, _, new = load(tiny_dir, seed=seed)
        heads.append(lm.score.weight.detach().clone())
        expected = seeding.rng(seed, "head", 0).normal(0, (WIDTH + 1) ** -0.5, (1, WIDTH))
        assert new and heads[-1].tolist() == expected.tolist()
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert lm.score.bias is None


def test_the_scale_of_the_head(gpt2_dir):
    heads = torch.cat([load(gpt2_dir, seed=seed)[0].score.weight.detach().flatten() for seed in range(30)])
    assert heads.std().item() == pytest.approx(13**-0.5, rel=0.1) and abs(heads.mean()) < 0.05


def test_an_encoder_without_a_head(variant, tmp_path):
    """Several new weights, each with a draw of its own; biases are 0."""
    lm = plain(variant("Bert", eos=None))
    randomwalks.tokenizer().save_pretrained(tmp_path)
    lm.bert.save_pretrained(tmp_path)
    found, _, new = load(str(tmp_path))
    assert new and torch.equal(found.bert.pooler.dense.weight, lm.bert.pooler.dense.weight)
    numbers = {name: i for i, name in enumerate(("classifier.bias", "classifier.weight"))}
    expected = seeding.rng(1, "head", numbers["classifier.weight"]).normal(0, 13**-0.5, (1, WIDTH))
    assert found.classifier.weight.tolist() == expected.tolist() and found.classifier.bias.tolist() == [0]


def test_runs_with_a_seed_are_equal(gpt2_dir, tmp_path):
    one, two, other = (
        weights(run_reward(gpt2_dir, tmp_path / str(i), seed=seed, total_steps=1)[1])
        for i, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.score.weight"], other["model.score.weight"])


def test_an_exported_head_is_kept(gpt2_dir, tmp_path, capsys):
    _, first = run_reward(gpt2_dir, tmp_path / "first")
    assert "head: new" in capsys.readouterr().out
    _, second = run_reward(str(first / "hf_model"), tmp_path / "second", total_steps=1, lr=1e-30)
    assert "head: that of --model" in capsys.readouterr().out
    before, after = weights(first), weights(second)
    assert before.keys() == after.keys()
    for name in before:  # a weight of zero may move by the learning rate
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-29)


def edited(source, folder, edit):
    """A copy of a model directory with other weights."""
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    state = safetensors.torch.load_file(Path(source) / "model.safetensors")
    edit(state)
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((Path(source) / "config.json").read_text())
    return str(folder)


@pytest.mark.case(36, "reward")
def test_missing_weights_are_refused(tiny_dir, tmp_path):
    last = []

    def edit(state):
        last.append(next(name for name in sorted(state) if ".1." in name and name.endswith("weight")))
        del state[last[0]]

    folder = edited(tiny_dir, tmp_path, edit)
    with pytest.raises(InputError, match=f"--model {folder}: {re.escape(last[0])} is missing"):
        run_reward(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.case(36, "reward")
def test_weights_that_are_not_finite_are_refused(gpt2_dir, tmp_path):
    folder = edited(gpt2_dir, tmp_path, lambda state: state["transformer.h.1.mlp.c_fc.weight"][0, 0].fill_(NAN))
    with pytest.raises(InputError, match="transformer.h.1.mlp.c_fc.weight is not finite"):
        run_reward(folder, tmp_path / "run")


def labels(family, build_model, n=3):
    settings = build_model(family).config
    settings.num_labels = n
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(settings)


def test_several_labels_are_refused(family, build_model, letters, tmp_path):
    labels(family, build_model).save_pretrained(tmp_path)
    letters.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="--model .* cannot be loaded: score.weight is of shape .3, 12., expected .1"):
        run_reward(str(tmp_path), tmp_path / "run")


def test_a_model_object(gpt2_dir, letters, tmp_path):
    """It is its directory, also in the second run."""
    _, first = run_reward(gpt2_dir, tmp_path / "first", total_steps=1)
    found = run_reward(plain(first / "hf_model"), tmp_path / "object", tokenizer=letters)
    same_result(found, run_reward(str(first / "hf_model"), tmp_path / "directory"))


def test_a_model_object_of_several_labels_is_refused(build_model, letters, tmp_path):
    with pytest.raises(InputError, match="label"):
        run_reward(labels("gpt2", build_model).double(), tmp_path / "run", tokenizer=letters)


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("with_margin", "center"), [(False, 0.0), (True, 0.3)])
def test_the_first_loss_by_hand(tiny_dir, tmp_path, packing, with_margin, center):
    margins = MARGINS if with_margin else [0] * 7
    rows = [row | ({"margin": margin} if with_margin else {}) for row, margin in zip(PAIRS, margins, strict=True)]
    lm, tokenizer, _ = load(tiny_dir)
    chosen, rejected = (
        np.array([alone(lm, tokenizer(row["prompt"] + row[side])["input_ids"] + [EOS]) for row in PAIRS])
        for side in ("chosen", "rejected")
    )
    flags = {"total_steps": 1, "batch_size": 7, "micro_batch_size": 3, "eval_dataset": rows, "eval_every": 1}
    _, run_dir = run_reward(tiny_dir, tmp_path / "run", rows, center_coef=center, packing=packing, **flags)
    start, found = log(run_dir)
    losses = np.log1p(np.exp(-(chosen - rejected - margins)))
    assert found["train/loss"] == pytest.approx((losses + center * (chosen + rejected) ** 2).mean(), rel=1e-9)
    assert start["eval/loss"] == pytest.approx(losses.mean(), rel=1e-9)
    assert found["rewards/chosen"] == pytest.approx(chosen.mean(), rel=1e-9)
    assert found["rewards/rejected"] == pytest.approx(rejected.mean(), rel=1e-9)
    assert found["rewards/margins"] == pytest.approx((chosen - rejected).mean(), rel=1e-9, abs=1e-9)
    assert found["rewards/accuracies"] == start["eval/accuracy"] == (chosen > rejected).mean()
    assert found["train/epoch"] == 1 and start["eval/margin"] == pytest.approx(found["rewards/margins"], rel=1e-9)
    both = np.concatenate([chosen, rejected])
    assert start["eval/score_mean"] == pytest.approx(both.mean(), rel=1e-9)
    assert start["eval/score_std"] == pytest.approx(both.std(ddof=1), rel=1e-9)
    assert start["eval/shorter_wins"] == 3 / 7


@pytest.mark.case(74, "reward")
def test_ties_in_training(gpt2_dir, tmp_path):
    _, first = run_reward(gpt2_dir, tmp_path / "first", total_steps=1)
    (tmp_path / "zero").mkdir()
    folder = edited(first / "hf_model", tmp_path / "zero", lambda state: state["score.weight"].zero_())
    _, run_dir = run_reward(folder, tmp_path / "run", total_steps=1, eval_dataset=PAIRS, eval_every=1)
    start, found = log(run_dir)
    assert start["eval/accuracy"] == found["rewards/accuracies"] == found["rewards/margins"] == 0
    assert found["train/loss"] == start["eval/loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert found["optim/grad_norm"] > 0


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("pad", ["<eos>", None])
def test_a_best_export_does_not_stop_the_run(variant, tmp_path, pad, packing):
    """It takes the padding out of the configuration, and training goes on."""
    flags = {"eval_dataset": PAIRS, "eval_every": 1, "micro_batch_size": 3, "packing": packing}
    _, run_dir = run_reward(variant(pad=pad), tmp_path / "run", **flags)
    assert (run_dir / "hf_model_best/model.safetensors").exists() and len(log(run_dir)) == 4


def test_the_learning_rate_is_the_closed_form(gpt2_dir, tmp_path):
    """A warm-up of 2 steps, then half a cosine to 1e-4 at the end, whatever the micro-batches."""
    flags = {"total_steps": 7, "warmup_steps": 2, "lr_final": 1e-4, "micro_batch_size": 2}
    found = [record["optim/lr"] for record in log(run_reward(gpt2_dir, tmp_path / "run", **flags)[1])]
    cosine = [1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * step / 5)) / 2 for step in range(5)]
    assert found == pytest.approx([5e-3, 1e-2, *cosine], rel=1e-12)


def test_every_epoch_holds_every_pair_once(monkeypatch, letters, gpt2_dir, tmp_path):
    """In an order of its own, which the seed decides."""
    calls, expected = recorded(monkeypatch, reward, "pair_scores"), encode(PAIRS, letters)[1]
    flags = {"batch_size": 2, "micro_batch_size": 1, "total_steps": None, "epochs": 2.0, "packing": False}
    metrics, run_dir = run_reward(gpt2_dir, tmp_path / "run", seed=3, **flags)
    seen = [pair for (_, _, pairs), _ in calls for pair in pairs]
    assert len(log(run_dir)) == 7 and metrics["train/epoch"] == 2
    assert sorted(seen) == sorted(expected * 2) and len({str(pair) for pair in seen[:6] + seen[8:]}) == 7
    assert len({str(pair) for pair in seen[:6]}) == 6 == len({str(pair) for pair in seen[8:]})
    drawn = [expected[row] for row in seeding.stream_rows(3, "data", 7, 0, 14)]
    for step in range(0, 14, 2):
        assert sorted(seen[step : step + 2]) == sorted(drawn[step : step + 2])


@pytest.mark.parametrize("k", [0, 1])
def test_only_the_head_and_the_top_blocks_move(family, tiny_dirs, tmp_path, k):
    _, run_dir = run_reward(
        tiny_dirs[family], tmp_path / "run", num_layers_unfrozen=k, weight_decay=0.1, center_coef=0.1
    )
    before = dict(load(tiny_dirs[family])[0].state_dict())
    after = safetensors.torch.load_file(run_dir / "hf_model/model.safetensors")
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    norms = {"transformer.ln_f.weight", "transformer.ln_f.bias", "model.norm.weight"} & before.keys()
    blocks = {name for name in before if ".1." in name}
    assert len(blocks) > 8 and norms and before.keys() == after.keys()
    assert moved == {"score.weight"} | (norms | blocks if k else set())


def test_the_head_of_an_encoder_alone(bert_dir, tmp_path):
    _, run_dir = run_reward(bert_dir, tmp_path / "run", num_layers_unfrozen=0, center_coef=0.1)
    before, after = (
        safetensors.torch.load_file(Path(x) / "model.safetensors") for x in (bert_dir, run_dir / "hf_model")
    )
    moved = {name for name, weight in before.items() if not torch.equal(weight.double(), after[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


def test_more_unfrozen_layers_than_there_are(gpt2_dir, tmp_path):
    with pytest.raises(InputError, match="--num-layers-unfrozen 3: the model has 2 layers"):
        run_reward(gpt2_dir, tmp_path / "run", num_layers_unfrozen=3)
    assert not (tmp_path / "run").exists()


def test_it_learns_the_pairs(gpt2_dir, tmp_path):
    metrics, _ = run_reward(gpt2_dir, tmp_path / "run", total_steps=15, eval_dataset=PAIRS, eval_every=15, batch_size=7)
    assert metrics["eval/accuracy"] == 1 and metrics["eval/loss"] < 0.1 and metrics["train/loss"] < 0.1


EVERYTHING = {"center_coef": 0.05, "num_layers_unfrozen": 1, "save_every": 2, "total_steps": 4, "eval_every": 1}


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_run_continues_bitwise(monkeypatch, gpt2_dir, tmp_path, how):
    """With margins, frozen layers, a new head and a best export at once."""
    rows = [row | {"margin": margin} for row, margin in zip(PAIRS, MARGINS, strict=True)]
    flags = EVERYTHING | {"eval_dataset": PAIRS, "adam_betas": (0.5, 0.9), "micro_batch_size": 2}
    whole = run_reward(gpt2_dir, tmp_path / "whole", rows, **flags)
    calls, stop_requested = [], logging.Run.stop_requested

    def stop(run):
        calls.append(1)
        if how == "stopped":
            run.signal = 15 if len(calls) == 3 else None
        assert how == "stopped" or len(calls) < 4, "killed"  # after metrics.jsonl has step 4
        return stop_requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    with pytest.raises((SystemExit, AssertionError)) as stopped:
        run_reward(gpt2_dir, tmp_path / "run", rows, **flags)
    assert getattr(stopped.value, "code", "killed" in str(stopped.value)) == (143 if how == "stopped" else True)
    assert len(log(tmp_path / "run")) == (4 if how == "stopped" else 5)
    monkeypatch.undo()
    assert run_reward(gpt2_dir, tmp_path / "run", rows, **flags)[0] == whole[0]
    for name in ("metrics.jsonl", "samples.jsonl", "hf_model/config.json", "hf_model_best/config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (whole[1] / name).read_bytes(), name
    for name in ("hf_model", "hf_model_best"):
        one, two = (safetensors.torch.load_file(x / name / "model.safetensors") for x in (tmp_path / "run", whole[1]))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def test_several_sets_and_the_best_model(gpt2_dir, tmp_path):
    """The first set decides, and gets worse: its pairs are those of training, turned around."""
    turned = [{"prompt": r["prompt"], "chosen": r["rejected"], "rejected": r["chosen"]} for r in PAIRS]
    sets = {"turned": turned, "odd": PAIRS[:3]}
    flags = {"eval_every": 2, "lr_schedule": "constant", "batch_size": 7, "lr": 3e-4, "seed": 2}
    _, run_dir = run_reward(gpt2_dir, tmp_path / "run", eval_dataset=sets, total_steps=8, **flags)
    records = [record for record in log(run_dir) if "eval/odd/loss" in record]
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    names = "loss accuracy shorter_wins margin score_mean score_std".split()
    assert {f"eval/{s}/{n}" for s in sets for n in names} == {k for k in records[0] if k.startswith("eval/")}
    accuracies = [record["eval/turned/accuracy"] for record in records[1:]]
    best = [2, 4, 6, 8][accuracies.index(max(accuracies))]
    assert best < 8 and max(accuracies) > accuracies[-1]
    _, short = run_reward(gpt2_dir, tmp_path / "short", total_steps=best, **flags)
    one = safetensors.torch.load_file(run_dir / "hf_model_best/model.safetensors")
    two = safetensors.torch.load_file(short / "hf_model/model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert "eval/turned/accuracy" in (run_dir / "README.md").read_text()
    found = samples(run_dir, 8)
    assert [row["set"] for row in found] == ["turned"] * 7 + ["odd"] * 3
    assert list(found[0]) == ["step", "set", "prompt", "chosen", "rejected", "chosen_score", "rejected_score"]
    assert [(r["prompt"], r["chosen"]) for r in found[7:]] == [(r["prompt"], r["chosen"]) for r in PAIRS[:3]]
    final = plain(run_dir / "hf_model")
    for row in found:
        ids = [randomwalks.tokenizer()(row["prompt"] + row[side])["input_ids"] for side in ("chosen", "rejected")]
        expected = [alone(final, x + [EOS]) for x in ids]
        assert [row["chosen_score"], row["rejected_score"]] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.case(74, "reward")
def test_evaluation_sets_of_odd_sizes(gpt2_dir, tmp_path, n):
    """Scored in batches of two; the metrics are those of all pairs, and finite."""
    flags = {"eval_dataset": PAIRS[-n:], "eval_every": 1, "total_steps": 1, "micro_batch_size": 2}
    _, run_dir = run_reward(gpt2_dir, tmp_path / "run", **flags)
    assert len(samples(run_dir, 1)) == n
    for record in log(run_dir):
        rows = samples(run_dir, record["step"])
        differences = np.array([row["chosen_score"] - row["rejected_score"] for row in rows])
        assert record["eval/accuracy"] == (differences > 0).mean()
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in record.values())
    assert list(samples(run_dir, 1)[0]) == "step prompt chosen rejected chosen_score rejected_score".split()


def test_without_an_evaluation_set(gpt2_dir, tmp_path):
    metrics, run_dir = run_reward(gpt2_dir, tmp_path / "run", eval_every=1)
    assert "rewards/accuracies" in metrics and not (run_dir / "hf_model_best").exists()
    assert not any(key.startswith("eval/") for key in metrics)


@pytest.mark.parametrize("sets", [None, {"x": PAIRS, "y": PAIRS[:1]}])
def test_check(monkeypatch, gpt2_dir, tmp_path, capsys, sets):
    monkeypatch.chdir(tmp_path)
    found = run_reward(gpt2_dir, tmp_path / "run", check=True, eval_dataset=sets)
    out = capsys.readouterr().out
    assert found == ({}, None) and out.rstrip().endswith("check passed") and "head: new" in out
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="row 2: 'margin' must be a finite number"):
        run_reward(gpt2_dir, tmp_path / "run", [PAIRS[0] | {"margin": 1}, PAIRS[1] | {"margin": None}], check=True)


# ---- Flags -----------------------------------------------------------------------------------------------------------


BAD_FLAGS = [
    ({"model": None}, "--model is missing: "),
    ({"dataset": None}, "--dataset is missing: "),
    ({"center_coef": -0.1}, "--center-coef -0.1 must be 0 or a positive number"),
    ({"center_coef": NAN}, "--center-coef nan must be 0 or a positive number"),
    ({"num_layers_unfrozen": -2}, "--num-layers-unfrozen -2 must be -1 or more"),
    ({"num_layers_unfrozen": 1, "lora_r": 4}, "--num-layers-unfrozen must be -1 with --lora-r"),
    ({"max_length": 0}, "--max-length 0 must be at least 1"),
    ({"epochs": 0.0}, "--epochs 0.0 must be a positive number"),
    ({"lr": 0.0, "batch_size": 0, "max_length": 0}, "3 problems:"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD_FLAGS, ids=lambda x: repr(x)[:40])
def test_flags_that_cannot_be(flags, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        reward.Args(**{"model": "gpt2", "dataset": PAIRS} | flags)


TASK = "benchmarks/tasks/randomwalks.py:"
EMBEDDED = {  # of the embedded task, as they were while they were the defaults
    "model": TASK + "base_model", "dataset": TASK + "pairs:split=train", "eval_dataset": TASK + "eval_pairs",
    "lr": 2e-3, "lr_schedule": "cosine", "warmup_steps": 40, "adam_betas": (0.9, 0.98), "adam_eps": 1e-8,
    "weight_decay": 1.0, "max_grad_norm": 1.0, "batch_size": 64, "micro_batch_size": 64, "epochs": 40.0,
    "total_steps": None, "max_length": 1024, "eval_every": 100, "attn_implementation": "eager",
}  # fmt: skip


def test_the_embedded_task_has_its_settings():
    given = vars(from_task(reward.Args, reward.TASK))
    assert {name: given[name] for name in EMBEDDED} == EMBEDDED
    changed = from_task(reward.Args, reward.TASK, lr=1e-3)
    assert changed.lr == 1e-3 and changed.weight_decay == 1.0


def test_defaults_are_for_pretrained_models():
    args = reward.Args(model="gpt2", dataset=PAIRS)
    assert (args.lr, args.weight_decay, args.epochs, args.batch_size, args.micro_batch_size) == (1e-5, 0.0, 1.0, 64, 8)
    assert args.eval_dataset is args.attn_implementation is None
    assert vars(args) == vars(reward.Args(**vars(args)))  # nothing is rewritten


def test_the_summary_says_rate_limits_and_length(gpt2_dir, capsys):
    flags = {"model": gpt2_dir, "dataset": PAIRS, "check": True, "threads": 1}
    reward.main(reward.Args(**flags, epochs=20.0, batch_size=56))
    out = capsys.readouterr().out
    assert "\nlr 1e-05 cosine, at most 32 tokens a text, 24 epochs\n3 steps x 56 pairs; each step 56 pairs" in out
    reward.main(reward.Args(**flags, total_steps=4, max_length=11, lr=0.25))
    assert "\nlr 0.25 cosine, at most 11 tokens a text, 36.6 epochs\n" in capsys.readouterr().out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_that_of_the_flag(gpt2_dir, attention):
    assert load(gpt2_dir, attn_implementation=attention)[0].config._attn_implementation == attention


# ---- Files -----------------------------------------------------------------------------------------------------------


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_ultrafeedback(variant, tmp_path):
    """A prompt as text beside whole chats, their scores, and columns that are not read."""
    rows = [
        {"prompt": r["prompt"], "prompt_id": f"{i}", "chosen": [user(r["prompt"]), answer(r["chosen"])]}
        | {
            "rejected": [user(r["prompt"]), answer(r["rejected"])],
            "messages": [],
            "score_chosen": 8.5,
            "score_rejected": 7,
        }
        for i, r in enumerate(PAIRS)
    ]
    path, flags = jsonl(tmp_path / "rows.jsonl", rows), {"eval_every": 1, "total_steps": 1}
    folder = variant(template=TEMPLATE)
    one = run_reward(folder, tmp_path / "one", path, eval_dataset=path, **flags)
    same_result(one, run_reward(folder, tmp_path / "two", CHATS, eval_dataset=CHATS, **flags))
    first = samples(one[1], 1)[0]
    assert (first["prompt"], first["chosen"], first["rejected"]) == ("<bos>ub<eos>\ns", "cd<eos>\n", "e<eos>\n")


def test_rows_of_hh(variant, tmp_path):
    """Texts, also where the tokenizer has a chat template: it is not used."""
    head = "\n\nHuman: {}\n\nAssistant:"
    rows = [{side: head.format(r["prompt"][:2]) + " " + r[side][:3] for side in ("chosen", "rejected")} for r in PAIRS]
    path, flags = jsonl(tmp_path / "rows.jsonl", rows), {"eval_every": 1, "total_steps": 1}
    _, run_dir = run_reward(variant(template=TEMPLATE), tmp_path / "run", path, eval_dataset=path, **flags)
    found, lm, tokenizer = samples(run_dir, 1), plain(run_dir / "hf_model"), randomwalks.tokenizer()
    kept = [row for row in PAIRS if row["chosen"][:3] != row["rejected"][:3]]
    assert [row["prompt"] for row in found[:2]] == ["\n\nHuman: b\n\nAssistant:", "\n\nHuman: cd\n\nAssistant:"]
    assert len(found) == len(kept) == 6 and found[0]["chosen"] == " cd" and found[0]["rejected"] == " e"
    for row in found:
        ids = [BOS, *tokenizer(row["prompt"] + row["chosen"])["input_ids"], EOS]
        assert row["chosen_score"] == pytest.approx(alone(lm, ids), rel=1e-9) and EOS not in ids[:-1]
