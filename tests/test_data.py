"""Rows and segments of common/rows.py, tokens and tensors of common/tokens.py: `python -m pytest tests/test_data.py`

Hand results for what the tests of the scripts do not see: the segments of each form of a row, which rows are chats, and
what happens to the ends of tokenized texts.
"""

import functools
import pickle

import pytest
import torch
from tokenizers import processors

from common.cli import InputError
from common.functions import build, load_function
from common.rows import (
    is_chat,
    load_rows,
    load_sets,
    pair_texts,
    prompt_messages,
    row_segments,
    set_flag,
    set_prefix,
    with_prompts,
)
from common.tokens import encode_prompts, pad_rows, tokenize

BOS, EOS = 21, 22

# A turn is u or s, the content and the end token.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ 'u' if m.role == 'user' else 's' }}{{ m.content }}{{ eos_token }}"
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}s{% endif %}"
MARKED = "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '.' }}"
MARKED += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def adding(tokenizer, template):
    """The tokenizer adds special tokens to every text."""
    pairs = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    return tokenizer


CHAT = [user("b"), answer("c"), user("d"), answer("e")]
SEGMENTS = [  # row, its texts: every second one is trained
    ({"text": "ab"}, ["", "ab"]),
    ({"prompt": "ab", "completion": "c"}, ["ab", "c"]),
    ({"dialogue": ["a", "b", "", "c"]}, ["a", "b", "", "c"]),
    ({"messages": CHAT}, ["<bos>ub<eos>s", "c<eos>", "ud<eos>s", "e<eos>"]),
    ({"prompt": CHAT[:2], "completion": CHAT[2:]}, ["<bos>ub<eos>sc<eos>ud<eos>s", "e<eos>"]),
    ({"prompt": [], "completion": CHAT[:2]}, ["<bos>ub<eos>s", "c<eos>"]),
    ({"messages": [answer("b")]}, ["", "<bos>sb<eos>"]),  # it begins with an answer, and what is in front of it
]


@pytest.mark.parametrize(("row", "parts"), SEGMENTS, ids=lambda x: repr(x)[:40])
def test_segments_of_each_form(letters, row, parts):
    letters.chat_template = TEMPLATE
    expected = [(text, i % 2 == 1) for i, text in enumerate(parts)]
    assert row_segments([row, row], letters, "--dataset") == [expected, expected]


