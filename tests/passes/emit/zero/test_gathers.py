"""gathers: a graph of ZeRO with a wrong or missing node is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from errors import message
from graphs import draft, some
from torch import fx
from torch.ops import aten

from autotp.passes.check.gathers import check_gathers
from autotp.passes.emit.outline import blocks, outlined
from autotp.passes.emit.zero.gather_ahead import gather_ahead
from autotp.passes.emit.zero.room import Room

NAMES = {"w": "h.0.weight", "v": "h.1.weight", "u": "h.2.weight", "s": "shared"}
ROWS = frozenset(NAMES.values())


def three_blocks(call: Any, x: Any, w: Any, v: Any, u: Any, s: Any) -> fx.Node:
    """Each block has a weight of its own; all read `s`."""
    for i, weight in enumerate((w, v, u)):
        for target, operand in ((aten.linear.default, weight), (aten.add.Tensor, s)):
            x = call(target, x, operand)
            x.meta["nn_module_stack"] = {"": (f"h.{i}", None)}
    return x


def without_zero() -> fx.GraphModule:
    graph = draft(three_blocks, x=some(3, 4), w=some(4, 4), v=some(4, 4), u=some(4, 4), s=some(4))
    return outlined(graph, list(blocks(graph)), "block")


def node_of(graph: fx.Graph, target: str, block: int) -> fx.Node:
    """The node of a unit."""
    nodes = [n for n in graph.nodes if n.op == "call_method" and n.target == target]
    return next(n for n in nodes if str(n.args[0]).startswith(f"rows_of_h_{block}"))


def without(node: fx.Node, instead: Any) -> None:
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def call_of(graph: fx.Graph, block: int) -> fx.Node:
    return graph.find_nodes(op="call_module")[block]


def with_arguments(node: fx.Node, **places: Any) -> None:
    for place, value in places.items():
        node.update_arg(int(place[1:]), value)


def reads_rows(graph: fx.Graph) -> None:
    """The gather is missing: a block reads the rows."""
    call = call_of(graph, 1)
    call.args = tuple(next(n for n in graph.nodes if n.name == "v") if "getitem_2" in str(n) else n for n in call.args)


def detached(graph: fx.Graph) -> None:
    """The sum is missing: no gradient reaches the rows."""
    value = next(n for n in graph.nodes if n.name == "getitem_1")
    with graph.inserting_after(value):
        value.replace_all_uses_with(stopped := graph.call_function(aten.detach.default, (value,)))
    stopped.args = (value,)


def early(graph: fx.Graph) -> None:
    """A block leaves before it runs."""
    call_of(graph, 1).append(start := node_of(graph, "start", 2))
    call_of(graph, 1).prepend(start)
    with_arguments(start, _1=())


def twice(graph: fx.Graph) -> None:
    arrive = node_of(graph, "arrive", 1)
    with graph.inserting_after(arrive):
        graph.call_method("arrive", arrive.args)


BREAKS: dict[str, tuple[Callable[[fx.Graph], Any], str]] = {
    "no start": (
        lambda g: g.erase_node(node_of(g, "start", 1)),
        "`arrive_2` reads parameters that nothing gathers, or that may have left",
    ),
    "no gather": (reads_rows, "`block_1` of block h.1 reads `v`"),
    "no sum": (detached, "`detach_default` is not what the graph computes without ZeRO"),
    "another way to be whole": (
        lambda g: setattr(node_of(g, "arrive", 0), "target", "views"),
        "`arrive_1` is no gather and no end of one",
    ),
    "rows of another block": (
        lambda g: with_arguments(node_of(g, "start", 1), _2=next(n for n in g.nodes if n.name == "u")),
        "`start_2` gathers others than the rows of its unit",
    ),
    "summed twice": (twice, "`arrive_4` would sum the gradients of a unit a second time"),
    "left too early": (early, "`block_1` of block h.1 reads `getitem_2`, which may have left"),
    "no end": (
        lambda g: without(n := node_of(g, "leave", 1), n.args[1]),
        "`block_1` of block h.1 would read in backward what has left",
    ),
    "the end of another block": (
        lambda g: with_arguments(node_of(g, "leave", 1), _0=node_of(g, "leave", 0).args[0]),
        "`leave_1` is the end of a call that reads another unit",
    ),
    "an operator more": (
        lambda g: call_of(g, 1).update_arg(0, call_of(g, 0)),
        "`leave` does not see all of `block`: others read it, too",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_wrong_gather_or_sum_is_refused(name: str) -> None:
    change, problem = BREAKS[name]
    plain = without_zero()
    module = gather_ahead(plain, NAMES, ROWS, None, Room(2))
    check_gathers(module, plain.graph, NAMES, ROWS)
    change(module.graph)
    text = message(lambda: check_gathers(module, plain.graph, NAMES, ROWS)).splitlines()[0]
    assert text == f"ZeRO: {problem}"


@pytest.mark.parametrize("most", [2, None])
def test_graphs_that_are_written_pass(most: int | None) -> None:
    plain = without_zero()
    check_gathers(gather_ahead(plain, NAMES, ROWS, None, most and Room(most)), plain.graph, NAMES, ROWS)


def test_rows_that_the_graph_takes_for_whole_are_refused() -> None:
    """The pass did not know that these come as rows."""
    plain = without_zero()
    module = gather_ahead(plain, NAMES, ROWS - {"h.1.weight"}, None, Room(2))
    text = message(lambda: check_gathers(module, plain.graph, NAMES, ROWS)).splitlines()[0]
    assert text == "ZeRO: `block_1` of block h.1 reads `v`"
