"""placement: two shards are equal where they cut alike; what a placement prints as."""

from __future__ import annotations

import pytest

from autotp.sharding.axis import Axis, Size, product, unify
from autotp.sharding.placement import Copied, Partial, Replicate, Shard, StoredShard


def test_shards_are_equal_where_they_cut_alike() -> None:
    one, other, same = Axis(Size(12)), Axis(Size(12)), Axis(Size(12))
    unify(one, same)
    assert Shard(one) == Shard(same)
    assert hash(Shard(one)) == hash(Shard(same))
    assert Shard(one) != Shard(other)
    assert len({Shard(one), Shard(same), Shard(other)}) == 2


def test_placements_of_different_kinds_are_never_equal() -> None:
    axis = Axis(Size(12))
    kinds = [Replicate(), Copied(), Partial(), Partial("max"), Shard(axis), StoredShard(axis)]
    assert [[a == b for b in kinds] for a in kinds] == [[i == j for j in range(6)] for i in range(6)]


def test_shards_of_a_product_s_parts_differ() -> None:
    heads, size = Axis(Size(4)), Axis(Size(8))
    both = product([heads, size])
    assert len({Shard(heads), Shard(size), Shard(both)}) == 3


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_placement_text_names_its_mesh_axis(name: str) -> None:
    """Each has the mesh axis that it is a placement on."""
    axis = Axis(Size(12))
    kinds = [Replicate(), Copied(), Partial(), Partial("max"), Shard(axis), StoredShard(axis)]
    expected = ["", f"{{{name}}}", f"{{+{name}}}", f"{{max {name}}}", f"@{name}", f"@{name}"]
    assert [kind.text(name) for kind in kinds] == expected
