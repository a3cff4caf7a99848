"""shared_memory: a backend of torch.distributed for the ranks of one machine, which sums small tensors in memory.

    from autotp.experimental import shared_memory

    shared_memory.register()
    torch.distributed.init_process_group("shared_memory")

gloo sends through sockets, and each collective wakes threads: that takes 0.4 ms, however small the tensor is, and more
where the ranks have computed before. A token of a small model needs tens of sums, one after the other. So a group of
this backend sums, and joins, tensors of the CPU of at most `LIMIT` bytes through memory that its ranks share. All else
it does as a group of gloo. That is so for each collective of a group whose ranks are on several machines.

Each rank has a line of counters, and two slots for values. For its collective number k a rank writes its operand into
slot k % 2, then into its line what it does, then k. It waits until every rank has written k, and then reads all slots.
A slot that is still read is not overwritten: a rank writes k + 2 after it has seen k + 1 of every rank, and a rank
writes k + 1 after it has read the slots of k.

NOTE [All ranks choose one way]
What decides whether a collective goes through memory is the same on all ranks: the group, what is computed, and the
operand's device, dtype and size. Other collectives are counted. So a rank that waits here for one that has started
another collective is told at once, and not after the group's timeout.

NOTE [An exception may come anywhere]
Ctrl-C raises one between any two lines. A collective has begun with the one write of its number. If the exception comes
before, the next one has this number. If it comes afterwards, the others may still read what is older: so the next
collective first waits for them, as it does behind one that nobody has waited for.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from autotp.distributed.launch import launch
from autotp.errors import Error
from autotp.groups.failures import RanksApart
from autotp.ops.eager_mode import is_computed

NAME = "shared_memory"
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
"""Places of words: how many collectives a rank has begun here, how many over gloo; 1 if it has left; and what it does
with each of the two slots."""
CPUS = 1024
"""The most cores of a machine, and the most ranks of a group that shares memory."""
OPERATIONS = "sum", "max", "gather"
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
)  # fmt: skip
KEPT_VIEWS = 64
"""The sizes of operands whose views of the slots are kept."""


def register() -> None:
    """Makes `init_process_group("shared_memory")` known to torch.distributed. Every rank calls it first.

    A group of this backend is one of gloo, but for sums, maxima and gathers into one tensor of at most 128 KiB of the
    CPU, which go through memory that the ranks share. It warns, and is a group of gloo, if it has more ranks than
    cores, or if the system forbids to share. If its ranks are on several machines, it is a group of gloo.

    Raises:
        Error: the system is not Linux on x86-64, where writes of one core reach the others in their order.

    Example:
        >>> from autotp.experimental import shared_memory
        >>> shared_memory.register()
        >>> torch.distributed.is_backend_available("shared_memory")
        True
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Error(
            f"the backend {NAME!r} needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}",
            fix='torch.distributed.init_process_group("gloo")',
        )
    dist.Backend.register_backend(NAME, lambda options, _: SharedMemoryGroup(options), True, ["cpu"])


