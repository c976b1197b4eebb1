"""Throughput of algos/sft.py on rows of mixed length on a CPU, beside TRL 1.16.0 (peer_trl_1_16_sft.py).

Work of a step: 8 rows of 16 to 128 tokens, loss on every token, AdamW on all weights. Model and tokenizer are those of
ppo_gpt2_small.py, and so are the measurement and the table.

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_sft.sh                   # on a quiet machine: writes results_sft.csv, README_SFT.md

and the parts that run_sft.sh uses:

    python benchmarks/throughput/sft_mixed_lengths.py --prepare MODEL_DIR
    python benchmarks/throughput/sft_mixed_lengths.py --mode fp32 --model MODEL_DIR --results results_sft.csv
    python benchmarks/throughput/sft_mixed_lengths.py --table    # README_SFT.md from results_sft.csv
    python benchmarks/throughput/sft_mixed_lengths.py --check    # exit 1 where README_SFT.md does not follow from it
"""

import os
import sys
from statistics import median

from ppo_gpt2_small import END, HERE, LR, VOCABULARY, forward_flops, main, page, short_run

from common.seeding import rng, stream_rows  # found by way of ppo_gpt2_small

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

BATCH, SHORTEST, LONGEST, ROWS = 8, 16, 128, 96
BETAS = (0.9, 0.999)
SEED = 1
STEPS = int(os.environ.get("STEPS", 12))  # of a process
SKIPPED = 2  # first steps, which are printed and not counted

_ROWS = {"packing": False}
_BF16 = {"mixed_precision": "bf16"}
MODES = {  # of algos/sft.py: flags, and what they show
    "fp32": (_ROWS, "`--no-packing`, matmul precision medium, eager attention; one forward of 8 rows"),
    "fp32-highest": (_ROWS | {"attn_implementation": "eager"}, "fp32 without matmul precision medium"),
    "fp32-sdpa": (_ROWS | {"attn_implementation": "sdpa"}, "fp32 without eager attention"),
    "fp32-micro-2": (_ROWS | {"micro_batch_size": 2}, "`--micro-batch-size 2`: forwards of 2 rows, sorted by length"),
    "fp32-packing": ({}, "the default: the rows of a step in lines as long as the longest of them"),
    "bf16": (_ROWS | _BF16, "`--mixed-precision bf16 --no-packing`: weights and optimizer fp32"),
    "bf16-sdpa": (_ROWS | _BF16 | {"attn_implementation": "sdpa"}, "bf16 without eager attention"),
    "bf16-micro-2": (_ROWS | _BF16 | {"micro_batch_size": 2}, "bf16 with `--micro-batch-size 2`"),
    "bf16-packing": (_BF16, "bf16 with packing"),
}
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
SETTINGS = {  # of TRL's SFTTrainer: (flags, our matmul precision), and what they are
    "defaults": ({}, False, "its default settings, without gradient checkpointing"),
    "same-flags": (_EAGER, True, "the same with eager attention and matmul precision medium"),
    "padding-free": (
        _EAGER | {"padding_free": True, "max_length": None},
        True,
        "same-flags with `padding_free=True`: the rows as one sequence without padding",
    ),
    "checkpointing": ({"gradient_checkpointing": True}, False, "all its default settings, gradient checkpointing too"),
}
PEER_MODES = {f"{precision}-{setting}": SETTINGS[setting] for precision in ("fp32", "bf16") for setting in SETTINGS}


def rows():
    """The rows: texts of whole words. With the end token they have 16 to 128 tokens, log-normal within these bounds."""
    draws = rng(SEED, "lengths").lognormal(4.0, 0.6, 10 * ROWS).round().astype(int)
    lengths = draws[(draws >= SHORTEST) & (draws <= LONGEST)][:ROWS]
    ids = [rng(SEED, "ids", row).integers(END + 1, VOCABULARY, length - 1) for row, length in enumerate(lengths)]
    return [{"text": " ".join(f"w{i}" for i in row)} for row in ids]


def order():
    """The indices of the rows of all steps, one after the other, as algos/sft.py draws them."""
    return stream_rows(SEED, "data", ROWS, 0, STEPS * BATCH)


def step_lengths():
    """[tokens of the rows of a step], one for each step."""
    lengths, drawn = [len(row["text"].split()) + 1 for row in rows()], order()
    return [[lengths[row] for row in drawn[i : i + BATCH]] for i in range(0, len(drawn), BATCH)]


def useful_flops(lengths):
    """Floating-point operations of a step that cannot be left out: no padding, nothing computed twice, no forward of a
    row's last token, which predicts nothing."""
    return sum(3 * forward_flops(length - 1, length - 1) for length in lengths)


# ---- Measurement -----------------------------------------------------------------------------------------------------


def figures(seconds, losses, grad_norms):
    """Columns of the CSV file and useful GFLOP/s, from the seconds, losses and gradient norms of all steps."""
    print("  seconds", *(f"{s:.3f}" for s in seconds), f"(the first {SKIPPED} are not counted)")
    print("  losses", *(f"{loss:.4f}" for loss in losses), flush=True)
    lengths, counted = step_lengths()[SKIPPED:], seconds[SKIPPED:]
    tokens, padded = sum(map(sum, lengths)), sum(BATCH * max(step) for step in lengths)
    columns = {
        "seconds": f"{median(counted):.4f}", "seconds_first": f"{seconds[0]:.4f}", "counted": len(counted),
        "tokens_per_sec": f"{median(sum(n) / s for n, s in zip(lengths, counted, strict=True)):.1f}",
        "row_tokens": f"{tokens / len(lengths) / BATCH:.2f}", "padding": f"{1 - tokens / padded:.4f}",
        "losses": " ".join(f"{loss:.6f}" for loss in losses), "grad_norm": f"{grad_norms[0]:.6f}",
    }  # fmt: skip
    return columns, median(useful_flops(n) / s for n, s in zip(lengths, counted, strict=True)) / 1e9


