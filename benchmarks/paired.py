"""Variants of a claim compared seed by seed. Two runs of a script with one seed see the same prompts, the same uniforms
and the same evaluations, so much of what chance does to one it does to the other, and the difference varies less."""

import math
from statistics import median, stdev

from matplotlib.figure import Figure

from benchmarks import tables
from benchmarks.claims import CLAIMS

HEADS = {"level": "at the end", "area": "mean of the curve", "tokens": "million tokens", "seconds": "seconds"}
SCORES = {"level": "spread at the end", "area": "spread of the mean"}


def measures(name):
    """{level, area, tokens or seconds: {(variant, seed): number}} of the runs of a claim. area: the mean of the score
    over the evaluations, which are equally far apart."""
    found = {measure: {} for measure in HEADS}
    for variant, runs in tables.curves(name).items():
        for seed, records in runs.items():
            values = tables.history(records, CLAIMS[name].score_of(variant))
            found["level"][variant, seed] = values[-1]
            found["area"][variant, seed] = sum(values) / len(values)
    for run in tables.stored_runs(name):
        for measure in ("tokens", "seconds"):
            found[measure][run["variant"], int(run["seed"])] = float(run[measure])
    return found


def pairs(values, variant, base):
    """[(number of the variant, number of its base)] of the seeds that both have."""
    seeds = sorted(seed for name, seed in values if name == variant and (base, seed) in values)
    return [(values[variant, seed], values[base, seed]) for seed in seeds]


def differences(values, variant, base):
    return [ours - theirs for ours, theirs in pairs(values, variant, base)]


def spreads(values, variant, base):
    """Standard deviations of a difference between two runs: of the same seed, and of independent ones."""
    ours, theirs = zip(*pairs(values, variant, base), strict=True)
    return stdev(differences(values, variant, base)), math.hypot(stdev(ours), stdev(theirs))


def table(name):
    """Lines: a table of the differences with their intervals, and how much pairing has shrunk their spread."""
    found = measures(name)
    heads = dict(HEADS)
    if CLAIMS[name].mistakes:
        del heads["seconds"]  # of a mistake
    rows = []
    ratios = {measure: [] for measure in SCORES}
    for variant, base in CLAIMS[name].pairs.items():
        row = {"variant": f"`{variant}`", "minus": f"`{base}`"}
        for measure, heading in heads.items():
            center, half_width = tables.t_interval(differences(found[measure], variant, base))
            digits = 1 if measure == "seconds" else 3
            row[heading] = f"{center:+.{digits}f} ± {half_width:.{digits}f}"
        for measure, heading in SCORES.items():
            paired, unpaired = spreads(found[measure], variant, base)
            ratios[measure].append(paired / unpaired)
            row[heading] = f"{paired:.4f}, {unpaired:.4f}"
        rows.append(row)
    of_end, of_mean = (median(ratios[measure]) for measure in SCORES)
    return [
        "Paired differences, their mean over seeds with its 95 % interval (Student's t), and the standard deviation of "
        "a difference between runs of one seed and, for comparison, of independent seeds (the spreads):",
        "",
        *tables.markdown(rows),
        "",
        f"Pairing leaves {of_end:.2f} of the spread at the end and {of_mean:.2f} of that of the mean, in the median "
        "over the rows. One interval in twenty misses the true difference by chance.",
    ]


def draw_pairs(name):
    """A panel for each pair, with the curves of all seeds and their means."""
    claim = CLAIMS[name]
    runs = tables.curves(name)
    levels = measures(name)["level"]
    rows = math.ceil(len(claim.pairs) / 3)
    figure = Figure(figsize=(10, 3 * rows), layout="constrained")
    for axes in figure.subplots(rows, 3).flat[len(claim.pairs) :]:
        axes.remove()
    for axes, (variant, base) in zip(figure.axes, claim.pairs.items(), strict=True):
        score = claim.score_of(variant)
        for label in (base, variant):
            lines = {seed: tables.points(records, score, claim.axis) for seed, records in runs[label].items()}
            tables.draw_curves(axes, {label: lines}, [base, variant])
        center, half_width = tables.t_interval(differences(levels, variant, base))
        title = f"{variant}: {claim.mistakes[variant]}\nat the end {center:+.3f} ± {half_width:.3f}"
        axes.set_title(title, fontsize=9)
        axes.set(xlabel=tables.AXES[claim.axis], ylabel=score.removeprefix("eval/"))
        axes.legend(*axes.get_legend_handles_labels(), fontsize=7)
    return figure


def draw_differences(name):
    """The differences with their intervals; a panel for the end and one for the mean of the curve."""
    claim = CLAIMS[name]
    found = measures(name)
    labels = [f"{variant} - {base.partition('-')[2] or base}" for variant, base in claim.pairs.items()]
    figure = Figure(figsize=(10, 1 + 0.25 * len(labels)), layout="constrained")
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), SCORES, strict=True):
        for place, (variant, base) in enumerate(claim.pairs.items()):
            values = differences(found[measure], variant, base)
            center, half_width = tables.t_interval(values)
            axes.plot(values, [place] * len(values), ".", color="lightgray")
            axes.errorbar(center, place, xerr=half_width, fmt="o", color="C0", capsize=3, markersize=4)
        axes.axvline(0, color="gray", linewidth=1)
        axes.set_xlabel(f"difference of the score, {HEADS[measure]}")
    axes.invert_yaxis()
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    return figure
