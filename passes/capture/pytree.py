"""Flattens a model's inputs and outputs into leaves and a structure (torch's pytree).

NOTE [Objects that a call changes]
A key-value cache is an argument that the model changes: a state. It is flattened into its attributes, and a new object
with these attributes is made inside the captured function. Its values after the call are outputs beside the result, and
are put into the caller's own object. The result then refers to the caller's object, as on one device.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.model_library import library


@dataclass(frozen=True)
class Signature:
    """The arguments of a model's forward. It maps calls that differ in spelling only to the same call.

    Attributes:
        positional: names of the arguments that may be positional; None if some must be positional.
        defaults: every named argument in the order of the definition, with its default.
    """

    positional: tuple[str, ...] | None
    defaults: dict[str, Any]

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the same call with its arguments by name, in order, and without arguments equal to their default.

        Names of `**kwargs` keep the order of the call: a model can see it.
        """
        if self.positional is None or len(args) > len(self.positional):
            return tuple(args), dict(kwargs)
        passed = dict(zip(self.positional, args, strict=False))
        for name in kwargs:
            if name in passed:  # Given twice: the model itself will raise.
                return tuple(args), dict(kwargs)
        passed.update(kwargs)
        # `is`, and not `==`, which gives a tensor for tensors.
        named = {n: passed[n] for n, default in self.defaults.items() if n in passed and passed[n] is not default}
        return (), named | {n: passed[n] for n in passed if n not in self.defaults}


def signature_of(model: nn.Module) -> Signature:
    """Returns the signature of the model's forward."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = {p.kind for p in parameters}
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    bare = inspect.Parameter.POSITIONAL_ONLY in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Signature(None if bare else positional, named)


PLAIN = frozenset({Tensor, NoneType, bool, int, float, str})
"""Classes of arguments that are leaves."""


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Returns `flatten((args, kwargs))`; fast if a call of the same form was flattened before.

    NOTE [The form of a call] For the key-value cache of 8 layers torch's pytree takes 0.2 ms, in each decoded token,
    and its structure takes as long to compare with that of an earlier call. So `_Form` walks through the arguments
    that calls most often have, and calls of one form get the same object as their structure.
    """
    # torch.compile traces pytree's own functions, and not these.
    if torch.compiler.is_compiling():
        return flatten((args, kwargs))
    call = _Form()
    if not call.walk((args, kwargs)):
        return flatten((args, kwargs))
    form = tuple(call.form)
    if form not in _SPECS:
        leaves, spec = flatten((args, kwargs))
        # The first call of a form is flattened in both ways. If they differ, calls of this form take the slow one.
        matches = len(leaves) == len(call.leaves) and all(map(_is_alike, leaves, call.leaves))
        _SPECS[form] = spec if matches else None
    spec = _SPECS[form]
    return flatten((args, kwargs)) if spec is None else (call.leaves, spec)


_SPECS: dict[tuple[Any, ...], Any] = {}
"""The form of a call -> its structure; None where `flatten` finds other leaves than `_Form`."""


def _is_alike(leaf: Any, walked: Any) -> bool:
    """True for the same leaf; a count of a cache is another tensor each time."""
    return leaf is walked or (isinstance(leaf, Tensor) and isinstance(walked, Tensor) and leaf.shape == walked.shape)


class _Form:
    """The leaves of a call, and what else it consists of, from the outside to the inside.

    Attributes:
        leaves: the leaves, as `flatten` returns them.
        form: None for each leaf; for a container its class, and its keys or length.
    """

    __slots__ = ("form", "leaves")

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.form: list[Any] = []

    def walk(self, x: Any) -> bool:
        """Adds a value. Returns False for a value that only `flatten` knows."""
        cls: Any = type(x)
        if cls in PLAIN or _is_leaf(cls):
            self.form.append(None)
            self.leaves.append(x)
            return True
        # The classes themselves: torch may take a subclass apart in another way, or not at all.
        if cls is dict:
            self.form.append((cls, *x))
            return all(map(_is_text, x)) and all(map(self.walk, x.values()))
        if cls is list or cls is tuple:
            self.form.append((cls, len(x)))
            return all(map(self.walk, x))
        return library().is_state(x) and self._walk_state(x)

    def _walk_state(self, state: Any) -> bool:
        attributes = vars(state)
        self.form.append((type(state), *attributes))
        for name, value in attributes.items():
            cls = type(value)
            if library().rewrites(name) or not (cls in PLAIN or cls is list):
                value = library().shown_attribute(name, value)
            if not self.walk(value):
                return False
        return True


def _is_text(key: Any) -> bool:
    return type(key) is str


@cache
def _is_leaf(cls: type) -> bool:
    """True for further classes of leaves that hold no other tensors."""
    leaf = issubclass(cls, Tensor | torch.dtype | type)
    return leaf and cls not in pytree.SUPPORTED_NODES


