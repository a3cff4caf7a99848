"""The modules of a parallel model: each is an instance of a subclass of its original class.

See NOTE [The model stays the user's] in `tree.py`. `copy.deepcopy` of a parallel model is another parallel model.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize

from autotp.diagnostics.plan_text import Plan, report
from autotp.distributed.cut_parameter import Cut, as_cut, is_ordinary, warn_of_parts
from autotp.distributed.live_models import watch
from autotp.distributed.mesh import Mesh, broadcast_from_first
from autotp.errors import Error
from autotp.model_library import classes_before
from autotp.options import Recompute
from autotp.passes.capture.guards.attribute_paths import STATE, is_internal
from autotp.passes.emit.attach_parameters import BlockCall
from autotp.runtime.executable import Executable, refuse_capture
from autotp.runtime.tree import ORIGINAL, ModuleState, Tree, copied, held_in, original_class, state_of
from autotp.sharding.layout import Layout
from autotp.source_location import is_users

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


SETTERS = (
    "register_parameter", "register_buffer", "add_module", "append", "extend", "insert", "pop", "popitem", "clear",
    "update", "setdefault", "__setitem__", "__delitem__",
)  # fmt: skip
"""Methods of modules and of containers of modules that change what they hold, and set no attribute."""


class Part(nn.Module):
    """A module of a parallel model. See NOTE [The model stays the user's]."""

    def __getattr__(self, name: str) -> Any:
        own = any(name in table for table in (self._parameters, self._buffers, self._modules))
        if name in OURS and STATE in self.__dict__ and not own:  # Before a class that asks another model, as peft's.
            return OURS[name](executable_of(self))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__.get(STATE)
        if name == "__class__" and state is not None and not issubclass(value, Part):
            state.tree.version += 1
            value = _made(value, ParallelModule if isinstance(self, ParallelModule) else Submodule)
        if state is None or (is_internal(name) and name != "training"):
            return super().__setattr__(name, value)
        if isinstance(value, nn.Parameter) and _is_sharding(sys._getframe(1)):
            self._parameters[name] = value  # As on a module that has no `__setattr__` of its own.
            return
        if name == "training":
            state.tree.modes += 1
            return super().__setattr__(name, value)
        state.tree.version += self._is_known(name, value, state.tree)
        if name == "forward":  # It is for the next capture: a call of this module runs a graph.
            state.own[name] = value
        else:
            super().__setattr__(name, value)

    def _is_known(self, name: str, value: Any, tree: Tree) -> bool:
        """True if setting an attribute may change what a graph was made for: not one that none reads."""
        kind = original_class(type(self))
        tables = (self._parameters, self._buffers, self._modules)
        held = isinstance(value, (nn.Module, nn.Parameter)) or any(name in table for table in tables)
        own = kind.__setattr__ is not nn.Module.__setattr__ or hasattr(getattr(kind, name, None), "__set__")
        return held or own or name == "forward" or name in tree.read

    def __delattr__(self, name: str) -> None:
        state = self.__dict__.get(STATE)
        if state is not None:
            state.tree.version += 1
            if name == "forward" and name in state.own:
                del state.own[name]
                return
        super().__delattr__(name)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads what `state_dict()` of this rank returned.

        Args:
            state_dict: name -> this rank's part.
            args, kwargs: as for `torch.nn.Module.load_state_dict`.

        Raises:
            Error: it is the original model's state dict.
        """
        for path, module in self.named_modules(remove_duplicate=False):
            for key in (key for key, layout in held_in(module).items() if layout.dim is not None):
                given = state_dict.get(f"{path}.{key}" if path else key)
                if isinstance(given, Tensor) and given.shape != module.get_parameter(key).shape:
                    raise Error(
                        "load_state_dict: these are not the parts that this rank holds",
                        fix="autotp.load_full_state_dict(model, state), for the original model's",
                    )
        if (state := state_of(self)) is not None:
            state.tree.loaded += 1
        return super().load_state_dict(state_dict, *args, **kwargs)

    def extra_repr(self) -> str:
        """Returns the original module's text, and how each parameter that is cut is held."""
        state = self.__dict__.get(STATE)
        held = [f"{key} {layout}" for key, layout in state.held.items() if layout.dim is not None] if state else []
        return ", ".join(text for text in (super().extra_repr(), *held) if text)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return copied(self, type(self), vars(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a parallel model cannot be pickled: it is tied to its process group",
            fix="save model.state_dict() on each rank, or autotp.full_state_dict(model)",
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
                fix="register it on the original model before autotp.parallelize, or on the whole parallel model",
            )
        if state is not None and not state.is_block:
            raise Error(
                f"fully_shard({type(self).__name__}): this part of a parallel model is no block, and never called",
                fix="fully_shard each numbered block, as model.h[0], and the model",
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
    """One rank of a tensor-parallel model: the user's own model, made parallel by `autotp.parallelize`.

    Parameters and buffers have the names of the original model; a parameter that is cut holds this rank's part. The
    attributes below are there too, unless the model has an attribute of the same name, which comes first.

    Attributes:
        plan: the plan of the graph that was captured last; Error where modules or parameters were exchanged since.
        layouts: first name of a parameter -> how it is held: the whole's shape, and this rank's part.
        mesh: the tensor-parallel axis, and this rank's place on it.
        recompute: what backward computes again. It may be set, and holds from the next call on, which captures anew.
        code: what this rank computes in the call that was captured last, as Python code: each block once.
        compile_blocks: compiles what a block computes, once for all blocks that compute alike; takes the keyword
            arguments of `torch.compile`.
        layout_of: any name of a parameter -> how it is held; None for a buffer.
        outputs_stay_cut: `with model.outputs_stay_cut():` leaves outputs cut, as `outputs="local"` does.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> model = autotp.parallelize(model, tp=1, example_inputs=torch.ones(2, 4))
        >>> isinstance(model, nn.Sequential), isinstance(model, autotp.ParallelModule)
        (True, True)
        >>> model.layout_of("0.weight").shape  # the whole's; with tp=2 each rank holds [8, 4] of it
        (16, 4)
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's parts, by name; a warning tells user code that they are not the whole model.

        `autotp.full_state_dict(model)` returns the whole.

        Args:
            args, kwargs: as for `torch.nn.Module.state_dict`.
        """
        if is_users(frame := sys._getframe(1)):
            warn_of_parts(self.parameters(), "state_dict", frame)
        return super().state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Returns the original module's text, and this rank's place on the mesh."""
        place = str(executable_of(self).mesh) if STATE in self.__dict__ else ""
        return ", ".join(text for text in (super().extra_repr(), place) if text)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return watch(super().__deepcopy__(memo))


OURS: dict[str, Callable[[Executable], Any]] = {
    "plan": lambda it: report(it.latest.analysis, it.name),
    "layouts": lambda it: it.layouts,
    "mesh": lambda it: it.mesh,
    "recompute": lambda it: it.tree.settings.recompute,
    "code": lambda it: it.code,
    "compile_blocks": lambda it: it.compile_blocks,
    "layout_of": lambda it: it.layout_of,
    "outputs_stay_cut": lambda it: it.tree.outputs_stay_cut,
}
"""What `model.plan` and its kin are, where the model itself has none of that name."""


def _is_sharding(frame: FrameType) -> bool:
    """True for `fully_shard`'s own code, which puts in what it gathered and takes it out again in each call."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.fsdp.")


def _has(module: nn.Module, name: str) -> bool:
    """True if the model itself has an attribute of this name."""
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in table for table in tables) or any(name in vars(kind) for kind in type(module).__mro__)


def executable_of(module: nn.Module) -> Executable:
    """The graphs of a module of a parallel model.

    NOTE [A part by itself]
    The whole's graphs contain the work of its parts. A part that is called by itself (an encoder, before its decoder
    generates) captures graphs of its own, in which its parameters are held as they are.
    """
    state: ModuleState = module.__dict__[STATE]
    if state.executable is None:
        state.executable = Executable(module, state.tree)
    found: Executable = state.executable
    if found.seen != state.tree.version:
        if torch.compiler.is_compiling():
            refuse_capture(found.name)
        renew(module, state.tree)
        found.look_again()
    if found.seen_modes != state.tree.modes:
        found.look_at_modes()
    return found


# ---- made of a model


def classes_of(model: nn.Module) -> dict[nn.Module, type[Part]]:
    """The class that each module gets."""
    return {m: _class_of(m, ParallelModule if m is model else Submodule) for m in model.modules()}


def _class_of(module: Any, role: Any) -> type[Part]:
    """The class of a part, of the same name as the module's own: one for all modules of a class."""
    kind: Any = type(module)
    return _made(kind, role)


@cache
def _made(original: Any, role: Any) -> type[Part]:
    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], BlockCall):
            return args[0].run(args[1:])
        if STATE not in self.__dict__:  # Of a copy that is captured: somebody kept `model.forward`.
            return original.forward(self, *args, **kwargs)
        return executable_of(self)(args, kwargs)

    def counted(method: Any) -> Any:
        @wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (state := state_of(self)) is not None:
                state.tree.version += 1
            return method(self, *args, **kwargs)

        return called

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return original(
            *args, **kwargs
        )  # Whoever calls a model's class, as a slice of a ModuleList, wants another one.

    names: dict[str, Any] = {
        name: counted(getattr(original, name)) for name in SETTERS if callable(getattr(original, name, None))
    }  # fmt: skip
    names |= {
        ORIGINAL: original, "__new__": new, "forward": forward, "__doc__": original.__doc__,
        "__module__": original.__module__, "__qualname__": original.__qualname__,
    }  # fmt: skip
    meta: Any = type(original)
    made: type[Part] = _kind_of(meta)(original.__name__, (*classes_before(original), role, original), names)
    return made


