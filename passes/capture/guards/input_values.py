"""input_values: runs a model without an exporter, to list what Python reads of tensors.

Before: the model, its arguments, and the places at which values are needed, as far as they are known
After:  all reads of the call, in order, with their outcomes

Each tensor without values that follows from the arguments' values has a real tensor beside it, its shadow. Functions
run on both.
"""

from __future__ import annotations

import copy
import linecache
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.errors import Error
from autotp.passes.capture.guards.looks import has_values
from autotp.passes.capture.guards.values import (
    PREDICATES,
    KnownValues,
    NeedsNumber,
    Outcome,
    Place,
    Reading,
    place_of_call,
    place_text,
    reads_values,
)
from autotp.passes.capture.python_state.freeze import freeze_argument

TRUE_WHERE_ALL_IS_WELL = ("all", "__eq__", "eq", "isfinite", "equal", "allclose", "logical_not", "__invert__")
"""Functions whose truth value is assumed to be True; that of others, such as `any` of `isnan`, to be False."""
EQUALS = ("__eq__", "eq")
PASS_ON = ("any", "view", "reshape", "flatten", "unsqueeze", "squeeze", "__and__", "to", "bool", "__getitem__")
"""Functions of a comparison that are likely true where it is: some row has chosen an expert. (`if (i == e).any():`)"""


MOST_ROUNDS = 512
"""The largest number of truth values of activations at one place: beyond it is a loop that they end."""


class _DoesNotFollow(Exception):
    """A value does not follow from the arguments."""


