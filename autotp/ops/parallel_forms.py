"""Operators in their parallel form: what a rank computes of a lookup, a maximum, a dropout on cut values.

Plain functions on plain tensors, the targets of calls in lowered graphs. Each has its rule in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.eager_mode import is_last_backward, is_plain
from autotp.ops.strides import memory_order


def embedding(weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int = -1) -> Tensor:
    """This rank's summand of a lookup: its own rows, zero elsewhere (Megatron-LM, Shoeybi et al. 2019, section 3).

    Args:
        weight: [rows hidden], rows `start` to `start + rows` of the table, which has `size`.
        indices: [*] global row numbers.

    Returns:
        [* hidden]; the sum over ranks is the lookup.
    """
    rows = weight.shape[0]
    _expect_within(indices, size)
    if rows == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    local, outside = _own(indices, start, rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    found = F.embedding(local, weight, padding)
    return found.masked_fill(outside.unsqueeze(-1), 0)


def gather(x: Tensor, dim: int, index: Tensor, start: int, size: int) -> Tensor:
    """This rank's summand of `torch.gather`: the elements it has, zero elsewhere.

    Args:
        x: positions `start` onwards of the whole, which has `size`, along `dim`.
        index: positions in the whole.
    """
    length = x.shape[dim]
    _expect_within(index, size)
    if length == 0:
        return x.new_zeros(index.shape) + x.sum()
    local, outside = _own(index, start, length)
    return torch.gather(x, dim, local).masked_fill(outside, 0)


def apart(x: Tensor) -> Tensor:
    """`x`, on axes of its own: see `passes/plan/decouple.py`. x: [...]"""
    return x.view_as(x)


Ranges = tuple[tuple[int, int], ...]


def take(x: Tensor, dim: int, pieces: tuple[Ranges, ...], rank: int) -> Tensor:
    """What a rank has of a value that all have: its positions along `dim`. x: [... n ...] -> [... m ...]"""
    return _at(x, dim, pieces[rank])


def _at(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def place(x: Tensor, dim: int, ranges: Ranges, places: Ranges, size: int) -> Tensor:
    """A summand of the whole: the positions `ranges` of a rank's part at `places`, zero elsewhere.

    Args:
        x: a rank's part, [... m ...].
        ranges: of what several ranks have, the first of them alone gives it.

    Returns:
        [... size ...]
    """
    index = [i for start, stop in places for i in range(start, stop)]
    whole = x.new_zeros([size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    return whole.index_copy(dim, torch.tensor(index, dtype=torch.int64, device=x.device), _at(x, dim, ranges))


def first(x: Tensor, dim: int, ranges: Ranges | None) -> Tensor:
    """`x`, of which a gradient reaches these positions alone (None: all): several ranks have it, and it counts once.

    Where it reaches none it is zero, and not absent: backward goes the same way on all ranks, and meets there.
    """
    if ranges is None or not (x.is_floating_point() or x.is_complex()):
        return x
    if not ranges:
        return x.detach() + x.flatten()[:0].sum()
    pieces, at = [], 0
    for start, stop in ranges:
        pieces += [x.narrow(dim, at, start - at).detach(), x.narrow(dim, start, stop - start)]
        at = stop
    return torch.cat([*pieces, x.narrow(dim, at, x.shape[dim] - at).detach()], dim)


def peak(x: Tensor, dim: int) -> Tensor:
    """The maximum along `dim`, kept as one element, without a gradient; the lowest number where there is none."""
    x = x.detach()
    if x.shape[dim] == 0:
        shape = [1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        return x.new_full(shape, torch.finfo(x.dtype).min)
    return x.amax(dim, keepdim=True)


def class_terms(
    x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool = False
) -> Tensor:
    """This rank's summands of what cross-entropy needs of each row, in one tensor and so in one reduction.

    For backward only the exponentials are kept; in a last backward their memory becomes the gradient's. The gradient of
    `top` is left out: a loss does not depend on it.

    Args:
        x: [* v *] logits of the classes `start` to `start + v`, along `dim`.
        top: [* 1 *] the maximum over the classes of all ranks.
        classes: [* *] a class for each row, counted over all ranks, which have `size` together.
        fresh: nobody else reads `x` (`passes/emit/in_place.py`): the exponentials may take its memory.

    Returns:
        [2 * *] the sum of `exp(x - top)`, and `x - top` at the class, 0 where another rank has it.
    """
    if is_plain(x):
        return _ClassTerms.apply(x, top, classes, dim, start, size, fresh and x.dtype == top.dtype)[0]
    z = x - top
    return torch.stack([z.exp().sum(dim), gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)])


class _ClassTerms(torch.autograd.Function):
    """The terms, and the exponentials: as an output, what backward computes of them can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool
    ) -> tuple[Tensor, Tensor]:
        z = x.detach().sub_(top) if fresh else x - top
        picked = gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)
        exponentials = z.exp_()
        ctx.dim, ctx.start, ctx.dtype = dim, start, x.dtype
        ctx.save_for_backward(exponentials, classes)
        ctx.set_materialize_grads(False)
        return torch.stack([exponentials.sum(dim), picked]), exponentials

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, again: Tensor | None) -> tuple[Tensor | None, ...]:
        exponentials, classes = ctx.saved_tensors
        dim, length = ctx.dim, exponentials.shape[ctx.dim]
        if grad is None:
            found = None if again is None else (exponentials * again).to(ctx.dtype)
            return found, *[None] * 6
        total, picked = (g.unsqueeze(dim) for g in grad.unbind())
        at, outside = _own(classes.unsqueeze(dim), ctx.start, length)
        picked = picked.masked_fill(outside, 0)
        if again is None and is_plain(grad) and is_last_backward():
            found = exponentials.detach().mul_(total)
            found = found.scatter_add_(dim, at, picked) if length else found
        else:
            found = exponentials * (total if again is None else total + again)
            found = found.scatter_add(dim, at, picked) if length else found
        return found.to(ctx.dtype), *[None] * 6


