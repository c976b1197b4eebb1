"""The rules of the house: `python -m pytest tests/test_duplicates.py`

What goes where, who may import whom; what stands in two scripts is the same bytes; equal flags have equal types, every
flag is read; no call that could run code from a file; the shape of main. Only the scripts of the repository are looked
at: a copy that somebody edits may lie beside them, or anywhere with the repository on the path.
"""

import ast
import dataclasses
import graphlib
import importlib
import re

import pytest
from harness import ALGOS, ROOT

SCRIPTS = [ROOT / f"algos/{name}.py" for name in ALGOS]
COMMON = sorted((ROOT / "common").rglob("*.py"))
EVERY = SCRIPTS + COMMON + sorted((ROOT / "benchmarks").rglob("*.py"))
OWN = {path.name for path in ROOT.iterdir() if path.is_dir()}
# What each script has of its own under the same name.
DIFFERENT = set("Args Data main read load encode summary evaluate update".split())
DIFFERENT |= set("Episode losses minibatches rollout rollout_metrics token_metrics".split())
OWN_FLAGS = 48  # that stand in one script at most


def definitions(path):
    """{name: source with its decorators} of the functions and classes at the top of a file."""
    text = path.read_text()
    lines = text.splitlines()
    sources = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.name not in sources, f"{path.name} defines {node.name} twice"
            sources[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return sources


def written_flags(path):
    """{field: (annotation, docstring below it)} of each class of flags in a file, as they stand there."""
    fields = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Args"):
            continue
        for line, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign):
                has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                fields[line.target.id] = ast.unparse(line.annotation), below.value.value if has_text else None
    return fields


def imports(path):
    """Top-level names of the packages that a file imports, anywhere in it."""
    names = {*re.findall(r"^ *(?:import|from) (\w*)", path.read_text(), re.MULTILINE)}
    assert "" not in names, f"{path.name}: relative import"
    return names


def args_read(paths):
    """Names of the attributes of `args` (or `self.args`) that the files read, also in methods of Args and by the names
    of options of evaluations, not counting the rules between flags."""
    read = set()
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if getattr(node, "name", "") in ("__post_init__", "problems"):
                node.body = []
        for part in tree.body:
            owners = ["self"] if getattr(part, "name", "").endswith("Args") else ["args", "self.args", "own"]
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
                    read.add(node.attr)
                if isinstance(node, ast.Assign) and ast.unparse(node).startswith("names = ('seed', "):
                    read |= set(ast.literal_eval(node.value))
    return read


def differing_copies(paths):
    """(name, file, file) of the functions and classes that stand in two files and differ."""
    seen = {}
    differing = []
    for path in paths:
        for name, source in definitions(path).items():
            first, other = seen.setdefault(name, (path.name, source))
            if name not in DIFFERENT and source != other:
                differing.append((name, first, path.name))
    return differing


def imported_files(path, files):
    """Those of the files that a file imports, anywhere in it. A script finds files beside it by their names alone."""
    named = {}
    for file in files:
        named[".".join(file.relative_to(ROOT).with_suffix("").parts)] = file
        if file.parent == path.parent and path not in COMMON:
            named[file.stem] = file
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {named.get(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(named.get(node.module))
            found |= {named.get(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {None}


def test_same_name_same_bytes(tmp_path):
    assert differing_copies(SCRIPTS) == []
    copies = [tmp_path / "one.py", tmp_path / "two.py", tmp_path / "three.py"]
    for path, number in zip(copies, (1, 1, 2), strict=True):
        path.write_text(f"def half(x):\n    return x / {number}\n\n\ndef main(x):\n    return {path.stem!r}\n")
    assert differing_copies(copies) == [("half", "one.py", "three.py")]


def test_a_script_defines_nothing_that_common_has():
    shared = {}
    for path in COMMON:
        shared |= dict.fromkeys(definitions(path), path.name)
    for path in SCRIPTS:
        twice = {name: shared[name] for name in definitions(path).keys() & shared.keys()}
        assert not twice, f"{path.name} has its own {twice}"


def test_equal_flags_have_equal_type_and_every_flag_has_help():
    """A help text speaks of its own script, so it may differ."""
    seen = {}
    for path in [ROOT / "common/cli.py", *SCRIPTS]:
        for name, (annotation, text) in written_flags(path).items():
            assert text, f"{path.name}: {name} has no docstring"
            assert not re.search(r"\b(ppo|grpo|ilql|sft|reward|dpo|ddpo)\.py\b", text), f"{path.name}: help of {name}"
            annotation = annotation.removesuffix(" | None")  # None: not given, which a script may resolve by itself
            first_script, first_annotation = seen.setdefault(name, (path.name, annotation))
            assert annotation == first_annotation, f"{name} differs between {first_script} and {path.name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_flag_is_read(path):
    """In the script or in common/, which gets args; not counting Args itself, which validates."""
    args_class = importlib.import_module(f"algos.{path.stem}").Args
    dead = {field.name for field in dataclasses.fields(args_class)} - args_read([path, *COMMON])
    assert not dead, f"nothing reads {sorted(dead)}"
    unknown = [name for name in args_read([path]) if not hasattr(args_class, name)]
    assert not unknown, f"args.{unknown} is read, which Args does not have"
    assert len(written_flags(path)) <= OWN_FLAGS


def test_imports():
    """Scripts and common import only common of this repository, and what ddpo uses imports nothing of common/lm."""
    for path in SCRIPTS + COMMON:
        assert imports(path) & OWN <= {"common"}, path
    for path in [*(ROOT / "common").glob("*.py"), ROOT / "algos/ddpo.py"]:
        assert not any("lm" in file.parts for file in imported_files(path, COMMON)), path


def test_no_circles():
    """Of imports, also of those within functions."""
    imported = {path: imported_files(path, EVERY) for path in EVERY}
    speed = ROOT / "benchmarks/throughput"
    assert speed / "measurement.py" in imported[speed / "run.py"]  # within a function, from the folder beside it
    graphlib.TopologicalSorter(imported).prepare()  # an error names the files of a circle


@pytest.mark.case(98, "ppo grpo ilql sft reward dpo ddpo")
@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_nothing_runs_code_from_files(path):
    """No pickle in any form, no eval, no shell, no code of hub repositories unless the user's flag says so."""
    assert not imports(path) & {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            where = f"{path.name}:{node.lineno}: {called}"
            assert called not in {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}, where
            is_text = "Loader=yaml.BaseLoader" in ast.unparse(node)  # makes texts, lists and dicts alone
            loads = re.fullmatch(r"torch\.(load|save)|(np|numpy)\.load|yaml\.(unsafe_|full_)?load(_all)?", called)
            assert not loads or is_text, where
            for keyword in node.keywords:
                on = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                literal = isinstance(keyword.value, ast.Constant) and on
                assert not (keyword.arg == "shell" and on), where
                assert not (keyword.arg in ("trust_remote_code", "allow_pickle") and literal), where
        if isinstance(node, ast.Dict):  # {"trust_remote_code": True}, to be passed as keywords
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in ("trust_remote_code", "allow_pickle", "shell"):
                    assert not isinstance(value, ast.Constant) or not value.value, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_main_is_read_at_a_glance(path):
    main = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == "main")
    assert main.end_lineno - main.lineno < 90
    [loop] = [node for node in main.body if isinstance(node, ast.For)]
    assert loop.end_lineno - loop.lineno < 60
