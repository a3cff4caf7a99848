"""graph_entry: a rank's graph and how each output is held."""

from __future__ import annotations

from typing import Any

import torch
from small_models import Plain
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.calls.graph_entry import GraphEntry, prepare

X = torch.linspace(-1, 1, 24).view(3, 8)


class Model(Plain):
    """Two outputs, a buffer that changes, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        hidden = self.up(x)
        return self.down(hidden) * torch.tensor([2.0]), hidden


def prepared(model: nn.Module, tp: int, rank: int = 0, **more: Any) -> GraphEntry:
    options = Options(**more)
    return prepare(analyse(skeleton_of(model), (X,), {}, tp, options), Mesh(size=tp, rank=rank), options)


def test_graph_entry_is_new() -> None:
    entry = prepared(Model(), 2, outputs="local")
    assert entry.updated == ["count"]
    assert entry.calls == 0 and entry.guard is None


def test_graph_entry_knows_which_outputs_are_cut() -> None:
    """The second output is cut along the width; new values of buffers are no outputs."""
    entry = prepared(Model(), 2, rank=1, outputs="local")
    assert {at: (str(one.layout), one.mesh.rank) for at, one in entry.cut.items()} == {1: ("[-1, 32@tp]", 1)}
    assert prepared(Model(), 2, outputs="full").cut == {}


def test_graph_entry_is_random_only_with_active_dropout() -> None:
    assert prepared(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), 2).random
    assert not prepared(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).eval(), 2).random
