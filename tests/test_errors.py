"""Bad input is one sentence and exit code 2, before anything is written: `python -m pytest tests/test_errors.py`

Each row of a table is a mistake: the script, flags and files, and what the sentence must say. The scripts run in this
process, through the same `cli` as on the command line; a few rows are processes of their own.
"""

import json
import shutil
import signal
import sys
import traceback

import pytest
import safetensors.torch
import torch
from harness import ROOT, files, flags
from matplotlib.figure import Figure

from algos import grpo, ppo, sft
from common import checkpoint
from common.cli import InputError, cli, from_task
from common.functions import call_reward, load_function

SCRIPTS = {"ppo": ppo, "grpo": grpo, "sft": sft}
ROWS = [{"prompt": letter, "shift": i} for i, letter in enumerate("bcde")]
BASE = {
    "ppo": """--model model --dataset rows.jsonl --eval-dataset rows.jsonl --reward user.py:reward
    --metric user.py:metric --total-episodes 4 --rollout-batch-size 4 --batch-size 4 --ppo-epochs 1
    --eval-every 0 --save-every 0
    --max-new-tokens 4 --threads 1 --run-dir run""".split(),
    "grpo": """--model model --dataset rows.jsonl --eval-dataset rows.jsonl --reward user.py:reward
    --metric user.py:metric --total-episodes 4 --rollout-batch-size 4 --batch-size 4 --group-size 2 --eval-every 0
    --save-every 0 --max-new-tokens 4 --threads 1 --run-dir run""".split(),
    "sft": """--model model --dataset texts.jsonl --eval-dataset None --eval-prompts rows.jsonl --metric user.py:metric
    --total-steps 1 --batch-size 4 --eval-every 0 --save-every 0 --max-new-tokens 4 --threads 1
    --run-dir run""".split(),
}
USER_FILE = """
import numpy as np
import torch


def reward(samples, **columns):
    return [len(sample) / 10 for sample in samples]


def metric(samples, **columns):
    return {"length": [len(sample) for sample in samples]}


def no_such_column(samples, answer):
    return [0.0] * len(samples)


def raises(samples, **columns):
    return [sample.index("?") for sample in samples]


def rows():
    return [{"prompt": "b"}, 5]


def broken_rows():
    return {}["nothing"]


def no_rows():
    return None


RESULTS = {  # of a reward, for four samples
    "short": lambda n, ids: [1.0] * (n - 1),
    "pairs": lambda n, ids: [[1.0] * (len(row) + 1) for row in ids],
    "a_nan": lambda n, ids: [1.0, float("nan"), 1.0, 1.0],
    "a_dense_nan": lambda n, ids: [[0.0] * (len(row) - 1) + [float("nan")] for row in ids],
    "floats": lambda n, ids: [1.0, 0.0, 1.0, 1.0],
    "integers": lambda n, ids: [1, 0, 1, 1],
    "booleans": lambda n, ids: [True, False, True, True],
    "a_tuple": lambda n, ids: (1.0, 0.0, 1.0, 1.0),
    "numpy_array": lambda n, ids: np.array([1, 0, 1, 1]),
    "numpy_scalars": lambda n, ids: list(np.array([1, 0, 1, 1], dtype=np.float32)),
    "torch_tensor": lambda n, ids: torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True),
    "torch_scalars": lambda n, ids: list(torch.tensor([1.0, 0.0, 1.0, 1.0])),
    "dense": lambda n, ids: [[0.0] * (len(row) - 1) + [float(i != 1)] for i, row in enumerate(ids)],
    "dense_arrays": lambda n, ids: [np.array([0] * (len(row) - 1) + [i != 1]) for i, row in enumerate(ids)],
    "mixed": lambda n, ids: [1.0, 0.0, [0.0] * (len(ids[2]) - 1) + [1.0], 1.0],
}


def result(name, samples, output_ids):
    return RESULTS[name](len(samples), output_ids)


for name in RESULTS:
    exec(f"def {name}(samples, output_ids, **columns):\\n    return result({name!r}, samples, output_ids)")
"""


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a GPT-2 of 2 layers and the random walks tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.tasks import randomwalks

    path, tokenizer = tmp_path_factory.mktemp("tiny") / "model", randomwalks.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=2, n_embd=12, n_head=2, n_positions=32, **special)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def here(model, tmp_path, monkeypatch):
    """An empty working directory with model, rows and functions; what a run changes in the process is put back."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    (tmp_path / "texts.jsonl").write_text(jsonl({"text": text} for text in ("bcda", "efa", "ghijka", "la")))
    (tmp_path / "user.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(checkpoint, "fsync", lambda path: None)  # no power cut is tested here
    monkeypatch.setattr(Figure, "savefig", lambda *args, **options: None)  # half of the time of a run
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def command(monkeypatch, capfd):
    """command(algo, *flags) -> (exit code, what it printed on stdout, on stderr), as if typed."""

    def run(algo, *more):
        monkeypatch.setattr(sys, "argv", [f"algos/{algo}.py", *BASE[algo], *map(str, more)])
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


@pytest.fixture
def refused(command, here):
    """refused(algo, flags, *fragments): exit code 2, a sentence with these fragments, nothing written; where the user's
    own code has failed, exit code 1 and its traceback."""

    def run(algo, more, *fragments, user_code=False):
        before = sorted(here.rglob("*"))
        code, out, err = command(algo, *more)
        assert code == (1 if user_code else 2), f"exit code {code}\n{out}{err}"
        assert [fragment for fragment in fragments if fragment not in err] == [], err
        assert user_code or "Traceback" not in err, err
        assert [p for p in sorted(here.rglob("*")) if p not in before and "__pycache__" not in p.parts] == []
        return err

    return run


def one_sentence(err):
    return err.startswith("error: ") and len(err.strip().splitlines()) == 1


def test_the_good_commands_run(command, here):
    """Otherwise the tables below could be right by accident."""
    for algo in SCRIPTS:
        code, out, err = command(algo)
        assert code == 0 and (here / "run/README.md").exists(), err
        shutil.rmtree(here / "run")


# ---- Flags -----------------------------------------------------------------------------------------------------------

FLAGS = [
    ("ppo", "--total-episodes 6", "--total-episodes 6 must be a multiple of --rollout-batch-size 4"),
    ("ppo", "--rollout-batch-size 0", "--rollout-batch-size 0 must be at least 1"),
    ("ppo", "--ppo-epochs 0", "--ppo-epochs 0 must be at least 1"),
    ("ppo", "--max-new-tokens 0", "--max-new-tokens 0 must be at least 1"),
    ("ppo", "--micro-batch-size 0", "--micro-batch-size 0 must be at least 1"),
    ("ppo", "--temperature 0", "--temperature 0.0 must be a positive number"),
    ("ppo", "--eval-temperature -0.5", "--eval-temperature -0.5 must be 0 or a positive number"),
    ("ppo", "--gamma 1.5", "--gamma 1.5 must be in [0, 1]"),
    ("ppo", "--lam nan", "--lam nan must be in [0, 1]"),
    ("ppo", "--top-p 0", "--top-p 0.0 must be"),
    ("ppo", "--top-k -1", "--top-k -1 must be at least 0"),
    ("ppo", "--kl-coef inf", "--kl-coef inf must be"),
    ("ppo", "--cliprange -0.2", "--cliprange -0.2 must be"),
    ("ppo", "--kl-target nan", "--kl-target nan must be"),
    ("ppo", "--kl-target inf", "--kl-target inf must be"),
    ("ppo", "--kl-target 6 --kl-horizon 3", "--kl-horizon"),
    ("ppo", "--adam-betas 1.5 0.9", "--adam-betas"),
    ("ppo", "--adam-betas 0.9 -1", "--adam-betas"),
    ("ppo", "--threads -1", "--threads -1"),
    ("ppo", "--decay-steps -4", "--decay-steps -4"),
    ("ppo", "--max-prompt-length 0", "--max-prompt-length 0"),
    ("ppo", "--adam-eps -1", "--adam-eps -1.0 must be"),
    ("sft", "--total-steps 0", "--total-steps 0 must be"),
    ("sft", "--total-steps -5", "--total-steps -5 must be"),
    ("sft", "--total-steps None --epochs nan", "--epochs nan must be"),
    ("sft", "--total-steps None --epochs -1", "--epochs -1.0 must be"),
    ("sft", "--top-p 0", "--top-p 0.0 must be"),
    ("sft", "--max-length 0", "--max-length 0 must be at least 1"),
    ("sft", "--max-length 1", "--max-length 1"),
    ("sft", "--adam-betas 0.9 1.0", "--adam-betas"),
    ("sft", "--threads -1", "--threads -1"),
    ("sft", "--weight-decay -1", "--weight-decay -1.0 must be"),
    ("sft", "--eval-temperature nan", "--eval-temperature nan must be"),
    ("sft", "--num-layers-unfrozen 0", "--num-layers-unfrozen 0 leaves nothing to train"),
    ("sft", "--num-layers-unfrozen -2", "--num-layers-unfrozen -2 must be"),
    ("sft", "--num-layers-unfrozen 3", "--num-layers-unfrozen 3: the model has 2 layers"),
    ("ppo", "--num-layers-unfrozen -2", "--num-layers-unfrozen -2 must be"),
    ("ppo", "--num-layers-unfrozen 3", "--num-layers-unfrozen 3: the model has 2 layers"),
    ("sft", "--packing --attn-implementation flash_attention_2", "cannot be loaded: FlashAttention2"),
    ("ppo", "--score-clip -1", "--score-clip -1.0 must be"),
    ("ppo", "--missing-eos-penalty nan", "--missing-eos-penalty nan must be"),
    ("ppo", "--early-stop-kl -1", "--early-stop-kl -1.0 must be"),
    ("ppo", "--ratio-threshold inf", "--ratio-threshold inf must be"),
    ("ppo", "--min-length-limit 0", "--min-length-limit 0 must be at least 1"),
    ("ppo", "--min-length-limit 5", "--min-length-limit 5 must be at most --max-new-tokens"),
    (
        "grpo",
        "--group-size 1",
        "--group-size 1 must be at least 2: a response is compared with the others of its group",
    ),
    ("grpo", "--group-size 0", "--group-size 0 must be at least 1"),
    ("grpo", "--group-size 3", "--rollout-batch-size 4 must be a multiple of --group-size 3"),
    ("grpo", "--batch-size 3", "--rollout-batch-size 4 must be a multiple of --batch-size 3"),
    ("grpo", "--total-episodes 6", "--total-episodes 6 must be a multiple of --rollout-batch-size 4"),
    ("grpo", "--ppo-epochs 0", "--ppo-epochs 0 must be at least 1"),
    ("grpo", "--cliprange nan", "--cliprange nan must be"),
    ("grpo", "--cliprange-high -0.28", "--cliprange-high -0.28 must be 0 or a positive number"),
    ("grpo", "--kl-coef -0.1", "--kl-coef -0.1 must be 0 or a positive number"),
    ("grpo", "--kl-coef 0 --ref-model model", "--ref-model needs a --kl-coef above 0"),
    ("grpo", "--temperature 0", "--temperature 0.0 must be a positive number"),
    ("grpo", "--num-layers-unfrozen 0", "--num-layers-unfrozen 0 leaves nothing to train"),
    ("grpo", "--num-layers-unfrozen 3", "--num-layers-unfrozen 3: the model has 2 layers"),
]


@pytest.mark.case(57)
@pytest.mark.parametrize(("algo", "flags", "sentence"), FLAGS, ids=lambda x: x[:40])
def test_a_flag_out_of_range(algo, flags, sentence, refused):
    assert one_sentence(refused(algo, flags.split(), sentence))


def test_all_problems_of_a_command_are_told_at_once(refused):
    flags = (
        "--lr -1 --batch-size 0 --kl-coef nan --gamma 2 --save-every -1 --temperature inf --total-episodes 6".split()
    )
    err = refused("ppo", flags, "--lr -1.0 must", "--batch-size 0 must", "--kl-coef nan must", "--gamma 2.0 must")
    assert err.startswith("error: 7 problems:\n  - ") and len(err.strip().splitlines()) == 8
    err = refused(
        "sft", "--lr 0 --batch-size 0 --top-p 7 --total-steps 0".split(), "--lr 0.0", "--batch-size 0", "--top-p"
    )
    assert "--total-steps 0" in err


TYPED = [
    ("ppo", "--batch-sise 4", ["Unrecognized", "--batch-sise", "--batch-size INT"]),
    ("ppo", "--kl-coeff 0.1", ["--kl-coeff", "--kl-coef FLOAT"]),
    ("sft", "--kl-coef 0.1", ["Unrecognized", "--kl-coef"]),
    ("sft", "--deterministic True", ["Unrecognized", "True"]),
    ("ppo", "--kl-kind k9", ["'k9'", "--kl-kind", "'k3'"]),
    ("ppo", "--adam-betas 0.9", ["--adam-betas", "2"]),
    ("grpo", "--advantage-kind median", ["'median'", "--advantage-kind", "'loo'"]),
    ("grpo", "--ratio-level word", ["'word'", "--ratio-level", "'sequence'"]),
    ("grpo", "--loss-mean none", ["'none'", "--loss-mean", "'constant'"]),
    ("grpo", "--vf-coef 0.1", ["Unrecognized", "--vf-coef"]),
]


@pytest.mark.case(57)
@pytest.mark.parametrize(("algo", "flags", "fragments"), TYPED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_flag_of_the_wrong_type_or_name(algo, flags, fragments, refused):
    refused(algo, flags.split(), *fragments)


def test_from_python_bad_flags_raise(here):
    with pytest.raises(InputError, match=r"--lr -1 must be a positive number"):
        from_task(ppo.Args, ppo.TASK, lr=-1)
    with pytest.raises(InputError, match="holds no rows"):
        sft.main(sft.Args(model="model", dataset=[], metric=None, run_dir="run"))
    assert not (here / "run").exists()


# ---- Configuration files ---------------------------------------------------------------------------------------------

CONFIGS = [
    ("kl-coeff: 0.1", ["config.yaml", "Unrecognized", "--kl-coeff", "--kl-coef FLOAT"]),
    ("learning: 1\nlr: 1", ["config.yaml", "Unrecognized", "--learning"]),
    ("lr: 0.1\nseed: 3\nlr: 0.2", ["lr is given twice"]),
    ("batch-size: 4\nbatch_size: 8", ["batch_size is given twice"]),
    ("\tlr: 1", ["config.yaml cannot be read"]),
    ("lr: fast", ["--lr", "'fast'"]),
    ("lr: -1e-3", ["--lr -0.001 must be a positive number"]),
    ("reward: {a: 1}", ["--reward"]),
]


@pytest.mark.case(57, "ppo")
@pytest.mark.parametrize(("text", "fragments"), CONFIGS, ids=lambda x: repr(x)[:30])
def test_a_bad_configuration_file(text, fragments, refused, here, monkeypatch):
    (here / "config.yaml").write_text(text)
    flags = BASE["ppo"][:]
    del flags[flags.index("--reward") :][:2]
    monkeypatch.setitem(BASE, "ppo", [word for word in flags if word not in ("--reward", "user.py:reward")])
    refused("ppo", ["--config", "config.yaml"], *fragments)


def test_a_missing_configuration_file(refused):
    assert one_sentence(refused("ppo", ["--config", "nope.yaml"], "--config nope.yaml"))
    refused("ppo", ["--config"], "--config")


@pytest.mark.case(57, "ppo")
def test_a_configuration_file_means_what_the_flags_mean(command, here):
    """1e-3 is a number (PyYAML alone reads a string); off and no are words (PyYAML alone reads False)."""
    text = "lr: 1e-3\nadam_betas: [0.8, 0.9]\nkl-target: null\ndeterministic: false\nseed: 3\n"
    (here / "config.yaml").write_text(text + "mixed_precision: no\ntrack: off\n")
    code, out, err = command("ppo", "--config", "config.yaml", "--seed", "5")
    assert code == 0, err
    flags = json.loads((here / "run/env.json").read_text())["flags"]
    assert (flags["lr"], flags["adam_betas"], flags["kl_target"], flags["seed"]) == (1e-3, [0.8, 0.9], None, 5)


# ---- Rows ------------------------------------------------------------------------------------------------------------

FILES = [
    ("ppo", None, ["--dataset bad.jsonl cannot be loaded: Unable to find "]),
    ("sft", None, ["--dataset bad.jsonl cannot be loaded: Unable to find "]),
    ("ppo", "", ["--dataset bad.jsonl holds no rows"]),
    ("sft", "\n  \n", ["--dataset bad.jsonl holds no rows"]),
    ("ppo", '{"prompt": "b"}\n\n{"prompt": "c"\n', ["bad.jsonl cannot be loaded: line 3", "not valid JSON"]),
    ("sft", '{"text": "b"}\n{"text": "c"},\n', ["bad.jsonl cannot be loaded: line 2", "not valid JSON"]),
    ("ppo", b'{"prompt": "b"}\n{"prompt": "caf\xe9"}\n', ["bad.jsonl cannot be loaded: line 2", "utf-8"]),
    ("ppo", "5\n", ["row 1", "5"]),
    ("ppo", '{"prompt": "b"}\n{"prompt": "b", "x": 1}\n', ["row 2", "see x"]),
    ("ppo", '{"text": "b"}\n', ["has the columns text; expected prompt"]),
    ("ppo", '{"Prompt": "b"}\n', ["has the columns Prompt; expected prompt"]),
    ("sft", '{"prompt": "b"}\n', ["has the columns prompt; expected completion"]),
    ("sft", '{"completion": "b"}\n', ["has the columns completion; expected prompt"]),
    ("sft", '{"body": "b"}\n', ["has the columns body; expected text, prompt and completion"]),
    ("sft", '{"text": ""}\n', ["no row has a label"]),
]
for value in (None, 5, 1.5, True, {"role": "user"}, ["b"]):
    FILES.append(("sft", jsonl([{"text": "b"}, {"text": value}]), ["row 2", "'text'", repr(value)]))


@pytest.mark.case(52)
@pytest.mark.parametrize(("algo", "content", "fragments"), FILES, ids=lambda x: repr(x)[:40])
def test_a_bad_file_of_rows(algo, content, fragments, refused, here):
    if content is not None:
        (here / "bad.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    err = refused(algo, ["--dataset", "bad.jsonl"], "--dataset", *fragments)
    assert one_sentence(err)
    if algo == "ppo" and content is not None:
        fragments = [fragment.replace("--dataset", "--eval-dataset") for fragment in fragments]
        refused("ppo", ["--eval-dataset", "bad.jsonl"], "--eval-dataset", *fragments)


GOOD_FILES = [
    ("bom.jsonl", '\ufeff{"prompt": "b"}\n{"prompt": "c"}\n'),
    ("crlf.jsonl", '{"prompt": "b"}\r\n{"prompt": "c"}\r\n'),
    ("blank.jsonl", '\n{"prompt": "b"}\n\n  \n{"prompt": "c"}\n\n'),
    ("no_newline.jsonl", '{"prompt": "b"}\n{"prompt": "c"}'),
    ("separators.jsonl", '{"prompt": "b\u2028c"}\n{"prompt": "c\x85\x0c"}\n'),  # line ends to str.splitlines only
    ("unknown.jsonl", '{"prompt": "Hello \U0001f600"}\n{"prompt": "\\u0000 \u05d0\u0301"}\n'),  # out of vocabulary
    ("empty.jsonl", '{"prompt": ""}\n{"prompt": " "}\n'),
    ("list.json", '[{"prompt": "b"}, {"prompt": "c"}]'),
    ("table.csv", "prompt\nb\nc\n"),
]


@pytest.mark.parametrize(("name", "content"), GOOD_FILES, ids=lambda x: x[:16])
def test_a_good_file_of_rows(name, content, command, here):
    (here / name).write_text(content, encoding="utf-8", newline="")
    code, out, err = command("ppo", "--dataset", name, "--check")
    assert code == 0 and "data: 2 prompts, 0 dropped" in out, err


def test_text_files(command, here):
    (here / "lines.txt").write_text("bcda\nefa\n")
    code, out, err = command("sft", "--dataset", "lines.txt", "--check")
    assert code == 0 and "2 rows" in out, err


@pytest.mark.case(43)
@pytest.mark.parametrize("algo", ["ppo", "sft"])
def test_terminal_escapes_of_a_row_are_written_out(algo, variant, command, here):
    """Neither a prompt nor the letters of a model reach the terminal as control characters."""
    rows = [{"prompt": "\x1b[2Jb", "completion": "\x07c"}]
    (here / "rows.jsonl").write_text(jsonl(rows))
    code, out, err = command(algo, "--dataset", "rows.jsonl", "--eval-every", "1")
    assert code == 0 and not any(c in out + err for c in "\x1b\x07\x00"), err
    for path in (here / "run").glob("*.jsonl"):
        assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SMALL = {  # rows of sft, whether the run has a loss
    "one row": [{"text": "b"}],
    "one letter each": [{"text": letter} for letter in "bcd"],
    "whitespace": [{"text": " \t\n"}, {"text": "b"}],
    "only an end token": [{"prompt": "b", "completion": ""}, {"prompt": "c", "completion": "<eos>"}],
    "a megabyte": [{"text": "abcdefgh" * 2**17}, {"text": "b"}],
    "a prompt of 32 kilobytes": [{"prompt": "a" * 2**15, "completion": "b"}, {"prompt": "c", "completion": "d"}],
}


@pytest.mark.case(40, "sft")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "a megabyte")) for x in SMALL])
def test_rows_of_odd_sizes(name, command, here):
    """Fewer rows than a batch are repeated; what is cut or dropped is counted."""
    (here / "odd.jsonl").write_text(jsonl(SMALL[name]))
    code, out, err = command("sft", "--dataset", "odd.jsonl", "--total-steps", "3", "--packing")
    assert code == 0, err
    assert ("1 cut at the end" in out) == ("byte" in name) and ("1 dropped" in out) == ("prompt" in name)
    for record in map(json.loads, (here / "run/metrics.jsonl").read_text().splitlines()):
        assert record["train/loss"] > 0


@pytest.mark.case(53, "ppo")
@pytest.mark.parametrize("prompts", [["b"], ["b", "c"], [" ", "\n"]], ids=repr)
def test_fewer_prompts_than_a_rollout(prompts, command, here):
    (here / "few.jsonl").write_text(jsonl({"prompt": prompt} for prompt in prompts))
    code, _, err = command("ppo", "--dataset", "few.jsonl", "--eval-dataset", "few.jsonl", "--eval-every", "1")
    assert code == 0, err


@pytest.mark.parametrize("size", [2**15, pytest.param(2**20, marks=pytest.mark.slow)])
def test_a_prompt_of_up_to_a_megabyte(size, refused, command, here):
    (here / "long.jsonl").write_text(jsonl([{"prompt": "b"}, {"prompt": "b" * size}]))
    assert one_sentence(refused("ppo", ["--dataset", "long.jsonl"], "--dataset row 2", f"{size} tokens"))
    code, out, err = command("ppo", "--dataset", "long.jsonl", "--max-prompt-length", "9", "--check")
    assert code == 0 and "2 prompts, 1 dropped" in out, err


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
USER = {"role": "user", "content": "b"}
CHATS = [  # what stands in row 2, what the sentence says
    ([], "a chat is a list of"),
    (None, "found None"),
    ([{"role": "robot", "content": "b"}], "'robot'"),
    ([{"role": "user", "content": None}], "None"),
    ([{"role": "user"}], "content"),
    (["b"], "found 'b'"),
    ([USER, {"role": "user", "content": 5}], "5"),
]


@pytest.mark.case(49, "ppo sft")
@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize(("chat", "sentence"), CHATS, ids=lambda x: repr(x)[:40])
def test_a_bad_chat(chat, sentence, column, variant, refused, here):
    """Of sft, where the assistant must have the last word, and prompts of both scripts."""
    flags = variant(tokenizer=lambda t: setattr(t, "chat_template", TEMPLATE))
    good = [USER, {"role": "assistant", "content": "c"}] if column == "messages" else [USER]
    (here / "chats.jsonl").write_text(jsonl([{column: good}, {column: chat}]))
    flag = {"messages": "--dataset", "prompt": "--eval-prompts"}[column]
    assert one_sentence(refused("sft", [*flags, flag, "chats.jsonl"], f"{flag} row 2: ", sentence))
    if column == "prompt":
        for flag in "--dataset", "--eval-dataset":
            assert one_sentence(refused("ppo", [*flags, flag, "chats.jsonl"], f"{flag} row 2: ", sentence))


def test_a_chat_that_the_user_ends(variant, refused, command, here):
    flags = variant(tokenizer=lambda t: setattr(t, "chat_template", TEMPLATE))
    (here / "chats.jsonl").write_text(jsonl([{"messages": [USER]}]))
    fragments = "--dataset row 1: ", "the last message must be the assistant's"
    assert one_sentence(refused("sft", [*flags, "--dataset", "chats.jsonl"], *fragments))
    (here / "prompts.jsonl").write_text(jsonl([{"prompt": [USER]}]))
    assert command("ppo", *flags, "--dataset", "prompts.jsonl", "--check")[0] == 0


@pytest.mark.case(38, "ppo sft")
def test_prompts_that_do_not_fit(refused, command, here):
    (here / "long.jsonl").write_text(jsonl([{"prompt": "b"}, {"prompt": "b" * 29}]))
    for flag in "--dataset", "--eval-dataset":
        flags = [flag, "long.jsonl"]
        err = refused("ppo", flags, flag, "row 2", "29", "32", "--max-new-tokens 4", "--max-prompt-length")
        assert one_sentence(err)
    assert one_sentence(refused("sft", ["--eval-prompts", "long.jsonl"], "row 2", "--max-new-tokens 4"))
    code, out, _ = command("ppo", "--dataset", "long.jsonl", "--check", "--max-new-tokens", "3")
    assert code == 0 and "0 dropped" in out, "29 + 3 = 32 fit"
    code, out, _ = command("ppo", "--dataset", "long.jsonl", "--check", "--max-prompt-length", "28")
    assert code == 0 and "1 dropped" in out
    code, out, _ = command("ppo", "--dataset", "long.jsonl", "--check", "--max-prompt-length", "29")
    assert code == 2
    refused("ppo", ["--dataset", "long.jsonl", "--max-prompt-length", "0"], "--max-prompt-length 0")


def test_rows_of_a_function(refused, command):
    assert one_sentence(refused("ppo", ["--dataset", "user.py:rows"], "--dataset row 2", "5"))
    assert one_sentence(refused("ppo", ["--dataset", "user.py:nope"], "no function 'nope'"))
    assert one_sentence(refused("ppo", ["--dataset", "nope.py:rows"], "path/to/file.py:function"))
    refused("ppo", ["--dataset", "user.py:rows:size=4"], "unexpected keyword argument 'size'", user_code=True)


@pytest.mark.parametrize(("name", "expected"), [("broken_rows", 1), ("no_rows", 2)])
def test_a_function_of_rows_that_fails(name, expected, command):
    code, _, err = command("ppo", "--dataset", f"user.py:{name}")
    assert code == expected and name in err


def test_metric_without_prompts_to_sample_from(refused):
    assert one_sentence(refused("sft", ["--eval-prompts", "None"], "--eval-prompts"))


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def variant(here):
    """variant(tokenizer=change, model=change) -> a copy of the model in which a function has changed something."""

    def make(change=None, tokenizer=None, weights=None):
        path = here / "variant"
        shutil.copytree(here / "model", path)
        if tokenizer:
            from transformers import AutoTokenizer

            tokens = AutoTokenizer.from_pretrained(path)
            tokenizer(tokens)
            tokens.save_pretrained(path)
        if weights:
            tensors = safetensors.torch.load_file(path / "model.safetensors")
            weights(tensors)
            safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
        if change:
            change(path)
        return ["--model", "variant"]

    return make


def test_an_empty_prompt_needs_a_beginning_token(variant, refused, here):
    flags = variant(tokenizer=lambda t: setattr(t, "bos_token", None))
    (here / "empty.jsonl").write_text(jsonl([{"prompt": "b"}, {"prompt": ""}]))
    assert one_sentence(refused("ppo", [*flags, "--dataset", "empty.jsonl"], "row 2", "empty", "beginning token"))


def test_a_bad_head_file(variant, refused, here):
    """value_head.safetensors beside a model is loaded with it."""
    flags = variant()
    safetensors.torch.save_file({"0.weight": torch.zeros(1, 5)}, here / "variant/value_head.safetensors")
    refused("ppo", flags, "value_head.safetensors")


MODELS = [
    ("--model ./nope", ["--model ./nope", "no "]),
    ("--model /abs/nope", ["--model /abs/nope", "no "]),
    ("--model nope.py:build", ["--model nope.py:build", "path/to/file.py:function"]),
    ("--model user.py:nope", ["--model user.py:nope", "no function 'nope'"]),
    ("--tokenizer ./nope", ["--tokenizer ./nope"]),
    ("--ref-model ./nope", ["--ref-model ./nope"]),
]


@pytest.mark.parametrize(("flags", "fragments"), MODELS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_model_that_is_not_there(flags, fragments, refused):
    err = refused("ppo", flags.split(), *fragments)
    assert one_sentence(err)
    assert "epo id must" not in err, "says that there is no such directory, not how hub names are spelt"


def small_model(kind, path, **config):
    """A GPT-2 with 13 embeddings; its tokenizer is not there."""
    import transformers

    sizes = {"vocab_size": 13, "n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 32}
    getattr(transformers, kind)(transformers.GPT2Config(**sizes | config)).save_pretrained(path)


@pytest.mark.case(51, "ppo")
def test_a_tokenizer_larger_than_the_embeddings_of_another_model(refused, here):
    for kind, path, flag in (
        ("GPT2LMHeadModel", "reference", "--ref-model"),
        ("GPT2ForSequenceClassification", "judge", "--reward"),
    ):
        small_model(kind, here / path, num_labels=1, pad_token_id=0)
        for file in (here / "model").glob("*token*"):
            shutil.copy(file, here / path)
        assert one_sentence(refused("ppo", [flag, path], f"{flag} {path}", "tokenizer", "embeddings"))


@pytest.mark.case(51, "ppo")
def test_a_reference_of_another_vocabulary(refused, here):
    """Its log-probabilities would be those of other tokens, or an index out of range."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    small_model("GPT2LMHeadModel", here / "reference")
    small = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=small, eos_token="<eos>").save_pretrained(here / "reference")
    refused("ppo", ["--ref-model", "reference"], "--ref-model reference")


