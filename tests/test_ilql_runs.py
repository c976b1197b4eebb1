"""Whole runs of algos/ilql.py: `python -m pytest tests/test_ilql_runs.py`

What it learns is compared with dynamic programming on a chain whose data follow their policy exactly. Then: targets
that are synchronised when they should be, runs that continue bitwise, ways to compute that change nothing, command
lines as typed, bad input, and random walks with true and with shuffled rewards. Runs are in-process unless a launcher
matters.
"""

import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from algos import ilql
from benchmarks.tasks import randomwalks
from common import forward, logging, models
from common.cli import InputError, cli, from_task
from common.seeding import rng, stream_rows

SLOW = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
BOS, EOS = 21, 22
LETTERS = randomwalks.LETTERS
# Two turns, numbers and lists, a row that goes on, an empty output, no prompt, and one that --max-length 12 cuts.
ROWS = [
    {"dialogue": dialogue, "reward": reward, "truncated": truncated}
    for dialogue, reward, truncated in [
        (["b", "cd", "e", "fa"], [0.5, 1.0], False), (["cde", "fgh"], 2.0, False), (["g", "hij"], -1, True),
        (["k", "", "l", "m"], [0, 0.3], False), (["", "nopqrst"], 0.7, False),
        (["u", "a", "b", "c", "d", "e"], [0.1, 0.2, 0.3], False), (["fg", "hijklmnopqrstu"], 1.5, False),
    ]
]  # fmt: skip
PROMPTS = [{"prompt": prompt} for prompt in ("b", "cde", "fghij", "k", "nopq")]


def lengths(outputs, **columns):
    return {"length": [len(output) for output in outputs]}


