"""freeze: frozen values are equal where they hold the same, whatever == says of their class; diff says where not."""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autotp.passes.capture.python_state.freeze import Itself, diff, freeze, freeze_argument, without_number


@dataclass
class Config:
    tau: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    inner: Any = None


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n: Any) -> None:
        self.n = n


class Named(list[Any]):
    """A list with an attribute."""

    def __init__(self, items: Any, note: str) -> None:
        super().__init__(items)
        self.note = note


class Number(float):
    """A float that has more to it."""

    times = 1


def adder(amount: Any) -> Callable[[Any], Any]:
    return lambda x: x + amount


def around() -> list[Any]:
    inside: list[Any] = [1]
    inside.append(inside)
    return inside


ALIKE: list[tuple[Any, Any]] = [
    (1, 1),
    (float("nan"), float("nan")),
    (numpy.arange(3), numpy.arange(3)),
    (numpy.float32("nan"), numpy.float32("nan")),
    (numpy.array([1, None, "a"], object), numpy.array([1, None, "a"], object)),
    ({1, 2}, {2, 1}),
    (None, None),
    ([1, [2.0, float("nan")]], [1, [2.0, float("nan")]]),
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
    ([1, 2], [1, 3]),
]
OBJECTS: list[tuple[Callable[[Any], Any], Any, Any]] = [
    (lambda n: Config(sizes=[n]), 1, 2),
    (lambda n: Config(inner=Config(tau=n)), 1, 2),
    (lambda n: Slotted(n), 1, 2),
    (lambda n: Named([1], n), "a", "b"),
    (lambda n: Named(n, "a"), [1], [2]),
    (lambda n: types.SimpleNamespace(n=n), 1, 1.0),
    (lambda n: types.MappingProxyType({"n": n}), 1, 2),
    (lambda n: {"a": 1, n: 2}, "b", "c"),
    (lambda n: OrderedDict(n), [("a", 1), ("b", 2)], [("b", 2), ("a", 1)]),
    (lambda n: defaultdict(n), list, dict),
    (lambda n: Counter(n), "aab", "ab"),
    (lambda n: deque([1], maxlen=n), 1, 2),
    (lambda n: {n, (1, 2), "x"}, 3, 4),
    (lambda n: functools.partial(torch.mul, other=n), 2, 3),
    (lambda n: adder(n), [1], [2]),
    (lambda n: Config(inner=adder(n)).inner, 1, 2),
    (lambda n: {"k": n}.get, 1, 2),
    (lambda n: Slotted([n]).n.__len__, 1, 2),
    (lambda n: complex(n, float("nan")), 1, 2),
    (lambda n: n, int, float),
    (lambda n: itertools.count(n), 1, 2),
]
"""What makes an object of a value; and two values."""


class Elementwise:
    """Compares each of its elements, as an array does."""

    def __eq__(self, other: object) -> Any:
        return numpy.arange(3) == 0

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("form", [freeze, freeze_argument])
@pytest.mark.parametrize(("a", "b"), ALIKE, ids=str)
def test_values_that_are_alike_have_equal_forms(a: Any, b: Any, form: Callable[[Any], Any]) -> None:
    assert form(a) == form(b) and hash(form(a)) == hash(form(b))


@pytest.mark.parametrize("form", [freeze, freeze_argument])
@pytest.mark.parametrize(("a", "b"), OTHERS, ids=str)
def test_values_that_differ_have_other_forms(a: Any, b: Any, form: Callable[[Any], Any]) -> None:
    assert form(a) != form(b)


@pytest.mark.parametrize(("make", "a", "b"), OBJECTS, ids=range(len(OBJECTS)))
def test_objects_are_frozen_by_their_contents(make: Callable[[Any], Any], a: Any, b: Any) -> None:
    assert freeze(make(a)) == freeze(make(a)) and hash(freeze(make(a))) == hash(freeze(make(a)))
    assert freeze(make(a)) != freeze(make(b))


@pytest.mark.parametrize("make", [lambda: torch.ones(2), lambda: nn.Linear(2, 2), lambda: types.ModuleType("a")])
def test_tensors_modules_and_c_code_are_equal_to_themselves_only(make: Callable[[], Any]) -> None:
    value, other = make(), make()
    assert freeze([value]) == freeze([value]) != freeze([other])