@pytest.mark.case(51, "ppo")
def test_a_reward_model_without_a_tokenizer(refused, here):
    """transformers makes an empty one up, to which all texts are equal."""
    small_model("GPT2ForSequenceClassification", here / "judge", num_labels=1, pad_token_id=0)
    assert one_sentence(refused("ppo", ["--reward", "judge"], "--reward judge", "tokenizer"))


# ---- Rewards and metrics ---------------------------------------------------------------------------------------------

REWARDS = {
    "pairs": ["row 1"],
    "a_dense_nan": ["row 1", "nan"],
}


@pytest.mark.case(27, "ppo")
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_breaks_the_contract(name, refused):
    err = refused("ppo", ["--reward", f"user.py:{name}", "--check"], f"user.py:{name}", *REWARDS[name])
    assert one_sentence(err)


@pytest.mark.parametrize("name", ["short", "a_nan"])
def test_a_reward_that_breaks_the_contract_in_a_rollout(name, command):
    code, _, err = command("ppo", "--reward", f"user.py:{name}")
    assert code == 2 and f"user.py:{name} returned" in err and one_sentence(err)


SPECS = [
    ("user.py:nope", ["no function 'nope'"]),
    ("user.py:RESULTS", ["no function 'RESULTS'"]),
    ("user.py", ["path/to/file.py:function"]),
    ("nope.py:reward", ["path/to/file.py:function"]),
]


