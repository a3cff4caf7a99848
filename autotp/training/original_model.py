"""The model that a trainer took: a step raises Error where the model has changed since, for the trainer would not.

NOTE [What becomes of the original model]
A trainer's graphs were captured from the model, and hold what it was then: settings, globals that its code names, which
parameters learn. The model itself is left on `meta`. A user who changes it means the training, and on one device would
be right. So each step compares what the graphs depend on (`Guard`), as each call of a parallel model does; a parallel
model captures again, but a trainer has one graph for each mode.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autotp.errors import Error
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.python_state.guard import HOOKS, Guard
from autotp.runtime.calls.graph_entry import guard_of

UNCHANGED = 0
"""The version of a model that is never compiled: `Guard` compares all values."""


class OriginalModel:
    """The model that a trainer was made of, to see whether it changes.

    Attributes:
        model: the model.
        modules: path -> module of it.
        learning: name of a parameter -> whether it learned when the trainer took it.
        hooks: path of a module -> its hooks then.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.hooks = self._hooks()

    def _hooks(self) -> dict[str, list[Any]]:
        """Returns the hooks around forward, by module."""
        return {
            path: [h for name in HOOKS for h in vars(module)[name].values()] for path, module in self.modules.items()
        }

    def guard(self, captured: Captured) -> Guard:
        """Returns the guard of a graph that was captured from the model as it is now."""
        return guard_of(captured, self.model, self.modules, UNCHANGED)

    def expect_unchanged(self, guard: Guard) -> None:
        """Raises Error if the model, or what its code reads, is not as it was when a graph was captured."""
        if not guard.holds(UNCHANGED):
            last = guard.changed()[-1]  # The functions around it have changed, too.
            raise Error(
                f"{last} changed after autotp.distribute, and the trainer's graphs do not",
                fix="a tensor among the arguments of forward, for what changes in a training",
            )
        if changed := [path for path, hooks in self._hooks().items() if hooks != self.hooks[path]]:
            class_name = type(self.modules[changed[0]]).__name__
            raise Error(
                f"hooks of a {class_name} of the original model changed after autotp.distribute",
                fix="register it on the original model before autotp.distribute",
            )
        # Its parameters are on meta, but a user who freezes one there means the trainer's.
        now = ((name, parameter.requires_grad) for name, parameter in self.model.named_parameters())
        if frozen := [name for name, learns in now if self.learning.get(name, learns) != learns]:
            raise Error(
                f"requires_grad of `{frozen[0]}` changed in the original model, and its parameter is in the trainer",
                fix="requires_grad_ of trainer.named_parameters(), or before autotp.distribute",
            )


def expect_one_mode(original: nn.Module, training: nn.Module) -> None:
    """Raises Error if a part of a model in training mode is in evaluation mode, and a step would train it.

    Args:
        original: the model in the modes that it had.
        training: the same model after `train()`.
    """
    pairs = zip(original.named_modules(), training.modules(), strict=True)
    if original.training and (evaluating := [path for (path, module), now in pairs if module.training != now.training]):
        raise Error(
            f"`{evaluating[0]}` is in evaluation mode and the model in training mode, and a step trains all of it",
            fix="model.train() before; for a part that stays in evaluation mode, a method `train` of the model, which "
            "Trainer.step calls",
        )