def flatten(tree: Any, known_states: Sequence[Any] = ()) -> tuple[list[Any], Any]:
    """Returns the leaves of arguments or of a result, and their structure. Dataclasses with tensors are flattened, too.

    Args:
        known_states: states that are flattened elsewhere: each becomes a leaf with its place in this list.

    Raises:
        Error: an object holds tensors, and torch does not know how to flatten it.
    """
    leaves, spec = pytree.tree_flatten(_opened(tree, known_states))
    # Most leaves are of a few classes, and a call is flattened often.
    candidates = [leaf for leaf in leaves if type(leaf) not in PLAIN]
    for leaf in candidates:
        if isinstance(leaf, Iterator):
            raise Error(
                f"a {type(leaf).__name__} hands out its values once, and a graph runs many times",
                fix="a list or a tuple of the values",
            )
    closed = {type(leaf) for leaf in candidates if _holds_tensors(leaf)}
    for cls in closed:
        if not dataclasses.is_dataclass(cls):
            raise Error(
                f"a {cls.__name__} holds tensors, and torch does not know how to take one apart",
                fix=f"torch.utils._pytree.register_pytree_node({cls.__name__}, ...), or a tuple or dict",
            )
        # torch knows it from now on, so that the second round takes it apart.
        torch.export.register_dataclass(cls)
    return flatten(tree, known_states) if closed else (leaves, spec)


def _opened(tree: Any, known_states: Sequence[Any] = ()) -> Any:
    """Returns the tree with its states as nodes of the structure."""
    if type(tree) in PLAIN:
        return tree

    def opened(x: Any) -> Any:
        if type(x) in PLAIN:
            return x
        places = [i for i, state in enumerate(known_states) if state is x]
        if isinstance(x, torch.Size):
            return _Sizes(tuple(x))
        return StateAt(places[0]) if places else _Open(x) if library().is_state(x) else x

    return pytree.tree_map(opened, tree, is_leaf=is_node)


def is_node(x: Any) -> bool:
    """True for a value that torch rebuilds as another type (a `torch.Size` as a tuple) or does not take apart."""
    return type(x) not in PLAIN and (library().is_state(x) or isinstance(x, torch.Size))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the structure with `function` of each leaf. A `torch.Size` is a leaf; torch would make a tuple of it."""
    return pytree.tree_map(function, tree, is_leaf=lambda x: isinstance(x, torch.Size))


@cache
def computes_by_itself(cls: type[Tensor]) -> bool:
    """True for a class of tensors whose operators run code of the user's, which a graph does not have."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "autotp", "builtins")]
    return any(name in vars(base) for base in bases for name in ("__torch_function__", "__torch_dispatch__"))


def is_dense(tensor: Tensor) -> bool:
    """False for a sparse or a nested tensor."""
    return tensor.layout is torch.strided and not tensor.is_nested


def within_states(tree: Any, known_states: Sequence[Any] = ()) -> list[bool]:
    """Returns for each leaf of `flatten(tree, known_states)` whether it belongs to a state."""
    leaves = pytree.tree_leaves(_opened(tree, known_states), is_leaf=lambda x: isinstance(x, _Open))
    return [inside for x in leaves for inside in [isinstance(x, _Open)] * len(pytree.tree_leaves(x))]


def states(tree: tuple[Sequence[Any], Mapping[str, Any]]) -> list[Any]:
    """Returns the states among arguments, each once. NOTE [Objects that a call changes]

    Args:
        tree: positional and named arguments.
    """
    values = [x for x in (*tree[0], *tree[1].values()) if type(x) not in PLAIN]
    is_state = library().is_state
    states_by_id = {id(x): x for x in pytree.tree_leaves(values, is_state) if is_state(x)} if values else {}
    return list(states_by_id.values())


def outcome(result: Any, changed: Sequence[Any]) -> tuple[list[Any], Any]:
    """Returns leaves and structure of a call's outcome: its result, and the values of the states after the call."""
    leaves, spec = flatten(result, changed)
    inside, below = flatten(list(changed))
    return [*leaves, *inside], (spec, below)


def leaf_names(spec: Any) -> list[str]:
    """Returns the keys and positions that lead to each leaf of a structure, joined by dots."""
    return [".".join(path) for path, _ in named_leaves(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))]


