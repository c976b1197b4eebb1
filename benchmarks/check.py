"""Evidence: collects runs into benchmarks/curves/<claim>/, rebuilds tables and figures, and fails where they disagree.

    python benchmarks/check.py                          # verify offline: exit 1 and a list if something is off
    python benchmarks/check.py --write                  # rebuild tables, figures and the blocks in documents
    python benchmarks/check.py --collect ppo-randomwalks RUN_DIR ...   # take the curves of finished runs, then rebuild
    python benchmarks/check.py --new ppo-randomwalks RUN_DIR   # does a new run leave the band of the stored seeds?

A claim is a folder with run.sh (the commands), curves/<variant>-seed<N>.jsonl (the metrics of figure and table, as the
runs wrote them), runs.csv (where they come from), curve.png and README.md (both built from those files).
A figure is compared by a digest of its data, which is kept in the PNG: pixels differ between matplotlib versions.
A claim about images keeps the grids of the first seed that its figure shows in images/.
"""

import argparse
import csv
import hashlib
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.claims import CLAIMS, SUMMARY
from benchmarks.planted import planted

ROOT = Path(__file__).resolve().parents[1]
SPEED = ROOT / "benchmarks/throughput"

PLAIN_NAMES = {  # of metrics, in figures over a KL
    "eval/optimality": "true reward",
    "eval/reward": "learned reward",
    "objective/kl": "KL to the start",
}
LINE_STYLES = ["-", "--"]
AXES = {"step": "optimizer step", "episode": "episodes"}


# ---- Stored runs ----------------------------------------------------------------------------------------------------


def read_csv(path):
    """The rows of a file, a mapping each."""
    with open(path) as file:
        return list(csv.DictReader(file))


def read_jsonl(path):
    """The records of a file, a mapping each."""
    with open(path) as file:
        return [json.loads(line) for line in file]


def claim_path(name):
    return ROOT / "benchmarks/curves" / name


def stored_runs(name):
    """Where the curves of a claim come from, a row a run."""
    return read_csv(claim_path(name) / "runs.csv")


def curves(name):
    """{variant: {seed: path}} of a claim."""
    paths = {}
    for path in sorted((claim_path(name) / "curves").glob("*.jsonl")):
        variant, _, seed = path.stem.rpartition("-seed")
        paths.setdefault(variant, {})[int(seed)] = path
    return paths


def points(path, key, axis="step"):
    """[(step, value)] of a metric in a curve file, or with another axis."""
    return [(record.get(axis, 0), record[key]) for record in read_jsonl(path) if record.get(key) is not None]


def history(path, key):
    """The values of a metric in a curve file, in their order."""
    return [value for _, value in points(path, key)]


def points_over(path, key, over):
    """[(square root of a second metric, value)] of a metric in a curve file, without values that nothing follows.

    A script measures the KL of the samples that it is going to train on, so the first KL after an evaluation is that of
    the policy that was evaluated."""
    distances = points(path, over)
    pairs = []
    for step, value in points(path, key):
        later = [distance for other, distance in distances if other > step]
        if later:
            pairs.append((math.sqrt(max(later[0], 0.0)), value))
    return pairs


def gain(path, key):
    """Last minus first value of a metric, in standard deviations over the samples of the first evaluation."""
    values = history(path, key)
    deviations = history(path, f"{key}_std")
    return (values[-1] - values[0]) / deviations[0]


def rise(path, key, score):
    """Last value of a metric minus the one at the step where the score was best."""
    values = dict(points(path, key))
    scores = dict(points(path, score))
    best_step = max(scores, key=scores.get)
    return list(values.values())[-1] - values[best_step]


def average(values):
    """The mean with what is known of it: its interval from five values on, else the standard deviation of one value."""
    text = f"{mean(values):.3f}"
    if len(values) >= 5:
        low, high = interval(values)
        text += f" ({low:.3f} to {high:.3f})"
    elif len(values) > 1:
        text += f" ± {stdev(values):.3f}"
    return text


def interval(values):
    """The bounds between which 95 % of the means of resampled values lie: a percentile bootstrap."""
    draws = np.random.default_rng(0).choice(values, size=(10_000, len(values)))
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return low, high


