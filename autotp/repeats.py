"""Blocks that are alike are captured once: where a later one would do the same, one operator says so.

    The first call:   x = begin([x], 3); what the block does, on x; y = end([y], own, 3)
    A later call:     y = again([x], own, 3)           `own` are the block's own parameters and buffers

`passes/unfold.py` writes out what that stands for. The model's own code around its blocks runs as ever: which block is
called with what, how often and in what order is not guessed.

NOTE [When a call does what another did]
Both blocks have the same structure: classes, flags, shapes. The arguments have the same structure, sizes, strides and
dtypes, and the plain ones the same values; so have all attributes that the first call read, at whatever depth, and the
modes around it. A number that counts layers may differ where nobody reads it. A block is captured each time if it sets
attributes, reads those of modules around it, or is given what it might change: a list, a dict, an object. What cannot
be seen is a global of Python that somebody changes between two calls, and what goes around `__getattribute__`.

NOTE [Two kinds of tensors]
All that an operator makes has a gradient if anything it is given has. Which attention runs depends on whether its mask
has one: so what has none goes through an operator of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type
from torch.utils import _pytree as pytree

from autotp import alike
from autotp.alike import Frozen, attribute, is_harmless, is_plain, modes, position, structure, tensor_kind, tensors_of

torch.library.define("autotp::begin", "(Tensor[] x, int at) -> Tensor[]")
torch.library.define("autotp::end", "(Tensor[] y, Tensor[] own, int at) -> Tensor[]")
torch.library.define("autotp::again", "(Tensor[] x, Tensor[] own, int at) -> Tensor[]")
begin, end, again = (getattr(torch.ops.autotp, name).default for name in ("begin", "end", "again"))

UNTOUCHED = ("_parameters", "_buffers", "_modules")  # `tensors_of` and `structure` have these.
OWN = (os.path.dirname(torch.__file__), __file__, alike.__file__)  # Where attributes are looked up for everybody.


@dataclass
class Call:
    """A call that was captured.

    Attributes:
        at: its number.
        key: structure of the block, arguments and modes.
        paths: `id` of the attributes of a module in the block -> its name there.
        reads: (module, attribute) -> what it was, for every one that was read.
        usable: whether a later call may be said to do the same.
        result: structure of what it returned, and its leaves: tensors by their place, others themselves.
        outputs: the tensors among them.
        frozen: makes comparable what is read, and keeps it alive: what is compared by its `id` may not lose it.
    """

    at: int
    key: Any
    paths: Mapping[int, str]
    frozen: Frozen
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    usable: bool = True
    result: tuple[Any, list[Any]] = (None, [])
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """Stands for an output at this position; or for the argument, where it is passed on."""

    at: int
    argument: bool = False


class Repeats:
    """The calls of a model's blocks, while it is captured."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.open: Call | None = None

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """A region in which the calls of numbered modules that have alike ones beside them come here."""
        blocks = {id(block.__dict__): (block, structure(block)) for block in _alike(model)}
        kinds = {_definer(type(block)) for block, _ in blocks.values()}
        _STACK.append(self)
        try:
            with _patched(nn.Module, _watching(self)), ExitStack() as patches:
                for kind in kinds:
                    patches.enter_context(_patched(kind, {"forward": _calling(kind.forward, blocks, self)}))
                yield
        finally:
            _STACK.pop()

    def call(self, block: nn.Module, kind: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `run(*args, **kwargs)` returns, `block`'s own forward."""
        if self.open is not None or not all(map(is_harmless, (*args, *kwargs.values()))):
            return run(*args, **kwargs)
        paths = {id(module.__dict__): name for name, module in block.named_modules()}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = _tensors(leaves)
        if not given:
            return run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            frozen = Frozen(paths)
            key = kind, spec, [tensor_kind(x, given) if isinstance(x, Tensor) else frozen(x) for x in leaves], modes()
            known = next((call for call in self.calls if call.usable and call.key == key and _same(call, block)), None)
        if known is not None:
            return _rebuilt(known, again(given, tensors_of(block), known.at), given)
        call = Call(len(self.calls), key, paths, frozen)
        self.calls.append(call)
        inside = _each_kind(given, lambda some: begin(some, call.at))
        leaves = [inside[position(x, given)] if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return self._recorded(call, block, lambda: run(*args, **kwargs), inside)

    def _recorded(self, call: Call, block: nn.Module, run: Callable[[], Any], given: Sequence[Tensor]) -> Any:
        """What a first call returns."""
        unbacked = _unbacked(given)
        self.open = call
        try:
            found = run()
        except BaseException:
            call.usable = False
            raise
        finally:
            self.open = None
        leaves, spec = pytree.tree_flatten(found)
        made = [leaf for leaf in _tensors(leaves) if position(leaf, given) is None]
        places = [_placed(leaf, given, made) for leaf in leaves]
        call.result, call.outputs = (spec, places), made
        call.usable &= bool(made) and all(isinstance(place, _Place) or is_plain(place) for place in places)
        call.usable &= unbacked == _unbacked(given) and _same(call, block)  # Or it changed what it had read.
        call.usable &= _all_learn(made, [*given, *tensors_of(block)])
        own = tensors_of(block) if call.usable else []
        return _rebuilt(call, _each_kind(made, lambda some: end(some, own, call.at)), given)

    def read(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is read, whether it is there or not."""
        call = self.open
        if call is None or name in UNTOUCHED or (name.startswith("__") and name != "__dict__"):
            return
        if name == "__dict__":  # Whoever reads that may have read anything.
            call.usable &= sys._getframe(2).f_code.co_filename.startswith(OWN)
            return
        path = call.paths.get(id(object.__getattribute__(module, "__dict__")))
        if path is None:
            call.usable = False  # Of another block.
        elif (path, name) not in call.reads:
            with torch._C.DisableTorchFunction():
                call.reads[path, name] = call.frozen(attribute(module, name))

    def written(self) -> None:
        """Notes that an attribute was set."""
        if self.open is not None:
            self.open.usable = False


_STACK: list[Repeats] = []


@torch.library.register_fake("autotp::begin")
def _(x: Sequence[Tensor], at: int) -> list[Tensor]:
    return [_like(t) for t in x]


@torch.library.register_fake("autotp::end")
def _(y: Sequence[Tensor], own: Sequence[Tensor], at: int) -> list[Tensor]:
    return [_like(t) for t in y]


@torch.library.register_fake("autotp::again")
def _(x: Sequence[Tensor], own: Sequence[Tensor], at: int) -> list[Tensor]:
    return [_like(t) for t in _STACK[-1].calls[at].outputs]


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _watching(repeats: Repeats) -> dict[str, Any]:
    """What all modules' attributes are read and set by, under our eyes."""

    def get(self: nn.Module, name: str) -> Any:
        if repeats.open is not None:
            repeats.read(self, name)
        return object.__getattribute__(self, name)

    before_set, before_delete = nn.Module.__setattr__, nn.Module.__delattr__

    def put(self: nn.Module, name: str, value: Any) -> None:
        if not name.startswith("__"):
            repeats.written()
        before_set(self, name, value)

    def delete(self: nn.Module, name: str) -> None:
        repeats.written()
        before_delete(self, name)

    return {"__getattribute__": get, "__setattr__": put, "__delattr__": delete}


def _calling(forward: Any, blocks: Mapping[int, tuple[nn.Module, Any]], repeats: Repeats) -> Any:
    """A class's forward, which for these blocks goes through `repeats`."""

    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block, its = blocks.get(id(self.__dict__), (None, None))
        if block is None:
            return forward(self, *args, **kwargs)
        return repeats.call(block, its, functools.partial(forward, self), args, kwargs)

    return called


def _definer(kind: Any) -> Any:
    """The class that a class has its forward from."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


@contextmanager
def _patched(kind: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """A region in which a class has other attributes."""
    before = {name: vars(kind)[name] for name in names if name in vars(kind)}
    for name, value in names.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)


def _alike(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost numbered modules that have one of the same structure beside them."""
    inside: set[nn.Module] = set()
    for parent in model.modules():
        if parent in inside:
            continue
        beside = [child for name, child in parent.named_children() if name.isdigit()]
        structures = [structure(child) for child in beside] if len(beside) > 1 else []
        for child, its in zip(beside, structures, strict=False):
            if structures.count(its) > 1 and next(child.parameters(), None) is not None and _is_ordinary(child):
                inside.update(child.modules())
                yield child


def _is_ordinary(block: nn.Module) -> bool:
    """True for Python's own modules that compute what their class says."""
    odd = (torch.jit.ScriptModule, fx.GraphModule)
    own = any(type(module).__getattribute__ is not nn.Module.__getattribute__ for module in block.modules())
    return not own and not any(isinstance(module, odd) or "forward" in vars(module) for module in block.modules())


def _unbacked(given: Sequence[Tensor]) -> int:
    """How many sizes so far are known by values only."""
    mode = getattr(given[0], "fake_mode", None)
    environment = getattr(mode, "shape_env", None)
    known = environment.var_to_range if environment is not None else ()
    return len([symbol for symbol in known if symbol_is_type(symbol, SymT.UNBACKED_INT)])


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors, each once: those without a gradient before the others. NOTE [Two kinds of tensors]"""
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return sorted(found.values(), key=lambda x: x.requires_grad)


def _each_kind(tensors: Sequence[Tensor], how: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What `how` makes of the tensors without a gradient, and of the others. NOTE [Two kinds of tensors]"""
    kinds = ([x for x in tensors if x.requires_grad is learns] for learns in (False, True))
    return [new for some in kinds if some for new in how(some)]


def _all_learn(made: Sequence[Tensor], of: Sequence[Tensor]) -> bool:
    """True if what an operator would make of these has a gradient just where it has. NOTE [Two kinds of tensors]"""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in of)
    return all(x.requires_grad is learns for x in made if x.is_floating_point() or x.is_complex())


def _placed(leaf: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
    """A leaf of a result; a tensor by its place."""
    if not isinstance(leaf, Tensor):
        return leaf
    passed_on = position(leaf, given)
    return _Place(position(leaf, made)) if passed_on is None else _Place(passed_on, argument=True)


def _rebuilt(call: Call, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    spec, places = call.result

    def leaf(place: Any) -> Any:
        return place if not isinstance(place, _Place) else given[place.at] if place.argument else outputs[place.at]

    return pytree.tree_unflatten([leaf(place) for place in places], spec)


def _same(call: Call, block: nn.Module) -> bool:
    """True if all that a call read is the same in another block, and in its own still."""
    frozen = Frozen({id(module.__dict__): name for name, module in block.named_modules()})
    modules = dict(block.named_modules())
    return all(frozen(attribute(modules[path], name)) == known for (path, name), known in call.reads.items())
