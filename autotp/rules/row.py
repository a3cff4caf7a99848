"""What one row of the table says of an operator: its rule, and its traits, which passes ask for.

A trait is a claim. What a row does not say of its operator is not known, and no pass rests on it.

NOTE [What an operator is, and what a pass does with it]
What is true of an operator, whoever asks, is a trait. What one pass writes in an operator's place is no trait: it is a
function of that pass. Four passes have a table of such functions: `canonicalize` (REWRITES), `functionalize`
(SCATTERS), `decompose` (EXPANSIONS) and `localize` (FORMS). Nobody lists an operator's form in place, or the form that
returns a new tensor: torch's names and schemas tell them. `passes/check` writes what it needs a second time, so that
the check does not believe a wrong trait that the passes believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

from autotp.rules.common import RuleFunction


class Trait(Flag):
    """What is true of each call of an operator."""

    NONE = 0

    # Elements: where the result has those of the first operand.
    SAME = auto()  # At their places; perhaps in another dtype, in other memory.
    CAST = auto()  # The dtype may be another.
    MAY_ALIAS = auto()  # Perhaps in the first operand's own memory, whatever the schema says.
    RESHAPE = auto()  # In their order, under other sizes.
    PERMUTE = auto()  # With the dimensions in another order.
    MOVABLE = auto()  # Among these views: sums and copies may be moved past it.
    SWAP = auto()  # Among these: the same call a second time undoes it.
    SPLIT = auto()  # In several parts along `dim`.
    SLICE = auto()  # Some neighbours, or every k-th, along `dim`.

    # New tensors.
    FILL = auto()  # Of given sizes, and of no operand's elements.
    UNINITIALIZED = auto()  # Of whatever is in memory.
    RANDOM_EACH = auto()  # Each element is drawn by itself.
    RANDOM = auto()  # It draws random numbers. (Of torch's own operators their tags say so.)

    # Products and sums.
    PRODUCT = auto()  # Of two operands and nothing else; the gradient of each is a new tensor.
    BATCHED = auto()  # Both operands of the product may have batches.
    ADDED_PRODUCT = auto()  # A product, added to the first operand.
    TAKES_BIAS = auto()  # A vector along the product's last dimension can be added within.
    SUM = auto()  # The first operand plus or minus the second.
    SCALE = auto()  # The first operand times the second, or divided by it.
    SOFTMAX = auto()
    ATTENTION = auto()  # Scaled dot-product attention.
    SORT = auto()  # Along `dim`; `descending` turns the order.

    # Lookups, updates, losses.
    LOOKUP = auto()  # Rows of a table, by number: `weight[rows ...], indices`.
    ROWS = auto()  # Parts of the first operand, by number.
    INDICES = auto()  # Reads or writes the places that a list of `indices` names.
    UPDATE = auto()  # Writes a part anew. The operator that does so in place may stand for it.
    CLASSES = auto()  # Reduces over classes, for each row.
    CLASS_LOSS = auto()  # A loss of scores for classes and of `target`, with `weight`, `ignore_index`, `reduction`.

    # In graphs.
    NO_GRADIENT = auto()  # No gradient passes.
    UNSAVED = auto()  # The result is a new tensor, which backward does not read.
    ASSERTION = auto()  # It says what is true of the example, and computes nothing.


@dataclass(frozen=True)
class Row:
    """What is known of an operator.

    Attributes:
        rule: how it may be cut; None where autotp knows no rule, and for what another form stands for by then.
        traits: what is true of it.
        sizes: the argument that holds the result's sizes, which become local ones where the operator is cut.
        places: of what works on each channel by itself, how many dimensions are behind the channels.
    """

    rule: RuleFunction | None = None
    traits: Trait = Trait.NONE
    sizes: str = ""
    places: int = 0
