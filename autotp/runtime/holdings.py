"""Holdings: the parts of tensors that a rank holds, and which rank counts each in a sum over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.options import CheckInputs
from autotp.passes.emit.attach_parameters import places
from autotp.runtime.module import ParallelModule, executable_of
from autotp.sharding.boxes import Box, boxes, local_of
from autotp.sharding.layout import Layout


@dataclass(frozen=True)
class Holdings:
    """What a rank holds.

    Attributes:
        held: first name of a parameter or buffer -> what this rank has of it.
        counted: of these, what no earlier rank of the pipeline has.
        saved: names in the original's state dict -> first names.
        shapes: first name -> the original's shape.
        layouts: first name of a parameter -> how the tensor-parallel ranks hold it.
        place: this rank's place among these.
        everyone: all ranks that hold the model together.
        pipeline: the group of those that hold other stages; None where there are none.
        replica: which of the ranks that hold the same this is, from 0; what is sharded over them is no replica.
        check: when ranks are compared.
        alike: this rank among ranks that hold the same -> what of it. Of what is sharded over them each has its own.
        beside: names in the original's state dict that are of no parameter or buffer.
        left_out: parameters that learn, and that its state dict does not name.
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
        """How a parameter or buffer is held; buffers are whole."""
        return self.layouts.get(name) or Layout(self.shapes[name])

    def boxes(self, name: str, like: Tensor | None = None, first: bool = True) -> list[Box]:
        """The boxes that this rank holds of a tensor, or of what lies as it does."""
        return boxes(self.held[name] if like is None else like, self.layout(name), self.place.rank, first)

    def counts(self, name: str, like: Tensor) -> list[tuple[Box, Tensor]]:
        """What this rank counts of what lies as a tensor does, its gradient say: of a replica, each element once."""
        if name not in self.counted or (self.layout(name).dim is None and self.place.rank):
            return []
        return [(box, box.of(local_of(like))) for box in self.boxes(name, like)]

    def fill(self, name: str, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor."""
        with torch.no_grad():
            for box in self.boxes(name, first=False):
                box.of(local_of(self.held[name])).copy_(whole[box.place])


class HasHoldings(nn.Module):
    """A module that knows what this rank holds of a model."""

    def holdings(self) -> Holdings:
        """What this rank holds."""
        raise NotImplementedError


def holdings_of(model: Any, call: str) -> Holdings:
    """What a rank holds of a model: of a Trainer, or of a parallel model, out of what torch wrapped around it.

    Raises:
        Error: it is neither.
    """
    inner = _unwrapped(model, (ParallelModule, HasHoldings))
    if isinstance(inner, HasHoldings):
        return inner.holdings()
    inner = parallel_of(model, call)
    it = executable_of(inner)
    saved, here, beside, left_out = saved_names(
        inner
    )  # First: asked for its state, `fully_shard` frees what it had gathered.
    held, shapes = it.tensors(), {name: layout.shape for name, layout in it.layouts.items()}
    check = it.tree.settings.check_inputs
    alike = ((it.mesh, uncut(held, it.layouts)),)
    return Holdings(
        held, frozenset(held), saved, here | shapes, it.layouts, it.mesh, it.mesh,
        check=check, alike=alike, beside=beside, left_out=left_out,
    )  # fmt: skip


def parallel_of(model: Any, call: str) -> ParallelModule:
    """The parallel model, out of what DistributedDataParallel or torch.compile wrapped around it."""
    inner = _unwrapped(model, (ParallelModule,))
    if not isinstance(inner, ParallelModule):
        raise Error(
            f"a {type(model).__name__} is not a parallel model",
            fix=f"{call}(model, ...), with what autotp.parallelize returned",
        ).within(call)
    return inner


def _unwrapped(model: Any, kinds: tuple[type, ...]) -> Any:
    while isinstance(model, nn.Module) and not isinstance(model, kinds):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model


def uncut(held: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> frozenset[str]:
    """What the tensor-parallel ranks do not cut."""
    return frozenset(name for name in held if name not in layouts or layouts[name].dim is None)


def saved_names(
    model: nn.Module,
) -> tuple[dict[str, str], dict[str, tuple[int, ...]], tuple[str, ...], tuple[str, ...]]:
    """The names in a model's state dict, each with its first; all shapes by first names; what does not fit together."""
    first = places(model)[0]
    tensors, names = [*model.named_parameters(), *model.named_buffers()], list(model.state_dict())
    saved = {name: first[name] for name in names if name in first}
    left_out = [name for name, x in model.named_parameters() if x.requires_grad and name not in saved.values()]
    beside = tuple(name for name in names if name not in first)
    return saved, {name: tuple(x.shape) for name, x in tensors}, beside, tuple(left_out)


def expect_nothing_beside(parts: Holdings, remedy: str) -> None:
    """Raises Error where a state dict has what is no parameter or buffer: nobody knows how it is cut."""
    if parts.beside:
        problem = f"`{parts.beside[0]}` in the model's state_dict() is no parameter or buffer of the model"
        raise Error(problem, fix=remedy)


def expect_all_saved(parts: Holdings) -> None:
    """Raises Error where a checkpoint would not be the model's state."""
    expect_nothing_beside(parts, "the modules' own names, and save_checkpoint(..., name=thing) for what is beside them")
    if parts.left_out:
        problem = f"`{parts.left_out[0]}` learns, and the model's state_dict() leaves it out: it would not be saved"
        raise Error(problem, fix="a state_dict() of all that learns, or requires_grad_(False)")
