"""on_meta: results have the sizes that torch computes; those of operands that are alike are computed once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autotp.tools.estimation.counts import on_meta
from autotp.tools.estimation.counts.on_meta import call

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sizes(found: Any) -> Any:
    every = [found] if isinstance(found, Tensor) else found
    return [x if x is None else (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in every]


X = meta(2, 3, 4)
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mul": (aten.mul.Tensor, (X, X.transpose(0, 1).transpose(0, 1)), {}),
    "promotion": (aten.add.Tensor, (X, meta(4, dtype=torch.float64)), {"alpha": 2}),
    "strided": (aten.mul.Tensor, (X.transpose(0, 2), 2.0), {}),
    "integers": (aten.add.Tensor, (meta(3, dtype=torch.int64), 1), {}),
    "floats": (aten.add.Tensor, (meta(3, dtype=torch.int64), 1.0), {}),
    "lists": (aten.cat.default, ([X, X], -1), {}),
    "several": (aten.native_layer_norm.default, (X, [4], meta(4), None, 1e-5), {}),
    "masked": (
        aten.native_layer_norm_backward.default,
        (X, X, [4], meta(2, 3, 1), meta(2, 3, 1), meta(4), None, [True, True, False]), {},
    ),
    "dtype": (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_have_the_sizes_of_torch(case: str) -> None:
    func, args, kwargs = CASES[case]
    expected = sizes(func(*args, **kwargs))
    first, again = call(func, args, kwargs), call(func, args, kwargs)
    assert sizes(first) == sizes(again) == expected
    memory = [x.untyped_storage()._cdata for found in (first, again) for x in ([found] if case != "several" else found)
              if isinstance(x, Tensor)]  # fmt: skip
    assert len(set(memory)) == len(memory)


def test_sizes_are_computed_once_for_operands_that_are_alike() -> None:
    on_meta._sizes.cache_clear()
    for _ in range(3):
        call(aten.mul.Tensor, (meta(5, 7), meta(5, 7)), {})
    assert on_meta._sizes.cache_info()[:2] == (2, 1)
    call(aten.mul.Tensor, (meta(7, 5).t(), meta(5, 7)), {})  # Other strides.
    call(aten.mul.Tensor, (meta(5, 7), 1), {})
    call(aten.mul.Tensor, (meta(5, 7), 1.0), {})  # Equal, and of another type.
    assert on_meta._sizes.cache_info().misses == 4


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (X, [6, 4])),
        (aten.add_.Tensor, (meta(3), 1)),
        (aten.split_with_sizes.default, (X, [1, 1], 0)),
        (aten.mul.Tensor, (torch.ones(2), torch.ones(2))),
        (aten.mul.Tensor, (meta(2, dtype=torch.complex64).conj(), 2)),
    ],
    ids=["view", "written", "views", "not-on-meta", "conjugated"],
)
def test_operators_with_views_or_writes_run(func: Any, args: tuple[Any, ...]) -> None:
    """Views share memory with their operand, and a result that is written is the operand itself."""
    on_meta._sizes.cache_clear()
    found = call(func, args, {})
    assert on_meta._sizes.cache_info().misses == 0
    assert sizes(found) == sizes(func(*args))
    if func is aten.add_.Tensor:
        assert found is args[0]
