"""input_values: what follows from the arguments' values is known; after a write of something unknown it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotp.passes.capture.guards.input_values import InputValues
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, NeedsNumber, Outcome

X = torch.tensor([[3, 1, 2], [9, 8, 7]])


def read(
    function: Callable[[Tensor, Tensor], Any], known: KnownValues = NO_VALUES, turned: dict[int, bool] | None = None
) -> InputValues:
    """Runs a function of a tensor with known values, [2 3], and one without, [2 3]."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake, unknown = (mode.from_tensor(x, static_shapes=True) for x in (X, torch.ones(2, 3)))
        reading = InputValues(known, "cpu", turned or {}, ())
        with reading:
            reading.begin([fake], [X])
            function(fake, unknown)
    return reading


def values(reading: InputValues) -> list[Any]:
    return [outcome.value for outcome in reading.outcomes]


def in_a_view(x: Tensor, unknown: Tensor) -> None:
    x[0].add_(10)
    assert x.view(-1)[0] == 13


def in_place(x: Tensor, unknown: Tensor) -> None:
    y = x * 1
    y[:, 0] = 5
    y += x
    assert y.sum() == 10 + 18 + 30
    assert bool((y.transpose(0, 1)[0] > 7).all())


def made(x: Tensor, unknown: Tensor) -> None:
    total = sum(range(int(torch.arange(x.shape[1]).max()) + 1))
    assert torch.full((total,), 2).sum() == 6
    assert int(torch.tensor([1, 2])[1]) == 2


@pytest.mark.parametrize("function", [in_a_view, in_place, made])
def test_values_that_follow_from_arguments_are_known(function: Callable[..., Any]) -> None:
    """The function's own asserts read what is known, and would fail on another value."""
    reading = read(function)
    assert reading.assumed == []
    assert all(value is True or type(value) is int for value in values(reading))


def test_reading_leaves_the_callers_values() -> None:
    read(in_a_view)
    assert X.tolist() == [[3, 1, 2], [9, 8, 7]]


def unknown_written(x: Tensor, unknown: Tensor) -> None:
    view = x[0]
    x.copy_(unknown)
    bool(view.sum() > 5)


def unknown_written_into_a_view(x: Tensor, unknown: Tensor) -> None:
    x[1].mul_(unknown[0])
    bool(x.sum() > 5)


def empty(x: Tensor, unknown: Tensor) -> None:
    bool((torch.empty(3) > 5).any())


def drawn(x: Tensor, unknown: Tensor) -> None:
    bool((torch.rand(3) > 5).any())


@pytest.mark.parametrize("function", [unknown_written, unknown_written_into_a_view, empty, drawn])
def test_values_after_an_unknown_write_are_assumed(function: Callable[..., Any]) -> None:
    state = torch.get_rng_state()
    reading = read(function)
    assert (reading.assumed, values(reading)) == ([0], [False])
    assert torch.equal(state, torch.get_rng_state())


def test_reading_refuses_a_number_of_an_activation() -> None:
    with pytest.raises(NeedsNumber):
        read(lambda x, unknown: range(int(unknown.sum())))


def two_predicates(x: Tensor, unknown: Tensor) -> None:
    bool(torch.isfinite(unknown).all())
    bool(unknown.isnan().any())


def test_reading_assumes_an_earlier_outcome_before_a_likely_one() -> None:
    """What an earlier run gave, else what is likely, else the other value where the likely one failed."""
    assert values(read(two_predicates)) == [True, False]
    assert values(read(two_predicates, turned={1: True})) == [True, True]
    places = [outcome.place for outcome in read(two_predicates).outcomes]
    known = KnownValues(frozenset(places), (Outcome(places[0], False),))
    assert values(read(two_predicates, known)) == [False, False]


def test_reading_makes_a_symbol_of_a_place_until_it_is_listed() -> None:
    """A number is a symbol until its place is listed."""

    def scaled(x: Tensor, unknown: Tensor) -> None:
        unknown * x.sum().item()

    first = read(scaled)
    assert values(first) == []
    assert len(first.symbolic()) == 1
    assert values(read(scaled, KnownValues(first.symbolic()))) == [30]
