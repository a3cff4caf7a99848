"""The smallest model that is worth cutting."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """An MLP; what a subclass does around it differs."""

    def __init__(self, hidden: int = 8, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def mlp(self, x: Tensor) -> Tensor:
        """x, result: [... hidden]"""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Negated(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad
