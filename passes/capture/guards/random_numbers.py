"""Refuses random numbers of Python and numpy in forward, and seeds.

A number from `random` or `numpy.random` would be the same in every later call: a model that draws one is refused. So
is one that sets torch's random state (`torch.manual_seed`, `torch.random.fork_rng`): later calls would not do so.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.model_library import library
from autotp.passes.capture.python_state.freeze import freeze
from autotp.passes.capture.python_state.walk import everything, spelled
from autotp.passes.capture.replacements.everywhere import Pairs
from autotp.source_location import calling_frame, is_users, user_line

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
    sources = {f"`{spelled(path)}`": x for path, x in everything(model, "held") if isinstance(x, SOURCES)}
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
            fix=library().instead_of_python_random(model)
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
        # This line has not run yet: the one before it drew.
        if not lines and last_position and states() != before:
            path, number = last_position[-1]
            lines.append(f"{os.path.basename(path)}:{number}  {linecache.getline(path, number).strip()}".rstrip())
        last_position[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return None if lines else line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return None if lines or not is_users(frame) or _of_python(frame) else line

    # A debugger or a coverage tool may trace already.
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
