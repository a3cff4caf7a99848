"""stages: divides one rank's graph into the graphs of a pipeline's stages.

    Before: a = embedding(t, e); m = mask(t); b = block(a, m, w0); c = block(b, m, w1); loss(c, y)
    After:  0: a = embedding(t, e); m = mask(t); b = block(a, m, w0); send b
            1: receive b; m = mask(t); c = block(b, m, w1); loss(c, y)

The boundaries are between blocks. Values that depend on inputs only (masks, positions, rotary tables, labels), or on
parameters only, are computed again in each stage that needs them. Every other value is sent across each boundary
between the stage that makes it and the last stage that reads it. In most models this is one value, the residual stream.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autotp.display.sheet import Sheet, Shown, Table
from autotp.errors import Error
from autotp.passes.builder import copied
from autotp.passes.pipeline.cost import Cost
from autotp.rules.call import operator_name, returned
from autotp.rules.traits import draws
from autotp.source_location import block_of, line_of

KEPT = 4
"""The numbers that training keeps for each parameter: its value, its gradient and two moments."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        graph: has placeholders for the received values, in the order of sending, and for other values that it reads;
            returns the values to send, and in the last stage the model's outputs.
        received: names of the placeholders of received values.
        blocks: the blocks that it computes, in order.
    """

    graph: fx.Graph
    received: tuple[str, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Division(Shown):
    """The division of a model's blocks among the stages of a pipeline.

    Attributes:
        blocks: the blocks of each stage, in the order in which they run.
        costs: the cost of each stage, in multiplications.
        memory: the numbers that each stage keeps.
        ranks: the pipeline rank of each stage.
        experts: what replicas send each other for the experts that they have; "" for nothing.
        budgets: of this rank, the load of experts, what `zero` gathers in a step, and what a budget (`memory=`) did
            with the values of its stages in the last step.
    """

    blocks: tuple[tuple[str, ...], ...]
    costs: tuple[float, ...]
    memory: tuple[float, ...]
    ranks: tuple[int, ...]
    experts: str = ""
    budgets: tuple[Table | tuple[str, ...], ...] = ()

    def summary(self) -> str:
        """Returns the number of stages and of pipeline ranks, and what replicas send each other for their experts."""
        blocks, experts = sum(map(len, self.blocks)), f"; {self.experts}" * bool(self.experts)
        return f"{blocks} blocks in {len(self.blocks)} stages on {len(set(self.ranks))} pipeline ranks{experts}"

    def sheet(self) -> Sheet:
        """Returns a row for each stage; costs and memory are shares of all stages'."""
        names = [f"{some[0]} to {some[-1]}" if len(some) > 1 else "".join(some) for some in self.blocks]
        rows = zip(self.ranks, names, _shares(self.costs), _shares(self.memory), strict=True)
        texts = tuple((str(i), str(rank), *cells) for i, (rank, *cells) in enumerate(rows))
        head = ("stage", "pp rank", "blocks", "multiplications", "memory")
        return Sheet(self.summary(), (Table(head, texts, ("", "note", "cut", "", "")), *self.budgets))


def _shares(parts: Sequence[float]) -> list[str]:
    return [f"{part / (sum(parts) or 1):.1%}" for part in parts]


def expect_enough(blocks: int, stages: int) -> None:
    """Raises Error if there are fewer blocks than stages."""
    if blocks < stages and stages > 1:
        raise Error(
            f"{stages} stages, and the model has {blocks} blocks",
            fix="fewer pipeline ranks, or fewer stages on each (interleave=, schedule=)",
        )


def partition(blocks: Sequence[str], costs: Sequence[Cost], homes: Sequence[int], flights: Sequence[int]) -> Division:
    """Returns the division of the blocks into stages with the smallest cost of the most expensive stage.

    Among such divisions it returns one with the smallest memory of the stage that keeps most.

    Args:
        homes: the rank of each stage.
        flights: the number of microbatches of which each stage keeps activations at a time.

    Raises:
        Error: there are fewer blocks than stages.
    """
    expect_enough(len(blocks), len(homes))
    total = [Cost(), *itertools.accumulate(costs)]

    def work(_: int, run: range) -> float:
        done = total[run.stop].multiplications - total[run.start].multiplications
        return done + len(run)  # No block is free.

    def memory(stage: int, run: range) -> float:
        learnt = total[run.stop].parameters - total[run.start].parameters
        made = total[run.stop].activations - total[run.start].activations
        return KEPT * learnt + flights[stage] * made

    fast = balanced(len(blocks) or 1, len(homes), work)
    dearest = max(itertools.starmap(work, enumerate(fast))) * (1 + 1e-9)  # Room for the rounding of sums.
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
    """Returns the stages of a graph.

    Args:
        parts: the blocks of each stage, in the order in which they run.
        parameters: placeholder names of the parameters.

    Raises:
        Error: a block reads a value of a later stage, or a value of an earlier stage that is not a tensor.
    """
    again = _again(graph, parameters)
    homes = _homes(graph, again, {name: i for i, part in enumerate(parts) for name in part}, len(parts))
    last = len(parts) - 1
    # The output node has no stage; the last one returns what the graph returns.
    until = {node: max((homes.get(user, last) for user in node.users), default=home) for node, home in homes.items()}
    crossing = [[node for node, home in homes.items() if home <= i < until[node]] for i in range(last)]
    for node in (node for nodes in crossing for node in nodes if not isinstance(node.meta.get("val"), torch.Tensor)):
        raise Error(
            f"a stage would send a value that is not a tensor: `{operator_name(node)}`",
            at=line_of(node),
            fix="that number as a tensor, or computed again in the later block",
        )
    pairs = zip([[], *crossing], [*crossing, list(returned(graph))], strict=True)
    return [
        Stage(_cut(graph, homes, i, *pair), tuple(node.name for node in pair[0]), tuple(parts[i]))
        for i, pair in enumerate(pairs)
    ]


