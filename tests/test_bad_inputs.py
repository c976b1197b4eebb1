"""Bad input, case by case and script by script: `python -m pytest tests/test_bad_inputs.py`

REFUSED holds what must end with exit code 2, one sentence and nothing written; WORKS what looks bad and is not: a
finished run, or a check that passes, with finite metrics. Each row names its case, its scripts, what is changed and
what is said. The scripts run in this process through the same `cli` as on the command line, on tiny random models; the
last section is of processes.
"""

import gzip
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import accelerate
import datasets
import huggingface_hub
import pytest
import safetensors.torch
import torch
import yaml
from accelerate.state import AcceleratorState
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import shapes
from common import checkpoint
from common.cli import cli

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"ppo": ppo, "grpo": grpo, "sft": sft, "reward": reward, "dpo": dpo, "ilql": ilql, "ddpo": ddpo}
EVERY, TEXT, PAIRS = "sft ppo grpo reward dpo ilql ddpo", "sft ppo grpo reward dpo ilql", "reward dpo"
SCORED, MEASURED = "ppo grpo ddpo", "sft ppo grpo dpo ilql ddpo"
SAMPLED, ROLLED = "sft ppo grpo dpo ilql", "ppo grpo"
NAN, INF = math.nan, math.inf

# ---- Commands, rows and functions ------------------------------------------------------------------------------------

COMMON = "--model model --dataset rows.jsonl --batch-size 4 --save-every 0 --threads 1 --run-dir run --warmup-steps 0"
OWN = {
    "ppo": "--reward user.py:reward --total-episodes 8 --rollout-batch-size 4 --ppo-epochs 1 --max-new-tokens 4",
    "grpo": "--reward user.py:reward --total-episodes 8 --rollout-batch-size 4 --group-size 2 --max-new-tokens 4",
    "sft": "--total-steps 2 --eval-dataset rows.jsonl --max-new-tokens 4",
    "reward": "--total-steps 2 --eval-dataset rows.jsonl",
    "dpo": "--total-steps 2 --eval-dataset rows.jsonl --max-new-tokens 4",
    "ilql": "--total-steps 2 --eval-dataset rows.jsonl --max-new-tokens 4 --betas 0 1",
    "ddpo": "--reward user.py:reward --num-epochs 1 --rollout-batch-size 4 "
    "--num-inference-steps 2 --guidance-scale 1 --cliprange 1e-3",
}
BASE = {algo: f"{COMMON} {flags}".split() for algo, flags in OWN.items()}
LETTERS = "bcde"
PAIR = [{"prompt": p, "chosen": p + "fg", "rejected": "h" + p} for p in LETTERS]
ROWS = {
    **dict.fromkeys(("ppo", "grpo"), [{"prompt": p} for p in LETTERS]),
    "sft": [{"prompt": p, "completion": p + "fg"} for p in LETTERS],
    "reward": PAIR,
    "dpo": PAIR,
    "ilql": [{"prompt": p, "completion": p + "fg", "reward": i / 2} for i, p in enumerate(LETTERS)],
    "ddpo": [{"prompt": caption} for caption in shapes.CAPTIONS[:4]],
}
COLUMN = {
    "ppo": "prompt",
    "grpo": "prompt",
    "sft": "completion",
    "reward": "chosen",
    "dpo": "chosen",
    "ilql": "completion",
}
COLUMN["ddpo"] = "prompt"
USER_FILE = '''
"""Functions of texts and of images: both get the prompts."""
import os
import signal

import numpy as np
import torch

RESULTS = {  # of a reward, for four samples
    "short": lambda n: [1.0] * (n - 1),
    "long": lambda n: [1.0] * (n + 1),
    "one": lambda n: [1.0],
    "scalar": lambda n: 1.0,
    "column": lambda n: np.ones((n, 1)),
    "tensor_column": lambda n: torch.ones(n, 1),
    "two_columns": lambda n: np.ones((n, 9)),
    "none": lambda n: None,
    "a_none": lambda n: [1.0, 1.0, None, 1.0],
    "a_nan": lambda n: [1.0, float("nan"), 1.0, 1.0],
    "a_nan_tensor": lambda n: torch.tensor([1.0, float("nan"), 1.0, 1.0]),
    "an_inf": lambda n: [1.0, 1.0, 1.0, float("-inf")],
    "strings": lambda n: ["1.0"] * n,
    "a_string": lambda n: "1" * n,
    "mapping": lambda n: {i: 1.0 for i in range(n)},
    "generator": lambda n: (1.0 for _ in range(n)),
    "complex": lambda n: [1j] * n,
    "equal": lambda n: [0.7] * n,
    "zero": lambda n: [0.0] * n,
    "integers": lambda n: [1, 0, 1, 1],
    "booleans": lambda n: [True, False, True, True],
    "a_tuple": lambda n: (1.0, 0.0, 1.0, 1.0),
    "numpy_array": lambda n: np.array([1, 0, 1, 1]),
    "numpy_scalars": lambda n: list(np.array([1, 0, 1, 1], dtype=np.float32)),
    "torch_tensor": lambda n: torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True),
    "torch_scalars": lambda n: list(torch.tensor([1.0, 0.0, 1.0, 1.0])),
}
METRICS = {
    "none": lambda n: None,
    "empty": lambda n: {},
    "list": lambda n: [1.0] * n,
    "short": lambda n: {"good": [1.0] * n, "bad": [1.0] * (n - 1)},
    "scalar": lambda n: {"bad": 1.0},
    "column": lambda n: {"bad": [[1.0]] * n},
    "strings": lambda n: {"bad": ["1"] * n},
    "a_nan": lambda n: {"bad": [1.0] * (n - 1) + [float("nan")]},
    "an_inf": lambda n: {"bad": [float("inf")] * n},
    "a_none": lambda n: {"bad": [None] * n},
}


def result(prompts, kind, **columns):
    return RESULTS[kind](len(prompts))


def measure(prompts, kind, **columns):
    return METRICS[kind](len(prompts))


def reward(prompts, **columns):
    return [len(prompt) / 10 + i for i, prompt in enumerate(prompts)]


def metric(prompts, **columns):
    return {"length": [len(prompt) for prompt in prompts]}


def rude_reward(prompts, **columns):
    scores = reward(prompts)
    clear(prompts, **columns)
    return scores


def rude_metric(prompts, **columns):
    lengths = metric(prompts)
    clear(prompts, **columns)
    return lengths


def clear(prompts, **columns):
    """Everything that can be emptied, and what is in it."""
    for values in (prompts, *columns.values()):
        if isinstance(values, list):
            for value in values:
                if isinstance(value, list):
                    value.clear()
            values.clear()
        if isinstance(values, torch.Tensor):
            values.zero_()


def raises(prompts, **columns):
    return [prompt.index("?") for prompt in prompts]


def no_such_column(prompts, answer):
    return [0.0] * len(prompts)


def hangs(prompts, **columns):
    """Until the user presses Ctrl-C."""
    while True:
        os.kill(os.getpid(), signal.SIGINT)


def broken_rows():
    return {}["nothing"]


def no_rows():
    return None
'''
MEASURE = {  # what makes a script call --metric
    "ppo": "--metric user.py:{}",
    "grpo": "--metric user.py:{}",
    "ddpo": "--metric user.py:{}",
    **dict.fromkeys(("sft", "dpo", "ilql"), "--eval-prompts prompts.jsonl --metric user.py:{}"),
}
SAMPLE = {algo: MEASURE[algo].format("metric") for algo in SAMPLED.split()}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def spoilt(number, count=4, **changes):
    """Good rows of a script, `count` of them, with changes in row `number`; TEXT stands for its column of text."""

    def rows(algo):
        found = [dict(ROWS[algo][i % 4]) for i in range(count)]
        found[number - 1] |= {COLUMN[algo] if key == "TEXT" else key: value for key, value in changes.items()}
        return found

    return rows


def every_row(**changes):
    """Good rows of a script, each with the changes."""
    return lambda algo: [
        row | {COLUMN[algo] if k == "TEXT" else k: v for k, v in changes.items()} for row in ROWS[algo]
    ]


# ---- Models ----------------------------------------------------------------------------------------------------------

