"""attribute_paths: what a model's attributes lead to, by path; values are found and put there again."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autotp.passes.capture.guards.attribute_paths import (
    TABLES,
    WHOLE,
    Attribute,
    children,
    everything,
    found_at,
    hidden,
    is_container,
    is_opaque,
    put_at,
    slot_of,
    spelled,
    values_at,
    without_numbers,
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
    assert found_at(modules, ("inner", TABLES, "weight")) is model.inner.weight
    assert children(model.names) == [(0, 1), (Attribute("note"), "x")]
    put_at(modules, ("", "names", Attribute("note")), "y")
    assert found_at(modules, ("", "names", Attribute("note"))) == model.names.note == "y"


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

    assert [one for one in hidden(function) if isinstance(one, list)] == [inside, default]
    assert hidden(functools.partial(function, 3, key=4)) == [function, 3, {"key": 4}, 4]
    assert hidden(weakref.ref(bound)) == [bound]
    assert hidden(inside.append) == [inside]
    assert hidden(3) == []


def test_values_of_opened_attributes() -> None:
    """Tensors at any depth, whole numbers where they are asked for; parameters are none of them."""
    model = Model()
    model.losses["weight"] = model.inner.weight
    found = values_at(model, [("", "losses"), ("gone", "x")], [("", "calls"), ("", "config", "tau"), ("", "none")])
    assert set(found) == {("", "losses", "first", 0), ("", "losses", "pair", 1), ("", "calls")}
    assert found["", "calls"] == 3


def test_without_numbers() -> None:
    value = {"n": 3, "sizes": [1, 2], "config": Config()}
    paths = [("n",), ("sizes", 1), ("config", "sizes", 0)]
    found = without_numbers(value, paths)
    assert (found["n"], found["sizes"]) == (int, [1, int])
    assert found["config"] == (Config, {"tau": 0.5, "sizes": [int, 2]})
    assert without_numbers(value, []) is value
