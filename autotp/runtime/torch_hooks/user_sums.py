"""Tells of a sum in user code over the ranks of one model that have the same tensor: a loss, or a count of tokens.

On one device such code does not sum, or sums over replicas. Over the ranks of one model each row counts once a rank. A
mean is right all the same, since the number of ranks divides it; a counter or the statistics of a codebook are not. So
it is a warning, with the line.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from autotp.distributed.consistency import checksum
from autotp.distributed.cut_tensors.cut_parameter import tell_user
from autotp.distributed.live_models import Undo, models
from autotp.distributed.replica_check import common_ranks
from autotp.runtime.holdings import holdings_of
from autotp.source_location import is_users

SUMS = "allreduce", "allreduce_coalesced", "reduce"
"""The methods of a process group that may sum tensors of a list. torch's functions for sums call them."""
OF_USERS = "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"
"""Modules of torch that call these methods for their caller."""
COMPARED = 16
"""The number of sums of user code in a group that are compared, counted alike on all ranks of the group."""
_compared: Counter[str] = Counter()
_told: set[tuple[str, int]] = set()


def install() -> Undo:
    """Compares what is summed in the first sums of user code in each process group; returns the undo."""
    torch_class: Any = ProcessGroup
    before = {name: vars(torch_class)[name] for name in SUMS}
    for name in SUMS:
        setattr(torch_class, name, _compares(getattr(torch_class, name)))

    def undo() -> None:
        for name, method in before.items():
            setattr(torch_class, name, method)

    return undo


def _compares(method: Any) -> Any:
    @wraps(method)
    def call(group: ProcessGroup, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        is_sum = any(getattr(options, "reduceOp", None) == ReduceOp.SUM for options in (*args, *kwargs.values()))
        user = _user(sys._getframe(1)) if is_sum and _compared[group.group_name] < COMPARED else None
        if user is not None and not _is_recorded():
            _compare(group, tensors, user)
        return method(group, tensors, *args, **kwargs)

    return call


def _user(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of user code that called torch's function; None if torch or autotp themselves sum."""
    while frame is not None and frame.f_globals.get("__name__") in OF_USERS:
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def _compare(group: ProcessGroup, tensors: Sequence[Tensor], user: FrameType) -> None:
    """Warns if ranks of one model have the same tensors. (Of cut tensors such a sum is refused.)"""
    if any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return
    theirs = dist.get_process_group_ranks(group)
    ranks = [common_ranks(theirs, holdings_of(model, "").place) for model in models()]
    shared = max(ranks, key=len, default=[])
    if len(shared) < 2:
        return
    _compared[group.group_name] += 1
    mine = [checksum(x) if bool((x != 0).any()) else -1 for x in tensors]
    every = _gathered(group, mine, len(theirs), tensors[0].device)
    line = user.f_code.co_filename, user.f_lineno
    alike = {tuple(every[theirs.index(rank)]) for rank in shared}
    if len(alike) == 1 and any(x >= 0 for x in mine) and line not in _told:
        _told.add(line)
        tell_user(
            f"this sum is over ranks {shared} of one tensor-parallel model, which have the same tensor: it counts each "
            "row once a rank. It is right if you divide by the number of ranks, or if each rank counts what is its "
            'own. Otherwise use the group of the replicas, group=mesh["dp"].get_group(), or no sum without replicas. '
            "This warning comes once for a line",
            user,
        )


def _gathered(group: ProcessGroup, mine: list[int], size: int, device: torch.device) -> list[list[int]]:
    """Returns each rank's numbers."""
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(size)]
    group.allgather([received], [sent]).wait()
    return [x.tolist() for x in received]


def _is_recorded() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
