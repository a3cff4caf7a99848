"""late_sums: in backward the sums of a block's gradients run while the blocks before it have their backward.

    Before: t = together((w, v), "5", (None, None)); ...
    After:  begin_sums(); t = together((w, v), "5", (None, None), True); ...

A block's sum is waited for when the block before it has started its own (`autotp/ops/coalesced.py`). The numbers are
the same, and so is the order of collectives.
"""

from __future__ import annotations

from torch import fx

from autotp.ops.coalesced import begin_sums, together
from autotp.passes.builder import copied


def late_sums(graph: fx.Graph) -> fx.Graph:
    """Returns the same function, whose backward waits later. Its nodes are those of a bound graph."""
    if not graph.find_nodes(op="call_function", target=together):
        return graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        # At the beginning: it notes autograd's count before the first node of this graph.
        if node is first:
            result.call_function(begin_sums)
        env[node] = copied(result, node, env.__getitem__)
        if node.target is together:
            env[node].args = (*env[node].args, True)
    return result
