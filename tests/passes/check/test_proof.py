"""proof: what has been proved of a rank's values, and what is refused with the rank, the value and both shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import call_named, draft
from torch import fx

from autotp.errors import Error
from autotp.passes.check.proof import Proof
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import Target
from autotp.sharding.placement import Copied, Partial, Replicate, Shard

aten = torch.ops.aten
MODEL = draft(lambda call, x, w: call(aten.linear.default, x, w), x=torch.ones(2, 4), w=torch.ones(6, 4))
LINEAR = call_named(MODEL, "linear")


def proof(rank: int = 1) -> Proof:
    return Proof(MODEL, {}, frozenset(), Target("tp", 2, rank), {})


def local(columns: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    """The product on a rank that has so many columns."""
    shapes: dict[str, Any] = {"x": torch.ones(2, 4, dtype=dtype), "w": torch.ones(columns, 4, dtype=dtype)}
    return call_named(draft(lambda call, x, w: call(aten.linear.default, x, w), **shapes), "linear")


def typed(of: Proof, cut: bool = True) -> Typed:
    dims = of.axes.dims[LINEAR][0]
    return Typed(torch.float32, dims, Shard(dims[1]) if cut else Copied(), True)


def test_proof_remembers_types_that_fit() -> None:
    found, node = proof(), local(3)
    found.give(node, LINEAR, (typed(found),))
    assert found.types[node] == (typed(found),) and found.whole[node] is LINEAR
    assert found.erased([node, 2, None]) == [LINEAR, 2, None]


@pytest.mark.parametrize(
    ("node", "cut", "got"),
    [(local(6), True, "[2, 6]"), (local(3), False, "[2, 3]"), (local(3, torch.float64), True, "[2, 3]")],
    ids=["not-cut", "cut", "dtype"],
)
def test_proof_refuses_a_value_unlike_its_type(node: fx.Node, cut: bool, got: str) -> None:
    found = proof()
    with pytest.raises(Error) as raised:
        found.give(node, LINEAR, (typed(found, cut),))
    text = "f32[2, 6@tp]" if cut else "f32[2, 6]{tp}"
    assert raised.value.problem == f"tp rank 1 of 2: `linear_default` is not this rank's {text}"
    assert raised.value.facts["expected"] == ("[2, 3]" if cut else "[2, 6]") and raised.value.facts["got"] == got
    assert node not in found.types


def test_proof_refuses_a_read_of_another_placement() -> None:
    found, node = proof(0), local(3)
    with pytest.raises(Error) as raised:
        found.refuse_read(node, node.all_input_nodes[0], typed(found), Partial())
    assert raised.value.problem == "tp rank 0 of 2: `linear_default` reads `x`"
    assert raised.value.facts["expected"] == "Partial f32[2, 6]{+tp}"
    assert raised.value.facts["got"] == "Shard f32[2, 6@tp]"


def test_proof_refuses_to_read_a_cut_size() -> None:
    """What computes with the size of its part would compute something else on each rank."""
    found, node = proof(), local(3)
    found.give(node, LINEAR, (typed(found),))
    with node.graph.inserting_after(node):
        rows, columns = (node.graph.call_function(aten.sym_size.int, (node, dim)) for dim in (0, 1))
    assert found.number(rows) == 2
    with pytest.raises(Error, match="reads from `linear_default` a size that is cut"):
        found.number(columns)
    found.types[node] = (Typed(torch.float32, found.axes.dims[LINEAR][0], Replicate(), True),)
    assert found.number(columns) == 6
