"""autocast_regions: the settings around a call, and regions as a pair of calls."""

from __future__ import annotations

import pytest
import torch

from autotp.passes.capture.autocast_regions import Autocast, ambient, enter_autocast, exit_autocast

CPU = torch.device("cpu")
X = torch.ones(2, 2)


def test_ambient_reads_the_autocast_around() -> None:
    assert ambient(CPU) == Autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert ambient(CPU) == Autocast("cpu", torch.bfloat16)
        assert ambient(torch.device("meta")) == Autocast()
        with torch.autocast("cpu", enabled=False):
            assert ambient(CPU) == Autocast()
    with torch.autocast("cpu", torch.float16):
        assert ambient(CPU).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_autocast_settings_switch_on_and_off(dtype: torch.dtype | None) -> None:
    """`off` is for a graph that has the casts already; where autocast was off it changes nothing."""
    settings = Autocast("cpu", dtype)
    with torch.autocast("cpu", torch.bfloat16):
        with settings.off():
            assert torch.is_autocast_enabled("cpu") == (dtype is None)
        with settings.on():
            assert ambient(CPU) == Autocast("cpu", dtype)
            assert not torch.is_autocast_cache_enabled()


def test_enter_and_exit_autocast_bound_a_region() -> None:
    region = enter_autocast("cpu", torch.bfloat16, True, None)
    try:
        assert (X @ X).dtype == torch.bfloat16
    finally:
        exit_autocast(region)
    assert (X @ X).dtype == torch.float32
