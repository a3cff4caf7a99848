"""How many steps optimizers took between two calls of a model: ranks that hold it together take the same number.

The ranks of a trainer compare it in each call (`step_consistency.py`): the stages of a pipeline share no parameter that
would tell them. For other parallel models it is a count of `in_step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from autotp.attached import attached, attached_if_any
from autotp.distributed.peers.in_step import count_step
from autotp.runtime.holdings import HasHoldings
from autotp.runtime.module import ParallelModule, executable_of

NOTHING_TO_STEP, NEVER = -2, -1
"""In place of a number of steps: a rank trains no parameter; a rank never stepped one of its parameters."""


class StepsTaken(WeakKeyDictionary[Optimizer, int]):
    """Optimizer of a trainer -> number of its steps since `count_anew`. (Not there before the first step.)"""


class SteppedModels:
    """The models that an optimizer has parameters of.

    Args:
        models: trainers, and parallel models.
    """

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        every = list(models)
        self.trainers = WeakSet(model for model in every if isinstance(model, HasHoldings))
        self.meshes = [executable_of(model).mesh for model in every if isinstance(model, ParallelModule)]

    def count(self, optimizer: Optimizer) -> None:
        """Counts a step of the optimizer."""
        for trainer in self.trainers:
            counts = attached(trainer, StepsTaken)
            counts[optimizer] = counts.get(optimizer, 0) + 1
        for mesh in self.meshes:
            count_step(mesh)


def steps_taken(trainer: nn.Module) -> int:
    """Returns the number of steps since `count_anew`, of the optimizer that took most; or why there is none."""
    if not any(parameter.requires_grad for parameter in trainer.parameters()):
        return NOTHING_TO_STEP
    steps = attached_if_any(trainer, StepsTaken)
    return NEVER if steps is None else max(steps.values(), default=0)


def count_anew(trainer: nn.Module) -> None:
    """Begins to count at 0: all ranks have taken the same number of steps. (Else each call says that they have not.)"""
    if (steps := attached_if_any(trainer, StepsTaken)) is not None:
        steps.clear()
