"""Makes a torch without CUDA believe that it has NVIDIA cards: `pretend()`, before models and process groups are made.

Tensors of "cuda:N" are plain tensors with real values (device.cpp), and `torch.distributed` has an "nccl" that refuses
what NCCL refuses and fails as NCCL fails (nccl.cpp). Not pretended: streams (a call has run when it returns), fused
kernels, Inductor's kernels, speed. On a machine with cards nothing is pretended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from cards.build import library

DEVICES = "AUTOTP_TESTS_CARDS"
"""The environment variable with the number of cards that tests pretend; ranks and programs that tests start read it."""
REAL = torch.cuda.is_available()
"""Whether this machine has cards."""


class Cards:
    """The compiled library of this process, once cards are pretended."""

    module: ModuleType | None = None


def pretended() -> ModuleType:
    """Returns the compiled library; cards are pretended."""
    assert Cards.module is not None, "pretend() first"
    return Cards.module


def asked_for() -> bool:
    """Returns whether the environment asks for cards."""
    return DEVICES in os.environ


def pretend(count: int | None = None) -> None:
    """Gives this process `count` cards, by default as many as the environment says, or 8.

    Raises:
        NoCompiler: there is no C++ compiler.
    """
    if REAL or Cards.module is not None:
        return
    Cards.module = library()
    Cards.module.set_device_count(count or int(os.environ.get(DEVICES, "8")))
    for module, names in _replacements(Cards.module).items():
        for name, value in names.items():
            setattr(module, name, value)


# ---- torch.cuda


class Event:
    """An event: the copies to pinned memory that were begun before it have arrived when it says so.

    `query` says no once, as an event does that was recorded just now.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.copies: int | None = None
        self.queries = 0

    def record(self, stream: Any = None) -> None:
        self.copies, self.queries = pretended().last_copy(), 0

    def query(self) -> bool:
        self.queries += 1
        if self.copies is None or self.queries > 1:
            self._arrive()
            return True
        return False

    def synchronize(self) -> None:
        pretended().wait_until_it_answers()
        _report("Event.synchronize")
        self._arrive()

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0

    def _arrive(self) -> None:
        if self.copies is not None:
            pretended().finish_copies_until(self.copies)


