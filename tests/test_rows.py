"""rows: what makes a row of a batch depend on the others is refused; ordinary models are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.errors import Error
from autotp.passes.capture import skeleton_of
from autotp.transform import Choices, analyse

X, Y = torch.randn(6, 5, 8), torch.zeros(6, 5, dtype=torch.int64)


Does = Callable[[Tensor], Tensor]


TABLE = torch.randn(9, 8)


class Model(nn.Module):
    """Two linear layers, what a test does between them, and the mean cross-entropy."""

    def __init__(self, does: Does, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 7)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.does, self.loss = does, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq]"""
        found = self.last(self.does(self.first(x)))
        loss = F.cross_entropy(found.flatten(0, 1), y.flatten())
        return loss if self.loss is None else loss + self.loss(found, x)


def analysed(model: nn.Module) -> None:
    analyse(skeleton_of(model), (X, Y), {}, 2, Choices(summed=True))


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda x: x.softmax(1) + x.mean(1, keepdim=True), id="along-the-sequence"),
        pytest.param(lambda x: (x @ x.mT) @ x, id="attention"),
        pytest.param(lambda x: x.transpose(0, 1).cumsum(0).transpose(0, 1), id="cumsum"),
        pytest.param(lambda x: x * torch.arange(5).unsqueeze(-1), id="positions"),
        pytest.param(lambda x: x + x[torch.arange(x.shape[0]), x[..., 0].argmax(1)].unsqueeze(1), id="one-of-each-row"),
        pytest.param(lambda x: F.dropout(x, 0.1), id="dropout"),
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), id="dropped-weights"),
    ],
)
def test_rows_by_themselves(does: Callable[[Tensor], Tensor]) -> None:
    analysed(Model(does))


@pytest.mark.parametrize(
    ("does", "named"),
    [
        pytest.param(lambda x: x - x.mean(0), "aten.mean.dim", id="mean"),
        pytest.param(lambda x: x.softmax(0), "aten.softmax", id="softmax"),
        pytest.param(lambda x: x.cumsum(0), "aten.cumsum", id="cumsum"),
        pytest.param(lambda x: x / x.abs().sum(), "aten.div.Tensor", id="sum"),
        pytest.param(lambda x: x.flip(0), "aten.flip", id="order"),
        pytest.param(lambda x: x.flatten(0, 1).cumsum(0).view(x.shape), "aten.cumsum", id="rows-and-places"),
        pytest.param(lambda x: x + x[:1], "aten", id="the-first-row"),
        pytest.param(lambda x: x.flatten(0, 1)[torch.arange(x.shape[0])].unsqueeze(1) + x, "aten", id="the-first"),
        pytest.param(lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)], "aten.index.Tensor", id="backwards"),
        pytest.param(
            lambda x: x[torch.arange(x.shape[0])[None].expand(x.shape[0], -1), 0].sum(1, True) + x, "aten", id="all"
        ),
        pytest.param(lambda x: x * torch.arange(x.shape[0]).view(-1, 1, 1), "aten.mul.Tensor", id="times-its-number"),
        pytest.param(lambda x: x + TABLE[torch.arange(x.shape[0]), None], "aten.index", id="by-its-number"),
    ],
)
def test_rows_that_depend_on_others(does: Callable[[Tensor], Tensor], named: str) -> None:
    with pytest.raises(Error) as raised:
        analysed(Model(does))
    text = str(raised.value)
    assert text.startswith(f"`{named}") and "cannot be computed in parts" in text and "test_rows.py" in text


def test_batch_norm() -> None:
    model = Model(lambda x: model.norm(x.transpose(1, 2)).transpose(1, 2))
    with pytest.raises(Error, match=r"batch_norm.*cannot be computed in parts"):
        analysed(model)


def test_a_loss_of_the_whole_batch() -> None:
    """As that which balances experts: a product of means."""
    with pytest.raises(Error, match="cannot be computed in parts"):
        analysed(Model(lambda x: x, lambda y, x: (y.mean(0) * y.square().mean(0)).sum()))
    analysed(Model(lambda x: x, lambda y, x: 0.1 * y.square().mean()))


def test_a_table_as_long_as_the_batch() -> None:
    with pytest.raises(Error, match=r"`aten.slice.Tensor` computes with the number of rows"):
        analysed(Model(lambda x: x + TABLE[: x.shape[0]].unsqueeze(1)))
