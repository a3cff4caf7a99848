"""Chooses tokens from scores [batch vocab]; each rank holds some columns.

The whole row is never sent. For a greedy token each rank sends its largest score and the index, and the largest of
these is the token. A random token is the argmax of `probability / noise`, as in torch.multinomial; every rank draws the
noise of Exp(1) for the whole row. So it needs the same exchange, and the same random state gives the same token as on
one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.gather import gather
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.ops.collectives import communicate

EXCLUDED = float("-inf")


class Scores:
    """Scores that support the operators of a decoding loop: softmax and then multinomial; or argmax."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores: Any = args[0]
        if func is torch.nn.functional.softmax:
            return scores  # `drawn` works on scores: it needs no softmax.
        if func is torch.argmax:
            return scores.best()
        if func is torch.multinomial:
            return scores.drawn().unsqueeze(1)
        raise Error(f"{func.__name__} of scores that are cut by vocabulary", fix="output_scores=True: whole scores")


@dataclass(frozen=True)
class CutScores(Scores):
    """Scores of which each rank holds some columns.

    Attributes:
        values: [batch columns], this rank's columns, perhaps none.
        places: [columns], the indices of these columns in the whole row, ascending.
        width: the number of columns of the whole row.
        mesh: the ranks.
    """

    values: Tensor
    places: Tensor
    width: int
    mesh: Mesh

    @staticmethod
    def of(logits: Sharded) -> CutScores:
        """Returns the scores of cut logits. logits: [batch vocab]"""
        ranges = logits.held.pieces[logits.mesh.rank]
        columns = [torch.arange(a, b, device=logits.device) for a, b in ranges]
        places = torch.cat(columns) if columns else torch.arange(0, device=logits.device)
        return CutScores(logits.part, places, logits.shape[-1], logits.mesh)

    def whole(self, logits: Sharded) -> Tensor:
        """Gathers whole rows: [batch vocab]. logits: the logits that the scores were computed from"""
        return gather(logits.like(self.values, 1))

    def added(self, row: Tensor) -> CutScores:
        """Returns the scores plus `row` [batch vocab], which is whole on every rank."""
        return replace(self, values=self.values + row[:, self.places])

    def forced(self, row: Tensor) -> CutScores:
        """Returns `row` [batch vocab], which is whole on every rank, in place of the scores."""
        return replace(self, values=row[:, self.places])

    def scaled(self, which: Tensor, penalty: float) -> CutScores:
        """Divides the scores where `which` [batch vocab] is true by `penalty`; multiplies negative scores."""
        less = torch.where(self.values < 0, self.values * penalty, self.values / penalty)
        return replace(self, values=torch.where(which[:, self.places], less, self.values))

    def best(self) -> Tensor:
        """Returns the column of the largest score of each row: [batch]"""
        return self._largest(self.values)

    def drawn(self) -> Tensor:
        """Draws a column of each row; scores are logarithms of probabilities, up to a constant: [batch]"""
        noise = torch.empty(len(self.values), self.width, dtype=self.values.dtype, device=self.values.device)
        noise_of_columns = noise.exponential_(1)[:, self.places]
        # The argmax of probability / noise: its logarithm has the same order, and needs no softmax over all ranks.
        return self._largest(self.values.double() - noise_of_columns.double().log())

    def _largest(self, keys: Tensor) -> Tensor:
        best = self._top(keys, 1)
        order = best[..., 1].argsort(-1)  # Of equal scores the lowest column is chosen, as on one device.
        best = best.gather(1, order.unsqueeze(-1).expand_as(best))
        return best[..., 1].gather(1, best[..., 0].argmax(-1, keepdim=True)).squeeze(1).long()

    def _top(self, keys: Tensor, count: int) -> Tensor:
        """Exchanges each rank's largest keys with their columns: [batch ranks*count 2], in float64.

        A rank with fewer keys fills up with -inf in column `width`.
        """
        n = min(count, keys.shape[1])
        # float64 has each index of a column exactly.
        pairs = torch.full((len(keys), count, 2), float(self.width), dtype=torch.float64, device=keys.device)
        pairs[..., 0] = EXCLUDED
        # `max` returns the first of equal keys, which `topk` does not promise.
        values, index = (keys.max(-1, keepdim=True) if count == 1 else keys.topk(n)) if n else (keys, keys.long())
        pairs[:, :n, 0], pairs[:, :n, 1] = values.double(), self.places[index].double()
        if self.mesh.size == 1 or self.mesh.group is None:
            return pairs
        every = communicate("all_gather_into_tensor", pairs, self.mesh.size, self.mesh.group)
        return every.view(self.mesh.size, *pairs.shape).transpose(0, 1).flatten(1, 2)

    def top(self, count: int) -> FewScores | None:
        """Returns the scores that are at least the `count`-th largest of their row, the same on all ranks.

        Returns None, on all ranks, if more scores equal the `count`-th largest than were sent.
        """
        count = min(count, self.width)
        # One more than is asked for: it tells whether further scores equal the last one.
        sent = self._top(self.values, count + 1)
        bound = sent[..., 0].topk(count).values[:, -1:]
        rest = sent[..., 0].unflatten(1, (-1, count + 1))[:, :, -1]  # A rank's other scores are not larger.
        if ((rest >= bound) & (rest > EXCLUDED)).any():
            return None
        order = sent[..., 1].argsort(-1)
        values, places = (sent[..., i].gather(1, order) for i in (0, 1))
        return FewScores(values.masked_fill(values < bound, EXCLUDED).to(self.values.dtype), places.long(), self.width)


@dataclass(frozen=True)
class FewScores(Scores):
    """Scores of a few columns, where all other columns are -inf; the same on every rank.

    Attributes:
        values: [batch few]; -inf for a column that is also excluded.
        places: [batch few], the indices of the columns, ascending; `width` for no column.
        width: the number of columns of the whole row.
    """

    values: Tensor
    places: Tensor
    width: int

    def each(self, function: Callable[[Tensor], Tensor]) -> FewScores:
        """Applies `function`, which does not depend on the order of columns, to the values."""
        return replace(self, values=function(self.values))

    def added(self, row: Tensor) -> FewScores:
        """Returns the scores plus `row` [batch vocab]."""
        # Column `width` stands for none; it reads the padding.
        return replace(self, values=self.values + torch.nn.functional.pad(row, (0, 1)).gather(1, self.places))

    def forced(self, row: Tensor) -> Tensor:
        """Returns `row` [batch vocab], whose largest scores need not be among these columns."""
        return row

    def whole(self) -> Tensor:
        """Returns whole rows [batch vocab], with -inf in the excluded columns."""
        full = self.values.new_full((len(self.values), self.width + 1), EXCLUDED)
        return full.scatter(1, self.places, self.values)[:, :-1]

    def best(self) -> Tensor:
        """Returns the column of the largest score of each row: [batch]"""
        return self.places.gather(1, self.values.argmax(-1, keepdim=True)).squeeze(1)

    def drawn(self) -> Tensor:
        """Draws a column of each row; scores are logarithms of probabilities, up to a constant: [batch]"""
        noise = self.values.new_empty(len(self.values), self.width).exponential_(1)
        # Column `width` stands for none; it reads the padding.
        odds = self.values.softmax(-1) / torch.nn.functional.pad(noise, (0, 1), value=1.0).gather(1, self.places)
        return self.places.gather(1, odds.argmax(-1, keepdim=True)).squeeze(1)
