"""Writes the table of algos/ARCHITECTURES.md from what the tests find: `python benchmarks/architectures.py`

Runs tests/test_architectures.py, in about two minutes. These tests fail where the table differs from what they find.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "algos/ARCHITECTURES.md"
COLUMNS = ["--packing", "logits in chunks", "ppo", "sft", "dpo", "ilql", "reward"]


class Cells:
    """A plugin of pytest: {family: {column: text}} of the properties that the tests record."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name == "cell":
                family, column, text = value
                self.found.setdefault(family, {})[column] = text


def main():
    cells = Cells()
    options = ["-q", "-p", "no:xdist", "-o", "addopts=", "--rootdir", str(ROOT)]
    pytest.main([str(ROOT / "tests/test_architectures.py"), *options], plugins=[cells])
    rows = [["family", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for family, found in cells.found.items():
        rows.append([family, *(found.get(column, "not run") for column in COLUMNS)])
    before, _, _ = TABLE.read_text().partition("| family |")
    TABLE.write_text(before + "".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
