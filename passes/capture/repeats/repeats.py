"""repeats: captures blocks that are alike once; one operator stands for each later call.

    The first call:   x = begin([x], 3); the block's operators; y = end([y], own, 3)
    A later call:     y = again([x], own, 3)           `own` are the block's own parameters and buffers

`passes/capture/repeats/unfold.py` replaces `again` by the block's operators. The model's code around its blocks runs as
usual, so the calls of blocks, their order and their arguments are not guessed. The code of objects that a block is
given, such as a key-value cache, runs as usual, too (`passes/capture/repeats/queries.py`).

NOTE [When a call repeats another]
Both blocks have the same structure: classes, flags, shapes. The arguments have the same structure, sizes, strides and
dtypes, and plain arguments have the same values. All attributes that the first call read, at any depth, and the modes
around it are the same. The number of a layer may differ if no code reads it, or only requests to objects use it.
Objects give a later block the same kinds of answers as the first. A block is captured each time if it sets attributes,
reads attributes of modules around it, has a module whose forward the model has replaced, or is given an object that it
might change unseen: a list, a dict. Not seen are globals of Python that change between two calls, reads that bypass
`__getattribute__`, and state of an object that `pickle` does not see.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp import torch_internals as internals
from autotp.passes.capture.python_state.freeze import Freezer
from autotp.passes.capture.repeats import comparison as alike
from autotp.passes.capture.repeats import queries as asked
from autotp.passes.capture.repeats import record as recorded
from autotp.passes.capture.repeats.blocks import Blocks, blocks_of, definer, differing, is_ordinary, parts_of, patched
from autotp.passes.capture.repeats.comparison import (
    attribute,
    freezer,
    is_harmless,
    is_plain_value,
    is_shared,
    modes,
    paths_in,
    position,
    tensor_kind,
    tensors_of,
)
from autotp.passes.capture.repeats.queries import BlockNumber, Entangled, ObjectAt, Request, TensorAt, is_queryable
from autotp.passes.capture.repeats.record import CALLS, LAST, RecordedCall, again, tensors_in, unbacked, with_tensors
from autotp.source_location import calling_frame

UNTOUCHED = ("_parameters", "_buffers", "_modules")  # `tensors_of` and `structure` have these.
# Files whose code reads `__dict__` of modules only to look up single attributes.
LOOKUP_FILES = (os.path.dirname(torch.__file__), __file__, alike.__file__, recorded.__file__)


class Repeats:
    """The calls of a model's blocks during capture.

    Args:
        with_objects: whether blocks that are given objects may be captured once, too.

    Attributes:
        same: pairs of a captured block and a later block that repeated it.
        open: the call that is being captured.
        is_asking: whether an object's own code runs at present, in a request of the open call.
        met_objects: whether any block was given an object.
        failed: whether a request could not be recorded.
    """

    def __init__(self, with_objects: bool = True) -> None:
        self.with_objects = with_objects
        self.blocks: Blocks = {}
        self.parts: dict[int, list[int]] = {}
        self.numbers: set[tuple[int, str, str]] = set()
        self.calls: list[RecordedCall] = []
        self.same: list[tuple[nn.Module, nn.Module]] = []
        self.open: RecordedCall | None = None
        self.is_asking = self.met_objects = self.failed = False
        self.patches, self.patched = ExitStack(), set[type]()

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """A region in which calls of numbered modules with alike siblings go through `call`.

        Raises:
            Entangled: a request of a block could not be recorded.
        """
        self.blocks = blocks_of(model)
        self.parts = {block_id: parts_of(block) for block_id, (block, _) in self.blocks.items()}
        self.numbers = differing(self.blocks)
        classes = {definer(type(block)) for block, _ in self.blocks.values()}
        CALLS.append(self.calls)
        try:
            with ExitStack() as patches:
                for row, method in _watching(self).items():
                    patches.enter_context(row.replaced_by(method))
                for cls in classes:
                    patches.enter_context(patched(cls, {"forward": _calling(cls.forward, self)}))
                yield
        finally:
            CALLS.pop()
        if self.failed:  # The model may have caught the exception.
            raise Entangled

    def expect_outside(self) -> None:
        """Raises Entangled in a block: what it reads of tensors' values is another value in the next one."""
        if self.open is not None:
            self.failed = True
            raise Entangled

    def call(self, block: nn.Module, block_kind: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of `run(*args, **kwargs)`, the block's forward, or repeats an earlier call."""
        if self.open is not None or not all(map(self._is_seen, (*args, *kwargs.values()))):
            return run(*args, **kwargs)
        if parts_of(block) != self.parts[id(block.__dict__)]:  # Its submodules were replaced.
            return run(*args, **kwargs)
        if not is_ordinary(block):  # The model has given a part of it a forward of its own, which may note results.
            return run(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_queryable)
        tensors, objects = tensors_in(leaves), list({id(x): x for x in leaves if is_queryable(x)}.values())
        # Without a tensor no operator could stand for a later call.
        if not tensors:
            return run(*args, **kwargs)
        self.met_objects |= bool(objects)
        paths = paths_in(block)
        with torch._C.DisableTorchFunction():
            freeze = freezer(paths)
            key = block_kind, spec, [_kind(x, tensors, objects, freeze) for x in leaves], modes()
            first = next((call for call in self.calls if call.usable and call.key == key and call.is_like(block)), None)
        if first is not None:
            # Its attributes count as read, though its code does not run: `Reads.slots`.
            self.same.append((first.block, block))
            return self._repeated(first, block, tensors, objects)
        call = RecordedCall(len(self.calls), block, key, paths, freeze, objects)
        self.calls.append(call)
        args, kwargs = pytree.tree_unflatten(call.begin(leaves), spec)
        return self._recorded(call, lambda: run(*args, **kwargs))

    def _is_seen(self, value: Any) -> bool:
        """True for an argument if everything that a block does with it is recorded."""
        return is_harmless(value) or (self.with_objects and is_queryable(value))

    def _repeated(self, call: RecordedCall, block: nn.Module, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
        """Repeats a recorded call for another block; returns its result."""
        outside, objects = [*tensors], [*objects]
        for step, request in enumerate(call.requests):
            outside += again(outside, tensors_of(block), call.at, step)
            with self._asking(call):
                answer = request.made(objects[request.of], with_tensors(request.given, outside, objects, block))
            leaves, spec = asked.flatten_tuples(answer)
            outside += [x for x in tensors_in(leaves) if position(x, outside) is None]
            objects += asked.new_objects(leaves, objects)
            asked.unify_sizes(leaves, request.answer)
            if (spec, asked.kinds(leaves, outside, objects)) != request.answer:
                raise Entangled
        if call.requests and not call.is_like(block):  # An object changed attributes that the block reads.
            raise Entangled
        outside += again(outside, tensors_of(block), call.at, LAST)
        return call.rebuilt(outside, objects)

    @contextmanager
    def _asking(self, call: RecordedCall) -> Iterator[None]:
        """A region in which an object's own code runs for a later block; blocks that it calls are not recorded."""
        self.open, self.is_asking = call, True
        try:
            yield
        finally:
            self.open, self.is_asking = None, False

    def _recorded(self, call: RecordedCall, run: Callable[[], Any]) -> Any:
        """Records the first call of a kind; returns its result."""
        before = unbacked(call.inside)
        self.open = call
        try:
            with self.patches:
                self._watch(call.objects)
                # In a list: `is_shared` counts the references to what a container holds.
                result = [run()]
                self.failed |= is_shared(result)  # We return a copy, so changes to it would not reach the original.
                leaves, spec = pytree.tree_flatten(result[0], is_leaf=lambda x: position(x, call.objects) is not None)
        except BaseException:
            call.usable = False
            raise
        finally:
            self.open = None
            self.patched.clear()
        call.usable &= before == unbacked(call.inside) and call.is_like(call.block)  # Else it changed what it had read.
        places = call.end(leaves, LAST)
        # A block that makes no tensor leaves no operator that could be repeated.
        call.usable &= any(call.ended.values())
        call.usable &= all(isinstance(x, TensorAt | ObjectAt) or is_plain_value(x) for x in places)
        call.result = spec, places
        return call.rebuilt(call.outside, call.objects)

    def _watch(self, objects: Sequence[Any]) -> None:
        """Patches the classes of these objects: from here on their methods go through `ask`."""
        for cls in {type(x) for x in objects} - self.patched:
            self.patches.enter_context(patched(cls, asked.asking(cls, self._is_asked, self.ask)))
            self.patched.add(cls)

    def _is_asked(self, receiver: Any) -> bool:
        return self.open is not None and not self.is_asking and position(receiver, self.open.objects) is not None

    def ask(self, receiver: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls an object's method as a request of the open call; returns its result."""
        if self.open is None or not self._is_asked(receiver):  # The model kept the bound method.
            return getattr(receiver, name)(*args, **kwargs)
        self.is_asking = True
        try:
            return self._asked(self.open, receiver, name, args, kwargs)
        except BaseException:
            self.failed = True
            raise
        finally:
            self.is_asking = False

    def _asked(self, call: RecordedCall, receiver: Any, name: str, args: Any, kwargs: Any) -> Any:
        if modes() != call.key[-1]:  # Requests of later blocks run in the modes around the block.
            raise Entangled
        leaves, spec = asked.flatten_tuples((args, tuple(kwargs.items())))
        places = call.end(leaves, len(call.requests))
        if not all(isinstance(x, TensorAt | ObjectAt) or asked.is_passable(x) for x in places):
            raise Entangled
        request = Request(position(receiver, call.objects), name, places, spec)
        leaves, spec = asked.flatten_tuples(
            request.made(receiver, with_tensors(places, call.outside, call.objects, call.block))
        )
        objects = asked.new_objects(leaves, call.objects, self.patched)
        self._watch(objects)
        call.objects += objects
        inside = call.begin(leaves)
        request.answer = spec, asked.kinds(leaves, call.outside, call.objects)
        call.requests.append(request)
        return pytree.tree_unflatten(inside, spec)

    def read(self, module: nn.Module, name: str) -> BlockNumber | None:
        """Notes that an attribute is read, even if it does not exist; returns the `BlockNumber` in its place."""
        call = self.open
        if call is None or self.is_asking or name in UNTOUCHED or (name.startswith("__") and name != "__dict__"):
            return None
        if name == "__dict__":  # Its reader may have read any attribute.
            call.usable &= calling_frame(2).f_code.co_filename.startswith(LOOKUP_FILES)
            return None
        path = call.paths.get(id(object.__getattribute__(module, "__dict__")))
        if path is None:
            call.usable = False  # A module of another block.
        elif name != "forward" and (path, name) not in call.reads:  # `forward` may be our patch of the class.
            with torch._C.DisableTorchFunction():
                value = attribute(module, name)
                frozen = call.freeze(value)
            if call.objects and type(value) is int and (call.key[0], path, name) in self.numbers:
                return BlockNumber(value, (path, name), functools.partial(self._used, call, (path, name), frozen))
            call.reads[path, name] = frozen
        return None

    def _used(self, call: RecordedCall, place: tuple[str, str], frozen: Any) -> None:
        """Notes that code other than requests used a number."""
        call.reads[place] = frozen
        self.failed |= self.open is not call  # Too late: another call may already repeat this one.

    def written(self, module: nn.Module) -> None:
        """Notes that the open block sets an attribute, or that an attribute of the block is set."""
        if self.open is not None:
            in_block = id(object.__getattribute__(module, "__dict__")) in self.open.paths
            self.open.usable &= self.is_asking and not in_block


def _kind(leaf: Any, tensors: Sequence[Tensor], objects: Sequence[Any], freeze: Freezer) -> Any:
    """Returns the properties of an argument that are compared."""
    if isinstance(leaf, Tensor):
        return tensor_kind(leaf, tensors)
    place = position(leaf, objects)
    return freeze(leaf) if place is None else (type(leaf), place)


def _watching(repeats: Repeats) -> dict[internals.Replaced, Any]:
    """Returns the methods of nn.Module that note in `repeats` the attributes that are read and set."""
    before_get, before_set = internals.READS_ATTRIBUTE.original(), internals.SETS_ATTRIBUTE.original()
    before_delete = internals.DELETES_ATTRIBUTE.original()

    def get(self: nn.Module, name: str) -> Any:
        number = repeats.read(self, name) if repeats.open is not None else None
        value = before_get(self, name)
        return value if number is None else number

    def put(self: nn.Module, name: str, value: Any) -> None:
        if not name.startswith("__"):
            repeats.written(self)
        before_set(self, name, value)

    def delete(self: nn.Module, name: str) -> None:
        repeats.written(self)
        before_delete(self, name)

    return {internals.READS_ATTRIBUTE: get, internals.SETS_ATTRIBUTE: put, internals.DELETES_ATTRIBUTE: delete}


def _calling(forward: Any, repeats: Repeats) -> Any:
    """Returns a forward that passes calls of blocks to `repeats`."""

    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block, block_kind = repeats.blocks.get(id(self.__dict__), (None, 0))
        if block is None:
            return forward(self, *args, **kwargs)
        return repeats.call(block, block_kind, functools.partial(forward, self), args, kwargs)

    return called
