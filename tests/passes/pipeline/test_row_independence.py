"""row_independence: what makes a row of a batch depend on the others is refused; ordinary models are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from errors import message
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.compiler import analyse
from autotp.errors import Error
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.training.microbatches import batch_tensors, places_of_rows
from autotp.training.pipeline.schedules import Training, analyse_microbatch

X, Y = torch.randn(6, 5, 8), torch.zeros(6, 5, dtype=torch.int64)


Does = Callable[[Tensor], Tensor]


TABLE, PLACES = torch.randn(9, 8), torch.arange(5)


def ROWS(x: Tensor) -> Tensor:
    """The numbers of rows."""
    return torch.arange(x.shape[0])


def of_row(x: Tensor) -> Tensor:
    """A mask: [batch seq]"""
    return x[..., 0] > 0


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
    analyse(skeleton_of(model), (X, Y), {}, 2, Options(summed=True))


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda x: x.softmax(1) + x.mean(1, keepdim=True), id="along-the-sequence"),
        pytest.param(lambda x: (x @ x.mT) @ x, id="attention"),
        pytest.param(lambda x: x.transpose(0, 1).cumsum(0).transpose(0, 1), id="cumsum"),
        pytest.param(lambda x: x * torch.arange(5).unsqueeze(-1), id="positions"),
        pytest.param(lambda x: x + x[torch.arange(x.shape[0]), x[..., 0].argmax(1)].unsqueeze(1), id="one-of-each-row"),
        pytest.param(lambda x: x * of_row(x)[ROWS(x)[:, None], PLACES[None]].unsqueeze(-1), id="a-mask-by-its-number"),
        pytest.param(
            lambda x: x * of_row(x)[ROWS(x).view(-1, 1, 1), PLACES.view(1, 1, -1)].transpose(1, 2),
            id="a-mask-unsqueezed",
        ),
        pytest.param(
            lambda x: x + x.flatten(0, 1)[torch.arange(x.shape[0] * 5)].view(x.shape), id="each-its-own-place"
        ),
        pytest.param(lambda x: x.index_put((ROWS(x), x[..., 0].argmax(1)), x[:, 0]), id="one-of-each-row-written"),
        pytest.param(lambda x: x * (torch.rand(x.shape[0], 1, 1) > 0.1), id="drawn-for-each-row"),
        pytest.param(lambda x: torch.cat([x.new_zeros(x.shape[0], 1, 8), x], 1)[:, 1:], id="zeros-for-each-row"),
        pytest.param(lambda x: torch.cat([TABLE[:1].expand(x.shape[0], 1, 8), x], 1)[:, 1:], id="a-token-for-each-row"),
        pytest.param(lambda x: torch.cat([TABLE[:1][None].repeat(x.shape[0], 1, 1), x], 1)[:, 1:], id="repeated"),
        pytest.param(lambda x: F.dropout(x, 0.1), id="dropout"),
        pytest.param(lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1), id="jitter"),
        pytest.param(lambda x: x - torch.empty_like(x).exponential_().log(), id="gumbel"),
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), id="dropped-weights"),
    ],
)
def test_row_independence_accepts_rows_by_themselves(does: Callable[[Tensor], Tensor]) -> None:
    analysed(Model(does))


@pytest.mark.parametrize(
    ("does", "named"),
    [
        pytest.param(lambda x: x - x.mean(0), "aten.sub.Tensor", id="mean"),
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
        pytest.param(
            lambda x: x[ROWS(x)[:, None], of_row(x).int().argmax(1)[None]].sum(1, True) + x, "aten.index", id="across"
        ),
        pytest.param(
            lambda x: x.index_put((ROWS(x)[:, None], of_row(x).int().argmax(1)[None]), x[:, 0]),
            "aten.index_put",
            id="written-across",
        ),
        pytest.param(
            lambda x: x + x[ROWS(x).to(torch.bfloat16).to(torch.int64), 0].unsqueeze(1), "aten.index", id="rounded"
        ),
        pytest.param(lambda x: x + torch.ones(x.shape[0]).cumsum(0).view(-1, 1, 1), "aten.cumsum", id="counted"),
        pytest.param(lambda x: x + torch.eye(x.shape[0])[:, :1, None], "aten.eye", id="one-row-alone"),
        pytest.param(lambda x: x[torch.randperm(x.shape[0])], "aten", id="shuffled"),
        pytest.param(lambda x: x[:, x[:, 0].argmax(-1) % 5].sum(1, True) + x, "aten.index", id="places-of-others"),
        pytest.param(lambda x: x + TABLE[x.shape[0] - 1], "aten.select", id="by-how-many"),
        pytest.param(lambda x: x * (x < x.shape[0]), "aten.lt", id="compared-to-how-many"),
        pytest.param(lambda x: x.masked_fill(x > 0, x.shape[0]), "aten.masked_fill", id="filled-with-how-many"),
        pytest.param(lambda x: x.roll(x.shape[0], 1), "aten.roll", id="moved-by-how-many"),
    ],
)
def test_row_independence_refuses_rows_that_read_others(does: Callable[[Tensor], Tensor], named: str) -> None:
    text = message(lambda: analysed(Model(does)))
    first = text.splitlines()[0]
    assert first.startswith(f"`{named}") and first.endswith(("cannot be computed in parts", "in each part of a batch"))
    assert "test_row_independence.py" in text


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x: [batch seq 8], places: [seq]"""
        return (self.layer(x) * places.unsqueeze(-1)).square().mean()


