"""step_consistency: what the ranks compare of a step, and which of them must be alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from torch import nn

import autotp
from autotp.distributed import agreement
from autotp.distributed.agreement import agree
from autotp.distributed.fingerprint import fingerprint, may_be_one_batch, rounded
from autotp.distributed.mesh import Mesh
from autotp.runtime.torch_hooks.optimizer_steps import NEVER
from autotp.training.step_consistency import (
    NOW,
    Agreed,
    StepState,
    agree_on_step,
    equal_replicas,
    frozen_checksums,
    groups_of,
    step_state,
    with_rank_names,
)
from autotp.training.step_facts import finite_tensors, raise_nonfinite

X = torch.arange(6.0).view(3, 2)


def grid(pp: int, dp: int, tp: int) -> Any:
    """What is read of a DeviceMesh."""
    return SimpleNamespace(mesh=torch.arange(pp * dp * tp).view(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def state(*batch: Any, values: bool = True, frozen: tuple[str, ...] = ()) -> StepState:
    return step_state(True, frozen, batch, Mesh(), values)


def test_step_state_without_a_batch_tells_of_no_inputs() -> None:
    assert step_state(False, ["w"], None, Mesh(), True) == StepState(False, False, 0, NEVER, 0, 0, 0, 0)


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
def test_step_state_differs_in_the_field_of_the_change(other: tuple[Any, ...], field: str) -> None:
    torch.manual_seed(1)
    one, two = state(X, 2), state(*other)
    assert getattr(one, field) != getattr(two, field)
    assert one == state(X.clone(), 2)


def test_step_state_lengths_do_not_count_rows() -> None:
    assert state(X).lengths == state(X[:2]).lengths != state(X[:, :1]).lengths


def test_step_state_compares_values_and_random_state_at_first_only() -> None:
    torch.manual_seed(1)
    one = state(X)
    torch.manual_seed(2)
    assert state(X).random != one.random
    later = state(X, values=False)
    torch.manual_seed(3)
    assert state(X + 1, values=False) == later
    assert state(X, frozen=("w",)).frozen != one.frozen


def test_with_rank_names_names_ranks_by_pipeline_and_tensor_axes() -> None:
    named = with_rank_names(Mesh(size=4), grid(2, 1, 2))
    assert named.names == (
        "pp rank 0, tp rank 0",
        "pp rank 0, tp rank 1",
        "pp rank 1, tp rank 0",
        "pp rank 1, tp rank 1",
    )


def test_frozen_checksums_cover_only_parameters_that_stages_share() -> None:
    holders = {"table": (0, 1), "norm": (0, 2), "bias": (0, 1)}
    found = frozen_checksums(["table"], holders)
    assert list(found) == [(0, 1), (0, 2)]
    assert found == frozen_checksums({"table", "own"}, holders)
    changed = frozen_checksums(["table", "norm"], holders)
    assert changed[0, 1] == found[0, 1] and changed[0, 2] != found[0, 2]


def test_equal_replicas_compares_first_ranks_of_replicas() -> None:
    """Of two replicas on two ranks each, the first ranks are compared."""
    same, other = state(X), state(X + 1)
    groups = groups_of(0, grid(1, 2, 2))
    assert equal_replicas([same, same, same, same], groups)
    assert not equal_replicas([same, same, other, other], groups)
    assert not equal_replicas([same, same], groups_of(0, grid(1, 1, 2))), "there is one replica"


# ---- one sum over all ranks


class World:
    """Ranks that are simulated one after the other: what all of them sent is summed, or gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: Any) -> None:
        self.grid, self.size, self.gathered = layout, layout.mesh.numel(), 0
        self.mesh = Mesh("global", self.size, 0, "x", names=tuple(map(str, range(self.size))))
        self.patch = partial(monkeypatch.setattr, agreement)

    def agree(self, states: Sequence[StepState], tied: Any = None, prints: Any = None, **more: Any) -> Agreed:
        """What the first rank knows, or raises, after all ranks have sent their states."""
        tied, prints = tied or [{}] * self.size, prints or [{NOW: [0]}] * self.size
        sent, texts = [list[int]() for _ in range(self.size)], [""] * self.size

        def of_rank(rank: int) -> Agreed:
            place, groups = replace(self.mesh, rank=rank), groups_of(rank, self.grid, tied[rank])
            return agree_on_step(place, groups, states[rank], tied[rank], None, prints[rank], **more)

        def keep_texts(rank: int) -> Any:
            return lambda text, mesh: texts.__setitem__(rank, text) or [text] * self.size

        def keep_sums(rank: int) -> Any:
            return lambda values, mesh: sent.__setitem__(rank, list(values)) or [1] * len(values)

        def gathered(text: str, mesh: Mesh) -> list[str]:
            self.gathered += 1
            return texts

        for rank in range(self.size):
            self.patch("sum_ints", keep_sums(rank))
            self.patch("gather_texts", keep_texts(rank))
            of_rank(rank)
        total = [(sum(column) + 2**63) % 2**64 - 2**63 for column in zip(*sent, strict=True)]
        self.patch("sum_ints", lambda values, mesh: total)
        self.patch("gather_texts", gathered)
        return of_rank(0)


