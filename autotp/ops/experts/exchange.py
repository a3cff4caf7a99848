"""Sends rows to the ranks of their experts, and back.

Ranks along the mesh axis `ep` have different rows, and each has some experts. `rows.py` puts a rank's rows in
the order of all experts; here each rank gets the rows of its own experts from all ranks. Rows arrive rank after rank,
and in each rank's part expert after expert: their places say where they stand in the order of the experts.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from autotp.attached import READ, HostValues
from autotp.errors import Error
from autotp.groups.process_group import seat
from autotp.ops.collectives import send_rows
from autotp.ops.experts.rows import counts, note_begins, slots_of_expert

NUMBERS = HostValues()
"""The numbers in tables of `exchange_counts`."""


def own(weight: Tensor, ranks: int) -> Tensor:
    """Returns the weights of this rank's experts, which are all that it stores. [experts ...] -> [experts/ranks ...]"""
    return weight.view_as(weight)


def select_own(weights: Tensor, group: str | None, ranks: int) -> Tensor:
    """Returns the weights of this rank's experts, of weights that every rank has. [experts ...] -> [experts/ranks ...]

    Backward gives zeros for the others: the sum over the ranks has each expert's gradient once.
    """
    experts = len(weights) // ranks
    return weights.narrow(0, experts * (0 if group is None else seat(group)[0]), experts)


def exchange_counts(
    chosen: Tensor, group: str | None, number: int, grouped: bool, capacity: float | None = None
) -> Tensor:
    """Returns how many rows this rank sends, and gets. Waits for the device: the only time in a layer.

    With a capacity each expert has as many slots on every rank. Then it neither communicates nor waits.

    Args:
        chosen: [rows] the index of each row's expert; with a capacity, all ranks have as many rows.
        number: the number of experts, a multiple of the number of ranks.
        grouped: False if -1 is a legal index, for the last expert.
        capacity: as for `dispatch`.

    Returns:
        [2 ranks experts/ranks], int64: the rows that it sends to each expert of each rank, and the rows that it gets
        from each rank for each of its experts.

    Raises:
        Error: without a capacity, an index is out of range; raised on all ranks of the group.
    """
    ranks = 1 if group is None else seat(group)[1]
    if capacity is not None:
        slots = slots_of_expert(len(chosen), number, capacity)
        table = torch.full([2, ranks, number // ranks], slots, device=chosen.device)
        NUMBERS.keep(table, [slots] * table.numel())
        return table
    sent = rows_to_send(chosen, number, grouped, ranks)
    return table_of_rows(chosen, number, grouped, sent, send_rows(sent, group, [1] * ranks, [1] * ranks))


def rows_to_send(chosen: Tensor, number: int, grouped: bool, ranks: int) -> Tensor:
    """Returns how many rows go to each expert of each rank, and how many of this rank's rows chose no expert.

    Each rank is told the latter, so that none waits for these rows. -> [ranks experts/ranks+1], int64
    """
    row_counts = counts(chosen, number, grouped, 0, number)
    lost = (len(chosen) - row_counts.sum()).expand(ranks, 1)
    return torch.cat([row_counts.view(ranks, -1), lost], 1)


def table_of_rows(chosen: Tensor, number: int, grouped: bool, sent: Tensor, received: Tensor) -> Tensor:
    """Returns the table of what ranks have told each other: [2 ranks experts/ranks]. Waits for the device.

    Args:
        sent, received: of this rank and of the others, as from `rows_to_send`.

    Raises:
        Error: an index is out of range.
    """
    table = torch.stack([sent, received])
    numbers = table.tolist()
    if any(row[-1] for row in numbers[1]):
        rank = next(rank for rank, row in enumerate(numbers[1]) if row[-1])
        raise Error(
            f"{numbers[1][rank][-1]} rows of ep rank {rank} chose no expert of the {number}: an index is out of range",
            fix="a router with as many outputs as there are experts",
        )
    note_begins(chosen, number, grouped, [0, *accumulate(n for row in numbers[0] for n in row[:-1])])
    table = table[:, :, :-1].contiguous()
    NUMBERS.keep(table, [n for side in numbers for row in side for n in row[:-1]])
    return table


def rows_by_rank(table: Tensor) -> tuple[list[int], list[int]]:
    """Returns the number of rows that this rank sends to each rank, and gets from each."""
    numbers, (_, ranks, experts) = NUMBERS.of(table), table.shape
    if numbers is None:
        numbers = table.flatten().tolist()
        NUMBERS.keep(table, numbers)
    by_rank = [sum(numbers[i : i + experts]) for i in range(0, len(numbers), experts)]
    return by_rank[:ranks], by_rank[ranks:]


def arrived_counts(table: Tensor) -> Tensor:
    """Returns the number of rows of each expert of this rank. table: [2 ranks experts] -> [experts], int64"""
    row_counts, (_, ranks, experts) = table[1].sum(0), table.shape
    if numbers := NUMBERS.of(table):
        received = numbers[ranks * experts :]
        READ.keep(row_counts, [sum(received[expert::experts]) for expert in range(experts)])
    return row_counts


def arrival(table: Tensor) -> Tensor:
    """Returns the places, in the order of this rank's experts, of rows as they arrive. -> [rows], int64"""
    received, total = table[1], sum(rows_by_rank(table)[1])
    by_expert = received.T.flatten()
    places = (by_expert.cumsum(0) - by_expert).view(received.shape[::-1]).T.flatten()
    as_sent, rows = received.flatten(), torch.arange(total, device=table.device)
    ends = as_sent.cumsum(0)
    moved = places - (ends - as_sent)  # How far each piece, of one rank and one expert, is from its place.
    return rows + moved.index_select(0, torch.searchsorted(ends, rows, right=True))


def to_experts(x: Tensor, group: str | None, table: Tensor, places: Tensor) -> Tensor:
    """Returns the rows of this rank's experts, of all ranks, in the experts' order.

    Backward sends their gradients back: `to_rows` is its conjugate. Every rank takes part, also one without rows.

    Args:
        x: [rows ...] this rank's rows, in the order of all experts.
        table: [2 ranks experts] from `exchange_counts`.
        places: [arriving] from `arrival`.

    Returns:
        [arriving ...]
    """
    return in_experts_order(send_rows(x, group, *rows_by_rank(table)), places)


def in_experts_order(rows: Tensor, places: Tensor) -> Tensor:
    """Returns rows that have arrived in the order of this rank's experts. [arriving ...]; places: see `to_experts`"""
    return torch.empty_like(rows).index_copy(0, places, rows)


def to_rows(x: Tensor, group: str | None, table: Tensor, places: Tensor) -> Tensor:
    """Returns this rank's rows as their experts have computed them; the inverse of `to_experts`.

    Args:
        x: [arriving ...] the rows of this rank's experts.
        table, places: as for `to_experts`.

    Returns:
        [rows ...]
    """
    sent, received = rows_by_rank(table)
    return send_rows(x.index_select(0, places), group, received, sent)
