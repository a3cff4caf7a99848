"""ShardedUnit: the parameters of one block of which each replica keeps rows, and their whole while a block runs.

NOTE [Memory that comes and goes]
autograd keeps the tensors that a block has read, so a gathered parameter that is dropped after forward must be there
again in backward. Its memory is therefore emptied, and filled again from the rows of that time, while the tensors that
lie in it stay: those in a block, in autograd, in what is computed again. `fully_shard` does the same (Zhao et al. 2023,
"PyTorch FSDP", section 3).

Source: Rajbhandari et al. 2020, "ZeRO", section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.errors import REPORT, Error
from autotp.ops.collectives import Started, start_gather, start_reduce_scatter
from autotp.ops.eager_mode import apply_plain
from autotp.passes.emit.zero.room import Room
from autotp.sharding.boxes import local_of


@dataclass
class RunningSum:
    """The sum of gradients that runs: one at a time, so that few copies of gradients are in memory.

    Attributes:
        running: waits for the sum, and adds it to `grad`; None where none runs.
        complete: called with each parameter to which the last sum of a step was added; None before that.
    """

    running: Callable[[], None] | None = None
    complete: Callable[[Tensor], None] | None = None

    def finish(self) -> None:
        """Waits for the sum that runs."""
        running, self.running = self.running, None
        if running is not None:
            running()


class ShardedUnit(nn.Module):
    """The parameters of a block, or of the rest of a graph: gathered together, and their gradients summed together.

    A graph calls `start` some blocks ahead, `arrive` before the block and `leave` after it. Their order, and so that of
    the collectives, is the same on all replicas.

    Args:
        dtype: the dtype of computation, in which parameters are sent; sums of gradients are then in float32 at least.
            None keeps each dtype.
        sums: the sum that runs, shared by the units of a graph.
        room: the blocks that are whole, shared by the units of a rank; None: this unit stays until the step ends.
        names: the names of the parameters, in the order in which `start` takes them.

    Attributes:
        rows: the parameters, DTensors in rows; in a simulation, whole ones.
        is_whole: whether the memory has the parameters.
        sums_now: whether the end of a backward sums gradients; else they are added up until one does.
    """

    def __init__(
        self, dtype: torch.dtype | None, sums: RunningSum, room: Room[ShardedUnit] | None, names: Sequence[str]
    ) -> None:
        super().__init__()
        self.dtype, self.sums, self.room, self.names = dtype, sums, room, names
        self.rows: Sequence[Any] = ()
        self.is_whole, self.sums_now = False, True
        self._grads: dict[int, Tensor] = {}  # Place of a parameter -> its whole gradient, of the microbatches so far.
        self._running: list[tuple[list[int], Started]] = []  # The parameters of each gather, and what waits for it.
        self._memories: list[Tensor] = []  # [replicas elements] each: rows, and zeros behind them.

    # ---- nodes of a graph

    def start(self, beside: Sequence[ShardedUnit], *rows: Tensor) -> None:
        """Starts to gather the parameters, unless they are there or on their way.

        Args:
            beside: the units that stay in the room for it.
            rows: the parameters.
        """
        self.rows = rows
        self._start(beside)

    def arrive(self, beside: Sequence[ShardedUnit]) -> tuple[Tensor, ...]:
        """Returns the whole parameters, on memory that stays while its unit is in the room.

        Backward sums their gradients over the replicas, and leaves each replica those of its rows.

        Args:
            beside: as for `start`.
        """
        self._wait(beside)
        values = [self._view(i) for i in range(len(self.rows))]
        learning = [i for i, parameter in enumerate(self.rows) if parameter.requires_grad]
        if learning and torch.is_grad_enabled():
            read = apply_plain(_GatherUnit, self, learning, *(self.rows[i] for i in learning))
            for i, value in zip(learning, read, strict=True):
                values[i] = value
        return tuple(values)

    def leave(self, results: Any, beside: Sequence[ShardedUnit], before: Sequence[ShardedUnit]) -> Any:
        """Returns the results of a block's last call, whose backward has the block's parameters gathered again.

        Args:
            beside: the other units that this call needs in the room.
            before: the units whose backward comes next: they are gathered while this one's runs.
        """
        passed = self._passed(results, beside, before)
        self._end()
        return passed

    def go_on(self, results: Any, beside: Sequence[ShardedUnit]) -> Any:
        """Returns the results of a call that is not the block's last one; arguments as for `leave`."""
        return self._passed(results, beside, ())

    def _passed(self, results: Any, beside: Sequence[ShardedUnit], before: Sequence[ShardedUnit]) -> Any:
        tensors = list(results) if isinstance(results, tuple | list) else [results]
        # Of a view of a parameter others would read the memory when it is empty.
        memories = {memory.untyped_storage()._cdata for memory in self._memories}
        is_view = [isinstance(x, Tensor) and x.untyped_storage()._cdata in memories for x in tensors]
        tensors = [x.clone() if view else x for x, view in zip(tensors, is_view, strict=True)]
        learning = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.requires_grad]
        if learning:
            read = apply_plain(_LeaveBlock, self, beside, before, *(tensors[i] for i in learning))
            for i, x in zip(learning, read, strict=True):
                tensors[i] = x
        return tuple(tensors) if isinstance(results, tuple | list) else tensors[0]

    # ---- memory

    def free(self) -> None:
        """Empties the memory."""
        for _, wait in self._running:
            wait()
        self._running = []
        for memory in self._memories:
            memory.untyped_storage().resize_(0)
        self.is_whole = False

    def forget(self) -> None:
        """Empties the memory, and drops gradients that are not summed, for a step that ends."""
        self._running = []  # In a step that failed nobody may be there to wait for.
        self.free()
        self._grads, self.sums.running = {}, None
        if self.room is not None:
            self.room.members = []

    def gather_again(self, beside: Sequence[ShardedUnit], before: Sequence[ShardedUnit]) -> None:
        """Makes the parameters whole for backward, and starts to gather the next ones; arguments as for `leave`."""
        self._start(beside)
        self._wait([*beside, *before])
        for i, unit in enumerate(before):
            unit._start([self, *beside, *before[:i]])

    def end_backward(self, places: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Takes the gradients of whole parameters when the block's backward ends."""
        self._end()
        self.take(places, grads)

    def _end(self) -> None:
        if self.room is not None and self.room.end(self):
            self.free()

    def _start(self, beside: Sequence[ShardedUnit]) -> None:
        for unit in self.room.let_in(self, beside) if self.room is not None else ():
            unit.free()
        if self.is_whole or self._running:
            return
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, parameter in enumerate(self.rows):
            by_dtype.setdefault(self._dtype_of(parameter), []).append(i)
        for dtype, places in by_dtype.items():
            lengths = [self._length(i) for i in places]
            sent = torch.empty(sum(lengths), dtype=dtype, device=local_of(self.rows[0]).device)
            with torch.no_grad():
                own = [_filled(local_of(self.rows[i]), n) for i, n in zip(places, lengths, strict=True)]
                torch.cat(own, out=sent)
            self._running.append((places, self._gather(sent)))

    def _wait(self, beside: Sequence[ShardedUnit]) -> None:
        """Fills the memory."""
        if self.is_whole:
            return
        for unit in self.room.arrive(self, beside) if self.room is not None else ():
            unit.free()
        if self.rows and not self._running:
            raise Error(f"the parameters of `{self.names[0]}` are read, and nothing gathers them", fix=REPORT)
        if not self._memories:
            self._memories = [torch.empty(0)] * len(self.rows)
        for places, wait in self._running:
            joined = wait().view(self._replicas, -1)
            parts = [self._filled_memory(i, joined) for i in places]
            with torch.no_grad():
                torch.split_with_sizes_copy(joined, [part.shape[1] for part in parts], dim=1, out=parts)
        self._running, self.is_whole = [], True

    def _filled_memory(self, place: int, joined: Tensor) -> Tensor:
        """Returns the memory of a parameter, with room: [replicas elements]"""
        size = self._replicas, self._length(place)
        memory = self._memories[place]
        if memory.shape != size or memory.dtype != joined.dtype:
            memory = self._memories[place] = joined.new_empty(size)
        memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        return memory

    def _view(self, place: int) -> Tensor:
        """Returns a whole parameter."""
        shape = self.rows[place].shape
        # `data` has a version of its own: what fills the memory again is no change.
        return self._memories[place].view(-1)[: shape.numel()].view(shape).data

    # ---- gradients

    def take(self, places: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Takes gradients of whole parameters; if `sums_now`, starts their sum over the replicas."""
        for place, grad in zip(places, grads, strict=True):
            if grad is not None:
                before = self._grads.get(place)
                # Not in place: other code may have the first gradient, too.
                self._grads[place] = self._to_add(grad) if before is None else before + grad
        if self.sums_now:
            self.sum_gradients()

    def sum_gradients(self) -> None:
        """Starts to sum all gradients that were taken, once the sum before has arrived."""
        grads, self._grads = self._grads, {}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place in sorted(grads):
            by_dtype.setdefault(self._dtype_of_sums(grads[place]), []).append(place)
        for dtype, places in by_dtype.items():
            self.sums.finish()
            self.sums.running = self._start_sum(dtype, places, [grads[place] for place in places])

    def _to_add(self, grad: Tensor) -> Tensor:
        """Returns a gradient to which others are added; one that is summed at once is cast as it is sent."""
        return grad if self.sums_now else grad.to(self._dtype_of_sums(grad))

    def _dtype_of_sums(self, grad: Tensor) -> torch.dtype:
        return torch.promote_types(grad.dtype, torch.float32) if self.dtype else grad.dtype

    def _start_sum(self, dtype: torch.dtype, places: Sequence[int], grads: Sequence[Tensor]) -> Callable[[], None]:
        replicas, lengths = self._replicas, [self._length(place) for place in places]
        sent = torch.empty(replicas, sum(lengths), dtype=dtype, device=grads[0].device)
        pieces = [_filled(grad, replicas * n).view(replicas, n) for grad, n in zip(grads, lengths, strict=True)]
        torch.cat(pieces, dim=1, out=sent)
        wait, rows = self._sum(sent.view(-1)), [self.rows[place] for place in places]

        complete = self.sums.complete

        def finish() -> None:
            for parameter, piece in zip(rows, wait().split(lengths), strict=True):
                _add(parameter, piece)
                if complete is not None:
                    complete(parameter)

        return finish

    # ---- sizes

    @property
    def _group(self) -> str | None:
        """The name of the replicas' group; None in a simulation, where each replica has the whole parameters."""
        rows = self.rows[0]
        return str(rows.device_mesh.get_group().group_name) if isinstance(rows, DTensor) else None

    @property
    def _replicas(self) -> int:
        rows = self.rows[0]
        return int(rows.device_mesh.size()) if isinstance(rows, DTensor) else 1

    def _gather(self, sent: Tensor) -> Started:
        group = self._group
        return (lambda: sent) if group is None else start_gather(sent, group, 0, self._replicas * sent.numel())

    def _sum(self, sent: Tensor) -> Started:
        group = self._group
        return (lambda: sent) if group is None else start_reduce_scatter(sent, group)

    def _length(self, place: int) -> int:
        """Returns the number of elements that each replica sends of a parameter: those of the first one's rows."""
        shape = self.rows[place].shape
        return -(-shape[0] // self._replicas) * shape[1:].numel()

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return self.dtype if self.dtype and parameter.is_floating_point() else parameter.dtype


def _filled(x: Tensor, length: int) -> Tensor:
    """Returns the elements of a tensor, with zeros behind them: [length]"""
    flat = x.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])


def _add(parameter: Any, piece: Tensor) -> None:
    """Adds the sum of a gradient's rows to those that the parameter has. piece: [elements ...]"""
    local = local_of(parameter)
    grad = piece[: local.numel()].view(local.shape).to(parameter.dtype)
    if parameter.grad is not None:
        local_of(parameter.grad).add_(grad)
        return
    if not isinstance(parameter, DTensor):
        parameter.grad = grad
        return
    parameter.grad = DTensor.from_local(
        grad, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


class _GatherUnit(torch.autograd.Function):
    """Parameters in rows -> the whole ones; its conjugate sums gradients, and leaves each replica those of its rows.

    It adds them to `grad` itself, when the sum is there: autograd would wait for it.
    """

    @staticmethod
    def forward(unit: ShardedUnit, places: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(unit._view(i) for i in places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.unit, ctx.places = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.unit.end_backward(ctx.places, grads)
        return None, None, *(None for _ in grads)


class _LeaveBlock(torch.autograd.Function):
    """The identity behind a block's call, whose backward has the block's parameters gathered again."""

    @staticmethod
    def forward(
        unit: ShardedUnit, beside: Sequence[ShardedUnit], before: Sequence[ShardedUnit], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.unit, ctx.units = inputs[0], inputs[1:3]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.unit.gather_again(*ctx.units)
        return None, None, None, *grads
