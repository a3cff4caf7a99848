"""Runs torch.nn's transformer layers as plain operators during capture.

NOTE [What nn.Transformer looks at]
Unless it is told, it looks whether a mask's numbers are a causal mask's, to hand attention `is_causal` instead: a
branch on values, which one graph cannot have, and which changes no number. Its fast path in evaluation is one operator
that nothing is known of. With nested tensors, which are as long as a mask's values say, that path gives zeros at padded
places; a graph, as torch.compile's, gives what the layers compute there, and whoever asks for it is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def slow_path() -> Iterator[None]:
    """A region in which these layers read the masks that they are given, and take no fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            patch("torch.nn.modules.transformer._detect_is_causal_mask", _as_told),
            patch.object(nn.TransformerEncoder, "forward", _told_of_padding),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _as_told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _told_of_padding(
    self: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    if src_key_padding_mask is not None and mask is None and not self.training and self.use_nested_tensor:
        warnings.warn(
            "nn.TransformerEncoder: in evaluation without gradients, torch's nested tensors give zeros at padded "
            "places; here is what the layers compute there. To have that on one device too: enable_nested_tensor=False",
            stacklevel=2,
        )
    return ENCODER_FORWARD(self, src, mask, src_key_padding_mask, is_causal)


ENCODER_FORWARD = nn.TransformerEncoder.forward
