"""sharded_tensor: whole to look at, cut in memory; operators beside the cut work on the part, others say so."""

import copy
import io
from typing import Any

import numpy
import pytest
import torch

import autotp
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import Sharded
from autotp.sharding.layout import Layout

PIECES = (((0, 2),), ((2, 4),), ((4, 6),), ())  # 6 heads on 4 ranks
WHOLE = torch.arange(2 * 6 * 5 * 3).view(2, 6, 5, 3).double()


def sharded(rank: int) -> Sharded:
    """[2 6@tp 5 3]"""
    layout = Layout((-1, 6, -1, 3), 1, PIECES, "heads")
    return Sharded(layout.take(WHOLE, rank), layout, Mesh(size=4, rank=rank))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: x[:, :, -2:], id="slice"),
        pytest.param(lambda x: x[..., :-1, :], id="dots"),
        pytest.param(lambda x: x[1], id="select"),
        pytest.param(lambda x: x[:, :, -1], id="select-behind"),
        pytest.param(lambda x: x[torch.tensor([1, 0, 1]), ...], id="places"),
        pytest.param(lambda x: x.index_select(0, torch.tensor([1, 0])), id="index-select"),
        pytest.param(lambda x: x.narrow(2, 1, 3), id="narrow"),
        pytest.param(lambda x: x.repeat_interleave(3, dim=0), id="repeat"),
        pytest.param(lambda x: x.to(torch.float32).clone(), id="to"),
        pytest.param(lambda x: copy.deepcopy(x).zero_(), id="zero"),
        pytest.param(lambda x: x.detach().data.requires_grad_(False), id="detach"),
    ],
)
def test_beside_the_cut(use: Any, rank: int) -> None:
    """A rank that holds nothing answers as the others do."""
    found, expected = use(sharded(rank)), use(WHOLE)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    dim = found.cut[0]
    assert torch.equal(found.part, Layout(tuple(expected.shape), dim, PIECES).take(expected, rank))
    assert found.numel() == expected.numel() and len(found) == len(expected)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: x + 1, id="add"),
        pytest.param(lambda x: x.sum(), id="sum"),
        pytest.param(lambda x: torch.cat([x, x], 2), id="cat"),
        pytest.param(lambda x: x[:, 0], id="one-of-the-cut"),
        pytest.param(lambda x: x[..., torch.tensor([[0]])], id="two-dimensional-places"),
        pytest.param(lambda x: x.index_select(1, torch.tensor([0])), id="places-of-the-cut"),
        pytest.param(lambda x: x.repeat_interleave(2, 1), id="repeat-the-cut"),
        pytest.param(lambda x: x.repeat_interleave(2), id="repeat-flat"),
        pytest.param(lambda x: x.detach().numpy(), id="numpy"),
        pytest.param(lambda x: numpy.asarray(x), id="asarray"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.item(), id="item"),
        pytest.param(lambda x: bool(x), id="bool"),
        pytest.param(lambda x: list(x), id="iterate"),
        pytest.param(lambda x: x.data_ptr(), id="data-ptr"),
        pytest.param(lambda x: x.untyped_storage(), id="storage"),
        pytest.param(lambda x: torch.from_dlpack(x), id="dlpack"),
        pytest.param(lambda x: torch.save({"x": x}, io.BytesIO()), id="save"),
        pytest.param(lambda x: setattr(x, "data", WHOLE), id="set-data"),
        pytest.param(lambda x: x.register_hook(print), id="hook"),
    ],
)
def test_across_the_cut(use: Any) -> None:
    with pytest.raises(autotp.Error, match=r"autotp\.gather"):
        use(sharded(1))


def test_a_copy_has_memory_of_its_own_and_prints_its_placement() -> None:
    x = sharded(0)
    copy.deepcopy(x).zero_()
    assert torch.equal(x.part, WHOLE[:, :2])
    assert str(x) == "Sharded([2, 6@tp, 5, 3], torch.float64)"


def test_the_gradient_passes_through_the_part() -> None:
    part = torch.ones(2, 2, 5, 3, requires_grad=True)
    Sharded(part * 2, sharded(0).held, Mesh(size=4))[:, :, 1:].part.sum().backward()
    assert part.grad is not None and part.grad.sum() == 2 * 2 * 2 * 4 * 3
