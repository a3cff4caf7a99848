"""Masks of transformers during a capture: attention computes what it computes on one device.

NOTE [Masks that transformers leaves out]
On one device transformers looks at the padding. Without any it makes no mask, and attention with sdpa then asks its
module whether it is causal. While a graph is captured it always makes the mask. Both are the same for a causal mask and
a causal module, and for a bidirectional mask and a module that is not causal. Some models mix them. In transformers
5.17 UMT5 gives bidirectional masks to modules that count as causal, and PaliGemma causal masks to modules that are not.
So without padding they compute something else. There the look at the padding stays, as a guard
(`passes/capture/guards/values.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from autotp.passes.capture.repeats.record import outside_of

MASKS, ATTENTION = "transformers.masking_utils", "transformers.modeling_utils"
LEAVES_OUT = {"_ignore_causal_mask_sdpa": True, "_ignore_bidirectional_mask_sdpa": False}
"""Function of transformers that says whether a mask is left out -> whether that mask is causal."""


class _Made(NamedTuple):
    """A mask that one device may leave out.

    Attributes:
        mask: the mask.
        causal: whether it is causal.
        left_out: returns whether one device leaves it out.
    """

    mask: Tensor
    causal: bool
    left_out: Callable[[], bool]


@contextmanager
def as_on_one_device() -> Iterator[None]:
    """A region in which attention leaves a mask out where one device does. NOTE [Masks that transformers leaves out]"""
    masks, attention = sys.modules.get(MASKS), sys.modules.get(ATTENTION)
    known = masks is not None and all(hasattr(masks, name) for name in (*LEAVES_OUT, "is_tracing"))
    if not known or not hasattr(attention, "AttentionInterface"):
        yield
        return
    noted: list[tuple[bool, Callable[[], bool]]] = []
    made: list[_Made] = []
    with ExitStack() as stack:
        for name, causal in LEAVES_OUT.items():
            stack.enter_context(patch.object(masks, name, _noting(masks, getattr(masks, name), causal, noted)))
        makers = masks.AttentionMaskInterface._global_mapping  # type: ignore[union-attr]
        stack.enter_context(patch.dict(makers, {"sdpa": _making(makers["sdpa"], noted, made)}))
        readers = attention.AttentionInterface._global_mapping  # type: ignore[union-attr]
        stack.enter_context(patch.dict(readers, {"sdpa": _reading(readers["sdpa"], made)}))
        yield


def _noting(masks: Any, real: Callable[..., bool], causal: bool, noted: list[Any]) -> Callable[..., bool]:
    """Returns a function that notes the question whether a mask is left out, and says no."""

    def asked(*args: Any, **kwargs: Any) -> bool:
        def left_out() -> bool:
            with patch.object(masks, "is_tracing", lambda *_: False):
                return bool(real(*args, **kwargs))

        noted.append((causal, left_out))
        return False

    return asked


def _making(real: Callable[..., Any], noted: list[Any], made: list[_Made]) -> Callable[..., Any]:
    """Returns a function that makes a mask, and notes whether one device may leave it out."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        noted.clear()
        found = real(*args, **kwargs)
        if noted and isinstance(found, Tensor):
            made.append(_Made(found, *noted[-1]))
        return found

    return mask


def _reading(real: Callable[..., Any], made: list[_Made]) -> Callable[..., Any]:
    """Returns an attention that asks whether a mask is left out, where this makes a difference."""

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        mask = outside_of(attention_mask)
        known = next((one for one in made if one.mask is mask), None)
        if known is not None:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if bool(causal) != known.causal and query.shape[2] > 1 and known.left_out():
                attention_mask = None
        return real(module, query, key, value, attention_mask, *args, **kwargs)

    return attention
