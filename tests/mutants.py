"""Random mutants: which small changes of the code does the default `pytest` not see?

    pip install coverage
    python tests/mutants.py cover   # which test runs which line, and how long it takes: one run of all tests
    python tests/mutants.py run     # plants each mutant, and runs the tests of its line up to the first failure

A fixed sample: PER_FILE of every file of algos/ and common/, drawn by its name. Tests that run few lines in little time
come first; after --limit seconds the mutant counts as not killed. mutants.csv keeps what was found; `run` goes on.
"""

import argparse
import ast
import copy
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planted.planted import copy_repository, first_failure
from benchmarks.tables import ROOT, read_csv, write_csv

PER_FILE = 7
COLUMNS = ["file", "line", "before", "after", "killed", "test", "seconds", "tests"]
FILES = sorted(ROOT.glob("algos/*.py")) + sorted(p for p in ROOT.glob("common/**/*.py") if p.stat().st_size)
RESULTS = ROOT / "tests/mutants.csv"
COVERED = Path(tempfile.gettempdir()) / "plainrl-mutants.json"
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


# ---- Mutants ---------------------------------------------------------------------------------------------------------


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
    for node in nodes:
        for kind, new in mutated(node) if node not in skipped else ():
            places.setdefault(kind, []).append((node.test if kind == "condition" else node, new))
    draw = random.Random(path.name)
    found = {}
    while len(found) < PER_FILE:
        node, new = draw.choice(places[draw.choice(sorted(places))])
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        after = new if isinstance(new, str) else f"({ast.unparse(new)})"
        changed = (source[:begin] + after.encode() + source[end:]).decode()
        found[begin, after] = node.lineno, source[begin:end].decode(), after, changed
    return sorted(found.values())


# ---- Coverage --------------------------------------------------------------------------------------------------------


def pytest_configure(config):
    """As a plugin of `cover`."""
    if "MUTANTS" in os.environ:
        config.pluginmanager.register(Cover(os.environ["MUTANTS"]))


class Cover:
    """Contexts of coverage are the tests' names, in the processes that they start, too."""

    def __init__(self, folder):
        import coverage
        import harness

        self.folder = folder
        self.test = ""
        self.seconds = {}
        sources = [f"{os.getcwd()}/algos", f"{os.getcwd()}/common"]
        options = {"data_file": f"{folder}/data", "data_suffix": True, "source": sources}
        self.measured = coverage.Coverage(**options)
        self.measured.start()
        begin = f'import coverage\n    c = coverage.Coverage(**{options}, context=job["env"]["TEST"])\n    c.start()\n'
        code = harness.SERVER.replace("    try:\n", f"    {begin}    try:\n", 1)
        harness.SERVER = code.replace("sys.stdout.flush()", "c.stop(); c.save(); sys.stdout.flush()")
        environment = harness.environment

        def with_name(work, **more):
            return environment(work, TEST=self.test, **more)

        harness.environment = with_name

    def pytest_runtest_logstart(self, nodeid):
        self.test = nodeid
        self.measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report):
        seconds = math.inf if report.failed else report.duration  # what fails without a mutant tells nothing
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + seconds

    def pytest_unconfigure(self):
        self.measured.stop()
        self.measured.save()
        Path(self.folder, f"seconds-{os.getpid()}.json").write_text(json.dumps(self.seconds))


def cover():
    """Writes COVERED: {"lines": {file: {line: [test]}}, "seconds": {test: seconds}}, lines of the files as they are."""
    import coverage

    folder = Path(tempfile.mkdtemp())
    code = folder / "code"
    copy_repository(code)
    environment = os.environ | {"MUTANTS": str(folder), "PYTHONPATH": f"{code}/tests"}
    subprocess.run([sys.executable, "-B", "-m", "pytest", "-p", "mutants"], cwd=code, env=environment)
    measured = coverage.Coverage(str(folder / "data"))
    measured.combine([str(folder)])
    seconds = {}
    for path in folder.glob("seconds-*.json"):
        for test, value in json.loads(path.read_text()).items():
            seconds[test] = max(value, seconds.get(test, 0))
    passed = {test for test, value in seconds.items() if value < math.inf}
    lines = {}
    data = measured.get_data()
    for path in data.measured_files():
        contexts = data.contexts_by_lineno(path)
        every = set().union(*contexts.values())
        found = {}
        for line, tests in contexts.items():
            run_here = every if "" in tests else set(tests)  # "": at the import
            found[line] = sorted(run_here & passed)
        lines[str(Path(path).relative_to(code))] = found
    COVERED.write_text(json.dumps({"lines": lines, "seconds": {test: seconds[test] for test in passed}}))


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """As a plugin of `run`: tests in the order in which they are named."""
    places = {name: place for place, name in enumerate(config.args)}
    items.sort(key=lambda item: places.get(item.nodeid, 0))


def tests_of(name, line, covered):
    """The tests that run a line, those first that run few lines in little time."""
    tests = covered["lines"].get(name, {}).get(str(line), [])
    cost = {test: covered["seconds"][test] * covered["sizes"][test] for test in tests}
    return sorted(tests, key=cost.get)


def try_mutant(path, mutant, tests, limit):
    """Its row of mutants.csv."""
    line, before, after, changed = mutant
    row = dict(zip(COLUMNS, [str(path.relative_to(ROOT)), line, before, after, "no", "", 0, len(tests)], strict=True))
    if tests:
        launcher = ["env", "PYTHONPATH=tests", "timeout", str(limit)]
        found = first_failure(row["file"], changed, tests, "-p", "mutants", launcher=launcher)
        status, test, row["seconds"] = found
        row["killed"] = {0: "no", 124: "no, in the time"}.get(status, "yes")
        if row["killed"] == "yes":
            row["test"] = test
    return row


def run(limit, jobs):
    """Tries the mutants that mutants.csv does not have, or whose killer is no more; each row is written at once."""
    covered = json.loads(COVERED.read_text())
    covered["sizes"] = dict.fromkeys(covered["seconds"], 1)
    for lines in covered["lines"].values():
        for tests in lines.values():
            for test in tests:
                covered["sizes"][test] += 1
    sample = {}  # key: the mutant
    for path in FILES:
        for mutant in mutants(path):
            sample[str(path.relative_to(ROOT)), str(mutant[0]), *mutant[1:3]] = path, mutant
    known = {}
    if RESULTS.exists():
        known = {tuple(row[name] for name in COLUMNS[:4]): row for row in read_csv(RESULTS)}
    kept = [key for key in sample if key in known and known[key]["test"] in ("", *covered["seconds"])]
    known = {key: known[key] for key in kept}
    waiting = [key for key in sample if key not in known]
    print(f"{len(waiting)} of {len(sample)} mutants to plant", flush=True)

    def tried(key):
        path, mutant = sample[key]
        return key, try_mutant(path, mutant, tests_of(key[0], mutant[0], covered), limit)

    with ThreadPoolExecutor(jobs) as pool:
        for key, row in pool.map(tried, waiting):
            known[key] = row
            write_csv(RESULTS, COLUMNS, [known[key] for key in sample if key in known])
            print(*row.values(), sep=" | ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cover", "run"])
    parser.add_argument("--limit", type=float, default=300, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    args = parser.parse_args()
    if args.what == "cover":
        cover()
    else:
        run(args.limit, args.jobs)


if __name__ == "__main__":
    main()
