"""A model as a function of tensors alone, which torch.export can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.passes.capture.captured import NOTHING_OPENED, InputSize, Opened, OutputAt, Outputs
from autotp.passes.capture.guards.gradient_queries import GradientQueries
from autotp.passes.capture.guards.random_numbers import DrewNumber, line_that_draws
from autotp.passes.capture.guards.values import Reading, ValueRead
from autotp.passes.capture.patches import around_forward
from autotp.passes.capture.python_state.attribute_writes import (
    AnyChange,
    Before,
    Change,
    Write,
    flatten_new_value,
    is_new,
)
from autotp.passes.capture.python_state.code_names import NamedBefore
from autotp.passes.capture.python_state.contents import Contents
from autotp.passes.capture.python_state.walk import (
    GONE,
    Path,
    Slot,
    entries,
    everything,
    found_at,
    put_at,
    slot_of,
    spelled,
    walk,
)
from autotp.passes.capture.pytree import outcome, states, within_states
from autotp.passes.capture.repeats.comparison import position
from autotp.passes.capture.replacements.number_arguments import as_number
from autotp.passes.capture.replacements.opaque import OpaqueCalls

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Returned:
    """The facts of the captured run.

    Attributes:
        spec: structure of the result, and of the states.
        outputs, changes, asked: as in `Captured`; `outputs.assigned` has names of buffers, not of placeholders.
        before: attributes that the call writes and that must be inputs.
        moved: paths of the attributes' tensors that the call wrote into.
    """

    spec: Any
    outputs: Outputs
    changes: Sequence[AnyChange] = ()
    asked: Sequence[ValueRead] = ()
    before: Opened = NOTHING_OPENED
    moved: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class _ModelRun:
    """The results and side effects of one run of the model.

    Attributes:
        found: leaves of the result, and of the states after the run.
        inside: for each leaf whether it belongs to a state.
        written: new values of attributes: container -> key -> leaves and structure.
        moved: tensors of attributes that the run wrote into.
        into: tensors among the arguments that the run wrote into, by their place among the tensors.
        assigned: buffers that the run replaced.
    """

    found: Sequence[Any]
    inside: Sequence[bool]
    written: Sequence[tuple[Path, dict[Any, Any]]]
    moved: Mapping[Path, Tensor]
    into: Mapping[int, Tensor]
    assigned: Mapping[str, Tensor]

    def set_to(self) -> list[tuple[Slot, Any]]:
        """Returns the tensors that attributes are set to, and the numbers among them that come from tensors."""
        values = [
            (slot_of((*container, k)), v[0])
            for container, new_values in self.written
            for k, v in new_values.items()
            if v is not GONE
        ]
        pairs = [(slot, x) for slot, leaves in values for x in leaves if isinstance(x, Tensor) or _is_of_a_tensor(x)]
        return pairs + [(slot_of(path), x) for path, x in self.moved.items()]


class Flat(nn.Module):
    """The model as a function of tensor inputs; arguments that are not tensors are fixed.

    Args:
        leaves, spec: the flattened arguments and their structure.
        opened: paths of the attributes' values that are inputs; they follow the arguments' tensors.
        queries: notes the model's questions about gradients.
        reading: gives the values that Python reads of tensors.
        exactly, looks: as for `ModelLibrary.during_capture`.

    Attributes:
        originals: `id` of a tensor that the model holds outside of its buffers -> the user's tensor, which it copies.
        opaque_calls: the calls of opaque code that the capture records.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Any,
        leaves: Sequence[Any],
        opened: Sequence[Path],
        queries: GradientQueries,
        reading: Reading,
        exactly: bool,
        looks: bool,
    ) -> None:
        super().__init__()
        self.model, self.spec, self.leaves, self.opened = model, spec, leaves, opened
        self.asked, self.reading, self.exactly, self.looks = queries, reading, exactly, looks
        self.originals: dict[int, Tensor] = {}
        self.opaque_calls = OpaqueCalls()
        self.returned = Returned()  # The exporter undoes assignments to the module itself, but not to this object.

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        try:
            return self._computed(*tensors)
        except DrewNumber as error:
            # Only for the message: finding the line takes a further run.
            line = line_that_draws(self.model, lambda: self._computed(*tensors))
            raise error.at_line(line) from None

    def _computed(self, *tensors: Any) -> tuple[Any, ...]:
        queue = iter(tensors)
        leaves = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(list(map(as_number, self.leaves, leaves)), self.spec)
        # Copies: the exporter may run forward twice, and the second run must find the same values.
        given_at = {path: x.clone() if isinstance(x := next(queue), Tensor) else x for path in self.opened}
        self.asked.inputs = [x for x in leaves if isinstance(x, Tensor)]
        modules = dict(self.model.named_modules())
        current_values = [found_at(modules, path) for path in given_at]
        _expect_one_name(modules, dict(zip(given_at, current_values, strict=True)))
        self.reading.begin([*leaves, *given_at.values()], [*self.leaves, *current_values])
        opened = {path: Contents(x) for path, x in given_at.items() if isinstance(x, Tensor)}
        arguments = {i: Contents(x) for i, x in _of_the_caller(leaves, args, kwargs).items()}
        with self._holding(given_at):
            leaves_after, inside, written, assigned = self._run(args, kwargs)
        self.returned.before |= Opened(_places_of(self.model, self.asked.written))
        moved = _written_into(opened)
        self.returned.moved = frozenset(moved)
        return self._flattened(_ModelRun(leaves_after, inside, written, moved, _written_into(arguments), assigned))

    @contextmanager
    def _holding(self, values: Mapping[Path, Any]) -> Iterator[None]:
        """A region in which the attributes at these paths hold these values."""
        modules = dict(self.model.named_modules())
        previous = {path: found_at(modules, path) for path in values}
        for path, value in values.items():
            put_at(modules, path, value)
        try:
            yield
        finally:
            for path, value in previous.items():
                put_at(modules, path, value)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the model, restores its attributes, and returns its result and what it set."""
        modules = dict(self.model.named_modules())
        before, buffers = Before(self.model), dict(self.model.named_buffers(remove_duplicate=False))
        of_names = NamedBefore(self.model)
        try:
            with self.reading, around_forward(self.model, self.asked, self.exactly, self.looks):
                changed = states((args, kwargs))
                result = self.model(*args, **kwargs)
                leaves, self.returned.spec = outcome(result, changed)
            self.reading.end()
            written = [
                (path, {k: _opened(path, k, v, before) for k, v in new_values.items()})
                for path, new_values in before.changes()
            ]
            self.returned.changes = before.hooks_added()
            assigned = _assigned(buffers, self.model)
            self.returned.changes = [*self.returned.changes, *of_names.changes()]
        finally:
            before.restore()
            of_names.restore()
        # Behind `restore`, so that the attributes hold again what they held before the call.
        self.returned.before |= _held_before(modules, written)
        return leaves, [*within_states(result, changed), *within_states(changed)], written, assigned

    def _flattened(self, ran: _ModelRun) -> tuple[Any, ...]:
        """Returns the graph's outputs: tensors and sizes of the result, then new values of attributes, then buffers."""
        sizes = [leaf for leaf in ran.found if isinstance(leaf, NUMBERS)]
        computed: list[Any] = [leaf for leaf in ran.found if isinstance(leaf, Tensor)] + sizes
        returned, set_to = self.returned, ran.set_to()
        results = len(computed)
        for x in (*(x for _, x in set_to), *ran.into.values()):
            # A tensor that is returned and assigned is one output, so it is one tensor after a call, too.
            computed += [x] * (position(x, computed) is None)
        places = {id(leaf): OutputAt(i) for i, leaf in enumerate(computed)}
        of_states = [id(leaf) for leaf, inside in zip(ran.found, ran.inside, strict=True) if inside]
        kept_in = set(map(slot_of, self.opened))
        returned.outputs = Outputs(
            leaves=[places.get(id(leaf), leaf) for leaf in ran.found],
            spec=returned.spec,
            results=results,
            kept=frozenset(places[key].at for key in of_states if key in places),
            stays=frozenset(places[id(x)].at for slot, x in set_to if slot in kept_in),
            into=tuple((i, places[id(x)].at) for i, x in ran.into.items()),
            assigned=tuple(ran.assigned),
        )
        writes = [Write(path, places[id(x)].at) for path, x in ran.moved.items()]
        changes = [_placed(path, new_values, places) for path, new_values in ran.written]
        returned.changes = [*writes, *changes, *returned.changes]
        returned.asked, read = self._reads(len(computed))
        return (*computed, *read, *ran.assigned.values())

    def _reads(self, first: int) -> tuple[list[ValueRead], list[Tensor]]:
        """Returns what Python read of tensors, and these tensors, which are the outputs from position `first` on."""
        reads, tensors = list[ValueRead](), list[Tensor]()

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensors.append(leaf)
            return OutputAt(first + len(tensors) - 1)

        for i, (read, noted) in enumerate(zip(self.reading.outcomes, self.reading.noted, strict=True)):
            func, leaves, spec = noted
            operands = tuple(map(placed, leaves))
            reads.append(ValueRead(read, func, operands, spec, look=i in self.reading.looks))
        return reads, tensors


