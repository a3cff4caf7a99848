"""node_text: operators, sizes and types of a graph as text: `linear`, `s`, `f32[b, s, 768]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.ops.custom_vjp import Vjp
from autotp.passes.lower.local_sizes import cut_lengths, renamed

LETTERS = "bstuvwxyz"
"""The names of symbolic sizes, in the order in which they appear in the inputs: batch, sequence, ..."""


def operator_text(node: fx.Node) -> str:
    """Returns an operator's name without its library: `linear`, `reduce`."""
    target: Any = node.target
    if isinstance(target, Vjp):
        return "custom_vjp"
    if isinstance(target, str):
        return target
    name = str((getattr(target, "_schema", None) and target._schema.name) or getattr(target, "__name__", target))
    return name.rpartition("::")[2]


def type_text(dtype: torch.dtype, sizes: Sequence[str]) -> str:
    """Returns a type as `f32[b, s, 768]`."""
    return f"{dtype_text(dtype)}[{', '.join(sizes)}]"


def dtype_text(dtype: torch.dtype) -> str:
    """Returns a dtype as `f32`, `bf16`, `i64`."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f").replace("int", "i")


def sizes_of(graph: fx.Graph) -> dict[str, str]:
    """Symbolic size -> letter, in the order of the inputs; a part of a size -> its letter and mesh axis: `s@cp`."""
    letters: dict[str, str] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if node.op == "placeholder" and isinstance(value, Tensor) else ():
            # A set has no order, and each run must give the same letters.
            for symbol in sorted(map(str, _symbols(size))):
                letters.setdefault(symbol, LETTERS[len(letters)] if len(letters) < len(LETTERS) else symbol)
    return letters | {part: renamed(text, letters) for part, text in cut_lengths(graph).items()}


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def size_text(size: Any, letters: Mapping[str, str]) -> str:
    """Returns a size with letters for its symbols."""
    return renamed(str(size), letters)
