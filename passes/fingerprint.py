"""fingerprint: operators as text without names of nodes, which is equal for operators that compute alike.

Before: h_0_up = linear(x, h_0_weight); h_0_act = relu(h_0_up)
After:  aten.linear.default (%0, %1); aten.relu.default (%2); %0: float32 [3, 4], %1: float32 [4, 4]; returns %3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


def operators_as_text(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> str:
    """Returns some operators as text.

    Work on other sizes counts as different: a compiler would compile it again, and an estimate counts it again.

    Args:
        inputs: what they read.
        nodes: the operators, in order.
        results: those of them that others read.
    """
    number = {node: f"%{i}" for i, node in enumerate([*inputs, *nodes])}
    lines = [f"{_name(node)} {_text(node.args, number)} {_text(node.kwargs, number)}" for node in nodes]
    return "\n".join([*lines, *(_kind(node.meta.get("val")) for node in inputs), *(number[node] for node in results)])


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)} {target}"


def _text(value: Any, number: Mapping[fx.Node, str]) -> str:
    """Returns arguments as text; constants with their types, because `1`, `1.0` and `True` are equal."""

    def spelled(a: Any) -> str:
        return number[a] if isinstance(a, fx.Node) else f"{type(a).__name__} {a!r}"

    return str(fx.node.map_aggregate(value, spelled))


def _kind(value: Any) -> str:
    """Returns size and dtype of an example value as text."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