LAYOUTS = [(1, 1, 2), (2, 1, 1), (2, 2, 2), (1, 3, 2), (4, 2, 1)]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_ranks_that_agree_gather_nothing(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]) -> None:
    """Replicas have batches of their own, and stages their own frozen parameters."""
    torch.manual_seed(0)
    layout = grid(*sizes)
    pp, dp, tp = sizes
    states, prints = [], []
    for rank in range(pp * dp * tp):
        replica, stage = rank // tp % dp, rank // (tp * dp)
        its = state(X + replica, values=False, frozen=("w",) * stage)
        states.append(its._replace(random=stage * 7 + replica, steps=3 if stage else -2))
        prints.append({NOW: fingerprint([X.long() + replica, X / 3 + replica]).as_ints()})
    world = World(monkeypatch, layout)
    found = world.agree(states, prints=prints)
    assert found == Agreed(captures=False, idle=False, arrived=0, lengths=True, room=True) and world.gathered == 0


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"structure": 1}, "got other inputs"),
        ({"values": 1}, "got other inputs"),
        ({"mode": False}, "was called in another mode"),
        ({"steps": 2}, "different numbers of optimizer steps"),
        ({"random": 5}, "would draw other random numbers"),
        ({"frozen": 9}, "has other parameters frozen"),
        ({"read": 9}, "runs other layers, or trains other parameters"),
        ("prints", r"got another batch than \d, in step 4"),
        ("tied", "has other tied parameters frozen"),
    ],
    ids=str,
)
def test_agree_raises_for_what_one_rank_has_otherwise(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], change: Any, told: str
) -> None:
    """On the last rank, which shares a stage, a replica or its random numbers with others."""
    pp, dp, tp = sizes
    size, alike = pp * dp * tp, state(X, values=False)._replace(steps=1)
    states, prints = [alike] * size, [{4: fingerprint([X.long()]).as_ints()}] * size
    tied = [{(0, pp - 1): 3}] * size
    if isinstance(change, dict):
        states = [*states[:-1], alike._replace(**change)]
    elif change == "prints":
        prints = [*prints[:-1], {4: fingerprint([X.long() + 1]).as_ints()}]
    else:
        tied = [*tied[:-1], {(0, pp - 1): 4}]
    alone = {
        "random": tp == 1,
        "frozen": dp * tp == 1,
        "prints": pp * tp == 1,
        "structure": pp * tp == 1,
        "read": dp * tp == 1,
    }
    name = change if isinstance(change, str) else next(iter(change))
    world = World(monkeypatch, grid(*sizes))
    if alone.get("structure" if name == "values" else name, False):
        world.agree(states, tied, prints)
        assert world.gathered == 0, "no other rank has to have the same"
    else:
        with pytest.raises(autotp.Error, match=told):
            world.agree(states, tied, prints)


def test_agree_sees_batches_that_two_replicas_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = state(X, values=False), state(X.long(), values=False)
    with pytest.raises(autotp.Error, match="got other inputs"):
        World(monkeypatch, grid(1, 2, 2)).agree([one, other, other, one])


