"""cut_operators: what an operator does with a part, by its name; an operator of another name uses it as the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotp.distributed.cut_operators import Kind, kind_of

GETTERS = {name: getattr(Tensor, name).__get__ for name in ("grad", "shape", "T", "mH", "data", "real", "is_leaf")}
CASES: list[tuple[Any, Kind]] = [
    (Tensor.mul_, Kind.EACH),
    (Tensor.__rmul__, Kind.EACH),
    (Tensor.__imul__, Kind.EACH),
    (torch._foreach_addcdiv_, Kind.EACH),
    (torch.zeros_like, Kind.EACH),
    (Tensor.bfloat16, Kind.EACH),
    (GETTERS["data"], Kind.EACH),
    (GETTERS["real"], Kind.EACH),
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
    (dist.send, Kind.ABOUT),
    (torch.sum, Kind.WHOLE),
    (Tensor.norm, Kind.WHOLE),
    (torch._foreach_norm, Kind.WHOLE),
    (Tensor.__getitem__, Kind.WHOLE),
    (Tensor.__matmul__, Kind.WHOLE),
    (Tensor.argmax, Kind.WHOLE),
    (GETTERS["T"], Kind.WHOLE),
    (GETTERS["mH"], Kind.WHOLE),
]


@pytest.mark.parametrize(("func", "kind"), CASES, ids=lambda case: str(getattr(case, "__name__", case)))
def test_kinds(func: Any, kind: Kind) -> None:
    assert kind_of(func) is kind


def test_a_function_of_a_user_uses_the_whole() -> None:
    def total(x: Tensor) -> Tensor:
        return x

    assert kind_of(total) is Kind.WHOLE
