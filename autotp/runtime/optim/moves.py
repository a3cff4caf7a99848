"""Moves boxes of tensors between ranks: one all-to-all for all boxes of a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autotp.distributed.mesh import Mesh
from autotp.ops.collectives import communicate
from autotp.runtime.optim.owners import Move

View = Callable[[Move], Tensor]
"""Returns the box of a move, as a view of a tensor of this rank."""


def exchange(moves: Sequence[Move], dtypes: Sequence[torch.dtype], mesh: Mesh, source: View, target: View) -> None:
    """Copies the box at the source of each move to the box at its target. All ranks of `mesh` call this together.

    Args:
        moves: those from and to this rank, in the same order on both ranks of a move.
        dtypes: those of which some box moves between ranks, in the same order on all ranks.
        source: returns the box of a move from this rank.
        target: returns the box of a move to this rank.
    """
    within = [move for move in moves if move.source == move.target]
    sent = [(move, source(move)) for move in moves if move.source == mesh.rank != move.target]
    got = [(move, target(move)) for move in moves if move.target == mesh.rank != move.source]
    for dtype in dtypes:
        of_dtype = [[(move, box) for move, box in some if box.dtype is dtype] for some in (sent, got)]
        _between(of_dtype[0], of_dtype[1], dtype, mesh)
    for move in within:
        target(move).copy_(source(move))


def _between(
    sent: Sequence[tuple[Move, Tensor]], got: Sequence[tuple[Move, Tensor]], dtype: torch.dtype, mesh: Mesh
) -> None:
    """Sends and receives boxes of one dtype in one collective."""
    sent = sorted(sent, key=lambda pair: pair[0].target)
    got = sorted(got, key=lambda pair: pair[0].source)
    out = torch.empty(sum(box.numel() for _, box in sent), dtype=dtype, device=mesh.device)
    for (_, box), place in zip(sent, out.split([box.numel() for _, box in sent]), strict=True):
        place.view(box.shape).copy_(box)
    to, of = [0] * mesh.size, [0] * mesh.size
    for move, box in sent:
        to[move.target] += box.numel() * dtype.itemsize
    for move, box in got:
        of[move.source] += box.numel() * dtype.itemsize
    # As bytes: backends lack some dtypes.
    received = communicate("all_to_all_single", out.view(torch.uint8), of, to, mesh.group).view(dtype)
    for (_, box), part in zip(got, received.split([box.numel() for _, box in got]), strict=True):
        box.copy_(part.view(box.shape))
