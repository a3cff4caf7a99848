"""Warns that gradients of torch.func are parts: torch makes them plain tensors, which do not know it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from autotp.distributed.cut_parameter import tell_user
from autotp.runtime.tree import Tree
from autotp.sharding.layout import Layout


def warn_of_func_gradients(tree: Tree, held: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    """Warns once for a model, if torch.func.grad or vjp differentiates by parameters that are cut.

    Args:
        held: name -> the tensor that the call reads, as `functional_call` gave it.
        layouts: name -> layout of a parameter.
    """
    if torch._C._functorch.peek_interpreter_stack() is None or tree.warned.of_func:
        return
    levels = {one.level() for one in _transforms() if one.key() == TransformType.Grad}
    names = [name for name, layout in layouts.items() if layout.dim is not None and _levels(held[name]) & levels]
    if names:
        tree.warned.of_func = True
        others = f" and for {len(names) - 1} more parameters" if names[1:] else ""
        tell_user(
            f"torch.func computes gradients for `{names[0]}`{others}: they are this rank's part, as plain tensors. "
            "A norm, a sum or a row of them is that of the part only: after `parameter.grad = gradient`, "
            "autotp.gather(parameter.grad), on all ranks, is the whole. This warning comes once for a model",
            sys._getframe(1),
        )


def _transforms() -> list[torch._C._functorch.CInterpreter]:
    return torch._C._functorch.get_interpreter_stack() or []


def _levels(tensor: Tensor) -> set[int]:
    """Returns the levels of the transforms that a tensor takes part in."""
    found = set()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        found.add(torch._C._functorch.maybe_get_level(tensor))
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return found
