"""random_numbers: the random numbers of Python and numpy, and seeds, are refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from errors import line_of, message
from torch import Tensor, nn

import autotp
from autotp.passes.capture.guards.random_numbers import (
    DrewNumber,
    line_that_draws,
    unseeded,
    without_python_random,
)
from autotp.passes.capture.replacements.everywhere import everywhere


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws = {"one": random.Random(3), "two": np.random.default_rng(3)}


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda model: random.random(), "Python's `random`"),
        (lambda model: np.random.rand(), "Python's `numpy.random`"),
        (lambda model: model.draws["one"].random(), "`draws.one`"),
        (lambda model: model.draws["two"].random(), "`draws.two`"),
    ],
)
def test_numbers_of_python_are_refused_and_put_back(draw: Callable[[Held], float], name: str) -> None:
    """Refused, and the generator is where it was."""
    model, expected = Held(), Held()
    random.seed(1), np.random.seed(1)
    wanted = draw(expected)
    random.seed(1), np.random.seed(1)

    def drawn() -> None:
        with without_python_random(model):
            draw(model)

    assert message(drawn).splitlines()[0] == (
        f"forward draws a number from {name}, and every later call would use the same number"
    )
    assert draw(model) == wanted


class Draws(nn.Module):
    """Draws behind other lines, in a function of a library, of Python, or of a file that calls the generator itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = x + self.w
            if i == 1:
                x = x * self.number()
        return x * random.random()  # later

    def number(self) -> float:
        if self.kind == "library":
            return random.choice([1.0, 2.0])  # chosen
        if self.kind == "numpy":
            return float(np.random.randint(4) + 1)  # an integer
        if self.kind == "in a call":
            return doubled(random.uniform(1, 2))  # as an argument
        return doubled_of(random.gauss)  # by another name


def doubled(number: float) -> float:
    return 2 * number


def doubled_of(draw: Callable[[float, float], float]) -> float:
    return 2 * draw(1, 2)  # the one


KINDS = {
    "library": "# chosen", "numpy": "# an integer", "in a call": "# as an argument", "another name": "# the one",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_line_that_draws_is_the_users(kind: str) -> None:
    """The first one, of the user's code; it is found in a capture, too. Whoever traces goes on to trace."""
    model, tracing = Draws(kind), sys.gettrace()
    wanted = line_of(__file__, KINDS[kind])
    assert line_that_draws(model, lambda: model(torch.ones(2, 4))) == wanted
    assert sys.gettrace() is tracing
    before = random.getstate(), repr(np.random.get_state())
    text = message(lambda: autotp.explain(model, 2, example_inputs=torch.ones(2, 4)))
    with pytest.raises(autotp.Error) as raised:
        autotp.explain(model, 2, example_inputs=torch.ones(2, 4))
    assert type(raised.value) is autotp.Error
    assert text.splitlines()[1] == f"  at       {wanted}" and "\n  try      torch.rand" in text
    assert before == (random.getstate(), repr(np.random.get_state()))


def test_line_that_draws_is_empty_where_none_does() -> None:
    def fails() -> None:
        torch.rand(2)
        raise KeyError

    assert line_that_draws(Held(), fails) == ""
    assert "at" not in DrewNumber("x").at_line("").facts


def test_without_python_random_allows_torchs_numbers() -> None:
    with without_python_random(Held()):
        torch.rand(2)


def forked() -> None:
    with torch.random.fork_rng(devices=()):
        pass


SEEDS: dict[str, Callable[[], object]] = {
    "manual_seed": lambda: torch.manual_seed(3),
    "random.manual_seed": lambda: torch.random.manual_seed(3),
    "seed": lambda: torch.seed(),
    "set_rng_state": lambda: torch.set_rng_state(torch.get_rng_state()),
    "generator": lambda: torch.default_generator.manual_seed(3),
    "fork_rng": forked,
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_are_refused(name: str) -> None:
    """Refused, and the random state is what it was."""
    before = torch.get_rng_state()

    def seeded() -> None:
        with everywhere(unseeded()):
            SEEDS[name]()

    assert message(seeded).startswith("forward sets torch's random state, and later calls of the graph would not do so")
    assert torch.equal(torch.get_rng_state(), before)


def test_unseeded_allows_reading_the_seed() -> None:
    with everywhere(unseeded()):
        assert torch.initial_seed() == torch.default_generator.initial_seed()
        torch.get_rng_state(), torch.rand(2)


def test_unseeded_allows_dynamo_to_restore_the_state() -> None:
    """Dynamo traces functions that operators take, and puts the random state back."""
    with everywhere(unseeded()):
        torch.compile(torch.sin, backend="eager")(torch.ones(2))


class Seeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)


def test_a_model_that_seeds_is_refused() -> None:
    text = message(lambda: autotp.explain(Seeded(), tp=2, example_inputs=torch.ones(2, 3)))
    assert "forward sets torch's random state" in text
    assert "test_random_numbers.py" in text and "torch.manual_seed(3)" in text
