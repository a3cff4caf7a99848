"""Captures a `torch.autograd.Function` with its backward.

`autotp/ops/custom_vjp.py` says how its operators are marked. Forward and backward run as torch runs them: both without
recording gradients, and backward outside of autocast.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.model_library import library
from autotp.ops.custom_vjp import RECORDED
from autotp.passes.capture.autocast_regions import ambient_everywhere
from autotp.passes.capture.pytree import map_leaves
from autotp.passes.capture.unsupported.tensor_values import LAST_WAY_OUT, TAKES_FUNCTIONS, WITHOUT_FUNCTIONS
from autotp.source_location import user_line

Function = Any
"""A subclass of torch.autograd.Function."""


class Context:
    """The `ctx` of a Function, which carries tensors and settings from forward to backward.

    Attributes:
        needs_input_grad: True for every floating operand, also for frozen ones: the user may unfreeze them later.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(map(_is_floating, args))
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.dirty: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps tensors."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Does nothing: torch uses it in forward-mode differentiation only."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Notes the operands that forward wrote into."""
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Notes which outputs have no gradient."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Notes whether backward gets zeros as the gradient of an unused output."""
        self.materialize_grads = value

    def mapped(self, read: Callable[[Tensor], Tensor]) -> Context:
        """Returns a copy for backward, with `read` applied to each tensor in any attribute."""
        context = copy.copy(self)
        for name, value in vars(self).items():
            setattr(context, name, map_leaves(lambda x: read(x) if isinstance(x, Tensor) else x, value))
        return context


def run_function(function: Function, args: Sequence[Any]) -> Any:
    """Returns the result of `function.apply(*args)`, while a graph is captured.

    Raises:
        Error: the Function cannot be traced; names the Function and the line that calls it.
    """
    formula = library().formula_of(function)
    if formula is not None:
        return formula(*args)
    ctx = Context(args)
    # As in torch, forward gets operands without a history: its own backward gives their gradients.
    inside = [arg.detach() if _is_floating(arg) else arg for arg in args]
    with torch.no_grad():
        result = _forward(function, ctx, inside)
    if not torch.is_grad_enabled() or not any(ctx.needs_input_grad):
        return result
    outs = result if isinstance(result, tuple) else (result,)
    try:
        _expect_traceable(ctx, outs)
        done = _differentiated(function, ctx, args, inside, outs)
    except Error:
        raise
    except Exception as error:  # A backward may fail in any way.
        raise _refused(function, error) from error
    return done if isinstance(result, tuple) else done[0]


def _forward(function: Function, ctx: Context, inside: Sequence[Any]) -> Any:
    # Without a `setup_context` of its own, the Function has torch's older form: forward takes ctx.
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(ctx, *inside)
    result = function.forward(*inside)
    function.setup_context(ctx, tuple(inside), result)
    return result


def _differentiated(
    function: Function, ctx: Context, args: Sequence[Any], inside: Sequence[Any], outs: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the outputs; marks each floating output with the operands' gradients that backward computes."""
    without_gradient = {id(x) for x in ctx.non_differentiable}
    marked = {
        i: RECORDED["output"](y, function.__name__)
        for i, y in enumerate(outs)
        if _is_floating(y) and id(y) not in without_gradient
    }
    operand_of = {id(x): arg for x, arg in zip(inside, args, strict=True)}
    grads = [marked[i][1] if i in marked else _no_gradient(y) for i, y in enumerate(outs)]
    result = _backward(function, ctx.mapped(lambda x: RECORDED["kept"](operand_of.get(id(x), x))), grads)
    # As autograd: more gradients than operands are legal if the others are None.
    if len(result) < len(args) or any(grad is not None for grad in result[len(args) :]):
        raise ValueError(f"it returns {len(result)} gradients of {len(args)} operands")
    pairs = zip(args, result, strict=False)
    sent = [RECORDED["sent"](x, _fitted(g, x)) for x, g in pairs if _is_floating(x) and g is not None]
    if not sent:
        return tuple(outs)
    # Each floating output reads all gradients, so that none of them is dropped as dead while any output is read.
    return tuple(RECORDED["result"](marked[i][0], sent) if i in marked else y for i, y in enumerate(outs))


def _backward(function: Function, ctx: Context, grads: Sequence[Any]) -> tuple[Any, ...]:
    run = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    with torch.no_grad(), _WithoutEngine(), ExitStack() as stack:
        for settings in ambient_everywhere():
            stack.enter_context(settings.off())
        result = run(ctx, *grads)
    return result if isinstance(result, tuple) else (result,)


class _WithoutEngine(TorchFunctionMode):
    """Refuses a backward within a backward: a capture does not see the operators that autograd's engine runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise ValueError(f"its backward calls {func.__module__}.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _fitted(grad: Tensor, x: Tensor) -> Tensor:
    """Returns a gradient as autograd expects it: in the operand's dtype, summed over broadcast dimensions."""
    with torch.no_grad():
        # autograd, too, accepts a gradient of a shape to which the operand can be broadcast.
        grad = grad if grad.shape == x.shape else grad.sum_to_size(x.shape)
        return grad if grad.dtype == x.dtype else grad.to(x.dtype)


def _no_gradient(y: Any) -> Any:
    """Returns what backward gets for an output without a gradient: zeros, or None for a non-tensor."""
    return torch.zeros_like(y) if isinstance(y, Tensor) else None


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _expect_traceable(ctx: Context, outs: Sequence[Any]) -> None:
    if ctx.dirty:
        raise ValueError("it writes into its operands (mark_dirty)")
    if not ctx.materialize_grads and len(outs) > 1:
        raise ValueError("which of its outputs have gradients is not known before (set_materialize_grads(False))")


def _refused(function: Function, error: Exception) -> Error:
    if function.__module__.startswith(internals.TAKES_FUNCTIONS):
        return Error(TAKES_FUNCTIONS, at=user_line(traceback.extract_stack()), fix=WITHOUT_FUNCTIONS)
    first = (str(error).strip().splitlines() or [""])[0]
    return Error(
        f"the backward of the torch.autograd.Function `{function.__name__}` cannot be in a graph: "
        f"{type(error).__name__}: {first}",
        at=user_line(traceback.extract_stack()),
        fix=LAST_WAY_OUT,
    )
