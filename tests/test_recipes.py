"""The recipes of algos/README.md ("Change these lines") apply to the script and run: `pytest tests/test_recipes.py`"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "algos/README.md").read_text()
RECIPES = re.findall(r"```diff\n(.*?)```", TEXT, flags=re.S)


def changed(recipe):
    """algos/ppo.py with the recipe's lines: each run of "-" lines is replaced by the "+" lines that follow it."""
    source = (ROOT / "algos/ppo.py").read_text()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", recipe, flags=re.M):
        old, new = (re.sub(r"^[-+]", "", text, flags=re.M) for text in (old, new))
        assert source.count(old) == 1, f"not once in ppo.py: {old}"
        source = source.replace(old, new)
    return source


def run(source, tmp_path, build_model, letters, **options):
    """main of the script on a tiny model; (metrics, output_ids of the last reward call)."""
    (tmp_path / "algos").mkdir(parents=True, exist_ok=True)
    path = tmp_path / "algos/changed_ppo.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("changed_ppo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["changed_ppo"] = module
    spec.loader.exec_module(module)
    seen = []

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


def test_there_are_two_recipes():
    assert len(RECIPES) == 2


def test_an_entropy_bonus_changes_the_loss(tmp_path, build_model, letters):
    plain, _ = run((ROOT / "algos/ppo.py").read_text(), tmp_path / "plain", build_model, letters)
    bonus, _ = run(changed(RECIPES[0]), tmp_path / "bonus", build_model, letters)
    gap = plain["loss/policy"] - bonus["loss/policy"]
    assert gap == pytest.approx(0.01 * bonus["policy/entropy"], rel=0.5), "the bonus is 0.01 nats a nat"


@pytest.mark.parametrize("layers", [-1, 1])
def test_tokens_of_a_tool_are_not_scored(tmp_path, build_model, letters, layers):
    _, plain = run((ROOT / "algos/ppo.py").read_text(), tmp_path / "plain", build_model, letters)
    assert any(3 in ids for call in plain for ids in call), "the policy samples such tokens"
    metrics, seen = run(changed(RECIPES[1]), tmp_path, build_model, letters, num_layers_unfrozen=layers)
    assert all(3 not in ids for call in seen for ids in call)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=0.5) and metrics["tokens/responses_len"] < 5
