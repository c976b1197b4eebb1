"""Scripts with the weights of SmolLM2-135M-Instruct: `python -m pytest -m pretrained tests/test_pretrained.py`

They need the packages of benchmarks/tasks/pretrained/requirements.txt, 6 GB of memory and some minutes; the default run
leaves them out. Each is a run of a few steps in a process, as a user starts it.
"""

import math
import shutil
import subprocess
import sys

import pytest
import torch
from harness import ROOT, once
from helpers import log, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from algos.sft import draw_rows
from benchmarks.tasks import pretrained

pytestmark = pytest.mark.pretrained
TASK = "benchmarks/tasks/pretrained.py"
SETTINGS = {
    "sft": f"--dataset {TASK}:best_reviews --total-steps 2 --batch-size 6 --eval-every 0",
    "reward": f"--dataset {TASK}:review_pairs --total-steps 2 --batch-size 6 --eval-every 0",
    "dpo": f"--dataset {TASK}:review_pairs --total-steps 2 --batch-size 6 --eval-every 0",
    "ppo": f"--dataset {TASK}:reviews --reward {TASK}:sentiment --max-new-tokens 7 --total-episodes 12 --eval-every 0 "
    "--rollout-batch-size 6 --batch-size 3 --ppo-epochs 2",
    "grpo": f"--dataset {TASK}:colors:count=9 --reward {TASK}:color_reward --max-new-tokens 5 --total-episodes 16 "
    "--rollout-batch-size 8 --batch-size 4 --group-size 4 --eval-every 0",
}


@pytest.fixture(autouse=True)
def no_remains(tmp_path):
    """A run leaves some 3 GB."""
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def folder():
    return pretrained.model()


def run(algo, run_dir, *more):
    """The lines of metrics.jsonl of a run of two steps or iterations."""
    words = [f"algos/{algo}.py", "--model", f"{TASK}:model", *SETTINGS[algo].split(), "--lr", "1e-5", "--threads", "1"]
    words = once([*words, "--micro-batch-size", "3", "--save-every", "0", "--run-dir", run_dir, *more])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return log(run_dir)


def first_rows(rows):
    """The rows of the first optimizer step, with the default seed."""
    return [rows[place] for place in draw_rows(1, len(rows), 0, 6)]


@torch.no_grad()
def nll(lm, tokenizer, prompt, answer):
    """Negative log-probabilities of the tokens of an answer and the end token, by a plain forward pass."""
    begin = len(tokenizer(prompt)["input_ids"])
    ids = torch.tensor([[*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]])
    logprobs = lm(ids).logits[0].double().log_softmax(-1)
    return -logprobs[:-1].gather(1, ids[0, 1:, None])[begin - 1 :, 0]


def test_what_words_explain():
    """As the page of critics says."""
    assert pretrained.explained_by_words() == pytest.approx(0.445, abs=0.001)


def test_first_losses_are_those_of_plain_forward_passes(folder, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = first_rows(pretrained.best_reviews())
    expected = torch.cat([nll(lm, tokenizer, row["prompt"], row["completion"]) for row in rows]).mean()
    for packing in "--packing", "--no-packing":
        first, *_ = run("sft", tmp_path / f"sft{packing}", packing)
        assert first["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    rows = first_rows(pretrained.review_pairs())
    chosen = torch.cat([nll(lm, tokenizer, row["prompt"], row["chosen"]) for row in rows])
    first, *_ = run("dpo", tmp_path / "dpo")
    assert first["train/nll"] == pytest.approx(chosen.mean().item(), rel=1e-5)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_first_loss_of_a_reward_model(folder, tmp_path):
    """With the head that the script has drawn, which is exported beside what it has trained."""
    first, *_ = run("reward", tmp_path / "run", "--lr", "1e-30")
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/hf_model").double()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/hf_model")
    losses = []
    for row in first_rows(pretrained.review_pairs()):
        scores = []
        for side in ("chosen", "rejected"):
            ids = [*tokenizer(row["prompt"] + row[side])["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(lm(torch.tensor([ids])).logits[0, 0].item())
        losses.append(math.log1p(math.exp(scores[1] - scores[0])))
    assert first["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_before_the_first_update_nothing_differs_from_the_reference(tmp_path, precision):
    first, *_ = run("ppo", tmp_path / "ppo", "--mixed-precision", precision)
    assert abs(first["objective/kl"]) < (1e-4 if precision == "no" else 0.3)  # of a response, in nats
    first, *_ = run("grpo", tmp_path / "grpo", "--mixed-precision", precision, "--batch-size", 8)
    assert first["policy/ratio"] in (0.0, 1.0) and abs(first["objective/kl"]) < (1e-4 if precision == "no" else 0.3)
    first, *_ = run("dpo", tmp_path / "dpo", "--mixed-precision", precision)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6 if precision == "no" else 5e-3)


def test_an_export_chats_in_a_pipeline(tmp_path):
    run("sft", tmp_path / "run")
    chat = pipeline("text-generation", str(tmp_path / "run/hf_model"))
    [answer] = chat([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=8, do_sample=False)
    assert "Paris" in answer["generated_text"][-1]["content"]


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_adapters(folder, tmp_path, algo):
    """They are exported alone, load in plain transformers, and change the model."""
    run(algo, tmp_path / "run", "--lora-r", 3, "--lr", "1e-3", "--mixed-precision", "bf16")
    exported = weights(tmp_path / "run/hf_model")
    assert all("lora_" in name for name in exported) and len(exported) == 2 * 7 * 30
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf_model")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        difference = lm(ids).logits - AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert difference.abs().max() > 1e-4
