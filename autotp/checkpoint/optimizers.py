"""The optimizers of a training, as the one that a checkpoint is of: often Muon for matrices, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autotp.distributed.cut_tensors.cut_parameter import hold_parts
from autotp.errors import Error
from autotp.runtime.torch_hooks.optimizer_state import OF_RANK, OwnedStates
from autotp.training.low_memory.optimizer import LowMemory


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

    def kept(self, parameter: Any, key: str, state: Any) -> Any:
        """Returns what its optimizer keeps of a state that was read: of `low_memory` in fewer bits, or on the host."""
        for optimizer in (x for x in self.each if isinstance(x, LowMemory) and parameter in x.groups_by_parameter()):
            return optimizer.taken(parameter, key, state)
        return state

    @property
    def owned(self) -> list[OwnedStates]:
        """Those that keep the state of a parameter whole, on its owner."""
        return [optimizer for optimizer in self.each if isinstance(optimizer, OwnedStates)]

    def owner(self, parameter: Tensor) -> int | None:
        """Returns the rank that has the whole state of a parameter; None if each rank has the state of its part."""
        owners = [optimizer.owner(parameter) for optimizer in self.owned]
        return next((rank for rank in owners if rank is not None), None)

    def choose_owners(self) -> None:
        """Chooses the owners of states. Call it on every rank."""
        for optimizer in self.owned:
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