@cache
def _kind_of(meta: Any) -> Any:
    """The class of the classes of parts: what is set on one (`type(model.attn).helper = f`) is set on the original.

    Whoever puts back what was there for a while puts back the part's own, and means the original's.
    """

    class Kind(meta):
        def __setattr__(cls, name: str, value: Any) -> None:
            original = vars(cls).get(ORIGINAL)  # A class that torch derives (parametrized, sharded) is its own.
            if original is None or name.startswith("__") or name == "_abc_impl":
                super().__setattr__(name, value)
            else:
                own = name in vars(cls) and vars(cls)[name] is value
                setattr(original, name, value.__wrapped__ if own else value)

        def __delattr__(cls, name: str) -> None:
            original = vars(cls).get(ORIGINAL)  # A class that torch derives (parametrized, sharded) is its own.
            if original is None or name.startswith("__") or name in vars(cls):
                super().__delattr__(name)
            else:
                delattr(original, name)

    return Kind


def adopt(
    model: nn.Module,
    classes: Mapping[nn.Module, type[Part]],
    tensors: Mapping[str, Tensor],
    tree: Tree,
    layouts: Mapping[str, Layout],
) -> None:
    """Makes a model, whose parameters were taken over, a parallel one: see NOTE [The model stays the user's].

    Args:
        tensors: first name -> this rank's part of a parameter (or the parameter itself), or a buffer.
    """
    parts: dict[int, tuple[Tensor, Layout | None]] = {id(b): (tensors[n], None) for n, b in model.named_buffers()}
    for name, p in model.named_parameters():
        mine = tensors[name]
        own = mine if isinstance(mine, nn.Parameter) else nn.Parameter(mine, p.requires_grad)
        own.__dict__.update(p.__dict__)
        parts[id(p)] = as_cut(own, Cut(name, layouts[name], tree.mesh, tree.warned)), layouts[name]
    for module, kind in classes.items():
        held = {key: parts[id(p)][1] for key, p in module._parameters.items() if p is not None}
        for table in (module._parameters, module._buffers):
            table.update({key: parts[id(tensor)][0] for key, tensor in table.items() if tensor is not None})  # type: ignore[misc]
        _give(module, kind, tree, {key: layout for key, layout in held.items() if layout is not None})


