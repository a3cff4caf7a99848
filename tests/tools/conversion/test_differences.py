"""Two checkpoints: what one has alone, and what has another shape, dtype or value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autotp.integrations.transformers.files.tensor_sources import InMemory
from autotp.tools.conversion.content import Content
from autotp.tools.conversion.differences import Unlike, differences

ONE = torch.tensor([1.0, 2.0, float("nan"), float("inf")])


def content(**tensors: Tensor) -> Content:
    return Content("torch", {name: InMemory(tensor) for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (ONE.clone(), None),
        (torch.tensor([1.0, 2.5, float("nan"), float("inf")]), ("values", 0.5, 1)),
        (torch.tensor([1.0, float("nan"), float("nan"), 3.0]), ("values", math.inf, 2)),
        (ONE.double(), ("dtype", 0.0, 0)),
        (ONE.double() * 1.5, ("values", 1.0, 2)),
        (ONE[:3], ("shape", 0.0, 0)),
        (ONE[:, None], ("shape", 0.0, 0)),
    ],
    ids=["same", "value", "nan", "dtype", "both", "shorter", "shape"],
)
def test_differences_name_dtype_shape_and_largest_difference_of_a_tensor(
    other: Tensor, expected: tuple[str, float, int] | None
) -> None:
    found = [(it.what, it.largest, it.count) for it in differences(content(x=ONE), content(x=other))]
    assert found == ([] if expected is None else [expected])


def test_differences_within_atol_count_as_equal() -> None:
    other = torch.tensor([1.25, 2.5, float("nan"), float("inf")])

    def found(atol: float) -> list[tuple[float, int]]:
        return [(it.largest, it.count) for it in differences(content(x=ONE), content(x=other), atol)]

    assert found(0.0) == [(0.5, 2)]
    assert found(0.25) == [(0.5, 1)]
    assert found(0.5) == []
    assert [it.what for it in differences(content(x=ONE), content(x=other.double()), 0.5)] == ["dtype"]


def test_differences_see_integers_that_float64_rounds_alike() -> None:
    one, two = content(x=torch.tensor([2**53])), content(x=torch.tensor([2**53 + 1]))
    assert [it.count for it in differences(one, two)] == [1]


def test_differences_name_tensors_that_only_one_checkpoint_has() -> None:
    one, two = content(x=ONE, y=ONE), content(x=ONE, z=torch.ones(2, dtype=torch.int64))
    assert list(differences(one, two)) == [
        Unlike("y", "only in the first", "float32 [4]", ""), Unlike("z", "only in the second", "", "int64 [2]"),
    ]  # fmt: skip


def test_differences_compare_booleans_as_numbers() -> None:
    one, two = content(x=torch.tensor([True, False])), content(x=torch.tensor([True, True]))
    assert [(it.what, it.largest, it.count) for it in differences(one, two)] == [("values", 1.0, 1)]


def test_differences_compare_optimizer_states_only_if_both_have_one() -> None:
    moment = {"optimizer|x|exp_avg": InMemory(ONE)}
    one, two = (
        Content("training", {}, state=moment),
        Content("training", {}, state={"optimizer|x|exp_avg": InMemory(-ONE)}),
    )
    assert [it.name for it in differences(one, two)] == ["optimizer|x|exp_avg"]
    assert list(differences(one, Content("torch", {}))) == []


def test_differences_are_in_the_order_of_the_checkpoints() -> None:
    """A set of names has another order in each process."""
    firsts, seconds = [f"first.{i}" for i in range(8)], [f"second.{i}" for i in range(8)]
    all_differences = differences(content(**dict.fromkeys(firsts, ONE)), content(**dict.fromkeys(seconds, ONE)))
    assert [difference.name for difference in all_differences] == [*firsts, *seconds]
