"""packed_rows: a kernel of attention of packed documents, for a rank's part of the tokens.

    documents of 3, 2 and 4 tokens, the rank has tokens 4 to 6:   [a a a b|b c c|c c]
    ends of its queries   [0, 3, 5, 9] -> [0, 0, 1, 3]
    ends of its keys      [0, 3, 5, 9] -> [0, 3, 5, 7]   of the tokens up to its last query

A document has the queries of this rank, and the keys up to its last query here. So a document may end inside a part, or
lie in several. The ends are computed on the device: nothing waits, and one graph serves all documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.errors import Error
from autotp.ops.attention.documents import known_documents
from autotp.ops.eager_mode import is_computed
from autotp.sharding.axis import Size


def may_be_same_documents(query: Any, key: Any, query_ends: Any, key_ends: Any) -> bool:
    """True for queries and keys of as many tokens and documents. `read_by_part` sees whether they are the same."""
    dim, ends = query.dim() - 3, (query_ends, key_ends)
    same_number = query_ends is key_ends or (
        None not in ends and Size.of(query_ends.shape[0]) == Size.of(key_ends.shape[0])
    )
    return same_number and Size.of(query.shape[dim]) == Size.of(key.shape[dim])


def _expect_same_documents(query_ends: Tensor, key_ends: Tensor) -> None:
    """Raises Error for other ends of keys than of queries; on a GPU torch stops the program, and no host waits."""
    if query_ends is key_ends or not (is_computed(query_ends) and is_computed(key_ends)):
        return
    if not key_ends.is_cpu:
        torch._assert_async((query_ends == key_ends).all())
    elif not torch.equal(query_ends, key_ends):
        raise Error(
            "over cp, queries and keys of causal packed attention have other documents",
            expected=str(query_ends.tolist()[:8]),
            got=str(key_ends.tolist()[:8]),
            fix='the same documents for both, or cp_attention="heads"',
        )


def read_by_part(
    query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, after: int, start: Any, near: bool
) -> tuple[Any, Any, Any, Any]:
    """Returns keys, values and the ends of both for the queries from `start` on.

    Args:
        query: this rank's part of the queries, [batch seq/cp heads width] or [tokens/cp heads width].
        key, value: those of all queries.
        query_ends, key_ends: of packed rows, those of all queries; None for a batch.
        after: how many keys after its own position a query reads; -1 for all.
        near: whether `key` and `value` end at the last of these queries already, and lack some of the first keys.
    """
    dim = query.dim() - 3
    stop = start + query.shape[dim]
    if after == 0 and query_ends is not None:
        _expect_same_documents(query_ends, key_ends)
    if near:
        if query_ends is not None:
            query_ends = (query_ends - start).clamp(0, query.shape[dim])
            key_ends = (key_ends - (stop - key.shape[dim])).clamp(0, key.shape[dim])
        return key, value, query_ends, key_ends
    if query_ends is not None:
        # Before a rank takes its part, so that all see what is wrong. On a GPU the host would have to wait for it.
        known_documents(key_ends, key.shape[dim])
        query_ends = (query_ends - start).clamp(0, query.shape[dim])
        key_ends = key_ends.clamp(max=stop) if after == 0 else key_ends
    if after == 0:  # What comes after the last query is not read, and what is not read is not given.
        key, value = key.narrow(dim, 0, stop), value.narrow(dim, 0, stop)
    return key, value, query_ends, key_ends
