"""Throughput of sampling on prompts and responses of mixed length, beside transformers' `generate`.

Work of a run: ROWS prompts of 16 to 512 tokens, each with a response of 1 to 256, log-normal within these bounds; a
response ends at its given length. Random weights: GPT-2 small, and a Qwen3 of 8 layers; with LoRA adapters of rank 8 in
all linear layers and without.

    bash benchmarks/throughput/run_sampling.sh    # on a quiet machine

ROWS (48) and PLAINRL_BENCH_TINY=1 (2 layers) shrink the work, to try this out.
"""

import argparse
import os
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from measurement import THREADS, TINY, append, cpu_ticks, machine, steal_since, wait_for_quiet
from tables import distinct, markdown, provenance, spread
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList

from common.adapters import train_adapters  # found by way of measurement
from common.launch import fast_cpu_matmul
from common.sampling import generate_all, pad_rows
from common.seeding import rng

# ---- Workload --------------------------------------------------------------------------------------------------------

ROWS = int(os.environ.get("ROWS", 48))
BATCH = ROWS // 2  # rows decoded at once
LONGEST = 256
SEED = 1
LAYERS = {"gpt2": 2 if TINY else 12, "qwen3": 2 if TINY else 8}
VOCABULARY = {"gpt2": 50257, "qwen3": 32000}
SHAPES = {
    "gpt2": "GPT-2 small: 12 layers, width 768, vocabulary 50257",
    "qwen3": "Qwen3-like: 8 layers, width 512, 8 heads on 4 of keys, size 64, vocabulary 32000",
}
SYSTEMS = {
    "now": "`generate_all` of common/sampling.py",
    "generate": "`generate` of transformers, sampling, on batches of prompts sorted by length",
}


def lengths(name, center, spread, low, high):
    """ROWS lengths, the quantiles of a log-normal distribution cut to [low, high], in random order."""
    draws = rng(SEED, name).lognormal(center, spread, 100000)
    draws = draws[(draws >= low) & (draws <= high)]
    quantiles = (rng(SEED, f"order of {name}").permutation(ROWS) + 0.5) / ROWS
    return np.quantile(draws, quantiles).round().astype(int).tolist()


def workload(shape):
    """Prompts (lists of ids) and response lengths (ROWS,)."""
    queries = []
    for row, length in enumerate(lengths("prompts", 4.7, 1.0, 16, 512)):
        queries.append(rng(SEED, "ids", row).integers(1, VOCABULARY[shape], length).tolist())
    return queries, torch.tensor(lengths("responses", 3.7, 1.0, 1, LONGEST))


def build(shape, lora_r):
    """A model with random weights and, where lora_r is not 0, adapters that change its logits."""
    torch.manual_seed(SEED)
    if shape == "gpt2":
        config = transformers.GPT2Config(n_layer=LAYERS[shape], eos_token_id=0)
    else:
        config = transformers.Qwen3Config(
            num_hidden_layers=LAYERS[shape],
            hidden_size=512,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=VOCABULARY[shape],
            eos_token_id=0,
        )
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    lm.name_or_path = "random"
    flags = {"lora_alpha": lora_r, "lora_targets": ("all-linear",), "load_in_4bit": False}
    train_adapters(lm, SimpleNamespace(lora_r=lora_r, num_layers_unfrozen=-1, revision=None, seed=SEED, **flags))
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.01)
    return lm


# ---- Systems ---------------------------------------------------------------------------------------------------------


def run_now(lm, queries, limits):
    """Samples with the loop of the scripts."""
    lm.generation_config.eos_token_id = -1
    tokenizer = SimpleNamespace(pad_token_id=0)
    options = {"max_new_tokens": LONGEST, "limits": limits, "decode_batch_size": BATCH}
    generate_all(Accelerator(cpu=True), lm, tokenizer, queries, ("rollout", 1), seed=SEED, **options)


