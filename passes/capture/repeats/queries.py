"""Records the methods that a block calls on its objects, such as a cache, and calls them again for each alike block.

    The first block:   k, v = cache.update(k, v, self.layer_idx)     The object's own code runs, outside the block.
    A later one:       the same method of its own object, with its own k, v and number; and the same kind of answer

NOTE [Objects that a block is given]
Every access to an object is a method call: `cache.x` is `cache.__getattribute__("x")`, `cache.x = y` is
`cache.__setattr__("x", y)`, `len(cache)` is `cache.__len__()`. Each such call is a request. The recorded block ends
before a request and begins again after it, so the object's own code runs for every block, and no knowledge of the
object is needed. Arguments and answers are tensors, plain values, such objects, and tuples of these. At anything else,
such as a list that an object holds, the model is captured anew, with each block that is given an object by itself.

NOTE [Numbers that only objects are given]
`self.layer_idx` differs from block to block and is the index of a layer's part of the cache. A block reads a
`BlockNumber` in its place. A request gets the number of its own block; any other code gets the integer, which is then
compared like all attributes that a block reads. Only `type(self.layer_idx)` shows that it is not an integer.
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

from autotp.model_library import BeginAgain
from autotp.passes.capture.python_state.freeze import SYMBOLIC, freeze
from autotp.passes.capture.repeats.comparison import (
    SymbolicSizes,
    is_harmless,
    is_plain_value,
    position,
    tensor_kind,
)

ATTRIBUTES = ("__getattribute__", "__setattr__", "__delattr__")


class Entangled(BeginAgain):
    """Raised if a block does something to its surroundings that is not recorded: its blocks are captured one by one."""


@dataclass(frozen=True)
class TensorAt:
    """Stands for a tensor: its place among the tensors that a call got as arguments, made, or got as answers."""

    at: int


@dataclass(frozen=True)
class ObjectAt:
    """Stands for an object: its place among the objects that a call got as arguments or as answers."""

    at: int


@dataclass
class Request:
    """A call of an object's method by a block.

    Attributes:
        of: the object's place.
        name: the method's name.
        given, spec: leaves and structure of the arguments, tensors and objects by their places, and `BlockNumber`s.
        answer: structure of the result, and the properties of its leaves that the block can read.
    """

    of: int
    name: str
    given: list[Any]
    spec: Any
    answer: tuple[Any, list[Any]] = (None, [])

    def made(self, receiver: Any, leaves: Sequence[Any]) -> Any:
        """Calls the method of another object on these arguments, and returns its result."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return getattr(receiver, self.name)(*args, **dict(kwargs))


def flatten_tuples(value: Any) -> tuple[list[Any], Any]:
    """Returns the items of nested tuples, and their structure."""
    return pytree.tree_flatten(value, is_leaf=lambda x: type(x) is not tuple)


def is_passable(leaf: Any) -> bool:
    """True for an argument that a request may have, other than tensors and objects."""
    return is_plain_value(leaf) or isinstance(leaf, (BlockNumber, *SYMBOLIC))


def new_objects(leaves: Sequence[Any], met_objects: Sequence[Any], watched: Collection[type] = ()) -> list[Any]:
    """Returns the new objects in an answer, each once.

    Args:
        met_objects: the objects that the call knows already.
        watched: classes whose methods are patched, so that `is_queryable` no longer recognises their instances.
    """
    by_id = {id(x): x for x in leaves if position(x, met_objects) is None and (type(x) in watched or is_queryable(x))}
    return list(by_id.values())


def kinds(leaves: Sequence[Any], tensors: Sequence[Tensor], objects: Sequence[Any]) -> list[Any]:
    """Returns the properties of an answer's leaves that a block can read.

    Raises:
        Entangled: the block could change a leaf, or a leaf has hidden state.
    """
    with torch._C.DisableTorchFunction():
        return [_kind(leaf, tensors, objects) for leaf in leaves]


