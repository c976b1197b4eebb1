"""README.md of this folder and of intel/, from the results_*.csv of each.

    python benchmarks/throughput/report.py [FOLDER]    # writes README.md beside the results

benchmarks/check.py fails where it does not follow from them.
A section stands where its results are; the scripts that measure them write it.
"""

import argparse
import csv
import textwrap
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
PAGES = {  # folder: where the reader finds the other one
    HERE: "[The same in float32 on a CPU of Intel](intel/README.md), where TRL has modes that keep freed memory, too; "
    "sampling and the memory of losses are there alone. "
    "Here the first of three runs is of an earlier commit than the others, and what was run once is of the later one: "
    "ratios between the two compare days. TRL with two of twelve layers was not measured here.",
    HERE / "intel": "[The same on a CPU of AMD](../README.md), with bf16. Here TRL's products are "
    "as fast as ours, so that `tuned` and `same-flags-kept-memory` of ppo and ddpo differ in kept memory alone. "
    "Measured with `BF16=0`, and for more steps: `STEPS=10` for sft and pairs, `STEPS=8` for ilql. "
    "Runs of different commits were not made in turn; no ratio is between two but that of two layers in the profile.",
}
MISSED = {  # name in the first table: why its goal is missed, with names of what `figures` returns
    "ppo": "{products} of an iteration are matrix products. At the GEMM peak, with no time for anything else, it would "
    "be {bound}. The goal was set beside TRL's own settings: `tuned`, {tuned}.",
    "ppo, 2 of 12 layers": "the goal was set beside `tuned`, which trains all layers: {tuned}. The rollout, {rollout} "
    "of an iteration, needs all layers.",
    "sft packed": "{products} of a step are matrix products, which TRL's padding-free rows need as well.",
    "reward": "packing is what is gained: padded rows have {padded} times the positions. {products} of a step are "
    "matrix products, the same ones for a position in both. Computing the prompt of a pair once would save "
    "{prompts} of the positions; it was given up for packing, which is simpler.",
    "dpo": "{products} of a step are matrix products. Computing the prompt of a pair once would save {prompts} of the "
    "positions, as in reward.",
    "ilql, GPT-2 small": "{products} of a step are matrix products that both need; those that the peer does beyond "
    "them are what ours saves. This peer has our switches of the process, kept memory among them, which no flag of "
    "trlX gives.",
    "ilql, random walks": "a model of 25 tokens, so logits and positions that are left out save next to nothing: "
    "{products} of a step are matrix products, the same ones in both. Ours takes the norm of the gradient, too. Before "
    "commit fdbe317, as in the rows of AMD, it computed the first layer of a Q head twice; whether that is all, where "
    "it is slower, is not known.",
    "ddpo": "{products} of an epoch are products and convolutions of at most 128 channels, {attention} the softmax of "
    "attention: the same operations in both.",
}
PAGE = """# Speed and memory beside other libraries

`bash benchmarks/throughput/run_all.sh` measures everything on a CPU and writes results_*.csv; report.py builds this
page from them. Random weights, full fine-tuning but for ddpo.
{other}

{summary}

- `times`: seconds of the peer over seconds of plainrl in the same repeat; above 1, plainrl is faster. The peer is TRL,
  for ilql the structure of trlX's step, written anew. Of its settings, the fastest of the table below is taken; where
  it has none in bf16, one in float32. Settings of ours that people can give it, such as the precision of matrix
  products, count among them; `times its defaults` is without these.
- `memory`: peak memory of plainrl over that of the peer.
- Goals are for CPUs with AVX-512. The fraction of two layers counts the work of full training, too.
- Tables of different code name different commits.

Goals that are missed, and what the profile at the end of this page says:

{missed}

## What is common to all tables

- Medians over the runs, smallest and largest in brackets. `times X`: seconds of X over seconds of the row, both of the
  same repeat; above 1, the row is faster. `times plainrl`: the same against the first row of plainrl of its kind.
- `peak memory MB`: ru_maxrss of the process, a fresh one for every run.
- `fraction of GEMM peak`: useful work (nothing computed twice, no padding) over seconds and over the peak of a 1024 x
  768 x 3072 matrix product, the larger of two measurements in the same process, before and after. That of fp32 is the
  denominator of every mode but bf16.
- `matmul precision medium`: as common/launch.py sets it, which leaves it at highest on CPUs of Intel.
- The systems run in turn, one process a run, with the same weights and data; first steps or iterations are not counted.
  Dropout, evaluation and saving are off. In sft, reward, dpo and grpo, both systems have AdamW of the same betas, a
  constant learning rate and gradients clipped at 1.
- All rows are of commit b94b7cd or older. Since then ppo no longer keeps what frozen blocks return, which the rows
  `2-layers` do, but for `no-cache`. Chunks of logits are torch's own checkpoints: where the output layer or a Q head is
  trained, the gradient of a chunk, as large as the weight, is in memory beside the sum of them.
- What no flag gives TRL: at the commits of these tables plainrl let the C library keep freed memory, and computed
  GPT-2's GELU in one kernel of torch. It no longer does either. The modes `kept-memory` of TRL, and `same-flags` of
  ilql's peer, keep freed memory, too; what that would save TRL in a table without such a mode is not measured. All
  systems asked for pages of 2 MB, with their defaults, too; now none does.
- Before a run, other processes leave at least 90 % of the machine idle for two seconds. The load average before a run
  includes the runs before it.
- Steal is the share of all processors that the hypervisor took during a run; a run with more than 3 % is repeated. It
  is not only that of neighbours: on the same machine, runs that keep freed memory have nearly none.
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


def beside_defaults(runs, mode, peers):
    """Seconds of the peer's defaults over those of our mode for each repeat, if they were measured."""
    for peer in peers:
        if peer.endswith("defaults") and peer in runs:
            return ratios(runs, mode, peer)
    return []


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
            of_defaults = beside_defaults(runs, mode, peers)
            cells.append(spread(of_defaults, 2) if of_defaults else "")
            cells.append(f"{memories[0] / memories[1]:.2f}")
            cells += [spread([float(row["fraction"]) for row in own], 2), f"{len(times)}", distinct(own, "device")]
            lines.append(cells)
    return markdown(lines)


