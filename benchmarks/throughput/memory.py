"""What a loss needs besides weights, gradients, moments and saved activations, before and after logits in chunks, and
beside TRL 1.16.0 (peer_trl_1_16_memory.py).

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_memory.sh

and the parts that run_memory.sh uses:

    python benchmarks/throughput/memory.py --loss sft --vocabulary 50257 --rows 4 --results results_memory.csv
    python benchmarks/throughput/memory.py --qwen3 sft --results FILE  # an iteration of a model shaped like Qwen3-0.6B

PLAINRL_BENCH_TINY=1 makes all but the vocabulary small, to try this out.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from measurement import THREADS, TINY, append, cpu_ticks, machine, steal_since, wait_for_quiet
from tables import distinct, grouped, markdown, provenance
from torch.profiler import profile, record_function

from common import forward  # found by way of measurement
from common.launch import fast_cpu_matmul

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
TOKENS, PROMPT = (24, 7) if TINY else (128, 32)  # of a row
WIDTHS = {50257: 48, 151936: 32} if TINY else {50257: 768, 151936: 1024}  # by vocabulary
LOSSES = {
    "sft": "one update of sft.py, loss on every token",
    "dpo": "one update of dpo.py, half as many pairs as rows",
    "ppo-scoring": "log-probabilities and entropies of a rollout by ppo.py, without gradients",
    "ppo-update": "one update of ppo.py",
    "ilql": "one update of ilql.py, with two Q heads",
}
VARIANTS = ("before", "after")
REPEATS = int(os.environ.get("REPEATS", 3))
MB = 2**20
LOSS_BEGINS = "the loss begins"


def build(vocabulary):
    """A language model of one block, whose output layer alone is trained with a vocabulary: the input embeddings are
    apart from it and frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    width = WIDTHS[vocabulary]
    sizes = {"n_layer": 1, "n_embd": width, "n_head": width // 16 if TINY else width // 64, "vocab_size": vocabulary}
    drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    lm = GPT2LMHeadModel(GPT2Config(**sizes, **drop, **ends, tie_word_embeddings=False))
    lm.transformer.wte.weight.requires_grad_(False)
    return lm


def row_ids(vocabulary, rows):
    """Token ids of the rows; the last is the end token. Of the second half, the rejected of dpo, the prompts are those
    of the first."""
    ids = torch.randint(2, vocabulary, (rows, TOKENS), generator=torch.Generator().manual_seed(2))
    ids[rows // 2 :, :PROMPT] = ids[: rows // 2, :PROMPT]
    ids[:, -1] = 0
    return ids


def measured(lm, update, gradients):
    """(MB that the loss needs besides the gradients that it returns, value) of one update. gradients: bytes."""

    def begin(*unused):
        with record_function(LOSS_BEGINS):
            pass

    hook = lm.transformer.ln_f.register_forward_hook(begin)
    with profile(profile_memory=True) as profiled:
        value = update()
    hook.remove()
    return (most_bytes(profiled) - gradients) / MB, value


def most_bytes(profiled):
    """The most bytes alive at a time since LOSS_BEGINS, over those alive there."""
    events = profiled.profiler.kineto_results.events()  # events() of profiled has no order of allocations
    now = before = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == LOSS_BEGINS:
            before = now
            most = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most - before


# ---- Updates ---------------------------------------------------------------------------------------------------------


def plain_nll(lm, ids, first):
    """-log p of the tokens from place `first` on, as the scripts computed it before: from all logits at once, which
    stay until the backward pass is over."""
    from algos.sft import token_nll

    logits = lm(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    return token_nll(logits, ids[:, first:]), logits


def sft_update(lm, ids, before):
    """(backward, then value of) the mean loss of all tokens."""
    from algos import sft

    if before:
        nll, logits = plain_nll(lm, ids, 1)
    else:
        lines = [[(row, [-100, *row[1:]])] for row in ids.tolist()]
        nll = -sft.line_logprobs(lm, lines, 0)[0]
    loss = nll.sum() / nll.numel()
    loss.backward()
    return loss.item()


def dpo_update(lm, ids, before):
    from algos import dpo

    if before:
        nll, logits = plain_nll(lm, ids, PROMPT)
        logprobs = -nll.sum(1).view(2, -1)
    else:
        chosen, rejected = ids.tolist()[: len(ids) // 2], ids.tolist()[len(ids) // 2 :]
        logprobs = dpo.pair_logprobs(lm, False, [(*pair, PROMPT) for pair in zip(chosen, rejected, strict=True)])
    reference = torch.zeros(2, len(ids) // 2)  # computed before
    loss = dpo.dpo_loss(*logprobs, *reference, beta=0.1).mean()
    loss.backward()
    return loss.item()


def score(lm, ids, before, entropy):
    """Log-probabilities and entropies of responses, both (B, R)."""
    from algos import ppo

    query, response = ids[:, :PROMPT], ids[:, PROMPT:]
    masks = [torch.ones_like(part, dtype=torch.bool) for part in (query, response)]
    if not before:
        also = ppo.token_entropies if entropy else None
        logprobs, _, entropies = ppo.response_logprobs(lm, query, masks[0], response, masks[1], also=also)
        return logprobs, entropies
    logits = lm(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=response.shape[1]).logits
    entropies = None
    if entropy:
        entropies = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return -forward.token_nll(logits, response), entropies


@torch.no_grad()
def ppo_scoring(lm, ids, before):
    logprobs, entropies = score(lm, ids, before, entropy=True)
    return logprobs.mean().item() + entropies.mean().item()


def ppo_update(lm, ids, before):
    from algos import ppo

    logprobs, _ = score(lm, ids, before, entropy=False)
    advantages = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    sampled = torch.full_like(logprobs, -math.log(lm.config.vocab_size))
    loss = ppo.policy_loss(logprobs, sampled, advantages, 0.2).mean()
    loss.backward()
    return loss.item()


def ilql_update(policy, batch, args, before):
    """before: the output layer and the heads at once, which is not what ilql.py did."""
    from algos import ilql

    with patch.object(forward, "CHUNK", 2**62 if before else forward.CHUNK):
        loss = ilql.ilql_losses(policy, batch, args)["loss"].mean()
        loss.backward()
    return loss.item()


def updates(loss, vocabulary, rows):
    """(language model, what is trained, function(before) that runs the update and returns its loss, bytes of gradients
    that it returns)."""
    lm = build(vocabulary)
    ids = row_ids(vocabulary, rows)
    lm.plain_output = forward.has_plain_output(lm)
    gradients = lm.lm_head.weight.nbytes
    trained = lm
    functions = {"sft": sft_update, "dpo": dpo_update, "ppo-scoring": ppo_scoring, "ppo-update": ppo_update}
    run = functools.partial(functions.get(loss, ilql_update), lm, ids)
    if loss == "ppo-scoring":
        gradients = 0
    if loss == "ilql":
        from algos import ilql

        trained = ilql.PolicyWithQ(lm)
        gradients += sum(weight.nbytes for weight in trained.q_heads.parameters())
        places = list(range(PROMPT, TOKENS))
        rewards = [0.0] * (len(places) - 1) + [1.0]
        batch = ilql.Batch.of([ilql.Episode(row, places, rewards, True) for row in ids.tolist()], 0, "cpu")
        args = SimpleNamespace(gamma=0.99, tau=0.7, awac_beta=1.0, awac_clip=20.0, cql_scale=0.1, awac_scale=1.0)
        run = functools.partial(ilql_update, trained, batch, args)
    return lm, trained, run, gradients


def measure_loss(loss, vocabulary, rows):
    """Rows of the CSV file: memory of an update, and its seconds, the variants in turn."""
    lm, trained, run, gradients = updates(loss, vocabulary, rows)
    found = {}
    for name in VARIANTS:
        memory, value = measured(lm, functools.partial(run, name == "before"), gradients)
        found[name] = {"loss_mb": f"{memory:.1f}", "value": f"{value:.6f}", "seconds": []}
        trained.zero_grad()
    for _ in range(REPEATS):
        for name in VARIANTS:
            begun = time.perf_counter()
            run(name == "before")
            found[name]["seconds"].append(time.perf_counter() - begun)
            trained.zero_grad()
    return [case(loss, "plainrl", name, vocabulary, rows, **figures) for name, figures in found.items()]


# ---- A model of the shape of Qwen3-0.6B ------------------------------------------------------------------------------

QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
if TINY:
    QWEN3 |= {"vocab_size": 503, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16}
COMMON = "--micro-batch-size 1 --save-every 0 --eval-every 0 --lr 1e-5 --dtype float32"
STEP = f"{COMMON} --batch-size 4 --total-steps 1 --warmup-steps 0"
PPO = f"{COMMON} --batch-size 4 --rollout-batch-size 4 --total-episodes 4 --ppo-epochs 1 --max-new-tokens 32"
ITERATIONS = {  # name: (script, flags, rows of data)
    "sft": ("sft", f"{STEP} --max-length 128", "texts"),
    "reward": ("reward", f"{STEP} --max-length 128", "pairs"),
    "dpo": ("dpo", f"{STEP} --max-length 128", "pairs"),
    "ppo": ("ppo", PPO, "prompts"),
    "ppo with adapters": ("ppo", f"{PPO} --lora-r 8", "prompts"),
}


def prepare_qwen3(folder):
    """Writes a model with random weights in float32, its tokenizer of whole words, and rows for the scripts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    Qwen3ForCausalLM(Qwen3Config(**QWEN3, **ids)).save_pretrained(folder / "model")
    vocabulary = {"<end>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 500)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(2)

    def text(length):
        return " ".join(f"w{i}" for i in torch.randint(2, 500, (length,), generator=generator).tolist())

    pairs = [{"prompt": text(64), "chosen": " " + text(63), "rejected": " " + text(63)} for _ in range(4)]
    data = {"texts": [{"text": text(127)} for _ in range(4)], "pairs": pairs}
    data["prompts"] = [{"prompt": text(96)} for _ in range(4)]
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def even(output_ids, **_):\n    return [len(set(o)) / 32 for o in output_ids]\n")


def measure_qwen3(name):
    """The row of the CSV file of one iteration through the script's own command line, in a process of its own."""
    script, flags, rows = ITERATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prepare_qwen3_apart(folder)
        command = [sys.executable, str(HERE.parents[1] / f"algos/{script}.py"), "--model", str(folder / "model")]
        command += ["--dataset", str(folder / f"{rows}.jsonl"), "--run-dir", str(folder / "run"), *flags.split()]
        command += ["--threads", str(THREADS)]
        if script == "ppo":
            command += ["--reward", f"{folder / 'reward.py'}:even"]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"exit code {process.returncode} of {' '.join(command)}")
        perf = json.loads((folder / "run/perf.jsonl").read_text().splitlines()[-1])
    step = sum(value for key, value in perf.items() if key.startswith("perf/seconds"))
    figures = {"loss_mb": "", "value": f"{step:.1f}", "seconds": [seconds]}
    figures["peak_memory_mb"] = f"{usage.ru_maxrss / 1024:.0f}"
    return [case("qwen3", "plainrl", name, QWEN3["vocab_size"], 4, **figures)]


def prepare_qwen3_apart(folder):
    """In another process, whose memory is not that of the run."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import memory; from pathlib import Path; "
    subprocess.run([sys.executable, "-c", code + f"memory.prepare_qwen3(Path({str(folder)!r}))"], check=True)


# ---- Records ---------------------------------------------------------------------------------------------------------


def case(kind, system, variant, vocabulary, rows, loss_mb, value, seconds, peak_memory_mb=""):
    """A row of the CSV file."""
    return {
        "kind": kind, "system": system, "variant": variant, "vocabulary": vocabulary, "rows": rows,
        "loss_mb": loss_mb, "value": value, "seconds": " ".join(f"{s:.3f}" for s in seconds),
        "peak_memory_mb": peak_memory_mb, "tokens": TOKENS, "prompt": PROMPT,
    }  # fmt: skip


def record(results, packages, measure, *options):
    """Appends the rows of measure(*options) to the CSV file. packages: whose versions they say."""
    wait_for_quiet()
    where = machine(packages)
    torch.set_num_threads(THREADS)
    fast_cpu_matmul()
    ticks = cpu_ticks()
    rows = measure(*options)
    where["steal"] = f"{steal_since(ticks):.4f}"
    append(results, [row | where for row in rows])
    for row in rows:
        print(*row.values(), flush=True)


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## Memory of a loss

What one update needs over weights, gradients, moments and saved activations: the most bytes of tensors alive at a time
from the last hidden states on, in forward and backward pass, over those alive before, less the gradients that the loss
returns for its layers. They are counted from every allocation and release that torch's profiler records, so they are
exact; what a library below torch allocates by itself is not seen.

{updates}

{losses}

- Rows have {tokens} tokens, {prompt} of them prompt in dpo, ppo and ilql. The model is one block of GPT-2 in float32,
  since blocks have no part in this figure; the input embeddings are frozen and apart from the output layer, whose
  gradient is the only one with a vocabulary.
- *before*: the loss from all logits at once, as the scripts of commit 8545949 had it (ilql.py had chunks already: there
  *before* is the same loss in one chunk). *after*: the scripts as they are. TRL computes its loss in chunks by default;
  it is measured from the same place in its own `training_step`, with the same weights and ids.
- *ratio*: seconds before over seconds after, medians of {repeats} in turn, of the whole update of this small model, of
  which the head is nearly all: in a model of 12 or 28 blocks the difference is a small share.
  With 4 rows of 50257 words both compute all logits at once: their ratios are mostly noise.
- Logits of up to two chunks are computed at once: with 50257 words those of 666 positions, of which 4 rows have 384
  (sft: 508), so that 666 need up to 1.7 times what 4 rows do: in scoring more
  than the goal.
{goal}

One iteration of each script through its own command line on a model of the shape of Qwen3-0.6B (28 layers, width 1024,
16 heads of 128, 8 key-value heads, 151,936 words, tied), random weights in float32. 4 rows of 128 tokens (pairs: 4 of
128 tokens a side; ppo: prompts of 96 and responses of up to 32), one row at a time.

{iterations}

`iteration s` is what perf.jsonl says, `process s` has loading and saving (checkpoint and export), too. `peak memory MB`
is ru_maxrss of the process, all of it.

The values of the losses agree to {agreement} relatively; no page is written where they differ by more than {TOLERANCE}.

{provenance}
"""
OF_ILQL = (
    "The heads of ilql have hidden layers of twice the width, which count here, and autograd copies the gradient of a "
    "Q head's output layer where its logits are computed at once."
)
TOLERANCE = 1e-3


def seconds_of(row):
    return median(float(s) for s in row["seconds"].split())


def megabytes(row):
    return f"{float(row['loss_mb']):.0f}"


def update_table(rows):
    """(table of the losses, line about the goal)."""
    lines = [["loss", "vocabulary", "rows", "before MB", "after MB", "TRL MB", "ratio"]]
    over = []
    groups = grouped(rows, lambda row: (row["kind"], int(row["vocabulary"]), int(row["rows"])))
    for kind, vocabulary, count in sorted(groups):
        found = {row["variant"]: row for row in groups[kind, vocabulary, count]}
        trl = ""
        if "trl" in found:
            trl = megabytes(found["trl"])
        ratio = seconds_of(found["before"]) / seconds_of(found["after"])
        memory = [megabytes(found["before"]), megabytes(found["after"]), trl]
        lines.append([kind, f"{vocabulary}", f"{count}", *memory, f"{ratio:.2f}"])
        if float(found["after"]["loss_mb"]) > 256:
            over.append(f"{kind}, {vocabulary} words, {count} rows: {megabytes(found['after'])} MB")
    goal = "- Goal: at most 256 MB. Met everywhere."
    if over:
        goal = f"- Goal: at most 256 MB. Missed by {'; '.join(over)}. {OF_ILQL}"
    return markdown(lines), textwrap.fill(goal, 120, subsequent_indent="  ", break_on_hyphens=False)


def iteration_table(rows):
    """One line a script."""
    lines = [["run", "iteration s", "process s", "peak memory MB"]]
    for row in rows:
        lines.append([row["variant"], row["value"], f"{seconds_of(row):.0f}", row["peak_memory_mb"]])
    return markdown(lines)


def section(rows):
    """The text of the section, from the rows of results_memory.csv."""
    of_losses = [row for row in rows if row["kind"] in LOSSES]
    updates, goal = update_table(of_losses)
    gaps = []
    for found in grouped(of_losses, lambda row: (row["kind"], row["vocabulary"], row["rows"])).values():
        values = [float(row["value"]) for row in found]
        gaps.append((max(values) - min(values)) / max(map(abs, values)))
    if max(gaps) > TOLERANCE:
        sys.exit(f"not the same work: values differ by {max(gaps):.1e} relatively")
    return SECTION.format(
        updates=updates, goal=goal, iterations=iteration_table([row for row in rows if row["kind"] == "qwen3"]),
        losses="\n".join(f"- {name}: {text}" for name, text in LOSSES.items()), provenance=provenance(rows),
        repeats=len(of_losses[0]["seconds"].split()), TOLERANCE=TOLERANCE,
        agreement=f"{max(gaps):.0e}",
        **{name: distinct(rows, name) for name in ("tokens", "prompt")},
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=LOSSES, help="measure one update")
    parser.add_argument("--vocabulary", type=int, choices=WIDTHS, default=next(iter(WIDTHS)))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--qwen3", choices=ITERATIONS, help="run one iteration of a script")
    parser.add_argument("--results", required=True, help="the CSV file that gets rows")
    options = parser.parse_args()
    packages = ["torch", "transformers"]
    if options.loss:
        record(options.results, packages, measure_loss, options.loss, options.vocabulary, options.rows)
    if options.qwen3:
        record(options.results, packages, measure_qwen3, options.qwen3)


if __name__ == "__main__":
    main()
