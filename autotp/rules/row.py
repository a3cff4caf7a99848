"""A row of the table: an operator's rule, and its traits, which passes ask for.

A trait is a claim. A fact that a row does not state is unknown, and no pass relies on it.

NOTE [What an operator is, and what a pass does with it]
A fact about an operator is a trait. The replacement that one pass writes for an operator is no trait, but a function of
that pass. Four passes have a table of such functions: `canonicalize` (REWRITES), `functionalize` (SCATTERS),
`decompose` (EXPANSIONS) and `localize` (FORMS). The in-place form and the functional form of an operator are not listed
anywhere: they follow from torch's names and schemas. `passes/check` writes the facts that it needs a second time, so
that a wrong trait cannot mislead both the passes and the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import torch

from autotp.rules.call import Call
from autotp.rules.common import RuleFunction


class Trait(Flag):
    """A fact that is true of each call of an operator."""

    NONE = 0

    # The result has the elements of the first operand:
    SAME = auto()  # At the same places; the dtype and the memory may differ.
    CAST = auto()  # The dtype may differ.
    MAY_ALIAS = auto()  # The result may share the first operand's memory, although the schema does not say so.
    RESHAPE = auto()  # In the same order, with other sizes.
    PERMUTE = auto()  # With the dimensions in another order.
    MOVABLE = auto()  # A view; passes may move sums and copies from its operand to its result.
    SWAP = auto()  # A permutation that the same call undoes.
    REPEAT = auto()  # Has each element of the operand once, or several times.
    SPLIT = auto()  # Split into parts along `dim`.
    SLICE = auto()  # A range, or every k-th element, along `dim`.
    ELEMENTWISE = auto()  # Each element depends on those at its place only. (A tag of torch's says so of most.)

    # New tensors.
    FILL = auto()  # Has given sizes; does not depend on elements of operands.
    ZEROS = auto()  # Each element is 0.
    UNINITIALIZED = auto()  # Has whatever is in memory.
    RANDOM_EACH = auto()  # Draws each element separately.
    RANDOM = auto()  # Draws random numbers: passes keep their order. (Tags of torch's operators say so, too.)

    # Products and sums.
    PRODUCT = auto()  # A product of two operands; the gradient of each is a new tensor.
    BATCHED = auto()  # Both operands of the product may have batches.
    ADDED_PRODUCT = auto()  # A product that is added to the first operand.
    TAKES_BIAS = auto()  # A product with a form that adds a bias along its last dimension.
    SUM = auto()  # The first operand plus or minus the second.
    SCALE = auto()  # The first operand times the second, or divided by it.
    SOFTMAX = auto()
    NORM = auto()  # Normalises, or computes a norm.
    ATTENTION = auto()  # Scaled dot-product attention.
    DOCUMENTS = auto()  # Where `query_ends` and `key_ends` are vectors, rows are packed documents with these ends.
    SORT = auto()  # Sorts along `dim`, if `descending` in descending order.

    # Lookups, updates, losses.
    LOOKUP = auto()  # Picks rows of a table by index: `weight[rows ...], indices`.
    ROWS = auto()  # Picks parts of the first operand by index.
    INDICES = auto()  # Reads or writes the positions in a list of `indices`.
    ADDS_AT = auto()  # Adds values (`src`, `source`) to the first operand, at the positions in `index`.
    UPDATE = auto()  # Replaces a part of the first operand; its in-place form may replace it.
    CLASSES = auto()  # Reduces over classes, for each row.
    HEAD = auto()  # The product of a head with what reads its logits; the gradient of its weight is a new tensor.
    CLASS_LOSS = auto()  # A loss of scores for classes and of `target`, with `weight`, `ignore_index`, `reduction`.

    # In graphs.
    JOIN = auto()  # Puts its operands, or those of all ranks, together in order: they are parts of the result.
    NO_GRADIENT = auto()  # Stops gradients.
    UNSAVED = auto()  # The result is a new tensor, which backward does not read.
    ASSERTION = auto()  # Asserts a fact about the example, and computes nothing.


@dataclass(frozen=True)
class Reach:
    """Which keys before and after its own position a query of an attention may read.

    Attributes:
        window: at most so many before; -1 for all.
        longest: the name of the argument that no document is longer than; "" if rows are one document.
        ends: the name of the argument with the ends of documents; "" if rows are one document.
        chunk: the length of the chunks of a row, of which a query reads its own; 0 for none.
        after: at most so many after; -1 for all.
        sequence: the dimension of the queries that has their positions, where rows are one document.
        numbers: where a call gets numbers of its tokens' documents, from which `ends` are computed: the place among its
            operands, and the dimension of the tokens.
    """

    window: int
    longest: str = ""
    ends: str = ""
    chunk: int = 0
    after: int = 0
    sequence: int = 1
    numbers: tuple[int, int] | None = None

    def around(self, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the numbers of keys before and after, from the values of a call's arguments.

        Without `longest`, `query` has as many positions as there are keys.
        """
        sides = self.window, self.after
        if not self.longest:
            return tuple(arguments["query"].shape[self.sequence] - 1 if side < 0 else side for side in sides)  # type: ignore[return-value]
        last = arguments[self.longest] - 1
        return tuple(last if side < 0 else side and torch.sym_min(side, last) for side in sides)  # type: ignore[return-value]


@dataclass(frozen=True)
class Row:
    """The known facts about an operator.

    Attributes:
        rule: how it may be cut; None if autotp has no rule, or if another operator replaces it before planning.
        traits: its traits.
        sizes: name of the argument with the result's sizes, which become local sizes if the operator is cut.
        places: for an operator on each channel by itself, the number of dimensions behind the channels.
        reach: returns which keys around its own position a query of this attention reads; None if they have no bound.
        masked: returns whether the values of a tensor say which keys a query of this attention reads.
        zigzag: returns the operator that computes this attention for queries in the order of `zigzag`; None if there is
            none, or if the attention is not causal. It has the same arguments but those that being causal sets, and the
            number of `parts`, and the `rank` whose queries they are (None for all).
    """

    rule: RuleFunction | None = None
    traits: Trait = Trait.NONE
    sizes: str = ""
    places: int = 0
    reach: Callable[[Call], Reach | None] | None = None
    masked: Callable[[Call], bool] | None = None
    zigzag: Callable[[Call], Any] | None = None
