"""process_groups: how many groups a rank makes in a large world, and in how many it sends something over NCCL."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cards.pretend import REAL
from cards.spies import collective_order
from ranks import run_ranks
from small_models import VOCAB, gpt, tokens
from torch import nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotp
from autotp.distributed.mesh import Mesh
from autotp.training.process_groups import mesh_of, shared, world_mesh

TIMEOUT = timedelta(seconds=20)


# ---- a world of which this process is one rank: its groups send nothing


@contextmanager
def rank_of(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"pp": 2, "dp": 4, "tp": 8}, 4), ({"pp": 8, "dp": 128, "tp": 8}, 5), ({"pp": 1, "dp": 1024, "tp": 8}, 4),
        ({"pp": 1, "dp": 64, "cp": 4, "tp": 1}, 4), ({"pp": 1, "dp": 1, "tp": 64}, 2),
    ],
)  # fmt: skip
def test_mesh_makes_only_a_rank_s_own_groups(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], groups: int
) -> None:
    """With a barrier for each group, as TORCH_DIST_INIT_BARRIER=1 asks for, a world of any size meets once."""
    calls, barriers, size = [], list[int](), math.prod(sizes.values())
    torchs = dist.new_group

    def noted(ranks: Any, *args: Any, **how: Any) -> Any:
        calls.append(tuple(ranks))
        return torchs(ranks, *args, **how)

    monkeypatch.setattr(dist, "new_group", noted)
    monkeypatch.setattr(distributed_c10d, "_store_based_barrier", lambda *args: barriers.append(args[3]))
    with rank_of(size, size - 3):
        monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        mesh = mesh_of(sizes, torch.device("cpu"), TIMEOUT)
        place = Mesh("tp", sizes["tp"], mesh.get_local_rank("tp"), mesh.get_group("tp").group_name)
        everyone = world_mesh(place, mesh, TIMEOUT)
        assert (everyone.axis, everyone.size, everyone.rank) == ("global", size, size - 3)
        for axis, length in sizes.items():
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
            assert len(ranks) == length and size - 3 in ranks
        if sizes["pp"] > 1:
            assert shared({"wte": (0, sizes["pp"] - 1)}, mesh, TIMEOUT)["wte"][1].size() == 2
    assert len(set(calls)) == len(calls) == groups, "no two groups have the same ranks"
    assert barriers.count(size) == 1 and len(barriers) == groups


def test_a_shared_parameter_has_a_group_on_the_ranks_that_hold_it() -> None:
    for rank, expected in ((1, [1, 9]), (5, None), (13, None)):
        with rank_of(16, rank):
            mesh = mesh_of({"pp": 4, "dp": 2, "tp": 2}, torch.device("cpu"), TIMEOUT)
            found = shared({"wte": (0, 2), "other": (0, 2)}, mesh, TIMEOUT)
            assert (dist.get_process_group_ranks(found["wte"][1]) if found else None) == expected
            if found:
                assert found["wte"] == found["other"] and found["wte"][0] == [0, 2]
            everywhere = shared({"wte": (0, 1, 2, 3)}, mesh, TIMEOUT)
            assert everywhere["wte"][1] is mesh.get_group("pp"), "the group with these ranks is used again"


# ---- communicators of NCCL: one is opened by the first collective in a group


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tp": 2}, 1),
    "tp x pp": ({"tp": 2, "pp": 2, "microbatches": 2}, 3),
    "tp x dp": ({"tp": 2, "dp": 2}, 3),
    "tp x dp, zero 1": ({"tp": 2, "dp": 2, "zero": 1}, 3),
    "cp": ({"cp": 2}, 1),
    "tp x cp": ({"tp": 2, "cp": 2}, 3),
}
"""Name -> arguments of `distribute`, and the groups of a rank in which something is sent over NCCL."""


class Bidirectional(nn.Module):
    """A model whose sequences can be cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.down(mixed).flatten(0, 1), y.flatten())


def opened(rank: int, n: int, sizes: dict[str, Any]) -> dict[str, int]:
    """The groups in which a step sends something, and their sizes."""
    dp, model = sizes.get("dp", 1), Bidirectional() if "cp" in sizes else gpt(seed=0, n_head=4)
    with collective_order() as order:
        x, y = (part.cuda() for part in tokens(4, 8))
        trainer = autotp.distribute(model, example_inputs=(x[: 2 // dp], y[: 2 // dp]), **sizes)
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
        replica = trainer.mesh["dp"].get_local_rank()
        for _ in range(2):
            trainer.step(x.chunk(dp)[replica], y.chunk(dp)[replica])
            optimizer.step()
    names = Counter(line.partition(": ")[0] for line in order)
    groups = {name: distributed_c10d._resolve_process_group(name) for name in names}  # type: ignore[arg-type]
    return {f"{group.group_desc} {name}": group.size() for name, group in groups.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_communicator_is_opened_twice_or_for_one_rank(name: str) -> None:
    if REAL:
        pytest.skip("NCCL does not tell its communicators")
    sizes, expected = LAYOUTS[name]
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    for found in run_ranks(opened, ranks, sizes, cards=True, timeout=90):
        assert 1 not in found.values()
        assert len(found) == expected, found