def markdown(heads, rows):
    """A table as Markdown lines."""
    dashes = ["---"] * len(heads)
    return ["| " + " | ".join(cells) + " |" for cells in [heads, dashes, *rows]]


# ---- The folder of a claim ------------------------------------------------------------------------------------------


def table(name):
    """The claim's table as Markdown lines."""
    claim = CLAIMS[name]
    heads = ["variant", "seeds"]
    if claim.scores:
        heads.append("score")
    heads += ["first", "last", "best"]
    if claim.images:
        heads.append("gain in deviations")
    heads += [*claim.table.values(), "steps", "seconds"]
    rows = [table_row(name, variant, paths) for variant, paths in curves(name).items()]
    return markdown(heads, rows)


def table_row(name, variant, paths):
    """The cells of a variant. paths: {seed: curve file}."""
    claim = CLAIMS[name]
    score = claim.score_of(variant)
    histories = [history(path, score) for path in paths.values()]
    cells = [variant, str(len(paths))]
    if claim.scores:
        cells.append(f"`{score}`")
    cells.append(average([values[0] for values in histories]))
    cells.append(average([values[-1] for values in histories]))
    cells.append(average([max(values) for values in histories]))
    if claim.images:
        cells.append(average([gain(path, score) for path in paths.values()]))
    for key in claim.table:
        histories = [history(path, key) for path in paths.values()]
        last_values = [values[-1] for values in histories if values]
        cells.append(average(last_values) if last_values else "-")
    first_curve = points(next(iter(paths.values())), score)
    last_step, _ = first_curve[-1]
    runs = {(run["variant"], int(run["seed"])): run for run in stored_runs(name)}
    seconds = mean(float(runs[variant, seed]["seconds"]) for seed in paths)
    return [*cells, str(last_step), f"{seconds:.0f}"]


def readme(name):
    """The README.md of a claim's folder."""
    claim = CLAIMS[name]
    runs = stored_runs(name)
    devices = sorted({f"{run['device']}, {run['threads']} threads, torch {run['torch']}" for run in runs})
    commits = sorted({run["commit"] for run in runs})
    variants = curves(name)
    bars = []
    for variant, key, which, sign, bar, count in claim.bars:
        seeds = f"at least {count} of {len(variants[variant])} seeds"
        bars.append(f"- `{variant}`: {which} `{key}` {sign} {bar} in {seeds}")
    score = "Scores" if claim.scores else claim.score
    lines = [f"# {claim.title}", "", "![curve](curve.png)", "", claim.text, ""]
    lines += [
        f"{score}, mean over seeds with its 95 % bootstrap interval, or ± standard deviation of a seed where there "
        "are fewer than five; seconds are wall-clock without start-up:",
        "",
    ]
    lines += [*table(name), "", "Bars that `benchmarks/check.py` holds:", "", *bars, ""]
    lines += [f"Measured on {'; '.join(devices)}; commit {', '.join(commits)}.", ""]
    lines += [f"`python benchmarks/seeds.py {name}` repeats it.", ""]
    return "\n".join(lines)


def figure_data(name):
    """{metric of a panel: {variant: {seed: points}}} of the figure, without curves of one or two points."""
    claim = CLAIMS[name]
    panels = {}
    for key in claim.panels or [claim.score]:
        panels[key] = {}
        for variant, paths in curves(name).items():
            if claim.over:
                lines = {seed: points_over(path, key, claim.over) for seed, path in paths.items()}
            else:
                lines = {seed: points(path, key, claim.axis) for seed, path in paths.items()}
            if any(len(line) > 2 for line in lines.values()):
                panels[key][variant] = lines
    return panels


def data_digest(name):
    """The digest of all that the figure shows."""
    claim = CLAIMS[name]
    data = figure_data(name)
    if not claim.panels:
        data = data[claim.score]
    if claim.images:
        files = [claim_path(name) / "images" / file for file in claim.images.values()]
        data = [data, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]]
    if claim.over:
        data = [data, claim.over, claim.groups]
    text = json.dumps([data, claim.lines])
    return hashlib.sha256(text.encode()).hexdigest()


