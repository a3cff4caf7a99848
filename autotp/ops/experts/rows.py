"""Works on the experts of a mixture that this rank holds: selects the rows that chose them, and multiplies these rows.

Rows are in the order of their chosen experts, so their axis is `experts x rows of an expert`. The second factor differs
from expert to expert and is known at run time only; only `experts` is ever cut. The functions take plain tensors, and
graphs call them (`passes/plan/experts`).

NOTE [Capacity]
With a capacity factor each expert has the same number of slots for the rows of a rank, full or empty, so all sizes are
known before a row is sorted, and the host reads nothing. Rows fill the slots of their expert in the order in which the
model has them; the rows after these are dropped: an expert's result is zero for them. The number of slots is that of
Fedus et al. 2021, "Switch Transformers", section 2.2, where a token counts once for each expert that it chooses.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.attached import READ, HostValues, host_values
from autotp.errors import Error

_BEGINS = HostValues()
"""Of the chosen experts of rows in order: where the rows of each expert begin, and where the last one's end; then the
number of experts, and whether -1 is not one of them: a choice may be among others, too."""


def note_begins(chosen: Tensor, number: int, grouped: bool, begins: list[int]) -> None:
    """Notes where the rows of each expert begin, in order, and where the last one's end, so that nobody reads it."""
    _BEGINS.keep(chosen, [*begins, number, grouped])


def _known_begins(chosen: Tensor, number: int, grouped: bool) -> list[int] | None:
    *begins, known_number, known_grouped = _BEGINS.of(chosen) or [0, 0]
    return begins if (known_number, known_grouped) == (number, grouped) else None


