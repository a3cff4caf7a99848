"""traits: what the table of operators says of each, and that no pass has lists of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import CALLS, draft, expect_same, some
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import autotp
from autotp.errors import Error
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.rules.registry import add_rows
from autotp.rules.row import Trait
from autotp.rules.table import ROWS, TORCH_ROWS, overloads
from autotp.rules.traits import has, having, in_place_of

aten = torch.ops.aten
ROOT = Path(autotp.__file__).resolve().parent.parent
TABLES = {
    ("autotp/costs/operators.py", "ARITHMETIC"),
    ("autotp/costs/operators.py", "SAME_WORK"),
    ("autotp/tools/estimation/counts/record.py", "FUSED"),
    ("passes/builder.py", "SIZES"),
    ("passes/canonicalize/canonicalize.py", "REWRITES"),
    ("passes/canonicalize/causal_attention.py", "MEANINGS"),
    ("passes/canonicalize/causal_attention.py", "REPEATS"),
    ("passes/canonicalize/functionalize.py", "SCATTERS"),
    ("passes/canonicalize/functionalize.py", "SPLITS"),
    ("passes/emit/kept_values/exact_bits.py", "INDEXING"),
    ("passes/emit/kept_values/split.py", "MASKS"),
    ("passes/emit/python_calls.py", "PYTHON_CALLS"),
    ("passes/lower/decompose.py", "EXPANSIONS"),
    ("passes/lower/localize.py", "FORMS"),
    ("passes/lower/losses/logit_rules.py", "RULES"),
    ("passes/lower/losses/row_sums.py", "SUMS"),
}
"""What passes do with operators, and what they cost; not what operators are: NOTE in `autotp/rules/row.py`."""


# ---- lists


def is_operator(node: ast.AST | None) -> bool:
    """True for `aten.add`, `torch.ops.aten.add.Tensor`, "aten.add", "aten::add"."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith(("aten.", "aten::"))
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("aten.", "torch.ops.aten."))


def listed(node: ast.AST) -> int:
    """How many operators a list, a tuple, a set, a dict, a chain of comparisons, or a text of names lists."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return sum(map(is_operator, items))
        case ast.Dict(keys=keys, values=values):
            return sum(map(is_operator, [*keys, *values]))
        case ast.BoolOp(values=values):
            compared = [one for value in values if isinstance(value, ast.Compare) for one in value.comparators]
            return sum(map(is_operator, compared))
        case ast.Constant(value=str(text)) if all(word.isidentifier() and hasattr(aten, word) for word in text.split()):
            return len(text.split())
    return 0


def lists(source: str) -> Iterator[str]:
    """The name that each list of several operators is given, "" for one without."""
    for statement in ast.walk(ast.parse(source)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(targets[0], ast.Name)
        if named and statement.value is not None:  # type: ignore[union-attr]
            found = [node for node in ast.walk(statement.value) if listed(node) > 1]  # type: ignore[union-attr, arg-type]
            yield from [targets[0].id] * bool(found)  # type: ignore[union-attr]
    whole = ast.parse(source)
    within = {id(n) for s in ast.walk(whole) if isinstance(s, ast.Assign | ast.AnnAssign) for n in ast.walk(s)}
    yield from ("" for node in ast.walk(whole) if id(node) not in within and listed(node) > 1)


@pytest.mark.parametrize(
    "source",
    [
        "A = (aten.add.Tensor, aten.sub.Tensor)",
        "A: set[object] = {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}",
        "x = name.startswith(('aten.add', 'aten.sub'))",
        "def f(n):\n    return n in ['aten::add', 'aten::sub']",
        "A = {aten.add.Tensor: 1, aten.sub.Tensor: 2}",
        "A = {aten.add.Tensor: aten.add_.Tensor}",
        "A = frozenset('add sub'.split())",
        "if n.target is aten.add.Tensor or n.target is aten.sub.Tensor:\n    pass",
    ],
)
def test_finder_sees_a_list_of_operators(source: str) -> None:
    assert len(list(lists(source))) == 1


def test_no_pass_and_no_estimate_has_a_list_of_operators() -> None:
    """But for the checker, which writes its own on purpose."""
    files = [file for file in (ROOT / "passes").rglob("*.py") if file.parent.name != "check"]
    files += [file for name in ("tools/estimation", "costs") for file in (ROOT / "autotp" / name).rglob("*.py")]
    assert len(files) > 60
    found = [(str(file.relative_to(ROOT)), name) for file in files for name in lists(file.read_text())]
    assert sorted(found) == sorted(TABLES)


# ---- rows


def test_an_operator_has_one_row() -> None:
    """Each name is an operator's, and no operator is in two rows."""
    found = [op for names, _ in TORCH_ROWS for name in names.split() for op in overloads(*_named(name))]
    assert len(found) == len(set(found)) >= len([op for op in ROWS if isinstance(op, OpOverload)])
    assert [name for names, _ in TORCH_ROWS for name in names.split() if not overloads(*_named(name))] == []


