"""The whole of a tensor of which each rank holds some rows of a part, as `zero=` and torch's `fully_shard` keep it.

Such a tensor is a DTensor over replicas: of a tensor-parallel part, or of a tensor that tensor-parallel ranks have
whole. To user code it behaves as the whole: see NOTE [Views of a gathered tensor].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autotp.distributed.cut_tensors.sharded_tensor import join_parts, part_of, plain_view
from autotp.distributed.cut_tensors.whole_operators import Whole, WholeView
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.ops.eager_mode import apply_plain
from autotp.sharding.boxes import all_rows
from autotp.sharding.layout import Layout


class PartInRows:
    """A rank's part of which its replicas hold some rows each. `Whole` gathers it and writes into it.

    Attributes:
        rows: a DTensor over replicas, without derivatives.
        part: the rows of this rank.
        layout, held: the layout of the parts, with and without its shape.
        mesh: the ranks that hold the parts.
        shape, dtype: those of the whole.
        of_leaf: whether it is a parameter, and gradients are recorded, so that writing into it is an error.
    """

    def __init__(self, rows: Any, layout: Layout, mesh: Mesh, of_leaf: bool = False) -> None:
        self.rows, self.part, self.of_leaf = rows, rows.to_local(), of_leaf
        self.layout, self.held, self.mesh = layout, replace(layout, shape=()), mesh
        self.shape, self.dtype = layout.shape, rows.dtype

    def gathered(self) -> Tensor:
        """Returns the whole: all ranks and all replicas call this."""
        with torch.no_grad():
            # First the replicas join the rows of a part, then the ranks join the parts.
            part = all_rows(self.rows)
            return part if self.held.dim is None else join_parts(part, self.held, self.mesh)

    def take_rows(self, whole: Tensor) -> DTensor:
        """Returns this rank's rows of its part of a tensor, whole or cut."""
        with torch.no_grad():
            return rows_of_part(part_of(whole.detach(), self.held, self.mesh), self.rows)

    def write(self, whole: Tensor) -> None:
        """Writes this rank's rows of a tensor, whole or cut."""
        self.part.copy_(self.take_rows(whole).to_local())

    def expect_writable(self) -> None:
        """Raises RuntimeError, as torch does for a parameter, if gradients of what is written would be lost."""
        if self.of_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def was_written(self) -> None:
        """Tells views of the whole that the rows were written."""
        torch.autograd.graph.increment_version(self.rows)

    def version(self) -> int:
        """Returns how often the tensor was written: torch counts it for the DTensor, not for its rows."""
        return int(self.rows._version)


def rows_of_part(part: Tensor, like: DTensor) -> DTensor:
    """Returns this rank's rows of a part, divided over replicas as another tensor is."""
    mesh = like.device_mesh
    # From whole to rows each rank takes a slice of its own copy: nothing is sent.
    replicas = DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicas.redistribute(placements=like.placements)


def whole_of_rows(tensor: DTensor, layout: Layout, mesh: Mesh) -> WholeView:
    """Returns the whole of a tensor in rows; what is written into it is written into the rows. Gradients flow to it."""
    if tensor.requires_grad and torch.is_grad_enabled():
        view: WholeView = apply_plain(_Gathered, tensor, layout, mesh)
        return view
    gathered = Whole(PartInRows(tensor.detach(), layout, mesh))
    return WholeView(gathered.tensor, gathered)


def rows_to_set(tensor: DTensor, value: Any, layout: Layout, mesh: Mesh, name: str) -> Any:
    """Returns the rows of what user code gives as the data or the gradient of a tensor in rows.

    Raises:
        Error: it has not the shape of the whole.
    """
    # None removes a gradient, and a DTensor is in rows already.
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != layout.shape:
        raise Error(
            f"a tensor {list(value.shape)} as data or gradient of `{name}`, which is {list(layout.shape)}",
            fix="a tensor of the whole's shape, of which each rank takes its rows",
        )
    return PartInRows(tensor.detach(), layout, mesh).take_rows(value)


def set_rows(tensor: Any, value: DTensor, name: str) -> None:
    """Writes rows into those of a tensor, whose data user code replaces: torch would leave them as they are.

    Raises:
        Error: the dtype is another one.
    """
    if value.dtype != tensor.dtype:
        raise Error(
            f"data of dtype {value.dtype} for `{name}`, which is {tensor.dtype}: `fully_shard` keeps this dtype",
            fix="model.to(dtype) before fully_shard or autotp.distribute",
        )
    tensor.detach().to_local().copy_(value.to_local())


class _Gathered(torch.autograd.Function):
    """A tensor in rows -> the whole, on each rank. Each rank gets the gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Layout, mesh: Mesh) -> WholeView:
        ctx.part = PartInRows(tensor.detach(), layout, mesh, of_leaf=True)
        gathered = Whole(ctx.part)
        return WholeView(gathered.tensor, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Rows.apply(gradient, ctx.part), None, None


class _Rows(torch.autograd.Function):
    """A whole tensor -> this rank's rows of its part. `_Gathered` is its backward, and is differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: PartInRows) -> DTensor:
        ctx.part = part
        return part.take_rows(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return plain_view(_Gathered.apply(gradient, ctx.part.layout, ctx.part.mesh)), None
