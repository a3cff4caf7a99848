"""Adapters of peft: put around a parallel model, or into one; saved, read, switched off and exchanged.

peft makes adapters by the sizes of the layers that they adapt, and some from their values, as PiSSA and DoRA. It sees
wholes, and makes whole adapters.

peft puts modules of its own around the model (`PeftModel`). They become the parallel model, in which the model that was
parallel before is a part: as if it had been made parallel after peft, but each new parameter is whole on every rank.

NOTE [Adapters of parameters]
An adapter of a parameter (peft's `target_parameters`), such as a stack of experts, registers a parametrization in each
call, and so takes the parameter out of its module and puts it back. A graph cannot do that, and need not: while it is
captured, the module has the adapted weight as an ordinary attribute, which Python finds before the parameter.

This module does not import peft before the user's program does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autotp.attached import first_time
from autotp.checkpoint.state_dict import full_state_dict
from autotp.distributed.agreement import agree, on_first_replica
from autotp.distributed.cut_tensors.cut_parameter import Cut, as_cut
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.cut_tensors.whole_operators import WholeView
from autotp.distributed.gather import gather
from autotp.distributed.mesh import broadcast_from_first
from autotp.errors import Error
from autotp.runtime.module import ParallelModule, expect_own_calls, put_around
from autotp.runtime.tree import state_of
from autotp.sharding.layout import Layout

Method = Callable[..., Any]
TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]
"""Attributes of each module that torch and peft change in place: parameters, buffers, modules, hooks."""
WATCHED = ("peft.peft_model", "peft.mixed_model", "peft.tuners.tuners_utils")
_making: ContextVar[bool] = ContextVar("making", default=False)
_saved: ContextVar[tuple[Any, ...]] = ContextVar("saved", default=())


@contextmanager
def already_saved(model: nn.Module) -> Iterator[None]:
    """A region in which `model.save_pretrained` does nothing: Trainer calls it on the first rank alone."""
    token = _saved.set((*_saved.get(), model))
    try:
        yield
    finally:
        _saved.reset(token)


def is_saved(model: Any) -> bool:
    """True for a model that `already_saved` names."""
    return model in _saved.get()


# ---- adapters in a capture


def adapters_as_operators() -> AbstractContextManager[Any]:
    """Returns a region in which a call adds adapters to parameters by operators: NOTE [Adapters of parameters]"""
    # Without peft there is no such adapter.
    adapter: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    return nullcontext() if adapter is None else patch.object(adapter, "_activate_lora", _adapted)


@contextmanager
def _adapted(adapter: Any, names: Sequence[str]) -> Iterator[None]:
    """A region in which a module reads its parameter with the products of the active adapters added."""
    module, weight = adapter.get_base_layer(), adapter.get_param()
    with torch.autocast(weight.device.type, enabled=False):  # The sum has the dtype of the parameter, as in peft.
        for name in names:
            if name in adapter.lora_A:
                weight = _added(adapter, name, weight)
    vars(module)[adapter.parameter_name] = weight
    try:
        yield
    finally:
        del vars(module)[adapter.parameter_name]


def _added(adapter: Any, name: str, weight: Tensor) -> Tensor:
    """Returns a weight plus an adapter's product; a stack of matrices needs no second tensor of its size for it."""
    if adapter.num_experts == 1:
        return weight + adapter.get_delta_weight(name)
    left, right, scale = adapter.get_delta_factors(name)
    return torch.baddbmm(weight, left, right, alpha=scale)


# ---- adapters of a model that is parallel already


def watch_peft() -> None:
    """Changes the constructors of peft's models, once they are imported."""
    models, mixed = (sys.modules.get(name) for name in WATCHED[:2])
    for model_class in (getattr(models, "PeftModel", None), getattr(mixed, "PeftMixedModel", None)):
        # Each class of a task has a constructor of its own, which calls that of `PeftModel`.
        for changed_class in () if model_class is None else (model_class, *model_class.__subclasses__()):
            if "__init__" in vars(changed_class):
                _change(changed_class, "__init__", _around_parallel)
    tuner = getattr(sys.modules.get(WATCHED[2]), "BaseTuner", None)
    if tuner is not None:
        _change(tuner, "__init__", _in_parallel)
        _change(tuner, "inject_adapter", _in_parallel)


def _change(owner: type, name: str, wrapper: Callable[[Method], Method]) -> None:
    if first_time(owner, name):
        original = vars(owner)[name]
        setattr(owner, name, wraps(original)(wrapper(original)))


