"""lower: what the graph of a rank has no more of than it needs."""

import copy

import pytest
import torch
from ranks import run_ranks
from small_models import Plain
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


class Branches(Plain):
    """Attention and MLP read one norm; torch's MultiheadAttention turns what it reads, and the MLP does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0] + self.mlp(y)


def test_lower_copies_once_for_a_value_and_its_view() -> None:
    report = autotp.verify(Branches(), 2, example_inputs=torch.linspace(-1, 1, 120).view(3, 5, 8))
    assert report.ok, report
    assert (report.plan.traffic.forward, report.plan.traffic.backward) == ({"all-reduce": 1}, {"all-reduce": 1})


class Lookup(nn.Module):
    """A table whose gradient is sparse, and attention; tied, the table is the head, too."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8, sparse=True, dtype=torch.float64), nn.Linear(8, 30).double()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch seq]"""
        h = self.table(x)
        return F.cross_entropy(self.head(h + self.attention(h, h, h, need_weights=False)[0]).flatten(0, 1), y.flatten())


def looked_up(rank: int, n: int) -> None:
    x, y = torch.randint(30, (2, 2, 7), generator=torch.Generator().manual_seed(0))
    for tied in (False, True):
        for tp in (2, 1):
            torch.manual_seed(0)
            whole = Lookup(tied)
            cut = autotp.parallelize(copy.deepcopy(whole), tp, cp=n // tp, example_inputs=(x, y))
            for model in (whole, cut):
                model(x, y).backward()
            for (name, one), two in zip(whole.named_parameters(), cut.parameters(), strict=True):
                assert one.grad is not None and two.grad is not None
                assert one.grad.layout == two.grad.layout, name
                torch.testing.assert_close(two.grad.to_dense(), one.grad.to_dense())


def test_lower_leaves_sparse_embedding_gradients_on_their_rank() -> None:
    run_ranks(looked_up, 2, timeout=100)


class Picked(nn.Module):
    """A table that is cut along the vocabulary for the head, and whose other reader has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Parameter(torch.randn(3000, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq]"""
        h = torch.gather(self.table, 0, x.flatten()[:, None].expand(-1, 16), sparse_grad=True)
        return F.cross_entropy(F.linear(self.up(h), self.table), x.flatten())


def test_lower_refuses_to_send_sparse_gradients() -> None:
    with pytest.raises(autotp.Error, match="`aten::gather` has a sparse gradient, and ranks cannot exchange it"):
        autotp.explain(Picked(), 2, example_inputs=torch.arange(10).view(2, 5))
