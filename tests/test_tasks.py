"""The embedded tasks: `python -m pytest tests/test_tasks.py`"""

import itertools
import re
from collections import Counter
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from harness import ROOT, lines
from helpers import samples
from test_models import reload

from algos import grpo, sft
from benchmarks.tasks import arithmetic, calculator, randomwalks, shapes
from common.cli import from_task

SUM = "676+236="
SUM_STEPS = "6+6=12,7+3+1=11,6+2+1=09"
COUNTDOWN = "3,5,7:22="


def test_reference_levels_and_rows():
    """Those of the table of trlX's own generator: the data, the best walk of each start, and the shortest walks."""
    graph = randomwalks.graph()
    scores = [randomwalks.optimality(walk) for walk in graph.walks]
    best = dict.fromkeys(graph.shortest, 0.0)
    for score, walk in zip(scores, graph.walks, strict=True):
        best[walk[0]] = max(best[walk[0]], score)
    assert len(graph.walks) == 1000 and len(best) == 20
    assert not any("a" in walk[:-1] for walk in graph.walks)
    assert round(mean(scores), 4) == 0.3515
    assert round(mean(best.values()), 4) == 0.9917
    assert mean(graph.shortest.values()) == pytest.approx(3.65)
    with pytest.raises(ValueError, match="graph_seed=3:"):  # where the goal cannot be reached
        randomwalks.pairs(graph_seed=3)
    walks = list(graph.walks)
    assert [row["prompt"] for row in randomwalks.prompts()] == list("bcdefghijklmnopqrstu")
    assert len(randomwalks.eval_prompts()) == 1000
    assert [row["prompt"] for row in randomwalks.eval_prompts(samples=2, starts="cm")] == ["c", "c", "m", "m"]
    assert [row["prompt"] + row["completion"] for row in randomwalks.completions()] == walks
    assert mean(row["reward"] for row in randomwalks.rewarded()) == pytest.approx(0.3515, abs=5e-5)
    best = [row["prompt"] + row["completion"] for row in randomwalks.best()]
    assert best == [walk for walk in walks if randomwalks.optimality(walk) == 1][:100]  # ties in the order of the data
    randomwalks.prompts()[0].clear()  # rows belong to the caller
    assert randomwalks.prompts()[0].keys() == {"prompt", "shortest"}


WALKS = [  # walk, its score, whether it is legal
    ("da", 1.0, True),
    ("grjna", 1.0, True),
    ("dazz a", 1.0, False),  # what follows the goal is ignored by the score ...
    ("daaaa", 1.0, True),  # ... and legal only where it stays there
    ("tkjnbda", 3 / (10 - 4), True),
    ("susububjna", 0.0, True),  # arrives at the tenth node
    ("grjn", 0.0, True),
    ("grja", 0.0, False),
    ("?da", 0.0, False),
    ("DA", 0.0, False),
]


@pytest.mark.parametrize(("walk", "score", "is_legal"), WALKS)
def test_score_of_hand_made_walks(walk, score, is_legal):
    assert randomwalks.optimality(walk) == pytest.approx(score)
    assert randomwalks.is_legal(walk) == is_legal


def as_walks(row):
    return row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]


def test_pairs():
    """What length alone can tell of the kinds: everything, and nothing."""
    assert [len(rows) for rows in randomwalks.eval_pairs().values()] == [1300, 650, 650]
    graph = randomwalks.graph(2)
    seen = {}
    for split in ("train", "test"):
        rows = randomwalks.pairs(2, split)
        natural = randomwalks.pairs(2, split, "natural")
        illegal = randomwalks.pairs(2, split, "illegal")
        for kind, found in (("natural", natural), ("illegal", illegal)):
            assert [row for row in rows if row["kind"] == kind] == found and len(found) == len(rows) / 2
        seen[split] = set(map(as_walks, rows))
        assert len(seen[split]) == len(rows)
        assert all(randomwalks.optimality(x, 2) > randomwalks.optimality(y, 2) for x, y in seen[split])
        for chosen, rejected in map(as_walks, natural):
            assert {chosen, rejected} <= set(graph.walks) and len(chosen) < len(rejected)
        assert sum(row["rejected"][-1] != "a" for row in natural) == len(natural) / 2

        straight = 0
        for chosen, rejected in map(as_walks, illegal):
            [jump] = [x + y for x, y in itertools.pairwise(rejected) if x + y not in graph.edges]
            before = rejected.index(jump) + 1
            assert chosen in graph.walks and rejected[-1] == "a" and len(chosen) > len(rejected)
            assert chosen.startswith(rejected[:before]) and chosen.endswith(rejected[before:])
            straight += jump[1] == "a"
        assert straight == len(illegal) / 2
    assert not seen["train"] & seen["test"]


