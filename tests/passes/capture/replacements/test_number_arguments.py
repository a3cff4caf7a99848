"""number_arguments: a graph is right for all whole numbers that a call gives, unless the model needs the number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import both, expect_gradients
from torch import Tensor, nn

import autotp
from autotp.runtime.module import executable_of

checks = Checks()


class Rotates(nn.Module):
    """Takes rows of a table from a position on. x: [rows length 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 512).sin().view(64, 8))

    def forward(self, x: Tensor, position: int) -> Tensor:
        x = x * self.table[position : position + x.shape[1]] * 0.9**position
        y: Tensor = self.down(self.up(x).tanh())
        return y + position


class Steps(nn.Module):
    """Has a method beside forward that calls a part with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rotates, self.out = Rotates(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, 0)

    def step(self, x: Tensor, position: int) -> Tensor:
        y: Tensor = self.out(self.rotates(x, position))
        return y


class Cached(nn.Module):
    """Attention to what earlier calls have written into a cache. x: [rows length 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(2, 64, 8))

    def forward(self, x: Tensor, position: int) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        end = position + x.shape[1]
        self.keys[:, position:end] = key + value
        hidden = torch.arange(end) > torch.arange(position, end)[:, None]
        weights = (query @ self.keys[:, :end].mT).masked_fill(hidden, -1e9).softmax(-1)
        y: Tensor = self.out(weights @ self.keys[:, :end])
        return y


class Repeats(Rotates):
    """Needs the number itself."""

    def forward(self, x: Tensor, position: int) -> Tensor:
        for _ in range(position):
            x = self.down(self.up(x).tanh())
        return x


POSITIONS = (0, 3, 6, 7, 8, 30, 1, 0, 2)


@checks.on(2)
def changing_position_numbers_share_one_graph(rank: int, n: int) -> None:
    """One graph for all numbers, and one more for the length 1; in a call, and in the call of a part by a method."""
    for model in (Rotates(), Cached(), Steps()):
        x = torch.ones(2, 3, 8, dtype=torch.float64)
        whole, parallel = both(n, model.double(), example_inputs=x if isinstance(model, Steps) else (x, 1))
        for position in POSITIONS:
            x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)[:, : 1 if position > 6 else 3]
            calls: list[Any] = [m.step if isinstance(m, Steps) else m for m in (whole, parallel)]
            with torch.set_grad_enabled(not isinstance(model, Cached)):
                expected, found = (run(x, position) for run in calls)
            torch.testing.assert_close(found, expected)
            for loss in (expected, found) if found.requires_grad else ():
                loss.square().sum().backward()
        if not isinstance(model, Cached):
            expect_gradients(whole, parallel)
        called: Any = parallel.rotates if isinstance(model, Steps) else parallel
        assert len(executable_of(called).graphs.entries) <= 3


def test_numbers_read_by_python_need_a_graph_each() -> None:
    """Each has a graph, and a warning says so at the ninth."""
    whole = Repeats()
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(torch.ones(2, 3, 8), 1))
    with pytest.warns(UserWarning, match="since `position` had another value each time"):
        for position in range(10):
            x = torch.linspace(-1, 1, 48).view(2, 3, 8)
            torch.testing.assert_close(parallel(x, position), whole(x, position))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
