"""The parameters of one parallel model in an optimizer, and the whole matrices that this rank owns of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autotp.distributed.agreement import Among, Fact, compare, told
from autotp.distributed.fingerprint import bits_of_all
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.experimental.whole_matrices.owners import Box, HeldPart, Move, OwnerPlan, plan_owners
from autotp.ops.collectives import communicate
from autotp.runtime.holdings import Holdings
from autotp.sharding.boxes import local_of

Tensors = Mapping[str, Tensor]
LOADED = "loaded states"
"""What a rank tells the others, beside which gradients it has."""


class Matrices:
    """The parameters of one model in an optimizer.

    Attributes:
        parameters: name -> this rank's part.
        wholes: name -> the whole, of each parameter that this rank owns.
        plan: the owners; None before `assign`.
    """

    def __init__(self, parts: Holdings, parameters: Mapping[str, Tensor], groups: Mapping[str, int]) -> None:
        self.parts, self.parameters, self.mesh = parts, parameters, parts.everyone
        self.wholes: dict[str, nn.Parameter] = {}
        self.plan: OwnerPlan | None = None
        self._groups, self._together, self._changed = groups, list[tuple[Among, frozenset[str]]](), True
        self._boxes = {name: parts.boxes(name, first=False) for name in parameters}
        self._sent: dict[str, tuple[Sequence[int], Tensor]] = {}
        self._late: list[tuple[Sequence[str], Tensor, torch.cuda.Event]] = []

    def assign(self, before: Mapping[str, int]) -> None:
        """Chooses the owners, and makes the whole matrices. Call it on every rank. before: owners that stay"""
        every = told(self.mesh, lambda: [before, {name: self._part(name) for name in self._boxes if self._boxes[name]}])
        parts = [{name: HeldPart(*row) for name, row in part_by_name.items()} for _, part_by_name in every]
        self.plan = plan_owners(parts, self.mesh.rank, every[0][0])
        holders = self.plan.holders
        self._together = [
            (Among.of(self.mesh.rank, [ranks]), frozenset(name for name in holders if holders[name] == ranks))
            for ranks in sorted(set(holders.values()))
        ]
        owned = [name for name in self.parameters if self.plan.owners.get(name) == self.mesh.rank]
        self.wholes, self._sent = {name: self._whole(name) for name in owned}, {}

    def _part(self, name: str) -> HeldPart:
        dtype = str(self.parameters[name].dtype).removeprefix("torch.")
        pairs = [(_sides(box.whole, box.sizes), _sides(box.local, box.sizes)) for box in self._boxes[name]]
        return HeldPart(self._groups[name], self.parts.shapes[name], dtype, pairs)

    def _whole(self, name: str) -> nn.Parameter:
        part = _plain(self.parameters[name])
        return nn.Parameter(part if self._is_whole(name) else part.new_empty(self.parts.shapes[name]))

    def _is_whole(self, name: str) -> bool:
        """True for a parameter that this rank holds whole: the matrix has the same memory."""
        return _plain(self.parameters[name]).shape == torch.Size(self.parts.shapes[name])

    # ---- what ranks compare before a step

    def agree(self, stale: bool, loaded: Sequence[str], problem: Exception | None) -> bool:
        """Compares the ranks; returns False if the owners must be chosen first. Call it on every rank.

        Args:
            stale: whether this rank has other parameters than the owners were chosen for.
            loaded: the parameters whose state was loaded.
            problem: why this rank cannot step.

        Raises:
            Error: on every rank: a rank has a problem, some holders of a parameter have no gradient of it, or its
                owner has not loaded a state and another rank has.
        """
        stale = stale or self.plan is None
        learning = [] if stale else [*_gradients(self.parameters)]
        facts = [
            Fact(str(i), [name for name in learning if name in names], among=among)
            for i, (among, names) in enumerate(self._together)
        ]
        facts.append(Fact(LOADED, loaded, among=Among(())))
        changed = not stale and self._are_others(learning)
        counts = [int(stale), int(changed), len(loaded)]
        (stale_ranks, changed_ranks, _), rows = compare(
            self.mesh, facts, problem or self._unseen_write(), counts, differ=lambda sums: bool(sums[0] or sums[2])
        )
        self._changed = changed_ranks > 0
        if rows and not stale_ranks:
            self._expect_fitting(rows)
        return not stale_ranks

    def _expect_fitting(self, rows: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Raises Error if what the ranks told does not fit. rows: by rank"""
        assert self.plan is not None
        for i, (among, names) in enumerate(self._together):
            for name in sorted(names):
                problem = f"`{name}` does not have a gradient on all ranks that hold a part of it"
                gradient = Fact(name, None, problem, "one backward for all ranks", among, "values")
                gradient.expect(
                    {rank: "one" if name in row[str(i)] else "none" for rank, row in enumerate(rows)}, self.mesh
                )
        for name, owner in self.plan.owners.items():
            loaded = [rank for rank, row in enumerate(rows) if name in row[LOADED]]
            if loaded and owner not in loaded:
                raise Error(
                    f"the state of `{name}` was loaded on {self.mesh.named(loaded)}, and not on its owner, "
                    f"{self.mesh.named([owner])}",
                    fix="optimizer.load_state_dict(state) on all ranks: the whole state, or what each rank saved",
                    alternative="autotp.save_checkpoint and autotp.load_checkpoint, with autotp.distribute",
                )

    def _are_others(self, names: Iterable[str]) -> bool:
        """Returns whether the values of some parameters are not those that the owners sent.

        NOTE [Writes that torch does not count]
        torch counts writes into a parameter, except those through `.data`; only the bits tell of these. On the CPU the
        bits are compared before the step. On a GPU the host would wait for that, so it learns of such a write later,
        and then an Error says so: the owner has stepped earlier values.
        """
        parts = {name: _plain(self.parameters[name]) for name in names if self.plan and name in self.plan.gathered}
        if any(name not in self._sent or self._sent[name][0] != _writes(part) for name, part in parts.items()):
            return True
        if not parts:
            return False
        differs = (bits_of_all([*parts.values()]) != torch.stack([self._sent[name][1] for name in parts])).any(1)
        if not differs.is_cuda:
            return bool(differs.any())
        self._late.append(([*parts], differs.to("cpu", non_blocking=True), torch.cuda.Event()))
        self._late[-1][2].record()
        return False

    def _unseen_write(self) -> Exception | None:
        """Returns the Error of a write through `.data`, once a comparison that tells of one has come from the GPU."""
        while self._late and self._late[0][2].query():
            names, differs, _ = self._late.pop(0)
            for name in [name for name, differ in zip(names, differs.tolist(), strict=True) if differ][:1]:
                return Error(
                    f"`{name}` was written through `.data`, which torch does not count, before one of the last steps: "
                    "its owner has stepped the values from before",
                    fix="`with torch.no_grad(): parameter.clamp_(...)`, or another write into the parameter itself",
                )
        return None

    # ---- a step

    def gather(self) -> None:
        """Gives the matrices of this rank their gradients, and their values if some changed. Call on every rank."""
        assert self.plan is not None
        for name, matrix in self.wholes.items():
            parameter = self.parameters[name]
            if parameter.grad is not None and self._is_whole(name):
                matrix.data, matrix.grad = _plain(parameter), _plain(parameter.grad)
            elif parameter.grad is not None:
                matrix.grad = torch.empty_like(matrix)
        moves, dtypes = self._moves(self.plan.to_owner), self.plan.gathered.values()
        if self._changed:
            exchange(moves, dtypes, self.mesh, self.parameters, self.wholes)
        exchange(moves, dtypes, self.mesh, _gradients(self.parameters), _gradients(self.wholes))

    def scatter(self) -> None:
        """Gives all ranks their parts of the matrices that were stepped. Call it on every rank."""
        assert self.plan is not None
        moves, dtypes = self._moves(self.plan.from_owner), self.plan.scattered.values()
        exchange(moves, dtypes, self.mesh, self.wholes, self.parameters)
        for matrix in self.wholes.values():
            matrix.grad = None
        parts = {
            name: _plain(self.parameters[name]) for name in _gradients(self.parameters) if name in self.plan.gathered
        }
        bits = bits_of_all([*parts.values()]) if parts else ()
        self._sent |= {name: (_writes(part), sums) for (name, part), sums in zip(parts.items(), bits, strict=True)}

    def _moves(self, moves: Iterable[Move]) -> list[Move]:
        """Returns the moves of parameters with a gradient, without those whose two ends are the same memory."""
        moving = [move for move in moves if self.parameters[move.name].grad is not None]
        return [move for move in moving if move.source != move.target or not self._is_whole(move.name)]


