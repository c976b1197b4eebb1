"""Commands of README, guide and docstrings as they stand, on own models: `python -m pytest tests/test_commands.py`

Their models and files lie in a directory under the names that the command gives them: the base model of the random
walks with room for longer texts in place of a pretrained one, rows of its task, the documents' functions. Only hub
datasets are named otherwise, torchrun becomes one process, and long runs are shortened. Nothing may have become worse.
"""

import re
import shlex
from statistics import fmean

import pytest
import torch
from harness import ROOT
from helpers import log, save, write
from test_seq2seq import random_seq2seq
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tasks import randomwalks, shapes

PAGES = [ROOT / "README.md", ROOT / "algos/README.md"]
COMMAND = re.compile(
    r"(?:python|accelerate launch|torchrun --nproc_per_node \d+) (algos/(\w+)\.py [^#`\n]*--model[^#`\n]*)"
)
MODELS = ["gpt2", "my_model", "Qwen/Qwen3-0.6B", "runs/mine/hf_model", "runs/sft/hf_model", "student", "teacher"]
PIPELINES = ["my_pipeline", "stable-diffusion-v1-5/stable-diffusion-v1-5"]
# What ends a run early, or makes it small; nothing of it touches learning rates, coefficients or lengths of texts.
SHORTER = {
    "ppo": "--total-episodes 1536",
    "grpo": "--total-episodes 1536",
    "ddpo": "--num-epochs 1 --rollout-batch-size 8 --batch-size 8 --num-inference-steps 3",
}
QUICK = ["README.md sft 1"]  # the others are in the slow suite


def commands():
    """(document, script, words) of each command."""
    for document in [*PAGES, *sorted((ROOT / "algos").glob("*.py"))]:
        text = document.read_text().replace("\\\n", " ")
        counts = {}
        for command, script in COMMAND.findall(text):
            counts[script] = counts.get(script, 0) + 1
            name = f"{document.relative_to(ROOT)} {script} {counts[script]}"
            marks = [] if name in QUICK else [pytest.mark.slow]
            yield pytest.param(script, shlex.split(command), id=name, marks=marks)


def code_block(name):
    text = "".join(page.read_text() for page in PAGES)
    return re.findall(rf"```python\n# {name}\n(.*?)```", text, re.S)[0]


@pytest.fixture(scope="module")
def longer_model(tmp_path_factory):
    """The base model with 600 positions instead of 32: room for the responses of grpo, whose default is 512 tokens."""
    path = tmp_path_factory.mktemp("longer")
    model = AutoModelForCausalLM.from_pretrained(randomwalks.base_model())
    positions = model.transformer.wpe.weight.data
    torch.manual_seed(0)
    model.transformer.wpe = torch.nn.Embedding(600, positions.shape[1])
    model.transformer.wpe.weight.data.mul_(0.02)
    model.transformer.wpe.weight.data[: len(positions)] = positions
    model.config.n_positions = 600
    save(path, model, AutoTokenizer.from_pretrained(randomwalks.base_model(), model_max_length=600))
    return path


def fill(folder, script, words, model, scripts):
    """The files that a command names, in an empty directory."""
    links = dict.fromkeys(MODELS, model) | dict.fromkeys(PIPELINES, shapes.base_model())
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    rows = {
        "sft": randomwalks.completions(),
        "ilql": randomwalks.rewarded(),
        "reward": randomwalks.pairs(),
        "dpo": randomwalks.pairs(),
        "ppo": [row | {"answer": "a"} for row in randomwalks.prompts()],
        "grpo": [row | {"answer": "a"} for row in randomwalks.prompts()],
        "ddpo": [{"prompt": caption} for caption in shapes.CAPTIONS],
    }[script]
    for name in ("answers", "my", "pairs", "translations", "rewarded", "prompts", "problems", "chats"):
        write(folder / f"{name}.jsonl", rows)
    for name in ("held_out", "test"):
        write(folder / f"{name}.jsonl", rows[::5])
    (folder / "prompts.txt").write_text("\n".join(shapes.CAPTIONS))
    if script in ("ilql", "reward"):
        write(folder / "prompts.jsonl", [row | {"answer": "a"} for row in randomwalks.prompts()])
    (folder / "my_reward.py").write_text(code_block("my_judge.py" if script == "ddpo" else "my_reward.py"))
    (folder / "my_judge.py").write_text(code_block("my_judge.py"))
    (folder / "my_game.py").write_text(code_block("my_game.py"))
    (folder / "my_metric.py").write_text("from benchmarks.tasks.randomwalks import *\n" + code_block("my_metric.py"))
    if "google-t5/t5-small" in words:
        save(folder / "google-t5/t5-small", random_seq2seq("t5"), randomwalks.tokenizer())
    for judge in re.findall(r"(runs/judge\w*)/hf_model", " ".join(words)):
        adapters = ["--lora-r", "4"] if "lora" in judge else []
        argv = [ROOT / "algos/reward.py", "--model", "gpt2", "--dataset", "judge.jsonl", "--run-dir", judge]
        write(folder / "judge.jsonl", randomwalks.pairs())
        scripts.run([*argv, *adapters, "--lr", "1e-3", "--total-steps", "8", "--threads", "1"], folder)


def mean_optimality(path):
    """Of sampled continuations, ten of each start, all of one length."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(randomwalks.base_model())
    prompts = tokenizer([row["prompt"] for row in randomwalks.eval_prompts(samples=10)], return_tensors="pt")
    torch.manual_seed(1)
    samples = model.generate(**prompts, do_sample=True, max_new_tokens=12)
    return fmean(map(randomwalks.optimality, tokenizer.batch_decode(samples, skip_special_tokens=True)))


@pytest.mark.parametrize(("script", "words"), list(commands()))
def test_a_documented_command_makes_nothing_worse(script, words, tmp_path, scripts, longer_model):
    fill(tmp_path, script, words, longer_model, scripts)
    words = [re.sub(r"^[A-Z]\w+/.*:\w+$", "pairs.jsonl", word) for word in words]
    words = [re.sub(r"^org/(\w+):train$", r"\1.jsonl", word) for word in words]
    if "--run-dir" in words:
        words[words.index("--run-dir") + 1] = "run"  # runs/mine is a model here
    else:
        words += ["--run-dir", "run"]
    scripts.run([ROOT / words[0], *words[1:], *SHORTER.get(script, "").split()], tmp_path)
    last = log(tmp_path / "run")[-1]
    if script == "reward":
        assert last["rewards/accuracies"] > 0.4
    elif script != "ddpo" and "google-t5/t5-small" not in words:
        assert mean_optimality(tmp_path / "run/hf_model") > mean_optimality(longer_model) - 0.06
