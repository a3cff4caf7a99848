"""The measurements of one device."""

from __future__ import annotations

import pytest
import torch

from autotp.tools.estimation.seconds import measure_device as measuring
from autotp.tools.estimation.seconds.measure_device import SHORT, SIDE, Measured, measure_device, typical

CPU = torch.device("cpu")


def test_the_median_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 1.0, 2.0, 3.0, 1.5, 7.0])
    monkeypatch.setattr(measuring, "_on_cpu", lambda run: next(times))
    next(times)
    assert typical(lambda: None, CPU, 0.0) == 2.0


def test_a_short_product_that_is_slower_gives_the_length_that_it_is_longer_by() -> None:
    """A product of SHORT takes as long as SHORT + fill, one of SIDE as SIDE + fill: links back to the same fill."""
    fill = 16.0
    rate = {summed: summed / (summed + fill) for summed in (SHORT, SIDE)}
    found = Measured(half=1, single=1, double=1, square=rate[SIDE], short=rate[SHORT], copy=1, add=1, call=1, memory=1)
    assert found.fill == pytest.approx(fill)


def test_a_cpu_has_plausible_numbers() -> None:
    found = measure_device(CPU, 0.7)
    assert found.single > 1e9 and found.copy > 1e8 and found.memory > 2**28
    assert 1e-7 < found.call < 1e-2


def test_a_format_that_a_cpu_computes_slowly_is_timed_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that takes 0.1 ms: five runs of three products take 1.5 ms a row, and 0.4 s have time for 256 rows."""
    few = measuring.LAYER["cpu"][0] // 32
    monkeypatch.setattr(measuring, "_on_cpu", lambda run: few * 1e-4)
    assert measuring._rows_in_time(torch.bfloat16, 0.4) == 256
    assert measuring._rows_in_time(torch.bfloat16, 100.0) == measuring.LAYER["cpu"][0]
    assert measuring._rows_in_time(torch.bfloat16, 0.0) == few
