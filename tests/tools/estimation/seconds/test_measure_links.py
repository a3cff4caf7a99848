"""Latency and bandwidth of links from the times of collectives."""

from __future__ import annotations

import sys

import pytest

import autotp
from autotp.costs.hardware import KINDS
from autotp.costs.links import RankGroup, collective_seconds
from autotp.tools.estimation.seconds import measure_links
from autotp.tools.estimation.seconds.measure_links import SIZES, Timed, fitted, measured_alone

H100 = KINDS["h100-80gb"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_fit_is_exact_for_times_of_links(ranks: int) -> None:
    """It takes apart what links.py puts together."""
    group = RankGroup(size=ranks, stride=1)
    times = [
        Timed(1, size, collective_seconds("all-gather", size, group, H100)) for size in (*SIZES, 2**26)
    ]  # NCCL may sum by a tree.
    found = fitted(times, ranks)
    assert found.latency == pytest.approx(H100.latency)
    assert found.bandwidth == pytest.approx(H100.node_bandwidth * H100.link_sustained)


def test_times_that_no_line_fits_give_positive_numbers() -> None:
    found = fitted([Timed(2, 2**12, 1e-3), Timed(2, 2**23, 1e-3)], 2)
    assert found.latency > 0 and found.bandwidth > 0
    found = fitted([Timed(2, 2**12, 1e-6), Timed(2, 2**23, 1.0)], 2)
    assert found.latency > 0 and found.bandwidth > 0


def test_two_processes_measure_the_loopback() -> None:
    found = measured_alone("cpu", 0.5)
    assert found is not None and found.ranks == 2
    assert 1e7 < found.bandwidth < 1e12 and 1e-7 < found.latency < 1


def test_processes_that_fail_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(autotp.Error, match="the processes that measure the links fail: no reason given"):
        measured_alone("cpu", 0.5)


def test_processes_that_do_not_end_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_links, "TIMEOUT", measure_links.timedelta(seconds=-0.2))
    with pytest.raises(autotp.Error, match="the processes that measure the links do not end"):
        measured_alone("cpu", 0.5)
