"""Masks of transformers during a capture: attention computes what it computes on one device.

NOTE [Masks that transformers leaves out]
On one device transformers looks at the padding, and whether the positions are those of several packed sequences. If
there is neither, it makes no mask, and attention with sdpa then asks its module whether it is causal. A capture looks
at the padding, too: NOTE [Looks at masks] in `passes/capture/guards/looks.py`.

At positions it does not look, and where it may not look (in a pipeline) it makes all masks. That is the same for a
causal mask and a causal module, and for a bidirectional mask and a module that is not causal. Some models mix them. In
transformers 5.17 UMT5 gives bidirectional masks to modules that count as causal, and PaliGemma causal masks to modules
that are not. So without padding they compute something else. There the look stays, as a guard
(`passes/capture/guards/values.py`).

Other models compute with the mask themselves. Doge adds a mask of its own to it; without the causal mask its attention
is not causal at all. What such a model computes without it is not known here, so it is captured `exactly`: each look
stays. A model that fails in a capture is captured so once more, because the mask may be the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.model_library import BeginAgain, NeedsExactCapture
from autotp.passes.capture.guards.looks import looking
from autotp.passes.capture.guards.values import reads_values
from autotp.passes.capture.repeats.record import again, begin, end, outside_of

MASKS, ATTENTION = "transformers.masking_utils", "transformers.modeling_utils"
LEAVES_OUT = {"_ignore_causal_mask_sdpa": True, "_ignore_bidirectional_mask_sdpa": False}
"""Function of transformers that says whether a mask is left out -> whether that mask is causal."""
KNOWN_WITHOUT = {"__get__", "dim", "size", "is_floating_point", "numel"}
"""Functions that read no numbers: a property such as `shape` is `__get__`."""
RECORDING = (begin, end, again)
"""A block's arguments and results pass through these."""


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


class _Looks:
    """The looks at the padding and at positions that a capture leaves out.

    Attributes:
        since: those since the last mask was made: `causal` and `left_out` of the next mask, as in `_Made`.
        ever: whether there was one.
    """

    def __init__(self) -> None:
        self.since: list[tuple[bool, Callable[[], bool]]] = []
        self.ever = False

    def note(self, causal: bool, left_out: Callable[[], bool]) -> None:
        """Notes a look that is left out."""
        self.since.append((causal, left_out))
        self.ever = True