def _named(name: str) -> tuple[Any, str]:
    packet, _, overload = name.partition(".")
    return getattr(aten, packet), overload


def test_each_update_has_an_in_place_form() -> None:
    updates = [op for op in ROWS if has(op, Trait.UPDATE)]
    assert updates
    for op in updates:
        wanted = [(arg.name, str(arg.type)) for arg in op._schema.arguments]  # type: ignore[attr-defined]
        assert [(arg.name, str(arg.type)) for arg in in_place_of(op)._schema.arguments] == wanted  # type: ignore[union-attr]


# ---- memory

SHARED = {
    "alpha-dropout": (aten.alpha_dropout.default, some(3, 4), 0.5, False),
    "feature-dropout": (aten.feature_dropout.default, some(3, 4), 0.5, False),
    "atleast-1d": (aten.atleast_1d.default, some(3)),
    "atleast-2d": (aten.atleast_2d.default, some(3)),
    "atleast-3d": (aten.atleast_3d.default, some(3, 2)),
    "conj": (aten.conj_physical.default, some(3)),
    "lift": (aten.lift.default, some(3)),
    "dropout": (aten.dropout.default, some(3), 0.5, False),
    "contiguous": (aten.contiguous.default, some(3)),
    "reshape": (aten.reshape.default, some(3, 2), [2, 3]),
    "type-as": (aten.type_as.default, some(3), some(2)),
}


def test_operators_that_share_memory_have_the_trait() -> None:
    """By its schema, or by its row; the calls are those whose first operand is a tensor."""
    calls = {name: call for name, call in (CALLS | SHARED).items() if isinstance(call[0], OpOverload)}
    silent, seen = [], 0
    for name, (op, *args) in calls.items():
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        if not isinstance(args[0], torch.Tensor) or any(one.alias_info is not None for one in op._schema.returns):
            continue
        memory = args[0].untyped_storage().data_ptr()
        given = [x for x in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(x, torch.Tensor) and x.numel()]
        if any(x.untyped_storage().data_ptr() == memory for x in given):
            seen += 1
            silent += [] if has(op, Trait.MAY_ALIAS) else [name]
    assert silent == [] and seen >= len(SHARED)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(SHARED["atleast-3d"][:1], id="atleast"),
        pytest.param((aten.alpha_dropout.default, 0.5, False), id="dropout"),
        pytest.param((aten.conj_physical.default,), id="conj"),
        pytest.param((aten.unflatten.int, 0, [2, 2]), id="unflatten"),
        pytest.param((aten.ravel.default,), id="ravel"),
        pytest.param((aten.mT.default,), id="mT"),
        pytest.param((aten.swapdims.default, 0, -1), id="swapdims"),
    ],
)
def test_a_write_through_a_view_reaches_the_base(view: tuple[Any, ...]) -> None:
    target, *args = view

    def written(call: Any, x: Any) -> Any:
        base = call(aten.mul.Tensor, x, 2.0)
        call(aten.add_.Tensor, call(target, base, *args), 1)
        return call(aten.mul.Tensor, base, 3.0)

    graph = draft(written, x=some(4, 3))
    expect_same(graph, functionalize(graph, [])[0], [some(4, 3)])


def test_a_write_through_another_dtype_is_refused() -> None:
    def written(call: Any, x: Any) -> Any:
        base = call(aten.mul.Tensor, x, 2.0)
        call(aten.zero_.default, call(aten.view.dtype, base, torch.int64))
        return call(aten.mul.Tensor, base, 3.0)

    with pytest.raises(Error, match=r"writes through `aten.view.dtype`"):
        functionalize(draft(written, x=some(4, 3)), [])


def test_rows_that_the_table_has_are_not_added_again() -> None:
    """Libraries add theirs in each capture, and what passes have asked of the table is kept."""
    op = torch.ops.aten.add.Tensor
    assert op in having(Trait.SUM)
    kept = having.cache_info().currsize
    add_rows({op: ROWS[op]})
    assert having.cache_info().currsize == kept > 0
