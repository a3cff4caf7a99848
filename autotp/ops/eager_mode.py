"""Tells whether torch is in plain eager mode, so that memory may be overwritten; regions without other modes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def is_plain(x: Tensor) -> bool:
    """True in eager mode outside of transforms: `x` is not traced or mapped, and has no tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return not (_is_wrapped(x) or _is_legacy_batch(x))


def is_transformed(x: Tensor) -> bool:
    """True if `x` is a tensor of a transform of torch.func, or may have a tangent."""
    # Not by `is_mapped`: each collective of each layer asks, and a frame of Python costs as much as the answer.
    return forward_ad._current_level >= 0 or _is_wrapped(x) or _is_legacy_batch(x)


def is_mapped(x: Tensor) -> bool:
    """True if `x` is a tensor of a transform of torch.func."""
    return _is_wrapped(x) or _is_legacy_batch(x)


def has_tangent(x: Tensor) -> bool:
    """True if `x` has a tangent in the innermost forward-mode derivative."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_legacy_batch: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def no_transform(*xs: Tensor) -> bool:
    """True in eager mode, if no transform of torch.func is active, also none that does not map or trace these tensors.

    In a transform an autograd function needs a rule for it, whatever its operands are.
    """
    if torch.compiler.is_compiling() or _transforms() or forward_ad._current_level >= 0:
        return False
    return not (any(map(_is_wrapped, xs)) or any(map(_is_legacy_batch, xs)))


def is_bare(x: Tensor) -> bool:
    """True in eager mode for a plain tensor whose operators nobody else sees: `is_plain`, and not `is_observed`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or _transforms() or _modes() > 0:
        return False
    depth = _function_modes()
    return (depth == 0 or not _has_function_mode(depth)) and not is_transformed(x)


_transforms, _modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def is_observed(x: Tensor) -> bool:
    """True if other code than torch's own sees each operator on `x`: a mode, a transform, or a subclass."""
    plain = type(x) is Tensor and not torch._C._are_functorch_transforms_active()
    if not plain or torch._C._len_torch_dispatch_stack() > 0:
        return True
    depth = torch._C._len_torch_function_stack()
    return depth > 0 and _has_function_mode(depth)


_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


_PLAIN = Tensor.__torch_dispatch__
"""The attribute of classes of tensors, such as Parameter, whose operators run as those of Tensor."""


def is_computed(x: Tensor) -> bool:
    """True if operators on `x` compute numbers now, whoever observes them: it is no tensor of a trace or transform."""
    if type(x).__torch_dispatch__ is not _PLAIN or torch._C._are_functorch_transforms_active():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 or all(torch._C._get_dispatch_mode(k) is None for k in _TRACING)


def runs_at_once(x: Tensor) -> bool:
    """True if the host can act between operators on `x`: not in traces, transforms and recorded CUDA graphs."""
    if not (is_plain(x) and is_computed(x)) or x.is_meta:  # Dynamo cannot trace the question below.
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _has_function_mode(depth: int) -> bool:
    """True in a mode for torch's functions, other than that of `torch.set_default_device`, which keeps no tensor."""
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(depth))


def is_kept(x: Tensor) -> bool:
    """True if other code may keep results of operators on `x`, as selective checkpointing does.

    NOTE [What others keep is not overwritten]
    c10d does not count its writes, so neither autograd nor selective checkpointing would notice that a tensor they keep
    was overwritten. (And CommDebugMode does not count collectives that sum in place.) A dispatch mode that keeps no
    tensor says so by its attribute `keeps_no_tensor`.
    """
    if not is_observed(x):
        return False
    return not any(getattr(mode, "keeps_no_tensor", False) for mode in _get_current_dispatch_mode_stack())


def apply_plain(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Returns `function.apply(*args)`, for plain tensors.

    NOTE [A call without its signature]
    `torch.autograd.Function.apply` binds the arguments to the signature of forward, and unwraps tensors of finished
    transforms. Neither is needed here, and without both a call takes a third of the time.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    # That of the classes below `torch.autograd.Function`, which is written in C++.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_last_backward() -> bool:
    """True inside a backward that frees its saved tensors (no `retain_graph`) and is not differentiated itself."""
    return not torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph()


def waits_now() -> bool:
    """True in a backward in which others read gradients at once: one that is differentiated, or searched for NaN."""
    return torch.is_grad_enabled() or torch.is_anomaly_enabled()


def is_recorded() -> bool:
    """True in a region in which checkpointing or a dispatch mode may record what is computed, to compute it again."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def unseen() -> AbstractContextManager[None]:
    """Returns a region outside of dispatch modes.

    NOTE [What is no operator of the model]
    Selective checkpointing numbers the operators of a call, and takes what it kept by these numbers when the call is
    made again. What only some calls compute, as comparisons of ranks, must not be among them.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else nullcontext()


@contextmanager
def alone() -> Iterator[None]:
    """A region outside of no_grad, inference mode, transforms, dispatch modes and saved-tensor hooks around it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _without_saved_tensor_hooks(),
    ):
        yield


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """A region without hooks on what backward keeps: checkpointing around a call counts what they are given."""
    hooks, engine = [], torch._C._autograd
    while (top := engine._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        engine._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        # They were taken from the top of a stack, so the last one goes back first.
        for pack, unpack in reversed(hooks):
            engine._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def uncollected() -> Iterator[None]:
    """A region without Python's garbage collector, which would search long-lived graphs again and again."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
