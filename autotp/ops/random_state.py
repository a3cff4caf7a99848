"""The random state of a rank's devices, as one tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state_of(device: torch.device) -> Tensor:
    """Returns the random state of the CPU, and of `device` if it has its own: uint8 [bytes]"""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets what `random_state_of` returned."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if state.numel() > size:
        torch.get_device_module(device).set_rng_state(state[size:].clone(), device)
