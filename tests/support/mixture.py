"""A mixture of experts, as tests of routing cut it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mixture(nn.Module):
    """Two of four experts for each token, with biases."""

    def __init__(self, grouped: Callable[..., Any] | None = None, number: int = 4, width: int = 10) -> None:
        """`grouped`: the product of rows in groups; without it, each row has weights of its own."""
        super().__init__()
        self.grouped, self.number = grouped, number
        self.router = nn.Linear(8, number)
        self.up, self.up_bias = nn.Parameter(torch.empty(number, 8, width)), nn.Parameter(torch.empty(number, width))
        self.down = nn.Parameter(torch.empty(number, width, 8))
        self.down_bias = nn.Parameter(torch.empty(number, 8))
        for parameter in (self.up, self.up_bias, self.down, self.down_bias):
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens 8]"""
        weights, chosen = self.router(x).softmax(-1).topk(2)  # [tokens 2]
        rows = self._groups if self.grouped else self._rows
        y = rows(x.repeat_interleave(2, 0), chosen.reshape(-1), weights.reshape(-1, 1))
        return x + y.view(-1, 2, 8).sum(1)

    def _rows(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [rows 8], chosen: [rows], weights: [rows 1]"""
        h = F.gelu(torch.bmm(x.unsqueeze(1), self.up[chosen]).squeeze(1) + self.up_bias[chosen])
        return (torch.bmm(h.unsqueeze(1), self.down[chosen]).squeeze(1) + self.down_bias[chosen]) * weights

    def _groups(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert self.grouped is not None
        ordered, places = chosen.sort()
        ends = torch.histc(ordered.float(), self.number, 0, self.number - 1).cumsum(0, dtype=torch.int32)
        h = F.gelu(self.grouped(x[places], self.up, ends) + self.up_bias[ordered])
        y = (self.grouped(h, self.down, ends) + self.down_bias[ordered]) * weights[places]
        return y[places.argsort()]
