"""argument_keys: the keys of plain arguments are the same where they hold the same, whatever == says of their class."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from autotp.passes.capture.guards.argument_keys import argument_key

ALIKE: list[tuple[Any, Any]] = [
    (1, 1),
    (float("nan"), float("nan")),
    (numpy.arange(3), numpy.arange(3)),
    (numpy.float32("nan"), numpy.float32("nan")),
    (numpy.array([1, None, "a"], object), numpy.array([1, None, "a"], object)),
    ({1, 2}, {2, 1}),
    (None, None),
]
OTHERS: list[tuple[Any, Any]] = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (complex(1, 0.0), complex(1, -0.0)),
    (numpy.arange(3), numpy.arange(4)),
    (numpy.arange(3), numpy.arange(1, 4)),
    (numpy.arange(3), numpy.arange(3.0)),
    (numpy.arange(4), numpy.arange(4).reshape(2, 2)),
    (numpy.float64(2), 2.0),
    (numpy.array([1, None], object), numpy.array([True, None], object)),
    ({1, 2}, {1}),
    (b"a", "a"),
]


class Elementwise:
    """Compares each of its elements, as an array does."""

    def __eq__(self, other: object) -> Any:
        return numpy.arange(3) == 0

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(("a", "b"), ALIKE, ids=str)
def test_alike(a: Any, b: Any) -> None:
    assert argument_key(a) == argument_key(b)


@pytest.mark.parametrize(("a", "b"), OTHERS, ids=str)
def test_others(a: Any, b: Any) -> None:
    assert argument_key(a) != argument_key(b)


def test_what_changes_afterwards() -> None:
    for it, change in (
        (numpy.zeros(2), lambda x: x.fill(1)),
        ({1}, lambda x: x.add(2)),
        (bytearray(2), lambda x: x.pop()),
    ):
        key = argument_key(it)
        change(it)
        assert key != argument_key(it)


def test_a_class_whose_comparison_is_no_answer() -> None:
    one, other = Elementwise(), Elementwise()
    assert argument_key(one) == argument_key(one)
    assert argument_key(one) != argument_key(other)
