"""stages: divides one rank's graph into the graphs of a pipeline's stages.

    Before: a = embedding(t, e); m = mask(t); b = block(a, m, w0); c = block(b, m, w1); loss(c, y)
    After:  0: a = embedding(t, e); m = mask(t); b = block(a, m, w0); send b
            1: receive b; m = mask(t); c = block(b, m, w1); loss(c, y)

The boundaries are between blocks. What is made of inputs alone (masks, positions, rotary tables, labels) is computed
again where it is needed, and so is what is made of parameters alone; everything else crosses every boundary between the
stage that makes it and the last one that reads it: of most models one value, the residual stream.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autotp.errors import Error
from autotp.passes.pipeline.cost import Cost
from autotp.rules.call import returned
from autotp.rules.traits import draws
from autotp.source_location import block_of, line_of

KEPT = 4
"""Numbers that training keeps for each parameter: itself, its gradient and two moments."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        graph: placeholders of what is received, in the order it is sent, and of what else it reads, under their names;
            it returns what it sends, the last stage what the whole returns.
        received: names of the placeholders of what is received.
        blocks: the blocks whose work it does, in order.
    """

    graph: fx.Graph
    received: tuple[str, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """How the blocks of a model are divided among the stages of a pipeline.

    Attributes:
        blocks: those of each stage, in the order in which they run.
        costs: what each stage costs, in multiplications.
        memory: what each stage keeps, in numbers.
        ranks: the rank of the pipeline that each is on.
    """

    blocks: tuple[tuple[str, ...], ...]
    costs: tuple[float, ...]
    memory: tuple[float, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        names = [f"{some[0]} to {some[-1]}" if len(some) > 1 else "".join(some) for some in self.blocks]
        width = max(map(len, [*names, "blocks"]))
        shares = zip(
            *([f"{part / (sum(parts) or 1):.1%}" for part in parts] for parts in (self.costs, self.memory)), strict=True
        )
        rows = zip(self.ranks, names, shares, strict=True)
        lines = [f"{i:<5}  {at:<7}  {name:<{width}}  {a:<15}  {b}" for i, (at, name, (a, b)) in enumerate(rows)]
        return "\n".join([f"stage  pp rank  {'blocks':<{width}}  multiplications  memory", *lines])


def divided(blocks: Sequence[str], costs: Sequence[Cost], homes: Sequence[int], flights: Sequence[int]) -> Division:
    """The blocks in as many stages as there are homes, the dearest of which costs as little as it can.

    Among such divisions it is one in which the stage that keeps most keeps as little as it can.

    Args:
        homes: the rank of each stage.
        flights: of how many microbatches each stage has activations at a time.

    Raises:
        Error: there are fewer blocks.
    """
    if len(blocks) < len(homes) and len(homes) > 1:
        raise Error(f"{len(homes)} stages, and the model has {len(blocks)} blocks", fix="fewer pipeline ranks")
    total = [Cost(), *itertools.accumulate(costs)]

    def work(_: int, run: range) -> float:
        done = total[run.stop].multiplications - total[run.start].multiplications
        return done + len(run)  # A block is never nothing.

    def memory(stage: int, run: range) -> float:
        learnt = total[run.stop].parameters - total[run.start].parameters
        made = total[run.stop].activations - total[run.start].activations
        return KEPT * learnt + flights[stage] * made

    fast = balanced(len(blocks) or 1, len(homes), work)
    dearest = max(itertools.starmap(work, enumerate(fast))) * (1 + 1e-9)  # Sums of floats.
    runs = balanced(
        len(blocks) or 1, len(homes), lambda i, run: memory(i, run) if work(i, run) <= dearest else math.inf
    )
    return Division(
        tuple(tuple(blocks[run.start : run.stop]) for run in runs),
        tuple(sum(costs[i].multiplications for i in run) for run in runs),
        tuple(itertools.starmap(memory, enumerate(runs))),
        tuple(homes),
    )


def staged(graph: fx.Graph, parts: Sequence[Collection[str]], parameters: Collection[str]) -> list[Stage]:
    """The graph as a pipeline.

    Args:
        parts: the blocks of each stage, in the order in which they run.
        parameters: placeholder names.

    Raises:
        Error: a block reads what a later stage makes, or what is no tensor of an earlier one's.
    """
    again = _again(graph, parameters)
    homes = _homes(graph, again, {name: i for i, part in enumerate(parts) for name in part}, len(parts))
    last = len(parts) - 1
    until = {node: max((homes.get(user, last) for user in node.users), default=home) for node, home in homes.items()}
    crossing = [[node for node, home in homes.items() if home <= i < until[node]] for i in range(last)]
    for node in (node for nodes in crossing for node in nodes if not isinstance(node.meta.get("val"), torch.Tensor)):
        raise Error(f"a stage would send a value that is not a tensor: `{node.target}`", at=line_of(node))
    pairs = zip([[], *crossing], [*crossing, list(returned(graph))], strict=True)
    return [
        Stage(_cut(graph, homes, i, *pair), tuple(node.name for node in pair[0]), tuple(parts[i]))
        for i, pair in enumerate(pairs)
    ]


def blocks_in_order(graph: fx.Graph, parameters: Collection[str]) -> list[str]:
    """The numbered blocks that do what crosses boundaries, in the order of their first operator."""
    again = _again(graph, parameters)
    found = (block_of(node) for node in graph.nodes if node.op == "call_function" and node not in again)
    return list(dict.fromkeys(name for name in found if name))


def balanced(items: int, count: int, cost: Callable[[int, range], float]) -> list[range]:
    """Consecutive runs of items, none of them empty, the dearest of which costs as little as it can.

    Args:
        count: how many runs, no more than items.
        cost: what a run costs, by its number.
    """
    # (runs, items) -> what the dearest costs, and where the last begins.
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (-math.inf, 0)}
    for runs in range(1, count + 1):
        for stop in range(runs, items - (count - runs) + 1):
            starts = [at for at in range(stop) if (runs - 1, at) in best]
            best[runs, stop] = min((max(best[runs - 1, at][0], cost(runs - 1, range(at, stop))), at) for at in starts)
    found, stop = [], items
    for runs in range(count, 0, -1):
        start = best[runs, stop][1]
        found.append(range(start, stop))
        stop = start
    return found[::-1]


def _again(graph: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """What is computed wherever it is needed: made of inputs alone, or of parameters alone; and sizes."""
    inputs, weights = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            (weights if node.name in parameters else inputs).add(node)
        elif node.op != "output" and not draws(node):
            for made in (inputs, weights):
                if all(operand in made for operand in node.all_input_nodes):
                    made.add(node)
    return inputs | weights


def _homes(graph: fx.Graph, again: Collection[fx.Node], of_block: dict[str, int], count: int) -> dict[fx.Node, int]:
    """The stage that computes a value, of those that are computed once: its block's, or the first that reads it."""
    homes: dict[fx.Node, int] = {}
    behind: set[fx.Node] = set()
    once = [node for node in graph.nodes if node.op == "call_function" and node not in again]
    for node in once:
        before = max((homes[n] for n in node.all_input_nodes if n in behind), default=0)
        if (stage := of_block.get(block_of(node))) is not None:
            if stage < before:
                raise Error(
                    f"stage {stage} would need what stage {before} computes, in `{block_of(node)}`",
                    at=line_of(node),
                    fix="fewer stages",
                )
            homes[node] = stage
            behind.add(node)
        elif any(n in behind for n in node.all_input_nodes):
            homes[node] = before
            behind.add(node)
    for node in reversed(once):  # Before the first block: an embedding.
        if node not in behind:
            homes[node] = min((homes.get(user, count - 1) for user in node.users), default=0)
    return {node: homes[node] for node in once}


def _cut(
    graph: fx.Graph, homes: dict[fx.Node, int], at: int, received: Sequence[fx.Node], sent: Sequence[fx.Node]
) -> fx.Graph:
    """The graph of one stage."""
    known = set(received)
    needed = set[fx.Node]()
    for node in reversed(graph.nodes):  # What is computed again for these.
        mine = node in sent or homes.get(node) == at or node in needed
        if mine and node not in known:
            needed.update([node, *(n for n in node.all_input_nodes if n not in homes)])
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in received:
        env[node] = new.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node not in env:
            env[node] = new.node_copy(node, lambda old: env[old])
    new.output(tuple(fx.map_arg(node, lambda old: env[old]) for node in sent))
    return new
