"""ctc_loss: equal to torch's, with its gradient, in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import Plain
from torch import Tensor, nn

import autotp
from autotp.ops.losses.ctc_loss import ctc_loss

STEPS, LENGTHS = torch.tensor([9, 8, 3]), torch.tensor([4, 0, 3])
TARGETS = torch.tensor([[1, 1, 3, 4], [5, 6, 1, 1], [2, 2, 2, 1]])


def log_probs(dtype: torch.dtype = torch.float64) -> Tensor:
    """[9 3 7]"""
    torch.manual_seed(0)
    return torch.randn(9, 3, 7, dtype=dtype).log_softmax(-1).requires_grad_()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", ["padded", "joined", "lists", "alone"])
def test_ctc_loss_equals_torch_s(reduction: str, zero_infinity: bool, dtype: torch.dtype, form: str) -> None:
    """The third target does not fit into its steps: [2 2 2] needs five."""
    given: tuple[Any, ...] = TARGETS, STEPS, LENGTHS
    if form == "joined":
        given = torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS, strict=True)]), STEPS, LENGTHS
    if form == "lists":
        given = TARGETS, STEPS.tolist(), tuple(LENGTHS.tolist())
    mine, its = log_probs(dtype), log_probs(dtype)
    of = [x[:, 0] if form == "alone" else x for x in (mine, its)]
    if form == "alone":
        given = TARGETS[0], torch.tensor(9), torch.tensor(4)
    found, wanted = (
        function(x, *given, blank=0, reduction=reduction, zero_infinity=zero_infinity)
        for function, x in zip((ctc_loss, F.ctc_loss), of, strict=True)
    )
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(mine.grad, its.grad, equal_nan=True)


class Recogniser(Plain):
    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        logits = self.mlp(x).log_softmax(-1).transpose(0, 1)
        steps = torch.full((len(x),), x.shape[1])
        own = targets.masked_select(targets > 0)
        loss = nn.CTCLoss(zero_infinity=True)(logits, targets, steps, lengths)
        return loss + F.ctc_loss(logits, own, steps, (targets > 0).sum(-1))


@pytest.mark.parametrize("tp", [2, 3])
def test_ctc_loss_of_a_model_is_verified(tp: int) -> None:
    report = autotp.verify(Recogniser(), tp, example_inputs=(torch.randn(3, 9, 8), TARGETS, LENGTHS))
    assert report.ok, report
