"""Bad input, case by case and script by script: `python -m pytest tests/test_inputs.py`

First come the functions of common/ that refuse rows, files and what functions of the user return: every sentence is
asked of them. REFUSED and WORKS are of whole scripts, which run in this process through the same `cli` as on the
command line, on tiny random models. Values of flags are in test_flags.py.
"""

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import accelerate
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from harness import ROOT, by_default, once
from harness import files as written
from helpers import EOS, INF, NAN, TEMPLATE, answer, jsonl, log, turn, user
from transformers import AutoTokenizer

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import arithmetic, shapes
from common.cli import cli
from common.errors import InputError, Stopped
from common.functions import call_function, call_metric, call_reward, load_function
from common.lm.chat import pair_texts, row_segments
from common.lm.tokens import encode_prompts
from common.rows import load_rows, read_data

SCRIPTS = {"ppo": ppo, "grpo": grpo, "sft": sft, "reward": reward, "dpo": dpo, "ilql": ilql, "ddpo": ddpo}
EVERY, TEXT, PAIRS = "sft ppo grpo reward dpo ilql ddpo", "sft ppo grpo reward dpo ilql", "reward dpo"
SCORED, MEASURED, REFERRED = "ppo grpo ddpo", "sft ppo grpo dpo ilql ddpo", "ppo grpo dpo"
SAMPLED, ROLLED, READ, PROMPTED = "sft ppo grpo dpo ilql", "ppo grpo", "sft reward dpo ilql", "sft dpo ilql"
LOADERS = f"{TEXT.replace(' ', ',')} ddpo"  # one function loads the models of the others

COMMON = """--model model --dataset rows.jsonl --batch-size 4 --save-every 0 --eval-every 0 --threads 1 --run-dir run
--warmup-steps 0"""
ROLLOUTS = """--reward user.py:reward --metric user.py:metric --total-episodes 8 --rollout-batch-size 4
--max-new-tokens 4"""
STEPS = "--total-steps 2 --eval-dataset rows.jsonl"
SAMPLES = "--eval-prompts prompts.jsonl --metric user.py:metric --max-new-tokens 4"
OWN = {
    "ppo": f"{ROLLOUTS} --ppo-epochs 1",
    "grpo": f"{ROLLOUTS} --group-size 2",
    "sft": f"{STEPS} {SAMPLES}",
    "reward": STEPS,
    "dpo": f"{STEPS} {SAMPLES}",
    "ilql": f"{STEPS} {SAMPLES} --betas 0 1",
    "ddpo": """--reward user.py:reward --metric user.py:metric --num-epochs 1 --rollout-batch-size 4
    --num-inference-steps 2 --guidance-scale 1 --cliprange 1e-3""",
}
BASE = {algo: f"{COMMON} {flags}".split() for algo, flags in OWN.items()}
LETTERS = "bcde"
PAIR = [{"prompt": p, "chosen": p + "fg", "rejected": "h" + p} for p in LETTERS]
PROMPTS = [{"prompt": p} for p in LETTERS]
ROWS = {
    "ppo": PROMPTS,
    "grpo": PROMPTS,
    "sft": [{"prompt": p, "completion": p + "fg"} for p in LETTERS],
    "reward": PAIR,
    "dpo": PAIR,
    "ilql": [{"prompt": p, "completion": p + "fg", "reward": i / 2} for i, p in enumerate(LETTERS)],
    "ddpo": [{"prompt": caption} for caption in shapes.CAPTIONS[:4]],
}
COLUMN = dict.fromkeys(SCORED.split(), "prompt") | dict.fromkeys(PAIRS.split(), "chosen")  # that TEXT stands for
COLUMN |= {"sft": "completion", "ilql": "completion"}
USER_FILE = """
import os, signal, time
from math import nan
import numpy as np

def reward(prompts, **columns):
    return [len(prompt) / 10 + i for i, prompt in enumerate(prompts)]

def metric(prompts, **columns):
    return {"length": reward(prompts, **columns)}

def no_such_column(prompts, answer):
    return [0.0] * len(prompts)

def rows(found="5"):
    return {"5": [{"prompt": "b"}, 5], "nothing": None}[found]
"""


def returning(value):
    """Functions of the user, and one that returns what the text of an expression says; n is the number of samples."""
    head = "def result(prompts, output_ids=None, **columns):\n    n = len(prompts)\n"
    return f"{USER_FILE}\n{head}    return {value}\n"


def rows_with(*changes):
    """Good rows of a script, each with its changes, where TEXT stands for the script's column of text."""

    def rows(algo):
        named = [{key.replace("TEXT", COLUMN[algo]): value for key, value in new.items()} for new in changes]
        return [row | new for row, new in zip(ROWS[algo] * 2, named, strict=False)]

    return rows


def second(row, **changes):
    return [row, row | changes]


WEIGHT = "transformer.h.1.mlp.c_fc.weight"
NORM, CONV = "transformer.ln_f", "conv_in.weight"


def weights(change, part=""):
    """Changes weights of a model, or of a part of a pipeline: change({name: tensor})."""

    def edit(path):
        (file,) = (path / part).glob("*.safetensors")
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, file, {"format": "pt"})

    return edit


