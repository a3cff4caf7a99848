"""A tensor without data: it records operators, and applies them to the part that is read.

Before: experts = torch.stack([Lazy(file) for file in files]).transpose(1, 2)
After:  experts.source.read(((0, 8), (0, 64), (0, 32))) reads only that box, from each file its part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.checkpoint.files.checksums import EARLIER
from autotp.errors import Error
from autotp.integrations.transformers.files.tensor_sources import (
    Cast,
    Computed,
    Joined,
    Narrowed,
    Permuted,
    Source,
    Squeezed,
    blocks_of_box,
    cut,
    read_whole,
    whole_box,
)

aten = torch.ops.aten


class Lazy(Tensor):
    """A tensor with the shape and dtype of its `source`, without memory; its `device` is the CPU.

    Operators are recorded: a view or a concatenation as the operation on a part, any other operator as `Computed`. Only
    `torch.equal` reads the source.
    """

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> Lazy:
        made: Lazy = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=torch.device("cpu"))
        return made

    def __init__(self, source: Source) -> None:
        self.source = source

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Lazy({list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default:
            return _equal(*args)
        sources = RECORDED_VIEWS[func](*args, **kwargs) if func in RECORDED_VIEWS else None
        return _computed(func, args, kwargs) if sources is None else pytree.tree_map(Lazy, sources)


def _same(x: Lazy, *_: Any, **__: Any) -> Source:
    return x.source


def _cast(x: Lazy, dtype: torch.dtype | None = None, **_: Any) -> Source:
    if dtype is not None and dtype.is_floating_point != x.dtype.is_floating_point:
        problem = f"{source_text(x.source)} is {x.dtype}, and {dtype} in the model: its header is another tensor's"
        raise Error(problem, fix=EARLIER)
    return x.source if dtype in (None, x.dtype) else Cast(x.source, dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Source | None:
    sources = tuple(x.source for x in tensors if isinstance(x, Lazy))
    # Beside a tensor with data, or in another dtype, it is computed as a whole.
    if len(sources) < len(tensors) or len({(x.dtype, x.dim()) for x in tensors}) > 1:
        return None
    dim %= tensors[0].dim()
    lengths = [(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors]
    mismatch = next((i for i, n in enumerate(lengths) if n != lengths[0]), None)
    if mismatch is not None:
        problem = f"{source_text(sources[0])} and {source_text(sources[mismatch])} cannot be joined"
        raise Error(problem, fix=EARLIER)
    return Joined(sources, dim)


def source_text(source: Source) -> str:
    """Returns, as text, the first stored tensor that a source reads, and its shape."""
    match source:
        case Joined(parts=(first, *_)):
            return source_text(first)
        case Narrowed(of=of) | Permuted(of=of) | Squeezed(of=of) | Cast(of=of):
            return source_text(of)
    return f"{source} of {list(source.shape)}"


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Source | None:
    return _cat([x.unsqueeze(dim) for x in tensors], dim % (tensors[0].dim() + 1))


def _split(x: Lazy, size: int, dim: int = 0) -> list[Source]:
    length = x.shape[dim]
    return _split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)] or [0], dim)


def _split_with_sizes(x: Lazy, sizes: Sequence[int], dim: int = 0) -> list[Source]:
    return [Narrowed(x.source, dim % x.dim(), sum(sizes[:i]), n) for i, n in enumerate(sizes)]


def _slice(x: Lazy, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Source | None:
    a, b, _ = slice(start, stop).indices(x.shape[dim])
    return Narrowed(x.source, dim % x.dim(), a, max(b - a, 0)) if step == 1 else None


def _select(x: Lazy, dim: int, index: int) -> Source:
    dim, start = dim % x.dim(), index % x.shape[dim]
    return Squeezed(Narrowed(x.source, dim, start, 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


def _unbind(x: Lazy, dim: int = 0) -> list[Source]:
    return [_select(x, dim, i) for i in range(x.shape[dim])]


def _permute(x: Lazy, dims: Sequence[int]) -> Source:
    return Permuted(x.source, tuple(d % x.dim() for d in dims))


def _transpose(x: Lazy, a: int = 0, b: int = 1) -> Source:
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return Permuted(x.source, tuple(dims))


def _squeeze(x: Lazy, dim: int | Sequence[int] | None = None) -> Source:
    raw_dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = {d % x.dim() for d in raw_dims}
    return Squeezed(x.source, tuple(n for d, n in enumerate(x.shape) if n != 1 or d not in dims))


def _unsqueeze(x: Lazy, dim: int) -> Source:
    dim %= x.dim() + 1
    return Squeezed(x.source, (*x.shape[:dim], 1, *x.shape[dim:]))


def _view(x: Lazy, shape: Sequence[int]) -> Source | None:
    known_numel = -math.prod(shape)  # One size of -1 makes the product negative.
    sizes = tuple(x.numel() // known_numel if n == -1 else n for n in shape)
    only_ones = [n for n in sizes if n != 1] == [n for n in x.shape if n != 1]
    return Squeezed(x.source, sizes) if only_ones else None


RECORDED_VIEWS: dict[Any, Callable[..., Source | list[Source] | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.lift_fresh.default: _same,
    aten._to_copy.default: _cast,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
"""Operator -> the source of its output; None if a part of the output needs the whole input, as a slice with a step."""


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the outputs as lazy tensors, with the shapes that the operator returns on meta."""
    if func._schema.is_mutable:
        raise Error(f"{func} writes into a tensor that is only read", fix="clone it first")
    # An operator that is told a device would make its output there, with memory.
    on_meta = {"device": torch.device("meta")} if "device" in kwargs else {}
    empty = pytree.tree_map_only(Tensor, _empty, (args, {**kwargs, **on_meta}))
    outputs_on_meta, spec = pytree.tree_flatten(func(*empty[0], **empty[1]))
    outputs = [
        Lazy(Computed(partial(_output, func, args, kwargs, i), tuple(x.shape), x.dtype))
        for i, x in enumerate(outputs_on_meta)
    ]
    return pytree.tree_unflatten(outputs, spec)


def _output(func: Any, args: Any, kwargs: Any, index: int) -> Tensor:
    """Computes one output from whole operands, which are contiguous, as they were when torch chose `func`."""
    args, kwargs = pytree.tree_map_only(Lazy, lambda x: read_whole(x.source).contiguous(), (args, kwargs))
    output: Tensor = pytree.tree_leaves(func(*args, **kwargs))[index]
    return output


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Returns the result of `torch.equal`, block by block."""
    if a.shape != b.shape:
        return False
    reads = [x.source.read if isinstance(x, Lazy) else partial(cut, x) for x in (a, b)]
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    return all(torch.equal(*(read(block) for read in reads)) for block in blocks_of_box(whole_box(a.shape), itemsize))
