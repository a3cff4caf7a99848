"""`save_checkpoint` and `load_checkpoint`: every rank writes its part of the training's state; any layout can read it.

Each rank writes its boxes of the whole tensors (`boxes.py`, `tensor_pieces.py`) into a folder with a temporary name.
Then the first rank writes the manifest with all checksums (`manifest.py`), and renames the folder. To load, a rank
reads from each file the boxes that it needs. A checkpoint has only tensors and plain data (`plain_json.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from torch.optim import Optimizer

from autotp.arguments import expect_arguments
from autotp.checkpoint.keys import STEPS, names_as_text, path_of
from autotp.checkpoint.manifest import MANIFEST, OF_FORMAT_1, read_manifest
from autotp.checkpoint.optimizers import Optimizers, optimizers_of
from autotp.checkpoint.read import (
    expect_same_files,
    expect_same_training,
    load_more,
    load_state,
    parameter_of_groups,
    read_state,
    unread_state,
)
from autotp.checkpoint.write import UNFINISHED, same_on_all, state_to_write, write_state
from autotp.distributed.agreement import Fact, agree, told
from autotp.distributed.background_exchange import BackgroundExchange
from autotp.errors import Error, call_in_progress, is_within_a_call, within
from autotp.runtime.holdings import expect_all_saved, holdings_of
from autotp.training.trainer import Trainer

T = TypeVar("T")


def save_checkpoint(
    folder: str | Path,
    trainer: Trainer,
    optimizer: Optimizer | Sequence[Optimizer],
    step: int,
    *,
    wait: bool = True,
    **more: Any,
) -> Future[None]:
    """Writes a training's state into `folder/step-00000100`, and returns a future of the save.

    The state is the parameters, the optimizer's state, the random states, and `more`. Nothing is overwritten, and a
    save that fails leaves no folder of this name. The first rank's process locks `folder` from its first save until the
    process ends. Call it on every rank.

    Args:
        folder: the folder of the checkpoints; it is made if it does not exist.
        trainer: as `distribute` returned it.
        optimizer: the optimizer of the trainer's parameters; or a list of optimizers, each of other parameters.
        step: the number of steps done.
        wait: False copies the state to the CPU, and writes while training goes on; a GPU's state is copied to pinned
            memory, and the next step on the GPU waits for that, not the program. The next save and `.result()` of the
            future wait for the writing and raise its error. The end of the program also waits; after an error, the exit
            status is 1.
        more: name -> object with a `state_dict()` of tensors and plain data, such as a schedule or a scaler. The state
            is the same on all ranks.

    Raises:
        Error: on every rank. It was called within a step, for example by the handler of a signal, or in another thread
            than the one that trains; a checkpoint of this step exists; another process saves into the folder; the
            folder cannot be written; the optimizer has parameters that are not the trainer's, state that is not shaped
            like its parameter, or state that belongs to no parameter; `more` differs between ranks; ranks that hold the
            same tensor hold different values; or the loss of a last step on a GPU was infinite or undefined.

    Example:
        `Regression` is a linear layer whose `forward(x, y)` returns the mean squared error.

        >>> trainer = autotp.distribute(Regression(), example_inputs=(torch.ones(2, 4), torch.ones(2, 1)))
        >>> optimizer = torch.optim.AdamW(trainer.parameters())
        >>> saving = autotp.save_checkpoint("ckpt", trainer, optimizer, step=100, wait=False)
        >>> saving.result()
        >>> autotp.load_checkpoint("ckpt", trainer, optimizer), trainer.steps
        (100, 100)
    """

    def run() -> Saving:
        _expect_trainer(trainer)
        _expect_between_steps("save_checkpoint")
        _expect_own_thread(trainer)
        # An error of the last save is raised on all ranks, before anything is written anew.
        agree(trainer.everyone, lambda: _finish(trainer))
        root = agree(trainer.everyone, lambda: _absolute(save_checkpoint, folder=folder, wait=wait))
        state = agree(trainer.everyone, lambda: state_to_write(root, trainer, optimizer, step, more))
        # 62 bits: ranks exchange signed integers of 64.
        mark = same_on_all(trainer, uuid4().int >> 66, step, zlib.crc32(json.dumps(state.more).encode()))
        path = path_of(root, step)
        # All ranks write into this folder: its name is the same on all, and no other save has it.
        unfinished = path.with_name(f".{path.name}.{mark:016x}{UNFINISHED}")
        trainer.saving = Saving(
            lambda: write_state(state, path, unfinished, BackgroundExchange(trainer.everyone, trainer.files))
        )
        return trainer.saving

    saving = within("save_checkpoint", run)
    if wait:
        within("save_checkpoint", lambda: _finish(trainer))
    return saving


def load_checkpoint(
    folder: str | Path,
    trainer: Trainer,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    changed: Collection[str] = (),
    **more: Any,
) -> int:
    """Loads the newest complete checkpoint in `folder`, and returns its step; returns 0 if there is no checkpoint.

    A checkpoint of any layout (tp, pp, dp) can be loaded in any other, bit for bit. No code of a checkpoint is run, and
    every byte that is read is compared with its checksum. Call it on every rank.

    Args:
        folder: the folder that `save_checkpoint` wrote into.
        trainer: a trainer of the same model. Random states are loaded only if the layout is the saved one.
        optimizer: an optimizer of the saved class, or a list of optimizers as it was saved; None loads no optimizer's
            state, for evaluation.
        changed: names of the model's attributes, such as "dropout", that may differ from the saved model's.
        more: name -> object with `load_state_dict` and `state_dict`, into which the state of this name is loaded.

    Raises:
        Error: on every rank, and nothing is changed: the checkpoint is another model's, damaged or of another format,
            the folder cannot be read, or it has checkpoints under other names only.

    Example:
        `Regression` is a linear layer whose `forward(x, y)` returns the mean squared error.

        >>> trainer = autotp.distribute(Regression(), example_inputs=(torch.ones(2, 4), torch.ones(2, 1)))
        >>> optimizer = torch.optim.AdamW(trainer.parameters())
        >>> autotp.load_checkpoint("empty", trainer, optimizer)
        0
    """

    def run() -> int:
        _expect_trainer(trainer)
        _expect_between_steps("load_checkpoint")
        _expect_own_thread(trainer)
        everyone = trainer.everyone

        def begin() -> tuple[Path, Optimizers]:
            _finish(trainer)
            root = _absolute(load_checkpoint, folder=folder, optimizer=optimizer, changed=changed)
            return root, optimizers_of(optimizer)

        def arguments(begun: tuple[Path, Optimizers]) -> list[Fact]:
            names, fix = [begun[1].name, sorted(more), sorted(changed)], "the same arguments of load_checkpoint"
            return [Fact("arguments", names, "loads something else", f"{fix} on all ranks")]

        root, optimizers = agree(everyone, begin, arguments)
        # The first rank's list decides: on another machine it may lag behind.
        step = told(everyone, lambda: _newest_step(root) if everyone.rank == 0 else -1)[0]
        if step < 0:
            return 0
        path = path_of(root, step)
        manifest = agree(everyone, lambda: _unless_removed(path, lambda: read_manifest(path)))
        expect_same_files(manifest, trainer)
        parts = holdings_of(trainer, "load_checkpoint")
        expect_all_saved(parts)
        agree(everyone, lambda: expect_same_training(manifest, trainer, parts, optimizers, more, changed))
        # Before reading, as an owner reads its states.
        optimizers.choose_owners()
        groups = parameter_of_groups(optimizers, parts, everyone)
        saved = agree(
            everyone,
            lambda: _unless_removed(path, lambda: read_state(manifest, trainer, parts, optimizers, more, groups)),
        )
        if optimizers.each and (unread := sorted(set(manifest.about["more"]) - set(more))):
            ignored = f"{path} also has {', '.join(unread)}, which is not loaded"
            warnings.warn(f"{ignored}: load_checkpoint(..., {unread[0]}=...)", stacklevel=4)
        if optimizers.each and (left_out := unread_state(manifest, optimizers, parts)):
            ignored = f"{path} also has the optimizer's state of {names_as_text(left_out)}, which is not loaded"
            warnings.warn(
                f"{ignored}: these parameters are not in the optimizer. Give them to it, if they are to be trained",
                stacklevel=4,
            )
        # First, as these may refuse their states: then nothing else has changed.
        load_more(more, saved.more, trainer)
        load_state(saved, trainer, parts, optimizers)
        trainer.steps = manifest.about["step"]
        # Losses that are still on their way were of the state that is replaced.
        trainer.late.forget()
        return step

    return within("load_checkpoint", run)


def _expect_trainer(trainer: object) -> None:
    if not isinstance(trainer, Trainer):
        raise Error(
            f"a {type(trainer).__name__} in place of a trainer of autotp.distribute",
            fix="trainer = autotp.distribute(model, tp=...), whose state is all that training needs",
            alternative=(
                "accelerate's Accelerator().prepare(model, optimizer), with its save_state and load_state",
                "autotp.full_state_dict(model), autotp.save_pretrained(model, folder): the parameters alone",
            ),
        )


def _expect_between_steps(call: str) -> None:
    """Raises Error in a step or another public call: there a signal's handler or a hook may run at any time.

    Only some of the parameters may be changed then, or another save may be under way.

    It does not wait for the other ranks: the handler may run on this rank alone, between two collectives of the step.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name in ("step", "evaluate"))
    owners = [(frame.f_locals.get("self"), frame.f_code.co_name) for frame in frames]
    steps = [f"{type(owner).__name__}.{name}" for owner, name in owners if isinstance(owner, Optimizer | Trainer)]
    inside = steps[0] if steps else call_in_progress()
    if inside != call or is_within_a_call():
        remedy = f"set a flag in the signal's handler or in the hook, and call {call} after the step, on all ranks"
        raise Error(f"it was called in {inside}, which was not at its end", fix=remedy)


