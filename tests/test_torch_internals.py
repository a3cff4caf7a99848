"""torch_internals: the tables have every name that the code replaces or uses, and a name that torch changes is told."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autotp
from autotp import torch_internals as internals
from autotp.torch_internals import (
    ADDED,
    CALLERS,
    OF_OBJECTS,
    REPLACED,
    TO_FILL,
    USED,
    Replaced,
    expect_callers,
    looks_up,
)

ROOT = Path(autotp.__file__).resolve().parents[1]
OTHER_LIBRARIES = ROOT / "autotp" / "integrations"
"""Names of transformers and others have tables of their own."""
PATCHERS = ("patch", "patch.object", "mock.patch", "mock.patch.object", "setattr", "delattr")
CALLED = [(row, caller) for row in REPLACED for caller in row.callers]


@pytest.fixture(autouse=True)
def checked_anew() -> Iterator[None]:
    internals._expect_called.cache_clear()
    yield
    internals._expect_called.cache_clear()


# ---- each row is true of this torch


@pytest.mark.parametrize("row", REPLACED, ids=str)
def test_each_replaced_name_exists_and_is_looked_up(row: Replaced) -> None:
    if row.name in ADDED:
        assert not hasattr(row.resolved_owner(), row.name)
        row.put(print)()
    else:
        assert row.original() is not None


def test_silent_rows_have_callers_to_check() -> None:
    """C++ asks for the one that has none: tests/passes/capture/unsupported/test_lost_gradients.py has its canary."""
    assert [row for row in REPLACED if row.silent and not row.callers] == [internals.READS_FUNCTION]


@pytest.mark.parametrize("row", REPLACED, ids=str)
def test_replaced_names_are_put_back(row: Replaced) -> None:
    owner = row.resolved_owner()
    before = _own(owner, row.name)
    if row.owner == "builtins":
        with row.replaced_by(isinstance):
            pass
    else:
        ours: Any = (lambda: None).__code__ if row.name == "__code__" else object()
        undo = row.put(ours)
        during = _own(owner, row.name)
        undo()
        assert during is ours
    assert _own(owner, row.name) is before


def _own(owner: Any, name: str) -> Any:
    """An attribute of an object itself; the code of a function is in none of its own attributes."""
    return owner.__code__ if name == "__code__" else vars(owner).get(name)


# ---- what a new torch may do


def can_be_gone(row: Replaced) -> bool:
    """False for names of Python, those of each function, and for those that a class above has, too."""
    owner = row.resolved_owner()
    above = owner.__mro__[1:] if isinstance(owner, type) else ()
    return (
        row.owner not in ("builtins", "sys")
        and row.name != "__code__"
        and row.name not in ADDED
        and not any(hasattr(base, row.name) for base in above)
    )


@pytest.mark.parametrize("row", [row for row in REPLACED if can_be_gone(row)], ids=str)
def test_put_of_a_missing_name_is_an_error(row: Replaced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(row.resolved_owner(), row.name)
    with pytest.raises(autotp.Error, match=f"has no `.*{row.name}`, on which autotp relies"):
        row.put(None)


@pytest.mark.parametrize(("row", "caller"), CALLED, ids=lambda x: str(x))
def test_a_name_its_caller_no_longer_looks_up_is_an_error(
    row: Replaced, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of torch gets another name to look up, as after a refactoring; the old name is still there."""
    function = resolve_name(caller)
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    monkeypatch.setattr(function, "__code__", renamed(function.__code__, row.name))
    with pytest.raises(autotp.Error, match=f"does not call `.*{row.name}`") as raised:
        row.original()
    if row.silent:
        assert row.silent in str(raised.value)


