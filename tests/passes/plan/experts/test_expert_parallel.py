"""expert_parallel: rows go to the ranks of their experts, which store no other experts' weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message
from graphs import canonical, ops
from small_models import Mixture
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.compiler import analyse
from autotp.ops.experts import exchange
from autotp.ops.grouped_mm import OPERATOR
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.experts.expert_parallel import exchanges, expert_parallel
from autotp.passes.plan.experts.experts import experts
from autotp.passes.plan.infer_axes import infer_axes

MOVES = ("exchange_counts", "arrival", "arrived_counts", "to_experts", "own", "to_rows")


def rewritten(model: nn.Module, x: Tensor, ep: int) -> Any:
    captured, graph = canonical(model, x)
    ordered = experts(graph, infer_axes(graph), captured.parameters, ep)
    return expert_parallel(*ordered, captured.parameters, ep)


@pytest.mark.parametrize("product", [None, OPERATOR], ids=["rows", "groups"])
def test_expert_parallel_sends_rows_once_each_way(product: Any) -> None:
    graph = rewritten(Mixture(product), torch.randn(6, 8), 2)
    assert Counter(name for name in ops(graph) if name in MOVES) == dict.fromkeys(MOVES, 1) | {"own": 4}
    shapes = {node.args[0].name: list(node.meta["val"].shape) for node in graph.nodes if node.target is exchange.own}
    assert list(shapes.values()) == [[2, 8, 10], [2, 10], [2, 10, 8], [2, 8]]


def test_exchanges_names_the_parameters_of_each_layer() -> None:
    program = analyse(
        skeleton_of(nn.Sequential(Mixture(), Mixture(OPERATOR))), (torch.randn(6, 8),), {}, 1, Options(ep=2)
    )
    rows = exchanges(program.graph, program.captured.parameters)
    assert [{name.partition(".")[0] for name in row} for row in rows] == [{"0"}, {"1"}]
    assert {len(row) for row in rows} == {4}


def test_experts_over_ep_are_cut_by_width_over_tp() -> None:
    program = analyse(skeleton_of(Mixture(OPERATOR)), (torch.randn(6, 8),), {}, 2, Options(ep=2))
    assert program.notes["experts"] == (
        "1 layer of 4 experts over ep=2: for 12 rows of chosen experts, those of the example inputs, a rank sends "
        "192 B there, as many back, and the gradients; the host reads the counts of each layer once, so CUDA graphs "
        "cannot record them"
    )
    layouts = {name: str(layout) for name, layout in program.layouts.items() if "router" not in name}
    assert layouts == {"up": "[4, 8, 10@tp]", "up_bias": "[4, 10@tp]", "down": "[4, 10@tp, 8]", "down_bias": "[4, 8]"}


# ---- what is refused


class Written(nn.Module):
    """Experts whose weights are what the test makes of them."""

    def __init__(self, weights: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.stack, self.weights = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8)), weights

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows 8]"""
        chosen, weights = self.router(x).max(-1)[1], self.weights(self.stack)
        return torch.bmm(x.unsqueeze(1), weights[chosen]).squeeze(1)


def refused(model: nn.Module, ep: int) -> str:
    return message(lambda: analyse(skeleton_of(model), (torch.randn(6, 8),), {}, 1, Options(ep=ep)))


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    assert refused(Mixture(), 3) == (
        "ep=3 does not divide the 4 experts of a layer\n  try      ep that divides all of them"
    )


def test_a_model_without_experts_is_refused() -> None:
    assert refused(nn.Linear(8, 8), 2) == (
        "ep=2, and no layer has experts that rows choose from: stacks of weights, as transformers' "
        'experts_implementation="grouped_mm" reads them\n  try      ep=1'
    )


def test_views_of_weights_are_those_of_own_experts() -> None:
    graph = rewritten(Written(lambda stack: stack.transpose(1, 2)), torch.randn(6, 8), 2)
    (read,) = (node for node in graph.nodes if node.target is exchange.own)
    assert [list(user.meta["val"].shape) for user in read.users] == [[2, 8, 8]]


def test_a_stack_that_is_also_read_whole_stays_whole() -> None:
    """The weights of one expert depend on those of others: each rank has all, and reads its part."""
    model = Written(lambda stack: stack + stack.mean(0, keepdim=True))
    graph = rewritten(model, torch.randn(6, 8), 2)
    assert not any(node.target is exchange.own for node in graph.nodes)
    (part,) = (node for node in graph.nodes if node.target is exchange.select_own)
    assert list(part.meta["val"].shape) == [2, 8, 8] and part.args[0].name == "p_model_stack"
    program = analyse(skeleton_of(model), (torch.randn(6, 8),), {}, 1, Options(ep=2))
    assert program.notes["experts"].endswith("each rank stores `stack` whole, and reads the part of its experts")
    assert exchanges(program.graph, program.captured.parameters) == ((),)


def test_adapters_of_a_stack_stay_whole_beside_it() -> None:
    """A product for each expert is computed for this rank's; what has experts elsewhere is computed whole before."""
    low = nn.Parameter(torch.randn(8, 4 * 3)), nn.Parameter(torch.randn(4 * 3, 8))

    class Adapted(Written):
        def __init__(self) -> None:
            super().__init__(
                lambda stack: torch.baddbmm(stack, self.left.view(8, 3, 4).permute(2, 0, 1), self._right())
            )
            self.left, self.right = low

        def _right(self) -> Tensor:
            return self.right.view(4, 3, 8)

    graph = rewritten(Adapted(), torch.randn(6, 8), 2)
    assert [node.args[0].name for node in graph.nodes if node.target is exchange.own] == ["p_model_stack"]
    parts = [list(node.meta["val"].shape) for node in graph.nodes if node.target is exchange.select_own]
    assert parts == [[2, 8, 3], [2, 3, 8]]


def test_weights_that_mix_experts_in_another_way_are_refused() -> None:
    assert "ep=2, and no layer" in refused(Written(lambda stack: F.normalize(stack, dim=0)), 2)
