"""Replaces a folder in one step: a reader sees the old folder or the new folder, never a mixture.

Before: out/ with a checkpoint, or no out/
After:  out/ with the new files in place of the old ones; files that are not of the checkpoint stay
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of fcntl.h and linux/fs.h


@contextmanager
def new_folder(folder: Path, is_replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Yields an empty folder next to `folder`, to be filled; at the end of the block it replaces `folder`.

    If the block raises an exception, or the process dies, `folder` is unchanged. On Linux the two folders exchange
    their names in one step. Elsewhere there are two renames, and between them no folder has the name of `folder`.

    Args:
        is_replaced: whether an entry of the old folder is replaced; other entries move into the new folder, if their
            names are free there.

    Raises:
        OSError: the file system fails.
    """
    # A link stays: the folder that it leads to is replaced.
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file")
    if folder.is_mount():
        raise OSError(errno.EBUSY, "a mount point cannot be replaced as a whole; a folder in it can", str(folder))
    sibling = folder.parent / f".{folder.name}.{uuid4().hex[:8]}.new"
    sibling.mkdir()
    try:
        if folder.exists():
            sibling.chmod(folder.stat().st_mode)
        yield sibling
        # On the disk before the exchange: after a crash the name must not lead to files that are not whole.
        for path in (*sibling.rglob("*"), sibling):
            sync_path(path)
        if replaces := folder.exists():
            _exchange(folder, sibling)
        else:
            sibling.rename(folder)
    except BaseException:
        shutil.rmtree(sibling, ignore_errors=True)
        raise
    if replaces:
        _clear(sibling, folder, is_replaced)  # After the exchange `sibling` has the old content.
    sync_path(folder.parent)


def _clear(old: Path, folder: Path, is_replaced: Callable[[str], bool]) -> None:
    """Moves entries that are not replaced into the new folder, and removes the old folder.

    If an entry cannot be moved, all are moved back, and `folder` is the old folder again.
    """
    moved = list[str]()
    try:
        for entry in list(old.iterdir()):
            if not is_replaced(entry.name) and not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
                moved.append(entry.name)
    except OSError:
        for name in moved:
            (folder / name).rename(old / name)
        _exchange(folder, old)
        shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        warnings.warn(
            f"of what {folder} held before, {old} is left: it cannot be removed. Remove it by hand", stacklevel=2
        )


def sync_path(path: Path) -> None:
    """Returns once a file's content, or a folder's list of names, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _exchange(a: Path, b: Path) -> None:
    """Exchanges the names of two folders: in one step if the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 and renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return
    aside = b.with_suffix(".old")
    a.rename(aside)
    try:
        b.rename(a)
    except OSError:
        aside.rename(a)
        raise
    aside.rename(b)
