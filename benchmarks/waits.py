"""Counts what decoding asks of a GPU, without one: `python benchmarks/waits.py`

It prints a row of throughput/waits.csv, counted on the pretended device of tests/device.py for a Qwen3 of 28 layers (a
narrow one: the width does not matter): kernels, waits of the host and copies to the device per token, and the megabytes
that drawing a token for a row moves, from 151,936 logits in bfloat16; then kernels, waits and copies of a micro-batch
of an update by GRPO, forward and backward; then kernels, waits and copies per token where passes are graphs, each of
which counts as one kernel.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import device  # noqa: E402
import graphs  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

from algos import grpo  # noqa: E402
from common.lm import graphs as cuda_graphs  # noqa: E402
from common.lm import sampling  # noqa: E402

ROWS, WORDS, TOKENS = 3, 151936, 64


def counted(function, *args, **options):
    """{kind: number} of what a call of the function needs."""
    for places in device.counts.values():
        places.clear()
    function(*args, **options)
    return {kind: sum(places.values()) for kind, places in device.counts.items()}


class Launch(graphs.Graph):
    """A graph whose replay is one kernel."""

    def replay(self):
        before = {kind: places.copy() for kind, places in device.counts.items()}
        super().replay()
        for kind, places in device.counts.items():
            places.clear()
            places.update(before[kind])
        device.counts["kernels"]["graph"] += 1


def update(lm, queries):
    """A micro-batch of grpo.py with a KL, as its loop has it."""
    lines = []
    for query in queries:
        ids = torch.randint(1, 101, (29,)).tolist()
        episode = grpo.Episode({"prompt": ""}, query, ids, [True] * 29, True, 1.0, advantage=1.0, weight=1.0)
        episode.logprobs = torch.zeros(29).to(device.DEVICE)
        episode.ref_logprobs = torch.zeros(29).to(device.DEVICE)
        lines.append([episode.example])
    counts = {"steps": 1, "sequences": ROWS, "tokens": ROWS * 29, "with an advantage": ROWS * 29}
    args = grpo.Args(model="", dataset="", reward="", max_new_tokens=29)

    def micro_batch():
        loss, _ = grpo.losses(lm, lines, counts, args)
        loss.backward()

    return counted(micro_batch)


def main():
    device.start(exact=False)
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**sizes, head_dim=6, num_hidden_layers=28, vocab_size=101)
    lm = AutoModelForCausalLM.from_config(config).to(device.DEVICE).eval()
    lm.generation_config.eos_token_id = None
    queries = torch.randint(1, 101, (ROWS, 7)).tolist()
    uniforms = torch.rand(ROWS, TOKENS, dtype=torch.float64).to(device.DEVICE)
    lm.plain_output = True
    padding = SimpleNamespace(pad_token_id=0)  # what decoding asks a tokenizer for, without stop strings
    total = counted(sampling.sample, lm, padding, queries, uniforms, [TOKENS] * ROWS)
    row = [f"{total[kind] / TOKENS:.2f}" for kind in ("kernels", "waits", "copies")]
    logits = torch.randn(ROWS, WORDS, dtype=torch.bfloat16).to(device.DEVICE)
    moved = counted(sampling.draw, logits, uniforms[:, 0], 0.7)["bytes"]
    row.append(f"{moved / ROWS / 1e6:.2f}")
    trained = update(lm.train(), queries)
    row += [str(trained[kind]) for kind in ("kernels", "waits", "copies")]
    sampling.GRAPHS = cuda_graphs.GRAPHS = (device.DEVICE.type,)
    cuda_graphs.capture = Launch
    cuda_graphs.never_waits = graphs.never_waits
    total = counted(sampling.sample, lm.eval(), padding, queries, uniforms, [TOKENS] * ROWS)
    row += [f"{total[kind] / TOKENS:.2f}" for kind in ("kernels", "waits", "copies")]
    commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True)
    print(",".join([commit.strip(), *row]))


if __name__ == "__main__":
    main()