class SharedMemoryGroup(ProcessGroup):
    """A process group whose small tensors go through memory; all else is gloo's.

    Args:
        options: what torch says of the new group: its store, rank, size and timeout.
    """

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # The one with a store cannot be inherited from.
        gloo = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        gloo.options.global_ranks_in_group, gloo.options.group_name = options.global_ranks_in_group, options.group_id
        # torch's own methods of this group would hold Python's lock while gloo's threads wait for it. Those of another
        # group, whose class is no class of Python, do not.
        self.inner = ProcessGroup(options.store, rank, size)
        for group in (self, self.inner):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.memory = _opened(gloo, rank, size)
        if self.memory is not None:
            # Not at the end of the process: functions of atexit may call the model.
            weakref.finalize(self, self.memory.close).atexit = False

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Sums, or takes maxima, in place."""
        xs = [tensors] if isinstance(tensors, Tensor) else tensors
        operation = _operation_of(getattr(opts, "reduceOp", opts))
        if self.memory is not None and operation is not None and len(xs) == 1 and _is_small(xs[0]):
            return self.memory.begin(operation, xs[0], xs[0])
        return self.over_gloo("allreduce", tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Writes the ranks' tensors one after the other to `output`."""
        return self._begin_gather(output, input) or self.over_gloo("all_gather_single", output, input, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Does the same for several tensors: torch's functional collective sends its one tensor so."""
        work = self._begin_gather(outputs[0], inputs[0]) if len(inputs) == len(outputs) == 1 else None
        return work or self.over_gloo("all_gather_single_coalesced", outputs, inputs, opts)

    def over_gloo(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Starts a collective over gloo, by a method of torch's; an argument that is None was left out."""
        if self.memory is not None:
            self.memory.pass_by()
        return self.by_torch(name, *(x for x in args if x is not None), **kwargs)

    def by_torch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of torch's of the group of gloo."""
        return getattr(self.inner, name)(*args, **kwargs)

    def shutdown(self) -> None:
        """Leaves the group, as `destroy_process_group` asks."""
        if self.memory is not None:
            self.memory.close()
        self.inner.shutdown()

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives this rank has begun, both ways."""
        begun = 0 if self.memory is None else self.memory.begun
        inner: Any = self.inner
        return int(inner._get_sequence_number_for_group()) + begun

    def _begin_gather(self, out: Tensor, x: Tensor) -> SmallWork | None:
        fits = out.dtype == x.dtype and out.numel() == self.size() * x.numel()
        return self.memory.begin("gather", x, out) if self.memory is not None and fits and _is_small(x) else None


COUNTED = (
    "allgather", "all_to_all_single", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "scatter",
)  # fmt: skip
"""The other collectives of all ranks."""
OF_TWO_RANKS = "send", "recv", "recv_anysource"


def _passing(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: call(self, name, *args, **kwargs)


for _name in COUNTED:
    setattr(SharedMemoryGroup, _name, _passing(SharedMemoryGroup.over_gloo, _name))
for _name in OF_TWO_RANKS:
    setattr(SharedMemoryGroup, _name, _passing(SharedMemoryGroup.by_torch, _name))


def _operation_of(op: Any) -> str | None:
    return "sum" if op == dist.ReduceOp.SUM else "max" if op == dist.ReduceOp.MAX else None


def _is_small(x: Tensor) -> bool:
    """True if a tensor goes through memory. (A sparse tensor has no `nbytes`.)"""
    strided = x.is_cpu and x.layout is torch.strided and x.dtype in DTYPES
    return strided and x.numel() * x.element_size() <= LIMIT and is_computed(x)


class SmallWork(dist.Work):
    """A collective through memory that has begun: `wait` reads the operands of all ranks, and writes the result.

    Attributes:
        count: its number.
    """

    def __init__(self, memory: Memory, count: int, says: int, parts: Sequence[Tensor], out: Tensor) -> None:
        super().__init__()
        self.count, self._is_done = count, False
        self._memory, self._says, self._parts, self._out = memory, says, parts, out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operands of the other ranks, and writes the result; returns True.

        Raises:
            RuntimeError: a rank did not come within the timeout, has ended, or does something else.
        """
        if not self._is_done:
            self._memory.expect_all(self.count, self._says, timeout)
            self._write()
            self._is_done = True
            self._memory.forget(self)
        return True

    def is_completed(self) -> bool:
        """Returns whether the result is there, or can be written without waiting for a rank."""
        return self._is_done or (self._memory.are_all_at(self.count) and self.wait())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Waits, and returns a future that has the result."""
        self.wait()
        future = torch.futures.Future[list[Tensor]]()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        """Returns the tensor that the result is in."""
        return [self._out]

    def _write(self) -> None:
        parts, operation = self._parts, _said(self._says)[0]
        out = self._out.data  # As c10d, it writes what autograd does not count.
        flat = out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())
        if operation == "gather":
            torch.cat(list(parts), out=flat)
        else:
            combined = torch.add if operation == "sum" else torch.maximum
            combined(parts[0], parts[1], out=flat)
            for part in parts[2:]:
                combined(flat, part, out=flat)
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))


class Memory:
    """The memory that the ranks of a group share, as one rank sees it.

    Args:
        memory: of all ranks, mapped.
        processes: descriptors of the other ranks' processes, by rank, which become readable when a process ends.
        gloo: has the timeout of the group.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, processes: dict[int, int], gloo: Any) -> None:
        self.rank = rank
        self._words = memoryview(memory)[: _header(size)].cast("q")
        # In inference mode the tensor could not be written into outside of it.
        with torch.inference_mode(False):
            self._slots = torch.frombuffer(memory, dtype=torch.uint8)[_header(size) :].view(2, size, LIMIT)
        self._mine, self._others = rank * WORDS, [r * WORDS for r in range(size) if r != rank]
        self._processes, self._gloo, self._process = processes, gloo, os.getpid()
        self._last: SmallWork | None = None
        self._failed: Callable[[], Exception] | None = None
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    @property
    def begun(self) -> int:
        """The number of collectives that this rank has begun here."""
        return int(self._words[self._mine + HERE])

    def pass_by(self) -> None:
        """Counts a collective that goes over gloo. Raises RuntimeError after a failure."""
        self._expect_usable()
        self._words[self._mine + ELSEWHERE] += 1

    def begin(self, operation: str, x: Tensor, out: Tensor) -> SmallWork:
        """Writes this rank's operand; the result will be in `out`, which may be `x`. x: [...]

        Raises:
            RuntimeError: as `SmallWork.wait`, for the collective before.
        """
        self._expect_usable()
        words, begun = self._words, self.begun
        # NOTE [An exception may come anywhere]
        if self._last is not None and self._last.count <= begun:
            self._last.wait()
        count, says = begun + 1, _description(operation, x)
        slot = count % 2
        parts = self._parts(slot, x.numel(), x.dtype)
        parts[self.rank].view(x.shape).copy_(x.detach() if x.requires_grad else x)
        words[self._mine + SAYS + slot] = says
        self._last = SmallWork(self, count, says, parts, out)
        # Last: who reads this number takes the slot and the description for written.
        words[self._mine + HERE] = count
        return self._last

    def forget(self, work: SmallWork) -> None:
        """Keeps a collective no longer whose result is there."""
        if self._last is work:
            self._last = None

    def are_all_at(self, count: int) -> bool:
        """Returns whether all ranks have begun this collective."""
        return all(self._words[place + HERE] >= count for place in self._others)

    def expect_all(self, count: int, says: int, timeout: timedelta | None) -> None:
        """Waits until all ranks have begun a collective; raises RuntimeError as `SmallWork.wait` says."""
        for place in self._others:
            self._await(place, count, timeout)
            peer_says = self._words[place + SAYS + count % 2]
            if peer_says != says:
                texts = ["`{}` of {} x {}".format(*_said(description)) for description in (says, peer_says)]
                self._fail(
                    RanksApart, f"ranks are at different collectives: {texts[0]} here, and {texts[1]} on {_rank(place)}"
                )

    def close(self) -> None:
        """Tells the other ranks that this one does not come any more. (A process that was forked leaves no group.)"""
        if os.getpid() != self._process:
            return
        self._words[self._mine + CLOSED] = 1
        while self._processes:
            with suppress(OSError):
                os.close(self._processes.popitem()[1])

    def _parts(self, slot: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns the operands of all ranks, flat."""
        key = slot, numel, dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                views = list(self._slots[slot, :, : numel * dtype.itemsize].view(dtype).unbind())
            self._views[key] = views
        return views

    def _await(self, place: int, count: int, timeout: timedelta | None) -> None:
        """Waits until another rank has come to this number."""
        words, index = self._words, place + HERE
        for _ in range(SPINS):
            if words[index] >= count:
                return
        self._expect_usable()
        began = time.monotonic()
        look, pause = began + LOOK, FIRST_SLEEP
        while words[index] < count:
            time.sleep(pause)
            pause = min(2 * pause, LAST_SLEEP)
            if (now := time.monotonic()) > look:
                # Asked after a while only, as most waits are short.
                limit = (timeout or self._gloo.options._timeout).total_seconds()
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
            problem = "ranks are at different collectives: a small tensor here, and another collective on"
            self._fail(RanksApart, f"{problem} {_rank(place)}")
        if ended:
            self._fail(RuntimeError, f"connection closed by peer {_rank(place)}, with which this rank shared memory")
        if waited > limit:
            self._fail(RuntimeError, f"timed out after {limit:g} s: {_rank(place)} did not write to shared memory")

    def _fail(self, error: type[RuntimeError], why: str) -> NoReturn:
        """Raises an error, now and in each later collective: they would meet other ones of the other ranks."""
        self._failed = partial(error, why)
        self._words[self._mine + CLOSED] = 1  # The others need not wait for this rank.
        raise self._failed()

    def _expect_usable(self) -> None:
        if self._failed is not None:
            raise self._failed()
        if os.getpid() != self._process:
            raise Error(
                "a process that was forked uses the process group of its parent",
                fix="call the model in the process that made its group, or start processes by `spawn` and make a group "
                "there",
            )


def _opened(gloo: Any, rank: int, size: int) -> Memory | None:
    """Returns the memory of a new group; None if its ranks are on several machines or in several containers."""
    if size == 1 or size > CPUS:
        return None
    descriptor = _memory(size) if rank == 0 else -1
    facts = torch.zeros(size, 4 + CPUS // 64, dtype=torch.int64, device="cpu")
    facts[rank] = torch.tensor([os.getpid(), descriptor, _machine(), _ranks_here(size), *_cores()], device="cpu")
    gloo.allreduce([facts]).wait()
    everyone: list[list[int]] = facts.tolist()
    if len({row[2] for row in everyone}) > 1:
        memory, problem = None, ""
    elif _count_cores(everyone) < everyone[0][3]:  # A rank that waits keeps its core busy.
        memory, problem = None, f"this machine has {everyone[0][3]} ranks, and {_count_cores(everyone)} cores"
    else:
        # The memory has no name: the other ranks open it by the first rank's descriptor.
        memory = _mapped(f"/proc/{everyone[0][0]}/fd/{everyone[0][1]}", size)
        problem = "the system does not let the ranks open each other's memory"
    processes = dict[int, int]()
    if memory is not None:
        with suppress(OSError, AttributeError):
            for r in (r for r in range(size) if r != rank):
                # A descriptor, as the number of a process that has ended may be given to another one.
                processes[r] = os.pidfd_open(everyone[r][0])
    # All ranks go this way, or none.
    ready = torch.tensor([int(memory is not None and len(processes) == size - 1)], device="cpu")
    gloo.allreduce([ready], dist.ReduceOp.MIN).wait()
    # By now all ranks have mapped the memory.
    if descriptor >= 0:
        os.close(descriptor)
    if memory is not None and ready.item():
        return Memory(memory, rank, size, processes, gloo)
    for process in processes.values():
        os.close(process)
    if problem and rank == 0:
        warnings.warn(f"the backend {NAME!r} sends all over gloo: {problem}", stacklevel=2)
    return None


def _header(size: int) -> int:
    """Returns the bytes before the slots."""
    return -(-8 * WORDS * size // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory(size: int) -> int:
    """Returns a descriptor of new memory for a number of ranks, in no folder; -1 if the system has no such thing."""
    with suppress(OSError, AttributeError):
        descriptor = os.memfd_create("autotp")
        os.ftruncate(descriptor, _header(size) + 2 * size * LIMIT)
        return descriptor
    return -1


def _mapped(path: str, size: int) -> mmap.mmap | None:
    length = _header(size) + 2 * size * LIMIT
    with suppress(OSError, ValueError), open(path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), length)
    return None


def _machine() -> int:
    """Returns a number of this machine, and of the container in which processes have their numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    text = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def _ranks_here(size: int) -> int:
    """Returns the number of ranks on this machine, as far as their launcher tells it, for a group of this size."""
    started = launch()
    everyone = dist.get_world_size() if dist.is_initialized() else size
    return max(size, everyone if started is None else started.local_size)


def _cores() -> list[int]:
    """Returns the cores that this process may use, as bits of words."""
    cores = os.sched_getaffinity(0)
    words = (sum(1 << c % 64 for c in cores if c // 64 == word) for word in range(CPUS // 64))
    return [bits - 2**64 if bits >= 2**63 else bits for bits in words]


def _count_cores(everyone: Sequence[Sequence[int]]) -> int:
    """Returns the number of cores that the ranks may use together."""
    union = [0] * (CPUS // 64)
    for row in everyone:
        union = [bits | word % 2**64 for bits, word in zip(union, row[4:], strict=True)]
    return sum(bits.bit_count() for bits in union)


def _rank(place: int) -> str:
    return f"rank {place // WORDS} of the group"


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _description(operation: str, x: Tensor) -> int:
    return (x.numel() * len(OPERATIONS) + OPERATIONS.index(operation)) * len(DTYPES) + DTYPES.index(x.dtype)


def _said(description: int) -> tuple[str, int, str]:
    """Returns what a description stands for: operation, number of elements, dtype."""
    rest, dtype = divmod(description, len(DTYPES))
    numel, operation = divmod(rest, len(OPERATIONS))
    return OPERATIONS[operation], numel, str(DTYPES[dtype]).removeprefix("torch.")
