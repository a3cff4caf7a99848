"""Holdings: the parts of tensors that a rank holds, and the rank that counts each part in a sum over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.options import CheckInputs
from autotp.passes.capture.pytree import is_dense
from autotp.passes.emit.attach_parameters import places
from autotp.runtime.module import ParallelModule, executable_of, expect_part
from autotp.sharding.boxes import Box, boxes, local_of
from autotp.sharding.layout import Layout


@dataclass(frozen=True)
class Holdings:
    """The parts of a model that a rank holds.

    Attributes:
        held: first name of a parameter or buffer -> this rank's part.
        counted: the names that no earlier rank of the pipeline holds.
        saved: names in the original's state dict -> first names.
        shapes: first name -> the original's shape.
        layouts: first name of a parameter, or of a buffer that is cut -> its layout on the tensor-parallel ranks.
        place: the tensor-parallel mesh.
        everyone: the mesh of all ranks that hold the model together.
        pipeline: the group of the ranks with other stages; None without a pipeline.
        replica: number of this rank among those of `everyone` that hold the same tensors, from 0; ranks that shard
            tensors between them hold others.
        check: when ranks are compared.
        alike: pairs of a mesh, and the names that its ranks hold alike. (Sharded tensors differ.)
        beside: names in the original's state dict that are not parameters or buffers.
        left_out: trainable parameters that the state dict does not contain.
    """

    held: Mapping[str, Tensor]
    counted: frozenset[str]
    saved: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, Layout]
    place: Mesh
    everyone: Mesh
    pipeline: str | None = None
    replica: int = 0
    check: CheckInputs = "first"
    alike: tuple[tuple[Mesh, frozenset[str]], ...] = ()
    beside: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def layout(self, name: str) -> Layout:
        """Returns the layout of a parameter or buffer."""
        return self.layouts.get(name) or Layout(self.shapes[name])

    def boxes(self, name: str, like: Tensor | None = None, first: bool = True) -> list[Box]:
        """Returns the boxes that this rank holds of a tensor, or of a tensor `like` it."""
        return boxes(self.held[name] if like is None else like, self.layout(name), self.place.rank, first)

    def counts(self, name: str, like: Tensor) -> list[tuple[Box, Tensor]]:
        """Returns the parts that this rank counts of a tensor `like` this one, for example its gradient.

        In a sum over a replica's ranks each element counts once.
        """
        # A tensor that is not cut is the same on all tensor-parallel ranks: the first one counts it.
        if name not in self.counted or (self.layout(name).dim is None and self.place.rank):
            return []
        return [(box, box.of(local_of(like))) for box in self.boxes(name, like)]

    def fill(self, name: str, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor."""
        with torch.no_grad():
            # Parts that an earlier rank holds, too, are filled: each rank computes with its own copy.
            for box in self.boxes(name, first=False):
                box.of(local_of(self.held[name])).copy_(whole[box.place])


class HasHoldings(nn.Module):
    """A module that knows the parts of a model that this rank holds."""

    def holdings(self) -> Holdings:
        """Returns the parts that this rank holds."""
        raise NotImplementedError


def holdings_of(model: Any, call: str) -> Holdings:
    """Returns the parts that this rank holds of a Trainer's model, or of a parallel model (also if it is wrapped).

    Raises:
        Error: `model` is neither.
    """
    inner = _unwrapped(model, (ParallelModule, HasHoldings))
    if isinstance(inner, HasHoldings):
        return inner.holdings()
    inner = parallel_of(model, call)
    runner = executable_of(inner)
    saved, local_shapes, beside, left_out = saved_names(
        inner
    )  # First: reading its state makes `fully_shard` free gathered parameters.
    tensors = runner.structure.tensors()
    caches = {name: x for name, x in tensors.items() if isinstance(x, Sharded)}
    tensors |= {name: x.part for name, x in caches.items()}
    layouts = runner.structure.layouts | {name: replace(x.held, shape=tuple(x.shape)) for name, x in caches.items()}
    for name in (name for name in tensors if name in layouts):
        expect_part(name, tensors[name], layouts[name], runner.mesh)
    check = runner.tree.settings.check_inputs
    replicated: tuple[tuple[Mesh, frozenset[str]], ...] = ((runner.mesh, uncut(tensors, layouts)),)
    # Ranks along these axes hold the same parts, so cut tensors are alike on them, too.
    for axis in (runner.mesh.sequence, runner.mesh.replicas):
        if axis is not None:
            replicated += ((axis, frozenset(tensors)),)
    shapes = local_shapes | {name: layout.shape for name, layout in layouts.items()}
    return Holdings(
        tensors, frozenset(tensors), saved, shapes, layouts, runner.mesh, runner.mesh.everyone,
        replica=runner.mesh.cp_rank, check=check, alike=replicated, beside=beside, left_out=left_out,
    )  # fmt: skip


