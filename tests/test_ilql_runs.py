"""Whole runs of algos/ilql.py: `python -m pytest tests/test_ilql_runs.py`

What it learns is compared with values worked out by hand on a chain whose data follow their policy exactly. Then: the
first step by the slow definition of test_ilql.py, targets that are synchronised when they should be, samples of each
beta, what is exported, and random walks with true and with shuffled rewards. Runs are in-process.
"""

from pathlib import Path
from statistics import fmean

import pytest
import safetensors.torch
import torch
from helpers import EOS, close, log, recorded, samples, weights
from test_ilql import BIGRAMS, DIALOGUES, EPISODES, IDS, LOSSES, SETTINGS, gradients, settings, slow_terms
from transformers import AutoModelForCausalLM

from algos import ilql
from benchmarks.tasks import randomwalks
from common import sampling
from common.cli import InputError, from_task
from common.seeding import draw, rng

SLOW = pytest.mark.slow
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


def chain_values(tau, gamma):
    """V {state: value} and Q {(state, action): value}, from the end to the beginning."""

    def expectile(one, other, share=0.5):
        """Of two values, the larger of which has this share."""
        above = tau * share
        below = (1 - tau) * (1 - share)
        return (above * max(one, other) + below * min(one, other)) / (above + below)

    q = {"j.": 0.3, "k.": -0.5, "i.": 1.0}
    v = {"j": 0.3, "k": -0.5}
    q["ik"] = gamma * v["k"]
    v["i"] = expectile(q["i."], q["ik"])
    q |= {"gi": gamma * v["i"], "gj": gamma * v["j"], "hi": gamma * v["i"], "hk": gamma * v["k"]}
    v["g"] = expectile(q["gi"], q["gj"])
    v["h"] = expectile(q["hi"], q["hk"])
    q["ab"] = 0.2 + gamma * (v["g"] + v["h"]) / 2
    q["ac"] = 0.6 + gamma * v["h"]
    assert q["ac"] > q["ab"]
    v["a"] = expectile(q["ab"], q["ac"], share=1 / 4)
    return v, q


def test_values_of_the_chain_by_hand():
    v, q = chain_values(0.8, 0.9)
    assert v == pytest.approx({"j": 0.3, "k": -0.5, "i": 0.71, "g": 0.5652, "h": 0.4212, "a": 0.8354229}, abs=1e-6)
    assert q["ab"] == pytest.approx(0.64388) and q["ac"] == pytest.approx(0.97908)


@pytest.mark.parametrize(("tau", "gamma", "steps"), [(0.8, 0.9, 250), pytest.param(0.9, 1.0, 500, marks=SLOW)])
def test_values_are_learned_exactly(build_model, letters, tmp_path, tau, gamma, steps):
    """Those of every state by V, of every action by all four heads; rewards are as given."""
    build_model(n_embd=24, initializer_range=0.2).save_pretrained(tmp_path / "model")
    letters.save_pretrained(tmp_path / "model")
    rows = chain_rows()
    flags = {"tau": tau, "gamma": gamma, "cql_scale": 0, "awac_scale": 0, "normalize_rewards": False, "seed": 3}
    flags |= {"batch_size": len(rows), "micro_batch_size": 96, "total_steps": steps, "lr": 1e-2, "warmup_steps": 20}
    flags |= {"steps_for_target_q_sync": 1, "polyak_alpha": 0.3}
    _, run_dir = run_ilql(str(tmp_path / "model"), tmp_path / "run", rows, **flags)
    policy = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64)
    v, q = chain_values(tau, gamma)
    for walk in WALKS:
        ids = torch.tensor([letters(walk)["input_ids"]])
        with torch.no_grad():
            states = policy.lm(ids, output_hidden_states=True).hidden_states[-1][0]
        for place in (0, *range(2, len(walk))):  # behind the first output the environment replies
            assert policy.v_head(states[place]).item() == pytest.approx(v[walk[place]], abs=0.05)
            action = (walk + ".")[place + 1]
            token = EOS if action == "." else letters.convert_tokens_to_ids(action)
            for head in (*policy.q_heads, *policy.target_q_heads):
                found = head(states[place])[token].item()
                assert found == pytest.approx(q[walk[place] + action], abs=0.05), walk[: place + 1] + action


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


