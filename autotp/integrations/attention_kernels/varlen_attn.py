"""varlen_attn: attention of packed documents by torch's own function, as one operator of a graph.

    _varlen_attn(q, k, v, ends, ends, 9, 9, True, ...)                     made by torch.nn.attention.varlen.varlen_attn
    attention_kernel(q, k, v, ends, ends, ..., "torch_attn::_varlen_attn", "{'num_splits': None, ...}")

NOTE [Kernels that a machine lacks]
torch has its operator for GPUs only. When a model is analysed, and the operator is loaded, it gets this formula for
CPUs: a model that is not parallel runs there, too, and has gradients. On a GPU nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp.integrations.attention_kernels.kernel_operator import recorded_call
from autotp.rules.call import bound_arguments
from autotp.rules.registry import loaded_operator

NAME = "torch_attn::_varlen_attn"


class VarlenAsOperator(TorchFunctionMode):
    """A mode in which torch's operator is the one of all kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = loaded_operator(NAME)
        if op is not None and func in (op, op.overloadpacket):
            return _formula(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _formula(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what torch's operator returns: attention, its log-sum-exp, and the state of a generator that is unused.

    The kernel's log-sum-exp is of float32. In float64, which no kernel takes, it is not rounded: `verify` would see it.
    """
    output, totals = recorded_call(NAME, bound_arguments(loaded_operator(NAME), args, kwargs))  # type: ignore[arg-type]
    return output, totals, torch.zeros(2, dtype=torch.uint64, device=output.device)


def add_varlen_reference() -> None:
    """Makes the formula the operator for CPUs, once, if it is loaded. NOTE [Kernels that a machine lacks]"""
    op = loaded_operator(NAME)
    if op is not None and not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
        # Its own autograd calls a backward that is for GPUs only.
        torch.library.impl(NAME, ("CPU", "AutogradCPU"))(_formula)
