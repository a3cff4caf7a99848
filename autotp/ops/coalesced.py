"""Conjugates of several parameters at once: one collective sums all their gradients.

`together` is `copy` or `share` of each parameter (`autotp/ops/collectives.py`); its backward waits for all gradients.

NOTE [A gradient that some ranks lack] torch may leave out a gradient where a rank has nothing to compute, for example
no position of a sequence. The ranks send the gradients of a block in one piece of memory, so each rank must send the
same number of bytes. A rank sends zeros for a gradient that it lacks. These zeros are negative: IEEE 754 sums negative
zeros to a negative zero, and any other sum to something else. So ranks see without another message whether all of them
lack a gradient, as in a backward of a part of the graph. Then there is none here either, as on one device. (Where a
rank lacks a gradient that is -0.0 everywhere on the others, this rank has none, and the others have zeros.)

NOTE [A sum that is waited for later] Backward has two nodes for a late sum: `StartedTogether` starts it, and
`WaitTogether` waits. Of the nodes that are ready, autograd runs the one with the highest number, and each has a higher
number than those recorded before it. The `WaitTogether` of a sum has a number just below the `StartedTogether`
of the sum before it in forward: it waits once that one has started, after the backward of all work between the two. For
the first sum of a graph it is the number of the graph's beginning. So what was recorded before the graph runs after all
waits, for example the end of a unit of `fully_shard` around the model, which reads gradients. A unit that is one block
reads them when the block's backward ends: its sums are waited for at once (`sums_at_once`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autotp.groups.process_group import seat
from autotp.ops.collectives import communicate_all, copy, share, start_all
from autotp.ops.eager_mode import apply_plain, is_plain, no_transform, waits_now
from autotp.ops.placement_moves import chosen, replaced

Where = tuple[int, tuple[tuple[int, int], ...]] | None
"""A dimension and the ranges of its positions that all ranks of the group hold; None for all positions."""


def together(xs: Sequence[Tensor], group: str | None, where: Sequence[Where], late: bool = False) -> tuple[Tensor, ...]:
    """Returns the tensors unchanged; backward sums their gradients, at these positions, over the group. xs: [...] each

    In compiled code each tensor has a separate collective: Dynamo does not support Functions of any number of tensors.

    Args:
        late: whether backward may go on while the sum runs.
    """
    if group is None or seat(group)[1] == 1:
        return tuple(xs)
    if torch.compiler.is_compiling():
        pairs = zip(xs, where, strict=True)
        return tuple(copy(x, group) if place is None else share(x, group, *place) for x, place in pairs)
    # A frozen parameter has no gradient to sum. In a transform this is not known, so each tensor counts.
    learns = [x.requires_grad or not is_plain(x) for x in xs]
    places = tuple(place for place, learnt in zip(where, learns, strict=True) if learnt)
    operands = [x for x, learnt in zip(xs, learns, strict=True) if learnt]
    goes_on = late and not _at_once and torch.is_grad_enabled() and no_transform(*operands)
    apply = _late if goes_on else Together.apply
    outputs = iter(apply(False, group, places, *operands) if operands else ())
    return tuple(next(outputs) if learnt else x for x, learnt in zip(xs, learns, strict=True))


def begin_sums() -> None:
    """Stands at the beginning of a graph with late sums: NOTE [A sum that is waited for later]."""
    global _before
    if not torch.compiler.is_compiling():
        _before = torch.autograd._get_sequence_nr()


_before = 0
"""The number that the next sum's `WaitTogether` gets."""
_at_once: list[None] = []
"""An entry for each region of `sums_at_once`."""


@contextmanager
def sums_at_once() -> Iterator[None]:
    """A region whose sums are waited for at once in backward."""
    _at_once.append(None)
    try:
        yield
    finally:
        _at_once.pop()


