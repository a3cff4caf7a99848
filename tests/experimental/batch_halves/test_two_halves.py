"""two_halves: the batch is computed in two halves, with the numbers of one device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.errors import Error
from autotp.experimental.batch_halves import two_halves
from autotp.experimental.batch_halves.halves import half_of, halves, joined
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.check import check

aten = torch.ops.aten


def small(**given: Any) -> nn.Module:
    return gpt(0, **{"n_head": 4, "n_embd": 16, "vocab_size": 28} | given)


def call(rows: int, length: int = 5) -> dict[str, Tensor]:
    tokens = torch.arange(rows * length).view(rows, length) % 28
    return {"tokens": tokens, "labels": tokens}


def program(model: nn.Module, given: Any, **options: Any) -> Any:
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    return analyse(skeleton_of(model), args, kwargs, 2, Options(overlap="batch", **options))


def divides(plan: autotp.Plan) -> bool:
    """Whether any operator computes in halves, as the plan says."""
    return re.fullmatch("[1-9][0-9]* operators compute in halves, which take turns", plan.notes["overlap"]) is not None


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("tp", [2, 3])
def test_gpt_in_two_halves_is_verified(rows: int, tp: int) -> None:
    report = autotp.verify(small(), tp, example_inputs=call(rows), overlap="batch")
    assert report.ok, report


@pytest.mark.parametrize(("rows", "length"), [(4, 5), (1, 8)])
def test_two_halves_send_the_same_bytes_in_twice_the_collectives(rows: int, length: int) -> None:
    """The embedding, the loss and each block; and the same parameters are cut."""
    given = call(rows, length)
    plain, divided = (autotp.explain(small(), 2, example_inputs=given, overlap=how) for how in ("none", "batch"))
    assert [cut.name for cut in divided.cuts] == [cut.name for cut in plain.cuts]
    for way in ("forward", "backward"):
        assert getattr(divided.traffic, way)["all-reduce"] == 2 * getattr(plain.traffic, way)["all-reduce"]
        assert getattr(divided.traffic, f"{way}_bytes") == getattr(plain.traffic, f"{way}_bytes")


@pytest.mark.parametrize("rows", [1, 4])
def test_two_halves_leave_evaluation_whole(rows: int) -> None:
    plan = autotp.explain(small().eval(), 2, example_inputs=call(rows), overlap="batch")
    assert not divides(plan) and "overlap     nothing: a batch is divided in training" in str(plan)


@pytest.mark.parametrize(("tp", "length"), [(2, 5), (2, 2), (3, 8)])
def test_two_halves_divide_one_row_along_its_sequence(tp: int, length: int) -> None:
    """In halves of unequal length, too; queries of a half read the keys of both."""
    report = autotp.verify(small(), tp, example_inputs=call(1, length), overlap="batch")
    assert report.ok and divides(report.plan), report


def test_one_row_without_attention_or_under_cp_stays_whole() -> None:
    mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    assert not divides(autotp.explain(mlp, 2, example_inputs=torch.randn(1, 5, 6), overlap="batch"))
    plan = autotp.explain(small(), 2, cp=2, example_inputs=call(1), overlap="batch")
    assert not divides(plan) and plan.in_sequence


class Padded(nn.Module):
    """Attention with a mask of padding and a bias by distance, without fused kernels; dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias, self.drop = nn.Embedding(9, 2), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        distance = (at - at[:, None]).clamp(-4, 4) + 4
        scores = q @ k.mT / 2 + self.bias(distance).permute(2, 0, 1)
        weights = scores.masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1)
        y = self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return (x + y).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [4, 7])
def test_two_halves_of_a_row_take_masks_and_positions(length: int) -> None:
    x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(length) > 0).long()[None]
    report = autotp.verify(Padded().train(), 2, example_inputs={"x": x, "mask": mask}, overlap="batch")
    assert report.ok and divides(report.plan), report


class Scored(nn.Module):
    """Returns the logits beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small(n_embd=32, vocab_size=64)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_two_halves_keep_logits_beside_a_loss_cut() -> None:
    plain, divided = (autotp.explain(Scored(), 2, example_inputs=call(4), overlap=how) for how in ("none", "batch"))
    assert divided.outputs == plain.outputs and len(plain.outputs) == 1
    assert "all-gather" not in divided.traffic.forward


class Mixing(nn.Module):
    """A batch norm between two layers: its statistics are of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.norm(self.layers[0](x))).pow(2).mean()  # type: ignore[no-any-return]


def test_operators_that_mix_rows_read_both_halves() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    report = autotp.verify(Mixing().train(), 2, example_inputs=x, overlap="batch")
    assert report.ok, report
    assert any("it needs both halves" in row.reason for row in report.plan.whole)


