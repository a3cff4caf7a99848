"""The modules of a parallel model: each is an instance of a subclass of its original class.

See NOTE [The model stays the user's] in `tree.py`. `copy.deepcopy` of a parallel model is another parallel model.
"""

from __future__ import annotations

from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from inspect import Parameter, signature
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from autotp.diagnostics.plan import Plan
from autotp.diagnostics.report import report
from autotp.distributed.agreement import agree
from autotp.distributed.cut_tensors.cut_parameter import (
    Cut,
    CutTensor,
    as_cut,
    is_plain_or_cut,
    own_parameter,
    part_like,
)
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.cut_tensors.whole_operators import WholeView
from autotp.distributed.gather import gather_all
from autotp.distributed.live_models import models, watch_instead, watch_model
from autotp.distributed.mesh import Mesh, broadcast_from_first, gather_ints
from autotp.distributed.peers.heartbeat import expect_all_to_call, take_note_back
from autotp.distributed.replica_check import common_ranks, ranks_of
from autotp.errors import Error, within
from autotp.model_library import library
from autotp.options import Recompute
from autotp.passes.capture.python_state.walk import is_internal
from autotp.passes.capture.skeleton import expect_copyable
from autotp.passes.capture.unsupported.lost_gradients import BACKWARD_HOOK
from autotp.passes.emit.async_tensor_parallel import FusedPairs
from autotp.passes.emit.attach_parameters import BlockCall, in_places
from autotp.passes.plan.choose import OtherCut
from autotp.runtime.calls.executable import Executable
from autotp.runtime.torch_hooks.loading import cutting, parts_to_load
from autotp.runtime.tree import ORIGINAL, ModuleState, Tree, copy_as, give_state, original_class, state_of
from autotp.sharding.layout import Layout
from autotp.source_location import calling_frame, reads_for_caller, reads_to_fill
from autotp.tracebacks import shorten_traceback

FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")


SETTERS = (
    "register_buffer", "add_module", "append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault",
    "__setitem__", "__delitem__",
)  # fmt: skip
"""Methods of modules and containers of modules that change their contents without setting an attribute."""


