"""Whole runs of algos/ilql.py: `python -m pytest tests/test_ilql_runs.py`"""

from statistics import fmean

import pytest
import safetensors.torch
import torch
from helpers import equal, log, recorded, samples, weights
from test_ilql import ARGS, BIGRAMS, DIALOGUES, EPISODES, IDS, LOSSES, SETTINGS, gradients, slow_terms
from transformers import AutoModelForCausalLM

from algos import ilql
from common.lm import sampling

PROMPTS = [{"prompt": prompt} for prompt in ("b", "cde", "fghij", "k", "nopq")]


def lengths(outputs, **columns):
    return {"length": [len(output) for output in outputs]}


def run_ilql(model, run_dir, rows=DIALOGUES, **flags):
    """Four steps of 5 of the 6 rows in which every loss and flag counts, unless flags say otherwise."""
    options = {"dtype": "float64", "total_steps": 4, "batch_size": 5, "micro_batch_size": 2, "lr": 1e-2, "threads": 1}
    options |= {"eval_every": 0, "save_every": 0, "betas": (0.0, 8.0), "max_new_tokens": 6, "top_k": 0}
    return ilql.main(ilql.Args(model=model, run_dir=str(run_dir), dataset=rows, **options | SETTINGS | flags))


def test_the_first_step_is_the_slow_definition(gpt2_dir, tmp_path):
    """Means over the actions of all rows, of training and of evaluation; and the norm of their gradient."""
    policy = ilql.PolicyWithQ(AutoModelForCausalLM.from_pretrained(gpt2_dir, dtype=torch.float64), seed=1).eval()
    slow = slow_terms(policy, EPISODES, ARGS)
    count = len(slow["loss"])
    flags = {"batch_size": 6, "total_steps": 1, "max_length": 14, "normalize_rewards": False, "eval_every": 1}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "run", eval_dataset=DIALOGUES, **flags)
    start, step = log(run_dir)
    expected = ilql.loss_metrics({name: values.sum().item() for name, values in slow.items()}, count)
    assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    for name in ("loss", *LOSSES):
        assert start[f"eval/{name}"] == pytest.approx(expected[f"losses/{name}"], rel=1e-9)
    squares = sum(gradient.square().sum() for gradient in gradients(policy, slow["loss"].mean()))
    assert step["optim/grad_norm"] == pytest.approx(squares.sqrt().item(), rel=1e-6)
    assert step["tokens/actions"] == count


def test_targets_follow_every_so_many_steps_whatever_the_data(monkeypatch, gpt2_dir, tmp_path):
    """Counted over the whole run, of 7 steps with epochs of 3; a synchronisation is behind the optimizer's step."""
    calls = recorded(monkeypatch, ilql, "polyak_update")
    rates = recorded(monkeypatch, ilql, "learning_rate", lambda rate: len(calls))
    flags = {"total_steps": 7, "batch_size": 2, "steps_for_target_q_sync": 3, "polyak_alpha": 0.3}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    assert [record["target/syncs"] for record in found] == [0, 0, 1, 1, 1, 2, 2]
    before = {step: count for (_, step, *_), count in rates}  # the optimizer's step
    assert [*before.values()] == [0, 0, 0, 1, 1, 1, 2] and len(calls) == 2
    assert {args[2] for args, _ in calls} == {0.3}


def test_evaluation_samples_from_each_beta(monkeypatch, gpt2_dir, tmp_path):
    """The filters choose from pi, and not from what is drawn from; a mask forbids tokens whatever beta is."""
    shaped = recorded(monkeypatch, ilql, "shape_logits")
    drawn = recorded(monkeypatch, sampling, "draw")
    mask = BIGRAMS.clone()
    mask[:, 7:] = True
    flags = {"eval_every": 2, "total_steps": 2, "top_k": 3, "top_p": 0.9, "eval_temperature": 0.5}
    flags |= {"metric": lengths, "eval_prompts": PROMPTS, "logit_mask": mask.numpy()}
    metrics, run_dir = run_ilql(gpt2_dir, tmp_path / "run", **flags)
    assert {args[3:6] for args, _ in shaped} == {(0.0, 3, 0.9), (8.0, 3, 0.9)}
    assert {args[2:] for args, _ in drawn} == {(0.5, 0, 1.0)}  # temperature, top_k, top_p
    found = samples(run_dir)
    assert [(row["step"], row["beta"]) for row in found] == [(0, 0.0), (0, 8.0)] * 5 + [(2, 0.0), (2, 8.0)] * 5
    assert set("".join(row["output"] for row in found)) <= set("abcdefg")
    for beta in (0, 8):
        of_beta = [row["length"] for row in found[10:] if row["beta"] == beta]
        assert metrics[f"eval/length@beta={beta}"] == pytest.approx(fmean(of_beta))


def test_the_best_beta_chooses_the_best_model(gpt2_dir, tmp_path, capsys):
    """By the first metric; the second one and the last beta are best at other steps. The last evaluation's best beta
    is the headline, and how to sample. Ended behind its last step, the run goes on with the model of another beta."""
    values = iter([0, 0, 0, 5, 9, 2, 1, 8, 3, 7, 2, 7])  # of betas 0, 4 and 8 at steps 0, 2, 4 and 6

    def metric(outputs, **columns):
        value = next(values)
        return {"first": [value] * len(outputs), "second": [99 - value] * len(outputs)}

    flags = {"total_steps": 6, "eval_every": 2, "betas": (0.0, 4.0, 8.0), "eval_dataset": DIALOGUES[:2]}
    flags |= {"save_every": 1, "keep_checkpoints": 1, "metric": metric, "eval_prompts": PROMPTS}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "run", **flags)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000002", "step_00000006"]
    saved = weights(run_dir / "checkpoints/step_00000002")
    best = safetensors.torch.load_file(run_dir / "hf_model_best" / ilql.HEADS_FILE)
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in best.items())
    assert "with policy.guided(beta=0, top_k=0, top_p=1):  # the best beta by the last" in capsys.readouterr().out
    (run_dir / "README.md").unlink()  # which marks it as finished
    run_ilql(gpt2_dir, tmp_path / "run", **flags)
    again = safetensors.torch.load_file(run_dir / "hf_model_best" / ilql.HEADS_FILE)
    assert all(torch.equal(weight, best[name]) for name, weight in again.items())


def test_an_export_is_continued_with_its_heads(gpt2_dir, tmp_path, capsys):
    """transformers reads the model alone."""
    flags = {"eval_dataset": DIALOGUES, "eval_every": 9, "two_qs": False, "steps_for_target_q_sync": 2}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "one", **flags)
    usage = (run_dir / "README.md").read_text().split("```python\n")[1].split("\n```")[0]
    assert usage in capsys.readouterr().out and "with policy.guided(beta=8, top_k=0, top_p=1):  # no beta" in usage
    export = run_dir / "hf_model"
    policy = ilql.PolicyWithQ.load(export, dtype=torch.float64)
    assert equal(safetensors.torch.load_file(export / ilql.HEADS_FILE), policy.head_weights())
    plain, report = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(plain.eval()(IDS).logits, policy.eval().lm(IDS).logits)
    _, again = run_ilql(str(export), tmp_path / "two", **flags)
    for name in ("loss", *LOSSES):
        assert log(again)[0][f"eval/{name}"] == pytest.approx(log(run_dir)[-1][f"eval/{name}"], rel=1e-12)
