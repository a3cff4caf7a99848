"""outline: makes the operators of each block one module, shared by all blocks that compute alike.

    Before: a = norm(x, w0); b = linear(a, v0); c = norm(b, w1); d = linear(c, v1)
    After:  b = block(x, w0, v0); d = block(b, w1, v1)

A block is what one numbered module of the model did, `h.0`. The graph is as long as the model is deep, and no longer; a
compiler meets a block once; what is computed again in backward (`recompute.py`) is a block, or a part of one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.call import outputs_of
from autotp.source_location import block_of


def outlined(graph: fx.Graph, regions: Sequence[Sequence[fx.Node]], name: str) -> fx.GraphModule:
    """A graph as a module, each region of it as a call of a submodule: one for all that compute alike.

    Args:
        regions: operators that stand behind one another, in order.
        name: what the submodules are called.
    """
    root, new, env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    last = {region[-1]: region for region in regions}
    inside = {node for region in regions for node in region}
    known: dict[str, str] = {}
    for node in graph.nodes:
        if node not in inside:
            env[node] = new.node_copy(node, lambda old: env[old])
        if node not in last:
            continue
        inputs, results, text = _interface(last[node])
        if text not in known:
            known[text] = f"{name}_{len(known)}" if known else name
            root.add_module(known[text], fx.GraphModule(nn.Module(), _extracted(last[node], inputs, results)))
        call = new.call_module(known[text], tuple(env[n] for n in inputs))
        call.meta = {"nn_module_stack": last[node][0].meta.get("nn_module_stack")}  # Whose block it is.
        for i, result in enumerate(results):
            env[result] = call if len(results) == 1 else new.call_function(operator.getitem, (call, i))
            env[result].meta = dict(result.meta)
    return fx.GraphModule(root, new)


def blocks(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The operators of each block: those of one name that stand behind one another.

    Sizes that do not come from inside stay outside: the first block that needs one would have more to do than others.
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
    """True if what a region enters it leaves, and it gives something: not a run of sizes."""
    depth = 0
    for node in region:
        depth += (node.target is enter_autocast) - (node.target is exit_autocast)
    return depth == 0 and any(outputs_of(node) for node in region)


def _interface(region: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], str]:
    """What a region reads from outside, what outside reads of it, and its operators as text, equal for equal work.

    Work on other sizes is other work: a compiler would compile it anew.
    """
    within: Collection[fx.Node] = set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in within))
    results = [node for node in region if any(user not in within for user in node.users)]
    number = {node: f"%{i}" for i, node in enumerate([*inputs, *region])}
    lines = [f"{_name(node)} {_text(node.args, number)} {_text(node.kwargs, number)}" for node in region]
    kinds = [_kind(node.meta.get("val")) for node in inputs]
    return inputs, results, "\n".join([*lines, *kinds, *(number[node] for node in results)])


def _kind(value: Any) -> str:
    """The size and dtype of an example value."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)} {target}"


def _text(value: Any, number: dict[fx.Node, str]) -> str:
    def spelled(a: Any) -> str:
        return number[a] if isinstance(a, fx.Node) else f"{type(a).__name__} {a!r}"

    return str(fx.node.map_aggregate(value, spelled))


def _extracted(region: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    """A graph of a region alone."""
    graph = fx.Graph()
    env = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = {key: value for key, value in node.meta.items() if key == "val"}
    for node in region:
        env[node] = graph.node_copy(node, lambda old: env[old])
    found = tuple(env[node] for node in results)
    graph.output(found[0] if len(found) == 1 else found)
    return graph
