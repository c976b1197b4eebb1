"""Arithmetic with a calculator: answers that a small model cannot find by itself, and can ask for. No download.

one  `374*482=`, answered by `<374*482>`, to which the calculator adds `180268`, and `#180268`
two  `37*48+59=` or `59+37*48=`, answered by `<37*48>`, 1776, `<1776+59>`, 1835, and `#1835`

`episode` is the rollout: what stands in `<...>` is computed, and the result is read, but not trained. The base models
learnt from solutions of which a quarter are right (`KINDS`); most of the others guess without a call. So they hardly
ever call when greedy, and there is something for RL to put right: the reward is 1.0 for a right number behind the last
`#`, and 0.0 else. One problem in ten is held out.

Spec strings name its functions: `benchmarks/tasks/calculator.py:prompts:level=two`; without a level it is one.
"""

import itertools
import re
import sys
from pathlib import Path

MODELS = Path(__file__).with_suffix("")  # the folder of this name
sys.path.append(str(MODELS.parent))  # for the other tasks

import characters  # noqa: E402
from arithmetic import keyed_hash, keyed_share  # noqa: E402

PROBLEM = re.compile(r"(?:(\d+)\+)?(\d+)\*(\d+)(?:\+(\d+))?=")
CALL = re.compile(r"(\d{1,7})([*+])(\d{1,7})", re.ASCII)
KINDS = {  # of solutions, with their shares
    "one": {"right": 0.25, "guess": 0.60, "wrong call": 0.05, "malformed": 0.05, "wrong copy": 0.05},
    "two": {"right": 0.25, "guess": 0.55, "wrong call": 0.05, "malformed": 0.05, "one call": 0.10},
}
CHARACTERS = "0123456789+*=<>#?"
CONTEXT = 64  # positions of the model


# ---- The tool --------------------------------------------------------------------------------------------------------


def calculate(call):
    """The result of a product or a sum; "?" for any other text.

    >>> calculate("374*482"), calculate("1776+59"), calculate("374*")
    ('180268', '1835', '?')
    """
    if match := CALL.fullmatch(call):
        a, sign, b = match.groups()
        return str(int(a) * int(b) if sign == "*" else int(a) + int(b))
    return "?"


def episode(sample, prompt_ids, tokenizer, answers=True):
    """Per row a list of (ids, trained): what was sampled, and what the calculator wrote behind each call. answers:
    without them it writes "?" each time, a control."""
    turns = [[] for _ in prompt_ids]
    contexts = [list(ids) for ids in prompt_ids]
    going = list(range(len(prompt_ids)))
    while going:
        sampled = sample([contexts[row] for row in going], going, stop=(">",))
        calling = []
        for row, ids in zip(going, sampled, strict=True):
            turns[row].append((ids, True))
            text = tokenizer.decode(ids, skip_special_tokens=True)  # of which <eos> is one
            if text.endswith(">"):
                result = calculate(text[:-1].rpartition("<")[2]) if answers else "?"
                turns[row].append((tokenizer(result)["input_ids"], False))
                contexts[row] += ids + turns[row][-1][0]
                calling.append(row)
        going = calling
    return turns


# ---- Score -----------------------------------------------------------------------------------------------------------


def result_of(prompt):
    """The number that a problem asks for.

    >>> result_of("374*482="), result_of("59+37*48=")
    (180268, 1835)
    """
    before, a, b, behind = PROBLEM.fullmatch(prompt).groups(default="0")
    return int(before) + int(a) * int(b) + int(behind)


