"""stage_composition: proves that the stages of a pipeline, one after the other, compute one rank's graph.

    Before: 0: a = embedding(t, e); b = block(a, w0); send b          graph: a = embedding(t, e); b = block(a, w0);
            1: receive b; c = block(b, w1); loss(c, y)                       c = block(b, w1); loss(c, y)
    After:  b crosses 0|1; e and w0 are read by stage 0, w1 and y by stage 1

NOTE [What is proved of stages]
Each operator of a stage is an operator of the graph on the same operands, where a received value is the value that the
stage before sends in the same place, and the last stage returns what the graph returns. So the values are those of the
graph. A value may be computed in several stages: its gradient is then the sum of theirs, as each stage adds to the
gradients of the parameters it reads and sends those of the values it received. A random draw would not be the same in
two stages, so it is in one. Operators keep the graph's order, and with it all ranks start collectives in one order.

Nothing is imported from `stages.py`, whose work this file proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp.errors import REPORT, Error
from autotp.rules.call import returned
from autotp.rules.traits import draws
from autotp.source_location import line_of


@dataclass(frozen=True)
class Composition:
    """The facts about stages that compute a graph.

    Attributes:
        sent: for each boundary between two stages, the values of the graph that cross it, in order.
        readers: name of a placeholder of the graph -> the stages that read it.
    """

    sent: tuple[tuple[fx.Node, ...], ...]
    readers: dict[str, frozenset[int]]


def compose(graph: fx.Graph, stages: Sequence[tuple[fx.Graph, Sequence[str]]]) -> Composition:
    """Returns what crosses the boundaries of the stages, and who reads what.

    Args:
        graph: one rank's graph.
        stages: for each stage its graph, and the names of its placeholders for received values.

    Raises:
        Error: the stages do not compute the graph; names the stage, the value and its source line.
    """
    graph_values = _Known(graph)
    sent, crossing = tuple[fx.Node, ...](), list[tuple[fx.Node, ...]]()
    for i, (part, received) in enumerate(stages):
        sent = graph_values.of_stage(i, part, received, sent)
        crossing.append(sent)
    if list(sent) != list(returned(graph)):
        raise _refused(
            "the last stage does not return what the graph returns", expected=str(returned(graph)), got=str(sent)
        )
    # Without it, the draws behind it would be other numbers.
    missing = [node for node in graph.nodes if draws(node) and node not in graph_values.homes]
    if missing:
        raise _refused(f"no stage computes `{missing[0]}`, which draws random numbers", at=line_of(missing[0]))
    return Composition(tuple(crossing[:-1]), {name: frozenset(some) for name, some in graph_values.readers.items()})


class _Known:
    """The values of a graph, by what they are computed from, and the stages that compute them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self.homes: dict[fx.Node, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.alike: dict[Any, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.alike.setdefault(_call(node, node.args, node.kwargs), []).append(node)

    def of_stage(self, i: int, part: fx.Graph, received: Sequence[str], sent: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Returns the values of the graph that a stage returns, if it is given those that the stage before sends."""
        first = [node for node in part.nodes if node.op == "placeholder"][: len(received)]
        if [node.name for node in first] != list(received) or len(first) != len(sent):
            raise _refused(
                f"stage {i} does not receive what stage {i - 1} sends",
                expected=str(list(sent)),
                got=str(list(received)),
            )
        stands = dict(zip(first, sent, strict=True))
        for node, value in stands.items():
            _expect_alike(i, node, value)
        last = -1
        for node in (node for node in part.nodes if node not in stands):
            if node.op == "output":
                return tuple(stands[x] for x in returned(part))
            value = self._read(i, node) if node.op == "placeholder" else self._computed(i, node, stands)
            # The order of operators is that of collectives, in which all ranks have to agree.
            if node.op != "placeholder" and self.order[value] <= last:
                raise _refused(f"stage {i} computes `{node}` later than the graph does", at=line_of(node))
            last = last if node.op == "placeholder" else self.order[value]
            stands[node] = value
        raise _refused(f"stage {i} returns nothing")

    def _read(self, i: int, node: fx.Node) -> fx.Node:
        if node.name not in self.places:
            raise _refused(f"stage {i} reads `{node}`, which is no input of the graph")
        _expect_alike(i, node, self.places[node.name])
        self.readers.setdefault(node.name, set()).add(i)
        return self.places[node.name]

    def _computed(self, i: int, node: fx.Node, stands: dict[fx.Node, fx.Node]) -> fx.Node:
        """Returns the value that `node` stands for: of several alike, the one with its name."""
        early = [operand for operand in node.all_input_nodes if operand not in stands]
        if early:
            raise _refused(f"stage {i} computes `{node}` before `{early[0]}`, which it reads", at=line_of(node))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: stands[n])
        candidates = self.alike.get(_call(node, args, kwargs), [])
        value = next((x for x in candidates if x.name == node.name), candidates[0] if candidates else None)
        if value is None:
            raise _refused(f"stage {i} computes `{node}`, which is not in the graph", at=line_of(node))
        _expect_alike(i, node, value)
        # The two draws would be other numbers.
        if draws(value) and value in self.homes:
            stages = f"stages {self.homes[value]} and {i}"
            raise _refused(f"{stages} draw the random numbers of `{value}`", at=line_of(value))
        self.homes[value] = i
        return value


def _call(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Returns what a value is computed from. Nodes of one graph differ in name, so its text tells them apart."""
    return node.op, node.target, repr(args), repr(kwargs)


def _expect_alike(i: int, node: fx.Node, value: fx.Node) -> None:
    got, expected = node.meta.get("val"), value.meta.get("val")
    if isinstance(got, Tensor) != isinstance(expected, Tensor):
        raise _refused(f"stage {i}: `{node}` is not `{value}` of the graph", at=line_of(value))
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        shapes = [tuple(map(str, x.shape)) for x in (got, expected)]
        if shapes[0] != shapes[1] or got.dtype != expected.dtype:
            raise _refused(
                f"stage {i}: `{node}` is not as large as in the graph", expected=str(shapes[1]), got=str(shapes[0])
            )


def _refused(problem: str, **facts: str) -> Error:
    where = "the stages of the pipeline do not compute the graph: "
    return Error(where + problem, **facts, fix=REPORT)
