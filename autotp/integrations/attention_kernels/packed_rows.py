"""packed_rows: a kernel of attention of packed documents, for a rank's part of the tokens.

    documents of 3, 2 and 4 tokens, the rank has tokens 4 to 6:   [a a a b|b c c|c c]
    ends of its queries   [0, 3, 5, 9] -> [0, 0, 1, 3]
    ends of its keys      [0, 3, 5, 9] -> [0, 3, 5, 7]   of the tokens up to its last query

A document has the queries of this rank, and the keys up to its last query here. So a document may end inside a part, or
lie in several. The ends are computed on the device: nothing waits, and one graph serves all documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autotp.errors import Error
from autotp.ops.attention.documents import known_documents
from autotp.ops.eager_mode import is_computed
from autotp.ops.placement_moves import nearby
from autotp.passes.check import erase
from autotp.passes.lower import localize
from autotp.passes.lower.local_sizes import Local
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import arguments_of, called_with
from autotp.rules.registry import add_rows
from autotp.rules.row import Row
from autotp.sharding.axis import Axis, Size

Window = Callable[[Mapping[str, Any]], tuple[int, int]]
"""Arguments by name -> how many keys before and after its own position a query reads; -1 for all."""


def may_be_same_documents(query: Any, key: Any, query_ends: Any, key_ends: Any) -> bool:
    """True for queries and keys of as many tokens and documents. `read_by_part` sees whether they are the same."""
    dim, ends = query.dim() - 3, (query_ends, key_ends)
    alike = query_ends is key_ends or (None not in ends and Size.of(query_ends.shape[0]) == Size.of(key_ends.shape[0]))
    return alike and Size.of(query.shape[dim]) == Size.of(key.shape[dim])


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


def add_form(op: OpOverload, row: Row, window: Window) -> None:
    """Adds the form of a kernel for a part of its tokens to the tables of the kernel's passes.

    Args:
        op: an operator whose first arguments are query, key, value, and the ends of both.
        row: its row.
        window: returns which keys a call reads.
    """
    names = [arg.name for arg in op._schema.arguments]

    def packed_rows(*values: Any) -> Any:
        arguments, (start, near) = dict(zip(names, values, strict=False)), values[len(names) :]
        return called_with(op, _of_part(arguments, names, start, near, window(arguments)))

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in (*names, "start", "near")]
    packed_rows.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    packed_rows.__name__ = packed_rows.__qualname__ = f"{op._schema.name.rpartition('::')[2].strip('_')}_rows"

    def form(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
        arguments = arguments_of(node)
        start = localize.start_of_part(local, node, axes.of(arguments[names[0]])[0], leaf)
        return packed_rows, (*local.builder.map(tuple(arguments.values())), start, arguments[names[1]].target is nearby)

    add_rows({packed_rows: row})
    localize.FORMS[op] = form
    erase.FORMS[packed_rows] = op, (*names, "start", "near"), ""


def _of_part(
    arguments: Mapping[str, Any], names: list[str], start: Any, near: bool, window: tuple[int, int]
) -> dict[str, Any]:
    """Returns the arguments of the same kernel for the queries from `start` on.

    Args:
        arguments: those of the whole call, but `query` is this rank's part of the tokens.
    """
    query, key, value, query_ends, key_ends = (arguments[name] for name in names[:5])
    read = read_by_part(query, key, value, query_ends, key_ends, window[1], start, near)
    return {**arguments, **dict(zip(names[1:5], read, strict=True))}


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
