"""draws: that a node of a graph draws random numbers, it says exactly where it does."""

from typing import Any

import pytest
import torch
from torch import fx

from autotp.rules.traits import draws

aten = torch.ops.aten
X = torch.zeros(2, 3, 4, 5)
CALLS = [
    (aten.dropout.default, 0.1, True),
    (aten.dropout.default, 0.1, False),
    (aten.dropout.default, 0.0, True),
    (aten.feature_dropout.default, 0.0, True),
    (aten.alpha_dropout.default, 0.1, True),
    (aten.native_dropout.default, 0.1, True),
    (aten.native_dropout.default, 0.1, False),
    (aten.native_dropout.default, 0.0, True),
    (aten.scaled_dot_product_attention.default, X, X),
    (aten.scaled_dot_product_attention.default, X, X, None, 0.1),
    (aten.bernoulli.default,),
    (aten.bernoulli.p, 0.0),
    (aten.rand_like.default,),
    (aten.normal.Tensor_float,),
    (aten.rrelu.default,),
    (aten.rrelu.default, 0.1, 0.3, True),
    (aten.relu.default,),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}{[n for n in call[1:] if n is not X]}")
def test_draws_exactly_where_the_generator_moves(call: tuple[Any, ...]) -> None:
    op, *rest = call
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(op, (x, *(x if value is X else value for value in rest)))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    op(X, *rest)
    assert draws(node) is not torch.equal(before, torch.get_rng_state())
