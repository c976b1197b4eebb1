"""Our scripts and the trainers that people come from, on the same task: tables and figures of the stored curves.

`check.py --write` rebuilds them, and `check.py` fails where README.md or a figure does not follow from the curves.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import check

HERE = Path(__file__).resolve().parent


@dataclass
class Reference:
    """What is compared on a task."""

    title: str
    score: str  # metric
    axis: str  # what counts the progress: "step", "episode"
    level: float  # the table says when the mean curve reaches it
    also: dict = field(default_factory=dict)  # further columns, of the last evaluation: metric -> heading


ILLEGAL = {"eval/illegal": "illegal walks"}
REFERENCES = {
    "sft": Reference("SFT on random walks", "eval/optimality", "step", 0.25, ILLEGAL),
    "ppo": Reference("PPO on random walks", "eval/optimality", "episode", 0.95, ILLEGAL),
    "grpo": Reference("GRPO on sums", "eval/accuracy", "episode", 0.9),
    "reward": Reference("Reward model on pairs of random walks", "eval/all/accuracy", "step", 0.9),
    "dpo": Reference("DPO on pairs of random walks", "eval/optimality", "step", 0.9, ILLEGAL),
    "ddpo": Reference("DDPO on shapes, compressibility", "eval/reward", "step", -1.05, {"eval/agreement": "agreement"}),
}


def curves(name):
    """{system: {seed: records}} of a task."""
    return check.curves_of(HERE / f"curves/{name}.csv", "system")


def lines(name, axis):
    """{system: {seed: points of the score}} over an axis: steps, episodes or seconds."""
    score = REFERENCES[name].score
    found = {}
    for system, seeds in curves(name).items():
        found[system] = {seed: check.points(records, score, axis) for seed, records in seeds.items()}
    return found


def table(name):
    """A row a system: first and last score, and when the mean over seeds reaches the level."""
    reference = REFERENCES[name]
    axis = reference.axis
    heads = ["system", "seeds", "first", "last", "best", *reference.also.values(), f"{axis}s", "seconds"]
    heads += [f"{axis}s to {reference.level:g}", f"seconds to {reference.level:g}"]
    rows = []
    for system, seeds in curves(name).items():
        scores = [check.history(records, reference.score) for records in seeds.values()]
        ends = [records[-1] for records in seeds.values()]
        cells = [system, str(len(seeds))]
        cells.append(check.average([values[0] for values in scores]))
        cells.append(check.average([values[-1] for values in scores]))
        cells.append(check.average([max(values) for values in scores]))
        cells += [check.average(check.history(ends, key)) for key in reference.also]
        cells += [f"{ends[0][axis]:.0f}", f"{mean(check.history(ends, 'seconds')):.0f}"]
        cells += [reached(check.mean_curve(lines(name, x)[system]), reference.level) for x in (axis, "seconds")]
        rows.append(cells)
    return check.markdown(heads, rows)


def reached(line, level):
    """The place of the first evaluation at which the mean score is not below the level."""
    places = [place for place, score in line if score >= level]
    return f"{places[0]:.0f}" if places else "not"


def digest(name):
    return hashlib.sha256(json.dumps(curves(name)).encode()).hexdigest()


def draw(name):
    """The curves over steps or episodes, and over seconds."""
    from matplotlib.figure import Figure

    reference = REFERENCES[name]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(panels, [reference.axis, "seconds"], strict=True):
        systems = lines(name, axis)
        check.draw_curves(axes, systems, list(systems))
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(check.AXES.get(axis, "seconds of training, one thread"))
    panels[0].set_ylabel(reference.score)
    panels[0].legend(fontsize=8)
    figure.suptitle(reference.title, fontsize=10)
    check.save_figure(figure, HERE / f"curves/{name}.png", 80, digest(name))


def problems():
    """The figures that do not follow from the curves, as sentences."""
    from PIL import Image

    for name in REFERENCES:
        if Image.open(HERE / f"curves/{name}.png").text.get("data") != digest(name):
            yield f"benchmarks/references: the figure of {name} does not show its curves"
