"""Runs torch.nn's transformer layers as plain operators during capture.

NOTE [What nn.Transformer looks at]
Without the argument `is_causal`, nn.Transformer compares a mask's numbers with a causal mask, to choose a faster
attention. That is a branch on values, which one graph cannot have; it changes no result, so it is left out. The fast
path in evaluation is one operator without a rule, so it is left out, too. With nested tensors, whose lengths come from
a mask's values, the fast path gives zeros at padded places. A graph, also one of torch.compile, gives there what the
layers compute, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autotp import torch_internals as internals


@contextmanager
def slow_path() -> Iterator[None]:
    """A region in which torch.nn's transformer layers do not inspect mask values and take no fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            internals.CAUSAL_MASK.replaced_by(_use_is_causal),
            internals.ENCODER_FORWARD.replaced_by(_warn_of_padding),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _use_is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _warn_of_padding(
    self: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    if src_key_padding_mask is not None and mask is None and not self.training and self.use_nested_tensor:
        warnings.warn(
            "nn.TransformerEncoder: in evaluation without gradients, torch's nested tensors give zeros at padded "
            "places; here is what the layers compute there. To have that on one device too: enable_nested_tensor=False",
            stacklevel=2,
        )
    return ENCODER_FORWARD(self, src, mask, src_key_padding_mask, is_causal)


# Taken at import, before anything stands in its place.
ENCODER_FORWARD = nn.TransformerEncoder.forward