def reward(prompts, outputs, **columns):
    """1.0 where the digits behind the last `#` are the result, else 0.0."""
    return [
        float(output.rpartition("#")[2] == str(result_of(prompt)) and "#" in output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def metric(prompts, outputs, **columns):
    """Per sample: accuracy (the reward), and calls (how many there are)."""
    return {"accuracy": reward(prompts, outputs), "calls": [output.count(">") for output in outputs]}


# ---- Rows ------------------------------------------------------------------------------------------------------------


def draw_problem(level, number):

    def drawn(name, low, high):
        return low + keyed_hash("calculator", level, name, number) % (high - low)

    # factors whose products have 6 or 4 digits: where one in six had fewer, the small model learnt to copy the others
    if level == "one":
        return f"{drawn('a', 317, 1000)}*{drawn('b', 317, 1000)}="
    product = f"{drawn('a', 32, 100)}*{drawn('b', 32, 100)}"
    added = drawn("c", 10, 100)
    return f"{product}+{added}=" if drawn("order", 0, 2) else f"{added}+{product}="


def draw_problems(level, split):
    """Endless keyed draws of prompts of a split: train, or test, which is one problem in ten. They come again."""
    if level not in KINDS or split not in ("train", "test"):
        raise ValueError(f"level={level!r}, split={split!r}: must be {' or '.join(KINDS)}, and train or test")
    for number in itertools.count():
        prompt = draw_problem(level, number)
        if (keyed_hash("held out", prompt) % 10 == 0) == (split == "test"):
            yield prompt


def prompts(level="one", split="train", count=5000):
    different = dict.fromkeys(itertools.islice(draw_problems(level, split), 2 * count))  # a dict keeps the order
    return [{"prompt": prompt} for prompt in itertools.islice(different, count)]


def eval_prompts(level="one", count=300):
    """Held-out problems. The standard error of an accuracy is at most 0.029."""
    return prompts(level, "test", count)


def solution(prompt, number, level):
    """[prompt, output, result, output, ...]: a solution of a kind drawn from KINDS."""
    place = keyed_share("kind", prompt, number)
    ends = itertools.accumulate(KINDS[level].values())
    kind = next((kind for kind, end in zip(KINDS[level], ends, strict=True) if place < end), "guess")
    shift = 1 + keyed_hash("shift", prompt, number) % 9
    right = result_of(prompt)
    if kind == "guess":
        digits = len(str(right))
        guess = 10 ** (digits - 1) + keyed_hash("guess", prompt, number) % (9 * 10 ** (digits - 1))
        return [prompt, f"#{guess}"]
    before, a, b, behind = PROBLEM.fullmatch(prompt).groups()
    call = f"{a}*{b}"
    if kind == "wrong call":
        call = f"{a}*{int(b) + shift}"
    if kind == "malformed":
        call = f"{a}*"
    turns = [prompt, f"<{call}>", calculate(call)]
    if level == "two" and kind != "one call":
        call = f"{turns[-1]}+{before or behind}"
        turns += [f"<{call}>", calculate(call)]
    answer = turns[-1]
    if kind == "wrong copy":
        answer = str(right + shift)
    return [*turns, f"#{answer}"]


def solutions(level="one", count=32_000):
    """Training problems with solutions, as dialogues: the calculator's results stand where a prompt does."""
    problems = enumerate(itertools.islice(draw_problems(level, "train"), count))
    return [{"dialogue": solution(prompt, number, level)} for number, prompt in problems]


# ---- Models ----------------------------------------------------------------------------------------------------------


def tokenizer():
    """One token per character, id = index in CHARACTERS, then <bos> <eos> <pad> <unk>; no bos or eos is added."""
    return characters.tokenizer(CHARACTERS, CONTEXT)


def base_model(level="one"):
    """Path of a GPT-2 that calls now and then: `untrained_model` after

    python algos/sft.py --config benchmarks/tasks/calculator/base_one.yaml --run-dir DIRECTORY

    or base_two.yaml; other machines get other bits.
    """
    return str(MODELS / f"base_{level}")


def untrained_model():
    """Path of that model with random weights (2 layers, width 96), drawn where it is not there yet: characters.py."""
    return characters.untrained_gpt2(CHARACTERS, CONTEXT, layers=2, width=96, heads=4)
