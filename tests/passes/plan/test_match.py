"""match: what the axes of parameters are called, and what they are no candidates for."""

import math
from typing import Any

import pytest
import torch.nn.functional as F
from graphs import MLP, TOKENS, Attention, Language, canonical, some
from torch import Tensor, nn

from autotp.passes.plan.candidate import Candidate
from autotp.passes.plan.infer_axes import infer_axes
from autotp.passes.plan.match import match

X = some(2, 3, 12)


class Gated(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Exposed(MLP):
    """The width is an output, too: it would have to be gathered."""

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.up(x))
        return self.down(y), y


class Flipped(MLP):
    """On the way the width is read by what cannot be cut."""

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).flip(-1))


class Adapted(MLP):
    """The MLP under LoRA adapters of rank 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in sizes]) for sizes in RANK_3)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.up(x) + self.b[0](self.a[0](x)))
        return self.down(y) + self.b[1](self.a[1](y))


RANK_3 = ((12, 3), (10, 3)), ((3, 10), (3, 12))


class Written(Attention):
    """Attention as products and a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(4)).softmax(-1) @ v


def found(model: nn.Module, *args: Tensor) -> tuple[list[Candidate], dict[str, str]]:
    captured, graph = canonical(model.double(), *args)
    return match(graph, infer_axes(graph), captured.parameters, captured.inputs), captured.parameters


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        pytest.param(MLP(), X, {"width": "up.weight up.bias down.weight"}, id="mlp"),
        pytest.param(Gated(), X, {"width": "up.weight up.bias down.weight gate.weight gate.bias"}, id="gated"),
        pytest.param(Adapted(), X, {"width": "up.weight up.bias down.weight b.0.weight a.1.weight"}, id="low-rank"),
        pytest.param(Exposed(), X, {}, id="width-returned"),
        pytest.param(Flipped(), X, {}, id="width-flipped"),
        pytest.param(
            Attention(),
            X,
            {
                "kv_heads": "q.weight q.bias out.weight k.weight k.bias v.weight v.bias",
                "group": "q.weight q.bias out.weight",
            },
            id="grouped-queries",
        ),
        pytest.param(
            Attention(1),
            X,
            {"heads": "q.weight q.bias out.weight k.weight k.bias v.weight v.bias"},
            id="heads",
        ),
        pytest.param(
            Written(1),
            X,
            {"heads": "q.weight q.bias out.weight k.weight k.bias v.weight v.bias"},
            id="heads-written-out",
        ),
        pytest.param(Language(True, True), TOKENS, {"vocab": "tokens.weight"}, id="tied"),
        pytest.param(Language(False, False), TOKENS, {"vocab": "tokens.weight"}, id="positions-are-no-vocabulary"),
        pytest.param(Language(False, True), TOKENS, {"vocab": "tokens.weight head.weight"}, id="head-and-loss"),
        pytest.param(nn.Linear(12, 5), X, {}, id="linear-alone"),
    ],
)
def test_match_names_axes_of_parameters(model: nn.Module, x: Tensor, expected: dict[str, str]) -> None:
    """Of several leaves of one name, as the sizes inside an attention head, the parameters of the first come first."""
    candidates, names = found(model, x)
    called: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.name and not (candidate.name == "width" and isinstance(model, Attention)):
            called.setdefault(candidate.name, []).extend(names[p.name] for p in candidate.parameters)
    assert {name: sorted(parameters) for name, parameters in called.items()} == {
        name: sorted(parameters.split()) for name, parameters in expected.items()
    }


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        pytest.param(Language(True, True), "embedding, head, loss", id="tied-with-loss"),
        pytest.param(Language(True, False), "embedding, head", id="tied"),
        pytest.param(Language(False, False), "embedding", id="embedding"),
        pytest.param(Language(False, True), "embedding; head, loss", id="apart"),
    ],
)
def test_match_knows_patterns_of_the_vocabulary(model: nn.Module, pattern: str) -> None:
    candidates, _ = found(model, TOKENS)
    assert "; ".join(c.pattern for c in candidates if c.name == "vocab") == pattern


def test_match_weighs_only_products_and_token_tables() -> None:
    """A bias has the axis but is not what a cut is for; neither is a table that positions look up."""
    candidates, names = found(Attention(1), X)
    heads = next(candidate for candidate in candidates if candidate.name == "heads")
    assert sorted(names[p.name] for p in heads.weights) == ["k.weight", "out.weight", "q.weight", "v.weight"]
    candidates, names = found(Language(False, False), TOKENS)
    weighed = {candidate.leaf.size.number: [names[p.name] for p in candidate.weights] for candidate in candidates}
    assert weighed[8] == []


def test_match_takes_adapters_for_no_hub() -> None:
    """Adapters lead from a width to their ranks; it is the core of a layer all the same."""
    candidates, _ = found(Adapted(), X)
    assert [(c.leaf.size.number, c.core) for c in candidates if c.name] == [(10, True)]


def test_match_tells_cores_from_the_hub() -> None:
    """The hidden axis leads to the widths of all layers; what is inside a layer is its core."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MLP() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    candidates, _ = found(Residual(), X)
    kinds = sorted({(c.leaf.size.number, c.name, c.core, c.hub) for c in candidates})
    assert kinds == [(10, "width", True, False), (12, "", False, True)]
