"""Mutants: how many small changes of algos/ and common/ does the default run find?

    python benchmarks/planted/mutants.py --cover map.json   # writes which tests run which line, and their seconds
    python benchmarks/planted/mutants.py --try map.json     # tries the mutants without a row in mutants.csv
    python benchmarks/planted/mutants.py --table            # prints the shares by file, from mutants.csv

A mutant is one change within a function: another comparison, `and` for `or`, a test that is False, a number plus one,
a flipped boolean, another sign, `raise` left out. Each file gives PER_FILE of them, those whose hashes come first: an
edit elsewhere leaves the others what they are. For each, the tests that run its line run, quickest first, until one
fails, for at most LIMIT seconds. Needs the packages coverage and pytest-cov.
"""

import argparse
import ast
import csv
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planted.planted import copy_repository, import_libraries  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "mutants.csv"
COLUMNS = ["file", "function", "line", "old", "new", "tests", "killed", "by", "seconds"]
PER_FILE = 7
LIMIT = 120
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


# ---- Mutants ---------------------------------------------------------------------------------------------------------


def changes(node):
    """[(node that is replaced, its new text)] of a node of a syntax tree."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [(node, ast.unparse(ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)))]
    if isinstance(node, ast.BoolOp):
        return [(node, ast.unparse(ast.BoolOp(OTHER[type(node.op)](), node.values)))]
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER and not is_text(node.left) and not is_text(node.right):
        return [(node, ast.unparse(ast.BinOp(node.left, OTHER[type(node.op)](), node.right)))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [(node, ast.unparse(node.operand))]
    if isinstance(node, ast.If):
        return [(node.test, "False")]
    if isinstance(node, ast.Raise):
        return [(node, "pass")]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [(node, str(not node.value))]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [(node, str(node.value + 1))]
    return []


def is_text(node):
    """Whether a node is a text, as in a path, or a list."""
    return isinstance(node, ast.JoinedStr | ast.List) or isinstance(getattr(node, "value", None), str)


def nodes_of(function):
    """The nodes of a function, but for texts with values in them, whose parts have no place of their own, and
    strict=True, which changes nothing where lengths are equal."""
    waiting = [function]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"
            if not isinstance(child, ast.JoinedStr) and not is_strict:
                waiting.append(child)


def mutants_of(path):
    """The mutants of a file (relative to ROOT): {column of mutants.csv: value}, and "text", the changed file."""
    text = (ROOT / path).read_text()
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    found = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.Lambda):
            continue
        for node in nodes_of(function):
            for replaced, new in changes(node):
                begin = begins[replaced.lineno - 1] + characters(lines[replaced.lineno - 1], replaced.col_offset)
                end = begins[replaced.end_lineno - 1] + characters(
                    lines[replaced.end_lineno - 1], replaced.end_col_offset
                )
                name = getattr(function, "name", "lambda")
                mutant = {"file": str(path), "function": name, "old": text[begin:end], "new": f"({new})"}
                if new == "pass":
                    mutant["new"] = new
                mutant["line"] = lines[replaced.lineno - 1].strip()
                mutant["number"] = replaced.lineno
                mutant["text"] = text[:begin] + mutant["new"] + text[end:]
                found[begin, end, new] = mutant  # a nested function's are those of its own
    return list(found.values())


def characters(line, offset):
    """Characters of a line before an offset in bytes."""
    return len(line.encode()[:offset].decode())


def key(mutant):
    """What makes a mutant the same one after an edit elsewhere."""
    return tuple(mutant[name] for name in ("file", "function", "line", "old", "new"))


def sample():
    """PER_FILE mutants of each file."""
    chosen = []
    for folder in ("algos", "common"):
        for path in sorted((ROOT / folder).glob("*.py")):
            by_key = {key(mutant): mutant for mutant in mutants_of(path.relative_to(ROOT))}
            chosen += [by_key[name] for name in sorted(by_key, key=hash_of)[:PER_FILE]]
    return chosen


def hash_of(name):
    """The place of a mutant in the order of its file, by its key."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


# ---- Coverage --------------------------------------------------------------------------------------------------------

# What is put into the harness of a copy, so that runs in processes of their own are measured, too.
MEASURED = """
    import coverage
    measured = coverage.Coverage(data_file=os.environ["COVER_FILE"], data_suffix=True, context=os.environ["COVER_TEST"],
                                 source=os.environ["COVER_SOURCE"].split(","), config_file=False)
    measured.start()
    exec(job["patch"], {})"""
ENVIRONMENT = """return keep | {name: os.environ[name] for name in os.environ if name.startswith("COVER")} | {
        "COVER_TEST": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]} | fixed |"""


