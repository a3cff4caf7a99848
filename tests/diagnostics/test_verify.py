"""The oracle can see: whatever is done wrong to a parallel model, verify says so, and says where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from architectures import Architecture, arguments, model
from errors import message
from faults import apart, argument, behind, bias_before_reduce, calls, conjugate, drop, on, red, repeat, resliced, wrong
from small_models import Plain, gpt
from torch import Tensor, fx, nn

import autotp
from autotp.diagnostics.differences import Difference
from autotp.diagnostics.verify import Report, Trial, make_trial, run_and_compare
from autotp.extensions import values_of
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from autotp.ops import collectives, dropout, lookup
from autotp.ops.losses import cross_entropy
from autotp.options import Options
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.emit import bind
from autotp.passes.emit.memory.budget import Budget, MemoryChoice
from autotp.passes.emit.python_calls import PYTHON_CALLS
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.program import canonicalized
from autotp.tools.bisect import bisect

CONJUGATES = (
    collectives.copy, collectives.reduce, collectives.scatter, collectives.gather, collectives.all_gather,
    collectives.reduce_scatter,
)  # fmt: skip
SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 61, "n_layer": 1, "n_head": 4, "n_embd": 16}


@cache
def gpt_trial() -> Trial:
    trained = gpt(**SIZES, dropout=0.1)
    return apart(make_trial(trained, (), trained.dummy_inputs, 2))


@cache
def bert_trial() -> Trial:
    trained = BERT(BERTConfig(**SIZES))
    return apart(make_trial(trained, (), trained.dummy_inputs, 2))


@cache
def alibi() -> Trial:
    """Slopes of heads that are scattered, logits that are gathered beside the loss."""
    arch = Architecture(positions="alibi", hidden=64, vocab=61, logits=True)
    return apart(make_trial(model(arch), (), arguments(arch), 2, Options("full")))


TRIALS = pytest.mark.parametrize("trial", [gpt_trial, bert_trial, alibi], ids=["gpt", "bert", "alibi"])


# ---- conjugates


@TRIALS
def test_verify_passes_what_nothing_changed(trial: Callable[[], Trial]) -> None:
    assert run_and_compare(trial()).ok


@TRIALS
def test_verify_sees_each_conjugate_that_is_dropped(trial: Callable[[], Trial]) -> None:
    nodes = calls(trial(), *CONJUGATES)
    assert len(nodes) >= 8
    assert [str(n) for n in nodes if not red(trial(), on(n.name, drop))] == []


@TRIALS
def test_verify_sees_each_conjugate_that_runs_twice(trial: Callable[[], Trial]) -> None:
    """The maximum of maxima is the maximum; all others count."""
    nodes = [n for n in calls(trial(), *CONJUGATES) if n.args[2:] != ("max",)]
    assert [str(n) for n in nodes if not red(trial(), on(n.name, repeat))] == []


@TRIALS
def test_verify_sees_each_conjugate_in_place_of_the_other(trial: Callable[[], Trial]) -> None:
    nodes = calls(trial(), collectives.copy, collectives.reduce)
    assert [str(n) for n in nodes if not red(trial(), on(n.name, conjugate))] == []


@pytest.mark.parametrize("kind", [collectives.copy, collectives.reduce], ids=["copy", "reduce"])
def test_verify_sees_a_conjugate_too_many(kind: Any) -> None:
    """Behind any value that a gradient flows through."""
    graph, captured = gpt_trial().graphs[0], gpt_trial().analysis.captured
    parameters = frozenset(n for n in graph.nodes if n.name in captured.parameters)
    values = needs_grad(graph, parameters) - parameters
    tensors = [n.name for n in graph.nodes if n in values and isinstance(n.meta["val"], Tensor)]
    assert len(tensors) > 30
    assert [name for name in tensors if not red(gpt_trial(), on(name, behind(kind, "tp")))] == []


def test_verify_names_what_is_wrong_alone() -> None:
    """A dropped copy leaves outputs right; wrong is the gradient of all that stands before it, and nothing else."""
    copies = calls(gpt_trial(), collectives.copy)
    before = [{"wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias"}]
    before += [before[0] | {f"h.0.attn.c_{part}.{kind}" for part in ("attn", "proj") for kind in ("weight", "bias")}]
    before[1] |= {"h.0.ln_2.weight", "h.0.ln_2.bias"}
    for node, expected in zip(copies[:2], before, strict=True):
        report = run_and_compare(gpt_trial(), on(node.name, drop))
        assert all(d.error <= report.tolerance for d in report.outputs)
        assert wrong(report) == expected
        assert report.worst.name in expected


def test_verify_sees_the_gradient_of_an_input() -> None:
    mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    trial = apart(make_trial(mlp, (torch.ones(2, 6),), {}, 2))
    (node,) = calls(trial, collectives.copy)
    assert run_and_compare(trial).ok
    assert wrong(run_and_compare(trial, on(node.name, drop))) == {"input 0"}


# ---- slices, sizes and numbers


@pytest.mark.parametrize("name", ["h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias"])
def test_a_fused_weight_cut_as_one(name: str) -> None:
    """Contiguous halves of q | k | v instead of half of each."""
    assert not run_and_compare(resliced(gpt_trial(), name, [(0, 24), (24, 48)])).ok


@pytest.mark.parametrize(
    "name", ["attention.query.weight", "attention.key.weight", "attention.value.bias", "attention.output.weight"]
)
def test_verify_sees_heads_in_another_order(name: str) -> None:
    assert not run_and_compare(resliced(bert_trial(), f"layer.0.{name}", [(8, 16), (0, 8)])).ok


@pytest.mark.parametrize("trial", [gpt_trial, bert_trial], ids=["gpt", "bert"])
def test_verify_sees_a_bias_that_every_rank_adds(trial: Callable[[], Trial]) -> None:
    reduced = [n for n in calls(trial(), collectives.reduce) if is_biased(n)]
    assert len(reduced) >= 2
    assert [str(n) for n in reduced if not red(trial(), on(n.name, bias_before_reduce))] == []


def is_biased(node: fx.Node) -> bool:
    reader = next(iter(node.users))
    return reader.target is torch.ops.aten.add.Tensor and any(arg.op == "placeholder" for arg in reader.all_input_nodes)


WRONG = {
    "scale": (dropout.exact_attention, 6, lambda scale: 0.7),
    "causal": (dropout.exact_attention, 5, lambda causal: not causal),
    "dropout": (dropout.exact_attention, 9, lambda cuts: ((*cuts[0][:2], ((1, 3),)),)),
    "lookup": (lookup.embedding, 2, lambda start: start + 1),
    "target": (cross_entropy.class_terms, 4, lambda start: start + 1),
}


@pytest.mark.parametrize("trial", [gpt_trial, bert_trial], ids=["gpt", "bert"])
@pytest.mark.parametrize("what", WRONG)
def test_verify_sees_a_wrong_argument(trial: Callable[[], Trial], what: str) -> None:
    """The softmax scale, the mask, the heads whose mask is drawn, where a rank's rows of the vocabulary start."""
    function, at, change = WRONG[what]
    (node,) = calls(trial(), function)
    assert not run_and_compare(trial(), on(node.name, argument(at, change))).ok


