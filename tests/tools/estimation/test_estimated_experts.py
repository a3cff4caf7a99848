"""`estimate` and `search` of experts over replicas: bytes of a dispatch, memory, sums, and what is proposed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import Mixture
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.diagnostics.report import memory_plan
from autotp.ops.grouped_mm import OPERATOR
from autotp.tools.estimation.error_bars import FULLEST, step_bar
from autotp.tools.estimation.start_lines import python_line
from autotp.training.distribute import distribute

checks = Checks()
ROWS, CHOSEN, HIDDEN = 16, 2, 8
"""The rows of a replica, the experts of each, and the numbers of a row."""


class Layer(nn.Module):
    """One layer of experts, whose rows have gradients, and a loss. x, y: [batch 8]"""

    def __init__(self, number: int = 4, width: int = 10, grouped: Any = OPERATOR) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(HIDDEN)), nn.Linear(HIDDEN, HIDDEN)
        self.experts = Mixture(grouped, number, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.experts(self.scale * x)), y)


def estimated(number: int = 4, width: int = 10, **layout: Any) -> autotp.Estimate:
    rows = {"x": torch.zeros(2, HIDDEN), "y": torch.zeros(2, HIDDEN)}
    given = {"gpu": "cpu-gloo", "batch": ROWS * layout["dp"], "micro_batch": ROWS, **layout}
    with torch.device("meta"):
        model = Layer(number, width)
    return autotp.estimate(model, example_inputs=rows, **given)


def sizes_of_exchanges(est: autotp.Estimate) -> list[int]:
    """The bytes of a rank in each exchange of numbers of rows."""
    records = est.source.pieces(ROWS).records
    return [op.size for record in records for op in record.ops if op.axis == "ep" and op.dtype.is_floating_point]


class _Sent(TorchDispatchMode):
    """A region that counts the bytes of rows that this rank sends to the other one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.bytes = rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func) and args[0].is_floating_point():
            to_other = args[2][1 - self.rank]
            self.bytes += to_other * args[0].nbytes // max(1, sum(args[2]))
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Two numbered layers of experts, and a loss. x, y: [batch 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Mixture(OPERATOR) for _ in range(2)]), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


@checks.on(2)
def a_budget_beside_experts_over_replicas_chooses_what_was_estimated(rank: int, n: int) -> None:
    """With a capacity, by which all sizes are known, and where ZeRO leaves the experts."""
    rows = {"x": torch.ones(ROWS, HIDDEN), "y": torch.ones(ROWS, HIDDEN)}
    for memory, zero in (("70%", 0), ("2GB", 3)):
        options: dict[str, Any] = {"dp": 2, "ep": 2, "capacity": 1.25, "memory": memory, "zero": zero}
        est = autotp.estimate(
            Layers(), gpu="cpu-gloo", batch=2 * ROWS, micro_batch=ROWS, example_inputs=rows, **options
        )
        trainer = distribute(Layers(), example_inputs=rows, **options)
        trainer.step(**{name: x + rank for name, x in rows.items()})
        chosen = memory_plan(trainer._pipelines[0].stages[0].module)
        assert chosen is not None
        for name in ("fixed", "kept", "kept_without", "collectives"):
            assert (name, getattr(chosen, name)) == (name, getattr(est.budgets[0], name))
        assert (chosen.seconds > 0) == (memory == "70%")


