"""live_bytes: the most bytes that operators have made and not freed again, in forward and in backward.

    Before: h = linear(x, w); g = gelu(h); y = linear(g, v)          8, 8 and 2 MB
    After:  26 MB: in backward h, g, and the gradients of y and of g

The operators run on fake tensors, and torch frees what nobody reads any more: that is what a device does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.costs.work import nested_tensors


class LiveBytes(TorchDispatchMode):
    """A mode that counts the memory that operators have made.

    Attributes:
        most: the most bytes that there were at once since `start`.
    """

    keeps_no_tensor = True

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before = 0

    def start(self) -> None:
        """Counts from now on what is made from now on."""
        self.most, self._before = 0, self._now()

    def _now(self) -> int:
        self._live = {place: entry for place, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in nested_tensors((args, kwargs))} | self._live.keys()
        for storage in (x.untyped_storage() for x in nested_tensors(results)):
            if storage._cdata not in known:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self._now() - self._before)
        return results


class _LastValues(torch.autograd.Function):
    """Reads the last values of a graph. Backward makes their gradients, which nobody but torch holds."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.forms = [(x.shape, x.dtype, x.device) for x in values]
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


def end_of(results: Any) -> Tensor | None:
    """Returns a scalar whose backward is that of all results; None if none of them learns."""
    learning = [x for x in nested_tensors(results) if x.requires_grad]
    return _LastValues.apply(*learning) if learning else None


def forget_gradient(x: Tensor) -> None:
    """Makes a leaf forget its gradient when it is there: gradients of parameters are counted elsewhere."""
    x.register_post_accumulate_grad_hook(_forget)


def _forget(x: Tensor) -> None:
    x.grad = None


class _Run(fx.Interpreter):
    """A run of a graph, in which operators are replaced by `replaced`: (operator, args) -> both."""

    def __init__(self, module: fx.GraphModule, replaced: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        super().__init__(module)
        self.extra_traceback, self.replaced = False, replaced

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator, or what stands for it."""
        return super().call_function(*self.replaced(target, args), kwargs)  # type: ignore[arg-type]


def live_bytes(module: fx.GraphModule, args: Sequence[Any], replaced: Callable[[Any, Any], tuple[Any, Any]]) -> int:
    """Returns the most bytes of what a block makes itself that there are at once, where all is kept for backward.

    Args:
        args: of the block; tensors may be fake.
        replaced: (operator, its arguments) -> those that run in their place.
    """
    inputs = [_copy(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args]
    live = LiveBytes()
    # The hooks of a run around this one are not for what is kept here.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is), live:
        end = end_of(_Run(module, replaced).run(*inputs))
        if end is not None:
            end.backward()
    return live.most


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _copy(x: Tensor) -> Tensor:
    """Returns a tensor like an argument, with a backward that ends there."""
    leaf = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_()
    forget_gradient(leaf)
    # A parameter takes its gradient at once; that of another value waits for the block before.
    return leaf if x.is_leaf else leaf.clone()
