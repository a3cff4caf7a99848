"""row_sums: a sum of rows is one operator with its head where it is linear in the terms, and equal to one device's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from graphs import CLASSES, LABELS, WIDTH, WORD_ROWS, fused, small
from torch import Tensor, nn

import autotp


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


class Rows(nn.Module):
    """A head, a second one, and a loss of rows. name: which loss"""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.name = nn.Embedding(CLASSES, WIDTH), name
        self.head, self.teacher = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.table(tokens), labels != -100
        logarithms = self.head(x).log_softmax(-1)
        rows = logarithms.gather(-1, labels.clamp(0).unsqueeze(-1)).squeeze(-1)
        counted = mask.to(rows.dtype)
        match self.name:
            case "mean":
                return -rows.mean()
            case "masked":
                return -(rows * counted).sum() / counted.sum()
            case "filled":
                return rows.flatten().masked_fill(~mask.flatten(), 0).sum() / 3 + (rows.detach() * 0).sum()
            case "weighted":  # Flat rows, a number that divides, and a value of rows that has no logits.
                return ((rows.flatten() * counted.flatten() + x.sum(-1).flatten()) / counted.sum()).sum()
            case "entropy":
                return (rows + 0.1 * (logarithms.exp() * logarithms).sum(-1)).mean()
            case "divergence":
                target = self.teacher(x).log_softmax(-1)
                return F.kl_div(logarithms, target, reduction="none", log_target=True).sum(-1).mul(counted).sum()
            case "learned":
                return (rows * self.scale * counted).sum()
            case "ratio":
                return (rows - rows.detach()).exp().mul(counted).sum()
        return rows.sum() + rows.exp().mean()


SUMMED = "mean", "masked", "weighted", "entropy", "divergence", "learned"
KEPT = "filled", "ratio", "both"


@pytest.mark.parametrize("name", [*SUMMED, *KEPT])
def test_linear_sums_are_in_the_operator_of_the_head(name: str) -> None:
    model = Rows(name).double()
    assert fused(model, 1) == ["linear_loss_sum" if name in SUMMED else "linear_class_terms"]
    report = autotp.verify(model, tp=1, example_inputs=(WORD_ROWS, LABELS))
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


@pytest.mark.parametrize("name", ["mean", "masked"])
def test_terms_of_a_cut_vocabulary_are_summed_by_the_graph(name: str) -> None:
    assert fused(Rows(name).double(), 2, cut={"head": "vocab"}) == ["linear_class_terms"]