def end_likelihood(size):
    """The end token likeliest by far everywhere, or impossible: all states are ones, other embeddings zeros."""

    def change(tensors):
        tensors[f"{NORM}.weight"].zero_()
        tensors[f"{NORM}.bias"].fill_(1.0)
        tensors["transformer.wte.weight"].zero_()[EOS] = size

    return weights(change)


def tokens(part="", added=(), **changes):
    def edit(path):
        tokenizer = AutoTokenizer.from_pretrained(path / part)
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        tokenizer.add_tokens(list(added))
        tokenizer.save_pretrained(path / part)

    return edit


def without(pattern):
    def edit(path):
        for file in path.glob(pattern):
            file.unlink()

    return edit


def foreign_code(path):
    """A pipeline of a kind that only maze.py knows."""
    (path / "maze.py").write_text("from pathlib import Path\nPath('marker').touch()\n")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"_class_name": ["maze", "MazePipeline"]}))


def other(kind):
    def edit(path):
        tokenizer = arithmetic.tokenizer()
        sizes = {"n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 32, "vocab_size": len(tokenizer)}
        config = transformers.GPT2Config(**sizes, num_labels=1, pad_token_id=tokenizer.pad_token_id)
        getattr(transformers, kind)(config).save_pretrained(path)
        without("*token*")(path)
        tokenizer.save_pretrained(path)

    return edit


LMS = {  # variants of the language model
    "nan": weights(lambda tensors: tensors[WEIGHT].fill_(NAN)),
    "lacking": weights(lambda tensors: tensors.pop(WEIGHT)),
    "truncated": lambda path: os.truncate(path / "model.safetensors", 5000),
    "no_tokenizer": without("*token*"),
    "no_pad": tokens(pad_token=None),
    "pad_is_eos": tokens(pad_token="<eos>"),
    "no_eos": tokens(eos_token=None),
    "chats": tokens(chat_template=TEMPLATE),
    "overflows": weights(lambda tensors: tensors[f"{NORM}.weight"].fill_(3e38)),
    "ends_at_once": end_likelihood(50.0),
    "never_ends": end_likelihood(-50.0),
}
PIPELINES = {  # variants of the pipeline of ddpo
    "nan": weights(lambda tensors: tensors[CONV].fill_(NAN), "unet"),
    "lacking": weights(lambda tensors: tensors.pop(CONV), "unet"),
    "truncated": lambda path: os.truncate(path / "unet/diffusion_pytorch_model.safetensors", 5000),
    "one_more_token": tokens("tokenizer", added=["<x>"]),
    "code": foreign_code,
}
OTHERS = {  # models that are named beside it
    "reference": other("GPT2LMHeadModel"),
    "judge": other("GPT2ForSequenceClassification"),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory, tiny_dirs, build_pipeline):
    """models(algo, name) -> directory of a tiny model or pipeline, as it is or one of the variants above; made once."""
    folder = tmp_path_factory.mktemp("variants")
    shutil.copytree(tiny_dirs["gpt2"], folder / "lm/model")
    build_pipeline().save_pretrained(folder / "pipeline/model")

    def find(algo, name="model"):
        kind, variants = ("pipeline", PIPELINES) if algo == "ddpo" else ("lm", LMS | OTHERS)
        path = folder / kind / name
        if not path.exists():
            shutil.copytree(folder / kind / "model", path)
            variants[name](path)
        return path

    return find


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory of its own; what a run changes in the process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    interrupt, terminate = handlers()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


def fill(folder, models, algo, model="model", files=()):
    """Model, rows and functions; files {name: text, rows, or a function of the script that gives these}; and what some
    rows name: models that do not fit, a run."""
    (folder / "model").symlink_to(models(algo, model))
    for name in OTHERS:
        (folder / name).symlink_to(models("ppo", name))
    (folder / "runs/x/hf_model").mkdir(parents=True)
    (folder / "runs/x/config.yaml").write_text("lr: 1\n")
    files = {"user.py": USER_FILE, "rows.jsonl": ROWS[algo], "prompts.jsonl": PROMPTS} | dict(files)
    for name, content in files.items():
        if callable(content):
            content = content(algo)
        if isinstance(content, list):
            content = jsonl(content)
        (folder / name).write_bytes(content.encode())


@pytest.fixture
def command(monkeypatch, capfd, models, here):
    """command(algo, flags, model, files) -> (exit code, stdout, stderr), as if typed in a directory with these.
    Handlers of signals are given back whatever happens: a notebook must still be interruptible."""

    def run(algo, flags="", model="model", files=()):
        if not (here / "user.py").exists():
            fill(here, models, algo, model, files)
        run.before = written(here)
        monkeypatch.setattr(sys, "argv", once([f"algos/{algo}.py", *BASE[algo], *shlex.split(flags)]))
        capfd.readouterr()
        before = handlers()
        code = 0
        try:
            cli(SCRIPTS[algo].Args, SCRIPTS[algo].main)
        except SystemExit as stop:
            code = stop.code
        except FloatingPointError:
            raise
        except Exception:  # of the user's own code
            traceback.print_exc()
            code = 1
        finally:
            assert handlers() == before
        return code, *capfd.readouterr()

    return run


def finished(run="run"):
    assert Path(run, "README.md").exists() and Path(run, "hf_model").is_dir()
    records = log(run)
    assert records and all(None not in record.values() for record in records), records
    return records


def entry(case, algos, says=(), flags="", model="model", rows=None, also=(), user_code=False, values=(), **files):
    """A row of a table. case: see cases.py; algos: of scripts that are joined by commas the first tries it; says: the
    words that must be said, one text or several, where TEXT is the script's column of text; rows: in place of
    rows.jsonl; other_txt=...: content of other.txt; also: other cases that it tries; user_code: the user's own code
    fails; values: {metric: what it is in all records}."""
    says = [says] if isinstance(says, str) else says
    files = {key.replace("_", "."): content for key, content in files.items()}
    if rows is not None:
        files["rows.jsonl"] = rows
    return SimpleNamespace(**locals())


def common(case, algos, *options, **more):
    """A row of which one function of common/ does what it is about in all its scripts: the first of them tries it."""
    return entry(case, algos.replace(" ", ","), *options, **more)


def rows_of(table):
    parameters = []
    for row in table:
        for scripts in row.algos.split():
            algo = scripts.partition(",")[0]
            marks = [pytest.mark.case(case, scripts.replace(",", " ")) for case in (row.case, *row.also)]
            about = row.says[0] if row.says else row.model
            parameters.append(pytest.param(algo, row, marks=marks, id=f"{row.case}-{about[:40]}-{algo}"))
    return parameters


USER = user("b")
ANSWER = answer("c")
TALK = [USER, ANSWER]
ASKED = {"prompt": [USER], "completion": [ANSWER], "reward": 1}
DIALOGUE = {"dialogue": ["b", "c", "d", "e"], "reward": [1, 2]}
FOUND = 'a chat is a list of {"role": one of system, developer, user, assistant, tool; "content": text}, found '
LAST = "the last message must be the assistant's"
NO_DIALOGUE = "'dialogue' must be a list prompt, output, prompt, output, ..."


def refused(sentence):
    return pytest.raises(InputError, match=f"^{re.escape(sentence)}")


NO_SCORES = [  # what a reward returns for four rows, how it is called
    ([1.0] * 5, "a list of 5"),
    (None, "NoneType"),
    ("1111", "str"),
    (dict.fromkeys(range(4), 1.0), "dict"),
]
# of a response of three tokens; the sum of the last is not finite
NO_SCORE = [NAN, -INF, None, "1.0", 10**400, [1.0] * 4, [0.0, 0.0, NAN], [], [1e308, 1e308, 0.0]]
NO_COLUMN = [[1.0] * 3, 1.0, [[1.0]] * 4, ["1"] * 4, [None] * 4, [1.0, 1.0, 1.0, NAN], [INF] * 4]


def scores_of(values, lengths=None):
    scores, others = call_reward(lambda: values, "r.py:f", PROMPTS, {}, lengths)
    assert others == {}
    return scores


def test_what_a_reward_may_return():
    """Any kind of numbers, which become floats, alone or with other columns."""
    tensor = torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True)
    for numbers in ([True, 0, np.float32(1), np.int64(1)], np.array([1, 0, 1, 1]), tensor):
        scores = scores_of(numbers)
        assert scores == [1.0, 0.0, 1.0, 1.0] and {type(score) for score in scores} == {float}
    dense = [np.array([0, 1]), 1, [True], torch.tensor([0.0, 1.0])]
    assert scores_of(dense, [2, 5, 1, 2]) == [[0.0, 1.0], 1.0, [1.0], [0.0, 1.0]]
    scores, others = call_reward(lambda: {"good": [1, 2, 3, 4], "score": (4, 3, 2, 1)}, "r.py:f", PROMPTS, {})
    assert scores == [4.0, 3.0, 2.0, 1.0] and others == {"good": [1.0, 2.0, 3.0, 4.0]}
    for bad, size, sentence in (("step", 4, "'step': [1.0, 1.0, 1.0, 1.0] (taken names"), ("x", 1, "'x': [1.0]")):
        with pytest.raises(InputError, match=re.escape(sentence)):
            call_reward(lambda bad=bad, size=size: {"score": [1.0] * 4, bad: [1.0] * size}, "r.py:f", PROMPTS, {})


