"""The record of a captured block: the tensors that go in and out, and the facts that a later call must share.

    The first call:   x = begin([x], 3); what the block does, on x; y = end([y], own, 3, LAST)
    A later call:     y = again([x], own, 3, LAST)     `own` are the block's own parameters and buffers

One that asks something of an object (`passes/capture/repeats/queries.py`) ends before and begins again after: it has
several steps.

NOTE [Two kinds of tensors]
All that an operator makes has a gradient if anything it is given has. Which attention runs depends on whether its mask
has one: so what has none goes through an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type
from torch.utils import _pytree as pytree

from autotp.passes.capture.guards.comparison import Frozen, attribute, position, tensors_of
from autotp.passes.capture.repeats.queries import Number, ObjectAt, Request, TensorAt, place_of

torch.library.define("autotp::begin", "(Tensor[] x, int at) -> Tensor[]")
torch.library.define("autotp::end", "(Tensor[] y, Tensor[] own, int at, int step) -> Tensor[]")
torch.library.define("autotp::again", "(Tensor[] x, Tensor[] own, int at, int step) -> Tensor[]")
begin, end, again = (getattr(torch.ops.autotp, name).default for name in ("begin", "end", "again"))

LAST = -1
"""The step that a call ends with. Those before are counted from 0: each ends with a request."""


@dataclass
class RecordedCall:
    """A call that was captured.

    Attributes:
        at: its number.
        block: whose it is.
        key: kind of the block, structure and kinds of the arguments, modes.
        paths: `id` of the attributes of a module in the block -> its name there.
        frozen: makes comparable what is read, and keeps it alive: what is compared by its `id` may not lose it.
        objects: those that it was given or was told.
        reads: (module, attribute) -> what it was, for every one that was read.
        requests: what it asked of the objects, in order.
        usable: whether a later call may be said to do the same.
        outside, inside: tensors that it was given, made or was told, as its surroundings have them and as itself has.
        ended: step -> what it made for its surroundings.
        result: structure of what it returned, and its leaves: tensors and objects by their places, others themselves.
    """

    at: int
    block: nn.Module
    key: Any
    paths: Mapping[int, str]
    frozen: Frozen
    objects: list[Any]
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    usable: bool = True
    outside: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    ended: dict[int, list[Tensor]] = field(default_factory=dict)
    result: tuple[Any, list[Any]] = (None, [])

    def begin(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves from outside as the block has them."""
        new = [x for x in tensors_in(leaves) if position(x, self.outside) is None]
        self.inside += _each_kind(new, lambda some: begin(some, self.at))
        self.outside += new
        return [self.inside[position(x, self.outside)] if isinstance(x, Tensor) else x for x in leaves]

    def end(self, leaves: Sequence[Any], step: int) -> list[Any]:
        """Leaves of the block, by their places where they are tensors or objects; outside has the tensors now, too."""
        new = [x for x in tensors_in(leaves) if position(x, self.inside) is None]
        self.usable &= _all_learn(new, [*self.outside, *tensors_of(self.block)])
        own = tensors_of(self.block) if self.usable else []
        self.ended[step] = _each_kind(new, lambda some: end(some, own, self.at, step))
        self.inside += new
        self.outside += self.ended[step]
        return [self._placed(leaf) for leaf in leaves]

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorAt(position(leaf, self.inside))
        at = position(leaf, self.objects)
        return leaf if at is None else ObjectAt(at)

    def rebuilt(self, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
        """The result that a call returns which knows these."""
        spec, places = self.result
        return pytree.tree_unflatten(filled(places, tensors, objects, self.block), spec)

    def is_like(self, block: nn.Module) -> bool:
        """True if all that this call read is the same in another block, or in its own still."""
        frozen = Frozen({id(module.__dict__): name for name, module in block.named_modules()})
        modules = dict(block.named_modules())
        numbers = [place_of(leaf) for request in self.requests for leaf in request.given if isinstance(leaf, Number)]
        return all(type(attribute(modules[path], name)) is int for path, name in numbers) and all(
            frozen(attribute(modules[path], name)) == known for (path, name), known in self.reads.items()
        )


CALLS: list[list[RecordedCall]] = []
"""The calls of each model that is being captured: a model may be while another is."""


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
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def filled(leaves: Sequence[Any], tensors: Sequence[Tensor], objects: Sequence[Any], block: nn.Module) -> list[Any]:
    """Leaves as a call of this block has them: what stands at the places, and the block's own numbers."""
    modules = dict(block.named_modules())

    def found(leaf: Any) -> Any:
        if isinstance(leaf, Number):
            path, name = place_of(leaf)
            return attribute(modules[path], name)
        if isinstance(leaf, ObjectAt):
            return objects[leaf.at]
        return tensors[leaf.at] if isinstance(leaf, TensorAt) else leaf

    return [found(leaf) for leaf in leaves]


def unbacked(given: Sequence[Tensor]) -> int:
    """How many sizes so far are known by values only."""
    mode = getattr(given[0], "fake_mode", None)
    environment = getattr(mode, "shape_env", None)
    known = environment.var_to_range if environment is not None else ()
    return len([symbol for symbol in known if symbol_is_type(symbol, SymT.UNBACKED_INT)])


def tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors, each once: those without a gradient before the others. NOTE [Two kinds of tensors]"""
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return sorted(found.values(), key=lambda x: x.requires_grad)


def _each_kind(tensors: Sequence[Tensor], how: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What `how` makes of the tensors without a gradient, and of the others; of none, if there are none.

    NOTE [Two kinds of tensors]
    """
    kinds = [[x for x in tensors if x.requires_grad is learns] for learns in (False, True)]
    return [new for some in (filter(None, kinds) if tensors else [[]]) for new in how(some)]


def _all_learn(made: Sequence[Tensor], of: Sequence[Tensor]) -> bool:
    """True if what an operator would make of these has a gradient just where it has. NOTE [Two kinds of tensors]"""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in of)
    return all(x.requires_grad is learns for x in made if x.is_floating_point() or x.is_complex())