def _around_parallel(original: Method) -> Method:
    def __init__(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        # peft's constructors call each other: only the outermost one puts its module around the model.
        outermost = isinstance(model, ParallelModule) and not _making.get()
        if outermost:
            expect_own_calls(cast(ParallelModule, model))
        _made_by_wholes(original, self, model, *args, **kwargs)
        if outermost:
            put_around(self, cast(ParallelModule, model))

    return __init__


def _in_parallel(original: Method) -> Method:
    def called(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _made_by_wholes(original, self, model, *args, **kwargs)

    return called


def _made_by_wholes(original: Method, maker: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns what peft's function returns, which makes adapters in a model; on a failure the model is as before."""
    inside = [module for module in model.modules() if state_of(module) is not None]
    if _making.get() or not inside:
        return original(maker, model, *args, **kwargs)
    state = state_of(inside[0])
    assert state is not None
    if kwargs.get("low_cpu_mem_usage"):
        kwargs["low_cpu_mem_usage"] = False  # It would leave adapters on meta until they are loaded.
    token = _making.set(True)
    try:
        with _undone_on_failure(model):
            made = agree(state.tree.mesh, lambda: original(maker, model, *args, **kwargs))
            _gather_new(model)
            return made
    finally:
        _making.reset(token)
        state.tree.version += 1


def _gather_new(model: nn.Module) -> None:
    """Has each new parameter be whole, also one that peft computed from a cut weight, as DoRA's magnitudes."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if isinstance(p, Sharded | WholeView):
                module._parameters[name] = nn.Parameter(gather(p.detach()), p.requires_grad)


@contextmanager
def _undone_on_failure(model: nn.Module) -> Iterator[None]:
    """A region after which a model has its modules, tensors and hooks as before, if an exception leaves it."""
    modules, flags = list(model.modules()), [(p, p.requires_grad) for p in model.parameters()]
    before = [dict(vars(module)) for module in modules]
    tables = [{name: attrs[name].copy() for name in TABLES if name in attrs} for attrs in before]
    try:
        yield
    except BaseException:
        for module, attrs, table in zip(modules, before, tables, strict=True):
            vars(module).clear()
            vars(module).update(attrs)
            for name, contents in table.items():
                attrs[name].clear()
                attrs[name].update(contents)
        for parameter, flag in flags:
            parameter.requires_grad = flag
        raise


class Adapts:
    """Methods of peft's models that save, read, add and switch adapters, or raise Error."""

    peft_config: Mapping[str, Any]
    active_peft_config: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Gathers the adapters, and saves them by peft on the first rank; call it on every rank.

        Args:
            save_directory: the folder.
            options: peft's options.

        Raises:
            Error: on every rank: an adapter is a prompt that peft computes, or the file system fails.
        """
        if is_saved(self):
            return
        model: Any = self
        if any(config.is_prompt_learning for config in self.peft_config.values()):
            raise Error(
                "peft computes the prompt that it saves from the weights, and these are cut",
                fix="autotp.full_state_dict(model), and peft on one device",
            )
        state = full_state_dict(model, _names_of_adapters(model).__contains__)
        # `write` passes the whole state, and runs on the first rank alone.
        rest = {name: value for name, value in options.items() if name not in ("state_dict", "is_main_process")}

        def write() -> None:
            if model.mesh.rank == 0:
                parent: Any = super(Adapts, model)
                parent.save_pretrained(save_directory, state_dict=state, **rest)

        on_first_replica(model.mesh, lambda: agree(model.mesh.alone(), write))

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error("a parallel model is not pushed to a hub", fix="model.save_pretrained(path)")

    def _raise_error(self, *_: Any, **__: Any) -> NoReturn:
        raise Error(
            "adapters of a parallel model are not merged or taken out",
            fix="do so with the peft model, and parallelize it then",
        )

    merge_adapter = unmerge_adapter = merge_and_unload = unload = add_weighted_adapter = _raise_error

    def disable_adapter(self) -> Any:
        """Returns a region in which the model computes without its adapters.

        Raises:
            Error: the adapters are prompts.
        """
        if self.active_peft_config.is_prompt_learning:
            raise Error(
                "prompts of a parallel model are not switched off",
                fix="a second model, without prompts: autotp.parallelize(copy.deepcopy(model)), before peft",
            )
        parent: Any = super()
        return parent.disable_adapter()

    def add_adapter(self, adapter_name: str, peft_config: Any, **options: Any) -> None:
        """Adds an adapter, cut as the adapters are that the model has. Call it on every rank.

        Args:
            adapter_name: its name.
            peft_config: its configuration.
            options: peft's options.

        Raises:
            Error: on every rank: it is made from values of weights, which are cut.
        """
        model: Any = self
        # Before the new adapter is there: its parameters are cut as those of the others.
        layouts, ids_before = model.layouts, {id(p) for p in model.parameters()}
        parent: Any = super()
        _made_by_wholes(lambda *_: parent.add_adapter(adapter_name, peft_config, **options), self, model)
        for name, p in list(model.named_parameters()):
            layout = None if id(p) in ids_before else _like_another(name, p, adapter_name, layouts)
            if layout is not None:
                _cut(model, name, p, layout)

    def load_adapter(
        self, folder: str | os.PathLike[str], adapter_name: str, is_trainable: bool = False, **options: Any
    ) -> Any:
        """Reads the weights of an adapter, and adds the adapter if the model has none of this name.

        Call it on every rank.

        Args:
            folder: what `save_pretrained` wrote, on every rank.
            adapter_name: the adapter.
            is_trainable: as of peft: without it, the model is in eval mode then.
            options: peft's options.

        Returns:
            What peft's method returns.

        Raises:
            Error: on every rank, and nothing is changed: there is no such folder, it has another kind of adapter than
                the one of this name, or peft makes such an adapter of values of weights.
        """

        def look() -> None:
            from peft import PeftConfig, load_peft_weights

            if not os.path.isdir(folder):  # peft would ask a hub.
                raise Error(f"there is no folder {folder}", fix="the folder that model.save_pretrained wrote")
            config = self.peft_config.get(adapter_name)
            if config is not None and _kind_of_adapter(config) != _kind_of_adapter(
                PeftConfig.from_pretrained(str(folder))
            ):
                raise Error(
                    f"the adapter {adapter_name!r} of the model is of another kind than that of {folder}",
                    fix="model.load_adapter(folder, another_name)",
                )
            load_peft_weights(str(folder), device="cpu")

        model: Any = self
        agree(model.mesh, look)
        parent: Any = super()
        return parent.load_adapter(str(folder), adapter_name, is_trainable, **({"torch_device": "cpu"} | options))


def has_adapters(model: Any) -> bool:
    """True for a model of peft, of which adapters are saved and no more."""
    return isinstance(model, getattr(sys.modules.get("peft"), "PeftModel", ()))


def save_of_trainer(trainer: Any, folder: str | os.PathLike[str]) -> None:
    """Gathers the adapters of a trainer, and saves them by peft on the first rank. All ranks call it.

    Raises:
        Error: on every rank: the file system fails.
    """
    state = full_state_dict(trainer, _names_of_adapters(trainer.skeleton).__contains__)

    def write() -> None:
        if trainer.everyone.rank == 0:
            trainer.skeleton.save_pretrained(folder, state_dict=state)

    agree(trainer.everyone, write)


def _like_another(name: str, parameter: Tensor, adapter: str, layouts: Mapping[str, Layout]) -> Layout | None:
    """Returns the layout of a new adapter's parameter: that of another adapter's at its place, None if there is none.

    The other one may have another rank, along which nothing is cut.
    """
    for neighbour, layout in layouts.items():
        pairs = list(zip(name.split("."), neighbour.split("."), strict=False))
        is_at_place = name.count(".") == neighbour.count(".") and all(x in (y, adapter) for x, y in pairs)
        if is_at_place and layout.dim is not None and layout.shape[layout.dim] == parameter.shape[layout.dim]:
            return replace(layout, shape=tuple(parameter.shape))
    return None


def _cut(model: Any, name: str, parameter: nn.Parameter, layout: Layout) -> None:
    """Puts this rank's part of a parameter in the place of the whole."""
    path, _, key = name.rpartition(".")
    # Each rank may have drawn other initial values.
    whole = broadcast_from_first(parameter.data.to(model.mesh.device), model.mesh)
    part = nn.Parameter(layout.take(whole, model.mesh.rank), parameter.requires_grad)
    setattr(model.get_submodule(path), key, as_cut(part, Cut(name, layout, model.mesh)))


def _kind_of_adapter(config: Any) -> dict[str, Any]:
    """Returns the settings of an adapter that decide on its weights."""
    free = ("inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")
    return {key: x for key, x in config.to_dict().items() if key not in free}


def _names_of_adapters(model: Any) -> set[str]:
    """Returns the names, in the state dict, of the tensors that peft saves."""
    from peft import get_peft_model_state_dict

    tensors = nn.Module.state_dict(model)
    saved = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=dict(tensors), adapter_name=name).values()
    }
    return {name for name, value in tensors.items() if id(value) in saved}