def _kind(leaf: Any, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
    place = position(leaf, objects)
    if place is not None:
        return type(leaf), place
    if not is_harmless(leaf):
        raise Entangled
    return tensor_kind(leaf, tensors) if isinstance(leaf, Tensor) else freeze(leaf)


def unify_sizes(leaves: Sequence[Any], answer: tuple[Any, list[Any]]) -> None:
    """Assumes that sizes in an answer equal those in the first block's answer, if they are equal in the example.

    Each layer of a cache has its own symbols for its length; only running the block would show that they are equal.
    """
    for leaf, (first, *_) in zip(leaves, answer[1], strict=False):
        if isinstance(leaf, Tensor) and isinstance(first, SymbolicSizes):
            tensor_kind(leaf, ())[0].agree(first)


class _Bare:
    """An object whose class adds nothing but a `__dict__`; its size is compared."""


def is_queryable(value: Any) -> bool:
    """True for an object of a class written in Python whose state can be reached through its methods only."""
    cls = type(value)
    methods = ("__new__", *ATTRIBUTES)
    return (
        # Slots and bases of C would hold state that no method call shows.
        cls.__dictoffset__ != 0
        and cls.__basicsize__ == _Bare.__basicsize__
        and all(getattr(cls, name) is getattr(object, name) for name in methods)
        and not hasattr(cls, "__getattr__")
        and not isinstance(value, (type, Tensor, nn.Module, types.FunctionType))
        and not is_plain_value(value)
    )


def asking(cls: Any, is_asked: Callable[[Any], bool], ask: Callable[..., Any]) -> dict[str, Any]:
    """Returns the methods that replace those of a class while some of its objects are watched.

    Args:
        is_asked: returns whether an object is watched now.
        ask: called instead of the object's methods, as `ask(object, name, *args, **kwargs)`.
    """

    def get(self: Any, name: str) -> Any:
        # `isinstance` reads the class, which is compared with the kind of the object already.
        if name == "__class__" or not is_asked(self):
            return object.__getattribute__(self, name)
        method = inspect.getattr_static(cls, name, None)
        # A method is a request when it is called, not when it is read. An instance's own attribute wins over it.
        if isinstance(method, types.FunctionType) and name not in object.__getattribute__(self, "__dict__"):
            return functools.wraps(types.MethodType(method, self))(functools.partial(ask, self, name))
        return ask(self, "__getattribute__", name)

    def through(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return ask(self, name, *args, **kwargs) if is_asked(self) else method(self, *args, **kwargs)

        return called

    # From the bases to the class, so that its own methods win; without `object`.
    members = {name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()}
    special = {name: f for name, f in members.items() if name.startswith("__") and isinstance(f, types.FunctionType)}
    special |= {name: getattr(object, name) for name in ATTRIBUTES[1:]}
    return {name: through(name, method) for name, method in special.items()} | {"__getattribute__": get}


def _as_integer(cls: Any) -> Any:
    """Adds all special methods of int to a class; each works on the integer that the instance stands for."""

    def method(name: str) -> Callable[..., Any]:
        # `operator` has no `divmod`, and its power takes no modulus.
        operators = vars(operator) | {"__pow__": pow, "__divmod__": divmod}
        compute = operators.get(name, getattr(int, name))
        reflected = operators.get(f"__{name[3:]}") if name.startswith("__r") else None
        # `3 - n` is `n.__rsub__(3)`: the operator itself, with the operands in their order.
        if reflected is not None:
            return lambda self, other, *args: reflected(as_integer(other), as_integer(self), *map(as_integer, args))
        return lambda self, *args: compute(as_integer(self), *map(as_integer, args))

    names = {*vars(int)} - {*vars(cls), "__new__", "__getattribute__", "__getnewargs__"}
    for name in names:
        if name.startswith("__") and callable(getattr(int, name)):
            setattr(cls, name, method(name))
    return cls


@_as_integer
class BlockNumber:
    """An integer that differs from block to block. NOTE [Numbers that only objects are given]

    Args:
        value: the integer.
        place: the module's path in the block, and the attribute's name.
        used: called when code uses the integer.
    """

    def __init__(self, value: int, place: tuple[str, str], used: Callable[[], None]) -> None:
        self._value, self._place, self._used = value, place, used

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __getattr__(self, name: str) -> Any:
        return getattr(as_integer(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is a plain integer, and counts as used: it belongs to no block.
        return int, (as_integer(self),)


def as_integer(value: Any) -> Any:
    """Returns the integer of a `BlockNumber`, and notes that it is used; any other value unchanged."""
    if type(value) is not BlockNumber:
        return value
    value._used()
    return value._value


def read_from(number: BlockNumber) -> tuple[str, str]:
    """Returns the attribute that a number was read from: the module's path in the block, and the attribute's name."""
    return number._place
