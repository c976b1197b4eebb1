"""Throughput of algos/reward.py and algos/dpo.py on pairs of mixed length on a CPU, beside TRL 1.16.0
(peer_trl_1_16_pairs.py).

Work of a step: 8 pairs whose two texts share a prompt and have 16 to 128 tokens each, AdamW on all weights. Model and
tokenizer are those of ppo_gpt2_small.py, for reward with a head in place of the output layer.

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_pairs.sh                 # on a quiet machine
"""

import importlib
import os
import time
from statistics import mean, median

import ppo_gpt2_small
from measurement import main, short_run
from ppo_gpt2_small import END, LR, SHAPE, VOCABULARY, forward_flops
from tables import agreement, distinct, first_of, grouped, mode_table, provenance

from common.cli import from_task
from common.seeding import rng, stream_rows  # found by way of measurement

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

BATCH, SHORTEST, LONGEST = 8, 16, 128
# id of a word that no text has and that begins no other; with the end token as padding, TRL's classifier would read the
# score before the end token
PADDING = VOCABULARY - 1
BETAS = (0.9, 0.999)
SEED = 1
STEPS = int(os.environ.get("STEPS", 6))  # of a process; together one epoch
SKIPPED = 2  # first steps, which are printed and not counted
PAIRS = STEPS * BATCH

_FP32 = ({}, "matmul precision medium, eager attention, texts side by side in lines")
_BF16 = ({"mixed_precision": "bf16"}, "`--mixed-precision bf16`: weights and optimizer fp32")
# of the scripts: flags, and what they show
MODES = {"reward-fp32": _FP32, "reward-bf16": _BF16, "dpo-fp32": _FP32, "dpo-bf16": _BF16}
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
_PRECOMPUTE = _EAGER | {"precompute_ref_log_probs": True}
SETTINGS = {  # of TRL's trainers: (flags, our matmul precision), and what they are
    "defaults": ({}, False, "its default settings, without gradient checkpointing"),
    "same-flags": (_EAGER, True, "defaults with eager attention and matmul precision medium"),
    "precompute": (
        _PRECOMPUTE,
        True,
        "same-flags with `precompute_ref_log_probs=True`: all pairs scored by the reference before the first step",
    ),
    "same-flags-kept-memory": (_EAGER, True, "same-flags, and the C library keeps freed memory"),
    "precompute-kept-memory": (_PRECOMPUTE, True, "precompute, and the C library keeps freed memory"),
}
PEER_MODES = {
    f"{kind}-{setting}": value
    for kind in MODES
    for setting, value in SETTINGS.items()
    if kind.startswith("dpo") or not setting.startswith("precompute")
}
GOALS = {"reward-fp32": 2.0, "dpo-fp32": 3.5}
COMPARISONS = [  # in the first table: name, our mode, modes of the peer, goal
    (kind.split("-")[0], kind, [mode for mode in PEER_MODES if mode.startswith(kind)], GOALS.get(kind))
    for kind in MODES
]


def prepare(folder):
    """Writes the model of ppo_gpt2_small.py and, in its folder classifier, the same blocks with a new head."""
    from algos import reward

    ppo_gpt2_small.prepare(folder)
    classifier, tokenizer, _ = reward.load_classifier(from_task(reward.Args, reward.TASK, seed=SEED), str(folder))
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
        "score": f"{scores[0]:.6f}", "shape": "x".join(map(str, SHAPE)),
    }  # fmt: skip
    return columns, median(n / (s + reference) for n, s in zip(flops, counted, strict=True)) / 1e9


def measure_ours(mode, model):
    """What record() stores of a short run of algos/reward.py or algos/dpo.py."""
    from transformers import AutoTokenizer

    algorithm, _, own = mode.partition("-")
    script, flags, seconds, packed = importlib.import_module(f"algos.{algorithm}"), MODES[mode][0], [0.0], []
    score_pairs, in_lines = script.score_pairs, script.in_lines

    def timed(*args):
        begun = time.perf_counter()
        scores = score_pairs(*args)
        seconds.append(time.perf_counter() - begun)
        return scores

    def noted(packing, *args):
        packed.append(packing)
        return in_lines(packing, *args)

    tokenizer = AutoTokenizer.from_pretrained(model)
    if algorithm == "reward":
        expected = [(p + c, p + r, 0.0) for p, c, r in token_ids()]
        assert script.encode_texts(rows(), tokenizer, LONGEST, "rows")[1] == expected
        model, keys = f"{model}/classifier", ("rewards/chosen", "rewards/rejected")
    else:
        expected = [(p + c, p + r, len(p)) for p, c, r in token_ids()]
        assert (
            script.encode_pairs(rows(), tokenizer, LONGEST, from_task(script.Args, script.TASK), "rows")[0] == expected
        )
        keys = ("logps/chosen", "logps/rejected")
    script.score_pairs, script.in_lines = timed, noted
    perf, metrics = short_run(
        script, own, model=str(model), dataset=rows(), max_length=LONGEST, batch_size=BATCH, total_steps=STEPS,
        seed=SEED, lr=LR, lr_schedule="constant", warmup_steps=0, adam_betas=BETAS,
        **{"micro_batch_size": BATCH, "attn_implementation": "eager"} | flags,
    )  # fmt: skip
    assert set(packed) == {True}  # a script says and does without where it cannot
    assert len(seconds) - 1 == (algorithm == "dpo")
    columns = [[m[key] for m in metrics] for key in ("train/loss", "optim/grad_norm")]
    scores = [sum(m[key] for key in keys) / 2 for m in metrics]
    return figures(algorithm, [p["perf/seconds_update"] for p in perf], *columns, scores, sum(seconds))


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## reward and dpo

