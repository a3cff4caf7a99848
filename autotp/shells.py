"""The tree of modules of a parallel model: the original's names, flags and attributes, and no work of its own.

NOTE [Why methods get a view]
A method of the model may ask for its class: `super()`, `isinstance(self, ...)`, `type(self).other_method`. So it is
bound not to the shell but to a view, whose class is the model's and which has nothing of its own: all that it is asked
for and all that is set on it is the shell's, and calling it calls the shell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

from autotp.errors import Error
from autotp.hf.models import overrides
from autotp.passes.own import Place

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _no_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise Error(
        "a hook on a submodule of a parallel model would never run: its work is part of the model's graph",
        **{"try": "register it on the original model before autotp.parallelize, or on the whole parallel model"},
    )


class Shell(nn.Module):
    """A module of a parallel model: it holds parameters under their names, a graph does the work."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__.get("_original")
        before = vars(known).get(name) if known is not None else None
        same = isinstance(value, bool | int | float | str) and value == before
        if name != "training" and isinstance(before, bool | int | float | str) and not same:
            raise Error(
                f"`{name}` is {before!r} in the graphs of the parallel model, and setting it would change nothing",
                **{"try": "set it on the original model before autotp.parallelize"},
            )
        super().__setattr__(name, value)

    def _get_name(self) -> str:
        return type(self.__dict__["_original"]).__name__

    def extra_repr(self) -> str:
        """How the parameters that are cut are held."""
        held = self.__dict__.get("_held", {})
        return ", ".join(f"{key} {layout}" for key, layout in held.items() if layout.dim is not None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("__"):
                raise
            return _borrowed(self, original, name)


class Leaf(Shell):
    """A submodule's shell. (The whole model takes hooks; a part of it has no work of its own for them to be around.)

    A block is called when its work is done, with other arguments than the original's: torch.distributed's own hooks
    (`fully_shard`'s), which look at none, are welcome there.
    """

    register_full_backward_hook = register_full_backward_pre_hook = _no_hook

    def _register(self, kind: str, hook: Any, given: Any) -> Any:
        if not getattr(hook, "__module__", "").startswith("torch.distributed."):
            _no_hook(self)
        if not self.__dict__.get("_is_block"):
            raise Error(
                f"fully_shard({self._get_name()}): this part of a parallel model is no block, and never called",
                **{"try": "fully_shard each numbered block, as model.h[0], and the model"},
            )
        return getattr(super(), kind)(hook, **given)

    def register_forward_hook(self, hook: Any, **given: Any) -> Any:
        """As torch's, for torch.distributed's hooks on a block."""
        return self._register("register_forward_hook", hook, given)

    def register_forward_pre_hook(self, hook: Any, **given: Any) -> Any:
        """As torch's, for torch.distributed's hooks on a block."""
        return self._register("register_forward_pre_hook", hook, given)


def mirror(
    original: nn.Module, root: nn.Module, tensors: Mapping[str, Tensor], leaf: Callable[[nn.Module], nn.Module] = Leaf
) -> None:
    """Gives `root` the tree of modules below `original`, tied and shared as there, in the same order.

    Args:
        leaf: makes the shell of a submodule.
        tensors: first name -> local tensor, for parameters (or the parameter itself) and buffers.
    """
    held: dict[int, Tensor] = {id(b): tensors[name] for name, b in original.named_buffers()}
    for name, p in original.named_parameters():
        mine = tensors[name]
        held[id(p)] = mine if isinstance(mine, nn.Parameter) else nn.Parameter(mine, p.requires_grad)
        held[id(p)].__dict__.update(p.__dict__)  # Marks for the user's optimizer, as `p.no_weight_decay`.
    shells = {id(m): root if m is original else _shell(m, leaf) for m in original.modules()}
    for module in original.modules():
        shell = shells[id(module)]
        shell.training = module.training
        # Into the tables: the original may well have a submodule called `plan`.
        shell._parameters.update({k: None if p is None else held[id(p)] for k, p in module._parameters.items()})  # type: ignore[misc]
        shell._buffers.update({k: None if b is None else held[id(b)] for k, b in module._buffers.items()})
        shell._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        shell._modules.update({k: None if m is None else shells[id(m)] for k, m in module._modules.items()})


def _shell(module: nn.Module, leaf: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return type(module)() if type(module) in CONTAINERS else leaf(module)


def places(root: nn.Module) -> tuple[dict[str, str], dict[str, Place]]:
    """For every name of a parameter or buffer the first name it has, and for every first name where it lies."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    found: dict[str, Place] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                names[name] = first.setdefault(id(tensor), name)
                found.setdefault(names[name], (module, key))
    return names, found


def _borrowed(shell: nn.Module, original: nn.Module, name: str) -> Any:
    """A plain attribute of the original, or what its class defines (a method, a property), bound to a view of it."""
    if name in original.__dict__:
        return original.__dict__[name]
    kind: type = type(original)
    try:
        found = inspect.getattr_static(_view_of(kind), name)
    except AttributeError:
        raise AttributeError(f"'{kind.__name__}' (parallel) has no attribute '{name}'") from None
    bind: Callable[..., Any] | None = getattr(type(found), "__get__", None)
    return bind(found, _viewed(shell, kind), kind) if bind else found


# ---- NOTE [Why methods get a view]


class View:
    """A shell as its model's class sees it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_shell"](*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):  # What an instance has comes before what its class has.
            shell = vars(self)["_shell"]
            for table in (vars(shell), vars(vars(shell)["_original"])):
                if name in table:
                    return table[name]
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_shell"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_shell"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_shell"], name)


def _viewed(shell: nn.Module, original: type) -> Any:
    kind = _view_of(original)
    new: Any = object.__new__(kind)
    vars(new)["_shell"] = shell
    return new


@cache
def _view_of(original: type) -> type:
    """The class of the views of shells of `original`. It calls the shell; its signature is the original's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    names = {"forward": wraps(original.forward)(forward), "__module__": original.__module__}  # type: ignore[attr-defined]
    return type(original)(original.__name__, (*overrides(original), View, original), names)
