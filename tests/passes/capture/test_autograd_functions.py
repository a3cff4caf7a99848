"""A `torch.autograd.Function` is in the graph with its own backward, exact wherever it is cut; or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import small_models
import torch
from errors import line_of, message
from ranks import Checks
from small_models import Negated, Plain
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, vmap

import autotp
from autotp.options import OPTIONAL

# ---- models whose gradients are their own: a function of every kind inside an MLP

aten = torch.ops.aten


class Square(torch.autograd.Function):
    """Has the backward that its forward has anyway, as what saves memory has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Clamped(torch.autograd.Function):
    """Is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


class Reversed(torch.autograd.Function):
    """Gradient reversal, its strength an attribute of ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


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


class Tanh(torch.autograd.Function):
    """In two parts, and keeps its output."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) * 3


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


class Relu(torch.autograd.Function):
    """Writes into its gradient, as torch's tutorial does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x < 0] = 0
        return grad.mul_(1.5)


class Normed(torch.autograd.Function):
    """Mixes the width: no rank has all that it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x)
        return x / ctx.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.size * grad.abs().amax(-1, keepdim=True)


class Inside(Plain):
    """A Function between the layers, where all is cut."""

    def __init__(self, function: Any = Square, *more: Any) -> None:
        super().__init__()
        self.function, self.more = function, more

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x), *self.more))


class Outside(Inside):
    """A Function around the layers, where nothing is cut."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.function.apply(self.down(torch.nn.functional.gelu(self.up(x))), *self.more)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(x))


class Frozen(Plain):
    def __init__(self, function: Any = Scaled, learns: bool = False) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x), self.scale))


class Layer(Plain):
    def mlp(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(Product.apply(x, self.up.weight))
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
        return torch.nn.functional.linear(self.up(x).relu(), Rounded.apply(self.down.weight))


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.mlp = Inside(function)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stack(nn.Module):
    """Blocks that are captured once."""

    def __init__(self, function: Any = Clamped, depth: int = 3) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(function) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


MODELS: dict[str, Any] = {
    **{f"inside-{kind.__name__}": lambda kind=kind: Inside(kind) for kind in (
        Square, Rounded, Clamped, Negated, Tanh, Relu, Normed)},
    **{f"outside-{kind.__name__}": lambda kind=kind: Outside(kind) for kind in (
        Square, Rounded, Clamped, Negated, Tanh, Relu, Normed)},
    "reversed": lambda: Inside(Reversed, 0.3),
    "frozen": Frozen,
    "no-gradient": lambda: Frozen(Scaled, True),
    "weighed": lambda: Frozen(Weighed, True),
    "weighed-frozen": lambda: Frozen(Weighed, False),
    "layer": Layer,
    "several": Several,
    "one-read": OneRead,
    "twice": Twice,
    "of-weight": OfWeight,
    "stack": Stack,
    "stack-tanh": lambda: Stack(Tanh),
}  # fmt: skip


# ---- in one process

X = torch.linspace(-1, 1, 24).view(3, 8)
CALL = "return self.down(self.function.apply(self.up(x), *self.more))"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.rare)])
def test_equal_to_one_device(kind: str, tp: int) -> None:
    torch.manual_seed(0)
    report = autotp.verify(MODELS[kind](), tp, example_inputs=X)
    assert report.ok, report


@pytest.mark.parametrize("kind", ["inside-Tanh", "inside-Relu", "layer", "several", "twice", "weighed"])
def test_what_it_surrounds_stays_cut(kind: str) -> None:
    """Both layers are cut by their width, and nothing is sent but a sum; one backward sums what it sends to `x`."""
    plan = autotp.explain(MODELS[kind](), 2, example_inputs=X)
    assert {"up.weight", "down.weight"} <= {cut.name for cut in plan.cuts}
    assert plan.traffic.forward == {"all-reduce": 1}
    assert plan.traffic.backward == ({"all-reduce": 1} if kind == "layer" else {})


def test_a_functions_apply_works_again() -> None:
    autotp.explain(Inside(Negated), 2, example_inputs=X)
    assert Negated.apply(X).equal(X)


def test_two_calls_on_one_value_have_two_gradients() -> None:
    """Shared, their gradients would be clamped as one: 0.5 for 0.5 + 0.5."""
    from autotp.passes.canonicalize import cse

    before = cse.output
    cse.output = None  # type: ignore[assignment]
    try:
        assert not autotp.verify(Twice(), 2, example_inputs=X).ok
    finally:
        cse.output = before


