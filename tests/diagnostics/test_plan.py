"""plan: the table that it prints as, compared whole, and what a step sends."""

from __future__ import annotations

import pytest
import torch
from errors import line_of, message
from small_models import gpt
from torch import Tensor, nn

import autotp
from autotp.diagnostics.plan import CutRow, Plan, StepCollective, Traffic
from autotp.sharding.layout import Layout

X = torch.ones(2, 5, 8)
HALVES = Layout((8, 4), 0, (((0, 4),), ((4, 8),)))


class Model(nn.Module):
    """Two blocks, and an operator that no rule is known for."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.last, self.unread = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x @ torch.linalg.matrix_exp(self.last.weight)  # no rule


TABLE = """\
Model on tp=2

cut               shape       forward     backward    why
h.0.0.weight      [16@tp, 8]                          16 width: linear -> activation -> linear
h.{0-1}.0.bias    [16@tp]                             16 width: linear -> activation -> linear
h.{0-1}.2.weight  [8, 16@tp]  all-reduce              16 width: linear -> activation -> linear
h.1.0.weight      [16@tp, 8]              all-reduce  16 width: linear -> activation -> linear

whole on every rank             shape   why                                          at
unread                          [3]     unused with these inputs                     ?
h.{0-1}.2.bias                  [8]     every rank uses it after the sum over ranks  test_plan.py:LOOP
last.weight                     [8, 8]  aten.linalg_matrix_exp.default has no rule   test_plan.py:LAST
aten.linalg_matrix_exp.default  [8, 8]  no rule: replicated                          test_plan.py:LAST

parameters  2.5 KB, the fullest rank holds 1.4 KB (56.6%)
forward     2 all-reduce; 640 B for inputs 2x5x8
backward    1 all-reduce; 320 B for inputs 2x5x8"""


def test_plan_prints_as_a_table() -> None:
    expected = TABLE
    for mark, text in (("LOOP", "x = x + block(x)"), ("LAST", "return x @ torch.linalg")):
        expected = expected.replace(mark, line_of(__file__, text).split(":")[1].split()[0])
    assert str(autotp.explain(Model(), 2, example_inputs=X)) == expected


def test_plan_has_rows_that_agree_with_totals() -> None:
    """The first block's input has no gradient, so its product sums none in backward."""
    plan = autotp.explain(Model(), 2, example_inputs=X)
    assert [row.name for row in plan.cuts if row.backward] == ["h.1.0.weight"]
    assert plan.traffic.backward == {"all-reduce": 1}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x[x.sum(-1) > 0]).relu())


def test_plan_says_that_a_size_depends_on_values() -> None:
    """No rule would help."""
    (row,) = (row for row in autotp.explain(Masked(), 2, example_inputs=X).whole if "index" in row.name)
    assert (row.shape, row.reason) == (("?", "?"), "its size depends on values: replicated")


def made(names: list[str], tp: int = 2, sends: tuple[StepCollective, ...] = ()) -> Plan:
    cuts = tuple(CutRow(name, HALVES, "all-reduce", "", "4 heads: q") for name in names)
    return Plan("Net", tp, cuts, (), 1000, 500, Traffic(sends, ((2, 3), (4,))))


def test_plan_counts_what_a_step_sends() -> None:
    """Counts by kind and direction, bytes of all."""
    sends = (
        StepCollective("all-reduce", "h.0", 300, False, False),
        StepCollective("all-reduce", "h.1", 300, False, False),
        StepCollective("all-gather", "h.1", 1500, True, True),
    )
    plan = made(["w"], sends=sends)
    assert (plan.traffic.forward, plan.traffic.backward) == ({"all-reduce": 2}, {"all-gather": 1})
    assert str(plan).splitlines()[-3:] == [
        "parameters  1.0 KB, the fullest rank holds 500 B (50.0%)",
        "forward     2 all-reduce; 600 B for inputs 2x3 4",
        "backward    1 all-gather; 1.5 KB for inputs 2x3 4",
    ]
    assert str(made([])).splitlines()[-1] == "backward    no collective; 0 B for inputs 2x3 4"


def test_plan_types_have_the_cuts_of_sequences() -> None:
    """The types of what is cut have both cuts; without cp there are none."""
    model = gpt(n_layer=2, n_head=4, n_embd=16, vocab_size=61)
    plan = autotp.explain(model, 2, cp=2)
    assert {"[b, s@cp, 16]", "[b, s@cp, 64@tp]"} <= plan.types.keys()
    assert plan.to_dict()["types"] == plan.types
    line = next(line for line in str(plan).splitlines() if line.startswith("types "))
    assert line.endswith(", ...") and line.count(" x ") == 4 and len(line) <= 100
    assert autotp.explain(model, 2).types == {}


def test_plan_of_one_rank_is_whole_and_sequences_are_counted() -> None:
    one = autotp.explain(gpt(), 1)
    assert not one.cuts and {row.reason for row in one.whole} == {"tp=1: weights are whole"}
    assert one.bytes_rank == one.bytes_total and not one.traffic.sends
    along = autotp.explain(gpt(), 2, sequence_parallel=True)
    assert along.along_sequence and f"sequence    {along.along_sequence} operators are cut along it" in str(along)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        ({"all_reduce": 1}, "`h.0` has 2 all_reduce in forward: attn.c_proj, mlp.c_proj\n  expected at most 1"),
        ({"backward_all_reduce": 0}, "`h.0` has 2 all_reduce in backward: attn.c_attn, mlp.c_fc\n  expected at most 0"),
        ({"all_sum": 1}, "expect has 'all_sum'\n  expected 'all_reduce', 'all_gather'"),
    ],
)
def test_expect_names_the_block_that_sends_more(budget: dict[str, int], text: str) -> None:
    assert text in message(lambda: autotp.explain(gpt(), 2, expect=budget))


def test_expect_limits_what_it_names_within_blocks() -> None:
    """The embedding's and the head's collectives are in no block."""
    autotp.explain(gpt(), 2, expect={"all_reduce": 2, "backward_all_reduce": 2, "all_gather": 0})
    plan = autotp.explain(gpt(), 2, cut={"h.1.mlp.c_fc": "rowwise"})
    plan.expect({"reduce_scatter": 0})
    assert "`h.1` has 3 all_reduce" in message(lambda: plan.expect({"all_reduce": 2}))
