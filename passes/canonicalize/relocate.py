"""relocate: puts all values on the device on which the model runs.

    Before: arange(n, device="cpu")        After: arange(n, device="cuda:1")
    Before: rand(n, device="cpu")          After: to(rand(n, device="cpu"), "cuda:1")

A rank has all its tensors on one device, so no step waits for a copy of what the model makes on the CPU. Only random
numbers that the model draws on the CPU are copied: they come from the CPU's random stream, as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.traits import draws

CPU = torch.device("cpu")


def relocate(graph: fx.Graph, device_type: str) -> fx.Graph:
    """Returns the same function with all values on this process's device of a type, such as "cuda"."""
    if device_type == "cpu":
        return graph
    builder = Builder(fake_mode_of(graph))
    with builder.mode:
        # The current device of this kind, with its index; a fake tensor takes no memory on it.
        device = torch.empty((), device=device_type).device
    for node in graph.nodes:
        builder.origin = node
        copy = builder.copy(node)
        if drawn_on_cpu(node):
            # A draw that nothing reads stays, because it moves the random stream, and needs no copy.
            if node.users:
                builder.env[node] = builder.call(torch.ops.aten.to.device, copy, device, copy.meta["val"].dtype)
            continue
        copy.args, copy.kwargs = on_device((copy.args, copy.kwargs), device)
        if "val" in copy.meta:
            copy.meta["val"] = pytree.tree_map(lambda x: _moved(x, device, builder), copy.meta["val"])
    return builder.graph


def on_device(arguments: Any, device: torch.device) -> Any:
    """Returns an operator's arguments with `device` in place of each device."""
    return fx.node.map_aggregate(arguments, lambda x: device if isinstance(x, torch.device) else x)


def drawn_on_cpu(node: fx.Node) -> bool:
    """True for an operator that draws random numbers and says that it does so on the CPU."""
    return node.kwargs.get("device") == CPU and draws(node)


def _moved(value: Any, device: torch.device, builder: Builder) -> Any:
    """Returns an example value on a device."""
    if not isinstance(value, Tensor) or value.device.type == device.type:
        return value
    with builder.mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
