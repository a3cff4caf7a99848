"""even_rows: experts as if all had as many rows. On `meta` there are no values that say how many chose each."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from autotp.groups.process_group import seat
from autotp.ops.collectives import send_rows
from autotp.ops.experts.exchange import NUMBERS, exchange_counts
from autotp.ops.experts.rows import note_begins
from autotp.sharding.partition import chunk_sizes


def even_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns the products of groups of rows with a matrix each, as if all groups had as many rows.

    x: [rows in]; weight: [groups in out]
    """
    groups, rows = weight.shape[0], x.shape[0]
    rows_per_group = -(-rows // groups)
    padded = torch.nn.functional.pad(x, (0, 0, 0, groups * rows_per_group - rows)) if rows % groups else x
    products = torch.bmm(padded.view(groups, rows_per_group, -1), weight)
    return products.view(groups * rows_per_group, -1)[:rows]


def even_exchange(
    chosen: Tensor, group: str | None, number: int, grouped: bool, capacity: float | None = None
) -> Tensor:
    """Returns the table of `exchange_counts`, as if all ranks chose each expert equally often.

    chosen: [rows] -> [2 ranks experts/ranks]
    """
    if capacity is not None:  # It reads no values.
        return exchange_counts(chosen, group, number, grouped, capacity)
    ranks = 1 if group is None else seat(group)[1]
    sent = [n for rows in chunk_sizes(len(chosen), ranks) for n in chunk_sizes(rows, number // ranks)]
    received = sent[: number // ranks] * ranks
    note_begins(chosen, number, grouped, [0, *accumulate(sent)])
    counted = torch.empty(ranks, number // ranks + 1, dtype=torch.int64, device=chosen.device)
    table = torch.stack([counted, send_rows(counted, group, [1] * ranks, [1] * ranks)])[:, :, :-1].contiguous()
    NUMBERS.keep(table, [*sent, *received])
    return table
