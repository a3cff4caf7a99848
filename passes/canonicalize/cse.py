"""cse: computes an operator once if the model computes it several times on the same values.

    Before: a = reshape(x, [n, h]); mm(a, q); b = reshape(x, [n, h]); mm(b, k)
    After:  a = reshape(x, [n, h]); mm(a, q); mm(a, k)

So several products read the same value, and share its one copy.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autotp.ops.custom_vjp import output
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.capture.python_state.freeze import Itself, freeze
from autotp.rules.call import outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has


def cse(graph: fx.Graph) -> fx.Graph:
    """Returns the same function without repeated operators. Random draws are never shared."""
    builder = Builder(fake_mode_of(graph))
    done: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target in (enter_autocast, exit_autocast):
            done.clear()  # In an autocast region an operator may compute something else.
        pure = node.op == "call_function" and not draws(node) and (outputs_of(node) or "val" in node.meta)
        pure = pure and not has(node.target, Trait.FILL)  # A shared constant would unify the axes of two layers.
        pure = pure and node.target is not output  # Each call of a Function has its own gradient.
        key = (node.target, argument_key(builder.map((node.args, node.kwargs)))) if pure else None
        if key is not None and key in done:
            builder.env[node] = done[key]
        else:
            builder.copy(node)
            if key is not None:
                done[key] = builder.env[node]
    return builder.graph


def argument_key(arguments: Any) -> Any:
    """Returns an operator's arguments as a key, in which 1, 1.0 and True differ."""
    return freeze(arguments, _as_an_operator_reads)


def _as_an_operator_reads(value: Any, freeze: Any) -> Any:
    """Returns the form of what is no plain value: lists as tuples, keyword arguments by name, nodes by identity."""
    if isinstance(value, list):
        return freeze(tuple(value))
    if isinstance(value, dict):
        return dict, freeze(tuple(sorted(value.items())))
    return NotImplemented if isinstance(value, (tuple, slice)) else Itself(value)
