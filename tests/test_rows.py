"""Rows to token ids, labels, actions and prompt lengths: `python -m pytest tests/test_rows.py`

Every form of row that a script accepts, through the script's own function. Tables hold a row and the text of its
tokens, with marks for what is trained. Then come templates as models have them, files, and what each script reads.
Rows that are refused are in test_inputs.py.
"""

import functools
import gzip
import json
import pickle
import re
from itertools import groupby, product
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from helpers import BOS, EOS, PAD, TEMPLATE, UNK, add_specials, answer, encoded, jsonl, turn, user, write
from tokenizers import Tokenizer, decoders, models, processors
from transformers import GPT2Config, PreTrainedTokenizerFast

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from common.errors import InputError
from common.functions import load_function
from common.lm.chat import chat_text, pair_texts, tell_header
from common.lm.classifier import classifier_ids
from common.lm.tokens import encode_prompts, int32
from common.rows import load_rows, load_sets, read_data, read_rows

BOTH = ["$A", "<bos> $A <eos>"]  # what a tokenizer adds to every text
AB = user("ab")
CD = answer("cd")
E = user("e")
F = answer("f")
TURNS = [AB, CD, E, F]
FOUR = ["ab", "cd", "e", "f"]
SAMPLING = pytest.mark.parametrize("script", [ppo, grpo], ids=lambda script: script.__name__)
# scripts ask the model for its positions, and ppo for its critic
LM = SimpleNamespace(config=GPT2Config(n_positions=32), modules=list, named_parameters=list)


def refused(sentence):
    return pytest.raises(InputError, match=f"^{sentence}")


def text_of(tokenizer, ids):
    """The text of tokens; ^ is <bos>, . is <eos>."""
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("<bos>", "^").replace("<eos>", ".")


def shown(tokenizer, ids, trained):
    """The text of tokens, with those in brackets whose places are not trained."""
    text = ""
    for is_trained, places in groupby(range(len(ids)), lambda place: place in trained):
        piece = text_of(tokenizer, [ids[place] for place in places])
        if not is_trained:
            piece = f"[{piece}]"
        text += piece
    return text


def with_labels(rows, tokenizer, max_length=99, only=True, encoder=False):
    """(the examples of sft.py as texts, its report); in brackets what has no label."""
    examples, report = sft.encode_rows(rows, tokenizer, max_length, only, "--dataset", encoder)
    found = []
    for ids, labels in examples:
        trained = [place for place, label in enumerate(labels) if label != -100]
        assert [labels[place] for place in trained] == [ids[place] for place in trained]
        found.append(shown(tokenizer, ids, trained))
    return found, report


def with_actions(rows, tokenizer, max_length=99, encoder=False):
    """([(text, rewards, done)] of the episodes of ilql.py, its report); in brackets what is no action."""
    episodes, report = ilql.encode_episodes(rows, tokenizer, max_length, "--dataset", encoder)
    return [(shown(tokenizer, e.ids, e.actions), e.rewards, e.done) for e in episodes], report


def pairs_of(rows, tokenizer, max_length=99, max_prompt_length=None, truncation_mode="keep_end"):
    """([prompt|chosen|rejected] of the pairs of dpo.py, its report)."""
    limits = SimpleNamespace(max_prompt_length=max_prompt_length, truncation_mode=truncation_mode)
    pairs, report = dpo.encode_pairs(rows, tokenizer, max_length, limits, "--dataset")
    found = []
    for pair in pairs:
        chosen, rejected, n = pair.chosen, pair.rejected, pair.prompt_length
        assert chosen[:n] == rejected[:n]
        found.append("|".join(text_of(tokenizer, ids) for ids in (chosen[:n], chosen[n:], rejected[n:])))
    return found, report


def scored(rows, tokenizer, max_length=99):
    """([(chosen, rejected, margin)] of reward.py, with the sides as texts, its report)."""
    _, pairs, report = reward.encode_texts(rows, tokenizer, max_length, "--dataset")
    return [(text_of(tokenizer, c), text_of(tokenizer, r), margin) for c, r, margin in pairs], report


def begun(text, specials):
    """The text by a tokenizer that adds special tokens: with a beginning token, unless it has one."""
    if "<bos>" not in specials or "^" in text:
        return text
    return text.replace("[", "[^", 1) if text[0] == "[" else "^" + text


FORMS = [  # row, its text, rewards of the actions; None: 2 for the last one. A row that is not truncated has ended.
    ({"prompt": "ab", "completion": "cd"}, "[ab]cd.", None),
    ({"prompt": "", "completion": "cd"}, "[^]cd.", None),
    ({"prompt": "ab", "completion": ""}, "[ab].", None),
    ({"prompt": "ab", "completion": "cd<eos>"}, "[ab]cd.", None),
    ({"prompt": "<bos>ab", "completion": "c"}, "[^ab]c.", None),
    ({"dialogue": FOUR, "reward": [1.5, 2]}, "[ab]cd[e]f.", [0, 1.5, 0, 2]),
    ({"dialogue": ["", "cd", "", "f"]}, "[^]cdf.", None),
    ({"dialogue": ["ab", "", "e", ""]}, "[abe].", None),
    ({"messages": TURNS}, "[^uab.s]cd.[ue.s]f.", None),
    ({"messages": [AB, CD, answer("h")]}, "[^uab.s]cd.[s]h.", None),
    ({"messages": [CD]}, "[^s]cd.", None),
    ({"messages": [user("s"), answer("us<eos>sab")]}, "[^us.s]us.sab.", None),  # what looks like a turn is none
    ({"prompt": TURNS[:3], "completion": [F]}, "[^uab.scd.ue.s]f.", None),
    ({"prompt": [AB], "completion": TURNS[1:], "reward": [1, 2]}, "[^uab.s]cd.[ue.s]f.", [0, 0, 1, 0, 2]),
    ({"prompt": "a", "completion": "", "reward": np.float32(-0.5)}, "[a].", [-0.5]),
    ({"prompt": "ab", "completion": "cd", "truncated": True}, "[ab]cd", None),
    ({"prompt": "ab", "completion": "cd<eos>", "truncated": 1}, "[ab]cd", None),
    ({"dialogue": [*FOUR[:3], ""], "reward": [1, 0], "truncated": True}, "[ab]cd[e]", [0, 1]),
    ({"messages": TURNS, "truncated": True}, "[^uab.s]cd.[ue.s]f", None),  # ends of earlier turns stay
]


