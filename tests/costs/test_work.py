"""work: the seconds of what a piece of code runs, below autograd."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode

from autotp.costs.hardware import CPU_GLOO, H100_80GB
from autotp.costs.work import Work, without_processes
from autotp.ops.grouped_mm import grouped_mm


def test_work_prices_products_and_not_views() -> None:
    with FakeTensorMode():
        x = torch.empty(512, 512)
        with Work(CPU_GLOO) as product:
            x @ x
        with Work(CPU_GLOO) as view:
            x.t().view(512, 512)
    assert product.seconds >= 2 * 512**3 / CPU_GLOO.vector_flops and view.seconds == 0
    with FakeTensorMode(), Work(H100_80GB) as on_gpu:
        torch.empty(512, 512) @ torch.empty(512, 512)
    assert 0 < on_gpu.seconds < product.seconds


def test_work_prices_collectives_over_groups_without_processes() -> None:
    with without_processes({"four": 4}, {"four": 2}), FakeTensorMode():
        group = _resolve_process_group("four")
        assert (group.rank(), group.size()) == (2, 4)
        with Work(CPU_GLOO) as work:
            result = torch.ops._c10d_functional.all_gather_into_tensor(torch.empty(2, 1024), 4, "four")
        assert tuple(result.shape) == (8, 1024)
    assert work.collectives == 1 and work.seconds > 0


def test_all_groups_without_processes_are_there_at_once() -> None:
    with without_processes({"cp": 2, "tp": 4}):
        assert [_resolve_process_group(name).size() for name in ("cp", "tp")] == [2, 4]


def test_a_product_of_groups_is_a_product() -> None:
    """Of rows with one matrix each: as many FLOPs, whatever the groups are."""
    x, weight, ends = (torch.empty(*shape, device="meta") for shape in ((64, 32), (4, 32, 16), (4,)))
    with Work(CPU_GLOO) as grouped:
        grouped_mm(x, weight, ends)
    with Work(CPU_GLOO) as plain:
        torch.mm(x, weight[0])
    assert grouped.flops == plain.flops == 2 * 64 * 32 * 16
    assert grouped.seconds >= plain.seconds
