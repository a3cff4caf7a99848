"""Conversions of modules in forward: `self.router = self.router.to(torch.float32)`.

torch exchanges each parameter for what it is converted to, which tensors of a capture do not allow. Where the
conversion changes nothing, there is nothing to exchange. Elsewhere the first call would change the model for all later
ones, so it has to be written before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autotp import torch_internals as internals
from autotp.errors import Error


@contextmanager
def none_converted(model: nn.Module) -> Iterator[None]:
    """A region in which a conversion of a module of `model` that changes nothing does nothing.

    Raises:
        Error: a conversion changes a parameter or a buffer.
    """

    def converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
            with torch.no_grad():
                # On tensors without values: it says which dtype, device and shape the conversion would give.
                result = fn(tensor)
            if (result.dtype, result.device, result.shape) != (tensor.dtype, tensor.device, tensor.shape):
                raise Error(
                    f"forward converts {_name(model, tensor)} from {_said(tensor)} to {_said(result)}, "
                    "so the first call changes the model for later ones",
                    fix="the same conversion of this module once, before autotp.parallelize",
                )
        return module

    with internals.CONVERTS_MODULE.replaced_by(converted):
        yield


def _name(model: nn.Module, tensor: Tensor) -> str:
    named = [*model.named_parameters(), *model.named_buffers()]
    return f"`{next((name for name, x in named if x is tensor), 'a parameter')}`"


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
