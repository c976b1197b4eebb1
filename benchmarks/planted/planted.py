"""Planted bugs: is a mistake that people make in such scripts found by the tests?

    python benchmarks/planted/planted.py               # plants each bug in a copy of the repository, runs its tests
    python benchmarks/planted/planted.py --bugs 3 7    # these bugs alone
    python benchmarks/planted/planted.py --clean       # runs the tests of all bugs without any bug: they pass
    python benchmarks/check.py --write                 # writes the table of README.md from results.csv

check.py fails where bugs, results and code do not fit together, and tells which bugs were caught by older code.

bugs.toml has the bugs: a text of a script that stands there once, what takes its place, and the tests that should fail.
A bug that was caught, and whose text, tests and script are those of its row in results.csv, is not run again.
"""

import argparse
import ast
import csv
import hashlib
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.csv"
COLUMNS = ["number", "script", "bug", "caught", "by", "test", "seconds", "digest"]
DEFAULT_RUN = "pytest"
LIBRARIES = """torch torch.distributed.checkpoint.state_dict accelerate accelerate.tracking tyro yaml matplotlib.figure
matplotlib.pyplot datasets transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama
transformers.models.qwen3.modeling_qwen3 transformers.models.clip.modeling_clip diffusers.schedulers.scheduling_ddim
diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion""".split()
OUTCOMES = {0: "no", 1: "yes"}  # by the exit status of pytest
MARKERS = {DEFAULT_RUN: "not slow", "pytest -m slow": "slow"}


# ---- Bugs ------------------------------------------------------------------------------------------------------------


def bugs():
    """The bugs of bugs.toml: number, script, name, old, new, tests (node ids, parameters left out), by (a command)."""
    with open(FOLDER / "bugs.toml", "rb") as file:
        listed = tomllib.load(file)["bug"]
    for number, bug in enumerate(listed, 1):
        bug["number"] = number
        bug.setdefault("by", DEFAULT_RUN)
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
    content = [script, bug["old"], bug["new"], bug["tests"], bug["by"]]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


# ---- Runs ------------------------------------------------------------------------------------------------------------


def copy_repository(folder):
    """The files of the working tree that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def import_libraries():
    """What all tests import, once for all bugs: the processes that try them are forked from this one."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    for name in LIBRARIES:
        importlib.import_module(name)


def run_tests(folder, tests, by):
    """(exit status of pytest, its output), up to the first failure. This process is lost for anything else."""
    import pytest

    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = True
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-x", "-q", "-rfE", "--tb=line"]
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = pytest.main([*options, "-m", MARKERS[by], *tests])
        sys.stdout.flush()
        output.seek(0)
        return int(status), output.read()


def try_bug(bug):
    """The row of results.csv."""
    changed = planted(bug)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        (folder / bug["script"]).write_text(changed)
        start = time.monotonic()
        status, output = run_tests(folder, bug["tests"], bug["by"])
        seconds = time.monotonic() - start
        os.chdir(ROOT)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE)
    test = ""
    if failed:
        test = failed[1]
    elif status:
        test = output[-300:]
    return {
        "number": bug["number"],
        "script": bug["script"],
        "bug": bug["name"],
        "caught": OUTCOMES.get(status, f"pytest ended with {status}"),
        "by": bug["by"],
        "test": test,
        "seconds": f"{seconds:.0f}",
        "digest": digest(bug),
    }


def results():
    """{number: row} of results.csv."""
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        return {int(row["number"]): row for row in csv.DictReader(file)}


def write_results(rows):
    """Writes results.csv in the order of the bugs."""
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[number] for number in sorted(rows))


