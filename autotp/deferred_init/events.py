"""Lists the tensors that a constructor registered, and the initialisers that it ran, from a model's structure.

Before: GPT(config) on meta
After:  places: wte.weight = lm_head.weight, ...; events: Embedding.reset_parameters(), ..., GPT._init_weights(GPT)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

INITIALISERS = (
    "reset_parameters",
    "_reset_parameters",
    "_init_weights",
)  # A module's own initialiser, if it has no argument.
APPLIES = {"_init_weights", "init_weights", "post_init"}  # A constructor with such a name applies _init_weights.


@dataclass(frozen=True)
class Event:
    """One call of an initialiser.

    Attributes:
        module: the module whose tensors it initialises.
        call: the method; `__init__` for a module without an initialiser that can be constructed again.
        owner: the model whose `_init_weights` is applied to `module`, or None.
        counted: whether the constructor ran it on meta, too.
        copy_of: the event with the same random numbers: `nn.TransformerEncoder` copies one layer.

        Its text is `Linear.reset_parameters()`, or `GPT._init_weights(Linear)`.
    """

    module: nn.Module
    call: str
    owner: nn.Module | None = None
    counted: bool = True
    copy_of: int | None = None

    def __str__(self) -> str:
        name = type(self.module).__name__
        return f"{name}.{self.call}()" if self.owner is None else f"{type(self.owner).__name__}._init_weights({name})"


@dataclass
class TensorPlace:
    """A place of a parameter or buffer in a module; while ties are undone, each place has a separate `tensor`."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Puts `tensor` into the module at this place."""
        self.tensor = tensor
        table: dict[str, Any] = self.module._parameters if self.key in self.module._parameters else self.module._buffers
        table[self.key] = tensor


Tied = list[list[TensorPlace]]  # For each tensor its places, in the order of registration.


# ---- the places of tensors


def places_of(model: nn.Module) -> Tied:
    """Returns the places of all parameters and buffers, by tensor."""
    places_by_tensor: dict[int, list[TensorPlace]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in own_tensors(module).items():
            place = TensorPlace(f"{prefix}.{key}" if prefix else key, module, key, tensor)
            places_by_tensor.setdefault(id(tensor), []).append(place)
    return list(places_by_tensor.values())


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's own parameters and buffers, without those of its children."""
    return {key: t for key, t in {**module._parameters, **module._buffers}.items() if t is not None}


@contextmanager
def untied(tied: Tied) -> Iterator[None]:
    """A region in which every place has a separate tensor, as when the modules were constructed."""
    before = [places[0].tensor for places in tied]
    try:
        for places in tied:
            for place in places[1:]:
                place.put(empty_like(place.tensor, torch.device("meta")))
        yield
    finally:
        for places, tensor in zip(tied, before, strict=True):
            for place in places:
                place.put(tensor)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor, or parameter, like this on `device`, without values."""
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def how_to_fill(place: TensorPlace) -> dict[str, Any]:
    """Returns, as arguments of an Error, how to initialise a tensor that its initialisers leave empty."""
    class_name, key = type(place.module).__name__, place.key
    fix = f"fill self.{key} in {class_name}.reset_parameters(self) and call that in the constructor,"
    alternatives = ["in _init_weights(self, module) of the model, applied at the end of its constructor"]
    if not isinstance(place.tensor, nn.Parameter):
        alternatives.append('make it with device="cpu": tensors that are not on meta keep their values')
    return {"fix": fix, "alternative": tuple(alternatives)}


# ---- the initialisers that ran


def events_of(model: nn.Module) -> list[Event]:
    """Returns the initialisers that building `model` ran: each module's after those of its children, in order."""
    events: list[Event] = []
    built: set[nn.Module] = set()
    applied: set[nn.Module] = set()

    def build(module: nn.Module) -> None:
        built.add(module)
        for child in module.children():
            start = len(events)
            if child not in built:
                build(child)
            if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and child is module.layers:
                _mark_copies(events, start, module.num_layers)
        if call := _own_initialiser(module):
            events.append(Event(module, call))
        if _arguments(module, "_init_weights") == 1 and (module is model or APPLIES & set(mentioned(module))):
            apply(module, module)

    def apply(module: nn.Module, owner: nn.Module) -> None:
        for child in module.children():
            apply(child, child if is_hugging_face(owner) and is_hugging_face(child) else owner)
        if not (is_hugging_face(owner) and module in applied):
            events.append(Event(module, "_init_weights", owner, counted=not is_hugging_face(owner)))
            applied.add(module)

    # `_own_initialiser` may build a second module.
    with torch.device("meta"):
        build(model)
    return events


def is_hugging_face(owner: nn.Module) -> bool:
    """True for a model of transformers: it applies `_init_weights` once to each module, not on meta, and ties later."""
    return hasattr(owner, "_initialize_weights")


def _mark_copies(events: list[Event], start: int, layers: int) -> None:
    """Marks the events from `start` on as those of `layers` copies of one layer, which is not in the model itself."""
    stride = (len(events) - start) // max(layers, 1)
    for i in range(start, len(events)):
        events[i] = replace(events[i], counted=False, copy_of=i - stride if i - stride >= start else None)


def _own_initialiser(module: nn.Module) -> str | None:
    initialisers = [name for name in INITIALISERS if _arguments(module, name) == 0]
    return initialisers[0] if initialisers else "__init__" if made_again(module) else None


def _arguments(module: nn.Module, method: str) -> int | None:
    """Returns the number of required arguments of a method; None if there is no such method."""
    function = getattr(module, method, None)
    if not callable(function):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(function).parameters.values())


def made_again(module: nn.Module) -> nn.Module | None:
    """Builds a second `module` from its attributes with the names of the constructor's arguments; None if it cannot."""
    needed = set(inspect.signature(type(module)).parameters) - {"device", "dtype"}
    if not own_tensors(module) or any(module.children()) or not all(hasattr(module, name) for name in needed):
        return None
    flags = {**module._parameters, **module._buffers}  # For bias=True there is a tensor, for bias=False None.
    try:
        again = type(module)(**{n: flags[n] is not None if n in flags else getattr(module, n) for n in needed})
    except Exception:  # The attribute has another meaning than the argument of its name.
        return None
    kinds = [[(key, t.shape, t.dtype) for key, t in own_tensors(m).items()] for m in (module, again)]
    return again if kinds[0] == kinds[1] else None


def own_classes(module: nn.Module) -> list[type]:
    """Returns the classes of `module` that define a constructor, without torch's classes."""
    return [cls for cls in users_classes(module) if "__init__" in vars(cls)]


def users_classes(module: nn.Module) -> list[type]:
    """Returns the classes of `module`, without torch's classes."""
    return [cls for cls in type(module).__mro__ if cls.__module__.partition(".")[0] not in ("torch", "builtins")]


def mentioned(module: nn.Module) -> Iterator[str]:
    """Yields the names in the code of the module's constructors, without torch's."""
    codes = [getattr(inspect.unwrap(vars(cls)["__init__"]), "__code__", None) for cls in own_classes(module)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes += code.co_consts
