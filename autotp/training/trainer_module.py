"""The modules of a trainer: instances of the model's classes, which hold parameters and are not called.

Code that asks for a module's class (freezing, groups for weight decay) works on a trainer as on the model. A trainer's
graph was captured before, so its modules have the model's plain attributes, and to set one is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from autotp.errors import Error
from autotp.passes.capture.guards.attribute_paths import is_internal
from autotp.passes.emit.attach_parameters import BlockCall


class TrainerModule(nn.Module):
    """A module of a trainer. A block's module runs only as a call of the pipeline's graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = vars(self)
        if not is_internal(name) and name in known and known[name] is not value and known[name] != value:
            raise Error(
                f"`{name}` is {known[name]!r} in the graphs of the trainer, and setting it would change nothing",
                fix="set it on the original model before autotp.distribute",
            )
        super().__setattr__(name, value)


def as_module_of(module: nn.Module, original: nn.Module) -> None:
    """Makes `module` an instance of the original's class, with the original's plain attributes."""
    vars(module).update({name: value for name, value in vars(original).items() if not is_internal(name)})
    kind: Any = type(original)
    role: Any = type(module)
    module.__class__ = _trainer_class(kind, role)
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