def run_ilql(model, run_dir, rows=ROWS, **flags):
    """Four steps of 5 of the 7 rows in which every loss and flag counts, unless flags say otherwise."""
    settings = {
        "dtype": "float64", "total_steps": 4, "batch_size": 5, "micro_batch_size": 5, "lr": 1e-2, "warmup_steps": 0,
        "gamma": 0.9, "cql_scale": 0.3, "awac_scale": 0.7, "awac_beta": 0.5, "awac_clip": 1.02, "weight_decay": 0.1,
        "polyak_alpha": 0.3, "steps_for_target_q_sync": 2, "max_length": 12, "eval_every": 0, "save_every": 0,
        "tau": 0.9, "adam_betas": (0.9, 0.95), "threads": 1, "betas": (0.0, 8.0), "max_new_tokens": 6, "top_k": 0,
    }  # fmt: skip
    return ilql.main(ilql.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def log(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def samples(run_dir, step=None):
    rows = [json.loads(line) for line in (Path(run_dir) / "samples.jsonl").read_text().splitlines()]
    return [row for row in rows if step is None or row["step"] == step]


def outputs(run_dir, beta):
    return [row["output"] for row in samples(run_dir) if row["beta"] == beta]


def weights(folder):
    """{file.name: tensor} of an export or a checkpoint."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {f"{f.stem}.{k}": v for f in files for k, v in safetensors.torch.load_file(f).items()}


def heads(folder):
    return safetensors.torch.load_file(Path(folder) / "ilql_heads.safetensors")


def close(a, b):
    """Metrics and exports of two runs (their directories) agree to 1e-9."""
    for one, two in zip(log(a), log(b), strict=True):
        assert one == pytest.approx(two, rel=1e-9, abs=1e-9)
    x, y = weights(Path(a) / "hf_model"), weights(Path(b) / "hf_model")
    assert x.keys() == y.keys()
    for name in x:
        assert (x[name] - y[name]).abs().max() <= 1e-9 * x[name].abs().max() + 1e-12, name


def recorded(monkeypatch, name):
    """Replaces a function of ilql by one that keeps the arguments of every call in the returned list."""
    calls, function = [], getattr(ilql, name)
    monkeypatch.setattr(ilql, name, lambda *args, **options: (calls.append(args), function(*args, **options))[1])
    return calls


def jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- What it learns: a chain -----------------------------------------------------------------------------------------

# A state is the last token. From a the policy takes b (3 of 4) or c; the environment replies; "." is the end token.
POLICY = {"a": "bbbc", "g": "ij", "h": "ik", "i": ".k", "j": ".", "k": "."}
REPLY = {"b": "gh", "c": "h"}
GAIN = {"ab": 0.2, "ac": 0.6, "i.": 1.0, "j.": 0.3, "k.": -0.5}


def walks(text="a"):
    """{walk: probability}"""
    if text[-1] == ".":
        return {text: 1.0}
    found, options = {}, POLICY.get(text[-1]) or REPLY[text[-1]]
    for token in options:
        for walk, p in walks(text + token).items():
            found[walk] = found.get(walk, 0) + p / len(options)
    return found


# Each walk as often as its probability x 32 says.
CHAIN = [
    {"dialogue": [w[0], w[1], w[2], w[3:-1]], "reward": [GAIN[w[:2]], GAIN[w[-2:]]], "truncated": False}
    for w, p in walks().items()
    for _ in range(round(32 * p))
]


def expectile(values, tau):
    """The fixed point of v = sum w q / sum w with w = tau where q > v, else 1 - tau."""
    v = 0.0
    for _ in range(500):
        w = [tau if q > v else 1 - tau for q in values]
        v = sum(a * b for a, b in zip(w, values, strict=True)) / sum(w)
    return v


def chain_values(tau, gamma):
    """V of each state of the chain, by value iteration."""
    v = dict.fromkeys(POLICY, 0.0)
    for _ in range(10):
        for s, actions in POLICY.items():
            nexts = {a: [v[x] for x in REPLY.get(a, a) if x != "."] or [0.0] for a in actions}
            v[s] = expectile([GAIN.get(s + a, 0.0) + gamma * fmean(nexts[a]) for a in actions], tau)
    return v


def truth(rows, tau, gamma):
    """V {text: value} and Q {(text, token): value} of dialogues, by dynamic programming from their longest texts; the
    texts are all that was said before an action."""
    taken, v, q = {}, {None: 0.0}, {}
    for row in rows:
        text, steps, parts = "", [], row["dialogue"]
        for i, part in enumerate(parts):
            output = part + "." * (i == len(parts) - 1 and not row["truncated"])
            for n, token in enumerate(output):
                if i % 2:
                    steps.append((text, token, row["reward"][i // 2] * (n == len(output) - 1)))
                text += token
        nexts = [state for state, _, _ in steps[1:]] + [text if row["truncated"] else None]
        for (state, action, reward), after in zip(steps, nexts, strict=True):
            taken.setdefault(state, []).append((action, reward, after))
    for state in sorted(taken, key=len, reverse=True):
        for action in {a for a, _, _ in taken[state]}:
            q[state, action] = fmean(r + gamma * v[after] for a, r, after in taken[state] if a == action)
        v[state] = expectile([q[state, a] for a, _, _ in taken[state]], tau)
    del v[None]
    return v, q


def learned(folder, texts):
    """{text: (V, [Q of every head and target (25,)])} of an export, from plain hidden states."""
    policy, tokenizer = ilql.PolicyWithQ.load(folder, dtype=torch.float64), randomwalks.tokenizer()
    found = {}
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            state = policy.lm(ids, output_hidden_states=True).hidden_states[-1][0, -1]
            qs = [head(state) for head in [*policy.q_heads, *policy.target_q_heads]]
            found[text] = policy.v_head(state).item(), qs
    return found


def assert_learned(folder, v, q, tolerance=0.03):
    found = learned(folder, v)
    assert {text: found[text][0] for text in v} == pytest.approx(v, abs=tolerance)
    for (text, token), value in q.items():
        action = EOS if token == "." else LETTERS.index(token)
        assert [x[action].item() for x in found[text][1]] == pytest.approx([value] * 4, abs=tolerance), text + token


@pytest.fixture(scope="module")
def learn(tmp_path_factory, build_model):
    """learn(rows, **flags): export of a run that fits Q and V of the rows alone."""
    model = build_model(n_embd=24, initializer_range=0.2)
    model.save_pretrained(folder := tmp_path_factory.mktemp("chain"))
    randomwalks.tokenizer().save_pretrained(folder)

    def run(rows, **flags):
        settings = {"cql_scale": 0, "awac_scale": 0, "normalize_rewards": False, "steps_for_target_q_sync": 1}
        settings |= {"batch_size": len(rows), "micro_batch_size": 96, "total_steps": 500, "adam_betas": (0.9, 0.999)}
        settings |= {"warmup_steps": 20, "weight_decay": 0, "max_length": 1024, "lr": 5e-3, "seed": 3}
        return run_ilql(str(folder), tmp_path_factory.mktemp("run") / "run", rows, **settings | flags)[1] / "hf_model"

    return run


def test_the_data_are_exactly_the_chain():
    """So that what follows is about states: rows are whole, and V depends on the last token alone."""
    assert len(CHAIN) == 32 and len({str(row) for row in CHAIN}) == 9
    for tau, gamma in [(0.5, 0.9), (0.9, 0.9), (0.7, 1.0)]:
        expected = chain_values(tau, gamma)
        v, _ = truth(CHAIN, tau, gamma)
        assert {text[-1] for text in v} == set(POLICY)
        assert v == pytest.approx({text: expected[text[-1]] for text in v}, abs=1e-9)
    assert chain_values(0.5, 0.9)["i"] == pytest.approx((1 - 0.9 * 0.5) / 2)  # by hand
    assert expectile([0.0, 1.0], 0.9) == pytest.approx(0.9) and expectile([2.0], 0.3) == 2


@pytest.mark.parametrize(
    ("tau", "gamma"), [(0.9, 0.9), pytest.param(0.5, 0.9, marks=SLOW), pytest.param(0.9, 1.0, marks=SLOW)]
)
def test_values_are_those_of_dynamic_programming(learn, tau, gamma):
    """0.5: the value of the behaviour; 0.9: near the best of the data's actions."""
    v, q = truth(CHAIN, tau, gamma)
    assert v["abgi"] == pytest.approx(0.275 if tau == 0.5 else 0.855 if gamma < 1 else 0.85, abs=1e-3)
    assert_learned(learn(CHAIN, tau=tau, gamma=gamma), v, q)


@pytest.mark.parametrize("how", ["truncated", pytest.param("ended", marks=SLOW)])
def test_rows_that_go_on_leave_the_values(learn, how):
    """A second copy of each row is cut in its last output. Marked as truncated it bootstraps, and the truth stays;
    taken for ended it gets nothing more, which drags the values down."""
    cut = [row | {"dialogue": [*row["dialogue"][:3], row["dialogue"][3][:1]], "truncated": True} for row in CHAIN]
    cut = [row | {"reward": [row["reward"][0], 0.0], "truncated": how == "truncated"} for row in cut]
    (whole, _), (v, q) = truth(CHAIN, 0.8, 0.9), truth(CHAIN + cut, 0.8, 0.9)
    changed = max(abs(v[text] - whole[text]) for text in v)
    assert v.keys() == whole.keys() and (changed < 1e-9) == (how == "truncated") and (changed > 0.1) == (how == "ended")
    assert_learned(learn(CHAIN + cut, tau=0.8), v, q)


def test_a_cut_row_is_a_truncated_one(gpt2_dir, tmp_path):
    """--max-length cuts before the last action that begins within it, and takes the rewards behind."""
    rows = [{"dialogue": ["b", "cdef"], "reward": 1, "truncated": False}, ROWS[0], ROWS[5]]
    by_hand = [(["b", "cde"], 0), (["b", "cd", "e", ""], [0.5, 0]), (["u", "a", "b", ""], [0.1, 0])]
    by_hand = [{"dialogue": dialogue, "reward": reward, "truncated": True} for dialogue, reward in by_hand]
    for name, found, flags in (("cut", rows, {"max_length": 4}), ("hand", by_hand, {"max_length": 9})):
        run_ilql(gpt2_dir, tmp_path / name, found, normalize_rewards=False, batch_size=3, **flags)
    assert log(tmp_path / "cut") == log(tmp_path / "hand")


def test_the_first_value_is_the_discounted_return(learn):
    """One row, no normalisation: gamma^(T - 1) r in the first state (trlX could not say this)."""
    rows = [{"prompt": "b", "completion": "cdef", "reward": 2.0}]
    folder = learn(rows, gamma=0.8, tau=0.5, total_steps=300, seed=1)
    found = learned(folder, ["b", "bc", "bcd", "bcde", "bcdef"])
    assert [v for v, _ in found.values()] == pytest.approx([2 * 0.8**k for k in (4, 3, 2, 1, 0)], abs=0.03)


# ---- Targets ---------------------------------------------------------------------------------------------------------


def initial_heads(model, **options):
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return ilql.PolicyWithQ(lm, **({"seed": 1} | options)).head_weights()


def pairs_of_heads(found):
    """[(target, online)] names"""
    names = [(name, name.removeprefix("target_")) for name in found if name.startswith("target_")]
    assert len(names) == 8 and all(online in found for _, online in names)
    return names


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
@pytest.mark.parametrize("every", [1, 3, 4])
def test_targets_follow_every_so_many_steps_whatever_the_data(monkeypatch, gpt2_dir, tmp_path, rows, every):
    calls, learning_rate, before = recorded(monkeypatch, "polyak_update"), ilql.learning_rate, {}
    monkeypatch.setattr(ilql, "learning_rate", lambda *x: (before.update({x[1]: len(calls)}), learning_rate(*x))[1])
    flags = {"total_steps": 10, "batch_size": 2, "steps_for_target_q_sync": every}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", ROWS[:rows], **flags)[1])
    assert [record["target/syncs"] for record in found] == [n // every for n in range(1, 11)]
    assert before == {n: n // every for n in range(10)} and len(calls) == 10 // every
    assert {args[2] for args in calls} == {0.3}


def test_full_copies_at_every_step(gpt2_dir, tmp_path):
    _, run = run_ilql(gpt2_dir, tmp_path / "run", polyak_alpha=1.0, steps_for_target_q_sync=1, total_steps=3)
    found, before = heads(run / "hf_model"), initial_heads(gpt2_dir)
    for target, online in pairs_of_heads(found):
        assert torch.equal(found[target], found[online]) and not torch.equal(found[online], before[online])


@pytest.mark.parametrize(("steps", "every"), [(2, 2), (3, 4), (3, 3)])
def test_one_synchronisation_or_none(gpt2_dir, tmp_path, steps, every):
    """It moves the targets by alpha of what lies between; before it they are the first heads, bitwise."""
    flags = {"total_steps": steps, "steps_for_target_q_sync": every, "polyak_alpha": 0.3}
    _, run = run_ilql(gpt2_dir, tmp_path / "run", **flags)
    found, before = heads(run / "hf_model"), initial_heads(gpt2_dir)
    for target, online in pairs_of_heads(found):
        assert torch.equal(before[target], before[online])
        moved = before[online] + 0.3 * (found[online] - before[online]) if steps == every else before[target]
        assert torch.allclose(found[target], moved, rtol=0, atol=1e-15)
        assert (found[online] - before[online]).abs().max() > 1e-3
        assert steps == every or torch.equal(found[target], before[target])


def test_the_heads_are_keyed_by_the_seed(gpt2_dir, tmp_path):
    """Not by what torch's generator holds; and data order and heads are another seed's with --seed."""
    runs = {}
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        torch.manual_seed(len(runs))
        runs[name] = weights(run_ilql(gpt2_dir, tmp_path / name, seed=seed)[1] / "hf_model")
    assert all(torch.equal(runs["one"][k], runs["again"][k]) for k in runs["one"])
    assert all(not torch.equal(runs["one"][k], runs["two"][k]) for k in runs["one"] if "ilql_heads" in k)


# ---- Killed and continued --------------------------------------------------------------------------------------------


def all_bytes(run):
    names = ["metrics.jsonl", "samples.jsonl", "config.yaml"]
    names += [str(p.relative_to(run)) for p in run.rglob("*.safetensors") if "checkpoints" not in p.parts]
    newest = max(p.name for p in (run / "checkpoints").iterdir())
    names += [f"checkpoints/{newest}/{name}.safetensors" for name in ("model", "optim")]
    return {name: (run / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    ("how", "after"), [("stopped", 1), ("stopped", 4), ("stopped", 5), ("stopped", 7), ("killed", 5)]
)
def test_a_run_continues_bitwise(monkeypatch, gpt2_dir, tmp_path, how, after):
    """With targets between online and first heads, samples of two betas, a held-out set and a best export. A killed
    run falls back to step 4; targets are synchronised at steps 3 and 6 of the run, not of the process."""
    flags = {"total_steps": 7, "steps_for_target_q_sync": 3, "save_every": 2, "eval_every": 2, "dtype": "float32"}
    flags |= {"eval_dataset": ROWS[:3], "eval_prompts": PROMPTS, "metric": lengths, "micro_batch_size": 2}
    whole = run_ilql(gpt2_dir, tmp_path / "a/run", **flags)
    calls, stop_requested = [], logging.Run.stop_requested

    def stop(run):
        calls.append(1)
        if len(calls) == after:
            assert how == "stopped", "killed"  # the step is in metrics.jsonl, and no checkpoint
            os.kill(os.getpid(), 15)
        return stop_requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    with pytest.raises((SystemExit, AssertionError)) as stopped:
        run_ilql(gpt2_dir, tmp_path / "b/run", **flags)
    assert getattr(stopped.value, "code", None) == (143 if how == "stopped" else None)
    assert log(tmp_path / "b/run")[-1]["step"] == after
    monkeypatch.undo()
    syncs = recorded(monkeypatch, "polyak_update")
    assert run_ilql(gpt2_dir, tmp_path / "b/run", **flags)[0] == whole[0]
    assert len(syncs) == 2 - (after if how == "stopped" else 4) // 3
    one, two = all_bytes(tmp_path / "a/run"), all_bytes(tmp_path / "b/run")
    assert one.keys() == two.keys() and [name for name in one if one[name] != two[name]] == []
    assert {"hf_model/ilql_heads.safetensors", "hf_model_best/ilql_heads.safetensors"} < one.keys()
    found = heads(whole[1] / "hf_model")
    assert all(not torch.equal(found[target], found[online]) for target, online in pairs_of_heads(found))


# ---- What must not change the result ---------------------------------------------------------------------------------

HELD_OUT = {"eval_dataset": {"x": ROWS[:3], "y": ROWS[4:5]}, "eval_every": 2, "eval_prompts": PROMPTS}
HELD_OUT |= {"adam_eps": 1e-5}  # the gradient of a key's bias is zero but for rounding


@pytest.fixture(scope="module")
def plain(tiny_dirs, tmp_path_factory):
    """The run with which the others are compared."""
    return run_ilql(tiny_dirs["gpt2"], tmp_path_factory.mktemp("plain") / "run", metric=lengths, **HELD_OUT)[1]


def test_the_plain_run_is_worth_comparing(plain, gpt2_dir):
    before = safetensors.torch.load_file(f"{gpt2_dir}/model.safetensors")
    after = weights(plain / "hf_model")
    assert all((after[f"model.{k}"] - w).abs().max() > 1e-3 for k, w in before.items() if "attn.bias" not in k)
    first, last = log(plain)[1], log(plain)[-1]
    assert all(last[f"losses/{k}"] > 0 for k in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac"))
    assert first["tokens/actions"] != last["tokens/actions"] and last["target/syncs"] == 2
    assert {"eval/x/loss_q", "eval/y/loss_cql", "eval/length@beta=0", "eval/length@beta=8"} < last.keys()
    assert outputs(plain, 0) != outputs(plain, 8) and first["td_error/end"] != first["td_error/inner"] != 0


@pytest.mark.parametrize("way", ["in chunks", "all logits"])
def test_ways_to_compute_the_logits(monkeypatch, plain, gpt2_dir, tmp_path, way):
    if way == "in chunks":
        monkeypatch.setattr(forward, "CHUNK", 75)  # three rows of logits
    else:
        monkeypatch.setattr(models, "has_plain_output", lambda lm: False)
    close(run_ilql(gpt2_dir, tmp_path / "run", metric=lengths, **HELD_OUT)[1], plain)


# ---- Command lines ---------------------------------------------------------------------------------------------------

USER_FILE = """
import torch


def metric(outputs, **columns):
    return {"length": [len(output) for output in outputs], "vowels": [sum(c in "aeiou" for c in o) for o in outputs]}


def alphabet(size=25):
    mask = torch.ones(size, size, dtype=torch.bool)
    for i in range(20):
        mask[i, i + 1] = False
    mask[20, 22] = mask[19, 22] = False
    return mask


def thin():
    return alphabet()[:, :-1]


def whole_numbers():
    return alphabet().long()


def as_lists():
    return alphabet().tolist()


def ragged():
    return [[True], [True, False]]
"""
BASE = """--model model --dataset rows.jsonl --total-steps 4 --batch-size 4 --micro-batch-size 4 --max-new-tokens 5
--lr 2e-3 --steps-for-target-q-sync 1 --polyak-alpha 0.02 --threads 1 --run-dir run""".split()
SAMPLE = "--metric user.py:metric --eval-prompts prompts.jsonl --eval-every 2 --betas 0 1".split()
PLAIN_ROWS = [
    {"prompt": p, "completion": c, "reward": r}
    for p, c, r in [("b", "cda", 0.5), ("ef", "g", 1), ("h", "ijklm", -0.25), ("n", "", 0), ("opq", "rs", 2)]
]


def fill(folder, model):
    (folder / "model").symlink_to(model)
    (folder / "user.py").write_text(USER_FILE)
    jsonl(folder / "prompts.jsonl", PROMPTS), jsonl(folder / "rows.jsonl", PLAIN_ROWS)
    return folder


@pytest.fixture
def here(gpt2_dir, tmp_path, monkeypatch):
    """A working directory with model, rows and functions."""
    monkeypatch.chdir(fill(tmp_path, gpt2_dir))
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.fixture
def command(here, monkeypatch, capfd):
    """command(*flags) -> (exit code, stdout, stderr), as if typed; a word may hold several flags."""

    def run(*flags):
        words = [word for flag in flags for word in flag.split()]
        monkeypatch.setattr(sys, "argv", ["algos/ilql.py", *BASE, *words])
        capfd.readouterr()
        code = 0
        try:
            cli(ilql.Args, ilql.main, task=ilql.TASK)
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def typed(tiny_dirs, tmp_path_factory):
    """(directory of a run that a process of its own made with the flags of BASE and SAMPLE, its output)"""
    folder = fill(tmp_path_factory.mktemp("typed"), tiny_dirs["gpt2"])
    words = [sys.executable, ROOT / "algos/ilql.py", *BASE, *SAMPLE, "--eval-dataset", "rows.jsonl"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_what_a_run_leaves(typed):
    run, out = typed
    records = log(run)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    names = {f"eval/{name}@beta={beta}" for name in ("length", "vowels") for beta in (0, 1)}
    names |= {f"eval/{name}" for name in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac")}
    for record in records:
        assert {name for name in record if name.startswith("eval/")} == (names if record["step"] % 2 == 0 else set())
    table = samples(run)
    assert [*table[0]] == ["step", "beta", "prompt", "output", "length", "vowels"]
    assert [(row["step"], row["beta"], row["prompt"]) for row in table] == [
        (step, beta, row["prompt"]) for step in (0, 2, 4) for row in PROMPTS for beta in (0, 1)
    ]
    for record in records[::2]:
        for beta in (0, 1):
            found = [r["length"] for r in table if (r["step"], r["beta"]) == (record["step"], beta)]
            assert record[f"eval/length@beta={beta}"] == pytest.approx(fmean(found))
    for name in ("hf_model", "hf_model_best"):
        assert {"model.safetensors", "ilql_heads.safetensors", "tokenizer.json"} <= {
            p.name for p in (run / name).iterdir()
        }
        assert len(heads(run / name)) == 4 + 4 * 4
        lm, report = AutoModelForCausalLM.from_pretrained(run / name, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
    assert "5 rows, 0 cut, 0 dropped without an action left, 5 ended; actions of a row: 1 to 6, median 3" in out
    assert "first row, [not actions]: [b]cda<eos>" in out and "return 0.65 +- 0.8944, scaled to 0 +- 1" in out
    line = "lr 0.002 cosine, beta 0 1, at most 32 tokens a row, 5 new tokens, 3.2 epochs; targets take over 8% of Q"
    assert f"\n{line}\n" in out
    best = max((0, 1), key=lambda beta: records[-1][f"eval/length@beta={beta}"])
    assert re.search(rf"eval/length@beta={best} [▁▂▃▄▅▆▇█]+ \d", out) and (run / "curve.png").exists()


def test_the_last_lines_run(typed):
    """As they are printed and as the card has them, from the directory of the run."""
    run, out = typed
    usage = re.findall(r"^from transformers import AutoTokenizer; .*?^print.*?$", out, re.M | re.S)[-1]
    assert usage in (run / "README.md").read_text() and "PolicyWithQ" in usage
    best = max((0, 1), key=lambda beta: log(run)[-1][f"eval/length@beta={beta}"])
    assert f"guided(beta={best}, top_k=20, top_p=1):  # the best beta by the last evaluation" in usage
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", usage], cwd=run.parent, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("b"), done.stderr[-2000:]


def test_the_same_command_again(typed, monkeypatch, command, capfd):
    run, _ = typed
    before = {p: p.read_bytes() for p in run.rglob("*.safetensors")}
    monkeypatch.chdir(run.parent)
    code, out, _ = command(*SAMPLE, "--eval-dataset rows.jsonl")
    assert code == 0 and "run is finished" in out
    assert before == {p: p.read_bytes() for p in run.rglob("*.safetensors")}


@pytest.mark.parametrize("two_qs", [True, False])
def test_an_export_is_continued_with_its_heads(gpt2_dir, tmp_path, two_qs):
    """What the first run ends with is where the second one starts."""
    flags = {"eval_dataset": ROWS, "eval_every": 9, "total_steps": 5, "two_qs": two_qs}
    _, run = run_ilql(gpt2_dir, tmp_path / "one", **flags)
    _, again = run_ilql(str(run / "hf_model"), tmp_path / "two", **flags | {"batch_size": 7})
    end, start, first = log(run)[-1], log(again)[0], log(again)[1]
    for name in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac"):
        assert start[f"eval/{name}"] == pytest.approx(end[f"eval/{name}"], rel=1e-12)
        assert first[f"losses/{name}"] == pytest.approx(end[f"eval/{name}"], rel=1e-12)
    assert len(heads(again / "hf_model")) == (20 if two_qs else 12)
    assert abs(log(run)[0]["eval/loss"] - end["eval/loss"]) > 0.1
    with pytest.raises(InputError, match=r"ilql_heads.safetensors does not fit .*two-qs[^\n]*\Z"):
        run_ilql(str(run / "hf_model"), tmp_path / "three", two_qs=not two_qs)
    assert not (tmp_path / "three").exists()


def test_losses_of_evaluation_sets_are_those_of_training(gpt2_dir, tmp_path):
    """With almost no learning rate, and every row in the batch."""
    sets = {"all": ROWS, "twice": ROWS[::-1] * 2, "some": ROWS[2:5]}
    flags = {"lr": 1e-30, "batch_size": 7, "total_steps": 1, "eval_every": 1, "micro_batch_size": 2}
    metrics, _ = run_ilql(gpt2_dir, tmp_path / "run", eval_dataset=sets, **flags)
    for name in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac"):
        assert metrics[f"eval/all/{name}"] == pytest.approx(metrics[f"losses/{name}"], rel=1e-12)
        assert metrics[f"eval/twice/{name}"] == pytest.approx(metrics[f"losses/{name}"], rel=1e-12)
        assert metrics[f"eval/some/{name}"] != pytest.approx(metrics[f"losses/{name}"], rel=1e-6)
    total = sum(scale * metrics[f"losses/loss_{k}"] for k, scale in {"q": 1, "v": 1, "cql": 0.3, "awac": 0.7}.items())
    assert metrics["losses/loss"] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("all_end", [True, False])
def test_rewards_are_normalised_by_the_returns_of_training_rows(gpt2_dir, tmp_path, all_end):
    """Their deviation is divided by; where all rows end the mean is taken from the last action. Evaluation rows get the
    same."""
    rows = [row for row in ROWS[:6] if not (all_end and row["truncated"])]
    rewards = [row["reward"] if isinstance(row["reward"], list) else [row["reward"]] for row in rows]
    mean, std = fmean(map(sum, rewards)) * all_end, stdev(map(sum, rewards))
    rewards = [[0.0] * (len(row["dialogue"]) // 2 - len(r)) + r for row, r in zip(rows, rewards, strict=True)]
    rewards = [[*(x / std for x in r[:-1]), (r[-1] - mean) / std] for r in rewards]
    scaled = [row | {"reward": reward} for row, reward in zip(rows, rewards, strict=True)]
    flags = {"eval_every": 2, "total_steps": 3}
    run_ilql(gpt2_dir, tmp_path / "on", rows, eval_dataset=rows[1:3], **flags)
    run_ilql(gpt2_dir, tmp_path / "off", scaled, eval_dataset=scaled[1:3], normalize_rewards=False, **flags)
    run_ilql(gpt2_dir, tmp_path / "raw", rows, eval_dataset=rows[1:3], normalize_rewards=False, **flags)
    close(tmp_path / "on", tmp_path / "off")
    assert log(tmp_path / "raw")[1]["losses/loss_q"] != pytest.approx(log(tmp_path / "on")[1]["losses/loss_q"])


def test_check_writes_nothing(command, here):
    before = sorted(here.rglob("*"))
    code, out, err = command(*SAMPLE, "--eval-dataset rows.jsonl", "--check")
    assert code == 0 and "check passed" in out and "ilql: " in out and "samples at step 0" in out, err
    assert [p for p in sorted(here.rglob("*")) if p not in before and "__pycache__" not in p.parts] == []


FORMS = [
    ({"dialogue": ["b", "cd", "e", "f"], "reward": [0, 1]}, "[b]cd[e]f<eos>", 1),
    ({"dialogue": ["b", "cd", "e", "f"], "reward": [0.5, 1], "truncated": True}, "[b]cd[e]f", 1.5),
    ({"text": "bcd", "reward": 2}, "[<bos>]bcd<eos>", 2),
    ({"prompt": "b", "completion": "cd", "reward": 1e-3, "source": "web"}, "[b]cd<eos>", 0.001),
]


@pytest.mark.parametrize(("row", "shown", "total"), FORMS, ids=lambda x: str(x)[:30])
def test_forms_of_rows(command, here, row, shown, total):
    jsonl("rows.jsonl", [row, row])
    code, out, err = command("--no-normalize-rewards --total-steps 2")
    assert code == 0 and f"first row, [not actions]: {shown}; its return, as used: {total:.4g}\n" in out, err
    assert all(math.isfinite(v) for record in log("run") for v in record.values())
    usage = out.split("\n\n")[-2]  # the example of use starts where this row's actions do
    assert repr(shown[1 : shown.index("]")]) in usage


def test_rows_are_cut_at_the_positions_of_the_model(command, here):
    jsonl("rows.jsonl", [{"text": "bc" * 20, "reward": 1}, {"text": "d", "reward": 2}])
    code, out, err = command()
    assert (
        code == 0
        and "2 rows, 1 cut, 0 dropped" in out
        and "; return 1 +- 1.414, scaled to any mean +- 1\n" in out
        and "longest 32\n" in out
    ), err


@pytest.mark.parametrize("prompts", [1, 5])
@pytest.mark.parametrize("mask", ["alphabet", "as_lists"])
def test_forbidden_tokens_are_never_sampled(command, here, mask, prompts):
    """Only the next letter of the alphabet may follow, and the end token t and u, whatever beta."""
    jsonl("prompts.jsonl", PROMPTS[:prompts])
    code, _, err = command(*SAMPLE[:-3], "--betas 0 30", f"--logit-mask user.py:{mask} --eval-every 4")
    assert code == 0, err
    texts = [row["prompt"][-1] + row["output"] for row in samples("run")]
    assert len(texts) == 2 * 2 * prompts and all(
        LETTERS.index(b) == LETTERS.index(a) + 1 for t in texts for a, b in pairwise(t)
    )
    assert all(len(text) == 6 or text[-1] in "tu" for text in texts)


def test_a_mask_from_python(gpt2_dir, tmp_path):
    """As a tensor: a letter never comes again. What may be followed by nothing may be followed by anything."""

    def sampled(name, mask):
        return outputs(run_ilql(gpt2_dir, tmp_path / name, logit_mask=mask, **FROZEN)[1], 0)

    plain = sampled("plain", None)
    letter = max(LETTERS, key="".join(plain).count)
    mask = torch.zeros(25, 25, dtype=torch.bool)
    mask[:, LETTERS.index(letter)] = True
    assert letter in "".join(plain) and letter not in "".join(sampled("one", mask))
    assert sampled("all", torch.ones_like(mask)) == plain == sampled("none", torch.zeros_like(mask))


MASKS = [
    "user.py:thin",
    "user.py:whole_numbers",
    "user.py:ragged",
    "mask.pt",
]


@pytest.mark.parametrize("mask", MASKS)
def test_masks_that_do_not_fit(command, here, mask):
    code, _, err = command(*SAMPLE, f"--logit-mask {mask}")
    assert code == 2 and not Path("run").exists()
    assert err == "error: --logit-mask must be bool of shape [25, 25], the size of the model's vocabulary\n"


def greedy(run, beta):
    """Greedy outputs by log pi + beta (min Q - V), slowly, of an export."""
    policy, tokenizer, found = ilql.PolicyWithQ.load(run / "hf_model"), randomwalks.tokenizer(), []
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


FROZEN = {
    "lr": 1e-30,
    "total_steps": 1,
    "eval_every": 1,
    "metric": lengths,
    "eval_prompts": PROMPTS,
    "dtype": "float32",
}


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_what_is_filtered(gpt2_dir, tmp_path, only):
    """Of one token that is left: the model's favourite, whatever its Q."""
    _, run = run_ilql(gpt2_dir, tmp_path / "run", betas=(0.0, 50.0), **only, **FROZEN)
    assert outputs(run, 0) == outputs(run, 50) == greedy(run, 0) * 2
    assert greedy(run, 0) != greedy(run, 50)


def test_greedy_evaluation(gpt2_dir, tmp_path):
    _, run = run_ilql(gpt2_dir, tmp_path / "run", betas=(0.0, 3.0, 20.0), eval_temperature=0, **FROZEN)
    for beta in (0.0, 3.0, 20.0):
        assert outputs(run, beta) == greedy(run, beta) * 2


@pytest.fixture
def bf16():
    """Flags of autocast; accelerate keeps the precision of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield {"mixed_precision": "bf16"}
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("flag", ["autocast", "dtype"])
def test_bfloat16(plain, gpt2_dir, tmp_path, bf16, flag):
    """Losses near those in float64; heads, targets and their losses stay float32. Weights of 16 bits are not trained:
    the heads are, beside them."""
    flags = bf16 | {"dtype": "float32"}
    if flag == "dtype":
        flags = {"dtype": "bfloat16", "num_layers_unfrozen": 0}
    AcceleratorState._reset_state(reset_partial_state=True)
    _, run = run_ilql(gpt2_dir, tmp_path / "run", metric=lengths, **HELD_OUT, **flags)
    first, exact = log(run)[1], log(plain)[1]
    for name in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac"):
        assert 0 < abs(first[f"losses/{name}"] / exact[f"losses/{name}"] - 1) < 0.05
    assert all(math.isfinite(value) for record in log(run) for value in record.values())
    found = weights(run / "hf_model")
    kinds = {name.partition(".")[0]: tensor.dtype for name, tensor in found.items()}
    assert kinds == {"ilql_heads": torch.float32, "model": torch.bfloat16 if flag == "dtype" else torch.float32}


@pytest.mark.parametrize("k", [0, 1])
def test_only_the_heads_and_the_top_blocks_move(family, tiny_dirs, tmp_path, k):
    _, run = run_ilql(tiny_dirs[family], tmp_path / "run", num_layers_unfrozen=k)
    before = safetensors.torch.load_file(f"{tiny_dirs[family]}/model.safetensors")
    after = safetensors.torch.load_file(run / "hf_model/model.safetensors")
    moved = {name for name, weight in before.items() if not torch.equal(weight.double(), after[name])}
    norms = {"transformer.ln_f.weight", "transformer.ln_f.bias", "model.norm.weight"} & before.keys()
    blocks = {name for name in before if ".1." in name}
    assert len(blocks) > 8 and norms and moved == (norms | blocks if k else set())
    start, end = initial_heads(tiny_dirs[family]), heads(run / "hf_model")
    assert start.keys() == end.keys() and not any(torch.equal(start[name], end[name]) for name in start)


SCRIPTED = [(0, 0, 0), (5, 9, 2), (1, 8, 3), (7, 2, 7)]  # of betas 0, 4 and 8 at steps 0, 2, 4 and 6


def scripted_metric():
    """A metric whose first values are those of SCRIPTED; its second ones are larger, in another order."""
    queue = [value for values in SCRIPTED for value in values]

    def metric(outputs, **columns):
        value = queue.pop(0)
        return {"first": [value] * len(outputs), "second": [99 - value] * len(outputs)}

    return metric


def run_scripted(model, run_dir, metric, **flags):
    flags = {"total_steps": 6, "eval_every": 2, "betas": (0.0, 4.0, 8.0), "eval_dataset": ROWS[:2]} | flags
    return run_ilql(model, run_dir, metric=metric, eval_prompts=PROMPTS, **flags)[1]


def test_the_best_beta_chooses_the_best_model(gpt2_dir, tmp_path):
    """By the first metric; the last beta is best at another step. Its checkpoint is kept beside the newest."""
    run = run_scripted(gpt2_dir, tmp_path / "run", scripted_metric(), save_every=1, keep_checkpoints=1)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_00000002", "step_00000006"]
    saved, best = weights(run / "checkpoints/step_00000002"), weights(run / "hf_model_best")
    for name, weight in best.items():
        part, _, key = name.partition(".")
        assert torch.equal(weight, saved["model.lm." * (part == "model") + "model." * (part != "model") + key]), name


def test_the_best_beta_of_the_last_evaluation_is_reported(gpt2_dir, tmp_path, capsys):
    """In the last lines and in the card: its curve, and how to sample from what is exported. 0 and 8 are equal there,
    and 0 is the first."""
    run = run_scripted(gpt2_dir, tmp_path / "run", scripted_metric())
    out = capsys.readouterr().out
    assert re.search(r"^eval/first@beta=0 [▁▂▃▄▅▆▇█]{4} 0 -> 7$", out, re.M)
    line = "with policy.guided(beta=0, top_k=0, top_p=1):  # the best beta by the last evaluation\n"
    assert line in out and line in (run / "README.md").read_text()


@pytest.mark.parametrize("after", [2, 5, 6])
def test_the_best_beta_is_known_to_a_run_that_continues(monkeypatch, gpt2_dir, tmp_path, after, capsys):
    """It keeps its best model, and ends with the same last lines, also where no step was left."""

    def metric(outputs, **columns):  # depends on what is sampled alone
        return {"first": [len(output) + sum(map(ord, output)) % 7 for output in outputs]}

    whole = run_scripted(gpt2_dir, tmp_path / "a/run", metric, eval_every=1)
    said = capsys.readouterr().out.replace("/a/", "/b/")
    requested = logging.Run.stop_requested
    calls = []

    def stop(run):
        calls.append(1)
        if len(calls) == after:
            os.kill(os.getpid(), 15)
        return requested(run)

    monkeypatch.setattr(logging.Run, "stop_requested", stop)
    with pytest.raises(SystemExit):
        run_scripted(gpt2_dir, tmp_path / "b/run", metric, eval_every=1)
    monkeypatch.undo()
    run = run_scripted(gpt2_dir, tmp_path / "b/run", metric, eval_every=1)
    headline = said.index("\n\neval/first@beta=")
    assert said[headline:] in capsys.readouterr().out
    one, two = all_bytes(whole), all_bytes(run)
    assert one == two and "hf_model_best/ilql_heads.safetensors" in one
    told = said[headline:].split()[0]
    assert {json.loads((folder / "env.json").read_text())["headline"] for folder in (whole, run)} == {told}


def test_a_score_that_is_not_finite_is_no_best_beta(gpt2_dir, tmp_path, capsys):
    """The mean of finite numbers may overflow; it is null in metrics.jsonl."""
    scores = iter([1.0, 2.0, 1.5, 1.0, 1.7e308, 1.5])

    def metric(outputs, **columns):
        return {"first": [next(scores)] * len(outputs)}

    run = run_scripted(gpt2_dir, tmp_path / "run", metric, total_steps=2)
    assert log(run)[-1]["eval/first@beta=4"] is None
    assert "guided(beta=8, " in capsys.readouterr().out


@pytest.mark.parametrize(("betas", "first"), [((0.0, 4.0, 8.0), "4"), ((0.5,), "0.5"), ((0.0,), "0")])
def test_without_an_evaluation_the_first_positive_beta_is_named(gpt2_dir, tmp_path, capsys, betas, first):
    run_scripted(gpt2_dir, tmp_path / "run", lengths, betas=betas, eval_every=0, total_steps=1)
    out = capsys.readouterr().out
    assert f"with policy.guided(beta={first}, top_k=0, top_p=1):  # no beta was evaluated\n" in out
    assert re.search(r"^losses/loss █? ?", out, re.M)


def test_the_lowest_loss_chooses_without_a_metric(gpt2_dir, tmp_path):
    flags = {"total_steps": 6, "eval_every": 1, "save_every": 0, "keep_checkpoints": 1, "lr": 0.05}
    _, run = run_ilql(gpt2_dir, tmp_path / "run", eval_dataset=ROWS[:2], **flags)
    found = [record["eval/loss"] for record in log(run)[1:]]
    best = 1 + found.index(min(found))
    assert {int(p.name[-4:]) for p in (run / "checkpoints").iterdir()} == {best, 6}


def test_learning_rate_and_epochs(gpt2_dir, tmp_path):
    """A warm-up of 2 steps, then half a cosine; 2 epochs of 7 rows are 5 steps of 3."""
    flags = {"total_steps": None, "epochs": 2.0, "batch_size": 3, "warmup_steps": 2, "lr_final": 1e-4}
    found = log(run_ilql(gpt2_dir, tmp_path / "run", **flags)[1])
    cosine = [1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * step / 3)) / 2 for step in range(3)]
    assert [record["optim/lr"] for record in found] == pytest.approx([5e-3, 1e-2, *cosine], rel=1e-12)
    assert found[-1]["train/epoch"] == pytest.approx(15 / 7)


def test_every_epoch_holds_every_row_once(monkeypatch, gpt2_dir, tmp_path):
    """In an order of its own, which the seed decides."""
    calls, of = [], ilql.Batch.of
    monkeypatch.setattr(ilql.Batch, "of", lambda episodes, *x: (calls.append(episodes), of(episodes, *x))[1])
    run_ilql(gpt2_dir, tmp_path / "run", total_steps=7, batch_size=3, micro_batch_size=2, seed=3)
    seen = [len(episode.ids) for episodes in calls for episode in episodes]
    drawn = [7, 7, 4, 4, 9, 7, 12]
    assert sorted(seen) == sorted(drawn * 3)
    order = [drawn[row] for row in stream_rows(3, "data", 7, 0, 21)]
    assert all(sorted(seen[i : i + 3]) == sorted(order[i : i + 3]) for i in range(0, 21, 3))


def test_gradients_are_clipped(gpt2_dir, tmp_path, monkeypatch):
    """To --max-grad-norm as one vector, of all that is trained."""
    norms, step = [], torch.optim.AdamW.step

    def recording(self, *args):
        grads = [w.grad for group in self.param_groups for w in group["params"] if w.grad is not None]
        norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    found = {}
    for limit in (0.0, 0.1):
        norms.clear()
        _, run = run_ilql(gpt2_dir, tmp_path / str(limit), max_grad_norm=limit, total_steps=2)
        found[limit] = [record["optim/grad_norm"] for record in log(run)], [*norms]
    assert found[0.0][0] == pytest.approx(found[0.0][1], rel=1e-9) and min(found[0.0][0]) > 0.2
    assert found[0.1][1] == pytest.approx([0.1, 0.1], rel=1e-4) and found[0.1][0][0] == found[0.0][0][0]


# ---- Bad input -------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
GIVEN = {"model": "model", "dataset": "rows.jsonl"}  # without them Args is that of the embedded task
AT_LEAST_ONE = """threads decay_steps total_steps keep_checkpoints max_length batch_size micro_batch_size
steps_for_target_q_sync max_new_tokens decode_batch_size""".split()
AT_LEAST_ZERO = "save_every eval_every top_k warmup_steps".split()
ZERO_OR_MORE = "lr_final adam_eps weight_decay max_grad_norm eval_temperature cql_scale awac_scale awac_beta".split()
BAD = {name: [0, -3] for name in AT_LEAST_ONE} | {name: [-1] for name in AT_LEAST_ZERO}
BAD |= {name: [-1.0, NAN, INF] for name in ZERO_OR_MORE}
BAD |= {name: [0.0, -1.0, NAN, INF] for name in ("lr", "epochs")}
BAD |= {"top_p": [0.0, 1.5, NAN], "tau": [0.0, 1.0, NAN], "gamma": [-0.1, 1.1, NAN], "polyak_alpha": [0.0, 1.1, NAN]}
BAD |= {"betas": [(0.0, NAN), (INF,), (-1.0,)], "adam_betas": [(0.9, 1.0), (-0.1, 0.9)]}
BAD |= {"awac_clip": [0.0, -1.0, NAN, INF]}
BAD |= {"num_layers_unfrozen": [-2], "stop": [("x", "")], "push_to_hub": ["name"]}
GOOD = {"gamma": [0.0, 1.0], "polyak_alpha": [1.0], "top_p": [1.0], "betas": [(3.0,)], "awac_clip": [1.0]}
GOOD |= {"tau": [0.01, 0.99], "top_k": [0], "warmup_steps": [0], "cql_scale": [0.0], "num_layers_unfrozen": [0]}


@pytest.mark.case(57, "ilql")
def test_flags_out_of_range():
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(InputError, match=re.escape(f"--{name.replace('_', '-')} {value} must ")) as error:
                ilql.Args(**GIVEN, **{name: value})
            assert "problems" not in str(error.value)
    for name, values in GOOD.items():
        for value in values:
            assert getattr(ilql.Args(**GIVEN, **{name: value}), name) == value


def test_all_of_them_at_once():
    with pytest.raises(InputError) as error:
        ilql.Args(**GIVEN, **{name: values[0] for name, values in BAD.items()})
    problems = str(error.value).split("\n  - ")
    assert problems[0] == f"{len(BAD)} problems:" and len(problems) == len(BAD) + 1
    assert {line.split()[0] for line in problems[1:]} == {f"--{name.replace('_', '-')}" for name in BAD}


RULES = [
    ({"dataset": None}, "--dataset is missing: "),
    ({"model": None}, "--model is missing: "),
    ({"betas": ()}, "--betas is empty: name one number or several"),
    ({"eval_prompts": "prompts.jsonl"}, "--eval-prompts is given without --metric, which scores what is sampled"),
    ({"lora_alpha": 2.0}, "--lora-alpha and --lora-targets need --lora-r"),
    ({"dtype": "float64", "load_in_4bit": True}, "--load-in-4bit does not go with --dtype float64"),
]


@pytest.mark.parametrize(("flags", "sentence"), RULES, ids=lambda x: str(x)[:40])
def test_rules_between_flags(flags, sentence):
    with pytest.raises(InputError, match="^" + re.escape(sentence)):
        ilql.Args(**GIVEN | flags)


def test_defaults_are_those_of_trlx_and_the_task_has_its_own():
    """But for the target heads, which follow as in the authors' code. The settings of the task count with neither
    a model nor a dataset; a flag that is given wins over them."""
    own, task = ilql.Args(**GIVEN), from_task(ilql.Args, ilql.TASK)
    trlx = {"lr": 5e-5, "tau": 0.7, "gamma": 0.99, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 0.0}
    trlx |= {"polyak_alpha": 0.005, "steps_for_target_q_sync": 1, "two_qs": True, "batch_size": 128}
    trlx |= {"max_new_tokens": 56, "top_k": 20, "eval_temperature": 1.0}
    assert {name: getattr(own, name) for name in trlx} == trlx and own.metric is own.eval_prompts is None
    task_only = {"lr": 2e-3, "tau": 0.9, "cql_scale": 0.03, "polyak_alpha": 0.02}
    task_only |= {"batch_size": 96, "micro_batch_size": 96, "decode_batch_size": 1024, "epochs": 16.0}
    task_only |= {"warmup_steps": 20, "weight_decay": 1.0, "adam_betas": (0.9, 0.95), "betas": (0.0, 4.0, 64.0)}
    task_only |= {"max_new_tokens": 9, "top_k": 0, "attn_implementation": "eager"}
    named = {name: f"{randomwalks.__name__.replace('.', '/')}.py:{name}" for name in ("eval_prompts", "metric")}
    named |= {"model": "benchmarks/tasks/randomwalks.py:untrained_model"}
    named |= {"dataset": "benchmarks/tasks/randomwalks.py:rewarded"}
    differing = {name: value for name, value in vars(task).items() if value != getattr(own, name)}
    assert differing == task_only | named
    assert vars(from_task(ilql.Args, ilql.TASK, tau=0.8)) == vars(task) | {"tau": 0.8}


GOOD_ROW = {"prompt": "b", "completion": "cd", "reward": 1.0}
TALK = {"dialogue": ["b", "c", "d", "e"], "reward": [1, 2]}
NUMBER = "--dataset row 2: 'reward' must be a finite number, or a list of 1, one for each output, it is "
BAD_ROWS = [
    ([{"prompt": "b", "completion": "c"}], "--dataset row 1: 'reward' must be a finite number, or a list of 1"),
    ([GOOD_ROW, GOOD_ROW | {"reward": "good"}], NUMBER + "'good'"),
    ([GOOD_ROW, GOOD_ROW | {"reward": "1.0"}], NUMBER + "'1.0'"),
    ([GOOD_ROW, GOOD_ROW | {"reward": None}], NUMBER + "None"),
    ([GOOD_ROW, GOOD_ROW | {"reward": NAN}], NUMBER + "nan"),
    ([GOOD_ROW, GOOD_ROW | {"reward": -INF}], NUMBER + "-inf"),
    ([GOOD_ROW, GOOD_ROW | {"reward": [1, 2]}], NUMBER + "[1, 2]"),
    ([GOOD_ROW, GOOD_ROW | {"reward": []}], NUMBER + "[]"),
    ([GOOD_ROW, GOOD_ROW | {"reward": ["1"]}], NUMBER + "['1']"),
    ([GOOD_ROW, GOOD_ROW | {"reward": {"x": 1}}], NUMBER + "{'x': 1}"),
    ([TALK | {"reward": [1]}], "row 1: 'reward' must be a finite number, or a list of 2, one for each output"),
    ([TALK | {"reward": [1, 2, 3]}], "row 1: 'reward' must be a finite number, or a list of 2, one for each output"),
    ([TALK | {"reward": [1, None]}], "row 1: 'reward' must be a finite number, or a list of 2, one for each output"),
    ([TALK | {"dialogue": ["b", "c", "d"]}], "--dataset row 1: 'dialogue' must be a list prompt, output, prompt,"),
    ([TALK | {"dialogue": []}], "--dataset row 1: 'dialogue' must be a list"),
    ([TALK | {"dialogue": "bc"}], "--dataset row 1: 'dialogue' must be a list"),
    ([TALK | {"dialogue": ["b", 3]}], "--dataset row 1, part of row 2: 'dialogue' must be valid text, it is 3"),
    ([TALK | {"dialogue": ["b", "", "d", "e"]}], "--dataset row 1: an output without tokens has a reward"),
    ([GOOD_ROW | {"truncated": "yes"}], "--dataset row 1: 'truncated' must be true or false, it is 'yes'"),
    ([GOOD_ROW | {"truncated": 2}], "--dataset row 1: 'truncated' must be true or false, it is 2"),
    ([GOOD_ROW | {"completion": 7}], "--dataset row 1: 'completion' must be valid text, it is 7"),
    ([{"prompt": "b", "reward": 1}], "--dataset has the columns prompt, reward; expected completion"),
    (
        [GOOD_ROW, {"prompt": "b", "reward": 1}],
        "--dataset row 2 must be a mapping with the columns of row 1: see completion",
    ),
    ([{"chosen": "b", "reward": 1}], "--dataset has the columns chosen, reward; expected text, prompt and"),
    ([{"prompt": "bcd", "completion": "", "reward": 1, "truncated": True}], "--dataset: no row has an action left"),
    ([{"messages": [{"role": "user", "content": "b"}], "reward": 1}], "--dataset row 1: the last message must be"),
    ([], "--dataset rows.jsonl holds no rows"),
]


@pytest.mark.parametrize(("rows", "sentence"), BAD_ROWS, ids=lambda x: str(x)[-60:])
@pytest.mark.case(73, "ilql")
def test_bad_rows(command, here, rows, sentence):
    jsonl("rows.jsonl", rows)
    code, _, err = command()
    assert code == 2 and err.startswith("error: ") and sentence in err and len(err.splitlines()) == 1, err
    assert not Path("run").exists()


BAD_COMMANDS = [
    ("--dataset none.jsonl", "--dataset none.jsonl cannot be loaded: "),
    ("--dataset none/such:train", "--dataset none/such:train cannot be loaded: "),
    ("--max-length 1", "--dataset: no row has an action left within --max-length 1"),
    ("--metric user.py:metric", "--metric needs rows with a prompt to sample from: name --eval-prompts"),
    ("--metric user.py:metric --eval-dataset texts.jsonl", "--metric needs rows with a prompt to sample from"),
    ("--metric user.py:none --eval-prompts prompts.jsonl", "--metric user.py:none: user.py has no function 'none'"),
    ("--eval-dataset texts.jsonl,no_reward.jsonl", "--eval-dataset no_reward has the columns "),
    ("--eval-dataset no_reward.jsonl", "--eval-dataset has the columns "),
    ("--eval-dataset texts.jsonl,texts.jsonl", "two sets have the same name"),
    ("--model no/such/model", "--model no/such/model: there is no such directory"),
    ("--logit-mask user.py:none", "--logit-mask user.py:none: user.py has no function 'none'"),
    ("--num-layers-unfrozen 3", "--num-layers-unfrozen 3: the model has 2 layers"),
    ("--max-new-tokens 30 --metric user.py:metric --eval-prompts prompts.jsonl", "exceed the model's 32 positions"),
    ("--eval-prompts prompts.jsonl --metric None", "--eval-prompts is given without --metric, which scores what"),
    ("--lr 0 --tau 1", "2 problems:"),
    ("--gamma 1.5", "--gamma 1.5 must be in [0, 1]"),
    ("--alpha 0.1", "there is no --alpha here, see algos/MIGRATION.md: --polyak-alpha"),
    ("--filter shaped", "MIGRATION.md: --top-k, --top-p. They filter what the base model propos"),
    (
        "--advantage-clip 0",
        "MIGRATION.md: gone. The authors clip the product of beta and Q - V.",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD_COMMANDS, ids=lambda x: x[:50])
@pytest.mark.case(57, "ilql")
def test_bad_commands(command, here, flags, sentence):
    jsonl("texts.jsonl", [{"text": "bcd", "reward": 1}]), jsonl("no_reward.jsonl", PROMPTS)
    code, _, err = command(flags)
    assert code == 2 and err.startswith("error: ") and sentence in err and not Path("run").exists(), err
    assert len(err.splitlines()) == (3 if "problems" in sentence else 1)


@pytest.mark.parametrize("reward", [0.5, 0.0, None])
@pytest.mark.case(73, "ilql")
def test_equal_rewards_and_rows_of_one_action(command, here, reward):
    """They complete (None: one row), with a warning that there is nothing to be learnt."""
    rows = [{"prompt": letter, "completion": "", "reward": reward or 0.0} for letter in "bcdef"]
    jsonl("rows.jsonl", rows if reward is not None else rows[:1])
    code, out, err = command("--eval-dataset rows.jsonl --eval-every 2")
    assert code == 0 and "warning: all returns are equal" in out and "actions of a row: 1 to 1" in out, err
    records = log("run")
    assert all(math.isfinite(v) for record in records for v in record.values()) and records[-1]["losses/loss"] > 0
    assert all(record["td_error/inner"] == 0 for record in records[1:])  # every action is the last


def test_rewards_that_differ_have_no_warning(command):
    assert "warning" not in command("--check")[1]


@pytest.mark.case(33, "ilql")
def test_an_infinite_loss_stops_before_the_step(gpt2_dir, tmp_path):
    rows = [*PLAIN_ROWS[:4], PLAIN_ROWS[4] | {"reward": 1e30}]
    with pytest.raises(FloatingPointError, match=r"step 1: loss inf, .*rows \[.*4.*\]; the last checkpoint is intact"):
        run_ilql(gpt2_dir, tmp_path / "run", rows, normalize_rewards=False, dtype="float32", save_every=1)
    assert not (tmp_path / "run/checkpoints").exists() and not (tmp_path / "run/hf_model").exists()


# ---- Random walks ----------------------------------------------------------------------------------------------------


def optimality(run_dir, rows):
    """Of samples with beta 0 and with beta 16, after a short run on the random walks."""
    flags = {"run_dir": str(run_dir), "dataset": rows, "polyak_alpha": 0.3, "threads": 1, "betas": (0.0, 16.0)}
    flags |= {"eval_prompts": randomwalks.eval_prompts(samples=10), "eval_every": 60, "save_every": 0}
    flags |= {"total_steps": 60, "batch_size": 48, "warmup_steps": 10}
    metrics, _ = ilql.main(from_task(ilql.Args, ilql.TASK, **flags))
    return [metrics[f"eval/optimality@beta={beta}"] for beta in (0, 16)]


def test_it_learns_from_the_rewards(tmp_path):
    """With rewards dealt out at random over the same walks nothing is gained."""
    rows = randomwalks.rewarded()
    order = rng(0, "shuffled rewards").permutation(len(rows))
    shuffled = [row | {"reward": rows[i]["reward"]} for row, i in zip(rows, order, strict=True)]
    imitation, learned = optimality(tmp_path / "true", rows)
    assert imitation < 0.45 and learned - imitation > 0.4
    imitation, learned = optimality(tmp_path / "shuffled", shuffled)
    assert learned - imitation < 0.1
