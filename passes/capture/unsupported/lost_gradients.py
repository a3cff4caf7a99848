"""Keeps or refuses a model's own gradients that torch.export would drop silently.

Autograd differentiates a captured graph operator by operator. The backward of a `torch.autograd.Function` becomes part
of the graph (`passes/capture/autograd_functions.py`). A gradient hook, inference mode, a derivative that forward takes,
and what it does with the gradients of parameters cannot, so they are refused: without them the gradients would be
silently wrong.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._export import wrappers
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.passes.capture import autograd_functions as functions
from autotp.passes.capture.replacements.everywhere import Pairs
from autotp.source_location import calling_frame, user_line

TENSOR_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
REQUIRES_GRAD = (Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__)  # noqa: B009  mypy sees a bool.
GRAD = (getattr(Tensor, "grad").__get__, getattr(Tensor, "grad").__set__)  # noqa: B009  mypy sees a tensor.


@contextmanager
def nothing_lost(model: nn.Module) -> Iterator[None]:
    """A region in which `model` runs, and anything that its graph would lose is an Error.

    Checkpointed functions run without checkpointing: that changes no number.
    """
    expect_no_global_hooks()
    _expect_no_backward_hooks(model)
    exporting = internals.IS_EXPORTING.original()

    def asked() -> bool:
        """Says no to torch's `allow_in_pre_dispatch_graph`, which would make one opaque node of the Function."""
        return exporting() and calling_frame().f_globals is not vars(wrappers)

    with (
        _Watch(), internals.IS_EXPORTING.replaced_by(asked), _without_global_hooks(),
        internals.ZERO_GRAD.replaced_by(_zero_grad), _functions_in_graph(),
    ):  # fmt: skip
        yield


@contextmanager
def _functions_in_graph() -> Iterator[None]:
    """A region in which `apply` of a Function puts its own backward into the graph.

    A model may have kept the method with its class (`sparsemax = Sparsemax.apply`), so `apply` is not replaced. It is
    written in C++, and asks the class for the type of its `ctx`, and then for `forward`: the second answer is ours.
    """
    _expect_asks()
    caller: tuple[type, bool] | None = None  # the Function that asked for a `ctx`; whether gradients are recorded
    attribute_of = internals.READS_FUNCTION.original()

    def read(function: type, name: str) -> Any:
        nonlocal caller
        value = attribute_of(function, name)
        if name == "_backward_cls" and _has_own_backward(function):
            caller = function, torch._C.is_grad_enabled()
        elif name == "forward" and caller is not None and caller[0] is function:
            (_, records), caller = caller, None
            return partial(_run_recording, function, records)
        return value

    with (
        internals.READS_FUNCTION.replaced_by(read),
        internals.APPLIES_IN_FUNC.replaced_by(lambda function, *args: functions.run_function(function, args)),
    ):
        yield


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any) -> None:
        pass


@cache
def _expect_asks() -> None:
    """Raises Error if `apply` of this torch does not ask the class for what `_functions_in_graph` answers."""
    names: list[str] = []
    row = internals.READS_FUNCTION
    original = row.original()

    def read(function: type, name: str) -> Any:
        names.append(name)
        return original(function, name)

    apply = _Probe.apply
    with row.replaced_by(read):
        apply()
    if [name for name in names if name in ("_backward_cls", "forward")][-2:] != ["_backward_cls", "forward"]:
        raise row.untried("does not ask the class in `torch.autograd.Function.apply`")


def _has_own_backward(function: type) -> bool:
    """False for a part of a custom operator, which the graph has as one operator."""
    return function.__module__ != "torch._library.autograd"


