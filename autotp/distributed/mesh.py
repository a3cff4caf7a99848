"""The processes that hold one model together, and the place of this process among them."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.attached import all_attached, attach, attached_if_any
from autotp.distributed.launch import Launch, launch, meeting, ranks_on_one_card, store_of
from autotp.distributed.peers.gloo_interface import choose_interface
from autotp.distributed.peers.heartbeat import SILENCE, answered
from autotp.distributed.peers.never_ending import begin_watching
from autotp.error_file import report_errors
from autotp.errors import Error, call_in_progress
from autotp.groups.members_only import connecting_late, without_others
from autotp.groups.one_thread import in_collective
from autotp.groups.point_to_point import count_from_here
from autotp.groups.process_group import backend_of, process_group
from autotp.ops.collectives import communicate, gather
from autotp.ops.random_state import numpy_state, set_numpy_state

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Mesh:
    """One axis of processes, and this process's place on it.

    Attributes:
        axis: its name in graphs and errors.
        size: number of processes.
        rank: the rank of this process.
        group: name of the process group; None for a single rank without a group.
        device: the device of this process.
        runs: number of ranks -> name of the group of so many neighbours that this process is in.
        names: the names of the ranks in errors, if there are several axes.
        number: a unique number, drawn by the first process.
        replicas: the axis of the ranks that hold the same part in other replicas, if autotp arranged all processes as
            replicas (`tp` is smaller than their number, and there is no mesh of the user's).
        sequence: the axis `cp`: the ranks that hold the same parameters, and other parts of the sequences.
        together: all ranks that hold one model together, along `tp` and `cp`, if there is an axis `cp`.
        axes: names of groups; a sum over the first, then over the next, and so on is a sum over all ranks. With many
            ranks it takes fewer messages than the sum over `group`.
    """

    axis: str = "tp"
    size: int = 1
    rank: int = 0
    group: str | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    runs: tuple[tuple[int, str], ...] = ()
    number: int = field(default=0, compare=False)
    names: tuple[str, ...] = ()
    replicas: Mesh | None = field(default=None, compare=False)
    sequence: Mesh | None = field(default=None, compare=False)
    together: Mesh | None = field(default=None, compare=False)
    axes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def groups(self) -> dict[str, str | None]:
        """Name in graphs -> process group: `tp`, and `tp/4` for groups of four neighbouring ranks; `cp`."""
        own_groups = {self.axis: self.group, **{f"{self.axis}/{n}": name for n, name in self.runs}}
        return own_groups if self.sequence is None else own_groups | self.sequence.groups

    @property
    def everyone(self) -> Mesh:
        """All ranks that hold one model together: what one of them is told, all are told."""
        return self.together or self

    @property
    def cp(self) -> int:
        """The number of ranks that sequences are cut over."""
        return 1 if self.sequence is None else self.sequence.size

    @property
    def cp_rank(self) -> int:
        """The rank of this process among those that sequences are cut over."""
        return 0 if self.sequence is None else self.sequence.rank

    def alone(self) -> Mesh:
        """Returns the axis by itself: its ranks make a call that those of other axes do not make."""
        return replace(self, together=None, sequence=None, replicas=None)

    def named(self, ranks: Sequence[int]) -> str:
        """Returns the names of these ranks of `everyone` for errors."""
        if self.together is not None:
            return self.together.named(ranks)
        if self.names:
            return "; ".join(self.names[rank] for rank in ranks)
        return f"{self.axis} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def __str__(self) -> str:
        return f"{self.axis}={self.size}, rank {self.rank} on {self.device}"


def make_mesh(
    tp: int | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
    cp: int | None = None,
) -> Mesh:
    """Returns the tensor-parallel axis: that of `mesh`, else all processes, as torchrun, srun or mpirun started them.

    Without `mesh` it initialises torch.distributed if necessary (NCCL if each process has its own GPU, else gloo) and
    makes groups with `timeout`: of all processes, or of `tp` neighbours each. `cp` such groups, neighbours again, hold
    a model together; further ones are replicas. With a mesh it makes new groups only if `timeout` is given, and one of
    all ranks that hold a model together.

    Args:
        tp: the size; None means all processes, or the size of the mesh.
        mesh: one-dimensional, or with a dimension named "tp".
        cp: the number of ranks that sequences are cut over; None means the mesh's dimension "cp", or 1.
        device: this process's device; None means the kind of the mesh, else the GPU of LOCAL_RANK, else the CPU.
        timeout: None means the timeout of the mesh, else of the default group, else ten minutes.

    Raises:
        Error: the number of processes is no multiple of `tp`, a mesh has no "tp" or another size, the process has no
            GPU, or `timeout` is not a positive timedelta.
    """
    expect_timeout(timeout)
    for name, size in {"tp": tp, "cp": cp}.items():
        if size is not None:
            expect_size(size, name)
    if mesh is not None:
        return _from_device_mesh(tp, mesh, device, timeout, cp)
    cp = cp or 1
    _check_world(tp, cp, world_size())
    if not dist.is_initialized() and launch() is None:
        if tp is None:
            notice = (
                "there is one process, so nothing is cut. To cut, start several: torchrun --nproc-per-node 8 train.py"
            )
            warnings.warn(f"{notice}. For one process, write tp=1", stacklevel=5)
        return Mesh(device=_own_device(device))
    if timeout is None:
        timeout = timeout_of(dist.group.WORLD) if dist.is_initialized() else TIMEOUT
    return _over_the_world(tp or world_size() // cp, cp, device, timeout)


def tell_errors() -> None:
    """Has an error that ends this process stand last in what its launch prints. See NOTE [The last line]."""
    if (started := launch()) is not None:
        report_errors(started.rank)


def group_of(mesh: Mesh) -> Any:
    """Returns torch's object of the mesh's group, which must exist."""
    return _resolved(str(mesh.group))


def _resolved(name: str) -> Any:
    return process_group(name)


def new_group(ranks: Sequence[int] | None, timeout: timedelta, axis: str = "global", backend: str | None = None) -> Any:
    """Returns a new process group, which its own ranks make, and no others.

    Args:
        ranks: global ranks; None means all. Ranks that are together in several new groups make them in the same order.
        axis: the group's name in errors.
        backend: None means that of the default group.

    Raises:
        Error: a rank was lost meanwhile, or torch is set to make groups by all ranks only.
    """
    world: Any = dist.group.WORLD
    members = list(range(world.size()) if ranks is None else ranks)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def made() -> Any:
        if device is not None:  # Each thread has its own current device.
            torch.cuda.set_device(device)
        options = _with_priority(backend or dist.get_backend_config(world), timeout)
        return dist.new_group(
            members, timeout, backend, pg_options=options, use_local_synchronization=True, group_desc=axis
        )

    with in_collective("new_group", world.group_name), without_others(members, axis):
        try:
            return answered(made, timeout.total_seconds() + SILENCE)
        except TimeoutError as error:
            raise RuntimeError(f"timed out: {error}") from error
        except NotImplementedError as error:
            reason = str(error).partition(";")[0]
            fix = "TORCH_DISTRIBUTED_USE_TORCHCOMMS=0"
            raise Error(f"torch cannot make a process group of some ranks only: {reason}", fix=fix) from error


def _with_priority(backends: str, timeout: timedelta) -> Any:
    """Returns the options of a new group whose collectives a GPU runs before products; None if NCCL is not in it.

    Both are ready at the same time where backward sums one gradient and computes the next: with equal priority the
    products may fill the GPU, and the sum begins when they end.
    """
    if "nccl" not in backends:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def timeout_of(group: Any) -> timedelta:
    """Returns the timeout of a group's collectives."""
    options = group._get_backend(group._device_types[0]).options  # None of a backend that waits for nothing.
    timeout: timedelta = dist.default_pg_timeout if options is None else options._timeout
    return timeout


def expect_timeout(timeout: Any) -> None:
    """Raises Error unless `timeout` is None or a positive timedelta."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise Error(f"timeout={timeout!r} is no time", expected="a datetime.timedelta", fix="timedelta(seconds=60)")


@contextmanager
def waiting(mesh: Mesh, timeout: timedelta | None) -> Iterator[None]:
    """A region in which the collectives of a mesh have this timeout; None does not change it.

    Raises:
        Error: `timeout` is not a positive timedelta.
    """
    expect_timeout(timeout)
    names = [name for name in dict.fromkeys((*mesh.groups.values(), mesh.everyone.group)) if name is not None]
    groups = [] if timeout is None else [_resolved(name) for name in names]
    before = [timeout_of(group) for group in groups]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for group, group_timeout in zip(groups, before, strict=True):
            dist.distributed_c10d._set_pg_timeout(group_timeout, group)


def expect_size(size: Any, axis: str = "tp") -> None:
    """Raises Error unless `size` is a number of ranks."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise Error(f"{axis}={size!r} is not a whole number of 1 or more", fix=f"{axis}=2")


def broadcast_from_first(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Overwrites `tensor` bit for bit with that of the first rank of `mesh.everyone`, and returns it. tensor: [...]"""
    mesh = mesh.everyone
    if mesh.group is None or mesh.size == 1 or tensor.numel() == 0:
        return tensor
    if tensor.layout is not torch.strided:
        return _sparse_from_first(tensor, mesh)
    source = tensor.detach()
    # gloo broadcasts a tensor with gaps wrongly, without an error (pytorch#192920).
    sent = source.contiguous()
    communicate("broadcast_", sent.view(-1).view(torch.uint8), 0, mesh.group)
    if sent.data_ptr() != source.data_ptr():
        source.copy_(sent)
    return tensor


def _sparse_from_first(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The same for a sparse tensor; the first rank's may have another number of elements."""
    coordinates = tensor.layout is torch.sparse_coo
    if coordinates:
        pieces = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        pieces = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        pieces = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    lengths = [n for piece in pieces for n in piece.shape]
    coalesced, *first = gather_ints([coordinates and tensor.is_coalesced(), *lengths], mesh)[0]
    of_first = iter(first)
    # What is sent has the first rank's sizes, which a rank's own pieces may not have.
    sent = [piece.detach().new_empty([next(of_first) for _ in piece.shape]) for piece in pieces]
    for piece, part in zip(sent, pieces, strict=True):
        broadcast_from_first(piece.copy_(part) if piece.shape == part.shape else piece, mesh)
    make: Any = torch.sparse_coo_tensor if coordinates else torch.sparse_compressed_tensor
    how = {"is_coalesced": bool(coalesced)} if coordinates else {"layout": tensor.layout}
    result = make(*sent, size=tensor.shape, check_invariants=False, **how)
    return tensor.resize_as_sparse_(result).copy_(result)


def follow_first_random_state(mesh: Mesh) -> None:
    """Gives every rank the random state of the first rank: on the CPU and on its device."""
    # NCCL sends tensors of a GPU only.
    state = torch.get_rng_state().to(mesh.device)
    torch.set_rng_state(broadcast_from_first(state, mesh).cpu())
    if mesh.device.type == "cuda":
        state = torch.cuda.get_rng_state(mesh.device).to(mesh.device)
        torch.cuda.set_rng_state(broadcast_from_first(state, mesh).cpu(), mesh.device)


def follow_first_numpy_state(mesh: Mesh) -> None:
    """Gives every rank the state of `numpy.random` on the first rank.

    Raises:
        Error: on every rank, if the first rank has another generator there than numpy's own.
    """
    if mesh.everyone.size > 1:
        state = broadcast_from_first(numpy_state().to(mesh.device), mesh).cpu()
        # Zeros stand for another generator. All ranks see them, so all raise.
        if not state.any():
            raise Error(
                "the model draws from `numpy.random`, whose generator was replaced, so ranks cannot draw the same "
                "numbers",
                fix="no np.random.set_bit_generator",
            )
        set_numpy_state(state)


FRAME = 13
"""The integers in the first exchange of a call: a mark, the call's checksum, and values."""
MARK = 0x6175746F << 32
"""The first integer of a frame; other data has another value, with high probability."""
NAME = 64
"""The integers in which ranks tell each other the names of their calls."""


def gather_ints(values: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Returns the `values` of every rank of `mesh.everyone`; each is a signed 64-bit integer.

    Raises:
        Error: on every rank, if some rank makes another call.
    """
    mesh, count = mesh.everyone, len(values)
    if _sends_nothing(mesh):
        return [list(values) for _ in range(mesh.size)]
    counts, squares = sum_ints([count, count * count], mesh)
    if mesh.size * squares == counts * counts:  # All counts are equal (Cauchy-Schwarz).
        return _gathered(values, mesh) if count else [[] for _ in range(mesh.size)]
    every = [row[0] for row in _gathered([count], mesh)]
    # Padded, as ranks gather rows of one length.
    rows = _gathered([*values, *[0] * (max(every) - count)], mesh)
    return [row[:count] for row, count in zip(rows, every, strict=True)]


def sum_ints(values: Sequence[int], mesh: Mesh) -> list[int]:
    """Returns the sums of the ranks' `values` over `mesh.everyone`, modulo 2**64, as signed integers.

    The cost does not grow with the number of ranks, as that of `gather_ints` does.

    NOTE [Frames]
    Ranks that make different calls (`if rank == 0: save_checkpoint(...)`) would pair exchanges of different sizes: then
    gloo ends the process, and NCCL waits. So every exchange of data other than the model's tensors begins with a sum
    of a fixed size, which tells whether all ranks make the same call.

    Args:
        values: at most FRAME - 2 integers.

    Raises:
        Error: on every rank, if some rank makes another call.
    """
    mesh = mesh.everyone
    if _sends_nothing(mesh):
        return [_signed(mesh.size * value) for value in values]
    call = call_in_progress()
    head = [MARK, zlib.crc32(call.encode()) * weight_of_all(mesh.rank, mesh.size)]
    frame = [*head, *values, *[0] * (FRAME - len(head) - len(values))]
    assert len(frame) == FRAME, "ranks of different calls would pair sums of different sizes"
    total = torch.tensor([_signed(value) for value in frame], dtype=torch.int64, device=_sends_from(mesh))
    for group in mesh.axes or (mesh.group,):
        total = communicate("all_reduce", total, "sum", group)
    marks, calls, *sums = total.tolist()
    if marks != _signed(mesh.size * MARK) or calls:
        _refuse_calls(call, mesh)
    return sums[: len(values)]


def _sends_nothing(mesh: Mesh) -> bool:
    """Returns whether no rank hears of another: there is one, or no group, or torch's backend "fake"."""
    return mesh.size == 1 or mesh.group is None or backend_of(mesh.group, mesh.device.type) == "fake"


def agreement_weight(rank: int, ranks: Sequence[int]) -> int:
    """Returns this rank's weight in a sum over `ranks` that is 0 if all have the same number; 0 for another rank.

    NOTE [Ranks agree if a sum is 0]
    The weights of `ranks` are pseudo-random odd numbers, the first one such that their sum is 0 modulo 2**64. So the
    weighted sum of equal numbers is 0. If one rank has another number, the sum is not 0; if several have, it is 0 with
    a probability of about 2**-63. The weights of other ranks are other numbers: several such sums, over parts of the
    ranks, are one sum over all ranks.
    """
    if rank not in ranks:
        return 0
    if rank != ranks[0]:
        return _mixed(rank)
    return -sum(map(_mixed, ranks[1:])) % 2**64


@lru_cache(64)
def weight_of_all(rank: int, size: int) -> int:
    """Returns this rank's weight in a sum over `size` ranks: `agreement_weight`."""
    return agreement_weight(rank, range(size))


def _mixed(number: int) -> int:
    """Returns an odd number whose bits all depend on `number` (SplitMix64; Steele et al. 2014)."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) | 1


def _signed(value: int) -> int:
    """Returns an integer modulo 2**64 as a signed one."""
    return (value + 2**63) % 2**64 - 2**63


def _sends_from(mesh: Mesh) -> torch.device:
    """Returns the CPU if the group takes its tensors, so that nobody waits for a GPU; else this process's device."""
    types = [device.type for device in group_of(mesh)._device_types]
    return torch.device("cpu") if "cpu" in types else mesh.device


def _gathered(values: Sequence[int], mesh: Mesh) -> list[list[int]]:
    row = torch.tensor([list(values)], dtype=torch.int64, device=_sends_from(mesh))
    return gather(row, mesh.group, 0, mesh.size).tolist()


def _refuse_calls(call: str, mesh: Mesh) -> NoReturn:
    """Raises Error: the ranks make different calls."""
    name = call.encode()[: 8 * NAME].ljust(8 * NAME, b"\0")
    rows = _gathered([int.from_bytes(name[i : i + 8], "little", signed=True) for i in range(0, len(name), 8)], mesh)
    names = [b"".join(n.to_bytes(8, "little", signed=True) for n in row).rstrip(b"\0") for row in rows]
    spelled = [name.decode(errors="replace") or "outside autotp" for name in names]
    different_rank = next((rank for rank, name in enumerate(spelled) if name != spelled[0]), 0)
    raise Error(
        f"{mesh.named([0])} is in {spelled[0]}, and {mesh.named([different_rank])} in {spelled[different_rank]}",
        fix="the same calls on all ranks, in the same order: none under `if rank == 0`",
    )


def _from_device_mesh(
    tp: int | None, mesh: DeviceMesh, device: torch.device | str | None, timeout: timedelta | None, cp: int | None
) -> Mesh:
    if not isinstance(mesh, DeviceMesh):
        raise Error(f"mesh is a {type(mesh).__name__}, not a DeviceMesh", fix=_mesh_line(tp or 2, 1))
    names = mesh.mesh_dim_names or ()
    if "tp" not in names and (mesh.ndim > 1 or "cp" in names):
        shape = tuple(mesh.shape) if mesh.ndim > 1 else (mesh.size(), 1)
        raise Error(
            f"no dimension of the mesh is named tp: {names or 'none has a name'}",
            fix=f'init_device_mesh("{mesh.device_type}", {shape}, mesh_dim_names=(..., "tp"))',
        )
    if mesh.get_coordinate() is None:
        raise Error(
            f"global rank {dist.get_rank()} is not in the mesh",
            fix="call parallelize on the mesh's ranks only, or make the mesh over all of them",
        )
    group = mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()
    across = mesh.get_group("cp") if mesh.ndim > 1 and "cp" in names else None
    sizes = {"tp": group.size(), "cp": across.size() if across is not None else 1}
    for name, size in {"tp": tp, "cp": cp}.items():
        if size not in (None, sizes[name]):
            raise Error(f"{name}={size}, but the mesh has {name}={sizes[name]}", fix=f"leave {name} out")
    where = _mesh_device(mesh, device)
    # Before a group is made: each rank looks at the whole mesh, so all raise.
    every = _ranks_of_model(mesh) if sizes["cp"] > 1 else []
    begin_watching(where)
    if timeout is not None:  # The caller's groups keep their timeouts.
        # All ranks make the new groups in the same order.
        group, across = _with_timeout(group, timeout, "tp"), _with_timeout(across, timeout, "cp")
    tp_mesh = _with_runs(Mesh("tp", group.size(), group.rank(), group.group_name, where), group)
    return tp_mesh if sizes["cp"] == 1 else _with_sequences(tp_mesh, group, across, every, timeout_of(group))


def _with_timeout(group: Any, timeout: timedelta, axis: str) -> Any:
    """Returns the group if there is none or it has this timeout, else a new one of the same ranks."""
    if group is None or timeout == timeout_of(group):
        return group
    return new_group(dist.get_process_group_ranks(group), timeout, axis)


def _ranks_of_model(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks along `cp` and `tp` through this rank, in order: those along `tp` are neighbours.

    torch sorts the ranks of each group, whatever their places in the mesh. So a rank can have one place in the sorted
    list of all, and another one along the two axes.

    Raises:
        Error: it is so for a rank of the mesh.
    """
    names = list(mesh.mesh_dim_names or ())
    coordinate: list[int] = list(mesh.get_coordinate() or [])
    dims = [names.index("cp"), names.index("tp")]
    grids = mesh.mesh.movedim(dims, [-2, -1])
    for grid in grids.flatten(0, -3) if grids.dim() > 2 else [grids]:
        rows = sorted(map(sorted, grid.tolist()))
        every = [rank for row in rows for rank in row]
        columns = (set(map(frozenset, zip(*table, strict=True))) for table in (rows, grid.tolist()))
        if every != sorted(every) or len(set(map(frozenset, columns))) > 1:
            raise Error(
                f"the ranks of one model are not in order, cp before tp: {grid.tolist()}",
                fix=f'init_device_mesh("{mesh.device_type}", ..., mesh_dim_names=(..., "cp", "tp"))',
            )
    return sorted(grids[tuple(coordinate[i] for i in range(mesh.ndim) if i not in dims)].flatten().tolist())


def start_distributed(timeout: timedelta = TIMEOUT, device: torch.device | str | None = None) -> torch.device:
    """Initialises torch.distributed, as the launcher says or for a single process; returns this process's device.

    On GPUs the default group, and each group that is made after it, sends tensors of the CPU too: over gloo.

    Args:
        device: None means the GPU of this process, else the CPU.

    Raises:
        Error: ranks share a GPU, and not all of them were told so by `device`.
    """
    tell_errors()
    local_device = _own_device(device)
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    started = launch() or Launch("", 0, 1, 0, 1)
    several_machines = started.local_size < started.size
    if dist.is_initialized():
        # gloo reads the interface when a group is made.
        choose_interface(dist.distributed_c10d._get_default_store(), several_machines)
    else:
        with meeting(started), connecting_late(started.size):
            store = store_of(started, timeout) if started.by else dist.HashStore()
            choose_interface(store, several_machines)
            backend = _backend(local_device, local_device == torch.device(device or "cuda"), store, started)
            dist.init_process_group(backend, store=store, rank=started.rank, world_size=started.size, timeout=timeout)
    begin_watching(local_device)
    return local_device


def _backend(local_device: torch.device, asked_for: bool, store: dist.Store, started: Launch) -> str:
    """Returns the backend of the default group, the same on all ranks: NCCL if each has a GPU of its own, else gloo.

    Args:
        asked_for: whether the caller named this GPU.

    Raises:
        Error: as `start_distributed`.
    """
    if local_device.type != "cuda":
        return "gloo"
    ranks, all_asked = ranks_on_one_card(store, started, torch.cuda.get_device_properties(local_device), asked_for)
    if not ranks:
        return "cpu:gloo,cuda:nccl"
    problem = f"global ranks {' and '.join(map(str, ranks))} compute on the same GPU"
    if not all_asked:
        raise Error(
            f"{problem}, and NCCL wants one for each rank",
            fix='fewer processes, or device="cuda:0" on each to share a card (slow: gloo instead of NCCL)',
        )
    warnings.warn(
        f"{problem}, so all ranks send over gloo, through the memory of the host: this is slow. Start one process for "
        "each GPU",
        stacklevel=2,
    )
    return "gloo"


def _over_the_world(tp: int, cp: int, device: torch.device | str | None, timeout: timedelta) -> Mesh:
    local_device = start_distributed(timeout, device)
    count, me = dist.get_world_size(), dist.get_rank()
    # Global rank = (replica * cp + rank along cp) * tp + rank along tp.
    first, row = me // (tp * cp) * (tp * cp), me // tp * tp
    # New groups, so that they have this timeout and this name, whatever the default group has.
    group = new_group(range(row, row + tp), timeout, "tp") if tp > 1 or cp == 1 else None
    mesh = _with_runs(Mesh("tp", tp, me % tp, None if group is None else group.group_name, local_device), group)
    if cp > 1:
        every = range(first, first + tp * cp)
        mesh = _with_sequences(mesh, group, new_group(every[me % tp :: tp], timeout, "cp"), every, timeout)
    if tp * cp == count:
        return mesh
    # The ranks with this rank's place in the other replicas.
    dp_group = new_group(range(me % (tp * cp), count, tp * cp), timeout, "dp")
    return replace(mesh, replicas=with_number(_along(mesh, dp_group, "replica")))


def _with_sequences(mesh: Mesh, group: Any, across: Any, every: Sequence[int], timeout: timedelta) -> Mesh:
    """Returns the tensor-parallel axis with the axis `cp` beside it, and with all ranks of both.

    Args:
        group: the process group of `mesh`.
        across: that of this process's axis `cp`.
        every: the global ranks of both axes, those along `tp` neighbours.
    """
    # A group of all these ranks may exist already: each further one costs a communicator.
    spanning = [candidate for candidate in (group, across) if candidate is not None and candidate.size() == len(every)]
    joint_group = spanning[0] if spanning else new_group(every, timeout, "cp x tp")
    names = tuple(f"tp rank {i % mesh.size}, cp rank {i // mesh.size}" for i in range(len(every)))
    together = with_number(replace(_along(mesh, joint_group, "cp x tp"), names=names))
    return replace(mesh, sequence=with_number(_along(mesh, across, "cp")), together=together)


def _along(mesh: Mesh, group: Any, axis: str) -> Mesh:
    return Mesh(axis, group.size(), group.rank(), group.group_name, mesh.device)


def _with_runs(mesh: Mesh, group: Any) -> Mesh:
    """Returns the mesh with its number, and with groups of 2, 4, ... neighbours for cuts on a factor of the axis."""
    mesh, runs = with_number(mesh), []
    # Ranks that share several of these groups make them in the same order: by size.
    for n in (n for n in range(2, mesh.size) if mesh.size % n == 0):
        start = mesh.rank // n * n
        ranks = dist.get_process_group_ranks(group)[start : start + n]
        run = new_group(ranks, timeout_of(group), f"tp/{n}")
        attach(run, replace(_along(mesh, run, f"tp/{n}"), number=mesh.number))
        runs.append((n, run.group_name))
    return replace(mesh, runs=tuple(runs))


def with_number(mesh: Mesh) -> Mesh:
    """Returns the mesh with a number that its first process draws."""
    number = torch.tensor(secrets.randbits(62), device=mesh.device)  # Does not use torch's random state.
    mesh = replace(mesh, number=int(broadcast_from_first(number, mesh)))
    if mesh.group is not None:
        # The first mesh on the group stays. Its number is the same on all ranks of the group.
        if attached_if_any(group_of(mesh), Mesh) is None:
            attach(group_of(mesh), mesh)
        count_from_here(mesh.group)
    return mesh


def numbered_groups() -> dict[str, Mesh]:
    """Returns the process groups of several ranks that autotp uses: name -> the first mesh on it."""
    # A destroyed group may live on in user code, and nothing can be sent in it.
    alive: Any = dist.distributed_c10d._world.pg_map
    return {str(mesh.group): mesh for group, mesh in all_attached(Mesh) if group in alive and mesh.size > 1}


def _check_world(tp: int | None, cp: int, world: int) -> None:
    if tp in (None, world) and cp == 1:
        return
    request = ", ".join([f"tp={tp}"] * (tp is not None) + [f"cp={cp}"] * (cp > 1))
    count = (tp or 1) * cp
    if not dist.is_initialized() and launch() is None:
        raise _too_few(tp or 1, cp, f"{request} needs {count} processes, and this is one")
    if world < count:
        raise Error(f"{request} needs {count} processes, and the world has {world}", fix=_command(count))
    if world % count:
        raise Error(f"{world} processes are not a multiple of {request}", fix=_command(count))
    if count == 1:
        raise Error(
            f"{world} processes are more than tp=1: without a mesh the replicas would silently drift apart",
            fix=_mesh_line(1, world),
            then="parallelize(model, mesh=mesh), and DDP over mesh['dp']",
        )


def _mesh_line(tp: int, dp: int) -> str:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return f'mesh = init_device_mesh("{device_type}", ({dp}, {tp}), mesh_dim_names=("dp", "tp"))'


def _too_few(tp: int, cp: int, problem: str) -> Error:
    if "ipykernel" not in sys.modules:
        return Error(problem, fix=_command(tp * cp))
    started = f"accelerate.notebook_launcher(train, (), num_processes={tp * cp})"
    proof = f"tp={tp}, cp={cp}" if cp > 1 else f"tp={tp}"
    return Error(
        problem,
        fix=f"a function that builds, parallelizes and trains, and {started}",
        alternative=f"autotp.verify(model, {proof}), which needs one process",
    )


def _command(tp: int) -> str:
    return f"torchrun --nproc-per-node {tp} {sys.argv[0] or 'train.py'}"


def world_size() -> int:
    """Returns the number of processes."""
    if dist.is_initialized():
        return dist.get_world_size()
    started = launch()
    return started.size if started is not None else 1


def _local_rank() -> int:
    """Returns this process's number on its machine: as the launcher says, or as torch.distributed knows it.

    torch.multiprocessing.spawn says nothing: there the user's own `torch.cuda.set_device` counts, or else the rank.
    """
    started = launch()
    if started is not None or "LOCAL_RANK" in os.environ:
        return started.local_rank if started is not None else int(os.environ["LOCAL_RANK"])
    if not dist.is_initialized():
        return 0
    return torch.cuda.current_device() or dist.get_rank() % max(torch.cuda.device_count(), 1)


def own_kind() -> str:
    """Returns the kind of device on which a model becomes parallel if the user names none."""
    world: Any = dist.group.WORLD
    on_host = world is not None and (dist.get_backend() == "gloo" or torch.device("cuda") not in world._device_types)
    return "cuda" if torch.cuda.is_available() and not on_host else "cpu"


def _own_device(device: torch.device | str | None) -> torch.device:
    device = _usable(own_kind() if device is None else device)
    if device.type != "cuda" or device.index is not None:
        return device
    if torch.cuda.device_count() == 1:  # Its own, if the launcher shows each process one: `start_distributed` asks.
        return torch.device("cuda", 0)
    if _local_rank() >= torch.cuda.device_count():
        raise Error(
            f"LOCAL_RANK {_local_rank()} has no GPU of its own: this machine has {torch.cuda.device_count()}",
            fix='fewer processes, or device="cuda:0" on each to share a card (slow: gloo instead of NCCL)',
        )
    return torch.device("cuda", _local_rank())


def _usable(spec: Any) -> torch.device:
    """Returns a device; raises Error if torch knows no such device, or has none here."""
    try:
        device = torch.device(spec)
        if device.type != "cuda":  # Whether there are enough of these, the caller asks.
            torch.empty((), device=device)
    # AssertionError: torch was compiled without this kind of device.
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise Error(f"device={spec!r} cannot be used: {reason}", fix='device="cpu", or device="cuda"') from error
    return device


def _mesh_device(mesh: DeviceMesh, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return _own_device(device)
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
