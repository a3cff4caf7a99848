"""What ranks learn of a step once its values have come from the device: its loss, and a fingerprint of its batch.

NOTE [No rank waits for its device]
A step would wait for the device if it looked at its own loss: nothing is queued then, and the device idles until the
host has started the next step. So on a GPU the facts of a step are copied while the host goes on. Ranks use them once
they have arrived on all ranks, which is known in one of the next steps: there a loss that is not finite is an Error,
which names the step that it was of. On the CPU the values are there at once, and so is the Error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NoReturn

import torch
from torch import Tensor, nn

from autotp.distributed.agreement import agree
from autotp.distributed.fingerprint import Fingerprint
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.sharding.boxes import local_of

MOST = 4
"""The number of steps whose facts may be on their way; then the host waits for the oldest, and the device is busy."""
SHOWN = 3
"""The greatest number of steps whose facts are used at once."""


@dataclass
class StepFacts:
    """The facts of one step; tensors are on the CPU, or on their way to it.

    Attributes:
        step: its number.
        batch: a fingerprint of its batch.
        loss: its loss, []; None if it is not looked at.
        finite: whether each parameter, and each gradient, was finite after it, [names]; None without `loss`.
        names: the names of these, parameters first.
        arrived: tells whether they have come from the device.
    """

    step: int
    batch: Fingerprint
    loss: Tensor | None = None
    finite: Tensor | None = None
    names: Sequence[str] = ()
    arrived: torch.cuda.Event | None = None

    def note_loss(self, loss: Tensor, model: nn.Module) -> None:
        """Has the loss, and what is finite, copied to the CPU."""
        self.names, finite = finite_tensors(model)
        self.loss, self.finite = (x.to("cpu", non_blocking=True) for x in (loss.detach(), finite))
        # Recorded after the copies in their stream: when it has come, they have.
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def have_arrived(self, wait: bool = False) -> bool:
        """Returns whether all have come."""
        events = [event for event in (self.batch.arrived, self.arrived) if event is not None]
        if wait:
            for event in events:
                event.synchronize()
        return all(event.query() for event in events)


class LateFacts:
    """The facts of the last steps on this rank. All ranks have those of the same steps, as they agree on each step."""

    def __init__(self) -> None:
        self._coming: deque[StepFacts] = deque()
        self._arrived: list[StepFacts] = []

    def add(self, facts: StepFacts) -> None:
        """Adds the facts of the step that begins."""
        self._coming.append(facts)

    def count(self) -> int:
        """Returns the number of steps, from the oldest on, whose facts have arrived on this rank; `SHOWN` at most."""
        late = len(self._coming) - MOST
        arrived = [facts.have_arrived(wait=i < late) for i, facts in enumerate(self._coming)]
        # Only a beginning without gaps counts: `take` removes the oldest ones.
        return min(SHOWN, sum(1 for _ in takewhile(bool, arrived)))

    def prints(self) -> dict[int, list[int]]:
        """Returns the fingerprints, by step, of the batches that have arrived on all ranks since the last call."""
        arrived, self._arrived = self._arrived, []
        return {facts.step: facts.batch.as_ints() for facts in arrived}

    def take(self, count: int, everyone: Mesh) -> None:
        """Takes the facts of the oldest `count` steps, which have arrived on all ranks.

        Raises:
            Error: on every rank, if a loss among them is infinite or undefined. Then later ones are forgotten.
        """
        # `prints` gives their fingerprints to the next comparison.
        self._arrived = [self._coming.popleft() for _ in range(count)]
        try:
            expect_finite(self._arrived, partial(agree, everyone))
        except Error:
            self.forget()
            raise

    def coming(self) -> list[StepFacts]:
        """Returns the facts that may be on their way."""
        return list(self._coming)

    def forget(self) -> None:
        """Forgets the facts that may be on their way; all ranks do."""
        self._coming.clear()


def expect_finite(steps: Sequence[StepFacts], agreed: Callable[[Callable[[], None]], object]) -> None:
    """Raises Error on every rank if a loss is infinite or undefined. The facts have arrived on all ranks.

    Args:
        agreed: as `raise_nonfinite` has it.
    """
    for facts in steps:
        if facts.loss is not None and not torch.isfinite(facts.loss):
            assert facts.finite is not None
            raise_nonfinite(float(facts.loss), facts.step, facts.names, facts.finite, agreed)


def finite_tensors(model: nn.Module) -> tuple[list[str], Tensor]:
    """Returns the names of a model's parameters, and then of their gradients, and whether each is finite. [names]"""
    parameters = dict(model.named_parameters())
    named: dict[str, Tensor] = {f"`{name}`": parameter for name, parameter in parameters.items()}
    named |= {f"the gradient of `{name}`": p.grad for name, p in parameters.items() if p.grad is not None}
    values = {name: _values_of(tensor) for name, tensor in named.items()}
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in values.items():
        if tensor.numel() and tensor.dtype.is_floating_point:
            by_dtype.setdefault(tensor.dtype, []).append(name)
    # The largest absolute element is finite only if all are; one call of torch for all tensors of a dtype.
    largest = [
        torch.stack(torch._foreach_norm([values[name] for name in names], torch.inf)) for names in by_dtype.values()
    ]
    names = [name for some in by_dtype.values() for name in some]
    return names, torch.cat([x.isfinite() for x in largest]) if largest else torch.ones(0, dtype=torch.bool)


def _values_of(tensor: Tensor) -> Tensor:
    local = local_of(tensor.detach())
    dense = local._values() if local.is_sparse else local
    return torch.view_as_real(dense) if dense.is_complex() else dense


def raise_nonfinite(
    loss: float, step: int, names: Sequence[str], finite: Tensor, agreed: Callable[[Callable[[], None]], object]
) -> NoReturn:
    """Raises Error on every rank; it names the first parameter that is not finite on any rank, else the first gradient.

    Args:
        names, finite: as `finite_tensors` returns them.
        agreed: calls a function, and raises its Error on every rank.
    """
    flags: Mapping[str, bool] = dict(zip(names, finite.tolist(), strict=True))

    def name_first(gradients: bool) -> None:
        for name, is_finite in flags.items():
            # Names of parameters begin with a backtick, those of gradients do not.
            if not is_finite and name.startswith("`") != gradients:
                raise Error(
                    f"the loss of step {step} is {loss}: {name} is infinite or undefined",
                    fix="autotp.load_checkpoint(...), and a smaller learning rate from there",
                )

    agreed(partial(name_first, gradients=False))
    agreed(partial(name_first, gradients=True))
    problem = f"the loss of step {step} is {loss}, and every parameter and gradient is finite"
    raise Error(problem, fix="a batch without infinite or undefined values, or a loss that stays finite on it")
