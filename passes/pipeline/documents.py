"""documents: which inputs say where packed documents end. Each part of the rows has the ends of its own documents.

Before: attention_kernel(q, k, v, ends, ends, ...)          ends: an input, of all documents of a batch
After:  {"ends": tokens}                                    how many tokens end there, as an expression of sizes

`autotp/ops/attention/documents.py` makes the ends in each part of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autotp.errors import Error
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import line_of

ENDS = {"query_ends": "query", "key_ends": "key"}
"""An argument that says where documents end -> the one whose rows they are."""
LONGEST = {"query_ends": "longest_query", "key_ends": "longest_key"}
"""An argument that says where documents end -> the one that says how long they are at most."""


def reads_documents(node: fx.Node) -> bool:
    """True for attention of packed documents."""
    ends = arguments_of(node)["query_ends"] if has(node.target, Trait.DOCUMENTS) else None
    return ends is not None and ends.meta["val"].dim() == 1


def ends_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields what says where documents end, and the tensor whose rows end there."""
    arguments = arguments_of(node)
    yield from ((arguments[ends], arguments[rows]) for ends, rows in ENDS.items())


def document_inputs(graph: fx.Graph) -> dict[str, Any]:
    """Returns placeholder name -> the number of tokens, of the inputs that say where documents end."""
    reads = [pair for node in graph.nodes if reads_documents(node) for pair in ends_of(node)]
    return {source.name: x.meta["val"].shape[0] for ends, x in reads if (source := _source(ends)).op == "placeholder"}


def longest_of_inputs(graph: fx.Graph) -> dict[str, Any]:
    """Returns placeholder name -> the length that no document in it exceeds, a number or an expression of sizes."""
    longest = dict[str, Any]()
    for arguments in (arguments_of(node) for node in graph.nodes if reads_documents(node)):
        for ends, name in LONGEST.items():
            length = arguments[name]
            longest[_source(arguments[ends]).name] = length.meta["val"] if isinstance(length, fx.Node) else length
    return longest


def longest_documents(graph: fx.Graph) -> set[int]:
    """Returns the numbers in a graph that no document is longer than; not those that are inputs."""
    nodes = [arguments_of(node) for node in graph.nodes if reads_documents(node)]
    lengths = {arguments[name] for arguments in nodes for name in LONGEST.values()}
    return {length for length in lengths if isinstance(length, int)}


def expect_ends_in_parts(graph: fx.Graph) -> None:
    """Raises Error if the ends are no input, or something else reads them, too: parts of a batch have other ends."""
    reads = {ends for node in graph.nodes if reads_documents(node) for ends, _ in ends_of(node)}
    for ends in reads:
        if (source := _source(ends)).op != "placeholder":
            raise _refused(source, "computes where documents end")
        for node in _readers(source):
            if not reads_documents(node) and node.target is not torch.ops.aten.sym_size.int:
                raise _refused(node, "reads where documents end")


def _refused(node: fx.Node, problem: str) -> Error:
    return Error(
        f"`{node.target}` {problem}, and each microbatch has other documents",
        at=line_of(node),
        fix="cu_seqlens as an argument that attention alone reads, and position ids as another one; or microbatches=1",
    )


def _source(node: fx.Node) -> fx.Node:
    """Returns what a value is a cast of."""
    while has(node.target, Trait.SAME):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields what reads a value or a cast of it."""
    for user in node.users:
        yield from _readers(user) if has(user.target, Trait.SAME) else (user,)
