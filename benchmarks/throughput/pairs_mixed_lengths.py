"""Throughput of algos/reward.py and algos/dpo.py on pairs of mixed length on a CPU, beside TRL 1.16.0
(peer_trl_1_16_pairs.py).

Work of a step: 8 pairs whose two texts share a prompt and have 16 to 128 tokens each, AdamW on all weights. Model and
tokenizer are those of ppo_gpt2_small.py, for reward with a head in place of the output layer; so are the measurement
and the table.

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_pairs.sh                 # on a quiet machine: results_pairs.csv, README_PAIRS.md

and the parts that run_pairs.sh uses:

    python benchmarks/throughput/pairs_mixed_lengths.py --prepare MODEL_DIR
    python benchmarks/throughput/pairs_mixed_lengths.py --mode dpo-fp32 --model MODEL_DIR --results results_pairs.csv
    python benchmarks/throughput/pairs_mixed_lengths.py --table    # README_PAIRS.md from results_pairs.csv
    python benchmarks/throughput/pairs_mixed_lengths.py --check    # exit 1 where README_PAIRS.md does not follow
"""

import importlib
import os
import sys
import time
from statistics import mean, median

import ppo_gpt2_small
from ppo_gpt2_small import END, HERE, LR, VOCABULARY, forward_flops, main, page, short_run

from common.seeding import rng, stream_rows  # found by way of ppo_gpt2_small

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

BATCH, SHORTEST, LONGEST = 8, 16, 128
# id of a word that no text has and that begins no other; with the end token as padding, TRL's classifier would read the
# score before the end token
PADDING = VOCABULARY - 1
BETAS = (0.9, 0.999)
SEED = 1
STEPS = int(os.environ.get("STEPS", 12))  # of a process; together one epoch
SKIPPED = 2  # first steps, which are printed and not counted
PAIRS = STEPS * BATCH

_BF16, _NO_PACKING, _KEPT = {"mixed_precision": "bf16"}, {"packing": False}, {"precompute_ref": False}
_SWITCHES = {  # of the scripts: flags, and what they show
    "fp32": ({}, "matmul precision medium, eager attention, texts side by side in lines"),
    "fp32-highest": ({"attn_implementation": "eager"}, "fp32 without matmul precision medium"),
    "fp32-no-packing": (_NO_PACKING, "fp32 with `--no-packing`: one text a row"),
    "fp32-micro-2": ({"micro_batch_size": 2}, "`--micro-batch-size 2`: forwards of 2 pairs, sorted by length"),
    "fp32-no-precompute": (_KEPT, "fp32 with `--no-precompute-ref`: a frozen copy scores each batch in its step"),
    "bf16": (_BF16, "`--mixed-precision bf16`: weights and optimizer fp32"),
    "bf16-no-packing": (_BF16 | _NO_PACKING, "bf16 with `--no-packing`"),
    "bf16-micro-2": (_BF16 | {"micro_batch_size": 2}, "bf16 with `--micro-batch-size 2`"),
    "bf16-no-precompute": (_BF16 | _KEPT, "bf16 with `--no-precompute-ref`"),
}
MODES = {
    f"{algorithm}-{mode}": value
    for algorithm in ("reward", "dpo")
    for mode, value in _SWITCHES.items()
    if algorithm == "dpo" or "precompute" not in mode
}
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
SETTINGS = {  # of TRL's trainers: (flags, our matmul precision), and what they are
    "defaults": ({}, False, "its default settings, without gradient checkpointing"),
    "same-flags": (_EAGER, True, "the same with eager attention and matmul precision medium"),
    "precompute": (
        _EAGER | {"precompute_ref_log_probs": True},
        True,
        "same-flags with `precompute_ref_log_probs=True`: all pairs scored by the reference before the first step",
    ),
    "checkpointing": ({"gradient_checkpointing": True}, False, "all its default settings, gradient checkpointing too"),
}
PEER_MODES = {
    f"{algorithm}-{precision}-{setting}": value
    for algorithm in ("reward", "dpo")
    for precision in ("fp32", "bf16")
    for setting, value in SETTINGS.items()
    if algorithm == "dpo" or setting != "precompute"
}