def exchange(moves: Sequence[Move], dtypes: Iterable[str], mesh: Mesh, sources: Tensors, targets: Tensors) -> None:
    """Copies boxes of the tensors of some ranks to those of others: one all-to-all for all boxes of a dtype.

    Args:
        moves: those from and to this rank, in the same order on both ranks of a move.
        dtypes: those of which some box moves between ranks of `mesh`. All of them call this together.
        sources, targets: name -> the tensor of this rank.
    """
    sent, received = (defaultdict[tuple[int, torch.dtype], list[Tensor]](list) for _ in range(2))
    for name, source, target, source_box, target_box in moves:
        if source == target:
            _at(targets[name], target_box).copy_(_at(sources[name], source_box))
        elif source == mesh.rank:
            sent[target, sources[name].dtype].append(_at(sources[name], source_box))
        else:
            received[source, targets[name].dtype].append(_at(targets[name], target_box))
    for dtype in (getattr(torch, name) for name in sorted(set(dtypes))):
        by_rank = [[boxes[rank, dtype] for rank in range(mesh.size)] for boxes in (sent, received)]
        to_ranks, from_ranks = ([sum(box.nbytes for box in boxes) for boxes in some] for some in by_rank)
        outgoing, incoming = ([box for boxes in some for box in boxes] for some in by_rank)
        out = torch.empty(sum(to_ranks) // dtype.itemsize, dtype=dtype, device=mesh.device)
        for place, box in zip(out.split([box.numel() for box in outgoing]), outgoing, strict=True):
            place.view(box.shape).copy_(box)
        # As bytes: backends lack some dtypes.
        data = communicate("all_to_all_single", out.view(torch.uint8), from_ranks, to_ranks, mesh.group).view(dtype)
        for place, box in zip(data.split([box.numel() for box in incoming]), incoming, strict=True):
            box.copy_(place.view(box.shape))


def _at(tensor: Tensor, box: Box) -> Tensor:
    return _plain(tensor)[tuple(slice(*side) for side in box)]


def _sides(start: Sequence[int], sizes: Sequence[int]) -> Box:
    return [(low, low + size) for low, size in zip(start, sizes, strict=True)]


def _gradients(parameters: Tensors) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _plain(tensor: Tensor) -> Tensor:
    """Returns this rank's part as a plain tensor, without a copy."""
    return local_of(tensor.detach())


def _writes(part: Tensor) -> tuple[int, int]:
    """Returns torch's count of the writes into this memory, and where it is."""
    return part._version, part.data_ptr()
