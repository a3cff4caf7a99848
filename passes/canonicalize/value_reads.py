"""value_reads: what Python reads of the inputs' values leaves the graph; what it reads of activations stays.

Before: graph(weights, x, lengths) -> y, max(lengths), isnan(x @ weights); both of the latter were read
After:  graph(weights, x, lengths) -> y, isnan(x @ weights)
        values(lengths) -> max(lengths), which runs before a call

NOTE [What Python reads of tensors] in `passes/capture/guards/values.py` says what is done with both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.passes.builder import ancestors, subgraph
from autotp.passes.capture.captured import Captured, OutputAt
from autotp.passes.capture.guards.values import ValueRead
from autotp.rules.call import returned
from autotp.rules.traits import draws


def value_reads(graph: fx.Graph, captured: Captured, updated: int, cut: Collection[str]) -> tuple[fx.Graph, Captured]:
    """Returns the graph without the outputs that follow from the inputs alone, and the captured facts that say so.

    Args:
        updated: number of the last outputs, which are new values of buffers.
        cut: placeholder names of inputs of which each rank has a part: their values are activations.
    """
    results = returned(graph)
    input_names = {*captured.inputs, *captured.constants} - {*cut}
    of_inputs = {index: _follows(results[index], input_names) for index in captured.read_at}
    before = [index for read in captured.asked if _is_known(read, of_inputs) for index in _positions(read)]
    after = [index for read in captured.asked if not _is_known(read, of_inputs) for index in _positions(read)]
    first = len(results) - updated - len(of_inputs)
    where = {index: i for i, index in enumerate(before)} | {index: first + i for i, index in enumerate(after)}

    def moved(read: ValueRead) -> ValueRead:
        args = tuple(OutputAt(where[x.at]) if isinstance(x, OutputAt) else x for x in read.given)
        return replace(read, given=args, of_inputs=_is_known(read, of_inputs))

    outputs = [*results[:first], *(results[index] for index in after), *results[len(results) - updated :]]
    facts = replace(
        captured,
        asked=tuple(map(moved, captured.asked)),
        input_values=subgraph(
            graph, [results[index] for index in before], ancestors(results[index] for index in before)
        ),
        owned=frozenset() if after else captured.owned,  # A call whose outcomes are others runs again.
    )
    return subgraph(graph, outputs, set(graph.nodes)), facts  # Draws stay, read or not: they move the random stream.


def _positions(read: ValueRead) -> list[int]:
    return [x.at for x in read.given if isinstance(x, OutputAt)]


def _is_known(read: ValueRead, of_inputs: dict[int, bool]) -> bool:
    return not read.outcome.assumed and all(of_inputs[index] for index in _positions(read))


def _follows(node: Any, names: Collection[str]) -> bool:
    """True if a value is the same in each call with these placeholders' values."""
    nodes = ancestors([node])
    return all(n.name in names if n.op == "placeholder" else not draws(n) for n in nodes)
