"""RankProgram: the graph of one rank, or of one of its stages, and where each of its operands comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autotp.errors import Error
from autotp.ops.experts.load import LoadNotes
from autotp.passes.check.gathers import check_gathers
from autotp.passes.emit.attach_parameters import ParameterPlace, ReadParameter, attach_parameters, value_at
from autotp.passes.emit.zero.gather_ahead import gather_ahead
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.rules.call import placeholders


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """A rank's graph after the stage emit, with its parameters, as `parallelize`, `distribute` and `verify` run it.

    They differ in the process groups, and in what reads a parameter: of this process, or of a simulated rank.

    Attributes:
        module: the graph, with each block as a submodule.
        parameters: placeholder -> first name of the parameter.
        sources: placeholder -> first name of a parameter or buffer, or a constant. A call gives all others.
        places: first name of a parameter or buffer -> where it is; none before `attached`.
        read: returns the tensor at a place.
        order: the placeholders of `module` with their sources, in order; None for what a call gives.
        received: of a stage, the placeholders for tensors from other stages.
        rows: the names of the parameters that the graph takes as rows, and gathers itself.
        read_rows: returns the rows at a place.
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    sources: Mapping[str, str | Tensor]
    places: Mapping[str, ParameterPlace] = field(default_factory=dict)
    read: ReadParameter = value_at
    order: Sequence[tuple[str, str | Tensor | None]] = ()
    received: Sequence[str] = ()
    rows: Collection[str] = ()
    read_rows: ReadParameter = value_at

    def attached(
        self,
        places: Mapping[str, ParameterPlace],
        owner_of: Callable[[str], nn.Module | None],
        read: ReadParameter = value_at,
    ) -> RankProgram:
        """Returns the graph for a model with its tensors at these places; arguments as for `attach_parameters`.

        A parameter that only one block reads is no operand any more: the block reads it when it is called.
        """
        module = attach_parameters(self.module, self.parameters, places, owner_of, read)
        order = [(name, self.sources.get(name)) for name in placeholders(module.graph)]
        return replace(self, module=module, places=places, read=read, order=order)

    def gathering(
        self, rows: Collection[str], dtype: torch.dtype | None, room: Room[ShardedUnit] | None
    ) -> RankProgram:
        """Returns the graph for replicas that keep rows of some parameters; arguments as for `gather_ahead`.

        Raises:
            Error: as `check_gathers`.
        """
        if not rows:
            return replace(self, rows=rows)
        module = gather_ahead(self.module, self.parameters, rows, dtype, room)
        check_gathers(module, self.module.graph, self.parameters, rows)
        return replace(self, module=module, rows=rows)

    @property
    def loads(self) -> list[LoadNotes]:
        """The counts of the rows that chose each expert."""
        return [node.target for node in self.module.graph.nodes if isinstance(node.target, LoadNotes)]

    @property
    def units(self) -> list[ShardedUnit]:
        """What is gathered together, and whose gradients are summed together."""
        return [part for part in self.module.children() if isinstance(part, ShardedUnit)]

    def units_with_rows(self) -> list[ShardedUnit]:
        """Returns `units`, which have the parameters of now."""
        for unit in self.units:
            unit.read([self.read_rows(self.places[name]) for name in unit.names])
        return self.units

    def begin_step(self) -> None:
        """Starts to gather what stays for a whole step: a stage gathers while the stages before it compute."""
        for load in self.loads:
            load.calls.clear()
        for unit in self.units_with_rows():
            if unit.room is None:
                unit.start((), *unit.rows)

    def sum_now(self, now: bool, complete: Callable[[Tensor], None] | None = None) -> None:
        """Says whether the next backward sums gradients over the replicas; else they are added up.

        Args:
            complete: called with each parameter whose gradient is then complete.
        """
        for unit in self.units:
            unit.sums_now, unit.sums.complete = now, complete

    def sum_the_rest(self) -> None:
        """Sums the gradients that no backward has summed, and waits for all sums."""
        for unit in self.units:
            unit.sum_gradients()
            unit.sums.finish()

    def end_step(self) -> None:
        """Empties the memory of all gathered parameters."""
        for unit in self.units:
            unit.forget()

    def operands(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the arguments of `module`.

        Args:
            given: placeholder -> value, of all that is neither a constant nor a parameter or buffer.

        Raises:
            Error: a parameter is sharded, and nothing has gathered it.
        """
        return [given[name] if source is None else self._value(source) for name, source in self.order]

    def value(self, name: str) -> Tensor:
        """Returns the present value of a placeholder that has a source. Errors as of `operands`."""
        return self._value(self.sources[name])

    def _value(self, source: str | Tensor) -> Tensor:
        if not isinstance(source, str):
            return source
        if source in self.rows:
            return self.read_rows(self.places[source])
        tensor = self.read(self.places[source])
        if isinstance(tensor, DTensor):
            raise Error(
                f"`{source}` is sharded where the graph reads it outside of its block",
                fix='parallelize(..., without="overlap"), or no fully_shard on its block',
            )
        return tensor

    def __call__(self, given: Mapping[str, Tensor]) -> Any:
        """Runs the graph. Arguments and errors as of `operands`."""
        return self.module(*self.operands(given))
