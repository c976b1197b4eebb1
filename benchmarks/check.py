"""Evidence: collects runs into benchmarks/curves/<claim>/, rebuilds tables and figures, and fails where they disagree.

    python benchmarks/check.py                          # verify offline: exit 1 and a list if something is off
    python benchmarks/check.py --write                  # rebuild figures and the blocks in documents
    python benchmarks/check.py --collect ppo-randomwalks RUN_DIR ...   # take the curves of finished runs, then rebuild

A claim is a folder with run.sh (the commands), curves.csv (the metrics of figure and table), runs.csv (where they come
from), curve.png (built from the curves) and README.md, whose results are a block between two marks, as all tables of
documents are. A figure is compared by a digest of its data, which is kept in the PNG: pixels differ between matplotlib
versions.
"""

import argparse
import functools
import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import paired, tables
from benchmarks.claims import CLAIMS, PRETRAINED, SUMMARY, TWIN
from benchmarks.planted import planted
from benchmarks.references import report as references
from benchmarks.throughput import engine
from benchmarks.throughput import report as throughput

PLAIN_NAMES = {  # of metrics, in figures over a KL
    "eval/optimality": "true reward",
    "eval/reward": "learned reward",
    "objective/kl": "KL to the start",
}
LABELS = {  # of the y axes
    "eval/accuracy": "share of right answers",
    "eval/agreement": "agreement (share of images)",
    "eval/brightness": "brightness (0 to 1)",
    "eval/calls": "calls per problem",
    "eval/distinct": "different words (share)",
    "eval/format": "written as asked (share)",
    "eval/illegal": "illegal walks (share)",
    "eval/kilobytes": "size of the JPEG file (kB)",
    "eval/length": "length (characters)",
    "eval/loss": "held-out loss (nats a token)",
    "eval/optimality": "optimality (0 to 1)",
    "eval/optimality@beta=0": "optimality at beta 0",
    "eval/optimality@beta=64": "optimality at beta 64",
    "eval/sentiment": "sentiment (-1 to 1)",
    "val/explained_variance": "explained variance",
}
MEASURES = {  # what `measured` returns, in words; deviations are those over the samples of the first evaluation
    "gain": "gain, in standard deviations, of",
    "late": "mean of the second half of",
    "fall": "fall from the best to the last",
    "rise": "rise since the best score of",
}
CASES = "benchmarks/faults/cases.csv"
PRECISION = "benchmarks/curves/grpo-stale/precision.csv"
DECODING = "right token profile update kernels peers pretrained".split()  # parts of benchmarks/gpu.py
SAME = tables.ROOT / "benchmarks/curves/same.csv"  # of regression.py: first records of older commits beside a newer one


# ---- Numbers of a curve ---------------------------------------------------------------------------------------------


def points_over(records, key, over):
    """[(square root of a second metric, value)] of a metric in a curve, without values that nothing follows.

    A script measures the KL of the samples that it is going to train on, so the first KL after an evaluation is that of
    the policy that was evaluated."""
    pairs = []
    for step, value in tables.points(records, key):
        later = [distance for other, distance in tables.points(records, over) if other > step]
        if later:
            pairs.append((math.sqrt(max(later[0], 0.0)), value))
    return pairs


