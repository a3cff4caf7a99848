"""under_budget: each call of a block has a module of its own, and `Budget` sets its fates."""

from __future__ import annotations

import torch
from budgets.fates import budgeted, two_blocks
from graphs import some
from torch import fx, nn

from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.memory.under_budget import hints

aten = torch.ops.aten


def test_calls_of_one_block_may_have_other_fates() -> None:
    module, budget = budgeted("80%")
    blocks = [part for part in module.children() if isinstance(part, Recomputed)]
    assert len(blocks) == 2 and blocks[0].inner is blocks[1].inner and not blocks[0].fates
    x, w = some(4, 6).requires_grad_(), some(6, 6).requires_grad_()
    module(x, w)[0].sum().backward()
    assert [bool(block.fates) for block in blocks].count(True) >= 1 and blocks[0].fates != blocks[1].fates
    reference = fx.Interpreter(fx.GraphModule(nn.Module(), two_blocks()))
    again = some(4, 6).requires_grad_()
    reference.run(again, some(6, 6).requires_grad_())[0].sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=0, atol=0)
    choice = budget.latest
    module(some(8, 6).requires_grad_(), w)
    assert budget.latest is not choice
    module(x, w)
    assert budget.latest is choice


def test_hints_are_the_sizes_of_the_captured_call() -> None:
    graph = two_blocks()
    found = hints(graph, {"x"})
    assert found is not None and [(tuple(x.shape), x.device.type) for x in found] == [((4, 6), "meta")]
