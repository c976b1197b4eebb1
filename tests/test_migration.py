"""python -m pytest tests/test_migration.py

algos/MIGRATION.md has a row for every name of tests/seed_names.txt, its rows are true of the scripts, and our halves of
its worked examples run.
"""

import dataclasses
import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import yaml
from harness import ALGOS, ROOT
from helpers import log, save, write

from benchmarks.tasks import arithmetic

PAGE = ROOT / "algos/MIGRATION.md"
COMMON = {path.stem: "common" for path in (ROOT / "common").glob("[a-z]*.py")}  # {file: its folder}
COMMON |= {path.stem: "common.lm" for path in (ROOT / "common/lm").glob("[a-z]*.py")}
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def page_rows():
    """(place, script or "every", names as in seed_names.txt or bare with the heading's owner in front, ours, note)."""
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("## "):
            section = line[3:].removesuffix(".py").replace("Every script", "every")
            owner = ""
        elif line.startswith("### "):
            owner = line[4:].strip("`")
        elif line.startswith("|") and not re.match(r"\|[-| ]+\||\| theirs ", line):
            theirs, here, note = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            spans = re.findall(r"`([^`]+)`", theirs)
            yield f"algos/MIGRATION.md:{number}", section, spans + [f"{owner}.{x}" for x in spans], here, note


def seed_names():
    """{name: the scripts that it belongs to}."""
    lines = (ROOT / "tests/seed_names.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line and not line.startswith("#")]
    names = {name: set(scripts.split(",")) for name, scripts in pairs}
    assert len(names) == len(pairs) and set().union(*names.values()) == {*ALGOS, "models"}
    return names


def has(module, name):
    """Whether a module has a function, a class or a class.method of this name."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module is not None


def test_every_seed_name_has_a_row():
    sections = {}
    for where, section, names, _, _ in page_rows():
        assert names and section in {*ALGOS, "every"}, where
        for name in names:
            sections.setdefault(name, set()).add(section)
    for name, scripts in seed_names().items():
        assert name in sections, f"{name} has no row"
        for script in scripts - {"models"}:
            assert sections[name] & {script, "every"}, f"{name}: no row under {script}.py"


def test_rows_are_true_of_the_scripts():
    seeds = seed_names()
    modules = {name: importlib.import_module(f"{folder}.{name}") for name, folder in COMMON.items()}
    common = SimpleNamespace(**modules)
    for where, section, names, here, note in page_rows():
        spans = re.findall(r"`([^`]+)`", here)
        assert spans or (here == "gone" and note), f"{where}: {here!r}"
        scripts = [section]
        if section == "every":
            scripts = [algo for algo in ALGOS if any(algo in seeds.get(name, []) for name in names)]
        for algo in scripts:
            module = importlib.import_module(f"algos.{algo}")
            flags = {field.name for field in dataclasses.fields(module.Args)}
            for flag in FLAG.findall(here + note):
                assert flag[2:].replace("-", "_") in flags | {"config"}, f"{where}: {algo}.py has no {flag}"
            for span in spans:
                is_file = "/" in span or re.search(r"\.(py|md|jsonl|yaml|safetensors)$", span)
                if re.match(r"(algos|common|benchmarks|tests)/", span):
                    assert (ROOT / span).exists(), f"{where}: no {span}"
                elif not is_file and not FLAG.match(span):
                    name = span.partition("(")[0]
                    assert has(module, name) or has(common, name), f"{where}: {algo}.py has no {span}"


# ---- Worked examples -------------------------------------------------------------------------------------------------


def example(title):
    """(their script, {name: text} of our files) of the example under a heading."""
    [text] = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    files = dict(re.findall(r"```python\n# (theirs|my_\w+\.py)\n(.*?)```", text, re.S))
    return files.pop("theirs"), files


GRPO = "GRPOTrainer (TRL 1.16)"


def test_our_score_compares_numbers():
    theirs, files = example(GRPO)
    readme = re.findall(r"```python\n# my_reward.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    expected = {"6": 1, "46": 0, "so 5 + 1 = 6.": 1, "6.5": 0, "-6": 0, "6, no, 7": 0, "": 0}
    for source in (theirs.partition("\n\nconfig")[0].replace("from trl", "# "), files["my_reward.py"], readme):
        names = {}
        exec(source, names)
        columns = {"samples": [], "prompts": [], "outputs": list(expected), "completions": list(expected)}
        assert names["score"](**columns, answer=["6"] * len(expected)) == list(expected.values())


def test_our_script_of_an_example_runs(build_model, tmp_path, monkeypatch):
    """One iteration of it. test_docs.py parses our commands, the scripts of the other examples."""
    monkeypatch.chdir(tmp_path)
    tokenizer = arithmetic.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    save("gpt2", build_model(vocab_size=len(tokenizer), n_layer=3, n_positions=300, **special), tokenizer)
    write("prompts.jsonl", [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)])
    _, files = example("A config and trlx.train")
    Path("my_reward.py").write_text(example(GRPO)[1]["my_reward.py"])
    Path("my_ppo.py").write_text(files["my_ppo.py"].replace("episodes=12800", "episodes=128, threads=1"))
    names = runpy.run_path("my_ppo.py")
    flags = yaml.safe_load((names["run_dir"] / "config.yaml").read_text())
    assert log(names["run_dir"])[-1]["episode"] == 128
    assert (flags["num_layers_unfrozen"], flags["batch_size"], flags["vf_coef"]) == (2, 32, 1.0)
