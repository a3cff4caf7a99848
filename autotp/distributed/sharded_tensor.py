"""Sharded: a tensor of which each rank holds a part, such as a cache that a parallel model returns.

Its shape is the global shape, so code that reads the length of a cache gets the same length on every rank, also on a
rank with an empty part. Operators that do not touch the cut dimension work on the part; all others raise Error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.sharding.layout import Layout

Followed = Callable[..., tuple[Tensor, int]]
"""An operator on the part: (cut dimension, the operator, part, its other arguments) -> result, its cut dimension."""


class Sharded(Tensor):
    """A tensor with the shape of the whole that holds one rank's part.

    Attributes:
        part: this rank's part, through which gradients flow.
        held: the layout; its `shape` is not used.
        mesh: the ranks.
    """

    part: Tensor
    held: Layout
    mesh: Mesh

    @staticmethod
    def __new__(cls, part: Tensor, layout: Layout, mesh: Mesh) -> Sharded:
        size = max(stop for ranges in layout.pieces for _, stop in ranges)
        shape = [size if d == layout.dim else n for d, n in enumerate(part.shape)]
        new: Sharded = Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        new.part, new.held, new.mesh = part, layout, mesh
        return new

    @property
    def cut(self) -> tuple[int, Any]:
        """The dimension that is cut, and each rank's ranges of it; graphs are made for these."""
        assert self.held.dim is not None
        return self.held.dim, self.held.pieces

    def like(self, part: Tensor, dim: int) -> Sharded:
        """Returns another tensor that is cut in the same way, along its dimension `dim`."""
        return Sharded(part, Layout(tuple(part.shape), dim, self.held.pieces, self.held.axis), self.mesh)

    def __repr__(self) -> str:  # type: ignore[override]
        sizes = ", ".join(f"{n}@{self.mesh.axis}" if d == self.cut[0] else str(n) for d, n in enumerate(self.shape))
        return f"Sharded([{sizes}], {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        memo[id(self)] = new = self.like(self.part.clone(), self.cut[0])
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        followed = FOLLOWED.get(func)
        if followed is None or not isinstance(args[0], Sharded):
            _expect_about(func)
            return super().__torch_function__(func, types, args, kwargs)
        x = args[0]
        found, dim = followed(x.cut[0], func, x.part, *args[1:], **(kwargs or {}))
        return x if found is x.part else x.like(found, dim)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].like(args[0].part.detach(), args[0].cut[0])
        raise _of_a_part(func)


_NAMES = """
    size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_conj is_neg get_device is_same_size is_pinned is_shared type detach has_names
    shape dtype device layout ndim nbytes itemsize names requires_grad is_leaf grad grad_fn output_nr _version _base
    is_sparse is_sparse_csr is_cuda is_cpu is_meta is_mps is_xpu is_xla is_hpu is_ipu is_maia is_mtia is_vulkan
    is_mkldnn is_quantized is_nested retains_grad __len__ __hash__ __repr__ __str__ __format__ __dir__ __deepcopy__
"""
PROPERTIES = frozenset(_NAMES.split())
"""Attributes and methods that do not read values. Others could read memory that the wrapper does not have."""


def _expect_about(func: Any) -> None:
    """Raises Error for an operator that reads values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name not in PROPERTIES:
        raise _of_a_part(name)


def _of_a_part(what: Any) -> Error:
    return Error(
        f"{what} on a tensor of which each rank holds a part",
        fix="autotp.gather(tensor), which is whole",
        alternative='parallelize(..., outputs="full")',
    )


def _anywhere(cut: int, func: Any, part: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
    """Runs an elementwise operator on the part."""
    return func(part, *args, **kwargs), cut


def _along(place: int) -> Followed:
    """Returns a function that runs an operator along `dim` (its argument number `place` after the tensor) on the part.

    Raises:
        Error: `dim` is the cut dimension.
    """

    def followed(cut: int, func: Any, part: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
        dim = args[place] if len(args) > place else kwargs.get("dim")
        if dim is None or dim % part.dim() == cut:
            raise Error(f"{func.__name__} along a dimension that is cut", fix="autotp.gather(tensor) first")
        return func(part, *args, **kwargs), cut

    return followed


def _indexed(cut: int, func: Any, part: Tensor, index: Any) -> tuple[Tensor, int]:
    """Runs `x[index]` with numbers, slices, `...` and at most one list, if it takes all of the cut dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (part.dim() - len(items) + 1)
    items += [slice(None)] * (part.dim() - len(items))
    lists = [item for item in items if isinstance(item, Tensor)]
    plain = all(isinstance(item, int | slice) or (isinstance(item, Tensor) and item.dim() == 1) for item in items)
    if not plain or len(lists) > 1 or items[cut] != slice(None):
        raise Error(f"an index into dimension {cut}, of which each rank has a part", fix="autotp.gather(tensor) first")
    return func(part, tuple(items)), cut - sum(isinstance(item, int) for item in items[:cut])


FOLLOWED: dict[Any, Followed] = {
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.index_select, torch.index_select, Tensor.narrow), _along(0)),
    **dict.fromkeys((Tensor.repeat_interleave, torch.repeat_interleave), _along(1)),
    **dict.fromkeys((Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.contiguous, Tensor.clone, torch.clone), _anywhere),
    **dict.fromkeys((Tensor.detach, torch.detach, Tensor.data.__get__, Tensor.requires_grad_), _anywhere),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.zero_), _anywhere),
}
