"""Chats in sft, ilql, reward, dpo and ppo: `python -m pytest tests/test_chats.py`

Templates like those of ChatML, Qwen 2.5, Llama 3 and Qwen 3, with `{% generation %}` spans and without, over a
tokenizer of characters and markers: what is trained is compared with texts by hand, with transformers' own masks and
tokens, and between the two kinds of a template. Then whole runs of main, and what is no chat.
"""

import functools
import json
import math
import re
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from test_sft_modes import answer, turn, user
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from algos import dpo, grpo, ilql, ppo, reward, sft
from common.cli import InputError
from common.rows import row_segments
from common.tokens import encode_prompts

CHATML = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

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

# Llama 3 writes the beginning token; like Gemma's, this template refuses turns that do not alternate.
LLAMA = r"""
{{- bos_token }}
{%- for m in messages %}
    {%- if loop.previtem and loop.previtem.role == m.role %}{{- raise_exception('Roles must alternate') }}{%- endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Qwen 3 drops the thoughts of earlier turns, so a longer chat does not begin with a shorter one.
QWEN3 = CHATML.replace("{{ m.content", "{{ (m.content if loop.last else m.content.split('</think>')[-1])")
END = r"'<|im_end|>\n' }}{% endgeneration %}"
MARGINAL = CHATML.replace(f" + {END}", r" }}{% endgeneration %}{{ '<|im_end|>\n' }}")  # spans without the end of a turn
TWICE = CHATML.replace("m.content + " + END, "'T:' }}{% endgeneration %} ok {% generation %}{{ m.content + " + END)
COUNTED = "{{ messages | length }}" + CHATML  # what is in front of the prompt changes when the answer follows
ENDS = {CHATML: "<|im_end|>\n", TOOLS: "<|im_end|>\n", LLAMA: "<|eot_id|>"}  # what is written behind an answer
NAMES = {CHATML: "chatml", TOOLS: "tools", LLAMA: "llama", QWEN3: "qwen3", MARGINAL: "marginal", TWICE: "twice"}


def unmarked(template):
    return re.sub(r"{% (end)?generation %}", "", template)


def on(*templates):
    return pytest.mark.parametrize("template", templates, ids=NAMES.get)


KINDS, BOS, HEADER = {"spans": str, "plain": unmarked}, "<|begin_of_text|>", "<|im_start|>assistant\n"
MARKERS = "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|>".split()
both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
adding = pytest.mark.parametrize("bos", [False, True], ids=["no bos", "bos"])


def build_tokenizer(template, bos=False):
    """One token per character and marker; bos: the tokenizer puts the beginning token before a text."""
    tokens = [*map(chr, range(32, 127)), "\n", BOS, "<pad>", "<unk>", *MARKERS]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    backend.add_special_tokens(MARKERS)
    options = {"single": f"{BOS} $A" if bos else "$A", "special_tokens": [(BOS, tokens.index(BOS))]}
    backend.post_processor = processors.TemplateProcessing(**options)
    names = {"bos_token": BOS, "eos_token": "<|eot_id|>" if "eot_id" in (template or "") else "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", **names)
    tokenizer.chat_template = template
    return tokenizer


# The user quotes a turn of the assistant, which is none, and the assistant says the same twice.
SAID = "<think>so</think>Yes"
CHAT = [user(f"Hi {HEADER}no<|im_end|>\n"), answer(SAID), user("And?"), answer(SAID)]
ROWS = {  # row, how many of the last answers are trained
    "messages": ({"messages": CHAT}, 2),
    "system": ({"messages": [turn("system", "Be bad."), *CHAT]}, 2),
    "last turn": ({"prompt": CHAT[:3], "completion": CHAT[3:]}, 1),
    "two turns": ({"prompt": CHAT[:1], "completion": CHAT[1:]}, 2),
    "second question": ({"prompt": CHAT[:2], "completion": CHAT[2:]}, 1),
    "with tools": ({"messages": CHAT, "tools": [{"name": "add"}]}, 2),
}
every_row = pytest.mark.parametrize(("row", "count"), ROWS.values(), ids=ROWS)


def messages(row):
    return row["messages"] if "messages" in row else row["prompt"] + row["completion"]


def encode(row, tokenizer, only=True, encoder=False):
    """Tokens of a row, whether each has a label, and the texts of those that have one."""
    ((ids, labels),), _ = sft.encode_rows([row], tokenizer, 999, only, "--dataset", encoder)
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
    mask = [label != -100 for label in labels]
    return ids, mask, marked(tokenizer, ids, mask)


def marked(tokenizer, ids, mask):
    groups = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in pairs]) for counts, pairs in groups if counts]


def golden(tokenizer, chat, tools=None, **options):
    """transformers' own tokens."""
    return tokenizer.apply_chat_template(chat, tools=tools, tokenize=True, return_dict=False, **options)