def test_verify_sees_a_loss_that_is_divided_twice() -> None:
    (node,) = calls(gpt_trial(), torch.ops.aten.div.Tensor)
    report = run_and_compare(gpt_trial(), on(node.name, behind(torch.ops.aten.mul.Tensor, 0.5)))
    assert [d.name for d in report.outputs if d.error > report.tolerance] == ["loss"]


# ---- the report


def test_report_prints_its_verdict_and_differences() -> None:
    gradients = (Difference("w", 3e-16), Difference("b", 0.0))
    good = Report(gpt_trial().plan, (Difference("loss", 2e-16),), gradients, (Difference("w", 1e-17),))
    assert good.ok
    assert str(good) == OK
    bad = replace(good, gradients=(Difference("w", 0.5), Difference("b", 0.25), Difference("c", 0.0)))
    assert not bad.ok
    assert bad.worst == Difference("w", 0.5)
    assert str(bad) == FAILED


OK = """\
GPT on tp=2: equal to one device (float64, tolerance 1e-09)
  outputs         1 compared, worst 2.0e-16  loss
  gradients       2 compared, worst 3.0e-16  w
  after a step    1 compared, worst 1.0e-17  w
  forward         5 all-reduce
  backward        3 all-reduce"""

FAILED = """\
GPT on tp=2: DIFFERENT from one device (float64, tolerance 1e-09)
  outputs         1 compared, worst 2.0e-16  loss
  gradients       3 compared, worst 5.0e-01  w
                    and 2.5e-01  b
  after a step    1 compared, worst 1.0e-17  w
  forward         5 all-reduce
  backward        3 all-reduce"""