def prepare(folder):
    """Writes the model of ppo_gpt2_small.py and, in its folder classifier, the same blocks with a new head."""
    from algos import reward

    ppo_gpt2_small.prepare(folder)
    classifier, tokenizer, _ = reward.load_classifier(reward.Args(seed=SEED), str(folder))
    for part in (classifier, tokenizer):
        part.save_pretrained(folder / "classifier")


def token_ids():
    """[(prompt, chosen, rejected)] of all pairs, the end token with the responses. The three lengths are log-normal
    where both texts have 16 to 128 tokens."""
    draws = rng(SEED, "lengths").lognormal(3.3, 0.6, (10 * PAIRS, 3)).round().astype(int)
    whole = draws[:, :1] + draws[:, 1:]
    lengths = draws[(draws.min(1) >= 2) & (whole.min(1) >= SHORTEST) & (whole.max(1) <= LONGEST)][:PAIRS]
    ends, found = (0, 1, 1), []
    for row, sizes in enumerate(lengths.tolist()):
        words = iter(rng(SEED, "ids", row).integers(END + 1, PADDING, sum(sizes)).tolist())
        found.append([[next(words) for _ in range(n - e)] + [END] * e for n, e in zip(sizes, ends, strict=True)])
    return found


def rows():
    """The pairs as texts of whole words."""
    names, rows = ("prompt", "chosen", "rejected"), []
    for sides in token_ids():
        prompt, *responses = (" ".join(f"w{i}" for i in ids if i != END) for ids in sides)
        texts = (prompt, *(f" {response}" for response in responses))
        rows.append(dict(zip(names, texts, strict=True)))
    return rows


def order():
    """The indices of the pairs of all steps, one after the other, as both scripts draw them."""
    return stream_rows(SEED, "data", PAIRS, 0, PAIRS)


def step_lengths():
    """[tokens of (prompt, chosen, rejected) of the pairs of a step], one for each step."""
    lengths, drawn = [tuple(map(len, sides)) for sides in token_ids()], order()
    return [[lengths[row] for row in drawn[i : i + BATCH]] for i in range(0, PAIRS, BATCH)]


def useful_flops(algorithm, lengths):
    """Floating-point operations of a step that cannot be left out: no padding, the prompt of a pair once, nothing
    computed twice. In dpo, the output layer at what predicts a response token, no forward of a text's last token, and
    one forward of the reference."""
    dpo, forward = algorithm == "dpo", 0
    for prompt, *responses in lengths:
        forward += sum(forward_flops(prompt + n - dpo, n * dpo) for n in responses) - forward_flops(prompt, 0)
    return (3 + dpo) * forward


# ---- Measurement -----------------------------------------------------------------------------------------------------


def figures(algorithm, seconds, losses, grad_norms, scores, scoring):
    """Columns of the CSV file and useful GFLOP/s, from the seconds, losses and gradient norms of all steps, the scores
    of the first one (reward: their mean; dpo: the mean log-probability of a response), and the seconds in which all
    pairs were scored by the reference outside the steps."""
    print("  seconds", *(f"{s:.3f}" for s in seconds), f"(the first {SKIPPED} are not counted)")
    print(f"  scoring by the reference: {scoring:.3f} s for {PAIRS} pairs")
    print("  losses", *(f"{loss:.4f}" for loss in losses), flush=True)
    lengths, counted, reference = step_lengths(), seconds[SKIPPED:], scoring / STEPS
    pairs = [pair for step in lengths for pair in step]
    texts = [[[prompt + n for prompt, *both in step for n in both], [sum(pair) for pair in step]] for step in lengths]
    filled = [sum(map(sum, kind)) / sum(len(part) * max(part) for part in kind) for kind in zip(*texts, strict=True)]
    flops = [useful_flops(algorithm, step) for step in lengths[SKIPPED:]]
    columns = {
        "seconds_step": f"{median(counted):.4f}", "seconds": f"{median(counted) + reference:.4f}",
        "seconds_first": f"{seconds[0]:.4f}", "counted": len(counted),
        "pairs_per_sec": f"{BATCH / (median(counted) + reference):.3f}",
        "prompt_tokens": f"{mean(prompt for prompt, *_ in pairs):.1f}",
        "response_tokens": f"{mean(n for _, *both in pairs for n in both):.1f}",
        "padding_texts": f"{1 - filled[0]:.4f}", "padding_pairs": f"{1 - filled[1]:.4f}",
        "losses": " ".join(f"{loss:.6f}" for loss in losses), "grad_norm": f"{grad_norms[0]:.6f}",
        "score": f"{scores[0]:.6f}",
    }  # fmt: skip
    return columns, median(n / (s + reference) for n, s in zip(flops, counted, strict=True)) / 1e9


