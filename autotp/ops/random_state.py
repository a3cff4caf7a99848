"""The random state of a rank: of torch's generators on the CPU and on its device, and of numpy's, as one tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

OF_NUMPY = "<2496sqqd"
"""The form of numpy's state as bytes: 624 words, a place among them; whether a normal number is left, and which."""
MERSENNE = "MT19937"
"""The generator that numpy has by itself. (`np.random.set_bit_generator` replaces it.)"""


def random_state_of(device: torch.device) -> Tensor:
    """Returns the random state of the CPU, of numpy, and of `device` if it has its own: uint8 [bytes]"""
    states = [torch.get_rng_state(), numpy_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets what `random_state_of` returned."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    end = size + struct.calcsize(OF_NUMPY)
    set_numpy_state(state[size:end])
    if state.numel() > end:
        torch.get_device_module(device).set_rng_state(state[end:].clone(), device)


def numpy_state() -> Tensor:
    """Returns the state of `numpy.random`; zeros for another generator than numpy's own. uint8 [bytes]"""
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != MERSENNE:
        return torch.zeros(struct.calcsize(OF_NUMPY), dtype=torch.uint8)
    words, place = state["state"]["key"].tobytes(), int(state["state"]["pos"])
    packed = struct.pack(OF_NUMPY, words, place, int(state["has_gauss"]), float(state["gauss"]))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def set_numpy_state(state: Tensor) -> None:
    """Sets what `numpy_state` returned. Zeros set nothing."""
    words, place, has_gauss, gauss = struct.unpack(OF_NUMPY, state.numpy().tobytes())
    if any(words):
        np.random.set_state((MERSENNE, np.frombuffer(words, dtype=np.uint32), place, has_gauss, gauss))


def seed(number: int) -> None:
    """Seeds torch's generators and numpy's."""
    torch.manual_seed(number)
    np.random.seed(number)


@contextmanager
def forked() -> Iterator[None]:
    """A region after which torch's generator on the CPU and numpy's are as they were before."""
    before = numpy_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        set_numpy_state(before)
