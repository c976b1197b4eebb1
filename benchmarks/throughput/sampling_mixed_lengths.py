"""Throughput of sampling on prompts and responses of mixed length, beside the loop before and transformers' `generate`.

Work of a run: ROWS prompts of 16 to 512 tokens, each with a response of 1 to 256, log-normal within these bounds; a
response ends at its given length. Random weights: GPT-2 small, and a Qwen3 of 8 layers; with LoRA adapters of rank 8 in
all linear layers and without.

    bash benchmarks/throughput/run_sampling.sh    # on a quiet machine: writes results_sampling.csv, README_SAMPLING.md

and the parts that run_sampling.sh uses:

    python benchmarks/throughput/sampling_mixed_lengths.py --shape gpt2 --lora-r 8 --results results_sampling.csv
    python benchmarks/throughput/sampling_mixed_lengths.py --table    # README_SAMPLING.md from results_sampling.csv
    python benchmarks/throughput/sampling_mixed_lengths.py --check    # exit 1 where the README does not follow from it

ROWS (32), REPEATS (3) and PLAINRL_BENCH_TINY=1 (2 layers) shrink the work, to try this out.
"""

import argparse
import csv
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList

from algos import ppo
from common.adapters import train_adapters
from common.machine import fast_cpu_matmul, keep_freed_memory
from common.sampling import end_of_rows, generate_all, pad_left
from common.seeding import draw, rng, uniforms

# ---- Workload --------------------------------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
TINY = bool(os.environ.get("PLAINRL_BENCH_TINY"))
ROWS = int(os.environ.get("ROWS", 48))
REPEATS = int(os.environ.get("REPEATS", 3))  # of a process
BATCHES = (ROWS // 2,)  # rows decoded at once
LONGEST = 256
SEED = 1
LAYERS = {"gpt2": 2 if TINY else 12, "qwen3": 2 if TINY else 8}
VOCABULARY = {"gpt2": 50257, "qwen3": 32000}
SHAPES = {
    "gpt2": "GPT-2 small: 12 layers, width 768, vocabulary 50257",
    "qwen3": "Qwen3-like: 8 layers, width 512, 8 heads on 4 of keys, size 64, vocabulary 32000",
}
SYSTEMS = {
    "now": "`generate_all` with the `sample` of algos/ppo.py",
    "before": "the same before: padded to the longest of all prompts, rows leave one by one, the library's cache, "
    "adapters apart",
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
    flags = {"lora_alpha": lora_r, "lora_targets": ("all-linear",), "load_in_4bit": False, "merge_adapters": False}
    train_adapters(lm, SimpleNamespace(lora_r=lora_r, num_layers_unfrozen=-1, revision=None, seed=SEED, **flags))
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.01)
    return lm


# ---- Systems ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_before(model, query, query_mask, uniforms, ends, pad_id, temperature=1.0, ended=None):
    """`sample` of algos/ppo.py as it was."""
    num_rows, width = uniforms.shape
    ids = torch.full((num_rows, width), pad_id)
    mask = torch.zeros(num_rows, width, dtype=torch.bool)
    alive = torch.arange(num_rows)
    tokens = query
    attention = query_mask.long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache = None
    for t in range(width):
        inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1]
        assert logits.amax(-1).isfinite().all()
        tokens = draw(logits, uniforms[alive, t], temperature)
        ids[alive, t] = tokens
        mask[alive, t] = True
        goes_on = tokens != ends[0]
        if ended is not None:
            goes_on = goes_on & ~ended(alive, ids[alive, : t + 1])
        if not goes_on.any():
            break
        if not goes_on.all():
            staying = goes_on.nonzero()[:, 0]
            cache.batch_select_indices(staying)
            alive = alive[staying]
            tokens = tokens[staying]
            attention = attention[staying]
            positions = positions[staying]
        tokens = tokens[:, None]
        positions = positions[:, -1:] + 1
        attention = F.pad(attention, (0, 1), value=1)
    return ids, mask


def run_before(lm, queries, limits, batch):
    """Responses (ROWS, LONGEST) and their mask, all prompts padded to the longest."""
    query, query_mask = pad_left(queries, 0, "cpu")
    draws = uniforms(SEED, "rollout", 1, list(range(len(queries))), LONGEST)
    parts = []
    for rows in torch.arange(len(queries)).split(batch):
        ended = end_of_rows(None, (), limits[rows])
        parts.append(sample_before(lm, query[rows], query_mask[rows], draws[rows], [-1], 0, ended=ended))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def run_now(lm, queries, limits, batch):
    """Responses (ROWS, LONGEST) and their mask."""
    lm.generation_config.eos_token_id = -1
    tokenizer = SimpleNamespace(pad_token_id=0)
    options = {"max_new_tokens": LONGEST, "limits": limits, "decode_batch_size": batch, "sample": ppo.sample}
    return generate_all(Accelerator(cpu=True), lm, tokenizer, queries, ("rollout", 1), seed=SEED, **options)[2:]


@torch.no_grad()
def run_generate(lm, queries, limits, batch):
    """Nothing: its random draws are its own."""
    lm.generation_config.eos_token_id = None
    by_length = sorted(range(len(queries)), key=lambda row: -len(queries[row]))
    for rows in torch.tensor(by_length).split(batch):
        query, query_mask = pad_left([queries[row] for row in rows], 0, "cpu")
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


RUN = {"now": run_now, "before": run_before, "generate": run_generate}


# ---- Measurement -----------------------------------------------------------------------------------------------------


