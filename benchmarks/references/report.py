"""Our scripts and the trainers that people come from, on the same task: tables and figures of the stored curves.

`check.py --write` rebuilds them, and `check.py` fails where README.md or a figure does not follow from the curves.
What smollm2.py or randomwalks_ppo.py has written is stored, each directory's name ending with its seed, by

    python benchmarks/references/report.py smollm2-grpo DIRECTORY-seed1 DIRECTORY-seed2 DIRECTORY-seed3
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import tables
from benchmarks.claims import CHAIN, CLAIMS, REVIEWS

HERE = Path(__file__).resolve().parent


@dataclass
class Reference:
    """What is compared: a variant of a claim, which is ours, and TRL's runs of that task."""

    title: str
    claim: str
    variant: str
    axis: str  # what counts the progress: "step", "episode", "seconds"
    level: float  # the table says when the mean curve reaches it
    also: str = ""  # a further metric of the last evaluation, under the claim's heading

    @property
    def score(self):
        return CLAIMS[self.claim].score_of(self.variant)


ILLEGAL = "eval/illegal"
AGREEMENT = "eval/agreement"
REFERENCES = {
    "sft": Reference("SFT on random walks", "sft-randomwalks", "default", "step", 0.25, ILLEGAL),
    "ppo": Reference("PPO on random walks", "ppo-randomwalks", "default", "step", 0.95, ILLEGAL),
    "ppo-own-critic": Reference("PPO, a critic of its own", "ppo-randomwalks", "own-critic", "step", 0.95, ILLEGAL),
    "grpo": Reference("GRPO on sums", "grpo-sums", "default", "episode", 0.9),
    "calculator": Reference("GRPO with a calculator", "grpo-calculator", "default", "episode", 0.9, "eval/calls"),
    "reward": Reference("Reward model on pairs of random walks", CHAIN, "reward-base", "step", 0.9),
    "dpo": Reference("DPO on pairs of random walks", CHAIN, "dpo-base", "step", 0.9, ILLEGAL),
    "smollm2-grpo": Reference("SmolLM2, GRPO on sums", "smollm2-answers", "sums", "seconds", 0.7),
    "smollm2-sft": Reference("SmolLM2, SFT on reviews", REVIEWS, "sft", "seconds", 0.3),
    "smollm2-reward": Reference("SmolLM2, reward model of reviews", REVIEWS, "reward", "seconds", 0.7),
    "smollm2-dpo": Reference("SmolLM2, DPO on pairs of reviews", REVIEWS, "dpo", "seconds", 0.3),
    "ddpo": Reference("DDPO on shapes, compressibility", "ddpo-shapes", "default", "step", -1.05, AGREEMENT),
}


def curves(name):
    """{system: {seed: records}} of a task, with the seeds of TRL."""
    reference = REFERENCES[name]
    peer = tables.curves_of(HERE / f"curves/{name}.csv", "system")
    ours = tables.curves(reference.claim)[reference.variant]
    return {"plainrl": {seed: ours[seed] for seed in peer["trl"]}} | peer


def lines(name):
    """{system: {seed: points of the score}}"""
    score, axis = REFERENCES[name].score, REFERENCES[name].axis
    found = {}
    for system, seeds in curves(name).items():
        found[system] = {seed: tables.points(records, score, axis) for seed, records in seeds.items()}
    return found


def table(name):
    """A row a system: first and last score, and when the mean over seeds reaches the level."""
    reference = REFERENCES[name]
    unit = f"{reference.axis.removesuffix('s')}s"
    rows = []
    for system, seeds in curves(name).items():
        row = {"system": system, "seeds": str(len(seeds))}
        row |= tables.ends([tables.history(records, reference.score) for records in seeds.values()])
        if reference.also:
            ends = [records[-1][reference.also] for records in seeds.values()]
            row[CLAIMS[reference.claim].table[reference.also]] = tables.average(ends)
        line = tables.mean_curve(lines(name)[system])
        places = [f"{place:.0f}" for place, score in line if score >= reference.level]
        row |= {unit: f"{line[-1][0]:.0f}", f"{unit} to {reference.level:g}": places[0] if places else "not"}
        rows.append(row)
    return tables.markdown(rows)


def draw(name):
    reference = REFERENCES[name]
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    systems = lines(name)
    tables.draw_curves(axes, systems, list(systems))
    axes.set(xlabel=tables.AXES[reference.axis], ylabel=reference.score, title=reference.title)
    axes.legend(fontsize=8)
    tables.save_figure(figure, HERE / f"curves/{name}.png", 80, systems)


def problems():
    """The figures that do not follow from the curves, as sentences."""
    for name in REFERENCES:
        if not tables.shows(HERE / f"curves/{name}.png", lines(name)):
            yield f"benchmarks/references: the figure of {name} does not show its curves"


if __name__ == "__main__":
    _, name, *run_dirs = sys.argv
    runs = {}
    for run_dir in run_dirs:
        runs[int(run_dir.rpartition("-seed")[2])] = tables.read_jsonl(Path(run_dir) / "metrics.jsonl")
    tables.write_curves(HERE / f"curves/{name}.csv", "system", {"trl": runs})
