"""tree: every rank has one parent, few children, and a short way to each other rank."""

from __future__ import annotations

import random

import pytest

from autotp.distributed.peers.tree import RADIX, children_of, next_hop, parent_of


@pytest.mark.parametrize("size", [1, 2, 7, 9, 64, 100, 4097])
def test_each_rank_is_the_child_of_its_parent(size: int) -> None:
    children = [(child, rank) for rank in range(size) for child in children_of(rank, size)]
    assert dict(children) == {rank: parent_of(rank) for rank in range(1, size)}
    assert len(children) == size - 1


def test_the_ranks_of_a_machine_are_neighbours() -> None:
    assert children_of(0, 8) == [*range(1, 8)]
    assert children_of(8, 64) == [*range(9, 16)]
    assert parent_of(8) == 0 and parent_of(64 + 8) == 64 and parent_of(64 + 9) == 64 + 8


def test_tree_gives_no_rank_many_neighbours() -> None:
    assert max(len(children_of(rank, 8192)) for rank in range(8192)) == 29


def test_tree_leads_from_each_rank_to_each_other() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        rank, target, hops = draw.randrange(8192), draw.randrange(8192), 0
        while rank != target:
            hop = next_hop(rank, target)
            assert hop == parent_of(rank) or parent_of(hop) == rank
            rank, hops = hop, hops + 1
        assert hops <= 2 * len(f"{8192:o}") and RADIX == 8
