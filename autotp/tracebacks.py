"""Tracebacks that show the user's lines: at most two of autotp, and none of what torch does in between.

NOTE [Short tracebacks]
An Error says what the user can change, and under a launcher each rank prints it. So each public call takes the lines of
autotp and torch below it out of the traceback of an exception; those of the user's own code, such as a line of the
model, stay. Where the exception is no Error, its last line stays as well, whoever wrote it. The same is done to its
causes; to an exception in whose handler it was raised only where the program ends, as the user may still handle that.
The variable TRACEBACK keeps all lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

TRACEBACK = "AUTOTP_TRACEBACK"
"""An environment variable: with "full", a traceback also has the lines of autotp."""
LIBRARIES = sys.stdlib_module_names | {"torch", "autotp"}


def shorten_traceback(error: Exception, is_error: bool, shows_itself: bool = True) -> None:
    """Takes the lines of libraries below a public call out of the traceback of an exception that the caller catches.

    The caller raises it again by `raise` alone.

    Args:
        is_error: whether it is an autotp.Error: then the line that raised it goes, too.
        shows_itself: whether the caller's line stays. (Python 3.10 keeps it.)
    """
    trace = error.__traceback__
    if os.environ.get(TRACEBACK) == "full" or trace is None:
        return
    # In place: Python 3.10 raises with the traceback that the exception had when it was caught.
    trace.tb_next = _linked(_users(_lines(trace.tb_next), not is_error))
    if not shows_itself:
        error.__traceback__ = trace.tb_next
    shorten_causes(error)


def shorten_causes(error: BaseException, contexts: bool = False) -> None:
    """Takes the lines of libraries out of the exceptions that Python prints above this one.

    Args:
        contexts: whether also out of those that were handled when another was raised, without a `from`.
    """
    visited = {id(error)}
    while (
        cause := error.__cause__ or (error.__context__ if contexts and not error.__suppress_context__ else None)
    ) is not None:
        if id(cause) in visited:
            return
        visited.add(id(cause))
        lines = list(_lines(cause.__traceback__))
        cause.__traceback__ = _linked(_users(lines, type(cause).__module__ != "autotp") or lines[-1:])
        error = cause


def of_the_program(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback of an exception that ends the program, with one or two lines of autotp."""
    if os.environ.get(TRACEBACK) == "full":
        return trace
    lines = list(_lines(trace))
    door = next((i for i, line in enumerate(lines) if _package(line.tb_frame) == "autotp"), None)
    if door is None:
        return trace
    shorten_causes(error, contexts=True)
    return _linked([*lines[: door + 1], *_users(lines[door + 1 :], type(error).__module__ != "autotp")])


def _lines(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _users(lines: Iterator[TracebackType] | list[TracebackType], last: bool) -> list[TracebackType]:
    """Returns the lines of the user's code; with `last`, also the innermost line."""
    lines = list(lines)
    return [line for i, line in enumerate(lines) if _is_users(line.tb_frame) or (last and i == len(lines) - 1)]


def _linked(lines: list[TracebackType]) -> TracebackType | None:
    trace = None
    for line in reversed(lines):
        trace = TracebackType(trace, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return trace


def _is_users(frame: FrameType) -> bool:
    """Returns whether a line is the user's. The code of a graph, which torch.fx generates, is in no module."""
    models = str(frame.f_globals.get("__name__", "")).startswith("autotp.models.")
    return models or _package(frame) not in LIBRARIES | {""}


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
