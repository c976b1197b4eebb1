"""Random mutants: which small changes of the code does the default `pytest` not see?

    pip install "pytest-cov<7"
    pytest --cov=algos --cov=common --cov-context=test --cov-report=    # writes .coverage: which test runs which line
    python tests/mutants.py --jobs 2     # plants each mutant in a copy, and runs the tests up to the first failure

A fixed sample: PER_FILE of every file of algos/ and common/, drawn by its name. Tests that run the line come first.
After --limit seconds the mutant counts as not killed. mutants.csv keeps what was found; the same command goes on.
"""

import argparse
import ast
import copy
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planted.planted import first_failure
from benchmarks.tables import ROOT, read_csv, write_csv

PER_FILE = 3
COLUMNS = ["file", "line", "before", "after", "killed", "test", "seconds"]
FILES = sorted(ROOT.glob("algos/*.py")) + sorted(p for p in ROOT.glob("common/**/*.py") if p.stat().st_size)
RESULTS = ROOT / "tests/mutants.csv"
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def mutated(node):
    """(kind, a changed copy of the node or "pass"), ... ."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(node.ops[0])]()
        yield "comparison", new
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
        yield type(node).__name__, new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", new.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "bool", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "number", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in (None, "strict"):
        del new.keywords[-1]
        yield "argument", new
    elif isinstance(node, ast.Raise) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield type(node).__name__, "pass"
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition", ast.Constant(False)


def mutants(path):
    """The sample of a file: (line, text before, text after, source). Kinds are drawn before places."""
    text = path.read_text()
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places = {}
    nodes = list(ast.walk(ast.parse(text)))
    skipped = set()
    for node in nodes:
        if getattr(node, "annotation", None):
            skipped.update(ast.walk(node.annotation))
        if isinstance(node, ast.keyword) and node.arg == "strict":
            skipped.add(node.value)  # of zip(), where nothing differs unless the code is wrong
    for node in nodes:
        for kind, new in mutated(node) if node not in skipped else ():
            places.setdefault(kind, []).append((node.test if kind == "condition" else node, new))
    draw = random.Random(path.name)
    found = {}
    while len(found) < min(PER_FILE, sum(map(len, places.values()))):
        node, new = draw.choice(places[draw.choice(sorted(places))])
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        after = new if isinstance(new, str) else f"({ast.unparse(new)})"
        changed = (source[:begin] + after.encode() + source[end:]).decode()
        found[begin, after] = node.lineno, source[begin:end].decode(), after, changed
    return sorted(found.values())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """As a plugin of the tests of a mutant: first those that run its line, and of these the ones of its module."""
    from conftest import FIRST
    from coverage import CoverageData

    path, _, line = os.environ["MUTANT"].rpartition(":")
    data = CoverageData(os.environ["COVERAGE_FILE"])
    data.read()
    lines = data.contexts_by_lineno(path)
    first = max((number for number in lines if number <= int(line)), default=0)  # of the statement
    running = {context.partition("|")[0] for context in lines.get(first, ())}
    places = {item: (item.nodeid not in running, Path(path).stem not in item.path.stem) for item in items}
    items.sort(key=lambda item: (*places[item], item.path.stem in FIRST))  # the files that take longest


def try_mutant(path, mutant, limit):
    """Its row of mutants.csv."""
    line, before, after, changed = mutant
    name = str(path.relative_to(ROOT))
    known = f"MUTANT={path}:{line}", f"COVERAGE_FILE={ROOT / '.coverage'}"
    launcher = ["env", "PYTHONPATH=tests", *known, "timeout", str(limit)]
    status, test, seconds = first_failure(name, changed, ["tests"], "-p", "mutants", launcher=launcher)
    killed = {0: "no", 1: "yes", 124: "no, in the time"}.get(status, f"pytest ended with {status}")
    values = [name, line, before, after, killed, test if killed == "yes" else "", seconds]
    return dict(zip(COLUMNS, values, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=600, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    args = parser.parse_args()
    sample = {}  # key: the mutant
    for path in FILES:
        for mutant in mutants(path):
            sample[str(path.relative_to(ROOT)), str(mutant[0]), *mutant[1:3]] = path, mutant
    known = {tuple(row[name] for name in COLUMNS[:4]): row for row in read_csv(RESULTS)}
    waiting = [key for key in sample if key not in known]
    print(f"{len(waiting)} of {len(sample)} mutants to plant", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(lambda key: try_mutant(*sample[key], args.limit), waiting)
        for key, row in zip(waiting, found, strict=True):
            known[key] = row
            write_csv(RESULTS, [known[key] for key in sample if key in known])
            print(*row.values(), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
