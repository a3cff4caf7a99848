"""A model's inputs and outputs as a flat list of leaves and a structure (torch's pytree).

NOTE [Objects that a call changes]
A key-value cache is an argument that the model writes to. It is opened into its attributes on the way in, and built
anew of them inside the graph; what it holds after the call comes out beside the result, and is put into the caller's
own object, which the result then refers to as it does on one device.
"""

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
from autotp.model_library import is_state, read_attribute, shown_attribute


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


def flatten(tree: Any, known: Sequence[Any] = ()) -> tuple[list[Any], Any]:
    """The leaves of arguments or of a result, and their structure. A dataclass that holds tensors is opened.

    Args:
        known: objects that a call changes which are opened elsewhere: of each only its place in this list is a leaf.

    Raises:
        Error: an object holds tensors and torch does not know how to take it apart.
    """
    leaves, spec = pytree.tree_flatten(_opened(tree, known))
    closed = {type(leaf) for leaf in leaves if _holds_tensors(leaf)}
    for kind in closed:
        if not dataclasses.is_dataclass(kind):
            raise Error(
                f"a {kind.__name__} holds tensors, and torch does not know how to take one apart",
                fix=f"torch.utils._pytree.register_pytree_node({kind.__name__}, ...), or a tuple or dict",
            )
        torch.export.register_dataclass(kind)
    return flatten(tree, known) if closed else (leaves, spec)


def _opened(tree: Any, known: Sequence[Any] = ()) -> Any:
    """The tree with its states as nodes."""

    def opened(x: Any) -> Any:
        places = [i for i, one in enumerate(known) if one is x]
        return StateAt(places[0]) if places else _Open(x) if is_state(x) else x

    return pytree.tree_map(opened, tree, is_leaf=is_state)


def within_states(tree: Any, known: Sequence[Any] = ()) -> list[bool]:
    """For each leaf of `flatten(tree, known)` whether it belongs to an object that a call changes."""
    found = pytree.tree_leaves(_opened(tree, known), is_leaf=lambda x: isinstance(x, _Open))
    return [inside for x in found for inside in [isinstance(x, _Open)] * len(pytree.tree_leaves(x))]


def states(tree: Any) -> list[Any]:
    """The objects among arguments that a call changes, each once. NOTE [Objects that a call changes]"""
    found = {id(x): x for x in pytree.tree_leaves(tree, is_state) if is_state(x)}
    return list(found.values())


def outcome(result: Any, changed: Sequence[Any]) -> tuple[list[Any], Any]:
    """The leaves and the structure of what comes out of a call: its result, and what the arguments' states hold now."""
    leaves, spec = flatten(result, changed)
    inside, below = flatten(list(changed))
    return [*leaves, *inside], (spec, below)


def settled(leaves: Sequence[Any], spec: Any, mine: Sequence[Any]) -> Any:
    """The result of a call, rebuilt of the leaves of its outcome; the caller's own states hold what they do now."""
    of_result, of_states = spec
    changed = pytree.tree_unflatten(leaves[of_result.num_leaves :], of_states)
    for state, now in zip(mine, changed, strict=True):
        vars(state).clear()
        vars(state).update(vars(now))
    result = pytree.tree_unflatten(leaves[: of_result.num_leaves], of_result)
    return pytree.tree_map_only(StateAt, lambda known: mine[known.at], result, is_leaf=is_state)


@dataclass(frozen=True)
class StateAt:
    """Stands for an object that a call changes, the one at this place among those of the arguments."""

    at: int


@dataclass(frozen=True)
class _Open:
    """An object that a call changes, as a node of a structure: its attributes are what is below."""

    state: Any


def _attributes(node: _Open) -> tuple[list[Any], Any]:
    shown = {name: shown_attribute(name, value) for name, value in vars(node.state).items()}
    return [_opened(value) for value in shown.values()], (type(node.state), tuple(shown))


def _built(below: Any, context: Any) -> Any:
    """An object as it was, not made by its constructor."""
    kind, names = context
    new = object.__new__(kind)
    vars(new).update({name: read_attribute(name, value, below) for name, value in zip(names, below, strict=True)})
    return new


pytree.register_pytree_node(_Open, _attributes, _built)


def _holds_tensors(leaf: Any) -> bool:
    """True for an object that is no tensor itself and has one among its attributes."""
    if isinstance(leaf, Tensor | nn.Module | torch.SymInt | type) or leaf is None:
        return False
    inside = pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return any(
        isinstance(value, Tensor) or (dataclasses.is_dataclass(value) and _holds_tensors(value)) for value in inside
    )
