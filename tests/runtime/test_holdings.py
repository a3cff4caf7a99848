"""holdings: which parts of tensors a rank holds, and which of the ranks that hold the same counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from torch import nn

import autotp
from autotp.distributed.mesh import Mesh
from autotp.runtime.holdings import Holdings, expect_all_saved, holdings_of, parallel_of, uncut
from autotp.sharding.layout import Layout

WHOLE = {"cut": torch.arange(24.0).view(6, 4), "bias": torch.arange(4.0)}
LAYOUTS = {"cut": Layout((6, 4), 0, (((0, 4),), ((4, 6),))), "bias": Layout((4,))}


def held_by(rank: int, **given: Any) -> Holdings:
    held = {name: LAYOUTS[name].take(x, rank).clone() for name, x in WHOLE.items()}
    shapes = {name: tuple(x.shape) for name, x in WHOLE.items()}
    place = Mesh("tp", 2, rank)
    return Holdings(held, frozenset(held), {name: name for name in held}, shapes, LAYOUTS, place, place, **given)


def test_holdings_count_each_element_once() -> None:
    """Of what is cut each rank counts its part; of what all have only the first does."""
    found = {name: torch.zeros_like(x) for name, x in WHOLE.items()}
    for rank in range(2):
        holdings = held_by(rank)
        for name in WHOLE:
            for box, part in holdings.counts(name, holdings.held[name]):
                found[name][box.place] += part
    assert all(torch.equal(found[name], x) for name, x in WHOLE.items())


def test_holdings_leave_out_what_another_stage_counts() -> None:
    holdings = Holdings(**{**vars(held_by(0)), "counted": frozenset({"bias"})})
    assert holdings.counts("cut", holdings.held["cut"]) == [] and len(holdings.counts("bias", WHOLE["bias"])) == 1


def test_holdings_fill_writes_this_rank_s_part() -> None:
    for rank in range(2):
        holdings = held_by(rank)
        for name, x in WHOLE.items():
            holdings.fill(name, x + 1)
            assert torch.equal(holdings.held[name], LAYOUTS[name].take(x + 1, rank))
    assert held_by(0).layout("cut") is LAYOUTS["cut"] and uncut(WHOLE, LAYOUTS) == {"bias"}


def test_expect_all_saved_names_what_a_checkpoint_would_lack() -> None:
    beside, left = held_by(0, beside=("extra",)), held_by(0, left_out=("cut",))
    expect_all_saved(held_by(0))
    assert message(lambda: expect_all_saved(beside)).splitlines()[0].endswith(
        "`extra` in the model's state_dict() is not a dense parameter or buffer of the model"
    )  # fmt: skip
    assert message(lambda: expect_all_saved(left)).splitlines()[0].endswith(
        "`cut` is trained, but is not in the model's state_dict(): it would not be saved"
    )  # fmt: skip


class Around(nn.Module):
    """As DistributedDataParallel wraps a model, or, with another name, torch.compile."""

    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)


def test_holdings_of_unwraps_a_parallel_model() -> None:
    model = autotp.parallelize(nn.Sequential(nn.Linear(2, 2)), 1)
    for wrapped in (model, Around(model), Around(Around(model), "_orig_mod")):
        assert parallel_of(wrapped, "call") is model
        assert set(holdings_of(wrapped, "call").held) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None], ids=["module", "none"])
def test_holdings_of_refuses_an_ordinary_model(model: Any) -> None:
    assert message(lambda: holdings_of(model, "full_state_dict")) == (
        f"full_state_dict: a {'Linear' if model else 'NoneType'} is not a parallel model\n"
        "  try      full_state_dict(model, ...), with the model that autotp.parallelize returned"
    )