@pytest.mark.case(25, SCORED)
@pytest.mark.case(26, SCORED)
@pytest.mark.case(27, SCORED)
@pytest.mark.case(28, SCORED)
def test_scores_that_are_refused():
    for values, returned in NO_SCORES:
        with refused(f"r.py:f returned {returned}, expected a list of 4 numbers, one per sample"):
            scores_of(values)
    for value in [*NO_SCORE, 3.5e38]:  # the last one is finite, but not in float32
        sentence = f"r.py:f returned {value!r:.60} for row 3, whose prompt ends in 'd'; expected a finite number"
        with refused(f"{sentence}, or one for each of the 3 tokens"):
            scores_of([[1.0], 1.0, value, 1.0], [1, 2, 3, 4])
        with refused(sentence):
            scores_of([1.0, 1.0, value, 1.0])
    with refused(f"r.py:f returned None for row 1, whose prompt ends in '{'s' * 53}What is"):  # chats begin alike
        call_reward(lambda **_: [None], "r.py:f", [{"prompt": "s" * 99 + "What is"}], {})


@pytest.mark.case(25, MEASURED)
@pytest.mark.case(26, MEASURED)
@pytest.mark.case(27, MEASURED)
@pytest.mark.case(28, MEASURED)
def test_metrics_that_are_refused():
    def columns_of(values):
        return call_metric(lambda: values, "m.py:f", PROMPTS, {})

    expected = "m.py:f must return {name: list of 4 finite numbers}; "
    for values in NO_COLUMN:
        with refused(f"{expected}it returned 'bad': "):
            columns_of({"good": [1.0] * 4, "bad": values})
    with refused(f"{expected}it returned 'reward': [1.0, 1.0, 1.0, 1.0] (taken names: step, "):
        columns_of({"reward": [1.0] * 4})
    for values in (None, [1.0] * 4):
        with refused(f"{expected}it returned {values}"):
            columns_of(values)
    assert columns_of({"perplexity": [1e39] * 4}) == {"perplexity": [1e39] * 4}  # only scores are used in float32


