"""The state that autotp keeps on the modules of a parallel model.

NOTE [The model stays the user's]
`parallelize` changes a model in place, as `.to()` and `fully_shard` do: parameters become this rank's parts, and each
module's class becomes a subclass of its own class and of `Part`, of the same name (`module.py`). So attributes,
methods, `isinstance` and signatures are the model's own, and what somebody sets on a module is what the next capture
reads. Only a call is another: it runs a graph. What belongs to autotp lies in one attribute, `STATE`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from autotp.distributed.cut_parameter import Warned
from autotp.distributed.mesh import Mesh
from autotp.options import Options, Recompute, expect_choices
from autotp.passes.capture.guards.attribute_paths import STATE
from autotp.passes.capture.guards.guard import looked_up
from autotp.passes.capture.skeleton import close_over, stand_ins
from autotp.sharding.layout import Layout


@dataclass
class Tree:
    """What all modules of a parallel model share.

    Attributes:
        mesh: the tensor-parallel axis and this rank's place on it.
        settings: what the user chose.
        version: counts what is set on the modules and may change a graph, but for their modes.
        read: the names of all attributes that a graph was captured with.
        modes: counts how often a module was put into training or evaluation.
        compiles: options of torch.compile for what blocks compute, once they are compiled.
        warned: of what the user was warned, of cut parameters.
        loaded: counts how often parts were read from a state dict.
    """

    mesh: Mesh
    settings: Options
    version: int = 0
    read: set[str] = field(default_factory=set)
    modes: int = 0
    compiles: Mapping[str, Any] | None = None
    warned: Warned = field(default_factory=Warned)
    loaded: int = 0

    def set_recompute(self, how: Recompute) -> None:
        """Chooses what backward computes again, from the next call on."""
        settings = replace(self.settings, recompute=how)
        expect_choices(settings)
        self.settings = settings

    @contextmanager
    def outputs_stay_cut(self) -> Iterator[None]:
        """A region in which outputs are not gathered, as with `outputs="local"`."""
        before = self.settings
        self.settings = replace(before, outputs="local")
        try:
            yield
        finally:
            self.settings = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        memo[id(self)] = new = replace(
            self, read=set(self.read)
        )  # Mesh and settings are values; the process group is the same.
        return new


class ModuleState:
    """What autotp knows of one module.

    Attributes:
        tree: what all modules of the model share.
        held: own parameter -> how it is held.
        own: what the module had in its `__dict__` that a call must not meet: hooks, and a `forward` of its own.
        is_block: whether a graph calls the module.
        known: own parameters, as they are known to be held.
        executable: the graphs of a module that is called by itself.
    """

    def __init__(self, tree: Tree, held: Mapping[str, Layout], own: Mapping[str, Any]) -> None:
        self.tree, self.held, self.own, self.is_block = tree, dict(held), dict(own), False
        self.known: dict[str, Tensor] = {}
        self.executable: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        """For a copied model, which captures graphs of its own: what it holds may be changed before its first call."""
        memo[id(self)] = new = ModuleState(copy.deepcopy(self.tree, memo), self.held, copy.deepcopy(self.own, memo))
        return new


def state_of(module: nn.Module) -> ModuleState | None:
    """What autotp knows of a module of a parallel model; None of any other."""
    return module.__dict__.get(STATE)


ORIGINAL = "_autotp_original"
"""The attribute of a class of a parallel model's modules that says which class it was made of."""


def original_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module of a parallel model had before; of any other its own."""
    found: type[nn.Module] = getattr(kind, ORIGINAL, kind)
    return found


def original_of(model: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """A copy on meta of the model that a parallel one was: of the same classes, its hooks in their places.

    Args:
        whole: first name of a parameter or buffer -> what stands for it, on meta.
    """
    memo = stand_ins(model, "meta", whole)
    kinds = {m: original_class(type(m)) for m in model.modules()}
    new = {module: object.__new__(kind) for module, kind in kinds.items()}
    memo |= {id(module): copied for module, copied in new.items()}  # First: modules know each other.
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    own = [value for state in states for value in state.own.values()]
    close_over(memo, model, [one for value in own for one in (value.values() if isinstance(value, dict) else [value])])
    for module, kind in kinds.items():
        attributes, state = {key: value for key, value in vars(module).items() if not _is_torchs(key)}, state_of(module)
        if state is not None:
            del attributes[STATE]
            attributes |= {key: OrderedDict() for key in attributes if key.endswith("_hooks")} | state.own
        copied(module, kind, attributes, memo)
    return new[model]


def _is_torchs(key: str) -> bool:
    """True for what torch's `fully_shard` leaves on a module: groups of processes, which are not copied."""
    return key.startswith("__composable_api_state_key")


def copied(module: nn.Module, kind: type[nn.Module], attributes: Mapping[str, Any], memo: dict[Any, Any]) -> nn.Module:
    """A deep copy of a module with these attributes, as an instance of `kind`."""
    if id(module) not in memo:
        memo[id(module)] = object.__new__(kind)
    new: nn.Module = memo[id(module)]
    new.__setstate__(copy.deepcopy(dict(attributes), memo))
    return new


def held_in(module: nn.Module) -> Mapping[str, Layout]:
    """How a module's own parameters are held."""
    state = state_of(module)
    return state.held if state is not None else {}


def table_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps an attribute of this name, if it has one of its own."""
    state = state_of(module)
    return state.own if state is not None and (name == "forward" or name in state.own) else vars(module)


def attribute_of(module: nn.Module, name: str) -> Any:
    """An attribute as the model's forward reads it: hooks, and a `forward` that was set, lie aside."""
    state = state_of(module)
    if state is not None and name in state.own:
        return state.own[name]
    return original_class(type(module)).forward if name == "forward" else looked_up(module, name)
