"""capacity=: each expert has slots for the first rows that chose it, as one device that drops the same rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import Mixture, assert_values_close
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.diagnostics.plan import MemoryPlan
from autotp.diagnostics.report import memory_plan
from autotp.ops.experts.rows import slots_of_expert
from autotp.ops.grouped_mm import OPERATOR
from autotp.training.distribute import distribute

checks = Checks(timeout=280)
CLOSE = {"rtol": 0, "atol": 1e-10}
FACTOR = 1.1


class Dropping(Mixture):
    """A mixture that looks at each row: an expert computes the first ones that chose it."""

    factor = FACTOR

    def _rows(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.dropped = getattr(self, "dropped", 0)
        before, slots = [0] * self.number, slots_of_expert(len(chosen), self.number, self.factor)
        stays = torch.zeros(len(chosen), 1, dtype=x.dtype)
        for row, expert in enumerate(chosen.tolist()):
            stays[row], before[expert] = before[expert] < slots, before[expert] + 1
        self.dropped += len(chosen) - int(stays.sum())
        return super()._rows(x, chosen, weights) * stays


class Layers(nn.Module):
    """Two layers of four experts, which read their weights in groups and row by row, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Mixture(OPERATOR), Mixture()]), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        rows = self.blocks[1](self.blocks[0](x.flatten(0, 1)))
        return F.mse_loss(self.head(rows), y.flatten(0, 1))


def layers() -> tuple[nn.Module, nn.Module]:
    """The model, and the same for one device, which drops rows."""
    torch.manual_seed(0)
    model = Layers().double()
    whole = copy.deepcopy(model)
    for layer in whole.blocks:
        layer.__class__, layer.grouped = Dropping, None
    return model, whole


def take_dropped(whole: Any) -> dict[str, int]:
    """Returns how many rows the layers have dropped since the last call."""
    counts = {f"blocks.{i}": block.dropped for i, block in enumerate(whole.blocks)}
    for block in whole.blocks:
        block.dropped = 0
    return counts


def batch(step: int) -> dict[str, Tensor]:
    draw, size = torch.Generator().manual_seed(step), (16, 5) if step == 1 else (8, 3)
    shapes = {"x": (*size, 8), "y": (*size, 3)}
    return {name: torch.randn(*shape, generator=draw).double() * 3 for name, shape in shapes.items()}


