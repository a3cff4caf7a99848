"""whole_tensors: parts of what several ranks hold, put together on the first."""

from __future__ import annotations

import itertools
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Checks

from autotp.distributed.mesh import make_mesh
from autotp.integrations.transformers.files import tensor_sources
from autotp.integrations.transformers.files.whole_tensors import GatheredTensor, first_holders
from autotp.sharding.layout import Layout, Range

checks = Checks()

LAYOUTS = [
    Layout((6, 4), 0, (((0, 2), (4, 5)), ((2, 4), (5, 6)), ())),
    Layout((3, 6), 1, (((0, 1), (4, 6)), ((1, 3),), ((3, 4),))),
    Layout((6, 2), 0, (((0, 4),), ((0, 4),), ((4, 6),))),  # a part that two ranks hold
    Layout((5, 3), 0, (((0, 2), (4, 5)), ((1, 3), (4, 5)), ((2, 5),))),  # parts that lie across
    Layout((4, 2)),
]


@checks.on(3)
def gathered_tensor_reads_any_box_of_any_layout(rank: int, n: int) -> None:
    """Every box of every layout, in dtypes that no backend sends; the others have its shape and no memory."""
    mesh = make_mesh(n)
    for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16, torch.int16, torch.bool)):
        full = (torch.arange(math.prod(layout.shape)).view(layout.shape) % 7).to(dtype)
        whole = GatheredTensor(layout.take(full, rank), layout, mesh)
        assert (whole.shape, whole.dtype) == (layout.shape, dtype)
        for box in itertools.product(*([(0, n), (0, n - 1), (n // 2, n)] for n in layout.shape)):
            found = whole.read(box)
            expected = full[tuple(slice(a, b) for a, b in box)]
            assert found.shape == expected.shape and found.is_meta == (rank > 0)
            assert rank or torch.equal(found, expected), (layout, box)


@checks.on(3)
def gathered_tensor_sends_only_the_box(rank: int, n: int) -> None:
    """In blocks, each summed once; what the first rank has is not sent."""
    layout, sent = LAYOUTS[2], []
    full = torch.arange(12.0).view(6, 2)
    whole = GatheredTensor(layout.take(full, rank), layout, make_mesh(n))
    reduce = dist.reduce

    def counted(tensor: torch.Tensor, **given: object) -> object:
        sent.append(tensor.numel())
        return reduce(tensor, **given)  # type: ignore[arg-type]

    with patch.object(dist, "reduce", counted):
        whole.read(((1, 4), (0, 1)))
        assert not sent
        whole.read(((1, 5), (0, 1)))
        assert sent == [4 * 4]
        with patch.object(tensor_sources, "BLOCK", 8):
            found = whole.read(((1, 6), (0, 2)))
    assert sent == [4 * 4, 8, 8] and (rank or torch.equal(found, full[1:6]))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_first_holders_cover_the_range_once(layout: Layout) -> None:
    assert layout.dim is not None
    size = layout.shape[layout.dim]
    for wanted in [(a, b) for a in range(size) for b in range(a, size + 1)]:
        found = first_holders(layout, wanted)
        assert sorted(i for _, (a, b) in found for i in range(a, b)) == list(range(*wanted))
        for rank, inside in found:
            assert within(inside, layout.pieces[rank])
            assert not any(within((i, i + 1), layout.pieces[r]) for r in range(rank) for i in range(*inside))


def within(inside: Range, pieces: tuple[Range, ...]) -> bool:
    return any(a <= inside[0] and inside[1] <= b for a, b in pieces)
