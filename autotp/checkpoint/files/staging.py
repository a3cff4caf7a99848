"""Copies between a card and the host in pinned memory: `Staging` of a save, `copy_into` of a load, and `on_host`.

The host waits for none of them but `on_host`. On the CPU they are plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SMALLEST, LARGEST = 2**20, 2**28
"""Bytes of a chunk of pinned memory; one for a larger tensor is larger."""
ALIGNMENT = 64
"""Bytes. Each copy begins at a multiple of it."""
OPEN = 8
"""Chunks at most in which there is room for further copies: those with the most room."""


@dataclass
class Staging:
    """Copies of a state on the CPU, which training does not change; those of a card's tensors arrive later.

    NOTE [What training changes meanwhile]
    A copy is queued on the card's current stream, as the next step of the optimizer is. So the card overwrites a tensor
    only after it was copied, and the host need not wait.

    NOTE [Chunks of pinned memory]
    torch's allocator of pinned memory rounds each request up to a power of two, keeps what is freed, and gives it only
    to requests of the same size. So many copies share a chunk, whose size is a power of two. The state may be small:
    so a chunk has at most as many bytes as were copied before, or as its tensor needs. Two saves of the same state ask
    for the same chunks.

    Attributes:
        arrivals: card -> tells whether the copies from it have arrived; set by `end`.
        rests: what is left of chunks. [bytes]
        staged: bytes of all copies from cards.
    """

    arrivals: dict[torch.device, torch.cuda.Event | None] = field(default_factory=dict)
    rests: list[Tensor] = field(default_factory=list)
    staged: int = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the CPU; of a card's tensor it has no values before `wait`. tensor: [...]"""
        if not tensor.is_cuda:
            return tensor.detach().to("cpu", copy=True)
        self.arrivals[tensor.device] = None
        # A view that negates or conjugates is computed on the card: on the host it would be before the values arrive.
        source = tensor.detach().resolve_conj().resolve_neg()
        return self._room_for(source).copy_(source, non_blocking=True)

    def _room_for(self, tensor: Tensor) -> Tensor:
        """Returns pinned memory with the sizes and the order of strides of `tensor`, but without holes."""
        layout = torch.empty_like(tensor, device="meta")
        size = layout.numel() * layout.itemsize
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        chunk = next((rest for rest in self.rests if rest.numel() >= aligned), None)
        if chunk is None:
            chunk = torch.empty(self._chunk_size(aligned), dtype=torch.uint8, pin_memory=True)
        other_rests = [rest for rest in self.rests if rest is not chunk]
        self.rests = sorted((*other_rests, chunk[aligned:]), key=Tensor.numel)[-OPEN:]
        self.staged += aligned
        return chunk[:size].view(layout.dtype).as_strided(layout.shape, layout.stride())

    def _chunk_size(self, needed: int) -> int:
        """Returns the bytes of the next chunk: a power of two."""
        copied = min(max(self.staged, SMALLEST), LARGEST)
        return max(1 << max(needed - 1, 0).bit_length(), 1 << copied.bit_length() - 1)

    def end(self) -> None:
        """Notes that all copies have begun."""
        for device in self.arrivals:
            self.arrivals[device] = event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Waits until all copies have arrived. Another thread may call it."""
        for event in self.arrivals.values():
            assert event is not None, "`end` is called before"
            event.synchronize()


def on_host(tensor: Tensor) -> Tensor:
    """Returns a tensor of the CPU as it is; of a card's a copy, for which the host waits. tensor: [...]"""
    if not tensor.is_cuda:
        return tensor
    staging = Staging()
    copied = staging.copy(tensor)
    staging.end()
    staging.wait()
    return copied


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies a tensor of the CPU into `target`; the host does not wait for a card. target, source: [...]"""
    # For memory that is not pinned the host would wait.
    if target.is_cuda and not source.is_pinned():
        source = source.contiguous().pin_memory()
    target.copy_(source, non_blocking=True)  # torch's allocator keeps pinned memory until it was read.
