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

from autotp.ops.collectives import Started, start_gather, start_reduce_scatter
from autotp.ops.eager_mode import apply_plain
from autotp.sharding.boxes import local_of


@dataclass
class RunningSum:
    """The sum of gradients that runs: one at a time, so that few copies of gradients are in memory.

    Attributes:
        running: waits for the sum, and adds it to `grad`; None where none runs.
    """

    running: Callable[[], None] | None = None

    def finish(self) -> None:
        """Waits for the sum that runs."""
        running, self.running = self.running, None
        if running is not None:
            running()


class ShardedUnit(nn.Module):
    """The parameters of a block, or of the rest of a graph: gathered together, and their gradients summed together.

    A graph calls `start` one block ahead, `arrive` before the block and `leave` behind it. Their order, and so that of
    the collectives, is the same on all replicas.

    Args:
        dtype: the dtype of computation, in which parameters are sent; sums of gradients are then in float32 at least.
            None keeps each dtype.
        sums: the sum that runs, shared by the units of a graph.
        frees: whether the memory is empty between uses; otherwise only `free` empties it.
        names: the names of the parameters, in the order in which `start` takes them.

    Attributes:
        rows: the parameters, DTensors in rows.
        is_whole: whether the memory has the parameters.
        sums_now: whether the end of a backward sums gradients; else they are added up until one does.
    """

    def __init__(
        self, dtype: torch.dtype | None, sums: RunningSum, frees: bool = True, names: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.dtype, self.sums, self.frees, self.names = dtype, sums, frees, names
        self.rows: Sequence[Any] = ()
        self.is_whole, self.sums_now = False, True
        self._grads: dict[int, Tensor] = {}  # Place of a parameter -> its whole gradient, of the microbatches so far.
        self._running: list[tuple[list[int], Started]] = []  # The parameters of each gather, and what waits for it.
        self._memories: list[Tensor] = []  # [replicas elements] each: rows, and zeros behind them.

    # ---- nodes of a graph

    def start(self, *rows: Tensor) -> None:
        """Starts to gather the parameters, unless they are there or on their way."""
        self.rows = rows
        self._start()

    def arrive(self) -> tuple[Tensor, ...]:
        """Returns the whole parameters, on memory that is there until `leave`. Backward sums their gradients."""
        self._wait()
        values = [self._view(i) for i in range(len(self.rows))]
        learning = [i for i, parameter in enumerate(self.rows) if parameter.requires_grad]
        if learning and torch.is_grad_enabled():
            read = apply_plain(_GatherUnit, self, learning, *(self.rows[i] for i in learning))
            for i, value in zip(learning, read, strict=True):
                values[i] = value
        return tuple(values)

    def leave(self, results: Any, before: Sequence[ShardedUnit], after: ShardedUnit | None, stays: bool = False) -> Any:
        """Returns the results of a block, and empties the memory; backward fills it again.

        Args:
            before: the units whose backward comes next: they are gathered while this one's runs.
            after: the unit whose backward comes before: its memory is not read any more.
            stays: whether backward follows at once, so that the memory stays for it.
        """
        passed, learns = self._passed(results, before, after)
        if self.frees and not (learns and stays):
            self.free()
        return passed

    def go_on(self, results: Any) -> Any:
        """Returns the results of a call that is not the block's last one: its backward may be the first one."""
        return self._passed(results, (), None)[0]

    def _passed(self, results: Any, before: Sequence[ShardedUnit], after: ShardedUnit | None) -> tuple[Any, bool]:
        """Returns the results of a block, whose backward fills the memory, and whether one will come."""
        tensors = list(results) if isinstance(results, tuple | list) else [results]
        if self.frees:
            # Of a view of a parameter others would read the memory when it is empty.
            memories = {memory.untyped_storage()._cdata for memory in self._memories}
            is_view = [isinstance(x, Tensor) and x.untyped_storage()._cdata in memories for x in tensors]
            tensors = [x.clone() if view else x for x, view in zip(tensors, is_view, strict=True)]
        learning = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.requires_grad]
        if learning:
            read = apply_plain(_LeaveBlock, self, before, after, *(tensors[i] for i in learning))
            for i, x in zip(learning, read, strict=True):
                tensors[i] = x
        return tuple(tensors) if isinstance(results, tuple | list) else tensors[0], bool(learning)

    # ---- memory

    @property
    def is_on_its_way(self) -> bool:
        """Whether a gather runs."""
        return bool(self._running)

    @property
    def nbytes(self) -> int:
        """The bytes of the memory as it is now."""
        return sum(memory.untyped_storage().nbytes() for memory in self._memories)

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

    def _start(self) -> None:
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
            self._running.append((places, start_gather(sent, self._group, 0, self._replicas * sent.numel())))

    def _wait(self) -> None:
        """Fills the memory."""
        if self.is_whole:
            return
        self._start()
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
        wait, rows = start_reduce_scatter(sent.view(-1), self._group), [self.rows[place] for place in places]

        def finish() -> None:
            for parameter, piece in zip(rows, wait().split(lengths), strict=True):
                _add(parameter, piece)

        return finish

    # ---- sizes

    @property
    def _group(self) -> str:
        return str(self.rows[0].device_mesh.get_group().group_name)

    @property
    def _replicas(self) -> int:
        return int(self.rows[0].device_mesh.size())

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
        if ctx.unit.frees:
            ctx.unit.free()
        ctx.unit.take(ctx.places, grads)
        return None, None, *(None for _ in grads)


class _LeaveBlock(torch.autograd.Function):
    """The identity behind a block, whose backward has the block's parameters gathered again."""

    @staticmethod
    def forward(
        unit: ShardedUnit, before: Sequence[ShardedUnit], after: ShardedUnit | None, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.unit, ctx.before, ctx.after = inputs[:3]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # A block without gradients of its own frees nothing behind its backward.
        if ctx.after is not None and ctx.after is not ctx.unit and ctx.after.frees:
            ctx.after.free()
        ctx.unit._wait()
        for unit in ctx.before:
            unit._start()
        return None, None, None, *grads
