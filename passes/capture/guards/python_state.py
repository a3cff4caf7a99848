"""Notes during capture whether a model asks for the gradient mode, and refuses random numbers of Python and seeds.

NOTE [Whether gradients are wanted]
A graph is right with gradients and without, unless the model's own code asks (`torch.is_grad_enabled()`,
`x.requires_grad`) and then computes something else. Such a question is answered for the call that is captured, and
noted: the graph is then used for calls with the same answers only. torch's own code asks very often; it is always told
that gradients are wanted.

A number from `random` or `numpy.random` would be the same in every later call: a model that draws one is refused. So
is one that sets torch's random state (`torch.manual_seed`, `torch.random.fork_rng`): later calls would not do so.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.model_library import instead_of_python_random
from autotp.passes.capture.guards.freeze import freeze
from autotp.passes.capture.guards.walk import by_all, everything, spelled
from autotp.passes.capture.replacements.everywhere import Pairs
from autotp.source_location import calling_frame, is_users, user_line

ASKING = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))
IN_PLACE_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"__i{name}__" for name in IN_PLACE_NAMES)


@dataclass(frozen=True)
class GradientsWanted:
    """The gradient modes of a call, and the tensors that require a gradient.

    Attributes:
        enabled: whether gradients are enabled.
        inference: whether the call is in inference mode.
        inputs: `requires_grad` of each tensor among the arguments.
        parameters: `requires_grad` of each parameter.

    For a graph, None stands for a question that its model did not ask.
    """

    enabled: bool | None = True
    inference: bool | None = False
    inputs: tuple[bool, ...] | None = ()
    parameters: tuple[bool, ...] | None = ()

    def covers(self, call: GradientsWanted) -> bool:
        """True if a graph that was captured with these answers is right for a call."""
        pairs = zip(vars(self).values(), vars(call).values(), strict=True)
        return all(captured in (None, present) for captured, present in pairs)


NOT_ASKED = GradientsWanted(None, None, None, None)


def wanted_now(tensors: Sequence[Tensor], parameters: Iterable[Tensor]) -> GradientsWanted:
    """Returns the present gradient modes, for a call with these tensors."""
    flags = tuple(x.requires_grad for x in tensors), tuple(p.requires_grad for p in parameters)
    return GradientsWanted(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *flags)


class GradientQueries(TorchFunctionMode):
    """A mode that notes the model's questions about gradients, and answers them for the call that is captured.

    Attributes:
        wanted: the answers.
        inputs: the tensor arguments, whose `requires_grad` is the same in any mode.
        written: constants that the model wrote into, directly or through views (`roots`: a view -> its constant).
        modes, flags: whether the model asked for the mode, or whether a tensor requires a gradient.
    """

    def __init__(self, answers: GradientsWanted) -> None:
        super().__init__()
        self.wanted, self.modes, self.flags = answers, False, False
        self.inputs: list[Tensor] = []
        self.written: list[Tensor] = []
        self.roots: dict[int, tuple[Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") is not None:
            raise Error(
                "the model draws from a torch.Generator of its own, which a graph cannot use",
                at=user_line(traceback.extract_stack()),
                fix="the default one: no `generator=`",
            )
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor):
            self._follow(func, args[0], result)
        if func not in ASKING or not is_users(calling_frame()):
            return result
        self.flags = True
        if self.wanted.enabled or args[0].is_leaf or any(args[0] is x for x in self.inputs):
            return result
        return {ASKING[0]: False, ASKING[1]: None, ASKING[2]: True}[func]  # The answers without gradients.

    def _follow(self, func: Any, x: Tensor, result: Any) -> None:
        """Notes views of constants, and writes into them. During capture only constants are no fake tensors."""
        root = x if not isinstance(x, FakeTensor) else self.roots.get(id(x), (None,))[0]
        name = getattr(func, "__name__", "")
        if root is None:
            return
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
            self.written.append(root)
        for view in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(view, FakeTensor) and (view._is_view() or view is x):
                self.roots[id(view)] = root, view

    def answering(self) -> Pairs:
        """Returns what stands for `torch.is_grad_enabled` and the like: it answers for the call that is captured."""
        return [(row.original(), self._answering(row)) for row in internals.GRADIENT_MODES]

    def relevant(self) -> GradientsWanted:
        """Returns the answers that the model asked for."""
        modes = (self.wanted.enabled, self.wanted.inference) if self.modes or self.flags else (None, None)
        flags = (self.wanted.inputs, self.wanted.parameters) if self.flags else (None, None)
        return GradientsWanted(*modes, *flags)

    def _answering(self, row: internals.Replaced) -> Callable[[], bool]:
        """Returns what stands for a function that returns a mode: NOTE [Whether gradients are wanted]"""
        real, is_inference = row.original(), row.name == "is_inference_mode_enabled"

        def answer() -> bool:
            if not is_users(calling_frame()):
                return bool(real())
            self.modes = True
            return bool(self.wanted.inference if is_inference else real() and self.wanted.enabled)

        return answer


# ---- random numbers of Python and numpy

SOURCES = (random.Random, np.random.RandomState, np.random.Generator)
SEEDING = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
"""Methods of `torch.Generator` that set its state."""


class DrewNumber(Error):
    """The model drew a number from a random generator of Python or numpy."""

    def at_line(self, line: str) -> Error:
        """Returns the error for the user, with the source line that drew; with none, if that is not known."""
        return Error(self.problem, **({"at": line} if line else {}), **self.facts)


def _sources(model: nn.Module) -> dict[str, Any]:
    """Returns the random generators of Python and numpy that a model can draw from, by the names in errors."""
    sources = {f"`{spelled(path)}`": x for path, x in everything(model, by_all) if isinstance(x, SOURCES)}
    return {"Python's `random`": random, "Python's `numpy.random`": np.random, **sources}


@contextmanager
def without_python_random(model: nn.Module) -> Iterator[None]:
    """A region in which the model runs and must not draw numbers from random generators of Python or numpy.

    Raises:
        DrewNumber: the model drew a number from `random`, `numpy.random`, or from a generator that it holds. The
            generators are restored then.
    """
    sources = _sources(model)
    before = {name: _state(source) for name, source in sources.items()}
    yield
    drawn = [name for name, source in sources.items() if _comparable(_state(source)) != _comparable(before[name])]
    for name, source in ((name, source) for name, source in sources.items() if name in drawn):
        _restore(source, before[name])
    if drawn:
        error = Error(
            f"forward draws a number from {drawn[0]}, and every later call would use the same number",
            fix=instead_of_python_random(model)
            or "torch.rand(()), and torch.where on it; or draw it outside, as an argument of forward",
        )
        raise DrewNumber(error.problem, **error.facts)


def line_that_draws(model: nn.Module, run: Callable[[], object]) -> str:
    """Runs a model again, and returns the first line after which a generator of Python has another state; "" for none.

    NOTE [The line that draws]
    A number of Python leaves no trace: generators are C code, and are called by any name. So the states of all are
    compared after each line of the user's code. That is slow, so it is done once a number was drawn: the generators are
    where they were, and the second run draws the same.

    Args:
        run: runs the model; what it raises is not raised here.
    """
    sources, lines, last_position = _sources(model), list[str](), list[tuple[str, int]]()

    def states() -> list[Any]:
        return [_comparable(_state(source)) for source in sources.values()]

    before = states()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if not lines and last_position and states() != before:
            path, number = last_position[-1]
            lines.append(f"{os.path.basename(path)}:{number}  {linecache.getline(path, number).strip()}".rstrip())
        last_position[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return None if lines else line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return None if lines or not is_users(frame) or _of_python(frame) else line

    tracing = sys.gettrace()
    sys.settrace(call)
    try:
        with suppress(Exception):
            run()
    finally:
        sys.settrace(tracing)
    return "".join(lines)


def _of_python(frame: FrameType) -> bool:
    """True for code of numpy or of Python's own library, such as `random`: the line that calls it is the user's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in {"numpy", *sys.stdlib_module_names}