def _give(module: nn.Module, kind: type[Part], tree: Tree, held: Mapping[str, Layout]) -> None:
    """Makes one module a part of a parallel model."""
    own = {name: module.__dict__[name] for name in (*HOOKS, "forward") if name in module.__dict__}
    for name in own:
        module.__dict__.pop(name)
    module.__dict__.update({name: OrderedDict() for name in HOOKS if name in own})
    module.__dict__[STATE] = state = ModuleState(tree, held, own)
    state.known = {key: p for key, p in module._parameters.items() if p is not None}
    module.__class__ = kind


# ---- what comes later


def renew(model: nn.Module, tree: Tree) -> None:
    """Takes in the modules and parameters that were put into a parallel model: whole, with the first rank's values.

    Raises:
        Error: a parameter was replaced by what is neither whole nor this rank's part, or by no ordinary tensor; a
            module was parametrized.
    """
    sharded = {part for unit in model.modules() if isinstance(unit, FSDPModule) for part in unit.modules()}
    for path, module in list(model.named_modules()):
        state, added = state_of(module), list[Tensor]()
        if state is not None:
            _expect_unparametrized(path, module)
        else:
            _give(module, _class_of(module, Submodule), tree, {})
            state = module.__dict__[STATE]
            state.known, added = {}, [tensor for tensor in module._buffers.values() if tensor is not None]
        now = {key: p for key, p in module._parameters.items() if p is not None}
        for key, p in now.items():
            if state.known.get(key) is not p and (module not in sharded or key not in state.held):
                name = f"{path}.{key}" if path else key
                state.held[key] = _layout_now(name, p, state.held.get(key), tree.mesh)
                as_cut(p, Cut(name, state.held[key], tree.mesh, tree.warned))
                added += [p] * (state.held[key].dim is None)
        state.known, state.held = now, {key: layout for key, layout in state.held.items() if key in now}
        for tensor in added:
            tensor.data = broadcast_from_first(tensor.data.to(tree.mesh.device), tree.mesh)


def _expect_unparametrized(path: str, module: nn.Module) -> None:
    parts = module._modules.get("parametrizations")
    if parametrize.is_parametrized(module) and parts is not None and state_of(parts) is None:
        raise Error(
            f"`{path}` was parametrized when its model was parallel already, and its weight is cut",
            fix="parametrize the original model, before autotp.parallelize",
        )


def _layout_now(name: str, tensor: Tensor, before: Layout | None, mesh: Mesh) -> Layout:
    """How a parameter is held that somebody put into a parallel model."""
    if not is_ordinary(tensor):
        raise Error(
            f"`{name}` was replaced by a {type(tensor).__name__} when its model was parallel already",
            fix="quantize the original model, or do without",
        )
    shape = tuple(tensor.shape)
    if before is None or before.dim is None or shape == before.shape:
        return Layout(shape)
    if shape == before.local_shape(mesh.rank):
        return before
    raise Error(
        f"`{name}` was replaced by a parameter {list(shape)}, which is neither {list(before.shape)}, the whole, nor "
        f"{list(before.local_shape(mesh.rank))}, this rank's part",
        fix="another module, or do so before autotp.parallelize",
    )
