"""Documents, docstrings and evidence are true: `python -m pytest tests/test_docs.py`"""

import dataclasses
import doctest
import json
import re
import shlex
import shutil

import pytest
from cases import CASES
from harness import ROOT
from test_rows import TOOLS, build_tokenizer

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from benchmarks import check, seeds, tables
from benchmarks.tasks import arithmetic, calculator, pretrained, randomwalks, shapes
from common import run as run_module
from common.cli import parse
from common.identity import VERSION
from common.lm.chat import pair_texts, row_segments
from common.lm.tokens import encode_prompts

SCRIPTS = {f"{script.__name__.rpartition('.')[2]}.py": script for script in (ddpo, dpo, grpo, ilql, ppo, reward, sft)}
GUIDE = ROOT / "algos/README.md"
PAGES = [ROOT / "README.md", ROOT / "tests/README.md", *sorted(ROOT.glob("algos/*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("benchmarks/**/*.md"))]
DOCUMENTS = [*PAGES, *(ROOT / "algos" / name for name in SCRIPTS)]
COMMAND = re.compile(
    r"^ *(?:\w.*&& )?((?:python|accelerate launch|torchrun --nproc_per_node \d+) algos/(\w+\.py)[^#`\n]*)", re.M
)


def commands():
    texts = {path.name: path.read_text().replace("\\\n", " ") for path in DOCUMENTS}
    texts |= {claim: "\n".join(seeds.commands(claim, seed=1, variants=[])) for claim in check.CLAIMS}
    for source, text in texts.items():
        for command, script in COMMAND.findall(text):
            yield pytest.param(script, command.split("algos/", 1)[1], id=f"{source}: {command.strip()[:60]}")


@pytest.mark.parametrize("script, command", list(commands()))
def test_documented_command_parses(script, command):
    words = [word for word in shlex.split(command.replace("`", ""))[1:] if word != "..."]
    assert parse(words, SCRIPTS[script].Args, SCRIPTS[script].TASK)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            called = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in called, f"{page.name} links to {link}"
    commits = re.findall(r"(?i)commits?,? `?[0-9a-f]{7}.*|\| commit \|", text)
    assert not commits, f"{page.name}: a .csv file has the commits"


def test_the_version_is_the_first_of_the_changelog():
    assert re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == VERSION


def read_row(row):
    """What the scripts make of a row, by its columns."""
    tokenizer = build_tokenizer(TOOLS.replace("tool.name", "tool.function.name"))
    if "reward" in row:
        return ilql.encode_episodes([row], tokenizer, 999, "--dataset")[0]
    if "chosen" in row:
        return pair_texts([row], tokenizer, "--dataset")
    if row.keys() & {"text", "completion", "messages", "dialogue"}:
        return row_segments([row], tokenizer, "--dataset")
    return encode_prompts([row], tokenizer, 9, 999, "--dataset")[1]


def test_the_rows_of_the_guide_are_read():
    [text] = re.findall(r"^## What must my data look like\?\n(.*?)(?=^## |\Z)", GUIDE.read_text(), re.M | re.S)
    rows = [json.loads(row) for row in re.findall(r"```json\n(.*?)```", text, re.S)]
    for row in rows:
        assert read_row(row)
    assert len(rows) == 14
    [calls] = [row for row in rows if "tools" in row]
    trained = read_row(calls)[0][1::2]
    assert trained == ["call add<|im_end|>\n", "It is 5.<|im_end|>\n"]


# of launchers, pytest and benchmarks
OTHER_FLAGS = "nproc_per_node cpu num_processes config_file help config list out dist table script with no_deps".split()
OTHER_FLAGS += ["entropy_coef"]  # of a copy
OTHER_FLAGS += "served_model_name host port enforce_eager max_model_len max_num_seqs kv_cache_memory_bytes".split()
OTHER_FLAGS += ["logprobs_mode", "generation_config", "max_num_batched_tokens"]  # of vLLM, as those above


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page):
    known = {*OTHER_FLAGS}
    for script in SCRIPTS.values():
        known |= {field.name for field in dataclasses.fields(script.Args)}
    for flag in re.findall(r"(?<![\w-])--([a-z]\w[\w-]*)", page.read_text()):
        name = flag.replace("-", "_")
        assert name in known or name.removeprefix("no_") in known, f"{page.name} names --{flag}"


def test_evidence_agrees():
    assert check.verify() == []


def test_check_sees_a_changed_number(tmp_path, monkeypatch):
    """Negative control: of other digits in a stored curve, nothing follows any more, and a bar is missed."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("tasks", ".peers"))
    for folder in ("algos", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("golden", "__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert check.verify() == []
    curves = tmp_path / "benchmarks/curves/ppo-randomwalks/curves.csv"
    text, count = re.subn(r"^(default,1,\d+,)0\.\d", r"\g<1>0.1", curves.read_text(), flags=re.M)
    assert count == 9
    curves.write_text(text)
    problems = " ".join(check.verify())
    assert "curve.png does not show" in problems and "ppo-randomwalks: best eval/optimality" in problems
    assert "the figure of ppo does not show" in problems
    assert problems.count("README.md: a table does not follow") == 3  # the repository's, the claim's, the references'


def test_the_table_of_faults_is_that_of_the_tests(cases):
    """Every test of a case is counted, with its script; in a run of all tests, none is counted that is gone."""
    stored = {int(row["number"]): row for row in tables.read_csv(ROOT / check.CASES)}
    assert {n: (row["fault or input"], row["expected"]) for n, row in stored.items()} == CASES
    for number, (scripts, tests) in cases.table.items():
        row = stored[number]
        assert tests <= int(row["tests"]) and set(scripts) <= set(row["scripts"].split()), f"case {number}: {COUNT}"
        assert not cases.whole or tests == int(row["tests"]), f"case {number}: {COUNT}"


def test_the_set_ups_of_readme_are_run_as_they_stand():
    """.ci/run takes the lines from there."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    assert lines == [f"pip install -r requirements.txt && {job}" for job in ("python algos/ppo.py", "pytest")]
    assert 'grep "^pip install" README.md | while read -r line; do' in (ROOT / ".ci/run").read_text()


COUNT = 'run pytest -m "case or slow" --dist load -vv --table=benchmarks/faults/cases.csv'
MODULES = [arithmetic, calculator, pretrained, randomwalks, shapes, *SCRIPTS.values(), check, tables, run_module]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0
