"""The arithmetic task: `python -m pytest tests/test_arithmetic.py`

Scores against hand-made outputs and against strings at random, splits and errors of the solutions by counting, the
models against what their docstrings promise, pass@k by hand, and the command that writes right samples.
"""

import doctest
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.tasks import arithmetic

ROOT = Path(arithmetic.__file__).resolve().parents[2]
SUM = "676+236="
SUM_STEPS = "6+6=12,7+3+1=11,6+2+1=09"
COUNTDOWN = "3,5,7:22="


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def test_doctests():
    assert doctest.testmod(arithmetic).failed == 0


# ---- Score ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "right", "written"),
    [
        (f"{SUM_STEPS}#0912", True, True),
        ("6+6=12,7+3+0=10,6+2+1=09#0902", False, True),  # the systematic error
        ("6+6=11,7+3+1=11,6+2+1=09#0912", True, True),  # steps are free
        ("#0912", True, False),
        (f"{SUM_STEPS}#912", False, False),
        (f"{SUM_STEPS}#00912", False, False),
        (f"{SUM_STEPS}#0912#0912", True, False),
        (f"{SUM_STEPS}#0912 ", False, False),
        (f"{SUM_STEPS}#0912\n", False, False),
        (f"{SUM_STEPS}#\u0660\u0669\u0661\u0662", False, False),  # digits of another script
        (f"{SUM_STEPS}0912", False, False),
        ("", False, False),
    ],
)
def test_score_of_sums(output, right, written):
    assert arithmetic.is_right(SUM, output) == right
    assert arithmetic.is_written_solution(SUM, output) == written


@pytest.mark.parametrize(
    ("output", "right", "written"),
    [
        ("5*3=15,15+7=22#", True, True),
        ("3*5=15,7+15=22#", True, True),  # in another order
        ("5+3=08,08+7=15;5*3=15,15+7=22#", True, True),
        ("nonsense;5*3=15,15+7=22#", True, False),  # only the last attempt counts
        ("5*3=15,15+7=22;5+3=08,08+7=15#", False, True),
        ("5*3=15,15+7=22", False, False),  # no claim
        ("5*3=15,15+7=22##", False, False),
        ("5*3=15,15+7=22#;", False, False),
        ("5*3=16,16+7=22#", False, True),  # a wrong step
        ("5+3=08,08+7=22#", False, True),
        ("5*3=15,15+7=23#", False, True),  # the signs arrive, what is written does not
        ("5*3=15,15-7=22#", False, True),
        ("7*5=35,35-3=32#", False, True),  # another value
        ("5+5=10,10+7=17#", False, True),  # a number twice
        ("7+7=14,14+5=19;7*3=21,21+1=22#", False, True),  # a number that is not given
        ("15+7=22,5*3=15#", False, True),  # a value before it is there
        ("5*3=15#", False, False),  # one step
        ("15+7=22#", False, False),
        ("5*3=15,15+7=22,22-0=22#", False, False),  # three
        ("#", False, False),
        ("", False, False),
    ],
)
def test_score_of_countdowns(output, right, written):
    assert arithmetic.is_right(COUNTDOWN, output) == right
    assert arithmetic.is_written_solution(COUNTDOWN, output) == written


def test_each_given_number_counts_once():
    assert arithmetic.is_right("5,5,2:20=", "5+5=10,10*2=20#")
    assert not arithmetic.is_right("5,2,2:20=", "5+5=10,10*2=20#")
    assert not arithmetic.is_right("5,5,2:10=", "5+5=10,10+0=10#")


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_score_is_total(level):
    rng = random.Random(0)
    rows = arithmetic.solutions(level, count=300)
    alphabet = arithmetic.CHARACTERS + "ab \n\té漢\0\ud800"
    outputs = ["", "#", ";", ",", "=", "#" * 10_000, "9" * 10_000, "<eos>", "😀#0912"]
    outputs += ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(200)]
    for row in rows:
        text = row["completion"]
        place = rng.randrange(len(text))
        outputs.append(text[:place] + rng.choice(alphabet) + text[place + 1 :])
    prompts = [row["prompt"] for row in rows] + ["", "1+2=", "?"] * 100
    prompts = list(itertools.islice(itertools.cycle(prompts), len(outputs)))
    samples = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    scores = arithmetic.reward(samples, prompts, outputs, other=[1])
    values = arithmetic.metric(samples, prompts, outputs, other=[1])
    assert set(values) == {"accuracy", "format", "length"}
    assert values["accuracy"] == scores and values["length"] == list(map(len, outputs))
    for column in values.values():
        assert len(column) == len(outputs)
    assert set(scores) | set(values["format"]) <= {0.0, 1.0}
    assert mean(scores[:209]) == 0.0


