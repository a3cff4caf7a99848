"""folder_lock: one job has a folder, until its process ends; a second one is told which."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from errors import message

from autotp.checkpoint.files.folder_lock import LOCK, claim

CLAIM = """
import pathlib, sys
from autotp.checkpoint.files.folder_lock import claim
claim(pathlib.Path(sys.argv[1]))
print(flush=True)
input()
"""


def other(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Another process that claims the folder, and ends."""
    return subprocess.run([sys.executable, "-c", CLAIM, str(folder)], input=b"\n", capture_output=True, timeout=60)


def test_claim_takes_a_folder_once_among_processes(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert claim(folder)
    assert not claim(folder), "this process has it already"
    found = other(folder)
    assert found.returncode == 1 and f"process {os.getpid()} on " in found.stderr.decode()


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    assert other(tmp_path).returncode == 0
    assert claim(tmp_path)


def test_claim_survives_removal_of_the_lock_file_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked then is no file that another process would find."""
    lock = fcntl.lockf

    def late(*given: Any) -> None:
        monkeypatch.undo()
        (tmp_path / ".lock").unlink()
        lock(*given)

    monkeypatch.setattr(fcntl, "lockf", late)
    assert claim(tmp_path)
    other = subprocess.run([sys.executable, "-c", CLAIM, str(tmp_path)], input=b"\n", capture_output=True)
    assert other.returncode == 1 and f"process {os.getpid()} on " in other.stderr.decode()


def test_claim_names_the_process_that_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).write_text("process 7 on there")
    monkeypatch.setattr(fcntl, "lockf", fails(errno.EAGAIN))
    assert message(lambda: claim(tmp_path)) == (
        f"process 7 on there saves into {tmp_path}\n  try      another folder, or end it"
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", ["link", "dangling", "hard", "pipe"])
def test_claim_never_writes_through_links_or_pipes(how: str, tmp_path: Path) -> None:
    """A folder from somebody else may lead to a file of this user."""
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    if how != "dangling":
        file.write_text("precious")
    make = {"hard": lambda lock: os.link(file, lock), "pipe": os.mkfifo}
    make.get(how, lambda lock: lock.symlink_to(file))(folder / LOCK)
    text = f"{folder / LOCK} is no lock of autotp: it would be overwritten\n  try      remove it"
    assert message(lambda: claim(folder)) == text
    assert not file.exists() if how == "dangling" else file.read_text() == "precious"


def test_claim_warns_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", fails(errno.ENOLCK))
    with pytest.warns(UserWarning, match=f"^{tmp_path} cannot be locked .*: see to it that one job saves there$"):
        assert not claim(tmp_path)


def fails(number: int) -> Any:
    def lock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return lock
