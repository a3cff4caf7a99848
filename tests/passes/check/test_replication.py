"""replication: which ranks hold a value, derived from layouts; and which moves and sums of it are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotp.ops.placement_moves import first, place, take
from autotp.passes.check.replication import cut_of, extended, joint_cut, moved, shares, stored
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import Target
from autotp.sharding.axis import Axis, Size, product
from autotp.sharding.grid import grid, same_cut
from autotp.sharding.layout import Layout, layout_of
from autotp.sharding.placement import Copied, Partial, Placement, Replicate, Shard, StoredShard

KV, WIDTH = Axis(Size(2)), Axis(Size(3))
BOTH = product([KV, WIDTH])
TWICE = grid([(KV, 2, 2)], 4)
"""Two key/value heads on four ranks: ranks 0 and 1 hold the first, ranks 2 and 3 the second."""
HALVES = ((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),)
LAYOUT = Layout((6,), 0, HALVES)


def to(rank: int, tp: int = 4) -> Target:
    return Target("tp", tp, rank)


def typed(placement: Placement) -> Typed:
    return Typed(torch.float32, (BOTH,), placement, True)


def test_cut_of_finds_the_cut_of_given_pieces() -> None:
    assert cut_of(to(0, 2), BOTH, (((0, 3),), ((3, 6),))) is KV
    found = cut_of(to(0), BOTH, HALVES)
    assert found is not None and same_cut(found, TWICE)
    assert cut_of(to(0), BOTH, (*HALVES[1:], HALVES[0])) is None  # In another order.
    assert cut_of(to(0), BOTH, (((0, 2),), ((2, 4),), ((4, 5),), ((5, 6),))) is None


def test_stored_is_held_where_several_ranks_hold_it() -> None:
    assert stored(TWICE, LAYOUT) == StoredShard(TWICE)
    assert stored(KV, layout_of((6,), (BOTH,), KV, 2, "w")) == Shard(KV)


def test_joined_combines_cuts_on_different_rank_factors() -> None:
    """On factors of the ranks of their own; one leaf is cut in one way."""
    group = Axis(Size(5))
    heads = grid([(KV, 2, 2), (group, 2, 1)], 4)
    assert same_cut(joint_cut([TWICE, grid([(group, 2, 1)], 4)], 4), heads)  # type: ignore[arg-type]
    assert joint_cut([TWICE, grid([(KV, 2, 1)], 4)], 4) is None
    assert joint_cut([TWICE, grid([(group, 2, 2)], 4)], 4) is None
    assert joint_cut([KV, KV], 4) is KV and joint_cut([KV, group], 4) is None and joint_cut([], 4) is None
    assert same_cut(extended(TWICE, group, 4), heads)  # type: ignore[arg-type]
    assert extended(None, group, 4) is group and extended(KV, group, 2) is None


@pytest.mark.parametrize("rank", range(4))
def test_moved_accepts_only_this_rank_s_ranges(rank: int) -> None:
    """Each with the ranges of this rank alone; one of another rank's is none."""
    mine, dim = to(rank), {"dim": 0}
    ranges = {"ranges": tuple(LAYOUT.first(rank))}
    other = {"ranges": tuple(LAYOUT.first(rank ^ 1))}
    assert moved(mine, first, typed(Shard(TWICE)), dim | ranges) == (Shard(TWICE), StoredShard(TWICE))
    assert moved(mine, first, typed(Shard(TWICE)), dim | other) is None
    places = {"places": tuple(LAYOUT.places(rank, LAYOUT.first(rank))), "size": 6}
    assert moved(mine, place, typed(Shard(TWICE)), dim | ranges | places) == (Shard(TWICE), Partial())
    assert moved(mine, place, typed(Shard(TWICE)), dim | ranges | places | {"size": 5}) is None
    assert moved(mine, take, typed(Copied()), dim | {"pieces": HALVES, "rank": rank}) == (Copied(), Shard(TWICE))
    assert moved(mine, take, typed(Copied()), dim | {"pieces": HALVES, "rank": rank ^ 1}) is None
    alone = {"ranges": None if rank == 0 else ()}
    assert moved(mine, first, typed(Copied()), dim | alone) == (Copied(), Replicate())
    assert moved(mine, first, typed(Copied()), dim | {"ranges": () if rank == 0 else None}) is None


@pytest.mark.parametrize("rank", range(4))
def test_shares_sum_over_ranks_that_hold_the_same(rank: int) -> None:
    held: Any = tuple(LAYOUT.shared(rank))
    assert shares(to(rank), typed(StoredShard(TWICE)), "tp/2", 0, held)
    assert not shares(to(rank), typed(Shard(TWICE)), "tp/2", 0, held)  # Of a part of the work each has its own sum.
    assert not shares(to(rank), typed(StoredShard(TWICE)), "tp", 0, held)  # Over ranks that hold something else.
    assert not shares(to(rank), typed(StoredShard(TWICE)), "dp/2", 0, held)
    assert not shares(to(rank), typed(StoredShard(TWICE)), "tp/2", 0, ())


def test_shares_refuse_a_sum_over_some_holders() -> None:
    """Of eight ranks, four hold the same: a sum over two of them is no sum."""
    leaf = grid([(KV, 2, 4)], 8)
    held = tuple(layout_of((6,), (BOTH,), leaf, 8, "w").shared(0))
    assert shares(to(0, 8), typed(StoredShard(leaf)), "tp/4", 0, held)
    assert not shares(to(0, 8), typed(StoredShard(leaf)), "tp/2", 0, held)
