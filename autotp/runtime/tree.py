"""The state that autotp keeps on the modules of a parallel model.

NOTE [The model stays the user's]
`parallelize` changes a model in place, as `.to()` and `fully_shard` do: parameters become this rank's parts, and each
module gets a new class of the same name, a subclass of its own class and of `Part` (`module.py`). So attributes,
methods, `isinstance` and signatures stay the model's own, and the next capture reads the attributes that the user sets.
Only a call differs: it runs a graph. autotp keeps its state of a module in one attribute, `STATE`: an attribute, not a
mapping beside the modules, so that `copy.deepcopy` copies it, and Dynamo sees it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from autotp.distributed.mesh import Mesh
from autotp.options import Options, Outputs, Recompute, expect_choices
from autotp.passes.capture.python_state.guard import looked_up
from autotp.passes.capture.python_state.walk import STATE
from autotp.passes.capture.skeleton import close_over, copying, stand_ins
from autotp.passes.emit.async_tensor_parallel import FusedPairs
from autotp.sharding.layout import Layout


@dataclass
class Tree:
    """The state that all modules of a parallel model share.

    Attributes:
        mesh: the tensor-parallel axis and this rank's place on it.
        settings: the user's options.
        version: counts the assignments to modules that may change a graph, except train and eval.
        read: the names of all attributes that graphs read.
        modes: counts the calls of `train()` and `eval()` on modules.
        compiles: options of torch.compile for blocks; None if blocks are not compiled.
        fused: counts what torch fuses for async tensor parallelism; None if it is not asked to.
        loaded: counts how often parts were read from a state dict.
    """

    mesh: Mesh
    settings: Options
    version: int = 0
    read: set[str] = field(default_factory=set)
    modes: int = 0
    compiles: Mapping[str, Any] | None = None
    fused: FusedPairs | None = None
    loaded: int = 0

    def set_recompute(self, how: Recompute) -> None:
        """Sets which values backward computes again, from the next call on."""
        settings = replace(self.settings, recompute=how)
        expect_choices(settings)
        self.settings = settings

    def outputs_stay_cut(self) -> AbstractContextManager[None]:
        """A region in which outputs are not gathered, as with `outputs="local"`."""
        return self.outputs_as("local")

    @contextmanager
    def outputs_as(self, outputs: Outputs) -> Iterator[None]:
        """A region with another value of the option `outputs`."""
        before = self.settings
        self.settings = replace(before, outputs=outputs)
        try:
            yield
        finally:
            self.settings = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        memo[id(self)] = clone = replace(self, read=set(self.read))  # The copy has the same process group.
        return clone


class ModuleState:
    """The state of one module of a parallel model.

    Attributes:
        tree: the state that all modules of the model share.
        held: name of its own parameter -> layout.
        own: attributes that a call must not see, removed from its `__dict__`: hooks, and a `forward` set on the module.
        is_block: whether a graph calls the module.
        known: its own parameters when their layouts were noted.
        executable: the graphs of the module, if it is called by itself.
        unfit: the tree's version at which its own graph did not have the axis of one of its cuts; -1 before.
    """

    def __init__(self, tree: Tree, layouts: Mapping[str, Layout], removed: Mapping[str, Any]) -> None:
        self.tree, self.held, self.own, self.is_block = tree, dict(layouts), dict(removed), False
        self.known: dict[str, Tensor] = {}
        self.executable: Any = None
        self.unfit = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        """Returns the state for a copied model, which captures new graphs: it may change before its first call."""
        memo[id(self)] = clone = ModuleState(copy.deepcopy(self.tree, memo), self.held, copy.deepcopy(self.own, memo))
        clone.known = copy.deepcopy(self.known, memo)
        return clone


def state_of(module: nn.Module) -> ModuleState | None:
    """Returns the state of a module of a parallel model; None for any other module."""
    return vars(module).get(STATE)  # Not getattr: a module's own `__getattr__` may ask another module.


def give_state(module: nn.Module, state: ModuleState) -> ModuleState:
    """Gives a module its state, and returns the state."""
    vars(module)[STATE] = state  # Not setattr: the module's own `__setattr__` may do anything.
    return state


ORIGINAL = "_autotp_original"
"""The attribute of a new class with the original class."""


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the original class of a parallel model's module class; any other class unchanged."""
    original: type[nn.Module] = getattr(cls, ORIGINAL, cls)
    return original


def original_of(model: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy on meta of the original of a parallel model: with the original classes and hooks.

    Args:
        whole: first name of a parameter or buffer -> the tensor of the copy, on meta.
    """
    memo = stand_ins(model, "meta", whole)
    kinds = {m: original_class(type(m)) for m in model.modules()}
    clones = {module: object.__new__(cls) for module, cls in kinds.items()}
    memo |= {id(module): copied for module, copied in clones.items()}  # First: modules refer to each other.
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    own_values = [value for state in states for value in state.own.values()]
    contents = [member for value in own_values for member in (value.values() if isinstance(value, dict) else [value])]
    with copying():
        close_over(memo, model, contents)
        for module, cls in kinds.items():
            attributes = {key: value for key, value in vars(module).items() if not _is_torchs(key)}
            if (state := state_of(module)) is not None:
                del attributes[STATE]
                # This one is ours; a `forward` that the user set is in `state.own`.
                attributes.pop("forward", None)
                # Hooks that were registered on the parallel model run around its graph, and not in it.
                attributes |= {key: OrderedDict() for key in attributes if key.endswith("_hooks")} | state.own
            copy_as(module, cls, attributes, memo)
    return clones[model]


def _is_torchs(key: str) -> bool:
    """True for the attribute of `fully_shard` on a module: it has process groups, which cannot be copied."""
    return key.startswith("__composable_api_state_key")


def copy_as(module: nn.Module, cls: type[nn.Module], attributes: Mapping[str, Any], memo: dict[Any, Any]) -> nn.Module:
    """Returns a deep copy of a module with these attributes, as an instance of `cls`."""
    if id(module) not in memo:
        memo[id(module)] = object.__new__(cls)
    clone: nn.Module = memo[id(module)]
    clone.__setstate__(copy.deepcopy(dict(attributes), memo))
    return clone


def held_in(module: nn.Module) -> Mapping[str, Layout]:
    """Returns the layouts of a module's own parameters."""
    state = state_of(module)
    return state.held if state is not None else {}


def table_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns the dict in which a module keeps an attribute of this name."""
    state = state_of(module)
    return state.own if state is not None and (name == "forward" or name in state.own) else vars(module)


def attribute_of(module: nn.Module, name: str) -> Any:
    """Returns an attribute as the original forward reads it; the state has hooks, and a `forward` set on the module."""
    state = state_of(module)
    if state is not None and name in state.own:
        return state.own[name]
    return original_class(type(module)).forward if name == "forward" else looked_up(module, name)