class _OfOthers(TorchFunctionMode):
    """A mode that raises NeedsExactCapture where other functions than attention read a mask that may be left out.

    Attributes:
        made: the masks.
        attends: whether attention runs.
    """

    def __init__(self, made: list[_Made]) -> None:
        super().__init__()
        self.made, self.attends = made, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = not (self.attends or func in RECORDING or getattr(func, "__name__", "") in KNOWN_WITHOUT)
        if reads and self._are_among(args, kwargs):
            raise NeedsExactCapture
        return func(*args, **kwargs)

    def _are_among(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """True if one of the arguments is such a mask."""
        if not self.made:
            return False
        return any(isinstance(x, Tensor) and _among(self.made, x) for x in pytree.tree_leaves((args, kwargs)))


def _among(made: list[_Made], x: Any) -> _Made | None:
    """Returns what is known of a mask; None for another tensor."""
    mask = outside_of(x)
    return next((record for record in made if record.mask is mask), None)


@contextmanager
def as_on_one_device(exactly: bool, looks: bool) -> Iterator[None]:
    """A region in which attention leaves a mask out where one device does. NOTE [Masks that transformers leaves out]

    Args:
        exactly: whether transformers looks at the padding as on one device. Without it, it does so where this makes a
            difference to attention; raises NeedsExactCapture if the model reads such a mask in another way.
        looks: whether it looks at the padding all the same: NOTE [Looks at masks] in `passes/capture/guards/looks.py`.
    """
    masks, attention = sys.modules.get(MASKS), sys.modules.get(ATTENTION)
    is_known = masks is not None and all(hasattr(masks, name) for name in (*LEAVES_OUT, "is_tracing"))
    if not is_known or not hasattr(attention, "AttentionInterface"):
        yield
        return
    left_out, made = _Looks(), list[_Made]()
    with ExitStack() as stack:
        if exactly:
            stack.enter_context(_looking(masks))
            yield
            return
        stack.enter_context(patch.object(masks, "is_tracing", _unanswered(masks.is_tracing, left_out)))  # type: ignore[union-attr]
        for name, causal in LEAVES_OUT.items():
            real = getattr(masks, name)
            replacement = _looked(masks, real) if looks else _noting(masks, real, causal, left_out)
            stack.enter_context(patch.object(masks, name, replacement))
        mode = stack.enter_context(_OfOthers(made))
        # In the tables: from them transformers takes the functions of an implementation by its name.
        makers = masks.AttentionMaskInterface._global_mapping  # type: ignore[union-attr]
        flash = getattr(masks, "flash_attention_mask", makers)
        of_flash = {name: _padding(masks, maker, looks) for name, maker in makers.items() if maker is flash}
        stack.enter_context(patch.dict(makers, {"sdpa": _making(makers["sdpa"], left_out, made), **of_flash}))
        readers = attention.AttentionInterface._global_mapping  # type: ignore[union-attr]
        stack.enter_context(patch.dict(readers, {"sdpa": _reading(readers["sdpa"], mode)}))
        try:
            yield
        except Exception as error:  # For example a model's own test of a mask's shape.
            if left_out.ever and not isinstance(error, Error | BeginAgain) and not reads_values(error):
                raise NeedsExactCapture from error
            raise


def _looked(masks: Any, real: Callable[..., bool]) -> Callable[..., bool]:
    """Returns a function that answers the question whether a mask is left out as on one device, by a look."""

    def asked(*args: Any, **kwargs: Any) -> bool:
        with _looking(masks), looking():
            return bool(real(*args, **kwargs))

    return asked


def _padding(masks: Any, real: Callable[..., Any], looks: bool) -> Callable[..., Any]:
    """Returns a function that makes the mask of flash-attn: the padding, or None where a look says that there is none.

    It does not look where it may not: the padding is right for each batch.
    """

    def mask(*args: Any, attention_mask: Any = None, kv_length: int = 0, **kwargs: Any) -> Any:
        if looks:
            with _looking(masks), looking():
                return real(*args, attention_mask=attention_mask, kv_length=kv_length, **kwargs)
        return None if attention_mask is None else attention_mask[:, -kv_length:]

    return mask


def _noting(masks: Any, real: Callable[..., bool], causal: bool, looks: _Looks) -> Callable[..., bool]:
    """Returns a function that notes the question whether a mask is left out, and says no."""

    def asked(*args: Any, **kwargs: Any) -> bool:
        def left_out() -> bool:
            with _looking(masks):
                return bool(real(*args, **kwargs))

        looks.note(causal, left_out)
        return False

    return asked


def _looking(masks: Any) -> Any:
    """Returns a region in which transformers looks at the padding and at positions, as on one device."""
    return patch.object(masks, "is_tracing", lambda *_: False)


def _unanswered(real: Callable[..., bool], looks: _Looks) -> Callable[..., bool]:
    """Returns transformers' question whether it is traced, which notes that a look is left out.

    Transformers asks it before a look at positions, which are those of a causal mask. The answer of one device is not
    known here.
    """

    def left_out() -> bool:
        raise NeedsExactCapture

    def asked(*args: Any) -> bool:
        looks.note(True, left_out)
        return real(*args)

    return asked


def _making(real: Callable[..., Any], looks: _Looks, made: list[_Made]) -> Callable[..., Any]:
    """Returns a function that makes a mask, and notes whether one device may leave it out."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if looks.since and isinstance(result, Tensor):
            made.append(_Made(result, *looks.since[-1]))
        looks.since.clear()
        return result

    return mask


def _reading(real: Callable[..., Any], mode: _OfOthers) -> Callable[..., Any]:
    """Returns an attention that asks whether a mask is left out, where this makes a difference."""

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        record = _among(mode.made, attention_mask)
        if record is not None:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            # With one query transformers' attention is never causal.
            if bool(causal) != record.causal and query.shape[2] > 1 and record.left_out():
                attention_mask = None
        mode.attends = True
        try:
            return real(module, query, key, value, attention_mask, *args, **kwargs)
        finally:
            mode.attends = False

    return attention
