"""python -m pytest tests/test_migration.py

algos/MIGRATION.md has a row for every name of tests/seed_names.txt, and its rows are true of
the scripts that exist: the flags are fields of Args, the functions are there, and what it announces is still missing.
Our halves of its worked examples run.
"""

import ast
import dataclasses
import functools
import importlib
import json
import re
import runpy
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tyro
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from algos import grpo, ppo
from benchmarks.tasks import randomwalks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "algos/MIGRATION.md"
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


def page_rows() -> list[Row]:
    section, owner, rows = "", "", []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
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
    """(fields of Args, functions and classes and class.method) of algos/<script>.py."""
    names = set()
    for node in ast.parse((ROOT / f"algos/{script}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    fields = {field.name for field in dataclasses.fields(importlib.import_module(f"algos.{script}").Args)}
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
    rows = page_rows()
    assert rows
    for row in rows:
        assert len(row.cells) == 3, f"algos/MIGRATION.md:{row.line}: {len(row.cells)} cells"
        assert row.names, f"algos/MIGRATION.md:{row.line}: no name in backticks"
        assert row.section in {*SCRIPTS, "every", "later"}, f"algos/MIGRATION.md:{row.line}: in section {row.section!r}"


def test_every_seed_name_has_a_row():
    sections: dict[str, set[str]] = {}
    for row in page_rows():
        for name in row.names:
            sections.setdefault(name, set()).add(row.section)
    missing = [name for name in seed_names() if name not in sections]
    assert not missing, f"without a row in algos/MIGRATION.md: {missing}"
    for name, scripts in seed_names().items():
        for script in set(scripts) & set(FINISHED):
            assert sections[name] & {script, "every"}, f"{name}: no row under {script}.py, which exists"


def test_rows_say_where_to_go():
    for row in page_rows():
        where, (theirs, here, note) = f"algos/MIGRATION.md:{row.line}", row.cells
        assert here.startswith("planned: ") == (row.section == "later"), f"{where}: `planned:` is for 'Still to come'"
        target = here.removeprefix("planned: ").removeprefix("next issue: ")
        assert target == "gone" or re.fullmatch(r"`[^`]+`(, `[^`]+`)*", target), f"{where}: {here!r}"
        assert target != "gone" or note, f"{where}: {theirs} is gone without a reason"
        for span in re.findall(r"`([^`]+)`", target):
            known = FLAG.fullmatch(span) or is_file(span) or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?(\(.*\))?", span)
            assert known, f"{where}: {span} is neither flag, function nor file"


def test_rows_are_true_of_the_scripts():
    for row in page_rows():
        where, (_, here, note) = f"algos/MIGRATION.md:{row.line}", row.cells
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


# ---- Worked examples -------------------------------------------------------------------------------------------------


def example(title):
    """(their script, {name: text} of our files, our command or None) of the example under a heading."""
    [text] = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    [theirs] = re.findall(r"```python\n# theirs\n(.*?)```", text, re.S)
    files = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.S))
    commands = re.findall(r"```\n(python algos/.*?)```", text, re.S)
    return theirs, files, commands[0].replace("\\\n", " ") if commands else None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with prompts and a tiny model under the names of the examples."""
    tokenizer = randomwalks.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=3, n_embd=12, n_head=2, n_positions=300, **special)
    torch.manual_seed(0)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip("bcdefghijk", "abcdeabcde", strict=True)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, files, _ = example(TITLES[0])
    (tmp_path / "my_reward.py").write_text(files["my_reward.py"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


TITLES = ["A loop around PPOTrainer.step (TRL 0.7)", "A config and trlx.train", "GRPOTrainer.train (TRL 1.16)"]


def finished(run_dir, episodes):
    """The flags of a run that sampled so many episodes and exported a model."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["episode"] == episodes and records[-1]["objective/scores"] > 0
    AutoModelForCausalLM.from_pretrained(run_dir / "hf_model")
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.parametrize(("title", "script", "episodes"), [(TITLES[0], ppo, 128), (TITLES[2], grpo, 64)])
def test_our_command_of_an_example_runs(title, script, episodes, folder):
    """One iteration of it, and the numbers of their script."""
    theirs, _, command = example(title)
    ast.parse(theirs)
    words = shlex.split(command)[2:]
    args = tyro.cli(script.Args, args=words)
    assert args.total_episodes == 12800
    _, run_dir = script.main(dataclasses.replace(args, total_episodes=episodes, threads=1))
    flags = finished(run_dir, episodes)
    if script is ppo:
        assert {"learning_rate=1.41e-5", "batch_size=128", "mini_batch_size=16"} <= set(
            re.findall(r"\w+=[^,\s]+", theirs)
        )
        assert (flags["lr"], flags["rollout_batch_size"], flags["batch_size"]) == (1.41e-5, 128, 16)
    else:
        assert {"num_generations=8", "max_steps=200", "beta=0.0"} <= set(re.findall(r"\w+=[^,\s]+", theirs))
        assert (flags["group_size"], flags["kl_coef"], run_dir) == (8, 0.0, Path("runs/my_grpo"))


def test_our_script_of_an_example_runs(folder):
    theirs, files, _ = example(TITLES[1])
    ast.parse(theirs)
    (folder / "my_ppo.py").write_text(
        files["my_ppo.py"].replace("total_episodes=12800", "total_episodes=128, threads=1")
    )
    names = runpy.run_path("my_ppo.py")
    flags = finished(names["run_dir"], 128)
    assert (flags["num_layers_unfrozen"], flags["batch_size"], flags["vf_coef"]) == (2, 32, 1.0)
    assert dataclasses.replace(names["args"], lr=1e-5) == ppo.Args(**vars(names["args"]) | {"lr": 1e-5})
