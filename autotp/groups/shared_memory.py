"""shared_memory: ranks of one machine exchange small tensors through memory that they share, in place of sockets.

gloo sends through sockets, and each collective wakes threads: that takes 0.4 ms, however small the tensor is, and more
where the ranks have computed before. A token of a small model needs tens of sums, one after the other.

Each rank has a line of counters, and two slots for values. For its collective number k a rank writes its operand into
slot k % 2, then into its line what it does, then k. It waits until every rank has written k, and then reads all slots.
A slot that is still read is not overwritten: a rank writes k + 2 after it has seen k + 1 of every rank, and a rank
writes k + 1 after it has read the slots of k.

NOTE [All ranks choose one way]
What decides whether a collective goes this way is the same on all ranks: the group, and the operand's device, dtype and
size. One thing may differ: if other code follows the operators of a rank, such as a profiler on the first rank, that
rank has to start torch's own operator. It writes this into its line, and then all ranks start torch's operator.
Collectives that do not go this way are counted. So a rank that waits here for one that has started another collective
is told at once, and not after the group's timeout.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from autotp.errors import Error

LIMIT = 2**17
"""The most bytes of an operand. gloo sends larger ones while the rank computes; here a rank waits for the others."""
SPINS = 2000
"""How often a rank looks for another one before it sleeps between two looks: about 0.1 ms."""
FIRST_SLEEP, LAST_SLEEP = 2e-5, 1e-3
"""Seconds between two looks: they double from the first to the last."""
LOOK = 0.05
"""Seconds between two questions whether the other rank is still there."""
WORDS = 8
"""The words of a rank's line. It is one line of the processor's cache."""
HERE, ELSEWHERE, CLOSED, SAYS = 0, 1, 2, 3
"""Places of words: how many collectives a rank has started here, how many of another way; 1 if it has left; and what it
does with each of the two slots."""
APART = "ranks are at different collectives"
"""Begins the message of a RuntimeError."""
CPUS = 1024
"""The most cores of a machine."""
KINDS = "sum", "max", "gather"
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
)  # fmt: skip
OTHER_WAY = 1
"""The bit of a description that says that the rank starts torch's own operator."""
KEPT_VIEWS = 64
"""The sizes of operands whose views of the slots are kept."""


