"""decompose: what mixes its cut factor is spelled out, with the numbers and gradients it had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import draft, lines, ops, run, some
from torch import Tensor, fx

from autotp.passes.lower.decompose import decompose
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import infer_axes
from autotp.sharding.axis import find

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
X, TARGET, WEIGHT = some(4, 7), torch.tensor([2, 6, -100, 0]), some(7).abs() + 0.1
Make = Callable[..., Any]


def calls(target: Any, *args: Any, **kwargs: Any) -> Make:
    """The call of `target`, in whose arguments "t" and "w" stand for the targets and the weights of the classes."""

    def make(call: Any, x: Any, t: Any, w: Any) -> Any:
        names = {"t": t, "w": w}
        return call(target, x, *(names.get(arg, arg) if isinstance(arg, str) else arg for arg in args), **kwargs)

    return make


def expanded(make: Make, dim: int, x: Tensor = X, t: Tensor = TARGET) -> tuple[fx.Graph, fx.Graph, Any]:
    """The graph before and behind the pass, its first operator cut along dimension `dim` of `x`."""
    graph = draft(make, x=x, t=t, w=WEIGHT)
    axes = infer_axes(graph)
    place, node = next(iter(graph.nodes)), next(node for node in graph.nodes if node.op == "call_function")
    leaf = axes.of(place)[dim]
    after, *known = decompose(graph, axes, Decision({node: leaf}, {place: leaf}))
    return graph, after, (leaf, *known)


CROSS_ENTROPY = aten.cross_entropy_loss.default


@pytest.mark.parametrize(
    ("make", "x", "t"),
    [
        pytest.param(calls(aten.softmax.int, 1), X, TARGET, id="softmax"),
        pytest.param(calls(aten.log_softmax.int, -1), X, TARGET, id="log_softmax"),
        pytest.param(calls(aten.softmax.int, 1, torch.float64), X.float(), TARGET, id="softmax-to-float64"),
        pytest.param(calls(aten.softmax.int, 1), X * 1e4, TARGET, id="softmax-of-large"),
        pytest.param(calls(aten.mean.dim, [1]), X, TARGET, id="mean"),
        pytest.param(calls(aten.mean.dim, [0, -1], True), X, TARGET, id="mean-of-two-kept"),
        pytest.param(calls(aten.mean.default), X, TARGET, id="mean-of-all"),
        pytest.param(calls(aten.mean.dim, [1], dtype=torch.float64), X.float(), TARGET, id="mean-in-float64"),
        pytest.param(calls(CROSS_ENTROPY, "t"), X, TARGET, id="cross-entropy"),
        pytest.param(calls(aten.nll_loss_nd.default, "t", "w"), X, TARGET, id="nll"),
    ],
)
def test_numbers_and_gradients(make: Make, x: Tensor, t: Tensor) -> None:
    before, after, _ = expanded(make, 1 if x.dim() > 1 else 0, x, t)
    assert not set(ops(before)) & set(ops(after))
    found = []
    for graph in (before, after):
        y = x.clone().requires_grad_()
        value = run(graph, [y, t, WEIGHT])[0]
        weighed = (value * some(*value.shape).to(value.dtype)).sum()
        found.append((value.detach(), *torch.autograd.grad(weighed, y)))
    for old, new in zip(*found, strict=True):
        torch.testing.assert_close(
            new, old, rtol=1e-6 if x.dtype == torch.float32 else 1e-10, atol=1e-12, equal_nan=True
        )


def test_a_mean_of_float16_is_a_number_where_its_sum_is_none() -> None:
    before, after, _ = expanded(calls(aten.mean.dim, [1]), 1, torch.full((2, 6), 3e4, dtype=torch.float16))
    found = [run(graph, [torch.full((2, 6), 3e4, dtype=torch.float16), TARGET, WEIGHT])[0] for graph in (before, after)]
    assert found[1].dtype == torch.float16 and torch.equal(*found)


def test_log_softmax_is_spelled_out() -> None:
    assert lines(expanded(calls(aten.log_softmax.int, 1), 1)[1]) == [
        "peak(x, 1)",
        "sub(x, peak)",
        "exp(sub)",
        "sum(exp, [1], True)",
        "log(sum)",
        "sub_1 = sub(sub, log)",
        "return sub_1",
    ]


@pytest.mark.parametrize(
    ("make", "dim"),
    [
        pytest.param(calls(CROSS_ENTROPY, "t", None, NONE), 0, id="cross-entropy-by-rows"),
        pytest.param(calls(aten.softmax.int, 1), 0, id="softmax-by-rows"),
        pytest.param(calls(aten.mean.dim, [1]), 0, id="mean-by-rows"),
        pytest.param(calls(aten.exp.default), 1, id="pointwise"),
    ],
)
def test_left_alone(make: Make, dim: int) -> None:
    """An operator that the cut goes through stays whole, and is cut as before."""
    before, after, (leaf, _, decision) = expanded(make, dim)
    assert lines(after) == lines(before)
    assert [find(cut) for cut in decision.cuts.values()] == [find(leaf)]


def test_uncut_is_left_alone() -> None:
    graph = draft(calls(CROSS_ENTROPY, "t"), x=X, t=TARGET, w=WEIGHT)
    assert lines(decompose(graph, infer_axes(graph), Decision())[0]) == lines(graph)


def test_what_is_made_is_cut() -> None:
    """Along the same leaf, up to what no longer has it; what was held stays held."""
    _, after, (leaf, axes, decision) = expanded(calls(CROSS_ENTROPY, "t"), 1)
    cut = [node.name for node in after.nodes if node in decision.cuts]
    assert cut == ["peak", "class_terms"]
    assert {find(axis) for axis in decision.cuts.values()} == {find(leaf)}
    assert [node.name for node in decision.held] == ["x"]
    assert all(node in axes.dims for node in after.nodes if node.op != "output")


def test_the_last_two_sums_travel_together() -> None:
    """NOTE [Vocab-parallel loss]: one maximum and one sum over ranks, none of them of the logits."""
    _, _, (_, axes, decision) = expanded(calls(CROSS_ENTROPY, "t"), 1)
    reduced = [
        node for node in decision.cuts if not any(f.outs for f in [axes.bound[node].cuttable(decision.cuts[node])])
    ]
    assert [tuple(node.meta["val"].shape) for node in reduced] == [(4, 1), (2, 4)]


@pytest.mark.parametrize(
    "make", [calls(aten.softmax.int, 1), calls(CROSS_ENTROPY, "t")], ids=["softmax", "cross-entropy"]
)
def test_low_precision_sums_in_float32(make: Make) -> None:
    """The result has the dtype it had; 7 bfloat16 numbers are not summed up in bfloat16."""
    x = X.bfloat16()
    before, after, _ = expanded(make, 1, x)
    old, new, exact = (run(g, [v, TARGET, WEIGHT])[0] for g, v in ((before, x), (after, x), (before, x.double())))
    assert new.dtype == old.dtype == torch.bfloat16
    assert all(node.meta["val"].dtype == torch.float32 for node in after.nodes if node.target is aten.log.default)
    torch.testing.assert_close(new, exact.bfloat16(), rtol=0, atol=0)