WEIGHT = "transformer.h.1.mlp.c_fc.weight"
CONV = "conv_in.weight"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CODE = """
from pathlib import Path
from diffusers import StableDiffusionPipeline
from transformers import GPT2Config, GPT2LMHeadModel

Path("marker").touch()

class MazeConfig(GPT2Config):
    model_type = "maze"

class MazeModel(GPT2LMHeadModel):
    config_class = MazeConfig

class MazePipeline(StableDiffusionPipeline):
    pass
"""


def weights(change, part=""):
    """Changes the dict of weights of a model, or of a part of a pipeline."""

    def edit(path):
        (file,) = (path / part).glob("*.safetensors")
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, file, {"format": "pt"})

    return edit


def tokens(change):
    def edit(path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        change(tokenizer)
        tokenizer.save_pretrained(path)

    return edit


def end_likelihood(size):
    """The end token likeliest by far everywhere, or impossible."""

    def change(weights):
        # the last norm returns one vector everywhere, and the embedding of the end token is along it or against it
        weights["transformer.ln_f.weight"].zero_()
        weights["transformer.ln_f.bias"].fill_(1.0)
        weights["transformer.wte.weight"][22] = size

    return change


def without(pattern):
    def edit(path):
        for file in path.glob(pattern):
            file.unlink()

    return edit


def foreign_code(path):
    """A model of a kind that only maze.py knows."""
    (path / "maze.py").write_text(CODE)
    if (path / "model_index.json").exists():
        index = json.loads((path / "model_index.json").read_text()) | {"_class_name": ["maze", "MazePipeline"]}
        (path / "model_index.json").write_text(json.dumps(index))
        return
    kinds = {f"AutoModelFor{kind}": "maze.MazeModel" for kind in ("CausalLM", "SequenceClassification")}
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "maze", "auto_map": {"AutoConfig": "maze.MazeConfig"} | kinds}
    (path / "config.json").write_text(json.dumps(config))


def word_for_word(path):
    """A tokenizer that knows no other words than these, and no unknown one."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "<none>"
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


LMS = {  # variants of the language model
    "nan": weights(lambda w: w[WEIGHT][3, 4].fill_(NAN)),
    "inf": weights(lambda w: w[WEIGHT][3, 4].fill_(INF)),
    "lacking": weights(lambda w: w.pop(WEIGHT)),
    "shape": weights(lambda w: w.update({WEIGHT: torch.zeros(3)})),
    "truncated": lambda path: os.truncate(path / "model.safetensors", 5000),
    "no_weights": without("*.safetensors"),
    "no_config": without("config.json"),
    "no_tokenizer": without("*token*"),
    "no_pad": tokens(lambda t: setattr(t, "pad_token", None)),
    "pad_is_eos": tokens(lambda t: setattr(t, "pad_token", t.eos_token)),
    "no_eos": tokens(lambda t: setattr(t, "eos_token", None)),
    "no_bos": tokens(lambda t: setattr(t, "bos_token", None)),
    "no_unk": word_for_word,
    "one_more_token": tokens(lambda t: t.add_tokens(["<x>"])),
    "chats": tokens(lambda t: setattr(t, "chat_template", TEMPLATE)),
    "overflows": weights(lambda w: w["transformer.ln_f.weight"].fill_(3e38)),
    "ends_at_once": weights(end_likelihood(50.0)),
    "never_ends": weights(end_likelihood(-50.0)),
    "code": foreign_code,
}
PIPELINES = {  # variants of the pipeline of ddpo
    "nan": weights(lambda w: w[CONV][1, 2, 0, 0].fill_(NAN), "unet"),
    "inf": weights(lambda w: w[CONV][1, 2, 0, 0].fill_(INF), "unet"),
    "shape": weights(lambda w: w.update({CONV: torch.zeros(3)}), "unet"),
    "lacking": weights(lambda w: w.pop(CONV), "unet"),
    "truncated": lambda path: os.truncate(path / "unet/diffusion_pytorch_model.safetensors", 5000),
    "no_weights": without("unet/*.safetensors"),
    "no_config": without("model_index.json"),
    "no_tokenizer": without("tokenizer/*"),
    "one_more_token": lambda path: tokens(lambda t: t.add_tokens(["<x>"]))(path / "tokenizer"),
    "code": foreign_code,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory, build_pipeline):
    """models(algo, name) -> directory of a tiny model or pipeline, as it is or one of the variants above; made once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.tasks import randomwalks

    folder, letters = tmp_path_factory.mktemp("variants"), randomwalks.tokenizer()
    special = {f"{name}_token_id": getattr(letters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(letters), n_layer=2, n_embd=12, n_head=2, n_positions=32, **special)
    ).save_pretrained(folder / "lm/model")
    letters.save_pretrained(folder / "lm/model")
    build_pipeline().save_pretrained(folder / "pipeline/model")

    def find(algo, name="model"):
        kind, variants = ("pipeline", PIPELINES) if algo == "ddpo" else ("lm", LMS)
        path = folder / kind / name
        if not path.exists():
            shutil.copytree(folder / kind / "model", path)
            variants[name](path)
        return path

    return find


