"""contents: whether an object holds the same objects as before, which ones are new, and how it holds them again."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotp.passes.capture.python_state.contents import Contents, unchanged
from autotp.passes.capture.python_state.walk import GONE, WHOLE


class Named(list[Any]):
    """A list with an attribute."""

    note = "a"


class Kind:
    power = 1


def linear() -> nn.Module:
    module = nn.Linear(2, 2)
    module.note = [1]  # type: ignore[assignment]
    return module


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], object], dict[Any, Any]]] = [
    (lambda: [1, 2], lambda x: x.append(3), {2: 3}),
    (lambda: [1, 2], lambda x: x.pop(), {1: GONE}),
    (lambda: [1, 2], lambda x: x.reverse(), {0: 2, 1: 1}),
    (lambda: {"a": 1}, lambda x: x.update(a=2), {"a": 2}),
    (lambda: {"a": 1}, lambda x: x.clear(), {"a": GONE}),
    (lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end("a"), {}),
    (lambda: Counter("aab"), lambda x: x.update("ab"), {"a": 3, "b": 2}),
    (lambda: {1, 2}, lambda x: x.add(3), {WHOLE: {1, 2, 3}}),
    (lambda: deque([1, 2], maxlen=2), lambda x: x.append(3), {0: 2, 1: 3}),
    (lambda: SimpleNamespace(a=1), lambda x: setattr(x, "b", 2), {"b": 2}),
    (lambda: Named([1]), lambda x: x.append(2), {1: 2}),
    (linear, lambda x: setattr(x, "note", 2), {"note": 2}),
    (linear, lambda x: delattr(x, "note"), {"note": GONE}),
]


@pytest.mark.parametrize(("make", "change", "expected"), CHANGES, ids=range(len(CHANGES)))
def test_contents_names_what_changed_and_puts_it_back(make: Any, change: Any, expected: Any) -> None:
    value, original = make(), make()
    contents, is_same = Contents(value), unchanged(value)
    assert contents.is_same() and is_same() and contents.changes() == {}
    change(value)
    assert not contents.is_same() and not is_same()
    assert contents.changes() == expected
    contents.restore()
    assert contents.is_same() and is_same()
    if not isinstance(value, nn.Module):
        assert value == original and vars(value) == vars(original) if hasattr(value, "__dict__") else value == original


LEFT: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (lambda: torch.ones(2), lambda x: x.add_(1)),
    (lambda: torch.ones(2), lambda x: setattr(x, "data", torch.zeros(2))),
    (lambda: np.ones(2), lambda x: x.fill(2)),
    (lambda: iter([1, 2]), next),
    (lambda: type("Kind", (Kind,), {}), lambda x: setattr(x, "power", 2)),
]


@pytest.mark.parametrize(("make", "change"), LEFT, ids=range(len(LEFT)))
def test_unchanged_sees_what_cannot_be_put_back(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    value = make()
    is_same = unchanged(value)
    assert is_same()
    change(value)
    assert not is_same()


def test_contents_behind_a_proxy_and_a_weak_reference() -> None:
    table, referent = {"a": 1}, Kind()
    of_proxy, of_reference = unchanged(MappingProxyType(table)), unchanged(weakref.ref(referent))
    table["a"], referent.power = 2, 2
    assert not of_proxy() and of_reference(), "what the referent holds is compared by itself"


def test_an_equal_object_is_another_one() -> None:
    contents = Contents([[1]])
    contents.value[0] = [1]
    assert not contents.is_same()