class InputValues(Reading):
    """A mode that lists reads: of values that follow from the arguments, and of truth values of activations.

    Args:
        prior: what earlier runs found.
        device: the device of tensors without values.
        turned: reads, by number, whose assumed truth value led to an exception, and the other value.
        blocked: places with numbers of activations, which cannot be known.

    Attributes:
        shadows: `id` of a tensor without values -> the tensor, its shadow, and by how much their versions differ.
        made_by: `id` of a truth value, or of a tensor without dimensions -> it, and the function that made it.
        assumed: the reads whose values were assumed, by number.
        arrays: the arrays that reads gave, with their outcomes.
    """

    def __init__(self, prior: KnownValues, device: str, turned: Mapping[int, bool], blocked: Collection[Place]) -> None:
        super().__init__(prior.places)
        self.known, self.guesses = prior.outcomes, prior.guesses
        self.device, self.turned, self.blocked = device, turned, blocked
        self.shadows: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.made_by: dict[int, tuple[Tensor, str]] = {}
        self.assumed: list[int] = []
        self.arrays: list[tuple[numpy.ndarray, Outcome]] = []

    def begin(self, leaves: Sequence[Any], real: Sequence[Any]) -> None:
        super().begin(leaves, real)
        self.arrays = []
        for fake, value in zip(leaves, real, strict=True):
            if isinstance(fake, FakeTensor) and has_values(value):
                with unset_fake_temporarily(), torch._C.DisableTorchFunction():
                    shadow = value.detach().to(self.device).clone(memory_format=torch.contiguous_format)
                self._pair(fake, shadow)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function. Where it needs a value, its place is listed, and it runs again."""
        try:
            return super()._run(func, args, kwargs)
        except Exception as error:
            place = place_of_call(func)
            if not reads_values(error) or place in self.places or place in self.blocked:
                raise
            self.places.add(place)
            return super()._run(func, args, kwargs)

    def _plain(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        shadows = self._shadows(args, kwargs)  # Before the function writes into any of them.
        result = func(*args, **kwargs)
        fakes = [x for x in pytree.tree_leaves(result) if isinstance(x, FakeTensor)]
        for x in fakes:
            # Only such a tensor can become a truth value.
            if x.dim() == 0 or x.dtype == torch.bool:
                self.made_by[id(x)] = x, self._maker(func, args)
        if shadows is None or not (fakes or result is None):  # None: it may have written into its arguments.
            return result
        try:
            real = _run_really(func, shadows)
        except Exception:  # Whatever it is: the results are not known.
            return result
        real_tensors = [x for x in pytree.tree_leaves(real) if isinstance(x, Tensor)]
        if len(real_tensors) == len(fakes):
            for fake, shadow in zip(fakes, real_tensors, strict=True):
                self._pair(fake, shadow)
        return result

    def _maker(self, func: Any, args: Any) -> str:
        """Returns the name of a function; that of the comparison whose result it passes on."""
        name = getattr(func, "__name__", "")
        before = self.made_by.get(id(args[0]), (None, ""))[1] if args else ""
        return before if name in PASS_ON and before in EQUALS else name

    def _pair(self, fake: Tensor, shadow: Tensor) -> None:
        self.shadows[id(fake)] = fake, shadow, fake._version - shadow._version

    def _shadows(self, args: Any, kwargs: Any) -> Any:
        """Returns arguments and keyword arguments with shadows for tensors; None if one has no shadow."""

        def real(x: Any) -> Any:
            # This run's sizes are numbers. A symbol is a number that depends on values, which no shadow tells.
            if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise _DoesNotFollow
            if isinstance(x, slice):
                return slice(*map(real, (x.start, x.stop, x.step)))
            return self._shadow(x) if isinstance(x, Tensor) else x

        try:
            return pytree.tree_map(real, (args, kwargs), is_leaf=lambda x: isinstance(x, slice))
        except _DoesNotFollow:
            return None

    def _shadow(self, x: Tensor) -> Tensor:
        if id(x) not in self.shadows and not isinstance(x, FakeTensor) and x.device.type == self.device:
            with unset_fake_temporarily(), torch._C.DisableTorchFunction():
                self._pair(x, x.detach().clone())  # A constant of the model, which the user has, too.
        fake, shadow, ahead = self.shadows.get(id(x), (None, x, 0))
        if fake is not x or x._version - shadow._version != ahead:  # Something without values was written into it.
            raise _DoesNotFollow
        return shadow

    def _read(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        index = len(self.outcomes)
        shadows = self._shadows(args, kwargs)
        if self._is_known(index, place):  # Another device's value may differ in the last digit.
            value = copy.deepcopy(self.known[index].value)
        elif shadows is None:
            value = self._assumed(index, func, args, place)
            self.assumed.append(index)
        else:
            value = _run_really(func, shadows)
        # A copy: the model may write into its list or array.
        self.outcomes.append(Outcome(place, copy.deepcopy(value), assumed=shadows is None))
        self.noted.append((func, [], None))
        if isinstance(value, numpy.ndarray):
            self.arrays.append((value, self.outcomes[-1]))
        return value

    def end(self) -> None:
        for array, outcome in self.arrays:  # The tensor has the memory of the array.
            if freeze_argument(array) != freeze_argument(outcome.value):
                raise Error(
                    "an array of .numpy() and its tensor share memory, and forward writes into it, "
                    "which a graph cannot do",
                    at=place_text(outcome.place),
                    fix="x.numpy().copy()",
                )

    def _is_truth(self, place: Place, symbols: Iterable[Any]) -> bool:
        reads = {read for symbol in symbols for read in self.symbols.get(str(symbol), ())}
        return super()._is_truth(place, symbols) or (bool(reads) and reads <= set(self.blocked))

    def _is_known(self, index: int, place: Place) -> bool:
        """True if an earlier run of this call gave the value."""
        pairs = zip(self.known, [*self.outcomes, Outcome(place, None)], strict=False)
        return index < len(self.known) and all(expected.place == actual.place for expected, actual in pairs)

    def _assumed(self, index: int, func: Any, args: Any, place: Place) -> Any:
        """Returns a truth value of an activation that is likely."""
        code = linecache.getline(place.file, place.line).strip()
        again = sum(outcome.place == place for outcome in self.outcomes)
        # A number has no likely value, and a `while` that is always True never ends.
        if func not in PREDICATES or code.startswith("while ") or again == MOST_ROUNDS:
            raise NeedsNumber(place)
        if index in self.turned:
            return self.turned[index]
        if index < len(self.guesses) and self.guesses[index].place == place:
            return bool(self.guesses[index].value)
        if code.startswith("assert "):
            return True
        maker = self.made_by.get(id(args[0]), (None, getattr(func, "__name__", "")))[1]
        return maker in TRUE_WHERE_ALL_IS_WELL


def _run_really(func: Any, arguments: Any) -> Any:
    """Runs a function on real tensors. Raises _Unknown if it would give other numbers each time."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad(), _Repeatable():
        return func(*arguments[0], **arguments[1])


class _Repeatable(TorchDispatchMode):
    """A mode in which an operator that would give other numbers each time is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name():
            raise _DoesNotFollow
        return func(*args, **(kwargs or {}))
