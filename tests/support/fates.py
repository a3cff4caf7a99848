"""What the tests of kept values share: a block, fates of its operators, operands, and a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autotp.ops.dropout import fast_dropout
from autotp.passes.emit.kept_values import Fate, Fates

aten = torch.ops.aten


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Attention of one head with dropout, and a gated MLP that chooses columns; x: [batch seq 8], w, v: [8 8]."""
    normed = aten.layer_norm.default(x, [8])
    query, key = aten.linear.default(normed, w), aten.linear.default(normed, v)
    scores = aten.matmul.default(query, aten.transpose.int(key, 1, 2))
    masked = aten.masked_fill.Scalar(scores, aten.gt.Scalar(scores, 2.0), 0.5)
    weights = aten.dropout.default(aten.softmax.int(masked, -1), 0.3, True)
    mixed = aten.add.Tensor(aten.matmul.default(weights, aten.view.default(normed, x.shape)), x)
    gate = fast_dropout(aten.gelu.default(aten.linear.default(mixed, w)), 0.2, 1)
    best = aten.topk.default(gate, 5)
    up = aten.mul.Tensor(best[0], aten.gather.default(aten.linear.default(mixed, v), -1, best[1]))
    again = aten.dropout.default(aten.sigmoid.default(up), 0.1, True)
    return aten.cat.default([aten.add.Tensor(again, up), aten.narrow.default(mixed, -1, 5, 3)], -1)


fx.wrap("fast_dropout")
GRAPH = fx.symbolic_trace(layer)
NAMES = [node.name for node in GRAPH.graph.nodes if node.op == "call_function"]


def every(fate: Fate, *names: str) -> Fates:
    """The fate for all operators, or for those whose name starts like this."""
    return {name: fate for name in NAMES if not names or name.startswith(names)}


CASES: Mapping[str, Fates] = {
    "full": every("recompute"),
    "host": every("host"),
    "bits": every("bits"),
    "none": {},
    "scores": every("recompute", "matmul", "masked", "softmax", "dropout", "gt"),
    "between": every("recompute", "gelu", "sigmoid", "mul", "layer_norm"),
    "last dropout": every("recompute", "dropout_default_1"),
    "first dropout": every("recompute", "dropout_default", "softmax"),
    "masks as seeds": every("bits", "dropout", "fast_dropout"),
    "three ways": every("host", "linear") | every("recompute", "gelu", "softmax") | every("bits", "gt", "topk"),
    "host and again": every("host", "linear_default", "layer_norm") | every("recompute", "gelu", "softmax", "matmul"),
    "alternately": {name: ("recompute", "keep", "host", "bits")[i % 4] for i, name in enumerate(NAMES)},
    "alternately, otherwise": {name: ("keep", "recompute", "bits", "host")[i % 4] for i, name in enumerate(NAMES)},
}  # fmt: skip


def operands(*sizes: int, dtype: torch.dtype = torch.float64, frozen: bool = False) -> list[Tensor]:
    torch.manual_seed(sum(sizes))
    xs = [torch.randn(*shape, dtype=dtype) for shape in (sizes, (8, 8), (8, 8))]
    return [x.requires_grad_(not frozen or i != 1) for i, x in enumerate(xs)]


def step(run: Callable[..., Tensor], xs: list[Tensor]) -> list[Any]:
    """The result, the gradients, and the next random number."""
    torch.manual_seed(3)
    y = run(*xs)
    torch.rand(2)  # Others draw between forward and backward.
    grads = torch.autograd.grad(y.square().sum(), [x for x in xs if x.requires_grad])
    return [y.detach(), *grads, torch.rand(())]