@pytest.mark.case(29, TEXT)
@pytest.mark.parametrize("error", [KeyError("answer"), KeyboardInterrupt(), Stopped(143)], ids=repr)
def test_what_a_function_raises_keeps_its_class(error):
    """A traceback ends with the function's name. Whoever ends the run may do so while the function runs."""

    def score(outputs):
        raise error

    with pytest.raises(type(error)) as raised:
        call_function(score, "r.py:f", [{"prompt": "b"}], {"outputs": ["c"]})
    notes = ["in a call of r.py:f"] if isinstance(error, Exception) else []
    assert raised.value is error and getattr(error, "__notes__", []) == notes


@pytest.mark.case(31, TEXT)
def test_a_function_gets_copies():
    """And may train something of its own in a rollout, which needs no gradient."""
    rows = [{"prompt": "b", "tags": ["x", ["y"]]}]
    given = {"prompts": ["b"]}

    def rude(prompts, tags):
        prompts.clear()
        tags[0][1].clear()
        tags[0].clear()
        torch.ones(1, requires_grad=True).sum().backward()

    with torch.no_grad():
        call_function(rude, "r.py:f", rows, given)
    assert rows == [{"prompt": "b", "tags": ["x", ["y"]]}] and given == {"prompts": ["b"]}


def test_names_of_functions_that_are_refused(here):
    Path("user.py").write_text(USER_FILE)
    for name in ("nope", "nan"):
        with refused(f"--reward user.py:{name}: user.py has no function '{name}'"):
            load_function(f"user.py:{name}", "--reward")
    expected = "expected path/to/file.py:function"
    for spec, problem in (("user.py", expected), ("user.csv:a", expected), ("no.py:a", "there is no file no.py")):
        with refused(f"--reward {spec}: {problem}"):
            load_function(spec, "--reward")
    theirs = "missing a required argument: 'completions'. completions is called outputs here. It gets outputs, and the"
    with refused(f"r.py:f: {theirs} rows' columns: answer"):
        call_function(lambda completions, **kwargs: 0, "r.py:f", [{"prompt": "b", "answer": 1}], {"outputs": ["c"]})
    for function, column in ((len, "outputs"), (load_function("user.py:reward:k=1", "--reward"), "k")):
        with refused(f"rename the rows' column '{column}': r.py:f gets something else under this name"):
            call_function(function, "r.py:f", [{"prompt": "b", column: 1}], {"outputs": ["c"]})


def test_modules_beside_the_file_of_a_function(here, monkeypatch):
    """One that is named as a script is imported. A name that something else has is told: a package of the repository,
    an installed library, the file of another flag. A file that is not imported may have any name."""
    monkeypatch.setattr(sys, "modules", sys.modules | {})
    sys.path.insert(0, str(ROOT / "algos"))  # as Python does for `python algos/ppo.py`
    for folder, imported in {"a": "reward", "b": "common", "c": "yaml", "d": "mine", "e": "mine"}.items():
        Path(folder).mkdir()
        for name in (imported, "torch"):
            Path(folder, f"{name}.py").write_text(f"value = '{folder}'")
        Path(folder, "user.py").write_text(f"def f():\n    from {imported} import value\n\n    return value\n")
        if folder in "ad":
            assert load_function(f"{folder}/user.py:f", "--reward")() == folder
        else:
            said = f"^{here}/{folder}/user.py would import .*{imported}.*, not the {imported}.py beside it: rename"
            with pytest.raises(InputError, match=said):
                load_function(f"{folder}/user.py:f", "--reward")


segments = functools.partial(row_segments, flag="--dataset")
pairs = functools.partial(pair_texts, flag="--dataset")
queries = functools.partial(encode_prompts, max_new_tokens=4, limit=32, flag="--dataset")
NO_CHATS = [  # a second chat, what is said
    ([USER, answer(5)], f"{FOUND}{{'role': 'assistant', 'content': 5"),
    (["b", "c"], f"{FOUND}'b'"),
    ([], f"{FOUND}None"),
    ([turn("tool", "b"), ANSWER], "the chat template cannot render the messages: tool is unknown"),
]
NO_ROWS = [  # what reads the rows, a good row, what makes it a bad second one, what is said
    (segments, {"messages": TALK}, {"messages": [USER]}, f": {LAST}"),
    (segments, ASKED, {"completion": "c"}, f": {FOUND}'c'"),
    (segments, ASKED, {"prompt": TALK, "completion": []}, ": the completion is empty"),
    (segments, DIALOGUE, {"dialogue": ["b", "c", "d"]}, f": {NO_DIALOGUE}"),
    (segments, DIALOGUE, {"dialogue": []}, f": {NO_DIALOGUE}"),
    (segments, DIALOGUE, {"dialogue": ["b", 5]}, ", part of row 2: 'dialogue' must be valid text, not 5"),
    (pairs, {"prompt": [USER], "chosen": [ANSWER], "rejected": [answer("d")]}, {"rejected": []}, f", rejected: {LAST}"),
]
for text in (None, 5, ["b"]):
    NO_ROWS.append((pairs, PAIR[0], {"rejected": text}, f": 'rejected' must be valid text, not {text!r}"))
