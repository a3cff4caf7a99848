"""loss_totals: parts of a batch whose losses sum up to the whole's, however many tokens each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autotp.errors import Error
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.pipeline.loss_totals import TOTAL, loss_totals
from autotp.rules.call import returned

X, Y = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(30).view(6, 5) % 7
SOME = Y.masked_fill(torch.arange(30).view(6, 5) % 11 < 6, -100)
SOME[:2] = -100  # A part that counts nothing.
WEIGHT = torch.rand(7, generator=torch.Generator().manual_seed(1))


class Loss(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("weight", WEIGHT)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq classes], y: [batch seq]"""
        return self.function(x, y, self.weight)


def tokens(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten())


def weighted(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten(), w)


def smoothed(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), y.clamp(min=0), w, label_smoothing=0.1, ignore_index=3)


def likelihood(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.nll_loss(x.flatten(0, 1).log_softmax(-1), y.flatten())


def direct(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.nll_loss(x.flatten(0, 1).log_softmax(-1), y.flatten(), w)


def two(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (
        tokens(x, y, w) + 0.5 * F.cross_entropy(x[:, 0], y[:, 0].clamp(min=0)) - F.mse_loss(x, x * y.unsqueeze(-1)) / 3
    )


def mean(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return -(x * y.unsqueeze(-1)).tanh().mean()


def masked(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    counts = (y >= 0).to(x.dtype)
    return (x[..., 0] * counts).sum() / counts.sum().clamp(min=1)


def regular(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x.mean() + w.square().sum()


def table(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The part of a table that is as long as the sequence: no input is part of it, but a size."""
    return x.mean() + w[: x.shape[1]].sum()


def two_counts(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The second count is made of inputs alone, and computed before the first."""
    counts = (y >= 0).to(x.dtype) * (1 + x.new_ones(()))
    count = counts.sum()
    return tokens(x, y, w) + 0.01 * (x.logsumexp(-1).square() * counts).sum() / count


def taken(function: Callable[..., Tensor], x: Tensor = X) -> Any:
    captured = capture(skeleton_of(Loss(function)), (x, SOME), {})
    graph = canonicalize(captured.graph)
    return captured, loss_totals(graph, returned(graph)[0], captured.inputs)


def run(graph: fx.Graph, known: dict[str, Tensor]) -> Any:
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    return fx.GraphModule(nn.Module(), graph)(*(known[name] for name in names))


@pytest.mark.parametrize(
    "function", [tokens, weighted, smoothed, likelihood, direct, two, mean, masked, regular, table, two_counts]
)
@pytest.mark.parametrize("sizes", [(1, 5), (2, 2, 2), (6,)], ids=str)
def test_losses_of_parts_sum_up_to_the_whole(function: Callable[..., Tensor], sizes: tuple[int, ...]) -> None:
    captured, found = taken(function)
    parts = list(zip(X.split(sizes), SOME.split(sizes), strict=True))
    places = dict.fromkeys(captured.buffers, WEIGHT)
    known = [places | dict(zip(captured.inputs, part, strict=True)) for part in parts]
    summed = [sum(count).float() for count in zip(*(run(found.counts, one) for one in known), strict=True)]
    given = {f"{TOTAL}_{i}": total for i, total in enumerate(summed)}
    losses = [run(found.graph, one | given)[0] for one in known]
    torch.testing.assert_close(torch.stack(losses).sum(), function(X, SOME, WEIGHT))


def of_a_parameter(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Each part adds its share of a term without rows; of its product with a mean there is none."""
    return x.mean() * w.mean()


def largest(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x.max()


@pytest.mark.parametrize("function", [of_a_parameter, largest])
def test_loss_totals_refuse_a_loss_that_is_no_mean(function: Callable[..., Tensor]) -> None:
    """By the line of the operator."""
    with pytest.raises(Error, match="not a mean over the batch") as raised:
        taken(function)
    assert "test_loss_totals.py" in str(raised.value)


def test_loss_totals_keep_a_float32_mean() -> None:
    """The example values say so: ranks without the loss take its dtype from there."""
    captured, found = taken(two, X.bfloat16())
    known = dict.fromkeys(captured.buffers, WEIGHT) | dict(zip(captured.inputs, (X.bfloat16(), SOME), strict=True))
    given = {f"{TOTAL}_{i}": total.float() for i, total in enumerate(run(found.counts, known))}
    (loss,) = run(found.graph, known | given)
    assert returned(found.graph)[0].meta["val"].dtype == loss.dtype == torch.float32


def test_loss_totals_keep_unread_draws_in_the_graph_alone() -> None:
    """A layer drop of zero draws one: the masks behind it are others without it. A count draws nothing again."""

    def drawn(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        torch.rand([])
        return F.dropout(x, 0.5).square().mean()

    captured, found = taken(drawn)
    known = dict.fromkeys(captured.buffers, WEIGHT) | dict(zip(captured.inputs, (X, SOME), strict=True))
    state = torch.get_rng_state()
    (total,) = run(found.counts, known)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    (loss,) = run(found.graph, known | {f"{TOTAL}_0": total.float()})
    torch.manual_seed(3)
    torch.testing.assert_close(loss, drawn(X, SOME, WEIGHT))


def test_loss_totals_refuse_a_count_that_is_also_added() -> None:
    def added(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        count = (y >= 0).to(x.dtype).sum()
        return (x.sum() - 0.1 * count) / count

    with pytest.raises(Error, match=r"the loss is divided by `aten.sum.default`, and adds it, too"):
        taken(added)
