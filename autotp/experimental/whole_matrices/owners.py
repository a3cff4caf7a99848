"""Chooses the rank that steps each parameter, its owner, and lists what moves between the owners and the holders.

The borders of what ranks hold divide a parameter into boxes that do not overlap. So it may be cut unevenly or along a
concatenation, ranks may hold the same part or none, replicas may shard the rows of a part, and stages of a pipeline may
share a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from autotp.errors import Error

Box = Sequence[Sequence[int]]
"""The start and the stop of a box in each dimension of a tensor."""
Pieces = dict[Box, dict[int, Box]]
"""Boxes that make up a parameter -> rank that holds one -> the same box in the rank's part."""


class HeldPart(NamedTuple):
    """What a rank holds of a parameter.

    Attributes:
        group: the number of the parameter's group in the optimizer.
        shape, dtype: those of the parameter; the dtype as text.
        boxes: pairs of a box of the parameter, and the same box in the rank's part.
    """

    group: int
    shape: Sequence[int]
    dtype: str
    boxes: Sequence[tuple[Box, Box]]


class Move(NamedTuple):
    """A box of a parameter that one rank sends to another, or copies itself: its place at both ends."""

    name: str
    source: int
    target: int
    source_box: Box
    target_box: Box


class OwnerPlan(NamedTuple):
    """The owner of each parameter, and what a rank sends, receives and has for itself.

    Attributes:
        owners: name -> the rank that steps the parameter.
        holders: name -> the ranks that hold a part of it.
        gathered, scattered: name -> dtype, where a gradient, or a new parameter, moves between any ranks.
        to_owner: the boxes of gradients from and to this rank. Each element comes from one rank.
        from_owner: the boxes of new parameters from and to this rank, for all ranks that hold them.
    """

    owners: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    gathered: Mapping[str, str]
    scattered: Mapping[str, str]
    to_owner: Sequence[Move]
    from_owner: Sequence[Move]


def plan_owners(every: Sequence[Mapping[str, HeldPart]], rank: int, before: Mapping[str, int]) -> OwnerPlan:
    """Returns the owners of all parameters, and the moves of `rank`.

    Args:
        every: for each rank, name -> what it holds.
        before: owners that stay as they are.

    Raises:
        Error: ranks disagree about a parameter, or do not hold all of it.
    """
    parts: dict[str, dict[int, HeldPart]] = {}
    for holder, part_by_name in enumerate(every):
        for name, part in part_by_name.items():
            parts.setdefault(name, {})[holder] = part
    pieces = {name: _pieces(name, by_rank) for name, by_rank in parts.items()}
    owners, sent = _owners(parts, before, len(every)), [0] * len(every)
    to_owner, from_owner = list[Move](), list[Move]()
    for name, owner in owners.items():
        for box, holders in pieces[name].items():
            # The owner has for itself what it holds. Else the holder sends it that sends the fewest elements.
            source = owner if owner in holders else min(holders, key=lambda holder: (sent[holder], holder))
            sent[source] += _elements([box]) * (source != owner)
            to_owner.append(Move(name, source, owner, holders[source], box))
            from_owner += [Move(name, owner, target, box, place) for target, place in holders.items()]
    holders_by_name = {name: tuple(by_rank) for name, by_rank in parts.items()}
    dtypes = {name: by_rank[owners[name]].dtype for name, by_rank in parts.items()}
    gathered, scattered = (
        {move.name: dtypes[move.name] for move in moves if move.source != move.target}
        for moves in (to_owner, from_owner)
    )
    local = [[move for move in moves if rank in (move.source, move.target)] for moves in (to_owner, from_owner)]
    return OwnerPlan(owners, holders_by_name, gathered, scattered, local[0], local[1])


def _owners(parts: Mapping[str, Mapping[int, HeldPart]], before: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Chooses the owners: the most expensive parameter first, each time the rank with the least work that may own it.

    The cost is that of a product of a matrix with its transpose, which orthogonalization repeats.
    """
    shapes = {name: next(iter(by_rank.values())).shape for name, by_rank in parts.items()}
    costs = {name: prod(shape) * (min(shape) if len(shape) > 1 else 1) for name, shape in shapes.items()}
    owners, work = dict[str, int](), [0] * ranks
    for name in sorted(parts, key=lambda name: (name not in before, -costs[name], name)):
        stays = before.get(name) in parts[name]
        candidates = [before[name]] if stays else _candidates(parts[name], prod(shapes[name]))
        owners[name] = min(candidates, key=lambda rank: (work[rank], rank))
        work[owners[name]] += costs[name]
    return owners


def _candidates(by_rank: Mapping[int, HeldPart], elements: int) -> list[int]:
    """Returns the ranks that may own a parameter: those that keep the moves within the bytes of an all-gather.

    Let n ranks hold H of the W elements together, copies included, and a rank h of them. It receives W - h elements as
    the owner, and sends H - h. An all-gather of a matrix, of which each element is on one rank, moves (n - 1) W. Of two
    ranks it is the one with the larger part that may own. A rank with an average part always may.
    """
    sizes = {rank: _elements(box for box, _ in part.boxes) for rank, part in by_rank.items()}
    limit = (len(by_rank) - 1) * elements
    return [rank for rank, size in sizes.items() if elements + sum(sizes.values()) - 2 * size <= limit]


def _pieces(name: str, by_rank: Mapping[int, HeldPart]) -> Pieces:
    """Returns the pieces of a parameter; raises Error if its holders disagree about it, or lack some."""
    if len({(part.group, *part.shape, part.dtype) for part in by_rank.values()}) > 1:
        raise Error(
            f"`{name}` is not in the same group of the optimizer on all ranks, or has another shape or dtype there",
            fix="the same groups of parameters on all ranks",
        )
    shape, pieces = next(iter(by_rank.values())).shape, Pieces()
    boxes = [(rank, box, local) for rank, part in by_rank.items() for box, local in part.boxes]
    borders = [sorted({border for _, box, _ in boxes for border in box[dim]}) for dim in range(len(shape))]
    for rank, box, local in boxes:
        lines = [line[line.index(low) : line.index(high) + 1] for line, (low, high) in zip(borders, box, strict=True)]
        shifts = [first - start for (first, _), (start, _) in zip(local, box, strict=True)]
        for piece in product(*map(pairwise, lines)):
            place = tuple((low + shift, high + shift) for (low, high), shift in zip(piece, shifts, strict=True))
            pieces.setdefault(piece, {})[rank] = place
    if (total := _elements(pieces)) != prod(shape):
        raise Error(
            f"the ranks that step `{name}` together hold {total:,} of its {prod(shape):,} elements",
            fix="autotp.distribute(model, tp=..., dp=..., zero=...) in place of fully_shard on a parallel model",
            alternative="an optimizer with the same parameters on all ranks",
        )
    return pieces


def _elements(boxes: Iterable[Box]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)
