"""packed_rows: a kernel of attention of packed documents, for a rank's part of the tokens.

    documents of 3, 2 and 4 tokens, the rank has tokens 4 to 6:   [a a a b|b c c|c c]
    ends of its queries   [0, 3, 5, 9] -> [0, 0, 1, 3]
    ends of its keys      [0, 3, 5, 9] -> [0, 3, 5, 7]   of the tokens up to the last that is seen

A document has the queries of this rank, and the keys that they see. So a document may end inside a part, or
lie in several. The ends are computed on the device: nothing waits, and one graph serves all documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from autotp.errors import Error
from autotp.ops.attention.documents import known_documents, read_documents, stop_of_keys
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
            "over cp, queries and keys of packed attention have other documents",
            expected=str(query_ends.tolist()[:8]),
            got=str(key_ends.tolist()[:8]),
            fix='the same documents for both, or cp_attention="heads"',
        )


class PartOfRows(NamedTuple):
    """What a kernel gets for a rank's part of the queries; `rows` of its queries are this part."""

    query: Any
    key: Any
    value: Any
    query_ends: Any
    key_ends: Any
    rows: Any


def read_by_part(
    query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, after: int, start: Any, near: Any, places: bool
) -> PartOfRows:
    """Returns the operands for the queries from `start` on.

    Args:
        query: this rank's part of the queries, [batch seq/cp heads width] or [tokens/cp heads width].
        key, value: those of all queries.
        query_ends, key_ends: of packed rows, those of all queries; None for a batch.
        after: how many keys after its own position a query reads; -1 for all.
        near: the number of all keys, if `key` and `value` are only those that some of these queries see; else None.
        places: whether a query reads a later key by its distance.
    """
    dim = query.dim() - 3
    rows = query.shape[dim]
    stop = start + rows
    if (places or after == 0 or near is not None) and query_ends is not None:
        _expect_same_documents(query_ends, key_ends)
    if near is not None:
        size, documents = near, read_documents(query_ends, near)
    else:  # Before a rank takes its part, so that all see what is wrong. On a GPU the host would have to wait for it.
        size, documents = key.shape[dim], None
        known_documents(key_ends, size)
    # What comes after the last key that is seen is not read, and what is not read is not given.
    end = stop_of_keys(size, stop, size if after < 0 else after, documents)
    first = end - key.shape[dim] if near is not None else 0
    if near is None and after >= 0:
        key, value = key.narrow(dim, 0, end), value.narrow(dim, 0, end)
    if places and not isinstance(query, FakeTensor):  # Of which only the sizes of results are asked.
        # A kernel takes the last query of a document for that at its last key. So where keys come after this rank's
        # queries, as many queries of zeros do, and their results are left out.
        query = F.pad(query, (0, 0, 0, 0, 0, end - stop))
    if query_ends is not None:
        query_ends = (query_ends - start).clamp(0, query.shape[dim])
        key_ends = (key_ends - first).clamp(0, key.shape[dim])
    return PartOfRows(query, key, value, query_ends, key_ends, rows)


def first_rows(output: Tensor, totals: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    """Returns the results of the first queries. output: [... queries heads width], totals: [... heads queries]"""
    return output.narrow(-3, 0, rows), totals.narrow(-1, 0, rows)
