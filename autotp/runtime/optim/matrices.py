"""The parameters of one parallel model in an optimizer, and the whole matrices that this rank owns of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor, nn

from autotp.distributed.agreement import compare, expect_alike, gather_texts
from autotp.distributed.fingerprint import bits_of, bits_of_all
from autotp.distributed.mesh import gather_ints
from autotp.errors import Error
from autotp.runtime.holdings import Holdings
from autotp.runtime.optim.moves import exchange
from autotp.runtime.optim.owners import Held, Move, Owners, Place, as_text, assign, from_text
from autotp.sharding.boxes import inner_box, local_of


class Seen(IntFlag):
    """What a rank sees of a parameter before a step.

    Attributes:
        GRADIENT: it has a gradient.
        CHANGED: its values are not those that the owner sent: other code wrote them, or it is the first step.
        FOREIGN: it has a state that was loaded.
    """

    GRADIENT = 1
    CHANGED = 2
    FOREIGN = 4


BITS, PACKED = 3, 20
"""The bits of `Seen`, and the number of parameters whose bits are in one integer."""


@dataclass(frozen=True)
class Told:
    """What all ranks have seen of this rank's parameters.

    Attributes:
        active: the names of the parameters with a gradient.
        changed: those whose values the owner does not know.
        any_changed: whether there are such parameters on any rank.
    """

    active: frozenset[str]
    changed: frozenset[str]
    any_changed: bool


class Matrices:
    """The parameters of one model in an optimizer.

    Attributes:
        parameters: name -> this rank's part.
        wholes: name -> the whole, of each parameter that this rank owns.
        owners: the owner of each parameter; None before `assign`.
    """

    def __init__(self, parts: Holdings, parameters: Mapping[str, Tensor], groups: Mapping[str, int]) -> None:
        self.parts, self.parameters, self.mesh = parts, dict(parameters), parts.everyone
        self.wholes: dict[str, nn.Parameter] = {}
        self.owners: Owners | None = None
        self._groups = groups
        self._ranks: dict[tuple[str, ...], list[int]] = {}
        self._filled: dict[str, set[int]] = {}
        self._sent: dict[str, Sent] = {}
        self._row: list[int] = []
        self._rows: list[list[int]] = []
        self._late: list[LateComparison] = []
        self._boxes = {name: self.parts.boxes(name, first=False) for name in parameters}

    def assign(self, before: Mapping[str, int]) -> None:
        """Chooses the owners, and makes the whole matrices. Call it on every rank.

        Args:
            before: the owners of an earlier plan.
        """
        entries = [self._held(name) for name in self.parameters]
        every = [from_text(text) for text in gather_texts(as_text(entries), self.mesh)]
        self._ranks, self._filled, self._rows = {}, {}, []
        for rank, some in enumerate(every):
            self._ranks.setdefault(tuple(entry.name for entry in some), []).append(rank)
            for entry in some:
                self._filled.setdefault(entry.name, set()).update({rank} if entry.boxes else ())
        self.owners = assign(every, self.mesh.rank, before)
        expect_alike(sorted(self.owners.owners.items()), self.mesh, "has other owners", "the same groups of parameters")
        self._sent = {}
        owned = [name for name in self.parameters if self.owners.owners[name] == self.mesh.rank]
        self.wholes = {name: self.wholes.get(name) or self._whole(name) for name in owned}

    def _held(self, name: str) -> Held:
        def places(first: bool) -> tuple[Place, ...]:
            return tuple((box.whole, box.sizes) for box in self.parts.boxes(name, first=first))

        shape, dtype = tuple(self.parts.shapes[name]), str(self.parameters[name].dtype).removeprefix("torch.")
        return Held(name, self._groups[name], shape, dtype, places(False), places(True))

    def _whole(self, name: str) -> nn.Parameter:
        parameter, shape = self.parameters[name], self.parts.shapes[name]
        part = _plain(parameter)
        data = part if self._is_whole(name) else torch.empty(shape, dtype=part.dtype, device=part.device)
        return nn.Parameter(data, parameter.requires_grad)

    def _is_whole(self, name: str) -> bool:
        """True for a parameter that this rank holds whole: the matrix has the same memory."""
        return _plain(self.parameters[name]).shape == torch.Size(self.parts.shapes[name])

    # ---- what ranks tell each other before a step

    def tell(self, stale: bool, is_foreign: Callable[[str], bool], problem: Exception | None) -> Told | None:
        """Returns what all ranks have seen; None if the owners must be chosen first. Call it on every rank.

        Args:
            stale: whether this rank has other parameters than the owners were chosen for.
            is_foreign: tells whether a parameter of this name has a state that was loaded.
            problem: why this rank cannot step.

        Raises:
            Error: on every rank: a rank has a problem, some holders of a parameter have no gradient of it, or its
                owner has not loaded a state and another rank has.
        """
        stale = stale or self.owners is None
        flags = [] if stale else self._seen(is_foreign)
        problem = problem or self._unseen_write()
        rows = self._rows_of([int(stale), *_packed(flags)], problem)
        if any(row[0] for row in rows):
            return None
        return self._told([row[1:] for row in rows])

    def _rows_of(self, row: list[int], problem: Exception | None) -> list[list[int]]:
        """Returns every rank's row. Ranks gather them only if that of some rank is not the one of the last step."""
        if compare(self.mesh, (), problem, counts=[row != self._row])[0][0] or not self._rows:
            self._rows, self._row = gather_ints(row, self.mesh), row
        return self._rows

    def _seen(self, is_foreign: Callable[[str], bool]) -> list[Seen]:
        assert self.owners is not None
        learning = {name for name, p in self.parameters.items() if p.grad is not None}
        changed = self._changed([name for name in self.parameters if name in learning and name in self.owners.sent])
        result = []
        for name in self.parameters:
            flags = Seen.GRADIENT if name in learning else Seen(0)
            flags |= Seen.CHANGED if name in changed else Seen(0)
            result.append(flags | (Seen.FOREIGN if is_foreign(name) else Seen(0)))
        return result

    def _changed(self, names: Sequence[str]) -> set[str]:
        """Returns those of the parameters whose values are not the ones that the owner sent.

        NOTE [Writes that torch does not count]
        torch counts writes into a parameter, except those through `.data`; only the bits tell of these. On the CPU the
        bits are compared before the step. On a GPU the host would wait for that, so it learns of such a write later,
        and then an Error says so: the owner has stepped earlier values.
        """
        parts = {name: _plain(self.parameters[name]) for name in names}
        changed = {name for name, part in parts.items() if name not in self._sent or self._sent[name].is_other(part)}
        unchanged = [name for name in names if name not in changed]
        if unchanged:
            before = torch.stack([self._sent[name].bits for name in unchanged])
            differs = (bits_of_all([parts[name] for name in unchanged]) != before).any(1)
            if not differs.is_cuda:
                return changed | {name for name, dirty in zip(unchanged, differs.tolist(), strict=True) if dirty}
            self._late.append(LateComparison.begun(unchanged, differs))
        return changed

    def _unseen_write(self) -> Exception | None:
        """Returns the Error of a write through `.data`, once a comparison that tells of one has come from the GPU."""
        arrived = [late for late in self._late if late.arrived.query()]
        self._late = [late for late in self._late if late not in arrived]
        missed = [
            name for late in arrived for name, dirty in zip(late.names, late.differs.tolist(), strict=True) if dirty
        ]
        if not missed:
            return None
        return Error(
            f"`{missed[0]}` was written through `.data`, which torch does not count, before one of the last steps: its "
            "owner has stepped the values from before",
            fix="`with torch.no_grad(): parameter.clamp_(...)`, or another write into the parameter itself",
        )

    def _told(self, rows: Sequence[Sequence[int]]) -> Told:
        assert self.owners is not None
        by_name: dict[str, dict[int, Seen]] = {}
        for names, ranks in self._ranks.items():
            rows_agree = all(rows[rank] == rows[ranks[0]] for rank in ranks)
            for rank in ranks[:1] if rows_agree else ranks:
                for name, flags in zip(names, _unpacked(rows[rank], len(names)), strict=True):
                    by_name.setdefault(name, {})[rank] = flags
        changed, active = set[str](), set[str]()
        for name, by_rank in by_name.items():
            filled = [rank for rank in by_rank if rank in self._filled[name]] or by_rank
            have = {rank: bool(by_rank[rank] & Seen.GRADIENT) for rank in filled}
            if len(set(have.values())) > 1:
                raise Error(
                    f"`{name}` does not have a gradient on all ranks that hold a part of it",
                    got=f"none on {self.mesh.named([rank for rank, has_gradient in have.items() if not has_gradient])}",
                    fix="one backward for all ranks",
                )
            self._expect_loaded(name, by_rank)
            active |= {name} if any(have.values()) else set()
            changed |= {name} if any(flags & Seen.CHANGED for flags in by_rank.values()) else set()
        local_names = frozenset(self.parameters)
        return Told(local_names & active, local_names & changed, bool(changed))

    def _expect_loaded(self, name: str, by_rank: Mapping[int, Seen]) -> None:
        """Raises Error if a state was loaded on some ranks, and not on the owner, which needs it."""
        assert self.owners is not None
        loaded, owner = [rank for rank, flags in by_rank.items() if flags & Seen.FOREIGN], self.owners.owners[name]
        if loaded and owner in by_rank and owner not in loaded:
            raise Error(
                f"the state of `{name}` was loaded on {self.mesh.named(loaded)}, and not on its owner, "
                f"{self.mesh.named([owner])}",
                fix="optimizer.load_state_dict(state) on all ranks: the whole state, or what each rank saved",
                alternative="autotp.save_checkpoint and autotp.load_checkpoint, with autotp.distribute",
            )

    # ---- a step

    def gather(self, observed: Told) -> None:
        """Gives the matrices of this rank their gradients, and their values where these changed. Call on every rank."""
        assert self.owners is not None
        for name in (name for name in self.wholes if name in observed.active):
            whole, parameter = self.wholes[name], self.parameters[name]
            if self._is_whole(name):
                whole.data, whole.grad = _plain(parameter), _plain(_gradient(parameter))
            else:
                whole.grad = torch.empty_like(whole)
        if observed.any_changed:
            self._to_owners(observed.changed, lambda p: p)
        self._to_owners(observed.active, _gradient)

    def _to_owners(self, names: Collection[str], of: Callable[[Tensor], Tensor]) -> None:
        assert self.owners is not None
        exchange(
            [move for move in self.owners.to_owner if move.name in names and not self._stays(move)],
            self._dtypes(self.owners.gathered),
            self.mesh,
            lambda move: self._part(move, of(self.parameters[move.name])),
            lambda move: _at(of(self.wholes[move.name]), move),
        )

    def scatter(self, observed: Told) -> None:
        """Gives all ranks their parts of the matrices that were stepped. Call it on every rank."""
        assert self.owners is not None
        exchange(
            [move for move in self.owners.from_owner if move.name in observed.active and not self._stays(move)],
            self._dtypes(self.owners.scattered),
            self.mesh,
            lambda move: _at(self.wholes[move.name], move),
            lambda move: self._part(move, self.parameters[move.name]),
        )
        for whole in self.wholes.values():
            whole.grad = None
        names = [name for name in self.parameters if name in observed.active and name in self.owners.sent]
        self._sent |= {name: Sent.of(_plain(self.parameters[name])) for name in names}

    def _stays(self, move: Move) -> bool:
        """True for a move within this rank of a parameter that it holds whole: both ends are the same memory."""
        return move.source == move.target and self._is_whole(move.name)

    def _part(self, move: Move, tensor: Tensor) -> Tensor:
        """Returns the box of a move in this rank's part."""
        return inner_box(self._boxes[move.name], move.start, move.sizes).of(_plain(tensor))

    def _dtypes(self, names: Sequence[str]) -> list[torch.dtype]:
        return [getattr(torch, name) for name in names]


