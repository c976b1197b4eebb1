"""Compares runs: a table of what they have reached and of the flags that differ; with --out a picture of the curves.

    python benchmarks/compare.py runs/ppo-1a2b3c4d runs/slow-5e6f7a8b         # the table
    python benchmarks/compare.py runs --metric eval/optimality --out all.png  # all runs of a folder
    python benchmarks/compare.py --list                                       # what lies in runs/

Runs that differ in --seed alone are a group: the table has mean and standard deviation over them, the picture their
mean at each step and a band from the lowest to the highest. The metric is --metric, or the one that the picture of the
first run begins with, where all have it and it is no loss of different scripts. The best value of a loss or a
perplexity is the lowest, else the highest.
"""

import argparse
import fcntl
import json
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.report import visible

DEFAULT_NAME = r"\w+-[0-9a-f]{8}(-\d+)?"  # of the directory of a run without --run-dir


@dataclass
class Run:
    folder: Path
    algo: str
    flags: dict
    files: dict  # {name: hash} of the code and of what flags name
    headline: str | None  # None before the first step
    state: str
    records: list  # the lines of metrics.jsonl

    def curve(self, metric):
        """[(step, value)], without values that are not finite."""
        pairs = [(record["step"], record.get(metric)) for record in self.records]
        return [(step, value) for step, value in pairs if isinstance(value, int | float)]


# ---- Reading ---------------------------------------------------------------------------------------------------------


def read_all(paths):
    """(runs, a sentence for each directory that is left out). A path is a run, or a folder of runs."""
    runs = []
    left_out = []
    for path in paths:
        folders = [path]
        if path.is_dir() and not (path / "env.json").exists():
            folders = sorted(child for child in path.iterdir() if child.is_dir()) or [path]
        for folder in folders:
            try:
                runs.append(read_run(folder))
            except ValueError as error:
                left_out.append(f"left out: {folder}: {error}")
    return runs, left_out


def read_run(folder):
    """The run in a directory. ValueError says why there is none."""
    if not folder.is_dir():
        raise ValueError("there is no such directory")
    if not (folder / "env.json").exists():
        raise ValueError("it holds no run, there is no env.json")
    try:
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        records = read_records(folder / "metrics.jsonl")
        state = state_of(folder, records[-1]["step"] if records else None, env.get("total_steps"))
        headline = newest_headline(folder)
        return Run(folder, env["algo"], dict(env["flags"]), dict(env["files"]), headline, state, records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its env.json or metrics.jsonl is damaged, or not of a run") from None


def newest_headline(folder):
    """The headline metric of the newest checkpoint, else the one with which the run began. An evaluation chooses it."""
    newest = max(folder.glob("checkpoints/step_????????/state.json"), default=folder / "env.json")
    return json.loads(newest.read_text(encoding="utf-8")).get("headline")


def read_records(path):
    """The lines of metrics.jsonl that are whole: the last one may be half written."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    if not all(isinstance(record["step"], int) for record in records):
        raise ValueError("a line of metrics.jsonl has no step")
    return records


def state_of(folder, last_step, total_steps):
    """Whether a run is finished, running (its lock is held) or stopped, and after which step of how many."""
    if (folder / "README.md").exists():
        return "finished"
    state = "running" if is_locked(folder / ".lock") else "stopped"
    return f"{state}, no step" if last_step is None else f"{state} {last_step}/{total_steps}"


def is_locked(path):
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


# ---- Comparing -------------------------------------------------------------------------------------------------------


def choose_metric(runs, metric):
    """The metric of --metric, else the first headline of a run that all have; None where no run has a step."""
    started = [run for run in runs if run.records]
    if not started:
        return None
    names = set()
    for run in started:
        names.update(*run.records)
    names = sorted(names - {"step"})
    if metric is not None:
        if not any(run.curve(metric) for run in started):
            raise SystemExit(f"error: no run has --metric {metric}; there are {', '.join(names)}")
        return metric
    shared = [name for name in names if all(run.curve(name) for run in started)]
    if len({run.algo for run in started}) > 1:
        shared = [name for name in shared if not name.endswith("loss")]  # which is another quantity in each script
    for run in started:
        if run.headline in shared:
            return run.headline
    headlines = ", ".join(sorted({str(run.headline) for run in started}))
    raise SystemExit(
        f"error: the runs begin with different metrics ({headlines}): choose one with --metric; they share "
        f"{', '.join(shared) or 'none'}"
    )


def grouped(runs):
    """Lists of the runs that differ in their seed alone."""
    groups = {}
    for run in runs:
        flags = run.flags | {"seed": None}
        groups.setdefault(json.dumps([run.algo, flags, run.files], sort_keys=True), []).append(run)
    return list(groups.values())


def differing(mappings):
    """The names that have different values in some of these mappings; a name that is missing is a difference, too."""
    names = {}
    for mapping in mappings:
        names |= mapping
    return [name for name in names if len({json.dumps(mapping.get(name)) for mapping in mappings}) > 1]


def describe(runs):
    """{directory: its algorithm and flags, as far as those of other runs differ}; without flags that some runs lack."""
    one_algo = len({run.algo for run in runs}) == 1
    in_all = set.intersection(*(set(run.flags) for run in runs)) - {"seed"}
    names = [name for name in differing([run.flags for run in runs]) if name in in_all]
    texts = {}
    for run in runs:
        words = [f"--{name.replace('_', '-')} {run.flags[name]}" for name in names]
        texts[run.folder] = ", ".join(words if one_algo else [run.algo, *words])
    return texts


def best_point(curve, metric, lower_is_better):
    """(step, value) of the best value, the first of equal ones."""
    best = min if "loss" in metric or "perplexity" in metric or lower_is_better else max
    return best(curve, key=lambda point: point[1])


def table_rows(groups, metric):
    rows = []
    for number, group in enumerate(groups, 1):
        lasts = []
        bests = []
        for run in group:
            row = {"group": number, "run": run.folder.name, "last": "", "best": ""}
            row |= {"state": run.state, "seed": run.flags.get("seed", "")}
            if curve := run.curve(metric):
                step, value = best_point(curve, metric, run.flags.get("lower_is_better"))
                lasts.append(curve[-1][1])
                bests.append(value)
                row |= {"last": f"{lasts[-1]:.3g}", "best": f"{value:.3g} at {step}"}
            rows.append(row)
        if len(lasts) > 1:
            row = {"group": number, "run": f"mean ± std of {len(lasts)}"}
            for column, values in (("last", lasts), ("best", bests)):
                row[column] = f"{fmean(values):.3g} ± {stdev(values):.2g}"
            rows.append(row | {"state": "", "seed": ""})
    return rows


def draw(groups, metric, texts, path):
    """The mean of each group at each step over the seeds that have reached it, and a band from lowest to highest."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for number, group in enumerate(groups, 1):
            values = {}
            for run in group:
                for step, value in run.curve(metric):
                    values.setdefault(step, []).append(value)
            if not values:
                continue
            steps = sorted(values)
            chosen = [run.folder.name for run in group if not re.fullmatch(DEFAULT_NAME, run.folder.name)]
            label = f"{number}: {', '.join(chosen) or texts[group[0].folder] or group[0].folder.name}"
            if len(group) > 1:
                label += f" ({len(group)} seeds)"
            columns = [values[step] for step in steps]
            axes.plot(steps, [*map(fmean, columns)], marker=".", label=textwrap.fill(visible(label), 60))
            axes.fill_between(steps, [*map(min, columns)], [*map(max, columns)], alpha=0.2, linewidth=0)
        axes.set(xlabel="optimizer step", ylabel=metric)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=120)


