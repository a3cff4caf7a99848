"""Memory that is kept in another form until backward reads it: on the host, or in fewer bytes where that is exact.

    store = HostCopy(x); del x; ...; flat = store.flat(); y = tensor_at(flat, geometry)

A store takes the whole memory of a tensor, so that all tensors that lie in it share one copy.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from autotp.errors import Error


class Store(Protocol):
    """Memory in another form."""

    def begin(self) -> None:
        """Begins to bring the memory back, where that takes time."""

    def flat(self) -> Tensor:
        """Returns the memory on its device, as it was: [elements]"""


def flat_memory(x: Tensor) -> Tensor:
    """Returns the whole memory of a tensor: [elements]"""
    storage = x.untyped_storage()
    count = storage.nbytes() // x.element_size()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (count,), (1,))


def tensor_at(flat: Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Returns a tensor in the memory of another."""
    if flat.dtype == dtype:
        return flat.as_strided(shape, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), offset, shape, stride)


class Bits:
    """A mask with one bit for each element."""

    def __init__(self, x: Tensor) -> None:
        mask = flat_memory(x)
        self.count = mask.numel()
        padded = torch.nn.functional.pad(mask, (0, -self.count % 8)).view(torch.uint8).view(-1, 8)
        self.bytes = padded[:, 7] << 7
        for i in range(7):
            self.bytes |= padded[:, i] << i

    def begin(self) -> None:
        """Does nothing: it takes no time to wait for."""

    def flat(self) -> Tensor:
        """Returns the mask: bool [elements]"""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.bytes.device)
        return ((self.bytes[:, None] >> shifts) & 1).bool().flatten()[: self.count]


class ShortNumbers:
    """Whole numbers of 64 bits in 32."""

    def __init__(self, x: Tensor) -> None:
        self.numbers = flat_memory(x).to(torch.int32)

    def begin(self) -> None:
        """Does nothing: it takes no time to wait for."""

    def flat(self) -> Tensor:
        """Returns the numbers: int64 [elements]"""
        return self.numbers.to(torch.int64)


class HostCopy:
    """A copy in the host's memory, to which and from which a GPU copies while it computes.

    NOTE [Who waits for a copy]
    The host waits for none. Copies run on a stream of their own, which waits for what was computed before; the stream
    that computes waits for a copy when it reads it. The memory on the device counts as used until the copy has read it
    (`record_stream`), and torch's allocator gives pinned memory to nobody else until the copies from it have run.

    A device that is the host gets a copy in other memory, too, so that what lies on the device can be counted.
    """

    def __init__(self, x: Tensor) -> None:
        source = flat_memory(x)
        self.device = source.device
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if not source.is_cuda:
            self.copy = source.clone()
            return
        self.copy = pinned(source)
        stream = _copying_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.copy.copy_(source, non_blocking=True)
            self._left = stream.record_event()
        source.record_stream(stream)

    def begin(self) -> None:
        """Begins to copy the memory back."""
        if self._back is not None:
            return
        if self.device.type != "cuda":
            self._back = self.copy.clone()
            return
        stream = _copying_stream(self.device)
        # Memory of the computing stream: its last reader there may still run, and so the copy waits for that stream.
        self._back = torch.empty_like(self.copy, device=self.device, pin_memory=False)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            stream.wait_event(self._left)
            self._back.copy_(self.copy, non_blocking=True)
            self._arrived = stream.record_event()
        self._back.record_stream(stream)

    def flat(self) -> Tensor:
        """Returns the memory on the device; the caller has the only reference: [elements]"""
        self.begin()
        back, self._back = self._back, None
        assert back is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        return back


def pinned(source: Tensor) -> Tensor:
    """Returns memory of the host for a copy of a tensor, from and to which a device copies beside computation.

    Raises:
        Error: there is none left.
    """
    try:
        return torch.empty_like(source, device="cpu", pin_memory=True)
    except RuntimeError as error:
        mebibytes = source.numel() * source.element_size() / 2**20
        raise Error(
            f"the host has no {mebibytes:.0f} MiB of pinned memory left for a value that backward needs: {error}",
            fix='recompute="full" in place of memory=',
            alternative="a host with more memory, or a higher limit: ulimit -l unlimited",
        ) from error


def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device on which copies from and to the host run."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""Device -> the stream of copies."""
