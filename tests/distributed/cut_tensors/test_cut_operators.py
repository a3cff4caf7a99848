"""cut_operators: what a function asks of a part, by its name; an unknown one asks for values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotp.distributed.cut_tensors.cut_operators import Access, access_of

GETTERS = {name: getattr(Tensor, name).__get__ for name in ("grad", "shape", "T", "mH", "data", "real", "is_leaf")}
CASES: list[tuple[Any, Access]] = [
    (Tensor.mul_, Access.VALUES),
    (Tensor.__rmul__, Access.VALUES),
    (Tensor.__imul__, Access.VALUES),
    (torch._foreach_addcdiv_, Access.VALUES),
    (torch.zeros_like, Access.VALUES),
    (Tensor.bfloat16, Access.VALUES),
    (GETTERS["data"], Access.VALUES),
    (GETTERS["real"], Access.VALUES),
    (Tensor.numel, Access.SIZE),
    (Tensor.__len__, Access.SIZE),
    (GETTERS["shape"], Access.SIZE),
    (GETTERS["grad"], Access.GRADIENT),
    (torch.autograd.grad, Access.GRADIENTS),
    (Tensor.register_hook, Access.HOOK),
    (Tensor.data.__set__, Access.SET),  # type: ignore[attr-defined]
    (Tensor.grad.__set__, Access.SET),  # type: ignore[union-attr]
    (Tensor.grad.__delete__, Access.ABOUT),  # type: ignore[union-attr]
    (GETTERS["is_leaf"], Access.ABOUT),
    (Tensor.dim, Access.ABOUT),
    (Tensor.backward, Access.ABOUT),
    (torch._fused_adamw_, Access.ABOUT),
    (dist.all_reduce, Access.REPLICAS),
    (dist.broadcast, Access.REPLICAS),
    (dist.send, Access.REPLICAS),
    (torch.sum, Access.VALUES),
    (Tensor.norm, Access.VALUES),
    (torch._foreach_norm, Access.VALUES),
    (Tensor.__getitem__, Access.VALUES),
    (Tensor.__matmul__, Access.VALUES),
    (Tensor.argmax, Access.VALUES),
    (GETTERS["T"], Access.VALUES),
    (GETTERS["mH"], Access.VALUES),
]


@pytest.mark.parametrize(("func", "kind"), CASES, ids=lambda case: str(getattr(case, "__name__", case)))
def test_kind_of_says_what_a_function_asks(func: Any, kind: Access) -> None:
    assert access_of(func) is kind


def test_a_function_of_a_user_uses_the_whole() -> None:
    def total(x: Tensor) -> Tensor:
        return x

    assert access_of(total) is Access.VALUES
