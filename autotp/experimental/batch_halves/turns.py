"""Collectives in two steps, so that other work runs between the start of a sum and its end.

In forward `start_reduce` starts a sum, and `finish` waits for it. In backward `start_copy` starts the sum of a
gradient, and `wait_in_backward`, which stands before it in forward, waits for it. `start_rows` starts in both: it sends
rows to the ranks of their experts, and in backward their gradients the other way. In compiled code and under transforms
of torch.func the first of each pair does both steps.

NOTE [When backward waits]
Autograd runs, of the operators that are ready, the one that was recorded last. It would run a wait at once, before the
backward of work that was recorded earlier and could run meanwhile. So `wait_in_backward` takes the place in this order
of its `anchor`, the first operator of that work: then it runs after all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autotp.groups.one_thread import in_collective
from autotp.groups.process_group import seat
from autotp.ops.coalesced import forget_running, running_sums
from autotp.ops.collectives import copy, in_memory, reduce, send_rows
from autotp.ops.eager_mode import apply_plain, is_kept, is_plain, no_transform, waits_now
from autotp.ops.experts.exchange import rows_by_rank
from autotp.passes.emit.kept_values.kept_call import recomputations


def start_reduce(x: Tensor, group: str | None, op: str = "sum", outside: bool = False, fresh: bool = False) -> Tensor:
    """Starts `reduce`: returns a tensor that only `finish` may read. x: [...]

    Args:
        outside: whether another block has the `finish`; where a block is recomputed, nothing is started for it.
    """
    if _waits_at_once(x, group):
        return reduce(x, group, op, fresh)
    if outside and recomputations:
        return x
    if op == "max":
        return start(x.detach(), group, op)
    started: Tensor = apply_plain(StartedReduce, x, group, fresh)
    return started


def start_rows(x: Tensor, group: str | None, table: Tensor, back: bool, outside: bool = False) -> Tensor:
    """Starts to send rows to the ranks of their experts, or back: returns a tensor that only `finish` may read.

    If `x` is a result of `wait_in_backward`, its backward starts to send the gradients the other way.

    Args:
        x: [rows ...] in the order in which they go: the first ones to the first rank.
        table: [2 ranks experts] from `exchange_counts`.
        back: whether rows go back from their experts.
        outside: as for `start_reduce`.

    Returns:
        [received rows ...]
    """
    sent, received = rows_by_rank(table)[:: -1 if back else 1]
    if _waits_at_once(x, group):
        return send_rows(x, group, sent, received)
    if outside and recomputations:
        return x.new_empty((sum(received), *x.shape[1:]))
    started: Tensor = apply_plain(StartedRows, x, group, sent, received, is_awaited(x))
    return started


def finish(x: Tensor, group: str | None) -> Tensor:
    """Returns what `start_reduce` or `start_rows` started. x: [...]"""
    if torch.compiler.is_compiling() and group is not None and seat(group)[1] > 1:
        awaited: Tensor = Finished.apply(x, group)  # Code that is not compiled may have started the sum.
        return awaited
    if _waits_at_once(x, group):
        return x
    if not x.requires_grad:
        return wait(x, group)
    finished: Tensor = apply_plain(Finished, x, group)
    return finished


def start_copy(x: Tensor, group: str | None, fresh: bool = False) -> Tensor:
    """Returns `copy(x)`, whose backward starts a sum that only `wait_in_backward` may read. x: [...]"""
    if _waits_at_once(x, group) or not is_awaited(x):
        return copy(x, group, fresh)
    copied: Tensor = apply_plain(StartedCopy, x, group, fresh)
    return copied


def wait_in_backward(x: Tensor, group: str | None, anchor: Tensor) -> Tensor:
    """Returns `x`; its backward waits for the sum of the gradient, after the backward of `anchor`'s turn. x: [...]

    Args:
        anchor: NOTE [When backward waits].
    """
    if _waits_at_once(x, group) or not x.requires_grad or (before := anchor.grad_fn) is None:
        return x
    # autograd's number of an operator, counted up as operators are recorded.
    waiting: Tensor = apply_plain(WaitInBackward, x, group, before._sequence_nr())
    return waiting


def _waits_at_once(x: Tensor, group: str | None) -> bool:
    return group is None or not no_transform(x) or seat(group)[1] == 1


def is_awaited(x: Tensor) -> bool:
    """True for a result of `wait_in_backward`: the sum of its gradient may be running when it is handed back."""
    return isinstance(x.grad_fn, WaitInBackward._backward_cls)


def start(x: Tensor, group: str | None, op: str = "sum", fresh: bool = False) -> Tensor:
    """Starts an all-reduce; returns the tensor of its result, which is not there yet."""
    x = in_memory(x)
    name = "all_reduce_" if fresh and x.is_contiguous() and not is_kept(x) else "all_reduce"
    return _started(name, x, group, op)


def start_sending(x: Tensor, group: str, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Starts to send rows; returns the tensor of the rows of all ranks, which are not there yet."""
    rows = in_memory(x).contiguous()
    row = math.prod(rows.shape[1:])
    numbers = [n * row for n in received], [n * row for n in sent]
    return _started("all_to_all_single", rows.view(-1), group, *numbers).view(sum(received), *rows.shape[1:])


