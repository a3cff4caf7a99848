"""gather_ahead: a graph gathers its blocks' parameters one block ahead, in forward and in backward, and drops them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graphs import draft, some
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, fx, nn
from trainers import order_of_a_step, started

import autotp
from autotp.passes.emit.outline import blocks, outlined
from autotp.passes.emit.zero.gather_ahead import gather_ahead
from autotp.passes.emit.zero.room import Room, gathered
from autotp.passes.emit.zero.sharded_unit import ShardedUnit

aten = torch.ops.aten
NAMES = {"w": "h.0.weight", "v": "h.1.weight", "u": "h.2.weight", "s": "shared"}


def three_blocks(call: Any, x: Any, w: Any, v: Any, u: Any, s: Any) -> fx.Node:
    """Each block has a weight of its own; all read `s`."""
    for i, weight in enumerate((w, v, u)):
        for target, operand in ((aten.linear.default, weight), (aten.add.Tensor, s)):
            x = call(target, x, operand)
            x.meta["nn_module_stack"] = {"": (f"h.{i}", None)}
    return x


def block_name(unit: Any) -> str:
    return str(unit).removeprefix("rows_of_").removeprefix("h_").rpartition("_")[0]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (2, "rest+() 0+() rest 0 1+(0) 0- 1 2+(1) 1-0 2 2-1"),
        (None, "rest+() 0+() 1+(0) 2+(01) rest 0 1 2"),
    ],
)
def test_gather_ahead_starts_gathers_before_blocks(most: int | None, expected: str) -> None:
    """A plus starts a gather beside others, a name waits for it; after a minus backward gathers it and those next."""
    graph = draft(three_blocks, x=some(3, 4), w=some(4, 4), v=some(4, 4), u=some(4, 4), s=some(4))
    plain = outlined(graph, list(blocks(graph)), "block")
    module = gather_ahead(plain, NAMES, set(NAMES.values()), None, most and Room(most))
    words = []
    for node in module.graph.nodes:
        if node.op == "call_method":
            unit, last = block_name(node.args[0]), node.args[-1] if node.target == "leave" else node.args[1]
            others = "".join(map(block_name, last))
            words.append({"start": f"{unit}+({others})", "arrive": unit, "leave": f"{unit}-{others}"}[str(node.target)])
    assert " ".join(words) == expected


@pytest.mark.parametrize("most", range(2, 8))
def test_nodes_gather_what_is_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards and backwards of five blocks, of which each gather is noted."""
    blocks_of = [nn.Linear(4, 4) for _ in range(5)]
    weights = [block.weight for block in blocks_of]
    graph = draft(many_blocks, x=some(3, 4), **{f"w{i}": some(4, 4) for i in range(5)})
    names = {f"w{i}": f"h.{i}.weight" for i in range(5)}
    room = Room[ShardedUnit](most)
    module = gather_ahead(outlined(graph, list(blocks(graph)), "block"), names, set(names.values()), None, room)
    units = [part for part in module.children() if isinstance(part, ShardedUnit)]
    passes, starts = list[list[str]](), ShardedUnit._start

    def noted(unit: ShardedUnit, *args: Any) -> None:
        there = unit in [*room.members]
        starts(unit, *args)
        passes[-1] += [unit.names[0]] * (not there)

    monkeypatch.setattr(ShardedUnit, "_start", noted)
    for unit, weight in zip(units, weights, strict=True):
        unit.read([weight])
    x = torch.randn(3, 4)
    for _ in range(2):
        passes.append([])
        (y,) = module(x, *weights)
        passes.append([])
        y.sum().backward()
        assert len(room.members) <= most
    units[0].sums.finish()
    order = [unit.names[0] for unit in units]
    assert passes == list(gathered([order, order[::-1]] * 2, most))
    expected = torch.autograd.grad(sum_of(x, weights), weights)
    assert_values_close([weight.grad for weight in weights], [2 * g for g in expected])


def many_blocks(call: Any, x: Any, *weights: Any, **named: Any) -> fx.Node:
    """Five blocks with a weight each."""
    for i, weight in enumerate([*weights, *named.values()]):
        x = call(aten.linear.default, x, weight)
        x.meta["nn_module_stack"] = {"": (f"h.{i}", None)}
    return x


def sum_of(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = nn.functional.linear(x, weight)
    return x.sum()


def ordered(rank: int, n: int, zero: int) -> str:
    trainer, _ = started((1, 1, n), layers=4, zero=zero)
    return order_of_a_step(trainer)


@pytest.mark.parametrize(("zero", "before"), [(1, [0, 0, 0, 0, 0]), (3, [0, 0, 0, 4, 8])])
def test_zero_gathers_parameters_before_their_block_runs(zero: int, before: list[int]) -> None:
    """The products before each of the first five gathers: of the rest of the model, then of four blocks of four."""
    for text in run_ranks(ordered, 2, zero, timeout=100):
        parts = text.split("G")
        assert [sum(part.count(".") for part in parts[: i + 1]) for i in range(5)] == before
        # With ZeRO 1 nothing is gathered again. With ZeRO 3 the last block is there still when backward begins, and the
        # first one when the second microbatch does.
        assert text.count("G") == (5 if zero == 1 else 1 + 4 + 3 + 3 + 3)
        assert text.count("S") == (5 if zero == 1 else 2 * 5)


def skipping(rank: int, n: int) -> None:
    """An evaluation without the last block, then other parameters, then a step with it."""
    whole = Optional()
    rows = {"x": torch.arange(8.0).view(2, 4) / 8, "more": torch.ones(2, 1)}
    mine = {name: value[rank : rank + 1] for name, value in rows.items()}
    trainer = autotp.distribute(copy.deepcopy(whole), example_inputs=rows, dp=n, microbatches=1, zero=1)
    for _ in range(2):
        assert_values_close(trainer.evaluate(x=mine["x"]), whole(rows["x"]).detach())
        with torch.no_grad():
            for parameter in (*trainer.parameters(), *whole.parameters()):
                parameter.mul_(0.9)
        assert_values_close(trainer.step(**mine), whole(**rows).detach())


class Optional(nn.Module):
    """Three blocks; the last one runs only with a second input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """x: [batch 4]; more: [batch 1]"""
        x = self.h[1](self.h[0](x).tanh()).tanh()
        return (x if more is None else self.h[2](x * more)).square().mean()


def test_a_skipped_block_reads_new_parameters_later() -> None:
    """It would keep its old parameters."""
    run_ranks(skipping, 2, timeout=100)
