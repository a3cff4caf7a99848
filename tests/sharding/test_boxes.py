"""boxes: put together, what the ranks hold is the whole, and each element is counted once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autotp.sharding.boxes import boxes, inner_box, local_of
from autotp.sharding.layout import Layout

LAYOUTS = {
    "whole": Layout((7, 3)),
    "rows": Layout((7, 3), 0, (((0, 4),), ((4, 7),)), "a"),
    "columns": Layout((5, 7), 1, (((0, 4),), ((4, 7),)), "a"),
    "fused": Layout((12, 2), 0, (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))), "(q | k | v)"),
    "held-twice": Layout((10, 2), 0, (((0, 3), (6, 8)), ((3, 6), (6, 8), (8, 10))), "(q | k)"),
    "nothing": Layout((3,), 0, (((0, 3),), ()), "a"),
    "vector": Layout((6,), 0, (((0, 3),), ((3, 6),)), "a"),
    "deep": Layout((3, 4, 2), 1, (((0, 1), (2, 3)), ((1, 2), (3, 4))), "a"),
}


def whole(layout: Layout) -> Tensor:
    return torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape)


def put_together(layout: Layout, held: list[list[tuple[Any, Tensor]]]) -> tuple[Tensor, Tensor]:
    """The whole from all boxes, and how often each element came."""
    found, counts = torch.full(layout.shape, -1.0), torch.zeros(layout.shape)
    for box, values in (pair for mine in held for pair in mine):
        found[box.place] = values
        counts[box.place] += 1
    return found, counts


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("first", [True, False])
def test_boxes_of_all_ranks_put_together_are_the_whole(name: str, first: bool) -> None:
    layout = LAYOUTS[name]
    parts = [layout.take(whole(layout), rank) for rank in range(2)]
    held = [[(box, box.of(part)) for box in boxes(part, layout, rank, first)] for rank, part in enumerate(parts)]
    found, counts = put_together(layout, held)
    torch.testing.assert_close(found, whole(layout))
    expected = 2.0 if name == "whole" else 1.0
    assert (counts == expected).all() or (not first and name == "held-twice")


def sharded(rank: int, n: int) -> list[Any]:
    """On a tensor-parallel axis that is played, and a data axis of real processes."""
    mesh = init_device_mesh("cpu", (n,))
    found = []
    for layout in LAYOUTS.values():
        for tp in range(2):
            part = distribute_tensor(layout.take(whole(layout), tp), mesh, [Shard(0)], src_data_rank=None)
            found.append([(box, box.of(local_of(part)).clone()) for box in boxes(part, layout, tp)])
    return found


def test_boxes_of_sharded_parts_put_together_are_the_whole() -> None:
    by_rank = run_ranks(sharded, 3)
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        found, counts = put_together(layout, [mine[2 * i + tp] for mine in by_rank for tp in range(2)])
        torch.testing.assert_close(found, whole(layout), msg=name)
        assert (counts == (2 if name == "whole" else 1)).all(), name


def test_boxes_of_a_scalar() -> None:
    (box,) = boxes(torch.tensor(3.0), Layout(()), 0)
    assert box.of(torch.tensor(3.0)) == 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_inner_finds_an_element_among_held_boxes(name: str) -> None:
    """Each element of each box is found in the part, alone; what the rank does not hold is a mistake of the caller."""
    layout = LAYOUTS[name]
    for rank in range(2) if layout.pieces else (0,):
        part = layout.take(whole(layout), rank)
        for box in (held := boxes(part, layout, rank, first=False)):
            for at in itertools.product(*(range(a, a + n) for a, n in zip(box.whole, box.sizes, strict=True))):
                assert inner_box(held, at, (1,) * len(at)).of(part).item() == whole(layout)[at]
        with pytest.raises(AssertionError):
            inner_box(held, (0,) * len(layout.shape), tuple(n + 1 for n in layout.shape))
