"""Throughput of algos/sft.py on rows of mixed length on a CPU, beside TRL 1.16.0 (peer_trl_1_16_sft.py).

Work of a step: 8 rows of 16 to 128 tokens, loss on every token, AdamW on all weights. Model and tokenizer are those of
ppo_gpt2_small.py.

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_sft.sh                   # on a quiet machine
"""

import os
from statistics import median

from measurement import main, short_run
from ppo_gpt2_small import END, LR, SHAPE, VOCABULARY, forward_flops, prepare
from tables import agreement, distinct, first_of, grouped, mode_table, precision, provenance

from common.seeding import rng, stream_rows  # found by way of measurement

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

BATCH, SHORTEST, LONGEST, ROWS = 8, 16, 128, 96
BETAS = (0.9, 0.999)
SEED = 1
STEPS = int(os.environ.get("STEPS", 6))  # of a process
SKIPPED = 2  # first steps, which are printed and not counted

_ROWS = {"packing": False}
_BF16 = {"mixed_precision": "bf16"}
MODES = {  # of algos/sft.py: flags, and what they show
    "fp32": (_ROWS, "`--no-packing`, matmul precision medium, eager attention; one forward of 8 rows"),
    "fp32-micro-2": (_ROWS | {"micro_batch_size": 2}, "`--no-packing --micro-batch-size 2`: 2 rows sorted by length"),
    "fp32-packing": ({}, "the default: the rows of a step in lines as long as the longest of them"),
    "bf16": (_ROWS | _BF16, "`--mixed-precision bf16 --no-packing`: weights and optimizer fp32"),
    "bf16-micro-2": (_ROWS | _BF16 | {"micro_batch_size": 2}, "bf16 with `--micro-batch-size 2`"),
    "bf16-packing": (_BF16, "bf16 with packing"),
}
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
_PADDING_FREE = _EAGER | {"padding_free": True, "max_length": None}
SETTINGS = {  # of TRL's SFTTrainer: (flags, our matmul precision), and what they are
    "defaults": ({}, False, "its default settings, without gradient checkpointing"),
    "same-flags": (_EAGER, True, "defaults with eager attention and matmul precision medium"),
    "padding-free": (
        _PADDING_FREE,
        True,
        "same-flags with `padding_free=True`: the rows as one sequence without padding",
    ),
    "padding-free-kept-memory": (_PADDING_FREE, True, "padding-free, and the C library keeps freed memory"),
}
PEER_MODES = {f"{precision}-{setting}": SETTINGS[setting] for precision in ("fp32", "bf16") for setting in SETTINGS}
COMPARISONS = [  # in the first table: name, our mode, modes of the peer, goal
    ("sft packed", "fp32-packing", [f"fp32-{setting}" for setting in SETTINGS], 1.6),
    ("sft packed", "bf16-packing", [f"bf16-{setting}" for setting in SETTINGS], None),
]


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
        "shape": "x".join(map(str, SHAPE)),
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


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## sft

A step is {BATCH} rows of {SHORTEST} to {LONGEST} tokens (mean {row_tokens}), loss on every token, AdamW on all weights,
no gradient checkpointing; model {shape}. Padded to the longest of {BATCH} rows, {padding} % of the positions are
padding.

{table}

{notes}

- `step s`, `tokens/s` and `fraction of GEMM peak` are medians over the {counted} counted steps of a run, behind
  {SKIPPED} others. Tokens and useful work do not include padding.
- TRL takes the rows in our order (sequential sampler). Its defaults are its tiled loss, sdpa attention, fused AdamW and
  rows padded to the longest of the batch; bf16 and gradient checkpointing are on by default. Seconds of plainrl include
  the collation of the batch, those of TRL (`on_step_begin` to `on_step_end`) do not.
- Not measured: TRL's packing across steps and its grouping by length, which make other batches.

Did the runs do the same work? Largest relative differences in the first step (fp32: at most {TOLERANCE}):

{same_work}

{provenance}
"""
TOLERANCE = 1e-3


def section(rows):
    """The text of the section, from the rows of results_sft.csv."""
    texts = {mode: text for mode, (*_, text) in (MODES | PEER_MODES).items()}
    shown = {"seconds": ("step s", 3), "tokens_per_sec": ("tokens/s", 0), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    against = {f"times TRL {name}": lambda mode, name=name: f"{precision(mode)}-{name}" for name in SETTINGS}
    table, notes = mode_table(rows, texts, shown, against | {"times plainrl": precision})
    groups = grouped(rows, lambda row: precision(row["mode"]))
    figures = {"loss": first_of("losses"), "gradient norm": first_of("grad_norm")}
    return SECTION.format(
        table=table, notes=notes, provenance=provenance(rows), padding=f"{100 * float(rows[0]['padding']):.0f}",
        same_work=agreement(groups, figures, TOLERANCE),
        **{name: distinct(rows, name) for name in ("counted", "row_tokens", "shape")},
        BATCH=BATCH, SHORTEST=SHORTEST, LONGEST=LONGEST, SKIPPED=SKIPPED, TOLERANCE=TOLERANCE,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(MODES, "plainrl"), measure_ours, prepare)
