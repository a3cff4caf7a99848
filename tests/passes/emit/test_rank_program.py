"""RankProgram: where each operand of a rank's graph comes from, for any model with its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Plain
from torch import Tensor, nn

from autotp.compiler import analyse, rank_graph, rank_program
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.attach_parameters import places
from autotp.passes.emit.rank_program import RankProgram
from autotp.rules.call import placeholders

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


def program_of(model: nn.Module) -> RankProgram:
    """The program of one rank, and not yet for one model."""
    program = analyse(skeleton_of(model), (X,), {}, 1, Options())
    return rank_program(rank_graph(program, 0, "fast"), program, Options(), torch.device("cpu"), {})


def test_rank_program_knows_the_source_of_each_placeholder() -> None:
    model = Model()
    attached = program_of(model).attached(places(model)[1], lambda _: None)
    sources = [source for _, source in attached.order]
    assert [source for source in sources if not isinstance(source, Tensor)] == [
        "up.weight", "up.bias", "down.weight", "down.bias", "count", None,
    ]  # fmt: skip
    assert [source.tolist() for source in sources if isinstance(source, Tensor)] == [[2.0]]


def test_rank_program_passes_operands_that_blocks_do_not_read() -> None:
    """Blocks read their parameters themselves; what is left is passed in order. Another model may take it, too."""
    model = Blocks()
    program = program_of(model)
    (name,) = [name for name in placeholders(program.module.graph) if name not in program.sources]
    for owners, count in (({f"h.{i}": block for i, block in enumerate(model.h)}, 1), ({}, 9)):
        for attached_model in (model, Blocks()):
            present = {path: attached_model.get_submodule(path) for path in owners}
            mine = program.attached(places(attached_model)[1], present.get)
            assert len(mine.operands({name: X})) == len(placeholders(mine.module.graph)) == count
            torch.testing.assert_close(mine({name: X})[0], attached_model(X))
    assert not program.order and not program.places


def test_rank_program_reads_the_present_parameters_by_its_reader() -> None:
    """A simulated rank reads its own; a value that the call must give is missed."""
    model = Plain()
    doubled = program_of(model).attached(places(model)[1], lambda _: None, lambda place: 2 * getattr(*place))
    with torch.no_grad():
        model.up.bias.fill_(3)
    assert any(doubled.value(name).eq(6).all() for name in doubled.sources)
    with pytest.raises(KeyError):
        doubled({})
