"""The conjugates: functions that change the placement of a value, each the backward of another.

They are targets of `torch.fx` call_function nodes, and work in eager mode, under `torch.compile(fullgraph=True)`,
`torch.func.grad`, `vmap` and double backward. `group` is the name of a process group; with `None` or a group of one
rank they are the identity. `size` is the global length of dimension `dim`, cut into whole blocks of `block` positions
as `partition.py` says.

NOTE [Why the backward calls the other's apply]
A raw collective in `backward` would be right for first derivatives only: it is not a node of the autograd graph, so a
second derivative would not pass through it, and it has no batching rule, so `vmap(grad(f))` would fail.
`Conjugate.apply` inside `backward` is differentiated, batched and traced like the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from autotp.errors import Error
from autotp.groups.one_thread import in_collective
from autotp.groups.process_group import backend_of, process_group, seat
from autotp.ops.attention.documents import keys_seen, read_documents
from autotp.ops.eager_mode import apply_plain, is_bare, is_kept, is_observed, is_plain
from autotp.ops.placement_moves import chosen, replaced
from autotp.sharding.partition import chunk_bounds, chunk_length, chunk_sizes
from autotp.sharding.placement import JOINED
from autotp.sharding.strides import inverse, laid_out, order_of_dimensions

# No backend supports these dtypes; they are sent as bytes.
_AS_BYTES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2})


def copy(x: Tensor, group: str | None, fresh: bool = False) -> Tensor:
    """Replicate -> Copied: returns `x` itself; backward sums the gradient over the ranks. x: [...]

    With `fresh` backward sums in place: the readers' gradient is a new tensor that no other code holds.
    """
    return _convert("copy", x, group, fresh=fresh)


def reduce(x: Tensor, group: str | None, op: str = "sum", fresh: bool = False) -> Tensor:
    """Partial -> Replicate: returns the sum of the ranks' `x`; backward is the identity. op="max": no gradient.

    With `fresh` the sum overwrites `x`, which no other operator reads (`passes/emit/in_place.py`).
    op="logsumexp" and the others of `JOINED`: see `joined_terms`; their backward is that of this function.
    """
    if op == "max":
        return _convert("max", x.detach(), group)
    if op in JOINED:
        ranks = 1 if group is None else seat(group)[1]
        return x if ranks == 1 else joined_terms(gather(x.unsqueeze(0), group, 0, ranks), op)
    return _convert("reduce", x, group, fresh=fresh)


def joined_terms(parts: Tensor, op: str = "logsumexp") -> Tensor:
    """Returns what the ranks' parts make of the whole: see `Reducer`. parts: [ranks terms ...] -> [terms ...]"""
    # The gradient of a part of minus infinity is 0, also where all parts are so: torch's would be NaN.
    fixed = parts.masked_fill(parts.isneginf(), -torch.inf)
    if op == "logsumexp":
        return fixed.logsumexp(0)
    lse, *other_terms = (fixed[:, i].logsumexp(0) for i in range(parts.shape[1]) if i != 2)
    counts = (fixed[:, 0] - lse).exp() if op == "logsumexp_mean" else torch.ones_like(fixed[:, 0])
    return torch.stack([lse, other_terms[0], (counts * parts[:, 2]).sum(0), *other_terms[1:]])


def scatter(x: Tensor, group: str | None, dim: int, size: int, block: int = 1) -> Tensor:
    """Replicate -> Shard(dim): returns this rank's part of `x`. x: [... size ...] -> [... part ...]"""
    return _convert("scatter", x, group, dim, size, block)


def gather(x: Tensor, group: str | None, dim: int, size: int, block: int = 1) -> Tensor:
    """Shard(dim) -> Replicate: joins the ranks' parts. x: [... part ...] -> [... size ...]"""
    return _convert("gather", x, group, dim, size, block)


def all_gather(x: Tensor, group: str | None, dim: int, size: int, block: int = 1) -> Tensor:
    """Shard(dim) -> Copied: joins the parts; backward also sums over ranks. x: [... part ...] -> [... size ...]"""
    return _convert("all_gather", x, group, dim, size, block)


