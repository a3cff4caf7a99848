"""batch_sums: a loss that is computed from sums over the batch: its value and its gradient come from sums of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autotp.compiler import analyse
from autotp.errors import Error
from autotp.options import Options
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.pipeline.loss_totals import TOTAL, Totals, loss_totals
from autotp.passes.pipeline.row_independence import one_batch
from autotp.rules.call import returned

X = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.arange(30).view(6, 5) % 7 < 4
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [batch seq experts], mask: [batch seq]"""
        return self.function(x, mask)


def squared(x: Tensor, mask: Tensor) -> Tensor:
    return x.mean() ** 2


def product(x: Tensor, mask: Tensor) -> Tensor:
    return 2 + x.mean() * x.abs().mean() / 3 + x.mean()


def inverse(x: Tensor, mask: Tensor) -> Tensor:
    return 2 / x.mean() - x.square().mean((0, 1)).prod()


def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the probabilities of all experts and the numbers of two: [tokens experts] and [tokens 2]."""
    probabilities = x.flatten(0, 1).softmax(-1)
    return probabilities, probabilities.topk(2, -1).indices


def switch(x: Tensor, mask: Tensor) -> Tensor:
    """Fedus et al. 2021, equation 4, with one-hot counts; beside a loss of its own."""
    probabilities, choice = chosen(x)
    counts = F.one_hot(choice, 4).sum(1).double().mean(0)
    return x.square().mean() + 0.1 * 4 * (counts * probabilities.mean(0)).sum()


def layers(x: Tensor, mask: Tensor) -> Tensor:
    """As transformers counts: the sums of two layers, divided by the number of tokens of both."""
    total, sums, counts = 0.0, torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for layer in (x, 1 - 3 * x):
        probabilities, choice = chosen(layer)
        counts = counts + torch.bincount(choice.reshape(-1), minlength=4).double()
        sums = sums + probabilities.sum(0)
        total = total + probabilities.shape[0]
    return x.square().mean() + 0.1 * 4 * ((counts / total) * (sums / total).unsqueeze(0)).sum()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Without padding: each part has another number of tokens."""
    probabilities, choice = chosen(x)
    weights = mask.reshape(-1).double()
    zeros = torch.zeros(4, dtype=torch.float64)
    counts = zeros.scatter_add(0, choice.reshape(-1), weights.repeat_interleave(2)) / weights.sum()
    means = (probabilities * weights.unsqueeze(-1)).sum(0) / weights.sum()
    return (x * weights.view(mask.shape[0], -1, 1)).sum() / weights.sum() + (counts * means).sum()


def histogram(x: Tensor, mask: Tensor) -> Tensor:
    probabilities, choice = chosen(x)
    counts = torch.histc(choice.double(), 4, 0, 3)
    return (counts / counts.sum() * probabilities.mean(0)).sum()


def deviation(x: Tensor, mask: Tensor) -> Tensor:
    """The coefficient of variation of the importance: Shazeer et al. 2017, equation 6."""
    importance = chosen(x)[0].sum(0)
    return x.abs().mean() + importance.var() / importance.mean() ** 2


def z_loss(x: Tensor, mask: Tensor) -> Tensor:
    """Zoph et al. 2022, equation 5, divided by the number of tokens as a number."""
    return x.mean() + 0.1 * x.logsumexp(-1).square().sum() / (x.shape[0] * x.shape[1])


def columns(x: Tensor, mask: Tensor) -> Tensor:
    """A divisor that is no sum over rows, but is computed from one."""
    return x.sum() / (mask.sum(0) > 1).sum()


FUNCTIONS = [columns, squared, product, inverse, switch, layers, masked, histogram, deviation]


def totals_of(function: Loss, rows: int = 6, **more: Any) -> tuple[Any, Totals]:
    captured = capture(skeleton_of(Model(function)), (X[:rows], MASK[:rows]), {})
    graph = canonicalize(captured.graph)
    one_batch(graph, captured.inputs)
    return captured, loss_totals(graph, returned(graph)[0], captured.inputs, **more)


def run(graph: fx.Graph, values: dict[str, Tensor]) -> Any:
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    return fx.GraphModule(nn.Module(), graph)(*(values[name] for name in names))


