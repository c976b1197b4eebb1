"""Where the seconds of a step go: a profile by kinds of operations, of a benchmark or of a peer's script.

    python benchmarks/throughput/shares.py --benchmark sft_mixed_lengths --mode fp32-packing --model MODEL_DIR \\
        --results results_shares.csv

run_shares.sh calls it for the modes of the table at the top of README.md. A step is what lies between the ends of two
optimizer steps, in ppo between those of two iterations: sampling, scoring and reward are within. The times are those of
torch's profiler, which counts an operation without the ones that it calls. The profiler itself takes time, most of all
where operations are small, so shares say more than seconds.
"""

import argparse
import importlib
import time

from measurement import append, machine, memory_of, wait_for_quiet
from tables import markdown
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

SPANS = {  # optimizer steps before the profile, and its last one
    "ppo_gpt2_small": (4, 8),
    "peer_trl_0_8_6": (4, 8),
    "peer_trl_1_12_ppo": (4, 8),
    "grpo_gpt2_small": (1, 2),
    "peer_trl_1_16_grpo": (1, 2),
    "ddpo_small_unet": (1, 2),
    "peer_trl_0_8_6_ddpo": (1, 2),
}
STEP = (3, 4)  # of the other benchmarks
COMPARED = {  # our modes, and that of the peer, which may keep freed memory
    ("sft_mixed_lengths", "fp32-packing"): ("peer_trl_1_16_sft", "fp32-padding-free"),
    ("pairs_mixed_lengths", "reward-fp32"): ("peer_trl_1_16_pairs", "reward-fp32-same-flags"),
    ("pairs_mixed_lengths", "dpo-fp32"): ("peer_trl_1_16_pairs", "dpo-fp32-same-flags"),
    ("ppo_gpt2_small", "fp32"): ("peer_trl_0_8_6", "same-flags"),
    ("ppo_gpt2_small", "fp32-2-layers"): ("peer_trl_0_8_6", "2-layers-same-flags"),
    ("grpo_gpt2_small", "fp32-plain"): ("peer_trl_1_16_grpo", "fp32-plain-same-flags"),
    ("ilql_vs_trlx", "gpt2-fp32"): ("ilql_vs_trlx", "gpt2-trlx-same-flags"),
    ("ilql_vs_trlx", "walks-fp32"): ("ilql_vs_trlx", "walks-trlx-same-flags"),
    ("ddpo_small_unet", "fp32"): ("peer_trl_0_8_6_ddpo", "tuned"),
}
PRODUCTS = "matrix products"
KINDS = {  # names of operations begin with one of these; the first kind that fits
    PRODUCTS: ["mm", "addmm", "bmm", "baddbmm", "mkldnn", "convolution", "dot", "linear"],
    "attention": ["_scaled_dot_product", "_softmax"],
    "optimizer": ["_fused_adam", "_foreach", "linalg_vector_norm", "sqrt", "addcdiv", "addcmul", "lerp"],
    "copies": ["copy", "cat", "fill", "zero", "index", "clone", "stack", "masked", "_to_copy", "embedding", "expand"],
    "loss": ["_log_softmax", "logsumexp", "exp", "gather", "scatter", "nll_loss"],
}
REST = "other operations"
PYTHON = "between operations"


def kind_of(operation):
    """The kind of an operation of torch, such as aten::mm."""
    name = operation.partition("::")[2]
    for kind, beginnings in KINDS.items():
        if any(name.startswith(beginning) for beginning in beginnings):
            return kind
    return REST


def profiled(measure, first, last):
    """(profile, seconds) from the end of optimizer step `first` to that of step `last`, counted from 1."""
    done = 0
    times = []
    profiler = profile(activities=[ProfilerActivity.CPU])

    def after_step(*_):
        nonlocal done
        done += 1
        if done == first:
            profiler.start()
            times.append(time.perf_counter())
        if done == last:
            times.append(time.perf_counter())
            profiler.stop()

    hook = register_optimizer_step_post_hook(after_step)
    measure()
    hook.remove()
    begin, end = times
    return profiler, end - begin


def shares(profiler, seconds):
    """{kind: share of the seconds}."""
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in profiler.key_averages():
        if "::" in event.key:
            found[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / seconds
    found[PYTHON] = max(0.0, 1 - sum(found.values()))
    return found


def section(rows):
    """The text of the section, from the rows of results_shares.csv."""
    names = [*KINDS, REST, PYTHON]
    seconds = {(row["benchmark"], row["mode"]): float(row["seconds"]) for row in rows}
    table = [["script", "mode", "seconds", "times", "products alone", *names]]
    for row in rows:
        ours = row["benchmark"], row["mode"]
        cells = [*ours, f"{seconds[ours]:.2f}", "", ""]
        peer, mode = COMPARED.get(ours, ("", ""))
        theirs = seconds.get((peer, f"{mode}-kept-memory"), seconds.get((peer, mode)))
        if theirs:
            times = theirs / seconds[ours]
            cells[-2:] = f"{times:.2f}", f"{times / float(row[PRODUCTS]):.2f}"
        table.append(cells + [f"{100 * float(row[name]):.0f} %" for name in names])
    return SECTION.format(table=markdown(table))


SECTION = """## Where the seconds go

Of one step (ppo: one iteration) under torch's profiler, by shares.py:

{table}

- `times`: seconds of the peer over ours. The profiler slows down the one with more and smaller operations: the ratios
  to quote are at the top of this page. `products alone`: what it would be if nothing but our matrix products took time,
  at the speed that they have.
- `loss`: softmax over the vocabulary and what belongs to it. `optimizer`: AdamW with the norm of the gradient.
- `between operations`: Python, and what the profiler itself takes.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", required=True, help="a module of this folder")
    parser.add_argument("--mode", required=True)
    parser.add_argument("--model", required=True, help="what --prepare of the benchmark wrote")
    parser.add_argument("--results", required=True)
    options = parser.parse_args()
    benchmark = importlib.import_module(options.benchmark)
    measure = getattr(benchmark, "measure_ours", None) or benchmark.measure
    wait_for_quiet()
    where = machine(["torch"])
    memory_of(options.mode)
    first, last = SPANS.get(options.benchmark, STEP)
    profiler, seconds = profiled(lambda: measure(options.mode, options.model), first, last)
    row = {"benchmark": options.benchmark, "mode": options.mode, "seconds": f"{seconds:.3f}"}
    row |= {kind: f"{share:.4f}" for kind, share in shares(profiler, seconds).items()}
    append(options.results, [row | where])


if __name__ == "__main__":
    main()
