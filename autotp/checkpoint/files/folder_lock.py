"""Locks a folder for one job; a second job gets an Error that names the first."""

from __future__ import annotations

import os
import re
import socket
import stat
import warnings
from pathlib import Path

from autotp.errors import Error

LOCK = ".lock"
NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""A link is not followed, and nobody waits for a pipe."""
HELD: dict[tuple[int, Path], int] = {}
"""NOTE [Locks] (process id, folder) -> the open lock file. A record lock of the system belongs to one process: it ends
with the process, however this ends, and a forked child does not have it. It also ends when the process closes any file
descriptor of the file. So no descriptor of a held lock is ever closed."""


def claim(folder: Path) -> bool:
    """Locks a folder for this process until it ends; returns whether the lock is new.

    Raises:
        Error: another running process holds the lock, or `.lock` is no lock.
        OSError: the file system fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, key = folder / LOCK, (os.getpid(), folder.resolve())
    if key in HELD and _is_file_at(HELD[key], file):
        return False
    opened = _opened(file)
    if not _lock(opened, folder):
        return False
    if not _is_file_at(opened, file):  # Another process removed the file meanwhile: lock the new file.
        os.close(opened)
        return claim(folder)
    # Only with the lock may the name in the file be replaced.
    os.ftruncate(opened, 0)
    os.lseek(opened, 0, os.SEEK_SET)
    os.write(opened, f"process {os.getpid()} on {socket.gethostname()}".encode())
    HELD[key] = opened
    return True


def _opened(file: Path) -> int:
    """Opens a lock file; makes it if there is none. A file that somebody linked to this name must not be overwritten.

    Raises:
        Error: it is a link, or has the content of something else.
    """
    if not file.is_symlink():
        # Not truncated: it may be the lock of a job that runs.
        opened = os.open(file, os.O_RDWR | os.O_CREAT | NO_WAIT, 0o666)
        if stat.S_ISREG(os.fstat(opened).st_mode) and re.match(rb"process \d|\Z", os.read(opened, 200)):
            return opened
        os.close(opened)
    raise Error(f"{file} is no lock of autotp: it would be overwritten", fix="remove it")


def _is_file_at(opened: int, file: Path) -> bool:
    """Whether an open file is the file of this name."""
    return file.exists() and os.path.samestat(os.fstat(opened), file.stat())


def _lock(opened: int, folder: Path) -> bool:
    """Returns True if this process has the lock; False, with a warning, if the file system has no locks."""
    try:
        import fcntl

        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.pread(opened, 200, 0).decode(errors="replace") or "another process"
        os.close(opened)
        raise Error(f"{owner} saves into {folder}", fix="another folder, or end it") from error
    except (ImportError, OSError) as error:
        os.close(opened)
        warnings.warn(f"{folder} cannot be locked ({error}): see to it that one job saves there", stacklevel=2)
        return False
    return True
