"""step_consistency: what the ranks compare of a step, and which of them must be alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotp.distributed.mesh import Mesh
from autotp.runtime.torch_hooks.optimizer_steps import NEVER
from autotp.training.step_consistency import (
    StepState,
    equal_replicas,
    frozen_checksums,
    step_state,
    unequal_replicas,
    with_rank_names,
)

X = torch.arange(6.0).view(3, 2)


def grid(pp: int, dp: int, tp: int) -> Any:
    """What is read of a DeviceMesh."""
    return SimpleNamespace(mesh=torch.arange(pp * dp * tp).view(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def state(*batch: Any, values: bool = True, frozen: tuple[str, ...] = ()) -> StepState:
    return step_state(True, frozen, batch, Mesh(), values)


def test_a_rank_that_cannot_take_its_batch() -> None:
    assert step_state(False, ["w"], None, Mesh(), True) == StepState(True, False, False, 0, NEVER, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ((X + 1, 2), "values"),
        ((X.double(), 2), "structure"),
        ((X, 3), "structure"),
        ((X, 2, None), "structure"),
        ((X[:2], 2), "structure"),
        ((X[:, :1], 2), "lengths"),
    ],
)
def test_what_differs(other: tuple[Any, ...], field: str) -> None:
    torch.manual_seed(1)
    one, two = state(X, 2), state(*other)
    assert getattr(one, field) != getattr(two, field)
    assert one == state(X.clone(), 2)


def test_rows_of_other_lengths() -> None:
    """The number of rows is none of them."""
    assert state(X).lengths == state(X[:2]).lengths != state(X[:, :1]).lengths


def test_values_and_random_numbers_of_the_first_steps_only() -> None:
    torch.manual_seed(1)
    one = state(X)
    torch.manual_seed(2)
    assert state(X).random != one.random
    later = state(X, values=False)
    torch.manual_seed(3)
    assert state(X + 1, values=False) == later
    assert state(X, frozen=("w",)).frozen != one.frozen


def test_ranks_are_named_by_their_axes() -> None:
    named = with_rank_names(Mesh(size=4), grid(2, 1, 2))
    assert named.names == (
        "pp rank 0, tp rank 0",
        "pp rank 0, tp rank 1",
        "pp rank 1, tp rank 0",
        "pp rank 1, tp rank 1",
    )


def test_frozen_parameters_that_stages_share() -> None:
    holders = {"table": (0, 1), "norm": (0, 2), "bias": (0, 1)}
    found = frozen_checksums(["table"], holders)
    assert list(found) == [(0, 1), (0, 2)]
    assert found == frozen_checksums({"table", "own"}, holders)
    changed = frozen_checksums(["table", "norm"], holders)
    assert changed[0, 1] == found[0, 1] and changed[0, 2] != found[0, 2]


def test_replicas() -> None:
    """Of two replicas on two ranks each, the first ranks are compared."""
    same, other, longer = state(X), state(X + 1), state(X[:, :1])
    layout = grid(1, 2, 2)
    assert equal_replicas([same, same, same, same], layout)
    assert not equal_replicas([same, same, other, other], layout)
    assert not equal_replicas([same, same], grid(1, 1, 2)), "there is one replica"
    assert unequal_replicas([same, same, longer, longer], layout)
    assert not unequal_replicas([same, same, other, other], layout)
