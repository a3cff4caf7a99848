"""distribute(ep=): replicas with different rows and different experts train as one device with all rows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks, shared
from small_models import AttendingMixtures, CentredMixture, Mixture, assert_values_close
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from trainers import (
    LayersOfExperts,
    batch_of_experts,
    layers_of_experts,
    rows_of_replica,
    train_experts_beside_one_device,
    trainer_of_experts,
)

import autotp
from autotp.ops.grouped_mm import OPERATOR
from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep
from autotp.sharding.boxes import local_of
from autotp.training.distribute import distribute

checks = Checks(timeout=280)
CLOSE = {"rtol": 0, "atol": 1e-10}


def expect_state(trainer: autotp.Trainer, whole: nn.Module, rank: int) -> None:
    state = autotp.full_state_dict(trainer)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        assert_values_close(state[name], tensor, **CLOSE)


@checks.on(2)
def two_replicas_with_half_of_the_experts_train_as_one_device(rank: int, n: int) -> None:
    """Gradients of experts are no ep times too large (Megatron-LM#5956); those of routers are whole
    (transformers#48205, torchtitan#4054) and alike after each step (torchtitan#2387); the norm counts experts
    (Megatron-LM#5916); rows come back to their places where a batch has several (torchtitan#3604), and to the weights
    that the router gave them (transformers#45473).
    """
    whole = layers_of_experts()
    trainer, _ = train_experts_beside_one_device(whole, dp=2, ep=2)
    shapes = {name: list(p.to_local().shape) for name, p in trainer.named_parameters() if name.startswith("first.")}
    assert shapes == {
        "first.up": [2, 8, 10], "first.up_bias": [2, 10], "first.down": [2, 10, 8], "first.down_bias": [2, 8],
        "first.router.weight": [4, 8], "first.router.bias": [4],
    }  # fmt: skip
    expect_state(trainer, whole, rank)
    for layer in (trainer.first, trainer.second):
        router: Any = layer.router.weight
        of_ranks = [torch.empty_like(router.to_local()) for _ in range(n)]
        torch.distributed.all_gather(of_ranks, router.to_local().detach())
        assert torch.equal(*of_ranks)
    # All rows have come to a rank's experts; other gradients are summed beside backward from the second step on.
    sums = trainer._gradients.begin(HooksOfStep({}, {}))
    assert {name for name, p in trainer.named_parameters() if p not in sums} == {
        f"{layer}.{name}" for layer in ("first", "second") for name in ("up", "up_bias", "down", "down_bias")
    }


@checks.on(2)
def weights_of_all_experts_are_computed_on_every_rank(rank: int, n: int) -> None:
    whole = layers_of_experts()
    whole.first.__class__ = CentredMixture
    trainer, _ = train_experts_beside_one_device(whole, dp=2, ep=2)
    shapes = {name: list(local_of(p).shape) for name, p in trainer.named_parameters() if name.startswith("first.")}
    assert shapes["first.up"] == [4, 8, 10] and shapes["first.down"] == [2, 10, 8]
    expect_state(trainer, whole, rank)


@checks.on(2)
def microbatches_and_zero_leave_experts_where_they_are(rank: int, n: int) -> None:
    for zero in (0, 1, 2, 3):
        whole = layers_of_experts()
        trainer, _ = train_experts_beside_one_device(whole, dp=2, ep=2, zero=zero, microbatches=2)
        assert list(trainer.get_parameter("first.up").to_local().shape) == [2, 8, 10]
        expect_state(trainer, whole, rank)


class Blocks(nn.Module):
    """Two blocks of experts, and a loss."""

    def __init__(self, number: int, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h, self.head = nn.ModuleList(Mixture(OPERATOR, number, width) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        rows = x.flatten(0, 1)
        for block in self.h:
            rows = block(rows).tanh()
        return F.mse_loss(self.head(rows), y.flatten(0, 1))


@checks.on(4)
def zero_divides_experts_over_the_ranks_that_have_the_same_ones(rank: int, n: int) -> None:
    """One or three experts of two ranks, which divide them; gathers and sums are between these ranks."""
    for zero, number, microbatches in ((1, 2, 2), (3, 6, 2)):
        whole = Blocks(number).double()
        trainer, _ = train_experts_beside_one_device(whole, dp=4, ep=2, zero=zero, microbatches=microbatches)
        lengths = [trainer.get_parameter(name).to_local().shape[0] for name in ("h.1.up", "h.1.router.weight")]
        of_experts = torch.arange(number // 2).tensor_split([-(-number // 4)])[rank // 2]
        of_all = [*torch.arange(number).chunk(4), torch.zeros(0), torch.zeros(0)][rank]
        assert lengths == [len(of_experts), len(of_all)]
        expect_state(trainer, whole, rank)


@checks.on(4)
def states_of_experts_in_8_bits_are_those_of_one_device(rank: int, n: int) -> None:
    """A block of a state has elements of one expert, whatever ranks divide them."""
    small = autotp.low_memory(torch.optim.AdamW, "8bit")
    whole = Blocks(4, width=160).double()
    trainer = trainer_of_experts(copy.deepcopy(whole), dp=4, ep=2, zero=3)
    optimizers = [small(m.parameters(), lr=0.01, weight_decay=0.1) for m in (whole, trainer)]
    for step in range(3):
        values = batch_of_experts(step)
        whole(**values).backward()
        trainer.step(**rows_of_replica(values, trainer))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    packed = optimizers[1].state[trainer.get_parameter("h.0.up")]["exp_avg"]
    assert packed.nbytes < 1.1 * 4 * 8 * 160 / 4
    expect_state(trainer, whole, rank)


@checks.on(2)
def experts_without_rows_have_zero_gradients_on_every_rank(rank: int, n: int) -> None:
    """And their optimizer state moves as on one device, weight decay too (Automodel#2995)."""
    whole = layers_of_experts(idle=True)
    trainer, optimizer = train_experts_beside_one_device(whole, dp=2, ep=2)
    expect_state(trainer, whole, rank)
    parameter = trainer.get_parameter("second.down")
    grad, state = parameter.grad, optimizer.state[parameter]
    assert isinstance(grad, DTensor) and bool(grad.to_local().any()) == (rank == 0)
    assert bool(state["exp_avg"].to_local().any()) == (rank == 0) and int(state["step"]) == 3


@checks.on(4)
def experts_are_cut_by_width_over_tp(rank: int, n: int) -> None:
    """The bias of an expert's output counts once, not tp times (torchtitan#4245)."""
    whole = layers_of_experts()
    trainer, _ = train_experts_beside_one_device(whole, tp=2, dp=2, ep=2)
    assert list(trainer.get_parameter("first.up").to_local().shape) == [2, 8, 5]
    expect_state(trainer, whole, rank)


@checks.on(4)
def replicas_of_experts_sum_their_gradients(rank: int, n: int) -> None:
    whole = layers_of_experts()
    trainer, _ = train_experts_beside_one_device(whole, dp=4, ep=2)
    assert list(trainer.get_parameter("first.up").to_local().shape) == [2, 8, 10]
    expect_state(trainer, whole, rank)


@checks.on(4)
def each_replica_has_one_expert(rank: int, n: int) -> None:
    whole = layers_of_experts()
    trainer, _ = train_experts_beside_one_device(whole, dp=4, ep=4, recompute="selective")
    assert list(trainer.get_parameter("first.up").to_local().shape) == [1, 8, 10]
    expect_state(trainer, whole, rank)


def trains_over_sequences(rank: int, **layout: Any) -> None:
    """Ranks along cp are as replicas to experts, and a balancing loss knows neither (Megatron-LM#5047).

    Its gradients reach the routers (Automodel#1412), or these would be others.
    """
    torch.manual_seed(0)
    whole = AttendingMixtures().double()
    trainer, _ = train_experts_beside_one_device(whole, **layout)
    assert trainer.get_parameter("first.up").to_local().shape[0] == 4 // layout["ep"]
    assert int(trainer.load.rows["first"].sum()) == 2 * 8 * 3  # Two experts for each token, counted once.
    expect_state(trainer, whole, rank)


@checks.on(4)
def rows_of_parts_of_sequences_travel(rank: int, n: int) -> None:
    for zero in (0, 1):
        trains_over_sequences(rank, dp=2, ep=2, cp=2, zero=zero, microbatches=1 + zero)


@checks.on(4)
def experts_are_cut_over_parts_of_sequences(rank: int, n: int) -> None:
    """With four parts of three positions, ranks have no rows."""
    for layout in ({"dp": 2, "ep": 4, "cp": 2}, {"dp": 1, "ep": 2, "cp": 4}, {"dp": 1, "ep": 2, "cp": 2, "tp": 2}):
        trains_over_sequences(rank, **layout)


@checks.on(8, rare=True)
def experts_are_cut_over_everything(rank: int, n: int) -> None:
    for ep in (2, 4):
        trains_over_sequences(rank, tp=2, dp=2, cp=2, ep=ep)


@checks.on(2)
def a_compute_dtype_is_that_of_rows_that_travel(rank: int, n: int) -> None:
    losses = []
    for ep in (1, 2):
        torch.manual_seed(0)
        trainer = trainer_of_experts(LayersOfExperts(), dp=2, ep=ep, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(trainer.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            losses.append(
                trainer.step(**{key: x.float() for key, x in rows_of_replica(batch_of_experts(step), trainer).items()})
            )
            optimizer.step()
        assert all(p.dtype == torch.float32 for p in trainer.parameters())
    assert_values_close(losses[3:], losses[:3], rtol=0.02, atol=0)


# ---- states and checkpoints

LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp": 2, "ep": 2, "tp": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 2, "zero": 3}, {"dp": 4},
)  # fmt: skip


@checks.on(4)
def checkpoints_go_from_any_layout_to_any(rank: int, n: int) -> None:
    """Weights and moments of experts, saved where others were, go on as one device does."""
    for number, layout in enumerate(LAYOUTS):
        whole, folder = layers_of_experts(), shared(rank)
        trainer, optimizer = train_experts_beside_one_device(whole, **layout)
        autotp.save_checkpoint(folder, trainer, optimizer, step=trainer.steps)
        whole_state = autotp.full_state_dict(trainer)
        optimizer.zero_grad()
        loss = trainer.step(**rows_of_replica(batch_of_experts(3), trainer))
        optimizer.step()
        after = autotp.full_state_dict(trainer)
        other = trainer_of_experts(LayersOfExperts().double(), **LAYOUTS[(number + 1) % len(LAYOUTS)])
        resumed = torch.optim.AdamW(autotp.weight_decay_groups(other, 0.1), lr=0.01)
        autotp.load_checkpoint(folder, other, resumed)
        loaded = autotp.full_state_dict(other)
        assert_values_close(other.step(**rows_of_replica(batch_of_experts(3), other)), loss, **CLOSE)
        resumed.step()
        moved = autotp.full_state_dict(other)
        for name in whole_state if rank == 0 else ():
            assert torch.equal(loaded[name], whole_state[name]), name
            assert_values_close(moved[name], after[name], **CLOSE)


@checks.on(4)
def state_dicts_are_read_back(rank: int, n: int) -> None:
    trainer = trainer_of_experts(layers_of_experts(), dp=2, ep=2, tp=2)
    own = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    whole = autotp.full_state_dict(trainer)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.zero_()
    assert not any(bool(tensor.any()) for tensor in autotp.full_state_dict(trainer).values())
    trainer.load_state_dict(own)
    again = autotp.full_state_dict(trainer)
    other = trainer_of_experts(LayersOfExperts().double(), dp=4, ep=2)
    autotp.load_full_state_dict(other, again if rank == 0 else {})
    loaded = autotp.full_state_dict(other)
    for name in whole if rank == 0 else ():
        assert torch.equal(again[name], whole[name]) and torch.equal(loaded[name], whole[name]), name


# ---- what is refused


@checks.on(2)
def a_model_without_experts_is_one_error_on_every_rank(rank: int, n: int) -> None:
    class Dense(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(super().forward(x), y)

    text = message(lambda: trainer_of_experts(Dense(8, 3).double(), dp=2, ep=2))
    assert text.startswith("distribute(Dense, tp=1, pp=1, dp=2, ep=2): ep=2, and no layer has experts")


class Misrouted(LayersOfExperts):
    """Its second layer chooses an expert that there is not, where `y` says so."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.first(x.flatten(0, 1))
        index = self.second.router(rows).max(-1)[1] + y[..., 0].flatten().long()
        return torch.bmm(rows.unsqueeze(1), self.second.up[index]).square().mean()


@checks.on(2)
def an_expert_out_of_range_is_one_error_on_every_rank(rank: int, n: int) -> None:
    """No rank waits for rows that another one cannot send."""
    torch.manual_seed(0)
    model = Misrouted().double()
    values = {"x": torch.randn(4, 3, 8).double() + rank, "y": torch.zeros(4, 3, 3).double()}
    for index in (4.0, -8.0):
        step = trainer_of_experts(copy.deepcopy(model), dp=2, ep=2).step
        values["y"][0, 0] = index * rank  # On the second rank alone.
        text = message(partial(step, **values))
        assert "rows of ep rank 1 chose no expert of the 4: an index is out of range" in text


@checks.on(2)
def all_rows_to_one_expert_are_computed(rank: int, n: int) -> None:
    """All of both ranks come to one, and the other one has none."""

    class One(LayersOfExperts):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            index = (self.first.router(rows).sum(-1) * 0 + 3).long()
            return torch.bmm(rows.unsqueeze(1), self.first.up[index]).square().mean()

    torch.manual_seed(0)
    whole = One().double()
    trainer, values = trainer_of_experts(copy.deepcopy(whole), dp=2, ep=2), batch_of_experts(0)
    expected = whole(**values)
    expected.backward()
    assert_values_close(trainer.step(**rows_of_replica(values, trainer)), expected.detach(), **CLOSE)
    assert trainer.load.rows["first"].tolist() == [0, 0, 0, 24] and trainer.load.imbalance["first"] == 4.0
    grad: Any = trainer.get_parameter("first.up").grad
    assert_values_close(grad.full_tensor(), whole.first.up.grad, **CLOSE)
    assert grad.to_local().any() == (rank == 1)


@checks.on(2)
def another_ep_on_a_rank_is_one_error_on_every_rank(rank: int, n: int) -> None:
    """No rank waits for the others in a group that those do not make."""
    assert "would run another graph" in message(lambda: trainer_of_experts(layers_of_experts(), dp=2, ep=1 + rank))


@checks.on(2)
def replicas_leave_out_the_same_layers_of_experts(rank: int, n: int) -> None:
    """If another replica runs a layer, that is one Error on every rank."""

    class Optional(LayersOfExperts):
        def forward(self, x: Tensor, y: Tensor, deep: bool = True) -> Tensor:
            rows = self.first(x.flatten(0, 1))
            return F.mse_loss(self.head(self.second(rows) if deep else rows), y.flatten(0, 1))

    torch.manual_seed(0)
    whole = Optional().double()
    trainer, values = trainer_of_experts(copy.deepcopy(whole), dp=2, ep=2), batch_of_experts(0)
    for step in (trainer.step, trainer.evaluate):
        assert_values_close(
            step(**rows_of_replica(values, trainer), deep=False).detach(), whole(**values, deep=False).detach()
        )
        text = message(lambda step=step: step(**rows_of_replica(values, trainer), deep=rank == 0))
        assert "runs other layers, or trains other parameters" in text


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "does not divide": ({"dp": 4, "ep": 3}, "ep=3 does not divide dp=4: experts are cut over replicas, and"),
    "does not divide both": ({"dp": 2, "cp": 2, "ep": 8}, "ep=8 does not divide dp=2 times cp=2"),
    "slots": ({"dp": 1, "cp": 2, "ep": 2, "capacity": 1.0}, "ep=2 over cp=2 beside capacity=1.0"),
    "zero": ({"dp": 1, "cp": 2, "ep": 2, "zero": 1}, "ep=2 over cp=2 beside zero=1"),
    "no size": ({"dp": 4, "ep": 0}, "ep=0 is not a whole number of 1 or more\n  try      ep=2"),
    "full": ({"dp": 2, "ep": 2, "recompute": "full"}, 'ep=2 beside recompute="full"'),
    "memory": ({"dp": 2, "ep": 2, "memory": "1GB"}, "ep=2 beside memory='1GB'"),
    "halves": ({"dp": 2, "ep": 2, "pp": 2, "schedule": "zero-bubble"}, "ep=2 beside schedule='zero-bubble'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_distribute_refuses(name: str) -> None:
    layout, problem = REFUSED[name]
    assert problem in message(lambda: distribute(layers_of_experts(), **layout))
