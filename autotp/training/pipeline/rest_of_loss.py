"""rest_of_loss: the part of a loss that is computed from sums over the whole batch, such as a balancing loss.

NOTE [A pass for the sums]
Backward of any part needs the sums of all parts: NOTE [Functions of sums] in `passes/pipeline/batch_sums.py`. Where a
replica computes its rows at once, it waits for the other replicas' sums between forward and backward. Otherwise forward
of all microbatches runs once without gradients before the step, and draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autotp.ops.random_state import random_state_of, set_random_state
from autotp.passes.emit.bind import bind


class RestOfLoss:
    """What a batch adds to its loss beside the losses of its parts, and to their gradients.

    Attributes:
        value: what the whole batch adds to its loss; None before the sums of all parts are known.
    """

    def __init__(
        self, functions: fx.Graph, device: torch.device, replicas: dist.ProcessGroup | None, parts: int
    ) -> None:
        """Args:
        functions: as in `Totals`.
        replicas: the process group of the replicas; None if their sums are among the parts.
        parts: the number of parts that give sums here before backward; 1 if a part may do so in its own forward.
        """
        self._functions, self._device = fx.GraphModule(nn.Module(), bind(functions, device, {})), device
        self._replicas, self._parts = replicas, parts
        self._sums: list[Sequence[Tensor]] = []
        self._gradients: list[Tensor | None] = []
        self.value: Tensor | None = None

    def add(self, loss: Tensor, sums: Sequence[Tensor], at_once: bool) -> Tensor:
        """Returns the loss of a part, from which backward starts. Its value is the same.

        Args:
            sums: the sums over the rows of this part.
            at_once: whether this is the only part.
        """
        if self.value is None:
            self._sums.append([part.detach() for part in sums])
            if not at_once:
                return loss
            self.sum_up()
        for part, gradient in zip(sums, self._gradients, strict=True):
            if gradient is not None and part.requires_grad:
                loss = loss + (gradient * (part - part.detach())).sum().to(loss.dtype)
        return loss

    def sum_up(self) -> Tensor:
        """Computes the value, and its gradient for each sum, from the sums of all parts; returns the value."""
        # torch's schedules have run the stage on zeros before, to learn the shapes that it sends. A number of rows may
        # be on the host; what comes back stays on the device, for which nobody waits.
        parts = self._sums[-self._parts :]
        total = torch.stack(
            [torch.cat([x.reshape(-1).to(self._device, torch.float64) for x in sums]) for sums in parts]
        ).sum(0)
        if self._replicas is not None and self._replicas.size() > 1:
            dist.all_reduce(total, group=self._replicas)
        pieces = zip(total.split([x.numel() for x in parts[0]]), parts[0], strict=True)
        sums = [piece.view(x.shape).to(x.dtype) for piece, x in pieces]
        floating = [x.requires_grad_() for x in sums if x.is_floating_point()]
        with torch.enable_grad():
            (value,) = self._functions(*sums)
            gradients = iter(torch.autograd.grad(value, floating, allow_unused=True) if value.requires_grad else ())
        self._gradients = [next(gradients, None) if x.is_floating_point() else None for x in sums]
        self.value = value.detach()
        return self.value


@contextmanager
def first_pass(device: torch.device) -> Iterator[None]:
    """A region for forward of all parts, without gradients; afterwards the random numbers are drawn again."""
    state = random_state_of(device)
    with torch.no_grad():
        yield
    set_random_state(device, state)
