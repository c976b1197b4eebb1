"""How seconds and memory of an iteration of GRPO grow with its sizes, beside TRL's at both ends.

    python benchmarks/throughput/growth.py          # needs the environment of TRL 1.16 (make_peer_env.sh)

The work is that of grpo in language.py: a rollout of given responses and one update of full float32 weights. One size
at a time leaves BASE. A point is one process, its seconds the median of its iterations but the first. Rows go to
growth.csv; what is there of this commit is not measured again.
"""

import argparse
import importlib
import json
import math
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import markdown, read_csv
from benchmarks.throughput.run import HERE, REPEAT_ME, commit, file_of, python_of, start

RESULTS = HERE / "growth.csv"
BASE = {"layers": 4, "width": 384, "vocabulary": 16000, "prompts": 4, "length": 1}
AXES = {
    "prompts": [2, 4, 8, 16],  # of four responses each
    "length": [1, 2, 4, 8],  # times 16 to 64 tokens of a prompt, 16 to 96 of a response
    "width": [192, 384, 768, 1536],
    "vocabulary": [4000, 16000, 64000, 256000],
}
SYSTEMS = {"plainrl": "fp32", "TRL": "fp32-same-flags"}


def points():
    """(axis, value, system) of every measurement."""
    for axis, values in AXES.items():
        for value in values:
            for system in SYSTEMS:
                if system == "plainrl" or value in (values[0], values[-1]):
                    yield axis, value, system


def measure(axis, value, system):
    """One point, in this process: appends its row."""
    import language
    import measurement

    measurement.wait_for_quiet()
    ticks = measurement.cpu_ticks()
    module = importlib.import_module(file_of("grpo", SYSTEMS[system]))
    with tempfile.TemporaryDirectory() as model:
        language.prepare(Path(model), "grpo")
        columns, _ = module.measure("grpo", SYSTEMS[system], model)
    if measurement.share("steal", ticks) > measurement.MOST_STEAL and not os.environ.get("FORCE"):
        sys.exit(REPEAT_ME)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"axis": axis, "value": value, "system": system, "seconds": f"{columns['seconds']:.3f}"}
    row |= {"rollout": f"{columns['rollout']:.3f}" if "rollout" in columns else "", "memory_mb": f"{memory:.0f}"}
    row |= measurement.machine()
    print(row, flush=True)
    measurement.append(RESULTS, row)


def stored():
    return read_csv(RESULTS) if RESULTS.exists() else []


def slope(values, figures):
    """The exponent between two points: the slope of log(figure) over log(value)."""
    return math.log(figures[1] / figures[0]) / math.log(values[1] / values[0])


def table():
    """The table of the page: a row a point, then the exponents of an axis from its first size to the second, and from
    the last but one to the last."""
    heads = ["size", "rollout s", "update s", "MB", "TRL: both s", "TRL: MB", "times"]
    found = {(row["axis"], int(row["value"]), row["system"]): row for row in stored()}
    rows = []
    for axis, values in AXES.items():
        figures = []
        for value in values:
            ours, peer = (found.get((axis, value, system)) for system in SYSTEMS)
            both = float(ours["seconds"])
            rollout = float(ours["rollout"])
            figures.append((rollout, both - rollout, float(ours["memory_mb"])))
            cells = [f"{axis} {value}", f"{rollout:.2f}", f"{both - rollout:.2f}", ours["memory_mb"]]
            if peer:
                cells += [peer["seconds"][:-1], peer["memory_mb"], f"{float(peer['seconds']) / both:.2f}"]
            rows.append(cells + [""] * (len(heads) - len(cells)))
        exponents = []
        for column in zip(*figures, strict=True):
            exponents.append(f"{slope(values[:2], column[:2]):.2f}, {slope(values[-2:], column[-2:]):.2f}")
        rows.append([f"{axis}: exponents", *exponents, "", "", ""])
    return markdown(heads, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # of the commands that this one starts
    options = parser.parse_args()
    if options.one:
        axis, value, system = options.one
        return measure(axis, int(value), system)
    code = commit()
    for axis, value, system in points():
        if (axis, str(value), system, code) in [(r["axis"], r["value"], r["system"], r["commit"]) for r in stored()]:
            continue
        command = [python_of(file_of("grpo", SYSTEMS[system])), __file__, "--one", axis, str(value), system]
        sizes = json.dumps(BASE | {axis: value})
        print(f"SIZES='{sizes}'", *command, flush=True)
        environment = {"OMP_NUM_THREADS": "2", "ITERATIONS": "4", "COMMIT": code, "SIZES": sizes}
        environment = os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""}
        start(command, environment)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
