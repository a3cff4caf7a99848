"""compute_dtype: parameters and arguments are cast where a stage reads them; gradients arrive in their own dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import Error
from autotp.passes.capture.pytree import map_leaves
from autotp.passes.emit.attach_parameters import ParameterPlace, value_at
from autotp.passes.plan.candidate import contracts
from autotp.passes.program.program import Program
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.boxes import is_sharded, local_of
from autotp.source_location import line_of


def cast_arguments(arguments: Any, dtype: torch.dtype | None) -> Any:
    """Returns the arguments with their floating-point tensors in `dtype`; unchanged if it is None."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(cast, arguments)


class ParameterReader:
    """Reads parameters in a dtype. A step casts each parameter once: all its microbatches read the same copy.

    NOTE [Why a copy lives for one step]
    A copy that each microbatch makes for itself stays until its backward: a pipeline's first rank would keep one for
    each microbatch in flight. A copy that outlives the step could be stale: `parameter.data.add_(...)` is not seen by
    the parameter's version. Writes during a step, such as those of a hook that runs the optimizer in backward, are: a
    parameter of another version, or at another place of memory, is cast again.

    Args:
        dtype: the dtype of computation; None reads parameters as they are.
        experts: parameters of which this rank computes with its part alone.

    Example:
        >>> read = ParameterReader(torch.bfloat16)
        >>> with read.one_step():
        ...     first, second = (read((nn.Linear(2, 2), "weight")) for _ in range(2))
        >>> first.dtype
        torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype | None, experts: Collection[nn.Parameter] = ()) -> None:
        self.dtype, self._experts = dtype, frozenset(experts)
        self._copies: dict[nn.Parameter, tuple[tuple[int, int], Tensor]] | None = None

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """A region in which each parameter is cast once; the copies are freed at its end."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def __call__(self, place: ParameterPlace) -> Tensor:
        """Returns the tensor at a place; a parameter in `dtype`. Its gradient arrives in the parameter's own dtype."""
        parameter = value_at(place)
        # What ZeRO left whole is a DTensor, too (`as_dtensors`): its local tensor is all of it.
        value = parameter if is_sharded(parameter) and parameter not in self._experts else local_of(parameter)
        if self.dtype is None or not isinstance(parameter, nn.Parameter) or not value.is_floating_point():
            return value
        if self._copies is None or value.dtype == self.dtype or is_sharded(value):
            return value.to(self.dtype)  # `fully_shard` casts what it gathers; a part is refused by the caller.
        shared: Tensor = SharedCopy.apply(value, self._copy(parameter, self._copies))
        return shared

    def _copy(self, parameter: nn.Parameter, copies: dict[nn.Parameter, tuple[tuple[int, int], Tensor]]) -> Tensor:
        value = local_of(parameter.detach())
        state = value._version, value.data_ptr()
        copied_state, copy = copies.get(parameter, (None, None))
        if copy is None or copied_state != state:
            copy = value.to(self.dtype)
            copies[parameter] = state, copy
        return copy


class SharedCopy(torch.autograd.Function):
    """Reads a copy of a parameter; the gradient is the parameter's.

    The gradient of each read is cast by itself, and then added to the others in the parameter's dtype: gradients of
    microbatches are never added up in the copy's dtype.
    """

    @staticmethod
    def forward(parameter: Tensor, copy: Tensor) -> Tensor:
        """Returns the copy, on the same memory."""
        return copy.view_as(copy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keeps the parameter's dtype."""
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Returns the parameter's gradient, in its dtype."""
        return grad.to(ctx.dtype), None


def expect_products_of_one_dtype(program: Program) -> None:
    """Raises Error if a product's operands have different dtypes: buffers keep their own dtype."""
    for node in program.graph.nodes:
        # torch promotes the operands of other operators to one dtype, but not those of products.
        attends = has(node.target, Trait.ATTENTION)
        if contracts(program.axes.bound.get(node)) or attends:
            # Query, key, value and the mask: what a kernel reads beside them, such as slopes, may have another dtype.
            operands = list(arguments_of(node).values())[:4] if attends else node.all_input_nodes
            values = [x for x in (getattr(n, "meta", {}).get("val") for n in operands) if isinstance(x, Tensor)]
            dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in values if x.is_floating_point()})
            if len(dtypes) > 1:
                problem = f"compute_dtype: a product of {' and '.join(dtypes)}"
                raise Error(problem, at=line_of(node), fix="`buffer.to(x.dtype)` there: buffers are not cast")
