"""Stored curves: their CSV files, the numbers of a curve, tables as Markdown lines, and figures."""

import csv
import hashlib
import io
import json
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.claims import TWIN

ROOT = Path(__file__).resolve().parents[1]
# Quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom (any table of the distribution). The last one also
# stands for more seeds, whose intervals come out a little too wide.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
MOST_BY_T = 5  # values whose mean has an interval by Student's t, that of more is a bootstrap
AXES = {"step": "optimizer step", "episode": "episodes", "seconds": "seconds of training"}


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def write_csv(file, rows):
    columns = {}  # in the order in which they come
    for row in rows:
        columns |= row
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, [*columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_jsonl(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def by_step(records):
    """The records of metrics.jsonl, one for each step: what an evaluation has logged joins its iteration."""
    joined = {}
    for record in records:
        joined.setdefault(record["step"], {}).update(record)
    return [*joined.values()]


def claim_path(name):
    return ROOT / "benchmarks/curves" / name


def stored_runs(name):
    return read_csv(claim_path(name) / "runs.csv")


def curves(name):
    """{variant: {seed: records}} of a claim. The last record of a run has what the table shows of its end."""
    if not (claim_path(name) / "curves.csv").exists():
        raise SystemExit(f"error: claims.py names {name}, which has no stored curves")
    return curves_of(claim_path(name) / "curves.csv", "variant")


def shown(name):
    """The curves of table and figure: without those of another CPU."""
    return {variant: runs for variant, runs in curves(name).items() if not variant.endswith(TWIN)}


def curves_of(file, kind):
    """{variant or system: {seed: records}} of a CSV file of curves, whose empty cells are left out."""
    found = {}
    for row in read_csv(file):
        record = {key: float(value) for key, value in row.items() if key != kind and value}
        found.setdefault(row[kind], {}).setdefault(int(row["seed"]), []).append(record)
    return found


def write_curves(file, kind, runs):
    """Writes {variant or system: {seed: records}} as such a file, eight digits of every number."""
    rows_of = {}  # name of the run: its rows
    for variant, seeds in runs.items():
        for seed, records in seeds.items():
            digits = [{key: f"{value:.8g}" for key, value in record.items()} for record in records]
            rows_of[f"{variant}-seed{seed}"] = [{kind: variant, "seed": seed} | numbers for numbers in digits]
    rows = sum((rows_of[name] for name in sorted(rows_of)), [])
    write_csv(file, rows)


def points(records, key, axis="step"):
    """[(step, value)] of a metric in a curve, or with another axis."""
    return [(record.get(axis, 0), record[key]) for record in records if record.get(key) is not None]


def history(records, key):
    return [value for _, value in points(records, key)]


def mean_curve(seeds):
    """The points of the mean over {seed: points}: both coordinates are means."""
    means = []
    for points_of_seeds in zip(*seeds.values(), strict=True):
        means.append(tuple(mean(values) for values in zip(*points_of_seeds, strict=True)))
    return means


def average(values):
    """The mean with what is known of it: its interval from five values on, else the standard deviation of one value.

    >>> average([1, 2, 3, 4, 5])
    '3.000 (1.037 to 4.963)'
    """
    text = f"{mean(values):.3f}"
    if len(values) >= 5:
        low, high = interval(values)
        text += f" ({low:.3f} to {high:.3f})"
    elif len(values) > 1:
        text += f" ± {stdev(values):.3f}"
    return text


def explained(counts):
    """What `average` writes beside a mean, in words. counts: of the values of all rows of a table."""
    kinds = []
    if MOST_BY_T in counts:
        kinds.append(f"Student's t, {MOST_BY_T} seeds")
    if max(counts) > MOST_BY_T:
        kinds.append(f"bootstrap, {max(counts)} seeds")
    words = f" In brackets: its 95 % interval ({'; '.join(kinds)})." if kinds else ""
    if any(1 < count < MOST_BY_T for count in counts):
        words += f" After ±: the standard deviation of one seed, where there are fewer than {MOST_BY_T}."
    return words


def ends(histories):
    """{heading: cell} of the first, the last and the best of some histories."""
    return {
        "first": average([values[0] for values in histories]),
        "last": average([values[-1] for values in histories]),
        "best": average([*map(max, histories)]),
    }


def t_interval(values):
    """Mean and half width of its 95 % interval, under a normal distribution of the values (Student's t)."""
    if len(values) < 2:
        return values[0], math.nan
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    return mean(values), quantile * stdev(values) / math.sqrt(len(values))


def interval(values):
    """The bounds of a 95 % interval of the mean: of few values by Student's t, because a bootstrap of five is a third
    too narrow; of more those between which 95 % of the means of resampled values lie."""
    if len(values) <= MOST_BY_T:
        center, half_width = t_interval(values)
        return center - half_width, center + half_width
    draws = np.random.default_rng(0).choice(values, size=(10_000, len(values)))
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return low, high


def markdown(rows):
    """The lines of a table. rows: {heading: cell}, equal headings in all."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def draw_curves(axes, variants, colors, **style):
    """The curves of a panel, and their means over seeds. variants: {variant: {seed: points}}; colors: their order."""
    for variant, seeds in variants.items():
        place = colors.index(variant)
        color = f"C{place}"
        dashes = {"linestyle": "-" if place < 10 else "--"} | style  # there are ten colors
        for line in seeds.values():
            axes.plot(*zip(*line, strict=True), color=color, alpha=0.3, linewidth=0.8, **dashes)
        label = f"{variant}, mean of {len(seeds)} seeds" if len(seeds) > 1 else f"{variant}, one seed"
        axes.plot(*zip(*mean_curve(seeds), strict=True), color=color, marker=".", label=label, **dashes)


def digest(data):
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def shows(file, data):
    return Image.open(file).text.get("data") == digest(data)


def save_figure(figure, file, dpi, data):
    """Writes a figure in 256 colours, with the digest of its data."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi)
    text = PngInfo()
    text.add_text("data", digest(data))
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, optimize=True, pnginfo=text)
