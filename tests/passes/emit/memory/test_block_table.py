"""block_table: bytes, seconds and operands of each value of a block."""

from __future__ import annotations

from typing import Any

import torch
from graphs import draft, some
from torch import fx, nn

from autotp.costs.hardware import CPU_GLOO
from autotp.passes.emit.memory.block_table import (
    BlockTable,
    BlockValue,
    block_table,
    is_uneven,
    over_groups,
    without_collectives,
)

aten = torch.ops.aten


def table_of(make: Any, **operands: Any) -> BlockTable:
    graph = draft(make, **operands)
    args = [x.clone().requires_grad_(x.is_floating_point()) for x in operands.values()]
    return block_table(fx.GraphModule(nn.Module(), graph), args, {}, CPU_GLOO)[0]


def mlp(call: Any, x: Any, w: Any, v: Any) -> Any:
    h = call(aten.linear.default, x, w)
    g = call(aten.gelu.default, call(aten.view.default, h, [4, 8]))
    return call(aten.linear.default, g, v)


def test_table_has_what_autograd_keeps_of_each_value() -> None:
    table = table_of(mlp, x=some(4, 6), w=some(8, 6), v=some(3, 8))
    rows = {name: (value.reads, value.inputs, value.made, value.kept) for name, value in table.values.items()}
    size = some(1).itemsize
    assert rows == {
        "linear_default": ((), ("x", "w"), 32 * size, 32 * size),  # gelu keeps its operand, a view of it.
        "gelu_default": (("linear_default",), (), 32 * size, 32 * size),
        "linear_default_1": (("gelu_default",), ("v",), 12 * size, 0),
    }
    assert table.inputs == {"x", "w", "v"} and table.results == ("linear_default_1",)
    assert all(value.seconds > 0 for value in table.values.values())


def test_what_is_computed_again_needs_what_it_reads() -> None:
    table = table_of(mlp, x=some(4, 6), w=some(8, 6), v=some(3, 8))
    seconds = {name: value.seconds for name, value in table.values.items()}
    gelu = table.after({"gelu_default": "recompute"})
    assert set(gelu.kept) == {"linear_default"} and gelu.seconds == seconds["gelu_default"]
    both = table.after({"gelu_default": "recompute", "linear_default": "recompute"})
    assert not both.kept and both.seconds == seconds["gelu_default"] + seconds["linear_default"]
    # Nobody needs the result again.
    assert table.after({"linear_default_1": "recompute"}).seconds == 0
    assert table.after({"gelu_default": "host"}).moved == table.values["gelu_default"].kept


def test_a_mask_is_a_seed_in_the_fate_bits() -> None:
    def make(call: Any, x: Any) -> Any:
        return call(aten.mul.Tensor, call(aten.dropout.default, x, 0.5, True), x)

    (dropout, _) = table_of(make, x=some(4, 6)).values.values()
    assert dropout.seeds and dropout.smaller < dropout.kept


def test_a_condition_takes_an_eighth_in_the_fate_bits() -> None:
    def make(call: Any, x: Any) -> Any:
        return call(aten.where.self, call(aten.gt.Scalar, x, 0.0), x, call(aten.neg.default, x))

    value = table_of(make, x=some(4, 6)).values["gt_scalar"]
    assert (value.kept, value.smaller, value.seeds) == (24, 3, False)


def test_an_operator_that_enters_autocast_fixes_its_block() -> None:
    from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast

    def make(call: Any, x: Any) -> Any:
        region = call(enter_autocast, "cpu", torch.bfloat16, True, True)
        y = call(aten.exp.default, x)
        call(exit_autocast, region)
        return y

    graph = draft(make, x=some(4))
    table = block_table(fx.GraphModule(nn.Module(), graph), [some(4).requires_grad_()], {}, CPU_GLOO)[0]
    assert all(value.fixed for value in table.values.values())


def test_fates_are_those_of_all_operators_in_a_memory() -> None:
    table = table_of(mlp, x=some(4, 6), w=some(8, 6), v=some(3, 8))
    assert table.of_operators({"linear_default": "recompute"}) == {
        "linear_default": "recompute",
        "view_default": "recompute",
    }


def test_collectives_can_be_left_out_of_what_runs_again() -> None:
    table = table_of(mlp, x=some(4, 6), w=some(8, 6), v=some(3, 8))
    assert not any(value.fixed for value in without_collectives(table).values.values())


def test_names_of_groups_are_replaced() -> None:
    assert over_groups((1, "tp", "sum"), {"tp": "counted tp"}) == (1, "counted tp", "sum")
    assert not is_uneven(aten.add.Tensor, (1, 2))


def test_seconds_are_summed_in_the_order_of_the_table() -> None:
    """Of names whose order in a set is another one on each rank: the last digit decides between equal choices."""
    graph = fx.Graph()
    for seed in range(40):
        seconds = {f"{seed}-{i}": 1 / (3 * i + seed + 1) for i in range(9)}
        values = {
            name: BlockValue(name=name, node=graph.placeholder("x"), seconds=s, made=1, kept=1, smaller=1)
            for name, s in seconds.items()
        }
        table = BlockTable(values=values, inputs=frozenset(), results=())
        assert table.after(dict.fromkeys(values, "recompute")).seconds == sum(seconds.values())
