"""kept: the table of what a stage keeps for backward, value by value, from which a budget of memory chooses.

Before: 3 kinds of pieces, and a stage of 20 of them            After: a table of 20 calls of blocks

Each kind of piece runs once on `meta`, as `parallelize` runs a graph on fake tensors. What pieces have in common has
one name, and counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.compiler import emitted_operators
from autotp.costs.hardware import Hardware
from autotp.costs.work import without_processes
from autotp.passes.emit.memory.block_table import BlockTable
from autotp.passes.emit.memory.budget import Budget, budget_of
from autotp.passes.emit.memory.graph_table import BlockCallRow, GraphTable
from autotp.tools.estimation.counts.pieces import Lowered, ModelPiece, Recorded, piece_groups, returning_shared
from autotp.tools.estimation.counts.record import FUSED, META, even_groups, is_padded


def piece_table(model: Lowered, recorded: Recorded, number: int, device: Hardware) -> GraphTable:
    """Returns what a kind of piece keeps for a microbatch. number: of the kind"""
    i, reads = recorded.reads[number]
    budget = _budget(model, i, device.is_gpu)
    places = [node.name for node in budget.module.graph.find_nodes(op="placeholder")]
    learners = {name for name, (value, _) in zip(places, reads, strict=True) if value.learns}
    inputs = [
        torch.empty(value.shape, dtype=value.dtype, device=META, requires_grad=value.learns)
        for name, (value, _) in zip(places, reads, strict=True)
        if name not in budget.sources
    ]
    stands_for = _on_gpu if device.is_gpu else lambda operator: operator
    return budget.counted(inputs, device, learners & budget.learning.keys(), stands_for)


def _budget(model: Lowered, i: int, on_gpu: bool) -> Budget:
    """Returns the budget of a piece of the graph, which has chosen nothing yet.

    On fake tensors of a CPU operators are those that run there; on `meta` others stand for those of a GPU.
    """
    divided, groups = model.divided, piece_groups(model, i)
    if (i, on_gpu) not in divided.budgets:
        device = META if on_gpu else torch.device("cpu")
        training = replace(model.training, memory="100%")
        graph = returning_shared(divided, i)
        # Without gradients nothing is chosen here: what the whole stage keeps decides.
        with without_processes(groups), torch.no_grad():
            module = emitted_operators(graph, model.program, training, device, {axis: axis for axis in groups})
        budget = budget_of(module)
        assert budget is not None
        divided.budgets[i, on_gpu] = budget
    return divided.budgets[i, on_gpu]


def _on_gpu(operator: Any) -> Any:
    """Returns what a GPU runs for an operator."""
    return even_groups if is_padded(operator) else FUSED.get(operator, operator)


def stage_table(pieces: Sequence[ModelPiece], tables: Mapping[int, GraphTable]) -> GraphTable:
    """Returns the table of a stage.

    Args:
        tables: number of a kind of piece -> its table.
    """
    numbers, kinds = dict[Any, int](), dict[Any, BlockCallRow]()
    blocks, calls = list[BlockTable](), list[BlockCallRow]()
    outside, since, sizes, between = dict[int, fx.Node](), dict[int, int](), dict[int, int](), [0]
    for place, piece in enumerate(pieces):
        table = tables[piece.kind]
        named: dict[int | None, str] = dict(zip(table.placeholders, piece.reads, strict=True))
        named |= dict(zip(table.returned, piece.sends, strict=False))
        # Each table numbers memory anew. Only the name of a value tells that two pieces keep the same.
        number_of = {
            memory: numbers.setdefault(named.get(memory, (place, memory)), len(numbers)) for memory in table.sizes
        }
        sizes |= {number_of[memory]: size for memory, size in table.sizes.items()}
        outside |= {number_of[memory]: node for memory, node in table.outside.items()}
        for memory, before in table.since.items():
            since.setdefault(number_of[memory], len(calls) + before)
        between[-1:] = [max(between[-1], table.between[0]), *table.between[1:]]
        for call in table.calls:
            block = table.tables[call.kind]
            key = _facts(call, block)
            if key not in kinds:
                kinds[key] = replace(call, kind=len(blocks))
                blocks.append(block)
            like = kinds[key]
            order = dict(zip(block.values, blocks[like.kind].values, strict=True))
            inputs = {name: number_of[memory] for name, memory in zip(like.inputs, call.inputs.values(), strict=True)}
            results = {order[name]: number_of[memory] for name, memory in call.results.items() if name in order}
            calls.append(replace(like, block=piece.name, inputs=inputs, results=results))
    return GraphTable(calls=calls, tables=blocks, outside=outside, since=since, sizes=sizes, between=between)


def _facts(call: BlockCallRow, block: BlockTable) -> Any:
    """Returns all that choices depend on, of a call: blocks of different pieces that are alike are one kind."""
    names = {name: i for i, name in enumerate((*call.inputs, *block.values))}

    def number(name: str) -> int:
        return names.get(name, -1)  # A parameter.

    rows = [
        (*map(number, value.reads), "reads", *map(number, value.inputs), value.seconds, value.collectives, value.made,
         value.kept, value.smaller, value.seeds, value.inside, value.fixed)
        for value in block.values.values()
    ]  # fmt: skip
    return block.live, tuple(rows), frozenset(map(number, block.inputs)), tuple(map(number, block.results))