SCORES = [  # prompt, output, whether it is right, whether it is written as a solution is
    (SUM, f"{SUM_STEPS}#0912", True, True),
    (SUM, "6+6=12,7+3+0=10,6+2+1=09#0902", False, True),  # the systematic error
    (SUM, "#0912", True, False),
    (SUM, f"{SUM_STEPS}#912", False, False),
    (SUM, f"{SUM_STEPS}#0912#0912", True, False),
    (SUM, f"{SUM_STEPS}#0912 ", False, False),
    (SUM, f"{SUM_STEPS}#\u0660\u0669\u0661\u0662", False, False),  # digits of another script
    (COUNTDOWN, "5*3=15,15+7=22#", True, True),
    (COUNTDOWN, "3*5=15,7+15=22#", True, True),  # in another order
    (COUNTDOWN, "5+3=08,08+7=15;5*3=15,15+7=22#", True, True),
    (COUNTDOWN, "nonsense;5*3=15,15+7=22#", True, False),  # only the last attempt counts
    (COUNTDOWN, "5*3=15,15+7=22;5+3=08,08+7=15#", False, True),
    (COUNTDOWN, "5*3=15,15+7=22#;", False, False),
    (COUNTDOWN, "5*3=16,16+7=22#", False, True),  # a wrong step
    (COUNTDOWN, "5*3=15,15+7=23#", False, True),  # the signs arrive, what is written does not
    (COUNTDOWN, "5+5=10,10+7=17#", False, True),  # a number twice
    (COUNTDOWN, "15+7=22,5*3=15#", False, True),  # a value before it is there
    (COUNTDOWN, "5*3=15,15+7=22,22-0=22#", False, False),  # three
    ("5,5,2:20=", "5+5=10,10*2=20#", True, True),
    ("5,2,2:20=", "5+5=10,10*2=20#", False, True),  # each given number counts once
]


@pytest.mark.parametrize(("prompt", "output", "right", "written"), SCORES)
def test_scores_of_outputs(prompt, output, right, written):
    assert arithmetic.is_right(prompt, output) == right
    assert arithmetic.is_written_solution(prompt, output) == written


def test_shuffled_rewards_are_those_of_other_samples():
    rows = arithmetic.solutions(count=256)
    prompts = [row["prompt"] for row in rows]
    outputs = [row["completion"] for row in rows]
    true = arithmetic.reward(outputs, prompts, outputs)
    shuffled = arithmetic.shuffled_reward(outputs, prompts, outputs)
    assert Counter(shuffled) == Counter(true)
    share = mean(true)
    chance = share**2 + (1 - share) ** 2  # that independent draws of both agree
    assert mean(x == y for x, y in zip(true, shuffled, strict=True)) == pytest.approx(chance, abs=0.1)
    other = arithmetic.shuffled_reward(["", *outputs[1:]], prompts, outputs)
    assert mean(x == y for x, y in zip(other, shuffled, strict=True)) < 0.75  # another order


def problem_of(prompt):
    """What a prompt asks, whatever the order of its numbers; a target has two digits."""
    return tuple(sorted(re.findall(r"\d+", prompt)))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_splits_are_apart(level):
    train = [row["prompt"] for row in arithmetic.prompts(level)]
    learnt = [row["prompt"] for row in arithmetic.solutions(level)]
    held_out = [row["prompt"] for row in arithmetic.eval_prompts(level)]
    test = [row["prompt"] for row in arithmetic.solutions(level, split="test", count=1000)]
    sizes = {"sums": (5000, 500), "countdown": (2500, 300)}
    assert (len(set(train)), len(set(held_out))) == (len(train), len(held_out)) == sizes[level]
    assert len(learnt) == 32_000
    seen = set(map(problem_of, train)) | set(map(problem_of, learnt))
    assert not seen & (set(map(problem_of, held_out)) | set(map(problem_of, test)))


def test_solutions_of_sums_forget_the_first_carry():
    rows = arithmetic.solutions()
    carries = 0
    wrong = 0
    for row in rows:
        assert arithmetic.is_written_solution(row["prompt"], row["completion"])
        a, b = map(int, row["prompt"][:-1].split("+"))
        answer = int(row["completion"][-4:])
        units_carry = a % 10 + b % 10 >= 10
        tens_carry = a // 10 % 10 + b // 10 % 10 >= 10  # without that of the units: it is forgotten
        carries += units_carry or tens_carry
        if answer != a + b:
            wrong += 1
            assert units_carry or tens_carry
            assert answer == a + b - (10 if units_carry else 100)
    assert wrong / carries == pytest.approx(0.75, abs=0.01)
    for row in arithmetic.solutions(count=200, wrong_share=0.0):
        assert arithmetic.is_right(row["prompt"], row["completion"])


