"""Error: the one exception of autotp, which names the public call that raised it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

from autotp.tracebacks import TRACEBACK, shorten_traceback

T = TypeVar("T")
REPORT = "a report of it, with the model"
"""The `fix` of an Error that a mistake of autotp causes."""


class Error(RuntimeError):
    """Raised for every problem that a user can cause, and says what to write instead.

    The first line names the public call and the problem; each fact has a line of its own::

        autotp.Error: parallelize(GPT, tp=8): cannot cut `h.0.attn.c_attn` by heads
          at      gpt.py:52  q, k, v = self.c_attn(x).split(...)
          try     ...

    Args:
        problem: what is wrong, in one line.
        fix: what to write instead; printed behind `try`.
        then: a second line to write after that; printed behind `then`.
        alternative: another way out; printed behind `or`, and a second one behind `or else`.
        facts: label -> text, in the order printed; usual labels: rule, expected, got, at.

    Attributes:
        problem: the argument of this name.
        facts: label -> text of every line below the first, `try`, `then` and `or` included.
        call: the public call that raised the error, such as "parallelize(GPT, tp=8)"; "" before it is known.
        alone: whether this rank alone raises it: the others, which wait for this one, are told.

    Example:
        >>> try:
        ...     autotp.explain(nn.Linear(4, 4), tp=0, example_inputs=torch.ones(2, 4))
        ... except autotp.Error as error:
        ...     print(error.call)
        explain(Linear, tp=0)
    """

    def __init__(
        self, problem: str, *, fix: str = "", then: str = "", alternative: str | tuple[str, ...] = (), **facts: str
    ) -> None:
        alternatives = [alternative] if isinstance(alternative, str) else alternative
        ways = {"try": fix, "then": then, **dict(zip(("or", "or else"), alternatives, strict=False))}
        remedies = {label: text for label, text in ways.items() if text}
        self.problem, self.facts, self.call, self.alone = problem, facts | remedies, "", False
        super().__init__(problem)

    def within(self, call: str) -> Error:
        """Returns this error with the name of the public call that it happened in, unless it has one already.

        Args:
            call: such as "parallelize(GPT, tp=8)".
        """
        self.call = self.call or call
        return self

    def __str__(self) -> str:
        head = f"{self.call}: {self.problem}" if self.call else self.problem
        return "\n".join([head, *(f"  {label:<9}{text}" for label, text in self.facts.items())])


_calls: dict[int, tuple[str, ...]] = {}
"""Thread -> the public calls that it is in, the outermost first. The heartbeat reads it from a thread of its own."""
Ended = Callable[[BaseException | None], None]
_listeners: list[Ended] = []


def listen(ended: Ended) -> None:
    """Makes `ended` be called after each outermost public call, with the exception that it raised, or None."""
    if ended not in _listeners:
        _listeners.append(ended)


@contextmanager
def calling(call: str) -> Iterator[None]:
    """A region in which this thread is in the public call of this name."""
    thread = get_ident()
    before = _calls.get(thread, ())
    # A new tuple: the heartbeat's thread may be reading the old one.
    _calls[thread] = (*before, call)
    try:
        yield
    except BaseException as error:
        _end(thread, before, error)
        raise
    else:
        _end(thread, before, None)


def _end(thread: int, before: tuple[str, ...], error: BaseException | None) -> None:
    if before:
        _calls[thread] = before
        return
    del _calls[thread]
    for ended in _listeners:
        ended(error)


def within(call: str, run: Callable[[], T]) -> T:
    """Returns the result of `run()`; an Error that it raises gets the public call's name. NOTE [Short tracebacks]"""
    with calling(call.partition("(")[0]):
        try:
            return run()
        except Exception as error:
            if isinstance(error, Error):
                error.within(call)
            shorten_traceback(error, isinstance(error, Error), shows_itself=False)
            raise


@contextmanager
def full_tracebacks() -> Iterator[None]:
    """A region in which the traceback of an Error has the lines of autotp, too."""
    before = os.environ.get(TRACEBACK)
    os.environ[TRACEBACK] = "full"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRACEBACK]
        else:
            os.environ[TRACEBACK] = before


def call_in_progress() -> str:
    """Returns the public call that this thread is in, such as `Trainer.step`; "" outside of all calls."""
    return next(iter(_calls.get(get_ident(), ())), "")


def is_within_a_call() -> bool:
    """Returns whether the newest public call of this thread was made within another, as by a signal's handler."""
    return len(_calls.get(get_ident(), ())) > 1


def calls_in_progress() -> list[str]:
    """Returns the public call that each thread is in, without the threads that are in none."""
    # A copy first, as other threads change the dict meanwhile.
    return [calls[0] for calls in list(_calls.values()) if calls]


def threads_in_calls() -> list[int]:
    """Returns the threads that are in a public call."""
    return [thread for thread, calls in list(_calls.items()) if calls]


Error.__module__ = "autotp"
