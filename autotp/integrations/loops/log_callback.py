"""A callback of transformers.Trainer that adds numbers to the logs of training, before other callbacks read them.

Only what has a Trainer imports this module: it imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback


class Meter(Protocol):
    """What measures the time between two logs."""

    def restart(self) -> None:
        """Begins to measure."""

    def measure(self, tokens: int | None = None, steps: int = 1) -> dict[str, float]:
        """Returns the numbers since the measurement began, and begins again."""


class LogCallback(TrainerCallback):
    """Adds what a meter measures to each log that has a loss of training.

    The first step is not measured, because it captures the model. An evaluation or a checkpoint after a log is not
    measured either; one between two logs is.

    Attributes:
        measured_step: the step with which the present measurement began.
        measured_tokens: the tokens of all replicas that Trainer had counted then.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter, self.measured_step, self.measured_tokens = meter, -1, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets an earlier training."""
        self.measured_step = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure after the first step."""
        if self.measured_step < 0:
            self._begin(state, self.meter.restart)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the numbers to a log of training, and to the line that Trainer keeps of it."""
        steps = state.global_step - self.measured_step
        if "loss" in logs and self.measured_step >= 0 and steps > 0:
            counts = args.include_num_input_tokens_seen != "no"
            tokens = state.num_input_tokens_seen - self.measured_tokens if counts else None
            numbers = self._begin(state, lambda: self.meter.measure(tokens, steps))
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves out an evaluation, or a checkpoint, that follows a log."""
        if state.global_step == self.measured_step:
            self.meter.restart()

    on_save = on_evaluate

    def _begin(self, state: Any, measure: Callable[[], Any]) -> Any:
        self.measured_step, self.measured_tokens = state.global_step, state.num_input_tokens_seen
        return measure()


def add_to_logs(trainer: Any, meter: Meter) -> None:
    """Puts a callback for a meter before the other callbacks of a Trainer: TensorBoard's writes what it reads.

    It takes the place of an earlier one, as where a cell of a notebook runs again: two would measure one time.
    """
    trainer.remove_callback(LogCallback)
    trainer.callback_handler.callbacks.insert(0, LogCallback(meter))