def quoted(results):
    """What README.md of the repository says: the CPU, and the medians of `times` and its defaults in float32."""
    found = []
    devices = []
    for name, rows in results.items():
        for title, mode, peers, _ in getattr(SCRIPTS[name], "COMPARISONS", []):
            runs = by_mode(rows)
            times, _ = fastest(runs, mode, peers)
            if not times or precision(mode) != "fp32":
                continue
            text = f"{title} {median(times):.1f}"
            of_defaults = beside_defaults(runs, mode, peers)
            if of_defaults:
                text += f" ({median(of_defaults):.1f})"
            found.append(text)
            devices += rows
    line = f"- {distinct(devices, 'device')}: {'; '.join(found)}."
    return textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False)


def figures(runs, mode, times, profile):
    """What the reasons of MISSED say, as text."""

    def percent(share):
        return f"{100 * share:.0f} %"

    rows = list(runs[mode].values())
    fraction = median(float(row["fraction"]) for row in rows)
    found = {"bound": f"{median(times) / fraction:.1f}"}
    found |= {"products": percent(float(profile[shares.PRODUCTS])), "attention": percent(float(profile["attention"]))}
    if "tuned" in runs:
        found["tuned"] = f"{median(ratios(runs, mode, 'tuned')):.2f}"
    if "seconds_rollout" in rows[0]:
        found["rollout"] = percent(median(float(row["seconds_rollout"]) / float(row["seconds"]) for row in rows))
    if "prompt_tokens" in rows[0]:
        prompt = float(rows[0]["prompt_tokens"])
        pair = 2 * (prompt + float(rows[0]["response_tokens"]))
        found["prompts"] = percent(prompt / pair)
        found["padded"] = f"{1 / (1 - float(rows[0]['padding_texts'])):.2f}"
    return found


def missed(results):
    """A line for each goal that is missed, with its reason, where there is a profile."""
    profiles = {(row["benchmark"], row["mode"]): row for row in results.get("shares", [])}
    lines = []
    for name, rows in results.items():
        for title, mode, peers, goal in getattr(SCRIPTS[name], "COMPARISONS", []):
            runs = by_mode(rows)
            times, _ = fastest(runs, mode, peers)
            profile = profiles.get((SCRIPTS[name].__name__, mode))
            if profile and times and goal and median(times) < goal and title in MISSED:
                reason = MISSED[title].format_map(figures(runs, mode, times, profile))
                line = f"- {title}, {median(times):.2f} of {goal:g}: {reason}"
                lines.append(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def page(folder):
    """The text of README.md of a folder."""
    results = read(folder)
    sections = "\n".join(SCRIPTS[name].section(rows) for name, rows in results.items())
    other = textwrap.fill(PAGES.get(folder, ""), 120, break_on_hyphens=False)
    return PAGE.format(summary=summary(results), missed=missed(results), sections=sections, other=other)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    options = parser.parse_args()
    folder = options.folder.resolve()
    (folder / "README.md").write_text(page(folder))