# ---- refused


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if grad.sum() > 0 else -grad


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand(grad.shape)


class Unknowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return one if other is None else other


class Missing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: float) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Again(torch.autograd.Function):
    """Computes forward again in backward, and has autograd differentiate it, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x.tanh()
        return torch.autograd.grad(y, x, grad)[0]


OPERATOR = "torch.library.custom_op with register_autograd, and autotp.rule"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Dirty, "ValueError: it writes into its operands (mark_dirty)"),
        (
            Branching, "GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq(u0, 1) "
            "(unhinted: Eq(u0, 1)).  (Size-like symbols: none)",
        ),
        (
            Unknowing, "ValueError: which of its outputs have gradients is not known before "
            "(set_materialize_grads(False))",
        ),
        (Again, "ValueError: its backward calls torch.autograd.grad"),
        (Missing, "ValueError: it returns 1 gradients of 2 operands"),
    ],
)  # fmt: skip
def test_refused(function: Any, why: str) -> None:
    model = Inside(function, *(2.0,) * (function is Missing))
    assert message(lambda: autotp.explain(model, 2, example_inputs=X)) == (
        f"explain(Inside, tp=2): the backward of the torch.autograd.Function `{function.__name__}` cannot be in a "
        f"graph: {why}\n  at       {line_of(__file__, CALL)}\n  try      {OPERATOR}"
    )


def test_random_numbers_in_backward_are_refused() -> None:
    assert message(lambda: autotp.explain(Inside(Drawing), 2, example_inputs=X)) == (
        "explain(Inside, tp=2): the backward of the torch.autograd.Function `Drawing` draws random numbers\n"
        f"  at       {line_of(small_models.__file__, 'return self.mlp(x)')}\n"
        "  try      draw them in forward, and save them for backward"
    )


# ---- on real ranks

checks = Checks()
LONG = torch.linspace(-1, 1, 80).view(10, 8).double()


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind]().double()
    return model


def _trained(model: nn.Module, xs: Sequence[Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
    return model


def _expect_equal(kind: str, n: int, **how: Any) -> None:
    """Three steps at three shapes, the last two not the captured one."""
    xs = X.double(), LONG, LONG[:5]
    one = _trained(_model(kind), xs)
    mine = _trained(autotp.parallelize(_model(kind), n, example_inputs=X.double(), **how), xs)
    for name, tensor in autotp.full_state_dict(mine).items():
        torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-11, atol=1e-12)


@checks.on(2)
@checks.on(3, rare=True)
def trains(rank: int, n: int) -> None:
    for kind in ("inside-Tanh", "layer", "several", "weighed", "stack"):
        _expect_equal(kind, n)


@checks.on(2)
def trains_with_options(rank: int, n: int) -> None:
    _expect_equal("stack-tanh", n, recompute="full")
    _expect_equal("layer", n, sequence_parallel=True)
    _expect_equal("stack", n, without=OPTIONAL)


@checks.on(2)
def frozen_and_thawed(rank: int, n: int) -> None:
    """What is frozen when the graph is captured has a gradient once it is not."""
    one, mine = (_model("weighed-frozen") for _ in range(2))
    mine = autotp.parallelize(mine, n, example_inputs=X.double())
    for model in (one, mine):
        _trained(model, (LONG,))
        model.get_parameter("scale").requires_grad_()
        model.get_parameter("up.weight").requires_grad_(False)
        _trained(model, (LONG, X.double()))
    for name, tensor in autotp.full_state_dict(mine).items():
        torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-11, atol=1e-12)


@checks.on(2)
def torch_func(rank: int, n: int) -> None:
    """One device cannot have the Function under torch.func at all, unless it says `setup_context`."""
    for kind in ("inside-Relu", "layer", "stack-tanh"):
        x, one = LONG.clone().requires_grad_(), _model(kind)
        (expected,) = torch.autograd.grad((one(x) ** 2).sum(), x)
        mine = autotp.parallelize(_model(kind), n, example_inputs=X.double())
        own = dict(mine.named_parameters())
        loss: Callable[..., Tensor] = lambda p, x, m=mine: (functional_call(m, p, (x,)) ** 2).sum()  # noqa: E731
        torch.testing.assert_close(grad(loss, argnums=1)(own, LONG), expected, rtol=1e-11, atol=1e-12)
        rows = vmap(lambda x, p=own, f=loss: grad(f, argnums=1)(p, x[None])[0])(LONG)
        torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)


@checks.on(2)
def compiled(rank: int, n: int) -> None:
    one, mine = _model("several"), autotp.parallelize(_model("several"), n, example_inputs=X.double())
    mine(LONG)
    torch.testing.assert_close(torch.compile(mine, backend="aot_eager", fullgraph=True)(LONG), one(LONG))
    one, mine = _model("inside-Tanh"), autotp.parallelize(_model("inside-Tanh"), n, example_inputs=X.double())
    mine(LONG)
    both = [x.clone().requires_grad_() for x in (LONG, LONG)]
    (one(both[0]) ** 2).sum().backward()
    (torch.compile(mine, backend="aot_eager", fullgraph=True)(both[1]) ** 2).sum().backward()
    torch.testing.assert_close(both[1].grad, both[0].grad, rtol=1e-11, atol=1e-12)


@checks.on(2)
def no_second_derivative(rank: int, n: int) -> None:
    mine = autotp.parallelize(_model("inside-Tanh"), n, example_inputs=X.double())
    x = LONG.clone().requires_grad_()
    (first,) = torch.autograd.grad((mine(x) ** 2).sum(), x, create_graph=True)
    for how, call in (
        ("a second time", lambda: (first**2).sum().backward()),
        ("a second time", lambda: grad(lambda x: grad(lambda x: (mine(x) ** 2).sum())(x).pow(2).sum())(LONG)),
        ("in forward mode", lambda: torch.func.jvp(mine, (LONG,), (LONG,))),
    ):
        assert message(call) == (
            f"the backward of the torch.autograd.Function `Tanh` would be differentiated {how}\n"
            "  try      first derivatives in backward mode (loss.backward(), torch.func.grad, torch.func.vjp); for"
            " others torch.library.custom_op with register_autograd, and autotp.rule"
        )


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.model(x) - y) ** 2).mean()


@checks.on(2)
def distributed(rank: int, n: int) -> None:
    """In two microbatches, on tensor ranks or pipeline stages; a gradient that sums rows itself is refused."""
    batch = LONG[:8], LONG[2:] * 20
    for grid in ({"tp": 2}, {"pp": 2}):
        torch.manual_seed(0)
        one = WithLoss(Stack(Clamped)).double()
        mine = autotp.distribute(copy.deepcopy(one), microbatches=2, example_inputs=batch, **grid)
        one(*batch).backward()
        mine.step(*batch)
        for model in (one, mine):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        for name, tensor in autotp.full_state_dict(mine).items():
            torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-11, atol=1e-12)
    text = message(lambda: autotp.distribute(WithLoss(Layer()).double(), tp=2, microbatches=2, example_inputs=batch))
    assert "`aten.matmul.default` mixes the rows of the batch, which cannot be computed in parts" in text


def _bloom(dtype: torch.dtype) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 6}
    model: nn.Module = BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))
    return model.to(dtype).train()


def _steps(model: nn.Module, labels: bool) -> Tensor:
    """The losses of ten steps, each of another shape than the one before."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for i in range(10):
        x = torch.randint(0, 64, (2 + i % 3, 5 + i % 4), generator=torch.Generator().manual_seed(i))
        found = model(input_ids=x, labels=x).loss if labels else model(input_ids=x).logits.logsumexp(-1).mean()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return torch.stack(losses)


def _expect_bloom(n: int, dtype: torch.dtype, labels: bool) -> None:
    one, mine = _bloom(dtype), autotp.parallelize(_bloom(dtype), n)
    bound = {"rtol": 1e-5, "atol": 1e-6}
    if dtype == torch.float64 and not labels:  # With labels transformers computes the loss in float32.
        bound = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(_steps(mine, labels), _steps(one, labels), **bound)
    for name, tensor in autotp.full_state_dict(mine).items():
        torch.testing.assert_close(tensor, one.state_dict()[name], **bound)


@checks.on(2)
def bloom(rank: int, n: int) -> None:
    _expect_bloom(n, torch.float64, labels=True)


@checks.on(2, 3, rare=True)
def bloom_in_all_ways(rank: int, n: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for labels in (True, False):
            _expect_bloom(n, dtype, labels)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
