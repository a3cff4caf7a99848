"""graph_digest: the text of a planned graph: what is in it, so that ranks compare it, and what is not."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.distributed.agreement import SOURCE
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.calls.graph_digest import digest


class Model(nn.Module):
    def __init__(self, width: int = 16, shift: float = 1.0, slope: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.shift, self.slope = shift, slope

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.leaky_relu(self.up(x), self.slope)
        return self.down(h) + torch.tensor(self.shift)


def text(model: nn.Module, tp: int = 2, rows: int = 3) -> str:
    return digest(analyse(skeleton_of(model), (torch.ones(rows, 8),), {}, tp))


def test_graph_text_has_operators_shapes_and_source_lines() -> None:
    lines = text(Model()).splitlines()
    assert "%0 = parameter `up.weight`  float32[16, 8]" in lines
    at = f"{SOURCE}test_graph_digest.py:"
    product = next(line for line in lines if "aten.leaky_relu.default" in line)
    called, _, source = product.partition(at)
    assert re.fullmatch(r"%\d+ = aten.leaky_relu.default\(%\d+, 0.5\)  float32\[s0, 16\]", called)
    assert source.endswith("self.up(x), self.slope)")
    assert any("a tensor made in forward, with checksum " in line for line in lines)
    assert "up.weight [16@tp, 8]" in lines and "down.bias [8]" in lines


def test_graph_digest_changes_with_sizes_constants_and_cuts() -> None:
    """Sizes, arguments, the values of constants, the cuts; not the names of nodes, nor how many rows an example has."""
    same = text(Model())
    for other in (text(Model(width=18)), text(Model(slope=0.25)), text(Model(shift=2.0)), text(Model(), tp=1)):
        assert other != same
    assert text(Model()) == same == text(Model(), rows=5)
    analysis = analyse(skeleton_of(Model()), (torch.ones(3, 8),), {}, 2)
    before = digest(analysis)
    next(node for node in analysis.graph.nodes if node.op == "call_function").name = "renamed"
    assert digest(analysis) == before == same


class Dropped(nn.Module):
    """Drops inside of the layers, whose width is cut, and behind them. x: [rows, 8]"""

    def __init__(self, inside: float, behind: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(8, 16), nn.Linear(16, 8), (inside, behind)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.up(x)), self.p[0], self.training)
        return F.dropout(self.down(h), self.p[1], self.training)


def two_kinds_of_cards(rank: int, n: int) -> None:
    """Two cards may drop what each has a part of, and nothing that both have."""
    kind = SimpleNamespace(name="NVIDIA H100" if rank else "NVIDIA A100", multi_processor_count=132 if rank else 108)
    given: Any = {"example_inputs": torch.ones(3, 8), "device": "cuda"}
    with patch.object(torch.cuda, "get_device_properties", lambda device=None: kind):
        for dropped in (Dropped(0.0, 0.5), Dropped(0.5, 0.5)):
            with pytest.raises(autotp.Error, match="rank 1 has a GPU of another kind than rank 0"):
                autotp.parallelize(dropped, n, **given)
            assert dropped.up.weight.shape == (16, 8)
        with pytest.raises(autotp.Error, match="rank 1 has a GPU of another kind than rank 0"):
            autotp.parallelize(Dropped(0.5, 0.0), n, randomness="exact", **given)
        autotp.parallelize(Dropped(0.5, 0.0), n, **given)
        cut = autotp.parallelize(Dropped(0.0, 0.5).eval(), n, **given)
        with pytest.raises(autotp.Error, match="rank 1 has a GPU of another kind than rank 0"):
            cut.train()(torch.ones(3, 8, device="cuda"))
    autotp.parallelize(Dropped(0.5, 0.5), n, **given)


def test_dropout_on_cards_of_two_kinds_is_refused() -> None:
    run_ranks(two_kinds_of_cards, 2, cards=True)
