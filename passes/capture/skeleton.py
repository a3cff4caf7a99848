"""A copy of a model for capture: its code, structure and flags, with tensors on `meta`."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autotp.errors import Error
from autotp.ops.eager_mode import is_plain
from autotp.passes.capture.guards.attribute_paths import children, everything, hidden, key_of, reached, spelled
from autotp.passes.capture.guards.guard import HOOKS


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of `model` on `meta`: its code, structure and flags, none of its numbers. The model is not touched."""
    return copy_on(model, "meta")


def copy_on(model: nn.Module, device: str) -> nn.Module:
    """A copy of `model` whose parameters and buffers are on a device, without values.

    Raises:
        Error: something among its attributes cannot be copied, or is a view of a parameter or buffer.
    """
    try:
        memo = stand_ins(model, device)
        close_over(memo, model)
        return copy.deepcopy(model, memo)
    except Error:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise Error(
            f"copy.deepcopy fails on the model: {first}",
            fix="delete computed tensors and open handles from its attributes before the call",
        ) from error


def stand_ins(model: nn.Module, device: str, whole: Mapping[str, Tensor] = MappingProxyType({})) -> dict[Any, Any]:
    """What a deep copy of a model has in the place of its tensors, by `id`.

    Args:
        device: where parameters and buffers are, without values. Other tensors are constants of the graph, as they are.
        whole: first name -> what stands for a parameter or buffer of which `model` has another form.
    """
    _expect_no_views(model)
    memo: dict[Any, Any] = {}
    shown: list[Any] = []
    for name, tensor in model.named_parameters():
        like: Tensor = whole.get(name, tensor)
        memo[id(tensor)] = nn.Parameter(empty_on(like, device), like.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = empty_on(whole.get(name, buffer), device)
    for _, value in everything(model):
        if isinstance(value, torch.Generator):
            memo[id(value)] = value
        elif isinstance(value, types.MappingProxyType):
            shown.append(value)
        elif isinstance(value, Tensor):
            # An alias: while it is captured, autograd would note on the tensor itself what is written into it.
            with unset_fake_temporarily():
                memo.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))
    for proxy in shown:  # At the end: the dict that it shows may hold any of these.
        memo[id(proxy)] = types.MappingProxyType(copy.deepcopy(gc.get_referents(proxy)[0], memo))
    return memo


def _expect_no_views(model: nn.Module) -> None:
    """Raises Error where a plain tensor is a view of a parameter or buffer: those of a parallel model are others."""
    own = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    held = {storage_of(tensor): name for name, tensor in own.values()}
    for path, value in reached(model):
        storage = storage_of(value) if isinstance(value, Tensor) and id(value) not in own else None
        if storage is not None and storage in held:
            raise Error(
                f"`{spelled(path)}` is a view of `{held[storage]}`, and would not be a view in the parallel model",
                fix="make it in forward",
            )


def storage_of(tensor: Tensor) -> int | None:
    """What a tensor's memory is known by; None if it has none of its own, as in a transform."""
    plain = type(tensor) in (Tensor, nn.Parameter) and is_plain(tensor)
    if not plain or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def close_over(memo: dict[Any, Any], model: nn.Module, aside: Sequence[Any] = ()) -> None:
    """Has functions that hold something of the model hold the same of its copy: a deep copy leaves functions alone.

    Args:
        memo: of the deep copy, with all that is not to be copied.
        aside: what lies not among the model's attributes.
    """
    own = {key_of(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, x in reached(model):
        if isinstance(x, weakref.ref) and key_of(x()) in own:
            raise Error(
                f"`{spelled(path)}` is a weak reference to the model, which a copy of it would not follow",
                fix="the module itself, in a list if it is not to be a submodule: `self.parent = [parent]`",
            )
    hooks = [hook for module in model.modules() for name in HOOKS for hook in vars(module)[name].values()]
    every = [x for _, x in reached(model)] + [x for one in (*hooks, *aside) for x in (one, *hidden(one))]
    functions = {id(x): x for x in every if isinstance(x, types.FunctionType) and x.__closure__}
    found = [function for function in functions.values() if _holds(function, own, set())]
    for function in found:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        memo[id(function)] = new
    for function in found:
        for cell, was in zip(memo[id(function)].__closure__, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # An empty one.
                cell.cell_contents = copy.deepcopy(was.cell_contents, memo)


def _holds(value: Any, own: set[int], seen: set[int]) -> bool:
    """True if something of the model is reached from a function's surroundings."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside = [*hidden(value), *([] if isinstance(value, nn.Module) else [item for _, item in children(value)])]
    return any(key_of(one) in own or _holds(one, own, seen) for one in inside)


def empty_on(like: Tensor, device: str) -> Tensor:
    """A tensor without values, of the same shape, strides and dtype, that wants no gradient."""
    return torch.empty_like(like, device=device, requires_grad=False)