class _Unseeded:
    """Stands for torch's generator, and refuses to be seeded."""

    def __init__(self, real: torch.Generator) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        if name in SEEDING and not _asked_by_dynamo():
            raise Error(
                "forward sets torch's random state, and later calls of the graph would not do so",
                at=user_line(traceback.extract_stack()),
                fix="torch.manual_seed(seed) before the call; or draw the numbers outside, as an argument of forward",
            )
        return getattr(self.real, name)


def _asked_by_dynamo() -> bool:
    """True if Dynamo reads the method: to put back the state that it found, or to list torch's functions.

    It traces the branches of `torch.cond`, for one. A model's seed has other callers.
    """
    frame = calling_frame(2)
    while frame.f_globals.get("__name__") == "torch.random" and frame.f_back:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in ("torch._dynamo.convert_frame", "torch._dynamo.trace_rules")


def unseeded() -> Pairs:
    """Returns what stands for torch's generator, and refuses a model that sets torch's random state."""
    generator = internals.GENERATOR.original()
    return [(generator, _Unseeded(generator))]


def _state(source: Any) -> Any:
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.getstate() if hasattr(source, "getstate") else source.get_state(legacy=False)


def _comparable(state: Any) -> Any:
    """Returns a state of a generator in a form that `==` compares. A tuple of hundreds of numbers is one already."""
    return freeze(state, lambda value, freeze: value if type(value) is tuple else NotImplemented)


def _restore(source: Any, state: Any) -> None:
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif hasattr(source, "setstate"):
        source.setstate(state)
    else:
        source.set_state(state)