def trains_as_one_device_that_drops(rank: int, **layout: Any) -> autotp.Trainer:
    """Three steps. Each microbatch of each replica has slots of its own."""
    model, whole = layers()
    parts = layout.get("dp", 1) * layout.get("microbatches", 1)
    example = {name: x[: 8 // parts] for name, x in batch(0).items()}
    trainer = distribute(model, example_inputs=example, capacity=FACTOR, **layout)
    dp, replica = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (whole, trainer)]
    for step in range(3):
        values = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        split = [
            dict(zip(values, x, strict=True)) for x in zip(*(x.chunk(parts) for x in values.values()), strict=True)
        ]
        expected = torch.stack([whole(**part) for part in split]).mean()
        expected.backward()
        dropped = take_dropped(whole)
        loss = trainer.step(**{name: x.chunk(dp)[replica] for name, x in values.items()})
        assert_values_close(loss, expected.detach(), **CLOSE)
        assert {name: int(x) for name, x in trainer.load.dropped.items()} == dropped and any(dropped.values())
        of_one = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in trainer.named_parameters():
            grad: Any = parameter.grad
            part = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert_values_close(part, of_one[name], **CLOSE, msg=f"{name}: {{}}".format)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert_values_close(autotp.clip_grad_norm_(trainer, 0.5), norm, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    state = autotp.full_state_dict(trainer)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        assert_values_close(state[name], tensor, **CLOSE)
    return trainer


@checks.on(2)
def experts_over_replicas_drop_rows(rank: int, n: int) -> None:
    trains_as_one_device_that_drops(rank, dp=2, ep=2)


@checks.on(2)
def blocks_that_run_again_drop_the_same_rows(rank: int, n: int) -> None:
    """And count them once (Automodel#3140, #3247)."""
    trains_as_one_device_that_drops(rank, dp=2, ep=2, recompute="full")


def budget_of_step(trainer: autotp.Trainer) -> MemoryPlan:
    """What the budget of a trainer without a pipeline did in its last step."""
    latest = next(pipeline for pipeline in reversed(trainer._pipelines) if pipeline.training)
    plan = memory_plan(latest.stages[0].module)
    assert plan is not None
    return plan


@checks.on(2)
def a_budget_beside_experts_over_replicas_changes_no_number(rank: int, n: int) -> None:
    """Rows travel again where the bytes ask for it; a rank's parameters are its own experts, which ZeRO leaves."""
    fixed = []
    for memory, zero in (("90%", 0), ("60%", 0), ("60%", 3), ("2GB", 0)):
        trainer = trains_as_one_device_that_drops(rank, dp=2, ep=2, memory=memory, zero=zero)
        plan = budget_of_step(trainer)
        assert plan.kept <= (float(memory[:-1]) / 100 if memory != "2GB" else 1) * plan.kept_without
        assert (plan.seconds > 0) == (memory != "2GB")
        fixed.append(plan.fixed)
    trainer = autotp.distribute(
        layers()[0], dp=2, ep=2, capacity=FACTOR, example_inputs={k: x[:4] for k, x in batch(0).items()}
    )
    own = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in trainer.parameters())
    assert fixed[0] == fixed[1] == fixed[3] == 4 * own > fixed[2]


@checks.on(2)
def experts_cut_by_width_drop_rows(rank: int, n: int) -> None:
    trains_as_one_device_that_drops(rank, tp=2, microbatches=2)


@checks.on(4)
def experts_over_replicas_and_width_drop_rows(rank: int, n: int) -> None:
    trains_as_one_device_that_drops(rank, tp=2, dp=2, ep=2)


@checks.on(2)
def replicas_and_microbatches_drop_rows(rank: int, n: int) -> None:
    trains_as_one_device_that_drops(rank, dp=2, microbatches=2)


def reads_of_a_step(rank: int, **options: Any) -> list[Any]:
    """The shapes of the tensors that graphs read on the host in a step."""
    example = {name: x[:4] + rank for name, x in batch(0).items()}
    trainer = distribute(layers()[0], example_inputs=example, dp=2, ep=2, **options)
    reads: list[Any] = []
    run, plain = trainer._run, Tensor.tolist

    def counted(*args: Any) -> Any:
        try:
            Tensor.tolist = lambda x: reads.append(x.shape) or plain(x)  # type: ignore[method-assign, func-returns-value]
            return run(*args)
        finally:
            Tensor.tolist = plain  # type: ignore[method-assign]

    trainer._run = counted  # type: ignore[method-assign]
    trainer.step(**example)
    return reads


@checks.on(2)
def a_capacity_needs_no_read_on_the_host(rank: int, n: int) -> None:
    """Without it each of the two layers reads once."""
    assert reads_of_a_step(rank, capacity=FACTOR) == []
    assert reads_of_a_step(rank, capacity=FACTOR, memory="60%") == []
    assert reads_of_a_step(rank) == [(2, 2, 3)] * 2


@checks.on(2)
def other_rows_on_a_replica_are_one_error_on_every_rank(rank: int, n: int) -> None:
    """Not a wait for rows that nobody sends."""
    example = {name: x[:4] for name, x in batch(0).items()}
    trainer = distribute(layers()[0], example_inputs=example, capacity=FACTOR, dp=2, ep=2)
    text = message(lambda: trainer.step(**{name: x[: 4 - rank] for name, x in example.items()}))
    assert "ep=2 beside capacity=1.1: replicas have batches of other shapes" in text


class Misrouted(Layers):
    """Its second layer chooses an expert that there is not, where `y` says so."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        index = self.blocks[1].router(rows).max(-1)[1] + y.flatten().long()
        made = torch.bmm(rows.unsqueeze(1), self.blocks[1].up[index]).squeeze(1)
        return made.square().mean()


@checks.on(2)
def an_expert_out_of_range_is_one_error_on_every_rank(rank: int, n: int) -> None:
    """No rank reads an index: a row without an expert makes a loss that is not finite."""
    torch.manual_seed(0)
    values = {"x": torch.randn(4, 3, 8).double(), "y": torch.zeros(4, 3).double()}
    trainer = distribute(Misrouted().double(), example_inputs=values, capacity=FACTOR, dp=2, ep=2)
    values = {"x": values["x"] + rank, "y": values["y"]}
    values["y"][0, 0] = 4.0 * rank  # On the second rank alone.
    text = message(lambda: trainer.step(**values))
    assert "the loss of step 1 is nan" in text


@pytest.mark.parametrize("capacity", [0, -1.0, True, "1.25", float("inf")])
def test_a_capacity_that_is_no_factor_is_refused(capacity: Any) -> None:
    text = message(lambda: distribute(layers()[0], capacity=capacity))
    assert f"capacity={capacity!r} is no positive factor" in text


def test_a_model_without_experts_is_refused() -> None:
    text = message(lambda: autotp.parallelize(nn.Linear(8, 8), tp=1, capacity=1.0, example_inputs=torch.ones(2, 8)))
    assert "capacity=1.0, and no layer has experts that rows choose from" in text


@pytest.mark.parametrize(("capacity", "slots"), [(1.1, 11), (1.0, 10), (0.01, 1), (1.25, 13)])
def test_slots_are_counted_without_rounding(capacity: float, slots: int) -> None:
    """1.1 * 40 / 4 in floating point is a little more than 11."""
    assert slots_of_expert(40, 4, capacity) == slots


@pytest.mark.parametrize("experts", ["width", "expert"])
def test_parallelize_drops_rows(experts: Any) -> None:
    _, whole = layers()
    model = autotp.parallelize(layers()[0], tp=1, experts=experts, capacity=FACTOR, example_inputs=batch(0))
    values = batch(1)
    assert_values_close(model(**values), whole(**values), **CLOSE)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