@torch.no_grad()
def run_generate(lm, queries, limits):
    """Samples with the library's loop."""
    lm.generation_config.eos_token_id = None
    by_length = sorted(range(len(queries)), key=lambda row: -len(queries[row]))
    for rows in torch.tensor(by_length).split(BATCH):
        lengths = [len(queries[row]) for row in rows]
        query = pad_rows([queries[row] for row in rows], 0, begins=lengths)
        query_mask = pad_rows([[True] * length for length in lengths], False, begins=lengths)
        last = query.shape[1] + limits[rows]

        def ended(ids, scores, last=last):
            return ids.shape[1] >= last

        settings = GenerationConfig(max_new_tokens=LONGEST, do_sample=True, top_k=0, pad_token_id=0)
        lm.generate(
            query,
            attention_mask=query_mask.long(),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([ended]),
        )


RUN = {"now": run_now, "generate": run_generate}


# ---- Measurement -----------------------------------------------------------------------------------------------------


def measure(shape, lora_r, repeat, results):
    """Appends a row for each system to the CSV file, measured one after the other."""
    wait_for_quiet()
    where = machine(["torch", "transformers"])
    torch.set_num_threads(THREADS)
    fast_cpu_matmul()
    lm = build(shape, lora_r)
    queries, limits = workload(shape)
    run_now(lm, queries[:2], limits[:2].clamp(max=3))  # what only a first call does
    rows = []
    ticks = cpu_ticks()
    for system, run in RUN.items():
        begun = time.perf_counter()
        run(lm, queries, limits)
        seconds = time.perf_counter() - begun
        row = {"shape": shape, "lora_r": lora_r, "system": system, "batch": BATCH, "repeat": repeat}
        row |= {"seconds": f"{seconds:.3f}", "rows": len(queries), "prompt_tokens": sum(map(len, queries))}
        row |= {"tokens": int(limits.sum()), "longest": max(map(len, queries))}
        rows.append(row)
        print(*row.values(), flush=True)
    where["steal"] = f"{steal_since(ticks):.4f}"
    append(results, [row | where for row in rows])


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## sampling

{rows} prompts of 16 to 512 tokens (longest {longest}, together {prompt_tokens}), each with a response of 1 to 256
(together {tokens}), log-normal, in float32. Models: {shapes}. Adapters: LoRA of rank 8 in all linear layers but the
last. {batch} rows are decoded at once. Tokens a second are those of the responses over all seconds, reading of the
prompts included.

{table}

{systems}

`times`: the seconds of the system over those of `now`, of the same repeat. Not measured: models that the table lacks,
other batches, bfloat16, stop strings.

{provenance}
"""


def section(rows):
    """The text of the section, from the rows of results_sampling.csv."""
    lines = [["model", "adapters", "system", "runs", "tokens/s", "times"]]
    for shape in SHAPES:
        for lora_r, adapters in (("0", "no"), ("8", "yes")):
            seconds = {system: [] for system in SYSTEMS}
            for row in rows:
                if (row["shape"], row["lora_r"]) == (shape, lora_r) and row["system"] in SYSTEMS:
                    seconds[row["system"]].append(float(row["seconds"]))
            for system, found in seconds.items():
                if found:
                    rate = int(rows[0]["tokens"]) / median(found)
                    times = [theirs / own for theirs, own in zip(found, seconds["now"], strict=True)]
                    lines.append([shape, adapters, system, f"{len(found)}", f"{rate:.0f}", spread(times, 2)])
    return SECTION.format(
        table=markdown(lines),
        systems="\n".join(f"- {system}: {text}" for system, text in SYSTEMS.items()),
        shapes="; ".join(text for shape, text in SHAPES.items() if any(row["shape"] == shape for row in rows)),
        provenance=provenance(rows),
        **{name: distinct(rows, name) for name in ("rows", "batch", "prompt_tokens", "tokens", "longest")},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--lora-r", type=int, default=0, help="rank of the adapters")
    parser.add_argument("--repeat", type=int, default=1, help="number of this run in the table")
    parser.add_argument("--results", required=True, help="the CSV file that gets rows")
    options = parser.parse_args()
    measure(options.shape, options.lora_r, options.repeat, options.results)


if __name__ == "__main__":
    main()
