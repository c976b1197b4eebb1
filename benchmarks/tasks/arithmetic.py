"""Arithmetic with written steps: problems whose final answer is verified. Two levels, no download.

sums       `676+236=`, answered by `6+6=12,7+3+1=11,6+2+1=09#0912`: two numbers of 3 digits, added column by column from
           the units on, with the carry as last summand, and the sum behind `#`. Right solutions have 29 characters.
countdown  `3,5,7:22=`, answered by `5*3=15,15-7=08;5*3=15,15+7=22#`: a search for a way to make the target of three
           numbers, each used once. An attempt is two steps that stay within 0..99. `#` claims that the attempt before
           it arrives. Solutions have as many attempts as they need.

The base models learnt from solutions with one systematic error, see `solutions`. So they solve a part of the problems
when sampled and fewer when greedy, and there is something for RL to put right: the reward is 1.0 for a right final
answer, and 0.0 else. One problem in ten is held out, whatever the order of its numbers.

Spec strings name its functions: `benchmarks/tasks/arithmetic.py:prompts:level=countdown`; without a level it is sums.
"""

import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

MODELS = Path(__file__).with_suffix("")  # the folder of this name
sys.path.append(str(MODELS.parent))

import characters  # noqa: E402

LEVELS = ("sums", "countdown")
LARGEST = 99  # number in a countdown
MAX_ATTEMPTS = 7  # of a solution of the countdown
RIGHT_SHARE = 1 / 12  # of the attempts, in the problems of a countdown that are asked; solutions are of all problems
SAMPLED_AT_ONCE = 1024
WRONG_SHARE = {"sums": 0.75, "countdown": 0.55}  # of the solutions, see `solutions`


