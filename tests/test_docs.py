"""python -m pytest tests/test_docs.py

README, docstrings and evidence are true: commands parse, named files exist, tables and figures follow from the curves.
"""

import doctest
import re
import shlex
from pathlib import Path

import pytest
import tyro
from cases import CASES

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from benchmarks import check
from benchmarks.tasks import randomwalks, shapes
from common import logging as run_logging
from common.cli import expand_config, refuse_other_names, with_embedded_task

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "ddpo.py": ddpo,
    "dpo.py": dpo,
    "grpo.py": grpo,
    "ilql.py": ilql,
    "ppo.py": ppo,
    "reward.py": reward,
    "sft.py": sft,
}
DOCUMENTS = [ROOT / "README.md", ROOT / "algos/README.md", *(ROOT / "algos" / name for name in SCRIPTS)]
COMMAND = re.compile(
    r"^ *(?:\w.*&& )?((?:python|accelerate launch|torchrun --nproc_per_node \d+) algos/(\w+\.py)[^#`\n]*)", re.M
)


def commands():
    for path in [*DOCUMENTS, *ROOT.glob("benchmarks/curves/*/run.sh")]:
        text = path.read_text().replace("\\\n", " ")
        for command, script in COMMAND.findall(text):
            yield pytest.param(script, command.split("algos/", 1)[1], id=f"{path.name}: {command.strip()[:60]}")


@pytest.mark.parametrize("script, command", list(commands()))
def test_documented_command_parses(script, command):
    words = [word for word in shlex.split(command.replace('"$seed"', "1").replace("`", ""))[1:] if word != "..."]
    args_class = SCRIPTS[script].Args
    refuse_other_names([word for word in words if word.startswith("--")], args_class)
    assert tyro.cli(args_class, args=expand_config(with_embedded_task(words, args_class), args_class))


def test_named_files_exist():
    for path in DOCUMENTS[:2]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"


def test_evidence_agrees():
    assert check.verify() == []


def test_check_sees_a_changed_number(tmp_path, monkeypatch):
    """Negative control: one digit in a stored curve, and the table, the figure and README no longer follow."""
    import shutil

    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "algos", tmp_path / "algos")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.verify() == []
    curve = tmp_path / "benchmarks/curves/ppo-randomwalks/curves/default-seed1.jsonl"
    lines = curve.read_text().splitlines()
    lines[-1] = re.sub(r'"eval/optimality": 0\.\d', '"eval/optimality": 0.1', lines[-1])
    curve.write_text("\n".join(lines) + "\n")
    problems = " ".join(check.verify())
    assert "curve.png does not show" in problems and "README.md does not follow" in problems
    assert "README.md: a table does not follow" in problems


def test_the_table_of_faults_is_that_of_the_tests(cases):
    """Every test of a case is counted, with its script; in a run of all tests, none is counted that is gone."""
    stored = {int(row["number"]): row for row in check.stored_cases()}
    assert {n: (row["fault or input"], row["expected"]) for n, row in stored.items()} == CASES
    for number, (scripts, tests) in cases.table.items():
        row = stored[number]
        assert tests <= int(row["tests"]) and set(scripts) <= set(row["scripts"].split()), f"case {number}: {COUNT}"
        assert not cases.whole or tests == int(row["tests"]), f"case {number}: {COUNT}"


COUNT = 'run pytest -m "case or slow" --dist load -vv --table=benchmarks/faults/cases.csv'


MODULES = [randomwalks, shapes, ddpo, dpo, grpo, ilql, ppo, reward, sft, check, run_logging]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0
