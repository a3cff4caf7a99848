"""The rules of conjugates: what passes through a collective over another mesh axis, and what it needs whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autotp.ops import collectives, placement_moves
from autotp.rules.call import Call
from autotp.rules.registry import rule_of

X = torch.empty(2, 6, 4)


def rule(target: Any, out: Tensor | None = None, **given: Any) -> str:
    """The rule of a conjugate over `cp`, as it prints, and the operands in which it is linear."""
    found = rule_of(Call(target, {"x": X, "group": "cp"} | given, (X,), (X if out is None else out,)))
    assert found is not None
    return f"{found}, linear in {[*map(sorted, found.linear)]}"


def test_rules_of_copy_and_sum_keep_every_dimension() -> None:
    """Both are linear: a sum over ranks of one axis of partial sums over another is one partial sum."""
    assert rule(collectives.copy) == rule(collectives.reduce, op="sum") == "* -> *, linear in [[0]]"


def test_rule_of_first_keeps_its_dimension_whole() -> None:
    assert rule(placement_moves.first, dim=1, ranges=()) == "a x^ c -> a x^ c, linear in [[0]]"


def test_rule_of_a_maximum_is_not_linear() -> None:
    assert rule(collectives.reduce, op="max") == "* -> *, linear in []"


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize(
    "target", [collectives.scatter, collectives.gather, collectives.all_gather, collectives.reduce_scatter]
)
def test_rules_of_moves_keep_their_dimension_whole(target: Any, dim: int) -> None:
    """Another number of positions leaves than comes, and each comes from another rank."""
    found = rule(target, torch.empty(2, 3, 4), dim=dim, size=6)
    assert found == "a x^ c -> a y^ c, linear in [[0]]"
