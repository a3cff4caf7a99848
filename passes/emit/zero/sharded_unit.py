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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.ops.collectives import Started, start_gather, start_reduce_scatter
from autotp.ops.eager_mode import apply_plain
from autotp.passes.emit.zero.room import Room
from autotp.sharding.boxes import local_of, rows_along


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
        following, preceding: the units that come after this one in forward, and in backward.
        is_whole: whether the memory has the parameters.
        sums_now: whether the end of a backward sums gradients; else they are added up until one does.
    """

    def __init__(
        self, dtype: torch.dtype | None, sums: RunningSum, room: Room[ShardedUnit] | None, names: Sequence[str]
    ) -> None:
        super().__init__()
        self.dtype, self.sums, self.room, self.names = dtype, sums, room, names
        self.rows: Sequence[Any] = ()
        self._replicas: Sequence[_Replicas] = ()  # Of each parameter.
        self.following, self.preceding = tuple[ShardedUnit, ...](), tuple[ShardedUnit, ...]()
        self.is_whole, self.sums_now = False, True
        self._grads: dict[int, Tensor] = {}  # Place of a parameter -> its whole gradient, of the microbatches so far.
        self._running: list[tuple[list[int], Started]] = []  # The parameters of each gather, and what waits for it.
        self._memories: list[Tensor] = []  # [replicas elements] each: rows, and zeros behind them.

    def read(self, rows: Sequence[Tensor]) -> None:
        """Takes the parameters of a step."""
        if len(rows) != len(self.rows) or any(x is not y for x, y in zip(rows, self.rows, strict=True)):
            self.rows, self._replicas = rows, [_replicas_of(x) for x in rows]

    # ---- nodes of a graph

    def start(self, beside: Sequence[ShardedUnit], *rows: Tensor) -> None:
        """Starts to gather the parameters, unless they are there or on their way.

        Args:
            beside: the units that stay in the room for it.
            rows: the parameters.
        """
        self.read(rows)
        self._start(beside, self.following)

    def arrive(self, beside: Sequence[ShardedUnit]) -> tuple[Tensor, ...]:
        """Returns the whole parameters, on memory that stays while its unit is in the room.

        Backward sums their gradients over the replicas, and leaves each replica those of its rows.

        Args:
            beside: as for `start`.
        """
        self._come(beside, self.following)
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
        return self._passed(results, beside, before)

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
        self._come([*beside, *before], self.preceding)

    def _come(self, beside: Sequence[ShardedUnit], later: Sequence[ShardedUnit]) -> None:
        """Waits for the parameters, and starts to gather later ones while the room has places."""
        self._start(beside, later)
        self._wait(beside, later)
        while self.room is not None and (unit := self.room.next_ahead(self, beside, later)) is not None and unit.rows:
            unit._start([self, *beside], later)

    def _start(self, beside: Sequence[ShardedUnit], later: Sequence[ShardedUnit]) -> None:
        for unit in self.room.let_in(self, beside, later) if self.room is not None else ():
            unit.free()
        if self.is_whole or self._running:
            return
        together: dict[tuple[str | None, torch.dtype], list[int]] = {}
        for i, parameter in enumerate(self.rows):
            together.setdefault((self._replicas[i].group, self._dtype_of(parameter)), []).append(i)
        for (_, dtype), places in together.items():
            lengths = [self._length(i) for i in places]
            sent = torch.empty(sum(lengths), dtype=dtype, device=local_of(self.rows[0]).device)
            with torch.no_grad():
                own = [_filled(local_of(self.rows[i]), n) for i, n in zip(places, lengths, strict=True)]
                torch.cat(own, out=sent)
            self._running.append((places, self._replicas[places[0]].gather(sent)))

    def _wait(self, beside: Sequence[ShardedUnit], later: Sequence[ShardedUnit]) -> None:
        """Fills the memory."""
        if self.is_whole:
            return
        for unit in self.room.arrive(self, beside, later) if self.room is not None else ():
            unit.free()
        if not self._memories:
            self._memories = [torch.empty(0)] * len(self.rows)
        for places, wait in self._running:
            joined = wait().view(self._replicas[places[0]].number, -1)
            parts = [self._filled_memory(i, joined) for i in places]
            with torch.no_grad():
                torch.split_with_sizes_copy(joined, [part.shape[1] for part in parts], dim=1, out=parts)
        self._running, self.is_whole = [], True

    def _filled_memory(self, place: int, joined: Tensor) -> Tensor:
        """Returns the memory of a parameter, with room: [replicas elements]"""
        size = self._replicas[place].number, self._length(place)
        memory = self._memories[place]
        if memory.shape != size or memory.dtype != joined.dtype:
            memory = self._memories[place] = joined.new_empty(size)
        memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        return memory

    def _view(self, place: int) -> Tensor:
        """Returns a whole parameter."""
        shape = self._replicas[place].shape
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
        together: dict[tuple[str | None, torch.dtype], list[int]] = {}
        for place in sorted(grads):
            together.setdefault((self._replicas[place].group, self._dtype_of_sums(grads[place])), []).append(place)
        for (_, dtype), places in together.items():
            self.sums.finish()
            self.sums.running = self._start_sum(dtype, places, [grads[place] for place in places])

    def _to_add(self, grad: Tensor) -> Tensor:
        """Returns a gradient to which others are added; one that is summed at once is cast as it is sent."""
        return grad if self.sums_now else grad.to(self._dtype_of_sums(grad))

    def _dtype_of_sums(self, grad: Tensor) -> torch.dtype:
        return torch.promote_types(grad.dtype, torch.float32) if self.dtype else grad.dtype

    def _start_sum(self, dtype: torch.dtype, places: Sequence[int], grads: Sequence[Tensor]) -> Callable[[], None]:
        replicas, lengths = self._replicas[places[0]], [self._length(place) for place in places]
        sent = torch.empty(replicas.number, sum(lengths), dtype=dtype, device=grads[0].device)
        pieces = [_filled(x, sent.shape[0] * n).view(-1, n) for x, n in zip(grads, lengths, strict=True)]
        torch.cat(pieces, dim=1, out=sent)
        wait, rows = replicas.sum(sent.view(-1)), [self.rows[place] for place in places]
        complete = self.sums.complete

        def finish() -> None:
            for parameter, piece in zip(rows, wait().split(lengths), strict=True):
                _add(parameter, piece)
                if complete is not None:
                    complete(parameter)

        return finish

    # ---- sizes

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameters as they are sent: with zeros where rows do not divide."""
        sizes = (self._replicas[i].number * self._length(i) for i in range(len(self.rows)))
        return sum(n * self._dtype_of(x).itemsize for n, x in zip(sizes, self.rows, strict=True))

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes in which parameters are sent."""
        return {self._dtype_of(x) for x in self.rows}

    @property
    def sums_by_dtype(self) -> dict[torch.dtype, int]:
        """The bytes of the gradients that are summed, in each dtype."""
        sizes = dict[torch.dtype, int]()
        for i, parameter in enumerate(self.rows):
            if parameter.requires_grad:
                dtype = self._dtype_of_sums(parameter)
                sizes[dtype] = sizes.get(dtype, 0) + self._replicas[i].number * self._length(i) * dtype.itemsize
        return sizes

    def _length(self, place: int) -> int:
        """Returns the number of elements that each replica sends of a parameter: those of the first one's rows."""
        replicas = self._replicas[place]
        return -(-replicas.shape[0] // replicas.number) * replicas.shape[1:].numel()

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return self.dtype if self.dtype and parameter.is_floating_point() else parameter.dtype


class _Replicas(NamedTuple):
    """The ranks that have the rows of a parameter.

    Attributes:
        group: the name of their group; None in a simulation, where each has the whole parameter.
        number: of ranks.
        shape: of what they have together: of a stack of experts, those of one rank along `ep`.
    """

    group: str | None
    number: int
    shape: torch.Size

    def gather(self, sent: Tensor) -> Started:
        """Starts to gather what each of them sends."""
        return (lambda: sent) if self.group is None else start_gather(sent, self.group, 0, self.number * sent.numel())

    def sum(self, sent: Tensor) -> Started:
        """Starts to sum what all of them send; each gets its part."""
        return (lambda: sent) if self.group is None else start_reduce_scatter(sent, self.group)


def _replicas_of(parameter: Any) -> _Replicas:
    if not isinstance(parameter, DTensor):
        return _Replicas(None, 1, parameter.shape)
    mesh = parameter.device_mesh
    last = mesh.ndim - 1
    start, stop = rows_along(parameter, last)
    shape = torch.Size((stop - start, *parameter.shape[1:]))
    return _Replicas(str(mesh.get_group(last).group_name), mesh.size(last), shape)


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
        ctx.unit.take(ctx.places, grads)
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
