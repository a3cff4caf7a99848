"""docs/refused.md has an entry for each message with which autotp refuses a model, and for no other.

The messages are read from the source: the first argument of each `Error(...)` in a module that captures, plans, lowers,
checks or initialises a model, or looks at the arguments of a call. What an f-string fills in is a hole, which fits any
text. A variable is followed to what is assigned to it, a parameter to what the callers of the function give.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "refused.md"
SCOPE = (
    "passes", "autotp/rules", "autotp/deferred_init", "autotp/api.py", "autotp/arguments.py", "autotp/compiler.py",
    "autotp/options.py", "autotp/ops/custom_vjp.py", "autotp/ops/experts.py", "autotp/runtime/build.py",
    "autotp/runtime/holdings.py", "autotp/runtime/torch_hooks/wrappers.py",
    "autotp/runtime/torch_hooks/gradient_nodes.py", "autotp/distributed/mesh.py", "autotp/distributed/consistency.py",
    "autotp/distributed/cut_tensors", "autotp/distributed/gather.py",
    "autotp/training/distribute.py", "autotp/training/compute_dtype.py", "autotp/training/model_settings.py",
    "autotp/training/original_model.py",
    "autotp/training/pipeline/schedules.py", "autotp/training/pipeline/halved_backward.py",
    "autotp/estimation", "autotp/page",
)  # fmt: skip
"""What runs before the first step of a model is computed."""
FOLLOW = "the model changes a tensor in place where autotp cannot follow: "
HOLE = "\0"
FEW = 10
"""So many known letters tell a message from others."""
ENTRY = re.compile(r"^```text\n(?P<message>.*?)^```\n+(?P<told>.*?)(?=^```text|^#|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Site:
    """An expression that is a message, in a function of a module."""

    file: str
    line: int
    message: str  # HOLE for what is filled in

    @property
    def literal(self) -> int:
        """How many of its characters are known."""
        return len(self.message.replace(HOLE, ""))


@dataclass(frozen=True)
class Entry:
    """A message on the page, with its cause and what to write."""

    message: str  # `...` for what differs
    told: str

    def fits(self, site: Site) -> bool:
        """An entry that says little is for messages that say little."""
        return (self.said >= FEW or site.literal < FEW) and any(
            re.fullmatch(".+".join(map(re.escape, text.split("..."))), other.replace(HOLE, "..."), re.DOTALL)
            for text, other in ((self.message, site.message), (self.message, site.message.replace(HOLE, "x ... x")))
        )

    @property
    def said(self) -> int:
        """How many of its characters are not left open."""
        return len(self.message.replace("...", ""))


def files() -> list[Path]:
    found = [ROOT / name for name in SCOPE]
    return [file for path in found for file in ([path] if path.suffix else sorted(path.rglob("*.py")))]


@cache
def functions() -> dict[str, list[tuple[Path, ast.FunctionDef]]]:
    """Name -> the functions of this name."""
    found: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append((file, node))
    return found


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@cache
def every_call() -> dict[str, list[tuple[Path, ast.FunctionDef, ast.Call]]]:
    """Name -> the calls of this name, each in the innermost function that makes it."""
    found: dict[int, tuple[Path, ast.FunctionDef, ast.Call]] = {}
    for file, function in (entry for entries in functions().values() for entry in entries):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                before = found.get(id(node))
                if before is None or before[1].lineno < function.lineno:
                    found[id(node)] = file, function, node
    by_name: dict[str, list[tuple[Path, ast.FunctionDef, ast.Call]]] = {}
    for call in found.values():
        by_name.setdefault(called(call[2]), []).append(call)
    return by_name


def calls(name: str) -> list[tuple[Path, ast.FunctionDef, ast.Call]]:
    return every_call().get(name, [])


def assigned(function: ast.FunctionDef, name: str, before: int) -> list[ast.expr]:
    """What was last assigned to a local variable above a line."""
    found = [value for value in _assigned(function, name) if value.lineno < before]
    return sorted(found, key=lambda value: value.lineno)[-1:]


def _assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=True):
                        if isinstance(one, ast.Name) and one.id == name:
                            yield value


def given(function: ast.FunctionDef, call: ast.Call, name: str) -> ast.expr | None:
    """What a call gives for a parameter of a function."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] == ["self"]:
        names = names[1:]
    by_name = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in by_name:
        return by_name[name]
    at = names.index(name) if name in names else len(call.args)
    return call.args[at] if at < len(call.args) else None


