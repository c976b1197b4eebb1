"""Sums of which none, one or two steps are written in the prompt, so that prompts differ in length: `676+236=6+6=12,`.
The base model is that of arithmetic.py, which has learnt from texts that go on so."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import arithmetic


def prompts(split: str = "train", count: int = 5000) -> list[dict]:
    """Different problems of a split, every third one without a step."""
    rows = []
    for number, prompt in enumerate(arithmetic.different_problems("sums", split, count)):
        a, b = map(int, arithmetic.SUM_PROMPT.fullmatch(prompt).groups())
        steps = arithmetic.written_sum(a, b).split(",")[: number % 3]
        rows.append({"prompt": prompt + "".join(f"{step}," for step in steps)})
    return rows


def reward(prompts: list[str], outputs: list[str], **columns) -> list[float]:
    """1.0 for a right final answer, else 0.0."""
    problems = [prompt[: prompt.index("=") + 1] for prompt in prompts]
    return [float(arithmetic.is_right(*pair)) for pair in zip(problems, outputs, strict=True)]


def metric(prompts: list[str], outputs: list[str], **columns) -> dict[str, list[float]]:
    return {"accuracy": reward(prompts, outputs)}
