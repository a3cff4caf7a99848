"""work: the operators that a piece of code runs, with what their price needs, and their seconds on a device.

It sees what a device would run, below autograd. The tensors may be fake: nothing is computed then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.costs.hardware import Hardware
from autotp.costs.links import RankGroup, collective_seconds
from autotp.costs.operators import Op, Touch, arithmetic_of, is_free, kind_of, work_of
from autotp.costs.roofline import op_seconds

COLLECTIVES = {
    "all_reduce": "all-reduce", "all_reduce_coalesced": "all-reduce",
    "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}  # fmt: skip
"""torch's name of a functional collective -> its usual name."""


NO_RANKS: Mapping[str, int] = MappingProxyType({})


class Work(TorchDispatchMode):
    """A mode that adds up the seconds of operators and of collectives, as if nothing ran beside them.

    Attributes:
        seconds: of all operators so far, with those of collectives.
        flops: floating-point operations of products so far.
        collectives: the number of collectives so far.
    """

    keeps_no_tensor = True

    def __init__(self, device: Hardware) -> None:
        super().__init__()
        self.device, self.seconds, self.flops, self.collectives = device, 0.0, 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        before, after = nested_tensors((args, kwargs)), nested_tensors(results)
        if func.namespace == "_c10d_functional":
            self._communicate(func, before, after, args)
        elif not is_free(func) and not _is_view(func, before, after):
            self._compute(func, before, after, args, kwargs, results)
        return results

    def _communicate(self, func: Any, before: list[Tensor], after: list[Tensor], args: Any) -> None:
        name = func.overloadpacket.__name__.rstrip("_")
        if name not in COLLECTIVES:  # A wait.
            return
        ranks = _resolve_process_group(args[-1]).size()
        # The whole tensor is the result of an all-gather, and the operand of a reduce-scatter.
        nbytes = max(sum(map(bytes_moved, before)), sum(map(bytes_moved, after)))
        group = RankGroup(size=ranks, stride=1)
        self.seconds += collective_seconds(COLLECTIVES[name], nbytes, group, self.device)
        self.collectives += 1

    def _compute(self, func: Any, before: list[Tensor], after: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        shape, flops, share = work_of(func, args, kwargs, out)
        op = Op(
            name=func.overloadpacket.__name__, kind=kind_of(func), phase="forward", shape=shape, flops=flops,
            share=share, reads=tuple(Touch(0, bytes_moved(x)) for x in before),
            writes=tuple(Touch(0, bytes_moved(x)) for x in after), dtype=(after or before)[0].dtype,
            arithmetic=arithmetic_of(func.overloadpacket, kwargs),
        )  # fmt: skip
        self.seconds += op_seconds(op, self.device)
        self.flops += flops


def _is_view(func: Any, before: list[Tensor], after: list[Tensor]) -> bool:
    """True for an operator that only makes views, or nothing."""
    memories = {x.untyped_storage()._cdata for x in before}
    return not func._schema.is_mutable and all(x.untyped_storage()._cdata in memories for x in after)


def nested_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts, as arguments and results of operators are, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [x for part in parts for x in nested_tensors(part)]


def bytes_moved(x: Tensor) -> int:
    """Returns the bytes that an operator moves for a tensor: an expanded tensor is read once."""
    return min(x.nbytes, x.untyped_storage().nbytes())


@contextmanager
def without_processes(groups: Mapping[str, int], ranks: Mapping[str, int] = NO_RANKS) -> Iterator[None]:
    """A region in which functional collectives on `meta` and on fake tensors find groups of these sizes.

    Nothing is sent: torch computes the shapes of collectives on `meta` without asking the group.

    Args:
        groups: name of a process group -> its size.
        ranks: name of a process group -> the rank of this process in it; the first by default.
    """
    with ExitStack() as stack:
        for name, size in groups.items():
            rank = ranks.get(name, 0)
            group = ProcessGroup(rank, size)  # type: ignore[call-arg]
            fake = FakeProcessGroup._create_internal(rank, size)
            for device in ("meta", "cpu", "cuda"):
                group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, fake)
            _register_process_group(name, group)  # type: ignore[arg-type]
            stack.callback(_forget, name, group)  # It holds the group: torch's registry does not.
        yield


def _forget(name: str, _: ProcessGroup) -> None:
    _unregister_process_group(name)  # type: ignore[arg-type]
