"""ExpertLoad: how many rows chose each expert in a step of training, on all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autotp.display.sheet import Table
from autotp.distributed.mesh import Mesh
from autotp.ops.collectives import reduce
from autotp.ops.experts.load import LoadNotes


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts in one step: of all replicas, stages and microbatches, the same on every rank.

    The tensors are on the rank's device. Only texts and floats wait for it.

    Attributes:
        rows: module of the experts -> [experts], int64: how many rows chose each. A token that chooses two experts is
            two rows.
        dropped: module of the experts -> [], int64: how many of these rows found no slot (`capacity=`).
    """

    rows: Mapping[str, Tensor]
    dropped: Mapping[str, Tensor]

    @cached_property
    def imbalance(self) -> dict[str, float]:
        """Module of the experts -> the rows of its busiest expert, divided by the mean; 0.0 without rows."""
        peaks = [rows.max() / rows.double().mean().clamp(min=1e-9) for rows in self.rows.values()]
        return dict(zip(self.rows, torch.stack(peaks).tolist(), strict=True)) if peaks else {}

    def table(self) -> Table:
        """Returns a row for each layer."""
        texts = []
        for name, rows in self.rows.items():
            fewest, mean, busiest = rows.min().item(), rows.double().mean().item(), rows.max().item()
            cells = (
                f"{fewest}",
                f"{mean:.1f}",
                f"{busiest}",
                f"{self.imbalance[name]:.2f}",
                f"{self.dropped[name].item()}",
            )
            texts.append((name, *cells))
        head = ("experts", "least rows", "mean", "most", "most/mean", "dropped")
        return Table(head, tuple(texts), ("note", "", "", "", "", ""))

    def __str__(self) -> str:
        table = self.table()
        return "\n".join("  ".join(row) for row in (table.head, *table.rows))


def load_of_step(
    numbers: Mapping[str, int], loads: Sequence[LoadNotes], microbatches: int, counted: Collection[str], ranks: Mesh
) -> ExpertLoad:
    """Returns the load of a step. All ranks call it.

    Args:
        numbers: module of experts -> their number, of all stages, the same on every rank.
        loads: what this rank's stages have counted.
        microbatches: the number of calls that count: torch's pipeline begins with a trial of shapes, which does not.
        counted: the modules that this rank counts: of ranks with the same rows one does.
    """
    sums = {name: torch.zeros(number + 1, dtype=torch.int64, device=ranks.device) for name, number in numbers.items()}
    for load in loads:
        for call in load.calls[-microbatches:]:
            for name, counts in zip(load.names, call, strict=True):
                if name in sums and name in counted:  # A batch of another kind may run other layers than the first.
                    sums[name] += counts
    all_counts = reduce(torch.cat(list(sums.values())), ranks.group)
    parts = dict(zip(sums, all_counts.split([len(x) for x in sums.values()]), strict=True))
    return ExpertLoad({name: x[:-1] for name, x in parts.items()}, {name: x[-1] for name, x in parts.items()})
