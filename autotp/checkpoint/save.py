"""save_checkpoint and load_checkpoint: every rank writes its part of a training, and any layout reads it.

Each rank writes the boxes of the whole tensors that it holds (`boxes.py`, `tensor_pieces.py`) into a folder of another
name; once all have, the first rank writes what there is and its checksums (`manifest.py`), and gives the folder its
name. What reads them takes from each file the boxes that it needs. All that is read is tensors and plain data
(`plain_json.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from torch.optim import Optimizer

from autotp.checkpoint.keys import NOTHING, STEPS, path_of
from autotp.checkpoint.manifest import MANIFEST, OF_FORMAT_1, read_manifest
from autotp.checkpoint.read import expect_one, expect_same, load_more, put, read
from autotp.checkpoint.write import UNFINISHED, begun, same_on_all, write
from autotp.distributed.background_exchange import BackgroundExchange
from autotp.distributed.consistency import agree
from autotp.distributed.mesh import expect_alike, gather_ints
from autotp.errors import Error, within
from autotp.runtime.holdings import expect_all_saved, holdings_of
from autotp.training.trainer import Trainer

T = TypeVar("T")


def save_checkpoint(
    folder: str | Path, trainer: Trainer, optimizer: Optimizer, step: int, *, wait: bool = True, **more: Any
) -> Future[None]:
    """Writes a training's state into `folder/step-00000100`, and returns a future of the save.

    The state is the parameters, the optimizer's state, the random states, and `more`. Nothing is overwritten, and a
    save that fails leaves no folder of this name. From its first save until it ends, the first rank's process has
    `folder` to itself. Call it on every rank.

    Args:
        folder: the folder of the checkpoints; it is made if it does not exist.
        trainer: as `distribute` returned it.
        optimizer: of the trainer's parameters.
        step: the number of steps done.
        wait: False copies the state to the CPU, and writes while training goes on. The next save and `.result()` of the
            future wait for the writing and raise its error. So does the end of the program, with exit status 1.
        more: name -> object with a `state_dict()` of tensors and plain data, the same on all ranks: a schedule, a
            scaler.

    Raises:
        Error: on every rank. A checkpoint of this step exists; another process saves into the folder; the folder cannot
            be written; the optimizer has other parameters, state of other shapes than theirs, or state of its own;
            `more` differs between ranks; or ranks that hold the same tensor hold different values.

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
        _finish(trainer)
        state = agree(trainer.everyone, lambda: begun(Path(folder), trainer, optimizer, step, more))
        mark = same_on_all(trainer, uuid4().int >> 66, step, zlib.crc32(json.dumps(state.more).encode()))
        path = path_of(Path(folder), step)
        new = path.with_name(f".{path.name}.{mark:016x}{UNFINISHED}")
        trainer.saving = Saving(lambda: write(state, path, new, BackgroundExchange(trainer.everyone, trainer.files)))
        return trainer.saving

    saving = within("save_checkpoint", run)
    if wait:
        within("save_checkpoint", lambda: _finish(trainer))
    return saving


