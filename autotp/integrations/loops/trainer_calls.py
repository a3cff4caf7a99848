"""Lets transformers.Trainer, and what stands on it, train replicas and save a parallel model whole.

Trainer counts processes, and writes on the first alone. It sees replicas (NOTE [Replicas as processes] in
`replicas.py`), and the first of all ranks writes. What that writes of a parallel model, its weights and the optimizer's
state, is gathered from all ranks of a replica before: so a checkpoint is one device's, and any number of ranks goes on
from it. (To read one needs nothing of ours: `load_state_dict` of a parallel model and of its optimizer take the whole.)
What the first rank does alone with a hub fails on all ranks, if it fails.

In training Trainer reads the loss of a model alone, and so the logits beside it are not computed (`outputs="loss"`).

This module does not import transformers before the user's program does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from itertools import islice
from typing import Any

import torch.distributed as dist

from autotp.attached import first_time
from autotp.checkpoint.state_dict import full_state_dict
from autotp.checkpoint.whole_optimizer import whole_state_dicts
from autotp.distributed.agreement import expect_alike
from autotp.errors import Error
from autotp.integrations.loops.accelerate_state import showing
from autotp.integrations.loops.neftune import noisy
from autotp.integrations.loops.replica_collectives import ReplicaCollectives
from autotp.integrations.loops.replicas import done_by_all, of_all, replicas
from autotp.integrations.transformers.adapters import already_saved
from autotp.runtime.module import ParallelModule
from autotp.runtime.tree import state_of

Method = Callable[..., Any]
STATES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth")
SHARED = "a folder that all machines share, or the same files"
WRAPPED = 4
"""The modules of a model among which the first parallel one is: adapters and compiled models are around it."""
IN_BACKWARD = re.compile("lomo|layerwise")
"""Values of `optim` that step each parameter as soon as it has its gradient."""


def watch_trainer() -> None:
    """Changes methods of `Trainer` and `TrainingArguments`, once they are imported."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    arguments = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
    if arguments is not None and first_time(arguments, "changed"):
        for name, node in (("should_save", "save_on_each_node"), ("should_log", "log_on_each_node")):
            setattr(arguments, name, _of_first_rank(getattr(arguments, name), node))
    if trainer is None or not first_time(trainer, "changed"):
        return
    for name, wrapper in AROUND.items():
        original = getattr(trainer, name)
        setattr(trainer, name, wraps(original)(wrapper(original)))
    module: Any = sys.modules["transformers.trainer"]
    module.activate_neftune = noisy(module.activate_neftune)
    functions: Any = sys.modules["transformers.trainer_pt_utils"]
    functions.dist = ReplicaCollectives()  # It gathers logged losses and counts of operations.


def _of_first_rank(original: property, on_each_node: str) -> property:
    """Returns a property that is True on the first rank of all, where Trainer asks for the first process."""
    read = original.fget
    assert read is not None

    def first(self: Any) -> bool:
        if replicas() is None or getattr(self, on_each_node):
            return bool(read(self))
        return dist.get_rank() == 0

    return property(first)


def _first_of_all(method: Method) -> Method:
    def is_world_process_zero(self: Any) -> bool:
        return bool(method(self)) if replicas() is None else dist.get_rank() == 0

    return is_world_process_zero


def _refusing(method: Method) -> Method:
    def hyperparameter_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if replicas() is not None:
            raise Error(
                "hyperparameter_search sends the trials of one process to the others, which ranks of one model are not",
                fix="a job of its own for each trial, all ranks with the same TrainingArguments",
            )
        return method(self, *args, **kwargs)

    return hyperparameter_search


def _saving_model(method: Method) -> Method:
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if not _is_ours(self):
            return method(self, output_dir, _internal_call)
        folder = self.args.output_dir if output_dir is None else output_dir
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)
            with already_saved(self.model):
                done_by_all(partial(method, self, output_dir, _internal_call))
        else:
            state = full_state_dict(self.model)
            done_by_all(lambda: self._save(folder, state_dict=state) if self.args.should_save else None)
        return None

    return save_model


def _saving_optimizer(method: Method) -> Method:
    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not _is_ours(self):
            return method(self, output_dir)
        with whole_state_dicts([getattr(self.optimizer, "optimizer", self.optimizer)]):
            return done_by_all(partial(method, self, output_dir))

    return _save_optimizer_and_scheduler