def measured(records, key, which, score):
    """The number of a curve that a bar is about: the last or the best value, or see MEASURES."""
    values = tables.history(records, key)
    if which == "gain":
        return (values[-1] - values[0]) / tables.history(records, f"{key}_std")[0]
    if which == "rise":
        scores = dict(tables.points(records, score))
        best_step = max(scores, key=scores.get)
        return values[-1] - dict(tables.points(records, key))[best_step]
    if which == "late":
        return mean(values[len(values) // 2 :])
    if which == "fall":
        return max(values) - values[-1]
    return values[-1] if which == "last" else max(values)


# ---- The results of a claim -----------------------------------------------------------------------------------------


def table_row(name, variant, runs):
    """{heading: cell} of a variant. runs: {seed: records}."""
    claim = CLAIMS[name]
    score = claim.score_of(variant)
    row = {"variant": variant, "seeds": str(len(runs))}
    if claim.scores:
        row["score"] = f"`{score}`"
    row |= tables.ends([tables.history(records, score) for records in runs.values()])
    if claim.images:
        gains = [measured(records, score, "gain", score) for records in runs.values()]
        row["gain in deviations"] = tables.average(gains)
    for key, heading in claim.table.items():
        last_values = [tables.history(records, key)[-1] for records in runs.values() if tables.history(records, key)]
        row[heading] = tables.average(last_values) if last_values else "-"
    last_step, _ = tables.points(next(iter(runs.values())), score)[-1]
    stored = [run for run in tables.stored_runs(name) if run["variant"] == variant]
    row |= {"steps": f"{last_step:.0f}", "seconds": f"{mean(float(run['seconds']) for run in stored):.0f}"}
    if claim.reach < math.inf:
        row |= reached(runs, score, claim.reach)
    if claim.samples:
        row["peak GB"] = f"{max(float(run['memory_mb']) for run in stored) / 1000:.1f}"
    return row


def reached(runs, score, level):
    """Cells: the mean step, and the seconds of training, at which the score is first at this level."""
    first = []
    for records in runs.values():
        first += [record for record in records if record.get(score, -math.inf) >= level][:1]
    steps = f"in {len(first)} of {len(runs)} seeds"
    seconds = ""
    if len(first) == len(runs):
        steps, seconds = (tables.average([record[name] for record in first]) for name in ("step", "seconds"))
    return {f"steps to {level}": steps, "seconds of training": seconds}


def results(name):
    """The block of a claim's README.md: the table, the bars, and where it was measured."""
    claim = CLAIMS[name]
    runs = [run for run in tables.stored_runs(name) if not run["variant"].endswith(TWIN)]
    devices = "; ".join(sorted({f"{run['device']}, {run['threads']} threads, torch {run['torch']}" for run in runs}))
    variants = tables.curves(name)
    bars = []
    for variant, key, which, sign, bar, count in claim.bars:
        seeds = f"at least {count} of {len(variants[variant])} seeds"
        bars.append(f"- `{variant}`: {MEASURES.get(which, which)} `{key}` {sign} {bar} in {seeds}")
    if bars:
        bars = ["`python benchmarks/check.py` fails if these curves do not have:", "", *bars, ""]
    score = "The scores" if claim.scores else f"`{claim.score}`"
    average = "the mean over seeds" if max(map(len, variants.values())) > 1 else "one seed"
    shown = tables.shown(name)
    explained = tables.explained([len(runs) for runs in shown.values()])
    differences = [*paired.table(name), ""] if claim.pairs else []
    return [
        *differences,
        f"{score}: {average}.{explained} Seconds are wall-clock, without the start-up.",
        "",
        *tables.markdown([table_row(name, variant, runs) for variant, runs in shown.items()]),
        "",
        *bars,
        f"Measured on {devices}. [runs.csv](runs.csv) has the commits, [same.csv](../same.csv) compares a later one.",
        *rounding(name),
        *before_and_after(name),
    ]


def before_and_after(name):
    """Lines with samples for held-out prompts at the start and at the end of a run, for claims that keep them."""
    if not CLAIMS[name].samples:
        return []
    rows = []
    for row in tables.read_csv(tables.claim_path(name) / "samples.csv"):
        rows.append({heading: cell.replace("|", "\\|") for heading, cell in row.items()})
    first = "Samples of seed 1, for the first held-out prompts, before and after:"
    return ["", first, "", *tables.markdown(rows)]


def rounding(name):
    """Lines that say how far runs of the same seed lie apart on two CPUs, in what the bars are about; none where no
    runs tell it. Where the commits differ, too, rounding is a part of it."""
    runs = tables.curves(name)
    lines = {}  # what a bar is about: its line
    for variant, key, which, *_ in CLAIMS[name].bars:
        score = CLAIMS[name].score_of(variant)
        twins = runs.get(variant + TWIN, {})
        ends = {seed: measured(runs[variant][seed], key, which, score) for seed in twins}
        squares = [(measured(twins[seed], key, which, score) - end) ** 2 for seed, end in ends.items()]
        if twins:
            spread = math.sqrt(mean(squares) / 2)
            spreads = f"{spread:.4f} and {stdev(ends.values()):.4f}, {len(twins)} seeds"
            lines[variant, key, which] = f"- `{variant}`: {MEASURES.get(which, which)} `{key}`, {spreads}"
    twins = [run for run in tables.stored_runs(name) if run["variant"].endswith(TWIN)]
    where = "; ".join(sorted({run["device"] for run in twins}))
    first = f"Standard deviations between runs of the same seed here and on another CPU ({where}), and between seeds:"
    return ["", first, "", *lines.values()] if lines else []


def missed_bars(name):
    for variant, key, which, sign, bar, count in CLAIMS[name].bars:
        score = CLAIMS[name].score_of(variant)
        values = [measured(records, key, which, score) for records in tables.curves(name).get(variant, {}).values()]
        reached = [value for value in values if (value >= bar if sign == ">=" else value <= bar)]
        if len(reached) < count:
            listed = ", ".join(f"{value:.3f}" for value in values)
            yield f"{name}: {which} {key} of {variant} is {listed}: not {sign} {bar} in {count} seeds"


# ---- Figures --------------------------------------------------------------------------------------------------------


def figure_data(name):
    """{metric of a panel: {variant: {seed: points}}} of the figure, without curves of one or two points, of which runs
    of a large model have no more."""
    claim = CLAIMS[name]
    fewest = 1 if "smollm2" in name else 2
    panels = {}
    for key in claim.panels or [claim.score]:
        panels[key] = {}
        for variant, runs in tables.shown(name).items():
            if claim.over:
                lines = {seed: points_over(records, key, claim.over) for seed, records in runs.items()}
            else:
                lines = {seed: tables.points(records, key, claim.axis) for seed, records in runs.items()}
            if any(len(line) > fewest for line in lines.values()):
                panels[key][variant] = lines
    return panels


def all_data(name):
    """What the figure shows, with images and words."""
    claim = CLAIMS[name]
    files = [tables.claim_path(name) / "images" / file for file in claim.images.values()]
    images = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    data = [figure_data(name), images, claim.title, claim.lines, claim.over, claim.groups]
    if claim.pairs:
        data += [claim.pairs, claim.mistakes]
    return data


def draw_figure(name):
    claim = CLAIMS[name]
    if claim.mistakes:
        figure = paired.draw_pairs(name)
    elif claim.pairs:
        figure = paired.draw_differences(name)
    else:
        figure = draw_over(name) if claim.over else draw_panels(name)
    figure.suptitle(claim.title, fontsize=10)
    tables.save_figure(figure, tables.claim_path(name) / "curve.png", 90, all_data(name))


def draw_panels(name):
    """The figure of most claims: a panel a metric, that of the score with its reference levels, and images below."""
    claim = CLAIMS[name]
    panels = figure_data(name)
    width = 3 + max(4 * len(panels), 6)
    figure = Figure(figsize=(width, 7 if claim.images else 3.6), layout="constrained")
    top = figure
    if claim.images:
        top, bottom = figure.subfigures(2, 1, height_ratios=[3.6, 3.4])
        draw_images(name, bottom)
    row = top.subplots(1, len(panels), squeeze=False)[0]
    for axes, (key, variants) in zip(row, panels.items(), strict=True):
        tables.draw_curves(axes, variants, list(tables.shown(name)))
        axes.set(xlabel=tables.AXES[claim.axis], ylabel=LABELS.get(key, key.removeprefix("eval/")))
        if key == claim.score:
            for label, level in claim.lines.items():
                axes.axhline(level, color="gray", linestyle=":", linewidth=1)
                place = {"xycoords": axes.get_yaxis_transform(), "xytext": (0, 2), "textcoords": "offset points"}
                axes.annotate(label, (0.99, level), ha="right", fontsize=8, color="gray", **place)
    handles = {}  # a variant may be in some panels alone
    for axes in row:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    top.legend(handles.values(), handles, loc="outside right center", fontsize=8)
    return figure


def draw_over(name):
    claim = CLAIMS[name]
    data = figure_data(name)
    figure = Figure(figsize=(4 * len(claim.groups), 4.2), layout="constrained")
    panels = figure.subplots(1, len(claim.groups), sharex=True, sharey=True)
    for axes, (title, group) in zip(panels, claim.groups.items(), strict=True):
        for key, style in zip(claim.panels, ["-", "--"], strict=True):
            lines = {f"{PLAIN_NAMES[key]}, {label}": data[key][variant] for label, variant in group.items()}
            tables.draw_curves(axes, lines, list(lines), linestyle=style)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=f"square root of the {PLAIN_NAMES[claim.over]} (nats)", ylabel="reward")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def draw_images(name, figure):
    images = CLAIMS[name].images
    for axes, title in zip(figure.subplots(2, 2).flat, images, strict=True):
        axes.imshow(Image.open(tables.claim_path(name) / "images" / images[title]), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.axis("off")


# ---- Blocks of documents --------------------------------------------------------------------------------------------


def before_and_after_of(words, name, variant):
    """A cell of README.md: the mean score before training, and that after it as in the claim's table."""
    histories = []
    for records in tables.curves(name)[variant].values():
        histories.append(tables.history(records, CLAIMS[name].score_of(variant)))
    before = mean(values[0] for values in histories)
    return f"{words} {before:.2f} → {tables.average([values[-1] for values in histories])}"


def summary():
    rows = []
    for script, (paper, task, name, variant, reference) in SUMMARY.items():
        lines = len((tables.ROOT / "algos" / script).read_text().splitlines())
        pretrained = [before_and_after_of(*of) for of in PRETRAINED.get(script, [])]
        stored = [run for run in tables.stored_runs(name) if run["variant"].removesuffix(TWIN) == variant]
        minutes = [float(run["seconds"]) / 60 for run in stored]
        task = f"[{task}](benchmarks/curves/{name}/README.md)"
        row = {"script": f"[{script}](algos/{script})", "paper": paper, "lines": str(lines)}
        row["SmolLM2-135M: before → after"] = "<br>".join(pretrained) or "-"
        row["its small task: before → after"] = f"{before_and_after_of(task, name, variant)}; {reference}"
        rows.append(row | {"minutes": f"{min(minutes):.1f} to {max(minutes):.1f}"})
    return tables.markdown(rows)


def without(rows, *columns):
    """The lines of a table that lacks some columns."""
    return tables.markdown([{name: row[name] for name in row if name not in columns} for row in rows])


def csv_table(file):
    return without(tables.read_csv(tables.ROOT / file), "commit")


def gpu_tables(parts):
    """What benchmarks/gpu.py has measured last on each device, a table a part."""
    lines = []
    for part in parts:
        file = tables.ROOT / f"benchmarks/gpu/{part}.csv"
        if not file.exists():
            continue
        rows = tables.read_csv(file)
        lines += ["", f"## {part}"]
        for device, commit in {row["device"]: row["commit"] for row in rows}.items():
            found = [row for row in rows if (row["device"], row["commit"]) == (device, commit)]
            lines += ["", f"{device}, {found[0]['versions']}:", "", *without(found, "device", "commit", "versions")]
    return lines[1:]


def tried_cases():
    """What tests/README.md says of the table of faults."""
    rows = tables.read_csv(tables.ROOT / CASES)
    passed = sum(row["result"] == "passed" for row in rows)
    pairs = sum(len(row["scripts"].split()) for row in rows)
    tests = sum(int(row["tests"]) for row in rows)
    tried = f"{pairs} pairs of one with a script, {tests} tests"
    return [f"{len(rows)} faults and bad inputs, {tried}: {passed} rows pass."]


def signs():
    """What the first iteration of the pitfalls shows (benchmarks/signs.py), as Markdown lines."""
    rows = tables.read_csv(tables.claim_path("pitfalls") / "signs.csv")
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        ours = [row for row in rows if row["variant"] == variant]
        entropy = mean(float(row["entropy"]) for row in ours)
        gaps = [float(row["nll"]) - float(row["entropy"]) for row in ours if row["micro_batch_size"] == "16"]
        error = stdev(gaps) / len(gaps) ** 0.5
        small, large = (float(row["grad_norm"]) for row in ours if row["seed"] == "1")
        row = {"variant": f"`{variant}`", "entropy": f"{entropy:.4f}"}
        row |= {"nll - entropy": f"{mean(gaps):+.4f} ± {error:.4f}"}
        found.append(row | {"change of the gradient": f"{abs(large / small - 1):.0e}"})
    return tables.markdown(found)


def blocks():
    """[(document, name in its marks, function -> lines between them)]"""
    listed = [
        ("README.md", "summary", summary),
        ("README.md", "speed", throughput.quoted),
        ("tests/README.md", "faults", tried_cases),
        ("benchmarks/faults/README.md", "cases", functools.partial(csv_table, CASES)),
        ("benchmarks/planted/README.md", "bugs", planted.table),
        ("benchmarks/throughput/README.md", "speed table", throughput.table),
        ("benchmarks/throughput/README.md", "same work", throughput.same_work),
        ("benchmarks/throughput/README.md", "engine", engine.table),
        ("benchmarks/curves/pitfalls/README.md", "signs", signs),
        ("benchmarks/curves/grpo-stale/README.md", "precision", functools.partial(csv_table, PRECISION)),
        ("benchmarks/gpu.md", "tables", functools.partial(gpu_tables, ["traces", "again", "tasks", "steps"])),
        ("benchmarks/gpu_decode.md", "tables", functools.partial(gpu_tables, DECODING)),
        ("benchmarks/gpu_decode.md", "iterations", functools.partial(csv_table, "benchmarks/gpu/iterations.csv")),
    ]
    for name in CLAIMS:
        listed.append((f"benchmarks/curves/{name}/README.md", "results", functools.partial(results, name)))
    for name in references.REFERENCES:
        listed.append(("benchmarks/references/README.md", name, functools.partial(references.table, name)))
    return listed


def documents():
    """{document: its text with the generated tables, each between the marks of its block}"""
    texts = {}
    for document, name, make_lines in blocks():
        text = texts.get(document) or (tables.ROOT / document).read_text()
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            sys.exit(f"error: {document} has no block {name}")
        texts[document] = "".join([before, mark, *(f"{line}\n" for line in make_lines()), end, after])
    return texts


# ---- Verify, write, collect -----------------------------------------------------------------------------------------


def verify():
    """All that is off, as sentences."""
    problems = [*references.problems(), *planted.problems()]
    for name in CLAIMS:
        problems += verify_claim(name)
    for document, text in documents().items():
        if (tables.ROOT / document).read_text() != text:
            problems.append(f"{document}: a table does not follow from its data: check.py --write makes it anew")
    for row in tables.read_csv(tables.ROOT / CASES):
        if row["result"] != "passed":
            problems.append(f"faults: case {row['number']} has not passed")
    return problems


def verify_claim(name):
    """What is off in the folder of a claim, as sentences."""
    problems = []
    seeds_of = {variant: set() for variant in tables.curves(name)}
    for run in tables.stored_runs(name):
        seeds_of.setdefault(run["variant"], set()).add(int(run["seed"]))
    if seeds_of != {variant: set(runs) for variant, runs in tables.curves(name).items()}:
        problems.append(f"{name}: runs.csv and curves.csv name different runs")
    if not tables.shows(tables.claim_path(name) / "curve.png", all_data(name)):
        problems.append(f"{name}: curve.png does not show curves.csv")
    return problems + list(missed_bars(name))


def write():
    for name in CLAIMS:
        draw_figure(name)
    for name in references.REFERENCES:
        references.draw(name)
    for document, text in documents().items():
        (tables.ROOT / document).write_text(text)


def collect(name, run_dirs):
    """Stores the runs, in place of those of their variant and seed: a run directory's name is <variant>-seed<N>. Runs
    without an evaluation have no curve and are left out."""
    rows = {}
    records = {}
    if (tables.claim_path(name) / "runs.csv").exists():  # a new claim has none
        rows = {(run["variant"], int(run["seed"])): run for run in tables.stored_runs(name)}
        records = tables.curves(name)
    for run_dir in map(Path, run_dirs):
        variant, _, seed = run_dir.name.rpartition("-seed")
        kept = kept_records(name, variant, run_dir)
        if kept:
            rows[variant, int(seed)] = collect_run(name, variant, int(seed), run_dir, kept)
            records.setdefault(variant, {})[int(seed)] = kept
            if CLAIMS[name].samples and int(seed) == 1:
                collect_samples(name, variant, run_dir)
    tables.write_curves(tables.claim_path(name) / "curves.csv", "variant", records)
    tables.write_csv(tables.claim_path(name) / "runs.csv", [rows[key] for key in sorted(rows)])


def collect_samples(name, variant, run_dir):
    """Stores the first samples of the first and the last evaluation of a run; of ilql those of the largest beta. A run
    that samples nothing has none."""
    samples = tables.read_jsonl(run_dir / "samples.jsonl") if (run_dir / "samples.jsonl").exists() else []
    samples = [sample for sample in samples if "output" in sample]  # not of pairs
    beta = max((sample.get("beta", 0) for sample in samples), default=0)
    last = max((sample["step"] for sample in samples), default=0)
    texts = {}  # {(step, prompt): output}
    for sample in samples:
        if sample.get("beta", 0) == beta:
            texts.setdefault((sample["step"], sample["prompt"]), sample["output"])
    prompts = [prompt for step, prompt in texts if step == 0][: CLAIMS[name].samples]
    file = tables.claim_path(name) / "samples.csv"
    rows = [row for row in tables.read_csv(file) if row["variant"] != variant] if file.exists() else []
    for prompt in prompts:
        row = {"variant": variant, "prompt": last_line(prompt)}
        rows.append(row | {"before": repr(texts[0, prompt])[1:-1], "after": repr(texts[last, prompt])[1:-1]})
    tables.write_csv(file, sorted(rows, key=lambda row: row["variant"]))


def last_line(prompt):
    """The last line of a prompt, of a chat its last message.

    >>> last_line("<|im_start|>user\\nWhy?<|im_end|>\\n<|im_start|>assistant\\n")
    'Why?'
    """
    text = re.sub(r"<\|im_end\|>|<\|im_start\|>\w*", "", prompt)
    return text.strip().splitlines()[-1]


def collect_run(name, variant, seed, run_dir, kept):
    """The row of runs.csv of a run; stores its images where the claim shows them."""
    claim = CLAIMS[name]
    values = tables.history(kept, claim.score_of(variant))
    env = json.loads((run_dir / "env.json").read_text())
    perf = tables.read_jsonl(run_dir / "perf.jsonl")
    if claim.images and seed == 1:
        grids = sorted((run_dir / "images").glob("*.png"))
        for file, grid in {f"{variant}-first.png": grids[0], f"{variant}-last.png": grids[-1]}.items():
            if file in claim.images.values():
                first_four(grid).save(tables.claim_path(name) / "images" / file, optimize=True)
    row = {
        "variant": variant,
        "seed": seed,
        "commit": commit_of(env),
        "device": env["device"],
        "threads": env["threads"],
        "processes": env["processes"],
        "torch": env["versions"]["torch"],
        "transformers": env["versions"]["transformers"],
        "seconds": f"{perf[-1]['time'] - perf[0]['time']:.1f}",
        "memory_mb": f"{max(record.get('perf/peak_memory_mb', 0) for record in perf):.0f}",
        "last": values[-1],
        "best": max(values),
        "command": env["command"].removeprefix("python ").replace(str(tables.ROOT) + "/", ""),
    }
    if claim.pairs:
        row["tokens"] = sampled_tokens(run_dir)
    return row


def first_four(grid, rows=12, columns=8, size=32):
    """The first four images of every row of a grid as ddpo.py draws it, enlarged and with text below, without both:
    a column a row."""
    pixels = np.asarray(Image.open(grid))
    tile = pixels.shape[1] // columns
    captions = []
    for row in range(rows):
        top = row * pixels.shape[0] // rows
        strip = pixels[top : top + tile : tile // size, :: tile // size]
        captions.append(np.concatenate(np.split(strip, columns, axis=1)[:4]))
    return Image.fromarray(np.concatenate(captions, axis=1))


def commit_of(env):
    """The commit of a run, from its env.json. It is not called dirty where script and common/ are those of the commit:
    the curves of the claim before may lie in the checkout."""
    commit, dash, _ = env["commit"].partition("-dirty")
    if not dash:
        return commit
    for name, digest in env["files"].items():
        if name == "script" or name.startswith("common/"):
            file = f"algos/{env['algo']}.py" if name == "script" else name
            shown = subprocess.run(["git", "-C", str(tables.ROOT), "show", f"{commit}:{file}"], capture_output=True)
            if hashlib.sha256(shown.stdout).hexdigest() != digest:
                return env["commit"]
    return commit


def kept_records(name, variant, run_dir):
    """Of a run's metrics those that the claim uses: the records that figure and score need, and the last one. None
    where the score was never measured."""
    claim = CLAIMS[name]
    shown = [claim.score, *claim.scores.values(), *claim.panels, claim.over]
    keys = ["step", claim.axis, *shown, *claim.table, *(key for _, key, *_ in claim.bars)]
    if claim.images:
        keys.append(f"{claim.score}_std")
    if claim.samples or claim.axis == "seconds":
        keys.append("seconds")
    seconds = training_seconds(run_dir)
    records = []
    for record in tables.by_step(tables.read_jsonl(run_dir / "metrics.jsonl")):
        record["seconds"] = seconds.get(record["step"], 0.0)
        records.append({key: record[key] for key in keys if record.get(key) is not None})
    if not tables.history(records, claim.score_of(variant)):
        return None
    return [record for record in records if record is records[-1] or record.keys() & set(shown)]


def sampled_tokens(run_dir):
    """Million tokens of responses that a run has trained on; 0 without rollouts."""
    flags = json.loads((run_dir / "env.json").read_text())["flags"]
    lengths = [record.get("tokens/responses_len", 0) for record in tables.read_jsonl(run_dir / "metrics.jsonl")]
    return f"{flags.get('rollout_batch_size', 0) * sum(lengths) / 1e6:.3f}"


def training_seconds(run_dir):
    """{step: seconds of the rollouts and updates up to it}, without evaluations."""
    seconds = {}
    total = 0.0
    for record in tables.read_jsonl(run_dir / "perf.jsonl"):
        total += record.get("perf/seconds_rollout", 0.0) + record.get("perf/seconds_update", 0.0)
        seconds[record.get("step")] = total
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rebuild tables and figures")
    parser.add_argument("--collect", nargs="+", metavar="CLAIM RUN_DIR", help="store runs of a claim")
    arguments = parser.parse_args()
    if arguments.collect:
        name, *run_dirs = arguments.collect
        collect(name, run_dirs)
    if arguments.collect or arguments.write:
        write()
    problems = verify()
    print("\n".join(problems) or "everything agrees")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