def _late(_: bool, group: str, where: tuple[Where, ...], *xs: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors unchanged; backward waits late for the sum of their gradients."""
    global _before
    running, number = _Running(), torch.autograd._get_sequence_nr()
    read = apply_plain(WaitTogether, running, _before, *xs)
    outputs: tuple[Tensor, ...] = apply_plain(StartedTogether, running, group, where, *read)
    _before = number
    return outputs


Waits = dict[Any, Callable[[], Any]]
"""Running sums, by any key: functions that wait for them. They may be called several times."""


def running_sums() -> Waits:
    """Returns the running sums of this backward; the end of backward waits for those that are left there."""
    run = torch._C._current_graph_task_id()
    if run not in _waits_of_run:
        wait_for_the_rest()  # of a backward that ended in an error
        _waits_of_run[run] = {}
        torch.autograd.Variable._execution_engine.queue_callback(wait_for_the_rest)
    return _waits_of_run[run]


def wait_for_the_rest() -> None:
    """Waits for the sums of gradients that nothing has waited for."""
    while _waits_of_run:
        _, sums = _waits_of_run.popitem()
        for wait_for in sums.values():
            wait_for()


def forget_running(key: Any) -> None:
    """Takes a sum that was waited for off the running sums."""
    for sums in _waits_of_run.values():
        sums.pop(key, None)


_waits_of_run: dict[int, Waits] = {}
"""Run of a backward -> its running sums."""


class _Running:
    """The sums that `StartedTogether` has started, and `WaitTogether` waits for, each in the same run of backward.

    Attributes:
        waits: run of backward -> a function that waits for the sum. (A backward may run inside of another.)
    """

    def __init__(self) -> None:
        self.waits: dict[int, Callable[[], tuple[Tensor | None, ...]]] = {}


class WaitTogether(torch.autograd.Function):
    """The identity, whose backward waits for the sum that `StartedTogether` has started."""

    @staticmethod
    def forward(running: _Running, number: int, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.running = inputs[0]
        ctx._set_sequence_nr(inputs[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait = ctx.running.waits.pop(torch._C._current_graph_task_id(), None)
        # Nothing runs: `StartedTogether` has summed at once.
        if wait is None:
            return None, None, *grads
        running_sums().pop(ctx.running, None)
        return None, None, *wait()


class StartedTogether(torch.autograd.Function):
    """The identity, whose backward starts a sum for `WaitTogether`: no other operator may read what it returns."""

    @staticmethod
    def forward(running: _Running, group: str, where: tuple[Where, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.running, ctx.group, ctx.where = inputs[:3]
        ctx.like = _like(inputs[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        sent = _complete(ctx.like, grads)
        if waits_now() or not all(map(is_plain, sent)):
            input_grads = Together.apply(True, ctx.group, ctx.where, *sent)
            return None, None, None, *_without_nothing(grads, input_grads)
        sums = running_sums()
        wait = sums[ctx.running] = _start_sum(ctx.group, ctx.where, sent)
        ctx.running.waits[torch._C._current_graph_task_id()] = lambda: _without_nothing(grads, wait())
        return None, None, None, *sent  # The wait puts the sums in their place.


class Together(torch.autograd.Function):
    """The identity, or with `summed` the sum over the group; each is the backward of the other."""

    @staticmethod
    def forward(summed: bool, group: str, where: tuple[Where, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        return _sum(group, where, xs) if summed else tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.summed, ctx.group, ctx.where = inputs[:3]
        ctx.like = _like(inputs[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        input_grads = Together.apply(not ctx.summed, ctx.group, ctx.where, *_complete(ctx.like, grads))
        return None, None, None, *_without_nothing(grads, input_grads)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = Together.apply(ctx.summed, ctx.group, ctx.where, *_complete(ctx.like, tangents))
        return outputs

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[Any, ...], summed: bool, group: str, where: tuple[Where, ...], *xs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        mapped = in_dims[3:]
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, mapped, strict=True)]
        pairs = zip(where, mapped, strict=True)
        # The mapped dimension is the first one now.
        places = tuple(place if place is None or d is None else (place[0] + 1, place[1]) for place, d in pairs)
        return Together.apply(summed, group, places, *moved), tuple(None if d is None else 0 for d in mapped)


def _sum(group: str, where: Sequence[Where], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors, with these positions summed over the group."""
    places, sent = _chosen(where, xs)
    return _put_back(xs, places, communicate_all(sent, group))


def _start_sum(group: str, where: Sequence[Where], xs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Starts `_sum`; returns a function that waits for it."""
    places, sent = _chosen(where, xs)
    wait = start_all(sent, group)
    return lambda: _put_back(xs, places, wait())


def _chosen(where: Sequence[Where], xs: Sequence[Tensor]) -> tuple[list[Where], list[Tensor]]:
    """Returns the positions of each tensor that are summed (None: all), and the values there."""
    places = [None if _is_all(x, place) else place for x, place in zip(xs, where, strict=True)]
    return places, [x if place is None else chosen(x, *place).contiguous() for x, place in zip(xs, places, strict=True)]


def _put_back(xs: Sequence[Tensor], places: Sequence[Where], sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors, with these sums at these positions."""
    return tuple(y if place is None else replaced(x, *place, y) for x, place, y in zip(xs, places, sums, strict=True))


Like = tuple[torch.Size, dict[str, Any]]
"""Shape, dtype and device of a tensor."""


def _like(xs: Sequence[Tensor]) -> list[Like]:
    return [(x.shape, {"dtype": x.dtype, "device": x.device}) for x in xs]


def _complete(like: Sequence[Like], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns what a rank sends, also for a gradient that it lacks: see NOTE [A gradient that some ranks lack]."""
    return [torch.full(x[0], -0.0, **x[1]) if grad is None else grad for x, grad in zip(like, grads, strict=True)]


def _without_nothing(grads: Sequence[Tensor | None], sums: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the sums, and None where all ranks lack the gradient; `grads`: those of this rank."""
    pairs = zip(grads, sums, strict=True)
    return tuple(None if grad is None and _is_nothing(x) else x for grad, x in pairs)


def _is_nothing(x: Tensor) -> bool:
    """Says whether all ranks lacked a gradient of this sum.

    Not known, and False, in a transform of torch.func and on `meta`.
    """
    if not is_plain(x) or x.is_meta:
        return False
    # `signbit` does not take complex numbers.
    x = torch.view_as_real(x) if x.is_complex() else x
    return bool((x.signbit() & (x == 0)).all())


def _is_all(x: Tensor, place: Where) -> bool:
    return place is None or place[1] == ((0, x.shape[place[0]]),)
