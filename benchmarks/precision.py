"""How far a model's log-probabilities are from those of float32, in rounded numbers: SmolLM2-135M-Instruct.

    python benchmarks/precision.py          # writes benchmarks/curves/grpo-stale/precision.csv
    python benchmarks/check.py --write      # the table in that folder's README.md

The log-probabilities are those of the next tokens of 8 rows of 128: of reviews that the model has written, and of
random tokens. Errors are the root of the mean square, relative to that of the log-probabilities in float32. Only the
softmax is always in float32.
"""

import itertools
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import claim_path, write_csv
from benchmarks.tasks import pretrained

SHAPE = (8, 128)
KINDS = {  # type of the weights, whether autocast computes in bfloat16
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "float32 weights, autocast to bfloat16": (torch.float32, True),
}


@torch.no_grad()
def logprobs(lm, ids, autocast=False):
    """(B, T - 1) in float64: of each token but the first, given those before it. ids: (B, T)."""
    found = []
    for row in ids.split(1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = lm(row).logits[:, :-1]
        found.append(logits.float().log_softmax(-1).gather(-1, row[:, 1:, None])[..., 0].double())
    return torch.cat(found)


def rms(values):
    return values.square().mean().sqrt().item()


def main():
    directory = pretrained.model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reviews = "\n".join(row["prompt"] + row["completion"] for row in itertools.chain(*pretrained.written("test")))
    ids = tokenizer(reviews)["input_ids"][: SHAPE[0] * SHAPE[1]]
    random = torch.randint(len(tokenizer), SHAPE, generator=torch.Generator().manual_seed(1))
    texts = {"reviews": torch.tensor(ids).view(SHAPE), "random tokens": random}
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    exact = {text: logprobs(lm, ids) for text, ids in texts.items()}
    rows = []
    for kind, (dtype, autocast) in KINDS.items():
        lm = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        for text, ids in texts.items():
            error = rms(logprobs(lm, ids, autocast) - exact[text])
            scale = rms(exact[text])
            row = {"numbers": kind, "text": text, "nats": f"{scale:.2f}", "error in nats": f"{error:.4f}"}
            rows.append(row | {"relative error in %": f"{100 * error / scale:.3f}"})
            print(rows[-1], flush=True)
    write_csv(claim_path("grpo-stale") / "precision.csv", rows)


if __name__ == "__main__":
    main()