def _is_of_a_tensor(x: Any) -> bool:
    """True for a number that `.item()` gave."""
    return isinstance(x, NUMBERS) and bool(free_unbacked_symbols(x))


def _written_into(tensors: Mapping[Any, Contents]) -> dict[Any, Tensor]:
    """Returns the tensors that were written into since their contents were noted."""
    # torch counts the writes into a tensor, and those into its views.
    return {key: contents.value for key, contents in tensors.items() if not contents.is_same()}


def _of_the_caller(leaves: Sequence[Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
    """Returns the tensors among the arguments, without those of states, by their place among all tensors."""
    inside = within_states((args, kwargs))
    tensors = [(x, in_state) for x, in_state in zip(leaves, inside, strict=True) if isinstance(x, Tensor)]
    return {i: x for i, (x, of_state) in enumerate(tensors) if not of_state}


def _opened(path: Path, key: Any, value: Any, before: Before) -> Any:
    """Returns the new value of an attribute as leaves and structure."""
    try:
        return GONE if value is GONE else flatten_new_value(value, before.places)
    except Error as error:
        raise Error(
            f"forward sets `{spelled(path, key)}`, and a later call could not: {error.problem}", **error.facts
        ) from error


def _placed(path: Path, new_values: Mapping[Any, Any], places: Mapping[int, OutputAt]) -> Change:
    """Returns a change whose leaves are positions of outputs, expressions of sizes, or plain values."""

    def placed(leaf: Any) -> Any:
        # What `.item()` gave is an output of the graph. Any other number follows from the shapes of a call.
        if isinstance(leaf, NUMBERS) and not _is_of_a_tensor(leaf):
            return InputSize(leaf.node.expr, leaf.node.pytype)
        return places.get(id(leaf), leaf) if isinstance(leaf, (Tensor, *NUMBERS)) else leaf

    return Change(path, {k: v if v is GONE else ([placed(x) for x in v[0]], v[1]) for k, v in new_values.items()})


def _held_before(modules: Mapping[str, nn.Module], written: Sequence[tuple[Path, dict[Any, Any]]]) -> Opened:
    """Returns the attributes set by a call that held tensors before it, and the paths that held whole numbers."""
    slots, numbers = set[Slot](), set[Path]()
    for path, new_values in written:
        for key in new_values:
            try:
                was = found_at(modules, (*path, key))
            # The call has made this attribute.
            except LookupError:
                continue
            if type(was) in (int, torch.SymInt):
                numbers.add((*path, key))
            elif any(isinstance(x, Tensor) for _, x in walk([(path, was)])):
                slots.add(slot_of((*path, key)))
    return Opened(frozenset(slots), frozenset(numbers))


def _assigned(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that forward replaced (`self.mean = ...`), which the exporter does not see.

    A buffer of another shape or dtype counts as a changed attribute (`attribute_writes.py`).

    Raises:
        Error: names would be those of other tensors than on one device.
    """
    after = dict(model.named_buffers(remove_duplicate=False))
    replaced = {name: after[name] for name, was in before.items() if after.get(name, was) is not was}
    names = _names_of(before)
    if replaced:
        _expect_tensors_of_their_own(before, replaced, names, model)
    # A buffer with several names is written to once.
    first = {name: now for name, now in replaced.items() if name == names[id(before[name])][0]}
    old = {id(x) for x in before.values()}  # A call writes into one after the other, so a buffer gives a copy.
    separate = {name: now.clone() if id(now) in old else now for name, now in first.items()}
    return {name: now for name, now in separate.items() if not is_new(now, before[name])}


def _expect_one_name(modules: Mapping[str, nn.Module], values: Mapping[Path, Any]) -> None:
    """Raises Error if attributes have a tensor that changes from call to call under another name, too.

    It is an input of the graph under one name only, so code that reads the other would find what it was at capture.

    Args:
        values: path -> the value of an attribute that is an input.
    """
    names: dict[int, list[str]] = {}
    for name, module in modules.items() if values else ():
        located = [((name, key), x) for table in (module._buffers, module._parameters) for key, x in table.items()]
        for key, item in entries(module):
            located += walk([((name, key), item)])
        for path, x in located:
            if isinstance(x, Tensor):
                names.setdefault(id(x), []).append(spelled(path))
    for path, x in values.items():
        if other_name := next((name for name in names.get(id(x), ()) if name != spelled(path)), None):
            raise Error(
                f"`{spelled(path)}` changes from call to call, and is one tensor with `{other_name}`",
                fix="a tensor of its own for each name: tensor.clone()",
            )


def _names_of(tensors: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """Returns the names of each tensor, by its id."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _expect_tensors_of_their_own(
    before: Mapping[str, Tensor], assigned: Mapping[str, Tensor], names: Mapping[int, Sequence[str]], model: nn.Module
) -> None:
    """Raises Error where names would be those of other tensors than on one device: a call writes into a buffer's own.

    Args:
        before: the buffers by all their names, before the call.
        assigned: those that forward assigned.
        names: the names of each tensor before the call, by its id.
    """
    after = {**before, **assigned}
    for name, now in assigned.items():
        if divided := [x for x in names[id(before[name])] if after[x] is not now]:
            raise Error(
                f"forward assigns to the buffer `{name}`, which is one tensor with {_listed(divided)}: "
                "later calls would find two",
                fix="buffer.copy_(value) under torch.no_grad(), or a buffer of its own for each name",
            )
        if joined := [x for x, tensor in after.items() if tensor is now and before[x] is not before[name]]:
            raise Error(
                f"forward makes one tensor of the buffers `{name}` and {_listed(joined)}: later calls would find two",
                fix="buffer.copy_(value) under torch.no_grad(), or value.clone() for the second one",
            )
    olds = {id(before[name]): name for name in assigned}
    for path, x in everything(model):
        if id(x) in olds:
            raise Error(
                f"forward assigns to the buffer `{olds[id(x)]}`, and keeps its former tensor as `{spelled(path)}`: "
                "the call would change both",
                fix="the former one's copy: buffer.clone()",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _places_of(model: nn.Module, tensors: Sequence[Tensor]) -> frozenset[Slot]:
    """Returns the attributes that hold some of these tensors."""
    # Parameters and buffers have placeholders of their own.
    ids = {id(x) for x in tensors} - {id(x) for x in (*model.parameters(), *model.buffers())}
    return frozenset(slot_of(path) for path, x in everything(model) if id(x) in ids and isinstance(x, Tensor))
