"""canonical_order: sorts the operators, so that the order of recording does not matter.

    Before: b = cos(x); a = sin(x); c = add(a, b)        on another rank a = sin(x); b = cos(x); c = add(a, b)
    After:  a = sin(x); b = cos(x); c = add(a, b)        on both

A model that iterates over a set records in the order of the set, which each process has of its own. What counts is what
the graph computes: from the outputs on, each operator stands behind what it reads, first operands first. What one block
did stays together; what draws random numbers stays in its order.
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
from autotp.rules.call import returned
from autotp.rules.traits import draws
from autotp.source_location import block_of

T = TypeVar("T")


@dataclass(eq=False)
class Part:
    """What stays together: the run of a block's operators, or one operator outside of any.

    Attributes:
        nodes: its operators, as recorded; once they are known, in their order.
        before: the part that draws random numbers before this one does.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    before: Part | None = None


def canonical_order(graph: fx.Graph, constants: Collection[str], inputs: Collection[str]) -> fx.Graph:
    """The same function, its operators and its constants in the order of the function.

    Args:
        constants: placeholder names of the tensors that the model made.
        inputs: placeholder names of the inputs.
    """
    work = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op != "call_function" or _acts(node) for node in work):
        return graph
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
    """True for a call for its effect, as entering autocast: what stands behind it stays there."""
    return node.meta.get("val") is None


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in returned(graph) if isinstance(node, fx.Node)]


def _unread(graph: fx.Graph, constants: Collection[str]) -> list[fx.Node]:
    """What nobody reads, which tells what axes there are, in the order of what it computes."""
    left = [node for node in graph.nodes if node.op == "call_function" and not node.users]
    text: dict[fx.Node, str] = {}
    for node in graph.nodes if left else ():
        called = fx.map_arg((node.args, node.kwargs), text.__getitem__)
        if node.op == "placeholder":
            target: Any = "constant" if node.name in constants else node.name
        else:
            target = node.target if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", node.op)
        text[node] = hashlib.sha256(f"{target} {called}".encode()).hexdigest()
    return sorted(left, key=text.__getitem__)


def _visited(roots: Iterable[T], reads: Callable[[T], Iterable[T]]) -> list[T]:
    """All that the roots need, each behind what it reads, the first of that first."""
    done: dict[T, None] = {}
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


def _parts(work: Sequence[fx.Node]) -> list[Part]:
    """The runs of blocks; a size that does not come from inside one is outside of it, and does not end it."""
    parts: list[Part] = []
    run, name = Part(), ""
    inside: set[fx.Node] = set()
    for node in work:
        mine = block_of(node)
        size = isinstance(node.meta.get("val"), int | torch.SymInt)
        if size and not any(n in inside for n in node.all_input_nodes):
            parts.append(Part([node]))
            continue
        if not mine or mine != name:
            run, name, inside = Part(), mine, set()
            parts.append(run)
        run.nodes.append(node)
        inside.add(node)
    return parts


def _chain(parts: Sequence[Part]) -> None:
    """Parts that draw random numbers stay behind one another."""
    last = None
    for part in parts:
        if any(draws(node) for node in part.nodes):
            part.before, last = last, part


def _inside(part: Part, home: dict[fx.Node, Part], number: dict[fx.Node, int]) -> list[fx.Node]:
    """A part's operators: what draws, in its order, then what others read; each behind what it reads."""
    seen = [node for node in part.nodes if not node.users or any(home.get(user) is not part for user in node.users)]
    roots = [*filter(draws, part.nodes), *sorted(seen, key=number.__getitem__)]
    return _visited(roots, lambda node: [n for n in node.all_input_nodes if home.get(n) is part])


def _reads(part: Part, home: dict[fx.Node, Part]) -> list[Part]:
    """The parts that stand before one."""
    operands = (n for node in part.nodes for n in node.all_input_nodes)
    found = dict.fromkeys(home[n] for n in operands if n in home and home[n] is not part)
    return [*([part.before] if part.before is not None else []), *found]


def _before_blocks(parts: Sequence[Part], home: dict[fx.Node, Part], inputs: Collection[str]) -> list[Part]:
    """What inputs alone, and no block, have a part in: masks, embeddings. It stands before the blocks."""
    behind, given = set[Part](), set[Part]()
    for part in parts:
        reads = _reads(part, home)
        if any(block_of(node) for node in part.nodes) or any(one in behind for one in reads):
            behind.add(part)
        operands = [n for node in part.nodes for n in node.all_input_nodes]
        if any(n.name in inputs for n in operands) or any(one in given for one in reads):
            given.add(part)
    return [part for part in parts if part in given and part not in behind]


def _rebuilt(graph: fx.Graph, work: Sequence[fx.Node], constants: Collection[str]) -> fx.Graph:
    """The graph with its operators in this order, and its constants in that in which they are read first."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    first = {node: i for i, node in enumerate(dict.fromkeys(n for node in work for n in node.all_input_nodes))}
    made = iter(sorted((n for n in places if n.name in constants), key=lambda n: first.get(n, len(first))))
    builder = Builder(fake_mode_of(graph))
    for node in [*(next(made) if node.name in constants else node for node in places), *work, graph.output_node()]:
        builder.copy(node)
    return builder.graph