def test_agree_gathers_and_accepts_round_off_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are in two neighbouring steps of `rounded`, by chance: the states are gathered, and compared."""
    one = fingerprint([X]).as_ints()
    every = (fingerprint([X * (1 + i / 1000)]).as_ints() for i in range(1, 100))
    other = next(ints for ints in every if rounded(ints) != rounded(one))
    assert may_be_one_batch(one, other)
    world = World(monkeypatch, grid(1, 1, 2))
    world.agree([state(X, values=False)] * 2, prints=[{NOW: one}, {NOW: other}])
    assert world.gathered == 1


def test_agree_tells_all_ranks_of_captures_lengths_and_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    world, alike = World(monkeypatch, grid(1, 2, 1)), state(X, values=False)._replace(steps=1)
    assert world.agree([alike, alike._replace(captures=True, read=9)]).captures
    assert not world.agree([alike, alike._replace(lengths=5)]).lengths
    assert world.agree([alike, alike._replace(steps=NEVER)]).idle and world.gathered == 0
    assert len(world.agree([alike, alike._replace(steps=NEVER)], names_idle=True).rows) == 2
    assert len(world.agree([alike, alike], gathers=True).rows) == 2
    assert world.agree([alike, alike], arrived=2).arrived == 2


def test_agree_costs_a_rank_the_same_in_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,192 ranks as of 8 it sends twelve integers, and looks at as many: counted, as lines of Python that run."""
    lines = []
    for sizes in ((1, 1, 8), (8, 128, 8)):
        layout, mine = grid(*sizes), state(X, values=False)
        mesh = Mesh("global", layout.mesh.numel(), 0, "x")
        groups, count = groups_of(0, layout), 0

        def counted(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return counted

        monkeypatch.setattr(agreement, "sum_ints", lambda values, mesh: [0] * len(values))
        sys.settrace(counted)
        try:
            agree_on_step(mesh, groups, mine, {}, None, {NOW: [1, 5]})
        finally:
            sys.settrace(None)
        lines.append(count)
    assert lines[0] == lines[1] < 200


class Skips(nn.Module):
    """Blocks of one size, of which a flag leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, without: int = -1) -> torch.Tensor:
        """x: [batch 5]"""
        for i, block in enumerate(self.h):
            x = x if i == without else x + block(x)
        return x.square().sum()


def skip_apart(rank: int, n: int, zero: Any) -> None:
    """A graph that is new, or known to both, and leaves out another block than on the other replica."""
    trainer = autotp.distribute(Skips(), dp=n, zero=zero, example_inputs=(torch.ones(3, 5),))
    x = torch.randn(3, 5)
    for without in ((0, 1), None, (0, 0), (1, 1), (0, 1), (2, 1), None):
        flags = {"without": without[rank]} if without is not None else {}
        if without is None or without[0] == without[1]:
            trainer.step(x, **flags)
        else:
            assert "runs other layers, or trains other parameters" in message(partial(trainer.step, x, **flags))
            if not zero:  # Nothing is gathered.
                trainer.evaluate(x, **flags)


@pytest.mark.parametrize("zero", [0, 3])
def test_replicas_that_train_other_layers_get_an_error(zero: int) -> None:
    """Their gradients have the same sizes, and would be added."""
    run_ranks(skip_apart, 2, zero, timeout=60)


# ---- facts that arrive late: step_facts

FIX = "\n  try      autotp.load_checkpoint(...), and a smaller learning rate from there"


def model(parameter: float = 1.0, gradient: float | None = 1.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        made[1].weight[0, 0] = parameter
    if gradient is not None:
        made[0].bias.grad = torch.tensor([1.0, gradient])
    return made


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"parameter": float("nan")}, f": `1.weight` is infinite or undefined{FIX}"),
        ({"gradient": float("inf")}, f": the gradient of `0.bias` is infinite or undefined{FIX}"),
        ({"parameter": float("inf"), "gradient": float("inf")}, f": `1.weight` is infinite or undefined{FIX}"),
        (
            {"gradient": None},
            ", and every parameter and gradient is finite\n"
            "  try      a batch without infinite or undefined values, or a loss that stays finite on it",
        ),
    ],
)
def test_raise_nonfinite_names_the_parameter_or_gradient(given: Any, text: str) -> None:
    told = message(lambda: raise_nonfinite(float("nan"), 7, *finite_tensors(model(**given)), partial(agree, Mesh())))
    assert told == f"the loss of step 7 is nan{text}"
