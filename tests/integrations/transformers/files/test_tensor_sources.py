"""tensor_sources: blocks of a box, and a rank's part read in blocks. Changes of parts: `test_lazy_tensor.py`."""

from __future__ import annotations

import pytest
import torch

from autotp.integrations.transformers.files.tensor_sources import (
    Computed,
    InMemory,
    Permuted,
    Source,
    blocks_of_box,
    read_part,
    read_whole,
    whole_box,
)
from autotp.sharding.layout import Layout


@pytest.mark.parametrize("size", [1, 8, 16, 40, 64, 1000])
def test_blocks_are_the_box_in_memory_order(size: int) -> None:
    box = ((1, 4), (0, 5), (2, 4))
    numbers = torch.arange(5 * 6 * 4).view(5, 6, 4)
    found = list(blocks_of_box(box, 4, size))
    parts = [numbers[tuple(slice(a, b) for a, b in block)] for block in found]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), numbers[1:4, 0:5, 2:4].flatten())
    assert all(part.numel() * 4 <= max(size, 4) for part in parts)
    assert list(blocks_of_box((), 4, 1)) == [()]
    assert list(blocks_of_box(((2, 2), (0, 9)), 4, 1)) == [((2, 2), (0, 9))]


LAYOUTS = {
    "rows": Layout((6, 4), 0, (((0, 2), (4, 5)), ((2, 4), (5, 6)), ())),
    "columns": Layout((6, 4), 1, (((0, 1),), ((1, 4),), ((0, 4),))),
    "whole": Layout((6, 4)),
}


FULL = torch.arange(24.0).view(6, 4)
SOURCES: dict[str, Source] = {
    "stored": InMemory(FULL),
    "view": Permuted(InMemory(FULL.t()), (1, 0)),
    "computed": Computed(lambda: 1 * FULL, (6, 4), torch.float32),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_read_part_gives_what_layout_take_gives(
    layout: Layout, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotp.integrations.transformers.files.tensor_sources.BLOCK", 12)  # less than a row
    for rank in range(3):
        part = torch.full(layout.local_shape(rank), torch.nan)
        read_part(part, source, layout, rank)
        assert torch.equal(part, layout.take(FULL, rank))


def test_read_part_and_read_whole_take_scalars() -> None:
    scalar, part = InMemory(torch.tensor(3.5)), torch.zeros(())
    read_part(part, scalar, Layout(()), 0)
    assert part == 3.5 and read_whole(scalar) == 3.5 and whole_box(()) == ()
