"""random_state: what was drawn after a state was read is drawn again after it was set."""

from __future__ import annotations

import torch

from autotp.ops.random_state import random_state_of, set_random_state


def test_drawn_again() -> None:
    cpu = torch.device("cpu")
    state = random_state_of(cpu)
    first = torch.rand(3)
    assert not torch.equal(torch.rand(3), first)
    set_random_state(cpu, state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(state, state.clone())
