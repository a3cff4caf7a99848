"""double: runs a model in float64, also where it casts to less."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp.model_library import library
from autotp.ops.grouped_mm import grouped_mm
from autotp.ops.random_state import forked
from autotp.passes.capture.python_state.walk import everything
from autotp.passes.capture.skeleton import close_over, copying


class _Double(TorchFunctionMode):
    """A mode that turns casts to float32 and below into casts to float64, so that round-off does not hide a bug."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in GROUPED and (product := _grouped(*args, **(kwargs or {}))) is not None:
            return product
        # These cast without a dtype among their arguments.
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        return func(*(_raised(arg) for arg in args), **{name: _raised(arg) for name, arg in (kwargs or {}).items()})


GROUPED = tuple(
    getattr(space, name) for space in (torch, F) for name in ("_grouped_mm", "grouped_mm") if hasattr(space, name)
)
"""Products of groups of rows, which torch does not support in float64."""


def _grouped(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor | None:
    """Returns the product of groups of rows in float64; None for other products."""
    rows = x.dim() == 2 and weight.dim() == 3 and bias is None
    return grouped_mm(x, weight, offs) if rows and offs is not None else None


def _raised(arg: Any) -> Any:
    low = arg is torch.float32 or arg is torch.float16 or arg is torch.bfloat16
    return torch.float64 if low else arg


@contextmanager
def all_double() -> Iterator[None]:
    """A region in which every floating computation is in float64, also after casts of the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double(), library().without_kernels():
            yield
    finally:
        torch.set_default_dtype(before)


def doubled(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, in float64 if it is a floating one."""
    return tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.detach().cpu()


def copied_model(model: nn.Module) -> nn.Module:
    """Returns a copy of the model. Computed tensors in it, such as those of torch's old weight_norm, become leaves.

    torch copies no other tensors; the next call only uses their values. Of sparse ones it copies those of one layout.
    """
    sparse = {id(x): x.clone() for x in model.buffers() if x.layout is not torch.strided}
    computed = [x for _, x in everything(model) if isinstance(x, Tensor) and not x.is_leaf]
    memo: dict[Any, Any] = sparse | {id(x): x.detach().clone().requires_grad_() for x in computed}
    with copying():
        close_over(memo, model)
        return copy.deepcopy(model, memo)


def add_noise(model: nn.Module) -> nn.Module:
    """Adds noise to every parameter: biases of 0 and norm weights of 1 would hide a wrong cut.

    Modules that a plain list or dict holds become float64, too, so that the capture can name them.
    """
    for _, value in everything(model):
        if isinstance(value, nn.Module):
            value.double()
    with torch.no_grad(), forked():
        torch.manual_seed(0)
        for module in model.modules():  # `.double()` does not convert tensors in plain attributes.
            plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
            vars(module).update({name: doubled(value) for name, value in plain.items()})
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model
