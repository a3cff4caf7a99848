"""The masks of BERT (Devlin et al. 2018, section 3.1).

The model must predict 15% of the tokens. Of these, 80% are masked, 10% are replaced by another token, and 10% are not
changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
IGNORED = -100  # The label of a token that the model need not predict.


def masked(
    tokens: Tensor, generator: torch.Generator, *, mask: int, others: range, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, some of them masked, and as labels the original tokens there; all of one shape, int64.

    Args:
        mask: the mask token.
        others: the tokens that replace 10% of the predicted tokens.
        fixed: bool, true at places that are never predicted.
    """
    chosen = torch.rand(tokens.shape, generator=generator) < CHOSEN
    fate = torch.rand(tokens.shape, generator=generator)
    drawn = torch.randint(others.start, others.stop, tokens.shape, generator=generator)
    if fixed is not None:
        chosen &= ~fixed
    seen = tokens.masked_fill(chosen & (fate < MASKED), mask)
    seen = torch.where(chosen & (fate >= 1 - REPLACED), drawn, seen)
    return seen, tokens.masked_fill(~chosen, IGNORED)