def test_a_frozen_value_keeps_what_it_is_compared_by() -> None:
    """Another object could get the `id` of one that is gone."""
    form = freeze(torch.ones(2))
    assert isinstance(form, Itself) and "1." not in repr(form)
    assert all(freeze(torch.ones(2)) != form for _ in range(9))


def test_a_frozen_value_does_not_change() -> None:
    changes: list[tuple[Any, Callable[[Any], object]]] = [
        (numpy.zeros(2), lambda x: x.fill(1)),
        ({1}, lambda x: x.add(2)),
        (bytearray(2), lambda x: x.pop()),
        (Config(), lambda x: x.sizes.append(3)),
        (Number(1.0), lambda x: setattr(x, "times", 2)),
    ]
    for value, change in changes:
        form = freeze(value)
        change(value)
        assert form != freeze(value)


def test_a_value_that_holds_itself() -> None:
    assert freeze(around()) == freeze(around())


def test_a_function_whose_variable_has_no_value_yet() -> None:
    def function() -> Any:
        return late

    form = freeze(function)
    late = 1
    assert freeze(function) != form and late


def test_what_is_too_deep_or_too_large_is_equal_to_itself_only() -> None:
    def chain() -> list[Any]:
        inside: list[Any] = []
        for _ in range(180):
            inside = [inside]
        return inside

    deep, large = chain(), [[0] for _ in range(20_000)]
    assert freeze(deep) == freeze(deep) != freeze(chain())
    assert freeze(large) == freeze(large) != freeze([[0] for _ in range(20_000)])


def test_an_object_that_cannot_be_pickled_is_equal_to_itself_only() -> None:
    class Stubborn:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("no")

    stubborn = Stubborn()
    assert freeze(stubborn) == freeze(stubborn) != freeze(Stubborn())


def test_special_decides_on_values_at_any_depth() -> None:
    def by_shape(value: Any, freeze: Callable[[Any], Any]) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else NotImplemented

    a, b, c = (Config(inner={"x": torch.ones(size)}) for size in (2, 2, 3))
    assert freeze(a, by_shape) == freeze(b, by_shape) != freeze(c, by_shape)


def test_an_argument_of_a_users_class_is_compared_by_its_own_comparison() -> None:
    one, other = Elementwise(), Elementwise()
    assert freeze_argument(one) == freeze_argument(one)
    assert freeze_argument(one) != freeze_argument(other)
    assert freeze_argument(Config()) == freeze_argument(Config()) != freeze_argument(Config(tau=1.0))


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        (1, 1, None),
        (1, 2, ()),
        (Config(), Config(tau=1.0), ("tau",)),
        (Config(), Config(sizes=[1, 3]), ("sizes", 1)),
        (Config(), Config(sizes=[1]), ("sizes", 1)),
        ({"a": {1: Config()}}, {"a": {1: Config(inner=2)}}, ("a", 1, "inner")),
        ({"a": 1}, {"a": 1, "b": 2}, ("b",)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ()),
        ({(1, 2): 3}, {(1, 2): 4}, ()),
        ([1], (1,), ()),
        (Slotted(1), Slotted(2), ("n",)),
        (adder(1), adder(2), ()),
    ],
)
def test_diff_returns_the_keys_of_the_first_difference(before: Any, after: Any, keys: Any) -> None:
    assert diff(freeze(before), freeze(after)) == keys


def test_without_number_a_whole_number_at_a_path_may_be_any() -> None:
    def without(value: Any) -> Any:
        form = freeze(value)
        for path in (("n",), ("sizes", 1), ("config", "sizes", 0), ("none", 3), ("tau",)):
            form = without_number(form, path)
        return form

    value = {"n": 3, "sizes": [1, 2], "config": Config(), "tau": 0.5}
    assert without(value) == without({"n": 4, "sizes": [1, 5], "config": Config(sizes=[7, 2]), "tau": 0.5})
    for key, other in (("n", 3.0), ("sizes", [2, 2]), ("config", Config(sizes=[1, 3])), ("tau", 0.6)):
        assert without(value) != without({**value, key: other})
    assert without_number(freeze(torch), ()) == freeze(torch)
    assert without_number(freeze(3), ()) == without_number(freeze(4), ()) != without_number(freeze(3.0), ())
