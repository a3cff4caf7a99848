"""on_meta: the results of operators on `meta`, whose sizes are computed once for operands that are alike.

torch computes many of these sizes in Python, which takes longer than all else that a record does. The pieces of a model
run the same operators on the same sizes again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """What the sizes of results depend on, of a tensor on `meta`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Returns a new tensor of these sizes."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The types of arguments that are no tensors."""


class Constant(NamedTuple):
    """An argument that is no tensor: `1`, `1.0` and `True` are equal, but not alike."""

    kind: type
    value: Any


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns `func(*args, **kwargs)`: of an operator whose results are new tensors, new tensors of the same sizes.

    Args:
        func: an operator, with operands on `meta`.
    """
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        sizes = _sizes(func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items()))
    except _NotAlikeError:
        return func(*args, **kwargs)
    return sizes.empty() if isinstance(sizes, Sizes) else tuple(size and size.empty() for size in sizes)


class _NotAlikeError(Exception):
    """The sizes of the results depend on more than a key says."""


@lru_cache(maxsize=1024)
def _makes_new(func: Any) -> bool:
    """True for an operator of torch whose results share no memory with its arguments, by its schema."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    return all(argument.alias_info is None for argument in (*func._schema.arguments, *func._schema.returns))


@lru_cache(maxsize=4096)
def _sizes(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the sizes of an operator's result, or of its results. args, kwargs: as `_key` returns them"""
    operands = _argument(args)
    result = func(*operands, **{name: _argument(value) for name, value in kwargs})
    # A schema may forget an alias. So each key is tried once: `_new` raises if a result has the memory of an operand.
    memory = {x.untyped_storage()._cdata for x in operands if isinstance(x, Tensor)}
    if isinstance(result, Tensor):
        return _new(result, memory)
    if not isinstance(result, tuple | list):
        raise _NotAlikeError
    return tuple(None if x is None else _new(x, memory) for x in result)


def _new(x: Any, memory: set[int]) -> Sizes:
    """Returns the sizes of a result that has memory of its own. memory: that of others, to which it is added"""
    if not isinstance(x, Tensor) or (storage := x.untyped_storage())._cdata in memory:
        raise _NotAlikeError
    memory.add(storage._cdata)
    sizes = _key(x)
    # A view of larger memory: a tensor that is made anew would take fewer bytes than the operator allocates.
    if sizes.empty().untyped_storage().nbytes() != storage.nbytes():
        raise _NotAlikeError
    return cast(Sizes, sizes)


def _key(value: Any) -> Any:
    """Returns an argument with sizes for tensors; of arguments with equal keys, results have equal sizes."""
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        # A subclass may have sizes of its own; a lazy conjugate or negative bit changes which operators run.
        if not plain or not value.is_meta or value.is_conj() or value.is_neg():
            raise _NotAlikeError
        return Sizes(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, CONSTANTS):
        return Constant(type(value), value)
    raise _NotAlikeError


def _argument(key: Any) -> Any:
    """Returns an argument with this key."""
    if isinstance(key, Sizes):
        return key.empty()
    return key.value if isinstance(key, Constant) else [_argument(part) for part in key]
