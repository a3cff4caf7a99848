"""gradient_nodes: hooks on nodes that accumulate gradients are refused; hooks of parameters are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from errors import message
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from autotp.runtime.torch_hooks.gradient_nodes import expect_no_node_hooks


def nothing(*_: Any) -> None:
    pass


LOST: dict[str, Callable[[nn.Parameter], Any]] = {
    "hook": lambda p: get_gradient_edge(p).node.register_hook(nothing),
    "prehook": lambda p: get_gradient_edge(p).node.register_prehook(nothing),
    "multi": lambda p: register_multi_grad_hook([p, p.detach().requires_grad_()], nothing),
}


@pytest.mark.parametrize("how", LOST)
def test_hooks_on_gradient_nodes_are_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = [get_gradient_edge(p).node for p in model.parameters()]
    expect_no_node_hooks(model)
    handle = LOST[how](model[1].weight)
    assert message(lambda: expect_no_node_hooks(model)) == (
        "a hook on the node that sums up the gradient of `1.weight` would be lost: its part has another node\n"
        "  try      register it after autotp.parallelize\n"
        "  or       parameter.register_hook or register_post_accumulate_grad_hook, which are kept"
    )
    handle.remove()
    expect_no_node_hooks(model)
    assert kept


def test_hooks_on_parameters_are_accepted() -> None:
    """They belong to the parameter. A frozen parameter has no node."""
    model = nn.Linear(2, 2)
    model.weight.register_hook(nothing)
    model.weight.register_post_accumulate_grad_hook(nothing)
    model.bias.requires_grad_(False)
    expect_no_node_hooks(model)
