"""Attention with fewer key/value heads than query heads, as tests of grids cut it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.sharding.axis import Axis, find


class Grouped(nn.Module):
    """Attention with key/value heads that several query heads share, in the layouts that models have."""

    def __init__(self, kv: int, group: int, layout: str, cache: bool = False, dropout: float = 0.0) -> None:
        """`cache`: whether the keys are returned, too; `dropout`: of the keys."""
        super().__init__()
        self.kv, self.group, self.layout, self.cache, self.p, heads = kv, group, layout, cache, dropout, kv * group
        self.q, self.k, self.v = nn.Linear(12, 4 * heads), nn.Linear(12, 4 * kv), nn.Linear(12, 4 * kv)
        self.fused = nn.Linear(12, 4 * (heads + 2 * kv))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4 * heads, 12)

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 12]"""
        q, k, v = (y.transpose(1, 2) for y in self._heads(x))
        k = F.dropout(self.norm(k), self.p, self.training)
        y = F.scaled_dot_product_attention(q, *(z.repeat_interleave(self.group, 1) for z in (k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return (x, k) if self.cache else x

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """[batch seq heads 4], and of keys and values [batch seq kv 4]."""
        if self.layout == "separate":
            return tuple(f(x).unflatten(-1, (-1, 4)) for f in (self.q, self.k, self.v))
        y, heads = self.fused(x), self.kv * self.group
        if self.layout == "q|k|v":
            return tuple(z.unflatten(-1, (-1, 4)) for z in y.split([4 * heads, 4 * self.kv, 4 * self.kv], -1))
        y = y.unflatten(-1, (self.kv, self.group + 2, 4))
        return y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]


def places(of: Axis, leaf: Axis) -> torch.Tensor:
    """The oracle: for each position of an axis, where it lies along `leaf` (-1: nowhere). [size]"""
    of = find(of)
    if of is find(leaf):
        return torch.arange(of.size.number)
    if of.kind == "leaf":
        return torch.full((of.size.number,), -1)
    parts = [places(part, leaf) for part in of.parts]
    if of.kind == "concat":
        return torch.cat(parts)
    grids = torch.meshgrid(*parts, indexing="ij")
    return torch.stack(grids).amax(0).flatten()
