"""A `torch.autograd.Function` is in the graph with its own backward, exact wherever it is cut; or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
import torch.nn.functional as F
from errors import OPERATOR, line_of, message
from small_models import ROWS, Clamped, Inside, Negated, Relu, Rounded, Tanh
from torch import Tensor, nn

import autotp

# ---- models whose gradients are their own: a Function of each kind inside an MLP


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


class Reversed(torch.autograd.Function):
    """Gradient reversal, its strength an attribute of ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


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


class Scaled(torch.autograd.Function):
    """Has its context set up behind forward, and a default."""

    @staticmethod
    def forward(x: Tensor, by: float = 3.0) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.by * grad, None


class Peaked(torch.autograd.Function):
    """Writes into its operand without saying so, as a public sparsemax does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.max(-1, keepdim=True)[0]
        y = x.clamp(min=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.where(y > -1, 2 * grad, grad * y)


class NegatedInC(Negated):
    """Has the `apply` of torch 2.14."""

    apply = torch._C._FunctionBase.__dict__["apply"]


squared, rounded = Square.apply, Rounded.apply
negated_in_c = NegatedInC.apply


class Aliased(Inside):
    """`apply` was taken from the Function before, by a global or by the model: torch's own method with its class."""

    def __init__(self) -> None:
        super().__init__(Negated)
        self.negated = Negated.apply

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.negated(rounded(squared(self.up(x)))))


class AliasedInC(Aliased):
    """Is called once where gradients are recorded, and once where they are not."""

    def mlp(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = negated_in_c(x).mean(-1, keepdim=True)
        return self.down(rounded(negated_in_c(self.up(x)))) * scale


class Outside(Inside):
    """A Function around the layers, where nothing is cut."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.function.apply(self.down(F.gelu(self.up(x))), *self.more)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(x))


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Square, Rounded, Clamped, Negated, Tanh, Relu, Normed)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"inside-{name}": lambda kind=kind: Inside(kind) for name, kind in KINDS.items()},
    **{f"outside-{name}": lambda kind=kind: Outside(kind) for name, kind in KINDS.items()},
    "reversed": lambda: Inside(Reversed, 0.3),
    "aliased": Aliased,
    "aliased-in-c": AliasedInC,
    "default": lambda: Inside(Scaled),
    "writing": lambda: Inside(Peaked),
}
X = ROWS.float()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.rare)])
def test_functions_with_own_backward_equal_one_device(kind: str, tp: int) -> None:
    torch.manual_seed(0)
    report = autotp.verify(MODELS[kind](), tp, example_inputs=X)
    assert report.ok, report


@pytest.mark.parametrize("kind", ["inside-Tanh", "inside-Relu"])
def test_layers_around_a_function_stay_cut(kind: str) -> None:
    """Both layers are cut by their width, and nothing is sent but a sum; one backward sums what it sends to `x`."""
    plan = autotp.explain(MODELS[kind](), 2, example_inputs=X)
    assert {"up.weight", "down.weight"} <= {cut.name for cut in plan.cuts}
    assert plan.traffic.forward == {"all-reduce": 1}
    assert plan.traffic.backward == {}


def test_function_apply_works_after_capture() -> None:
    autotp.explain(Inside(Negated), 2, example_inputs=X)
    assert Negated.apply(X).equal(X)


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


CALL = "return self.down(self.function.apply(self.up(x), *self.more))"


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
def test_functions_whose_backward_no_graph_takes_are_refused(function: Any, why: str) -> None:
    model = Inside(function, *(2.0,) * (function is Missing))
    assert message(lambda: autotp.explain(model, 2, example_inputs=X)) == (
        f"explain(Inside, tp=2): the backward of the torch.autograd.Function `{function.__name__}` cannot be in a "
        f"graph: {why}\n  at       {line_of(small_models.__file__, CALL)}\n  try      {OPERATOR}"
    )


def test_functions_that_draw_in_backward_are_refused() -> None:
    assert message(lambda: autotp.explain(Inside(Drawing), 2, example_inputs=X)) == (
        "explain(Inside, tp=2): the backward of the torch.autograd.Function `Drawing` draws random numbers\n"
        f"  at       {line_of(small_models.__file__, 'return self.mlp(x)')}\n"
        "  try      draw them in forward, and save them for backward"
    )