# ---- How a row is run ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory of its own; what a run changes in the process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(checkpoint, "fsync", lambda path: None)  # no power cut is tested here
    monkeypatch.setattr(Figure, "savefig", lambda *args, **options: None)  # half of the time of a run
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def fresh_accelerator():
    """For runs of another precision: accelerate keeps that of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def fill(folder, models, algo, model="model", files=()):
    """Model, rows and functions; files {name: contents, rows, or a function of the script that gives rows}."""
    (folder / "model").symlink_to(models(algo, model))
    (folder / "user.py").write_text(USER_FILE)
    files = {"rows.jsonl": ROWS[algo], "prompts.jsonl": ROWS["ppo"]} | dict(files)
    for name, content in files.items():
        content = content(algo) if callable(content) else content
        content = jsonl(content) if isinstance(content, list) else content
        if isinstance(content, bytes | str):
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def command(monkeypatch, capfd, models, here):
    """command(algo, flags, model, files) -> (exit code, stdout, stderr), as if typed in a directory with these."""

    def run(algo, flags="", model="model", files=()):
        if not (here / "user.py").exists():
            fill(here, models, algo, model, files)
        run.before = {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
        monkeypatch.setattr(sys, "argv", [f"algos/{algo}.py", *BASE[algo], *shlex.split(flags)])
        capfd.readouterr()
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
        return code, *capfd.readouterr()

    return run


def unchanged(here, before):
    """No file is new or newer, but for what Python keeps of imports."""
    found = {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    assert {p: t for p, t in found.items() if "__pycache__" not in p.parts} == before


def log(run="run"):
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def finished(run="run"):
    """The run has ended, and all its metrics are finite."""
    assert Path(run, "README.md").exists() and Path(run, "hf_model").is_dir()
    records = log(run)
    assert records and all(isinstance(value, int | float) for record in records for value in record.values()), records
    return records


tried = set()  # (case, script) of which the default run has a row


def rows_of(table):
    """The parameters of a table: each script of each row, marked with the case. The scripts that share what a row is
    about are slow but for the first of them, and but for the first row of a (case, script). grpo reads and samples as
    ppo does: it shares all of their rows."""
    parameters = []
    for row in table:
        shared = row.shared.split()
        for algo in row.algos.split():
            as_ppo = algo == "grpo" and "ppo" in row.algos.split()
            repeated = (as_ppo or algo in shared[1:]) and (row.case, algo) in tried
            marks = [pytest.mark.case(case) for case in (row.case, *row.also)]
            if row.slow or repeated:
                marks.append(pytest.mark.slow)
            else:
                tried.add((row.case, algo))
            parameters.append(pytest.param(algo, row, marks=marks, id=f"{row.case}-{row.name}-{algo}"))
    return parameters


def entry(
    case, algos, name, says=(), flags="", model="model", slow=False, user_code=False, shared="", also=(), **files
):  # fmt: skip
    """A row of a table. flags: text or {script: text}; says: the words that must be said, text, list or {script: ...};
    TEXT in them is the script's column of text; shared: scripts in which one function of common/ does what the row is
    about; also: other cases that it tries; files: rows=... replaces rows.jsonl, other_txt=... writes other.txt."""
    files = {"rows.jsonl" if key == "rows" else key.replace("_", "."): value for key, value in files.items()}
    return SimpleNamespace(**locals())


def words(row, algo):
    says = row.says.get(algo, row.says.get("")) if isinstance(row.says, dict) else row.says
    says = [says] if isinstance(says, str) else says
    return [word.replace("TEXT", COLUMN[algo]) for word in says]


def flags_of(row, algo):
    return row.flags[algo] if isinstance(row.flags, dict) else row.flags


# ---- What is refused -------------------------------------------------------------------------------------------------


def check(spec):
    """--reward, or --metric, is called by --check."""
    return {algo: f"--check {spec}" for algo in EVERY.split()}


def measure(name):
    """The flags that make a script call the metric, with --check."""
    return {algo: f"--check {text.format(name)}" for algo, text in MEASURE.items()}


def result(case, kind, *says):
    says = [f"user.py:result:kind={kind} returned ", *says]
    return entry(case, SCORED, f"reward {kind}", says, check(f"--reward user.py:result:kind={kind}"), shared=SCORED)


def measured(case, kind):
    says = [f"user.py:measure:kind={kind} must return {{name: list of 4 finite numbers}}"]
    says += [] if kind in ("none", "empty", "list") else ["'bad' is not one"]
    return entry(case, MEASURED, f"metric {kind}", says, measure(f"measure:kind={kind}"), shared=MEASURED)


def rewarded(case, value, name):
    says = f"--dataset row 3: 'reward' must be a finite number, or a list of 1, one for each output, it is {value!r}"
    return entry(case, "ilql", f"reward column {name}", says, rows=spoilt(3, reward=value))


NUMBERS = "expected a list of 4 numbers, one per "
CHAT = 'a chat is a list of {"role": one of '
USER, ANSWER = {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
CHATS = {  # rows of a chat
    "ppo": lambda chat: {"prompt": chat},
    "grpo": lambda chat: {"prompt": chat},
    "sft": lambda chat: {"messages": chat},
    "ilql": lambda chat: {"messages": chat, "reward": 1},
    "reward": lambda chat: {"chosen": chat, "rejected": [USER, {"role": "assistant", "content": "d"}]},
}
CHATS["dpo"] = CHATS["reward"]


def chatting(*chats):
    return lambda algo: [CHATS[algo](chat) for chat in chats]


def talk(name, chat, says, algos=TEXT):
    rows = chatting([USER, ANSWER], chat)
    return entry(49, algos, name, ["--dataset row 2: ", says], model="chats", shared=algos, rows=rows)


LONG = {  # rows of which one is too long for 32 positions, and cannot be cut
    **dict.fromkeys(("ppo", "grpo"), [{"prompt": "b"}, {"prompt": "b" * 29}]),
    **dict.fromkeys(("reward", "dpo"), [{"prompt": "b", "chosen": "c" * 40, "rejected": "d" * 50}]),
}


def margins(value):
    return [row | {"margin": margin} for row, margin in zip(PAIR, (1.0, value, 0.5, 0.0), strict=True)]


FORMS = "expected text, prompt and completion, messages, or dialogue"
REFUSED = [
    # 25, 26: not finite
    result(25, "a_nan", "nan for row 2, prompt ", "expected a finite number"),
    result(25, "a_nan_tensor", "nan for row 2, prompt ", "expected a finite number"),
    measured(25, "a_nan"),
    rewarded(25, NAN, "nan"),
    entry(25, "ilql", "reward list", "row 3: 'reward' must be", rows=spoilt(3, reward=[NAN])),
    entry(25, "reward", "margin nan", "row 2: 'margin' must be a finite number, it is nan", rows=margins(NAN)),
    result(26, "an_inf", "-inf for row 4, prompt ", "expected a finite number"),
    measured(26, "an_inf"),
    rewarded(26, -INF, "inf"),
    entry(26, "reward", "margin inf", "row 2: 'margin' must be a finite number, it is inf", rows=margins(INF)),
    # 27: shapes
    result(27, "short", f"3 values, {NUMBERS}"),
    result(27, "long", f"5 values, {NUMBERS}"),
    result(27, "one", f"1 values, {NUMBERS}"),
    result(27, "scalar", f"float, {NUMBERS}"),
    result(27, "column", "[1.0] for row 1, prompt ", "expected a finite number"),
    result(27, "tensor_column", "[1.0] for row 1, prompt ", "expected a finite number"),
    result(27, "two_columns", "[1.0, 1.0, ", "for row 1, prompt ", "expected a finite number"),
    *(measured(27, kind) for kind in ("list", "short", "scalar", "column")),
    rewarded(27, [1, 2], "too many"),
    rewarded(27, [], "too few"),
    # 28: types
    result(28, "none", f"NoneType, {NUMBERS}"),
    result(28, "a_none", "None for row 3, prompt ", "expected a finite number"),
    result(28, "strings", "'1.0' for row 1, prompt ", "expected a finite number"),
    result(28, "a_string", f"str, {NUMBERS}"),
    result(28, "mapping", f"dict, {NUMBERS}"),
    result(28, "generator", f"generator, {NUMBERS}"),
    result(28, "complex", "1j for row 1, prompt ", "expected a finite number"),
    *(measured(28, kind) for kind in ("none", "empty", "strings", "a_none")),
    *(rewarded(28, value, type(value).__name__) for value in (None, "good", "1.0", ["1"], {"x": 1})),
    # 29: functions that fail
    entry(
        29, SCORED, "reward raises", ["prompt.index", "ValueError: substring not found"],
        check("--reward user.py:raises"), user_code=True, shared=SCORED,
    ),
    entry(
        29, MEASURED, "metric raises", ["prompt.index", "ValueError: substring not found"],
        measure("raises"), user_code=True, shared=MEASURED,
    ),
    entry(29, ROLLED, "reward column", "'answer'", check("--reward user.py:no_such_column"), user_code=True,
          shared=ROLLED),
    entry(29, "ddpo", "reward column", "missing 1 required ", check("--reward user.py:no_such_column"),
          user_code=True),
    entry(29, SCORED, "no reward", "user.py has no function 'nope'", check("--reward user.py:nope"),
          shared=SCORED),
    entry(29, MEASURED, "no metric", "user.py has no function 'nope'", measure("nope"), shared=MEASURED),
    entry(29, SCORED, "no file", "--reward nope.py:reward: expected path/to/file.py:", "--reward nope.py:reward",
          shared=SCORED),
    entry(29, EVERY, "rows fail", ["in broken_rows", "KeyError"], "--dataset user.py:broken_rows",
          user_code=True, shared=EVERY),
    entry(29, EVERY, "rows none", "--dataset user.py:no_rows returned None", "--dataset user.py:no_rows",
          shared=EVERY),
    # 30: there is no timeout
    entry(30, EVERY, "timeout", ["Unrecognized", "--reward-timeout"], "--reward-timeout 5"),
    # 34: no fp16, so no loss scale
    entry(34, EVERY, "fp16", ["--mixed-precision", "fp16", "bf16"], "--mixed-precision fp16"),
    entry(34, EVERY, "float16", ["--dtype", "float16", "bfloat16"], "--dtype float16"),
    entry(34, EVERY, "bfloat16", "--dtype bfloat16: most updates of such weights would round to nothing: leave it out",
          "--dtype bfloat16"),
    # 36: files of models
    entry(36, TEXT, "nan", f"--model model cannot be loaded: {WEIGHT} is not finite", model="nan", shared=TEXT),
    entry(36, TEXT, "inf", f"--model model cannot be loaded: {WEIGHT} is not finite", model="inf", shared=TEXT),
    entry(36, TEXT, "lacking", ["--model model", f"{WEIGHT} is missing"], model="lacking", shared=TEXT),
    entry(36, TEXT, "shape", f"--model model cannot be loaded: {WEIGHT} is of shape [3], expected [12, 48]",
          model="shape", shared=TEXT),
    entry(36, "ddpo", "lacking", f"--model model: {CONV} is missing", model="lacking"),
    entry(36, "ddpo", "shape", "--model model cannot be loaded: ", model="shape"),
    entry(36, EVERY, "truncated", "--model model cannot be loaded: ", model="truncated", shared=TEXT),
    entry(36, EVERY, "no weights", "--model model cannot be loaded: ", model="no_weights", shared=TEXT),
    entry(36, EVERY, "no config", "--model model cannot be loaded: ", model="no_config", shared=TEXT),
    # 37, 38: too long
    entry(
        37, ROLLED, "long prompt", ["--dataset row 2: a prompt of 29 tokens", "--max-new-tokens 4", "32 positions"],
        rows=LONG["ppo"],
    ),
    entry(
        37, PAIRS, "long responses", ["--dataset: no pair is left", "--max-length", "positions"],
        {"dpo": "--max-length 1", "reward": "--max-length 1"},
    ),
    entry(37, "sft", "max-length", "--dataset: no row has a label left within --max-length 1", "--max-length 1"),
    entry(37, "ilql", "max-length", "--dataset: no row has an action left within --max-length 1", "--max-length 1"),
    entry(
        38, SAMPLED, "new tokens", ["tokens and --max-new-tokens 32 exceed the model's 32 positions: lower"],
        {algo: f"{text} --max-new-tokens 32" for algo, text in SAMPLE.items()},
    ),
    entry(
        38, "sft dpo ilql", "prompt", ["--eval-prompts row 2: a prompt of 29 tokens and --max-new-tokens 4 exceed"],
        SAMPLE, prompts_jsonl=LONG["ppo"],
    ),
    # 39: nothing to begin with
    entry(
        39, "ppo grpo dpo", "empty, no bos",
        "--dataset row 3: the prompt is empty and the tokenizer has no beginning token",
        model="no_bos", rows=spoilt(3, prompt=""),
    ),
    # 43: what is no text
    *(
        entry(43, algos, f"surrogate {end}", says, rows=lambda algo, end=end: jsonl(spoilt(3, TEXT="b")(algo)).replace(
            f'"{COLUMN[algo]}": "b"', f'"{COLUMN[algo]}": "b{end}"') if algo not in ("ppo", "grpo") else jsonl(
            [*ROWS["ppo"][:2], {"prompt": "QQ"}]).replace("QQ", f"b{end}"), shared=EVERY)
        for end in ("\\ud800", "\\udc00c")
        for algos, says in ((EVERY, "--dataset row 3: 'TEXT' must be valid text, it is 'b"),)
    ),
    # 45: types of columns
    *(
        entry(45, TEXT, type(value).__name__, f"--dataset row 3: 'TEXT' must be valid text, it is {value!r}",
              shared=TEXT, rows=spoilt(3, TEXT=value))
        for value in (None, 5, 1.5, True, {"role": "user"})
    ),
    *(
        entry(45, "ddpo", type(value).__name__, ["--dataset row 3", "valid text", "'prompt'"],
              rows=spoilt(3, TEXT=value))
        for value in (None, 5, 1.5, True, {"role": "user"}, ["b"])
    ),
    entry(45, "ppo grpo sft ilql", "list", "--dataset row 3: ", rows=spoilt(3, TEXT=["b"])),
    entry(45, PAIRS, "list", "--dataset row 3: 'chosen' must be valid text, it is ['b']", rows=spoilt(3, TEXT=["b"])),
    # 46: names of columns
    entry(46, ROLLED, "misspelt", "--dataset has the columns Prompt; expected prompt",
          rows=[{"Prompt": "b"}]),
    entry(46, "sft", "misspelt", f"--dataset has the columns body; {FORMS}", rows=[{"body": "b"}]),
    entry(46, "sft", "no prompt", "--dataset has the columns completion; expected prompt", rows=[{"completion": "b"}]),
    entry(46, "sft", "no completion", "--dataset has the columns prompt; expected completion", rows=[{"prompt": "b"}]),
    entry(46, "ilql", "misspelt", "--dataset row 1: 'reward' must be a finite number, or a list of 1",
          rows=[{"prompt": "b", "completion": "c", "rewards": 1}]),
    entry(46, "ilql", "no completion", "the columns prompt, reward; expected completion",
          rows=[{"prompt": "b", "reward": 1}]),
    entry(46, PAIRS, "misspelt", ["the columns prompt, chosen_response, rejected; expected chosen"],
          rows=[{"prompt": "b", "chosen_response": "c", "rejected": "d"}]),
    entry(46, PAIRS, "one side", ["the columns prompt, chosen; expected rejected"],
          rows=[{"prompt": "b", "chosen": "c"}]),
    entry(46, "ddpo", "misspelt", "--dataset has the columns caption; expected prompt",
          rows=[{"caption": "a red circle"}]),
    entry(46, EVERY, "extra", "--dataset row 3 must be a mapping with the columns of row 1: see extra",
          shared=EVERY, rows=spoilt(3, extra=1)),
    # 47, 48: pairs
    entry(47, PAIRS, "equal", ["--dataset: no pair is left", "4", "as equal"],
          rows=every_row(chosen="fg", rejected="fg")),
    entry(47, "dpo", "equal when cut", ["no pair is left", "4 dropped as equal"], "--max-length 3",
          rows=every_row(chosen="fgh", rejected="fgi")),
    entry(48, "dpo", "no prompt", "--dataset row 2: chosen and rejected begin differently: add the column prompt",
          rows=[{"chosen": "b c", "rejected": "b d"}, {"chosen": "c", "rejected": "d"}]),
    # 49, 50: chats
    talk("role", [{"role": "robot", "content": "b"}, ANSWER], "'robot'"),
    talk("no content", [USER, {"role": "assistant", "content": None}], "None"),
    talk("content", [USER, {"role": "assistant", "content": 5}], "5"),
    talk("no keys", [{"role": "user"}, ANSWER], CHAT),
    talk("no mapping", ["b", "c"], CHAT),
    talk("empty", [], CHAT, "ppo grpo sft ilql"),
    talk("empty", [], "the last message must be the assistant's|" + CHAT, PAIRS),
    talk("none", None, CHAT, "sft ilql"),
    talk("user", [USER], "the last message must be the assistant's", "sft ilql"),
    talk("user", [USER], "the last message must be the assistant's", PAIRS),
    entry(49, "ddpo", "chat", ["--dataset row 1: 'prompt' must be valid text"], rows=[{"prompt": [USER]}]),
    entry(50, TEXT, "no template", ["--dataset row 1: the chat template cannot write", "chat_template is not set"],
          shared=TEXT, rows=chatting([USER, ANSWER])),
    # 51: tokenizers
    entry(51, SAMPLED, "no eos", ["--model model", "the tokenizer has no end-of-sequence token"], model="no_eos",
          shared=SAMPLED),
    entry(51, TEXT, "too many tokens", ["--model model", "the model has embeddings for fewer than the 26 tokens"],
          model="one_more_token", shared=TEXT),
    entry(51, "ddpo", "too many tokens", "its tokenizer (", model="one_more_token"),
    entry(51, TEXT, "no tokenizer", "--model model cannot be loaded: it holds no tokenizer: name one with --token",
          model="no_tokenizer", shared=TEXT),
    entry(51, "ddpo", "no tokenizer", "--model model", model="no_tokenizer"),
    entry(51, "ppo grpo dpo", "reference",
          "--ref-model reference is of another kind or has another vocabulary than --model",
          "--ref-model reference"),
    entry(51, ROLLED, "judge", ["--reward judge", "the model has embeddings for fewer than the 25 tokens"],
          "--reward judge"),
    # 52: files
    entry(52, EVERY, "empty", "--dataset rows.jsonl holds no rows", shared=EVERY, rows=""),
    entry(52, EVERY, "blank", "--dataset rows.jsonl holds no rows", shared=EVERY, rows="\n  \n"),
    entry(52, EVERY, "torn", "--dataset rows.jsonl cannot be loaded: line 7 is not valid JSON: ", shared=EVERY,
          rows=lambda algo: jsonl(spoilt(1, 6)(algo)) + '{"prompt": "b"\n' + jsonl(ROWS[algo])),
    entry(52, EVERY, "comma", "--dataset rows.jsonl cannot be loaded: line 1 is not valid JSON: ", shared=EVERY,
          rows='{"prompt": "b"},\n'),
    entry(52, EVERY, "latin-1", "--dataset rows.jsonl cannot be loaded: line 1 is not valid JSON: 'utf-8' codec",
          shared=EVERY, rows=b'{"prompt": "caf\xe9"}\n'),
    entry(52, EVERY, "a number", "--dataset row 1 must be a mapping with the columns of row 1: see 5",
          shared=EVERY, rows="5\n"),
    entry(52, EVERY, "bad gz", "--dataset rows.jsonl.gz cannot be loaded: ", "--dataset rows.jsonl.gz",
          shared=EVERY, rows_jsonl_gz=b"no gzip"),
    # 55, 56: names of data sets and models
    entry(55, EVERY, "no file", "--dataset none.jsonl cannot be loaded: ", "--dataset none.jsonl", shared=EVERY),
    entry(55, EVERY, "other kind", "--dataset rows.tsv cannot be loaded: expected a name that ends with .json, .jsonl,",
          "--dataset rows.tsv", shared=EVERY, rows_tsv="prompt\nb\n"),
    entry(55, EVERY, "no directory", "--dataset ./nope", "--dataset ./nope", shared=EVERY),
    entry(55, EVERY, "hub rows", "--dataset org/nope cannot be loaded: ", "--dataset org/nope", shared=EVERY),
    entry(55, EVERY, "hub model", "--model org/nope cannot be loaded: ", "--model org/nope", shared=TEXT),
    entry(55, EVERY, "model directory", "--model ./nope: there is no such directory", "--model ./nope", shared=TEXT),
    entry(55, EVERY, "absolute", "--model /nope/at/all: there is no such directory", "--model /nope/at/all",
          shared=EVERY),
    entry(55, EVERY, "model file", "--model nope.py:build: expected path/to/file.py:function", "--model nope.py:build",
          shared=EVERY),
    entry(55, TEXT, "tokenizer", "--tokenizer ./nope: there is no such directory", "--tokenizer ./nope", shared=TEXT),
    entry(56, EVERY, "splits", "--dataset splits cannot be loaded: it holds several splits (train, test): name",
          "--dataset splits", shared=EVERY),
    # 57: flags
    *(
        entry(57, EVERY, f"lr {value}", f"--lr {float(value)} must be a positive number", f"--lr {value}")
        for value in ("0", "-1e-5", "nan", "inf")
    ),
    *(
        entry(57, EVERY, flags, f"{flags} must be {rule}", flags)
        for rule, all_flags in {
            "at least 1": ["--batch-size 0", "--micro-batch-size -1", "--keep-checkpoints 0", "--threads 0"],
            "at least 0": ["--save-every -1", "--eval-every -1", "--warmup-steps -1"],
            "0 or a positive number": ["--weight-decay nan", "--max-grad-norm inf"],
            "org/name": ["--push-to-hub True"],
        }.items()
        for flags in all_flags
    ),
    entry(57, EVERY, "betas", "--adam-betas (1.5, 0.9) must be in [0, 1)", "--adam-betas 1.5 0.9"),
    entry(57, ROLLED, "not divisible", "--rollout-batch-size 4 must be a multiple of --batch-size 3", "--batch-size 3"),
    entry(57, "ddpo", "not divisible", "--rollout-batch-size 4 must be a multiple of --batch-size 3", "--batch-size 3"),
    entry(57, EVERY, "unknown", ["Unrecognized", "--learn-rate"], "--learn-rate 1", shared=EVERY),
    entry(57, EVERY, "word", ["--lr", "'fast'"], "--lr fast", shared=EVERY),
    entry(57, EVERY, "fraction", ["--batch-size", "4.5"], "--batch-size 4.5", shared=EVERY),
    entry(57, EVERY, "switch", ["Unrecognized", "True"], "--check True", shared=EVERY),
    entry(57, EVERY, "choice", ["--lr-schedule", "'cosinus'", "cosine"], "--lr-schedule cosinus", shared=EVERY),
    entry(57, EVERY, "seed", ["--seed", "'1.5'"], "--seed 1.5", shared=EVERY),
    entry(57, EVERY, "yaml unknown", ["--learning-rates", "--config my.yaml"], "--config my.yaml",
          shared=EVERY, my_yaml="learning_rates: 1\n"),
    entry(57, EVERY, "yaml double", "--config my.yaml: lr is given twice", "--config my.yaml",
          shared=EVERY, my_yaml="lr: 1e-3\nseed: 2\nlr: 1e-4\n"),
    entry(57, EVERY, "yaml double dash", "--config my.yaml: batch_size is given twice", "--config my.yaml",
          shared=EVERY, my_yaml="batch-size: 4\nbatch_size: 8\n"),
    entry(57, EVERY, "yaml empty", "--config my.yaml cannot be read as lines like", "--config my.yaml",
          shared=EVERY, my_yaml=""),
    entry(57, EVERY, "yaml list", "--config my.yaml cannot be read as lines like", "--config my.yaml",
          shared=EVERY, my_yaml="- lr\n"),
    entry(57, EVERY, "yaml torn", "--config my.yaml cannot be read", "--config my.yaml",
          shared=EVERY, my_yaml="lr: ["),
    entry(57, EVERY, "yaml number", "--keep-checkpoints 0 must be at least 1", "--config my.yaml",
          shared=EVERY, my_yaml="keep_checkpoints: 0\n"),
    entry(57, EVERY, "yaml missing", "--config none.yaml cannot be read", "--config none.yaml",
          shared=EVERY),
    # 58: names of run directories are paths of the user
    entry(58, EVERY, "too long", ["--run-dir ", "cannot be written: "], "--run-dir " + "x" * 300, shared=EVERY),
    entry(22, EVERY, "a file", "--run-dir rows.jsonl/run cannot be written: ", "--run-dir rows.jsonl/run",
          shared=EVERY),
    entry(22, EVERY, "no such place", "--run-dir /proc/nope/run cannot be written: ", "--run-dir /proc/nope/run",
          shared=EVERY),
    entry(58, EVERY, "photos", "--run-dir photos cannot be written: it holds files but no run", "--run-dir photos",
          shared=EVERY),
    entry(58, EVERY, "name of a path", "--name a/b must be letters and digits, behind the first also . _ -",
          "--run-dir None --name a/b", shared=EVERY),
    entry(58, EVERY, "resume word", "checkpoint nevr cannot be read: ",
          "--resume nevr", shared=EVERY),
    entry(58, EVERY, "resume run", "checkpoint runs/x cannot be read: ",
          "--resume runs/x", shared=EVERY),
    entry(58, EVERY, "model run", "--model runs/x is a run directory: name runs/x/hf_model", "--model runs/x",
          shared=TEXT),
    # 60: code of others
    entry(60, EVERY, "code", ["--model model cannot be loaded: ", "trust_remote_code"], model="code"),
    # 64: what this machine cannot do
    entry(64, TEXT, "4 bits", "--load-in-4bit", "--load-in-4bit", shared=TEXT),
    entry(64, "ddpo", "4 bits", ["Unrecognized", "--load-in-4bit"], "--load-in-4bit"),
    entry(64, TEXT, "4 bits float64", "--load-in-4bit does not go with --dtype float64",
          "--load-in-4bit --lora-r 2 --dtype float64"),
    entry(64, TEXT, "flash", "--model model cannot be loaded: FlashAttention2",
          "--attn-implementation flash_attention_2", shared=TEXT),
    # 72: ddpo
    entry(72, "ddpo", "eta 0", "--eta 0.0 must be in (0, 1]", "--eta 0"),
    entry(72, "ddpo", "guidance 0", "--guidance-scale 0.0 must be 1 (no guidance) or more", "--guidance-scale 0"),
    entry(72, "ddpo", "steps 0", "--num-inference-steps 0 must be at least 1", "--num-inference-steps 0"),
    entry(72, "ddpo", "steps 1001", "--num-inference-steps 1001: ", "--num-inference-steps 1001"),
    # 73: ilql
    *(rewarded(73, value, f"{value!r}") for value in ("bad", {"x": 1})),
    entry(73, "ilql", "no action", "--dataset: no row has an action left",
          rows=[{"prompt": "b", "completion": "", "reward": 1, "truncated": True}]),
    # grpo
    entry(57, "grpo", "one response", "--group-size 1 must be at least 2: a response is compared", "--group-size 1"),
    entry(57, "grpo", "groups", "--rollout-batch-size 4 must be a multiple of --group-size 3", "--group-size 3"),
    entry(57, "grpo", "no reference", "--ref-model needs a --kl-coef above 0", "--kl-coef 0 --ref-model model"),
    # 75: the coefficient of the KL penalty
    entry(75, "ppo", "target 0", "--kl-target 0.0 must be a positive number", "--kl-target 0"),
    entry(75, "ppo", "horizon", "--kl-horizon 3 must be at least --rollout-batch-size 4",
          "--kl-target 6 --kl-horizon 3"),
    entry(75, "ppo", "coefficient", "--kl-coef -0.1 must be 0 or a positive number", "--kl-coef -0.1"),
]  # fmt: skip


def surroundings(here):
    """What some rows name: a directory of two splits, one of photos, a run, a reference and a judge that do not fit."""
    (here / "photos").mkdir()
    (here / "photos/cat.jpg").write_bytes(b"meow")
    (here / "runs/x/hf_model").mkdir(parents=True)
    (here / "runs/x/config.yaml").write_text("lr: 1\n")


def others(here, name):
    """A reference of another vocabulary, and a judge whose tokenizer is larger than its embeddings."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    sizes = {"vocab_size": 13, "n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
    kind = {"reference": "GPT2LMHeadModel", "judge": "GPT2ForSequenceClassification"}[name]
    config = transformers.GPT2Config(num_labels=1, **sizes)
    getattr(transformers, kind)(config).save_pretrained(here / name)
    small = Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=small, eos_token="<eos>").save_pretrained(here / name)
    if name == "judge":
        for file in (here / "model").glob("*token*"):
            shutil.copy(file, here / name)


