"""Counts the lines of the repository, as tables in Markdown: how thin is common/, and what does a script take from it?

    python benchmarks/size.py                # of this checkout
    python benchmarks/size.py ../other       # of another one

Lines are all lines of a file, with docstrings and blank ones; "code" is those without docstrings, comments and blank
ones. "In one file" is what benchmarks/single_file.py of that checkout writes. "Names" are those that a script imports
from files of common/. tests/test_size.py holds the first table to its limits.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.claims import SUMMARY
from benchmarks.tables import ROOT, markdown

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(path):
    return len(path.read_text().splitlines())


def code_lines_of(path):
    """The lines of a Python file without docstrings, comments and blank lines."""
    found = set()
    with open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(found)


def files_of(root, folder, *kinds):
    """The files of a folder and those below, without the environments of benchmarks/throughput."""
    found = sorted((root / folder).rglob("*.*"))
    return [path for path in found if path.suffix in kinds and ".peers" not in path.parts]


def scripts_of(root):
    """The repository's scripts: a user's copy may lie beside them."""
    return [root / "algos" / name for name in sorted(SUMMARY)]


def sizes(root):
    """{what: how many lines}"""
    common = files_of(root, "common", ".py")
    return {
        "common/": sum(map(lines_of, common)),
        "common/, code": sum(map(code_lines_of, common)),
        "algos/": sum(map(lines_of, scripts_of(root))),
        "ppo.py in one file": in_one_file(root, root / "algos/ppo.py"),
        "tests/": sum(map(lines_of, files_of(root, "tests", ".py"))),
        "benchmarks/, with .sh": sum(map(lines_of, files_of(root, "benchmarks", ".py", ".sh"))),
    }


def taken(script):
    """(names, files) that a script imports from common/, as two sets."""
    names = set()
    files = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "common":
            names |= {alias.name for alias in node.names}
            files.add(node.module)
    return names, files


def in_one_file(root, script):
    """The lines of a script with what it uses of common/."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"one_{script.name}")
        command = [sys.executable, root / "benchmarks/single_file.py", script, target]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return lines_of(target)


def script_rows(root):
    rows = []
    for script in scripts_of(root):
        names, files = taken(script)
        counts = [lines_of(script), in_one_file(root, script), len(names), len(files)]
        rows.append([script.stem, *(f"{count:,}" for count in counts)])
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; default: this one")
    root = parser.parse_args().root.resolve()
    common = {str(path.relative_to(root)): lines_of(path) for path in files_of(root, "common", ".py")}
    for counts in (sizes(root), common):
        rows = [[name, f"{count:,}"] for name, count in counts.items() if count]  # an empty __init__.py is no file
        print("\n".join([*markdown(["what", "lines"], rows), ""]))
    heads = ["script", "lines", "in one file", "names from common", "from files"]
    print("\n".join(markdown(heads, script_rows(root))))
