"""Rows, segments and tokens of common/data.py: `python -m pytest tests/test_data.py`

Hand results for what the tests of the scripts do not see: the segments of each form of a row, which rows are chats, and
what happens to the ends of tokenized texts.
"""

import functools
import json
import re

import pytest
import torch
from tokenizers import processors

from algos import ddpo
from common import data
from common.cli import InputError
from common.functions import build, load_function, refuse_mistyped
from common.sampling import text_arguments

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
    columns = "^--dataset has the columns chosen; expected chosen and rejected .and prompt., each a text or a chat, "
    with pytest.raises(InputError, match=columns) as told:
        data.pair_texts([{"chosen": "a"}], letters, "--dataset")
    example = json.loads(str(told.value).partition("such as ")[2])
    assert data.pair_texts([example], letters, "--dataset") == [("2 + 2 =", " 4", " 5")]


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
    assert data.pair_texts(rows, letters, "--dataset") == [(prompt, chosen, rejected)]
    given = [{"prompt": "", "chosen": prompt + chosen, "rejected": prompt + rejected}]
    assert data.pair_texts(given, letters, "--dataset") == [("", prompt + chosen, prompt + rejected)]


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


def test_the_forms_that_are_named_are_those_that_are_taken(letters):
    """The example row of an error is one that works."""
    with pytest.raises(
        InputError, match="^--dataset has the columns x; expected text, .*, and reward, such as"
    ) as told:
        data.check_text_columns([{"x": 1}], "--dataset", reward=1.0)
    example = json.loads(str(told.value).partition("such as ")[2])
    assert example == {"prompt": "2 + 2 =", "completion": " 4", "reward": 1.0}
    data.check_text_columns([example], "--dataset", reward=1.0)
    for columns in (["text"], ["messages"], ["dialogue", "prompt"], ["prompt", "completion", "text"]):
        data.check_text_columns([dict.fromkeys(columns)], "--dataset")
    with pytest.raises(InputError, match='^--dataset has the columns x, y; expected prompt, .*, such as {"prompt": "'):
        data.encode_prompts([{"x": 1, "y": 2}], letters, 5, 32, "--dataset")
    with pytest.raises(InputError, match='^--dataset has the columns x; expected prompt, a text, such as {"prompt": "'):
        data.with_prompts([{"x": 1}], "--dataset")


def test_columns_that_arguments_of_functions_would_hide(letters):
    arguments = text_arguments(letters, [{"prompt": "a"}], ["b"], [[1]])
    assert tuple(arguments) == data.TEXT_ARGUMENTS
    for name in arguments:
        with pytest.raises(InputError, match=f"^--dataset: rename the column '{name}', which functions get from"):
            data.encode_prompts([{"prompt": "a", name: "b"}], letters, 5, 32, "--dataset")
    assert tuple(ddpo.image_arguments([{"prompt": "a"}], torch.zeros(1, 3, 2, 2))) == data.IMAGE_ARGUMENTS
    for name in data.IMAGE_ARGUMENTS:
        with pytest.raises(InputError, match=f"^--dataset: rename the column '{name}', which functions get from"):
            data.with_prompts([{"prompt": "a", name: "b"}], "--dataset")


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "options", "sentence"),
    [
        (["a", "abc"], 32, {}, "give at most 29 .the longest prompt takes 3.$"),
        (["a", "abc"], 40, {"max_length": 2}, "give at most 31 .the longest prompt takes 1.$"),
        (["a", "a" * 40], 32, {}, "which a prompt of 40 tokens fills alone$"),
        (["a", "abc"], 33, {"encoder": True}, "give at most 32$"),
    ],
)
def test_how_many_new_tokens_there_is_room_for(letters, prompts, new_tokens, options, sentence):
    """The number that is named does."""
    rows = [{"prompt": prompt} for prompt in prompts]
    start = f"^--max-new-tokens {new_tokens} leaves no room in the model's 32 positions"
    with pytest.raises(InputError, match=f"{start}(: |, ){sentence}") as told:
        data.encode_prompts(rows, letters, new_tokens, 32, "--dataset", **options)
    if number := re.search(r"at most (\d+)", str(told.value)):
        room = int(number[1])
        assert data.encode_prompts(rows, letters, room, 32, "--dataset", **options)
        with pytest.raises(InputError):
            data.encode_prompts(rows, letters, room + 1, 32, "--dataset", **options)


def some_rows(n=2):
    return [{"text": "a"}] * n


def test_a_function_from_python_is_called_as_one_of_a_file_is():
    assert data.load_rows(build(some_rows, "--dataset"), "--dataset") == some_rows()
    assert data.load_sets(functools.partial(some_rows, n=3), "--eval-dataset") == {"": some_rows(3)}
    with pytest.raises(InputError, match="^--dataset pop: IndexError: pop from empty list"):
        build([].pop, "--dataset")
    assert load_function(len, "--reward") is len and load_function(None, "--metric") is None


MISTYPED = [  # what is typed where sub/ is, what is said
    ("./none", "there is no such directory or file"),
    ("~/none", "there is no such directory or file"),
    ("a/b/none", "there is no such directory or file"),
]


@pytest.mark.parametrize(("typed", "sentence"), MISTYPED)
def test_what_cannot_be_a_name_of_the_hub_is_not_asked_for(tmp_path, monkeypatch, typed, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for load in (refuse_mistyped, data.load_rows):
        with pytest.raises(InputError, match=f"^--dataset {re.escape(f'{typed}: {sentence}')}$"):
            load(typed, "--dataset")
    for name in ("org/name:train", "name", "https://x.org/a/b.jsonl", "a/b/*.jsonl", "sub", "./sub", "sub:POSITIVE"):
        refuse_mistyped(name, "--dataset")
    with pytest.raises(InputError, match="^--dataset none.csv.gz cannot be loaded: there is no such file$"):
        data.load_rows("none.csv.gz", "--dataset")
    (tmp_path / "sub/x.jsonl").write_text('{"text": "a"}\n')
    assert data.load_rows("sub/*.jsonl", "--dataset") == [{"text": "a"}]


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