@pytest.mark.parametrize(("algo", "row"), rows_of(REFUSED))
def test_refused(algo, row, command, models, here):
    """Exit code 2, one sentence with these words, and nothing written; of the user's own code exit code 1 and a
    traceback."""
    fill(here, models, algo, row.model, row.files)
    surroundings(here)
    if row.name in ("reference", "judge"):
        others(here, row.name)
    if row.name == "splits":
        rows = datasets.Dataset.from_list(ROWS[algo])
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(here / "splits")
    code, out, err = command(algo, flags_of(row, algo))
    assert code == (1 if row.user_code else 2), f"exit code {code}\n{out}{err}"
    missing = [word for word in words(row, algo) if not any(part in err for part in word.split("|"))]
    assert not missing, f"{missing} is not said\n{err}"
    if not row.user_code and "Unrecognized" not in words(row, algo) and "─" not in err:  # tyro has its own frame
        sentence = err.strip().splitlines()[-1]
        assert sentence.startswith("error: ") and len(sentence) < 700, err
        assert err.strip() == sentence, err
    assert row.user_code or "Traceback" not in err, err
    unchanged(here, command.before)
    assert not (here / "run").exists() and not (here / "marker").exists()


# ---- What works ------------------------------------------------------------------------------------------------------

CHECKED = dict.fromkeys(EVERY.split(), "--check")
EVALUATED = {algo: f"{SAMPLE.get(algo, '')} --eval-every 1" for algo in EVERY.split()}


