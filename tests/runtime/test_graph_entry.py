"""graph_entry: a rank's graph, what its placeholders stand for, and how each output is held."""

from __future__ import annotations

from typing import Any

import torch
from small_models import Plain
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.attach_parameters import places
from autotp.rules.call import placeholders
from autotp.runtime.graph_entry import GraphEntry, prepare

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


class Block(Plain):
    """A block that may be called."""

    def forward(self, x: Any, *given: Any) -> Any:
        return x.run(given) if given else self.mlp(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


def prepared(model: nn.Module, tp: int, rank: int = 0, **more: Any) -> GraphEntry:
    options = Options(**more)
    return prepare(analyse(skeleton_of(model), (X,), {}, tp, options), Mesh(size=tp, rank=rank), options)


def test_graph_entry_knows_the_source_of_each_placeholder() -> None:
    entry = prepared(Model(), 2, outputs="local")
    names = [entry.sources[name] for name in placeholders(entry.outlined.graph) if name in entry.sources]
    assert [name for name in names if isinstance(name, str)] == [
        "up.weight", "up.bias", "down.weight", "down.bias", "count",
    ]  # fmt: skip
    assert [name.tolist() for name in names if isinstance(name, Tensor)] == [[2.0]]
    assert entry.updated == ["count"]
    assert entry.calls == 0 and entry.guard is None


def test_graph_entry_knows_which_outputs_are_cut() -> None:
    """The second output is cut along the width; new values of buffers are no outputs."""
    entry = prepared(Model(), 2, rank=1, outputs="local")
    assert entry.count == 2
    assert {at: (str(one.layout), one.mesh.rank) for at, one in entry.cut.items()} == {1: ("[-1, 32@tp]", 1)}
    assert prepared(Model(), 2, outputs="full").cut == {}


def test_graph_entry_is_random_only_with_active_dropout() -> None:
    assert prepared(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), 2).random
    assert not prepared(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).eval(), 2).random


def test_graph_entry_passes_operands_that_blocks_do_not_read() -> None:
    """Blocks read their parameters themselves; what is left is passed in the order of `operands`."""
    model = Blocks()
    entry = prepared(model, 1)
    mine = entry.on(places(model)[1], {f"h.{i}": block for i, block in enumerate(model.h)}.get)
    assert mine.operands == [] and len(placeholders(mine.module.graph)) == 1
    torch.testing.assert_close(mine.module(X)[0], model(X))
    alone = entry.on(places(model)[1], lambda _: None)
    assert list(alone.operands) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(alone.module(*model.parameters(), X)[0], model(X))
    assert entry.operands == () and not list(entry.module.graph.nodes), "another model may take it, too"
