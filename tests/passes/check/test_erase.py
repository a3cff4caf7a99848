"""erase: a rank's operators and the model's in the same terms: families, regions, and dimensions taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import call_named, draft
from torch import fx

from autotp.ops import collectives, dropout, lookup
from autotp.passes.capture.autocast_regions import Autocast, enter_autocast, exit_autocast
from autotp.passes.check.erase import SLICE, SPLIT, ModelNodes, closing, family, openings, plain
from autotp.sharding.axis import Axis, Size, concat, product

aten = torch.ops.aten
X = torch.ones(2, 24)


def node(target: Any, *args: Any) -> fx.Node:
    return fx.Graph().call_function(target, args)


def test_family_is_one_for_an_operator_and_its_forms() -> None:
    """What a cut makes one operator has one name, and so has a parallel form with what it is the form of."""
    assert {family(node(op)) for op in (aten.split.Tensor, aten.chunk.default, SPLIT)} == {SPLIT}
    assert {family(node(op)) for op in (aten.slice.Tensor, aten.narrow.default)} == {SLICE}
    assert family(node(lookup.embedding)) is aten.embedding.default
    assert family(node(dropout.fast_dropout)) is family(node(dropout.exact_dropout)) is aten.dropout.default
    assert family(node(aten.add.Tensor)) is aten.add.Tensor


def several(call: Any, x: Any) -> Any:
    call(aten.tanh.default, x)  # Which nobody reads.
    first, second = call(aten.relu.default, x), call(aten.relu.default, x)
    drawn = call(aten.dropout.default, second, 0.5, True)
    call(enter_autocast, Autocast())
    inside = call(aten.relu.default, x)
    call(exit_autocast)
    return call(aten.add.Tensor, first, inside), drawn


def test_model_nodes_give_draws_and_effects_in_order() -> None:
    graph = draft(several, x=X)
    model = ModelNodes(graph)
    x, relu = graph.find_nodes(op="placeholder")[0], [call_named(graph, "relu", i) for i in range(3)]
    assert model.next() is x
    assert model.on(aten.relu.default, x) == relu[:2]
    assert model.on(aten.tanh.default, x) == []
    assert model.next() is call_named(graph, "dropout")
    assert model.on(aten.relu.default, x) == relu[:2]  # The same region still.
    assert getattr(model.next(), "target", None) is enter_autocast
    assert model.on(aten.relu.default, x) == relu[2:]
    assert getattr(model.next(), "target", None) is exit_autocast and model.on(aten.relu.default, x) == []
    assert getattr(model.next(), "op", "") == "output" and model.next() is None


def test_plain_makes_equal_arguments_equal() -> None:
    assert plain([Size(3), 1.0, {"a": (2,)}]) == (3, "1.0", {"a": (2,)})
    assert plain(1.0) != plain(1)


def through(conjugate: Any, back: tuple[int, int] = (1, 3), axis: str = "tp") -> Any:
    def make(call: Any, x: Any) -> Any:
        opened = call(aten.unflatten.int, x, 1, [2, 3, 4])
        moved = call(conjugate, opened, axis) if conjugate is collectives.copy else call(conjugate, opened)
        return call(aten.flatten.using_ints, moved, *back)

    return make


@pytest.mark.parametrize(
    ("make", "undone"),
    [
        (through(collectives.copy), True),
        (through(aten.relu.default), False),
        (through(collectives.copy, (1, 2)), False),
        (through(collectives.copy, axis="cp"), False),
    ],
    ids=["conjugate", "operator", "other-dimensions", "other-axis"],
)
def test_closing_finds_the_inverse_behind_conjugates_alone(make: Any, undone: bool) -> None:
    """With nothing but conjugates over the axis between, and the same dimensions."""
    graph = draft(make, x=X)
    assert closing(call_named(graph, "unflatten"), "tp") is (call_named(graph, "flatten") if undone else None)


def test_openings_lists_the_ways_to_open_an_axis() -> None:
    a, b = Axis(Size(2)), Axis(Size(3))
    assert list(openings(SPLIT, concat([a, b]))) == [[a, b]] and list(openings(SPLIT, product([a, b]))) == []
    found = list(openings(aten.unflatten.int, product([a, b])))
    assert [[str(axis.size) for axis in ways] for ways in found] == [["1", "2", "3"], ["2", "3", "1"]]
    assert [ways[1] for ways in found] == [a, b]
