"""graph_table: what a whole graph keeps, each memory once."""

from __future__ import annotations

import torch
from budgets.fates import budgeted
from graphs import some
from torch import Tensor

FLOAT = some(1).itemsize


def test_what_one_block_returns_and_the_next_keeps_counts_once() -> None:
    module, budget = budgeted("60%")
    choice = budget.choose((some(4, 6).requires_grad_(),))
    # x, and in each block the operand of gelu; the first block's result, which the second keeps.
    assert choice.kept_without == 4 * 24 * FLOAT
    assert len(choice.table.tables) == 1 and [call.block for call in choice.table.calls] == ["h.0", "h.1"]
    tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    x, w = some(4, 6).requires_grad_(), some(6, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (y,) = module(x, w)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    sizes.pop(w.untyped_storage().data_ptr())
    assert sum(sizes.values()) == choice.kept and y.requires_grad
    assert choice.table.peak(choice.chosen.choices) >= choice.kept