def run(numbers, jobs):
    """Tries the bugs that results.csv does not have as they are, and writes each result at once."""
    known = results()
    waiting = []
    for bug in bugs():
        wanted = not numbers or bug["number"] in numbers
        row = known.get(bug["number"])
        done = row is not None and row["caught"] == "yes" and row["digest"] == digest(bug)
        if wanted and not done:
            waiting.append(bug)
    print(f"{len(waiting)} bugs to plant", flush=True)
    if not waiting:
        return
    import_libraries()
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for row in pool.imap(try_bug, waiting):
            known[row["number"]] = row
            write_results(known)
            found = row["test"] or "NOT CAUGHT"
            print(f"{row['number']} {row['script']}: {row['bug']}: {found} ({row['seconds']} s)", flush=True)


def run_without_bug():
    """What pytest says of all these tests in a copy without a bug, where they should pass."""
    tests = set()
    for bug in bugs():
        if bug["by"] == DEFAULT_RUN:
            tests.update(bug["tests"])
    with tempfile.TemporaryDirectory() as name:
        copy_repository(Path(name))
        import_libraries()
        status, output = run_tests(Path(name), sorted(tests), DEFAULT_RUN)
        os.chdir(ROOT)
    return status, output


# ---- Table and check -------------------------------------------------------------------------------------------------


def table():
    """The lines of README.md between its marks."""
    rows = [results()[bug["number"]] for bug in bugs()]
    lines = ["| number | script | bug | first test that fails |", "| --- | --- | --- | --- |"]
    for row in rows:
        test = row["test"].removeprefix("tests/")
        found = f"`{test}`" if row["caught"] == "yes" else "none"
        if row["by"] != DEFAULT_RUN:
            found += f" ({row['by']})"
        lines.append(f"| {row['number']} | {Path(row['script']).name} | {row['bug']} | {found} |")
    caught = sum(row["caught"] == "yes" for row in rows)
    scripts = len({row["script"] for row in rows})
    default = sum(row["caught"] == "yes" and row["by"] == DEFAULT_RUN for row in rows)
    total = f"{len(rows)} bugs in {scripts} files: {caught} are caught, {default} of them by the default `pytest`."
    return [total, "", *lines]


def older():
    """The numbers of bugs that were caught in a script, by tests or with a text that are not those of today."""
    rows = results()
    return [bug["number"] for bug in bugs() if rows[bug["number"]]["digest"] != digest(bug)]


def functions_of_tests():
    """{test file: names of its functions}."""
    names = {}
    for path in ROOT.glob("tests/*.py"):
        names[f"tests/{path.name}"] = set(re.findall(r"^\s*def (\w+)\(", path.read_text(), re.MULTILINE))
    return names


def problems():
    """What is wrong, a sentence each: bugs that no longer fit their script, that no result tells about, or that no test
    catches."""
    found = []
    rows = results()
    functions = functions_of_tests()

    def exists(node):
        file, _, function = node.partition("::")
        return function.partition("[")[0] in functions.get(file, ())

    for bug in bugs():
        where = f"planted bug {bug['number']} ({bug['name']})"
        try:
            if planted(bug) == (ROOT / bug["script"]).read_text():
                found.append(f"{where} changes nothing")
        except (ValueError, OSError, SyntaxError) as error:
            found.append(f"planted bug: {error}")
        missing = [test for test in bug["tests"] if not exists(test)]
        found += [f"{where}: there is no {test}" for test in missing]
        row = rows.get(bug["number"])
        if row is None or row["bug"] != bug["name"]:
            found.append(f"{where} has no result: run benchmarks/planted/planted.py")
        elif row["caught"] != "yes":
            found.append(f"{where} is caught by no test")
        elif not exists(row["test"]):
            found.append(f"{where} was caught by {row['test']}, which is no more")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", type=int, nargs="+", default=[], help="numbers of bugs; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time")
    parser.add_argument("--clean", action="store_true", help="run the tests of all bugs without any bug")
    args = parser.parse_args()
    if args.clean:
        out = os.fdopen(os.dup(1), "w")
        status, output = run_without_bug()
        out.write(output)
        sys.exit(status)
    run(args.bugs, args.jobs)


if __name__ == "__main__":
    main()
