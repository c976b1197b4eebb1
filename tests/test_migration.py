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
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tyro
import yaml
from harness import ALGOS, ROOT
from helpers import log, write
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from algos import dpo, grpo, ppo, sft
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
    """(their script, {name: text} of our files, our command or None) of the example under a heading."""
    [text] = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    [theirs] = re.findall(r"```python\n# theirs\n(.*?)```", text, re.S)
    files = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.S))
    commands = re.findall(r"```\n(python algos/.*?)```", text, re.S)
    return theirs, files, commands[0].replace("\\\n", " ") if commands else None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with prompts and a tiny model under the names of the examples."""
    tokenizer = arithmetic.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=3, n_embd=12, n_head=2, n_positions=300, **special)
    torch.manual_seed(0)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)])
    write(tmp_path / "answers.jsonl", [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)])
    write(tmp_path / "pairs.jsonl", [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(9)])
    _, files, _ = example(GRPO)
    (tmp_path / "my_reward.py").write_text(files["my_reward.py"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


SFT = "SFTTrainer (TRL 1.16)"
DPO = "DPOTrainer (TRL 1.16)"
GRPO = "GRPOTrainer (TRL 1.16)"
PPO = "A loop around PPOTrainer.step (TRL 0.7)"
TRLX = "A config and trlx.train"


def finished(run_dir, episodes):
    """The flags of a run that sampled so many episodes and exported a model."""
    last = log(run_dir)[-1]
    assert last["episode"] == episodes and last["objective/scores"] > 0
    AutoModelForCausalLM.from_pretrained(run_dir / "hf_model")
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.parametrize(("title", "script", "episodes"), [(PPO, ppo, 128), (GRPO, grpo, 64)])
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


@pytest.mark.parametrize(("title", "script"), [(SFT, sft), (DPO, dpo)])
def test_our_command_for_rows_runs(title, script, folder):
    """Two steps of it, with the numbers of their script."""
    theirs, _, command = example(title)
    ast.parse(theirs)
    numbers = dict(re.findall(r"(\w+)=([^,\s]+),", theirs))
    args = tyro.cli(script.Args, args=shlex.split(command)[2:])
    assert args.micro_batch_size == int(numbers["per_device_train_batch_size"])
    assert args.batch_size == args.micro_batch_size * int(numbers["gradient_accumulation_steps"])
    assert (args.epochs, args.lr) == (float(numbers["num_train_epochs"]), float(numbers["learning_rate"]))
    assert f'"{args.lr_schedule}"' == numbers["lr_scheduler_type"] and f'"{args.run_dir}"' == numbers["output_dir"]
    _, run_dir = script.main(dataclasses.replace(args, total_steps=2, threads=1))
    assert log(run_dir)[-1]["step"] == 2
    AutoModelForCausalLM.from_pretrained(run_dir / "hf_model")


def test_our_score_compares_numbers(folder):
    """The last one, as a whole; their function of the page and README's say the same."""
    theirs, files, _ = example(GRPO)
    readme = re.findall(r"```python\n# my_reward.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    expected = {"6": 1, "46": 0, "so 5 + 1 = 6.": 1, "6.5": 0, "-6": 0, "6, no, 7": 0, "": 0}
    for source in (theirs.partition("\n\nconfig")[0].replace("from trl", "# "), files["my_reward.py"], readme):
        names = {}
        exec(source, names)
        columns = {"samples": [], "prompts": [], "outputs": list(expected), "completions": list(expected)}
        assert names["score"](**columns, answer=["6"] * len(expected)) == list(expected.values())


def test_our_script_of_an_example_runs(folder):
    theirs, files, _ = example(TRLX)
    ast.parse(theirs)
    (folder / "my_ppo.py").write_text(
        files["my_ppo.py"].replace("total_episodes=12800", "total_episodes=128, threads=1")
    )
    names = runpy.run_path("my_ppo.py")
    flags = finished(names["run_dir"], 128)
    assert (flags["num_layers_unfrozen"], flags["batch_size"], flags["vf_coef"]) == (2, 32, 1.0)
    assert dataclasses.replace(names["args"], lr=1e-5) == ppo.Args(**vars(names["args"]) | {"lr": 1e-5})