def parallel_of(model: Any, call: str) -> ParallelModule:
    """Returns the parallel model inside wrappers of DistributedDataParallel or torch.compile."""
    inner = _unwrapped(model, (ParallelModule,))
    if not isinstance(inner, ParallelModule):
        raise Error(
            f"a {type(model).__name__} is not a parallel model",
            fix=f"{call}(model, ...), with the model that autotp.parallelize returned",
        ).within(call)
    return inner


def _unwrapped(model: Any, kinds: tuple[type, ...]) -> Any:
    while isinstance(model, nn.Module) and not isinstance(model, kinds):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model


def uncut(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> frozenset[str]:
    """Returns the names of the tensors that the tensor-parallel ranks do not cut."""
    return frozenset(name for name in tensors if name not in layouts or layouts[name].dim is None)


def saved_names(
    model: nn.Module,
) -> tuple[dict[str, str], dict[str, tuple[int, ...]], tuple[str, ...], tuple[str, ...]]:
    """Compares a model's state dict with its parameters and buffers.

    Returns:
        name in the state dict -> first name; first name -> shape; names that are not parameters or buffers; trainable
        parameters that the state dict does not contain.
    """
    first = places(model)[0]
    tensors, state = [*model.named_parameters(), *model.named_buffers()], model.state_dict()
    names, tensors_by_name = list(state), dict(tensors)
    saved = {name: first[name] for name in names if name in first}
    left_out = [name for name, x in model.named_parameters() if x.requires_grad and name not in saved.values()]
    beside = tuple(
        name
        for name in names
        if name not in first
        or not is_dense(tensors_by_name[first[name]])
        or not _is_of(state[name], tensors_by_name[first[name]])
    )
    return saved, {name: tuple(x.shape) for name, x in tensors}, beside, tuple(left_out)


def _is_of(value: Any, tensor: Tensor) -> bool:
    """True if an entry of a state dict is a tensor of the model, or a copy: a hook may have computed another value."""
    # Without a gather, or without values, nothing can be compared.
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or isinstance(tensor, DTensor):
        return True
    if tensor.is_meta or value.is_meta or not tensor.layout == value.layout == torch.strided:
        return True
    # Parts are compared as they are: a cut parameter would compare wholes, for which all ranks are needed.
    with torch._C.DisableTorchFunctionSubclass():
        alias = value.shape == tensor.shape and value.data_ptr() == tensor.data_ptr()
        return alias or bool(torch.equal(value.to(tensor), tensor))


def expect_nothing_beside(parts: Holdings, remedy: str) -> None:
    """Raises Error if a state dict has an entry that is not a dense parameter or buffer: its layout is unknown."""
    if parts.beside:
        problem = f"`{parts.beside[0]}` in the model's state_dict() is not a dense parameter or buffer of the model"
        raise Error(problem, fix=remedy)


def expect_all_saved(parts: Holdings) -> None:
    """Raises Error if a checkpoint would not contain exactly the model's parameters and buffers."""
    expect_nothing_beside(parts, "the modules' own names; save_checkpoint(..., name=thing) saves other things")
    if parts.left_out:
        problem = f"`{parts.left_out[0]}` is trained, but is not in the model's state_dict(): it would not be saved"
        raise Error(problem, fix="a state_dict() of all trained parameters, or requires_grad_(False)")