def share(x: Tensor, group: str | None, dim: int, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """StoredShard -> Shard: returns `x` itself; backward sums positions of `dim` over the ranks that hold them."""
    return _convert("share", x, group, dim, ranges)


def reduce_scatter(x: Tensor, group: str | None, dim: int, size: int, block: int = 1) -> Tensor:
    """Partial -> Shard(dim): returns this rank's part of the sum over ranks. x: [... size ...] -> [... part ...]"""
    return _convert("reduce_scatter", x, group, dim, size, block)


def all_to_all(
    x: Tensor, group: str | None, dim: int, size: int, to_dim: int, to_size: int, block: int = 1, to_block: int = 1
) -> Tensor:
    """Shard(dim) -> Shard(to_dim): joins the parts of `dim` and keeps this rank's part of `to_dim`.

    It is its own conjugate: backward does the same with the dimensions exchanged. x: [... part ... to_size ...] ->
    [... size ... part ...]

    Args:
        to_dim: another dimension, whole on every rank. It becomes the cut one: `to_size` positions in whole blocks of
            `to_block`.
    """
    dims = max(x.dim(), 1)
    return _convert("all_to_all", x, group, dim, (size, block, to_dim % dims - dim % dims, to_size, to_block))


def halo(
    x: Tensor, group: str | None, dim: int, size: int, before: int, ends: Tensor | None = None, chunk: int = 0,
    after: int = 0,
) -> Tensor:  # fmt: skip
    """Shard(dim) -> Halo(dim): puts around this rank's part the positions before and after it that its queries read.

    They are `before` and `after` positions, and none of another document; they may lie on several ranks. Backward adds
    their gradients to those of their owners. x: [... part ...] -> [... halo + part + halo ...]

    Args:
        ends: where packed documents begin and end, [documents + 1]. The host waits for those on a GPU, once in a call.
            In compiled code and in CUDA graphs it cannot: there `before` and `after` say how long the halos are.
        chunk: the length of chunks, of which a query reads its own; 0 for none.
    """
    if group is None or seat(group)[1] == 1:
        return x
    keys = keys_seen(size, seat(group)[1], before, read_documents(ends, size), chunk, after)
    return _convert("halo", x, group, dim, (size, keys))


def send_rows(x: Tensor, group: str | None, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Shard(batch) -> Shard(experts), and back: returns the rows that all ranks send to this one, rank after rank.

    It is its own conjugate: backward sends each row's gradient back. x: [rows ...] -> [received rows ...]

    Args:
        sent: how many rows of `x` go to each rank: the first ones to the first.
        received: how many come from each.
    """
    return _convert("send_rows", x, group, 0, (tuple(sent), tuple(received)))


def _convert(
    name: str, x: Tensor, group: str | None, dim: int = 0, size: Any = 0, block: int = 1, fresh: bool = False
) -> Tensor:
    if group is None or seat(group)[1] == 1:
        return x
    return _apply(name, x, group, dim % max(x.dim(), 1), size, block, fresh)


def _apply(name: str, x: Tensor, group: str, dim: int, size: Any, block: int, fresh: bool = False) -> Tensor:
    if is_plain(x):
        name = f"{name}_" if fresh else name
        if not (x.requires_grad and torch.is_grad_enabled()):  # Autograd would record nothing.
            run = CONJUGATE_TABLE[name][0]
            return x if run is _identity else run(x, group, dim, size, block)
        out: Tensor = apply_plain(LinearConjugate, name, x, group, dim, size, block)
        return out
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._functorch.is_legacy_batchedtensor(x):
        return _apply_to_batch(name, x, group, dim, size, block)
    function = Conjugate if compiling else LinearConjugate
    out = function.apply(name, x, group, dim, size, block)
    return out


def _apply_to_batch(name: str, x: Tensor, group: str, dim: int, size: Any, block: int) -> Tensor:
    """Applies a conjugate to all gradients of a batch at once.

    NOTE [Gradients that torch batches the old way]
    `torch.autograd.grad(..., is_grads_batched=True)` and `jacobian(vectorize=True)` run backward on tensors of an older
    kind. torch runs an operator without a rule for them once for each gradient, and copies what a functional collective
    returns before it has arrived. So no such tensor may reach a collective.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = torch._remove_batch_dim(x, level, 1, 0)
    return torch._add_batch_dim(_apply(name.rstrip("_"), rows, group, dim + 1, size, block), 0, level)


class Conjugate(torch.autograd.Function):
    """The row `name` of `CONJUGATE_TABLE` as an operator whose backward is the row of its conjugate."""

    # No *args: Dynamo counts the parameters.
    @staticmethod
    def forward(name: str, x: Tensor, group: str, dim: int, size: Any, block: int) -> Tensor:
        return CONJUGATE_TABLE[name][0](x, group, dim, size, block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.name, ctx.conjugate, ctx.where = inputs[0], CONJUGATE_TABLE[inputs[0]][1], inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # NOTE [Why the backward calls the other's apply]
        if ctx.conjugate == "copy" and not torch.is_grad_enabled():
            return None, grad, None, None, None, None
        # A gradient that is differentiated again must not be overwritten.
        name = "reduce" if ctx.conjugate == "reduce_" and torch.is_grad_enabled() else ctx.conjugate
        return None, _apply(name, grad, *ctx.where), None, None, None, None

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, ...], name: str, x: Tensor, group: str, dim: int, size: Any, block: int
    ) -> tuple[Tensor, int]:
        return _apply(name, x.movedim(in_dims[1] or 0, 0), group, dim + 1, size, block), 0


class LinearConjugate(Conjugate):
    """The same, with forward-mode derivatives: all conjugates are linear. (Dynamo refuses Functions with a `jvp`.)"""

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *rest: None) -> Tensor:
        if torch._C._functorch.is_legacy_batchedtensor(tangent):
            raise Error("torch.autograd.functional's forward mode, vectorized, of a parallel model", fix=FORWARD_FIX)
        return _apply(ctx.name.rstrip("_"), tangent, *ctx.where)  # A tangent must not be overwritten.


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: str, *_: Any) -> Tensor:
    """Returns the sum, in the memory order of `x`, which a convolution and a dropout mask go on with."""
    total = communicate("all_reduce", x, "sum", group)
    return total if x.is_contiguous() else laid_out(total, order_of_dimensions(x))