A step is {BATCH} pairs: a prompt (mean {prompt_tokens} tokens) and two responses (mean {response_tokens}), log-normal;
prompt and response have {SHORTEST} to {LONGEST} tokens with the end token. AdamW on all weights, no gradient
checkpointing; model {shape}, for reward with one score in place of the output layer. Padded to the longest of {TEXTS}
texts, {padding_texts} % of the positions are padding; to the longest of {BATCH} pairs whose prompt is there once,
{padding_pairs} %.

{table}

{notes}

- `step s` is the median over the {counted} counted steps of a run, behind {SKIPPED} others.
- `with reference s`, for dpo: where the reference is scored before training (plainrl, TRL precompute), the seconds of
  scoring {BATCH} pairs are added: the mean over all pairs of the run, timed in it. That is a run of one epoch; in one
  of E epochs, 1/E of the difference is due. The hash under which TRL keeps these scores, and writing them, is not
  counted. The columns behind it take these seconds.
- Useful work: forward and backward of the policy, in dpo a forward of the reference; the prompt of a pair once, no
  padding, the output layer where a response token is predicted.
- TRL takes the pairs in our order (sequential sampler; equal tokens are asserted) and, for reward, the same head. Its
  defaults are sdpa attention, fused AdamW and both texts of all pairs in one forward padded to the longest, in dpo its
  tiled output layer; bf16 and gradient checkpointing are on by default. Its padding token is a word that no text has:
  with the end token, its default for this tokenizer, it reads the score of a text before the end token.
- Seconds of plainrl include the collation of the batch, those of TRL (`on_step_begin` to `on_step_end`, or
  `compute_ref_log_probs`) do not. plainrl scores the reference in batches of similar length, TRL in the order of the
  data.

Did the runs do the same work? Largest relative differences in the first step (fp32: at most {TOLERANCE}; score: the
mean score, in dpo the mean log-probability of a response; in dpo the first loss is log 2 whatever the policy says):

{same_work}

{provenance}
"""
TOLERANCE = 1e-3


def family(mode):
    """Algorithm and precision of a mode, as text."""
    return "-".join(mode.split("-")[:2])


def section(rows):
    """The text of the section, from the rows of results_pairs.csv."""
    texts = {mode: text for mode, (*_, text) in (MODES | PEER_MODES).items()}
    texts = {mode: texts[mode] for name in ("reward", "dpo") for mode in texts if mode.startswith(name)}
    shown = {"seconds_step": ("step s", 3), "seconds": ("with reference s", 3), "pairs_per_sec": ("pairs/s", 2)}
    shown |= {"peak_memory_mb": ("peak memory MB", 0), "fraction": ("fraction of GEMM peak", 3)}
    against = {f"times TRL {name}": lambda mode, name=name: f"{family(mode)}-{name}" for name in SETTINGS}
    table, notes = mode_table(rows, texts, shown, against | {"times plainrl": family})
    figures = {"loss": first_of("losses"), "gradient norm": first_of("grad_norm"), "score": first_of("score")}
    return SECTION.format(
        table=table, notes=notes, provenance=provenance(rows), TEXTS=2 * BATCH,
        same_work=agreement(grouped(rows, lambda row: family(row["mode"])), figures, TOLERANCE),
        **{name: distinct(rows, name) for name in ("counted", "prompt_tokens", "response_tokens", "shape")},
        **{name: f"{100 * float(rows[0][name]):.0f}" for name in ("padding_texts", "padding_pairs")},
        BATCH=BATCH, SHORTEST=SHORTEST, LONGEST=LONGEST, SKIPPED=SKIPPED, TOLERANCE=TOLERANCE,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(MODES, "plainrl"), measure_ours, prepare)
