"""Small vocabularies that are large ones for the pass `linear_cross_entropy`, and the operators that it writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.ops.losses import chunks
from autotp.ops.losses.argmax import linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy

CLASSES, WIDTH = 37, 16
TOKENS = torch.arange(21).view(3, 7) * 5 % CLASSES
LABELS = TOKENS.flip(1).masked_fill(torch.arange(21).view(3, 7) % 8 < 3, -100)
FUSED = linear_class_terms, linear_loss_sum, linear_argmax_key


@contextmanager
def small() -> Iterator[None]:
    """A region in which small vocabularies are large ones: a chunk has two rows."""
    lengths = (linear_cross_entropy, "LEAST", 16), (chunks, "CHUNK", 2 * CLASSES)
    with ExitStack() as stack:
        for module, name, length in lengths:
            stack.enter_context(patch.object(module, name, length))
        yield


def first_graph(model: nn.Module, tp: int, **options: Any) -> fx.Graph:
    """The graph of the first rank."""
    return rank_graph(analyse(skeleton_of(model), (TOKENS, LABELS), {}, tp, Options(**options)), 0, "fast")


def fused(model: nn.Module, tp: int, **options: Any) -> list[str]:
    """The operators of heads with what reads their logits in a rank's graph."""
    return [node.target.__name__ for node in first_graph(model, tp, **options).nodes if node.target in FUSED]


def train(mine: nn.Module, whole: nn.Module) -> None:
    """Three steps of SGD at three shapes, one with one label only: loss and parameters are one device's."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (mine, whole)]
    single = torch.full_like(LABELS, -100)
    single[0, 3] = 1
    for rows, labels in ((TOKENS, LABELS), (TOKENS[:2, :5], LABELS[:2, :5]), (TOKENS, single)):
        results = [model(rows.contiguous(), labels.contiguous()) for model in (mine, whole)]
        losses = [result[0] if isinstance(result, tuple) else result for result in results]
        torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=0, atol=1e-10)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, tensor in autotp.full_state_dict(mine).items():
            expected = whole.state_dict()[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def beside_one_device(n: int, model: nn.Module, **options: Any) -> None:
    whole = copy.deepcopy(model)
    with small():
        train(autotp.parallelize(model, n, example_inputs=(TOKENS, LABELS), **options), whole)