def works(case, algos, name, flags="", says=(), model="model", slow=False, **options):
    return entry(case, algos, name, says, flags, model, slow, **options)


def accepted(case, kind, slow=False, shared=""):
    flags = f"--reward user.py:result:kind={kind} --eval-every 1"
    return works(case, SCORED, f"reward {kind}", flags, slow=slow, shared=shared)


def text_rows(change):
    """The JSONL of good rows, changed."""
    return lambda algo: change(jsonl(ROWS[algo]))


SHORT = "--max-prompt-length 9"
ODD_NAME = "runs/x/../../two\nlines \U0001f600 it's"
ODD_LETTERS = (
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u202e\u05d0\u05d1\u0627",
    "e\u0301\u0323",
    "Hello, World",
)
CONTROLS = "b\x00c", "\x1b[2J\x1b]0;title\x07b\r\n\tc\x7f", "b\u2028c\x85\x0c\u2029", "\x9b31m"


def different(texts):
    """Good rows, each with another text."""
    return lambda algo: [row | {COLUMN[algo]: text} for row, text in zip(ROWS[algo], texts, strict=True)]


WORKS = [
    # 28: any kind of number
    accepted(28, "numpy_array"),
    *(accepted(28, kind, slow=True) for kind in "booleans torch_tensor integers".split()),
    *(accepted(28, kind, slow=True) for kind in "a_tuple numpy_scalars torch_scalars".split()),
    works(28, "ilql", "reward booleans", rows=every_row(reward=True)),
    # 32: no variance
    accepted(32, "equal"),
    accepted(32, "zero"),
    works(32, "ppo", "whitened", "--reward user.py:result:kind=equal --score-scaling running-norm --whiten-rewards"),
    works(32, "grpo", "without a KL", "--reward user.py:result:kind=equal --kl-coef 0"),
    works(32, "ddpo", "all prompts", "--reward user.py:result:kind=equal --no-per-prompt-stats"),
    # 37: too long, and cut or dropped
    works(37, ROLLED, "dropped", "--check --max-prompt-length 28", "2 prompts, 1 dropped as too long",
          rows=LONG["ppo"]),
    works(37, ROLLED, "fits", "--max-new-tokens 3", "2 prompts, 0 dropped as too long", rows=LONG["ppo"]),
    works(37, "sft ilql", "cut", "", "1 cut", rows=spoilt(3, TEXT="b" * 40)),
    works(37, "dpo", "cut", "", "the responses of 1 cut, 0 dropped", rows=spoilt(3, TEXT="b" * 40)),
    works(37, "reward", "dropped", "", "4 pairs, 1 dropped as longer than 32", rows=spoilt(3, TEXT="b" * 40)),
    works(37, "ddpo", "cut", "", "4 prompts, 1 of them cut to 8 tokens", rows=spoilt(3, TEXT="a red circle " * 5)),
    # 39, 40: short and long
    works(39, EVERY, "empty", "", rows=every_row(prompt="")),
    works(39, "sft", "empty text", "", "1 dropped", rows=[{"text": ""}, {"text": "bc"}]),
    works(40, EVERY, "white and letters", EVALUATED, rows=different((" \t\n", "b", " ", "c"))),
    works(40, ROLLED, "megabyte", "--max-prompt-length 9", "1 dropped", slow=True, rows=spoilt(3, TEXT="b" * 2**20)),
    works(40, "sft ilql", "megabyte", "", "1 cut", slow=True, rows=spoilt(3, TEXT="b" * 2**20)),
    works(40, "dpo", "megabyte", "", "the responses of 1 cut", slow=True, rows=spoilt(3, TEXT="b" * 2**20)),
    works(40, "reward", "megabyte", "", "1 dropped as longer", slow=True, rows=spoilt(3, TEXT="b" * 2**20)),
    works(40, "ddpo", "megabyte", "", "1 of them cut to 8 tokens", slow=True, rows=spoilt(3, TEXT="b" * 2**20)),
    works(40, EVERY, "20 kilobytes", {**dict.fromkeys(EVERY.split(), ""), **dict.fromkeys(ROLLED.split(), SHORT)},
          shared=EVERY, rows=spoilt(3, TEXT="b" * 20000)),
    # 41, 42: only an end, or none
    works(41, "sft ilql", "empty", EVALUATED, rows=every_row(TEXT="")),
    works(41, "sft ilql", "end", EVALUATED, rows=every_row(TEXT="<eos>")),
    works(41, PAIRS, "empty", EVALUATED, rows=every_row(TEXT="")),
    works(41, PAIRS, "end", EVALUATED, rows=every_row(TEXT="<eos>")),
    works(42, TEXT, "at once", EVALUATED, model="ends_at_once"),
    works(42, TEXT, "never", EVALUATED, model="never_ends", shared="sft reward dpo"),
    # 43, 44: characters
    works(43, EVERY, "controls", EVALUATED, rows=different(CONTROLS)),
    works(43, EVERY, "letters", EVALUATED, shared=EVERY, rows=different(ODD_LETTERS)),
    works(44, EVERY, "unknown", CHECKED, rows=spoilt(3, TEXT="b? caf\xe9")),
    # 47, 48: pairs
    works(47, PAIRS, "an equal pair", "", "4 pairs, ", rows=spoilt(3, chosen="b", rejected="b")),
    works(47, "dpo", "equal when cut", "--max-length 3", "1 dropped as equal",
          rows=[*PAIR[:3], {"prompt": "b", "chosen": "fgh", "rejected": "fgi"}]),
    works(48, "dpo", "shared words", "", "4 pairs", rows=[{"chosen": f"b {x}", "rejected": "b d"} for x in "efgh"]),
    works(48, "reward", "no prompt", "", "4 without a prompt", rows=[{"chosen": x, "rejected": "d"} for x in "efgh"]),
    # 49: chats
    works(49, TEXT, "chats", model="chats", rows=chatting([USER, ANSWER], [USER, ANSWER])),
    works(49, ROLLED, "prompt", model="chats", rows=chatting([USER])),
    # 51: tokenizers
    works(51, TEXT, "no pad", EVALUATED, model="no_pad", shared=TEXT),  # then it is eos
    works(51, TEXT, "pad is eos", EVALUATED, model="pad_is_eos"),
    works(51, ROLLED, "judge of other words", "--reward judge"),
    # 52: files
    works(52, EVERY, "bom", CHECKED, shared=EVERY, rows=text_rows(lambda text: "\ufeff" + text)),
    works(52, EVERY, "crlf", CHECKED, shared=EVERY, rows=text_rows(lambda text: text.replace("\n", "\r\n"))),
    works(52, EVERY, "blank lines", CHECKED, shared=EVERY,
          rows=text_rows(lambda text: "\n" + text.replace("\n", "\n  \n\n"))),
    works(52, EVERY, "no newline", CHECKED, shared=EVERY, rows=text_rows(str.strip)),
    works(52, EVERY, "json", "--check --dataset a.json", shared=EVERY, a_json=lambda algo: json.dumps(ROWS[algo])),
    works(52, EVERY, "gz", "--check --dataset a.jsonl.gz", shared=EVERY,
          a_jsonl_gz=lambda algo: gzip.compress(jsonl(ROWS[algo]).encode())),
    # 53: few rows
    works(53, EVERY, "1 rows", also=[63], rows=lambda algo: ROWS[algo][:1]),  # with secrets around, as every run here
    works(53, EVERY, "5 rows", shared=EVERY, rows=spoilt(1, 5)),
    works(53, "sft reward dpo ilql", "batch", "--batch-size 3 --micro-batch-size 2"),
    # 54, 56: directories of datasets
    works(54, EVERY, "saved", "--check --dataset saved"),
    works(56, EVERY, "shards", "--check --dataset shards", shared=EVERY),
    # 57: flags
    works(57, EVERY, "yaml", "--config my.yaml --seed 5", shared=EVERY,
          my_yaml="lr: 1e-3\nseed: 3\nadam-betas: [0.8, 0.9]\nmax_grad_norm: 0\ndeterministic: false\ntrack: off\n"),
    works(57, EVERY, "seed below 0", "--check --seed -1", shared=EVERY),
    works(57, EVERY, "large seed", "--check --seed 99999999999999999999999", shared=EVERY),
    # 58: names
    works(58, EVERY, "odd", f"--run-dir {shlex.quote(ODD_NAME)}", shared=EVERY),
    # 64: bfloat16
    works(64, EVERY, "bf16", "--mixed-precision bf16"),
    works(64, EVERY, "bfloat16", "--dtype bfloat16 --lora-r 2"),
    # 72: one step
    works(72, "ddpo", "one step", "--num-inference-steps 1", "images of 1 steps, 1 of them with noise"),
    works(72, "ddpo", "no guidance", "--guidance-scale 1 --eta 0.01"),
    # 73: ilql
    works(73, "ilql", "equal", "", "warning: all returns are equal", rows=every_row(reward=0.5)),
    works(73, "ilql", "zero", "", "warning: all returns are equal", rows=every_row(reward=0)),
    works(73, "ilql", "one action", "", "actions of a row: 1 to 1", rows=every_row(completion="")),
    # 74: reward
    works(74, "reward", "ties", "", "4 pairs, 0 dropped as longer than 32, 0 as equal; 4 without",
          rows=[{"chosen": x, "rejected": y, "margin": 0.0} for x, y in zip("efgh", "fehg", strict=True)]),
    works(74, "reward", "single", "--batch-size 1", rows=lambda algo: PAIR[:1]),
    works(74, "reward", "odd batch", "--batch-size 3 --micro-batch-size 2", rows=lambda algo: PAIR[:3]),
    # 75: the coefficient of the KL penalty
    works(75, "ppo", "up", "--kl-target 1e-30 --kl-horizon 4 --total-episodes 40 --lr 0.3"),
    works(75, "ppo", "down", "--kl-target 1e30 --kl-horizon 4 --total-episodes 40"),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "row"), rows_of(WORKS))
