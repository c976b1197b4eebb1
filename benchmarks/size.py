"""Counts the lines of the repository, as tables in Markdown: `python benchmarks/size.py`

Lines are all lines of a file, with docstrings and blank ones; "code" is those without docstrings, comments and blank
ones. "In one file" is what benchmarks/single_file.py writes. "Names" are those that a script imports from files of
common/. tests/test_size.py holds the first table to its limits.
"""

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
    found = set()
    with open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(found)


def files_of(folder, *kinds):
    """The files of a folder and those below, without the environments of benchmarks/throughput."""
    found = sorted((ROOT / folder).rglob("*.*"))
    return [path for path in found if path.suffix in kinds and ".peers" not in path.parts]


def sizes():
    """{what: how many lines}. A user's copy may lie beside the scripts."""
    common = files_of("common", ".py")
    return {
        "common/": sum(map(lines_of, common)),
        "common/, code": sum(map(code_lines_of, common)),
        "algos/": sum(lines_of(ROOT / "algos" / name) for name in SUMMARY),
        "ppo.py in one file": in_one_file(ROOT / "algos/ppo.py"),
        "tests/": sum(map(lines_of, files_of("tests", ".py"))),
        "benchmarks/, with .sh": sum(map(lines_of, files_of("benchmarks", ".py", ".sh"))),
    }


def in_one_file(script):
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"one_{script.name}")
        command = [sys.executable, ROOT / "benchmarks/single_file.py", script, target]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return lines_of(target)


def taken(script):
    """(names, files) that a script imports from common/, as two sets."""
    names = set()
    files = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "common":
            names |= {alias.name for alias in node.names}
            files.add(node.module)
    return names, files


if __name__ == "__main__":
    common = {str(path.relative_to(ROOT)): lines_of(path) for path in files_of("common", ".py")}
    for counts in (sizes(), common):
        print("\n".join(markdown([{"what": name, "lines": f"{count:,}"} for name, count in counts.items()])), "\n")
    rows = []
    for script in (ROOT / "algos" / name for name in SUMMARY):
        names, files = taken(script)
        row = {"script": script.stem, "lines": f"{lines_of(script):,}", "in one file": f"{in_one_file(script):,}"}
        rows.append(row | {"names from common": str(len(names)), "from files": str(len(files))})
    print("\n".join(markdown(rows)))
