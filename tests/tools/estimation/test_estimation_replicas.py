"""replicas: what a stage gathers and sums, and when it can start, by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotp.costs.hardware import Hardware
from autotp.costs.links import RankGroup, collective_seconds
from autotp.tools.estimation.counts.pieces import ModelPiece, Parameter
from autotp.tools.estimation.layout import AUTOTP, StepLayout
from autotp.tools.estimation.price import Prices
from autotp.tools.estimation.replicas import ReplicaWaits, Unit, exchanged, sums_of_buckets, sums_of_units, units_of
from autotp.tools.estimation.result import RankGathers
from autotp.training.pipeline.gradient_buckets import BUCKET
from autotp.training.pipeline.schedule_actions import Action

DEVICE = Hardware(
    name="plain", matrix_flops=1e12, vector_flops=1e12, memory_bandwidth=1e12, memory=1e12, units=100,
    cache_bandwidth=1e12, node=1, node_bandwidth=1e9, net_bandwidth=1e9, link_sustained=1.0, latency=0.0,
)  # fmt: skip
"""Ranks that send a GB/s; a collective takes one channel of a hundred units."""
HALF = BUCKET // 8
"""The elements of half a bucket in float32."""


def prices_of(sizes: dict[str, int]) -> Any:
    parameters = {name: Parameter(elements=n, itemsize=4, learns=True) for name, n in sizes.items()}
    return Prices(SimpleNamespace(parameters=parameters, blocks=()), DEVICE, AUTOTP)  # type: ignore[arg-type]


def piece(name: str, *parameters: str) -> ModelPiece:
    return ModelPiece(name=name, kind=0, parameters=parameters, reads=(), sends=(), boundary=0)


SIZES = {"embed": HALF, "h.0.a": HALF, "h.0.b": HALF, "h.1.a": HALF, "h.1.b": 4 * HALF}
PIECES = [piece("h.0", "embed", "h.0.a", "h.0.b"), piece("h.1", "h.1.a", "h.1.b", "embed")]
"""The embedding is also the head: its gradient is there when backward ends."""


def test_buckets_are_full_when_their_last_gradient_is_there() -> None:
    """Backward of h.1 takes 5 s: 4 for h.1.b, which is a bucket alone, and 1 for h.1.a. That of h.0 takes 3 s."""
    layout = StepLayout(batch=2, dp=2)
    one = collective_seconds("all-reduce", BUCKET, RankGroup(size=2, stride=1), DEVICE)
    found = sums_of_buckets(prices_of(SIZES), layout, PIECES, [3.0, 5.0])
    assert [ready for ready, _ in found] == pytest.approx([4.0, 6.0, 8.0])  # h.1.b; h.1.a, h.0.b; h.0.a, embed
    assert [seconds for _, seconds in found] == pytest.approx([2 * one, one, one])


def test_a_unit_is_a_block_and_one_is_all_else() -> None:
    layout = StepLayout(batch=2, dp=2, zero=1)
    outside, first, second = units_of(prices_of(SIZES), layout, PIECES, [(1.0, 2.0), (3.0, 4.0)])
    gather, total = exchanged(prices_of(SIZES), layout, frozenset(["embed"]))
    assert (outside.gather, outside.sum, outside.forward) == (gather, total, 0.0)
    assert gather == total == pytest.approx(HALF * 4 / 2 / 1e9)  # Half of it comes from the other rank.
    assert (first.gather, second.gather) == pytest.approx((2 * gather, 5 * gather))
    times = [ready for ready, _ in sums_of_units((outside, first, second))]
    assert times == [4.0, 6.0, 6.0]  # The unit outside of blocks comes last.


def waits(zero: int, units: tuple[Unit, ...], practice: Any = AUTOTP, pp: int = 1, m: int = 2) -> ReplicaWaits:
    row = tuple(Action(0, half, i) for i in range(m) for half in ("F", "B"))  # type: ignore[arg-type]
    layout = StepLayout(batch=2 * m, dp=2, zero=zero, pp=pp)
    return ReplicaWaits(layout=layout, practice=practice, device=DEVICE, units=[units], order=(row,), rooms=(2,))


UNITS = (Unit(gather=1.0, sum=1.0), *[Unit(forward=2.0, backward=4.0, gather=1.0, sum=2.0)] * 2)
SLOWED = 1 / 100


def test_zero_1_waits_in_the_first_forward_only() -> None:
    """What is outside of blocks and the first block are gathered in 2 s; the second is hidden behind the first."""
    found = waits(1, UNITS)
    assert found.parts(Action(0, "F", 0), 0.0) == pytest.approx((2.0 + 1.0 * SLOWED, 0.0))
    assert found.parts(Action(0, "F", 0), 5.0) == pytest.approx((3.0 * SLOWED, 0.0))  # A later stage of a pipeline.
    assert found.seconds(Action(0, "F", 1), 9.0) == found.seconds(Action(0, "B", 0), 9.0) == found.tail == 0


def test_zero_3_waits_in_every_pass() -> None:
    """Forward: 1 s for what is outside of blocks, while which computes nothing: so 1 s for the first block, too.

    In the second forward both are there still. Backward gathers the first block beside the last one, which is there; it
    waits for the sum of the first block, 2 s.
    """
    found = waits(3, UNITS)
    assert found.parts(Action(0, "F", 0), 0.0) == pytest.approx((2.0 + 1.0 * SLOWED, 0.0))
    assert found.parts(Action(0, "F", 1), 0.0) == pytest.approx((1.0 * SLOWED, 0.0))
    assert found.of_rank(0) == RankGathers(times=6, bytes=0.0, room=2)
    gathers, sums = found.parts(Action(0, "B", 1), 0.0)
    assert sums == 0.0 and gathers == pytest.approx(2.0 + 3.0 * SLOWED)
    assert found.tail == pytest.approx(1.0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_without_overlap_all_collectives_are_waited_for(zero: int) -> None:
    found = waits(zero, UNITS, replace(AUTOTP, ahead=False, overlapped=False))
    assert found.parts(Action(0, "F", 0), 7.0) == (3.0, 0.0) and found.tail == 0
    assert found.parts(Action(0, "B", 0), 7.0) == ((3.0 if zero == 3 else 0.0), (5.0 if zero > 1 else 0.0))