def test_row_independence_refuses_an_example_with_the_batch_twice() -> None:
    for rows in (2, 4):
        analyse(skeleton_of(Weighted()), (X[:rows], torch.ones(5)), {}, 2, Options(summed=True))
    with pytest.raises(Error, match="as long as the batch along two dimensions") as raised:
        analyse(skeleton_of(Weighted()), (X[:5], torch.ones(5)), {}, 2, Options(summed=True))
    assert "\n  try      example_inputs= with another number of rows, if one" in str(raised.value)


def test_row_independence_refuses_batch_norm() -> None:
    model = Model(lambda x: model.norm(x.transpose(1, 2)).transpose(1, 2))
    with pytest.raises(Error, match=r"batch_norm.*cannot be computed in parts"):
        analysed(model)


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (lambda m: (m / m.max()).sum(), "aten.max"),
        (lambda m: F.one_hot(m.long(), 3).amax((0, 1)).sum(), "aten.amax"),
        (lambda m: m.cumsum(0).sum(), "aten.cumsum"),
        (lambda m: m[:1].sum(), "aten"),
    ],
)
def test_row_independence_refuses_divisors_that_do_not_add_up(count: Callable[[Tensor], Tensor], named: str) -> None:
    """A divisor of the largest weight or the kinds of tokens: of parts of a batch it does not add up."""
    with pytest.raises(Error, match=f"{named}.*cannot be computed in parts"):
        analysed(Model(lambda x: x, lambda y, x: y.sum() / count((x[..., 0] > 0).to(y.dtype))))


@pytest.mark.parametrize(
    "count",
    [
        lambda m: m.sum(), lambda m: m.sum(1).clamp(max=3).sum(), lambda m: (m.sum(1) > 0).sum(),
        lambda m: torch.ones_like(m).sum(), lambda m: m.sum().sum().clamp(min=1) * 2,
        lambda m: m.cumsum(1).amax(1).sum(), lambda m: F.one_hot(m.long(), 3)[..., 1].sum(),
    ],
)  # fmt: skip
def test_row_independence_accepts_counts_as_divisors(count: Callable[[Tensor], Tensor]) -> None:
    analysed(Model(lambda x: x, lambda y, x: y.sum() / count((x[..., 0] > 0).to(y.dtype))))


def test_row_independence_refuses_a_table_cut_to_the_batch() -> None:
    with pytest.raises(Error, match=r"`aten.slice.Tensor` computes with the number of rows"):
        analysed(Model(lambda x: x + TABLE[: x.shape[0]].unsqueeze(1)))


def test_row_independence_refuses_branches_on_the_row_count() -> None:
    with pytest.raises(Error, match="branches on the number of rows") as raised:
        analysed(Model(lambda x: x * 2 if x.shape[0] > 4 else x))
    assert "test_row_independence.py" in raised.value.facts["at"]
    with pytest.raises(Error, match="can be traced for batches of 6 rows only"):
        analysed(Model(lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None, None]))
    analysed(Model(lambda x: x * 2 if x.shape[0] * x.shape[1] > x.shape[0] else x))


def test_row_independence_accepts_batch_and_sequence_of_one_length() -> None:
    """Batch and sequence of one length: nothing says that they are one."""
    model, x, y = Model(lambda x: x.softmax(1)), torch.randn(5, 5, 8), torch.zeros(5, 5, dtype=torch.int64)
    analyse(skeleton_of(model), (x, y), {}, 2, Options(summed=True))


@pytest.mark.parametrize("does", [lambda x: x - x.mean(0), lambda x: x.cumsum(0)], ids=["mean", "cumsum"])
def test_row_independence_judges_one_row_as_two(does: Does) -> None:
    """One row does not show it: the model is captured with two as well."""
    one = X[:1], Y[:1]
    rows = places_of_rows(batch_tensors(one, {}), [])
    with pytest.raises(Error, match=r"aten\.(sub|cumsum)"):
        analyse_microbatch(skeleton_of(Model(does)), one, {}, 2, Training(summed=True), None, rows)
    analyse_microbatch(skeleton_of(Model(lambda x: x)), one, {}, 2, Training(summed=True), None, rows)
