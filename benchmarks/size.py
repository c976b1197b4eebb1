"""Counts the lines of the repository, as tables in Markdown: how thin is common/, and what does a script take from it?

    python benchmarks/size.py                # of this checkout
    python benchmarks/size.py ../other       # of another one

Lines are all lines of .py files, with docstrings and blank ones. "In one file" is what benchmarks/single_file.py of
that checkout writes. "Names" are those that a script imports from files of common/.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import ROOT, markdown


def lines_of(path):
    return len(path.read_text().splitlines())


def folders(root):
    """A row a folder: how many files with code it has, and how many lines."""
    rows = []
    for name in ("common", "algos", "tests", "benchmarks"):
        counts = [lines_of(path) for path in (root / name).rglob("*.py") if ".peers" not in path.parts]
        files = [count for count in counts if count]  # an empty __init__.py is none
        rows.append([f"{name}/", str(len(files)), f"{sum(files):,}"])
    return markdown(["folder", "files", "lines"], rows)


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


def scripts(root):
    """A row a script."""
    rows = []
    for script in sorted((root / "algos").glob("*.py")):
        names, files = taken(script)
        counts = [lines_of(script), in_one_file(root, script), len(names), len(files)]
        rows.append([script.stem, *(f"{count:,}" for count in counts)])
    return markdown(["script", "lines", "in one file", "names from common", "from files"], rows)


def files_of_common(root):
    """A row a file of common/."""
    counts = {path.name: lines_of(path) for path in sorted((root / "common").glob("*.py"))}
    return markdown(["file of common", "lines"], [[name, f"{count:,}"] for name, count in counts.items() if count])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; default: this one")
    root = parser.parse_args().root.resolve()
    print("\n".join([*folders(root), "", *scripts(root), "", *files_of_common(root)]))