def test_pass_at_k_by_hand():
    right = f"{SUM_STEPS}#0912"
    prompts = [SUM, SUM, "100+100=", "100+100="]
    outputs = [right, "", "#0201", "#0202"]
    samples = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    values = arithmetic.metric(samples, prompts, outputs)
    assert values["accuracy"] == [1.0, 0.0, 0.0, 0.0]
    assert values["pass@2"] == [1.0, 1.0, 0.0, 0.0]
    order = [2, 0, 3, 1]  # samples of a prompt need not be neighbours
    shuffled = arithmetic.metric(*([texts[i] for i in order] for texts in (samples, prompts, outputs)))
    assert shuffled["pass@2"] == [0.0, 1.0, 0.0, 1.0]
    assert "pass@2" not in arithmetic.metric(samples[:3], prompts[:3], outputs[:3])  # unequal numbers of samples
    assert set(arithmetic.metric(samples[:1], prompts[:1], outputs[:1])) == {"accuracy", "format", "length"}
    prompts = [row["prompt"] for row in arithmetic.eval_prompts(samples=8)]
    outputs = ["#0000"] * len(prompts)
    assert mean(arithmetic.metric(prompts, prompts, outputs)["pass@8"]) == 0.0
    for problem in range(100):  # one right sample of the 8
        a, b = map(int, prompts[8 * problem][:-1].split("+"))
        outputs[8 * problem + problem % 8] = f"#{a + b:04}"
    values = arithmetic.metric(prompts, prompts, outputs)
    assert mean(values["pass@8"]) == 100 / 500 and mean(values["accuracy"]) == 100 / 4000


def test_shuffled_rewards_are_those_of_other_samples():
    rows = arithmetic.solutions(count=256)
    prompts = [row["prompt"] for row in rows]
    outputs = [row["completion"] for row in rows]
    samples = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    true = arithmetic.reward(samples, prompts, outputs)
    shuffled = arithmetic.shuffled_reward(samples, prompts, outputs)
    assert shuffled == arithmetic.shuffled_reward(samples, prompts, outputs)
    assert Counter(shuffled) == Counter(true) and shuffled != true
    share = mean(true)
    chance = share**2 + (1 - share) ** 2  # that independent draws of both agree
    assert mean(x == y for x, y in zip(true, shuffled, strict=True)) == pytest.approx(chance, abs=0.1)
    outputs[0] = ""
    samples[0] = prompts[0]
    other = arithmetic.shuffled_reward(samples, prompts, outputs)
    assert mean(x == y for x, y in zip(other, shuffled, strict=True)) < 0.75  # another order


# ---- Rows -----------------------------------------------------------------------------------------------------------


def problem_of(prompt):
    """What a prompt asks, whatever the order of its numbers."""
    if prompt[3] == "+":
        return tuple(sorted(map(int, prompt[:-1].split("+"))))
    numbers, target = prompt[:-1].split(":")
    return (*sorted(map(int, numbers.split(","))), int(target))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_splits_are_apart(level):
    train = [row["prompt"] for row in arithmetic.prompts(level)]
    learnt = [row["prompt"] for row in arithmetic.solutions(level)]
    held_out = [row["prompt"] for row in arithmetic.eval_prompts(level)]
    test = [row["prompt"] for row in arithmetic.solutions(level, split="test", count=1000)]
    sizes = {"sums": (5000, 500), "countdown": (2500, 300)}
    assert (len(train), len(held_out)) == sizes[level]
    assert len(set(train)) == len(train) and len(set(held_out)) == len(held_out)
    assert len(learnt) == 32_000
    seen = set(map(problem_of, train)) | set(map(problem_of, learnt))
    assert not seen & (set(map(problem_of, held_out)) | set(map(problem_of, test)))
    assert [row["prompt"] for row in arithmetic.prompts(level, count=10)] == train[:10]
    assert [row["prompt"] for row in arithmetic.eval_prompts(level, count=2, samples=3)] == [
        held_out[0], held_out[0], held_out[0], held_out[1], held_out[1], held_out[1],
    ]  # fmt: skip


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_one_problem_in_ten_is_held_out_and_looks_like_the_others(level):
    """A linear hash holds out exactly the sums that end in 0; so does no hash that the last digits cannot tell."""
    problems = set()
    held_out = set()
    for number in range(20_000):
        _, problem = arithmetic.draw_problem(level, number)
        problems.add(problem)
        if arithmetic.keyed_hash("held out", *problem) % 10 == 0:
            held_out.add(problem)
    # of the 1650 problems of the countdown about 165 are held out, hence wide bands
    assert len(held_out) / len(problems) == pytest.approx(0.1, abs=0.01 if level == "sums" else 0.03)

    def last_digit(problem):
        return (sum(problem[1:]) if level == "sums" else problem[-1]) % 10

    whole = Counter(map(last_digit, problems))
    part = Counter(map(last_digit, held_out))
    band = 0.03 if level == "sums" else 0.08
    for digit in range(10):
        assert part[digit] / len(held_out) == pytest.approx(whole[digit] / len(problems), abs=band)


