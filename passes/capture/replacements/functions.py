"""Functions of torch that an exporter cannot take, and what stands for them while a model is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.ops.losses import ctc_loss

DATA, SET_DATA = getattr(Tensor, "data").__get__, getattr(Tensor, "data").__set__  # noqa: B009  mypy sees a tensor.
REAL = getattr(Tensor, "real").__get__  # noqa: B009


class ReplacedFunctions(TorchFunctionMode):
    """A mode in which each of these functions is another one, which gives the same.

    NOTE [Functions that return their operand]
    `x.float()` is x itself where x has this dtype, and so are `x.to(x.device)`, dropout in evaluation and others. Under
    `torch.no_grad()` the exporter writes `detach(x.float())` into the graph, and takes this for x from then on: x would
    have no gradient in the rest of the model. So a function gets `x.detach()` there, and if it returns this, the result
    is x. An input may require gradients in a later call, so it is treated so whether it does now or not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            raise Error(
                "forward assigns to `.data` of a tensor, which a graph does not do",
                fix="tensor.copy_(value) under torch.no_grad() for a buffer; for a parameter, in the training loop",
            )
        if not torch._C.is_grad_enabled() and not _makes_or_changes(func, kwargs or {}):
            return self._without_gradients(func, args, kwargs or {})
        return self._replaced(func, args, kwargs)

    def _without_gradients(self, func: Any, args: Any, kwargs: Any) -> Any:
        """NOTE [Functions that return their operand]"""
        if _name(func) == "lift_fresh":  # The exporter makes a new tensor of it, and of dropout.
            return args[0] if args else kwargs["self"]
        if _name(func) == "dropout":
            arguments = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            if not arguments.get("train", arguments.get("training", True)) or arguments.get("p") == 0:
                return arguments["input"]
        detached: dict[int, tuple[Tensor, Tensor]] = {}  # the operand's id -> the operand, and what stands for it
        with torch._C.DisableTorchFunction():
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and (x.requires_grad or (func in CONVERSIONS and x.is_floating_point())):
                    detached.setdefault(id(x), (x, x.detach()))
        if not detached:
            return self._replaced(func, args, kwargs)

        def inside(x: Any) -> Any:
            return detached[id(x)][1] if id(x) in detached else x

        def outside(x: Any) -> Any:
            return next((operand for operand, stand_in in detached.values() if stand_in is x), x)

        args, kwargs = pytree.tree_map(inside, (args, kwargs))
        result = self._replaced(func, args, kwargs)
        return result if _name(func) in NEW else pytree.tree_map(outside, result)

    def _replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == DATA:
            func = Tensor.detach  # The exporter loses what `x.data` comes from.
        elif func in ctc_loss.REPLACED:
            func = ctc_loss.ctc_loss
        options = dict(kwargs or {})
        if options.get("generator", func) is None:  # The operator with a generator takes no symbols as sizes.
            del options["generator"]
        return func(*args, **options)


def _name(func: Any) -> str:
    """Returns a function's name, without the overload of an operator of torch.ops."""
    return str(getattr(func, "__name__", "_")).partition(".")[0]


def _makes_or_changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """True for functions that write into an operand, look at the object itself, or never return it."""
    if func == REAL:
        return False
    name = _name(func)
    made = kwargs.get("requires_grad") is not None
    return made or kwargs.get("out") is not None or name.endswith("_") or name in OF_OBJECTS


NEW = frozenset({"native_dropout"})
"""Functions that return a new tensor where the exporter's operator returns its operand."""
OF_OBJECTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward"})
"""Functions that change what autograd knows of a tensor. Others that do have names that end in `_`."""
CONVERSIONS = (
    Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as, Tensor.cpu,
    Tensor.cuda, REAL, torch.real, torch.positive, Tensor.positive, Tensor.__pos__, torch.broadcast_tensors,
    torch.functional.broadcast_tensors, torch.atleast_1d, torch.atleast_2d, torch.atleast_3d,
)  # fmt: skip
"""Functions that return an operand which needs no conversion."""
