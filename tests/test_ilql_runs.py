"""Whole runs of algos/ilql.py: `python -m pytest tests/test_ilql_runs.py`

What it learns is compared with values worked out by hand on a chain whose data follow their policy exactly. Then: the
first step by the slow definition of test_ilql.py, targets that are synchronised when they should be, samples of each
beta, and what is exported. Runs are in-process.
"""

from pathlib import Path
from statistics import fmean

import pytest
import safetensors.torch
import torch
from helpers import EOS, log, recorded, samples, weights
from test_ilql import BIGRAMS, DIALOGUES, EPISODES, IDS, LOSSES, SETTINGS, gradients, settings, slow_terms
from transformers import AutoModelForCausalLM

from algos import ilql
from common import sampling
from common.cli import InputError
from common.seeding import draw

PROMPTS = [{"prompt": prompt} for prompt in ("b", "cde", "fghij", "k", "nopq")]


def lengths(outputs, **columns):
    return {"length": [len(output) for output in outputs]}


def run_ilql(model, run_dir, rows=DIALOGUES, **flags):
    """Four steps of 5 of the 6 rows in which every loss and flag counts, unless flags say otherwise."""
    options = {"dtype": "float64", "total_steps": 4, "batch_size": 5, "micro_batch_size": 2, "lr": 1e-2, "threads": 1}
    options |= {"eval_every": 0, "save_every": 0, "betas": (0.0, 8.0), "max_new_tokens": 6, "top_k": 0}
    return ilql.main(ilql.Args(model=model, run_dir=str(run_dir), dataset=rows, **options | SETTINGS | flags))


def heads(run_dir):
    return safetensors.torch.load_file(Path(run_dir) / "hf_model" / ilql.HEADS_FILE)


def first_policy(model):
    """What a run with the default seed begins with."""
    return ilql.PolicyWithQ(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), seed=1).eval()


# ---- What it learns: a chain -----------------------------------------------------------------------------------------

# A state is the last letter. From a the policy takes b (3 of 4) or c, and the environment replies g or h to b, h to c;
# from g it takes i or j, from h i or k, from i k or the end, from j and k the end, each as often as the other.
WALKS = {"abgi": 3, "abgik": 3, "abgj": 6, "abhi": 3, "abhik": 3, "abhk": 6, "achi": 2, "achik": 2, "achk": 4}
GAIN = {"b": 0.2, "c": 0.6, "i": 1.0, "j": 0.3, "k": -0.5}  # of the first output, and of the last letter


def chain_rows():
    """Each walk as often as the policy takes it, then all of them again, cut in the last output: marked as truncated
    they bootstrap, and change no value."""
    rows = []
    for walk, count in WALKS.items():
        reward = [GAIN[walk[1]], GAIN[walk[-1]]]
        rows += [{"dialogue": [*walk[:3], walk[3:]], "reward": reward, "truncated": False}] * count
    cut = [{"dialogue": row["dialogue"][:3] + [row["dialogue"][3][0]], "truncated": True} for row in rows]
    return rows + [short | {"reward": [row["reward"][0], 0.0]} for short, row in zip(cut, rows, strict=True)]


# gamma is 0.9, tau 0.8: the larger of two values counts 0.8 where both are equally often, and 4 / 7 where it is 1 in 4.
CHAIN_Q = {
    "j.": 0.3,
    "k.": -0.5,
    "i.": 1.0,
    "ik": 0.9 * -0.5,
    "gi": 0.9 * 0.71,
    "gj": 0.9 * 0.3,
    "hi": 0.9 * 0.71,
    "hk": 0.9 * -0.5,
    "ab": 0.2 + 0.9 * (0.5652 + 0.4212) / 2,
    "ac": 0.6 + 0.9 * 0.4212,
}
CHAIN_V = {
    "j": 0.3,
    "k": -0.5,
    "i": 0.8 * 1.0 + 0.2 * -0.45,  # 0.71
    "g": 0.8 * 0.639 + 0.2 * 0.27,  # 0.5652
    "h": 0.8 * 0.639 + 0.2 * -0.45,  # 0.4212
    "a": 4 / 7 * 0.97908 + 3 / 7 * 0.64388,
}


def test_values_are_learned_exactly(build_model, letters, tmp_path):
    """Those of every state by V, of every action by all four heads; rewards are as given."""
    build_model(n_embd=24, n_layer=1, initializer_range=0.2).save_pretrained(tmp_path / "model")
    letters.save_pretrained(tmp_path / "model")
    rows = chain_rows()
    flags = {"tau": 0.8, "gamma": 0.9, "cql_scale": 0, "awac_scale": 0, "normalize_rewards": False, "seed": 3}
    flags |= {"batch_size": len(rows), "micro_batch_size": 96, "total_steps": 160, "lr": 1e-2, "warmup_steps": 20}
    flags |= {"steps_for_target_q_sync": 1, "polyak_alpha": 0.5}
    _, run_dir = run_ilql(str(tmp_path / "model"), tmp_path / "run", rows, **flags)
    policy = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64)
    for walk in WALKS:
        ids = torch.tensor([letters(walk)["input_ids"]])
        with torch.no_grad():
            states = policy.lm(ids, output_hidden_states=True).hidden_states[-1][0]
        for place in (0, *range(2, len(walk))):  # behind the first output the environment replies
            assert policy.v_head(states[place]).item() == pytest.approx(CHAIN_V[walk[place]], abs=0.05)
            action = (walk + ".")[place + 1]
            token = EOS if action == "." else letters.convert_tokens_to_ids(action)
            for head in (*policy.q_heads, *policy.target_q_heads):
                found = head(states[place])[token].item()
                assert found == pytest.approx(CHAIN_Q[walk[place] + action], abs=0.05), walk[: place + 1] + action


