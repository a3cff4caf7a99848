"""bucket: one conjugate for all parameters of a block, a mesh axis and a dtype."""

from __future__ import annotations

from typing import Any

import torch
from graphs import draft, lines, some
from torch import fx

from autotp.ops.collectives import copy, share
from autotp.passes.lower.bucket import bucket

aten = torch.ops.aten


def within(block: str, node: fx.Node) -> fx.Node:
    node.meta["nn_module_stack"] = {"": (block, None)}
    return node


def read(call: Any, block: str, x: Any, *parameters: Any, axis: str = "tp") -> Any:
    """A block: each parameter is copied and added."""
    for parameter in parameters:
        copied = within(block, call(copy, parameter, axis))
        x = within(block, call(aten.add.Tensor, x, copied))
    return x


W = {name: some(4) for name in "abcdx"}


def test_bucket_copies_a_block_s_parameters_together() -> None:
    def make(call: Any, a: Any, b: Any, c: Any, d: Any, x: Any) -> Any:
        return read(call, "h.1", read(call, "h.0", x, a, b), c, d)

    assert lines(bucket(draft(make, **W))) == [
        "together([a, b], 'tp', [None, None])",
        "getitem(together, 0)",
        "getitem_1 = getitem(together, 1)",
        "add(x, getitem)",
        "add_1 = add(add, getitem_1)",
        "together_1 = together([c, d], 'tp', [None, None])",
        "getitem_2 = getitem(together_1, 0)",
        "getitem_3 = getitem(together_1, 1)",
        "add_2 = add(add_1, getitem_2)",
        "add_3 = add(add_2, getitem_3)",
        "return add_3",
    ]


def together_of(graph: fx.Graph) -> list[str]:
    return [line.partition(" = ")[2] or line for line in lines(bucket(graph)) if "together(" in line]


def test_bucket_leaves_one_parameter_alone() -> None:
    graph = draft(lambda call, a, x: read(call, "h.0", x, a), a=W["a"], x=W["x"])
    assert lines(bucket(graph)) == lines(graph)


def test_bucket_separates_mesh_axes_and_dtypes() -> None:
    def make(call: Any, a: Any, b: Any, c: Any, d: Any, half: Any, x: Any) -> Any:
        x = read(call, "h.0", read(call, "h.0", x, a, b), c, d, axis="tp/4")
        return read(call, "h.0", x, half)

    given = {**W, "half": some(4, dtype=torch.float32)}
    graph = draft(make, **{name: given[name] for name in ("a", "b", "c", "d", "half", "x")})
    assert together_of(graph) == ["together([a, b], 'tp', [None, None])", "together([c, d], 'tp/4', [None, None])"]


def test_bucket_separates_parameters_before_and_behind_blocks() -> None:
    """They may be in different stages of a pipeline."""

    def make(call: Any, a: Any, b: Any, c: Any, d: Any, x: Any) -> Any:
        return read(call, "", read(call, "h.0", read(call, "", x, a, b)), c, d)

    def with_block(call: Any, a: Any, b: Any, c: Any, d: Any, x: Any) -> Any:
        x = within("h.0", call(aten.exp.default, read(call, "", x, a, b)))
        return read(call, "", x, c, d)

    assert together_of(draft(with_block, **W)) == [
        "together([a, b], 'tp', [None, None])",
        "together([c, d], 'tp', [None, None])",
    ]
    assert together_of(draft(make, **W)) == ["together([a, b, c, d], 'tp', [None, None, None, None])"]


def test_bucket_includes_parameters_that_some_ranks_hold() -> None:
    def make(call: Any, a: Any, b: Any, x: Any) -> Any:
        held = within("h.0", call(share, a, "tp", 0, ((0, 2),)))
        return read(call, "h.0", call(aten.add.Tensor, x, held), b)

    graph = draft(make, a=W["a"], b=W["b"], x=W["x"])
    assert together_of(graph) == ["together([a, b], 'tp', [[0, [[0, 2]]], None])"]


def test_bucket_leaves_activations_alone() -> None:
    def make(call: Any, a: Any, x: Any) -> Any:
        return read(call, "h.0", call(copy, call(aten.exp.default, x), "tp"), a)

    graph = draft(make, a=W["a"], x=W["x"])
    assert lines(bucket(graph)) == lines(graph)