def parameters(function: ast.FunctionDef) -> set[str]:
    args = function.args
    return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def texts(node: ast.expr | None, function: ast.FunctionDef, seen: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """The texts that an expression may be, each with the line where its words are."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [(node.lineno, node.value)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, function, seen) + texts(node.orelse, function, seen)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = ((a, b) for a in texts(node.left, function, seen) for b in texts(node.right, function, seen))
        return [(b[0] if a[1] == HOLE else a[0], a[1] + b[1]) for a, b in pairs]
    if isinstance(node, ast.JoinedStr):
        found = [(node.lineno, "")]
        for part in node.values:
            parts = [(node.lineno, part.value if isinstance(part, ast.Constant) else HOLE)]
            if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
                parts = texts(part.value, function, seen)
            found = [(b[0] if b[1] != HOLE else a[0], a[1] + str(b[1])) for a in found for b in parts]
        return found
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rstrip":
        return texts(node.func.value, function, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        values = assigned(function, node.id, node.lineno)
        if values:
            return [found for value in values for found in texts(value, function, (*seen, node.id))]
        if node.id in parameters(function):
            makers = [(f, g, c) for f, g, c in calls(function.name) if given(function, c, node.id) is not None]
            found = [t for _, g, c in makers for t in texts(given(function, c, node.id), g, (*seen, node.id))]
            return found or [(node.lineno, HOLE)]
    return [(getattr(node, "lineno", 0), HOLE)]


@cache
def errors() -> list[str]:
    """`Error`, and the classes that are made from it."""
    found = [re.findall(r"^class (\w+)\(Error\):", file.read_text(), re.MULTILINE) for file in files()]
    return ["Error", *itertools.chain.from_iterable(found)]


@cache
def sites() -> list[Site]:
    found = set()
    for file, function, call in itertools.chain.from_iterable(calls(name) for name in errors()):
        problem = call.args[0] if call.args else None
        found |= {Site(str(file.relative_to(ROOT)), line, text) for line, text in texts(problem, function)}
    return sorted(found, key=lambda site: (site.file, site.line, site.message))


@cache
def entries() -> list[Entry]:
    return [Entry(found["message"].strip(), found["told"]) for found in ENTRY.finditer(PAGE.read_text())]


def entry_of(site: Site) -> Entry | None:
    """The entry that says most of a message."""
    return max((entry for entry in entries() if entry.fits(site)), key=lambda entry: entry.said, default=None)


ELSEWHERE = ("\0", "\0 \0", "\0 \0 than \0", "\0 \0 than rank 0", f"{FOLLOW}\0")
"""Messages of a function whose callers say all of it: another rank, or modules that run later."""


def messages() -> list[Site]:
    return [site for site in sites() if site.message not in ELSEWHERE]


def test_each_message_has_an_entry() -> None:
    assert [f"{site.file}:{site.line}: {site.message}" for site in messages() if entry_of(site) is None] == []


def test_each_entry_is_a_message_and_says_what_to_write() -> None:
    found = {entry_of(site) for site in messages()}
    assert [entry.message for entry in entries() if entry not in found] == []
    assert [entry.message for entry in entries() if not re.search(r"\*\*(Write|Do)\*\*", entry.told)] == []


def test_messages_are_found() -> None:
    """In an f-string, a variable, a sum, and through a parameter of a function."""
    texts_ = {site.message for site in sites()}
    assert len(texts_) > 120
    assert {
        "a set holds tensors",
        f"`{HOLE}` is part of another parallel model",
        "the model asserts something about the values of a tensor, which are not known in a graph",
        f"{HOLE} rank {HOLE} of {HOLE}: `{HOLE}` is not what the model computes",
        "torch.inference_mode would be lost: a graph of the model does not have it",
    } <= texts_