class Stream:
    """A stream of the only order that there is."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", pretended().current_device() if device is None else _index(device))
        self.priority, self.cuda_stream, self.stream_id = priority, 0, id(self)
        self.copies: int | None = None

    def wait_stream(self, stream: Any) -> None:
        """What this stream does next finds what was copied to pinned memory within `with stream`."""
        if getattr(stream, "copies", None) is not None:
            pretended().finish_copies_until(stream.copies)

    def wait_event(self, event: Any) -> None:
        event._arrive()  # What the stream does next may read the pinned memory; it would be later in the order.

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pretended().wait_for_device()
        _report("Stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.copies = pretended().last_copy()


class OnDevice:
    """A region in which a card is the current one: `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = pretended().current_device()
        pretended().set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        pretended().set_device(self.before)


class Properties:
    """What `torch.cuda.get_device_properties` says of an H100."""

    name, total_memory, major, minor, multi_processor_count = "Pretended H100", 80 * 2**30, 9, 0, 132
    warp_size, max_threads_per_multi_processor, L2_cache_size, regs_per_multiprocessor = 32, 2048, 50 * 2**20, 65536
    is_integrated, gcnArchName, shared_memory_per_block_optin = False, "sm_90", 232448

    def __init__(self, index: int = 0) -> None:
        self.uuid, self.pci_bus_id, self.pci_device_id, self.pci_domain_id = f"GPU-{index}", index, 0, 0


def _index(device: Any = None) -> int:
    if device is None:
        return int(pretended().current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(pretended().current_device())
    index = torch.device(device).index
    return int(pretended().current_device()) if index is None else index


def _exchanged(index: int) -> int:
    before = int(pretended().current_device())
    if index >= 0:
        pretended().set_device(index)
    return before


def _synchronize(device: Any = None) -> None:
    pretended().wait_for_device()
    _report("torch.cuda.synchronize")


def _report(event: str) -> None:
    from cards.spies import report

    report(event, 0)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Warns of each wait of the host from now on, as torch does with the mode "warn"."""
    from cards.spies import warn_of_waits

    warn_of_waits(mode in (1, "warn"))


def _replacements(cards: ModuleType) -> dict[Any, dict[str, Any]]:
    """Returns, for each module or class of torch, the names that are replaced and their values."""
    generators = tuple(cards.default_generator(index) for index in range(cards.device_count()))
    default = Stream()

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    random = {
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state),
        "manual_seed": lambda seed: generators[_index()].manual_seed(seed) and None,
        "manual_seed_all": seed_all,
        "default_generators": generators,
    }
    memory = {
        "memory_allocated": lambda device=None: cards.live_bytes(),
        "max_memory_allocated": lambda device=None: cards.peak_bytes(),
        "memory_reserved": lambda device=None: cards.live_bytes(),
        "max_memory_reserved": lambda device=None: cards.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: cards.reset_peak(),
        "mem_get_info": lambda device=None: (79 * 2**30, 80 * 2**30),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }
    device = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # `torch.utils.checkpoint` asks whether there is a random state of the device.
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": cards.device_count,
        "current_device": cards.current_device,
        "set_device": lambda device: cards.set_device(_index(device)),
        "device": OnDevice,
        "_exchange_device": _exchanged,
        "_maybe_exchange_device": partial(_exchanged),  # Dynamo asks for two functions.
        "get_device_properties": lambda device=None: Properties(_index(device)),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: True,
    }
    streams = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: default,
        "default_stream": lambda device=None: default,
        "stream": lambda stream: stream if isinstance(stream, Stream) else contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "synchronize": _synchronize,
        "set_sync_debug_mode": _set_sync_debug_mode,
    }
    tensor = {
        "pin_memory": lambda x, device=None: x if cards.is_pinned(x) else cards.pin(x),
        "is_pinned": lambda x, device=None: cards.is_pinned(x),
        "record_stream": lambda x, stream: None,
    }
    c10d_names = {"ProcessGroupNCCL": Nccl, "is_nccl_available": lambda: True, "_NCCL_AVAILABLE": True}
    return {
        torch.cuda: {**random, **memory, **device, **streams},
        torch.cuda.random: random,
        # Not the public function: Dynamo has a rule for that.
        torch.cuda.graphs: {"_cuda_isCurrentStreamCapturing": lambda: False},
        torch.cuda.memory: memory,
        torch.version: {"cuda": "12.9"},
        torch._C: {"_nccl_version": lambda: (2, 27, 3)},
        torch.cuda.nccl: {"version": lambda: (2, 27, 3)},
        torch.Tensor: tensor,
        torch.UntypedStorage: {
            "resize_": _resizes(torch.UntypedStorage.resize_),
            "clone": _clones(torch.UntypedStorage.clone),
            "to": _moves(torch.UntypedStorage.to),
            "cpu": lambda storage: storage.to(device="cpu"),
        },
        c10d: c10d_names,
        dist: c10d_names,
    }


def _of_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor of the bytes of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _resizes(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, count: int) -> Any:
        if self.device.type != "cuda":
            return of_torch(self, count)
        pretended().resize_storage(_of_bytes(self), count)
        return self

    return resize_


def _clones(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def clone(self: torch.UntypedStorage) -> Any:
        return of_torch(self) if self.device.type != "cuda" else _of_bytes(self).clone().untyped_storage()

    return clone


def _moves(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == self.device.type or "cuda" not in (torch.device(device).type, self.device.type):
            return of_torch(self, device=device, non_blocking=non_blocking)
        return _of_bytes(self).to(device).untyped_storage()

    return to


# ---- NCCL


class Options(dist.Backend.Options if hasattr(dist.Backend, "Options") else torch._C._distributed_c10d.Backend.Options):
    """`ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__("nccl")
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class _NcclType(type):
    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, pretended().PretendedNccl)

    def __call__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
        if options.split_from is not None:
            options.split_from.enter_split()
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("pretended", store), rank, size, options._timeout)
        communicators.append((options.group_name, size))
        priorities[options.group_name] = options.is_high_priority_stream
        return pretended().PretendedNccl(rank, size, gloo, options, options.group_name)


class Nccl(metaclass=_NcclType):
    """`torch.distributed.ProcessGroupNCCL`: makes a communicator over gloo."""

    Options = Options


communicators: list[tuple[str, int]] = []
"""The name and the size of each communicator that this process made."""


priorities: dict[str, bool] = {}
"""Name of a group -> whether the streams of its communicator have high priority."""


def has_priority(group: Any) -> bool:
    """Returns whether the collectives of a group of NCCL run on streams of high priority."""
    if REAL:
        return bool(group._get_backend(torch.device("cuda")).options.is_high_priority_stream)
    return priorities[group.group_name]


@contextlib.contextmanager
def communicators_made() -> Iterator[list[tuple[str, int]]]:
    """A region; yields the list of the names and sizes of communicators that are made in it."""
    before = len(communicators)
    made: list[tuple[str, int]] = []
    yield made
    made += communicators[before:]
