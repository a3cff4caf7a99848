"""The autocast state around a model, and its autocast regions as pairs of calls in a flat graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("cpu", "cuda")
"""The kinds of devices on which models run."""


@dataclass(frozen=True)
class Autocast:
    """The kind of device on which a model runs, and the settings of `torch.autocast` for it.

    Attributes:
        device: the kind, "cpu" or "cuda".
        dtype: the low precision; None where autocast is off.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None

    def on(self) -> AbstractContextManager[Any]:
        """A region with these settings. Autocast's cache of casts is off: its tensors would outlive a capture."""
        return torch.autocast(self.device, self.dtype, self.dtype is not None, cache_enabled=False)

    def off(self) -> AbstractContextManager[Any]:
        """A region without autocast, to run a graph that was captured under these settings: its casts are operators."""
        return torch.autocast(self.device, enabled=False) if self.dtype is not None else nullcontext()


def ambient(device: torch.device) -> Autocast:
    """Returns the settings of autocast that now hold for operators on `device`; for "meta" those of the CPU, off."""
    # torch has no autocast for this kind of device, and raises.
    if device.type == "meta":
        return Autocast()
    on = torch.is_autocast_enabled(device.type)
    return Autocast(device.type, torch.get_autocast_dtype(device.type) if on else None)


def ambient_everywhere() -> list[Autocast]:
    """Returns the settings of autocast that now hold, for each kind of device on which it is on."""
    return [ambient(torch.device(device_type)) for device_type in KINDS if torch.is_autocast_enabled(device_type)]


def enter_autocast(device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> Any:
    """Enters a `torch.autocast` region and returns it; `exit_autocast` leaves it."""
    return torch.amp.autocast_mode._enter_autocast(device_type, dtype, enabled, cache)


def exit_autocast(region: Any) -> None:
    """Leaves a region that `enter_autocast` entered."""
    torch.amp.autocast_mode._exit_autocast(region)
