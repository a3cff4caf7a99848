"""What the exporter would drop from a graph without a word is refused: gradients that the model computes its own way.

A captured graph is differentiated by autograd, operator by operator. A `torch.autograd.Function`'s backward, a hook on
a gradient and inference mode are not in it; with them gone the gradients would be wrong, and nobody would know.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autotp.eager import alone
from autotp.errors import Error
from autotp.source import user_line

TRIALS = 8
HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


@contextmanager
def nothing_lost(model: nn.Module) -> Iterator[None]:
    """A region in which `model` runs, and what a graph of it would lose is an Error.

    Checkpointing is not lost: what it recomputes is run as it is.
    """
    _expect_no_backward_hooks(model)
    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(function: type, *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:
            run, _, *given = args
            return run(*given)
        real = apply.__get__(None, function)
        if function.__module__ == "torch._library.autograd":  # what is behind an operator, which the graph has
            return real(*args, **kwargs)
        if _is_derivative(function, real, args):
            return function.forward(_Context(), *args)  # type: ignore[attr-defined]
        raise _lost(
            f"the backward of the torch.autograd.Function `{function.__name__}`",
            "torch.library.custom_op with register_autograd, and autotp.rule",
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    try:
        with _Watch():
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


class _Context:
    """Takes what a forward keeps for its backward, for nobody."""

    needs_input_grad = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps nothing."""


def _is_derivative(function: Any, real: Callable[..., Any], args: Sequence[Any]) -> bool:
    """True if a Function's backward is what autograd makes of its forward, tried on numbers of these shapes.

    Then nothing is lost. (Functions that save memory are of this kind.) The numbers and the gradients that come in are
    of all sizes, so that a clamp of either shows. A gradient is asked of every floating operand, frozen or not:
    somebody may unfreeze.
    """
    try:
        with torch._C.DisableTorchFunction(), alone(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return all(_agree(real, lambda *x: function.forward(_Context(), *x), args) for _ in range(TRIALS))
    except Exception:  # A Function may fail in any way: it is then not known to be its forward's derivative.
        return False


def _agree(one: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any]) -> bool:
    """True if two functions of one output give the same, and the same gradients."""
    given = [_numbers(arg) for arg in args]
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    outs = [run(*given) for run in (one, other)]
    coming = _of_all_sizes(outs[0].shape)
    found = [(out.detach(), *torch.autograd.grad(out, wanted, coming)) for out in outs]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))


def _numbers(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    shape = [n if isinstance(n, int) else n.node.hint for n in arg.shape]
    return _of_all_sizes(shape).requires_grad_() if arg.is_floating_point() else torch.ones(shape, dtype=arg.dtype)


def _of_all_sizes(shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64) * torch.randn(tuple(shape), dtype=torch.float64).mul(3).exp()


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKS:
            raise _lost("a hook on a tensor", "an operator whose gradient is what the hook makes of it")
        if torch.is_inference_mode_enabled():
            raise _lost("torch.inference_mode", "torch.no_grad()")
        return func(*args, **(kwargs or {}))


def _lost(what: str, instead: str) -> Error:
    at = user_line(traceback.extract_stack())
    return Error(f"{what} would be lost: a graph of the model does not have it", at=at, **{"try": instead})


def _expect_no_backward_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise Error(
                f"the backward hook on `{name or 'the model'}` would be lost: a graph of the model does not have it",
                **{"try": "remove it, or register it on what autotp.parallelize returns"},
            )