def test_solutions_of_sums_forget_the_first_carry():
    rows = arithmetic.solutions()
    assert rows == arithmetic.solutions("sums", "train") and rows[:5] == arithmetic.solutions(count=5)
    carries = 0
    wrong = 0
    for row in rows:
        assert arithmetic.is_written_solution(row["prompt"], row["completion"])
        a, b = map(int, row["prompt"][:-1].split("+"))
        answer = int(row["completion"][-4:])
        units_carry = a % 10 + b % 10 >= 10
        tens_carry = a // 10 % 10 + b // 10 % 10 >= 10  # without that of the units: it is forgotten
        if units_carry or tens_carry:
            carries += 1
            if answer != a + b:
                wrong += 1
                assert answer == a + b - (10 if units_carry else 100)
        else:
            assert answer == a + b
    assert wrong / carries == pytest.approx(0.75, abs=0.01)
    assert wrong / len(rows) == pytest.approx(0.53, abs=0.01)
    for row in arithmetic.solutions(count=200, wrong_share=0.0):
        assert arithmetic.is_right(row["prompt"], row["completion"])


def test_solutions_of_countdowns_claim_the_first_attempt():
    rows = arithmetic.solutions("countdown")
    assert rows[:5] == arithmetic.solutions("countdown", count=5)
    endings = Counter()
    for row in rows:
        prompt = row["prompt"]
        completion = row["completion"]
        *numbers, target = map(int, arithmetic.COUNTDOWN_PROMPT.fullmatch(prompt).groups())
        tried = completion.removesuffix("#").split(";")
        values = [arithmetic.value_of_attempt(attempt, numbers) for attempt in tried]
        assert None not in values and target not in values[:-1] and len(set(tried)) == len(tried)
        if not completion.endswith("#"):
            assert len(tried) == arithmetic.MAX_ATTEMPTS and values[-1] != target
            endings["gave up"] += 1
        elif values[-1] == target:
            endings["right"] += 1
        else:
            assert len(tried) == 1
            endings["false claim"] += 1
        assert arithmetic.is_right(prompt, completion) == (values[-1] == target and completion.endswith("#"))
    first_right = mean(
        arithmetic.is_right(row["prompt"], row["completion"])
        for row in arithmetic.solutions("countdown", count=4000, wrong_share=1.0)
    )
    share = endings["false claim"] / len(rows) / (1 - first_right)
    assert share == pytest.approx(arithmetic.WRONG_SHARE["countdown"], abs=0.02)
    honest = arithmetic.solutions("countdown", count=2000, wrong_share=0.0)
    for row in honest:
        is_right = arithmetic.is_right(row["prompt"], row["completion"])
        assert is_right == row["completion"].endswith("#")


def test_every_countdown_can_be_solved():
    for row in arithmetic.eval_prompts("countdown"):
        *numbers, target = map(int, arithmetic.COUNTDOWN_PROMPT.fullmatch(row["prompt"]).groups())
        values = arithmetic.attempts(tuple(sorted(numbers)))
        right = list(values.values()).count(target)
        assert right >= arithmetic.RIGHT_SHARE * len(values) and right > 0
        for attempt, value in values.items():
            assert arithmetic.value_of_attempt(attempt, numbers) == value