def test_learning_rate_and_epochs(gpt2_dir, tmp_path):
    """A warm-up of 2 steps, then half a cosine; 2 epochs of 6 rows are 3 steps of 5."""
    flags = {"total_steps": None, "epochs": 2.0, "warmup_steps": 2, "lr_final": 1e-4}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    assert [record["optim/lr"] for record in found] == pytest.approx([5e-3, 1e-2, 1e-2], rel=1e-12)
    assert found[-1]["train/epoch"] == pytest.approx(15 / 6)


@pytest.mark.parametrize("every", [1, 3])
def test_targets_follow_every_so_many_steps_whatever_the_data(monkeypatch, gpt2_dir, tmp_path, every):
    """Counted over the whole run, of 7 steps with epochs of 3; a synchronisation is behind the optimizer's step."""
    calls = recorded(monkeypatch, ilql, "polyak_update")
    learning_rate = ilql.learning_rate
    before = []

    def counted(args, step, total_steps):
        before.append(len(calls))
        return learning_rate(args, step, total_steps)

    monkeypatch.setattr(ilql, "learning_rate", counted)
    flags = {"total_steps": 7, "batch_size": 2, "steps_for_target_q_sync": every, "polyak_alpha": 0.3}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    assert [record["target/syncs"] for record in found] == [step // every for step in range(1, 8)]
    assert before == [step // every for step in range(7)] and len(calls) == 7 // every
    assert {args[2] for args, _ in calls} == {0.3}


@pytest.mark.parametrize(("steps", "every"), [(3, 3), (3, 4)])
def test_one_synchronisation_or_none(gpt2_dir, tmp_path, steps, every):
    """It moves the targets by alpha of what lies between; before it they are the first heads, bitwise."""
    flags = {"total_steps": steps, "steps_for_target_q_sync": every, "polyak_alpha": 0.3}
    found = heads(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    first = first_policy(gpt2_dir).head_weights()
    targets = [name for name in found if name.startswith("target_")]
    assert len(targets) == 8
    for target in targets:
        online = target.removeprefix("target_")
        moved = first[online] + 0.3 * (found[online] - first[online])
        assert (found[online] - first[online]).abs().max() > 1e-3
        if steps == every:
            close(found[target], moved)
        else:
            assert torch.equal(found[target], first[online])


@pytest.mark.case(33, "ilql")
def test_an_infinite_loss_stops_before_the_step(gpt2_dir, tmp_path):
    rows = [*DIALOGUES[:4], DIALOGUES[4] | {"reward": 1e30}]
    with pytest.raises(FloatingPointError, match=r"step 1: loss inf, .*rows \[.*4.*\]; the last checkpoint is intact"):
        run_ilql(gpt2_dir, tmp_path / "run", rows, normalize_rewards=False, dtype="float32", save_every=1)
    assert not (tmp_path / "run/checkpoints").exists() and not (tmp_path / "run/hf_model").exists()


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


def greedy(policy, tokenizer, beta):
    """Greedy outputs by log pi + beta (min Q^ - V), slowly."""
    found = []
    for row in PROMPTS:
        ids = tokenizer(row["prompt"])["input_ids"]
        start = len(ids)
        while len(ids) < start + 6 and ids[-1] != EOS:
            with torch.no_grad():
                output = policy.lm(torch.tensor([ids]), output_hidden_states=True)
                state = output.hidden_states[-1][0, -1]
                q = torch.minimum(*(head(state) for head in policy.target_q_heads))
                scores = output.logits[0, -1].log_softmax(-1) + beta * (q - policy.v_head(state))
            ids.append(scores.argmax().item())
        found.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    return found


def outputs(run_dir, beta):
    return [row["output"] for row in samples(run_dir, step=1) if row["beta"] == beta]


def test_greedy_evaluation(gpt2_dir, tmp_path, letters):
    """With beta; of one token that the filters leave it is the favourite of pi, whatever its Q."""
    flags = {"lr": 1e-30, "total_steps": 1, "eval_every": 1, "metric": lengths, "eval_prompts": PROMPTS}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "run", betas=(0.0, 20.0), eval_temperature=0, **flags)
    _, filtered = run_ilql(gpt2_dir, tmp_path / "filtered", betas=(0.0, 20.0), top_k=1, **flags)
    policy = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64)
    plain = greedy(policy, letters, 0.0)
    assert outputs(run_dir, 0) == outputs(filtered, 0) == outputs(filtered, 20) == plain
    assert outputs(run_dir, 20) == greedy(policy, letters, 20.0) != plain


SCRIPTED = [0, 0, 0, 5, 9, 2, 1, 8, 3, 7, 2, 7]  # of betas 0, 4 and 8 at steps 0, 2, 4 and 6


def test_the_best_beta_chooses_the_best_model(gpt2_dir, tmp_path, capsys):
    """By the first metric; the second one and the last beta are best at other steps. The last evaluation's best beta
    is the headline, and how to sample."""
    values = iter(SCRIPTED)

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


def test_the_lowest_loss_chooses_without_a_metric(gpt2_dir, tmp_path):
    flags = {"total_steps": 6, "eval_every": 1, "keep_checkpoints": 1, "lr": 0.2, "lr_schedule": "constant"}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "run", eval_dataset=DIALOGUES[:2], **flags)
    found = [record["eval/loss"] for record in log(run_dir)[1:]]
    best = 1 + found.index(min(found))
    assert {int(path.name[-4:]) for path in (run_dir / "checkpoints").iterdir()} == {best, 6}
    assert best < 6