for messages, sentence in NO_CHATS:
    NO_ROWS.append((segments, {"messages": TALK}, {"messages": messages}, f": {sentence}"))
    NO_ROWS.append((queries, {"prompt": TALK}, {"prompt": messages}, f": {sentence}"))
    NO_ROWS.append((pairs, dict.fromkeys(("chosen", "rejected"), TALK), {"chosen": messages}, f", chosen: {sentence}"))
NO_COLUMNS = [  # what reads the row, the row, what is said
    (queries, {"Prompt": "b"}, "Prompt; expected prompt"),
    (lambda rows, _: read_data(rows, None, reward=lambda b: b), {"messages": [USER]}, "messages; expected prompt"),
    (segments, {"body": "b"}, "body; expected text, prompt and completion, messages, or dialogue"),
    (segments, {"prompt": [USER]}, "prompt; expected completion"),
    (pairs, {"prompt": "b", "good": "c"}, "prompt, good; expected chosen and rejected"),
    (pairs, {"chosen": [USER]}, "chosen; expected rejected"),
]


def test_rows_that_are_refused(chatty):
    for read, row, changes, sentence in NO_ROWS:
        with refused(f"--dataset row 2{sentence}"):
            read(second(row, **changes), chatty)
    for read, row, sentence in NO_COLUMNS:
        with refused(f"--dataset has the columns {sentence}"):
            read([row], chatty)
    with refused("--dataset row 2 is 5: expected a"):
        load_rows([{"a": 1}, 5], "--dataset")
    with refused("--dataset row 2 and row 1 differ in their columns: b (null: an empty cell)"):
        load_rows([{"a": 1}, {"a": 1, "b": 1}], "--dataset")


NUMBER, TWO_NUMBERS = (f"a finite number, or a list of {n}, one for each output, not" for n in (1, 2))
NO_EPISODES = [  # a row of ilql.py, what makes it a bad second one, what is said
    *((ROWS["ilql"][0], {"reward": x}, f"'reward' must be {NUMBER} {x!r}") for x in (NAN, None, "1.0", [1, 2])),
    *((DIALOGUE, {"reward": x}, f"'reward' must be {TWO_NUMBERS} {x!r}") for x in ([1], [1, None])),
    (DIALOGUE, {"dialogue": ["b", "", "d", "e"]}, "an output without tokens has a reward"),
    (ROWS["ilql"][0], {"truncated": 2}, "'truncated' must be true or false, not 2"),
]


@pytest.mark.case(25, "reward")
@pytest.mark.case(26, "reward")
@pytest.mark.case(28, "reward")
def test_rewards_and_margins_that_are_refused(letters):
    for row, changes, sentence in NO_EPISODES:
        with refused(f"--dataset row 2: {sentence}"):
            ilql.encode_episodes(second(row, **changes), letters, 32, "--dataset")
    for value in (NAN, INF, "1"):
        with refused(f"--dataset row 2: 'margin' must be a finite number, not {value!r}"):
            reward.encode_texts(second(PAIR[0] | {"margin": 1.0}, margin=value), letters, 32, "--dataset")