def measure_ours(mode, model):
    """What record() stores of a short run of algos/sft.py."""
    from algos import sft

    flags = {"micro_batch_size": BATCH, "attn_implementation": "eager"} | MODES[mode][0]
    perf, metrics = short_run(
        sft, mode, model=str(model), dataset=rows(), max_length=LONGEST, batch_size=BATCH, total_steps=STEPS, seed=SEED,
        lr=LR, lr_schedule="constant", warmup_steps=0, adam_betas=BETAS, **flags,
    )  # fmt: skip
    seconds = [p["perf/seconds_update"] for p in perf]
    tokens = [round(p["perf/tokens_per_sec"] * s) for p, s in zip(perf, seconds, strict=True)]
    assert tokens == list(map(sum, step_lengths()))
    return figures(seconds, *([m[key] for m in metrics] for key in ("train/loss", "optim/grad_norm")))


# ---- Table -----------------------------------------------------------------------------------------------------------

README = """# Throughput: SFT on rows of mixed length

`run_sft.sh` writes results_sft.csv, and sft_mixed_lengths.py this file from it.

{layers} layers, width {width}, vocabulary {vocabulary}, random weights, on a CPU. A step is {BATCH} rows of
{SHORTEST} to {LONGEST} tokens (mean {row_tokens}), loss on every token, full fine-tuning with AdamW, no gradient
checkpointing. Padded to the longest of {BATCH} rows, {padding} % of the positions are padding. Medians over the runs,
smallest and largest in brackets.

The rows of plainrl were measured with older code: all logits at once, and lines of at most 128 tokens.

{table}

{notes}

Columns:

- `step s`, `tokens/s` and `fraction of GEMM peak` are medians over the {counted} counted steps of a run; tokens do not
  include padding.
{TIMES}\
{MEMORY}\
- `fraction of GEMM peak`: useful work (forward and backward of the tokens without padding, nothing twice) over seconds
  and {PEAK}
Protocol: the systems in turn, one process a run, {SKIPPED} steps before the counted ones. Both load the same weights
and take the same rows in the same order (TRL: sequential sampler), with AdamW of the same betas, a constant learning
rate and gradients clipped at 1. Dropout, evaluation and saving are off. Seconds of plainrl include the collation of the
batch, those of TRL (`on_step_begin` to `on_step_end`) do not. TRL's defaults, as they are here: its tiled loss `nll`,
sdpa attention, fused AdamW, rows padded to the longest of the batch; bf16 and gradient checkpointing are on by default.

Did the runs do the same work? Largest differences between two of them, of either system:

{same_work}

No table is written where the first loss in fp32, or the norm of its gradient relatively, differs by more than
{TOLERANCE}.
Load average before a run, the runs before it included: {loads}.

Not measured: GPUs, other shapes, longer rows, pretrained weights, several processes, adapters, TRL's packing across
steps and its grouping by length (other batches), start-up, saving.

{MACHINE}"""
TOLERANCE = 1e-3


def same_work(rows):
    """How far the runs agree, as text, for each precision; exits where those in fp32 did not do the same work."""
    parts = []
    for precision in sorted({row["mode"][:4] for row in rows}, reverse=True):
        found = [row for row in rows if row["mode"].startswith(precision)]
        losses = list(zip(*([float(loss) for loss in row["losses"].split()] for row in found), strict=True))
        gaps, norms = [max(step) - min(step) for step in losses], [float(row["grad_norm"]) for row in found]
        gradient = max(norms) / min(norms) - 1
        if precision == "fp32" and max(gaps[0], gradient) > TOLERANCE:
            sys.exit(
                f"not the same work in fp32: first losses differ by {gaps[0]:.2g}, gradient norms by {gradient:.2g}"
            )
        text = f"- {precision}: {gaps[0]:.1g} in the loss of the first step ({median(losses[0]):.4f})"
        parts.append(
            f"{text}, {max(gaps):.1g} in that of any step, {100 * gradient:.1g} % in the first gradient's norm"
        )
    return "\n".join(parts)


def readme(rows):
    """The text of README_SFT.md."""
    texts = {("plainrl", mode): text for mode, (_, text) in MODES.items()}
    texts |= {("trl", mode): text for mode, (_, _, text) in PEER_MODES.items()}
    shown = {"seconds": ("step s", 3), "tokens_per_sec": ("tokens/s", 0), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    same = {name: ", ".join(sorted({row[name] for row in rows})) for name in ("counted", "row_tokens")}
    return page(
        rows, README, texts, shown, SETTINGS, lambda mode, setting: f"{mode[:4]}-{setting}", **same,
        padding=f"{100 * float(rows[0]['padding']):.0f}", same_work=same_work(rows),
        BATCH=BATCH, SHORTEST=SHORTEST, LONGEST=LONGEST, SKIPPED=SKIPPED, TOLERANCE=TOLERANCE,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, MODES, measure_ours, readme, HERE / "results_sft.csv", "README_SFT.md")
