"""Throughput of algos/ppo.py on a GPT-2-small shape on a CPU, beside TRL 0.8.6 (peer_trl_0_8_6.py).

Work of an iteration: 16 prompts of 32 tokens, responses of 32 tokens, 4 PPO epochs of one optimizer step (batch 16).
The weights are random: 12 layers, width 768, vocabulary 50257, no dropout. The end token's logit is near -100, so that
every response has its 32 tokens.

    bash benchmarks/throughput/make_peer_env.sh     # once: a virtual environment with TRL 0.8.6
    bash benchmarks/throughput/run.sh               # on a quiet machine: writes results.csv and README.md

and the parts that run.sh uses:

    python benchmarks/throughput/ppo_gpt2_small.py --prepare MODEL_DIR
    python benchmarks/throughput/ppo_gpt2_small.py --mode fp32 --model MODEL_DIR --results results.csv
    python benchmarks/throughput/ppo_gpt2_small.py --table    # README.md from results.csv
    python benchmarks/throughput/ppo_gpt2_small.py --check    # exit 1 where README.md does not follow from it

The other benchmarks, *_mixed_lengths.py, take the model, the measurement and the table from here.
PLAINRL_BENCH_TINY=1 shrinks the model to 2 layers, width 48 and vocabulary 1000, to try the scripts out.
"""

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from common.machine import fast_cpu_matmul

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
TINY = bool(os.environ.get("PLAINRL_BENCH_TINY"))
LAYERS, WIDTH, HEADS, VOCABULARY = (2, 48, 4, 1000) if TINY else (12, 768, 12, 50257)
EPISODES, PROMPT, RESPONSE, EPOCHS = 16, 32, 32, 4
LR = 1e-5
ITERATIONS = int(os.environ.get("ITERATIONS", 2))  # of a process; the first is printed and not counted
THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
END = 0  # id of the end token

MODES = {  # of algos/ppo.py: flags, and what they show
    "fp32": ({}, "matmul precision medium, eager attention, one-batch rollouts"),
    "fp32-highest": ({"attn_implementation": "eager"}, "fp32 without matmul precision medium"),
    "fp32-sdpa": ({"attn_implementation": "sdpa"}, "fp32 without eager attention"),
    "fp32-decode-4": ({"decode_batch_size": 4}, "fp32 without one-batch rollouts: 4 rows at a time"),
    "bf16": ({"mixed_precision": "bf16"}, "`--mixed-precision bf16`: weights and optimizer fp32"),
    "fp32-malloc": ({}, "fp32 without keeping freed memory (glibc's default thresholds)"),
    "fp32-2-layers": (
        {"num_layers_unfrozen": 2},
        "`--num-layers-unfrozen 2`: the frozen blocks run in no update (fraction: of full training's work). Measured "
        "when what they return was kept while sampling; now the policy's scores of a rollout run them once more",
    ),
    "fp32-2-layers-no-cache": (
        {"num_layers_unfrozen": 2, "cache_trunk": False},
        "the same with `--no-cache-trunk`: the frozen blocks run in every pass",
    ),
    "bf16-2-layers": ({"mixed_precision": "bf16", "num_layers_unfrozen": 2}, "both"),
}
PEER_MODES = {  # of TRL's PPOTrainer: (rows of a generate call, our matmul precision)
    "defaults": ((4, False), "its default `generate(batch_size=4)`"),
    "tuned": ((16, False), "`generate(batch_size=16)`"),
    "same-flags": ((16, True), "tuned, with matmul precision medium (its attention is eager)"),
}


def prompt_ids():
    """One prompt per episode of an iteration: 32 ids each, the same in all iterations."""
    return np.random.default_rng(1).integers(END + 1, VOCABULARY, (EPISODES, PROMPT)).tolist()


def reward(output_ids, **_):
    """A trivial reward: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in output_ids]


def prepare(folder):
    """Writes the random model and its tokenizer of whole words "w1 w2 ..." that both systems load."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(1)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY}
    drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END))
    with torch.no_grad():  # the last hidden state has a coordinate near 10; the end token answers to it with -10
        model.transformer.ln_f.bias[0] = 10
        model.transformer.wte.weight[END] = 0
        model.transformer.wte.weight[END, 0] = -10
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": END} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def forward_flops(tokens, scored):
    """Floating-point operations of a forward pass of a row without padding, the output layer at `scored` positions."""
    block, head = 12 * LAYERS * WIDTH**2, WIDTH * VOCABULARY  # weights in matrix products
    return 2 * block * tokens + 2 * head * scored + 2 * LAYERS * WIDTH * tokens**2  # attention: the causal half