def measure_ours(mode, model):
    """What record() stores of a short run of algos/reward.py or algos/dpo.py."""
    from transformers import AutoTokenizer

    algorithm, _, own = mode.partition("-")
    script, flags, seconds, packed = importlib.import_module(f"algos.{algorithm}"), MODES[mode][0], [0.0], []
    score_pairs, fill_lines = script.score_pairs, script.fill_lines

    def timed(*args):
        begun = time.perf_counter()
        scores = score_pairs(*args)
        seconds.append(time.perf_counter() - begun)
        return scores

    def noted(lengths, packing):
        packed.append(packing)
        return fill_lines(lengths, packing)

    tokenizer = AutoTokenizer.from_pretrained(model)
    if algorithm == "reward":
        expected = [(p + c, p + r, 0.0) for p, c, r in token_ids()]
        assert script.encode_texts(rows(), tokenizer, LONGEST, "rows")[1] == expected
        model, keys = f"{model}/classifier", ("rewards/chosen", "rewards/rejected")
    else:
        expected = [(p + c, p + r, len(p)) for p, c, r in token_ids()]
        assert script.encode_pairs(rows(), tokenizer, LONGEST, script.Args(), "rows")[0] == expected
        keys = ("logps/chosen", "logps/rejected")
    script.score_pairs, script.fill_lines = timed, noted
    perf, metrics = short_run(
        script, own, model=str(model), dataset=rows(), max_length=LONGEST, batch_size=BATCH, total_steps=STEPS,
        seed=SEED, lr=LR, lr_schedule="constant", warmup_steps=0, adam_betas=BETAS,
        **{"micro_batch_size": BATCH, "attn_implementation": "eager"} | flags,
    )  # fmt: skip
    assert set(packed) == {flags.get("packing", True)}  # a script says and does without where it cannot
    assert len(seconds) - 1 == (algorithm == "dpo" and flags.get("precompute_ref", True))
    columns = [[m[key] for m in metrics] for key in ("train/loss", "optim/grad_norm")]
    scores = [sum(m[key] for key in keys) / 2 for m in metrics]
    return figures(algorithm, [p["perf/seconds_update"] for p in perf], *columns, scores, sum(seconds))


# ---- Table -----------------------------------------------------------------------------------------------------------

README = """# Throughput: reward models and DPO on pairs of mixed length

`run_pairs.sh` writes results_pairs.csv, and pairs_mixed_lengths.py this file from it.

{layers} layers, width {width}, vocabulary {vocabulary}, random weights, on a CPU; for reward, a head with one score in
place of the output layer. A step is {BATCH} pairs: a prompt (mean {prompt_tokens} tokens) and two responses (mean
{response_tokens}), log-normal; prompt and response have {SHORTEST} to {LONGEST} tokens with the end token. Full
fine-tuning with AdamW, no gradient checkpointing. Padded to the longest of {TEXTS} texts, {padding_texts} % of the
positions are padding; to the longest of {BATCH} pairs whose prompt is there once, {padding_pairs} %. Medians over the
runs, smallest and largest in brackets.

The rows of plainrl were measured with older code: it computed the prompt of a pair once (`--share-prompt`) where the
scripts now put texts side by side in lines.

{table}

{notes}

Columns:

- `step s` is the median over the {counted} counted steps of a run.
- `with reference s`, for dpo: where the reference is scored before training, the seconds of scoring {BATCH} pairs are
  added to `step s`: the mean over all pairs of the run, which was timed in the same run. That is the cost of a step in
  a run of one epoch; in one of E epochs, 1/E of the difference is due. Where the reference is scored within the step
  (TRL but for precompute, plainrl with `--no-precompute-ref`), and for reward, the two columns are equal. The hash of
  the weights under which both keep the scores, and writing them, is not counted.
- All further columns take `with reference s` for the seconds.
{TIMES}\
  A row is compared with rows of its own algorithm.
{MEMORY}\
- `fraction of GEMM peak`: useful work (forward and backward of the policy, in dpo a forward of the reference; the
  prompt of a pair once, no padding, the output layer where a response token is predicted, nothing twice) over seconds
  and {PEAK}
Protocol: the systems in turn, one process a run, {SKIPPED} steps before the counted ones. Both load the same weights
(for reward with the same head) and take the same pairs in the same order (TRL: sequential sampler; that the tokens are
equal is asserted), with AdamW of the same betas, a constant learning rate and gradients clipped at 1. Dropout,
evaluation and saving are off. Seconds of plainrl include the collation of the batch, those of TRL (`on_step_begin` to
`on_step_end`, or `compute_ref_log_probs`) do not; plainrl scores the reference in batches of similar length, TRL in the
order of the data. TRL's defaults, as they are here: sdpa attention, fused AdamW, both texts of all pairs in one forward
padded to the longest, in dpo its tiled output layer for policy and reference; bf16 and gradient checkpointing are on by
default. TRL's padding token is a word that no text has: with the end token, its default for this tokenizer, it reads
the score of a text before the end token.

Did the runs do the same work? Largest differences between two of them, of either system:

{same_work}

No table is written where, in fp32, the first loss differs by more than {TOLERANCE}, or the norm of its gradient or the
mean score of the first step by more than that relatively. In dpo the first loss is log 2 whatever the policy says.
Load average before a run, the runs before it included: {loads}.

Not measured: GPUs, other shapes, longer rows, pretrained weights, several processes, adapters, other losses, start-up,
saving.

{MACHINE}"""
TOLERANCE = 1e-3


