"""Conjugates of several parameters at once: one collective sums all their gradients.

`together` is `copy` or `share` of each parameter (`autotp/ops/collectives.py`); its backward waits for all gradients.

NOTE [A gradient that some ranks lack] torch may leave out a gradient where a rank has nothing to compute, for example
no position of a sequence. The ranks send the gradients of a block in one piece of memory, so each rank must send the
same number of bytes. A rank sends zeros for a gradient that it lacks. These zeros are negative: IEEE 754 sums negative
zeros to a negative zero, and any other sum to something else. So ranks see without another message whether all of them
lack a gradient, as in a backward of a part of the graph. Then there is none here either, as on one device. (Where a
rank lacks a gradient that is -0.0 everywhere on the others, this rank has none, and the others have zeros.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.groups.process_group import seat
from autotp.ops.collectives import communicate_all, copy, share
from autotp.ops.eager_mode import is_plain

Where = tuple[int, tuple[tuple[int, int], ...]] | None
"""A dimension and the ranges of its positions that all ranks of the group hold; None for all positions."""


def together(xs: Sequence[Tensor], group: str | None, where: Sequence[Where]) -> tuple[Tensor, ...]:
    """Returns the tensors unchanged; backward sums their gradients, at these positions, over the group. xs: [...] each

    In compiled code each tensor has a separate collective: Dynamo does not support Functions of any number of tensors.
    """
    if group is None or seat(group)[1] == 1:
        return tuple(xs)
    if torch.compiler.is_compiling():
        pairs = zip(xs, where, strict=True)
        return tuple(copy(x, group) if at is None else share(x, group, *at) for x, at in pairs)
    learns = [not is_plain(x) or x.requires_grad for x in xs]
    places = tuple(at for at, learnt in zip(where, learns, strict=True) if learnt)
    given = [x for x, learnt in zip(xs, learns, strict=True) if learnt]
    found = iter(Together.apply(False, group, places, *given) if given else ())
    return tuple(next(found) if learnt else x for x, learnt in zip(xs, learns, strict=True))


class Together(torch.autograd.Function):
    """The identity, or with `summed` the sum over the group; each is the backward of the other."""

    @staticmethod
    def forward(summed: bool, group: str, where: tuple[Where, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        return _sum(group, where, xs) if summed else tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.summed, ctx.group, ctx.where = inputs[:3]
        ctx.like = [(x.shape, {"dtype": x.dtype, "device": x.device}) for x in inputs[3:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        sent = [_nothing(like) if grad is None else grad for like, grad in zip(ctx.like, grads, strict=True)]
        found = Together.apply(not ctx.summed, ctx.group, ctx.where, *sent)
        pairs = zip(grads, found, strict=True)
        return None, None, None, *(None if grad is None and _is_nothing(x) else x for grad, x in pairs)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = Together.apply(ctx.summed, ctx.group, ctx.where, *tangents)
        return found

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[Any, ...], summed: bool, group: str, where: tuple[Where, ...], *xs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        mapped = in_dims[3:]
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, mapped, strict=True)]
        behind = zip(where, mapped, strict=True)
        places = tuple(at if at is None or d is None else (at[0] + 1, at[1]) for at, d in behind)
        return Together.apply(summed, group, places, *moved), tuple(None if d is None else 0 for d in mapped)


def _sum(group: str, where: Sequence[Where], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors, with these positions summed over the group."""
    index = [None if _is_all(x, at) else _index(x, at) for x, at in zip(xs, where, strict=True)]
    sent = [x if i is None else x.index_select(i[0], i[1]) for x, i in zip(xs, index, strict=True)]
    found = communicate_all(sent, group)
    return tuple(y if i is None else x.index_copy(*i, y) for x, i, y in zip(xs, index, found, strict=True))


def _nothing(like: tuple[torch.Size, dict[str, Any]]) -> Tensor:
    """Returns what a rank sends for a gradient that it lacks: see NOTE [A gradient that some ranks lack]."""
    return torch.full(like[0], -0.0, **like[1])


def _is_nothing(x: Tensor) -> bool:
    """Says whether all ranks sent `_nothing`; not known, and False, in a transform of torch.func."""
    if not is_plain(x):
        return False
    x = torch.view_as_real(x) if x.is_complex() else x
    return bool((x.signbit() & (x == 0)).all())


def _is_all(x: Tensor, at: Where) -> bool:
    return at is None or at[1] == ((0, x.shape[at[0]]),)


def _index(x: Tensor, at: Where) -> tuple[int, Tensor]:
    assert at is not None
    dim, ranges = at
    return dim, torch.tensor([i for a, b in ranges for i in range(a, b)], device=x.device, dtype=torch.int64)