def _expect_own_thread(trainer: Trainer) -> None:
    """Raises Error if another thread trains, which may change parameters meanwhile: the state would be of two steps."""
    owner, now = trainer.thread, threading.current_thread()
    if owner is not None and owner is not now and owner.is_alive():
        raise Error(
            f"thread {now.name!r} called it, and thread {owner.name!r} trains",
            fix="call it in the thread that trains; save_checkpoint(..., wait=False) writes while training goes on",
        )
    trainer.thread = now


def _absolute(function: Callable[..., Any], folder: str | Path, **arguments: Any) -> Path:
    """Returns the folder as an absolute path: the program may change its folder while a thread still writes.

    Raises:
        Error: the folder or another argument is not what the function takes; or the present folder was removed.
    """
    expect_arguments(function, folder=folder, **arguments)
    try:
        return Path(folder).absolute()
    except OSError as error:
        raise _unreadable(Path(folder), error) from error


def _unless_removed(path: Path, run: Callable[[], T]) -> T:
    """Returns what `run`, which reads a checkpoint, returns; if the folder was removed meanwhile, its Error says so."""
    try:
        return run()
    except Error as error:
        # The file existed when the manifest was read.
        if isinstance(error.__cause__, FileNotFoundError) or not _has_manifest(path):
            remedy = "load_checkpoint again: it takes the newest that is there"
            raise Error(f"{path} was removed while it was read", fix=remedy) from error
        raise


