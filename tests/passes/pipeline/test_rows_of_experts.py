"""Rows of experts that are sorted and put back are independent; each way in which they would not be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.errors import Error
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of

BATCH, LENGTH, WIDTH, EXPERTS, CHOICES = 3, 5, 8, 4, 2
Y = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 7


def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


Step = Callable[..., Any]


class Experts(nn.Module):
    """Each position chooses two of four experts; their rows are sorted, computed in groups, and put back.

    A test replaces one of the steps.
    """

    def __init__(self, **steps: Step) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 7)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)
        self.steps = steps

    def do(self, name: str, usual: Step, *given: Any) -> Any:
        return self.steps.get(name, usual)(*given)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq width], y: [batch seq]"""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOICES, -1)
        found, order = self.do("sort", lambda chosen: chosen.sort(), chosen.reshape(-1))
        rows = self.do("take", lambda flat, order: flat[order // CHOICES], flat, order)
        ends = self.do("ends", lambda found, _: counted(found), found, order)
        h = self.do("between", lambda h, _: F.gelu(h), torch._grouped_mm(rows, self.up, offs=ends), order)
        out = torch._grouped_mm(h, self.down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = self.do("back", inverse_by_writing, order)
        out = self.do("put", lambda out, back: out[back], out, back)
        both = out.view(-1, CHOICES, WIDTH).sum(1) + flat
        return F.cross_entropy(self.head(both), y.flatten())


def counted(found: Tensor) -> Tensor:
    return torch.histc(found.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)


def inverse_by_writing(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return back


def analysed(model: nn.Module) -> None:
    """In the dtype in which torch has products of groups on the CPU."""
    analyse(skeleton_of(model.bfloat16()), (x().bfloat16(), Y), {}, 2, Options(summed=True))


RIGHT: dict[str, dict[str, Step]] = {
    "as-transformers": {},
    "argsort-of-the-order": {"back": lambda order: order.argsort()},
    "stable": {"sort": lambda chosen: chosen.sort(stable=True)},
    "index-select": {"take": lambda flat, order: flat.index_select(0, order // CHOICES)},
    "more-row-by-row": {"between": lambda h, _: (h.softmax(-1) + h.mean(-1, keepdim=True)).clamp(-2, 2) * h.sigmoid()},
    "inverse-into-the-order": {"back": lambda order: order.index_put((order,), torch.arange(order.shape[0]))},
    "zeros": {"back": lambda order: torch.zeros_like(order).index_put((order,), torch.arange(order.shape[0]))},
}


@pytest.mark.parametrize("steps", RIGHT.values(), ids=RIGHT)
def test_rows_sorted_and_put_back_are_independent(steps: dict[str, Step]) -> None:
    """They are independent: microbatches, replicas and stages compute what one device does."""
    torch.manual_seed(0)
    report = autotp.verify(Experts(**steps), 2, dp=2, microbatches=3, example_inputs=(x(), Y))
    assert report.ok and report.worst.error < 1e-12, report


WRONG: dict[str, dict[str, Step]] = {
    "put-at-the-order": {"back": lambda order: order},
    "not-put-back": {"put": lambda out, back: out},
    "another-inverse": {"back": lambda order: inverse_by_writing(order.flip(0))},
    "inverse-of-places-from-one": {
        "back": lambda order: torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]) + 1 - 1)
    },
    "added-inverse": {
        "back": lambda order: torch.zeros_like(order).index_put((order,), torch.arange(order.shape[0]), accumulate=True)
    },
    "along-the-order": {"between": lambda h, _: h.cumsum(0)},
    "softmax-over-rows": {"between": lambda h, _: h.softmax(0)},
    "neighbours": {"between": lambda h, _: h + h.roll(1, 0)},
    "the-first-few": {"between": lambda h, _: torch.cat([h[:2] * 2, h[2:]])},
    "places-as-numbers": {"between": lambda h, order: h + order.unsqueeze(-1)},
    "rows-beside-sorted-rows": {"take": lambda flat, order: flat[order // CHOICES] + flat.repeat(CHOICES, 1)},
    "too-few-rows": {"take": lambda flat, order: flat[order // (2 * CHOICES)]},
    "a-remainder": {"take": lambda flat, order: flat[order % (BATCH * LENGTH)]},
    "other-groups": {"ends": lambda found, order: counted(order % EXPERTS)},
    "groups-of-equal-size": {
        "ends": lambda found, order: torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (found.shape[0] // EXPERTS)
    },
    "sorted-twice": {"sort": lambda chosen: chosen.flip(0).sort()},
}


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_rows_of_experts_that_mix_are_refused(steps: dict[str, Step]) -> None:
    with pytest.raises(Error, match=r"which (cannot be computed in parts|differs in each part of a batch)"):
        analysed(Experts(**steps))


def test_row_order_refuses_undoing_another_sort() -> None:
    """What one sort has ordered is not put back by another."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            """x: [batch seq width], y: [batch seq]"""
            score = self.score(x.flatten(0, 1))
            first, second = (score[:, i].argsort() for i in (0, 1))
            return x.flatten(0, 1)[first][second.argsort()].square().mean()

    with pytest.raises(Error, match="which cannot be computed in parts"):
        analysed(Two())


def test_row_order_refuses_a_sum_of_sorted_rows() -> None:
    class Sum(Experts):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            """x: [batch seq width], y: [batch seq]"""
            return self.router(x.flatten(0, 1)).amax(-1).sort().values.sum()

    with pytest.raises(Error, match="which cannot be computed in parts"):
        analysed(Sum())