def _started(name: str, x: Tensor, group: str | None, *where: Any) -> Tensor:
    with in_collective(name, str(group)):
        started = _sent(name, x, *where, group)
    if recomputations:
        # The block may end before its `finish`.
        recomputations[-1].callback(wait, started, group)
    return started


def start_in_backward(x: Tensor, group: str | None, fresh: bool = False) -> Tensor:
    """Starts the sum of a gradient for `wait_in_backward`. If that does not run, the end of backward waits.

    It does not run in a backward for some parameters only: `torch.autograd.grad(loss, last_layer.weight)`.
    """
    return _awaited(lambda: start(x, group, fresh=fresh), group)


def _awaited(begin: Callable[[], Tensor], group: str | None) -> Tensor:
    """Returns what is started for `wait_in_backward`, or for the end of backward."""
    running = running_sums()
    started = begin()
    running[_memory(started)] = lambda: wait(started, group)
    return started


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def wait(x: Tensor, group: str | None) -> Tensor:
    """Waits until a running collective has made `x`, and returns it."""
    if torch.compiler.is_compiling():
        return _received(x)
    with in_collective("a collective", str(group)):
        return _received(x)


def _sent(name: str, x: Tensor, *where: Any) -> Tensor:
    started: Tensor = getattr(torch.ops._c10d_functional, name)(x, *where)
    return started


def _received(x: Tensor) -> Tensor:
    received: Tensor = torch.ops._c10d_functional.wait_tensor(x)  # It returns at once if nothing runs for `x`.
    return received


class StartedReduce(torch.autograd.Function):
    """The start of an all-reduce; its backward is `copy`."""

    @staticmethod
    def forward(x: Tensor, group: str, fresh: bool) -> Tensor:
        return start(x, group, "sum", fresh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.group = inputs[1]
        ctx.wait_for_value = partial(wait, group=ctx.group)  # `arrived` in `kept_call.py` calls it.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # `copy` changes no number; only a second derivative needs the sum in its backward.
        return (copy(grad, ctx.group) if torch.is_grad_enabled() else grad), None, None


class StartedRows(torch.autograd.Function):
    """The start of an exchange of rows; its backward starts that of their gradients, if a `WaitInBackward` waits."""

    @staticmethod
    def forward(x: Tensor, group: str, sent: Sequence[int], received: Sequence[int], awaited: bool) -> Tensor:
        return start_sending(x, group, sent, received)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.group, ctx.sent, ctx.received, ctx.awaited = inputs[1:]
        ctx.wait_for_value = partial(wait, group=ctx.group)  # `arrived` in `kept_call.py` calls it.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        where = ctx.group, ctx.received, ctx.sent
        if not ctx.awaited or waits_now() or not is_plain(grad):
            return send_rows(grad, *where), None, None, None, None
        return _awaited(lambda: start_sending(grad, *where), ctx.group), None, None, None, None


class Finished(torch.autograd.Function):
    """The end of a collective; its backward is the identity."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return wait(x, group).view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class StartedCopy(torch.autograd.Function):
    """The identity, whose backward starts an all-reduce."""

    @staticmethod
    def forward(x: Tensor, group: str, fresh: bool) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.group, ctx.fresh = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if waits_now() or not is_plain(grad):
            return reduce(grad, ctx.group), None, None
        return start_in_backward(grad, ctx.group, ctx.fresh), None, None


class WaitInBackward(torch.autograd.Function):
    """The identity, whose backward waits for a running all-reduce."""

    @staticmethod
    def forward(x: Tensor, group: str, number: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.group = inputs[1]
        ctx._set_sequence_nr(inputs[2])
        ctx.start_gradient = start_in_backward  # NOTE [Who takes a gradient] in `async_linear.py`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if waits_now() or not is_plain(grad):
            return grad, None, None
        forget_running(_memory(grad))
        return wait(grad, ctx.group), None, None
