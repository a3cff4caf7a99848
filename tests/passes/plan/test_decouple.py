"""decouple: masks and slopes of other axes than the heads' do not keep these from being cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


class Sloped(nn.Module):
    """Attention whose scores get a slope for each of six heads, of two pieces, as ALiBi has for no power of two."""

    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 72), nn.Linear(24, 12)
        self.extra = nn.Parameter(torch.ones(2)) if learnt else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        q, k, v = (y.unflatten(-1, (6, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        rest = torch.arange(2.0) if self.extra is None else self.extra
        slopes = torch.cat([2.0 ** torch.arange(4.0), rest]).to(x.dtype)  # [heads]
        bias = slopes[:, None, None] * torch.arange(x.size(1))  # [heads 1 seq]
        return self.out(
            F.scaled_dot_product_attention(q, k, v, bias[None].expand(x.size(0), -1, x.size(1), -1))
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.parametrize("tp", [2, 3])
def test_decouple_cuts_heads_beside_fixed_slopes(tp: int) -> None:
    """Numbers: the heads are cut, and every rank takes its slopes."""
    report = autotp.verify(Sloped(learnt=False), tp, example_inputs=torch.randn(2, 5, 12))
    assert report.ok, report
    assert {cut.name: str(cut.layout) for cut in report.plan.cuts}["qkv.weight"] == "[72@tp, 12]"
    assert report.plan.traffic.forward == {"all-reduce": 1} and not report.plan.traffic.backward


def test_decouple_cuts_heads_with_learnt_slopes() -> None:
    """Parameters: these are the axes, whatever they are, and the gradients are right."""
    report = autotp.verify(Sloped(learnt=True), 2, example_inputs=torch.randn(2, 5, 12))
    assert report.ok, report