@checks.on(2)
def a_step_sends_the_bytes_of_its_estimate(rank: int, n: int) -> None:
    """A router that chooses all experts equally often: two exchanges of rows forward, and two of their gradients."""
    model = Layer()
    with torch.no_grad():
        model.experts.router.bias.zero_()
        model.experts.router.weight.copy_(torch.eye(4, HIDDEN) * 2 + torch.eye(4, HIDDEN).roll(1, 0))
    x, y = torch.eye(4, HIDDEN).repeat(ROWS // 4, 1).roll(rank, 0), torch.ones(ROWS, HIDDEN)
    trainer = autotp.distribute(model, dp=2, ep=2, example_inputs={"x": x, "y": y})
    with _Sent(rank) as sent:
        trainer.step(x=x, y=y)
    formula = 4 * ROWS * CHOSEN * HIDDEN * 4 * (n - 1) / n
    sizes = sizes_of_exchanges(estimated(dp=2, ep=2))
    assert sum(sizes) * (n - 1) / n == pytest.approx(formula, rel=0.02)
    assert sent.bytes == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_a_dispatch_has_the_bytes_of_the_chosen_rows(ep: int) -> None:
    """Also where the replica's rows are not as many as a multiple of the experts."""
    est = estimated(number=8, dp=8, ep=ep)
    assert sizes_of_exchanges(est) == [ROWS * CHOSEN * HIDDEN * 4] * 4
    assert est.spent["all-to-all ep"] > 0


def test_slots_of_a_capacity_are_counted_as_they_travel() -> None:
    """Full or empty: 5 slots of an expert for 2 * 16 rows that choose among 8, in place of 4 rows."""
    est = estimated(number=8, dp=8, ep=4, capacity=1.25)
    assert sizes_of_exchanges(est) == [8 * 5 * HIDDEN * 4] * 4
    assert "capacity=1.25" in str(est.layout) and "capacity=1.25" in python_line(est.layout)


def test_search_counts_slots_of_a_capacity() -> None:
    """All layouts that it tries have it, also those whose experts are cut over replicas."""
    rows = {"x": torch.ones(2 * ROWS, HIDDEN, device="meta"), "y": torch.ones(2 * ROWS, HIDDEN, device="meta")}
    with torch.device("meta"):
        model = Layers()
    result = autotp.search(model, gpus=2, gpu="a100-80gb", batch=8 * ROWS, example_inputs=rows, capacity=1.25)
    assert all(est.layout.capacity == 1.25 for est in result.best)
    assert "capacity=1.25" in python_line(result.best[0].layout) and {est.layout.ep for est in result.best} > {1}


def test_experts_are_divided_and_all_else_is_not() -> None:
    whole, cut = estimated(width=1000, dp=4), estimated(width=1000, dp=4, ep=4)
    experts = 4 * (2 * 8 * 1000 + 1000 + 8) * 4  # Bytes: both matrices and biases of four experts, in float32.
    for kind, times in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        saved = getattr(whole.memory[0], kind) - getattr(cut.memory[0], kind)
        assert saved == pytest.approx(times * experts * 3 / 4), kind
    assert whole.flops == cut.flops


def test_experts_are_summed_over_their_copies() -> None:
    """Each of four ranks has all experts, or half of them and one copy, or a quarter and nothing to sum."""
    gradients = [estimated(width=100_000, dp=4, ep=ep).spent["gradients dp"] for ep in (1, 2, 4)]
    assert gradients[0] > 1.5 * gradients[1] > 5 * gradients[2] > 0


@pytest.mark.parametrize("ep", [4, 2, 1])
def test_zero_divides_experts_over_their_copies(ep: int) -> None:
    """Each of four ranks then has an expert, in each layout; what it gathers are those that it has without ZeRO."""
    plain, divided = (estimated(width=1000, dp=4, ep=ep, zero=zero) for zero in (0, 3))
    experts = (2 * 8 * 1000 + 1000 + 8) * 4
    of_rank = experts * 4 / ep
    others = plain.memory[0].weights - of_rank
    assert divided.memory[0].weights == pytest.approx(experts + others / 4)
    assert divided.gathers[0].bytes == pytest.approx(of_rank * (ep < 4) + others)


def test_the_error_bar_counts_the_rows_of_the_fullest_rank() -> None:
    est = estimated(dp=4, ep=4)
    assert est.error == pytest.approx(step_bar(est.device) + FULLEST * est.spent["all-to-all ep"] / est.seconds)
    assert f"a rank of ep=4 with {FULLEST:.0%} more rows than the mean" in str(est)
    assert estimated(dp=4).error == step_bar(est.device)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"dp": 4, "ep": 3}, "ep=3 does not divide dp=4: experts are cut over replicas"),
        ({"dp": 8, "ep": 8}, "ep=8 does not divide the 4 experts of a layer"),
        ({"dp": 4, "ep": 2, "cp": 2}, "ep=2 beside cp=2: estimates do not count rows of parts of sequences"),
        ({"dp": 4, "ep": 0}, "ep=0 is not a whole number of 1 or more"),
    ],
    ids=["dp", "experts", "sequences", "whole"],
)
def test_estimate_refuses_what_distribute_does(layout: dict[str, Any], expected: str) -> None:
    assert expected in message(lambda: estimated(**layout))


def test_search_proposes_to_cut_experts_that_do_not_fit() -> None:
    """Eight experts of 1.1 GB, with gradients and moments, fit on four devices only. `estimate` has the same price."""
    rows = {"x": torch.zeros(2, HIDDEN), "y": torch.zeros(2, HIDDEN)}
    with torch.device("meta"):
        model = Layer(8, 4_000_000, lambda x, weight, ends: F.grouped_mm(x, weight, offs=ends))
    device = "312TF 2TB/s 4.3GB node=1x300GB/s net=25GB/s"
    best = autotp.search(model, gpus=4, gpu=device, batch=16, dtype=torch.bfloat16, example_inputs=rows).best[0]
    assert best.layout.ep > 1 and f"ep={best.layout.ep}" in python_line(best.layout)
    options = vars(best.layout)
    assert autotp.estimate(model, gpu=device, example_inputs=rows, **options).seconds == pytest.approx(best.seconds)
