"""Small functions that many tests need: chats, rows in files, what a run has written, records of calls."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState

from benchmarks.tables import by_step

BOS, EOS, PAD, UNK = 21, 22, 23, 24  # of the tokenizer `letters`; a..u are 0..20
NAN = math.nan
INF = math.inf

# A turn is a letter of its role (t, u, s), the content and the end token, after one beginning token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': 't', 'user': 'u', 'assistant': 's'}.get(m.role) or "
    "raise_exception(m.role + ' is unknown') }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}s{% endif %}"
)


def turn(role, content):
    return {"role": role, "content": content}


def user(text):
    return turn("user", text)


def answer(text):
    return turn("assistant", text)


def add_specials(tokenizer, template):
    """The tokenizer adds special tokens to every text, as those of Llama (bos) do."""
    from tokenizers import processors

    pairs = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    return tokenizer


def save(folder, model, tokenizer):
    """Writes both into a directory, and returns its path as a text."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pad_is_eos(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def chatty(letters):
    """The letters with TEMPLATE."""
    letters.chat_template = TEMPLATE
    return letters


@pytest.fixture
def bf16():
    """Flags of autocast; accelerate keeps the precision of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield {"mixed_precision": "bf16"}
    AcceleratorState._reset_state(reset_partial_state=True)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def random(*shape, seed=0):
    """Normal numbers in float64."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def close(actual, expected, tolerance=1e-12):
    """Equal to a tolerance, of one shape: nothing is broadcast."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def equal(one, other):
    """Whether two {name: tensor} are the same bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows):
    Path(path).write_text(jsonl(rows))
    return str(path)


def log(run_dir):
    """The records of metrics.jsonl, one for each step."""
    return by_step(json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines())


def samples(run_dir, step=None):
    """The rows of samples.jsonl, of one step or all; [] without the file."""
    path = Path(run_dir) / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if step is None or row["step"] == step]


def weights(folder):
    """{file.name: tensor} of an export, a checkpoint, or the export of a run."""
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("hf_model/*.safetensors"))
    return {f"{f.stem}.{k}": v for f in files for k, v in safetensors.torch.load_file(f).items()}


def same_record(found, expected, what):
    """Two lines of a file of a run: numbers to 1e-9, everything else exactly."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        tolerance = 1e-6 if "ratio_deviation" in name else 1e-9  # kept in float32
        values = value if isinstance(value, list) else [value]
        if all(type(x) in (float, int) for x in values):
            value = pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)
        assert found[name] == value, f"{what}: {name} is {found[name]}, expected {expected[name]}"


def same_run(a, b, weight_tolerance=1e-9, what=""):
    """Metrics and samples of two run directories agree to 1e-9, learning rates and texts exactly, each weight of their
    exports to weight_tolerance of the largest of its tensor. Of a tensor without a gradient, rounding errors are all
    that moves: hence the least size."""
    for one, two in zip(log(a), log(b), strict=True):
        assert one.get("optim/lr") == two.get("optim/lr")
        same_record(one, two, f"{what} step {two['step']}")
    for one, two in zip(samples(a), samples(b), strict=True):
        same_record(one, two, f"{what} sample of step {two['step']}")
    exports = sorted({path.parent.relative_to(b) for path in Path(b).glob("hf_model*/**/*.safetensors")})
    assert exports
    for folder in exports:
        x, y = weights(Path(a) / folder), weights(Path(b) / folder)
        assert x.keys() == y.keys()
        for name in x:
            difference = (x[name] - y[name]).abs().max() / y[name].abs().max().clamp(min=1e-3)
            assert difference < weight_tolerance, f"{what}: {folder}/{name} differs by {difference:.1e}"


def rolled(monkeypatch, script):
    """Like `recorded`, of a script's rollouts: (arguments, episodes) of every call."""
    return recorded(monkeypatch, script, "rollout", lambda result: result[0])


def recorded(monkeypatch, module, name, kept=lambda result: result):
    """Replaces a function by one that keeps (arguments, result) of every call in the returned list."""
    calls, function = [], getattr(module, name)

    def recording(*args, **options):
        result = function(*args, **options)
        calls.append((args, kept(result)))
        return result

    monkeypatch.setattr(module, name, recording)
    return calls


def trained_ids(episodes):
    """The trained ids of each response of a rollout."""
    return [[token for token in episode.labels if token != -100] for episode in episodes]


def lines_of(episodes):
    """As `line_logprobs` takes them, an episode per line."""
    return [[episode.example] for episode in episodes]


def encoded(script, rows, lm, tokenizer, eval_sets=(), **flags):
    """(data, arguments) of ppo or grpo, whose prompts are rows; without evaluation sets, two of them are evaluated."""
    flags |= {"group_size": 2} if script.__name__ == "algos.grpo" else {}
    args = script.Args(model="m", dataset=rows, **{"reward": "judge", "total_episodes": 2, "max_new_tokens": 5} | flags)
    data = SimpleNamespace(rows=rows, eval_sets=dict(eval_sets), reward=None, rollout=args.rollout)
    script.encode(data, lm, tokenizer, args)
    return data, args


def widen(tensor, left, right, fill=None):
    """Columns more on both sides, of random token ids unless there is a fill."""
    shape = (len(tensor), left + right)
    if fill is None:
        more = torch.randint(0, 21, shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    else:
        more = torch.full(shape, fill).to(tensor)
    return torch.cat([more[:, :left], tensor, more[:, left:]], 1)


def pad_more(setattr=setattr):
    """Whatever is padded gets two columns more: what `collate` returns on the right and contexts on the left, of random
    tokens that do not count, and the mask of ppo. Returns the names of what was called, which grow."""
    from algos import ppo
    from common.lm import classifier, logprobs, sampling, tokens

    reached = set()
    collate, pad_rows = tokens.collate, tokens.pad_rows

    def wide_contexts(rows, fill, **options):
        reached.add("pad_rows")
        return widen(pad_rows(rows, fill, **options), 2, 0, 0 if fill == 0 else None)

    def wide_mask(rows, fill, *more, **options):
        padded = pad_rows(rows, fill, *more, **options)
        if fill is not False:  # what `collate` pads
            return padded
        reached.add("mask")
        return widen(padded, 0, 2, False)

    def wide_collate(lines, pad, no_label=-100):
        reached.add("collate")
        ids, positions, labels = collate(lines, pad, no_label)
        more = positions[:, -1:] + torch.arange(1, 3)
        return widen(ids, 0, 2), torch.cat([positions, more], 1), widen(labels, 0, 2, no_label)

    setattr(sampling, "pad_rows", wide_contexts)
    setattr(ppo, "pad_rows", wide_mask)
    for module in logprobs, classifier:
        setattr(module, "collate", wide_collate)
    return reached