def load_checkpoint(
    folder: str | Path,
    trainer: Trainer,
    optimizer: Optimizer | None = None,
    *,
    changed: Collection[str] = (),
    **more: Any,
) -> int:
    """Loads the newest whole checkpoint in `folder`, and returns its step; returns 0 where there is no checkpoint.

    Any layout (tp, pp, dp) reads what any other wrote, bit for bit. No code of a checkpoint is run, and every byte that
    is read is compared with its checksum. Call it on every rank.

    Args:
        folder: the folder that `save_checkpoint` wrote into.
        trainer: of the same model. Random states are loaded only where the layout is the one that was saved.
        optimizer: of the class that was saved; None loads no optimizer's state, to evaluate.
        changed: names of the model's attributes, such as "dropout", that may differ from the saved model's.
        more: name -> object to load what was saved under this name; it has `load_state_dict` and `state_dict`.

    Raises:
        Error: on every rank, and nothing is changed: the checkpoint is another model's, damaged or of another format,
            or the folder cannot be read.

    Example:
        `Regression` is a linear layer whose `forward(x, y)` returns the mean squared error.

        >>> trainer = autotp.distribute(Regression(), example_inputs=(torch.ones(2, 4), torch.ones(2, 1)))
        >>> optimizer = torch.optim.AdamW(trainer.parameters())
        >>> autotp.load_checkpoint("empty", trainer, optimizer)
        0
    """
    learning: Any = NOTHING if optimizer is None else optimizer

    def run() -> int:
        _expect_trainer(trainer)
        _finish(trainer)
        everyone = trainer.everyone
        asked = type(optimizer).__name__, sorted(more), sorted(changed)
        expect_alike(asked, everyone, "loads something else", "the same arguments of load_checkpoint")
        # The first rank's list decides: on another machine it may lag behind.
        newest = agree(everyone, lambda: max([-1, *saved_steps(folder)]) if everyone.rank == 0 else -1)
        step = gather_ints([newest], everyone)[0][0]
        if step < 0:
            return 0
        path = path_of(Path(folder), step)
        manifest = agree(everyone, lambda: _staying(path, lambda: read_manifest(path)))
        expect_one(manifest, trainer)
        parts = holdings_of(trainer, "load_checkpoint")
        expect_all_saved(parts)
        agree(everyone, lambda: expect_same(manifest, trainer, parts, learning, more, changed))
        found = agree(everyone, lambda: _staying(path, lambda: read(manifest, trainer, parts, learning, more)))
        load_more(more, found.more, trainer)
        put(found, trainer, parts, learning)
        trainer.steps = manifest.about["step"]
        return step

    return within("load_checkpoint", run)


def _expect_trainer(given: object) -> None:
    if not isinstance(given, Trainer):
        raise Error(
            f"a {type(given).__name__} in place of a trainer of autotp.distribute",
            fix="trainer = autotp.distribute(model, tp=...), whose state is all that training needs",
            alternative="autotp.full_state_dict(model), autotp.save_pretrained(model, folder): the parameters alone",
        )


def _staying(path: Path, run: Callable[[], T]) -> T:
    """What `run` returns, which reads a checkpoint. Where it fails and the folder is not whole, Error says so."""
    try:
        return run()
    except Error as error:
        # It was there when the manifest was compared with it.
        if isinstance(error.__cause__, FileNotFoundError) or not _is_whole(path):
            remedy = "load_checkpoint again: it takes the newest that is there"
            raise Error(f"{path} was removed while it was read", fix=remedy) from error
        raise


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, in order; none where it does not exist.

    Raises:
        Error: it cannot be read.
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
    # With more zeros than we write it is the name of something else.
    return [step for step in steps if path_of(Path(), step).name in names and _is_whole(path_of(Path(folder), step))]


def _is_whole(path: Path) -> bool:
    """Whether there is a manifest. That it can be read is seen when it is."""
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
    """A save in a thread of its own, for which the program waits before it ends.

    What went wrong is told to whoever asks for the result; if nobody has at the end of the program, it ends in 1.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        # Python's atexit calls nothing in a process that multiprocessing forked; this does, and in all others.
        self._at_end = Finalize(None, self._expect_told, exitpriority=0)
        threading.Thread(target=self._run, args=(run,), name="autotp.save_checkpoint").start()

    def result(self, timeout: float | None = None) -> None:
        """Waits, and raises what went wrong."""
        try:
            super().result(timeout)
        finally:
            if self.done():
                self._at_end.cancel()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.set_exception(error)
        else:
            self._at_end.cancel()
            self.set_result(None)

    def _expect_told(self) -> None:
        """Ends the program if the save failed: an exception at this time would not change its exit status."""
        if problem := self.exception():
            traceback.print_exception(problem)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _finish(trainer: Trainer) -> None:
    """Waits for the save that is under way, and raises what went wrong."""
    saving, trainer.saving = trainer.saving, None
    if saving is not None:
        saving.result()
