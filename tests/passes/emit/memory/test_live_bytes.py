"""live_bytes: the most bytes at once of what a block makes, by hand."""

from __future__ import annotations

from typing import Any

import torch
from graphs import draft, some
from torch import fx, nn

from autotp.passes.emit.memory.live_bytes import live_bytes

aten = torch.ops.aten
VALUE = 4 * 6 * 4
"""Bytes of each value between the operators."""


END = 8
"""Bytes of the scalar with which backward begins, and of its gradient."""


def block(*operators: Any) -> fx.GraphModule:
    """The operators one after the other; each `linear` has a weight of its own."""
    names = [f"w{i}" for i, operator in enumerate(operators) if operator is aten.linear.default]

    def make(call: Any, x: Any, **weights: Any) -> Any:
        rest = iter(weights.values())
        for operator in operators:
            x = call(operator, x, *[next(rest)] if operator is aten.linear.default else [])
        return x

    return fx.GraphModule(nn.Module(), draft(make, x=some(4, 6), **{name: some(6, 6) for name in names}))


def counted(*operators: Any, learns: bool = True) -> int:
    module = block(*operators)
    args = [
        torch.ones(4 if i == 0 else 6, 6, requires_grad=learns)
        for i in range(len(module.graph.find_nodes(op="placeholder")))
    ]
    return live_bytes(module, args, lambda op, args: (op, args))


def test_without_gradients_two_values_live_at_once() -> None:
    assert counted(*[aten.neg.default] * 5, learns=False) == 2 * VALUE


def test_what_backward_reads_lives_until_it_has_read_it() -> None:
    """Each `sin` keeps its input: of three, two are made here. Beside them: gradient, cosine and product."""
    assert counted(*[aten.sin.default] * 3) == (2 + 3) * VALUE + END
    assert counted(*[aten.sin.default] * 4) == (3 + 3) * VALUE + END


def test_gradients_of_parameters_are_counted_elsewhere() -> None:
    """Those of eight weights do not add up: only what `linear` keeps does."""
    few, many = (counted(*[aten.linear.default] * n) for n in (4, 8))
    assert many - few == 4 * VALUE
