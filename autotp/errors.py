"""The one error type of autotp, given its context once at the entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Error(RuntimeError):
    """What a user can cause, and what to do about it.

    Printed as the public call and the problem on the first line, then one indented line for each fact::

        autotp.Error: parallelize(GPT, tp=8): cannot cut `h.0.attn.c_attn` by heads
          at      gpt.py:52  q, k, v = self.c_attn(x).split(...)
          try     ...

    Args:
        problem: one line, what is wrong.
        fix: what to write instead; printed behind `try`.
        then: what to write behind that.
        alternative: what else would do; printed behind `or`, a second one behind `or else`.
        facts: label -> text, in the order printed; usual labels: rule, expected, got, at.
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
        """This error with the public call it happened in, unless it already has one."""
        self.call = self.call or call
        return self

    def __str__(self) -> str:
        head = f"{self.call}: {self.problem}" if self.call else self.problem
        return "\n".join([head, *(f"  {label:<9}{text}" for label, text in self.facts.items())])


def within(call: str, run: Callable[[], T]) -> T:
    """What `run` returns; an Error it raises gets the public call's name."""
    try:
        return run()
    except Error as error:
        error.within(call)
        raise


Error.__module__ = "autotp"
