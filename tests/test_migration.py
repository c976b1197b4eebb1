"""python -m pytest tests/test_migration.py

algos/README.md ("Coming from TRL or trlX") has a row for every name of tests/seed_names.txt, and its rows are true of
the scripts that exist: the flags are fields of Args, the functions are there, and what it announces is still missing.
"""

import ast
import functools
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo", "grpo", "ilql", "sft", "reward", "dpo", "ddpo")
FINISHED = [script for script in SCRIPTS if (ROOT / f"algos/{script}.py").exists()]
FLAG = re.compile(r"--[a-z][a-z0-9-]*\*?")


class Row(NamedTuple):
    line: int
    section: str
    """A script, "every", or "later"."""
    names: list[str]
    """As in seed_names.txt, or bare with the heading's owner in front."""
    cells: list[str]


def seed_names() -> dict[str, list[str]]:
    lines = (ROOT / "tests/seed_names.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs), "a name is listed twice"
    return {name: scripts.split(",") for name, scripts in pairs}


def readme_rows() -> list[Row]:
    section, owner, rows = "", "", []
    for number, line in enumerate((ROOT / "algos/README.md").read_text().splitlines(), 1):
        if line.startswith("## "):
            title, owner = line[3:].strip(), ""
            section = {"Every script": "every", "Still to come": "later"}.get(title, title.removesuffix(".py"))
        elif line.startswith("### "):
            owner = line[4:].strip().strip("`")
        elif line.startswith("|") and not re.fullmatch(r"\|[-| ]+\|", line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            if cells == ["theirs", "here", "note"]:
                continue
            spans = re.findall(r"`([^`]+)`", cells[0])
            rows.append(Row(number, section, spans + [f"{owner}.{span}" for span in spans], cells))
    return rows


def scripts_of(row: Row) -> list[str]:
    """The finished scripts that a row speaks about."""
    if row.section == "every":
        seeds = seed_names()
        return [script for script in FINISHED if any(script in seeds.get(name, []) for name in row.names)]
    return [script for script in FINISHED if script == row.section]


@functools.cache
def definitions(script: str) -> tuple[set[str], set[str]]:
    """(fields of Args, functions and classes and class.method) of algos/<script>.py, without importing it."""
    fields, names = set(), set()
    for node in ast.parse((ROOT / f"algos/{script}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
            if node.name == "Args":
                fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return fields, names


@functools.cache
def shared_definitions() -> set[str]:
    """`module.function` and `module.Class` of common/."""
    names = set()
    for path in (ROOT / "common").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(f"{path.stem}.{node.name}")
    return names


def is_file(span: str) -> bool:
    return "/" in span or re.search(r"\.(py|md|jsonl|yaml|safetensors)$", span) is not None


def functions_in(cell: str) -> list[str]:
    spans = [span for span in re.findall(r"`([^`]+)`", cell) if not span.startswith("--") and not is_file(span)]
    return [span.split("(")[0] for span in spans]


def field(flag: str) -> str:
    return flag[2:].replace("-", "_")


def test_seed_names_belong_to_known_scripts():
    for name, scripts in seed_names().items():
        assert scripts and set(scripts) <= {*SCRIPTS, "models"}, f"{name}: {scripts}"


def test_rows_have_three_cells_in_known_sections():
    rows = readme_rows()
    assert rows
    for row in rows:
        assert len(row.cells) == 3, f"algos/README.md:{row.line}: {len(row.cells)} cells"
        assert row.names, f"algos/README.md:{row.line}: no name in backticks"
        assert row.section in {*SCRIPTS, "every", "later"}, f"algos/README.md:{row.line}: in section {row.section!r}"


def test_every_seed_name_has_a_row():
    sections: dict[str, set[str]] = {}
    for row in readme_rows():
        for name in row.names:
            sections.setdefault(name, set()).add(row.section)
    missing = [name for name in seed_names() if name not in sections]
    assert not missing, f"without a row in algos/README.md: {missing}"
    for name, scripts in seed_names().items():
        for script in set(scripts) & set(FINISHED):
            assert sections[name] & {script, "every"}, f"{name}: no row under {script}.py, which exists"


def test_rows_say_where_to_go():
    for row in readme_rows():
        where, (theirs, here, note) = f"algos/README.md:{row.line}", row.cells
        assert here.startswith("planned: ") == (row.section == "later"), f"{where}: `planned:` is for 'Still to come'"
        target = here.removeprefix("planned: ").removeprefix("next issue: ")
        assert target == "gone" or re.fullmatch(r"`[^`]+`(, `[^`]+`)*", target), f"{where}: {here!r}"
        assert target != "gone" or note, f"{where}: {theirs} is gone without a reason"
        for span in re.findall(r"`([^`]+)`", target):
            known = FLAG.fullmatch(span) or is_file(span) or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?(\(.*\))?", span)
            assert known, f"{where}: {span} is neither flag, function nor file"


def test_rows_are_true_of_the_scripts():
    for row in readme_rows():
        where, (_, here, note) = f"algos/README.md:{row.line}", row.cells
        for script in scripts_of(row):
            fields, names = definitions(script)
            fields = fields | {"config"}  # --config FILE is expanded into argv before Args is read
            if here.startswith("next issue: "):
                came = [flag for flag in FLAG.findall(here) if any(fnmatch(name, field(flag)) for name in fields)]
                assert not came, f"{where}: {came} has arrived in {script}.py: the row is no longer 'next issue'"
            else:
                for flag in FLAG.findall(here):
                    assert field(flag) in fields, f"{where}: {script}.py has no flag {flag}"
                for function in functions_in(here):
                    assert function in names | shared_definitions(), f"{where}: {script}.py has no {function}"
                for path in re.findall(r"`((?:algos|common|benchmarks|tests)/[\w./]*)`", here):
                    assert (ROOT / path).exists(), f"{where}: no {path}"
            for flag in FLAG.findall(note):
                assert field(flag) in fields, f"{where}: {script}.py has no flag {flag}"