def slots_of_expert(rows: int, number: int, capacity: float) -> int:
    """Returns ceil(capacity * rows / number): the rows that an expert computes at most. See NOTE [Capacity].

    Args:
        rows: the rows of this rank: each token once for every expert that it chooses.
        number: the number of experts.
        capacity: the factor, taken as it is written: 1.1 is 11/10.
    """
    slots_per_row = Fraction(str(capacity)) / number
    return -(-rows * slots_per_row.numerator // slots_per_row.denominator)


def dispatch(
    chosen: Tensor, number: int, grouped: bool, start: int, stop: int, capacity: float | None = None
) -> Tensor:
    """Returns the rows that chose the experts `start` to `stop`, in the experts' order.

    Without a capacity it waits for the device once, if `exchange_counts` has not done so for this choice.

    Args:
        chosen: [rows] the index of each row's expert.
        number: the number of experts.
        grouped: False if -1 is a legal index, for the last expert.
        capacity: a factor; None for room for all rows. See NOTE [Capacity].

    Returns:
        [rows of these experts], int64; with a capacity [slots of these experts], where an empty slot has a number after
        those of all rows.

    Raises:
        Error: without a capacity, an index is out of range; raised on all ranks.
    """
    if capacity is not None:
        return _slots(chosen, number, grouped, range(start, stop), capacity)
    # Stable: the rows of an expert stay in the order in which one device multiplies them.
    ordered, places = torch.sort(_wrapped(chosen, number, grouped), stable=True)
    begins = _known_begins(chosen, number, grouped)
    if begins is None:
        experts = torch.arange(number + 1, dtype=ordered.dtype, device=ordered.device)
        begins = torch.searchsorted(ordered, experts).tolist()
        note_begins(chosen, number, grouped, begins)
    if begins[0] or begins[-1] < len(chosen):
        wrong = int(ordered[0] if begins[0] else ordered[-1])
        raise Error(
            f"a row chose expert {wrong} of {number}",
            fix='experts="width", where the model itself handles such a row',
        )
    return places[begins[start] : begins[stop]]


def _slots(chosen: Tensor, number: int, grouped: bool, experts: range, capacity: float) -> Tensor:
    rows, device = len(chosen), chosen.device
    ordered, places = torch.sort(_wrapped(chosen, number, grouped), stable=True)
    every = torch.arange(experts.start, experts.stop + 1, dtype=ordered.dtype, device=device)
    begins = torch.searchsorted(ordered, every)
    # [experts slots]
    sorted_places = begins[:-1, None] + torch.arange(slots_of_expert(rows, number, capacity), device=device)
    return torch.where(sorted_places < begins[1:, None], places[sorted_places.clamp(max=rows - 1)], rows).flatten()


def counts(chosen: Tensor, number: int, grouped: bool, start: int, stop: int, capacity: float | None = None) -> Tensor:
    """Returns the number of rows, or of slots, of each expert from `start` to `stop`; see `dispatch`.

    Returns:
        [experts], int64
    """
    if capacity is not None:
        sizes = [slots_of_expert(len(chosen), number, capacity)] * (stop - start)
        slots = torch.full([stop - start], sizes[0], device=chosen.device)
        READ.keep(slots, sizes)
        return slots
    return row_counts(chosen, number, grouped, start, stop)


def row_counts(chosen: Tensor, number: int, grouped: bool, start: int, stop: int) -> Tensor:
    """Returns the number of rows that chose each expert from `start` to `stop`, whatever their slots."""
    # The first bucket counts the rows of earlier experts, the last one those of later experts: both are dropped.
    within = (_wrapped(chosen, number, grouped).long() - start + 1).clamp(0, stop - start + 1)
    every = torch.zeros(stop - start + 2, dtype=torch.int64, device=chosen.device)
    by_expert = every.index_add(0, within, torch.ones_like(within))[1:-1]
    if begins := _known_begins(chosen, number, grouped):
        # `dispatch` has read these numbers already, so the products that split by them need not wait again.
        READ.keep(by_expert, [end - begin for begin, end in pairwise(begins[start : stop + 1])])
    return by_expert


def _wrapped(chosen: Tensor, number: int, grouped: bool) -> Tensor:
    return chosen if grouped else torch.where(chosen < 0, chosen + number, chosen)


def spread(weight: Tensor, count: Tensor, places: Tensor) -> Tensor:
    """Returns the weight of each row's expert. weight: [experts ...], count: [experts], places: [rows] -> [rows ...]"""
    return torch.repeat_interleave(weight, count, 0, output_size=places.shape[0])


def grouped_mm(x: Tensor, weight: Tensor, count: Tensor, fused: bool) -> Tensor:
    """Returns the product of each row with its expert's matrix.

    Args:
        x: [rows in]
        weight: [experts in out]
        count: [experts] the number of rows of each expert.
        fused: whether to use torch's operator, which does not support every dtype; else expert after expert.

    Returns:
        [rows out]
    """
    if fused and x.shape[0] and x.dtype != torch.float64:
        return F.grouped_mm(x, weight, offs=count.cumsum(0, dtype=torch.int32))
    return torch.cat([part @ matrix for part, matrix in zip(x.split(host_values(count)), weight.unbind(), strict=True)])


def chosen_mm(x: Tensor, weight: Tensor, chosen: Tensor, fused: bool) -> Tensor:
    """Returns the product of each row with the matrix of the expert that it chose. Waits for the device, as `dispatch`.

    Args:
        x: [rows in]
        weight: [experts in out]
        chosen: [rows] the index of each row's expert.
        fused: as for `grouped_mm`.

    Returns:
        [rows out]

    Raises:
        Error: an index is out of range.
    """
    among = (weight.shape[0], True, 0, weight.shape[0])
    places = dispatch(chosen, *among)
    product = grouped_mm(x.index_select(0, places), weight, counts(chosen, *among), fused)
    return combine(product, places, chosen)


def fill_slots(x: Tensor, places: Tensor) -> Tensor:
    """Returns the rows in slots, and zeros for empty slots.

    Args:
        x: [rows ...]
        places: [slots] from `dispatch` with a capacity.

    Returns:
        [slots ...]
    """
    rows, empty = max(x.shape[0], 1), places >= x.shape[0]
    # Empty slots read rows in turn: backward adds their zeros, and many additions to one row would wait for each other.
    turns = torch.arange(len(places), device=places.device) % rows
    filled = x.index_select(0, torch.where(empty, turns, places))
    return filled.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0)


def combine(x: Tensor, places: Tensor, chosen: Tensor, number: int | None = None, grouped: bool = True) -> Tensor:
    """Puts a rank's rows back into their original places, with zeros elsewhere; the sum over ranks has all rows.

    Args:
        x: [rows of the rank's experts ...]
        places: [rows of the rank's experts] from `dispatch`.
        chosen: [rows]
        number: the number of experts, where places are slots; None where they are rows.
        grouped: as for `dispatch`.

    Returns:
        [rows ...]; where places are slots, nan for a row whose expert's index is out of range: nobody reads it on the
        host, and a loss that is not finite is an Error.
    """
    if number is None:
        return x.new_zeros((chosen.shape[0], *x.shape[1:])).index_copy(0, places, x)
    rows, index = chosen.shape[0], _wrapped(chosen, number, grouped)
    combined = x.new_zeros((rows + 1, *x.shape[1:])).index_copy(0, places, x)[:rows]
    if not x.is_floating_point():
        return combined
    wrong = (index < 0) | (index >= number)
    return combined.masked_fill(wrong.view(-1, *[1] * (x.dim() - 1)), float("nan"))


NEW = (dispatch, counts)
"""The functions that introduce the axis of experts, from values that every rank has whole."""
