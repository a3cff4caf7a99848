"""capture: an nn.Module and example inputs -> a torch.fx graph of ATen operators, and the guards it is right under.

Before: nn.Module, on any device or on meta
After:  graph(parameters..., buffers..., constants..., tensor inputs...) -> flat tensor outputs
"""

from __future__ import annotations

import copy
import logging
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from io import StringIO
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autotp.alike import position
from autotp.asked import Entangled
from autotp.attributes import (
    GONE,
    Before,
    Change,
    Path,
    Slot,
    Write,
    below,
    children,
    everything,
    found_at,
    hidden,
    is_new,
    key_of,
    opened,
    put_at,
    reached,
    slot_of,
    spelled,
    values_at,
)
from autotp.call import writes
from autotp.decided import Decided
from autotp.eager import alone
from autotp.errors import Error
from autotp.guard import HOOKS, Reads
from autotp.lost import nothing_lost
from autotp.passes.inline import inline
from autotp.passes.sizes import Shapes, Sizes
from autotp.passes.unfold import unfold
from autotp.regions import Autocast
from autotp.repeats import Repeats
from autotp.slow_path import slow_path
from autotp.source import user_line
from autotp.structure import flatten, outcome, settled, states, within_states
from autotp.surroundings import NOT_ASKED, Asked, Wanted, without_chance
from autotp.values import reads_values, refused

DEVICE = "cpu"
"""Where models are captured, on tensors without memory. Not `meta`: there a constant that the model makes has no value,
and autocast does nothing. (Under autocast it is the kind of device that this is for.)"""

OFF = Autocast(DEVICE)


@dataclass(frozen=True)
class Opened:
    """What of a model's attributes is an input of a graph.

    Attributes:
        slots: attributes of which all tensors below are.
        numbers: where whole numbers lie that are, unless they are `fixed`.
        fixed: where whole numbers lie that operators are given: a graph is for one value.
    """

    slots: frozenset[Slot] = frozenset()
    numbers: frozenset[Path] = frozenset()
    fixed: frozenset[Path] = frozenset()

    def __or__(self, other: Opened) -> Opened:
        return Opened(self.slots | other.slots, self.numbers | other.numbers, self.fixed | other.fixed)


NOTHING = Opened()


@dataclass(frozen=True)
class Captured:
    """One graph of a model.

    A state is an argument that the model changes (`autotp/structure.py`): its tensors may be written to.

    Attributes:
        graph: placeholders in the order parameters, buffers, constants, inputs; one output, a tuple of tensors.
        parameters: placeholder name -> the parameter's first name in the model; a tied one has one placeholder.
        buffers: placeholder name -> the buffer's first name in the model.
        constants: placeholder name -> the tensor the model made while it was captured.
        inputs: placeholder names of the tensor inputs, in the order of the flattened arguments.
        assigned: placeholder names of the buffers that the model sets anew; their values are the last outputs.
        outputs: rebuilds the model's output from the flat list of outputs, and gives the states what they hold now.
        owned: those of `inputs` that may be written to: of a state, of attributes, those in `into`.
        kept: positions of the outputs that belong to a state.
        fits: True for shapes of the tensor inputs that the graph is right for.
        example: shapes of the inputs it was captured with.
        leaves, spec: the flattened arguments, tensors on meta, and their structure.
        autocast: what was on around the model; its `device` is the one that the graph names.
        reads: the attributes that were read.
        opened: where the tensors and numbers lie, below attributes, that come behind the arguments' tensors.
        known: what is known to change from call to call.
        changes: what a call does to the model's attributes; leaves are `Place`s, `Size`s, or as they are.
        stays: positions of the outputs that attributes are set to and that the next call is given.
        results: how many of the outputs the model returns; those behind are what attributes are set to.
        into: for each argument that the model writes into its place among the arguments' tensors, and the position of
            the output that it is then.
        wanted: of what gradients were wanted, as far as the model asked: the graph is for no other calls.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: list[str]
    assigned: list[str]
    outputs: Callable[[Sequence[Any], Sequence[Any]], Any]
    owned: frozenset[str]
    kept: frozenset[int]
    fits: Callable[[Shapes], bool]
    example: tuple[tuple[int, ...], ...]
    leaves: tuple[Any, ...]
    spec: Any
    autocast: Autocast
    reads: frozenset[Slot]
    opened: tuple[Path, ...]
    known: Opened
    changes: tuple[Change | Write, ...]
    stays: frozenset[int]
    results: int
    into: tuple[tuple[int, int], ...] = ()
    wanted: Wanted = NOT_ASKED

    @property
    def input_at(self) -> dict[Path, str]:
        """Where a tensor lies that is an input -> its placeholder's name."""
        paths = [path for path in self.opened if path not in self.known.numbers]
        return dict(zip(paths, self.inputs[len(self.inputs) - len(paths) :], strict=True))

    @property
    def computes_changes(self) -> bool:
        """Whether a call sets attributes to what it computes, or to sizes."""
        values = [v for c in self.changes if isinstance(c, Change) for v in c.values.values() if v is not GONE]
        writes = any(isinstance(change, Write) for change in self.changes)
        return writes or any(isinstance(leaf, Place | Size) for leaves, _ in values for leaf in leaves)

    @property
    def written(self) -> frozenset[Slot]:
        """The attributes that a call sets, or below which it changes something."""
        own = [change for change in self.changes if isinstance(change, Change) and len(change.path) == 1]
        named = {(change.path[0], key) for change in own for key in change.values}
        return frozenset(named | {slot_of(change.path) for change in self.changes if len(change.path) > 1})