@pytest.mark.parametrize(("spec", "fragments"), SPECS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_function_that_is_not_there(spec, fragments, refused):
    for algo, flag in ("ppo", "--reward"), ("ppo", "--metric"), ("sft", "--metric"):
        assert one_sentence(refused(algo, [flag, spec], f"{flag} {spec}", *fragments))


@pytest.mark.parametrize("text", ["def reward(:\n", "import no_such_module\n", "1 / 0\n"])
def test_a_file_that_cannot_be_imported(text, command, here):
    (here / "user2.py").write_text(text)
    code, _, err = command("ppo", "--reward", "user2.py:reward")
    assert code == 1 and "user2.py" in err
    assert not (here / "run").exists()


@pytest.fixture(scope="module")
def floats():
    return {}


NUMBERS = "floats integers booleans a_tuple numpy_array numpy_scalars torch_tensor torch_scalars"


@pytest.mark.parametrize("name", NUMBERS.split())
def test_any_kind_of_number_is_a_float_to_the_scripts(name):
    rows = [{"prompt": p} for p in "bcde"]
    given = {"samples": ["bf", "cf", "d", "eff"], "output_ids": [[5], [5], [], [5, 5]]}
    scores = call_reward(load_function(f"user.py:{name}", "--reward"), name, rows, given)
    assert scores == [1.0, 0.0, 1.0, 1.0] and {type(score) for score in scores} == {float}


@pytest.mark.case(28, "ppo")
@pytest.mark.parametrize("name", ["floats", "dense", "dense_arrays", "mixed"])
def test_rewards_of_samples_and_of_tokens(name, command, here, floats):
    """The same numbers give the same run; a dense reward that is zero before the last token too."""
    more = "--ppo-epochs 2 --lr 1e-2 --eval-every 1".split()
    code, _, err = command("ppo", "--reward", f"user.py:{name}", *more)
    assert code == 0, err
    text = (here / "run/metrics.jsonl").read_text()
    assert floats.setdefault("text", text) == text
    assert json.loads(text.splitlines()[-1])["eval/reward"] == 0.75


def test_a_metric_without_names(here):
    """{} is a poor metric and no crash."""
    options = dict(model="model", dataset="texts.jsonl", eval_dataset=None, eval_prompts=ROWS, threads=1)
    options |= dict(batch_size=4, total_steps=2, run_dir="run", max_new_tokens=4)
    try:
        sft.main(sft.Args(**options, metric=lambda samples, **columns: {}))
    except InputError as error:
        assert "name" in str(error)


@pytest.mark.case(32, "ppo")
def test_a_constant_reward_is_no_error(command, here):
    """Whitening divides by a standard deviation of zero; without a KL penalty the policy gets no gradient."""
    (here / "same.py").write_text("def reward(samples, **columns):\n    return [0.7] * len(samples)\n")
    flags = "--reward same.py:reward --score-scaling running-norm --whiten-rewards --total-episodes 12".split()
    code, _, err = command("ppo", *flags)
    assert code == 0, err
    for record in map(json.loads, (here / "run/metrics.jsonl").read_text().splitlines()):
        assert None not in record.values() and record["objective/scores_std"] == 0


@pytest.mark.case(42, "ppo sft")
@pytest.mark.parametrize(("end", "rate"), [(50.0, 1.0), (-50.0, 0.0)])
def test_responses_that_end_at_once_or_never(end, rate, variant, command, here):
    """The end token likeliest by far everywhere, or impossible."""

    def bias(weights):
        # the last norm returns one vector everywhere, and the embedding of the end token is along it or against it
        weights["transformer.ln_f.weight"].zero_()
        weights["transformer.ln_f.bias"].fill_(1.0)
        weights["transformer.wte.weight"][22] = end

    flags = variant(weights=bias)
    code, _, err = command("ppo", *flags, "--total-episodes", "8", "--lr", "1e-9", "--eval-every", "1")
    assert code == 0, err
    for record in map(json.loads, (here / "run/metrics.jsonl").read_text().splitlines()[1:]):
        assert record["tokens/eos_rate"] == rate and record["tokens/responses_len"] == (1 if rate else 4)
    code, _, err = command("sft", *flags, "--eval-every", "1", "--run-dir", "sft")
    assert code == 0, err


@pytest.mark.case(33)
@pytest.mark.parametrize("algo", ["ppo", "grpo", "sft"])
def test_a_loss_that_is_not_finite_stops_before_the_step(algo, command, here, monkeypatch):
    """At the third step; the checkpoint of the second one is finite, and the rows are named."""
    module, calls = SCRIPTS[algo], []
    name = {"ppo": "policy_loss", "grpo": "grpo_loss", "sft": "token_loss"}[algo]
    function = getattr(module, name)

    def poisoned(*args, **options):
        calls.append(1)
        return function(*args, **options) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(module, name, poisoned)
    of_sft = "--total-steps 4 --metric None --eval-prompts None --no-packing"
    flags = {"ppo": "--total-episodes 16", "grpo": "--total-episodes 16", "sft": of_sft}[algo].split()
    with pytest.raises(FloatingPointError, match="step 3: .*nan.*checkpoint is intact"):
        command(algo, *flags, "--save-every", "1")
    newest = sorted((here / "run/checkpoints").iterdir())[-1]
    assert newest.name == "step_00000002" and len((here / "run/metrics.jsonl").read_text().splitlines()) == 2
    weights = safetensors.torch.load_file(newest / "model.safetensors").values()
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.case(25, "ppo")
def test_a_nan_reward_in_the_middle_leaves_the_checkpoint_before_it(command, here):
    (here / "late.py").write_text(
        "calls = 0\n"
        "def reward(samples, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [float('nan') if calls == 3 and i == 1 else float(len(s)) for i, s in enumerate(samples)]\n"
    )
    code, _, err = command("ppo", "--reward", "late.py:reward", "--total-episodes", "16", "--save-every", "1")
    assert code == 2 and "late.py:reward returned nan for row 2" in err
    newest = sorted((here / "run/checkpoints").iterdir())[-1]
    assert newest.name == "step_00000002"
    weights = safetensors.torch.load_file(newest / "model.safetensors").values()
    assert all(weight.isfinite().all() for weight in weights)


def test_handlers_of_signals_are_given_back_after_an_error(here):
    """A notebook must still be interruptible after a run that failed."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    options = dict(model="model", dataset=ROWS, eval_dataset=None, metric=None, threads=1, max_new_tokens=4)
    options |= dict(batch_size=4, rollout_batch_size=4, total_episodes=4, run_dir="run")
    with pytest.raises(InputError, match="returned 0 values"):
        ppo.main(ppo.Args(**options, reward=lambda samples, **columns: []))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# ---- Run directories -------------------------------------------------------------------------------------------------


@pytest.mark.case(22, "ppo")
@pytest.mark.case(58, "ppo")
@pytest.mark.parametrize("name", ["rows.jsonl", "a\0b"])
def test_a_directory_that_cannot_be_made(name, refused):
    assert one_sentence(refused("ppo", ["--run-dir", name], "--run-dir", "cannot be written"))


@pytest.mark.case(58, "sft")
@pytest.mark.parametrize("name", ["two\nlines", "\U0001f600", "../above/x", "a b'c"], ids=repr)
def test_a_directory_of_an_odd_name_works(name, command, here):
    (here / "below").mkdir()
    code, out, err = command("sft", "--run-dir", f"below/{name}")
    assert code == 0 and (here / "below" / name / "hf_model").is_dir(), err
    assert command("sft", "--run-dir", f"below/{name}")[0] == 0


def test_a_reward_that_fails_in_the_first_evaluation_leaves_nothing(refused, here):
    (here / "mine.py").write_text("def score(outputs, answer):\n    return [0.0 for _ in outputs]\n")
    err = refused(
        "ppo",
        ["--reward", "mine.py:score", "--eval-every", "1"],
        "\nTypeError: score() missing ",
        user_code=True,
    )
    assert not (here / "run").exists() and err.endswith("argument: 'answer'\n")


def test_another_configuration_in_the_directory(command, here):
    assert command("sft")[0] == 0
    before = {p: p.read_bytes() for p in (here / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    code, _, err = command("sft", "--lr", "0.5", "--max-length", "7")
    assert code == 2 and "run holds a run with another configuration" in err
    assert "--lr: was 2e-05, is 0.5" in err and "--max-length: was 1024, is 7" in err and "--seed" not in err
    code, _, err = command("ppo")
    assert code == 2 and "another configuration" in err
    assert before == {p: p.read_bytes() for p in (here / "run").rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_changed_byte_of_common_is_another_run(scripts, work, tmp_path):
    """In a copy of the repository: the directory of the run before is refused, and without --run-dir there is a new
    one."""
    shutil.copytree(ROOT / "common", tmp_path / "code/common")
    (tmp_path / "code/algos").mkdir()
    shutil.copy(ROOT / "algos/sft.py", tmp_path / "code/algos")
    argv = [tmp_path / "code/algos/sft.py", *flags(work, "sft"), "--total-steps", "2", "--eval-every", "0"]
    scripts.run(argv, tmp_path)
    (first,) = (tmp_path / "runs").iterdir()
    before = files(first)
    module = tmp_path / "code/common/rows.py"
    text = module.read_text()
    assert "\n# ---- Rows ---" in text
    module.write_text(text.replace("\n# ---- Rows ---", "\n# ---- rows ---"))
    refused = scripts.run([*argv, "--run-dir", first], tmp_path, expect=2)
    assert "holds a run with another configuration" in refused.err
    assert refused.err.splitlines()[1:] == ["  common/rows.py has changed"]
    scripts.run(argv, tmp_path)
    (second,) = {path for path in (tmp_path / "runs").iterdir()} - {first}
    assert files(first) == before and (second / "README.md").exists()
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
