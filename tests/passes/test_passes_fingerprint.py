"""fingerprint: equal for operators that compute alike, whatever their nodes are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, some
from torch import fx

from autotp.passes.fingerprint import operators_as_text

aten = torch.ops.aten


def text_of(make: Any, sizes: tuple[int, ...] = (3, 4), **renamed: str) -> str:
    graph = draft(make, **{renamed.get(name, name): some(*sizes) for name in ("x", "y")})
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes: list[fx.Node] = [node for node in graph.nodes if node.op == "call_function"]
    return operators_as_text(inputs, nodes, nodes[-1:])


def scaled_sum(call: Any, x: Any, y: Any) -> Any:
    return call(aten.add.Tensor, call(aten.mul.Tensor, x, y), y, alpha=2)


def test_names_of_nodes_are_not_in_a_fingerprint() -> None:
    assert text_of(scaled_sum) == text_of(lambda call, a, b: scaled_sum(call, a, b), x="a", y="b")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda c, x, y: c(aten.add.Tensor, c(aten.mul.Tensor, x, y), x, alpha=2), id="operand"),
        pytest.param(lambda c, x, y: c(aten.add.Tensor, c(aten.div.Tensor, x, y), y, alpha=2), id="operator"),
        pytest.param(lambda c, x, y: c(aten.add.Tensor, c(aten.mul.Tensor, x, y), y, alpha=2.0), id="type-of-constant"),
    ],
)
def test_other_work_has_another_fingerprint(make: Any) -> None:
    assert text_of(make) != text_of(scaled_sum)


def test_work_on_other_sizes_has_another_fingerprint() -> None:
    assert text_of(scaled_sum, (3, 5)) != text_of(scaled_sum)
