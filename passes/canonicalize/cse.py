"""cse: computes an operator once where the model computes it several times on the same values.

    Before: a = reshape(x, [n, h]); mm(a, q); b = reshape(x, [n, h]); mm(b, k)
    After:  a = reshape(x, [n, h]); mm(a, q); mm(a, k)

So a value that several products read is one value, and has one copy.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autotp.ops.custom_vjp import output
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.call import draws, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has


def cse(graph: fx.Graph) -> fx.Graph:
    """The same function, without operators that another one has done. Random draws are never shared."""
    builder = Builder(fake_mode_of(graph))
    done: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target in (enter_autocast, exit_autocast):
            done.clear()  # The same operator computes something else there.
        pure = node.op == "call_function" and not draws(node) and (outputs_of(node) or "val" in node.meta)
        pure = pure and not has(node.target, Trait.FILL)  # Shared, it would make one axis of what is two layers' own.
        pure = pure and node.target is not output  # Of two calls each has a gradient of its own.
        key = (node.target, _typed(builder.map(node.args)), _typed(builder.map(node.kwargs))) if pure else None
        if key is not None and key in done:
            builder.env[node] = done[key]
        else:
            builder.copy(node)
            if key is not None:
                done[key] = builder.env[node]
    return builder.graph


def _typed(value: Any) -> Any:
    """Arguments as a key: 1, 1.0 and True are three."""
    if isinstance(value, tuple | list):
        return tuple(_typed(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _typed(item)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _typed(value.start), _typed(value.stop), _typed(value.step))
    return type(value), value
