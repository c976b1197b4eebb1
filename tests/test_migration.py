"""python -m pytest tests/test_migration.py

algos/MIGRATION.md has a row for every name of tests/seed_names.txt, and its rows are true of the scripts: the flags are
fields of Args, the functions and files are there. Our halves of its worked examples run.
"""

import ast
import dataclasses
import functools
import importlib
import re
import runpy
from pathlib import Path
from typing import NamedTuple

import yaml
from harness import ALGOS, ROOT
from helpers import log, write
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.tasks import arithmetic

PAGE = ROOT / "algos/MIGRATION.md"
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class Row(NamedTuple):
    where: str
    section: str  # a script, or "every"
    names: list[str]  # as in seed_names.txt, or bare with the heading's owner in front
    here: str
    note: str


def page_rows():
    rows = []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("## "):
            section = line[3:].removesuffix(".py").replace("Every script", "every")
            owner = ""
        elif line.startswith("### "):
            owner = line[4:].strip("`")
        elif line.startswith("|") and not re.fullmatch(r"\|[-| ]+\|", line):
            theirs, here, note = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            if theirs != "theirs":
                spans = re.findall(r"`([^`]+)`", theirs)
                names = spans + [f"{owner}.{span}" for span in spans]
                rows.append(Row(f"algos/MIGRATION.md:{number}", section, names, here, note))
    return rows


def seed_names():
    """{name: the scripts that it belongs to}."""
    lines = (ROOT / "tests/seed_names.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line and not line.startswith("#")]
    names = {name: set(scripts.split(",")) for name, scripts in pairs}
    assert len(names) == len(pairs) and set().union(*names.values()) == {*ALGOS, "models"}
    return names


@functools.cache
def definitions(path):
    """Functions, classes and class.method at the top of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_every_seed_name_has_a_row():
    sections = {}
    for row in page_rows():
        assert row.names and row.section in {*ALGOS, "every"}, row.where
        for name in row.names:
            sections.setdefault(name, set()).add(row.section)
    for name, scripts in seed_names().items():
        assert name in sections, f"{name} has no row"
        for script in scripts - {"models"}:
            assert sections[name] & {script, "every"}, f"{name}: no row under {script}.py"


def test_rows_are_true_of_the_scripts():
    seeds = seed_names()
    shared = set()
    for path in (ROOT / "common").glob("*.py"):
        shared |= {f"{path.stem}.{name}" for name in definitions(path)}
    for row in page_rows():
        spans = re.findall(r"`([^`]+)`", row.here)
        assert spans or (row.here == "gone" and row.note), f"{row.where}: {row.here!r}"
        scripts = [row.section]
        if row.section == "every":
            scripts = [algo for algo in ALGOS if any(algo in seeds.get(name, []) for name in row.names)]
        for algo in scripts:
            names = definitions(ROOT / f"algos/{algo}.py") | shared
            flags = {field.name for field in dataclasses.fields(importlib.import_module(f"algos.{algo}").Args)}
            for flag in FLAG.findall(row.here + row.note):
                assert flag[2:].replace("-", "_") in flags | {"config"}, f"{row.where}: {algo}.py has no {flag}"
            for span in spans:
                is_file = "/" in span or re.search(r"\.(py|md|jsonl|yaml|safetensors)$", span)
                if re.match(r"(algos|common|benchmarks|tests)/", span):
                    assert (ROOT / span).exists(), f"{row.where}: no {span}"
                elif not is_file and not FLAG.match(span):
                    assert span.partition("(")[0] in names, f"{row.where}: {algo}.py has no {span}"


# ---- Worked examples -------------------------------------------------------------------------------------------------


def example(title):
    """(their script, {name: text} of our files) of the example under a heading."""
    [text] = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    [theirs] = re.findall(r"```python\n# theirs\n(.*?)```", text, re.S)
    files = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.S))
    return theirs, files


GRPO = "GRPOTrainer (TRL 1.16)"
TRLX = "A config and trlx.train"


def test_our_score_compares_numbers():
    """The last one, as a whole; their function of the page and README's say the same."""
    theirs, files = example(GRPO)
    readme = re.findall(r"```python\n# my_reward.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    expected = {"6": 1, "46": 0, "so 5 + 1 = 6.": 1, "6.5": 0, "-6": 0, "6, no, 7": 0, "": 0}
    for source in (theirs.partition("\n\nconfig")[0].replace("from trl", "# "), files["my_reward.py"], readme):
        names = {}
        exec(source, names)
        columns = {"samples": [], "prompts": [], "outputs": list(expected), "completions": list(expected)}
        assert names["score"](**columns, answer=["6"] * len(expected)) == list(expected.values())


def test_our_script_of_an_example_runs(tmp_path, monkeypatch):
    """One iteration of it. test_docs.py parses our commands, the scripts of the other examples."""
    monkeypatch.chdir(tmp_path)
    tokenizer = arithmetic.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=3, n_embd=12, n_head=2, n_positions=300, **special)
    GPT2LMHeadModel(config).save_pretrained("gpt2")
    tokenizer.save_pretrained("gpt2")
    write("prompts.jsonl", [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)])
    _, files = example(TRLX)
    Path("my_reward.py").write_text(example(GRPO)[1]["my_reward.py"])
    Path("my_ppo.py").write_text(files["my_ppo.py"].replace("episodes=12800", "episodes=128, threads=1"))
    names = runpy.run_path("my_ppo.py")
    flags = yaml.safe_load((names["run_dir"] / "config.yaml").read_text())
    assert log(names["run_dir"])[-1]["episode"] == 128
    assert (flags["num_layers_unfrozen"], flags["batch_size"], flags["vf_coef"]) == (2, 32, 1.0)
