"""outline: consecutive operators of a block become a module; blocks that compute alike share it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from graphs import draft, ops, some
from torch import Tensor, fx

from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.emit.outline import blocks, outlined

aten = torch.ops.aten
VALUES = {"x": some(3, 4), "w": some(4, 4), "v": some(4, 4)}


def at(block: str, node: fx.Node) -> fx.Node:
    node.meta["nn_module_stack"] = {"": (block, None)}
    return node


def layer(call: Any, block: str, x: Any, w: Any, activation: Any = aten.relu.default) -> fx.Node:
    return at(f"{block}.act", call(activation, at(f"{block}.up", call(aten.linear.default, x, w))))


def alike(call: Any, x: Any, w: Any, v: Any) -> Any:
    return at("", call(aten.exp.default, layer(call, "h.1", layer(call, "h.0", x, w), v)))


def other_operator(call: Any, x: Any, w: Any, v: Any) -> Any:
    return layer(call, "h.1", layer(call, "h.0", x, w), v, aten.tanh.default)


def in_two_ways(call: Any, x: Any, w: Any, v: Any) -> Any:
    """The first block has two results."""
    up = at("h.0.up", call(aten.linear.default, x, w))
    act = at("h.0.act", call(aten.relu.default, up))
    return at("", call(aten.mul.Tensor, up, act))


def outline(make: Callable[..., Any]) -> fx.GraphModule:
    graph = draft(make, **VALUES)
    return outlined(graph, list(blocks(graph)), "block")


def calls(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_module"]


def expect_same_numbers(make: Callable[..., Any], module: fx.GraphModule) -> None:
    before = fx.Interpreter(fx.GraphModule({}, draft(make, **VALUES))).run(*VALUES.values())
    after: tuple[Tensor, ...] = module(*VALUES.values())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_outline_shares_a_module_of_like_blocks() -> None:
    module = outline(alike)
    assert calls(module) == ["block", "block"]
    assert ops(module.graph) == ["exp"]
    assert ops(module.get_submodule("block").graph) == ["linear", "relu"]  # type: ignore[arg-type]
    expect_same_numbers(alike, module)


def test_outline_separates_blocks_of_other_operators() -> None:
    module = outline(other_operator)
    assert calls(module) == ["block", "block_1"]
    expect_same_numbers(other_operator, module)


def test_outline_separates_blocks_of_other_sizes() -> None:
    def make(call: Any, x: Any, w: Any, v: Any) -> Any:
        return layer(call, "h.1", layer(call, "h.0", x, w), at("", call(aten.slice.Tensor, v, 0, 0, 2)))

    module = outline(make)
    assert calls(module) == ["block", "block_1"]
    expect_same_numbers(make, module)


def test_outline_returns_two_results() -> None:
    module = outline(in_two_ways)
    assert [node.args[1] for node in module.graph.nodes if node.target is operator.getitem] == [0, 1]
    expect_same_numbers(in_two_ways, module)


def test_outline_never_tears_an_autocast_region() -> None:
    """A block that enters a region, and leaves it behind the block, is no block."""

    def make(call: Any, x: Any, w: Any, v: Any) -> Any:
        region = at("h.0", call(enter_autocast, "cpu", torch.bfloat16, True, None))
        x = layer(call, "h.0", x, w)
        at("", call(exit_autocast, region))
        return layer(call, "h.1", x, v)

    graph = draft(make, **VALUES)
    assert [[node.meta["nn_module_stack"][""][0] for node in region] for region in blocks(graph)] == [
        ["h.1.up", "h.1.act"]
    ]


def test_outline_leaves_sizes_outside() -> None:
    """Else the first block, which asks for a size that others only read, would differ from these."""

    def make(call: Any, x: Any, w: Any, v: Any) -> Any:
        size = at("h.0", call(aten.sym_size.int, x, 0))
        x = at("h.0", call(aten.expand.default, layer(call, "h.0", x, w), [size, 4]))
        return at("h.1", call(aten.expand.default, layer(call, "h.1", x, v), [size, 4]))

    module = outline(make)
    assert calls(module) == ["block", "block"]
    assert ops(module.graph) == ["sym_size"]
    expect_same_numbers(make, module)