class Channel:
    """The shared memory of a process group, as one rank sees it. x: [...] or flat, at most `LIMIT` bytes.

    Args:
        memory: of all ranks, mapped.
        rank, size: this rank, and the number of ranks.
        processes: descriptors of the other ranks' processes, by rank, which become readable when a process ends.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, processes: dict[int, int]) -> None:
        self.rank, self.size = rank, size
        self._words = memoryview(memory)[: _header(size)].cast("q")
        # In inference mode the tensor could not be written into outside of it.
        with torch.inference_mode(False):
            self._slots = torch.frombuffer(memory, dtype=torch.uint8)[_header(size) :].view(2, size, LIMIT)
        self._mine, self._others = rank * WORDS, [r * WORDS for r in range(size) if r != rank]
        self._processes, self._seen = processes, 0
        self._failed: Callable[[], Exception] | None = None
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    @property
    def started(self) -> int:
        """The number of collectives that went this way."""
        return int(self._words[self._mine + HERE])

    @property
    def address(self) -> int:
        """The address of the memory, which is no rank's own: see `shared_addresses`."""
        return self._slots.untyped_storage().data_ptr()

    def takes(self, x: Tensor) -> bool:
        """True if a tensor in memory goes this way."""
        return x.dtype in DTYPES and x.numel() * x.element_size() <= LIMIT  # A sparse tensor has no `nbytes`.

    def pass_by(self) -> None:
        """Counts a collective that goes another way. Raises RuntimeError after a failure."""
        self._expect_whole()
        self._words[self._mine + ELSEWHERE] += 1

    def reduce(self, group: ProcessGroup, x: Tensor, op: str, out: Tensor) -> bool:
        """Writes the sum of the ranks' `x`, or their maximum, to `out`, which is contiguous and may be `x`.

        Returns:
            False if all ranks have to call torch's operator instead.

        Raises:
            RuntimeError: a rank did not come within the group's timeout, has ended, or does something else.
        """
        parts = self._exchanged(group, x, op)
        if parts is None:
            return False
        flat = out.data.view(-1)  # As c10d, it writes what autograd does not count.
        combined = torch.add if op == "sum" else torch.maximum
        combined(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            combined(flat, part, out=flat)
        return True

    def gather(self, group: ProcessGroup, x: Tensor, out: Tensor) -> bool:
        """Writes the ranks' `x` one after the other to `out`, which is contiguous. Otherwise as `reduce`."""
        parts = self._exchanged(group, x, "gather")
        if parts is None:
            return False
        torch.cat(parts, out=out.data.view(-1))
        return True

    def leave_to_torch(self, group: ProcessGroup, x: Tensor, op: str) -> None:
        """Tells the other ranks to call torch's operator. NOTE [All ranks choose one way]"""
        self._exchanged(group, x, op, other_way=True)

    def forbid(self) -> None:
        """Makes each later collective an error, in a process that was forked: its parent uses the memory."""
        self._failed = _forked

    def close(self) -> None:
        """Tells the other ranks that this one does not come any more."""
        self._words[self._mine + CLOSED] = 1
        for process in self._processes.values():
            with suppress(OSError):
                os.close(process)

    def _exchanged(self, group: ProcessGroup, x: Tensor, op: str, other_way: bool = False) -> list[Tensor] | None:
        """Returns the operands of all ranks, flat; None if some rank takes the other way.

        NOTE [An exception may come anywhere]
        Ctrl-C raises one between any two lines. A collective has started with the one write of its number. If the
        exception comes before, the next one has this number. If it comes afterwards, the others may still read what is
        older: so the next collective first waits for them.
        """
        self._expect_whole()
        words = self._words
        if self._seen < self.started:
            for place in self._others:
                self._await(group, place, self.started)
        count = self.started + 1
        slot = count % 2
        parts = None if other_way else self._parts(slot, x.numel(), x.dtype)  # A mode sees no operator but torch's.
        if parts is not None:
            parts[self.rank].view(x.shape).copy_(x.detach())
        says = _description(op, x)
        words[self._mine + SAYS + slot] = says | other_way
        # Last: who reads this number takes the slot and the description for written.
        words[self._mine + HERE] = count
        by_torch = other_way
        for place in self._others:
            self._await(group, place, count)
            peer_says = words[place + SAYS + slot]
            if peer_says & ~OTHER_WAY != says:
                self._fail(f"{APART}: {_said(says)} here, and {_said(peer_says)} on {_rank(place)}")
            by_torch = by_torch or bool(peer_says & OTHER_WAY)
        self._seen = count
        return None if by_torch else parts

    def _parts(self, slot: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        key = slot, numel, dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                views = list(self._slots[slot, :, : numel * dtype.itemsize].view(dtype).unbind())
            self._views[key] = views
        return views

    def _await(self, group: ProcessGroup, place: int, count: int) -> None:
        """Waits until another rank has come to this number."""
        words, index = self._words, place + HERE
        for _ in range(SPINS):
            if words[index] >= count:
                return
        began = time.monotonic()
        limit, look, pause = None, began + LOOK, FIRST_SLEEP
        while words[index] < count:
            time.sleep(pause)
            pause = min(2 * pause, LAST_SLEEP)
            if (now := time.monotonic()) > look:
                # Asked after a while only, as most waits are short.
                limit = limit or group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                self._expect(place, count, now - began, limit)
                look = now + LOOK

    def _expect(self, place: int, count: int, waited: float, limit: float) -> None:
        """Raises an error if the other rank does not come: it has ended or is elsewhere, or the time is over."""
        words = self._words
        ended = bool(words[place + CLOSED]) or _has_ended(self._processes[place // WORDS])
        elsewhere = words[place + ELSEWHERE] > words[self._mine + ELSEWHERE]
        if words[place + HERE] >= count:  # It came, and left afterwards.
            return
        if elsewhere:
            self._fail(f"{APART}: a small tensor here, and another collective on {_rank(place)}")
        if ended:
            self._fail(f"connection closed by peer {_rank(place)}, with which this rank shared memory")
        if waited > limit:
            self._fail(f"timed out after {limit:g} s: {_rank(place)} did not write to shared memory")

    def _fail(self, why: str) -> NoReturn:
        """Raises RuntimeError, now and in each later collective: they would meet other ones of the other ranks."""
        self._failed = partial(RuntimeError, why)
        self._words[self._mine + CLOSED] = 1  # The others need not wait for this rank.
        raise self._failed()

    def _expect_whole(self) -> None:
        if self._failed is not None:
            raise self._failed()


_channels: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup) -> Channel | None:
    """Returns the shared memory of a group of gloo; None if there is none. The first call is one of all ranks.

    There is none for ranks of several machines or containers, for more ranks than cores, and on other systems than
    Linux on x86-64, where writes of one core reach the others in their order.
    """
    try:
        return _channels[group]
    except KeyError:
        with _disable_current_modes():  # A mode that counts collectives counts those of the model.
            channel = _channels[group] = _opened(group)
        return channel


def started_here(group: ProcessGroup) -> int:
    """Returns the number of collectives of a group that went through shared memory."""
    channel = _channels.get(group)
    return 0 if channel is None else channel.started


def shared_addresses() -> set[int]:
    """Returns where storages begin that the groups share. Their size does not depend on the model."""
    return {channel.address for channel in _channels.values() if channel is not None}


def _opened(group: ProcessGroup) -> Channel | None:
    if group._get_backend(torch.device("cpu")).name() != "gloo":
        return None
    rank, size = group.rank(), group.size()
    descriptor = _memory(size) if rank == 0 else None
    facts = torch.zeros(size, 3 + CPUS // 64, dtype=torch.int64, device="cpu")
    facts[rank, :3] = torch.tensor([os.getpid(), -1 if descriptor is None else descriptor, _machine()], device="cpu")
    facts[rank, 3:] = torch.tensor(_cores(), device="cpu")
    group.allreduce([facts]).wait()
    everyone: list[list[int]] = facts.tolist()
    memory, processes = None, dict[int, int]()
    if _is_one_machine(everyone):
        # The memory has no name: the other ranks open it by the first rank's descriptor.
        memory = _mapped(f"/proc/{everyone[0][0]}/fd/{everyone[0][1]}", size)
        with suppress(OSError, AttributeError):
            for r in (r for r in range(size) if r != rank):
                # A descriptor, as the number of a process that has ended may be given to another one.
                processes[r] = os.pidfd_open(everyone[r][0])
    # All ranks go this way, or none.
    ready = torch.tensor([int(memory is not None and len(processes) == size - 1)], device="cpu")
    group.allreduce([ready], dist.ReduceOp.MIN).wait()
    # By now all ranks have mapped the memory.
    if descriptor is not None:
        os.close(descriptor)
    if memory is None or not ready.item():
        for process in processes.values():
            os.close(process)
        return None
    channel = Channel(memory, rank, size, processes)
    weakref.finalize(group, _close, channel, os.getpid()).atexit = False  # Functions of atexit may call the model.
    return channel


def _close(channel: Channel, process: int) -> None:
    if os.getpid() == process:  # A process that was forked leaves no group.
        channel.close()


def _forbid_all() -> None:
    for channel in _channels.values():
        if channel is not None:
            channel.forbid()


def _forked() -> Error:
    return Error(
        "a process that was forked uses the process group of its parent",
        fix="call the model in the process that made its group, or start processes by `spawn` and make a group there",
    )


os.register_at_fork(after_in_child=_forbid_all)


def _header(size: int) -> int:
    """Returns the bytes before the slots."""
    return -(-8 * WORDS * size // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory(size: int) -> int | None:
    """Returns a descriptor of new memory for a number of ranks, in no folder; None if the system has no such thing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    with suppress(OSError, AttributeError):
        descriptor = os.memfd_create("autotp")
        os.ftruncate(descriptor, _header(size) + 2 * size * LIMIT)
        return descriptor
    return None


def _mapped(path: str, size: int) -> mmap.mmap | None:
    length = _header(size) + 2 * size * LIMIT
    with suppress(OSError, ValueError), open(path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), length)
    return None


def _machine() -> int:
    """Returns a number of this machine, and of the container in which processes have their numbers; 0 if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        text = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        return int.from_bytes(sha256(text.encode()).digest()[:7], "big")
    return 0


def _cores() -> list[int]:
    """Returns the cores that this process may use, as bits of words."""
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        return [_word(sum(1 << c % 64 for c in cores if c // 64 == word)) for word in range(CPUS // 64)]
    return [0] * (CPUS // 64)


def _word(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _is_one_machine(everyone: list[list[int]]) -> bool:
    """True if all ranks are processes of one machine, the first one has memory, and there are cores for all."""
    union = [0] * (CPUS // 64)
    for row in everyone:
        union = [a | b % 2**64 for a, b in zip(union, row[3:], strict=True)]
    # A rank that waits keeps its core busy, so there must be a core for each.
    cores = sum(word.bit_count() for word in union)
    same_machine = len({row[2] for row in everyone}) == 1 and everyone[0][2] != 0
    return same_machine and everyone[0][1] >= 0 and cores >= dist.get_world_size()


def _rank(place: int) -> str:
    return f"rank {place // WORDS} of the group"


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _description(op: str, x: Tensor) -> int:
    return ((x.numel() * len(KINDS) + KINDS.index(op)) * len(DTYPES) + DTYPES.index(x.dtype)) << 1


def _said(description: int) -> str:
    """Returns a description as text."""
    rest, dtype = divmod(description >> 1, len(DTYPES))
    numel, op = divmod(rest, len(KINDS))
    return f"`{KINDS[op]}` of {numel} x {str(DTYPES[dtype]).removeprefix('torch.')}"
