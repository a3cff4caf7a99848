"""choose: what is cut, what is stored cut, and what is not worth it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import message
from graphs import MLP, TOKENS, Attention, Language, canonical, some
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.options import Options, Outputs
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.choose import Decision, choose, choose_as, elements
from autotp.passes.plan.infer_axes import infer_axes
from autotp.passes.plan.match import match
from autotp.passes.plan.propagate import needs_grad
from autotp.sharding.layout import Layout

X = some(2, 3, 12)


def planned(model: nn.Module, x: Tensor = X, tp: int = 2) -> tuple[list[str], list[str]]:
    """The names of what is chosen, in order, and of the parameters that are stored cut."""
    captured, graph = canonical(model.double(), x)
    axes = infer_axes(graph)
    candidates = match(graph, axes, captured.parameters, captured.inputs)
    places = [node for node in graph.nodes if node.name in captured.parameters]
    total = sum(place.meta["val"].numel() for place in places)
    decision = choose(axes, candidates, needs_grad(graph, frozenset(places)), total, tp)
    return [c.name for c in decision.chosen], sorted(captured.parameters[node.name] for node in decision.held)


class Block(nn.Module):
    """Attention and an MLP on a residual stream; the MLP's weights may be read by others, too."""

    def __init__(self, group: int = 1) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(group), MLP()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Watched(MLP):
    """A weight that something reads which cannot be cut is stored whole."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight.cumsum(0)


class Beside(nn.Module):
    """A small layer whose output is returned, beside a large one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.small, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Any:
        return self.small(x).exp(), self.down(torch.relu(self.up(x)))


ATTENTION = [
    f"attention.{name}" for name in ("k.bias", "k.weight", "out.weight", "q.bias", "q.weight", "v.bias", "v.weight")
]
INSIDE = ["mlp.down.weight", "mlp.up.bias", "mlp.up.weight"]
LARGE = ["down.weight", "up.bias", "up.weight"]


@pytest.mark.parametrize(
    ("model", "x", "chosen", "held"),
    [
        pytest.param(Block(), X, ["heads", "width"], ATTENTION + INSIDE, id="hidden-is-not-cut"),
        pytest.param(Block(3), X, ["kv_heads", "width"], ATTENTION + INSIDE, id="group-is-not-cut-again"),
        pytest.param(Watched(), X, ["width"], ["down.weight", "up.bias"], id="read-whole-too"),
        pytest.param(nn.Linear(12, 4096), X, [], [], id="not-worth-its-gather"),
        pytest.param(nn.Linear(64, 4096), some(2, 3, 64), [""], ["bias", "weight"], id="worth-its-gather"),
        pytest.param(
            Beside(64), some(2, 3, 64), ["width", ""], [*LARGE, "small.bias", "small.weight"], id="a-large-share"
        ),
        pytest.param(Beside(4096), some(2, 3, 64), ["width"], LARGE, id="a-small-share"),
        pytest.param(Language(True, True), TOKENS, ["vocab"], ["tokens.weight"], id="tied"),
    ],
)
def test_choose_cuts_and_holds_as_expected(model: nn.Module, x: Tensor, chosen: list[str], held: list[str]) -> None:
    assert planned(model, x) == (chosen, sorted(held))


def test_choose_on_one_rank_cuts_nothing() -> None:
    assert planned(Block(), tp=1) == ([], [])


class LossAndLogits(nn.Module):
    """A head of few hidden features and many classes: its logits are too large to gather for the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch seq 8], labels: [batch seq]"""
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize(
    ("outputs", "training", "dim"),
    [
        pytest.param("auto", True, 0, id="auto"),
        pytest.param("auto", False, None, id="auto-in-evaluation"),
        pytest.param("full", True, None, id="full"),
        pytest.param("local", False, 0, id="local"),
    ],
)
def test_choose_weighs_the_gather_of_outputs(outputs: Outputs, training: bool, dim: int | None) -> None:
    """Then the weight is cut by the vocabulary. Logits that are gathered cost more than that is worth."""
    inputs = {"x": some(2, 3, 8), "labels": TOKENS}
    analysis = analyse(skeleton_of(LossAndLogits().double().train(training)), (), inputs, 2, Options(outputs))
    assert analysis.layouts["head.weight"].dim == dim
    assert list(analysis.local_outputs) == ([] if dim is None else [1])


def stored(model: nn.Module, layouts: dict[str, Layout], x: Tensor = X) -> tuple[Decision, dict[str, str], Any]:
    """What is decided where the parameters are held already; those not named are whole."""
    captured, graph = canonical(model.double(), x)
    axes = infer_axes(graph)
    places = {captured.parameters[node.name]: node for node in graph.nodes if node.name in captured.parameters}
    held = {node: layouts.get(name, Layout(tuple(node.meta["val"].shape))) for name, node in places.items()}
    candidates = match(graph, axes, captured.parameters, captured.inputs)
    return choose_as(axes, candidates, held, 2), captured.parameters, axes


def test_choose_for_a_further_graph_follows_stored_cuts() -> None:
    """Every operator that can follow does, whatever it costs; nothing else is cut."""
    whole = analyse(skeleton_of(Block().double()), (X,), {}, 2).layouts
    mine = {name: layout for name, layout in whole.items() if name.startswith("mlp")}
    decision, names, _ = stored(Block(), mine)
    assert [candidate.name for candidate in decision.chosen] == ["width"]
    assert sorted(names[node.name] for node in decision.held) == INSIDE
    assert sorted(str(node.target) for node in decision.cuts) == [
        "aten.add.Tensor", "aten.gelu.default", "aten.linear.default", "aten.linear.default"
    ]  # fmt: skip


def test_choose_refuses_stored_cuts_that_fit_no_axis() -> None:
    """Here the ten rows would be 3 and 7."""
    whole = analyse(skeleton_of(MLP().double()), (X,), {}, 2).layouts["up.weight"]
    uneven = replace(whole, pieces=(((0, 3),), ((3, 10),)))
    text = message(lambda: stored(MLP(), {"up.weight": uneven})).splitlines()
    assert text[0] == "this call uses a tensor [10, 12] in a way that does not fit its cut by width"
    assert text[1].startswith("  at       small_models.py:") and text[1].endswith("return self.mlp(x)")
    assert text[2:] == [
        "  try      give parallelize this call's arguments as example_inputs",
        "  or       what was changed in the model since, as peft does, before autotp.parallelize",
    ]


def test_elements_counts_symbolic_sizes_as_512() -> None:
    _, graph = canonical(nn.Linear(12, 5).double(), X)
    assert elements(list(graph.nodes)[-2]) == 512 * 512 * 5


class Scored(nn.Module):
    """A loss beside the logits it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 16), nn.Linear(16, 60)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch seq]"""
        logits = self.head(self.embed(x))
        return F.cross_entropy(logits.flatten(0, 1), x.flatten()), logits


def test_plan_names_outputs_that_stay_cut() -> None:
    held = 'outputs     [?, ?, 60@tp] stay cut: autotp.gather makes them whole, or outputs="full"'
    for given, expected in ({}, True), ({"outputs": "full"}, False):
        plan = autotp.explain(Scored(), 2, example_inputs=torch.zeros(2, 5, dtype=torch.int64), **given)
        assert (held in str(plan).splitlines()) is expected, str(plan)