def useful_flops():
    """Floating-point operations of an iteration that cannot be left out: sampling, reference and training, the output
    layer at response positions only, no padding, nothing computed twice."""
    forward = forward_flops(PROMPT + RESPONSE, RESPONSE)
    return EPISODES * (forward + forward + EPOCHS * 3 * forward)


def gemm_peak(dtype):
    """GFLOP/s of the best 1024 x 768 x 3072 matrix product within half a second; fp32 at the fastest exact setting."""
    before, seconds, end = torch.get_float32_matmul_precision(), [], time.perf_counter() + 0.5
    fast_cpu_matmul()
    a, b = torch.randn(1024, 768).to(dtype), torch.randn(768, 3072).to(dtype)
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begun)
    torch.set_float32_matmul_precision(before)
    return 2 * 1024 * 768 * 3072 / min(seconds) / 1e9


# ---- Measurement -----------------------------------------------------------------------------------------------------


def peak_memory():
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def short_run(script, mode, **flags):
    """The lines of perf.jsonl and of metrics.jsonl of a run of a script (a module of algos). The run ends where it
    would write its only checkpoint: saving is not measured."""

    from common import checkpoint, machine

    class Measured(Exception):
        pass

    def stop(*args, **options):
        raise Measured

    off = {"eval_dataset": None, "metric": None, "eval_every": 0, "save_every": 0}
    off = {name: value for name, value in off.items() if hasattr(script.Args, name)}
    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint, "pack_state", stop))
        if mode == "fp32-highest":
            stack.enter_context(patch.object(machine, "fast_cpu_matmul", lambda: False))
        if mode == "fp32-malloc":
            stack.enter_context(patch.object(machine, "ctypes", SimpleNamespace(CDLL=lambda name: None)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with suppress(Measured):
            script.main(script.Args(run_dir=f"{folder}/run", threads=THREADS, **off, **flags))
        assert not Path(folder, "run/checkpoints").exists()
        return [[json.loads(line) for line in open(f"{folder}/run/{x}.jsonl")] for x in ("perf", "metrics")]


def measure_ours(mode, model):
    """What record() stores of a short run of algos/ppo.py."""
    from algos import ppo

    prompts = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompt_ids()]
    perf, metrics = short_run(
        ppo, mode, model=str(model), dataset=prompts, reward=reward, total_episodes=EPISODES * ITERATIONS,
        rollout_batch_size=EPISODES, batch_size=EPISODES, micro_batch_size=EPISODES, ppo_epochs=EPOCHS,
        max_new_tokens=RESPONSE, lr=LR, **{"attn_implementation": "eager"} | MODES[mode][0],
    )  # fmt: skip
    assert all((m["tokens/queries_len"], m["tokens/responses_len"]) == (PROMPT, RESPONSE) for m in metrics)
    seconds = ([p[f"perf/seconds_{phase}"] for p in perf] for phase in ("rollout", "update"))
    return figures(*seconds, metrics[0]["objective/entropy"] / RESPONSE)


def figures(rollout, update, entropy):
    """Columns of the CSV file and useful GFLOP/s, from the seconds of all iterations and the nats a sampled token of
    the first one."""
    totals = [a + b for a, b in zip(rollout, update, strict=True)]
    print(f"  entropy {entropy:.3f}; seconds of all iterations, the first not counted:")
    print("  rollout", *(f"{s:.2f}" for s in rollout), "| update", *(f"{s:.2f}" for s in update), flush=True)
    seconds = median(totals[1:])
    columns = {
        "seconds_rollout": f"{median(rollout[1:]):.3f}", "seconds_update": f"{median(update[1:]):.3f}",
        "seconds": f"{seconds:.3f}", "seconds_first": f"{totals[0]:.3f}", "counted": len(totals) - 1,
        "tokens_per_sec": f"{EPISODES * (PROMPT + RESPONSE) / seconds:.1f}",
        "work_gflop": f"{useful_flops() / 1e9:.1f}", "entropy": f"{entropy:.4f}",
    }  # fmt: skip
    return columns, useful_flops() / seconds / 1e9


def record(results, system, mode, repeat, measure):
    """Calls measure() -> (columns, useful GFLOP/s) between two measurements of the machine's peak, and appends a row to
    the CSV file."""
    loadavg, dtype = os.getloadavg()[0], torch.bfloat16 if "bf16" in mode else torch.float32
    torch.set_num_threads(THREADS)
    print(f"{system} {mode} repeat {repeat}", flush=True)
    peak = gemm_peak(dtype)
    columns, gflops = measure()
    memory, peak = peak_memory(), max(peak, gemm_peak(dtype))
    packages = "torch transformers accelerate tokenizers numpy".split() + ["trl"] * (system != "plainrl")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    cpu = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    row = {
        "system": system, "mode": mode, "repeat": repeat, **columns, "peak_memory_mb": f"{memory:.0f}",
        "gflops": f"{gflops:.1f}", "peak_gflops": f"{peak:.1f}", "fraction": f"{gflops / peak:.4f}",
        "shape": f"{LAYERS}x{WIDTH}x{VOCABULARY}", "device": (cpu or [platform.machine()])[0],
        "threads": torch.get_num_threads(), "versions": "; ".join([f"python {platform.python_version()}", *versions]),
        "loadavg": f"{loadavg:.2f}", "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }  # fmt: skip
    results = Path(results)
    heads = next(csv.reader(open(results))) if results.exists() else list(row)
    with open(results, "a", newline="") as file:
        writer = csv.DictWriter(file, heads, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def record_peer(doc, modes, measure):
    """Command line of a peer's script, which records measure(mode, model directory)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=modes, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--results", required=True)
    options = parser.parse_args()
    record(options.results, "trl", options.mode, options.repeat, lambda: measure(options.mode, options.model))


# ---- Table -----------------------------------------------------------------------------------------------------------

# ends of the text of both pages
TIMES = """- `times TRL`: seconds of TRL over seconds of the row, both of the same repeat; above 1, the row is faster.
- `times plainrl`: the same against the first row of plainrl of the same precision.
"""
MEMORY = """- `peak memory MB`: ru_maxrss of the process, a fresh one for every run.
"""
PEAK = """over the peak of a 1024 x 768 x 3072 matrix product, the
  larger of two measurements in the same process, before and after:
  {peaks}.
  fp32 is at matmul precision medium where that is exact, and is the denominator of every mode but bf16.
"""
MACHINE = """Measured on {device}, {threads} threads; commit {commit}.

{versions}
"""

README = """# Throughput

`run.sh` writes results.csv, and ppo_gpt2_small.py this file from it.

## PPO, {layers} layers, width {width}, vocabulary {vocabulary}, random weights, on a CPU

An iteration is {EPISODES} prompts of {PROMPT} tokens, {EPISODES} responses of {RESPONSE}, and {EPOCHS} PPO epochs of
one optimizer step (batch {EPISODES}). Medians over the runs, smallest and largest in brackets.

{table}

{notes}

Columns:

- The two systems cut an iteration differently: compare `iteration s`. `rollout s` of plainrl has sampling, scoring by
  policy and reference, reward and advantages; that of TRL has sampling and reward, and the rest is in
  `PPOTrainer.step`, which is its `update s`.
{TIMES}\
- `tokens/s`: prompt and response tokens of the episodes over the seconds of the iteration.
{MEMORY}\
- `fraction of GEMM peak`: useful work ({work} GFLOP an iteration: sampling, reference and training; the output layer at
  response positions only, nothing twice) over seconds and {PEAK}
Protocol: the systems in turn, one process a run; both load the same weights and prompts; the first of {iterations}
iterations of a run is not counted. Dropout, evaluation and saving are off. The end token's logit is near -100, so every
response has its full length (asserted). TRL has mini_batch_size 16, so it takes one optimizer step an epoch, too.
Entropy of the first rollout: {entropies} nats a token.
Load average before a run, the runs before it included: {loads}.

Not measured: GPUs, other shapes, prompts and responses of unequal length (padding), pretrained weights, several
processes, a reward model, learning (the reward is trivial), start-up, saving.

{MACHINE}"""


def spread(values, digits):
    """Median and, in brackets, smallest and largest."""
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def page(rows, template, texts, shown, settings, peer, first=lambda mode: mode.partition("-")[0], **fields):
    """The text of a page, from the rows of the CSV file.

    texts: {(system, mode): note}, in the order of the table. shown: {column of the file: (heading, digits)}. settings:
    names of the columns "times TRL"; peer(mode, setting): the mode of TRL that a row is compared with there,
    first(mode): that of plainrl.
    """
    runs = {key: {row["repeat"]: row for row in rows if (row["system"], row["mode"]) == key} for key in texts}
    runs = {key: found for key, found in runs.items() if found}
    table = [["system", "mode", "runs", *(heading for heading, _ in shown.values())]]
    table[0] += [f"times TRL {setting}" for setting in settings] + ["times plainrl"]
    for key, found in runs.items():
        cells = [*key, str(len(found))]
        for name, (_, digits) in shown.items():
            cells.append(spread([float(row[name]) for row in found.values()], digits))
        for other in [*(("trl", peer(key[1], setting)) for setting in settings), ("plainrl", first(key[1]))]:
            both = [repeat for repeat in found if repeat in runs.get(other, ())]
            ratios = [float(runs[other][repeat]["seconds"]) / float(found[repeat]["seconds"]) for repeat in both]
            cells.append("1" if key == other else spread(ratios, 2) if ratios else "")
        table.append(cells)
    used = [i for i in range(len(table[0])) if any(cells[i] for cells in table[1:])]
    lines = [[cells[i] for i in used] for cells in table]
    lines.insert(1, ["---"] * len(used))
    peaks = {"fp32": [], "bf16": []}
    for row in rows:
        peaks["bf16" if "bf16" in row["mode"] else "fp32"].append(float(row["peak_gflops"]))
    layers, width, vocabulary = rows[0]["shape"].split("x")
    versions = {system: sorted({row["versions"] for row in rows if row["system"] == system}) for system, _ in runs}
    same = {name: ", ".join(sorted({row[name] for row in rows})) for name in ("device", "threads", "commit")}
    fields |= same | {"layers": layers, "width": width, "vocabulary": vocabulary}
    fields["table"] = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    fields["notes"] = "\n".join(f"- {system} {mode}: {texts[system, mode]}" for system, mode in runs)
    fields["peaks"] = ", ".join(f"{kind} {spread(found, 0)} GFLOP/s" for kind, found in peaks.items() if found)
    fields["loads"] = spread([float(row["loadavg"]) for row in rows], 1)
    fields["versions"] = "\n".join(f"- {system}: {' / '.join(found)}" for system, found in versions.items())
    fields |= {name: globals()[name].format(**fields) for name in ("TIMES", "MEMORY", "PEAK", "MACHINE")}
    return template.format(**fields)


def readme(rows):
    """The text of README.md."""
    texts = {("plainrl", mode): text for mode, (_, text) in MODES.items()}
    texts |= {("trl", mode): text for mode, (_, text) in PEER_MODES.items()}
    shown = {"seconds_rollout": ("rollout s", 2), "seconds_update": ("update s", 2), "seconds": ("iteration s", 2)}
    shown |= {"tokens_per_sec": ("tokens/s", 0), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    return page(
        rows, README, texts, shown, PEER_MODES, lambda mode, setting: setting, work=rows[0]["work_gflop"],
        iterations=int(rows[0]["counted"]) + 1, entropies=spread([float(row["entropy"]) for row in rows], 3),
        EPISODES=EPISODES, PROMPT=PROMPT, RESPONSE=RESPONSE, EPOCHS=EPOCHS,
    )  # fmt: skip


def main(doc, modes, measure, readme, results, name, prepare=prepare):
    """Command line of a benchmark. readme(rows) -> the text of the page `name`, which lies beside the results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", metavar="DIR", type=Path, help="write model and tokenizer, unless they are there")
    parser.add_argument("--mode", choices=modes, help="measure one run in this process")
    parser.add_argument("--model", help="what --prepare wrote")
    parser.add_argument("--repeat", type=int, default=1, help="number of this run in the table")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--table", action="store_true", help=f"write {name} beside the results")
    parser.add_argument("--check", action="store_true", help=f"compare {name} with the results")
    options = parser.parse_args()
    if options.prepare and not (options.prepare / "tokenizer.json").exists():
        prepare(options.prepare)
    if options.mode:
        record(options.results, "plainrl", options.mode, options.repeat, lambda: measure(options.mode, options.model))
    file = options.results.with_name(name)
    if options.table:
        file.write_text(readme(list(csv.DictReader(open(options.results)))))
    if options.check:
        there = options.results.exists() and file.exists()
        if not (there and file.read_text() == readme(list(csv.DictReader(open(options.results))))):
            sys.exit(f"{file} does not follow from {options.results.name}: run {Path(sys.argv[0]).name} --table")


if __name__ == "__main__":
    main(__doc__, MODES, measure_ours, readme, HERE / "results.csv", "README.md")
