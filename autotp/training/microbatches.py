"""A batch: its tensors, its rows, its microbatches, and what it adds to the totals of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autotp.compiler import Program
from autotp.errors import Error
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.guards.argument_keys import argument_key
from autotp.passes.capture.pytree import flatten
from autotp.passes.emit.attach_parameters import place_of, value_at
from autotp.passes.emit.bind import bind
from autotp.passes.pipeline.loss_totals import TOTAL
from autotp.passes.pipeline.row_independence import batched
from autotp.rules.call import placeholders


@dataclass(frozen=True)
class Batch:
    """What a replica was given.

    Attributes:
        arguments: args and kwargs.
        micro: those of the first microbatch.
        tensors: the tensors among the arguments.
        key: the mode, and all about them but sizes and values.
        shapes: of a microbatch's tensors.
    """

    arguments: tuple[Any, Any]
    micro: Any
    tensors: list[Tensor]
    key: Any
    shapes: list[Any]


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, of which the first has rows."""
    found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if not found or not found[0].dim():
        raise Error("the first tensor of a batch has no rows", fix="the batch first")
    return found


def expect_values(tensors: Sequence[Tensor]) -> None:
    """Raises Error if some tensor of a batch is none to compute with."""
    for tensor in tensors:
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "has no values: it is on meta" if tensor.is_meta else f"is not dense: {tensor.layout}"
            raise Error(f"a tensor of the batch {what}", fix="a dense tensor on the CPU or on the rank's device")


def key_of(training: bool, args: Any, kwargs: Any) -> Any:
    """All about a call's arguments but sizes and values of tensors."""
    leaves, spec = flatten((args, kwargs))
    return training, spec, tuple((x.dim(), x.dtype) if isinstance(x, Tensor) else argument_key(x) for x in leaves)


def rows_of(tensors: Sequence[Tensor], parts: int, known: Sequence[Captured]) -> int:
    """How many rows a batch has.

    Args:
        parts: microbatches that it is for.
        known: graphs for calls of this kind, which tell what of it has rows.

    Raises:
        Error: its tensors differ in that, or it does not divide.
    """
    size = len(tensors[0])
    for captured in known[:1]:
        rows = batched(captured.inputs, captured.example)
        sizes = {len(x) for name, x in zip(captured.inputs, tensors, strict=True) if name in rows}
        if len(sizes) > 1:
            found = " and ".join(map(str, sorted(sizes, reverse=True)))
            raise Error(f"inputs of {found} rows, and all inputs of a batch need the same number of rows")
    if not size or size % parts:
        fits = max(size // parts, 1) * parts
        problem = f"a batch of {size} does not divide into {parts} microbatches"
        raise Error(problem, fix=f"{fits} rows, or drop_last=True for the last batch")
    return size


def of_rows(leaf: Any, size: int, made: Callable[[Tensor], Tensor]) -> Any:
    """What is made of an argument that has as many rows as the batch; any other as it is."""
    return made(leaf) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf


def totals_of(analysis: Program, given: Mapping[str, Tensor], holder: nn.Module, replicas: Any) -> dict[str, Tensor]:
    """What the whole batch counts: each replica its own part, and the sum over them.

    Args:
        given: the replica's inputs, by name.
        holder: what holds the parameters and buffers that counts are made of.
        replicas: their group.
    """
    graph = analysis.counts
    assert graph is not None
    device = next(iter(given.values())).device
    captured = analysis.captured
    known = {**captured.constants, **given}
    names = {x: name for x, name in (captured.parameters | captured.buffers).items() if x in placeholders(graph)}
    known |= {x: value_at(place_of(holder, name)) for x, name in names.items()}
    counts = fx.GraphModule(nn.Module(), bind(graph, device, {}))(*(known[x] for x in placeholders(graph)))
    if not counts:
        return {}
    summed = torch.stack([count.to(torch.float64) for count in counts])
    dist.all_reduce(summed, group=replicas)
    places = [n for n in analysis.graph.nodes if n.op == "placeholder" and n.name.startswith(TOTAL)]
    return {n.name: total.to(n.meta["val"].dtype) for n, total in zip(places, summed.unbind(), strict=True)}


def twice(rows: Tensor) -> Tensor:
    """Each row two times."""
    return rows.repeat_interleave(2, 0)
