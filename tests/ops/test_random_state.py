"""random_state: what was drawn after a state was read is drawn again after it was set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotp.ops.random_state import forked, numpy_state, random_state_of, seed, set_numpy_state, set_random_state


def test_set_random_state_repeats_torch_s_draws() -> None:
    cpu = torch.device("cpu")
    state = random_state_of(cpu)
    first = torch.rand(3)
    assert not torch.equal(torch.rand(3), first)
    set_random_state(cpu, state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(state, state.clone())


@pytest.mark.parametrize("draw", [np.random.rand, np.random.standard_normal], ids=["uniform", "normal"])
def test_set_random_state_repeats_numpy_s_draws(draw: object) -> None:
    """A normal number is drawn with a second one, which is part of the state."""
    assert callable(draw)
    draw()
    state = random_state_of(torch.device("cpu"))
    first = [draw() for _ in range(700)]
    set_random_state(torch.device("cpu"), state)
    assert [draw() for _ in range(700)] == first


def test_forked_restores_random_states_after_an_error() -> None:
    before = random_state_of(torch.device("cpu"))
    with pytest.raises(KeyError), forked():
        seed(5)
        once = torch.rand(()).item(), np.random.rand()
        seed(5)
        assert (torch.rand(()).item(), np.random.rand()) == once
        raise KeyError
    assert random_state_of(torch.device("cpu")).equal(before)


def test_numpy_state_leaves_other_bit_generators_alone() -> None:
    """It stays as it is."""
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state = numpy_state()
        assert not state.any()
        set_numpy_state(state)
        assert np.random.get_state(legacy=False)["bit_generator"] == "PCG64"
    finally:
        np.random.set_bit_generator(own)
