"""mesh_step: compares a step of `distribute` with one device, in one process and in float64.

The stages of all tensor-parallel ranks run in lockstep, one microbatch of one replica after the other; where replicas
send each other rows of experts, those of all replicas together. Gradients add up over them, as they do on real ranks.
One device computes the whole batch at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp.diagnostics.differences import (
    Difference,
    RankTensors,
    descending,
    difference,
    gradient_differences,
    largest,
    rank_tensors,
    step_differences,
)
from autotp.diagnostics.lockstep import Grid, run_programs, simulated
from autotp.diagnostics.mesh_proof import MeshProof
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.capture.pytree import flatten, signature_of
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.pipeline.stages import Stage
from autotp.passes.plan.experts.expert_parallel import EP
from autotp.passes.program.loss_only import loss_among
from autotp.passes.program.program import Program
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds
from autotp.training.microbatches import batch_tensors, counts_of, map_rows, named_totals
from autotp.training.pipeline.documents import Documents
from autotp.training.pipeline.rest_of_loss import RestOfLoss
from autotp.training.pipeline.schedules import Training

Rows = tuple[Difference, ...]


def compare_step(
    model: nn.Module, inputs: Inputs, program: Program, stages: Sequence[Sequence[Stage]], proof: MeshProof,
    training: Training,
) -> tuple[Rows, Rows, Rows]:  # fmt: skip
    """Returns the differences of the loss, the gradients, and the parameters after a step of an optimizer.

    Args:
        model: the whole model, in float64; its gradients are set.
        inputs: the arguments of a microbatch; the batch is made of its rows.
        program: the program of a microbatch.
        stages: the stages of each tensor-parallel rank, those of the first context-parallel rank first.
        proof: what was proved of the layout: the number of replicas, and the parameters that ZeRO leaves whole.
    """
    dp = proof.dp
    args, kwargs = signature_of(model).by_name(*inputs)
    places, parts = program.call.rows or frozenset(), training.microbatches
    whole = map_rows((args, kwargs), places, lambda x: _batch(x, parts * dp))
    of_one_device = _with_documents(whole, program, parts * dp)
    loss = _loss(model(*of_one_device[0], **of_one_device[1]))
    torch.autograd.backward(loss)
    replicas = [_given(program, _part(whole, places, i, dp)) for i in range(dp)]
    # As in `distribute`: each replica counts its own rows, and the counts are summed.
    counts = [counts_of(program, replica, model) for replica in replicas]
    defined_counts = [count for count in counts if count is not None]
    totals = named_totals(program, torch.stack(defined_counts).sum(0)) if defined_counts else {}
    # The tensor-parallel ranks of each context-parallel rank hold the same parts, and replicas hold those of the first.
    ranks = [rank_tensors(model, program.layouts, rank % program.tp) for rank in range(len(stages))]
    grid = Grid(dp if training.ep > 1 else 1, program.options.cp, training.ep)
    programs = _programs(model, program, stages, ranks, proof, training, grid)
    microbatches = [totals | _given(program, _part(whole, places, i, dp * parts)) for i in range(dp * parts)]
    # Of each replica its first microbatch, then of each its second, and so on.
    batches = [microbatches[i :: dp * parts // grid.dp] for i in range(dp * parts // grid.dp)]
    rest = _rest_of_loss(program, stages, programs, batches, grid)
    losses = [torch.zeros_like(loss) if rest is None else rest.sum_up().to(loss) for _ in ranks]
    for batch in batches:
        results = _lockstep(stages, programs, batch, grid)
        rank_losses = [result[0] if rest is None else rest.add(result[0], result[1:], False) for result in results]
        # One backward for all ranks: a collective is one node of the graph that they share.
        torch.autograd.backward(rank_losses)
        for stage_program in itertools.chain(*programs):
            stage_program.sum_the_rest()
        for i, rank_loss in enumerate(rank_losses):
            losses[i % len(ranks)] = losses[i % len(ranks)] + rank_loss.detach()
    _join_experts(ranks, proof.of_experts, grid)
    scale = largest([loss.detach()])
    outputs = [Difference("loss", difference(loss.detach(), losses, Layout(()), scale))]
    tensors = dict(model.named_parameters())
    gradients = gradient_differences(tensors, ranks, program)
    rows = outputs, gradients, step_differences(tensors, ranks, program)
    first, second, third = (tuple(sorted(row, key=descending)) for row in rows)
    return first, second, third


def _programs(
    model: nn.Module, program: Program, stages: Sequence[Sequence[Stage]], ranks: Sequence[RankTensors],
    proof: MeshProof, training: Training, grid: Grid,
) -> list[list[RankProgram]]:  # fmt: skip
    """Returns the programs of the stages of each rank, for all replicas of a grid."""
    divided = {*program.captured.parameters.values()} - {*proof.whole, *proof.of_experts} if proof.divides else ()
    count, made = grid.dp * len(ranks), list[list[RankProgram]]()
    places_along_ep = {rank: place for group in grid.groups(EP, count) for place, rank in enumerate(group)}
    for i in range(count):
        room = None if training.gathers_once(proof.pp) else Room[ShardedUnit]()
        stored = {
            name: chunk_bounds(program.layouts[name].shape[0], grid.ep, places_along_ep[i]) for name in proof.of_experts
        }
        graphs, tensors = stages[i % len(ranks)], ranks[i % len(ranks)]
        of_rank = (tensors, program, model, training, i % program.tp, divided, room, stored)
        made.append([simulated(stage.graph, *of_rank) for stage in graphs])
    return made


def _join_experts(ranks: Sequence[RankTensors], names: Collection[str], grid: Grid) -> None:
    """Gives ranks along `cp` that store experts together the gradients of all these; replicas have one tensor."""
    groups = grid.groups(EP, grid.dp * len(ranks)) if names else []
    for together in dict.fromkeys(tuple(dict.fromkeys(rank % len(ranks) for rank in group)) for group in groups):
        for name in names if len(together) > 1 else ():
            grads = [grad for rank in together if (grad := ranks[rank][name].grad) is not None]
            for rank in together if grads else ():
                ranks[rank][name].grad = torch.stack(grads).sum(0)


def _rest_of_loss(
    program: Program,
    stages: Sequence[Sequence[Stage]],
    programs: Sequence[Sequence[RankProgram]],
    batches: Sequence[Sequence[dict[str, Tensor]]],
    grid: Grid,
) -> RestOfLoss | None:
    """Returns what the sums of all microbatches add to the loss; None if it is computed from no sums."""
    assert program.totals is not None
    if program.totals.functions is None:
        return None
    rest = RestOfLoss(program.totals.functions, torch.device("cpu"), None, sum(map(len, batches)))
    with torch.no_grad():
        for batch in batches:
            results = _lockstep(stages, programs, batch, grid)
            for first in results[:: len(stages)]:
                rest.add(first[0], first[1:], at_once=False)
    return rest


def _lockstep(
    stages: Sequence[Sequence[Stage]],
    programs: Sequence[Sequence[RankProgram]],
    microbatches: Sequence[dict[str, Tensor]],
    grid: Grid,
) -> list[Sequence[Tensor]]:
    """Runs the stages one after the other; returns each rank's loss of a microbatch, and its sums for `functions`.

    Args:
        microbatches: one of each replica of the grid.
    """
    of_ranks = [*stages] * len(microbatches)
    sent: list[Sequence[Tensor]] = [()] * len(programs)
    for i in range(len(stages[0])):
        received = [dict(zip(row[i].received, values, strict=True)) for row, values in zip(of_ranks, sent, strict=True)]
        inputs = [microbatches[rank // len(stages)] | values for rank, values in enumerate(received)]
        sent = run_programs([row[i] for row in programs], inputs, grid)
    return sent


def _batch(x: Tensor, parts: int) -> Tensor:
    """Returns a batch of `parts` times as many rows, each row with its elements in another order.

    A part gets few different rows, so that parts differ, for example in how many labels count.
    """
    rows = x.repeat_interleave(parts, 0)
    return torch.stack([row.roll(i, -1) if row.dim() else row for i, row in enumerate(rows)])


def _with_documents(whole: Any, program: Program, parts: int) -> Any:
    """Returns the arguments of the whole batch with the ends of its documents, which are those of each part."""
    names = Documents(program).tokens
    places = {i for i, name in enumerate(program.captured.inputs) if name in names}

    def of_all_parts(ends: Tensor) -> Tensor:
        return torch.cat([*(ends[:-1] + i * ends[-1] for i in range(parts)), parts * ends[-1:]])

    return map_rows(whole, places, of_all_parts)


def _part(whole: Any, places: frozenset[int], i: int, parts: int) -> Any:
    return map_rows(whole, places, lambda x: x.chunk(parts)[i])


def _given(program: Program, arguments: Any) -> dict[str, Tensor]:
    return dict(zip(program.captured.inputs, batch_tensors(*arguments), strict=True))


def _loss(result: Any) -> Tensor:
    """Returns the number among a model's outputs that `distribute` takes for the loss."""
    every = flatten(result)[0]
    loss = loss_among([x for x in every if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()], result)
    assert loss is not None
    return loss
