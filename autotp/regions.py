"""Autocast regions in a flat graph: a pair of calls around the operators inside."""

from __future__ import annotations

from typing import Any

import torch


def enter_autocast(device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> Any:
    """Enters a `torch.autocast` region and returns it; `exit_autocast` leaves it."""
    return torch.amp.autocast_mode._enter_autocast(device_type, dtype, enabled, cache)


def exit_autocast(region: Any) -> None:
    """Leaves a region that `enter_autocast` entered."""
    torch.amp.autocast_mode._exit_autocast(region)