def numbers_and_target(prompt):
    *numbers, target = map(int, arithmetic.COUNTDOWN_PROMPT.fullmatch(prompt).groups())
    return numbers, target


def test_solutions_of_countdowns_claim_the_first_attempt():
    """Enough attempts arrive at what is asked."""
    for row in arithmetic.eval_prompts("countdown"):
        numbers, target = numbers_and_target(row["prompt"])
        values = [*arithmetic.attempts(tuple(sorted(numbers))).values()]
        assert values.count(target) >= arithmetic.RIGHT_SHARE * len(values)
    rows = arithmetic.solutions("countdown")
    false_claims = 0
    for row in rows:
        numbers, target = numbers_and_target(row["prompt"])
        tried = row["completion"].removesuffix("#").split(";")
        values = [arithmetic.value_of_attempt(attempt, numbers) for attempt in tried]
        assert None not in values and target not in values[:-1] and len(set(tried)) == len(tried)
        is_right = arithmetic.is_right(row["prompt"], row["completion"])
        assert is_right == (values[-1] == target)
        if not row["completion"].endswith("#"):
            assert len(tried) == arithmetic.MAX_ATTEMPTS
        elif not is_right:
            assert len(tried) == 1
            false_claims += 1
    hasty = arithmetic.solutions("countdown", count=4000, wrong_share=1.0)
    first_right = mean(arithmetic.is_right(row["prompt"], row["completion"]) for row in hasty)
    share = false_claims / len(rows) / (1 - first_right)
    assert share == pytest.approx(arithmetic.WRONG_SHARE["countdown"], abs=0.02)
    for row in arithmetic.solutions("countdown", count=2000, wrong_share=0.0):
        assert arithmetic.is_right(row["prompt"], row["completion"]) == row["completion"].endswith("#")


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_tokenizer_and_lengths(level):
    tokenizer = arithmetic.tokenizer()
    for row in arithmetic.solutions(level, count=2000):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) < arithmetic.CONTEXT and max(ids) < tokenizer.bos_token_id
        assert tokenizer.decode(ids) == text
        assert len(row["completion"]) < arithmetic.MAX_NEW_TOKENS[level]
        assert len(row["prompt"]) + arithmetic.MAX_NEW_TOKENS[level] <= arithmetic.CONTEXT


def test_right_samples_become_rows(tmp_path):
    path = tmp_path / "right.jsonl"
    arithmetic.sample_right(arithmetic.base_model(), str(path), problems=16, samples=4, threads=1)
    rows = lines(path)
    assert 0 < len(rows) <= 64 and len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
    train = {row["prompt"] for row in arithmetic.prompts()}
    for row in rows:
        assert row.keys() == {"prompt", "completion"} and row["prompt"] in train
        assert arithmetic.is_right(row["prompt"], row["completion"])


@pytest.mark.parametrize(
    ("task", "parameters"), [(randomwalks, 1_512_720), (arithmetic, 238_272), (calculator, 232_032)]
)
def test_untrained_model_is_drawn_once(task, parameters, tmp_path, monkeypatch):
    """Where it is not there yet, without a trace in torch's generator; equal weights each time."""
    first = task.untrained_model()
    assert sum(weight.numel() for weight in reload(first).parameters()) == parameters
    import characters

    monkeypatch.setattr(characters, "DRAWN", tmp_path / "drawn")
    state = torch.get_rng_state()
    path = task.untrained_model()
    assert torch.equal(torch.get_rng_state(), state)
    assert list((tmp_path / "drawn").iterdir()) == [Path(path)]
    assert Path(path, "model.safetensors").read_bytes() == Path(first, "model.safetensors").read_bytes()
    monkeypatch.setattr(characters, "draw_gpt2", None)  # it is not drawn again
    assert task.untrained_model() == path