def test_what_is_no_number_is_not_ok() -> None:
    (node,) = calls(gpt_trial(), torch.ops.aten.div.Tensor)
    report = run_and_compare(gpt_trial(), on(node.name, behind(torch.ops.aten.mul.Tensor, float("nan"))))
    assert not report.ok
    assert str(report.outputs[0]) == "nan  loss"


def test_verify_on_meta_computes_nothing() -> None:
    with torch.device("meta"):
        big = GPT(GPTConfig(n_layer=2))
    assert str(autotp.verify(big, tp=8)) == (
        "GPT on tp=8: the model is on meta: proved and counted, nothing computed\n"
        "  forward         1 all-gather, 5 all-reduce\n  backward        5 all-reduce"
    )


def test_verify_leaves_the_model_as_it_was() -> None:
    trained = BERT(BERTConfig(**SIZES))
    trained.layer[0].mlp.output.weight.requires_grad_(False)
    inputs = trained.dummy_inputs
    before = copy.deepcopy((trained.state_dict(), inputs))
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    assert autotp.verify(trained, tp=3, example_inputs=inputs).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    after = (trained.state_dict(), inputs)
    for was, now in zip(before, after, strict=True):
        assert list(was) == list(now)
        assert all(torch.equal(was[name], now[name]) and was[name].dtype == now[name].dtype for name in was)
    assert all(p.grad is None for p in trained.parameters())
    assert [n for n, p in trained.named_parameters() if not p.requires_grad] == ["layer.0.mlp.output.weight"]
    assert trained.training


class Counting(nn.Module):
    """Counts its calls, and leaves one buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """x: [n 8]"""
        self.calls.add_(1)
        return self.down(self.up(x).relu()) * self.scale


def test_a_buffer_that_is_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not among what the ranks' graphs return, and differs from one device's."""
    x = torch.randn(3, 8)
    report = autotp.verify(Counting(), 2, example_inputs=x)
    assert report.ok and [row.name for row in report.outputs if row.name in ("calls", "scale")] == ["calls"]

    def forgetful(*args: Any) -> Any:
        graph, updated = functionalize(*args)
        output = graph.output_node()
        output.args = (output.args[0][: len(output.args[0]) - len(updated)],)
        return graph, []

    monkeypatch.setattr(canonicalized, "functionalize", forgetful)
    report = autotp.verify(Counting(), 2, example_inputs=x)
    assert not report.ok and report.outputs[0].name == "calls"


class OfNumbers(nn.Module):
    """A model that makes its tensors of plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(31, 12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, *rows: list[int]) -> Tensor:
        x = self.table(torch.tensor(rows[0])[None]) if rows else self.table.weight
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("rows", [([1, 2, 3],), ()])
def test_verify_takes_a_model_without_tensors_among_its_arguments(rows: tuple[Any, ...]) -> None:
    report = autotp.verify(OfNumbers(), 3, example_inputs=rows)
    assert report.ok, report
    assert "20 width" in str(autotp.explain(OfNumbers(), 3, example_inputs=rows))


class Biased(nn.Module):
    """Attention of two heads, with a bias for each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, self.bias)


def test_verify_sees_a_gradient_that_one_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a difference, even if this rank's part has no elements: ranks would not call the same collectives."""
    x = torch.randn(2, 6, 8)
    assert autotp.verify(Biased(), 3, example_inputs=x).ok
    monkeypatch.setattr(bind, "_is_empty_attention", lambda node: False)
    monkeypatch.delitem(PYTHON_CALLS, torch.ops.aten.scaled_dot_product_attention.default)
    report = autotp.verify(Biased(), 3, example_inputs=x)
    assert [row.name for row in report.gradients if not row.error <= report.tolerance] == ["bias"]


class Shaped(torch.autograd.Function):
    """The square, whose backward keeps the size of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = x.shape
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * (ctx.size.numel() / x.numel())


class Sized(nn.Module):
    """A model that asks a size for its number of elements, which a tuple does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return self.down(Shaped.apply(self.up(x))) / size.numel()


def test_verify_takes_a_size_among_the_arguments() -> None:
    x = torch.randn(3, 8)
    report = autotp.verify(Sized(), 2, example_inputs=(x, x.shape))
    assert report.ok, report


