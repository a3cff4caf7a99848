"""compute_dtype: parameters and arguments are cast where a stage reads them; gradients arrive in their own dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotp.compiler import Program
from autotp.errors import Error
from autotp.passes.capture.pytree import map_leaves
from autotp.passes.emit.attach_parameters import ParameterPlace, ReadParameter, value_at
from autotp.passes.plan.candidate import contracts
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import line_of


def cast_arguments(arguments: Any, dtype: torch.dtype | None) -> Any:
    """Returns the arguments with their floating-point tensors in `dtype`; unchanged if it is None."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(one, arguments)


def parameter_reader(dtype: torch.dtype | None) -> ReadParameter:
    """Returns the function that reads a parameter in `dtype`; the gradient arrives in the parameter's own dtype."""

    def read(place: ParameterPlace) -> Tensor:
        value = value_at(place)
        return value.to(dtype) if dtype and isinstance(value, nn.Parameter) and value.is_floating_point() else value

    return read


def expect_products_of_one_dtype(program: Program) -> None:
    """Raises Error if a product's operands have different dtypes: buffers keep their own dtype."""
    for node in program.graph.nodes:
        if contracts(program.axes.bound.get(node)) or has(node.target, Trait.ATTENTION):
            values = [x for x in (n.meta.get("val") for n in node.all_input_nodes) if isinstance(x, Tensor)]
            found = sorted({str(x.dtype).removeprefix("torch.") for x in values if x.is_floating_point()})
            if len(found) > 1:
                problem = f"compute_dtype: a product of {' and '.join(found)}"
                raise Error(problem, at=line_of(node), fix="`buffer.to(x.dtype)` there: buffers are not cast")
