"""room: what a device has for the tensors of a job, beside what libraries, NCCL and the allocator take.

Before: a device of 24 GiB, in groups of 4 ranks
After:  24 GiB - 1 (libraries) - 1.3 (NCCL) = 21.7, of which 19 GiB are for tensors, and the rest is for the allocator

`reserved` tells whether counted tensors fit; `tensor_room` is the most that fits for certain: memory="auto".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotp.costs.hardware import GIB, Hardware
from autotp.costs.links import CHANNELS, RankGroup, channels

LIBRARIES = 1.0 * GIB
"""Bytes of the driver's context and of libraries."""
ALLOCATOR = 0.08
"""The part of the tensors' bytes that the allocator takes beside: gaps between them."""
MISSED = 0.06
"""The part of the tensors' bytes that a count may miss: the widest error bar of memory (`memory_bar`), rounded up."""
CHANNEL_BYTES = 688e6 / CHANNELS
"""The most bytes of buffers that a communicator has for a channel: one of four A100s took 688 MB, one of two 544 MB
(NVIDIA/nccl issue 964). They grow with the channels, and hardly with the ranks (issue 986)."""


def axis_groups(sizes: Sequence[int]) -> list[RankGroup]:
    """Returns the groups that a rank communicates in: one for each axis, and one of all ranks.

    Args:
        sizes: of the axes; neighbouring ranks are along the first.
    """
    stride, groups = 1, list[RankGroup]()
    for size in sizes:
        groups.append(RankGroup(size=size, stride=stride))
        stride *= size
    return [*groups, RankGroup(size=stride, stride=1)]


def buffer_bytes(groups: Iterable[RankGroup], device: Hardware) -> float:
    """Returns the bytes that NCCL's communicators of these groups take, at most; a group of one rank has none."""
    if not device.is_gpu:
        return 0.0
    return sum(channels(group, device) * CHANNEL_BYTES for group in groups if group.size > 1)


def reserved(tensors: float, missed: float, buffers: float) -> float:
    """Returns the bytes of a device that a job takes at most.

    Args:
        tensors: bytes of all tensors at the fullest moment.
        missed: bytes that this count may miss.
        buffers: bytes of NCCL's communicators.
    """
    return tensors * (1 + ALLOCATOR) + missed + LIBRARIES + buffers


def tensor_room(device: Hardware, sizes: Sequence[int]) -> float:
    """Returns the bytes that tensors may take so that `reserved` is within the device's memory.

    Args:
        sizes: as for `axis_groups`.
    """
    return (device.memory - reserved(0.0, 0.0, buffer_bytes(axis_groups(sizes), device))) / (1 + ALLOCATOR + MISSED)
