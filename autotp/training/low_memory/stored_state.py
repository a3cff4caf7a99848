"""StoredState: a state of one parameter between two steps; `StateMemory`: where such states lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autotp.sharding.layout import Layout
from autotp.training.low_memory.blocks import Blocks, state_blocks
from autotp.training.low_memory.packing import opened, pack

CHUNK = 2**28
"""Bytes of a piece of pinned memory. torch rounds each request up to a power of two, so states share pieces."""
ALIGNMENT = 64
"""Bytes. Each state begins at a multiple of it."""


class StateMemory:
    """The memory for the states of one device's parameters: there, or in pinned memory of the host.

    From the host, states come to a card on one stream, and go back on another one, beside the steps of other
    parameters. The host waits for neither. On the CPU states are in the host's memory already.
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.device, self._rest = device, torch.empty(0, dtype=torch.uint8)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if offload and device.type == "cuda" else []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory for a tensor."""
        if not self._streams:
            return torch.empty(shape, dtype=dtype, device=self.device)
        size = prod(shape) * dtype.itemsize
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        if self._rest.numel() < aligned:
            self._rest = torch.empty(max(CHUNK, aligned), dtype=torch.uint8, pin_memory=True)
        memory, self._rest = self._rest[:size], self._rest[aligned:]
        return memory.view(dtype).view(shape)

    def begin(self) -> None:
        """Begins a step: what comes is what the step before sent."""
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])

    def bring(self, states: Sequence[Tensor]) -> tuple[Sequence[Tensor], torch.cuda.Event | None]:
        """Returns states on the device, and the event after which they are there; None means now."""
        if not self._streams:
            return states, None
        with torch.cuda.stream(self._streams[0]):
            return [state.to(self.device, non_blocking=True) for state in states], self._streams[0].record_event()

    def receive(self, states: Sequence[Tensor], event: torch.cuda.Event | None) -> None:
        """Makes the current stream wait for states that come."""
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for state in states:
                # The memory is of the other stream: it must not be used anew before this one has read it.
                state.record_stream(current)

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies states to where they lie. pairs: the memory of each, and its new values on the device"""
        if not self._streams:
            for target, state in pairs:
                target.copy_(state)
            return
        self._streams[1].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._streams[1]):
            for target, state in pairs:
                target.copy_(state, non_blocking=True)
                state.record_stream(self._streams[1])

    def wait(self) -> None:
        """Waits until all that was sent has arrived: before the host reads it."""
        for stream in self._streams:
            stream.synchronize()


@dataclass(frozen=True, eq=False)
class StoredState:
    """This rank's part of a state between two steps.

    Attributes:
        values: the codes of its elements, or the elements as they are. [part]
        scales: the largest element of each block; None if the elements are as they are. [lead... blocks]
        dtype: that of the state.
        signed: whether it may be negative.
        layout, rank: those of the parameter.
        memory: that of the parameter's device.
    """

    values: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    signed: bool
    layout: Layout
    rank: int
    memory: StateMemory

    @property
    def nbytes(self) -> int:
        """The number of bytes that it takes."""
        return sum(x.nbytes for x in self.tensors())

    @property
    def is_packed(self) -> bool:
        """Whether it has codes and scales."""
        return self.scales is not None

    def fits(self, shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> bool:
        """Whether it is of a part of this shape and layout, and a state of this dtype."""
        return (tuple(self.values.shape), self.dtype, self.layout) == (tuple(shape), dtype, layout)

    def blocks(self, device: torch.device) -> Blocks | None:
        """Returns its blocks; None if it is not packed."""
        return None if self.scales is None else state_blocks(self.layout, self.rank, device)

    def tensors(self, rows: slice = slice(None)) -> list[Tensor]:
        """Returns some rows of the values, and of the scales."""
        return [x[rows] for x in (self.values, self.scales) if x is not None]

    def opened(self, tensors: Sequence[Tensor] | None = None) -> Tensor:
        """Returns the state as torch's own optimizer has it; one that is not packed is not copied.

        Args:
            tensors: some rows of it, as `tensors` returns them, on any device; None means all, where they lie.
        """
        if tensors is None:
            self.memory.wait()
            tensors = self.tensors()
        blocks = self.blocks(tensors[0].device)
        return tensors[0] if blocks is None else opened(tensors[0], tensors[1], blocks, self.dtype, self.signed)

    def write(self, state: Tensor, scales: Tensor | None, rows: slice = slice(None)) -> None:
        """Writes some rows.

        Args:
            state: these rows of the state, on the device.
            scales: those of these rows; None if the state is not packed.
        """
        new = [state]
        if scales is not None:
            blocks = self.blocks(state.device)
            assert blocks is not None
            new = [pack(state, scales, blocks, self.values.dtype, self.signed), scales]
        pairs = zip(self.tensors(rows), new, strict=True)
        # A state that lies on the device as it is was stepped there.
        self.memory.send([(target, x) for target, x in pairs if target.data_ptr() != x.data_ptr() or not x.numel()])


def room_for(
    shape: Sequence[int],
    dtype: torch.dtype,
    codes: torch.dtype | None,
    signed: bool,
    layout: Layout,
    rank: int,
    memory: StateMemory,
) -> StoredState:
    """Returns a state without values.

    Args:
        shape: that of this rank's part.
        dtype: that of the state.
        codes: the dtype of its codes; None keeps the elements as they are.
        signed, layout, rank, memory: as `StoredState` has them.
    """
    smaller = codes is not None and dtype.is_floating_point and codes.itemsize < dtype.itemsize
    blocks = state_blocks(layout, rank, memory.device) if smaller else None
    values = memory.empty(shape, codes if codes is not None and blocks is not None else dtype)
    scales = None if blocks is None else memory.empty((*shape[: blocks.lead], blocks.count), torch.float32)
    return StoredState(values, scales, dtype, signed, layout, rank, memory)
