"""The modules of a parallel model: the user's own, each an instance of a subclass of its class.

NOTE [The model stays the user's]
`parallelize` changes a model in place, as `.to()` and `fully_shard` do: parameters become this rank's parts, and each
module's class becomes a subclass of its own class and of `Part`, of the same name. So attributes, methods, `isinstance`
and signatures are the model's own, and what somebody sets on a module is what the next capture reads. Only a call is
another: it runs a graph. What belongs to autotp lies in one attribute, `STATE`.

`copy.deepcopy` of a parallel model is another parallel model. What a capture runs is a copy of the original classes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any, ClassVar

from torch import Tensor, nn

from autotp.errors import Error
from autotp.executable import Executable, Tree
from autotp.hf.models import overrides
from autotp.layout import Layout
from autotp.mesh import Mesh
from autotp.passes.capture import stand_ins
from autotp.passes.own import BlockCall
from autotp.passes.recompute import Recompute
from autotp.report import Plan, report
from autotp.take import TAKEN

STATE = "_autotp"
"""The one attribute that each module of a parallel model has besides its own."""
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


class State:
    """What autotp knows of one module.

    Attributes:
        tree: what all modules of the model share.
        held: own parameter -> how it is held.
        own: what the module had in its `__dict__` that a call must not meet: hooks, and a `forward` of its own.
        is_block: whether a graph calls the module.
        executable: the graphs of a module that is called by itself.
    """

    def __init__(self, tree: Tree, held: Mapping[str, Layout], own: Mapping[str, Any]) -> None:
        self.tree, self.held, self.own, self.is_block = tree, dict(held), dict(own), False
        self.executable: Executable | None = None


class Part(nn.Module):
    """A module of a parallel model. See NOTE [The model stays the user's].

    Attributes:
        original: the module's own class.
    """

    original: ClassVar[type[nn.Module]]

    def __getattr__(self, name: str) -> Any:
        own = any(name in table for table in (self._parameters, self._buffers, self._modules))
        if name in OURS and STATE in self.__dict__ and not own:  # Before a class that asks another model, as peft's.
            return OURS[name](executable_of(self))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__.get(STATE)
        if state is None or name == STATE:
            return super().__setattr__(name, value)
        state.tree.version += 1
        if name == "forward":  # It is for the next capture: a call of this module runs a graph.
            state.own[name] = value
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        state = self.__dict__.get(STATE)
        if state is not None:
            state.tree.version += 1
            if name == "forward" and name in state.own:
                del state.own[name]
                return
        super().__delattr__(name)

    def extra_repr(self) -> str:
        """The original's, and how the parameters that are cut are held."""
        state = self.__dict__.get(STATE)
        held = [f"{key} {layout}" for key, layout in state.held.items() if layout.dim is not None] if state else []
        return ", ".join(text for text in (super().extra_repr(), *held) if text)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return _copied(self, type(self), vars(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a parallel model cannot be pickled: it is tied to its process group",
            **{"try": "save model.state_dict() on each rank, or autotp.full_state_dict(model)"},
        )


class Submodule(Part):
    """A module below a parallel model. (The whole model takes hooks; a part of it has no work of its own for them.)

    A block is called when its work is done, with other arguments than the original's: torch.distributed's own hooks
    (`fully_shard`'s), which look at none, are welcome there.
    """

    def _register(self, kind: str, hook: Any, args: Any, given: Any) -> Any:
        state = self.__dict__.get(STATE)
        if state is not None and not getattr(hook, "__module__", "").startswith("torch.distributed."):
            raise Error(
                "a hook on a submodule of a parallel model would never run: its work is part of the model's graph",
                **{"try": "register it on the original model before autotp.parallelize, or on the whole parallel model"},
            )
        if state is not None and not state.is_block:
            raise Error(
                f"fully_shard({type(self).__name__}): this part of a parallel model is no block, and never called",
                **{"try": "fully_shard each numbered block, as model.h[0], and the model"},
            )
        return getattr(super(), kind)(hook, *args, **given)

    def register_forward_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """As torch's, for torch.distributed's hooks on a block."""
        return self._register("register_forward_hook", hook, args, given)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """As torch's, for torch.distributed's hooks on a block."""
        return self._register("register_forward_pre_hook", hook, args, given)

    def register_full_backward_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Raises Error."""
        return self._register("register_full_backward_hook", hook, args, given)

    def register_full_backward_pre_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Raises Error."""
        return self._register("register_full_backward_pre_hook", hook, args, given)


class ParallelModule(Part):
    """One rank of a tensor-parallel model: the user's model, made parallel by `autotp.parallelize`.

    Parameters and buffers have the names of the original model; parameters that are cut hold this rank's part. What is
    listed here is there too, unless the model has an attribute of the same name, which comes first.

    Attributes:
        plan: what is cut, what it costs, and what stayed whole.
        layouts: first parameter name -> how it is held.
        mesh: the tensor-parallel axis and this rank's place on it.
        recompute: what backward computes again; may be set, and holds from the next call on (which captures anew).
        code: what this rank computes in a call as the first was, as Python: each block once, however deep the model.
        compile_blocks: compiles what a block computes, once for all blocks that compute alike: `Executable.compile_blocks`.
        layout_of: name of a parameter, any of its names -> how it is held; None for a buffer.
        outputs_stay_cut: a region in which outputs are not gathered, as with `outputs="local"`.
    """

    plan: Plan
    layouts: dict[str, Layout]
    mesh: Mesh
    recompute: Recompute
    code: str
    compile_blocks: Callable[..., None]
    layout_of: Callable[[str], Layout | None]
    outputs_stay_cut: Callable[[], AbstractContextManager[None]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recompute" and STATE in self.__dict__ and not _has(self, name):
            executable_of(self).tree.set_recompute(value)
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Where this rank is, besides."""
        place = str(executable_of(self).mesh) if STATE in self.__dict__ else ""
        return ", ".join(text for text in (super().extra_repr(), place) if text)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As torch's, of this rank's parts: what `model.state_dict()` gave.

        Raises:
            Error: it is the original model's.
        """
        layouts = executable_of(self).layouts
        whole = [n for n, it in layouts.items() if n in state_dict and it.dim is not None]
        if any(state_dict[name].shape != self.get_parameter(name).shape for name in whole):
            raise Error(
                "load_state_dict: these are not the parts that this rank holds",
                **{"try": "autotp.load_full_state_dict(model, state), for the original model's"},
            )
        return super().load_state_dict(state_dict, *args, **kwargs)


OURS: dict[str, Callable[[Executable], Any]] = {
    "plan": lambda it: report(it.entries[0][1].analysis, it.name),
    "layouts": lambda it: it.layouts,
    "mesh": lambda it: it.mesh,
    "recompute": lambda it: it.tree.settings.recompute,
    "code": lambda it: it.code,
    "compile_blocks": lambda it: it.compile_blocks,
    "layout_of": lambda it: it.layout_of,
    "outputs_stay_cut": lambda it: it.tree.outputs_stay_cut,
}
"""What `model.plan` and its kin are, where the model itself has none of that name."""


def _has(module: nn.Module, name: str) -> bool:
    """True if the model itself has an attribute of this name."""
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in table for table in tables) or any(name in vars(kind) for kind in type(module).__mro__)


def state_of(module: nn.Module) -> State | None:
    """What autotp knows of a module of a parallel model; None of any other."""
    return module.__dict__.get(STATE)


def executable_of(module: nn.Module) -> Executable:
    """The graphs of a module of a parallel model.

    NOTE [A part by itself]
    The whole's graphs contain the work of its parts. A part that is called by itself (an encoder, before its decoder
    generates) captures graphs of its own, in which its parameters are held as they are.
    """
    state: State = module.__dict__[STATE]
    if state.executable is None or state.executable.module is not module:
        state.executable = Executable(module, state.tree, _held, _block, original_of, state.executable)
    return state.executable


def _held(module: nn.Module) -> Mapping[str, Layout]:
    state = state_of(module)
    return state.held if state is not None else {}


def _block(module: nn.Module) -> None:
    state = state_of(module)
    if state is not None:
        state.is_block = True


def original_of(model: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """A copy on meta of the model that a parallel one was: of the same classes, its hooks in their places.

    Args:
        whole: first name of a parameter or buffer -> what stands for it, on meta.
    """
    memo = stand_ins(model, "meta", whole)
    kinds = {m: type(m).original if isinstance(m, Part) else type(m) for m in model.modules()}
    new = {module: kind.__new__(kind) for module, kind in kinds.items()}
    memo |= {id(module): copied for module, copied in new.items()}  # First: modules know each other.
    for module, kind in kinds.items():
        attributes, state = {key: value for key, value in vars(module).items() if not _is_torchs(key)}, state_of(module)
        if state is not None:
            del attributes[STATE]
            attributes |= {key: OrderedDict() for key in attributes if key.endswith("_hooks")} | state.own
        _copied(module, kind, attributes, memo)
    return new[model]


def _is_torchs(key: str) -> bool:
    """True for what torch's `fully_shard` leaves on a module: groups of processes, which are not copied."""
    return key.startswith("__composable_api_state_key")


def _copied(module: nn.Module, kind: type[nn.Module], attributes: Mapping[str, Any], memo: dict[Any, Any]) -> nn.Module:
    if id(module) not in memo:
        memo[id(module)] = kind.__new__(kind)
    new: nn.Module = memo[id(module)]
    new.__setstate__(copy.deepcopy(dict(attributes), memo))
    return new


# ---- made of a model


def classes_of(model: nn.Module) -> dict[nn.Module, type[Part]]:
    """The class that each module gets."""
    return {m: _class_of(type(m), ParallelModule if m is model else Submodule) for m in model.modules()}


@cache
def _class_of(original: type[nn.Module], role: type[Part]) -> type[Part]:
    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], BlockCall):
            return args[0].run(args[1:])
        if STATE not in self.__dict__:  # Made by the module's own code, as by a slice of a ModuleList.
            return original.forward(self, *args, **kwargs)
        return executable_of(self)(args, kwargs)

    names = {
        "original": original, "forward": forward, "__module__": original.__module__, "__doc__": original.__doc__,
        "__qualname__": original.__qualname__,
    }  # fmt: skip
    made: type[Part] = type(original)(original.__name__, (*overrides(original), role, original), names)
    return made


def adopt(
    model: nn.Module, classes: Mapping[nn.Module, type[Part]], tensors: Mapping[str, Tensor], tree: Tree,
    layouts: Mapping[str, Layout],
) -> None:  # fmt: skip
    """Makes a model, whose parameters were taken over, a parallel one: see NOTE [The model stays the user's].

    Args:
        tensors: first name -> this rank's part of a parameter (or the parameter itself), or a buffer.
    """
    held: dict[int, tuple[Tensor, Layout | None]] = {id(b): (tensors[name], None) for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        mine = tensors[name]
        own = mine if isinstance(mine, nn.Parameter) else nn.Parameter(mine, p.requires_grad)
        own.__dict__.update({key: value for key, value in p.__dict__.items() if key != TAKEN})
        held[id(p)] = own, layouts[name]
    for module, kind in classes.items():
        here = {key: held[id(p)][1] for key, p in module._parameters.items() if p is not None}
        for table in (module._parameters, module._buffers):
            table.update({key: held[id(tensor)][0] for key, tensor in table.items() if tensor is not None})  # type: ignore[misc]
        own = {name: module.__dict__[name] for name in (*HOOKS, "forward") if name in module.__dict__}
        for name in own:
            module.__dict__.pop(name)
        module.__dict__.update({name: OrderedDict() for name in HOOKS if name in own})
        module.__dict__[STATE] = State(tree, {key: layout for key, layout in here.items() if layout}, own)
        module.__class__ = kind

