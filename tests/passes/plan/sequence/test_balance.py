"""balance: ranks of a cut sequence have equal work in causal attention, and the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import TwoStreams, gpt, two_streams
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls, find_inputs
from autotp.errors import Error
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_rows
from autotp.ops.collectives import all_gather, scatter
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.sequence.balance import balance
from autotp.passes.program.program import Program


def program(model: nn.Module, cp: int, *given: Any, **settings: Any) -> Program:
    """The program of the first of `cp` ranks."""
    args, kwargs = find_inputs(model, given or None)
    return analyse(skeleton_of(model), args, kwargs, 1, Options(cp=cp, **settings))


def called(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def test_balance_puts_tokens_in_zigzag_and_keys_in_order() -> None:
    graph = program(gpt(n_layer=2), 2).graph
    moved = called(graph, zigzag)
    assert all(user.target is scatter for node in moved for user in node.users)  # Tokens, labels and positions.
    assert len(moved) == 3
    keys = called(graph, in_order)
    assert len(keys) == 4 and all(node.args[0].target is all_gather for node in keys)  # type: ignore[union-attr]
    assert [node.args[3:5] for node in called(graph, zigzag_rows)] == [(2, 0), (2, 0)]


def test_balance_adds_no_traffic() -> None:
    model = gpt(n_layer=2)
    found = [autotp.explain(model, 1, cp=2, without=without).traffic for without in ((), ("balance",))]
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [2, 3, 5, 7, 8, 13])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_balance_of_any_length_equals_one_device(cp: int, length: int) -> None:
    """Also with parts that are empty, and with outputs that every rank has whole and in order."""
    model = gpt(n_layer=1)
    tokens = torch.randint(24, (2, length))
    for given in ((tokens, tokens), (tokens,)):
        report = compare_calls(model, find_inputs(model, given), 1, Options(cp=cp, outputs="full"))
        assert report.ok and report.worst.error < 1e-12, report


class Attends(nn.Module):
    """Causal attention between linear layers, and something done to the rows."""

    def __init__(self, rows: Any = lambda x: x) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.rows(y.transpose(1, 2).flatten(2))).square().mean()


INPUTS = torch.arange(2 * 7 * 12, dtype=torch.float64).reshape(2, 7, 12).sin()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda x: x.cumsum(1), id="sum"),
        pytest.param(lambda x: x.flip(1), id="flip"),
        pytest.param(lambda x: x + x.roll(1, 1), id="roll"),
        pytest.param(lambda x: x[:, 1:], id="slice"),
        pytest.param(lambda x: x * torch.arange(x.shape[1]).unsqueeze(1), id="positions"),
        pytest.param(lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x, id="shift"),
        pytest.param(lambda x: x.transpose(0, 1), id="transposed"),
        pytest.param(lambda x: x.flatten(0, 1), id="rows-of-a-batch"),
        pytest.param(lambda x: x.sort(1).values, id="sort"),
        pytest.param(lambda x: x.softmax(1), id="softmax"),
        pytest.param(lambda x: torch.cat([x[:, :1], x], 1), id="one-more"),
        pytest.param(lambda x: x.mean(1, keepdim=True) + x, id="mean"),
    ],
)
def test_balance_keeps_order_for_operators_that_need_it(rows: Any) -> None:
    """They read rows in order: the rest of the model is balanced, or is not, with a reason in the plan."""
    model = Attends(rows).double()
    report = compare_calls(model, find_inputs(model, INPUTS), 1, Options(cp=2))
    assert report.ok and report.worst.error < 1e-12, report
    found = program(model, 2, INPUTS)
    assert found.sequences.balanced == 1 or found.sequences.unbalanced


def test_balance_leaves_exact_dropout_in_order() -> None:
    model = Attends(lambda x: F.dropout(x, 0.2)).double()
    exact = program(model, 2, INPUTS, randomness="exact")
    assert exact.sequences.balanced == 0
    assert exact.sequences.unbalanced == ('dropout draws the numbers of one device (randomness="exact")',)
    assert compare_calls(model, find_inputs(model, INPUTS), 1, Options(cp=2, randomness="exact")).ok
    assert program(model, 2, INPUTS).sequences.balanced == 1


class Across(nn.Module):
    """Causal attention to itself, and causal attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.kv = nn.Linear(4, 12), nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch heads seq 4]"""
        own = F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)
        return F.scaled_dot_product_attention(own, *self.kv(y).chunk(2, -1), is_causal=True).square().mean()


def test_plan_says_what_balance_did_and_why_not() -> None:
    assert "balance     the ranks have equal work in 2 causal attentions" in str(autotp.explain(gpt(), 1, cp=2))
    given = torch.randn(1, 2, 6, 4, dtype=torch.float64), torch.randn(1, 2, 9, 4, dtype=torch.float64)
    plan = autotp.explain(Across().double(), 1, cp=2, example_inputs=given)
    why = "scaled_dot_product_attention reads another sequence"
    assert plan.balanced == 0 and plan.unbalanced == (why,)
    assert plan.to_dict()["unbalanced"] == [why] and plan.to_dict()["balanced"] == 0
    assert f"balance     the last rank has the most work in causal attention: {why}" in str(plan)
    assert compare_calls(Across().double(), (given, {}), 1, Options(cp=2)).ok


class Returns(Attends):
    """Returns its rows in several shapes."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.rows(y)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda y: y, id="rows"),
        pytest.param(lambda y: y.transpose(0, 1), id="transposed"),
        pytest.param(lambda y: y.flatten(0, 1), id="rows-of-a-batch"),
        pytest.param(lambda y: (y, y.flatten()), id="both"),
    ],
)
def test_balance_returns_outputs_in_order(rows: Any) -> None:
    model = Returns(rows).double()
    report = compare_calls(model, find_inputs(model, INPUTS), 1, Options(cp=2, outputs="full"))
    assert report.ok and report.worst.error < 1e-12, report


@pytest.mark.parametrize("cp", [2, 3])
def test_balance_of_two_sequences_equals_one_device(cp: int) -> None:
    """A value in the order of one is read in that of the other."""
    model = TwoStreams().double()
    report = compare_calls(model, (two_streams(), {}), 1, Options(cp=cp))
    assert report.ok and report.worst.error < 1e-12, report
    assert program(model, cp, *two_streams()).sequences.balanced == 2


def test_balance_leaves_graphs_without_causal_attention() -> None:
    args, kwargs = find_inputs(gpt(), None)
    before = analyse(skeleton_of(gpt()), args, kwargs, 1, Options())
    same = balance(before.graph, before.axes, before.decision, 2, "fast")
    assert same.graph is before.graph and not same.reasons and not same.balanced


@pytest.mark.parametrize(("at", "value"), [(3, 4), (4, 1)], ids=["parts", "rank"])
def test_check_refuses_zigzag_rows_of_another_rank(at: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotp.passes.lower import localize

    right = localize.FORMS[zigzag_rows]

    def wrong(*given: Any) -> Any:
        target, args = right(*given)
        return target, (*args[:at], value, *args[at + 1 :])

    monkeypatch.setitem(localize.FORMS, zigzag_rows, wrong)
    with pytest.raises(Error, match="zigzag_rows"):
        program(gpt(), 2)
