"""The record of a captured block: its input and output tensors, and the facts that a later call must share.

    The first call:   x = begin([x], 3); the block's operators; y = end([y], own, 3, LAST)
    A later call:     y = again([x], own, 3, LAST)     `own` are the block's own parameters and buffers

A call that makes requests to an object (`passes/capture/repeats/queries.py`) has several steps: it ends before each
request, and begins again after it.

NOTE [Two kinds of tensors]
Each output of an operator requires a gradient if any of its inputs does. But which attention runs depends on whether
its mask requires a gradient. So tensors that require a gradient and tensors that do not go through separate operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type
from torch.utils import _pytree as pytree

from autotp.passes.capture.python_state.freeze import Freezer
from autotp.passes.capture.repeats.comparison import attribute, freezer, paths_in, position, tensors_of
from autotp.passes.capture.repeats.queries import BlockNumber, ObjectAt, Request, TensorAt, read_from

torch.library.define("autotp::begin", "(Tensor[] x, int at) -> Tensor[]")
torch.library.define("autotp::end", "(Tensor[] y, Tensor[] own, int at, int step) -> Tensor[]")
torch.library.define("autotp::again", "(Tensor[] x, Tensor[] own, int at, int step) -> Tensor[]")
begin, end, again = (getattr(torch.ops.autotp, name).default for name in ("begin", "end", "again"))

LAST = -1
"""The last step of a call. Earlier steps are numbered from 0, and each ends with a request."""


@dataclass
class RecordedCall:
    """A captured call of a block.

    Attributes:
        at: its number.
        block: the block that was called.
        key: kind of the block, structure and kinds of the arguments, modes.
        paths: `id` of the `__dict__` of a module in the block -> the module's name in the block.
        freeze: turns read values into a form that can be compared.
        objects: the objects among arguments and answers.
        reads: (module, attribute) -> value, for each attribute that the call read.
        requests: the requests to objects, in order.
        usable: whether later calls may repeat this one.
        outside, inside: tensors of the call by place, as the code around the block and as the block has them.
        ended: step -> the tensors that the step made for the code around the block.
        result: structure and leaves of the result, with tensors and objects by their places.
    """

    at: int
    block: nn.Module
    key: Any
    paths: Mapping[int, str]
    freeze: Freezer
    objects: list[Any]
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    usable: bool = True
    outside: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    ended: dict[int, list[Tensor]] = field(default_factory=dict)
    result: tuple[Any, list[Any]] = (None, [])

    def begin(self, leaves: Sequence[Any]) -> list[Any]:
        """Passes leaves into the block; returns them as the block has them."""
        # A tensor that the block has already does not enter a second time: it would be two tensors there.
        entering = [x for x in tensors_in(leaves) if position(x, self.outside) is None]
        self.inside += _each_kind(entering, lambda some: begin(some, self.at))
        self.outside += entering
        return [self.inside[position(x, self.outside)] if isinstance(x, Tensor) else x for x in leaves]

    def end(self, leaves: Sequence[Any], step: int) -> list[Any]:
        """Passes leaves out of the block; returns them with tensors and objects by their places."""
        # What is no tensor of the block yet was made by it.
        leaving = [x for x in tensors_in(leaves) if position(x, self.inside) is None]
        self.usable &= _all_learn(leaving, [*self.outside, *tensors_of(self.block)])
        block_tensors = tensors_of(self.block) if self.usable else []
        self.ended[step] = _each_kind(leaving, lambda some: end(some, block_tensors, self.at, step))
        self.inside += leaving
        self.outside += self.ended[step]
        return [self._placed(leaf) for leaf in leaves]

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorAt(position(leaf, self.inside))
        place = position(leaf, self.objects)
        return leaf if place is None else ObjectAt(place)

    def rebuilt(self, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
        """Returns the result for a call with these tensors and objects."""
        spec, places = self.result
        return pytree.tree_unflatten(with_tensors(places, tensors, objects, self.block), spec)

    def is_like(self, block: nn.Module) -> bool:
        """True if every attribute that this call read has the same value in another block (or still, in its own)."""
        freeze = freezer(paths_in(block))
        modules = dict(block.named_modules())
        numbers = [
            read_from(leaf) for request in self.requests for leaf in request.given if isinstance(leaf, BlockNumber)
        ]
        # Their values may differ, but requests are given integers.
        return all(type(attribute(modules[path], name)) is int for path, name in numbers) and all(
            freeze(attribute(modules[path], name)) == value for (path, name), value in self.reads.items()
        )


CALLS: list[list[RecordedCall]] = []
"""The calls of each model that is being captured; captures may be nested."""


@torch.library.register_fake("autotp::begin")
def _(x: Sequence[Tensor], at: int) -> list[Tensor]:
    return [_like(t) for t in x]


@torch.library.register_fake("autotp::end")
def _(y: Sequence[Tensor], own: Sequence[Tensor], at: int, step: int) -> list[Tensor]:
    return [_like(t) for t in y]


@torch.library.register_fake("autotp::again")
def _(x: Sequence[Tensor], own: Sequence[Tensor], at: int, step: int) -> list[Tensor]:
    return [_like(t) for t in CALLS[-1][at].ended[step]]


def _like(t: Tensor) -> Tensor:
    # In memory of its own: an operator whose schema names no alias must not return its operand.
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def outside_of(x: Any) -> Any:
    """Returns what the code around the open block has in the place of a tensor of the block; others as they are."""
    for call in CALLS[-1] if CALLS else ():
        place = position(x, call.inside)
        if place is not None:
            return call.outside[place]
    return x


def with_tensors(
    leaves: Sequence[Any], tensors: Sequence[Tensor], objects: Sequence[Any], block: nn.Module
) -> list[Any]:
    """Returns leaves for a call of this block: places replaced by tensors and objects, and the block's own numbers."""
    modules = dict(block.named_modules())

    def found(leaf: Any) -> Any:
        if isinstance(leaf, BlockNumber):
            path, name = read_from(leaf)
            return attribute(modules[path], name)
        if isinstance(leaf, ObjectAt):
            return objects[leaf.at]
        return tensors[leaf.at] if isinstance(leaf, TensorAt) else leaf

    return [found(leaf) for leaf in leaves]


def unbacked(tensors: Sequence[Tensor]) -> int:
    """Returns the number of sizes so far that depend on values (unbacked symbols)."""
    mode = getattr(tensors[0], "fake_mode", None)
    environment = getattr(mode, "shape_env", None)
    symbols = environment.var_to_range if environment is not None else ()
    return len([symbol for symbol in symbols if symbol_is_type(symbol, SymT.UNBACKED_INT)])


def tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors, each once, those without a gradient first. NOTE [Two kinds of tensors]"""
    tensors_by_id = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return sorted(tensors_by_id.values(), key=lambda x: x.requires_grad)


def _each_kind(tensors: Sequence[Tensor], how: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """Calls `how` on the tensors without a gradient, and on the others; once on an empty list if there are none.

    NOTE [Two kinds of tensors]
    """
    kinds = [[x for x in tensors if x.requires_grad is learns] for learns in (False, True)]
    return [result for some in (filter(None, kinds) if tensors else [[]]) for result in how(some)]


def _all_learn(made: Sequence[Tensor], of: Sequence[Tensor]) -> bool:
    """True if one operator with inputs `of` would give each tensor in `made` its `requires_grad`.

    NOTE [Two kinds of tensors]
    """
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in of)
    return all(x.requires_grad is learns for x in made if x.is_floating_point() or x.is_complex())
