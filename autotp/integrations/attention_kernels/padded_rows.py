"""padded_rows: rows with padding, whose tokens transformers packs for a kernel, are one operator of a graph, too.

Before: indices = mask.flatten().nonzero(); flash_attn_varlen_func(q[indices], ...)       their number depends on values
After:  attention_kernel(q, k, v, mask, mask, ...)       each row by itself; the operator packs the tokens where it runs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

UTILITIES = "transformers.modeling_flash_attention_utils"
PACKS, FUNCTIONS = "_upad_input", "lazy_import_flash_attention"
"""What stands aside in a capture: what packs tokens, and what returns the function that puts them back."""


@contextmanager
def padding_in_operators() -> Iterator[None]:
    """A region in which transformers gives a kernel of packed rows whole rows and their masks."""
    utilities = sys.modules.get(UTILITIES)
    with ExitStack() as stack:
        if utilities is not None and hasattr(utilities, PACKS) and hasattr(utilities, FUNCTIONS):
            stack.enter_context(patch.object(utilities, PACKS, _whole_rows))
            stack.enter_context(patch.object(utilities, FUNCTIONS, _without_unpacking(getattr(utilities, FUNCTIONS))))
        yield


def _whole_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, length: int, _: Any) -> tuple[Any, ...]:
    """Returns what transformers' function returns, with rows in place of packed tokens, and masks in place of ends."""
    mask = mask.bool()
    key, value = (x[:, : mask.shape[1]] for x in (key, value))  # A static cache is longer.
    of_queries = mask.new_ones(mask.shape[0], 1) if query.shape[1] == 1 else mask[:, -query.shape[1] :]
    return query, key, value, None, (of_queries, mask), (0, 0)


def _without_unpacking(real: Callable[..., Any]) -> Callable[..., Any]:
    def functions(*args: Any, **kwargs: Any) -> Any:
        (*kernels, _, unpad), settings = real(*args, **kwargs)
        return (*kernels, lambda output, *_: output, unpad), settings

    return functions


def attention_of_rows(
    attend: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor,
    of_queries: Tensor, of_keys: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention, and its log-sum-exp, of rows with padding: zeros where there is none.

    Args:
        attend: attention of packed rows: query, key, value, the ends of both, and their longest lengths.
        query, key, value: [batch seq heads width].
        of_queries, of_keys: where tokens are, [batch seq].
    """
    packed, places, ends = list[Tensor](), list[Tensor](), list[Tensor]()
    for x, mask in ((query, of_queries), (key, of_keys), (value, of_keys)):
        places.append(mask.flatten().nonzero().squeeze(-1))
        packed.append(x.flatten(0, 1)[places[-1]])
        ends.append(F.pad(mask.sum(-1).cumsum(0), (1, 0)).int())
    output, totals = attend(*packed, *ends[:2], query.shape[1], key.shape[1])
    rows, tokens = query.shape[:2]
    padded_output = output.new_zeros(rows * tokens, *output.shape[1:]).index_put((places[0],), output)
    of_rows = totals.new_zeros(rows * tokens, totals.shape[0]).index_put((places[0],), totals.transpose(0, 1))
    return padded_output.unflatten(0, (rows, tokens)), of_rows.unflatten(0, (rows, tokens)).transpose(1, 2)
