"""Takes parts of the tensors that `functional_call` gives a call for parameters; checks calls by torch.func."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from autotp.distributed.cut_parameter import CutParameter, tell_user
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import taken_part
from autotp.errors import Error
from autotp.passes.emit.attach_parameters import ParameterPlace
from autotp.runtime.tree import Tree
from autotp.sharding.layout import Layout


def own_parts(held: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, Tensor]:
    """Returns by name this rank's part of each tensor that `functional_call` gave a call as the whole.

    Args:
        held: name -> the tensor that the call reads, as `functional_call` gave it: the whole, or this rank's part.
        layouts: name -> layout of a parameter.

    Raises:
        Error: a tensor for a cut parameter has neither shape.
    """
    taken = {}
    for name, layout in layouts.items():
        tensor = held[name]
        if layout.dim is None or type(tensor) is CutParameter:
            continue
        shape, part = tuple(tensor.shape), layout.local_shape(mesh.rank)
        if shape == layout.shape:
            taken[name] = taken_part(tensor, layout, mesh)
        elif shape != part:
            raise Error(
                f"the call was given a tensor {list(shape)} for `{name}`, which is {list(layout.shape)}",
                fix="tensors computed from dict(model.named_parameters())",
                alternative=f"model.layouts[{name!r}].take(whole, model.mesh.rank), the part of a whole tensor",
            )
    return taken


def expect_tied(ties: Mapping[str, tuple[ParameterPlace, str]], held: Mapping[str, Tensor]) -> None:
    """Raises Error if a call reads another tensor under one of the names of a tied parameter.

    Args:
        ties: further name of a parameter -> its place under this name, and its first name.
        held: first name -> the tensor that the call reads, as `functional_call` gave it.
    """
    for name, ((module, key), first) in ties.items():
        if module._parameters.get(key) is not held[first]:
            raise Error(
                f"`{first}` and `{name}` are one parameter, and the call was given two tensors for them",
                fix="functional_call(..., tie_weights=True), or one tensor under both names",
                alternative="make two parameters of them before autotp.parallelize",
            )


def warn_of_func_gradients(tree: Tree, held: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    """Warns once for a model, if torch.func.grad or vjp differentiates by parameters that are cut.

    Args:
        held: name -> the tensor that the call reads, as `functional_call` gave it.
        layouts: name -> layout of a parameter.
    """
    if torch._C._functorch.peek_interpreter_stack() is None or tree.warned_of_func:
        return
    levels = {one.level() for one in _transforms() if one.key() == TransformType.Grad}
    names = [name for name, layout in layouts.items() if layout.dim is not None and _levels(held[name]) & levels]
    if names:
        tree.warned_of_func = True
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
