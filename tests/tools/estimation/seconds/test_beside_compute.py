"""beside_compute: what of the collectives of replicas nothing hides, by hand."""

import math
import random
from dataclasses import replace

import pytest

from autotp.costs.hardware import KINDS
from autotp.costs.links import RankGroup, channels
from autotp.tools.estimation.seconds.beside_compute import (
    link_free,
    run_beside,
    slowed,
)

A100, H100 = KINDS["a100-80gb"], KINDS["h100-80gb"]
NODE, NETWORK, BOTH = RankGroup(size=8, stride=1), RankGroup(size=48, stride=8), RankGroup(size=16, stride=1)


def test_one_bucket_is_exposed_by_what_is_left_of_it() -> None:
    """Ready at 2 s of a backward of 3 s: a sum of 0.5 s is hidden, of 4 s three seconds are not."""
    assert link_free([(2.0, 0.5)]) == 2.5 and link_free([(2.0, 4.0)]) - 3.0 == 3.0


def test_sums_run_one_after_the_other() -> None:
    assert link_free([(3.0, 2.0), (1.0, 2.0), (2.0, 2.0)]) == 7.0
    assert link_free([(1.0, 2.0)], free=5.0) == 7.0 and link_free([]) == 0.0


def test_units_are_gathered_ahead_or_when_they_are_needed() -> None:
    """Three units of 2 s, each gathered in 1 s."""
    work, gathers, none = [2.0] * 3, [1.0] * 3, [0.0] * 3
    waited = {ahead: run_beside(work, gathers, none, ahead=ahead).waited for ahead in (0, 1, math.inf)}
    assert waited == {0: 3.0, 1: 1.0, math.inf: 1.0}
    assert run_beside(work, gathers, none, begin=0.5, ahead=math.inf).waited == 0.5
    assert run_beside(work, gathers, none, begin=9.0, ahead=math.inf).waited == 0.0


def test_a_slow_link_is_waited_for_at_each_unit() -> None:
    """Gathers of 3 s: the second is ready at 6 s, when the first unit has been computed for a second."""
    found = run_beside([2.0, 2.0], [3.0, 3.0], [0.0, 0.0])
    assert (found.waited, found.seconds, found.tail) == (4.0, 8.0, 0.0)


def test_sums_behind_units_have_one_buffer() -> None:
    """Backward of 1 s a unit, sums of 2 s: the third sum starts at 5 s, and the pass waits for the first two."""
    found = run_beside([1.0] * 3, [0.0] * 3, [2.0] * 3)
    assert (found.waited, found.seconds, found.ends, found.tail) == (2.0, 5.0, 7.0, 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_hidden_and_exposed_are_all_collectives(seed: int) -> None:
    """A pass is at least its work and at most work and collectives; a faster link never makes it longer."""
    draws = random.Random(seed)
    work, gathers, sums = ([draws.uniform(0, 3) for _ in range(6)] for _ in range(3))
    for ahead in (0, 1, math.inf):
        before = math.inf
        for factor in (1.0, 0.7, 0.3, 0.0):
            parts = [x * factor for x in gathers], [x * factor for x in sums]
            found = run_beside(work, *parts, ahead=ahead)
            total, exposed = sum(map(sum, parts)), found.waited + found.tail
            assert -1e-9 <= exposed <= total + 1e-9
            assert found.seconds + found.tail <= before + 1e-9
            before = found.seconds + found.tail


def test_a_group_takes_the_channels_that_its_link_needs() -> None:
    assert [channels(group, A100) for group in (NODE, NETWORK, BOTH)] == [24, 2, 16]
    assert [channels(group, H100) for group in (NODE, NETWORK, BOTH)] == [24, 4, 24]
    assert slowed(11.0, NETWORK, replace(H100, units=44)) == pytest.approx(1.0)