def test_segments_that_the_template_marks(letters):
    """The last one is not trained, and may be empty; marks within a prompt do not count."""
    letters.chat_template = MARKED
    (whole,) = row_segments([{"messages": CHAT}], letters, "--dataset")
    assert whole == [("uba", False), ("c.", True), ("uda", False), ("e.", True), ("", False)]
    (last,) = row_segments([{"prompt": CHAT[:3], "completion": CHAT[3:]}], letters, "--dataset")
    assert last == [("ubac.uda", False), ("e.", True), ("", False)]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"other": "a"}],
            "has the columns other; expected text, prompt and completion, messages, or dialogue$",
        ),
        (
            [{"completion": "a", "text": "b"}],
            "has the columns completion, text; expected prompt$",
        ),
        ([{"text": "a"}, {"text": "\ud800"}], "row 2: 'text' must be valid text, it is '.ud800'"),
        ([{"dialogue": ["a", "b"]}, {"dialogue": ["a"]}], "row 2: 'dialogue' must be a list prompt, output"),
        ([{"prompt": CHAT[:1], "completion": "a"}], "row 1: a chat is a list of .* found 'a'"),
        ([{"messages": CHAT[:1]}], "row 1: the last message must be the assistant's"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_what_has_no_segments(letters, rows, sentence):
    letters.chat_template = TEMPLATE
    with pytest.raises(InputError, match=f"^--dataset {sentence}"):
        row_segments(rows, letters, "--dataset")


def test_pairs_of_texts_and_of_chats(letters):
    letters.chat_template = TEMPLATE
    texts = [{"chosen": "ab cd", "rejected": "ab ce"}]
    chats = [{"chosen": CHAT[:2], "rejected": [user("b"), answer("d")]}]
    assert pair_texts(texts, letters, "--dataset") == [("ab", " cd", " ce")]
    assert pair_texts(chats, letters, "--dataset") == [("<bos>ub<eos>s", "c<eos>", "d<eos>")]
    columns = "^--dataset has the columns chosen; expected rejected$"
    with pytest.raises(InputError, match=columns):
        pair_texts([{"chosen": "a"}], letters, "--dataset")


HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
SHARED = [  # prompt, chosen, rejected, and how the texts begin with it
    (f"{HUMAN} Hi{ASSISTANT}", " Yes, of course", " Yes, maybe"),  # "Yes," is half an answer
    (f"{HUMAN} a{ASSISTANT} b{HUMAN} c{ASSISTANT}", " I am", " I can"),
    (f"{HUMAN} a{ASSISTANT}", f" b{HUMAN} c{ASSISTANT} d", f" b{HUMAN} e"),  # they part in the user's second turn
    (f"{HUMAN} a{ASSISTANT}", "", " b"),
    ("### Instruction:\nAdd.\n\n### Response:", "\nIt is 3", "\nIt is 4"),
    ("USER: a\nASSISTANT:", " b c", " b d"),
    ("Ask the Assistant: now", " or", " then"),  # no turn: words
    ("TL;DR:", " a b", " c b"),
    ("", "ab", "ac"),
]


@pytest.mark.parametrize(("prompt", "chosen", "rejected"), SHARED, ids=repr)
def test_the_prompt_of_two_texts_ends_where_both_answer(letters, prompt, chosen, rejected):
    rows = [{"chosen": prompt + chosen, "rejected": prompt + rejected}]
    assert pair_texts(rows, letters, "--dataset") == [(prompt, chosen, rejected)]
    given = [{"prompt": "", "chosen": prompt + chosen, "rejected": prompt + rejected}]
    assert pair_texts(given, letters, "--dataset") == [("", prompt + chosen, prompt + rejected)]


def test_the_prompt_of_two_chats_ends_where_both_answer():
    shared = CHAT[:3]
    assert prompt_messages({"chosen": [*shared, answer("e")], "rejected": [*shared, answer("f")]}) == shared
    assert prompt_messages({"chosen": CHAT, "rejected": CHAT}) == shared
    assert prompt_messages({"chosen": CHAT[:2], "rejected": [user("x"), answer("c")]}) == []
    assert prompt_messages({"chosen": CHAT, "rejected": [*CHAT[:2], user("x"), answer("c")]}) == CHAT[:1]
    assert prompt_messages({"prompt": CHAT[:1], "chosen": "a", "rejected": "b"}) == CHAT[:1]


def test_which_rows_are_chats():
    for column in ("messages", "prompt", "chosen"):
        assert is_chat([{column: CHAT}], ["rejected", column])
    assert not is_chat([{"prompt": "a", "chosen": "b"}], ["prompt", "chosen"])
    assert not is_chat([{"messages": CHAT, "prompt": "a"}], ["prompt"])


ENDS = [  # what the tokenizer adds, text, its ids by each value of `end`
    ("$A", "a", {"once": [0, EOS], "never": [0], "template": [0]}),
    ("$A", "a<eos>", {"once": [0, EOS], "never": [0, EOS], "template": [0, EOS]}),
    ("$A", "", {"once": [EOS], "never": [], "template": []}),
    ("<bos> $A <eos>", "a", {"once": [BOS, 0, EOS], "never": [BOS, 0], "template": [BOS, 0, EOS]}),
    ("<bos> $A <eos>", "a<eos>", {"once": [BOS, 0, EOS], "template": [BOS, 0, EOS, EOS]}),
]


@pytest.mark.parametrize(("template", "text", "ids"), ENDS, ids=repr)
def test_the_end_of_tokens(letters, template, text, ids):
    tokenizer = adding(letters, template)
    for end, expected in ids.items():
        assert tokenize(tokenizer, [text, text], True, end) == [expected, expected]
    if template != "$A":  # without special tokens a tokenizer adds nothing
        assert tokenize(tokenizer, ["a"], False, "template") == [[0]]


def test_an_empty_prompt_needs_a_beginning_token(letters):
    """Also behind a tokenizer that ends every text."""
    tokenizer = adding(letters, "$A <eos>")
    assert encode_prompts([{"prompt": ""}], tokenizer, 5, 32, "--dataset")[1] == [[BOS]]
    tokenizer.bos_token = None
    with pytest.raises(InputError, match="^--dataset row 1: the prompt is empty and the tokenizer has no beginning"):
        encode_prompts([{"prompt": ""}], tokenizer, 5, 32, "--dataset")


def test_other_columns_are_named(letters):
    with pytest.raises(InputError, match="^--dataset has the columns x, y; expected prompt$"):
        encode_prompts([{"x": 1, "y": 2}], letters, 5, 32, "--dataset")
    with pytest.raises(InputError, match="^--dataset has the columns x; expected prompt$"):
        with_prompts([{"x": 1}], "--dataset")


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "options", "fits"),
    [
        ("abc", 29, {}, True),
        ("abc", 30, {}, False),
        ("abc", 30, {"max_length": 2}, None),
        ("abc", 32, {"encoder": True}, True),
        ("abc", 33, {"encoder": True}, False),
    ],
)
def test_how_many_new_tokens_there_is_room_for(letters, prompt, new_tokens, options, fits):
    """A prompt that is dropped needs no room."""
    given = [{"prompt": "a"}] if new_tokens == 30 else []
    given += [{"prompt": prompt}]
    if fits is False:
        sentence = f"a prompt of 3 tokens and --max-new-tokens {new_tokens} exceed the model's 32 positions"
        with pytest.raises(InputError, match=f"^--dataset row {len(given)}: {sentence}: "):
            encode_prompts(given, letters, new_tokens, 32, "--dataset", **options)
    else:
        kept, _ = encode_prompts(given, letters, new_tokens, 32, "--dataset", **options)
        assert kept == (given if fits else given[:1])


