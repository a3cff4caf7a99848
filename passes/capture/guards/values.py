"""values: what Python reads of tensors in forward becomes a guard of the graph.

Before: if x.isnan().any(): ...; n = lengths.max().item(); for i in range(n): ...
After:  a graph for the outcomes [False, 4], which are compared with those of each later call

NOTE [What Python reads of tensors]
An exporter's tensors have no values. So `capture` runs the model once with the values of the call's arguments beside
(`input_values.py`) and lists, in order, what Python reads (`.item()`, `.tolist()`, `bool()`): the outcomes. Then the
exporter runs the model, each read gives the listed outcome, and the tensors that are read become further outputs.
- What follows from the arguments alone is known before a call: the graph is used for calls with the same outcomes.
- Of an activation, a truth value is assumed. The graph computes it, and the call compares it afterwards. Where it comes
  out otherwise, the results are dropped, and the call runs again by the graph for the other outcome. Such a graph
  writes into nothing that its caller holds.
- A number of an activation would be another one in each call: it is refused. Where it only decides
  (`if steps.item() > 3`), the graph computes the truth value from the tensor (`_predicate`), and this is read.
A number that is used in tensors only needs no outcome: the exporter has a symbol for it. So only places are listed
at which the exporter could not go on without the value.
"""

from __future__ import annotations

import copy
import linecache
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    SymT,
    free_unbacked_symbols,
    symbol_is_type,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.model_library import BeginAgain
from autotp.passes.capture.guards.looks import is_looking
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.source_location import calling_frame, is_library_file, is_users
from autotp.torch_internals import NO_COMPLEX, NO_NUMPY

PREDICATES = (
    Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose,
    Tensor.__contains__,
)  # fmt: skip
"""Functions that give a truth value of tensors' values."""
AS_NUMPY = (Tensor.numpy, Tensor.__array__)
NUMBERS = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__)
REPEATS = (Tensor.repeat_interleave, torch.repeat_interleave)
SIZED = frozenset({
    Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, Tensor.where, torch.where, Tensor.__getitem__,
    *REPEATS,
})  # fmt: skip
"""Functions whose result may have as many rows as some elements are not 0, or as a sum says."""
FACTORIES = ("arange", "linspace", "zeros", "ones", "empty", "full", "eye", "rand", "randn", "randint")
READS = frozenset({*PREDICATES, *AS_NUMPY, *NUMBERS})
"""Functions that give Python values of tensors' values."""


TRUTH = "bool of numbers"
"""The function of a place where numbers that were read decide."""


def reads_values(error: Exception) -> bool:
    """True for the exporter's exception that says that a value is not known."""
    named = "DataDependent" in type(error).__name__ or "data-dependent" in str(error)
    return named or NO_NUMPY in str(error) or NO_COMPLEX in str(error) or isinstance(error, NeedsNumber)


class Place(NamedTuple):
    """A place at which Python reads values: a line, and the function that reads."""

    file: str
    line: int
    function: str