def _run_recording(function: Any, records: bool, *args: Any) -> Any:
    """Runs a Function as its caller sees it: torch calls `forward` where no gradients are recorded."""
    if function.setup_context is torch.autograd.Function.setup_context:
        args = args[1:]  # The first is torch's `ctx`.
    with torch._C.DisableTorchFunction():  # The graph must not have the change.
        before = torch._C.is_grad_enabled()
        torch._C._set_grad_enabled(records)
    try:
        if function is not CheckpointFunction:
            return functions.run_function(function, args)
        run, _, *operands = args
        result = run(*operands)
        return result if torch.is_grad_enabled() else pytree.tree_map_only(Tensor, Tensor.detach, result)
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


BACKWARD_HOOK = "in its place, call in forward a torch.autograd.Function whose backward does what the hook does"
"""What to do with a backward hook on a submodule: neither before nor after can it be registered there."""
GLOBAL_HOOKS = (
    module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks,
    module._global_backward_pre_hooks,
)  # fmt: skip
"""torch's tables of hooks on all modules."""


def expect_no_global_hooks() -> None:
    """Raises Error for a hook of the user's on all modules: the modules of a parallel model are not called one by one.

    torch's own, as its flop counter's, only follow which module is called.
    """
    hooks = [hook for table in GLOBAL_HOOKS if table for hook in table.values()]
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
        raise Error(
            "a hook on all modules (`register_module_forward_hook` and its kin) would not run for parts of the model",
            fix="hooks on single modules, registered before autotp.parallelize, or on the whole parallel model",
            alternative="remove the hook while the parallel model is called",
        )


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """A region without torch's own hooks on all modules: some of them register hooks on tensors."""
    before = [dict(table) for table in GLOBAL_HOOKS]
    for table in GLOBAL_HOOKS:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(GLOBAL_HOOKS, before, strict=True):
            table.update(hooks)


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ENGINE:
            _expect_no_derivative()
        if func in TENSOR_HOOKS:
            raise _lost("a hook on a tensor", "a torch.autograd.Function whose backward does what the hook does")
        if torch.is_inference_mode_enabled():
            raise _lost("torch.inference_mode", "torch.no_grad()")
        if func in REQUIRES_GRAD and isinstance(args[0], nn.Parameter):
            requires_grad = (kwargs or {}).get("requires_grad", args[1] if len(args) > 1 else True)
            # What is frozen already may be frozen again.
            if args[0].requires_grad != requires_grad:
                raise _lost("a change of whether a parameter requires gradients", IN_THE_LOOP)
        if func in GRAD and isinstance(args[0], nn.Parameter):
            raise _lost("what forward reads or writes of a parameter's `.grad`", IN_THE_LOOP)
        # On a leaf torch itself does nothing.
        if func is Tensor.retain_grad and not args[0].is_leaf:
            raise _lost(
                "the gradient of an activation (`retain_grad`)",
                "return the activation, and call retain_grad() of what the model returns",
            )
        return func(*args, **(kwargs or {}))


ENGINE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that take a derivative of what was computed before. Those of torch.func begin a level instead."""
IN_THE_LOOP = "the same in the training loop, before or after the call"


def _expect_no_derivative(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands for functions that take a derivative: a capture does not see the operators that autograd's engine runs."""
    raise _lost(
        "a derivative that forward takes",
        "torch.autograd.grad(output, input, create_graph=True) in the training loop, on the model's output",
    )


def without_derivatives() -> Pairs:
    """Returns what stands for the functions that begin a derivative: it raises Error."""
    return [(row.original(), _expect_no_derivative) for row in internals.BEGINS_DERIVATIVE]


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> NoReturn:
    raise _lost("`zero_grad` in forward", IN_THE_LOOP)


def _lost(feature: str, instead: str) -> Error:
    line = user_line(traceback.extract_stack())
    place = {"at": line} if line != "?" else {}
    return Error(f"{feature} would be lost: a graph of the model does not have it", **place, fix=instead)


def _expect_no_backward_hooks(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Error(
                f"the backward hook on `{name or 'the model'}` would be lost: a graph of the model does not have it",
                fix=BACKWARD_HOOK if name else "remove it, or register it on what autotp.parallelize returns",
            )
