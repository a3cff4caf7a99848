"""The parallel models of this process, to find the model that a parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Undo = Callable[[], None]

_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = count()
_undo: list[Undo] = []


def watch(model: Model, installed: Iterable[Callable[[], Undo]] = ()) -> Model:
    """The model itself, known from now on as one that is parallel.

    Args:
        installed: what is called if nothing is installed yet; what each returns undoes it once no model is left.
    """
    _models[next(_numbers)] = model
    weakref.finalize(model, _left).atexit = False
    if not _undo:
        _undo.extend(install() for install in installed)
    return model


def models() -> list[nn.Module]:
    """The parallel models that are alive, in the order in which they were made: the same on all ranks of one."""
    return list(_models.values())


def sorted_by_model(tensors: Iterable[Tensor]) -> tuple[dict[nn.Module, dict[str, Tensor]], list[Tensor]]:
    """Of these tensors the parameters of parallel models and their gradients, by model and name; and the others."""
    owner: dict[int, tuple[nn.Module, str]] = {}
    for model in reversed(models()):  # What two of them hold counts as the older one's.
        for name, parameter in model.named_parameters():
            owner[id(parameter)] = model, name
            if parameter.grad is not None:
                owner[id(parameter.grad)] = model, name
    given = list(tensors)
    held: dict[nn.Module, dict[str, Tensor]] = {}
    for tensor in (tensor for tensor in given if id(tensor) in owner):
        model, name = owner[id(tensor)]
        held.setdefault(model, {})[name] = tensor
    ordered = {model: held[model] for model in models() if model in held}
    return ordered, [tensor for tensor in given if id(tensor) not in owner]


def _left() -> None:
    while _undo and not models():
        _undo.pop()()
