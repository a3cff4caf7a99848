"""kernel_rule: how a call of a kernel of attention may be cut, and its call on a rank.

    batch          b s h d, b t h d, b t h e -> b s h e, b h s         (k g) in place of h: k groups of g heads
    with padding   and the masks b s, b t
    packed rows    s h d, t h d, t h e, documents, documents -> s h e, h s

A part of the queries reads all keys, or those up to its own position, or of a window around it. With dropout each rank
draws a mask of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autotp.errors import Error
from autotp.integrations.attention_kernels.kernel_operator import (
    DROPPED,
    DROPPED_PART,
    DROPPED_ZIGZAG,
    KERNEL,
    ZIGZAG,
    chunk_of,
)
from autotp.integrations.attention_kernels.packed_rows import may_be_same_documents
from autotp.ops.placement_moves import nearby
from autotp.passes.check import erase, sequence_order
from autotp.passes.lower import localize
from autotp.passes.lower.local_sizes import Local
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import Call, arguments_of
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_rows
from autotp.rules.row import Reach, Row, Trait
from autotp.sharding.axis import Axis, Size, find, touches
from autotp.source_location import line_of


def kernel_rule(call: Call) -> Rule:
    """Returns the rule of a call of a kernel: heads and rows by themselves, queries by their part."""
    query, key = call["query"], call["key"]
    ends, mark = call["query_ends"], "!" if call["dropout_p"] else ""
    packed, padded = query.dim() == 3, ends is not None and ends.dim() == 2
    shared = Size.of(query.shape[-2]) != Size.of(key.shape[-2])
    heads, groups = (f"(k{mark} g{mark})", f"k{mark}") if shared else (f"h{mark}", f"h{mark}")
    rows = [] if packed else [f"b{mark}"]
    s = "s^" if call.get("start") is not None else f"s{_mark_of_queries(call) or mark}"
    slopes = [heads] if call["slopes"] is None or call["slopes"].dim() == 1 else [rows[0] if rows else "n^", heads]
    terms = {
        "query": [*rows, s, heads, "d^"], "key": [*rows, "t^", groups, "d^"], "value": [*rows, "t^", groups, "e^"],
        "query_ends": [*rows, s] if padded else ["x^"], "key_ends": [*rows, "t^"] if padded else ["y^"],
        "slopes": slopes, "sinks": [heads],
    }  # fmt: skip
    ins = [term for name, term in terms.items() if call[name] is not None]
    sizes = {"k": key.shape[-2]} if shared else {}
    return Rule.of(spell(ins, [[*rows, s, heads, "e^"], [*rows, heads, s]]), **sizes)


def _mark_of_queries(call: Call) -> str:
    """Returns the mark of the factor of the queries; "^" where a part of them would need other keys."""
    chunk, ends = chunk_of(call["settings"]), call["query_ends"]
    reads_all_keys = (call["before"], call["after"]) == (-1, -1) and not chunk and call["slopes"] is None
    padded = ends is not None and ends.dim() == 2
    if reads_all_keys and (ends is None or padded):
        return ""
    same_tokens = may_be_same_documents(*(call[name] for name in ("query", "key", "query_ends", "key_ends")))
    if padded:  # The distance of two tokens is known only if both are behind the same padding.
        return "!" if same_tokens and call["after"] == 0 and not chunk else "^"
    return "!" if reads_all_keys or (same_tokens and (call["after"] == 0 or not chunk)) else "^"


def kernel_reach(call: Call) -> Reach | None:
    """Returns which keys a query reads: those of a window, of its chunk, or of its document.

    Kernels count chunks from the first key that they get, so this is always the first one of a chunk, or of a document.
    """
    ends, packed, chunk = call["query_ends"], call["query"].dim() == 3, chunk_of(call["settings"])
    before, after = call["before"], call["after"]
    same_tokens = may_be_same_documents(*(call[name] for name in ("query", "key", "query_ends", "key_ends")))
    if (ends is not None and not packed) or not same_tokens:
        return None
    if packed and call["longest_query"] is not None:
        return Reach(-1 if chunk else before, "longest_query", "query_ends", after=after)
    if chunk and not packed:
        return Reach(chunk - 1, chunk=chunk)
    return Reach(before, after=after) if (before >= 0 or after > 0) and not chunk else None


def kernel_zigzag(call: Call) -> Any:
    """Returns the operator for queries in the order of `zigzag`; None for windows, packed rows and padding."""
    causal = (call["before"], call["after"]) == (-1, 0) and call["query"].dim() == 4
    causal = causal and not chunk_of(call["settings"])
    return ZIGZAG if causal and call["query_ends"] is None else None


def _form(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """Returns the call on a rank's part of the queries; with dropout on its part of the heads or rows, too.

    Raises:
        Error: the dropout mask of one device is wanted, which only the kernel knows.
    """
    arguments = arguments_of(node)
    values, drops = local.builder.map(tuple(arguments.values()))[:-2], bool(arguments["dropout_p"])
    if drops and local.to.randomness == "exact":
        raise Error(
            "a kernel of attention drops weights by a mask that it makes itself, and that parts of it cannot repeat",
            at=line_of(node),
            fix='randomness="fast", a mask for each rank; or dropout_p=0, in transformers config.attention_dropout = 0',
        )
    query = axes.of(arguments["query"])
    sequence = query[len(query) - 3]
    if not touches(sequence, leaf):
        return DROPPED, (*values, local.to.rank)
    start = localize.start_of_part(local, node, sequence, leaf)
    near = local.size(find(sequence).size) if arguments["key"].target is nearby else None
    return (DROPPED_PART, (*values, start, near, local.to.rank)) if drops else (KERNEL, (*values, start, near))


def _zigzag_form(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """Returns the call on a rank's queries in the order of `zigzag`."""
    target, values = localize.zigzag_of_rank(local, node, axes, leaf)
    return (DROPPED_ZIGZAG, (*values, local.to.rank)) if arguments_of(node)["dropout_p"] else (target, values)


def add_kernel() -> None:
    """Adds the operator, and its forms on a rank, to the tables of the passes."""
    row = Row(kernel_rule, Trait.ATTENTION | Trait.DOCUMENTS, reach=kernel_reach)
    in_zigzag = Row(kernel_rule, Trait.ATTENTION)
    add_rows({KERNEL: replace(row, zigzag=kernel_zigzag), DROPPED: row, DROPPED_PART: row})
    add_rows({ZIGZAG: in_zigzag, DROPPED_ZIGZAG: in_zigzag})
    localize.FORMS.update({KERNEL: _form, ZIGZAG: _zigzag_form})
    localize.FORMS.update(dict.fromkeys((DROPPED, DROPPED_PART, DROPPED_ZIGZAG), localize.fast_again))
    localize.FAST_ONLY.update((KERNEL, ZIGZAG))
    names = tuple(argument.name for argument in KERNEL._schema.arguments)
    ordered = *names[:-2], "parts", "rank"
    erase.FORMS.update({KERNEL: (KERNEL, names, ""), ZIGZAG: (ZIGZAG, ordered, "")})
    erase.FORMS.update({DROPPED: (KERNEL, names[:-2], "fast"), DROPPED_PART: (KERNEL, names, "fast")})
    erase.FORMS[DROPPED_ZIGZAG] = ZIGZAG, ordered, "fast"
    sequence_order.IN_ORDER[ZIGZAG] = KERNEL, {"start": None, "near": None}