def loss_of_parts(captured: Any, totals: Totals, x: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the gradient with respect to x, as parts of a batch add them up."""
    parts = [
        dict(zip(captured.inputs, part, strict=True)) for part in zip(x.split(sizes), MASK.split(sizes), strict=True)
    ]
    counts = [sum(count) for count in zip(*(run(totals.counts, part) for part in parts), strict=True)]
    known = {f"{TOTAL}_{i}": count.double() for i, count in enumerate(counts)}
    results = [run(totals.graph, part | known) for part in parts]
    loss = torch.stack([result[0] for result in results]).sum()
    if totals.functions is None:
        return loss.detach(), torch.autograd.grad(loss, x)[0]
    sums = [torch.stack(some).sum(0).detach() for some in zip(*(result[1:] for result in results), strict=True)]
    sums = [some.requires_grad_(some.is_floating_point()) for some in sums]
    names = [node.name for node in totals.functions.nodes if node.op == "placeholder"]
    (rest,) = run(totals.functions, dict(zip(names, sums, strict=True)))
    rest.backward()
    pairs = [(part, some.grad) for result in results for part, some in zip(result[1:], sums, strict=True)]
    surrogate = loss + sum((part * grad).sum() for part, grad in pairs if grad is not None)
    return (loss + rest).detach(), torch.autograd.grad(surrogate, x)[0]


def expect_whole(function: Loss, captured: Any, totals: Totals, sizes: list[int]) -> None:
    x = X.clone().requires_grad_()
    expected = function(x, MASK)
    loss, grad = loss_of_parts(captured, totals, x, sizes)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", [*FUNCTIONS, z_loss])
@pytest.mark.parametrize("sizes", [[1, 5], [2, 2, 2], [6]], ids=str)
def test_parts_have_the_loss_and_the_gradient_of_the_whole(function: Loss, sizes: list[int]) -> None:
    expect_whole(function, *totals_of(function), sizes)


@pytest.mark.parametrize("function", [*FUNCTIONS, z_loss])
def test_a_graph_of_one_row_has_the_sums_of_two(function: Loss) -> None:
    _, of_two = totals_of(function, 2)
    expect_whole(function, *totals_of(function, 1, names=of_two.names), [1] * 6)


@pytest.mark.parametrize(("function", "count"), [(switch, 4), (layers, 4), (masked, 4), (deviation, 1)])
def test_sums_of_layers_are_one(function: Loss, count: int) -> None:
    """Two for a mean: it is a sum, and the number of its rows."""
    _, totals = totals_of(function)
    assert totals.functions is not None and len(returned(totals.graph)) == 1 + count


@pytest.mark.parametrize("function", [switch, layers, masked])
def test_balance_of_microbatches_is_the_mean_of_theirs(function: Loss) -> None:
    captured, totals = totals_of(function, balance="microbatch")
    assert totals.functions is None
    sizes = [2, 2, 2]
    x = X.clone().requires_grad_()

    def rest(x: Tensor, mask: Tensor) -> Tensor:
        return function(x, mask) - main(x, mask)

    def main(x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.reshape(*x.shape[:2], 1).double()
        return (x * weights).sum() / weights.sum() if function is masked else x.square().mean()

    parts = zip(x.split(sizes), MASK.split(sizes), strict=True)
    expected = main(x, MASK) + torch.stack([rest(*part) for part in parts]).mean()
    loss, grad = loss_of_parts(captured, totals, x, sizes)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0], rtol=0, atol=1e-12)


def test_z_losses_need_no_second_pass() -> None:
    assert totals_of(z_loss)[1].functions is None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("balance", ["batch", "microbatch"])
def test_row_independence_accepts_functions_of_sums(function: Loss, balance: Any) -> None:
    analyse(skeleton_of(Model(function)), (X, MASK), {}, 2, Options(summed=True, balance=balance))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        pytest.param(lambda x, mask: (x.amax(0) * x.mean(0)).sum(), "amax", id="maximum"),
        pytest.param(lambda x, mask: x.std(0).prod(), "std", id="deviation"),
        pytest.param(lambda x, mask: x.sum() / mask.any().double().sum(), "any", id="any"),
        pytest.param(lambda x, mask: x[:1].sum() * x.mean(), "slice", id="first-row"),
        pytest.param(lambda x, mask: (x - x.mean(0)).square().mean(), "sub", id="rows-read-it"),
        pytest.param(lambda x, mask: (torch.histc(x[..., 0]) * x.mean()).sum(), "histc", id="range-of-the-batch"),
        pytest.param(lambda x, mask: x.sum(0).norm() * x.cumsum(0)[-1].mean(), "cumsum", id="running-sum"),
        pytest.param(
            lambda x, mask: x.mean() * torch.ones(5).double().scatter_add(0, mask.sum(1), x[:, 0, 0]).prod(),
            "scatter_add", id="added-to-ones",
        ),
        pytest.param(
            lambda x, mask: x.mean() * torch.bincount(mask.sum(1), x[:, 0, 0].flip(0), 6).square().sum(), "flip",
            id="of-another-row",
        ),
    ],
)  # fmt: skip
def test_row_independence_refuses_what_is_no_sum(function: Loss, named: str) -> None:
    text = message(lambda: analyse(skeleton_of(Model(function)), (X, MASK), {}, 2, Options(summed=True)))
    assert named in text.splitlines()[0] and "cannot be computed in parts" in text
    assert "test_batch_sums.py" in text


def test_a_loss_of_sums_and_parameters_is_refused() -> None:
    """Of a term without rows a part adds its share, and a product with a sum over the batch has none."""

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__(squared)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x.mean() * self.scale.exp() + x.sum(0).square().sum() * self.scale

    with pytest.raises(Error, match="not a mean over the batch"):
        analyse(skeleton_of(Scaled()), (X, MASK), {}, 2, Options(summed=True))
