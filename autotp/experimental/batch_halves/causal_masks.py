"""causal_masks: writes causal attention with dropout with a mask, in which positions of queries and keys are values.

    Before: scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
    After:  m = le(arange(t), unsqueeze(arange(s), 1)); scaled_dot_product_attention(q, k, v, m, dropout_p=0.1)

Halves of a batch of one row read their rows of the mask, so they need no positions of their own. Over ranks attention
has parallel forms that need no mask (`causal_rows`, `fast_causal_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.call import arguments_of
from autotp.sharding.axis import Size

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


def causal_masks(graph: fx.Graph) -> fx.Graph:
    """Returns the same function without `is_causal` where there is dropout. Equal lengths have one mask."""
    builder, masks = Builder(fake_mode_of(graph)), dict[Any, fx.Node]()
    for node in graph.nodes:
        builder.origin = node
        arguments = arguments_of(node) if node.target is ATTENTION else {}
        if not (arguments.get("is_causal") and arguments["dropout_p"]):
            builder.copy(node)
            continue
        query, key = (builder.env[arguments[name]] for name in ("query", "key"))
        lengths = tuple(Size.of(x.meta["val"].shape[-2]) for x in (query, key))
        # All layers have attention of the same lengths, and share one mask.
        if lengths not in masks:
            masks[lengths] = _mask(builder, query, key)
        masked = builder.map(arguments) | {"attn_mask": masks[lengths], "is_causal": False}
        # The operator takes these two by keyword only.
        named = {name: masked.pop(name) for name in ("scale", "enable_gqa")}
        builder.env[node] = builder.call(ATTENTION, *masked.values(), **named)
    return builder.graph


def _mask(builder: Builder, query: fx.Node, key: fx.Node) -> fx.Node:
    """Writes the mask of causal attention: True where a query may read a key. Returns [s t]"""
    rows, columns = (_positions(builder, x) for x in (query, key))
    return builder.call(aten.le.Tensor, columns, builder.call(aten.unsqueeze.default, rows, 1))


def _positions(builder: Builder, x: fx.Node) -> fx.Node:
    value = x.meta["val"]
    end = builder.size(x, value.dim() - 2)
    return builder.call(aten.arange.default, end, device=value.device, pin_memory=False)
