"""Takes this rank's parts of the tensors that `load_state_dict` of a parallel model is given.

NOTE [Code that changes what is loaded]
The user's model may rename, divide or normalize tensors as they are loaded: in hooks before `load_state_dict`, or in
methods of its own. This code must see whole tensors. So where there is such code, each module takes its parts after it,
in a last hook. Otherwise all parts are taken before anything is changed, so that an error leaves the model as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.distributed.cut_tensors.cut_parameter import CutTensor, part_like
from autotp.distributed.cut_tensors.rows_of_parts import rows_of_part
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.errors import Error
from autotp.runtime.tree import ORIGINAL, held_in
from autotp.sharding.layout import Layout

LOADING = ("load_state_dict", "_load_from_state_dict")


def parts_to_load(module: nn.Module, state_dict: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Returns what torch is to load into a module of a parallel model: see NOTE [Code that changes what is loaded].

    Raises:
        Error: a tensor has neither the shape of the whole nor of the part, or some are whole and others parts.
    """
    if not own_loading(module):
        return _parts_of(module, state_dict, rank)
    result = _copy(state_dict)
    for name, _, tensor, part in _cut(module, state_dict):
        # The model's own code gets a part that behaves as the whole.
        if tensor.shape == part.shape and isinstance(part, CutTensor):
            result[name] = part_like(tensor.detach(), part)  # It warns of a norm.
    return result


def own_loading(module: nn.Module) -> str:
    """Returns the name of code of the model that changes what is loaded, other than torch's; "" if there is none."""
    for submodule in module.modules():
        for base in type(submodule).__mro__:
            users = ORIGINAL not in vars(base) and not _is_ours(base.__module__)
            if users and (method := next((name for name in LOADING if name in vars(base)), "")):
                return f"{base.__qualname__}.{method}"
        for hook in submodule._load_state_dict_pre_hooks.values():
            if not _is_ours(str(getattr(hook, "__module__", ""))):
                return str(getattr(hook, "__qualname__", "a hook"))
    return ""


def _is_ours(module: str) -> bool:
    return f"{module}.".startswith(("torch.", "autotp.runtime.", "autotp.training."))


def cutting(module: nn.Module, rank: int) -> Callable[..., None]:
    """Returns a hook that takes this rank's parts of a module's own tensors, where they are whole."""

    def cut(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, layout in held_in(module).items():
            tensor, part = state_dict.get(f"{prefix}{key}"), module._parameters.get(key)
            if not isinstance(tensor, Tensor) or part is None:
                continue
            if layout.dim is not None and part.shape != layout.shape and tensor.shape == layout.shape:
                tensor = part_in(tensor, layout, rank)
            # `fully_shard` keeps some rows of the part.
            if isinstance(part, DTensor) and not isinstance(tensor, DTensor):
                tensor = rows_of_part(tensor.detach(), part)
            state_dict[f"{prefix}{key}"] = tensor

    return cut


def part_in(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """Returns a rank's part of a tensor that is whole, or is cut in this way and behaves as the whole."""
    if isinstance(tensor, Sharded) and tensor.is_cut_as(layout):
        return tensor.to_local()
    return layout.take(tensor, rank)


def _copy(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    result = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # The versions of modules, which torch keeps so.
        result._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return result


def _cut(module: nn.Module, state_dict: Mapping[str, Any]) -> list[tuple[str, Any, Tensor, Tensor]]:
    """Returns the given tensors of which this rank holds a part: name, layout, tensor, parameter."""
    cuts = []
    for path, submodule in module.named_modules(remove_duplicate=False):
        for key, layout in held_in(submodule).items():
            name = f"{path}.{key}" if path else key
            tensor, part = state_dict.get(name), submodule.get_parameter(key)
            if layout.dim is not None and isinstance(tensor, Tensor) and part.shape != layout.shape:
                cuts.append((name, layout, tensor, part))
    return cuts


def _parts_of(module: nn.Module, state_dict: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Returns a state dict with this rank's part of each tensor.

    Args:
        state_dict: name -> the whole tensor, or this rank's part.

    Raises:
        Error: a tensor has neither of these shapes, or some are whole and others parts.
    """
    result = _copy(state_dict)
    parts: list[str] = []
    wholes: list[str] = []
    for name, layout, tensor, part in _cut(module, state_dict):
        if tensor.shape == part.shape:
            parts.append(name)
        elif tensor.shape == layout.shape:
            result[name] = part_in(tensor, layout, rank)
            wholes.append(name)
        else:
            raise Error(
                f"`{name}` is {list(tensor.shape)}: neither the whole, {list(layout.shape)}, nor the part that "
                f"this rank holds, {list(part.shape)}",
                fix="the state dict of the original model, or model.state_dict() of this rank",
            )
    if parts and wholes:
        raise Error(
            f"`{parts[0]}` has the shape of this rank's part, and `{wholes[0]}` that of the whole",
            fix="the state dict of the original model, or model.state_dict() of this rank; this is another model's",
        )
    return result
