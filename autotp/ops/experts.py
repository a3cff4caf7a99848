"""Experts of a mixture that only one rank holds: selects the rows that chose them, and multiplies these rows.

Rows here stand in the order of the experts that they chose, so an axis of them is `experts x rows of an expert`. The
second factor is another number for each expert, known when the model runs; nothing but `experts` is ever cut of it.
Plain functions on plain tensors, the targets of calls in graphs (`passes/plan/experts.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.errors import Error


def dispatch(chosen: Tensor, number: int, grouped: bool, start: int, stop: int) -> Tensor:
    """The rows that chose the experts `start` to `stop`, in the experts' order. Waits for the device.

    Args:
        chosen: [rows] for each row the number of an expert, of which there are `number`.
        grouped: False where it is an index into the experts, for which -1 is the last.

    Returns:
        [rows of these experts], int64

    Raises:
        Error: there is no expert of a number; all ranks see so.
    """
    ordered, places = torch.sort(_wrapped(chosen, number, grouped), stable=True)
    bounds = torch.searchsorted(ordered, ordered.new_tensor([0, start, stop, number]))
    below, first, last, end = bounds.tolist()
    if below or end < len(chosen):
        wrong = int(ordered[0] if below else ordered[-1])
        raise Error(
            f"a row chose expert {wrong} of {number}",
            fix='experts="width", which leaves to the model what that means',
        )
    return places[first:last]


def counts(chosen: Tensor, number: int, grouped: bool, start: int, stop: int) -> Tensor:
    """How many rows chose each of the experts `start` to `stop`; arguments as for `dispatch`. -> [experts], int64"""
    within = (_wrapped(chosen, number, grouped).long() - start + 1).clamp(0, stop - start + 1)
    found = torch.zeros(stop - start + 2, dtype=torch.int64, device=chosen.device)
    return found.index_add(0, within, torch.ones_like(within))[1:-1]


def _wrapped(chosen: Tensor, number: int, grouped: bool) -> Tensor:
    return chosen if grouped else torch.where(chosen < 0, chosen + number, chosen)


def spread(weight: Tensor, count: Tensor, places: Tensor) -> Tensor:
    """Each row's own expert's. weight: [experts ...], count: [experts], places: [rows] -> [rows ...]"""
    return torch.repeat_interleave(weight, count, 0, output_size=places.shape[0])


def grouped_mm(x: Tensor, weight: Tensor, count: Tensor, fused: bool) -> Tensor:
    """The product of each row with its expert's matrix.

    Args:
        x: [rows in]
        weight: [experts in out]
        count: [experts] how many rows each has.
        fused: by torch's own operator, which does not have every dtype; else one expert after the other.

    Returns:
        [rows out]
    """
    if fused and x.shape[0] and x.dtype != torch.float64:
        return F.grouped_mm(x, weight, offs=count.cumsum(0, dtype=torch.int32))
    return torch.cat([part @ own for part, own in zip(x.split(count.tolist()), weight.unbind(), strict=True)])


def combine(x: Tensor, places: Tensor, chosen: Tensor) -> Tensor:
    """A rank's rows back in the places they came from, zero elsewhere; the sum over ranks is all rows.

    Args:
        x: [rows of the rank's experts ...]
        places: [rows of the rank's experts] from `dispatch`.
        chosen: [rows]

    Returns:
        [rows ...]
    """
    return x.new_zeros((chosen.shape[0], *x.shape[1:])).index_copy(0, places, x)


NEW = (dispatch, counts)
"""What makes the axis of experts, out of what every rank has whole."""
