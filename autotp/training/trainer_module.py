"""The modules of a trainer: instances of the model's classes, which hold parameters and are not called.

Code that asks for a module's class (freezing, groups for weight decay) works on a trainer as on the model. A trainer's
graph was captured before, so its modules have the model's plain attributes, and to set one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from autotp.errors import Error
from autotp.passes.capture.python_state.walk import is_internal
from autotp.passes.emit.attach_parameters import BlockCall


class InGraphs(nn.Module):
    """A module whose settings are in graphs already: to set one, or to add a hook, would change nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        settings = self._in_graphs()
        if not is_internal(name) and name in settings and _differs(settings[name], value):
            raise Error(
                f"`{name}` is {settings[name]!r} in the graphs of the trainer, and setting it would change nothing",
                fix="set it on the original model before autotp.distribute",
            )
        super().__setattr__(name, value)

    def _in_graphs(self) -> Mapping[str, Any]:
        """Returns the settings of the original module, by name."""
        return vars(self)

    def _register(self, method: str, hook: Any, args: Any, kwargs: Any) -> Any:
        if not getattr(hook, "__module__", "").startswith("torch.distributed."):  # That of `fully_shard`, on a block.
            raise Error(
                "a hook on a trainer, or on a part of it, would never run: its work is part of the stages' graphs",
                fix="register it on the original model before autotp.distribute",
            )
        return getattr(super(), method)(hook, *args, **kwargs)

    def register_forward_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Registers a hook of torch.distributed; raises Error for other hooks."""
        return self._register("register_forward_hook", hook, args, kwargs)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Registers a hook of torch.distributed; raises Error for other hooks."""
        return self._register("register_forward_pre_hook", hook, args, kwargs)

    def register_full_backward_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Registers a hook of torch.distributed; raises Error for other hooks."""
        return self._register("register_full_backward_hook", hook, args, kwargs)

    def register_full_backward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Registers a hook of torch.distributed; raises Error for other hooks."""
        return self._register("register_full_backward_pre_hook", hook, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a trainer cannot be copied or pickled: it is tied to its process groups",
            fix="autotp.save_checkpoint; for averages, copies of each tensor of trainer.parameters()",
        )


def _differs(setting: Any, value: Any) -> bool:
    """True unless two values are equal; tensors and arrays are equal to themselves only."""
    try:
        return setting is not value and bool(setting != value)
    except (RuntimeError, ValueError):
        return True


class TrainerModule(InGraphs):
    """A module of a trainer. A block's module runs only as a call of the pipeline's graph."""


def as_module_of(module: nn.Module, original: nn.Module) -> None:
    """Makes `module` an instance of the original's class, with the original's plain attributes."""
    # Past `__setattr__`, which refuses a setting that is in the graphs.
    vars(module).update({name: value for name, value in vars(original).items() if not is_internal(name)})
    original_class: Any = type(original)
    role: Any = type(module)
    module.__class__ = _trainer_class(original_class, role)
    module.training = original.training


@cache
def _trainer_class(original: Any, role: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], BlockCall):
            return args[0].run(args[1:])
        raise Error(
            f"a part of a trainer, a {original.__name__}, is not called by itself",
            fix="trainer.evaluate(...), or autotp.full_state_dict(trainer) into a model of your own",
        )

    roles = () if role is nn.Module else (role,)
    names = {name: getattr(original, name) for name in ("__module__", "__doc__", "__qualname__")}
    return type(original)(original.__name__, (*roles, TrainerModule, original), {**names, "forward": forward})
