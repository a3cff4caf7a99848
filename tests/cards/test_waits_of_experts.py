"""Mixtures of experts: how often a layer waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cards.spies import ROOT, Traffic, host_waits
from ranks import Checks

import autotp

checks = Checks(cards=True)
LAYERS = 2


def waits(ranks: int, dtype: torch.dtype, experts: Any) -> Traffic:
    """The waits of a step of Mixtral after three, forward and backward."""
    pytest.importorskip("transformers")
    from support.hf_families import FAMILIES

    model, inputs = FAMILIES["mixtral"]()
    parallel = autotp.parallelize(model.to(dtype).train(), ranks, experts=experts, example_inputs=inputs)
    inputs = {name: value.cuda() for name, value in inputs.items()}
    for _ in range(3):
        parallel(**inputs).loss.backward()
    with host_waits() as traffic:
        parallel(**inputs).loss.backward()
    return traffic


def is_of_one_device(line: str) -> bool:
    """Whether one device waits as well: for the mask that transformers looks at, and in torch's own product.

    That one waits on the CPU, and on cards older than Hopper.
    """
    file, number = line.split(" ")[0].split(":")
    return (
        file.endswith("guards/values.py") or "F.grouped_mm" in (ROOT / file).read_text().splitlines()[int(number) - 1]
    )


def expect_a_wait_a_layer(ranks: int, dtype: torch.dtype, experts: Any) -> None:
    expect_few(waits(ranks, dtype, experts))


def expect_few(traffic: Traffic) -> None:
    """At most one wait a layer."""
    own = sum(count for (_, line), count in traffic.own_waits.items() if not is_of_one_device(line))
    assert own <= LAYERS, f"{own} waits\n{traffic}"


@checks.on(2)
def a_layer_whose_experts_are_cut_by_width_waits_once(rank: int, n: int) -> None:
    """In float32: for the ends of the groups of rows, once for all products."""
    expect_a_wait_a_layer(n, torch.float32, "width")


@checks.on(2)
def a_layer_whose_experts_are_cut_waits_once(rank: int, n: int) -> None:
    expect_a_wait_a_layer(n, torch.float32, "expert")


@checks.on(2)
def a_layer_in_bfloat16_whose_experts_are_cut_waits_once(rank: int, n: int) -> None:
    expect_a_wait_a_layer(n, torch.bfloat16, "expert")


@checks.on(2)
def a_layer_whose_rows_travel_waits_once(rank: int, n: int) -> None:
    """For the counts, with which all sizes of the layer come."""
    pytest.importorskip("transformers")
    from support.hf_families import FAMILIES

    model, inputs = FAMILIES["mixtral"]()
    model.config.output_router_logits = False  # The loss that balances experts reads all rows of a batch.
    del inputs["attention_mask"]  # A trainer looks at masks, with experts or without.
    trainer = autotp.distribute(model.train(), dp=n, ep=n, example_inputs=inputs)
    inputs = {name: value.roll(rank, 1).cuda() for name, value in inputs.items()}
    for _ in range(3):
        trainer.step(**inputs)
    with host_waits() as traffic:
        trainer.step(**inputs)
    expect_few(traffic)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
