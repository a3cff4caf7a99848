"""mesh: the tp axis, from torchrun's environment, from a DeviceMesh, and every way to ask for one that cannot be."""

import os
import sys
import types
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import run_ranks
from torch._C._distributed_c10d import TCPStore, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

import autotp
from autotp.distributed.mesh import Mesh, _own_device, broadcast_from_first, gather_ints, make_mesh, timeout_of

SCRIPT = "train.py"


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# --- one process


@pytest.mark.usefixtures("no_torchrun")
def test_one_process_that_asks_for_all_is_told() -> None:
    with pytest.warns(UserWarning, match="one process, so nothing is cut. To cut, start several: torchrun"):
        make_mesh()


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize("timeout", [20, timedelta(), "60s"], ids=repr)
def test_mesh_refuses_a_timeout_that_is_no_timedelta(timeout: Any) -> None:
    assert message(lambda: make_mesh(1, timeout=timeout)) == (
        f"timeout={timeout!r} is no time\n  expected a datetime.timedelta\n  try      timedelta(seconds=60)"
    )


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize("tp", [1, None])
@pytest.mark.filterwarnings("ignore:there is one process")
def test_mesh_of_one_process_needs_no_group(tp: int | None) -> None:
    mesh = make_mesh(tp)
    assert mesh == Mesh("tp", 1, 0, None, torch.device("cpu"))
    assert str(mesh) == "tp=1, rank 0 on cpu"
    assert not dist.is_initialized()
    x = torch.ones(2)
    assert broadcast_from_first(x, mesh) is x
    assert gather_ints([3, -4], mesh) == [[3, -4]]
    assert make_mesh(tp, device="meta").device == torch.device("meta")


@pytest.mark.usefixtures("no_torchrun")
def test_mesh_of_many_without_torchrun_is_an_error() -> None:
    assert message(lambda: make_mesh(8)) == (
        "tp=8 needs 8 processes, and this is one\n  try      torchrun --nproc-per-node 8 train.py"
    )
    assert not dist.is_initialized()


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize("tp", [0, -2, 2.0, "2", True], ids=repr)
def test_mesh_refuses_tp_that_is_no_positive_int(tp: Any) -> None:
    assert message(lambda: make_mesh(tp)) == f"tp={tp!r} is not a whole number of 1 or more\n  try      tp=2"


@pytest.mark.usefixtures("no_torchrun")
def test_mesh_refuses_what_is_no_device_mesh() -> None:
    assert message(lambda: make_mesh(4, (1, 4))) == (  # type: ignore[arg-type]
        "mesh is a tuple, not a DeviceMesh\n"
        '  try      mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))'
    )


@pytest.mark.usefixtures("no_torchrun")
def test_mesh_takes_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert make_mesh(1).device == torch.device("cuda:1")
    assert make_mesh(1, device="cuda").device == torch.device("cuda:1")
    assert make_mesh(1, device="cuda:0").device == torch.device("cuda:0")
    assert make_mesh(1, device="cpu").device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert make_mesh(1).device == torch.device("cuda:0"), "the only one that this process sees"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert message(lambda: make_mesh(1)) == (
        "LOCAL_RANK 2 has no GPU of its own: this machine has 2\n"
        '  try      fewer processes, or device="cuda:0" on each to share a card (slow: gloo instead of NCCL)'
    )


@pytest.mark.usefixtures("no_torchrun")
def test_mesh_of_spawned_processes_takes_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.multiprocessing.spawn sets no variables: the rank counts, or the device that the user has set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    for chosen, expected in ((0, "cuda:1"), (3, "cuda:3")):
        monkeypatch.setattr(torch.cuda, "current_device", lambda chosen=chosen: chosen)
        assert _own_device("cuda") == torch.device(expected)


@pytest.mark.usefixtures("no_torchrun")
def test_a_notebook_is_told_what_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert message(lambda: make_mesh(2)) == (
        "tp=2 needs 2 processes, and this is one\n"
        "  try      a function that builds, parallelizes and trains, and accelerate.notebook_launcher(train, (), "
        "num_processes=2)\n"
        "  or       autotp.verify(model, tp=2), which needs one process"
    )


# --- torchrun's environment, nothing initialised


def run_torchrun(rank: int, n: int, port: int) -> tuple[Mesh, str, list[list[int]]]:
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")  # as torchrun's own agent does
    sys.argv[:] = [SCRIPT]
    before = message(lambda: make_mesh(4))
    assert not dist.is_initialized(), "an error leaves nothing half done"
    mesh = make_mesh(timeout=timedelta(seconds=7))
    assert dist.get_backend() == "gloo"
    for group in (_resolve_process_group(mesh.group), dist.group.WORLD):  # type: ignore[arg-type]
        assert group is not None
        assert group._get_backend(mesh.device).options._timeout == timedelta(seconds=7)
    return mesh, before, gather_ints([rank, -(2**62) - rank], mesh)


