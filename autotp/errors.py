"""Error: the one exception of autotp, which names the public call that raised it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


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
        others = [alternative] if isinstance(alternative, str) else alternative
        ways = {"try": fix, "then": then, **dict(zip(("or", "or else"), others, strict=False))}
        remedies = {label: text for label, text in ways.items() if text}
        self.problem, self.facts, self.call = problem, facts | remedies, ""
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


_calls: ContextVar[tuple[str, ...]] = ContextVar("calls", default=())


def within(call: str, run: Callable[[], T]) -> T:
    """Returns the result of `run()`; an Error that it raises gets the public call's name."""
    before = _calls.set((*_calls.get(), call.partition("(")[0]))
    try:
        return run()
    except Error as error:
        error.within(call)
        raise
    finally:
        _calls.reset(before)


def call_in_progress() -> str:
    """Returns the public call that this thread is in, such as `Trainer.step`; "" outside of all calls."""
    return _calls.get()[0] if _calls.get() else ""


Error.__module__ = "autotp"
