"""The seconds of collectives."""

from dataclasses import replace

import pytest

from autotp.costs.hardware import KINDS
from autotp.costs.links import RankGroup, collective_seconds, send_seconds

A100 = replace(KINDS["a100-80gb"], latency=0.0)
INSIDE, ACROSS = A100.node_bandwidth * A100.link_sustained, A100.net_bandwidth * A100.net_sustained


@pytest.mark.parametrize(("name", "rounds"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)])
def test_a_ring_in_a_node_takes_its_bandwidth(name: str, rounds: int) -> None:
    assert collective_seconds(name, 8e9, RankGroup(size=8, stride=1), A100) == pytest.approx(
        rounds * 7 / 8 * 8e9 / INSIDE
    )


def test_gloo_sums_the_whole_tensor_for_a_part() -> None:
    cpu, group = KINDS["cpu-gloo"], RankGroup(size=2, stride=1)
    assert collective_seconds("reduce-scatter", 8e6, group, cpu) == collective_seconds("all-reduce", 8e6, group, cpu)
    assert collective_seconds("all-gather", 8e6, group, cpu) == pytest.approx(4e6 / cpu.node_bandwidth + cpu.latency)


def test_a_group_with_one_rank_a_node_has_one_adapter_each() -> None:
    found = collective_seconds("all-reduce", 8e9, RankGroup(size=4, stride=8), A100)
    assert found == pytest.approx(2 * 3 / 4 * 8e9 / ACROSS)


def test_a_group_across_nodes_uses_the_adapters_of_all_its_ranks() -> None:
    found = collective_seconds("all-reduce", 8e9, RankGroup(size=16, stride=1), A100)
    assert found == pytest.approx(2 * 15 / 16 * 8e9 / (8 * ACROSS))
    assert found > collective_seconds("all-reduce", 8e9, RankGroup(size=8, stride=1), A100)


def test_a_small_tensor_takes_latencies() -> None:
    slow = replace(A100, latency=1e-5)
    assert collective_seconds("all-reduce", 1, RankGroup(size=8, stride=1), slow) == pytest.approx(
        2 * 3 * 1e-5, rel=1e-3
    )
    assert collective_seconds("all-reduce", 1e9, RankGroup(size=1, stride=1), slow) == 0.0


def test_a_send_crosses_nodes_by_its_distance() -> None:
    assert send_seconds(1e9, 8, A100) == pytest.approx(1e9 / A100.net_bandwidth / A100.link_sustained)
    assert send_seconds(1e9, 4, A100) == pytest.approx(1e9 / INSIDE)


def test_an_exchange_across_nodes_uses_the_adapter_of_each_rank_alone() -> None:
    """Of 16 ranks on two nodes, half of a rank's bytes leave its node; the others go beside it over faster links."""
    assert collective_seconds("all-to-all", 8e9, RankGroup(size=16, stride=1), A100) == pytest.approx(4e9 / ACROSS)
    assert collective_seconds("all-to-all", 8e9, RankGroup(size=8, stride=1), A100) == pytest.approx(7e9 / INSIDE)