def test_rows_are_padded_on_either_side_or_aligned():
    given = [[1], [2, 3, 4], []]
    assert pad_rows(given, 0).tolist() == [[1, 0, 0], [2, 3, 4], [0, 0, 0]]
    assert pad_rows(given, 0, begins=[1, 3, 0]).tolist() == [[0, 0, 1], [2, 3, 4], [0, 0, 0]]
    assert pad_rows(given[:2], 0, begins=[0, 2]).tolist() == [[0, 0, 1], [2, 3, 4]]
    for fill, dtype in ((0, torch.int64), (False, torch.bool), (0.0, torch.float32)):
        assert pad_rows([[], []], fill).dtype == dtype
    assert pad_rows([[0.1]], 0.0, dtype=torch.float64).item() == 0.1


def some_rows(n=2):
    return [{"text": "a"}] * n


def test_a_function_from_python_is_called_as_one_of_a_file_is():
    assert load_rows(build(some_rows, "--dataset"), "--dataset") == some_rows()
    assert load_sets(functools.partial(some_rows, n=3), "--eval-dataset") == {"": some_rows(3)}
    with pytest.raises(IndexError, match="pop from empty list"):
        build([].pop, "--dataset")
    assert load_function(len, "--reward") is len and load_function(None, "--metric") is None


def test_two_files_of_one_name(tmp_path):
    """Their modules do not take each other's place: a pool of processes finds a function by its module."""
    functions = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(f"def name():\n    return {folder!r}\n")
        functions.append(load_function(f"{tmp_path}/{folder}/task.py:name", "--reward"))
    for function, folder in zip(functions, ("one", "two"), strict=True):
        assert pickle.loads(pickle.dumps(function))() == folder


def test_names_of_files_that_the_library_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("./none", "a/b/none"):  # no names on the hub, so it is not asked
        with pytest.raises(InputError, match=f"^--dataset {name} cannot be loaded: "):
            load_rows(name, "--dataset")
    with pytest.raises(InputError, match="^--dataset none.csv.gz cannot be loaded: Unable to find '.*none.csv.gz'$"):
        load_rows("none.csv.gz", "--dataset")
    (tmp_path / "sub/x.jsonl").write_text('{"text": "a"}\n')
    assert load_rows("sub/*.jsonl", "--dataset") == [{"text": "a"}]


def test_names_of_evaluation_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "task.py").write_text("def rows(n=1, text='a'):\n    return [{'text': text}] * n\n")
    easy = [{"text": "easy"}]
    assert load_sets("easy.jsonl", "--eval-dataset") == {"": easy}
    found = load_sets("easy.jsonl, task.py:rows:n=2,text=b", "--eval-dataset")
    assert found == {"easy": easy, "rows": [{"text": "b"}] * 2}
    assert list(load_sets({"x": "hard.jsonl", "y": easy}, "--eval-dataset")) == ["x", "y"]
    assert [set_prefix(name) for name in ("", "x")] == ["eval/", "eval/x/"]
    assert [set_flag(name) for name in ("", "x")] == ["--eval-dataset", "--eval-dataset x"]
    with pytest.raises(InputError, match="two sets have the same name"):
        load_sets("easy.jsonl,./easy.jsonl", "--eval-dataset")
    with pytest.raises(InputError, match="^--eval-dataset none .* holds no rows"):
        load_sets({"none": []}, "--eval-dataset")


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(InputError, match=rf"^--dataset {path} cannot be loaded: line 3 is not valid JSON: "):
        load_rows(str(path), "--dataset")
    path.write_text('{"text": "a"}\n\n{"other": "b"}\n')
    with pytest.raises(
        InputError, match="^--dataset row 2 must be a mapping with the columns of row 1: see other, text$"
    ):
        load_rows(str(path), "--dataset")
