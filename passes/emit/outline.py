"""outline: makes the operators of each block one module, shared by all blocks that compute alike.

    Before: a = norm(x, w0); b = linear(a, v0); c = norm(b, w1); d = linear(c, v1)
    After:  b = block(x, w0, v0); d = block(b, w1, v1)

A block is the operators of one numbered module of the model, such as `h.0`. The graph then has one node for each block,
and a compiler compiles a block once. What backward recomputes (`recompute.py`) is a block, or a part of a block.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx, nn

from autotp.passes.builder import copied
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.fingerprint import operators_as_text
from autotp.rules.call import outputs_of
from autotp.source_location import block_of


def outlined(graph: fx.Graph, regions: Sequence[Sequence[fx.Node]], name: str) -> fx.GraphModule:
    """Returns a graph as a module, with each region as a call of a submodule; regions that compute alike share one.

    Args:
        regions: consecutive operators, in order.
        name: the name of the submodules.
    """
    root, caller, env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    # The call stands in the place of the last operator, where all inputs of the region are there.
    last = {region[-1]: region for region in regions}
    inside = {node for region in regions for node in region}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node not in inside:
            env[node] = copied(caller, node, env.__getitem__)
        if node not in last:
            continue
        inputs, results, text = _interface(last[node])
        if text not in names:
            names[text] = f"{name}_{len(names)}" if names else name
            root.add_module(names[text], fx.GraphModule(nn.Module(), _extracted(last[node], inputs, results)))
        call = caller.call_module(names[text], tuple(env[n] for n in inputs))
        call.meta = {"nn_module_stack": last[node][0].meta.get("nn_module_stack")}  # Names the block.
        for i, result in enumerate(results):
            env[result] = call if len(results) == 1 else caller.call_function(operator.getitem, (call, i))
            env[result].meta = dict(result.meta)
    return fx.GraphModule(root, caller)


def blocks(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the operators of each block: consecutive operators of one name.

    Sizes that do not depend on a block stay outside: else the first block that needs one would differ from others.
    """
    region: list[fx.Node] = []
    for node in graph.nodes:
        name = block_of(node) if node.op == "call_function" else ""
        if isinstance(node.meta.get("val"), int | torch.SymInt) and not any(n in region for n in node.all_input_nodes):
            continue
        if region and (not name or name != block_of(region[0])):
            if _is_closed(region):
                yield region
            region = []
        if name:
            region.append(node)
    if region and _is_closed(region):
        yield region


def _is_closed(region: Sequence[fx.Node]) -> bool:
    """True if a region leaves every autocast region that it enters, and has a tensor as output."""
    depth = 0
    for node in region:
        depth += (node.target is enter_autocast) - (node.target is exit_autocast)
    return depth == 0 and any(outputs_of(node) for node in region)


def _interface(region: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], str]:
    """Returns the inputs and the results of a region, and its fingerprint."""
    within: Collection[fx.Node] = set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in within))
    results = [node for node in region if any(user not in within for user in node.users)]
    return inputs, results, operators_as_text(inputs, region, results)


def _extracted(region: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    """Returns the graph of a region."""
    graph = fx.Graph()
    env = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = {key: value for key, value in node.meta.items() if key == "val"}
    for node in region:
        env[node] = copied(graph, node, env.__getitem__)
    outputs = tuple(env[node] for node in results)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    return graph
