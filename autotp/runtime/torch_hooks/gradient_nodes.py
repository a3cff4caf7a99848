"""Raises Error for hooks on the nodes that accumulate gradients: a cut parameter gets a new node.

A hook of `Tensor.register_hook` or `register_post_accumulate_grad_hook` is kept: it belongs to the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from autotp.errors import Error


def expect_no_node_hooks(model: nn.Module) -> None:
    """Raises Error if a node that accumulates a parameter's gradient has hooks, or a hook knows the node."""
    for name, p in model.named_parameters():
        hooks = (p._backward_hooks or {}).values()
        knows = any(getattr(hook, "__module__", "") == "torch.autograd.graph" for hook in hooks)
        if knows or (p.requires_grad and _is_hooked(get_gradient_edge(p).node)):
            raise Error(
                f"a hook on the node that sums up the gradient of `{name}` would be lost: its part has another node",
                fix="register it after autotp.parallelize",
                alternative="parameter.register_hook or register_post_accumulate_grad_hook, which are kept",
            )


def _is_hooked(node: Any) -> bool:
    """True if an autograd node has hooks. torch does not list them: a new hook is put into the dict of all."""
    handles = node.register_hook(_nothing), node.register_prehook(_nothing)
    try:
        return any(len(handle.hooks_dict_ref()) > 1 for handle in handles)
    finally:
        for handle in handles:
            handle.remove()


def _nothing(*_: Any) -> None:
    return None
