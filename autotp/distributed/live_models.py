"""The parallel models of this process, to find the model that a parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Undo = Callable[[], None]


@dataclass(frozen=True, eq=False)
class _Key:
    """Stands for a model, in the order in which models were made.

    Attributes:
        world: a weak reference to the default process group in which it was made, if there was one.
    """

    world: weakref.ref[dist.ProcessGroup] | None

    def is_gone(self) -> bool:
        """True if the process groups of the model were destroyed. Python may free the model much later."""
        if self.world is None:
            return False
        world = self.world()
        return world is None or world is not dist.group.WORLD


_models: weakref.WeakValueDictionary[_Key, nn.Module] = weakref.WeakValueDictionary()
_undo: list[Undo] = []


def watch_model(model: Model, installed: Iterable[Callable[[], Undo]] = ()) -> Model:
    """Notes that a model is parallel, and returns it.

    Args:
        installed: functions that are called for the first model; each returns an undo, called when no model is left.
    """
    world = dist.group.WORLD if dist.is_available() else None
    _models[_Key(None if world is None else weakref.ref(world))] = model
    # When Python exits there is nothing left to restore.
    weakref.finalize(model, _left).atexit = False
    if not _undo:
        _undo.extend(install() for install in installed)
    return model


def watch_instead(model: Model, inside: nn.Module) -> Model:
    """Notes that a model is parallel in the place of a parallel model that became a part of it, and returns it."""
    # Under its old key, so that it keeps its place in the order of `models()` on all ranks.
    for key in [key for key, watched in _models.items() if watched is inside]:
        _models[key] = model
    weakref.finalize(model, _left).atexit = False
    return model


def models() -> list[nn.Module]:
    """Returns the live parallel models in the order in which they were made, which is the same on all ranks."""
    return [model for key, model in _models.items() if not key.is_gone()]


def sorted_by_model(tensors: Iterable[Tensor]) -> tuple[dict[nn.Module, dict[str, Tensor]], list[Tensor]]:
    """Splits tensors into parameters and gradients of parallel models, by model and name, and other tensors."""
    owner: dict[int, tuple[nn.Module, str]] = {}
    for model in reversed(models()):  # A tensor of two models counts for the older model.
        for name, parameter in _named_parameters(model, "", set()):
            owner[id(parameter)] = model, name
            if parameter.grad is not None:
                owner[id(parameter.grad)] = model, name
    all_tensors = list(tensors)
    by_model: dict[nn.Module, dict[str, Tensor]] = {}
    for tensor in (tensor for tensor in all_tensors if id(tensor) in owner):
        model, name = owner[id(tensor)]
        by_model.setdefault(model, {})[name] = tensor
    # The order of `models()`: all ranks must communicate for the models in the same order.
    ordered = {model: by_model[model] for model in models() if model in by_model}
    return ordered, [tensor for tensor in all_tensors if id(tensor) not in owner]


def _named_parameters(module: nn.Module, prefix: str, visited: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields a model's parameters as torch does, also where a module cannot be hashed.

    Optimizers of other models are checked with all live models: a model that torch cannot list must not stop them.
    """
    visited.add(id(module))
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in visited:
            visited.add(id(parameter))
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None and id(child) not in visited:
            yield from _named_parameters(child, f"{prefix}{name}.", visited)


def _left() -> None:
    while _undo and not list(_models.values()):
        _undo.pop()()