class Sorted(nn.Module):
    """Operators on rows that no half can do by itself, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        y = self.down(F.gelu(self.up(x)))
        order = weights.argsort()
        similarity = y @ y.T
        return {
            "loss": F.cross_entropy(similarity, order) + (y * weights[:, None]).cumsum(0).mean(),
            "rows": y,
            "sorted": y[order],
            "last": y[-1],
            "count": torch.arange(len(x)) + 0 * weights,
        }


@pytest.mark.parametrize("rows", [2, 3, 6])
def test_sorted_rows_in_two_halves_are_verified(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    given = {"x": torch.randn(rows, 6, generator=generator), "weights": torch.rand(rows, generator=generator)}
    report = autotp.verify(Sorted(), 2, example_inputs=given, overlap="batch")
    assert report.ok, report


class Tempered(nn.Module):
    """Its first input is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, temperature: Tensor, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) / temperature).pow(2).mean()  # type: ignore[no-any-return]


def test_two_halves_take_a_number_before_the_batch() -> None:
    given = {"temperature": torch.tensor(0.5), "x": torch.randn(3, 6, generator=torch.Generator().manual_seed(2))}
    report = autotp.verify(Tempered(), 2, example_inputs=given, overlap="batch")
    assert report.ok and divides(report.plan), report


def test_two_halves_draw_exact_masks_once_and_fast_ones_twice() -> None:
    """Masks of one device are drawn for the whole batch; masks of one rank for each half."""
    exact, fast = (program(small(dropout=0.1), call(4), randomness=how).graph for how in ("exact", "fast"))
    for graph, of_a_half in ((exact, False), (fast, True)):
        drawn = [n for n in graph.nodes if "dropout" in str(n.target) or "attention" in str(n.target)]
        assert drawn and all((half_of(node) is not None) is of_a_half for node in drawn)


def test_two_halves_share_what_both_read() -> None:
    graph = program(small(), call(4)).graph
    counted = [node for node in graph.nodes if node.target is aten.arange.default]
    assert len(counted) == 1 and {half_of(node) for node in (counted[0], *counted[0].users)} == {None}


def test_merged_halves_run_as_the_graph_before() -> None:
    """The merged graph itself, before anything is cut over tp."""
    model = small().double()
    found = program(model, call(5))
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {**found.captured.parameters, **found.captured.buffers}

    def run(graph: Any) -> Tensor:
        given = iter(call(5).values())
        feed = [
            values[names[n.name]] if n.name in names
            else found.captured.constants[n.name] if n.name in found.captured.constants else next(given)
            for n in graph.nodes if n.op == "placeholder"
        ]  # fmt: skip
        return torch.fx.GraphModule(nn.Module(), graph)(*feed)[0]  # type: ignore[no-any-return]

    plain = analyse(skeleton_of(model), (), call(5), 2)
    assert any(node.target is halves for node in found.graph.nodes)
    torch.testing.assert_close(run(found.graph), run(plain.graph), rtol=1e-12, atol=0)


def test_two_halves_with_cp_are_verified() -> None:
    report = autotp.verify(small(), 2, example_inputs=call(3, 8), overlap="batch", cp=2)
    assert report.ok, report


def test_two_halves_refuse_sequence_parallel() -> None:
    with pytest.raises(Error, match="no sum would run beside the other half"):
        autotp.explain(small(), 2, example_inputs=call(4), overlap="batch", sequence_parallel=True)


# ---- faults that the check refuses


@pytest.mark.parametrize("fault", ["rows", "sum", "order"])
def test_check_refuses_a_wrong_half(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of each half is checked before they are merged."""

    def broken(lowered: Any, *given: Any) -> Any:
        for node in list(lowered.nodes):
            name = getattr(node.target, "__name__", "")
            if fault == "sum" and name == "reduce":
                node.replace_all_uses_with(node.args[0])
            if fault == "rows" and name == "scatter":
                node.replace_all_uses_with(node.args[0])
            if fault == "order" and name == "gather":
                node.replace_all_uses_with(node.args[0])
        return check(lowered, *given)

    monkeypatch.setattr("autotp.experimental.batch_halves.two_halves.check", broken)
    model: nn.Module = Mixing() if fault == "order" else small()
    given: Any = torch.randn(4, 6) if fault == "order" else call(4)
    with pytest.raises(Error):
        program(model, given)


def test_merged_refuses_halves_of_other_operators() -> None:
    graphs = [analyse(skeleton_of(small()), (), call(4), 2).graph for _ in range(2)]
    node = next(node for node in graphs[1].nodes if node.target is aten.gelu.default)
    node.target = aten.relu.default
    with pytest.raises(Error, match="the halves of a batch are computed by other operators"):
        two_halves.merged(graphs)


def test_two_halves_keep_other_options() -> None:
    found = program(small(), call(4))
    assert replace(found.options, overlap="none") == Options()
    assert any(node.target is joined for node in program(Mixing().train(), torch.randn(4, 6)).graph.nodes)
