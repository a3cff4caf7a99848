"""packed_rows: a kernel of attention of packed documents, for a rank's part of the tokens.

    documents of 3, 2 and 4 tokens, the rank has tokens 4 to 6:   [a a a b|b c c|c c]
    ends of its queries   [0, 3, 5, 9] -> [0, 0, 1, 3]
    ends of its keys      [0, 3, 5, 9] -> [0, 3, 5, 7]   of the tokens up to its last query

A document has the queries of this rank, and the keys up to its last query here. So a document may end inside a part, or
lie in several. The ends are computed on the device: nothing waits, and one graph serves all documents.
"""

from __future__ import annotations

from typing import Any

from autotp.ops.attention.documents import documents_in
from autotp.ops.eager_mode import is_computed


def read_by_part(
    query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, after: int, start: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns keys, values and the ends of both for the queries from `start` on.

    Args:
        query: this rank's part of the queries, [batch seq/cp heads width] or [tokens/cp heads width].
        key, value: those of all queries.
        query_ends, key_ends: of packed rows, those of all queries; None for a batch.
        after: how many keys after its own position a query reads; -1 for all.
    """
    dim = query.dim() - 3
    stop = start + query.shape[dim]
    if query_ends is not None:
        # Before a rank takes its part, so that all see what is wrong. On a GPU the host would have to wait for it.
        if key_ends.is_cpu and is_computed(key_ends):
            documents_in(key_ends, key.shape[dim])
        query_ends = (query_ends - start).clamp(0, query.shape[dim])
        key_ends = key_ends.clamp(max=stop) if after == 0 else key_ends
    if after == 0:  # What comes after the last query is not read, and what is not read is not given.
        key, value = key.narrow(dim, 0, stop), value.narrow(dim, 0, stop)
    return key, value, query_ends, key_ends