def draw_figure(name):
    from matplotlib.figure import Figure

    claim = CLAIMS[name]
    if claim.over:
        figure = draw_over(name)
        figure.savefig(claim_path(name) / "curve.png", dpi=110, metadata={"data": data_digest(name)})
        return
    panels = figure_data(name)
    width = 7 if len(panels) == 1 else 4 * len(panels)
    if claim.axis != "step":
        width += 2.5
    if claim.images:
        figure = Figure(figsize=(width, 8), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[3.6, 4.4])
        draw_images(name, bottom)
    else:
        figure = Figure(figsize=(width, 3.6), layout="constrained")
        top = figure
    row = top.subplots(1, len(panels), squeeze=False)[0]
    for axes, key in zip(row, panels, strict=True):
        draw_panel(name, axes, key, variants=panels[key])
    if claim.axis != "step":  # many variants: one legend beside the panels
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.suptitle(claim.title, fontsize=10)
    figure.savefig(claim_path(name) / "curve.png", dpi=110, metadata={"data": data_digest(name)})


def draw_over(name):
    """The figure of a claim with groups: a panel a group, the last values of all, and the legend in a panel's place."""
    from matplotlib.figure import Figure

    claim = CLAIMS[name]
    figure = Figure(figsize=(12, 6.8), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    *group_panels, end_panel, legend_panel = panels
    for axes in group_panels[1:]:
        axes.sharex(group_panels[0])
        axes.sharey(group_panels[0])
    for axes, title in zip(group_panels, claim.groups, strict=True):
        draw_group(name, axes, title)
    draw_ends(name, end_panel)
    handles = end_panel.get_legend_handles_labels()[0]
    for key, style in zip(claim.panels, LINE_STYLES, strict=True):
        handles += legend_panel.plot([], [], color="black", linestyle=style, label=PLAIN_NAMES[key])
    handles += legend_panel.plot([], [], color="black", alpha=0.3, linewidth=1, label="a seed")
    legend_panel.axis("off")
    legend_panel.legend(handles=handles, loc="center left", fontsize=10)
    figure.suptitle(claim.title, fontsize=11)
    return figure


def draw_group(name, axes, title):
    """The curves of a group's variants, and their means over seeds."""
    claim = CLAIMS[name]
    data = figure_data(name)
    for number, variant in enumerate(claim.groups[title].values()):
        for key, style in zip(claim.panels, LINE_STYLES, strict=True):
            lines = list(data[key][variant].values())
            for line in lines:
                axes.plot(*zip(*line, strict=True), color=f"C{number}", alpha=0.3, linewidth=0.8, linestyle=style)
            evaluations = list(zip(*lines, strict=True))
            distances = [mean(distance for distance, _ in points) for points in evaluations]
            values = [mean(value for _, value in points) for points in evaluations]
            axes.plot(distances, values, color=f"C{number}", marker=".", linestyle=style)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=f"square root of the {PLAIN_NAMES[claim.over]} (nats)", ylabel="reward")


def draw_ends(name, axes):
    """The last score of every variant, a line a label over the groups."""
    claim = CLAIMS[name]
    titles = list(claim.groups)
    for number, label in enumerate(claim.groups[titles[0]]):
        ends = []
        for title in titles:
            paths = curves(name)[claim.groups[title][label]].values()
            ends.append([history(path, claim.score)[-1] for path in paths])
        for position, values in enumerate(ends):
            axes.plot([position] * len(values), values, ".", color=f"C{number}", alpha=0.3)
        axes.plot(range(len(ends)), [mean(values) for values in ends], color=f"C{number}", marker="o", label=label)
    draw_levels(claim, axes)
    axes.set_xticks(range(len(titles)), titles, fontsize=9)
    axes.set_title(f"{PLAIN_NAMES[claim.score]} at the end", fontsize=10)


def draw_levels(claim, axes):
    """The claim's reference levels."""
    for label, level in claim.lines.items():
        axes.axhline(level, color="gray", linestyle=":", linewidth=1)
        axes.annotate(label, (0, level), xytext=(2, 2), textcoords="offset points", fontsize=8, color="gray")


