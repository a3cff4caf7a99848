"""choose: the fastest fates of all blocks that fit a budget."""

from __future__ import annotations

import itertools

import pytest
from budgets.fates import every_choice, random_table

from autotp.costs.hardware import CPU_GLOO
from autotp.passes.emit.memory.block_table import BlockTable
from autotp.passes.emit.memory.choose import choose_fates
from autotp.passes.emit.memory.graph_table import BlockCallRow, GraphTable

MEGABYTE = 10**6


def graph_of(*tables: BlockTable, calls: int = 1) -> GraphTable:
    """A graph that calls each block some times, one after the other."""
    rows = [
        BlockCallRow(target=f"{kind}_{i}", block=f"h.{i}", kind=kind, inputs={}, results={})
        for kind in range(len(tables))
        for i in range(calls)
    ]
    return GraphTable(calls=rows, tables=tables, outside={}, since={}, sizes={}, between=[0] * (len(rows) + 1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("part", [0.8, 0.5, 0.3])
def test_choice_is_nearly_the_fastest_of_all(seed: int, part: float) -> None:
    """Of two blocks, in at most 1.05 times the seconds, beside every pair of choices."""
    one, two = random_table(seed, 6), random_table(seed + 100, 6)
    graph = graph_of(one, two)
    every = [list(pair) for pair in itertools.product(every_choice(one), every_choice(two))]
    whole = max(map(graph.kept, every))
    limit = part * whole
    fitting = [sum(choice.seconds for choice in pair) for pair in every if graph.kept(pair) <= limit]
    chosen = choose_fates(graph, graph.kept, limit, CPU_GLOO, ("recompute",))
    assert chosen.fits == bool(fitting) and chosen.least == min(map(graph.kept, every))
    if fitting:
        assert graph.kept(chosen.choices) <= limit
        assert chosen.seconds <= 1.05 * min(fitting) + 1e-12


def test_of_blocks_that_are_alike_the_first_ones_give_up_more() -> None:
    graph = graph_of(random_table(3), calls=6)
    whole = choose_fates(graph, graph.kept, float("inf"), CPU_GLOO, ("recompute",))
    assert whole.seconds == 0 and not any(choice.fates for choice in whole.choices)
    chosen = choose_fates(graph, graph.kept, 0.6 * graph.kept(whole.choices), CPU_GLOO, ("recompute",))
    sizes = [choice.bytes for choice in chosen.choices]
    # One block is refined, to use what is left of the budget.
    assert sum(a > b for a, b in itertools.pairwise(sizes)) <= 1 and sizes[0] < sizes[-1]


def test_a_larger_budget_is_never_slower() -> None:
    graph = graph_of(random_table(1), random_table(2), calls=3)
    whole = graph.kept(choose_fates(graph, graph.kept, float("inf"), CPU_GLOO, ()).choices)
    seconds = [
        choose_fates(graph, graph.kept, whole * part / 10, CPU_GLOO, ("recompute",)).seconds for part in range(4, 11)
    ]  # fmt: skip
    assert all(less <= 1.05 * more + 1e-12 for more, less in itertools.pairwise(seconds))
