"""local_calls: a rank's part of a call, from axes and the leaf alone: lengths, splits, slices, parallel forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import call_named, draft
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotp.ops.dropout import exact_dropout, fast_dropout
from autotp.passes.check.local_calls import local_call, local_length, pieces_by_rank
from autotp.passes.check.types import OperatorCut
from autotp.passes.lower.local_sizes import Target
from autotp.passes.plan.infer_axes import infer_axes
from autotp.sharding.axis import ONE, Axis, Size, concat, product
from autotp.sharding.grid import grid
from autotp.sharding.partition import chunk_size

aten = torch.ops.aten


def to(rank: int, tp: int = 4, randomness: Any = "fast") -> Target:
    return Target("tp", tp, rank, randomness)


def leaf(size: int) -> Axis:
    return Axis(Size(size))


def called(rank: int, make: Any, kind: str, dim: int, form: Any = None, randomness: Any = "fast", tp: int = 4) -> Any:
    """A rank's part of a call on x [2, 24], cut along the outermost leaf of a dimension of what it gives."""
    graph = draft(make, x=torch.ones(2, 24))
    axes, node = infer_axes(graph), call_named(graph, kind)
    cut = axes.dims[node][0][dim]
    factor = axes.bound[node].cuttable(cut)
    assert factor is not None
    mine = fx.Graph()
    given = mine.call_function(form or node.target, node.args) if form else node
    return local_call(to(rank, tp, randomness), axes, given, node, OperatorCut(cut, factor))


def test_local_length_of_uneven_parts_and_grids() -> None:
    """Six heads on four ranks: two, two, two and none; what has no leaf is whole."""
    heads, width = leaf(6), leaf(5)
    both = product([heads, width])
    assert [local_length(to(rank), both, heads).number for rank in range(4)] == [10, 10, 10, 0]
    assert local_length(to(3), width, heads) == Size(5) and local_length(to(3), both, None) == Size(30)
    two = grid([(heads, 2, 2)], 4)  # Ranks 0 and 1 have the first three heads, 2 and 3 the others.
    assert [local_length(to(rank), both, two).number for rank in range(4)] == [15] * 4


def test_pieces_by_rank_of_a_concatenation() -> None:
    heads, width = leaf(4), leaf(3)
    fused = concat([product([heads, width])] * 2)
    assert pieces_by_rank(to(0, 2), fused, heads) == (((0, 6), (12, 18)), ((6, 12), (18, 24)))


def test_local_length_never_guesses_a_symbolic_part() -> None:
    """Nobody may guess it; what a graph has computed is taken."""
    rows, mine = (Size.of(symbol) for symbol in symbols(2))
    batch = Axis(rows)
    with pytest.raises(ValueError, match="nothing computes this rank's part of"):
        local_length(to(0), batch, batch)
    known = replace(to(0), parts={(chunk_size, rows): mine})
    assert local_length(known, product([batch, leaf(3)]), batch) == mine * Size(3)


def symbols(count: int) -> list[Any]:
    env = ShapeEnv()
    return [env.create_unbacked_symint() for _ in range(count)]


def heads(call: Any, x: Any) -> Any:
    return call(aten.unflatten.int, x, 1, [6, 4])


@pytest.mark.parametrize(("rank", "mine"), [(0, 2), (2, 2), (3, 0)])
def test_local_call_has_the_rank_s_sizes_as_arguments(rank: int, mine: int) -> None:
    target, given = called(rank, heads, "unflatten", 1)
    assert target is aten.unflatten.int and given["sizes"] == [Size(mine), Size(4)]


def dropped(call: Any, x: Any) -> Any:
    return call(aten.dropout.default, x, 0.5, True)


def test_local_call_takes_the_parallel_form_of_the_randomness() -> None:
    """The mask of one device and this rank's part of it, or the rank's number; another form is none."""
    target, given = called(1, dropped, "dropout", 1, fast_dropout)
    assert target is fast_dropout and list(given.values())[1:] == [0.5, 1]
    target, given = called(1, dropped, "dropout", 1, exact_dropout, "exact")
    assert target is exact_dropout
    cut = (1, (ONE, Size(24), ONE), ((Size(6), Size(12)),))
    assert list(given.values())[2:] == [[Size(2), Size(24)], (cut,), [0, 1]]
    for form, randomness in ((exact_dropout, "fast"), (fast_dropout, "exact")):
        assert called(1, dropped, "dropout", 1, form, randomness) == ("a parallel form of aten.dropout.default", {})


def sliced(call: Any, x: Any) -> Any:
    return call(aten.slice.Tensor, x, 0, 1, 2)


def test_local_call_of_an_uncut_operator_is_the_model_s() -> None:
    graph = draft(sliced, x=torch.ones(2, 24))
    axes, node = infer_axes(graph), call_named(graph, "slice")
    target, given = local_call(to(1), axes, node, node, None)
    assert target is aten.slice.Tensor and (given["dim"], given["start"], given["end"]) == (0, 1, 2)
