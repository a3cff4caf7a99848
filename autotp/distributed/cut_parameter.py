"""A parameter that holds a rank's part, and warns when code uses the part as the whole.

Elementwise operators of an optimizer are right on parts, and so are copies, dtypes and gradients. A norm, a row, a
product, or numbers that `nn.init` draws are those of the part only. The first time that the user's code computes such a
value from a cut parameter, from its gradient, or from a value computed from them, it gets a warning. Inside the model's
graphs there are no such checks.

NOTE [Plain in a step]
During a step of torch's own optimizers, parameters and their gradients are plain tensors: otherwise each `p.grad`, and
each operator in a loop over parameters, would go through Python. The user's code runs with parts, also in a closure and
in hooks on the step. If a step raises, its parameters stay plain until the next step.

NOTE [Who asks]
torch's own code (optimizers, `state_dict`, `deepcopy`, wrappers) is right on parts, or is refused elsewhere. So only
operators that the user's code calls are followed: an elementwise result of a part is a `CutTensor`, an ordinary tensor
with another class. Results that torch's code computes are plain tensors.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autotp.distributed.cut_operators import Kind, kind_of
from autotp.distributed.live_models import Undo
from autotp.distributed.mesh import Mesh
from autotp.distributed.replica_check import common_ranks
from autotp.errors import Error
from autotp.sharding.layout import Layout
from autotp.source_location import is_users


@dataclass
class Warned:
    """The warnings that were given for one model.

    Attributes:
        lines: the lines of the user's code that were warned about.
        of_sizes: whether there was a warning about sizes.
        of_func: whether there was a warning about gradients of torch.func.
    """

    lines: set[tuple[str, int]] = field(default_factory=set)
    of_sizes: bool = False
    of_func: bool = False


@dataclass
class Cut:
    """The facts about a part.

    Attributes:
        name: the parameter's name in the model.
        layout: its layout.
        mesh: the ranks that hold it.
        in_model: the warnings that were given for the model.
        warned: whether there was a warning about this parameter.
    """

    name: str
    layout: Layout
    mesh: Mesh
    in_model: Warned = field(default_factory=Warned)
    warned: bool = False


_refuse: ContextVar[Callable[[str, str], Error] | None] = ContextVar("refuse", default=None)


@contextmanager
def shown_by_wholes(refuse: Callable[[str, str], Error]) -> Iterator[None]:
    """A region in which parts have the sizes of the wholes, for code that makes other tensors by them.

    In this region an operator that uses a part as the whole raises an Error.

    Args:
        refuse: takes the names of the operator and of the parameter, and returns the Error.
    """
    token = _refuse.set(refuse)
    try:
        yield
    finally:
        _refuse.reset(token)


def _removes(frame: FrameType) -> bool:
    """True for torch's `zero_grad` of a module: in each step it asks each parameter for its gradient, to remove it."""
    return frame.f_code is nn.Module.zero_grad.__code__