# ---- Terminal --------------------------------------------------------------------------------------------------------


def print_table(rows):
    """With as many of the columns, from the left, as the terminal has room for."""
    cells = [[visible(str(cell)) for cell in row] for row in ([*rows[0]], *(row.values() for row in rows))]
    room = shutil.get_terminal_size().columns
    lines = [""] * len(cells)
    for column in zip(*cells, strict=True):
        width = max(map(len, column)) + 2
        if len(lines[0]) + width - 2 > room and lines[0]:
            break
        lines = [line + cell.ljust(width) for line, cell in zip(lines, column, strict=True)]
    print("\n".join(line.rstrip() for line in lines))


def list_row(run):
    curve = run.curve(run.headline)
    headline = f"{run.headline} {curve[-1][1]:.3g}" if curve else ""
    return {"run": run.folder.name, "state": run.state, "headline": headline, "algo": run.algo}


def main(paths, lists, metric, out):
    runs, left_out = read_all([Path(path) for path in paths])
    for sentence in left_out:
        print(visible(sentence))
    if not runs:
        raise SystemExit(f"error: there is no run in {', '.join(paths)}")
    if lists:
        print_table([list_row(run) for run in runs])
        return
    metric = choose_metric(runs, metric)
    groups = grouped(runs)
    texts = describe(runs)
    print(f"\n{metric or 'no run has a step'}")
    print_table(table_rows(groups, metric))
    for number, group in enumerate(groups, 1):
        print(f"group {number}: {visible(texts[group[0].folder]) or 'as all others'}")
    if other_files := differing([run.files for run in runs]):
        print(f"files that differ: {', '.join(other_files)}")
    other = {*differing([run.flags for run in runs]), *other_files}
    if "reward" in other and re.search("reward|score", metric or ""):
        print(f"the runs have different rewards, which {metric} does not compare")
    if metric and out:
        draw(groups, metric, texts, out)
        print(f"picture {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["runs"], metavar="RUN", help="a run, or a folder of runs [runs]")
    parser.add_argument("--list", action="store_true", dest="lists", help="only say what lies there")
    parser.add_argument("--metric", help="a metric that the runs share")
    parser.add_argument("--out", help="draw the curves into this picture, such as all.png")
    main(**vars(parser.parse_args()))