def renamed(code: types.CodeType, name: str) -> types.CodeType:
    def other(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{x}_of_a_later_torch" if x == name else x for x in names)

    constants = tuple(renamed(x, name) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.replace(co_names=other(code.co_names), co_freevars=other(code.co_freevars), co_consts=constants)


def test_looks_up_knows_the_module_of_a_name() -> None:
    from torch._functorch import apis, vmap

    assert looks_up(vmap.vmap_impl, vmap, "_process_batched_inputs")
    assert not looks_up(vmap.vmap_impl, apis, "_process_batched_inputs")
    assert not looks_up(torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad, "_process_batched_inputs")
    assert not looks_up(torch.add, torch, "_process_batched_inputs"), "it is not written in Python"


# ---- modules, functions and texts


@pytest.mark.parametrize("name", sorted({name.rstrip(".") for name in CALLERS}))
def test_each_module_of_callers_exists(name: str) -> None:
    assert find_spec(name) is not None


@pytest.mark.parametrize(("module", "function"), TO_FILL)
def test_each_function_that_fills_a_state_dict_exists(module: str, function: str) -> None:
    assert callable(getattr(pytest.importorskip(module), function))


def test_expect_callers_names_a_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_callers.cache_clear()
    monkeypatch.setattr(internals, "CALLERS", ("torch.optim._of_an_earlier_torch",))
    with pytest.raises(autotp.Error, match=r"has no module `torch\.optim\._of_an_earlier_torch`"):
        expect_callers()
    monkeypatch.undo()
    expect_callers()


def meta_as_numbers() -> None:
    with FakeTensorMode():
        torch.ones(2).numpy()


def complex_number() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        torch.ones((), dtype=torch.complex64).item()


def two_modes() -> None:
    with FakeTensorMode():
        first = torch.ones(2)
    with FakeTensorMode():
        detect_fake_mode([first, torch.ones(2)])


def numbers_for_sizes() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        columns = torch.ones(1).long().item()
        torch.baddbmm(torch.ones(6, 1, 1), torch.ones(6, 5, 4), torch.ones(6, 4, columns))


def memory_of_fakes() -> None:
    with FakeTensorMode():
        torch.tensor_split(torch.ones(4), torch.tensor([1, 2]))


def flags_of_results() -> None:
    (torch.ones(2, requires_grad=True) * 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("run", "texts"),
    [
        (meta_as_numbers, (internals.NO_NUMPY,)), (complex_number, (internals.NO_COMPLEX,)),
        (two_modes, (internals.OTHER_MODE,)), (numbers_for_sizes, internals.NEEDS_NUMBERS[:1]),
        (memory_of_fakes, internals.NEEDS_NUMBERS[1:]), (flags_of_results, (internals.SETS_FLAGS,)),
    ],
)  # fmt: skip
def test_torch_s_error_texts_are_those_we_read(run: Callable[[], None], texts: Sequence[str]) -> None:
    with pytest.raises(Exception) as raised:
        run()
    assert all(text in str(raised.value) for text in texts)


# ---- the tables have all names of the source


def trees() -> dict[Path, ast.Module]:
    paths = [path for top in ("autotp", "passes") for path in sorted((ROOT / top).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths if not any(x.is_symlink() for x in path.parents)}


TREES = trees()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.Module) -> dict[str, str]:
    """Returns what the names of a file stand for that it imports from elsewhere."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: path for name, path in names.items() if not path.startswith(("autotp", "__future__"))}


def dotted(node: ast.expr) -> list[str]:
    """Returns the names of `a.b.c`; an empty list for other expressions."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else []


def defined() -> set[str]:
    """Returns the names that autotp itself defines, as functions, classes or attributes."""
    names = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if dotted(node)[:1] in (["self"], ["cls"]) else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def private_uses() -> Iterator[tuple[str, str]]:
    """Yields private names of others, as "torch._C._functorch" or as an attribute ".name", and the place of each."""
    own = defined()
    for path, tree in TREES.items():
        if path.is_relative_to(OTHER_LIBRARIES) or path.name == "torch_internals.py":
            continue
        names = imported(tree)
        place = str(path.relative_to(ROOT))
        yield from ((full, place) for full in names.values() if any(map(is_private, full.split("."))))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            first, *rest = dotted(node) or [""]
            if "aten" in (first, *rest[:2]):  # The name of an operator.
                continue
            if first in names:
                yield ".".join([names[first], *rest]), f"{place}:{node.lineno}"
            elif node.attr not in own:
                yield f".{node.attr}", f"{place}:{node.lineno}"


def in_table(use: str) -> bool:
    """True if the table has a name, or what it is an attribute of."""
    names = use.split(".")
    of_objects = {
        name for row in USED if row.owner.startswith(OF_OBJECTS) or not names[0] for name in row.names.split()
    }
    full = {f"{row.owner}.{name}" for row in USED for name in row.names.split()}
    return names[-1] in of_objects or any(".".join(names[:n]) in full for n in range(len(names) + 1))


@pytest.mark.each_time
def test_every_private_name_is_in_the_table() -> None:
    missing = {use: place for use, place in private_uses() if not in_table(use)}
    assert missing == {}, "add a row to USED in autotp/torch_internals.py, or use a public name"


def test_every_name_of_the_table_is_used() -> None:
    text = "\n".join(path.read_text() for path in TREES if path.name != "torch_internals.py")
    assert [name for row in USED for name in row.names.split() if name.split(".")[-1] not in text] == []


@pytest.mark.parametrize(
    "row", [row for row in USED if not row.owner.startswith(OF_OBJECTS)], ids=lambda row: row.owner
)
def test_each_used_name_exists(row: Any) -> None:
    for name in row.names.split():
        resolve_name(f"{row.owner}.{name}")


def replacements() -> Iterator[str]:
    """Yields the places where an attribute of an imported module or class is set."""
    for path, tree in TREES.items():
        names, place = imported(tree), path.relative_to(ROOT)
        if path.is_relative_to(OTHER_LIBRARIES):
            continue
        for node in ast.walk(tree):
            owners: list[ast.expr] = []
            if isinstance(node, ast.Call) and ".".join(dotted(node.func)) in PATCHERS and node.args:
                owners = [node.args[0]]
            elif isinstance(node, ast.Assign):
                owners = [target.value for target in node.targets if isinstance(target, ast.Attribute)]
            for owner in owners:
                first = (dotted(owner) or [""])[0]
                if first in names and ast.unparse(owner) not in ("os.environ",):
                    yield f"{place}:{owner.lineno} {ast.unparse(node)[:80]}"


@pytest.mark.each_time
def test_no_name_is_replaced_outside_the_table() -> None:
    assert list(replacements()) == [], "add a row to REPLACED in autotp/torch_internals.py, and use it"
