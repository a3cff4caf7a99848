"""Experts as if all had as many rows: shapes of products, and the table of an exchange."""

import torch

from autotp.costs.work import without_processes
from autotp.ops.experts.exchange import arrival, to_experts, to_rows
from autotp.tools.estimation.counts.even_rows import even_exchange, even_groups


def test_groups_have_the_products_of_their_rows() -> None:
    """Groups of two rows; the last one has one row."""
    x, weight = torch.randn(5, 4), torch.randn(3, 4, 2)
    expected = torch.cat([rows @ matrix for rows, matrix in zip(x.split(2), weight, strict=True)])
    torch.testing.assert_close(even_groups(x, weight, torch.tensor([])), expected)


def test_as_many_rows_arrive_as_leave() -> None:
    """Eight rows of each of four ranks, whose two experts each get a quarter of all."""
    meta = torch.device("meta")
    with without_processes({"ep": 4}):
        table = even_exchange(torch.empty(8, dtype=torch.int64, device=meta), "ep", 8, True)
        places = arrival(table)
        arrived = to_experts(torch.empty(8, 3, device=meta), "ep", table, places)
        assert (table.shape, places.shape, arrived.shape) == ((2, 4, 2), (8,), (8, 3))
        assert to_rows(arrived, "ep", table, places).shape == (8, 3)
