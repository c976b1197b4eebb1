"""The recipes of algos/README.md ("Change these lines") apply to their scripts: `pytest tests/test_recipes.py`"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from benchmarks.tasks import randomwalks
from common import sampling

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "algos/README.md").read_text()
RECIPES = re.findall(r"```diff\n(.*?)```", TEXT, flags=re.S)


def changed(recipe, script="ppo"):
    """The script with the recipe's lines: "-" lines are replaced by the "+" lines that follow, others stay."""
    source = (ROOT / f"algos/{script}.py").read_text()
    for before, added in re.findall(r"((?:^[- ].*\n)+)((?:^\+.*\n)+)", recipe, flags=re.M):
        old = re.sub(r"^.", "", before, flags=re.M)
        new = re.sub(r"^.", "", re.sub(r"^-.*\n", "", before, flags=re.M) + added, flags=re.M)
        assert source.count(old) == 1, f"not once in {script}.py: {old}"
        source = source.replace(old, new)
    return source


def load(source, tmp_path):
    """The changed script as a module."""
    (tmp_path / "algos").mkdir(parents=True, exist_ok=True)
    path = tmp_path / "algos/changed.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("changed", path)
    sys.modules["changed"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(source, tmp_path, build_model, letters, **options):
    """main of a changed ppo.py on a tiny model; (metrics, output_ids of every reward call)."""
    module, seen = load(source, tmp_path), []

    def reward(output_ids, **columns):
        seen.append(output_ids)
        return [float(len(ids)) for ids in output_ids]

    model = build_model("gpt2")
    args = module.Args(
        model=model, tokenizer=letters, dataset=[{"prompt": "b"}, {"prompt": "cde"}, {"prompt": "fg"}], metric=None,
        reward=reward, run_dir=str(tmp_path / "run"), total_episodes=14, rollout_batch_size=7, batch_size=7,
        micro_batch_size=3, max_new_tokens=5, eval_every=0, save_every=0, lr=1e-2, threads=1, **options,
    )  # fmt: skip
    return module.main(args)[0], seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory, build_model):
    """What `run` returns for ppo.py as it is."""
    source = (ROOT / "algos/ppo.py").read_text()
    return run(source, tmp_path_factory.mktemp("plain"), build_model, randomwalks.tokenizer())


def test_there_are_seven_recipes():
    assert len(RECIPES) == 7


def test_an_entropy_bonus_changes_the_loss(plain, tmp_path, build_model, letters):
    bonus, _ = run(changed(RECIPES[0]), tmp_path, build_model, letters)
    gap = plain[0]["loss/policy"] - bonus["loss/policy"]
    assert gap == pytest.approx(0.01 * bonus["policy/entropy"], rel=0.5), "the bonus is 0.01 nats a nat"


@pytest.mark.parametrize("layers", [-1, 1])
def test_tokens_of_a_tool_are_not_scored(plain, tmp_path, build_model, letters, layers):
    assert any(3 in ids for call in plain[1] for ids in call), "the policy samples such tokens"
    metrics, seen = run(changed(RECIPES[1]), tmp_path, build_model, letters, num_layers_unfrozen=layers)
    assert all(3 not in ids for call in seen for ids in call)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=0.5) and metrics["tokens/responses_len"] < 5


def run_ilql(source, tmp_path, build_model, letters, **options):
    """main of a changed ilql.py on a tiny model; (metrics, weights of its last checkpoint, run directory)."""
    module = load(source, tmp_path)
    rows = [{"prompt": "b", "completion": "cde" * n, "reward": float(n)} for n in (1, 2, 3)]
    args = module.Args(
        model=build_model("gpt2"), tokenizer=letters, dataset=rows, eval_prompts=[{"prompt": "b"}, {"prompt": "cd"}],
        metric=lambda outputs, **columns: {"length": [float(len(output)) for output in outputs]}, betas=(0.0, 4.0),
        run_dir=str(tmp_path / "run"), total_steps=3, batch_size=3, micro_batch_size=2, max_new_tokens=7, lr=1e-2,
        warmup_steps=0, threads=1, top_k=0, **options,
    )  # fmt: skip
    metrics, run_dir = module.main(args)
    return metrics, load_file(run_dir / "checkpoints/step_00000003/model.safetensors"), run_dir


def test_a_target_transformer_moves_at_synchronisations_alone(tmp_path, build_model, letters):
    source = changed(RECIPES[2], "ilql")
    options = {"steps_for_target_q_sync": 4}
    metrics, weights, _ = run_ilql(source, tmp_path / "never", build_model, letters, **options)
    start = build_model("gpt2").state_dict()
    name = "transformer.h.0.mlp.c_fc.weight"
    assert weights[f"target_lm.{name}"].equal(start[name]) and not weights[f"lm.{name}"].equal(start[name])
    options = {"steps_for_target_q_sync": 3, "polyak_alpha": 1.0}
    metrics, weights, _ = run_ilql(source, tmp_path / "last", build_model, letters, **options)
    assert weights[f"target_lm.{name}"].equal(weights[f"lm.{name}"]) and metrics["target/syncs"] == 1