CHECK = "--check --eval-every 1"  # calls all functions of the user
BAD_REWARD = f"{CHECK} --reward user.py:result"
BAD_METRIC = f"{CHECK} --metric user.py:result"
EVALUATED = "--eval-every 1"
NOT_ASKED = "--eval-prompts None --eval-dataset"
ROBOT = [{"messages": TALK}, {"messages": [turn("robot", "b"), ANSWER]}]
LOADED, WRITTEN = "--model model cannot be loaded: ", "cannot be written: "
RAISING = returning("[prompt.index('?') for prompt in prompts]")
RIGHT, LOSS = (returning(f"{{{name!r}: [1.0] * n}}") for name in ("accuracy", "loss"))
BOTH = returning("{'score': [1.0] * n, 'n': [2.0] * n}")
NO_TEXT = rows_with({}, {}, {"TEXT": "b\udc00c"})
SAME = rows_with(*[{"chosen": "f", "rejected": "f"}] * 4)
REFUSED = [
    entry(25, SCORED, "user.py:result returned nan for row 2", BAD_REWARD, user_py=returning("[1.0, nan] * 2")),
    entry(25, MEASURED, "numbers}; it returned 'bad': [nan", BAD_METRIC, user_py=returning("{'bad': [nan] * n}")),
    common(29, MEASURED, ["prompt.index", "ValueError: substring"], BAD_METRIC, user_code=True, user_py=RAISING),
    entry(29, SCORED, "no_such_column: missing a required", "--model ./nope --reward user.py:no_such_column"),
    entry(29, MEASURED, "no_such_column: missing a required", "--model ./nope --metric user.py:no_such_column"),
    entry(29, ROLLED, "no_such_column: missing a required", "--model ./nope --rollout user.py:no_such_column"),
    common(58, EVERY, "--resume runs/z: there is no such run or checkpoint", "--resume runs/z"),
    common(29, SCORED, ["a.py", "ZeroDivisionError"], "--reward a.py:b", a_py="1 / 0", user_code=True),
    common(29, EVERY, ["in rows", "KeyError: 'x'"], "--dataset user.py:rows:found=x", user_code=True),
    common(29, SCORED, "the user ended with SystemExit(0)", "--reward a.py:b", a_py="exit(0)", user_code=True),
    common(29, EVERY, "'NoneType' object", "--dataset user.py:rows:found=nothing", user_code=True),
    entry(25, "sft", "--metric returned 'accuracy', which evaluations have", BAD_METRIC, user_py=RIGHT),
    entry(25, "dpo", "--metric returned 'loss', which evaluations have", BAD_METRIC, user_py=LOSS),
    entry(25, "ddpo", "--reward and --metric both return 'n'", f"{BAD_REWARD} --metric user.py:result", user_py=BOTH),
    entry(34, EVERY, "--dtype bfloat16: most updates of such weights would be lost to rounding", "--dtype bfloat16"),
    common(36, TEXT, ["--model model", f"{WEIGHT} is missing"], model="lacking"),
    entry(36, "ddpo", f"--model model: {CONV} is missing", model="lacking"),
    entry(36, LOADERS, LOADED, model="truncated"),
    entry(37, ROLLED, "row 2: a prompt of 29 tokens and --max-new-tokens 4", rows=second(PROMPTS[0], prompt="b" * 29)),
    entry(38, SAMPLED, "tokens and --max-new-tokens 32 exceed the model's 32 positions", "--max-new-tokens 32"),
    entry(45, EVERY, "--dataset row 3 holds \\udc00, which must not be in", rows=NO_TEXT, also=[43]),
    common(46, EVERY, ["row 3 and row 1 differ in their columns: extra"], rows=rows_with({}, {}, {"extra": 1})),
    common(46, PROMPTED, "--metric needs rows with a prompt to sample from: give --eval-prompts", f"{NOT_ASKED} None"),
    entry(46, "dpo", "expected prompt", f"{NOT_ASKED} a.jsonl", a_jsonl=[{"chosen": "b c", "rejected": "b d"}]),
    entry(47, PAIRS, ["--dataset: no pair is left: ", "4", "equal"], rows=SAME),
    common(49, TEXT, [f"--dataset row 2: {FOUND}{{'role'", "with the role 'robot'"], model="chats", rows=ROBOT),
    entry(49, "ddpo", "--dataset row 1: 'prompt' must be valid text", rows=[{"prompt": [USER]}]),
    common(50, TEXT, ["row 1: the chat template cannot render", "is not set"], rows=ROBOT[:1]),
    common(51, SAMPLED, "the tokenizer has no end-of-sequence token", model="no_eos"),
    entry(51, "ddpo", "its tokenizer (", model="one_more_token"),
    common(51, TEXT, f"{LOADED}it has no tokenizer: give one", model="no_tokenizer"),
    entry(51, REFERRED, "--ref-model reference differs from --model", "--ref-model reference"),
    common(52, EVERY, "--dataset rows.jsonl has no rows", rows="\n  \n"),
    entry(55, LOADERS, "--model org/nope cannot be loaded: ", "--model org/nope"),
    entry(55, LOADERS, "--model ./nope: there is no such directory", "--model ./nope"),
    entry(55, "sft", "--dataset nope/ cannot be loaded: there is no such file or dir", "--dataset nope/"),
    common(22, EVERY, f"--run-dir rows.jsonl/run {WRITTEN}", "--run-dir rows.jsonl/run"),
    common(58, EVERY, ["--run-dir ", WRITTEN], "--run-dir b\0c"),
    entry(58, LOADERS, "--model runs/x is a run directory: give runs/x/hf_model", "--model runs/x"),
    entry(60, "ddpo", [LOADED, "trust_remote_code"], model="code"),
    entry(64, "sft reward", "--load-in-4bit", "--load-in-4bit"),
    entry(72, "ddpo", "--num-inference-steps 1001: ", "--num-inference-steps 1001"),
    entry(73, "ilql", "--logit-mask must be bool of shape [25, 25]", "--logit-mask user.py:rows"),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "row"), rows_of(REFUSED))
def test_refused(algo, row, command, here):
    code, out, err = command(algo, row.flags, row.model, row.files)
    assert code == (1 if row.user_code else 2), f"exit code {code}\n{out}{err}"
    says = [word.replace("TEXT", COLUMN[algo]) for word in row.says]
    assert [word for word in says if word not in err] == [], err
    assert ("Traceback" in err) == row.user_code, err
    if not row.user_code:
        assert err.startswith("error: ") and len(err.splitlines()) == 1 and len(err) < 700, err
    assert written(here) == command.before
    assert not (here / "run").exists() and not (here / "marker").exists()


