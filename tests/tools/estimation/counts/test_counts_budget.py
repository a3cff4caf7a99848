"""`estimate(memory=)`: what `parallelize` and `distribute` choose, before there are ranks."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import gpt
from torch import nn

import autotp
from autotp.costs.room import tensor_room
from autotp.diagnostics.plan import MemoryPlan
from autotp.diagnostics.report import memory_plan
from autotp.models.gpt import GPT, GPTConfig
from autotp.options import memory_limit
from benchmarks.calls import cards_of_24gb

checks = Checks()
ROWS, LENGTH = 4, 16


def small(layers: int = 6) -> nn.Module:
    """A GPT with dropout, of more blocks than an estimate captures."""
    torch.manual_seed(0)
    return gpt(n_layer=layers, n_head=4, n_embd=32, vocab_size=96, dropout=0.1)


def tokens() -> dict[str, torch.Tensor]:
    x = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 61
    return {"tokens": x, "labels": x}


def estimated(model: nn.Module, **options: Any) -> autotp.Estimate:
    given: dict[str, Any] = {"gpu": "cpu-gloo", "batch": ROWS, "micro_batch": ROWS, "example_inputs": tokens()}
    return autotp.estimate(model, **given | options)


def expect_same(predicted: MemoryPlan, chosen: MemoryPlan) -> None:
    """But for the number by which `distribute` divides a loss, which `parallelize` does not keep."""
    for name in ("memory", "fixed", "collectives"):
        assert (name, getattr(predicted, name)) == (name, getattr(chosen, name))
    # The losses differ by a few values of a row, too, which exist for a moment.
    assert predicted.needed == pytest.approx(chosen.needed, rel=2e-3)
    for name in ("kept", "kept_without"):
        assert (name, 0) == (name, (getattr(predicted, name) - getattr(chosen, name)) // 9)
    assert predicted.seconds == pytest.approx(chosen.seconds) and predicted.gigabyte == pytest.approx(chosen.gigabyte)
    ours, theirs = ({(r.at, r.bytes // 9, r.staying // 9) for r in plan.largest[:5]} for plan in (predicted, chosen))
    assert ours == theirs


@checks.on(2)
def ranks_choose_what_was_estimated(rank: int, n: int) -> None:
    """A share, bytes, and frozen parameters, on the rank that holds most."""
    frozen = small()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("c_proj" in name)
    for model, memory in ((small(), "50%"), (small(), 1_300_000), (frozen, "60%")):
        predicted = estimated(model, tp=n, memory=memory).budgets
        parallel = autotp.parallelize(copy.deepcopy(model), n, example_inputs=tokens(), memory=memory)
        assert len(predicted) == 1 and parallel.plan.memory is not None
        expect_same(predicted[0], parallel.plan.memory)


@checks.on(2)
def stages_choose_what_was_estimated(rank: int, n: int) -> None:
    """Also where a rank has two stages, which share its bytes."""
    model = small()
    for memory, given in (("40%", {}), (1_450_000, {"schedule": "interleaved", "interleave": 2})):
        options: dict[str, Any] = {"pp": n, "memory": memory, **given}
        est = estimated(model, batch=2 * ROWS, **options)
        trainer = autotp.distribute(copy.deepcopy(model), microbatches=2, example_inputs=tokens(), **options)
        trainer.step(**{name: x.repeat(2, 1) for name, x in tokens().items()})
        for i, stage in trainer._pipelines[0].stages.items():
            chosen = memory_plan(stage.module)
            assert chosen is not None and est.homes[i] == rank
            expect_same(est.budgets[i], chosen)


@checks.on(2)
def replicas_divide_what_was_estimated(rank: int, n: int) -> None:
    """The states of an optimizer under ZeRO."""
    for zero, state_bytes in ((0, None), (1, 2.03), (2, None), (3, None), (3, 0.0)):
        options: dict[str, Any] = {"dp": n, "zero": zero, "memory": "2GB", "state_bytes": state_bytes}
        est = estimated(small(2), batch=n * ROWS, **options)
        trainer = autotp.distribute(small(2), example_inputs=tokens(), **options)
        chosen = memory_plan(trainer._pipelines[0].stages[0].module)
        assert chosen is not None
        expect_same(est.budgets[0], chosen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def on_meta(layers: int = 6) -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=1024, block_size=512, n_layer=layers, n_head=8, n_embd=256, dropout=0.0))


def on_gpu(model: nn.Module, **options: Any) -> autotp.Estimate:
    given: dict[str, Any] = {
        "gpu": "a100-80gb", "batch": 8, "micro_batch": 4, "tp": 2, "dtype": torch.bfloat16,
    }  # fmt: skip
    return autotp.estimate(model, **given | options)


def test_bytes_and_seconds_lie_between_none_and_full() -> None:
    """With all that a stage keeps, an estimate is that without a budget; with the least it is near that of "full"."""
    plain, full, everything = (
        on_gpu(on_meta(), **options) for options in ({}, {"recompute": "full"}, {"memory": "100%"})
    )
    assert everything.seconds == plain.seconds
    assert everything.fullest.total == pytest.approx(plain.fullest.total, rel=0.005)
    text = message(lambda: on_gpu(on_meta(), memory="1%"))
    least = on_gpu(on_meta(), memory=text.partition('memory="')[2].partition('"')[0])
    kept = [est.fullest.activations + est.fullest.logits for est in (plain, least, full)]
    assert kept[1] == pytest.approx(least.budgets[0].kept) and kept[1] - kept[2] < 0.01 * kept[0]  # Whole percent.
    before = float("inf")
    for memory in ("30%", "50%", "70%", "90%"):
        est = on_gpu(on_meta(), memory=memory)
        assert plain.seconds <= est.seconds <= before and est.seconds < 1.02 * full.seconds
        assert est.budgets[0].kept <= float(memory[:-1]) / 100 * est.budgets[0].kept_without
        before = est.seconds
    assert est.spent["computed again"] == pytest.approx(2 * est.budgets[0].seconds)
    assert plain.flops_again == est.flops_again == 0 < least.flops_again < plain.flops  # 90% adds and multiplies.


def test_a_budget_in_bytes_is_what_the_fullest_moment_takes() -> None:
    """The estimate reads the count of the budget."""
    for memory in ("70MB", "80MB", "90MB"):
        est = on_gpu(on_meta(), memory=memory)
        limit = float(memory[:-2]) * 1e6
        assert est.budgets[0].needed <= limit and est.fullest.total == pytest.approx(est.budgets[0].needed, rel=0.001)


def test_states_of_another_optimizer_count_with_and_without_a_budget() -> None:
    adam, small_states = (on_gpu(on_meta(), state_bytes=state_bytes) for state_bytes in (None, 2.0))
    assert small_states.fullest.optimizer > 0
    assert small_states.fullest.optimizer == pytest.approx(adam.fullest.optimizer / 4)
    limit = int(0.9 * adam.fullest.total)
    plans = [on_gpu(on_meta(), memory=limit, state_bytes=x).budgets[0] for x in (None, 2.0)]
    assert plans[0].fixed - plans[1].fixed == pytest.approx(adam.fullest.optimizer * 3 / 4, rel=1e-6)
    assert plans[1].kept > plans[0].kept and plans[1].seconds < plans[0].seconds


def test_nothing_fits_is_one_error_with_the_smallest_budget() -> None:
    """Of all stages of a pipeline."""
    text = message(lambda: on_gpu(on_meta(), pp=2, memory=1000))
    needed = text.partition('try      memory="')[2].partition('"')[0]
    assert "this rank needs at least" in text and "gradients, optimizer states and buffers" in text
    limit = memory_limit(needed)
    assert max(stage.needed for stage in on_gpu(on_meta(), pp=2, memory=needed).budgets) <= limit
    less = int(limit - 2**20 / 50)  # The number is rounded up to a hundredth of a MiB.
    assert f'try      memory="{needed}"' in message(lambda: on_gpu(on_meta(), pp=2, memory=less))


FULL = "312TF 2TB/s 4GiB node=8x300GB/s net=25GB/s"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2}, "zero-1": {"tp": 1, "dp": 2, "zero": 1}, "zero-3": {"tp": 1, "dp": 2, "zero": 3},
    "stages": {"tp": 1, "pp": 2, "batch": 32}, "own-dtype": {"tp": 1, "dp": 2, "zero": 2, "dtype": None},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_fits_auto_fits_the_estimate(name: str) -> None:
    """On a device on which it would not fit without a budget; and the budget uses nearly all of it."""
    given: dict[str, Any] = {"gpu": FULL, "batch": 16, "micro_batch": 8, **LAYOUTS[name]}
    plain = on_gpu(on_meta(), **given)
    # As much memory as makes tensors short of what they would take: buffers and libraries are there in any case.
    beside = plain.fullest.buffers + 2**30
    gpu = replace(plain.device, memory=beside + 0.9 * (plain.fullest.reserved - beside))
    assert not on_gpu(on_meta(), **given | {"gpu": gpu}).fits
    est = on_gpu(on_meta(), **given | {"gpu": gpu}, memory="auto")
    room = tensor_room(gpu, est.layout.axes)
    assert est.budgets[0].memory == int(room) and "memory=auto" in str(est.layout)
    assert est.fits and 0.8 * room < est.fullest.total <= room


def test_auto_is_for_devices_with_memory_of_their_own() -> None:
    text = message(lambda: estimated(small(), memory="auto"))
    assert 'memory="auto" on a CPU, which shares its memory with other programs' in text


def test_a_budget_stands_in_place_of_recompute() -> None:
    assert "both say what is computed again" in message(lambda: on_gpu(on_meta(), memory="50%", recompute="full"))


def test_the_text_and_the_data_show_the_values() -> None:
    est = on_gpu(on_meta(), memory="50%", pp=2)
    text = str(est)
    assert "kept for backward" in text and "\nstage 1\n" in text and "the next gigabyte would save" in text
    data = json.loads(json.dumps(est.to_dict()))["budgets"]
    assert len(data) == 2 and data[0]["largest"][0]["at"].startswith("gpt.py:")
    assert on_gpu(on_meta()).to_dict()["budgets"] == []


def test_a_pipeline_keeps_several_microbatches() -> None:
    """The first stage has more of them, and a smaller part of each may stay."""
    model = on_meta(8)
    plain = on_gpu(model, pp=4, batch=32, tp=1)
    limit = int(0.7 * plain.fullest.total)
    stages = on_gpu(model, pp=4, batch=32, tp=1, memory=limit).budgets
    shares = [stage.kept / stage.kept_without for stage in stages]
    assert shares[0] < shares[1] <= shares[2]


@pytest.mark.costly
@pytest.mark.timeout(300)
def test_the_table_of_cards_of_24_gb_is_as_the_page_says() -> None:
    """Its row of full training in bfloat16, which needs a budget."""
    text = (Path(__file__).parents[4] / "docs" / "memory.md").read_text()
    ways = tuple(f"| {way} |" for way, _ in cards_of_24gb.ROWS)
    lines = [line for line in text.splitlines() if line.startswith(ways)]
    assert len(lines) == len(ways) and lines[2] == cards_of_24gb.row(*cards_of_24gb.ROWS[2])