def test_a_policy_of_its_own_is_trained_and_sampled_from(tmp_path, build_model, letters):
    """It parts from the values' transformer, and with beta 0 the samples are its own."""
    _, weights, run_dir = run_ilql(changed(RECIPES[3], "ilql"), tmp_path, build_model, letters)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not weights[f"bc_lm.{name}"].equal(weights[f"lm.{name}"])
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    last = [row["output"] for row in samples if row["step"] == 3 and row["beta"] == 0]
    policy = build_model("gpt2")  # with beta 0 samples are those of bc_lm alone, in the same cache or in its own
    policy.load_state_dict({k.removeprefix("bc_lm."): v for k, v in weights.items() if k[:5] == "bc_lm"}, strict=False)
    policy.tie_weights()
    queries = [letters(text)["input_ids"] for text in ("b", "cd")]
    options = {"seed": 1, "max_new_tokens": 7}
    _, _, ids, mask = sampling.generate_all(Accelerator(), policy, letters, queries, ("eval", 0), **options)
    responses = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert last == sampling.decode(letters, queries, responses, ()) and any(last)


def run_sft(source, run_dir, build_model, letters, **options):
    """main of a changed sft.py on a tiny model; (the module, its records in metrics.jsonl)."""
    module = load(source, run_dir)
    rows = [{"prompt": "b", "completion": "cde" * n} for n in (1, 2, 3)]
    args = module.Args(
        model=build_model("gpt2"), tokenizer=letters, dataset=rows, eval_dataset=rows, run_dir=str(run_dir / "run"),
        total_steps=2, batch_size=3, max_length=16, lr=1e-2, eval_every=1, threads=1, **options,
    )  # fmt: skip
    _, run_dir = module.main(args)
    return module, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_noise_on_the_embeddings_is_in_training_alone(tmp_path, build_model, letters):
    """Uniform, keyed by step and row: the same for any micro-batches, and for packed rows."""
    source = changed(RECIPES[4], "sft")
    _, quiet = run_sft((ROOT / "algos/sft.py").read_text(), tmp_path / "quiet", build_model, letters)
    module, noisy = run_sft(source, tmp_path / "noisy", build_model, letters)
    assert noisy[0] == quiet[0] and abs(noisy[1]["train/loss"] - quiet[1]["train/loss"]) > 1e-3
    for number, options in enumerate(({"micro_batch_size": 1}, {"packing": True})):
        _, other = run_sft(source, tmp_path / f"{number}", build_model, letters, **options)
        assert [pytest.approx(record, rel=1e-5, abs=1e-6) for record in other] == noisy
    lines = [[([1] * 50, None, 3)], [([1] * 30, None, 4), ([1] * 19, None, 5)]]
    drawn = module.noise(lines, (2, 50, 40), seed=1, step=2)
    for row, length in ((drawn[0], 50), (drawn[1, :30], 30), (drawn[1, 30:49], 19)):
        units = row.flatten() * (length * 40) ** 0.5 / 5.0
        assert 0.99 < units.abs().max() <= 1 and units.std().item() == pytest.approx(3**-0.5, rel=0.05)
    assert not drawn[1, 49:].any()
    assert drawn[1, 30:49].equal(module.noise([lines[1][1:]], (1, 19, 40), seed=1, step=2)[0])
    assert not drawn[:1].equal(module.noise(lines[:1], (1, 50, 40), seed=1, step=3))


def run_grpo(source, tmp_path, build_model, letters):
    """The batches of two iterations, as they are sampled and as they are trained on."""
    module = load(source, tmp_path)
    rollout = module.rollout
    update = module.update
    sampled = []
    trained = []

    def kept_rollout(*args):
        sampled.append(rollout(*args))
        return sampled[-1]

    def kept_update(run, model, optimizer, batch, *args):
        trained.append(batch)
        return update(run, model, optimizer, batch, *args)

    module.rollout = kept_rollout
    module.update = kept_update
    args = module.Args(
        model=build_model("gpt2"), tokenizer=letters, dataset=[{"prompt": letter} for letter in "bcdefghi"],
        reward=lambda outputs, **columns: [float(len(output) > 5) for output in outputs], run_dir=str(tmp_path / "run"),
        group_size=2, total_episodes=64, rollout_batch_size=32, batch_size=32, max_new_tokens=9, eval_every=0,
        save_every=0, threads=1,
    )  # fmt: skip
    module.main(args)
    return sampled, trained


def test_truncated_responses_have_no_advantage(tmp_path, build_model, letters):
    _, trained = run_grpo(changed(RECIPES[5], "grpo"), tmp_path, build_model, letters)
    for batch in trained:
        assert batch.truncated.any() and not batch.advantages[batch.truncated].any()
        assert batch.advantages[~batch.truncated].any()


def test_groups_of_different_scores_are_taken_first(tmp_path, build_model, letters):
    """Sixteen groups are taken of thirty-two."""
    source = changed(RECIPES[6], "grpo")
    sampled, trained = run_grpo(source, tmp_path, build_model, letters)
    for batch, whole in zip(trained, sampled, strict=True):
        groups = whole.scores.view(32, 2)
        is_different = groups[:, 0] != groups[:, 1]
        expected = torch.cat([groups[is_different], groups[~is_different]])
        assert torch.equal(batch.scores.view(16, 2), expected[:16])
        assert 0 < is_different.sum() < 32