def _expect_within(index: Tensor, size: int) -> None:
    """Fails as a lookup on one device does: what no rank has would pass for what another rank has."""
    if is_plain(index):
        torch._assert_async(
            ((index >= 0) & (index < size)).all(), f"an index is out of range: not from 0 to {size - 1}"
        )


def _own(index: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions of the whole as positions of this rank's part, 0 for those outside; and which are outside."""
    local = index - start
    outside = (local < 0) | (local >= length)
    return local.masked_fill(outside, 0), outside


def exact_dropout(x: Tensor, p: float, shape: Sequence[int], dim: int, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Dropout with the mask one device would draw: drawn for the global shape, of which this rank keeps its part.

    Args:
        x: this rank's part.
        shape: the global shape; dimensions that the cut lies inside of may be opened (`heads 64` for `heads*64`).
        dim: the dimension of `shape` that is cut.
        pieces: this rank's (start, stop) ranges of it.
    """
    opened = len(shape) - x.dim()  # 0, or 2: then `dim` is the middle one of three that are one dimension of `x`.
    at = dim - opened // 2
    places = [[d + opened * (d > at) + i for i in range(1 + opened * (d == at))] for d in range(x.dim())]
    order = [place for d in memory_order(x) for place in places[d]]
    ones = torch.ones([shape[d] for d in order], dtype=x.dtype, device=x.device)
    noise = F.dropout(ones, p, True).permute([order.index(d) for d in range(len(order))])
    parts = [noise.narrow(dim, a, b - a) for a, b in pieces] or [noise.narrow(dim, 0, 0)]
    return x * torch.cat(parts, dim).reshape(x.shape)


def fast_dropout(x: Tensor, p: float, rank: int) -> Tensor:
    """Dropout with a mask of this rank's own, of its part alone.

    Every rank draws one number from the CPU's generator, the same on all: however much a rank needs, all draw as much
    from the shared stream, so that replicated masks stay equal.
    """
    return x * keep(x.detach(), p, torch.randint(2**62, ()), rank) * (1 / (1 - p) if p < 1 else 0.0)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None,
    grouped: bool, shape: Sequence[int], dim: int, pieces: Sequence[tuple[int, int]],
) -> Tensor:  # fmt: skip
    """Attention whose dropped weights are those one device drops; `shape` is that of all heads' weights."""
    weights, value = _weights(query, key, value, mask, causal, scale, grouped)
    return exact_dropout(weights, p, shape, dim, pieces) @ value


def fast_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None,
    grouped: bool, rank: int,
) -> Tensor:  # fmt: skip
    """Attention with dropout on this rank's heads alone, the mask its own."""
    weights, value = _weights(query, key, value, mask, causal, scale, grouped)
    return fast_dropout(weights, p, rank) @ value


def _weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) of this rank's heads, and the values one for each head."""
    if grouped and key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.ops.aten._safe_softmax.default(scores, -1), value


@torch.library.custom_op("autotp::keep", mutates_args=())
def keep(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    """A mask like `x`, true with probability `1 - p`, from a stream of this rank's own: of `seed` plus the rank.

    Args:
        x: its sizes, strides and device count.
        seed: a number on the CPU.
    """
    generator = torch.Generator(x.device).manual_seed(int(seed) + rank)
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)


@keep.register_fake
def _(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@keep.register_vmap
def _(info, in_dims, x, p, seed, rank):  # type: ignore[no-untyped-def]
    """With randomness="different" there are as many seeds as samples: the first is enough for all their elements."""
    at, _, seeds, _ = in_dims
    if seeds is None:
        return keep(x.select(at, 0), p, seed, rank), None
    every = x if at is not None else x.expand(info.batch_size, *x.shape)
    return keep(every, p, seed.select(seeds, 0), rank), at or 0