def blocks_in_order(graph: fx.Graph, parameters: Collection[str]) -> list[str]:
    """Returns the numbered blocks with operators that are computed once, in the order of their first operator."""
    again = _again(graph, parameters)
    names = (block_of(node) for node in graph.nodes if node.op == "call_function" and node not in again)
    return list(dict.fromkeys(name for name in names if name))


def balanced(items: int, count: int, cost: Callable[[int, range], float]) -> list[range]:
    """Returns `count` consecutive runs of items, none empty, with the smallest cost of the most expensive run.

    Args:
        count: the number of runs, at most `items`.
        cost: (number of a run, the run) -> its cost. A run that begins earlier costs no less.
    """
    best, starts = [-math.inf, *[math.inf] * items], list[list[int]]()
    for run in range(count):
        # By the item at which the runs so far end: the cost of the most expensive one, and where the last one starts.
        now, chosen = [math.inf] * (items + 1), [0] * (items + 1)
        for stop in range(run + 1, items - (count - run - 1) + 1):
            for start in range(stop - 1, run - 1, -1):  # The earlier the last run starts, the more it costs.
                run_cost = cost(run, range(start, stop))
                if run_cost > now[stop]:
                    break
                if max(best[start], run_cost) <= now[stop]:
                    now[stop], chosen[stop] = max(best[start], run_cost), start
        best = now
        starts.append(chosen)
    runs, stop = [], items
    for chosen in reversed(starts):
        runs.append(range(chosen[stop], stop))
        stop = chosen[stop]
    return runs[::-1]


def _again(graph: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that each stage computes for itself: they depend on inputs only, or on parameters only."""
    inputs, weights = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            (weights if node.name in parameters else inputs).add(node)
        # A second draw would be other numbers.
        elif node.op != "output" and not draws(node):
            for made in (inputs, weights):
                if all(operand in made for operand in node.all_input_nodes):
                    made.add(node)
    return inputs | weights


def _homes(graph: fx.Graph, again: Collection[fx.Node], of_block: dict[str, int], count: int) -> dict[fx.Node, int]:
    """Node -> stage, for values that are computed once: the stage of the block, or of the first reader.

    Raises:
        Error: a stage would need a value of a later stage.
    """
    homes: dict[fx.Node, int] = {}
    from_blocks: set[fx.Node] = set()
    once = [node for node in graph.nodes if node.op == "call_function" and node not in again]
    for node in once:
        before = max((homes[n] for n in node.all_input_nodes if n in from_blocks), default=0)
        if (stage := of_block.get(block_of(node))) is not None:
            if stage < before:
                raise Error(
                    f"stage {stage} would need what stage {before} computes, in `{block_of(node)}`",
                    at=line_of(node),
                    fix="fewer stages",
                )
            homes[node] = stage
            from_blocks.add(node)
        elif any(n in from_blocks for n in node.all_input_nodes):
            homes[node] = before
            from_blocks.add(node)
    for node in reversed(once):  # Before the first block: an embedding.
        if node not in from_blocks:
            homes[node] = min((homes.get(user, count - 1) for user in node.users), default=0)
    return {node: homes[node] for node in once}


def _cut(
    graph: fx.Graph, homes: dict[fx.Node, int], stage: int, received: Sequence[fx.Node], sent: Sequence[fx.Node]
) -> fx.Graph:
    """Returns the graph of one stage."""
    inputs = set(received)
    needed = set[fx.Node]()
    for node in reversed(graph.nodes):  # Adds the nodes that are computed again here.
        included = node in sent or homes.get(node) == stage or node in needed
        if included and node not in inputs:
            needed.update([node, *(n for n in node.all_input_nodes if n not in homes)])
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in received:
        env[node] = result.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node not in env:
            env[node] = copied(result, node, env.__getitem__)
    result.output(tuple(fx.map_arg(node, lambda old: env[old]) for node in sent))
    return result
