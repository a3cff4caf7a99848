"""Models whose gradients are their own: a `torch.autograd.Function` of every kind inside an MLP."""

from __future__ import annotations

from typing import Any

import torch
from mlp import Negated, Plain
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
