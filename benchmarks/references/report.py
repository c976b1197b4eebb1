"""Our scripts and the trainers that people come from, on the same task: curves, tables and figures.

    bash benchmarks/references/run.sh                                              # trains and measures the peers
    python benchmarks/references/report.py --collect sft trl RUN_DIR ...           # takes the curves of its runs
    python benchmarks/references/report.py --collect sft plainrl RUN_DIR ...       # and those of our script
    python benchmarks/references/report.py                                         # rebuilds README.md and the figures

A run directory's name ends with -seed<N>. check.py fails where README.md or a figure does not follow from the curves.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.check import average, markdown, read_jsonl

HERE = Path(__file__).resolve().parent


@dataclass
class Reference:
    """What is compared on a task."""

    title: str
    score: str  # metric
    axis: str  # what counts the progress: "step", "episode"
    level: float  # the table says when the mean curve reaches it
    text: str = ""  # what differs, and why
    also: dict = field(default_factory=dict)  # further columns, of the last evaluation: metric -> heading


REFERENCES = {
    "sft": Reference(
        "SFT on random walks",
        "eval/optimality",
        "step",
        0.25,
        "Both imitate the data, whose mean is 0.3515. TRL 1.16 drops the rows left over at the end of an epoch, its "
        "learning rate is one step behind ours, and it does not pack (`padding_free` and `packing` are off by "
        "default).",
        {"eval/illegal": "illegal walks"},
    ),
    "ppo": Reference(
        "PPO on random walks",
        "eval/optimality",
        "episode",
        0.95,
        "The same number of episodes gives nearly the same optimality. In TRL 0.8.6 the value head is a single linear "
        "layer, the learning rate falls once an iteration and not with each step, and `max_grad_norm` clips the first "
        "optimizer step alone, because the trainer keeps the weights as an iterator, which is then empty. Rows are "
        "padded on the right here: the trainer scores them without positions, so that the padding on the left, its "
        "own advice for decoders, would shift them (the last log-probability of a short row: -8.354 in place of "
        "-8.491).",
        {"eval/illegal": "illegal walks"},
    ),
    "grpo": Reference(
        "GRPO on sums",
        "eval/accuracy",
        "episode",
        0.9,
        "The same number of episodes gives nearly the same accuracy. TRL 1.16 passes no positions where it scores, "
        "which shifts GPT-2's positions in padded rows; it does not matter here, where all prompts have the same "
        "length.",
    ),
    "reward": Reference(
        "Reward model on pairs of random walks",
        "eval/all/accuracy",
        "step",
        0.9,
        "TRL 1.16 starts from a head of standard deviation 0.02, ours has (width + 1) ** -0.5, so that scores are of "
        "size 1. It drops the rows left over at the end of an epoch, and its learning rate is one step behind ours. "
        "Which of these makes the difference was not tried.",
    ),
    "dpo": Reference(
        "DPO on pairs of random walks",
        "eval/optimality",
        "step",
        0.9,
        "From the base model and not, as in the chain, from one that SFT has trained for longer. With both, more than "
        "four of ten walks are illegal. Of ours, nearly all of these arrive and then go on behind the goal. TRL 1.16 "
        "scores the reference in each step, since it is not told to do so before (`precompute_ref_log_probs`); ours "
        "does it before the first one, which is not in its seconds.",
        {"eval/illegal": "illegal walks"},
    ),
    "ddpo": Reference(
        "DDPO on shapes, compressibility",
        "eval/reward",
        "step",
        -1.05,
        "Minus the size of the JPEG file in kB. TRL 0.8.6 takes the images of an optimizer step one denoising step at "
        "a time, has weight decay on all weights, where ours is on matrices only, and draws other noise. By its code "
        "it does not sample without guidance: the embeddings of the empty prompt come before those of the captions "
        "even then; the peer's script replaces that function.",
        {"eval/agreement": "agreement"},
    ),
}
AXES = {"step": "optimizer step", "episode": "sampled episodes"}


# ---- Curves ---------------------------------------------------------------------------------------------------------


def curves(name):
    """{system: {seed: records}} of a task."""
    found = {}
    for path in sorted((HERE / "curves" / name).glob("*-seed*.jsonl")):
        system, _, seed = path.stem.rpartition("-seed")
        found.setdefault(system, {})[int(seed)] = read_jsonl(path)
    return found


def collect(name, system, run_dir):
    """Stores the evaluations of a run with the seconds of training before each."""
    reference = REFERENCES[name]
    seed = run_dir.name.rpartition("-seed")[2]
    records = read_jsonl(run_dir / "metrics.jsonl")
    if "seconds" not in records[0]:
        add_seconds(records, run_dir)
    lines = []
    for record in records:
        if record.get(reference.score) is not None:
            keys = ["step", "episode", "seconds", reference.score, *reference.also]
            kept = {key: record.get(key, 0) for key in keys}
            lines.append(json.dumps(kept))
    folder = HERE / "curves" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{system}-seed{seed}.jsonl").write_text("\n".join(lines) + "\n")


def add_seconds(records, run_dir):
    """Adds the seconds of rollouts and updates so far to the records of one of our runs."""
    seconds = 0.0
    by_step = {0: 0.0}
    for record in read_jsonl(run_dir / "perf.jsonl"):
        seconds += sum(value for key, value in record.items() if key.startswith("perf/seconds_"))
        by_step[record["step"]] = seconds
    for record in records:
        record["seconds"] = round(by_step[record["step"]], 2)


# ---- Page and figures ------------------------------------------------------------------------------------------------


def table(name):
    """A row a system: first and last score, and when the mean over seeds reaches the level."""
    reference = REFERENCES[name]
    axis = reference.axis
    heads = ["system", "seeds", "first", "last", "best", *reference.also.values(), f"{axis}s", "seconds"]
    heads += [f"{axis}s to {reference.level:g}", f"seconds to {reference.level:g}"]
    rows = []
    for system, seeds in curves(name).items():
        scores = [[record[reference.score] for record in records] for records in seeds.values()]
        cells = [system, str(len(seeds))]
        cells += [average([values[0] for values in scores]), average([values[-1] for values in scores])]
        cells.append(average([max(values) for values in scores]))
        last_records = [records[-1] for records in seeds.values()]
        cells += [average([record[key] for record in last_records]) for key in reference.also]
        cells += [str(last_records[0][axis]), f"{mean(record['seconds'] for record in last_records):.0f}"]
        cells += [reached(seeds, reference, axis), reached(seeds, reference, "seconds")]
        rows.append(cells)
    return markdown(heads, rows)


def mean_curve(seeds, reference, axis):
    """[(place on an axis, score)], both means over the seeds at each evaluation."""
    count = min(len(records) for records in seeds.values())
    points = []
    for i in range(count):
        records = [records[i] for records in seeds.values()]
        points.append((mean(r[axis] for r in records), mean(r[reference.score] for r in records)))
    return points


def reached(seeds, reference, axis):
    """The place of the first evaluation at which the mean score is not below the level."""
    for place, score in mean_curve(seeds, reference, axis):
        if score >= reference.level:
            return f"{place:.0f}"
    return "not"


def page():
    lines = (HERE / "head.md").read_text().splitlines()
    for name, reference in REFERENCES.items():
        if curves(name):
            lines += ["", f"## {reference.title}", "", f"![curves](curves/{name}/curve.png)", ""]
            lines += [f"`{reference.score}`:", "", *table(name), "", reference.text]
    return "\n".join(lines) + "\n"


def digest(name):
    return hashlib.sha256(json.dumps(curves(name)).encode()).hexdigest()


def draw(name):
    """The curves over steps or episodes, and over seconds."""
    from matplotlib.figure import Figure

    reference = REFERENCES[name]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(panels, [reference.axis, "seconds"], strict=True):
        for number, (system, seeds) in enumerate(curves(name).items()):
            for records in seeds.values():
                places = [record[axis] for record in records]
                scores = [record[reference.score] for record in records]
                axes.plot(places, scores, color=f"C{number}", alpha=0.3, linewidth=0.8)
            label = f"{system}, mean of {len(seeds)} seeds"
            axes.plot(*zip(*mean_curve(seeds, reference, axis), strict=True), f"C{number}.-", label=label)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(AXES.get(axis, "seconds of training, one thread"))
    panels[0].set_ylabel(reference.score)
    panels[0].legend(fontsize=8)
    figure.suptitle(reference.title, fontsize=10)
    figure.savefig(HERE / "curves" / name / "curve.png", dpi=110, metadata={"data": digest(name)})


def write():
    for name in REFERENCES:
        if curves(name):
            draw(name)
    (HERE / "README.md").write_text(page())


def problems():
    """What does not follow from the curves, as sentences."""
    from PIL import Image

    if (HERE / "README.md").read_text() != page():
        yield "benchmarks/references: README.md does not follow from curves/"
    for name in REFERENCES:
        if curves(name) and Image.open(HERE / "curves" / name / "curve.png").text.get("data") != digest(name):
            yield f"benchmarks/references: the figure of {name} does not show its curves"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs="+", metavar="TASK SYSTEM RUN_DIR", help="store the curves of runs")
    arguments = parser.parse_args()
    if arguments.collect:
        name, system, *run_dirs = arguments.collect
        for run_dir in run_dirs:
            collect(name, system, Path(run_dir))
    write()


if __name__ == "__main__":
    main()