# ---- Export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_qs", [True, False])
def test_an_export_is_continued_with_its_heads(gpt2_dir, tmp_path, two_qs, capsys):
    """What the first run ends with is where the second one starts. transformers reads the model alone, and the lines
    of use that a run ends with work."""
    flags = {"eval_dataset": DIALOGUES, "eval_every": 9, "two_qs": two_qs, "steps_for_target_q_sync": 2}
    _, run_dir = run_ilql(gpt2_dir, tmp_path / "one", **flags)
    usage = (run_dir / "README.md").read_text().split("```python\n")[1].split("\n```")[0]
    assert usage in capsys.readouterr().out
    exec(usage, {})
    assert capsys.readouterr().out.startswith("ab")
    export = run_dir / "hf_model"
    policy = ilql.PolicyWithQ.load(export, dtype=torch.float64)
    assert len(policy.q_heads) == len(policy.target_q_heads) == 1 + two_qs
    saved = heads(run_dir)
    assert saved.keys() == policy.head_weights().keys()
    assert all(torch.equal(saved[name], weight) for name, weight in policy.head_weights().items())
    plain, report = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(plain.eval()(IDS).logits, policy.eval().lm(IDS).logits)
    _, again = run_ilql(str(export), tmp_path / "two", **flags)
    for name in ("loss", *LOSSES):
        assert log(again)[0][f"eval/{name}"] == pytest.approx(log(run_dir)[-1][f"eval/{name}"], rel=1e-12)
    with pytest.raises(InputError, match=r"ilql_heads.safetensors does not fit .*two-qs[^\n]*\Z"):
        run_ilql(str(export), tmp_path / "three", two_qs=not two_qs)
    assert not (tmp_path / "three").exists()


# ---- Random walks ----------------------------------------------------------------------------------------------------


def gain(run_dir, rows):
    """Optimality of samples with beta 16 and how much more it is than with beta 0, after a short run."""
    flags = {"run_dir": str(run_dir), "dataset": rows, "polyak_alpha": 0.3, "threads": 1, "betas": (0.0, 16.0)}
    flags |= {"eval_prompts": randomwalks.eval_prompts(samples=10), "eval_every": 60, "save_every": 0}
    flags |= {"total_steps": 60, "batch_size": 48, "warmup_steps": 10}
    metrics, _ = ilql.main(from_task(ilql.Args, ilql.TASK, **flags))
    imitation, learned = (metrics[f"eval/optimality@beta={beta}"] for beta in (0, 16))
    return learned - imitation


@SLOW
def test_it_learns_from_the_rewards(tmp_path):
    """With rewards dealt out at random over the same walks nothing is gained."""
    rows = randomwalks.rewarded()
    order = rng(0, "shuffled rewards").permutation(len(rows))
    shuffled = [row | {"reward": rows[i]["reward"]} for row, i in zip(rows, order, strict=True)]
    assert gain(tmp_path / "true", rows) > 0.4
    assert gain(tmp_path / "shuffled", shuffled) < 0.1
