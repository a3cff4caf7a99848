"""low_memory: an elementwise optimizer whose states are in fewer bits, or on the host, between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, cast

import torch
from torch.optim import Optimizer

from autotp.arguments import expect_arguments
from autotp.errors import Error, within
from autotp.training.low_memory.optimizer import LowMemory

Kind = TypeVar("Kind", bound=Optimizer)
States = Literal["8bit", "bfloat16", "unchanged"]
CODES: Mapping[str, torch.dtype | None] = {"8bit": torch.uint8, "bfloat16": torch.bfloat16, "unchanged": None}


def low_memory(
    kind: type[Kind],
    states: States = "8bit",
    *,
    offload: bool = False,
    masters: bool = False,
    in_backward: bool = False,
) -> type[Kind]:
    """Returns a class like `kind` that keeps its states small: in fewer bits, on the host, or both.

    Between two steps a state takes 1.02 bytes an element ("8bit") or 2.02 ("bfloat16") in place of 4. A step opens the
    states of some rows at a time, and `kind` itself steps these rows. A state has one scale for each block of the whole
    tensor, so that it is the same in every layout. Checkpoints have the opened states: any layout reads them, any other
    `states`, and `kind` itself. Parameters of one dimension, or of fewer than 4,096 elements, keep their states as they
    are.

    Args:
        kind: a class of optimizers that steps each element by itself, such as torch.optim.AdamW.
        states: how states are kept: in 8 bits, in bfloat16, or unchanged. The dtype in which they are computed stays.
        offload: whether states lie in pinned memory of the host. They come to the GPU for the step, which is the same,
            bit for bit. On a CPU they lie there anyway.
        masters: whether parameters in bfloat16 or float16 are stepped in float32: the float32 parameter is a state,
            too, never in fewer bits. Gradients are cast to float32.
        in_backward: whether a parameter is stepped as soon as its gradient is complete, which is then freed. Keep
            `optimizer.step()`, after each backward. Gradients cannot be clipped by their norm, scaled or accumulated
            over several calls of backward. A trainer steps so in the backward of the last microbatch; in a pipeline at
            the end of `trainer.step`.

    Raises:
        Error: `kind` is not a class of optimizers, or an option has no such value. The class that is returned raises it
            for an optimizer that does not step each element by itself, such as Muon, and on every rank if a host has no
            memory for the states.

    Example:
        >>> model = autotp.parallelize(nn.Linear(64, 64), tp=1, example_inputs=torch.ones(2, 64))
        >>> optimizer = autotp.low_memory(torch.optim.AdamW, "8bit")(model.parameters(), lr=1e-3)
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> sum(state.nbytes for state in optimizer.state[model.weight].values()), 64 * 64  # bytes, elements
        (8708, 4096)
    """

    def checked() -> Any:
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            text = f"an optimizer, {type(kind).__name__}," if isinstance(kind, Optimizer) else repr(kind)
            raise Error(f"{text} where a class of optimizers belongs", fix="autotp.low_memory(torch.optim.AdamW)(p)")
        expect_arguments(low_memory, states=states, offload=offload, masters=masters, in_backward=in_backward)
        return _made(cast(Any, kind), states, offload, masters, in_backward)

    return cast("type[Kind]", within("low_memory", checked))


@cache
def _made(cls: Any, states: States, offload: bool, masters: bool, in_backward: bool) -> Any:
    names = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "kind": cls}
    options = {"codes": CODES[states], "offload": offload, "masters": masters, "in_backward": in_backward}
    return type(cls.__name__, (LowMemory, cls), names | options)