def _all_reduce_in_place(x: Tensor, group: str, *_: Any) -> Tensor:
    return communicate("all_reduce_", x, "sum", group) if x.is_contiguous() else _all_reduce(x, group)


def _rows_reduced(x: Tensor, group: str, dim: int, ranges: Any, *_: Any) -> Tensor:
    """Returns `x` with some positions of `dim` summed over ranks."""
    if ranges == ((0, x.shape[dim]),):
        return _all_reduce(x, group)
    sent = chosen(x, dim, ranges).contiguous()
    return replaced(x, dim, ranges, communicate("all_reduce", sent, "sum", group))


def _maximum(x: Tensor, group: str, *_: Any) -> Tensor:
    return communicate("all_reduce", x, "max", group)


def _slice(x: Tensor, group: str, dim: int, size: int, block: int) -> Tensor:
    _expect(x, dim, size, group)
    start, stop = _held(group, size, block)
    return laid_out(x.narrow(dim, start, stop - start), order_of_dimensions(x))


def _all_gather(x: Tensor, group: str, dim: int, size: int, block: int) -> Tensor:
    tp = seat(group)[1]
    if _is_even(x, tp, x.shape[dim], size, block):
        whole = _joined_evenly(communicate("all_gather_into_tensor", x, tp, group), x, dim, size)
    else:
        part = _padded(x, group, dim, size, block)
        joined = communicate("all_gather_into_tensor", _to_send(part, dim), tp, group)
        whole = _put_together(joined, part, tp, dim, size, block, order_of_dimensions(x))
    if torch.compiler.is_compiling() or whole._is_view():  # Writing into a view that a Function returns is an error.
        return torch.ops.aten._unsafe_view(whole, whole.shape)
    return whole


def _is_even(x: Tensor, tp: int, length: int, size: int, block: int) -> bool:
    """True in eager mode if all ranks' parts of a dimension have this length and lie in memory as they are sent."""
    if torch.compiler.is_compiling():
        return False
    even = 0 < length * tp == size and size % (tp * block) == 0
    return even and x.is_contiguous() and x.dtype not in _AS_BYTES