def keyed_hash(*key) -> int:
    """A 64-bit hash of the key: a draw that depends on no generator, hence on no order of draws."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def keyed_share(*key) -> float:
    """`keyed_hash` as a number in [0, 1)."""
    return keyed_hash(*key) / 2**64


# ---- Sums -----------------------------------------------------------------------------------------------------------

SUM_PROMPT = re.compile(r"([0-9]{3})\+([0-9]{3})=")
SUM_ANSWER = re.compile(r"#([0-9]{4})\Z")
SUM_SOLUTION = re.compile(r"\d\+\d=\d\d,\d\+\d\+\d=\d\d,\d\+\d\+\d=\d\d#\d{4}", re.ASCII)


def written_sum(a: int, b: int, forget_carry: bool = False) -> str:
    """The steps and the sum of two numbers of 3 digits. forget_carry: the first carry between two columns is taken for
    0, and the rest follows from that.

    >>> written_sum(676, 236)
    '6+6=12,7+3+1=11,6+2+1=09#0912'
    >>> written_sum(676, 236, forget_carry=True)
    '6+6=12,7+3+0=10,6+2+1=09#0902'
    """
    steps = []
    digits = ""
    carry = 0
    for place in range(3):
        x = a // 10**place % 10
        y = b // 10**place % 10
        total = x + y + carry
        step = f"{x}+{y}+{carry}={total:02}"
        if place == 0:
            step = f"{x}+{y}={total:02}"
        steps.append(step)
        digits = f"{total % 10}{digits}"
        carry = total // 10
        if carry and forget_carry and place < 2:
            carry = 0
            forget_carry = False
    return f"{','.join(steps)}#{carry}{digits}"


# ---- Countdown ------------------------------------------------------------------------------------------------------

COUNTDOWN_PROMPT = re.compile(r"([1-9]),([1-9]),([1-9]):([0-9]{2})=")
STEP = re.compile(r"([0-9]{1,2})([-+*])([0-9]{1,2})=([0-9]{1,2})")
ATTEMPT = rf"{STEP.pattern},{STEP.pattern}"
SEARCH = re.compile(rf"({ATTEMPT};)*{ATTEMPT}#")


def steps_of(x: int, y: int, width: int) -> list[tuple[str, int]]:
    """(step, value) of what two numbers, the larger or equal one first, can make within 0..99. width: digits of x.

    >>> steps_of(5, 3, width=1)
    [('5+3=08', 8), ('5-3=02', 2), ('5*3=15', 15)]
    """
    values = {"+": x + y, "-": x - y, "*": x * y}
    return [(f"{x:0{width}}{sign}{y}={value:02}", value) for sign, value in values.items() if 0 <= value <= LARGEST]


@functools.cache
def attempts(numbers: tuple[int, ...]) -> Mapping[str, int]:
    """{attempt: value} of all that solutions make of three numbers, smallest first, each used once. Read-only."""
    found = {}
    for x, y, z in itertools.permutations(numbers):
        if x < y:
            continue
        for first_step, first_value in steps_of(x, y, width=1):
            for second_step, value in steps_of(first_value, z, width=2):
                found[f"{first_step},{second_step}"] = value
    return MappingProxyType(found)


def value_of_attempt(attempt: str, numbers: tuple[int, ...]) -> int | None:
    """What the attempt makes of the three numbers, or None where it is none: another form, a wrong step, or other
    numbers. The order in a step is free.

    >>> value_of_attempt("3*5=15,15+7=22", (3, 5, 7)), value_of_attempt("5*3=15,15+5=20", (3, 5, 7))
    (22, None)
    """
    left = list(numbers)
    for step in attempt.split(","):
        match = STEP.fullmatch(step)
        if match is None:
            return None
        x = int(match[1])
        y = int(match[3])
        value = {"+": x + y, "-": x - y, "*": x * y}[match[2]]
        if value != int(match[4]):
            return None
        for number in (x, y):
            if number not in left:
                return None
            left.remove(number)
        left.append(value)
    return left[0] if len(left) == 1 else None


def written_search(prompt: str, number: int, claim_first: bool = False) -> str:
    """Attempts in an order drawn by (prompt, number), none twice, until one arrives; without `#` where
    MAX_ATTEMPTS were in vain. Attempts that arrive are drawn to somewhat earlier places.

    claim_first: the first attempt is claimed to arrive, whatever its value.
    """
    *numbers, target = map(int, COUNTDOWN_PROMPT.fullmatch(prompt).groups())
    values = attempts(tuple(sorted(numbers)))

    def place(attempt: str) -> float:
        draw = keyed_share("attempt", prompt, number, attempt)
        return draw**1.25 if values[attempt] == target else draw

    order = sorted(values, key=place)
    tried = []
    for attempt in order[:MAX_ATTEMPTS]:
        tried.append(attempt)
        if values[attempt] == target or claim_first:
            return ";".join(tried) + "#"
    return ";".join(tried)


# ---- Score ----------------------------------------------------------------------------------------------------------


def is_right(prompt: str, output: str) -> bool:
    """Whether the output ends with the right answer to the prompt; False for any other two strings.

    Of sums the digits behind `#` count, of the countdown the last attempt: what stands before is free.
    >>> is_right("676+236=", "#0912"), is_right("3,5,7:22=", "5-3=02,02+7=09;3*5=15,15+7=22#")
    (True, True)
    """
    if problem := SUM_PROMPT.fullmatch(prompt):
        answer = SUM_ANSWER.search(output)
        return answer is not None and int(answer[1]) == int(problem[1]) + int(problem[2])
    if problem := COUNTDOWN_PROMPT.fullmatch(prompt):
        *numbers, target = map(int, problem.groups())
        last_attempt = output.removesuffix("#").split(";")[-1]
        return output.endswith("#") and value_of_attempt(last_attempt, numbers) == target
    return False


def is_written_solution(prompt: str, output: str) -> bool:
    """Whether the output has the form of a solution with an answer, right or wrong."""
    form = SEARCH if COUNTDOWN_PROMPT.fullmatch(prompt) else SUM_SOLUTION
    return form.fullmatch(output) is not None


def reward(samples: list[str], prompts: list[str], outputs: list[str], **columns) -> list[float]:
    """1.0 for a right final answer, else 0.0."""
    return [float(is_right(prompt, output)) for prompt, output in zip(prompts, outputs, strict=True)]


def shuffled_reward(samples: list[str], prompts: list[str], outputs: list[str], **columns) -> list[float]:
    """The rewards of the call in another order: a control. Their mean is that of the true rewards, and nothing is to be
    learned from them. The order is a function of the samples."""
    scores = reward(samples, prompts, outputs)
    key = keyed_hash("shuffled", *samples)
    order = sorted(range(len(scores)), key=lambda place: keyed_hash(key, place))
    return [scores[place] for place in order]


def metric(samples: list[str], prompts: list[str], outputs: list[str], **columns) -> dict[str, list[float]]:
    """Per sample: accuracy (the reward), format (1.0 where the output is a written solution with an answer), and length
    in characters."""
    pairs = list(zip(prompts, outputs, strict=True))
    return {
        "accuracy": reward(samples, prompts, outputs),
        "format": [float(is_written_solution(prompt, output)) for prompt, output in pairs],
        "length": [len(output) for output in outputs],
    }


# ---- Rows -----------------------------------------------------------------------------------------------------------


def draw_problem(level: str, number: int) -> tuple[str, tuple]:
    """(prompt, what it asks whatever the order of its numbers) of the keyed draw of this number."""
    if level == "sums":
        draw = keyed_hash("sum", number)
        a = 100 + draw % 900
        b = 100 + draw // 900 % 900
        return f"{a}+{b}=", ("sum", *sorted((a, b)))
    numbers = [1 + keyed_hash("number", number, place) % 9 for place in range(3)]
    values = attempts(tuple(sorted(numbers))).values()
    targets = [value for value in values if value]
    target = targets[keyed_hash("target", number) % len(targets)]
    return f"{','.join(map(str, numbers))}:{target:02}=", ("countdown", *sorted(numbers), target)


def draw_problems(level: str, split: str) -> Iterator[str]:
    """Endless keyed draws of prompts of a split: train, or test, which is one problem in ten. They come again."""
    if level not in LEVELS or split not in ("train", "test"):
        raise ValueError(f"level={level!r}, split={split!r}: must be {' or '.join(LEVELS)}, and train or test")
    for number in itertools.count():
        prompt, problem = draw_problem(level, number)
        held_out = keyed_hash("held out", *problem) % 10 == 0
        if held_out == (split == "test"):
            yield prompt


def is_asked(prompt: str) -> bool:
    """Whether enough attempts arrive: a countdown with fewer is hardly ever solved by the base model."""
    match = COUNTDOWN_PROMPT.fullmatch(prompt)
    if match is None:
        return True
    *numbers, target = map(int, match.groups())
    values = list(attempts(tuple(sorted(numbers))).values())
    return values.count(target) >= RIGHT_SHARE * len(values)


def different_problems(level: str, split: str, count: int) -> list[str]:
    """The first so many different prompts of a split that are asked."""
    different = {}  # a dict keeps the order
    for prompt in itertools.islice(draw_problems(level, split), 100 * count):
        if is_asked(prompt):
            different[prompt] = None
        if len(different) == count:
            return list(different)
    raise ValueError(f"count={count}: level {level!r} has too few problems in {split}, {len(different)} were found")


def prompts(level: str = "sums", split: str = "train", count: int | None = None) -> list[dict]:
    """Different problems of a split; default: 5000 sums or 2500 countdowns."""
    if count is None:
        count = 2500 if level == "countdown" else 5000
    return [{"prompt": prompt} for prompt in different_problems(level, split, count)]


def eval_prompts(level: str = "sums", count: int | None = None) -> list[dict]:
    """Held-out problems. Default: 500 sums or 300 countdowns. The standard error of an accuracy is at most 0.022 or
    0.029."""
    if count is None:
        count = 300 if level == "countdown" else 500
    return [{"prompt": prompt} for prompt in different_problems(level, "test", count)]


def solution(prompt: str, number: int, wrong_share: float) -> str:
    """A written solution of a problem; with probability wrong_share it is made with the systematic error."""
    with_error = keyed_share("wrong", prompt, number) < wrong_share
    if problem := SUM_PROMPT.fullmatch(prompt):
        return written_sum(int(problem[1]), int(problem[2]), forget_carry=with_error)
    return written_search(prompt, number, claim_first=with_error)


def solutions(
    level: str = "sums", split: str = "train", count: int = 32_000, wrong_share: float | None = None
) -> list[dict]:
    """Problems with written solutions, a share of which (default: WRONG_SHARE) has the level's systematic error.

    sums       the first carry between two columns is forgotten, where there is one
    countdown  the first attempt is claimed to arrive, whatever its value
    """
    if wrong_share is None:
        wrong_share = WRONG_SHARE[level]
    rows = []
    for number, prompt in enumerate(itertools.islice(draw_problems(level, split), count)):
        rows.append({"prompt": prompt, "completion": solution(prompt, number, wrong_share)})
    return rows


# ---- Models ---------------------------------------------------------------------------------------------------------

CHARACTERS = "0123456789+-*=,:;#"
CONTEXT = 128  # positions of the model; a countdown with its solution and its end has at most 115 tokens
MAX_NEW_TOKENS = {"sums": 36, "countdown": 112}  # solutions and their ends have at most 30 and 106


def tokenizer():
    """One token per character, id = index in CHARACTERS, then <bos> <eos> <pad> <unk>; no bos or eos is added."""
    return characters.tokenizer(CHARACTERS, CONTEXT)


def base_model(level: str = "sums") -> str:
    """Path of a GPT-2 that solves a part of the problems: `untrained_model` after

    python algos/sft.py --config benchmarks/tasks/arithmetic/base_sums.yaml --run-dir DIRECTORY

    or base_countdown.yaml; other machines get other bits.
    """
    return str(MODELS / f"base_{level}")


def untrained_model() -> str:
    """Path of that model with random weights (2 layers, width 96, 0.24 M parameters), drawn where it is not there yet:
    see characters.py."""
    return characters.untrained_gpt2(CHARACTERS, CONTEXT, layers=2, width=96, heads=4)


# ---- Command --------------------------------------------------------------------------------------------------------


def sample_right(model: str, output: str, problems: int = 512, samples: int = 8, seed: int = 1, threads: int = 0):
    """Samples solutions of training sums and writes the right ones as rows of prompt and completion: one round of
    expert iteration is this and algos/sft.py on the rows. Of equal solutions of a problem one is kept, as in rejection
    sampling fine-tuning (Yuan et al. 2023, arXiv 2308.01825). model, output: a directory, a file .jsonl. seed: of the
    choice of problems and of the samples. threads: of the CPU; default: torch's.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.lm.sampling import sample, uniforms
    from common.lm.tokens import decode
    from common.seeding import rng

    if threads:
        torch.set_num_threads(threads)
    lm = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    candidates = prompts()
    chosen = rng(seed, "problems", 0).permutation(len(candidates))[:problems]
    texts = []
    for row in chosen:
        texts += [candidates[row]["prompt"]] * samples
    outputs = []
    for begin in range(0, len(texts), SAMPLED_AT_ONCE):
        queries = tokenizer(texts[begin : begin + SAMPLED_AT_ONCE])["input_ids"]
        limits = [MAX_NEW_TOKENS["sums"]] * len(queries)
        draws = uniforms(seed, "expert iteration", 0, range(begin, begin + len(queries)), limits[0])
        outputs += decode(tokenizer, queries, sample(lm, tokenizer, queries, draws, limits), ())
    scores = reward(texts, texts, outputs)
    right = {}  # a dict keeps the order
    for prompt, completion, score in zip(texts, outputs, scores, strict=True):
        if score:
            right[prompt, completion] = None
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in right]
    Path(output).write_text("".join(f"{row}\n" for row in rows))
    print(f"{output}: {sum(scores):.0f} of {len(scores)} samples are right, {len(rows)} of these differ")


if __name__ == "__main__":
    import tyro

    tyro.cli(sample_right, config=(tyro.conf.PositionalRequiredArgs,))
