"""Takes parts of the tensors that `functional_call` gives a call for parameters; torch.func gets wholes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from autotp import torch_internals as internals
from autotp.distributed.cut_tensors.cut_parameter import CutParameter, CutTensor, whole_operand
from autotp.distributed.cut_tensors.sharded_tensor import taken_part
from autotp.distributed.live_models import Undo
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.passes.emit.attach_parameters import ParameterPlace
from autotp.sharding.layout import Layout


def own_parts(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, Tensor]:
    """Returns by name this rank's part of each tensor that `functional_call` gave a call as the whole.

    Args:
        tensors: name -> the tensor that the call reads, as `functional_call` gave it: the whole, or this rank's part.
        layouts: name -> layout of a parameter.

    Raises:
        Error: a tensor for a cut parameter has neither shape.
    """
    parts = {}
    for name, layout in layouts.items():
        tensor = tensors[name]
        # Most often they are the model's own parameters, which are parts already.
        if layout.dim is None or type(tensor) is CutParameter:
            continue
        shape, part = tuple(tensor.shape), layout.local_shape(mesh.rank)
        if shape == layout.shape:
            parts[name] = taken_part(tensor, layout, mesh)
        elif shape != part:
            raise Error(
                f"the call was given a tensor {list(shape)} for `{name}`, which is {list(layout.shape)}",
                fix="tensors computed from dict(model.named_parameters())",
                alternative=f"model.layouts[{name!r}].take(whole, model.mesh.rank), the part of a whole tensor",
            )
    return parts


def expect_tied(ties: Mapping[str, tuple[ParameterPlace, str]], tensors: Mapping[str, Tensor]) -> None:
    """Raises Error if a call reads another tensor under one of the names of a tied parameter.

    Args:
        ties: further name of a parameter -> its place under this name, and its first name.
        tensors: first name -> the tensor that the call reads, as `functional_call` gave it.
    """
    for name, ((module, key), first) in ties.items():
        if module._parameters.get(key) is not tensors[first]:
            raise Error(
                f"`{first}` and `{name}` are one parameter, and the call was given two tensors for them",
                fix="functional_call(..., tie_weights=True), or one tensor under both names",
                alternative="make two parameters of them before autotp.parallelize",
            )


def install() -> Undo:
    """Has transforms of torch.func take a cut parameter that they are given as the whole; returns the undo."""
    wrap, batched = internals.WRAPS_FOR_GRAD.original(), internals.BATCHES_INPUTS[0].original()

    @wraps(wrap)
    def wrapped(x: Any, level: int) -> Any:
        if isinstance(x, CutTensor) and not torch.compiler.is_compiling():
            with temporarily_clear_interpreter_stack():  # The whole is a tensor from outside of this transform.
                x = whole_operand(x)
        return wrap(x, level)

    @wraps(batched)
    def of_wholes(in_dims: Any, args: Any, func: Any) -> Any:
        return batched(in_dims, args if torch.compiler.is_compiling() else pytree.tree_map(whole_operand, args), func)

    # Two modules of torch have the second function, each under a name of its own.
    undone = [internals.WRAPS_FOR_GRAD.put(wrapped), *(row.put(of_wholes) for row in internals.BATCHES_INPUTS)]

    def undo() -> None:
        for put_back in undone:
            put_back()

    return undo
