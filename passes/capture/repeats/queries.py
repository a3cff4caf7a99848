"""What a block asks of an object that it gets, such as a cache; asked again for each block that is alike.

    The first block:   k, v = cache.update(k, v, self.layer_idx)     The object's own code runs, outside the block.
    A later one:       the same method of its own object, with its own k, v and number; and the same kind of answer

NOTE [Objects that a block is given]
Whatever is done to an object goes through a method: `cache.x` is `cache.__getattribute__("x")`, `cache.x = y` is
`cache.__setattr__("x", y)`, `len(cache)` is `cache.__len__()`. Each is a request, before which the block ends and after
which it begins again. So nobody needs to know what an object is and does: its code runs for every block. What goes to
and fro are tensors, plain values, such objects, and tuples of these. At anything else, as a list that an object holds,
the model is captured anew, each block that is given an object for itself.

NOTE [Numbers that only objects are given]
`self.layer_idx` differs from block to block and says where in the cache a layer has its part. A block reads a `Number`
instead: to a request it is the block's own, and for everybody else the integer, which is then compared as all that is
read. Only `type(self.layer_idx)` shows that it is none.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.passes.capture.guards.comparison import (
    SYMBOLIC,
    Frozen,
    SymbolicSizes,
    is_harmless,
    is_plain_value,
    position,
    tensor_kind,
)

ATTRIBUTES = ("__getattribute__", "__setattr__", "__delattr__")


class Entangled(Exception):
    """What a block does to what is around it is not all seen: blocks must not be captured once."""


@dataclass(frozen=True)
class TensorAt:
    """Stands for a tensor: the number of those that a call was given, made or was told until then."""

    at: int


@dataclass(frozen=True)
class ObjectAt:
    """Stands for an object: the number of those that a call was given or was told until then."""

    at: int


@dataclass
class Request:
    """A method that a block called of an object.

    Attributes:
        of: the object's number.
        name: the method's.
        given, spec: leaves and structure of the arguments, tensors and objects by their places; some are a `Number`.
        answer: structure of what it returned, and what the block can tell of the leaves.
    """

    of: int
    name: str
    given: list[Any]
    spec: Any
    answer: tuple[Any, list[Any]] = (None, [])

    def made(self, one: Any, leaves: Sequence[Any]) -> Any:
        """What this object's method returns on these arguments."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return getattr(one, self.name)(*args, **dict(kwargs))


def opened(value: Any) -> tuple[list[Any], Any]:
    """What tuples hold, at whatever depth, and their structure."""
    return pytree.tree_flatten(value, is_leaf=lambda x: type(x) is not tuple)


def is_passable(leaf: Any) -> bool:
    """True for what a request may be given besides tensors and objects."""
    return is_plain_value(leaf) or isinstance(leaf, (Number, *SYMBOLIC))


def told(leaves: Sequence[Any], known: Sequence[Any], watched: Collection[type] = ()) -> list[Any]:
    """The objects in an answer that are new, each once; `watched`: classes that are known to be an object's."""
    new = {id(x): x for x in leaves if position(x, known) is None and (type(x) in watched or is_object(x))}
    return list(new.values())


def kinds(leaves: Sequence[Any], tensors: Sequence[Tensor], objects: Sequence[Any]) -> list[Any]:
    """What a block can tell of an answer's leaves.

    Raises:
        Entangled: it could change one, or see more of it.
    """
    with torch._C.DisableTorchFunction():
        return [_kind(leaf, tensors, objects) for leaf in leaves]


def _kind(leaf: Any, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
    at = position(leaf, objects)
    if at is not None:
        return type(leaf), at
    if not is_harmless(leaf):
        raise Entangled
    return tensor_kind(leaf, tensors) if isinstance(leaf, Tensor) else Frozen({})(leaf)


def agree(leaves: Sequence[Any], answer: tuple[Any, list[Any]]) -> None:
    """Takes sizes in an answer for those in the first one's, where they are so in the example.

    Every layer of a cache has symbols of its own for its length, which nothing but running its block would show to be
    those of the first.
    """
    for leaf, (first, *_) in zip(leaves, answer[1], strict=False):
        if isinstance(leaf, Tensor) and isinstance(first, SymbolicSizes):
            tensor_kind(leaf, ())[0].agree(first)


class _Bare:
    """What an instance takes up whose class adds nothing to it but attributes."""


def is_object(value: Any) -> bool:
    """True for an object of a class written in Python, all of which is behind its methods."""
    kind = type(value)
    own = ("__new__", *ATTRIBUTES)
    return (
        kind.__dictoffset__ != 0
        and kind.__basicsize__ == _Bare.__basicsize__
        and all(getattr(kind, name) is getattr(object, name) for name in own)
        and not hasattr(kind, "__getattr__")
        and not isinstance(value, (type, Tensor, nn.Module, types.FunctionType))
        and not is_plain_value(value)
    )


def asking(kind: Any, is_asked: Callable[[Any], bool], ask: Callable[..., Any]) -> dict[str, Any]:
    """What a class's methods are, for as long as some objects are watched.

    Args:
        is_asked: whether an object is watched now.
        ask: called instead of its methods, as `ask(object, name, *args, **kwargs)`.
    """

    def get(self: Any, name: str) -> Any:
        if name == "__class__" or not is_asked(self):
            return object.__getattribute__(self, name)
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, types.FunctionType) and name not in object.__getattribute__(self, "__dict__"):
            return functools.wraps(types.MethodType(method, self))(functools.partial(ask, self, name))
        return ask(self, "__getattribute__", name)

    def through(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return ask(self, name, *args, **kwargs) if is_asked(self) else method(self, *args, **kwargs)

        return called

    found = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    special = {name: f for name, f in found.items() if name.startswith("__") and isinstance(f, types.FunctionType)}
    special |= {name: getattr(object, name) for name in ATTRIBUTES[1:]}
    return {name: through(name, method) for name, method in special.items()} | {"__getattribute__": get}


def _as_integer(kind: Any) -> Any:
    """The class with all special methods of an integer, on the integer: whatever the other operand is, it meets one."""

    def method(name: str) -> Callable[..., Any]:
        known = vars(operator) | {"__pow__": pow, "__divmod__": divmod}
        here = known.get(name, getattr(int, name))
        there = known.get(f"__{name[3:]}") if name.startswith("__r") else None
        if there is not None:
            return lambda self, other, *args: there(plain(other), plain(self), *map(plain, args))
        return lambda self, *args: here(plain(self), *map(plain, args))

    names = {*vars(int)} - {*vars(kind), "__new__", "__getattribute__", "__getnewargs__"}
    for name in names:
        if name.startswith("__") and callable(getattr(int, name)):
            setattr(kind, name, method(name))
    return kind


@_as_integer
class Number:
    """An integer that blocks differ in. NOTE [Numbers that only objects are given]

    Args:
        value: the integer.
        place: the module's path in the block, and the attribute's name.
        used: called when anything is done with it.
    """

    def __init__(self, value: int, place: tuple[str, str], used: Callable[[], None]) -> None:
        self._value, self._place, self._used = value, place, used

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __getattr__(self, name: str) -> Any:
        return getattr(plain(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (plain(self),)


def plain(value: Any) -> Any:
    """The value itself; of a number, the integer, which is known to be used then."""
    if type(value) is not Number:
        return value
    value._used()
    return value._value


def place_of(number: Number) -> tuple[str, str]:
    """The attribute that a number is: the module's path in the block, and its name."""
    return number._place
