"""graph_text: sizes as letters, parameters before their readers, blocks that are alike once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from graphs import canonical, draft, some
from small_models import Plain
from torch import fx

from autotp.tools.pass_by_pass.graph_text import graph_text

aten = torch.ops.aten
VALUES = {"x": some(3, 4, dtype=torch.float32), "w": some(4, 4), "v": some(4, 4)}
HELD = {"w": "h.0.up.weight", "v": "h.1.up.weight"}


def at(block: str, node: fx.Node) -> fx.Node:
    node.meta["nn_module_stack"] = {"": (block, None)}
    return node


def two_blocks(call: Any, x: Any, w: Any, v: Any) -> Any:
    for i, weight in enumerate((w, v)):
        x = at(f"h.{i}", call(aten.relu.default, at(f"h.{i}", call(aten.mm.default, x, weight))))
    return at("", call(aten.exp.default, x))


def test_graph_text_prints_blocks_that_are_alike_once() -> None:
    graph = draft(two_blocks, **{**VALUES, "x": some(3, 4)})
    assert graph_text(graph, HELD, {"x": "tokens"}).splitlines() == [
        "tokens: f64[3, 4]",
        "h.0:",
        "  up.weight: f64[4, 4]",
        "  mm = mm(x, up.weight): f64[3, 4]",
        "  relu = relu(mm): f64[3, 4]",
        "h.1 is as h.0",
        "exp = exp(h.1.relu): f64[3, 4]",
        "return [exp]",
    ]


def test_graph_text_prints_a_block_that_differs() -> None:
    def make(call: Any, x: Any, w: Any, v: Any) -> Any:
        x = at("h.0", call(aten.mm.default, x, w))
        x = at("h.1", call(aten.mm.default, x, v))
        return at("h.2", call(aten.relu.default, x))

    text = graph_text(draft(make, **{**VALUES, "x": some(3, 4)}), HELD)
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        "x: f64[3, 4]", "h.0:", "h.1 is as h.0", "h.2:", "return [h.2.relu]",
    ]  # fmt: skip


def test_items_of_a_tuple_and_names_that_are_taken() -> None:
    def make(call: Any, x: Any) -> Any:
        both = call(aten.split.Tensor, x, 2, 1)
        parts = [call(operator.getitem, both, i) for i in range(2)]
        return call(aten.add.Tensor, call(aten.add.Tensor, parts[0], parts[1]), 1.0)

    graph = draft(make, x=VALUES["x"])
    assert graph_text(graph, {}).splitlines() == [
        "x: f32[3, 4]",
        "split = split(x, 2, 1): f32[3, 2], f32[3, 2]",
        "add = add(split[0], split[1]): f32[3, 2]",
        "add2 = add(add, 1.0): f32[3, 2]",
        "return [add2]",
    ]


def test_graph_text_names_symbolic_sizes() -> None:
    """Batch, then sequence, in the order of the inputs; a size that is computed has no line."""
    captured, graph = canonical(Plain(), torch.ones(2, 3, 8))
    text = graph_text(graph, captured.parameters, {captured.inputs[0]: "x"})
    assert text.splitlines()[0] == "x: f32[b, s, 8]"
    assert "f32[b, s, 32]" in text
