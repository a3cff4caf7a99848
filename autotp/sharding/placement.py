"""Placements: the type of a value on a mesh axis, each with the type of its gradient.

| placement | means                                                       | its gradient is |
|-----------|-------------------------------------------------------------|-----------------|
| Replicate | same on every rank, read by work that every rank does whole | Replicate       |
| Copied    | same on every rank, read by work of which each does a part  | Partial         |
| Partial   | the value is the sum over ranks                             | Copied          |
| Shard     | each rank has its part                                      | Shard           |
| Halo      | each rank has its part, and some positions before it        | Halo, summed    |

After the sharded automatic differentiation of JAX's `shard_map`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotp.sharding.axis import Axis
from autotp.sharding.grid import cut_key, same_cut

Reducer = Literal["sum", "max", "logsumexp", "logsumexp_mean", "logsumexp_sum"]
"""How the ranks' values make the whole one. "logsumexp": the logarithm of the sum of their exponentials.

"logsumexp_mean", "logsumexp_sum": so are all rows of the first dimension but the third. This one is a mean over what
the first one counts, or a sum.
"""
JOINED = "logsumexp", "logsumexp_mean", "logsumexp_sum"
"""The reducers that read the values of all ranks at once."""


@dataclass(frozen=True)
class Replicate:
    """Same on every rank, read by work that every rank does whole."""

    def text(self, axis: str) -> str:
        """Returns what is behind the type of such a value on the mesh axis `axis`."""
        return ""


@dataclass(frozen=True)
class Copied:
    """Same on every rank, read by work of which every rank does a part."""

    def text(self, axis: str) -> str:
        """Returns what is behind the type of such a value on the mesh axis `axis`."""
        return f"{{{axis}}}"


@dataclass(frozen=True)
class Partial:
    """The value is the sum over ranks, or another reduction: the maximum, or the logarithm of a sum of exponentials."""

    reducer: Reducer = "sum"

    def text(self, axis: str) -> str:
        """Returns what is behind the type of such a value on the mesh axis `axis`."""
        return f"{{+{axis}}}" if self.reducer == "sum" else f"{{{self.reducer} {axis}}}"


@dataclass(frozen=True, eq=False)
class Shard:
    """Each rank has its part of `axis`, in the dimension of the value that contains this axis."""

    axis: Axis

    def __eq__(self, other: object) -> bool:
        # Not `isinstance`: a StoredShard and a Shard of the same axis have gradients of different placements.
        return type(other) is type(self) and same_cut(self.axis, other.axis)

    def __hash__(self) -> int:
        return cut_key(self.axis)

    def text(self, axis: str) -> str:
        """Returns what is behind the size of the dimension that is cut on the mesh axis `axis`."""
        return f"@{axis}"


@dataclass(frozen=True, eq=False)
class StoredShard(Shard):
    """A stored parameter that is cut by a grid. Among the ranks that hold the same part, the part is Replicate.

    For a Shard by a grid it is Copied among them: each rank does a part of the work that reads it.
    """


@dataclass(frozen=True, eq=False)
class Halo:
    """Each rank has its part of `axis`, and the positions before it that its queries read, along dimension `dim`.

    Its gradient is a sum over the ranks that have a position.
    """

    axis: Axis
    dim: int

    def text(self, axis: str) -> str:
        """Returns what is behind the type of such a value on the mesh axis `axis`."""
        return f"{{halo {axis}}}"


Placement = Replicate | Copied | Partial | Shard | Halo
