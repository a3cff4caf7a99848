"""A parameter that holds a rank's part, and behaves as the whole to the code of its users.

Outside of the model's graphs, user code computes with whole tensors: `p.shape` is that of the whole, `p.norm()` that of
all ranks, and `p[3] = 0` writes the row on the rank that has it. Each operator that user code calls on a part runs on a
`Sharded` that stands for the whole; one on a part whose rows `zero=` or `fully_shard` gave to replicas, on a
`WholeView`. Inside the graphs, and in torch's own optimizers, parts are plain tensors, and DTensors over replicas.

NOTE [Plain in a step]
During a step of torch's elementwise optimizers, and of others that a trial showed to be so, parameters, their gradients
and their states are plain tensors: otherwise each `p.grad`, and each operator in a loop over parameters, would go
through Python. User code runs with parts that behave as wholes, also in a closure and in hooks on the step. If a step
raises, its parameters stay plain until the next step.

NOTE [Who asks]
torch's own code (`state_dict`, `deepcopy`, wrappers) is right on parts, or is refused elsewhere. So only operators that
user code calls, directly or through functions and layers of torch, see wholes. Other libraries are user code.

NOTE [Parts in compiled code]
Dynamo calls `__torch_function__` for operators of user code. Inside of autotp's graphs it is switched off.
`torch.compiler.disable` has it leave the compiled code for such an operator, which then runs as it does elsewhere.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autotp.attached import Marks, attach, attached, attached_if_any
from autotp.distributed.cut_tensors.cut_operators import Access, access_of
from autotp.distributed.cut_tensors.rows_of_parts import rows_to_set, set_rows, whole_of_rows
from autotp.distributed.cut_tensors.sharded_tensor import (
    CompiledOutput,
    Sharded,
    as_dtensor,
    as_sharded,
    full,
    memory_refused,
    part_of,
    reads_memory,
    sharded,
)
from autotp.distributed.cut_tensors.whole_operators import WholeView, shape_refused
from autotp.distributed.live_models import Undo
from autotp.distributed.mesh import Mesh
from autotp.distributed.replica_check import expect_replicas
from autotp.errors import Error
from autotp.sharding.boxes import all_rows
from autotp.sharding.layout import Layout
from autotp.source_location import calling_frame, is_users
from autotp.torch_internals import NEED_WHOLES, PASSES_ON, RIGHT_ON_PARTS, expect_callers


@dataclass
class Cut:
    """The facts about a part.

    Attributes:
        name: the parameter's name in the model.
        layout: its layout.
        mesh: the ranks that hold it.
        hooks_run: whether hooks on its gradient run. `fully_shard` sums gradients without them; a trainer runs them.
    """

    name: str
    layout: Layout
    mesh: Mesh
    hooks_run: bool = True

    @cached_property
    def held(self) -> Layout:
        """The layout without its shape, as `Sharded` has it."""
        return replace(self.layout, shape=())


def _removes(frame: FrameType) -> bool:
    """True for torch's `zero_grad` of a module: in each step it asks each parameter for its gradient, to remove it."""
    return frame.f_code is nn.Module.zero_grad.__code__