class Part(nn.Module):
    """A module of a parallel model. See NOTE [The model stays the user's]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Asks the model's classes about classes that others derive, but not about ours.

        A base class may wrap `forward` of each class that is derived from it, or list these classes; transformers'
        layers do the first. Our class is no new class to its users, and what is assigned to it changes the original.
        """
        if ORIGINAL not in vars(cls):
            super().__init_subclass__(**kwargs)

    def __getattr__(self, name: str) -> Any:
        own_name = any(name in table for table in (self._parameters, self._buffers, self._modules))
        if name in OURS and state_of(self) is not None and not own_name:  # First: a class as peft's asks another model.
            return OURS[name](executable_of(self))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = state_of(self)
        if isinstance(value, Sharded | WholeView) and isinstance(value, nn.Parameter):
            value = own_parameter(name, value)
        if name == "__class__" and value is original_class(type(self)) and value.__module__ == parametrize.__name__:
            value = value.__bases__[0]  # torch ends a parametrization: it takes the first base of a class.
        if name == "__class__" and state is not None and not issubclass(value, Part):
            state.tree.version += 1
            value = _made(value, ParallelModule if isinstance(self, ParallelModule) else Submodule)
        if state is None or (is_internal(name) and name != "training"):
            return super().__setattr__(name, value)
        sharded = isinstance(value, DTensor) and name in state.held  # Loaded with assign=True, for example.
        if isinstance(value, nn.Parameter) and (sharded or _is_sharding(calling_frame())):
            cut = getattr(self._parameters.get(name), "autotp_cut", None)
            cut = cut or Cut(name, state.held[name], state.tree.mesh)
            if cut.hooks_run and isinstance(value, DTensor):
                cut = replace(cut, hooks_run=False)
            self._parameters[name] = as_cut(value, cut)  # As nn.Module's own `__setattr__` does.
            return
        if name == "training":
            state.tree.modes += 1
            return super().__setattr__(name, value)
        state.tree.version += self._is_known(name, value, state.tree)
        if name == "forward":  # The next capture uses it: a call of this module runs a graph.
            _hold_forward(self, value)
        else:
            super().__setattr__(name, value)

    def _is_known(self, name: str, value: Any, tree: Tree) -> bool:
        """True if setting an attribute may change a graph; False for an attribute that no graph reads."""
        cls = original_class(type(self))
        tables = (self._parameters, self._buffers, self._modules)
        is_part = isinstance(value, (nn.Module, nn.Parameter)) or any(name in table for table in tables)
        has_setter = cls.__setattr__ is not nn.Module.__setattr__ or hasattr(getattr(cls, name, None), "__set__")
        return is_part or has_setter or name == "forward" or name in tree.read

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter; raises Error for one that this module has under another name: pruning begins so."""
        state, param = state_of(self), own_parameter(name, param)
        if state is not None:
            state.tree.version += 1
        if state is not None and param is not None:
            before = next((key for key, p in self._parameters.items() if key != name and p is param), None)
            if before is not None:
                raise Error(
                    f"`{before}` of a {type(self).__name__} becomes `{name}` in a parallel model, as pruning does it",
                    fix="prune the original model, before autotp.parallelize",
                )
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        state = state_of(self)
        if state is not None:
            state.tree.version += 1
            if name == "forward" and name in state.own:
                del state.own[name]
        super().__delattr__(name)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the state dict of the original model, or one that `state_dict()` returned on this rank.

        Call it on every rank, with the whole tensors on each; `autotp.load_full_state_dict` needs them on one.

        Args:
            state_dict: name -> the whole tensor, or this rank's part.
            args, kwargs: as for `torch.nn.Module.load_state_dict`.

        Raises:
            Error: on every rank, and nothing is changed: a tensor has neither of these shapes.
        """
        # Bound here, as `super()` finds no `self` in the function below.
        state, inherited = state_of(self), super().load_state_dict
        if state is None:
            return inherited(state_dict, *args, **kwargs)

        def load() -> Any:
            gather_ints([], state.tree.mesh)  # All ranks are here.
            take_note_back()
            renew(self, state.tree)  # Modules may have been added since the last call.
            # All ranks have their parts before one of them loads, so an error leaves every rank's model as it was.
            parts = agree(state.tree.mesh, lambda: parts_to_load(self, state_dict, state.tree.mesh.rank))
            state.tree.loaded += 1
            return agree(state.tree.mesh, lambda: inherited(parts, *args, **kwargs))

        _expect_no_swap(self, "load_state_dict")
        expect_all_to_call("load_state_dict")
        return within(f"{type(self).__name__}.load_state_dict", load)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state = state_of(self)
        if state is None:
            return super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        last = self._register_load_state_dict_pre_hook(cutting(self, state.tree.mesh.rank))
        try:
            return super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        finally:
            last.remove()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        reader = calling_frame()
        while reader.f_back is not None and reads_for_caller(reader):
            reader = reader.f_back
        if reads_to_fill(reader):
            return
        for key, p in self._parameters.items():
            if isinstance(p, CutTensor):
                part_like(destination.get(f"{prefix}{key}"), p)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        _expect_no_swap(self, "conversion")
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Returns the original module's text, and the layout of each parameter that is cut."""
        state = state_of(self)
        layouts = [f"{key} {layout}" for key, layout in state.held.items() if layout.dim is not None] if state else []
        return ", ".join(text for text in (super().extra_repr(), *layouts) if text)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return copy_as(self, type(self), vars(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a parallel model cannot be pickled: it is tied to its process group",
            fix="save model.state_dict() on each rank, or autotp.full_state_dict(model)",
        )


class Submodule(Part):
    """A submodule of a parallel model. Only the whole model takes hooks: the graph contains the work of submodules.

    A block is called with other arguments than in the original model. So only hooks of torch.distributed
    (`fully_shard`), which do not read arguments, are allowed there.
    """

    def _register(self, method: str, hook: Any, args: Any, kwargs: Any) -> Any:
        state = state_of(self)
        if state is not None and not getattr(hook, "__module__", "").startswith("torch.distributed."):
            raise Error(
                "a hook on a submodule of a parallel model would never run: its work is part of the model's graph",
                fix=BACKWARD_HOOK
                if "backward" in method
                else "register it on the original model before autotp.parallelize, or on the whole parallel model",
            )
        if state is not None and not state.is_block:
            raise Error(
                f"fully_shard({type(self).__name__}): this part of a parallel model is not a block: it is never called",
                fix="fully_shard each numbered block, such as model.h[0], and the model",
            )
        return getattr(super(), method)(hook, *args, **kwargs)

    def register_forward_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Registers a hook of torch.distributed on a block; raises Error for other hooks."""
        return self._register("register_forward_hook", hook, args, given)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Registers a hook of torch.distributed on a block; raises Error for other hooks."""
        return self._register("register_forward_pre_hook", hook, args, given)

    def register_full_backward_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Registers a hook of torch.distributed on a block; raises Error for other hooks."""
        return self._register("register_full_backward_hook", hook, args, given)

    def register_full_backward_pre_hook(self, hook: Any, *args: Any, **given: Any) -> Any:
        """Registers a hook of torch.distributed on a block; raises Error for other hooks."""
        return self._register("register_full_backward_pre_hook", hook, args, given)


class ParallelModule(Part):
    """One rank of a tensor-parallel model: the user's own model, made parallel by `autotp.parallelize`.

    Parameters and buffers have the names of the original model; a parameter that is cut holds this rank's part. The
    attributes below are there too, unless the model has an attribute of the same name, which comes first.

    Attributes:
        plan: the plan of the graph that was captured last; raises Error if modules or parameters were replaced since.
        layouts: first name of a parameter -> layout: the shape of the whole, and the part of each rank.
        mesh: the tensor-parallel axis, and this rank's place on it.
        recompute: the values that backward computes again. If it is set, the next call captures a new graph.
        code: the Python code of this rank's graph that was captured last, with each block once.
        compile_blocks: compiles the blocks, once for all blocks that compute alike; takes the keyword arguments of
            `torch.compile`. With `async_tp=True` torch fuses products with their all-gathers and reduce-scatters, and
            it returns what is fused.
        layout_of: any name of a parameter -> layout; None for a buffer.
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
    compile_blocks: Callable[..., FusedPairs | None]
    layout_of: Callable[[str], Layout | None]
    outputs_stay_cut: Callable[[], AbstractContextManager[None]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recompute" and state_of(self) is not None and not _has(self, name):
            executable_of(self).tree.set_recompute(value)
        else:
            super().__setattr__(name, value)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Removes the gradients of all parameters, as torch does it, without asking each part for its gradient.

        Args:
            args, kwargs: as for `torch.nn.Module.zero_grad`, or for the model's own method, which runs as it is.
        """
        if original_class(type(self)).zero_grad is not nn.Module.zero_grad:
            return super().zero_grad(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return super().zero_grad(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Takes this rank's parts of what a module around the model is loaded with, such as torch's `AveragedModel`."""
        state = state_of(self)
        if state is not None and prefix:  # Without a prefix it is our own `load_state_dict`, which has done this.
            _expect_no_swap(self, "load_state_dict")
            mesh, start = state.tree.mesh, len(prefix)
            entries = {key[start:]: value for key, value in state_dict.items() if key.startswith(prefix)}

            def load() -> Mapping[str, Any]:
                gather_ints([], mesh)  # All ranks are here.
                take_note_back()
                renew(self, state.tree)
                return agree(mesh, lambda: parts_to_load(self, entries, mesh.rank))

            expect_all_to_call("load_state_dict")
            parts = within(f"{type(self).__name__}.load_state_dict", load)
            state.tree.loaded += 1
            state_dict.update({f"{prefix}{key}": value for key, value in parts.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Returns the original module's text, and this rank's place on the mesh."""
        place = str(executable_of(self).mesh) if state_of(self) is not None else ""
        return ", ".join(text for text in (super().extra_repr(), place) if text)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return watch_model(super().__deepcopy__(memo))


OURS: dict[str, Callable[[Executable], Any]] = {
    "plan": lambda executable: report(
        executable.graphs.latest.analysis, executable.name, emitted=executable.graphs.latest.ready.module
    ),
    "layouts": lambda executable: executable.structure.layouts,
    "mesh": lambda executable: executable.mesh,
    "recompute": lambda executable: executable.tree.settings.recompute,
    "code": lambda executable: executable.code,
    "compile_blocks": lambda executable: executable.compile_blocks,
    "layout_of": lambda executable: executable.structure.layout_of,
    "outputs_stay_cut": lambda executable: executable.tree.outputs_stay_cut,
}
"""Attributes such as `model.plan`, unless the model itself has an attribute of this name."""


def _expect_no_swap(module: nn.Module, action: str) -> None:
    """Raises Error if torch would replace parts by plain parameters, in the same objects."""
    if state_of(module) is not None and torch.__future__.get_swap_module_params_on_conversion():
        raise Error(
            f"{action} of a parallel model by swapping its parameters",
            fix="torch.__future__.set_swap_module_params_on_conversion(False)",
        )


def _is_sharding(frame: FrameType) -> bool:
    """True for code of `fully_shard`, which puts gathered parameters into modules and removes them in each call."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.fsdp.")


def _has(module: nn.Module, name: str) -> bool:
    """True if the model itself has an attribute of this name."""
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in table for table in tables) or any(name in vars(base) for base in type(module).__mro__)


def executable_of(module: nn.Module) -> Executable:
    """Returns the graphs of a module of a parallel model.

    NOTE [A part by itself]
    The graphs of a model contain the work of its submodules. A submodule that is called by itself (an encoder, before
    its decoder generates) captures its own graphs, with the present layouts of its parameters. If these are cut along
    an axis that its own graph does not have (key heads that two ranks hold, in a projection alone), its forward runs as
    user code, with cut parameters that behave as wholes.
    """
    state = state_of(module)
    assert state is not None
    if state.executable is None:
        with _own_parameters(module):
            renew(module, state.tree)
            state.executable = Executable(module, state.tree)
    executable: Executable = state.executable
    if executable.structure.seen != state.tree.version:
        with _own_parameters(module):
            executable.uncompiled(renew, module, state.tree)
            executable.uncompiled(executable.structure.look_again)
    if executable.structure.seen_modes != state.tree.modes:
        executable.structure.look_at_modes()
    return executable


def _own_parameters(module: nn.Module) -> AbstractContextManager[None]:
    """A region in which a module has its own parameters, also in a `functional_call`, which puts others there."""
    if torch.compiler.is_compiling():  # Dynamo has no frames.
        return nullcontext()
    frame: FrameType | None = calling_frame(2)
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == ("_functional_call", "torch.nn.utils.stateless"):
            states = [(part, state_of(part)) for part in module.modules()]
            return in_places({(part, key): p for part, state in states if state for key, p in state.known.items()})
        frame = frame.f_back
    return nullcontext()


# ---- making a model parallel


def classes_of(model: nn.Module) -> dict[nn.Module, type[Part]]:
    """Returns the new class of each module."""
    return {m: _class_of(m, ParallelModule if m is model else Submodule) for m in model.modules()}


def _class_of(module: Any, role: Any) -> type[Part]:
    """Returns the new class of a module, with the name of its own class; all modules of a class share it."""
    cls: Any = type(module)
    return _made(cls, role)


@cache
def _made(original: Any, role: Any) -> type[Part]:
    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A graph calls its block's module, so that the hooks of `fully_shard` on the module run around the block.
        if args and isinstance(args[0], BlockCall):
            return args[0].run(args[1:])
        if (state := state_of(self)) is None:  # A copy for capture has this class if the user kept `model.forward`.
            return original.forward(self, *args, **kwargs)
        try:
            # Tried again once the tree has changed: its graph may have the axis now.
            if state.unfit != state.tree.version:
                try:
                    return executable_of(self)(args, kwargs)
                except OtherCut as error:  # NOTE [A part by itself]
                    if isinstance(self, ParallelModule) or any(state.own.values()):  # It has hooks, or another forward.
                        raise error.for_user() from None
                    state.unfit = state.tree.version
            result = original.forward(self, *args, **kwargs)
            # User code has computed with cut tensors, so what it returns may be cut.
            return result if state.tree.settings.outputs == "local" else gather_all(result)
        except Exception as error:
            shorten_traceback(error, isinstance(error, Error))
            raise

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
        )  # A call of the class, as in a slice of a ModuleList, makes an ordinary module.

    names: dict[str, Any] = {
        name: counted(getattr(original, name)) for name in SETTERS if callable(getattr(original, name, None))
    }  # fmt: skip
    names |= {
        ORIGINAL: original, "__new__": new, "forward": forward, "__doc__": original.__doc__,
        "__module__": original.__module__, "__qualname__": original.__qualname__,
    }  # fmt: skip
    meta: Any = type(original)
    made: type[Part] = _kind_of(meta)(original.__name__, (original, *library().classes_before(original), role), names)
    return made


@cache
def _kind_of(meta: Any) -> Any:
    """Returns the metaclass of new classes: it forwards assignments (`type(model.attn).helper = f`) to the original.

    Code that restores an attribute after a while passes the new class's own value; the original's value is meant.
    A new class is equal to its original, for `type(module) == nn.Linear`. Their hashes differ: in a dict by classes, as
    that of `fully_shard`, they are two keys.

    NOTE [The first base]
    Python lets a module change its class only if both classes lay out an object alike, which it sees by following their
    first bases. So the original class is the first base. Our classes come before it in the order of methods only.
    """

    class ParallelMeta(meta):
        def __new__(mcs, name: str, bases: Any, names: Any, **kwargs: Any) -> Any:
            """Returns a class; the metaclass of the model is not asked about ours, which is no new class to it."""
            if ORIGINAL not in names:
                return super().__new__(mcs, name, bases, names, **kwargs)
            extra = {"_abc_impl": ABCMeta("", (), {})._abc_impl} if issubclass(meta, ABCMeta) else {}  # type: ignore[attr-defined]
            return type.__new__(mcs, name, bases, names | extra)  # `isinstance` keeps what it found in `_abc_impl`.

        def __init__(cls, name: str, bases: Any, names: Any, **kwargs: Any) -> None:
            if ORIGINAL not in names:
                super().__init__(name, bases, names, **kwargs)

        def mro(cls) -> list[type]:
            if ORIGINAL not in vars(cls):
                return super().mro()
            original, *part_bases = cls.__bases__
            before = [ancestor for base in part_bases for ancestor in base.__mro__ if ancestor not in original.__mro__]
            # Our methods come first, though the original class is the first base: NOTE [The first base].
            return [cls, *dict.fromkeys(before), *original.__mro__]

        def __eq__(cls, other: object) -> bool:
            return cls is other or vars(cls).get(ORIGINAL, cls) is other

        # Python takes `__hash__` from a class that defines `__eq__`.
        __hash__ = meta.__hash__

        def __setattr__(cls, name: str, value: Any) -> None:
            original = vars(cls).get(ORIGINAL)  # A class that torch derives (parametrized, sharded) is its own.
            if original is None or name.startswith("__") or name == "_abc_impl":
                super().__setattr__(name, value)
            else:
                is_class_attribute = name in vars(cls) and vars(cls)[name] is value
                setattr(original, name, value.__wrapped__ if is_class_attribute else value)

        def __delattr__(cls, name: str) -> None:
            original = vars(cls).get(ORIGINAL)  # A class that torch derives (parametrized, sharded) is its own.
            if original is None or name.startswith("__") or name in vars(cls):
                super().__delattr__(name)
            else:
                delattr(original, name)

    return ParallelMeta


def adopt(
    model: nn.Module,
    classes: Mapping[nn.Module, type[Part]],
    tensors: Mapping[str, Tensor],
    tree: Tree,
    layouts: Mapping[str, Layout],
) -> None:
    """Makes a model parallel after its parameters are cut: see NOTE [The model stays the user's].

    Args:
        tensors: first name -> this rank's part of a parameter (or the parameter itself), or a buffer.
    """
    parts: dict[int, tuple[Tensor, Layout | None]] = {id(b): (tensors[n], None) for n, b in model.named_buffers()}
    for name, p in model.named_parameters():
        part = tensors[name]
        parameter = part if isinstance(part, nn.Parameter) else nn.Parameter(part, p.requires_grad)
        # What user code has set on a parameter object stays on it.
        parameter.__dict__.update(p.__dict__)
        parts[id(p)] = as_cut(parameter, Cut(name, layouts[name], tree.mesh)), layouts[name]
    for module, cls in classes.items():
        own_layouts = {key: parts[id(p)][1] for key, p in module._parameters.items() if p is not None}
        for table in (module._parameters, module._buffers):
            table.update({key: parts[id(tensor)][0] for key, tensor in table.items() if tensor is not None})  # type: ignore[misc]
        _give(module, cls, tree, {key: layout for key, layout in own_layouts.items() if layout is not None})


def _give(module: nn.Module, cls: type[Part], tree: Tree, layouts: Mapping[str, Layout]) -> None:
    """Makes one module a module of a parallel model."""
    attributes = vars(module)
    # Hooks of the original are captured into the graph. A call of the module must not run them once more.
    hooks = {name: attributes.pop(name) for name in FORWARD_HOOKS if name in attributes}
    attributes.update({name: OrderedDict() for name in hooks})
    user_forward = attributes.pop("forward", None)
    state = give_state(module, ModuleState(tree, layouts, hooks))
    state.known = {key: p for key, p in module._parameters.items() if p is not None}
    vars(object)["__class__"].__set__(module, cls)  # Not by assignment: the module's `__setattr__` may do anything.
    if user_forward is not None:
        _hold_forward(module, user_forward)


def call_through(model: ParallelModule, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has calls of a parallel model go through another function, outside of its graph.

    Args:
        wrap: takes the function of `model.forward`, without `self`, and returns the one that is called.
    """
    vars(model)["forward"] = MethodType(wrap(model.forward.__func__), model)  # type: ignore[attr-defined]


def _hold_forward(module: nn.Module, user_forward: Any) -> None:
    """Keeps a `forward` that the user gave to one module.

    The next capture runs it. Who reads `model.forward`, to put another function around it, gets a function that stands
    for it: a call of it on the parallel model runs the graph, and a call on the copy for capture runs what was given.
    """
    state = state_of(module)
    assert state is not None
    run = type(module).forward

    @wraps(user_forward, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return user_forward(*args, **kwargs) if state_of(self) is None else run(self, *args, **kwargs)

    with suppress(ValueError, TypeError):  # Not every callable has one.
        arguments = signature(user_forward)  # Of `model.forward`, too: a Trainer chooses columns of data by it.
        module_parameter = Parameter("module", Parameter.POSITIONAL_ONLY)
        untyped_forward: Any = forward
        untyped_forward.__signature__ = arguments.replace(parameters=[module_parameter, *arguments.parameters.values()])
    state.own["forward"] = user_forward
    vars(module)["forward"] = MethodType(forward, module)


# ---- later changes of a parallel model


def expect_own_calls(model: ParallelModule) -> None:
    """Raises Error if calls of a parallel model go through other functions, as after `call_through`."""
    state = state_of(model)
    assert state is not None
    if "forward" in vars(model) and "forward" not in state.own:
        raise Error(
            f"calls of this {type(model).__name__} go through functions of a training loop, which would be lost",
            fix="put other modules around the model first, and give it to the loop then",
        )


def put_around(outer: nn.Module, inner: ParallelModule) -> ParallelModule:
    """Makes a module the parallel model, in place, that was put around a parallel model; `inner` is a part of it then.

    What is new in it is whole on every rank, with the first rank's values. All ranks call this, after
    `expect_own_calls`.
    """
    expect_copyable(outer)
    state, attributes = state_of(inner), vars(inner)
    assert state is not None
    for name in HOOKS:  # They ran outside of its graph. They are a part of the outer model's.
        if later := attributes.get(name):
            earlier = state.own.get(name) or later  # The same dict, as handles have it.
            earlier.update(later)
            state.own[name], attributes[name] = earlier, OrderedDict()
    original: Any = original_class(type(inner))
    vars(object)["__class__"].__set__(inner, _made(original, Submodule))
    state.executable = None
    _give(outer, _class_of(outer, ParallelModule), state.tree, {})
    state.tree.version += 1
    watched: Any = watch_instead(outer, inner)
    # Takes in what is new now, while all ranks are here.
    executable_of(watched)
    return watched


def renew(model: nn.Module, tree: Tree) -> None:
    """Takes in modules and parameters that were put into a parallel model: whole, with the first rank's values.

    Raises:
        Error: a new parameter has neither the shape of the whole nor of this rank's part, or is not an ordinary
            parameter; a module was parametrized; or a new module is of a class that cannot be copied.
    """
    expect_copyable(model)
    # `fully_shard` puts gathered parameters into its modules and takes them out again: these are not new.
    sharded = {part for unit in model.modules() if isinstance(unit, FSDPModule) for part in unit.modules()}
    for path, module in list(model.named_modules()):
        state, added = state_of(module), list[Tensor]()
        if state is not None:
            _expect_unparametrized(path, module)
            if state.tree is not tree and all(_tree_of(parallel) is not state.tree for parallel in models()):
                state.tree = tree  # A copy of a part came with a copy of the tree.
        else:
            _give(module, _class_of(module, Submodule), tree, {})
            state = state_of(module)
            assert state is not None
            state.known, added = {}, [tensor for tensor in module._buffers.values() if tensor is not None]
        now = {key: p for key, p in module._parameters.items() if p is not None}
        for key, p in now.items():
            if state.known.get(key) is not p and (module not in sharded or key not in state.held):
                name = f"{path}.{key}" if path else key
                state.held[key] = _layout_now(name, p, state.held.get(key), tree.mesh)
                as_cut(p, Cut(name, state.held[key], tree.mesh))
                # A part has values of its own; only what all ranks hold whole is sent.
                added += [p] * (state.held[key].dim is None)
        state.known, state.held = now, {key: layout for key, layout in state.held.items() if key in now}
        for tensor in added:
            tensor.data = broadcast_from_first(tensor.data.to(tree.mesh.device), tree.mesh)


def _tree_of(model: nn.Module) -> Tree | None:
    state = state_of(model)
    return None if state is None else state.tree


def _expect_unparametrized(path: str, module: nn.Module) -> None:
    parts = module._modules.get("parametrizations")
    if parametrize.is_parametrized(module) and parts is not None and state_of(parts) is None:
        raise Error(
            f"`{path}` was parametrized when its model was parallel already, and its weight is cut",
            fix="parametrize the original model, before autotp.parallelize",
        )


def _layout_now(name: str, tensor: Tensor, before: Layout | None, mesh: Mesh) -> Layout:
    """Returns the layout of a parameter that was put into a parallel model."""
    if not is_plain_or_cut(tensor):
        raise Error(
            f"`{name}` was replaced by a {type(tensor).__name__} when its model was parallel already",
            fix="the parameter as it was: quantized weights cannot be cut, before autotp.parallelize or after",
        )
    if isinstance(tensor, CutTensor):  # A part of another parameter: tied, or copied.
        expect_part(name, tensor, tensor.autotp_cut.layout, tensor.autotp_cut.mesh)
        return _layout_of_part(name, tensor.autotp_cut, mesh)
    shape = tuple(tensor.shape)
    # A whole in the place of a part stays whole: the next graph is planned with that.
    if before is None or before.dim is None or shape == before.shape:
        return Layout(shape)
    if shape == before.local_shape(mesh.rank):
        return before
    raise Error(
        f"`{name}` was replaced by a parameter {list(shape)}, which is neither {list(before.shape)}, the whole, nor "
        f"{list(before.local_shape(mesh.rank))}, this rank's part",
        fix="another module, or do so before autotp.parallelize",
    )


def expect_part(name: str, tensor: Tensor, layout: Layout, mesh: Mesh) -> None:
    """Raises Error if a parameter is not of its part's shape: the whole is in its place, and autotp was not told."""
    shape, part = tuple(tensor.shape), layout.local_shape(mesh.rank)
    if shape != part:
        raise Error(
            f"`{name}` is {list(shape)} now, and this rank's part is {list(part)}",
            fix="autotp.full_state_dict, and remove parametrizations in the original model",
            alternative="module.name = parameter, which autotp sees; it does not see module._parameters",
        )


def _layout_of_part(name: str, cut: Cut, mesh: Mesh) -> Layout:
    """Returns the layout of a part that was put in the place of another parameter, whatever that one's layout was."""
    if (cut.mesh.size, common_ranks(ranks_of(mesh), cut.mesh)) == (mesh.size, ranks_of(mesh)):
        return cut.layout
    raise Error(
        f"`{name}` was replaced by `{cut.name}` of a model that is cut over other ranks",
        fix="autotp.full_state_dict of one model, autotp.load_full_state_dict of the other one",
    )
