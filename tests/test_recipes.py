"""The recipes of algos/README.md apply to their scripts, and its rollouts run: `pytest tests/test_recipes.py`"""

import re
import sys

import pytest
from harness import ROOT, lines
from helpers import log, recorded, rolled, samples, weights

from algos import grpo
from common.cli import parse
from common.functions import import_file

TEXT = (ROOT / "algos/README.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, flags=re.S)
ENTROPY, GROUP_ENTROPY, TARGET, POLICY, NOISE, TRUNCATED, GROUPS = DIFFS
BLOCK = "transformer.h.0.mlp.c_fc.weight"


def changed(recipe, script="ppo"):
    """The script with the recipe's lines: "-" lines are replaced by the "+" lines that follow, others stay."""
    source = (ROOT / f"algos/{script}.py").read_text()
    for before, added in re.findall(r"((?:^[- ].*\n)+)((?:^\+.*\n)+)", recipe, flags=re.M):
        old = re.sub(r"^.", "", before, flags=re.M)
        new = re.sub(r"^.", "", re.sub(r"^-.*\n", "", before, flags=re.M) + added, flags=re.M)
        assert source.count(old) == 1, f"a recipe of the guide quotes what is not once in {script}.py: {old}"
        source = source.replace(old, new)
    return source


def lengths(outputs, **columns):
    return [float(len(output)) for output in outputs]


def metric(outputs, **columns):
    return {"length": lengths(outputs)}


@pytest.fixture
def load(tmp_path):
    """load(recipe, script) -> the changed script as a module."""

    def load_changed(recipe, script="ppo"):
        (tmp_path / "algos").mkdir(exist_ok=True)
        path = tmp_path / "algos/changed.py"
        path.write_text(changed(recipe, script))
        return import_file(path, path.read_bytes())

    return load_changed


@pytest.fixture
def run(tmp_path, build_model, letters):
    """run(module, **flags) -> metrics and directory of its main on a tiny model."""

    def run_main(module, **flags):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = {"model": build_model(), "tokenizer": letters, "run_dir": str(folder), "lr": 1e-2, "threads": 1}
        return module.main(module.Args(**settings | flags))

    return run_main


PPO = {"dataset": [{"prompt": "b"}, {"prompt": "cde"}, {"prompt": "fg"}], "total_episodes": 14, "max_new_tokens": 5}
PPO |= {"rollout_batch_size": 7, "batch_size": 7, "micro_batch_size": 3, "eval_every": 0, "save_every": 0}


def test_an_entropy_bonus_changes_the_loss(load, run):
    plain, _ = run(load(""), reward=lengths, **PPO)
    bonus, _ = run(load(ENTROPY), reward=lengths, **PPO)
    gap = plain["loss/policy"] - bonus["loss/policy"]
    assert gap == pytest.approx(0.01 * bonus["policy/entropy"], rel=0.5), "the bonus is 0.01 nats a nat"


ILQL = {"dataset": [{"prompt": "b", "completion": "cde" * n, "reward": float(n)} for n in (1, 2, 3)], "metric": metric}
ILQL |= {"eval_prompts": [{"prompt": "b"}, {"prompt": "cd"}], "betas": (0.0, 4.0), "max_new_tokens": 7, "top_k": 0}
ILQL |= {"total_steps": 3, "batch_size": 3, "micro_batch_size": 2, "warmup_steps": 0}


def test_a_target_transformer_moves_at_synchronisations_alone(load, run, build_model):
    module = load(TARGET, "ilql")
    _, run_dir = run(module, steps_for_target_q_sync=4, **ILQL)
    found = weights(run_dir / "checkpoints/step_00000003")
    start = build_model().state_dict()[BLOCK]
    assert found[f"model.target_lm.{BLOCK}"].equal(start) and not found[f"model.lm.{BLOCK}"].equal(start)
    metrics, run_dir = run(module, steps_for_target_q_sync=3, polyak_alpha=1.0, **ILQL)
    found = weights(run_dir / "checkpoints/step_00000003")
    assert found[f"model.target_lm.{BLOCK}"].equal(found[f"model.lm.{BLOCK}"]) and metrics["target/syncs"] == 1


def test_a_policy_of_its_own_is_trained_and_sampled_from(load, run):
    _, run_dir = run(load(POLICY, "ilql"), **ILQL)
    found = weights(run_dir / "checkpoints/step_00000003")
    assert not found[f"model.bc_lm.{BLOCK}"].equal(found[f"model.lm.{BLOCK}"])
    assert any(row["output"] for row in samples(run_dir, step=3) if row["beta"] == 0)


def test_noise_on_the_embeddings_is_in_training_alone(load, run):
    rows = [{"prompt": "b", "completion": "cde" * n} for n in (1, 2, 3)]
    flags = {"dataset": rows, "eval_dataset": rows, "total_steps": 2, "batch_size": 3, "max_length": 16}
    quiet = log(run(load("", "sft"), eval_every=1, **flags)[1])
    module = load(NOISE, "sft")
    noisy = log(run(module, eval_every=1, **flags)[1])
    assert noisy[0] == quiet[0] and abs(noisy[1]["train/loss"] - quiet[1]["train/loss"]) > 1e-3
    other = log(run(module, eval_every=1, micro_batch_size=1, packing=True, **flags)[1])
    assert [pytest.approx(record, rel=1e-5, abs=1e-6) for record in other] == noisy


def is_long(outputs, **columns):
    return [float(length > 5) for length in lengths(outputs)]


GRPO = {"dataset": [{"prompt": letter} for letter in "bcdefghi"], "reward": is_long, "group_size": 2, "lr": 1e-6}
GRPO |= {"total_episodes": 64, "rollout_batch_size": 32, "batch_size": 32, "max_new_tokens": 9, "eval_every": 0}


def test_truncated_responses_have_no_advantage(load, run, monkeypatch):
    module = load(TRUNCATED, "grpo")
    updates = recorded(monkeypatch, module, "update")
    run(module, **GRPO)
    for (_, _, _, episodes, *_), _ in updates:
        assert {False} == {bool(episode.advantage) for episode in episodes if not episode.ended}
        assert any(episode.advantage for episode in episodes if episode.ended)


def test_an_entropy_bonus_reaches_episodes_without_an_advantage(load, run, monkeypatch):
    """All scores are equal, so that it is all there is."""
    flags = GRPO | {"reward": lambda outputs, **columns: [0.0] * len(outputs), "kl_coef": 0.0}
    module = load(GROUP_ENTROPY, "grpo")
    micro = recorded(monkeypatch, module, "losses")
    metrics, _ = run(module, **flags)
    assert sum(len(lines) for (_, lines, *_), _ in micro) == 64 and metrics["optim/grad_norm"] > 0
    entropy = -metrics["loss/policy"] / 0.01
    assert 1 < entropy < 3.3  # nats: of 25 tokens at most


def test_groups_of_different_scores_are_taken_first(load, run, monkeypatch):
    """Rounds end when there are enough groups, or at four, and none repeats another."""
    module = load(GROUPS, "grpo")
    rollouts = rolled(monkeypatch, module)
    updates = recorded(monkeypatch, module, "update")
    rounds = []
    for reward in (is_long, lambda outputs, **columns: [float("ab" in output) for output in outputs]):
        rounds += [record["groups/rounds"] for record in log(run(module, **GRPO | {"reward": reward})[1])]
    for ((_, _, _, trained, *_), _), count in zip(updates, rounds, strict=True):
        pools = [episodes for _, episodes in rollouts[:count]]
        del rollouts[:count]
        assert len({str([episode.response for episode in episodes]) for episodes in pools}) == count
        groups = [pool[begin : begin + 2] for pool in pools for begin in range(0, 32, 2)]
        different = [group for group in groups if group[0].score != group[1].score]
        chosen = different + [group for group in groups if group[0].score == group[1].score]
        assert [*map(id, trained)] == [id(episode) for group in chosen[:16] for episode in group]
        assert all(bool(episode.advantage) for episode in trained) == (len(different) >= 16)
        assert count == 4 or len(different) - sum(one.score != two.score for one, two in groups[-16:]) < 16
    assert not rollouts and 4 in rounds and {2, 3} & {*rounds}


FILES = dict(re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", TEXT, flags=re.S))
CALLED = {  # file: pattern of the outputs of its rollouts
    "my_tool.py": r"<\d+\*\d+>\[\d+\]",
    "by_row.py": r"[^\[]+\[\d\][^\[]*",
    "slow_tool.py": r".+\[\?\].*",
    "my_game.py": r"\D*\d(\[(\+|<unk>)\]\D*\d)*.*",
    "my_engine.py": r"[^\[]+",
    "my_env.py": r"(\[[<>]\][^\[]*)+",
}
WORLD = """
from types import SimpleNamespace


class World:
    def reset(self, seed):
        self.secret = seed % 10
        return SimpleNamespace(observation=">", reward=0.0, done=False)

    def step(self, action):
        won = str(self.secret) in action
        return SimpleNamespace(observation="<", reward=float(won), done=won)
"""


@pytest.mark.parametrize("name", CALLED)
def test_rollouts_of_the_guide(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # each has files of the same names, in a folder of its own
    for other in ("by_row", "my_world"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / "by_row.py").write_text(FILES["by_row.py"])
    (tmp_path / "my_world.py").write_text(WORLD)
    flags = ["--config", "benchmarks/tasks/calculator/grpo.yaml", "--rollout", f"{tmp_path / name}:episode"]
    if "def reward" in FILES[name]:
        flags += ["--reward", f"{tmp_path / name}:reward", "--metric", "None"]
    flags += ["--total-episodes", "32", "--rollout-batch-size", "16", "--batch-size", "16", "--eval-every", "0"]
    args = parse([*flags, "--run-dir", str(tmp_path / "run"), "--threads", "1"], grpo.Args)
    metrics, run_dir = grpo.main(args)
    rows = lines(run_dir / "rollouts.jsonl")
    assert len(rows) == 16 and metrics.get("policy/ratio", 1) == pytest.approx(1, abs=1e-5)
    matched = [row for row in rows if re.match(CALLED[name], row["output"])]
    assert len(matched) == len(rows) or (name == "my_tool.py" and matched)
    if name == "my_tool.py":
        a, b, product = re.search(r"<(\d+)\*(\d+)>\[(\d+)\]", matched[0]["output"]).groups()
        assert int(a) * int(b) == int(product)
    if name == "my_engine.py":
        assert abs(metrics["mismatch/kl"]) < 1e-7
    if name == "my_env.py":
        turns = {(row["output"].count("["), row["score"]) for row in rows}
        assert turns <= {(1, 1.0), (2, 1.0), (3, 1.0), (3, 0.0)} and len(turns) > 1
    if name == "my_game.py":
        assert {row["score"] for row in rows} <= {0.0, 1.0} and any("[" in row["output"] for row in rows)


def named(name):
    """What a file of the guide defines."""
    found = {}
    exec(FILES[name], found)
    return found


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    """Two of five samples are right: of the ten pairs, three have none."""
    outputs = ["a1", "b", "a1", "b", "b"]
    found = named("my_metric.py")["pass_at"](["p"] * 5, outputs, ["1"] * 5, k=2)
    assert found == {"pass@2": [pytest.approx(0.7)] * 5}


@pytest.mark.pretrained
def test_tasks_of_reasoning_gym():
    """Every right answer gets the whole score, another text none."""
    module = named("my_gym.py")
    for task in "chain_sum", "basic_arithmetic", "spell_backward", "arc_agi":
        rows = module["prompts"](task, size=5)
        entries = [row["entry"] for row in rows]
        right = [f"So <answer> {entry['answer']} </answer>." for entry in entries]
        assert module["reward"](right, entries) == [1.0] * 5
        assert max(module["reward"](["<answer>?</answer>"] * 5, entries)) < 0.1
        assert all(row["entry"]["question"] in row["prompt"][0]["content"] for row in rows)