# ---- sft and ilql ----------------------------------------------------------------------------------------------------


@adding
@both_kinds
@every_row
@on(CHATML, TOOLS, LLAMA)
def test_the_answers_and_their_ends_are_trained(template, row, count, kind, bos):
    """With spans and without; in ilql as actions. The template alone writes the beginning token of a chat."""
    tokenizer = build_tokenizer(kind(template), bos)
    ids, mask, trained = encode(row, tokenizer)
    assert trained == [SAID + ENDS[template]] * count
    assert ids == golden(tokenizer, messages(row), row.get("tools"))
    assert ids.count(tokenizer.bos_token_id) == (template is LLAMA)
    assert ("# Tools\nadd" in tokenizer.decode(ids)) == ("tools" in row and template is TOOLS)
    assert encode(row, tokenizer, only=False)[:2] == (ids, [False] + [True] * (len(ids) - 1))
    for given, received in ((2, [0, 2][-count:]), ([-1, 3][:count], [-1, 3][:count])):
        (episode,), _ = ilql.encode_episodes([row | {"reward": given}], tokenizer, 999, "--dataset")
        assert episode.ids == ids and episode.actions == [i for i, acts in enumerate(mask) if acts] and episode.done
        assert episode.rewards == [r for last in received for r in [0] * (sum(mask) // count - 1) + [last]]
    with pytest.raises(InputError, match=f"--dataset row 1: 'reward' must be a finite number, or a list of {count}"):
        ilql.encode_episodes([row | {"reward": [1, 2, 3]}], tokenizer, 999, "--dataset")


@every_row
@on(CHATML, TOOLS, LLAMA, QWEN3, MARGINAL, TWICE, COUNTED)
def test_the_mask_is_that_of_transformers(template, row, count):
    """Whatever the spans hold, less those of the prompt."""
    tokenizer, tools = build_tokenizer(template), row.get("tools")
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "tools": tools}
    expected = tokenizer.apply_chat_template(messages(row), **options)
    begin = len(golden(tokenizer, row["prompt"], tools)) if "prompt" in row else 0
    mask = [bool(inside) and place >= begin for place, inside in enumerate(expected["assistant_masks"])]
    ids, found, trained = encode(row, tokenizer)
    assert ids == expected["input_ids"] and found == mask and len(trained) == count * (1 + (template is TWICE))


@pytest.mark.parametrize("encoded", [sft.encode_rows, ilql.encode_episodes])
def test_a_template_that_drops_earlier_thoughts(encoded):
    """With spans it is trained as it is written; without, an answer a row."""
    end, spans, plain = "<|im_end|>\n", build_tokenizer(QWEN3), build_tokenizer(unmarked(QWEN3))
    assert encode({"messages": CHAT}, spans)[2] == ["Yes" + end, SAID + end]
    rows = [{"messages": chat, "reward": 1} for chat in (CHAT[:2], CHAT)]
    options = (999, True, "--dataset") if encoded is sft.encode_rows else (999, "--dataset")
    why = "the chat template changes earlier turns of a longer chat"
    with pytest.raises(InputError, match=f"^--dataset row 2: {why}: .*{{% generation %}}.* prompt and completion"):
        encoded(rows, plain, *options)
    for cut in (1, 3):
        row = {"prompt": CHAT[:cut], "completion": CHAT[cut : cut + 1], "reward": 1}
        assert [encode(row, tokenizer)[2] for tokenizer in (spans, plain)] == [[SAID + end]] * 2
        assert len({str(encoded([row], tokenizer, *options)) for tokenizer in (spans, plain)}) == 1


@both_kinds
def test_calls_of_tools(kind):
    """The calls are trained and the results are not; fields that a table fills with None count as absent."""
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [user("2+2?"), {"tool_calls": [call]} | answer(None), turn("tool", "4"), answer("Four")]
    chat = [{"tool_calls": None, "reasoning_content": None} | message for message in chat]
    row, tokenizer = {"messages": chat, "tools": [{"name": "add"}]}, build_tokenizer(kind(TOOLS))
    ids, _, trained = encode(row, tokenizer)
    assert trained == ["call add<|im_end|>\n", "Four<|im_end|>\n"]
    begun = "<|im_start|>system\nBe good.\n# Tools\nadd<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    assert tokenizer.decode(ids).startswith(begun + HEADER)
    assert encode({"prompt": chat[:3], "completion": chat[3:]}, tokenizer)[2] == trained[1:]


def test_an_encoder_reads_the_prompt():
    tokenizer = build_tokenizer(unmarked(LLAMA))
    ids, _, trained = encode(ROWS["last turn"][0], tokenizer, encoder=True)
    assert ids == golden(tokenizer, CHAT) and trained == [SAID + "<|eot_id|>"]


@adding
def test_texts_that_a_template_wrote_get_no_second_beginning(bos):
    tokenizer = build_tokenizer(LLAMA, bos)
    text, prompt = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in (CHAT, CHAT[:3]))
    for row in ({"text": text}, {"prompt": prompt, "completion": text[len(prompt) :]}):
        assert encode(row, tokenizer)[0] == golden(tokenizer, CHAT)
    for row in ({"text": "Hi"}, {"prompt": "Hi", "completion": "Yes"}, {"dialogue": ["Hi", "Yes", "And?", "No"]}):
        assert encode(row, tokenizer)[0].count(tokenizer.bos_token_id) == bos