def test_works(algo, row, command, models, here, monkeypatch, fresh_accelerator):
    """A finished run with finite metrics, or a check that passes and writes nothing; what it prints and writes is text
    without control characters."""
    fill(here, models, algo, row.model, row.files)
    surroundings(here)
    if row.name == "judge of other words":
        others(here, "judge")
        others(here, "reference")
        for file in (here / "judge").glob("*token*"):
            file.unlink()
        for file in (here / "reference").glob("*token*"):
            shutil.copy(file, here / "judge")
    for name, shards in (("saved", 1), ("shards", 3)):
        if row.name == name:
            datasets.Dataset.from_list(ROWS[algo]).save_to_disk(here / name, num_shards=shards)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "CANARYCANARYCANARY")
    flags = flags_of(row, algo)
    code, out, err = command(algo, flags)
    assert code == 0, f"exit code {code}\n{out}{err}"
    missing = [word for word in words(row, algo) if word not in out]
    assert not missing, f"{missing} is not said\n{out}"
    assert not [c for c in out + err if not (c.isprintable() or c in "\n\r")], "control characters on the terminal"
    assert "CANARY" not in out + err
    if "--check" in flags:
        assert "check passed" in out
        return unchanged(here, command.before)
    name = flags.split("--run-dir ")[-1] if "--run-dir" in flags else "run"
    run = here / shlex.split(name)[0]
    records = finished(run)
    assert (run / "samples.jsonl").exists() or "--eval-every 1" not in flags or algo == "sft"
    for path in run.rglob("*"):
        assert not path.is_file() or b"CANARY" not in path.read_bytes()
        if path.suffix == ".jsonl":
            assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    if row.case == 75:
        coefficients = [record["objective/kl_coef"] for record in records if "objective/kl_coef" in record]
        assert coefficients and min(coefficients) > 0
    if row.name == "yaml":
        given = yaml.safe_load((run / "config.yaml").read_text())
        expected = (1e-3, 5, [0.8, 0.9], 0.0, False)
        assert tuple(given[x] for x in ("lr", "seed", "adam_betas", "max_grad_norm", "deterministic")) == expected


