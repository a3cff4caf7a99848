"""A branch on a random draw is taken where it comes out the same whatever is drawn, and is a guard elsewhere."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.passes.capture.unsupported.random_branches import is_below


@pytest.mark.parametrize(
    ("bound", "strict", "below"),
    [
        (0, True, False), (0.0, False, None), (-1, True, False), (-0.1, False, False), (1, True, True),
        (1.0, False, True), (0.5, True, None), (2, False, True), ("0", True, None), (torch.tensor(0), True, None),
    ],
)  # fmt: skip
def test_is_below_knows_bounds_of_a_draw(bound, strict, below):
    assert is_below(bound, strict) is below


class Layers(nn.Module):
    """Skips whole layers at random, and draws dropout after that."""

    def __init__(self, layerdrop: float, compare: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(2))
        self.layerdrop, self.compare = layerdrop, compare

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            draw = torch.rand([])
            if getattr(draw, self.compare)(self.layerdrop):
                continue
            x = x + nn.functional.dropout(layer(x), 0.5, self.training)
        return x


@pytest.mark.parametrize(("layerdrop", "compare"), [(0.0, "__lt__"), (0, "lt"), (-1, "le"), (1.0, "__ge__"), (1, "gt")])
def test_layerdrop_that_never_drops_still_draws(layerdrop, compare):
    """Equal dropout masks: the stream has not shifted."""
    report = autotp.verify(Layers(layerdrop, compare), 2, example_inputs=torch.randn(3, 6))
    assert report.ok, report
    assert len(report.gradients) == 9


@pytest.mark.parametrize(("layerdrop", "compare"), [(1.0, "__lt__"), (0, "ge")])
def test_layerdrop_that_always_drops_leaves_layers_unused(layerdrop, compare):
    graph = autotp.explain(Layers(layerdrop, compare), 2, example_inputs=torch.randn(3, 6))
    assert {entry.reason for entry in graph.whole} == {"unused with these inputs"}


class Scaled(nn.Module):
    """Compares a draw after it was written into."""

    def __init__(self, compare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.compare = nn.Linear(6, 6), compare

    def forward(self, x: Tensor) -> Tensor:
        draw = torch.rand([])
        return self.layer(x) if self.compare(draw) else 2 * x


@pytest.mark.parametrize(
    "compare", [lambda draw: draw.add_(2) < 1, lambda draw: torch.lt(input=draw, other=2)], ids=["in-place", "by-name"]
)
def test_only_a_draw_as_it_was_drawn_is_certain(compare: Callable[[Tensor], Tensor]) -> None:
    report = autotp.verify(Scaled(compare), 2, example_inputs=torch.randn(3, 6))
    assert report.ok, report


@pytest.mark.parametrize("compare", ["__lt__", "ge"])
@pytest.mark.parametrize("seed", range(3))
def test_layerdrop_verifies_the_layers_that_a_draw_keeps(compare, seed):
    torch.manual_seed(seed)
    report = autotp.verify(Layers(0.5, compare), 2, example_inputs=torch.randn(3, 6))
    assert report.ok, report


@pytest.mark.parametrize("compare", ["__lt__", "ge"])
@pytest.mark.parametrize("layerdrop", [0.3, 0.5, 0.7])
def test_layerdrop_branches_follow_the_draw(compare, layerdrop):
    """In each call layers are left out as on one device, whatever was drawn in the call that was captured."""
    torch.manual_seed(0)
    x, whole = torch.randn(3, 6), Layers(layerdrop, compare)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=x)
    runs = Counter[int]()
    for i, layer in enumerate(whole.layers):
        layer.register_forward_hook(lambda *_, i=i: runs.update([i]))
    for seed in range(8):
        torch.manual_seed(seed)
        expected = whole(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(parallel(x), expected, msg=f"seed {seed}")
    assert 0 < runs.total() < 16, "these draws keep and drop layers"