LAST_TOKEN = "[0] * (len(ids) - 1) + [i != 1]"  # the reward of a response comes with its last token
MIXED = returning(f"[np.array({LAST_TOKEN}) if i else 1.0 for i, ids in enumerate(output_ids)]")
TIE = {"chosen": "b", "rejected": "c", "margin": 0.0}
RESULT = "--eval-every 1 --reward user.py:result"
EQUAL = returning("[0.7] * n")
ODD_NAME = shlex.quote("runs/x/../../two\nlines \U0001f600 it's")
CONTROLS = "b\x00c", "\x1b[2J\x1b]0;title\x07b\r\n\tc\x7f", "b\u2028c\x85\x0c\u2029", "\x9b31m"
FAMILY, HEBREW = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u202e\u05d0\u05d1\u0627 e\u0301\u0323"
ODD_TEXTS = rows_with(*({"TEXT": text} for text in (" \t\n", "b", *CONTROLS, FAMILY, HEBREW)))
LONG = rows_with({}, {}, {"TEXT": "b a red c " * 9}, {})
WORKS = [
    entry(28, ROLLED, (), RESULT, user_py=MIXED, values={"eval/reward": 0.75}),
    entry(32, "ppo", (), f"{RESULT} --score-scaling running-norm --whiten-rewards", user_py=EQUAL),
    entry(32, "grpo", (), f"{RESULT} --kl-coef 0", user_py=EQUAL),
    entry(32, "ddpo", (), f"{RESULT} --no-per-prompt-stats", user_py=EQUAL),
    entry(37, ROLLED, "--dataset: 1 of 4 prompts are dropped", "--max-prompt-length 9", rows=LONG),
    entry(37, "sft ilql dpo", "1 cut", rows=LONG),
    entry(37, "reward", "1 dropped as longer than 32", rows=LONG),
    entry(37, "ddpo", ("--dataset: 1 cut to 8 tokens", "--eval-dataset:"), rows=LONG),
    entry(39, LOADERS, rows=rows_with(*[{"prompt": ""}] * 4)),
    entry(39, "sft", "1 dropped", rows=[{"text": ""}, {"text": "bc"}]),
    entry(41, READ, rows=rows_with(*[{"TEXT": ""}] * 4)),
    entry(42, ROLLED, (), EVALUATED, model="ends_at_once", values={"tokens/eos_rate": 1, "tokens/responses_len": 1}),
    entry(42, ROLLED, (), EVALUATED, model="never_ends", values={"tokens/eos_rate": 0, "tokens/responses_len": 4}),
    entry(42, READ, (), EVALUATED, model="ends_at_once"),
    entry(43, EVERY, (), EVALUATED, rows=ODD_TEXTS, also=[40, 44]),
    common(51, TEXT, (), EVALUATED, model="no_pad"),  # then it is eos
    entry(51, "ppo reward", (), EVALUATED, model="pad_is_eos"),
    entry(51, "ppo", (), "--reward judge"),
    entry(53, EVERY, also=[63], rows=lambda algo: ROWS[algo][:1]),  # with secrets around, as every run here
    common(58, EVERY, (), f"--run-dir {ODD_NAME}"),
    entry(64, EVERY, (), "--mixed-precision bf16"),
    common(64, EVERY, (), "--dtype bfloat16 --lora-r 2"),
    entry(72, "ddpo", "images of 1 steps, 1 of them with noise", "--num-inference-steps 1"),
    entry(73, "ilql", "warning: all returns are equal", rows=rows_with(*[{"reward": 0.5}] * 4)),
    entry(73, "ilql", "per row: 1 to 1", rows=rows_with(*[{"completion": ""}] * 4), values={"td_error/inner": 0}),
    entry(74, "reward", "0 as equal; 2 without", rows=second(TIE, chosen="c", rejected="b")),
    entry(74, "reward", (), "--batch-size 1", rows=PAIR[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "row"), rows_of(WORKS))
def test_works(algo, row, command, here, monkeypatch, bf16):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, "CANARYCANARYCANARY")
    code, out, err = command(algo, row.flags, row.model, row.files)
    assert code == 0, f"exit code {code}\n{out}{err}"
    assert [word for word in row.says if word not in out] == [], out
    assert not [c for c in out + err if not (c.isprintable() or c in "\n\r")], "control characters on the terminal"
    assert "CANARY" not in out + err
    name = row.flags.split("--run-dir ")[-1] if "--run-dir" in row.flags else "run"
    run = here / shlex.split(name)[0]
    records = finished(run)
    assert (run / "samples.jsonl").exists() == ("--eval-every 1" in row.flags)
    for path in run.rglob("*"):
        assert not path.is_file() or b"CANARY" not in path.read_bytes()
        if path.suffix == ".jsonl":
            assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    for name, value in dict(row.values).items():
        assert {record[name] for record in records if name in record} == {value}, name


PLACES = {  # how the error of a loss says where it was
    **dict.fromkeys(READ.split(), r"rows \[\d"),
    **dict.fromkeys(ROLLED.split(), "4 episodes whose first is '"),
    "ddpo": "in epoch 2, whose first prompt is 'a ",
}


@pytest.mark.case(30, MEASURED)
def test_a_function_that_hangs(command):
    """There is no timeout: a judge may take its time. Ctrl-C ends it at once; before the first step nothing is left."""
    files = {"user.py": returning("os.kill(os.getpid(), signal.SIGINT) or time.sleep(99)")}
    code, out, err = command("sft", "--metric user.py:result --eval-every 1", files=files)
    assert (code, err) == (130, "") and out.endswith("\nstopped; there was no checkpoint yet, so nothing is kept\n")
    assert not Path("run").exists()


