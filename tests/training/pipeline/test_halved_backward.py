"""halved_backward: two halves give what one backward gives, whatever reads the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_values_close
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.training.pipeline.halved_backward import input_half

Forward = Callable[[Tensor, dict[str, Tensor]], Any]


class Both(torch.autograd.Function):
    """Two products of one input as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.name, ctx.variable = "theirs", None  # A user may call an attribute as autograd calls one.
        ctx.save_for_backward(x, a, b)
        return x @ a, x @ b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, a, b = ctx.saved_tensors
        return grads[0] @ a.t() + grads[1] @ b.t(), x.t() @ grads[0], x.t() @ grads[1]


def product(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return x @ w["a"]


def shared(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """One weight is read by a product, and by another that reads this one's result (pytorch#180952)."""
    return (x @ w["a"]).tanh() @ w["a"]


def two_outputs(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A node with two outputs of one shape, whose gradients differ (pytorch#170277)."""
    left, right = Both.apply(x, w["a"], w["b"])
    return left.sin() * right.exp()


def crossing(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """One weight is read by one node, another by this node and by a sum after it."""
    left, right = Both.apply(x, w["a"], w["b"])
    return left * right + w["b"].sum(0) + w["a"].t()[0]


def weights_alone(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return x @ w["a"], w["b"] @ w["c"]


def made_of_weights(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Weights meet before they meet the input, and one of them again behind it."""
    joined = w["a"] @ w["b"]
    return ((x @ joined).relu() @ joined.t() + w["c"][0]) @ w["b"]


def frozen(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return (x @ w["a"].detach()).tanh() @ w["b"]


FORWARDS: list[Forward] = [product, shared, two_outputs, crossing, weights_alone, made_of_weights, frozen]


def known_gradients(forward: Forward, halved: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for name in "abc"}
    leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    results = forward(leaf, weights)
    outputs = list(results) if isinstance(results, tuple) else [results]
    grads = [torch.randn_like(y) for y in outputs]
    if halved:
        found, rest = input_half(outputs, grads, [leaf, 3, torch.ones(1)])
        assert found[1:] == (None, None)
        assert found[0] is leaf.grad
        assert all(w.grad is None for w in weights.values())
        rest.run()
    else:
        torch.autograd.backward(outputs, grads)
    return [leaf.grad, *(w.grad for w in weights.values())]


@pytest.mark.parametrize("forward", FORWARDS)
def test_halved_backward_equals_one_backward(forward: Forward) -> None:
    expected, found = known_gradients(forward, False), known_gradients(forward, True)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_values_close(b, a, rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_halved_backward_computes_no_product_twice() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    x = torch.randn(3, 4, requires_grad=True)
    y = x
    for w in weights:
        y = (y @ w).tanh()
    with Products() as first:
        _, rest = input_half([y], [torch.ones_like(y)], [x])
    with Products() as second:
        rest.run()
    assert (first.count, second.count) == (3, 3)


def test_halved_backward_accumulates_gradients() -> None:
    w = nn.Parameter(torch.ones(2, 2))
    for _ in range(2):
        x = torch.ones(1, 2, requires_grad=True)
        _, rest = input_half([(x @ w).sum()], None, [x])
        rest.run()
    assert torch.equal(w.grad, torch.full((2, 2), 2.0))


STEPS = st.lists(
    st.tuples(st.sampled_from(["product", "both", "add", "keep", "scale"]), *[st.integers(0, 5)] * 3), max_size=8
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_halved_backward_of_any_graph_equals_one_backward(steps: list[tuple[str, int, int, int]]) -> None:
    """Values and weights are drawn by number, so weights are shared at random, before and behind each other."""

    def forward(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, ...]:
        values, weights = [torch.cat([x, x[:1]]).tanh()], list(w.values())
        for kind, i, j, k in steps:
            value, first, second = values[i % len(values)], weights[j % len(weights)], weights[k % len(weights)]
            if kind == "product":
                values.append((value @ first).tanh())
            elif kind == "both":
                values.extend(y.sin() for y in Both.apply(value, first, second))
            elif kind == "add":
                values.append(value + first[k % 4] * values[j % len(values)])
            elif kind == "scale":
                values.append(value * second.mean())
            else:
                weights.append(first @ second)
        return tuple(y * 1 for y in values[-2:])

    test_halved_backward_equals_one_backward(forward)
