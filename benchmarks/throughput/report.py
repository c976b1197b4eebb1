"""What README.md of this folder, and that of the repository, say of results.csv. `check.py --write` writes it
there, and `check.py` fails where it does not follow."""

import itertools
import re
import sys
from pathlib import Path
from statistics import median

from benchmarks.tables import markdown, read_csv
from benchmarks.throughput.run import OURS, SIDES

RESULTS = Path(__file__).with_name("results.csv")
TOLERANCE = 1e-3


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


def peers_of(runs, side):
    """{peer's side: ratios} of the sides that ours is compared with: of its precision and layers."""
    found = {}
    for name in runs:
        if name not in OURS and precision(name) == precision(side) and ("2-layers" in name) == ("2-layers" in side):
            found[name] = ratios(runs, side, name)
    return {name: times for name, times in found.items() if times}


def compared():
    """(name, side, device, its runs, the peer's fastest side, ratios to it, ratios to its defaults) of each
    comparison that was measured."""
    measured = {}
    for row in read_csv(RESULTS):
        runs = measured.setdefault(row["device"], {}).setdefault(row["algorithm"], {})
        runs.setdefault(row["mode"], {})[row["repeat"]] = row
    for algorithm, side, device in itertools.product(SIDES, OURS, measured):
        title = "sft packed" if algorithm == "sft" else algorithm
        if "2-layers" in side:
            title += ", 2 of 12 layers"
        runs = measured[device].get(algorithm, {})
        peers = peers_of(runs, side)
        if peers:
            fastest = min(peers, key=lambda peer: median(peers[peer]))
            of_defaults = [times for peer, times in peers.items() if peer.endswith("defaults")]
            yield title, side, device, runs, fastest, peers[fastest], of_defaults[0] if of_defaults else []


def table():
    rows = []
    for title, side, device, runs, peer, times, of_defaults in compared():
        own = list(runs[side].values())
        other = list(runs[peer].values())
        memories = [median(float(row["peak_memory_mb"]) for row in found) for found in (own, other)]
        [trl] = re.findall(r"trl (\S+?)(?:;|$)", other[0]["versions"])
        row = {"script": title, "precision": precision(side)}
        words = device.split()
        row["device"] = f"{words[0]} {words[1 if words[0] == 'NVIDIA' else -1]}"
        row |= {"times": spread(times), "fastest peer": f"TRL {trl}: {peer}"}
        row |= {"times its defaults": spread(of_defaults), "memory": f"{memories[0] / memories[1]:.2f}"}
        row["fraction of GEMM peak"] = spread([float(row["fraction"]) for row in own])
        rows.append(row | {"runs": f"{len(times)}"})
    return markdown(rows)


def same_work():
    """How far the losses and gradient norms of the first step of all sides in float32 agree, a line an algorithm."""
    groups = {}
    for row in read_csv(RESULTS):
        if row["loss"] and precision(row["mode"]) == "fp32":
            groups.setdefault((row["algorithm"], row["device"]), []).append(row)
    gaps = {}
    for (algorithm, _), rows in groups.items():
        for column in ("loss", "grad_norm"):
            values = [float(row[column]) for row in rows]
            gap = (max(values) - min(values)) / max(map(abs, values))
            if gap > TOLERANCE:
                sys.exit(f"not the same work in {algorithm}: first losses or gradients differ by {gap:.0e}")
            gaps[algorithm] = max(gap, gaps.get(algorithm, 0.0))
    return [f"- {algorithm}: {gap:.0e}" for algorithm, gap in gaps.items()]


def quoted():
    """The table of speed in README.md of the repository: a row a script, with its times on each device."""
    headings = {
        "AMD EPYC, AVX2": "CPU with AVX2",
        "AMD EPYC, AVX512": "CPU with AVX-512, older code",
        "defaults": "the same, TRL's defaults",
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
