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
from accelerate import Accelerator
from harness import ROOT
from helpers import log, write
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from benchmarks.tasks import randomwalks, shapes
from common.sampling import decode, generate_all

PAGES = [ROOT / "README.md", ROOT / "algos/README.md"]
COMMAND = re.compile(
    r"(?:python|accelerate launch|torchrun --nproc_per_node \d+) (algos/(\w+)\.py [^#`\n]*--model[^#`\n]*)"
)
MODELS = ["gpt2", "my_model", "Qwen/Qwen3-0.6B", "runs/mine/hf_model", "runs/sft/hf_model"]
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
    """The file of this name in the documents, the first one."""
    text = "".join(page.read_text() for page in PAGES)
    return re.findall(rf"```python\n# {name}\n(.*?)```", text, re.S)[0]


def lengthen(path, num_positions):
    """The base model with more positions than 32."""
    model = AutoModelForCausalLM.from_pretrained(randomwalks.base_model())
    positions = model.transformer.wpe.weight.data
    torch.manual_seed(0)
    model.transformer.wpe = torch.nn.Embedding(num_positions, positions.shape[1])
    model.transformer.wpe.weight.data.mul_(0.02)
    model.transformer.wpe.weight.data[: len(positions)] = positions
    model.config.n_positions = num_positions
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(randomwalks.base_model(), model_max_length=num_positions).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def longer_model(tmp_path_factory):
    return lengthen(tmp_path_factory.mktemp("longer"), 160)


@pytest.fixture(scope="module")
def longest_model(tmp_path_factory):
    """With room for the responses of grpo, whose default is 512 tokens."""
    return lengthen(tmp_path_factory.mktemp("longest"), 600)


@pytest.fixture
def fill(tmp_path, longer_model, longest_model, scripts):
    """fill(script, words): the files that a command names, in an empty directory."""

    def put(script, words):
        for name in MODELS:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).symlink_to(longest_model if script == "grpo" else longer_model)
        rows = {
            "sft": randomwalks.completions(),
            "ilql": randomwalks.rewarded(),
            "reward": randomwalks.pairs(),
            "dpo": randomwalks.pairs(),
            "ppo": [{"prompt": row["prompt"], "answer": "a"} for row in randomwalks.prompts()],
            "grpo": [{"prompt": row["prompt"], "answer": "a"} for row in randomwalks.prompts()],
            "ddpo": [{"prompt": caption} for caption in shapes.CAPTIONS],
        }[script]
        for name in ("answers", "my", "pairs", "translations", "rewarded", "prompts", "problems"):
            write(tmp_path / f"{name}.jsonl", rows)
        for name in ("held_out", "test"):
            write(tmp_path / f"{name}.jsonl", rows[::5])
        (tmp_path / "prompts.txt").write_text("\n".join(shapes.CAPTIONS))
        if script in ("ilql", "reward"):
            write(tmp_path / "prompts.jsonl", randomwalks.prompts())
        (tmp_path / "my_reward.py").write_text(code_block("my_judge.py" if script == "ddpo" else "my_reward.py"))
        (tmp_path / "my_judge.py").write_text(code_block("my_judge.py"))
        metric = "from benchmarks.tasks.randomwalks import metric\ncorrect = metric\n"
        (tmp_path / "my_metric.py").write_text(metric)
        if "google-t5/t5-small" in words:
            small_t5(tmp_path / "google-t5/t5-small")
        for name in ("my_pipeline", "stable-diffusion-v1-5/stable-diffusion-v1-5"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(shapes.base_model())
        for judge in re.findall(r"(runs/judge\w*)/hf_model", " ".join(words)):
            adapters = ["--lora-r", "4"] if "lora" in judge else []
            argv = [ROOT / "algos/reward.py", "--model", "gpt2", "--dataset", "judge.jsonl", "--run-dir", judge]
            write(tmp_path / "judge.jsonl", randomwalks.pairs())
            scripts.run([*argv, *adapters, "--lr", "1e-3", "--total-steps", "8", "--threads", "1"], tmp_path)
        return tmp_path

    return put


def small_t5(path):
    letters = randomwalks.tokenizer()
    config = T5Config(
        vocab_size=len(letters), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=23,
        eos_token_id=letters.eos_token_id, pad_token_id=letters.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(path)
    letters.save_pretrained(path)


def mean_optimality(path):
    """Of sampled continuations, ten of each start."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(randomwalks.base_model())
    prompts = [row["prompt"] for row in randomwalks.eval_prompts(samples=10)]
    queries = tokenizer(prompts)["input_ids"]
    (_, _, ids, mask), _, _ = generate_all(
        Accelerator(), model, tokenizer, queries, ("test", 0), seed=1, max_new_tokens=12
    )
    responses = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    texts = decode(tokenizer, queries, responses, ())
    return fmean(randomwalks.optimality(prompt + text) for prompt, text in zip(prompts, texts, strict=True))


@pytest.mark.parametrize(("script", "words"), list(commands()))
def test_a_documented_command_makes_nothing_worse(script, words, fill, scripts, longer_model):
    work = fill(script, words)
    words = [re.sub(r"^[A-Z]\w+/.*:\w+$", "pairs.jsonl", word) for word in words]
    words = [re.sub(r"^org/(prompts|problems|rewarded):train$", r"\1.jsonl", word) for word in words]
    words = [re.sub(r"^org/chats:train$", "my.jsonl", word) for word in words]
    if "--run-dir" in words:
        words[words.index("--run-dir") + 1] = "run"  # runs/mine is a model here
    else:
        words += ["--run-dir", "run"]
    scripts.run([ROOT / words[0], *words[1:], *SHORTER.get(script, "").split()], work)
    last = log(work / "run")[-1]
    if script == "reward":
        assert last["rewards/accuracies"] > 0.4
    elif script != "ddpo" and "google-t5/t5-small" not in words:
        assert mean_optimality(work / "run/hf_model") > mean_optimality(longer_model) - 0.06