@both_kinds
@on(CHATML, MARGINAL, LLAMA)
def test_a_truncated_answer_has_no_end(template, kind):
    """The last end token goes, wherever the spans are; with it what the template writes behind."""
    tokenizer = build_tokenizer(kind(template))
    row = {"messages": CHAT, "reward": [1, 2], "truncated": True}
    (episode,), _ = ilql.encode_episodes([row], tokenizer, 999, "--dataset")
    *_, last = marked(tokenizer, episode.ids, [i in episode.actions for i in range(len(episode.ids))])
    assert last == SAID and episode.actions[-1] == len(episode.ids) - 1 and not episode.done
    assert [r for r in episode.rewards if r] == [1, 2] and episode.rewards[-1] == 2
    assert episode.ids == golden(tokenizer, CHAT)[: len(episode.ids)]


# ---- reward, dpo and prompts -----------------------------------------------------------------------------------------

NO, ADD = answer("<think>so</think>No"), [{"name": "add"}]
WHOLE = {"chosen": CHAT, "rejected": [*CHAT[:3], NO]}
PAIR = {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": [NO]}
PAIRS = {"messages": PAIR, "implicit": WHOLE, "text": WHOLE | {"prompt": "And?"}, "tools": PAIR | {"tools": ADD}}


@adding
@both_kinds
@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
@on(CHATML, TOOLS, LLAMA, QWEN3)
def test_pairs_are_the_chats_of_the_template(template, row, kind, bos):
    """dpo: the prompt is what a model answers, and the end of the turn belongs to the response. reward: through the end
    token, and with the beginning token that the tokenizer adds, as ppo has its samples scored."""
    tokenizer, tools = build_tokenizer(kind(template), bos), row.get("tools")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    whole, limits = [golden(tokenizer, chat, tools) for chat in WHOLE.values()], SimpleNamespace(max_prompt_length=None)
    prompt = golden(tokenizer, CHAT[:3], tools, add_generation_prompt=True)
    (pair,), _ = dpo.encode_pairs([row], tokenizer, 999, limits, "--dataset")
    assert pair == (*whole, len(prompt)) and all(ids[: len(prompt)] == prompt for ids in whole)
    assert all(ids[len(prompt) :].count(end) == 1 and ids.count(begin) == (template is LLAMA) for ids in whole)
    _, (scored,), _ = reward.encode_texts([row], tokenizer, 999, "--dataset")
    added = [begin] * (bos and template is not LLAMA)
    assert scored == (*(added + ids[: len(ids) - ids[::-1].index(end)] for ids in whole), 0)


@adding
@both_kinds
@on(CHATML, TOOLS, LLAMA, QWEN3)
def test_queries_end_where_the_assistant_answers(template, kind, bos):
    tokenizer, rows = build_tokenizer(kind(template), bos), [{"prompt": CHAT[:3], "tools": x} for x in (None, ADD)]
    kept, queries = encode_prompts(rows, tokenizer, 5, 999, "--dataset")
    assert queries == [golden(tokenizer, CHAT[:3], x, add_generation_prompt=True) for x in (None, ADD)]
    assert [row["prompt"] for row in kept] == tokenizer.batch_decode(queries)
    assert all(ids.count(tokenizer.bos_token_id) == (template is LLAMA) for ids in queries)


# ---- Runs ------------------------------------------------------------------------------------------------------------

SCRIPTS = {"sft": sft, "ilql": ilql, "reward": reward, "dpo": dpo, "ppo": ppo, "grpo": grpo}
GOOD, LONG, ASKED = [user("Hi"), answer("Yes")], ROWS["system"][0], [{"prompt": CHAT[:3]}]
RUNS = {  # two rows, and what is evaluated
    "sft": ([LONG, {"messages": GOOD}], {"eval_dataset": [ROWS["last turn"][0]]}),
    "ilql": ([LONG | {"reward": 1}, {"messages": GOOD, "reward": 0}], {"eval_prompts": ASKED}),
    "reward": ([WHOLE, WHOLE], {"eval_dataset": [PAIR]}),
    "dpo": ([WHOLE, WHOLE], {"eval_dataset": [PAIR]}),
    **dict.fromkeys(("ppo", "grpo"), ([{"prompt": CHAT[:3]}, {"prompt": GOOD[:1]}], {"eval_dataset": ASKED})),
}


def scores(prompts, outputs, samples, **columns):
    """A reward that gets the text of the chat."""
    assert all(text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n") for text in prompts)
    assert all("Hi" in text for text in prompts)
    assert samples == [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return [float(len(output)) for output in outputs]


def run(name, model, run_dir, **flags):
    """Two steps of two rows."""
    options = {"batch_size": 2, "micro_batch_size": 2, "eval_every": 1, "save_every": 0, "threads": 1}
    if name == "ppo":
        options |= {"reward": scores, "total_episodes": 4, "rollout_batch_size": 2, "ppo_epochs": 1}
    elif name == "grpo":
        options |= {"reward": scores, "total_episodes": 4, "rollout_batch_size": 2, "group_size": 2}
    else:
        options |= {"total_steps": 2} | ({} if name == "reward" else {"metric": lambda **x: {"length": scores(**x)}})
    options |= {} if name == "reward" else {"max_new_tokens": 4}
    return SCRIPTS[name].main(SCRIPTS[name].Args(**options | {"model": model, "run_dir": str(run_dir)} | flags))


@pytest.fixture(scope="module")
def model_dir(build_model, tmp_path_factory):
    """model_dir(template): directory of a tiny model with that template."""

    @functools.cache
    def make(template):
        folder, tokenizer = tmp_path_factory.mktemp("model"), build_tokenizer(template, bos=True)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        build_model("gpt2", n_positions=320, vocab_size=len(tokenizer), **ids).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_chats(name, model_dir, tmp_path, capsys):
    rows, flags = RUNS[name]
    metrics, run_dir = run(name, model_dir(LLAMA), tmp_path / "run", dataset=rows, **flags)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf_model")
    assert tokenizer.chat_template == LLAMA and all(map(math.isfinite, metrics.values()))
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    asked = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=False)
    assert {row["prompt"] for row in samples} == {asked} and {row["step"] for row in samples} >= {0, 2}
    card = (run_dir / "README.md").read_text()
    usage = re.search(r"```python\n(.*?)\n```", card, re.S)[1]
    assert ("'role': 'user'" in usage) == (name == "reward")
    exec(usage, {})
    assert capsys.readouterr().out.splitlines()[-1] != ""
    if name == "reward":  # the scores are those of plain transformers
        lm = AutoModelForSequenceClassification.from_pretrained(run_dir / "hf_model").eval()
        for side, chat in WHOLE.items():
            expected = lm(torch.tensor([golden(tokenizer, chat)])).logits.item()
            assert samples[-1][f"{side}_score"] == pytest.approx(expected, abs=1e-4)


@on(CHATML, TOOLS, LLAMA, QWEN3, MARGINAL)
def test_a_template_that_does_not_train_the_end_is_told(model_dir, tmp_path, capsys, template):
    run("sft", model_dir(template), tmp_path / "run", dataset=[LONG], metric=None, check=True)
    assert ("warning: no row trains the end token" in capsys.readouterr().out) == (template is MARGINAL)


@every_row
def test_where_a_template_marks_nothing_whole_answers_are_trained(row, count):
    template = LLAMA.replace("m.role == 'assistant' %}{% gen", "m.role == 'model' %}{% gen")
    found = encode(row, build_tokenizer(template))
    assert found == encode(row, build_tokenizer(unmarked(LLAMA))) and len(found[2]) == count


# ---- What is no chat -------------------------------------------------------------------------------------------------

DEFECTS = {  # messages of row 2, and what the sentence says
    "user": ([*GOOD, user("And?")], "the assistant"),
    "role": ([user("Hi"), turn("robot", "Yes")], "a chat is a list of .*'robot'"),
    "empty": ([], "a chat is a list of .*found None|the last message must be the assistant's"),
    "none": ([user("Hi"), answer(None)], "a chat is a list of .*None"),
    "raises": (
        [user("Hi"), user("Hi"), answer("Yes")],
        "the chat template cannot write the messages: Roles must alternate",
    ),
    "missing": (GOOD, "the chat template cannot write .*chat_template is not set.*"),
    "changes": (GOOD, "the chat template changes earlier turns"),
}
OTHERS = {"missing": None, "changes": unmarked(COUNTED)}  # templates that row 1 shows to be bad
FORMS = {  # a row of a chat
    "messages": lambda chat: {"messages": chat, "reward": 1},
    "pair": lambda chat: {"prompt": chat[:-1] or GOOD[:1], "completion": chat[-1:], "reward": 1},
    "whole": lambda chat: {"chosen": chat, "rejected": chat},
    "sides": lambda chat: {"prompt": chat[:-1] or GOOD[:1], "chosen": chat[-1:], "rejected": chat[-1:]},
    "prompt": lambda chat: {"prompt": chat},
}
READ = {"sft": ["messages", "pair"], "ilql": ["messages", "pair"], "ppo": ["prompt"], "grpo": ["prompt"]}
READ |= {"reward": ["whole", "sides"], "dpo": ["whole", "sides"]}
READERS = [(name, form) for name in READ for form in READ[name] if name != "grpo"]
READERS.append(pytest.param("grpo", "prompt", marks=pytest.mark.slow))  # reads as ppo does


def test_a_prompt_without_an_answer_is_one_sentence():
    """Such rows are for ppo.py and grpo.py."""
    with pytest.raises(InputError, match="--dataset row 1: a chat is a list of .*, found None"):
        row_segments([{"prompt": [user("Hi")]}], build_tokenizer(LLAMA), "--dataset")


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize(("name", "form"), READERS)
@pytest.mark.case(49, "ppo grpo sft reward dpo ilql")
def test_what_is_no_chat_is_one_sentence(name, form, defect, flag, model_dir, tmp_path):
    """It names flag and row, and nothing is written."""
    (chat, sentence), row = DEFECTS[defect], FORMS[form]
    model, options = model_dir(OTHERS.get(defect, LLAMA)), {} if name == "reward" else {"metric": None}
    options |= {"dataset": RUNS[name][0]} | {flag: [row(GOOD), row(chat)]}
    where = "--dataset row 1" if defect in OTHERS else f"--{flag.replace('_', '-')} row 2"
    if name in ("ppo", "grpo") and defect in ("user", "changes"):  # such is a prompt
        options |= {"reward": lambda outputs: [0.0] * len(outputs), "check": True}
        run(name, model, tmp_path / "run", **options)
    else:
        with pytest.raises(InputError) as error:
            run(name, model, tmp_path / "run", **options)
        assert re.fullmatch(f"{where}: [^\n]*({sentence})[^\n]*", str(error.value))
    assert not (tmp_path / "run").exists()
