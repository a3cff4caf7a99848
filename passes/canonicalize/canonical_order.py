"""canonical_order: sorts the operators, so that the order of recording does not matter.

    Before: b = cos(x); a = sin(x); c = add(a, b)        on another rank a = sin(x); b = cos(x); c = add(a, b)
    After:  a = sin(x); b = cos(x); c = add(a, b)        on both

A model that iterates over a set is captured in the order of the set, which differs between processes. So operators are
sorted by a walk from the outputs: each operator stands after its operands, the first operand first. The operators of a
block stay together, and operators that draw random numbers keep their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.canonicalize.relocate import on_device
from autotp.rules.call import returned
from autotp.rules.traits import draws
from autotp.source_location import block_of

T = TypeVar("T")


@dataclass(eq=False)
class OperatorRun:
    """Operators that stay together: consecutive operators of one block, or a single operator outside of blocks.

    Attributes:
        nodes: its operators, first in captured order, later in canonical order.
        before: the part that draws random numbers before this part does.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    before: OperatorRun | None = None


def canonical_order(graph: fx.Graph, constants: Collection[str], inputs: Collection[str]) -> fx.Graph:
    """Returns the same function with its operators and constants in canonical order.

    Args:
        constants: placeholder names of the constants.
        inputs: placeholder names of the inputs.
    """
    work = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op != "call_function" or _acts(node) for node in work):
        return graph
    # Draws first, in the captured order: each takes the next numbers of the random stream.
    roots = [*filter(draws, work), *_outputs(graph), *_unread(graph, constants)]
    number = {node: i for i, node in enumerate(_visited(roots, lambda n: n.all_input_nodes))}
    parts = _parts(work)
    home = {node: part for part in parts for node in part.nodes}
    _chain(parts)
    for part in parts:
        part.nodes = _inside(part, home, number)
    last = [home[n] for n in roots if n in home]
    early = _before_blocks(_visited(last, lambda part: _reads(part, home)), home, inputs)
    every = _visited([*early, *last], lambda part: _reads(part, home))
    return _rebuilt(graph, [node for part in every for node in part.nodes], constants)


def _acts(node: fx.Node) -> bool:
    """True for a call with a side effect, such as entering autocast: operators must not move across it."""
    return node.meta.get("val") is None


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in returned(graph) if isinstance(node, fx.Node)]


def _unread(graph: fx.Graph, constants: Collection[str]) -> list[fx.Node]:
    """Returns unread operators, ordered by what they compute; their rules may still unify axes."""
    unread = [node for node in graph.nodes if node.op == "call_function" and not node.users]
    text: dict[fx.Node, str] = {}
    for node in graph.nodes if unread else ():
        # Each rank has a device of its own, and all ranks have one order.
        called = fx.map_arg(on_device((node.args, node.kwargs), torch.device("meta")), text.__getitem__)
        if node.op == "placeholder":
            target: Any = "constant" if node.name in constants else node.name
        else:
            target = node.target if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", node.op)
        # A text contains those of its operands, so only a short hash stays. `hash()` would differ between processes.
        text[node] = hashlib.sha256(f"{target} {called}".encode()).hexdigest()
    return sorted(unread, key=text.__getitem__)


def _visited(roots: Iterable[T], reads: Callable[[T], Iterable[T]]) -> list[T]:
    """Returns everything that the roots depend on, in depth-first order: each node after the nodes that it reads."""
    done: dict[T, None] = {}
    # No recursion: a path through a deep model is longer than Python's stack may be.
    stack: list[tuple[T, Any]] = []
    for root in roots:
        stack.append((root, None))
        while stack:
            node, rest = stack.pop()
            if node in done:
                continue
            rest = iter(reads(node)) if rest is None else rest
            waits = next((n for n in rest if n not in done), None)
            if waits is None:
                done[node] = None
            else:
                stack += [(node, rest), (waits, None)]
    return list(done)


def _parts(work: Sequence[fx.Node]) -> list[OperatorRun]:
    """Splits operators into parts. A size that does not depend on a block is a part of its own, and does not end it."""
    parts: list[OperatorRun] = []
    run, name = OperatorRun(), ""
    inside: set[fx.Node] = set()
    for node in work:
        block = block_of(node)
        size = isinstance(node.meta.get("val"), int | torch.SymInt)
        if size and not any(n in inside for n in node.all_input_nodes):
            parts.append(OperatorRun([node]))
            continue
        if not block or block != name:
            run, name, inside = OperatorRun(), block, set()
            parts.append(run)
        run.nodes.append(node)
        inside.add(node)
    return parts


def _chain(parts: Sequence[OperatorRun]) -> None:
    """Links the parts that draw random numbers, so that they keep their order."""
    last = None
    for part in parts:
        if any(draws(node) for node in part.nodes):
            part.before, last = last, part


def _inside(part: OperatorRun, home: dict[fx.Node, OperatorRun], number: dict[fx.Node, int]) -> list[fx.Node]:
    """Returns a part's operators in order: random draws, then those that other parts read, after their operands."""
    outputs = [node for node in part.nodes if not node.users or any(home.get(user) is not part for user in node.users)]
    roots = [*filter(draws, part.nodes), *sorted(outputs, key=number.__getitem__)]
    return _visited(roots, lambda node: [n for n in node.all_input_nodes if home.get(n) is part])


def _reads(part: OperatorRun, home: dict[fx.Node, OperatorRun]) -> list[OperatorRun]:
    """Returns the parts that must stand before a part."""
    operands = (n for node in part.nodes for n in node.all_input_nodes)
    producers = dict.fromkeys(home[n] for n in operands if n in home and home[n] is not part)
    return [*([part.before] if part.before is not None else []), *producers]


def _before_blocks(
    parts: Sequence[OperatorRun], home: dict[fx.Node, OperatorRun], inputs: Collection[str]
) -> list[OperatorRun]:
    """Returns the parts that depend on inputs but on no block, such as masks and embeddings: they come first."""
    after_blocks, from_inputs = set[OperatorRun](), set[OperatorRun]()
    for part in parts:
        reads = _reads(part, home)
        if any(block_of(node) for node in part.nodes) or any(read in after_blocks for read in reads):
            after_blocks.add(part)
        operands = [n for node in part.nodes for n in node.all_input_nodes]
        if any(n.name in inputs for n in operands) or any(read in from_inputs for read in reads):
            from_inputs.add(part)
    return [part for part in parts if part in from_inputs and part not in after_blocks]


def _rebuilt(graph: fx.Graph, work: Sequence[fx.Node], constants: Collection[str]) -> fx.Graph:
    """Returns the graph with its operators in this order, and its constants in the order of their first reads."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    # The exporter numbers constants in the order of recording, which may differ between processes.
    first = {node: i for i, node in enumerate(dict.fromkeys(n for node in work for n in node.all_input_nodes))}
    made = iter(sorted((n for n in places if n.name in constants), key=lambda n: first.get(n, len(first))))
    builder = Builder(fake_mode_of(graph))
    for node in [*(next(made) if node.name in constants else node for node in places), *work, graph.output_node()]:
        builder.copy(node)
    return builder.graph
