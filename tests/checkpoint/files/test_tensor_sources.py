"""tensor_sources: blocks of a box, and a rank's part read in blocks. Changes of parts: `test_lazy_tensor.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainers import Given

from autotp.checkpoint.files.lazy_tensor import Lazy
from autotp.checkpoint.files.tensor_sources import blocks_of_box, read_part, read_whole, whole_box
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


@pytest.mark.parametrize("run", [lambda x: x, lambda x: x.t().t(), lambda x: 1 * x], ids=["stored", "view", "computed"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_read_part_gives_what_layout_take_gives(
    layout: Layout, run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotp.checkpoint.files.tensor_sources.BLOCK", 12)  # less than a row
    full = torch.arange(24.0).view(6, 4)
    for rank in range(3):
        part = torch.full(layout.local_shape(rank), torch.nan)
        read_part(part, run(Lazy(Given(full))).source, layout, rank)
        assert torch.equal(part, layout.take(full, rank))


def test_read_part_and_read_whole_take_scalars() -> None:
    lazy, part = Lazy(Given(torch.tensor(3.5))), torch.zeros(())
    read_part(part, lazy.source, Layout(()), 0)
    assert part == 3.5 and read_whole(lazy.source) == 3.5 and whole_box(()) == ()