def measure(shape, lora_r, results):
    """Appends a row for each system, batch and repeat to the CSV file; the systems in turn, within each repeat."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    fast_cpu_matmul()
    keep_freed_memory()
    lm = build(shape, lora_r)
    queries, limits = workload(shape)
    run_now(lm, queries[:2], limits[:2].clamp(max=3), 2)  # what only a first call does
    tokens = int(limits.sum())
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    for repeat in range(REPEATS):
        responses = {}
        for batch in BATCHES:
            for system, run in RUN.items():
                load = os.getloadavg()[0]
                begun = time.perf_counter()
                responses[system] = run(lm, queries, limits, batch)
                seconds = time.perf_counter() - begun
                same = ""
                if system == "before":
                    equal = [(a == b).all(1) for a, b in zip(responses["now"], responses["before"], strict=True)]
                    same = int((equal[0] & equal[1]).sum())
                row = {
                    "shape": shape,
                    "lora_r": lora_r,
                    "system": system,
                    "batch": batch,
                    "repeat": repeat,
                    "seconds": f"{seconds:.3f}",
                    "rows": len(queries),
                    "prompt_tokens": sum(map(len, queries)),
                    "tokens": tokens,
                    "longest": max(map(len, queries)),
                    "same_rows": same,
                    "threads": torch.get_num_threads(),
                    "device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
                    "versions": versions,
                    "loadavg": f"{load:.1f}",
                }
                print(*row.values(), flush=True)
                with open(results, "a", newline="") as file:
                    writer = csv.DictWriter(file, list(row), lineterminator="\n")
                    if not file.tell():
                        writer.writeheader()
                    writer.writerow(row)


# ---- Table -----------------------------------------------------------------------------------------------------------

README = """# Throughput: sampling on mixed lengths

`run_sampling.sh` writes results_sampling.csv, and sampling_mixed_lengths.py this file from it.

{rows} prompts of 16 to 512 tokens (longest {longest}, together {prompt_tokens}), each with a response of 1 to 256
(together {tokens}), log-normal, on a CPU in float32. Random weights: {shapes}. Adapters: LoRA of rank 8 in all linear
layers but the last. Tokens a second are those of the responses over all seconds, reading of the prompts included: the
median of the repeats. `batch` rows are decoded at once: {batches}; other sizes were not tried for this table. Another
process ran on the second core.

{table}

{systems}

`times`: the seconds of the other system over those of `now`, the median over the repeats of a process, in which the
systems take turns; with several repeats smallest and largest in brackets. Responses of `now` that are those of
`before`, token by token: {same}. A difference is rounding: a draw near the border of two tokens.

Not measured: rows that the table lacks,
GPUs, bfloat16, stop strings, pretrained weights, several processes. Load average before a run, the runs
before it included: {loads}. Measured on {device}, {threads} threads; {versions}.
"""


def best(rows, system):
    """[seconds of each repeat] at the batch with the smallest median, and this batch."""
    found = []
    for batch in sorted({int(row["batch"]) for row in rows}):
        seconds = [float(row["seconds"]) for row in rows if (row["system"], row["batch"]) == (system, str(batch))]
        if seconds:
            found.append((median(seconds), batch, seconds))
    _, batch, seconds = min(found)
    return seconds, batch


def spread(values, digits):
    """Median and, in brackets, smallest and largest."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def readme(rows):
    """The text of README_SAMPLING.md."""
    lines = ["| model | adapters | system | batch | tokens/s | times |", "| --- | --- | --- | --- | --- | --- |"]
    for shape in SHAPES:
        for lora_r in ("0", "8"):
            found = [row for row in rows if (row["shape"], row["lora_r"]) == (shape, lora_r)]
            if not found:
                continue
            ours, _ = best(found, "now")
            for system in SYSTEMS:
                seconds, batch = best(found, system)
                rate = int(found[0]["tokens"]) / median(seconds)
                ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
                times = "1" if system == "now" else spread(ratios, 2)
                adapters = "yes" if lora_r == "8" else "no"
                lines.append(f"| {shape} | {adapters} | {system} | {batch} | {rate:.0f} | {times} |")
    compared = [row for row in rows if row["same_rows"]]
    same = sum(int(row["same_rows"]) for row in compared)
    total = sum(int(row["rows"]) for row in compared)
    fixed = {name: ", ".join(sorted({row[name] for row in rows})) for name in ("device", "threads", "versions")}
    counts = {name: rows[0][name] for name in ("rows", "prompt_tokens", "tokens", "longest")}
    return README.format(
        table="\n".join(lines),
        systems="\n".join(f"- {system}: {text}" for system, text in SYSTEMS.items()),
        shapes="; ".join(text for shape, text in SHAPES.items() if any(row["shape"] == shape for row in rows)),
        batches=", ".join(sorted({row["batch"] for row in rows}, key=int)),
        same=f"{same} of {total}",
        loads=spread([float(row["loadavg"]) for row in rows], 1),
        **fixed,
        **counts,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="measure this model in this process")
    parser.add_argument("--lora-r", type=int, default=0, help="rank of its adapters")
    parser.add_argument("--results", type=Path, default=HERE / "results_sampling.csv")
    parser.add_argument("--table", action="store_true", help="write README_SAMPLING.md beside the results")
    parser.add_argument("--check", action="store_true", help="compare README_SAMPLING.md with the results")
    options = parser.parse_args()
    if options.shape:
        measure(options.shape, options.lora_r, options.results)
    file = options.results.with_name("README_SAMPLING.md")
    if options.table:
        file.write_text(readme(list(csv.DictReader(open(options.results)))))
    if options.check:
        there = options.results.exists() and file.exists()
        if not (there and file.read_text() == readme(list(csv.DictReader(open(options.results))))):
            sys.exit(f"{file} does not follow from {options.results.name}: run {Path(sys.argv[0]).name} --table")


if __name__ == "__main__":
    main()
