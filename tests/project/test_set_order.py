"""No order of a set decides what ranks do: each process has a hash seed of its own, and so an order of its own.

Where collectives are issued, nothing walks over a set, but to make what has no order (another set, a sum, `sorted`).
A set is known by its form and by annotations: of functions, arguments, attributes and variables.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotp

ROOT = Path(autotp.__file__).resolve().parent
FOLDERS = ("training", "distributed", "runtime", "checkpoint", "groups", "integrations", "experimental")
SETS = {"set", "frozenset", "AbstractSet", "Set"}
NO_ORDER = {"sorted", "set", "frozenset", "sum", "len", "any", "all", "min", "max", "update", "union"}
"""Functions whose result has no order that comes from their argument's."""
IN_ORDER = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "fromkeys", "join", "extend", "chain"}


def name_of(node: ast.expr | None) -> str:
    """The last name of a called function, an annotation or the like."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def annotated(tree: ast.AST) -> dict[str, list[bool]]:
    """Name of a function or an attribute -> whether its annotations say that it is a set."""
    found: dict[str, list[bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(name_of(node.returns) in SETS)
        elif isinstance(node, ast.AnnAssign):
            found.setdefault(name_of(node.target), []).append(name_of(node.annotation) in SETS)
    return found


class Walks(ast.NodeVisitor):
    """Finds where a function, or what is outside functions, walks over a set."""

    def __init__(self, known: set[str]) -> None:
        self.known, self.local, self.free, self.found = known, set[str](), set[ast.AST](), list[ast.AST]()

    def is_set(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
            return self.is_set(node.left) or self.is_set(node.right)
        if isinstance(node, ast.Name):
            return node.id in self.local
        named = isinstance(node, ast.Call | ast.Attribute) and name_of(node) in self.known | SETS
        return named or isinstance(node, ast.Set | ast.SetComp)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.local
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self.local = before - {arg.arg for arg in given} | {a.arg for a in given if name_of(a.annotation) in SETS}
        for one in ast.walk(node):
            if isinstance(one, ast.AnnAssign) and name_of(one.annotation) in SETS:
                self.local = self.local | {name_of(one.target)}
            if isinstance(one, ast.Assign) and self.is_set(one.value):
                self.local = self.local | {name_of(target) for target in one.targets}
        self.generic_visit(node)
        self.local = before

    def note(self, node: ast.AST, walked: list[ast.expr]) -> None:
        if node not in self.free and any(map(self.is_set, walked)):
            self.found.append(node)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.note(node, [node.iter])

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.note(node, [each.iter for each in node.generators])

    visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        if name_of(node) in NO_ORDER:
            self.free.update(node.args)
        self.note(node, node.args if name_of(node) in IN_ORDER else [])

    def visit_Starred(self, node: ast.Starred) -> None:
        self.note(node, [node.value])

    def visit_Set(self, node: ast.Set) -> None:
        self.free.update(node.elts)
        self.generic_visit(node)


def walks(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The first line of each place that walks over a set."""
    finder = Walks(known)
    finder.visit(tree)
    yield from (ast.unparse(node).splitlines()[0] for node in finder.found)


@pytest.mark.each_time
def test_no_order_of_a_set_decides() -> None:
    files = {*ROOT.rglob("*.py"), *(ROOT / "passes").rglob("*.py")}  # A link, which rglob may not follow.
    trees = {file: ast.parse(file.read_text()) for file in sorted(files)}
    every: dict[str, list[bool]] = {}
    for tree in trees.values():
        for name, sets in annotated(tree).items():
            every.setdefault(name, []).extend(sets)
    known = {name for name, sets in every.items() if all(sets)}
    mine = {file: tree for file, tree in trees.items() if file.relative_to(ROOT).parts[0] in FOLDERS}
    found = {f"{file.name}: {line}" for file, tree in mine.items() for line in walks(tree, known)}
    assert len(mine) > 50 and known
    assert not found, "write sorted(...), or keep the names in a list or a dict"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f() -> set[str]: ...\nfor x in f(): send(x)", 1),
        ("def f(names: frozenset[str]):\n    return [send(x) for x in names]", 1),
        ("def f(a):\n    names = {x for x in a} - a\n    return list(names)", 1),
        ("def f(a):\n    return dict.fromkeys({*a})", 1),
        ("def f(a):\n    names: set[str] = g(a)\n    return [*names]", 1),
        ("def f(names: set[str]):\n    return sorted(names), {x for x in names}, sum(x for x in names), {*names}", 0),
        ("def f(names: list[str]):\n    return list(names)", 0),
    ],
)
def test_what_walks_over_a_set_is_found(code: str, found: int) -> None:
    tree = ast.parse(code)
    known = {name for name, sets in annotated(tree).items() if all(sets)}
    assert len(list(walks(tree, known))) == found
