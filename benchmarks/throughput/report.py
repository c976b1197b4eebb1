"""What README.md of this folder, and that of the repository, say of results.csv. `check.py --write` writes it
there, and `check.py` fails where it does not follow."""

import itertools
import sys
from pathlib import Path
from statistics import median

from benchmarks.tables import markdown, read_csv
from benchmarks.throughput.run import OURS, SIDES

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-3


def peers_of(runs, side):
    """The sides of the peer that ours is compared with: of its precision and layers."""
    peers = [name for name in runs if name not in OURS and precision(name) == precision(side)]
    return [name for name in peers if ("2-layers" in name) == ("2-layers" in side)]


def stored():
    return read_csv(HERE / "results.csv")


def runs_of(rows, device, algorithm):
    """{side: {repeat: row}}"""
    runs = {}
    for row in rows:
        if (row["device"], row["algorithm"]) == (device, algorithm):
            runs.setdefault(row["mode"], {})[row["repeat"]] = row
    return runs


def precision(side):
    return "bf16" if "bf16" in side else "fp32"


def spread(values, digits=2):
    """Median and, in brackets, smallest and largest; nothing of no values."""
    if not values:
        return ""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def ratios(runs, side, other):
    """Seconds of `other` over those of `side`, for each repeat that both have."""
    both = [repeat for repeat in runs.get(side, ()) if repeat in runs.get(other, ())]
    return [float(runs[other][repeat]["seconds"]) / float(runs[side][repeat]["seconds"]) for repeat in both]


def fastest(runs, side):
    """(seconds of a peer's side over those of ours for each repeat, the peer's side): of the peer's fastest one."""
    found = [(ratios(runs, side, peer), peer) for peer in peers_of(runs, side)]
    return min((pair for pair in found if pair[0]), key=lambda pair: median(pair[0]), default=([], ""))


def beside_defaults(runs, side):
    """Seconds of the peer's defaults over those of our side for each repeat, if they were measured."""
    for peer in peers_of(runs, side):
        if peer.endswith("defaults"):
            return ratios(runs, side, peer)
    return []


def system(row):
    """TRL with its version."""
    [version] = [version for version in row["versions"].split("; ") if version.startswith("trl ")]
    return version.replace("trl", "TRL")


def compared():
    """(name, side, device, its runs, the peer's fastest side, ratios to it, ratios to its defaults) of each
    comparison that was measured."""
    rows = stored()
    devices = dict.fromkeys(row["device"] for row in rows)  # in the order of the file
    for algorithm, side, device in itertools.product(SIDES, OURS, devices):
        title = "sft packed" if algorithm == "sft" else algorithm
        if "2-layers" in side:
            title += ", 2 of 12 layers"
        runs = runs_of(rows, device, algorithm)
        times, peer = fastest(runs, side)
        if times:
            yield title, side, device, runs, peer, times, beside_defaults(runs, side)


def table():
    """The table at the top of the page: a row a comparison and device."""
    rows = []
    for title, side, device, runs, peer, times, of_defaults in compared():
        words = device.split()
        own = list(runs[side].values())
        other = list(runs[peer].values())
        memories = [median(float(row["peak_memory_mb"]) for row in found) for found in (own, other)]
        row = {"script": title, "precision": precision(side)}
        row["device"] = f"{words[0]} {words[1 if words[0] == 'NVIDIA' else -1]}"
        row |= {"times": spread(times), "fastest peer": f"{system(other[0])}: {peer}"}
        row |= {"times its defaults": spread(of_defaults), "memory": f"{memories[0] / memories[1]:.2f}"}
        row["fraction of GEMM peak"] = spread([float(row["fraction"]) for row in own])
        rows.append(row | {"runs": f"{len(times)}"})
    return markdown(rows)


def same_work():
    """How far the losses and gradient norms of the first step of all sides in float32 agree, a line an algorithm."""
    groups = {}
    for row in stored():
        if row["loss"] and precision(row["mode"]) == "fp32":
            groups.setdefault((row["algorithm"], row["device"]), []).append(row)
    gaps = {}
    for (algorithm, _), rows in groups.items():
        for column in ("loss", "grad_norm"):
            values = [float(row[column]) for row in rows]
            gap = (max(values) - min(values)) / max(map(abs, values))
            gaps[algorithm] = max(gap, gaps.get(algorithm, 0.0))
    for algorithm, gap in gaps.items():
        if gap > TOLERANCE:
            sys.exit(f"not the same work in {algorithm}: first losses or gradients differ by {gap:.0e}")
    return [f"- {algorithm}: {gap:.0e}" for algorithm, gap in gaps.items()]


def quoted():
    """The table of speed in README.md of the repository: a row a script, with its times on each device."""
    headings = {
        "AMD EPYC, AVX512": "CPU with AVX-512",
        "defaults": "the same, TRL's defaults",
        "AMD EPYC, AVX2": "CPU with AVX2, older code",
        "NVIDIA H100 80GB HBM3": "H100, older code",
    }
    rows = {}
    for title, _, device, _, _, times, of_defaults in compared():
        if "layers" in title:
            continue
        row = rows.setdefault(title, {"script": title} | dict.fromkeys(headings.values(), ""))
        row[headings[device]] = spread(times)
        if device == "AMD EPYC, AVX512":
            row[headings["defaults"]] = spread(of_defaults)
    return markdown([*rows.values()])
