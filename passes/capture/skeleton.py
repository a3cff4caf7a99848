"""Copies a model for capture: its code, structure and flags, with tensors on `meta`."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autotp.errors import Error
from autotp.ops.eager_mode import is_plain
from autotp.passes.capture.python_state.freeze import LARGEST
from autotp.passes.capture.python_state.guard import HOOKS
from autotp.passes.capture.python_state.walk import (
    Path,
    containers_among_globals,
    everything,
    held,
    key_of,
    spelled,
    walk,
)
from autotp.passes.capture.pytree import is_dense

WRITTEN_IN_PYTHON = 1 << 9
"""The flag of a class that is not compiled C: Py_TPFLAGS_HEAPTYPE."""


def skeleton_of(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` on `meta`: its code, structure and flags, without its numbers."""
    return copy_on(model, "meta")


def copy_on(model: nn.Module, device: str, originals: dict[int, Tensor] | None = None) -> nn.Module:
    """Returns a copy of `model` whose parameters and buffers are on a device, without values.

    Args:
        originals: if given, other tensors of the copy have memory of their own on the device, into which the copy may
            write; filled with `id` of such a tensor -> the tensor of `model`.

    Raises:
        Error: an attribute cannot be copied, or is a view of a parameter or buffer.
    """
    with copying():
        memo = stand_ins(model, device, originals=originals)
        close_over(memo, model)
        return copy.deepcopy(model, memo)


