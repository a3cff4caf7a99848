"""Chooses tokens from scores [batch vocab] of which each rank holds some columns.

The whole row is never sent. A greedy token is the best of the ranks' best, one (score, index) pair each. A token is
drawn as torch.multinomial draws it, the best of `probability / noise`, with a noise of Exp(1) that every rank draws for
the whole row: the same exchange, and from the same random state the same token as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotp.distributed.gather import gather
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import Sharded
from autotp.errors import Error
from autotp.ops.collectives import communicate

NOTHING = float("-inf")


class Scores:
    """What a decoding loop does with a row of scores: softmax, then multinomial; or argmax."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores: Any = args[0]
        if func is torch.nn.functional.softmax:
            return scores  # The draw is of scores: their largest is all that a softmax needs to be told.
        if func is torch.argmax:
            return scores.best()
        if func is torch.multinomial:
            return scores.drawn().unsqueeze(1)
        raise Error(f"{func.__name__} of scores that are cut by vocabulary", fix="output_scores=True: whole scores")


@dataclass(frozen=True)
class CutScores(Scores):
    """Each rank's columns.

    Attributes:
        values: [batch columns] of this rank, perhaps none.
        places: [columns] which columns of the whole they are, ascending.
        width: how many columns there are.
        mesh: the ranks.
    """

    values: Tensor
    places: Tensor
    width: int
    mesh: Mesh

    @staticmethod
    def of(logits: Sharded) -> CutScores:
        """logits: [batch vocab]"""
        ranges = logits.held.pieces[logits.mesh.rank]
        columns = [torch.arange(a, b, device=logits.device) for a, b in ranges]
        places = torch.cat(columns) if columns else torch.arange(0, device=logits.device)
        return CutScores(logits.part, places, logits.shape[-1], logits.mesh)

    def whole(self, logits: Sharded) -> Tensor:
        """The rows of all ranks put together: [batch vocab]. Sends all of it. `logits`: what these are scores of."""
        return gather(logits.like(self.values, 1))

    def added(self, row: Tensor) -> CutScores:
        """With `row` [batch vocab] added, which every rank has whole."""
        return replace(self, values=self.values + row[:, self.places])

    def scaled(self, which: Tensor, penalty: float) -> CutScores:
        """With the scores of the columns `which` [batch vocab] divided by `penalty`, multiplied where negative."""
        less = torch.where(self.values < 0, self.values * penalty, self.values / penalty)
        return replace(self, values=torch.where(which[:, self.places], less, self.values))

    def best(self) -> Tensor:
        """The column of the largest score of each row: [batch]"""
        return self._largest(self.values)

    def drawn(self) -> Tensor:
        """A column of each row, drawn with the probabilities that the scores are logarithms of: [batch]"""
        noise = torch.empty(len(self.values), self.width, dtype=self.values.dtype, device=self.values.device)
        mine = noise.exponential_(1)[:, self.places]
        return self._largest(self.values.double() - mine.double().log())

    def _largest(self, keys: Tensor) -> Tensor:
        best = self._top(keys, 1)
        order = best[..., 1].argsort(-1)  # The first of equals is the lowest, as on one device.
        best = best.gather(1, order.unsqueeze(-1).expand_as(best))
        return best[..., 1].gather(1, best[..., 0].argmax(-1, keepdim=True)).squeeze(1).long()

    def _top(self, keys: Tensor, count: int) -> Tensor:
        """Each rank's largest keys with their columns, in one exchange: [batch ranks*count 2], in float64.

        A rank that has fewer says -inf in a column behind the last.
        """
        own = min(count, keys.shape[1])
        found = torch.full((len(keys), count, 2), float(self.width), dtype=torch.float64, device=keys.device)
        found[..., 0] = NOTHING
        values, at = (keys.max(-1, keepdim=True) if count == 1 else keys.topk(own)) if own else (keys, keys.long())
        found[:, :own, 0], found[:, :own, 1] = values.double(), self.places[at].double()
        if self.mesh.size == 1 or self.mesh.group is None:
            return found
        every = communicate("all_gather_into_tensor", found, self.mesh.size, self.mesh.group)
        return every.view(self.mesh.size, *found.shape).transpose(0, 1).flatten(1, 2)

    def top(self, count: int) -> Few | None:
        """The scores that are no less than the `count`-th of their row, on all ranks.

        None where more are equal to the `count`-th than were sent; every rank says so.
        """
        count = min(count, self.width)
        sent = self._top(self.values, count + 1)
        least = sent[..., 0].topk(count).values[:, -1:]
        rest = sent[..., 0].unflatten(1, (-1, count + 1))[:, :, -1]  # What else a rank has is no larger.
        if ((rest >= least) & (rest > NOTHING)).any():
            return None
        order = sent[..., 1].argsort(-1)
        values, places = (sent[..., i].gather(1, order) for i in (0, 1))
        return Few(values.masked_fill(values < least, NOTHING).to(self.values.dtype), places.long(), self.width)


@dataclass(frozen=True)
class Few(Scores):
    """Rows of which all but a few columns are out of the question; the same on every rank.

    Attributes:
        values: [batch few], -inf for one that is out too.
        places: [batch few] which columns they are, ascending; `width` for none.
        width: how many columns there are.
    """

    values: Tensor
    places: Tensor
    width: int

    def each(self, function: Callable[[Tensor], Tensor]) -> Few:
        """With what `function` makes of a row in which a column's place does not matter."""
        return replace(self, values=function(self.values))

    def added(self, row: Tensor) -> Few:
        """With `row` [batch vocab] added."""
        return replace(self, values=self.values + torch.nn.functional.pad(row, (0, 1)).gather(1, self.places))

    def whole(self) -> Tensor:
        """[batch vocab], -inf where it is out of the question."""
        full = self.values.new_full((len(self.values), self.width + 1), NOTHING)
        return full.scatter(1, self.places, self.values)[:, :-1]

    def best(self) -> Tensor:
        """The column of the largest score of each row: [batch]"""
        return self.places.gather(1, self.values.argmax(-1, keepdim=True)).squeeze(1)

    def drawn(self) -> Tensor:
        """A column of each row, drawn with the probabilities that the scores are logarithms of: [batch]"""
        noise = self.values.new_empty(len(self.values), self.width).exponential_(1)
        odds = self.values.softmax(-1) / torch.nn.functional.pad(noise, (0, 1), value=1.0).gather(1, self.places)
        return self.places.gather(1, odds.argmax(-1, keepdim=True)).squeeze(1)
