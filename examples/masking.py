"""The masks of BERT (Devlin et al. 2018, section 3.1).

15% of the tokens are to be predicted; of those 80% are masked, 10% replaced by another token, 10% left as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
IGNORED = -100  # The label of a token that is not to be predicted.


def masked(
    tokens: Tensor, generator: torch.Generator, *, mask: int, others: range, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens, some of them masked, and as labels what stood at the chosen places; all of the same shape, int64.

    Args:
        mask: the token that stands for what is not seen.
        others: the tokens that replace some.
        fixed: bool, where nothing is to be predicted.
    """
    chosen = torch.rand(tokens.shape, generator=generator) < CHOSEN
    fate = torch.rand(tokens.shape, generator=generator)
    drawn = torch.randint(others.start, others.stop, tokens.shape, generator=generator)
    if fixed is not None:
        chosen &= ~fixed
    seen = tokens.masked_fill(chosen & (fate < MASKED), mask)
    seen = torch.where(chosen & (fate >= 1 - REPLACED), drawn, seen)
    return seen, tokens.masked_fill(~chosen, IGNORED)