def test_mesh_follows_the_variables_of_torchrun() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (mesh, before, ints) in enumerate(run_ranks(run_torchrun, 3, store.port)):
        assert (mesh.axis, mesh.size, mesh.rank, mesh.device) == ("tp", 3, rank, torch.device("cpu"))
        assert before == (
            "tp=4 needs 4 processes, and the world has 3\n  try      torchrun --nproc-per-node 4 train.py"
        )
        assert ints == [[0, -(2**62)], [1, -(2**62) - 1], [2, -(2**62) - 2]]


# --- an initialised world of four, with and without a mesh


def run_world(rank: int, n: int) -> dict[str, Any]:
    sys.argv[:] = [SCRIPT]
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    pair = DeviceMesh("cpu", [0, 1])
    found: dict[str, Any] = {
        "world": make_mesh(),
        "world-tp4": make_mesh(4),
        "grid": make_mesh(None, grid),
        "grid-tp2": make_mesh(2, grid),
        "line": make_mesh(mesh=line),
        "tp2": make_mesh(2),
        "tp1": message(lambda: make_mesh(1)),
        "tp3": message(lambda: make_mesh(3)),
        "unnamed": message(lambda: make_mesh(mesh=unnamed)),
        "no-tp": message(lambda: make_mesh(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))),
        "disagree": message(lambda: make_mesh(4, grid)),
        "outside": message(lambda: make_mesh(mesh=pair)) if rank > 1 else make_mesh(mesh=pair),
    }
    found["tp2-ranks"] = tuple(
        dist.get_process_group_ranks(_resolve_process_group(axis.group))
        for axis in (found["tp2"], found["tp2"].replicas)
    )
    for name in ("world", "grid"):
        found[f"{name}-ints"] = gather_ints([rank, rank * rank], found[name])
    first, mine = values(rank // 2 * 2), values(rank)
    found["sent"] = [broadcast_from_first(value, found["grid"]) is value for value in mine]
    found["same"] = [torch.equal(as_bytes(value), as_bytes(sent)) for value, sent in zip(mine, first, strict=True)]
    return found


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)


def values(rank: int) -> list[torch.Tensor]:
    """Tensors of every kind that a model holds, other ones on each rank; the last is strided, the third a parameter."""
    return [
        torch.tensor(float(rank)),
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.full((2, 3), float("nan") if rank % 2 == 0 else 1.0)),
        torch.full((2,), rank, dtype=torch.int16),
        torch.tensor([rank % 2 == 0, True]),
        torch.empty(0),
        torch.full((4,), float(rank)).to(torch.float8_e4m3fn),
        (torch.arange(6.0) + rank).view(2, 3).t(),
    ]


@cache
def world_of_four() -> list[Any]:
    return run_ranks(run_world, 4)