# ---- Steps -----------------------------------------------------------------------------------------------------------


def test_the_first_step_is_the_slow_definition(gpt2_dir, tmp_path):
    """Means over the actions of all rows, of training and of evaluation; and the norm of their gradient."""
    policy = first_policy(gpt2_dir)
    slow = slow_terms(policy, EPISODES, settings())
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
    learning_rate = ilql.learning_rate
    before = []

    def counted(args, step, total_steps):
        before.append(len(calls))
        return learning_rate(args, step, total_steps)

    monkeypatch.setattr(ilql, "learning_rate", counted)
    flags = {"total_steps": 7, "batch_size": 2, "steps_for_target_q_sync": 3, "polyak_alpha": 0.3}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    assert [record["target/syncs"] for record in found] == [0, 0, 1, 1, 1, 2, 2]
    assert before == [0, 0, 0, 1, 1, 1, 2] and len(calls) == 2
    assert {args[2] for args, _ in calls} == {0.3}


# ---- Samples of each beta --------------------------------------------------------------------------------------------


def test_evaluation_samples_from_each_beta(monkeypatch, gpt2_dir, tmp_path):
    """The filters choose from pi, and not from what is drawn from; a mask forbids tokens whatever beta is."""
    shaped = recorded(monkeypatch, ilql, "shape_logits")
    drawn = []

    def recording(logits, uniforms, *filters):
        drawn.append(filters)
        return draw(logits, uniforms, *filters)

    monkeypatch.setattr(sampling, "draw", recording)
    mask = BIGRAMS.clone()
    mask[:, 7:] = True
    flags = {"eval_every": 2, "total_steps": 2, "top_k": 3, "top_p": 0.9, "eval_temperature": 0.5}
    flags |= {"metric": lengths, "eval_prompts": PROMPTS, "logit_mask": mask.numpy()}
    metrics, run_dir = run_ilql(gpt2_dir, tmp_path / "run", **flags)
    assert {args[3:6] for args, _ in shaped} == {(0.0, 3, 0.9), (8.0, 3, 0.9)}
    assert set(drawn) == {(0.5, 0, 1.0)}  # temperature, top_k, top_p
    found = samples(run_dir)
    assert [(row["step"], row["beta"]) for row in found] == [(0, 0.0), (0, 8.0)] * 5 + [(2, 0.0), (2, 8.0)] * 5
    assert set("".join(row["output"] for row in found)) <= set("abcdefg")
    for beta in (0, 8):
        of_beta = [row["length"] for row in found[10:] if row["beta"] == beta]
        assert metrics[f"eval/length@beta={beta}"] == pytest.approx(fmean(of_beta))


def test_the_best_beta_chooses_the_best_model(gpt2_dir, tmp_path, capsys):
    """By the first metric; the second one and the last beta are best at other steps. The last evaluation's best beta
    is the headline, and how to sample."""
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


# ---- Export ----------------------------------------------------------------------------------------------------------


def test_an_export_is_continued_with_its_heads(gpt2_dir, tmp_path, capsys):
    """What the first run ends with is where the second one starts. transformers reads the model alone, and the lines
    of use that a run ends with work."""
    flags = {"eval_dataset": DIALOGUES, "eval_every": 9, "two_qs": False, "steps_for_target_q_sync": 2}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "one", **flags)
    usage = (run_dir / "README.md").read_text().split("```python\n")[1].split("\n```")[0]
    assert usage in capsys.readouterr().out
    exec(usage, {})
    assert capsys.readouterr().out.startswith("ab")
    export = run_dir / "hf_model"
    policy = ilql.PolicyWithQ.load(export, dtype=torch.float64)
    saved = heads(run_dir)
    assert saved.keys() == policy.head_weights().keys()
    assert all(torch.equal(saved[name], weight) for name, weight in policy.head_weights().items())
    plain, report = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(plain.eval()(IDS).logits, policy.eval().lm(IDS).logits)
    _, again = run_ilql(str(export), tmp_path / "two", **flags)
    for name in ("loss", *LOSSES):
        assert log(again)[0][f"eval/{name}"] == pytest.approx(log(run_dir)[-1][f"eval/{name}"], rel=1e-12)
    with pytest.raises(InputError, match=r"ilql_heads.safetensors does not fit .*it was written with --no-two-qs\Z"):
        run_ilql(str(export), tmp_path / "three")
    assert not (tmp_path / "three").exists()
