"""lookup: what ranks look up in their parts, put together, is what is looked up in the whole."""

import pytest
import torch
from torch import Tensor

from autotp.ops.lookup import embedding, gather
from autotp.sharding.partition import chunk_bounds

ROWS, CLASSES = 6, 7
INDEX = torch.tensor([0, 6, 3, 3, 2, 5])


def parts(x: Tensor, tp: int, dim: int = 0) -> list[tuple[int, Tensor]]:
    """Where each rank's part starts, and the part."""
    bounds = [chunk_bounds(x.shape[dim], tp, rank) for rank in range(tp)]
    return [(a, x.narrow(dim, a, b - a)) for a, b in bounds]


@pytest.mark.parametrize("tp", (1, 2, 3, 8), ids=lambda tp: f"tp{tp}")  # On 8 ranks the last one has no class.
def test_lookups_in_parts_sum_to_the_whole(tp: int) -> None:
    table, x = torch.randn(CLASSES, 3), torch.randn(ROWS, CLASSES)
    rows = sum(embedding(part, INDEX, start, CLASSES) for start, part in parts(table, tp))
    torch.testing.assert_close(rows, table[INDEX], rtol=0, atol=0)
    index = INDEX[:, None]
    picked = sum(gather(part, 1, index, start, CLASSES) for start, part in parts(x, tp, 1))
    torch.testing.assert_close(picked, x.gather(1, index), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 4])
def test_lookups_refuse_an_index_out_of_range(wrong: int) -> None:
    """As on one device: it must not pass for what another rank has."""
    index, x = torch.tensor([0, wrong]), torch.randn(2, CLASSES)
    message = f"an index is out of range: not from 0 to {CLASSES - 1}"
    for call in (
        lambda: embedding(x.T[:3], index, 0, CLASSES),
        lambda: gather(x[:, :3], 1, index[:, None], 0, CLASSES),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
