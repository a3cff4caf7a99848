"""overlap="batch" beside experts: the halves of a batch send their rows in turns, and train as one device."""

from __future__ import annotations

import pytest
import torch
from ranks import Checks
from small_models import Mixture
from torch import Tensor, fx
from torch.nn import functional as F
from trainers import layers_of_experts, train_experts_beside_one_device

from autotp.experimental.batch_halves.halves import half_of
from autotp.experimental.batch_halves.turns import finish, start_rows, wait_in_backward
from autotp.ops.experts import exchange

checks = Checks(timeout=280)


@checks.on(2)
def halves_send_their_rows_in_turns(rank: int, n: int) -> None:
    trainer, _ = train_experts_beside_one_device(layers_of_experts(), dp=2, ep=2, overlap="batch")
    (pipeline,) = [pipeline for pipeline in trainer._pipelines if pipeline.training]
    graph = pipeline.stages[0].module.graph
    starts = [node for node in graph.nodes if node.target is start_rows]
    assert len(starts) == 8  # Two layers of two halves, there and back.
    assert not any(node.target in (exchange.to_experts, exchange.to_rows) for node in graph.nodes)
    beside = [half for start in starts for half in halves_beside(graph, start)]
    assert len(beside) == 8


class Masked(Mixture):
    """Sends a mask of rows beside the rows, as experts of transformers do."""

    def _groups(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert self.grouped is not None
        ordered, places = chosen.sort()
        ends = torch.histc(ordered.float(), self.number, 0, self.number - 1).cumsum(0, dtype=torch.int32)
        h = F.gelu(self.grouped(x[places], self.up, ends) + self.up_bias[ordered])
        h = h.masked_fill((weights < 0.3)[places], 0.0)
        y = (self.grouped(h, self.down, ends) + self.down_bias[ordered]) * weights[places]
        return y[places.argsort()]


@checks.on(2)
def gradients_of_rows_travel_beside_the_other_half(rank: int, n: int) -> None:
    """A mask has no gradient, so backward cannot wait for its turn: it was the turn's first value."""
    whole = layers_of_experts()
    whole.first.__class__ = Masked
    trainer, _ = train_experts_beside_one_device(whole, dp=2, ep=2, overlap="batch")
    (pipeline,) = [pipeline for pipeline in trainer._pipelines if pipeline.training]
    graph = pipeline.stages[0].module.graph
    waits = [node for node in graph.nodes if node.target is wait_in_backward]
    assert sum(node.target is start_rows for node in graph.nodes) == 10
    assert len(waits) >= 7 and all(node.args[2].meta["val"].is_floating_point() for node in waits)


def halves_beside(graph: fx.Graph, start: fx.Node) -> set[int]:
    """The other half, if it multiplies between the start of an exchange and its end."""
    nodes = list(graph.nodes)
    end = next(user for user in start.users if user.target is finish)
    between = nodes[nodes.index(start) : nodes.index(end)]
    products = [node for node in between if "mm" in str(node.target) or "linear" in str(node.target)]
    return {half for node in products if (half := half_of(node)) is not None} - {half_of(start)}  # type: ignore[arg-type]


@checks.on(4)
def halves_send_their_rows_beside_sums_over_tp(rank: int, n: int) -> None:
    train_experts_beside_one_device(layers_of_experts(), tp=2, dp=2, ep=2, overlap="batch")


@checks.on(2)
def halves_send_rows_with_zero_and_microbatches(rank: int, n: int) -> None:
    for settings in ({"zero": 3, "microbatches": 2}, {"recompute": "selective"}):
        train_experts_beside_one_device(layers_of_experts(), dp=2, ep=2, overlap="batch", **settings)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
