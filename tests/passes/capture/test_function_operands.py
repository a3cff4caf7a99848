"""Functions of several operands or results, of weights, and several calls on one value: each has its own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import message
from ranks import Checks
from small_models import (
    MORE_ROWS,
    ROWS,
    Clamped,
    Plain,
    Rounded,
    WithLoss,
    expect_equal_training,
    expect_whole,
    trained,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, vmap

import autotp
from autotp.options import OPTIONAL


class Scaled(torch.autograd.Function):
    """Forgets the gradient of its second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


class Weighed(torch.autograd.Function):
    """A scale for each channel, whose gradient is summed over all rows, and doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        by_x = grad * scale if ctx.needs_input_grad[0] else None
        return by_x, 2 * (grad * x).sum(0) if ctx.needs_input_grad[1] else None


class Product(torch.autograd.Function):
    """A linear layer of its own; the gradient of its weight is not the derivative, but half of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, 0.5 * grad.t() @ x


class Both(torch.autograd.Function):
    """Two outputs, and a third without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        above = x > y
        ctx.mark_non_differentiable(above)
        return x * y, x - y, above

    @staticmethod
    def backward(ctx: Any, product: Tensor, difference: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y + difference.clamp(-1, 1), product * x - 5 * difference


class Frozen(Plain):
    def __init__(self, function: Any = Scaled, learns: bool = False) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x), self.scale))


class Layer(Plain):
    def mlp(self, x: Tensor) -> Tensor:
        hidden = F.gelu(Product.apply(x, self.up.weight))
        return Product.apply(hidden, self.down.weight)


class Several(Plain):
    def mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        product, difference, above = Both.apply(up, up.flip(0))
        return self.down(torch.where(above, product, difference))


class OneRead(Plain):
    """Nobody reads the first output."""

    def mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(Both.apply(up, up.flip(0))[1])


class Twice(Plain):
    """Two calls on one value, whose gradients are clamped one by one."""

    def mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(Clamped.apply(up) * 3 + Clamped.apply(up).sin())


class OfWeight(Plain):
    """A weight that is rounded on the way."""

    def mlp(self, x: Tensor) -> Tensor:
        return F.linear(self.up(x).relu(), Rounded.apply(self.down.weight))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": Frozen,
    "no-gradient": lambda: Frozen(Scaled, True),
    "weighed": lambda: Frozen(Weighed, True),
    "weighed-frozen": lambda: Frozen(Weighed, False),
    "layer": Layer,
    "several": Several,
    "one-read": OneRead,
    "twice": Twice,
    "of-weight": OfWeight,
}


# ---- in one process

X = ROWS.float()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.rare)])
def test_functions_of_several_operands_equal_one_device(kind: str, tp: int) -> None:
    torch.manual_seed(0)
    report = autotp.verify(MODELS[kind](), tp, example_inputs=X)
    assert report.ok, report


@pytest.mark.parametrize("kind", ["layer", "several", "twice", "weighed"])
def test_layers_around_a_weighted_function_stay_cut(kind: str) -> None:
    """Both layers are cut by their width, and nothing is sent but a sum; one backward sums what it sends to `x`."""
    plan = autotp.explain(MODELS[kind](), 2, example_inputs=X)
    assert {"up.weight", "down.weight"} <= {cut.name for cut in plan.cuts}
    assert plan.traffic.forward == {"all-reduce": 1}
    assert plan.traffic.backward == ({"all-reduce": 1} if kind == "layer" else {})


def test_shared_function_calls_would_lose_a_gradient() -> None:
    """Shared, their gradients would be clamped as one: 0.5 for 0.5 + 0.5."""
    from autotp.passes.canonicalize import cse

    before = cse.output
    cse.output = None  # type: ignore[assignment]
    try:
        assert not autotp.verify(Twice(), 2, example_inputs=X).ok
    finally:
        cse.output = before


# ---- on real ranks

checks = Checks()


@checks.on(2)
@checks.on(3, rare=True)
def functions_of_weights_train_as_one_device(rank: int, n: int) -> None:
    for kind in ("layer", "several", "weighed"):
        expect_equal_training(MODELS[kind], n)


@checks.on(2)
def functions_of_weights_train_along_the_sequence_and_without_passes(rank: int, n: int) -> None:
    expect_equal_training(Layer, n, sequence_parallel=True)
    expect_equal_training(Several, n, without=OPTIONAL)


@checks.on(2)
def functions_of_frozen_weights_have_gradients_once_thawed(rank: int, n: int) -> None:
    """What is frozen when the graph is captured has a gradient once it is not."""
    one, mine = _model("weighed-frozen"), _parallel("weighed-frozen", n)
    for model in (one, mine):
        trained(model, (MORE_ROWS,))
        model.get_parameter("scale").requires_grad_()
        model.get_parameter("up.weight").requires_grad_(False)
        trained(model, (MORE_ROWS, ROWS))
    expect_whole(mine, one)


@checks.on(2)
def functions_of_weights_give_per_row_gradients(rank: int, n: int) -> None:
    """A gradient of rows one by one, through a Function that has a weight."""
    x, one, mine = MORE_ROWS.clone().requires_grad_(), _model("layer"), _parallel("layer", n)
    (expected,) = torch.autograd.grad((one(x) ** 2).sum(), x)
    own = dict(mine.named_parameters())
    loss: Callable[..., Tensor] = lambda p, x: (functional_call(mine, p, (x,)) ** 2).sum()  # noqa: E731
    torch.testing.assert_close(grad(loss, argnums=1)(own, MORE_ROWS), expected, rtol=1e-11, atol=1e-12)
    rows = vmap(lambda x: grad(loss, argnums=1)(own, x[None])[0])(MORE_ROWS)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)


@checks.on(2)
def functions_of_several_results_compile(rank: int, n: int) -> None:
    one, mine = _model("several"), _parallel("several", n)
    mine(MORE_ROWS)
    torch.testing.assert_close(torch.compile(mine, backend="aot_eager", fullgraph=True)(MORE_ROWS), one(MORE_ROWS))


@checks.on(2)
def functions_that_sum_rows_themselves_are_refused_in_microbatches(rank: int, n: int) -> None:
    batch = MORE_ROWS[:8], MORE_ROWS[2:]
    text = message(lambda: autotp.distribute(WithLoss(Layer()).double(), tp=2, microbatches=2, example_inputs=batch))
    assert "`result` gives each row a sum over the batch, which cannot be computed in parts" in text


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double()


def _parallel(kind: str, n: int) -> nn.Module:
    return autotp.parallelize(_model(kind), n, example_inputs=ROWS)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