class Varying(nn.Module):
    """A model that returns another number of tensors while it is captured."""

    def __init__(self, fewer: bool) -> None:
        super().__init__()
        self.up, self.down, self.fewer = nn.Linear(8, 12), nn.Linear(12, 8), fewer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.down(self.up(x))
        return (y, y * 2) if torch.compiler.is_exporting() == self.fewer else (y,)


@pytest.mark.parametrize(("fewer", "counts"), [(False, (1, 2)), (True, (2, 1))])
def test_verify_tells_another_number_of_outputs(fewer: bool, counts: tuple[int, int]) -> None:
    """The model looks at the exporter, as libraries may: verify says what differs."""
    report = autotp.verify(Varying(fewer), 2, example_inputs=torch.randn(3, 8))
    told = "the number of outputs: {} of a rank, {} of one device".format(*counts)
    assert not report.ok and report.outputs[0].name == told


class Clamping(Plain):
    """Looks rows up, with indices that would be too large without a branch on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        index = (y.abs() * 1000).long().sum(-1)
        if (index > 3).any():
            index = index.clamp(max=3)
        return y + self.rows(index)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_graph_that_fails_by_what_it_assumes(tp: int) -> None:
    """What one device reads selects the graph then."""
    report = autotp.verify(Clamping(), tp, example_inputs=torch.randn(3, 8))
    assert report.ok, report


class NamesItsOutputs(nn.Module):
    """x: [rows, 4] -> a structure of tensors"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Any:
        y = self.mlp(x)
        return {"hidden": y, "pairs": (2, [y + 1, None, y + 2])}


def test_an_output_has_the_keys_that_lead_to_it() -> None:
    report = autotp.verify(NamesItsOutputs(), 2, example_inputs=torch.ones(2, 4))
    assert sorted(d.name for d in report.outputs) == ["output hidden", "output pairs.1.0", "output pairs.1.2"]


@pytest.fixture
def last_pass_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python function that stands for GELU in the last pass has another slope."""
    gelu = torch.ops.aten.gelu.default
    monkeypatch.setitem(PYTHON_CALLS, gelu, lambda x, **kwargs: gelu(x, **kwargs) * 1.001)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"sequence_parallel": True, "recompute": "full"},
        {"memory": "50%"},
        *({"overlap": value} for value in values_of("overlap")),
        {"without": ("outline",)},
        {"cp": 2},
        {"pp": 2, "microbatches": 2},
        {"dp": 2, "cp": 2},
    ],
    ids=lambda layout: "-".join(layout) or "call",
)
def test_a_fault_of_the_last_pass_is_seen(layout: dict[str, Any], last_pass_is_wrong: None) -> None:
    """`verify` runs what a training runs, to the last pass, on each of its roads."""
    report = autotp.verify(gpt(**SIZES | {"n_layer": 2}), 2, **layout)
    assert report.gradients and not report.ok


def test_verify_runs_the_graph_of_a_budget() -> None:
    """A number of bytes is for the model's own dtype: float64 takes twice those of float32; ranks may be uneven."""
    model = gpt(**SIZES | {"n_layer": 2, "n_head": 3, "n_embd": 48})
    calls: list[MemoryChoice] = []
    choose = Budget.choose

    def noted(*given: Any) -> MemoryChoice:
        calls.append(choose(*given))
        return calls[-1]

    with patch.object(Budget, "choose", noted):
        report = autotp.verify(model, 2, memory=1_300_000)
        assert report.ok and {choice.allowance.memory for choice in calls} == {2_600_000}
        calls.clear()
        assert autotp.verify(model, 2, memory="50%").ok
    assert calls and all(choice.kept < choice.kept_without for choice in calls)
    assert "a microbatch keeps at least" in message(lambda: autotp.verify(model, 2, memory="1%"))
    assert "24GiB" in message(lambda: autotp.verify(model, 2, memory="auto"))


def test_bisect_sees_a_fault_of_the_last_pass(last_pass_is_wrong: None) -> None:
    """It stays when nothing is cut."""
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    blame = bisect(mlp, ((torch.ones(2, 4),), {}), 2, Options())
    assert blame is not None and (blame.weights, blame.passes, blame.rule) == ((), (), "")


class ChangesDtypeAndLayout(Plain):
    """As Qwen 3.5 casts: with a memory format, which Python takes by keyword only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.to(torch.float64, memory_format=torch.contiguous_format))


def test_verify_takes_a_cast_with_a_memory_format() -> None:
    assert autotp.verify(ChangesDtypeAndLayout(), 2, example_inputs=torch.randn(3, 8)).ok
