"""linear_mixture: probabilities times logarithms of a mixture have sums and gradients of all logits, on any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.losses import chunks as chunks_of_rows
from autotp.ops.losses.linear_mixture import linear_mixture_sums
from autotp.passes.lower.prove_rules import prove_rule
from autotp.sharding.partition import chunk_bounds

ROWS, CLASSES = (2, 7), 13
SCALES = 0.5, 3.0, 2.0, 0.0


def operands() -> list[Tensor]:
    """Weight, input and bias of two heads."""
    torch.manual_seed(0)
    shapes = (CLASSES, 5), (*ROWS, 5), (CLASSES,), (CLASSES, 3), (*ROWS, 3), (CLASSES,)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def logits(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    scale, cap, second_scale, _ = SCALES
    z, y = F.linear(tensors[1], tensors[0], tensors[2]) * scale, F.linear(tensors[4], tensors[3], tensors[5])
    return torch.tanh(z / cap) * cap, y * second_scale


def ours(tensors: list[Tensor], tp: int) -> Tensor:
    lse, second_lse = (z.logsumexp(-1) for z in logits(tensors))
    weight, x, bias, second_weight, second_x, second_bias = tensors
    of_rows, total = (lse, second_lse, 0.3 - lse, -0.4 - second_lse), torch.zeros(2, *ROWS).double()
    for a, b in (chunk_bounds(CLASSES, tp, rank) for rank in range(tp)):
        more = *SCALES[:2], bias[a:b], 0.0, 0.0, second_weight[a:b], second_x, *SCALES[2:], second_bias[a:b]
        total = total + linear_mixture_sums(weight[a:b], x, *of_rows, *more)
    return total


def theirs(tensors: list[Tensor]) -> Tensor:
    p, q = (z.log_softmax(-1) for z in logits(tensors))
    mixture = torch.logaddexp(p + 0.3, q - 0.4)
    return torch.stack([(p.exp() * mixture).sum(-1), (q.exp() * mixture).sum(-1)])


@pytest.mark.parametrize("tp", [1, 2, 16])  # On 16 ranks some have no class.
@pytest.mark.parametrize("chunk", [1, 40, 10**6], ids=["row-by-row", "chunks", "one-chunk"])
def test_sums_and_gradients_are_those_of_all_logits(chunk: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_of_rows, "CHUNK", chunk)
    tensors = operands()
    a, b = ours(tensors, tp), theirs(tensors)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    weights = torch.linspace(-1, 1, a.numel(), dtype=torch.float64).view(a.shape)
    expected = torch.autograd.grad((b * weights).sum(), tensors)
    for _ in range(2):
        grads = torch.autograd.grad((a * weights).sum(), tensors, retain_graph=True)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-12)


def test_second_derivatives() -> None:
    tensors = [y.detach()[:1, :2].requires_grad_() if y.shape[:2] == ROWS else y for y in operands()]
    lse, second_lse = (z.detach().logsumexp(-1).requires_grad_() for z in logits(tensors))

    def sums(*tensors: Tensor) -> Tensor:
        weight, x, bias, second_weight, second_x, second_bias, *of_rows = tensors
        more = *SCALES[:2], bias, 0.0, 0.0, second_weight, second_x, *SCALES[2:], second_bias
        return linear_mixture_sums(weight, x, *of_rows, *(-y for y in of_rows), *more)

    assert torch.autograd.gradgradcheck(sums, (*tensors, lse, second_lse))


@pytest.mark.parametrize("tp", [2, 3])
def test_rules_hold(tp: int) -> None:
    weight, x, bias, *second = (y.detach() for y in operands())
    of_rows = torch.rand(4, *ROWS).double().unbind()
    more = 1.0, 0.0, bias, 0.0, 0.0, *second[:2], 1.0, 0.0, second[2]
    assert prove_rule(linear_mixture_sums, (weight, x, *of_rows, *more), {}, tp) == []
