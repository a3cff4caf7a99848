"""The optimizers of a training, as the one that a checkpoint is of: often Muon for matrices, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autotp.distributed.cut_tensors.cut_parameter import hold_parts
from autotp.errors import Error
from autotp.runtime.optim.whole_matrices import OF_RANK, WholeMatrices


@dataclass(frozen=True)
class Optimizers:
    """Optimizers of different parameters.

    Attributes:
        each: the optimizers, in the order in which the user gave them; none for evaluation.
    """

    each: tuple[Optimizer, ...]

    @property
    def name(self) -> str:
        """The names of their classes."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[Any]:
        """The parameters of all."""
        return [p for group in self.param_groups for p in group["params"]]

    def defaults(self) -> Iterator[dict[str, Any]]:
        """Yields for each group the default options of its optimizer."""
        for optimizer in self.each:
            for _ in optimizer.param_groups:
                yield optimizer.defaults

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """Returns the state of a parameter, empty if it has none."""
        # `get`, as `optimizer.state[parameter]` adds an empty state.
        return next((optimizer.state[parameter] for optimizer in self.each if optimizer.state.get(parameter)), {})

    def steps_whole(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is of the whole."""
        return self._owns(parameter) is not None

    def is_elsewhere(self, parameter: Tensor) -> bool:
        """Whether another rank has the state of a parameter."""
        return self._owns(parameter) is False

    def _owns(self, parameter: Tensor) -> bool | None:
        for optimizer in self.each:
            # `is`: `in` would compare the elements of tensors.
            if isinstance(optimizer, WholeMatrices) and any(
                parameter is p for g in optimizer.param_groups for p in g["params"]
            ):
                return optimizer.owns(parameter)
        return None

    def choose_owners(self) -> None:
        """Chooses the owners of whole matrices. Call it on every rank."""
        for optimizer in self.each:
            if isinstance(optimizer, WholeMatrices):
                optimizer.choose_owners()

    def replace_states(self, states: dict[Any, dict[str, Any]]) -> None:
        """Replaces the states of all parameters; of cut ones they behave as wholes."""
        for optimizer in self.each:
            optimizer.state.clear()
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if states[parameter]:
                    optimizer.state[parameter].update(states[parameter])
            # What was read is this rank's part, in plain tensors.
            hold_parts(optimizer, plain_are_parts=True)

    def beside(self) -> list[tuple[str, Any]]:
        """Returns what optimizers keep that is neither an option nor a parameter's state, with the optimizer's name."""
        entries = []
        for optimizer in self.each:
            parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            keys: list[Any] = [key for key in optimizer.state if id(key) not in parameter_ids]
            keys += [key for key in optimizer.state_dict() if key not in ("state", "param_groups", OF_RANK)]
            entries += [(type(optimizer).__name__, key) for key in keys]
        return entries


def optimizers_of(argument: Any) -> Optimizers:
    """Returns the optimizers that a user gave: one, several in a list, or None.

    Raises:
        Error: something else was given, or two optimizers have the same parameter.
    """
    every: Sequence[Any] = argument if isinstance(argument, list | tuple) else () if argument is None else (argument,)
    for optimizer in every:
        if not isinstance(optimizer, Optimizer):
            problem = f"{type(optimizer).__name__} is no optimizer"
            raise Error(problem, fix="autotp.full_state_dict(trainer) for the parameters alone")
    optimizers = Optimizers(tuple(every))
    if len({id(p) for p in optimizers.parameters}) < len(optimizers.parameters):
        raise Error("two optimizers have the same parameter", fix="each parameter in one optimizer")
    return optimizers
