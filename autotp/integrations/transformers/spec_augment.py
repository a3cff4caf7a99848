"""SpecAugment in models of sound: the mask that transformers draws with numpy becomes an operator of the graph.

NOTE [Numbers of numpy]
A number that forward draws from `numpy.random` during a capture would be a constant of the graph. transformers masks
spans of steps and of features in one function of Python, of which each file of a model has a copy. While a graph is
captured, that function is an operator with the same arguments. Where the graph runs, it calls the function itself. So
it draws from numpy what one device draws. All ranks of a model draw the same: before a call of such a graph they get
numpy's random state of the first rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autotp.passes.capture.replacements.everywhere import everywhere

FUNCTION = "_compute_mask_indices"
MODELS = "transformers.models."
NAME = "autotp::mask_spans"


@torch.library.custom_op(NAME, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def mask_spans(
    attention_mask: Tensor | None,
    rows: int,
    length: int,
    mask_prob: float,
    mask_length: int,
    min_masks: int,
    module: str,
) -> Tensor:
    """Returns what the function of a file of transformers returns, as a tensor on the CPU: bool [rows length]

    Args:
        attention_mask: 1 for steps that are no padding: [rows length], or None.
        module: the name of the file's module.
    """
    function = getattr(sys.modules[module], FUNCTION)
    return torch.from_numpy(function((rows, length), mask_prob, mask_length, attention_mask, min_masks))


@mask_spans.register_fake
def _(attention_mask: Any, rows: Any, length: Any, *rest: Any) -> Tensor:
    return torch.empty(rows, length, dtype=torch.bool, device="cpu")


@contextmanager
def masks_as_operators() -> Iterator[None]:
    """A region in which transformers' functions that draw such masks are operators. NOTE [Numbers of numpy]"""
    files = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(MODELS)]
    functions = [(vars(module)[FUNCTION], _traced(name)) for name, module in files if FUNCTION in vars(module)]
    with everywhere(functions), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To copy construct from a tensor")  # Models give the mask to `torch.tensor`.
        yield


def _traced(module: str) -> Callable[..., Tensor]:
    def mask(
        shape: tuple[int, int],
        mask_prob: float,
        mask_length: int,
        attention_mask: Tensor | None = None,
        min_masks: int = 0,
    ) -> Tensor:
        return mask_spans(attention_mask, *shape, mask_prob, mask_length, min_masks, module)

    return mask
