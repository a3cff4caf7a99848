"""local_sizes: whatever a Python expression of the inputs' sizes says is computed in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_models import Plain
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.passes.capture.skeleton import skeleton_of

SIZES: dict[str, Callable[[int, int], int]] = {
    "up to a multiple": lambda b, s: s + (64 - s % 64) % 64,
    "ceiling": lambda b, s: math.ceil(s / 3) * 2,
    "negative floor": lambda b, s: -(-s // 4),
    "part": lambda b, s: int(s * 0.5) + int(s / 3),
    "rounded": lambda b, s: round(s * 1.5),
    "power of two": lambda b, s: 2 ** math.ceil(math.log2(s)),
    "root": lambda b, s: int(math.sqrt(s)),
    "square": lambda b, s: s**2 // 3 + s**2 % 7 + 1,
    "nested": lambda b, s: (((s - 1) // 4 + 1) ** 2 * (60 // ((s - 1) // 4 + 1))) // 6,
    "largest": lambda b, s: max(s, b, 3) + min(s, b),
}


class Sized(Plain):
    """Adds as many zeros as a size says, along a cut and along a whole dimension."""

    def __init__(self, size: Callable[[int, int], int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 8]"""
        n = self.size(x.shape[0], x.shape[1])
        h = self.up(x).relu().mean(1, keepdim=True) + torch.zeros(x.shape[0], n, 32)
        y: Tensor = self.down(h)
        return F.pad(y, (0, 0, 0, n))


@pytest.mark.parametrize("name", SIZES)
def test_local_sizes_are_computed_in_the_graph(name: str) -> None:
    """One graph, whose size is right for all other shapes that it is used for, too."""
    model = Sized(SIZES[name]).double()
    program = analyse(skeleton_of(model), (torch.ones(3, 10, 8).double(),), {}, 1)
    graph = rank_graph(program, 0, "fast")
    module = torch.fx.GraphModule(nn.Module(), graph)
    own = [dict(model.named_parameters())[f"{n}.{kind}"] for n in ("up", "down") for kind in ("weight", "bias")]
    for batch, seq in ((3, 10), (2, 17), (5, 12), (4, 23)):
        x = torch.randn(batch, seq, 8).double()
        if program.captured.fits([x.shape]):
            torch.testing.assert_close(module(*own, x)[0], model(x))
    report = autotp.verify(model, 2, example_inputs=torch.randn(3, 10, 8).double())
    assert report.ok, report


UNKNOWN: dict[str, Callable[[int, int], int]] = {
    "a point, which is printed rounded": lambda b, s: round(s * 0.123456789012345678) + 5,
    "bits": lambda b, s: (s & 12) + 3,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_sizes_that_no_graph_computes_become_numbers(name: str) -> None:
    """The graph is for this length, and for any number of rows; another length is captured by itself."""
    model, x = Sized(UNKNOWN[name]), torch.randn(3, 30, 8)
    captured = analyse(skeleton_of(model), (x,), {}, 2).captured
    assert captured.attempt.symbols == "first"
    assert captured.fits([(5, 30, 8)]) and not captured.fits([(3, 29, 8)])
    assert autotp.verify(model, 2, example_inputs=x).ok
    plain = Sized(UNKNOWN[name])
    plain.load_state_dict(model.state_dict())
    parallel = autotp.parallelize(model, 1, example_inputs=x)
    for batch, seq in ((3, 30), (5, 30), (5, 22), (2, 9)):
        y = torch.randn(batch, seq, 8)
        torch.testing.assert_close(parallel(y), plain(y))
