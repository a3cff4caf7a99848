"""Chooses the rank that steps each parameter, its owner, and lists what moves between the owners and the holders.

Every rank tells what it holds (`Held`), and computes the same plan of this. It works for any way in which ranks hold
parts: cut unevenly or along a concatenation, several ranks with the same part, ranks without one, rows of a part that
replicas shard, and a parameter of several stages of a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autotp.errors import Error

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A box of a parameter: its start in the whole, and its sizes."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter.

    Attributes:
        name: its name in the model.
        group: the number of its group in the optimizer.
        shape: the shape of the whole.
        dtype: its dtype, as text.
        boxes: all boxes that the rank holds.
        counted: the same without the elements that an earlier tensor-parallel rank holds, too.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Place, ...]
    counted: tuple[Place, ...]

    @property
    def elements(self) -> int:
        """The number of elements that the rank holds."""
        return sum(prod(sizes) for _, sizes in self.boxes)


@dataclass(frozen=True)
class Move:
    """A box of a parameter that one rank sends to another, or has for itself."""

    name: str
    source: int
    target: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Owners:
    """The owner of each parameter, and what a rank sends, receives and has for itself.

    Attributes:
        owners: name -> the rank that steps the parameter.
        gathered, scattered: the dtypes, as text, of which a gradient, or a new parameter, moves between any ranks.
        to_owner: the boxes of gradients from and to this rank. Each element comes from one rank.
        from_owner: the boxes of new parameters from and to this rank, for all ranks that hold them.
        sent: the names of the parameters of this rank of which some gradient moves between ranks.
    """

    owners: Mapping[str, int]
    gathered: tuple[str, ...]
    scattered: tuple[str, ...]
    to_owner: tuple[Move, ...]
    from_owner: tuple[Move, ...]
    sent: frozenset[str]


def as_text(entries: Iterable[Held]) -> str:
    """Returns what a rank holds as text, for the other ranks."""
    rows = [
        [
            part.name,
            part.group,
            part.shape,
            part.dtype,
            part.boxes,
            part.counted if part.counted != part.boxes else None,
        ]
        for part in entries
    ]
    return json.dumps(rows)


def from_text(text: str) -> list[Held]:
    """Returns what another rank holds; the inverse of `as_text`."""
    entries = []
    for name, group, shape, dtype, boxes, counted in json.loads(text):
        places = _places(boxes)
        entries.append(Held(name, group, tuple(shape), dtype, places, places if counted is None else _places(counted)))
    return entries


def _places(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[Place, ...]:
    return tuple((tuple(start), tuple(sizes)) for start, sizes in rows)


def assign(every: Sequence[Sequence[Held]], rank: int, before: Mapping[str, int] | None = None) -> Owners:
    """Returns the owners of all parameters, and the moves of `rank`.

    The most expensive parameter is assigned first, to the rank with the least work among those that may own it.

    Args:
        every: what each rank holds.
        before: owners that stay as they are.

    Raises:
        Error: ranks disagree about a parameter, or do not hold all of it.
    """
    holders = _holders(every)
    owners, load = dict[str, int](), [0] * len(every)
    order = sorted(holders, key=lambda name: (-_cost(_any(holders[name]).shape), name))
    for name in sorted(order, key=lambda name: name not in (before or {})):  # Those that stay come first.
        by_rank = holders[name]
        candidates = [before[name]] if before and before.get(name) in by_rank else _candidates(by_rank)
        owners[name] = min(candidates, key=lambda candidate: (load[candidate], candidate))
        load[owners[name]] += _cost(_any(by_rank).shape)
    sent = [0] * len(every)
    to_owner, from_owner, names = list[Move](), list[Move](), set[str]()
    gathered, scattered = set[str](), set[str]()
    for name in order:
        by_rank = holders[name]
        moves = _gradients(name, by_rank, owners[name], sent)
        if any(move.source != move.target for move in moves):
            gathered.add(_any(by_rank).dtype)
            names |= {name} if rank in by_rank else set()
        if len(by_rank) > 1:
            scattered.add(_any(by_rank).dtype)
        to_owner += [move for move in moves if rank in (move.source, move.target)]
        for target, part in by_rank.items():
            if rank in (target, owners[name]):
                from_owner += [Move(name, owners[name], target, *box) for box in part.boxes]
    dtypes = tuple(sorted(gathered)), tuple(sorted(scattered))
    return Owners(owners, *dtypes, tuple(to_owner), tuple(from_owner), frozenset(names))


def _holders(every: Sequence[Sequence[Held]]) -> dict[str, dict[int, Held]]:
    """Returns parameter -> rank -> what it holds.

    Raises:
        Error: ranks disagree about the parameter, or do not hold all of it.
    """
    holders: dict[str, dict[int, Held]] = {}
    for rank, some in enumerate(every):
        for part in some:
            holders.setdefault(part.name, {})[rank] = part
    for name, by_rank in holders.items():
        kinds = {(part.group, part.shape, part.dtype) for part in by_rank.values()}
        if len(kinds) > 1:
            raise Error(
                f"`{name}` is not in the same group of the optimizer on all ranks, or has another shape or dtype there",
                fix="the same groups of parameters on all ranks",
            )
        total, whole_elements = sum(prod(sizes) for _, sizes in _sources(by_rank)), prod(_any(by_rank).shape)
        if total != whole_elements:
            raise Error(
                f"the ranks that step `{name}` together hold {total:,} of its {whole_elements:,} elements",
                fix="autotp.distribute(model, tp=..., dp=..., zero=...) in place of fully_shard on a parallel model",
                alternative="an optimizer with the same parameters on all ranks",
            )
    return holders


def _any(by_rank: Mapping[int, Held]) -> Held:
    return next(iter(by_rank.values()))


def _cost(shape: tuple[int, ...]) -> int:
    """Returns the multiplications of a product of a matrix with its transpose: what orthogonalization repeats."""
    return prod(shape) * (min(shape) if len(shape) > 1 else 1)


def _candidates(by_rank: Mapping[int, Held]) -> list[int]:
    """Returns the ranks that may own a parameter: those that keep the moves within the bytes of an all-gather.

    Let n ranks hold H of the W elements together, copies included, and a rank h of them. It receives W - h elements as
    the owner, and sends H - h. An all-gather of a matrix, of which each element is on one rank, moves (n - 1) W. Of two
    ranks it is the one with the larger part that may own. A rank with an average part always may.
    """
    whole_elements, total = prod(_any(by_rank).shape), sum(part.elements for part in by_rank.values())
    return [
        rank
        for rank, part in by_rank.items()
        if whole_elements + total - 2 * part.elements <= (len(by_rank) - 1) * whole_elements
    ]


def _gradients(name: str, by_rank: Mapping[int, Held], owner: int, sent: list[int]) -> list[Move]:
    """Returns the moves of a gradient to its owner; adds to `sent` the elements that each rank sends.

    What the owner holds it has for itself. Of other ranks that hold the same box the one sends it that sends the fewest
    elements.
    """
    moves = []
    for box, ranks in _sources(by_rank).items():
        inside, outside = _split(box, by_rank[owner].boxes)
        moves += [Move(name, owner, owner, *place) for place in inside]
        for place in outside:
            source = min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += prod(place[1])
            moves.append(Move(name, source, owner, *place))
    return moves


def _sources(by_rank: Mapping[int, Held]) -> dict[Place, list[int]]:
    """Returns boxes that make up the whole, each with the ranks that hold it."""
    ranks_by_box: dict[Place, list[int]] = {}
    for rank, part in by_rank.items():
        for box in part.counted:
            ranks_by_box.setdefault(box, []).append(rank)
    return ranks_by_box


def _split(box: Place, regions: Iterable[Place]) -> tuple[list[Place], list[Place]]:
    """Returns the boxes within some of `regions`, and those outside of all, that make up `box`."""
    inside, outside = list[Place](), [box]
    for region in regions:
        remaining = list[Place]()
        for piece in outside:
            common, rest = _cut_out(piece, region)
            inside += common
            remaining += rest
        outside = remaining
    return inside, outside


def _cut_out(box: Place, region: Place) -> tuple[list[Place], list[Place]]:
    """Returns the common box of two, if there is one, and boxes that make up the rest of `box`."""
    start, stop = list(box[0]), [offset + size for offset, size in zip(*box, strict=True)]
    rest = list[Place]()
    for dim, (low, size) in enumerate(zip(*region, strict=True)):
        if low >= stop[dim] or low + size <= start[dim]:
            return [], [box]
        for a, b in ((start[dim], low), (low + size, stop[dim])):
            if a < b:
                rest.append(_between([*start[:dim], a, *start[dim + 1 :]], [*stop[:dim], b, *stop[dim + 1 :]]))
        start[dim], stop[dim] = max(start[dim], low), min(stop[dim], low + size)
    return [_between(start, stop)], rest


def _between(start: Sequence[int], stop: Sequence[int]) -> Place:
    return tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True))
