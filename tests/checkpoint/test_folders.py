"""The folder that a program means: also if it moves meanwhile, or renames what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from small_models import Regression

import autotp
from autotp.checkpoint.save import Saving


@pytest.fixture
def training() -> Iterator[tuple[autotp.Trainer, Any]]:
    trainer = autotp.distribute(Regression(), example_inputs=torch.ones(2, 4))
    yield trainer, torch.optim.SGD(trainer.parameters(), lr=0.1)
    dist.destroy_process_group()


def test_save_checkpoint_writes_where_the_program_was_when_called(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    run = Saving._run

    def moved(saving: Saving, write: Any) -> None:
        monkeypatch.chdir(there)
        run(saving, write)

    monkeypatch.setattr(Saving, "_run", moved)
    autotp.save_checkpoint("ckpt", *training, 1)
    assert (here / "ckpt" / "step-00000001").exists() and not list(there.iterdir())


def test_checkpoints_in_a_removed_working_folder_are_refused(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for call in (
        lambda: autotp.save_checkpoint("ckpt", *training, 1),
        lambda: autotp.load_checkpoint("ckpt", *training),
    ):
        assert "ckpt cannot be read: No such file or directory" in message(call)


def test_save_checkpoint_tells_of_a_name_too_long(training: Any) -> None:
    assert "File name too long" in message(lambda: autotp.save_checkpoint("x" * 300, *training, 1))


def test_load_checkpoint_names_checkpoints_that_were_renamed(training: Any, tmp_path: Path) -> None:
    """No training begins anew where somebody moved its checkpoints."""
    autotp.save_checkpoint(tmp_path, *training, 1)
    step = tmp_path / "step-00000001"
    assert f"{step} is a checkpoint\n  try      the folder above" in message(
        lambda: autotp.load_checkpoint(step, *training)
    )
    step.rename(tmp_path / "best")
    assert "has checkpoints under other names: best" in message(lambda: autotp.load_checkpoint(tmp_path, *training))
    autotp.save_checkpoint(tmp_path, *training, 2)
    assert autotp.load_checkpoint(tmp_path, *training) == 2
    (tmp_path / "step-00000003").symlink_to(tmp_path / "nowhere")
    assert "step-00000003/manifest.json is missing" in message(lambda: autotp.load_checkpoint(tmp_path, *training))


def test_save_checkpoint_tells_that_its_thread_was_interrupted(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotp.checkpoint.save.write_state", interrupted)
    assert "the save was interrupted: KeyboardInterrupt" in message(
        lambda: autotp.save_checkpoint(tmp_path, *training, 1)
    )