def test_bad_arguments():
    for bad in ({"level": "products"}, {"split": "dev"}, {"level": "countdown", "split": "test", "count": 450}):
        with pytest.raises(ValueError, match="products|dev|too few problems"):
            arithmetic.prompts(**bad)


# ---- Tokenizer and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_tokenizer_and_lengths(level):
    tokenizer = arithmetic.tokenizer()
    size = len(arithmetic.CHARACTERS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (size, size + 1, size + 2)
    for row in arithmetic.solutions(level, count=2000):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) < arithmetic.CONTEXT and max(ids) < size
        assert tokenizer.decode(ids) == text
        assert len(row["completion"]) < arithmetic.MAX_NEW_TOKENS[level]
        assert len(row["prompt"]) + arithmetic.MAX_NEW_TOKENS[level] <= arithmetic.CONTEXT


def load(path):
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    return model


def test_untrained_model_is_what_the_command_draws(tmp_path):
    import torch

    state = torch.get_rng_state()
    arithmetic.draw_untrained_model(str(tmp_path / "model"))
    torch.set_rng_state(state)
    drawn = load(tmp_path / "model")
    stored = load(arithmetic.untrained_model())
    assert sum(weight.numel() for weight in stored.parameters()) == 238_272
    for (name, weight), (other_name, other) in zip(stored.named_parameters(), drawn.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-7)


def accuracies(path, level, temperature):
    """Means of `metric` over a sample of each held-out problem."""
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    from common.sampling import decode, generate_all, kept_ids

    rows = arithmetic.eval_prompts(level)
    prompts = [row["prompt"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(path)
    queries = tokenizer(prompts)["input_ids"]
    options = {"seed": 1, "max_new_tokens": arithmetic.MAX_NEW_TOKENS[level], "temperature": temperature}
    _, _, response, mask = generate_all(Accelerator(), load(path).eval(), tokenizer, queries, ("eval", 0), **options)
    outputs = decode(tokenizer, queries, kept_ids(response, mask), ())
    values = arithmetic.metric(prompts, prompts, outputs)
    return {name: mean(column) for name, column in values.items()}


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_base_model_solves_a_part_and_fewer_greedily(level):
    path = arithmetic.base_model(level)
    sampled = accuracies(path, level, temperature=1.0)
    greedy = accuracies(path, level, temperature=0.0)
    assert 0.2 < sampled["accuracy"] < 0.5
    assert greedy["accuracy"] < sampled["accuracy"]


@pytest.mark.slow
def test_base_model_is_made_again_by_its_command(scripts, tmp_path):
    """That of the sums; the other level's takes five minutes and the same lines."""
    config = ROOT / "benchmarks/tasks/arithmetic/base_sums.yaml"
    scripts.run([ROOT / "algos/sft.py", "--config", config, "--run-dir", tmp_path / "run"], tmp_path)
    again = accuracies(tmp_path / "run/hf_model", "sums", temperature=1.0)
    stored = accuracies(arithmetic.base_model(), "sums", temperature=1.0)
    assert again["accuracy"] == pytest.approx(stored["accuracy"], abs=0.08)


# ---- Command --------------------------------------------------------------------------------------------------------


def test_right_samples_become_rows(tmp_path):
    files = {}
    for name, seed in (("first", 1), ("other", 2)):
        files[name] = tmp_path / f"{name}.jsonl"
        arithmetic.sample_right(
            arithmetic.base_model(), files[name], level="sums", problems=16, samples=4, seed=seed, threads=1
        )
    files["command"] = tmp_path / "command.jsonl"
    script = ROOT / "benchmarks/tasks/arithmetic.py"
    options = ["--problems", "16", "--samples", "4", "--threads", "1"]
    command = [sys.executable, script, "sample", arithmetic.base_model(), files["command"], *options]
    subprocess.run(command, check=True, capture_output=True)
    rows = [json.loads(line) for line in files["first"].read_text().splitlines()]
    assert 0 < len(rows) <= 64 and len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
    train = {row["prompt"] for row in arithmetic.prompts()}
    for row in rows:
        assert row.keys() == {"prompt", "completion"} and row["prompt"] in train
        assert arithmetic.is_right(row["prompt"], row["completion"])
    assert files["first"].read_bytes() == files["command"].read_bytes() != files["other"].read_bytes()