def test_mesh_of_a_world_of_four_has_its_place() -> None:
    for rank, found in enumerate(world_of_four()):
        for name, size, place in (("world", 4, rank), ("grid", 2, rank % 2), ("line", 4, rank)):
            mesh = found[name]
            assert (mesh.axis, mesh.size, mesh.rank, mesh.device) == ("tp", size, place, torch.device("cpu"))
        mesh = found["tp2"]
        assert (mesh.axis, mesh.size, mesh.rank) == ("tp", 2, rank % 2)
        assert (mesh.replicas.axis, mesh.replicas.size, mesh.replicas.rank) == ("replica", 2, rank // 2)
        assert found["tp2-ranks"] == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
        assert all(found[name].replicas is None for name in ("world", "grid", "line"))
        assert (found["world-tp4"].size, found["grid-tp2"]) == (4, found["grid"])
        assert found["world-ints"] == [[0, 0], [1, 1], [2, 4], [3, 9]]
        assert found["grid-ints"] == found["world-ints"][rank // 2 * 2 :][:2]
        assert found["sent"] == [True] * 8, "in place"
        assert found["same"] == [True] * 8, "bit for bit"


def test_mesh_errors_in_a_world_of_four_say_what_to_write() -> None:
    for rank, found in enumerate(world_of_four()):
        assert found["tp1"] == (
            "4 processes are more than tp=1: without a mesh the replicas would silently drift apart\n"
            '  try      mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))\n'
            "  then     parallelize(model, mesh=mesh), and DDP over mesh['dp']"
        )
        assert found["tp3"] == (
            "4 processes are not a multiple of tp=3\n  try      torchrun --nproc-per-node 3 train.py"
        )
        for name, had in (("unnamed", "none has a name"), ("no-tp", "('dp', 'pp')")):
            assert found[name] == (
                f"no dimension of the mesh is named tp: {had}\n"
                '  try      init_device_mesh("cpu", (2, 2), mesh_dim_names=(..., "tp"))'
            )
        assert found["disagree"] == "tp=4, but the mesh has tp=2\n  try      leave tp out"
        if rank > 1:
            assert found["outside"] == (
                f"global rank {rank} is not in the mesh\n"
                "  try      call parallelize on the mesh's ranks only, or make the mesh over all of them"
            )
        else:
            assert (found["outside"].size, found["outside"].rank) == (2, rank)


def two_axes(rank: int, n: int) -> None:
    """The axes of a mesh of the user: in order also where torch sorts a row or column, and else refused."""
    for grid in ([[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]]):
        place = make_mesh(mesh=DeviceMesh("cpu", grid, mesh_dim_names=("cp", "tp")))
        assert place.sequence is not None and place.together is not None
        assert (place.rank, place.cp_rank, place.together.rank) == (rank % 2, rank // 2, rank)
        assert place.named([2]) == "tp rank 0, cp rank 1"
        found = [dist.get_process_group_ranks(_resolve_process_group(axis.group)) for axis in (place, place.sequence)]
        assert found == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
    transposed = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("tp", "dp", "cp"))
    crossed = DeviceMesh("cpu", [[1, 0], [2, 3]], mesh_dim_names=("cp", "tp"))
    for mesh, ranks in ((transposed, "[[0, 2], [1, 3]]"), (crossed, "[[1, 0], [2, 3]]")):
        assert message(lambda: make_mesh(mesh=mesh)) == (  # noqa: B023
            f"the ranks of one model are not in order, cp before tp: {ranks}\n"
            '  try      init_device_mesh("cpu", ..., mesh_dim_names=(..., "cp", "tp"))'
        )


def test_mesh_with_two_axes_is_in_order_or_refused() -> None:
    run_ranks(two_axes, 4, timeout=60)


class Following(TorchFunctionMode):
    """A mode as that of a user, who follows each function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def broadcast_under_modes(rank: int, n: int) -> list[float]:
    mesh, found = make_mesh(n), []
    for mode in (Following(), CommDebugMode()):
        with mode:
            found.append(broadcast_from_first(torch.tensor(5.0 + rank), mesh).item())
    return found


def test_a_broadcast_arrives_in_its_tensor_under_modes() -> None:
    assert run_ranks(broadcast_under_modes, 2, timeout=100) == [[5.0, 5.0]] * 2


def waits(rank: int, n: int) -> list[timedelta]:
    x, models = torch.ones(1, 4), [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    first = autotp.parallelize(models[0], example_inputs=x)
    other = autotp.parallelize(models[1], example_inputs=x, timeout=timedelta(seconds=7))
    return [timeout_of(_resolve_process_group(model.mesh.group)) for model in (first, other)]


def test_mesh_waits_as_long_as_it_is_told() -> None:
    """A model's group waits as long as the default one, or as it is told."""
    assert run_ranks(waits, 2, timeout=41) == [[timedelta(seconds=41), timedelta(seconds=7)]] * 2


def sums_on_both_sides(rank: int, n: int, port: int) -> list[float]:
    """autotp initialises torch.distributed: users' scalars on the CPU are summed like tensors of the card."""
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    mesh = make_mesh(2, timeout=timedelta(seconds=30))
    found = []
    for group in (None, _resolve_process_group(str(mesh.group)), _resolve_process_group(str(mesh.replicas.group))):  # type: ignore[union-attr, arg-type]
        for device in ("cpu", mesh.device):
            x = torch.tensor([float(rank)], device=device)
            dist.all_reduce(x, group=group)
            found.append(x.item())
    return found


def test_groups_on_cards_sum_tensors_of_the_cpu() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(sums_on_both_sides, 4, store.port, cards=True)
    assert found == [[6, 6, 1, 1, 2, 2], [6, 6, 1, 1, 4, 4], [6, 6, 5, 5, 2, 2], [6, 6, 5, 5, 4, 4]]


def beside_other_groups(rank: int, n: int) -> list[int]:
    """The first rank is in one more group than the others: torch would give groups of neighbours other names there."""
    dist.new_group([0])
    summed = []
    for mesh in (None, init_device_mesh("cpu", (n,))):
        made = make_mesh(n, mesh, timeout=timedelta(seconds=20))
        one = torch.tensor(rank)
        for name in (made.group, *(name for _, name in made.runs)):
            value = one.clone()
            dist.all_reduce(value, group=_resolve_process_group(str(name)))  # type: ignore[arg-type]
            summed.append(int(value))
    return summed


def test_a_rank_that_is_in_other_groups_besides() -> None:
    assert run_ranks(beside_other_groups, 4) == [[6, 1, 6, 1], [6, 1, 6, 1], [6, 5, 6, 5], [6, 5, 6, 5]]