def cover(path):
    """Writes {"lines": {file: {line: tests}}, "seconds": {test: seconds}} of the default run to a file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        (folder / "shared").mkdir(exist_ok=True)
        harness = folder / "tests/harness.py"
        text = harness.read_text()
        for old, new in (
            ('\n        exec(job["patch"], {})', MEASURED.replace("\n", "\n    ")),
            ("    os._exit(code)\n", "    measured.stop()\n    measured.save()\n    os._exit(code)\n"),
            ("return keep | fixed |", ENVIRONMENT),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        harness.write_text(text)
        (folder / ".coveragerc").write_text("[run]\nsource = algos,common\npatch = subprocess\n")
        environment = os.environ | {
            "COVER_FILE": str(folder / ".coverage"),
            "COVER_SOURCE": f"{folder}/algos,{folder}/common",
        }
        command = "pytest --cov --cov-config=.coveragerc --cov-context=test --cov-report= --durations=0 -vv".split()
        printed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout
        subprocess.run(["coverage", "combine", "--append"], cwd=folder, env=environment)
        print(printed[-3000:])
        import coverage

        data = coverage.CoverageData(str(folder / ".coverage"))
        data.read()
        lines = defaultdict(dict)
        for file in data.measured_files():
            if Path(file).is_relative_to(folder):
                for line, contexts in data.contexts_by_lineno(file).items():
                    tests = sorted({context.partition("|")[0] for context in contexts if context})
                    lines[str(Path(file).relative_to(folder))][line] = tests
    seconds = defaultdict(float)
    for duration, test in re.findall(r"(?m)^ *([\d.]+)s (?:call|setup) +(tests/.*)$", printed):
        seconds[test] += float(duration)
    Path(path).write_text(json.dumps({"lines": lines, "seconds": seconds}))


# ---- Runs ------------------------------------------------------------------------------------------------------------


class Chosen:
    """A plugin of pytest: these tests in this order, until LIMIT seconds have passed."""

    def __init__(self, tests):
        self.places = {test: place for place, test in enumerate(tests)}
        self.failed = None

    def pytest_collection_modifyitems(self, config, items):
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])

    pytest_collection_modifyitems.trylast = True

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def run_chosen(folder, tests, send):
    """Sends the first of the tests that fails, or "" where none does."""
    import pytest

    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    chosen = Chosen(tests)
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:cov", "-o", "addopts=", "-x", "-q", "--tb=no"]
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    status = pytest.main([*options, "-m", "not slow", *files], plugins=[chosen])
    send.send(chosen.failed or ("" if status in (0, 5) else f"pytest ended with {int(status)}"))


def try_mutant(job):
    """The row of mutants.csv."""
    mutant, tests = job
    row = {name: mutant.get(name, "") for name in COLUMNS} | {"tests": len(tests), "killed": "no", "by": ""}
    start = time.monotonic()
    if tests:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_repository(folder)
            (folder / mutant["file"]).write_text(mutant["text"])
            receive, send = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=run_chosen, args=(folder, tests, send))
            process.start()
            if receive.poll(LIMIT):
                row["by"] = receive.recv()
            else:
                row["by"] = f"none in {LIMIT} s"
            process.kill()
            process.join()
    if row["by"].startswith(("tests/", "pytest")):
        row["killed"] = "yes"
    row["seconds"] = f"{time.monotonic() - start:.0f}"
    return row


def results():
    """{key: row} of mutants.csv."""
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        return {key(row): row for row in csv.DictReader(file)}


def write_results(rows):
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def try_all(path, jobs):
    """Tries the mutants of the sample without a result, and writes each result at once."""
    covered = json.loads(Path(path).read_text())
    known = results()
    chosen = sample()
    known = {key(mutant): known[key(mutant)] for mutant in chosen if key(mutant) in known}
    waiting = []
    for mutant in chosen:
        if key(mutant) not in known:
            tests = covered["lines"].get(mutant["file"], {}).get(str(mutant["number"]), [])
            waiting.append((mutant, sorted(tests, key=lambda test: covered["seconds"].get(test, 0.0))))
    print(f"{len(waiting)} of {len(chosen)} mutants to try", flush=True)
    import_libraries()
    with multiprocessing.pool.ThreadPool(jobs) as pool:
        for row in pool.imap_unordered(try_mutant, waiting):
            known[key(row)] = row
            write_results([known[key(mutant)] for mutant in chosen if key(mutant) in known])
            print(f"{row['file']} {row['function']}: {row['line']!r} {row['old']!r} -> {row['new']!r}: "
                  f"{row['killed']}, {row['by']} of {row['tests']} ({row['seconds']} s)", flush=True)  # fmt: skip


def table():
    """Mutants and those that are killed, file by file."""
    counts = defaultdict(lambda: [0, 0])
    for row in results().values():
        for name in (row["file"], "all"):
            counts[name][0] += 1
            counts[name][1] += row["killed"] == "yes"
    lines = ["| file | mutants | killed |", "| --- | --- | --- |"]
    lines += [f"| {name} | {total} | {killed} |" for name, (total, killed) in sorted(counts.items())]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", metavar="FILE", help="write which tests run which line")
    parser.add_argument("--try", dest="map", metavar="FILE", help="try the mutants by the tests in this file")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--table", action="store_true", help="print the shares")
    args = parser.parse_args()
    if args.cover:
        cover(args.cover)
    if args.map:
        try_all(args.map, args.jobs)
    if args.table:
        print(table())


if __name__ == "__main__":
    main()
