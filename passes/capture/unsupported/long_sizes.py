"""Ends a capture whose sizes are expressions that are too long to reason about, so that fewer sizes stay symbols.

NOTE [Sizes that become numbers]
Each dimension of an input is a symbol at first, and each comparison of sizes is a question to sympy. A model that cuts
an image into windows again and again (Hiera, DaViT) makes sizes of hundreds of terms, `((h - 1) // 4 + 1) * ...`. Then
a question takes seconds, or sympy cannot answer it and raises. So such a capture ends, and begins again with the
first dimension of each input as the only symbol, and at last with none. The same is done where a rank would have to
compute a size with an operator that a graph of sizes does not have, such as `n & 12` (`analyse` in
`autotp/compiler.py`). A graph is right for the sizes that were numbers; a call with others is captured by itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import sympy
from torch.utils import _sympy

from autotp import torch_internals as internals
from autotp.model_library import BeginAgain

Symbols = Literal["all", "first", "none"]
"""The dimensions of inputs that are symbols: all of them, the first of each input, or none."""
FEWER: dict[Symbols, Symbols] = {"all": "first", "first": "none"}
LONGEST = 200
"""The most terms of a comparison. Those of the families of docs/coverage.md have less than 100."""
HOMES = (str(Path(sympy.__file__).parent), str(Path(_sympy.__path__[0])))


class LongSize(BeginAgain):
    """A question about sizes has too many terms."""


@contextmanager
def short_sizes(symbols: Symbols) -> Iterator[None]:
    """A region in which a long question about sizes raises LongSize, unless all of the inputs' sizes are numbers.

    The region raises it, too, if the model caught it.
    """
    # There are no fewer symbols to begin again with.
    if symbols == "none":
        yield
        return
    raised = []
    before = internals.EVALUATES_SIZES.original()

    def evaluate_expr(environment: Any, question: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(question, sympy.Basic) and _terms(question) > LONGEST:
            raised.append(LongSize())
            raise raised[-1]
        return before(environment, question, *args, **kwargs)

    with internals.EVALUATES_SIZES.replaced_by(evaluate_expr):
        yield
    if raised:
        raise raised[-1]


# Expressions share their parts, so most parts were counted before.
@lru_cache(maxsize=4096)
def _terms(expression: sympy.Basic) -> int:
    return 1 + sum(map(_terms, expression.args))


def asks_too_much(error: BaseException | None) -> bool:
    """True for the exception of a capture that ended because of long sizes, or because sympy has no answer."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, LongSize) or (frames and frames[-1].filename.startswith(HOMES)):
            return True
        # torch wraps exceptions of sympy, sometimes several times.
        error = error.__cause__ or error.__context__
    return False