def saved_steps(folder: str | Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in order; an empty list if the folder does not exist.

    Raises:
        Error: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(Path(folder), error) from error
    digits = (name.removeprefix("step-") for name in names if re.fullmatch(r"step-[0-9]{8,19}", name))
    steps = sorted({int(text) for text in digits if int(text) < STEPS})
    # A name with more zeros than `path_of` writes is not a checkpoint's.
    return [
        step for step in steps if path_of(Path(), step).name in names and _has_manifest(path_of(Path(folder), step))
    ]


def _newest_step(folder: Path) -> int:
    """Returns the step of the newest complete checkpoint in a folder, -1 if there is none.

    Raises:
        Error: a later one lost its manifest (an unfinished save has another name, so its folder was complete once); or
            there are only checkpoints under other names.
    """
    newest = max([-1, *saved_steps(folder)])
    for path in folder.glob("step-*"):
        digits = path.name.removeprefix("step-")
        later = digits.isdecimal() and int(digits) > newest
        # A link to a folder that is gone was a checkpoint, too.
        dangling = path.is_symlink() and not path.exists()
        if later and not _has_manifest(path) and (dangling or any(path.glob("*.tensors"))):
            raise Error(
                f"{path / MANIFEST} is missing",
                fix="put the file back, or move the folder away, so that an earlier step is loaded",
            )
    if newest < 0:
        _expect_no_other_name(folder)
    return newest


def _expect_no_other_name(folder: Path) -> None:
    """Raises Error if a folder is a checkpoint, or holds checkpoints under other names: a training would begin anew."""
    if _has_manifest(folder):
        raise Error(f"{folder} is a checkpoint", fix=f"the folder above: load_checkpoint({str(folder.parent)!r}, ...)")
    misnamed = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir() and _has_manifest(path))
    if misnamed:
        was = f"the name that `save_checkpoint` gave it, such as {path_of(Path(), 1000).name}"
        raise Error(f"{folder} has checkpoints under other names: {names_as_text(misnamed)}", fix=was)