# ---- Faults that a table does not hold -------------------------------------------------------------------------------

CALLS = {  # what makes a script call a function of the user in a run
    **dict.fromkeys(SCORED.split(), "--reward user.py:{}reward"),
    **{algo: f"{MEASURE[algo].format('{}metric')}" for algo in ("sft", "dpo", "ilql")},
}


def each(case, algos, ways=(), slow=""):
    """The scripts as the parameter algo and, where there are ways, one of these as `at`. The default run has sft in
    every way and the other scripts in the first, but for those in slow."""
    parameters = []
    for algo in algos.split():
        for way in ways or [None]:
            marks = [pytest.mark.case(case)]
            if algo in slow.split() or (way in ways[1:] and algo != "sft"):
                marks.append(pytest.mark.slow)
            values = [algo, way] if ways else [algo]
            parameters.append(pytest.param(*values, marks=marks))
    return pytest.mark.parametrize(("algo", "at") if ways else "algo", parameters)


@each(30, MEASURED)
def test_a_function_that_hangs(algo, command, here):
    """There is no timeout: a judge may take its time. Ctrl-C ends at once what has no step yet, inside the function,
    leaves nothing, and the handlers are given back."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    flags = CALLS[algo].replace("{}reward", "hangs").replace("{}metric", "hangs")
    code, _, err = command(algo, f"{flags} --eval-every 1")
    assert (code, err) == (130, "")
    assert not Path("run").exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@each(31, MEASURED, slow="ddpo")  # test_ddpo_runs.py has it with images
def test_a_function_that_changes_its_inputs_changes_nothing_else(algo, command, here):
    for name in ("", "rude_"):
        flags = f"{CALLS[algo].format(name)} --eval-every 1 --run-dir run{name}"
        code, _, err = command(algo, flags, files={"rows.jsonl": every_row(tags=["x", ["y"]])})
        assert code == 0, err
    assert finished("run") == finished("runrude_")


@each(33, EVERY, slow="ddpo")  # test_ddpo_runs.py has three
def test_a_loss_that_is_not_finite_stops_before_the_step(algo, command, here, monkeypatch):
    """That of the second step; the checkpoint of the first is finite, and nothing is exported."""
    calls, backward = [], accelerate.Accelerator.backward

    def poisoned(self, loss, **options):
        calls.append(1)
        return backward(self, loss * (NAN if len(calls) == 2 else 1.0), **options)

    monkeypatch.setattr(accelerate.Accelerator, "backward", poisoned)
    with pytest.raises(FloatingPointError, match="step 2: .*nan.*the last checkpoint is intact"):
        command(algo, "--save-every 1 --eval-every 0" + " --num-epochs 2" * (algo == "ddpo"))
    (checkpoint,) = Path("run/checkpoints").iterdir()
    assert checkpoint.name == "step_00000001" and [record["step"] for record in log()] == [1]
    for file in checkpoint.glob("*.safetensors"):
        assert all(weight.isfinite().all() for weight in safetensors.torch.load_file(file).values())
    assert not Path("run/hf_model").exists()


@each(34, EVERY)
def test_fp16_of_the_launcher(algo, command, here, monkeypatch, fresh_accelerator):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    code, _, err = command(algo)
    assert code == 2 and err == "error: use --mixed-precision bf16 or no: fp16 is not offered\n"
    unchanged(here, command.before)


@each(35, SAMPLED)
def test_logits_that_are_not_finite_while_sampling(algo, command, here):
    """Greedy decoding by argmax would take them for token 0."""
    flags = f"{SAMPLE[algo]} --eval-every 1 --eval-temperature 0"
    if algo == "ilql":
        flags += " --top-k 0"
    with pytest.raises(FloatingPointError, match="logits are not finite at response token 1|not finite"):
        command(algo, flags, "overflows")
    assert not Path("run/metrics.jsonl").exists() and not Path("run/hf_model").exists()


@each(61, EVERY, ["second log", "start"], slow="ppo ddpo")  # which tests of their own runs have
def test_a_tracker_that_fails(algo, at, command, here, monkeypatch):
    """A warning, once; the metrics are those of a run without it."""
    calls = []

    def fail(*args, **options):
        calls.append(1)
        if at == "start" or len(calls) == 2:
            raise ConnectionError("no network")

    monkeypatch.setattr(accelerate.tracking, "filter_trackers", lambda names, folder: names)
    monkeypatch.setattr(accelerate.Accelerator, "init_trackers", fail if at == "start" else lambda *a, **o: None)
    monkeypatch.setattr(accelerate.Accelerator, "log", fail)
    assert command(algo)[0] == 0
    code, out, err = command(algo, "--track wandb --run-dir tracked")
    assert code == 0 and out.count("warning: --track wandb is off from here on: no network") == 1, err
    assert len(calls) == (1 if at == "start" else 2) and finished("tracked") == finished("run")


@each(62, EVERY, ["upload_folder", "create_repo"])
def test_an_upload_that_fails(algo, at, command, here, monkeypatch):
    """The model is whole, and the same command uploads it."""
    calls = []

    def fail(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("401\nUnauthorized")

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, fail if name == at else lambda *a, **o: None)
    flags = "--push-to-hub org/name --eval-every 0"
    code, _, err = command(algo, flags)
    expected = "--push-to-hub org/name failed (401 Unauthorized); the model is whole in run/hf_model"
    assert code == 2 and err == f"error: {expected}\n"
    exported = {path: path.read_bytes() for path in Path("run/hf_model").rglob("*") if path.is_file()}
    assert any(path.suffix == ".safetensors" for path in exported) and not Path("run/README.md").exists()
    code, _, err = command(algo, flags)
    assert code == 0 and len(calls) == 2 and finished(), err


@each(28, MEASURED, slow="grpo dpo ilql ddpo")  # sft: in the metric; ppo: in the reward
def test_after_a_bad_result_the_mended_command_runs(algo, command, here):
    """Without --check a function is first called when the run directory is there: it is removed again."""
    name = (
        "--reward user.py:result:kind=short" if algo in SCORED.split() else MEASURE[algo].format("measure:kind=short")
    )
    code, _, err = command(algo, f"{name} --eval-every 1")
    assert code == 2 and err.startswith("error: user.py:") and len(err.splitlines()) == 1, err
    assert not Path("run").exists()
    code, _, err = command(algo, "--eval-every 1")
    assert code == 0 and finished(), err


@each(44, TEXT)
def test_a_character_that_the_tokenizer_has_no_token_for(algo, command, here):
    """A tokenizer of words without an unknown one refuses the text itself, before anything is written."""
    code, _, err = command(algo, "", "no_unk", {"rows.jsonl": spoilt(3, TEXT="b?")})
    assert code == 1 and "Missing [UNK] token from the vocabulary" in err
    unchanged(here, command.before)


@each(75, "ppo")
def test_a_coefficient_that_overflows_stops_the_run(algo, command, here):
    with pytest.raises(FloatingPointError, match="step [12]: gradient norm .*; the last checkpoint is intact"):
        command(algo, "--kl-coef 1e30 --kl-target 6 --kl-horizon 4 --lr 0.3")
    assert not Path("run/hf_model").exists()


# ---- Processes -------------------------------------------------------------------------------------------------------

DRIVER = """
import json, runpy, sys
jobs, results = json.loads(sys.argv[1]), {}
for name, (script, folder, argv) in jobs.items():
    import os
    os.chdir(folder)
    sys.argv, code = [script, *argv], 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        code = repr(error)
    results[name] = code
    with open(os.environ["RESULTS"], "w") as file:
        json.dump(results, file)