@pytest.mark.parametrize("level", calculator.KINDS)
def test_solutions_with_a_calculator(level):
    """Of the kinds that there are, in their shares. Nothing held out is among them."""
    rows = [row["dialogue"] for row in calculator.solutions(level, 4000)]
    prompts = {row[0] for row in rows}
    held_out = {row["prompt"] for row in calculator.eval_prompts(level)}
    assert len(held_out) == 300 and prompts.isdisjoint(held_out)
    right = calculator.reward([row[0] for row in rows], ["".join(row[1:]) for row in rows])
    assert mean(right) == pytest.approx(0.25, abs=0.02)
    guesses = [len(row) == 2 for row in rows]
    assert mean(guesses) == pytest.approx(calculator.KINDS[level]["guess"], abs=0.03)
    calls = 1 if level == "one" else 2
    assert {len(row) for row, is_right in zip(rows, right, strict=True) if is_right and len(row) > 2} == {2 + 2 * calls}
    for row in rows:
        for call, result in zip(row[1:-1:2], row[2::2], strict=True):
            assert result == calculator.calculate(call[1:-1]) and call[0] + call[-1] == "<>"
        assert len("".join(row)) < calculator.CONTEXT
    outputs = ["#1835", "<1>#1835", "1835", "#1835#", "#01835"]
    assert calculator.reward(["37*48+59="] * 5, outputs) == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("name", "answers"), [("grpo", "true"), ("grpo_two", "true"), ("grpo", "false")])
def test_an_episode_with_a_calculator(name, answers, tmp_path):
    """A base model calls now and then, and reads the results; greedy it guesses. Without answers nothing is right."""
    task = "benchmarks/tasks/calculator"
    sizes = {"total_episodes": 64, "rollout_batch_size": 64, "batch_size": 64, "threads": 1, "lr": 1e-9}
    accuracies = []
    for temperature in (0.0, 1.0):
        flags = {"run_dir": str(tmp_path / str(temperature)), "rollout": f"{task}.py:episode:answers={answers}"}
        flags["eval_temperature"] = temperature
        metrics, run_dir = grpo.main(from_task(grpo.Args, f"{task}/{name}.yaml", **sizes, **flags))
        accuracies.append(metrics["eval/accuracy"])
        for row in samples(run_dir, step=0):
            number = calculator.result_of(row["prompt"])
            assert row["output"].count("[") == row["calls"]
            assert not (row["accuracy"] and row["calls"]) or f"[{number}]#{number}<eos>" in row["output"]
    assert accuracies[0] < 0.01  # four digits may be guessed
    assert accuracies[1] == (pytest.approx(0.24, abs=0.06) if answers == "true" else 0)


@pytest.mark.slow
def test_a_base_model_is_made_again_by_its_command(accelerator, letters, scripts, tmp_path):
    """Those of arithmetic take longer and the same lines. The golden traces hold what a run begins with."""
    config = ROOT / "benchmarks/tasks/randomwalks/base_model.yaml"
    scripts.run([ROOT / "algos/sft.py", "--config", config, "--run-dir", tmp_path / "run"], tmp_path)
    examples, _ = sft.encode_rows(randomwalks.completions(), letters, randomwalks.CONTEXT, True, "walks")

    def loss_of(path):
        return sft.evaluate_loss(accelerator, reload(path), examples, 100)["loss"]

    found = loss_of(tmp_path / "run/hf_model")
    assert found == pytest.approx(loss_of(randomwalks.base_model()), abs=0.005)
    assert found < 1.5 < 3 < loss_of(randomwalks.untrained_model())


def test_drawings_are_recognised():
    images, captions = shapes.drawings(36)
    images = images.transpose(0, 3, 1, 2)
    for name in ("agreement", "colour", "shape"):
        assert shapes.metric(images, captions)[name] == [1.0] * 36
    found = shapes.metric(images, captions[1:] + captions[:1])  # of the neighbours: "a red square" for a red circle
    assert (mean(found["agreement"]), mean(found["colour"]), mean(found["shape"])) == (0, pytest.approx(2 / 3), 0)
    assert shapes.recognise(np.full((3, 32, 32), 0.4)) == (None, None)


def test_rewards_of_images():
    plain = np.full((3, 32, 32), 0.25)
    busy = np.random.default_rng(0).uniform(size=(3, 32, 32))
    assert shapes.brightness([plain], [""]) == [0.25]
    small, large = shapes.incompressibility([plain, busy], ["", ""])
    assert 0.3 < small < 1 < 1.5 < large < 3  # kB, of which 0.6 are no pixels
    assert shapes.compressibility([plain, busy], ["", ""]) == [-small, -large]
    many = [np.full((3, 32, 32), level) * busy for level in np.linspace(0.1, 1, 20)]
    scores = shapes.compressibility(many, [""] * 20)
    shuffled = shapes.shuffled(many, [""] * 20)
    assert sorted(shuffled) == sorted(scores) and shuffled != scores
