"""balance: ranks of a cut sequence have equal work in causal attention, and the numbers are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_packages import flash_attn
from ranks import Checks
from small_models import TwoStreams, gpt, two_streams
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls, find_inputs
from autotp.errors import Error
from autotp.integrations.attention_kernels import kernel_operator
from autotp.integrations.attention_kernels.kernel_operator import ZIGZAG
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_rows
from autotp.ops.collectives import all_gather, scatter
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.sequence.balance import balance
from autotp.passes.program import sequences
from autotp.passes.program.program import Program

checks, on_cards = Checks(), Checks(cards=True)


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


# ---- kernels of attention


class ByKernel(nn.Module):
    """Two layers of causal attention by flash-attn, one after the other, the log-sum-exp of which is read, too."""

    def __init__(self, groups: int = 4, more: str = "") -> None:
        super().__init__()
        self.groups, self.more = groups, more
        self.qkv = nn.ModuleList(nn.Linear(12, 12 + 6 * groups) for _ in range(2))
        self.by_head = nn.Parameter(torch.linspace(0.1, 0.9, 4), requires_grad=more == "sinks")

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        for layer in self.qkv:
            q, k, v = (t.unflatten(-1, (-1, 3)) for t in layer(x).split([12, 3 * self.groups, 3 * self.groups], -1))
            if self.more == "sinks":
                out, totals = flash_attn.cute.flash_attn_func(q, k, v, causal=True, learnable_sink=self.by_head)
            else:
                named = {"alibi_slopes": self.by_head} if self.more else {}
                dropped = {"return_attn_probs": True}
                out, totals, _ = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=5.0, **named, **dropped)
            x = x + out.flatten(2) + (0 * totals).mT.sum(-1, keepdim=True).to(x)
        return x


KERNELS = {"heads": (4, ""), "groups": (2, ""), "slopes": (4, "slopes"), "sinks": (2, "sinks")}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 3), (2, 2)])
def test_balance_of_a_kernel_equals_one_device(name: str, tp: int, cp: int) -> None:
    for length in (13, 2, 8):
        given = torch.randn(2, length, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        model = ByKernel(*KERNELS[name]).double()
        report = compare_calls(model, find_inputs(model, given), tp, Options(cp=cp, cp_attention="gather"))
        assert report.ok and report.worst.error < 1e-12, report
        assert report.plan.balanced == 2, report.plan


def test_balance_of_a_kernel_sends_as_much_as_without() -> None:
    plans = [
        autotp.explain(
            ByKernel(), 1, cp=2, example_inputs=torch.zeros(2, 16, 12), cp_attention="gather", without=without
        )
        for without in ((), ("balance",))
    ]
    assert plans[0].traffic == plans[1].traffic and [plan.balanced for plan in plans] == [2, 0]


def test_a_kernel_with_a_window_or_packed_rows_keeps_its_order() -> None:
    class Window(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flash_attn.flash_attn_func(x, x, x, causal=True, window_size=(2, 0))  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), Window())
    program_ = program(model, 2, torch.zeros(2, 16, 4, 4))
    assert not called(program_.graph, ZIGZAG) and not called(program_.graph, zigzag)


@contextmanager
def pairs_read() -> Iterator[list[int]]:
    """A region; yields the pairs of a query and a key of each call that stands for a kernel."""
    pairs, reference = list[int](), kernel_operator.REFERENCE

    def counted(query: Tensor, key: Tensor, *rest: Any) -> Any:
        queries, keys = query.shape[1], key.shape[1]
        pairs.append(queries * keys - queries * (queries - 1) // 2)
        return reference(query, key, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_operator, "REFERENCE", counted)
        yield pairs


@checks.on(4)
def ranks_have_equal_work_in_a_kernel(rank: int, n: int) -> None:
    """The keys that queries read, of each rank: without the order, the last of four ranks reads 7 times the first's."""
    given, ratios = torch.randn(2, 64, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    for without in ((), ("balance",)):
        plain = ByKernel(2).double()
        model = autotp.parallelize(
            copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", without=without, example_inputs=given
        )
        for length in (64, 56):
            with pairs_read() as pairs:
                output = model(given[:, :length])
            every = [torch.zeros((), dtype=torch.int64) for _ in range(n)]
            dist.all_gather(every, torch.tensor(sum(pairs)))
            ratios.append(float(max(every) / (sum(every) / n)))
            expected = plain(given[:, :length])
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
            for result in (output, expected):
                result.square().sum().backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                if p.requires_grad:
                    torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)
            plain.zero_grad()
            model.zero_grad()
    assert ratios[:2] == [1.0, 1.0] and min(ratios[2:]) > 1.7, ratios


@checks.on(2, rare=True)
def a_compiled_kernel_equals_one_device(rank: int, n: int) -> None:
    given, plain = torch.randn(2, 13, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), ByKernel(2)
    model = autotp.parallelize(
        copy.deepcopy(plain.double()), tp=1, cp=n, cp_attention="gather", example_inputs=given, check_inputs="never"
    )
    model(given)
    outputs = [m(given) for m in (plain, torch.compile(model, backend="aot_eager"))]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
    for p, q in zip(plain.qkv.parameters(), model.qkv.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


@on_cards.on(2)
def a_card_calls_the_kernel_for_each_piece(rank: int, n: int) -> None:
    given, plain = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0)).bfloat16(), ByKernel(2).bfloat16()
    model = autotp.parallelize(copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=given)
    by_kernel, lengths = kernel_operator._by_kernel, list[tuple[int, int]]()

    def called_kernel(name: str, arguments: Any, settings: Any) -> Any:
        lengths.append((arguments["query"].shape[1], arguments["key"].shape[1]))
        return by_kernel(name, arguments, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_operator, "_by_kernel", called_kernel)
        output = model(given.cuda())
    output.float().sum().backward()
    torch.testing.assert_close(output.cpu(), plain(given), rtol=0.05, atol=0.05)
    assert lengths == ([(3, 6), (3, 9)] if rank else [(3, 3), (3, 12)]) * 2


FAULTS = {"parts": (16, 4), "rank": (17, 1)}


@pytest.mark.parametrize("name", FAULTS)
def test_check_refuses_a_kernel_of_another_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, at, changed = sequences.lower, FAULTS[name], list[bool]()

    def lowered(*arguments: Any) -> fx.Graph:
        graph = lower(*arguments)
        for node in called(graph, ZIGZAG)[:1]:
            node.update_arg(*at)
            changed.append(True)
        return graph

    monkeypatch.setattr(sequences, "lower", lowered)
    with pytest.raises(Error):
        program(ByKernel(), 2, torch.zeros(2, 16, 12), cp_attention="gather")
    assert changed


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
