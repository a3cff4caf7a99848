"""differences: joined parts, copies, missing and undefined values against the whole."""

from __future__ import annotations

import math

import torch

from autotp.diagnostics.differences import Difference, descending, difference, largest, rank_tensors
from autotp.sharding.layout import Layout

WHOLE = torch.arange(12.0, dtype=torch.float64).view(4, 3)


def test_difference_of_copies_is_the_largest() -> None:
    other = WHOLE.clone()
    other[2, 1] += 0.5
    whole = Layout((4, 3))
    assert difference(WHOLE, [WHOLE, WHOLE], whole, 1.0) == 0
    assert difference(WHOLE, [WHOLE, other], whole, 2.0) == 0.25


def test_no_gradient_counts_as_zeros_only() -> None:
    whole = Layout((4, 3))
    assert difference(None, [None, torch.zeros(4, 3)], whole, 1.0) == 0
    assert difference(None, [torch.ones(4, 3)], whole, 1.0) == math.inf
    assert difference(WHOLE, [None], whole, 11.0) == 1


def test_difference_of_undefined_values_is_undefined() -> None:
    bad = WHOLE.clone()
    bad[0, 0] = math.nan
    whole = Layout((4, 3))
    assert difference(bad, [bad], whole, 1.0) == 0
    assert math.isnan(difference(WHOLE, [bad], whole, 1.0))
    rows = [Difference("a", 1.0), Difference("b", math.nan), Difference("c", math.inf)]
    assert sorted(rows, key=descending)[-1].name == "a"


def test_difference_of_another_shape_is_infinite() -> None:
    assert difference(WHOLE, [WHOLE[:2]], Layout((4, 3)), 1.0) == math.inf


def test_largest_is_the_scale_of_the_tensors() -> None:
    assert largest([torch.tensor([-3.0, 2.0]), torch.zeros(0)]) == 3 and largest([]) == largest([torch.zeros(2)]) == 1


def test_rank_tensors_have_parameters_and_buffers() -> None:
    model = torch.nn.BatchNorm1d(4)
    held = rank_tensors(model, {name: Layout((4,)) for name, _ in model.named_parameters()}, 1)
    assert set(held) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    held["weight"].data.zero_()
    assert model.weight.all() and held["weight"].requires_grad and not held["running_mean"].requires_grad