@pytest.mark.case(61, EVERY)
def test_a_tracker_that_fails_in_the_middle_ends_the_run(command, monkeypatch):
    """The same command goes on from the last checkpoint, and ends as a run without a tracker."""
    code, _, err = command("sft", "--eval-every 1 --save-every 1 --run-dir plain")
    assert code == 0, err
    tracker = Mock()
    tracker.log.side_effect = [None, None, None, ConnectionError("no network")]
    monkeypatch.setattr(accelerate.tracking, "filter_trackers", lambda names, folder: names)
    monkeypatch.setattr(accelerate.Accelerator, "init_trackers", lambda self, *args: self.trackers.append(tracker))
    code, out, err = command("sft", "--eval-every 1 --save-every 1 --track wandb")
    assert code == 1 and "ConnectionError: no network" in err
    code, out, err = command("sft", "--eval-every 1 --save-every 1")
    assert code == 0 and "continuing run from" in out and finished("run") == finished("plain"), out + err


@pytest.mark.case(33)
@pytest.mark.parametrize("algo", EVERY.split())
def test_a_loss_that_is_not_finite_stops_before_the_step(algo, command, monkeypatch):
    calls = []
    backward = accelerate.Accelerator.backward

    def poisoned(self, loss, **options):
        calls.append(1)
        return backward(self, loss * (NAN if len(calls) == 2 else 1.0), **options)

    monkeypatch.setattr(accelerate.Accelerator, "backward", poisoned)
    flags = "--save-every 1 --eval-every 0"
    if algo == "ddpo":
        flags += " --num-epochs 2"
    with pytest.raises(FloatingPointError, match=f"step 2: .*nan, {PLACES[algo]}.*; the last checkpoint is intact"):
        command(algo, flags)
    (newest,) = Path("run/checkpoints").iterdir()
    assert newest.name == "step_00000001" and [record["step"] for record in log("run")][-1] == 1
    for file in newest.glob("*.safetensors"):
        assert all(weight.isfinite().all() for weight in safetensors.torch.load_file(file).values())
    assert not Path("run/hf_model").exists()


@pytest.mark.case(34, "sft")
def test_fp16_of_the_launcher(command, here, monkeypatch, bf16):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    code, _, err = command("sft")
    assert code == 2 and err == "error: use --mixed-precision bf16 or no: fp16 is not supported\n"
    assert written(here) == command.before


@pytest.mark.case(35)
@pytest.mark.parametrize("algo", SAMPLED.split())
def test_logits_that_are_not_finite_while_sampling(algo, command):
    """Greedy decoding by argmax would take them for token 0."""
    flags = "--eval-every 1 --eval-temperature 0"
    if algo == "ilql":
        flags += " --top-k 0"
    with pytest.raises(FloatingPointError, match="not finite"):
        command(algo, flags, "overflows")
    assert not Path("run/metrics.jsonl").exists() and not Path("run/hf_model").exists()


@pytest.mark.case(36, TEXT)
@pytest.mark.parametrize("algo", TEXT.split())
def test_weights_that_are_not_finite(algo, command):
    """Told by the first sample, score or step."""
    with pytest.raises(FloatingPointError, match="not finite|loss nan"):
        command(algo, model="nan")
    assert not Path("run/hf_model").exists()


@pytest.mark.case(35, "ddpo")
@pytest.mark.case(36, "ddpo")
def test_images_that_are_not_finite(command):
    """Weights that are not finite are told by the first image, before the reward sees it."""
    with pytest.raises(FloatingPointError, match="the image of 'a .*' is not finite"):
        command("ddpo", "--reward user.py:result --eval-every 1", "nan", {"user.py": returning("1 / 0")})
    assert not Path("run").exists()


@pytest.mark.case(75, "ppo")
def test_a_coefficient_that_overflows_stops_the_run(command):
    with pytest.raises(FloatingPointError, match="step [12]: gradient norm .*; the last checkpoint is intact"):
        command("ppo", "--kl-coef 1e30 --kl-target 6 --kl-horizon 4 --lr 0.3")
    assert not Path("run/hf_model").exists()


@pytest.mark.case(69)
@pytest.mark.case(70)
@pytest.mark.case(71)
@by_default("ppo")
def test_another_place_and_a_pipe_into_head(algo, models, here):
    """A copy of the script under another name, from / and without HOME; the cache of the hub can be neither read nor
    made, the terminal is dumb, and nobody reads more than a line of the output, of which the table of samples fails
    most easily."""
    fill(here, models, algo)
    shutil.copytree(ROOT / "common", here / "code/common", ignore=shutil.ignore_patterns("__pycache__"))
    (here / "code/algos").mkdir()
    script = shutil.copy(ROOT / f"algos/{algo}.py", here / f"code/algos/my_{algo}.py")
    words = [re.sub(r"^((model|run|\w+\.jsonl|user\.py)(:.*)?)$", rf"{here}/\1", word) for word in BASE[algo]]
    line = shlex.join(once([sys.executable, str(script), *words, "--eval-every", "1"])) + " | head -n 1"
    env = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "9", "HF_HOME": "/proc/nope"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd="/", env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    finished()
    assert f"my_{algo}.py" in json.loads(Path("run/env.json").read_text())["command"]
    assert not list((here / "code").rglob("runs"))
