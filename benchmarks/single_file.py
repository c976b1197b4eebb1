"""Writes a script with what it uses of common/ into one Python file, which runs anywhere:

    python benchmarks/single_file.py algos/ppo.py my_ppo.py

Definitions keep their text, with comments and docstrings; those that the script does not reach are left out. The file
writes the same metrics.jsonl to the byte. It needs the packages of requirements.txt, but neither the repository nor the
embedded tasks, which it does not hold.

How: a name at the top of a file means a definition of that file, an import, or what `from common.x import name` brings.
From the script on, all names that are read are followed. In one file each name can have only one meaning; two are an
error.
"""

import argparse
import ast
import builtins
import re
import subprocess
import symtable
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """# {script} with what it uses of common/, in one file. Made by
#     {command}
# from plainrl, commit {commit}. License: at the end of this file.
"""


@dataclass
class Source:
    name: str  # common/cli.py
    docstring: str = ""  # as it stands there, with its quotes
    parts: list = field(default_factory=list)  # the statements at its top, without imports
    imports: dict = field(default_factory=dict)  # {name: the import statements that bind it}, of other packages
    shared: dict = field(default_factory=dict)  # {name: the file of common/ that it comes from}


@dataclass
class Part:
    """A statement at the top of a file."""

    text: str  # with the comments above it
    defined: set  # the names that it binds
    used: set  # the names of its file that it reads


# ---- A file ----------------------------------------------------------------------------------------------------------


def take_apart(name):
    shared, text = without_shared_imports((ROOT / name).read_text())
    body = ast.parse(text).body
    lines = text.splitlines(keepends=True)
    source = Source(name, shared=shared)
    end = 0
    for node in body:
        begin = end
        end = node.end_lineno
        statement = "".join(lines[begin:end])
        if isinstance(node, ast.Import | ast.ImportFrom):
            add_imports(source, node)
        elif node is body[0] and isinstance(node, ast.Expr):
            source.docstring = statement
        else:
            source.parts.append(Part(statement, *names_of(statement)))
    return source


def without_shared_imports(text):
    """({name: file of common/}, the text without its imports from there, which may stand within functions)."""
    shared = {}
    modules = {}
    edits = []  # (first byte, last byte) of what goes
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] != "common":
            continue
        edits.append((starts[node.lineno - 1], starts[node.end_lineno]))
        folder = node.module.replace(".", "/")
        for alias in node.names:
            if (ROOT / f"{folder}/{alias.name}.py").exists():
                modules[alias.asname or alias.name] = f"{folder}/{alias.name}.py"
            else:
                shared[alias.name] = f"{folder}.py"
    for node in ast.walk(tree):  # checkpoint.export becomes export
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            begin = starts[node.lineno - 1] + node.col_offset
            edits.append((begin, begin + len(f"{node.value.id}.")))
            shared[node.attr] = modules[node.value.id]
    content = text.encode()
    for begin, end in sorted(edits, reverse=True):
        content = content[:begin] + content[end:]
    return shared, content.decode()


def add_imports(source, node):
    for alias in node.names:
        one = ast.Import([alias])
        if isinstance(node, ast.ImportFrom):
            one = ast.ImportFrom(node.module, [alias], 0)
        bound = alias.asname or alias.name.partition(".")[0]
        source.imports.setdefault(bound, set()).add(ast.unparse(one))


def names_of(text):
    """(names that a statement binds, names at the top of a file that it reads, also within functions)."""
    table = symtable.symtable(text, "statement", "exec")
    defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    used = set()
    scopes = [table]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or scope is table):
                used.add(symbol.get_name())
    return defined, used


# ---- All files -------------------------------------------------------------------------------------------------------


class Collection:
    """What a script reaches."""

    def __init__(self, script):
        self.sources = {}
        self.kept = {}  # {file: places of its parts}
        self.imports = set()
        self.meanings = {}  # {name: what it stands for}
        self.order = []  # files, each behind those that it needs
        self.script = self.source(script)
        for part in self.script.parts:
            if "sys.path.insert" not in part.text:  # it is there that `common` is found
                self.keep(self.script, part)

    def source(self, name):
        if name not in self.sources:
            self.sources[name] = take_apart(name)
            self.kept[name] = []
            for needed in self.sources[name].shared.values():
                self.source(needed)
            self.order.append(name)
        return self.sources[name]

    def keep(self, source, part):
        if part in self.kept[source.name]:
            return
        self.kept[source.name].append(part)
        for name in part.defined:
            self.mean(name, source.name)
        for name in part.used:
            self.find(source, name)

    def find(self, source, name):
        definitions = [part for part in source.parts if name in part.defined]
        if definitions:
            for part in definitions:
                self.keep(source, part)
        elif name in source.shared:
            self.find(self.source(source.shared[name]), name)
        elif name in source.imports:
            statements = source.imports[name]
            packages = {re.sub(r"^import (\w+)\.\S+$", r"import \1", statement) for statement in statements}
            self.mean(name, ", ".join(sorted(packages)))
            self.imports |= statements
        elif hasattr(builtins, name):
            self.mean(name, "the name of Python")

    def mean(self, name, meaning):
        first = self.meanings.setdefault(name, meaning)
        if first != meaning:
            raise SystemExit(f"error: {name} would mean two things in one file: {first}; {meaning}. Rename one")


def single_file(script, target, command):
    collection = Collection(script)
    source = collection.script
    sections = ["\n".join(sorted(collection.imports))]
    for name in collection.order:
        parts = [part for part in collection.sources[name].parts if part in collection.kept[name]]
        if name == script:
            sections.append(banner(name))
            sections += [part.text for part in parts]
        elif parts:
            sections.append(banner(name) + collection.sources[name].docstring)
            sections += [re.sub(r"(?m)^# ---- .*\n", "", part.text) for part in parts]
    text = "\n".join(sections)
    text = text.replace("ROOT = Path(__file__).resolve().parents[1]", "ROOT = Path(__file__).resolve().parent")
    text = text.replace(f"from {script[:-3].replace('/', '.')} import", f"from {Path(target).stem} import")
    git = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    header = HEADER.format(script=script, commit=commit, command=command)
    license_text = textwrap.indent((ROOT / "LICENSE").read_text(), "# ", lambda line: True)
    return f"{header}{source.docstring}\n\n{text}\n\n\n{banner('LICENSE')}{license_text}"


def banner(name):
    return f"\n\n# ==== {name} ".ljust(122, "=") + "\n"


def formatted(text):
    """The text as ruff sorts and formats files of this repository."""
    for words in (["check", "--select", "I", "--fix"], ["format"]):
        command = [sys.executable, "-m", "ruff", *words, "-q", "--stdin-filename", str(ROOT / "algos/one.py"), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main(script, target):
    name = str(Path(script).resolve().relative_to(ROOT))
    command = f"python benchmarks/single_file.py {name} {Path(target).name}"
    text = formatted(single_file(name, target, command))
    try:
        with open(target, "x") as file:  # edits of an earlier one stay
            file.write(text)
    except FileExistsError:
        raise SystemExit(f"error: {target} is there already: give another name, or remove it first") from None
    print(f"{target} has {name} with what it uses of common/, {text.count(chr(10)):,} lines")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="one of algos/")
    parser.add_argument("target", help="the file to write")
    main(**vars(parser.parse_args()))
