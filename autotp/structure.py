"""What goes into a model and what comes out of it, as a flat list of leaves and a structure (torch's pytree)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.errors import Error


@dataclass(frozen=True)
class Signature:
    """How a model is called, so that one call written in two ways is one call.

    Attributes:
        positional: names of the arguments that may come by position; None where some may come in no other way.
        defaults: every named argument in the order of the definition, with its default.
    """

    positional: tuple[str, ...] | None
    defaults: dict[str, Any]

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, its arguments by name and in order, without those that are their default."""
        if self.positional is None or len(args) > len(self.positional):
            return tuple(args), dict(kwargs)
        given = dict(zip(self.positional, args, strict=False))
        for name in kwargs:
            if name in given:  # Twice: the model itself says so.
                return tuple(args), dict(kwargs)
        given.update(kwargs)
        named = {n: given[n] for n, default in self.defaults.items() if n in given and given[n] is not default}
        return (), named | {n: given[n] for n in sorted(given) if n not in self.defaults}


def signature_of(model: nn.Module) -> Signature:
    """The signature of the model's forward."""
    found = list(inspect.signature(model.forward).parameters.values())
    kinds = {p.kind for p in found}
    positional = tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)
    bare = inspect.Parameter.POSITIONAL_ONLY in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
    named = {p.name: p.default for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Signature(None if bare else positional, named)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of arguments or of a result, and their structure. A dataclass that holds tensors is opened.

    Raises:
        Error: an object holds tensors and torch does not know how to take it apart.
    """
    leaves, spec = pytree.tree_flatten(tree)
    closed = {type(leaf) for leaf in leaves if _holds_tensors(leaf)}
    for kind in closed:
        if not dataclasses.is_dataclass(kind):
            raise Error(
                f"a {kind.__name__} holds tensors, and torch does not know how to take one apart",
                **{"try": f"torch.utils._pytree.register_pytree_node({kind.__name__}, ...), or a tuple or dict"},
            )
        torch.export.register_dataclass(kind)
    return flatten(tree) if closed else (leaves, spec)


def _holds_tensors(leaf: Any) -> bool:
    """True for an object that is no tensor itself and has one among its attributes."""
    if isinstance(leaf, Tensor | nn.Module | torch.SymInt | type) or leaf is None:
        return False
    inside = pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return any(
        isinstance(value, Tensor) or (dataclasses.is_dataclass(value) and _holds_tensors(value)) for value in inside
    )