class CutTensor(Tensor):
    """A tensor of which this rank holds a part: a parameter, its gradient, or an optimizer's state.

    Attributes:
        autotp_cut: the facts about this parameter.
    """

    autotp_cut: Cut

    @classmethod
    @torch.compiler.disable  # NOTE [Parts in compiled code]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        category = access_of(func)
        frame = calling_frame(2)  # Behind the one of `disable`.
        if func is Tensor.data_ptr and reads_memory(frame):
            raise memory_refused(f"`{args[0].autotp_cut.name}`")
        if category is Access.ABOUT or (category in (Access.GRADIENT, Access.SET) and _removes(frame)):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if frame.f_globals.get("__name__") == "torch.nn.parameter":  # `nn.Parameter(x)` must have the class of x.
            made = part_like(torch._C._disabled_torch_function_impl(func, types, args, kwargs or {}), args[0])
            if type(made) is CutTensor:
                _become(made, type(args[0]))
            return made
        user_asks = _asks(frame) and not _looks_for_node(frame, args)
        with torch._C.DisableTorchFunctionSubclass():
            if category is Access.REPLICAS:
                cut, group = _first(args, kwargs or {}).autotp_cut, (kwargs or {}).get("group")
                expect_replicas(
                    func.__name__, f"`{cut.name}`", torch.distributed.get_process_group_ranks(group), cut.mesh
                )
            if not user_asks:
                return _by_torch(func, args, kwargs or {}, frame)
            return FOR_USERS.get(category, _of_wholes)(func, args, kwargs or {})

    def to_local(self) -> Tensor:
        """Returns this rank's part, in the same memory, as a plain tensor. Gradients flow through it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.view_as(self) if self.requires_grad else self.detach()

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor: all ranks call this. Gradients flow through it."""
        with torch._C.DisableTorchFunctionSubclass():
            return full(self, self.autotp_cut.held, self.autotp_cut.mesh)

    def to_dtensor(self) -> DTensor:
        """Returns the same tensor as a DTensor, without its derivatives.

        Raises:
            Error: a DTensor cannot be cut so: in parts that are not those of `torch.chunk`.
        """
        cut = self.autotp_cut
        with torch._C.DisableTorchFunctionSubclass():
            strides = torch.empty(cut.layout.shape, device="meta").stride()
            return as_dtensor(self._as_part(), cut.held, cut.mesh, cut.layout.shape, strides)

    def _as_part(self) -> Tensor:
        """Returns the part as a tensor of torch, without its derivatives."""
        return self.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        cut = self.autotp_cut
        with torch._C.DisableTorchFunctionSubclass():
            part = repr(self.detach())
        return (
            f"{type(self).__name__}(local_tensor={part}, shape={list(cut.layout.shape)}, placements=[{_placed(cut)}])"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Takes other memory. (torch's does not ask `__torch_function__`.) Raises Error if the user gives the whole."""
        source = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            users = is_users(calling_frame())  # What torch's own code puts here is looked at in the next call.
            if users and isinstance(source, Tensor) and self.shape != source.shape == self.autotp_cut.layout.shape:
                raise Error(
                    f"`set_` of `{self.autotp_cut.name}`: this rank's part cannot take the memory of the whole",
                    fix="parameter.copy_(whole) under torch.no_grad()",
                )
            return super().set_(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copied = self._copied(memo).requires_grad_(self.requires_grad)
            _become(copied, type(self))
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        return memo[id(self)]

    def _copied(self, memo: dict[int, Any]) -> Tensor:
        # torch's own error stays for a tensor that is no leaf, which it does not copy.
        alias = self.detach() if self.is_leaf else self
        return copy.deepcopy(alias.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the whole, a plain tensor or parameter: all ranks call this."""
        whole_tensor = plain_whole(self).detach()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(whole_tensor, self.requires_grad).__reduce_ex__(protocol)
        return whole_tensor.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class CutParameter(CutTensor, nn.Parameter):
    """A parameter of which this rank holds a part."""


class CutDTensor(CutTensor, DTensor):
    """A parameter, gradient or state of which this rank holds some rows of a part, and its replicas the others.

    `zero=` and torch's `fully_shard` make a part a DTensor over the replicas. Here its class is changed in place, so
    that user code sees the whole. torch's own code sees the DTensor.
    """

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns this rank's rows of its part, as a DTensor does."""
        with torch._C.DisableTorchFunctionSubclass():
            return DTensor.to_local(self, *args, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Returns the whole tensor, for torch's own code the part: all ranks call this. Gradients flow through it."""
        with torch._C.DisableTorchFunctionSubclass():
            if is_users(calling_frame()):
                return plain_whole(self)
            return DTensor.full_tensor(self, **kwargs)

    def _as_part(self) -> Tensor:
        rows: Any = self.detach()
        return all_rows(rows)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """Redistributes over replicas, for torch's own code; raises Error for user code, which sees the whole."""
        with torch._C.DisableTorchFunctionSubclass():
            if is_users(calling_frame()):
                raise Error(
                    f"redistribute of `{self.autotp_cut.name}`, of which ranks hold parts, and replicas rows of these",
                    fix="tensor.full_tensor(), the whole; tensor.to_local(), the rows of this rank",
                )
            return DTensor.redistribute(self, *args, **kwargs)

    def _copied(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()


def _placed(cut: Cut) -> str:
    """Returns how a tensor is cut, as text: the one of DTensor where the parts are those of `torch.chunk`."""
    spans = [len(piece) for piece in cut.layout.pieces]
    uneven = max(spans) > 1 or cut.layout.repeated
    return f"Shard(dim={cut.layout.dim}{f', pieces={list(map(list, cut.layout.pieces))}' if uneven else ''})"


# ---- as the whole


def _whole_of(part: CutTensor) -> Any:
    """Returns the tensor of which this is the part. In gradient mode it is part of the graph of a parameter."""
    cut = part.autotp_cut
    if isinstance(part, CutDTensor):
        return whole_of_rows(part, cut.layout, cut.mesh)
    cut_tensor = sharded(part, cut.held, cut.mesh)
    if part.requires_grad and part.is_leaf:
        cut_tensor.of_leaf = True
    return cut_tensor


def plain_whole(part: CutTensor) -> Tensor:
    """Returns the whole as a plain tensor: all ranks call this. Gradients flow through it."""
    with torch._C.DisableTorchFunctionSubclass():
        operand: Tensor = as_sharded(_whole_of(part))
        return operand.full_tensor() if isinstance(operand, Sharded) else operand


STAND_FOR_WHOLES = (CutTensor, CompiledOutput, WholeView)
"""Classes of tensors for which `whole_operand` returns another tensor."""


def whole_operand(x: Any) -> Any:
    """Returns what stands for the whole in a call of a parallel model: a `Sharded`, or a plain tensor."""
    if isinstance(x, CutTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return _whole_of(x)
    return as_sharded(x)


def _of_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator with the wholes of parts."""
    parts: dict[int, tuple[CutTensor, Sharded | WholeView]] = {}

    def whole(x: Any) -> Any:
        if isinstance(x, CutTensor):
            if id(x) not in parts:
                parts[id(x)] = x, _whole_of(x)
            return parts[id(x)][1]
        if type(x) in (list, tuple):
            return type(x)(map(whole, x))
        return x

    plain, named = [whole(x) for x in args], {key: whole(x) for key, x in kwargs.items()}
    # `numpy`, `tolist` and others do not reach torch's dispatcher: the class has its own.
    methods = vars(type(plain[0])) if plain and isinstance(plain[0], Sharded | WholeView) else {}
    function = methods.get(getattr(func, "__name__", ""), func)
    with torch._C._EnableTorchFunction():
        result = function(*plain, **named)
    for part, stands_for in parts.values():
        if result is stands_for:  # It was written.
            if stands_for.shape != part.autotp_cut.layout.shape:
                raise shape_refused(func.__name__)
            return part
    return result


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what a function gives that asks for the size of the whole."""
    return func(*(_on_meta(x) for x in args), **kwargs)


def _on_meta(x: Any) -> Any:
    if not isinstance(x, CutTensor):
        return x
    return torch.empty(x.autotp_cut.layout.shape, dtype=x.dtype, device="meta")


def _gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the gradient of a part, as a part."""
    return part_like(func(*args, **kwargs), args[0])


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the gradients of wholes with respect to several tensors; those of parts as parts."""
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    with torch.enable_grad():  # An output has the graph that it was computed with, whatever the mode is now.
        arguments["outputs"] = pytree.tree_map(whole_operand, arguments["outputs"])
    arguments["grad_outputs"] = pytree.tree_map(whole_operand, arguments.get("grad_outputs"))
    inputs = [arguments["inputs"]] if isinstance(arguments["inputs"], Tensor) else list(arguments["inputs"])
    gradients = zip(func(**arguments), inputs, strict=True)
    return tuple(part_like(gradient, x) if isinstance(x, CutTensor) else gradient for gradient, x in gradients)


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces the data or the gradient of a part by this rank's part of what the user gives."""
    part, value = args
    value = _part_to_set(part, value)
    if isinstance(part, CutDTensor) and func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return set_rows(part, value, part.autotp_cut.name)
    return func(part, value)


def _part_to_set(part: CutTensor, value: Any) -> Any:
    cut = part.autotp_cut
    if isinstance(part, CutDTensor):
        return rows_to_set(part, value, cut.layout, cut.mesh, cut.name)
    if isinstance(value, CutTensor):
        equal = (value.autotp_cut.layout.dim, value.autotp_cut.layout.pieces) == (cut.layout.dim, cut.layout.pieces)
        return value.as_subclass(Tensor) if equal else part_of(_whole_of(value), cut.held, cut.mesh)
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape == cut.layout.shape:
        return part_of(value, cut.held, cut.mesh)
    if value.shape == part.shape:  # As torch.func computes gradients.
        return value
    raise Error(
        f"a tensor {list(value.shape)} as data or gradient of `{cut.name}`, which is {list(cut.layout.shape)}",
        fix="a tensor of the whole's shape, of which each rank takes its part",
        alternative="parameter.to_local().copy_(part), with the part of this rank",
    )


def _hook(func: Any, args: Any, kwargs: Any) -> Any:
    """Registers a hook that gets the gradient, or the parameter, as a part."""
    if func is Tensor.register_post_accumulate_grad_hook:
        return func(args[0], ParameterHook(args[1] if len(args) > 1 else kwargs["hook"]))
    if not args[0].autotp_cut.hooks_run:
        raise Error(
            f"a hook on the gradient of `{args[0].autotp_cut.name}`, which `fully_shard` sums without hooks",
            fix="parameter.register_post_accumulate_grad_hook, or parameter.grad after backward",
        )
    hook = args[1] if len(args) > 1 else kwargs["hook"]
    return func(args[0], PartHook(hook, args[0].autotp_cut))


FOR_USERS: Mapping[Access, Callable[[Any, Any, Any], Any]] = {
    Access.SIZE: _size,
    Access.GRADIENT: _gradient,
    Access.GRADIENTS: _gradients,
    Access.SET: _set,
    Access.HOOK: _hook,
    Access.REPLICAS: lambda func, args, kwargs: func(*args, **kwargs),
}
"""Kind of a function -> what user code gets of it; of other kinds it gets what is computed of the wholes."""


def _by_torch(func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
    """Runs a function that torch or autotp calls, on the part."""
    result = func(*args, **kwargs)
    if type(result) is Tensor and _averages(frame):  # Joined parts, which it will sum over ranks.
        return part_like(result, _first(args, kwargs))
    return result


def _first(args: Any, kwargs: Any) -> CutTensor:
    """Returns the first part among arguments."""
    return next(x for x in _tensors((*args, *kwargs.values())) if isinstance(x, CutTensor))


def as_cut(parameter: Any, cut: Cut) -> nn.Parameter:
    """Returns the parameter itself, with the class `CutParameter` if it is a part, `nn.Parameter` if it is whole.

    A DTensor over replicas becomes a `CutDTensor` in both cases.
    """
    if type(parameter) is DTensor or (cut.layout.dim is not None and type(parameter) in (nn.Parameter, CutTensor)):
        _tell_torch()
        # In place, as optimizers and user code hold this very object.
        _become(parameter, CutDTensor if isinstance(parameter, DTensor) else CutParameter)
    elif cut.layout.dim is None and type(parameter) in (CutTensor, CutParameter):
        del parameter.autotp_cut
        _become(parameter, nn.Parameter)
    if isinstance(parameter, CutTensor):
        parameter.autotp_cut = cut
    _tell_hooks(parameter, cut)
    return parameter


def own_parameter(name: str, parameter: Any) -> Any:
    """Returns the parameter to register for one that user code made of cut tensors; others as they are."""
    if isinstance(parameter, WholeView):
        return nn.Parameter(parameter.current().clone(), parameter.requires_grad)
    if not isinstance(parameter, Sharded):
        return parameter
    layout = replace(parameter.held, shape=tuple(parameter.shape))
    return as_cut(nn.Parameter(parameter.part, parameter.requires_grad), Cut(name, layout, parameter.mesh))


def part_like(tensor: Any, parameter: CutTensor) -> Any:
    """Returns a plain tensor itself, marked as a part that is cut as the parameter is; other values as they are."""
    if type(tensor) is (DTensor if isinstance(parameter, CutDTensor) else Tensor):
        _become(tensor, CutDTensor if isinstance(parameter, CutDTensor) else CutTensor)
        tensor.__dict__["autotp_cut"] = parameter.autotp_cut
    return tensor


def install() -> Undo:
    """Makes parameters plain during steps of torch's optimizers; returns the undo. See NOTE [Plain in a step]."""
    expect_callers()
    return register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)).remove


@dataclass(frozen=True)
class StepHooks:
    """Our hooks on an optimizer.

    Attributes:
        last_before: follows its other hooks before a step.
        first_after: comes before its other hooks after a step.
    """

    last_before: RemovableHandle
    first_after: RemovableHandle


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Puts our hooks on an optimizer next to the step. (torch has not begun to go through its hooks.)"""
    hooks = attached_if_any(optimizer, StepHooks)
    if not is_elementwise(optimizer) and TRIED not in attached(optimizer, Marks):
        if hooks is None:
            after = optimizer.register_step_post_hook(torch.compiler.disable(_after_step))
            attach(optimizer, StepHooks(after, after))
        return
    if hooks is None:
        before = optimizer.register_step_pre_hook(torch.compiler.disable(_plain))
        after = optimizer.register_step_post_hook(torch.compiler.disable(_cut_again))
        hooks = attach(optimizer, StepHooks(before, after))
    # The user's hooks before a step run before ours and those after it after ours, so all of them see parts.
    of_step: tuple[Any, Any] = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_step[0].move_to_end(hooks.last_before.id)
    of_step[1].move_to_end(hooks.first_after.id, last=False)


def _plain(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Makes the parameters plain for a step. Returns the step's arguments, with a closure that gets parts."""
    _make_plain(optimizer)

    def with_parts(closure: Any) -> Any:
        def call() -> Any:
            _cut_again(optimizer)
            try:
                return closure()
            finally:
                _make_plain(optimizer)

        return call

    if len(args) > 1 and callable(args[1]):  # The first one is the optimizer.
        return (args[0], with_parts(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": with_parts(kwargs["closure"])}
    return None


class StepsElements:
    """A base of optimizers that see to it that their steps work element by element."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """True for an optimizer whose step is one of torch's that works element by element, also of a derived class."""
    return isinstance(optimizer, StepsElements) or type(optimizer).step.__module__ in ELEMENTWISE_STEPS


def steps_elements(optimizer: Optimizer) -> bool:
    """True for an optimizer whose class is derived from one of torch's that works element by element.

    Its own step may call torch's, which makes plain states with the shapes of parts.
    """
    bases = type(optimizer).__mro__
    torchs = any(base.__module__ in ELEMENTWISE_STEPS for base in bases)
    return torchs or isinstance(optimizer, StepsElements) or TRIED in attached(optimizer, Marks)


TRIED = "tried element by element"
"""The mark of an optimizer of shards of parts that was tried with small tensors, and works element by element."""

ELEMENTWISE_STEPS = tuple(
    f"torch.optim.{name}"
    for name in ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
)
"""Modules of torch whose optimizers work element by element."""


def _make_plain(optimizer: Optimizer) -> None:
    """Makes the parameters of an optimizer, their gradients and states plain tensors."""
    for p in (p for group in optimizer.param_groups for p in group["params"] if type(p) in (CutParameter, CutDTensor)):
        in_rows = isinstance(p, CutDTensor)
        _become(p, DTensor if in_rows else nn.Parameter)
        if isinstance(p.grad, CutTensor):
            _become(p.grad, DTensor if in_rows else Tensor)
        state, cut = optimizer.state.get(p, {}), p.autotp_cut
        for key, x in state.items():
            if type(x) in (CutTensor, CutDTensor):
                _become(x, DTensor if in_rows else Tensor)
            elif isinstance(x, Sharded | WholeView):  # Loaded, or given by the user.
                rows = rows_to_set(p, x, cut.layout, cut.mesh, cut.name) if in_rows else None
                state[key] = part_of(x, cut.held, cut.mesh) if rows is None else rows


def _cut_again(optimizer: Optimizer, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if type(p) in (nn.Parameter, DTensor)):
        # Whole parameters, and those of ordinary models, have none.
        if hasattr(p, "autotp_cut"):
            _become(p, CutDTensor if isinstance(p, DTensor) else CutParameter)
    _after_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    hold_parts(optimizer, steps_elements(optimizer))


def hold_parts(optimizer: Optimizer, plain_are_parts: bool) -> None:
    """Has an optimizer hold its states that are cut as their parameters are as parts that behave as the whole.

    Args:
        plain_are_parts: whether a plain state with the shape of a part is one. A whole may have this shape by chance.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"] if type(p) in (CutParameter, CutDTensor)):
        layout = p.autotp_cut.layout
        with torch._C.DisableTorchFunctionSubclass():
            shape = p.shape
        state = optimizer.state.get(p, {})
        for key, x in state.items() if isinstance(state, dict) else ():
            if plain_are_parts and type(x) in (Tensor, DTensor) and x.shape == shape:
                part_like(x, p)
            elif isinstance(x, Sharded) and x.is_cut_as(layout) and not x.requires_grad:
                state[key] = part_like(x.part, p)


def _become(tensor: Any, cls: type[Tensor]) -> None:
    """Changes the class of a tensor in place."""
    tensor.__class__ = cls


def is_plain_or_cut(tensor: Tensor) -> bool:
    """True for a plain parameter of torch, and for a cut one."""
    return type(tensor) in (nn.Parameter, CutParameter, CutTensor)


def tell_user(text: str, frame: FrameType) -> None:
    """Warns; the warning names the line of the user's code that led to `frame`."""
    _say(text, _users(frame))


# ---- the code that calls an operator


def _asks(frame: FrameType | None) -> bool:
    """True if user code made a call, directly or through functions and layers of torch."""
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or not is_users(frame)):
        name = str(frame.f_globals.get("__name__"))
        if name in NEED_WHOLES:
            return True
        if not _passes_on(frame, name):
            return False
        frame = frame.f_back
    return frame is not None and not _in_mode(frame)


def _in_mode(frame: FrameType | None) -> bool:
    """True for code of a mode that torch calls inside of operators, whose operands are parts."""
    while frame is not None and is_users(frame):
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


def _passes_on(frame: FrameType, name: str) -> bool:
    """True for code that computes for its caller, as a function, a layer, a distribution or a function mode does."""
    if frame.f_code.co_name == "__torch_function__":
        return True
    if name == "autotp.runtime.module":  # NOTE [A part by itself]
        return frame.f_code.co_name == "forward"
    if name == "torch.nn.modules.module":  # Other methods there, such as `.to()`, torch asks for itself.
        return frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl")
    right = any(f"{name}.".startswith(f"{package}.") for package in RIGHT_ON_PARTS)
    return name.startswith("torch.") and (not right or name in PASSES_ON)


def _looks_for_node(frame: FrameType, args: Any) -> bool:
    """True for code of torch's that makes a view of a parameter to find the node that gets its gradient.

    Raises:
        Error: user code asks for the node: its hooks would get the gradient of the part, as a plain tensor.
    """
    if frame.f_code.co_name != "_get_grad_fn_or_grad_acc":
        return False
    caller = frame.f_back
    if caller is not None and caller.f_code.co_name == "get_gradient_edge":
        raise Error(
            f"get_gradient_edge of `{args[0].autotp_cut.name}`: this node gets the gradient of this rank's part",
            fix="parameter.register_hook or register_post_accumulate_grad_hook",
        )
    return True


def _averages(frame: FrameType) -> bool:
    """True for code of torch's that joins parameters to one tensor, and sums this over ranks."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("torch.distributed.algorithms.model_averaging.")


def _users(frame: FrameType) -> FrameType:
    while not is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _say(text: str, frame: FrameType) -> None:
    location = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, UserWarning, *location, module=str(frame.f_globals.get("__name__")))


@dataclass(frozen=True)
class PartHook:
    """A hook on a gradient, which gets the gradient as a part."""

    hook: Callable[[Tensor], Any]
    cut: Cut

    def __call__(self, gradient: Tensor) -> Any:
        # A new object, as autograd's own gradient must keep its class.
        part: Any = gradient.view_as(gradient) if isinstance(gradient, DTensor) else gradient.as_subclass(CutTensor)
        if isinstance(gradient, DTensor):
            _become(part, CutDTensor)
        part.autotp_cut = self.cut
        with torch._C._EnableTorchFunction():  # backward itself may have been called through `__torch_function__`.
            result = self.hook(part)
        with torch._C.DisableTorchFunctionSubclass():
            return _part_to_set(part, result)


@dataclass(frozen=True)
class ParameterHook:
    """A hook that gets a parameter when its gradient is there. The call of the model may have switched wholes off."""

    hook: Callable[[Tensor], Any]

    def __call__(self, parameter: Tensor) -> Any:
        with torch._C._EnableTorchFunction():
            return self.hook(parameter)


def _tell_hooks(parameter: nn.Parameter, cut: Cut) -> None:
    """Has the hooks that were there before get the gradient as the part that it is now, or as the whole."""
    hooks = parameter._backward_hooks or {}
    for key, hook in hooks.items():
        plain = hook.hook if isinstance(hook, PartHook) else hook
        hooks[key] = PartHook(plain, cut) if isinstance(parameter, CutTensor) else plain
    after: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    # Hooks of torch and autotp are right on parts.
    for key, hook in after.items():
        is_own = str(getattr(hook, "__module__", "")).startswith(("torch.", "autotp."))
        after[key] = hook if is_own else ParameterHook(hook)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, and in lists among them."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (item for item in x if isinstance(item, Tensor))


@cache
def _tell_torch() -> None:
    """Makes torch treat these classes like its own.

    NOTE [Classes that torch knows]
    Optimizers use `foreach` and `fused` by default only for classes in a list; torch.distributed.tensor adds its own
    class in the same way.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_gradients

    for supported in (of_optimizers, of_gradients):
        supported.extend((CutTensor, CutParameter, CutDTensor))  # type: ignore[arg-type]