def stand_ins(
    model: nn.Module,
    device: str,
    whole: Mapping[str, Tensor] = MappingProxyType({}),
    originals: dict[int, Tensor] | None = None,
) -> dict[Any, Any]:
    """Returns the memo for a deep copy of a model: `id` of a tensor -> the tensor of the copy.

    Args:
        device: the device of parameters and buffers, which have no values. Other tensors are constants of the graph and
            keep their values. (They are on this device, too: a model that is moved there takes them along.)
        whole: first name -> the full tensor, for parameters and buffers of which `model` has a shard.
    """
    _expect_no_views(model)
    memo: dict[Any, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    proxies: list[Any] = []
    for name, tensor in model.named_parameters():
        like: Tensor = whole.get(name, tensor)
        memo[id(tensor)] = nn.Parameter(empty_on(like, device), like.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = empty_on(whole.get(name, buffer), device)
    for _, value in everything(model):
        if isinstance(value, torch.Generator):
            memo[id(value)] = value
        elif isinstance(value, types.MappingProxyType):
            proxies.append(value)
        elif isinstance(value, Tensor):
            # A detached alias: otherwise autograd would record writes during capture on the user's tensor.
            with unset_fake_temporarily():
                alias = value.detach() if originals is None else _apart(value, device, storages)
                # Parameters and buffers have their entries already.
                memo.setdefault(id(value), alias.requires_grad_(value.requires_grad))
            if originals is not None:
                originals[id(memo[id(value)])] = value
    for proxy in proxies:  # At the end: its dict may hold any of the values above.
        memo[id(proxy)] = types.MappingProxyType(copy.deepcopy(gc.get_referents(proxy)[0], memo))
    return memo


def expect_copyable(model: nn.Module) -> None:
    """Raises Error for a module that holds more than its `__dict__`, or that no set can hold, and for some layouts."""
    # Not `model.modules()`, which puts modules into a set: that fails for one that cannot be hashed.
    queue, visited = deque([("", model)]), set[int]()
    while queue:
        path, module = queue.popleft()
        visited.add(id(module))
        cls = type(module)
        subject = f"`{path}`, a {cls.__name__}," if path else f"the {cls.__name__}"
        if cls.__hash__ is None:
            raise Error(
                f"{subject} cannot be hashed, so that torch does not list its parameters",
                fix="`__hash__ = torch.nn.Module.__hash__` in its class, or `@dataclass(eq=False)`",
            )
        if (cls.__basicsize__, cls.__itemsize__) != (nn.Module.__basicsize__, nn.Module.__itemsize__):
            _expect_no_slots(subject, cls)
        inside = [(f"{path}.{name}".lstrip("."), child) for name, child in module._modules.items() if child is not None]
        queue.extend((child_path, child) for child_path, child in inside if id(child) not in visited)
    _expect_layouts(model)


def _expect_no_slots(subject: str, cls: type[nn.Module]) -> NoReturn:
    """Raises the Error for a module of a class that lays out more than a `__dict__`."""
    larger = [base for base in cls.__mro__[:-1] if base.__itemsize__ or base.__basicsize__ > nn.Module.__basicsize__]
    # The deepest of these bases is the one that adds something.
    if not larger[-1].__flags__ & WRITTEN_IN_PYTHON:
        raise Error(
            f"{subject} derives from {larger[-1].__name__}, too: it has contents that are no attributes",
            fix=f"a module with an attribute that holds the {larger[-1].__name__}",
        )
    names = [name for base in cls.__mro__ for name, x in vars(base).items() if type(x) is types.MemberDescriptorType]
    raise Error(f"{subject} has `{names[0]}` in __slots__, which torch does not copy", fix="a class without __slots__")


def _apart(tensor: Tensor, device: str, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Returns a copy of a tensor on a device, with the memory that copies of its views have.

    Args:
        storages: those copied so far.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or wrapped:
        return tensor.detach()
    storage_id = tensor.untyped_storage()._cdata
    if storage_id not in storages:
        # All of the storage is copied, and once: tensors that share memory in the model share it in the copy.
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        storages[storage_id] = content.to(tensor.device if device == "meta" else device, copy=True).untyped_storage()
    copied = torch.empty(0, dtype=tensor.dtype, device=storages[storage_id].device)
    return copied.set_(storages[storage_id], tensor.storage_offset(), tensor.shape, tensor.stride())


def _expect_no_views(model: nn.Module) -> None:
    """Raises Error if a plain tensor is a view of a parameter or buffer: a parallel model has other parameters."""
    tensors_by_id = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names = {storage_of(tensor): name for name, tensor in tensors_by_id.values()}
    for path, value in _reached(model):
        storage = storage_of(value) if isinstance(value, Tensor) and id(value) not in tensors_by_id else None
        if storage is not None and storage in names:
            raise Error(
                f"`{spelled(path)}` is a view of `{names[storage]}`, and would not be a view in the parallel model",
                fix=_instead_of_norm(model, spelled(path)) or "make it in forward",
            )


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _expect_layouts(model: nn.Module) -> None:
    """Raises Error for a parameter that is not dense, and for a buffer that is neither dense nor sparse."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sparse = tensor.layout in SPARSE and not isinstance(tensor, nn.Parameter)
        if not (sparse or is_dense(tensor)):
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").removeprefix("_")
            raise Error(
                f"`{name}` is a {layout} tensor, and a rank holds dense tensors",
                fix="a dense tensor; of sequences of several lengths a padded one and a mask",
            )


def _instead_of_norm(model: nn.Module, name: str) -> str:
    """Returns what to write instead of torch's old norm, which keeps a weight of this name as an attribute; else ""."""
    path, _, key = name.rpartition(".")
    hooks = model.get_submodule(path)._forward_pre_hooks.values() if path in dict(model.named_modules()) else ()
    for old in (type(hook).__module__ for hook in hooks if getattr(hook, "name", None) == key):
        if old in ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm"):
            return f"{old.replace('utils.', 'utils.parametrizations.')}, in place of {old}"
    return ""


def storage_of(tensor: Tensor) -> int | None:
    """Returns the identity of a tensor's storage; None if it has no storage of its own, as in a functorch transform."""
    plain = type(tensor) in (Tensor, nn.Parameter) and is_plain(tensor)
    if not plain or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def _reached(model: nn.Module, aside: Sequence[Any] = ()) -> Iterator[tuple[Path, Any]]:
    """Yields what the attributes of a model lead to, and what functions among this hold, each once, with paths.

    Objects that functions hold are not entered: hooks of `fully_shard` hold its state, with process groups.

    Args:
        aside: further values, whose path is empty.
    """
    visited = set[int]()
    for path, value in (*everything(model), *(((), value) for value in aside)):
        queue = [value]
        while queue and len(visited) <= LARGEST:
            current = queue.pop()
            if key_of(current) not in visited:
                visited.add(key_of(current))
                yield path, current
                queue += [*held(current), *containers_among_globals(current)]


def close_over(memo: dict[Any, Any], model: nn.Module, aside: Sequence[Any] = ()) -> None:
    """Copies functions that hold a part of the model, so that the copies hold the model's copy.

    A deep copy does not copy functions.

    Args:
        memo: the memo of the deep copy, with everything that is not to be copied.
        aside: functions that are not among the model's attributes.
    """
    model_keys = {key_of(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, x in _reached(model):
        if isinstance(x, weakref.ref) and key_of(x()) in model_keys:
            raise Error(
                f"`{spelled(path)}` is a weak reference to the model, which a copy of it would not follow",
                fix="the module itself, in a list if it is not to be a submodule: `self.parent = [parent]`",
            )
    hooks = [hook for module in model.modules() for name in HOOKS for hook in vars(module)[name].values()]
    functions = {id(x): x for _, x in _reached(model, (*hooks, *aside)) if isinstance(x, types.FunctionType)}
    copied_functions = [
        function
        for function in functions.values()
        if any(key_of(value) in model_keys for _, value in walk([((), function)], "held"))
    ]
    for function in copied_functions:
        # All copies are made first, and filled below: functions may hold each other.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        function_copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        function_copy.__dict__.update(function.__dict__)
        memo[id(function)] = function_copy
    for function in copied_functions:
        memo[id(function)].__defaults__ = copy.deepcopy(function.__defaults__, memo)
        memo[id(function)].__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        for cell, was in zip(memo[id(function)].__closure__ or (), function.__closure__ or (), strict=True):
            with suppress(ValueError):  # An empty cell.
                cell.cell_contents = copy.deepcopy(was.cell_contents, memo)


@contextmanager
def copying() -> Iterator[None]:
    """A region in which a model is copied. A copy of a bound method binds the copy of its function, if there is one.

    Raises:
        Error: an attribute cannot be copied.
    """

    def copied(method: types.MethodType, memo: dict[int, Any]) -> types.MethodType:
        return types.MethodType(copy.deepcopy(method.__func__, memo), copy.deepcopy(method.__self__, memo))

    with patch.dict(vars(copy)["_deepcopy_dispatch"], {types.MethodType: copied}):
        try:
            yield
        except Error:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            raise Error(
                f"copy.deepcopy fails on the model: {first}",
                fix="delete computed tensors and open handles from its attributes before the call",
            ) from error


def empty_on(like: Tensor, device: str) -> Tensor:
    """Returns a tensor without values and without gradient, of the same shape, strides and dtype; a sparse one for any
    sparse tensor.
    """
    if like.layout is not torch.strided:  # No graph reads it.
        return torch.empty(like.shape, dtype=like.dtype, layout=torch.sparse_coo, device=device)
    return torch.empty_like(like, device=device, requires_grad=False)