@pytest.mark.parametrize("specials", BOTH)
@pytest.mark.parametrize(("row", "text", "rewards"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_forms_of_a_row(chatty, row, text, rewards, specials):
    """sft trains what ilql takes for actions. One beginning token comes first, one end token last."""
    tokenizer = add_specials(chatty, specials)
    text = begun(text, specials)
    [(actions, found, done)], _ = with_actions([{"reward": 2} | row], tokenizer)
    assert (actions, done) == (text, not row.get("truncated"))
    assert found == (rewards or [0] * (len(found) - 1) + [2])
    if row.get("truncated"):  # sft knows no such column
        return
    whole = text.replace("[", "").replace("]", "")
    assert with_labels([row], tokenizer)[0] == [text]
    assert with_labels([row], tokenizer, only=False)[0] == [f"[{whole[0]}]{whole[1:]}"]
    prompt = row.get("prompt", [])
    if prompt != []:
        (kept,), (query,) = encode_prompts([{"prompt": prompt, "n": 5}], tokenizer, 5, 99, "--eval-prompts")
        sampled = text_of(tokenizer, query)  # evaluations sample from the tokens that training has as a prompt
        assert f"[{sampled}]" == text[: text.index("]") + 1]
        assert kept["n"] == 5 and kept["prompt"] in (prompt, sampled.replace("^", "<bos>").replace(".", "<eos>"))


def test_a_text(letters):
    """Nothing predicts the first token; ilql puts the beginning token before it."""
    rows = [{"text": text, "reward": 1} for text in ("abc", "ab<eos>", "<bos>a", "")]
    assert with_labels(rows, letters)[0] == ["[a]bc.", "[a]b.", "[^]a."]
    assert [text for text, *_ in with_actions(rows, letters)[0]] == ["[^]abc.", "[^]ab.", "[^]a.", "[^]."]
    tokenizer = add_specials(letters, "<bos> $A <eos>")
    assert with_labels(rows[:1], tokenizer)[0] == [with_actions(rows[:1], tokenizer)[0][0][0]] == ["[^]abc."]


def test_a_beginning_token_in_one_row_says_nothing_about_others(letters):
    tokenizer = add_specials(letters, "<bos> $A")
    rows = [{"prompt": prompt, "completion": "b", "chosen": "b", "rejected": "c"} for prompt in ("<bos>a", "a", "de")]
    assert with_labels(rows, tokenizer)[0] == ["[^a]b.", "[^a]b.", "[^de]b."]
    assert pairs_of(rows, tokenizer)[0] == ["^a|b.|c.", "^a|b.|c.", "^de|b.|c."]
    assert encode_prompts(rows, tokenizer, 5, 99, "")[1] == [[BOS, 0], [BOS, 0], [BOS, 3, 4]]


def test_without_a_beginning_token(letters):
    letters.bos_token = None
    rows = [{"prompt": "", "completion": "ab", "reward": 1}, {"prompt": "", "completion": "", "reward": 3}]
    assert with_labels(rows, letters)[0] == ["[a]b."]
    assert with_actions(rows, letters)[0] == [("[a]b.", [0, 1], True)]
    talk = {"dialogue": ["", "a", "b", "c"], "reward": [0, 1]}
    assert with_actions([talk], letters)[0] == [("[ab]c.", [0, 1], True)]
    with refused("--dataset row 1: an output without tokens has a reward$"):
        with_actions([talk | {"reward": [2, 1]}], letters)
    assert with_labels([{"prompt": "", "completion": "ab"}], letters, encoder=True)[0] == ["[.]ab."]


MERGES = [  # prompt, chosen, rejected; the pair; the prompt with chosen alone
    ("ea", "bc", "cc", "e|abc.|acc.", "[e]abc."),
    ("ea", "bc", "bf", "e|abc.|abf.", "[e]abc."),  # both merge, the boundary stays before it
    ("ea", "fb", "cb", "ea|fb.|cb.", "[ea]fb."),
    ("a", "bc", "f", "^|abc.|af.", "[^]abc."),  # an empty prompt is left
]


def test_a_merge_across_the_boundary_belongs_to_the_responses():
    tokens = ["a", "b", "c", "d", "e", "f", "ab", "cd", "abcd", "<bos>", "<eos>"]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    merging = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    for prompt, chosen, rejected, pair, text in MERGES:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "completion": chosen}
        assert pairs_of([row], merging)[0] == [pair]
        assert with_labels([row], merging)[0] == [text]
        [(ids, _)], _ = sft.encode_rows([row], merging, 99, True, "")
        assert [i for i in ids if i < 9] == merging(prompt + chosen)["input_ids"]
    row = {"dialogue": ["ea", "bc", "c", "d"], "reward": [1, 2]}  # the second prompt begins an output
    assert with_labels([row], merging)[0] == ["[e]abccd."]
    assert with_actions([row], merging)[0] == [("[e]abccd.", [0, 1, 0, 2], True)]


def test_a_beginning_token_that_also_ends(letters):
    """As in OPT, where it begins every text."""
    letters.eos_token = "<bos>"
    tokenizer = add_specials(letters, "<bos> $A")
    rows = [{"prompt": prompt, "completion": "c", "chosen": "c", "rejected": "d"} for prompt in ("", "ab")]
    assert with_labels(rows, tokenizer)[0] == ["[^]c^", "[^ab]c^"]
    assert pairs_of(rows, tokenizer)[0] == ["^|c^|d^", "^ab|c^|d^"]


def rows_of(columns, *values, **more):
    return [dict(zip(columns.split(), texts, strict=True)) | more for texts in values]


COUNTS = [  # encode, max_length, rows, their texts, the report
    (
        with_labels, 5, rows_of("dialogue", [FOUR], [["abcde", "f", "g", "h"]], [["ab", "cd"]]),
        ["[ab]cd[e]", "[ab]cd."],
        "3 rows, 2 cut at the end, 1 dropped with no label left (--max-length 5); "
        "labels on 50.0% of 10 tokens, per row 2 to 3, median 3",
    ),
    (
        with_actions, 5,
        rows_of("prompt completion", ("abcdefg", "h"), ("a", "bcdefghi"), ("a", "b"), ("abcd", "ef"), reward=1),
        [("[a]bcde", [0, 0, 0, 0], False), ("[a]b.", [0, 1], True), ("[abcd]e", [0], False)],
        "4 rows, 3 cut, 1 dropped with no action left (--max-length 5), 1 ended; actions per row: 1 to 4, median 2",
    ),
    (
        pairs_of, 5,
        rows_of("prompt chosen rejected", ("ab", "cd", "cd"), ("ab", "cdef", "cdeg"), ("abcde", "g", "h"),
                ("ab", "d", "cdefg")),
        ["ab|d.|cde"],
        "4 pairs; prompts: 0 cut; responses: 3 cut (--max-length 5); 1 dropped without room for a response, 2 as equal",
    ),
    (  # a cut text would have no end to read a score from; the end token is a part of the length
        scored, 5,
        rows_of("prompt chosen rejected margin", ("ab", "cde", "f", 0), ("ab", "c", "def", 1), ("ab", "cd", "e", 0.5),
                ("ab", "g", "g<eos>", 3), ("ab", "cdef", "cdef", 4), ("", "", "hi", -2)),
        [("abcd.", "abe.", 0.5), (".", "hi.", -2.0)],
        "6 pairs, 3 dropped as longer than 5, 1 as equal; 1 without a prompt",
    ),
]  # fmt: skip


def test_what_is_cut_and_dropped_is_counted(letters):
    for encode, max_length, rows, texts, report in COUNTS:
        assert encode(rows, letters, max_length) == (texts, report)


def test_a_long_episode_ends_in_a_state_whose_value_is_learnt(letters):
    """One that precedes an action; within the later prompt no value is learnt."""
    row = {"dialogue": FOUR, "reward": [1, 2]}
    for max_length, text, rewards in ((6, "[ab]cd[e]f", [0, 1, 0]), (5, "[ab]cd[e]", [0, 1]), (4, "[ab]c", [0])):
        assert with_actions([row], letters, max_length)[0] == [(text, rewards, False)]


ENCODED = [  # what the tokenizer adds, prompt, output, max_length, text, how many rows are cut, whether it is whole
    ("$A", "ab", "cd", 99, "[ab]cd.", 0, True),
    ("$A <eos>", "ab", "cd<eos>", 99, "[ab.]cd.", 0, True),
    ("<bos> $A <eos>", "", "", 99, "[^.]^.", 0, True),
    ("<bos> $A <eos>", "abcd", "efg", 6, "[^abcd.]^efg.", 0, True),
    ("<bos> $A <eos>", "abcd", "efg", 5, "[^abc.]^efg.", 1, True),
    ("<bos> $A <eos>", "abcd", "efg", 4, "[^ab.]^efg", 1, False),
]


def test_rows_of_an_encoder_decoder(letters):
    """The prompt is as the tokenizer ends it; prompt and output have room of their own."""
    for specials, prompt, output, max_length, text, cut, is_whole in ENCODED:
        tokenizer = add_specials(letters, specials)
        row = {"prompt": prompt, "completion": output, "reward": 3}
        found, report = with_labels([row], tokenizer, max_length, encoder=True)
        assert found == [text] and f"1 rows, {cut} cut at the end, 0 dropped" in report
        [(actions, rewards, done)], report = with_actions([row], tokenizer, max_length, encoder=True)
        assert (actions, done, sum(rewards)) == (text, is_whole, 3 if is_whole else 0)
        assert f"1 rows, {cut} cut, 0 dropped" in report
        _, (query,) = encode_prompts([{"prompt": prompt}], tokenizer, 5, 32, "", encoder=True)
        assert cut or text.startswith(f"[{text_of(tokenizer, query)}]")


ROOM = [  # prompt of row 2, new tokens, options, what becomes of it
    ("abc", 30, {}, "row 2: a prompt of 3 tokens"),
    ("abc", 30, {"max_length": 2}, "dropped"),  # it needs no room
    ("abc", 32, {"encoder": True}, "kept"),
    ("abc", 33, {"encoder": True}, "row 1: a prompt of 1 tokens"),
    ("a" * 33, 5, {"encoder": True}, "row 2: a prompt of 33 tokens"),
]


@pytest.mark.parametrize(("prompt", "new_tokens", "options", "result"), ROOM, ids=str)
def test_the_room_for_new_tokens(letters, prompt, new_tokens, options, result):
    """Of 32 positions, which the response shares with the prompt, or in an encoder-decoder has for itself."""
    rows = [{"prompt": "b"}, {"prompt": prompt}]
    if result.startswith("row"):
        how = "[(]in ppo.py and grpo.py, --max-prompt-length" if new_tokens < 32 else "[(]give fewer[)]"
        with refused(f"--dataset {result} and --max-new-tokens {new_tokens} exceed the model's 32 positions {how}"):
            encode_prompts(rows, letters, new_tokens, 32, "--dataset", **options)
        return
    found, queries = encode_prompts(rows, letters, new_tokens, 32, "--dataset", **options)
    assert found == (rows if result == "kept" else rows[:1])
    assert list(map(len, queries)) == [len(row["prompt"]) for row in found]


def test_unknown_characters_are_counted(letters, capsys):
    """Over all rows of a flag, in each script; a tokenizer whose unknown token is its end has no unknown characters."""
    prompts = [{"prompt": text} for text in ("ab", "axb", "x", "")]
    answers = [row | {"completion": "a"} for row in prompts]
    pairs = [row | {"chosen": f"{place}", "rejected": "b"} for place, row in zip("xaaa", prompts, strict=True)]
    for read, rows, count in (
        (lambda rows: encode_prompts(rows, letters, 5, 32, "--dataset"), prompts, 2),
        (lambda rows: [*sft.encode_segments(rows, letters, "--dataset")], answers, 2),
        (lambda rows: [*sft.encode_segments(rows, letters, "--dataset", encoder=True)], answers, 2),
        (lambda rows: pairs_of(rows, letters), pairs, 3),
        (lambda rows: reward.encode_texts(rows, letters, 99, "--dataset"), pairs, 3),
    ):
        read(rows)
        said = f"warning: --dataset: {count} of 4 texts have characters that the tokenizer does not know: they become"
        assert capsys.readouterr().out.count(said) == 1
        read(rows[3:])
        assert "know" not in capsys.readouterr().out
    letters.unk_token = letters.eos_token
    encode_prompts(prompts, letters, 5, 32, "--dataset")
    assert "know" not in capsys.readouterr().out


@pytest.mark.case(39, "dpo")
def test_prompts_without_a_token(letters):
    letters.bos_token = None
    sentence = "--dataset row 2: the prompt is empty and the tokenizer has no beginning token$"
    rows = [{"prompt": prompt, "chosen": "c", "rejected": "d"} for prompt in ("b", "")]
    with refused(sentence):
        encode_prompts(rows, letters, 5, 32, "--dataset")
    assert pairs_of(rows[:1], letters)[0] == ["b|c.|d."]
    with refused(sentence):
        pairs_of(rows, letters)


CHAT_PAIR = {"prompt": [AB], "chosen": [CD], "rejected": [F]}
PAIRS = [  # row, prompt|chosen|rejected
    ({"prompt": "ab", "chosen": "cd", "rejected": "efg"}, "ab|cd.|efg."),
    ({"prompt": "a<eos>b", "chosen": "c", "rejected": "d"}, "a.b|c.|d."),
    ({"prompt": "", "chosen": "ab", "rejected": "ac"}, "^|ab.|ac."),  # what the sides share is no prompt
    ({"prompt": "<bos>ab", "chosen": "c", "rejected": "d"}, "^ab|c.|d."),
    (CHAT_PAIR, "^uab.s|cd.|f."),
    ({"prompt": "ab", "chosen": [AB, CD], "rejected": [AB, F], "score_chosen": 5}, "^uab.s|cd.|f."),  # UltraFeedback
    ({"chosen": TURNS, "rejected": [AB, CD, E, CD]}, "^uab.scd.ue.s|f.|cd."),
    ({"prompt": [AB], "chosen": [CD, E, F], "rejected": [CD, E, CD]}, "^uab.s|cd.ue.sf.|cd.ue.scd."),
    ({"prompt": [AB], "chosen": [CD], "rejected": [answer("cdd")]}, "^uab.s|cd.|cdd."),  # the boundary is the turn's
    ({"chosen": TURNS, "rejected": [AB, CD, user("k"), F]}, "^uab.s|cd.ue.sf.|cd.uk.sf."),  # they part at a question
]


@pytest.mark.parametrize("specials", BOTH)
@pytest.mark.parametrize(("row", "text"), PAIRS, ids=lambda x: x if isinstance(x, str) else "")
def test_pairs(chatty, specials, row, text):
    """The sides of reward.py are those of dpo.py, but that an empty prompt stays empty."""
    tokenizer = add_specials(chatty, specials)
    text = begun(text, specials)
    assert pairs_of([row], tokenizer)[0] == [text]
    prompt, chosen, rejected = text.split("|")
    if row.get("prompt") == "" and "bos" not in specials:
        prompt = ""
    if row["chosen"][:1] == [AB]:  # evaluations sample from the prompt that is trained
        data = SimpleNamespace(rows=[row], eval_sets={}, prompts=[row])
        dpo.encode(data, LM, tokenizer, dpo.Args(model="m", dataset=[row], max_new_tokens=5, eval_every=1))
        assert [text_of(tokenizer, ids) for ids in data.queries] == [prompt]
    assert scored([row], tokenizer)[0] == [(prompt + chosen, prompt + rejected, 0.0)]


HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
SHARED = [  # prompt, chosen, rejected: rows hold the prompt with chosen, the prompt with rejected
    ("ab cd", " ef", " gh"),
    ("ab", " cdef", " cdgh"),  # whole words
    ("", "ab", "ac"),
    (f"{HUMAN} Hi{ASSISTANT}", " Yes, of course", " Yes, maybe"),  # "Yes," is half an answer
    (f"{HUMAN} a{ASSISTANT}", f" b{HUMAN} c{ASSISTANT} d", f" b{HUMAN} e"),  # they part in the user's second turn
    (f"{HUMAN} a{ASSISTANT}", "", " b"),
    ("### Instruction:\nAdd.\n\n### Response:", "\nIt is 3", "\nIt is 4"),
    ("Ask the Assistant: now", " or", " then"),  # no turn: words
]


def test_the_prompt_of_two_texts_ends_where_both_answer(letters):
    for prompt, chosen, rejected in SHARED:
        sides = {"chosen": prompt + chosen, "rejected": prompt + rejected}
        assert pair_texts([sides], letters, "--dataset") == [(prompt, chosen, rejected)]
        assert pair_texts([sides | {"prompt": ""}], letters, "--dataset") == [("", *sides.values())]


@pytest.mark.case(48, "dpo reward")
def test_pairs_that_begin_differently(chatty):
    texts = [{"chosen": "a b", "rejected": "a c"}, {"chosen": "ab", "rejected": "ac"}]
    chats = [{"chosen": [AB, CD], "rejected": [AB, F]}, {"chosen": [E, CD], "rejected": [AB, CD]}]
    chats = [row | {"prompt": None} for row in chats]
    for rows, sides in ((texts, ("ab.", "ac.")), (chats, ("^ue.scd.", "^uab.scd."))):
        pairs, report = scored(rows, chatty)
        assert pairs[1] == (*sides, 0.0)
        assert report == "2 pairs, 0 dropped as longer than 99, 0 as equal; 1 without a prompt"
        with refused("--dataset row 2: chosen and rejected begin differently: add a prompt column$"):
            pairs_of(rows, chatty)


TRUNCATIONS = [  # specials, max_length, max_prompt_length, mode; abcde with fgh and ij; prompts and pairs cut
    ("$A", 99, 3, "keep_start", "abc|fgh.|ij.", 1, 0),
    ("<bos> $A", 99, 3, "keep_end", "^de|fgh.|ij.", 1, 0),  # a beginning token stays
    ("<bos> $A <eos>", 8, 4, "keep_end", "^cde|fgh.|ij.", 1, 0),
    ("$A", 6, None, "keep_start", "abcde|f|i", 0, 1),
    ("$A", 7, 3, "keep_end", "cde|fgh.|ij.", 1, 0),  # a prompt that was cut leaves room
    ("<bos> $A", 5, 2, "keep_end", "^e|fgh|ij.", 1, 1),
]


@pytest.mark.case(37, "dpo")
def test_pairs_are_cut(letters):
    row = {"prompt": "abcde", "chosen": "fgh", "rejected": "ij"}
    for specials, *limits, text, prompts, responses in TRUNCATIONS:
        found, report = pairs_of([row], add_specials(letters, specials), *limits)
        assert found == [text]
        assert report.startswith(f"1 pairs; prompts: {prompts} cut; responses: {responses} cut (--max-length ")


TURN_ENDS = {  # what the template writes behind a turn, its tokens; a classifier reads the last one
    "<pad>\n": [PAD, UNK],  # it ends turns, and is not the end token
    "<pad>\n{% if loop.last and m.role == 'assistant' %}<eos>{% endif %}": [PAD, UNK, EOS],
}


@pytest.mark.parametrize("ending", TURN_ENDS)
def test_a_turn_that_is_scored_has_one_end(letters, ending):
    """The same in training and for samples, which ppo decodes without special tokens."""
    letters.chat_template = TEMPLATE.replace("{{ eos_token }}", ending)
    end = TURN_ENDS[ending]
    asked = [BOS, 20, 0, 1, end[0], UNK, 18, 2, 3]
    sample = f"<bos>uab{ending[:5]}\nscd"
    tokenizer = add_specials(letters, "<bos> $A <eos>")
    _, ((chosen, _, _),), _ = reward.encode_texts([CHAT_PAIR], tokenizer, 99, "")
    assert list(chosen) == asked + end
    whole = tokenizer.apply_chat_template([AB, CD], tokenize=False)
    assert tokenizer(whole, add_special_tokens=False)["input_ids"] == asked + end  # as plain transformers reads it
    for text in (sample, whole, whole.rstrip()):
        assert classifier_ids(tokenizer, [text], [True], True) == [asked + end]
    assert classifier_ids(tokenizer, [sample], [False], True) == [asked]
    assert classifier_ids(tokenizer, ["ab"], [True], False) == [[BOS, 0, 1, EOS]]
    tokenizer.truncation_side = "left"
    (cut,) = classifier_ids(tokenizer, [sample], [True], True, max_length=8)
    assert len(cut) <= 8 and cut[-1 - len(end) :] == [3, *end]


def test_a_template_without_special_tokens(letters):
    """reward adds both, dpo none: what the template does not end, no response ends."""
    letters.chat_template = TEMPLATE.replace("{{ bos_token }}", "").replace("{{ eos_token }}", "")
    tokenizer = add_specials(letters, "<bos> $A")
    assert scored([CHAT_PAIR], tokenizer)[0] == [("^uabscd.", "^uabsf.", 0.0)]
    assert pairs_of([CHAT_PAIR], tokenizer)[0] == ["uabs|cd|f"]


ENCODER = functools.partial(with_labels, encoder=True)
TOO_SHORT = [  # encode, rows of which at most 3 tokens are kept, the sentence
    (with_labels, [{"prompt": "abc", "completion": "d"}], "no row has a label left within --max-length 3$"),
    (with_actions, [{"prompt": "abc", "completion": "d", "reward": 1}], "no row has an action left within --max-l"),
    (scored, [{"prompt": "ab", "chosen": "c", "rejected": "d"}], "no pair is left: of 1, 1 dropped as longer than"),
    (pairs_of, [{"prompt": "abc", "chosen": "c", "rejected": "d"}], "no pair is left: 1 pairs; .* 1 dropped without"),
    (ENCODER, [{"dialogue": ["a", "b"]}], "has the columns dialogue; expected prompt"),
    (ENCODER, [{"prompt": [AB], "completion": [CD]}], "row 1: 'prompt' must be valid text, not "),
]


def test_rows_that_are_too_short(chatty):
    for encode, rows, sentence in TOO_SHORT:
        with refused(f"--dataset:? {sentence}"):
            encode(rows, chatty, 3)


# Like Qwen 2.5: a system message of its own, tools in it, calls of tools, and their results in turns of the user.
TOOLS = r"""
{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'Be good.') }}
{%- if tools %}{{- '\n# Tools' }}{%- for tool in tools %}{{- '\n' + tool.name }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{% if 'content' in m %}{{ m.content }}{% endif %}
        {%- if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ 'call ' + c.function.name }}{% endfor %}{% endif %}
        {{- '<|im_end|>\n' }}{% endgeneration %}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>user\nresult ' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Like SmolLM2: a system message of its own, unless the first message is one; no tools.
SMOL = r"""
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nBe small.<|im_end|>\n' }}{%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# Like DeepSeek R1: it opens an answer with <think>, and leaves the thoughts out where it has the answer.
R1 = SMOL.replace("m.content + ", "m.content.split('</think>')[-1] + ").replace(r"assistant\n'", r"assistant\n<think>'")
# Qwen 3 drops the thoughts of earlier turns, so a longer chat does not begin with a shorter one.
QWEN3 = TOOLS.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
MARGINAL = TOOLS.replace(r"{{- '<|im_end|>\n' }}{% endgeneration %}", r"{%- endgeneration %}{{- '<|im_end|>\n' }}")
TURN_END = "<|im_end|>\n"  # what is written behind an answer
HEADER, BOS_TEXT = "<|im_start|>assistant\n", "<|begin_of_text|>"
MARKERS = ["<|im_start|>", "<|im_end|>"]


def unmarked(template):
    return re.sub(r"{%[-+]? (end)?generation [-+]?%}", "", template)


def build_tokenizer(template, bos=False, merges=()):
    """One token per character and marker; bos: the tokenizer puts the beginning token before a text; merges: pairs of
    characters that are a token, too."""
    tokens = [*map(chr, range(32, 127)), "\n", BOS_TEXT, "<pad>", "<unk>", *MARKERS, *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [*merges], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(MARKERS)
    single = f"{BOS_TEXT} $A" if bos else "$A"
    special_tokens = [(BOS_TEXT, tokens.index(BOS_TEXT))]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    names = {"bos_token": BOS_TEXT, "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def tokenizers(template):
    """With {% generation %} and without, each with and without a beginning token before texts."""
    return [build_tokenizer(kind, bos) for kind, bos in product((template, unmarked(template)), (False, True))]


# The user quotes a turn of the assistant, which is none, and the assistant says the same twice.
SAID = "<think>so</think>Yes"
CHAT = [user(f"Hi {HEADER}no<|im_end|>\n"), answer(SAID), user("And?"), answer(SAID)]
ADD = [{"name": "add"}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
CALLING = turn("assistant", "") | {"tool_calls": CALL}
ROWS = [  # row, how many of the last answers are trained
    ({"messages": [turn("system", "Be bad."), *CHAT]}, 2),
    ({"prompt": CHAT[:3], "completion": CHAT[3:]}, 1),
    ({"messages": CHAT, "tools": ADD}, 2),
]


def trained_parts(row, tokenizer):
    """Tokens of a row, whether each has a label, and the texts of those that have one."""
    ((ids, labels),), _ = sft.encode_rows([row], tokenizer, 999, True, "--dataset")
    mask = [label != -100 for label in labels]
    groups = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return ids, mask, [tokenizer.decode([i for i, _ in pairs]) for is_trained, pairs in groups if is_trained]


def pair_ids(row, tokenizer):
    """(chosen, rejected, length of the prompt) of dpo.py."""
    (pair,), _ = dpo.encode_pairs([row], tokenizer, 999, SimpleNamespace(max_prompt_length=None), "--dataset")
    return pair.chosen, pair.rejected, pair.prompt_length


def golden(tokenizer, chat, tools=None, **options):
    return tokenizer.apply_chat_template(chat, tools=tools, tokenize=True, return_dict=False, **options)


def test_the_answers_and_their_ends_are_trained():
    """In ilql as actions, without the line break behind the end of a turn, which is never sampled."""
    for tokenizer, (row, count) in product(tokenizers(TOOLS), ROWS):
        ids, mask, trained = trained_parts(row, tokenizer)
        assert trained == [SAID + TURN_END] * count
        assert list(ids) == golden(tokenizer, row.get("messages", CHAT), row.get("tools"))
        assert ids.count(tokenizer.bos_token_id) == 0
        assert ("# Tools\nadd" in tokenizer.decode(ids)) == ("tools" in row)
        (episode,), _ = ilql.encode_episodes([row | {"reward": [-1, 3][:count]}], tokenizer, 999, "--dataset")
        assert list(episode.ids) == list(ids) and episode.done
        trained_ids = [place for place, is_trained in enumerate(mask) if is_trained]
        assert list(episode.actions) == [place for place in trained_ids if tokenizer.decode(ids[place]) != "\n"]
        others = [0] * (sum(mask) // count - 2)
        assert episode.rewards == [*others, -1, *others, 3][: sum(mask) - count]
    row, _ = ROWS[2]
    several = build_tokenizer({"default": QWEN3, "tool_use": TOOLS})
    assert trained_parts(row, several) == trained_parts(row, build_tokenizer(TOOLS))


def test_a_template_that_drops_earlier_thoughts():
    """With spans it is trained as it is written; without, an answer a row. Spans may leave out the ends of turns."""
    assert trained_parts({"messages": CHAT}, build_tokenizer(MARGINAL))[2] == [SAID, SAID]
    spans = build_tokenizer(QWEN3)
    plain = build_tokenizer(unmarked(QWEN3))
    assert trained_parts({"messages": CHAT}, spans)[2] == ["Yes" + TURN_END, SAID + TURN_END]
    rows = [{"messages": chat, "reward": 1} for chat in (CHAT[:2], CHAT)]
    change = r"'<think>so</think>Yes.* becomes 'Yes.* when the chat goes on"
    why = rf"--dataset row 2: the chat template changes what it has written: {change}: give .*{{% generation %}}"
    for encode in (with_labels, with_actions):
        with refused(why):
            encode(rows, plain, 999)
    for place in (1, 3):
        row = {"prompt": CHAT[:place], "completion": CHAT[place : place + 1], "reward": 1}
        assert trained_parts(row, spans) == trained_parts(row, plain)
        assert trained_parts(row, plain)[2] == [SAID + TURN_END]
        assert with_actions([row], spans, 999) == with_actions([row], plain, 999)


def test_a_chat_that_begins_with_the_assistant():
    """The system message and the header that the template writes before it are not trained."""
    for template, system in ((SMOL, "Be small."), (unmarked(TOOLS), "Be good.")):
        tokenizer = build_tokenizer(template)
        row = {"messages": [answer("Hello."), user("Hi."), answer("So?")], "reward": [1, 2]}
        ids, mask, trained = trained_parts(row, tokenizer)
        assert trained == ["Hello." + TURN_END, "So?" + TURN_END]
        untrained = tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if not is_trained])
        assert untrained == f"<|im_start|>system\n{system}{TURN_END}{HEADER}<|im_start|>user\nHi.{TURN_END}{HEADER}"
        (episode,), _ = ilql.encode_episodes([row], tokenizer, 999, "--dataset")
        assert tokenizer.decode([episode.ids[place] for place in episode.actions]) == "Hello.<|im_end|>So?<|im_end|>"


def test_a_template_that_trims():
    """As that of Llama 3. The blanks behind the header stay with it; those before an answer that goes on are its own,
    in training and sampling alike."""
    tokenizer = build_tokenizer(SMOL.replace("+ m.content +", "+ '\n' + m.content | trim +"))
    assert trained_parts({"messages": [answer("Hello.")]}, tokenizer)[2] == ["Hello." + TURN_END]
    row = {"prompt": BEGUN, "completion": [answer("5.")]}
    assert trained_parts(row, tokenizer)[2] == [" 5." + TURN_END]
    _, (query,) = encode_prompts([{"prompt": BEGUN}], tokenizer, 5, 999, "--dataset")
    assert tokenizer.decode(query).endswith(HEADER + "\nIt is")


def test_an_answer_goes_on_only_in_a_text():
    """Behind a call another answer begins, and what two chats share ends with the first answer of several."""
    tokenizer = build_tokenizer(unmarked(TOOLS))
    row = {"prompt": [user("a"), CALLING], "completion": [answer("b")]}
    assert trained_parts(row, tokenizer)[2] == ["b" + TURN_END]
    _, (query,) = encode_prompts([{"prompt": row["prompt"]}], tokenizer, 5, 999, "--dataset")
    assert tokenizer.decode(query).endswith(f"call add{TURN_END}{HEADER}")
    pair = {"chosen": [user("a"), answer("b"), answer("c")], "rejected": [user("a"), answer("b"), answer("d")]}
    chosen, _, n = pair_ids(pair, tokenizer)
    assert tokenizer.decode(chosen[n:]) == f"b{TURN_END}{HEADER}c{TURN_END}"


BEGUN = [user("Sum?"), answer("It is ")]


@pytest.mark.parametrize("template", [SMOL, TOOLS, unmarked(TOOLS)], ids=["smol", "spans", "plain"])
def test_a_prompt_that_ends_with_an_assistant_message_goes_on_in_it(template):
    """In sampling and in training alike: no second header, and what the prompt has of the answer is not trained."""
    tokenizer = build_tokenizer(template)
    whole = tokenizer.decode(golden(tokenizer, [BEGUN[0], answer("It is 5.")]))
    prompt = tokenizer(whole.partition("5.")[0]).input_ids
    (asked,), (query,) = encode_prompts([{"prompt": BEGUN}], tokenizer, 5, 999, "--dataset")
    assert query == prompt and asked["prompt"].endswith(HEADER + "It is ")
    row = {"prompt": BEGUN, "completion": [answer("5."), user("Yes."), answer("Oh.")], "reward": [0, 1]}
    ids, mask, trained = trained_parts(row, tokenizer)
    assert list(ids[: len(prompt)]) == prompt and mask.index(True) == len(prompt)
    assert trained == ["5." + TURN_END, "Oh." + TURN_END]
    pair = {"prompt": BEGUN, "chosen": [answer("5.")], "rejected": [answer("6.")]}
    chosen, rejected, n = pair_ids(pair, tokenizer)
    assert list(chosen[:n]) == prompt and tokenizer.decode(chosen[n:]) == "5." + TURN_END
    assert tokenizer.decode(rejected[n:]) == "6." + TURN_END
    assert BEGUN[1] == answer("It is ")  # rows stay what they were


def test_a_template_that_opens_an_answer_with_what_it_leaves_out_of_it():
    tokenizer = build_tokenizer(R1)
    row = {"prompt": CHAT[:1], "chosen": [answer("Yes")], "rejected": [answer("No")]}
    row |= {"completion": [answer("Yes")], "reward": 1}
    for encode in (with_labels, with_actions, pairs_of, scored):
        with refused(r"--dataset row 1: .* '<think>' becomes 'Yes<\|im_end\|>.n' when the chat goes on: give texts"):
            encode([row], tokenizer)


LENIENT = SMOL.replace("m.content", "(m.content or '')")
LEFT_OUT = [  # template, messages, tools; what it leaves out
    (SMOL, [user("a"), CALLING, turn("tool", "5"), answer("b")], ADD, ["tool_calls of assistant", "tools"]),
    (TOOLS, [user("a"), CALLING, turn("tool", "5"), answer("b")], ADD, []),
    (SMOL, [user("a"), answer("b") | {"reasoning_content": "c"}], None, ["reasoning_content of assistant"]),
    (SMOL, [user("a") | {"name": "", "n": None}, answer("b")], None, []),
    (LENIENT, [user("a"), CALLING | {"content": None}, user("c"), answer("b")], None, ["tool_calls of assistant"]),
    (TOOLS, [user("a"), turn("developer", "x"), turn("developer", "y"), answer("b")], [], ["content of developer"]),
]


@pytest.mark.parametrize(("template", "messages", "tools", "parts"), LEFT_OUT)
def test_what_a_template_leaves_out_is_said_in_one_line(template, messages, tools, parts, capsys):
    tokenizer = build_tokenizer(template)
    row = {"messages": messages, "tools": tools}
    sides = {"chosen": messages, "rejected": [*messages[:-1], answer("no")], "tools": tools}
    before = [part for part in parts if "reasoning" not in part]  # of a prompt without the last answer
    plain = {"messages": [user("c"), answer("d")], "tools": None}
    sft.encode_rows([plain, row, row], tokenizer, 999, True, "--dataset")
    pair_texts([sides], tokenizer, "--eval-dataset x")
    encode_prompts([{"prompt": messages[:-1], "tools": tools}], tokenizer, 5, 999, "--eval-prompts")
    told = []
    for flag, named in (("--dataset", parts), ("--eval-dataset x", parts), ("--eval-prompts", before)):
        if named:
            told.append(f"warning: {flag}: the chat template leaves out: {', '.join(named)}")
    assert capsys.readouterr().out.splitlines() == told


def test_options_of_the_template_in_a_row():
    """A column that TRL has, too; it comes before --template-options, which load_pretrained gives the tokenizer."""
    tokenizer = build_tokenizer("{{ mood }}" + SMOL)
    moods = [{"chat_template_kwargs": {"mood": mood}} for mood in ("glad", "sad")] + [{"chat_template_kwargs": None}]
    rows = [{"messages": [user("a"), answer("b")], "prompt": [user("a")]} | mood for mood in moods]
    plain = tokenizer.decode(golden(tokenizer, rows[0]["messages"]))
    encoded, _ = sft.encode_rows([{**row, "prompt": None} for row in rows], tokenizer, 999, True, "--dataset")
    assert [tokenizer.decode(ids) for ids, _ in encoded] == [mood + plain for mood in ("glad", "sad", "")]
    _, queries = encode_prompts(rows, tokenizer, 5, 999, "--dataset")
    assert [tokenizer.decode(ids)[:4] for ids in queries] == ["glad", "sad<", "<|im_start|>"[:4]]


def test_arguments_of_tool_calls_become_mappings():
    """OpenAI's API gives them as a JSON text, and most templates expect a mapping."""
    calls = "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}")
    for arguments, text in (('{"city":"Bergen"}', '{"city": "Bergen"}'), ({"a": 1}, '{"a": 1}'), ("no", '"no"')):
        function = {"name": "f", "arguments": arguments}
        message = answer("b") | {"tool_calls": [{"type": "function", "function": function}]}
        assert chat_text(tokenizer, [user("a"), message], {}, "row") == "ab" + text
        assert function["arguments"] == arguments  # the row is as it was


HEADED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PROMPTED = HEADED + "{% if add_generation_prompt %}<assistant>{% endif %}"
HEADERS = [(HEADED, True), (PROMPTED, False), ("{{ messages[0].content }}", False)]


@pytest.mark.parametrize(("template", "is_told"), HEADERS)
def test_a_header_that_is_no_generation_prompt_is_told(letters, capsys, template, is_told):
    letters.chat_template = template
    tell_header(letters, "--dataset")
    said = "warning: --dataset: the template has no generation prompt: '<assistant>' before an answer is trained with"
    assert (said in capsys.readouterr().out) == is_told


def test_plain_prompts_beside_a_chat_template_are_told(letters, capsys):
    letters.chat_template = PROMPTED
    encode_prompts([{"prompt": "ab"}], letters, 5, 99, "--dataset")
    assert "--dataset: the prompts are plain texts; lists of messages would use" in capsys.readouterr().out


@SAMPLING
def test_a_turn_that_ends_no_response_is_told(capsys, script):
    """As in base models: the template writes <|im_end|>, and their end is another token."""
    tokenizer = build_tokenizer(SMOL)
    for end, is_told in ((tokenizer.convert_tokens_to_ids("<|im_end|>"), False), (1, True)):
        tokenizer.ends = [end]
        lm = SimpleNamespace(config=GPT2Config(n_positions=999), modules=list)
        encoded(script, [{"prompt": [user("a")]}], lm, tokenizer)
        said = "warning: '<|im_end|>' ends a turn of the template but no response, unless --stop has it\n"
        assert (said in capsys.readouterr().out) == is_told


NO = answer("<think>so</think>No")
WHOLE = {"chosen": CHAT, "rejected": [*CHAT[:3], NO]}
PAIR = {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": [NO]}


@pytest.mark.parametrize("template", [TOOLS, QWEN3], ids=["tools", "qwen3"])
def test_pairs_and_queries_are_the_chats_of_the_template(template):
    """The end of a turn belongs to the response. reward: with the beginning token of the tokenizer, as ppo has it."""
    for tokenizer, row in product(tokenizers(template), [PAIR, WHOLE, PAIR | {"tools": ADD}]):
        tools = row.get("tools")
        whole = [golden(tokenizer, chat, tools) for chat in WHOLE.values()]
        prompt = golden(tokenizer, CHAT[:3], tools, add_generation_prompt=True)
        assert pair_ids(row, tokenizer) == (*map(int32, whole), len(prompt)) and whole[0][: len(prompt)] == prompt
        _, (sides,), _ = reward.encode_texts([row], tokenizer, 999, "--dataset")
        assert sides == (*(int32(tokenizer("")["input_ids"] + ids) for ids in whole), 0)
        (asked,), (query,) = encode_prompts([{"prompt": CHAT[:3], "tools": tools}], tokenizer, 5, 999, "--dataset")
        assert query == prompt and asked["prompt"] == tokenizer.decode(prompt)


LINES = [{"text": "ab"}, {"text": "cd"}]


@pytest.mark.case(54, "sft ppo grpo reward dpo ilql ddpo")
@pytest.mark.case(56, "sft ppo grpo reward dpo ilql ddpo")
def test_files_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = jsonl(LINES)
    texts = {"rows.jsonl": lines, "lines.json": lines, "bom.jsonl": "\ufeff" + lines}
    texts |= {"rows.json": json.dumps(LINES), "list.jsonl": json.dumps(LINES, indent=1)}
    texts |= {"rows.csv": "text\nab\ncd\n", "rows.txt": "ab\ncd\n"}
    texts["crlf.jsonl"] = lines.replace("\n", "\r\n \r\n").strip()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = datasets.Dataset.from_list(LINES)
    table.to_parquet("rows.parquet")
    table.save_to_disk("saved")
    for name in [*texts, "rows.jsonl.gz", "rows.parquet", "saved"]:
        assert load_rows(name, "--dataset") == LINES, name
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk("splits")
    with refused("--dataset splits cannot be loaded: .*Please first select a split"):
        load_rows("splits", "--dataset")


ODD = {"prompt": "x;y", "answer": "1989-11-09", "code": "007", "none": "NA", "big": 2**70, "info": {"a": None}}
TABLES = [  # name, bytes, rows
    (
        "semicolons.csv", b'prompt;day;code;reward;margin;truncated\r\n"x;y";1989-11-09;007;"[1, 2.5]";;True',
        [{"prompt": "x;y", "day": "1989-11-09", "code": "007", "reward": [1, 2.5], "margin": None, "truncated": True}],
    ),
    (
        "blanks.csv", b"\r\n\nreward,truncated\n.5,\n1e-3,FALSE\nnan,TRUE\n",
        [{"reward": 0.5, "truncated": None}, {"reward": 1e-3, "truncated": False},
         {"reward": "nan", "truncated": True}],
    ),
    ("tabs.csv", b'\xef\xbb\xbfprompt\tn\r\n"a\r\nb"\tNA\r\n', [{"prompt": "a\r\nb", "n": "NA"}]),
    ("column.csv", b'text\n"a, b; c"\n"d\ne"\n"f ""g"""\n', [{"text": text} for text in ("a, b; c", "d\ne", 'f "g"')]),
]  # fmt: skip


def test_values_stay_as_they_stand_in_the_file(tmp_path, monkeypatch):
    """No text becomes a date or a number, no number another one; in a table all cells but a few are texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps([ODD]))
    assert load_rows("rows.json", "--dataset") == load_rows(write("rows.jsonl", [ODD]), "--dataset") == [ODD]
    for name, text, rows in TABLES:
        (tmp_path / name).write_bytes(text)
        assert load_rows(name, "--dataset") == rows
    (tmp_path / "rows.txt").write_text("a\x0bb\r\n\n  \n\u2028c\n\n")
    assert load_rows("rows.txt", "--dataset") == [{"text": "a\x0bb"}, {"text": "\u2028c"}]


def test_keys_that_other_rows_have_are_no_nulls(tmp_path, monkeypatch):
    """Arrow gives all structs of a column the same keys."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for arguments in ({"a": 1}, {"city": "Bergen"}):
        call = [{"function": {"name": "f", "arguments": arguments}}]
        messages = [user("x"), {"role": "assistant", "content": None, "tool_calls": call}]
        rows.append({"messages": messages, "tools": [{"p": call}], "chat_template_kwargs": arguments})
    table = datasets.Dataset.from_list([row | {"info": row["chat_template_kwargs"]} for row in rows])
    table.to_parquet("rows.parquet")
    table.save_to_disk("saved")
    converted = (lambda: [dict(row) for row in table]), lambda: map(dict, table)
    for name in ("rows.parquet", "saved", table, lambda: table, table.to_iterable_dataset(), *converted):
        found = load_rows(name, "--dataset")
        infos = [row.pop("info") for row in found]  # a column of the user's
        assert found == rows and infos[0] == {"a": 1, "city": None}
    plain = [{"prompt": "a", "tools": [{"default": None}]}]  # a null that somebody wrote stays
    assert load_rows(write("rows.jsonl", plain), "--dataset") == load_rows(plain, "--dataset") == plain


def test_names_of_the_hub(monkeypatch):
    """A revision may have slashes, as the path of a file on this machine."""
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, revision: [{"text": (name, split, revision)}])
    asked = ("org/name", "test", "refs/convert/parquet")
    assert read_rows("org/name@refs/convert/parquet:test") == [{"text": asked}]


UNREADABLE = [  # name, bytes, what is said
    ("excel.csv", "prompt,answer\nå,b\n".encode("cp1252"), "'utf-8' codec can't decode byte 0xe5 in position 14: .*"),
    ("lines.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', "line 3 is not valid JSON: Expecting value, column 12"),
    ("twice.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}\n', "line 2: one of the keys text stands twice"),
    ("list.json", b'[{"a": {"b": 1, "b": 2}}]', "one of the keys b stands twice"),
    ("empty.csv", b"", "No columns to parse from file"),
    ("wider.csv", b"prompt,answer\na,b,c\nd,e,f\n", "its first line has fewer names than the rows have cells"),
    ("rows.tsv", b"prompt\n", "expected a name that ends with .jsonl, .json, .csv, .txt, .parquet"),
]


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, contents, why in UNREADABLE:
        (tmp_path / name).write_bytes(contents)
        with refused(f"--dataset {name} cannot be loaded: {why}$"):
            load_rows(name, "--dataset")
    with refused("--dataset none.jsonl cannot be loaded: there is no such file or directory on this machine$"):
        load_rows("none.jsonl", "--dataset")


EASY = [{"text": "easy"}]
HARD = [{"text": "hard"}]
TWO = [{"text": "b"}] * 2
TASK = f"""
def rows(n=1, text="a"):
    return [{{"text": text}}] * n
def sets():
    return {{"a": {EASY}}}
"""
SETS = [
    (None, {}),
    ({"x": "hard.jsonl", "y": EASY, "z": "task.py:rows"}, {"x": HARD, "y": EASY, "z": [{"text": "a"}]}),
    ("hard.jsonl, easy.jsonl", {"hard": HARD, "easy": EASY}),
    ("task.py:rows:n=2,text=b", {"": TWO}),
    ("task.py:rows:n=2,text=b, hard.jsonl", {"rows": TWO, "hard": HARD}),
    ("task.py:sets", {"a": EASY}),
]


def test_evaluation_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("easy.jsonl", EASY)
    write("hard.jsonl", HARD)
    (tmp_path / "task.py").write_text(TASK)
    for spec, expected in SETS:
        found = load_sets(spec)
        assert found == expected and list(found) == list(expected), spec
    with refused("--eval-dataset .*: two sets have the same name"):
        load_sets("easy.jsonl,./easy.jsonl")
    with refused(r"--eval-dataset x row 2 and row 1 differ in their columns: text, x \(null: an empty cell\)$"):
        load_sets({"y": EASY, "x": [*EASY, {"x": 1}]})


def test_a_share_of_the_rows_is_held_out(capsys):
    """Other rows by their place, the same ones for every seed; all keep their order."""
    rows = [{"text": letter} for letter in "abcdefghijklmnopqrstu"]
    data = read_data(rows, "0.15")
    held_out = data.eval_sets[""]
    assert [row["text"] for row in held_out] == ["f", "k", "l"]
    assert data.rows == [row for row in rows if row not in held_out]
    assert read_data(rows, 0.15).eval_sets[""] == held_out
    assert "--eval-dataset 0.15: 3 of the 21 rows of --dataset are held out\n" in capsys.readouterr().out
    for share, count in (("0.01", 0), ("0.99", 21)):
        with refused(f"--eval-dataset {share}: that is {count} of the 21 rows of --dataset"):
            read_data(rows, share)


def test_options_of_functions_are_as_typed(tmp_path):
    (tmp_path / "task.py").write_text("def given(**options):\n    return options\n")
    options = "lang=en, id='012',n=12,lr=1.0e-3,x=.5,is_on=true,none=null,url=a?b=1"
    found = load_function(f"{tmp_path}/task.py:given:{options}", "--reward")()
    assert [*found.values()] == ["en", "012", 12, 0.001, 0.5, True, None, "a?b=1"]
    assert [*found] == "lang id n lr x is_on none url".split()
    with refused("--reward .*task.py:given:n=1,x: expected key=value, not x"):
        load_function(f"{tmp_path}/task.py:given:n=1,x", "--reward")


def test_functions_from_python_and_of_files_of_one_name(tmp_path):
    """Modules of one name do not take each other's place: a pool of processes finds a function by its module."""
    assert load_function(len, "--reward") is len and load_function(None, "--metric") is None
    functions = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(f"def name():\n    return {folder!r}\n")
        functions.append(load_function(f"{tmp_path}/{folder}/task.py:name", "--reward"))
    assert [pickle.loads(pickle.dumps(function))() for function in functions] == ["one", "two"]


def test_prompts_of_lines():
    rows = ddpo.with_prompts([{"text": "a", "n": 1}, {"text": " ", "n": 2}], "--dataset")
    assert rows == [{"text": "a", "prompt": "a", "n": 1}]
    with refused("--dataset has only blank lines$"):
        ddpo.with_prompts([{"text": " "}], "--dataset")


LONG = {"prompt": "ab", "completion": "c" * 40, "chosen": "c" * 40, "rejected": "d", "reward": 1}
READ = {sft: "examples", ilql: "episodes", dpo: "pairs"}


@pytest.mark.parametrize("script", READ, ids=lambda x: x.__name__)
def test_training_rows_sets_and_prompts_of_a_script(letters, script):
    """The positions of the model are a limit. Errors name the flag and the set."""
    more = {"logit_mask": None} if script is ilql else {}

    def encode(max_new_tokens=30, wrong=None, **flags):
        sets = {"": [LONG], "x": [LONG, LONG | (wrong or {})]}
        data = SimpleNamespace(rows=[LONG], eval_sets=sets, prompts=[{"prompt": "ab"}], metric=len, **more)
        flags = {"max_length": 99, "max_new_tokens": max_new_tokens, "eval_every": 1} | flags
        script.encode(data, LM, letters, script.Args(model="m", dataset=[LONG], **flags))
        return data

    data = encode()
    (found,) = getattr(data, READ[script])
    ids = found[0] if script is sft else getattr(found, {ilql: "ids", dpo: "chosen"}[script])
    assert list(ids) == [0, 1] + [2] * 30
    assert data.eval_sets == {"": [found], "x": [found, found]}
    report = data.eval_report if script is ilql else data.report
    assert re.search("\n--eval-dataset: 1 .*\n--eval-dataset x: 2 .* 2 cut", report.replace("responses: 2", "2"))
    assert data.queries == [[0, 1]]
    with refused("--eval-prompts row 1: a prompt of 2 tokens and --max-new-tokens 31 exceed"):
        encode(max_new_tokens=31)
    with refused("--eval-dataset x row 2: '.*' must be valid text, not 5$"):
        encode(wrong={"chosen": 5, "completion": 5})
    if script is dpo:  # nothing is scored that no evaluation reads
        data = encode(eval_every=0)
        assert data.eval_sets == {} and data.prompts == []


@SAMPLING
def test_prompts_and_sets_of_ppo_and_grpo(letters, capsys, script):
    """Without an evaluation set, the first prompts are evaluated."""
    rows = [{"prompt": text} for text in ("ab", "abcd", "c", "def")]
    longest = {"max_new_tokens": 29, "max_prompt_length": 3}

    def told(data, args):
        """What is printed of them."""
        run = SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=1), steps_per_iteration=1)
        policy = [LM] if script is ppo else []
        return script.summary(run, data, *policy)["data"]

    data, args = encoded(script, rows, LM, letters, **longest)
    assert data.rows == [rows[0], rows[2], rows[3]] and data.queries == [[0, 1], [2], [3, 4, 5]]
    assert data.eval_sets == {"": (data.rows[:2], data.queries[:2])}
    said = "3 prompts; tokens: median 2, longest 3"
    assert told(data, args) == f"{said}; without --eval-dataset, evaluations take the first 2; first: 'ab'"
    sets = {"eval_sets": {"x": rows[1:]}, "eval_dataset": "x"}
    data, args = encoded(script, rows[:1], LM, letters, **sets, **longest)
    assert told(data, args) == "1 prompts; tokens: median 2, longest 2; first: 'ab'"
    assert data.eval_sets == {"x": (rows[2:], [[2], [3, 4, 5]])}
    dropped = "{}: 1 of {} prompts are dropped: --max-prompt-length 3\n"
    assert capsys.readouterr().out == dropped.format("--dataset", 4) + dropped.format("--eval-dataset x", 3)
    with refused("--eval-dataset x row 1: a prompt of 4 tokens and --max-new-tokens 29 exceed"):
        encoded(script, rows[:1], LM, letters, **sets, max_new_tokens=29)


@pytest.mark.parametrize("broken", ["\ud83d", "\ufdd0", "\ufdd1"])
def test_no_text(broken):
    with refused("--dataset row 2 holds .*valid text"):
        load_rows([{"messages": []}, {"messages": [user(f"a{broken}")]}], "--dataset")


@pytest.mark.parametrize("path", ["http://localhost:9/x.png", "/etc/hostname"])
def test_media_stay_as_stored(tmp_path, path):
    schema = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()}).arrow_schema
    named = [{"prompt": "a", "image": {"bytes": None, "path": path}}]
    pq.write_table(pyarrow.Table.from_pylist(named, schema=schema), tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet"), "--dataset") == named
    stored = [{"prompt": "a", "image": {"bytes": b"no image", "path": path}}]
    datasets.Dataset(pyarrow.Table.from_pylist(stored, schema=schema)).save_to_disk(tmp_path / "saved")
    assert load_rows(str(tmp_path / "saved"), "--dataset")[0]["image"]["bytes"] == b"no image"