def named_leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path of each leaf, and the leaf. Classes may be registered without names of their children."""

    def is_below(x: Any) -> bool:
        return x is not tree

    try:
        below = [(_key(*keys), x) for keys, x in pytree.tree_flatten_with_path(tree, is_leaf=is_below)[0] if keys]
    except ValueError:
        children = pytree.tree_leaves(tree, is_leaf=is_below)
        names = list(tree) if isinstance(tree, Mapping) and len(tree) == len(children) else range(len(children))
        below = [(str(name), x) for name, x in zip(names, children, strict=True)]
    if not below and pytree.tree_is_leaf(tree):
        yield path, tree
    for name, x in below:
        yield from named_leaves(x, (*path, name))


def _key(key: Any) -> str:
    """Returns how a user calls a child: by its key, its position or its attribute."""
    return str(next((getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute)), key))


Built = Callable[[Iterator[Any]], Any]
"""A function that makes a value from the next leaves."""


def unflatten_outcome(
    leaves: Sequence[Any], spec: tuple[Any, Any], targets: Sequence[Any], builders: tuple[Built, Built] | None = None
) -> Any:
    """Rebuilds the result of a call from the leaves of its outcome; puts the new values into the caller's states.

    Args:
        builders: `builder_of` both structures of `spec`. (torch traces pytree's own functions, and not these.)
    """
    of_result, of_states = builders or [partial(_unflatten, spec=part) for part in spec]
    count = spec[0].num_leaves
    for state, now in zip(targets, of_states(iter(leaves[count:])), strict=True):
        # The call may also have deleted attributes.
        vars(state).clear()
        vars(state).update(vars(now))
    return of_result(iter([targets[leaf.at] if type(leaf) is StateAt else leaf for leaf in leaves[:count]]))


def _unflatten(leaves: Iterator[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(list(leaves), spec)


def builder_of(spec: Any) -> Built:
    """Returns a function that does what `tree_unflatten` does with a structure, with its decisions made once."""
    if spec.is_leaf():
        return next
    parts, context = [builder_of(part) for part in spec.children()], spec.context
    if spec.type is list:
        return lambda leaves: [part(leaves) for part in parts]
    if spec.type is tuple:
        return lambda leaves: tuple([part(leaves) for part in parts])
    if spec.type is dict:
        return lambda leaves: dict(zip(context, [part(leaves) for part in parts], strict=True))
    if spec.type is _Open:
        rewritten = list(map(library().rewrites, context[1]))
        return lambda leaves: _built([part(leaves) for part in parts], context, rewritten)
    unflatten = pytree.SUPPORTED_NODES[spec.type].unflatten_fn
    return lambda leaves: unflatten([part(leaves) for part in parts], context)


@dataclass(frozen=True)
class StateAt:
    """Stands for the state at this place among the states of the arguments."""

    at: int


@dataclass(frozen=True)
class _Open:
    """A state as a node of a structure: its attributes are the children."""

    state: Any


@dataclass(frozen=True)
class _Sizes:
    """A `torch.Size` as a node of a structure: its numbers are the children."""

    numbers: tuple[Any, ...]


pytree.register_pytree_node(_Sizes, lambda node: (list(node.numbers), None), lambda below, _: torch.Size(below))


def _attributes(node: _Open) -> tuple[list[Any], Any]:
    attributes = {name: library().shown_attribute(name, value) for name, value in vars(node.state).items()}
    # An attribute may be a state itself.
    return [_opened(value) for value in attributes.values()], (type(node.state), tuple(attributes))


def _built(below: Any, context: Any, rewritten: Sequence[bool] = ()) -> Any:
    """Returns an object of the same class and attributes, without calling its constructor.

    Args:
        rewritten: `rewrites` of each attribute's name, if it is known.
    """
    cls, names = context
    # Its constructor may ask for other arguments than its attributes, and may compute.
    state = object.__new__(cls)
    attributes = vars(state)
    for name, value, again in zip(names, below, rewritten or map(library().rewrites, names), strict=True):
        attributes[name] = library().read_attribute(name, value, below) if again else value
    return state


pytree.register_pytree_node(_Open, _attributes, _built)


def _holds_tensors(leaf: Any) -> bool:
    """True for an object that is not a tensor and has a tensor among its attributes or contents."""
    if isinstance(leaf, Tensor | nn.Module | torch.SymInt | type) or leaf is None:
        return False
    inside = pytree.tree_leaves([*getattr(leaf, "__dict__", {}).values(), *_contents(leaf)])
    return any(
        isinstance(value, Tensor)
        or ((dataclasses.is_dataclass(value) or isinstance(value, CONTAINERS)) and _holds_tensors(value))
        for value in inside
    )


CONTAINERS = (list, tuple, dict, Set, deque, Mapping, UserList)
"""Classes whose subclasses hold values that are no attributes, and that torch takes for single values."""


def _contents(leaf: Any) -> list[Any]:
    """Returns the values in a container that torch does not take apart: an object of a subclass, or a set."""
    if not isinstance(leaf, CONTAINERS):
        return []
    return list(leaf.values()) if isinstance(leaf, Mapping) else list(leaf)
