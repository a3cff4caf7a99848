"""atomic_folder: whoever looks, and whenever the process died, a folder is the old one or the new one."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from autotp.checkpoint.files import atomic_folder as module
from autotp.checkpoint.files.atomic_folder import new_folder

OLD, NEW = {"model": "old", "index": "old"}, {"model": "new"}
FOREIGN = {"notes": "mine"}


def ours(name: str) -> bool:
    return name in OLD


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


def test_replaced_shows_a_new_folder_only_when_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "out", ours) as new:
        fill(new, NEW)
        assert not (tmp_path / "a" / "out").exists()
    assert content(tmp_path / "a" / "out") == NEW
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "renames"])
def test_replaced_keeps_foreign_files_and_mode_of_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(module.sys, "platform", "elsewhere")
    out = tmp_path / "out"
    fill(out, OLD | FOREIGN)
    (out / "runs").mkdir()
    fill(out / "runs", FOREIGN)
    out.chmod(0o750)
    with new_folder(out, ours) as new:
        fill(new, NEW)
        assert content(out) == OLD | FOREIGN
    assert content(out) == NEW | FOREIGN and content(out / "runs") == FOREIGN
    assert out.stat().st_mode & 0o777 == 0o750
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_replaced_prefers_the_new_file_of_a_shared_name(tmp_path: Path) -> None:
    fill(tmp_path / "out", {"config": "old"})
    with new_folder(tmp_path / "out", ours) as new:
        fill(new, {"config": "new"})
    assert content(tmp_path / "out") == {"config": "new"}


def test_replaced_leaves_the_old_folder_after_a_failure(tmp_path: Path) -> None:
    fill(tmp_path / "out", OLD)
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out", ours) as new:
        fill(new, NEW)
        raise ZeroDivisionError
    assert content(tmp_path / "out") == OLD
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "renames"])
def test_replaced_leaves_the_old_folder_if_a_file_cannot_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """As a mount point in the folder: with it all other files of the user stay where they were."""
    if not exchange:
        monkeypatch.setattr(module.sys, "platform", "elsewhere")
    out, rename = tmp_path / "out", Path.rename
    fill(out, OLD | {name: name for name in "abcdefgh"})

    def renamed(self: Path, target: Path) -> Path:
        if self.name == last and target.parent == out:
            raise OSError(errno.EBUSY, "busy")
        return rename(self, target)

    last = [entry.name for entry in out.iterdir() if not ours(entry.name)][-1]
    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(OSError, match="busy"), new_folder(out, ours) as new:
        fill(new, NEW)
    assert content(out) == OLD | {name: name for name in "abcdefgh"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_replaced_refuses_mount_points_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left beside it; a mount point, as a container's volume, is refused before anything is written."""
    out = tmp_path / "out"
    fill(out, OLD)

    def busy(*paths: Path) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(module, "_exchange", busy)
    with pytest.raises(OSError, match="busy"), new_folder(out, ours) as new:
        fill(new, NEW)
    monkeypatch.setattr(Path, "is_mount", lambda self: self == out)
    with pytest.raises(OSError, match="a mount point cannot be replaced"), new_folder(out, ours):
        raise AssertionError("it was begun")
    assert content(out) == OLD and [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_replaced_follows_a_link_which_stays_a_link(tmp_path: Path) -> None:
    fill(tmp_path / "there", OLD)
    (tmp_path / "out").symlink_to(tmp_path / "there")
    with new_folder(tmp_path / "out", ours) as new:
        fill(new, NEW)
    assert (tmp_path / "out").is_symlink() and content(tmp_path / "there") == NEW


def test_replaced_refuses_a_file_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(NotADirectoryError), new_folder(tmp_path / "out", ours):
        pass
    assert (tmp_path / "out").read_text() == "precious"


# The module alone, so that a process takes no second to start; it ends without a word at a given event.
DYING = """
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("folder", sys.argv[1])
folder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder)
left = int(sys.argv[3])
def count(event, args):
    global left
    if event.split(".")[0] in ("os", "open", "shutil", "ctypes"):
        left -= 1
        if left == 0:
            os._exit(9)
sys.addaudithook(count)
with folder.new_folder(pathlib.Path(sys.argv[2]), lambda name: name in ("model", "index")) as new:
    (new / "model").write_text("new")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a moment between two renames")
def test_replaced_killed_at_any_moment_leaves_old_or_new(tmp_path: Path) -> None:
    seen = []
    for event in range(1, 100):
        out = tmp_path / str(event) / "out"
        out.parent.mkdir()
        fill(out, OLD | FOREIGN)
        command = [sys.executable, "-c", DYING, module.__file__, str(out), str(event)]
        died = subprocess.run(command, timeout=60).returncode
        found = content(out)
        checkpoint = {name: text for name, text in found.items() if ours(name)}
        assert checkpoint in (OLD, NEW), (event, found)
        everywhere = [file.read_text() for file in out.parent.rglob("notes")]
        assert everywhere == ["mine"]
        seen.append(checkpoint)
        if died == 0:
            break
    assert died == 0 and found == NEW | FOREIGN
    assert seen[0] == OLD and seen == sorted(seen, key=lambda files: files == NEW)
