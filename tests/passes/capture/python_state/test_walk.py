"""walk: what a model's attributes lead to, each once and by path; values are found and put there again."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autotp.passes.capture.python_state.freeze import LARGEST
from autotp.passes.capture.python_state.walk import (
    ATTRIBUTES,
    GONE,
    WHOLE,
    entries,
    everything,
    found_at,
    held,
    is_container,
    is_opaque,
    put,
    put_at,
    slot_of,
    spelled,
    values_by_path,
    walk,
)


@dataclass
class Config:
    tau: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Pair(NamedTuple):
    a: Any
    b: Any


class Named(list[Any]):
    """A list with an attribute."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.config = Config()
        self.losses = {"first": [torch.ones(1)], "pair": Pair(1, torch.zeros(2))}
        self.calls = 3


MODULES = {"": Model(), "h.0": nn.Linear(2, 2)}


def test_paths_as_the_user_writes_them() -> None:
    assert spelled(("h.0", "losses")) == "h.0.losses"
    assert spelled(("", "config", "tau")) == "config.tau"
    assert spelled(("", "losses"), "first") == "losses.first"
    assert spelled(("", "losses"), WHOLE) == "losses"
    assert slot_of(("h.0", "losses", 3)) == ("h.0", "losses")


def test_everything_once() -> None:
    model = Model()
    model.again = model.config
    model.itself = model.losses
    model.losses["itself"] = model.losses
    found = dict(everything(model))
    assert {path for path in found if path[1:2] == ("config",)} == {("", "config"), ("", "config", "sizes")}
    assert ("", "losses", "pair", 1) in found
    assert not any(path[1:2] in (("again",), ("itself",)) for path in found), "each value has one path"
    assert found[("inner",)] is model.inner


@pytest.mark.parametrize("path", [("", "config", "sizes", 1), ("", "losses", "pair", 0), ("", "losses", "first", 0)])
def test_put_and_found(path: Any) -> None:
    """A tuple on the way is made anew, and keeps its class."""
    modules: dict[str, nn.Module] = {"": Model()}
    put_at(modules, path, 7)
    assert found_at(modules, path) == 7
    assert type(modules[""].losses["pair"]) is Pair
    with pytest.raises(LookupError):
        found_at(modules, ("", "losses", "none"))


def test_tables_and_attributes_of_containers() -> None:
    model = Model()
    model.names = Named([1])
    model.names.note = "x"
    modules = {"": model, "inner": model.inner}
    assert found_at(modules, ("inner", "_parameters", "weight")) is model.inner.weight
    assert entries(model.names) == [(0, 1), (ATTRIBUTES, {"note": "x"})]
    put_at(modules, ("", "names", ATTRIBUTES, "note"), "y")
    assert found_at(modules, ("", "names", ATTRIBUTES, "note")) == model.names.note == "y"
    assert spelled(("", "names", ATTRIBUTES, "note")) == "names.note" and spelled(("h", "_buffers", "a")) == "h.a"


def test_kinds_of_values() -> None:
    containers = [[], {}, set(), deque(), Config(), Named()]
    opaque = [np.ones(2), iter([1]), np.float64(1)]
    plain = [1, "x", None, (1,), object(), torch.float32, MappingProxyType({}), len, Config, torch.ones(1)]
    assert all(map(is_container, containers)) and not any(map(is_container, [*opaque, *plain]))
    assert all(map(is_opaque, opaque[:2])) and not any(map(is_opaque, [*containers, *plain]))


def test_what_functions_hold() -> None:
    inside, default, bound = [1], [2], Config()

    def function(given: Any = default) -> Any:
        return inside

    assert held(function) == [inside, default]
    assert held(functools.partial(function, 3, key=4)) == [function, 3, {"key": 4}]
    assert held(weakref.ref(bound)) == [bound]
    assert held(inside.append) == [inside]
    assert held(3) == []


SHARED = [Config()]


def reads_a_global() -> Any:
    return SHARED


def test_walk_comes_to_what_functions_hold_last_and_by_the_path_of_the_holder() -> None:
    deep, both = Config(), [1]
    function = functools.partial(lambda: deep, [both])
    root = {"function": function, "both": both}
    assert [path for path, value in walk([(("",), root)], "held") if value is both] == [("", "both")]
    assert [path for path, value in walk([(("",), root)], "held") if value is deep] == [("", "function")]
    assert ("", "function", "sizes") in [path for path, value in walk([(("",), root)], "held") if value is deep.sizes]
    assert not any(value is deep for _, value in walk([(("",), root)]))


@pytest.mark.parametrize(("extent", "count"), [("held", 0), ("globals", 1)])
def test_walk_enters_containers_of_globals_if_it_is_to(extent: Any, count: int) -> None:
    assert sum(value is SHARED[0] for _, value in walk([((), reads_a_global)], extent)) == count


def test_walk_ends_in_circles_and_in_large_and_deep_values() -> None:
    circle: list[Any] = []
    circle.append(SimpleNamespace(of=circle, again=lambda: circle))
    assert len(list(walk([((), circle)], "held"))) == 3
    assert len(list(walk([((), [[] for _ in range(2 * LARGEST)])]))) == LARGEST
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert len(list(walk([((), deep)]))) < 100


def test_walk_enters_no_module_but_the_models() -> None:
    model = Model()
    model.plain = [nn.Linear(2, 2)]
    values = list(everything(model, "held"))
    assert any(value is model.plain[0] for _, value in values)
    assert not any(value is model.plain[0].weight for _, value in values)


def test_put_sets_appends_and_removes() -> None:
    items, table, names, instance = [1, 2], Counter({"a": 1, "b": 1}), {1}, Config()
    put(items, 2, 3), put(items, 0, 7)
    put(table, "b", 2), put(table, "a", GONE), put(table, "none", GONE)
    put(names, WHOLE, {4, 5}), put(instance, "tau", 2.0), put(instance, "inner", GONE)
    assert (items, table, names, instance.tau) == ([7, 2, 3], {"b": 2}, {4, 5}, 2.0)
    put(items, 1, GONE), put(items, 2, GONE)
    assert items == [7]


def test_values_of_opened_attributes() -> None:
    """Tensors at any depth, whole numbers where they are asked for; parameters are none of them."""
    model = Model()
    model.losses["weight"] = model.inner.weight
    found = values_by_path(model, [("", "losses"), ("gone", "x")], [("", "calls"), ("", "config", "tau"), ("", "none")])
    assert set(found) == {("", "losses", "first", 0), ("", "losses", "pair", 1), ("", "calls")}
    assert found["", "calls"] == 3
