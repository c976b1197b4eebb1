"""Tables of the page that report.py builds, from rows of the CSV files."""

import sys
from statistics import median


def spread(values, digits):
    """Median and, in brackets, smallest and largest."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    if len(values) == 1:
        return middle
    return f"{middle} ({low} to {high})"


def markdown(lines):
    """A table of lists of cells, the first of which is the heading, without columns that are empty."""
    used = [i for i in range(len(lines[0])) if any(cells[i] for cells in lines[1:])]
    lines = [[cells[i] for i in used] for cells in lines]
    lines.insert(1, ["---"] * len(used))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def precision(mode):
    """That of the products of a mode."""
    if "bf16" in mode:
        return "bf16"
    return "fp32"


def by_mode(rows):
    """{mode: {repeat: row}}"""
    runs = {}
    for row in rows:
        runs.setdefault(row["mode"], {})[row["repeat"]] = row
    return runs


def ratios(runs, mode, other, column="seconds"):
    """A column of `other` over that of `mode`, for each repeat that both have."""
    both = [repeat for repeat in runs.get(mode, ()) if repeat in runs.get(other, ())]
    return [float(runs[other][repeat][column]) / float(runs[mode][repeat][column]) for repeat in both]


def mode_table(rows, texts, shown, against, column="seconds"):
    """(table, notes) of the modes of a CSV file.

    texts: {mode: what it is}, in the order of the table. shown: {column of the file: (heading, digits)}. against:
    {heading: function(mode) -> the mode whose column is divided by that of the row}.
    """
    runs = by_mode(rows)
    table = [["system", "mode", "runs", *(heading for heading, _ in shown.values()), *against]]
    notes = {}
    for mode, text in texts.items():
        if mode not in runs:
            continue
        found = list(runs[mode].values())
        cells = [found[0]["system"], mode, str(len(found))]
        for name, (_, digits) in shown.items():
            cells.append(spread([float(row[name]) for row in found], digits))
        for other_of in against.values():
            other = other_of(mode)
            times = ratios(runs, mode, other, column)
            if other == mode:
                cells.append("1")
            elif times:
                cells.append(spread(times, 2))
            else:
                cells.append("")
        table.append(cells)
        notes.setdefault(text, []).append(mode)
    lines = [f"- {', '.join(modes)}: {text}" for text, modes in notes.items()]
    return markdown(table), "\n".join(lines)


def fastest(runs, mode, peers):
    """(seconds of a peer's mode over those of ours for each repeat, the peer's mode): of the peer's fastest mode."""
    found = [(ratios(runs, mode, peer), peer) for peer in peers]
    return min((pair for pair in found if pair[0]), key=lambda pair: median(pair[0]), default=([], ""))


def agreement(groups, figures, tolerance):
    """How far the runs of a group agree, as lines; exits where those of a group in float32 did not do the same work.

    groups: {name: rows}. figures: {what: function(row) -> number}, of the first step.
    """
    lines = []
    for name, rows in groups.items():
        gaps = {}
        for what, figure in figures.items():
            values = [figure(row) for row in rows]
            gaps[what] = (max(values) - min(values)) / max(1e-9, *map(abs, values))
        if "fp32" in name and max(gaps.values()) > tolerance:
            sys.exit(f"not the same work in {name}: {gaps}")
        text = ", ".join(f"{what} {gap:.0e}" for what, gap in gaps.items()).replace("0e+00", "0")
        lines.append(f"- {name}, {len(rows)} runs: {text}")
    return "\n".join(lines)


def first_of(column):
    """function(row) -> the first number of a column."""

    def number(row):
        return float(row[column].split()[0])

    return number


def grouped(rows, name_of):
    """{name: rows}"""
    groups = {}
    for row in rows:
        groups.setdefault(name_of(row), []).append(row)
    return groups


def distinct(rows, column):
    """The values of a column, each once, as text."""
    return ", ".join(sorted({row[column] for row in rows if row.get(column)}))


def provenance(rows):
    """Where and with what the rows of a file were measured, as a paragraph."""
    text = f"Measured on {distinct(rows, 'device')}, {distinct(rows, 'threads')} threads"
    if distinct(rows, "commit"):
        text += f", commit {distinct(rows, 'commit')}"
    if "peak_gflops" in rows[0]:
        peaks = {}
        for row in rows:
            peaks.setdefault(precision(row["mode"]), []).append(float(row["peak_gflops"]))
        text += "; GEMM peak " + ", ".join(f"{kind} {spread(found, 0)}" for kind, found in peaks.items()) + " GFLOP/s"
    text += f"; load average {spread([float(row['loadavg']) for row in rows], 1)}"
    steals = [float(row["steal"]) for row in rows if row.get("steal")]
    if len(steals) == len(rows):
        text += f"; steal at most {100 * max(steals):.1f} %"
    else:
        text += f"; steal not recorded in {len(rows) - len(steals)} of {len(rows)} runs"
    lines = []
    for versions, found in grouped(rows, lambda row: row["versions"]).items():
        lines.append(f"- {distinct(found, 'system')}: {versions}")
    return "\n".join([text + ".", "", *lines])
