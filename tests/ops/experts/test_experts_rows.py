"""experts: each rank has the rows that chose its experts; together they have all rows."""

from __future__ import annotations

import pytest
import torch
from errors import message
from hypothesis import given
from hypothesis import strategies as st

from autotp.ops.experts import rows as routing


@pytest.mark.parametrize(("grouped", "wrong"), [(True, 4), (True, -1), (False, 4), (False, -5)])
def test_dispatch_refuses_an_expert_out_of_range(grouped: bool, wrong: int) -> None:
    assert message(lambda: routing.dispatch(torch.tensor([1, wrong, 3]), 4, grouped, 0, 2)) == (
        f"a row chose expert {wrong + 4 * (wrong == -5)} of 4\n"
        '  try      experts="width", where the model itself handles such a row'
    )


@given(st.lists(st.integers(-6, 5), max_size=12), st.sampled_from([1, 2, 3, 6]))
def test_dispatch_and_combine_share_out_all_rows(chosen: list[int], parts: int) -> None:
    """-1 is the last expert, as it is the last row of a tensor."""
    choice, number = torch.tensor(chosen, dtype=torch.int64), 6
    x, total = torch.randn(len(chosen), 2), torch.zeros(len(chosen), 2)
    for start in range(0, number, number // parts):
        where = (choice, number, False, start, start + number // parts)
        places, count = routing.dispatch(*where), routing.counts(*where)
        expected = [[i for i, e in enumerate(chosen) if e % number == start + k] for k in range(number // parts)]
        assert places.tolist() == [i for rows in expected for i in rows]
        assert count.tolist() == [len(rows) for rows in expected]
        total += routing.combine(x[places], places, choice)
    assert torch.equal(total, x)


@pytest.mark.parametrize("count", [[2, 0, 3], [0, 0, 0]], ids=["some", "none"])
def test_routed_grouped_mm_equals_einsum(count: list[int]) -> None:
    x, weight = torch.randn(sum(count), 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    expected = torch.einsum("si,sio->so", x, routing.spread(weight, torch.tensor(count), x[:, 0]))
    wanted = torch.autograd.grad(expected.square().sum(), [x, weight])
    for fused in (False, True):
        found = routing.grouped_mm(x, weight, torch.tensor(count), fused)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [x, weight]), wanted)
