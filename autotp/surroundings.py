"""What a model asks of what is around it while it is captured: whether gradients are wanted, and Python's own chance.

NOTE [Whether gradients are wanted]
A graph is right with gradients and without, unless the model's own code asks (`torch.is_grad_enabled()`,
`x.requires_grad`) and computes something else. So the question is answered as in the call that is captured, and noted:
the graph is then for calls of this kind only. torch's own code asks all the time, and is answered that they are wanted.

A number from `random` or `numpy.random` would be the same in every later call: a model that draws one is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp.blocks import patched
from autotp.errors import Error
from autotp.source import is_users

ASKING = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))
MODES = ("is_grad_enabled", "is_inference_mode_enabled")


@dataclass(frozen=True)
class Wanted:
    """Of what gradients are wanted in a call.

    Attributes:
        enabled: whether they are wanted at all.
        inference: whether the call is in inference mode.
        inputs: of each tensor among the arguments.
        parameters: of each parameter.

    Of a graph None stands for what its model did not ask.
    """

    enabled: bool | None = True
    inference: bool | None = False
    inputs: tuple[bool, ...] | None = ()
    parameters: tuple[bool, ...] | None = ()

    def covers(self, call: Wanted) -> bool:
        """True if a graph, whose model asked this, is right for a call."""
        known = zip(vars(self).values(), vars(call).values(), strict=True)
        return all(mine in (None, its) for mine, its in known)


NOT_ASKED = Wanted(None, None, None, None)


def wanted_now(tensors: Sequence[Tensor], parameters: Iterable[Tensor]) -> Wanted:
    """Of what gradients are wanted in a call with these arguments, here and now."""
    flags = tuple(x.requires_grad for x in tensors), tuple(p.requires_grad for p in parameters)
    return Wanted(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *flags)


class Asked(TorchFunctionMode):
    """A mode that notes whether the model's code asks if gradients are wanted, and answers for a call.

    Attributes:
        wanted: what is wanted in the call.
        modes, flags: whether it was asked for the mode, or whether a tensor wants a gradient.
    """

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self.wanted, self.modes, self.flags = wanted, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in ASKING or not is_users(sys._getframe(1)):
            return found
        self.flags = True
        if func == ASKING[0]:
            return found and (self.wanted.enabled or args[0].is_leaf)
        return found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A region in which torch's functions that tell the mode answer for the call."""
        with patched(torch, {name: self._answering(getattr(torch, name)) for name in MODES}):
            yield

    def relevant(self) -> Wanted:
        """What of the call's is relevant to the graph."""
        modes = (self.wanted.enabled, self.wanted.inference) if self.modes or self.flags else (None, None)
        flags = (self.wanted.inputs, self.wanted.parameters) if self.flags else (None, None)
        return Wanted(*modes, *flags)

    def _answering(self, real: Callable[[], bool]) -> Callable[[], bool]:
        """NOTE [Whether gradients are wanted]"""

        def answer() -> bool:
            if not is_users(sys._getframe(1)):
                return real()
            self.modes = True
            return bool(self.wanted.inference if real.__name__ == MODES[1] else real() and self.wanted.enabled)

        return answer


# ---- chance


@contextmanager
def without_chance() -> Iterator[None]:
    """A region in which the model runs; numbers that it draws from `random` or `numpy.random` are an Error.

    Raises:
        Error: it drew one. Both are as they were before.
    """
    before = random.getstate(), np.random.get_state()
    yield
    drawn = [random.getstate() != before[0], not _same(np.random.get_state(), before[1])]
    if any(drawn):
        random.setstate(before[0])
        np.random.set_state(before[1])
        name = "random" if drawn[0] else "numpy.random"
        raise Error(
            f"forward draws a number from Python's `{name}`, which every later call would find unchanged",
            **{"try": "torch.rand(()), and torch.where on it; or draw it outside, as an argument of forward"},
        )


def _same(now: Any, then: Any) -> bool:
    return bool(now[2] == then[2] and now[3:] == then[3:] and np.array_equal(now[1], then[1]))
