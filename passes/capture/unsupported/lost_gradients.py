"""Keeps or refuses a model's own gradients that torch.export would drop silently.

Autograd differentiates a captured graph operator by operator. The backward of a `torch.autograd.Function` becomes part
of the graph (`passes/capture/autograd_functions.py`). A gradient hook and inference mode cannot, so they are refused:
without them the gradients would be silently wrong.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autotp.errors import Error
from autotp.passes.capture import autograd_functions as functions
from autotp.source_location import user_line

TENSOR_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


@contextmanager
def nothing_lost(model: nn.Module) -> Iterator[None]:
    """A region in which `model` runs, and anything that its graph would lose is an Error.

    Checkpointed functions run without checkpointing: that changes no number.
    """
    _expect_no_backward_hooks(model)
    apply = torch.autograd.Function.__dict__["apply"]

    def applied(function: type, *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:
            run, _, *given = args
            return run(*given)
        real = apply.__get__(None, function)
        if function.__module__ == "torch._library.autograd":  # Part of a custom operator, which the graph has.
            return real(*args, **kwargs)
        return functions.run_function(function, args)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment,method-assign]
    try:
        with _Watch():
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TENSOR_HOOKS:
            raise _lost("a hook on a tensor", "a torch.autograd.Function whose backward does what the hook does")
        if torch.is_inference_mode_enabled():
            raise _lost("torch.inference_mode", "torch.no_grad()")
        return func(*args, **(kwargs or {}))


def _lost(what: str, instead: str) -> Error:
    at = user_line(traceback.extract_stack())
    return Error(f"{what} would be lost: a graph of the model does not have it", at=at, fix=instead)


def _expect_no_backward_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise Error(
                f"the backward hook on `{name or 'the model'}` would be lost: a graph of the model does not have it",
                fix="remove it, or register it on what autotp.parallelize returns",
            )