class NeedsNumber(BeginAgain):
    """The model makes a Python number of an activation at this place, or a loop ends when an activation says so."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


class Outcome(NamedTuple):
    """What a read gave.

    Attributes:
        place: where it is.
        value: the value.
        assumed: whether the arguments' values do not say it, as far as is known before the call.
    """

    place: Place
    value: Any
    assumed: bool = False

    def is_same(self, outcome: Outcome) -> bool:
        """True if both are the same value of one place."""
        return self.place == outcome.place and freeze_argument(self.value) == freeze_argument(outcome.value)


@dataclass(frozen=True)
class KnownValues:
    """What is known of the values that Python reads in a call.

    Attributes:
        places: the places at which values are needed.
        outcomes: what the reads give, in order: the first ones, as far as earlier runs of the call found them; or all.
        likely: what looks at masks give of which nothing else is known.
        guesses: what the reads gave in a run that assumed another outcome. Those behind it may not depend on it.
    """

    places: frozenset[Place] = frozenset()
    outcomes: tuple[Outcome, ...] = ()
    guesses: tuple[Outcome, ...] = ()
    likely: bool = True


NO_VALUES = KnownValues()


@dataclass(frozen=True)
class ValueRead:
    """A read of a graph.

    Attributes:
        outcome: the value that the graph is right for.
        function: gives the value.
        given: its flattened arguments; `OutputAt` for tensors, which are outputs of a graph.
        spec: their structure.
        of_inputs: whether the value follows from the inputs alone.
        look: whether it is a look at a mask: NOTE [Looks at masks]
    """

    outcome: Outcome
    function: Callable[..., Any]
    given: tuple[Any, ...]
    spec: Any
    of_inputs: bool = False
    look: bool = False

    def made(self, tensors: Callable[[Any], Any]) -> Outcome:
        """Returns the outcome for other tensors: `tensors` returns the one for each of `given`."""
        args, kwargs = pytree.tree_unflatten(list(map(tensors, self.given)), self.spec)
        return Outcome(self.outcome.place, self.function(*args, **kwargs))


def first_other(
    reads: Sequence[ValueRead], is_due: Callable[[int, ValueRead], bool], made: Callable[[ValueRead], Outcome]
) -> tuple[Outcome, ...] | None:
    """Returns the outcomes of a call's reads up to the first that is not the assumed one; None if there is none.

    After another outcome Python may go on to other reads, so no later one is told.

    Args:
        is_due: (its number, the read) -> whether it is compared.
        made: returns the outcome of a read in this call.
    """
    for i, read in enumerate(reads):
        if is_due(i, read) and not (outcome := made(read)).is_same(read.outcome):
            return (*(earlier.outcome for earlier in reads[:i]), outcome)
    return None


class _OfTensors(TensorReferenceAnalysis):
    """Operators of numbers, as those of tensors."""

    mod = python_mod = staticmethod(torch.remainder)  # type: ignore[assignment]


class Reading(TorchFunctionMode):
    """A mode in which reads at listed places give Python values, and all others run as they are.

    Attributes:
        places: the listed places.
        outcomes: what the reads have given so far.
        noted: function and flattened arguments of each read, and their structure.
        looks: the numbers of the reads that are looks at masks.
        symbols: the exporter's symbol of a number, or of a size that depends on it -> the places that read the number.
        numbers: the exporter's symbol of a number -> a tensor with it.
        sized: the exporter's symbol of a number of elements that are not 0 -> the place that counts them.
        failed_at: the last call that failed since a value is not known.
    """

    def __init__(self, places: frozenset[Place]) -> None:
        super().__init__()
        self.places = set(places)
        self.outcomes: list[Outcome] = []
        self.noted: list[tuple[Any, list[Any], Any]] = []
        self.looks: set[int] = set()
        self.symbols: dict[str, frozenset[Place]] = {}
        self.sized: dict[str, Place] = {}
        self.numbers: dict[str, Tensor] = {}
        self.failed_at: Place | None = None

    def __enter__(self) -> Reading:
        self._patches = ExitStack()
        instead: list[tuple[internals.Replaced, Any]] = [
            (row, self._computed(row.original())) for row in internals.COMPUTES_FLOATS
        ]
        instead += [(row, self._decided(row.resolved_owner())) for row in internals.TRUTH_OF_NUMBERS]
        instead += [(row, self._of_numpy) for row in internals.NUMBERS_IN_NUMPY]
        for row, replacement in instead:
            self._patches.enter_context(row.replaced_by(replacement))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.close()

    def _computed(self, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Returns what an operator of numbers with a point does: what algebra knows without their values, needs them.

        There are no round-off, infinity and NaN in algebra: `m != m` is False there, and `m - m` is 0.
        """

        def computed(number: Any, operand: Any) -> Any:
            result = compute(number, operand)
            if result is not NotImplemented and _symbols_in((number, operand)) - _symbols_in(result):
                self._expect_no_reads((number, operand))  # Algebra has cancelled a number, such as a in (a + b) - a.
            return result

        return computed

    def _decided(self, cls: Any) -> Callable[[Any], bool]:
        """Returns what decides on a truth value of numbers: it is read as one of tensors, or needs the numbers.

        `if self.steps.item() > 3` of a buffer is `if self.steps > 3`. Algebra alone decides on nothing with a point.
        """
        decide = cls.__bool__

        def decided(number: Any) -> bool:
            symbols = free_unbacked_symbols(number)
            truth = number if cls is torch.SymBool or not symbols else number != 0
            if symbols and is_users(calling_frame()):
                place = place_of_call(None)._replace(function=TRUTH)
                predicate = self._predicate(truth) if self._is_truth(place, symbols) else None
                if predicate is not None:
                    self.places.add(place)
                    return bool(self._read(Tensor.__bool__, (predicate,), {}, place))
            if any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in symbols):
                self._expect_no_reads(number)
            return decide(number)

        return decided

    def _is_truth(self, place: Place, symbols: Iterable[Any]) -> bool:
        """True if a truth value of these numbers is to be read as one of tensors."""
        return place in self.places

    def _predicate(self, truth: Any) -> Tensor | None:
        """Returns a tensor with a truth value of numbers that were read; None if it is one of other numbers, too."""
        if not isinstance(truth, torch.SymBool):
            return None
        expression = truth.node.expr
        if not all(str(symbol) in self.numbers for symbol in expression.free_symbols):
            return None
        tensors = {symbol: self.numbers[str(symbol)] for symbol in expression.free_symbols}
        try:
            predicate: Tensor = sympy_interp(_OfTensors, tensors, expression)
        except (AttributeError, NotImplementedError, TypeError):  # torch has no operator of tensors for it.
            return None
        return predicate

    def _of_numpy(self, number: Any, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        """Does what a function of numpy does: a root or a logarithm needs the number's value, that of a size, too."""
        symbols = {torch.SymInt: int, torch.SymFloat: float}
        objects = [np.array(x, dtype=object) if type(x) in symbols else x for x in operands]
        try:
            return getattr(function, method)(*objects, **options)  # By the operators of the symbols.
        except TypeError:
            self._expect_no_reads(operands)
            numbers = [symbols[type(x)](x) if type(x) in symbols else x for x in operands]
            return getattr(function, method)(*numbers, **options)

    def _expect_no_reads(self, value: Any) -> None:
        """Raises NeedsNumber for a value with symbols of numbers that were read."""
        places = {place for symbol in _symbols_in(value) for place in self.symbols.get(symbol, ())} - self.places
        if places:
            raise NeedsNumber(min(places))

    def begin(self, leaves: Sequence[Any], real: Sequence[Any]) -> None:
        """Starts a run of the model with these arguments; `real` are the call's."""
        self.outcomes, self.noted, self.looks = [], [], set()

    def end(self) -> None:
        """Ends a run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__format__ and args[1] and not args[0].dim():  # f"{x:.2f}" is the text of a number.
            number = _number_of(args[0])
            return format(self.__torch_function__(number, types, (args[0],)), args[1])
        if func is Tensor.item and args[0].numel() != 1:  # As torch says it, which would leave a node in the graph.
            raise RuntimeError(f"a Tensor with {args[0].numel()} elements cannot be converted to Scalar")
        if func is Tensor.item and args[0].dtype == torch.bool:
            func = Tensor.__bool__  # Of an activation, a truth value may be assumed, and a number may not.
        try:
            result = self._run(func, args, kwargs)
        except Exception as error:
            if reads_values(error):
                self.failed_at = place_of_call(func)
            raise
        self._note(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is Tensor.__bool__ and is_looking():
            self.looks.add(len(self.outcomes))
            return self._read(func, args, kwargs, place_of_call(func))
        return self._given(func, args, kwargs) if self.places else self._plain(func, *args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        # This is asked of each function that the model calls, and few of them can have new symbols.
        inner = (x for arg in (*args, *kwargs.values()) for x in (arg if type(arg) in (tuple, list) else (arg,)))
        if func in READS or func in SIZED or self.symbols or any(map(_is_scalar, inner)):
            self._note_symbols(func, args, kwargs, result)

    def _note_symbols(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes which reads the symbols in a result come from: the function itself, or those of its arguments."""
        new_symbols = _symbols_in(result) - self.symbols.keys() - self.sized.keys()
        if not new_symbols:
            return
        argument_symbols = _symbols_in([x for x in _with_bounds((args, kwargs)) if not isinstance(x, Tensor)])
        places = {place for symbol in argument_symbols for place in self.symbols.get(symbol, ())}
        if func in NUMBERS and len(new_symbols) == 1:  # A copy: it may be written into before the number decides.
            # Python's numbers are wide: in int8, `100 * n.item() > 500` would overflow.
            wide = torch.float64 if args[0].is_floating_point() else torch.int64
            self.numbers[next(iter(new_symbols))] = args[0].detach().clone().reshape(()).to(wide)
        if func in READS or any(map(_is_scalar, _with_bounds((args, kwargs)))):
            places.add(place_of_call(func))
        for symbol in new_symbols if places else ():
            self.symbols[symbol] = frozenset(places)
        for symbol in new_symbols if func in SIZED else ():
            self.sized[symbol] = place_of_call(func)
        sizes = (symbol for x in _tensors(result) for symbol in free_unbacked_symbols(x))
        if places and any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in sizes):
            raise NeedsNumber(place_of_call(func))  # No graph computes a size of numbers with a point.

    def symbolic(self) -> frozenset[Place]:
        """Returns the places at which the model read what the exporter has symbols for."""
        read_places = {place for places in self.symbols.values() for place in places}
        return frozenset(read_places.union(self.sized.values())) - self.places

    def places_of(self, error: Exception) -> frozenset[Place]:
        """Returns the places whose values the model needed when it raised this exception."""
        symbols = map(str, error.cond.free_symbols) if isinstance(error, GuardOnDataDependentSymNode) else ()
        places = {error.place} if isinstance(error, NeedsNumber) else set[Place]()
        for symbol in symbols:
            places |= self.symbols.get(symbol, frozenset())
            places |= {self.sized[symbol]} if symbol in self.sized else set()
        if not places and self.failed_at is not None:
            # The exception names no symbol, so it came from the last function that failed for want of a value.
            places = {self.failed_at}
        return frozenset(places) - self.places

    def taken(self, graph: fx.Graph) -> frozenset[Place]:
        """Returns the places of the numbers that the exporter took for known, such as that of another size."""
        values = (node.meta.get("val") for node in graph.nodes)
        environment = next((x.node.shape_env for x in values if isinstance(x, torch.SymInt)), None)
        replacements = environment.replacements.items() if environment is not None else ()
        return self._read_at(str(symbol) for symbol, value in replacements if value.is_number)

    def in_sizes(self, graph: fx.Graph) -> frozenset[Place]:
        """Returns the places of the numbers that sizes in a graph are made of."""
        return self._read_at(_symbols_in(_tensors([node.meta.get("val") for node in graph.nodes])))

    def _read_at(self, symbols: Iterable[str]) -> frozenset[Place]:
        return frozenset(place for symbol in symbols for place in self.symbols.get(symbol, ())) - self.places

    def _given(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what a function gives: for a read at a listed place the outcome."""
        place = place_of_call(func)
        if place not in self.places:
            return self._plain(func, *args, **kwargs)
        if func in READS:
            return self._read(func, args, kwargs, place)
        args, kwargs = self._with_numbers(args, kwargs, place)
        # `where(condition, x, y)` has the size of its operands; with a condition alone it lists indices.
        if func in SIZED and not (func in (torch.where, Tensor.where) and len(args) > 1):
            return self._counted(func, args, kwargs, place)
        return self._plain(func, *args, **kwargs)

    def _counted(self, func: Any, args: Any, kwargs: dict[str, Any], place: Place) -> Any:
        """Returns what a function gives whose result has as many rows as elements are not 0, with a known number."""
        if func in REPEATS and len(args) > 1 and isinstance(args[1], Tensor):
            total = self._read(Tensor.item, (self._plain(Tensor.sum, args[1]),), {}, place)
            # With `output_size` the operator does not ask for the sum of the repeats itself.
            return self._plain(func, *args, **{**kwargs, "output_size": total})
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index_parts = [self._indices(x, place) if _is_mask(x) else (x,) for x in index]
            return self._plain(Tensor.__getitem__, args[0], tuple(x for part in index_parts for x in part))
        indices = self._indices(args[0], place)
        as_tuple = kwargs.get("as_tuple", False) or func in (torch.where, Tensor.where)
        return indices if as_tuple else self._plain(torch.stack, indices, 1)

    def _indices(self, mask: Tensor, place: Place) -> tuple[Tensor, ...]:
        """Returns the indices of the elements that are not 0, for each dimension."""
        count = self._read(Tensor.item, (self._plain(Tensor.count_nonzero, mask),), {}, place)
        rows = self._plain(torch.nonzero_static, mask, size=count)
        return tuple(self._plain(Tensor.unbind, rows, 1))

    def _plain(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of torch as the model would."""
        return func(*args, **kwargs)

    def _with_numbers(self, args: Any, kwargs: Any, place: Place) -> Any:
        """Replaces the tensors that stand for sizes and bounds, `x[:n]` and `x.view(n, -1)`, by their values."""

        makes = place.function in FACTORIES

        def number(x: Any) -> Any:
            if not _is_scalar(x) or not (makes or _is_whole(x)):
                return x
            return self._read(Tensor.item, (x,), {}, place)

        def inside(x: Any) -> Any:
            if isinstance(x, slice):
                return slice(*map(number, (x.start, x.stop, x.step)))
            return type(x)(map(deep, x)) if type(x) in (tuple, list) else x

        def deep(x: Any) -> Any:
            return number(inside(x))

        start = 0 if makes else 1  # The tensor that the function is about.
        indexes = place.function in ("__getitem__", "__setitem__")  # There a tensor is an index itself.
        later = tuple(map(_in_slices(number) if indexes else deep, args[start:]))
        return (*args[:start], *later), {name: deep(x) for name, x in kwargs.items()}

    def _read(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        raise NotImplementedError


def _with_bounds(value: Any) -> Iterator[Any]:
    """Yields all leaves, and the bounds of slices."""
    for x in pytree.tree_leaves(value):
        yield from (x.start, x.stop, x.step) if isinstance(x, slice) else (x,)


def _symbols_in(value: Any) -> set[str]:
    """Returns the exporter's symbols of numbers that are not known, in numbers and in sizes of tensors."""
    leaves = pytree.tree_leaves(value)
    symbolic_values = (x for x in leaves if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool | FakeTensor))
    return {str(symbol) for x in symbolic_values for symbol in free_unbacked_symbols(x)}


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _in_slices(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that changes the bounds of slices in an index."""

    def changed(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(changed, x))
        return slice(*map(change, (x.start, x.stop, x.step))) if isinstance(x, slice) else x

    return changed


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0 and not x.is_complex() and x.dtype != torch.bool


def _number_of(x: Tensor) -> Any:
    """Returns the function that makes a Python number of a tensor of this dtype."""
    return Tensor.__complex__ if x.is_complex() else Tensor.__float__ if x.is_floating_point() else Tensor.__int__


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point()


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


class Answers(Reading):
    """A mode for the exporter's run: the reads give the listed outcomes.

    Args:
        expected: all reads of the call; looks at masks may be missing at the end.
        expect_outside: raises an exception in a block that is being recorded, so that later blocks can repeat it.
    """

    def __init__(self, expected: KnownValues, expect_outside: Callable[[], None] = lambda: None) -> None:
        super().__init__(expected.places)
        self.expected, self.expect_outside = expected, expect_outside

    def end(self) -> None:
        if len(self.outcomes) < len(self.expected.outcomes):
            raise other_reads(self.expected.outcomes[len(self.outcomes)].place)

    def _read(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        remaining = self.expected.outcomes[len(self.outcomes) :]
        if not remaining and is_looking():
            remaining = (Outcome(place, self.expected.likely),)
        if not remaining or remaining[0].place != place:
            raise other_reads(place)
        outcome = remaining[0]
        self.expect_outside()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]  # It may be written into later.
        self.noted.append((func, copies, spec))
        self.outcomes.append(outcome)
        # A copy: the model may change the list or array that it gets.
        return copy.deepcopy(outcome.value)


class Listing(Reading):
    """A mode for the run of a model with real tensors: the reads give what they give, and are listed."""

    def _read(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        value = func(*args, **kwargs)
        self.outcomes.append(Outcome(place, copy.deepcopy(value)))
        return value


def other_reads(place: Place) -> Error:
    """Returns the Error for a model that reads other values at this place while it is captured."""
    return Error(
        "the model reads other values while it is captured than it reads when it runs",
        at=place_text(place),
        fix="the same code in both: no torch.compiler.is_compiling() around it",
    )


def place_text(place: Place) -> str:
    """Returns a place as `file.py:12  the code`."""
    code = linecache.getline(place.file, place.line).strip()
    return f"{os.path.basename(place.file)}:{place.line}  {code}".rstrip()


def place_of_call(func: Any) -> Place:
    """Returns the place of a call: the innermost line outside of torch and autotp."""
    frame = calling_frame()
    while frame.f_back is not None and _is_within(frame.f_code.co_filename):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, getattr(func, "__name__", ""))


def _is_within(file: str) -> bool:
    return is_library_file(file) or file.startswith("<")
