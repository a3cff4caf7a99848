"""call: arguments by name with their defaults, operands in order, and what is written."""

from __future__ import annotations

from typing import Any

import torch
from graphs import call_named, draft, some
from torch import fx

from autotp.rules.call import arguments_of, call_of, operand_nodes, operator_name, returned, writes, written_operand

aten = torch.ops.aten
X, W, B = some(3, 4), some(5, 4), some(5)


def one(target: Any, *more: Any, **kwargs: Any) -> fx.Node:
    """The node of a call on x, and on the other arguments."""
    graph = draft(lambda call, x, w, b: call(target, x, *more, **kwargs), x=X, w=W, b=B)
    return call_named(graph, target._schema.name.split("::")[1])


def test_call_has_defaults_and_keywords_by_name() -> None:
    node = one(aten.sum.dim_IntList, [-1], keepdim=True)
    assert {name: value for name, value in arguments_of(node).items() if name != "self"} == {
        "dim": [-1], "keepdim": True, "dtype": None,
    }  # fmt: skip
    call = call_of(node)
    assert (call["keepdim"], call.get("alpha", 7)) == (True, 7)
    assert [tuple(t.shape) for t in (*call.operands, *call.outputs)] == [(3, 4), (3, 1)]


def test_call_dim_counts_from_the_front() -> None:
    assert call_of(one(aten.softmax.int, -1)).dim() == 1
    assert call_of(one(aten.softmax.int, 0)).dim() == 0
    assert call_of(one(aten.softmax.int, -1)).dim(ndim=4) == 3


def test_operand_nodes_flatten_lists_and_keep_absent_places() -> None:
    """Lists are flattened, and an optional operand that is absent has its place."""

    def make(call: Any, x: Any, w: Any, b: Any) -> Any:
        return call(aten.linear.default, x, w), call(aten.linear.default, x, w, b), call(aten.cat.default, [x, w], 0)

    graph = draft(make, x=X, w=W, b=B)
    bare, biased, cat = (call_named(graph, *at) for at in (("linear", 0), ("linear", 1), ("cat", 0)))
    names = [[node and node.name for node in operand_nodes(call)] for call in (bare, biased, cat)]
    assert names == [["x", "w", None], ["x", "w", "b"], ["x", "w"]]
    assert call_of(bare).operands[2] is None


def test_arguments_of_a_python_function_are_named() -> None:
    def scaled(x: torch.Tensor, by: float, out: str = "") -> torch.Tensor:
        return x * by

    graph = draft(lambda call, x: call(scaled, x, 2.0, out="y"), x=X)
    node = call_named(graph, "scaled")
    assert list(arguments_of(node).items())[1:] == [("by", 2.0), ("out", "y")]
    assert [node.name for node in operand_nodes(node) if node] == ["x"]


def test_call_of_several_outputs_has_each() -> None:
    node = one(aten.max.dim, 1)
    assert [t.dtype for t in call_of(node).outputs] == [torch.float64, torch.int64]
    assert operator_name(node) == "aten::max"


def test_writes_names_in_place_and_out_operands() -> None:
    def make(call: Any, x: Any, w: Any) -> Any:
        into = call(aten.add_.Tensor, x, 1.0)
        return into, call(aten.add.Tensor, x, 1.0), call(aten.relu.out, x, out=w)

    graph = draft(make, x=X, w=some(3, 4))
    into, plain, out = (call_named(graph, *at) for at in (("add_", 0), ("add", 0), ("relu", 0)))
    assert [writes(node) for node in (into, plain, out)] == [True, False, True]
    assert [written_operand(node).name for node in (into, out)] == ["x", "w"]
    assert [node.name for node in returned(graph)] == [into.name, plain.name, out.name]
