"""README.md of this folder, from its results_*.csv.

    python benchmarks/throughput/report.py [FOLDER]            # writes README.md beside the results
    python benchmarks/throughput/report.py [FOLDER] --check    # exit 1 where it does not follow from them

A section stands where its results are; the scripts that measure them write it.
"""

import argparse
import csv
import sys
from pathlib import Path
from statistics import median

import ddpo_small_unet
import grpo_gpt2_small
import ilql_vs_trlx
import memory
import pairs_mixed_lengths
import ppo_gpt2_small
import sampling_mixed_lengths
import sft_mixed_lengths
import shares
from tables import by_mode, distinct, fastest, markdown, precision, ratios, spread

HERE = Path(__file__).resolve().parent
SCRIPTS = {  # results_NAME.csv, in the order of the page
    "ppo": ppo_gpt2_small,
    "sft": sft_mixed_lengths,
    "pairs": pairs_mixed_lengths,
    "grpo": grpo_gpt2_small,
    "ilql": ilql_vs_trlx,
    "ddpo": ddpo_small_unet,
    "sampling": sampling_mixed_lengths,
    "memory": memory,
    "shares": shares,
}
OLD_ROWS = {  # what the scripts did when rows of these commits were measured
    "e8f60254fdedb5e87d6c2860397c61ea59a8cd60": "ppo with two layers kept what the frozen blocks return while it "
    "sampled; now the policy's scores of a rollout run them once more. sft computed all logits at once, and its lines "
    "had at most 128 tokens.",
    "db73bea0974dccf6aa69b5e07f15427f45f9f074": "reward and dpo computed the prompt of a pair once "
    "(`--share-prompt`) where they now put texts side by side in lines.",
    "45f459f626275b15906106835ef48f4313a58e2f": "ilql cut its loss by hand; now `torch.utils.checkpoint` cuts it, "
    "which computes the logits of a chunk twice.",
}
PAGE = """# Speed and memory beside other libraries

`bash benchmarks/throughput/run_all.sh` measures everything on a CPU and writes results_*.csv; report.py builds this
page from them. Random weights, full fine-tuning but for ddpo.

{summary}

- `times`: seconds of the peer over seconds of plainrl in the same repeat; above 1, plainrl is faster. The peer is TRL,
  for ilql the structure of trlX's step, written anew. Of its settings, the fastest of the table below is taken; where
  it has none in bf16, one in float32. Settings of ours that people can give it, such as the precision of matrix
  products, count among them; `times its defaults` is without these.
- `memory`: peak memory of plainrl over that of the peer.
- Goals are for CPUs with AVX-512. The fraction of two layers counts the work of full training, too.
{ages}
## What is common to all tables

- Medians over the runs, smallest and largest in brackets. `times X`: seconds of X over seconds of the row, both of the
  same repeat; above 1, the row is faster. `times plainrl`: the same against the first row of plainrl of its kind.
- `peak memory MB`: ru_maxrss of the process, a fresh one for every run.
- `fraction of GEMM peak`: useful work (nothing computed twice, no padding) over seconds and over the peak of a 1024 x
  768 x 3072 matrix product, the larger of two measurements in the same process, before and after. fp32 is at matmul
  precision medium where that is exact (oneDNN), and is the denominator of every mode but bf16.
- The systems run in turn, one process a run, with the same weights and data; first steps or iterations are not counted.
  Dropout, evaluation and saving are off. In sft, reward, dpo and grpo, both systems have AdamW of the same betas, a
  constant learning rate and gradients clipped at 1.
- plainrl lets the C library keep freed memory (common/machine.py), which no flag gives TRL.
- Before a run, other processes leave at least 90 % of the machine idle for two seconds. The load average before a run
  includes the runs before it.
- Steal is the share of all processors that the hypervisor took during a run; a run with more than 3 % is repeated. It
  is not only that of neighbours: memory that a process gives back and takes again is mapped by the hypervisor.
- Not measured anywhere: GPUs, other shapes, pretrained weights, several processes, adapters (but for ddpo and
  sampling), learning (rewards are trivial), start-up, saving.

{sections}"""


def read(folder):
    """{name: rows} of the results in a folder."""
    found = {}
    for name in SCRIPTS:
        file = folder / f"results_{name}.csv"
        if file.exists():
            with open(file) as lines:
                found[name] = list(csv.DictReader(lines))
    return found


def verdict(goal, times, device):
    """A goal and whether the median reaches it; no verdict on a machine that is known to lack AVX-512."""
    if goal is None:
        return ""
    if "AVX2" in device or "DEFAULT" in device:
        return f"{goal:g}"
    if median(times) >= goal:
        return f"{goal:g}: reached"
    return f"{goal:g}: missed"


def system(row):
    """The name of a system, that of TRL with its version."""
    last = row["versions"].split("; ")[-1]
    if last.startswith("trl"):
        return last.replace("trl", "TRL")
    return row["system"]


def summary(results):
    """The table at the top."""
    lines = [["script", "precision", "times", "fastest peer", "goal", "times its defaults"]]
    lines[0] += ["memory", "fraction of GEMM peak", "runs", "CPU"]
    for name, rows in results.items():
        for title, mode, peers, goal in getattr(SCRIPTS[name], "COMPARISONS", []):
            runs = by_mode(rows)
            times, peer = fastest(runs, mode, peers)
            if not times:
                continue
            own = list(runs[mode].values())
            other = list(runs[peer].values())
            memories = [median(float(row["peak_memory_mb"]) for row in found) for found in (own, other)]
            cells = [title, precision(mode), spread(times, 2), f"{system(other[0])}: {peer}"]
            cells.append(verdict(goal, times, own[0]["device"]))
            defaults = [found for found in peers if found.endswith("defaults") and found in runs]
            cells.append(spread(ratios(runs, mode, defaults[0]), 2) if defaults else "")
            cells.append(f"{memories[0] / memories[1]:.2f}")
            cells += [spread([float(row["fraction"]) for row in own], 2), f"{len(times)}", distinct(own, "device")]
            lines.append(cells)
    return markdown(lines)


def ages(results):
    """Sentences about rows of different code, where there are any."""
    commits = {name: {row["commit"] for row in rows if row.get("commit")} for name, rows in results.items()}
    if len(set().union(*commits.values())) == 1:
        return ""
    lines = [
        "- The tables are of different code: each says its commits. None has what came after them: torch's kernel for",
        "  GPT-2's GELU (`fuse_gelu` in common/models.py), pages of 2 MB, logits of up to two chunks computed once.",
    ]
    for commit, text in OLD_ROWS.items():
        if any(commit in found for found in commits.values()):
            lines.append(f"- With commit {commit[:7]}, {text}")
    return "\n".join(lines) + "\n"


def page(results):
    """The text of README.md."""
    sections = "\n".join(SCRIPTS[name].section(rows) for name, rows in results.items())
    return PAGE.format(summary=summary(results), ages=ages(results), sections=sections)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    file = options.folder / "README.md"
    text = page(read(options.folder))
    if not options.check:
        file.write_text(text)
    elif not file.exists() or file.read_text() != text:
        sys.exit(f"{file} does not follow from the results: run report.py")
