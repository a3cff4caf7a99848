"""Lets transformers.Trainer, and what stands on it, save a parallel model whole.

Trainer writes on its first process alone. What that writes of a parallel model, its weights and the optimizer's state,
is gathered from all ranks before: so a checkpoint is one device's, and any number of ranks goes on from it. (To read
one needs nothing of ours: `load_state_dict` of a parallel model, and of its optimizer, take the whole.)

This module does not import transformers before the user's program does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from autotp.checkpoint.state_dict import full_state_dict
from autotp.checkpoint.whole_optimizer import whole_state_dicts
from autotp.distributed.mesh import expect_alike
from autotp.hf.loops.one_process import is_one_process
from autotp.hf.overrides import already_saved, whole_size
from autotp.runtime.module import ParallelModule

Method = Callable[..., Any]
STATES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth")
_changed: set[type] = set()


def watch_trainer() -> None:
    """Changes the methods of `Trainer` that save, once it is imported."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or trainer in _changed:
        return
    _changed.add(trainer)
    for name, around in AROUND.items():
        theirs = getattr(trainer, name)
        setattr(trainer, name, wraps(theirs)(around(theirs)))
    module: Any = sys.modules["transformers.trainer"]
    module.get_model_param_count = _counting(module.get_model_param_count)


def _counting(function: Method) -> Method:
    @wraps(function)
    def get_model_param_count(model: Any, trainable_only: bool = False) -> int:
        if isinstance(model, ParallelModule):
            return whole_size(model, lambda p: p.requires_grad or not trainable_only)
        return function(model, trainable_only)

    return get_model_param_count


def _saving_model(method: Method) -> Method:
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if not _is_ours(self):
            return method(self, output_dir, _internal_call)
        folder = self.args.output_dir if output_dir is None else output_dir
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)
            with already_saved(self.model):
                method(self, output_dir, _internal_call)
        else:
            state = full_state_dict(self.model)
            if self.args.should_save:
                self._save(folder, state_dict=state)
        dist.barrier()
        return None

    return save_model


def _saving_optimizer(method: Method) -> Method:
    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not _is_ours(self):
            return method(self, output_dir)
        with whole_state_dicts([getattr(self.optimizer, "optimizer", self.optimizer)]):
            method(self, output_dir)
        dist.barrier()
        return None

    return _save_optimizer_and_scheduler


def _loading_optimizer(method: Method) -> Method:
    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """A rank that does not see a file would go on with a new optimizer, without a word."""
        if checkpoint is not None and _is_ours(self):
            seen = [name for name in STATES if os.path.isfile(os.path.join(checkpoint, name))]
            remedy = "a folder that all machines share, or the same files"
            expect_alike(seen, self.model.mesh, f"sees other files in {checkpoint}", remedy)
        return method(self, checkpoint)

    return _load_optimizer_and_scheduler


def _saving_random_states(method: Method) -> Method:
    def _save_rng_state(self: Any, output_dir: str) -> None:
        """The ranks of a model have equal random states, and write to one file."""
        if not _is_ours(self) or self.args.should_save:
            method(self, output_dir)

    return _save_rng_state


def _counting_operations(method: Method) -> Method:
    def store_flos(self: Any) -> None:
        """Trainer would add up the operations of all processes, each of which counts the whole model's."""
        if not _is_ours(self):
            return method(self)
        self.state.total_flos += self.current_flos
        self.current_flos = 0
        return None

    return store_flos


def _is_ours(trainer: Any) -> bool:
    return isinstance(trainer.model, ParallelModule) and trainer.model.mesh.size > 1 and is_one_process()


AROUND: dict[str, Callable[[Method], Method]] = {
    "save_model": _saving_model,
    "_save_optimizer_and_scheduler": _saving_optimizer,
    "_load_optimizer_and_scheduler": _loading_optimizer,
    "_save_rng_state": _saving_random_states,
    "store_flos": _counting_operations,
}
"""Methods of `Trainer`, and what makes ours of theirs."""
