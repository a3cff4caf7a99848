"""mesh_step: compares a step of `distribute` with one device, in one process and in float64.

The stages of all tensor-parallel ranks run in lockstep, one microbatch of one replica after the other. Gradients add up
over them, as they do on real ranks. One device computes the whole batch at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp.diagnostics.differences import (
    Difference,
    descending,
    difference,
    gradient_differences,
    largest,
    rank_tensors,
    step_differences,
)
from autotp.diagnostics.lockstep import run_programs, simulated
from autotp.diagnostics.mesh_proof import MeshProof
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.capture.pytree import flatten, signature_of
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.pipeline.stages import Stage
from autotp.passes.program.loss_only import loss_among
from autotp.passes.program.program import Program
from autotp.sharding.layout import Layout
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
    # The tensor-parallel ranks of each context-parallel rank hold the same parts.
    ranks = [rank_tensors(model, program.layouts, rank % program.tp) for rank in range(len(stages))]
    divided = {*program.captured.parameters.values()} - {*proof.whole} if proof.divides else ()
    rooms = [None if training.gathers_once(proof.pp) else Room[ShardedUnit]() for _ in ranks]
    programs = [
        [
            simulated(stage.graph, local_tensors, program, model, training, i % program.tp, divided, room)
            for stage in row
        ]
        for i, (row, local_tensors, room) in enumerate(zip(stages, ranks, rooms, strict=True))
    ]
    microbatches = [totals | _given(program, _part(whole, places, i, dp * parts)) for i in range(dp * parts)]
    rest = _rest_of_loss(program, stages, programs, microbatches)
    losses = [torch.zeros_like(loss) if rest is None else rest.sum_up().to(loss) for _ in ranks]
    for microbatch in microbatches:
        results = _lockstep(stages, programs, microbatch, program.options.cp)
        rank_losses = [result[0] if rest is None else rest.add(result[0], result[1:], False) for result in results]
        # One backward for all ranks: a collective is one node of the graph that they share.
        torch.autograd.backward(rank_losses)
        for stage_program in itertools.chain(*programs):
            stage_program.sum_the_rest()
        losses = [sofar + rank_loss.detach() for sofar, rank_loss in zip(losses, rank_losses, strict=True)]
    scale = largest([loss.detach()])
    outputs = [Difference("loss", difference(loss.detach(), losses, Layout(()), scale))]
    tensors = dict(model.named_parameters())
    gradients = gradient_differences(tensors, ranks, program)
    rows = outputs, gradients, step_differences(tensors, ranks, program)
    first, second, third = (tuple(sorted(row, key=descending)) for row in rows)
    return first, second, third


def _rest_of_loss(
    program: Program,
    stages: Sequence[Sequence[Stage]],
    programs: Sequence[Sequence[RankProgram]],
    microbatches: Sequence[Mapping[str, Tensor]],
) -> RestOfLoss | None:
    """Returns what the sums of all microbatches add to the loss; None if it is computed from no sums."""
    assert program.totals is not None
    if program.totals.functions is None:
        return None
    rest = RestOfLoss(program.totals.functions, torch.device("cpu"), None, len(microbatches))
    with torch.no_grad():
        for microbatch in microbatches:
            first, *_ = _lockstep(stages, programs, microbatch, program.options.cp)
            rest.add(first[0], first[1:], at_once=False)
    return rest


def _lockstep(
    stages: Sequence[Sequence[Stage]],
    programs: Sequence[Sequence[RankProgram]],
    microbatch: Mapping[str, Tensor],
    cp: int,
) -> list[Sequence[Tensor]]:
    """Runs the stages one after the other; returns each rank's loss of a microbatch, and its sums for `functions`."""
    sent: list[Sequence[Tensor]] = [()] * len(stages)
    for i in range(len(stages[0])):
        received = [zip(row[i].received, values, strict=True) for row, values in zip(stages, sent, strict=True)]
        sent = run_programs([row[i] for row in programs], [{**microbatch, **dict(pairs)} for pairs in received], cp)
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