class _Returned:
    """What the model returned while it was captured: the leaves, or where they are in the outputs; the structure."""

    leaves: Sequence[Any] = ()
    spec: Any = None
    kept: Sequence[int] = ()
    assigned: Sequence[str] = ()
    changes: Sequence[Change | Write] = ()
    stays: Sequence[int] = ()
    results: int = 0
    into: Sequence[tuple[int, int]] = ()
    before: Opened = NOTHING
    moved: frozenset[Path] = frozenset()


class _Flat(nn.Module):
    """The model as a function of its tensor inputs alone; what is no tensor is closed over.

    Args:
        opened: where the values lie that come behind the arguments' tensors.
    """

    def __init__(
        self, model: nn.Module, spec: Any, leaves: Sequence[Any], opened: Sequence[Path], asked: Asked
    ) -> None:
        super().__init__()
        self.model, self.spec, self.leaves, self.opened, self.asked = model, spec, leaves, opened, asked
        self.returned = _Returned()  # An object: the exporter undoes what a forward sets on the module itself.

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        queue = iter(tensors)
        leaves = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        modules = dict(self.model.named_modules())
        # Copies: a second run, which the exporter may make, finds them as the first did.
        given_at = {path: x.clone() if isinstance(x := next(queue), Tensor) else x for path in self.opened}
        own = {path: found_at(modules, path) for path in self.opened}
        for path, value in given_at.items():
            put_at(modules, path, value)
        versions = {path: x._version for path, x in given_at.items() if isinstance(x, Tensor)}
        arguments = _of_the_caller(leaves, args, kwargs)
        unwritten = {i: x._version for i, x in arguments.items()}
        self.asked.inputs = [x for x in leaves if isinstance(x, Tensor)]
        before, buffers = Before(self.model), dict(self.model.named_buffers())
        try:
            with nothing_lost(self.model), Decided(), self.asked, self.asked.answering(), without_chance(self.model):
                changed = states((args, kwargs))
                result = self.model(*args, **kwargs)
                found, self.returned.spec = outcome(result, changed)
            written = [
                (path, {k: _opened(path, k, v, before) for k, v in new.items()}) for path, new in before.changes()
            ]
            assigned = _assigned(buffers, self.model)
        finally:
            before.restore()
            for path, value in own.items():
                put_at(modules, path, value)
        self.returned.before |= _held_before(modules, written) | Opened(_places_of(self.model, self.asked.written))
        inside = [*within_states(result, changed), *within_states(changed)]
        moved = {path: given_at[path] for path, then in versions.items() if given_at[path]._version != then}
        self.returned.moved = frozenset(moved)
        into = {i: x for i, x in arguments.items() if x._version != unwritten[i]}
        return self._flattened(found, inside, written, moved, into, assigned)

    def _flattened(
        self,
        found: Sequence[Any],
        inside: Sequence[bool],
        written: Sequence[tuple[Path, dict[Any, Any]]],
        moved: Mapping[Path, Tensor],
        into: Mapping[int, Tensor],
        assigned: Mapping[str, Tensor],
    ) -> tuple[Any, ...]:
        """What the graph returns: tensors and sizes of the result, then what attributes are set to, then buffers.

        Args:
            inside: of each leaf of the result, whether it belongs to a state.
            written: what attributes are set to.
            moved: tensors of attributes that were written into.
            into: tensors among the arguments that were written into, by their place among the tensors.
            assigned: buffers that were set anew.
        """
        sizes = [leaf for leaf in found if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)]
        computed: list[Any] = [leaf for leaf in found if isinstance(leaf, Tensor)] + sizes
        self.returned.results = len(computed)
        kept_in = {(path[0], path[1]) for path in self.opened}
        values = [(slot_of((*path, k)), v[0]) for path, new in written for k, v in new.items() if v is not GONE]
        set_to = [(slot, x) for slot, leaves in values for x in leaves if isinstance(x, Tensor)]
        set_to += [(slot_of(path), x) for path, x in moved.items()]
        for x in (*(x for _, x in set_to), *into.values()):
            computed += [x] * (position(x, computed) is None)
        places = {id(leaf): Place(i) for i, leaf in enumerate(computed)}
        self.returned.leaves = [places.get(id(leaf), leaf) for leaf in found]
        self.returned.kept = [
            places[id(leaf)].at for leaf, one in zip(found, inside, strict=True) if one and id(leaf) in places
        ]
        self.returned.stays = [places[id(x)].at for slot, x in set_to if slot in kept_in]
        self.returned.changes = [Write(path, places[id(x)].at) for path, x in moved.items()]
        self.returned.changes += [_placed(path, new, places) for path, new in written]
        self.returned.into = [(i, places[id(x)].at) for i, x in into.items()]
        self.returned.assigned = list(assigned)
        return (*computed, *assigned.values())


