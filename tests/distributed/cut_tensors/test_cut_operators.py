"""cut_operators: what a function asks of a part, by its name; an unknown one asks for values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotp.distributed.cut_tensors.cut_operators import Kind, kind_of

GETTERS = {name: getattr(Tensor, name).__get__ for name in ("grad", "shape", "T", "mH", "data", "real", "is_leaf")}
CASES: list[tuple[Any, Kind]] = [
    (Tensor.mul_, Kind.VALUES),
    (Tensor.__rmul__, Kind.VALUES),
    (Tensor.__imul__, Kind.VALUES),
    (torch._foreach_addcdiv_, Kind.VALUES),
    (torch.zeros_like, Kind.VALUES),
    (Tensor.bfloat16, Kind.VALUES),
    (GETTERS["data"], Kind.VALUES),
    (GETTERS["real"], Kind.VALUES),
    (Tensor.numel, Kind.SIZE),
    (Tensor.__len__, Kind.SIZE),
    (GETTERS["shape"], Kind.SIZE),
    (GETTERS["grad"], Kind.GRADIENT),
    (torch.autograd.grad, Kind.GRADIENTS),
    (Tensor.register_hook, Kind.HOOK),
    (Tensor.data.__set__, Kind.SET),  # type: ignore[attr-defined]
    (Tensor.grad.__set__, Kind.SET),  # type: ignore[union-attr]
    (Tensor.grad.__delete__, Kind.ABOUT),  # type: ignore[union-attr]
    (GETTERS["is_leaf"], Kind.ABOUT),
    (Tensor.dim, Kind.ABOUT),
    (Tensor.backward, Kind.ABOUT),
    (torch._fused_adamw_, Kind.ABOUT),
    (dist.all_reduce, Kind.REPLICAS),
    (dist.broadcast, Kind.REPLICAS),
    (dist.send, Kind.REPLICAS),
    (torch.sum, Kind.VALUES),
    (Tensor.norm, Kind.VALUES),
    (torch._foreach_norm, Kind.VALUES),
    (Tensor.__getitem__, Kind.VALUES),
    (Tensor.__matmul__, Kind.VALUES),
    (Tensor.argmax, Kind.VALUES),
    (GETTERS["T"], Kind.VALUES),
    (GETTERS["mH"], Kind.VALUES),
]


@pytest.mark.parametrize(("func", "kind"), CASES, ids=lambda case: str(getattr(case, "__name__", case)))
def test_kind_of_says_what_a_function_asks(func: Any, kind: Kind) -> None:
    assert kind_of(func) is kind


def test_a_function_of_a_user_uses_the_whole() -> None:
    def total(x: Tensor) -> Tensor:
        return x

    assert kind_of(total) is Kind.VALUES