def _loading_optimizer(method: Method) -> Method:
    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """A rank that does not see a file would go on with a new optimizer, without a word."""
        axis = replicas()
        if checkpoint is None or axis is None or not _is_ours(self):
            return method(self, checkpoint)
        names = (*STATES, f"rng_state_{axis.rank}.pth")
        visible_files = [name for name in names if os.path.isfile(os.path.join(checkpoint, name))]
        problem = f"sees other files in {checkpoint}"
        of_all(lambda: expect_alike(visible_files, self.model.mesh, problem, SHARED))
        expect_alike([name for name in visible_files if name in STATES], axis, problem, SHARED)
        with showing(number=1):  # Of several processes each would read the whole state to its GPU.
            return method(self, checkpoint)

    return _load_optimizer_and_scheduler


def _saving_random_states(method: Method) -> Method:
    def _save_rng_state(self: Any, output_dir: str) -> None:
        """The ranks of a replica have equal random states, and write to one file."""
        if not _is_ours(self) or self.model.mesh.everyone.rank == 0:
            method(self, output_dir)

    return _save_rng_state


def _there_for_all(method: Method) -> Method:
    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        """The first rank writes the trainer's state, and removes older checkpoints, after all else is saved."""
        if not _is_ours(self):
            return method(self, *args, **kwargs)
        return done_by_all(partial(method, self, *args, **kwargs))

    return _save_checkpoint


# ---- the hub, and optimizers


def _opening_repository(method: Method) -> Method:
    def init_hf_repo(self: Any, token: str | None = None) -> None:
        """The first rank alone opens a repository; all know its name then, or none goes on."""
        if not _is_ours(self):
            return method(self, token)
        done_by_all(partial(method, self, token))
        repository = [self.hub_model_id]
        dist.broadcast_object_list(repository)
        # On other processes transformers returns before it sets the second attribute, which a push reads.
        self.hub_model_id, self.push_in_progress = repository[0], getattr(self, "push_in_progress", None)

    return init_hf_repo


def _pushing(method: Method) -> Method:
    def push_to_hub(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return method(self, *args, **kwargs)
        return done_by_all(partial(method, self, *args, **kwargs))

    return push_to_hub


def _making_optimizer(method: Method) -> Method:
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises Error for an optimizer that steps in backward."""
        if self.optimizer is not None or not _is_ours(self):
            return method(self, *args, **kwargs)
        class_and_options, name = self.optimizer_cls_and_kwargs, str(getattr(self.args.optim, "value", self.args.optim))
        if class_and_options is None and IN_BACKWARD.search(name):
            raise Error(
                f'optim="{name}" steps in backward, each parameter by its own gradient, and ranks have parts of these',
                fix='optim="adafactor" or "adamw_torch"',
            )
        return method(self, *args, **kwargs)

    return create_optimizer


def _reading_loss(method: Method) -> Method:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, *more: Any, **named: Any) -> Any:
        """Trainer reads the loss alone, unless a function of the user or label smoothing reads the logits."""
        reads_more = return_outputs or self.label_smoother is not None or self.compute_loss_func is not None
        states = (state_of(module) for module in islice(model.modules(), WRAPPED))  # An adapter may be around it.
        state = None if reads_more else next((state for state in states if state is not None), None)
        if state is None or state.tree.settings.outputs != "auto":
            return method(self, model, inputs, return_outputs, *more, **named)
        with state.tree.outputs_as("loss"):
            return method(self, model, inputs, return_outputs, *more, **named)

    return compute_loss


def _is_ours(trainer: Any) -> bool:
    return isinstance(trainer.model, ParallelModule) and trainer.model.mesh.everyone.size > 1 and replicas() is not None


AROUND: dict[str, Callable[[Method], Method]] = {
    "save_model": _saving_model,
    "_save_optimizer_and_scheduler": _saving_optimizer,
    "_load_optimizer_and_scheduler": _loading_optimizer,
    "_save_rng_state": _saving_random_states,
    "_save_checkpoint": _there_for_all,
    "is_world_process_zero": _first_of_all,
    "hyperparameter_search": _refusing,
    "init_hf_repo": _opening_repository,
    "push_to_hub": _pushing,
    "create_optimizer": _making_optimizer,
    "compute_loss": _reading_loss,
}
"""Methods of `Trainer`, and what makes ours of theirs."""