"""


def process(folder, jobs, closed, **env):
    """{name: exit code} of scripts that run one after another in a process; closed: nobody reads its output."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    env = kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RESULTS": str(folder / "results.json")} | env
    argv = [sys.executable, "-c", DRIVER, json.dumps(jobs)]
    with open(folder / "err.txt", "w") as err:
        running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, env=env, cwd="/")
        if closed:
            running.stdout.readline()
            running.stdout.close()
        else:
            running.communicate(timeout=300)
        running.wait(timeout=300)
    return json.loads((folder / "results.json").read_text()), (folder / "err.txt").read_text()


def jobs_of(folder, models, scripts):
    jobs = {}
    for algo in SCRIPTS:
        (folder / algo).mkdir()
        fill(folder / algo, models, algo)
        jobs[algo] = str(scripts / f"{algo}.py"), str(folder / algo), BASE[algo]
    return jobs


@pytest.fixture(scope="module")
def unread(tmp_path_factory, models):
    """The scripts with an output that is closed after its first line, and a dumb terminal."""
    folder = tmp_path_factory.mktemp("unread")
    env = {"TERM": "dumb", "HOME": str(folder), "COLUMNS": "9"}
    return folder, *process(folder, jobs_of(folder, models, ROOT / "algos"), True, **env)


@pytest.fixture(scope="module")
def homeless(tmp_path_factory, models):
    """Copies of the scripts under another name and in another place, from / and without HOME; the cache of the hub can
    be neither read nor made."""
    folder = tmp_path_factory.mktemp("homeless")
    shutil.copytree(ROOT / "common", folder / "code/common", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "code/algos/mine").mkdir(parents=True)
    jobs = jobs_of(folder, models, folder / "code/algos")
    for algo in SCRIPTS:
        shutil.copy(ROOT / f"algos/{algo}.py", folder / f"code/algos/my_{algo}.py")
        words = [str(folder / algo / word) if word in ("model", "rows.jsonl", "run") else word for word in BASE[algo]]
        words = [word.replace("user.py", str(folder / algo / "user.py")) for word in words]
        jobs[algo] = str(folder / f"code/algos/my_{algo}.py"), "/", words
    return folder, *process(folder, jobs, False, HF_HOME="/proc/nope")


@pytest.mark.slow
@each(69, EVERY)
def test_nobody_reads_the_output(algo, unread):
    folder, codes, err = unread
    assert codes[algo] == 0 and "Traceback" not in err, err
    finished(folder / algo / "run")


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.case(case)) for case in (70, 71)])
@pytest.mark.parametrize("algo", SCRIPTS)
def test_no_home_and_another_place(algo, case, homeless):
    folder, codes, err = homeless
    assert codes[algo] == 0 and "Traceback" not in err, err
    finished(folder / algo / "run")
    if case == 71:
        assert f"my_{algo}.py" in json.loads((folder / algo / "run/env.json").read_text())["command"]
        assert not list((folder / "code").rglob("runs"))


@pytest.mark.case(69, "ppo")
def test_a_pipe_into_head(models, here):
    """Its exit code is that of a run whose output was read. The table of samples is what fails most easily."""
    fill(here, models, "ppo")
    argv = [sys.executable, str(ROOT / "algos/ppo.py"), *BASE["ppo"], "--eval-every", "1"]
    env = os.environ | {"TERM": "dumb"}
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    running.stdout.readline()
    running.stdout.close()
    err = running.stderr.read().decode()
    assert running.wait(timeout=120) == 0 and not err, err
    finished()
