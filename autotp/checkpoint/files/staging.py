"""Copies between a card and the host that the host does not wait for: `Staging` of a save, `copy_into` of a load.

On the CPU they are plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Staging:
    """Copies of a state on the CPU, which training does not change; those of a card's tensors arrive later.

    NOTE [What training changes meanwhile]
    A copy is queued on the card's current stream, as the next step of the optimizer is. So the card overwrites a tensor
    only after it was copied, and the host need not wait. The copies lie in pinned memory of torch's own allocator,
    which keeps it for the next save.

    Attributes:
        arrivals: card -> tells whether the copies from it have arrived; set by `end`.
    """

    arrivals: dict[torch.device, torch.cuda.Event | None] = field(default_factory=dict)

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the CPU; of a card's tensor it has no values before `wait`. tensor: [...]"""
        if not tensor.is_cuda:
            return tensor.detach().to("cpu", copy=True)
        self.arrivals[tensor.device] = None
        return tensor.detach().to("cpu", non_blocking=True)

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


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies a tensor of the CPU into `target`; the host does not wait for a card. target, source: [...]"""
    if target.is_cuda and not source.is_pinned():
        source = source.contiguous().pin_memory()
    target.copy_(source, non_blocking=True)  # torch's allocator keeps pinned memory until it was read.