def draw_images(name, figure):
    """The claim's images in a row."""
    from PIL import Image

    images = CLAIMS[name].images
    row = figure.subplots(1, len(images))
    for axes, title in zip(row, images, strict=True):
        axes.imshow(Image.open(claim_path(name) / "images" / images[title]), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.axis("off")


def draw_panel(name, axes, key, variants):
    """The curves of a metric, and their means over seeds. variants: {variant: {seed: points}}."""
    claim = CLAIMS[name]
    every_variant = list(curves(name))
    for variant, seeds in variants.items():
        color = f"C{every_variant.index(variant)}"
        lines = list(seeds.values())
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=color, alpha=0.3, linewidth=1)
        steps = [step for step, _ in lines[0]]
        means = [mean(line[i][1] for line in lines) for i in range(len(steps))]
        axes.plot(steps, means, color=color, marker=".", label=f"{variant}, mean of {len(lines)} seeds")
    if key == claim.score:
        draw_levels(claim, axes)
    axes.set(xlabel=AXES[claim.axis], ylabel=key)
    if claim.axis == "step":
        axes.legend(loc="best" if claim.images else "center right", fontsize=8)


def reaches(value, sign, bar):
    if sign == ">=":
        return value >= bar
    return value <= bar


def measured(path, key, which, score):
    """The number of a curve that a bar is about: its last or best value, its gain, its fall from the best to the last
    value, or its rise since the score was best."""
    if which == "gain":
        return gain(path, key)
    if which == "rise":
        return rise(path, key, score)
    values = history(path, key)
    if which == "fall":
        return max(values) - values[-1]
    return values[-1] if which == "last" else max(values)


def missed_bars(name):
    for variant, key, which, sign, bar, count in CLAIMS[name].bars:
        paths = curves(name).get(variant, {})
        score = CLAIMS[name].score_of(variant)
        values = [measured(path, key, which, score) for path in paths.values()]
        if sum(reaches(value, sign, bar) for value in values) < count:
            listed = ", ".join(f"{value:.3f}" for value in values)
            yield f"{name}: {which} {key} of {variant} is {listed}: not {sign} {bar} in {count} seeds"


# ---- Blocks of documents --------------------------------------------------------------------------------------------


def summary():
    """The table of README.md."""
    heads = ["script", "paper", "lines", "task", "reference", "ours", "fastest run"]
    rows = []
    for script, (paper, name, variant, score) in SUMMARY.items():
        claim = CLAIMS[name]
        key = claim.score_of(variant)
        histories = [history(path, key) for path in curves(name)[variant].values()]
        runs = [run for run in stored_runs(name) if run["variant"] == variant]
        seconds = min(float(run["seconds"]) for run in runs)  # the least disturbed by other work
        lines = (ROOT / "algos" / script).read_text().splitlines()
        reference = next(iter(claim.lines), "")
        if variant in claim.scores:
            reference = "the shorter wins 0.5"
        if claim.images:
            reference = f"base model {average([values[0] for values in histories])}"
        ours = f"{score} {average([values[-1] for values in histories])}, {len(histories)} seeds"
        clock = f"{seconds:.0f} s"
        link = f"[{script}](algos/{script})"
        rows.append([link, paper, str(len(lines)), name.split("-")[1], reference, ours, clock])
    return markdown(heads, rows)


