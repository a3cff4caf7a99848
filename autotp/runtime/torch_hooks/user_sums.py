"""Tells of a sum in user code over the ranks of one model that have the same tensor: a loss, or a count of tokens.

On one device such code does not sum, or sums over replicas. Over the ranks of one model each row counts once a rank. A
mean is right all the same, since the number of ranks divides it; a counter or the statistics of a codebook are not. So
it is a warning, with the line.

NOTE [No collective of our own]
A rank may have no parallel model any more while another still has one: Python frees a model when it collects. A
collective that only some ranks make would hang. So a rank writes a checksum of its tensor into the store before the
sum. When a rank has the sum, every other one has begun, and has written its own checksum, if it compares at all. So
nobody waits for a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from autotp.attached import Counts, attached, first_time
from autotp.distributed.cut_tensors.cut_parameter import tell_user
from autotp.distributed.fingerprint import checksum
from autotp.distributed.live_models import Undo, models
from autotp.distributed.peers.store_gather import texts_so_far, write_text
from autotp.distributed.replica_check import common_ranks
from autotp.groups.process_group import replace_methods
from autotp.runtime.holdings import holdings_of
from autotp.source_location import calling_frame, is_users
from autotp.torch_internals import SUMS_OF_USERS

OF_USERS = "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"
"""Modules of torch that call these methods for their caller."""
COMPARED = 16
"""The number of sums of user code in a group that are compared."""
SUMS = "sums of user code that were compared"
"""What is counted for a process group."""


def install() -> Undo:
    """Compares what is summed in the first sums of user code in each process group; returns the undo."""
    return replace_methods(SUMS_OF_USERS, _compares)


def _compares(method: Any) -> Any:
    def call(group: ProcessGroup, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        user = None
        if attached(group, Counts)[SUMS] < COMPARED and _is_sum_at_once((*args, *kwargs.values())):
            user = _user(calling_frame())
        if user is None or not _can_be_compared(tensors):
            return method(group, tensors, *args, **kwargs)
        return _compared_sum(lambda: method(group, tensors, *args, **kwargs), group, tensors, user)

    return call


def _is_sum_at_once(arguments: Sequence[Any]) -> bool:
    """True for the arguments of a sum that its caller waits for."""
    options = next((x for x in arguments if hasattr(x, "reduceOp")), None)
    return options is not None and options.reduceOp == ReduceOp.SUM and not options.asyncOp


def _can_be_compared(tensors: Sequence[Tensor]) -> bool:
    """True for plain tensors. (Of cut tensors such a sum is refused.) A CUDA graph that is recorded cannot wait."""
    recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not recorded and all(type(x) in (Tensor, nn.Parameter) for x in tensors)


def _user(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of user code that called torch's function; None if torch or autotp themselves sum."""
    while frame is not None and frame.f_globals.get("__name__") in OF_USERS:
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def _compared_sum(run: Callable[[], Any], group: ProcessGroup, tensors: Sequence[Tensor], user: FrameType) -> Any:
    """Sums, and warns if ranks of one model had the same tensors: NOTE [No collective of our own]."""
    number = attached(group, Counts)[SUMS] = attached(group, Counts)[SUMS] + 1
    ranks_of_group = dist.get_process_group_ranks(group)
    # Of several models, the one that shares most ranks with the group: a warning names these.
    shared = [common_ranks(ranks_of_group, holdings_of(model, "").place) for model in models()]
    ranks = max(shared, key=len, default=[])
    # Zeros are the same on all ranks without any mistake.
    if len(ranks) < 2 or not any(bool((x != 0).any()) for x in tensors):
        return run()
    text, names = str([checksum(x) for x in tensors]), [f"{group.group_name}/{number}/{rank}" for rank in ranks]
    write_text(names[ranks.index(dist.get_rank())], text)
    work = run()
    work.wait()
    # On a GPU `wait` returns before the sum is there, so before all ranks have written their texts.
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    if texts_so_far(names) == [text] * len(ranks):
        _tell(ranks, user)
    return work


def _tell(ranks: Sequence[int], user: FrameType) -> None:
    if not first_time(user.f_code, ("user_sums", user.f_code.co_filename, user.f_lineno)):
        return
    tell_user(
        f"this sum is over ranks {ranks} of one tensor-parallel model, which have the same tensor: it counts each row "
        "once a rank. It is right if you divide by the number of ranks, or if each rank counts what is its own. "
        'Otherwise use the group of the replicas, group=mesh["dp"].get_group(), or no sum without replicas. This '
        "warning comes once for a line",
        user,
    )