def problem_of(name: str, parameter: Tensor) -> None:
    """Raises Error if a gradient cannot be gathered."""
    grad = parameter.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise Error(f"the gradient of `{name}` is sparse, and a whole matrix is not", fix="sparse=False in its layer")
    if grad.dtype != parameter.dtype:
        raise Error(
            f"the gradient of `{name}` is {grad.dtype}, and the parameter {parameter.dtype}",
            fix="gradients of the parameters' dtype",
        )


def _plain(tensor: Tensor) -> Tensor:
    """Returns this rank's part as a plain tensor, without a copy."""
    return local_of(tensor.detach())


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _at(whole: Tensor, move: Move) -> Tensor:
    return whole.detach()[tuple(slice(start, start + size) for start, size in zip(move.start, move.sizes, strict=True))]


# ---- values that other code writes


@dataclass(frozen=True)
class Sent:
    """What the owner sent of a parameter.

    Attributes:
        bits: two numbers of its bits, [2].
        version, address: torch's count of the writes into this memory, and where it is.
    """

    bits: Tensor
    version: int
    address: int

    @staticmethod
    def of(part: Tensor) -> Sent:
        """Returns what is known of a part."""
        return Sent(bits_of(part), part._version, part.data_ptr())

    def is_other(self, part: Tensor) -> bool:
        """Returns whether torch knows that the part has been written since, or is another tensor."""
        return (self.version, self.address) != (part._version, part.data_ptr())


@dataclass(frozen=True, eq=False)
class LateComparison:
    """Which parameters have other bits than the owner sent, on the way from a GPU.

    Attributes:
        differs: for each of the names, [names], on the CPU.
        arrived: tells whether they have come.
    """

    names: Sequence[str]
    differs: Tensor
    arrived: torch.cuda.Event

    @staticmethod
    def begun(names: Sequence[str], differs: Tensor) -> LateComparison:
        """Has the result of a comparison copied to the CPU."""
        late = LateComparison(names, differs.to("cpu", non_blocking=True), torch.cuda.Event())
        late.arrived.record()
        return late


def _packed(flags: Sequence[Seen]) -> list[int]:
    chunks = [flags[i : i + PACKED] for i in range(0, len(flags), PACKED)]
    return [sum(int(flag) << (BITS * i) for i, flag in enumerate(chunk)) for chunk in chunks]


def _unpacked(words: Sequence[int], count: int) -> list[Seen]:
    return [Seen(words[i // PACKED] >> (BITS * (i % PACKED)) & (2**BITS - 1)) for i in range(count)]