class CutTensor(Tensor):
    """A value that the user's code computed elementwise from a parameter of which this rank holds a part.

    Attributes:
        autotp_cut: the facts about this parameter.
    """

    autotp_cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind in (Kind.GRADIENT, Kind.SET) and _removes(sys._getframe(1)):
            return torch._C._disabled_torch_function_impl(func, types, args, {})
        if kind is Kind.SIZE:
            if _refuse.get() is not None:
                return _of_whole(args[0], func, *args[1:], **(kwargs or {}))
            _warn_of_size(args[0], func, sys._getframe(1))
        if kind in (Kind.SIZE, Kind.ABOUT):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return _followed(kind, func, args, kwargs or {}, _asked(sys._getframe(1)))

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Takes other memory. (torch's does not ask `__torch_function__`.) Raises Error if the user gives the whole."""
        given = args[0] if args else None
        users = is_users(sys._getframe(1))  # What torch's own code puts here is looked at in the next call.
        if users and isinstance(given, Tensor) and self.shape != given.shape == self.autotp_cut.layout.shape:
            raise _whole_given(self.autotp_cut, Tensor.set_, given.shape)
        return super().set_(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                alias = self.detach() if self.is_leaf else self
                new = copy.deepcopy(alias.as_subclass(Tensor), memo).requires_grad_(self.requires_grad)
            _become(new, CutTensor)
            new.__dict__.update(self.__dict__, autotp_cut=replace(self.autotp_cut, warned=False))
            memo[id(self)] = new
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor: the reader of the file may have no parallel model."""
        _warn_of_file(self, sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            alias = self.detach() if self.is_leaf else self
            return alias.as_subclass(Tensor).requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class CutParameter(CutTensor, nn.Parameter):
    """A parameter of which this rank holds a part."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = nn.Parameter.__deepcopy__(self, memo)
        new.autotp_cut = replace(self.autotp_cut, warned=False)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter."""
        _warn_of_file(self, sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _followed(kind: Kind, func: Any, args: Any, kwargs: Any, asked: FrameType | None) -> Any:
    """Runs an operator; if the user's code called it, an elementwise result is marked as a part."""
    given = list(_tensors((*args, *kwargs.values())))
    source = next(x for x in given if isinstance(x, CutTensor))
    cut = source.autotp_cut
    if kind in (Kind.EACH, Kind.SET):
        _expect_same_cut(func, (*args, *kwargs.values()))
    if kind is Kind.HOOK and asked is not None:
        hook = args[1] if len(args) > 1 else kwargs["hook"]
        args, kwargs = (args[0], PartHook(hook, cut)), {}
    _expect_right(kind, func, cut, args, kwargs, asked)
    try:
        found = func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        wholes = [x for x in given if not isinstance(x, CutTensor) and _goes_with_whole(x, cut)]
        if wholes and (refuse := _refuse.get()) is not None:
            raise refuse(_name_of(func), cut.name) from error
        if wholes:
            raise _whole_given(cut, func, wholes[0].shape) from error
        if asked is not None and _is_of_index(error):
            raise _out_of_part(cut, func, error) from error
        raise
    if asked is None and type(found) is Tensor and _averages(sys._getframe(2)):
        return _become_cut(found, source)  # Joined parts, which it will sum over ranks.
    if asked is None or kind not in RESULTS:
        return found
    if isinstance(found, list | tuple):
        _mark_each(found, (*args, *kwargs.values()))
        return found
    return _marked(found, func, source, asked)


def _of_whole(tensor: CutTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the size of a part's whole that an operator asks for."""
    return func(torch.empty(tensor.autotp_cut.layout.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)


RESULTS = (Kind.EACH, Kind.GRADIENT, Kind.GRADIENTS)
"""The kinds of operators whose result is a part."""


def as_cut(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Returns the parameter itself, with the class `CutParameter` if it is a part, `nn.Parameter` if it is whole."""
    if cut.layout.dim is not None and type(parameter) in (nn.Parameter, CutTensor):
        _tell_torch()
        _become(parameter, CutParameter)
    elif cut.layout.dim is None and type(parameter) in (CutTensor, CutParameter):
        del parameter.autotp_cut  # type: ignore[attr-defined]
        _become(parameter, nn.Parameter)
    if isinstance(parameter, CutTensor):
        parameter.autotp_cut = cut
    _tell_hooks(parameter, cut)
    return parameter


def install() -> Undo:
    """Makes parameters plain during steps of torch's optimizers; returns the undo. See NOTE [Plain in a step]."""
    return register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)).remove


_hooks: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]] = WeakKeyDictionary()
"""The hooks on each optimizer that follow its other hooks before a step, and that come before those after it."""


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Puts our hooks on an optimizer next to the step. (torch has not begun to go through its hooks.)"""
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    if optimizer not in _hooks:
        before, after = torch.compiler.disable(_plain), torch.compiler.disable(_cut_again)
        _hooks[optimizer] = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    first, last = _hooks[optimizer]
    of_step: tuple[Any, Any] = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_step[0].move_to_end(first.id)
    of_step[1].move_to_end(last.id, last=False)


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


def _make_plain(optimizer: Optimizer) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if type(p) is CutParameter):
        _become(p, nn.Parameter)
        if type(p.grad) is CutTensor:
            _become(p.grad, Tensor)


def _cut_again(optimizer: Optimizer, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if type(p) is nn.Parameter):
        if hasattr(p, "autotp_cut"):
            _become(p, CutParameter)


def _become(tensor: Any, kind: type[Tensor]) -> None:
    """Changes the class of a tensor in place."""
    tensor.__class__ = kind


def is_ordinary(tensor: Tensor) -> bool:
    """True for a plain parameter of torch, and for a cut one."""
    return type(tensor) in (nn.Parameter, CutParameter, CutTensor)


def warn_of(tensor: CutTensor, what: str) -> None:
    """Warns that the user's code computes `what` from a part; the warning names the user's line."""
    _warn(tensor.autotp_cut, what, _users(sys._getframe(1)))


def tell_user(text: str, frame: FrameType) -> None:
    """Warns; the warning names the line of the user's code that led to `frame`."""
    _say(text, _users(frame))


def warn_of_parts(parameters: Iterable[Tensor], what: str, frame: FrameType) -> None:
    """Warns once for each line of the user's code that uses all parameters of a model, of which some are cut."""
    cuts = [p.autotp_cut for p in parameters if isinstance(p, CutParameter)]
    at = frame.f_code.co_filename, frame.f_lineno
    if cuts and at not in cuts[0].in_model.lines:
        cuts[0].in_model.lines.add(at)
        _say(
            f"`{what}()` has this rank's parts only: `{cuts[0].name}` and {len(cuts) - 1} more are cut. "
            "autotp.full_state_dict(model), on all ranks, has the whole; autotp.distribute has whole checkpoints",
            frame,
        )


# ---- the code that calls an operator


RIGHT_ON_PARTS = (
    "torch.optim", "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.utils.clip_grad", "torch.distributed",
    "torch.amp", "torch.serialization", "torch.storage", "torch.multiprocessing", "torch.testing", "torch.export",
    "torch.fx", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses",
)  # fmt: skip
"""Packages of torch that are right on parts, or are refused elsewhere. All others pass a call of the user's code on."""
PASSES_ON = ("torch.optim.swa_utils",)
"""Modules of these packages that pass a call on."""
SIZES_THROUGH = ("torch._tensor", "torch.overrides")
"""Modules of torch that pass on a question for a size. Questions of torch itself, as in `nn.init`, do not count."""


def _asked(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the user's code that made a call (also through `nn.init`); None if there is no such code."""
    while frame is not None and not is_users(frame) and _passes_on(frame):
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return _users(frame)
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def _passes_on(frame: FrameType) -> bool:
    """True for code of torch's that computes for its caller, as a function, a layer or a distribution does."""
    name = str(frame.f_globals.get("__name__"))
    if name == "torch.nn.modules.module":  # Other methods there, such as `.to()`, torch asks for itself.
        return frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl")
    known = any(f"{name}.".startswith(f"{package}.") for package in RIGHT_ON_PARTS)
    return name.startswith("torch.") and (not known or name in PASSES_ON)


def _averages(frame: FrameType) -> bool:
    """True for code of torch's that joins parameters to one tensor, and sums this over ranks."""
    return str(frame.f_globals.get("__name__")).startswith("torch.distributed.algorithms.model_averaging.")


def _meant(name: str, asked: FrameType) -> str:
    """Returns the name of what the user's code does by calling an operator; "" if that is right on a part.

    `torch.autograd.graph` makes a view of a parameter to find the node that gets its gradient: as a plain tensor, where
    a user asks for the node; for its own hooks, which get the gradient as a part.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_back is not asked:
        frame = frame.f_back
    if frame.f_globals.get("__name__") != "torch.autograd.graph":
        return name
    return "" if frame.f_code.co_name == "register_multi_grad_hook" else frame.f_code.co_name


def _users(frame: FrameType) -> FrameType:
    while not is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


# ---- operators that are wrong on a part


def _expect_right(kind: Kind, func: Any, cut: Cut, args: Any, kwargs: Any, asked: FrameType | None) -> None:
    """Warns if an operator uses a part as the whole. Raises Error if a part would be overwritten with the whole."""
    if kind is Kind.REPLICAS:
        _expect_replicas(func.__name__, cut, kwargs.get("group"))
    refuse = _refuse.get()
    if kind is Kind.WHOLE and refuse is not None and cut.mesh.size > 1:
        raise refuse(_name_of(func), cut.name)
    if asked is None:
        return
    if kind is Kind.SET and isinstance(args[1], Tensor) and args[0].shape != args[1].shape == cut.layout.shape:
        raise _whole_given(cut, func, args[1].shape)
    if kind is Kind.WHOLE and (what := _meant(func.__name__, asked)):
        _warn(cut, what, asked)


def _expect_same_cut(func: Any, args: Sequence[Any]) -> None:
    """Raises Error if an operator combines parts that are cut differently: their elements do not belong together."""
    lists = [x for x in args if isinstance(x, list | tuple) and len(x) > 0]
    for given in (args, *zip(*(x for x in lists if len(x) == len(lists[0])), strict=True)):
        cuts = [x.autotp_cut for x in given if isinstance(x, CutTensor)]
        for cut in cuts[1:]:
            pair = cuts[0].layout, cut.layout
            if pair[0].shape == pair[1].shape and (pair[0].dim, pair[0].pieces) != (pair[1].dim, pair[1].pieces):
                raise Error(
                    f"`{_name_of(func)}` of `{cuts[0].name}` and another `{cut.name}`, which are cut in different ways",
                    **{"rank 0": " and ".join(f"{list(x.pieces[0])} of dimension {x.dim}" for x in pair)},
                    fix="autotp.full_state_dict of one model, autotp.load_full_state_dict of the other one",
                )


def _expect_replicas(what: str, cut: Cut, group: Any) -> None:
    ranks = common_ranks(torch.distributed.get_process_group_ranks(group), cut.mesh)
    if len(ranks) > 1:
        raise Error(
            f"{what} of `{cut.name}` over ranks {ranks}, which have different parts of it",
            fix="no such loop over parameters: autotp has broadcast them, and has summed their gradients",
            alternative="with replicas: parallelize(model, mesh=mesh), and group=mesh['dp'].get_group()",
        )


def _warn(cut: Cut, what: str, frame: FrameType) -> None:
    """Warns once for each parameter and each line of the user's code."""
    at = frame.f_code.co_filename, frame.f_lineno
    if cut.warned or at in cut.in_model.lines:
        return
    cut.warned = True
    cut.in_model.lines.add(at)
    shape = list(cut.layout.local_shape(cut.mesh.rank))
    _say(
        f"`{cut.name}` is this rank's part {shape} of {list(cut.layout.shape)}, and `{what}` is computed of the "
        "part only. autotp.gather(tensor), on all ranks, is the whole, with its gradient; autotp.full_state_dict and "
        "autotp.load_full_state_dict read and write it",
        frame,
    )


def _warn_of_size(tensor: Any, func: Any, frame: FrameType | None) -> None:
    """Warns once for a model: many loops that are right on parts read sizes."""
    cut = tensor.autotp_cut if isinstance(tensor, CutTensor) else None
    if cut is None or cut.in_model.of_sizes:
        return
    while frame is not None and frame.f_globals.get("__name__") in SIZES_THROUGH:
        frame = frame.f_back
    if frame is None or not is_users(frame):
        return
    cut.in_model.of_sizes = True
    _say(
        f"`{_name_of(func)}` of `{cut.name}` is that of this rank's part {list(cut.layout.local_shape(cut.mesh.rank))};"
        f" the whole is {list(cut.layout.shape)}. Sizes of parts are right for tensors beside the parts, such as an "
        "optimizer's state, and too small to count parameters, to draw noise, or for a learning rate by width: "
        "model.layouts[name].shape is the shape of the whole. This warning comes once for a model",
        frame,
    )


def _say(text: str, frame: FrameType) -> None:
    at = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, UserWarning, *at, module=str(frame.f_globals.get("__name__")))


def _warn_of_file(tensor: CutTensor, frame: FrameType) -> None:
    """Warns that a file, or a message to another process, would have the part only."""
    if is_users(user := _users(frame)):
        _warn(tensor.autotp_cut, "pickle", user)


def _goes_with_whole(x: Tensor, cut: Cut) -> bool:
    """True for a tensor that could be combined with the whole, element by element, and not with the part."""

    def fits(shape: Sequence[int]) -> bool:
        sizes = zip(reversed(x.shape), reversed(shape), strict=False)
        return x.dim() <= len(shape) and all(one in (1, size) for one, size in sizes)

    return fits(cut.layout.shape) and not fits(cut.layout.local_shape(cut.mesh.rank))


def _whole_given(cut: Cut, func: Any, shape: Sequence[int]) -> Error:
    what = "the shape of" if tuple(shape) == cut.layout.shape else "which goes with"
    return Error(
        f"`{_name_of(func)}` of a tensor {list(shape)}, {what} the whole `{cut.name}`, and this rank's"
        f" part {list(cut.layout.local_shape(cut.mesh.rank))}",
        fix="autotp.load_full_state_dict(model, state), which writes the whole model's state",
        alternative="autotp.gather(tensor) is the whole of a part",
    )


def _is_of_index(error: Exception) -> bool:
    return isinstance(error, IndexError) or any(sign in str(error) for sign in ("out of bounds", "out of range"))


def _out_of_part(cut: Cut, func: Any, error: Exception) -> Error:
    return Error(
        f"`{_name_of(func)}` of this rank's part {list(cut.layout.local_shape(cut.mesh.rank))} of `{cut.name}`, which "
        f"is {list(cut.layout.shape)}: {str(error).splitlines()[0]}",
        fix="autotp.gather(tensor), which is the whole, and autotp.load_full_state_dict to write it",
        alternative="model.layouts[name].take(whole, rank) of a mask of the whole's shape",
    )


def _name_of(func: Any) -> str:
    """Returns the name of an operator, or of the attribute that it reads or sets."""
    held = func.__self__ if func.__name__ in ("__get__", "__set__", "__delete__") else func
    return str(held.__name__)


# ---- results of parts are parts


def _marked(found: Any, func: Any, source: CutTensor, asked: FrameType) -> Any:
    """Marks a result with the shape of the part as a part: the same object, with another class."""
    if type(found) is not Tensor:
        return found
    if found.shape != source.shape:
        _warn(source.autotp_cut, func.__name__, asked)  # Repeated: no longer a part.
        return found
    return _become_cut(found, source, type(source) if _in_parameter(asked) else CutTensor)


def part_like(tensor: Tensor, parameter: CutTensor) -> Tensor:
    """Returns the tensor itself, marked as a part that is cut as the parameter is."""
    found: Tensor = _become_cut(tensor, parameter)
    return found


def _become_cut(tensor: Any, source: CutTensor, kind: type[CutTensor] = CutTensor) -> Any:
    _become(tensor, kind)
    tensor.autotp_cut = source.autotp_cut
    return tensor


def _in_parameter(asked: FrameType) -> bool:
    """True within `nn.Parameter(x)`, whose result must have the class of x."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not asked:
        if frame.f_globals.get("__name__") == "torch.nn.parameter":
            return True
        frame = frame.f_back
    return False


def _mark_each(found: Any, given: Any) -> None:
    """Marks the results of an operator over lists, each like the tensor at its place in the arguments."""
    lists = [x for x in given if isinstance(x, list | tuple) and len(x) == len(found)]
    for i, x in enumerate(found):
        source = next((one[i] for one in lists if isinstance(one[i], CutTensor)), None)
        if source is not None and type(x) is Tensor and x.shape == source.shape:
            _become_cut(x, source)


@dataclass(frozen=True)
class PartHook:
    """A hook on a gradient, which gets the gradient as a part."""

    hook: Callable[[Tensor], Any]
    cut: Cut

    def __call__(self, gradient: Tensor) -> Any:
        part = gradient.as_subclass(CutTensor)
        part.autotp_cut = self.cut
        with torch._C._EnableTorchFunction():  # backward itself may have been called through `_followed`.
            return self.hook(part)


def _tell_hooks(parameter: nn.Parameter, cut: Cut) -> None:
    """Has the hooks that were there before get the gradient as the part that it is now, or as the whole."""
    hooks = parameter._backward_hooks or {}
    for key, hook in hooks.items():
        plain = hook.hook if isinstance(hook, PartHook) else hook
        hooks[key] = plain if cut.layout.dim is None else PartHook(plain, cut)


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, and in lists among them."""
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (one for one in x if isinstance(one, Tensor))


@cache
def _tell_torch() -> None:
    """Makes torch treat these classes like its own.

    NOTE [Classes that torch knows]
    Optimizers use `foreach` and `fused` by default only for classes in a list; torch.distributed.tensor adds its own
    class in the same way. Dynamo must skip `__torch_function__`: it calls operators there itself, and would compile it
    endlessly.
    """
    from torch._dynamo.eval_frame import skip_code  # The import takes a second; export has done it by now.
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_gradients

    for known in (of_optimizers, of_gradients):
        for kind in (CutTensor, CutParameter):
            known.append(kind)  # type: ignore[arg-type]
    skip_code(CutTensor.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]
