"""Lines that read at speed: `python -m pytest tests/test_plain_lines.py`

A line holds one thought. Two measures of every shipped file: places that a reader has to unpick, which are listed here
by their kind, and names, numbers, strings and operators per line of code. The limits are what the files have reached.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *sorted((ROOT / "algos").glob("*.py")),
    *sorted((ROOT / "common").glob("[a-z]*.py")),
    *sorted((ROOT / "benchmarks/tasks").glob("*.py")),
    *(ROOT / f"benchmarks/{name}.py" for name in ("check", "claims", "compare", "regression", "seeds", "single_file")),
]
SHIPPED = "ppo grpo ilql sft reward dpo ddpo".split()
FILES = [path for path in FILES if path.parent.name != "algos" or path.stem in SHIPPED]
MOST_TOKENS = 7.3
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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


def assignments_in_expressions(tree):
    """Walruses that stand anywhere but in the test of an `if` or `while`."""
    allowed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While):
            allowed |= {id(inner) for inner in ast.walk(node.test) if isinstance(inner, ast.NamedExpr)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.NamedExpr) and id(node) not in allowed]


def loop_variables_read_later(tree):
    """Names in functions that are read behind the loop that sets them, and set nowhere else behind it."""
    later = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For):
                continue
            targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
            behind = [node for node in names if node.id in targets and node.lineno > loop.end_lineno]
            if behind and all(isinstance(node.ctx, ast.Load) for node in behind):
                later.append(behind[0])
    return later


def places(text):
    """["line: why"] of what a reader has to unpick."""
    tree = ast.parse(text)
    listed = {(node.lineno, clever(node)) for node in ast.walk(tree) if clever(node)}
    listed |= {(node.lineno, "an assignment in an expression") for node in assignments_in_expressions(tree)}
    listed |= {(node.lineno, "a loop variable behind its loop") for node in loop_variables_read_later(tree)}
    return [f"{line}: {reason}" for line, reason in sorted(listed)]


def tokens_a_line(text):
    """Names, numbers, strings and operators per line of code; neither docstrings nor brackets, commas and colons."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT or token.string in "()[]{},:" or token.start[0] in docstrings:
            continue
        lines.append(token.start[0])
    return len(lines) / len(set(lines))


def test_plain_lines():
    for path in FILES:
        text = path.read_text()
        listed = places(text)
        assert not listed, f"{path.relative_to(ROOT)} {listed}"
        assert tokens_a_line(text) <= MOST_TOKENS, path


CLEVER = """
def f(text, rows, flag):
    name = text * (not flag)
    a, b = len(text), max(rows)
    flag and rows.append(1)
    name += "x" if flag else "y"
    pairs = [(x, y) for x in rows for y in rows]
    signs = [1 if x else 2 for x in rows]
    size = (n := len(rows)) + 1
    depth = 1 if flag else 2 if text else 3
    key = lambda row: (row[0] + row[1] * 2, -row[2], row[3].x)
    for row in rows:
        pass
    return row
"""
PLAIN = """
def f(text, rows, flag):
    first, second = rows
    a, b = text, rows[0]
    if (n := len(rows)) > 3 and flag:
        return n
    size = 1 if flag else 2
    return [row + 2 * size for row in rows if row]
"""


def test_the_measures_see_what_they_list():
    assert [int(place.partition(":")[0]) for place in places(CLEVER)] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 14]
    assert places(PLAIN) == []
    assert tokens_a_line("x = f(a, b)  # one\n'''text'''\ny = x + 1\n") == 5
