"""Rows, segments and tokens of common/data.py: `python -m pytest tests/test_data.py`

Hand results for what the tests of the scripts do not see: the segments of each form of a row, which rows are chats, and
what happens to the ends of tokenized texts.
"""

import pytest
from tokenizers import processors

from common import data
from common.cli import InputError

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
    assert data.row_segments([row, row], letters, "--dataset") == [expected, expected]


def test_segments_that_the_template_marks(letters):
    """The last one is not trained, and may be empty; marks within a prompt do not count."""
    letters.chat_template = MARKED
    (whole,) = data.row_segments([{"messages": CHAT}], letters, "--dataset")
    assert whole == [("uba", False), ("c.", True), ("uda", False), ("e.", True), ("", False)]
    (last,) = data.row_segments([{"prompt": CHAT[:3], "completion": CHAT[3:]}], letters, "--dataset")
    assert last == [("ubac.uda", False), ("e.", True), ("", False)]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"other": "a"}],
            "has the columns other; expected text, prompt and completion, messages, or dialogue, ",
        ),
        (
            [{"completion": "a", "text": "b"}],
            'has the columns completion, text; .*, such as {"prompt": .*, "completion": .*}$',
        ),
        ([{"text": "a"}, {"text": "\ud800"}], "row 2: 'text' holds half a surrogate pair"),
        ([{"dialogue": ["a", "b"]}, {"dialogue": ["a"]}], "row 2: 'dialogue' must be a list prompt, output"),
        ([{"prompt": CHAT[:1], "completion": "a"}], "row 1: prompt and completion must be two lists of messages"),
        ([{"messages": CHAT[:1]}], "row 1: the last message must be the assistant's, it is by 'user'"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_what_has_no_segments(letters, rows, sentence):
    letters.chat_template = TEMPLATE
    with pytest.raises(InputError, match=f"^--dataset {sentence}"):
        data.row_segments(rows, letters, "--dataset")


def test_pairs_of_texts_and_of_chats(letters):
    letters.chat_template = TEMPLATE
    texts = [{"chosen": "ab cd", "rejected": "ab ce"}]
    chats = [{"chosen": CHAT[:2], "rejected": [user("b"), answer("d")]}]
    assert data.pair_texts(texts, letters, "--dataset") == [("ab", " cd", " ce")]
    assert data.pair_texts(chats, letters, "--dataset") == [("<bos>ub<eos>s", "c<eos>", "d<eos>")]
    with pytest.raises(InputError, match="^--dataset has the columns chosen; expected chosen and rejected"):
        data.pair_texts([{"chosen": "a"}], letters, "--dataset")


def test_the_prompt_of_two_chats_ends_where_both_answer():
    shared = CHAT[:3]
    assert data.prompt_messages({"chosen": [*shared, answer("e")], "rejected": [*shared, answer("f")]}) == shared
    assert data.prompt_messages({"chosen": CHAT, "rejected": CHAT}) == shared
    assert data.prompt_messages({"chosen": CHAT[:2], "rejected": [user("x"), answer("c")]}) == []
    assert data.prompt_messages({"chosen": CHAT, "rejected": [*CHAT[:2], user("x"), answer("c")]}) == CHAT[:1]
    assert data.prompt_messages({"prompt": CHAT[:1], "chosen": "a", "rejected": "b"}) == CHAT[:1]


def test_which_rows_are_chats():
    for column in ("messages", "prompt", "chosen"):
        assert data.is_chat([{column: CHAT}], ["rejected", column])
    assert not data.is_chat([{"prompt": "a", "chosen": "b"}], ["prompt", "chosen"])
    assert not data.is_chat([{"messages": CHAT, "prompt": "a"}], ["prompt"])


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
        assert data.tokenize(tokenizer, [text, text], True, end) == [expected, expected]
    if template != "$A":  # without special tokens a tokenizer adds nothing
        assert data.tokenize(tokenizer, ["a"], False, "template") == [[0]]


def test_an_empty_prompt_needs_a_beginning_token(letters):
    """Also behind a tokenizer that ends every text."""
    tokenizer = adding(letters, "$A <eos>")
    assert data.encode_prompts([{"prompt": ""}], tokenizer, 5, 32, "--dataset")[1] == [[BOS]]
    tokenizer.bos_token = None
    with pytest.raises(InputError, match="^--dataset row 1: the prompt is empty and the tokenizer has no beginning"):
        data.encode_prompts([{"prompt": ""}], tokenizer, 5, 32, "--dataset")


def test_names_of_evaluation_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "task.py").write_text("def rows(n=1, text='a'):\n    return [{'text': text}] * n\n")
    easy = [{"text": "easy"}]
    assert data.load_sets("easy.jsonl", "--eval-dataset") == {"": easy}
    found = data.load_sets("easy.jsonl, task.py:rows:n=2,text=b,", "--eval-dataset")
    assert found == {"easy": easy, "rows": [{"text": "b"}] * 2}
    assert list(data.load_sets({"x": "hard.jsonl", "y": easy}, "--eval-dataset")) == ["x", "y"]
    assert [data.set_prefix(name) for name in ("", "x")] == ["eval/", "eval/x/"]
    assert [data.set_flag(name) for name in ("", "x")] == ["--eval-dataset", "--eval-dataset x"]
    with pytest.raises(InputError, match="two sets have the same name"):
        data.load_sets("easy.jsonl,./easy.jsonl", "--eval-dataset")
    with pytest.raises(InputError, match="^--eval-dataset none .* holds no rows"):
        data.load_sets({"none": []}, "--eval-dataset")


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(InputError, match=rf"^--dataset {path}:3 is not valid JSON: "):
        data.load_rows(str(path), "--dataset")
    path.write_text('{"text": "a"}\n\n{"other": "b"}\n')
    with pytest.raises(InputError, match=r"^--dataset row 2 is \['other'\], expected a mapping"):
        data.load_rows(str(path), "--dataset")
