"""unsort: experts of rows in their own order, so that a rank computes those of its part of a sequence only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import canonical, ops
from small_models import Mixture
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.model_library import library
from autotp.ops.experts.rows import chosen_mm
from autotp.ops.grouped_mm import OPERATOR
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.experts.unsort import unsort

pytest.importorskip("transformers.integrations.moe")

from support.hf_families import FAMILIES

GROUPED = ("mixtral", "qwen3_moe", "gpt_oss")


def rewritten(model: nn.Module, x: Tensor) -> list[str]:
    library().add_operators()
    return ops(unsort(canonical(model, x)[1]))


def test_unsort_leaves_no_sort_behind() -> None:
    kinds = rewritten(Mixture(OPERATOR), torch.randn(3, 8))
    assert kinds.count("chosen_mm") == 2
    assert not {"sort", "histc", "cumsum", "index_put"} & set(kinds)


class GatedMixture(Mixture):
    """Its rows split their width between two products, and leave the experts by a sort of the sort's permutation."""

    def __init__(self) -> None:
        super().__init__(OPERATOR, width=20)
        self.down = nn.Parameter(torch.randn(4, 10, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch sequence 8]"""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        ordered, places = chosen.reshape(-1).sort()
        ends = torch.histc(ordered.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        gate, up = OPERATOR(rows[places // 2], self.up, ends).chunk(2, -1)
        y = OPERATOR(nn.functional.silu(gate) * up, self.down, ends) * weights.reshape(-1, 1)[places]
        return x + y[places.argsort()].view(*x.shape[:2], 2, 8).sum(2)


def test_experts_that_split_their_width_are_dispatched_once() -> None:
    options = Options(overlap="batch", experts="expert")
    program = analyse(skeleton_of(GatedMixture()), (torch.randn(4, 3, 8),), {}, 2, options)
    assert ops(program.graph).count("dispatch") == 2  # One of each half.


class ReadsSorted(Mixture):
    """Its sum over all sorted rows is the same in any order, which the pass does not know."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows 8]"""
        chosen, order = torch.sort(self.router(x).argmax(-1))
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = OPERATOR(x[order], self.up, ends)
        return y.sum(0)


def test_unsort_leaves_experts_whose_rows_are_read_in_the_sorted_order() -> None:
    kinds = rewritten(ReadsSorted(OPERATOR), torch.randn(3, 8))
    assert "sort" in kinds and "chosen_mm" not in kinds


class DropsInside(Mixture):
    """Draws of sorted rows are others than draws of rows in their own order."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows 8]"""
        chosen, order = torch.sort(self.router(x).argmax(-1))
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = nn.functional.dropout(OPERATOR(x[order], self.up, ends), 0.5)
        return y[torch.argsort(order)]


def test_unsort_leaves_experts_that_draw_numbers_of_sorted_rows() -> None:
    assert "chosen_mm" not in rewritten(DropsInside(OPERATOR), torch.randn(3, 8))


def test_chosen_mm_multiplies_each_row_with_the_matrix_that_it_chose() -> None:
    x, weight = torch.randn(5, 4).double(), torch.randn(3, 4, 6).double().requires_grad_()
    chosen = torch.tensor([2, 0, 2, 0, 0])
    y = chosen_mm(x, weight, chosen, fused=False)
    torch.testing.assert_close(y, torch.einsum("ri,rio->ro", x, weight[chosen]))
    y.sum().backward()
    assert weight.grad is not None and not weight.grad[1].any() and weight.grad[2].any()


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"tp": 1, "cp": 2},
    "width": {"tp": 2, "cp": 2},
    "experts": {"tp": 2, "cp": 2, "experts": "expert"},
    "halves": {"tp": 2, "overlap": "batch"},
}


@pytest.mark.costly
@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_part_of_the_rows_are_those_of_one_device(layout: str, family: str) -> None:
    """No operator needs all rows."""
    model, batch = FAMILIES[family]()
    plan = autotp.explain(model, example_inputs=batch, **LAYOUTS[layout])
    assert "it needs whole sequences" not in str(plan) and "it needs both halves" not in str(plan)
    assert autotp.verify(model.double(), example_inputs=batch, **LAYOUTS[layout]).ok