def _has_manifest(path: Path) -> bool:
    """Whether the folder of a checkpoint has a manifest; it is not read."""
    for name in (MANIFEST, OF_FORMAT_1):
        try:
            os.lstat(path / name)
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(path, error) from error
    return False


def _unreadable(path: Path, error: OSError) -> Error:
    return Error(f"{path} cannot be read: {error.strerror}", fix="the folder that was saved into")


# ---- a save that is under way


class Saving(Future[None]):
    """A save in a separate thread; the program waits for it before it ends.

    `result` raises the save's error. If nobody calls `result`, the error is printed at the end of the program, and the
    exit status is 1.

    Attributes:
        told: whether `result` has raised the error.
    """

    told = False

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        # `atexit` does nothing in a process that multiprocessing forked; `Finalize` works in every process.
        self._at_end = Finalize(None, self._exit_after_error, exitpriority=0)
        self._thread = threading.Thread(target=self._run, args=(run,), name="autotp.save_checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # At the end of a program, Python 3.12 starts no more threads.
            self._run(run)

    def result(self, timeout: float | None = None) -> None:
        """Waits for the save, and raises its error."""
        try:
            super().result(timeout)
        finally:
            if self.done():
                self.told = self.exception() is not None
                self._join()
                # The error is told, so the end of the program need not wait for this save.
                self._at_end.cancel()

    def _join(self) -> None:
        """Waits until the thread has freed what it saved: a thread that frees tensors while Python ends aborts it."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self.set_exception(error)
        except BaseException as error:
            # A KeyboardInterrupt of this thread must not end later calls on this rank alone.
            interrupted = Error(f"the save was interrupted: {type(error).__name__}", fix="save again")
            interrupted.__cause__ = error
            self.set_exception(interrupted)
        else:
            self.set_result(None)

    def _exit_after_error(self) -> None:
        """Ends the program if the save failed: an exception at this time would not change its exit status."""
        problem = self.exception()
        self._join()
        if problem:
            traceback.print_exception(problem)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _finish(trainer: Trainer) -> None:
    """Waits for the save that is under way, and raises its error, unless it was raised before."""
    saving, trainer.saving = trainer.saving, None
    if isinstance(saving, Saving) and not saving.told:
        saving.result()
