"""Locks a folder for one job; a second job gets an Error that names the first."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

from autotp.errors import Error

LOCK = ".lock"
HELD: dict[tuple[int, Path], int] = {}
"""NOTE [Locks] The locks of this process, by its id. The system's record locks are a process's, end with it however it
ends, and are not a forked child's; they would end, too, when any opening of their file is closed: so none ever is."""


def claim(folder: Path) -> bool:
    """Makes a folder this process's own to write into, until it ends; True if it was not before.

    Raises:
        Error: another process that lives writes into it.
        OSError: as the file system says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, key = folder / LOCK, (os.getpid(), folder.resolve())
    if key in HELD and _lies(HELD[key], file):
        return False
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    if not _locked(opened, folder):
        return False
    if not _lies(opened, file):  # It was removed since: who looks for it now makes another.
        os.close(opened)
        return claim(folder)
    os.ftruncate(opened, 0)
    os.write(opened, f"process {os.getpid()} on {socket.gethostname()}".encode())
    HELD[key] = opened
    return True


def _lies(opened: int, file: Path) -> bool:
    """Whether what is open is what lies there."""
    return file.exists() and os.path.samestat(os.fstat(opened), file.stat())


def _locked(opened: int, folder: Path) -> bool:
    """True once the lock is this process's; False, with a warning, where there are none."""
    try:
        import fcntl

        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.read(opened, 200).decode(errors="replace") or "another process"
        os.close(opened)
        raise Error(f"{owner} saves into {folder}", fix="another folder, or end it") from error
    except (ImportError, OSError) as error:
        os.close(opened)
        warnings.warn(f"{folder} cannot be locked ({error}): see to it that one job saves there", stacklevel=2)
        return False
    return True
