"""A batch: its tensors, its rows, its microbatches, and its part of the totals in a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autotp.errors import Error
from autotp.passes.capture.guards.looks import without_padding
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.passes.capture.pytree import flatten, map_leaves
from autotp.passes.capture.replacements.number_arguments import NumberArgument
from autotp.passes.emit.attach_parameters import place_in, value_at
from autotp.passes.emit.bind import bind
from autotp.passes.pipeline.loss_totals import TOTAL
from autotp.passes.program.program import Program
from autotp.rules.call import placeholders


@dataclass(frozen=True)
class Batch:
    """The arguments of one step on one replica.

    Attributes:
        arguments: args and kwargs.
        micro: args and kwargs of the first microbatch.
        tensors: the tensors among the arguments.
        rows: as `places_of_rows` returns them.
        key: the mode, `rows`, and the arguments' structure.
        shapes: the shapes of a microbatch's tensors.
    """

    arguments: tuple[Any, Any]
    micro: Any
    tensors: list[Tensor]
    rows: frozenset[int]
    key: Any
    shapes: list[Any]

    @cached_property
    def padded(self) -> bool:
        """Whether a mask of the batch has padding. Of a batch on a GPU the host waits for the answer."""
        return not without_padding(self.arguments[1])


def batch_tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors among the arguments; raises Error if the first of them has no rows."""
    tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].dim():
        raise Error("the first tensor of a batch has no rows", fix="the batch first")
    return tensors


def expect_values(tensors: Sequence[Tensor]) -> None:
    """Raises Error if a tensor of a batch is on meta or is not dense."""
    for tensor in tensors:
        if tensor.is_meta or tensor.layout is not torch.strided:
            problem = "has no values: it is on meta" if tensor.is_meta else f"is not dense: {tensor.layout}"
            raise Error(f"a tensor of the batch {problem}", fix="a dense tensor on the CPU or on the rank's device")


def structure_of(args: Any, kwargs: Any) -> Any:
    """Returns all properties of a call's arguments, except the sizes and values of tensors."""
    leaves, spec = flatten((args, kwargs))
    return spec, tuple((x.dim(), x.dtype) if isinstance(x, Tensor) else freeze_argument(x) for x in leaves)


def places_of_rows(tensors: Sequence[Tensor], programs: Iterable[Program]) -> frozenset[int]:
    """Returns the places, among the tensors of a batch, of those with its rows.

    They are as long as the first tensor. A mask `[seq seq]` may be so by chance, and positions `[1 seq]` are as long as
    a batch of one row: an earlier batch, in which they had another length, tells that they have no rows. (Positions may
    be `[1 seq]` in one batch, and `[batch seq]` in the next.)

    Args:
        programs: programs for arguments of this structure.
    """
    size = len(tensors[0])
    earlier = [
        (program.captured.example, program.call.rows or frozenset())
        for program in programs
        if program.captured.example[0][0] > 1  # One row is as long as whatever is broadcast.
    ]
    numbers = {i for i, x in enumerate(tensors) if isinstance(x, NumberArgument)}
    places = {i for i, x in enumerate(tensors) if x.dim() and len(x) == size} - numbers
    if earlier:
        places |= frozenset.intersection(*(rows for _, rows in earlier))  # `row_count` raises if they differ now.
    without_rows = {i for i in places for shapes, rows in earlier if i not in rows and (shapes[i][0] > 1 or size == 1)}
    return frozenset(places - without_rows)


def row_count(tensors: Sequence[Tensor], parts: int, places: Iterable[int]) -> int:
    """Returns the number of rows of a batch.

    Args:
        parts: the number of microbatches.
        places: as `places_of_rows` returns them.

    Raises:
        Error: the tensors differ in their number of rows, or that number does not divide into `parts`.
    """
    size = len(tensors[0])
    if len(sizes := {len(tensors[i]) for i in places}) > 1:
        row_counts = " and ".join(map(str, sorted(sizes, reverse=True)))
        raise Error(
            f"inputs of {row_counts} rows, and all inputs of a batch need the same number of rows",
            fix="the same rows in each",
        )
    if not size or size % parts:
        fits = max(size // parts, 1) * parts
        last = "drop_last=True for the last batch"
        packed = "packed documents in as many rows, all of one length; or microbatches=1"
        problem = f"a batch of {size} does not divide into {parts} microbatches"
        raise Error(problem, fix=f"{fits} rows, or {last if size >= parts else packed}")
    return size


def map_rows(arguments: Any, places: Collection[int], made: Callable[[Tensor], Tensor]) -> Any:
    """Returns the arguments with `made(tensor)` in place of each tensor with rows; `places` says which these are."""
    numbers = itertools.count()

    def mapped(leaf: Any) -> Any:
        # Only tensors are counted, as in `places`.
        return made(leaf) if isinstance(leaf, Tensor) and next(numbers) in places else leaf

    return map_leaves(mapped, arguments)


def totals_of(analysis: Program, inputs: Mapping[str, Tensor], holder: nn.Module, replicas: Any) -> dict[str, Tensor]:
    """Returns the totals of the whole batch, by placeholder: each replica counts its part, and the counts are summed.

    Args:
        inputs: the replica's inputs, by name.
        holder: the module with the parameters and buffers that the counts read.
        replicas: the process group of the replicas.
    """
    counts = counts_of(analysis, inputs, holder)
    if counts is None:
        return {}
    if replicas.size() > 1:  # NCCL would make a communicator of a single rank.
        dist.all_reduce(counts, group=replicas)
    return named_totals(analysis, counts)


def counts_of(analysis: Program, inputs: Mapping[str, Tensor], holder: nn.Module) -> Tensor | None:
    """Returns what a part of a batch adds to each total, in float64; None if the loss has no totals.

    Args:
        inputs, holder: as for `totals_of`.
    """
    assert analysis.totals is not None
    graph = analysis.totals.counts
    device = next(iter(inputs.values())).device
    captured = analysis.captured
    values = {**captured.constants, **inputs}
    names = {x: name for x, name in (captured.parameters | captured.buffers).items() if x in placeholders(graph)}
    values |= {x: value_at(place_in(holder, name)) for x, name in names.items()}
    counts = fx.GraphModule(nn.Module(), bind(graph, device, {}))(*(values[x] for x in placeholders(graph)))
    # In float64 counts are exact up to 2**53, and one tensor is one sum over replicas.
    return torch.stack([count.to(torch.float64) for count in counts]) if counts else None


def named_totals(analysis: Program, totals: Tensor) -> dict[str, Tensor]:
    """Returns the totals of a batch by placeholder, each in its own dtype."""
    places = [n for n in analysis.graph.nodes if n.op == "placeholder" and n.name.startswith(TOTAL)]
    return {n.name: total.to(n.meta["val"].dtype) for n, total in zip(places, totals.unbind(), strict=True)}


def repeat_rows(rows: Tensor) -> Tensor:
    """Returns a tensor with each row repeated."""
    return rows.repeat_interleave(2, 0)