def _of_the_caller(leaves: Sequence[Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
    """The tensors among arguments, but those of states, by their place among all tensors."""
    inside = within_states((args, kwargs))
    tensors = [(x, one) for x, one in zip(leaves, inside, strict=True) if isinstance(x, Tensor)]
    return {i: x for i, (x, of_state) in enumerate(tensors) if not of_state}


def _opened(path: Path, key: Any, value: Any, before: Before) -> Any:
    """What an attribute is set to, as leaves and their structure."""
    try:
        return GONE if value is GONE else opened(value, before.places)
    except Error as error:
        raise Error(
            f"forward sets `{spelled(path, key)}`, which no later call could do: {error.problem}", **error.facts
        ) from error


def _placed(path: Path, new: Mapping[Any, Any], places: Mapping[int, Place]) -> Change:
    """A change whose leaves say where in the outputs they are, and how sizes are computed."""

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return Size(leaf.node.expr)
        return places.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

    return Change(path, {k: v if v is GONE else ([placed(x) for x in v[0]], v[1]) for k, v in new.items()})


def _held_before(modules: Mapping[str, nn.Module], written: Sequence[tuple[Path, dict[Any, Any]]]) -> Opened:
    """Of what a call sets, the attributes below which there were tensors, and where there were whole numbers."""
    slots, numbers = set[Slot](), set[Path]()
    for path, new in written:
        for key in new:
            try:
                was = found_at(modules, (*path, key))
            except LookupError:
                continue
            if type(was) in (int, torch.SymInt):
                numbers.add((*path, key))
            elif any(isinstance(x, Tensor) for _, x in below(was, path, {})):
                slots.add(slot_of((*path, key)))
    return Opened(frozenset(slots), frozenset(numbers))


def _assigned(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a forward has set anew (`self.mean = ...`), which the exporter does not see.

    One of another shape or dtype is a change of the model's attributes (`autotp/attributes.py`).
    """
    found = {name: now for name, now in model.named_buffers() if name in before and now is not before[name]}
    return {name: now for name, now in found.items() if not is_new(now, before[name])}


@dataclass(frozen=True)
class Place:
    """Stands for the output of the graph at this position."""

    at: int


@dataclass(frozen=True)
class Size:
    """Stands for a whole number that is computed from sizes and numbers that a call is given."""

    expression: Any


ALWAYS = Wanted()
CAPTURING = threading.RLock()
"""torch.export, and what it is captured under, are for one thread at a time."""


def capture(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast = OFF,
    once: bool = True,
    opened: Opened = NOTHING,
    wanted: Wanted = ALWAYS,
) -> Captured:
    """The graph of `skeleton(*args, **kwargs)`, with every input dimension symbolic where the model allows.

    Args:
        skeleton: the model, on `meta` (see `skeleton_of`); its train/eval flags count.
        args, kwargs: example arguments; of tensors only shapes and dtypes are read.
        autocast: what is on around the model.
        once: whether blocks that are alike are captured once (`autotp/repeats.py`), which gives the same graph sooner.
        opened: attributes that change from call to call, besides those that the model itself writes.
        wanted: of what gradients are wanted in the call, should the model ask.

    Raises:
        Error: the model branches on data, or fails on these inputs; names the source line.
    """
    leaves, spec = flatten((args, kwargs))
    leaves = [leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf for leaf in leaves]  # Constants of the graph.
    with CAPTURING:
        while True:
            found = _captured_once(skeleton, leaves, spec, autocast, once, opened, wanted)
            if isinstance(found, Captured):
                return found
            if opened | found == opened:
                names = ", ".join(f"`{spelled(slot)}`" for slot in sorted(found.slots))
                raise Error(f"forward writes into {names} in a way that a graph cannot", **{"try": "a buffer"})
            opened |= found


def _captured_once(
    skeleton: nn.Module,
    leaves: list[Any],
    spec: Any,
    autocast: Autocast,
    once: bool,
    opened: Opened,
    wanted: Wanted,
) -> Captured | Opened:
    """The graph; or what has to be opened besides."""
    for with_objects in (True, False) if once else ():
        repeats = Repeats(with_objects)
        with suppress(Entangled, Error):  # What fails while its blocks are watched is to fail, or not, as it is.
            return _capture(skeleton, leaves, spec, autocast, repeats, opened, wanted)
        if not repeats.met_objects:
            break
    return _capture(skeleton, leaves, spec, autocast, None, opened, wanted)


def _capture(
    skeleton: nn.Module, leaves: list[Any], spec: Any, autocast: Autocast, repeats: Repeats | None,
    opened: Opened, wanted: Wanted,
) -> Captured | Opened:  # fmt: skip
    """As `capture`; the calls of its blocks go through `repeats`."""
    with alone(), autocast.on(), slow_path(), _quiet():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = _copy_on(skeleton, autocast.device)
            held = values_at(model, opened.slots, opened.numbers - opened.fixed)
            asked = Asked(wanted)
            flat = _Flat(model, spec, leaves, list(held), asked)
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(held.values())
            given = [_like(x, autocast.device) if isinstance(x, Tensor) else x for x in given]
            flags = [*(wanted.inputs or ()), *[False] * len(given)]
            # No leaves: the model may write into them.
            given = [x.requires_grad_().clone() if flag else x for x, flag in zip(given, flags, strict=False)]
        dynamic = tuple(_symbolic(x) for x in given)
        reads = Reads(flat.model)
        with reads.watched(), repeats.watched(flat.model) if repeats else nullcontext():
            program = _exported(flat, tuple(given), dynamic)
        if opened | flat.returned.before != opened:
            return flat.returned.before
        if isinstance(program, Exception):
            plain = _plain(flat, given, mode)
            raise _explained(program, plain, flat.model) from plain or program  # The exporter's trace is a page long.
    found = _captured(program, flat, given, autocast, reads.slots(repeats.same if repeats else ()), opened)
    return replace(found, wanted=asked.relevant()) if isinstance(found, Captured) else found


def _symbolic(x: Any) -> Any:
    """Which dimensions of a tensor may have other sizes, and that a number may be another."""
    return {d: Dim.AUTO for d, n in enumerate(x.shape) if n > 1} if isinstance(x, Tensor) else Dim.AUTO


def _exported(flat: _Flat, given: tuple[Any, ...], dynamic: Any) -> ExportedProgram | Exception:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the exporter asks
            return export(flat, given, dynamic_shapes=(dynamic,), strict=False)
    except (Entangled, Error):
        raise
    except Exception as error:
        return error


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs and prints a page about what an Error says in three lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of `model` on `meta`: its code, structure and flags, none of its numbers. The model is not touched."""
    return _copy_on(model, "meta")


def _copy_on(model: nn.Module, device: str) -> nn.Module:
    try:
        memo = stand_ins(model, device)
        close_over(memo, model)
        return copy.deepcopy(model, memo)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise Error(
            f"copy.deepcopy fails on the model: {first}",
            **{"try": "delete computed tensors and open handles from its attributes before the call"},
        ) from error


def stand_ins(model: nn.Module, device: str, whole: Mapping[str, Tensor] = MappingProxyType({})) -> dict[Any, Any]:
    """What a deep copy of a model has in the place of its tensors, by `id`.

    Args:
        device: where parameters and buffers are, without values. Other tensors are constants of the graph, as they are.
        whole: first name -> what stands for a parameter or buffer of which `model` has another form.
    """
    memo: dict[Any, Any] = {}
    for name, tensor in model.named_parameters():
        like: Tensor = whole.get(name, tensor)
        memo[id(tensor)] = nn.Parameter(_empty(like, device), like.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = _empty(whole.get(name, buffer), device)
    for _, value in everything(model):
        if isinstance(value, torch.Generator):
            memo[id(value)] = value
        elif isinstance(value, Tensor):
            # An alias: while it is captured, autograd would note on the tensor itself what is written into it.
            with unset_fake_temporarily():
                memo.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))
    return memo


def close_over(memo: dict[Any, Any], model: nn.Module, aside: Sequence[Any] = ()) -> None:
    """Has functions that hold something of the model hold the same of its copy: a deep copy leaves functions alone.

    Args:
        memo: of the deep copy, with all that is not to be copied.
        aside: what lies not among the model's attributes.
    """
    own = {key_of(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, x in reached(model):
        if isinstance(x, weakref.ref) and key_of(x()) in own:
            raise Error(
                f"`{spelled(path)}` is a weak reference to the model, which a copy of it would not follow",
                **{"try": "the module itself, in a list if it is not to be a submodule: `self.parent = [parent]`"},
            )
    hooks = [hook for module in model.modules() for name in HOOKS for hook in vars(module)[name].values()]
    every = [x for _, x in reached(model)] + [x for one in (*hooks, *aside) for x in (one, *hidden(one))]
    functions = {id(x): x for x in every if isinstance(x, types.FunctionType) and x.__closure__}
    found = [function for function in functions.values() if _holds(function, own, set())]
    for function in found:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        memo[id(function)] = new
    for function in found:
        for cell, was in zip(memo[id(function)].__closure__, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # An empty one.
                cell.cell_contents = copy.deepcopy(was.cell_contents, memo)


def _holds(value: Any, own: set[int], seen: set[int]) -> bool:
    """True if something of the model is reached from a function's surroundings."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside = [*hidden(value), *([] if isinstance(value, nn.Module) else [item for _, item in children(value)])]
    return any(key_of(one) in own or _holds(one, own, seen) for one in inside)


def _empty(like: Tensor, device: str) -> Tensor:
    return torch.empty_like(like, device=device, requires_grad=False)


def _like(leaf: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=device)


def _captured(
    program: ExportedProgram,
    flat: _Flat,
    given: Sequence[Any],
    autocast: Autocast,
    reads: frozenset[Slot],
    opened: Opened,
) -> Captured | Opened:
    graph, names = unfold(inline(program.graph_module.graph)), _targets(program)
    parameters = _first_names(names.get(InputKind.PARAMETER, {}), dict(flat.named_parameters(remove_duplicate=False)))
    buffers = _first_names(names.get(InputKind.BUFFER, {}), dict(flat.named_buffers(remove_duplicate=False)))
    _merge_tied(graph, parameters)
    _merge_tied(graph, buffers)
    inputs = list(names.get(InputKind.USER_INPUT, {}))
    constants = {name: program.constants[target] for name, target in names.get(InputKind.CONSTANT_TENSOR, {}).items()}
    held = {p.untyped_storage()._cdata: name for name, p in flat.named_parameters()}
    fakes = [name for name, constant in constants.items() if isinstance(constant, FakeTensor)]
    for name in [name for name in fakes if constants[name].untyped_storage()._cdata in held]:
        storage = constants.pop(name).untyped_storage()._cdata  # A parameter in a plain list, or in a function.
        parameters[name] = held[storage].removeprefix("model.")
    _merge_tied(graph, parameters)
    _expect_values(constants)
    if slots := _written_into(graph, constants, flat.model):
        return Opened(slots)
    shapes = {
        node.name: _shape(node.meta["val"]) for node in graph.nodes if node.op == "placeholder" and node.name in inputs
    }
    own = dict(zip(inputs[len(inputs) - len(flat.opened) :], flat.opened, strict=True))
    if used := [path for name, path in own.items() if _is_read_number(graph, name)]:
        return Opened(fixed=frozenset(used))
    _drop_copies(graph, {name for name, path in own.items() if path not in flat.returned.moved})
    unread = _drop_unread(graph, own)
    known = {name: x for name, x in zip(inputs, given, strict=True) if name not in unread}
    sizes = Sizes([shapes[name] for name in known], _environment(graph), program)
    tensors = [name for name, x in known.items() if isinstance(x, Tensor)]
    places = {name: place for place, name in buffers.items()}
    inside = within_states(pytree.tree_unflatten(flat.leaves, flat.spec))
    of_tensors = [one for one, leaf in zip(inside, flat.leaves, strict=True) if isinstance(leaf, Tensor)]
    owned = frozenset(name for name, one in zip(inputs, of_tensors, strict=False) if one)
    return Captured(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=tensors,
        assigned=[places[name] for name in flat.returned.assigned],
        outputs=_rebuilding(flat.returned),
        owned=owned | frozenset(own) | {inputs[i] for i, _ in flat.returned.into},
        kept=frozenset(flat.returned.kept),
        fits=sizes.fits(),
        example=tuple(tuple(_shape(x)) for x in known.values()),
        leaves=tuple(_like(leaf, "meta") if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves),
        spec=flat.spec,
        autocast=autocast,
        reads=reads,
        opened=tuple(path for name, path in own.items() if name not in unread),
        known=opened,
        changes=tuple(_computed(change, sizes) for change in flat.returned.changes),
        stays=frozenset(flat.returned.stays),
        results=flat.returned.results,
        into=tuple(flat.returned.into),
    )


def _shape(value: Any) -> Sequence[Any]:
    """A tensor's sizes; a number as the size of one dimension."""
    return tuple(value.shape) if isinstance(value, Tensor) else (value,)


def _computed(change: Change | Write, sizes: Sizes) -> Change | Write:
    """A change whose sizes are functions of the shapes of a call."""
    if isinstance(change, Write):
        return change

    def computed(leaf: Any) -> Any:
        return Size(sizes.value(leaf.expression)) if isinstance(leaf, Size) else leaf

    return Change(
        change.path, {k: v if v is GONE else ([*map(computed, v[0])], v[1]) for k, v in change.values.items()}
    )


def _places_of(model: nn.Module, tensors: Sequence[Tensor]) -> frozenset[Slot]:
    """The attributes that hold some tensors."""
    ids = {id(x) for x in tensors}
    return frozenset(slot_of(path) for path, x in everything(model) if id(x) in ids and isinstance(x, Tensor))


def _written_into(graph: fx.Graph, constants: Mapping[str, Tensor], model: nn.Module) -> frozenset[Slot]:
    """The attributes whose tensors are written into or want a gradient, which have to be inputs."""
    slots = {id(value): slot_of(path) for path, value in everything(model) if isinstance(value, Tensor)}
    found = {slots[id(x)] for x in constants.values() if x.requires_grad and id(x) in slots}
    for node in filter(writes, graph.nodes):
        root: Any = node
        while isinstance(root, fx.Node) and root.op == "call_function" and root.args:
            root = root.args[0]
        if isinstance(root, fx.Node) and id(constants.get(root.name)) in slots:
            found.add(slots[id(constants[root.name])])
    return frozenset(found)


def _drop_copies(graph: fx.Graph, names: Collection[str]) -> None:
    """Has what reads the copy of one of these tensors, which nobody writes into, read the tensor."""
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in names]:
        copied = next(iter(node.users))  # Ours: the first.
        copied.replace_all_uses_with(node)
        graph.erase_node(copied)


def _drop_unread(graph: fx.Graph, names: Collection[str]) -> set[str]:
    """Those of these tensors that nothing is computed from, which are inputs no more."""
    found = [n for n in graph.nodes if n.op == "placeholder" and n.name in names and not n.users]
    for node in [node for node in found if isinstance(node.meta["val"], Tensor)]:
        graph.erase_node(node)
    return {node.name for node in found if isinstance(node.meta["val"], Tensor)}


def _is_read_number(graph: fx.Graph, name: str) -> bool:
    """True for a number that operators are given; its placeholder goes where only other numbers are computed of it."""
    node = next((n for n in graph.nodes if n.op == "placeholder" and n.name == name), None)
    if node is None or isinstance(node.meta.get("val"), Tensor):
        return False
    queue, order = [node], []
    while queue:
        one = queue.pop()
        if isinstance(one.meta.get("val"), Tensor) or one.op == "output":
            return True
        order.append(one)
        queue += one.users
    for one in sorted(set(order), key=list(graph.nodes).index, reverse=True):
        graph.erase_node(one)
    return False


def _expect_values(constants: dict[str, torch.Tensor]) -> None:
    for name, constant in constants.items():
        if constant.is_meta or isinstance(constant, FakeTensor):
            raise Error(
                f"a tensor of the model, no parameter and no buffer, has no values: {name} {list(constant.shape)}",
                **{"try": "make it in forward, or register it as a buffer with an initialiser"},
            )


def _targets(program: ExportedProgram) -> dict[InputKind, dict[str, str]]:
    """Placeholder name -> what it is in the model, by kind."""
    found: dict[InputKind, dict[str, str]] = {}
    for spec in program.graph_signature.input_specs:
        found.setdefault(spec.kind, {})[spec.arg.name] = spec.target or spec.arg.name
    return found


def _first_names(targets: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Placeholder name -> the first of the names that its tensor has in the model."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {place: first[id(tensors[target])].removeprefix("model.") for place, target in targets.items()}


def _merge_tied(graph: fx.Graph, names: dict[str, str]) -> None:
    """One placeholder for each tensor: the exporter gives a tied one a placeholder for each of its names."""
    kept: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in names]:
        first = kept.setdefault(names[node.name], node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            del names[node.name]


def _rebuilding(returned: _Returned) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """The function that puts outputs of the graph back into the structure the model returns, and into its states."""
    leaves, spec = returned.leaves, returned.spec

    def rebuild(found: Sequence[Any], mine: Sequence[Any]) -> Any:
        return settled([found[leaf.at] if isinstance(leaf, Place) else leaf for leaf in leaves], spec, mine)

    return rebuild


def _environment(graph: fx.Graph) -> Any:
    """Where the exporter keeps what it assumed of sizes."""
    values = (node.meta.get("val") for node in graph.nodes)
    modes = (getattr(value, "fake_mode", None) for value in values)
    return next((mode.shape_env for mode in modes if mode is not None), None)


def _plain(flat: _Flat, given: Sequence[Any], mode: FakeTensorMode) -> Exception | None:
    """What the model raises on inputs of exactly these sizes, if anything: there no symbols stand for sizes."""
    try:
        with mode:
            flat(*given)
    except Exception as error:
        return error
    return None


def _explained(error: Exception, plain: Exception | None, model: nn.Module) -> Error:
    """The exporter's complaint, with the user's line and what to change."""
    if reads_values(error):
        return refused(error, model)
    shown = plain or error
    if "fake impl" in str(shown) or "UnsupportedOperator" in type(shown).__name__:
        return Error(
            "the model calls an operator that does not say what shape it returns",
            at=user_line(traceback.extract_tb(shown.__traceback__)),
            **{"try": "torch.library.register_fake, on the operator"},
        )
    if "HigherOrderOp" in type(shown).__name__:
        return Error(
            "the model calls an operator of torch's that takes functions (cond, while_loop, scan), which is no graph's",
            at=user_line(traceback.extract_tb(shown.__traceback__)),
            **{"try": "torch.where of what both branches compute, or a loop of Python as long as shapes say"},
        )
    kind, text = type(shown).__name__, str(shown).strip()
    at = user_line(traceback.extract_tb(shown.__traceback__))
    return Error(
        f"the model does not run on these inputs: {kind}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        **({"at": at} if at != "?" else {}),
        **{"try": "arguments that the original model accepts; example_inputs={...}, if you gave none"},
    )