def tried():
    """The table of ddpo-shapes/LOG.md."""
    lines = ["| reward | flags | epochs | gain | agreement |", "|---|---|---|---|---|"]
    for run in read_jsonl(claim_path("ddpo-shapes") / "tried.jsonl"):
        evaluations = run["step, eval/reward, eval/agreement"]
        _, first_reward, _ = evaluations[0]
        _, last_reward, agreement = evaluations[-1]
        deviations = (last_reward - first_reward) / run["first_std"]
        cells = [run["reward"], run["flags"], f"{run['epochs']:.0f}", f"{deviations:.1f}", f"{agreement:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scaling():
    """benchmarks/scaling/predict.py as a mapping of names."""
    return runpy.run_path(str(ROOT / "benchmarks/scaling/predict.py"))


def stored_predictions():
    return read_csv(ROOT / "benchmarks/scaling/predictions.csv")


def predictions():
    """The tables of benchmarks/scaling/README.md."""
    settings = {}  # (script, model, strategy): {GPUs: row}
    for row in stored_predictions():
        gpus = row["gpus"]
        if row["network_gb_s"] != "400":
            gpus += " slow"
        setting = (row["algo"], row["model"], row["strategy"])
        settings.setdefault(setting, {})[gpus] = row
    lines = predicted_runs(settings)
    lines += ["", *predicted_saves(settings), "", "Assumed:", ""]
    rows = []
    for name, (value, unit, source) in scaling()["ASSUMED"].items():
        rows.append([name, f"{value:g}", unit, source])
    return lines + markdown(["name", "value", "unit", "source"], rows)


def default_memory():
    """The table of what the default sizes take, in benchmarks/scaling/README.md."""
    model = scaling()
    heads = ["script", *model["default_memory"]("sft"), "fits 80 GB"]
    rows = []
    for script in ("sft", "reward", "dpo", "ppo", "ilql"):
        sizes = model["default_memory"](script)
        fits = "yes" if sizes["most"] < model["GPU"] else "no"
        rows.append([script, *(f"{size / 1e9:.1f}" for size in sizes.values()), fits])
    return markdown(heads, rows)


def predicted_runs(settings):
    """The table of time, network and memory: a row a setting."""
    heads = ["script", "model", "strategy", "s on 1", "efficiency on 8", "on 64", "on 64, slow network"]
    heads += ["lost on 64: links / lengths / one rank", "moved GB on 8", "on 64", "memory GB on 1", "on 8", "on 64"]
    heads += ["start GB", "fits from GPUs"]
    rows = []
    for setting, by_gpus in settings.items():
        seconds = float(by_gpus["64"]["seconds"])
        lost = [float(by_gpus["64"][key]) / seconds for key in ("exposed_s", "barrier_s", "serial_s")]
        cells = [*setting, f"{float(by_gpus['1']['seconds']):.2f}"]
        cells += [f"{float(by_gpus[gpus]['efficiency']):.0%}" for gpus in ("8", "64", "64 slow")]
        cells.append(" / ".join(f"{share:.0%}" for share in lost))
        cells += [whole(by_gpus[gpus]["moved_gb"]) for gpus in ("8", "64")]
        cells += [whole(by_gpus[gpus]["memory_gb"]) for gpus in ("1", "8", "64")]
        cells.append(whole(by_gpus["64"]["load_gb"]))
        fitting = [gpus for gpus in ("1", "8", "64") if by_gpus[gpus]["fits"] == "yes"]
        cells.append(fitting[0] if fitting else "never")
        rows.append(cells)
    return markdown(heads, rows)


def predicted_saves(settings):
    """The table of checkpoints: a row a script and model, under FSDP2."""
    heads = ["script", "model", "checkpoint GB", "seconds to save", "GB on a resuming machine of 8"]
    rows = []
    for (script, model, strategy), by_gpus in settings.items():
        if strategy == "FSDP2":
            values = [whole(by_gpus["8"][key]) for key in ("save_gb", "save_s", "resume_host_gb")]
            rows.append([script, model, *values])
    return markdown(heads, rows)


def throughput():
    """benchmarks/throughput/report.py as a mapping of names."""
    if str(SPEED) not in sys.path:
        sys.path.insert(0, str(SPEED))  # its scripts import each other by name
    return runpy.run_path(str(SPEED / "report.py"))


def speed_pages():
    """{file: its text} of the pages of benchmarks/throughput."""
    report = throughput()
    return {folder / "README.md": report["page"](folder) for folder in report["PAGES"]}


def speed():
    """The lines of README.md about speed."""
    report = throughput()
    return [report["quoted"](report["read"](folder)) for folder in report["PAGES"]]


def whole(number):
    """A number from a file, rounded to a whole one."""
    return f"{float(number):,.0f}"


def stored_cases():
    return read_csv(ROOT / "benchmarks/faults/cases.csv")


def cases():
    """The table of benchmarks/faults/README.md."""
    rows = stored_cases()
    heads = list(rows[0]) if rows else ["none yet"]
    return markdown(heads, [row.values() for row in rows])


def tried_cases():
    """What tests/README.md says of the table of faults."""
    rows = stored_cases()
    passed = sum(row["result"] == "passed" for row in rows)
    pairs = sum(len(row["scripts"].split()) for row in rows)
    tests = sum(int(row["tests"]) for row in rows)
    return [
        f"{len(rows)} faults and bad inputs, {pairs} pairs of one with a script, {tests} tests: {passed} rows pass."
    ]


BLOCKS = [  # document, name in its markers, function -> lines between them
    ("README.md", "summary", summary),
    ("README.md", "speed", speed),
    ("tests/README.md", "faults", tried_cases),
    ("benchmarks/curves/ddpo-shapes/LOG.md", "tried", tried),
    ("benchmarks/faults/README.md", "cases", cases),
    ("benchmarks/scaling/README.md", "predictions", predictions),
    ("benchmarks/scaling/README.md", "defaults", default_memory),
]


def documents():
    """The documents that have blocks, each once."""
    return list(dict.fromkeys(document for document, _, _ in BLOCKS))


def with_blocks(document):
    """The text of a document with its generated tables between the markers."""
    text = (ROOT / document).read_text()
    for file, name, make_lines in BLOCKS:
        if file == document:
            text = with_block(text, name, make_lines())
    return text


def with_block(text, name, lines):
    """The text with these lines between the markers of a block."""

    def between_markers(match):
        return match[1] + "\n".join(lines) + "\n" + match[2]

    return re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", between_markers, text, flags=re.S)


# ---- Verify, write, collect -----------------------------------------------------------------------------------------


def verify():
    """All that is off, as sentences."""
    from benchmarks.references import report  # which takes its table from here

    problems = list(report.problems())
    for name in CLAIMS:
        problems += verify_claim(name)
    for document in documents():
        if (ROOT / document).read_text() != with_blocks(document):
            problems.append(f"{document}: a table does not follow from the files of benchmarks")
    problems += [f"faults: case {row['number']} has not passed" for row in stored_cases() if row["result"] != "passed"]
    problems += planted.problems()
    for file, text in speed_pages().items():
        if file.read_text() != text:
            problems.append(f"{file.relative_to(ROOT)} does not follow from the results")
    if stored_predictions() != scaling()["predictions"]():
        problems.append("benchmarks/scaling: predictions.csv does not follow from predict.py")
    return problems


def verify_claim(name):
    """What is off in the folder of a claim, as sentences."""
    from PIL import Image

    folder = claim_path(name)
    files = ["run.sh", "runs.csv", "README.md", "curve.png"]
    problems = [f"{name}: {file} is missing" for file in files if not (folder / file).exists()]
    if problems:
        return problems
    with_curves = set()
    for variant, paths in curves(name).items():
        with_curves |= {(variant, seed) for seed in paths}
    if {(run["variant"], int(run["seed"])) for run in stored_runs(name)} != with_curves:
        problems.append(f"{name}: runs.csv and curves/ name different runs")
    if (folder / "README.md").read_text() != readme(name):
        problems.append(f"{name}: README.md does not follow from runs.csv and curves/")
    if Image.open(folder / "curve.png").text.get("data") != data_digest(name):
        problems.append(f"{name}: curve.png does not show curves/")
    return problems + list(missed_bars(name))


def write():
    for name in CLAIMS:
        if (claim_path(name) / "runs.csv").exists():
            (claim_path(name) / "README.md").write_text(readme(name))
            draw_figure(name)
    for file, text in speed_pages().items():
        file.write_text(text)
    for document in documents():
        (ROOT / document).write_text(with_blocks(document))


def collect(name, run_dirs):
    """Stores the runs, in place of those of their variant and seed: a run directory's name is <variant>-seed<N>. Runs
    without an evaluation, which others begin with, have no curve and are left out."""
    file = claim_path(name) / "runs.csv"
    stored = stored_runs(name) if file.exists() else []
    rows = {(run["variant"], int(run["seed"])): run for run in stored}
    for run_dir in run_dirs:
        row = collect_run(name, Path(run_dir))
        if row:
            rows[row["variant"], int(row["seed"])] = row
    columns = list(next(iter(rows.values())))
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def collect_run(name, run_dir):
    """Stores the curves of a run, and its images where the claim shows them. Returns its row of runs.csv, or None."""
    claim = CLAIMS[name]
    folder = claim_path(name)
    variant, _, seed = run_dir.name.rpartition("-seed")
    score = claim.score_of(variant)
    records = kept_records(claim, run_dir)
    values = [record[score] for record in records if record.get(score) is not None]
    if not values:
        return None
    env = json.loads((run_dir / "env.json").read_text())
    perf = read_jsonl(run_dir / "perf.jsonl")
    lines = [json.dumps(record) for record in records if len(record) > 1]
    (folder / "curves").mkdir(exist_ok=True)
    (folder / "curves" / f"{run_dir.name}.jsonl").write_text("\n".join(lines) + "\n")
    if claim.images and seed == "1":
        (folder / "images").mkdir(exist_ok=True)
        grids = sorted((run_dir / "images").glob("*.png"))
        for file, grid in {f"{variant}-first.png": grids[0], f"{variant}-last.png": grids[-1]}.items():
            if file in claim.images.values():
                shutil.copyfile(grid, folder / "images" / file)
    seconds = perf[-1]["time"] - perf[0]["time"]
    return {
        "variant": variant,
        "seed": seed,
        "commit": commit_of(env),
        "device": env["device"],
        "threads": env["threads"],
        "processes": env["processes"],
        "torch": env["versions"]["torch"],
        "transformers": env["versions"]["transformers"],
        "seconds": f"{seconds:.1f}",
        "last": values[-1],
        "best": max(values),
        "command": env["command"].replace(str(ROOT) + "/", ""),
    }


def commit_of(env):
    """The commit of a run, from its env.json. It is not called dirty where script and common/ are those of the commit:
    the curves of the claim before may lie in the checkout."""
    commit, dash, _ = env["commit"].partition("-dirty")
    if not dash:
        return commit
    for name, digest in env["files"].items():
        if name == "script" or name.startswith("common/"):
            file = env["command"].split()[0] if name == "script" else name
            shown = subprocess.run(["git", "-C", str(ROOT), "show", f"{commit}:{file}"], capture_output=True)
            if hashlib.sha256(shown.stdout).hexdigest() != digest:
                return env["commit"]
    return commit


def kept_records(claim, run_dir):
    """The records of a run's metrics with the metrics that the claim uses."""
    keys = ["step", claim.axis, claim.score, *claim.scores.values(), *claim.table, *claim.panels]
    if claim.over:
        keys.append(claim.over)
    keys += [key for _, key, *_ in claim.bars]
    if claim.images:
        keys.append(f"{claim.score}_std")
    kept = []
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        kept.append({key: record[key] for key in keys if key in record})
    return kept


def outside_band(name, run_dir):
    """How a new run leaves the stored seeds of its variant, or of the first: by more than three of their standard
    deviations at one step, or by more than one and a half on the mean of all steps."""
    variants = curves(name)
    variant = Path(run_dir).name.rpartition("-seed")[0]
    if variant not in variants:
        variant = next(iter(variants))
    key = CLAIMS[name].score_of(variant)
    stored = [dict(points(path, key)) for path in variants[variant].values()]
    new = dict(points(Path(run_dir) / "metrics.jsonl", key))
    residuals = []
    for step in sorted(new.keys() & stored[0].keys()):
        values = [values_by_step[step] for values_by_step in stored]
        residual = (new[step] - mean(values)) / max(stdev(values), 0.01)
        residuals.append(residual)
        if abs(residual) > 3:
            yield f"step {step}: {new[step]:.3f}, stored seeds {average(values)}"
    mean_residual = mean(residuals) if residuals else math.nan
    if not residuals or abs(mean_residual) > 1.5:
        yield f"the mean residual is {mean_residual:.2f} standard deviations"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rebuild tables and figures")
    parser.add_argument("--collect", nargs="+", metavar="CLAIM RUN_DIR", help="store runs of a claim")
    parser.add_argument("--new", nargs=2, metavar=("CLAIM", "RUN_DIR"), help="compare a run with the stored seeds")
    arguments = parser.parse_args()
    if arguments.collect:
        name, *run_dirs = arguments.collect
        collect(name, run_dirs)
    if arguments.collect or arguments.write:
        write()
    if arguments.new:
        name, run_dir = arguments.new
        problems = list(outside_band(name, run_dir))
    else:
        problems = verify()
    print("\n".join(problems) or "everything agrees")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
