"""Puts structures, tensors and modes into a form in which two calls of blocks can be compared."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack

from autotp.passes.capture.autocast_regions import ambient_everywhere
from autotp.passes.capture.python_state.freeze import PLAIN, SYMBOLIC, Freezer

OF_FAKES = {*FakeTensor.__annotations__, "fake_device", "constant", "real_tensor", "pytype", "dispatch_keys"}
HOLDERS = 3
"""References to an item of a container during `is_shared`: the container, the loop, and the argument of getrefcount."""


def structure(module: nn.Module) -> Any:
    """Returns classes, flags, and tensors' shapes and strides of a module: equal for modules that were built alike."""
    module_tensors = tensors_of(module)
    # Ties are a part of the structure: each tensor has the number of its first name.
    first = {id(t): i for i, t in reversed(list(enumerate(module_tensors)))}
    tensors = [
        (first[id(t)], isinstance(t, nn.Parameter), t.shape, t.stride(), t.dtype, t.requires_grad)
        for t in module_tensors
    ]
    names = [name for name, _ in (*_all_parameters(module), *_all_buffers(module))]
    parts = [(name, type(part), part.training) for name, part in module.named_modules(remove_duplicate=False)]
    return parts, names, tensors


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_parameters(remove_duplicate=False)


def _all_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns the parameters, then the buffers; a tied tensor appears once for each of its names."""
    return [tensor for _, tensor in (*_all_parameters(module), *_all_buffers(module))]


def tensor_kind(x: Tensor, arguments: Sequence[Tensor]) -> Any:
    """Returns all properties of a tensor that code can read without its values, and its place among the arguments."""
    sizes = SymbolicSizes((*x.shape, *x.stride(), x.storage_offset()))
    return sizes, x.dim(), x.dtype, x.device, x.requires_grad, position(x, arguments)


@dataclass(frozen=True, eq=False)
class SymbolicSizes:
    """Sizes that are compared by their present expressions: a later operator may prove two symbols equal."""

    sizes: tuple[Any, ...]

    def agree(self, other: SymbolicSizes) -> None:
        """Assumes that sizes are equal that are equal in the example; the graph is then right for such sizes only."""
        for size, other_size in zip(self.sizes, other.sizes, strict=False):
            if not isinstance(size, torch.SymInt) or not isinstance(other_size, torch.SymInt):
                continue
            hint = size.node.hint
            if size.node.expr != other_size.node.expr and hint is not None and hint == other_size.node.hint:
                # The comparison itself makes torch note that they are equal.
                bool(size == other_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymbolicSizes) and self._spelled() == other._spelled()

    def _spelled(self) -> list[Any]:
        return [size if isinstance(size, int) else size.node.expr for size in self.sizes]


def modes() -> Any:
    """Returns the global modes that change what an operator does."""
    stack = tuple(map(id, _get_current_function_mode_stack()))
    return (
        torch.is_grad_enabled(),
        ambient_everywhere(),
        torch.get_default_dtype(),
        stack,
    )


def position(x: Tensor, among: Sequence[Tensor]) -> Any:
    """Returns the index of a tensor or object among others, by identity; None if it is not there."""
    return next((i for i, item in enumerate(among) if item is x), None)


def is_harmless(value: Any) -> bool:
    """True for an argument that a block cannot change and that has no hidden state."""
    if isinstance(value, Tensor):
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
        # What torch itself notes on a fake tensor is no hidden state; what a model notes is.
        noted = {name for name in getattr(value, "__dict__", ()) if "_memo" not in name} - OF_FAKES
        return value.layout is torch.strided and not (isinstance(value, nn.Parameter) or wrapped or noted)
    if type(value) is tuple:
        return all(map(is_harmless, value))
    return is_plain_value(value) or isinstance(value, SYMBOLIC)


def is_shared(values: Iterable[Any]) -> bool:
    """True if a list or dict among these values, at any depth, has a further reference."""
    for value in values:
        # Others may change it after the call, and a copy would not follow.
        if isinstance(value, (list, dict)) and sys.getrefcount(value) > HOLDERS:
            return True
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if is_shared(inside):
            return True
    return False


def is_plain_value(value: Any) -> bool:
    """True for a value that is nothing but its value: not for an instance of a user's subclass of float."""
    return type(value) in PLAIN or isinstance(value, (type, enum.Enum))


def attribute(module: nn.Module, name: str) -> Any:
    """Returns an attribute of a module or its class that is no parameter, buffer or module; None if there is none."""
    attributes = object.__getattribute__(module, "__dict__")
    if name in attributes:
        return attributes[name]
    return next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), None)


def freezer(paths: Mapping[int, str]) -> Freezer:
    """Returns what freezes the values that a block reads; a module of the block is its name.

    Args:
        paths: `id` of the `__dict__` of a module of the block -> its name in the block.
    """

    def special(value: Any, freeze: Any) -> Any:
        path = paths.get(id(object.__getattribute__(value, "__dict__"))) if isinstance(value, nn.Module) else None
        return NotImplemented if path is None else ("module", path)

    return Freezer(special)


def paths_in(block: nn.Module) -> dict[int, str]:
    """Returns `id` of the `__dict__` of each module of a block -> the module's name in the block."""
    return {id(object.__getattribute__(module, "__dict__")): name for name, module in block.named_modules()}
