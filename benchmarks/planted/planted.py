"""Planted bugs: is a mistake that people make in such scripts found by the tests?

    python benchmarks/planted/planted.py               # plants each bug in a copy of the repository, runs its tests
    python benchmarks/planted/planted.py --bugs 3 7    # these bugs alone
    python benchmarks/planted/planted.py --bugs 3 --copy FOLDER    # no test: a copy of the repository with this bug
    python benchmarks/check.py --write                 # writes the table of README.md from results.csv

bugs.toml has the bugs: a text of a script that stands there once, what takes its place, and the tests that should fail.
A bug that was caught, and whose text, script and names of tests are those of its row in results.csv, is not run again.
"""

import argparse
import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import ROOT, markdown, read_csv, write_csv

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.csv"
PYTEST = "-B -m pytest -p no:xdist -p no:cacheprovider -o addopts= -x -q -rfE --tb=line".split()


def bugs():
    """The bugs of bugs.toml: number, script, name, old, new, tests (node ids, parameters left out)."""
    with open(FOLDER / "bugs.toml", "rb") as file:
        listed = tomllib.load(file)["bug"]
    for number, bug in enumerate(listed, 1):
        bug["number"] = number
    return listed


def planted(bug, root=ROOT):
    """The text of the script with the bug in it. ValueError where its old text does not stand there once."""
    text = (root / bug["script"]).read_text()
    count = text.count(bug["old"])
    if count != 1:
        raise ValueError(f"bug {bug['number']} ({bug['name']}): its text stands {count} times in {bug['script']}")
    changed = text.replace(bug["old"], bug["new"])
    ast.parse(changed)  # a test that fails for a SyntaxError would show nothing
    return changed


def digest(bug):
    """A hash of the script as it is, of the bug and of what should find it."""
    script = (ROOT / bug["script"]).read_text()
    content = [script, bug["old"], bug["new"], bug["tests"]]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def copy_repository(folder):
    """The files of the working tree that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def first_failure(script, text, tests, *options, launcher=()):
    """(exit status, first test that fails, seconds) of pytest in a copy of the repository with this text of a script.
    options: of pytest; launcher: words before the command."""
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        Path(folder, script).write_text(text)
        command = [*launcher, sys.executable, *PYTEST, "-m", "not slow", *options, *tests]
        start = time.monotonic()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        seconds = f"{time.monotonic() - start:.0f}"
    if not done.returncode:
        return 0, "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else done.stdout[-300:], seconds


def try_bug(bug):
    status, test, seconds = first_failure(bug["script"], planted(bug), bug["tests"])
    return {
        "number": bug["number"],
        "script": bug["script"],
        "bug": bug["name"],
        "caught": {0: "no", 1: "yes"}.get(status, f"pytest ended with {status}"),
        "test": test,
        "seconds": seconds,
        "digest": digest(bug),
    }


def results():
    """{number: row} of results.csv."""
    return {int(row["number"]): row for row in read_csv(RESULTS)}


def write_results(rows):
    write_csv(RESULTS, [rows[number] for number in sorted(rows)])


def run(numbers, jobs):
    """Tries the bugs that results.csv does not have as they are, and writes each result at once."""
    known = results()
    changed = older()
    done = [number for number, row in known.items() if row["caught"] == "yes" and number not in changed]
    chosen = [bug for bug in bugs() if not numbers or bug["number"] in numbers]
    waiting = [bug for bug in chosen if bug["number"] not in done]
    print(f"{len(waiting)} bugs to plant", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(try_bug, waiting):
            known[row["number"]] = row
            write_results(known)
            found = row["test"] or "NOT CAUGHT"
            print(f"{row['number']} {row['script']}: {row['bug']}: {found} ({row['seconds']} s)", flush=True)


def table():
    known = results()
    rows = [known[bug["number"]] for bug in bugs()]
    lines = []
    for row in rows:
        test = row["test"].removeprefix("tests/")
        line = {"number": row["number"], "script": Path(row["script"]).name, "bug": row["bug"]}
        lines.append(line | {"first test that fails": f"`{test}`" if row["caught"] == "yes" else "none"})
    caught = sum(row["caught"] == "yes" for row in rows)
    scripts = len({row["script"] for row in rows})
    total = f"{len(rows)} bugs in {scripts} files: {caught} are caught by the default `pytest`."
    return [total, "", *markdown(lines)]


def older():
    """The numbers of bugs that were tried in a script, by tests or with a text that are not those of today."""
    rows = results()
    tried = [bug for bug in bugs() if bug["number"] in rows]
    return [bug["number"] for bug in tried if rows[bug["number"]]["digest"] != digest(bug)]


def stored_tests():
    """{"tests/test_x.py::test_name", ...}, with the other functions of these files."""
    found = set()
    for path in ROOT.glob("tests/*.py"):
        names = re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE)
        found.update(f"tests/{path.name}::{name}" for name in names)
    return found


def problems():
    """What is wrong, a sentence each: bugs that no longer fit their script, that no result tells about, or that no test
    catches."""
    found = []
    rows = results()
    tests = stored_tests()
    for bug in bugs():
        where = f"planted bug {bug['number']} ({bug['name']})"
        try:
            planted(bug)
        except (ValueError, OSError, SyntaxError) as error:
            found.append(f"planted bug: {error}")
        found += [f"{where}: there is no {test}" for test in bug["tests"] if test.partition("[")[0] not in tests]
        row = rows.get(bug["number"])
        if row is None or row["bug"] != bug["name"]:
            found.append(f"{where} has no result: run benchmarks/planted/planted.py")
        elif row["caught"] != "yes":
            found.append(f"{where} is caught by no test")
        elif row["test"].partition("[")[0] not in tests:
            found.append(f"{where} was caught by {row['test']}, which is no more")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", type=int, nargs="+", default=[], help="numbers of bugs; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time")
    parser.add_argument(
        "--copy", type=Path, help="write a copy of the repository with one bug there; the repository needs its .git"
    )
    args = parser.parse_args()
    if args.copy:
        [bug] = (bug for bug in bugs() if bug["number"] in args.bugs)
        copy_repository(args.copy)
        (args.copy / bug["script"]).write_text(planted(bug))
    else:
        run(args.bugs, args.jobs)


if __name__ == "__main__":
    main()
