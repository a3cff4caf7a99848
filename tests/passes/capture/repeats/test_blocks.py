"""blocks: which modules of a model are alike; classes that are changed for a while are what they were afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.passes.capture.repeats.blocks import blocks_of, definer, differing, parts_of, patched


class Block(nn.Module):
    def __init__(self, width: int = 4, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.up = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


def found(model: nn.Module) -> list[tuple[str, int]]:
    """The blocks by path, with their kinds."""
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    return [(paths[at], kind) for at, (_, kind) in blocks_of(model).items()]


def test_blocks_of_several_kinds_are_grouped() -> None:
    model = nn.Module()
    model.h = nn.ModuleList([Block(), Block(8), Block(), Block(8), nn.Linear(3, 3)])
    assert found(model) == [("h.0", 0), ("h.1", 1), ("h.2", 0), ("h.3", 1)]


def test_blocks_are_the_outermost_ones() -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))) for _ in range(2)))
    assert found(model) == [("0", 0), ("1", 0)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_blocks_leave_out_single_named_or_odd_modules() -> None:
    """A single one; modules without parameters; named ones; a forward that is not the class's."""
    own = nn.Sequential(Block(), Block(), Block())
    own[0].forward = lambda x: x
    assert [path for path, _ in found(own)] == ["1", "2"]
    assert found(nn.Sequential(Block(), nn.Linear(2, 2))) == []
    assert found(nn.Sequential(nn.ReLU(), nn.ReLU())) == []
    assert found(nn.ModuleDict({"a": Block(), "b": Block()})) == []
    assert found(nn.Sequential(*(torch.jit.script(nn.Linear(2, 2)) for _ in range(2)))) == []


def test_differing_names_layer_numbers() -> None:
    """The number of a layer, as transformers' layers have it."""
    model = nn.Sequential(Block(layer=0), Block(layer=1), Block(layer=2))
    assert differing(blocks_of(model)) == {(0, "", "layer")}
    assert differing(blocks_of(nn.Sequential(Block(), Block()))) == set()


def test_parts_of_sees_a_replaced_module() -> None:
    block = Block()
    before = parts_of(block)
    assert parts_of(block) == before
    block.up = nn.Linear(4, 4)
    assert parts_of(block) != before


def test_definer_is_the_class_with_its_own_forward() -> None:
    class Same(Block):
        pass

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert (definer(Same), definer(Own)) == (Block, Own)


def test_patched_restores_attributes_after_an_error() -> None:
    """Also after an error; what the class did not have itself is gone again, so that its base's comes back."""

    class Base:
        size = 1

    class Kind(Base):
        name = "kind"

    with pytest.raises(KeyError), patched(Kind, {"name": "other", "size": 2}):
        assert (Kind.name, Kind.size) == ("other", 2)
        raise KeyError
    assert (Kind.name, Kind.size, "size" in vars(Kind)) == ("kind", 1, False)
    own: Any = type("module", (), {})()
    with patched(own, {"value": 3}):
        assert own.value == 3
    assert not hasattr(own, "value")
