"""vocab_parallel_loss: the losses that it writes are torch's, with every option, in numbers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import ops, run, some
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from autotp.passes.builder import Builder
from autotp.passes.lower.losses.vocab_parallel_loss import cross_entropy, nll

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
X, TARGET, WEIGHT = some(4, 7), torch.tensor([2, 6, -100, 0]), some(7).abs() + 0.1
CROSS_ENTROPY, NLL = aten.cross_entropy_loss.default, aten.nll_loss.default


def written(loss: Callable[..., Any], x: Tensor, t: Tensor, w: Tensor | None, rest: dict[str, Any]) -> fx.Graph:
    builder = Builder(FakeTensorMode(allow_non_fake_inputs=True))
    given = {"self": x, "target": t, "weight": w}
    args: dict[str, Any] = {"reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0} | rest
    for name, value in given.items():
        args[name] = None
        if value is not None:
            args[name] = builder.graph.placeholder(name)
            args[name].meta["val"] = builder.mode.from_tensor(value)
    builder.graph.output(((cross_entropy if loss is CROSS_ENTROPY else nll)(builder, args),))
    return builder.graph


@pytest.mark.parametrize(
    ("loss", "x", "t", "w", "rest"),
    [
        pytest.param(CROSS_ENTROPY, X, TARGET, None, {}, id="cross-entropy"),
        pytest.param(CROSS_ENTROPY, X, TARGET, WEIGHT, {}, id="weighed"),
        pytest.param(CROSS_ENTROPY, X, TARGET, None, {"reduction": SUM}, id="sum"),
        pytest.param(CROSS_ENTROPY, X, TARGET, WEIGHT, {"reduction": NONE}, id="rows"),
        pytest.param(CROSS_ENTROPY, X, TARGET.clamp(0), None, {"ignore_index": 6}, id="ignores-6"),
        pytest.param(CROSS_ENTROPY, X, TARGET, None, {"label_smoothing": 0.1}, id="smoothed"),
        pytest.param(CROSS_ENTROPY, X, TARGET, WEIGHT, {"label_smoothing": 0.3}, id="smoothed-weighed"),
        pytest.param(CROSS_ENTROPY, some(2, 7, 4), TARGET.view(2, 2).repeat(1, 2), None, {}, id="3d"),
        pytest.param(CROSS_ENTROPY, X[0], TARGET[1], None, {}, id="one-row"),
        pytest.param(CROSS_ENTROPY, X, TARGET * 0 - 100, None, {}, id="of-nothing-is-nan"),
        pytest.param(NLL, X, TARGET, WEIGHT, {}, id="nll"),
        pytest.param(NLL, X, TARGET, None, {"reduction": NONE}, id="nll-rows"),
    ],
)
def test_vocab_parallel_loss_equals_torch_s_loss(
    loss: Callable[..., Any], x: Tensor, t: Tensor, w: Tensor | None, rest: dict[str, Any]
) -> None:
    graph = written(loss, x, t, w, rest)
    assert not {"cross_entropy_loss", "nll_loss"} & set(ops(graph))
    found = []
    for compute in (
        lambda y: run(graph, [y, t] if w is None else [y, t, w])[0],
        lambda y: loss(y, t, w, **rest),
    ):
        y = x.clone().requires_grad_()
        value = compute(y)
        weighed = (value * some(*value.shape)).sum()
        found.append((value.detach(), *torch.autograd.grad(weighed, y)))
    for new, old in zip(*found, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-12, equal_nan=True)