def _joined_evenly(joined: Tensor, part: Tensor, dim: int, size: int) -> Tensor:
    """Does what `_put_together` does, for parts of which `_is_even` is true."""
    shape = part.shape
    if dim == 0:
        return joined
    if _is_outermost(part, dim):
        return joined.view(*shape[:dim], size, *shape[dim + 1 :])
    return torch.cat(joined.chunk(size // shape[dim]), dim)


def _padded(x: Tensor, group: str, dim: int, size: int, block: int) -> Tensor:
    """Returns this rank's part of a dimension, padded to the length of the longest part."""
    start, stop = _held(group, size, block)
    _expect(x, dim, stop - start, group)
    return _pad(x, dim, chunk_length(size // block, seat(group)[1]) * block).contiguous()


def _to_send(part: Tensor, dim: int) -> Tensor:
    """Returns a part as it is sent: ranks' parts are joined along the first dimension of this tensor."""
    rows = part.view(part.shape[dim:]) if dim and _is_outermost(part, dim) else part
    return _in_bytes(rows) if part.dtype in _AS_BYTES else rows


def _in_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, whose last dimension has any stride if it has one position."""
    x = x.resolve_conj().resolve_neg()
    x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def _is_outermost(x: Tensor, dim: int) -> bool:
    """True if joining tensors like `x` along `dim` puts their elements one after another, without a copy."""
    return math.prod(x.shape[:dim]) == 1


def _put_together(
    joined: Tensor, part: Tensor, tp: int, dim: int, size: int, block: int, order: Sequence[int]
) -> Tensor:
    """Joins padded parts along `dim`, from what a gather of `_to_send(part)` gave: -> [... size ...]

    NOTE [What torch finds]
    torch.compile can fuse a gather with the products that read it, and a product with its reduce-scatter. It finds
    them by their form: chunks of one dimension, joined along another, and nothing in between. So both have this form.

    Args:
        order: the dimensions lie in memory in this order.
    """
    joined = joined.view(part.dtype) if part.dtype in _AS_BYTES else joined
    shape, length, memory_dim = part.shape, part.shape[dim], order.index(dim)
    in_order, even = list(order) == list(range(part.dim())), length * tp == size
    if in_order and _is_outermost(part, dim):
        whole = joined.view(*shape[:dim], tp * length, *shape[dim + 1 :])
        return whole if even else whole.narrow(dim, 0, size)
    if in_order and even:
        return torch.cat(joined.chunk(tp), dim)
    laid = joined.view(tp, *shape).permute(0, *(d + 1 for d in order))
    if memory_dim == 0 or even:
        whole = laid.movedim(0, memory_dim).flatten(memory_dim, memory_dim + 1).narrow(memory_dim, 0, size)
    else:
        sizes = chunk_sizes(size // block, tp)
        whole = torch.cat(
            [piece.narrow(memory_dim, 0, n * block) for piece, n in zip(laid.unbind(), sizes, strict=True)], memory_dim
        )
    return whole.contiguous().permute(inverse(order))


def _reduce_scatter(x: Tensor, group: str, dim: int, size: int, block: int) -> Tensor:
    _expect(x, dim, size, group)
    if _is_gloo(group, x.device.type):
        # gloo's reduce-scatter is an all-reduce inside. Sliced here, it needs no padding; the clone frees the rest.
        start, stop = _held(group, size, block)
        whole = communicate("all_reduce", x, "sum", group)
        return laid_out(whole.narrow(dim, start, stop - start).clone(), order_of_dimensions(x))
    tp = seat(group)[1]
    if _is_even(x, tp, size // tp, size, block):
        return _of_rows(
            communicate("reduce_scatter_tensor", _in_even_rows(x, tp, dim), "sum", tp, group), x, dim, size // tp
        )
    start, stop = _held(group, size, block)
    result = communicate("reduce_scatter_tensor", _in_rows(x, tp, dim, size, block), "sum", tp, group)
    return laid_out(_of_rows(result, x, dim, stop - start), order_of_dimensions(x))


def _in_rows(x: Tensor, tp: int, dim: int, size: int, block: int) -> Tensor:
    """Returns the ranks' padded parts of `dim`, joined along the first dimension. NOTE [What torch finds]"""
    whole = _pad(x, dim, chunk_length(size // block, tp) * block * tp)
    if _is_outermost(x, dim):
        return whole.contiguous().view(whole.shape[dim:]) if dim else whole.contiguous()
    return torch.cat(whole.chunk(tp, dim))


def _in_even_rows(x: Tensor, tp: int, dim: int) -> Tensor:
    """Does what `_in_rows` does, for a tensor of which `_is_even` is true."""
    if _is_outermost(x, dim):
        return x.view(x.shape[dim:]) if dim else x
    return torch.cat(x.chunk(tp, dim))


def _of_rows(result: Tensor, x: Tensor, dim: int, length: int) -> Tensor:
    """Returns this rank's part of `dim` without padding, from what a reduce-scatter of `_in_rows(x)` gave."""
    if dim and _is_outermost(x, dim):
        result = result.view(*x.shape[:dim], *result.shape)
    return result if result.shape[dim] == length else result.narrow(dim, 0, length)


Exchange = tuple[int, int, int, int, int]
"""Of an `all_to_all`: size, block, the distance from `dim` to `to_dim`, which a batch keeps, to_size, to_block."""


def _exchange(x: Tensor, group: str, dim: int, where: Exchange, *_: Any) -> Tensor:
    size, block, distance, to_size, to_block = where
    to_dim, (rank, ranks) = dim + distance, seat(group)
    lengths = [n * block for n in chunk_sizes(size // block, ranks)]
    parts = [n * to_block for n in chunk_sizes(to_size // to_block, ranks)]
    _expect(x, dim, lengths[rank], group)
    _expect(x, to_dim, to_size, group)
    # The parts for the ranks lie one after another.
    rows, order = x.movedim(to_dim, 0).contiguous(), order_of_dimensions(x)
    row = math.prod(rows.shape[1:])
    position = parts[rank] * math.prod([n for d, n in enumerate(x.shape) if d not in (dim, to_dim)])
    received = _sent(rows, [n * position for n in lengths], [n * row for n in parts], group)
    pieces = []
    for piece, length in zip(received.split([n * position for n in lengths]), lengths, strict=True):
        shape = [length if d == dim else n for d, n in enumerate(x.shape) if d != to_dim]
        pieces.append(piece.view(parts[rank], *shape).movedim(0, to_dim).permute(order))
    return torch.cat(pieces, order.index(dim)).permute(inverse(order))


def _sent(x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Returns what all ranks sent to this one, [elements]; `received` from each rank, and `sent` to each of `x`."""
    # Neither gloo nor NCCL exchanges complex numbers.
    as_bytes = x.dtype in _AS_BYTES or x.is_complex()
    unit = x.dtype.itemsize if as_bytes else 1
    counts = [n * unit for n in received], [n * unit for n in sent]
    flat = x.reshape(-1)  # Of compiled code the result of `cat` may have other strides.
    arrived = communicate("all_to_all_single", _in_bytes(flat) if as_bytes else flat, *counts, group)
    return arrived.view(x.dtype)


def _exchange_back(x: Tensor, group: str, dim: int, where: Exchange, *_: Any) -> Tensor:
    size, block, distance, to_size, to_block = where
    return _exchange(x, group, dim + distance, (to_size, to_block, -distance, size, block))


Rows = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a `send_rows`: the numbers of rows that go to each rank, and that come from each."""


def _rows_sent(x: Tensor, group: str, dim: int, where: Rows, *_: Any) -> Tensor:
    sent, received = where
    rows = x.movedim(dim, 0).contiguous()
    row = math.prod(rows.shape[1:])
    _expect(x, dim, sum(sent), group)
    arrived = _sent(rows, [n * row for n in received], [n * row for n in sent], group)
    return arrived.view(sum(received), *rows.shape[1:]).movedim(0, dim)


def _rows_sent_back(x: Tensor, group: str, dim: int, where: Rows, *_: Any) -> Tensor:
    return _rows_sent(x, group, dim, (where[1], where[0]))


Reads = tuple[int, tuple[tuple[int, int], ...]]
"""Of a `halo`: size, and the bounds of the positions that each rank reads."""


def _neighbours(where: Reads, group: str) -> tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the bounds of this rank's part, the positions that it reads of each other rank, and that each other rank
    reads of its part.
    """
    (size, keys), (rank, ranks) = where, seat(group)
    bounds = [chunk_bounds(size, ranks, r) for r in range(ranks)]

    def read(reader: int, owner: int) -> tuple[int, int]:
        (start, stop), (first, last) = bounds[owner], keys[reader]
        begin = max(first, start)
        return begin, max(min(last, stop), begin) if reader != owner else begin

    return *bounds[rank], [read(rank, r) for r in range(ranks)], [read(r, rank) for r in range(ranks)]


def _elements(ranges: Sequence[tuple[int, int]], row: int) -> list[int]:
    return [(stop - start) * row for start, stop in ranges]


def _sides(ranges: Sequence[tuple[int, int]], group: str) -> list[int]:
    """Returns the number of positions of the ranks before this one, and of those after it."""
    rank = seat(group)[0]
    return [sum(b - a for a, b in side) for side in (ranges[:rank], ranges[rank:])]


def _with_halo(x: Tensor, group: str, dim: int, where: Reads, *_: Any) -> Tensor:
    start, stop, received, sent = _neighbours(where, group)
    _expect(x, dim, stop - start, group)
    rows, order = x.movedim(dim, 0), order_of_dimensions(x)
    row = math.prod(rows.shape[1:])
    pieces = torch.cat([rows[a - start : b - start] for a, b in sent])
    counts = _elements(received, row), _elements(sent, row)
    side_lengths = _sides(received, group)
    received_rows = _sent(pieces, *counts, group).view(sum(side_lengths), *rows.shape[1:]).movedim(0, dim)
    before, after = (side.permute(order) for side in received_rows.split(side_lengths, dim))
    return torch.cat([before, x.permute(order), after], order.index(dim)).permute(inverse(order))


def _halo_summed(x: Tensor, group: str, dim: int, where: Reads, *_: Any) -> Tensor:
    """Returns this rank's part, to which all ranks have added what they have at its positions."""
    start, stop, sent, received = _neighbours(where, group)
    rows, order = x.movedim(dim, 0).contiguous(), order_of_dimensions(x)
    row, (before, after) = math.prod(rows.shape[1:]), _sides(sent, group)
    _expect(x, dim, before + stop - start + after, group)
    counts = _elements(received, row), _elements(sent, row)
    lengths, end = [b - a for a, b in received], before + stop - start
    pieces = _sent(torch.cat([rows[:before], rows[end:]]), *counts, group).view(sum(lengths), *rows.shape[1:])
    total = rows[before:end].clone()
    for (a, b), piece in zip(received, pieces.split(lengths), strict=True):
        total[a - start : b - start] += piece
    return laid_out(total.movedim(0, dim), order)


FORWARD_FIX = "torch.func.jacfwd, or strategy='reverse-mode'"
BATCH_FIX = "torch.func.vjp and torch.func.vmap, or one call of torch.autograd.grad for each gradient"

# NOTE [What ranks send has the order of the dimensions]
# Ranks agree on the order of a tensor's dimensions, and not on their order in memory: where a rank has one position of
# a dimension, or none, strides do not say where this dimension lies. So what is sent is in the order of the dimensions,
# and only the copy that a rank makes of what it gets is in the order of its operand's memory.

# name: (forward, name of the backward); docs/design.md has the table. No gradient reaches "max".
# Names with an underscore sum in place.
CONJUGATE_TABLE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (_identity, "reduce"),
    "reduce": (_all_reduce, "copy"),
    "copy_": (_identity, "reduce_"),
    "reduce_": (_all_reduce_in_place, "copy"),
    "scatter": (_slice, "gather"),
    "gather": (_all_gather, "scatter"),
    "all_gather": (_all_gather, "reduce_scatter"),
    "reduce_scatter": (_reduce_scatter, "all_gather"),
    "all_to_all": (_exchange, "all_to_all_back"),
    "all_to_all_back": (_exchange_back, "all_to_all"),
    "send_rows": (_rows_sent, "send_rows_back"),
    "send_rows_back": (_rows_sent_back, "send_rows"),
    "halo": (_with_halo, "halo_sum"),
    "halo_sum": (_halo_summed, "halo"),
    "share": (_identity, "share_sum"),
    "share_sum": (_rows_reduced, "share"),
    "max": (_maximum, ""),
}


def communicate(name: str, *args: Any) -> Tensor:
    """Runs c10d's functional collective `name` and waits for its result; the last argument is the group's name.

    Raises:
        Error: a rank died or did not answer within the group's timeout. (Compiled code raises c10d's error.)
    """
    if torch.compiler.is_compiling():
        return _start_compiled(name, args[0].resolve_conj().resolve_neg(), *args[1:])()
    with in_collective(name, args[-1]):
        return _wait(*_launch(name, args))


Started = Callable[[], Tensor]
"""A running collective: a function that waits for the result and returns it."""


def start_gather(x: Tensor, group: str, dim: int, size: int, block: int = 1) -> Started:
    """Starts an `all_gather`, without autograd."""
    tp = seat(group)[1]
    if _is_even(x, tp, x.shape[dim], size, block):
        running = _start("all_gather_into_tensor", x, tp, group)
        return lambda: _joined_evenly(running(), x, dim, size)
    part = _padded(x, group, dim, size, block)
    waits, order = _start("all_gather_into_tensor", _to_send(part, dim), tp, group), list(range(x.dim()))
    return lambda: _put_together(waits(), part, tp, dim, size, block, order)


def start_sum(x: Tensor, group: str, gathered: tuple[int, int, int] | None) -> Started:
    """Starts the sum over ranks of `x`, in place; `gathered` (dim, size, block): only this rank's part of the sum."""
    if gathered is None:
        return _start("all_reduce_", x.contiguous(), "sum", group)
    dim, size, block = gathered
    if _is_gloo(group, x.device.type):
        start, stop = _held(group, size, block)
        waits = _start("all_reduce_", x.contiguous(), "sum", group)
        return lambda: waits().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    tp = seat(group)[1]
    if _is_even(x, tp, size // tp, size, block):
        waits = _start("reduce_scatter_tensor", _in_even_rows(x, tp, dim), "sum", tp, group)
        return lambda: _of_rows(waits(), x, dim, size // tp)
    start, stop = _held(group, size, block)
    waits = _start("reduce_scatter_tensor", _in_rows(x, tp, dim, size, block), "sum", tp, group)
    return lambda: _of_rows(waits(), x, dim, stop - start).contiguous()


def start_reduce_scatter(x: Tensor, group: str) -> Started:
    """Starts the sum over ranks of `x`, of which each rank gets an equal part. x: [elements]"""
    return _start("reduce_scatter_tensor", x, "sum", seat(group)[1], group)


def _start(name: str, *args: Any) -> Started:
    """Starts c10d's functional collective `name`. Starting and waiting raise Error as `communicate` does."""
    if torch.compiler.is_compiling():
        return _start_compiled(name.rstrip("_"), args[0].resolve_conj().resolve_neg(), *args[1:])
    region = in_collective(name, args[-1])
    with region:
        result, work = _launch(name, args)

    def received() -> Tensor:
        with region:
            return _wait(result, work)

    return received


def _start_compiled(name: str, x: Tensor, *rest: Any) -> Started:
    ops = torch.ops._c10d_functional
    started = getattr(ops, name)(x, *rest)
    return lambda: ops.wait_tensor(started)


def _launch(name: str, args: tuple[Any, ...]) -> tuple[Tensor, dist.Work | None]:
    """Starts a collective. Returns the tensor that its result will be in, and its work (None: c10d keeps it)."""
    method, x, rest = _GROUP_METHODS.get(name), args[0], args[1:]
    if method is not None and is_bare(x) and not x.is_complex() and not x.is_neg():
        return method(process_group(rest[-1]), x, *rest[:-1])
    x = in_memory(x)
    if method is None or torch.compiler.is_compiling() or is_observed(x) or x.is_complex():
        name = "all_reduce" if name == "all_reduce_" and is_kept(x) else name  # A broadcast has to be in place.
        return getattr(torch.ops._c10d_functional, name)(x, *rest), None
    return method(process_group(rest[-1]), x, *rest[:-1])


def in_memory(x: Tensor) -> Tensor:
    """Returns `x` with its values in memory: torch keeps that a tensor is conjugate or negative as a bit beside it.

    Raises:
        Error: NOTE [Gradients that torch batches the old way]
    """
    if torch._C._functorch.is_legacy_batchedtensor(x):
        raise Error("is_grads_batched=True through an operator that communicates in its own backward", fix=BATCH_FIX)
    return x.resolve_conj().resolve_neg()


def _wait(result: Tensor, work: dist.Work | None) -> Tensor:
    """Waits for a collective, and returns its result."""
    if work is not None:
        work.wait()
        return result
    received: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return received


# ---- the methods of process groups
# A functional collective and its wait pass torch's dispatcher for Python twice. Where nobody follows operators there,
# the process group's own methods do the same work, and take less than half of the time. With an operation in place of
# options, such a method takes four times as long: its binding first fails to read the operation as options.

_SUMS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _all_reduced_(group: ProcessGroup, x: Tensor, op: str) -> tuple[Tensor, dist.Work]:
    return x, group.allreduce([x], _sum_options(op))


def _all_reduced(group: ProcessGroup, x: Tensor, op: str) -> tuple[Tensor, dist.Work]:
    return _all_reduced_(group, x.clone(memory_format=torch.contiguous_format), op)


def _all_gathered(group: ProcessGroup, x: Tensor, size: int) -> tuple[Tensor, dist.Work]:
    result = x.new_empty((size * x.shape[0], *x.shape[1:]))
    return result, group._allgather_base(result, x.contiguous())


def _reduce_scattered(group: ProcessGroup, x: Tensor, op: str, size: int) -> tuple[Tensor, dist.Work]:
    result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return result, group._reduce_scatter_base(result, x.contiguous(), _scatter_options(op))


@cache
def _sum_options(op: str) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = _SUMS[op]
    return options


@cache
def _scatter_options(op: str) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _SUMS[op]
    return options


_GROUP_METHODS: dict[str, Callable[..., tuple[Tensor, dist.Work]]] = {
    "all_reduce_": _all_reduced_,
    "all_reduce": _all_reduced,
    "all_gather_into_tensor": _all_gathered,
    "reduce_scatter_tensor": _reduce_scattered,
}


def _launch_all(xs: list[Tensor], group: str) -> tuple[list[Tensor], dist.Work | None]:
    """Starts the sums of several tensors. Returns the tensors of their results, and the work (None: c10d keeps it)."""
    if xs and xs[0].device.type == "cuda" and _is_gloo(group, "cuda"):
        return [torch.ops._c10d_functional.all_reduce(x, "sum", group) for x in xs], None
    if not xs or not all(is_bare(x) and not x.is_complex() for x in xs):
        return torch.ops._c10d_functional.all_reduce_coalesced(xs, "sum", group), None
    result = [x.clone(memory_format=torch.contiguous_format) for x in xs]
    return result, process_group(group).allreduce_coalesced(result)


# Where Dynamo does not compile a function, it tries those that this one calls; of a process group it makes an error.
for _function in (_launch, _launch_all, _wait, *_GROUP_METHODS.values()):
    set_code_exec_strategy(_function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def communicate_all(xs: Sequence[Tensor], group: str) -> list[Tensor]:
    """Returns the sums of several tensors over the group, in one collective. Raises Error as `communicate` does."""
    if torch.compiler.is_compiling():
        ops = torch.ops._c10d_functional
        started = ops.all_reduce_coalesced([x.resolve_conj().resolve_neg() for x in xs], "sum", group)
        return [ops.wait_tensor(x) for x in started]
    return start_all(xs, group)()


def start_all(xs: Sequence[Tensor], group: str) -> Callable[[], list[Tensor]]:
    """Starts the sums of several tensors over the group; returns a function that waits for them.

    They are one collective, but for tensors of a GPU over gloo, which sums one of those at a time.
    """
    with in_collective("all_reduce_coalesced", group):
        result, work = _launch_all([in_memory(x) for x in xs], group)

    def received() -> list[Tensor]:
        with in_collective("all_reduce_coalesced", group):
            if work is None:
                return [torch.ops._c10d_functional.wait_tensor(x) for x in result]
            work.wait()
            return result

    return received


def _is_gloo(group: str, device_type: str) -> bool:
    return backend_of(group, device_type) == "gloo"


# Dynamo calls it while it traces. `torch.compiler.assume_constant_result` does this, but imports Dynamo (1 s).
_is_gloo._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _held(group: str, size: int, block: int) -> tuple[int, int]:
    rank, tp = seat(group)
    start, stop = chunk_bounds(size // block, tp, rank)
    return start * block, stop * block


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, length - x.shape[dim]])


def _expect(x: Tensor, dim: int, length: int, group: str) -> None:
    if x.shape[dim] != length:
        rank, size = seat(group)
        raise Error(
            f"dimension {dim} of {list(x.shape)} should have length {length} on rank {rank} of {size}",
            fix="pass the value as the parallel model returned it, with the global size of the cut dimension",
        )