def family(mode):
    """Algorithm and precision of a mode, as text."""
    return "-".join(mode.split("-")[:2])


def same_work(rows):
    """How far the runs agree, as text, for each algorithm and precision; exits where those in fp32 did not do the same
    work."""
    parts = []
    for kind in dict.fromkeys(family(mode) for mode in PEER_MODES):
        found = [row for row in rows if family(row["mode"]) == kind]
        if not found:
            continue
        losses = list(zip(*([float(loss) for loss in row["losses"].split()] for row in found), strict=True))
        norms, scores = ([float(row[name]) for row in found] for name in ("grad_norm", "score"))
        gaps, gradient = [max(step) - min(step) for step in losses], max(norms) / min(norms) - 1
        score = (max(scores) - min(scores)) / max(1, *map(abs, scores))
        if "fp32" in kind and max(gaps[0], gradient, score) > TOLERANCE:
            what = f"first losses differ by {gaps[0]:.2g}, gradient norms by {gradient:.2g}, scores by {score:.2g}"
            sys.exit(f"not the same work in {kind}: {what}")
        text = f"- {kind}: {gaps[0]:.1g} in the loss of the first step ({median(losses[0]):.4f}), {max(gaps):.1g} in "
        text += f"that of any step, {100 * gradient:.1g} % in the first gradient's norm,\n  {100 * score:.1g} % in the "
        text += "mean log-probability of a response" if kind.startswith("dpo") else "mean score"
        parts.append(f"{text} of the first step ({median(scores):.2f})")
    return "\n".join(parts)


def readme(rows):
    """The text of README_PAIRS.md."""
    texts = {("plainrl", mode): text for mode, (_, text) in MODES.items()}
    texts |= {("trl", mode): text for mode, (_, _, text) in PEER_MODES.items()}
    texts = {key: texts[key] for name in ("reward", "dpo") for key in texts if key[1].startswith(name)}
    shown = {"seconds_step": ("step s", 3), "seconds": ("with reference s", 3), "pairs_per_sec": ("pairs/s", 2)}
    shown |= {"peak_memory_mb": ("peak memory MB", 0), "fraction": ("fraction of GEMM peak", 3)}
    same = {
        name: ", ".join(sorted({row[name] for row in rows})) for name in ("counted", "prompt_tokens", "response_tokens")
    }
    paddings = {name: f"{100 * float(rows[0][name]):.0f}" for name in ("padding_texts", "padding_pairs")}
    return page(
        rows, README, texts, shown, SETTINGS, lambda mode, setting: f"{family(mode)}-{setting}", family, **same,
        **paddings, same_work=same_work(rows), TEXTS=2 * BATCH,
        BATCH=BATCH, SHORTEST=SHORTEST, LONGEST=LONGEST, SKIPPED=SKIPPED, TOLERANCE=TOLERANCE,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, MODES, measure_ours, readme, HERE / "results_pairs.csv", "README_PAIRS.md", prepare)
