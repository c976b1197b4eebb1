"""Lines that read at speed: `python -m pytest tests/test_plain_lines.py`

A line holds one thought. Places that a reader has to unpick are listed here by their kind; a shipped file has none.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *(ROOT / f"algos/{name}.py" for name in ("ppo", "grpo", "ilql", "sft", "reward", "dpo", "ddpo")),
    *sorted((ROOT / "common").rglob("[a-z]*.py")),
    *sorted((ROOT / "benchmarks/tasks").glob("*.py")),
    *(ROOT / f"benchmarks/{name}.py" for name in ("check", "claims", "compare", "regression", "seeds", "single_file")),
]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_condition(node):
    """A comparison, and, or, not: as a factor it is an `if` in disguise."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, ast.Compare | ast.BoolOp)


def is_computed(node):
    """A value that is more than a name, a number, an entry, an empty or one-element display."""
    if isinstance(node, ast.List | ast.Dict | ast.Tuple):
        return len(list(ast.iter_child_nodes(node))) > 1
    return not isinstance(node, ast.Name | ast.Constant | ast.Attribute | ast.Subscript | ast.Starred)


def holds(node, kind):
    return any(isinstance(inner, kind) for inner in ast.walk(node))


def clever(node):
    """Why a node is hard to read; None where it is not."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        if is_condition(node.left) or is_condition(node.right):
            return "a condition as a factor"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        if any(map(is_computed, node.value.elts)):
            return "several computed values in one assignment"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple | ast.IfExp | ast.BoolOp):
        return "an expression for its effect"
    if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.IfExp):
        return "a conditional value is added"
    if isinstance(node, COMPREHENSIONS):
        if len(node.generators) > 1:
            return "two loops in a comprehension"
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        if any(holds(result, ast.IfExp) for result in results):
            return "a conditional value in a comprehension"
    if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse, node.test)):
        return "a conditional value in another"
    if isinstance(node, ast.Lambda) and len(list(ast.walk(node.body))) > 12:
        return "a long lambda"
    return None


def places(text):
    """["line: why"] of what a reader has to unpick."""
    listed = {(node.lineno, clever(node)) for node in ast.walk(ast.parse(text)) if clever(node)}
    return [f"{line}: {reason}" for line, reason in sorted(listed)]


def test_plain_lines():
    for path in FILES:
        listed = places(path.read_text())
        assert not listed, f"{path.relative_to(ROOT)} {listed}"


CLEVER = """
def f(text, rows, flag):
    name = text * (not flag)
    a, b = len(text), max(rows)
    flag and rows.append(1)
    name += "x" if flag else "y"
    pairs = [(x, y) for x in rows for y in rows]
    signs = [1 if x else 2 for x in rows]
    depth = 1 if flag else 2 if text else 3
    key = lambda row: (row[0] + row[1] * 2, -row[2], row[3].x)
"""
PLAIN = """
def f(text, rows, flag):
    first, second = rows
    a, b = text, rows[0]
    size = 1 if flag else 2
    return [row + 2 * size for row in rows if row]
"""


def test_the_measures_see_what_they_list():
    assert [int(place.partition(":")[0]) for place in places(CLEVER)] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert places(PLAIN) == []
